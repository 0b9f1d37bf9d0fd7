"""A small template that streams tiles, so that a wrong slot, phase or overlap changes a number. All arithmetic is exact: small integers.

Task t of `lengths[t]` iterations gives for every consumer c

    Y[t·consumers + c] = Σ_i X[t, i] · S[t·consumers + c] + E[t, i] + X[t, i] · X[t, i−1]

with E the part of the second input tile that consumer c reads, where the layout has one; the last product only where pipelined, for i ≥ 1.
"""

import numpy as np
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class Stream(tk.lcf):
    """Sums weighted tiles; the weights are scratch, read in every iteration. `extra` rows in a second input tile make the ring large."""

    dtype: tl.dtype = tk.fp32
    out: tl.dtype = tk.fp32
    rows: int = 64
    cols: int = 64
    extra: int = 0
    weighted: bool = True

    def layout(self):
        x, y = tk.st(self.dtype, self.rows, self.cols), tk.st(self.out, self.rows, self.cols)
        e = dict(E=tk.st(self.dtype, self.extra, self.cols)) if self.extra else {}
        return tk.layout(
            globals=dict(X=x, E=e.get("E"), S=x, Y=y, lengths=None), input=dict(X=x, **e), scratch=dict(S=x) if self.weighted else {},
            finish=dict(Y=y), args=("tasks",))

    @triton.jit
    def setup(ctx):
        more = ctx.task < ctx.args.tasks
        return tk.task(tl.load(ctx.globals.lengths.pointer + ctx.task, mask=more, other=0), when=more)

    @triton.jit
    def load_scratch(ctx, scratch):
        tk.load_async(scratch.S, ctx.globals.S, (ctx.task * ctx.config.consumers + ctx.consumer, 0), scratch.arrived)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.task, ctx.iter, 0), input.arrived)
        if ctx.config.extra:
            tk.load_async(input.E, ctx.globals.E, (ctx.task, ctx.iter, 0), input.arrived)

    @triton.jit
    def start(ctx):
        acc = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        return tk.struct(acc=acc)

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(acc=_add_tile(ctx, state.acc, input, _weights(ctx, state.acc)))

    @triton.jit
    def finish(ctx, state, staging):
        tk.store(staging.Y, state.acc)
        tk.fence_async()
        tk.store_async(ctx.globals.Y, staging.Y, (ctx.task * ctx.config.consumers + ctx.consumer, 0))


@triton.jit
def _weights(ctx, acc):
    if ctx.config.weighted:
        return tk.load(ctx.scratch.S, like=acc).to(tl.float32)
    else:
        return acc * 0.0 + 1.0


@triton.jit
def _add_tile(ctx, acc, input, weights):
    acc += tk.load(input.X, like=acc).to(tl.float32) * weights
    if ctx.config.extra:
        PARTS: tl.constexpr = ctx.config.extra // ctx.config.rows
        part = tk.subtile(input.E, ctx.config.rows, ctx.config.cols, ctx.consumer % PARTS, 0)
        acc += tk.load(part, like=acc).to(tl.float32)
    return acc


class SparseStream(Stream):
    """Stores nothing for tasks without iterations: there consumers and producer need nothing of each other and may run apart."""

    weighted: bool = False

    @triton.jit
    def finish(ctx, state, staging):
        if ctx.iterations > 0:
            tk.store(staging.Y, state.acc)
            tk.fence_async()
            tk.store_async(ctx.globals.Y, staging.Y, (ctx.task * ctx.config.consumers + ctx.consumer, 0))


class PipelinedStream(Stream):
    """The same sum one iteration late, from the slot before, plus the product of neighbouring tiles. `first` only starts."""

    @triton.jit
    def start(ctx):
        acc = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        return tk.struct(acc=acc, weights=_weights(ctx, acc))

    @triton.jit
    def first(ctx, state, input):
        return state

    @triton.jit
    def compute(ctx, state, input, previous):
        tk.my_turn(ctx)
        acc = _add_tile(ctx, state.acc, previous, state.weights)
        tk.pass_turn(ctx)
        before = tk.load(previous.X, like=acc).to(tl.float32)
        return state.replace(acc=acc + before * tk.load(input.X, like=acc).to(tl.float32))

    @triton.jit
    def drain(ctx, state, input):
        return state.replace(acc=_add_tile(ctx, state.acc, input, state.weights))


def operands(template, lengths, rng, device):
    """X, E, S and lengths for tasks of these lengths, filled with small integers. E is X where the layout has none."""
    steps, dtype = max(1, *lengths), tk.to_torch(template.dtype)

    def integers(*shape):
        return torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32)).to(device, dtype)

    x = integers(len(lengths), steps * template.rows, template.cols)
    e = integers(len(lengths), steps * template.extra, template.cols) if template.extra else x
    s = integers(len(lengths) * template.consumers * template.rows, template.cols)
    return x, e, s, torch.tensor(lengths, dtype=torch.int32, device=device)


def reference(template, x, e, s, lengths):
    """Y in float64, then rounded to the output's type."""
    rows, cols, consumers = template.rows, template.cols, template.consumers
    x = x.double().cpu().reshape(x.shape[0], -1, rows, cols)
    e = e.double().cpu().reshape(e.shape[0], -1, max(template.extra, rows), cols)
    s = s.double().cpu().reshape(-1, consumers, rows, cols)
    y = torch.zeros(len(lengths), consumers, rows, cols, dtype=torch.float64)
    for task, length in enumerate(lengths.tolist()):
        for c in range(consumers):
            for i in range(length):
                y[task, c] += x[task, i] * (s[task, c] if template.weighted else 1)
                if template.extra:
                    part = c % (template.extra // rows)
                    y[task, c] += e[task, i, part * rows : (part + 1) * rows]
                if template.pipelined and i:
                    y[task, c] += x[task, i] * x[task, i - 1]
    return y.reshape(-1, cols).to(tk.to_torch(template.out))
