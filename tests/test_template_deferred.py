"""Templates whose results wait in registers: their hooks, what these return, and `explain()`."""

import pytest
import torch
import triton

import tritonkittens.lang as tk
from tests.streaming import DeferredStream, PipelinedStream, SteppedStream
from tests.test_template import Copy, tile
from tests.util import meta, refused


def test_results_are_finished_or_deferred():
    def layout(self):
        results = dict(Y=tk.rt(tk.bf16, 64, 64))
        return tk.layout(
            globals=dict(A=tile, B=tile, Y=tile),
            input=dict(A=tile, B=tile),
            epilogue=dict(Y=tile),
            deferred_results=results,
        )

    hooks = {n: vars(DeferredStream)[n] for n in ("defer_results", "store_deferred")} | {
        n: vars(Copy)[n] for n in ("setup", "load", "compute")
    }
    for name in ("defer_results", "store_deferred"):
        with refused(f"Bare: its layout has deferred_results=…, but hook {name!r} is missing"):
            type(
                "Bare", (tk.DeferredEpilogue, Copy), {"layout": layout} | {n: v for n, v in hooks.items() if n != name}
            )()
    with refused("Bare: hook 'finish' is missing; its layout has no deferred_results"):
        type("Bare", (tk.DeferredEpilogue, tk.lcf), {**hooks, "layout": vars(Copy)["layout"]})()
    message = (
        "deferred results are stored during products of the next task; that needs hook 'compute_last', whole "
        "tasks of a block, and no scratch tiles"
    )
    with refused(f"Bare(schedule=Persistent()): {message}"):
        type("Bare", (tk.DeferredEpilogue, tk.lcf), {**hooks, "layout": layout})()
    with refused(f"DeferredStream(schedule=ClusterSplitK(parts=2)): {message}"):
        DeferredStream(schedule=tk.ClusterSplitK(2), weighted=False)
    pipelined = {n: vars(PipelinedStream)[n] for n in ("compute", "compute_last")}
    assert type("Bare", (tk.DeferredEpilogue, tk.lcf), {**hooks, **pipelined, "layout": layout})().extensions == (
        tk.DeferredEpilogue,
    )


def test_blocks_that_share_tasks_load_no_epilogue_tiles_for_deferred_results():
    with refused(
        "SteppedStream(schedule=SplitK(parts=2)): of the blocks that share a task only one stores deferred results; "
        "none can load epilogue tiles "
        "itself (epilogue_reloads=('Y',))"
    ):
        SteppedStream(schedule=tk.SplitK(2), weighted=False, residual=True)


@pytest.mark.parametrize("steps, deferred", [(-1, True), (2, False), ("2", True)])
def test_impossible_deferred_steps(steps, deferred):
    with refused(f"layout(deferred_steps={steps!r}): must be a number of iterations, and 0 without deferred_results"):
        tk.layout(
            globals=dict(A=tile),
            input=dict(A=tile),
            deferred_results=dict(Y=tk.rt(tk.bf16, 64, 64)) if deferred else {},
            deferred_steps=steps,
        )


def test_where_results_wait_is_explained():
    line = (
        "  results wait in registers (left rt(bf16, 64, 32), right rt(bf16, 64, 32)) and leave during the next "
        "task, a tile an iteration, after its first 2"
    )
    assert (
        line in DeferredStream(stages=3, out=tk.bf16).explain().splitlines()
        and "wait in registers" not in PipelinedStream(stages=3).explain()
    )
    assert "leave during the next task, a tile in 3 iterations, after its first 1" in SteppedStream(stages=2).explain()


def test_deferred_results_are_those_of_the_layout():
    class Halved(DeferredStream):
        weighted = False

        @triton.jit
        def defer_results(ctx, state, epilogue):
            return tk.struct(left=state.acc)

    x, y = meta(2, 64, 64, dtype=torch.float32), meta(128, 64, dtype=torch.float32)
    declared = "{'left': rt(fp32, 64, 32), 'right': rt(fp32, 64, 32)}"
    with refused(
        f"Halved.defer_results: must return a tk.struct as layout(deferred_results={declared}) says, not left [64, "
        "64] of fp32"
    ):
        Halved(consumers=1).compile(x, x, y, y, meta(2, dtype=torch.int32), tasks=2)
