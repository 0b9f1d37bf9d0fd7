"""What the operators choose for random problems compiles for chips with tensor memory."""

import numpy as np
import pytest
import torch

from tests.util import slow
from tritonkittens.arch import GPUS
from tritonkittens.kernels.attention import attention
from tritonkittens.kernels.gemm import gemm
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded

B200 = Device.of_gpu(GPUS["B200"])
E4M3 = torch.float8_e4m3fn
SHARE = 10  # problems of a case


def compiled(call):
    """The PTX of every kernel that `call()` launches on a B200."""
    return [launch.compile(100).asm["ptx"] for launch in recorded(call, B200)]


def extent(rng, most):
    """A whole number up to `most`, as often below its root as above."""
    return int(most ** rng.uniform())


def empty(rows, cols, dtype, transposed):
    return torch.empty(cols, rows, dtype=dtype).T if transposed else torch.empty(rows, cols, dtype=dtype)


def product(rng):
    """(a, b, options) of a random product: two of three are of operands that TMA can address."""
    m, n, k = (extent(rng, 12000) for _ in range(3))
    dtype = [torch.bfloat16, torch.float16, E4M3][rng.integers(3)]
    if dtype == E4M3 or rng.random() < 2 / 3:
        m, n, k = (-(-x // 16) * 16 for x in (m, n, k))
    transposed = (False, True) if dtype == E4M3 else tuple(rng.random(2) < 0.5)
    wide = torch.bfloat16 if dtype == E4M3 else dtype
    options = dict(out_dtype=wide)
    if rng.random() < 0.3:
        options["bias"] = torch.empty(n, dtype=wide)
    if rng.random() < 0.3:
        options["residual"] = torch.empty(m, n, dtype=wide)
    if rng.random() < 0.3:
        options["activation"] = ["gelu", "silu"][rng.integers(2)]
    return empty(m, k, dtype, transposed[0]), empty(k, n, dtype, transposed[1]), options


@pytest.mark.parametrize("share", [0, *(slow(i) for i in range(1, 20))])
def test_random_products(share):
    rng = np.random.default_rng(share)
    for _ in range(SHARE if share else 4):
        a, b, options = product(rng)
        assert all(".target sm_100a" in ptx for ptx in compiled(lambda: gemm(a, b, **options))), (a.shape, b.shape)


@pytest.mark.parametrize("share", [0, *(slow(i) for i in range(1, 6))])
def test_random_attentions(share):
    rng = np.random.default_rng(share)
    for _ in range(SHARE if share else 1):
        dim = int(rng.choice([32, 64, 96, 128, 192, 256]))
        heads, group = int(rng.integers(1, 9)), int(rng.choice([1, 2, 4]))
        sizes = [extent(rng, 4096) for _ in range(2)]
        dtype = [torch.bfloat16, torch.float16][rng.integers(2)]
        q = torch.empty(2, heads * group, sizes[0], dim, dtype=dtype, requires_grad=True)
        k, v = (torch.empty(2, heads, sizes[1], dim, dtype=dtype, requires_grad=True) for _ in range(2))
        causal = bool(rng.random() < 0.5)

        def both_ways():
            attention(q, k, v, causal=causal).sum().backward()

        assert compiled(both_ways), (q.shape, k.shape)
