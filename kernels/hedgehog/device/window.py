"""Hedgehog, block by block of 64 rows: softmax attention in a window, linear attention to all rows before it.

The window of a row is its own block, up to the row, and the block before. Their weights are β · exp((s - m) / √128)
with s = q·k, and m the largest s of the window. Earlier blocks have weights α · φ(q)·φ(k) with φ(x) = [softmax(x M),
softmax(-x M)], through the state Sᵀ = Σ v φ(k)ᵀ and z = Σ φ(k). The result is Σ weights · v / Σ weights.

The template keeps the stage of the block before (`previous`), which enters the state after it was used. Source: Zhang
et al., The Hedgehog & the Porcupine (2024), with windows as in LoLCATs (2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.linear_attention.device.chunks import (
    LOG2_E,
    Chunks,
    load_rows,
    place_of_keys,
    place_of_state,
    state_before,
)

OF_FEATURES: tl.constexpr = tk.row_vec(tk.rt(tk.fp32, 64, 64))  # sums of 64 features
TO_BASE_2: tl.constexpr = tl.constexpr(LOG2_E.value * 128**-0.5)


@triton.jit
def features(x, number: tl.constexpr, factor):
    """factor · softmax(x) (number 0) or factor · softmax(-x) (1) along rows."""
    SCALE: tl.constexpr = LOG2_E if number == 0 else -LOG2_E
    most = (tk.row_max(x) if number == 0 else tk.row_min(x)) * SCALE
    weights = tk.exp2_row(x, SCALE, most)
    return tk.mul_row(weights, factor / tk.row_sum(weights))


@triton.jit
def half(tile, number):
    """The columns of 64 features."""
    return tk.subtile(tile, 64, 64, 0, number)


@triton.jit
def values(ctx, block):
    """A consumer's columns of V."""
    return tk.subtile(block.V, 64, ctx.config.cols, 0, ctx.consumer)


class Hedgehog(Chunks, tk.lcf):
    """MQ, MK: (heads, 128, 64). ALPHA, BETA: (heads,) fp32. Z0 and Z1: (sequences, heads, 128) fp32, beside S0 and S1.

    S1, Z1: the states after (`ends_wanted`), without the last block of each sequence. L (`totals_wanted`): (heads,
    slots, 64) fp32, the sums of weights. With `cut`, tasks are segments. They begin with the block before, whose
    results are those of its own segment, and states before are those before that block.
    """

    gated: bool = False
    ends_wanted: bool = False
    totals_wanted: bool = False

    @property
    def overlap(self) -> int:
        return 64 if self.cut else 0

    def layout(self) -> tk.layout:
        q, part, map = tk.st(self.dtype, 64, 128), tk.st(self.dtype, 64, self.cols), tk.st(self.dtype, 128, 64)
        states = (*(("S1", "Z1") if self.ends_wanted else ()), *(("Z0",) if self.begins else ()))
        states = ("L", *states) if self.totals_wanted else states
        loaded, maps = dict(Q=q, **self.operands), dict(MQ=map, MK=map)
        return self.chunked(
            dict(**loaded, **maps, ALPHA=None, BETA=None, O=part, **dict.fromkeys(states)),
            input=loaded,
            task=maps,
            per="block",
            scratch=dict(S=tk.st(self.dtype, self.cols, 128), O=part, Z=tk.sv(tk.fp32, 128)),
        )

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.MQ, ctx.globals.MQ, (ctx.head, 0, 0), task.full)
        tk.load_async(task.MK, ctx.globals.MK, (ctx.head, 0, 0), task.full)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        load_rows(ctx, input)

    @triton.jit
    def load_params(ctx):
        head = (ctx.head,)
        return tk.struct(alpha=tk.load_scalar(ctx.globals.ALPHA, head), beta=tk.load_scalar(ctx.globals.BETA, head))

    @triton.jit
    def start(ctx):
        z = tk.rv(tk.fp32, 128)
        if ctx.config.begins:
            tk.store(ctx.scratch.Z, tk.load(ctx.globals.Z0, z, (ctx.home, ctx.head, 0)))
        else:
            tk.store(ctx.scratch.Z, tk.zero(z))
        return tk.struct(s=state_before(ctx))

    @triton.jit
    def _of_earlier_blocks(ctx, state, input):
        """(α φ(q) S, α φ(q)·z)."""
        S, Z = ctx.scratch.S, ctx.scratch.Z
        tk.store(S, state.s)
        tk.fence_async()
        x = tk.mm_AB(input.Q, ctx.task.MQ)
        f = features(x, 0, ctx.params.alpha)
        total = tk.row_sum(tk.mul_col(f, tk.load(tk.subvector(Z, 64, 0), OF_FEATURES)))
        o = tk.mm_ABt(tk.cast(f, ctx.config.dtype), half(S, 0), wait=False)
        f = features(x, 1, ctx.params.alpha)
        total += tk.row_sum(tk.mul_col(f, tk.load(tk.subvector(Z, 64, 1), OF_FEATURES)))
        return tk.mma_ABt(tk.cast(f, ctx.config.dtype), half(S, 1), o), total

    @triton.jit
    def _with_window(ctx, o, total, input, previous):
        """o and the sum of weights, with those of the block before and of the own one."""
        before = tk.mm_ABt(input.Q, previous.K, wait=False)
        own = tk.mm_ABt(input.Q, input.K, wait=False)
        before, own = tk.mma_wait(before, own)
        before += tl.where(ctx.iter > 0, 0.0, float("-inf"))
        own = tk.make_causal(own)
        most = tk.row_max(own, accumulate=tk.row_max(before)) * TO_BASE_2
        before = tk.exp2_row(before, TO_BASE_2, most) * ctx.params.beta
        o = tk.mma_AB(tk.cast(before, ctx.config.dtype), values(ctx, previous), o, wait=False)
        own = tk.exp2_row(own, TO_BASE_2, most) * ctx.params.beta
        total += tk.row_sum(before) + tk.row_sum(own)
        return tk.mma_AB(tk.cast(own, ctx.config.dtype), values(ctx, input), o), total

    @triton.jit
    def _with_block(ctx, state, block):
        """The state after a block before the own one."""
        S = ctx.scratch.S
        x, exists = tk.mm_AB(block.K, ctx.task.MK), tl.where(ctx.iter > 0, 1.0, 0.0)
        for i in tl.static_range(2):
            f, z = features(x, i, exists), tk.subvector(ctx.scratch.Z, 64, i)
            tk.store(half(S, i), f)
            tk.store(z, tk.col_sum(f, accumulate=tk.load(z, OF_FEATURES)))
        tk.fence_async()
        return state.replace(s=tk.mma_AtB(values(ctx, block), S, state.s))

    @triton.jit
    def compute(ctx, state, input, previous):
        o, total = ctx.config._of_earlier_blocks(ctx, state, input)
        o, total = ctx.config._with_window(ctx, o, total, input, previous)
        if not ctx.config.cut or ctx.iter * 64 >= ctx.overlap:
            if ctx.config.totals_wanted:
                if ctx.consumer == 0:
                    tk.store(ctx.globals.L, total, (ctx.head, ctx.first + ctx.iter, 0))
            tk.store_read_wait(0)
            tk.store(ctx.scratch.O, tk.div_row(o, total))
            tk.fence_async()
            tk.store_async(ctx.globals.O, ctx.scratch.O, (ctx.sequence, ctx.head, ctx.iter, ctx.consumer))
        return ctx.config._with_block(ctx, state, previous)

    @triton.jit
    def compute_last(ctx, state, input):
        return state

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.ends_wanted:
            tk.store(ctx.globals.S1, state.s, place_of_state(ctx))
            if ctx.consumer == 0:
                tk.store(ctx.globals.Z1, tk.load(ctx.scratch.Z), (ctx.home, ctx.head, 0))


class HedgehogStates(Hedgehog):
    """S1 and Z1: (segments, heads, …), what each segment adds to the states."""

    ends_wanted: bool = True
    cut: bool = True

    def layout(self) -> tk.layout:
        map = dict(MK=tk.st(self.dtype, 128, 64))
        return self.chunked(
            dict(**self.operands, **map, S1=None, Z1=None),
            input=self.operands,
            task=map,
            per="block",
            scratch=dict(S=tk.st(self.dtype, self.cols, 128), Z=tk.sv(tk.fp32, 128)),
        )

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.MK, ctx.globals.MK, (ctx.head, 0, 0), task.full)

    @triton.jit
    def load(ctx, input):
        load_rows(ctx, input)

    @triton.jit
    def load_params(ctx):
        return tk.struct()

    @triton.jit
    def compute(ctx, state, input, previous):
        return ctx.config._with_block(ctx, state, previous)
