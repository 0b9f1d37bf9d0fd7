"""How the attention kernels are configured: from the head dimensions, the masks and how many tasks there are."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tritonkittens.lang as tk

C = TypeVar("C")
SMALLEST_FUSED = 48  # dimension: padded to 64, 5 products are fewer than 7 of it
ENOUGH_ROUNDS = 1.15  # of the least time that parts of groups can give
LONG, LONG_CAUSAL, SHORTEST = 2048, 8192, 512  # keys from which on three consumers are faster than two, and four
TALL = 256  # queries of a task of four
MANY_ROUNDS, MOST_WASTE = 4, 1.1  # where there are four: of tasks, and queries computed to queries
MAX_SUMS = 256  # columns of dK and dV together of one consumer's keys
LAST_ROUNDS = 2  # of causal tasks, in which heads are mixed so that all blocks end together


@dataclass(frozen=True)
class Config:
    """Knobs of `AttentionForward`: keys of a block (a multiple of 16), consumer warpgroups (64 queries each), whether they take turns and of which kind, slots
    of the rings (None: as many as fit), thread blocks a multiprocessor, columns of its results that a consumer stages at a time (None: all), whether blocks
    draw causal tasks, longest first, or have fixed ones, and these in another order than it follows from that."""

    cols: int = 128
    consumers: int = 2
    ordered: bool = True
    long_turns: bool = False
    stages: int | None = None
    blocks_per_sm: int = 1
    panel: int | None = None
    drawn: bool = True
    order: tk.Order | None = None

    def knobs(self, causal: bool) -> dict[str, Any]:
        """What the template takes."""
        dealt = deal(causal, self.drawn) if self.order is None else dict(order=self.order)
        return dict(cols=self.cols, consumers=self.consumers, ordered=self.ordered, long_turns=self.long_turns, stages=self.stages,
                    blocks_per_sm=self.blocks_per_sm, panel=self.panel, **dealt)


def deal(causal: bool, drawn: bool = True) -> dict[str, Any]:
    """Knobs of a template that say how tasks are dealt to blocks. `drawn`: have blocks more than one task each?

    Causal tasks differ in length. Blocks draw them, those of as few heads at a time as keep all blocks busy, so that L2 holds their operands and sums, the
    longest first. On the H200 that was 1.5 to 5 % faster than pairs of a long and a short task of a head in equal rounds, of which the last was half empty,
    for a forward of 16 K tokens, 2 to 6 % for its backward, 5 to 15 % for the deterministic one (`bench/results/attention_variants.json`).
    """
    if not causal:
        return dict(order=tk.ColumnMajor())
    return dict(order=tk.LongestFirst(LAST_ROUNDS), schedule=tk.Dynamic()) if drawn else dict(order=tk.LongestFirst())


def consumers_for(queries: int, keys: int, heads: int, slots: int, causal: bool, window: bool, softcap: bool, itemsize: int) -> int:
    """How many consumers suit a forward of `heads` (of all batches) at dimension 64 on so many multiprocessors; two at other dimensions.

    The exponentials take as long as the products there, and the more consumers there are the better one's run under the other's products. But tiles of 192
    queries waste the more the shorter sequences are and the more of a tile the causal mask hides, and four consumers, whose registers leave room for blocks of
    64 keys, have more of everything but products to do for a key. On the H200 three were 6 to 8 % faster than two from 2,048 keys on, causal 1 % at 8,192,
    4 % at 16,384 and 7 % slower at 4,096; four 3 % faster at 512 and 1,024 (`bench/results/attention_variants.json`).
    """
    if window or itemsize == 1:  # of bytes P takes more registers than three consumers leave
        return 2
    if keys >= (LONG_CAUSAL if causal else LONG):
        return 3
    tiles = -(-queries // TALL)  # of a head
    many = tiles * heads >= MANY_ROUNDS * slots and tiles * TALL <= MOST_WASTE * queries
    return 4 if many and keys >= SHORTEST and not (causal or softcap) else 2


@functools.lru_cache(maxsize=None)
def choose(make: Callable[..., tk.lcf], kind: tuple[Any, ...], head_dim: int, value_dim: int, consumers: int = 2, drawn: bool = False) -> tk.lcf:
    """The forward template, of those that `make(*kind, config)` makes, where `kind` begins with dtype, dimensions, causal. `consumers`: see `consumers_for`;
    `drawn`: have blocks more than one task each?

    Measured on the H200 (`bench/results/attention.json`): at dimension 64 long turns, which keep two consumers from waiting for the same unit, were worth 8 %,
    for three consumers 1 % under a causal mask. At 128 short turns were up to 5 % better, and two slots with results beside them up to 9 % better than three
    under them.
    """
    wide, causal = max(head_dim, value_dim), kind[3]
    cols = 128 if wide <= 128 else 64
    config = Config(drawn=drawn)
    if wide <= 64:
        config = replace(config, consumers=consumers, long_turns=causal or consumers == 2)
        cols = 64 if consumers == 4 else cols

    def beside(config: Config) -> tk.lcf:
        template = make(*kind, config)
        if template.placement(90).over_ring is None:
            return template
        with contextlib.suppress(tk.TileError):
            smaller = make(*kind, replace(config, stages=2))
            if smaller.placement(90).over_ring is None:
                return smaller
        return template

    return fitting(beside, [replace(config, cols=c) for c in (cols, cols // 2)])


def choose_backward(
    make_queries: Callable[[int], tk.lcf], make_keys: Callable[[int, bool, bool], tk.lcf], head_dim: int, value_dim: int,
) -> tuple[tk.lcf, tuple[tk.lcf, ...]]:  # fmt: skip
    """(the pass for dQ, the passes for dK and dV), of templates made for a number of consumers and which of dK and dV: both where the sums of 64 keys by both
    dimensions, half of that in registers of a thread, leave room for the scores."""
    parts = ((True, True),) if head_dim + value_dim <= MAX_SUMS else ((True, False), (False, True))

    def of_part(part: tuple[bool, bool]) -> tk.lcf:
        return fitting(lambda consumers: make_keys(consumers, *part), (2, 1))

    return fitting(make_queries, (2, 1)), tuple(of_part(part) for part in parts)


def choose_fused(make: Callable[[int, int], tk.lcf], head_dim: int, value_dim: int) -> tk.lcf | None:
    """The single pass for dQ, dK and dV, of templates made for a padded dimension and the queries of a block; None where two passes do less: for dimensions
    that differ, are far below 64, or whose sums do not fit into registers."""
    if head_dim != value_dim or not SMALLEST_FUSED <= head_dim <= 128:
        return None
    return make(64, 128) if head_dim <= 64 else make(128, 64)


def worth_sums(head_dim: int, keys: int, causal: bool) -> bool:
    """Is a single pass faster than two? Making zeros of the sums of dQ, and dQ of them, costs it as much as two products with few keys cost the others; and two
    passes, whose results need no L2, gain more by tasks that blocks draw. Measured on the H200: at dimension 64 from 256 keys on, causal from 1,024, at 128
    from 1,024 and 4,096 (`bench/results/attention_variants.json`)."""
    padded = 64 if head_dim <= 64 else 128
    return keys >= padded**2 // (4 if causal else 16)


@functools.lru_cache
def parts_of_group(units: int, group: int, slots: int, drawn: bool = False) -> int:
    """In how many parts a group's query heads are dealt out for dK and dV: as few as fill so many multiprocessors, or nearly, where whole groups are so many
    units of work, which come in whole rounds unless blocks draw them. What it costs are results of each part, in the operands' type, and their sum (16 causal
    heads in 4 groups, 4,096 tokens, dimension 128, on the H200: 361 µs in two parts, 575 by whole groups; `bench/results/attention_variants.json`)."""
    rounds = {parts: max(1, units * parts / slots if drawn else -(-units * parts // slots)) / parts for parts in range(1, group + 1) if group % parts == 0}
    return next(parts for parts in rounds if rounds[parts] <= ENOUGH_ROUNDS * min(rounds.values()))


def fitting(make: Callable[[C], tk.lcf], options: Sequence[C]) -> tk.lcf:
    """The template of the first option whose tiles fit into shared memory, or of the last."""
    for option in options[:-1]:
        with contextlib.suppress(tk.TileError):
            template = make(option)
            template.placement(90)
            return template
    return make(options[-1])
