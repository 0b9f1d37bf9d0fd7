"""A product of whole tiles in one block of PTX: fence, the wgmma of all K steps, commit and wait."""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from .._asm import builtin, require, unwrap
from .._matrix_descriptors import descriptor_asm
from .._tile_operands import explicit_only, is_tile, letter, registers, tiles_of, update_tiles
from .._traced import Semantic, Traced
from .descriptors import Operand, shared_operand
from .fragments import accumulator_shape, fragment_asm, fragment_steps
from .shapes import PTX_TYPES, Multiply, check, mma_async_asm


class WholeProduct(NamedTuple):
    """One `mma_sync`: the instruction of each of its `steps` K steps, and where the operands lie.

    a         None: A is in registers, with `per_word` elements in a 32-bit word
    unpacked  the accumulator is a tile of float16, which the instruction wants in packed pairs
    """

    multiply: Multiply
    a: Operand | None
    b: Operand
    steps: int
    per_word: int
    unpacked: bool

    @property
    def a_registers(self) -> int:
        """References of A in the block: its elements in a thread, or the address of a shared tile."""
        return 4 * self.per_word * self.steps if self.a is None else 1


def _whole_product(
    tiles: Sequence[Traced],
    a: Traced,
    b: Traced,
    k_axes: tuple[int, int],
    immediates: tuple[int, int, bool],
    semantic: Semantic,
) -> WholeProduct:
    """The product of checked operands. `k_axes`: K's axis in A and in B; `immediates`: scale_a, scale_b, saturate.

    Errors: TypeError for a type or layout, ValueError for shapes that do not fit.
    """
    operand_b = shared_operand(b, k_axes[1])
    operand_a = None if is_tile(a) else shared_operand(a, k_axes[0])
    kind_a = operand_a.type if operand_a else PTX_TYPES.get(str(a.dtype))
    if kind_a is None:
        raise TypeError(f"wgmma.mma_sync of a register tile of {a.dtype}: the types are {', '.join(PTX_TYPES)}")
    unpacked = {str(tile.dtype) for tile in tiles} == {"fp16"}
    if unpacked:
        n, d = sum(unwrap(tile.type.shape[1]) for tile in tiles), "f16"
    else:
        n, d = accumulator_shape(tiles, kind_a in ("s8", "u8"))
    scale_a, scale_b, saturate = immediates
    trans_a, trans_b = bool(operand_a and not operand_a.k_major), not operand_b.k_major
    multiply = check(
        Multiply(n, d, kind_a, operand_b.type, operand_a is None, trans_a, trans_b, scale_a, scale_b, bool(saturate))
    )
    if operand_b.extent < n or (operand_a and operand_a.extent != 64):
        raise ValueError(
            f"wgmma.mma_sync with an accumulator of {n} columns, A {a.type}, B {b.type}: A has 64 rows and B at least "
            "N columns"
        )
    per_word, steps = (0, operand_a.k // multiply.k) if operand_a else fragment_steps(a, kind_a, semantic)
    if steps * multiply.k != operand_b.k:
        raise ValueError(f"wgmma.mma_sync: A has K={steps * multiply.k}, B has K={operand_b.k}")
    return WholeProduct(multiply, operand_a, operand_b, steps, per_word, unpacked)


def _accumulator_asm(product: WholeProduct, count: int) -> tuple[list[str], list[str], list[str]]:
    """(lines before the product, accumulator registers, lines after it) for accumulators of `count` references."""
    names = [f"${i}" for i in range(count)]
    if not product.unpacked:
        return [], names, []
    words = [f"w{i}" for i in range(product.multiply.accumulators)]
    pairs = [(word, names[2 * i], names[2 * i + 1]) for i, word in enumerate(words)]
    packing = [f"mov.b32 {word}, {{{low}, {high}}};" for word, low, high in pairs]
    unpacking = [f"mov.b32 {{{low}, {high}}}, {word};" for word, low, high in pairs]
    return [f".reg .b32 {', '.join(words)};", *packing], words, unpacking


def _a_asm(product: WholeProduct, first: int) -> tuple[list[str], list[str | list[str]]]:
    """(lines before the fence, A's operand in each K step) for A from reference $`first` on."""
    if product.a is not None:
        return [descriptor_asm("da", f"${first}", product.a.constant, "t")], [f"da{i}" for i in range(product.steps)]
    lines: list[str] = []
    fragments: list[str | list[str]] = []
    for step in range(product.steps):
        moves, words = fragment_asm(first, product.per_word, step, f"a{step}_")
        lines += ([f".reg .b32 {', '.join(words)};"] if moves else []) + moves
        fragments.append(words)
    return lines, fragments


def whole_product_asm(product: WholeProduct, count: int) -> str:
    """The block for accumulators of `count` references, which come first as results and again as arguments; then A,
    B's address and scale-d."""
    first = 2 * count
    after_a = first + product.a_registers
    before, names, after = _accumulator_asm(product, count)
    a_lines, a_operands = _a_asm(product, first)
    lines = [
        "{ .reg .pred p, always; .reg .b32 t, t0, t1; .reg .b64 da, db;",
        f"setp.ne.b32 p, ${after_a + 1}, 0;",
        "setp.eq.b32 always, 0, 0;",
        *before,
        descriptor_asm("db", f"${after_a}", product.b.constant, "t"),
        *a_lines,
        "wgmma.fence.sync.aligned;",
    ]
    for step, operand_a in enumerate(a_operands):
        lines.append(f".reg .b64 da{step}, db{step}; add.s64 db{step}, db, {product.b.offset(step) >> 4};")
        if product.a is not None:
            lines.append(f"add.s64 da{step}, da, {product.a.offset(step) >> 4};")
        lines.append(mma_async_asm(product.multiply, names, operand_a, f"db{step}", "always" if step else "p"))
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", *after, "}"]
    return "\n".join(lines)


@builtin
def _mma_sync(
    accumulator: Traced,
    a: Traced,
    b: Traced,
    k_axes: Traced,
    scale_d: Traced,
    immediates: Traced,
    _semantic: Semantic = None,
) -> Traced:
    require("wgmma.mma_async", only=(90,), _semantic=_semantic)
    explicit_only(_semantic, "wgmma.mma_sync")
    tiles, single = tiles_of(accumulator)
    (a,), _ = tiles_of(a)
    (b,), _ = tiles_of(b)
    product = _whole_product(tiles, a, b, unwrap(k_axes), unwrap(immediates), _semantic)
    block = whole_product_asm(product, sum(registers(tile.type, _semantic) for tile in tiles))
    letters = [letter(a.dtype)] * product.a_registers if product.a is None else ["r"]
    scale = _semantic.cast(_semantic.to_tensor(unwrap(scale_d)), tl.int32)
    out = update_tiles(block, tiles, [*letters, "r", "r"], (a, b, scale), _semantic)
    return out[0] if single else tl.tuple(out)


@triton.jit
def mma_sync(
    accumulator,
    a,
    b,
    a_k_axis: tl.constexpr = 1,
    b_k_axis: tl.constexpr = 0,
    scale_d=1,
    scale_a: tl.constexpr = 1,
    scale_b: tl.constexpr = 1,
    saturate: tl.constexpr = False,
):
    """accumulator = A B + (accumulator if scale_d else 0) over whole tiles, finished on return: fence, all K steps,
    commit and wait in one block.

    accumulator  a register tile or a tuple of them (see the module): float32, int32, or here also plain float16 tiles.
    a            shared tile with 64 rows, or a register fragment 64 x K; b: shared tile with at least N columns, of
                 which the first N are used.
    a_k_axis     the axis of K in a shared A: 1 for [M, K]. b_k_axis: 0 for B of [K, N], 1 for [N, K].
    Shared tiles are in a swizzled NVMMASharedLayout or in core_matrix_layout; which operands are MN-major follows from
    it. Writes to them by ordinary stores must be made visible first (barrier, fence.proxy.async). Explicit kernels,
    sm_90a. PTX ISA 9.7.15.5.2."""
    k_axes: tl.constexpr = (a_k_axis, b_k_axis)
    immediates: tl.constexpr = (scale_a, scale_b, saturate)
    return _mma_sync(accumulator, a, b, k_axes, scale_d, immediates)
