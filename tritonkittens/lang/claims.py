"""Sums of what several blocks add, in memory that nobody has made zeros of: who claims them first stores, the others add to what it stored.

A word in global memory says of each of the sums how far they are: how often they were claimed, and, in its upper bits, whether they are stored. Who waits for
that waits for a role that has claimed them before, so nobody waits in a circle, in whatever order and on however few multiprocessors blocks run, if between
its claim and `publish` a role waits for others of its block at most for what they do behind claims that were made before its own.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import memory as ptx_memory
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang._backend import Trace, op
from tritonkittens.lang.counting import check_counter
from tritonkittens.lang.memory import bulk_pieces, bulk_sum_type
from tritonkittens.lang.sync import WAIT_LIMIT_NS, role_thread

STORED = tl.constexpr(1 << 24)  # and fewer claims than that: as many as blocks add, at most one for each tile of keys of a sequence
POLL_NS = 500  # that it takes to look at a word, at least


@triton.jit
def _claim(words, number, thread):
    before = STORED
    if thread == 0:
        before = ptx_memory.atom_add(words + number, 1, "acquire")
    return before


@op
def claim(t: Trace, words: Any, number: Any) -> Any:
    """Claim the sums whose word is `number` of `words`, pointers to int32 in global memory, zero at first: what the word was before, for
    `store_or_add_bytes_async`. It takes as long as an access of L2. Source: PTX ISA, atom.acquire."""
    check_counter(t, "claim", words)
    return t.call(_claim, words, number, role_thread(t))


@triton.jit
def _await_stored(word, before, POLLS: tl.constexpr):
    polls = 0
    while before < STORED:
        before = ptx_memory.load_acquire(word, "gpu")
        if POLLS is not None:
            polls += 1
            if polls == POLLS:
                asm("trap;", "", [])


@triton.jit
def _store_or_add(pointer, src, nbytes, word, before, KIND: tl.constexpr, POLLS: tl.constexpr, thread):
    if thread == 0:
        if before == 0:
            ptx_tma.store_bulk(pointer, src, nbytes, issuer="thread")
        else:
            _await_stored(word, before, POLLS)
            ptx_tma.fence_proxy_async("global")
            ptx_tma.reduce_bulk(pointer, src, nbytes, "add", KIND, issuer="thread")


@op
def store_or_add_bytes_async(t: Trace, pointer: Any, src: Any, words: Any, number: Any, before: Any, nbytes: Any = None) -> Any:
    """Start copying `nbytes` bytes (the whole vector if None) of a shared vector to the sums at `pointer`, where `claim` found word `number` of `words` as
    nobody had claimed them, else adding them, once they are stored: committed as a group, see `store_add_bytes_async`. Returns what `publish` is to say.

    In debug mode a wait of more than two seconds ends the launch with an error.
    """
    kind = bulk_sum_type(src, "store_or_add_bytes_async")
    polls = WAIT_LIMIT_NS // POLL_NS if t.builder.options.debug else None
    ((piece, target, count),) = bulk_pieces(t, src, pointer, nbytes, "store_or_add_bytes_async")
    t.call(_store_or_add, target, piece, t.scalar(count), t.method(words, "__add__", number), before, kind, tl.constexpr(polls), role_thread(t))
    t.call(ptx_tma.commit_group)
    return t.call(_unpublished, number, before)


@triton.jit
def _unpublished(number, before):
    return tl.where(before == 0, number, -1)


@triton.jit
def _publish(words, unpublished, thread):
    if thread == 0:
        if unpublished >= 0:
            ptx_tma.wait_group(0)
            ptx_tma.fence_proxy_async("global")
            ptx_memory.red_add(words + unpublished, STORED, "s32", "release", "gpu")


@op
def publish(t: Trace, words: Any, unpublished: Any) -> Any:
    """Where `unpublished`, what `store_or_add_bytes_async` returned, says that this role stored sums: wait until they are there, and let others add to them.
    Later is better, behind the next products, say: a store takes a microsecond. Source: PTX ISA, red.release, fence.proxy.async."""
    check_counter(t, "publish", words)
    t.call(_publish, words, unpublished, role_thread(t))


__all__ = ["claim", "publish", "store_or_add_bytes_async"]
