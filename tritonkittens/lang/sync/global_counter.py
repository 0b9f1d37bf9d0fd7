"""Counters in global memory, by which blocks tell each other what is done.

A block that waits must be sure that those it waits for run, or have run, else it may wait forever: not all blocks of a grid need be on the device at once. Of
tasks that blocks draw, a template's with hook `follow`, those with smaller numbers do.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import memory as ptx_memory
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.sync.semaphores import WAIT_LIMIT_NS, role_thread, sync


@triton.jit
def _add_one(counter, thread):
    if thread == 0:
        ptx_memory.red_add(counter, 1, "s32", "release", "gpu")


@triton.jit
def _wait_or_trap(counter, number, LIMIT: tl.constexpr):
    if not tl.atomic_poll(counter, number, sem="acquire", scope="gpu", timeout_ns=LIMIT):
        asm("trap;", "", [])


def check_counter(t: Trace, name: str, counter: Any) -> None:
    """Refuse what is no pointer to int32, and architectures without proxies."""
    t.require_explicit(name)
    t.require(f"{name} (fence.proxy.async)", "tma")
    kind = getattr(unwrap(counter), "type", unwrap(counter))
    if kind != tl.pointer_type(tl.int32):
        raise TileError(f"{name} of {kind}: a counter is a pointer to int32 in global memory")


@op
def count_up(t: Trace, counter: Any) -> Any:
    """Add one to a counter, a pointer to int32 in global memory, behind all that this role's threads have written, and what its stores by TMA have that were
    waited for (`store_wait`). Source: PTX ISA, red.release, fence.proxy.async."""
    check_counter(t, "count_up", counter)
    t.call(ptx_tma.fence_proxy_async, "global")
    t.call(sync)
    t.call(_add_one, counter, role_thread(t))


@op
def wait_count(t: Trace, counter: Any, number: Any) -> Any:
    """Wait until a counter, a pointer to int32 in global memory, is `number`: what was written before it was counted up to that is then visible, also to
    copies. In debug mode a wait of more than two seconds ends the launch with an error. Source: PTX ISA, ld.acquire, fence.proxy.async."""
    check_counter(t, "wait_count", counter)
    if t.builder.options.debug:
        t.call(_wait_or_trap, counter, number, WAIT_LIMIT_NS)
    else:
        t.call(tl.atomic_poll, counter, unwrap(number), sem="acquire", scope="gpu")
    t.call(ptx_tma.fence_proxy_async, "global")


__all__ = ["count_up", "wait_count"]
