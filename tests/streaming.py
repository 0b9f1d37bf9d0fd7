"""Small templates that stream tiles, so that a wrong stage, phase or overlap changes a number. All arithmetic is exact:
small integers.

Task t of `lengths[t]` iterations stores for every block r of the cluster and every consumer c of the team, with p =
(t·cluster + r)·team + c,

    Y[p] = Σ_i X[t, i] · S[p] + E[t, i, r] + X[t, i] · X[t, i−1]  + R[p]

with S where the layout has weights, E the part of the second input tile that consumer c reads, where the layout has
one, the last product only where pipelined, for i ≥ 1, and R where the layout has a residual. `Prefix` (an `lcsf`)
stores the sum after every iteration.
"""

import dataclasses

import numpy as np
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class Stream(tk.lcf):
    """Sums weighted tiles; the weights are task tiles, read in every iteration. `extra` rows in a second input tile
    make the ring large."""

    dtype: tl.dtype = tk.fp32
    out: tl.dtype = tk.fp32
    rows: int = 64
    cols: int = 64
    extra: int = 0
    weighted: bool = True
    residual: bool = False

    def layout(self):
        x, y = tk.st(self.dtype, self.rows, self.cols), tk.st(self.out, self.rows, self.cols)
        e = dict(E=tk.st(self.dtype, self.extra, self.cols)) if self.extra else {}
        r, sums = (
            dict(R=y) if self.residual else {},
            dict(acc=tk.rt(tk.fp32, self.rows, self.cols)) if self.splits else {},
        )
        return tk.layout(
            globals=dict(X=x, E=e.get("E"), S=x, Y=y, lengths=None, **r),
            input=dict(X=x, **e),
            task=dict(S=x) if self.weighted else {},
            epilogue=dict(Y=y),
            epilogue_loads=("Y",) if self.residual else (),
            args=("tasks",),
            multicast=("X",) if self.cluster > 1 else (),
            accumulators=sums,
        )

    @triton.jit
    def setup(ctx):
        more = ctx.task_id < ctx.args.tasks
        return tk.task(tl.load(ctx.globals.lengths.pointer + ctx.task_id, mask=more, other=0), when=more)

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.S, ctx.globals.S, (_place(ctx), 0), task.full)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.task_id, ctx.iter, 0), input.full)
        if ctx.config.extra:
            tk.load_async(
                input.E, ctx.globals.E, (ctx.task_id, ctx.iter * ctx.config.cluster + ctx.rank, 0), input.full
            )

    @triton.jit
    def load_epilogue(ctx, epilogue):
        tk.load_async(epilogue.Y, ctx.globals.R, (_place(ctx), 0), epilogue.full)

    @triton.jit
    def start(ctx):
        acc = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        return tk.struct(acc=acc)

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(acc=_add_tile(ctx, state.acc, input, _weights(ctx, state.acc)))

    @triton.jit
    def finish(ctx, state, epilogue):
        _store_result(ctx, state.acc, epilogue)


@triton.jit
def _place(ctx):
    return (ctx.task_id * ctx.config.cluster + ctx.rank) * ctx.config.team + ctx.consumer


@triton.jit
def _store_result(ctx, acc, epilogue):
    if ctx.config.residual:
        acc += tk.load(epilogue.Y, like=acc).to(tl.float32)
    tk.store(epilogue.Y, acc)
    tk.fence_async()
    tk.store_async(ctx.globals.Y, epilogue.Y, (_place(ctx), 0))


@triton.jit
def _weights(ctx, acc):
    if ctx.config.weighted:
        return tk.load(ctx.task.S, like=acc).to(tl.float32)
    else:
        return acc * 0.0 + 1.0


@triton.jit
def _add_tile(ctx, acc, input, weights):
    acc += tk.load(input.X, like=acc).to(tl.float32) * weights
    if ctx.config.extra:
        acc = _add_part(ctx, acc, input)
    return acc


@triton.jit
def _add_part(ctx, acc, tiles):
    PARTS: tl.constexpr = ctx.config.extra // ctx.config.rows
    return acc + _part_of(ctx, tiles.E, ctx.consumer % PARTS, acc)


@triton.jit
def _part_of(ctx, tile, number: tl.constexpr, acc):
    """The rows of one consumer, of all those that a tile has."""
    return tk.load(tk.subtile(tile, ctx.config.rows, ctx.config.cols, number, 0), like=acc).to(tl.float32)


class SparseStream(Stream):
    """Stores nothing for tasks without iterations: there consumers and producer need nothing of each other and may run
    apart."""

    weighted: bool = False

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.iterations > 0:
            _store_result(ctx, state.acc, epilogue)


class PipelinedStream(Stream):
    """The same sum one iteration late, from the previous stage, plus the product of neighbouring tiles. `compute_first`
    adds nothing."""

    @triton.jit
    def start(ctx):
        acc = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        return tk.struct(acc=acc, weights=_weights(ctx, acc))

    @triton.jit
    def compute_first(ctx, state, input):
        return state

    @triton.jit
    def compute(ctx, state, input, previous):
        tk.warp_scheduler_sync(ctx)
        acc = _add_tile(ctx, state.acc, previous, state.weights)
        tk.warp_scheduler_arrive(ctx)
        before = tk.load(previous.X, like=acc).to(tl.float32)
        return state.replace(acc=acc + before * tk.load(input.X, like=acc).to(tl.float32))

    @triton.jit
    def compute_last(ctx, state, input):
        return state.replace(acc=_add_tile(ctx, state.acc, input, state.weights))


class DeferredStream(tk.DeferredEpilogue, PipelinedStream):
    """The same, whose halves wait in registers and leave, one after the other through one tile, during the iterations
    of the next task."""

    def layout(self):
        plan, tensors = super().layout(), {}
        for name, tiles in plan.globals:
            tensors[name] = tk.st(self.out, self.rows, self.cols // 2) if name == "Y" else tiles or None
        half = tk.rt(self.out, self.rows, self.cols // 2)
        residual = dict(R=tk.st(self.out, self.rows, self.cols)) if self.residual else {}
        return dataclasses.replace(
            plan,
            globals=tensors,
            epilogue=dict(Y=tensors["Y"], **residual),
            epilogue_loads=tuple(residual),
            deferred_results=dict(left=half, right=half),
        )

    @triton.jit
    def load_epilogue(ctx, epilogue):
        tk.load_async(epilogue.R, ctx.globals.R, (_place(ctx), 0), epilogue.full)

    @triton.jit
    def defer_results(ctx, state, epilogue):
        acc = state.acc
        if ctx.config.residual:
            acc += tk.load(epilogue.R, like=acc).to(tl.float32)
        left, right = tk.split_cols(acc, ctx.config.cols // 2)
        return tk.struct(left=tk.cast(left, ctx.config.out), right=tk.cast(right, ctx.config.out))

    @triton.jit
    def store_deferred(ctx, tile, epilogue, n):
        tk.store_read_wait(0)
        tk.store(epilogue.Y, tile)
        tk.fence_async()
        tk.store_async(ctx.globals.Y, epilogue.Y, (_place(ctx), n))


class SteppedStream(DeferredStream):
    """The same, whose halves are finished in the epilogue tile, a part an iteration: they are staged too small, by a
    number of the half. The residual is loaded into that tile before, the second half's after the first half has
    left."""

    def layout(self):
        plan = super().layout()
        tensors = {name: tiles or None for name, tiles in plan.globals}
        residual = dict(R=tensors["Y"]) if self.residual else {}
        staged = dict(Y=tk.st(self.out, self.rows, self.cols // 2))
        return dataclasses.replace(
            plan,
            globals=tensors | residual,
            epilogue=staged,
            epilogue_loads=(),
            epilogue_reloads=("Y",) if self.residual else (),
            deferred_steps=2,
        )

    @triton.jit
    def prefetch_deferred(ctx, epilogue):
        _fill_half(ctx, epilogue, 0)

    @triton.jit
    def defer_results(ctx, state, epilogue):
        left, right = tk.split_cols(state.acc, ctx.config.cols // 2)
        return tk.struct(left=tk.cast(left, ctx.config.out), right=tk.cast(right, ctx.config.out))

    @triton.jit
    def store_deferred(ctx, tile, epilogue, n):
        if ctx.config.residual:
            tk.wait(epilogue.reload_full, n)
            tile += tk.load(epilogue.Y, like=tile)
        else:
            tk.store_read_wait(0)
        tk.store(epilogue.Y, tile - (n + 1))

    @triton.jit
    def finish_deferred(ctx, epilogue, n, step, steps):
        tk.store_elements(epilogue.Y, tk.load_elements(epilogue.Y, step, steps) + (n + 1), step, steps)
        if step == steps - 1:
            tk.fence_async()
            tk.store_async(ctx.globals.Y, epilogue.Y, (_place(ctx), n))
            if ctx.config.residual:
                if n == 0:
                    _fill_half(ctx, epilogue, 1)


@triton.jit
def _fill_half(ctx, epilogue, half: tl.constexpr):
    tk.store_read_wait(0)
    tk.expect(epilogue.reload_full, epilogue.Y)
    tk.load_async(epilogue.Y, ctx.globals.R, (_place(ctx), half), epilogue.reload_full)


class WatchedStream(PipelinedStream):
    """The same, where consumer 1 adds what consumer 0 has written at the end of the task, W[task], as soon as it may
    see that."""

    staggered_epilogue: bool = True

    def layout(self):
        plan = super().layout()
        return dataclasses.replace(plan, globals={**{n: tiles or None for n, tiles in plan.globals}, "W": None})

    @triton.jit
    def compute(ctx, state, input, previous):
        acc = _add_tile(ctx, state.acc, previous, state.weights)
        before = tk.load(previous.X, like=acc).to(tl.float32)
        acc += before * tk.load(input.X, like=acc).to(tl.float32)
        written = ctx.globals.W.pointer + ctx.task_id
        if ctx.consumer == 0:
            if ctx.iter == ctx.iterations - 1:
                tl.store(written, 1)
        else:
            if (ctx.iter == ctx.iterations - (ctx.config.stages - 1)) and (ctx.task_id + 1 < ctx.args.tasks):
                acc += tl.load(written).to(tl.float32)
        return state.replace(acc=acc)


class LaggedStream(Stream):
    """The same with E as lagged tiles (`extra` rows), used one iteration later; X is released `early`, once it is in
    registers, or at the end."""

    extra: int = 64
    early: bool = True

    def layout(self):
        plan = super().layout()
        moved, tensors = dict(plan.input), {n: tiles or None for n, tiles in plan.globals}
        return dataclasses.replace(plan, globals=tensors, input=dict(X=moved["X"]), lagged=dict(E=moved["E"]))

    def tasks(self, X, *_):
        return X[0]

    @triton.jit
    def _number(ctx):
        """Of this iteration's tiles, among those of the task."""
        return ctx.iter

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.task_id, ctx.config._number(ctx), 0), input.full)

    @triton.jit
    def load_lagged(ctx, lagged):
        tk.load_async(
            lagged.E,
            ctx.globals.E,
            (ctx.task_id, ctx.config._number(ctx) * ctx.config.cluster + ctx.rank, 0),
            lagged.full,
        )

    @triton.jit
    def start(ctx):
        acc = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        return tk.struct(acc=acc, before=acc, weights=_weights(ctx, acc))

    @triton.jit
    def compute_first(ctx, state, input):
        x = tk.load(input.X, like=state.acc).to(tl.float32)
        tk.release(ctx, input)
        return state.replace(acc=state.acc + x * state.weights, before=x)

    @triton.jit
    def compute(ctx, state, input, previous):
        tk.warp_scheduler_sync(ctx)
        x = tk.load(input.X, like=state.acc).to(tl.float32)
        if ctx.config.early:
            tk.release(ctx, input)
        tk.wait_for(previous)
        acc = _add_part(ctx, state.acc + x * state.weights + x * state.before, previous)
        tk.warp_scheduler_arrive(ctx)
        if not ctx.config.early:
            tk.release(ctx, input)
        return state.replace(acc=acc, before=x)

    @triton.jit
    def compute_last(ctx, state, input):
        tk.wait_for(input)
        return state.replace(acc=_add_part(ctx, state.acc, input))


class IndexedStream(tk.IndexPrefetch, LaggedStream):
    """The same where the tiles of iteration i are the number of the task's that `page_indices` numbers in P add up
    to."""

    page_indices: int = 1

    def layout(self):
        plan = super().layout()
        return dataclasses.replace(
            plan, globals={**{n: tiles or None for n, tiles in plan.globals}, "P": None}, page_indices=self.page_indices
        )

    @triton.jit
    def page_index(ctx, n):
        return tk.pointer_to(
            ctx.globals.P,
            (ctx.task_id, tl.minimum(ctx.iter * ctx.config.page_indices + n, tk.extent(ctx.globals.P, 1) - 1)),
        )

    @triton.jit
    def _number(ctx):
        INDICES: tl.constexpr = ctx.config.page_indices
        total = ctx.page_indices[0]
        for k in tl.static_range(1, INDICES):
            total += ctx.page_indices[k]
        return total


def add_listed(template, x, e, s, lengths, blocks, *more):
    """Y of a `IndexedStream` whose tiles lie in any order in memory: in iteration i of a task it gets those that are
    number i of `x` and `e`."""
    tasks, steps = len(lengths), x.shape[1] // template.rows
    places = torch.stack([torch.randperm(steps) for _ in range(tasks)]).to(x.device)

    def moved(tiles):
        in_order = tiles.unflatten(1, (steps, -1))
        return (
            torch.empty_like(in_order)
            .index_put_((torch.arange(tasks, device=x.device)[:, None], places), in_order)
            .flatten(1, 2)
        )

    numbers = torch.randint(-99, 99, (tasks, steps, template.page_indices), device=x.device)
    numbers[..., -1] += places - numbers.sum(-1)
    y = torch.full(
        (tasks * template.cluster * template.team * template.rows, template.cols), float("nan"), device=x.device
    )
    template(moved(x), moved(e), s, y, lengths, numbers.flatten(1).int(), *more, tasks=tasks, blocks=blocks)
    return y


class SharingStream(PipelinedStream):
    """The same with all consumers' weights in one task tile of the block. A consumer gets what it adds of E from its
    neighbour, and keeps the sum in a scratch tile meanwhile."""

    extra: int = 128

    def layout(self):
        plan, sums = super().layout(), tk.st(tk.fp32, self.rows, self.cols)
        weights, moved = (
            tk.st(self.dtype, self.team * self.rows, self.cols),
            {n: tiles or None for n, tiles in plan.globals},
        )
        return dataclasses.replace(
            plan,
            globals=moved | dict(S=weights),
            per="block",
            task=dict(S=weights),
            scratch=dict(W=sums),
            exchange=dict(E=tk.st(tk.fp32, self.team * self.rows, self.cols)),
        )

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.S, ctx.globals.S, (ctx.task_id, 0), task.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols)))

    @triton.jit
    def _add(ctx, acc, tiles, number):
        NEXT: tl.constexpr = (ctx.consumer + 1) % ctx.config.team
        acc += tk.load(tiles.X, like=acc).to(tl.float32) * _part_of(ctx, ctx.task.S, ctx.consumer, acc)
        part = _part_of(ctx, tiles.E, NEXT % (ctx.config.extra // ctx.config.rows), acc)
        tk.store(ctx.scratch.W, acc)
        part = ctx.config._exchanged(ctx, part, number)
        return tk.load(ctx.scratch.W, like=acc) + part

    @triton.jit
    def _exchanged(ctx, part, number):
        ROWS: tl.constexpr = ctx.config.rows
        COLS: tl.constexpr = ctx.config.cols
        NEXT: tl.constexpr = (ctx.consumer + 1) % ctx.config.team
        tk.store(tk.subtile(ctx.exchange.E[number % 2], ROWS, COLS, NEXT, 0), part)
        tk.sync_consumers(ctx)
        return tk.load(tk.subtile(ctx.exchange.E[number % 2], ROWS, COLS, ctx.consumer, 0), like=part)

    @triton.jit
    def compute(ctx, state, input, previous):
        acc = ctx.config._add(ctx, state.acc, previous, ctx.iter - 1)
        before = tk.load(previous.X, like=acc).to(tl.float32)
        return state.replace(acc=acc + before * tk.load(input.X, like=acc).to(tl.float32))

    @triton.jit
    def compute_last(ctx, state, input):
        return state.replace(acc=ctx.config._add(ctx, state.acc, input, ctx.iterations - 1))


class LateTaskStream(PipelinedStream):
    """The same with all consumers' weights in a task tile, and again in a late one, which `compute_first` waits for
    where it `waits`, and which is for the last iteration. `compute_last` releases both where it is `early`, the
    template where it is not."""

    waits: bool = True
    early: bool = True

    def layout(self):
        plan, weights = super().layout(), tk.st(self.dtype, self.team * self.rows, self.cols)
        tensors = {n: tiles or None for n, tiles in plan.globals} | dict(S=weights)
        return dataclasses.replace(plan, globals=tensors, per="block", task=dict(S=weights), late_task=dict(L=weights))

    @triton.jit
    def load(ctx, input):
        if ctx.iter == 0:
            tk.prefetch(
                ctx.globals.S,
                tk.st(ctx.config.dtype, ctx.config.team * ctx.config.rows, ctx.config.cols),
                (ctx.task_id, 0),
            )
        tk.load_async(input.X, ctx.globals.X, (ctx.task_id, ctx.iter, 0), input.full)

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.S, ctx.globals.S, (ctx.task_id, 0), task.full)

    @triton.jit
    def load_late_task(ctx, late_task):
        tk.load_async(late_task.L, ctx.globals.S, (ctx.task_id, 0), late_task.full)

    @triton.jit
    def start(ctx):
        acc = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        return tk.struct(acc=acc, last=acc)

    @triton.jit
    def compute_first(ctx, state, input):
        if ctx.config.waits:
            tk.wait_for(ctx.late_task)
        return state.replace(last=_part_of(ctx, ctx.late_task.L, ctx.consumer, state.last))

    @triton.jit
    def compute(ctx, state, input, previous):
        acc = _add_tile(ctx, state.acc, previous, _part_of(ctx, ctx.task.S, ctx.consumer, state.acc))
        before = tk.load(previous.X, like=acc).to(tl.float32)
        return state.replace(acc=acc + before * tk.load(input.X, like=acc).to(tl.float32))

    @triton.jit
    def compute_last(ctx, state, input):
        if ctx.config.early:
            tk.release(ctx, ctx.task)
        # both are the same, exactly
        weights = (state.last + _part_of(ctx, ctx.late_task.L, ctx.consumer, state.acc)) * 0.5
        if ctx.config.early:
            tk.release(ctx, ctx.late_task)
        return state.replace(acc=_add_tile(ctx, state.acc, input, weights))


class ExchangingStream(SharingStream):
    """The same for two consumers that exchange their parts as a pipeline and do not meet."""

    @triton.jit
    def _exchanged(ctx, part, number):
        ROWS: tl.constexpr = ctx.config.rows
        COLS: tl.constexpr = ctx.config.cols
        if number > 0:
            tk.exchange_acquire(ctx)
        tk.store(tk.subtile(ctx.exchange.E[ctx.consumer], ROWS, COLS, 0, 0), part)
        tk.exchange_commit(ctx)
        tk.exchange_wait(ctx)
        part = tk.load(tk.subtile(ctx.exchange.E[1 - ctx.consumer], ROWS, COLS, 0, 0), like=part)
        if number + 1 < ctx.iterations:
            tk.exchange_release(ctx)
        else:
            tk.sync_consumers(ctx)
        return part


class ReducingStream(tk.ReduceStoreWarp, PipelinedStream):
    """The same, and reduce-store warps add every X to Z, a tile for each consumer of the team, and count in `counts`
    how often they did."""

    def layout(self):
        return _with_scratch(super().layout(), self)

    @triton.jit
    def compute(ctx, state, input, previous):
        acc = _add_tile(ctx, state.acc, previous, state.weights)
        before = tk.load(previous.X, like=acc).to(tl.float32)
        tk.reduce_acquire(ctx)
        _fill_buffer(ctx, before)
        tk.reduce_commit(ctx)
        return state.replace(acc=acc + before * tk.load(input.X, like=acc).to(tl.float32))

    @triton.jit
    def compute_last(ctx, state, input):
        tk.reduce_acquire(ctx)
        _fill_buffer(ctx, tk.load(input.X, like=state.acc).to(tl.float32))
        tk.reduce_commit(ctx)
        return state.replace(acc=_add_tile(ctx, state.acc, input, state.weights))

    @triton.jit
    def reduce_store(ctx, scratch):
        tk.reduce_wait(ctx)
        tk.store_add_async(ctx.globals.Z, scratch.W, (ctx.consumer, 0))
        return ctx.globals.counts.pointer + ctx.consumer

    @triton.jit
    def reduce_store_done(ctx, value):
        tk.store_wait(0)
        tl.atomic_add(value, 1, sem="relaxed", scope="gpu")


def _with_scratch(plan, template):
    """The layout of a stream with reduce-store warps."""
    tile = tk.st(tk.fp32, template.rows, template.cols)
    return dataclasses.replace(
        plan, globals={n: tiles or None for n, tiles in plan.globals} | dict(Z=tile, counts=None), scratch=dict(W=tile)
    )


@triton.jit
def _fill_buffer(ctx, x):
    tk.store(ctx.scratch.W, x)
    tk.fence_async()


class CountedStream(Stream):
    """A `Stream` that knows from the shapes how many tasks there are, as split schedules and a block for every task
    need it."""

    def tasks(self, X, *_):
        return X[0]


class PlainReducingStream(tk.ReduceStoreWarp, CountedStream):
    """A `ReducingStream` without `compute_last`, which commits a tile in its own iteration."""

    def layout(self):
        return _with_scratch(super().layout(), self)

    @triton.jit
    def compute(ctx, state, input):
        tk.reduce_acquire(ctx)
        _fill_buffer(ctx, tk.load(input.X, like=state.acc).to(tl.float32))
        tk.reduce_commit(ctx)
        return state.replace(acc=_add_tile(ctx, state.acc, input, _weights(ctx, state.acc)))

    reduce_store = ReducingStream.reduce_store
    reduce_store_done = ReducingStream.reduce_store_done


def add_reduced(template, x, e, s, lengths, blocks):
    """(Y, Z, counts) of a `ReducingStream`."""
    y = torch.full((len(lengths) * template.team * template.rows, template.cols), float("nan"), device=x.device)
    z = torch.zeros(template.team * template.rows, template.cols, device=x.device)
    counts = torch.zeros(template.team, dtype=torch.int32, device=x.device)
    template(x, e, s, y, lengths, z, counts, tasks=len(lengths), blocks=blocks, debug=True)
    return y, z, counts


def all_reduced(template, x, lengths):
    """What Z of a `ReducingStream` must be: the sum of the X of all iterations, for each consumer."""
    steps = x.view(len(lengths), -1, template.rows, template.cols).double()
    there = torch.arange(steps.shape[1], device=x.device) < lengths[:, None]
    return (steps * there[:, :, None, None]).sum((0, 1)).float().repeat(template.team, 1)


class EdgedStream(CountedStream):
    """X counts twice in a task's edges: as many as its length modulo 3 (`marked` −1), none or one, or where it does not
    say, any (None)."""

    weighted: bool = False
    marked: int | None = -1

    @triton.jit
    def setup(ctx):
        more = ctx.task_id < ctx.args.tasks
        length = tl.load(ctx.globals.lengths.pointer + ctx.task_id, mask=more, other=0)
        return tk.task(
            length,
            when=more,
            edges=ctx.config.marked if ctx.config.marked is None or ctx.config.marked >= 0 else length % 3,
        )

    @triton.jit
    def compute(ctx, state, input):
        return _count_edges(ctx, state, input)


@triton.jit
def _count_edges(ctx, state, input):
    return state.replace(acc=state.acc + tk.load(input.X, like=state.acc).to(tl.float32) * (2.0 if ctx.edge else 1.0))


class PipelinedEdgedStream(EdgedStream):
    """The same in a pipelined computation."""

    @triton.jit
    def compute_first(ctx, state, input):
        return _count_edges(ctx, state, input)

    @triton.jit
    def compute(ctx, state, input, previous):
        return _count_edges(ctx, state, input)

    @triton.jit
    def compute_last(ctx, state, input):
        return state


class Prefix(tk.lcsf, CountedStream):
    """Stores the sum after every iteration as well: Z[t, i, r] has the tiles of the team's consumers one below the
    other."""

    def layout(self):
        plan, z = super().layout(), tk.st(self.out, self.team * self.rows, self.cols)
        tensors = {n: tiles or None for n, tiles in plan.globals}
        return dataclasses.replace(plan, globals=dict(**tensors, Z=z), output=dict(Z=z))

    @triton.jit
    def compute(ctx, state, input, output):
        acc = _add_tile(ctx, state.acc, input, _weights(ctx, state.acc))
        tk.store(tk.subtile(output.Z, ctx.config.rows, ctx.config.cols, ctx.consumer, 0), acc)
        return state.replace(acc=acc)

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.Z, output.Z, (ctx.task_id, ctx.iter * ctx.config.cluster + ctx.rank, 0))


def integers(rng, device, dtype, *shape):
    return torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32)).to(device, dtype)


def operands(template, lengths, rng, device):
    """X, E, S and lengths for tasks of these lengths, filled with small integers. E is X where the layout has none."""
    steps, dtype = max(1, *lengths, 1), tk.to_torch(template.dtype)
    x = integers(rng, device, dtype, len(lengths), steps * template.rows, template.cols)
    e = (
        integers(rng, device, dtype, len(lengths), steps * template.cluster * template.extra, template.cols)
        if template.extra
        else x
    )
    s = integers(rng, device, dtype, len(lengths) * template.cluster * template.team * template.rows, template.cols)
    return x, e, s, torch.tensor(lengths, dtype=torch.int32, device=device)


def prefixes(template, x, e, s, lengths):
    """The sums after 0, 1, … iterations in float64: (tasks, iterations + 1, cluster, team, rows, cols); after a task's
    length the last stays."""
    rows, cols, cluster, team = template.rows, template.cols, template.cluster, template.team
    steps = x.shape[1] // rows
    x = x.double().cpu().reshape(len(lengths), steps, rows, cols)
    e = e.double().cpu().reshape(len(lengths), steps, cluster if template.extra else 1, max(template.extra, rows), cols)
    s = s.double().cpu().reshape(len(lengths), cluster, team, rows, cols)
    sums = torch.zeros(len(lengths), steps + 1, cluster, team, rows, cols, dtype=torch.float64)
    for task, length in enumerate(lengths.tolist()):
        for i in range(steps):
            sums[task, i + 1] = sums[task, i]
            if i < length:
                sums[task, i + 1] += x[task, i] * (s[task] if template.weighted else 1)
                for c in range(team if template.extra else 0):
                    part = c % (template.extra // rows)
                    sums[task, i + 1, :, c] += e[task, i, :, part * rows : (part + 1) * rows]
                if template.pipelined and i:
                    sums[task, i + 1] += x[task, i] * x[task, i - 1]
    return sums


def reference(template, x, e, s, lengths):
    """Y without a residual in float64, then rounded to the output's type."""
    return prefixes(template, x, e, s, lengths)[:, -1].reshape(-1, template.cols).to(tk.to_torch(template.out))
