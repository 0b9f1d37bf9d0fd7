"""Attention prefill against cuDNN (through torch), TFLOP/s, non-causal, 16 K tokens. `python -m bench.attention [--out FOLDER]`."""
from __future__ import annotations

import argparse

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import device_time, interleaved, row, save, show
from tritonkittens.kernels.attention import attention

TOKENS, WIDTH = 16384, 2048
CASES = ((128, 1024), (128, 4096), (128, 16384), (64, 1024), (64, 4096), (64, 16384))


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder for the result file")
    options = parser.parse_args()
    rows = []
    for dim, length in CASES:
        batch, heads = TOKENS // length, WIDTH // dim
        q, k, v = (torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        out = torch.empty_like(q)
        contenders = {"cudnn": lambda: cudnn(q, k, v), "tritonkittens": lambda: attention(q, k, v, out=out)}
        case = f"bf16 D {dim} S {length} B {batch} H {heads}"
        rows.append(row(case, 4 * batch * heads * length * length * dim, interleaved(contenders, device_time), "cudnn", "tritonkittens", "device"))
        show(rows[-1:])
        expected = cudnn(q, k, v).double()
        difference = (out.double() - expected).norm() / expected.norm()
        assert difference < 5e-3, difference
    print(save("attention", rows, options.out))


if __name__ == "__main__":
    main()
