"""What all accesses to global memory have in common: operands, and the words of their mnemonics."""

from collections.abc import Collection
from typing import NamedTuple

import triton.language as tl

from .._meaning import Instruction
from .._traced import Semantic, Traced

SCOPES = ("cta", "cluster", "gpu", "sys")
PRIORITY = ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
PREFETCH = ("64B", "128B", "256B")


def check_one_of(what: str, value: str, allowed: Collection[str]) -> None:
    """Raise ValueError where `value` is given and not allowed; `what` names it."""
    if value and value not in allowed:
        raise ValueError(f"{what}={value!r}: it is one of {', '.join(map(repr, allowed))}, or '' for the default")


def constraint(dtype: tl.dtype) -> str:
    """LLVM's constraint letter of a word. Errors: TypeError where it has neither 32 nor 64 bits."""
    if dtype.primitive_bitwidth not in (32, 64):
        raise TypeError(
            f"global access to {dtype}: a word has 32 or 64 bits; cast the pointer, e.g. "
            "pointer.to(tl.pointer_type(tl.uint32))"
        )
    return {"fp32": "f", "fp64": "d"}.get(str(dtype), "r" if dtype.primitive_bitwidth == 32 else "l")


def address_of(pointer: Traced, semantic: Semantic, what: str) -> tuple[Traced, tl.dtype]:
    """(64-bit addresses, element type) of a pointer or a tile of pointers. Errors: TypeError for another operand of
    `what`."""
    if not pointer.type.scalar.is_ptr():
        raise TypeError(f"{what}({pointer.type}): the first operand must be a pointer or a tile of pointers")
    return semantic.cast(pointer, tl.int64), pointer.type.scalar.element_ty


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------

_SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared"}
_ORDERS = ("weak", "relaxed", "acquire", "release", "volatile")
# Cache hints: no effect on values.
_HINTS = {
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "mmio", "L2::cache_hint"),
    *(f"L2::{size}" for size in PREFETCH),
    *(f"{level}::{how}" for level in ("L1", "L2") for how in PRIORITY),
}
# the field of a mnemonic's pattern that `access_of` reads
WORDS = "{words:" + "|".join([*_SPACES, *_ORDERS, *SCOPES, *sorted(_HINTS), "v2", "v4", "v8"]) + "}*"


class Access(NamedTuple):
    """What the mnemonic of ld, st, red or atom says: the space, order and scope, how many words, and their type."""

    space: str
    order: str
    scope: str
    words: int
    type: str


def access_of(i: Instruction) -> Access:
    """The access of an instruction whose pattern has `WORDS` and a `type`."""
    space, order, scope, words = "generic", "weak", "", 1
    for part in (i.fields["words"] or "").split(".")[1:]:
        if part in _SPACES:
            space = _SPACES[part]
        elif part in _ORDERS:
            order = part
        elif part in SCOPES:
            scope = part
        elif part in ("v2", "v4", "v8"):
            words = int(part[1])
    return Access(space, order, scope, words, i.fields["type"] or "")


def bits_of(kind: str) -> int:
    """Bits of a type whose name ends in them, as in u32."""
    return int(kind.lstrip("usbf"))
