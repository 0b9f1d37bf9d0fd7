"""FFT convolutions on chips that are simulated, as torch sees them, their machine code, and what they refuse."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import fft_conv as bench_fft
from tests.cases_fft_conv import BF16, BOUNDS, FP16, FP32, check, near, operands, small_tiles
from tests.util import explored, poison, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.inspect import inspect
from tritonkittens.kernels.fft_conv import (
    config,
    fft_conv,
    fft_conv_filter,
    fft_conv_filter_gradient_operator,
    fft_conv_operator,
    fft_conv_torch,
)
from tritonkittens.kernels.fft_conv.inspection import inspectable
from tritonkittens.nn import FFTConv


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_fft_conv.DEVICE", "cpu")


U, K = torch.zeros(2, 3, 256, dtype=BF16), torch.zeros(3, 256)
ERRORS = [
    (dict(u=[1.0]), TypeError, "fft_conv: u is list; it must be a torch tensor"),
    (dict(u=U[0]), ValueError, "fft_conv: u is (3, 256); it must be (B, H, L)"),
    (dict(u=U.float()), TypeError, "fft_conv: u has dtype torch.float32; it must be torch.bfloat16 or torch.float16"),
    (
        dict(u=U[..., :200], k=K[:, :200]),
        ValueError,
        "fft_conv: u has length 200; it must be a power of two from 64 to 4194304, or from 4096 to 262144 a multiple",
    ),
    (dict(k=K[:2]), ValueError, "fft_conv: k is (2, 256); it must be (3, Lk), Lk from 1 to 256"),
    (dict(k=K[:, :0]), ValueError, "fft_conv: k is (3, 0); it must be (3, Lk), Lk from 1 to 256"),
    (dict(k=K.double()), TypeError, "fft_conv: k has dtype torch.float64; it must be torch.float32 or"),
    (
        dict(u=torch.zeros(1, 3, (1 << 22) + 1, dtype=BF16), causal=True),
        ValueError,
        "fft_conv: u has length 4194305; it must be at most 4194304",
    ),
    (dict(pre_gate=U[..., 1:]), ValueError, "fft_conv: pre_gate is (2, 3, 255); it must be (2, 3, 256), as u"),
    (dict(post_gate=U.half()), TypeError, "post_gate has dtype torch.float16, u torch.bfloat16; they must be equal"),
    (dict(k=fft_conv_filter(K, 512)), ValueError, "k is a spectrum of 512 numbers; u (2, 3, 256) must be just as long"),
    (dict(k=fft_conv_filter(K, 256), causal=True), ValueError, "a spectrum made with causal=False; this call"),
    (dict(k=fft_conv_filter(K, 256, causal=True)), ValueError, "a spectrum made with causal=True; this call"),
    (dict(k=fft_conv_filter(K, 256, dtype=FP16)), TypeError, "spectrum k has dtype torch.float32; for u of torch.bf"),
    (dict(k=fft_conv_filter(K[:2], 256)), ValueError, "the spectrum k is (2, 2, 4, 64); it must be (2, 3, N / 64, 64)"),
    (dict(k=torch.zeros(2, 3, 9, 32, dtype=BF16), causal=True), ValueError, "k is a spectrum of 288 numbers, which no"),
    (dict(k=K.to("meta")), ValueError, "fft_conv: k is on meta, u on cpu; all tensors must be on one device"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(changed, kind, message):
    given = dict(u=U, k=K) | changed
    with sim.device(), refused(message, kind):
        fft_conv(given.pop("u"), given.pop("k"), **given)


def test_filters_are_refused():
    with refused("fft_conv_filter: dtype is torch.float32; it must be torch.bfloat16 or torch.float16", TypeError):
        fft_conv_filter(K, 256, dtype=FP32)
    with refused("fft_conv_filter: k is (3, 300); without causal Lk is at most 256", ValueError):
        fft_conv_filter(torch.zeros(3, 300), 256)


@pytest.mark.parametrize(("u", "k"), [(U[:0], K), (U[:, :0], K[:0])], ids=["no batch", "no channels"])
def test_no_signals(u, k):
    u, k = u.clone().requires_grad_(), k.clone().requires_grad_()
    with sim.device() as device:
        y = fft_conv(u, k)
        du, dk = torch.autograd.grad(y.sum(), [u, k])
    assert y.shape == du.shape == u.shape and not dk.any() and not device.launches


def test_taps_behind_the_signals():
    """They reach no result, and have no gradient."""
    u, k = operands(2, 3, 70, 100)
    poison(k[:, 70:])
    leaves = [x.requires_grad_() for x in (u, k)]
    with sim.device():
        y = fft_conv(u, k, causal=True)
        _, dk = torch.autograd.grad(y, leaves, torch.randn_like(y))
    assert relative_error(y, fft_conv_torch(u, k[:, :70], causal=True)) < BOUNDS[BF16]
    assert dk[:, :70].all() and not dk[:, 70:].any()


def test_views():
    """Operands whose first number is not aligned, whose numbers are apart, or the same."""
    u, k, gate = operands(3, 2, 64, 64, gates=1)
    spectrum = fft_conv_filter(k, 64)

    def views(x):
        aligned_to_one = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        return aligned_to_one, torch.stack([x, x + 1], -1)[..., 0], x.mT.contiguous().mT

    with sim.device():
        expected = fft_conv(u, k, pre_gate=gate)
        for given in zip(views(u), views(spectrum), views(gate), strict=True):
            assert torch.equal(fft_conv(given[0], given[1], pre_gate=given[2]), expected)
        same = fft_conv(u[:1].expand_as(u), spectrum[:, :1].expand_as(spectrum))
        assert torch.equal(same, fft_conv(u[:1].repeat(3, 1, 1), k[:1].repeat(2, 1)))


def test_spectra_in_traces():
    """No later call gets a tensor of a trace."""
    config.turns.cache_clear()
    with FakeTensorMode():
        assert fft_conv_filter(torch.zeros(3, 10), 300, causal=True).shape == (2, 3, 16, 32)
    compiled = torch.compile(lambda k: fft_conv_filter(k, 300, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(K), fft_conv_filter(K, 300, causal=True))


@explored(2, 12)
@pytest.mark.parametrize("causal, length", [(True, 256), slow(False, 256), (True, 640), slow(False, 640)])
def test_every_schedule_gives_these_results(monkeypatch, causal, length, schedules):
    small_tiles(monkeypatch, 256)
    (u, k), found = operands(5, 17 if length == 256 else 5, length, 129), []
    sim.explore(lambda: found.append(fft_conv(u, k, causal=causal)), schedules=schedules, multiprocessors=2)
    for y in found:
        assert relative_error(y, fft_conv_torch(u, k, causal=causal)) < BOUNDS[BF16]


@pytest.mark.parametrize("length, causal", [(640, True), slow(1024, False), slow(64, True), slow(4096, False)])
def test_consumers_share_one_signal(monkeypatch, length, causal):
    """A batch of one, with more tiles of channels than multiprocessors, and an odd number of them."""
    small_tiles(monkeypatch, 256)
    with sim.device(multiprocessors=2):
        check(*operands(1, 19 if length < 4096 else 3, length, 300, gates=1), causal=causal, gradients=length > 640)


# ---------------------------------------------------------------- as torch sees it


def test_opcheck():
    u, k = operands(1, 2, 256, 256)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    with sim.device():
        given = u.requires_grad_(), k.requires_grad_(), None, None, False
        torch.library.opcheck(fft_conv_operator, given, test_utils=tests)
        torch.library.opcheck(fft_conv_filter_gradient_operator, (u, u.detach(), 99, False), test_utils=tests)


def test_torch_compile_and_vmap():
    u, k = operands(1, 2, 256, 256)
    leaves, results = [u.requires_grad_(), k.requires_grad_()], []
    with sim.device():
        for function in (fft_conv, torch.compile(fft_conv, fullgraph=True, backend="aot_eager")):
            y = function(*leaves)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
        samples = torch.stack([u, 2 * u]).detach()
        found = torch.vmap(lambda u: fft_conv(u, k.detach()))(samples)
        assert torch.equal(found, torch.stack([fft_conv(u, k.detach()) for u in samples]))
        with refused("fft_conv: it has no forward-mode derivative", ValueError):
            torch.func.jvp(lambda u: fft_conv(u, k), (u,), (u,))
        with refused("fft_conv: the spectrum k requires a gradient; give the filter itself", ValueError):
            fft_conv(u, fft_conv_filter(k, 256).requires_grad_())
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.slow
def test_second_derivatives():
    """A gradient penalty, beside torch.fft's."""
    u, k = operands(3, 2, 200, 100, FP16)
    found = []
    for function, given in ((fft_conv, (u, k)), (fft_conv_torch, (u.double(), k.double()))):
        leaves = [x.clone().requires_grad_() for x in given]
        with sim.device():
            y = function(*leaves, causal=True)
            gradients = torch.autograd.grad(y.double().square().sum(), leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(g.double().square().sum() for g in gradients), leaves))
    for a, b in zip(*found, strict=True):
        near("second derivative", a, b, 2 * BOUNDS[FP16])


def test_module():
    """In evaluation, the spectrum of the filter is kept until the filter changes."""
    layer, u = FFTConv(3, 130, causal=True), torch.randn(2, 3, 127, dtype=FP16)
    expected = fft_conv_torch(u, layer.weight.detach(), causal=True)
    near("elsewhere", layer(u), expected, 1e-3)
    with sim.device() as device:
        near("training", layer(u), expected, BOUNDS[FP16])
        layer.eval()
        with torch.no_grad():
            first = layer(u)
            assert layer._spectrum is not None and torch.equal(first, layer(u))
            near("evaluation", first, expected, BOUNDS[FP16])
            layer.weight.mul_(2)
            near("changed", layer(u), 2 * expected, BOUNDS[FP16])
        with torch.inference_mode():
            near("inference", layer(u), 2 * expected, BOUNDS[FP16])
        assert len(device.launches) == 5
    assert list(layer.state_dict()) == ["weight"]


def test_what_a_module_does_not_take():
    u = torch.randn(2, 3, 128)
    for causal, given, message in (
        (True, (u[0],), "FFTConv: u is (3, 128); it must be (B, 3, L)"),
        (True, (u[:, :1],), "FFTConv: u is (2, 1, 128); it must be (B, 3, L)"),
        (True, (u, u[:1]), "FFTConv: pre_gate is (1, 3, 128); it must be (2, 3, 128), as u"),
        (False, (u,), "FFTConv: u is (2, 3, 128); without causal L is at least 130, the taps"),
    ):
        with refused(message, ValueError):
            FFTConv(3, 130, causal)(*given)


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize("name", [n if n in ("fft_conv", "fft_conv_outer_inverse") else slow(n) for n in inspectable])
def test_contract(name, arch):
    report = inspect(inspectable[name](arch))
    assert report.wgmma_serialized is not True
    # a few numbers that address tiles
    assert arch != "sm_90a" or all(loop.counts.get("LDL", 0) + loop.counts.get("STL", 0) <= 24 for loop in report.loops)
    if name == "fft_conv" and arch == "sm_90a":
        loop = max(report.loops, key=lambda loop: loop.counts.get("LDSM", 0)).counts
        assert loop.get("LDL", 0) <= 1 and not loop.get("LDS", 0)  # a number that addresses tiles
        # two twiddle tables and the filter are read, the last factor's operand and the result written
        assert loop["LDSM"] == 24 and loop["STSM"] == 16


# ---------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("backward", [False, slow(True)])
def test_the_benchmark(monkeypatch, backward):
    """Ours is right, and a wrong result is found out."""
    for module in ("gemm", "fft_conv"):
        monkeypatch.setattr(f"bench.{module}.DEVICE", "cpu")
    with sim.device():
        trial = bench_fft.prepare(bench_fft.Shape(3, 2, 256, False, False), backward)
        found = trial.ours[bench_fft.OURS]()()
    wrong = [1.1 * x for x in found] if backward else 1.1 * found
    assert trial.error(found) < trial.bound < trial.error(wrong)
