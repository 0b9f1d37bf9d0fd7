"""The programs of `examples/`: their functions, references and operands of random extents."""

import functools

import torch

from examples import (
    attention,
    attention_pipeline,
    gemm,
    pipelined_gemm,
    rmsnorm,
    rotary,
    row_sums,
    stream_rows,
    tensor_memory_gemm,
    tile_math,
    tma_copy,
)
from examples import grouped_gemm as grouped
from examples import linear_attention as linear

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDED = 1.1 * 2**-8  # a result that is rounded to bf16 once
SUMMED = 5e-3  # operands that a kernel rounds to bf16 in between


def matrix(rng, scale, dtype=BF16):
    """Any rows, columns of multiples of 16 bytes."""
    return [torch.randn(int(rng.integers(1, 100 * scale)), 8 * int(rng.integers(1, 20 * scale))).to(dtype)]


def product(rng, scale, dtype=BF16):
    m = int(rng.integers(1, 300 * scale))
    n, k = (8 * int(rng.integers(1, 40 * scale)) for _ in range(2))
    return [torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)]


def heads(rng, scale, dim=64, tensors=3, dtype=BF16):
    """Tensors (batch, heads, sequence, dim) of equal lengths."""
    shape = int(rng.integers(1, 2 * scale)), int(rng.integers(1, 3)), int(rng.integers(1, 300 * scale)), dim
    return [torch.randn(shape).to(dtype) for _ in range(tensors)]


def queries_and_keys(rng, scale, dim=64):
    q, k = heads(rng, scale, dim, 2)
    k = k[:, :, : int(rng.integers(1, k.shape[2] + 1))].contiguous()
    return [q, k, torch.randn_like(k)]


def flat_heads(rng, scale, dim=64):
    return [x.flatten(0, 1) for x in heads(rng, scale, dim)]


def angles(rng, scale, dim=64, dtype=BF16):
    x = heads(rng, scale, dim, 1, dtype)[0].flatten(0, 1)
    angle = torch.randn(x.shape[1], dim // 2)
    return [x, angle.cos(), angle.sin()]


def experts(rng, scale):
    """Some experts have no rows."""
    counts = torch.from_numpy(rng.integers(1, 150 * scale, size=5) * rng.integers(2, size=5))
    counts[int(rng.integers(5))] = int(rng.integers(1, 150))
    n, k = (8 * int(rng.integers(1, 40 * scale)) for _ in range(2))
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return [torch.randn(int(offsets[-1]), k).to(BF16), torch.randn(5, n, k).to(BF16), offsets]


def norm(rng, scale):
    x, r = torch.randn(2, int(rng.integers(1, 9 * scale)), int(rng.integers(1, 1000))).to(BF16)
    return [x, r, torch.randn(x.shape[1]).to(BF16)]


causal = functools.partial(attention.attention, causal=True)
causal_torch = functools.partial(attention.attention_torch, causal=True)
scaled = functools.partial(stream_rows.scaled_silu, scale=0.7)
scaled_torch = functools.partial(stream_rows.scaled_silu_torch, scale=0.7)
three_stages = functools.partial(attention_pipeline.attention, stages=3)
# Name: (function, reference, operands of a generator and a scale, largest relative error)
EXAMPLES = {
    "tile_math silu": (tile_math.silu, tile_math.silu_torch, matrix, ROUNDED),
    "tile_math softmax": (tile_math.softmax, tile_math.softmax_torch, matrix, ROUNDED),
    "tma_copy": (tma_copy.copy, tma_copy.copy_torch, matrix, 0.0),
    "pipelined_gemm": (pipelined_gemm.gemm, pipelined_gemm.gemm_torch, product, ROUNDED),
    "attention_pipeline": (three_stages, attention_pipeline.attention_torch, queries_and_keys, SUMMED),
    "row_sums": (row_sums.row_sums, row_sums.row_sums_torch, matrix, 1e-6),
    "stream_rows": (scaled, scaled_torch, matrix, ROUNDED),
    "gemm": (gemm.gemm, gemm.gemm_torch, product, ROUNDED),
    "gemm fp16": (gemm.gemm, gemm.gemm_torch, functools.partial(product, dtype=FP16), ROUNDED / 8),
    "attention": (attention.attention, attention.attention_torch, queries_and_keys, SUMMED),
    "attention causal": (causal, causal_torch, functools.partial(heads, dim=128), SUMMED),
    "rmsnorm": (rmsnorm.rmsnorm, rmsnorm.rmsnorm_torch, norm, ROUNDED),
    "rotary": (rotary.rotary, rotary.rotary_torch, angles, ROUNDED),
    "grouped_gemm": (grouped.grouped_gemm, grouped.grouped_gemm_torch, experts, ROUNDED),
    "linear_attention": (linear.linear_attention, linear.linear_attention_torch, flat_heads, SUMMED),
}
BLACKWELL_EXAMPLES = EXAMPLES | {
    "tensor_memory_gemm": (tensor_memory_gemm.gemm, tensor_memory_gemm.gemm_torch, product, ROUNDED)
}
