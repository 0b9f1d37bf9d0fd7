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
SHARED_BLOCKS = ((64, 1), (32, 1))  # the same of clusters
TALL, FEW_BYTES = 128, 128  # keys of a block where one has at most so many bytes: 64 take as long however small they are
# What the thread blocks of a multiprocessor ask for ahead, slots and bytes. With more a start is longer, and heads, whose keys lie beside each other in pages,
# drift apart. At dimension 64 the H200 reads 64 sequences of 1,024 keys in 37.1 µs with three slots, 38.5 with six; 8 of 4,096 by clusters in 22.9 with four,
# 23.4 with six; at 128, in pages of 16, in 39.1 with three, 40.2 with five, 41.2 with two (`bench/results/attention_variants.json`)
SLOTS, UNDER_WAY = 3, 144 * 1024
SHARED_SLOTS, SHARED_UNDER_WAY = 4, 96 * 1024
# µs on the H200
STEP, A_KEY, A_BYTE = 0.15, 0.003, 5.5e-6  # of a block of keys in a thread block: at least, for each of its keys, for each of its bytes
IN_COPIES = 1.25  # times as long where a block comes in many copies, which a second thread block on a multiprocessor issues beside the first
RATE = 34.9e3  # bytes that memory gives each multiprocessor where all read
COMBINING, PART = 2.7, 0.08  # a second kernel, and for each part
JOINING = {2: 1.45, 4: 2.35}  # by the blocks of a cluster (of eight: 5)
CROWDED = 1.04  # a second thread block on a multiprocessor begins
SLACK = 32  # of this many µs that readers take memory needs one more: those that end early leave others behind


@functools.lru_cache
def decode(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, softcap: bool, lengths: bool = True, starts: bool = False, page_size: int | None = None,
    row_tiles: int = 1, partial: bool = True, lse: bool = True, drawn: bool = False, sharers: int = 1,
) -> AttentionDecode:  # fmt: skip
    """The decode kernel for types, dimensions and features; for K and V in pages of `page_size` keys where that is given; for so many tiles of queries a key
    head. Do blocks draw their tasks? How many thread blocks share one?"""
    schedule = tk.Dynamic() if drawn else tk.ClusterSplitK(sharers) if sharers > 1 else tk.Persistent()
    knobs: dict[str, Any] = dict(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, softcap=softcap, lengths=lengths,
                                 starts=starts, row_tiles=row_tiles, partial=partial, lse=lse, schedule=schedule)
    make = AttentionDecode if page_size is None else functools.partial(AttentionDecodePaged, page_size=page_size)
    options = _options((head_dim + value_dim) * dtype.itemsize, sharers > 1)
    return cast(AttentionDecode, fitting(lambda option: make(**option, **knobs), options))


def _options(key_bytes: int, shared: bool) -> list[dict[str, int]]:
    """Knobs that say how much a thread block reads at a time and how far ahead, the best first."""
    blocks, most, under_way = (SHARED_BLOCKS, SHARED_SLOTS, SHARED_UNDER_WAY) if shared else (BLOCKS, SLOTS, UNDER_WAY)
    if key_bytes <= FEW_BYTES:
        blocks = ((TALL, blocks[0][1]), *blocks)

    def slots(cols: int, at_once: int) -> int:
        return max(2, min(most, under_way // (cols * key_bytes * at_once)))

    return [dict(cols=cols, blocks_per_sm=at_once, stages=n) for cols, at_once in blocks for n in range(slots(cols, at_once), 1, -1)]


class Block(NamedTuple):
    """What a thread block reads at a time: so many keys, of so many bytes of K and V each; in many copies?"""

    keys: int = 64
    key_bytes: int = 512
    in_copies: bool = False

    @property
    def bytes(self) -> int:
        return self.keys * self.key_bytes

    @property
    def time(self) -> float:
        """µs, in a thread block that nothing keeps waiting: of 64 keys the H200 takes 0.38 at dimension 32, 0.41 at 64, 0.52 at 128, of 128 keys 0.61, 0.73."""
        return (STEP + A_KEY * self.keys + A_BYTE * self.bytes) * (IN_COPIES if self.in_copies else 1)


class Deal(NamedTuple):
    """How sequences are dealt out: to so many tasks each, and a task to so many thread blocks of a cluster."""

    parts: int = 1
    sharers: int = 1


@functools.lru_cache(maxsize=4096)
def deal_of(tasks: int, blocks: int, multiprocessors: int, block: Block = Block(), columns: int = 0, at_once: int = 1) -> Deal:
    """How to deal out sequences of so many blocks: what takes the least time. `columns`: of results, which the blocks of a cluster deal out (0: none may);
    `at_once`: thread blocks of a multiprocessor.

    A task's start and end count as two blocks; several parts are combined by a second kernel, those of a cluster through distributed shared memory. On the
    H200, with 8 key heads of dimension 128, µs: 8 sequences of 1,024 keys undivided 15.7, in two parts 16.4, by clusters of two 15.3; of 4,096 keys 40.7, 38.6
    (three 39.0, four 39.1), 37.5; of 32,768 keys 271, 240 (four 239, eight 244); in pages of 16, of 4,096 keys 47.2, 42.3 (three 40.5), 39.1; one of 65,536 in
    8, 16, 32, 64 parts 84.5, 67.5, 68.1, 69.8; of dimension 64, 8 sequences of 4,096 keys by clusters of two 22.9, in two, three, four, eight parts 24.4, 24.2,
    24.3, 25.7 (`bench/results/attention_variants.json`).
    """
    memory = tasks * blocks * block.bytes / (RATE * multiprocessors)

    def time(deal: Deal) -> float:
        parts, sharers = deal
        slots = multiprocessors * at_once if sharers == 1 else cluster_slots(multiprocessors, sharers)
        rounds = -(-tasks * parts // slots) * (-(-blocks // (parts * sharers)) + 2) * block.time
        crowded = CROWDED if tasks * parts > multiprocessors and not block.in_copies else 0
        combining = COMBINING + PART * parts if parts > 1 else JOINING.get(sharers, 0)
        return max(rounds, memory) + rounds / SLACK + crowded + combining

    most = max(1, min(blocks, MAX_PARTS))
    even = columns > 0 and columns == power_of_two(columns)  # a tile of another width is several, and half its columns may lie in both
    shared = [Deal(1, n) for n in JOINING if even and n <= most and 16 * n <= columns and tasks <= cluster_slots(multiprocessors, n)]
    return min([*(Deal(parts) for parts in range(1, most + 1)), *shared], key=time)


def row_tiles_of(group: int, queries: int) -> tuple[int, int]:
    """(tiles of at most 64 rows in which the queries of a group of heads come, as few as possible; heads of each)."""
    tiles = -(-group // (ROWS // queries))
    return tiles, -(-group // tiles)
