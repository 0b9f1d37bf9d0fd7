"""Depth 2 without a template: attention in which the computing warps drive the ring themselves.

One warpgroup computes 64 rows of queries. One thread of it starts the TMA copies; K and V of a block gather on one barrier that expects the sum of their bytes.
The ring is filled with min(stages, blocks) blocks, then every block that was used makes place for the next (steady state), and the last ones drain.
Any number of stages gives the same bits. Run it: `python examples/attention_pipeline.py` (on a Hopper GPU, or in the simulator where there is none).
"""
from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens import sim
from tritonkittens.testing import has_gpu


@triton.jit
def fetch(pipe, ahead, k, v, K, V, batch, head):
    """Start the copies of block number `ahead.count` into stage `ahead.index`."""
    tk.producer_commit(pipe, ahead, (k[ahead.index], v[ahead.index]))
    tk.load_async(k[ahead.index], K, (batch, head, ahead.count, 0), pipe.full[ahead.index])
    tk.load_async(v[ahead.index], V, (batch, head, ahead.count, 0), pipe.full[ahead.index])
    return tk.advance(ahead)


@triton.jit
def attend(pipe, stage, state, q, k, v, length, scale):
    """One block of keys: wait for it, fold it into the running softmax, and leave its stage free for the whole warpgroup."""
    tk.consumer_wait(pipe, stage)
    s = tk.mm_ABt(q, k[stage.index])
    s = tk.right_fill(s, length - stage.count * s.shape[1], float("-inf"))
    p, m, total, alpha = tk.softmax_step(s, state.m, state.total, scale)
    o = tk.mma_AB(tk.cast(p, v.dtype), v[stage.index], tk.mul_row(state.o, alpha))
    tk.sync()  # every warp is done with the stage
    return tk.advance(stage), state.replace(o=o, m=m, total=total)


@tk.kernel
@triton.jit
def attention_kernel(Q, K, V, O, scale, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr):  # noqa: E741
    q = tk.allocate(tk.st(DTYPE, ROWS, DIM))
    k = tk.allocate(tk.st(DTYPE, COLS, DIM), STAGES)
    v = tk.allocate(tk.st(DTYPE, COLS, DIM), STAGES)
    q_full = tk.semaphores(1)
    pipe = tk.pipeline(STAGES, empty_arrivals=0)  # the warps that use a stage fill it again

    batch, head = tk.unravel(tk.block_index(1), tk.extent(Q, 1))
    row = tk.block_index(0)
    length = tk.extent(K, 2)
    blocks = tk.ceil_div(length, COLS)
    tk.expect(q_full[0], q)
    tk.load_async(q, Q, (batch, head, row, 0), q_full[0])

    ahead = tk.pipeline_state(pipe)
    for _ in range(tl.minimum(STAGES, blocks)):
        ahead = fetch(pipe, ahead, k, v, K, V, batch, head)

    scores = tk.rt(tk.fp32, ROWS, COLS)
    state = tk.struct(o=tk.zero(tk.rt(tk.fp32, ROWS, DIM)), m=tk.neg_infty(tk.col_vec(scores)), total=tk.zero(tk.col_vec(scores)))
    stage = tk.pipeline_state(pipe)
    tk.wait(q_full[0], 0)
    for _ in range(blocks - tl.minimum(STAGES, blocks)):  # steady state
        stage, state = attend(pipe, stage, state, q, k, v, length, scale)
        ahead = fetch(pipe, ahead, k, v, K, V, batch, head)
    for _ in range(tl.minimum(STAGES, blocks)):  # drain
        stage, state = attend(pipe, stage, state, q, k, v, length, scale)

    tk.store(q, tk.div_row(state.o, state.total))
    tk.fence_async()
    tk.store_async(O, q, (batch, head, row, 0))
    tk.store_wait()


def tiles(dtype: torch.dtype, dim: int, rows: int = 64, cols: int = 64) -> tuple:
    """The query tile and the key tile."""
    element = tk.from_torch(dtype)
    return tk.st(element, rows, dim), tk.st(element, cols, dim)


def arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, stages: int) -> tuple:
    dim = q.shape[-1]
    mine, theirs = tiles(q.dtype, dim)
    scale = math.log2(math.e) / math.sqrt(dim)
    return tk.gl(q, mine), tk.gl(k, theirs), tk.gl(v, theirs), tk.gl(out, mine), scale, mine.dtype, mine.rows, theirs.rows, dim, stages


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stages: int = 2) -> torch.Tensor:
    """softmax(Q Kᵀ / √D) V; q, k, v: (batch, heads, sequence, D), bf16 or fp16, at least one key."""
    out = torch.empty_like(q)
    grid = (triton.cdiv(q.shape[2], 64), q.shape[0] * q.shape[1])
    attention_kernel[grid](*arguments(q, k, v, out, stages))
    return out


def main() -> None:
    hopper = has_gpu()
    batch, heads, length, dim = (2, 4, 1000, 128) if hopper else (1, 2, 200, 64)
    q, k, v = (torch.randn(batch, heads, length, dim, device="cuda" if hopper else "cpu", dtype=torch.bfloat16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    with contextlib.nullcontext() if hopper else sim.device():
        results = {stages: attention(q, k, v, stages) for stages in (1, 2, 3)}
    for stages, out in results.items():
        error = ((out.double() - expected).norm() / expected.norm()).item()
        print(f"{stages} stages: relative error {error:.1e}, same bits as with 1: {torch.equal(out, results[1])}")


if __name__ == "__main__":
    main()
