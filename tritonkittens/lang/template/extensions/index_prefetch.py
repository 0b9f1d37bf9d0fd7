"""Indices from tables in global memory that copies need, such as page numbers: a producer has them in shared memory
before it needs them.

A thread's read of global memory queues behind what its SM has already requested. So the indices of a CTA's
first iterations are read before its first copy, the others one window ahead, by copies that no register waits for
(cp.async). Measured: docs/notes/attention_decode.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import triton
import triton.language as tl

from tritonkittens.arch import WARP
from tritonkittens.lang.core.backend import Trace, Traced, async_copy, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.memory.global_access import load_scalar
from tritonkittens.lang.memory.shared_tiles import allocate_pieces
from tritonkittens.lang.memory.tma import load_async_wait
from tritonkittens.lang.template.contexts import at_iteration, extended
from tritonkittens.lang.template.extension import Extension
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.hook_table import PRODUCER, Hook
from tritonkittens.lang.types.tiles import sv

WINDOW = WARP  # indices that are read at a time, one by each lane
MOST_INDICES = WINDOW // 2  # of an iteration: the first window holds those of all loads before the roles begin
OWN = tl.constexpr(2)  # windows of a producer: one in use, one in flight


@op
def iterations_of_window(t: Trace, T: Traced) -> Traced:
    """Iterations whose indices a window holds."""
    return tl.constexpr(WINDOW // unwrap(T)._plan.page_indices)


@triton.jit
def _window(number, PART: tl.constexpr):
    """Where a producer keeps window number `number` of a task."""
    return OWN * PART + number % OWN


@op
def _read_indices(t: Trace, ctx: Traced, memory: Traced, window: Traced) -> Traced:
    """Start reading the indices from iteration `ctx.iter` on into a window."""
    n = t.call(gl.arange, 0, WINDOW, gl.BlockedLayout([1], [WARP], [t.num_warps], [0]))
    config = type(unwrap(ctx.config))
    pointers = t.call(config.page_index, ctx, n)
    found = (pointers.type.scalar, pointers.shape) if isinstance(pointers, tl.tensor) else pointers
    if found != (tl.pointer_type(tl.int32), n.shape):
        raise TileError(
            f"{config.__name__}.page_index must return pointers to int32, one for each of its numbers, "
            f"got {getattr(pointers, 'type', pointers)!r}"
        ).of(config.page_index)
    t.call(async_copy.async_load, t.call(memory.windows.__getitem__, window).pieces[0], pointers)
    t.call(async_copy.commit_group)


@op
def _wait_for_windows(t: Trace) -> Traced:
    """Wait for the windows that this role has started to read."""
    t.call(load_async_wait, 0)


@op
def _with_indices(t: Trace, ctx: Traced, memory: Traced, window: Traced, nth: Traced) -> Traced:
    """The context of iteration `nth` of a window, with its indices."""
    vector, number = t.call(memory.windows.__getitem__, window), unwrap(ctx.config)._plan.page_indices
    first = t.method(t.scalar(nth), "__mul__", number)
    indices = tl.tuple([t.call(load_scalar, vector, t.method(first, "__add__", k)) for k in range(number)])
    return struct(**{**ctx.fields, "page_indices": indices})


@triton.jit
def _read_window(whole, memory, number, PART: tl.constexpr, T: tl.constexpr):
    """Start reading window number `number` of a task, where there is one."""
    WINDOW: tl.constexpr = iterations_of_window(T)
    if number * WINDOW < whole.count:
        _read_indices(at_iteration(whole, whole.begin + number * WINDOW), memory, _window(number, PART))


@triton.jit
def _block_begins(ctx, tile, memory, T: tl.constexpr):
    """The CTA's first window of each producer is in flight while the barriers are made."""
    if tile.is_valid:
        for part in tl.static_range(1 + T.lagged_producer):
            _read_window(extended(ctx, tile), memory, 0, part, T)


@triton.jit
def _task_begins(whole, memory, turn, PART: tl.constexpr, T: tl.constexpr):
    """Read a task's first window, except of the CTA's first task, and start the second."""
    EARLY: tl.constexpr = facts(T).early_stages
    if EARLY == 0 or not T.one_tile_per_block:
        if EARLY == 0 or turn > 0:
            _read_window(whole, memory, 0, PART, T)
            _wait_for_windows()
    _read_window(whole, memory, 1, PART, T)


@triton.jit
def _iteration_begins(i, T: tl.constexpr):
    """Wait for the iteration's window; the first was waited for."""
    WINDOW: tl.constexpr = iterations_of_window(T)
    if (i > 0) and (i % WINDOW == 0):
        _wait_for_windows()


@triton.jit
def _iteration(here, memory, i, PART: tl.constexpr, T: tl.constexpr):
    WINDOW: tl.constexpr = iterations_of_window(T)
    return _with_indices(here, memory, _window(i // WINDOW, PART), i % WINDOW)


@triton.jit
def _iteration_ends(whole, memory, i, PART: tl.constexpr, T: tl.constexpr):
    """After the first iteration of a window nobody reads the previous one: the next takes its place."""
    WINDOW: tl.constexpr = iterations_of_window(T)
    if (i > 0) and (i % WINDOW == 0):
        _read_window(whole, memory, i // WINDOW + 1, PART, T)


class IndexPrefetch(Extension):
    """Reads indices from tables in global memory ahead of the iterations that need them, such as page numbers.

    The layout's `page_indices` says how many int32 the copies of an iteration need. Hook `page_index` returns their
    addresses, and `load` and `load_lagged` read them as `ctx.page_indices[k]`. If a hook read an index
    itself, the read would queue behind the copies in flight."""

    added_hooks: ClassVar[tuple[Hook, ...]] = (
        Hook(
            "page_index",
            PRODUCER,
            "ahead of the iterations",
            ("ctx", "n"),
            "pointers to int32",
            "Returns the addresses of the indices with the numbers `n`, a vector of int32. Number n is index "
            "n % `page_indices` of iteration `ctx.iter` + n // `page_indices`. Each address must be valid, also for "
            "iterations after the last.",
            "page_indices",
        ),
    )
    added_fields: ClassVar[tuple[str, ...]] = ("page_indices",)
    points: ClassVar[dict[str, Callable[..., Any]]] = dict(
        block_begins=_block_begins,
        early_loads_begin=_wait_for_windows,
        producer_task_begins=_task_begins,
        producer_iteration_begins=_iteration_begins,
        producer_iteration=_iteration,
        producer_iteration_ends=_iteration_ends,
    )

    @staticmethod
    def check_template(T: Any) -> None:
        number = T._plan.page_indices
        if not isinstance(number, int) or not 1 <= number <= MOST_INDICES:
            raise T._error(
                f"its layout has page_indices={number!r}; with tk.IndexPrefetch an iteration has 1 to {MOST_INDICES}"
            )

    @staticmethod
    def added_memory(t: Trace, T: Traced) -> dict[str, Traced]:
        number = OWN.value * (1 + T.lagged_producer)
        return {"windows": allocate_pieces(t, sv(tl.int32, WINDOW), number, f"indices, {number} windows of {WINDOW}")}

    @staticmethod
    def explained_lines(T: Any, arch: int) -> list[str]:
        return [f"  {T._plan.page_indices} indices an iteration, read ahead, {WINDOW} at a time"]
