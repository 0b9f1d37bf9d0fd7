"""Products of operands in registers: tl.dot in plain Triton kernels, mma.sync in explicit ones."""

from __future__ import annotations

from tritonkittens.lang.core.backend import DistributedLayout, Trace, Traced, gl, mma_v2
from tritonkittens.lang.core.records import assemble
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.mma.operands import FP8, Product, axes, grid, sum_dtype
from tritonkittens.lang.mma.wgmma import version_of
from tritonkittens.lang.register.construction import warp_layout


def dot(t: Trace, product: Product) -> Traced:
    """Compute the product in a plain Triton kernel: tl.dot, piece by piece."""
    acc = product.acc
    rows, cols = axes(product.a)[0], axes(product.b)[1]
    pieces_a, pieces_b = grid(product.a), grid(product.b)
    sums = grid(acc) if acc is not None and product.add else None
    out_dtype = sum_dtype(product.a, acc)
    out = []
    for i in range(len(rows)):
        for j in range(len(cols)):
            total = sums[i][j] if sums else None
            for k in range(len(pieces_a[0])):
                total = t.call("dot", pieces_a[i][k], pieces_b[k][j], total, out_dtype=out_dtype)
            out.append(total)
    return assemble((rows, cols), out)


def mma_sync(t: Trace, product: Product) -> Traced:
    """Compute the product by mma.sync, piece by piece."""
    a, acc = product.a, product.acc
    if a.dtype in FP8:
        t.require_capability("mma.sync of 8-bit floats", 89)
    rows, cols = axes(a)[0], axes(product.b)[1]
    pieces_a, pieces_b = grid(a), grid(product.b)
    sums = grid(acc) if acc is not None else None
    out = []
    for i in range(len(rows)):
        for j in range(len(cols)):
            home = sums[i][j].type.layout if sums else warp_layout(t, rows[i])
            parent = home if version_of(home) == 2 else warp_layout(t, rows[i])
            if sums and product.add:
                total = t.convert(sums[i][j], parent)
            else:
                total = t.full((rows[i], cols[j]), 0, sum_dtype(a, acc), parent)
            for k in range(len(pieces_a[0])):
                left, right = _operand(t, pieces_a[i][k], 0, parent), _operand(t, pieces_b[k][j], 1, parent)
                total = t.call(mma_v2, left, right, total)
            out.append(t.convert(total, home))
    return assemble((rows, cols), out)


def _operand(t: Trace, piece: Traced, index: int, parent: DistributedLayout) -> Traced:
    """Return a piece of A (`index` 0) or B (1) in the registers that mma.sync reads."""
    width = 32 // piece.dtype.primitive_bitwidth
    layout = gl.DotOperandLayout(operand_index=index, parent=parent, k_width=width)
    if not isinstance(piece, gl.shared_memory_descriptor):
        return t.convert(piece, layout)
    bill().reads_shared += 1
    return t.call(piece.load, layout)
