"""Products into tensor memory: tcgen05, with B in shared memory and A there or in tensor memory."""

from __future__ import annotations

import triton.language as tl

from tritonkittens.lang.core.backend import Trace, gl, mbarrier, tcgen05_commit, tcgen05_mma
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma.operands import Product, check_depth, describe, grid
from tritonkittens.lang.sync.semaphores import semaphore


def multiply(t: Trace, product: Product, wait: bool, arrived: semaphore | None) -> tensor_tile:
    """Compute the product into its accumulator in tensor memory. It completes on `arrived`, or with `wait` before
    this returns."""
    name, a, b, acc = product.name, product.a, product.b, product.acc
    if a.dtype == tl.float32:
        check_depth(product, "tcgen05")
    t.require(f"{name} into tensor memory (tcgen05)", "tcgen05")
    if not isinstance(b, shared):
        raise TileError(f"{name}: B is {describe(b)}; tcgen05 reads B from shared memory: store it to an st first")
    if not isinstance(a, (shared, tensor_tile)):
        raise TileError(f"{name}: A is {describe(a)}; tcgen05 reads A from shared or tensor memory: store it first")
    if a.dtype == tl.int8:
        t.require(f"{name} of int8 into tensor memory (tcgen05, kind::i8)", "tcgen05_int8")
    done = arrived.barrier(t) if arrived is not None else None
    pieces_a, pieces_b = grid(a), grid(b)
    depth = len(pieces_a[0])
    for j, piece in enumerate(acc.pieces):
        for k in range(depth):
            is_last = j == len(acc.pieces) - 1 and k == depth - 1
            barriers = [done] if done is not None and is_last else None
            t.call(tcgen05_mma, pieces_a[0][k], pieces_b[k][j], piece, use_acc=product.add or k > 0, mbarriers=barriers)
    if arrived is None and wait:
        finish(t)
    return acc


def finish(t: Trace) -> None:
    """Wait for all products into tensor memory that this role has issued.

    The tensor-core unit has no wait instruction, so a temporary semaphore does it.
    """
    done = t.call(gl.allocate_shared_memory, tl.int64, [1], mbarrier.MBarrierLayout())
    t.call(mbarrier.init, done, 1)
    t.call(tcgen05_commit, done)
    t.call(mbarrier.wait, done, 0)
    t.call(mbarrier.invalidate, done)
