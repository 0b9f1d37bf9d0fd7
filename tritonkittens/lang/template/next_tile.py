"""The work tile that a role begins with, and the one behind it: computed by each role, or broadcast by the producer."""
from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.schedule.dynamic_scheduler import draw, hear, hear_first, numbered, tell
from tritonkittens.lang.schedule.tile_scheduler import first_unit, next_unit, some_work, work_behind, work_of
from tritonkittens.lang.template.facts import facts


@triton.jit
def first_work(ctx, A):
    """(unit, its work) that this block begins with, where it does not draw it."""
    unit = first_unit(ctx, A)
    return unit, work_of(ctx, A, unit)


@triton.jit
def drawn_work(ctx, A, memory, nth):
    """The same of the `nth` unit that this block draws: the producer tells the others."""
    unit = draw(ctx)
    if ctx.config.broadcast_tile:
        work = work_of(ctx, A, unit)
        tell(memory, work, nth)
    else:
        tell(memory, numbered(unit), nth)
        work = work_of(ctx, A, unit)
    return unit, work


@triton.jit
def heard_work(ctx, A, memory, nth):
    """The same, as the others hear of it."""
    if ctx.config.broadcast_tile:
        work = hear(memory, some_work(ctx, A), nth)
    else:
        work = work_of(ctx, A, hear(memory, numbered(0), nth).number)
    return work.task, work


@triton.jit
def told_work(ctx, A, memory, T: tl.constexpr):
    """The same that a role begins with which draws none."""
    TOLD: tl.constexpr = facts(T).tells_first
    if TOLD:
        return first_unit(ctx, A), hear_first(memory, some_work(ctx, A))
    else:
        return first_work(ctx, A)


@triton.jit
def next_work(ctx, A, unit, work):
    """The same behind a unit."""
    following = next_unit(ctx, A, unit, work)
    return following, work_behind(ctx, A, work, following)


@triton.jit
def told_next(ctx, A, memory, unit, work, turn, T: tl.constexpr):
    """The same behind a role's unit number `turn`, where it draws none."""
    DRAWS: tl.constexpr = facts(T).draws
    return heard_work(ctx, A, memory, turn) if DRAWS else next_work(ctx, A, unit, work)
