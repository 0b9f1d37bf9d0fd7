"""Modelled time of operations, in cycles of one multiprocessor. It serves timelines; it is a model, not a
measurement.

ThunderKittens (arXiv:2410.20399, section 2) models a kernel's cost as the maximum over memory levels and units, plus
setup and synchronisation. In the simulation, the maximum follows from the schedule: each level and unit has a rate
and works concurrently with the others, and roles wait for results. Latencies and synchronisation add to that.
An operation takes time of its role, and time of a unit that all roles of the CTA share (`Unit`). So two consumers
share the special-function units and the tensor cores.

The numbers are for an H100/H200 SXM (132 multiprocessors) at 1.7 GHz, the clock of this project's benchmarks;
Blackwell's tensor cores are a B200's. Rates follow from data sheets and the CUDA C++ Programming Guide. Latencies are
rounded from published microbenchmarks of uncontended accesses. docs/notes/launch.md compares the model with an H200,
whose clock drops under load.

The model omits: the start of clusters (each has its own multiprocessors); other CTAs' use of L2 and HBM beyond their
even share; wgmma's reads of shared memory; instruction caches, register banks, warp skew, and fused multiply-add. A
load from global memory blocks its role until the data arrives; hardware blocks at the first use.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tritonkittens.arch import chip_of

from .layouts import bases, registers
from .shared_access import access_cost, tensor_and_memory
from .ttgir import MemDesc, Op, Tensor, Type

CLOCK_GHZ = 1.7  # under load; converts cycles to the microseconds of a trace

# latencies, cycles: after Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture"
# (arXiv:2402.13499) and its successor (arXiv:2501.12084)
GLOBAL_LATENCY = 480.0  # a load that misses L2 (L2 hit: about 260)
TMA_LATENCY = 650.0  # about 170 over an ordinary load: issue, descriptor, boxes, complete_tx
SHARED_LATENCY = 29.0
WGMMA_LATENCY = 32.0  # from the last multiply to the accumulator in registers: m64n8k16 takes this long, m64n256k16 128
TCGEN05_LATENCY = 60.0  # the pipeline is deeper than wgmma's and a commit signals an mbarrier
TENSOR_MEMORY_LATENCY = 30.0
SHUFFLE_LATENCY = 23.0  # one round of shfl and the operation after it
BARRIER = 20.0  # bar.sync, a fence, or one try_wait that succeeds
# bytes a cycle, of one multiprocessor
# `Chip.l2_bytes`: for TMA. Its tiles are taken to be in L2, as all but the first load of each tile is in a GEMM or
# attention whose blocks share them
# 4.8 TB/s (H200 data sheet) shared by 132 at 1.7 GHz: loads and stores of threads, which mostly stream
HBM_BYTES = 21.4
SHARED_BYTES = 128.0  # 32 banks of 4 bytes
TENSOR_MEMORY_BYTES = 512.0  # tcgen05.ld: 128 lanes of 4 bytes
# multiply-adds of 16-bit numbers a cycle, of one multiprocessor
# 989.4 TFLOP/s dense / 2 / 132 / 1.83 GHz (H100 SXM data sheet and boost clock): m64n256k16 in 128 cycles
WGMMA_RATE = 2048.0
TCGEN05_RATE = 4096.0  # 2.25 PFLOP/s dense / 2 / 148 / 1.85 GHz (B200)
MMA_SYNC_RATE = 1024.0  # an A100's mma.sync; on Hopper it reaches 62% of wgmma's (arXiv:2402.13499), 1270
# results a cycle, of one multiprocessor (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions",
# compute capability 9.0)
FMA_RESULTS = 128.0  # 32-bit float add, multiply, fused multiply-add
ALU_RESULTS = 64.0  # integers, comparisons, minimum and maximum, selects, conversions; 64-bit floats
SPECIAL_RESULTS = 16.0  # exp2, log2, reciprocal, (reciprocal) square root, sine, cosine
SHUFFLE_RESULTS = 32.0
SCHEDULERS = 4  # schedulers of a multiprocessor, each with a quarter of its units; w < 4 warps use only w quarters
ISSUE = 2.0  # an instruction of one warp after another of the same warp
TMA_ISSUE = 12.0  # elect one thread, coordinates, the instruction
WGMMA_ISSUE = 4.0  # one m64nNk16: descriptors and the instruction

_FREE = {
    "arith.constant",
    "tt.splat",
    "tt.expand_dims",
    "tt.broadcast",
    "tt.reshape",
    "tt.trans",
    "tt.make_range",
    "cf.br",
    "cf.cond_br",
    "tt.return",
    "tt.call",
    "ub.poison",
    "ttg.warp_yield",
    "ttg.warp_return",
    "tt.bitcast",
    "arith.bitcast",
    "tt.unsplat",
    "tt.join",
    "tt.split",
    "tt.cat",
    "tt.assume",
    "llvm.intr.assume",
    "ttg.local_dealloc",
}
_SPECIAL_OPERATIONS = {
    "math.exp2": 1,
    "math.exp": 1,
    "math.log2": 1,
    "math.log": 1,
    "math.sin": 1,
    "math.cos": 1,
    "math.sqrt": 1,
    "math.rsqrt": 1,
    "arith.divf": 1,
    "tt.precise_sqrt": 2,
    "tt.precise_divf": 2,
    "math.tanh": 2,
    "math.erf": 1,
}
_SHARED_OPERATIONS = {"ttg.local_load", "ttg.local_store", "ttg.local_gather", "ttg.local_scatter"}
_GLOBAL_OPERATIONS = {"tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_gather"}
_BARRIER_MESSAGES = {  # messages to shared memory without a reply
    "ttng.init_barrier",
    "ttng.inval_barrier",
    "ttng.barrier_expect",
    "ttng.arrive_barrier",
    "ttng.async_copy_mbarrier_arrive",
}
_FREE_WAITS = {"ttng.warp_group_dot_wait", "ttg.async_wait", "ttng.async_tma_store_wait"}
_FMA_OPERATIONS = {"arith.addf", "arith.subf", "arith.mulf", "math.fma", "arith.negf", "math.absf"}
_SPECIAL_MNEMONICS = re.compile(r"\b(ex2|lg2|rcp|sqrt|rsqrt|tanh|sin|cos|div)\.")
_INSTRUCTION = re.compile(r"^\s*(?:[\w$]+:\s*)?(?:@!?[\w$%{}]+\s+)?([a-z][a-z0-9]*(?:[.:]+[a-z0-9]+)+)", re.M)
_SKIPPED = re.compile(r"vote\.sync\.any\.pred (\w+), \1, 0xffffffff; @!\1 bra")  # what follows runs in few warps


@dataclass(frozen=True)
class Cost:
    """The cost of an operation: `cycles` of its role's time if it runs alone, and `load` cycles of the shared `unit`.
    `kind` is for pictures.
    """

    cycles: float
    kind: str = "arithmetic"
    unit: str = ""
    load: float = 0.0


FREE = Cost(0.0)


class Duration(NamedTuple):
    """Cycles of an asynchronous operation: those that it occupies its unit, and those after them until it completes."""

    cycles: float = 0.0
    latency: float = 0.0


AT_ONCE, CLC_DURATION = Duration(), Duration(0.0, 700.0)


class Unit:
    """A unit that roles share, first come first served. It keeps its busy intervals. Work fills free time in pieces,
    as warps interleave.
    """

    __slots__ = ("starts", "ends")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def take(self, at: float, load: float) -> float:
        """Reserve the unit for `load` cycles from `at` on. Return the time when the work ends."""
        starts, ends = self.starts, self.ends
        first = bisect_left(ends, at)
        index, time, left = first, at, load
        begin = at
        while index < len(starts):
            gap = starts[index] - time
            if gap >= left:
                break
            if gap > 0:
                left -= gap
            time = max(time, ends[index])
            index += 1
        finish = time + left
        if first < index:
            begin = min(begin, starts[first])
        ends_at = finish
        if index < len(starts) and starts[index] <= finish:
            ends_at = ends[index]
            index += 1
        starts[first:index] = [begin]
        ends[first:index] = [ends_at]
        return finish


def tma_duration(nbytes: int, arch: int) -> Duration:
    """Cycles of a TMA copy on a chip, by its compute capability."""
    return Duration(nbytes / chip_of(arch).l2_bytes, TMA_LATENCY)


def global_cycles(nbytes: int) -> float:
    return nbytes / HBM_BYTES


def wgmma_cycles(m: int, n: int, k: int, bits: int) -> float:
    """Cycles of a wgmma: twice the rate with 8 bits, half with tf32."""
    return m * n * k / (WGMMA_RATE * 16 / max(bits, 8))


def tcgen05_cycles(m: int, n: int, k: int, bits: int) -> float:
    """Cycles of a tcgen05.mma: twice the rate with 8 bits, four times with 4. 64 rows take as long as 128 (PTX ISA,
    "tcgen05.mma": layout of 64 rows in 128 lanes)."""
    return max(m, 128) * n * k / (TCGEN05_RATE * 16 / max(bits, 4))


def elements(kind: Any) -> int:
    return prod(kind.shape) if isinstance(kind, (Tensor, MemDesc)) else 1


def _largest(types: tuple[Type, ...]) -> Tensor | None:
    return max((t for t in types if isinstance(t, Tensor)), key=elements, default=None)


def _work(results: float, rate: float, warps: int, kind: str, unit: str, latency: float = 0.0) -> Cost:
    """Cost of `results` results of a unit by a role of `warps` warps."""
    load = results / rate
    return Cost(latency + max(ISSUE, load * SCHEDULERS / min(max(warps, 1), SCHEDULERS)), kind, unit, load)


def operation_cost(op: Op, warps: int) -> Cost:
    """Return an operation's cost in its role's time and in a unit's. Asynchronous work (TMA, wgmma, tcgen05,
    cp.async) is timed where it starts.
    """
    name = op.name
    if name in _FREE or name.startswith("ttg.memdesc_") or name.endswith("_id") or name == "ttng.tmem_subslice":
        return FREE
    return _memory(op, warps) or _issue(op, warps) or _synchronisation(op) or _arithmetic(op, warps)


def _tile(op: Op) -> Tensor | None:
    """Return the largest tensor among an operation's results and operands."""
    return _largest((*op.result_types, *op.operand_types))


def _memory(op: Op, warps: int) -> Cost | None:
    """Cost of an access of memory by a role's threads."""
    name = op.name
    if name in _SHARED_OPERATIONS or name == "ttg.local_alloc" and op.operands:
        return _shared(op, warps)
    if name in _GLOBAL_OPERATIONS:
        values = _largest((*op.result_types, *op.operand_types[1:]))
        cycles = global_cycles(elements(values) * (values.element.nbytes if values is not None else 4))
        latency = 0.0 if name == "tt.store" else GLOBAL_LATENCY
        return Cost(latency + cycles, "global memory", "HBM", cycles)
    tensor = _tile(op)
    if name in ("ttng.tmem_load", "ttng.tmem_store") or name == "ttng.tmem_alloc" and tensor is not None:
        cycles = elements(tensor) * 4 / TENSOR_MEMORY_BYTES
        return Cost(TENSOR_MEMORY_LATENCY + cycles, "tensor memory", "tensor memory", cycles)
    return None


def _issue(op: Op, warps: int) -> Cost | None:
    """Cost of starting asynchronous work."""
    name = op.name
    if name == "ttng.warp_group_dot":
        m, n = op.result_types[0].shape[-2:]  # type: ignore[union-attr]
        a = op.operand_types[0]
        products = -(-m // 64) * -(-n // 256) * -(-a.shape[-1] * a.element.bits // 256)  # type: ignore[union-attr]
        return Cost(WGMMA_ISSUE * products * 4 / max(warps, 4), "issue")
    if name.startswith(("ttng.async_tma", "ttng.tc_gen5", "ttng.tmem_copy")) and "wait" not in name:
        return Cost(TMA_ISSUE, "issue")
    if name == "ttg.async_copy_global_to_local":
        tensor = _tile(op)
        assert tensor is not None
        width = op.operand_types[1].element.nbytes  # type: ignore[union-attr]
        return _work(elements(tensor) / max(1, 16 // width), SHUFFLE_RESULTS, warps, "issue", "shared memory")
    return None


def _synchronisation(op: Op) -> Cost | None:
    """Cost of barriers, fences and waits, besides the time spent in a wait."""
    name = op.name
    if name in _BARRIER_MESSAGES:
        return Cost(2 * ISSUE, "synchronisation")
    if name in _FREE_WAITS:
        return Cost(0.0, "synchronisation")
    if name == "ttg.warp_specialize" or any(word in name for word in ("barrier", "fence", "wait", "cluster")):
        return Cost(BARRIER, "synchronisation")
    return None


def _arithmetic(op: Op, warps: int) -> Cost:
    """Cost of arithmetic, layout conversions and inline PTX."""
    name, tensor = op.name, _tile(op)
    size = elements(tensor)
    if name in ("tt.elementwise_inline_asm", "ttg.inline_asm"):
        return _assembly(op, warps, size)
    if name == "tt.dot":
        a = op.operand_types[0]
        cycles = elements(op.result_types[0]) * a.shape[-1] / (MMA_SYNC_RATE * 16 / max(a.element.bits, 8))  # type: ignore[union-attr]
        return Cost(WGMMA_LATENCY + cycles * SCHEDULERS / min(warps, SCHEDULERS), "product", "tensor core", cycles)
    if tensor is None:
        return Cost(ISSUE, "arithmetic")
    if name in ("tt.reduce", "tt.scan"):
        return _reduction(op, warps)
    if name == "ttg.convert_layout":
        return _conversion(op, warps)
    if name in _SPECIAL_OPERATIONS:
        return _work(size * _SPECIAL_OPERATIONS[name], SPECIAL_RESULTS, warps, "special functions", "special functions")
    return _work(size, FMA_RESULTS if name in _FMA_OPERATIONS else ALU_RESULTS, warps, "arithmetic", "arithmetic")


def _shared(op: Op, warps: int) -> Cost:
    """Cost of a shared-memory access: one cycle per wavefront, bank conflicts included."""
    found = tensor_and_memory(op)
    assert found is not None, op.name
    cost = access_cost(op, warps)
    # indices known only at run time count as free of conflicts
    wavefronts = cost.wavefronts if cost is not None else elements(found[0]) * 4 / SHARED_BYTES
    return Cost(SHARED_LATENCY + wavefronts, "shared memory", "shared memory", wavefronts)


def _assembly(op: Op, warps: int, size: int) -> Cost:
    """Cost of inline PTX: each instruction once for its elements, or once for the warp without tensors. Moves only name
    registers. What a warp skips by a vote counts as skipped.
    """
    text = _SKIPPED.split(str(op.attributes.get("asm_string", "")))[0]
    instructions = [i for i in _INSTRUCTION.findall(re.sub(r"[;{}]", "\n", text)) if not i.startswith("mov.")]
    if "mbarrier" in text or "barrier" in text or "fence" in text:
        return Cost(
            ISSUE * len(instructions) + (BARRIER if "wait" in text or "bar." in text or "fence" in text else 0.0),
            "synchronisation",
        )
    if op.name == "ttg.inline_asm" or _largest((*op.result_types, *op.operand_types)) is None:
        return Cost(ISSUE * len(instructions), "issue" if "cp." in text or "tcgen05" in text else "arithmetic")
    packed = max(1, int(op.attributes.get("packed_element", 1)))
    special = sum(1 for i in instructions if _SPECIAL_MNEMONICS.match(i))
    others = len(instructions) - special
    arithmetic = _work(size / packed * others, FMA_RESULTS, warps, "arithmetic", "arithmetic")
    if not special:
        return arithmetic
    return max(
        arithmetic,
        _work(size / packed * special, SPECIAL_RESULTS, warps, "special functions", "special functions"),
        key=lambda c: c.load,
    )


def _reduction(op: Op, warps: int) -> Cost:
    """Cost of a reduction: arithmetic within threads, one round of shuffles for each lane bit along the axis, and
    shared memory where warps divide the axis.
    """
    kind = next(t for t in op.operand_types if isinstance(t, Tensor))
    combines = [
        inner.name
        for region in op.regions
        for block in region.blocks
        for inner in block.operations
        if not inner.name.endswith(".return")
    ]
    rate = FMA_RESULTS if combines and all(c in _FMA_OPERATIONS for c in combines) else ALU_RESULTS
    size = elements(kind) * max(1, len(combines))
    if kind.layout is None:
        return _work(size, rate, warps, "arithmetic", "arithmetic")
    axis = op.attributes["axis"]
    found = bases(kind.layout, "tensor", kind.shape)
    lane = sum(1 for b in found.inputs["lane"] if b[axis])
    across = sum(1 for b in found.inputs["warp"] if b[axis])
    latency = lane * SHUFFLE_LATENCY + (2 * SHARED_LATENCY + 2 * BARRIER if across else 0.0)
    return _work(size, rate, warps, "arithmetic", "arithmetic", latency)


def _conversion(op: Op, warps: int) -> Cost:
    """Cost of a layout conversion: none where every thread keeps its elements, shuffles where every warp does, else
    shared memory.
    """
    before, after = op.operand_types[0], op.result_types[0]
    assert isinstance(before, Tensor) and isinstance(after, Tensor)
    if before.layout is None or after.layout is None:
        return FREE
    size = elements(after)
    reach = _reach(before.layout, after.layout, after.shape, warps)
    if reach == "thread":
        return FREE
    if reach == "warp":
        return _work(size, SHUFFLE_RESULTS, warps, "arithmetic", "arithmetic", SHUFFLE_LATENCY)
    wavefronts = 2 * size * after.element.nbytes / SHARED_BYTES
    return Cost(2 * SHARED_LATENCY + BARRIER + wavefronts, "shared memory", "shared memory", wavefronts)


@functools.cache
def _reach(before: str, after: str, shape: tuple[int, ...], warps: int) -> str:
    """Return the distance of a thread's elements: its own registers, its warp's, or other warps'."""
    source, target = registers(before, shape, warps)[: 32 * warps], registers(after, shape, warps)[: 32 * warps]
    for reach, threads in (("thread", 1), ("warp", 32)):
        # encodes (group of threads, element) as one number
        group: Any = np.arange(32 * warps)[:, None] // threads * prod(shape)
        if np.isin(target + group, source + group).all():
            return reach
    return "block"
