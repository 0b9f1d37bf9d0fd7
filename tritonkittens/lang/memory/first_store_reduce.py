"""Reductions of several thread blocks into global memory that is not initialised: the first block stores, the others
add.

An int32 word in global memory holds the state of each sum: zero, claimed or stored. The first block claims the sum,
stores its part and publishes it. A block that finds the sum claimed waits until it is stored.
The claiming block does not wait for others between claim and publication. So no circle of waits exists, in whatever order and
on however few multiprocessors the blocks run.
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

CLAIMED, STORED = tl.constexpr(1), tl.constexpr(2)
POLL_NS = 500  # shortest time of one poll of a word


def _check_word(t: Trace, name: str, word: Traced) -> None:
    """Refuse anything but a pointer to int32, and architectures without an asynchronous proxy."""
    t.require_explicit(name)
    t.require(f"{name} (fence.proxy.async)", "tma")
    kind = getattr(unwrap(word), "type", unwrap(word))
    if kind != tl.pointer_type(tl.int32):
        raise TileError(f"{name} of {kind}: a word of sums is a pointer to int32 in global memory")


@triton.jit
def _await_stored(word, seen, POLLS: tl.constexpr):
    polls = 0
    while seen != STORED:
        seen = ptx_memory.load_acquire(word, "gpu")
        if POLLS is not None:
            polls += 1
            if polls == POLLS:
                asm("trap;", "", [])


@triton.jit
def _are_stored(word):
    stored = ptx_memory.load_acquire(word, "gpu") == STORED
    ptx_tma.fence_proxy_async("global")
    return stored


@op
def are_stored(t: Trace, word: Traced) -> Traced:
    """Return whether the sums of `word` are stored, so that copies may add to them.

    `word` is a pointer to int32; see `store_or_add_bytes_async`. Raises `TileError` for another pointer. Source: PTX
    ISA, ld.acquire, fence.proxy.async.
    """
    _check_word(t, "are_stored", word)
    return t.call(_are_stored, word)


@triton.jit
def _store_or_add(pointer, src, nbytes, word, stored, KIND: tl.constexpr, POLLS: tl.constexpr, thread):
    first = thread < 0
    if thread == 0:
        if stored:
            ptx_tma.reduce_bulk(pointer, src, nbytes, "add", KIND, issuer="thread")
        else:
            seen = ptx_memory.atom_cas(word, 0, CLAIMED, "acquire")
            first = seen == 0
            if first:
                ptx_tma.store_bulk(pointer, src, nbytes, issuer="thread")
            else:
                _await_stored(word, seen, POLLS)
                ptx_tma.fence_proxy_async("global")
                ptx_tma.reduce_bulk(pointer, src, nbytes, "add", KIND, issuer="thread")
    return first


@op
def store_or_add_bytes_async(t: Trace, pointer: Traced, src: Traced, word: Traced, nbytes: Traced = None, stored: Traced = False) -> Traced:
    """Start a bulk copy of a shared vector to sums in global memory: the first block stores, later blocks add.

    The copy is committed as a group; see `store_add_bytes_async`. Call `publish` right after this function, without
    any other wait between them.

    Args:
        pointer: the sums, consecutive numbers in global memory.
        src: a shared vector (fp32, bf16, fp16) whose length is a power of two.
        word: a pointer to an int32 in global memory, zero at first: the state of these sums.
        nbytes: a multiple of 16; None for the whole vector.
        stored: the result of `are_stored`, if known. It saves one L2 access.

    Returns:
        Whether this role is the first, for `publish`.

    In debug mode, a wait of more than two seconds ends the launch with an error. Source: PTX ISA, atom.acquire.
    """
    kind = bulk_sum_type(src, "store_or_add_bytes_async")
    _check_word(t, "store_or_add_bytes_async", word)
    polls = WAIT_LIMIT_NS // POLL_NS if t.builder.options.debug else None
    ((piece, target, count),) = bulk_pieces(t, src, pointer, nbytes, "store_or_add_bytes_async")
    first = t.call(_store_or_add, target, piece, t.scalar(count), word, stored, kind, tl.constexpr(polls), role_thread(t))
    t.call(ptx_tma.commit_group)
    return first


@triton.jit
def _publish(word, first):
    if first:
        ptx_tma.wait_group(0)
        ptx_tma.fence_proxy_async("global")
        ptx_memory.store_release(word, STORED)


@op
def publish(t: Trace, word: Traced, first: Traced) -> None:
    """If this role is the `first` to store a sum, wait until its store is complete, and let other blocks add.

    `word` and `first` are those of `store_or_add_bytes_async`. Source: PTX ISA, st.release, fence.proxy.async.
    """
    _check_word(t, "publish", word)
    t.call(_publish, word, first)


__all__ = ["are_stored", "publish", "store_or_add_bytes_async"]
