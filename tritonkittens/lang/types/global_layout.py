"""Global layouts: a tensor as explicit kernels see it, with one TMA descriptor for each kind of tile piece that it moves."""
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import from_torch, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.types.tiles import split as split_extent
from tritonkittens.lang.types.tiles import st, sv
from tritonkittens.launch import TensorMapSpec

MAX_RANK = 5
PIECE = 16  # bytes that one thread moves at once


class GlobalLayout(NamedTuple):
    """What a kernel receives for a `gl`: descriptors and pointer; extents and strides (elements) where there is no descriptor to carry
    them.

    A last stride of 1 is None there, which the kernel is compiled for, and so is `even`: None where no 16-byte piece of a row crosses an
    edge. `parameter` is the number of the kernel parameter that the first descriptor is. `fixed` are the extents and strides that the
    kernel is compiled for, None in the place of those that it is not. `ragged` is None where the descriptors are made for sequences.
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
        """Messages name the tensor, not a field."""
        return True


@functools.lru_cache(maxsize=1024)
def map_specs(tiles: tuple[st | sv, ...], rank: int, fill: str, ragged: bool = False) -> tuple[TensorMapSpec, ...]:
    """The descriptors that the given tile types need: one for each different power-of-two piece."""
    specs: dict[TensorMapSpec, None] = {}
    if ragged and not (2 <= rank <= MAX_RANK - 2 and tiles and all(isinstance(tile, st) for tile in tiles)):
        what = ", ".join(map(repr, tiles)) or "no tile type"
        raise TileError(f"gl(…, ragged=True) of {rank} dimensions with {what}: takes two or three dimensions, and types of tiles (st)")
    for tile in tiles:
        if isinstance(tile, st):
            if rank < 2:
                raise TileError(f"gl of a one-dimensional tensor with {tile!r}: tiles have rows and columns; use sv")
            for _, _, r, c in tile.pieces():
                lead = rank if ragged else rank - 2
                specs[TensorMapSpec((1,) * lead + (r, c), tile.piece_swizzle(c), fill, ragged)] = None
        elif isinstance(tile, sv):
            for n in split_extent(tile.length):
                specs[TensorMapSpec((1,) * (rank - 1) + (n,), 0, fill)] = None
        else:
            raise TileError(f"gl(…, {tile!r}): a global layout moves shared tiles and vectors (st, sv)")
    return tuple(specs)


def static_axes(static: bool | int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The dimensions, counted from the first, that `static` names."""
    if isinstance(static, bool):
        return tuple(range(rank)) if static else ()
    axes = static if isinstance(static, tuple) else (static,)
    if not all(isinstance(axis, int) and not isinstance(axis, bool) and -rank <= axis < rank for axis in axes):
        raise TileError(f"gl(static={static!r}): must be True, False or dimensions from {-rank} to {rank - 1}")
    return tuple(sorted({axis % rank for axis in axes}))


class gl:
    """A tensor for an explicit kernel: `tk.gl(x, tk.st(tk.bf16, 64, 128))`.

    `tensor` has one to five dimensions; the last two are rows and columns, leading ones (batch, depth) are counted in single steps. Where
    a tile type is given, TMA moves it: the last stride must be 1 element, the others multiples of 16 bytes. Without tile types any strides
    will do (register access). `fill` is what a load past the edge reads: "zero" or "nan". `static` names the dimensions, or True for all,
    whose extents and strides are constants of the kernel, which is compiled anew for others: `tk.gl(x, static=(-2, -1))`.
    `ragged`: the tensor, of two or three dimensions, is sequences packed end to end along the rows, and TMA moves tiles (st) of a `tk.sequence`.
    """

    __slots__ = ("fill", "ragged", "specs", "static", "tensor", "tiles")

    def __init__(self, tensor: torch.Tensor, *tiles: st | sv, fill: str = "zero", static: bool | int | tuple[int, ...] = False, ragged: bool = False):
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
                raise TileError(f"gl of {name_of(from_torch(tensor.dtype))} with {tile!r}: the tile's element type must be the tensor's")
        if fill not in ("zero", "nan"):
            raise TileError(f"gl(fill={fill!r}): TMA fills with 'zero' or 'nan'; use a mask for anything else")
        self.tensor, self.tiles, self.fill = tensor, tiles, fill
        self.static = static_axes(static, tensor.ndim)
        if ragged and self.static:
            raise TileError("gl(static=…, ragged=True): extents of a ragged tensor are those of its sequences")
        self.ragged, self.specs = ragged, map_specs(tiles, tensor.ndim, fill, ragged)

    def fixed(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """(extents, strides) that the kernel is compiled for; None where it is not."""
        extents, strides = self.tensor.shape, self.tensor.stride()
        return (tuple([n if axis in self.static else None for axis, n in enumerate(extents)]),
                tuple([n if axis in self.static else None for axis, n in enumerate(strides)]))

    # What triton.autotune does with arguments: a key has the dtype, `reset_to_zero` and `restore_value` write the tensor.

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
        """The argument for an ordinary Triton kernel, also under its interpreter: `kernel[grid](tk.gl(x).plain())`; registers are loaded and stored."""
        return GlobalLayout((), self.tensor, tuple(self.tensor.shape), tuple(self.tensor.stride()))


def rank_of(g: Traced) -> int:
    """Dimensions of a global layout inside a kernel."""
    return len(g.maps[0].shape) if len(g.maps) else len(g.shape)


def is_ragged(g: Traced) -> bool:
    """Are the descriptors of a global layout inside a kernel made for sequences?"""
    return unwrap(getattr(g, "ragged", ())) is None


def fixed_of(g: Traced) -> tuple[tuple[int | None, ...], tuple[int | None, ...]] | None:
    """(extents, strides) that the kernel is compiled for, with None for run-time values; None where all are."""
    return unwrap(getattr(g, "fixed", ())) or None


def extents_of(g: Traced) -> list[Traced]:
    """Extents of a global layout inside a kernel: constants of static dimensions, int32 scalars of others."""
    extents = list(g.maps[0].shape) if len(g.maps) else list(g.shape)
    fixed = fixed_of(g)
    if fixed is None:
        return extents
    return [tl.constexpr(constant) if constant is not None else extents[axis] for axis, constant in enumerate(fixed[0])]


def strides_of(g: Traced) -> list[Traced]:
    """Strides of a global layout inside a kernel, in elements: constants of static dimensions, else run-time values; the last one is 1
    where it is known when the kernel is compiled."""
    strides = list(g.maps[0].strides) if len(g.maps) else list(g.strides)
    if len(g.maps) or unwrap(strides[-1]) is None:
        strides[-1] = 1
    fixed = fixed_of(g)
    if fixed is None:
        return strides
    return [constant if constant is not None else strides[axis] for axis, constant in enumerate(fixed[1])]


def is_even(g: Traced) -> bool:
    """Is it known that `is_aligned` and that the columns are a multiple of 16 bytes as well, so that no 16-byte piece of a row crosses
    an edge?"""
    return unwrap(getattr(g, "even", ())) is None


def is_aligned(g: Traced) -> bool:
    """Is it known that columns are contiguous and all other strides multiples of 16 bytes? TMA descriptors need it."""
    return len(g.maps) > 0 or is_even(g)


def even_rows(tensor: torch.Tensor) -> bool:
    """Do all 16-byte pieces of the rows of a tensor start at multiples of 16 bytes and end inside?"""
    *strides, last = tensor.stride()
    return last == 1 and not any(n * tensor.itemsize % PIECE for n in (*strides, tensor.shape[-1]))


def check_global(g: Traced, name: str) -> None:
    """Refuse anything but a global layout where one is needed."""
    if not hasattr(g, "pointer") or not hasattr(g, "maps"):
        raise TileError(f"{name}: {g!r} is no global layout; pass tk.gl(tensor, tile types) to the kernel")


@op
def extent(t: Trace, g: Traced, axis: Traced) -> Traced:
    """Elements of a global layout along `axis` (negative axes count from the last): an int32 scalar, a constant where the dimension is `static`. Not the rows
    of a ragged one, which no descriptor has."""
    check_global(g, "extent")
    axis, rank = unwrap(axis), rank_of(g)
    if is_ragged(g):
        rank -= 2
        if axis in (-2, rank - 2):
            raise TileError(f"extent(axis={axis}): the rows of a ragged tensor are those of its sequences")
    if not -rank <= axis < rank:
        raise TileError(f"extent(axis={axis}): the tensor has {rank} dimensions")
    return extents_of(g)[-rank:][axis]
