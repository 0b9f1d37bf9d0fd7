"""im2col: TMA loads the pixels under one tap of a convolution's filter as the rows of a tile, with halo and padding."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op, tma
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import from_torch, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.sync.semaphores import semaphore
from tritonkittens.lang.types.global_layout import check_global, gl, rank_of
from tritonkittens.lang.types.tiles import st
from tritonkittens.launch import Im2colSpec, check_im2col

# Largest filter offset by the tensor's rank: the offsets share 16 bits. Source: PTX ISA, cp.async.bulk.tensor,
# im2colInfo.
MAX_OFFSET = {3: (1 << 16) - 1, 4: (1 << 8) - 1, 5: (1 << 5) - 1}


def _ints(values: tuple[int, ...], name: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(v) for v in values)
    except TypeError:
        raise TileError(f"im2col({name}={values!r}): must be a tuple of ints, one for each spatial dimension") from None


@functools.lru_cache(maxsize=1024)
def _specs(
    tile: st,
    rank: int,
    fill: str,
    lower: tuple[int, ...],
    upper: tuple[int, ...],
    element_strides: tuple[int, ...] | None,
) -> tuple[Im2colSpec, ...]:
    pieces = tile.pieces()
    if len(pieces) != 1:
        raise TileError(f"im2col of {tile!r}: pixels (rows) and channels (columns) must be powers of two")
    spec = Im2colSpec(
        tile.shape,
        tile.piece_swizzle(tile.cols),
        fill,
        _ints(lower, "lower"),
        _ints(upper, "upper"),
        (1,) * (rank - 2) if element_strides is None else _ints(element_strides, "element_strides"),
    )
    try:
        check_im2col(spec, rank, f"im2col of {tile!r}")
    except (TypeError, ValueError) as error:
        raise TileError(str(error)) from None
    return (spec,)


class im2col(gl):
    """A convolution's input for an explicit kernel.

    Args:
        tensor: NWC, NHWC or NDHWC (three to five dimensions). The last stride is 1 element, the others are multiples
            of 16 bytes.
        tile: the shared tile type of `load_im2col_async`, pixels × channels. Both are powers of two, with at most
            1024 pixels.
        lower: the first base pixel of the filter, one per spatial dimension. Its range is -32768 … 32767 for one
            spatial dimension, -128 … 127 for two, -16 … 15 for three.
        upper: the last base pixel, counted from the tensor's last pixel. Range as for `lower`.
        element_strides: the step between base pixels, 1 … 8, one per spatial dimension.
        fill: the value outside the tensor: "zero" or "nan".

    A filter of R taps with dilation d, stride s and padding p has lower = -p, upper = p - (R - 1)·d and element
    stride s. In kernels, an `im2col` is a `gl` without tile types.

    Raises:
        TileError: for another rank, dtype, tile or range.

    Example::

        tk.im2col(x, tk.st(tk.bf16, 128, 64), lower=(-1, -1), upper=(-1, -1))

    Source: PTX ISA, "im2col mode"; CUDA driver API, cuTensorMapEncodeIm2col.
    """

    __slots__ = ()

    def __init__(
        self,
        tensor: torch.Tensor,
        tile: st,
        lower: Sequence[int],
        upper: Sequence[int],
        element_strides: Sequence[int] | None = None,
        fill: str = "zero",
    ):
        super().__init__(tensor, fill=fill)
        if not isinstance(tile, st):
            raise TileError(f"im2col(…, {tile!r}): give the shared tile type (st) that is loaded, pixels × channels")
        if not 3 <= tensor.ndim <= 5:
            raise TileError(f"im2col of shape {tuple(tensor.shape)}: needs 3 (NWC), 4 (NHWC) or 5 (NDHWC) dimensions")
        if tile.dtype != from_torch(tensor.dtype):
            raise TileError(
                f"im2col of {name_of(from_torch(tensor.dtype))} with {tile!r}: the tile's element type must be the "
                "tensor's"
            )
        values = [
            v if v is None else tuple(v) if isinstance(v, Sequence) else (v,) for v in (lower, upper, element_strides)
        ]
        self.specs = _specs(tile, tensor.ndim, fill, *values)  # type: ignore[assignment]  # descriptors of another kind than a gl's


def _list(values: Traced) -> list[Traced]:
    values = unwrap(values)
    return [unwrap(v) for v in values] if isinstance(values, (tuple, list, tl.tuple)) else [values]


def _offset(t: Trace, offset: Traced, offsets: list[Traced], limit: int) -> Traced:
    """Return a filter offset as 16 bits."""
    if isinstance(offset, int) and not isinstance(offset, bool):
        if not 0 <= offset <= limit:
            raise TileError(
                f"load_im2col_async(offsets={tuple(offsets)}): {offset} must lie in 0 to {limit} with {len(offsets)} "
                "spatial dimensions; a start before the tensor belongs in lower"
            )
        return offset - (1 << 16) if offset >> 15 else offset
    if not isinstance(offset, tl.tensor) or offset.type.is_block() or not offset.dtype.is_int():
        raise TileError(f"load_im2col_async(offsets=…): {offset!r} must be an integer, a constant or a run-time scalar")
    return t.method(offset, "to", tl.int16)


@op
def load_im2col_async(t: Trace, dst: Traced, src: Traced, coord: Traced, offsets: Traced, arrived: Traced) -> None:
    """Start a TMA load of a tile of pixels × channels of a `tk.im2col` into shared memory.

    Args:
        dst: a shared tile of the type of the `im2col`.
        src: the `im2col`.
        coord: the first base pixel and channel in elements, (n, [[d,] h,] w, c).
        offsets: the filter tap times the dilation, ([[d,] h,] w), constants or int32 scalars: 0 … 65535 for one
            spatial dimension, 255 for two, 31 for three.
        arrived: the semaphore on which the load completes. It must `expect` the bytes.

    Rows are base pixels in the order w, h, d, n, in steps of the element strides through the box, then through the
    next image. Each row holds the pixel at `offsets` from its base pixel. Pixels and channels outside the tensor are
    filled.

    Raises:
        TileError: for another tile, source or number of coordinates or offsets.

    Source: PTX ISA, cp.async.bulk.tensor, .im2col.
    """
    name = "load_im2col_async"
    t.require_explicit(name)
    t.require(f"{name} (TMA)", "tma")
    if not isinstance(dst, shared):
        raise TileError(f"{name}: the destination must be a shared tile, got {unwrap(dst)!r}")
    if dst.stages is not None:
        raise TileError(f"{name} to a ring of {dst.spec!r}: take a slot first, ring[slot]")
    check_global(src, name)
    if len(src.maps) != 1 or not isinstance(src.maps[0], tma.tensor_descriptor_im2col):
        raise TileError(
            f"{name} to {dst.spec!r}: the source is a tk.gl; pass tk.im2col(tensor, tile, lower, upper) to the kernel"
        )
    if not isinstance(arrived, semaphore):
        raise TileError(f"{name}(arrived={unwrap(arrived)!r}): needs a semaphore")
    source, rank = src.maps[0], rank_of(src)
    block, swizzle = tuple(int(unwrap(n)) for n in source.block_shape), source.layout.swizzle_byte_width
    if dst.shape != block or dst.dtype != source.dtype or dst.pieces[0].layout.swizzle_byte_width != swizzle:
        raise TileError(
            f"{name} to {dst.spec!r}: the im2col was made for tiles of {'×'.join(map(str, block))} "
            f"{name_of(source.dtype)} (swizzle {swizzle})"
        )
    coord, offsets = _list(coord), _list(offsets)
    if len(coord) != rank:
        raise TileError(
            f"{name}: {len(coord)} coordinates for a tensor of {rank} dimensions; give one per dimension, in elements"
        )
    if len(offsets) != rank - 2:
        raise TileError(
            f"{name}: {len(offsets)} offsets for a tensor of {rank} dimensions; give one for each of the {rank - 2} "
            "spatial ones"
        )
    place = [tl.constexpr(c) if isinstance(c, int) else c for c in coord]
    taps = [_offset(t, o, offsets, MAX_OFFSET[rank]) for o in offsets]
    t.call(tma.async_load_im2col, source, place, taps, arrived.barrier(t), dst.pieces[0])
    bill().copied += dst.nbytes


__all__ = ["im2col", "load_im2col_async"]
