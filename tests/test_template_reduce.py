"""Reduce-store warps used wrongly: every mistake is refused. No GPU needed."""

import dataclasses

import pytest
import torch
import triton

import tritonkittens.lang as tk
from tests.streaming import CountedStream, PlainReducingStream, ReducingStream
from tests.util import meta, refused

tile = tk.st(tk.bf16, 64, 64)


def test_reduce_store_warps_are_explained():
    line = "  the scratch tiles leave by a warp of its own for each consumer"
    assert line in ReducingStream().explain().splitlines() and line not in CountedStream().explain()


def test_reduce_store_warps_are_for_whole_tasks_that_consumers_share():
    for knobs in (
        dict(cluster=2),
        dict(pingpong=True, weighted=False),
        dict(schedule=tk.SplitK(2)),
        dict(schedule=tk.ClusterSplitK(2)),
    ):
        given = (
            f"schedule={knobs.get('schedule', tk.Persistent())!r}, cluster={knobs.get('cluster', 1)}, "
            f"pingpong={'pingpong' in knobs}"
        )
        with refused(
            f"PlainReducingStream({given}): hook 'reduce_store' is for whole tasks that the consumers of a block "
            "share; that needs cluster=1, "
            "pingpong=False and a schedule that splits none"
        ):
            PlainReducingStream(**knobs)

    class Idle(ReducingStream):
        def layout(self):
            return dataclasses.replace(super().layout(), globals=dict(X=tile), scratch={})

    with refused("Idle: hook 'reduce_store' reads scratch tiles; its layout has none"):
        Idle()

    class Unopened(PlainReducingStream):
        compute_last, compute = ReducingStream.compute_last, ReducingStream.compute

    with refused(
        "Unopened: hook 'reduce_store' of a pipelined computation needs hook 'compute_first': an iteration's tiles "
        "are committed one later"
    ):
        Unopened()


class Unmixed(CountedStream):
    @triton.jit
    def compute(ctx, state, input):
        tk.reduce_commit(ctx)
        return state


class Early(ReducingStream):
    @triton.jit
    def compute_first(ctx, state, input):
        tk.reduce_acquire(ctx)
        return state


class Twice(PlainReducingStream):
    @triton.jit
    def compute(ctx, state, input):
        tk.reduce_acquire(ctx)
        tk.reduce_commit(ctx)
        tk.reduce_commit(ctx)
        return state


class Hasty(PlainReducingStream):
    @triton.jit
    def reduce_store(ctx, scratch):
        tk.store_add_async(ctx.globals.Z, scratch.W, (ctx.consumer, 0))
        return ctx.globals.counts.pointer


class Waiting(PlainReducingStream):
    @triton.jit
    def compute(ctx, state, input):
        tk.reduce_acquire(ctx)
        tk.reduce_wait(ctx)
        tk.reduce_commit(ctx)
        return state


@pytest.mark.parametrize(
    "cls, message",
    [
        (
            Unmixed,
            "reduce_commit in Unmixed: it is for consumers of a tk.ReduceStoreWarp, in 'compute' and 'compute_last'",
        ),
        (
            Early,
            "reduce_acquire in Early: it is for consumers of a tk.ReduceStoreWarp, in 'compute' and 'compute_last'",
        ),
        (
            Twice,
            "Twice.compute calls tk.reduce_acquire 1 times, tk.reduce_commit 2 times; with hook 'reduce_store' "
            "'compute' and 'compute_last' call each once, "
            "in the hook itself, 'compute_first' neither",
        ),
        (
            Hasty,
            "Hasty.reduce_store calls tk.reduce_wait 0 times; it does so once, in the hook itself, before it reads "
            "the scratch tiles",
        ),
        (Waiting, "reduce_wait in Waiting: it is for hook 'reduce_store'"),
    ],
)
def test_reduce_store_warps_and_consumers_that_do_not_wait_for_each_other(cls, message):
    template = cls()
    x, z, counts = meta(4, 128, 64, dtype=torch.float32), meta(128, 64, dtype=torch.float32), meta(2, dtype=torch.int32)
    more = () if cls is Unmixed else (z, counts)
    with refused(message):
        template.compile(x, x, x.flatten(0, 1), x.flatten(0, 1), meta(4, dtype=torch.int32), *more, tasks=4)
