"""Joining the parts of a task that several blocks share: each writes its accumulators to global memory, and the last to come adds them up and finishes the
task; or hooks `part` and `merge` say what a part comes to, and two of them together.

Nobody waits, so nothing can hang; they are joined in the order of the parts, whoever comes last, so the result is always the same. The counters are zero
before a launch and zero again after it. Source: Osama et al. (2023), "Stream-K", section 4 ("fix-up"), with a ticket instead of waiting for the others.
"""
from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import apply_pieces, assemble, axes_of, pieces_of, shape_of, struct
from tritonkittens.lang.memory.global_access import load
from tritonkittens.lang.mma.mma import mma_wait
from tritonkittens.lang.sync.semaphores import sync


def joined(plan: Any) -> tuple[tuple[str, Any], ...]:
    """Names and types of what a part of a task comes to: tiles, and vectors too where hooks merge them."""
    return plan.merged or plan.accumulators


def elements(plan: Any) -> int:
    """fp32 numbers of what a consumer has of a part."""
    return sum(math.prod(kind.shape) for _, kind in joined(plan))


@op
def settled(t: Trace, ctx: Traced, state: Traced) -> Traced:
    """The state with all products waited for, its tiles in registers; they must be the accumulators that the layout declares."""
    tiles = {n: t.call(load, t.call(mma_wait, v)) for n, v in state.fields.items()}
    declared = {n: tile.shape for n, tile in unwrap(ctx.config)._plan.accumulators}
    if {n: shape_of(v) for n, v in tiles.items()} != declared or any(v.dtype != tl.float32 for v in tiles.values()):
        have = ", ".join(f"{n} {list(shape_of(v))}" for n, v in tiles.items())
        raise TileError(f"{type(unwrap(ctx.config)).__name__}(schedule={unwrap(ctx.config).schedule!r}): tasks that are split are summed up by their "
                        f"accumulators; the state must be the fp32 tiles of layout(accumulators={declared}), it has {have}")
    return struct(**tiles)


@op
def own_part(t: Trace, ctx: Traced, state: Traced) -> Traced:
    """What this consumer has of a task, with all products waited for: its accumulators, or what hook `part` returns, which must be what the layout declares."""
    config = unwrap(ctx.config)
    if not config._plan.merged:
        return t.call(settled, ctx, state)
    part = t.call(type(config).part, ctx, state)
    declared = {n: kind.shape for n, kind in config._plan.merged}
    values = {n: t.call(mma_wait, v) if len(shape_of(v)) == 2 else v for n, v in part.fields.items()} if isinstance(part, struct) else {}
    if {n: shape_of(v) for n, v in values.items()} != declared or any(v.dtype != tl.float32 for v in values.values()):
        have = ", ".join(f"{n} {list(shape_of(v))} of {name_of(v.dtype)}" for n, v in values.items()) or f"{part!r}"
        raise TileError(f"{type(config).__name__}.part: must return a tk.struct of fp32 as layout(merged={declared}) says, not {have}")
    return struct(**{n: values[n] for n in declared})


def _order(t: Trace, piece: Traced) -> list[int]:
    """A permutation of the bits of an element's place in a piece (the row's, then the column's, each from the highest) that puts those of a thread's first four
    registers last and those of threads before them: in this order a thread has 16 bytes side by side, and neighbouring threads are neighbours.

    Each bit of a register's, lane's and warp's number in an accumulator is one bit of the place, or stands for copies.
    """
    layout = unwrap(t.call(gl.to_linear_layout, piece.type.layout, [unwrap(n) for n in piece.shape]))
    rows, cols = (unwrap(n).bit_length() - 1 for n in piece.shape)
    registers = [base for base in layout.reg_bases if any(base)]
    bases = [*registers[:2], *layout.lane_bases, *layout.warp_bases, *registers[2:]]
    places = [rows - row.bit_length() if row else rows + cols - col.bit_length() for row, col in bases if row or col]
    assert sorted(places) == list(range(rows + cols)), layout
    return places[::-1]


def _by_thread(t: Trace, piece: Traced) -> Traced:
    """A piece as a vector in the order of its registers: no register moves, and memory is accessed in whole lines, whatever the layout. A vector is one."""
    if len(piece.shape) == 1:
        return piece
    order = _order(t, piece)
    bits = t.method(t.method(piece, "reshape", [2] * len(order)), "permute", order)
    return t.method(bits, "reshape", [2 ** len(order)])


def _as_before(t: Trace, vector: Traced, piece: Traced) -> Traced:
    """The inverse of `_by_thread`, laid out as `piece`."""
    if len(piece.shape) == 1:
        return vector
    order = _order(t, piece)
    bits = t.method(t.method(vector, "reshape", [2] * len(order)), "permute", [order.index(i) for i in range(len(order))])
    return t.call(gl.convert_layout, t.method(bits, "reshape", piece.shape), piece.type.layout, assert_trivial=True)


def _place(t: Trace, ctx: Traced, slot: Traced) -> Traced:
    """Where slot number `slot` keeps what this consumer has summed up."""
    config = unwrap(ctx.config)
    place = t.method(t.method(t.method(slot, "to", tl.int64), "__mul__", config.cluster), "__add__", ctx.rank)
    place = t.method(t.method(place, "__mul__", config.team), "__add__", unwrap(ctx.consumer))
    return t.method(ctx.partials, "__add__", t.method(place, "__mul__", elements(config._plan)))


def _pointers(t: Trace, base: Traced, vector: Traced) -> Traced:
    return t.method(base, "__add__", t.call(gl.arange, 0, vector.numel, vector.type.layout))


@op
def _put(t: Trace, ctx: Traced, slot: Traced, state: Traced) -> Traced:
    base = _place(t, ctx, slot)
    for tile in state.fields.values():
        for piece in pieces_of(tile):
            vector = _by_thread(t, piece)
            t.call(gl.store, _pointers(t, base, vector), vector)
            base = t.method(base, "__add__", vector.numel)


@op
def _read(t: Trace, ctx: Traced, slot: Traced, like: Traced) -> Traced:
    """What lies in a slot, laid out as `like`."""
    out, base = {}, _place(t, ctx, slot)
    for name, x in like.fields.items():
        pieces = []
        for piece in pieces_of(x):
            vector = _by_thread(t, piece)
            pieces.append(_as_before(t, t.call(gl.load, _pointers(t, base, vector)), piece))
            base = t.method(base, "__add__", vector.numel)
        out[name] = assemble(axes_of(x), pieces)
    return struct(**out)


@op
def _join(t: Trace, ctx: Traced, state: Traced, theirs: Traced) -> Traced:
    """Two parts, or what has been joined and the next part: merged by the hook, or added. Laid out as `state`."""
    config = unwrap(ctx.config)
    if not config._plan.merged:
        return struct(**{n: apply_pieces(t, lambda a, b: t.method(a, "__add__", b), x, theirs.fields[n]) for n, x in state.fields.items()})
    both = t.call(type(config).merge, ctx, state, theirs)
    return struct(**{n: apply_pieces(t, lambda new, old: t.convert(new, old.type.layout), both.fields[n], x) for n, x in state.fields.items()})


@triton.jit
def _slot_of(ctx, part):
    """Stream-K: a block's first shared task is in its slot 0, its last in slot 1; the first block of a task may have begun it late. Split-K: late is 0."""
    STEP: tl.constexpr = ctx.config.schedule.slots_per_part
    return ctx.slot + STEP * part + tl.where(part == 0, ctx.late, 0)


@triton.jit
def join_parts(ctx, state):
    """(what all parts of the task come to, is it all of them?)."""
    last = ctx.parts == 1
    if ctx.parts > 1:
        _put(ctx, _slot_of(ctx, ctx.part), state)
        sync()
        TEAM: tl.constexpr = ctx.config.team
        CLUSTER: tl.constexpr = ctx.config.cluster
        counter = ctx.counters + (ctx.task_id * CLUSTER + ctx.rank) * TEAM + ctx.consumer
        last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == ctx.parts - 1
        if last:
            PARTS: tl.constexpr = ctx.config.schedule.fixed_parts
            if PARTS == 2 and not ctx.config.merges:  # of two summands the order says nothing: mine need not be read again
                state = _join(ctx, state, _read(ctx, _slot_of(ctx, 1 - ctx.part), state))
            else:
                state = _read(ctx, _slot_of(ctx, 0), state)
                if PARTS > 0:  # a loop of known length: the loads of several parts are in flight at once
                    for part in tl.static_range(1, PARTS):
                        state = _join(ctx, state, _read(ctx, _slot_of(ctx, part), state))
                else:
                    for part in range(1, ctx.parts):
                        state = _join(ctx, state, _read(ctx, _slot_of(ctx, part), state))
            tl.store(counter, 0)
    return state, last
