"""The fast forms of activations, on the special-function unit, against float64."""

import math

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import DEVICE, poison

pytestmark = pytest.mark.usefixtures("kernel_device")
NUMBERS = 1 << 14
PHI_ERROR = 3e-7
# Of the forms for 16-bit results, by element type: relative error, a quarter to a third of a rounding, from where on;
# relative error from there to −5, absolute beyond.
SHORT = {"fp16": (1.3e-4, -4.0, 1e-3, 2e-8), "bf16": (6.6e-4, -3.3, 0.8, 1.5e-6), "e4m3": (6.6e-4, -3.3, 0.8, 1.5e-6)}
SHORT_SIGMOID = {"short silu": -8.0, "short tanh": -3.0}  # from where on its relative error is a quarter of a rounding
SIGMOID_ERROR = 1.5e-6  # further out, absolute


@triton.jit
def fast_kernel(X, Y, NUMBER: tl.constexpr, WHAT: tl.constexpr):
    i = tl.arange(0, NUMBER)
    x = tl.load(X + i)
    if WHAT == "silu":
        y = tk.silu(x, fast=True)
    elif WHAT == "fp16":
        y = tk.gelu(x, fast=tk.fp16)
    elif WHAT == "bf16":
        y = tk.gelu(x, fast=tk.bf16)
    elif WHAT == "e4m3":
        y = tk.gelu(x, fast=tk.fp8e4m3)
    elif WHAT == "sigmoid":
        y = tk.sigmoid(x, fast=True)
    elif WHAT == "short sigmoid":
        y = tk.sigmoid(x, fast=tk.bf16)
    elif WHAT == "short silu":
        y = tk.silu(x, fast=tk.bf16)
    elif WHAT == "short tanh":
        y = tk.gelu(x, "tanh", fast=tk.bf16)
    else:
        y = tk.gelu(x, WHAT, fast=True)
    tl.store(Y + i, y)


def weight(what, x):
    """What the argument is multiplied by."""
    if what.endswith("silu"):
        return torch.sigmoid(x)
    if what.endswith("tanh"):
        return torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return torch.special.ndtr(x)


@pytest.mark.parametrize("what", ["none", "tanh", "silu"])
def test_error(what):
    special = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 6.4, -6.4, 6.6, -6.6, 50.0, -50.0, 1e4, -1e4, 1e18, -1e18, 3e38, -3e38]
    )
    x = torch.cat([torch.randn(NUMBERS // 2) * 4, torch.randn(NUMBERS // 2 - len(special)), special])
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, what)
    exact = x.double() * weight(what, x.double())
    assert ((y.cpu().double() - exact).abs() <= PHI_ERROR * x.double().abs() + 1e-37).all()


@pytest.mark.parametrize("dtype", SHORT)
def test_error_of_short_gelu(dtype):
    error, least, _, _ = SHORT[dtype]
    x = torch.cat([torch.linspace(least, 16, NUMBERS - 6), torch.tensor([0.0, 1e-30, -1e-30, 50.0, 1e18, 3e38])])
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, dtype)
    exact = x.double() * weight("none", x.double())
    assert ((y.cpu().double() - exact).abs() <= error * exact.abs()).all()


@pytest.mark.parametrize("dtype", SHORT)
def test_tail_of_short_gelu(dtype):
    _, least, relative, absolute = SHORT[dtype]
    x = torch.cat([torch.linspace(-40, least, NUMBERS - 3), torch.tensor([-1e4, -1e18, -3e38])])
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, dtype)
    exact = x.double() * weight("none", x.double())
    assert (
        (y.cpu().double() - exact).abs()
        <= torch.where(x >= -5, relative, 1.0) * exact.abs() + torch.where(x >= -5, 0, absolute)
    ).all()


@pytest.mark.parametrize("what", SHORT_SIGMOID)
def test_error_of_short_sigmoids(what):
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 50.0, -50.0, 1e4, -1e4, 1e12, -1e12, 3e38, -3e38])
    x = torch.cat([torch.linspace(-20, 20, NUMBERS - len(special)), special])
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, what)
    exact = x.double() * weight(what, x.double())
    allowed = torch.where(
        x >= SHORT_SIGMOID[what], 4.9e-4 * exact.abs(), SIGMOID_ERROR * x.double().clamp(-20, 0).abs()
    )
    assert ((y.cpu().double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("what, error", [("sigmoid", PHI_ERROR), ("short sigmoid", 2.5e-4)])
def test_error_of_sigmoids(what, error):
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 50.0, -50.0, 1e4, -1e4, 3e38, -3e38, math.inf, -math.inf])
    x = torch.cat([torch.linspace(-20, 20, NUMBERS - len(special) - 1), special, torch.tensor([math.nan])])
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, what)
    found, exact = y.cpu().double(), torch.sigmoid(x.double())
    assert ((found - exact).abs()[:-1] <= error).all() and found[-1].isnan()


@pytest.mark.parametrize("what", ["none", "fp16", "bf16", "tanh", "silu", *SHORT_SIGMOID])
def test_infinities_and_nan(what):
    x = torch.full((NUMBERS,), math.nan)
    x[1], x[2] = math.inf, -math.inf
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, what)
    assert y[1] == math.inf and y.cpu().isnan().sum() >= NUMBERS - 2
