"""Meanings of the instructions between the interesting ones: moves, integers, bits, predicates, warp votes (PTX ISA
9.7.1, 9.7.2, 9.7.6 to 9.7.9, 9.7.13)."""

import operator
from collections.abc import Callable

import numpy as np

from ._formats import decode, word
from ._meaning import (
    Bits,
    Instruction,
    Machine,
    NoMeaning,
    PtxFault,
    Register,
    Registered,
    join,
    meaning,
    signed,
    split,
    uniform,
    unsigned,
    warps,
)

INTEGERS = "u16|u32|u64|s16|s32|s64"
INTEGERS8 = "u8|s8|" + INTEGERS
BITS = "b8|b16|b32|b64"


def width(kind: str) -> int:
    """32 of "u32", "b32", "f32"."""
    return int(kind.lstrip("usbf"))


def integer(x: Register, kind: str) -> Bits:
    """A source as the integer type `kind`."""
    return signed(x, width(kind)) if kind.startswith("s") else unsigned(x, width(kind))


def words(x: Register, kind: str) -> Bits:
    """The bits of a source as words of the width of `kind`."""
    return np.asarray(x).astype(word(width(kind)))


@meaning(f"mov.{{type:pred|b128|f16|bf16|f32|f64|{BITS}|{INTEGERS8}}}")
def _mov(t: Machine, i: Instruction, a: Register) -> Register:
    (to,) = i.destination_bits
    if isinstance(to, tuple):
        total = sum(bits or 0 for bits in to)
        if isinstance(a, tuple) or total not in (16, 32, 64) or len(set(to)) != 1:
            raise NoMeaning(f"mov into registers of {to} bits")
        return split(a, total, len(to))
    if isinstance(a, tuple):
        return join(a, to)
    if to == 1:
        return np.asarray(a, bool)
    if isinstance(a, float):
        return np.float64(a).view(np.uint64) if to == 64 else np.float32(a).view(np.uint32)
    return a if to == 128 else unsigned(a, to)


def _wide(function: Callable[..., Register]) -> Registered:
    def apply(t: Machine, i: Instruction, *sources: Register) -> Register:
        kind = i.fields["type"]
        assert kind is not None
        return words(function(*(integer(x, kind) for x in sources)), kind)

    return apply


with_wrap = {
    f"add.{{type:{INTEGERS}}}": operator.add,
    f"sub.{{type:{INTEGERS}}}": operator.sub,
    f"mul.lo.{{type:{INTEGERS}}}": operator.mul,
    f"mad.lo.{{type:{INTEGERS}}}": lambda a, b, c: a * b + c,
    "neg.{type:s16|s32|s64}": operator.neg,
    "abs.{type:s16|s32|s64}": np.abs,
    f"min.{{type:{INTEGERS}}}": np.minimum,
    f"max.{{type:{INTEGERS}}}": np.maximum,
    f"and.{{type:{BITS}}}": operator.and_,
    f"or.{{type:{BITS}}}": operator.or_,
    f"xor.{{type:{BITS}}}": operator.xor,
    f"not.{{type:{BITS}}}": np.invert,
}
for _pattern, _function in with_wrap.items():
    meaning(_pattern)(_wide(_function))


@meaning("and.pred", "or.pred", "xor.pred", "not.pred")
def _logic(t: Machine, i: Instruction, *sources: Register) -> Register:
    a = [np.asarray(x, bool) for x in sources]
    return {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[
        i.mnemonic.split(".")[0]
    ](*a)


@meaning("mul.wide.{type:u16|u32|s16|s32}", "mad.wide.{type:u16|u32|s16|s32}")
def _mul_wide(t: Machine, i: Instruction, a: Register, b: Register, c: Register = 0) -> Register:
    kind = i.fields["type"] or ""
    double = f"{kind[0]}{2 * width(kind)}"
    product = integer(a, kind).astype(integer(0, double).dtype) * integer(b, kind).astype(integer(0, double).dtype)
    return words(product + integer(c, double), double)


@meaning("mul.hi.{type:u32|s32|u16|s16}")
def _mul_hi(t: Machine, i: Instruction, a: Register, b: Register) -> Register:
    kind = i.fields["type"] or ""
    return words(
        (integer(a, kind).astype(np.int64 if kind[0] == "s" else np.uint64) * integer(b, kind)) >> width(kind), kind
    )


@meaning(f"div.{{type:{INTEGERS}}}", f"rem.{{type:{INTEGERS}}}")
def _divide(t: Machine, i: Instruction, a: Register, b: Register) -> Register:
    """Truncates; a zero divisor gives all ones (PTX leaves it open), as quotient and as remainder."""
    kind = i.fields["type"] or ""
    a, b = integer(a, kind), integer(b, kind)
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    quotient, rest = np.floor_divide(a, divisor), np.remainder(a, divisor)
    if kind[0] == "s":
        up = (rest != 0) & ((a < 0) != (divisor < 0))
        quotient, rest = quotient + up, np.where(up, rest - divisor, rest)
    return words(
        np.where(zero, -1 if kind[0] == "s" else ~b.dtype.type(0), quotient if i.mnemonic.startswith("div") else rest),
        kind,
    )


@meaning(f"shl.{{type:{BITS}}}", f"shr.{{type:{BITS}|{INTEGERS}}}")
def _shift(t: Machine, i: Instruction, a: Register, by: Register) -> Register:
    """Amounts of the width and above shift everything out."""
    kind = i.fields["type"] or ""
    bits, x, by = width(kind), integer(a, kind), unsigned(by, 32)
    amount = np.minimum(by, bits - 1).astype(x.dtype)
    moved = np.left_shift(x, amount) if i.mnemonic.startswith("shl") else np.right_shift(x, amount)
    full = np.where(x < 0, -1, 0).astype(x.dtype) if kind[0] == "s" else x.dtype.type(0)
    return words(np.where(by >= bits, full, moved), kind)


@meaning("prmt.b32")
def _prmt(t: Machine, i: Instruction, a: Register, b: Register, selector: Register) -> Register:
    """Byte k of the result is the byte of {b, a} that bits 4k … 4k + 2 of the selector name; bit 4k + 3 replicates its
    sign instead."""
    both = unsigned(a, 32).astype(np.uint64) | unsigned(b, 32).astype(np.uint64) << np.uint64(32)
    selector = unsigned(selector, 32).astype(np.uint64)
    out = np.uint64(0)
    for k in range(4):
        choice = selector >> np.uint64(4 * k) & np.uint64(15)
        byte = both >> (np.uint64(8) * (choice & np.uint64(7))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        out = out | np.where(choice >= 8, sign, byte) << np.uint64(8 * k)
    return out.astype(np.uint32)


@meaning("lop3.b32")
def _lop3(t: Machine, i: Instruction, a: Register, b: Register, c: Register, table: Register) -> Register:
    a, b, c, out = unsigned(a, 32), unsigned(b, 32), unsigned(c, 32), np.uint32(0)
    for index in range(8):
        if table >> index & 1:
            out = out | ((a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c))
    return out


@meaning("popc.{type:b32|b64}", "clz.{type:b32|b64}", "brev.{type:b32|b64}")
def _count(t: Machine, i: Instruction, a: Register) -> Register:
    bits = width(i.fields["type"] or "")
    places = unsigned(a, bits)[..., None] >> np.arange(bits).astype(word(bits)) & word(bits)(1)
    what = i.mnemonic.split(".")[0]
    if what == "popc":
        return places.sum(-1).astype(np.uint32)
    if what == "clz":
        return np.where(places.any(-1), np.argmax(places[..., ::-1], -1), bits).astype(np.uint32)
    return (places[..., ::-1] << np.arange(bits).astype(word(bits))).sum(-1, dtype=word(bits))


_ORDER = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def _compare(comparison: str, kind: str, a: Register, b: Register) -> Register:
    if kind[0] in "usb" and not kind.startswith("bf"):
        if comparison not in _ORDER:
            raise NoMeaning(f"setp.{comparison} of {kind}")
        return _ORDER[comparison](integer(a, kind), integer(b, kind))
    a, b = (np.float64(x) if isinstance(x, float) else decode(kind, x) for x in (a, b))
    unordered = np.isnan(a) | np.isnan(b)
    if comparison in ("num", "nan"):
        return unordered if comparison == "nan" else ~unordered
    either = comparison.endswith("u") and comparison[:-1] in _ORDER
    result = _ORDER[comparison[:-1] if either else comparison](a, b)
    return result | unordered if either else result & ~unordered


@meaning(
    f"setp.{{comparison}}.{{combine:and|or|xor}}?.{{ftz:ftz}}?.{{type:{INTEGERS}|b16|b32|b64|f16|bf16|f32|f64|f16x2|bf16x2}}"
)
def _setp(t: Machine, i: Instruction, a: Register, b: Register, c: Register = None) -> Register:
    comparison, kind = i.fields["comparison"] or "", i.fields["type"] or ""
    if kind.endswith("x2"):
        return tuple(_compare(comparison, kind[:-2], x, y) for x, y in zip(split(a, 32, 2), split(b, 32, 2)))
    result = _compare(comparison, kind, a, b)
    other = ~result
    if c is not None:
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[i.fields["combine"] or ""]
        result, other = combine(result, c), combine(other, c)
    return (result, other) if len(i.destination_bits) == 1 and isinstance(i.destination_bits[0], tuple) else result


@meaning(f"selp.{{type:{BITS}|{INTEGERS}|f32|f64}}")
def _selp(t: Machine, i: Instruction, a: Register, b: Register, p: Register) -> Register:
    bits = width(i.fields["type"] or "")
    return np.where(p, unsigned(a, bits), unsigned(b, bits))


@meaning(f"cvt.{{sat:sat}}?.{{to:{INTEGERS8}}}.{{source:{INTEGERS8}}}")
def _cvt(t: Machine, i: Instruction, a: Register) -> Register:
    """The destination register may be wider than its type: the value is extended by the type's sign."""
    to, source = i.fields["to"] or "", i.fields["source"] or ""
    x = integer(a, source)
    if i.fields["sat"]:
        raise NoMeaning("cvt.sat of integers")
    narrow = integer(x, to)
    return narrow.astype(np.int64).astype(np.uint64) if to[0] == "s" else narrow


# --- control and warps
# ----------------------------------------------------------------------------------------------------------------


@meaning("trap", destinations=0)
def _trap(t: Machine, i: Instruction) -> None:
    t.trap(i.active)


@meaning("bar.warp.sync", destinations=0)
def _bar_warp(t: Machine, i: Instruction, mask: Register) -> None:
    """A role runs its warps in lockstep: only memory is ordered."""
    t.fence("warp", i.active)


@meaning("activemask.b32")
def _activemask(t: Machine, i: Instruction) -> Register:
    out: np.ndarray = np.zeros(len(t.lane), np.uint32)
    for warp in warps(t, i.active):
        out[warp] = np.bitwise_or.reduce(np.uint32(1) << t.lane[warp].astype(np.uint32))
    return out


@meaning("vote.sync.{mode:all|any|uni|ballot}.{type:pred|b32}")
def _vote(t: Machine, i: Instruction, p: Register, mask: Register) -> Register:
    p = np.broadcast_to(np.asarray(p, bool), i.active.shape)
    out = np.zeros(i.active.shape, np.uint32 if i.fields["mode"] == "ballot" else bool)
    for warp in warps(t, i.active):
        votes = p[warp]
        if i.fields["mode"] == "ballot":
            out[warp] = np.bitwise_or.reduce(
                np.where(votes, np.uint32(1) << t.lane[warp].astype(np.uint32), np.uint32(0))
            )
        else:
            out[warp] = {"all": votes.all(), "any": votes.any(), "uni": votes.all() or not votes.any()}[
                i.fields["mode"] or ""
            ]
    return out


@meaning("shfl.sync.{mode:idx|up|down|bfly}.b32")
def _shfl(t: Machine, i: Instruction, a: Register, b: Register, c: Register, mask: Register) -> Register:
    """`c`: bits 0-4 clamp, 8-12 the mask of the segment (PTX ISA "shfl.sync"). Out of the segment, a thread keeps its
    own value."""
    a = np.broadcast_to(unsigned(a, 32), i.active.shape)
    lane: np.ndarray = t.lane.astype(np.int64)
    b, c = signed(b, 32).astype(np.int64) & 31, signed(c, 32).astype(np.int64)
    segment, clamp = c >> 8 & 31, c & 31
    last, first = (lane & segment) | (clamp & ~segment), lane & segment
    mode = i.fields["mode"] or ""
    wanted = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment)}[mode]
    inside = wanted >= last if mode == "up" else wanted <= last
    source = np.where(inside, wanted, lane)
    place = {(int(w), int(x)): n for n, (w, x) in enumerate(zip(t.warp, t.lane)) if i.active[n]}
    out = a.copy()
    for n in i.threads:
        other = place.get((int(t.warp[n]), int(source[n])))
        if other is None:
            raise PtxFault(f"shfl.sync of lane {int(t.lane[n])} from lane {int(source[n])}, which does not execute it")
        out[n] = a[other]
    return (out, np.broadcast_to(inside, out.shape)) if isinstance(i.destination_bits[0], tuple) else out


def elected(t: Machine, i: Instruction, mask: Register) -> np.ndarray:
    """bool [T]: the lowest executing lane of each warp."""
    uniform(mask, i.active, "the mask of elect.sync")
    out: np.ndarray = np.zeros(len(i.active), bool)
    for warp in warps(t, i.active):
        out[int(np.argmax(warp))] = True
    return out
