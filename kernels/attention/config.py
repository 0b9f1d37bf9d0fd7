"""How the attention kernels are configured: from the head dimensions, the masks and how many tasks there are."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.forward import lines_of_keys
from tritonkittens.lang.template.renamed import refuse_old

C = TypeVar("C")
Fused = TypeVar("Fused", bound=tk.lcf)
SMALLEST_FUSED = 48  # dimension: padded to 64, 5 products are fewer than 7 of it
ENOUGH_ROUNDS = 1.15  # of the least time that parts of groups can give
SHORTEST, MEDIUM, LONG, LONGEST = 512, 1024, 2048, 8192  # keys that `suited` knows as limits
TALL, TALL_OF_THREE = 256, 192  # queries of a task of four consumers, of three
WIDEST = 160  # columns of results that leave registers for the scores of 128 keys
MANY_ROUNDS, MOST_WASTE = 4, 1.1  # where there are four: of tasks, and queries computed to queries
MAX_SUMS = 256  # columns of dK and dV together of one consumer's keys
LAST_ROUNDS = 2  # of causal tasks, in which heads are mixed so that all blocks end together


@dataclass(frozen=True)
class Config:
    """Knobs of `AttentionForward`: keys of a block (a multiple of 16), consumer warpgroups (64 queries each), whether they take turns and of which kind, slots
    of the rings (None: as many as fit), thread blocks a multiprocessor, columns of its results that a consumer stages at a time (None: all), whether blocks
    draw causal tasks, longest first, or have fixed ones, and these in another order than it follows from that."""

    tile_n: int = 128
    consumers: int = 2
    warp_scheduler_barrier: bool = True
    long_turns: bool = False
    stages: int | None = None
    blocks_per_sm: int = 1
    epilogue_n: int | None = None
    dynamic: bool = True
    order: tk.Order | None = None

    def __new__(cls, *values: Any, **fields: Any) -> Config:
        refuse_old("Config", "configuration", fields)
        return super().__new__(cls)

    def knobs(self, causal: bool) -> dict[str, Any]:
        """What the template takes."""
        schedule = schedule_knobs(causal, self.dynamic) if self.order is None else dict(order=self.order)
        return dict(tile_n=self.tile_n, consumers=self.consumers, warp_scheduler_barrier=self.warp_scheduler_barrier, long_turns=self.long_turns,
                    stages=self.stages, blocks_per_sm=self.blocks_per_sm, epilogue_n=self.epilogue_n, **schedule)


def schedule_knobs(causal: bool, dynamic: bool = True) -> dict[str, Any]:
    """Knobs of a template for the order of tasks and who computes them. `dynamic`: have blocks more than one task each?

    Causal tasks differ in length. Blocks fetch them, the longest first, those of as few heads at a time as keep all blocks busy, so that L2 holds their
    operands and sums. Pairs of a long and a short task in equal rounds leave the last round half empty (measured: docs/notes/attention_forward.md).
    """
    if not causal:
        return dict(order=tk.ColumnMajor())
    return dict(order=tk.LongestFirst(LAST_ROUNDS), schedule=tk.Dynamic()) if dynamic else dict(order=tk.LongestFirst())


class Shape(NamedTuple):
    """What a forward computes; `heads` are those of all batches. Of packed sequences `keys` are those of the longest, and `queries` those of one on average."""

    head_dim: int
    value_dim: int
    itemsize: int
    queries: int
    keys: int
    heads: int
    causal: bool
    window: bool
    softcap: bool
    packed: bool = False

    @property
    def whole_lines(self) -> bool:
        """May a block have any number of keys?"""
        return lines_of_keys(self.head_dim, self.itemsize) > 0

    @property
    def epilogue_n(self) -> int:
        """Columns of results that leave at a time where all of them would need too much memory."""
        return min(64, self.value_dim & -self.value_dim)


def least(keys: int, cost: dict[int, float]) -> int:
    """The keys of a block for which so many cost least, where a key costs more or less with so many a block: those behind the last cost as much."""
    return min(cost, key=lambda cols: -(-keys // cols) * cols * cost[cols])


def suited(shape: Shape, slots: int) -> tuple[Config, ...]:
    """Configurations for so many multiprocessors, the best first; the others are for tiles that do not fit.

    Measured: docs/notes/attention_forward.md. The reasons:

    - Dimension 64: the exponentials take as long as the products, and the more consumers there are the better one's run under the others' products. But tiles
      of 192 queries waste the more the shorter sequences are, and four consumers, whose registers leave room for blocks of 64 keys, have more of everything but
      products to do for a key: they are for short sequences. Under a causal mask short sequences are begin and end of tasks, and half of the diagonal, which
      three blocks a multiprocessor of one consumer each hide for each other. Two are for what has not been measured with more: windows, long packed sequences
      under a causal mask. Long turns keep two from waiting for the same unit.
    - Dimension 128: two slots with results beside them are better than three under them, and blocks of 128 keys than of 176: their largest scores need not be
      known. Long turns are better as often as worse.
    - Above: results in panels need no slot's memory, so that at 192 and 128 for values blocks of 128 keys fit.
    - Bytes: taller blocks, since a key costs less of everything but products there; long turns at 128.
    """
    wide = max(shape.head_dim, shape.value_dim)
    found = _above_128(shape) if wide > 128 else _above_64(shape) if wide > 64 else _up_to_64(shape, slots)
    return tuple(replace(c, dynamic=shape.heads * -(-shape.queries // (64 * c.consumers)) > slots * c.blocks_per_sm) for c in found)


def _above_128(shape: Shape) -> list[Config]:
    cols = [128] if shape.value_dim <= WIDEST else []
    if shape.itemsize == 1:
        cols = [least(shape.keys, {64: 1.08, 96: 1.0})] if shape.whole_lines else []
    return [Config(tile_n=c, epilogue_n=shape.epilogue_n) for c in (*cols, 64, 32)]


def _above_64(shape: Shape) -> list[Config]:
    best, smaller = Config(long_turns=shape.itemsize == 1), Config(tile_n=64)
    if shape.itemsize == 1 and shape.whole_lines and not (shape.window or shape.packed):
        if not shape.causal:
            best = replace(best, tile_n=least(shape.keys, {128: 1.1, 192: 1.015, 224: 1.0}))
        elif shape.keys >= LONGEST:
            best = Config(tile_n=192)
    return [best, smaller]


def _up_to_64(shape: Shape, slots: int) -> list[Config]:
    best, keys, of_bytes = Config(long_turns=True), shape.keys, shape.itemsize == 1
    if shape.window:
        return [best]
    if shape.causal:
        if keys < (LONG if of_bytes else LONGEST):
            return [Config(tile_n=64, consumers=1, blocks_per_sm=3, warp_scheduler_barrier=False)]
        if of_bytes:
            return [replace(best, tile_n=256 if keys >= LONGEST and shape.whole_lines else 128)]
        return [best if shape.packed or shape.queries < TALL_OF_THREE else Config(consumers=3)]
    if of_bytes:
        return [replace(best, tile_n=256 if keys >= MEDIUM else 128)]
    if shape.packed:
        return [replace(best, consumers=3 if keys >= MEDIUM and shape.queries >= 2 * TALL_OF_THREE else 2)]
    if keys >= LONG and shape.queries >= TALL_OF_THREE:
        return [Config(consumers=3)]
    tiles = -(-shape.queries // TALL)  # of a head
    many = tiles * shape.heads >= MANY_ROUNDS * slots and tiles * TALL <= MOST_WASTE * shape.queries
    return [Config(tile_n=64, consumers=4) if many and keys >= SHORTEST and not shape.softcap else best]


@functools.lru_cache(maxsize=4096)
def choose(make: Callable[..., tk.lcf], kind: tuple[Any, ...], shape: Shape, slots: int) -> tk.lcf:
    """The forward template, of those that `make(*kind, config)` makes, for a shape on so many multiprocessors."""
    return _first_that_fits(make, kind, suited(shape, slots))


@functools.lru_cache(maxsize=None)
def _first_that_fits(make: Callable[..., tk.lcf], kind: tuple[Any, ...], configs: Sequence[Config]) -> tk.lcf:
    """Of the first of `configs` whose tiles fit; with as many slots as leave room for results beside them, if that is two."""

    def beside(config: Config) -> tk.lcf:
        template = make(*kind, config)
        if template.placement(90).over_ring is None:
            return template
        with contextlib.suppress(tk.TileError):
            smaller = make(*kind, replace(config, stages=2))
            if smaller.placement(90).over_ring is None:
                return smaller
        return template

    return fitting(beside, configs)


def choose_backward(
    queries: type[tk.lcf], keys: type[tk.lcf], head_dim: int, value_dim: int, **knobs: Any,
) -> tuple[tk.lcf, tuple[tk.lcf, ...]]:  # fmt: skip
    """(the pass for dQ, the passes for dK and dV), of templates with these knobs: dK and dV in one where the sums of 64 keys by both dimensions, half of that
    in registers of a thread, leave room for the scores."""
    knobs |= dict(head_dim=head_dim, value_dim=value_dim)
    parts = ((True, True),) if head_dim + value_dim <= MAX_SUMS else ((True, False), (False, True))

    def of_part(of_keys: bool, of_values: bool) -> tk.lcf:
        return fitting(lambda consumers: keys(consumers=consumers, of_keys=of_keys, of_values=of_values, **knobs), (2, 1))

    return fitting(lambda consumers: queries(consumers=consumers, **knobs), (2, 1)), tuple(of_part(*part) for part in parts)


def choose_fused(template: type[Fused], head_dim: int, value_dim: int, **knobs: Any) -> Fused | None:
    """The single pass for dQ, dK and dV, of a template with these knobs, for a padded dimension; None where two passes do less: for dimensions that differ, are
    far below 64, or whose sums do not fit into registers."""
    if head_dim != value_dim or not SMALLEST_FUSED <= head_dim <= 128:
        return None
    # Queries of a block, and columns that have sums
    dim, cols, summed = (64, 128, 64) if head_dim <= 64 else (128, 64, 96 if head_dim <= 96 else 128)
    return template(head_dim=dim, value_dim=dim, tile_n=cols, summed=summed, **knobs)


def worth_sums(head_dim: int, keys: int, causal: bool) -> bool:
    """Is a single pass faster than two? Sums of dQ, and dQ of them, cost it as much as two products with few keys cost the others; and two passes, whose
    results need no L2, gain more by tasks that blocks draw: a causal mask and dimension 128 each double the keys that it takes (measured:
    docs/notes/attention_backward.md)."""
    return keys >= 256 * 2 ** ((head_dim > 64) + causal)


@functools.lru_cache
def parts_of_group(units: int, group: int, slots: int, dynamic: bool = False, at_once: float = 0.0) -> int:
    """In how many parts a group's query heads are dealt out for dK and dV: as few as fill so many multiprocessors, or nearly, where whole groups are so many
    units of work, which come in whole rounds unless blocks draw them; and as leave what blocks read and write at the same time in L2, of whose bytes it is
    `at_once` for whole groups. What it costs are sums in fp32, or, of two passes, results of each part and their sum (measured:
    docs/notes/attention_backward.md).
    """
    rounds = {parts: max(1, units * parts / slots if dynamic else -(-units * parts // slots)) / parts for parts in range(1, group + 1) if group % parts == 0}
    return next((parts for parts in rounds if at_once <= parts and rounds[parts] <= ENOUGH_ROUNDS * min(rounds.values())), group)


def fitting(make: Callable[[C], tk.lcf], options: Sequence[C]) -> tk.lcf:
    """The template of the first option whose tiles fit into shared memory, or of the last."""
    for option in options[:-1]:
        with contextlib.suppress(tk.TileError):
            template = make(option)
            template.placement(90)
            return template
    return make(options[-1])
