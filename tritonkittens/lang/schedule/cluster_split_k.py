"""Cluster split-K: the CTAs of a cluster share a task's iterations, and reduce through distributed shared
memory.

Each CTA sends every other CTA the columns that the other finishes, and finishes its own. A consumer has one
mailbox for each other CTA, filled by the consumer of the same number there.
Every thread sends its registers in their order, 16 bytes at a time. So a thread reads exactly the elements that it
holds itself, for any layout. A CTA sends only after all CTAs have read the previous task's mailboxes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import shared as ptx_shared
from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import apply_pieces, assemble, axes_of, pieces_of, shape_of, struct
from tritonkittens.lang.memory.shared_tiles import allocate_pieces
from tritonkittens.lang.register.broadcast import add_row
from tritonkittens.lang.register.construction import split_cols, zero
from tritonkittens.lang.register.reductions import row_max
from tritonkittens.lang.schedule.split import iterations_of
from tritonkittens.lang.schedule.split_k import joined, own_part
from tritonkittens.lang.schedule.tile_scheduler import Schedule, setup
from tritonkittens.lang.sync.semaphores import arrive, expect, new_semaphores, role_thread, wait
from tritonkittens.lang.types.tiles import rt, sv

QUAD = 16  # bytes of one access by a thread
STEP = ptx_cluster.QUAD_STEP  # bytes of one access by a consumer
SPREAD = 16  # a vector is sent as a tile of this many columns, the fewest with elements in every thread


@dataclass(frozen=True)
class ClusterSplitK(Schedule):
    """Split every task's iterations into `parts` equal parts (2, 4 or 8), one for each CTA of a cluster.

    The CTAs then reduce through distributed shared memory. Hook `finish` receives only the columns of part
    `ctx.part` (of `ctx.config.sharers`). With hooks `part` and `merge`, the CTAs merge their results instead of
    summing accumulators.

    It fits few tasks of many iterations. Unlike `SplitK` it needs no global memory, no counters and no second pass
    through L2. The order of summation is fixed.
    """

    whole_tasks: ClassVar[bool] = False
    alone: ClassVar[str] = "the blocks of a cluster share a task's iterations and all their consumers its rows"

    parts: int = 2

    def __post_init__(self) -> None:
        if self.parts not in (2, 4, 8):
            raise TileError(f"ClusterSplitK(parts={self.parts!r}): must be 2, 4 or 8, the blocks of a cluster")

    @property
    def cluster_parts(self) -> int:  # type: ignore[override]
        return self.parts

    def tile(self, t: Trace, ctx: Traced, A: Traced, index: Traced) -> struct:
        info = setup(t, ctx, index)
        begin, count = t.call(iterations_of, ctx.part, t.scalar(self.parts), info.iterations)
        return struct(**{**info.fields, "task_id": index, "begin": begin, "count": count})


def slice_bytes(plan: Any, sharers: int) -> int:
    """Return the bytes that a consumer sends to one other CTA."""
    return sum(
        tile.rows * (tile.cols // sharers) * 4 if isinstance(tile, rt) else tile.length * SPREAD * 4
        for _, tile in joined(plan)
    )


def received_bytes(plan: Any, consumers: int, sharers: int, name: str) -> int:
    """Return the bytes of a CTA's mailboxes. Raises `TileError` for tiles whose columns cannot be split between the
    CTAs.
    """
    if sharers == 1:
        return 0
    for n, tile in joined(plan):
        what = f"{name}: {'what is merged' if plan.merged else 'accumulator'} {n!r}, {tile!r}"
        if tile.dtype != tl.float32:
            raise TileError(f"{what}, must be of fp32")
        if isinstance(tile, rt):
            step = STEP // (4 * tile.rows)
            if tile.cols % (sharers * step):
                raise TileError(
                    f"{what}: its columns are split between {sharers} blocks and must be a multiple of {sharers * step}"
                )
        elif tile.length % (STEP // (4 * SPREAD)):
            raise TileError(f"{what}: its length must be a multiple of {STEP // (4 * SPREAD)}")
    return consumers * (sharers - 1) * slice_bytes(plan, sharers)


def new_mailboxes(t: Trace, T: Traced) -> dict[str, Traced]:
    """Allocate the mailboxes of all consumers, and two semaphores for each: parts have arrived, and the others have
    read theirs.
    """
    number = T.received // STEP
    boxes = allocate_pieces(
        t, sv(tl.float32, STEP // 4), number, f"parts of {T.sharers - 1} other blocks for {T.consumers} consumers"
    )
    boxes._set_name(t.builder, "received")
    return {
        "received": boxes,
        "parts_arrived": new_semaphores(t, T.consumers, 1),
        "parts_read": new_semaphores(t, T.consumers, (T.sharers - 1) * WARPS),
    }


def _as_tile(t: Trace, x: Traced) -> Traced:
    """Return a tile unchanged, and a vector as the columns of a tile."""
    return x if len(shape_of(x)) == 2 else t.call(add_row, t.call(zero, rt(tl.float32, shape_of(x)[0], SPREAD)), x)


@op
def _sent_part(t: Trace, ctx: Traced, state: Traced) -> Traced:
    """Return this CTA's part of a task. Its vectors have the layout of received vectors."""
    part = t.call(own_part, ctx, state)
    return struct(
        **{n: x if len(shape_of(x)) == 2 else t.call(row_max, _as_tile(t, x)) for n, x in part.fields.items()}
    )


@op
def _slices(t: Trace, ctx: Traced, part: Traced) -> Traced:
    """Return the data for every CTA: its columns of each tile, and the whole vectors."""
    sharers = unwrap(ctx.config).sharers
    cut = {
        n: t.call(split_cols, x, shape_of(x)[1] // sharers) if len(shape_of(x)) == 2 else (x,) * sharers
        for n, x in part.fields.items()
    }
    return tl.tuple([struct(**{n: of[block] for n, of in cut.items()}) for block in range(sharers)])


@op
def _mine(t: Trace, ctx: Traced, slices: Traced) -> Traced:
    """Return the columns of this CTA."""
    chosen = dict(slices[0].fields)
    for block in range(1, unwrap(ctx.config).sharers):
        here = t.method(ctx.part, "__eq__", block)
        for n, tile in chosen.items():
            if len(shape_of(tile)) == 2:
                chosen[n] = apply_pieces(t, functools.partial(t.call, gl.where, here), slices[block].fields[n], tile)
    return struct(**chosen)


@op
def _box(t: Trace, ctx: Traced, memory: Traced, number: Traced) -> Traced:
    """Return the address, in this CTA, of this thread's first 16 bytes in a mailbox of this consumer."""
    config = unwrap(ctx.config)
    steps = slice_bytes(config._plan, config.sharers) // STEP
    first = t.call(memory.received.__getitem__, unwrap(ctx.block_consumer) * (config.sharers - 1) * steps)
    offset = t.method(
        t.method(t.scalar(number), "__mul__", steps * STEP), "__add__", t.method(role_thread(t), "__mul__", QUAD)
    )
    return t.method(t.call(ptx_shared.address, first.pieces[0]), "__add__", offset)


@op
def _send(t: Trace, ctx: Traced, memory: Traced, part: Traced, block: Traced) -> Traced:
    """Send another CTA its columns, into its mailbox for this CTA."""
    bar = t.call(memory.parts_arrived.__getitem__, unwrap(ctx.block_consumer))
    address = t.call(ptx_cluster.mapa, t.call(_box, ctx, memory, t.call(_number, ctx.part, block)), block)
    remote_bar = t.call(ptx_cluster.mapa, bar, block)
    for piece in (p for x in part.fields.values() for p in pieces_of(_as_tile(t, x))):
        t.call(ptx_cluster.st_async_tile, address, piece, remote_bar)
        address = t.method(address, "__add__", 4 * piece.numel)


@op
def _with_received(t: Trace, ctx: Traced, memory: Traced, mine: Traced, number: Traced) -> Traced:
    """Merge this CTA's part with the part in a mailbox."""
    config = unwrap(ctx.config)
    address, theirs = t.call(_box, ctx, memory, number), {}
    for name, x in mine.fields.items():
        tile, pieces = _as_tile(t, x), []
        for piece in pieces_of(tile):
            pieces.append(t.call(ptx_cluster.ld_tile, address, piece))
            address = t.method(address, "__add__", 4 * piece.numel)
        read = assemble(axes_of(tile), pieces)
        theirs[name] = read if len(shape_of(x)) == 2 else t.call(row_max, read)
    if config._plan.merged:
        return t.call(type(config).merge, ctx, mine, struct(**theirs))
    return struct(
        **{n: apply_pieces(t, lambda a, b: t.method(a, "__add__", b), x, theirs[n]) for n, x in mine.fields.items()}
    )


@op
def _expect_parts(t: Trace, ctx: Traced, memory: Traced) -> Traced:
    config = unwrap(ctx.config)
    t.call(
        expect,
        t.call(memory.parts_arrived.__getitem__, unwrap(ctx.block_consumer)),
        config.received // config.consumers,
    )


@triton.jit
def _number(sender, receiver):
    """Return the number of the receiver's mailbox for the sender."""
    return sender - tl.where(sender > receiver, 1, 0)


@triton.jit
def join_in_cluster(ctx, state, memory, turn, more):
    """Return this CTA's columns of the joined parts (fp32, in registers), and its vectors. `more`: another task
    follows.
    """
    SHARERS: tl.constexpr = ctx.config.sharers
    part = _sent_part(ctx, state)
    if turn == 0:
        ptx_cluster.wait()  # until every block has initialised its semaphores
    _expect_parts(ctx, memory)
    if turn > 0:
        wait(memory.parts_read[ctx.block_consumer], (turn & 1) ^ 1, scope="cluster")
    slices = _slices(ctx, part)
    for block in tl.static_range(SHARERS):
        if block != ctx.part:
            _send(ctx, memory, slices[block], block)
    mine = _mine(ctx, slices)
    wait(memory.parts_arrived[ctx.block_consumer], turn & 1, scope="cluster")
    for number in tl.static_range(SHARERS - 1):
        mine = _with_received(ctx, memory, mine, number)
    if more:
        for block in tl.static_range(SHARERS):
            if block != ctx.part:
                arrive(memory.parts_read[ctx.block_consumer], per="warp", cta=block, fenced=True)
    return mine
