"""Small templates for schedules: a matrix product whose products are in flight when a task ends, and one that writes
down who does what."""

import triton
import triton.language as tl

import tritonkittens.lang as tk


class Product(tk.lcf):
    """C = A·B (+ R): M × K, K × N, M × N in bf16, bf16, fp32. A task is `team` · `cluster` tiles of 64 rows, one below
    the other, and 64 columns, of which each block that shares its iterations finishes some."""

    residual: bool = False

    def layout(self):
        a, b, c = tk.st(tk.bf16, 64 * self.team, 64), tk.st(tk.bf16, 64, 64), tk.st(tk.fp32, 64, 64 // self.sharers)
        return tk.layout(
            globals=dict(A=a, B=b, C=c, **(dict(R=c) if self.residual else {})),
            input=dict(A=a, B=b),
            epilogue=dict(C=c),
            accumulators=dict(acc=tk.rt(tk.fp32, 64, 64)),
            multicast=("B",) if self.cluster > 1 else (),
            epilogue_loads=("C",) if self.residual else (),
        )

    @property
    def task_rows(self):
        return 64 * self.team * self.cluster

    def tasks(self, A, B, C, *_):
        return triton.cdiv(C[0], self.task_rows) * triton.cdiv(C[1], 64)

    @triton.jit
    def setup(ctx):
        rows, cols = (
            tk.ceil_div(tk.extent(ctx.globals.C, 0), ctx.config.task_rows),
            tk.ceil_div(tk.extent(ctx.globals.C, 1), 64),
        )
        row, col = tk.tile_at(ctx.config.order, ctx.task_id, rows, cols)
        depth = tk.ceil_div(tk.extent(ctx.globals.A, 1), 64)
        result_col = col * ctx.config.sharers + ctx.part if ctx.config.sharers > 1 else col
        return tk.task(
            depth,
            when=ctx.task_id < rows * cols,
            row=row * ctx.config.cluster + ctx.rank,
            col=col,
            result_col=result_col,
        )

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, (ctx.row, ctx.iter), input.full)
        tk.load_async(input.B, ctx.globals.B, (ctx.iter, ctx.col), input.full)

    @triton.jit
    def load_epilogue(ctx, epilogue):
        tk.load_async(
            epilogue.C, ctx.globals.R, (ctx.row * ctx.config.team + ctx.consumer, ctx.result_col), epilogue.full
        )

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.mma_zero(ctx.accumulators.acc))

    @triton.jit
    def compute(ctx, state, input, previous):
        acc = tk.mma_AB(tk.subtile(input.A, 64, 64, ctx.consumer, 0), input.B, state.acc, wait=False)
        return state.replace(acc=tk.mma_retire(acc))

    @triton.jit
    def compute_last(ctx, state, input):
        return state.replace(acc=tk.mma_begin(tk.mma_wait(state.acc)))

    @triton.jit
    def finish(ctx, state, epilogue):
        acc = tk.load(tk.mma_wait(state.acc))
        if ctx.config.residual:
            acc += tk.load(epilogue.C, like=acc)
        tk.store(epilogue.C, acc)
        tk.fence_async()
        tk.store_async(ctx.globals.C, epilogue.C, (ctx.row * ctx.config.team + ctx.consumer, ctx.result_col))


class Walk(tk.lcf):
    """Writes down who does what: `count` and `block` of every iteration of every task (`most` a task), and how often a
    task is finished."""

    consumers: int = 1

    def layout(self):
        tile, sums = tk.st(tk.fp32, 16, 16), dict(acc=tk.rt(tk.fp32, 16, 16)) if self.splits else {}
        tensors = dict(X=tile, count=None, block=None, finished=None, lengths=None)
        return tk.layout(globals=tensors, input=dict(X=tile), accumulators=sums, args=("tasks", "most"))

    def tasks(self, X, count, block, finished, lengths):
        return lengths[0]

    @triton.jit
    def setup(ctx):
        more = ctx.task_id < ctx.args.tasks
        return tk.task(tl.load(ctx.globals.lengths.pointer + ctx.task_id, mask=more, other=0), when=more)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (0, 0), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(tk.rt(tk.fp32, 16, 16)))

    @triton.jit
    def compute(ctx, state, input):
        step = ctx.task_id * ctx.args.most + ctx.iter
        tl.atomic_add(ctx.globals.count.pointer + step, 1)
        tl.store(ctx.globals.block.pointer + step, tk.block_index())
        return state

    @triton.jit
    def finish(ctx, state, epilogue):
        tl.atomic_add(ctx.globals.finished.pointer + ctx.task_id, 1)


class Extremes(tk.SplitTask, tk.lcf):
    """Of bands of 64 rows a consumer, of X (M × N, bf16): the largest of the elements of a row whose columns differ by
    64 (M × 64, fp32), and the least of a row (M). The parts of a task are merged by hooks."""

    def layout(self):
        x, largest = tk.st(tk.bf16, 64 * self.team, 64), tk.st(tk.fp32, 64, 64 // self.sharers)
        return tk.layout(
            globals=dict(X=x, largest=largest, least=None),
            input=dict(X=x),
            epilogue=dict(C=largest),
            merged=dict(largest=tk.rt(tk.fp32, 64, 64), least=tk.rv(tk.fp32, 64)),
        )

    def tasks(self, X, *_):
        return triton.cdiv(X[0], 64 * self.team)

    @triton.jit
    def setup(ctx):
        rows, cols = tk.extent(ctx.globals.X, 0), tk.extent(ctx.globals.X, 1)
        return tk.task(
            tk.ceil_div(cols, 64),
            when=ctx.task_id < tk.ceil_div(rows, 64 * ctx.config.team),
            band=ctx.task_id * ctx.config.team,
        )

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.task_id, ctx.iter), input.full)

    @triton.jit
    def start(ctx):
        tile: tl.constexpr = tk.rt(tk.fp32, 64, 64)
        return tk.struct(largest=tk.neg_infty(tile), least=tk.pos_infty(tk.col_vec(tile)))

    @triton.jit
    def compute(ctx, state, input):
        x = tk.cast(tk.load(tk.subtile(input.X, 64, 64, ctx.consumer, 0), like=state.largest), tk.fp32)
        return state.replace(largest=tk.maximum(state.largest, x), least=tk.minimum(state.least, tk.row_min(x)))

    @triton.jit
    def part(ctx, state):
        return state

    @triton.jit
    def merge(ctx, mine, theirs):
        return tk.struct(largest=tk.maximum(mine.largest, theirs.largest), least=tk.minimum(mine.least, theirs.least))

    @triton.jit
    def finish(ctx, state, epilogue):
        band = ctx.band + ctx.consumer
        tk.store(epilogue.C, state.largest)
        tk.fence_async()
        tk.store_async(ctx.globals.largest, epilogue.C, (band, ctx.part if ctx.config.sharers > 1 else 0))
        if ctx.config.sharers == 1 or ctx.part == 0:
            tk.store(ctx.globals.least, state.least, (band,))
