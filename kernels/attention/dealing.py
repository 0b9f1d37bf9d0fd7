"""How sequences are dealt out to thread blocks that read their keys and values, how much each reads at a time and how far ahead."""
from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, NamedTuple, cast

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.kernels.attention.config import fitting
from tritonkittens.kernels.attention.device.backward import ROWS
from tritonkittens.kernels.attention.device.decode import AttentionDecode, AttentionDecodePaged
from tritonkittens.lang.core.constants import GROUP
from tritonkittens.lang.template.template import cluster_slots

MAX_PARTS = 128  # of a sequence
OPERANDS = 30  # registers that ptxas wants for an instruction of a product beside those of its result
COLUMNS = 16  # of results that a thread block of a cluster stores at least


class Room(NamedTuple):
    """What thread blocks of a multiprocessor read: keys of a block, the first of which two slots fit, twice as many where a key has few bytes, for 64 take as
    long however small they are; slots, and bytes under way of all thread blocks, at most.

    With more under way a start is longer, and heads, whose keys lie beside each other in pages, drift apart; with less, memory waits for requests
    (measured: docs/notes/attention_decode.md).
    """

    at_once: int  # thread blocks
    keys: tuple[int, ...]
    slots: int
    bytes: int
    few_bytes: int = 128

    def options(self, key_bytes: int) -> list[dict[str, int]]:
        """Knobs of a kernel, the best first."""
        heights = [keys * (2 if key_bytes <= self.few_bytes else 1) for keys in self.keys]
        most = [max(2, min(self.slots, self.bytes // (cols * key_bytes * self.at_once))) for cols in heights]
        return [dict(tile_n=cols, blocks_per_sm=self.at_once, stages=n) for cols, slots in zip(heights, most, strict=True) for n in range(slots, 1, -1)]


UNDER_WAY, UNDER_WAY_OF_ONE = 144 * 1024, 96 * 1024  # bytes
# By thread blocks of a multiprocessor; 0: of the kernel that works for any number of tasks, two where they fit
ROOMS = {
    0: (Room(2, (64,), 3, UNDER_WAY), Room(1, (128, 64, 32), 3, UNDER_WAY, few_bytes=0)),
    1: (Room(1, (64, 32), 4, UNDER_WAY_OF_ONE, few_bytes=256),),
    3: (Room(3, (64,), 2, UNDER_WAY, few_bytes=0),),
    4: (Room(4, (32,), 3, UNDER_WAY_OF_ONE),),
}
EVENED = (0, 3)  # those of `ROOMS` where a part of a task may have room beside whole ones
SHARED = (Room(1, (64, 32), 4, UNDER_WAY_OF_ONE, few_bytes=256),)  # of a cluster
# µs, fitted to the measured deals in bench/decode_deals.json (docs/notes/attention_decode.md says how well)
STEP, A_KEY, A_BYTE = 0.0297, 0.0039, 7e-6  # of a block of keys in a thread block: at least, for each key, each byte
A_BLOCK, A_COLUMN = 0.0089, 0.00538  # of a multiprocessor, for each block of keys, and each key of it
LATENCY, OF_PAGES = 0.966, 0.2  # of memory, and where a page's number is asked for first
RATE = 0.903  # of memory's bandwidth, where all read
UNEVEN = 0.0354  # of the time that reading takes, where the fullest multiprocessors have twice as many thread blocks as the mean: these read slower
SMOOTH = 6.82  # what takes as long as another thing makes the whole longer: the norm in which they add
COMBINING, PART = 2.286, 0.014  # a second kernel, and for each part
JOINING = {2: 1.17, 4: 2.0}  # by the blocks of a cluster (of eight: 5)
BEGINNING = {1: 0, 2: 0.42, 3: 0.18, 4: 0.19}  # by thread blocks that begin on a multiprocessor
EVEN = 0.352  # by thread blocks that find out which part of which task is theirs, of tasks that not every multiprocessor can have
ALONE, ENDING = 0.038, 0.31  # one asks for more before it begins; nothing hides how it ends a task before the next
# The second kernel is launched while the first works, and comes into the room that it leaves: where it (nearly) fills multiprocessors, once or twice, it waits
NEARLY, NEARLY_FULL, FULL, ALL_FULL = 0.93, 0.39, 0.98, 0.974


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
    kind: Kind, partial: bool = True, lse: bool = True, dynamic: bool = False, sharers: int = 1, at_once: int = 0, even: bool = False,
    one_tile_per_block: bool = False,
) -> AttentionDecode:  # fmt: skip
    """The decode kernel. Do blocks draw their tasks? How many thread blocks share one? How many has a multiprocessor (see `ROOMS`; clusters: 1)? Are tasks that
    not every multiprocessor can have split (`SplitRest`)? Has each block one task (or part of one) at most?"""
    schedule = tk.Dynamic() if drawn else tk.ClusterSplitK(sharers) if sharers > 1 else tk.SplitRest() if even else tk.Persistent()
    knobs: dict[str, Any] = {**kind._asdict(), "dtype": tk.from_torch(kind.dtype)} | dict(partial=partial, lse=lse, schedule=schedule, one_tile_per_block=single)
    page_size = knobs.pop("page_size")
    make = AttentionDecode if page_size is None else functools.partial(AttentionDecodePaged, page_size=page_size)
    options = [option for room in (SHARED if sharers > 1 else ROOMS[at_once]) for option in room.options(kind.key_bytes)]
    return cast(AttentionDecode, fitting(lambda option: make(**option, **knobs), options))


class Ring(NamedTuple):
    """What a thread block reads: so many keys at a time, of so many bytes of K and V each; slots; thread blocks a multiprocessor; are keys in pages?"""

    keys: int = 64
    key_bytes: int = 512
    slots: int = 2
    at_once: int = 2
    in_pages: bool = False

    @property
    def bytes(self) -> int:
        return self.keys * self.key_bytes

    @property
    def time(self) -> float:
        """µs of a block of keys, in a thread block that nothing keeps waiting."""
        return STEP + A_KEY * self.keys + A_BYTE * self.bytes

    @property
    def rate(self) -> float:
        """Bytes a µs that a thread block asks memory for."""
        return self.slots * self.bytes / (LATENCY + (OF_PAGES if self.in_pages else 0))


class Rings(NamedTuple):
    """By thread blocks of a multiprocessor (see `ROOMS`), and of one of a cluster, whose thread blocks share `columns` of results; those of kernels that split
    tasks which not every multiprocessor can have."""

    of: tuple[tuple[int, Ring], ...]
    shared: Ring | None = None
    columns: int = 0
    even: tuple[tuple[int, Ring], ...] = ()


def rings_of(kind: Kind, whole: bool = True) -> Rings:
    """Results that are not `whole` TMA cannot store: then all are parts, which need more room, and no cluster shares a task."""

    def ring_of(kernel: AttentionDecode) -> Ring:
        return Ring(kernel.tile_n, kind.key_bytes, cast(int, kernel.stages), kernel.blocks_per_sm, kind.page_size is not None)

    kernels = {count: decode(kind, partial=count < 2, at_once=count) for count in ROOMS if whole or count < 2}
    of = tuple((count, ring_of(kernel)) for count, kernel in kernels.items() if count < 2 or _runs(kernel))
    even = {count: decode(kind, partial=False, at_once=count, even=True) for count in EVENED if whole}
    halves = kind.value_dim >= 2 * COLUMNS and kind.value_dim == power_of_two(kind.value_dim)  # of a tile of another width half the columns may lie in several
    shared = ring_of(decode(kind, partial=False, sharers=2)) if whole and halves else None
    return Rings(of, shared, kind.value_dim, tuple((count, ring_of(kernel)) for count, kernel in even.items() if _runs(kernel)))


def _runs(kernel: AttentionDecode) -> bool:
    """Do its tiles fit into shared memory and into registers, those of each instruction also into what a thread is launched with?"""
    product = ROWS * max(kernel.tile_n, kernel.value_dim) // GROUP + OPERANDS
    with contextlib.suppress(tk.TileError):
        kernel.placement(90)
        return product <= kernel.launch_registers and kernel.needed_registers <= kernel.registers()[0]
    return False


class Deal(NamedTuple):
    """How sequences are dealt out: to so many tasks each, a task to so many thread blocks of a cluster; how many thread blocks has a multiprocessor (see
    `ROOMS`), and are tasks split that not every multiprocessor can have?"""

    parts: int = 1
    sharers: int = 1
    at_once: int = 0
    even: bool = False


def kernel_of(kind: Kind, deal: Deal, tasks: int, multiprocessors: int, lse: bool = False, whole: bool = True) -> AttentionDecode:
    """The kernel that does so many tasks, each a sequence of a head of keys, dealt out so; see `rings_of` for results that are not `whole`."""
    partial = deal.parts > 1 or not whole
    dealt = functools.partial(decode, kind, partial, lse or partial, sharers=deal.sharers, at_once=deal.at_once, even=deal.even)
    kernel = dealt()
    if _runs_at_once(kernel, tasks * deal.parts, multiprocessors):
        return dealt(one_tile_per_block=True)
    # Where all sequences are as long, blocks get equally many: there is nothing to balance, and drawing takes time
    uneven = (kind.lengths or kind.starts) and not partial and deal.sharers == 1
    return decode(kind, partial, lse, dynamic=True, at_once=deal.at_once) if uneven else kernel


def _runs_at_once(kernel: AttentionDecode, tasks: int, multiprocessors: int) -> bool:
    """Is there a thread block for every task, and every part of one?"""
    slots = cluster_slots(multiprocessors, kernel.cluster_size) * kernel.blocks_per_sm
    return kernel.schedule.units(tasks, slots, kernel.blocks_per_sm) <= slots


@functools.lru_cache(maxsize=4096)
def deal_of(tasks: int, keys: int, multiprocessors: int, bandwidth: float, rings: Rings) -> Deal:
    """How to deal out sequences of so many keys: what takes the least time. `bandwidth`: of memory, bytes/s.

    Several parts are combined by a second kernel, those of a cluster through distributed shared memory, which takes less time but finds fewer
    multiprocessors free (measured: docs/notes/attention_decode.md).
    """
    deals = possible_deals(tasks, keys, multiprocessors, rings)
    return min(deals, key=lambda dealt: predicted_time(tasks, keys, multiprocessors, bandwidth, *dealt))[1]


def possible_deals(tasks: int, keys: int, multiprocessors: int, rings: Rings) -> list[tuple[Ring, Deal]]:
    """What `deal_of` chooses from, each with the ring that its thread blocks have."""

    def most(ring: Ring) -> int:
        return max(1, min(-(-keys // ring.keys), MAX_PARTS))

    fitting_once = {1: max(1, multiprocessors // tasks), 3: 1, 4: 1}  # parts, in which crowds have nothing to win
    deals = [(ring, Deal(parts, 1, count)) for count, ring in rings.of for parts in range(1, min(most(ring), fitting_once.get(count, MAX_PARTS)) + 1)]
    if rings.shared is not None:
        sharers = [n for n in JOINING if n <= most(rings.shared) and COLUMNS * n <= rings.columns and tasks <= cluster_slots(multiprocessors, n)]
        deals += [(rings.shared, Deal(1, n)) for n in sharers]
    if 0 < tasks % multiprocessors < tasks:  # all multiprocessors have whole tasks, some one more
        pieces = tk.SplitRest().split(tasks, multiprocessors)[1]
        deals += [(ring, Deal(1, 1, count, True)) for count, ring in rings.even if 1 < pieces <= most(ring) and tasks <= multiprocessors * ring.at_once]
    return deals


def predicted_time(tasks: int, keys: int, multiprocessors: int, bandwidth: float, ring: Ring, deal: Deal) -> float:
    """µs, but for what all deals take."""
    parts, sharers, at_once, even = deal
    blocks = -(-keys // ring.keys)
    slots = multiprocessors * ring.at_once if sharers == 1 else cluster_slots(multiprocessors, sharers)
    rounds = -(-tasks * parts // slots)
    steps = rounds * (-(-blocks // (parts * sharers)) + 1) * ring.time  # one more: nothing hides a task's last
    thread_blocks, total = -(-tasks * parts // rounds) * sharers, tasks * keys * ring.key_bytes
    filled = thread_blocks / multiprocessors
    fullest: float = math.ceil(filled)
    if even:
        whole, pieces = tk.SplitRest().split(tasks, multiprocessors)
        fullest = whole / multiprocessors + 1 / pieces
    uneven = fullest / filled - 1 if filled > 1 else 0
    limits = (
        steps,
        total / (RATE * bandwidth * 1e-6) * (1 + UNEVEN * uneven),
        total / (thread_blocks * ring.rate),
        tasks * blocks * (A_BLOCK + A_COLUMN * ring.keys) / multiprocessors,
    )
    together = sum(time**SMOOTH for time in limits) ** (1 / SMOOTH)
    beginning = ALONE + ENDING * (rounds - 1) if at_once == 1 else BEGINNING[math.ceil(filled)]
    if even:
        beginning += EVEN
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
