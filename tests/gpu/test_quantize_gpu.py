"""Quantisers to MXFP8 and NVFP4: bit by bit as their references, on the GPU, or simulated."""

import itertools

import pytest
import torch

from tests.cases_quantize import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    any_bits,
    assert_same_bits,
    check_mxfp8,
    check_nvfp4,
    poisoned,
    random_bits,
    signs,
    spread,
)
from tests.util import DEVICE, crossed, on_gpu_or_simulated, slow, some_slow
from tritonkittens.kernels.quantize import (
    blocked_scales,
    call_plan,
    dequantize_mxfp8,
    dequantize_nvfp4,
    nvfp4_tensor_scale,
    nvfp4_tensor_scale_torch,
    plain_scales,
    quantize_mxfp8,
    quantize_nvfp4,
)

pytestmark = pytest.mark.usefixtures("kernel_device")

SHAPES = [(130, 200), (256, 128), (1, 2), (2, 70), (2, 3, 40, 36), (33, 1024)]
AXES = ["both", "rows", "cols"]


@pytest.fixture(params=["chosen", "arithmetic"])
def conversions(request, monkeypatch):
    """How values are rounded: with the instructions of the GPU, and without any."""
    monkeypatch.setattr(call_plan, "_plans", {})
    if request.param == "arithmetic":
        monkeypatch.setattr(call_plan, "CONVERT", "arithmetic")


@pytest.mark.parametrize(
    "kind, shape, dtype, axes, scaling, layout",
    crossed([BF16, FP16, FP32], SHAPES, [E4M3, E5M2], AXES, ["up", "floor"], ["blocked", "plain"]),
    ids=str,
)
def test_mxfp8(monkeypatch, kind, shape, dtype, axes, scaling, layout):
    poisoned(monkeypatch)
    check_mxfp8(quantize_mxfp8, spread(shape, kind), dtype=dtype, axes=axes, scaling=scaling, layout=layout)


@pytest.mark.parametrize(
    "kind, shape, axes, layout, stochastic, transformed",
    crossed([BF16, FP32, FP16], SHAPES, AXES, ["blocked", "plain"], [False, True], [None, torch.int8, BF16]),
    ids=str,
)
def test_nvfp4(monkeypatch, kind, shape, axes, layout, stochastic, transformed):
    poisoned(monkeypatch)
    x = spread(tuple(n + n % 2 for n in shape), kind)
    given = dict(axes=axes, layout=layout)
    if stochastic:
        given["random_bits"] = random_bits(x)
    if transformed:
        given["hadamard"] = signs(transformed)
    check_nvfp4(quantize_nvfp4, x, None, **given)


@pytest.mark.parametrize("kind", [BF16, slow(FP32)], ids=str)
def test_mxfp8_of_any_bits(conversions, kind):
    """Denormal numbers, infinities and NaN; every bf16."""
    x = any_bits((130, 160), kind)
    if kind == BF16:
        x = torch.arange(-(1 << 15), 1 << 15, device=DEVICE).to(torch.int16).view(BF16).reshape(256, 256)
    for dtype, scaling in ((E4M3, "up"), (E5M2, "floor"), (E5M2, "up"), (E4M3, "floor")):
        check_mxfp8(quantize_mxfp8, x, axes="both", dtype=dtype, scaling=scaling)
    x = torch.where(x.isfinite(), x, 0.0)[:, torch.randperm(x.shape[1], device=DEVICE)]
    check_mxfp8(quantize_mxfp8, x, axes="both")


@pytest.mark.parametrize("kind", [BF16, slow(FP32)], ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_nvfp4_of_any_bits(conversions, kind, stochastic):
    x = any_bits((130, 160), kind)
    if kind == BF16:
        x = torch.arange(-(1 << 15), 1 << 15, device=DEVICE).to(torch.int16).view(BF16).reshape(256, 256)
    given = dict(axes="both", random_bits=random_bits(x) if stochastic else None)
    for scale in (1.0, 2.0**-126, 1e30, 1e-3):
        check_nvfp4(quantize_nvfp4, x, torch.tensor(scale, device=DEVICE), **given)
    assert nvfp4_tensor_scale(x).isnan()
    x = torch.where(x.isfinite(), x, 0.0)
    check_nvfp4(quantize_nvfp4, x, None, **given)


def around(*numbers):
    """These fp32, those next to them on both sides, and all of their negatives."""
    x = torch.tensor(numbers, dtype=FP32)
    x = torch.cat([x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(torch.inf))])
    return torch.cat([x, -x]).to(DEVICE)


def in_blocks(x, size, largest):
    """A row of blocks that begin with `largest`; the rest is x, as often as it takes."""
    rows = torch.nn.functional.pad(x, (0, -len(x) % (size - 1))).reshape(-1, size - 1)
    return torch.cat([torch.full((len(rows), 1), largest, device=DEVICE), rows], 1).reshape(1, -1)


def test_ties_of_e2m1(conversions):
    """A tensor scale of 1 and a largest magnitude of 6 make each scale 1."""
    x = in_blocks(around(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1e-45), 16, 6.0)
    found = quantize_nvfp4(x, torch.ones((), device=DEVICE), layout="plain")
    values = dequantize_nvfp4(*found, layout="plain")
    assert (found.scales.float() == 1).all()
    nearest = {0.25: (0, 0.5), 0.75: (0.5, 1), 1.25: (1, 1.5), 1.75: (1.5, 2), 2.5: (2, 3), 3.5: (3, 4), 5: (4, 6)}
    even = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
    for given, value in zip(x.flatten().tolist(), values.flatten().tolist(), strict=True):
        tie = min(nearest, key=lambda t: abs(abs(given) - t))
        size = even[tie] if abs(given) == tie else nearest[tie][abs(given) > tie]
        if abs(given) in (0, 6) or abs(given) < 0.2:
            size = 6 if abs(given) == 6 else 0
        assert abs(value) == size and (value == 0 or (value < 0) == (given < 0)), (given, value)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_ties_of_fp8(conversions, dtype):
    """All numbers of a format, the middle between two neighbours, and what is next to it. The scale is 1."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = around(*numbers.tolist(), *middles.tolist())
    x = in_blocks(x[x.abs() <= numbers.max()], 32, torch.finfo(dtype).max)
    found = quantize_mxfp8(x, dtype=dtype, layout="plain")
    assert (found.scales.float() == 1).all()
    assert torch.equal(found.values.view(torch.uint8), x.to(dtype).view(torch.uint8))


def test_stochastic_rounding_is_right_on_average():
    """For each random byte once, a number is rounded up as often as its distance from the lower neighbour says."""
    grid = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    bytes_ = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat_interleave(16).reshape(256, 16)
    for low, high in itertools.pairwise(grid):
        x = low + (high - low) * torch.rand(15, device=DEVICE)
        x = torch.cat([torch.full((1,), 6.0, device=DEVICE), x]).expand(256, 16).contiguous()
        found = quantize_nvfp4(x, torch.ones((), device=DEVICE), random_bits=bytes_.view(torch.int32), layout="plain")
        values = dequantize_nvfp4(*found, layout="plain", dtype=torch.float64)[:, 1:]
        assert ((values == low) | (values == high)).all()
        ups = (values == high).sum(0)
        assert torch.equal(ups, ((x[0, 1:].double() - low) / (high - low) * 256).floor().long())


def test_blocks_without_numbers():
    """A block of zeros, one with NaN, one with an infinity, and one that underflows, each beside ordinary ones."""
    x = torch.randn(2, 128, device=DEVICE)
    x[0, :32], x[0, 40], x[0, 70], x[0, 96:] = 0.0, float("nan"), float("-inf"), 1e-44
    x[0, 3] = -0.0
    values, scales = quantize_mxfp8(x, layout="plain")
    assert scales.view(torch.uint8)[0].tolist() == [0, 255, 254, 0]
    assert values.view(torch.uint8)[0, :5].tolist() == [0, 0, 0, 0x80, 0]
    assert values[0, 32:64].float().isnan().all() and not values[1].float().isnan().any()
    assert values[0, 70] == -448 and (values[0, 64:70].float().abs() < 1).all()
    found = quantize_nvfp4(x, torch.ones((), device=DEVICE), layout="plain")
    codes = found.scales.view(torch.uint8)[0].tolist()
    assert codes[:2] == [0, 0] and codes[2] == 0x7F and codes[4] == 0x7E and codes[6:] == [0, 0]
    pairs = found.values.view(torch.uint8)[0]
    assert pairs[:3].tolist() == [0, 0x80, 0] and (pairs[16:24] == 0x77).all() and (pairs[48:] == 0).all()


def test_nothing_saturates_where_scales_are_rounded_up():
    x = any_bits((128, 256), FP32)
    x = torch.where(x.isfinite(), x, 0.0)
    for dtype in (E4M3, E5M2):
        values, scales = quantize_mxfp8(x, dtype=dtype, layout="plain")
        exact = x.double() / scales.double().repeat_interleave(32, -1)
        assert (exact.abs() <= torch.finfo(dtype).max).all()
        # half of the least step, or of that of the mantissa
        error = (values.double() - exact).abs()
        step = 2.0 ** (-9 if dtype == E4M3 else -16)
        assert (
            error <= torch.maximum(exact.abs() * 2.0 ** (-4 if dtype == E4M3 else -3), torch.tensor(step / 2))
        ).all()
        smaller = scales.double() / 2
        largest = x.double().abs().unflatten(-1, (-1, 32)).amax(-1)
        assert ((largest > smaller * torch.finfo(dtype).max) | (scales.double() == 2.0**-127)).all()


def test_dequantised_nvfp4_is_near():
    x = spread((96, 256), BF16)
    rows, cols = quantize_nvfp4(x, axes="both")
    for found, near in ((dequantize_nvfp4(*rows, dtype=torch.float64), x), (dequantize_nvfp4(*cols), x.mT)):
        assert (found - near.double()).norm() < 0.12 * near.double().norm()
    (rows, _), near = quantize_mxfp8(x, axes="both"), x.double()
    assert (dequantize_mxfp8(*rows, dtype=torch.float64) - near).norm() < 0.04 * near.norm()


def test_the_hadamard_transform_is_one():
    """Its matrix by its definition, times the signs, in float64."""
    x, s = torch.randn(64, 64, device=DEVICE), signs()
    matrix = torch.ones(1, 1, dtype=torch.float64, device=DEVICE)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    expected = ((x.double() * s.repeat(4)).unflatten(-1, (4, 16)) @ matrix / 4).flatten(-2)
    found = dequantize_nvfp4(*quantize_nvfp4(x, hadamard=s), dtype=torch.float64)
    assert (found - expected).norm() < 0.12 * expected.norm()
    assert torch.allclose(nvfp4_tensor_scale(x, hadamard=s).double() * 2688, expected.abs().amax(), rtol=1e-6)


@pytest.mark.parametrize("axes", some_slow(AXES, ["both"]))
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.mT,
        slow(lambda x: x[1:, 3:131]),
        slow(lambda x: x[:, ::2]),
        slow(lambda x: x[::3].mT),
        slow(lambda x: x[:1].expand(36, 288)),
        slow(lambda x: x.reshape(2, 70, 288)[:, ::2].mT),
        lambda x: x.reshape(2, 2, 35, 288).transpose(0, 1)[..., :34, :],
    ],
)
def test_strided_inputs(axes, view):
    x = view(spread((140, 288), BF16))
    check_mxfp8(quantize_mxfp8, x, axes=axes)
    x = x[..., : x.shape[-2] // 2 * 2, : x.shape[-1] // 2 * 2]
    words = random_bits(x)
    check_nvfp4(quantize_nvfp4, x, None, axes=axes, random_bits=words.mT.contiguous().mT, hadamard=signs())


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (2, 0, 64), (0, 4, 64), (0, 0)], ids=str)
def test_empty_inputs(shape):
    x = torch.empty(shape, device=DEVICE, dtype=BF16)
    check_mxfp8(quantize_mxfp8, x, axes="both")
    check_nvfp4(quantize_nvfp4, x, None, axes="both")
    assert nvfp4_tensor_scale(x) == 2.0**-126


def test_scales_in_blocks():
    """Scale j of line i of a block is at 16 · (i mod 32) + 4 · (i div 32) + j of its 512 bytes; all else is zero."""
    x = spread((300, 200), BF16) + 1
    _, plain = quantize_mxfp8(x, layout="plain")
    _, blocked = quantize_mxfp8(x)
    assert blocked.shape == (3, 2, 32, 16) and plain.shape == (300, 7)
    flat, expected = plain.view(torch.uint8).tolist(), torch.zeros(3 * 2 * 512, dtype=torch.uint8)
    for i, line in enumerate(flat):
        for j, scale in enumerate(line):
            expected[(i // 128 * 2 + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4] = scale
    assert torch.equal(blocked.view(torch.uint8).flatten().cpu(), expected)
    assert_same_bits(blocked_scales(plain), blocked)
    assert_same_bits(plain_scales(blocked, 300, 7), plain)


@pytest.mark.parametrize("kind", [BF16, slow(FP16), slow(FP32)], ids=str)
def test_the_tensor_scale(kind):
    many = on_gpu_or_simulated((5000, 4100), (400, 300))
    for shape in ((1, 1), (3, 130, 70), many):
        x = torch.randn(shape, device=DEVICE).to(kind)
        for view in (x, x.mT, x[..., ::2, :]):
            assert_same_bits(nvfp4_tensor_scale(view), nvfp4_tensor_scale_torch(view))
        x[..., -1, -1] = -float("inf")
        assert nvfp4_tensor_scale(x) == float("inf")
        x[..., 0, 0] = float("nan")
        assert nvfp4_tensor_scale(x).isnan()
    x = torch.randn(48, 160, device=DEVICE).to(kind)
    for axes in AXES:
        given = dict(axes=axes, hadamard=signs())
        assert_same_bits(nvfp4_tensor_scale(x, **given), nvfp4_tensor_scale_torch(x, **given))
    assert nvfp4_tensor_scale(torch.zeros(3, 5, device=DEVICE, dtype=kind)) == 2.0**-126


def test_large_matrices():
    """More tiles than multiprocessors, in several matrices."""
    shape = on_gpu_or_simulated((3, 1500, 2056), (2, 200, 264))
    x = spread(shape, BF16)
    check_mxfp8(quantize_mxfp8, x, axes="both")
    check_nvfp4(quantize_nvfp4, x, None, axes="both", random_bits=random_bits(x), hadamard=signs())
