"""Gradients of attention on chips with tensor memory, in a single pass of five roles.

A task is a tile of 128 keys of a key head, and the blocks of queries that see them, of all query heads of its group.
Scores are transposed: a lane of tensor memory is a key. Per block, of 128 queries (64 if D is above 128):

- `load`: Q and dO with their row values by TMA, and K and V once;
- `multiply`, one warp: S = K Qᵀ, dP = V dOᵀ − Δ, dV += P dO, dK += dS Q, dQ = dSᵀ K;
- `compute`, two warpgroups, of half the queries each: P = 2^(S · scale − L) over S in tensor memory, dS = P ∘ dP in
  shared memory, and at the end dV and dK;
- `reduce`, a warpgroup: adds dQ to fp32 numbers in global memory by TMA.

The Δ come by a product, too: three ones a row times the three bf16 parts of each value, as in `AttentionBackward`. A
thread has a key. It would otherwise load the values of all queries from shared memory, between two products. It does
that with L, under the products of dK and dQ.

Where D is above 128, dV and dK leave 192 of the 512 columns of tensor memory. S and dP of 64 queries fit beside them,
those of 128 do not. A product of 64 rows takes the tensor cores as long as one of 128. So the first 128 columns of dQ
are transposed, Kᵀ dS, over dP. The other 64 have columns of their own.

Source: FlashAttention-4.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.backward import PARTS, STEP
from tritonkittens.kernels.attention.device.forward_tmem import ROWS, arrive
from tritonkittens.kernels.attention.device.masks import hidden_from, queries_of
from tritonkittens.kernels.attention.device.varlen import entry

HALVES = tl.constexpr(2)  # compute roles
PART = tl.constexpr(32)  # columns that a thread holds beside P
GROUP = tl.constexpr(64)  # queries of a tile of Δ in global memory


@dataclass(frozen=True)
class BackwardTmem(tk.Knob):
    """The constants of `attention_backward_tmem`.

    Args:
        dtype: of the operands and of dK and dV, bf16 or fp16.
        head_dim: columns of the tiles of Q and K, 64, 128 or 192. TMA fills the rest with zeros.
        value_dim: columns of the tiles of V and dO, 64 or 128.
        causal, window: see `masks`.
        cut: whether the last tile of keys may be partial.
        packed: whether sequences of different lengths follow each other along the rows, with tasks of `list_tiles`.
        order: raster order of the tasks.
        fma_share: of the exponentials that the FMA units compute; see `tk.exp2`.
    """

    dtype: tl.dtype = tk.bf16
    head_dim: int = 128
    value_dim: int = 128
    causal: bool = False
    window: bool = False
    cut: bool = True
    packed: bool = False
    order: tk.Order = tk.ColumnMajor()
    fma_share: float = 0.25

    tile_m = 128  # keys of a task

    @property
    def tile_n(self) -> int:
        """Queries of a block."""
        return 64 if self.dq_in_two else 128

    @property
    def q(self) -> tk.st:
        """A block of queries."""
        return tk.st(self.dtype, self.tile_n, self.head_dim)

    @property
    def do(self) -> tk.st:
        """A block of dO."""
        return tk.st(self.dtype, self.tile_n, self.value_dim)

    @property
    def k(self) -> tk.st:
        """A tile of keys, or of dK."""
        return tk.st(self.dtype, self.tile_m, self.head_dim)

    @property
    def v(self) -> tk.st:
        """A tile of values, or of dV."""
        return tk.st(self.dtype, self.tile_m, self.value_dim)

    @property
    def lse(self) -> tk.sv:
        """−L of a block of queries: no instruction that computes two elements negates an addend."""
        return tk.sv(tk.fp32, self.tile_n)

    @property
    def addends(self) -> tk.st:
        """Δ of a block of queries."""
        return tk.st(tk.bf16, STEP.value, self.tile_n)

    @property
    def group(self) -> tk.st:
        """Δ as they lie in global memory."""
        return tk.st(tk.bf16, STEP.value, GROUP.value)

    @property
    def ones(self) -> tk.st:
        """What the Δ are multiplied by."""
        return tk.st(tk.bf16, self.tile_m, STEP.value)

    @property
    def ds(self) -> tk.st:
        """dS of a block."""
        return tk.st(self.dtype, self.tile_m, self.tile_n)

    @property
    def dq(self) -> tk.st:
        """The columns of dQ that are staged at a time."""
        return tk.st(tk.fp32, self.tile_n, {64: 32, 128: 16}.get(self.head_dim, self.head_dim))

    @property
    def dq_stages(self) -> int:
        """Staged tiles of dQ that fit into shared memory."""
        return {64: 2, 128: 3}.get(self.head_dim, 1)

    @property
    def dq_apart(self) -> bool:
        """Whether dQ has columns of tensor memory of its own. Otherwise it overwrites dP."""
        return self.head_dim == 64

    @property
    def dq_in_two(self) -> bool:
        """Whether dQ is two products, of ROWS columns and of the rest."""
        return self.head_dim > ROWS.value

    @property
    def do_stages(self) -> int:
        """Blocks of dO that fit into shared memory."""
        return 2 if self.head_dim == 64 else 1


@triton.jit
def task_of(Q, K, args, C: tl.constexpr):
    """This CTA's task: a tile of keys, and the blocks of queries that see them.

    `batch` and `kv_batch` are the first coordinates of queries and keys: a number, or the sequence. `numbers` is that
    of row values, whose block number `first` is that of the first query. A task has at least one block of queries. Keys
    that no query sees have one that is all masked. Packed tasks after the last tile have no key.
    """
    if C.packed:
        slot, kv_head = tk.unravel(tk.block_index(), args.heads)
        row, batch, kv_batch, first_block, _ = entry(args.entries, slot, True)
        row, numbers, queries, keys = tl.maximum(row, 0), 0, batch.rows, kv_batch.rows
    else:
        row, batch_head = tk.tile_at(C.order, tk.block_index(), args.tiles, args.heads)
        row = args.tiles - 1 - row  # most queries see the first keys: longest first
        batch, kv_head = tk.unravel(batch_head, tk.extent(K, 1))
        batch = tk.pin(batch)
        kv_batch, numbers, first_block, queries, keys = batch, batch, 0, tk.extent(Q, 2), tk.extent(K, 2)
    first, shift = row * ROWS, keys - queries
    begin, end = queries_of(tk.struct(config=C, args=args), first, first + ROWS, shift, queries)
    if C.packed:  # the row values behind are those of another sequence
        begin = tl.minimum(begin, tl.maximum(tk.ceil_div(queries, C.tile_n) - 1, 0))
    # pinned: otherwise every role computes them
    return tk.struct(
        config=C,
        args=args,
        batch=batch,
        kv_batch=kv_batch,
        numbers=numbers,
        first=first_block,
        queries=queries,
        kv_head=tk.pin(kv_head),
        head=tk.pin(kv_head * args.group),
        row=tk.pin(row),
        shift=shift,
        keys=keys,
        begin=tk.pin(begin),
        end=tk.pin(tl.maximum(end, begin + 1)),
    )


@triton.jit
def load(memory, task, Q, dO, K, V, LSE_log2, dPsum):
    """Load K and V of the task, and Q, dO and their row values block by block."""
    GROUPS: tl.constexpr = tk.shape(memory.dpsum[0], 1) // GROUP
    q_stage, do_stage = tk.pipeline_state(memory.q_pipe), tk.pipeline_state(memory.do_pipe)
    keys = (task.kv_batch, task.kv_head, task.row, 0)
    tk.expect(memory.k_full, memory.k[0])
    tk.load_async(memory.k[0], K, keys, memory.k_full)
    tk.expect(memory.v_full, memory.v[0])
    tk.load_async(memory.v[0], V, keys, memory.v_full)
    for head in range(task.head, task.head + task.args.group):
        for block in range(task.begin, task.end):
            q, lse, full = memory.q[q_stage.index], memory.lse[q_stage.index], memory.q_pipe.full[q_stage.index]
            tk.producer_acquire(memory.q_pipe, q_stage)
            tk.producer_commit(memory.q_pipe, q_stage, (q, lse))
            tk.load_async(q, Q, (task.batch, head, block, 0), full)
            tk.load_async(lse, LSE_log2, (task.numbers, head, task.first + block), full)
            do, dpsum, full = (
                memory.do[do_stage.index],
                memory.dpsum[do_stage.index],
                memory.do_pipe.full[do_stage.index],
            )
            tk.producer_acquire(memory.do_pipe, do_stage)
            tk.producer_commit(memory.do_pipe, do_stage, (do, dpsum))
            tk.load_async(do, dO, (task.batch, head, block, 0), full)
            for i in tl.static_range(GROUPS):
                part = tk.subtile(dpsum, STEP, GROUP, 0, i)
                tk.load_async(part, dPsum, (task.numbers, head, (task.first + block) * GROUPS + i, 0, 0), full)
            q_stage, do_stage = tk.advance(q_stage), tk.advance(do_stage)


@triton.jit
def scores(memory, stage):
    """S = K Qᵀ of a block."""
    # K is addressed at each product: descriptors of all parts of such tiles would take the uniform registers
    tk.mm_ABt(memory.k[tk.opaque_zero()], memory.q[stage.index], into=memory.s, arrived=memory.s_full)


@triton.jit
def score_gradients(memory, stage):
    """dP = V dOᵀ − Δ of a block."""
    zero = tk.opaque_zero()
    tk.consumer_wait(memory.do_pipe, stage)
    dp = tk.mm_ABt(memory.v[zero], memory.do[stage.index], into=memory.dp, wait=False)
    tk.mma_AB(memory.ones[zero], memory.dpsum[stage.index], dp, arrived=memory.dp_full)


@triton.jit
def values(memory, stage, number, HALF: tl.constexpr):
    """dV += P dO of half the queries of block `number`."""
    p, dv = memory.p[HALF], memory.dv
    tk.wait(memory.p_full[HALF], number & 1)
    do = tk.subtile(memory.do[stage.index], p.shape[1], dv.shape[1], HALF, 0)
    tk.mma_AB(p, do, dv, wait=False, accumulate=(number > 0) | (HALF > 0))


@triton.jit
def query_gradient_tiles(dp, C: tl.constexpr):
    """(tiles of tensor memory for dQ, shared memory to stage them)."""
    staged = tk.allocate(C.dq, C.dq_stages)
    if C.dq_in_two:
        REST: tl.constexpr = C.head_dim - ROWS
        first = tk.subtile(staged[0], C.tile_n, ROWS, 0, 0)
        last = tk.subtile(staged[0], C.tile_n, REST, 0, ROWS // REST)
        return (dp, tk.tensor_allocator(tk.tt(tk.fp32, C.tile_n, REST))), (first, last)
    elif C.dq_apart:
        return (tk.tensor_allocator(tk.tt(tk.fp32, C.tile_n, C.head_dim)),), staged
    else:
        return (dp,), staged


@triton.jit
def query_gradients(memory, number, C: tl.constexpr):
    """dQ = dSᵀ K of block `number`. Of more than ROWS columns, the first ROWS are transposed: Kᵀ dS."""
    zero, parity = tk.opaque_zero(), (number & 1) ^ 1
    ds, k, complete = memory.ds[zero], memory.k[zero], (memory.dq_full[len(memory.dq) - 1], memory.ds_empty)
    if C.dq_in_two:
        REST: tl.constexpr = C.head_dim - ROWS
        tk.mm_AtB(tk.subtile(k, ROWS, ROWS, 0, 0), ds, into=memory.dq[0], arrived=memory.dq_full[0])
        tk.wait(memory.dq_empty[1], parity)
        tk.mm_AtB(ds, tk.subtile(k, ROWS, REST, 0, ROWS // REST), into=memory.dq[1], arrived=complete)
    else:
        if C.dq_apart:
            tk.wait(memory.dq_empty[0], parity)
        tk.mm_AtB(ds, k, into=memory.dq[0], arrived=complete)


@triton.jit
def multiply(memory, task, C: tl.constexpr):
    """Issue the products: S of the first block, then for each block dV, dP, the next S, dK, and dQ.

    Products of one thread complete in order. So the next S overwrites P, and the next dV reads it, without a wait. dP
    overwrites the dQ before, which is read while dV is multiplied. Where dQ has columns of its own, dP comes earlier:
    after that dQ.
    """
    count = (task.end - task.begin) * task.args.group
    q_stage, do_stage = tk.pipeline_state(memory.q_pipe), tk.pipeline_state(memory.do_pipe)
    tk.wait(memory.k_full, 0)
    tk.consumer_wait(memory.q_pipe, q_stage)
    scores(memory, q_stage)
    tk.wait(memory.v_full, 0)
    if C.dq_apart:
        score_gradients(memory, do_stage)
    for i in range(count):
        tk.consumer_wait(memory.do_pipe, do_stage)
        values(memory, do_stage, i, 0)
        if not C.dq_apart:
            tk.wait(memory.dq_empty[0], (i & 1) ^ 1)
            score_gradients(memory, do_stage)
        values(memory, do_stage, i, 1)
        tk.mma_commit(memory.do_pipe.empty[do_stage.index])
        do_stage, following = tk.advance(do_stage), tk.advance(q_stage)
        if i + 1 < count:
            tk.consumer_wait(memory.q_pipe, following)
            scores(memory, following)
        tk.wait(memory.ds_full, i & 1)
        zero, released = tk.opaque_zero(), memory.q_pipe.empty[q_stage.index]
        tk.mma_AB(memory.ds[zero], memory.q[q_stage.index], memory.dk, accumulate=i > 0, arrived=released)
        query_gradients(memory, i, C)
        if C.dq_apart:
            if i + 1 < count:
                score_gradients(memory, do_stage)
        q_stage = following
    tk.mma_commit(memory.complete)


@triton.jit
def weights(memory, task, stage, block, NUMBER: tl.constexpr):
    """P of part `NUMBER` of a block's queries, written to tensor memory: 0 where a query does not see a key, and for
    keys after the last."""
    C: tl.constexpr = task.config
    OF_QUERIES: tl.constexpr = tk.row_vec(tk.rt(tk.fp32, ROWS, PART, "row"))
    s, key = tk.load(tk.subtile(memory.s, ROWS, PART, 0, NUMBER)), task.row * ROWS
    s = hidden_from(task, s, key, block * C.tile_n + NUMBER * PART)
    if C.cut:
        if key + ROWS > task.keys:
            s = tk.lower_fill(s, task.keys - key, float("-inf"))
    minus_lse = tk.load(tk.subvector(memory.lse[stage.index], PART, NUMBER), OF_QUERIES, fenced=True)
    p = tk.exp2(tk.fma(s, task.args.scale, tk.broadcast_col(s, minus_lse)), C.fma_share)
    PER_HALF: tl.constexpr = C.tile_n // HALVES // PART
    tk.store(tk.subtile(memory.p[NUMBER // PER_HALF], ROWS, PART, 0, NUMBER % PER_HALF), tk.cast(p, C.dtype))
    return p


@triton.jit
def all_weights(memory, task, stage, block, HALF: tl.constexpr, PARTS: tl.constexpr):
    """P of the parts, one or two, of a role's queries."""
    p = weights(memory, task, stage, block, HALF * PARTS)
    if PARTS == 1:
        return (p,)
    else:
        tk.scheduling_barrier(block)  # without it, ptxas holds more columns than it has registers for
        return p, weights(memory, task, stage, block, HALF * PARTS + 1)


@triton.jit
def weight_gradients(memory, p, NUMBER: tl.constexpr, C: tl.constexpr):
    """Write dS = P ∘ dP of part `NUMBER` of a block's queries to shared memory."""
    ds = p * tk.load(tk.subtile(memory.dp, ROWS, PART, 0, NUMBER))
    tk.store(tk.subtile(memory.ds[0], ROWS, PART, 0, NUMBER), tk.cast(ds, C.dtype))


@triton.jit
def compute(memory, task, Out, HALF: tl.constexpr, C: tl.constexpr):
    """P and dS of half the queries of each block. At the end the first role writes dV, the second dK."""
    PARTS: tl.constexpr = C.tile_n // HALVES // PART
    # zeros that the compiler cannot tell: otherwise it computes bounds of the mask before the roles begin
    row, shift = tk.pin(task.row + tk.opaque_zero()), tk.pin(task.shift + tk.opaque_zero())
    task = task.replace(row=row, shift=shift)
    stage = tk.pipeline_state(memory.q_pipe)
    for _ in range(task.args.group):
        for block in range(task.begin, task.end):
            parity = stage.count & 1
            tk.consumer_wait(memory.q_pipe, stage)
            tk.wait(memory.s_full, parity)
            p = all_weights(memory, task, stage, block, HALF, PARTS)
            arrive(memory.p_full[HALF])
            tk.wait(memory.dp_full, parity)
            tk.wait(memory.ds_empty, parity ^ 1)
            for j in tl.static_range(PARTS):
                if j > 0:
                    tk.scheduling_barrier(block)
                weight_gradients(memory, p[j], HALF * PARTS + j, C)
            tk.fence_async()
            arrive(memory.ds_full)
            tk.consumer_release(memory.q_pipe, stage, per="warp")
            stage = tk.advance(stage)
    tk.wait(memory.complete, 0)
    if HALF == 0:
        write(Out, memory.v[0], memory.dv, task, 1.0)
    else:
        write(Out, memory.k[0], memory.dk, task, task.args.gradient)


@triton.jit
def write(Out, staged, sums, task, factor):
    """Write `factor` times the gradient of a tile of keys, by way of the shared memory of the operand."""
    parts = tk.split_cols(sums, PART)
    for j in tl.static_range(len(parts)):
        x = tk.load(parts[j]) * factor
        if task.config.packed:  # rows after the last sequence may hold NaN, and have no query
            x = tk.where(task.queries > 0, x, 0.0)
        tk.store(tk.subtile(staged, ROWS, PART, 0, j), x)
    tk.fence_async()
    tk.sync()
    tk.store_async(Out, staged, (task.kv_batch, task.kv_head, task.row, 0))
    tk.store_read_wait(0)


@triton.jit
def take(memory, N: tl.constexpr, number):
    """Product N of dQ of block `number`, in registers as a whole: then the next dP may overwrite it."""
    tk.wait(memory.dq_full[N], number & 1)
    x = tk.load(memory.dq[N])
    arrive(memory.dq_empty[N])
    return x


@triton.jit
def add(dQ, staged, x, coord, IN_FLIGHT: tl.constexpr):
    """Add `x` to global memory by way of a staged tile, which the last IN_FLIGHT additions do not read."""
    tk.store_read_wait(IN_FLIGHT)
    tk.store(staged, x)
    tk.fence_async()
    tk.sync()
    tk.store_add_async(dQ, staged, coord)


@triton.jit
def reduce(memory, task, dQ, C: tl.constexpr):
    """Add dQ of each block to global memory."""
    number, stage = 0, tk.pipeline_state(C.dq_stages)
    for head in range(task.head, task.head + task.args.group):
        for block in range(task.begin, task.end):
            x = take(memory, 0, number)
            if C.dq_in_two:
                staged, last = memory.staged
                add(dQ, staged, tk.transpose(x), (task.batch, head, block, 0), 1)
                add(dQ, last, take(memory, 1, number), (task.batch, head, block, ROWS // last.cols), 1)
            else:
                parts = tk.split_cols(x, C.dq.cols)
                for j in tl.static_range(len(parts)):
                    coord = (task.batch, head, block, j)
                    add(dQ, memory.staged[stage.index], parts[j], coord, C.dq_stages - 1)
                    stage = tk.advance(stage)
            number += 1
    tk.store_read_wait(0)


@tk.kernel
@triton.jit
def attention_backward_tmem(Q, dO, K, V, LSE_log2, dPsum, dQ, dK, dV, args, C: tl.constexpr):
    """Write dK and dV, and add dQ / `args.gradient` to fp32 numbers that are zero at first. Any lengths, GQA, causal
    (bottom right alignment), windows. The last bits of dQ differ from run to run.

    Q: (B, H, S, head_dim), dO: (B, H, S, value_dim), K, dK: (B, H_kv, S_kv, head_dim), V, dV: (…, value_dim), or
    narrower. LSE_log2: (B, H, S) fp32, dPsum: (B, H, groups, 3, 64) bf16, as `preprocess` writes them with ADDENDS=1.
    dQ: (B, H, S, head_dim) fp32; it and LSE_log2 may have more rows a head. `args`: see `tmem_plan.BackwardArgs`. A CTA
    computes one task.
    """
    task = task_of(Q, K, args, C)
    s = tk.tensor_allocator(tk.tt(tk.fp32, ROWS, C.tile_n))
    dp = tk.tensor_allocator(tk.tt(tk.fp32, ROWS, C.tile_n))
    COLS: tl.constexpr = C.tile_n // HALVES
    P: tl.constexpr = tk.tt(C.dtype, ROWS, COLS)
    dq, staged = query_gradient_tiles(dp, C)
    memory = tk.struct(
        q=tk.allocate(C.q, 2),
        do=tk.allocate(C.do, C.do_stages),
        k=tk.allocate(C.k, 1),
        v=tk.allocate(C.v, 1),
        ds=tk.allocate(C.ds, 1),
        staged=staged,
        lse=tk.allocate(C.lse, 2),
        dpsum=tk.allocate(C.addends, C.do_stages),
        ones=tk.allocate(C.ones, 1),
        s=s,
        dp=dp,
        p=(tk.reinterpret(s, P, 0), tk.reinterpret(s, P, COLS)),  # over the scores that the same role reads
        dv=tk.tensor_allocator(tk.tt(tk.fp32, ROWS, C.value_dim)),
        dk=tk.tensor_allocator(tk.tt(tk.fp32, ROWS, C.head_dim)),
        dq=dq,
        q_pipe=tk.pipeline(2, 9),  # released by a product, and by the warps that read L
        do_pipe=tk.pipeline(C.do_stages),
        k_full=tk.semaphores(1)[0],
        v_full=tk.semaphores(1)[0],
        s_full=tk.semaphores(1)[0],
        p_full=tk.semaphores(2, 4),
        dp_full=tk.semaphores(1)[0],
        ds_full=tk.semaphores(1, 8)[0],
        ds_empty=tk.semaphores(1)[0],
        dq_full=tk.semaphores(2),
        dq_empty=tk.semaphores(2, 4),
        complete=tk.semaphores(1)[0],
    )
    ones = tk.right_fill(tk.one(tk.rt(tk.fp32, ROWS, STEP)), PARTS)
    tk.store(memory.ones[0], tk.cast(ones, tk.bf16))
    tk.specialize(
        (
            (reduce, (memory, task, dQ, C)),
            (compute, (memory, task, dV, 0, C)),
            (compute, (memory, task, dK, 1, C)),
            (multiply, (memory, task, C)),
            (load, (memory, task, Q, dO, K, V, LSE_log2, dPsum)),
        ),
        warps=(4, 4, 4, 1, 1),
        registers=(152, 136, 136, 88, 88),
    )
