"""FFT convolutions against torch.fft in float64, on the GPU, or simulated."""

import random

import pytest
import torch

from tests.cases_fft_conv import BF16, BOUNDS, FP16, check, near, operands, poisoned
from tests.util import DEVICE, crossed, slow
from tritonkittens.kernels.fft_conv import fft_conv, fft_conv_filter, fft_conv_torch

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    poisoned(monkeypatch)


@pytest.mark.parametrize(
    "length, batch, heads, dtype",
    crossed([1024, 4096, 256, 512, 2048], [5, 2, 0, 1, 4], [2, 1, 17], [BF16, FP16]),
    ids=str,
)
def test_circular(length, batch, heads, dtype):
    """Batches that fill no pair, channels that fill no tile."""
    check(*operands(batch, heads, length, length if heads > 1 else 100, dtype))


@pytest.mark.parametrize(
    "length, taps, batch, dtype",
    crossed([200, 4096, 1, 130, 512, 300], [300, 4097, 3, 100], [3, 1], [BF16, FP16]),
    ids=str,
)
def test_causal(length, taps, batch, dtype):
    """Signals as long as half of a transform, shorter ones, and longer ones; spectra of two parts."""
    check(*operands(batch, 3, length, taps, dtype), causal=True)


@pytest.mark.parametrize(
    "gates, length, causal", [(2, 256, False), slow(1, 256, True), slow(2, 512, True), slow(2, 2100, True)], ids=str
)
def test_gates_and_gradients(gates, length, causal):
    check(*operands(3, 3, length, length, BF16, gates), causal=causal, gradients=True)


@pytest.mark.parametrize("length, batch", [slow(256, 5), slow(1024, 4), slow(4096, 2), slow(256, 0)], ids=str)
def test_gradients(length, batch):
    """With two consumers, one tile after the other."""
    check(*operands(batch, 9, length, 200, FP16), gradients=True)


def test_strides_and_spectra():
    u, k = operands(3, 4, 256, 256)
    expected = fft_conv_torch(u, k)
    strided = torch.empty(3, 256, 4, device=DEVICE, dtype=BF16).mT.copy_(u)
    spectrum = fft_conv_filter(k, 256)
    found = fft_conv(u, spectrum)
    assert torch.equal(found, fft_conv(strided, spectrum)) and torch.equal(found, fft_conv(u, k))
    near("y", found, expected, BOUNDS[BF16])
    few = torch.cat([u, u], 1)[:, 2:6]  # channels of more
    near("channels", fft_conv(few, k), fft_conv_torch(few, k), BOUNDS[BF16])


def test_errors_are_those_of_rounding():
    """The error is that of the same transforms of pairs, whose factors, signals and spectra are rounded to bf16."""
    u, k = operands(4, 1, 4096, 4096)
    expected = fft_conv_torch(u, k)
    error = float((fft_conv(u, k).double() - expected).norm() / expected.norm())

    def rounded(x):
        return torch.view_as_complex(torch.view_as_real(x).bfloat16().double())

    n = torch.arange(64, device=DEVICE, dtype=torch.float64)
    f = torch.polar(torch.ones(64, 64, device=DEVICE).double(), -2 * torch.pi * torch.outer(n, n) / 64)
    t = torch.polar(torch.ones(64, 64, device=DEVICE).double(), -2 * torch.pi * torch.outer(n, n) / 4096)
    f, kf = rounded(f), rounded(torch.fft.fft(k.double()).view(64, 64).T)
    x = torch.complex(u[::2].double(), u[1::2].double()).view(2, 64, 64)
    z = rounded(rounded(rounded((f @ x) * t) @ f * kf) @ f.conj() * t.conj())
    y = torch.view_as_real(f.conj() @ z / 4096).permute(0, 3, 1, 2).reshape(4, 1, 4096).bfloat16().double()
    assert error < 1.02 * float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("seed", [slow(n) for n in range(10)])
def test_random(seed):
    rng = random.Random(seed)
    causal = rng.random() < 0.6
    length = rng.randint(1, 4096) if causal else 1 << rng.randint(8, 12)
    taps = rng.randint(1, 8193 - length if causal else length)
    given = operands(rng.randint(1, 9), rng.randint(1, 20), length, taps, rng.choice([BF16, FP16]), rng.randint(0, 2))
    check(*given, causal=causal, gradients=True)
