"""Products into tensor memory: tcgen05, with B in shared memory and A there or in tensor memory; and when they are
complete."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx import tcgen05 as ptx_tcgen05
from tritonkittens.inline_ptx import wgmma as ptx_wgmma
from tritonkittens.lang.core.backend import Trace, Traced, gl, mbarrier, op, tcgen05_commit, tcgen05_mma
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma.operands import Product, check_depth, describe, grid
from tritonkittens.lang.sync.semaphores import semaphore

COLUMNS = 256  # of B that one instruction multiplies, at most
STEP_BYTES = 32  # of K that one instruction multiplies


def multiply(t: Trace, product: Product, wait: bool, arrived: tuple[semaphore, ...]) -> tensor_tile:
    """Compute the product into its accumulator in tensor memory. It completes on each of `arrived`, or with `wait`
    before this returns. A template completes the products into its accumulators itself."""
    name, a, b, acc = product.name, product.a, product.b, product.acc
    if a.dtype == tl.float32:
        check_depth(product, "tcgen05")
    t.require(f"{name} into tensor memory (tcgen05)", "tcgen05")
    if acc.stages is not None:
        raise TileError(f"{name}: the accumulator is a ring of {acc.spec!r}; take a slot first, ring[slot]")
    widest = max(int(unwrap(piece.shape[-1])) for piece in acc.pieces)
    if widest > COLUMNS:
        raise TileError(
            f"{name}: the accumulator {acc.spec!r} has a piece of {widest} columns; tcgen05 multiplies at most "
            f"{COLUMNS} at a time: use more accumulators, of fewer columns"
        )
    if not isinstance(b, shared):
        raise TileError(f"{name}: B is {describe(b)}; tcgen05 reads B from shared memory: store it to an st first")
    if not isinstance(a, (shared, tensor_tile)):
        raise TileError(f"{name}: A is {describe(a)}; tcgen05 reads A from shared or tensor memory: store it first")
    if a.dtype == tl.int8:
        t.require(f"{name} of int8 into tensor memory (tcgen05, kind::i8)", "tcgen05_int8")
    if acc.pair:
        return _multiply_pair(t, product, arrived)
    if isinstance(a, tensor_tile) and (arrived or not wait):
        bill().reads_tensor_a = True
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
    return complete(t, acc, wait and not arrived)


def complete(t: Trace, acc: tensor_tile, wait: bool) -> tensor_tile:
    """Return the accumulator of products that have been issued. `wait`: complete they are, unless a template completes
    them itself."""
    if acc.is_completed_by_template:
        return acc.counting(t.scalar(True))
    if wait:
        finish(t)
    return acc


KINDS = {tl.bfloat16: "f16", tl.float16: "f16", tl.float32: "tf32", tl.int8: "i8"}  # others: 8-bit floats
PAIR = 0b11  # the CTAs of a cluster of two


@triton.jit
def _forward(descriptor, OFFSET: tl.constexpr):
    return descriptor + OFFSET


def _descriptor(t: Trace, piece: Traced, k_axis: int) -> tuple[ptx_wgmma.Operand, Traced]:
    """A shared piece as an operand: its description and its matrix descriptor."""
    operand = ptx_wgmma.shared_operand(piece, k_axis)
    leading, stride = operand.strides
    return operand, t.call(ptx_tcgen05.shared_descriptor, piece, leading, stride, operand.swizzle)


def _multiply_pair(t: Trace, product: Product, arrived: tuple[semaphore, ...]) -> tensor_tile:
    """Compute the product of a CTA pair, in the CTA of even rank, which reads both CTAs' rows of A and columns of B.
    The compiler's own MMA takes a pair for one program."""
    name, a, b, acc = product.name, product.a_stored, product.b_stored, product.acc
    if not isinstance(a, shared) or a.pair != "own" or b.pair not in ("rows", "cols") or len(acc.pieces) != 1:
        raise TileError(
            f"{name} of a CTA pair: A is this CTA's rows and B its half of the columns, both loaded by the pair, and "
            f"the columns a power of two; A is {describe(a)}, B {describe(b)}, the accumulator {acc.spec!r}"
        )
    adds = acc.counts if acc.is_completed_by_template and unwrap(product.add) is True else product.add
    a_axis, b_axis = (0 if product.transposed[0] else 1), (1 if product.transposed[1] else 0)
    for piece_a, piece_b in zip(a.pieces, b.pieces, strict=True):
        of_a, from_a = _descriptor(t, piece_a, a_axis)
        of_b, from_b = _descriptor(t, piece_b, b_axis)
        kind = KINDS.get(a.dtype, "f8f6f4")
        instruction = ptx_tcgen05.instruction_descriptor(
            kind,
            2 * of_a.extent,
            2 * of_b.extent,
            of_a.type,
            of_b.type,
            d="s32" if kind == "i8" else "f32",
            trans_a=not of_a.k_major,
            trans_b=not of_b.k_major,
            ctas=2,
        )
        for step in range(of_a.k * of_a.element_bytes // STEP_BYTES):
            places = [
                t.call(_forward, start, tl.constexpr(x.offset(step) >> 4))
                for x, start in ((of_a, from_a), (of_b, from_b))
            ]
            t.call(
                ptx_tcgen05.mma,
                acc.pieces[0],
                *places,
                t.scalar(instruction),
                kind=tl.constexpr(kind),
                accumulate=t.method(t.scalar(adds), "to", tl.int32),
                issuer=tl.constexpr("warp"),
                ctas=tl.constexpr(2),
            )
            adds = True
    for bar in arrived:
        _commit(t, bar, PAIR)
    return acc.counting(t.scalar(True)) if acc.is_completed_by_template else acc


def _commit(t: Trace, sem: semaphore, ctas: Traced) -> None:
    pair = 2 if bill().pairs else 1
    issuer = "warp" if t.num_warps == 1 else "warpgroup"
    t.call(ptx_tcgen05.commit, sem.barrier(t), t.scalar(ctas), issuer=tl.constexpr(issuer), ctas=tl.constexpr(pair))


@op
def mma_commit(t: Trace, sem: Traced, ctas: Traced = None) -> None:
    """Arrive once at a semaphore when all products into tensor memory that this role has issued so far are complete.
    The role does not wait.

    Args:
        sem: one semaphore.
        ctas: the CTAs of the cluster whose semaphores at the same place receive the arrival, a bit for each rank; None
            for this CTA. Of a pair, the CTA of even rank issues products and commits.

    Raises:
        TileError: for anything but one semaphore; ArchitectureError for a chip without tensor memory.

    Source: PTX ISA, tcgen05.commit.
    """
    t.require("mma_commit (tcgen05)", "tcgen05")
    if not isinstance(sem, semaphore):
        raise TileError(f"mma_commit({unwrap(sem)!r}): needs a semaphore, made by tk.semaphores")
    if ctas is None or unwrap(ctas) is None:
        t.call(tcgen05_commit, sem.barrier(t))
    else:
        _commit(t, sem, ctas)


def finish(t: Trace) -> None:
    """Wait for all products into tensor memory that this role has issued.

    The tensor-core unit has no wait instruction, so a temporary semaphore does it.
    """
    done = begin_barrier(t)
    t.call(tcgen05_commit, done)
    end_barrier(t, done)


def begin_barrier(t: Trace) -> Traced:
    """Return a barrier for one completion."""
    bill().makes_barriers = True
    done = t.call(gl.allocate_shared_memory, tl.int64, [1], mbarrier.MBarrierLayout())
    t.call(mbarrier.init, done, 1)
    return done


def end_barrier(t: Trace, done: Traced) -> None:
    """Wait for the completion, and invalidate the barrier. Loads of tensor memory then follow the products."""
    t.call(mbarrier.wait, done, 0)
    t.call(mbarrier.invalidate, done)
    t.call(ptx_tcgen05.fence_after_thread_sync)


__all__ = ["mma_commit"]
