"""Norms against references in float64, forward and backward, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_norm import BF16, FP16, FP32, OPERANDS, check, numbers, operands, poisoned
from tests.util import DEVICE, crossed, drawn, on_gpu_or_simulated, seeds, slow
from tritonkittens.kernels.norm import call_plan, layer_norm, rms_norm
from tritonkittens.kernels.norm.config import Tiles

pytestmark = pytest.mark.usefixtures("kernel_device")

WIDTHS = [1, 2, 7, 64, 96, 1000, 1024]
ROWS = [(3,), (1,), (0,), (2, 5), (35,), (9,)]


@pytest.fixture(autouse=True)
def poison_in_results(monkeypatch):
    poisoned(monkeypatch)


@pytest.mark.parametrize("width, rows, dtype, rms", crossed(WIDTHS, ROWS, [BF16, FP32, FP16], [True, False]), ids=str)
def test_widths(width, rows, dtype, rms):
    check(rms, *operands((*rows, width), dtype, ["weight", "bias"]), eps=1e-5)


@pytest.mark.parametrize("width", [17000, slow(16384), slow(32768), slow(40000), slow(65536), slow(65535)])
@pytest.mark.parametrize("rms", [False, slow(True)])
def test_wide_rows(width, rms):
    check(rms, *operands((2, width), BF16, ["weight", "residual"]))


@pytest.mark.parametrize("names", [[], ["weight"], ["bias"], ["weight", "bias", "weight1"], OPERANDS[:-1]], ids=str)
@pytest.mark.parametrize("rms", [False, slow(True)])
def test_operands(rms, names):
    check(rms, *operands((5, 200), BF16, names), zero_centered_weight=True)


@pytest.mark.parametrize(
    "dtype, param_dtype, residual_dtype, options",
    [
        (BF16, FP32, BF16, dict(residual_in_fp32=True)),
        (BF16, BF16, FP32, dict(out_dtype=FP32)),
        (FP32, FP16, FP16, dict(out_dtype=BF16)),
    ],
    ids=str,
)
def test_dtypes(dtype, param_dtype, residual_dtype, options):
    check(True, *operands((3, 72), dtype, ["weight", "residual", "bias"], param_dtype, residual_dtype), **options)
    check(False, *operands((3, 72), dtype, ["weight", "x1"], param_dtype), **options)


def test_z_in_fp32_without_a_residual():
    x, given = operands((3, 72), BF16, ["weight"])
    assert layer_norm(x, **given, prenorm=True)[1] is x
    assert layer_norm(x, **given, prenorm=True, residual_in_fp32=True)[1].dtype == FP32
    check(False, x, given, residual_in_fp32=True)


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("names", [["weight", "rowscale", "residual"], [n for n in OPERANDS if n != "rowscale"]])
@pytest.mark.parametrize("width", [130, slow(20000), slow(3)])
def test_dropout(names, width):
    """The backward recomputes the mask of the forward."""
    check(False, *operands((3, width), FP32, names), dropout_p=0.3)


@pytest.mark.parametrize("shape, dtype", [((3, 5, 40), FP32), ((3, 1030), BF16)], ids=str)
def test_rowscale(shape, dtype):
    """The second has tiles of one row."""
    check(True, *operands(shape, dtype, ["weight", "rowscale"]))


def test_masks_are_random_and_repeatable():
    x, seed = torch.ones(on_gpu_or_simulated(4096, 16), 1000, device=DEVICE), torch.tensor([3, 5], device=DEVICE)
    p = 0.25

    def masks(seed):
        return layer_norm(x, x1=x, dropout_p=p, seed=seed, return_dropout_mask=True)[1:]

    mask, mask1 = masks(seed)
    error = 5 * (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.float().mean() - (1 - p)) < error and abs(mask1.float().mean() - (1 - p)) < error
    both = (1 - p) ** 2
    for a, b in ((mask, mask1), (mask[:, 1:], mask[:, :-1]), (mask[1:], mask[:-1])):
        assert abs((a & b).float().mean() - both) < 5 * (both * (1 - both) / a.numel()) ** 0.5, "independent"
    assert all(torch.equal(a, b) for a, b in zip((mask, mask1), masks(seed), strict=True))
    for other in ([4, 5], [3, 2**40]):
        assert not torch.equal(mask, masks(torch.tensor(other, device=DEVICE))[0])
    plain = layer_norm(x[:2, :130], dropout_p=p, seed=seed, prenorm=True)[1]
    assert torch.equal(plain != 0, layer_norm(x[:2, :130], dropout_p=p, seed=seed, return_dropout_mask=True)[1])


# ---------------------------------------------------------------- memory


def test_heads_of_packed_tensors():
    """Rows are heads of q, a part of one tensor of q, k and v, as a product gives them, and as attention takes them."""
    packed = numbers((2, 5, 3, 4, 64), BF16, grad=False)
    _, given = operands((64,), BF16, ["weight"])
    for q in (packed[:, :, 0], packed[:, :, 0].transpose(1, 2)):
        check(True, q.detach().requires_grad_(), given)


def test_strides():
    wide = numbers((6, 3, 100), FP32, grad=False)
    for x in (wide[::2, :, 3:75], wide.permute(2, 0, 1), wide[:, :1].expand(6, 4, 100), wide[:, :, ::2]):
        check(False, x.detach().requires_grad_(), operands(x.shape, FP32, ["weight", "bias"])[1])
    x, given = operands((4, 6, 32), FP32, ["weight", "residual", "x1"])
    given["residual"] = numbers((6, 4, 32), FP32, grad=False).transpose(0, 1).requires_grad_()
    check(True, x, given)


def test_gradients_of_any_strides():
    x, given = operands((6, 40), FP32, ["weight", "bias"])
    for reduced in (lambda y: y.sum(), lambda y: y.T.contiguous().square().sum(), lambda y: y[:, 3].sum()):
        found = torch.autograd.grad(reduced(layer_norm(x, **given)), [x, *given.values()])
        expected = torch.autograd.grad(
            reduced(torch.nn.functional.layer_norm(x, (40,), *given.values(), 1e-6)), [x, *given.values()]
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * max(10.0, float(b.abs().max())))  # sums


def test_only_z_has_a_gradient():
    x, given = operands((3, 40), FP32, ["weight", "residual"])
    z = rms_norm(x, **given, prenorm=True)[1]
    dx, dw, dr = torch.autograd.grad(z, [x, given["weight"], given["residual"]], torch.ones_like(z))
    assert (dx == 1).all() and (dr == 1).all() and (dw == 0).all()


# ---------------------------------------------------------------- persistent programs


@pytest.mark.parametrize(
    "rows, programs", [(5, 1), (9, 2), (16, 2), (17, 2), (3, 2), slow(40, 3), slow(64, 4), slow(65, 4)]
)
@pytest.mark.parametrize("stages", [3, slow(2), slow(1)])
def test_loops_over_rows(monkeypatch, rows, programs, stages):
    """Programs with no tile of 4 rows, with one, two and three, the last one not whole."""
    monkeypatch.setattr(call_plan, "programs_of", lambda *_: programs)
    monkeypatch.setattr(call_plan, "stages_of", lambda *_: stages)
    check(False, *operands((rows, 1000), BF16, ["weight", "bias", "residual"]))


# widths; rms; dtypes of x, parameters and the residual; operands; options
KINDS = [
    ((33, 40, 63, 64), True, (BF16, BF16, FP32), ["weight", "residual"], {}),
    ((65, 100, 120, 128), False, (FP32, FP16, BF16), ["weight", "bias"], dict(out_dtype=BF16)),
    ((1, 2, 7, 16), True, (FP32, FP32, FP32), ["weight", "x1", "bias"], {}),
    ((40, 64), False, (FP16, FP16, FP16), ["residual", "x1", "weight", "weight1", "bias1"], dict(dropout_p=0.4)),
    ((300, 512), True, (BF16, FP32, BF16), ["rowscale", "weight"], dict(residual_in_fp32=True)),
    ((200, 256), False, (BF16, BF16, BF16), OPERANDS[:-1], dict(dropout_p=0.2, zero_centered_weight=True)),
    ((600, 1000, 1024), False, (FP16, FP32, FP32), ["residual", "weight", "bias"], dict(out_dtype=FP32)),
    ((4000, 5000), True, (BF16, BF16, FP32), ["residual", "weight"], dict(zero_centered_weight=True)),
    ((17000, 20000), False, (BF16, BF16, BF16), ["residual", "weight", "rowscale"], dict(dropout_p=0.4)),
    ((40000, 65535, 65536), True, (BF16, BF16, BF16), ["weight", "residual"], {}),
]


@seeds
@pytest.mark.simulated(multiprocessors=16)  # a row of 65,536 columns has a cluster of 8
def test_random(seed, monkeypatch):
    """With tiles for few rows, or for many."""
    draw, (widths, rms, dtypes, names, options) = drawn(seed, KINDS)
    width = draw.choice(widths)
    most = 2 if width > 10_000 else 12
    rows = draw.choice([(draw.randint(0, most),), (draw.randint(1, most),), (draw.randint(1, 2), 1, most // 2)])
    wanted = [name for name in names if name != "weight" or draw.random() < 0.8]
    eps = draw.choice([1e-6, 1e-3])
    if draw.random() < 0.5:
        monkeypatch.setattr(call_plan, "for_few_rows", lambda tiles, *_: tiles)
    check(rms, *operands((*rows, width), dtypes[0], wanted, *dtypes[1:]), eps=eps, **options)


@pytest.mark.parametrize(
    "rows, width, tiles, names, p",
    [
        (5, 150, Tiles(1, 64, 3, 1, 4, 2), OPERANDS[:-1], 0.0),
        (1, 97, Tiles(1, 128, 1, 1, 4, 4), [], 0.0),
        (0, 150, Tiles(1, 64, 3, 1, 4, 2), ["weight", "bias"], 0.0),
        (3, 300, Tiles(1, 256, 2, 1, 4, 8), ["weight", "residual", "rowscale"], 0.4),
        slow(4, 2500, Tiles(1, 2048, 2, 1, 4, 2), ["weight", "bias"], 0.0),
        slow(7, 5000, Tiles(1, 2048, 3, 1, 4, 2), ["weight", "residual", "x1"], 0.4),
    ],
    ids=str,
)
@pytest.mark.parametrize("rms", [False, slow(True)])
def test_rows_that_a_cluster_shares(monkeypatch, rows, width, tiles, names, p, rms):
    """In the backward, two programs have one to three tiles, or one has none."""
    for name in ("forward_tiles", "backward_tiles"):
        monkeypatch.setattr(call_plan, name, lambda *_: tiles)
    monkeypatch.setattr(call_plan, "programs_of", lambda *_: 2)
    check(rms, *operands((rows, width), FP32, names), dropout_p=p)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("rms", [True, False])
def test_special_values_as_torch(rms):
    x, given = operands((6, 40), FP32, ["weight"])
    x = x.detach()
    x[0, 3], x[1, 5], x[2, :2], x[3], x[4] = float("nan"), float("inf"), -float("inf"), 0, 1e-30
    w = given["weight"].detach()
    if rms:
        found, expected = rms_norm(x, w), torch.nn.functional.rms_norm(x, (40,), w, 1e-6)
    else:
        found, expected = layer_norm(x, w), torch.nn.functional.layer_norm(x, (40,), w, None, 1e-6)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_large_means_do_not_cancel():
    """The variance is that of differences from the mean; a mean of squares minus a squared mean would have no digits
    left."""
    for width in (100, 33000):
        x = torch.randn(1, width, device=DEVICE) + 3000
        expected = torch.nn.functional.layer_norm(x.double(), (width,), eps=1e-6)
        assert (layer_norm(x) - expected).abs().max() < 2e-3


def test_the_same_bits_in_every_run():
    given = operands((on_gpu_or_simulated(5000, 70), 48), BF16, ["weight", "bias", "residual"])
    torch.manual_seed(1)
    first = check(False, *given)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, check(False, *given), strict=True))
