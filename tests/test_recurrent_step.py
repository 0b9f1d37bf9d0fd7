"""A few rows of recurrences: which calls are such, as torch sees them, and the machine code."""

import pytest
import torch

from bench import recurrent_step as bench
from tests.cases_linear_attention import near, poisoned_rows
from tests.cases_recurrent_step import BOUNDS, FUNCTIONS, STATE_BOUND, check, operands, run
from tests.util import slow, some_slow
from tritonkittens import sim
from tritonkittens.inspect import inspect
from tritonkittens.kernels.causal_conv import causal_conv1d, causal_conv1d_torch
from tritonkittens.kernels.recurrent_step import Rule, Step, run_layer_steps
from tritonkittens.kernels.recurrent_step.call_plan import run_steps
from tritonkittens.kernels.recurrent_step.config import is_short, shape_of
from tritonkittens.kernels.recurrent_step.inspection import inspectable
from tritonkittens.lang import ArchitectureError


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU. Results have poison where no kernel writes."""
    poisoned_rows(monkeypatch)
    for module in ("gated_delta", "linear_attention", "mamba", "recurrent_step"):
        monkeypatch.setattr(f"tests.cases_{module}.DEVICE", "cpu")


def test_shapes():
    assert shape_of(128, 128, 4096, 132) == (4, 32, 8), "4,096 numbers of a state"
    assert shape_of(128, 128, 16, 132) == (4, 8, 2) and shape_of(128, 64, 80, 132) == (4, 32, 8)
    assert shape_of(1, 200, 4096, 132) == (1, 128, 8) and shape_of(200, 16, 4096, 132) == (7, 16, 4)
    assert shape_of(72, 2, 4096, 132) == (3, 2, 1)


def test_which_calls_are_short():
    """Up to eight rows that are not packed take one launch, no rows or no sequences none."""
    q, starts = torch.zeros(1, 9, 1, 16), torch.tensor([0, 1], dtype=torch.int32)
    assert [is_short(q[:, :n], None) for n in (0, 1, 8, 9)] == [False, True, True, False]
    assert not is_short(q[:, :1], starts)
    with sim.device() as device:
        for batch in (0, 1):
            run("mamba", operands("mamba", batch, 2, 1, 16, 16))
            assert len(device.launches) == batch


@pytest.mark.parametrize("name", ["decays", "delta", "mamba"])
def test_every_gpu(name):
    """A few rows need no TMA, more do. Nor do short convolutions."""
    with sim.device("sm_80"):
        check(name, operands(name, 1, 2, 1, 16, 16))
        with pytest.raises(ArchitectureError, match=r"needs sm_90a .Hopper., sm_100a or sm_103a"):
            run(name, operands(name, 1, 9, 1, 16, 16))
        x, weight = torch.randn(1, 8, 20), torch.randn(8, 4)
        near("convolution", causal_conv1d(x, weight), causal_conv1d_torch(x, weight), 1e-6)


def test_the_same_plan_serves_other_states():
    """The launch is bound at the first call: no tensor of that call stays in it."""
    with sim.device():
        for _ in range(2):
            given = operands("delta", 1, 1, 1, 16, 16)
            o = run("delta", given)[0]
            assert (o.double() - FUNCTIONS["delta"][1](**given)[0]).norm() < 3e-3 * o.double().norm()


def test_wide_keys():
    q, k = torch.randn(2, 1, 2, 2, 200).to(torch.bfloat16)
    v, state = torch.randn(1, 2, 2, 20).to(torch.bfloat16), torch.randn(1, 2, 20, 200)
    with sim.device():
        o, after = run_steps(Step(q, k, v, state=state), Rule(0.5, 0.0), True, lambda: None)
    expected, last = FUNCTIONS["no gates"][1](q, k, v, initial_state=state.mT, scale=0.5)
    assert (o - expected).norm() < 3e-3 * expected.norm() and (after.mT - last).norm() < 1e-6 * last.norm()


@pytest.mark.parametrize("rows", [1, slow(8)])
def test_operands_of_layers(rows):
    """Queries and keys of any length, logits, and logarithms of decays."""
    given = operands("delta", 2, rows, 2, 24, 40, 2)
    q, k, v, a, b, state = given.values()
    q, k, a, b = 3 * q, 0.2 * k, torch.randn_like(a).to(v.dtype), torch.randn_like(b).to(v.dtype)
    A_log, bias = torch.randn(4), torch.randn(4).to(v.dtype)
    rule = Rule(0.3, -1.0, softplus=True, log_decay=True, logits=True, unit=True)
    with sim.device():
        o, after = run_layer_steps(Step(q, k, v, a, b, A_log, bias, state=state.mT), rule, True)
    unit_q, unit_k = (x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + bias.double())
    beta = b.double().sigmoid()
    expected, last = FUNCTIONS["delta"][1](unit_q, unit_k, v, g, beta, scale=0.3, initial_state=state)
    near("result", o, expected, BOUNDS[v.dtype])
    near("state", after.mT, last, STATE_BOUND)


def test_in_place():
    """The state is written over; what was saved for a backward before then is known to have changed."""
    q, v, state = torch.randn(2, 1, 1, 16).half(), torch.randn(2, 1, 1, 24).half(), torch.randn(2, 1, 24, 16)
    before = state.clone()
    expected, last = FUNCTIONS["no gates"][1](q, q, v, initial_state=before.mT, scale=1.0)

    def run():
        version = state.copy_(before)._version
        o, after = run_layer_steps(Step(q, q, v, state=state), Rule(1.0, 0.0), True, inplace=True)
        assert after is state and state._version > version
        near("result", o, expected, BOUNDS[v.dtype])
        near("state", state.mT, last, STATE_BOUND)

    sim.explore(run, schedules=3, multiprocessors=2)
    with sim.device():
        assert run_layer_steps(Step(q, q, v, state=before.mT.contiguous().mT), Rule(), True, inplace=True) is None


def test_what_needs_an_operator():
    """More rows, gradients, and dtypes that the kernel does not take."""
    q, state = torch.randn(1, 9, 1, 16).half(), torch.randn(1, 1, 16, 16)
    with sim.device():
        for given in (
            Step(q, q, q),
            Step(q[:, :1], q[:, :1], q[:, :1].clone().requires_grad_()),
            Step(q[:, :1].float(), q[:, :1].float(), q[:, :1].float()),
            Step(q[:, :1], q[:, :1], q[:, :1], state=state.half()),
            Step(q[:, :1], q[:, :1], q[:, :1], decay=torch.ones(1, dtype=torch.float64)),
        ):
            assert run_layer_steps(given, Rule(), True) is None


@pytest.mark.parametrize("name", ["mamba", slow("decays"), slow("delta")])
def test_torch_compile_sees_the_operator(name):
    given = operands(name, 2, 1, 1, 16, 24)
    with sim.device(), torch.no_grad():
        eager, compiled = (
            function(given) for function in (lambda given: run(name, given), torch.compile(
                lambda given: run(name, given), fullgraph=True, backend="aot_eager"
            ))
        )  # fmt: skip
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize("name", some_slow(list(inspectable), ["gated_delta_layer_step", "mamba_step"]))
def test_contract(name, arch):
    """States are read and written 16 bytes a thread, and a sum over keys is three shuffles: q and k have their
    layout."""
    report = inspect(inspectable[name](arch))
    sums, barriers = (2 if "delta" in name else 1), 3 if "steps" in name else 2  # of rows that are loaded ahead
    if "layer" in name:  # sums of squares of q and k have another layout
        sums, barriers = 2 + 2 * 5 / 3, 5
    assert report.spill_instructions == 0 and report.registers <= 64
    assert report.counts["SHFL"] == 3 * sums and report.counts.get("BAR", 0) <= barriers
    assert report.counts["STG"] == 5, "a state of 32 columns, and the result"


@pytest.mark.parametrize(("kind", "sizes"), [bench.MODELS[1], *(slow(*model) for model in bench.MODELS[::2])], ids=str)
def test_the_benchmark(kind, sizes, monkeypatch):
    """Ours are right, and a wrong result is found out."""
    for module in ("gemm", "recurrent_step"):
        monkeypatch.setattr(f"bench.{module}.DEVICE", "cpu")
    monkeypatch.setattr(bench, "copies", lambda moved: 2)
    monkeypatch.setattr(bench, "beside_copy", lambda moved: {})
    key_heads, heads, *_ = sizes
    with sim.device():
        trial = bench.prepare(bench.Shape(kind, 1, 2, 1, 1 if heads == key_heads else 2, 16, 24))
        for made in (trial.ours[bench.OURS], trial.baselines["kernels of chunks"].factory):
            o, state = made()()
            assert trial.error((o, state)) < trial.bound < trial.error((1.1 * o, state))
            assert trial.error((o, 1.1 * state)) > trial.bound
