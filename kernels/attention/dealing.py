"""How sequences are dealt out to thread blocks that read their keys and values, how much each reads at a time and how far ahead."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.kernels.attention.backward import ROWS
from tritonkittens.kernels.attention.config import fitting
from tritonkittens.kernels.attention.decode import AttentionDecode, AttentionDecodePaged
from tritonkittens.lang.template import cluster_slots

MAX_PARTS = 128  # of a sequence
BLOCKS = ((64, 2), (128, 1), (64, 1), (32, 1))  # keys of a block, thread blocks a multiprocessor: the first of which two slots fit
ONE_BLOCKS = ((64, 1), (32, 1))  # the same where a multiprocessor has one thread block: those of clusters, and those that are alone
TALL = 128  # keys of a block where one has few bytes: 64 take as long however small they are
FEW_BYTES = 128  # of a key
FEW_BYTES_ALONE = 256  # the same for a thread block that is alone, whose iterations nothing hides
# What the thread blocks of a multiprocessor ask for ahead, slots and bytes. With more a start is longer, and heads, whose keys lie beside each other in pages,
# drift apart. At dimension 64 the H200 reads 64 sequences of 1,024 keys in 37.1 µs with three slots, 38.5 with six; 8 of 4,096 by clusters in 22.9 with four,
# 23.4 with six; at 128, in pages of 16, in 39.1 with three, 40.2 with five, 41.2 with two; one of 65,536 in 16 parts, each alone, in pages of 16, in 70.6 with
# three, 71.9 with four, 74.7 with two (`bench/results/attention_variants.json`)
SLOTS, UNDER_WAY = 3, 144 * 1024
SHORT = 4  # blocks of keys of a task up to which two slots are enough: 64 sequences of 256 keys of dimension 64 take 14.3 µs, 14.9 with three
ONE_SLOTS, ONE_UNDER_WAY = 4, 96 * 1024
# µs, fitted to 5,400 deals on the H200 and the H100: on average what they choose takes 0.5 and 0.8 % longer than the fastest (`attention_decode_deals.json`)
STEP, A_KEY, A_BYTE, A_COPY = 0.05, 0.0034, 7.4e-6, 0.015  # of a block of keys in a thread block: at least, for each of its keys, its bytes, copies it comes in
LATENCY, OF_PAGES = 1.13, 0.3  # of memory, and where a page's number is asked for first
RATE = 0.91  # of memory's bandwidth, where all read
SMOOTH = 8  # what takes as long as another thing makes the whole longer: the norm in which they add
COMBINING, PART = 2.4, 0.017  # a second kernel, and for each part
JOINING = {2: 1.3, 4: 2.3}  # by the blocks of a cluster (of eight: 5)
CROWDED = 0.47  # a second thread block on a multiprocessor begins
ALONE = 0.03  # one asks for more before it begins
# The second kernel is launched while the first works, and comes into the room that it leaves: where it (nearly) fills multiprocessors, once or twice, it waits
NEARLY, NEARLY_FULL, FULL, ALL_FULL = 0.93, 0.47, 0.98, 1.3


class Kind(NamedTuple):
    """Of decode kernels: types, dimensions and features; pages of so many keys, where K and V come in pages; tiles of queries a key head."""

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
        return (self.head_dim + self.value_dim) * self.dtype.itemsize


@functools.lru_cache(maxsize=512)
def decode(
    kind: Kind, partial: bool = True, lse: bool = True, drawn: bool = False, sharers: int = 1, alone: bool = False, short: bool = False,
) -> AttentionDecode:  # fmt: skip
    """The decode kernel. Do blocks draw their tasks? How many thread blocks share one? Has each a multiprocessor for itself? Are tasks short?"""
    schedule = tk.Dynamic() if drawn else tk.ClusterSplitK(sharers) if sharers > 1 else tk.Persistent()
    knobs: dict[str, Any] = {**kind._asdict(), "dtype": tk.from_torch(kind.dtype)} | dict(partial=partial, lse=lse, schedule=schedule)
    page_size = knobs.pop("page_size")
    make = AttentionDecode if page_size is None else functools.partial(AttentionDecodePaged, page_size=page_size)
    return cast(AttentionDecode, fitting(lambda option: make(**option, **knobs), _options(kind.key_bytes, sharers > 1, alone, short)))


def _options(key_bytes: int, shared: bool, alone: bool, short: bool) -> list[dict[str, int]]:
    """Knobs that say how much a thread block reads at a time and how far ahead, the best first."""
    blocks, most, under_way = (ONE_BLOCKS, ONE_SLOTS, ONE_UNDER_WAY) if shared or alone else (BLOCKS, 2 if short else SLOTS, UNDER_WAY)
    if key_bytes <= (FEW_BYTES_ALONE if alone else FEW_BYTES):
        blocks = ((TALL, blocks[0][1]), *blocks)

    def slots(cols: int, at_once: int) -> int:
        return max(2, min(most, under_way // (cols * key_bytes * at_once)))

    return [dict(cols=cols, blocks_per_sm=at_once, stages=n) for cols, at_once in blocks for n in range(slots(cols, at_once), 1, -1)]


class Ring(NamedTuple):
    """What a thread block reads: so many keys at a time, of so many bytes of K and V each, in so many copies (0: not in pages); slots; thread blocks a
    multiprocessor."""

    keys: int = 64
    key_bytes: int = 512
    slots: int = 2
    at_once: int = 2
    copies: int = 0

    @property
    def bytes(self) -> int:
        return self.keys * self.key_bytes

    @property
    def time(self) -> float:
        """µs of a block of keys, in a thread block that nothing keeps waiting."""
        return STEP + A_KEY * self.keys + A_BYTE * self.bytes + (A_COPY * self.copies if self.copies > 1 else 0)

    @property
    def rate(self) -> float:
        """Bytes a µs that a thread block asks memory for."""
        return self.slots * self.bytes / (LATENCY + (OF_PAGES if self.copies else 0))


def rings_of(kind: Kind, whole: bool = True) -> tuple[Ring, Ring, Ring | None]:
    """Of any number of thread blocks, of one that has a multiprocessor for itself, of one of a cluster (None: there is none for results of this dimension, or
    for results that are not `whole`, which TMA cannot store)."""

    def ring_of(kernel: AttentionDecode) -> Ring:
        copies = 0 if kind.page_size is None else -(-kernel.cols // kind.page_size)
        return Ring(kernel.cols, kind.key_bytes, cast(int, kernel.stages), kernel.blocks_per_sm, copies)

    even = kind.value_dim == power_of_two(kind.value_dim)  # a tile of another width is several, and half its columns may lie in both
    shared = ring_of(decode(kind, partial=False, sharers=2)) if whole and even else None
    return ring_of(decode(kind)), ring_of(decode(kind, alone=True)), shared


class Deal(NamedTuple):
    """How sequences are dealt out: to so many tasks each, and a task to so many thread blocks of a cluster; does each have a multiprocessor for itself?"""

    parts: int = 1
    sharers: int = 1
    alone: bool = False


@functools.lru_cache(maxsize=4096)
def deal_of(
    tasks: int, keys: int, multiprocessors: int, bandwidth: float, ring: Ring = Ring(), alone: Ring | None = None, shared: Ring | None = None, columns: int = 0,
) -> Deal:  # fmt: skip
    """How to deal out sequences of so many keys: what takes the least time. `bandwidth`: of memory, bytes/s; `ring`: of any number of thread blocks;
    `alone`: of one that has a multiprocessor for itself, `shared`: of one of a cluster, whose blocks deal out `columns` of results (None: none may).

    Several parts are combined by a second kernel, those of a cluster through distributed shared memory. On the H200, with 8 key heads of dimension 128, µs: 8
    sequences of 1,024 keys undivided 15.7, in two parts 16.4, by clusters of two 15.3; of 4,096 keys 40.7, 38.6 (three 39.0, four 39.1), 37.5; in pages of 16,
    of 4,096 keys 47.2, 42.3 (three 40.5), 39.1; one of 16,384 in 11, 13, 16, 17, 33 parts 25.4, 24.3, 24.4, 25.7, 26.7, alone in 13 23.8; in pages of 16 in 13
    27.3, alone 25.5. Of dimension 64, one of 65,536 keys in 13, 16, 27, 33 parts 42.7, 39.8, 38.8, 40.5, alone in 13, 16 39.1, 38.7
    (`bench/results/attention_variants.json`).
    """

    deals = possible_deals(tasks, keys, multiprocessors, ring, alone, shared, columns)
    return min(deals, key=lambda dealt: predicted_time(tasks, keys, multiprocessors, bandwidth, *dealt))[1]


def possible_deals(tasks: int, keys: int, multiprocessors: int, ring: Ring, alone: Ring | None, shared: Ring | None, columns: int) -> list[tuple[Ring, Deal]]:
    """What `deal_of` chooses from, each with the ring that its thread blocks have."""

    def most(ring: Ring) -> int:
        return max(1, min(-(-keys // ring.keys), MAX_PARTS))

    deals = [(ring, Deal(parts)) for parts in range(1, most(ring) + 1)]
    if shared is not None:
        sharers = [n for n in JOINING if n <= most(shared) and 16 * n <= columns and tasks <= cluster_slots(multiprocessors, n)]
        deals += [(shared, Deal(1, n)) for n in sharers]
    if alone is not None:
        deals += [(alone, Deal(parts, alone=True)) for parts in range(1, min(most(alone), multiprocessors // tasks) + 1)]
    return deals


def predicted_time(tasks: int, keys: int, multiprocessors: int, bandwidth: float, ring: Ring, deal: Deal) -> float:
    """µs, but for what all deals take."""
    parts, sharers, alone = deal
    blocks = -(-keys // ring.keys)
    slots = multiprocessors * ring.at_once if sharers == 1 else cluster_slots(multiprocessors, sharers)
    steps = -(-tasks * parts // slots) * (-(-blocks // (parts * sharers)) + 1) * ring.time  # one more: nothing hides a task's last
    thread_blocks, total = min(tasks * parts * sharers, multiprocessors * ring.at_once), tasks * keys * ring.key_bytes
    reading = steps, total / (RATE * bandwidth * 1e-6), total / (thread_blocks * ring.rate)
    together = sum(time**SMOOTH for time in reading) ** (1 / SMOOTH)
    beginning = CROWDED if thread_blocks > multiprocessors else ALONE if alone else 0
    return together + beginning + (_combining(tasks * parts / multiprocessors, parts, ring.at_once) if parts > 1 else JOINING.get(sharers, 0))


def _combining(filled: float, parts: int, at_once: int) -> float:
    """µs that a second kernel takes beside thread blocks that fill multiprocessors so many times."""
    if at_once > 1 and filled >= FULL * at_once:
        waits = ALL_FULL
    else:
        waits = NEARLY_FULL if NEARLY < filled <= 1 else 0
    return COMBINING + PART * parts + waits


def row_tiles_of(group: int, queries: int) -> tuple[int, int]:
    """(tiles of at most 64 rows in which the queries of a group of heads come, as few as possible; heads of each)."""
    tiles = -(-group // (ROWS // queries))
    return tiles, -(-group // tiles)
