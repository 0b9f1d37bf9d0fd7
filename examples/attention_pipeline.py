"""Attention as an explicit kernel, whose computing warps drive the ring themselves.

What this rung teaches: a pipeline without a producer role, and the online softmax. One warpgroup computes 64 rows of
queries. One of its threads starts the TMA copies. K and V of a block gather on one barrier, which expects the sum of
their bytes. The ring is filled with min(stages, blocks) blocks; then each block that was used makes room for the next
one (steady state); the last ones drain. Any number of stages gives the same bits.

Run it: `python examples/attention_pipeline.py` (on a Hopper GPU, or in the simulator where there is none).
"""

import functools
import math

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


@triton.jit
def fetch(pipe, ahead, k, v, K, V, batch, head):
    """Start the copies of block number `ahead.count` into stage `ahead.index`."""
    tk.producer_commit(pipe, ahead, (k[ahead.index], v[ahead.index]))
    tk.load_async(k[ahead.index], K, (batch, head, ahead.count, 0), pipe.full[ahead.index])
    tk.load_async(v[ahead.index], V, (batch, head, ahead.count, 0), pipe.full[ahead.index])
    return tk.advance(ahead)


@triton.jit
def attend(pipe, stage, state, q, k, v, length, scale):
    """Wait for a block of keys, fold it into the running softmax, and leave its stage free for the whole warpgroup."""
    tk.consumer_wait(pipe, stage)
    s = tk.mm_ABt(q, k[stage.index])
    s = tk.right_fill(s, length - stage.count * s.shape[1], float("-inf"))
    p, m, total, alpha = tk.softmax_step(s, state.m, state.total, scale)
    o = tk.mma_AB(tk.cast(p, v.dtype), v[stage.index], tk.mul_row(state.o, alpha))
    tk.sync()  # every warp is done with the stage
    return tk.advance(stage), state.replace(o=o, m=m, total=total)


@tk.kernel
@triton.jit
def attention_kernel(Q, K, V, Out, scale, TILE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    q, k, v = tk.allocate(TILE), tk.allocate(BLOCK, STAGES), tk.allocate(BLOCK, STAGES)
    q_full = tk.semaphores(1)
    pipe = tk.pipeline(STAGES, empty_arrivals=0)  # the warps that use a stage fill it again

    batch, head = tk.unravel(tk.block_index(1), tk.extent(Q, 1))
    row = tk.block_index(0)
    length = tk.extent(K, 2)
    blocks = tk.ceil_div(length, BLOCK.rows)
    tk.expect(q_full[0], q)
    tk.load_async(q, Q, (batch, head, row, 0), q_full[0])

    ahead = tk.pipeline_state(pipe)
    for _ in range(tl.minimum(STAGES, blocks)):
        ahead = fetch(pipe, ahead, k, v, K, V, batch, head)

    o, row_values = tk.zero(tk.rt(tk.fp32, TILE.rows, TILE.cols)), tk.col_vec(tk.rt(tk.fp32, TILE.rows, BLOCK.rows))
    state = tk.struct(o=o, m=tk.neg_infty(row_values), total=tk.zero(row_values))
    stage = tk.pipeline_state(pipe)
    tk.wait(q_full[0], 0)
    for _ in range(blocks - tl.minimum(STAGES, blocks)):  # steady state
        stage, state = attend(pipe, stage, state, q, k, v, length, scale)
        ahead = fetch(pipe, ahead, k, v, K, V, batch, head)
    for _ in range(tl.minimum(STAGES, blocks)):  # drain
        stage, state = attend(pipe, stage, state, q, k, v, length, scale)

    tk.store(q, tk.div_row(state.o, state.total))
    tk.fence_async()
    tk.store_async(Out, q, (batch, head, row, 0))
    tk.store_wait()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stages: int = 2) -> torch.Tensor:
    """softmax(q kᵀ / √D) v; q, k, v: (batch, heads, sequence, D), bf16 or fp16, at least one key."""
    out, dim = torch.empty_like(q), q.shape[-1]
    tile = block = tk.st(tk.from_torch(q.dtype), 64, dim)
    tensors = tk.gl(q, tile), tk.gl(k, block), tk.gl(v, block), tk.gl(out, tile)
    grid = (triton.cdiv(q.shape[2], tile.rows), q.shape[0] * q.shape[1])
    attention_kernel[grid](*tensors, math.log2(math.e) / math.sqrt(dim), tile, block, stages)
    return out


def attention_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())


if __name__ == "__main__":
    from _run import cudnn_attention, has_gpu, randn, show

    b, h, s, d = (4, 16, 4096, 128) if has_gpu() else (1, 2, 200, 64)
    operands, peers = [randn(b, h, s, d) for _ in range(3)], {"cuDNN": cudnn_attention}
    for stages in (1, 2, 3):
        ours = functools.partial(attention, stages=stages)
        show(f"{stages} stages", ours, attention_torch, operands, peers=peers, flop=4 * b * h * s * s * d)
