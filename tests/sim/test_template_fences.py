"""What threads read of a tile, they read before TMA overwrites it: the template fences each release."""

import pytest
import torch
import triton

import tritonkittens.lang as tk
from tests.util import poison
from tritonkittens import sim
from tritonkittens.lang.template import epilogue as engine


class AddedProduct(tk.lcf):
    """C = A·B + R. `finish` reads R into registers and stores C from registers, so no hook fences."""

    consumers = 1
    stages = 2

    def layout(self):
        tile, added = tk.st(tk.bf16, 64, 64), tk.st(tk.fp32, 64, 64)
        return tk.layout(
            globals=dict(A=tile, B=tile, R=added, C=None),
            input=dict(A=tile, B=tile),
            epilogue=dict(R=added),
            epilogue_loads=("R",),
        )

    @triton.jit
    def setup(ctx):
        rows, depth = tk.extent(ctx.globals.C, 0), tk.extent(ctx.globals.A, 1)
        return tk.task(depth // 64, when=ctx.task_id < rows // 64)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, (ctx.task_id, ctx.iter), input.full)
        tk.load_async(input.B, ctx.globals.B, (ctx.iter, 0), input.full)

    @triton.jit
    def load_epilogue(ctx, epilogue):
        tk.load_async(epilogue.R, ctx.globals.R, (ctx.task_id, 0), epilogue.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(tk.rt(tk.fp32, 64, 64, "mma")))

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(acc=tk.mma_AB(input.A, input.B, state.acc))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(ctx.globals.C, state.acc + tk.load(epilogue.R, like=state.acc), (ctx.task_id, 0))


def added_product(tasks=4, depth=192):
    a, b = torch.randn(tasks * 64, depth).bfloat16(), torch.randn(depth, 64).bfloat16()
    r = torch.randn(tasks * 64, 64, dtype=torch.float32)
    c = poison(torch.empty(tasks * 64, 64, dtype=torch.float32))
    with sim.device("sm_90a", multiprocessors=1):
        AddedProduct()(a, b, r, c)
    return c, a.double() @ b.double() + r.double()


def test_epilogue_tiles_that_threads_read_are_released_behind_a_fence():
    c, expected = added_product()
    assert (c.double() - expected).abs().max() < 1e-3


def test_the_simulator_finds_a_release_without_its_fence(monkeypatch):
    monkeypatch.setattr(engine, "publish", lambda t: None)
    monkeypatch.setattr(AddedProduct, "stages", 3)  # another template: the first one's code is kept
    with pytest.raises(sim.SimulationError, match="missing-fence"):
        added_product()
