"""The instructions of wgmma, one function each (PTX ISA 9.7.15), and their meanings."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from .._asm import builtin, require, unwrap
from .._meaning import (
    Instruction,
    Machine,
    NoMeaning,
    PtxFault,
    Register,
    Waits,
    from_bytes,
    join,
    meaning,
    split,
    uniform,
    unsigned,
)
from .._products import accumulator_values, multiply_add, operand_values
from .._tile_operands import explicit_only, is_tile, letter, pass_through, registers, tiles_of, update_tiles
from .._traced import Semantic, Traced
from .descriptors import decode_descriptor
from .fragments import accumulator_places, accumulator_shape, fragment_asm, fragment_places, fragment_steps
from .shapes import OPERANDS, Multiply, check, mma_async_asm, operand_type


@triton.jit
def fence(tiles=()):
    """Orders earlier accesses to the registers of `tiles` (accumulators, A fragments) before the wgmma that follow.
    Returns the tiles.

    Needed before the first mma_async, and again after other code touched its registers. PTX ISA 9.7.15.7.1
    `wgmma.fence.sync.aligned`.
    """
    return pass_through("wgmma.fence.sync.aligned;", tiles, (90,))


@triton.jit
def commit_group():
    """Closes a group of the warpgroup's mma_async issued so far. PTX ISA 9.7.15.7.2
    `wgmma.commit_group.sync.aligned`."""
    pass_through("wgmma.commit_group.sync.aligned;", (), (90,))


@triton.jit
def wait_group(pending: tl.constexpr, tiles=()):
    """Waits until at most `pending` (0 to 7) of the latest groups are unfinished. Returns `tiles`, which may be used
    from here on.

    `tiles`: the accumulators, and the A fragments, of the groups that are now done. PTX ISA 9.7.15.7.3
    `wgmma.wait_group.sync.aligned`.
    """
    return pass_through(_wait_template(pending), tiles, (90,))


@builtin
def _wait_template(pending: Traced, _semantic: Semantic = None) -> Traced:
    pending = unwrap(pending)
    if not isinstance(pending, int) or not 0 <= pending <= 7:
        raise ValueError(f"wgmma.wait_group({pending}): the number of groups left unfinished is a constant from 0 to 7")
    return tl.constexpr(f"wgmma.wait_group.sync.aligned {pending};")


def _operand_types(a: Traced, a_type: Traced, b_type: Traced) -> tuple[str, str]:
    """PTX operand types from what the caller names, else from the element type of a register tile A, else B as A."""
    if a_type is None and is_tile(a):
        a_type = a.dtype
    kind = operand_type(a_type, "a_type")
    return kind, operand_type(b_type or kind, "b_type")


def _register_operand(
    tile: Traced, multiply: Multiply, step: int, first: int, semantic: Semantic
) -> tuple[list[str], list[str], list[str]]:
    """(PTX lines, the four registers, constraint letters) of K step `step` of A in registers, whose references start
    at $`first`."""
    per_word, steps = fragment_steps(tile, multiply.a, semantic)
    if not 0 <= step < steps:
        raise ValueError(f"wgmma.mma_async step={step}: the A fragment has {steps} K steps of {multiply.k} columns")
    lines, words = fragment_asm(first, per_word, step, "a")
    if lines:  # registers that were written after the caller's fence need one of their own
        lines = [".reg .b32 t0, t1, a0, a1, a2, a3;", *lines, "wgmma.fence.sync.aligned;"]
    return lines, words, [letter(tile.dtype)] * (per_word * 4 * steps)


@builtin
def _mma_async(
    accumulator: Traced,
    a: Traced,
    b: Traced,
    types: Traced,
    scale_d: Traced,
    immediates: Traced,
    step: Traced,
    _semantic: Semantic = None,
) -> Traced:
    require("wgmma.mma_async", only=(90,), _semantic=_semantic)
    explicit_only(_semantic, "wgmma.mma_async")
    tiles, single = tiles_of(accumulator)
    (a,), _ = tiles_of(a)
    kind_a, kind_b = _operand_types(a, *unwrap(types))
    n, d = accumulator_shape(tiles, kind_a in ("s8", "u8"))
    scale_a, scale_b, trans_a, trans_b, saturate = unwrap(immediates)
    multiply = check(
        Multiply(n, d, kind_a, kind_b, is_tile(a), bool(trans_a), bool(trans_b), scale_a, scale_b, bool(saturate))
    )
    count = sum(registers(tile.type, _semantic) for tile in tiles)
    lines: list[str] = []
    operand_a: str | list[str] = f"${2 * count}"
    letters = ["l"]
    if multiply.a_in_registers:
        lines, operand_a, letters = _register_operand(a, multiply, unwrap(step), 2 * count, _semantic)
    else:
        a = _semantic.cast(_semantic.to_tensor(a), tl.uint64)
    b = _semantic.cast(_semantic.to_tensor(b), tl.uint64)
    scale = _semantic.cast(_semantic.to_tensor(unwrap(scale_d)), tl.int32)
    after_a = 2 * count + len(letters)
    instruction = mma_async_asm(multiply, [f"${i}" for i in range(count)], operand_a, f"${after_a}", "p")
    block = ["{ .reg .pred p;", *lines, f"setp.ne.b32 p, ${after_a + 1}, 0;", instruction, "}"]
    out = update_tiles("\n".join(block), tiles, [*letters, "l", "r"], (a, b, scale), _semantic)
    return out[0] if single else tl.tuple(out)


@triton.jit
def mma_async(
    accumulator,
    a,
    b,
    a_type: tl.constexpr = None,
    b_type: tl.constexpr = None,
    scale_d=1,
    scale_a: tl.constexpr = 1,
    scale_b: tl.constexpr = 1,
    trans_a: tl.constexpr = False,
    trans_b: tl.constexpr = False,
    saturate: tl.constexpr = False,
    step: tl.constexpr = 0,
):
    """One wgmma: accumulator = scale_a * scale_b * A B + (accumulator if scale_d else 0). Explicit kernels, sm_90a.

    Returns the accumulator, which is not ready before the wait.

    accumulator  a register tile or a tuple of them (see the module), N columns together. It fixes D: float32, int32, or
                 packed float16.
    a            uint64 matrix descriptor of 64 x K, or a register fragment tile; b: uint64 matrix descriptor. K is 32
                 bytes: 16 for 16-bit types, 8 for tf32, 32 for 8-bit types. A fragment wider than K supplies its
                 columns of K step `step`.
    a_type       "f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8" or the Triton type; needed unless A is a register
                 tile of that type. b_type: likewise, default a_type.
    scale_d      int32 or constant; scale_a, scale_b: 1 or -1 (not for integers).
    trans_a/b    True for an MN-major shared operand (16-bit types). saturate: int32 accumulators clamp instead of
                 wrapping.
    A 16- or 8-bit fragment is packed inside, with moves and a second fence in each call. In a loop, call `pack` once.
    PTX ISA 9.7.15.5.2 `wgmma.mma_async`.
    """
    immediates: tl.constexpr = (scale_a, scale_b, trans_a, trans_b, saturate)
    return _mma_async(accumulator, a, b, (a_type, b_type), scale_d, immediates, step)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """One wgmma.mma_async of one warpgroup.

    warpgroup   its index in the role: threads 128 warpgroup … + 127
    multiply    types and sizes; D is 64 x n, A 64 x k, B n x k
    a           int64 [64, k] byte addresses in the CTA's shared window, or None: A is in registers
    a_bits      [64, k] words, or None
    b           int64 [n, k] byte addresses
    accumulator [64, n] words of D's type (uint16 for f16, else uint32), or None: D = A B
    """

    warpgroup: int
    multiply: Multiply
    a: "np.ndarray | None"
    a_bits: "np.ndarray | None"
    b: np.ndarray
    accumulator: "np.ndarray | None"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A and of B."""
        return OPERANDS[self.multiply.a][0] // 8

    def compute(self, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """[64, n] words of D. `read(addresses)` gives uint8 [*addresses.shape, element_bytes] of the CTA's shared
        memory."""
        m = self.multiply

        def operand(addresses: np.ndarray) -> np.ndarray:
            return from_bytes(np.asarray(read(addresses)), 8 * self.element_bytes)

        left = operand(self.a) if self.a is not None else self.a_bits
        assert left is not None
        a = operand_values(m.a, left)
        b = operand_values(m.b, operand(self.b))
        c = accumulator_values(self.accumulator, m.d) if self.accumulator is not None else None
        return multiply_add(a * m.scale_a, b * m.scale_b, c, m.d, m.saturate)


_TYPES = "|".join(OPERANDS)


def _warpgroups(i: Instruction) -> Iterator[tuple[int, slice]]:
    """(index, slice of the threads) of each warpgroup that executes. Errors: PtxFault where it is not whole."""
    if len(i.active) % 128:
        raise PtxFault(f"{len(i.active)} threads are no whole warpgroups")
    for group in range(len(i.active) // 128):
        threads = slice(128 * group, 128 * group + 128)
        if i.active[threads].all():
            yield group, threads
        elif i.active[threads].any():
            raise PtxFault("some threads of a warpgroup do not execute it")


def _stack(registers: Iterable[Register], i: Instruction, threads: slice) -> np.ndarray:
    """uint32 [128, registers] of one warpgroup."""
    return np.stack([np.broadcast_to(unsigned(x, 32), i.active.shape)[threads] for x in registers], axis=1)


def _accumulator_matrix(words: np.ndarray, m: Multiply) -> np.ndarray:
    """[64, n] from the accumulator registers of one warpgroup, uint32 [128, registers]."""
    if m.d == "f16":
        words = np.stack(split(words, 32, 2), axis=2).reshape(128, -1)
    matrix = np.zeros((64, m.n), words.dtype)
    matrix[accumulator_places(m.n)] = words
    return matrix


def _accumulator_words(matrix: np.ndarray, m: Multiply) -> np.ndarray:
    """`_accumulator_matrix`'s inverse."""
    elements = matrix[accumulator_places(m.n)]
    return join([elements[:, 0::2], elements[:, 1::2]], 32) if m.d == "f16" else elements


def _fragment_matrix(words: np.ndarray, m: Multiply) -> np.ndarray:
    """A [64, k] from the four registers that each thread of a warpgroup holds of it, uint32 [128, 4]."""
    per_word = 32 // OPERANDS[m.a][0]
    elements = np.stack(split(words, 32, per_word), axis=2)
    matrix = np.zeros((64, m.k), elements.dtype)
    matrix[fragment_places(per_word)] = elements
    return matrix


def _multiply_of(i: Instruction, a_in_registers: bool, immediates: tuple[Register, ...]) -> Multiply:
    """The instruction that the mnemonic and the immediates behind scale-d name."""
    f = {name: value or "" for name, value in i.fields.items()}
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", f["shape"])
    if shape is None:
        raise NoMeaning(f"the shape {f['shape']}")
    flags = list(immediates)
    scale_a, scale_b = (flags.pop(0), flags.pop(0)) if f["d"] != "s32" else (1, 1)
    transposed = (flags if not a_in_registers else [0, *flags]) if OPERANDS[f["a"]][0] == 16 else [0, 0]
    trans_a, trans_b = (bool(flag) for flag in transposed)
    n, k = int(shape[1]), int(shape[2])
    m = check(
        Multiply(n, f["d"], f["a"], f["b"], a_in_registers, trans_a, trans_b, scale_a, scale_b, bool(f["saturate"]))
    )
    if m.k != k:
        raise PtxFault(f"{f['shape']} of {m.a}: K is {m.k}")
    return m


@meaning(
    f"wgmma.mma_async.sync.aligned.{{shape}}.{{saturate:satfinite}}?.{{d:f16|f32|s32}}.{{a:{_TYPES}}}.{{b:{_TYPES}}}",
    updates=True,
)
def _mma_async_meaning(
    t: Machine, i: Instruction, accumulators: Register, a: Register, b: Register, scale_d: Register, *rest: Register
) -> Register:
    m = _multiply_of(i, isinstance(a, tuple), rest)
    if len(accumulators) != m.accumulators:
        raise PtxFault(f"{i.fields['shape']} has {m.accumulators} accumulator registers, not {len(accumulators)}")
    out: np.ndarray = np.zeros((len(accumulators), len(i.active)), np.uint32)
    size = OPERANDS[m.a][0] // 8
    for group, threads in _warpgroups(i):
        here = np.zeros(i.active.shape, bool)
        here[threads] = True
        matrix = fragment = left = None
        if uniform(scale_d, here, "scale-d of wgmma.mma_async"):
            matrix = _accumulator_matrix(_stack(accumulators, i, threads), m)
        if m.a_in_registers:
            fragment = _fragment_matrix(_stack(a, i, threads), m)
        else:
            left = decode_descriptor(uniform(a, here, "A's matrix descriptor")).addresses(64, m.k, size, not m.trans_a)
        right = decode_descriptor(uniform(b, here, "B's matrix descriptor")).addresses(m.n, m.k, size, not m.trans_b)
        result = np.asarray(t.wgmma(Product(group, m, left, fragment, right, matrix)))
        out[:, threads] = _accumulator_words(result, m).T
    return tuple(out)


@meaning("wgmma.fence.sync.aligned", destinations=0)
def _fence_meaning(t: Machine, i: Instruction) -> None:
    t.wgmma_fence()


@meaning("wgmma.commit_group.sync.aligned", destinations=0)
def _commit_meaning(t: Machine, i: Instruction) -> None:
    t.wgmma_commit()


@meaning("wgmma.wait_group.sync.aligned", destinations=0)
def _wait_meaning(t: Machine, i: Instruction, pending: Register) -> Waits:
    wait = t.wgmma_wait(uniform(pending, i.active, "the number of groups of wgmma.wait_group"))
    if wait is not None:
        yield wait
