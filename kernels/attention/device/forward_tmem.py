"""Attention forward O = softmax(Q Kᵀ · scale) V on chips with tensor memory, as five roles.

A task is two tiles of 128 queries of a head: while the softmax works on the scores of one, the tensor cores work on the
other. Per block of keys, last to first:

- `load`: K and V by TMA, and Q once;
- `multiply`, one warp: S = Q Kᵀ and O += P V of both tiles, whose completion releases Q, K and V;
- `softmax`, a warpgroup a tile: P = 2^(S · scale − m), in tensor memory;
- `correct`, a warpgroup: O · 2^(m_old − m) where m has grown much, and the results.

Where tensor memory has no columns for P, it is written over S. The next S is then multiplied after P. Otherwise S is
multiplied while the softmax works on the S before.

Source: FlashAttention-4.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.arch import TENSOR_COLUMNS
from tritonkittens.kernels.attention.device.masks import hidden, keys_of, squashed
from tritonkittens.kernels.attention.device.varlen import entry

ROWS = tl.constexpr(128)  # queries of a tile: a lane of tensor memory and a thread of a softmax warpgroup for each
TILES = tl.constexpr(2)
# Log₂ of the factor by which a row's largest weight may exceed one before O is rescaled: P stays finite in fp16, and
# floating point absorbs the factor
GROWTH = tl.constexpr(8.0)
PART = tl.constexpr(32)  # columns that a thread holds beside its row of S
STAGED = 64  # columns of O that are staged at a time
LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class ForwardTmem(tk.Knob):
    """The constants of `attention_forward_tmem`.

    Args:
        dtype: of the operands and O, bf16 or fp16.
        tile_n: keys of a block.
        head_dim: columns of tiles of Q and K; value_dim: of V and O, a multiple of 64. Tensors may have fewer.
        causal, window: see `masks`.
        softcap: whether scores have a soft-cap.
        packed: whether sequences of different lengths follow each other along the rows, with tasks of `list_tiles`.
        lse: whether the log-sum-exp is written.
        stages: of the rings of K and of V.
        order: raster order of the tasks.
        fma_share: of the exponentials that the FMA units compute; see `tk.exp2`.
    """

    dtype: tl.dtype = tk.bf16
    tile_n: int = 128
    head_dim: int = 128
    value_dim: int = 128
    causal: bool = False
    window: bool = False
    softcap: bool = False
    packed: bool = False
    lse: bool = False
    stages: int = 2
    order: tk.Order = tk.ColumnMajor()
    fma_share: float = 0.25

    tile_m = 128  # with `consumers`, what `masks.hidden` computes a tile's first row from
    consumers = 2

    @property
    def apart(self) -> bool:
        """Whether P has columns of its own."""
        return TILES.value * (self.tile_n + self.tile_n // 2 + self.value_dim) <= TENSOR_COLUMNS

    @property
    def q(self) -> tk.st:
        """A tile of queries."""
        return tk.st(self.dtype, self.tile_m, self.head_dim)

    @property
    def k(self) -> tk.st:
        """A block of keys."""
        return tk.st(self.dtype, self.tile_n, self.head_dim)

    @property
    def v(self) -> tk.st:
        """A block of values."""
        return tk.st(self.dtype, self.tile_n, self.value_dim)

    @property
    def o(self) -> tk.st:
        """The columns of O that are staged at a time."""
        return tk.st(self.dtype, self.tile_m, STAGED)


@triton.jit
def tasks_end(args, C: tl.constexpr):
    """The number after that of the last task. Of packed sequences, a CTA has one task, or none after the last tile."""
    if C.packed:
        return tl.where(entry(args.entries, tk.block_index() // args.heads, True)[0] >= 0, args.tiles * args.heads, 0)
    else:
        return args.tiles * args.heads


@triton.jit
def task_at(index, Q, K, args, C: tl.constexpr):
    """Task number `index`: which queries of which head, and the blocks of keys that they see.

    `batch` and `kv_batch` are the first coordinates of queries and keys: a number, or the sequence. A task has at least
    one block. Queries that see no key see one that is all masked.
    """
    HEIGHT: tl.constexpr = ROWS * TILES
    if C.packed:
        slot, head = tk.unravel(index, args.heads)
        row, batch, kv_batch, _, _ = entry(args.entries, slot, True)
        queries, keys = batch.rows, kv_batch.rows
    else:
        row, batch_head = tk.tile_at(C.order, index, args.tiles, args.heads)
        batch, head = tk.unravel(batch_head, tk.extent(Q, 1))
        queries, keys, kv_batch = tk.extent(Q, 2), tk.extent(K, 2), batch
    first, shift = row * HEIGHT, keys - queries
    last, count = keys_of(tk.struct(config=C, args=args), first, tl.minimum(first + HEIGHT, queries), shift, keys)
    return tk.struct(
        config=C,
        args=args,
        batch=batch,
        kv_batch=kv_batch,
        head=head,
        kv_head=head // args.group,
        row=row,
        shift=shift,
        keys=keys,
        last=tl.maximum(last, 0),
        count=tl.maximum(count, 1),
    )


@triton.jit
def arrive(semaphore):
    """Each warp of this role arrives. It has read no shared memory that TMA will overwrite."""
    tk.arrive(semaphore, per="warp", fenced=True)


@triton.jit
def load_block(ring, pipe, stage, X, coord, cache_policy: tl.constexpr = None):
    """Start the copy of a block of K or V into the next stage of its ring."""
    tk.producer_acquire(pipe, stage)
    tk.producer_commit(pipe, stage, ring[stage.index])
    tk.load_async(ring[stage.index], X, coord, pipe.full[stage.index], cache_policy=cache_policy)


@triton.jit
def load(memory, Q, K, V, args, C: tl.constexpr):
    """Load Q of a task, then K and V block by block."""
    stage = tk.pipeline_state(memory.k_pipe)
    turn = 0
    for index in range(tk.block_index(), tasks_end(args, C), tk.block_count()):
        task = task_at(index, Q, K, args, C)
        for t in tl.static_range(TILES):
            tk.wait(memory.q_empty[t], (turn & 1) ^ 1)
            tk.expect(memory.q_full[t], memory.q[t])
            tk.load_async(memory.q[t], Q, (task.batch, task.head, task.row * TILES + t, 0), memory.q_full[t])
        for i in range(task.count):
            coord = (task.kv_batch, task.kv_head, task.last - i, 0)
            load_block(memory.k, memory.k_pipe, stage, K, coord)
            load_block(memory.v, memory.v_pipe, stage, V, coord)
            stage = tk.advance(stage)
        turn += 1


@triton.jit
def scores(memory, stage, T: tl.constexpr, C: tl.constexpr):
    """S = Q Kᵀ of tile `T`, once S of the last block is loaded, or over its P. The last tile releases K."""
    if C.apart:
        tk.wait(memory.s_empty[T], (stage.count & 1) ^ 1)
    # addressed at each product: descriptors of all parts of Q and K would take the uniform registers
    q, k = memory.q[tk.opaque_zero() + T], memory.k[tk.opaque_zero() + stage.index]
    if T + 1 < TILES:
        tk.mm_ABt(q, k, into=memory.s[T], arrived=memory.s_full[T])
    else:
        tk.mm_ABt(q, k, into=memory.s[T], arrived=(memory.s_full[T], memory.k_pipe.empty[stage.index]))


@triton.jit
def values(memory, stage, accumulate, T: tl.constexpr, C: tl.constexpr):
    """O += P V of tile `T`: of most keys once their P is written and O corrected, then of the last ones. The last tile
    releases V.
    """
    # addressed at each product, and not part by part: addresses of all parts would take the uniform registers
    v, o = memory.v[tk.opaque_zero() + stage.index], memory.o[T]
    if C.apart:
        p = memory.p[tk.opaque_zero() + T]
    else:
        p = memory.p[T]
    COLS: tl.constexpr = o.shape[1]
    HALF: tl.constexpr = tk.shape(v, 0) // 2
    LAST: tl.constexpr = tk.shape(v, 0) // PART - 1
    tk.wait(memory.p_most[T], stage.count & 1)
    tk.mma_AB(tk.subtile(p, ROWS, HALF), tk.subtile(v, HALF, COLS), o, wait=False, accumulate=accumulate)
    tk.mma_AB(tk.subtile(p, ROWS, PART, 0, LAST - 1), tk.subtile(v, PART, COLS, LAST - 1, 0), o, wait=False)
    tk.wait(memory.p_full[T], stage.count & 1)
    p, v = tk.subtile(p, ROWS, PART, 0, LAST), tk.subtile(v, PART, COLS, LAST, 0)
    if T + 1 < TILES:
        tk.mma_AB(p, v, o, wait=False)
    else:
        tk.mma_AB(p, v, o, arrived=memory.v_pipe.empty[stage.index])
    if C.apart:
        tk.mma_commit(memory.p_empty[T])


@triton.jit
def multiply(memory, Q, K, args, C: tl.constexpr):
    """Issue the products: S0, S1, then for each further block O0, S0, O1, S1, and the last O0, O1.

    Products of one thread complete in order. So a tile's S follows its O, whose P it overwrites, without a wait. Where
    P has columns of its own, the products of a further block are S0, S1, O0, O1.
    """
    k_stage, v_stage = tk.pipeline_state(memory.k_pipe), tk.pipeline_state(memory.v_pipe)
    turn = 0
    for index in range(tk.block_index(), tasks_end(args, C), tk.block_count()):
        count = task_at(index, Q, K, args, C).count
        tk.consumer_wait(memory.k_pipe, k_stage)
        for t in tl.static_range(TILES):
            tk.wait(memory.q_full[t], turn & 1)
            scores(memory, k_stage, t, C)
        k_stage = tk.advance(k_stage)
        for i in range(1, count):
            if C.apart:
                tk.consumer_wait(memory.k_pipe, k_stage)
                for t in tl.static_range(TILES):
                    scores(memory, k_stage, t, C)
            tk.consumer_wait(memory.v_pipe, v_stage)
            values(memory, v_stage, i > 1, 0, C)
            if not C.apart:
                tk.consumer_wait(memory.k_pipe, k_stage)
                scores(memory, k_stage, 0, C)
            values(memory, v_stage, i > 1, 1, C)
            if not C.apart:
                scores(memory, k_stage, 1, C)
            v_stage, k_stage = tk.advance(v_stage), tk.advance(k_stage)
        for t in tl.static_range(TILES):
            tk.mma_commit(memory.q_empty[t])
        tk.consumer_wait(memory.v_pipe, v_stage)
        for t in tl.static_range(TILES):
            values(memory, v_stage, count > 1, t, C)
            tk.mma_commit(memory.o_full[t])
        v_stage = tk.advance(v_stage)
        turn += 1


@triton.jit
def softmax(memory, Q, K, L, args, T: tl.constexpr, C: tl.constexpr):
    """P = 2^(S · scale − m), and the sums of its rows, of tile `T`."""
    vector: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, ROWS, C.tile_n, "row"))
    scale = args.scale
    turn = 0
    block = 0
    for index in range(tk.block_index(), tasks_end(args, C), tk.block_count()):
        task = task_at(index, Q, K, args, C)
        # The compiler cannot tell these. Otherwise it computes bounds of the mask before the roles begin, for both
        # tiles, and spills them. It moves terms of sums: hence xor
        zero = tk.opaque_zero()
        ctx = tk.with_field(task.replace(row=task.row ^ zero, shift=task.shift ^ zero), "consumer", T ^ zero)
        m, total = tk.neg_infty(vector), tk.zero(vector)
        for i in range(task.count):
            tk.wait(memory.s_full[T], block & 1)
            s = tk.load(memory.s[T])
            if C.apart:
                arrive(memory.s_empty[T])
            if C.softcap:
                s = squashed(s, args.squash)
            s = hidden(tk.with_field(ctx, "iter", i), s)
            # m ← max(m, max S) where that is more than GROWTH larger. O is zero before a row's first key
            largest = tk.row_max(s, accumulate=m)
            grown = (largest - m) * scale > GROWTH
            alpha = tk.where(grown & (m > float("-inf")), tk.exp2((m - largest) * scale), 1.0)
            m = tk.where(grown, largest, m)
            if C.apart:
                tk.wait(memory.p_empty[T], (block & 1) ^ 1)
            tk.store(memory.alpha[T], alpha)
            arrive(memory.alpha_full[T])
            offset = tk.where(m > float("-inf"), m * scale, 0.0)
            parts, sums = tk.split_cols(s, PART), tk.zero(vector)
            for j in tl.static_range(len(parts)):
                p = tk.exp2_row(parts[j], scale, offset, C.fma_share)
                tk.store(tk.subtile(memory.p[T], ROWS, PART, 0, j), tk.cast(p, C.dtype))
                sums = tk.add(sums, tk.row_sum(p))
                if j == len(parts) - 2:
                    arrive(memory.p_most[T])
                    tk.scheduling_barrier(block)  # without it, ptxas holds too many columns at a time
            arrive(memory.p_full[T])
            total = total * alpha + sums
            block += 1
        tk.wait(memory.share_empty[T], (turn & 1) ^ 1)
        tk.store(memory.share[T], tk.where(total > 0, 1.0 / total, 0.0))
        arrive(memory.share_full[T])
        if C.lse:
            lse = tk.where(m == float("inf"), m, (m * scale + tk.log2(total)) * LN_2)
            tk.store(L, lse, (task.batch, task.head, task.row * TILES + T))
        turn += 1


@triton.jit
def alpha_of(memory, t: tl.constexpr, vector: tl.constexpr, C: tl.constexpr):
    """The factors of the rows of O of tile `t`."""
    if C.apart:
        return tk.load(memory.alpha[t], vector, fenced=True)
    else:
        return tk.load(memory.alpha[t])


@triton.jit
def correct(memory, Q, K, Out, args, C: tl.constexpr):
    """O ← alpha · O before each product, and O / sum after the last."""
    vector: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, ROWS, PART, "row"))
    turn = 0
    block = 0
    for index in range(tk.block_index(), tasks_end(args, C), tk.block_count()):
        task = task_at(index, Q, K, args, C)
        for _ in range(task.count):
            for t in tl.static_range(TILES):
                # the softmax has seen the product before it, into O, complete
                tk.wait(memory.alpha_full[t], block & 1)
                tk.rescale_row(memory.o[t], alpha_of(memory, t, vector, C))
                arrive(memory.p_most[t])
            block += 1
        for t in tl.static_range(TILES):
            tk.wait(memory.share_full[t], turn & 1)
            share = tk.load(memory.share[t], vector, fenced=True)
            arrive(memory.share_empty[t])
            tk.wait(memory.o_full[t], turn & 1)
            parts = tk.split_cols(memory.o[t], C.o.cols)
            for j in tl.static_range(len(parts)):
                staged = memory.staged[(t * len(parts) + j) % TILES]
                tk.store_read_wait(1)  # the store before the last no longer reads this tile
                tk.store(staged, tk.mul_row(tk.load(parts[j]), share))
                tk.fence_async()
                tk.sync()
                tk.store_async(Out, staged, (task.batch, task.head, task.row * TILES + t, j))
        turn += 1
    tk.store_read_wait(0)


@tk.kernel
@triton.jit
def attention_forward_tmem(Q, K, V, Out, L, args, C: tl.constexpr):
    """Write O to `Out`, and with `C.lse` the log-sum-exp L. Any lengths, GQA, causal (bottom right alignment), windows,
    soft-cap.

    Q: (B, H, S, D), K: (B, H_kv, S_kv, D), V and O with D_v, L: (B, H, S) fp32. `args`: see `tmem_plan.Args`. CTAs
    share the tasks evenly, in the raster order. With `C.packed` the tensors have no dimension B, their layouts are
    ragged, and each task has a CTA.
    """
    s = tk.tensor_allocator(tk.tt(tk.fp32, ROWS, C.tile_n), TILES)
    P: tl.constexpr = tk.tt(C.dtype, ROWS, C.tile_n)
    if C.apart:
        p = tk.tensor_allocator(P, TILES)
        alpha = tk.allocate(tk.sv(tk.fp32, ROWS), TILES)
        s_empty, p_empty = tk.semaphores(TILES, 4), tk.semaphores(TILES)
    else:
        ALPHA: tl.constexpr = tk.tt(tk.fp32, ROWS, 1)
        p = (tk.reinterpret(s[0], P), tk.reinterpret(s[1], P))
        alpha = (tk.reinterpret(s[0], ALPHA, C.tile_n // 2), tk.reinterpret(s[1], ALPHA, C.tile_n // 2))
        s_empty, p_empty = None, None
    memory = tk.struct(
        q=tk.allocate(C.q, TILES),
        k=tk.allocate(C.k, C.stages),
        v=tk.allocate(C.v, C.stages),
        staged=tk.allocate(C.o, TILES),
        share=tk.allocate(tk.sv(tk.fp32, ROWS), TILES),
        s=s,
        p=p,
        alpha=alpha,
        o=tk.tensor_allocator(tk.tt(tk.fp32, ROWS, C.value_dim), TILES),
        k_pipe=tk.pipeline(C.stages),
        v_pipe=tk.pipeline(C.stages),
        q_full=tk.semaphores(TILES),
        q_empty=tk.semaphores(TILES),
        s_full=tk.semaphores(TILES),
        s_empty=s_empty,
        p_most=tk.semaphores(TILES, 8),  # the warps of a softmax, and of `correct`
        p_full=tk.semaphores(TILES, 4),
        p_empty=p_empty,
        alpha_full=tk.semaphores(TILES, 4),
        o_full=tk.semaphores(TILES),
        share_full=tk.semaphores(TILES, 4),
        share_empty=tk.semaphores(TILES, 4),
    )
    tk.specialize(
        (
            (correct, (memory, Q, K, Out, args, C)),
            (softmax, (memory, Q, K, L, args, 0, C)),
            (softmax, (memory, Q, K, L, args, 1, C)),
            (multiply, (memory, Q, K, args, C)),
            (load, (memory, Q, K, V, args, C)),
        ),
        warps=(4, 4, 4, 1, 1),
        registers=(96, 192, 192, 32, 32),
    )
