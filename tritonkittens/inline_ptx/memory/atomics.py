"""Accesses that threads synchronise by: acquire, release, and read-modify-writes (PTX ISA 9.7.9 `ld.acquire`,
`st.release`; 9.7.14 `red`, `atom`)."""

import triton
import triton.language as tl
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.runtime.jit import constexpr_function

from .._asm import arch, asm, builtin, issued, require, unwrap
from .._meaning import Instruction, Machine, NoMeaning, Register, data_bytes, from_bytes, meaning
from .._traced import Semantic, Traced
from .words import SCOPES, WORDS, access_of, address_of, bits_of, check_one_of, constraint

RED_TYPES = {
    "f32": ("f", 80, 4),
    "f16x2": ("r", 80, 4),
    "bf16x2": ("r", 90, 4),
    "s32": ("r", 80, 1),
    "u32": ("r", 80, 1),
    "u64": ("l", 80, 1),
}


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
    check_one_of("scope", scope or "none", SCOPES)
    minimum = 90 if scope == "cluster" else 80
    mnemonic = mnemonic.replace("{scope}", scope)
    require(mnemonic, minimum, _semantic=_semantic)
    address, word = address_of(pointer, _semantic, mnemonic)
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
    check_one_of("scope", scope or "none", SCOPES)
    require(f"ld.acquire.{scope}", 90 if scope == "cluster" else 80, _semantic=_semantic)
    address, word = address_of(pointer, _semantic, "load_acquire")
    template, constraints = f"ld.acquire.{scope}.global.b{word.primitive_bitwidth} $0, [$1];", f"={constraint(word)},l"
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
    word = address_of(pointer, _semantic, "store_release")[1]
    value = _semantic.cast(_semantic.to_tensor(unwrap(value)), word)
    _scoped(
        f"st.release.{{scope}}.global.b{word.primitive_bitwidth}",
        scope,
        pointer,
        (value,),
        (constraint(word),),
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


def _held_once(tensor: Traced, semantic: Semantic) -> bool:
    """Is each element held by one thread only? A layout that gives some register, lane or warp bit no element
    replicates the tile."""
    layout = unwrap(semantic.to_linear_layout(tensor.type.layout, tensor.type.shape))
    return all(any(basis) for bases in (layout.reg_bases, layout.lane_bases, layout.warp_bases) for basis in bases)


def _check_held_once(operand: Traced, semantic: Semantic) -> None:
    """Errors: TypeError or ValueError for a tile of which several threads may hold, and would add, one element."""
    if operand.type.is_block() and not isinstance(semantic, GluonSemantic):
        raise TypeError(
            "red_add on a tile in a plain Triton kernel: several threads may hold one element, and each would add it; "
            "use tl.atomic_add, scalars with an issuer, or an explicit kernel"
        )
    if operand.type.is_block() and not _held_once(operand, semantic):
        raise ValueError(
            f"red_add on {operand.type}: this layout gives an element to several threads, and each would add it; "
            "convert to a layout without replication"
        )


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
        _check_held_once(operand, _semantic)
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

_ATOMIC_TYPES = "u32|s32|u64|s64|b32|b64|f32|f64|f16|bf16|f16x2|bf16x2"
_OPERATIONS = "add|min|max|inc|dec|and|or|xor|exch|cas"


def _atomic(t: Machine, i: Instruction, addresses: Register, *values: Register) -> Register:
    """Execute element by element of a vector. 16-bit floats are always added without ftz."""
    space, order, scope, count, kind = access_of(i)
    bits = 32 if kind.endswith("x2") else bits_of(kind.removeprefix("b") if kind == "bf16" else kind)
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
    f"red.{WORDS}.{{operation:{_OPERATIONS}}}.{{noftz:noftz}}?.{{vector:v2|v4|v8}}?.{{type:{_ATOMIC_TYPES}}}",
    destinations=0,
)
def _red(t: Machine, i: Instruction, addresses: Register, value: Register, policy: Register = None) -> None:
    _atomic(t, _with_vector(i), addresses, value)


@meaning(f"atom.{WORDS}.{{operation:{_OPERATIONS}}}.{{noftz:noftz}}?.{{vector:v2|v4|v8}}?.{{type:{_ATOMIC_TYPES}}}")
def _atom(t: Machine, i: Instruction, addresses: Register, *values: Register) -> Register:
    return _atomic(t, _with_vector(i), addresses, *values)


def _with_vector(i: Instruction) -> Instruction:
    """Here the vector's size follows the operation in the mnemonic."""
    if i.fields["vector"]:
        i.fields = {**i.fields, "words": f"{i.fields['words'] or ''}.{i.fields['vector']}"}
    return i
