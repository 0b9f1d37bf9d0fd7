"""Block-scaled products into tensor memory: each number of A and B is multiplied by the scale of its block along K.

==========  =====================  ==================  ==========
name        operands               scales              block of K
==========  =====================  ==================  ==========
MXFP8       fp8e4m3, fp8e5m2       fp8e8m0             32
MXFP4       fp4e2m1x2              fp8e8m0             32
NVFP4       fp4e2m1x2              fp8e4m3             16
==========  =====================  ==================  ==========

Source: PTX ISA, tcgen05.mma, kind::mxf8f6f4, kind::mxf4, kind::mxf4nvf4; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import triton.language as tl

from tritonkittens.inline_ptx import tcgen05 as ptx_tcgen05
from tritonkittens.lang.core.backend import Trace, tcgen05_mma_scaled
from tritonkittens.lang.core.dtypes import FP8, fp4e2m1x2, fp8e4m3, fp8e8m0
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.memory.scales import copy_scales, copy_scales_of_pair
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma.operands import Product, describe, extents
from tritonkittens.lang.mma.tcgen05 import PairOperands, adds_to, check_pair, complete, complete_pair
from tritonkittens.lang.sync.semaphores import semaphore
from tritonkittens.lang.types.scales import BLOCK_COLS, BLOCK_ROWS, FORMATS, scale_tile

ROWS = 128  # of A: the instruction has no other M
CODES = {tl.float8e4nv: "e4m3", tl.float8e5: "e5m2", fp4e2m1x2: "e2m1"}
# (are the operands fp4, dtype of the scales) -> numbers along K of a scale
BLOCKS = {(False, fp8e8m0): 32, (True, fp8e8m0): 32, (True, fp8e4m3): 16}
KINDS = {(False, fp8e8m0): "mxf8f6f4", (True, fp8e8m0): "mxf4", (True, fp8e4m3): "mxf4nvf4"}  # of PTX, likewise


def multiply(t: Trace, product: Product, wait: bool, arrived: tuple[semaphore, ...]) -> tensor_tile:
    """Compute a block-scaled product, whose `scales` are tiles in shared memory. They are copied to their place in
    tensor memory first. It completes as `tcgen05.multiply` does."""
    acc = product.acc
    check(t, product)
    if acc.pair:
        return _multiply_pair(t, product, arrived)
    scales = [copy_scales(t, tile.spec, tile.pieces) for tile in product.scales]
    t.call(
        tcgen05_mma_scaled,
        product.a.pieces[0],
        product.b.pieces[0],
        acc.pieces[0],
        *scales,
        *(tl.constexpr(CODES[x.dtype]) for x in (product.a, product.b)),
        use_acc=adds_to(product),
        mbarriers=[bar.barrier(t) for bar in arrived] or None,
    )
    return complete(t, acc, wait and not arrived)


def _multiply_pair(t: Trace, product: Product, arrived: tuple[semaphore, ...]) -> tensor_tile:
    """Compute the product of a CTA pair, in the CTA of even rank. Each CTA has the scales of its rows of A, and those
    of all columns of B."""
    scales = [copy_scales_of_pair(t, tile.spec, tile.pieces) for tile in product.scales]
    operands = PairOperands.of(t, product, product.a_stored.pieces[0], product.b_stored.pieces[0])
    kind = KINDS[product.a.dtype == fp4e2m1x2, product.scales[0].dtype]
    at_once, adds = ptx_tcgen05.SCALED_KINDS[kind].scales_of_step, adds_to(product)
    for step in range(operands.steps):
        block, scale_id = divmod(step * at_once, BLOCK_COLS)
        instruction = ptx_tcgen05.scaled_instruction_descriptor(
            kind,
            2 * operands.a.extent,
            2 * operands.b.extent,
            *(CODES[x.dtype] for x in (product.a, product.b)),
            scale_id,
            2,
        )
        t.call(
            ptx_tcgen05.mma_scaled,
            product.acc.pieces[0],
            *operands.at(t, step),
            t.scalar(instruction),
            *(
                t.method(columns, "__add__", block * tile.spec.block_columns)
                for columns, tile in zip(scales, product.scales, strict=True)
            ),
            kind=tl.constexpr(kind),
            accumulate=t.method(t.scalar(adds), "to", tl.int32),
            issuer=tl.constexpr("warp"),
            ctas=tl.constexpr(2),
        )
        adds = True
    return complete_pair(t, product, arrived)


def check(t: Trace, product: Product) -> None:
    """Raise `TileError` for operands or scales that no instruction multiplies, `ArchitectureError` for a chip without
    it."""
    name, a, b, acc = product.name, product.a, product.b, product.acc
    t.require(f"{name}(scales=…) (tcgen05, block_scale)", "tcgen05")
    _check_places(product)
    fp4 = a.dtype == fp4e2m1x2
    for what, x in (("A", a), ("B", b)):
        if x.dtype not in ((fp4e2m1x2,) if fp4 else FP8):
            raise TileError(
                f"{name}(scales=…): {what} is {describe(x)}; block-scaled operands are both 8-bit floats (fp8e4m3, "
                "fp8e5m2), or both bytes of two 4-bit floats (fp4e2m1x2)"
            )
    if fp4 and product.transposed != (False, True):
        raise TileError(f"{name}(scales=…): 4-bit floats are packed along K, which must be the columns: use mma_ABt")
    if acc.pair:
        check_pair(product)
        if product.transposed != (False, True):
            raise TileError(f"{name}(scales=…) of a CTA pair: K must be the columns of both tiles: use mma_ABt")
    (m, k), (depth, n) = extents(a), extents(b)
    n *= 2 if acc.pair else 1  # of which each CTA of a pair has half
    if k != depth:
        raise TileError(f"{name}: A is {describe(a)} and B is {describe(b)} (as M×K and K×N): their K differ")
    if m != ROWS or n & (n - 1) or not 8 <= n <= 256 or k & (k - 1):
        raise TileError(
            f"{name}(scales=…): A is {describe(a)}, B is {describe(b)} (as M×K and K×N); a block-scaled product has "
            f"{ROWS} rows, and columns and depth that are powers of two, of at most 256 columns"
        )
    if extents(acc) != [m, n] or acc.dtype != tl.float32:
        raise TileError(f"{name}(scales=…): the accumulator is {acc.spec!r}; A and B need tt(fp32, {m}, {n})")
    numbers = k * (2 if fp4 else 1)
    for what, tile, rows in (("A", product.scales[0], m), ("B", product.scales[1], n)):
        _check_scales(name, what, tile, -(-rows // BLOCK_ROWS) * BLOCK_ROWS, numbers, fp4)
    if product.scales[0].dtype != product.scales[1].dtype:
        raise TileError(f"{name}(scales=…): both scales have one format, got {_names(product)}")


def _check_places(product: Product) -> None:
    name, acc = product.name, product.acc
    for what, x in (("A", product.a), ("B", product.b)):
        if not isinstance(x, shared):
            raise TileError(f"{name}(scales=…): {what} is {describe(x)}; block-scaled products read shared memory")
        if x.stages is not None:
            raise TileError(f"{name}: {what} is a ring of {x.spec!r}; take a slot first, ring[slot]")
        if not x.whole:
            raise TileError(f"{name}: {what} is a view of {x.spec!r} that cuts a swizzle atom")
    if not isinstance(acc, tensor_tile) or acc.stages is not None:
        raise TileError(
            f"{name}(scales=…): the accumulator of a block-scaled product is one tile of tensor memory "
            "(tensor_allocator, or a template's accumulators)"
        )
    if len(product.scales) != 2:
        raise TileError(f"{name}(scales=…): takes two tiles, the scales of A and of B")
    for what, tile in zip("AB", product.scales, strict=True):
        if not isinstance(tile, shared) or not isinstance(tile.spec, scale_tile):
            raise TileError(
                f"{name}(scales=…): the scales of {what} are {getattr(tile, 'spec', tile)!r}; they must be a "
                "scale_tile in shared memory"
            )
        if tile.stages is not None:
            raise TileError(f"{name}(scales=…): the scales of {what} are a ring of {tile.spec!r}; take a slot first")


def _check_scales(name: str, what: str, tile: shared, rows: int, numbers: int, fp4: bool) -> None:
    """Check the format and extents of an operand's scales; `numbers`: along K."""
    block = BLOCKS.get((fp4, tile.dtype))
    if block is None:
        known = ", ".join(FORMATS[dtype] for is_fp4, dtype in BLOCKS if is_fp4 == fp4)
        kind = "4-bit" if fp4 else "8-bit"
        raise TileError(f"{name}(scales=…): the scales of {what} are {tile.spec!r}; {kind} operands take {known}")
    if (tile.spec.rows, tile.spec.cols * block) != (rows, numbers):
        raise TileError(
            f"{name}(scales=…): the scales of {what} are {tile.spec!r}; {numbers} numbers along K have one for each "
            f"{block}: {FORMATS[tile.dtype]}, {rows}×{numbers / block:g}"
        )


def _names(product: Product) -> str:
    return " and ".join(FORMATS[tile.dtype] for tile in product.scales)
