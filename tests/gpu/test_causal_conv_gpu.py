"""Causal convolutions against sums in float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_linear_attention import BF16, FP16, FP32, near, starts_of
from tests.util import DEVICE, crossed, poison, refused, slow
from tritonkittens.kernels.causal_conv import causal_conv1d, causal_conv1d_operator, causal_conv1d_torch

pytestmark = pytest.mark.usefixtures("kernel_device")
BOUNDS = {BF16: 3e-3, FP16: 4e-4, FP32: 1e-6}


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: poison(empty_like(x)))


def randn(*shape, dtype=FP32):
    return torch.randn(shape, device=DEVICE, dtype=FP32).to(dtype)


def check(x, weight, bias=None, cu_seqlens=None, **options):
    found = causal_conv1d(x, weight, bias, cu_seqlens=cu_seqlens, **options)
    expected = causal_conv1d_torch(x, weight, bias, cu_seqlens=cu_seqlens, **options)
    assert found.dtype == x.dtype and (found.stride(1) == 1) == (x.stride(1) == 1)
    near("y", found[..., : expected.shape[-1]], expected, BOUNDS[x.dtype])


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
    check(x, randn(channels, width, dtype=of_weights), bias, initial_states=states, activation=activation)


@pytest.mark.parametrize("lengths", [[70, 0, 1, 65, 0], slow([2] * 40), slow([0, 0])], ids=str)
@pytest.mark.parametrize("begins", [True, slow(False)])
def test_packed_sequences(lengths, begins):
    """No sequence sees another, and none the rows after the last."""
    x = randn(1, sum(lengths) + 9, 16, dtype=BF16).mT
    states = randn(len(lengths), 16, 3, dtype=BF16) if begins else None
    check(x, randn(16, 4), randn(16), starts_of(lengths), initial_states=states, activation="silu")


def test_operator():
    x, weight = randn(1, 8, 5), randn(8, 4)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        causal_conv1d_operator, (x.mT.contiguous().mT, weight, None, None, None, True), test_utils=tests
    )
    with refused("causal_conv1d has no gradient yet", NotImplementedError):
        causal_conv1d(x.requires_grad_(), weight).sum().backward()


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        (dict(x=torch.zeros(3, 5)), ValueError, "causal_conv1d: x is (3, 5); it must be (B, C, L)"),
        (dict(x=torch.zeros(1, 3, 5).double()), TypeError, "causal_conv1d: x has dtype torch.float64; it must be"),
        (dict(weight=torch.zeros(3, 5)), ValueError, "weight is (3, 5); it must be (3, W), W from 1 to 4"),
        (dict(bias=torch.zeros(2)), ValueError, "causal_conv1d: bias is (2,); it must be (3,)"),
        (dict(activation="relu"), ValueError, "activation='relu'; it must be one of (None, 'silu', 'swish')"),
        (dict(initial_states=torch.zeros(1, 3, 2)), ValueError, "initial_states is (1, 3, 2); it must be (1, 3, 3)"),
    ],
    ids=str,
)
def test_errors(changed, kind, message):
    given = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in changed.items()}
    with refused(message, kind):
        causal_conv1d(**dict(x=randn(1, 3, 5), weight=randn(3, 4)) | given)
