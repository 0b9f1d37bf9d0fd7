"""Products of matrices that TMA cannot address, whose A is first copied to rows of words (packed).

A kernel in front writes A once for every class of rows of B (`unaligned.py`), shifted as that class is. So tiles of A
and B pass through one pipeline of asynchronous copies to tensor cores. The ends (`_load_ends`) are multiplied last. A
kernel behind adds the parts of K.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.epilogue import Steps
from tritonkittens.kernels.gemm.device.unaligned import (
    Launch,
    Unaligned,
    _columns_of,
    _finish,
    _load_b,
    _load_ends,
    _place_of,
    _store_part,
    _sum_of_parts,
    keyed,
)
from tritonkittens.kernels.gemm.device.unaligned_tiles import WORD
from tritonkittens.launch import plain_kernel

ENDS = tl.constexpr(16)  # depth of the last product, the least that tensor cores take: two words

PACKED_ROWS, PACKED_DEPTH = 16, 128  # of a block of `pack_rows`
ADDED_ROWS = 8  # rows of a tile that a block of `add_parts` adds


@plain_kernel(launch_pdl=True)
@triton.jit
def pack_rows(A, P, M, K, pitch, am, ak, bk, bn, SHAPE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Copy A to P, once for each class of B's rows (`unaligned.py`): classes × rows of a tile × `pitch`.

    Where words lie along N, class r has the columns k ≡ r (mod classes) of A. Where they lie along K, it has all
    columns behind s zeros, where s is the offset of its rows in a word. Columns that B's words do not cover are zero;
    `packed_product` multiplies them by themselves. Grid: blocks of DEPTH columns, blocks of ROWS rows, shifts s.
    """
    tk.dependency_wait()
    tk.dependents_launch()
    SPREAD: tl.constexpr = SHAPE.classes if SHAPE.wide == "n" else 1
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) * DEPTH + tl.arange(0, DEPTH)
    if SHAPE.wide == "n":
        k = i
        inside = (k > 0) & (k < K - 1)
    else:
        s = ((SHAPE.start + tl.program_id(2) * bn) % WORD).to(tl.int32)
        k = i - s
        inside = (i // WORD >= tl.cdiv(s, WORD)) & (i // WORD < (K + s) // WORD)
    a = tl.load(
        A + ((m.to(tl.int64) * am)[:, None] + (k.to(tl.int64) * ak)[None, :]),
        mask=(m < M)[:, None] & inside[None, :],
        other=0.0,
    )
    a = tl.permute(tl.reshape(a, (ROWS, DEPTH // SPREAD, SPREAD)), (2, 0, 1))
    r = tl.program_id(2) + tl.arange(0, SPREAD)
    j = tl.program_id(0) * (DEPTH // SPREAD) + tl.arange(0, DEPTH // SPREAD)
    row = r[:, None] * (tl.num_programs(1) * ROWS) + m[None, :]
    tl.store(P + ((row.to(tl.int64) * pitch)[:, :, None] + j[None, None, :]), a, mask=(j < pitch)[None, None, :])


@plain_kernel(num_stages=1, launch_pdl=True)
@triton.jit
def packed_product(
    A, P, B, C, operands, partials, M, N, K, chunk, pitch, am, ak, bk, bn, cm, cn,
    SHAPE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """C = epilogue(A·B), or with several parts of K their sums; P is A as `pack_rows` leaves it. Grid: tiles of
    columns, parts of K. A part is `chunk` of the depth, of one class where rows of words lie along K."""
    tk.dependency_wait()
    a = tk.struct(base=A, stride_m=am, stride_k=ak, M=M, K=K)
    b = tk.struct(base=B, stride_k=bk, stride_n=bn, K=K, N=N)
    tile, part = tl.program_id(0), tl.program_id(1)
    block = _place_of(tile, part, M, b, SHAPE)
    first_x, first_y = _load_ends(a, b, block, part == 0, ENDS, SHAPE)
    packed = P + block.r.to(tl.int64) * (SHAPE.rows * pitch)
    places = tl.arange(0, SHAPE.rows)[:, None] * pitch + tl.arange(0, SHAPE.depth)[None, :]
    total = tl.zeros((SHAPE.rows, SHAPE.cols), tl.float32)
    for at in tl.range(block.part * chunk, (block.part + 1) * chunk, SHAPE.depth, num_stages=SHAPE.stages):
        x = tl.load(tl.multiple_of(packed + at, 2 * WORD) + places)
        y = _load_b(b, block, at, True, SHAPE)
        total = tk.mma_AB(x, y, total)
    tk.dependents_launch()
    total = tk.mma_AB(first_x, first_y, total)
    i = _columns_of(block, SHAPE)
    if SHAPE.is_split:
        _store_part(total, i, tile, partials, SHAPE)
    else:
        c = tk.struct(base=C, stride_m=cm, stride_n=cn, M=M, N=N)
        _finish(total, c, block, block.m0 + tl.arange(0, SHAPE.rows), i, operands, SHAPE, EPILOGUE)


@plain_kernel(launch_pdl=True)
@triton.jit
def add_parts(
    C, operands, partials, M, N, parts, bk, bn, cm, cn,
    SHAPE: tl.constexpr, ROWS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """C = epilogue(sums of the parts of `packed_product`). Grid: tiles, parts of ROWS rows of them."""
    tk.dependency_wait()
    tk.dependents_launch()
    c = tk.struct(base=C, stride_m=cm, stride_n=cn, M=M, N=N)
    tile, rows = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    block = _place_of(tile, 0, M, tk.struct(stride_k=bk, stride_n=bn), SHAPE)
    total = _sum_of_parts(partials, tile, parts, rows, SHAPE)
    _finish(total, c, block, block.m0 + rows, tl.arange(0, SHAPE.cols), operands, SHAPE, EPILOGUE)


class Packed(Unaligned):
    """The plan of a product whose A is packed: two launches a call, or three where K is in several parts."""

    def _launches(self, epilogue: Steps) -> list[Launch]:
        shape, tiles, block = self.extents, self.tiles, self.extents.block()
        pitch = tiles.parts * shape.chunk
        self.packed_elements = shape.classes * tiles.rows * pitch
        extents = self.numbers | dict(pitch=pitch, parts=shape.parts)

        def key(kernel: Any, names: str, warps: int, **constants: Any) -> tuple[Any, tuple[int, ...]]:
            return keyed(kernel, dict(SHAPE=block, **constants), {name: extents[name] for name in names.split()}, warps)

        pack = key(pack_rows, "M K pitch am ak bk bn", 4, ROWS=PACKED_ROWS, DEPTH=PACKED_DEPTH)
        product = key(packed_product, "M N K chunk pitch am ak bk bn cm cn", tiles.warps, EPILOGUE=epilogue)
        add = key(add_parts, "M N parts bk bn cm cn", 4, ROWS=ADDED_ROWS, EPILOGUE=epilogue)
        shifts, spread = (1, shape.classes) if shape.along == "n" else (shape.classes, 1)
        pack_grid = triton.cdiv(pitch * spread, PACKED_DEPTH), tiles.rows // PACKED_ROWS, shifts
        add_grid = shape.tiles, triton.cdiv(self.numbers["M"], ADDED_ROWS)
        found = [
            Launch(pack_rows, pack_grid, pack[0], lambda a, packed: (a, packed, *pack[1])),
            Launch(
                packed_product,
                (shape.tiles, shape.parts),
                product[0],
                lambda a, packed, b, out, *rest: (a, packed, b, out, *self._given(rest, 1), *product[1]),
            ),
            Launch(add_parts, add_grid, add[0], lambda out, *rest: (out, *self._given(rest, 1), *add[1])),
        ]
        return found if shape.parts > 1 else found[:2]

    def _tensors(self, a: Tensor, b: Tensor, out: Tensor, given: list[Tensor]) -> list[tuple[Tensor, ...]]:
        packed, rest = a.new_empty(self.packed_elements), (*given, *self._sums(a.device, 0)[:1])
        return [(a, packed), (a, packed, b, out, *rest), (out, *rest)][: len(self.launches)]
