"""The gated delta rule on chips that are simulated, as torch sees it, its machine code, and what it refuses."""

import pytest
import torch

from bench import linear_attention as bench_linear
from tests.cases_gated_delta import operands
from tests.cases_linear_attention import BF16, BOUNDS
from tests.util import explored, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.inspect import inspect
from tritonkittens.kernels.gated_delta_net import gated_delta_rule, gated_delta_rule_operator, gated_delta_rule_torch
from tritonkittens.kernels.gated_delta_net.config import shape_of
from tritonkittens.kernels.gated_delta_net.inspection import inspectable
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_gated_delta.DEVICE", "cpu")


Q, V, G = torch.zeros(2, 5, 3, 16, dtype=BF16), torch.zeros(2, 5, 6, 24, dtype=BF16), torch.zeros(2, 5, 6)
ERRORS = [
    (dict(q=[1.0]), TypeError, "gated_delta_rule: q is list; it must be a torch tensor"),
    (dict(q=Q[0]), ValueError, "gated_delta_rule: q is (5, 3, 16); it must be (B, T, H, K), K from 1 to 128"),
    (dict(k=Q.half()), TypeError, "gated_delta_rule: k has dtype torch.float16, q torch.bfloat16; they must be equal"),
    (dict(k=Q[:, 1:]), ValueError, "gated_delta_rule: k is (2, 4, 3, 16); it must be (2, 5, 3, 16), as q"),
    (
        dict(v=V[:, :, :4]),
        ValueError,
        "v is (2, 5, 4, 24); it must be (2, 5, HV, V), HV a multiple of the 3 heads of q",
    ),
    (dict(v=V.to("meta")), ValueError, "gated_delta_rule: v is on meta; it must be on a CUDA device"),
    (dict(g=G[:, :, :3]), ValueError, "gated_delta_rule: g is (2, 5, 3); it must be (2, 5, 6), a number a head"),
    (dict(beta=G.double()), TypeError, "gated_delta_rule: beta has dtype torch.float64; it must be torch.float32 or"),
    (dict(initial_state=torch.zeros(2, 6, 24, 16)), ValueError, "is (2, 6, 24, 16); it must be (2, 6, 16, 24)"),
    (dict(cu_seqlens=torch.tensor([0, 5]).int()), ValueError, "packed sequences have a batch of 1"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ERRORS, ids=str)
def test_errors(changed, kind, message):
    given = dict(q=Q, k=Q, v=V, g=G, beta=G) | changed
    with sim.device(), refused(message, kind):
        gated_delta_rule(**given)


def test_shapes():
    assert shape_of(128, 128, 256, 132) == (128, 128, 2) and shape_of(128, 128, 16, 132) == (128, 64, 1)
    assert shape_of(1, 200, 100, 132) == (64, 128, 2)


@pytest.mark.slow
def test_every_schedule_gives_these_gradients():
    *tensors, state = operands(1, 200, 1, 64, 72)
    leaves, found = [x.requires_grad_() for x in (*tensors, state)], []
    direction = torch.randn_like(tensors[2])

    def run():
        o = gated_delta_rule(*leaves[:5], initial_state=state)
        found.append(torch.autograd.grad(o, leaves, direction))

    sim.explore(run, schedules=8, multiprocessors=1)  # one CTA has all tasks, and uses its tiles again
    exact = [x.detach().double().requires_grad_() for x in leaves]
    o, _ = gated_delta_rule_torch(*exact[:5], initial_state=exact[5])
    expected = torch.autograd.grad(o, exact, direction.double())
    for gradients in found:
        assert all(relative_error(a, b) < BOUNDS[BF16] for a, b in zip(gradients, expected, strict=True))


@explored(2, 12)
def test_every_schedule_gives_these_results(schedules):
    *tensors, state = operands(1, 130, 1, 64, 64)
    found = []
    sim.explore(
        lambda: found.append(gated_delta_rule(*tensors, initial_state=state)), schedules=schedules, multiprocessors=2
    )
    expected, _ = gated_delta_rule_torch(*tensors, initial_state=state)
    for o in found:
        assert relative_error(o, expected) < BOUNDS[BF16]


def test_opcheck():
    *tensors, state = operands(1, 40, 1, 16, 24)
    with sim.device():
        torch.library.opcheck(
            gated_delta_rule_operator,
            (*(x.requires_grad_() for x in (*tensors, state)), None, 0.25, True),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


@pytest.mark.slow
@pytest.mark.parametrize("state", [False, True])
def test_opcheck_of_the_gradient(state):
    *tensors, before = operands(1, 40, 1, 16, 24, 2, state=state)
    after = torch.randn(1, 2, 16, 24) if state else None
    with sim.device():
        torch.library.opcheck(
            torch.ops.tritonkittens.gated_delta_rule_backward,
            (*tensors, before, None, torch.randn_like(tensors[2]), after, 0.25),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_torch_compile_sees_the_operators():
    *tensors, state = operands(1, 40, 1, 16, 24)
    leaves, results = [x.requires_grad_() for x in (*tensors, state)], []

    def function(*leaves):
        return gated_delta_rule(*leaves[:5], initial_state=leaves[5])

    with sim.device():
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            o = run(*leaves)
            results.append([o, *torch.autograd.grad(o.float().square().sum(), leaves)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_what_has_no_derivative():
    *tensors, state = operands(1, 40, 1, 16, 24)
    with sim.device():
        with refused("gated_delta_rule: it has no forward-mode derivative", ValueError):
            torch.func.jvp(lambda q: gated_delta_rule(q, *tensors[1:]), (tensors[0],), (tensors[0],))
        q = tensors[0].requires_grad_()
        o = gated_delta_rule(q, *tensors[1:], initial_state=state)
        (dq,) = torch.autograd.grad(o.float().square().sum(), q, create_graph=True)
        with refused("gated_delta_rule has no second derivative", NotImplementedError):
            dq.float().sum().backward()


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize("name", ["gated_delta_rule", *(slow(n) for n in inspectable if n != "gated_delta_rule")])
def test_contract(name, arch):
    gpu = Device.of_gpu(GPUS["H200" if arch == "sm_90a" else "B200"])
    report = inspect(recorded(inspectable[name].call, gpu)[inspectable[name].number].compile(arch))
    assert report.wgmma_serialized is not True
    assert arch != "sm_90a" or not report.remarks, "ptxas makes no product wait for another"
    assert arch != "sm_90a" or name == "gated_delta_gates" or report.mma["HGMMA"] > 0
    # addresses of a task's tiles and results lie in local memory
    assert report.spill_instructions <= 100, "outside of the loops"
    # without wgmma, numbers that never change are read again
    most = {"LDL": 16 if arch == "sm_100a" else 0, "STL": 0}
    found = {i: max((loop.counts.get(i, 0) for loop in report.loops), default=0) for i in most}
    assert all(found[i] <= most[i] for i in most), found


@pytest.mark.parametrize("backward", [False, slow(True)])
def test_the_benchmark(monkeypatch, backward):
    """Ours is right, and a wrong result is found out."""
    for module in ("gemm", "linear_attention"):
        monkeypatch.setattr(f"bench.{module}.DEVICE", "cpu")
    with sim.device():
        trial = bench_linear.prepare_delta(bench_linear.Delta(1, 70, 2, 64), backward)
        found = trial.ours[bench_linear.OURS]()()
    wrong = [1.1 * x for x in found] if backward else 1.1 * found
    assert trial.error(found) < trial.bound < trial.error(wrong)
