"""What launches in the simulator take: read-only arrays, grids without work, kernels under `triton.autotune`."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

import tritonkittens.lang as tk
from tritonkittens import sim

from ..util import poison

pytestmark = pytest.mark.filterwarnings("error:The given NumPy array")


@triton.jit
def scaled(X, Y, N, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i, mask=i < N) * FACTOR, mask=i < N)


@triton.jit
def moved(X, Y, KIND: tl.constexpr):
    x, y = (
        tl.make_tensor_descriptor(X, [4, 16], [16, 1], [4, 16]),
        tl.make_tensor_descriptor(Y, [4, 16], [16, 1], [4, 16]),
    )
    if KIND == "store":
        y.store([0, 0], x.load([0, 0]))
    else:
        y.atomic_add([0, 0], x.load([0, 0]))


@triton.jit
def counted(X, Y):
    tl.atomic_add(Y + tl.arange(0, 64), tl.load(X + tl.arange(0, 64)))


def fixed(array):
    array.flags.writeable = False
    return array


# ---- read-only arrays


def test_a_read_only_array_is_read(rng):
    x = fixed(rng.standard_normal(1000).astype(np.float32))
    rows = np.broadcast_to(x, (4, 1000))  # numpy's own, of the same memory
    part = fixed(rng.standard_normal((4, 1000)).astype(np.float32))[1:3, 100:]
    for source, first in ((x, x), (rows, x), (part, part.base.reshape(-1)[1100:2100])):
        y = np.full(1000, np.nan, np.float32)
        sim.run(scaled, (4,), source, y, 1000, FACTOR=2, BLOCK=256)
        assert np.array_equal(y, 2 * first)
    assert sim.explore(scaled, (4,), x, y, 1000, FACTOR=2, BLOCK=256, schedules=3).ok and np.array_equal(y, 2 * x)


@pytest.mark.parametrize("schedules", [0, 2])
def test_a_read_only_array_that_a_kernel_writes_is_named(rng, schedules):
    x, y = rng.standard_normal(64).astype(np.float32), fixed(rng.standard_normal(64).astype(np.float32))
    before = y.copy()
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    launch = (lambda *a, **o: sim.explore(*a, schedules=schedules, **o)) if schedules else sim.run
    message = r"^Y: the kernel writes it, and the array is read-only; pass a copy$"
    with pytest.raises(sim.ReadOnlyError, match=message):
        launch(scaled, (1,), x, y, 64, FACTOR=2, BLOCK=64)
    with pytest.raises(sim.ReadOnlyError, match=message):
        launch(counted, (1,), x, y)
    for kind in ("store", "add"):
        with pytest.raises(sim.ReadOnlyError, match=message):
            launch(moved, (1,), x, y, kind)
    assert np.array_equal(y, before)


def test_memory_that_is_also_passed_as_writable_is_written(rng):
    y = rng.standard_normal(64).astype(np.float32)
    before = y.copy()
    sim.run(scaled, (1,), fixed(y[:]), y, 64, FACTOR=2, BLOCK=64)
    assert np.array_equal(y, 2 * before)


# ---- grids without work


@tk.kernel
@triton.jit
def tile_copy(X, Y):
    tk.store(Y, tk.load(X, tk.rt(tk.fp32, 64, 64), (0, 0)), (0, 0))


class Copy(tk.lcf):
    """Copies 64-row bands."""

    consumers = 1

    def layout(self):
        return tk.layout(globals=dict(X=tk.st(tk.bf16, 64, 64), Y=None), input=dict(X=tk.st(tk.bf16, 64, 64)))

    @triton.jit
    def setup(ctx):
        return tk.task(1, when=ctx.task_id < tk.extent(ctx.globals.X, 0) // 64)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.task_id, 0), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(x=tk.zero(tk.rt(tk.fp32, 64, 64)))

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(x=tk.cast(tk.load(input.X), tk.fp32))

    @triton.jit
    def finish(ctx, state, staging):
        tk.store(ctx.globals.Y, state.x, (ctx.task_id, 0))


def test_a_grid_with_a_0_is_no_work():
    x, y = torch.randn(64, 64), poison(torch.empty(64, 64))
    b = x.bfloat16()
    ttgir = triton.compile(
        triton.compiler.ASTSource(counted, {"X": "*fp32", "Y": "*fp32"}),
        target=triton.backends.compiler.GPUTarget("cuda", 90, 32),
    ).asm["ttgir"]
    launches = [
        (scaled, (0,), (x, y, 64), dict(FACTOR=2, BLOCK=64)),
        (scaled, (3, 0, 2), (x, y, 64), dict(FACTOR=2, BLOCK=64)),
        (scaled, lambda meta: (0 * meta["BLOCK"],), (x, y, 64), dict(FACTOR=2, BLOCK=64)),
        (tile_copy, (0,), (tk.gl(x).plain(), tk.gl(y).plain()), {}),
        (Copy(), 0, (b, y), {}),
        (Copy(), (0,), (b, y), {}),
        (ttgir, (0,), (x, y), {}),
        (ttgir, (2, 0), (x, y), {}),
    ]
    for kernel, grid, arguments, options in launches:
        launch = sim.run(kernel, grid, *arguments, **options)
        assert launch.findings == [] and launch.simulation is None and launch.seconds == 0.0
        assert sim.explore(kernel, grid, *arguments, schedules=2, **options).ok
    with sim.device("sm_90a") as device:
        scaled[(0,)](x, y, 64, 2, 64)
        tile_copy[(2, 0)](tk.gl(x).plain(), tk.gl(y).plain())
        Copy()(b, y, blocks=0)
        assert device.launches == []
    assert y.isnan().all()


# ---- triton.autotune


def tuned(configs, **options):
    return triton.autotune(configs=configs, key=["N"], **options)(scaled)


def test_an_autotuned_kernel_runs_with_its_first_configuration(rng):
    x, y = torch.from_numpy(rng.standard_normal(1000, np.float32)), poison(torch.empty(1000))
    configs = [triton.Config({"BLOCK": n}) for n in (256, 512, 128)]
    kernel = tuned(configs)
    kernel.cache[(1000, "torch.float32", "torch.float32")] = configs[2]  # what a GPU found
    with sim.device("sm_90a") as device:
        for n in (1000, 1000, 500):
            kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, n, FACTOR=2)
    assert torch.equal(y, 2 * x) and kernel.best_config is configs[0]
    assert [launch.grid for launch in device.launches] == [(4, 1, 1)] * 3  # trials launch nothing
    assert kernel.cache == {(1000, "torch.float32", "torch.float32"): configs[2]} and "do_bench" not in vars(kernel)
    launch = sim.run(kernel, lambda meta: (triton.cdiv(1000, meta["BLOCK"]),), x.numpy(), y.numpy(), 1000, FACTOR=3)
    assert torch.equal(y, 3 * x) and launch.grid == (4, 1, 1)


@triton.jit
def product(A, B, C, N, BLOCK: tl.constexpr):
    i, k = tl.arange(0, 64), tl.arange(0, BLOCK)
    out = tl.dot(tl.load(A + i[:, None] * BLOCK + k[None, :]), tl.load(B + k[:, None] * 64 + i[None, :]))
    tl.store(C + i[:, None] * 64 + i[None, :], out)


def test_configurations_that_do_not_fit_are_passed_over(rng):
    a, b = (torch.from_numpy(rng.integers(-3, 4, s)).half() for s in ((64, 64), (64, 64)))
    c = poison(torch.empty(64, 64))
    configs = [triton.Config({"BLOCK": n}) for n in (2048, 64, 32)]
    kernel = triton.autotune(configs=configs, key=[])(product)
    with sim.device("sm_90a"):
        kernel[(1,)](a, b, c, 64)
    assert torch.equal(c, a.float() @ b.float()) and kernel.best_config is configs[1]
    kernel = triton.autotune(configs=configs[:1] * 2, key=[])(product)
    with pytest.raises(OutOfResources, match="shared memory"), sim.device("sm_90a"):
        kernel[(1,)](a, b, c, 64)


def test_hooks_of_autotuned_kernels_run_as_on_a_gpu(rng):
    x = torch.from_numpy(rng.standard_normal(64, np.float32))
    seen = []
    configs = [
        triton.Config({}, num_warps=n, pre_hook=lambda arguments, n=n: seen.append((n, arguments["num_warps"])))
        for n in (1, 2)
    ]
    for options, expected in (
        (dict(reset_to_zero=["Y"]), 2 * x),
        (dict(restore_value=["Y"]), 2 * x + 1),
        ({}, 2 * x + 1),
    ):
        kernel, y = triton.autotune(configs=configs, key=[], **options)(counted), torch.ones(64)
        with sim.device("sm_90a"):
            kernel[(1,)](x, y)
            kernel[(1,)](x, y)
        assert torch.allclose(y, expected), options
    assert set(seen) == {(1, 1)} and len(seen) == 9  # a trial and two launches of each
    pruned = triton.autotune(
        configs=configs, key=[], prune_configs_by={"early_config_prune": lambda configs, *_, **__: configs[1:]}
    )(counted)
    sim.run(pruned, (1,), x, torch.ones(64))
    assert pruned.best_config is configs[1]
