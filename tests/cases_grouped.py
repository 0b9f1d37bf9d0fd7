"""What tests of grouped products share: operands, groups, and a bound for every element of a result."""

import torch

from tests.cases_gemm import (
    APPROXIMATION,
    FP8_SUMS,
    FP32_SUMS,
    HALF_SUBNORMAL,
    HALF_ULP,
    STEEPEST,
    matrix,
    randn,
    scales,
)
from tests.cases_gemm import FP8 as FP8_TYPES
from tests.util import DEVICE
from tritonkittens.kernels.gemm.reference import BLOCK
from tritonkittens.kernels.grouped_gemm import grouped_gemm_torch
from tritonkittens.kernels.grouped_gemm.checks import GATED
from tritonkittens.kernels.grouped_gemm.reference import rows_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Group sizes: none, one, empty ones first and last, one with everything, more than a warp has lanes
SIZES = {
    "ragged": [100, 0, 37, 64, 1],
    "one": [130],
    "empty": [0, 0, 70, 0],
    "nothing": [0, 0],
    "many": [n % 3 for n in range(40)],
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


def epilogue(names, rows, groups, n, dtype=BF16):
    """Operands of an epilogue, by name."""
    shapes = dict(bias=(groups, n), gate=(rows,), residual=(rows, n), scale_a=(rows, 1), scale_b=(groups, n))
    kinds = dict(residual=dtype, scale_a=FP32, scale_b=FP32)
    return {name: randn(*shapes[name], dtype=kinds.get(name, BF16)) for name in names}


def block_scales(rows, groups, n, k):
    """Scales of blocks of a (rows × k) and of b (groups × k × n), by name."""
    blocks = -(-k // BLOCK)
    return dict(scale_a=scales(rows, blocks), scale_b=scales(groups, blocks, -(-n // BLOCK)))


def check(out, kind, a, b, ends, deferred=False, **given):
    """Every element of a group's result within its own bound of float64. `deferred`: results are rounded before an
    activation or a residual."""
    given = {name: x.detach().cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    a, b, ends, out = (t.detach().cpu() for t in (a, b, ends, out))

    def reference(a, b, **given):
        return grouped_part(grouped_gemm_torch(a, b, ends, **given), kind, ends)

    ref = reference(a, b, **given)
    scales = {name: x.abs() for name, x in given.items() if "scale" in name}
    rest = {name: x for name, x in given.items() if "scale" not in name and name != "activation"}
    slope = STEEPEST if "activation" in given else 1
    if given.get("activation") in GATED:  # errors of both factors, each times the other
        slope, scales = 2 * STEEPEST, dict(activation=given["activation"])
    magnitude = slope * reference(a.double().abs(), b.double().abs(), **scales, **{n: x.abs() for n, x in rest.items()})
    sums = FP8_SUMS if a.dtype in FP8_TYPES else FP32_SUMS
    bound = HALF_ULP[out.dtype] * (ref.abs() + (2 * magnitude if deferred else 0)) + HALF_SUBNORMAL.get(out.dtype, 0)
    bound = bound + (sums + APPROXIMATION * ("activation" in given)) * magnitude + 1e-9
    error = (grouped_part(out, kind, ends).double() - ref).abs()
    assert error.shape == ref.shape == bound.shape and (error <= bound).all(), f"off by {error.max()}"


def selected(sizes, tokens, n, k, rest=5, dtype=BF16):
    """(a, b, ends, rows, out_rows): numbers of rows that a has several times or not, and of the result's, some outside
    of it, which has `rest` more than the product."""
    total = sum(sizes) + rest
    rows = torch.randint(-3, tokens + 5, (total,), dtype=torch.int32, device=DEVICE)
    out_rows = torch.randperm(total + rest + 6, dtype=torch.int32, device=DEVICE)[:total] - 3
    _, b, ends = operands("rows", sizes, 0, n, k, dtype, b_nk=True)
    return randn(tokens, k, dtype=dtype), b, ends, rows, out_rows


def check_selected(out, a, b, ends, rows, out_rows=None, **given):
    """The rows of groups, in their places; other rows of `out` are poison."""
    a, count = (a if rows is None else rows_of(a, rows)), int(ends[-1])
    found = out
    if out_rows is not None:
        written = out_rows[:count][(out_rows[:count] >= 0) & (out_rows[:count] < out.shape[0])].long()
        untouched = torch.ones(out.shape[0], dtype=torch.bool, device=out.device).index_fill(0, written, False)
        assert out[untouched].isnan().all()
        inside = (out_rows >= 0) & (out_rows < out.shape[0])
        exact = grouped_gemm_torch(a, b, ends, **given).to(out.dtype)
        found = torch.where(inside[:, None], rows_of(out, out_rows), exact)
    check(found, "rows", a, b, ends, **given)
