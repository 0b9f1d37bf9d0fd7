"""Templates whose results wait in registers: their hooks, what these return, and what is said of them."""

import pytest
import torch
import triton

import tritonkittens.lang as tk
from tests.streaming import DeferredStream, PipelinedStream, SteppedStream
from tests.test_template import Copy, tile
from tests.util import meta, refused


def test_results_are_finished_or_packed():
    def layout(self):
        return tk.layout(globals=dict(A=tile, B=tile, Y=tile), input=dict(A=tile, B=tile), epilogue=dict(Y=tile), packed=dict(Y=tk.rt(tk.bf16, 64, 64)))

    hooks = {n: v for n, v in vars(DeferredStream).items() if n in ("defer_results", "store_deferred")} | {n: vars(Copy)[n] for n in ("setup", "load", "compute")}
    for name in ("defer_results", "store_deferred"):
        with refused(f"Bare: its layout has packed=…, but hook {name!r} is missing"):
            type("Bare", (Copy,), {"layout": layout} | {n: v for n, v in hooks.items() if n != name})()
    with refused("Bare: hook 'finish' is missing; its layout has no packed tiles"):
        type("Bare", (tk.lcf,), {**hooks, "layout": vars(Copy)["layout"]})()
    message = "packed results are stored under products of the next task; that needs hook 'compute_last', whole tasks of a block, and no working tiles"
    with refused(f"Bare(schedule=Persistent()): {message}"):
        type("Bare", (tk.lcf,), {**hooks, "layout": layout})()
    with refused(f"DeferredStream(schedule=ClusterSplitK(parts=2)): {message}"):
        DeferredStream(schedule=tk.ClusterSplitK(2), weighted=False)
    pipelined = {n: vars(PipelinedStream)[n] for n in ("compute", "compute_last")}
    assert type("Bare", (tk.lcf,), {**hooks, **pipelined, "layout": layout})()._plan.packed


def test_tasks_that_blocks_share_fill_no_tiles_where_packed_results_are_staged():
    with refused("SteppedStream(schedule=SplitK(parts=2)): of a task that blocks share only one stores packed results; none can fill finish tiles "
                 "itself (epilogue_reloads=('Y',))"):
        SteppedStream(schedule=tk.SplitK(2), weighted=False, residual=True)


@pytest.mark.parametrize("steps, packed", [(-1, True), (2, False), ("2", True)])
def test_steps_that_there_cannot_be(steps, packed):
    with refused(f"layout(deferred_steps={steps!r}): must be a number of iterations, and 0 where no tiles are packed"):
        tk.layout(globals=dict(A=tile), input=dict(A=tile), packed=dict(Y=tk.rt(tk.bf16, 64, 64)) if packed else {}, deferred_steps=steps)


def test_where_results_wait_is_explained():
    said = "  results wait in registers (left rt(bf16, 64, 32), right rt(bf16, 64, 32)) and leave under the next task, a tile an iteration, behind its first 2"
    assert said in DeferredStream(stages=3, out=tk.bf16).explain().splitlines() and "wait in registers" not in PipelinedStream(stages=3).explain()
    assert "leave under the next task, a tile in 3 iterations, behind its first 1" in SteppedStream(stages=2).explain()


def test_what_is_packed_is_what_the_layout_says():
    class Unpacked(DeferredStream):
        weighted = False

        @triton.jit
        def defer_results(ctx, state, epilogue):
            return tk.struct(left=state.acc)

    x, y = meta(2, 64, 64, dtype=torch.float32), meta(128, 64, dtype=torch.float32)
    half = "rt(fp32, 64, 32)"
    with refused(f"Unpacked.pack: must return a tk.struct as layout(packed={{'left': {half}, 'right': {half}}}) says, not left [64, 64] of fp32"):
        Unpacked(consumers=1).compile(x, x, y, y, meta(2, dtype=torch.int32), tasks=2)
