"""Kernels with one real mistake each, and the same kernels without it.

Every kernel takes `BUG`, a compile-time name of the mistake, "" for none. A comment `# reports: name` marks its line,
or the line below, as one that the report of that mistake has to name (`Fault.line` where several share one). `FAULTS`
lists what is run: the right kind of report, a schedule that finds it, inputs, and what the correct twin gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_mma
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

import tritonkittens.lang as tk
from tests.util import poison


@dataclass(frozen=True)
class Fault:
    """One mistake. `kind` is what has to be reported, first of all unless `also` names what may come before it. `seed`:
    the first schedule in which it is.

    Most mistakes are found in every schedule; where a mistake has several consequences (a slot read too early was never
    written, a role ends up in a phase that nobody completes), schedules differ in the one that comes first.

    `inputs(rng)` gives the grid, the arguments, the outputs (already among the arguments) and what the correct twin
    leaves in them.
    """

    name: str
    kind: str
    kernel: Any
    inputs: Callable[..., tuple[Any, tuple, list[torch.Tensor], list[torch.Tensor]]]
    also: tuple[str, ...] = ()
    seed: int = 0
    arch: str = "sm_90a"
    options: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    line: str = ""  # what stands after `# reports:` where it is not the name

    def __str__(self) -> str:
        return self.name


FAULTS: list[Fault] = []
TILE = tk.st(tk.fp32, 16, 32)


def fault(name: str, kind: str, kernel: Any, inputs: Any, **more: Any) -> None:
    FAULTS.append(Fault(name, kind, kernel, inputs, **more))


def integers(rng: Any, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers: sums and products of them are exact."""
    return torch.from_numpy(rng.integers(-3, 4, shape)).to(dtype)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return poison(torch.empty(*shape, dtype=dtype))


# ---------------------------------------------------------------- a ring of tiles between a producer and its consumers


@triton.jit
def ring_producer(X, tiles, pipe, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    state = tk.pipeline_state(pipe)
    for i in range(iterations):
        if BUG == "producer_parity":
            tk.wait(pipe.empty[state.index], state.phase)  # reports: producer_parity
        elif BUG == "producer_phase_not_flipped":
            tk.wait(pipe.empty[state.index], 1)
        elif BUG == "producer_does_not_wait":
            pass
        else:
            tk.producer_acquire(pipe, state)  # reports: missing_arrive, wrong_stage_release, count_too_high
        if BUG == "too_few_bytes":
            tk.expect(pipe.full[state.index], 1024)  # reports: too_few_bytes
        elif BUG == "too_many_bytes":
            tk.expect(pipe.full[state.index], 4096)  # reports: too_many_bytes
        elif BUG == "expect_on_other_stage":
            tk.expect(pipe.full[(state.index + 1) % STAGES], tiles[0])
        elif BUG == "expect_forgotten":
            pass
        else:
            tk.producer_commit(pipe, state, tiles[0])
        if BUG == "wrong_stage_load":
            # reports: wrong_stage_load
            tk.load_async(tiles[(state.index + 1) % STAGES], X, (i, 0), pipe.full[state.index])
        else:
            tk.load_async(tiles[state.index], X, (i, 0), pipe.full[state.index])  # reports: copy_into_slot
        state = tk.advance(state)


@triton.jit
def ring_consumer(Y, tiles, pipe, iterations, CONSUMER: tl.constexpr, STAGES: tl.constexpr, BUG: tl.constexpr):
    state = tk.pipeline_state(pipe)
    acc = tk.zero(tk.rt(tk.fp32, 16, 32))
    rounds = iterations
    if BUG == "lost_last_iteration":
        rounds = iterations - 1
    if BUG == "extra_iteration":
        rounds = iterations + 1
    for _ in range(rounds):
        if BUG == "consumer_parity":
            tk.wait(pipe.full[state.index], state.phase ^ 1)
        elif BUG == "consumer_phase_not_flipped":
            tk.wait(pipe.full[state.index], 0)
        elif BUG == "wrong_stage_wait":
            tk.wait(pipe.full[(state.index + 1) % STAGES], state.phase)
        elif BUG == "wait_after_use" or BUG == "no_wait":
            pass
        else:
            # reports: too_many_bytes, expect_on_other_stage, extra_iteration, expect_forgotten, lapped_consumer
            tk.consumer_wait(pipe, state)
        acc += tk.load(tiles[state.index], like=acc, fenced=BUG == "fence_promised")
        if BUG == "wait_after_use":
            tk.consumer_wait(pipe, state)
        if BUG == "unfenced_release":
            mbarrier.arrive(pipe.empty[state.index].piece, count=1)
        elif BUG == "missing_arrive":
            pass
        elif BUG == "wrong_stage_release":
            tk.arrive(pipe.empty[(state.index + 1) % STAGES])
        elif BUG == "arrive_count":
            tk.arrive(pipe.empty[state.index], count=2)  # reports: arrive_count
        elif BUG == "lapped_consumer" and CONSUMER == 1:
            pass
        else:
            tk.consumer_release(pipe, state)
        if BUG == "doubled_arrive":
            tk.consumer_release(pipe, state)
        state = tk.advance(state)
    tk.store(Y, acc + CONSUMER, (CONSUMER, 0))


@tk.kernel
@triton.jit
def ring_sum(X, Y, iterations, CONSUMERS: tl.constexpr, STAGES: tl.constexpr, BUG: tl.constexpr):
    """Y[c] = c + the sum of the tiles of X, for every consumer c."""
    tiles = tk.allocate(tk.st(tk.fp32, 16, 32), STAGES)
    MORE: tl.constexpr = (
        1 if BUG == "count_too_high" else -1 if BUG == "count_too_low" else -1 if BUG == "lapped_consumer" else 0
    )
    pipe = tk.pipeline(STAGES, empty_arrivals=CONSUMERS + MORE)
    if CONSUMERS == 1:
        tk.specialize(
            (
                (ring_consumer, (Y, tiles, pipe, iterations, 0, STAGES, BUG)),
                (ring_producer, (X, tiles, pipe, iterations, STAGES, BUG)),
            ),
            warps=(4, 1),
        )
    else:
        tk.specialize(
            (
                (ring_consumer, (Y, tiles, pipe, iterations, 0, STAGES, BUG)),
                (ring_consumer, (Y, tiles, pipe, iterations, 1, STAGES, BUG)),
                (ring_producer, (X, tiles, pipe, iterations, STAGES, BUG)),
            ),
            warps=(4, 4, 1),
        )


def ring_inputs(consumers: int, stages: int, iterations: int) -> Any:
    def make(rng: Any) -> Any:
        x, y = integers(rng, 16 * iterations, 32), empty(16 * consumers, 32)
        expected = torch.cat([x.reshape(iterations, 16, 32).sum(0) + c for c in range(consumers)])
        return (1,), (tk.gl(x, TILE), tk.gl(y), iterations, consumers, stages), [y], [expected]

    return make


fault("missing_arrive", "deadlock", ring_sum, ring_inputs(1, 2, 5))
fault("doubled_arrive", "race", ring_sum, ring_inputs(1, 3, 9), seed=7, line="copy_into_slot")
fault("arrive_count", "arrivals", ring_sum, ring_inputs(1, 2, 3))
fault("producer_parity", "deadlock", ring_sum, ring_inputs(1, 4, 4))
fault("consumer_parity", "race", ring_sum, ring_inputs(1, 3, 4), seed=18, line="copy_into_slot")
fault("producer_phase_not_flipped", "race", ring_sum, ring_inputs(1, 2, 7), seed=10, line="copy_into_slot")
fault("consumer_phase_not_flipped", "race", ring_sum, ring_inputs(1, 2, 8), seed=1, line="copy_into_slot")
fault("producer_does_not_wait", "race", ring_sum, ring_inputs(2, 2, 6), seed=1, line="copy_into_slot")
fault("wrong_stage_load", "race", ring_sum, ring_inputs(1, 3, 5), seed=3)
fault("wrong_stage_wait", "race", ring_sum, ring_inputs(1, 3, 6), line="copy_into_slot")
fault("wrong_stage_release", "deadlock", ring_sum, ring_inputs(1, 3, 7), seed=6)
fault("too_few_bytes", "bytes", ring_sum, ring_inputs(1, 4, 6))
fault("too_many_bytes", "bytes", ring_sum, ring_inputs(2, 2, 4))
fault("expect_on_other_stage", "deadlock", ring_sum, ring_inputs(1, 4, 5))
fault("expect_forgotten", "deadlock", ring_sum, ring_inputs(2, 3, 5))
fault("count_too_high", "deadlock", ring_sum, ring_inputs(2, 2, 5))
fault("count_too_low", "race", ring_sum, ring_inputs(2, 2, 7), seed=4, line="copy_into_slot")
fault("lapped_consumer", "phase-wrap", ring_sum, ring_inputs(2, 1, 12), also=("race",), seed=16)
fault("wait_after_use", "race", ring_sum, ring_inputs(2, 3, 4), seed=28, line="copy_into_slot")
fault("no_wait", "race", ring_sum, ring_inputs(1, 2, 2), seed=10, line="copy_into_slot")
fault("unfenced_release", "missing-fence", ring_sum, ring_inputs(2, 3, 7), line="copy_into_slot")
fault("fence_promised", "missing-fence", ring_sum, ring_inputs(2, 3, 7), line="copy_into_slot")
fault("lost_last_iteration", "unfinished", ring_sum, ring_inputs(1, 5, 6), line="copy_into_slot")
fault("extra_iteration", "deadlock", ring_sum, ring_inputs(1, 5, 4))


@triton.jit
def turn_consumer(Y, tile, arrived, finished, order, tasks, CONSUMER: tl.constexpr, BUG: tl.constexpr):
    acc = tk.zero(tk.rt(tk.fp32, 16, 32))
    for task in range(CONSUMER, tasks, 2):
        if BUG != "turn_not_awaited":
            tk.wait(order[CONSUMER], (task // 2 & 1) ^ (1 - CONSUMER))
        for i in range(2 * task, 2 * task + 2):
            tk.wait(arrived[0], i & 1)
            acc += tk.load(tile, like=acc)
            tk.arrive(finished[0])
        tk.arrive(order[1 - CONSUMER])
    tk.store(Y, acc, (CONSUMER, 0))


@triton.jit
def turn_producer(X, tile, arrived, finished, tasks):
    for i in range(2 * tasks):
        tk.wait(finished[0], (i & 1) ^ 1)
        tk.expect(arrived[0], tile)
        tk.load_async(tile, X, (i, 0), arrived[0])  # reports: turn_not_awaited


@tk.kernel
@triton.jit
def turns(X, Y, tasks, BUG: tl.constexpr):
    """Two consumers take tasks of two tiles by turns: each sees only half of the phases of a barrier. Y[c] = the sum of
    the tiles of tasks c, c + 2, …"""
    tile = tk.allocate(tk.st(tk.fp32, 16, 32))
    arrived, finished, order = tk.semaphores(1), tk.semaphores(1), tk.semaphores(2)
    tk.specialize(
        (
            (turn_consumer, (Y, tile, arrived, finished, order, tasks, 0, BUG)),
            (turn_consumer, (Y, tile, arrived, finished, order, tasks, 1, BUG)),
            (turn_producer, (X, tile, arrived, finished, tasks)),
        ),
        warps=(4, 4, 1),
    )


def turn_inputs(iterations: int) -> Any:
    def make(rng: Any) -> Any:
        x, y = integers(rng, 32 * iterations, 32), empty(32, 32)
        expected = torch.cat([x.reshape(iterations, 2, 16, 32)[c::2].sum((0, 1)) for c in range(2)])
        return (1,), (tk.gl(x, TILE), tk.gl(y), iterations), [y], [expected]

    return make


fault("turn_not_awaited", "race", turns, turn_inputs(6), seed=1)


# ---------------------------------------------------------------- products of a warpgroup (wgmma)

BF16 = torch.bfloat16
WIDE, NARROW = tk.st(tk.bf16, 64, 64), tk.st(tk.bf16, 64, 32)


@triton.jit
def gemm_producer(A, B, a, b, pipe, second, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    state = tk.pipeline_state(pipe)
    for i in range(iterations):
        tk.producer_acquire(pipe, state)
        if BUG == "bytes_on_other_barrier":
            tk.expect(pipe.full[state.index], b[0])  # reports: bytes_on_other_barrier
            tk.expect(second[state.index], a[0])
        else:
            tk.expect(pipe.full[state.index], a[0])
            tk.expect(second[state.index], b[0])
        # reports: early_release, bytes_on_other_barrier
        tk.load_async(a[state.index], A, (0, i), pipe.full[state.index])
        # reports: early_release, swapped_operand_stage, second_barrier
        tk.load_async(b[state.index], B, (i, 0), second[state.index])
        state = tk.advance(state)


@triton.jit
def gemm_consumer(C, a, b, pipe, second, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    state = tk.pipeline_state(pipe)
    acc = tk.zero(tk.rt(tk.fp32, 64, 32))
    for _ in range(iterations):
        tk.consumer_wait(pipe, state)
        if BUG != "second_barrier_forgotten":
            tk.wait(second[state.index], state.phase)  # reports: bytes_on_other_barrier
        if BUG == "swapped_operand_stage":
            acc = tk.mma_AB(a[state.index], b[(state.index + 1) % STAGES], acc)  # reports: swapped_operand_stage
        elif BUG == "early_release":
            product = tk.mma_AB(a[state.index], b[state.index], acc, wait=False)  # reports: early_release
            tk.consumer_release(pipe, state)
            acc = tk.mma_wait(product)
        else:
            acc = tk.mma_AB(a[state.index], b[state.index], acc)
        if BUG != "early_release":
            tk.consumer_release(pipe, state)
        state = tk.advance(state)
    tk.store(C, acc, (0, 0))


@tk.kernel
@triton.jit
def ring_gemm(A, B, C, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    """C = A·B over a ring; each operand has a barrier of its own."""
    a, b = tk.allocate(tk.st(tk.bf16, 64, 64), STAGES), tk.allocate(tk.st(tk.bf16, 64, 32), STAGES)
    pipe, second = tk.pipeline(STAGES), tk.semaphores(STAGES)
    tk.specialize(
        (
            (gemm_consumer, (C, a, b, pipe, second, iterations, STAGES, BUG)),
            (gemm_producer, (A, B, a, b, pipe, second, iterations, STAGES, BUG)),
        ),
        warps=(4, 1),
    )


def gemm_inputs(stages: int, iterations: int) -> Any:
    def make(rng: Any) -> Any:
        a, b, c = (
            integers(rng, 64, 64 * iterations, dtype=BF16),
            integers(rng, 64 * iterations, 32, dtype=BF16),
            empty(64, 32),
        )
        return (1,), (tk.gl(a, WIDE), tk.gl(b, NARROW), tk.gl(c), iterations, stages), [c], [a.float() @ b.float()]

    return make


fault("early_release", "race", ring_gemm, gemm_inputs(2, 4))
fault("swapped_operand_stage", "race", ring_gemm, gemm_inputs(2, 5), seed=2)
fault("second_barrier_forgotten", "race", ring_gemm, gemm_inputs(3, 4), line="second_barrier")
fault("bytes_on_other_barrier", "bytes", ring_gemm, gemm_inputs(3, 5))


@tk.kernel
@triton.jit
def products(A, B, C, iterations, BUG: tl.constexpr):
    """C = A·B, the newest product always under way; tiles come through registers or cp.async, and A may be in
    registers."""
    ring_a, ring_b = tk.allocate(tk.st(tk.bf16, 64, 64), stages=3), tk.allocate(tk.st(tk.bf16, 64, 32), stages=3)
    acc = tk.mma_begin(tk.zero(tk.rt(tk.fp32, 64, 32)))
    for i in range(iterations):
        a, b = ring_a[i % 2], ring_b[i % 2]
        tk.load_into(a, A, (0, i))  # reports: retired_too_few
        tk.load_into(b, B, (i, 0))  # reports: retired_too_few
        tk.fence_async()
        tk.sync()
        acc = tk.mma_AB(a, b, acc, wait=False)  # reports: retired_too_few
        if BUG != "retired_too_few":
            acc = tk.mma_retire(acc)
        tk.sync()
    tk.store(C, tk.mma_wait(acc), (0, 0))


def product_inputs(iterations: int) -> Any:
    def make(rng: Any) -> Any:
        a, b, c = (
            integers(rng, 64, 64 * iterations, dtype=BF16),
            integers(rng, 64 * iterations, 32, dtype=BF16),
            empty(64, 32),
        )
        return (1,), (tk.gl(a, WIDE), tk.gl(b, NARROW), tk.gl(c), iterations), [c], [a.float() @ b.float()]

    return make


fault("retired_too_few", "race", products, product_inputs(4))


@tk.kernel
@triton.jit
def raw_products(A, B, C, BUG: tl.constexpr):
    """C = A·B + A·B with A in registers, by the instructions themselves (tk takes care of the waits)."""
    a, b = tk.allocate(tk.st(tk.bf16, 64, 64)), tk.allocate(tk.st(tk.bf16, 64, 32))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    zero = tk.zero(tk.rt(tk.fp32, 64, 32))
    left = gl.convert_layout(tk.load(a), gl.DotOperandLayout(0, zero.type.layout, 2))
    # reports: accumulator_read, operand_overwritten
    first = hopper.warpgroup_mma(left, b.pieces[0], zero, use_acc=False, is_async=True)
    more = tk.load(b, like=zero).to(tl.float32) * 0
    if BUG == "accumulator_read":
        total = hopper.warpgroup_mma_wait(1, deps=[first, left])[0]  # reports: accumulator_read
    elif BUG == "operand_overwritten":
        tk.store(b, tk.zero(tk.rt(tk.bf16, 64, 32)))  # reports: operand_overwritten
        total = hopper.warpgroup_mma_wait(0, deps=[first, left])[0]
    else:
        total = hopper.warpgroup_mma_wait(0, deps=[first, left])[0]
    tk.store(C, total * 2 + more, (0, 0))  # reports: accumulator_read


def one_product(rng: Any) -> Any:
    a, b, c = integers(rng, 64, 64, dtype=BF16), integers(rng, 64, 32, dtype=BF16), empty(64, 32)
    return (1,), (tk.gl(a), tk.gl(b), tk.gl(c)), [c], [2 * (a.float() @ b.float())]


fault("accumulator_read", "in-flight", raw_products, one_product)
fault("operand_overwritten", "race", raw_products, one_product)


@tk.kernel
@triton.jit
def register_products(A, B, C, iterations, BUG: tl.constexpr):
    """C = A·B with A in registers, tile by tile."""
    a, b = tk.allocate(tk.st(tk.bf16, 64, 64), 3), tk.allocate(tk.st(tk.bf16, 64, 32), 3)
    for i in range(iterations):
        tk.load_into(a[i], A, (0, i))
        tk.load_into(b[i], B, (i, 0))
    tk.fence_async()
    tk.sync()
    acc = tk.zero(tk.rt(tk.fp32, 64, 32))
    for i in range(iterations):
        left = gl.convert_layout(tk.load(a[i]), gl.DotOperandLayout(0, acc.type.layout, 2))
        total = hopper.warpgroup_mma(left, b[i].pieces[0], acc, is_async=True)  # reports: register_not_kept
        if BUG == "register_not_kept":
            acc = hopper.warpgroup_mma_wait(1, deps=[total])  # reports: register_not_kept
        else:
            acc = hopper.warpgroup_mma_wait(0, deps=[total, left])[0]
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    tk.store(C, acc, (0, 0))


fault("register_not_kept", "in-flight", register_products, product_inputs(3))


# ---------------------------------------------------------------- tensor memory (tcgen05)


@tk.kernel
@triton.jit
def tensor_product(A, B, C, iterations, BUG: tl.constexpr):
    """C = A·B in tensor memory; the barrier of each product is waited for before its operands are overwritten."""
    a, b = tk.allocate(tk.st(tk.bf16, 128, 64)), tk.allocate(tk.st(tk.bf16, 64, 64))
    done = tk.semaphores(1)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 64))  # reports: tensor_uninitialised, zero_iterations
    if BUG != "tensor_uninitialised" and BUG != "zero_iterations":
        tk.zero(acc)
        tk.sync()
    for i in range(iterations):
        tk.load_into(a, A, (0, i))  # reports: operand_before_commit
        tk.load_into(b, B, (i, 0))  # reports: operand_before_commit
        tk.fence_async()
        tk.sync()
        if BUG == "zero_iterations":
            tcgen05_mma(a.pieces[0], b.pieces[0], acc.pieces[0], use_acc=i > 0, mbarriers=[done[0].piece])
        else:
            # reports: operand_before_commit, tensor_read_early, tensor_uninitialised
            tk.mma_AB(a, b, acc, arrived=done[0])
        if BUG == "operand_before_commit" or BUG == "tensor_read_early":
            if i > 0:
                tk.wait(done[0], (i - 1) & 1)
        else:
            tk.wait(done[0], i & 1)
    if BUG == "zero_iterations_wait":
        tk.wait(done[0], 0)  # reports: zero_iterations_wait
    if BUG == "operand_before_commit":
        tk.wait(done[0], (iterations - 1) & 1)
    tk.store(C, tk.load(acc), (0, 0))  # reports: tensor_read_early, zero_iterations


def tensor_inputs(iterations: int) -> Any:
    def make(rng: Any) -> Any:
        width = max(1, iterations) * 64
        a, b, c = integers(rng, 128, width, dtype=BF16), integers(rng, width, 64, dtype=BF16), empty(128, 64)
        expected = a.float() @ b.float() if iterations else torch.zeros(128, 64)
        return (1,), (tk.gl(a), tk.gl(b), tk.gl(c), iterations), [c], [expected]

    return make


BLACKWELL = dict(arch="sm_100a")
fault("tensor_uninitialised", "uninitialized", tensor_product, tensor_inputs(2), **BLACKWELL)
fault("zero_iterations", "uninitialized", tensor_product, tensor_inputs(0), **BLACKWELL)
fault("zero_iterations_wait", "deadlock", tensor_product, tensor_inputs(0), **BLACKWELL)
fault("operand_before_commit", "race", tensor_product, tensor_inputs(4), **BLACKWELL)
fault("tensor_read_early", "race", tensor_product, tensor_inputs(1), **BLACKWELL)


@triton.jit
def tensor_issuer(a, b, acc, done, free, rounds, BUG: tl.constexpr):
    for j in range(rounds):
        for p in tl.static_range(2):
            if BUG != "accumulator_reused":
                tk.wait(free[p], (j & 1) ^ 1)
            if BUG == "tensor_overlap" and p == 1:
                into = acc.pieces[0].slice(32, 64)
            else:
                into = acc.pieces[0].slice(64 * p, 64)
            # reports: tensor_overlap, accumulator_reused
            tcgen05_mma(a.pieces[0], b[2 * j + p].pieces[0], into, use_acc=False, mbarriers=[done[p].piece])


@triton.jit
def tensor_epilogue(C, acc, done, free, rounds, BUG: tl.constexpr):
    # not unrolled: Triton 3.9 merges two loads of one view in straight code, also across a barrier's wait
    for j in range(rounds):
        for p in tl.static_range(2):
            tk.wait(done[p], j & 1)
            # reports: tensor_overlap, accumulator_reused
            tk.store(C, tk.load(tk.subtile(acc, 128, 64, 0, p)), (2 * j + p, 0))
            tk.arrive(free[p])


@tk.kernel
@triton.jit
def two_accumulators(A, B, C, rounds, ROUNDS: tl.constexpr, BUG: tl.constexpr):
    """C[i] = A·B[i]: one role issues products into two accumulators by turns, another stores them."""
    a, b = tk.allocate(tk.st(tk.bf16, 128, 32)), tk.allocate(tk.st(tk.bf16, 32, 64), ROUNDS)
    done, free = tk.semaphores(2), tk.semaphores(2)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 128))
    tk.load_into(a, A, (0, 0))
    for i in tl.static_range(ROUNDS):
        tk.load_into(b[i], B, (i, 0))
    tk.fence_async()
    tk.sync()
    tk.specialize(
        ((tensor_epilogue, (C, acc, done, free, rounds, BUG)), (tensor_issuer, (a, b, acc, done, free, rounds, BUG))),
        warps=(4, 1),
    )


def accumulator_inputs(rounds: int) -> Any:
    def make(rng: Any) -> Any:
        a, b, c = (
            integers(rng, 128, 32, dtype=BF16),
            integers(rng, 32 * rounds, 64, dtype=BF16),
            empty(128 * rounds, 64),
        )
        expected = torch.cat([a.float() @ p.float() for p in b.split(32)])
        return (1,), (tk.gl(a), tk.gl(b), tk.gl(c), rounds // 2, rounds), [c], [expected]

    return make


fault("tensor_overlap", "race", two_accumulators, accumulator_inputs(2), **BLACKWELL)
fault("accumulator_reused", "race", two_accumulators, accumulator_inputs(4), **BLACKWELL)


@triton.jit
def hand_over(A, B, a, b, full, free, iterations, BUG: tl.constexpr):
    for i in range(iterations):
        tk.wait(free, (i & 1) ^ 1)
        tk.load_into(a, A, (0, i))  # reports: product_unfenced
        tk.load_into(b, B, (i, 0))
        if BUG != "product_unfenced":
            tk.fence_async()
        tk.arrive(full)


@triton.jit
def take_over(C, a, b, full, free, iterations):
    acc = tk.zero(tk.rt(tk.fp32, 64, 32))
    for i in range(iterations):
        tk.wait(full, i & 1)
        acc = tk.mma_AB(a, b, acc)  # reports: product_unfenced
        tk.arrive(free)
    tk.store(C, acc, (0, 0))


@tk.kernel
@triton.jit
def handed_over(A, B, C, iterations, BUG: tl.constexpr):
    """C = A·B; one role stores the operands, another multiplies (within one role Triton adds the fence by itself)."""
    a, b = tk.allocate(tk.st(tk.bf16, 64, 64)), tk.allocate(tk.st(tk.bf16, 64, 32))
    ready = tk.semaphores(2)
    tk.specialize(
        (
            (take_over, (C, a, b, ready[0], ready[1], iterations)),
            (hand_over, (A, B, a, b, ready[0], ready[1], iterations, BUG)),
        ),
        warps=(4, 4),
    )


fault("product_unfenced", "missing-fence", handed_over, product_inputs(3))


@triton.jit
def tensor_hand_over(A, B, a, b, full, free, iterations, BUG: tl.constexpr):
    for i in range(iterations):
        tk.wait(free, (i & 1) ^ 1)
        tk.load_into(a, A, (0, i))  # reports: tensor_product_unfenced
        tk.load_into(b, B, (i, 0))
        if BUG != "tensor_product_unfenced":
            tk.fence_async()
        tk.arrive(full)


@triton.jit
def tensor_take_over(C, a, b, acc, full, free, iterations):
    for i in range(iterations):
        tk.wait(full, i & 1)
        tk.mma_AB(a, b, acc, arrived=free)  # reports: tensor_product_unfenced
    tk.wait(free, (iterations - 1) & 1)
    tk.store(C, tk.load(acc), (0, 0))


@tk.kernel
@triton.jit
def tensor_handed_over(A, B, C, iterations, BUG: tl.constexpr):
    a, b = tk.allocate(tk.st(tk.bf16, 128, 64)), tk.allocate(tk.st(tk.bf16, 64, 64))
    ready = tk.semaphores(2)
    acc = tk.zero(tk.tensor_allocator(tk.tt(tk.fp32, 128, 64)))
    tk.sync()
    tk.specialize(
        (
            (tensor_take_over, (C, a, b, acc, ready[0], ready[1], iterations)),
            (tensor_hand_over, (A, B, a, b, ready[0], ready[1], iterations, BUG)),
        ),
        warps=(4, 4),
    )


fault("tensor_product_unfenced", "missing-fence", tensor_handed_over, tensor_inputs(3), **BLACKWELL)


# ---------------------------------------------------------------- TMA stores


@tk.kernel
@triton.jit
def stores(X, Y, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    """Y = X + 1 through registers and a ring of staging tiles, written by TMA."""
    staging = tk.allocate(tk.st(tk.fp32, 16, 32), STAGES)
    for i in range(iterations):
        x = tk.load(X, tk.rt(tk.fp32, 16, 32), (i, 0)) + 1
        if BUG == "store_source_overwritten":
            pass
        elif BUG == "store_wait_too_many":
            tk.store_read_wait(STAGES)
        else:
            tk.store_read_wait(STAGES - 1)
        tk.store(staging[i % STAGES], x)  # reports: store_source_overwritten, store_wait_too_many
        tk.fence_async()
        tk.sync()
        if BUG == "negative_coordinate":
            tk.store_async(Y, staging[i % STAGES], (i - 1, 0))  # reports: negative_coordinate
        else:
            # reports: store_source_overwritten, store_wait_too_many, store_left_behind
            tk.store_async(Y, staging[i % STAGES], (i, 0))
    if BUG != "store_left_behind":
        tk.store_read_wait()  # the writes outlive the block, its shared memory does not


def store_inputs(stages: int, iterations: int) -> Any:
    def make(rng: Any) -> Any:
        x, y = integers(rng, 16 * iterations, 32), empty(16 * iterations, 32)
        return (1,), (tk.gl(x), tk.gl(y, TILE), iterations, stages), [y], [x + 1]

    return make


fault("store_source_overwritten", "race", stores, store_inputs(1, 2))
fault("store_wait_too_many", "race", stores, store_inputs(2, 4))
fault("negative_coordinate", "out-of-bounds", stores, store_inputs(3, 4))
fault("store_left_behind", "unfinished", stores, store_inputs(3, 4))


@tk.kernel
@triton.jit
def through_global_memory(X, W, Y, TILE: tl.constexpr, BUG: tl.constexpr):
    """Y = W = X, W by TMA and read back."""
    tile, back = tk.allocate(TILE), tk.allocate(TILE)
    arrived = tk.semaphores(1)
    tk.store(tile, tk.load(X, tk.rt(tk.fp32, 16, 32), (0, 0)))
    tk.fence_async()
    tk.sync()
    tk.store_async(W[0], tile, (0, 0))
    if BUG != "":
        tk.store_read_wait(0)
    else:
        tk.store_wait(0)
    tk.sync()
    if BUG == "read_back_by_threads":
        tk.store(Y, tk.load(W[1], tk.rt(tk.fp32, 16, 32), (0, 0)), (0, 0))  # reports: read_back_by_threads
    else:
        tk.expect(arrived[0], back)
        tk.load_async(back, W[0], (0, 0), arrived[0])  # reports: read_back_too_early
        tk.wait(arrived[0], 0)
        tk.store(Y, tk.load(back), (0, 0))


def through_global_inputs(rng: Any) -> Any:
    x, w, y = integers(rng, 16, 32), empty(16, 32), empty(16, 32)
    return (1,), (tk.gl(x), (tk.gl(w, TILE), tk.gl(w)), tk.gl(y), TILE), [w, y], [x, x]


fault("read_back_too_early", "race", through_global_memory, through_global_inputs)
fault("read_back_by_threads", "race", through_global_memory, through_global_inputs)


@tk.kernel
@triton.jit
def copy_tile(X, Y, SOME: tl.constexpr, BUG: tl.constexpr):
    """Y = X, one tile by TMA."""
    tile = tk.allocate(tk.st(tk.bf16, 16, 64))  # reports: shared_uninitialised
    arrived = tk.semaphores(1)
    tk.expect(arrived[0], tile)
    if BUG == "misaligned_coordinate":
        tma.async_load(X.maps[0], [0, 4], arrived[0].piece, tile.pieces[0])  # reports: misaligned_coordinate
    elif BUG != "shared_uninitialised":
        tk.load_async(tile, X, (0, 0), arrived[0])
    if BUG != "shared_uninitialised":
        tk.wait(arrived[0], 0)
    if BUG == "ragged_row":
        tk.store_async(Y[1], tile, (0, 0))  # reports: ragged_row
    else:
        tk.store_async(Y[0], tile, (0, 0))  # reports: shared_uninitialised
    tk.store_wait()


def copy_inputs(rng: Any) -> Any:
    x, y, z = integers(rng, 16, 64, dtype=BF16), empty(16, 64, dtype=BF16), empty(16 * 64 - 4, dtype=BF16)
    tile = tk.st(tk.bf16, 16, 64)
    return (1,), (tk.gl(x, tile), (tk.gl(y, tile), tk.gl(z.as_strided((16, 60), (64, 1)), tile)), 0), [y], [x]


fault("misaligned_coordinate", "misaligned", copy_tile, copy_inputs)
fault("shared_uninitialised", "uninitialized", copy_tile, copy_inputs)
fault("ragged_row", "out-of-bounds", copy_tile, copy_inputs)


@tk.kernel
@triton.jit
def prefetched(X, Y, iterations, BUG: tl.constexpr):
    """Y = the sum of the tiles of X, two copies ahead."""
    tiles = tk.allocate(tk.st(tk.fp32, 16, 32), 2)
    pipe = tk.pipeline(2, empty_arrivals=0)
    ahead, state = tk.pipeline_state(pipe), tk.pipeline_state(pipe)
    first = tl.minimum(2, iterations)
    if BUG == "one_iteration":
        first = 2
    for i in range(first):
        tk.expect(pipe.full[i], tiles[i])
        tk.load_async(tiles[i], X, (i, 0), pipe.full[i])  # reports: one_iteration
        ahead = tk.advance(ahead)
    acc = tk.zero(tk.rt(tk.fp32, 16, 32))
    for i in range(iterations):
        tk.consumer_wait(pipe, state)
        acc += tk.load(tiles[state.index], like=acc)
        tk.fence_async()
        tk.sync()
        if i + 2 < iterations:
            tk.expect(pipe.full[state.index], tiles[0])
            tk.load_async(tiles[state.index], X, (i + 2, 0), pipe.full[state.index])
        state = tk.advance(state)
    tk.store(Y, acc, (0, 0))


def prefetched_inputs(iterations: int) -> Any:
    def make(rng: Any) -> Any:
        x, y = integers(rng, 16 * iterations, 32), empty(16, 32)
        return (1,), (tk.gl(x, TILE), tk.gl(y), iterations), [y], [x.reshape(iterations, 16, 32).sum(0)]

    return make


fault("one_iteration", "unfinished", prefetched, prefetched_inputs(1), seed=3)


@triton.jit
def filler(X, tile, full, free, iterations, BUG: tl.constexpr):
    for i in range(iterations):
        tk.wait(free, (i & 1) ^ 1)
        if BUG == "fenced_before_store":
            tk.fence_async()
        # reports: store_unfenced, fenced_before_store, freed_before_read
        tk.store(tile, tk.load(X, tk.rt(tk.fp32, 16, 32), (i, 0)) + 1)
        if BUG != "store_unfenced" and BUG != "fenced_before_store":
            tk.fence_async()
        tk.arrive(full)


@triton.jit
def writer(Y, tile, full, free, iterations, BUG: tl.constexpr):
    for i in range(iterations):
        tk.wait(full, i & 1)
        tk.store_async(Y, tile, (i, 0))  # reports: store_unfenced, fenced_before_store, freed_before_read
        if BUG != "freed_before_read":
            tk.store_read_wait()
        tk.arrive(free)
    tk.store_wait()


@tk.kernel
@triton.jit
def written_by_another(X, Y, iterations, BUG: tl.constexpr):
    """Y = X + 1; one role fills the staging tile, another stores it by TMA."""
    tile = tk.allocate(tk.st(tk.fp32, 16, 32))
    ready = tk.semaphores(2)
    tk.specialize(
        (
            (filler, (X, tile, ready[0], ready[1], iterations, BUG)),
            (writer, (Y, tile, ready[0], ready[1], iterations, BUG)),
        ),
        warps=(4, 1),
    )


def written_inputs(rng: Any) -> Any:
    x, y = integers(rng, 16 * 3, 32), empty(16 * 3, 32)
    return (1,), (tk.gl(x), tk.gl(y, TILE), 3), [y], [x + 1]


fault("store_unfenced", "missing-fence", written_by_another, written_inputs)
fault("fenced_before_store", "missing-fence", written_by_another, written_inputs)
fault("freed_before_read", "race", written_by_another, written_inputs)


# ---------------------------------------------------------------- cp.async


@tk.kernel
@triton.jit
def copies(X, Y, iterations, BUG: tl.constexpr):
    """Y = X by cp.async, two tiles ahead."""
    ring = tk.allocate(tk.st(tk.fp32, 16, 32), stages=2)
    for i in tl.static_range(2):
        tk.load_async(ring[i], X, (i, 0))
    for i in range(iterations):
        if BUG == "copies_not_waited":
            tk.sync()
        elif BUG == "copies_too_many_pending":
            tk.load_async_wait(2)
        else:
            tk.load_async_wait(1)
        # reports: copies_not_waited, copies_too_many_pending
        tk.store(Y, tk.load(ring[i % 2], layout="memory"), (i, 0))
        tk.sync()
        tk.load_async(ring[i % 2], X, (i + 2, 0))
    tk.load_async_wait()


def copies_inputs(iterations: int) -> Any:
    def make(rng: Any) -> Any:
        x, y = integers(rng, 16 * iterations, 32), empty(16 * iterations, 32)
        return (1,), (tk.gl(x), tk.gl(y), iterations), [y], [x]

    return make


fault("copies_not_waited", "race", copies, copies_inputs(3), seed=1)
fault("copies_too_many_pending", "race", copies, copies_inputs(4), seed=1)


@triton.jit
def copying(A, B, a, b, full, BUG: tl.constexpr):
    tk.load_async(a, A, (0, 0))  # reports: copies_unfenced
    tk.load_async(b, B, (0, 0))
    tk.load_async_wait()
    if BUG != "copies_unfenced":
        tk.fence_async()
    tk.arrive(full)


@triton.jit
def multiplying(C, a, b, full):
    tk.wait(full, 0)
    tk.store(C, tk.mm_AB(a, b) * 2, (0, 0))  # reports: copies_unfenced


@tk.kernel
@triton.jit
def copied_product(A, B, C, BUG: tl.constexpr):
    """C = 2·A·B; one role fetches the operands by cp.async."""
    a, b = tk.allocate(tk.st(tk.bf16, 64, 64)), tk.allocate(tk.st(tk.bf16, 64, 32))
    full = tk.semaphores(1)
    tk.specialize(((multiplying, (C, a, b, full[0])), (copying, (A, B, a, b, full[0], BUG))), warps=(4, 4))


fault("copies_unfenced", "missing-fence", copied_product, one_product)


# ---------------------------------------------------------------- the life of a barrier


@triton.jit
def late_init(bar, value, X, BUG: tl.constexpr):
    if BUG == "init_in_role":
        mbarrier.init(bar, 1)  # reports: init_in_role
    tk.store(value, tk.load(X, tk.rv(tk.fp32, 128), (0,)))
    mbarrier.arrive(bar, count=1)


@triton.jit
def early_wait(bar, value, Y):
    mbarrier.wait(bar, 0)  # reports: init_in_role
    tk.store(Y, tk.load(value), (0,))


@tk.kernel
@triton.jit
def handshake(X, Y, BUG: tl.constexpr):
    """Y = X, handed from one role to another by a barrier that the kernel initialises itself."""
    bar = gl.allocate_shared_memory(tl.int64, [1], mbarrier.MBarrierLayout())
    value = tk.allocate(tk.sv(tk.fp32, 128))
    if BUG != "init_in_role" and BUG != "not_initialised":
        mbarrier.init(bar, 1)  # reports: initialised_twice
    if BUG == "initialised_twice":
        mbarrier.init(bar, 1)  # reports: initialised_twice
    if BUG == "used_after_invalidation":
        mbarrier.invalidate(bar)  # reports: used_after_invalidation
    tk.fence_async()
    tk.sync()
    if BUG == "not_initialised":
        mbarrier.arrive(bar, count=1)  # reports: not_initialised
    elif BUG == "used_after_invalidation":
        mbarrier.arrive(bar, count=1)  # reports: used_after_invalidation
    else:
        tk.specialize(((early_wait, (bar, value, Y)), (late_init, (bar, value, X, BUG))), warps=(4, 4))


def vector_inputs(rng: Any) -> Any:
    x, y = integers(rng, 128), empty(128)
    return (1,), (tk.gl(x), tk.gl(y)), [y], [x]


fault("not_initialised", "barrier-life", handshake, vector_inputs)
fault("initialised_twice", "barrier-life", handshake, vector_inputs)
fault("used_after_invalidation", "barrier-life", handshake, vector_inputs)
fault("init_in_role", "barrier-life", handshake, vector_inputs)


# ---------------------------------------------------------------- roles that wait for each other


@triton.jit
def first_speaker(Y, note, COUNT: tl.constexpr):
    for i in range(4):
        tk.named_sync(8, COUNT)  # reports: named_count
        tk.store(Y, tk.load(note) + i, (i,))  # reports: named_answer_forgotten
        tk.named_arrive(9, 256)


@triton.jit
def second_speaker(X, note, BUG: tl.constexpr):
    for i in range(4):
        tk.store(note, tk.load(X, tk.rv(tk.fp32, 128), (i,)))  # reports: named_answer_forgotten
        tk.named_arrive(8, 256)  # reports: named_count
        if BUG != "named_answer_forgotten":
            tk.named_sync(9, 256)


@tk.kernel
@triton.jit
def conversation(X, Y, BUG: tl.constexpr):
    """Y[i] = X[i] + i, handed over between two roles by named barriers."""
    note = tk.allocate(tk.sv(tk.fp32, 128))
    COUNT: tl.constexpr = 384 if BUG == "named_count" else 256
    tk.specialize(((first_speaker, (Y, note, COUNT)), (second_speaker, (X, note, BUG))), warps=(4, 4))


def conversation_inputs(rng: Any) -> Any:
    x, y = integers(rng, 512), empty(512)
    return (1,), (tk.gl(x), tk.gl(y)), [y], [x + torch.arange(4).repeat_interleave(128)]


fault("named_count", "arrivals", conversation, conversation_inputs)
fault("named_answer_forgotten", "race", conversation, conversation_inputs)


@triton.jit
def circle_first(Y, mine, yours, BUG: tl.constexpr):
    if BUG != "circular_wait":
        tk.arrive(yours)
    tk.wait(mine, 0)  # reports: circular_wait
    if BUG == "circular_wait":
        tk.arrive(yours)
    tk.store(Y, tk.zero(tk.rv(tk.fp32, 128)) + 1, (0,))


@triton.jit
def circle_second(Y, mine, yours):
    tk.wait(mine, 0)  # reports: circular_wait
    tk.arrive(yours)
    tk.store(Y, tk.zero(tk.rv(tk.fp32, 128)) + 2, (1,))


@tk.kernel
@triton.jit
def circle(Y, BUG: tl.constexpr):
    sems = tk.semaphores(2)
    tk.specialize(((circle_first, (Y, sems[0], sems[1], BUG)), (circle_second, (Y, sems[1], sems[0]))), warps=(4, 4))


def circle_inputs(rng: Any) -> Any:
    y = empty(256)
    return (1,), (tk.gl(y),), [y], [torch.arange(1.0, 3.0).repeat_interleave(128)]


fault("circular_wait", "deadlock", circle, circle_inputs)


# ---------------------------------------------------------------- plain Triton


@triton.jit
def scaled_rows(X, Y, COUNTS, n, limit, BUG: tl.constexpr):
    """Y = 2·X and a histogram of X, 64 elements a block."""
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    if BUG == "load_outside":
        x = tl.load(X + at)  # reports: load_outside
    else:
        x = tl.load(X + at, mask=at < n, other=0)
    tl.device_assert(x < 100, "large")
    if BUG == "assertion":
        tl.device_assert(x < 2, "too large")  # reports: assertion
    if BUG == "store_outside":
        tl.store(Y + at, 2 * x)  # reports: store_outside
    else:
        tl.store(Y + at, 2 * x, mask=at < n)
    if BUG == "atomic_outside":
        tl.atomic_add(COUNTS + x + 4, 1, mask=at < n)  # reports: atomic_outside
    else:
        tl.atomic_add(COUNTS + x + 3, 1, mask=at < n)
    i = 0
    while i < limit:
        if BUG != "endless":
            i += 1
        else:
            tl.atomic_add(COUNTS, 0)  # reports: endless
        tl.debug_barrier()  # reports: endless


def plain_inputs(rng: Any) -> Any:
    x, y, counts = (
        integers(rng, 150, dtype=torch.int32),
        empty(150, dtype=torch.int32),
        torch.zeros(7, dtype=torch.int32),
    )
    x[:7] = torch.arange(-3, 4)
    return (3,), (x, y, counts, 150, 2), [y], [2 * x]


fault("load_outside", "out-of-bounds", scaled_rows, plain_inputs)
fault("store_outside", "out-of-bounds", scaled_rows, plain_inputs)
fault("atomic_outside", "out-of-bounds", scaled_rows, plain_inputs)
fault("assertion", "assert", scaled_rows, plain_inputs, options=dict(debug=True))
fault("endless", "loop", scaled_rows, plain_inputs, device=dict(step_limit=3000))


# ---------------------------------------------------------------- clusters


@tk.kernel
@triton.jit
def neighbours(Y, BUG: tl.constexpr):
    """Two blocks of a cluster tell each other that they are there."""
    sem = tk.semaphores(2)
    if BUG != "cluster_barrier_forgotten":
        tk.cluster_sync()
    rank = tk.cluster_rank()
    for i in range(4):
        if BUG == "wrong_rank":
            tk.arrive(sem[i % 2], cta=0)
        else:
            tk.arrive(sem[i % 2], cta=rank ^ 1)  # reports: cluster_barrier_forgotten
        tk.wait(sem[i % 2], i // 2 % 2, scope="cluster")  # reports: wrong_rank
    tk.cluster_sync()
    tk.store(Y, tk.zero(tk.rv(tk.int32, 16)) + rank, (tk.block_index() * 2 + rank,))


@tk.kernel
@triton.jit
def last_words(Y, BUG: tl.constexpr):
    """The first block of a cluster arrives at the second's barrier, which does not wait for it; the second must still
    be there."""
    sem = tk.semaphores(1)
    tk.cluster_sync()
    rank = tk.cluster_rank()
    if rank == 0:
        tk.store(Y, tk.zero(tk.rv(tk.int32, 16)), (0,))
        tk.arrive(sem[0], cta=1)  # reports: left_early
    if BUG != "left_early":
        tk.cluster_sync()


@tk.kernel
@triton.jit
def shared_loads(X, Y, TILE: tl.constexpr, BUG: tl.constexpr):
    """Each of two blocks loads one of two tiles for both; Y[2·block + i] = X[i]."""
    tiles = tk.allocate(TILE, 2)
    arrived = tk.semaphores(2)
    for i in tl.static_range(2):
        tk.expect(arrived[i], TILE.nbytes)
    if BUG != "multicast_too_early":
        tk.cluster_sync()
    rank = tk.cluster_rank()
    if BUG == "multicast_mask":
        tk.load_async(tiles[rank], X, (rank, 0), arrived[rank], multicast=1)
    else:
        tk.load_async(tiles[rank], X, (rank, 0), arrived[rank], multicast=3)  # reports: multicast_too_early
    for i in tl.static_range(2):
        tk.wait(arrived[i], 0)  # reports: multicast_mask
        tk.store(Y, tk.load(tiles[i], layout="memory"), (2 * tk.block_index() + i, 0))
    tk.cluster_sync()


def neighbours_inputs(rng: Any) -> Any:
    y = empty(64, dtype=torch.int32)
    return (1,), (tk.gl(y),), [y[:0]], [y[:0]]


def multicast_inputs(rng: Any) -> Any:
    x, y = integers(rng, 32, 32), empty(64, 32)
    return (1,), (tk.gl(x, TILE), tk.gl(y), TILE), [y], [torch.cat([x, x])]


CLUSTER = dict(options=dict(cluster_size=2))
fault("cluster_barrier_forgotten", "barrier-life", neighbours, neighbours_inputs, **CLUSTER)
fault("multicast_mask", "deadlock", shared_loads, multicast_inputs, **CLUSTER)
fault("multicast_too_early", "barrier-life", shared_loads, multicast_inputs, **CLUSTER)
fault("wrong_rank", "deadlock", neighbours, neighbours_inputs, **CLUSTER)
fault("left_early", "barrier-life", last_words, neighbours_inputs, **CLUSTER)
