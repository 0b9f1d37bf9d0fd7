"""Products into tensor memory: tcgen05, with B in shared memory and A there or in tensor memory; and when they are
complete."""

from __future__ import annotations

from typing import NamedTuple

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
    if not isinstance(a, (shared, tensor_tile)):
        raise TileError(f"{name}: A is {describe(a)}; tcgen05 reads A from shared or tensor memory: store it first")
    if a.dtype == tl.int8:
        t.require(f"{name} of int8 into tensor memory (tcgen05, kind::i8)", "tcgen05_int8")
    if acc.pair:
        return _multiply_pair(t, product, arrived)
    if isinstance(a, tensor_tile) and (arrived or not wait):
        bill().reads_tensor_a = True
    done = [bar.barrier(t) for bar in arrived]
    adds = adds_to(product)
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


class PairOperands(NamedTuple):
    """The shared tiles that one CTA of a pair has of A and B, as the tensor cores read them."""

    a: ptx_wgmma.Operand
    b: ptx_wgmma.Operand
    starts: tuple[Traced, Traced]  # matrix descriptors

    @classmethod
    def of(cls, t: Trace, product: Product, piece_a: Traced, piece_b: Traced) -> PairOperands:
        a = ptx_wgmma.shared_operand(piece_a, 0 if product.transposed[0] else 1)
        b = ptx_wgmma.shared_operand(piece_b, 1 if product.transposed[1] else 0)
        starts = [
            t.call(ptx_tcgen05.shared_descriptor, piece, *operand.strides, operand.swizzle)
            for piece, operand in ((piece_a, a), (piece_b, b))
        ]
        return cls(a, b, (starts[0], starts[1]))

    @property
    def steps(self) -> int:
        """The MMAs that multiply all of K."""
        return self.a.k * self.a.element_bytes // STEP_BYTES

    def at(self, t: Trace, step: int) -> list[Traced]:
        """The matrix descriptors of an MMA's A and B."""
        return [
            t.call(_forward, start, tl.constexpr(x.offset(step) >> 4))
            for x, start in zip((self.a, self.b), self.starts, strict=True)
        ]


def adds_to(product: Product) -> Traced:
    """Whether the first MMA of a product adds to the accumulator."""
    acc = product.acc
    return acc.counts if acc.is_completed_by_template and unwrap(product.add) is True else product.add


def check_pair(product: Product) -> None:
    """Raise `TileError` for tiles that no CTA pair multiplies."""
    a, b, acc = product.a_stored, product.b_stored, product.acc
    loaded = all(isinstance(x, shared) and x.pair == "own" for x in (a, *product.scales))
    if not loaded or b.pair not in ("rows", "cols") or len(acc.pieces) != 1:
        raise TileError(
            f"{product.name} of a CTA pair: A is this CTA's rows and B its half of the columns, these and scales are "
            f"loaded by the pair, and the columns a power of two; A is {describe(a)}, B {describe(b)}, the accumulator "
            f"{acc.spec!r}"
        )


def complete_pair(t: Trace, product: Product, arrived: tuple[semaphore, ...]) -> tensor_tile:
    """Return the accumulator of a pair's products. They complete on each of `arrived` in both CTAs."""
    for bar in arrived:
        _commit(t, bar, PAIR)
    acc = product.acc
    return acc.counting(t.scalar(True)) if acc.is_completed_by_template else acc


def _multiply_pair(t: Trace, product: Product, arrived: tuple[semaphore, ...]) -> tensor_tile:
    """Compute the product of a CTA pair, in the CTA of even rank, which reads both CTAs' rows of A and columns of B.
    The compiler's own MMA takes a pair for one program."""
    check_pair(product)
    adds, kind = adds_to(product), KINDS.get(product.a.dtype, "f8f6f4")
    for pieces in zip(product.a_stored.pieces, product.b_stored.pieces, strict=True):
        operands = PairOperands.of(t, product, *pieces)
        instruction = ptx_tcgen05.instruction_descriptor(
            kind,
            2 * operands.a.extent,
            2 * operands.b.extent,
            operands.a.type,
            operands.b.type,
            d="s32" if kind == "i8" else "f32",
            trans_a=not operands.a.k_major,
            trans_b=not operands.b.k_major,
            ctas=2,
        )
        for step in range(operands.steps):
            t.call(
                ptx_tcgen05.mma,
                product.acc.pieces[0],
                *operands.at(t, step),
                t.scalar(instruction),
                kind=tl.constexpr(kind),
                accumulate=t.method(t.scalar(adds), "to", tl.int32),
                issuer=tl.constexpr("warp"),
                ctas=tl.constexpr(2),
            )
            adds = True
    return complete_pair(t, product, arrived)


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
