"""Mistakes that only Blackwell has, in the form of `faults.py`: tensor memory, commits, CTA pairs of one program a
CTA (`cluster_size`), block scales and cluster launch control."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import tritonkittens.lang as tk
from tests.sim.faults import BF16, Fault, empty, integers
from tritonkittens.inline_ptx import barrier, shared, tcgen05
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.sim.numbers import decode

BLACKWELL_FAULTS: list[Fault] = []
STAGES = tl.constexpr(2)
STEPS = tl.constexpr(2)


def fault(name: str, kind: str, kernel: Any, inputs: Any, **more: Any) -> None:
    BLACKWELL_FAULTS.append(Fault(name, kind, kernel, inputs, **({"arch": "sm_100a"} | more)))


# ---------------------------------------------------------------- an MMA warp with two accumulators


@triton.jit
def load_stages(A, B, a, b, stage, tiles, BUG: tl.constexpr):
    state = tk.pipeline_state(stage)
    for i in range(tiles * STEPS):
        tk.producer_acquire(stage, state)  # reports: stage_never_committed, stage_committed_twice
        tk.producer_commit(stage, state, (a[0], b[0]))
        # reports: stage_released_by_threads, committed_before_the_product, committed_by_the_loader
        tk.load_async(a[state.index], A, (i // STEPS, i % STEPS), stage.full[state.index])
        tk.load_async(b[state.index], B, (i % STEPS, 0), stage.full[state.index])
        if BUG == "committed_by_the_loader":
            tk.wait(stage.full[state.index], state.phase)
            tk.mma_commit(stage.empty[state.index])
        state = tk.advance(state)


@triton.jit
def issue_products(a, b, sums, stage, ready, tiles, BUG: tl.constexpr):
    state, turn = tk.pipeline_state(stage), tk.pipeline_state(ready)
    for _ in range(tiles):
        if BUG != "sums_not_acquired":
            tk.producer_acquire(ready, turn)
        into = sums[turn.index]
        if BUG == "one_accumulator_of_the_ring":
            into = sums[0]
        elif BUG == "index_beyond_the_ring":
            into = sums[turn.count]  # reports: index_beyond_the_ring
        for k in range(STEPS):
            tk.consumer_wait(stage, state)
            if BUG == "committed_before_the_product":
                tk.mma_commit(stage.empty[state.index])
            # reports: stage_released_by_threads, committed_before_the_product, committed_by_the_loader
            # reports: sums_signalled_by_threads, released_before_the_read, sums_not_acquired
            # reports: one_accumulator_of_the_ring
            tk.mma_AB(a[state.index], b[state.index], into, wait=False, accumulate=k > 0)
            if BUG == "stage_released_by_threads":
                tk.consumer_release(stage, state)
            elif BUG == "stage_committed_twice":
                tk.mma_commit(stage.empty[state.index])
                tk.mma_commit(stage.empty[state.index])
            elif (
                BUG != "stage_never_committed"
                and BUG != "committed_before_the_product"
                and BUG != "committed_by_the_loader"
            ):
                tk.mma_commit(stage.empty[state.index])
            state = tk.advance(state)
        if BUG == "sums_signalled_by_threads":
            tk.arrive(ready.full[turn.index])
        elif BUG != "sums_never_committed":
            tk.mma_commit(ready.full[turn.index])
        turn = tk.advance(turn)


@triton.jit
def store_sums(C, sums, ready, tiles, BUG: tl.constexpr):
    turn = tk.pipeline_state(ready)
    for i in range(tiles):
        tk.consumer_wait(ready, turn)  # reports: sums_never_committed
        if BUG == "released_before_the_read":
            tk.consumer_release(ready, turn)
        # reports: sums_signalled_by_threads, released_before_the_read, sums_not_acquired, one_accumulator_of_the_ring
        total = tk.load(sums[turn.index])
        if BUG != "released_before_the_read":
            tk.consumer_release(ready, turn)
        tk.store(C, total, (i, 0))
        turn = tk.advance(turn)


@tk.kernel
@triton.jit
def mma_warp(A, B, C, tiles, BUG: tl.constexpr):
    """C = A·B, by a loader, an issuer and an epilogue."""
    a, b = tk.allocate(tk.st(tk.bf16, 128, 32), STAGES), tk.allocate(tk.st(tk.bf16, 32, 32), STAGES)
    sums = tk.tensor_allocator(tk.tt(tk.fp32, 128, 32), 2)
    stage, ready = tk.pipeline(STAGES), tk.pipeline(2)
    tk.specialize(
        (
            (store_sums, (C, sums, ready, tiles, BUG)),
            (load_stages, (A, B, a, b, stage, tiles, BUG)),
            (issue_products, (a, b, sums, stage, ready, tiles, BUG)),
        ),
        warps=(4, 1, 1),
    )


def tiles_inputs(tiles: int) -> Any:
    def make(rng: Any) -> Any:
        depth = 32 * STEPS.value
        a, b = integers(rng, 128 * tiles, depth, dtype=BF16), integers(rng, depth, 32, dtype=BF16)
        c = empty(128 * tiles, 32)
        tensors = tk.gl(a, tk.st(tk.bf16, 128, 32)), tk.gl(b, tk.st(tk.bf16, 32, 32)), tk.gl(c)
        return (1,), (*tensors, tiles), [c], [a.float() @ b.float()]

    return make


fault("stage_never_committed", "deadlock", mma_warp, tiles_inputs(3))
fault("stage_released_by_threads", "race", mma_warp, tiles_inputs(3))
fault("committed_before_the_product", "race", mma_warp, tiles_inputs(3))
fault("committed_by_the_loader", "race", mma_warp, tiles_inputs(3))
fault("stage_committed_twice", "phase-wrap", mma_warp, tiles_inputs(3))
fault("sums_never_committed", "deadlock", mma_warp, tiles_inputs(3))
fault("sums_signalled_by_threads", "race", mma_warp, tiles_inputs(3))
fault("released_before_the_read", "race", mma_warp, tiles_inputs(3))
fault("index_beyond_the_ring", "out-of-bounds", mma_warp, tiles_inputs(3))
fault("sums_not_acquired", "race", mma_warp, tiles_inputs(3))
fault("one_accumulator_of_the_ring", "race", mma_warp, tiles_inputs(3))


# ---------------------------------------------------------------- threads that access tensor memory by PTX


@gluon.jit
def rows_and_columns(COLUMNS: gl.constexpr):
    """The rows and columns of a tile of 128 rows, a row a thread, as tcgen05.ld takes it."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    rows, columns = gl.arange(0, 128, gl.SliceLayout(1, layout)), gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return rows[:, None], columns[None, :]


@triton.jit
def multiply_each(a, b, acc, pipe, rounds, BUG: tl.constexpr):
    turn = tk.pipeline_state(pipe)
    for i in range(rounds):
        if BUG == "no_fence_before_the_product":
            mbarrier.wait(pipe.empty[turn.index].piece, turn.phase ^ 1)
        else:
            tk.producer_acquire(pipe, turn)
        # reports: no_fence_before_the_load, no_fence_before_the_release, no_fence_before_the_product
        tk.mma_AB(a, b[i], acc, accumulate=False, arrived=pipe.full[turn.index])
        turn = tk.advance(turn)


@triton.jit
def store_each(C, acc, pipe, rounds, BUG: tl.constexpr):
    turn = tk.pipeline_state(pipe)
    row, column = rows_and_columns(32)
    address = asm("mov.b32 $0, $1;", "=r,r", [acc], tl.int32)
    if BUG == "lanes_of_another_warp":
        address += 32 << 16
    if BUG == "columns_beyond_the_tile":
        address += 16
    for i in range(rounds):
        if BUG == "no_fence_before_the_load":
            mbarrier.wait(pipe.full[turn.index].piece, turn.phase)
        else:
            tk.consumer_wait(pipe, turn)
        # reports: no_fence_before_the_load, no_fence_before_the_release, no_fence_before_the_product
        # reports: lanes_of_another_warp, columns_beyond_the_tile
        total = tcgen05.ld(address, [128, 32])
        if BUG != "load_not_awaited":
            total = tcgen05.wait_ld(total)
        if BUG == "no_fence_before_the_release":
            mbarrier.arrive(pipe.empty[turn.index].piece, count=1)
        else:
            tk.consumer_release(pipe, turn)
        gl.store(C.pointer + (128 * i + row) * 32 + column, total)  # reports: load_not_awaited
        turn = tk.advance(turn)


@tk.kernel
@triton.jit
def read_by_ptx(A, B, C, ROUNDS: tl.constexpr, BUG: tl.constexpr):
    """C[i] = A·B[i], one accumulator after the other, which its readers load by tcgen05.ld."""
    a, b = tk.allocate(tk.st(tk.bf16, 128, 32)), tk.allocate(tk.st(tk.bf16, 32, 32), ROUNDS)
    acc, pipe = tk.tensor_allocator(tk.tt(tk.fp32, 128, 32)), tk.pipeline(1)
    tk.load_into(a, A, (0, 0))
    for i in tl.static_range(ROUNDS):
        tk.load_into(b[i], B, (i, 0))
    tk.fence_async()
    tk.sync()
    tk.specialize(
        ((store_each, (C, acc, pipe, ROUNDS, BUG)), (multiply_each, (a, b, acc, pipe, ROUNDS, BUG))), warps=(4, 1)
    )


def rounds_inputs(rng: Any) -> Any:
    rounds = 3
    a, b = integers(rng, 128, 32, dtype=BF16), integers(rng, 32 * rounds, 32, dtype=BF16)
    c = empty(128 * rounds, 32)
    expected = torch.cat([a.float() @ p.float() for p in b.split(32)])
    return (1,), (tk.gl(a), tk.gl(b), tk.gl(c), rounds), [c], [expected]


fault("no_fence_before_the_load", "race", read_by_ptx, rounds_inputs)
fault("no_fence_before_the_release", "race", read_by_ptx, rounds_inputs)
fault("no_fence_before_the_product", "race", read_by_ptx, rounds_inputs)
fault("load_not_awaited", "in-flight", read_by_ptx, rounds_inputs)
fault("lanes_of_another_warp", "illegal", read_by_ptx, rounds_inputs)
fault("columns_beyond_the_tile", "tmem", read_by_ptx, rounds_inputs)


# ---------------------------------------------------------------- allocations


@gluon.jit
def allocated(COLUMNS: gl.constexpr):
    slot = shared.allocate(4, 16)
    tcgen05.alloc(slot, COLUMNS)  # reports: never_released, allocated_after_the_permit, more_than_there_is
    barrier.sync(8, 128)
    return shared.load(slot, gl.int32)


@tk.kernel
@triton.jit
def through_tensor_memory(X, Y, BUG: tl.constexpr):
    """Y = X, through two allocations of tensor memory."""
    row, column = rows_and_columns(32)
    if BUG == "more_than_there_is":
        first = allocated(512)
    else:
        first = allocated(32)
    if BUG == "allocated_after_the_permit":
        tcgen05.relinquish_alloc_permit()
    second = allocated(64)
    tcgen05.relinquish_alloc_permit()
    tcgen05.st(first, gl.load(X.pointer + row * 32 + column))
    if BUG != "store_not_awaited":
        tcgen05.wait_st()
    x = tcgen05.wait_ld(tcgen05.ld(first, [128, 32]))  # reports: store_not_awaited
    tcgen05.st(second + 32, x)
    tcgen05.wait_st()
    if BUG == "released_too_early":
        tk.sync()
        tcgen05.dealloc(second, 64)
    y = tcgen05.ld(second + 32, [128, 32])  # reports: released_too_early, released_while_loaded
    if BUG == "released_while_loaded":
        tcgen05.dealloc(second, 64)
    y = tcgen05.wait_ld(y)
    gl.store(Y.pointer + row * 32 + column, y)
    tk.sync()
    tcgen05.dealloc(first, 32)
    if BUG == "released_in_another_size":
        tcgen05.dealloc(second, 32)  # reports: released_in_another_size
    elif BUG != "never_released" and BUG != "released_too_early" and BUG != "released_while_loaded":
        tcgen05.dealloc(second, 64)


def copied_inputs(rng: Any) -> Any:
    x, y = integers(rng, 128, 32), empty(128, 32)
    return (1,), (tk.gl(x), tk.gl(y)), [y], [x]


fault("never_released", "tmem", through_tensor_memory, copied_inputs)
fault("released_in_another_size", "tmem", through_tensor_memory, copied_inputs)
fault("released_too_early", "tmem", through_tensor_memory, copied_inputs)
fault("released_while_loaded", "tmem", through_tensor_memory, copied_inputs)
fault("allocated_after_the_permit", "tmem", through_tensor_memory, copied_inputs)
fault("more_than_there_is", "deadlock", through_tensor_memory, copied_inputs)
fault("store_not_awaited", "race", through_tensor_memory, copied_inputs)


# ---------------------------------------------------------------- a product of what threads store in tensor memory


@triton.jit
def issue_both(a, b, v, scores, weights, total, first, second, rounds, BUG: tl.constexpr):
    """S = A·B[i], and O += P·V[i - 1] with the P that threads make of the S before."""
    for i in range(rounds + 1):
        if i < rounds:
            if BUG != "scores_overwritten":
                tk.wait(first.empty[0], (i & 1) ^ 1)
            # reports: scores_overwritten
            tk.mma_AB(a, b[i], scores, accumulate=False, arrived=first.full[0])
        if i > 0:
            if BUG != "weights_read_early":
                tk.wait(second.full[0], (i - 1) & 1)
            # reports: weights_read_early, weights_overwritten, total_read_early
            tk.mma_AB(weights, v[i - 1], total, accumulate=i > 1, arrived=second.empty[0])


@triton.jit
def weigh(C, scores, weights, total, first, second, rounds, BUG: tl.constexpr):
    for i in range(rounds):
        tk.wait(first.full[0], i & 1)
        s = tk.load(scores)  # reports: scores_overwritten
        tk.arrive(first.empty[0])
        if BUG != "weights_overwritten":
            tk.wait(second.empty[0], (i & 1) ^ 1)
        tk.store(weights, (s * 2).to(tl.bfloat16))  # reports: weights_read_early, weights_overwritten
        tk.arrive(second.full[0])
    if BUG == "total_read_early":
        tk.wait(second.empty[0], rounds & 1)
    else:
        tk.wait(second.empty[0], (rounds - 1) & 1)
    tk.store(C, tk.load(total), (0, 0))  # reports: total_read_early


@tk.kernel
@triton.jit
def two_products(A, B, V, C, rounds, ROUNDS: tl.constexpr, BUG: tl.constexpr):
    """C = Σ 2 (A·B[i])·V[i], as attention without its softmax."""
    a = tk.allocate(tk.st(tk.bf16, 128, 32))
    b, v = tk.allocate(tk.st(tk.bf16, 32, 32), ROUNDS), tk.allocate(tk.st(tk.bf16, 32, 32), ROUNDS)
    scores, total = tk.tensor_allocator(tk.tt(tk.fp32, 128, 32)), tk.tensor_allocator(tk.tt(tk.fp32, 128, 32))
    weights = tk.tensor_allocator(tk.tt(tk.bf16, 128, 32))
    first, second = tk.pipeline(1), tk.pipeline(1)
    tk.load_into(a, A, (0, 0))
    for i in tl.static_range(ROUNDS):
        tk.load_into(b[i], B, (i, 0))
        tk.load_into(v[i], V, (i, 0))
    tk.fence_async()
    tk.sync()
    tk.specialize(
        (
            (weigh, (C, scores, weights, total, first, second, rounds, BUG)),
            (issue_both, (a, b, v, scores, weights, total, first, second, rounds, BUG)),
        ),
        warps=(4, 1),
    )


def weighed_inputs(rng: Any) -> Any:
    rounds = 3
    a, c = integers(rng, 128, 32, dtype=BF16).clamp(-1, 1), empty(128, 32)
    b, v = (integers(rng, 32 * rounds, 32, dtype=BF16).clamp(-1, 1) for _ in range(2))
    expected = sum((2 * (a.float() @ x.float())) @ y.float() for x, y in zip(b.split(32), v.split(32), strict=True))
    return (1,), (tk.gl(a), tk.gl(b), tk.gl(v), tk.gl(c), rounds, rounds), [c], [expected]


fault("scores_overwritten", "race", two_products, weighed_inputs)
fault("weights_read_early", "race", two_products, weighed_inputs, also=("uninitialized",))
fault("weights_overwritten", "race", two_products, weighed_inputs)
fault("total_read_early", "race", two_products, weighed_inputs, also=("uninitialized",))


# ---------------------------------------------------------------- block scales


@gluon.jit
def blocked_scales(tile):
    """Scales as they lie in memory, 32 rows by 16 bytes, seen as a matrix of 128 rows."""
    return tile.reshape((1, 1, 32, 4, 4)).permute((0, 3, 2, 1, 4)).reshape((128, 4))


@gluon.jit
def scaled_products(a_desc, sa_desc, b_desc, sb_desc, C, steps, BUG: gl.constexpr):
    """C = (A·SA)·(B·SB)ᵀ of 4-bit numbers, with a scale for each 32 of them (MXFP4)."""
    a = gl.allocate_shared_memory(gl.uint8, [128, 64], a_desc.layout)
    b = gl.allocate_shared_memory(gl.uint8, [128, 64], b_desc.layout)
    sa = gl.allocate_shared_memory(gl.uint8, sa_desc.block_shape, sa_desc.layout)
    sb = gl.allocate_shared_memory(gl.uint8, sb_desc.block_shape, sb_desc.layout)
    acc = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    scales: gl.constexpr = TensorMemoryScalesLayout()
    form: gl.constexpr = gl.float8e4nv if BUG == "scales_in_another_format" else gl.uint8
    ta = allocate_tensor_memory(form, [128, 4], scales)  # reports: scale_tile_misplaced
    tb = allocate_tensor_memory(form, [128, 4], scales)
    full, done = mbarrier.allocate_mbarrier(), mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(done, count=1)
    for i in range(steps):
        bytes: gl.constexpr = 2 * (128 * 64 + 128 * 4)
        mbarrier.expect(full, bytes)
        tma.async_load(a_desc, [0, 64 * i], full, a)
        tma.async_load(b_desc, [0, 64 * i], full, b)
        tma.async_load(sa_desc, [0, 0, i, 0, 0], full, sa)  # reports: scales_loaded_over
        tma.async_load(sb_desc, [0, 0, i, 0, 0], full, sb)
        if BUG != "scales_copied_before_they_land":
            mbarrier.wait(full, i & 1)
        # reports: scales_copied_before_they_land, scales_loaded_over
        tcgen05_copy(blocked_scales(sa), tb if BUG == "scale_tile_misplaced" else ta)
        tcgen05_copy(blocked_scales(sb), tb)
        # reports: scale_tile_misplaced, scales_in_another_format, scales_stored_under_the_product
        tcgen05_mma_scaled(a, b.permute((1, 0)), acc, ta, tb, "e2m1", "e2m1", use_acc=i > 0)
        tcgen05_commit(done)
        if BUG == "scales_copied_before_they_land":
            mbarrier.wait(full, i & 1)
        if BUG == "scales_stored_under_the_product":
            ones: gl.constexpr = ta.get_reg_layout()
            ta.store(gl.full([128, 4], 127, gl.uint8, ones))  # reports: scales_stored_under_the_product
        if BUG != "scales_loaded_over" or i == steps - 1:
            mbarrier.wait(done, i & 1)
    layout: gl.constexpr = acc.get_reg_layout()
    rows, columns = gl.arange(0, 128, gl.SliceLayout(1, layout)), gl.arange(0, 128, gl.SliceLayout(0, layout))
    gl.store(C + rows[:, None] * 128 + columns[None, :], acc.load())


def scaled_inputs(rng: Any) -> Any:
    steps = 2
    descriptors, exact = [], []
    for _ in range(2):
        codes = torch.from_numpy(rng.integers(0, 256, (128, 64 * steps))).to(torch.uint8)
        powers = torch.from_numpy(rng.integers(126, 129, (128, 4 * steps))).to(torch.uint8)
        low_first = torch.stack([codes & 15, codes >> 4], -1).flatten(1).numpy()
        exact.append(
            torch.from_numpy(decode("e2m1", low_first)).float()
            * (2.0 ** (powers.float() - 127)).repeat_interleave(32, 1)
        )
        blocks = powers.reshape(4, 32, steps, 4).permute(2, 1, 0, 3).contiguous().view(1, 1, steps, 2, 256)
        plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=5)
        descriptors.append(TensorDescriptor.from_tensor(codes, [128, 64], gl.NVMMASharedLayout(64, 8, 2)))
        descriptors.append(TensorDescriptor.from_tensor(blocks, [1, 1, 1, 2, 256], plain))
    c = empty(128, 128)
    return (1,), (*descriptors, c, steps), [c], [exact[0] @ exact[1].T]


gluon_kernel: dict[str, Any] = dict(options=dict(num_warps=4))
fault("scales_copied_before_they_land", "race", scaled_products, scaled_inputs, also=("uninitialized",), **gluon_kernel)
fault("scale_tile_misplaced", "uninitialized", scaled_products, scaled_inputs, **gluon_kernel)
fault("scales_in_another_format", "illegal", scaled_products, scaled_inputs, **gluon_kernel)
fault("scales_stored_under_the_product", "race", scaled_products, scaled_inputs, **gluon_kernel)
fault("scales_loaded_over", "race", scaled_products, scaled_inputs, **gluon_kernel)


# ---------------------------------------------------------------- descriptors and issuing threads


@triton.jit
def thread():
    return asm("mov.u32 $0, %tid.x;", "=r", [], tl.int32)


@triton.jit
def multiply_by_ptx(a, b, acc, done, BUG: tl.constexpr):
    """The first thread issues the products, 16 of K each."""
    columns: tl.constexpr = 64 if BUG == "columns_of_another_tile" else 32
    rows: tl.constexpr = 64 if BUG == "half_of_the_rows" else 128
    how: tl.constexpr = tcgen05.instruction_descriptor("f16", rows, columns, "bf16")
    issuer: tl.constexpr = "warp" if BUG == "issued_by_every_warp" else "cta"
    steps: tl.constexpr = 5 if BUG == "step_beyond_the_tile" else 4
    for step in tl.static_range(steps):
        left = tcgen05.shared_descriptor(shared.address(a) + 32 * step, 128 * 128, 1024, 128)
        right = tcgen05.shared_descriptor(shared.address(b) + 32 * step, 32 * 128, 1024, 128)
        # reports: columns_of_another_tile, issued_by_every_warp, step_beyond_the_tile, first_step_adds
        # reports: committed_by_another_thread, never_awaited
        tcgen05.mma(acc, left, right, how, "f16", step > 0 or BUG == "first_step_adds", issuer=issuer)
    if BUG == "committed_by_another_thread":
        if thread() == 32:
            tcgen05.commit(done, issuer="thread")
    else:
        tcgen05.commit(done, issuer="cta")  # reports: barrier_invalidated


@tk.kernel
@triton.jit
def issued_by_ptx(A, B, C, BUG: tl.constexpr):
    """C = A·Bᵀ by matrix descriptors."""
    a, b = tk.allocate(tk.st(tk.bf16, 128, 64)), tk.allocate(tk.st(tk.bf16, 32, 64))
    acc, done = tk.tensor_allocator(tk.tt(tk.fp32, 128, 32)), tk.semaphores(1)
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    if BUG != "operands_unfenced":
        tk.fence_async()
    tk.sync()
    multiply_by_ptx(a, b, acc, done[0], BUG)  # reports: operands_unfenced
    if BUG == "barrier_invalidated":
        mbarrier.invalidate(done[0].piece)
    elif BUG != "never_awaited":
        tk.wait(done[0], 0)
    if BUG != "never_awaited" and BUG != "barrier_invalidated":
        # reports: half_of_the_rows, committed_by_another_thread
        tk.store(C, tk.load(acc), (0, 0))


def descriptor_inputs(rng: Any) -> Any:
    a, b, c = integers(rng, 128, 64, dtype=BF16), integers(rng, 32, 64, dtype=BF16), empty(128, 32)
    return (1,), (tk.gl(a), tk.gl(b), tk.gl(c)), [c], [a.float() @ b.float().T]


fault("step_beyond_the_tile", "out-of-bounds", issued_by_ptx, descriptor_inputs)
fault("columns_of_another_tile", "out-of-bounds", issued_by_ptx, descriptor_inputs)
fault("half_of_the_rows", "uninitialized", issued_by_ptx, descriptor_inputs)
fault("first_step_adds", "uninitialized", issued_by_ptx, descriptor_inputs)
fault("issued_by_every_warp", "race", issued_by_ptx, descriptor_inputs)
fault("committed_by_another_thread", "race", issued_by_ptx, descriptor_inputs)
fault("operands_unfenced", "missing-fence", issued_by_ptx, descriptor_inputs)
fault("barrier_invalidated", "barrier-life", issued_by_ptx, descriptor_inputs, also=("unfinished",))
fault("never_awaited", "unfinished", issued_by_ptx, descriptor_inputs)
