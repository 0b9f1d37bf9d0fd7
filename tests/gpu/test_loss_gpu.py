"""Softmax and cross entropy against float64, forward and backward, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_loss import BF16, BOUNDS, FP16, FP32, check, check_softmax, numbers, poisoned, targets
from tests.util import DEVICE, crossed, drawn, on_gpu_or_simulated, relative_error, seeds, slow
from tritonkittens.kernels.loss import call_plan, config, cross_entropy, cross_entropy_torch, softmax

pytestmark = pytest.mark.usefixtures("kernel_device")

WIDTHS = [1, 2, 7, 64, 130, 1000]
ROWS = [(3,), (1,), (0,), (2, 5), (), (35,)]
EVERYTHING = dict(label_smoothing=0.1, lse_square_scale=0.01, softcap=5.0)


@pytest.fixture(autouse=True)
def poison_in_results(monkeypatch):
    poisoned(monkeypatch)


# ---------------------------------------------------------------- softmax


@pytest.mark.parametrize("width, rows, dtype", crossed(WIDTHS, ROWS, [BF16, FP32, FP16]), ids=str)
def test_softmax(width, rows, dtype):
    check_softmax(numbers((*rows, width), dtype))


@pytest.mark.parametrize("width", [33000, 3000, slow(32768), slow(20000), slow(100000), slow(262144)])
def test_softmax_of_wide_rows(width):
    check_softmax(numbers((2, width), BF16), out_dtype=FP32)


@pytest.mark.parametrize("width", [5, 40000])
def test_special_values_of_softmax_as_torch(width):
    x = torch.randn(7, width, device=DEVICE)
    x[0, 3], x[1, 1], x[2, :2], x[3], x[4, 1:] = float("nan"), float("inf"), -float("inf"), -float("inf"), -3e38
    x[5] = torch.finfo(FP32).min
    x[6] = 1e30
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), equal_nan=True)


def test_strides_of_softmax():
    wide = numbers((6, 3, 100), FP32)
    for x in (wide[::2, :, 3:75], wide.permute(2, 0, 1), wide[:, :1].expand(6, 4, 100), wide[:, :, ::2]):
        check_softmax(x.detach().requires_grad_())
    x = numbers((6, 40), FP32)
    for reduced in (lambda y: y[:, 3].sum(), lambda y: y.T.contiguous().square().sum()):
        found, expected = (torch.autograd.grad(reduced(y), x)[0] for y in (softmax(x), torch.softmax(x, -1)))
        torch.testing.assert_close(found, expected)


# ---------------------------------------------------------------- cross entropy


@pytest.mark.parametrize("width, rows, dtype", crossed(WIDTHS, ROWS, [BF16, FP32, FP16]), ids=str)
@pytest.mark.parametrize(
    "options", [dict(reduction="none", return_lse=True, **EVERYTHING), slow(dict(reduction="sum"))], ids=["all", ""]
)
def test_cross_entropy(width, rows, dtype, options):
    check(numbers((*rows, width), dtype), targets(rows, width, ignored=0.3), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype, target_dtype", [(BF16, torch.int32), slow(FP32, torch.int64)])
@pytest.mark.parametrize("inplace", [True, slow(False)])
def test_reductions(reduction, dtype, target_dtype, inplace):
    x, target = numbers((9, 70), dtype), targets((9,), 70, target_dtype)
    check(x, target, reduction=reduction, inplace_backward=inplace)


@pytest.mark.parametrize(
    "options",
    [dict(label_smoothing=0.3), dict(lse_square_scale=0.02), dict(softcap=3), dict(return_lse=True, label_smoothing=1)],
    ids=str,
)
def test_options(options):
    check(numbers((8, 200), FP32, 4.0), targets((8,), 200, ignored=0.2), **options)


@pytest.mark.parametrize("width", [9000, slow(8192), slow(8193), slow(32000), slow(128256), slow(262144), slow(50257)])
@pytest.mark.parametrize("options", [dict(reduction="sum"), slow(EVERYTHING)], ids=["plain", "all"])
def test_wide_rows(width, options):
    target = targets((3,), width, ignored=0.0)
    target[1] = -100
    check(numbers((3, width), BF16), target, **options)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stages", [4, slow(2), slow(1)])
def test_loops_over_chunks(monkeypatch, chunks, stages):
    """Rings of fewer and of more chunks than the loop has stages, the last one not whole."""
    for name, value in dict(FEW=16, MOST_AT_ONCE=16, LOOP_COLS=64, GRADIENT_COLS=64, STAGES=stages).items():
        monkeypatch.setattr(config, name, value)
    check(numbers((4, 256 * chunks - 48), BF16), targets((4,), 256 * chunks - 48))


@pytest.mark.parametrize("rows", [5, 16, 17, slow(64)])
def test_sums_in_two_steps(monkeypatch, rows):
    """Some programs have no rows, some one part of them, some two."""
    for name, value in dict(MOST_SUMMED=4, SUM_PROGRAMS=4, SUM_ROWS=4).items():
        monkeypatch.setattr(call_plan, name, value)
    for reduction in ("mean", "sum"):
        check(numbers((rows, 24), FP32), targets((rows,), 24), reduction=reduction)


@pytest.mark.parametrize("width", [40, 9000])
def test_ignored_rows_are_zero(width):
    """Whatever their logits are; without other rows the mean is NaN, as torch's."""
    x = torch.full((2, width), float("nan"), device=DEVICE).requires_grad_()
    target = torch.tensor([3, 3], device=DEVICE)
    for reduction, expected in (("mean", float("nan")), ("sum", 0.0), ("none", 0.0)):
        loss = cross_entropy(x, target, ignore_index=3, reduction=reduction)
        assert torch.equal(loss.detach().isnan(), torch.full_like(loss, expected).isnan())
        assert reduction == "mean" or (loss == 0).all()
        (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
        assert (dx == 0).all()
    empty = torch.empty(0, width, device=DEVICE)
    assert cross_entropy(empty, target[:0]).isnan() and cross_entropy(empty, target[:0], reduction="sum") == 0


@pytest.mark.parametrize("width", [5, 9000])
def test_special_values_as_torch(width):
    x = torch.randn(9, width, device=DEVICE)
    x[0, 3], x[1, 1], x[2, :2], x[3], x[4, 1:] = float("nan"), float("inf"), -float("inf"), -float("inf"), -3e38
    x[5], x[6], x[7, 2] = torch.finfo(FP32).min, 1e30, -float("inf")
    target = torch.tensor([2, 2, 2, 2, 2, 2, 2, 2, width - 1], device=DEVICE)
    for options in ({}, dict(label_smoothing=0.1)):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        functions = (cross_entropy, torch.nn.functional.cross_entropy)
        found, expected = (f(t, target, reduction="none", **options) for f, t in zip(functions, leaves, strict=True))
        near = slice(None, 5 if options else 7)  # sums over the following rows have no digits left, or overflow
        torch.testing.assert_close(found[near], expected[near], equal_nan=True)
        torch.testing.assert_close(found[7:], expected[7:])
        found, expected = (
            torch.autograd.grad(y[-1:], t, torch.ones(1, device=DEVICE))[0]
            for y, t in zip((found, expected), leaves, strict=True)
        )
        torch.testing.assert_close(found[-1], expected[-1])


def test_targets_that_are_no_class():
    x, target = numbers((4, 40), FP32), torch.tensor([1, 40, -1, 2**33 + 5], device=DEVICE)
    loss = cross_entropy(x, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, True]
    with pytest.raises(IndexError, match=r"target 40 is neither in \[0, 40\) nor ignore_index=-100"):
        cross_entropy(x, target, debug=True)


def test_strides():
    wide = numbers((6, 3, 100), FP32)
    for x in (wide[::2, :, 3:75], wide.permute(2, 0, 1), wide[:, :1].expand(6, 4, 100), wide[:, :, ::2]):
        target = targets(x.shape[:-1], x.shape[-1])
        check(x.detach().requires_grad_(), target, reduction="none")
    # what lies between the rows of a gradient in place stays
    memory = torch.randn(6, 100, device=DEVICE)
    x, target = memory[:, :72], targets((6,), 72)
    between, logits = memory[:, 72:].clone(), x.detach().requires_grad_().view_as(x)
    exact = x.detach().clone().double().requires_grad_()
    (expected,) = torch.autograd.grad(cross_entropy_torch(exact, target)[0], exact)
    (dx,) = torch.autograd.grad(cross_entropy(logits, target, inplace_backward=True), logits)
    assert dx.data_ptr() == memory.data_ptr() and relative_error(dx, expected) < BOUNDS[FP32]
    assert torch.equal(memory[:, 72:], between)
    # elements that share memory cannot be written, and a leaf keeps its values
    row = torch.randn(72, device=DEVICE, requires_grad=True)
    for logits in (row.expand(6, 72), x.detach().requires_grad_()):
        (dx,) = torch.autograd.grad(cross_entropy(logits, target, inplace_backward=True), logits)
        assert dx.data_ptr() != logits.data_ptr()


def test_a_second_backward_after_one_in_place_is_refused():
    x, target = numbers((4, 40), FP32), targets((4,), 40)
    loss = cross_entropy(x * 1, target, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_only_the_lse_has_a_gradient():
    x = numbers((4, 40), FP32)
    for reduction in ("mean", "none"):
        _, lse = cross_entropy(x, targets((4,), 40), reduction=reduction, return_lse=True)
        (dx,) = torch.autograd.grad(lse.sum(), x)
        torch.testing.assert_close(dx, torch.softmax(x, -1))


# widths; dtypes of logits and targets; options
SORTS = [
    ((40, 57, 64), BF16, torch.int64, EVERYTHING),
    ((100, 121, 128), FP32, torch.int32, dict(label_smoothing=0.2)),
    ((1, 2, 7, 16), FP32, torch.int64, {}),
    ((500, 512), FP16, torch.int64, dict(softcap=4.0)),
    ((1000, 1024), BF16, torch.int32, dict(lse_square_scale=0.01)),
    ((3000, 4096), FP16, torch.int64, dict(label_smoothing=0.2, softcap=4.0)),
    ((9000, 12000), BF16, torch.int64, {}),
    ((33000, 65536, 100_001), BF16, torch.int64, EVERYTHING),
]


@seeds
def test_random(seed):
    """A cross entropy, and often the softmax of as many logits."""
    draw, (widths, dtype, of_targets, options) = drawn(seed, SORTS)
    width = draw.choice(widths)
    most = 2 if width > 2000 else 12
    rows = draw.choice([(), (draw.randint(0, most),), (draw.randint(1, most),), (draw.randint(1, 2), most // 2)])
    if draw.random() < 0.5:
        check_softmax(numbers((*rows, width), dtype), out_dtype=draw.choice([dtype, FP32]))
    reduction = draw.choice(["mean", "sum", "none"] if 0 not in rows else ["sum", "none"])
    others = dict(return_lse=draw.random() < 0.5, inplace_backward=draw.random() < 0.5)
    target = targets(rows, width, of_targets, ignored=draw.choice([0.0, 0.5]))
    check(numbers((*rows, width), dtype), target, reduction=reduction, **others, **options)


def test_the_same_bits_in_every_run():
    x = numbers((on_gpu_or_simulated(70000, 70), 48), BF16)
    target = targets(x.shape[:1], 48)
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append([*check(x, target, **EVERYTHING), *check_softmax(x)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
