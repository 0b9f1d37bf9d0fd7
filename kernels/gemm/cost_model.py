"""The cost model of a GEMM: the time of a configuration from what its busiest CTA does.

A CTA works through its iterations one after another. An iteration multiplies (`tensor`), receives its tiles in shared
memory (`shared`), reads with the other CTAs of its GPC what L2 delivers (`l2`), and waits for stages that are still in
flight (`latency`). All CTAs read and write HBM (`hbm`). These overlap, but not perfectly: their sum is a norm with the
exponent `overlap`. A launch, each task's start and end, and the sums of split tasks come on top.

`bench.gemm_fit` fits the constants to a sample of random GEMMs; docs/notes/gemm_model.md has its errors.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tritonkittens.lang as tk
from tritonkittens import tune
from tritonkittens.arch import TENSOR_COLUMNS
from tritonkittens.kernels._tensors import CACHE_LINE, addressable_pitch
from tritonkittens.kernels.gemm.candidates import is_one_wgmma, scale_bytes, stage_bytes, stages
from tritonkittens.kernels.gemm.config import NEIGHBOURS, Config, Problem, itemsize_of
from tritonkittens.lang.template.call import cluster_slots

# Cycles of an SM for each element of C
EPILOGUE_CYCLES = {"": 0.0, "vector": 0.06, "tile": 0.12, "silu": 0.25, "gelu_tanh": 0.3, "gelu": 0.4}
SECTOR = 32  # bytes
LONG_PRODUCT = 3e11  # FLOP from which the card's power limit sets the clock
INSTRUCTION_BYTES = 32  # of K that one wgmma takes


@dataclass(frozen=True)
class Constants:
    """What `bench.gemm_fit` fits. Rates are those of one SM."""

    launch: float = 3.766  # µs from the launch to the first product, and from the last product to the end
    task: float = 1.394  # µs of a task's start and end
    store_rate: float = 28.92  # bytes of results a cycle
    sub_tile: float = 0.03224  # µs of each sub-tile of results, but with pingpong
    exposed: float = 0.09947  # the share of a task's start and end that other tasks do not hide; 0 with pingpong
    mma_share: float = 0.721  # the cycles of a wgmma over its FLOP at the tensor cores' rate
    instruction: float = 4.482  # more cycles of each wgmma
    one_consumer: float = 46.43  # cycles of an iteration with one consumer
    two_consumers: float = 14.43  # with two that share a tile; 0 with pingpong
    three_consumers: float = 36.83  # with three
    multicast: float = 55.94  # cycles of a cache line of K for which the CTAs of a cluster wait for each other
    straddling: float = 1.586  # the time of a byte whose row starts inside a cache line, over that of others
    misaligned: float = 2.583  # and of one whose row starts inside a sector
    receive_rate: float = 108.2  # bytes a cycle that an SM receives
    l2_rate: float = 98.7  # bytes a cycle that L2 delivers for each SM, where what a GPC reads together counts once
    unshared: float = 3.001  # times the bytes where CTAs of a cluster share tasks, and read nothing in common
    stage_rate: float = 39.61  # bytes a cycle at which the copies of a stage arrive
    hbm_share: float = 0.8954  # of the data sheet's bandwidth
    overlap: float = 1.887  # the exponent of the norm
    power_limit: float = 0.1138  # the share that long products are slower at the card's power limit
    fix_up: float = 1.354  # µs of a task with parts
    fix_up_part: float = 0.1115  # µs for each part
    fix_up_rate: float = 59.34  # bytes a cycle of partial sums through memory
    cluster_sum: float = 0.1352  # µs of a task that a cluster shares
    cluster_sum_rate: float = 14.67  # bytes a cycle of partial sums through distributed shared memory


CONSTANTS = Constants()
# Not measured: an MMA warp issues the products of tensor memory without the consumers, at the tensor cores' rate
TENSOR_MEMORY = replace(
    CONSTANTS, mma_share=1.0, instruction=0.0, one_consumer=0.0, two_consumers=0.0, three_consumers=0.0, sub_tile=0.0
)


class Work(NamedTuple):
    """What the busiest CTA of a configuration does. Each field is a number, or an array with one for each of many
    configurations; the flags are 0 or 1."""

    iterations: Any
    crowd: Any  # CTAs that share its SM
    mma: Any  # cycles of the tensor cores in an iteration
    instructions: Any  # wgmmas of an iteration
    one_consumer: Any  # flag: so many consumers share a tile
    two_consumers: Any
    three_consumers: Any
    pingpong: Any  # flag
    received: Any  # bytes of an iteration, of operands whose rows start at cache lines
    straddling: Any  # of those whose rows start inside a cache line
    misaligned: Any  # of those whose rows start inside a sector
    delivered: Any  # the CTA's share of the bytes that its GPC reads in an iteration, each counted once
    bytes_per_stage: Any  # bytes of a stage over the number of stages
    cluster_split: Any  # flag: the CTAs of a cluster share a task
    multicasts: Any  # cache lines of K in an iteration where the CTAs of a cluster share B, else 0
    hbm: Any  # bytes of all CTAs
    tasks: Any
    results: Any  # bytes of a task
    sub_tiles: Any  # of the results of all tasks; 0 with pingpong
    hides: Any  # flag: another CTA's or consumer's products hide the end of a task
    split_tasks: Any  # tasks whose parts are summed up through memory
    parts: Any  # of such a task
    partial: Any  # bytes of the sums of a part
    sent: Any  # bytes of sums that the CTA sends to others of its cluster
    long: Any  # 0 to 1: the power limit sets the clock
    epilogue: Any  # cycles of the epilogue's arithmetic on all tasks
    epilogue_of_task: Any  # and on one
    scales: Any  # cycles of the arithmetic on block scales


def alignment(problem: Problem, elements: int) -> int:
    """Return where rows of so many elements begin: 0 for cache lines, 1 for sectors of one, 2 inside of sectors. Rows
    that TMA cannot address are copied."""
    pitch = addressable_pitch(elements * itemsize_of(problem.dtype))
    return 2 if pitch % SECTOR else 1 if pitch % CACHE_LINE else 0


def _received(problem: Problem, config: Config, rows: int) -> list[float]:
    """Return the bytes that a CTA receives for an element of K, by the alignment of the operand's rows."""
    extents = [rows, config.tile_n / config.cluster][:: -1 if config.swap_ab else 1]
    stored = (problem.k if problem.a == "mk" else problem.m, problem.k if problem.b == "nk" else problem.n)
    found = [scale_bytes(problem, rows + config.tile_n), 0.0, 0.0]  # each CTA loads its scales alone
    for extent, elements in zip(extents, stored, strict=True):
        found[alignment(problem, elements)] += extent * itemsize_of(problem.dtype)
    return found


class _Rounds(NamedTuple):
    """How the scheduler distributes tasks."""

    iterations: float  # of the busiest CTA
    tasks: float  # of the busiest CTA
    active: int  # CTAs that run at once
    parts: int  # of a split task
    split_tasks: int  # of the busiest CTA


def _rounds(problem: Problem, config: Config, multiprocessors: int, iterations: int) -> _Rounds:
    tasks, ctas = problem.batch * math.prod(config.tiles(problem)), config.cluster * config.sharers
    slots = max(1, cluster_slots(multiprocessors, ctas) * config.blocks_per_sm)
    rounds, parts, split, work_tiles = -(-tasks // slots), 1, 0, tasks
    done: float = rounds * iterations
    if config.sharers > 1:
        done = rounds * -(-iterations // config.sharers)
    elif config.schedule == "split_k":
        parts, work_tiles = config.splits, tasks * config.splits
        rounds = split = -(-work_tiles // slots)
        done = rounds * -(-iterations // parts)
    elif config.schedule == "split_tail":
        whole, parts = tk.SplitTail().split(tasks, slots)
        if tasks > whole:
            work_tiles, split = whole + (tasks - whole) * parts, int(parts > 1)
            done = whole // slots * iterations + -(-iterations // parts)
        else:
            parts = 1
    elif config.schedule == "stream_k":
        done, parts, split, rounds = tasks / slots * iterations, 1 + -(-slots // tasks), 1, rounds + 1
        work_tiles = max(tasks, slots)
    return _Rounds(done, rounds, min(work_tiles, slots) * ctas, parts, split)


def _pieces(problem: Problem, config: Config) -> list[int]:
    """Return the columns of each wgmma that 64 rows are multiplied with."""
    if is_one_wgmma(problem, config):
        return [config.tile_n]
    return [1 << bit for bit in range(config.tile_n.bit_length()) if config.tile_n >> bit & 1]


class _Iteration(NamedTuple):
    """What an iteration and a task of a configuration take, for any extents."""

    mma: float
    instructions: int
    bytes_per_stage: float  # bytes of a stage over the number of stages
    rows: int
    columns: int
    tile_k: int
    size: int
    out: int
    defers: bool
    sub_tiles: int  # of results; 0 where they leave whole, and with pingpong
    kinds: tuple[float, float, float, float]  # flags: one consumer, two, three, pingpong


@functools.lru_cache(maxsize=1 << 14)
def _iteration(kind: Problem, config: Config, device: tune.Device) -> _Iteration:
    size, tile_k = itemsize_of(kind.dtype), config.k_of(itemsize_of(kind.dtype))
    rows = config.tile_m * config.team
    pieces = _pieces(kind, config)
    # one instruction multiplies 64 rows (wgmma), or 128 (tcgen05.mma, at half the rate 64)
    unit = 128 if device.chip.tcgen05 else 64
    instructions = -(-rows // unit) * (tile_k * size // INSTRUCTION_BYTES)
    # it reads its rows of A and all of B, 128 bytes a cycle; a wgmma on sm_90 multiplies for n / 2 cycles
    rate = device.tensor_flops(8 * size) / device.multiprocessors / device.clock_hz
    flop = 2 * unit * (INSTRUCTION_BYTES // size)
    mma = instructions * sum(max(n * flop / rate, (unit + n) * INSTRUCTION_BYTES / 128) for n in pieces)
    consumers = 0 if config.pingpong else config.consumers
    return _Iteration(
        mma,
        instructions * len(pieces),
        stage_bytes(kind, config) / stages(kind, config),
        rows,
        config.tile_n,
        tile_k,
        size,
        itemsize_of(kind.out),
        config.defers(kind.epilogue == "tile", itemsize_of(kind.out)),
        config.result_cols // config.epilogue_n if config.epilogue_n and not config.pingpong else 0,
        (float(consumers == 1), float(consumers == 2), float(consumers >= 3), float(consumers == 0)),
    )


def work(problem: Problem, config: Config, device: tune.Device) -> Work:
    """Return what the busiest CTA does. Raises ValueError for an epilogue that is not in `EPILOGUE_CYCLES`."""
    if problem.epilogue not in EPILOGUE_CYCLES:
        raise ValueError(
            f"Problem(epilogue={problem.epilogue!r}): must be one of {', '.join(map(repr, EPILOGUE_CYCLES))}"
        )
    i = _iteration(problem.kind, config, device)
    r = _rounds(problem, config, device.multiprocessors, max(1, -(-problem.k // i.tile_k)))
    crowd = min(config.blocks_per_sm, max(1.0, r.active / device.multiprocessors))
    busy = min(1.0, r.active / device.multiprocessors)
    received, straddling, misaligned = (busy * i.tile_k * x for x in _received(problem, config, i.rows))
    shared = config.shared_lines(problem, config.ordering(problem, device.l2_bytes))
    per_task = EPILOGUE_CYCLES[problem.epilogue] * i.rows * i.columns
    area = problem.batch * problem.m * problem.n
    one, two, three, pingpong = i.kinds
    return Work(
        iterations=r.iterations,
        crowd=crowd,
        mma=i.mma,
        instructions=i.instructions,
        one_consumer=one,
        two_consumers=two,
        three_consumers=three,
        pingpong=pingpong,
        received=received,
        straddling=straddling,
        misaligned=misaligned,
        delivered=busy * shared * i.tile_k * i.size / NEIGHBOURS,
        bytes_per_stage=i.bytes_per_stage / crowd,
        cluster_split=float(config.sharers > 1),
        multicasts=float(config.cluster > 1 and not device.chip.tcgen05) * i.tile_k * i.size / CACHE_LINE,
        hbm=problem.batch * (problem.m + problem.n) * problem.k * i.size + area * i.out,
        tasks=r.tasks,
        results=i.rows * config.result_cols * i.out,
        sub_tiles=r.tasks * i.sub_tiles,
        hides=float(config.pingpong or crowd > 1.5 or i.defers or _alternates(problem, config, device)),
        split_tasks=r.split_tasks,
        parts=r.parts,
        partial=i.rows * i.columns * 4,
        sent=i.rows * (i.columns - config.result_cols) * 4,
        long=min(1.0, 2 * area * problem.k / LONG_PRODUCT),
        epilogue=r.tasks * crowd * per_task,
        epilogue_of_task=per_task,
        scales=r.iterations * crowd * i.rows * i.columns * 4 / 128 if problem.scales == "block" else 0.0,
    )


def predict(w: Work, k: Constants, device: tune.Device) -> tune.Cost:
    """Return the seconds of a launch. Where the fields of `w` are arrays, those of the result are."""
    to_seconds = 1 / device.clock_hz
    steps = w.iterations * w.crowd * to_seconds * (1 + k.power_limit * w.long)
    overhead = (
        k.one_consumer * w.one_consumer
        + k.two_consumers * w.two_consumers
        + k.three_consumers * w.three_consumers
        + k.multicast * w.multicasts
    )
    task = k.task * 1e-6 + w.results / k.store_rate * to_seconds
    share = k.exposed * (1 - w.pingpong) * (1 - w.hides / 2)
    sums = w.split_tasks * (
        (k.fix_up + w.parts * k.fix_up_part) * 1e-6 + (w.parts + 1) * w.partial / k.fix_up_rate * to_seconds
    )
    exchanged = w.cluster_split * w.tasks * (k.cluster_sum * 1e-6 + w.sent / k.cluster_sum_rate * to_seconds)
    at_the_end = w.epilogue_of_task + (1 - w.hides) * (w.epilogue - w.epilogue_of_task)
    return tune.Cost(
        hbm=w.hbm / (k.hbm_share * device.hbm_bytes_per_second),
        l2=steps * w.delivered / k.l2_rate * (1 + (k.unshared - 1) * w.cluster_split),
        shared=steps * (w.received + k.straddling * w.straddling + k.misaligned * w.misaligned) / k.receive_rate,
        tensor=steps * (w.mma * k.mma_share + k.instruction * w.instructions + overhead),
        latency=steps * w.bytes_per_stage / k.stage_rate,
        alu=(w.scales + w.hides * (w.epilogue - w.epilogue_of_task)) * to_seconds,
        setup=k.launch * 1e-6,
        synchronisation=task * (1 + (w.tasks - 1) * share)
        + w.sub_tiles * k.sub_tile * 1e-6
        + sums
        + exchanged
        + at_the_end * to_seconds,
        overlap=k.overlap,
    )


def cost(problem: Problem, config: Config, device: tune.Device) -> tune.Cost:
    """Return what the model says of a configuration; infinite where its accumulators exceed tensor memory. With tensor
    memory nothing of the model has been measured."""
    if device.chip.tcgen05 and config.consumers * config.tile_n * config.blocks_per_sm > TENSOR_COLUMNS:
        return tune.Cost(tensor=math.inf)
    return predict(work(problem, config, device), TENSOR_MEMORY if device.chip.tcgen05 else CONSTANTS, device)


def _alternates(problem: Problem, config: Config, device: tune.Device) -> bool:
    """Whether the next task's products go to other tensor memory than the sums that are being stored. Scales take some
    of it."""
    sums = 2 * config.consumers * config.tile_n * config.blocks_per_sm
    return device.chip.tcgen05 and sums + bool(problem.scales) <= TENSOR_COLUMNS
