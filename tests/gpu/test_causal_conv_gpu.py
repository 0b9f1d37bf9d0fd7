"""Causal convolutions against sums in float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_linear_attention import BF16, FP16, FP32, near, starts_of
from tests.util import DEVICE, crossed, drawn, poison, refused, seeds, slow, some_sequences
from tritonkittens.kernels.causal_conv import causal_conv1d, causal_conv1d_operator, causal_conv1d_torch

pytestmark = pytest.mark.usefixtures("kernel_device")
BOUNDS = {BF16: 3e-3, FP16: 4e-4, FP32: 1e-6}


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: poison(empty_like(x)))


def randn(*shape, dtype=FP32):
    return torch.randn(shape, device=DEVICE, dtype=FP32).to(dtype)


def bound(dtype, numbers):
    """Rounding errors of a few numbers may all be the largest."""
    return BOUNDS[dtype] * (1 if numbers.count_nonzero() > 64 else 2)


def check(x, weight, bias=None, cu_seqlens=None, initial_states=None, gradients=False, **options):
    named = dict(x=x, weight=weight, bias=bias, initial_states=initial_states)
    leaves = {n: t.detach().requires_grad_(gradients) for n, t in named.items() if t is not None}
    exact = {n: t.detach().double().requires_grad_(gradients) for n, t in leaves.items()}
    options |= dict(cu_seqlens=cu_seqlens)
    found, expected = causal_conv1d(**leaves, **options), causal_conv1d_torch(**exact, **options)
    rows = expected.shape[-1]
    assert found.dtype == x.dtype and (found.stride(1) == 1) == (x.stride(1) == 1)
    near("y", found[..., :rows], expected, bound(x.dtype, expected))
    if not gradients:
        return []
    direction = torch.randn_like(x.detach()).contiguous()
    grads = torch.autograd.grad(found, list(leaves.values()), direction)
    theirs = torch.autograd.grad(expected, list(exact.values()), direction[..., :rows].double())
    for (name, leaf), a, b in zip(leaves.items(), grads, theirs, strict=True):
        assert a.dtype == leaf.dtype and a.shape == leaf.shape
        # rounded twice; terms are about 1, and cancel where they are few. The sigmoid is as exact as x.
        of_terms = max(0.01 * bound(x.dtype, b), 2e-6)
        near(f"d{name}", a, b, max(1.5 * bound(leaf.dtype, b), of_terms), max(a.numel() ** 0.5, 1e-6))
    return grads


@pytest.mark.parametrize(
    "length, channels, width, kind, transposed",
    crossed(
        [130, 1, 2, 0],
        [72, 1],
        [4, 3, 2, 1],
        [(BF16, FP32, True, True, "silu"), (FP16, FP16, False, True, None), (FP32, BF16, True, False, "swish")],
        [True, False],
    ),
    ids=str,
)
def test_lengths(length, channels, width, kind, transposed):
    """kind: dtypes of x and the weights, whether a bias and states are given, and the activation. transposed: channels
    are next to each other."""
    dtype, of_weights, biased, begins, activation = kind
    x = randn(2, length, channels, dtype=dtype).mT if transposed else randn(2, channels, length, dtype=dtype)
    states = randn(2, channels, width - 1, dtype=dtype) if begins else None
    bias = randn(channels, dtype=of_weights) if biased else None
    weight = randn(channels, width, dtype=of_weights)
    check(x, weight, bias, initial_states=states, activation=activation, gradients=True)


@pytest.mark.parametrize("lengths", [[70, 0, 1, 65, 0], slow([2] * 40), slow([0, 0])], ids=str)
@pytest.mark.parametrize("begins", [True, slow(False)])
def test_packed_sequences(lengths, begins):
    """No sequence sees another, and none the rows after the last."""
    x = randn(1, sum(lengths) + 9, 16, dtype=BF16).mT
    poison(x[..., sum(lengths) :])
    states = randn(len(lengths), 16, 3, dtype=BF16) if begins else None
    dx, *_ = check(
        x, randn(16, 4), randn(16), starts_of(lengths), initial_states=states, activation="silu", gradients=True
    )
    assert not dx[..., sum(lengths) :].any()


# channels, and whether they are next to each other; width; dtypes of x and weights; a bias; activation; gradients
SORTS = [
    (16, True, 4, BF16, FP32, True, "silu", False),
    (5, False, 3, FP16, FP16, False, None, False),
    (16, True, 4, BF16, FP32, True, "silu", True),
    (5, False, 3, FP16, FP16, False, None, True),
    (1, True, 2, FP32, BF16, True, "swish", True),
    (72, False, 4, BF16, BF16, False, "silu", True),
    (40, True, 1, FP16, FP32, True, None, True),
    (72, True, 4, BF16, FP32, True, "silu", True),
]


@seeds
def test_random(seed):
    """Packed sequences or some alike, with states or without."""
    draw, (channels, transposed, width, dtype, of_weights, biased, activation, gradients) = drawn(seed, SORTS)
    batch, rows, lengths = some_sequences(draw)
    x = randn(batch, rows, channels, dtype=dtype).mT
    x = x if transposed else x.contiguous()
    bias = randn(channels, dtype=of_weights) if biased else None
    states = randn(len(lengths or range(batch)), channels, width - 1, dtype=dtype) if seed % 2 else None
    weight, starts = randn(channels, width, dtype=of_weights), starts_of(lengths) if lengths else None
    gradients = gradients and any(lengths or [rows])
    check(x, weight, bias, starts, initial_states=states, activation=activation, gradients=gradients)


def test_numbers_of_sequences(monkeypatch):
    """seq_idx gives what cu_seqlens gives; a sequence ends with its batch."""
    monkeypatch.setattr("tritonkittens.kernels._sequences.MOST_SEQUENCES", 8)
    x, weight = randn(2, 9, 5, dtype=BF16), randn(5, 4)
    numbers = torch.tensor([[0] * 4 + [1] * 5, [1, 2, 2, 2, 2, 2, 2, 7, 7]], dtype=torch.int32, device=DEVICE)
    expected = causal_conv1d_torch(x.flatten(0, 1)[None].mT, weight, cu_seqlens=starts_of([4, 5, 1, 6, 2]))
    for given in (x.mT, x.mT.contiguous()):
        found = causal_conv1d(given, weight, seq_idx=numbers)
        near("y", found, expected.mT.reshape(x.shape).mT, BOUNDS[BF16])
    with refused("causal_conv1d: seq_idx has dtype torch.int64; it must be torch.int32", TypeError):
        causal_conv1d(x.mT, weight, seq_idx=numbers.long())


def test_gradients_of_strided_results():
    """The gradient of a sum has strides 0; the same bits in every run."""
    x, weight = randn(2, 70, 8, dtype=BF16).mT.requires_grad_(), randn(8, 4).requires_grad_()
    first, second = (torch.autograd.grad(causal_conv1d(x, weight).sum(), [x, weight]) for _ in range(2))
    (expected,) = torch.autograd.grad(causal_conv1d_torch(x, weight).sum(), x)
    near("dx", first[0], expected, BOUNDS[BF16])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_operator():
    x, weight = randn(1, 8, 5), randn(8, 4)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        causal_conv1d_operator, (x.mT.contiguous().mT, weight, None, None, None, True), test_utils=tests
    )
    (dx,) = torch.autograd.grad(causal_conv1d(x.requires_grad_(), weight).square().sum(), x, create_graph=True)
    with refused("causal_conv1d has no second derivative", NotImplementedError):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        (dict(x=torch.zeros(3, 5)), ValueError, "causal_conv1d: x is (3, 5); it must be (B, C, L)"),
        (dict(x=torch.zeros(1, 3, 5).double()), TypeError, "causal_conv1d: x has dtype torch.float64; it must be"),
        (dict(x=torch.zeros(1025, 3, 5)), ValueError, "x is (1025, 3, 5); there may be at most 1024 sequences"),
        (dict(weight=torch.zeros(3, 5)), ValueError, "weight is (3, 5); it must be (3, W), W from 1 to 4"),
        (dict(bias=torch.zeros(2)), ValueError, "causal_conv1d: bias is (2,); it must be (3,)"),
        (dict(cu_seqlens=torch.zeros(1).int()), ValueError, "cu_seqlens (1,); packed sequences have a batch of 1, and"),
        (dict(activation="relu"), ValueError, "activation='relu'; it must be one of (None, 'silu', 'swish')"),
        (dict(initial_states=torch.zeros(1, 3, 2)), ValueError, "initial_states is (1, 3, 2); it must be (1, 3, 3)"),
    ],
    ids=str,
)
def test_errors(changed, kind, message):
    given = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in changed.items()}
    with refused(message, kind):
        causal_conv1d(**dict(x=randn(1, 3, 5), weight=randn(3, 4)) | given)
