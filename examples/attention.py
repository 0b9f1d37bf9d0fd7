"""Attention from hooks: softmax(Q Kᵀ / √D) V at the speed of cuDNN and above, causal or not.

What this rung teaches: a computation pipelined by one iteration. While a consumer computes the softmax of a block of
keys, the tensor cores multiply: `compute` starts the scores of its block and the product of the block before with V,
and only then computes exponentials. So V is needed one iteration later than K, and has a ring of its own (`lagged`).
With `warp_scheduler_barrier` two consumers take turns: one multiplies while the other computes exponentials.
Source: FlashAttention-3 (Shah et al., 2024), algorithm 2.

Run it: `python examples/attention.py` (on a Hopper GPU, or in the simulator where there is none).
"""

import functools
import math

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class Attention(tk.lcf):
    """A task is a tile of queries of a head, `tile_m` for each consumer; an iteration is a block of `tile_n` keys.

    Blocks go from the last to the first, and only the first iteration masks: with a causal mask the block of a task's
    last key has all of its diagonal. Q, K, V and O are (batch, heads, sequence, dim).
    """

    warp_scheduler_barrier = True
    stages = 2
    dtype: tl.dtype = tk.bf16
    tile_m: int = 64
    tile_n: int = 128
    dim: int = 128
    causal: bool = False

    def layout(self):
        height = self.team * self.tile_m
        if self.causal and self.tile_n % height:
            raise tk.TileError(
                f"Attention(causal=True, tile_n={self.tile_n}): must be a multiple of {height} queries a task"
            )
        q, kv = tk.st(self.dtype, self.tile_m, self.dim), tk.st(self.dtype, self.tile_n, self.dim)
        return tk.layout(
            globals=dict(Q=q, K=kv, V=kv, O=q),
            task=dict(Q=q),
            input=dict(K=kv),
            lagged=dict(V=kv),
            epilogue=dict(O=q),
            args=("scale",),
        )

    def tasks(self, Q: torch.Size, *others: torch.Size) -> int:
        return triton.cdiv(Q[2], self.team * self.tile_m) * Q[0] * Q[1]

    @triton.jit
    def setup(ctx):
        HEIGHT: tl.constexpr = ctx.config.team * ctx.config.tile_m
        heads, keys = tk.extent(ctx.globals.Q, 1), tk.extent(ctx.globals.K, 2)
        tiles, sequences = tk.ceil_div(tk.extent(ctx.globals.Q, 2), HEIGHT), tk.extent(ctx.globals.Q, 0) * heads
        row, sequence = tk.tile_at(ctx.config.order, ctx.task_id, tiles, sequences)
        batch, head = tk.unravel(sequence, heads)
        seen = tl.minimum(keys, (row + 1) * HEIGHT) if ctx.config.causal else keys
        blocks = tk.ceil_div(seen, ctx.config.tile_n)
        more = ctx.task_id < tiles * sequences
        return tk.task(blocks, when=more, edges=1, batch=batch, head=head, row=row, last=blocks - 1, keys=keys)

    @triton.jit
    def load_task(ctx, task):
        row = ctx.row * ctx.config.team + ctx.consumer
        tk.load_async(task.Q, ctx.globals.Q, (ctx.batch, ctx.head, row, 0), task.full)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.K, ctx.globals.K, (ctx.batch, ctx.head, ctx.last - ctx.iter, 0), input.full)

    @triton.jit
    def load_lagged(ctx, lagged):
        tk.load_async(lagged.V, ctx.globals.V, (ctx.batch, ctx.head, ctx.last - ctx.iter, 0), lagged.full)

    @triton.jit
    def start(ctx):
        """Output, weights of the block before, largest scores, and sums of weights, four for each row."""
        scores = tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n))
        o, p = tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.dim)), tk.cast_pairs(scores, ctx.config.dtype)
        m = tk.neg_infty(tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n)))
        return tk.struct(o=o, p=p, m=m, sums=tk.row_sum_by_quad(scores))

    @triton.jit
    def _masked(ctx, s):
        """A block's scores, −∞ where a query does not see a key."""
        row = (ctx.row * ctx.config.team + ctx.consumer) * ctx.config.tile_m
        col = (ctx.last - ctx.iter) * ctx.config.tile_n
        if ctx.config.causal:
            return tk.make_causal(s, row=row, col=col)
        else:
            return tk.right_fill(s, ctx.keys - col, float("-inf"))

    @triton.jit
    def _softmax(ctx, state, s):
        """The state with the weights of a block, and the factor of what was summed before."""
        if ctx.edge:
            s = ctx.config._masked(ctx, s)
        m = tk.row_max(s, accumulate=state.m)
        offset = tk.where(m == float("-inf"), 0.0, m * ctx.args.scale)  # a row without a finite score: weights of zero
        p, alpha = tk.exp2_row(s, ctx.args.scale, offset), tk.exp2(state.m * ctx.args.scale - offset)
        sums = tk.row_sum_by_quad(p, accumulate=tk.mul_row(state.sums, alpha))
        return state.replace(p=tk.cast_pairs(p, ctx.config.dtype), m=m, sums=sums), alpha

    @triton.jit
    def compute_first(ctx, state, input):
        s = tk.mm_ABt(ctx.task.Q, input.K)
        tk.release(ctx, input)
        state, _ = ctx.config._softmax(ctx, state, s)
        return state

    @triton.jit
    def compute(ctx, state, input, previous):
        tk.warp_scheduler_sync(ctx)
        s = tk.mm_ABt(ctx.task.Q, input.K, wait=False)
        tk.wait_for(previous)
        o = tk.mma_AB(state.p, previous.V, state.o, wait=False)
        tk.warp_scheduler_arrive(ctx)
        s = tk.mma_wait(s, leave=o)  # the scores are there, the product with V is in flight
        tk.release(ctx, input)
        state, alpha = ctx.config._softmax(ctx, state, s)
        return state.replace(o=tk.mul_row(tk.mma_wait(o), alpha))

    @triton.jit
    def compute_last(ctx, state, input):
        tk.wait_for(input)
        return state.replace(o=tk.mma_AB(state.p, input.V, state.o))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.O, tk.div_row(state.o, tk.row_sum(state.sums)))
        tk.fence_async()
        row = ctx.row * ctx.config.team + ctx.consumer
        tk.store_async(ctx.globals.O, epilogue.O, (ctx.batch, ctx.head, row, 0))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, **knobs) -> torch.Tensor:
    """softmax(q kᵀ / √D) v; q, k, v: (batch, heads, sequence, D), bf16 or fp16, D 64 or 128, at least one key.

    `causal`: a query sees the keys up to its own; there are as many keys as queries. Tasks then differ in length:
    CTAs fetch them, the longest first.
    """
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"attention(causal=True): {q.shape[2]} queries, {k.shape[2]} keys; must be equally many")
    schedule = dict(order=tk.LongestFirst(2), schedule=tk.Dynamic()) if causal else dict(order=tk.ColumnMajor())
    out, dim = torch.empty_like(q), q.shape[-1]
    template = Attention(dtype=tk.from_torch(q.dtype), dim=dim, causal=causal, **{**schedule, **knobs})
    template(q, k, v, out, scale=math.log2(math.e) / math.sqrt(dim))
    return out


def attention_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)


if __name__ == "__main__":
    from _run import cudnn_attention, has_gpu, randn, show

    b, h, s, d = (4, 16, 4096, 128) if has_gpu() else (1, 2, 200, 64)
    operands = [randn(b, h, s, d) for _ in range(3)]
    for causal in (False, True):
        name, peers = f"{'causal ' * causal}attention", {"cuDNN": functools.partial(cudnn_attention, causal=causal)}
        flop = (2 if causal else 4) * b * h * s * s * d
        show(name, attention, attention_torch, operands, causal=causal, peers=peers, flop=flop)
