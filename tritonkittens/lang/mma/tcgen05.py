"""Products into tensor memory: tcgen05, with B in shared memory and A there or in tensor memory; and when they are
complete."""

from __future__ import annotations

import triton.language as tl

from tritonkittens.inline_ptx import tcgen05 as ptx_tcgen05
from tritonkittens.lang.core.backend import Trace, Traced, gl, mbarrier, op, tcgen05_commit, tcgen05_mma
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma.operands import Product, check_depth, describe, grid
from tritonkittens.lang.sync.semaphores import semaphore


def multiply(t: Trace, product: Product, wait: bool, arrived: tuple[semaphore, ...]) -> tensor_tile:
    """Compute the product into its accumulator in tensor memory. It completes on each of `arrived`, or with `wait`
    before this returns. A template completes the products into its accumulators itself."""
    name, a, b, acc = product.name, product.a, product.b, product.acc
    if a.dtype == tl.float32:
        check_depth(product, "tcgen05")
    t.require(f"{name} into tensor memory (tcgen05)", "tcgen05")
    if acc.stages is not None:
        raise TileError(f"{name}: the accumulator is a ring of {acc.spec!r}; take a slot first, ring[slot]")
    if not isinstance(b, shared):
        raise TileError(f"{name}: B is {describe(b)}; tcgen05 reads B from shared memory: store it to an st first")
    if not isinstance(a, (shared, tensor_tile)):
        raise TileError(f"{name}: A is {describe(a)}; tcgen05 reads A from shared or tensor memory: store it first")
    if a.dtype == tl.int8:
        t.require(f"{name} of int8 into tensor memory (tcgen05, kind::i8)", "tcgen05_int8")
    done = [bar.barrier(t) for bar in arrived]
    adds = acc.counts if acc.is_completed_by_template and unwrap(product.add) is True else product.add
    pieces_a, pieces_b = grid(a), grid(b)
    depth = len(pieces_a[0])
    for j, piece in enumerate(acc.pieces):
        for k in range(depth):
            is_last = j == len(acc.pieces) - 1 and k == depth - 1
            t.call(
                tcgen05_mma,
                pieces_a[0][k],
                pieces_b[k][j],
                piece,
                use_acc=adds if k == 0 else True,
                mbarriers=done if done and is_last else None,
            )
    if acc.is_completed_by_template:
        return acc.counting(t.scalar(True))
    if wait and not arrived:
        finish(t)
    return acc


@op
def mma_commit(t: Trace, sem: Traced, ctas: Traced = None) -> None:
    """Make a semaphore receive one arrival when all products into tensor memory that this role has issued so far are
    complete. The role does not wait.

    Args:
        sem: one semaphore.
        ctas: a 16-bit mask of CTAs of the cluster, whose semaphores at the same place receive the arrival instead.

    Raises:
        TileError: for anything but one semaphore; ArchitectureError for a chip without tensor memory.

    Source: PTX ISA, tcgen05.commit.
    """
    t.require("mma_commit (tcgen05)", "tcgen05")
    if not isinstance(sem, semaphore):
        raise TileError(f"mma_commit({unwrap(sem)!r}): needs a semaphore, made by tk.semaphores")
    bar = sem.barrier(t)
    if ctas is None or unwrap(ctas) is None:
        t.call(tcgen05_commit, bar)
    else:
        t.call(ptx_tcgen05.commit, bar, t.scalar(ctas), issuer="warp" if t.num_warps == 1 else "warpgroup")


def finish(t: Trace) -> None:
    """Wait for all products into tensor memory that this role has issued.

    The tensor-core unit has no wait instruction, so a temporary semaphore does it.
    """
    done = t.call(gl.allocate_shared_memory, tl.int64, [1], mbarrier.MBarrierLayout())
    t.call(mbarrier.init, done, 1)
    t.call(tcgen05_commit, done)
    t.call(mbarrier.wait, done, 0)
    t.call(mbarrier.invalidate, done)


__all__ = ["mma_commit"]
