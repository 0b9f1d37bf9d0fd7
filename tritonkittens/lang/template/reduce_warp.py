"""Working tiles that leave for global memory by a warp of their own, the consumer's sender: what sending them waits for, the consumer need not."""
from __future__ import annotations

from typing import Any

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.sync.semaphores import arrive, new_semaphores, wait
from tritonkittens.lang.template.pipeline_state import parity_of_uses


def sending_semaphores(t: Trace, T: Any) -> dict[str, Any]:
    """By which a consumer and its sender give each other the working tiles."""
    return {"given": new_semaphores(t, T.consumers, WARPS), "sent": new_semaphores(t, T.consumers, 1)}


def _sending(ctx: Any, call: str, of_sender: bool = False) -> Any:
    sending = ctx.fields.get("sending")
    if sending is None or ("sent" in sending.fields) == of_sender:
        where = "it is for hook 'reduce_store'" if of_sender else "it is for consumers of templates with hook 'reduce_store', in 'compute' and 'compute_last'"
        raise TileError(f"{call} in {type(unwrap(ctx.config)).__name__}: {where}")
    return sending


@op
def may_send(t: Trace, ctx: Any, memory: Any, phases: Any) -> Any:
    """A consumer's context of an iteration, or of `compute_last`, with what it needs to give its sender tiles: `phases` are those of the ring in front of it."""
    config = unwrap(ctx.config)
    if not config.sends:
        return ctx
    # A fresh semaphore counts as sent. Tiles are given once an iteration; where the computation is pipelined, from the second on and in `compute_last`
    uses = t.call(parity_of_uses, phases, config.placement(t.arch).stages)
    parity = uses if config.pipelined else t.method(uses, "__xor__", 1)
    sending = struct(given=t.call(memory.given.__getitem__, ctx.worker), sent=t.call(memory.sent.__getitem__, ctx.worker), parity=parity)
    return struct(**{**ctx.fields, "sending": sending})


def check_calls(config: Any, what: str, called: int, awaited: int) -> None:
    """Refuse a hook that does not wait for its sender and call it once. What a helper function does is not seen where the same function was called before."""
    times = int(what != "compute_first")
    if (called, awaited) != (times, times):
        raise TileError(f"{type(config).__name__}.{what} calls tk.reduce_acquire {awaited} times, tk.reduce_commit {called} times; with hook 'reduce_store' 'compute' and "
                        "'compute_last' call each once, in the hook itself, 'compute_first' neither")


@op
def reduce_acquire(t: Trace, ctx: Any) -> Any:
    """Wait until the working tiles that this consumer gave its sender last have been read: it may write them anew. Once an iteration, in front of
    `tk.reduce_commit`."""
    bill().senders_awaited += 1
    sending = _sending(ctx, "reduce_acquire")
    t.call(wait, sending.sent, sending.parity)


@op
def reduce_commit(t: Trace, ctx: Any) -> Any:
    """Give the working tiles, which were written and fenced (`tk.fence_async`), to this consumer's sender, which calls hook `reduce_store`. Once an iteration; where
    the computation is pipelined, not in the first, but in `compute_last`."""
    bill().senders_called += 1
    t.call(arrive, _sending(ctx, "reduce_commit").given, per="warp")


@op
def await_last_sent(t: Trace, memory: Any, worker: Any, phases: Any, T: Any) -> Any:
    """Behind a task: what it gave the sender has been read."""
    config = unwrap(T)
    if config.sends:
        uses = t.call(parity_of_uses, phases, config.placement(t.arch).stages)
        t.call(wait, t.call(memory.sent.__getitem__, worker), t.method(uses, "__xor__", 1))


@op
def reduce_wait(t: Trace, ctx: Any) -> Any:
    """A sender waits until its consumer has called `tk.reduce_commit`: the working tiles may be read. Once in hook `reduce_store`, behind what can be done before."""
    bill().calls_awaited += 1
    sending = _sending(ctx, "reduce_wait", of_sender=True)
    t.call(wait, sending.given, sending.parity)


__all__ = ["reduce_wait", "reduce_acquire", "reduce_commit"]
