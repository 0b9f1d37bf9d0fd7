"""Summing up a task whose iterations the blocks of a cluster share (`ClusterSplitK`): each sends the others their columns of what it has, through distributed
shared memory, and finishes its own.

A consumer has a mailbox for each other block, written by the consumer of the same number there: every thread keeps its registers in their order, 16 bytes at a
time, so that the thread of the same number reads what belongs to its own, whatever the layout. Nobody sends before all have read what the task before brought.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import shared as ptx_shared
from tritonkittens.lang._backend import Trace, gl, op
from tritonkittens.lang.consumers import WARPS
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.shared import allocate_pieces
from tritonkittens.lang.sync import arrive, expect, new_semaphores, role_thread, wait
from tritonkittens.lang.tiles import split_cols
from tritonkittens.lang.types import sv, unwrap
from tritonkittens.lang.values import assemble, axes_of, pieces_of, shape_of, struct

QUAD = 16  # bytes that a thread moves at a time
STEP = ptx_cluster.QUAD_STEP  # those of a consumer


def slice_bytes(plan: Any, sharers: int) -> int:
    """Bytes of what a consumer sends to one other block."""
    return sum(tile.rows * tile.cols * 4 for _, tile in plan.accumulators) // sharers


def received_bytes(plan: Any, consumers: int, sharers: int, name: str) -> int:
    """Bytes of the mailboxes of a block. Raises `TileError` for accumulators whose columns cannot be dealt to so many blocks."""
    if sharers == 1:
        return 0
    for n, tile in plan.accumulators:
        step = STEP // (4 * tile.rows)
        if tile.dtype != tl.float32 or tile.cols % (sharers * step):
            raise TileError(f"{name}: the columns of accumulator {n!r}, {tile!r}, are dealt to {sharers} blocks: it must be of fp32 and its columns a multiple "
                            f"of {sharers * step}")
    return consumers * (sharers - 1) * slice_bytes(plan, sharers)


def new_mailboxes(t: Trace, T: Any) -> dict[str, Any]:
    """The mailboxes of all consumers, on which semaphore what others send arrives, and that which says that the others have read what was sent to them."""
    number = T.received // STEP
    boxes = allocate_pieces(t, sv(tl.float32, STEP // 4), number, f"sums of {T.sharers - 1} other blocks for {T.consumers} consumers")
    boxes._set_name(t.builder, "received")
    return {"received": boxes, "sums_arrived": new_semaphores(t, T.consumers, 1), "sums_read": new_semaphores(t, T.consumers, (T.sharers - 1) * WARPS)}


@op
def _slices(t: Trace, ctx: Any, state: Any) -> Any:
    """The state cut into the columns of every block."""
    sharers = unwrap(ctx.config).sharers
    cut = {n: t.call(split_cols, tile, shape_of(tile)[1] // sharers) for n, tile in state.fields.items()}
    return tl.tuple([struct(**{n: tiles[part] for n, tiles in cut.items()}) for part in range(sharers)])


@op
def _mine(t: Trace, ctx: Any, slices: Any) -> Any:
    """The columns of this block."""
    chosen = dict(slices[0].fields)
    for part in range(1, unwrap(ctx.config).sharers):
        here = t.method(ctx.part, "__eq__", part)
        for n, tile in chosen.items():
            pairs = zip(pieces_of(slices[part].fields[n]), pieces_of(tile), strict=True)
            chosen[n] = assemble(axes_of(tile), [t.call(gl.where, here, x, y) for x, y in pairs])
    return struct(**chosen)


@op
def _box(t: Trace, ctx: Any, memory: Any, number: Any) -> Any:
    """The address, in this block, of this thread's first 16 bytes in a mailbox of this consumer."""
    config = unwrap(ctx.config)
    steps = slice_bytes(config._plan, config.sharers) // STEP
    first = t.call(memory.received.__getitem__, unwrap(ctx.worker) * (config.sharers - 1) * steps)
    offset = t.method(t.method(t.scalar(number), "__mul__", steps * STEP), "__add__", t.method(role_thread(t), "__mul__", QUAD))
    return t.method(t.call(ptx_shared.address, first.pieces[0]), "__add__", offset)


@op
def _send(t: Trace, ctx: Any, memory: Any, state: Any, part: Any) -> Any:
    """Send the block `part` its columns, into the mailbox that it keeps for this block."""
    bar = t.call(memory.sums_arrived.__getitem__, unwrap(ctx.worker))
    address = t.call(ptx_cluster.mapa, t.call(_box, ctx, memory, t.call(_number, ctx.part, part)), part)
    remote_bar = t.call(ptx_cluster.mapa, bar, part)
    for piece in (p for tile in state.fields.values() for p in pieces_of(tile)):
        t.call(ptx_cluster.st_async_tile, address, piece, remote_bar)
        address = t.method(address, "__add__", 4 * piece.numel)


@op
def _plus_received(t: Trace, ctx: Any, memory: Any, state: Any, number: Any) -> Any:
    """The state plus what lies in a mailbox."""
    address, out = t.call(_box, ctx, memory, number), {}
    for name, tile in state.fields.items():
        sums = []
        for piece in pieces_of(tile):
            sums.append(t.method(piece, "__add__", t.call(ptx_cluster.ld_tile, address, piece)))
            address = t.method(address, "__add__", 4 * piece.numel)
        out[name] = assemble(axes_of(tile), sums)
    return struct(**out)


@op
def _expect_sums(t: Trace, ctx: Any, memory: Any) -> Any:
    config = unwrap(ctx.config)
    t.call(expect, t.call(memory.sums_arrived.__getitem__, unwrap(ctx.worker)), config.received // config.consumers)


@triton.jit
def _number(sender, receiver):
    """Which of the receiver's mailboxes is the sender's."""
    return sender - tl.where(sender > receiver, 1, 0)


@triton.jit
def sum_in_cluster(ctx, state, memory, turn, more):
    """This block's columns of the sum of all blocks' states (fp32 tiles in registers). `more`: does another task follow?"""
    SHARERS: tl.constexpr = ctx.config.sharers
    if turn == 0:
        ptx_cluster.wait()  # every block has made its semaphores
    _expect_sums(ctx, memory)
    if turn > 0:
        wait(memory.sums_read[ctx.worker], (turn & 1) ^ 1, scope="cluster")
    slices = _slices(ctx, state)
    for part in tl.static_range(SHARERS):
        if part != ctx.part:
            _send(ctx, memory, slices[part], part)
    mine = _mine(ctx, slices)
    wait(memory.sums_arrived[ctx.worker], turn & 1, scope="cluster")
    for number in tl.static_range(SHARERS - 1):
        mine = _plus_received(ctx, memory, mine, number)
    if more:
        for part in tl.static_range(SHARERS):
            if part != ctx.part:
                arrive(memory.sums_read[ctx.worker], per="warp", cta=part, fenced=True)
    return mine
