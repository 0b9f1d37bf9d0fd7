"""Mamba-2's scan on chips that are simulated, as torch sees it, its machine code, and what it refuses."""

import pytest
import torch

from bench import linear_attention as bench_linear
from tests.cases_linear_attention import BF16, BOUNDS, near, typical
from tests.cases_mamba import operands
from tests.util import explored, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.inspect import inspect
from tritonkittens.kernels.linear_attention import backward_plan, config
from tritonkittens.kernels.mamba2 import mamba_chunk_scan, mamba_chunk_scan_operator, mamba_chunk_scan_torch
from tritonkittens.kernels.mamba2.inspection import inspectable
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_mamba.DEVICE", "cpu")


X, B, DT, A = (
    torch.zeros(2, 5, 6, 24, dtype=BF16),
    torch.zeros(2, 5, 3, 16, dtype=BF16),
    torch.zeros(2, 5, 6),
    -torch.ones(6),
)
ERRORS = [
    (dict(x=[1.0]), TypeError, "mamba_chunk_scan: x is list; it must be a torch tensor"),
    (dict(x=X[0]), ValueError, "mamba_chunk_scan: x is (5, 6, 24); it must be (B, L, H, P)"),
    (dict(x=X.float(), B=B.float(), C=B.float()), TypeError, "x has dtype torch.float32; it must be torch.bfloat16"),
    (dict(x=X[:, :, :4]), ValueError, "B is (2, 5, 3, 16); it must be (2, 5, G, N), G a divisor of 4"),
    (dict(B=B.new_zeros(2, 5, 3, 257)), ValueError, "B is (2, 5, 3, 257); N must be 1 to 256"),
    (dict(C=B[:, 1:]), ValueError, "mamba_chunk_scan: C is (2, 4, 3, 16); it must be (2, 5, 3, 16)"),
    (dict(C=B.half()), TypeError, "mamba_chunk_scan: C has dtype torch.float16, x torch.bfloat16; they must be equal"),
    (dict(dt=DT[:, :, :3]), ValueError, "mamba_chunk_scan: dt is (2, 5, 3); it must be (2, 5, 6)"),
    (dict(dt=DT.double()), TypeError, "mamba_chunk_scan: dt has dtype torch.float64; it must be torch.float32 or"),
    (dict(A=A.half()), TypeError, "mamba_chunk_scan: A has dtype torch.float16; it must be torch.float32"),
    (dict(D=DT[0]), ValueError, "mamba_chunk_scan: D is (5, 6); it must be (6,) or (6, 24)"),
    (dict(z=X.to("meta")), ValueError, "mamba_chunk_scan: z is on meta; it must be on a CUDA device"),
    (dict(dt_limit=(-1, 1)), ValueError, "dt_limit is (-1.0, 1.0); it must be (least, most), both at least 0"),
    (
        dict(initial_states=torch.zeros(2, 6, 16, 24)),
        ValueError,
        "initial_states is (2, 6, 16, 24); it must be (2, 6, 24",
    ),
    (dict(chunk_size=A), TypeError, "mamba_chunk_scan: chunk_size is Tensor; it must be an int or None"),
    (dict(return_varlen_states=True), ValueError, "mamba_chunk_scan: return_varlen_states without cu_seqlens"),
    (dict(cu_seqlens=torch.tensor([0, 5]).int()), ValueError, "x is (2, 5, 6, 24), cu_seqlens (2,); packed sequences"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ERRORS, ids=str)
def test_errors(changed, kind, message):
    with sim.device(), refused(message, kind):
        mamba_chunk_scan(**dict(x=X, dt=DT, A=A, B=B, C=B) | changed)


@explored(2, 12)
@pytest.mark.parametrize("states", [72, slow(256)])
def test_every_schedule_gives_these_results(states, schedules, monkeypatch):
    monkeypatch.setattr(config, "SHORTEST", 1)
    given, found = operands(1, 70, 2, (64, states)), []
    sim.explore(lambda: found.append(mamba_chunk_scan(**given)), schedules=schedules, multiprocessors=2)
    expected, _ = mamba_chunk_scan_torch(**given)
    for y in found:
        assert torch.equal(y, found[0]) and relative_error(y, expected) < BOUNDS[BF16]


@explored(1, 12)
@pytest.mark.parametrize("dims", [(16, 16), slow((64, 72))], ids=str)
def test_every_schedule_gives_these_gradients(dims, schedules, monkeypatch):
    """A task sums gradients of B and C over all heads."""
    monkeypatch.setattr(config, "SHORTEST", 1)
    monkeypatch.setattr(backward_plan, "_plans", {})
    given, found = operands(1, 66, 2, dims), []
    leaves = {n: t.requires_grad_() for n, t in given.items() if isinstance(t, torch.Tensor)}
    exact = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    dy = torch.randn_like(given["x"])
    y = mamba_chunk_scan_torch(**given | exact)[0]
    expected = torch.autograd.grad(y, list(exact.values()), dy.double(), retain_graph=True)
    sizes = {n: typical([y], exact[n]) if n in ("A", "dt_bias", "D") else 0.0 for n in leaves}
    sim.explore(
        lambda: found.append(torch.autograd.grad(mamba_chunk_scan(**given), list(leaves.values()), dy)),
        schedules=schedules,
        multiprocessors=2,
    )
    for grads in found:
        for name, a, b, first in zip(leaves, grads, expected, found[0], strict=True):
            assert torch.equal(a, first), name
            near(name, a, b, 2 * BOUNDS[BF16], sizes[name])


def test_opcheck():
    given = operands(1, 9, 2, (24, 16))
    least, most = given.pop("dt_limit")
    tensors = [given.get(n) for n in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "cu_seqlens")]
    leaves = [t if t is None else t.requires_grad_() for t in tensors]
    with sim.device():
        torch.library.opcheck(
            mamba_chunk_scan_operator,
            (*leaves, True, least, most, True),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_torch_compile_sees_the_operator():
    given = operands(1, 9, 2, (24, 16))
    with sim.device():
        eager = mamba_chunk_scan(**given)
        compiled = torch.compile(mamba_chunk_scan, fullgraph=True, backend="aot_eager")(**given)
        with refused("mamba_chunk_scan: it has no forward-mode derivative", ValueError):
            torch.func.jvp(lambda x: mamba_chunk_scan(**given | dict(x=x)), (given["x"],), (given["x"],))
    assert torch.equal(eager, compiled)


@pytest.mark.slow
def test_torch_compile_sees_the_gradients():
    given, results = operands(1, 9, 2, (24, 16)), []
    leaves = {n: t.requires_grad_() for n, t in given.items() if isinstance(t, torch.Tensor)}
    with sim.device():
        for function in (mamba_chunk_scan, torch.compile(mamba_chunk_scan, fullgraph=True, backend="aot_eager")):
            y = function(**given)
            results.append(torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y)))
        y = mamba_chunk_scan(**given).float().square().sum()
        (dx,) = torch.autograd.grad(y, given["x"], create_graph=True)
        with refused("mamba_chunk_scan has no second derivative", NotImplementedError):
            dx.sum().backward()
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize(
    "name", [n if n in ("mamba_scan_gated", "mamba_scan_256", "mamba_gradients") else slow(n) for n in inspectable]
)
def test_contract(name, arch):
    gpu = Device.of_gpu(GPUS["H200" if arch == "sm_90a" else "B200"])
    entry = inspectable[name]
    report = inspect(recorded(entry.call, gpu)[entry.number].compile(arch))
    assert report.wgmma_serialized is not True
    assert report.spill_instructions <= 100, "outside of the loops"
    # numbers that never change are read again, without wgmma more
    gradients = name == "mamba_gradients"
    most = {"LDL": 8 if arch == "sm_100a" or gradients else name == "mamba_scan_256", "STL": int(gradients)}
    assert all(loop.counts.get(i, 0) <= n for loop in report.loops for i, n in most.items())


@pytest.mark.slow
@pytest.mark.parametrize("of_scan", [True, False])
def test_the_benchmark_of_gradients(monkeypatch, of_scan):
    for module in ("gemm", "linear_attention"):
        monkeypatch.setattr(f"bench.{module}.DEVICE", "cpu")
    with sim.device():
        scan, conv = bench_linear.Scan(1, 70, 2, 64, 1, 64, True), bench_linear.Conv(1, 70, 8)
        trial = bench_linear.prepare_scan(scan, True) if of_scan else bench_linear.prepare_conv(conv, True)
        found = trial.ours[bench_linear.OURS]()()
    assert trial.error(found) < trial.bound < trial.error([1.1 * t for t in found])


@pytest.mark.parametrize("of_scan", [True, False])
def test_the_benchmark(monkeypatch, of_scan):
    """Ours is right, and a wrong result is found out: of the scan, and of the convolution before it."""
    for module in ("gemm", "linear_attention"):
        monkeypatch.setattr(f"bench.{module}.DEVICE", "cpu")
    with sim.device():
        scan, conv = bench_linear.Scan(1, 70, 2, 64, 1, 64, True), bench_linear.Conv(1, 70, 8)
        trial = bench_linear.prepare_scan(scan) if of_scan else bench_linear.prepare_conv(conv)
        found = trial.ours[bench_linear.OURS]()()
    assert trial.error(found) < trial.bound < trial.error(1.1 * found)
