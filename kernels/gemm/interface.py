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
    """y = activation((a·b) · scale_a · scale_b + bias), then residual + gate · y, in one kernel.

    Args:
        a, b: (…, M, K) and (…, K, N), both bf16, both fp16, or fp8 (e4m3 and e5m2 may mix). Leading dimensions
            broadcast as in `torch.matmul`. Any strides; no copy is made where one of the last two strides is 1 and the
            other a multiple of 16 bytes (give a transposed matrix as a view: `w.T`). In fp8 K must be contiguous in
            both (`b = w.T` of a contiguous w). Small or skinny products of 16-bit matrices without `config` are not
            copied either: another kernel reads any strides.
        bias: one number or (N,), bf16, fp16 or fp32.
        activation: None, "gelu", "gelu_tanh" or "silu".
        gate: one number, (N,), (M, 1), or the result's shape, bf16, fp16 or fp32.
        residual: the result's shape and dtype.
        scale_a: fp32: one number, (M,) or (M, 1); or (M, ⌈K/128⌉) for blocks of 1×128.
        scale_b: fp32: one number, (N,) or (1, N); or (⌈K/128⌉, ⌈N/128⌉) for blocks of 128×128. Block scales are for two
            fp8 matrices and come together.
        out_dtype: bf16, fp16, fp32, e4m3 or e5m2 (beyond their range: the largest finite value); None: that of a, bf16
            for fp8.
        out: receives the result. In the memory of the residual it is written in place, in that of another operand by a
            copy. Rows that are no multiples of 16 bytes are copied at the end.
        config: a `Config` instead of the tuned one.
        accumulate: "fp32", or "fp16" for the sums of fp16 operands (tasks are not split; no block scales).
        epilogue: an `Epilogue`, a user's function and its operands, in place of an activation.
        tune: call `tune_gemm` first, unless operands of this kind were measured before, in this process, on disk or
            for a shipped table. It has no effect with `config` or `epilogue`, where the kernel of small or skinny
            products computes the call, where torch traces it, in the simulator, and during the capture of a CUDA graph.

    Returns (…, M, N). Sums in fp32; of fp8 as exactly as the tensor cores sum (about 14 bits), with block scales in
    fp32 every 128 of K. The result is rounded once.

    `Config.deferred_epilogue`, which is chosen for large products, rounds twice: the sum first to 16 bits. The
    residual, or a final activation, is applied to the rounded value, as in torch's own sequence of operations.

    Differentiable in a, b, bias, gate and residual, any number of times; under forward-mode differentiation torch's own
    operations compute it, in fp32. torch.compile, make_fx and vmap see the operator `tritonkittens::gemm`. None of
    these can see into an `epilogue`.

    Raises TypeError or ValueError for what does not fit together, a scale that requires a gradient, or an `out` whose
    elements share memory; ArchitectureError on a GPU without TMA.
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
    (see `gemm`). A measurement of an earlier call is repeated. The model's choice is among the candidates, and stays
    unless another one is faster beyond the noise.

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
