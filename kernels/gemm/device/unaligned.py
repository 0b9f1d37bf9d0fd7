"""Products of matrices that TMA cannot address, by ordinary loads: for few rows or columns, and for small products.

One launch, any strides. Memory or the launch bounds such a product, so a copy to aligned memory would cost as much as
the product itself.

B is read either by element, which always works, or in words of 16 bytes. With a row pitch of `ld` elements, rows i and
i + 8 / gcd(ld, 8) begin at the same offset in a word. So the rows form 8 / gcd(ld, 8) classes. Each class is a matrix
of aligned words, whose columns are shifted by less than a word.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.arch import capability_of
from tritonkittens.kernels._tensors import HALF_TYPES, TMA_BYTES, addressable, storable
from tritonkittens.kernels.gemm.device.epilogue import NO_TENSOR, Steps
from tritonkittens.kernels.gemm.device.unaligned_tiles import FEW_ROWS, WORD, Extents, Tiles, chosen
from tritonkittens.launch import multiprocessor_count, plain_kernel, specialization, workspace
from tritonkittens.launch.arguments import argument_types

# Where ordinary loads win over copies and TMA, see `is_faster_unaligned`
SMALL_PRODUCT = 1 << 26

MAX_STRIDE = 1 << 20  # elements: places in a tile are 32-bit numbers


# ---------------------------------------------------------------- where it is used


def is_faster_unaligned(m: int, n: int, k: int) -> bool:
    """Are ordinary loads faster than copies to aligned memory and TMA (measured: docs/notes/gemm.md)?

    With few rows or columns, the product reads its large operand once. A copy would read it, write it and read it
    again. A small product ends before the launches of copies do. Otherwise the product takes much longer than the
    copies, and TMA and large tiles make it faster.
    """
    return min(m, n) <= FEW_ROWS or m * n * k <= SMALL_PRODUCT


def needs_copies(a: Tensor, b: Tensor, residual: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> bool:
    """Would the kernels that move tiles by TMA need a copy of an operand, or of their result?"""
    operands = all(addressable(x) or addressable(x.mT) for x in (a, b)) and (residual is None or addressable(residual))
    result = b.shape[-1] * dtype.itemsize % TMA_BYTES == 0 if out is None else storable(out)
    return not (operands and result)


def takes(a: Tensor, b: Tensor, residual: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> bool:
    """Does `Unaligned` compute this product? It takes two matrices of 16-bit elements, where it beats copies."""
    matrices = a.ndim == b.ndim == 2 and a.dtype in HALF_TYPES and dtype in (*HALF_TYPES, torch.float32)
    if not matrices or max(*a.stride(), *b.stride()) > MAX_STRIDE:
        return False
    return is_faster_unaligned(a.shape[0], b.shape[1], a.shape[1]) and needs_copies(a, b, residual, dtype, out)


# ---------------------------------------------------------------- the kernel


@triton.jit
def _load_b(B, bk, bn, N, K, at, stop, tile_n, r, s, SHAPE: tl.constexpr):
    """A depth × cols tile of B at `at`, zero from `stop` and K on.

    `r`: the class of rows, which begin `s` elements after the beginning of a word.

    Words of the first and the last row may reach beyond the matrix, where nothing may be read: `_completed` loads their
    elements. Words of other rows reach into neighbouring rows: into columns that are dropped, or `_completed` clears
    them.
    """
    d, c = tl.arange(0, SHAPE.depth), tl.arange(0, SHAPE.cols)
    more = at < stop
    if SHAPE.wide == "n":  # words run along the columns
        k = r + SHAPE.classes * (at + d)
        pitch = tl.multiple_of(SHAPE.classes * bk, WORD)
        first = tl.multiple_of(B + (r * bk - s + tile_n * SHAPE.span + at.to(tl.int64) * pitch), 2 * WORD)
        words = (tl.multiple_of(tile_n * SHAPE.span, WORD) + c) // WORD < (N + s + WORD - 1) // WORD
        inside = ((k > 0) & (k < K - 1) & more)[:, None] & words[None, :]
        return tl.load(first + ((d * pitch)[:, None] + c[None, :]), mask=inside, other=0.0)
    elif SHAPE.wide == "k":  # words run along the depth, which is counted from the beginning of the first
        n = r + SHAPE.classes * (tile_n * SHAPE.cols + c)
        pitch = tl.multiple_of(SHAPE.classes * bn, WORD)
        word = (tl.multiple_of(at, WORD) + d) // WORD
        last = (K + s - 1) // WORD
        first = tl.multiple_of(B + (r * bn - s + at + tile_n.to(tl.int64) * SHAPE.cols * pitch), 2 * WORD)
        beyond = (word == 0)[:, None] & (n == 0)[None, :] | (word == last)[:, None] & (n == N - 1)[None, :]
        inside = ((word <= last) & more)[:, None] & (n < N)[None, :] & (beyond == 0)
        return tl.load(first + (d[:, None] + (c * pitch)[None, :]), mask=inside, other=0.0)
    else:
        first = B + (at.to(tl.int64) * bk + tile_n.to(tl.int64) * SHAPE.cols * bn)
        inside = ((at + d < K) & more)[:, None] & (tile_n * SHAPE.cols + c < N)[None, :]
        return tl.load(first + ((d * bk)[:, None] + (c * bn)[None, :]), mask=inside, other=0.0)


@triton.jit
def _completed(b, B, bk, bn, N, K, at, tile_n, r, s, SHAPE: tl.constexpr):
    """A tile of `_load_b` with the elements that were left out, and with zeros for those of neighbouring rows.

    NaN of a neighbour would spread, because zeros of A do not remove it. `_load_b` does not do this: it would wait for
    its own load.
    """
    d, c = tl.arange(0, SHAPE.depth), tl.arange(0, SHAPE.cols)
    if SHAPE.wide == "n":
        k, n = r + SHAPE.classes * (at + d), tile_n * SHAPE.span + c - s
        if (r + SHAPE.classes * at == 0) | (r + SHAPE.classes * (at + SHAPE.depth) >= K):
            left_out = ((k == 0) | (k == K - 1))[:, None] & ((n >= 0) & (n < N))[None, :]
            b = tl.where(
                left_out, tl.load(B + ((k.to(tl.int64) * bk)[:, None] + n[None, :]), mask=left_out, other=0.0), b
            )
        return b
    elif SHAPE.wide == "k":
        k, n = at + d - s, r + SHAPE.classes * (tile_n * SHAPE.cols + c)
        is_element = ((k >= 0) & (k < K))[:, None]
        last = (K + s - 1) // WORD
        if (r + tile_n == 0) & (at == 0) | (r + SHAPE.classes * SHAPE.cols * (tile_n + 1) >= N) & (
            at + SHAPE.depth > last * WORD
        ):
            left_out = ((at + d) // WORD == 0)[:, None] & (n == 0)[None, :] | ((at + d) // WORD == last)[:, None] & (
                n == N - 1
            )[None, :]
            left_out = left_out & is_element
            b = tl.where(
                left_out, tl.load(B + (k[:, None] + (n.to(tl.int64) * bn)[None, :]), mask=left_out, other=0.0), b
            )
        return tl.where(is_element, b, 0.0)
    else:
        return b


@triton.jit
def _load_a(A, am, ak, M, K, m, at, stop, r, s, SHAPE: tl.constexpr):
    """The rows × depth tile of A that belongs to the tile of B at `at`, zero outside."""
    d = tl.arange(0, SHAPE.depth)
    first, step = at, 1
    if SHAPE.wide == "n":
        first, step = r + SHAPE.classes * at, SHAPE.classes
    elif SHAPE.wide == "k":
        first = at - s
    k = first + d * step
    inside = (k >= 0) & (k < K) & (at < stop)
    places = A + (m.to(tl.int64) * am + first.to(tl.int64) * ak)
    if SHAPE.rows == 1:
        return tl.load(places + d * (step * ak), mask=inside, other=0.0)
    else:
        rows = tl.arange(0, SHAPE.rows)
        return tl.load(
            places + ((rows * am)[:, None] + (d * (step * ak))[None, :]),
            mask=(m + rows < M)[:, None] & inside[None, :],
            other=0.0,
        )


@triton.jit
def _value(operand, OPERAND: tl.constexpr, m, n, inside):
    """An operand of the epilogue: a number, or the values of a tensor, (pointer, stride of the rows, stride of the
    columns)."""
    if OPERAND.place == "constant":
        return tl.constexpr(OPERAND.constant)
    elif OPERAND.place == "number":
        return operand
    else:
        places = operand[0] + (m.to(tl.int64) * operand[1])[:, None] + (n.to(tl.int64) * operand[2])[None, :]
        return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _finish(y, C, cm, cn, m, n, inside, operands, EPILOGUE: tl.constexpr):
    """The epilogue of a tile of sums (`epilogue.py`) and its store. `operands`: of every step a tuple."""
    STEPS: tl.constexpr = EPILOGUE.steps
    for i in tl.static_range(len(STEPS)):
        values = tk.struct()
        for j in tl.static_range(len(STEPS[i].operands)):
            values = tk.with_field(
                values, STEPS[i].parameters[j], _value(operands[i][j], STEPS[i].operands[j], m, n, inside)
            )
        y = tk.map(y, STEPS[i].function, values)
    tl.store(
        C + ((m.to(tl.int64) * cm)[:, None] + (n.to(tl.int64) * cn)[None, :]), y.to(C.dtype.element_ty), mask=inside
    )


@triton.jit
def _place_of(tile, part, M, bk, bn, SHAPE: tl.constexpr):
    """The place of a block.

    Returns (first row, tile of columns, part of K, class of rows of B, shift of that class, first column).
    """
    row_tiles = tl.cdiv(M, SHAPE.rows)
    m0, tile_n = tile % row_tiles * SHAPE.rows, tile // row_tiles
    if SHAPE.wide == "n":
        r = part % SHAPE.classes
        s = ((SHAPE.start + r * bk) % WORD).to(tl.int32)
        return m0, tile_n, part // SHAPE.classes, r, s, tile_n * SHAPE.span
    elif SHAPE.wide == "k":
        r, tile_n = tile_n % SHAPE.classes, tile_n // SHAPE.classes
        s = ((SHAPE.start + r * bn) % WORD).to(tl.int32)
        return m0, tile_n, part, r, s, r + SHAPE.classes * SHAPE.cols * tile_n
    else:
        return m0, tile_n, part, 0, 0, tile_n * SHAPE.cols


@triton.jit
def _complete_tiles(at, stop, K, r, s, SHAPE: tl.constexpr):
    """(begin, end) of those tiles among `at` … `stop` − 1 that need no `_completed`: no first or last row or word."""
    if SHAPE.wide == "n":
        complete = (K + SHAPE.classes - 2 - r) // SHAPE.classes  # rows of the class in front of B's last
    else:
        complete = (K + s - 1) // WORD * WORD
    begin = tl.minimum(tl.maximum(at, SHAPE.depth), stop)
    return begin, tl.maximum(begin, tl.minimum(stop, complete // SHAPE.depth * SHAPE.depth))


@triton.jit
def _add_product(acc, a, b, SHAPE: tl.constexpr):
    """The sums with a tile's products; for one row, they are summed along the depth at the end."""
    if SHAPE.rows == 1:
        return acc + a.to(tl.float32)[:, None] * b.to(tl.float32)
    else:
        return tk.mma_AB(a, b, acc)


@triton.jit
def _sums_of(A, B, am, ak, bk, bn, M, N, K, m0, at, stop, tile_n, r, s, SHAPE: tl.constexpr):
    """The sums of a block over its part of K, `at` … `stop` − 1."""
    if SHAPE.rows == 1:
        acc = tl.zeros((SHAPE.depth, SHAPE.cols), tl.float32)
    else:
        acc = tl.zeros((SHAPE.rows, SHAPE.cols), tl.float32)
    begin, end = at, at
    if SHAPE.stages > 1:  # a pipeline of asynchronous copies, of B alone: rows of A begin anywhere
        begin, end = _complete_tiles(at, stop, K, r, s, SHAPE)
        a = _load_a(A, am, ak, M, K, m0, begin, end, r, s, SHAPE)
        for here in tl.range(begin, end, SHAPE.depth, num_stages=SHAPE.stages):
            b = _load_b(B, bk, bn, N, K, here, end, tile_n, r, s, SHAPE)
            next_a = _load_a(A, am, ak, M, K, m0, here + SHAPE.depth, end, r, s, SHAPE)
            acc = _add_product(acc, a, b, SHAPE)
            a = next_a
    # The other tiles, in front of `begin` and from `end` on; the next ones are loaded under the product of these
    before = begin - at
    here = tl.where(before > 0, at, end)
    a = _load_a(A, am, ak, M, K, m0, here, stop, r, s, SHAPE)
    b = _load_b(B, bk, bn, N, K, here, stop, tile_n, r, s, SHAPE)
    for i in range(SHAPE.depth, before + stop - end + SHAPE.depth, SHAPE.depth):
        following = tl.where(i < before, at, end - before) + i
        next_a = _load_a(A, am, ak, M, K, m0, following, stop, r, s, SHAPE)
        next_b = _load_b(B, bk, bn, N, K, following, stop, tile_n, r, s, SHAPE)
        b = _completed(b, B, bk, bn, N, K, here, tile_n, r, s, SHAPE)
        acc = _add_product(acc, a, b, SHAPE)
        a, b, here = next_a, next_b, following
    if SHAPE.rows == 1:
        return tl.sum(acc, 0)[None, :]
    else:
        return acc


@triton.jit
def _is_last_part(total, i, tile, part, partials, counters, SHAPE: tl.constexpr):
    """Store the sums of a part, columns `i`. Returns whether all other parts of the tile are stored."""
    rows = (tl.arange(0, SHAPE.rows) * SHAPE.cols)[:, None]
    tl.store(
        partials + (tile * tl.num_programs(1) + part) * (SHAPE.rows * SHAPE.cols) + rows + i[None, :],
        total,
        mask=((i >= 0) & (i < SHAPE.span))[None, :],
    )
    tl.debug_barrier()
    return tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1


@triton.jit
def _finish_parts(
    C, cm, cn, m0, n0, M, N, tile, partials, counters, operands, SHAPE: tl.constexpr, EPILOGUE: tl.constexpr
):  # fmt: skip
    """Add a tile's parts, in their order: the same bits in every run. Finish the tile, `strip` rows at a time. Its
    counter is zero again."""
    parts, i = tl.num_programs(1), tl.arange(0, SHAPE.cols)
    n = n0 + i * (SHAPE.classes if SHAPE.wide == "k" else 1)
    UNROLL: tl.constexpr = SHAPE.unroll
    for row in range(0, tl.minimum(M - m0, SHAPE.rows), SHAPE.strip):
        rows = row + tl.arange(0, SHAPE.strip)
        places = partials + tile * parts * (SHAPE.rows * SHAPE.cols) + ((rows * SHAPE.cols)[:, None] + i[None, :])
        total = tl.zeros((SHAPE.strip, SHAPE.cols), tl.float32)
        for first in range(0, parts, UNROLL):  # several loads are in flight at once
            for p in tl.static_range(UNROLL):
                total += tl.load(
                    places + (first + p) * (SHAPE.rows * SHAPE.cols),
                    mask=((i < SHAPE.span) & (first + p < parts))[None, :],
                    other=0.0,
                )
        inside = (m0 + rows < M)[:, None] & ((i < SHAPE.span) & (n < N))[None, :]
        _finish(total, C, cm, cn, m0 + rows, n, inside, operands, EPILOGUE)
    tl.store(counters + tile, 0)


@plain_kernel(num_stages=1)
@triton.jit
def unaligned_product(
    A, B, C, operands, partials, counters, M, N, K, chunk, am, ak, bk, bn, cm, cn,
    SHAPE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """C = epilogue(A·B), by strides. Grid: tiles of C (rows first), parts of K.

    A part is `chunk` of the depth, of one class where rows of words lie along K. The last part of a tile to arrive sums
    all of them, so that no block waits.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    m0, tile_n, part_of_class, r, s, n0 = _place_of(tile, part, M, bk, bn, SHAPE)
    at = part_of_class * chunk
    total = _sums_of(A, B, am, ak, bk, bn, M, N, K, m0, at, at + chunk, tile_n, r, s, SHAPE)
    shift = s if SHAPE.wide == "n" else 0
    n_step = SHAPE.classes if SHAPE.wide == "k" else 1
    m, i = m0 + tl.arange(0, SHAPE.rows), tl.arange(0, SHAPE.cols) - shift
    if SHAPE.is_split:
        if _is_last_part(total, i, tile, part, partials, counters, SHAPE):
            _finish_parts(C, cm, cn, m0, n0, M, N, tile, partials, counters, operands, SHAPE, EPILOGUE)
    else:
        n = n0 + i * n_step
        inside = (m < M)[:, None] & ((i >= 0) & (i < SHAPE.span) & (n < N))[None, :]
        _finish(total, C, cm, cn, m, n, inside, operands, EPILOGUE)


NO_SUMS = (None, None)
STRIDES = ("am", "ak", "bk", "bn", "cm", "cn")


# ---------------------------------------------------------------- the plan


def keyed(kernel: Any, constants: dict[str, Any], extents: dict[str, int], warps: int) -> tuple[Any, tuple[int, ...]]:
    """(compile key, numbers at run time) of a kernel: strides of 1 are compiled in, multiples of a word are known."""
    constants = constants | {name: 1 for name, value in extents.items() if name in STRIDES and value == 1}
    given = {name: value for name, value in extents.items() if name not in constants}
    multiples = tuple((name, WORD.value) for name, value in given.items() if value % WORD.value == 0)
    options = {**kernel.options, "num_warps": warps}
    return specialization(tuple(constants.items()), multiples, tuple(options.items())), tuple(given.values())


class Unaligned:
    """The plan of a product by ordinary loads: later calls only launch. The operand with more rows or columns is the
    kernel's B."""

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        operands: dict[str, Tensor | None],
        epilogue: Steps,
        numbers: dict[str, float],
        dtype: torch.dtype,
        out: Tensor | None,
        tiles: Tiles | None = None,
    ):
        (m, k), n = a.shape, b.shape[1]
        self.shape, self.dtype, self.is_same = (m, n), dtype, dtype == a.dtype
        self.swap_ab = n < m
        strides = dict(zip(STRIDES, (*a.stride(), *b.stride(), *((n, 1) if out is None else out.stride()))))
        if self.swap_ab:
            m, n, (a, b) = n, m, (b, a)
            order = ("bn", "bk", "ak", "am", "cn", "cm")
            strides = dict(zip(strides, [strides[name] for name in order]))
        of_b = (strides["bk"], strides["bn"])
        start = b.data_ptr() % TMA_BYTES // b.element_size()
        self.tiles = tiles or chosen(m, n, k, of_b, multiprocessor_count(a.device))
        shape = Extents(m, n, k, of_b, self.tiles, start)
        self.grid = (shape.tiles, shape.parts)
        self.room = (
            (shape.tiles * shape.parts * self.tiles.rows * self.tiles.cols, shape.tiles) if shape.parts > 1 else None
        )
        index = {name: i for i, name in enumerate(operands)}
        # Of every step, of every operand: its number among those of a call with its strides, or what it is
        self.steps = tuple(
            tuple(
                numbers.get(x.name)
                if x.place in NO_TENSOR
                else (index[x.name], *self._strides_of(operands[x.name], x.place))
                for x in step.operands
            )
            for step in epilogue.steps
        )
        self.has_operands = any(step.reads_tensors for step in epilogue.steps)
        self.geometry, self.epilogue = shape, epilogue
        self.extents = dict(M=m, N=n, K=k, chunk=shape.chunk, **strides)
        self.key, self.numbers = keyed(
            unaligned_product, dict(SHAPE=shape.block(), EPILOGUE=epilogue), self.extents, self.tiles.warps
        )

    def _strides_of(self, x: Tensor | None, place: str) -> tuple[int, int]:
        """Strides along the kernel's rows and columns of what lies in C as `place` says."""
        assert x is not None
        rows, cols = (
            {"scalar": (0, 0), "row": (x.stride(0), 0), "col": (0, x.stride(-1)), "tile": x.stride()}[place]
            if x.ndim
            else (0, 0)
        )
        return (cols, rows) if self.swap_ab else (rows, cols)

    def _arguments(
        self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor, sums: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        given = self._given(operands)
        return (b, a, out, given, *sums, *self.numbers) if self.swap_ab else (a, b, out, given, *sums, *self.numbers)

    def _sums(self, device: torch.device) -> tuple[Any, Any]:
        """Memory for the sums of parts and counters of tiles; on the meta device it stands for such memory."""
        if self.room is None:
            return NO_SUMS
        if device.type == "meta":
            return tuple(torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
        return workspace(device, *self.room)

    def _given(self, operands: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """The epilogue's operands as the kernel takes them."""
        if not self.has_operands:
            return self.steps
        return tuple(
            [tuple([(operands[x[0]], *x[1:]) if isinstance(x, tuple) else x for x in step]) for step in self.steps]
        )

    def compile(
        self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor, arch: str = "sm_90a"
    ) -> Any:
        """Compile without a GPU, for tensors like those of the plan on any device; returns Triton's CompiledKernel."""
        sums = self._sums(torch.device("meta"))
        types = argument_types(self._arguments(a, b, operands, out, sums), unaligned_product.runtime)
        return unaligned_product.compile(self.key, types, capability_of(arch))

    def __call__(self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor | None) -> Tensor:
        if out is None:
            out = a.new_empty(*self.shape) if self.is_same else a.new_empty(*self.shape, dtype=self.dtype)
        sums = self._sums(a.device)
        unaligned_product.launcher(self.grid, self._arguments(a, b, operands, out, sums), self.key)
        return out
