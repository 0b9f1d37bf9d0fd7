"""How many CTAs read the keys of a decoded sequence: the heuristic for `num_splits` of `attention_decode`.

`choose_split` predicts the time of every candidate `DecodeSplit` and takes the fastest. The constants of the prediction
are the fields of `SplitCosts`, fitted to the times in bench/decode_splits.json.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.kernels.attention.checks import MAX_SPLITS
from tritonkittens.kernels.attention.config import fitting
from tritonkittens.kernels.attention.device.backward import ROWS
from tritonkittens.kernels.attention.device.decode import AttentionDecode, AttentionDecodePaged
from tritonkittens.lang.core.constants import GROUP
from tritonkittens.lang.template.call import cluster_slots

OPERAND_REGISTERS = 30  # a thread's registers that ptxas needs for an MMA beside those of its result
MIN_COLUMNS = 16  # of the results that a CTA of a cluster stores


@dataclass(frozen=True)
class SplitCosts:
    """Constants of `predicted_time`, in µs where no unit is given.

    Fitted to the times of 6,100 splits on the H200 and the H100 (bench/decode_splits.json).
    docs/notes/attention_decode.md says how well they predict. `python -m bench.decode_splits` measures again.
    """

    # A CTA's time for a block of keys: block + block_key · keys + block_byte · bytes of K and V
    block: float = 0.0297
    block_key: float = 0.0039
    block_byte: float = 7e-6
    # An SM's time for a block of keys of any of its CTAs: sm_block + sm_block_key · keys
    sm_block: float = 0.0089
    sm_block_key: float = 0.00538
    latency: float = 0.966  # of a copy from memory
    page_latency: float = 0.2  # of the page number that the copy of a page needs first
    bandwidth: float = 0.903  # share of the HBM bandwidth that all CTAs together reach (a ratio)
    # growth of the reading time where the fullest SM has twice the mean number of CTAs (a ratio)
    imbalance: float = 0.0354
    overlap: float = 6.82  # exponent p of the norm (Σ timeᵖ)^(1/p) by which overlapping times add up (a number)
    combine: float = 2.286  # the second kernel, which combines splits
    combine_split: float = 0.014  # the second kernel, for each split
    # by CTAs of a cluster: merging results
    cluster_merge: Mapping[int, float] = field(default_factory=lambda: {2: 1.17, 4: 2.0})
    # by CTAs that start on an SM
    start: Mapping[int, float] = field(default_factory=lambda: {1: 0, 2: 0.42, 3: 0.18, 4: 0.19})
    split_rest: float = 0.352  # finding a CTA's part of a task that is split over all SMs
    single_start: float = 0.038  # the only CTA of an SM, which requests more before it begins
    single_end: float = 0.31  # the only CTA of an SM, between two tasks
    # The second kernel starts on SMs with room for it. It waits where the first kernel leaves none
    nearly_full: float = 0.93  # share of SMs with a CTA, up to one each, above which it waits (a ratio)
    nearly_full_wait: float = 0.39
    full: float = 0.98  # share of places for several CTAs an SM above which it waits (a ratio)
    full_wait: float = 0.974


COSTS = SplitCosts()


class RingOptions(NamedTuple):
    """What the shared memory of an SM's CTAs may hold: keys of a block, stages of a ring, bytes in flight.

    More bytes in flight make starts longer, and let heads whose keys share pages drift apart. With fewer, memory waits
    for requests (measured: docs/notes/attention_decode.md). Small blocks take as long as 64 keys, so keys of at most
    `few_bytes` come twice as many.
    """

    blocks_per_sm: int
    tile_n: tuple[int, ...]  # the best first; the first that fits with two stages is used
    max_stages: int
    bytes_in_flight: int  # of all CTAs of the SM
    few_bytes: int = 128  # of K and V of a key

    def knobs(self, key_bytes: int) -> list[dict[str, int]]:
        """Knobs of a kernel, the best first."""
        options = []
        for keys in self.tile_n:
            tile_n = keys * (2 if key_bytes <= self.few_bytes else 1)
            most = max(2, min(self.max_stages, self.bytes_in_flight // (tile_n * key_bytes * self.blocks_per_sm)))
            options += [dict(tile_n=tile_n, blocks_per_sm=self.blocks_per_sm, stages=n) for n in range(most, 1, -1)]
        return options


IN_FLIGHT, IN_FLIGHT_SMALL = 144 * 1024, 96 * 1024  # bytes
# By CTAs of an SM; 0 is the kernel for any number of tasks, with two CTAs an SM where they fit
RINGS: dict[int, tuple[RingOptions, ...]] = {
    0: (RingOptions(2, (64,), 3, IN_FLIGHT), RingOptions(1, (128, 64, 32), 3, IN_FLIGHT, few_bytes=0)),
    1: (RingOptions(1, (64, 32), 4, IN_FLIGHT_SMALL, few_bytes=256),),
    3: (RingOptions(3, (64,), 2, IN_FLIGHT, few_bytes=0),),
    4: (RingOptions(4, (32,), 3, IN_FLIGHT_SMALL),),
}
SPLIT_REST_BLOCKS = (0, 3)  # keys of `RINGS` whose CTAs have room for a part of a task beside whole ones
CLUSTER_RING = (RingOptions(1, (64, 32), 4, IN_FLIGHT_SMALL, few_bytes=256),)


class DecodeKind(NamedTuple):
    """What decides the code of a decode kernel, apart from its `DecodeSplit`.

    `page_size`: keys of a page; None for a contiguous cache. `row_tiles`: tiles of queries of a key head.
    """

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    causal: bool = False
    softcap: bool = False
    lengths: bool = True
    starts: bool = False
    page_size: int | None = None
    row_tiles: int = 1

    @property
    def key_bytes(self) -> int:
        """Bytes of K and V of a key."""
        return (self.head_dim + self.value_dim) * self.dtype.itemsize


class DecodeSplit(NamedTuple):
    """Which CTAs read a sequence of one key head.

    `num_splits` tasks read it, and a second kernel combines their results. The `cluster` of a task has so many CTAs,
    which merge theirs through distributed shared memory. `split_rest`: tasks of an incomplete wave are split over all
    SMs.
    """

    num_splits: int = 1
    cluster: int = 1
    blocks_per_sm: int = 0  # a key of `RINGS`
    split_rest: bool = False


# ---------------------------------------------------------------- kernels


@functools.lru_cache(maxsize=512)
def decode_kernel(
    kind: DecodeKind,
    partial: bool = True,
    lse: bool = True,
    dynamic: bool = False,
    cluster: int = 1,
    blocks_per_sm: int = 0,
    split_rest: bool = False,
    one_tile_per_block: bool = False,
) -> AttentionDecode:
    """The decode kernel of a kind. `partial`: its results are splits in fp32.

    Other arguments: see `DecodeSplit` and `tk.Schedule`.
    """
    schedule = (
        tk.Dynamic()
        if dynamic
        else tk.ClusterSplitK(cluster)
        if cluster > 1
        else tk.SplitRest()
        if split_rest
        else tk.Persistent()
    )
    knobs: dict[str, Any] = {**kind._asdict(), "dtype": tk.from_torch(kind.dtype)}
    knobs |= dict(partial=partial, lse=lse, schedule=schedule, one_tile_per_block=one_tile_per_block)
    page_size = knobs.pop("page_size")
    make = AttentionDecode if page_size is None else functools.partial(AttentionDecodePaged, page_size=page_size)
    options = [
        option
        for ring in (CLUSTER_RING if cluster > 1 else RINGS[blocks_per_sm])
        for option in ring.knobs(kind.key_bytes)
    ]
    return cast(AttentionDecode, fitting(lambda option: make(**option, **knobs), options))


def kernel_for(
    kind: DecodeKind, split: DecodeSplit, tasks: int, multiprocessors: int, lse: bool = False, whole: bool = True
) -> AttentionDecode:
    """The kernel of a split for so many tasks, one a sequence and key head; `whole`: see `rings_of`."""
    partial = split.num_splits > 1 or not whole
    knobs: dict[str, Any] = dict(cluster=split.cluster, blocks_per_sm=split.blocks_per_sm, split_rest=split.split_rest)
    make = functools.partial(decode_kernel, kind, partial, lse or partial, **knobs)
    kernel = make()
    if _fits_one_wave(kernel, tasks * split.num_splits, multiprocessors):
        return make(one_tile_per_block=True)
    # Sequences of one length give CTAs equal work: fetching tasks would only cost time
    uneven = (kind.lengths or kind.starts) and not partial and split.cluster == 1
    return decode_kernel(kind, partial, lse, dynamic=True, blocks_per_sm=split.blocks_per_sm) if uneven else kernel


def _fits_one_wave(kernel: AttentionDecode, tasks: int, multiprocessors: int) -> bool:
    """Whether there is a CTA for every task, and for every part of one."""
    slots = cluster_slots(multiprocessors, kernel.cluster_size) * kernel.blocks_per_sm
    return kernel.schedule.work_tiles(tasks, slots, kernel.blocks_per_sm) <= slots


def row_tiles_of(group: int, queries: int) -> tuple[int, int]:
    """(tiles, heads of a tile) of a group's query heads: as few tiles of at most 64 rows as hold them."""
    tiles = -(-group // (ROWS // queries))
    return tiles, -(-group // tiles)


# ---------------------------------------------------------------- rings


class Ring(NamedTuple):
    """The ring of a CTA: keys of a stage, bytes of a key's K and V, stages; CTAs of an SM; whether keys are in
    pages."""

    tile_n: int = 64
    key_bytes: int = 512
    stages: int = 2
    blocks_per_sm: int = 2
    paged: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of a stage."""
        return self.tile_n * self.key_bytes

    @property
    def time(self) -> float:
        """µs of a block of keys, in a CTA that never waits."""
        return COSTS.block + COSTS.block_key * self.tile_n + COSTS.block_byte * self.bytes

    @property
    def rate(self) -> float:
        """Bytes a µs that a CTA requests."""
        return self.stages * self.bytes / (COSTS.latency + (COSTS.page_latency if self.paged else 0))


class Rings(NamedTuple):
    """The rings of the kernels of a kind, with the keys of `RINGS`."""

    plain: tuple[tuple[int, Ring], ...]
    cluster: Ring | None = None  # None: no cluster can share a task
    columns: int = 0  # of the results that a cluster shares
    split_rest: tuple[tuple[int, Ring], ...] = ()


@functools.lru_cache(maxsize=512)
def rings_of(kind: DecodeKind, whole: bool = True) -> Rings:
    """The rings of a kind.

    Results that TMA cannot store are not `whole`: all are splits, which need more room, and no cluster shares a task.
    """

    def ring_of(kernel: AttentionDecode) -> Ring:
        return Ring(
            kernel.tile_n, kind.key_bytes, cast(int, kernel.stages), kernel.blocks_per_sm, kind.page_size is not None
        )

    kernels = {
        count: decode_kernel(kind, partial=count < 2, blocks_per_sm=count) for count in RINGS if whole or count < 2
    }
    plain = tuple((count, ring_of(kernel)) for count, kernel in kernels.items() if count < 2 or _runs(kernel))
    rest = {
        count: decode_kernel(kind, partial=False, blocks_per_sm=count, split_rest=True)
        for count in SPLIT_REST_BLOCKS
        if whole
    }
    # Half the columns of another width may lie in several swizzle tiles
    halves = kind.value_dim >= 2 * MIN_COLUMNS and kind.value_dim == power_of_two(kind.value_dim)
    cluster = ring_of(decode_kernel(kind, partial=False, cluster=2)) if whole and halves else None
    return Rings(
        plain,
        cluster,
        kind.value_dim,
        tuple((count, ring_of(kernel)) for count, kernel in rest.items() if _runs(kernel)),
    )


def _runs(kernel: AttentionDecode) -> bool:
    """Whether tiles fit into shared memory and registers, and an MMA's into the registers of a thread at launch."""
    mma = ROWS * max(kernel.tile_n, kernel.value_dim) // GROUP + OPERAND_REGISTERS
    with contextlib.suppress(tk.TileError):
        kernel.placement(90)
        return mma <= kernel.launch_registers and kernel.needed_registers <= kernel.registers()[0]
    return False


# ---------------------------------------------------------------- the choice


@functools.lru_cache(maxsize=4096)
def choose_split(tasks: int, keys: int, multiprocessors: int, bandwidth: float, rings: Rings) -> DecodeSplit:
    """The split with the shortest predicted time.

    Args:
        tasks: sequences times key heads (times row tiles).
        keys: of the longest sequence.
        bandwidth: of memory, bytes a second.

    Splits find more free SMs than clusters, whose CTAs must start together. Clusters merge faster (measured:
    docs/notes/attention_decode.md).
    """
    candidates = candidate_splits(tasks, keys, multiprocessors, rings)
    return min(candidates, key=lambda candidate: predicted_time(tasks, keys, multiprocessors, bandwidth, *candidate))[1]


def candidate_splits(tasks: int, keys: int, multiprocessors: int, rings: Rings) -> list[tuple[Ring, DecodeSplit]]:
    """What `choose_split` chooses from, with the rings of the CTAs."""

    def most(ring: Ring) -> int:
        return max(1, min(-(-keys // ring.tile_n), MAX_SPLITS))

    # splits; three and four CTAs an SM gain nothing by them
    one_wave = {1: max(1, multiprocessors // tasks), 3: 1, 4: 1}
    found = [(ring, DecodeSplit(splits, 1, count)) for count, ring in rings.plain
             for splits in range(1, min(most(ring), one_wave.get(count, MAX_SPLITS)) + 1)]  # fmt: skip
    ring = rings.cluster
    if ring is not None:
        clusters = [
            n
            for n in COSTS.cluster_merge
            if n <= most(ring) and MIN_COLUMNS * n <= rings.columns and tasks <= cluster_slots(multiprocessors, n)
        ]
        found += [(ring, DecodeSplit(1, n)) for n in clusters]
    if 0 < tasks % multiprocessors < tasks:  # all SMs have whole tasks, and some have one more
        pieces = tk.SplitRest().split(tasks, multiprocessors)[1]
        found += [(ring, DecodeSplit(1, 1, count, True)) for count, ring in rings.split_rest
                  if 1 < pieces <= most(ring) and tasks <= multiprocessors * ring.blocks_per_sm]  # fmt: skip
    return found


def predicted_time(
    tasks: int, keys: int, multiprocessors: int, bandwidth: float, ring: Ring, split: DecodeSplit
) -> float:
    """µs of a split, apart from what all splits of a shape have in common. Arguments as of `choose_split`."""
    num_splits, cluster, count, split_rest = split
    blocks = -(-keys // ring.tile_n)
    slots = multiprocessors * ring.blocks_per_sm if cluster == 1 else cluster_slots(multiprocessors, cluster)
    waves = -(-tasks * num_splits // slots)
    steps = waves * (-(-blocks // (num_splits * cluster)) + 1) * ring.time  # one more: nothing overlaps a task's last
    thread_blocks, total = -(-tasks * num_splits // waves) * cluster, tasks * keys * ring.key_bytes
    filled = thread_blocks / multiprocessors
    fullest: float = math.ceil(filled)
    if split_rest:
        whole, pieces = tk.SplitRest().split(tasks, multiprocessors)
        fullest = whole / multiprocessors + 1 / pieces
    excess = fullest / filled - 1 if filled > 1 else 0
    limits = (
        steps,
        total / (COSTS.bandwidth * bandwidth * 1e-6) * (1 + COSTS.imbalance * excess),
        total / (thread_blocks * ring.rate),
        tasks * blocks * (COSTS.sm_block + COSTS.sm_block_key * ring.tile_n) / multiprocessors,
    )
    together = sum(time**COSTS.overlap for time in limits) ** (1 / COSTS.overlap)
    start = COSTS.single_start + COSTS.single_end * (waves - 1) if count == 1 else COSTS.start[math.ceil(filled)]
    if split_rest:
        start += COSTS.split_rest
    merge = (
        _combine_time(tasks * num_splits / multiprocessors, num_splits, ring.blocks_per_sm)
        if num_splits > 1
        else COSTS.cluster_merge.get(cluster, 0)
    )
    return together + start + merge


def _combine_time(filled: float, num_splits: int, blocks_per_sm: int) -> float:
    """µs that the second kernel adds to a first one with so many CTAs an SM on average."""
    if blocks_per_sm > 1 and filled >= COSTS.full * blocks_per_sm:
        wait = COSTS.full_wait
    else:
        wait = COSTS.nearly_full_wait if COSTS.nearly_full < filled <= 1 else 0
    return COSTS.combine + COSTS.combine_split * num_splits + wait
