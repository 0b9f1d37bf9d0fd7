"""Thousands of random attentions against float64, forward and gradients. A sort is one kernel of each kind, whatever
the extents."""

import pytest
import torch

from tests.gpu.test_attention_gpu import check, operands
from tests.gpu.test_attention_grad_gpu import check as check_gradients
from tests.gpu.test_attention_grad_gpu import leaves
from tritonkittens.kernels.attention import backward_plan

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
SORTS = [  # D, D_v, dtype, what a query sees
    (64, 64, BF16, "all"),
    (64, 64, BF16, "causal"),
    (64, 64, FP16, "window"),
    (64, 64, BF16, "causal soft-cap"),
    (64, 128, BF16, "causal"),
    (128, 128, BF16, "all"),
    (128, 128, BF16, "causal"),
    (128, 128, FP16, "causal"),
    (128, 128, BF16, "window"),
    (128, 128, FP16, "soft-cap"),
    (96, 96, BF16, "all"),
    (96, 96, FP16, "causal"),
    (48, 48, BF16, "causal"),
    (112, 112, BF16, "window"),
    (16, 16, BF16, "all"),
    (192, 128, BF16, "all"),
    (192, 128, BF16, "causal"),
    (192, 192, BF16, "causal soft-cap"),
    (256, 256, BF16, "causal"),
    (256, 256, FP16, "all"),
    (208, 240, BF16, "window"),
]
PROBLEMS, LARGEST = 100, 1500  # of each sort; queries or keys
# one of so many; a gradient of fewer queries or keys may be nothing but what rounding the output leaves
WITH_GRADIENTS, FEWEST = 4, 8


def extent(rng):
    """Log-uniform from 1 to LARGEST."""
    return round(LARGEST ** rng.random())


@pytest.mark.parametrize("sort", SORTS, ids=str)
def test_random_attentions(sort, rng, monkeypatch):
    dim, value_dim, dtype, sees = sort
    for number in range(PROBLEMS):
        batch, kv_heads, group = (int(x) for x in rng.integers(1, 4, 3))
        queries, keys = extent(rng), extent(rng)
        given = dict(
            causal="causal" in sees,
            softcap=4.0 if "soft-cap" in sees else None,
            scale=float(rng.uniform(0.2, 1.5)) * dim**-0.5,
        )
        if sees == "window":
            given["window"] = tuple(int(x) for x in rng.integers(0, keys + 1, 2))
        print(batch, kv_heads, group, queries, keys, given)
        shape = (batch, kv_heads * group, kv_heads, queries, keys, dim, value_dim, dtype)
        check(*operands(*shape), **given)
        if number % WITH_GRADIENTS == 0 and min(queries, keys) >= FEWEST:
            monkeypatch.setattr(backward_plan, "worth_sums", lambda *_, one=bool(rng.integers(2)): one)
            check_gradients(*leaves(*shape), deterministic=bool(rng.integers(2)), **given)
