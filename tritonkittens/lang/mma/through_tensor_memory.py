"""Products of register tiles on tcgen05: the accumulator, and A where it lies in registers, pass through temporary
tensor memory."""

from __future__ import annotations

import triton.language as tl

from tritonkittens.arch import LANES
from tritonkittens.lang.core.backend import (
    DistributedLayout,
    TensorMemoryLayout,
    Trace,
    Traced,
    allocate_tensor_memory,
    gl,
    tcgen05_mma,
)
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, pieces_of, shape_of
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.mma import tcgen05
from tritonkittens.lang.mma.fp8_a_operand import packed_bytes
from tritonkittens.lang.mma.operands import Product, axes, describe, extents, grid, strided_depth, sum_dtype
from tritonkittens.lang.register.construction import WARPGROUP, accumulator_layout, fragment_layout

MAX_COLUMNS = 256  # N of one instruction
WORDS = "16x128b"  # the access of tensor memory that fits the words of `packed_bytes`


def takes(t: Trace, product: Product) -> bool:
    """Whether tcgen05 computes a product whose accumulator is a register tile. The bill notes why not.

    Raises `TileError` for an A that mma.sync does not take either.
    """
    reason = _reason(t, product) if t.chip.tcgen05 else f"{t.chip.name} has neither wgmma nor tcgen05"
    if reason and isinstance(product.a, packed_bytes):
        raise TileError(f"{product.name}: A is {describe(product.a)} from byte_operand, and {reason}")
    if reason and t.chip.tcgen05:
        bill().mma_sync.append(f"{product.name}: {reason}")
    return reason is None


def _reason(t: Trace, product: Product) -> str | None:
    """Why tcgen05 cannot compute the product; None where it can."""
    a, b = product.a, product.b
    rows, depth, cols = axes(a)[0], axes(a)[1], axes(b)[1]
    if t.num_warps % WARPGROUP:
        return f"{t.num_warps} warp(s) reach only some lanes of tensor memory"
    if not isinstance(b, shared):
        return f"B is {describe(product.b_stored)}; tcgen05 reads B from shared memory"
    if any(m not in (64, LANES) for m in rows):
        return f"{extents(a)[0]} rows; tcgen05 multiplies 64 or 128"
    if max(cols) > MAX_COLUMNS:
        return f"{extents(b)[1]} columns; tcgen05 multiplies pieces of at most {MAX_COLUMNS}"
    if min(depth) * a.dtype.primitive_bitwidth < 8 * tcgen05.STEP_BYTES:
        return f"K is {extents(a)[1]}; tcgen05 multiplies {tcgen05.STEP_BYTES} bytes of K at a time"
    if sum_dtype(a, product.acc) not in (tl.float32, tl.int32):
        return f"the accumulator is {describe(product.acc)}; tcgen05 adds in fp32"
    if a.dtype == tl.int8 and not t.chip.tcgen05_int8:
        return f"{t.chip.name} has no tcgen05 of int8"
    if a.dtype == tl.float32 and strided_depth(product):
        return "tcgen05 reads fp32 operands with the depth along the columns only"
    if bill().pairs:
        return "tensor memory of this kernel is of CTA pairs"
    homes = [fragment_layout(t, m, n, tl.float32) for m in rows for n in cols]
    if not isinstance(a, (shared, packed_bytes)):
        homes += [fragment_layout(t, m, k, a.dtype) for m in rows for k in depth]
    if None in homes:
        return f"too few columns for {t.num_warps} warps"
    columns, allowed = _columns(product), bill().temporary_columns(max(rows))
    if columns > allowed:
        return f"it takes {columns} columns of tensor memory, of which its role may use {allowed}"
    return None


def _columns(product: Product) -> int:
    """The columns of tensor memory that a product takes."""
    a = product.a
    depth = 0 if isinstance(a, shared) else extents(a)[1] * a.dtype.primitive_bitwidth // 32
    return len(axes(a)[0]) * (extents(product.b)[1] + depth)


def multiply(t: Trace, product: Product) -> Traced:
    """Compute the product, complete when this returns."""
    if bill().reads_tensor_a:  # the compiler takes the tile for free once the product is issued
        tcgen05.finish(t)
    rows, cols = axes(product.a)[0], axes(product.b)[1]
    lines, pieces_b = _left(t, product), grid(product.b)
    dtype = sum_dtype(product.a, product.acc)
    sums = [_temporary(t, (m, n), dtype) for m in rows for n in cols]
    homes: list[DistributedLayout] = [accumulator_layout(t, m, n) for m in rows for n in cols]
    if product.acc is not None:
        homes = [piece.type.layout for piece in pieces_of(product.acc)]
    if product.acc is not None and product.add:
        for memory, piece in zip(sums, pieces_of(product.acc), strict=True):
            _store(t, memory, piece)
    done = tcgen05.begin_barrier(t)
    t.call(gl.barrier)
    steps = [(i, j, k) for i in range(len(rows)) for j in range(len(cols)) for k in range(len(lines[0]))]
    for i, j, k in steps:
        t.call(
            tcgen05_mma,
            lines[i][k],
            pieces_b[k][j],
            sums[i * len(cols) + j],
            use_acc=product.acc is not None and product.add if k == 0 else True,
            mbarriers=[done] if (i, j, k) == steps[-1] else None,
        )
    tcgen05.end_barrier(t, done)
    out = [t.convert(t.call(memory.load, _layout(t, memory)), home) for memory, home in zip(sums, homes, strict=True)]
    return assemble((rows, cols), out)


def _left(t: Trace, product: Product) -> list[list[Traced]]:
    """Return A as tcgen05 reads it, as rows of pieces: in shared memory, or copied from registers to tensor memory."""
    lines = grid(product.a)
    if isinstance(product.a, shared):
        return lines
    found = []
    if isinstance(product.a, packed_bytes):
        return [[_words(t, product.a, piece) for piece in line] for line in lines]
    for line in lines:
        memories = [_temporary(t, shape_of(piece), piece.dtype) for piece in line]
        for memory, piece in zip(memories, line, strict=True):
            _store(t, memory, piece)
        found.append(memories)
    return found


def _words(t: Trace, a: packed_bytes, piece: Traced) -> Traced:
    """Return a copy of words of four columns each in tensor memory, as a tile of these columns."""
    rows, words = shape_of(piece)
    memory = _temporary(t, (rows, words), tl.int32)
    t.call(memory.store, t.convert(piece, t.call(memory.get_reg_layout, instr_variant=WORDS)))
    shape = [rows, 4 * words]
    return t.call(memory.reinterpret, a.dtype, shape, TensorMemoryLayout(shape, col_stride=1))


def _temporary(t: Trace, shape: tuple[int, ...], dtype: tl.dtype) -> Traced:
    return t.call(allocate_tensor_memory, dtype, list(shape), TensorMemoryLayout(list(shape), col_stride=1))


def _layout(t: Trace, memory: Traced) -> DistributedLayout | None:
    rows, cols = (int(n) for n in memory.shape)
    return fragment_layout(t, rows, cols, memory.dtype)


def _store(t: Trace, memory: Traced, piece: Traced) -> None:
    t.call(memory.store, t.convert(piece, _layout(t, memory)))
