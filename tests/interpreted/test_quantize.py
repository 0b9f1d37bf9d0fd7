"""Quantisers in Triton's interpreter: bit by bit as their references."""

import pytest
import torch

from tritonkittens.kernels import _tensors
from tritonkittens.kernels.quantize import nvfp4_tensor_scale, nvfp4_tensor_scale_torch, quantize_mxfp8, quantize_nvfp4

from ..cases_quantize import BF16, E4M3, E5M2, FP32, assert_same_bits, check_mxfp8, check_nvfp4, random_bits, signs


@pytest.fixture(autouse=True)
def tensors_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(_tensors, "is_reachable", lambda device: True)


def numbers(kind, shape=(34, 40)):
    x = torch.randn(shape).to(kind)
    x[0, :16], x[1, 3], x[2, 20], x[3] = 0, float("inf"), float("nan"), 1e-39
    return x


@pytest.mark.parametrize("kind", [BF16, FP32], ids=str)
@pytest.mark.parametrize("dtype, scaling", [(E4M3, "up"), (E5M2, "floor")])
def test_mxfp8(kind, dtype, scaling):
    check_mxfp8(quantize_mxfp8, numbers(kind), axes="both", dtype=dtype, scaling=scaling)


@pytest.mark.parametrize("kind", [BF16, FP32], ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_nvfp4(kind, stochastic):
    x = numbers(kind)
    given = dict(random_bits=random_bits(x), hadamard=signs()) if stochastic else {}
    check_nvfp4(quantize_nvfp4, x, torch.tensor(0.01), axes="both", **given)


def test_the_tensor_scale():
    x = torch.randn(130, 30)
    assert_same_bits(nvfp4_tensor_scale(x), nvfp4_tensor_scale_torch(x))
    given = dict(axes="both", hadamard=signs())
    assert_same_bits(nvfp4_tensor_scale(x, **given), nvfp4_tensor_scale_torch(x, **given))
    assert nvfp4_tensor_scale(numbers(BF16)).isnan()
