"""Summing up a task that several blocks share: each writes its accumulators to global memory, and the last to come adds them up and finishes the task.

Nobody waits, so nothing can hang; the sum is taken in the order of the parts, whoever comes last, so the result is always the same. The counters are zero
before a launch and zero again after it. Source: Osama et al. (2023), "Stream-K", section 4 ("fix-up"), with a ticket instead of waiting for the others.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang._backend import Trace, gl, op
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.memory import load
from tritonkittens.lang.mma import mma_wait
from tritonkittens.lang.sync import sync
from tritonkittens.lang.types import unwrap
from tritonkittens.lang.values import assemble, axes_of, pieces_of, shape_of, struct


def elements(plan: Any) -> int:
    """fp32 numbers of the accumulators of one consumer."""
    return sum(tile.rows * tile.cols for _, tile in plan.accumulators)


@op
def settled(t: Trace, ctx: Any, state: Any) -> Any:
    """The state with all products waited for, its tiles in registers; they must be the accumulators that the layout declares."""
    tiles = {n: t.call(load, t.call(mma_wait, v)) for n, v in state.fields.items()}
    declared = {n: (tile.rows, tile.cols) for n, tile in unwrap(ctx.config)._plan.accumulators}
    if {n: shape_of(v) for n, v in tiles.items()} != declared or any(v.dtype != tl.float32 for v in tiles.values()):
        have = ", ".join(f"{n} {list(shape_of(v))}" for n, v in tiles.items())
        raise TileError(f"{type(unwrap(ctx.config)).__name__}(schedule={unwrap(ctx.config).schedule!r}): tasks that are split are summed up by their "
                        f"accumulators; the state must be the fp32 tiles of layout(accumulators={declared}), it has {have}")
    return struct(**tiles)


def _order(t: Trace, piece: Any) -> list[int]:
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


def _by_thread(t: Trace, piece: Any) -> Any:
    """A piece as a vector in the order of its registers: no register moves, and memory is accessed in whole lines, whatever the layout."""
    order = _order(t, piece)
    bits = t.method(t.method(piece, "reshape", [2] * len(order)), "permute", order)
    return t.method(bits, "reshape", [2 ** len(order)])


def _as_before(t: Trace, vector: Any, piece: Any) -> Any:
    """The inverse of `_by_thread`, laid out as `piece`."""
    order = _order(t, piece)
    bits = t.method(t.method(vector, "reshape", [2] * len(order)), "permute", [order.index(i) for i in range(len(order))])
    return t.call(gl.convert_layout, t.method(bits, "reshape", piece.shape), piece.type.layout, assert_trivial=True)


def _place(t: Trace, ctx: Any, slot: Any) -> Any:
    """Where slot number `slot` keeps what this consumer has summed up."""
    config = unwrap(ctx.config)
    place = t.method(t.method(t.method(slot, "to", tl.int64), "__mul__", config.cluster), "__add__", ctx.rank)
    place = t.method(t.method(place, "__mul__", config.team), "__add__", unwrap(ctx.consumer))
    return t.method(ctx.partials, "__add__", t.method(place, "__mul__", elements(config._plan)))


def _pointers(t: Trace, base: Any, vector: Any) -> Any:
    return t.method(base, "__add__", t.call(gl.arange, 0, vector.numel, vector.type.layout))


@op
def _put(t: Trace, ctx: Any, slot: Any, state: Any) -> Any:
    base = _place(t, ctx, slot)
    for tile in state.fields.values():
        for piece in pieces_of(tile):
            vector = _by_thread(t, piece)
            t.call(gl.store, _pointers(t, base, vector), vector)
            base = t.method(base, "__add__", vector.numel)


@op
def _plus(t: Trace, ctx: Any, slot: Any, state: Any) -> Any:
    """The state plus what lies in a slot."""
    out, base = {}, _place(t, ctx, slot)
    for name, tile in state.fields.items():
        sums = []
        for piece in pieces_of(tile):
            vector = _by_thread(t, piece)
            vector = t.method(vector, "__add__", t.call(gl.load, _pointers(t, base, vector)))
            sums.append(_as_before(t, vector, piece))
            base = t.method(base, "__add__", vector.numel)
        out[name] = assemble(axes_of(tile), sums)
    return struct(**out)


@op
def _zeros(t: Trace, state: Any) -> Any:
    return struct(**{n: assemble(axes_of(v), [t.full(tuple(p.shape), 0.0, tl.float32, p.type.layout) for p in pieces_of(v)]) for n, v in state.fields.items()})


@triton.jit
def _slot_of(ctx, part):
    """Stream-K: a block's first shared task is in its slot 0, its last in slot 1; the first block of a task may have begun it late. Split-K: late is 0."""
    STEP: tl.constexpr = ctx.config.slots_per_part
    return ctx.slot + STEP * part + tl.where(part == 0, ctx.late, 0)


@triton.jit
def sum_up(ctx, state):
    """(state, is it the whole sum?)."""
    last = ctx.parts == 1
    if ctx.parts > 1:
        _put(ctx, _slot_of(ctx, ctx.part), state)
        sync()
        TEAM: tl.constexpr = ctx.config.team
        CLUSTER: tl.constexpr = ctx.config.cluster
        counter = ctx.counters + (ctx.task * CLUSTER + ctx.rank) * TEAM + ctx.consumer
        last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == ctx.parts - 1
        if last:
            PARTS: tl.constexpr = ctx.config.fixed_parts
            if PARTS == 2:  # of two summands the order says nothing: mine need not be read again
                state = _plus(ctx, _slot_of(ctx, 1 - ctx.part), state)
            else:
                state = _zeros(state)
                if PARTS > 0:  # a loop of known length: the loads of several parts are under way at once
                    for part in tl.static_range(PARTS):
                        state = _plus(ctx, _slot_of(ctx, part), state)
                else:
                    for part in range(ctx.parts):
                        state = _plus(ctx, _slot_of(ctx, part), state)
            tl.store(counter, 0)
    return state, last

