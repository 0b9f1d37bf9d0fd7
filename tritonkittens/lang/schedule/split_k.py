"""Joining the parts of a task that several CTAs share, through global memory.

Each CTA writes its accumulators. The last CTA to finish adds all of them, in the order of the parts, and runs the
epilogue. Hooks `part` and `merge` may replace accumulators and sum.
No CTA waits, so nothing can hang. The fixed order makes the result the same in every run. The counters are zero
before a launch and zero again after it.
Source: Osama et al. (2023), "Stream-K", section 4 ("fix-up"), with a ticket instead of a wait.
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
    """Return names and types of a part's result: tiles, and vectors too where hooks merge them."""
    return plan.merged or plan.accumulators


def elements(plan: Any) -> int:
    """Return the fp32 numbers of one consumer's part."""
    return sum(math.prod(kind.shape) for _, kind in joined(plan))


@op
def settled(t: Trace, ctx: Traced, state: Traced) -> Traced:
    """Wait for all products of the state. Return its register tiles, which must be the accumulators that the layout
    declares.
    """
    tiles = {n: t.call(load, t.call(mma_wait, v)) for n, v in state.fields.items()}
    declared = {n: tile.shape for n, tile in unwrap(ctx.config)._plan.accumulators}
    if {n: shape_of(v) for n, v in tiles.items()} != declared or any(v.dtype != tl.float32 for v in tiles.values()):
        have = ", ".join(f"{n} {list(shape_of(v))}" for n, v in tiles.items())
        raise TileError(
            f"{type(unwrap(ctx.config)).__name__}(schedule={unwrap(ctx.config).schedule!r}): tasks that are split are "
            f"summed up by their accumulators; the state must be the fp32 tiles of layout(accumulators={declared}), it "
            f"has {have}"
        )
    return struct(**tiles)


@op
def own_part(t: Trace, ctx: Traced, state: Traced) -> Traced:
    """Return this consumer's part of a task, after a wait for all products.

    It is the accumulators, or the result of hook `part`, which must match the layout.
    """
    config = unwrap(ctx.config)
    if not config._plan.merged:
        return t.call(settled, ctx, state)
    part = t.call(type(config).part, ctx, state)
    declared = {n: kind.shape for n, kind in config._plan.merged}
    values = (
        {n: t.call(mma_wait, v) if len(shape_of(v)) == 2 else v for n, v in part.fields.items()}
        if isinstance(part, struct)
        else {}
    )
    if {n: shape_of(v) for n, v in values.items()} != declared or any(v.dtype != tl.float32 for v in values.values()):
        have = ", ".join(f"{n} {list(shape_of(v))} of {name_of(v.dtype)}" for n, v in values.items()) or f"{part!r}"
        raise TileError(
            f"{type(config).__name__}.part: must return a tk.struct of fp32 as layout(merged={declared}) says, not "
            f"{have}"
        ).of(type(config).part)
    return struct(**{n: values[n] for n in declared})


def _order(t: Trace, piece: Traced) -> list[int]:
    """Return a permutation of an element's index bits that puts a thread's first four registers last, and thread bits
    before them.

    The index bits are the row's, then the column's, each from the highest. In this order, a thread has 16 contiguous
    bytes, and neighbouring threads are neighbours in memory.
    Each bit of a register's, lane's and warp's number in an accumulator is one index bit, or a copy.
    """
    layout = unwrap(t.call(gl.to_linear_layout, piece.type.layout, [unwrap(n) for n in piece.shape]))
    rows, cols = (unwrap(n).bit_length() - 1 for n in piece.shape)
    registers = [base for base in layout.reg_bases if any(base)]
    bases = [*registers[:2], *layout.lane_bases, *layout.warp_bases, *registers[2:]]
    places = [rows - row.bit_length() if row else rows + cols - col.bit_length() for row, col in bases if row or col]
    assert sorted(places) == list(range(rows + cols)), layout
    return places[::-1]


def _by_thread(t: Trace, piece: Traced) -> Traced:
    """Return a piece as a vector in the order of its registers. A vector is returned unchanged.

    No register moves, and memory is accessed in whole lines for any layout.
    """
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
    bits = t.method(
        t.method(vector, "reshape", [2] * len(order)), "permute", [order.index(i) for i in range(len(order))]
    )
    return t.call(gl.convert_layout, t.method(bits, "reshape", piece.shape), piece.type.layout, assert_trivial=True)


def _place(t: Trace, ctx: Traced, slot: Traced) -> Traced:
    """Return the address of this consumer's partial result in slot `slot`."""
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
    """Load a slot in the layout of `like`."""
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
    """Merge two parts by the hook, or add them. The result has the layout of `state`."""
    config = unwrap(ctx.config)
    if not config._plan.merged:
        return struct(
            **{
                n: apply_pieces(t, lambda a, b: t.method(a, "__add__", b), x, theirs.fields[n])
                for n, x in state.fields.items()
            }
        )
    both = t.call(type(config).merge, ctx, state, theirs)
    return struct(
        **{
            n: apply_pieces(t, lambda new, old: t.convert(new, old.type.layout), both.fields[n], x)
            for n, x in state.fields.items()
        }
    )


@triton.jit
def _slot_of(ctx, part):
    """Return the slot of a part.

    Stream-K: a CTA's first shared task is in its slot 0, its last in slot 1. The first CTA of a task may have
    begun it late. Split-K: late is 0.
    """
    STEP: tl.constexpr = ctx.config.schedule.slots_per_part
    return ctx.slot + STEP * part + tl.where(part == 0, ctx.late, 0)


@triton.jit
def join_parts(ctx, state):
    """Return (the joined parts of the task, whether all parts are joined)."""
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
            # the sum of two does not depend on the order, so this block's part need not be read again
            if PARTS == 2 and not ctx.config.merges:
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
