"""Configurations of the attention kernels, by head dimensions, masks and number of tasks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.cost_model import FORWARD, MAX_SUMS, BackwardShape, single_pass, two_passes, work
from tritonkittens.kernels.attention.device.backward import AttentionBackwardKeys, AttentionBackwardQueries
from tritonkittens.kernels.attention.device.forward import lines_of_keys
from tritonkittens.kernels.attention.device.varlen import (
    VarlenBackwardKeys,
    VarlenBackwardQueries,
    VarlenBackwardWideKeys,
    VarlenBackwardWideQueries,
)
from tritonkittens.kernels.attention.device.wide_backward import AttentionBackwardWideKeys, AttentionBackwardWideQueries
from tritonkittens.lang.template.renamed import refuse_old

C = TypeVar("C")
Fused = TypeVar("Fused", bound=tk.lcf)
MIN_FUSED_DIM = 32  # of the single pass, which pads it to 64
NEAR_BEST = 1.05  # time that is near enough to that of the best number of parts of a group
SHORTEST, MEDIUM, LONG, LONGEST = 512, 1024, 2048, 8192  # keys at which `suited` changes
TALL_OF_THREE = 192  # queries of a task of three consumers
WIDEST, WIDER = 160, 192  # columns of O that leave registers for the scores of 128 and of 96 keys
WIDEST_OF_THREE = 96  # columns of O that leave registers for three CTAs an SM
NARROW = 32  # columns of O that leave registers for a fourth CTA an SM
KEYS_OF_DQ = (64, 32)  # keys of a block of the wide kernel for dQ: the first of which two stages fit
LAST_WAVES = 2  # of causal tasks: heads are mixed in these, so that all CTAs end together


@dataclass(frozen=True)
class Config:
    """Knobs of `AttentionForward`.

    Args:
        tile_n: keys of a block, a multiple of 16.
        consumers: warpgroups, with 64 queries each.
        warp_scheduler_barrier: consumers issue their MMAs in turns.
        long_turns: a turn ends when the scores are there, instead of when their product is issued.
        stages: of the rings of K and V; None: as many as fit.
        blocks_per_sm: CTAs of an SM.
        epilogue_n: columns of O that a consumer stages at a time; None: all.
        dynamic: CTAs fetch causal tasks, longest first.
        order: raster order of the tasks; None: chosen.
    """

    tile_n: int = 128
    consumers: int = 2
    warp_scheduler_barrier: bool = True
    long_turns: bool = False
    stages: int | None = None
    blocks_per_sm: int = 1
    epilogue_n: int | None = None
    dynamic: bool = True
    order: tk.Order | None = None

    def __new__(cls, *values: object, **fields: object) -> Config:
        refuse_old("Config", "configuration", fields)
        return super().__new__(cls)

    def knobs(self, causal: bool) -> dict[str, Any]:
        """Knobs of the template."""
        schedule = schedule_knobs(causal, self.dynamic) if self.order is None else dict(order=self.order)
        return dict(
            tile_n=self.tile_n,
            consumers=self.consumers,
            warp_scheduler_barrier=self.warp_scheduler_barrier,
            long_turns=self.long_turns,
            stages=self.stages,
            blocks_per_sm=self.blocks_per_sm,
            epilogue_n=self.epilogue_n,
            **schedule,
        )


def schedule_knobs(causal: bool, dynamic: bool = True) -> dict[str, Any]:
    """Order and schedule of a template. `dynamic`: CTAs have more than one task each.

    Causal tasks differ in length: CTAs fetch them, longest first. As few heads as keep all CTAs busy run at a time, so
    that L2 holds their operands and gradients. Pairs of a long and a short task would leave the last wave half empty
    (measured: docs/notes/attention_forward.md).
    """
    if not causal:
        return dict(order=tk.ColumnMajor())
    return dict(order=tk.LongestFirst(LAST_WAVES), schedule=tk.Dynamic()) if dynamic else dict(order=tk.LongestFirst())


class Shape(NamedTuple):
    """What a forward computes.

    Args:
        queries, keys: lengths. Varlen: keys of the longest sequence, queries of a mean one.
        heads: of all batches.
        window: keys that a query sees (before, after) its own, `None` for any number or with `causal`.
    """

    head_dim: int
    value_dim: int
    itemsize: int
    queries: int
    keys: int
    heads: int
    causal: bool
    window: tuple[int, int] | None
    softcap: bool
    varlen: bool = False

    @property
    def features(self) -> tuple[bool, bool, bool]:
        """(causal, window, soft-cap): constants of the kernel."""
        return self.causal, self.window is not None, self.softcap

    @property
    def widest(self) -> int:
        """The larger dimension."""
        return max(self.head_dim, self.value_dim)

    @property
    def whole_lines(self) -> bool:
        """Whether a block may have any number of keys."""
        return lines_of_keys(self.head_dim, self.itemsize) > 0

    @property
    def is_modelled(self) -> bool:
        """Whether `time_of` has constants for this kind of shape."""
        return self.itemsize > 1 and not self.varlen

    @property
    def epilogue_n(self) -> int:
        """Columns of O that are staged at a time, where all of them would not fit."""
        return min(64, self.value_dim & -self.value_dim)


def least(keys: int, cost: dict[int, float]) -> int:
    """The keys of a block with the least cost for a sequence of `keys`.

    `cost`: relative cost of a key, by keys of a block. The last block costs as much as a full one.
    """
    return min(cost, key=lambda cols: -(-keys // cols) * cols * cost[cols])


def suited(shape: Shape, slots: int) -> tuple[Config, ...]:
    """Configurations for `slots` SMs, the best first. Where the tiles of one do not fit, the next one is used.

    Measured: docs/notes/attention_forward.md. `ForwardPace` sorts the configurations of a shape that `is_modelled`.

    - Few tasks: one consumer a CTA, because more CTAs share the work.
    - Dimension 64: exponentials take as long as the MMAs. With more consumers on an SM, more exponentials overlap MMAs.
      Short sequences have several CTAs an SM of one consumer each, so that the start and end of one overlap the other.
      Long sequences have three consumers in one CTA. The last tile of 192 queries wastes more in a short sequence.
      Sequences in between have four consumers. These leave registers for blocks of 64 keys only, which cost more
      instructions a key. Windows of varlen or fp8 and long causal varlen sequences have two consumers, the only number
      measured. Long turns keep both from waiting for the same unit.
    - Dimension 128: two stages beside the epilogue tiles are faster than three stages that share memory with them.
      Blocks of 128 keys are faster than 176, because kernels with 128 are `lazy` (`AttentionForward`).
    - Above 64: three consumers make fewer tasks. They are faster only where these fill fewer waves.
    - Above 128: O is staged some columns at a time. This leaves room for blocks of 128 keys at dimensions 192 and 128.
      Registers hold no larger blocks than 96 keys above 160, and no larger ones than 48 for two CTAs an SM.
    - fp8: blocks of more keys, because a key costs fewer instructions in them; long turns at dimension 128.
    """
    wide = shape.widest
    found = _above_128(shape) if wide > 128 else _above_64(shape) if wide > 64 else _up_to_64(shape)
    if shape.is_modelled:
        found = sorted(found, key=lambda config: time_of(config, shape, slots))
    return tuple(
        replace(c, dynamic=shape.heads * -(-shape.queries // (64 * c.consumers)) > slots * c.blocks_per_sm)
        for c in found
    )


def time_of(config: Config, shape: Shape, slots: int) -> float:
    """Microseconds of a forward on `slots` SMs, for a shape that `is_modelled`; see `ForwardPace`."""
    rows, cols, every = 64 * config.consumers, config.tile_n, shape.queries + shape.keys
    before, after = shape.window or (every, 0 if shape.causal else every)
    found = work(shape.heads, shape.queries, shape.keys, rows, cols, before, after)
    return FORWARD.time(
        found,
        slots,
        (shape.head_dim + shape.value_dim) / 2,
        consumers=config.consumers,
        keys=cols,
        blocks_per_sm=config.blocks_per_sm,
        fetched=shape.causal,
    )


def _above_128(shape: Shape) -> list[Config]:
    cols = [128] if shape.value_dim <= WIDEST else []
    if shape.is_modelled:
        if WIDEST < shape.value_dim <= WIDER and shape.whole_lines:
            cols = [96]
        found = [*(Config(tile_n=c) for c in (*cols, 64)), _one_consumer(64, 1)]
        if shape.value_dim <= WIDEST and shape.whole_lines and not shape.causal:
            found.append(_one_consumer(48, 2))
    else:
        if shape.itemsize == 1:
            cols = [least(shape.keys, {64: 1.08, 96: 1.0})] if shape.whole_lines else []
        found = [Config(tile_n=c) for c in (*cols, 64, 32)]
    return [replace(config, epilogue_n=shape.epilogue_n) for config in found]


def _one_consumer(tile_n: int, blocks_per_sm: int) -> Config:
    return Config(tile_n=tile_n, consumers=1, blocks_per_sm=blocks_per_sm, warp_scheduler_barrier=False)


def _above_64(shape: Shape) -> list[Config]:
    best, smaller = Config(long_turns=shape.itemsize == 1), Config(tile_n=64)
    if shape.is_modelled:
        found = [best, smaller, _one_consumer(128, 1)]
        if not shape.causal:
            found.append(_one_consumer(64, 2))
        if not shape.window:
            found.append(Config(tile_n=64, consumers=3))
        if not (shape.causal or shape.window) and shape.keys < SHORTEST and shape.widest <= WIDEST_OF_THREE:
            found.append(_one_consumer(64, 3))
        return found
    if shape.itemsize == 1 and shape.whole_lines and not (shape.window or shape.varlen):
        if not shape.causal:
            best = replace(best, tile_n=least(shape.keys, {128: 1.1, 192: 1.015, 224: 1.0}))
        elif shape.keys >= LONGEST:
            best = Config(tile_n=192)
    return [best, smaller]


def _up_to_64(shape: Shape) -> list[Config]:
    best, keys = Config(long_turns=True), shape.keys
    short = _one_consumer(64, 4 if shape.value_dim <= NARROW and keys < SHORTEST and not shape.causal else 3)
    if shape.window and not shape.is_modelled:
        return [best]
    if shape.itemsize == 1:
        if shape.causal and keys < LONG:
            return [short]
        tall = keys >= (LONGEST if shape.causal else MEDIUM) and (shape.whole_lines or not shape.causal)
        return [replace(best, tile_n=256 if tall else 128)]
    if shape.varlen:
        if shape.causal and keys < LONGEST:
            return [short]
        three = not shape.causal and keys >= MEDIUM and shape.queries >= 2 * TALL_OF_THREE
        return [replace(best, consumers=3 if three else 2)]
    if shape.causal or shape.window:
        return [short, _one_consumer(128, 1), *([Config(consumers=3)] if shape.causal else [])]
    four = SHORTEST <= keys < LONG and not shape.softcap
    return [short, _one_consumer(128, 2), Config(consumers=3), *([Config(tile_n=64, consumers=4)] if four else [])]


@functools.lru_cache(maxsize=4096)
def choose(make: Callable[..., tk.lcf], kind: tuple[Any, ...], shape: Shape, slots: int) -> tk.lcf:
    """The forward kernel for a shape on so many SMs, among those that `make(*kind, config)` makes."""
    return _first_that_fits(make, kind, suited(shape, slots))


@functools.lru_cache(maxsize=None)
def _first_that_fits(make: Callable[..., tk.lcf], kind: tuple[Any, ...], configs: Sequence[Config]) -> tk.lcf:
    """The kernel of the first configuration that fits; with two stages where the epilogue's tiles then lie beside the
    ring."""

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


class BackwardKind(NamedTuple):
    """The knobs that all kernels of a backward share: the operands' dtype and dimensions, and what scores become."""

    dtype: tl.dtype
    head_dim: int
    value_dim: int
    causal: bool
    window: bool
    softcap: bool

    @property
    def wide(self) -> bool:
        """Whether dK and dV of one consumer's 64 keys exceed its registers."""
        return self.head_dim + self.value_dim > MAX_SUMS


# for dQ, and for dK and dV: by whether sequences are packed and `BackwardKind.wide`
TWO_PASSES: dict[tuple[bool, bool], tuple[type[tk.lcf], type[tk.lcf]]] = {
    (False, False): (AttentionBackwardQueries, AttentionBackwardKeys),
    (False, True): (AttentionBackwardWideQueries, AttentionBackwardWideKeys),
    (True, False): (VarlenBackwardQueries, VarlenBackwardKeys),
    (True, True): (VarlenBackwardWideQueries, VarlenBackwardWideKeys),
}


@functools.lru_cache
def choose_backward(
    kind: BackwardKind, launch_pdl: tuple[bool | str, bool | str] = (False, False), *, varlen: bool, **knobs: Any
) -> tuple[tk.lcf, tk.lcf]:
    """The kernels of the backward in two passes: (for dQ, for dK and dV).

    Args:
        kind: knobs of both kernels, like `knobs`.
        launch_pdl: that knob of each kernel.
        varlen: sequences are packed end to end.
    """
    knobs |= kind._asdict()
    of_queries, of_keys = (
        functools.partial(template, launch_pdl=pdl, **knobs)
        for template, pdl in zip(TWO_PASSES[varlen, kind.wide], launch_pdl, strict=True)
    )
    if kind.wide:
        large, small = (of_queries(tile_n=cols) for cols in KEYS_OF_DQ)
        return large if large.placement(90).stages > 1 else small, of_keys()
    return fitting(lambda n: of_queries(consumers=n), (2, 1)), fitting(lambda n: of_keys(consumers=n), (2, 1))


def has_single_pass(head_dim: int, value_dim: int) -> bool:
    """Whether `choose_fused` has a kernel for these dimensions.

    Two passes do less work where dimensions differ or are below 32. Above 128, accumulators do not fit into registers.
    """
    return head_dim == value_dim and MIN_FUSED_DIM <= head_dim <= 128


def choose_fused(template: type[Fused], kind: BackwardKind, **knobs: Any) -> Fused:
    """The kernel of the backward in a single pass, for a padded dimension, of a template with more `knobs`."""
    # Padded dimension, queries of a block, columns of the accumulation buffers
    dim, cols, summed = (64, 128, 64) if kind.head_dim <= 64 else (128, 64, 96 if kind.head_dim <= 96 else 128)
    return template(**kind._replace(head_dim=dim, value_dim=dim)._asdict(), tile_n=cols, summed=summed, **knobs)


def worth_sums(shape: BackwardShape, slots: int) -> bool:
    """Whether a single pass is faster than two on so many SMs (measured: docs/notes/attention_backward.md).

    Accumulating dQ in memory is worth the two extra products of two passes where tasks are long.
    """

    def least_time(time: Callable[[BackwardShape, int, int], float]) -> float:
        return min(time(shape, slots, parts) for parts in divisors(shape.group))

    return least_time(single_pass) < least_time(two_passes)


def divisors(group: int) -> list[int]:
    """The numbers of equal parts that a group of so many query heads can be split into."""
    return [parts for parts in range(1, group + 1) if group % parts == 0]


def parts_of_group(
    time: Callable[[BackwardShape, int, int], float], shape: BackwardShape, slots: int, at_once: float = 0.0
) -> int:
    """The number of parts of a group for dK and dV: the smallest whose `time` is near the least, as parts take memory.

    `at_once`: bytes that CTAs with whole groups use at a time, as a share of L2. Parts divide these bytes, so there are
    at least `at_once` parts.
    """
    enough = [parts for parts in divisors(shape.group) if at_once <= parts] or [shape.group]
    times = {parts: time(shape, slots, parts) for parts in enough}
    return next(parts for parts in times if times[parts] <= NEAR_BEST * min(times.values()))


def fitting(make: Callable[[C], tk.lcf], options: Sequence[C]) -> tk.lcf:
    """The template of the first option whose tiles fit into shared memory, or of the last one."""
    for option in options[:-1]:
        with contextlib.suppress(tk.TileError):
            template = make(option)
            template.placement(90)
            return template
    return make(options[-1])
