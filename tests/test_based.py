"""Based attention on chips that are simulated, as torch sees it, its machine code, and what it refuses."""

import pytest
import torch

from bench import linear_attention as bench_linear
from tests.cases_based import BOUND, GRADIENT_BOUND, operands
from tests.cases_linear_attention import BF16
from tests.util import explored, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.inspect import inspect
from tritonkittens.kernels.based import based_attention, based_attention_operator, based_attention_torch
from tritonkittens.kernels.based.config import shape_of
from tritonkittens.kernels.based.inspection import inspectable
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_based.DEVICE", "cpu")


Q, V = torch.zeros(2, 5, 3, 16, dtype=BF16), torch.zeros(2, 5, 3, 24, dtype=BF16)
ERRORS = [
    (dict(q=[1.0]), TypeError, "based_attention: q is list; it must be a torch tensor"),
    (dict(q=V), ValueError, "based_attention: q is (2, 5, 3, 24); it must be (B, T, H, 16)"),
    (dict(k=Q.half()), TypeError, "based_attention: k has dtype torch.float16, q torch.bfloat16; they must be equal"),
    (dict(q=Q.half(), k=Q.half(), v=V.half()), TypeError, "q has dtype torch.float16; it must be torch.bfloat16"),
    (dict(k=Q[:, 1:]), ValueError, "based_attention: k is (2, 4, 3, 16); it must be (2, 5, 3, 16), as q"),
    (dict(v=V[:, 1:]), ValueError, "based_attention: v is (2, 4, 3, 24); it must be (2, 5, 3, V)"),
    (dict(v=V.to("meta")), ValueError, "based_attention: v is on meta; it must be on a CUDA device"),
    (dict(initial_state=torch.zeros(2, 3, 16, 24)), ValueError, "is (2, 3, 16, 24); it must be (2, 3, 273, 24)"),
    (dict(initial_state=torch.zeros(2, 3, 273, 24), normalize=True), ValueError, "it must be (2, 3, 273, 25)"),
    (dict(cu_seqlens=torch.tensor([0, 5]).int()), ValueError, "packed sequences have a batch of 1"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ERRORS, ids=str)
def test_errors(changed, kind, message):
    with sim.device(), refused(message, kind):
        based_attention(**dict(q=Q, k=Q, v=V) | changed)


def test_shapes():
    assert shape_of(1) == shape_of(64) == (64, 1, 2) and shape_of(65) == shape_of(200) == (128, 2, 1)


@explored(2, 12)
def test_every_schedule_gives_these_results(schedules):
    *tensors, state = operands(1, 130, 1, 64)
    found = []
    sim.explore(
        lambda: found.append(based_attention(*tensors, initial_state=state)), schedules=schedules, multiprocessors=2
    )
    expected, _ = based_attention_torch(*tensors, initial_state=state)
    for o in found:
        assert relative_error(o, expected) < BOUND


def test_opcheck():
    *tensors, state = operands(1, 40, 1, 64)
    with sim.device():
        torch.library.opcheck(
            based_attention_operator,
            (*tensors, state, None, 0.25, False, True),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_torch_compile_sees_the_operator():
    *tensors, _ = operands(1, 40, 1, 64, state=False)
    given = dict(normalize=True)
    with sim.device():
        eager = based_attention(*tensors, **given)
        compiled = torch.compile(based_attention, fullgraph=True, backend="aot_eager")(*tensors, **given)
        with refused("based_attention: it has no forward-mode derivative", ValueError):
            torch.func.jvp(lambda q: based_attention(q, *tensors[1:]), (tensors[0],), (tensors[0],))
    assert torch.equal(eager, compiled)


@pytest.mark.slow
def test_gradients_in_transforms_and_compiled():
    leaves = [x.requires_grad_() for x in operands(1, 10, 1, 64)]

    def loss(q, k, v, state):
        o, after = based_attention(q, k, v, initial_state=state, output_final_state=True)
        return o.float().sum() + (after * after).sum()

    with sim.device():
        expected = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        with refused("based_attention has no second derivative", NotImplementedError):
            expected[0].sum().backward()
        transformed = torch.func.grad(loss, (0, 1, 2, 3))(*(x.detach() for x in leaves))
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
        found = torch.autograd.grad(compiled, leaves)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, transformed, found, strict=True))


@explored(1, 12)
def test_every_schedule_gives_these_gradients(schedules):
    leaves = [x.requires_grad_() for x in operands(1, 130, 1, 64)]
    directions, found = [torch.randn(1, 130, 1, 64).to(BF16), torch.randn(1, 1, 273, 64)], []

    def backward():
        results = based_attention(*leaves[:3], initial_state=leaves[3], output_final_state=True)
        found.append(torch.autograd.grad(results, leaves, directions))

    sim.explore(backward, schedules=schedules, multiprocessors=2)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = based_attention_torch(*exact[:3], initial_state=exact[3])
    wanted = torch.autograd.grad(expected, exact, [d.double() for d in directions])
    for ours in found:
        assert all(relative_error(a, b) < GRADIENT_BOUND for a, b in zip(ours[:3], wanted, strict=False))


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize("name", ["based_attention", *(slow(n) for n in inspectable if n != "based_attention")])
def test_contract(name, arch):
    gpu = Device.of_gpu(GPUS["H200" if arch == "sm_90a" else "B200"])
    shown = inspectable[name]
    report = inspect(recorded(shown.call, gpu)[shown.number].compile(arch))
    assert report.wgmma_serialized is not True
    assert report.spill_instructions <= 120, "outside of the loops"
    assert not any(loop.counts.get(i, 0) for loop in report.loops for i in ("LDL", "STL"))


@pytest.mark.parametrize("backward", [False, slow(True)])
def test_the_benchmark(backward, monkeypatch):
    """Ours is right, and a wrong result is found out."""
    for module in ("gemm", "linear_attention"):
        monkeypatch.setattr(f"bench.{module}.DEVICE", "cpu")
    with sim.device():
        trial = bench_linear.prepare_taylor(bench_linear.Taylor(1, 70, 2, 64, False), backward)
        found = trial.ours[bench_linear.OURS]()()
    wrong = [1.1 * x for x in found] if backward else 1.1 * found
    assert trial.error(found) < trial.bound < trial.error(wrong)
