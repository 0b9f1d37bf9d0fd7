"""Roles of a template beside its producer and consumers, senders, used wrongly: every mistake is refused. No GPU needed."""

import dataclasses

import pytest
import torch
import triton

import tritonkittens.lang as tk
from tests.streaming import CountedStream, PlainSendingStream, SendingStream
from tests.util import meta, refused

tile = tk.st(tk.bf16, 64, 64)


def test_senders_are_explained():
    said = "  working tiles leave by a warp of their own for each consumer"
    assert said in SendingStream().explain().splitlines() and said not in CountedStream().explain()


def test_senders_are_for_whole_tasks_that_consumers_share():
    for knobs in (dict(cluster=2), dict(independent=True, weighted=False), dict(schedule=tk.SplitK(2)), dict(schedule=tk.ClusterSplitK(2))):
        given = f"schedule={knobs.get('schedule', tk.Persistent())!r}, cluster={knobs.get('cluster', 1)}, independent={'independent' in knobs}"
        with refused(f"PlainSendingStream({given}): hook 'send' is for whole tasks that the consumers of a block share; that needs cluster=1, "
                     "independent=False and a schedule that splits none"):
            PlainSendingStream(**knobs)

    class Idle(SendingStream):
        def layout(self):
            return dataclasses.replace(super().layout(), globals=dict(X=tile), working={})

    with refused("Idle: hook 'send' sends working tiles; its layout has none"):
        Idle()

    class Unopened(PlainSendingStream):
        drain, compute = SendingStream.drain, SendingStream.compute

    with refused("Unopened: hook 'send' of a pipelined computation needs hook 'first': what an iteration gives is sent one later"):
        Unopened()


class Unsent(CountedStream):
    @triton.jit
    def compute(ctx, state, input):
        tk.call_sender(ctx)
        return state


class Early(SendingStream):
    @triton.jit
    def first(ctx, state, input):
        tk.await_sender(ctx)
        return state


class Twice(PlainSendingStream):
    @triton.jit
    def compute(ctx, state, input):
        tk.await_sender(ctx)
        tk.call_sender(ctx)
        tk.call_sender(ctx)
        return state


class Hasty(PlainSendingStream):
    @triton.jit
    def send(ctx, working):
        tk.store_add_async(ctx.globals.Z, working.W, (ctx.consumer, 0))
        return ctx.globals.counts.pointer


class Waiting(PlainSendingStream):
    @triton.jit
    def compute(ctx, state, input):
        tk.await_sender(ctx)
        tk.await_call(ctx)
        tk.call_sender(ctx)
        return state


@pytest.mark.parametrize("cls, message", [
    (Unsent, "call_sender in Unsent: it is for consumers of templates with hook 'send', in 'compute' and 'drain'"),
    (Early, "await_sender in Early: it is for consumers of templates with hook 'send', in 'compute' and 'drain'"),
    (Twice, "Twice.compute calls tk.await_sender 1 times, tk.call_sender 2 times; with hook 'send' 'compute' and 'drain' call each once, in the hook "
            "itself, 'first' neither"),
    (Hasty, "Hasty.send calls tk.await_call 0 times; it does so once, in the hook itself, before it reads working tiles"),
    (Waiting, "await_call in Waiting: it is for hook 'send'"),
])  # fmt: skip
def test_senders_and_consumers_that_do_not_wait_for_each_other(cls, message):
    template = cls()
    x, z, counts = meta(4, 128, 64, dtype=torch.float32), meta(128, 64, dtype=torch.float32), meta(2, dtype=torch.int32)
    more = () if cls is Unsent else (z, counts)
    with refused(message):
        template.compile(x, x, x.flatten(0, 1), x.flatten(0, 1), meta(4, dtype=torch.int32), *more, tasks=4)
