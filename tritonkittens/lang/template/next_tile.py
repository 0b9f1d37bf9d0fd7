"""The work tile that a role begins with, and the one after it: computed by each role, or broadcast by the producer."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.schedule.dynamic_scheduler import broadcast, fetch_next, numbered, receive, receive_first
from tritonkittens.lang.schedule.tile_scheduler import any_tile, first_index, next_index, tile_after, work_tile
from tritonkittens.lang.template.facts import facts


@triton.jit
def computed_first_tile(ctx, A):
    """(index, work tile) that this CTA begins with, computed here."""
    index = first_index(ctx, A)
    return index, work_tile(ctx, A, index)


@triton.jit
def fetched_tile(ctx, A, memory, nth):
    """(index, work tile) that this CTA fetches as its `nth`: the producer broadcasts it to the other roles."""
    index = fetch_next(ctx, memory, nth)
    if ctx.config.broadcast_tile:
        tile = work_tile(ctx, A, index)
        broadcast(memory, tile, nth)
    else:
        broadcast(memory, numbered(index), nth)
        tile = work_tile(ctx, A, index)
    return index, tile


@triton.jit
def received_tile(ctx, A, memory, nth):
    """(index, work tile) that the producer broadcasts as the CTA's `nth`."""
    if ctx.config.broadcast_tile:
        tile = receive(memory, any_tile(ctx, A), nth)
    else:
        tile = work_tile(ctx, A, receive(memory, numbered(0), nth).number)
    return tile.task_id, tile


@triton.jit
def first_tile(ctx, A, memory, T: tl.constexpr):
    """(index, work tile) that a role begins with."""
    BROADCAST: tl.constexpr = facts(T).broadcasts_first
    if BROADCAST:
        return first_index(ctx, A), receive_first(memory, any_tile(ctx, A))
    else:
        return computed_first_tile(ctx, A)


@triton.jit
def next_tile(ctx, A, index, tile):
    """(index, work tile) after one, computed here."""
    following = next_index(ctx, A, index, tile)
    return following, tile_after(ctx, A, tile, following)


@triton.jit
def following_tile(ctx, A, memory, index, tile, turn, T: tl.constexpr):
    """(index, work tile) after a role's work tile number `turn`, in roles that do not fetch."""
    DYNAMIC: tl.constexpr = facts(T).dynamic
    return received_tile(ctx, A, memory, turn) if DYNAMIC else next_tile(ctx, A, index, tile)
