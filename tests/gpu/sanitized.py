"""`python -m tests.gpu.sanitized GROUP [PART]`: shipped kernels on small inputs, for `compute-sanitizer` to watch;
"fault" writes outside its tensor, "race" reads what another thread writes."""

import sys

import torch
import triton
import triton.language as tl

from tests.cases_gemm import BF16, E4M3, KINDS, matrix, randn, scales
from tests.util import DEVICE, decode_split, in_pages
from tritonkittens.inline_ptx import shared as ptx_shared
from tritonkittens.kernels.attention import attention, attention_decode, attention_fp8, attention_varlen
from tritonkittens.kernels.attention.num_splits import DecodeSplit
from tritonkittens.kernels.gemm import Config, gemm

ATTENTIONS = [  # heads of queries and of keys, queries, keys, D, D_v, options; of one sequence
    (4, 2, 130, 300, 64, 64, {}),
    (4, 2, 300, 300, 64, 64, dict(causal=True)),
    (4, 2, 130, 300, 128, 128, {}),
    (4, 2, 300, 300, 128, 128, dict(causal=True)),
    (4, 2, 300, 300, 64, 64, dict(deterministic=True)),
    (4, 2, 300, 300, 128, 128, dict(causal=True, deterministic=True)),
    (2, 1, 200, 300, 64, 64, dict(window=(70, 30))),
    (2, 1, 200, 300, 128, 128, dict(softcap=4.0)),
    (2, 2, 200, 300, 192, 128, dict(causal=True)),
    (2, 1, 200, 300, 256, 256, {}),
    (2, 1, 200, 300, 96, 96, {}),
    # so many that dQ is made of the sums that are done
    (48, 48, 1024, 1024, 64, 64, {}),
    (48, 48, 1024, 1024, 128, 128, {}),
]
PARTS = 6  # of `ATTENTIONS`, which compile for long
PANELS = [
    Config(tile_m=128, tile_n=128, pingpong=True, epilogue_n=32),
    Config(epilogue_n=64),
    Config(tile_n=128, epilogue_n=16, schedule="split_tail"),
    Config(epilogue_n=64, cluster=2, schedule="split_tail", deferred_epilogue=True),
    Config(epilogue_n=64, cluster=4, deferred_epilogue=True),
]


def products():
    for config in [None, *KINDS.values(), *PANELS]:
        m, n, k = 300, 392, 264
        options = {} if config is None else {"config": config}
        gemm(
            randn(m, k),
            matrix(k, n, transposed=True),
            bias=randn(n),
            gate=randn(n),
            residual=randn(m, n),
            activation="gelu",
            **options,
        )
        gemm(matrix(m, k, transposed=True), randn(k, n), **options)
    # several tasks a block, whose results wait for the next
    a, b, residual = randn(2500, 600), randn(600, 512), randn(2500, 512)
    for operands in (dict(activation="gelu"), dict(gate=randn(512), residual=residual)):
        gemm(a, b, bias=randn(512), config=Config(tile_n=64, epilogue_n=16, deferred_epilogue=True), **operands)
    gemm(randn(129, 255), randn(255, 127), config=Config())  # operands and result are copied
    for m, n, k in ((1, 4095, 257), (16, 1024, 1024), (129, 127, 255)):
        gemm(randn(m, k), randn(k, n))
    a, b = matrix(300, 512, E4M3), matrix(512, 392, E4M3, True)
    for a_scales, b_scales in (((), ()), ((300, 1), (1, 392)), ((300, 4), (4, 4))):
        gemm(a, b, scale_a=scales(*a_scales), scale_b=scales(*b_scales), out_dtype=BF16, residual=randn(300, 392))


def attentions(part):
    for heads, kv_heads, queries, keys, dim, value_dim, given in ATTENTIONS[int(part) :: PARTS]:
        q, k, v = (
            randn(1, *shape).requires_grad_()
            for shape in ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim))
        )
        out = attention(q, k, v, **given)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def serving():
    for dim in (64, 128):
        q, k, v = (randn(2, heads, length, dim) for heads, length in ((4, 130), (2, 300), (2, 300)))
        attention_fp8(*(x.to(E4M3) for x in (q, k, v)), causal=True)
        q, lengths = randn(2, 4, 1, dim), [300, 70]
        attention_decode(q, k, v)
        for split in (
            DecodeSplit(),
            DecodeSplit(2),
            DecodeSplit(1, 2),
            DecodeSplit(1, 4),
            DecodeSplit(split_rest=True),
        ):
            with decode_split(split):
                attention_decode(q, k, v)
        for page_size in (16, 48):
            k_pool, v_pool, table = in_pages(k, v, lengths, page_size)
            attention_decode(
                q, k_pool, v_pool, lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE), pages=table
            )
        starts = torch.tensor([0, 5, 5, 200], dtype=torch.int32, device=DEVICE)
        for deterministic in (False, True):
            q, k, v = (randn(200, heads, dim).requires_grad_() for heads in (4, 2, 2))
            out = attention_varlen(q, k, v, starts, starts, causal=True, deterministic=deterministic)
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


@triton.jit
def _write_far_outside(x):
    tl.store(x + (1 << 40), 1.0)


def fault():
    _write_far_outside[(1,)](torch.zeros(1, device=DEVICE))


@triton.jit
def _read_at_once(x):
    memory = ptx_shared.allocate(16)
    ptx_shared.store(memory, tl.program_id(0) + 1, tl.int32, issuer="cta")
    tl.store(x + tl.arange(0, 128), ptx_shared.load(memory, tl.int32))


def race():
    _read_at_once[(1,)](torch.zeros(128, dtype=torch.int32, device=DEVICE))


if __name__ == "__main__":
    {"products": products, "attentions": attentions, "serving": serving, "fault": fault, "race": race}[sys.argv[1]](
        *sys.argv[2:]
    )
    torch.cuda.synchronize()
    print("done")
