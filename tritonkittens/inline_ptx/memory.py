"""Loads, stores, prefetches and reductions on global memory beyond `tl.load` (PTX ISA 9.7.9 `ld`, `st`, `prefetch`;
9.7.14 `red`).

Pointers are scalars or tiles of pointers. An element moves one word of the pointer's element type (32 or 64 bits) or,
with `vec`, that many consecutive words in one instruction: vec=4 turns a tile of pointers into a tuple of four tiles.
The address of a vector must be a multiple of its size in bytes. Every thread that holds an element executes the
instruction for it, and several threads may hold a tile.
"""

from collections.abc import Collection

import numpy as np
import triton
import triton.language as tl
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.runtime.jit import constexpr_function

from ._asm import arch, asm, builtin, issued, require, unwrap
from ._meaning import Instruction, Machine, NoMeaning, Register, data_bytes, from_bytes, meaning
from ._traced import Semantic, Traced

CACHE = {"load": ("ca", "cg", "cs", "lu", "cv"), "load_nc": ("ca", "cg", "cs"), "store": ("wb", "cg", "cs", "wt")}
PRIORITY = ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
L2_PRIORITY = ("evict_normal", "evict_first", "evict_last")
PREFETCH = ("64B", "128B", "256B")
SCOPES = ("cta", "cluster", "gpu", "sys")
PREFETCH_LEVELS = ("L1", "L2", "L2::evict_last", "L2::evict_normal")


def _one_of(what: str, value: str, allowed: Collection[str]) -> None:
    if value and value not in allowed:
        raise ValueError(f"{what}={value!r}: it is one of {', '.join(map(repr, allowed))}, or '' for the default")


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
            "or 8 of them, "
            "together at most 128 bits (256 on sm_100 and newer)"
        )
    _one_of("cache", cache, CACHE[operation])
    _one_of("l1", l1, PRIORITY)
    _one_of("l2", l2, L2_PRIORITY)
    _one_of("prefetch", prefetch, PREFETCH)
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


def _letter(dtype: tl.dtype) -> str:
    if dtype.primitive_bitwidth not in (32, 64):
        raise TypeError(
            f"global access to {dtype}: a word has 32 or 64 bits; cast the pointer, e.g. "
            "pointer.to(tl.pointer_type(tl.uint32))"
        )
    return {"fp32": "f", "fp64": "d"}.get(str(dtype), "r" if dtype.primitive_bitwidth == 32 else "l")


def _address(pointer: Traced, semantic: Semantic, what: str) -> tuple[Traced, tl.dtype]:
    if not pointer.type.scalar.is_ptr():
        raise TypeError(f"{what}({pointer.type}): the first operand must be a pointer or a tile of pointers")
    return semantic.cast(pointer, tl.int64), pointer.type.scalar.element_ty


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
    cache: Traced,
    l1: Traced,
    l2: Traced,
    prefetch: Traced,
    policy: Traced,
    _semantic: Semantic = None,
) -> Traced:
    operation, vec, mask, policy = unwrap(operation), unwrap(vec), unwrap(mask), unwrap(policy)
    require(operation, 80, _semantic=_semantic)
    address, word = _address(pointer, _semantic, operation)
    letter, bits = _letter(word), word.primitive_bitwidth
    mnemonic = access(operation, bits, vec, unwrap(cache), unwrap(l1), unwrap(l2), unwrap(prefetch), policy is not None)
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
    pointer: Traced,
    values: Traced,
    mask: Traced,
    cache: Traced,
    l1: Traced,
    l2: Traced,
    policy: Traced,
    _semantic: Semantic = None,
) -> None:
    mask, policy = unwrap(mask), unwrap(policy)
    require("store", 80, _semantic=_semantic)
    address, word = _address(pointer, _semantic, "store")
    letter, bits = _letter(word), word.primitive_bitwidth
    values = [
        _semantic.cast(_semantic.to_tensor(value), word)
        for value in (values if isinstance(values, (tuple, tl.tuple)) else (values,))
    ]
    mnemonic = access("store", bits, len(values), unwrap(cache), unwrap(l1), unwrap(l2), "", policy is not None)
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
    return _load("load", pointer, vec, mask, cache, l1, l2, prefetch, policy)


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
    return _load("load_nc", pointer, vec, mask, cache, l1, l2, prefetch, policy)


@triton.jit
def store(
    pointer, values, mask=None, cache: tl.constexpr = "", l1: tl.constexpr = "", l2: tl.constexpr = "", policy=None
):
    """Writes one value, or a tuple of 2, 4 or 8 values as consecutive words, to each address. sm_80+; 256 bits at once
    sm_100+.

    cache is "wb", "cg", "cs" or "wt"; the other options are those of `load`. PTX ISA 9.7.9 `st.global`.
    """
    _store(pointer, values, mask, cache, l1, l2, policy)


@builtin
def _scoped(
    mnemonic: Traced,
    scope: Traced,
    pointer: Traced,
    values: Traced,
    letters: Traced,
    issuer: Traced,
    _semantic: Semantic = None,
) -> None:
    """A store-like instruction at `scope`: every thread of a tile's element executes it; on scalars the threads that
    `issuer` names do."""
    mnemonic, scope, letters, issuer = unwrap(mnemonic), unwrap(scope), unwrap(letters), unwrap(issuer)
    _one_of("scope", scope or "none", SCOPES)
    minimum = 90 if scope == "cluster" else 80
    mnemonic = mnemonic.replace("{scope}", scope)
    require(mnemonic, minimum, _semantic=_semantic)
    address, word = _address(pointer, _semantic, mnemonic)
    values = [_semantic.to_tensor(value) for value in values]

    def instruction(first: int) -> str:
        names = ", ".join(f"${first + 1 + i}" for i in range(len(values)))
        return f"{mnemonic} [${first}], {names if len(values) == 1 else '{' + names + '}'};"

    if not any(operand.type.is_block() for operand in [address, *values]):
        template = issued(instruction(0), issuer, arch(_semantic=_semantic).value)
        asm(template, ("l", *letters), (address, *values), _semantic=_semantic)
        return
    if issuer != "thread":
        raise ValueError(
            f"{mnemonic} on a tile with issuer={issuer!r}: the threads that hold the elements execute it; leave "
            "issuer='thread'"
        )
    tl.inline_asm_elementwise(
        f"{instruction(1)} mov.b32 $0, 0;",
        ",".join(["=&r", "l", *letters]),
        [address, *values],
        tl.int32,
        False,
        1,
        _semantic=_semantic,
    )


@builtin
def _load_acquire(pointer: Traced, scope: Traced, _semantic: Semantic = None) -> Traced:
    scope = unwrap(scope)
    _one_of("scope", scope or "none", SCOPES)
    require(f"ld.acquire.{scope}", 90 if scope == "cluster" else 80, _semantic=_semantic)
    address, word = _address(pointer, _semantic, "load_acquire")
    template, constraints = f"ld.acquire.{scope}.global.b{word.primitive_bitwidth} $0, [$1];", f"={_letter(word)},l"
    return tl.inline_asm_elementwise(template, constraints, [address], word, False, 1, _semantic=_semantic)


@triton.jit
def load_acquire(pointer, scope: tl.constexpr = "gpu"):
    """Reads a flag (32 or 64 bits) of each address. Afterwards, the reading threads see everything that its writer
    released before.

    scope "cta", "cluster" (sm_90+), "gpu" or "sys". PTX ISA 9.7.9 `ld.acquire`.
    """
    return _load_acquire(pointer, scope)


@builtin
def _store_release(pointer: Traced, value: Traced, scope: Traced, issuer: Traced, _semantic: Semantic = None) -> None:
    word = _address(pointer, _semantic, "store_release")[1]
    value = _semantic.cast(_semantic.to_tensor(unwrap(value)), word)
    _scoped(
        f"st.release.{{scope}}.global.b{word.primitive_bitwidth}",
        scope,
        pointer,
        (value,),
        (_letter(word),),
        issuer,
        _semantic=_semantic,
    )


@triton.jit
def store_release(pointer, value, scope: tl.constexpr = "gpu", issuer: tl.constexpr = "thread"):
    """Writes a flag (32 or 64 bits) after everything that its thread wrote, or saw through a barrier, before.

    issuer: which threads write a scalar: "thread" (all), "warp", "warpgroup" or "cta" (one of each). scope as in
    `load_acquire`. PTX ISA 9.7.9 `st.release`.
    """
    _store_release(pointer, value, scope, issuer)


@triton.jit
def prefetch(pointer, level: tl.constexpr = "L2", mask=None):
    """Fetches the line of each address into "L1" or "L2", or into L2 with priority "L2::evict_last" or
    "L2::evict_normal"; where the mask is 0, none. sm_80+.

    PTX ISA 9.7.9 `prefetch.global`.
    """
    _prefetch(pointer, level, mask)


@builtin
def _prefetch(pointer: Traced, level: Traced, mask: Traced, _semantic: Semantic = None) -> None:
    level, mask = unwrap(level), unwrap(mask)
    if level not in PREFETCH_LEVELS:
        raise ValueError(f"prefetch to {level!r}: the level is one of {', '.join(map(repr, PREFETCH_LEVELS))}")
    require("prefetch", 80, _semantic=_semantic)
    address, _ = _address(pointer, _semantic, "prefetch")
    args, letters = _options(mask, None, _semantic)
    text = _guarded(f"prefetch.global.{level} [$1];", None if mask is None else 2)
    tl.inline_asm_elementwise(
        text, ",".join(["=&r", "l", *letters]), [address, *args], tl.int32, False, 1, _semantic=_semantic
    )


RED_TYPES = {
    "f32": ("f", 80, 4),
    "f16x2": ("r", 80, 4),
    "bf16x2": ("r", 90, 4),
    "s32": ("r", 80, 1),
    "u32": ("r", 80, 1),
    "u64": ("l", 80, 1),
}


def red_mnemonic(kind: str, vec: int, order: str) -> str:
    """`red…add` for `vec` operands of type `kind`, with `{scope}` left open. Errors: ValueError for what no instruction
    does."""
    if kind not in RED_TYPES or vec not in (1, 2, 4) or vec > RED_TYPES[kind][2]:
        raise ValueError(
            f"red_add of {vec} x {kind!r}: the type is one of {', '.join(RED_TYPES)}; f32, f16x2 and bf16x2 also in "
            "vectors of 2 or 4"
        )
    if order not in ("relaxed", "release"):
        raise ValueError(f"red_add with order={order!r}: it is 'relaxed' or 'release'")
    return (
        f"red.{order}.{{scope}}.global.add{'.noftz' if kind.endswith('16x2') else ''}"
        + (f".v{vec}" if vec > 1 else "")
        + f".{kind}"
    )


@constexpr_function
def _atom_cas_text(order: str, scope: str) -> str:
    if order not in ("relaxed", "acquire", "release"):
        raise ValueError(f"atom_cas with order={order!r}: it is 'relaxed', 'acquire' or 'release'")
    if scope not in SCOPES:
        raise ValueError(f"atom_cas with scope={scope!r}: it is one of {', '.join(map(repr, SCOPES))}")
    return f"atom.{order}.{scope}.global.cas.b32 $0, [$1], $2, $3;"


@triton.jit
def atom_cas(pointer, expected, value, order: tl.constexpr = "relaxed", scope: tl.constexpr = "gpu"):
    """Writes an int32 `value` to global memory if it holds `expected`, in each thread that executes it. Returns the
    old value. sm_70.

    PTX ISA 9.7.14 `atom.cas`.
    """
    return asm(_atom_cas_text(order, scope), "=r,l,r,r", [pointer, expected, value], tl.int32)


def _held_once(tensor: Traced, semantic: Semantic) -> bool:
    """Is each element held by one thread only? A layout that gives some register, lane or warp bit no element
    replicates the tile."""
    layout = unwrap(semantic.to_linear_layout(tensor.type.layout, tensor.type.shape))
    return all(any(basis) for bases in (layout.reg_bases, layout.lane_bases, layout.warp_bases) for basis in bases)


@builtin
def _red_add(
    pointer: Traced,
    values: Traced,
    kind: Traced,
    order: Traced,
    scope: Traced,
    issuer: Traced,
    _semantic: Semantic = None,
) -> None:
    values = tuple(values) if isinstance(values, (tuple, tl.tuple)) else (values,)
    values = [_semantic.to_tensor(unwrap(value)) for value in values]
    kind = unwrap(kind)
    mnemonic = red_mnemonic(kind, len(values), unwrap(order))
    letter, minimum, _ = RED_TYPES[kind]
    if len(values) > 1:
        minimum = 90
    require(mnemonic.replace(".{scope}", ""), minimum, _semantic=_semantic)
    types = {"f32": ("fp32",), "u64": ("int64", "uint64")}.get(kind, ("int32", "uint32"))
    for operand in [pointer, *values]:
        if operand.type.is_block() and not isinstance(_semantic, GluonSemantic):
            raise TypeError(
                "red_add on a tile in a plain Triton kernel: several threads may hold one element, and each would add "
                "it; "
                "use tl.atomic_add, scalars with an issuer, or an explicit kernel"
            )
        if operand.type.is_block() and not _held_once(operand, _semantic):
            raise ValueError(
                f"red_add on {operand.type}: this layout gives an element to several threads, and each would add it; "
                "convert to a layout without replication"
            )
    for value in values:
        if str(value.dtype) not in types:
            raise TypeError(f"red_add of {value.dtype} as {kind}: the operand must be {' or '.join(types)}")
    _scoped(mnemonic, scope, pointer, values, (letter,) * len(values), issuer, _semantic=_semantic)


@triton.jit
def red_add(
    pointer,
    values,
    kind: tl.constexpr = "f32",
    order: tl.constexpr = "relaxed",
    scope: tl.constexpr = "gpu",
    issuer: tl.constexpr = "thread",
):
    """Adds one value, or a tuple of 2 or 4 consecutive values (sm_90+), to the memory at each address, without
    returning the old one.

    values  float32 for kind "f32"; a word of two packed halves (uint32) for "f16x2" and "bf16x2" (sm_90+); "s32",
            "u32", "u64".
    order   "relaxed", or "release" (the thread's earlier writes are visible to a thread that acquires the sum).
    issuer  which threads add a scalar: "thread" (each of them!), "warp", "warpgroup" or "cta" (one of each).
    Tiles are for explicit kernels, in layouts that hold each element once. PTX ISA 9.7.14 `red.global.add`.
    """
    _red_add(pointer, values, kind, order, scope, issuer)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


_SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared"}
_ORDERS = ("weak", "relaxed", "acquire", "release", "volatile")
# Cache hints: no effect on values.
_HINTS = {
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "nc",
    "mmio",
    "L2::cache_hint",
    *(f"L2::{size}" for size in PREFETCH),
}
_HINTS |= {f"{level}::{how}" for level in ("L1", "L2") for how in PRIORITY}
_WORDS = "{words:" + "|".join([*_SPACES, *_ORDERS, *SCOPES, *sorted(_HINTS), "v2", "v4", "v8"]) + "}*"


def _access(i: Instruction) -> tuple[str, str, str, int, str]:
    """(space, order, scope, number of words, type) from the words of ld, st, red and atom."""
    space, order, scope, count = "generic", "weak", "", 1
    for part in (i.fields["words"] or "").split(".")[1:]:
        if part in _SPACES:
            space = _SPACES[part]
        elif part in _ORDERS:
            order = part
        elif part in SCOPES:
            scope = part
        elif part in ("v2", "v4", "v8"):
            count = int(part[1])
    return space, order, scope, count, i.fields["type"] or ""


def _bits(kind: str) -> int:
    return int(kind.lstrip("usbf"))


_TYPES = "|".join(f"{k}{n}" for k in "usb" for n in (8, 16, 32, 64)) + "|f32|f64|b128"


@meaning(f"ld.{_WORDS}.{{type:{_TYPES}}}")
def _ld(t: Machine, i: Instruction, addresses: Register, policy: Register = None) -> Register:
    """A vector is one access; a word narrower than its register is extended, by its sign where the type is signed."""
    space, order, scope, count, kind = _access(i)
    bits = _bits(kind)
    data = t.load(space, addresses, count * bits // 8, i.active, order, scope)
    parts = [from_bytes(data[:, n * bits // 8 : (n + 1) * bits // 8], bits) for n in range(count)]
    if kind[0] == "s":
        parts = [part.view(f"i{bits // 8}").astype(np.int64).view(np.uint64) for part in parts]
    return tuple(parts) if isinstance(i.destination_bits[0], tuple) else parts[0]


@meaning(f"st.{_WORDS}.{{type:{_TYPES}}}", destinations=0)
def _st(t: Machine, i: Instruction, addresses: Register, values: Register, policy: Register = None) -> None:
    space, order, scope, count, kind = _access(i)
    values = values if isinstance(values, tuple) else (values,)
    if len(values) != count:
        raise NoMeaning(f"{len(values)} values")
    data = np.concatenate([data_bytes(value, _bits(kind), i.active) for value in values], axis=1)
    t.store(space, addresses, data, i.active, order, scope)


_ATOMIC_TYPES = "u32|s32|u64|s64|b32|b64|f32|f64|f16|bf16|f16x2|bf16x2"
_OPERATIONS = "add|min|max|inc|dec|and|or|xor|exch|cas"


def _atomic(t: Machine, i: Instruction, addresses: Register, *values: Register) -> Register:
    """Execute element by element of a vector. 16-bit floats are always added without ftz."""
    space, order, scope, count, kind = _access(i)
    bits = 32 if kind.endswith("x2") else _bits(kind.removeprefix("b") if kind == "bf16" else kind)
    operation = i.fields["operation"] or ""
    *compare, value = values if operation == "cas" else (None, values[0])
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) != count:
        raise NoMeaning(f"{len(parts)} values")
    old = []
    for n, part in enumerate(parts):
        words = from_bytes(data_bytes(part, bits, i.active), bits)
        expected = None if compare[0] is None else from_bytes(data_bytes(compare[0], bits, i.active), bits)
        place = addresses + addresses.dtype.type(n * bits // 8)
        old.append(
            t.atomic(
                space,
                operation,
                kind,
                place,
                words,
                i.active,
                "relaxed" if order == "weak" else order,
                scope or "gpu",
                expected,
            )
        )
    return tuple(old) if isinstance(value, tuple) else old[0]


@meaning(
    f"red.{_WORDS}.{{operation:{_OPERATIONS}}}.{{noftz:noftz}}?.{{vector:v2|v4|v8}}?.{{type:{_ATOMIC_TYPES}}}",
    destinations=0,
)
def _red(t: Machine, i: Instruction, addresses: Register, value: Register, policy: Register = None) -> None:
    _atomic(t, _with_vector(i), addresses, value)


@meaning(f"atom.{_WORDS}.{{operation:{_OPERATIONS}}}.{{noftz:noftz}}?.{{vector:v2|v4|v8}}?.{{type:{_ATOMIC_TYPES}}}")
def _atom(t: Machine, i: Instruction, addresses: Register, *values: Register) -> Register:
    return _atomic(t, _with_vector(i), addresses, *values)


def _with_vector(i: Instruction) -> Instruction:
    """Here the vector's size follows the operation in the mnemonic."""
    if i.fields["vector"]:
        i.fields = {**i.fields, "words": f"{i.fields['words'] or ''}.{i.fields['vector']}"}
    return i


@meaning("prefetch.{space:global}?.{level:L1|L2|L2::evict_last|L2::evict_normal}", "prefetchu.L1", destinations=0)
def _prefetch_meaning(t: Machine, i: Instruction, addresses: Register) -> None:
    """Do nothing: caches do not affect results."""
