"""A template whose hooks make the compiler take shared memory of its own, for exchanges between threads: known once it
is compiled."""

import re

import pytest
import torch
import triton
from triton import knobs

import tritonkittens.lang as tk
from tests.util import poison
from tritonkittens import sim


class Exchanged(tk.lcsf):
    """Y = X + X, each half by one consumer, which loads one summand in a layout that the other is converted to."""

    def layout(self):
        tile = tk.st(tk.bf16, 128, 64)
        return tk.layout(globals=dict(X=tile, Y=tile), input=dict(X=tile), output=dict(Y=tile))

    def tasks(self, x, y):
        return x[0] // 128

    @triton.jit
    def setup(ctx):
        return tk.task(tk.extent(ctx.globals.X, 1) // 64, when=ctx.task_id < tk.extent(ctx.globals.X, 0) // 128)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.task_id, ctx.iter), input.full)

    @triton.jit
    def compute(ctx, state, input, output):
        x = tk.subtile(input.X, 64, 64, ctx.consumer, 0)
        y = tk.add(tk.load(x, layout="memory"), tk.load(x, layout="row"))
        tk.store(tk.subtile(output.Y, 64, 64, ctx.consumer, 0), y)
        return state

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.Y, output.Y, (ctx.task_id, ctx.iter))


def refusal(run):
    with pytest.raises(tk.TileError) as error, sim.device("sm_90a"):
        run()
    return str(error.value)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_ring_leaves_the_compiler_what_it_takes(rng, arch):
    x = torch.from_numpy(rng.standard_normal((256, 1536))).bfloat16()
    y = poison(torch.empty_like(x))
    template, number = Exchanged(), {"sm_90a": 90, "sm_100a": 100}[arch]
    with sim.device(arch):
        template(x, y)
    assert torch.equal(y, x + x)
    tried, stages = (
        int(n) for n in (template.placement(number).stages, re.search(r"stages (\d+)", template.explain(number))[1])
    )
    assert stages < tried
    assert (
        f"stages {stages} ({tried} did not compile: the compiler exchanges values between threads through shared memory"
        in template.explain(number)
    )
    assert "did not compile" not in Exchanged(stages=2).explain(number)


def test_stages_that_are_given_are_not_changed_but_named_in_the_error(tmp_path):
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        # compiled, then found on disk
        messages = [refusal(lambda: Exchanged(stages=12)(*torch.zeros(2, 128, 64).bfloat16())) for _ in range(2)]
    assert messages[0] == messages[1]
    assert re.fullmatch(
        r"Exchanged\(stages=12\): shared memory over budget: \d+ bytes of 232448 on sm_90: input X: st\(bf16, 128, "
        r"64\) × 12 stages 196608 bytes; output Y: "
        r".*; the rest is scratch of the compiler for layout conversions; take fewer `stages` \(None: as many as "
        r"fit\) or smaller tiles; `spare` in the layout "
        r"keeps bytes for the compiler",
        messages[0],
    )


def test_where_no_ring_leaves_enough_the_error_has_the_bill():
    message = refusal(lambda: Exchanged(output_stages=13)(*torch.zeros(2, 128, 64).bfloat16()))
    assert re.match(
        r"Exchanged: shared memory over budget: .*input X: .* × 1 stages 16384 bytes; .*; take fewer `stages` .*; "
        r"`spare` in the layout",
        message,
    )


@tk.kernel
@triton.jit
def exchanged(X, Y, TILE: triton.language.constexpr):
    """Y = 2·X; the ring is in use until the end, so that what is exchanged between threads lies beside it."""
    x = tk.allocate(TILE, stages=7)[tk.block_index()]
    tk.load_into(x, X, (0, 0))
    tk.sync()
    tk.store(x, tk.add(tk.load(x, layout="memory"), tk.load(x, layout="row")))
    tk.sync()
    tk.store(Y, tk.load(x, layout="memory"), (0, 0))


def test_a_kernel_from_the_disk_cache_has_the_same_bill(tmp_path):
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        tensors = [tk.gl(x) for x in torch.zeros(2, 128, 128).bfloat16()]
        messages = [refusal(lambda: exchanged[(1,)](*tensors, tk.st(tk.bf16, 128, 128))) for _ in range(2)]
    assert messages[0] == messages[1]
    assert re.fullmatch(
        r"exchanged: shared memory over budget: \d+ bytes of 232448 on sm_90: st\(bf16, 128, 128\) × 7 229376 bytes; "
        r"the rest is scratch of the compiler for layout conversions",
        messages[0],
    )
