"""What the tests of the matrix product share: operands of every kind, and a bound for every element of a result."""

from dataclasses import replace

import pytest
import torch

from tests.util import DEVICE, on_gpu_or_simulated
from tritonkittens.kernels.gemm import Config, Problem, gemm_torch
from tritonkittens.kernels.gemm.reference import epilogue

BF16, FP16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
# the largest relative error of one rounding
HALF_ULP = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24, E4M3: 2.0**-4, E5M2: 2.0**-3}
# half the distance of the smallest values, where it matters
HALF_SUBNORMAL = {FP16: 2.0**-25, E4M3: 2.0**-10, E5M2: 2.0**-17}
# error of the tensor cores' sums, of the sum of magnitudes: fp32, and fp8's 14 bits
FP32_SUMS, FP8_SUMS = 2.0**-18, 2.0**-12
NO_OPERANDS = (None,) * 5  # bias, gate, residual, scale_a, scale_b
STEEPEST = 1.13  # slope of the activations
APPROXIMATION = 2.0**-17  # of the activations, of their argument


def short(config):
    """The configuration; in the simulator with a ring of two slots unless it says of how many: Triton's analyses of
    shared memory take time for every byte."""
    return on_gpu_or_simulated(config, config if config is None or config.stages else replace(config, stages=2))


# Kernels of each kind that compile and simulate quickly: what a test of operands runs beside the configuration that is
# chosen by default.
SMALL = short(Config(consumers=1, tile_n=64))
KINDS = {
    "small": SMALL,
    "two consumers": Config(tile_n=64),
    "cluster": Config(consumers=1, tile_n=64, cluster=2),
    "pingpong": Config(tile_n=64, pingpong=True),
    "wide": Config(consumers=1, tile_n=48),
    "sub-tiles": Config(consumers=1, tile_n=128, epilogue_n=32),
    "sub-tiles, pingpong": Config(tile_n=64, pingpong=True, epilogue_n=32),
    "deferred": Config(tile_n=64, epilogue_n=16, deferred_epilogue=True),
    "deferred, split_tail": Config(tile_n=64, epilogue_n=32, cluster=2, schedule="split_tail", deferred_epilogue=True),
    "streamed": Config(tile_n=64, pingpong=True, epilogue_n=32, streamed=True),
    "streamed, cluster": Config(consumers=1, tile_n=64, cluster=2, streamed=True),
    "streamed, wide": Config(consumers=1, tile_n=48, streamed=True),
    "swap_ab": Config(consumers=1, tile_n=32, swap_ab=True),
    "split_k": Config(consumers=1, tile_n=64, schedule="split_k", splits=2),
    "cluster_split_k": Config(consumers=1, tile_n=64, schedule="cluster_split_k", splits=2),
    "split_tail": Config(consumers=1, tile_n=64, schedule="split_tail"),
    "stream_k": Config(consumers=1, tile_n=64, schedule="stream_k"),
    "one_per_block": Config(consumers=1, tile_n=64, schedule="one_per_block"),
}
KINDS = {name: short(config) for name, config in KINDS.items()}


def randn(*shape, dtype=BF16):
    """Random values on the device of the tests; fp8 by way of fp32."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def matrix(rows, cols, dtype=BF16, transposed=False):
    """A matrix whose columns (`transposed`) or rows are contiguous."""
    return randn(cols, rows, dtype=dtype).T if transposed else randn(rows, cols, dtype=dtype)


def scales(*shape):
    """Positive fp32 factors about 1."""
    return torch.rand(shape, device=DEVICE) + 0.5


def problem(**fields):
    """A `Problem` of bf16 matrices as PyTorch lays them out, apart from what is given."""
    return Problem(**{**dict(dtype="bf16", out="bf16", a="mk", b="kn", epilogue="", scales="", batch=1), **fields})


def rounded_before(sums, bias=None, activation=None, gate=None, residual=None):
    """Magnitudes of deferred results when they are rounded: before a residual is added, or, times its slope, before an
    activation that nothing else follows; 0 where there is neither."""
    if residual is not None:
        return epilogue(sums, bias, activation, gate).abs()
    if activation is not None and gate is None:
        return STEEPEST * epilogue(sums, bias).abs()
    return torch.zeros_like(sums)


def check(out, a, b, what="", deferred_epilogue=False, **operands):
    """Every element of `gemm(a, b, **operands)` within its own bound of float64; operands as of `gemm_torch`.
    `deferred_epilogue`: may results have been rounded before a residual was added or, where nothing else follows, the
    activation applied, as in torch's own sequence of operations?"""
    host = {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in operands.items() if v is not None}
    a, b, out = a.detach().cpu(), b.detach().cpu(), out.detach().cpu()
    scaling = {k: v for k, v in host.items() if k.startswith("scale")}
    behind = {k: v for k, v in host.items() if k not in scaling}
    sums = gemm_torch(a, b, **scaling)
    ref = epilogue(sums, **behind)
    magnitude = gemm_torch(a.double().abs(), b.double().abs(), **scaling)
    magnitude = STEEPEST * (magnitude + host["bias"].double().abs() if "bias" in host else magnitude)
    magnitude = magnitude * host["gate"].double().abs() if "gate" in host else magnitude
    magnitude = magnitude + host["residual"].double().abs() if "residual" in host else magnitude
    if out.dtype in FP8:
        ref = ref.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max)
    inexact = (FP8_SUMS if a.dtype in FP8 else FP32_SUMS) + (APPROXIMATION if "activation" in host else 0)
    magnitude_before = rounded_before(sums, **behind) if deferred_epilogue else 0
    bound = (
        HALF_ULP[out.dtype] * (ref.abs() + magnitude_before)
        + inexact * magnitude
        + HALF_SUBNORMAL.get(out.dtype, 0)
        + 1e-9
    )
    assert out.shape == ref.shape, f"{what}: shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    error = (out.double() - ref).abs()
    wrong = ~(error <= bound)  # also where NaN
    if wrong.any():
        first, worst = wrong.nonzero()[0].tolist(), error[wrong].max().item()
        kinds = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in host.items()}
        pytest.fail(
            f"{what} {a.dtype} {tuple(a.shape)} by {tuple(b.shape)} {kinds}: {int(wrong.sum())} of {wrong.numel()} "
            f"elements, first at {first}, "
            f"worst off by {worst:.3g}"
        )
