"""Bulk copies of contiguous bytes between global and shared memory, and between the CTAs of a cluster, without a tensor
map. Source: PTX ISA, cp.async.bulk."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import BULK, unwrap
from tritonkittens.lang.core.dtypes import itemsize, names_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.memory.tma import _starts
from tritonkittens.lang.sync.semaphores import role_thread, semaphore

BULK_SUMS = {tl.float32: "f32", tl.bfloat16: "bf16", tl.float16: "f16"}  # PTX ISA, cp.reduce.async.bulk


@triton.jit
def _load_bulk(dst, pointer, nbytes, bar, thread):
    if thread == 0:
        ptx_tma.load_bulk(dst, pointer, nbytes, bar, issuer="thread")


@triton.jit
def _store_bulk(pointer, src, nbytes, thread):
    if thread == 0:
        ptx_tma.store_bulk(pointer, src, nbytes, issuer="thread")


@triton.jit
def _add_bulk(pointer, src, nbytes, KIND: tl.constexpr, thread):
    if thread == 0:
        ptx_tma.reduce_bulk(pointer, src, nbytes, "add", KIND, issuer="thread")


def bulk_pieces(
    t: Trace, vector: Traced, pointer: Traced, nbytes: Traced, name: str
) -> list[tuple[Traced, Traced, Traced]]:
    """Return (shared piece, pointer, bytes) of each copy between a shared vector and consecutive global memory."""
    t.require_explicit(name)
    t.require(f"{name} (cp.async.bulk)", "tma")
    if not isinstance(vector, shared) or len(vector.axes) != 1:
        have = repr(vector.spec) if isinstance(vector, shared) else repr(vector)
        raise TileError(
            f"{name}: moves bytes of a shared vector (sv), which lie one after the other, got {have}; tiles are "
            "swizzled: use load_async and store_async"
        )
    if vector.stages is not None:
        raise TileError(f"{name} of a ring of {vector.spec!r}: take a slot first, ring[slot]")
    pointer = pointer.pointer if hasattr(pointer, "pointer") else pointer
    if not isinstance(pointer, tl.tensor) or not pointer.dtype.is_ptr():
        raise TileError(f"{name}: {unwrap(pointer)!r} is no pointer; pass a tensor to the kernel, or a global layout")
    nbytes = unwrap(nbytes)
    if nbytes is None:
        nbytes = vector.nbytes
    if isinstance(nbytes, int) and (not 0 < nbytes <= vector.nbytes or nbytes % BULK):
        raise TileError(
            f"{name}: {nbytes} bytes of {vector.spec!r}; must be a multiple of {BULK} (cp.async.bulk) up to its "
            f"{vector.nbytes} bytes"
        )
    if len(vector.pieces) > 1 and nbytes != vector.nbytes:
        raise TileError(
            f"{name}: {nbytes} bytes of {vector.spec!r}; a vector whose length is no power of two moves as a whole "
            f"({vector.nbytes} bytes)"
        )
    if len(vector.pieces) == 1:
        return [(vector.pieces[0], pointer, nbytes)]
    size, scale = itemsize(vector.dtype), itemsize(pointer.dtype.element_ty)
    places = zip(vector.pieces, _starts(vector.shape[0]), strict=True)
    return [(p, t.method(pointer, "__add__", start * size // scale), n * size) for p, (start, n) in places]


@op
def load_bytes_async(t: Trace, dst: Traced, pointer: Traced, arrived: Traced, nbytes: Traced = None) -> None:
    """Start a bulk copy from global memory to a shared vector. One thread of the role issues it.

    Args:
        dst: a shared vector (`sv`).
        pointer: a tensor argument plus an offset, or a global layout (its first element). A multiple of 16 bytes.
        arrived: the semaphore on which the copy completes. It must `expect` the bytes.
        nbytes: a multiple of 16, a constant or an int32 scalar. None copies the whole vector.

    Raises:
        TileError: for a tile (tiles are swizzled), a ring, another pointer, or a number of bytes that does not fit.

    Source: PTX ISA, cp.async.bulk.
    """
    if not isinstance(arrived, semaphore):
        raise TileError(f"load_bytes_async(arrived={unwrap(arrived)!r}): needs a semaphore")
    for piece, source, count in bulk_pieces(t, dst, pointer, nbytes, "load_bytes_async"):
        t.call(_load_bulk, piece, source, t.scalar(count), arrived.barrier(t), role_thread(t))
        bill().copied += count if isinstance(count, int) else 0


@op
def store_bytes_async(t: Trace, pointer: Traced, src: Traced, nbytes: Traced = None) -> None:
    """Start a bulk copy from a shared vector to global memory, committed as a group. Wait for it with `store_wait`.

    Arguments and errors as in `load_bytes_async`. If registers wrote the vector, call `fence_async` and `sync` first.
    Source: PTX ISA, cp.async.bulk.
    """
    for piece, target, count in bulk_pieces(t, src, pointer, nbytes, "store_bytes_async"):
        t.call(_store_bulk, target, piece, t.scalar(count), role_thread(t))
    t.call(ptx_tma.commit_group)


def bulk_sum_type(src: Traced, name: str) -> tl.constexpr:
    """Return the PTX name of the type that a bulk copy adds."""
    if isinstance(src, shared) and src.dtype not in BULK_SUMS:
        raise TileError(f"{name} of {src.spec!r}: bulk copies add {names_of(BULK_SUMS)} only")
    return tl.constexpr(BULK_SUMS.get(src.dtype) if isinstance(src, shared) else None)


@op
def store_add_bytes_async(t: Trace, pointer: Traced, src: Traced, nbytes: Traced = None) -> None:
    """Start adding a shared vector (fp32, bf16, fp16) to consecutive numbers in global memory, element by element and
    atomically.

    Arguments, errors and waits as in `store_bytes_async`. Source: PTX ISA, cp.reduce.async.bulk.
    """
    kind = bulk_sum_type(src, "store_add_bytes_async")
    for piece, target, count in bulk_pieces(t, src, pointer, nbytes, "store_add_bytes_async"):
        t.call(_add_bulk, target, piece, t.scalar(count), kind, role_thread(t))
    t.call(ptx_tma.commit_group)


@triton.jit
def _copy_to_cta(dst, src, nbytes, bar, cta, thread):
    if thread == 0:
        remote, remote_bar = ptx_cluster.mapa(dst, cta), ptx_cluster.mapa(bar, cta)
        ptx_tma.copy_bulk_cluster(remote, src, nbytes, remote_bar, issuer="thread")


def _piece_bytes(name: str, x: Traced) -> list[int]:
    """Return the bytes of each piece of a whole shared tile or vector."""
    if not isinstance(x, shared) or x.stages is not None:
        have = f"a ring of {x.spec!r}; take a slot first, ring[slot]" if isinstance(x, shared) else repr(unwrap(x))
        raise TileError(f"{name}: copies a tile or vector of shared memory, got {have}")
    shapes = [[int(n) for n in piece.type.shape] for piece in x.pieces]
    if any(
        shape != [int(n) for n in p.type.alloc_shape][-len(shape) :] for shape, p in zip(shapes, x.pieces, strict=True)
    ):
        raise TileError(f"{name}: a view of {x.spec!r} is no stretch of memory; copy the whole tile")
    return [math.prod(shape) * itemsize(x.dtype) for shape in shapes]


@op
def store_cluster_async(t: Trace, dst: Traced, src: Traced, arrived: Traced, cta: Traced) -> None:
    """Start a copy of a shared tile or vector to another CTA of the cluster. One thread of the role issues it.

    Args:
        dst: a shared tile or vector. The copy goes to the same place in the other CTA.
        src: one of the same type in this CTA. It may change when the other CTA has waited for the copy and said so.
        arrived: a semaphore. The copy completes on the one at the same place in the other CTA, which must `expect`
            its bytes.
        cta: the rank of the other CTA, a constant or an int32 scalar.

    If registers wrote `src`, call `fence_async` and `sync` first. The other CTA must have reached the cluster's barrier
    once its semaphore is initialised, and must not end before the copy is complete.

    Raises:
        TileError: for a ring, a view, or two types.

    Source: PTX ISA, cp.async.bulk (shared::cluster).
    """
    name = "store_cluster_async"
    t.require_explicit(name)
    t.require(f"{name} (cp.async.bulk)", "tma")
    if not isinstance(arrived, semaphore):
        raise TileError(f"{name}(arrived={unwrap(arrived)!r}): needs a semaphore")
    sizes = _piece_bytes(name, src)
    if sizes != _piece_bytes(name, dst) or src.spec != dst.spec:
        raise TileError(f"{name}: from {src.spec!r} to {dst.spec!r}; must be the same type")
    bar, thread = arrived.barrier(t), role_thread(t)
    for to, piece, size in zip(dst.pieces, src.pieces, sizes, strict=True):
        t.call(_copy_to_cta, to, piece, t.scalar(size), bar, t.scalar(cta), thread)
    bill().copied += src.nbytes
