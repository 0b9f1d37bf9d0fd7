"""Named barriers between the consumers of a CTA: turns, exchange tiles, and the end of a task."""

from __future__ import annotations

from typing import Any

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import GROUP, unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.sync.named_barriers import named_arrive, named_sync

# Named barriers 8 … 11: from each of up to four consumers to the next one; or, between two that exchange tiles, empty
# (8, 9) and full (10, 11)
TURN_BARRIER = 8
EXCHANGE_FULL_BARRIER = 10
MEETING_BARRIER = 12
FINISH_BARRIER = 15


@op
def await_previous(t: Trace, consumer: Traced) -> Traced:
    """Wait until the previous consumer has called `call_next`: for this one's turn, for the ring, or for the end of a
    task. Both make the same number of calls."""
    t.call(named_sync, TURN_BARRIER + unwrap(consumer), 2 * GROUP)


@op
def call_next(t: Trace, consumer: Traced, T: Traced) -> Traced:
    """Let the next consumer continue. Consumer 0 follows the last one."""
    t.call(named_arrive, TURN_BARRIER + (unwrap(consumer) + 1) % unwrap(T).consumers, 2 * GROUP)


@op
def warp_scheduler_sync(t: Trace, ctx: Traced) -> Traced:
    """Wait for this consumer's turn (templates with `warp_scheduler_barrier=True` and several consumers; otherwise
    nothing). Source: FlashAttention-3 (Shah et al., 2024), section 3.1."""
    if _has_turns(ctx.config):
        t.call(await_previous, ctx.block_consumer)


@op
def warp_scheduler_arrive(t: Trace, ctx: Traced) -> Traced:
    """Pass the turn to the next consumer; see `warp_scheduler_sync`. Each consumer calls both equally often."""
    if _has_turns(ctx.config):
        t.call(call_next, ctx.block_consumer, ctx.config)


@op
def open_turns(t: Trace, consumer: Traced, T: Traced) -> Traced:
    """The last consumer passes the first turn to consumer 0."""
    if _has_turns(T) and unwrap(consumer) == unwrap(T).consumers - 1:
        t.call(call_next, consumer, T)


def _has_turns(T: Any) -> bool:
    return bool(unwrap(T).warp_scheduler_barrier and unwrap(T).consumers > 1)


@op
def sync_consumers(t: Trace, ctx: Traced) -> Traced:
    """Barrier of all consumers of a task: after it, each sees what the others wrote to exchange tiles.

    Where tensor cores or TMA read the tiles, their writer first calls `tk.fence_async`. Each consumer makes the same
    number of calls."""
    t.call(named_sync, MEETING_BARRIER, unwrap(ctx.config).consumers * GROUP)


def _of_two(ctx: Any, call: str) -> int:
    """The number of this consumer; raises where it does not share tasks with exactly one other."""
    config = unwrap(ctx.config)
    if config.consumers != 2 or config.team != 2 or config.warp_scheduler_barrier:
        raise TileError(
            f"{call} in {type(config).__name__}: exchange tiles go from one consumer to the other; that needs "
            "consumers=2, which share tasks and take no turns"
        )
    return unwrap(ctx.block_consumer)


def _arrive_for_other(t: Trace, ctx: Traced, barrier: int, call: str) -> None:
    t.call(named_arrive, barrier + 1 - _of_two(ctx, call), 2 * GROUP)


def _wait_for_other(t: Trace, ctx: Traced, barrier: int, call: str) -> None:
    t.call(named_sync, barrier + _of_two(ctx, call), 2 * GROUP)


@op
def exchange_commit(t: Trace, ctx: Traced) -> Traced:
    """Pass the exchange tiles that this consumer wrote to the other of two consumers, which calls `tk.exchange_wait`.

    Where tensor cores or TMA read the tiles, the writer first calls `tk.fence_async`. The other consumer must call
    `tk.exchange_wait` once between two calls: a second arrival would complete the phase of the named barrier. Unlike
    `tk.sync_consumers`, this call does not block."""
    _arrive_for_other(t, ctx, EXCHANGE_FULL_BARRIER, "exchange_commit")


@op
def exchange_wait(t: Trace, ctx: Traced) -> Traced:
    """Wait until the other consumer has called `tk.exchange_commit`."""
    _wait_for_other(t, ctx, EXCHANGE_FULL_BARRIER, "exchange_wait")


@op
def exchange_release(t: Trace, ctx: Traced) -> Traced:
    """Release the other consumer's exchange tiles, which this one has read. This call does not block.

    The other consumer overwrites them after `tk.exchange_acquire`, which it must call once for each release."""
    _arrive_for_other(t, ctx, TURN_BARRIER, "exchange_release")


@op
def exchange_acquire(t: Trace, ctx: Traced) -> Traced:
    """Wait until the other consumer has called `tk.exchange_release`. Not for the first write: it would hang."""
    _wait_for_other(t, ctx, TURN_BARRIER, "exchange_acquire")


@op
def meet_at_end(t: Trace, T: Traced) -> Traced:
    """All consumers of the CTA are done with their products."""
    t.call(named_sync, FINISH_BARRIER, unwrap(T).consumers * GROUP)
