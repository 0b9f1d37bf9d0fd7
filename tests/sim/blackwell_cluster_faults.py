"""Mistakes that only Blackwell has between the CTAs of a cluster, in the form of `blackwell_faults.py`: cluster launch
control, and CTA pairs of one program a CTA (`cluster_size`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

import tritonkittens.lang as tk
from tests.sim.blackwell_faults import STAGES, STEPS, fault
from tests.sim.faults import BF16, empty, integers
from tritonkittens.inline_ptx import clc, cluster, shared, tcgen05
from tritonkittens.inline_ptx import mbarrier as ptx_mbarrier
from tritonkittens.lang.core.backend import op
from tritonkittens.lang.core.constants import unwrap

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
        if rank == 0 or BUG == "asked_by_both":
            if BUG != "answer_overwritten" and rank == 0:
                tk.wait(pipe.empty[0], state.phase ^ 1, scope="cluster")
            # reports: answer_overwritten, answer_unfenced, answer_misaligned, asked_after_the_last
            # reports: answer_overwritten_in_the_peer, asked_by_both, answer_not_awaited
            clc.try_cancel(place, pipe.full[0], True)
        if BUG == "answer_not_awaited":
            more = 0
        else:
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
        if BUG == "answer_not_awaited":
            more = 0
        else:
            if BUG != "answer_read_early":
                tk.consumer_wait(pipe, state)  # reports: answer_not_expected_by_the_peer
            # reports: answer_read_early, answer_overwritten, answer_overwritten_in_the_peer, answer_unfenced
            more = clc.is_canceled(answer)
            block = clc.first_ctaid(answer) + rank
            answer_read(pipe, BUG)
            if BUG == "answer_not_checked":
                # reports: answer_not_checked
                gl.store(Y.pointer + block * 128 + gl.arange(0, 128, layout), block * 3 + 1)
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
fault("answer_not_checked", "out-of-bounds", taken_over, blocks_inputs, **taking)
fault("answer_not_awaited", "unfinished", taken_over, blocks_inputs, **taking)
fault("asked_by_both", "race", taken_over, blocks_inputs, **taking)
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
def begin(BUG: tl.constexpr):
    """All warps of the cluster meet once its barriers exist."""
    if BUG != "peer_not_met":
        cluster.arrive()
        cluster.wait()


@triton.jit
def end(BUG: tl.constexpr):
    """All warps of the cluster meet before the first CTA ends."""
    if BUG != "peer_has_ended":
        cluster.arrive()
        cluster.wait()


@triton.jit
def idle(BUG: tl.constexpr):
    """The warps that complete a warpgroup: the cluster's barrier counts them."""
    begin(BUG)
    end(BUG)


@triton.jit
def load_of_pair(A, B, a, b, stage, tiles, BUG: tl.constexpr):
    begin(BUG)
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
    end(BUG)


@triton.jit
def multiply_of_pair(a, b, acc, stage, ready, tiles, BUG: tl.constexpr):
    """The first CTA issues the products of both."""
    begin(BUG)
    if tk.cluster_rank() == (1 if BUG == "issued_by_the_odd_cta" else 0):
        state, turn = tk.pipeline_state(stage), tk.pipeline_state(ready)
        for _ in range(tiles):
            if BUG == "no_fence_before_the_pairs_product":
                ptx_mbarrier.wait(ready.empty[0], turn.phase ^ 1, "cluster")
            else:
                tk.wait(ready.empty[0], turn.phase ^ 1, scope="cluster")  # reports: sums_released_at_home
            for k in range(STEPS):
                if BUG == "no_fence_before_the_pairs_product":
                    ptx_mbarrier.wait(stage.full[state.index], state.phase)
                elif BUG != "issued_by_the_odd_cta":
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
    end(BUG)


@triton.jit
def store_of_pair(C, acc, ready, tiles, BUG: tl.constexpr):
    begin(BUG)
    rank = tk.cluster_rank()
    turn = tk.pipeline_state(ready)
    for i in range(tiles):
        if BUG == "no_fence_after_the_commit":
            ptx_mbarrier.wait(ready.full[turn.index], turn.phase)
        else:
            tk.consumer_wait(ready, turn)  # reports: sums_committed_at_home
        # reports: peer_not_counted, no_fence_after_the_commit, no_fence_before_the_peers_release
        # reports: no_fence_before_the_pairs_product
        total = tk.load(acc)
        if BUG == "sums_released_at_home":
            tk.arrive(ready.empty[0], per="warp")
        elif BUG == "no_fence_before_the_peers_release":
            ptx_mbarrier.arrive_remote(ready.empty[0], 0)
        else:
            tk.arrive(ready.empty[0], per="warp", cta=0)  # reports: peer_has_ended
        tk.store(C, total, (i * 2 + rank, 0))
        turn = tk.advance(turn)
    end(BUG)


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
            (idle, (BUG,)),
        ),
        warps=(4, 1, 1, 2),
    )


def pair_inputs(rng: Any) -> Any:
    tiles, depth = 2, 32 * STEPS.value
    a, b = integers(rng, 256 * tiles, depth, dtype=BF16), integers(rng, 32, depth, dtype=BF16)
    c = empty(256 * tiles, 32)
    tensors = tk.gl(a, tk.st(tk.bf16, 128, 32)), tk.gl(b, tk.st(tk.bf16, 16, 32)), tk.gl(c)
    return (1,), (*tensors, tiles), [c], [a.float() @ b.float().T]


pair: dict[str, Any] = dict(options=dict(cluster_size=2))
fault("peer_out_of_step", "race", pair_products, pair_inputs, **pair)
fault("bytes_of_one_cta", "bytes", pair_products, pair_inputs, seed=3, **pair)
fault("half_not_awaited", "race", pair_products, pair_inputs, **pair)
fault("issued_by_the_odd_cta", "illegal", pair_products, pair_inputs, **pair)
fault("group_of_one_cta", "illegal", pair_products, pair_inputs, **pair)
fault("committed_beyond_the_cluster", "illegal", pair_products, pair_inputs, **pair)
fault("stage_committed_at_home", "deadlock", pair_products, pair_inputs, also=("bytes",), **pair)
fault("sums_committed_at_home", "deadlock", pair_products, pair_inputs, **pair)
fault("sums_released_at_home", "deadlock", pair_products, pair_inputs, **pair)
fault("peer_not_counted", "race", pair_products, pair_inputs, seed=2, **pair)
fault("no_fence_after_the_commit", "race", pair_products, pair_inputs, **pair)
fault("no_fence_before_the_peers_release", "race", pair_products, pair_inputs, **pair)
fault("no_fence_before_the_pairs_product", "race", pair_products, pair_inputs, **pair)
fault("peer_has_ended", "barrier-life", pair_products, pair_inputs, seed=3, **pair)
fault("peer_not_met", "barrier-life", pair_products, pair_inputs, **pair)
