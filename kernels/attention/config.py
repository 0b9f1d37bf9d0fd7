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
LONG = 2048  # keys
MAX_SUMS = 256  # columns of dK and dV together of one consumer's keys


@dataclass(frozen=True)
class Config:
    """Knobs of `AttentionForward`: keys of a block, consumer warpgroups (64 queries each), whether they take turns and of which kind, slots of the rings
    (None: as many as fit), whether causal tasks come in pairs of a long and a short one, the order of tasks where it is not to follow from that."""

    cols: int = 128
    consumers: int = 2
    ordered: bool = True
    long_turns: bool = False
    stages: int | None = None
    paired: bool = True
    order: tk.Order | None = None
    schedule: tk.Schedule = tk.Persistent()

    def knobs(self, causal: bool) -> dict[str, Any]:
        """What the template takes."""
        order = self.order or (tk.LongAndShort() if causal and self.paired else tk.LongestFirst() if causal else tk.ColumnMajor())
        return dict(cols=self.cols, consumers=self.consumers, ordered=self.ordered, long_turns=self.long_turns, stages=self.stages, order=order, schedule=self.schedule)


@functools.lru_cache(maxsize=None)
def choose(make: Callable[..., tk.lcf], kind: tuple[Any, ...], head_dim: int, value_dim: int, long: bool, paired: bool) -> tk.lcf:
    """The forward template, of those that `make(*kind, config)` makes. `long`: does every query see at least `LONG` keys? `paired`: have blocks more than one
    task each, so that pairs of causal ones make rounds of equal length?

    Measured on the H200 (`bench/results/attention.json`): at dimension 64 the exponentials take as long as the products, and long turns, which keep two
    consumers from waiting for the same unit, were worth 8 %; three consumers 6 % more, but their tiles of 192 queries waste too much under a causal mask and
    on short sequences. At 128 short turns were up to 5 % better, and two slots with results beside them up to 9 % better than three under them.
    """
    wide = max(head_dim, value_dim)
    config = Config(paired=paired, consumers=3 if long else 2, long_turns=not long) if wide <= 64 else Config(paired=paired)

    def beside(config: Config) -> tk.lcf:
        template = make(*kind, config)
        if template.placement(90).over_ring is None:
            return template
        with contextlib.suppress(tk.TileError):
            smaller = make(*kind, replace(config, stages=2))
            if smaller.placement(90).over_ring is None:
                return smaller
        return template

    cols = 128 if wide <= 128 else 64
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


def worth_sums(head_dim: int, keys: int) -> bool:
    """Is a single pass faster than two? Making zeros of the sums of dQ, and dQ of them, costs it as much as two products with few keys cost the others
    (measured on the H200: the same at 1,024 keys and dimension 128, and at 512 and 64)."""
    return keys > 8 * head_dim


@functools.lru_cache
def parts_of_group(units: int, group: int, slots: int) -> int:
    """In how many parts a group's query heads are dealt out for dK and dV: as few as fill so many multiprocessors, or nearly, where whole groups are so many
    units of work. What it costs are results of each part, in the operands' type, and their sum (16 causal heads in 4 groups, 4,096 tokens, dimension 128, on
    the H200: 361 µs in two parts, 575 by whole groups; `bench/results/attention_variants.json`)."""
    rounds = {parts: -(-units * parts // slots) / parts for parts in range(1, group + 1) if group % parts == 0}
    return next(parts for parts in rounds if rounds[parts] <= ENOUGH_ROUNDS * min(rounds.values()))


def fitting(make: Callable[[C], tk.lcf], options: Sequence[C]) -> tk.lcf:
    """The template of the first option whose tiles fit into shared memory, or of the last."""
    for option in options[:-1]:
        with contextlib.suppress(tk.TileError):
            template = make(option)
            template.placement(90)
            return template
    return make(options[-1])
