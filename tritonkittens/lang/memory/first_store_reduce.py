"""Reduction into global memory that starts without zeros: the first CTA stores its values, the others add theirs.

An int32 word in global memory holds the state of each buffer: 0 (empty), `INITIALIZING` (one role stores),
`INITIALIZED` (others may add). A role waits only while the state is `INITIALIZING`. The role that set that state waits
for nobody before it calls `mark_initialized`. So there is no deadlock, whatever the order of the CTAs and however few
of them run at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx import memory as ptx_memory
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.memory.bulk import bulk_pieces, bulk_sum_type
from tritonkittens.lang.sync.semaphores import WAIT_LIMIT_NS, role_thread

INITIALIZING, INITIALIZED = tl.constexpr(1), tl.constexpr(2)
POLL_NS = 500  # shortest time of one poll of a word


def _check_word(t: Trace, name: str, word: Traced) -> None:
    """Raise TileError where `word` is no pointer to int32, or where the architecture has no async proxy."""
    t.require_explicit(name)
    t.require(f"{name} (fence.proxy.async)", "tma")
    kind = getattr(unwrap(word), "type", unwrap(word))
    if kind != tl.pointer_type(tl.int32):
        raise TileError(f"{name} of {kind}: a word of sums is a pointer to int32 in global memory")


@triton.jit
def _await_initialized(word, seen, POLLS: tl.constexpr):
    polls = 0
    while seen != INITIALIZED:
        seen = ptx_memory.load_acquire(word, "gpu")
        if POLLS is not None:
            polls += 1
            if polls == POLLS:
                asm("trap;", "", [])


@triton.jit
def _is_initialized(word):
    initialized = ptx_memory.load_acquire(word, "gpu") == INITIALIZED
    ptx_tma.fence_proxy_async("global")
    return initialized


@op
def is_initialized(t: Trace, word: Traced) -> Traced:
    """Whether the buffer with this `word` is initialized, so that `store_or_add_bytes_async` may add to it.

    Source: PTX ISA, ld.acquire, fence.proxy.async.
    """
    _check_word(t, "is_initialized", word)
    return t.call(_is_initialized, word)


@triton.jit
def _store_or_add(pointer, src, nbytes, word, initialized, KIND: tl.constexpr, POLLS: tl.constexpr, thread):
    first = thread < 0
    if thread == 0:
        if initialized:
            ptx_tma.reduce_bulk(pointer, src, nbytes, "add", KIND, issuer="thread")
        else:
            seen = ptx_memory.atom_cas(word, 0, INITIALIZING, "acquire")
            first = seen == 0
            if first:
                ptx_tma.store_bulk(pointer, src, nbytes, issuer="thread")
            else:
                _await_initialized(word, seen, POLLS)
                ptx_tma.fence_proxy_async("global")
                ptx_tma.reduce_bulk(pointer, src, nbytes, "add", KIND, issuer="thread")
    return first


@op
def store_or_add_bytes_async(
    t: Trace, pointer: Traced, src: Traced, word: Traced, nbytes: Traced = None, initialized: Traced = False
) -> Traced:
    """Start a bulk copy of a shared vector to the buffer at `pointer`: the first caller stores, the others add.

    An addition waits until the buffer is initialized. The copy is committed as a bulk group (see
    `store_add_bytes_async`).

    Args:
        pointer: where the buffer begins, in global memory.
        src: shared vector of fp32, bf16 or fp16.
        word: pointer to the buffer's int32 state in global memory, 0 before the first call.
        nbytes: bytes to copy; None for the whole vector.
        initialized: what `is_initialized` returned for `word`. False costs an access of L2.

    Returns `first`, which `mark_initialized` takes. Call that next, and wait for no other role in between. In debug
    mode a wait of more than two seconds ends the launch with an error. Raises TileError for another dtype or another
    word. Source: PTX ISA, atom.acquire.
    """
    kind = bulk_sum_type(src, "store_or_add_bytes_async")
    _check_word(t, "store_or_add_bytes_async", word)
    polls = WAIT_LIMIT_NS // POLL_NS if t.builder.options.debug else None
    ((piece, target, count),) = bulk_pieces(t, src, pointer, nbytes, "store_or_add_bytes_async")
    first = t.call(
        _store_or_add, target, piece, t.scalar(count), word, initialized, kind, tl.constexpr(polls), role_thread(t)
    )
    t.call(ptx_tma.commit_group)
    return first


@triton.jit
def _publish(word, first):
    if first:
        ptx_tma.wait_group(0)
        ptx_tma.fence_proxy_async("global")
        ptx_memory.store_release(word, INITIALIZED)


@op
def mark_initialized(t: Trace, word: Traced, first: Traced) -> None:
    """Wait until the store of the `first` role has arrived, and set the `word` to initialized; nothing in other roles.

    `first`: what `store_or_add_bytes_async` returned. Source: PTX ISA, st.release, fence.proxy.async.
    """
    _check_word(t, "mark_initialized", word)
    t.call(_publish, word, first)


__all__ = ["is_initialized", "mark_initialized", "store_or_add_bytes_async"]
