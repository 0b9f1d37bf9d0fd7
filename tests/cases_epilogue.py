"""What the tests of users' epilogues of `gemm` share: a function with an operand of each kind, and its reference."""

import torch
import triton

from tests.cases_gemm import BF16, FP8, FP8_SUMS, FP32_SUMS, HALF_SUBNORMAL, HALF_ULP, randn
from tritonkittens.kernels.gemm import gemm_torch


@triton.jit
def scaled(acc, scale, shift, added, alpha):
    return (acc * scale + shift) * alpha + added


def near(out, ref, inexact):
    """Is every element within one rounding of the float64 reference, beside what it may be `inexact` before?"""
    ref = ref.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max) if out.dtype in FP8 else ref
    error = (out.cpu().double() - ref).abs()
    bound = HALF_ULP[out.dtype] * ref.abs() + inexact + HALF_SUBNORMAL.get(out.dtype, 0) + 1e-9
    return out.shape == ref.shape and bool((error <= bound).all())


def sums_of(a, b, **scaling):
    """The sums in float64, and what those of a kernel may be off by."""
    host = {name: x.cpu() for name, x in scaling.items()}
    a, b = a.cpu(), b.cpu()
    exact = gemm_torch(a, b, **host)
    return exact, (FP8_SUMS if a.dtype in FP8 else FP32_SUMS) * gemm_torch(a.double().abs(), b.double().abs(), **host)


def operands_of(m, n, dtype=BF16, out=BF16, batch=()):
    """What `scaled` takes: an operand for each row, for each column, for each element, and a number."""
    return dict(
        scale=randn(m, 1, dtype=dtype), shift=randn(n, dtype=dtype), added=randn(*batch, m, n, dtype=out), alpha=1.5
    )


def reference(sums, off, scale, shift, added, alpha):
    """`scaled` of the sums, and what may be off: rounding in fp32 counts with the terms' magnitudes."""
    scale, shift, added = (x.double().cpu() for x in (scale, shift, added))
    ref = (sums * scale + shift) * alpha + added
    return ref, (
        (off * scale.abs() + FP32_SUMS * shift.abs()) * abs(alpha)
        + FP32_SUMS * (added.abs() + (sums * scale * alpha).abs())
    )
