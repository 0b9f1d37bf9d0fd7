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
SHORT_ERROR = 1.3e-4  # relative, where fp16 rounds by up to 4.9e-4


@triton.jit
def fast_kernel(X, Y, NUMBER: tl.constexpr, WHAT: tl.constexpr):
    i = tl.arange(0, NUMBER)
    x = tl.load(X + i)
    if WHAT == "silu":
        y = tk.silu(x, fast=True)
    elif WHAT == "short":
        y = tk.gelu(x, fast=tk.fp16)
    else:
        y = tk.gelu(x, WHAT, fast=True)
    tl.store(Y + i, y)


def weight(what, x):
    """What the argument is multiplied by."""
    if what == "silu":
        return torch.sigmoid(x)
    if what == "tanh":
        return torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return torch.special.ndtr(x)


@pytest.mark.parametrize("what", ["none", "tanh", "silu"])
def test_error(what):
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 6.4, -6.4, 6.6, -6.6, 50.0, -50.0, 1e4, -1e4, 1e18, -1e18, 3e38, -3e38])
    x = torch.cat([torch.randn(NUMBERS // 2) * 4, torch.randn(NUMBERS // 2 - len(special)), special])
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, what)
    exact = x.double() * weight(what, x.double())
    assert ((y.cpu().double() - exact).abs() <= PHI_ERROR * x.double().abs() + 1e-37).all()


def test_error_of_short_gelu():
    x = torch.cat([torch.linspace(-4, 16, NUMBERS - 6), torch.tensor([0.0, 1e-30, -1e-30, 50.0, 1e18, 3e38])])
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, "short")
    exact = x.double() * weight("short", x.double())
    assert ((y.cpu().double() - exact).abs() <= SHORT_ERROR * exact.abs()).all()


def test_tail_of_short_gelu():
    x = torch.cat([torch.linspace(-40, -4, NUMBERS - 3), torch.tensor([-1e4, -1e18, -3e38])])
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, "short")
    exact = x.double() * weight("short", x.double())
    assert ((y.cpu().double() - exact).abs() <= torch.where(x >= -5, 1e-3, 1.0) * exact.abs() + torch.where(x >= -5, 0, 2e-8)).all()


@pytest.mark.parametrize("what", ["none", "short", "tanh", "silu"])
def test_infinities_and_nan(what):
    x = torch.full((NUMBERS,), math.nan)
    x[1], x[2] = math.inf, -math.inf
    y = poison(torch.empty(NUMBERS, device=DEVICE))
    fast_kernel[(1,)](x.to(DEVICE), y, NUMBERS, what)
    assert y[1] == math.inf and y.cpu().isnan().sum() >= NUMBERS - 2
