"""Global layouts: a tensor as explicit kernels see it, with one TMA descriptor for each kind of tile piece."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import from_torch, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.types.scales import scale_tile
from tritonkittens.lang.types.tiles import by_rows, st, sv
from tritonkittens.lang.types.tiles import split as split_extent
from tritonkittens.launch import TensorMapSpec

MAX_RANK = 5
PIECE = 16  # bytes that one thread moves at once


class GlobalLayout(NamedTuple):
    """The kernel arguments that a `gl` turns into: TMA descriptors, a pointer, extents and strides.

    Extents and strides are in elements. They are empty where a descriptor carries them.

    Args:
        maps: the TMA descriptors, one for each kind of tile piece.
        pointer: the address of element 0.
        shape: the extents.
        strides: the strides. A last stride of 1 is None, which compiles the kernel for contiguous columns.
        even: None where no 16-byte piece of a row crosses an edge of the tensor. None is part of the compile key too.
        parameter: the number of the kernel parameter that holds the first descriptor.
        fixed: (extents, strides) that the kernel is compiled for. A run-time value has None in its place.
        ragged: None where the descriptors are made for sequences.
    """

    maps: Traced
    pointer: Traced
    shape: Traced = ()
    strides: Traced = ()
    even: Traced = ()
    parameter: Traced = ()
    fixed: Traced = ()
    ragged: Traced = ()

    @property
    def of_one_tensor(self) -> bool:
        """Whether messages name the tensor instead of a field."""
        return True


@functools.lru_cache(maxsize=1024)
def map_specs(
    tiles: tuple[st | sv | by_rows, ...], rank: int, fill: str, ragged: bool = False
) -> tuple[TensorMapSpec, ...]:
    """Return the TMA descriptors for these tile types: one for each different power-of-two piece."""
    specs: dict[TensorMapSpec, None] = {}
    if ragged and not (2 <= rank <= MAX_RANK - 2 and tiles and all(isinstance(tile, st) for tile in tiles)):
        what = ", ".join(map(repr, tiles)) or "no tile type"
        raise TileError(
            f"gl(…, ragged=True) of {rank} dimensions with {what}: takes two or three dimensions, and types of tiles "
            "(st)"
        )
    for tile in tiles:
        if isinstance(tile, st):
            if rank < 2:
                raise TileError(f"gl of a one-dimensional tensor with {tile!r}: tiles have rows and columns; use sv")
            for _, _, r, c in tile.pieces():
                lead = rank if ragged else rank - 2
                specs[TensorMapSpec((1,) * lead + (r, c), tile.piece_swizzle(c), fill, ragged)] = None
        elif isinstance(tile, by_rows) and rank == 2:
            for n in split_extent(tile.tile.cols):
                specs[TensorMapSpec((1, n), tile.tile.piece_swizzle(n), fill)] = None
        elif isinstance(tile, sv):
            for n in split_extent(tile.length):
                specs[TensorMapSpec((1,) * (rank - 1) + (n,), 0, fill)] = None
        elif isinstance(tile, scale_tile):
            if rank < len(tile.shape):
                raise TileError(
                    f"gl of {rank} dimensions with {tile!r}: scales are (…, blocks down, blocks across, 2, 256)"
                )
            specs[TensorMapSpec((1,) * (rank - len(tile.shape)) + tile.shape, 0, fill)] = None
        else:
            raise TileError(
                f"gl(…, {tile!r}): a global layout moves shared tiles and vectors (st, sv, scale_tile), and single "
                "rows of a matrix (by_rows)"
            )
    return tuple(specs)


def static_axes(static: bool | int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the dimensions that `static` names, counted from the first."""
    if isinstance(static, bool):
        return tuple(range(rank)) if static else ()
    axes = static if isinstance(static, tuple) else (static,)
    if not all(isinstance(axis, int) and not isinstance(axis, bool) and -rank <= axis < rank for axis in axes):
        raise TileError(f"gl(static={static!r}): must be True, False or dimensions from {-rank} to {rank - 1}")
    return tuple(sorted({axis % rank for axis in axes}))


class gl:
    """A tensor for an explicit kernel, with the TMA descriptors for its tile types.

    Args:
        tensor: a torch tensor of one to five dimensions. The last two are rows and columns. Leading ones (batch,
            depth) are counted in single steps.
        tiles: the tile types (`st`, `sv`, `by_rows`) that TMA moves, of the tensor's dtype. The last stride must then
            be 1 element and the others multiples of 16 bytes. Without tile types, any strides work; the kernel loads
            and stores registers.
        fill: the value that a load past the edge reads: "zero" or "nan".
        static: the dimensions whose extents and strides are constants of the kernel, or True for all. Other values
            compile another kernel.
        ragged: the tensor (two or three dimensions) holds sequences packed end to end along the rows. TMA then moves
            tiles (`st`) of a `tk.sequence`.

    Raises:
        TileError: for another rank, dtype or fill, or for tile types that do not fit the tensor.

    Example::

        kernel[grid](tk.gl(x, tk.st(tk.bf16, 64, 128)), tk.gl(y, static=(-2, -1)))
    """

    __slots__ = ("fill", "ragged", "specs", "static", "tensor", "tiles")

    def __init__(
        self,
        tensor: torch.Tensor,
        *tiles: st | sv | by_rows,
        fill: str = "zero",
        static: bool | int | tuple[int, ...] = False,
        ragged: bool = False,
    ):
        if not isinstance(tensor, torch.Tensor):
            raise TileError(f"gl({type(tensor).__name__}): needs a torch tensor")
        if not 1 <= tensor.ndim <= MAX_RANK:
            raise TileError(f"gl of shape {tuple(tensor.shape)}: needs one to {MAX_RANK} dimensions")
        try:
            dtype = from_torch(tensor.dtype)
        except TileError as error:
            raise TileError(f"gl of {error}") from None
        for tile in tiles:
            if tile.dtype != dtype:
                raise TileError(
                    f"gl of {name_of(from_torch(tensor.dtype))} with {tile!r}: the tile's element type must be the "
                    "tensor's"
                )
        if fill not in ("zero", "nan"):
            raise TileError(f"gl(fill={fill!r}): TMA fills with 'zero' or 'nan'; use a mask for anything else")
        self.tensor, self.tiles, self.fill = tensor, tiles, fill
        self.static = static_axes(static, tensor.ndim)
        if ragged and self.static:
            raise TileError("gl(static=…, ragged=True): extents of a ragged tensor are those of its sequences")
        self.ragged, self.specs = ragged, map_specs(tiles, tensor.ndim, fill, ragged)

    def of(self, tensor: torch.Tensor) -> gl:
        """Return this layout of another tensor, of the same dtype, extents and strides."""
        return gl(tensor, *self.tiles, fill=self.fill, static=self.static, ragged=self.ragged)

    def fixed(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Return (extents, strides) that the kernel is compiled for. A run-time value has None in its place."""
        extents, strides = self.tensor.shape, self.tensor.stride()
        return (
            tuple([n if axis in self.static else None for axis, n in enumerate(extents)]),
            tuple([n if axis in self.static else None for axis, n in enumerate(strides)]),
        )

    # triton.autotune reads the dtype for its key, and writes the tensor for `reset_to_zero` and `restore_value`.

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def zero_(self) -> None:
        self.tensor.zero_()

    def clone(self) -> torch.Tensor:
        return self.tensor.clone()

    def copy_(self, source: torch.Tensor) -> None:
        self.tensor.copy_(source)

    def plain(self) -> GlobalLayout:
        """Return the argument for an ordinary Triton kernel, also under its interpreter:
        `kernel[grid](tk.gl(x).plain())`.

        Such a kernel loads and stores registers only.
        """
        return GlobalLayout((), self.tensor, tuple(self.tensor.shape), tuple(self.tensor.stride()))


def rank_of(g: Traced) -> int:
    """Return the number of dimensions of a global layout inside a kernel."""
    return len(g.maps[0].shape) if len(g.maps) else len(g.shape)


def is_ragged(g: Traced) -> bool:
    """Whether the descriptors of a global layout inside a kernel are made for sequences."""
    return unwrap(getattr(g, "ragged", ())) is None


def fixed_of(g: Traced) -> tuple[tuple[int | None, ...], tuple[int | None, ...]] | None:
    """Return (extents, strides) that the kernel is compiled for, with None for run-time values. None where all are
    run-time values.
    """
    return unwrap(getattr(g, "fixed", ())) or None


def extents_of(g: Traced) -> list[Traced]:
    """Return the extents of a global layout inside a kernel: constants for static dimensions, int32 scalars for the
    others.
    """
    extents = list(g.maps[0].shape) if len(g.maps) else list(g.shape)
    fixed = fixed_of(g)
    if fixed is None:
        return extents
    return [tl.constexpr(constant) if constant is not None else extents[axis] for axis, constant in enumerate(fixed[0])]


def strides_of(g: Traced) -> list[Traced]:
    """Return the strides of a global layout inside a kernel, in elements: constants for static dimensions, else
    run-time values.

    The last stride is 1 where the compiler knows that.
    """
    strides = list(g.maps[0].strides) if len(g.maps) else list(g.strides)
    if len(g.maps) or unwrap(strides[-1]) is None:
        strides[-1] = 1
    fixed = fixed_of(g)
    if fixed is None:
        return strides
    return [constant if constant is not None else strides[axis] for axis, constant in enumerate(fixed[1])]


def is_even(g: Traced) -> bool:
    """Whether the compiler knows that no 16-byte piece of a row crosses an edge.

    This means `is_aligned`, and that the columns are a multiple of 16 bytes.
    """
    return unwrap(getattr(g, "even", ())) is None


def is_aligned(g: Traced) -> bool:
    """Whether the compiler knows that columns are contiguous and all other strides multiples of 16 bytes, as TMA
    descriptors need.
    """
    return len(g.maps) > 0 or is_even(g)


def even_rows(tensor: torch.Tensor) -> bool:
    """Whether all 16-byte pieces of the rows of a tensor start at multiples of 16 bytes and end inside."""
    *strides, last = tensor.stride()
    return last == 1 and not any(n * tensor.itemsize % PIECE for n in (*strides, tensor.shape[-1]))


def check_global(g: Traced, name: str) -> None:
    """Refuse anything but a global layout."""
    if not hasattr(g, "pointer") or not hasattr(g, "maps"):
        raise TileError(f"{name}: {g!r} is no global layout; pass tk.gl(tensor, tile types) to the kernel")


@op
def extent(t: Trace, g: Traced, axis: Traced) -> Traced:
    """Return the elements of a global layout along one axis.

    Args:
        g: a global layout of any dtype.
        axis: a compile-time integer. Negative axes count from the last.

    Returns:
        An int32 scalar, or a constant where the dimension is `static`.

    Raises:
        TileError: for an axis outside the tensor, or for the rows of a ragged layout, which no descriptor holds.
    """
    check_global(g, "extent")
    axis, rank = unwrap(axis), rank_of(g)
    if is_ragged(g):
        rank -= 2
        if axis in (-2, rank - 2):
            raise TileError(f"extent(axis={axis}): the rows of a ragged tensor are those of its sequences")
    if not -rank <= axis < rank:
        raise TileError(f"extent(axis={axis}): the tensor has {rank} dimensions")
    return extents_of(g)[-rank:][axis]
