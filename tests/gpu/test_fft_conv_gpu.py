"""FFT convolutions against torch.fft in float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_fft_conv import BF16, BOUNDS, FP16, check, near, operands, poisoned, rounded_convolution, small_tiles
from tests.util import DEVICE, crossed, drawn, on_gpu_or_simulated, seeds, slow
from tritonkittens.kernels.fft_conv import config, fft_conv, fft_conv_filter, fft_conv_torch

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    poisoned(monkeypatch)


TILE = on_gpu_or_simulated(4096, 256)


@pytest.fixture
def tiles_of_the_device(monkeypatch):
    """What is simulated has small tiles."""
    if TILE != config.TILE:
        small_tiles(monkeypatch, TILE)


@pytest.mark.parametrize(
    "length, batch, heads, dtype",
    crossed([1024, 4096, 256, 64, 512, 2048], [5, 2, 0, 1, 4], [2, 1, 17], [BF16, FP16]),
    ids=str,
)
def test_circular(length, batch, heads, dtype):
    """Batches that fill no pair, channels that fill no tile."""
    check(*operands(batch, heads, length, length if heads > 1 else min(100, length), dtype))


@pytest.mark.parametrize(
    "length, taps, batch, dtype",
    crossed([200, 4096, 1, 130, 512, 300], [300, 4097, 3, 100], [3, 1], [BF16, FP16]),
    ids=str,
)
def test_causal(length, taps, batch, dtype):
    """Signals as long as a transform, and shorter ones; filters that are longer."""
    check(*operands(batch, 3, length, taps, dtype), causal=True)


@pytest.mark.parametrize(
    "gates, length, causal", [(2, 256, False), slow(1, 256, True), slow(2, 512, True), slow(2, 2100, True)], ids=str
)
def test_gates_and_gradients(gates, length, causal):
    check(*operands(3, 3, length, length, BF16, gates), causal=causal, gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bits_in_every_run(causal):
    u, k, *gates = operands(3, 3, 256, 256, BF16, 2)
    leaves, runs = [x.requires_grad_() for x in (u, k, *gates)], []
    for _ in range(2):
        y = fft_conv(*leaves[:2], causal=causal, pre_gate=leaves[2], post_gate=leaves[3])
        runs.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("length, batch", [slow(256, 5), slow(1024, 4), slow(4096, 2), slow(256, 0)], ids=str)
def test_gradients(length, batch):
    """With two consumers, one tile after the other."""
    check(*operands(batch, 9, length, 200, FP16), gradients=True)


@pytest.mark.usefixtures("tiles_of_the_device")
@pytest.mark.parametrize(
    "length, taps, batch, heads, gates, causal, dtype",
    [
        (4 * TILE, 4 * TILE, 3, 2, 0, True, BF16),
        slow(4 * TILE, 99, 3, 5, 0, False, FP16),
        (11 * TILE - 5, 20 * TILE, 2, 1, 2, True, BF16),  # tiles of channels whose rows are no power of two
        slow(3 * TILE, 3 * TILE, 5, 17, 2, False, BF16),
        slow(40 * TILE, 3 * TILE, 1, 2, 1, True, FP16),
        slow(33 * TILE + 1, 33 * TILE, 3, 1, 1, True, BF16),
        slow(256 * TILE, 256 * TILE, 1, 1, 0, True, BF16),  # two outer factors
        slow(200 * TILE + 7, 128 * TILE, 2, 1, 2, True, BF16),
        slow(256 * TILE, 256 * TILE, 1, 1, 0, False, FP16),
        slow(4 * TILE, 4 * TILE, 0, 2, 0, True, BF16),
        slow(4 * TILE, 4 * TILE, 1, 81, 1, True, BF16),  # more tiles than multiprocessors
    ],
    ids=str,
)
def test_long(length, taps, batch, heads, gates, causal, dtype):
    check(*operands(batch, heads, length, taps, dtype, gates), causal=causal, gradients=True)


def test_strides_and_spectra():
    u, k = operands(3, 4, 256, 256)
    expected = fft_conv_torch(u, k)
    strided = torch.empty(3, 256, 4, device=DEVICE, dtype=BF16).mT.copy_(u)
    spectrum = fft_conv_filter(k, 256)
    found = fft_conv(u, spectrum)
    assert torch.equal(found, fft_conv(strided, spectrum)) and torch.equal(found, fft_conv(u, k))
    near("y", found, expected, BOUNDS[BF16])
    shorter, causal = u[..., :99], fft_conv_filter(k, 256, causal=True)
    near("shorter", fft_conv(shorter, causal, causal=True), fft_conv_torch(shorter, k, causal=True), BOUNDS[BF16])
    few = torch.cat([u, u], 1)[:, 2:6]  # channels of more
    near("channels", fft_conv(few, k), fft_conv_torch(few, k), BOUNDS[BF16])


@pytest.mark.usefixtures("tiles_of_the_device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiles", [1, 16, slow(256)])
def test_errors_are_those_of_rounding(tiles, causal):
    """The error is that of the same transforms whose factors, signals and spectra are rounded to bf16."""
    length = tiles * TILE
    u, k = operands(2, 1, length, length)
    expected = fft_conv_torch(u, k, causal=causal)
    found = fft_conv(u, k, causal=causal)
    x, k = u[:, 0].double().cpu(), k[0].double().cpu()
    if causal:
        quarter = torch.polar(torch.ones_like(k), -torch.pi / 2 * torch.arange(length).double() / length)
        y = rounded_convolution(x + 0j, torch.fft.fft(k * quarter), 0.25, config.factors_of(length)).real
    else:
        y = rounded_convolution(torch.complex(*x)[None], torch.fft.fft(k), 0, config.factors_of(length))
        y = torch.view_as_real(y[0]).T
    error, of_rounding = (float((t.double().cpu() - expected[:, 0].cpu()).norm()) for t in (found[:, 0], y.bfloat16()))
    assert error < 1.03 * of_rounding, (error, of_rounding, float(expected.norm()))


# lengths and taps at most, causal, dtype, gates, gradients
SORTS = [
    ((1, 64, 99, 128), 200, True, BF16, 0, False),
    ((64,), 64, False, FP16, 1, False),
    ((256,), 256, False, BF16, 0, True),
    ((200, 255, 256), 600, True, FP16, 2, True),
    ((129, 200, 256), 256, True, BF16, 1, False),
    ((4 * TILE - 3, 4 * TILE), 4 * TILE, True, BF16, 2, True),
    ((1000, 1024), 1024, True, FP16, 0, True),
    ((4 * TILE,), 99, False, FP16, 0, True),
]


@pytest.mark.usefixtures("tiles_of_the_device")
@seeds
def test_random(seed):
    draw, (lengths, most, causal, dtype, gates, gradients) = drawn(seed, SORTS)
    length, batch, heads = draw.choice(lengths), draw.randint(1, 5), draw.choice([1, 2, 3, 9])
    given = operands(batch, heads, length, draw.randint(1, most), dtype, gates)
    check(*given, causal=causal, gradients=gradients)
