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
from tritonkittens.inline_ptx import barrier, clc, cluster, shared, tcgen05
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import op
from tritonkittens.lang.core.constants import unwrap
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
        tcgen05.fence_after_thread_sync()
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
            # reports: sums_signalled_by_threads, released_before_the_read, sums_not_acquired, adds_to_what_was_there
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
        tcgen05.fence_after_thread_sync()
        if BUG == "released_before_the_read":
            tk.consumer_release(ready, turn)
        # reports: sums_signalled_by_threads, released_before_the_read, sums_not_acquired, one_accumulator_of_the_ring
        total = tk.load(sums[turn.index])
        tcgen05.fence_before_thread_sync()
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
        tk.producer_acquire(pipe, turn)
        if BUG != "no_fence_before_the_product":
            tcgen05.fence_after_thread_sync()
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
        tk.consumer_wait(pipe, turn)
        if BUG != "no_fence_before_the_load":
            tcgen05.fence_after_thread_sync()
        # reports: no_fence_before_the_load, no_fence_before_the_release, no_fence_before_the_product
        # reports: lanes_of_another_warp, columns_beyond_the_tile
        total = tcgen05.ld(address, [128, 32])
        if BUG != "load_not_awaited":
            total = tcgen05.wait_ld(total)
        if BUG != "no_fence_before_the_release":
            tcgen05.fence_before_thread_sync()
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


# ---------------------------------------------------------------- cluster launch control


@triton.jit
def answer_read(pipe, BUG: tl.constexpr):
    """All roles of both CTAs release an answer to the CTA that asks."""
    if BUG != "answer_unfenced":
        tk.fence_async()
    if BUG == "answer_overwritten_in_the_peer":
        tk.arrive(pipe.empty[0])
    else:
        tk.arrive(pipe.empty[0], cta=0)


@triton.jit
def ask(answer, pipe, BUG: tl.constexpr):
    state = tk.pipeline_state(pipe)
    rank = cluster.ctarank()
    more, left = 1, 1
    while more != 0:
        if BUG == "answer_of_eight_bytes":
            tk.expect(pipe.full[0], 8)  # reports: answer_of_eight_bytes
        elif BUG != "answer_not_expected_by_the_peer" or rank == 0:
            tk.expect(pipe.full[0], 16)
        place = answer + 8 if BUG == "answer_misaligned" else answer
        if rank == 0:
            if BUG != "answer_overwritten":
                tk.wait(pipe.empty[0], state.phase ^ 1, scope="cluster")
            # reports: answer_overwritten, answer_unfenced, answer_misaligned, asked_after_the_last
            # reports: answer_overwritten_in_the_peer
            clc.try_cancel(place, pipe.full[0], True)
        tk.consumer_wait(pipe, state)
        more = clc.is_canceled(answer)
        answer_read(pipe, BUG)
        if BUG == "asked_after_the_last":
            left, more = more, left
        state = tk.advance(state)


@triton.jit
def work(Y, answer, pipe, BUG: tl.constexpr):
    """Y[block] = 3 block + 1, for this block and those that it takes over."""
    rank = cluster.ctarank()
    state = tk.pipeline_state(pipe)
    block, more = tl.program_id(0), 1
    layout: tl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    while more != 0:
        gl.store(Y.pointer + block * 128 + gl.arange(0, 128, layout), block * 3 + 1)
        if BUG != "answer_read_early":
            tk.consumer_wait(pipe, state)  # reports: answer_not_expected_by_the_peer
        # reports: answer_read_early, answer_overwritten, answer_overwritten_in_the_peer, answer_unfenced
        more = clc.is_canceled(answer)
        block = clc.first_ctaid(answer) + rank
        answer_read(pipe, BUG)
        state = tk.advance(state)


@tk.kernel
@triton.jit
def taken_over(Y, BUG: tl.constexpr):
    """Each cluster takes over blocks of those that have not started. Its first CTA asks for both."""
    answer = shared.allocate(16 + 8, 16)
    pipe = tk.pipeline(1, empty_arrivals=2 if BUG == "answer_overwritten_in_the_peer" else 4)
    tk.specialize(((work, (Y, answer, pipe, BUG)), (ask, (answer, pipe, BUG))), warps=(4, 1), cluster_sync=True)


def blocks_inputs(rng: Any) -> Any:
    y = empty(8, 128)
    return (4,), (tk.gl(y),), [y], [(torch.arange(8) * 3 + 1)[:, None].expand(8, 128)]


taking: dict[str, Any] = dict(options=dict(cluster_size=2), device=dict(multiprocessors=2))
fault("answer_read_early", "uninitialized", taken_over, blocks_inputs, **taking)
fault("answer_overwritten", "race", taken_over, blocks_inputs, **taking)
fault("answer_overwritten_in_the_peer", "race", taken_over, blocks_inputs, **taking)
fault("answer_unfenced", "missing-fence", taken_over, blocks_inputs, **taking)
fault("answer_of_eight_bytes", "bytes", taken_over, blocks_inputs, **taking)
fault("answer_not_expected_by_the_peer", "deadlock", taken_over, blocks_inputs, **taking)
fault("answer_misaligned", "misaligned", taken_over, blocks_inputs, **taking)
fault("asked_after_the_last", "illegal", taken_over, blocks_inputs, **taking)


# ---------------------------------------------------------------- CTA pairs


@op
def of_pair(t, tile, part):
    """The tile as an operand of a pair's products: this CTA's "own" rows, or its half of the pair's "rows"."""
    return tile.of_pair(unwrap(part))


@triton.jit
def load_of_pair(A, B, a, b, stage, tiles, BUG: tl.constexpr):
    rank = tk.cluster_rank()
    state = tk.pipeline_state(stage)
    for i in range(tiles * STEPS):
        if BUG != "peer_out_of_step" or rank == 0:
            tk.producer_acquire(stage, state)  # reports: stage_committed_at_home
        if rank == 0:
            if BUG == "bytes_of_one_cta":
                tk.expect(stage.full[state.index], (a[0], b[0]))  # reports: bytes_of_one_cta
            elif BUG == "half_not_awaited":
                tk.expect(stage.full[state.index], (a[0], b[0], a[0]))
            else:
                tk.expect(stage.full[state.index], 2 * (128 * 32 + 16 * 32) * 2)
        # reports: peer_out_of_step, half_not_awaited, bytes_of_one_cta, peer_not_met
        tk.load_async(a[state.index], A, (i // STEPS * 2 + rank, i % STEPS), stage.full[state.index])
        if BUG == "half_not_awaited" and rank == 1:
            tk.expect(stage.full[state.index], b[0])
            # reports: half_not_awaited
            tk.load_async(of_pair(b[state.index], None), B, (1, i % STEPS), stage.full[state.index])
        else:
            tk.load_async(b[state.index], B, (0, i % STEPS), stage.full[state.index])
        state = tk.advance(state)


@triton.jit
def multiply_of_pair(a, b, acc, stage, ready, tiles, BUG: tl.constexpr):
    """The first CTA issues the products of both."""
    if tk.cluster_rank() == (1 if BUG == "issued_by_the_odd_cta" else 0):
        state, turn = tk.pipeline_state(stage), tk.pipeline_state(ready)
        for _ in range(tiles):
            tk.wait(ready.empty[0], turn.phase ^ 1, scope="cluster")  # reports: sums_released_at_home
            if BUG != "no_fence_before_the_pairs_product":
                tcgen05.fence_after_thread_sync()
            for k in range(STEPS):
                if BUG != "issued_by_the_odd_cta":
                    tk.consumer_wait(stage, state)
                # reports: peer_out_of_step, half_not_awaited, bytes_of_one_cta, issued_by_the_odd_cta
                # reports: peer_not_counted
                tk.mma_ABt(a[state.index], b[state.index], acc, wait=False, accumulate=k > 0)
                if BUG == "stage_committed_at_home":
                    tk.mma_commit(stage.empty[state.index])
                elif BUG == "committed_beyond_the_cluster":
                    tk.mma_commit(stage.empty[state.index], 7)  # reports: committed_beyond_the_cluster
                elif BUG == "group_of_one_cta":
                    tcgen05.commit(stage.empty[state.index], 3)  # reports: group_of_one_cta
                else:
                    tk.mma_commit(stage.empty[state.index], 3)
                state = tk.advance(state)
            if BUG == "sums_committed_at_home":
                tk.mma_commit(ready.full[0])
            else:
                tk.mma_commit(ready.full[0], 3)
            turn = tk.advance(turn)


@triton.jit
def store_of_pair(C, acc, ready, tiles, BUG: tl.constexpr):
    rank = tk.cluster_rank()
    turn = tk.pipeline_state(ready)
    for i in range(tiles):
        tk.consumer_wait(ready, turn)  # reports: sums_committed_at_home
        if BUG != "no_fence_after_the_commit":
            tcgen05.fence_after_thread_sync()
        # reports: peer_not_counted, no_fence_after_the_commit, no_fence_before_the_peers_release
        # reports: no_fence_before_the_pairs_product
        total = tk.load(acc)
        if BUG != "no_fence_before_the_peers_release" or rank == 0:
            tcgen05.fence_before_thread_sync()
        if BUG == "sums_released_at_home":
            tk.arrive(ready.empty[0], per="warp")
        else:
            tk.arrive(ready.empty[0], per="warp", cta=0)
        tk.store(C, total, (i * 2 + rank, 0))
        turn = tk.advance(turn)


@tk.kernel
@triton.jit
def pair_products(A, B, C, tiles, BUG: tl.constexpr):
    """C = A·Bᵀ, 256 rows at a time, 128 in each CTA of a pair. Each loads half the rows of B."""
    a = of_pair(tk.allocate(tk.st(tk.bf16, 128, 32), STAGES), "own")
    b = of_pair(tk.allocate(tk.st(tk.bf16, 16, 32), STAGES), "rows")
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 32), pair=True)
    stage, ready = tk.pipeline(STAGES), tk.pipeline(1, empty_arrivals=4 if BUG == "peer_not_counted" else 8)
    tk.specialize(
        (
            (store_of_pair, (C, acc, ready, tiles, BUG)),
            (load_of_pair, (A, B, a, b, stage, tiles, BUG)),
            (multiply_of_pair, (a, b, acc, stage, ready, tiles, BUG)),
        ),
        warps=(4, 1, 1),
        cluster_sync=BUG != "peer_not_met",
    )


def pair_inputs(rng: Any) -> Any:
    tiles, depth = 2, 32 * STEPS.value
    a, b = integers(rng, 256 * tiles, depth, dtype=BF16), integers(rng, 32, depth, dtype=BF16)
    c = empty(256 * tiles, 32)
    tensors = tk.gl(a, tk.st(tk.bf16, 128, 32)), tk.gl(b, tk.st(tk.bf16, 16, 32)), tk.gl(c)
    return (1,), (*tensors, tiles), [c], [a.float() @ b.float().T]


pair: dict[str, Any] = dict(options=dict(cluster_size=2))
fault("peer_out_of_step", "race", pair_products, pair_inputs, **pair)
fault("bytes_of_one_cta", "bytes", pair_products, pair_inputs, seed=2, **pair)
fault("half_not_awaited", "race", pair_products, pair_inputs, **pair)
fault("issued_by_the_odd_cta", "illegal", pair_products, pair_inputs, **pair)
fault("group_of_one_cta", "illegal", pair_products, pair_inputs, **pair)
fault("committed_beyond_the_cluster", "illegal", pair_products, pair_inputs, **pair)
fault("stage_committed_at_home", "deadlock", pair_products, pair_inputs, also=("bytes",), **pair)
fault("sums_committed_at_home", "deadlock", pair_products, pair_inputs, **pair)
fault("sums_released_at_home", "deadlock", pair_products, pair_inputs, **pair)
fault("peer_not_counted", "race", pair_products, pair_inputs, seed=1, **pair)
fault("no_fence_after_the_commit", "race", pair_products, pair_inputs, **pair)
fault("no_fence_before_the_peers_release", "race", pair_products, pair_inputs, **pair)
fault("no_fence_before_the_pairs_product", "race", pair_products, pair_inputs, **pair)
fault("peer_not_met", "barrier-life", pair_products, pair_inputs, **pair)


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
            torch.from_numpy(decode("e2m1", low_first)).float() * (2.0 ** (powers.float() - 127)).repeat_interleave(32, 1)
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
        tcgen05.fence_after_thread_sync()
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
