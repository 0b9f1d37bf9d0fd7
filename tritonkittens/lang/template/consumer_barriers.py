"""What the consumers of a block tell each other, by named barriers: whose turn it is, what they wrote for each other, that all are done."""
from __future__ import annotations

from typing import Any

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import GROUP, unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.sync.named_barriers import named_arrive, named_sync

TURN_BARRIER = 8  # named barriers 8 … 11: what up to four consumers tell the next one, or what two hand over to each other
HAND_OVER_BARRIER = 10
EXCHANGE_BARRIER = 12
FINISH_BARRIER = 15


@op
def await_previous(t: Trace, worker: Any) -> Any:
    """Wait until the consumer before this one has called `call_next`: for this one's turn, for the ring, or for the end of a task. Both call equally often."""
    t.call(named_sync, TURN_BARRIER + unwrap(worker), 2 * GROUP)


@op
def call_next(t: Trace, worker: Any, T: Any) -> Any:
    """The next consumer, behind the last one the first, may go on."""
    t.call(named_arrive, TURN_BARRIER + (unwrap(worker) + 1) % unwrap(T).consumers, 2 * GROUP)


@op
def warp_scheduler_sync(t: Trace, ctx: Any) -> Any:
    """Wait for this consumer's turn (templates with `ordered = True` and several consumers; otherwise nothing). FlashAttention-3's ping-pong."""
    if _alternate(ctx.config):
        t.call(await_previous, ctx.worker)


@op
def warp_scheduler_arrive(t: Trace, ctx: Any) -> Any:
    """Hand the turn to the next consumer; see `warp_scheduler_sync`. Each consumer calls both equally often."""
    if _alternate(ctx.config):
        t.call(call_next, ctx.worker, ctx.config)


@op
def open_turns(t: Trace, worker: Any, T: Any) -> Any:
    """The last consumer gives the first turn to consumer 0."""
    if _alternate(T) and unwrap(worker) == unwrap(T).consumers - 1:
        t.call(call_next, worker, T)


def _alternate(T: Any) -> bool:
    return bool(unwrap(T).warp_scheduler_barrier and unwrap(T).consumers > 1)


@op
def sync_consumers(t: Trace, ctx: Any) -> Any:
    """All consumers of a task meet: what each wrote to exchange tiles, and fenced with `tk.fence_async` where tensor cores or TMA read it, the others now see.
    Each calls it equally often."""
    t.call(named_sync, EXCHANGE_BARRIER, unwrap(ctx.config).consumers * GROUP)


def _of_two(ctx: Any, call: str) -> int:
    """The number of this consumer; raises where it does not share tasks with exactly one other."""
    config = unwrap(ctx.config)
    if config.consumers != 2 or config.team != 2 or config.warp_scheduler_barrier:
        raise TileError(f"{call} in {type(config).__name__}: exchange tiles go from one consumer to the other; that needs consumers=2, which share tasks and "
                        "take no turns")
    return unwrap(ctx.worker)


def _tell_other(t: Trace, ctx: Any, barrier: int, call: str) -> None:
    t.call(named_arrive, barrier + 1 - _of_two(ctx, call), 2 * GROUP)


def _wait_for_other(t: Trace, ctx: Any, barrier: int, call: str) -> None:
    t.call(named_sync, barrier + _of_two(ctx, call), 2 * GROUP)


@op
def hand_over(t: Trace, ctx: Any) -> Any:
    """The other of two consumers may read what this one wrote to exchange tiles, and fenced with `tk.fence_async` where tensor cores or TMA read it: it does so
    behind `tk.exchange_wait`. Consumers call both equally often, in turn. Unlike with `tk.sync_consumers` neither waits for the other until it needs what that
    wrote."""
    _tell_other(t, ctx, HAND_OVER_BARRIER, "exchange_commit")


@op
def take_over(t: Trace, ctx: Any) -> Any:
    """Wait until the other consumer has called `tk.exchange_commit`."""
    _wait_for_other(t, ctx, HAND_OVER_BARRIER, "exchange_wait")


@op
def hand_back(t: Trace, ctx: Any) -> Any:
    """The other of two consumers may overwrite its exchange tiles: this one has read them. It does so behind `tk.exchange_acquire`; both equally often, in turn."""
    _tell_other(t, ctx, TURN_BARRIER, "exchange_release")


@op
def take_back(t: Trace, ctx: Any) -> Any:
    """Wait until the other consumer has called `tk.exchange_release`."""
    _wait_for_other(t, ctx, TURN_BARRIER, "exchange_acquire")


@op
def meet_at_end(t: Trace, T: Any) -> Any:
    """All consumers of the block are done with their products."""
    t.call(named_sync, FINISH_BARRIER, unwrap(T).consumers * GROUP)
