"""Work tiles that one role broadcasts to the other roles of a CTA.

With a dynamic schedule, the producer fetches the next task number (`Dynamic`: from a counter in global memory) and
broadcasts it one task ahead. With `broadcast_tile` it broadcasts the whole work tile; otherwise each role calls `setup`
with the number. A CTA begins with the task of its own number, without a wait.

With `broadcast_tile`, a CTA's first work tile is broadcast too if the loads before the roles begin need it.
Otherwise each role's `setup` would read memory after those loads, and wait for them.

The two counters of `Dynamic` (tasks fetched, CTAs done) are zero before a launch and zero again after it. Source:
FlashAttention-3 (Shah et al., 2024), dynamic persistent tile scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import triton
import triton.language as tl

from tritonkittens.inline_ptx import barrier as ptx_barrier
from tritonkittens.inline_ptx import shared as ptx_shared
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import numbers_of, struct
from tritonkittens.lang.memory.shared_tiles import allocate_pieces
from tritonkittens.lang.schedule.tile_scheduler import Schedule
from tritonkittens.lang.sync.semaphores import arrive, new_semaphores, wait
from tritonkittens.lang.types.tiles import sv

SLOTS = tl.constexpr(2)  # the most tasks by which the producer is ahead
NUMBERS = 32  # the most numbers of a task
BYTES = 4 * NUMBERS * SLOTS.value


@dataclass(frozen=True)
class Dynamic(Schedule):
    """A persistent grid whose CTAs fetch their next task from a counter in global memory.

    It fits tasks of unequal length, the longest first: all CTAs then end at nearly the same time. A task's epilogue
    overlaps with the next task's loads. The CTA and the time of a task change from run to run.
    """

    dynamic: ClassVar[bool] = True
    counters: ClassVar[int] = 2
    may_have_one_tile_per_block: ClassVar[bool] = False
    alone: ClassVar[str] = "a thread block fetches one task for all its consumers"

    def blocks(self, work_tiles: int, slots: int) -> int:
        return min(work_tiles, slots)

    def fetch(self, t: Trace, ctx: Traced, memory: Traced, nth: Traced) -> Traced:
        return t.call(_fetch_from_counter, ctx)

    def end(self, t: Trace, ctx: Traced) -> None:
        t.call(_count_as_done, ctx)


def tile_broadcast_memory(t: Trace, T: Traced) -> dict[str, Traced]:
    """Allocate the shared memory for broadcast work tiles, and for a dynamic schedule its full and empty barriers.

    Other schedules broadcast only the first work tile, before the roles begin.
    """
    numbers = allocate_pieces(t, sv(tl.int32, NUMBERS * (SLOTS.value if T.dynamic else 1)), None, "numbers of tasks")
    numbers._set_name(t.builder, "numbers")
    if not T.dynamic:
        return {"numbers": numbers}
    receivers = T.consumers * WARPS + T.extension_warps + T.lagged_producer + T.has_mma_warp(t.arch)
    return {
        **T.schedule.memory(t, T.cluster),
        "numbers": numbers,
        "tile_full": new_semaphores(t, SLOTS.value, 1),
        "tile_empty": new_semaphores(t, SLOTS.value, receivers),
    }


@op
def numbered(t: Trace, number: Traced) -> Traced:
    """The number of a task as a record, from which each receiver computes the work tile."""
    return struct(number=t.scalar(number))


@op
def _place(t: Trace, memory: Traced, slot: Traced) -> Traced:
    return t.method(
        t.call(ptx_shared.address, memory.numbers.pieces[0]),
        "__add__",
        t.method(t.scalar(slot), "__mul__", 4 * NUMBERS),
    )


@op
def _write(t: Trace, place: Traced, task: Traced) -> None:
    numbers = list(numbers_of(task))
    if len(numbers) > NUMBERS or any(n.dtype not in (tl.int1, tl.int32) for n in numbers):
        raise TileError(
            f"tk.task of {len(numbers)} numbers, {', '.join(sorted({str(n.dtype) for n in numbers}))}: a broadcast "
            f"task has at most {NUMBERS}, truth values or int32"
        )
    for i, number in enumerate(numbers):
        t.call(ptx_shared.store, t.method(place, "__add__", 4 * i), t.method(number, "to", tl.int32), tl.int32)


@op
def _read(t: Trace, place: Traced, task: Traced) -> Traced:
    numbers = list(numbers_of(task))
    read = [t.call(ptx_shared.load, t.method(place, "__add__", 4 * i), tl.int32) for i in range(len(numbers))]
    received, _ = task.type._unflatten_ir(
        [t.method(new, "to", old.dtype).handle for new, old in zip(read, numbers, strict=True)], 0
    )
    return received


@op
def fetch_next(t: Trace, ctx: Traced, memory: Traced, nth: Traced) -> Traced:
    """The number of the CTA's next task, its `nth` fetched one."""
    return unwrap(ctx.config).schedule.fetch(t, ctx, memory, nth)


@op
def fetch_no_more(t: Trace, ctx: Traced) -> None:
    """The CTA's producer has fetched its last task."""
    unwrap(ctx.config).schedule.end(t, ctx)


@triton.jit
def _fetch_from_counter(ctx):
    """Fetch the number of the next task from the counter."""
    return tl.atomic_add(ctx.counters, 1, sem="relaxed", scope="gpu") + tl.num_programs(0)


@triton.jit
def broadcast(memory, tile, nth):
    """Send the `nth` fetched work tile to the other roles."""
    slot = nth % SLOTS
    wait(memory.tile_empty[slot], ((nth // SLOTS) & 1) ^ 1)
    _write(_place(memory, slot), tile)
    arrive(memory.tile_full[slot], per="warp")


@triton.jit
def receive(memory, tile, nth):
    """Return the `nth` work tile that the producer broadcasts: a record with the fields of `tile`, whose own numbers
    are unused.
    """
    slot = nth % SLOTS
    wait(memory.tile_full[slot], (nth // SLOTS) & 1)
    received = _read(_place(memory, slot), tile)
    ptx_barrier.syncwarp()  # all lanes must have read before one lane arrives for them
    arrive(memory.tile_empty[slot], per="warp")
    return received


@triton.jit
def broadcast_first(memory, tile):
    """Write the CTA's first work tile, before the roles begin."""
    _write(_place(memory, 0), tile)


@triton.jit
def receive_first(memory, tile):
    """Return the CTA's first work tile: a record with the fields of `tile`, whose own numbers are unused."""
    return _read(_place(memory, 0), tile)


@triton.jit
def _count_as_done(ctx):
    """Count this CTA as done. The last CTA resets the counters."""
    if tl.atomic_add(ctx.counters + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(ctx.counters, 0)
        tl.store(ctx.counters + 1, 0)
