"""Weak loads and stores of global memory with cache hints, and prefetches (PTX ISA 9.7.9 `ld`, `st`, `prefetch`)."""

import numpy as np
import triton
import triton.language as tl

from .._asm import builtin, require, unwrap
from .._meaning import Instruction, Machine, NoMeaning, Register, data_bytes, from_bytes, meaning
from .._traced import Semantic, Traced
from .words import PREFETCH, PRIORITY, WORDS, access_of, address_of, bits_of, check_one_of, constraint

CACHE = {"load": ("ca", "cg", "cs", "lu", "cv"), "load_nc": ("ca", "cg", "cs"), "store": ("wb", "cg", "cs", "wt")}
L2_PRIORITY = ("evict_normal", "evict_first", "evict_last")
PREFETCH_LEVELS = ("L1", "L2", "L2::evict_last", "L2::evict_normal")


def access(
    operation: str,
    bits: int,
    vec: int,
    cache: str = "",
    l1: str = "",
    l2: str = "",
    prefetch: str = "",
    policy: bool = False,
) -> str:
    """The mnemonic of a weak global access (`operation` is "load", "load_nc" or "store") of `vec` words of `bits` bits.

    Errors: ValueError for an unknown hint, a cache operator together with an eviction priority, a vector that no
    instruction moves.
    """
    widest = 256 if l2 or bits * vec == 256 else 128
    if bits not in (32, 64) or vec not in (1, 2, 4, 8) or bits * vec > widest:
        raise ValueError(
            f"{operation} of {vec} words of {bits} bits: words have 32 or 64 bits, and one instruction moves 1, 2, 4 "
            "or 8 of them, together at most 128 bits (256 on sm_100 and newer)"
        )
    check_one_of("cache", cache, CACHE[operation])
    check_one_of("l1", l1, PRIORITY)
    check_one_of("l2", l2, L2_PRIORITY)
    check_one_of("prefetch", prefetch, PREFETCH)
    if cache and (l1 or l2):
        raise ValueError(
            f"{operation} with cache={cache!r} and l1={l1!r}, l2={l2!r}: a cache operator and an eviction priority "
            "exclude each other"
        )
    if l2 and bits * vec != 256:
        raise ValueError(
            f"{operation} of {bits * vec} bits with l2={l2!r}: an L2 priority belongs to 256-bit accesses; use a "
            "policy (tma.create_policy)"
        )
    if prefetch and operation == "store":
        raise ValueError(f"store with prefetch={prefetch!r}: only a load fetches ahead")
    parts = ["st.global" if operation == "store" else "ld.global", cache, "nc" if operation == "load_nc" else ""]
    parts += [
        f"L1::{l1}" if l1 else "",
        f"L2::{l2}" if l2 else "",
        "L2::cache_hint" if policy else "",
        f"L2::{prefetch}" if prefetch else "",
    ]
    return ".".join(part for part in parts + [f"v{vec}" if vec > 1 else "", f"b{bits}"] if part)


def load_asm(mnemonic: str, bits: int, vec: int, masked: bool, policy: bool) -> str:
    """Results $0…, then the address, the mask word and the policy. Where the mask is 0 the results are 0."""
    outs = [f"${i}" for i in range(vec)]
    target = outs[0] if vec == 1 else "{" + ", ".join(outs) + "}"
    instruction = f"{mnemonic} {target}, [${vec}]" + (f", ${vec + 1 + masked};" if policy else ";")
    if not masked:
        return instruction
    zeros = " ".join(f"mov.b{bits} {out}, 0;" for out in outs)
    return f"{{ .reg .pred p; setp.ne.b32 p, ${vec + 1}, 0; {zeros} @p {instruction} }}"


def store_asm(mnemonic: str, vec: int, masked: bool, policy: bool) -> str:
    """A dummy result $0, the address $1, the values $2…, then the mask word and the policy."""
    values = [f"${2 + i}" for i in range(vec)]
    source = values[0] if vec == 1 else "{" + ", ".join(values) + "}"
    instruction = f"{mnemonic} [$1], {source}" + (f", ${2 + vec + masked};" if policy else ";")
    return _guarded(instruction, 2 + vec if masked else None)


def _guarded(instruction: str, mask: int | None) -> str:
    """An instruction without results, executed where mask word number `mask` is not 0, and a dummy result $0."""
    guarded = instruction if mask is None else f"setp.ne.b32 p, ${mask}, 0; @p {instruction}"
    return f"{{ .reg .pred p; {guarded} mov.b32 $0, 0; }}"


def _options(mask: Traced, policy: Traced, semantic: Semantic) -> tuple[list[Traced], list[str]]:
    args, letters = [], []
    if mask is not None:
        args.append(semantic.cast(semantic.cast(semantic.to_tensor(mask), tl.int1), tl.int32))
        letters.append("r")
    if policy is not None:
        args.append(semantic.cast(semantic.to_tensor(policy), tl.uint64))
        letters.append("l")
    return args, letters


@builtin
def _load(
    operation: Traced,
    pointer: Traced,
    vec: Traced,
    mask: Traced,
    hints: Traced,
    policy: Traced,
    _semantic: Semantic = None,
) -> Traced:
    operation, vec, mask, policy = unwrap(operation), unwrap(vec), unwrap(mask), unwrap(policy)
    require(operation, 80, _semantic=_semantic)
    address, word = address_of(pointer, _semantic, operation)
    letter, bits = constraint(word), word.primitive_bitwidth
    cache, l1, l2, prefetch = unwrap(hints)
    mnemonic = access(operation, bits, vec, cache, l1, l2, prefetch, policy is not None)
    if bits * vec == 256:
        require(f"{mnemonic} (256 bits)", 100, _semantic=_semantic)
    args, letters = _options(mask, policy, _semantic)
    constraints = ",".join([f"={'&' if mask is not None else ''}{letter}"] * vec + ["l"] + letters)
    out = tl.inline_asm_elementwise(
        load_asm(mnemonic, bits, vec, mask is not None, policy is not None),
        constraints,
        [address, *args],
        (word,) * vec,
        False,
        1,
        _semantic=_semantic,
    )
    return out[0] if vec == 1 else tl.tuple(out)


@builtin
def _store(
    pointer: Traced, values: Traced, mask: Traced, hints: Traced, policy: Traced, _semantic: Semantic = None
) -> None:
    mask, policy = unwrap(mask), unwrap(policy)
    require("store", 80, _semantic=_semantic)
    address, word = address_of(pointer, _semantic, "store")
    letter, bits = constraint(word), word.primitive_bitwidth
    values = [
        _semantic.cast(_semantic.to_tensor(value), word)
        for value in (values if isinstance(values, (tuple, tl.tuple)) else (values,))
    ]
    cache, l1, l2 = unwrap(hints)
    mnemonic = access("store", bits, len(values), cache, l1, l2, policy=policy is not None)
    if bits * len(values) == 256:
        require(f"{mnemonic} (256 bits)", 100, _semantic=_semantic)
    args, letters = _options(mask, policy, _semantic)
    constraints = ",".join(["=r", "l"] + [letter] * len(values) + letters)
    tl.inline_asm_elementwise(
        store_asm(mnemonic, len(values), mask is not None, policy is not None),
        constraints,
        [address, *values, *args],
        tl.int32,
        False,
        1,
        _semantic=_semantic,
    )


@triton.jit
def load(
    pointer,
    vec: tl.constexpr = 1,
    mask=None,
    cache: tl.constexpr = "",
    l1: tl.constexpr = "",
    l2: tl.constexpr = "",
    prefetch: tl.constexpr = "",
    policy=None,
):
    """`vec` consecutive words from each address: a tile for vec=1, else a tuple of `vec` tiles. sm_80+; 256 bits at
    once sm_100+.

    mask      where it is 0 nothing is read and the result is 0.
    cache     "ca", "cg", "cs", "lu" or "cv"; or else an eviction priority:
    l1        "evict_normal", "evict_unchanged", "evict_first", "evict_last" or "no_allocate".
    l2        "evict_normal", "evict_first" or "evict_last", for 256-bit loads.
    prefetch  L2 bytes fetched around the address: "64B", "128B" or "256B".
    policy    uint64 from `tma.create_policy`: how L2 keeps the line.
    PTX ISA 9.7.9 `ld.global`.
    """
    return _load("load", pointer, vec, mask, (cache, l1, l2, prefetch), policy)


@triton.jit
def load_nc(
    pointer,
    vec: tl.constexpr = 1,
    mask=None,
    cache: tl.constexpr = "",
    l1: tl.constexpr = "",
    l2: tl.constexpr = "",
    prefetch: tl.constexpr = "",
    policy=None,
):
    """`load` through the read-only path: the memory must not be written while the kernel runs. cache is "ca", "cg" or
    "cs".

    PTX ISA `ld.global.nc`.
    """
    return _load("load_nc", pointer, vec, mask, (cache, l1, l2, prefetch), policy)


@triton.jit
def store(
    pointer, values, mask=None, cache: tl.constexpr = "", l1: tl.constexpr = "", l2: tl.constexpr = "", policy=None
):
    """Writes one value, or a tuple of 2, 4 or 8 values as consecutive words, to each address. sm_80+; 256 bits at once
    sm_100+.

    cache is "wb", "cg", "cs" or "wt"; the other options are those of `load`. PTX ISA 9.7.9 `st.global`.
    """
    _store(pointer, values, mask, (cache, l1, l2), policy)


@builtin
def _prefetch(pointer: Traced, level: Traced, mask: Traced, _semantic: Semantic = None) -> None:
    level, mask = unwrap(level), unwrap(mask)
    if level not in PREFETCH_LEVELS:
        raise ValueError(f"prefetch to {level!r}: the level is one of {', '.join(map(repr, PREFETCH_LEVELS))}")
    require("prefetch", 80, _semantic=_semantic)
    address, _ = address_of(pointer, _semantic, "prefetch")
    args, letters = _options(mask, None, _semantic)
    text = _guarded(f"prefetch.global.{level} [$1];", None if mask is None else 2)
    tl.inline_asm_elementwise(
        text, ",".join(["=&r", "l", *letters]), [address, *args], tl.int32, False, 1, _semantic=_semantic
    )


@triton.jit
def prefetch(pointer, level: tl.constexpr = "L2", mask=None):
    """Fetches the line of each address into "L1" or "L2", or into L2 with priority "L2::evict_last" or
    "L2::evict_normal"; where the mask is 0, none. sm_80+.

    PTX ISA 9.7.9 `prefetch.global`.
    """
    _prefetch(pointer, level, mask)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------

_TYPES = "|".join(f"{k}{n}" for k in "usb" for n in (8, 16, 32, 64)) + "|f32|f64|b128"


@meaning(f"ld.{WORDS}.{{type:{_TYPES}}}")
def _ld(t: Machine, i: Instruction, addresses: Register, policy: Register = None) -> Register:
    """A vector is one access; a word narrower than its register is extended, by its sign where the type is signed."""
    space, order, scope, count, kind = access_of(i)
    bits = bits_of(kind)
    data = t.load(space, addresses, count * bits // 8, i.active, order, scope)
    parts = [from_bytes(data[:, n * bits // 8 : (n + 1) * bits // 8], bits) for n in range(count)]
    if kind[0] == "s":
        parts = [part.view(f"i{bits // 8}").astype(np.int64).view(np.uint64) for part in parts]
    return tuple(parts) if isinstance(i.destination_bits[0], tuple) else parts[0]


@meaning(f"st.{WORDS}.{{type:{_TYPES}}}", destinations=0)
def _st(t: Machine, i: Instruction, addresses: Register, values: Register, policy: Register = None) -> None:
    space, order, scope, count, kind = access_of(i)
    values = values if isinstance(values, tuple) else (values,)
    if len(values) != count:
        raise NoMeaning(f"{len(values)} values")
    data = np.concatenate([data_bytes(value, bits_of(kind), i.active) for value in values], axis=1)
    t.store(space, addresses, data, i.active, order, scope)


@meaning("prefetch.{space:global}?.{level:L1|L2|L2::evict_last|L2::evict_normal}", "prefetchu.L1", destinations=0)
def _prefetch_meaning(t: Machine, i: Instruction, addresses: Register) -> None:
    """Do nothing: caches do not affect results."""
