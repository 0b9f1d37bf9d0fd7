"""What tests of grouped products share: operands, groups, and a bound for every element of a result."""

import torch

from tests.cases_gemm import FP32_SUMS, HALF_SUBNORMAL, HALF_ULP, matrix, randn
from tests.util import DEVICE
from tritonkittens.kernels.grouped_gemm import grouped_gemm_torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Group sizes: none, one, empty ones first and last, one with everything, more than a warp has lanes
SIZES = {
    "ragged": [100, 0, 37, 64, 1],
    "one": [130],
    "empty": [0, 0, 70, 0],
    "nothing": [0, 0],
    "many": [n % 5 for n in range(70)],
}


def ends_of(sizes):
    return torch.tensor(sizes, dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)


def batch(count, rows, cols, dtype=BF16, transposed=False):
    x = randn(count, *((cols, rows) if transposed else (rows, cols)), dtype=dtype)
    return x.mT if transposed else x


def operands(kind, sizes, m, n, k, dtype=BF16, a_km=False, b_nk=False, rest=0):
    """(a, b, offsets) with groups of "rows", "depth" or "cols" of these sizes, and `rest` more after the last."""
    total, groups = sum(sizes) + rest, len(sizes)
    if kind == "rows":
        found = matrix(total, k, dtype, a_km), batch(groups, k, n, dtype, b_nk)
    elif kind == "depth":
        found = matrix(m, total, dtype, a_km), matrix(total, n, dtype, b_nk)
    else:
        found = batch(groups, m, k, dtype, a_km), matrix(k, total, dtype, b_nk)
    return (*found, ends_of(sizes))


def grouped_part(x, kind, ends):
    """The part of a result that groups have."""
    last = int(ends[-1])
    return x[:last] if kind == "rows" else x[:, :last] if kind == "cols" else x


def check(out, kind, a, b, ends):
    """Every element of a group's result within its own bound of float64."""
    a, b, ends, out = (t.detach().cpu() for t in (a, b, ends, out))
    ref = grouped_part(grouped_gemm_torch(a, b, ends), kind, ends)
    magnitude = grouped_part(grouped_gemm_torch(a.double().abs(), b.double().abs(), ends), kind, ends)
    error = (grouped_part(out, kind, ends).double() - ref).abs()
    bound = HALF_ULP[out.dtype] * ref.abs() + FP32_SUMS * magnitude + HALF_SUBNORMAL.get(out.dtype, 0) + 1e-9
    assert error.shape == ref.shape == bound.shape and (error <= bound).all(), f"off by {error.max()}"
