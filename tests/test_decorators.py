"""Triton's decorators over `@tk.kernel`: on the GPU where there is one, else in the simulator."""

import pickle

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

import tritonkittens.lang as tk
from tritonkittens import sim
from tritonkittens.lang.core.errors import BudgetError

ROWS, COLS = 192, 96


@tk.kernel
@triton.jit
def scale(X, Y, factor, SIZE: tl.constexpr, COPIES: tl.constexpr = 1):
    tl.static_assert(SIZE <= 64, "too large")
    tile = tk.allocate(tk.st(tk.fp32, 32, 32), stages=COPIES)[0]
    tk.load_into(tile, X, (0, 0))
    at = (tl.program_id(0), tl.program_id(1))
    tk.store(Y, tk.load(X, tk.rt(tk.fp32, SIZE, SIZE), at) * factor, at)


@tk.kernel(num_warps=8)
@triton.jit
def add_one(X):
    tk.store(X, tk.load(X, tk.rt(tk.fp32, 64, 64), (0, 0)) + 1, (0, 0))


def grid(arguments):
    return (-(-ROWS // arguments["SIZE"]), -(-COLS // arguments["SIZE"]))


@pytest.fixture
def tensors(kernel_device, rng):
    x = torch.randn(ROWS, COLS, device=kernel_device)
    y = torch.full((ROWS, COLS), float("nan"), device=kernel_device)
    return x, y, tk.gl(x), tk.gl(y)


def measure(seconds, tried):
    """A benchmark for the simulator, whose time is no measure: runs the call, and takes `seconds` of the next
    configuration for what it took."""
    times = iter(seconds)

    def do_bench(call, quantiles):
        tried.append(next(times))
        call()
        return [tried[-1]] * 3

    return do_bench


def configs(*sizes, **more):
    return [triton.Config({"SIZE": size, **more}) for size in sizes]


def test_one_configuration_runs(tensors):
    x, y, X, Y = tensors
    triton.autotune(configs=configs(32), key=["factor"])(scale)[grid](X, Y, 3.0)
    assert torch.equal(y, 3 * x)


def test_the_fastest_configuration_is_kept_and_others_are_passed_over(tensors):
    """One fails an assertion of the kernel, one needs more shared memory than there is."""
    x, y, X, Y = tensors
    tried = []
    given = [*configs(64, 32, 16, 128), *configs(32, COPIES=1000)]
    tuned = triton.autotune(configs=given, key=["factor"], do_bench=measure([3.0, 1.0, 2.0, 0.1, 0.2] * 2, tried))(
        scale
    )
    for factor in (2.0, 2.0, -1.5):
        y.fill_(float("nan"))
        tuned[grid](X, Y, factor)
        assert torch.equal(y, factor * x) and tuned.best_config.kwargs["SIZE"] == 32
    assert len(tried) == 2 * len(given), "the second call with a factor measures nothing"


@pytest.mark.parametrize("option, expected", [({}, 4), (dict(restore_value=["X"]), 1), (dict(reset_to_zero=["X"]), 1)])
def test_arguments_are_reset_between_measurements(option, expected, kernel_device):
    x = torch.zeros(64, 64, device=kernel_device)
    given = [triton.Config({}, num_warps=n) for n in (4, 8, 1)]
    triton.autotune(configs=given, key=[], do_bench=measure([1.0, 2.0, 3.0], []), **option)(add_one)[(1,)](tk.gl(x))
    assert torch.equal(x, torch.full_like(x, expected))


def test_tritons_own_benchmark(tensors):
    x, y, X, Y = tensors
    if x.device.type == "cpu":
        pytest.skip("needs a GPU")
    triton.autotune(configs=configs(32, 64), key=["factor"])(scale)[grid](X, Y, 3.0)
    assert torch.equal(y, 3 * x)


def test_heuristics_see_all_arguments_and_combine_with_tuning(tensors):
    x, y, X, Y = tensors
    seen = []
    small = triton.heuristics({"SIZE": lambda given: seen.append(sorted(given)) or 16})
    small(scale)[grid](X, Y, 0.5)
    assert torch.equal(y, 0.5 * x) and seen == [["X", "Y", "factor", "grid", "warmup"]]
    copies = triton.heuristics({"COPIES": lambda given: 64 // given["SIZE"]})
    for both in (
        triton.autotune(configs=configs(32), key=[])(copies(scale)),
        copies(triton.autotune(configs=configs(32), key=[])(scale)),
    ):
        y.fill_(float("nan"))
        if isinstance(both, triton.runtime.Autotuner):
            both[grid](X, Y, 4.0)
            assert torch.equal(y, 4 * x)
        else:  # the outer decorator does not see what the inner one chooses
            with pytest.raises(KeyError, match="SIZE"):
                both[grid](X, Y, 4.0)


def test_warmup_compiles_and_launches_nothing(tensors):
    _, y, X, Y = tensors
    compiled = triton.heuristics({"SIZE": lambda _: 32})(scale).warmup(X, Y, 1.0, grid=grid)
    assert compiled.metadata.num_warps == 4 and "cubin" in compiled.asm and y.isnan().all()
    compiled = add_one.warmup(X, grid=(1,), num_warps=2)
    assert compiled.metadata.num_warps == 2


def test_clusters_are_asked_for_by_their_own_name():
    with (
        sim.device(),
        pytest.raises(
            tk.TileError, match=r"add_one\(num_ctas=2\): an explicit kernel forms clusters by cluster_size=2"
        ),
    ):
        triton.autotune(configs=[triton.Config({}, num_ctas=2)], key=[])(add_one)[(1,)](tk.gl(torch.zeros(64, 64)))


def test_budget_errors_are_tritons_and_ours():
    with pytest.raises(BudgetError, match="shared memory over budget: .* bytes of 232448 on sm_90") as caught:
        scale.compile(
            tk.gl(torch.empty(64, 64, device="meta")), tk.gl(torch.empty(64, 64, device="meta")), 1.0, 32, 1000
        )
    assert isinstance(caught.value, OutOfResources) and isinstance(caught.value, tk.TileError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
