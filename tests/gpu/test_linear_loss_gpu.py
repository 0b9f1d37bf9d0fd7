"""Linear layers with cross entropy against float64, forward and backward, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_loss import BF16, FP16, check_linear, numbers, poisoned, targets
from tests.util import DEVICE, bytes_at_once, crossed, drawn, on_gpu_or_simulated, relative_error, seeds, slow
from tritonkittens.kernels.loss import config, linear, linear_cross_entropy

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.fixture(autouse=True)
def poison_in_results(monkeypatch):
    poisoned(monkeypatch)


def operands(tokens, features, classes, dtype=BF16, bias=False):
    shape = tokens if isinstance(tokens, tuple) else (tokens,)
    x, weight = numbers((*shape, features), dtype), numbers((classes, features), dtype, 2.0 / features**0.5)
    return (x, weight, targets(shape, classes), numbers((classes,), dtype) if bias else None)


def in_chunks(monkeypatch, tokens):
    """At most so many tokens are a chunk, whatever memory that takes."""
    monkeypatch.setattr(linear, "chunk_tokens", lambda count: tokens)


@pytest.mark.parametrize("chunk, reduction", crossed([16, 40, 24, 8], ["mean", "sum", "none"]))
def test_chunks(monkeypatch, chunk, reduction):
    """One chunk, two of which the last is not whole, three and five of which middle ones add to a sum."""
    in_chunks(monkeypatch, chunk)
    check_linear(*operands(40, 64, 200, bias=chunk == 16), reduction=reduction, lse_square_scale=1e-3)


@pytest.mark.parametrize(
    "tokens, features, classes, dtype",
    [(1, 8, 2, BF16), ((2, 3), 40, 75, FP16), slow((), 64, 72, BF16), slow(33, 7, 130, BF16), slow(16, 64, 9001, FP16)],
    ids=str,
)
def test_shapes(tokens, features, classes, dtype):
    check_linear(*operands(tokens, features, classes, dtype, bias=True), label_smoothing=0.1, softcap=4.0)


def test_frozen_operands():
    for frozen in range(3):
        x, weight, target, bias = operands(40, 64, 200, bias=True)
        (x, weight, bias)[frozen].requires_grad_(False)
        check_linear(x, weight, target, bias)
    with torch.no_grad():
        check_linear(*(t.detach() for t in operands(40, 64, 200)[:3]))


def test_no_tokens_and_none_that_count():
    x, weight, target, _ = operands(0, 32, 72)
    loss = linear_cross_entropy(x, weight, target)
    assert loss.isnan() and all((t == 0).all() for t in torch.autograd.grad(loss, [x, weight]))
    x, weight, target, _ = operands(40, 64, 200)
    loss = linear_cross_entropy(x, weight, torch.full_like(target, -100))
    assert loss.isnan() and all((t == 0).all() for t in torch.autograd.grad(loss, [x, weight]))


def test_more_than_one_backward():
    """Each scales the gradients of the forward anew."""
    x, weight, target, _ = operands(40, 64, 200)
    loss = linear_cross_entropy(x, weight, target, reduction="sum")
    found = [torch.autograd.grad(loss * k, [x, weight], retain_graph=True) for k in (1.0, 3.0, 1.0)]
    for once, thrice, again in zip(*found, strict=True):
        torch.testing.assert_close(thrice, 3 * once, rtol=1e-2, atol=1e-6)
        assert torch.equal(once, again)
    loss.backward()
    assert torch.equal(x.grad, found[0][0])


@pytest.mark.parametrize("transposed", [False, slow(True)])
def test_strides(transposed):
    x, weight, target, _ = operands(40, 64, 200)
    if transposed:
        x, weight = (t.detach().T.contiguous().T.requires_grad_() for t in (x, weight))
    else:
        x = numbers((40, 80), BF16).detach()[:, 8:72].requires_grad_()
    check_linear(x, weight, target)


def test_sums_over_chunks_are_rounded_once_a_chunk(monkeypatch):
    x, weight, target, _ = operands(40, 64, 200)
    found = []
    for tokens in (8, 40):
        in_chunks(monkeypatch, tokens)
        found.append(torch.autograd.grad(linear_cross_entropy(x, weight, target), weight)[0].double())
    assert relative_error(*found) < 5**0.5 * 2**-9


def test_tokens_of_chunks():
    tokens = config.TOKENS
    assert [linear.chunk_tokens(n) for n in (0, 5, tokens)] == [1, 5, tokens]
    assert linear.chunk_tokens(tokens + 1) == 2176  # two alike, multiples of 128
    assert linear.chunk_tokens(3 * tokens) == tokens


@pytest.mark.skipif(DEVICE == "cpu", reason="memory of a GPU")
@pytest.mark.parametrize("tokens", [2048, 8192, 16384])
def test_memory(tokens):
    features, classes = 1024, 32768
    x, weight, target, _ = operands(tokens, features, classes)

    def run():
        linear_cross_entropy(x, weight, target).backward()

    run()
    x.grad = weight.grad = None
    given = 2 * features * (tokens + classes)
    assert bytes_at_once(run) - given < 1.01 * 2 * classes * config.TOKENS


# features, classes, dtype, bias, options
SORTS = [
    (40, 72, BF16, False, dict(label_smoothing=0.2, reduction="sum")),
    (40, 72, BF16, False, dict(label_smoothing=0.2, reduction="mean")),
    (64, 200, FP16, True, dict(softcap=6.0, reduction="none")),
    (7, 130, BF16, True, dict(lse_square_scale=0.01, reduction="mean")),
    (96, 700, BF16, False, dict(reduction="sum")),
]


@seeds
def test_random(monkeypatch, seed):
    """In one chunk of tokens or several."""
    draw, (features, classes, dtype, bias, options) = drawn(seed, SORTS)
    in_chunks(monkeypatch, draw.choice([16, 64]))
    tokens = draw.choice([draw.randint(2, 40), (draw.randint(2, 5), draw.randint(1, 5)), 16, 33])
    check_linear(*operands(tokens, features, classes, dtype, bias), **options)


def test_repeated_runs(monkeypatch):
    """The same bits, but for sums of products that `gemm` splits on a GPU, whose parts come in any order."""
    in_chunks(monkeypatch, on_gpu_or_simulated(1024, 16))
    given = operands(on_gpu_or_simulated(3000, 40), 64, on_gpu_or_simulated(5000, 200))
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(check_linear(*given))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results, strict=True):
        assert (a != b).float().mean() <= on_gpu_or_simulated(0.05, 0.0)
