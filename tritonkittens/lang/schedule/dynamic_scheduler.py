"""Tasks that one role tells the others of a block.

Those that blocks draw when they need one (`Dynamic`): the producer of a block takes the next number from a counter in global memory and tells the block's other
roles, a task ahead of them: its number, or, where `broadcast_tile`, the task itself, which consumers otherwise work out when nothing else is left to do.
A block begins with the task of its own number, without a wait.

Where `broadcast_tile`, also a task that a block begins with, if it was worked out for what is loaded before the roles begin: what hook `setup` reads from memory
each of them would wait for again, behind those copies.

The counters, of numbers drawn and of blocks that are done, are zero before a launch and zero again after it. Source: FlashAttention-3 (Shah et al., 2024), its
dynamic persistent tile scheduler.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from tritonkittens.inline_ptx import barrier as ptx_barrier
from tritonkittens.inline_ptx import shared as ptx_shared
from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import WARPS
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import numbers_of, struct
from tritonkittens.lang.memory.shared_tiles import allocate_pieces
from tritonkittens.lang.schedule.tile_scheduler import Schedule
from tritonkittens.lang.sync.semaphores import arrive, new_semaphores, wait
from tritonkittens.lang.types.tiles import sv

SLOTS = tl.constexpr(2)  # tasks that the producer is ahead at most
COUNTERS = 2
NUMBERS = 32  # of a task, at most
BYTES = 4 * NUMBERS * SLOTS.value


@dataclass(frozen=True)
class Dynamic(Schedule):
    """As many blocks as run at once, each taking the next task when it needs one: for tasks of unequal length, the longest first, so that all blocks end at
    nearly the same time. What a task ends with overlaps with the loads of the next. Which block does a task, and so when, changes from run to run.
    """

    dynamic: ClassVar[bool] = True
    may_have_one_tile_per_block: ClassVar[bool] = False
    alone: ClassVar[str] = "a block draws its tasks alone, one for all its consumers"

    def blocks(self, units: int, slots: int) -> int:
        return min(units, slots)


def new_numbers(t: Trace, T: Any) -> dict[str, Any]:
    """What the producer tells the other roles, and the semaphores by which they know. Where blocks draw nothing, they are told one task before they begin."""
    numbers = allocate_pieces(t, sv(tl.int32, NUMBERS * (SLOTS.value if T.dynamic else 1)), None, "numbers of tasks")
    numbers._set_name(t.builder, "numbers")
    if not T.dynamic:
        return {"numbers": numbers}
    hearers = T.consumers * WARPS + T.senders + T.lagged_producer
    return {"numbers": numbers, "told": new_semaphores(t, SLOTS.value, 1), "heard": new_semaphores(t, SLOTS.value, hearers)}


@op
def numbered(t: Trace, number: Any) -> Any:
    """The number of a task, of which those who hear of it work out the task."""
    return struct(number=t.scalar(number))


@op
def _place(t: Trace, memory: Any, slot: Any) -> Any:
    return t.method(t.call(ptx_shared.address, memory.numbers.pieces[0]), "__add__", t.method(t.scalar(slot), "__mul__", 4 * NUMBERS))


@op
def _write(t: Trace, place: Any, task: Any) -> None:
    numbers = list(numbers_of(task))
    if len(numbers) > NUMBERS or any(n.dtype not in (tl.int1, tl.int32) for n in numbers):
        raise TileError(f"tk.task of {len(numbers)} numbers, {', '.join(sorted({str(n.dtype) for n in numbers}))}: tasks that blocks draw have at most "
                        f"{NUMBERS}, truth values or int32")
    for i, number in enumerate(numbers):
        t.call(ptx_shared.store, t.method(place, "__add__", 4 * i), t.method(number, "to", tl.int32), tl.int32)


@op
def _read(t: Trace, place: Any, task: Any) -> Any:
    numbers = list(numbers_of(task))
    told = [t.call(ptx_shared.load, t.method(place, "__add__", 4 * i), tl.int32) for i in range(len(numbers))]
    heard, _ = task.type._unflatten_ir([t.method(new, "to", old.dtype).handle for new, old in zip(told, numbers, strict=True)], 0)
    return heard


@triton.jit
def draw(ctx):
    """The number of the next task that nobody has."""
    return tl.atomic_add(ctx.counters, 1, sem="relaxed", scope="gpu") + tl.num_programs(0)


@triton.jit
def tell(memory, task, nth):
    """Tell the others the `nth` task that this block drew."""
    slot = nth % SLOTS
    wait(memory.heard[slot], ((nth // SLOTS) & 1) ^ 1)
    _write(_place(memory, slot), task)
    arrive(memory.told[slot], per="warp")


@triton.jit
def hear(memory, task, nth):
    """What the producer told: a task of the same fields as `task`, whose numbers nobody needs."""
    slot = nth % SLOTS
    wait(memory.told[slot], (nth // SLOTS) & 1)
    heard = _read(_place(memory, slot), task)
    ptx_barrier.syncwarp()  # one lane arrives for all, which must have read
    arrive(memory.heard[slot], per="warp")
    return heard


@triton.jit
def tell_first(memory, task):
    """Tell the roles, which have not begun, the block's first task."""
    _write(_place(memory, 0), task)


@triton.jit
def hear_first(memory, task):
    """What was told: a task of the same fields as `task`, whose numbers nobody needs."""
    return _read(_place(memory, 0), task)


@triton.jit
def draw_no_more(ctx):
    """This block draws no more; the last one leaves the counters as it found them."""
    if tl.atomic_add(ctx.counters + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(ctx.counters, 0)
        tl.store(ctx.counters + 1, 0)
