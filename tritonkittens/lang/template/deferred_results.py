"""Packed results of the task before, which a consumer stores behind the products of this one."""
from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.template.calls import prefetch_deferred, finish_deferred, store_deferred
from tritonkittens.lang.template.facts import facts


@triton.jit
def packed_until(T: tl.constexpr):
    """The iteration in which packed results of the task before have left."""
    return facts(T).stages - 1 + facts(T).packs * facts(T).packed_every


@triton.jit
def store_packed_at(before, packed, memory, i, pending, T: tl.constexpr):
    """Behind the product of iteration i: stage one tile of the results of the task `before`, where those are pending, or do what is left to do with it, by
    code that all tiles share. The first iterations do neither: while the other consumer ends its task, for as many iterations as it was held in front of, this
    one's products are all that tensor cores have."""
    PACKS: tl.constexpr = facts(T).packs
    EVERY: tl.constexpr = facts(T).packed_every
    FIRST: tl.constexpr = facts(T).stages - 1
    if (i >= FIRST) & (i < packed_until(T)) & (pending > 0):
        step = (i - FIRST) % EVERY
        if EVERY == 1 or step == 0:
            for n in tl.static_range(PACKS):
                if i == FIRST + n * EVERY:
                    store_deferred(before, packed, memory, n)
        else:
            finish_deferred(before, memory, (i - FIRST) // EVERY, step - 1, EVERY - 1)


@triton.jit
def fill_packed_at(mine, memory, i, T: tl.constexpr):
    if i == packed_until(T):
        prefetch_deferred(mine, memory)


@triton.jit
def store_rest(before, packed, memory, i, pending, T: tl.constexpr):
    """What iterations before `i` have not stored of packed results, in front of the end of a short task."""
    for j in range(tl.maximum(i, facts(T).stages - 1), packed_until(T)):
        store_packed_at(before, packed, memory, j, pending, T)


@triton.jit
def store_last(before, packed, memory, pending, T: tl.constexpr):
    """The packed results of a block's last task: no products hide what is done with them, nor need registers."""
    PACKS: tl.constexpr = facts(T).packs
    EVERY: tl.constexpr = facts(T).packed_every
    if pending > 0:
        for tile in range(PACKS):
            for n in tl.static_range(PACKS):
                if tile == n:
                    store_deferred(before, packed, memory, n)
            if EVERY > 1:
                finish_deferred(before, memory, tile, 0, 1)
