"""`python -m tests.gpu.sanitized GROUP`: the shipped kernels on small inputs, for `compute-sanitizer` to watch; "fault" writes outside its tensor."""

import sys

import torch
import triton
import triton.language as tl

from tests.cases_gemm import BF16, E4M3, KINDS, matrix, randn, scales
from tritonkittens.kernels.attention import attention, attention_decode, attention_varlen
from tritonkittens.kernels.gemm import Config, gemm

PANELS = [Config(rows=128, cols=128, independent=True, panel=32), Config(panel=64), Config(cols=128, panel=16, schedule="split_tail")]


def products():
    for config in [None, *KINDS.values(), *PANELS]:
        m, n, k = 300, 392, 264
        options = {} if config is None else {"config": config}
        gemm(randn(m, k), matrix(k, n, transposed=True), bias=randn(n), gate=randn(n), residual=randn(m, n), activation="gelu", **options)
        gemm(matrix(m, k, transposed=True), randn(k, n), **options)
    for m, n, k in ((1, 4095, 257), (16, 1024, 1024), (129, 127, 255)):
        gemm(randn(m, k), randn(k, n))
    a, b = matrix(300, 512, E4M3), matrix(512, 392, E4M3, True)
    for a_scales, b_scales in (((), ()), ((300, 1), (1, 392)), ((300, 4), (4, 4))):
        gemm(a, b, scale_a=scales(*a_scales), scale_b=scales(*b_scales), out_dtype=BF16, residual=randn(300, 392))


def attentions():
    for head_dim in (64, 128):
        for queries, keys, causal in ((130, 300, False), (300, 300, True), (1100, 1100, False)):
            q, k, v = (randn(1, heads, length, head_dim).requires_grad_() for heads, length in ((4, queries), (2, keys), (2, keys)))
            out = attention(q, k, v, causal=causal)
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        q, k, v = (randn(2, heads, length, head_dim) for heads, length in ((4, 1), (2, 777), (2, 777)))
        attention_decode(q, k, v)
        starts = torch.tensor([0, 5, 5, 200], dtype=torch.int32, device="cuda")
        q, k, v = (randn(200, heads, head_dim).requires_grad_() for heads in (4, 2, 2))
        out = attention_varlen(q, k, v, starts, starts, causal=True)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


@triton.jit
def _write_far_outside(x):
    tl.store(x + (1 << 40), 1.0)


def fault():
    _write_far_outside[(1,)](torch.zeros(1, device="cuda"))


if __name__ == "__main__":
    {"products": products, "attentions": attentions, "fault": fault}[sys.argv[1]]()
    torch.cuda.synchronize()
    print("done")
