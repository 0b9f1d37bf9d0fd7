"""The work tile that a role begins with, and the one behind it: computed by each role, or broadcast by the producer."""
from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.schedule.dynamic_scheduler import fetch_next, receive, receive_first, numbered, broadcast
from tritonkittens.lang.schedule.tile_scheduler import first_index, next_index, any_tile, tile_after, work_tile
from tritonkittens.lang.template.facts import facts


@triton.jit
def computed_first_tile(ctx, A):
    """(index, its tile) that this block begins with, where it does not fetch_next it."""
    index = first_index(ctx, A)
    return index, work_tile(ctx, A, index)


@triton.jit
def fetched_tile(ctx, A, memory, nth):
    """The same of the `nth` index that this block dynamic: the producer tells the others."""
    index = fetch_next(ctx)
    if ctx.config.broadcast_tile:
        tile = work_tile(ctx, A, index)
        broadcast(memory, tile, nth)
    else:
        broadcast(memory, numbered(index), nth)
        tile = work_tile(ctx, A, index)
    return index, work


@triton.jit
def received_tile(ctx, A, memory, nth):
    """The same, as the others receive of it."""
    if ctx.config.broadcast_tile:
        tile = receive(memory, any_tile(ctx, A), nth)
    else:
        tile = work_tile(ctx, A, receive(memory, numbered(0), nth).number)
    return tile.task, work


@triton.jit
def first_tile(ctx, A, memory, T: tl.constexpr):
    """The same that a role begins with which dynamic none."""
    BROADCAST: tl.constexpr = facts(T).broadcasts_first
    if BROADCAST:
        return first_index(ctx, A), receive_first(memory, any_tile(ctx, A))
    else:
        return computed_first_tile(ctx, A)


@triton.jit
def next_tile(ctx, A, index, tile):
    """The same behind a index."""
    following = next_index(ctx, A, index, tile)
    return following, tile_after(ctx, A, tile, following)


@triton.jit
def following_tile(ctx, A, memory, index, tile, turn, T: tl.constexpr):
    """The same behind a role's index number `turn`, where it dynamic none."""
    DYNAMIC: tl.constexpr = facts(T).dynamic
    return received_tile(ctx, A, memory, turn) if DYNAMIC else next_tile(ctx, A, index, tile)
