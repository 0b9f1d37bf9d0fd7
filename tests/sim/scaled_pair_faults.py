"""Mistakes with the scales of CTA pairs, in the form of `faults.py`. Each CTA has the scales of its rows of A, and of
all columns of B."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.sim.blackwell_cluster_faults import begin, end, idle, of_pair
from tests.sim.faults import empty
from tests.sim.scale_faults import OPERAND, SCALES, fault, operand
from tritonkittens.inline_ptx import tcgen05
from tritonkittens.lang.core.backend import op

STEPS, STAGES = tl.constexpr(3), tl.constexpr(2)
HALF = tk.st(tk.fp8e4m3, 64, 128)  # of B's 128 columns
BYTES = tl.constexpr(2 * (OPERAND.nbytes + HALF.nbytes + 2 * SCALES.nbytes))  # of a stage, of both CTAs


@op
def shared_memory(t, tile):
    """A tile's shared memory."""
    return tile.pieces[0]


@op
def tensor_memory(t, tile):
    """The tensor memory of a tile of scales."""
    return tile.pieces[1]


@triton.jit
def load(A, B, SA, SB, a, b, sa, sb, stage, late, BUG: tl.constexpr):
    begin(BUG)
    rank = tk.cluster_rank()
    state = tk.pipeline_state(stage)
    for i in tl.static_range(STEPS):
        if BUG != "scales_reloaded_by_the_peer" or rank == 0:
            tk.producer_acquire(stage, state)
        full = stage.full[state.index]
        if rank == 0:
            if BUG == "peers_scales_not_loaded" or BUG == "peers_scales_not_awaited":
                tk.expect(full, BYTES - 512)
            else:
                tk.expect(full, BYTES)
        tk.load_async(a[state.index], A, (rank, i), full)
        tk.load_async(b[state.index], B, (0, i), full)
        tk.load_async(sa[state.index], SA, (rank, i), full)  # reports: scales_reloaded_by_the_peer
        if BUG == "peers_scales_not_awaited" and rank == 1:
            tk.expect(late[state.index], 512)
            # reports: peers_scales_not_awaited
            tk.load_async(of_pair(sb[state.index], None), SB, (0, i), late[state.index])
        elif BUG == "peers_scales_in_another_stage" and rank == 1:
            # reports: peers_scales_in_another_stage
            tk.load_async(sb[(state.index + 1) % STAGES], SB, (0, i), full)
        elif BUG != "peers_scales_not_loaded" or rank == 0:
            tk.load_async(sb[state.index], SB, (0, i), full)
        state = tk.advance(state)
    end(BUG)


@triton.jit
def multiply(a, b, sa, sb, acc, stage, done, BUG: tl.constexpr):
    """The first CTA issues the copies of scales and the products of both."""
    begin(BUG)
    state = tk.pipeline_state(stage)
    if tk.cluster_rank() == 0:
        for i in tl.static_range(STEPS):
            tk.consumer_wait(stage, state)
            if BUG == "scales_copied_for_one_cta":
                block = tcgen05.shared_descriptor(shared_memory(sa[state.index]), 16, 128, 0)
                # reports: scales_copied_for_one_cta
                tcgen05.cp(tensor_memory(sa[state.index]), block, "32x128b", "warpx4")
            scales = (sa[state.index], sb[state.index])
            # reports: peers_scales_not_loaded, peers_scales_not_awaited, peers_scales_in_another_stage
            # reports: scales_reloaded_by_the_peer
            tk.mma_ABt(a[state.index], b[state.index], acc, wait=False, accumulate=i > 0, scales=scales)
            tk.mma_commit(stage.empty[state.index], 3)
            state = tk.advance(state)
        tk.mma_commit(done, 3)
    elif BUG == "scales_copied_by_the_peer":
        block = tcgen05.shared_descriptor(shared_memory(sa[0]), 16, 128, 0)
        # reports: scales_copied_by_the_peer
        tcgen05.cp(tensor_memory(sa[0]), block, "32x128b", "warpx4", ctas=2)
    end(BUG)


@triton.jit
def store(C, acc, done, BUG: tl.constexpr):
    begin(BUG)
    tk.wait(done, 0)
    tcgen05.fence_after_thread_sync()
    tk.store(C, tk.load(acc), (tk.cluster_rank(), 0))
    end(BUG)


@triton.jit
def tiles(N: tl.constexpr):
    """The rings of a stage's tiles, as the pair loads them."""
    a, b = of_pair(tk.allocate(OPERAND, N), "own"), of_pair(tk.allocate(HALF, N), "rows")
    return a, b, of_pair(tk.allocate(SCALES, N), "own"), of_pair(tk.allocate(SCALES, N), "own")


@tk.kernel
@triton.jit
def scaled_pair_products(A, B, SA, SB, C, BUG: tl.constexpr):
    """C = A·Bᵀ, scaled, of 256 rows, 128 in each CTA of a pair."""
    a, b, sa, sb = tiles(STAGES)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 128), pair=True)
    stage, late, done = tk.pipeline(STAGES), tk.semaphores(STAGES), tk.semaphores(1)
    tk.specialize(
        (
            (store, (C, acc, done[0], BUG)),
            (load, (A, B, SA, SB, a, b, sa, sb, stage, late, BUG)),
            (multiply, (a, b, sa, sb, acc, stage, done[0], BUG)),
            (idle, (BUG,)),
        ),
        warps=(4, 1, 1, 2),
    )


def inputs(rng: Any) -> Any:
    a, b = (operand(rng, 128 * STEPS.value, rows) for rows in (256, 128))
    c = empty(256, 128)
    tensors = tk.gl(a.values, OPERAND), tk.gl(b.values, HALF)
    scales = (tk.gl(x.blocks.view(*x.blocks.shape[:-2], 2, 256), SCALES) for x in (a, b))
    return (1,), (*tensors, *scales, tk.gl(c)), [c], [(a.exact @ b.exact.T).float()]


pair: dict[str, Any] = dict(options=dict(cluster_size=2))
fault("peers_scales_not_loaded", "uninitialized", scaled_pair_products, inputs, **pair)
fault("peers_scales_not_awaited", "race", scaled_pair_products, inputs, also=("uninitialized",), **pair)
fault("peers_scales_in_another_stage", "race", scaled_pair_products, inputs, also=("uninitialized",), **pair)
fault("scales_reloaded_by_the_peer", "race", scaled_pair_products, inputs, **pair)
fault("scales_copied_for_one_cta", "illegal", scaled_pair_products, inputs, **pair)
fault("scales_copied_by_the_peer", "illegal", scaled_pair_products, inputs, **pair)


# ---------------------------------------------------------------- scales that another warp copies


@triton.jit
def copy(sa, sb, stage, copied, BUG: tl.constexpr):
    """Copy the scales of each stage of both CTAs to tensor memory."""
    begin(BUG)
    state = tk.pipeline_state(stage)
    if tk.cluster_rank() == 0:
        for _ in tl.static_range(STEPS):
            if BUG != "stage_not_awaited_by_the_copy":
                tk.consumer_wait(stage, state)
            for scales in tl.static_range(2):
                tile = sa[state.index] if scales == 0 else sb[state.index]
                home = sa[0] if scales == 0 else sb[0]
                block = tcgen05.shared_descriptor(shared_memory(tile), 16, 128, 0)
                # reports: copy_not_awaited, copy_not_committed, copied_over_scales_in_use
                # reports: stage_not_awaited_by_the_copy
                tcgen05.cp(
                    tensor_memory(home if BUG == "copied_over_scales_in_use" else tile),
                    block,
                    "32x128b",
                    "warpx4",
                    ctas=2,
                )
            if BUG == "copy_not_committed":
                tk.arrive(copied[state.index])
            else:
                tk.mma_commit(copied[state.index], 1)
            state = tk.advance(state)
    end(BUG)


@op
def sums(t, acc):
    """The tensor memory of an accumulator."""
    return acc.pieces[0]


@triton.jit
def one_mma(acc, a, b, of_a, of_b, add: tl.constexpr, K: tl.constexpr):
    """For 32 numbers along K."""
    how: tl.constexpr = tcgen05.scaled_instruction_descriptor("mxf8f6f4", 256, 128, "e4m3", "e4m3", K, 2)
    tcgen05.mma_scaled(acc, a, b, how, of_a, of_b, "mxf8f6f4", 1 if add else 0, ctas=2)


@triton.jit
def multiply_copied(a, b, sa, sb, acc, stage, copied, done, BUG: tl.constexpr):
    begin(BUG)
    state = tk.pipeline_state(stage)
    if tk.cluster_rank() == 0:
        for i in tl.static_range(STEPS):
            if BUG == "copy_not_awaited":
                tk.consumer_wait(stage, state)
            else:
                tk.wait(copied[state.index], state.phase)
            slot = 0 if BUG == "copied_over_scales_in_use" else state.index
            left = tcgen05.shared_descriptor(shared_memory(a[state.index]), 16, 1024, 128)
            right = tcgen05.shared_descriptor(shared_memory(b[state.index]), 16, 1024, 128)
            of_a, of_b = tensor_memory(sa[slot]), tensor_memory(sb[slot])
            for k in tl.static_range(4):
                # reports: copy_not_awaited, copy_not_committed, copied_over_scales_in_use
                one_mma(sums(acc), left + 2 * k, right + 2 * k, of_a, of_b, i + k > 0, k)
            tk.mma_commit(stage.empty[state.index], 3)
            state = tk.advance(state)
        tk.mma_commit(done, 3)
    end(BUG)


@tk.kernel
@triton.jit
def scales_copied_apart(A, B, SA, SB, C, BUG: tl.constexpr):
    """As `scaled_pair_products`, with a warp that copies scales and another that multiplies."""
    a, b, sa, sb = tiles(STAGES)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 128), pair=True)
    stage, copied, done = tk.pipeline(STAGES), tk.semaphores(STAGES), tk.semaphores(1)
    tk.specialize(
        (
            (store, (C, acc, done[0], BUG)),
            (load, (A, B, SA, SB, a, b, sa, sb, stage, copied, BUG)),
            (copy, (sa, sb, stage, copied, BUG)),
            (multiply_copied, (a, b, sa, sb, acc, stage, copied, done[0], BUG)),
            (idle, (BUG,)),
        ),
        warps=(4, 1, 1, 1, 1),
    )


fault("copy_not_awaited", "race", scales_copied_apart, inputs, also=("uninitialized",), **pair)
fault("copy_not_committed", "race", scales_copied_apart, inputs, also=("uninitialized",), **pair)
fault("copied_over_scales_in_use", "race", scales_copied_apart, inputs, **pair)
fault("stage_not_awaited_by_the_copy", "race", scales_copied_apart, inputs, also=("uninitialized",), **pair)
