# NOTE of the lead, 05:56 UTC, to the helper with /work/h_ptx.md: another helper (brief_ptx.md) is already writing all PTX meanings (inline_ptx/*.py, inline_ptx/_meaning.py,
# inline_ptx/_glue.py, sim/ptx.py). Do NOT write meanings or touch those files. Your task is now the MACHINE side: make class RoleThreads here implement the `Machine` protocol that
# inline_ptx/_meaning.py will state (it appears within minutes), incl. bulk/TMA/multicast, wgmma, tcgen05, clc, named barriers and votes; switch this module from sim/bootstrap to sim/ptx.py and delete
# sim/bootstrap; then task (2) of your tests (GPU test bodies in the simulator). Remove this note at the end.
"""What each PTX instruction does, stated beside the shim that emits it: the registry, the machine it acts on, and the instructions that hold blocks together.

A meaning acts on all threads of a role at once: registers are arrays with one entry a thread. The simulator (`tritonkittens.sim`) parses the assembly and calls the
meanings; nothing here knows the simulator.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class UnknownInstruction(NotImplementedError):
    """An instruction without a meaning, or with operands that its meaning does not take."""


@dataclass
class Instruction:
    """One instruction of a block, as its meaning sees it. `active`: the threads that execute it."""

    mnemonic: str
    active: np.ndarray

    @property
    def parts(self) -> list[str]:
        """The mnemonic between its dots."""
        return self.mnemonic.split(".")

    @property
    def type(self) -> str:
        """The last part: the type of the operands."""
        return self.parts[-1]


class Threads(Protocol):
    """The machine under a role's threads. Addresses: 32-bit in shared memory (the CTA's rank from bit 24 up), 64-bit in global memory."""

    count: int
    tid: np.ndarray  # %tid.x
    numbers: Any  # number formats: encode, decode, round_to

    def special(self, name: str) -> Any:
        """The value of a special register, e.g. "%clock64": an int or an array."""

    def load(self, space: str, addresses: np.ndarray, nbytes: int, active: np.ndarray) -> np.ndarray:
        """Words (uint64 arrays, zero-extended) at `addresses`; space is "shared" or "global"."""

    def store(self, space: str, addresses: np.ndarray, words: np.ndarray, nbytes: int, active: np.ndarray) -> None:
        """Write words."""

    def atomic(self, space: str, operation: str, element: str, addresses: np.ndarray, words: np.ndarray, active: np.ndarray) -> np.ndarray:
        """One thread after the other: add, max, … on numbers of that MLIR type; the old words."""

    def barrier(self, address: int, what: str) -> Any:
        """The mbarrier at a shared address: init, invalidate, arrive, expect, completed, wait."""

    def named_barrier(self, number: int, threads: int, waits: bool) -> Any:
        """bar.sync / bar.arrive: a generator."""

    def cluster_arrive(self) -> None:
        """barrier.cluster.arrive of the role's threads."""

    def cluster_wait(self) -> Any:
        """barrier.cluster.wait: a generator."""

    def fence(self, kind: str) -> None:
        """"async": fence.proxy.async; other kinds order ordinary memory, which is in order here."""

    def bulk(self, kind: str, **what: Any) -> None:
        """An asynchronous bulk copy or reduction; see `tma`."""

    def commit_bulk_group(self) -> None:
        """cp.async.bulk.commit_group."""

    def wait_bulk_group(self, pending: int) -> Any:
        """cp.async.bulk.wait_group: a generator."""

    def trap(self) -> None:
        """End the launch with an error."""


@dataclass(frozen=True)
class Meaning:
    function: Callable[..., Any]
    outputs: int  # leading operands that are written


_EXACT: dict[str, Meaning] = {}
_PATTERNS: list[tuple[re.Pattern[str], Meaning]] = []


def meaning(*mnemonics: str, outputs: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `f(t, i, *sources)` for instructions. A mnemonic with regular-expression characters is matched whole.

    Sources are arrays of bits (uint64; predicates bool), addresses for [brackets], tuples for {vectors}. The result is bits (a tuple for several outputs), rounded
    to the destination's width by the caller; a generator may wait.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for mnemonic in mnemonics:
            if re.fullmatch(r"[\w.:]+", mnemonic):
                assert mnemonic not in _EXACT, mnemonic
                _EXACT[mnemonic] = Meaning(fn, outputs)
            else:
                _PATTERNS.append((re.compile(mnemonic), Meaning(fn, outputs)))
        return fn

    return register


def find(mnemonic: str) -> Meaning | None:
    """What an instruction means."""
    found = _EXACT.get(mnemonic)
    if found is None:
        found = next((m for pattern, m in _PATTERNS if pattern.fullmatch(mnemonic)), None)
    return found


# ---------------------------------------------------------------- bits and numbers

_WIDTH = re.compile(r"[a-z]+(\d+)")


def width(kind: str) -> int:
    """Bits of a PTX type such as u32, b64, f16x2, pred."""
    if kind == "pred":
        return 1
    if kind in ("f16x2", "bf16x2", "u16x2", "s16x2"):
        return 32
    if kind == "f32x2":
        return 64
    found = _WIDTH.match(kind)
    if found is None:
        raise UnknownInstruction(f"the type {kind}")
    return int(found[1])


def unsigned(bits: np.ndarray, n: int) -> np.ndarray:
    """The low n bits."""
    return bits if n >= 64 else bits & np.uint64((1 << n) - 1)


def signed(bits: np.ndarray, n: int) -> np.ndarray:
    """The low n bits as a signed number (int64)."""
    shift = np.uint64(64 - n)
    return (bits << shift).view(np.int64) >> np.int64(64 - n)


def to_f32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def from_f32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)


def to_f64(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits, np.uint64).view(np.float64)


def from_f64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float64).view(np.uint64)


def halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high 16 bits of 32."""
    return bits & np.uint64(0xFFFF), (bits >> np.uint64(16)) & np.uint64(0xFFFF)


def pair(low: np.ndarray, high: np.ndarray, n: int = 16) -> np.ndarray:
    return unsigned(low.astype(np.uint64), n) | (high.astype(np.uint64) << np.uint64(n))


def flush(values: np.ndarray) -> np.ndarray:
    """.ftz: subnormal float32 numbers become zeros of their sign."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values).astype(np.float32)


# ---------------------------------------------------------------- instructions that every block may use


@meaning(r"mov\.(u|b|s|f)(8|16|32|64)", r"mov\.pred")
def _mov(t: Threads, i: Instruction, source: Any) -> Any:
    """A copy; a vector on one side packs or unpacks (the caller splits the result)."""
    if not isinstance(source, tuple):
        return source
    each = width(i.type) // len(source)
    out = np.zeros(t.count, np.uint64)
    for k, part in enumerate(source):
        out |= unsigned(part, each) << np.uint64(each * k)
    return out


def _integer_kind(i: Instruction) -> tuple[int, bool]:
    return width(i.type), i.type[0] == "s"


def _as(bits: np.ndarray, n: int, is_signed: bool) -> np.ndarray:
    return signed(bits, n) if is_signed else unsigned(bits, n)


@meaning(r"(add|sub|min|max)\.(u|s|b)(16|32|64)")
def _arithmetic(t: Threads, i: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    n, is_signed = _integer_kind(i)
    x, y = _as(a, n, is_signed), _as(b, n, is_signed)
    return {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[i.parts[0]](x, y).astype(np.uint64 if not is_signed else np.int64).view(np.uint64)


@meaning(r"mul\.lo\.(u|s)(16|32|64)", r"mul\.wide\.(u|s)(16|32)", r"mul\.hi\.(u|s)32")
def _mul(t: Threads, i: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    n, is_signed = _integer_kind(i)
    product = _as(a, n, is_signed) * _as(b, n, is_signed)
    product = product.view(np.uint64) if product.dtype == np.int64 else product
    return product >> np.uint64(32) if i.parts[1] == "hi" else product


@meaning(r"mad\.lo\.(u|s)(32|64)")
def _mad(t: Threads, i: Instruction, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a * b + c


@meaning(r"(and|or|xor)\.(b16|b32|b64|pred)")
def _logic(t: Threads, i: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[i.parts[0]](a, b)


@meaning(r"not\.(b16|b32|b64|pred)")
def _not(t: Threads, i: Instruction, a: np.ndarray) -> np.ndarray:
    return ~a


@meaning(r"(shl|shr)\.(b|u|s)(16|32|64)")
def _shift(t: Threads, i: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    n = width(i.type)
    by = np.minimum(unsigned(b, 32), np.uint64(n))
    over = by >= np.uint64(n)
    safe = np.where(over, np.uint64(0), by)
    if i.parts[0] == "shl":
        return np.where(over, np.uint64(0), a << safe)
    if i.type[0] == "s":
        return (signed(a, n) >> np.minimum(by, np.uint64(n - 1)).astype(np.int64)).view(np.uint64)
    return np.where(over, np.uint64(0), unsigned(a, n) >> safe)


@meaning(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.(u|s|b|f)(16|32|64)")
def _setp(t: Threads, i: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    n = width(i.type)
    if i.type[0] == "f":
        x, y = (to_f32(a), to_f32(b)) if n == 32 else (to_f64(a), to_f64(b))
    else:
        x, y = _as(a, n, i.type[0] == "s"), _as(b, n, i.type[0] == "s")
    compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "lo": np.less, "le": np.less_equal, "ls": np.less_equal, "gt": np.greater, "hi": np.greater,
               "ge": np.greater_equal, "hs": np.greater_equal}  # fmt: skip
    return compare[i.parts[1]](x, y)


@meaning(r"selp\.(b|u|s|f)(16|32|64)")
def _selp(t: Threads, i: Instruction, a: np.ndarray, b: np.ndarray, p: np.ndarray) -> np.ndarray:
    return np.where(p, a, b)


@meaning("prmt.b32")
def _prmt(t: Threads, i: Instruction, a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Any four of the eight bytes of {b, a}; bit 3 of a selector copies the byte's sign."""
    both = unsigned(a, 32) | (unsigned(b, 32) << np.uint64(32))
    out = np.zeros(t.count, np.uint64)
    for k in range(4):
        choice = (selector >> np.uint64(4 * k)) & np.uint64(15)
        byte = (both >> ((choice & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        out |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * k)
    return out


@meaning(r"cvt\.(u|s)(8|16|32|64)\.(u|s)(8|16|32|64)")
def _cvt_integer(t: Threads, i: Instruction, a: np.ndarray) -> np.ndarray:
    source = i.parts[2]
    value = _as(a, width(source), source[0] == "s")
    return value.view(np.uint64) if value.dtype == np.int64 else value


@meaning(r"cvta\.to\.(shared|global)\.u64", r"cvta\.(shared|global)\.u64")
def _cvta(t: Threads, i: Instruction, a: np.ndarray) -> np.ndarray:
    return a


@meaning("trap", outputs=0)
def _trap(t: Threads, i: Instruction) -> None:
    if i.active.any():
        t.trap()
