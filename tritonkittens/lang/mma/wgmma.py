"""Products of register tiles that whole warpgroups hold: wgmma, with B in shared memory and A there or in registers."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import DistributedLayout, Trace, Traced, gl, hopper
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, pieces_of
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.mma import wgmma_descriptors
from tritonkittens.lang.mma.fp8_a_operand import packed_bytes
from tritonkittens.lang.mma.operands import Product, axes, check_depth, describe, grid, sum_dtype
from tritonkittens.lang.mma.pending import pending
from tritonkittens.lang.register.construction import accumulator_layout

STANDARD_BITS = 16  # operand width in the layouts of register tiles

# (row, column) of an accumulator's piece -> (the piece, its layout, whether the product reads its values)
Accumulators = Callable[[int, int], tuple[Traced, DistributedLayout, Traced]]


def takes_warpgroups(t: Trace, acc: Traced, m: int, n: int) -> bool:
    """Whether the accumulator belongs to whole warpgroups (wgmma)."""
    if isinstance(acc, pending):
        return True
    if not t.chip.wgmma:
        return False
    layouts = [p.type.layout for p in pieces_of(acc)] if acc is not None else [accumulator_layout(t, m, n)]
    return all(version_of(layout) == 3 for layout in layouts)


def version_of(layout: DistributedLayout) -> int | None:
    """Return 3 for wgmma accumulators, 2 for mma.sync ones, None for other layouts."""
    return int(layout.version[0]) if isinstance(layout, gl.NVMMADistributedLayout) else None


def for_operands(layout: DistributedLayout, bits: int) -> DistributedLayout:
    """Return the accumulator's layout with the instruction depth of `bits`-bit operands (32 bytes).

    Every depth puts the same elements into the same thread.
    """
    shape = [*layout.instr_shape[:2], 256 // bits]
    return gl.NVMMADistributedLayout(version=layout.version, warps_per_cta=layout.warps_per_cta, instr_shape=shape)


def multiply(t: Trace, product: Product, wait: bool) -> Traced:
    """Compute the product by wgmma. Without `wait` it stays in flight, as a `pending`."""
    a, b_stored = product.a, product.b_stored
    t.require(f"{product.name} on warpgroup tiles (wgmma)", "wgmma")
    if not isinstance(product.b, shared):
        raise TileError(
            f"{product.name}: B is {describe(b_stored)}; wgmma reads B from shared memory: store it to an st first"
        )
    if a.dtype.primitive_bitwidth != 16:  # only 16-bit operands may have their depth strided
        check_depth(product, "wgmma")
    adds = product.add or _false(t)

    def accumulators(i: int, j: int) -> tuple[Traced, DistributedLayout, Traced]:
        return _accumulator(t, product, i, j, adds)

    if b_stored.together:
        result = _by_whole_rows(t, product, accumulators)
    elif isinstance(a, packed_bytes):
        result = _by_words(t, product, a, accumulators)
    else:
        result = _by_pieces(t, product, accumulators)
    return wait_for(t, [result], 0)[0] if wait else result


def _accumulator(t: Trace, product: Product, i: int, j: int, adds: Traced) -> tuple[Traced, DistributedLayout, Traced]:
    """Return piece (i, j) of the accumulator in the layout for the operands: see `Accumulators`."""
    rows, cols = axes(product.a)[0], axes(product.b)[1]
    dtype = product.a.dtype
    bits, number = dtype.primitive_bitwidth, i * len(cols) + j
    if product.acc is None:
        layout = for_operands(accumulator_layout(t, rows[i], cols[j]), bits)
        return t.full((rows[i], cols[j]), 0, sum_dtype(product.a, None), layout), layout, False
    if not isinstance(product.acc, pending):
        piece = pieces_of(product.acc)[number]
        layout = for_operands(piece.type.layout, bits)
        return t.convert(piece, layout), layout, adds
    part = product.acc.parts[number]
    layout = part.type.tensor_type.layout
    if layout != for_operands(layout, bits):
        raise TileError(
            f"{product.name}: the accumulator in flight was begun for operands of another width than "
            f"{name_of(dtype)}; begin it with mma_begin(acc, {name_of(dtype)})"
        )
    return part, layout, adds


def _by_pieces(t: Trace, product: Product, accumulators: Accumulators) -> pending:
    """Compute a product of the compiler's for each piece of the accumulator and of the depth."""
    rows, cols = axes(product.a)[0], axes(product.b)[1]
    pieces_a, pieces_b = grid(product.a), grid(product.b)
    bits, depth = product.a.dtype.primitive_bitwidth, len(pieces_a[0])
    parts, kept = [], []
    for i in range(len(rows)):
        for j in range(len(cols)):
            total, layout, adds = accumulators(i, j)
            for k in range(depth):
                left = pieces_a[i][k]
                if not isinstance(product.a, shared):
                    left = t.convert(left, gl.DotOperandLayout(operand_index=0, parent=layout, k_width=32 // bits))
                    # Gluon's wait takes no 8-bit registers; ptxas itself keeps a product's registers until its wait
                    if bits > 8:
                        kept.append(left)
                total = t.call(hopper.warpgroup_mma, left, pieces_b[k][j], total, use_acc=adds, is_async=True)
                adds = True
            parts.append(total)
    return pending((rows, cols), tuple(parts), tuple(kept), len(parts) * depth)


def _by_words(t: Trace, product: Product, a: packed_bytes, accumulators: Accumulators) -> pending:
    """Compute a product of the shim's for each piece of the accumulator, with A in packed registers."""
    rows, cols = axes(a)[0], axes(product.b)[1]
    depth = len(a.pieces)
    parts = []
    for i in range(len(rows)):
        for j in range(len(cols)):
            total, _, adds = accumulators(i, j)
            pieces = product.b_stored.pieces[j * depth : (j + 1) * depth]
            parts.append(wgmma_descriptors.multiply_words(t, a, pieces, total, adds))
    return pending((rows, cols), tuple(parts), tuple(a.pieces) * len(parts), len(parts))


def _by_whole_rows(t: Trace, product: Product, accumulators: Accumulators) -> pending:
    """Compute a product of the shim's for each 64 rows of A, with all columns of the contiguous B."""
    rows, cols = axes(product.a)[0], axes(product.b)[1]
    b, transposed = product.b_stored, product.transposed[1]
    wgmma_descriptors.check(product.name, rows, cols, product.a, b, transposed)
    parts: list[Traced] = []
    for i, line in enumerate(grid(product.a)):
        pieces = [accumulators(i, j) for j in range(len(cols))]
        totals, adds = [total for total, _, _ in pieces], pieces[-1][2]
        parts += wgmma_descriptors.multiply(t, line[0], b.pieces[0], totals, adds, 1 if transposed else 0)
    return pending((rows, cols), tuple(parts), (), len(rows))


@triton.jit
def _is_zero(x):
    return x == 0


def _false(t: Trace) -> Traced:
    """Return a condition that no compiler knows to be false.

    A product that is known not to read its accumulator gets registers of its own.
    """
    return t.call(_is_zero, t.call(asm, "mov.u32 $0, %nctaid.x;", "=r", [], tl.int32, is_pure=True))


def wait_for(t: Trace, products: list[Traced], outstanding: int) -> list[Traced]:
    """Wait until at most `outstanding` later groups are in flight, and return the tiles of these products."""
    deps = [d for p in products for d in (*p.parts, *p.kept)]
    done = t.call(hopper.warpgroup_mma_wait, outstanding, deps=deps)
    done = list(done) if len(deps) > 1 else [done]
    out, cursor = [], 0
    for p in products:
        parts = [t.convert(x, for_operands(x.type.layout, STANDARD_BITS)) for x in done[cursor : cursor + len(p.parts)]]
        out.append(assemble(p.axes, parts))
        cursor += len(p.parts) + len(p.kept)
    return out
