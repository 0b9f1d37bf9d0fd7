"""Entries of tables in global memory that copies need, such as the numbers of pages: a producer has them in shared memory before it needs them.

What a thread reads from global memory comes behind what its multiprocessor has already asked for: 1,000 to 2,000 cycles later where copies take all bandwidth
(decoding with attention on the H200), even of lines that it has read before. So the entries of a block's first iterations are read before its first copy, the
others a window of them ahead, by copies that no register waits for (cp.async).
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.arch import WARP
from tritonkittens.lang.core.backend import Trace, async_copy, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.memory.global_access import load_scalar
from tritonkittens.lang.memory.shared_tiles import allocate_pieces
from tritonkittens.lang.memory.tma import load_async_wait
from tritonkittens.lang.types.tiles import sv

WINDOW = WARP  # entries that are read at a time, one by each lane
MOST_ENTRIES = WINDOW // 2  # of an iteration: the first window has what is loaded before the roles begin
OWN = tl.constexpr(2)  # windows of a producer: one that it uses, one under way


def new_windows(t: Trace, T: Any) -> dict[str, Any]:
    """The windows of a template whose iterations have entries."""
    number = OWN.value * (1 + T.lagged_producer)
    return {"windows": allocate_pieces(t, sv(tl.int32, WINDOW), number, f"entries of tables, {number} windows of {WINDOW}")}


def iterations_of_window(plan: Any) -> int:
    """Iterations whose entries a window holds, 0 where they have none."""
    return WINDOW // plan.page_indices if plan.page_indices else 0


@triton.jit
def window_of(number, PRODUCER: tl.constexpr):
    """Where a producer has window number `number` of a unit."""
    return OWN * PRODUCER + number % OWN


@op
def ask_entries(t: Trace, ctx: Any, memory: Any, window: Any) -> Any:
    """Start reading the entries from iteration `ctx.iter` on into a window."""
    n = t.call(gl.arange, 0, WINDOW, gl.BlockedLayout([1], [WARP], [t.num_warps], [0]))
    config = type(unwrap(ctx.config))
    pointers = t.call(config.entry, ctx, n)
    found = (pointers.type.scalar, pointers.shape) if isinstance(pointers, tl.tensor) else pointers
    if found != (tl.pointer_type(tl.int32), n.shape):
        raise TileError(f"{config.__name__}.entry must return pointers to int32, one for each of its numbers, got {getattr(pointers, 'type', pointers)!r}")
    t.call(async_copy.async_load, t.call(memory.windows.__getitem__, window).pieces[0], pointers)
    t.call(async_copy.commit_group)


@op
def await_entries(t: Trace) -> Any:
    """Wait for the windows that this role has asked for."""
    t.call(load_async_wait, 0)


@op
def with_entries(t: Trace, ctx: Any, memory: Any, window: Any, nth: Any) -> Any:
    """The context of the iteration that is number `nth` of a window, with its entries."""
    vector, number = t.call(memory.windows.__getitem__, window), unwrap(ctx.config)._plan.entries
    first = t.method(t.scalar(nth), "__mul__", number)
    return struct(**{**ctx.fields, "entries": tl.tuple([t.call(load_scalar, vector, t.method(first, "__add__", k)) for k in range(number)])})
