"""Hedgehog attention on chips that are simulated, as torch sees it, its machine code, and what it refuses."""

import pytest
import torch

from bench import hedgehog as bench_hedgehog
from tests.cases_hedgehog import BOUND, GRADIENT_BOUND, attend, operands
from tests.cases_linear_attention import BF16
from tests.util import explored, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.inspect import inspect
from tritonkittens.kernels.hedgehog import hedgehog_attention, hedgehog_attention_operator, hedgehog_attention_torch
from tritonkittens.kernels.hedgehog.inspection import inspectable
from tritonkittens.kernels.hedgehog.operators import hedgehog_attention_backward_operator
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_hedgehog.DEVICE", "cpu")


Q, MAP, ALPHA = torch.zeros(2, 5, 3, 128, dtype=BF16), torch.zeros(3, 128, 64, dtype=BF16), torch.zeros(3)
KV, Z = torch.zeros(2, 3, 128, 128), torch.zeros(2, 3, 128)
HALF = dict.fromkeys("qkv", Q.half()) | dict(map_q=MAP.half(), map_k=MAP.half())
ERRORS = [
    (dict(q=[1.0]), TypeError, "hedgehog_attention: q is list; it must be a torch tensor"),
    (dict(q=Q[..., :64]), ValueError, "hedgehog_attention: q is (2, 5, 3, 64); it must be (B, T, H, 128)"),
    (dict(k=Q.half()), TypeError, "hedgehog_attention: k has dtype torch.float16; it must be torch.bfloat16"),
    (HALF, TypeError, "hedgehog_attention: q has dtype torch.float16; it must be torch.bfloat16"),
    (dict(v=Q[:, 1:]), ValueError, "hedgehog_attention: v is (2, 4, 3, 128); it must be (2, 5, 3, 128)"),
    (dict(v=Q.to("meta")), ValueError, "hedgehog_attention: v is on meta; it must be on a CUDA device"),
    (dict(map_k=MAP.mT), ValueError, "hedgehog_attention: map_k is (3, 64, 128); it must be (3, 128, 64)"),
    (dict(beta=ALPHA.double()), TypeError, "beta has dtype torch.float64; it must be torch.float32"),
    (dict(alpha=ALPHA[:2]), ValueError, "hedgehog_attention: alpha is (2,); it must be (3,)"),
    (dict(initial_state=(KV, Z[0])), ValueError, "initial_state[1] is (3, 128); it must be (2, 3, 128)"),
    (dict(initial_state=(KV.half(), Z)), TypeError, "initial_state[0] has dtype torch.float16; it must be"),
    (dict(cu_seqlens=torch.tensor([0, 5]).int()), ValueError, "packed sequences have a batch of 1"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ERRORS, ids=[e[2] for e in ERRORS])
def test_errors(changed, kind, message):
    given = dict(q=Q, k=Q, v=Q, map_q=MAP, map_k=MAP, alpha=ALPHA, beta=ALPHA)
    with sim.device(), refused(message, kind):
        hedgehog_attention(**given | changed)


@explored(2, 12)
def test_every_schedule_gives_these_results(schedules):
    *tensors, state = operands(1, 70, 1)
    found = []
    sim.explore(
        lambda: found.append(hedgehog_attention(*tensors, initial_state=state, output_final_state=True)[0]),
        schedules=schedules,
        multiprocessors=2,
    )
    expected, _ = hedgehog_attention_torch(*tensors, initial_state=state)
    for o in found:
        assert relative_error(o, expected) < BOUND


@explored(1, 12)
def test_every_schedule_gives_these_gradients(schedules):
    *tensors, state = operands(1, 70, 1)
    leaves = [x.requires_grad_() for x in (*tensors, *state)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected, directions, found = attend(hedgehog_attention_torch, exact), [], []

    def backward():
        results = attend(hedgehog_attention, leaves, output_final_state=True)
        directions[:] = directions or [torch.randn_like(x) for x in results]
        found.append(torch.autograd.grad(results, leaves, directions))

    sim.explore(backward, schedules=schedules, multiprocessors=2)
    wanted = torch.autograd.grad(expected, exact, [d.double() for d in directions])
    for ours in found:
        assert all(relative_error(a, b) < GRADIENT_BOUND for a, b in zip(ours[:5], wanted, strict=False))


def test_opcheck():
    *tensors, state = operands(1, 40, 1)
    with sim.device():
        torch.library.opcheck(
            hedgehog_attention_operator, (*tensors, *state, None, True), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.slow
def test_opcheck_of_gradients():
    *tensors, state = operands(1, 40, 1)
    with sim.device():
        o, kv, z, totals = hedgehog_attention_operator(*tensors, *state, None, True)
        torch.library.opcheck(
            hedgehog_attention_backward_operator,
            (*tensors, *state, None, o, totals, o, kv, z),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_torch_compile_and_vmap_see_the_operator():
    *tensors, state = operands(1, 40, 1)
    given = dict(initial_state=state, output_final_state=True)
    with sim.device():
        eager, _ = hedgehog_attention(*tensors, **given)
        compiled, _ = torch.compile(hedgehog_attention, fullgraph=True, backend="aot_eager")(*tensors, **given)
        mapped, _ = torch.vmap(lambda q: hedgehog_attention(q, *tensors[1:], **given))(tensors[0][None])
        with refused("hedgehog_attention: it has no forward-mode derivative", ValueError):
            torch.func.jvp(lambda q: hedgehog_attention(q, *tensors[1:]), (tensors[0],), (tensors[0],))
    assert torch.equal(eager, compiled) and torch.equal(eager, mapped[0])


@pytest.mark.slow
def test_gradients_in_transforms_and_compiled():
    *tensors, state = operands(1, 10, 1)
    leaves = [x.requires_grad_() for x in (*tensors, *state)]

    def loss(*leaves):
        o, kv, z = attend(hedgehog_attention, leaves, output_final_state=True)
        return o.float().sum() + (kv * kv).sum() + z.sum()

    with sim.device():
        expected = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        with refused("hedgehog_attention has no second derivative", NotImplementedError):
            expected[0].sum().backward()
        transformed = torch.func.grad(loss, tuple(range(9)))(*(x.detach() for x in leaves))
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
        found = torch.autograd.grad(compiled, leaves)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, transformed, found, strict=True))


def test_the_reference_row_by_row():
    """Of a few rows, with windows and blocks by their definition."""
    *tensors, (kv, z) = operands(1, 200, 1)
    found, _ = hedgehog_attention_torch(*tensors, initial_state=(kv, z))
    q, k, v, map_q, map_k = (x.double() for x in (*(t[0, :, 0] for t in tensors[:3]), *(t[0] for t in tensors[3:5])))
    alpha, beta = (float(x) for x in tensors[5:])

    def features(x, maps):
        return torch.cat([torch.softmax(x @ maps, -1), torch.softmax(-x @ maps, -1)], -1)

    for row in (0, 63, 64, 127, 150, 199):
        first = max(row // 64 - 1, 0) * 64
        scores = k[first : row + 1] @ q[row]
        near = beta * torch.exp((scores - scores.max()) / 128**0.5)
        f = features(q[row], map_q)
        far = alpha * features(k[:first], map_k) @ f
        total = near.sum() + far.sum() + alpha * f @ z[0, 0].double()
        o = near @ v[first : row + 1] + far @ v[:first] + alpha * f @ kv[0, 0].double()
        torch.testing.assert_close(found[0, row, 0], o / total)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", inspectable)
@pytest.mark.slow
def test_contract(name, arch):
    gpu = Device.of_gpu(GPUS["H200" if arch == "sm_90a" else "B200"])
    shown = inspectable[name]
    report = inspect(recorded(shown.call, gpu)[shown.number].compile(arch))
    assert report.wgmma_serialized is not True
    assert report.spill_instructions <= 600, "outside of the loops"
    # a phase is kept in memory; coordinates and places of shared tiles, which do not change, are read again
    most = {"STL": 5, "LDL": 30 if arch == "sm_90a" else 60}
    found = {i: max((loop.counts.get(i, 0) for loop in report.loops), default=0) for i in most}
    assert all(found[i] <= most[i] for i in most), found


@pytest.mark.parametrize("backward", [False, slow(True)])
def test_the_benchmark(backward, monkeypatch):
    """Ours is right, and a wrong result is found out."""
    for module in ("gemm", "hedgehog"):
        monkeypatch.setattr(f"bench.{module}.DEVICE", "cpu")
    with sim.device():
        trial = bench_hedgehog.prepare(bench_hedgehog.Shape(1, 150, 1), backward)
        found = trial.ours[bench_hedgehog.OURS]()()
    wrong = [1.1 * x for x in found] if backward else 1.1 * found
    assert trial.error(found) < trial.bound < trial.error(wrong)
