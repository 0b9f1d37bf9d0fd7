"""Products of matrices that TMA cannot address, whose A is first copied to rows of words (packed).

A kernel in front writes A once for every class of rows of B (`unaligned.py`), shifted as that class is. So tiles of A
and B pass through one pipeline of asynchronous copies to tensor cores. Words of B that the matrix does not fill, and
its first and last row where words lie along N, are the "ends": they are read by element and multiplied last.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.arch import capability_of
from tritonkittens.kernels.gemm.device.unaligned import (
    Unaligned,
    _finish,
    _finish_parts,
    _is_last_part,
    _place_of,
    keyed,
)
from tritonkittens.kernels.gemm.device.unaligned_tiles import WORD
from tritonkittens.launch import plain_kernel
from tritonkittens.launch.arguments import argument_types

ENDS = tl.constexpr(16)  # depth of the last product, the least that tensor cores take: two words

PACKED_ROWS, PACKED_DEPTH = 16, 128  # of a block of `pack_rows`
ADDED_ROWS = 8  # rows of a tile that a block of `add_parts` adds
ADDED_AT_ONCE = 8  # loads in flight


@plain_kernel(launch_pdl=True)
@triton.jit
def pack_rows(A, P, M, K, pitch, am, ak, bk, bn, SHAPE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """P = A, packed for the classes of B's rows; zero where the ends or nothing is. Grid: DEPTH of A, ROWS, shifts.

    P: classes × rows × `pitch`, rows of all tiles. Where words lie along N, a class has every CLASSES-th column of A,
    and there is one shift; where they lie along K, it has all of them behind as many zeros as its rows begin after a
    word.
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


@triton.jit
def _load_words(B, bk, bn, N, K, at, tile_n, r, s, SHAPE: tl.constexpr):
    """A depth × cols tile of B at `at` of a class: zero outside, and where the ends are."""
    d, c = tl.arange(0, SHAPE.depth), tl.arange(0, SHAPE.cols)
    if SHAPE.wide == "n":
        k = r + SHAPE.classes * (at + d)
        pitch = tl.multiple_of(SHAPE.classes * bk, WORD)
        first = tl.multiple_of(B + (r * bk - s + tile_n * SHAPE.span + at.to(tl.int64) * pitch), 2 * WORD)
        words = (tl.multiple_of(tile_n * SHAPE.span, WORD) + c) // WORD < (N + s + WORD - 1) // WORD
        inside = ((k > 0) & (k < K - 1))[:, None] & words[None, :]
        return tl.load(first + ((d * pitch)[:, None] + c[None, :]), mask=inside, other=0.0)
    else:
        n = r + SHAPE.classes * (tile_n * SHAPE.cols + c)
        pitch = tl.multiple_of(SHAPE.classes * bn, WORD)
        word = (tl.multiple_of(at, WORD) + d) // WORD
        first = tl.multiple_of(B + (r * bn - s + at + tile_n.to(tl.int64) * SHAPE.cols * pitch), 2 * WORD)
        inside = ((word >= tl.cdiv(s, WORD)) & (word < (K + s) // WORD))[:, None] & (n < N)[None, :]
        return tl.load(first + (d[:, None] + (c * pitch)[None, :]), mask=inside, other=0.0)


@triton.jit
def _load_ends(A, B, am, ak, bk, bn, M, N, K, m, n, s, is_wanted, SHAPE: tl.constexpr):
    """(rows × 16 of A, 16 × cols of B): the products that no words have."""
    d = tl.arange(0, ENDS)
    if SHAPE.wide == "n":  # the first and the last row of B
        k = tl.where(d == 0, 0, K - 1)
        inside = (d == 0) | (d == 1) & (K > 1)
    else:  # what is left of the first word and of the last
        last = (K + s) // WORD
        k = tl.where(d < WORD, d - s, last * WORD - s + d - WORD)
        inside = tl.where(d < WORD, (s > 0) & (k >= 0), (last > 0) | (s == 0)) & (k < K)
    inside = inside & is_wanted
    a = tl.load(
        A + ((m.to(tl.int64) * am)[:, None] + (k.to(tl.int64) * ak)[None, :]),
        mask=(m < M)[:, None] & inside[None, :],
        other=0.0,
    )
    b = tl.load(
        B + ((k.to(tl.int64) * bk)[:, None] + (n.to(tl.int64) * bn)[None, :]),
        mask=inside[:, None] & ((n >= 0) & (n < N))[None, :],
        other=0.0,
    )
    return a, b


@triton.jit
def _shifted(acc, SHAPE: tl.constexpr):
    """Sums of a class as columns of the next, whose rows begin STEP elements later in a word. No sums of C are lost."""
    STEP: tl.constexpr = WORD // SHAPE.classes
    c = tl.maximum(tl.arange(0, SHAPE.cols) - STEP, 0)
    return tl.gather(acc, tl.broadcast_to(c[None, :], (SHAPE.rows, SHAPE.cols)), 1)


@triton.jit
def _packed_sums(
    P, B, bk, bn, N, K, pitch, size, m0, at, chunk, tile_n, r, s, SHAPE: tl.constexpr, MERGES: tl.constexpr
):  # fmt: skip
    """The sums of a block over `at` … `at + chunk − 1` of a class, or with MERGES of all, in the order of their shifts:
    columns of sums move by the same number from each to the next."""
    STEP: tl.constexpr = WORD // SHAPE.classes
    acc = tl.zeros((SHAPE.rows, SHAPE.cols), tl.float32)
    rows = (m0 + tl.arange(0, SHAPE.rows))[:, None] * pitch + tl.arange(0, SHAPE.depth)[None, :]
    steps = chunk // SHAPE.depth
    for i in tl.range(0, SHAPE.classes * steps if MERGES else steps, num_stages=SHAPE.stages):
        if MERGES:
            j = i // steps
            here = at + (i - j * steps) * SHAPE.depth
            s = SHAPE.start % STEP + STEP * j
            # the class that is shifted by s; an odd number is its own inverse modulo 8
            r = (j + SHAPE.classes - SHAPE.start // STEP) * (bk // STEP % WORD) % SHAPE.classes
        else:
            here = at + i * SHAPE.depth
        a = tl.load(tl.multiple_of(P + (r.to(tl.int64) * size + here), 2 * WORD) + rows)
        b = _load_words(B, bk, bn, N, K, here, tile_n, r, s, SHAPE)
        acc = tk.mma_AB(a, b, acc)
        if MERGES:
            # A use of the sums waits for tensor cores. If these wrote them across a branch, ptxas would serialise wgmma
            acc = tl.where(steps > 0, acc, 0.0)
            if (i + 1) % steps == 0 and i + 1 < SHAPE.classes * steps:
                acc = _shifted(acc, SHAPE)
    return acc


@plain_kernel(num_stages=1, launch_pdl=True)
@triton.jit
def packed_product(
    A, P, B, C, operands, partials, counters, M, N, K, chunk, pitch, size, am, ak, bk, bn, cm, cn,
    SHAPE: tl.constexpr, MERGES: tl.constexpr, REDUCES: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """C = epilogue(A·B), P is A as `pack_rows` leaves it. Grid: tiles of C (rows first), parts of K.

    REDUCES: `add_parts` adds the parts; else the last part of a tile to arrive.
    """
    tk.dependency_wait()
    tile, part = tl.program_id(0), tl.program_id(1)
    m0, tile_n, part_of_class, r, s, n0 = _place_of(tile, part, M, bk, bn, SHAPE)
    if MERGES:
        STEP: tl.constexpr = WORD // SHAPE.classes
        part_of_class, s = part, SHAPE.start % STEP + STEP * (SHAPE.classes - 1)
    shift = s if SHAPE.wide == "n" else 0
    n_step = SHAPE.classes if SHAPE.wide == "k" else 1
    m, i = m0 + tl.arange(0, SHAPE.rows), tl.arange(0, SHAPE.cols) - shift
    is_first = part == 0
    a, b = _load_ends(A, B, am, ak, bk, bn, M, N, K, m, n0 + i * n_step, s, is_first, SHAPE)
    total = _packed_sums(P, B, bk, bn, N, K, pitch, size, m0, part_of_class * chunk, chunk, tile_n, r, s, SHAPE, MERGES)
    tk.dependents_launch()
    total = tk.mma_AB(a, b, total)
    if REDUCES:
        rows = (tl.arange(0, SHAPE.rows) * SHAPE.cols)[:, None]
        places = partials + (tile * tl.num_programs(1) + part) * (SHAPE.rows * SHAPE.cols) + rows + i[None, :]
        tl.store(places, total, mask=((i >= 0) & (i < SHAPE.span))[None, :])
    elif SHAPE.is_split:
        if _is_last_part(total, i, tile, part, partials, counters, SHAPE):
            _finish_parts(C, cm, cn, m0, n0, M, N, tile, partials, counters, operands, SHAPE, EPILOGUE)
    else:
        n = n0 + i * n_step
        inside = (m < M)[:, None] & ((i >= 0) & (i < SHAPE.span) & (n < N))[None, :]
        _finish(total, C, cm, cn, m, n, inside, operands, EPILOGUE)


@plain_kernel(launch_pdl=True)
@triton.jit
def add_parts(
    C, operands, partials, M, N, parts, bk, bn, cm, cn,
    SHAPE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """C = epilogue(sum of a tile's parts), in their order: the same bits in every run. Grid: tiles, parts of rows."""
    tk.dependency_wait()
    tk.dependents_launch()
    tile = tl.program_id(0)
    m0, tile_n, part_of_class, r, s, n0 = _place_of(tile, 0, M, bk, bn, SHAPE)
    row, i = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, SHAPE.cols)
    places = partials + tile * parts * (SHAPE.rows * SHAPE.cols) + ((row * SHAPE.cols)[:, None] + i[None, :])
    m, n = m0 + row, n0 + i * (SHAPE.classes if SHAPE.wide == "k" else 1)
    total = tl.zeros((ROWS, SHAPE.cols), tl.float32)
    for first in range(0, parts, AT_ONCE):  # several loads are in flight at once
        for p in tl.static_range(AT_ONCE):
            total += tl.load(
                places + (first + p) * (SHAPE.rows * SHAPE.cols),
                mask=((i < SHAPE.span) & (first + p < parts))[None, :],
                other=0.0,
            )
    inside = (m < M)[:, None] & ((i < SHAPE.span) & (n < N))[None, :]
    _finish(total, C, cm, cn, m, n, inside, operands, EPILOGUE)


class Packed(Unaligned):
    """The plan of a product whose A is packed; of `Unaligned` where B has no words. A call makes two launches, three
    with `Tiles.reduces`.
    """

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        shape, tiles, block = self.geometry, self.tiles, self.geometry.block()
        row_tiles = triton.cdiv(self.extents["M"], tiles.rows)
        classes, rows, pitch = shape.classes, row_tiles * tiles.rows, tiles.parts * shape.chunk
        self.packed_elements = classes * rows * pitch
        extents = self.extents | dict(pitch=pitch, size=rows * pitch, parts=shape.parts)
        self.reduces = tiles.reduces and shape.parts > 1

        def launch(kernel: Any, names: str, warps: int, **constants: Any) -> tuple[Any, tuple[int, ...]]:
            wanted = {name: extents[name] for name in names.split()}
            return keyed(kernel, dict(SHAPE=block, **constants), wanted, warps)

        shifts, spread = (1, classes) if shape.along == "n" else (classes, 1)
        self.pack_grid = (triton.cdiv(pitch * spread, PACKED_DEPTH), rows // PACKED_ROWS, shifts)
        self.pack = launch(pack_rows, "M K pitch am ak bk bn", 4, ROWS=PACKED_ROWS, DEPTH=PACKED_DEPTH)
        self.product = launch(
            packed_product, "M N K chunk pitch size am ak bk bn cm cn", tiles.warps,
            MERGES=tiles.merges and shape.along == "n", REDUCES=self.reduces, EPILOGUE=self.epilogue,
        )  # fmt: skip
        added = min(ADDED_ROWS, tiles.rows)
        self.add_grid = (shape.tiles, tiles.rows // added)
        self.add = launch(
            add_parts, "M N parts bk bn cm cn", 4, ROWS=added, AT_ONCE=ADDED_AT_ONCE, EPILOGUE=self.epilogue
        )

    def _launches(
        self,
        a: Tensor,
        b: Tensor,
        operands: tuple[Tensor | None, ...],
        out: Tensor,
        packed: Tensor,
        sums: tuple[Any, ...],
    ) -> list[tuple[Any, Any, tuple[Any, ...], Any]]:
        """(kernel, grid, arguments, key) of the launches of a call, in their order."""
        if self.swap_ab:
            a, b = b, a
        given = self._given(operands)
        found = [
            (pack_rows, self.pack_grid, (a, packed, *self.pack[1]), self.pack[0]),
            (packed_product, self.grid, (a, packed, b, out, given, *sums, *self.product[1]), self.product[0]),
        ]
        if self.reduces:
            found.append((add_parts, self.add_grid, (out, given, sums[0], *self.add[1]), self.add[0]))
        return found

    def compile_all(
        self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor, arch: str = "sm_90a"
    ) -> list[Any]:
        """Compile all kernels without a GPU, see `compile`."""
        sums, packed = self._sums(torch.device("meta")), torch.empty(1, dtype=a.dtype, device="meta")
        return [
            kernel.compile(key, argument_types(given, kernel.runtime), capability_of(arch))
            for kernel, _, given, key in self._launches(a, b, operands, out, packed, sums)
        ]

    def compile(
        self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor, arch: str = "sm_90a"
    ) -> Any:
        if not self.geometry.along:
            return super().compile(a, b, operands, out, arch)
        return self.compile_all(a, b, operands, out, arch)[1]

    def __call__(self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor | None) -> Tensor:
        if not self.geometry.along:
            return super().__call__(a, b, operands, out)
        if out is None:
            out = a.new_empty(*self.shape, dtype=self.dtype)
        packed = a.new_empty(self.packed_elements)
        for kernel, grid, given, key in self._launches(a, b, operands, out, packed, self._sums(a.device)):
            kernel.launcher(grid, given, key)
        return out
