"""Gated activations against references in float64, forward and backward, on the GPU, or simulated."""

import itertools

import pytest
import torch

from tests.cases_activation import BF16, FP16, FP32, KINDS, LAYOUTS, check, operands, poisoned, run
from tests.util import DEVICE, crossed, drawn, on_gpu_or_simulated, relative_error, seeds, slow
from tritonkittens.kernels.activation import gated_torch

pytestmark = pytest.mark.usefixtures("kernel_device")

WIDTHS = [64, 1, 7, 200, 1024, 1100, 2304]
ROWS = [(3,), (1,), (0,), (2, 5), (35,), ()]


@pytest.fixture(autouse=True)
def poison_in_results(monkeypatch):
    poisoned(monkeypatch)


@pytest.mark.parametrize("width, rows, dtype", crossed(WIDTHS, ROWS, [BF16, FP32, FP16]), ids=str)
def test_shapes(width, rows, dtype):
    layout = LAYOUTS[(width + len(rows)) % 3]
    check(KINDS[width % 3], layout, operands(layout, (*rows, width), dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kind, layout):
    check(kind, layout, operands(layout, (5, 72), BF16))
    check(kind, layout, operands(layout, (2, 0), FP32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout):
    """Rows with gaps, of any order, with gaps between columns, and repeated."""
    for view in (
        lambda x: x[::2, :, 3 : 3 + 40],
        lambda x: x.transpose(0, 1)[..., :40],
        lambda x: x[..., ::2][..., :40],
        lambda x: x[:, :1, :40].expand(6, 3, 40),
        lambda x: x.permute(2, 1, 0)[:40, :, :4],
    ):
        given = [view(t.detach()).requires_grad_() for t in operands(layout, (6, 3, 100), FP32)]
        check("silu", layout, given)


def test_parts_of_a_tensor():
    """a and b as views of one projection are read without a copy."""
    both = torch.randn(5, 3, 100, device=DEVICE, dtype=FP32)
    a, b = (t.requires_grad_() for t in both[..., 10:90].detach().chunk(2, -1))
    check("gelu_tanh", "pair", [a, b])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_over_operands(layout):
    """The second backward, and others that saved the operands, raise; operands with gaps keep what is in these."""
    for view in (lambda x: x, lambda x: x[:, 1:3, 8 : 8 + x.shape[-1] // 2]):
        leaves = operands(layout, (3, 4, 48), FP32)
        wide = [x * 2 for x in leaves]
        kept, given = [x.detach().clone() for x in wide], [view(x) for x in wide]
        values = [x.detach().clone().requires_grad_() for x in given]
        options = dict(interleaved=layout == "interleaved")
        y = run("gelu_tanh", *given, **options, inplace_backward=True)
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, given, dy, retain_graph=True)
        expected = torch.autograd.grad(gated_torch(*values, kind="gelu_tanh", **options), values, dy.double())
        for x, a, b, before, after in zip(given, found, expected, kept, wide, strict=True):
            torch.testing.assert_close(a, b)
            assert a.data_ptr() == x.data_ptr()
            view(before).copy_(view(after).detach())
            assert torch.equal(before, after), "elsewhere it is as before"
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, leaves, dy)


def test_gradients_of_any_strides():
    a, b = operands("pair", (6, 40), FP32)
    for reduced in (lambda y: y.sum(), lambda y: y.T.contiguous().square().sum(), lambda y: y[:, 3].sum()):
        found = torch.autograd.grad(reduced(run("silu", a, b)), [a, b])
        expected = torch.autograd.grad(reduced(torch.nn.functional.silu(a) * b), [a, b])
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_special_values_as_torch(kind):
    """In float64: torch's GELU of infinity in fp32 is NaN on some CPUs."""
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30, 1e-30, 80.0, -80.0, 1.0]
    a = torch.tensor(values, device=DEVICE).repeat_interleave(len(values))
    b = torch.tensor(values, device=DEVICE).repeat(len(values))
    expected = gated_torch(a, b, kind=kind).float()
    torch.testing.assert_close(run(kind, a, b), expected, equal_nan=True, rtol=1e-4, atol=1e-35)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_all_magnitudes(kind, dtype):
    """Activations and slopes, near 0 too, in the dtype's digits but for the tails of GELU."""
    a = torch.linspace(-9, 9, on_gpu_or_simulated(100_000, 3001), device=DEVICE).to(dtype).requires_grad_()
    b, precise = torch.ones_like(a), a.detach().double().requires_grad_()
    y, exact = run(kind, a, b), gated_torch(precise, b, kind=kind)
    digits = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-21}[dtype]
    floor = {"silu": 1e-7, "gelu_tanh": 1e-7, "gelu": 4e-6 if dtype != FP32 else 1e-6}[kind]
    slopes = torch.autograd.grad(y.sum(), a)[0], torch.autograd.grad(exact.sum(), precise)[0]
    for found, expected in ((y, exact), slopes):
        assert ((found.double() - expected).abs() <= digits * expected.abs() + floor).all()


@seeds
def test_random(seed):
    """Rows of any strides."""
    draw, (kind, dtype) = drawn(seed, list(itertools.product(KINDS, [BF16, FP16, FP32])))
    layout, width = draw.choice(LAYOUTS), draw.choice([draw.randint(1, 300), 8 * draw.randint(1, 40)])
    rows = tuple(draw.randint(0 if n else 1, 5) for n in range(draw.randint(0, 3)))
    given = operands(layout, (*rows, width), dtype)
    if draw.random() < 0.3 and rows:
        given = [torch.cat([x, x], -1)[..., : x.shape[-1]].detach().requires_grad_() for x in given]
    check(kind, layout, given)


@pytest.mark.parametrize("layout", [LAYOUTS[0], *map(slow, LAYOUTS[1:])])
def test_the_same_bits_in_every_run(layout):
    given = operands(layout, (40, 200), BF16)
    torch.manual_seed(1)
    first = check("silu", layout, given)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, check("silu", layout, given), strict=True))


def test_more_programs_than_columns_of_a_grid():
    """Tiles of rows and columns share one dimension of the grid."""
    given = operands("pair", (on_gpu_or_simulated(70_000, 70), 16), BF16)
    with torch.no_grad():
        assert relative_error(run("silu", *given), gated_torch(*given, kind="silu")) < 3e-3
