"""Kernels with one real mistake each, and the same kernels without it.

Every kernel takes `BUG`, a compile-time name of the mistake, "" for none. A comment `# reports: name` stands on the line that the report of that mistake has to
name. `FAULTS` lists what is run: the right kind of report, a schedule that finds it, inputs and the expected result of the correct twin.
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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import tritonkittens.lang as tk
from tests.util import poison


@dataclass(frozen=True)
class Fault:
    """One mistake. `kind` is what has to be reported, `also` what may be reported beside it. `seed`: a schedule that finds it.

    `inputs(rng)` gives the grid, the arguments, the outputs (already among the arguments) and what the correct twin leaves in them.
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
    places: bool = True  # does a line with `# reports: name` exist?
    tolerance: float = 0.0

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
def ring_producer(X, tiles, arrived, finished, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    ring = tk.pipeline(STAGES)
    for i in range(iterations):
        if BUG == "producer_parity":
            tk.wait(finished[ring.index], ring.phase)  # reports: producer_parity
        elif BUG == "producer_phase_not_flipped":
            tk.wait(finished[ring.index], 1)
        elif BUG == "producer_does_not_wait":
            pass
        else:
            tk.producer_acquire(ring, finished)  # reports: missing_arrive, wrong_stage_release, count_too_high
        if BUG == "too_few_bytes":
            tk.expect(arrived[ring.index], 1024)  # reports: too_few_bytes
        elif BUG == "too_many_bytes":
            tk.expect(arrived[ring.index], 4096)
        elif BUG == "expect_on_other_stage":
            tk.expect(arrived[(ring.index + 1) % STAGES], tiles[0])
        elif BUG == "expect_forgotten":
            pass
        else:
            tk.producer_commit(ring, arrived, tiles[0])
        if BUG == "wrong_stage_load":
            tk.load_async(tiles[(ring.index + 1) % STAGES], X, (i, 0), arrived[ring.index])  # reports: wrong_stage_load
        else:
            # reports of the copy that overruns a slot
            tk.load_async(tiles[ring.index], X, (i, 0), arrived[ring.index])  # reports: doubled_arrive, producer_phase_not_flipped, producer_does_not_wait, consumer_parity, consumer_phase_not_flipped, wrong_stage_wait, expect_forgotten, lost_last_iteration, count_too_low, lapped_consumer, wait_after_use, no_wait, unfenced_release
        ring = tk.advance(ring)


@triton.jit
def ring_consumer(Y, tiles, arrived, finished, iterations, CONSUMER: tl.constexpr, STAGES: tl.constexpr, BUG: tl.constexpr):
    ring = tk.pipeline(STAGES)
    acc = tk.zero(tk.rt(tk.fp32, 16, 32))
    rounds = iterations
    if BUG == "lost_last_iteration":
        rounds = iterations - 1
    if BUG == "extra_iteration":
        rounds = iterations + 1
    for i in range(rounds):
        if BUG == "consumer_parity":
            tk.wait(arrived[ring.index], ring.phase ^ 1)
        elif BUG == "consumer_phase_not_flipped":
            tk.wait(arrived[ring.index], 0)
        elif BUG == "wrong_stage_wait":
            tk.wait(arrived[(ring.index + 1) % STAGES], ring.phase)
        elif BUG == "wait_after_use" or BUG == "no_wait":
            pass
        else:
            tk.consumer_wait(ring, arrived)  # reports: too_many_bytes, expect_on_other_stage, extra_iteration
        acc += tk.load(tiles[ring.index], like=acc)  # reports: consumer_reads
        if BUG == "wait_after_use":
            tk.consumer_wait(ring, arrived)
        if BUG == "unfenced_release":
            mbarrier.arrive(finished[ring.index].piece, count=1)
        elif BUG == "missing_arrive":
            pass
        elif BUG == "wrong_stage_release":
            tk.arrive(finished[(ring.index + 1) % STAGES])
        elif BUG == "arrive_count":
            tk.arrive(finished[ring.index], count=2)  # reports: arrive_count
        elif BUG == "lapped_consumer" and CONSUMER == 1:
            pass
        else:
            tk.consumer_release(ring, finished)
        if BUG == "doubled_arrive":
            tk.consumer_release(ring, finished)
        ring = tk.advance(ring)
    tk.store(Y, acc + CONSUMER, (CONSUMER, 0))


@tk.kernel
@triton.jit
def ring_sum(X, Y, iterations, CONSUMERS: tl.constexpr, STAGES: tl.constexpr, BUG: tl.constexpr):
    """Y[c] = c + the sum of the tiles of X, for every consumer c."""
    tiles = tk.allocate(tk.st(tk.fp32, 16, 32), STAGES)
    arrived = tk.semaphores(STAGES)
    MORE: tl.constexpr = 1 if BUG == "count_too_high" else -1 if BUG == "count_too_low" else -1 if BUG == "lapped_consumer" else 0
    finished = tk.semaphores(STAGES, arrivals=CONSUMERS + MORE)
    if CONSUMERS == 1:
        tk.specialize(
            (
                (ring_consumer, (Y, tiles, arrived, finished, iterations, 0, STAGES, BUG)),
                (ring_producer, (X, tiles, arrived, finished, iterations, STAGES, BUG)),
            ),
            warps=(4, 1),
        )
    else:
        tk.specialize(
            (
                (ring_consumer, (Y, tiles, arrived, finished, iterations, 0, STAGES, BUG)),
                (ring_consumer, (Y, tiles, arrived, finished, iterations, 1, STAGES, BUG)),
                (ring_producer, (X, tiles, arrived, finished, iterations, STAGES, BUG)),
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
fault("doubled_arrive", "race", ring_sum, ring_inputs(1, 3, 9))
fault("arrive_count", "arrivals", ring_sum, ring_inputs(1, 2, 3))
fault("producer_parity", "deadlock", ring_sum, ring_inputs(1, 4, 4))
fault("consumer_parity", "race", ring_sum, ring_inputs(1, 3, 4))
fault("producer_phase_not_flipped", "race", ring_sum, ring_inputs(1, 2, 7))
fault("consumer_phase_not_flipped", "race", ring_sum, ring_inputs(1, 2, 8))
fault("producer_does_not_wait", "race", ring_sum, ring_inputs(2, 2, 6))
fault("wrong_stage_load", "race", ring_sum, ring_inputs(1, 3, 5))
fault("wrong_stage_wait", "race", ring_sum, ring_inputs(1, 3, 6))
fault("wrong_stage_release", "deadlock", ring_sum, ring_inputs(1, 3, 7), seed=1)
fault("too_few_bytes", "bytes", ring_sum, ring_inputs(1, 4, 6))
fault("too_many_bytes", "deadlock", ring_sum, ring_inputs(2, 2, 4))
fault("expect_on_other_stage", "deadlock", ring_sum, ring_inputs(1, 4, 5))
fault("expect_forgotten", "deadlock", ring_sum, ring_inputs(2, 3, 5))
fault("count_too_high", "deadlock", ring_sum, ring_inputs(2, 2, 5))
fault("count_too_low", "race", ring_sum, ring_inputs(2, 2, 7))
fault("lapped_consumer", "phase-wrap", ring_sum, ring_inputs(2, 1, 12))
fault("wait_after_use", "race", ring_sum, ring_inputs(2, 3, 4))
fault("no_wait", "race", ring_sum, ring_inputs(1, 2, 2))
fault("unfenced_release", "missing-fence", ring_sum, ring_inputs(2, 3, 7))
fault("lost_last_iteration", "unfinished", ring_sum, ring_inputs(1, 5, 6))
fault("extra_iteration", "deadlock", ring_sum, ring_inputs(1, 5, 4))


# ---------------------------------------------------------------- products of a warpgroup (wgmma)

BF16 = torch.bfloat16
WIDE, NARROW = tk.st(tk.bf16, 64, 64), tk.st(tk.bf16, 64, 32)


@triton.jit
def gemm_producer(A, B, a, b, arrived, second, finished, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    ring = tk.pipeline(STAGES)
    for i in range(iterations):
        tk.producer_acquire(ring, finished)
        if BUG == "bytes_on_other_barrier":
            tk.expect(arrived[ring.index], b[0])  # reports: bytes_on_other_barrier
            tk.expect(second[ring.index], a[0])
        else:
            tk.expect(arrived[ring.index], a[0])
            tk.expect(second[ring.index], b[0])
        # reports of a copy into a slot that is in use
        tk.load_async(a[ring.index], A, (0, i), arrived[ring.index])  # reports: early_release, retired_too_late, bytes_on_other_barrier
        tk.load_async(b[ring.index], B, (i, 0), second[ring.index])  # reports: early_release, swapped_operand_stage, second_barrier_forgotten, bytes_on_other_barrier
        ring = tk.advance(ring)


@triton.jit
def gemm_consumer(C, a, b, arrived, second, finished, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    ring = tk.pipeline(STAGES)
    acc = tk.zero(tk.rt(tk.fp32, 64, 32))
    for i in range(iterations):
        tk.consumer_wait(ring, arrived)
        if BUG != "second_barrier_forgotten":
            tk.consumer_wait(ring, second)  # reports: bytes_on_other_barrier
        if BUG == "swapped_operand_stage":
            acc = tk.mma_AB(a[ring.index], b[(ring.index + 1) % STAGES], acc)  # reports: swapped_operand_stage
        elif BUG == "early_release":
            product = tk.mma_AB(a[ring.index], b[ring.index], acc, wait=False)  # reports: early_release
            tk.consumer_release(ring, finished)
            acc = tk.mma_wait(product)
        else:
            acc = tk.mma_AB(a[ring.index], b[ring.index], acc)
        if BUG != "early_release":
            tk.consumer_release(ring, finished)
        ring = tk.advance(ring)
    tk.store(C, acc, (0, 0))


@tk.kernel
@triton.jit
def ring_gemm(A, B, C, iterations, STAGES: tl.constexpr, BUG: tl.constexpr):
    """C = A·B over a ring; each operand has a barrier of its own."""
    a, b = tk.allocate(tk.st(tk.bf16, 64, 64), STAGES), tk.allocate(tk.st(tk.bf16, 64, 32), STAGES)
    arrived, second, finished = tk.semaphores(STAGES), tk.semaphores(STAGES), tk.semaphores(STAGES)
    tk.specialize(
        (
            (gemm_consumer, (C, a, b, arrived, second, finished, iterations, STAGES, BUG)),
            (gemm_producer, (A, B, a, b, arrived, second, finished, iterations, STAGES, BUG)),
        ),
        warps=(4, 1),
    )


def gemm_inputs(stages: int, iterations: int) -> Any:
    def make(rng: Any) -> Any:
        a, b, c = integers(rng, 64, 64 * iterations, dtype=BF16), integers(rng, 64 * iterations, 32, dtype=BF16), empty(64, 32)
        return (1,), (tk.gl(a, WIDE), tk.gl(b, NARROW), tk.gl(c), iterations, stages), [c], [a.float() @ b.float()]

    return make


fault("early_release", "race", ring_gemm, gemm_inputs(2, 4))
fault("swapped_operand_stage", "race", ring_gemm, gemm_inputs(2, 5))
fault("second_barrier_forgotten", "race", ring_gemm, gemm_inputs(3, 4))
fault("bytes_on_other_barrier", "bytes", ring_gemm, gemm_inputs(3, 5))


@tk.kernel
@triton.jit
def products(A, B, C, iterations, BUG: tl.constexpr):
    """C = A·B, the newest product always under way; tiles come through registers or cp.async, and A may be in registers."""
    ring_a, ring_b = tk.allocate(tk.st(tk.bf16, 64, 64), stages=3), tk.allocate(tk.st(tk.bf16, 64, 32), stages=3)
    acc = tk.mma_begin(tk.zero(tk.rt(tk.fp32, 64, 32)))
    for i in range(iterations):
        a, b = ring_a[i % 2], ring_b[i % 2]
        tk.load_into(a, A, (0, i))  # reports: retired_too_few, store_product_unfenced
        tk.load_into(b, B, (i, 0))  # reports: retired_too_few, store_product_unfenced
        if BUG != "store_product_unfenced":
            tk.fence_async()
        tk.sync()
        acc = tk.mma_AB(a, b, acc, wait=False)  # reports: retired_too_few, store_product_unfenced
        if BUG != "retired_too_few":
            acc = tk.mma_retire(acc)
        tk.sync()
    tk.store(C, tk.mma_wait(acc), (0, 0))


def product_inputs(iterations: int) -> Any:
    def make(rng: Any) -> Any:
        a, b, c = integers(rng, 64, 64 * iterations, dtype=BF16), integers(rng, 64 * iterations, 32, dtype=BF16), empty(64, 32)
        return (1,), (tk.gl(a, WIDE), tk.gl(b, NARROW), tk.gl(c), iterations), [c], [a.float() @ b.float()]

    return make


fault("store_product_unfenced", "missing-fence", products, product_inputs(3))
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
    first = hopper.warpgroup_mma(left, b.pieces[0], zero, use_acc=False, is_async=True)  # reports: register_not_kept, accumulator_read, operand_overwritten
    if BUG == "accumulator_read":
        total = hopper.warpgroup_mma_wait(1, deps=[first, left])[0]  # reports: accumulator_read
    elif BUG == "register_not_kept":
        total = hopper.warpgroup_mma_wait(0, deps=[first])  # reports: register_not_kept
    elif BUG == "operand_overwritten":
        tk.store(b, tk.zero(tk.rt(tk.bf16, 64, 32)))  # reports: operand_overwritten
        total = hopper.warpgroup_mma_wait(0, deps=[first, left])[0]
    else:
        total = hopper.warpgroup_mma_wait(0, deps=[first, left])[0]
    tk.store(C, total * 2, (0, 0))  # reports: accumulator_read


def one_product(rng: Any) -> Any:
    a, b, c = integers(rng, 64, 64, dtype=BF16), integers(rng, 64, 32, dtype=BF16), empty(64, 32)
    return (1,), (tk.gl(a), tk.gl(b), tk.gl(c)), [c], [2 * (a.float() @ b.float())]


fault("accumulator_read", "in-flight", raw_products, one_product)
fault("register_not_kept", "in-flight", raw_products, one_product)
fault("operand_overwritten", "race", raw_products, one_product)


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
        tk.load_into(a, A, (0, i))  # reports: operand_before_commit, tensor_unfenced
        tk.load_into(b, B, (i, 0))  # reports: operand_before_commit, tensor_unfenced
        if BUG != "tensor_unfenced":
            tk.fence_async()
        tk.sync()
        if BUG == "zero_iterations":
            tcgen05_mma(a.pieces[0], b.pieces[0], acc.pieces[0], use_acc=i > 0, mbarriers=[done[0].piece])
        else:
            # reports of the product
            tk.mma_AB(a, b, acc, arrived=done[0])  # reports: operand_before_commit, tensor_read_early, tensor_unfenced, tensor_uninitialised
        if BUG == "operand_before_commit" or BUG == "tensor_read_early":
            if i > 0:
                tk.wait(done[0], (i - 1) & 1)
        else:
            tk.wait(done[0], i & 1)
    if BUG == "zero_iterations_wait":
        tk.wait(done[0], (iterations - 1) & 1)  # reports: zero_iterations_wait
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
fault("zero_iterations_wait", "deadlock", tensor_product, tensor_inputs(2), **BLACKWELL)
fault("tensor_unfenced", "missing-fence", tensor_product, tensor_inputs(3), **BLACKWELL)
fault("operand_before_commit", "race", tensor_product, tensor_inputs(4), **BLACKWELL)
fault("tensor_read_early", "race", tensor_product, tensor_inputs(1), **BLACKWELL)


@triton.jit
def tensor_issuer(a, b, acc, done, free, ROUNDS: tl.constexpr, BUG: tl.constexpr):
    for i in tl.static_range(ROUNDS):
        if i >= 2 and BUG != "accumulator_reused":
            tk.wait(free[i % 2], (i // 2 - 1) % 2)
        if BUG == "tensor_overlap":
            into = tk.subtile(acc, 128, 64, 0, 0) if i % 2 == 0 else acc.pieces[0].slice(32, 64)
        else:
            into = tk.subtile(acc, 128, 64, 0, i % 2).pieces[0]
        if BUG == "tensor_overlap" and i % 2 == 0:
            tcgen05_mma(a.pieces[0], b[i].pieces[0], into.pieces[0], use_acc=False, mbarriers=[done[i % 2].piece])  # reports: tensor_overlap
        else:
            tcgen05_mma(a.pieces[0], b[i].pieces[0], into, use_acc=False, mbarriers=[done[i % 2].piece])  # reports: tensor_overlap, accumulator_reused


@triton.jit
def tensor_epilogue(C, acc, done, free, ROUNDS: tl.constexpr, BUG: tl.constexpr):
    for i in tl.static_range(ROUNDS):
        tk.wait(done[i % 2], i // 2 % 2)
        tk.store(C, tk.load(tk.subtile(acc, 128, 64, 0, i % 2)), (i, 0))  # reports: tensor_overlap, accumulator_reused
        tk.arrive(free[i % 2])


@tk.kernel
@triton.jit
def two_accumulators(A, B, C, ROUNDS: tl.constexpr, BUG: tl.constexpr):
    """C[i] = A·B[i]: one role issues products into two accumulators by turns, another stores them."""
    a, b = tk.allocate(tk.st(tk.bf16, 128, 32)), tk.allocate(tk.st(tk.bf16, 32, 64), ROUNDS)
    done, free = tk.semaphores(2), tk.semaphores(2)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 128))
    tk.load_into(a, A, (0, 0))
    for i in tl.static_range(ROUNDS):
        tk.load_into(b[i], B, (i, 0))
    tk.fence_async()
    tk.sync()
    tk.specialize(((tensor_epilogue, (C, acc, done, free, ROUNDS, BUG)), (tensor_issuer, (a, b, acc, done, free, ROUNDS, BUG))), warps=(4, 1))


def accumulator_inputs(rounds: int) -> Any:
    def make(rng: Any) -> Any:
        a, b, c = integers(rng, 128, 32, dtype=BF16), integers(rng, 32 * rounds, 64, dtype=BF16), empty(128 * rounds, 64)
        expected = torch.cat([a.float() @ p.float() for p in b.split(32)])
        return (1,), (tk.gl(a), tk.gl(b), tk.gl(c), rounds), [c], [expected]

    return make


fault("tensor_overlap", "race", two_accumulators, accumulator_inputs(2), **BLACKWELL)
fault("accumulator_reused", "race", two_accumulators, accumulator_inputs(4), **BLACKWELL)
