"""What tests of FFT convolution share: operands, and comparisons of results and gradients with torch.fft."""

import torch

from tests.util import DEVICE, poison
from tritonkittens.kernels.fft_conv import call_plan, config, fft_conv, fft_conv_torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# tables, signals, spectra and results are each rounded once or twice to a dtype whose steps are 2⁻⁸ and 2⁻¹¹
BOUNDS = {BF16: 6.5e-3, FP16: 8e-4}


def poisoned(monkeypatch):
    """Results, and sums of spectra, have poison where no kernel writes."""
    plan = call_plan.Plan
    monkeypatch.setattr(call_plan, "_plans", {})

    class Poisoned(plan):
        def empty(self, *shape, dtype):
            return poison(super().empty(*shape, dtype=dtype))

    monkeypatch.setattr(call_plan, "Plan", Poisoned)


def small_tiles(monkeypatch, numbers):
    """Transforms of more than so many numbers have outer factors, and those of more than 64 times as many two."""
    monkeypatch.setattr(config, "TILE", numbers)
    monkeypatch.setattr(config, "tables", config.tables.__wrapped__)
    monkeypatch.setattr(call_plan, "tables", config.tables)
    monkeypatch.setattr(call_plan, "_plans", {})


def operands(batch, heads, length, taps, dtype=BF16, gates=0):
    """(u, k, as many gates), of which results have entries about 1."""
    u, *gates = (torch.randn(batch, heads, length, device=DEVICE).to(dtype) for _ in range(1 + gates))
    return u, torch.randn(heads, taps, device=DEVICE, dtype=FP32) / max(taps, 1) ** 0.5, *gates


def near(name, found, expected, bound, *factors):
    """The error beside the result, or beside the product of two factors of the convolution: a transform has the errors
    of all numbers, where a result has a few of them."""
    assert found.shape == expected.shape, name
    error, size = (float(x.norm()) for x in (found.detach().double() - expected.detach(), expected.detach()))
    if factors:
        a, b = (x.detach().double().norm(dim=-1) for x in factors)
        size = max(size, float((a * b).norm()))
    assert error <= bound * size, f"{name}: error {error:.3e} of {size:.3e}"


def check(u, k, *gates, causal=False, gradients=False):
    """Results, and gradients in random directions, against torch.fft in float64. Gates: before, after."""
    leaves = [x.detach().requires_grad_(gradients) for x in (u, k, *gates)]
    exact = [x.detach().double().requires_grad_(gradients) for x in leaves]
    names = ("pre_gate", "post_gate")
    found = fft_conv(*leaves[:2], causal=causal, **dict(zip(names, leaves[2:], strict=False)))
    expected = fft_conv_torch(*exact[:2], causal=causal, **dict(zip(names, exact[2:], strict=False)))
    assert found.dtype == u.dtype and found.is_contiguous()
    factors = len(config.factors_of(config.transform_length(u.shape[-1], causal)))
    bound = BOUNDS[u.dtype] * (0.8 + 0.2 * factors)  # the outer ones round once more on either side
    near("y", found, expected, bound, *(() if gates else (u, k)))
    if gradients:
        direction = torch.randn_like(found)
        ours = torch.autograd.grad(found, leaves, direction)
        theirs = torch.autograd.grad(expected, exact, direction.double())
        factors = [(), (), (), ()] if gates else [(direction, k), (u, direction)]
        names = ("du", "dk", *names)
        for name, leaf, a, b, of in zip(names, leaves, ours, theirs, factors, strict=False):
            assert a.dtype == leaf.dtype
            near(name, a, b, bound, *of)
    return found.detach()


def rounded(x, dtype=BF16):
    return torch.view_as_complex(torch.view_as_real(x).to(dtype).double())


def roots(rows, cols, period):
    return torch.polar(
        torch.ones(len(rows), len(cols), dtype=torch.float64), -2 * torch.pi * torch.outer(rows, cols) / period
    )


def rounded_convolution(x, kf, shift, factors):
    """The circular convolution of complex signals (B, n), whose spectra are at the frequencies k + `shift`, with the
    spectrum `kf`: by the same steps, in float64, with factors and operands rounded."""
    (rows, *others), n = factors, x.shape[1]
    row, col = (torch.arange(m, dtype=torch.float64) for m in (rows, n // rows))
    g, t = rounded(roots(row + shift, row, rows)), rounded(roots(row + shift, col, n), FP16)
    z = rounded(g @ x.view(-1, rows, n // rows) * t)
    kf = kf.view(n // rows, rows).T
    if others:
        parts = [rounded_convolution(z[:, j], kf[j].contiguous(), 0, others) for j in range(rows)]
        z = rounded(torch.stack(parts, 1)).conj()
    else:
        f = rounded(roots(col, col, n // rows))
        z = rounded((z @ f) * rounded(kf)).conj() @ f / (n // rows)
    return (g.T @ rounded(z * t)).conj().flatten(1) / rows
