"""Linear attention on chips that are simulated, as torch sees it, its machine code, and what it refuses."""

import pytest
import torch

from bench import linear_attention as bench_linear
from tests.cases_linear_attention import BF16, BOUNDS, near, operands
from tests.util import explored, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.inspect import inspect
from tritonkittens.kernels.linear_attention import (
    backward_plan,
    config,
    linear_attention,
    linear_attention_operator,
    linear_attention_torch,
)
from tritonkittens.kernels.linear_attention.config import ROWS, shape_of, span_of
from tritonkittens.kernels.linear_attention.inspection import inspectable
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_linear_attention.DEVICE", "cpu")


Q, V = torch.zeros(2, 5, 3, 16, dtype=BF16), torch.zeros(2, 5, 3, 24, dtype=BF16)
ERRORS = [
    (dict(q=[1.0]), TypeError, "linear_attention: q is list; it must be a torch tensor"),
    (dict(q=Q[0]), ValueError, "linear_attention: q is (5, 3, 16); it must be (B, T, H, K), K from 1 to 256"),
    (dict(k=Q.half()), TypeError, "linear_attention: k has dtype torch.float16, q torch.bfloat16; they must be equal"),
    (dict(q=Q.float(), k=Q.float(), v=V.float()), TypeError, "q has dtype torch.float32; it must be torch.bfloat16"),
    (dict(k=Q[:, 1:]), ValueError, "linear_attention: k is (2, 4, 3, 16); it must be (2, 5, 3, 16), as q"),
    (dict(v=V[:, 1:]), ValueError, "linear_attention: v is (2, 4, 3, 24); it must be (2, 5, 3, V)"),
    (dict(v=V.to("meta")), ValueError, "linear_attention: v is on meta; it must be on a CUDA device"),
    (dict(decay=torch.zeros(2)), ValueError, "linear_attention: decay is (2,); it must be (3,)"),
    (dict(decay=torch.zeros(3).half()), TypeError, "decay has dtype torch.float16; it must be torch.float32"),
    (
        dict(g=torch.zeros(2, 5, 2)),
        ValueError,
        "linear_attention: g is (2, 5, 2); it must be (2, 5, 3), a number a head",
    ),
    (dict(g=torch.zeros(2, 5, 3).double()), TypeError, "linear_attention: g has dtype torch.float64; it must be"),
    (dict(g=torch.zeros(2, 5, 3), decay=torch.zeros(3)), ValueError, "give decay, the same in each step, or g, not bo"),
    (dict(initial_state=torch.zeros(2, 3, 24, 16)), ValueError, "is (2, 3, 24, 16); it must be (2, 3, 16, 24)"),
    (dict(cu_seqlens=torch.tensor([0, 5]).int()), ValueError, "packed sequences have a batch of 1"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ERRORS, ids=str)
def test_errors(changed, kind, message):
    given = dict(q=Q, k=Q, v=V) | changed
    with sim.device(), refused(message, kind):
        linear_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_packed_offsets_are_int32():
    with sim.device(), refused("cu_seqlens has dtype torch.int64; it must be torch.int32", TypeError):
        linear_attention(Q[:1], Q[:1], V[:1], cu_seqlens=torch.tensor([0, 5]))


def test_spans():
    assert span_of(4096, 8 * 4096, 32, 8, 132) == 4096, "enough heads fill the GPU"
    assert span_of(16384, 16384, 16, 1, 132) == 32 * ROWS, "128 segments of 16 heads"
    assert span_of(65536, 65536, 1, 1, 132) == 8 * ROWS and span_of(100, 100, 1, 1, 132) == 2 * ROWS
    assert span_of(0, 0, 1, 1, 132) == ROWS
    assert shape_of(128, 200, 100, 132) == (128, 128, 2, 1) and shape_of(1, 64, 64, 132) == (64, 64, 1, 2)
    assert shape_of(129, 64, 100, 132) == shape_of(256, 256, 10, 132) == (256, 64, 1, 1), "two stages fit"
    assert [shape_of(128, 128, heads, 132).value_dim for heads in (16, 49, 50, 98, 99)] == [128, 128, 64, 64, 128]


@explored(2, 12)
@pytest.mark.parametrize("length", [200, slow(64)])
def test_every_schedule_gives_these_results(length, schedules, monkeypatch):
    monkeypatch.setattr(config, "SHORTEST", 1)
    (q, k, v, decay, state), found = operands(1, length, 1, 64, 64), []
    sim.explore(
        lambda: found.append(linear_attention(q, k, v, decay, initial_state=state)),
        schedules=schedules,
        multiprocessors=2,
    )
    expected, _ = linear_attention_torch(q, k, v, decay, initial_state=state)
    for o in found:
        assert relative_error(o, expected) < BOUNDS[BF16]


@explored(1, 12)
def test_every_schedule_gives_these_gradients(schedules, monkeypatch):
    """Of gates, with two blocks of columns of v, of which the second is narrower."""
    monkeypatch.setattr(config, "SHORTEST", 1)
    monkeypatch.setattr(backward_plan, "_plans", {})
    q, k, v, *_ = operands(1, 66, 1, 16, 100)
    leaves, found = [x.requires_grad_() for x in (q, k, v, -torch.rand(1, 66, 1))], []
    exact = [x.detach().double().requires_grad_() for x in leaves]
    do = torch.randn_like(v)
    expected = torch.autograd.grad(linear_attention_torch(*exact[:3], g=exact[3])[0], exact, do.double())
    sim.explore(
        lambda: found.append(torch.autograd.grad(linear_attention(*leaves[:3], g=leaves[3]), leaves, do)),
        schedules=schedules,
        multiprocessors=2,
    )
    for grads in found:
        for name, a, b, first in zip(("q", "k", "v", "g"), grads, expected, found[0], strict=True):
            assert torch.equal(a, first), name
            near(name, a, b, 2 * BOUNDS[BF16])


# ---------------------------------------------------------------- as torch sees it


def test_opcheck():
    q, k, v, decay, state = operands(1, 40, 2, 16, 24)
    given = [x.requires_grad_() for x in (q, k, v)]
    with sim.device():
        torch.library.opcheck(
            linear_attention_operator,
            (*given, decay, None, state.requires_grad_(), None, 0.25, True),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_torch_compile_sees_the_operator():
    q, k, v, decay, _ = operands(1, 40, 2, 16, 24)
    leaves, results = [x.requires_grad_() for x in (q, k, v)], []
    with sim.device():
        for function in (linear_attention, torch.compile(linear_attention, fullgraph=True, backend="aot_eager")):
            o, state = function(*leaves, decay, output_final_state=True)
            results.append([o, state, *torch.autograd.grad(o.float().sum() + state.sum(), leaves)])
        dq = torch.func.grad(lambda q: linear_attention(q, *leaves[1:], decay).float().sum())(q.detach())
        assert torch.equal(dq, torch.autograd.grad(linear_attention(*leaves, decay).float().sum(), leaves[0])[0])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_vmap_and_what_has_no_derivative():
    q, k, v, decay, _ = operands(1, 40, 2, 16, 24)
    with sim.device():
        samples = torch.stack([q, 2 * q])
        found = torch.vmap(lambda q: linear_attention(q, k, v, decay))(samples)
        assert torch.equal(found, torch.stack([linear_attention(q, k, v, decay) for q in samples]))
        with refused("linear_attention: it has no forward-mode derivative", ValueError):
            torch.func.jvp(lambda q: linear_attention(q, k, v), (q,), (q,))


@pytest.mark.slow
def test_second_derivatives():
    q, k, v, decay, _ = operands(1, 40, 2, 16, 24)
    q, k = q.requires_grad_(), k.requires_grad_()
    with sim.device():
        (dq,) = torch.autograd.grad(linear_attention(q, k, v, decay).float().square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(dq.float().sum(), k)
        o = linear_attention(q, k, v, decay.requires_grad_())
        (dq,) = torch.autograd.grad(o.float().square().sum(), q, create_graph=True)
        with refused("linear_attention has no second derivative where gates have gradients", NotImplementedError):
            dq.float().sum().backward()
    assert second.shape == k.shape and second.isfinite().all() and second.any()


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize("name", [n if n == "linear_attention_128" else slow(n) for n in inspectable])
def test_contract(name, arch):
    gpu = Device.of_gpu(GPUS["H200" if arch == "sm_90a" else "B200"])
    entry, gradients = inspectable[name], name == "linear_attention_gradients_128"
    report = inspect(recorded(entry.call, gpu)[entry.number].compile(arch))
    assert report.wgmma_serialized is not True
    assert report.spill_instructions <= (120 if gradients else 100), "outside of the loops"
    # descriptors of tiles are read again
    most = {"LDL": 35 if gradients else 2 if name == "linear_attention_256" else 0, "STL": 15 if gradients else 0}
    assert all(loop.counts.get(i, 0) <= n for loop in report.loops for i, n in most.items())


# ---------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("backward, gates", [(False, False), slow(True, False), slow(True, True)])
def test_the_benchmark(monkeypatch, backward, gates):
    """Ours is right, and a wrong result is found out."""
    for module in ("gemm", "linear_attention"):
        monkeypatch.setattr(f"bench.{module}.DEVICE", "cpu")
    with sim.device():
        trial = bench_linear.prepare(bench_linear.Shape(1, 300, 3, 64, True, gates), backward)
        found = trial.ours[bench_linear.OURS]()()
    wrong = [1.1 * x for x in found] if backward else 1.1 * found
    assert trial.error(found) < trial.bound < trial.error(wrong)
