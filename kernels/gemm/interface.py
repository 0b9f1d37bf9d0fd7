"""Matrix products for PyTorch tensors: `gemm`, and `tune_gemm`, which measures its configurations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import announce_write, have_memory, is_plain, requires_grad, write
from tritonkittens.kernels._tensors import remember, signature
from tritonkittens.kernels.gemm.autograd import product, product_with
from tritonkittens.kernels.gemm.call_plan import check_chip, computed, described, forget_plans
from tritonkittens.kernels.gemm.checks import Operands, is_empty
from tritonkittens.kernels.gemm.choice import family
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.gemm.device.unaligned import takes
from tritonkittens.kernels.gemm.epilogue import Epilogue


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
    accumulate: str = "fp32",
    epilogue: Epilogue | None = None,
    tune: bool = False,
) -> Tensor:
    """Return residual + gate · activation((a·b) · scale_a · scale_b + bias), computed in one kernel.

    Args:
        a, b: (…, M, K) and (…, K, N), both bf16, both fp16, or fp8 (e4m3 and e5m2 may mix). With block scales also
            float4_e2m1fn_x2, K/2 bytes. Leading dimensions broadcast as in `torch.matmul`. Any strides: give a
            transposed matrix as a view, `w.T`.
        bias, gate: one number or (N,); gate also (M, 1) or the result's shape. bf16, fp16 or fp32.
        activation: None, "gelu", "gelu_tanh" or "silu".
        residual: the result's shape and dtype.
        scale_a, scale_b: fp32: one number, or M and N numbers, for a as (M,) or (M, 1), for b as (N,) or (1, N). Of two
            fp8 matrices also (M, ⌈K/128⌉) and (⌈K/128⌉, ⌈N/128⌉), for blocks of 1×128 and of 128×128. On sm_100a and
            sm_103a also the scales of `quantize_mxfp8` and `quantize_nvfp4`, (…, ⌈M/128⌉, blocks of K, 32, 16) and (…,
            ⌈N/128⌉, blocks of K, 32, 16) or flat: float8_e8m0fnu for 32 numbers of K, or of fp4 also float8_e4m3fn
            for 16.
        out_dtype: bf16, fp16, fp32, e4m3 or e5m2 (beyond their range: the largest finite value); None: that of a, bf16
            for fp8 and fp4.
        out: receives the result. It may be the memory of the residual.
        config: a `Config` instead of the tuned one.
        accumulate: "fp32", or "fp16" for the sums of fp16 operands (tasks are not split; no block scales).
        epilogue: an `Epilogue`, a user's function and its operands, in place of an activation.
        tune: measure configurations first (`tune_gemm`), unless operands of this kind were measured before.

    Returns (…, M, N). Of 16-bit operands it is differentiable in a, b, bias, gate and residual. docs/kernels.md has
    more on copies, precision, tuning and gradients.

    Raises TypeError or ValueError for what does not fit together, a scale that requires a gradient, or an `out` whose
    elements share memory; ArchitectureError on a GPU without TMA. From sm_80 on, another kernel computes small or
    skinny products of operands that TMA cannot address.
    """
    if tune and config is None and epilogue is None:
        _tune_once(a, b, (bias, gate, residual, scale_a, scale_b), activation, out_dtype, out, accumulate)
    if epilogue is not None:
        return product_with(
            epilogue, a, b, (bias, gate, residual, scale_a, scale_b), activation, out_dtype, out, config, accumulate
        )
    if out is None:
        return product(a, b, bias, activation, gate, residual, scale_a, scale_b, out_dtype, config, accumulate)
    operands = (bias, gate, residual, scale_a, scale_b)
    if not is_plain(a, b, *operands, out) or requires_grad(a, b, *operands, out):
        return write(
            "gemm",
            product(a, b, bias, activation, gate, residual, scale_a, scale_b, out_dtype, config, accumulate),
            out,
        )
    announce_write(out)
    return computed(a, b, operands, activation, out_dtype, config, accumulate, out)


def tune_gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tries: int | None = None,
) -> Config:
    """Measure configurations for operands of this kind on their device, keep the fastest on disk, and return it.

    All later calls of `gemm` with such operands use it, but for small or skinny products that another kernel computes
    (docs/kernels.md). A measurement of an earlier call is repeated. The model's choice is among the candidates, and
    stays unless another one is faster beyond the noise.

    Args:
        tries: number of candidates to measure (None: TK_TUNE_TRIES, 12). Other arguments are those of `gemm`.

    Raises what `gemm` raises; ValueError for an empty matrix; RuntimeError in the simulator and during the capture of a
    CUDA graph; KeyboardInterrupt after Ctrl-C, which keeps what was measured.
    """
    product = described(
        a,
        b,
        bias=bias,
        activation=activation,
        gate=gate,
        residual=residual,
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=out_dtype,
    )
    if is_empty(a, b):
        raise ValueError(
            f"tune_gemm: a is {tuple(a.shape)}, b is {tuple(b.shape)}; no kernel multiplies empty matrices, so "
            "there is nothing to measure"
        )
    check_chip(a.device.index)
    operands = (bias, gate, residual, scale_a, scale_b)
    try:
        return family.tune(
            product.problem, product.measurement(a, b, operands), a.device, tries, product.compile_all(a, b, operands)
        )
    finally:
        forget_plans()


_tuned: dict[tuple[Hashable, ...], bool] = {}


def _may_measure(device: torch.device) -> bool:
    return device.type == "cuda" and family.may_measure(device)


def _tune_once(
    a: Tensor,
    b: Tensor,
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    accumulate: str,
) -> None:
    """Measure configurations for operands of this kind, if their kernel has some, none was measured before, and it is
    possible now."""
    if not (is_plain(a, b, *operands, out) and have_memory(a, b, *operands)) or is_empty(a, b):
        return
    if not _may_measure(a.device):
        return
    key = (signature(a, b, *operands, out), activation, out_dtype, accumulate)
    if key in _tuned:
        return
    bias, gate, residual, scale_a, scale_b = operands
    known: dict[str, Any] = dict(bias=bias, activation=activation, gate=gate, residual=residual)
    known |= dict(scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)
    plan = described(a, b, **known, out=out)
    has_configs = accumulate != "fp32" or not takes(a, b, residual, plan.dtype, out)
    if has_configs and not family.is_measured(plan.problem, a.device):
        tune_gemm(a, b, **known)
    remember(_tuned, key, True)
