"""Products of matrices that TMA cannot address, by ordinary loads: for few rows or columns, and for small products.

Memory or launches bound such a product, so a copy to aligned memory would cost as much as the product itself.

B is read either by element, which always works, or in words of 16 bytes. With a row pitch of `ld` elements, rows i and
i + 8 / gcd(ld, 8) begin at the same offset in a word. So the rows form 8 / gcd(ld, 8) classes. Each class is a matrix
of aligned words, whose columns are shifted by less than a word. What words do not cover without reading beyond the
matrix, the "ends", is read by element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.arch import capability_of
from tritonkittens.kernels._tensors import HALF_TYPES, TMA_BYTES, addressable, storable
from tritonkittens.kernels.gemm.device.epilogue import NO_TENSOR, Steps
from tritonkittens.kernels.gemm.device.unaligned_tiles import (
    FEW_ROWS,
    MOST_PACKED,
    SMALL_PRODUCT,
    WORD,
    Extents,
    Tiles,
    classes_of,
    packed,
    words_along,
)
from tritonkittens.launch import plain_kernel, specialization, workspace
from tritonkittens.launch.arguments import argument_types

MAX_STRIDE = 1 << 20  # elements: places in a tile are 32-bit numbers


# ---------------------------------------------------------------- where it is used


def oriented(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of the kernel that multiplies `a` by `b`. B has at least as many columns as A has rows: if need be, the
    transposed result is computed."""
    return (b.T, a.T) if b.shape[1] < a.shape[0] else (a, b)


def is_faster_unaligned(a: Tensor, b: Tensor) -> bool:
    """Are ordinary loads faster than copies to aligned memory and TMA (measured: docs/notes/gemm.md)?

    A small product ends before the launches of copies do. With few rows or columns, the product reads its large operand
    once; a copy would read it, write it and read it again. Not so where TMA can address that operand. Sums of classes
    of rows along K are written and read, too: with a short K they take as much memory traffic as the operand.
    """
    a, b = oriented(a, b)
    (m, k), n, along = a.shape, b.shape[1], words_along(b.stride())
    if m == 1 or m * n * k <= SMALL_PRODUCT:
        return True
    if not along:
        return m <= FEW_ROWS
    if m > MOST_PACKED or addressable(b) or addressable(b.mT):
        return False
    return along == "k" or k > 3 * classes_of(b.stride()) * packed(m, along)[0].rows


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
    return is_faster_unaligned(a, b) and needs_copies(a, b, residual, dtype, out)


# ---------------------------------------------------------------- the kernel


@triton.jit
def _place_of(tile, part, M, b, SHAPE: tl.constexpr):
    """The place of a block.

    Returns its first row `m0` and column `n0`, class `r` of rows of B, the shift `s` of that class, and tile of columns
    `tile_n` and part of K `part`: within the class, where classes have their own.
    """
    row_tiles = tl.cdiv(M, SHAPE.rows)
    m0, tile_n = tile % row_tiles * SHAPE.rows, tile // row_tiles
    if SHAPE.wide == "n":
        r = part % SHAPE.classes
        s = ((SHAPE.start + r * b.stride_k) % WORD).to(tl.int32)
        return tk.struct(m0=m0, n0=tile_n * SHAPE.span, r=r, s=s, tile_n=tile_n, part=part // SHAPE.classes)
    elif SHAPE.wide == "k":
        r, tile_n = tile_n % SHAPE.classes, tile_n // SHAPE.classes
        s = ((SHAPE.start + r * b.stride_n) % WORD).to(tl.int32)
        return tk.struct(m0=m0, n0=r + SHAPE.classes * SHAPE.cols * tile_n, r=r, s=s, tile_n=tile_n, part=part)
    else:
        return tk.struct(m0=m0, n0=tile_n * SHAPE.cols, r=0, s=0, tile_n=tile_n, part=part)


@triton.jit
def _columns_of(block, SHAPE: tl.constexpr):
    """Where in its tile of C the columns of a block's sums lie: from 0 to `span` − 1, or outside."""
    i = tl.arange(0, SHAPE.cols)
    if SHAPE.wide == "n":
        i -= block.s
    return i


@triton.jit
def _are_words(at, K, block, SHAPE: tl.constexpr):
    """Which places of a tile's depth from `at` on are read in words. The others are the ends, see `_load_ends`."""
    d = tl.arange(0, SHAPE.depth)
    if SHAPE.wide == "n":
        k = block.r + SHAPE.classes * (at + d)
        return (k > 0) & (k < K - 1)
    else:  # the depth is counted from the beginning of the first word
        word = (tl.multiple_of(at, WORD) + d) // WORD
        return (word >= tl.cdiv(block.s, WORD)) & (word < (K + block.s) // WORD)


@triton.jit
def _load_b(b, block, at, is_wanted, SHAPE: tl.constexpr):
    """A depth × cols tile of B at `at`, zero outside and where the ends are.

    Words may reach into neighbouring rows: into columns that are dropped.
    """
    d, c = tl.arange(0, SHAPE.depth), tl.arange(0, SHAPE.cols)
    if SHAPE.wide == "n":
        pitch = tl.multiple_of(SHAPE.classes * b.stride_k, WORD)
        first = block.r * b.stride_k - block.s + block.tile_n * SHAPE.span + at.to(tl.int64) * pitch
        first, places = tl.multiple_of(b.base + first, 2 * WORD), (d * pitch)[:, None] + c[None, :]
        words = (tl.multiple_of(block.tile_n * SHAPE.span, WORD) + c) // WORD < (b.N + block.s + WORD - 1) // WORD
        inside = _are_words(at, b.K, block, SHAPE)[:, None] & words[None, :]
    elif SHAPE.wide == "k":
        pitch = tl.multiple_of(SHAPE.classes * b.stride_n, WORD)
        first = block.r * b.stride_n - block.s + at + block.tile_n.to(tl.int64) * SHAPE.cols * pitch
        first, places = tl.multiple_of(b.base + first, 2 * WORD), d[:, None] + (c * pitch)[None, :]
        n = block.r + SHAPE.classes * (block.tile_n * SHAPE.cols + c)
        inside = _are_words(at, b.K, block, SHAPE)[:, None] & (n < b.N)[None, :]
    else:
        first = b.base + (at.to(tl.int64) * b.stride_k + block.n0.to(tl.int64) * b.stride_n)
        places = (d * b.stride_k)[:, None] + (c * b.stride_n)[None, :]
        inside = (at + d < b.K)[:, None] & (block.n0 + c < b.N)[None, :]
    return tl.load(first + places, mask=inside & is_wanted, other=0.0)


@triton.jit
def _load_a(a, block, at, is_wanted, SHAPE: tl.constexpr):
    """The rows × depth tile of A that belongs to the tile of B at `at`, zero where that is."""
    d = tl.arange(0, SHAPE.depth)
    first, step = at, 1
    if SHAPE.wide == "n":
        first, step = block.r + SHAPE.classes * at, SHAPE.classes
    elif SHAPE.wide == "k":
        first = at - block.s
    inside = _are_words(at, a.K, block, SHAPE) if SHAPE.wide != "" else first + d < a.K
    places = a.base + (block.m0.to(tl.int64) * a.stride_m + first.to(tl.int64) * a.stride_k)
    if SHAPE.rows == 1:
        return tl.load(places + d * (step * a.stride_k), mask=inside & is_wanted, other=0.0)
    else:
        rows = tl.arange(0, SHAPE.rows)
        return tl.load(
            places + ((rows * a.stride_m)[:, None] + (d * (step * a.stride_k))[None, :]),
            mask=(block.m0 + rows < a.M)[:, None] & (inside & is_wanted)[None, :],
            other=0.0,
        )


@triton.jit
def _load_ends(a, b, block, is_wanted, DEPTH: tl.constexpr, SHAPE: tl.constexpr):
    """(rows × DEPTH of A, DEPTH × cols of B): the products that no words have."""
    d, s = tl.arange(0, DEPTH), block.s
    if SHAPE.wide == "n":  # the first and the last row of B
        k = tl.where(d == 0, 0, b.K - 1)
        inside = (d == 0) | (d == 1) & (b.K > 1)
        n = block.n0 + tl.arange(0, SHAPE.cols) - s
    else:  # what is left of the first word and of the last
        last = (b.K + s) // WORD
        k = tl.where(d < WORD, d - s, last * WORD - s + d - WORD)
        inside = tl.where(d < WORD, (s > 0) & (k >= 0), (last > 0) | (s == 0)) & (k < b.K)
        n = block.n0 + tl.arange(0, SHAPE.cols) * SHAPE.classes
    m, inside = block.m0 + tl.arange(0, SHAPE.rows), inside & is_wanted
    x = tl.load(
        a.base + ((m.to(tl.int64) * a.stride_m)[:, None] + (k.to(tl.int64) * a.stride_k)[None, :]),
        mask=(m < a.M)[:, None] & inside[None, :],
        other=0.0,
    )
    y = tl.load(
        b.base + ((k.to(tl.int64) * b.stride_k)[:, None] + (n.to(tl.int64) * b.stride_n)[None, :]),
        mask=inside[:, None] & ((n >= 0) & (n < b.N))[None, :],
        other=0.0,
    )
    return x, y


@triton.jit
def _add_product(acc, x, y, SHAPE: tl.constexpr):
    """The sums with the product of a tile of A and one of B; for one row, they are summed along the depth at the
    end."""
    if SHAPE.rows == 1:
        return acc + x.to(tl.float32)[:, None] * y.to(tl.float32)
    else:
        return tk.mma_AB(x, y, acc)


@triton.jit
def _sums_of(a, b, block, at, stop, SHAPE: tl.constexpr):
    """The sums of a block over its part of K, `at` … `stop` − 1, and in the first part over the ends."""
    if SHAPE.wide != "":
        DEPTH: tl.constexpr = 2 if SHAPE.wide == "n" else 2 * WORD
        first_x, first_y = _load_ends(a, b, block, tl.program_id(1) == 0, DEPTH, SHAPE)
    LINES: tl.constexpr = SHAPE.depth if SHAPE.rows == 1 else SHAPE.rows
    acc = tl.zeros((LINES, SHAPE.cols), tl.float32)
    x = _load_a(a, block, at, True, SHAPE)
    if SHAPE.stages > 1:  # a pipeline of asynchronous copies, of B alone: the row of A begins anywhere
        for here in tl.range(at, stop, SHAPE.depth, num_stages=SHAPE.stages):
            y = _load_b(b, block, here, True, SHAPE)
            next_x = _load_a(a, block, here + SHAPE.depth, here + SHAPE.depth < stop, SHAPE)
            acc = _add_product(acc, x, y, SHAPE)
            x = next_x
    else:
        y = _load_b(b, block, at, True, SHAPE)
        for following in range(at + SHAPE.depth, stop + SHAPE.depth, SHAPE.depth):
            next_x = _load_a(a, block, following, following < stop, SHAPE)
            next_y = _load_b(b, block, following, following < stop, SHAPE)
            acc = _add_product(acc, x, y, SHAPE)
            x, y = next_x, next_y
    if SHAPE.rows == 1:
        acc = tl.sum(acc, 0)[None, :]
        if SHAPE.wide != "":
            acc += tl.sum(tl.trans(first_x).to(tl.float32) * first_y.to(tl.float32), 0)[None, :]
    return acc


@triton.jit
def _store_part(total, i, tile, partials, SHAPE: tl.constexpr):
    """Store the sums of a block's part of a tile, whose columns lie at `i`."""
    part = tile * tl.num_programs(1) + tl.program_id(1)
    places = (tl.arange(0, SHAPE.rows) * SHAPE.cols)[:, None] + i[None, :]
    tl.store(partials + part * (SHAPE.rows * SHAPE.cols) + places, total, mask=((i >= 0) & (i < SHAPE.span))[None, :])


@triton.jit
def _sum_of_parts(partials, tile, parts, rows, SHAPE: tl.constexpr):
    """Add the parts of these rows of a tile, in their order: the same bits in every run."""
    UNROLL: tl.constexpr = SHAPE.unroll
    i = tl.arange(0, SHAPE.cols)
    places = partials + tile * parts * (SHAPE.rows * SHAPE.cols) + ((rows * SHAPE.cols)[:, None] + i[None, :])
    total = tl.zeros((rows.shape[0], SHAPE.cols), tl.float32)
    for first in range(0, parts, UNROLL):  # several loads are in flight at once
        for p in tl.static_range(UNROLL):
            inside = ((i < SHAPE.span) & (first + p < parts))[None, :]
            total += tl.load(places + (first + p) * (SHAPE.rows * SHAPE.cols), mask=inside, other=0.0)
    return total


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
def _finish(y, c, block, m, i, operands, SHAPE: tl.constexpr, EPILOGUE: tl.constexpr):
    """The epilogue (`epilogue.py`) of sums of rows `m`, whose columns lie at `i` of a block's tile, and their store.
    `operands`: of every step a tuple."""
    n = block.n0 + i * (SHAPE.classes if SHAPE.wide == "k" else 1)
    inside = (m < c.M)[:, None] & ((i >= 0) & (i < SHAPE.span) & (n < c.N))[None, :]
    STEPS: tl.constexpr = EPILOGUE.steps
    for step in tl.static_range(len(STEPS)):
        values = tk.struct()
        for j in tl.static_range(len(STEPS[step].operands)):
            value = _value(operands[step][j], STEPS[step].operands[j], m, n, inside)
            values = tk.with_field(values, STEPS[step].parameters[j], value)
        y = tk.map(y, STEPS[step].function, values)
    places = c.base + ((m.to(tl.int64) * c.stride_m)[:, None] + (n.to(tl.int64) * c.stride_n)[None, :])
    tl.store(places, y.to(c.base.dtype.element_ty), mask=inside)


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
    a = tk.struct(base=A, stride_m=am, stride_k=ak, M=M, K=K)
    b = tk.struct(base=B, stride_k=bk, stride_n=bn, K=K, N=N)
    c = tk.struct(base=C, stride_m=cm, stride_n=cn, M=M, N=N)
    tile, parts = tl.program_id(0), tl.num_programs(1)
    block = _place_of(tile, tl.program_id(1), M, b, SHAPE)
    at = block.part * chunk
    total = _sums_of(a, b, block, at, at + chunk, SHAPE)
    rows, i = tl.arange(0, SHAPE.rows), _columns_of(block, SHAPE)
    if SHAPE.is_split:
        _store_part(total, i, tile, partials, SHAPE)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == parts - 1:
            total = _sum_of_parts(partials, tile, parts, rows, SHAPE)
            _finish(total, c, block, block.m0 + rows, tl.arange(0, SHAPE.cols), operands, SHAPE, EPILOGUE)
            tl.store(counters + tile, 0)  # as before the launch
    else:
        _finish(total, c, block, block.m0 + rows, i, operands, SHAPE, EPILOGUE)


# ---------------------------------------------------------------- the plan


STRIDES = ("am", "ak", "bk", "bn", "cm", "cn")


class Launch(NamedTuple):
    """A launch of a plan: what the launcher of a `PlainKernel` takes, `arguments` as a function of the tensors among
    them, in their order."""

    kernel: Any
    grid: tuple[int, ...]
    key: Any
    arguments: Callable[..., tuple[Any, ...]]

    def __call__(self, *tensors: Tensor) -> None:
        self.kernel.launcher(self.grid, self.arguments(*tensors), self.key)

    def bound(self, *tensors: Tensor) -> Callable[..., None]:
        """The launch with tensors like these, bound: `Launcher.bind`."""
        places = tuple(range(len(tensors)))
        bound: Callable[..., None] = self.kernel.launcher.bind(
            self.grid, self.arguments(*tensors), self.key, places, self
        )
        return bound

    def compile(self, tensors: tuple[Tensor, ...], arch: str) -> Any:
        """Compile for tensors like these on any device."""
        types = argument_types(self.arguments(*tensors), self.kernel.runtime)
        return self.kernel.compile(self.key, types, capability_of(arch))


def keyed(kernel: Any, constants: dict[str, Any], extents: dict[str, int], warps: int) -> tuple[Any, tuple[int, ...]]:
    """(compile key, numbers at run time) of a kernel: strides of 1 are compiled in, multiples of a word are known."""
    constants = constants | {name: 1 for name, value in extents.items() if name in STRIDES and value == 1}
    given = {name: value for name, value in extents.items() if name not in constants}
    multiples = tuple((name, WORD.value) for name, value in given.items() if value % WORD.value == 0)
    options = {**kernel.options, "num_warps": warps}
    return specialization(tuple(constants.items()), multiples, tuple(options.items())), tuple(given.values())


class Unaligned:
    """The plan of a product by ordinary loads: later calls only launch.

    Args:
        a, b: matrices of a call, see `gemm`.
        operands: those of its epilogue by name, None for each that is not there.
        epilogue: its steps.
        numbers: what its steps take besides tensors.
        dtype, out: of the result, and where it is stored if not to new memory.
        tiles: how the product is split.
    """

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        operands: dict[str, Tensor | None],
        epilogue: Steps,
        numbers: dict[str, float],
        dtype: torch.dtype,
        out: Tensor | None,
        tiles: Tiles,
    ):
        self.shape, self.dtype, self.tiles = (a.shape[0], b.shape[1]), dtype, tiles
        self.swap_ab = self.shape[1] < self.shape[0]
        of_c = (self.shape[1], 1) if out is None else out.stride()
        a, b = oriented(a, b)
        (m, k), n = a.shape, b.shape[1]
        strides = dict(zip(STRIDES, (*a.stride(), *b.stride(), *(of_c[::-1] if self.swap_ab else of_c)), strict=True))
        start = b.data_ptr() % TMA_BYTES // b.element_size()
        self.extents = Extents(m, n, k, b.stride(), tiles, start)
        self.numbers = dict(M=m, N=n, K=k, chunk=self.extents.chunk, **strides)
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
        self.used = [x[0] for step in self.steps for x in step if isinstance(x, tuple)]
        self.launches = self._launches(epilogue)
        self._bound: list[Callable[..., None]] = []

    def _strides_of(self, x: Tensor | None, place: str) -> tuple[int, int]:
        """Strides along the kernel's rows and columns of what lies in C as `place` says."""
        assert x is not None
        rows, cols = (
            {"scalar": (0, 0), "row": (x.stride(0), 0), "col": (0, x.stride(-1)), "tile": x.stride()}[place]
            if x.ndim
            else (0, 0)
        )
        return (cols, rows) if self.swap_ab else (rows, cols)

    def _launches(self, epilogue: Steps) -> list[Launch]:
        """The launches of a call, in their order."""
        shape = self.extents
        key, numbers = keyed(
            unaligned_product, dict(SHAPE=shape.block(), EPILOGUE=epilogue), self.numbers, self.tiles.warps
        )
        return [
            Launch(
                unaligned_product,
                (shape.tiles, shape.parts),
                key,
                lambda a, b, out, *rest: (a, b, out, *self._given(rest, 2), *numbers),
            )
        ]

    def _given(self, rest: tuple[Tensor, ...], count: int) -> tuple[Any, ...]:
        """The epilogue's operands as a kernel takes them, and `count` tensors of partial sums, or None for each."""
        given, sums = iter(rest), rest[len(self.used) :] or (None,) * count
        steps = tuple(
            [tuple([(next(given), *x[1:]) if isinstance(x, tuple) else x for x in step]) for step in self.steps]
        )
        return steps, *sums

    def _sums(self, device: torch.device, counters: int) -> tuple[Tensor, ...]:
        """Memory for the sums of parts, and counters; nothing without parts."""
        shape = self.extents
        if shape.parts == 1:
            return ()
        return workspace(device, shape.tiles * shape.parts * self.tiles.rows * self.tiles.cols, counters)

    def _tensors(self, a: Tensor, b: Tensor, out: Tensor, given: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """Those of every launch: A, B, C and the epilogue's operands of the kernel, and memory."""
        return [(a, b, out, *given, *self._sums(a.device, self.extents.tiles))]

    def _tensors_of_call(
        self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor
    ) -> list[tuple[Tensor, ...]]:
        a, b = (b, a) if self.swap_ab else (a, b)
        return self._tensors(a, b, out, [operands[i] for i in self.used])

    def compile(
        self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor, arch: str = "sm_90a"
    ) -> list[Any]:
        """Compile without a GPU, for tensors like those of the plan on any device. Returns Triton's CompiledKernel of
        every launch."""
        tensors = self._tensors_of_call(a, b, operands, out)
        return [launch.compile(x, arch) for launch, x in zip(self.launches, tensors, strict=True)]

    def __call__(self, a: Tensor, b: Tensor, operands: tuple[Tensor | None, ...], out: Tensor | None) -> Tensor:
        if out is None:
            out = a.new_empty(self.shape, dtype=self.dtype)
        tensors = self._tensors_of_call(a, b, operands, out)
        if not self._bound:
            self._bound = [launch.bound(*x) for launch, x in zip(self.launches, tensors, strict=True)]
        for launch, x in zip(self._bound, tensors, strict=True):
            launch(*x)
        return out
