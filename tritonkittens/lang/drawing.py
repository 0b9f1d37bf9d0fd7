"""Tasks that blocks draw when they need one (`Dynamic`): the producer of a block takes the next number from a counter in global memory and tells the block's
other roles, a task ahead of them. With a role aside, in which blocks may wait for others, they draw their first task, too: whoever has a task then
runs, and so does, or has done, whoever has a smaller number. Else a block begins with the task of its own number, without a wait.

The counters, of numbers drawn and of blocks that are done, are zero before a launch and zero again after it. Source: FlashAttention-3 (Shah et al., 2024), its
dynamic persistent tile scheduler.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import barrier as ptx_barrier
from tritonkittens.inline_ptx import shared as ptx_shared
from tritonkittens.lang._backend import Trace, op
from tritonkittens.lang.consumers import WARPS
from tritonkittens.lang.shared import allocate_pieces
from tritonkittens.lang.sync import arrive, new_semaphores, wait
from tritonkittens.lang.types import sv

SLOTS = tl.constexpr(2)  # numbers that the producer is ahead at most
COUNTERS = 2
NUMBERS = 16  # room for, the shortest vector
BYTES = 4 * NUMBERS


def new_numbers(t: Trace, T: Any) -> dict[str, Any]:
    """What the producer tells the other roles, and the semaphores by which they know."""
    numbers = allocate_pieces(t, sv(tl.int32, NUMBERS), None, "numbers of tasks")
    numbers._set_name(t.builder, "numbers")
    hearers = T.consumers * WARPS + T.warps_aside + T.follows
    return {"numbers": numbers, "told": new_semaphores(t, SLOTS.value, T.producer_warps), "heard": new_semaphores(t, SLOTS.value, hearers)}


@op
def _place(t: Trace, memory: Any, slot: Any) -> Any:
    return t.method(t.call(ptx_shared.address, memory.numbers.pieces[0]), "__add__", t.method(slot, "__mul__", 4))


@triton.jit
def draw(ctx):
    """The number of the next task that nobody has."""
    number = tl.atomic_add(ctx.counters, 1, sem="relaxed", scope="gpu")
    DRAWN: tl.constexpr = ctx.config.draws_first  # are first tasks, too?
    return number if DRAWN else number + tl.num_programs(0)


@triton.jit
def tell(memory, number, nth):
    """Tell the others the `nth` number that this block drew."""
    slot = nth % SLOTS
    wait(memory.heard[slot], ((nth // SLOTS) & 1) ^ 1)
    ptx_shared.store(_place(memory, slot), number, tl.int32)
    arrive(memory.told[slot], per="warp")


@triton.jit
def hear(memory, nth):
    """What the producer told."""
    slot = nth % SLOTS
    wait(memory.told[slot], (nth // SLOTS) & 1)
    number = ptx_shared.load(_place(memory, slot), tl.int32)
    ptx_barrier.syncwarp()  # one lane arrives for all, which must have read
    arrive(memory.heard[slot], per="warp")
    return number


@triton.jit
def draw_no_more(ctx):
    """This block draws no more; the last one leaves the counters as it found them."""
    if tl.atomic_add(ctx.counters + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(ctx.counters, 0)
        tl.store(ctx.counters + 1, 0)
