"""Attention of few queries against long keys and values, on chips with tensor memory, as four roles.

Keys are the rows of the products, so that 128 of them share a pass of the tensor cores with as few as 16 queries. A
task is a part of a sequence. Per block of its keys, last to first:

- `load`, a warp: K and V by TMA;
- `multiply`, a warp: Sᵀ = K Qᵀ of a block, then Oᵀ += Vᵀ Pᵀ of the block before;
- `softmax`, a warpgroup with a key a thread: Pᵀ = 2^(Sᵀ · scale − m) through shared memory, and a task's results.

`schedule`, a warp, takes tasks over from CTAs that have not started, and reads ahead what others need to know of a
task: its length, and its page numbers.

Sources: Flash-Decoding (Dao et al., 2023); FlashMLA's and FlashAttention-4's swapped operands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.inline_ptx import barrier, clc
from tritonkittens.kernels.attention.device.decode import ZEROED
from tritonkittens.kernels.attention.device.forward_tmem import GROWTH, LN_2, arrive, load_block

KEYS = tl.constexpr(128)  # of a block: a lane of tensor memory and a thread of the softmax for each
SLOTS = tl.constexpr(2)  # blocks whose scores, and whose weights, exist at a time; tasks whose queries do
VOTE = tl.constexpr(8)  # number of the barrier at which the softmax's warps vote
RECEIVERS = tl.constexpr(6)  # warps of the softmax, of `multiply` and of `load`
WINDOW = tl.constexpr(32)  # numbers that a warp reads or writes at a time, one each lane


@dataclass(frozen=True)
class DecodeTmem(tk.Knob):
    """The constants of `attention_decode_tmem`.

    Args:
        dtype: of Q, K and V, bf16 or fp16.
        rows: of a tile of queries, 16 or 32.
        head_dim: columns of tiles of Q and K; value_dim: of V and O, 64 or 128. Tensors may have fewer.
        causal, softcap, lengths, starts, row_tiles, partial: see `AttentionDecode`.
        lse: whether the log-sum-exp is written.
        stages: of the rings of K and of V.
        page_size: keys of a page, see `AttentionDecodePaged`; None for a contiguous cache.
    """

    dtype: tl.dtype = tk.bf16
    rows: int = 16
    head_dim: int = 128
    value_dim: int = 128
    causal: bool = False
    softcap: bool = False
    lengths: bool = True
    starts: bool = False
    row_tiles: int = 1
    partial: bool = True
    lse: bool = True
    stages: int = 3
    page_size: int | None = None

    @property
    def copied(self) -> int:
        """Keys of a copy."""
        return KEYS.value if self.page_size is None else math.gcd(KEYS.value, self.page_size)

    @property
    def q(self) -> tk.st:
        """A tile of queries."""
        return tk.st(self.dtype, self.rows, self.head_dim)

    @property
    def k(self) -> tk.st:
        """A block of keys."""
        return tk.st(self.dtype, KEYS.value, self.head_dim)

    @property
    def v(self) -> tk.st:
        """A block of values."""
        return tk.st(self.dtype, KEYS.value, self.value_dim)

    @property
    def p(self) -> tk.st:
        """The weights of a block, transposed."""
        return tk.st(self.dtype, KEYS.value, self.rows)

    @property
    def cache_policy(self) -> str | None:
        """L2 evicts first what nobody reads again (measured: docs/notes/attention_decode.md)."""
        return "evict_first" if self.row_tiles == 1 else None


@triton.jit
def task_of(index, keys, start, K, args, C: tl.constexpr):
    """Task number `index`, of a sequence of `keys` keys that are seen from number `start` on. It may have no block.
    Behind the last task it is not valid."""
    batch_tile, split = tk.unravel(index, args.splits)
    batch, tile = tk.unravel(batch_tile, tk.extent(K, 1) * C.row_tiles)
    first = start // KEYS
    blocks = tl.maximum(tk.ceil_div(keys, KEYS) - first, 0)
    begin, end = first + split * blocks // args.splits, first + (split + 1) * blocks // args.splits
    return tk.struct(
        is_valid=index < args.tasks,
        batch=batch,
        tile=tile,
        split=split,
        kv_head=tile // C.row_tiles,
        keys=keys,
        start=start,
        last=end - 1,
        count=end - begin,
    )


@triton.jit
def task_at(index, K, bounds, args, C: tl.constexpr):
    """Task number `index`. Reads global memory, which takes 1,000 to 2,000 cycles once copies are in flight."""
    batch = tl.minimum(index, args.tasks - 1) // (tk.extent(K, 1) * C.row_tiles * args.splits)
    keys = tk.load_scalar(bounds.lengths, batch) if C.lengths else tk.extent(K, 2)
    start = tk.load_scalar(bounds.starts, batch) if C.starts else 0
    return task_of(index, keys, start, K, args, C)


@triton.jit
def receive(memory, state, K, args, C: tl.constexpr):
    """The task that `schedule` has broadcast, for one warp or for all of a role."""
    tk.consumer_wait(memory.task_pipe, state)
    numbers = memory.tasks[state.index]
    index, keys, start = tk.load_scalar(numbers, 0), tk.load_scalar(numbers, 1), tk.load_scalar(numbers, 2)
    barrier.syncwarp()  # all lanes have read before one lane arrives for them
    arrive(memory.task_pipe.empty[state.index])
    return task_of(index, keys, start, K, args, C)


@triton.jit
def broadcast(memory, state, index, task):
    """Write a task's numbers for the other roles."""
    lane = tk.iota(tk.rv(tk.int32, WINDOW), 0)
    tk.producer_acquire(memory.task_pipe, state)
    tk.store(memory.tasks[state.index], tk.where(lane == 0, index, tk.where(lane == 1, task.keys, task.start)))
    tk.arrive(memory.task_pipe.full[state.index])


@triton.jit
def take_over(memory, turn, args):
    """The number of a task whose CTA has not started and now will not; behind the last where none is left."""
    tk.fence_async()  # the answer before has been read
    tk.expect(memory.answer_full[0], clc.RESULT_BYTES)
    clc.try_cancel(memory.answer, memory.answer_full[0])
    tk.wait(memory.answer_full[0], turn & 1)
    return tl.where(clc.is_canceled(memory.answer) == 1, clc.first_ctaid(memory.answer), args.tasks)


@triton.jit
def schedule(memory, first, K, pages, bounds, args, C: tl.constexpr):
    """Take over tasks, each when `load` is about to end the one before, and broadcast them."""
    state, window = tk.pipeline_state(memory.task_pipe), tk.pipeline_state(memory.window_pipe)
    task = first
    while task.is_valid:
        if C.page_size is not None:
            window = find(memory, window, task, pages, C)
        tk.wait(memory.nearly_loaded[0], state.count & 1)
        index = take_over(memory, state.count, args)
        task = task_at(index, K, bounds, args, C)
        broadcast(memory, state, index, task)
        state = tk.advance(state)


@triton.jit
def find(memory, window, task, pages, C: tl.constexpr):
    """Read the page numbers of a task's copies ahead of `load`, a window at a time.

    Behind the sequence's last key stands the number of its last page: the table may end there, or hold anything.
    """
    COPIES: tl.constexpr = KEYS // C.copied
    for first in range(0, task.count * COPIES, WINDOW):
        n = tk.iota(tk.rv(tk.int32, WINDOW), 0, first)
        copy = tl.minimum((task.last - n // COPIES) * COPIES + n % COPIES, (task.keys - 1) // C.copied)
        numbers = tl.load(tk.pointer_to(pages, (task.batch, tl.maximum(copy, 0) * C.copied // C.page_size)))
        tk.producer_acquire(memory.window_pipe, window)
        tk.store(memory.windows[window.index], numbers)
        tk.arrive(memory.window_pipe.full[window.index])
        window = tk.advance(window)
    return window


@triton.jit
def load_pages(ring, pipe, stage, X, task, i, numbers, C: tl.constexpr):
    """Start the copies of block `i` of a task from pages, whose `numbers` a window holds, into the next stage of a
    ring."""
    COPIES: tl.constexpr = KEYS // C.copied
    tk.producer_acquire(pipe, stage)
    tk.producer_commit(pipe, stage, ring[stage.index])
    for j in tl.static_range(COPIES):
        page = tk.load_scalar(numbers, (i * COPIES + j) % WINDOW)
        copy = tl.minimum((task.last - i) * COPIES + j, (task.keys - 1) // C.copied)
        tk.load_async(
            tk.subtile(ring[stage.index], C.copied, tk.shape(ring[stage.index], 1), j, 0),
            X,
            (page, task.kv_head, copy % (C.page_size // C.copied), 0),
            pipe.full[stage.index],
            cache_policy=C.cache_policy,
        )


@triton.jit
def load(memory, first, Q, K, V, args, C: tl.constexpr):
    """Load the queries of a task, then K and V block by block."""
    COPIES: tl.constexpr = KEYS // C.copied
    stage, q_stage = tk.pipeline_state(memory.k_pipe), tk.pipeline_state(memory.q_pipe)
    state, window = tk.pipeline_state(memory.task_pipe), tk.pipeline_state(memory.window_pipe)
    task = first
    while task.is_valid:
        if task.count > 0:
            load_block(memory.q, memory.q_pipe, q_stage, Q, (task.batch, task.tile, 0, 0))
            q_stage = tk.advance(q_stage)
        else:
            tk.arrive(memory.nearly_loaded[0])
        for i in range(task.count):
            if i == tl.maximum(task.count - C.stages, 0):
                tk.arrive(memory.nearly_loaded[0])
            if C.page_size is None:
                coord = (task.batch, task.kv_head, task.last - i, 0)
                load_block(memory.k, memory.k_pipe, stage, K, coord, C.cache_policy)
                load_block(memory.v, memory.v_pipe, stage, V, coord, C.cache_policy)
            else:
                if i * COPIES % WINDOW == 0:
                    tk.consumer_wait(memory.window_pipe, window)
                numbers = memory.windows[window.index]
                load_pages(memory.k, memory.k_pipe, stage, K, task, i, numbers, C)
                load_pages(memory.v, memory.v_pipe, stage, V, task, i, numbers, C)
                if ((i + 1) * COPIES % WINDOW == 0) | (i + 1 == task.count):
                    tk.arrive(memory.window_pipe.empty[window.index], fenced=True)
                    window = tk.advance(window)
            stage = tk.advance(stage)
        task = receive(memory, state, K, args, C)
        state = tk.advance(state)


@triton.jit
def scores(memory, q, stage):
    """Sᵀ = K Qᵀ of a block. Its slot is free: the product with V of the block before the last awaited its weights."""
    tk.consumer_wait(memory.k_pipe, stage)
    slot = stage.count % SLOTS
    complete = (memory.s_full[slot], memory.k_pipe.empty[stage.index])
    tk.mm_ABt(memory.k[stage.index], q, into=memory.s[slot], arrived=complete)


@triton.jit
def values(memory, stage, accumulate):
    """Oᵀ += Vᵀ Pᵀ of a block."""
    slot = stage.count % SLOTS
    tk.consumer_wait(memory.v_pipe, stage)
    tk.wait(memory.p_full[slot], stage.count // SLOTS & 1)
    complete = (memory.v_pipe.empty[stage.index], memory.p_empty[slot])
    tk.mma_AtB(memory.v[stage.index], memory.p[slot], memory.o, accumulate=accumulate, arrived=complete)


@triton.jit
def multiply(memory, first, K, args, C: tl.constexpr):
    """Issue the products: S of the first block, then S of each further block before O of the one before it."""
    k_stage, v_stage = tk.pipeline_state(memory.k_pipe), tk.pipeline_state(memory.v_pipe)
    q_stage, state = tk.pipeline_state(memory.q_pipe), tk.pipeline_state(memory.task_pipe)
    task = first
    while task.is_valid:
        count = task.count
        if count > 0:
            tk.consumer_wait(memory.q_pipe, q_stage)
            q = memory.q[q_stage.index]
            scores(memory, q, k_stage)
            k_stage = tk.advance(k_stage)
            for i in range(1, count):
                scores(memory, q, k_stage)
                values(memory, v_stage, i > 1)
                k_stage, v_stage = tk.advance(k_stage), tk.advance(v_stage)
            tk.mma_commit(memory.q_pipe.empty[q_stage.index])
            values(memory, v_stage, count > 1)
            v_stage, q_stage = tk.advance(v_stage), tk.advance(q_stage)
        task = receive(memory, state, K, args, C)
        state = tk.advance(state)


@triton.jit
def masked(s, task, col, args, C: tl.constexpr):
    """Transposed scores of the keys from number `col` on, after soft-cap and mask. Column c is query c % queries."""
    if C.softcap:  # tanh, in units of the soft-cap
        s = 1.0 - 2.0 * tk.reciprocal(1.0 + tk.exp2(s * args.squash))
    behind = task.keys - col  # rows that are keys
    if C.starts:
        s = tk.upper_fill(s, task.start - col, float("-inf"))
    if C.causal:
        if behind < KEYS + args.queries - 1:
            limit = tk.iota(tk.row_vec(tk.rt(tk.int32, KEYS, C.rows, "row"))) % args.queries + (behind - args.queries)
            s = tk.where(tk.le_col(tk.iota(s, 0), limit), s, float("-inf"))
    elif behind < KEYS:
        s = tk.lower_fill(s, behind, float("-inf"))
    return s


@triton.jit
def zero_behind(memory, stage, behind, C: tl.constexpr):
    """Zero V after the sequence's last key: a cache may hold NaN there, and zero times NaN is NaN."""
    tk.consumer_wait(memory.v_pipe, stage)
    for i in tl.static_range(KEYS // ZEROED):
        if behind < (i + 1) * ZEROED:
            part = tk.subtile(memory.v[stage.index], ZEROED, C.value_dim, i, 0)
            v = tk.load(part, layout="memory", fenced=True)
            tk.store(part, tk.where(tk.lt(tk.iota(v, 0), behind - i * ZEROED), v, 0.0))


@triton.jit
def exceeds(s, limit):
    """Whether a score of any key exceeds its query's limit, for all warps of the softmax. NaN does not."""
    vote = tk.row_max(tk.sub_col(s, limit)) > 0
    return barrier.reduce(vote.to(tl.int32), VOTE, KEYS, "or") != 0


@triton.jit
def softmax(memory, first, K, Out, L, args, C: tl.constexpr):
    """Pᵀ = 2^(Sᵀ · scale − m) of each block, and a task's results.

    m is the largest score of a query's first keys. It and O change only where a score is GROWTH larger.
    """
    SCORES: tl.constexpr = tk.rt(tk.fp32, KEYS, C.rows, "row")
    if C.partial:
        tk.dependents_launch()  # `combine` starts while this kernel runs, and waits for its end
    scale = args.scale
    stage, state = tk.pipeline_state(memory.v_pipe), tk.pipeline_state(memory.task_pipe)
    task = first
    while task.is_valid:
        m, sums = tk.neg_infty(tk.row_vec(SCORES)), tk.zero(SCORES)
        for i in range(task.count):
            slot, phase = stage.count % SLOTS, stage.count // SLOTS & 1
            tk.wait(memory.s_full[slot], phase)
            col = (task.last - i) * KEYS
            s = masked(tk.load(memory.s[slot]), task, col, args, C)
            if exceeds(s, m + GROWTH / scale):
                largest = tk.col_max(s, accumulate=m)
                alpha = tk.where(m > float("-inf"), tk.exp2((m - largest) * scale), 1.0)
                sums, m = tk.mul_col(sums, alpha), largest
                if i > 0:
                    tk.wait(memory.p_empty[slot ^ 1], (stage.count - 1) // SLOTS & 1)
                    tk.store(memory.o, tk.mul_col(tk.load(memory.o), alpha))
            p = tk.exp2_col(s, scale, tk.where(m > float("-inf"), m * scale, 0.0))
            sums = tk.add(sums, p)
            tk.wait(memory.p_empty[slot], phase ^ 1)
            tk.store(memory.p[slot], tk.cast(p, C.dtype))
            if C.lengths:
                if (i == 0) & (task.keys - col < KEYS):
                    zero_behind(memory, stage, task.keys - col, C)
            tk.fence_async()
            barrier.syncwarp()
            arrive(memory.p_full[slot])
            stage = tk.advance(stage)
        total = tk.col_sum(sums)
        coord = (task.batch, task.tile, task.split, 0, 0)
        if task.count > 0:
            tk.wait(memory.p_empty[(stage.count - 1) % SLOTS], (stage.count - 1) // SLOTS & 1)
            o = tk.mul_col(tk.load(memory.o), tk.where(total > 0, 1.0 / total, 0.0))
            tk.store(Out, tk.transpose(o), coord)
        else:
            tk.store(Out, tk.zero(tk.rt(tk.fp32, C.rows, C.value_dim, "memory")), coord)
        if C.lse:
            lse = tk.where(m == float("inf"), m, (m * scale + tk.log2(total)) * LN_2)
            tk.store(L, lse, (task.batch, task.tile, task.split, 0))
        task = receive(memory, state, K, args, C)
        state = tk.advance(state)


@tk.kernel
@triton.jit
def attention_decode_tmem(Q, K, V, Out, L, pages, bounds, args, C: tl.constexpr):
    """Write O to `Out`, and with `C.lse` the log-sum-exp L; tensors as those of `AttentionDecode` and
    `AttentionDecodePaged`.

    `bounds`: lengths and starts, where the kernel has them. `args`: see `tmem_decode_plan.Args`. Grid: the tasks.
    """
    first = task_at(tk.block_index(), K, bounds, args, C)  # read while the barriers are made
    memory = tk.struct(
        q=tk.allocate(C.q, SLOTS),
        k=tk.allocate(C.k, C.stages),
        v=tk.allocate(C.v, C.stages),
        p=tk.allocate(C.p, SLOTS),
        tasks=tk.allocate(tk.sv(tk.int32, WINDOW), SLOTS),
        answer=tk.allocate(tk.sv(tk.int32, 16)),  # of which an answer takes four words
        windows=tk.allocate(tk.sv(tk.int32, WINDOW), SLOTS),
        s=tk.tensor_allocator(tk.tt(tk.fp32, KEYS, C.rows), SLOTS),
        o=tk.tensor_allocator(tk.tt(tk.fp32, C.value_dim, C.rows)),
        q_pipe=tk.pipeline(SLOTS),
        k_pipe=tk.pipeline(C.stages),
        v_pipe=tk.pipeline(C.stages),
        task_pipe=tk.pipeline(SLOTS, RECEIVERS),
        window_pipe=tk.pipeline(SLOTS),
        nearly_loaded=tk.semaphores(1),
        answer_full=tk.semaphores(1),
        s_full=tk.semaphores(SLOTS),
        p_full=tk.semaphores(SLOTS, 4),  # the warps of the softmax
        p_empty=tk.semaphores(SLOTS),
    )
    tk.specialize(
        (
            (softmax, (memory, first, K, Out, L, args, C)),
            (multiply, (memory, first, K, args, C)),
            (load, (memory, first, Q, K, V, args, C)),
            (schedule, (memory, first, K, pages, bounds, args, C)),
        ),
        warps=(4, 1, 1, 1),
        registers=(208, 48, 48, 48),
    )
