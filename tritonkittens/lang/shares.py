"""Summing up a task whose iterations the blocks of a cluster share (`SplitInCluster`): each block gets from all the rows that it finishes, and adds them up.

Accumulators go to shared memory, from there as bulk copies into the other blocks'. Both places lie over the ring, which is idle by then: a launch has a cluster
for every task. A block says that its place is free when all its consumers have left the ring, and leaves only when all have got what they need.
The sum is taken in the order of the parts, so the result is always the same. Source: PTX ISA, "cp.async.bulk" (shared::cta to shared::cluster), "mapa".
"""
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang._backend import Trace, op
from tritonkittens.lang.dtypes import itemsize
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.memory import fence_async, load, store
from tritonkittens.lang.shared import piece_shared_layout, shared
from tritonkittens.lang.sync import arrive, expect, role_thread, sync, wait
from tritonkittens.lang.types import rt, split, st, unwrap
from tritonkittens.lang.values import struct

NUMBER = itemsize(tl.float32)
BASE_ROWS = 16  # of a tile


class _Place(NamedTuple):
    """Where pieces of accumulators lie in a buffer: `cols` columns wide, behind `offset` bytes of wider ones of all consumers."""

    name: str
    cols: int
    offset: int


def check(template: Any) -> None:
    """Raise `TileError` for accumulators whose rows cannot be dealt out to the blocks of a cluster."""
    for name, tile in template._plan.accumulators:
        if len(split(tile.rows)) > 1 or tile.rows % (BASE_ROWS * template.shares) or tile.dtype != tl.float32:
            raise TileError(f"{type(template).__name__}(schedule={template.schedule!r}): each block of the cluster finishes a share of the rows of "
                            f"{name} {tile!r}; it must be fp32, and its rows a power of two and a multiple of {BASE_ROWS * template.shares}")


def _places(plan: Any, consumers: int) -> tuple[list[_Place], int]:
    """(the places of all pieces, bytes of all consumers' accumulators): wide pieces first, so that each starts at a multiple of its size."""
    pieces = sorted(((tile.rows * cols, name, cols) for name, tile in plan.accumulators for cols in split(tile.cols)), reverse=True)
    places, offset = [], 0
    for size, name, cols in pieces:
        places.append(_Place(name, cols, offset))
        offset += consumers * size * NUMBER
    return places, offset


def _homes(t: Trace, config: Any, memory: Any, need: int) -> list[Any]:
    """Two buffers of the ring that hold `need` bytes each: to send from, and to receive in."""
    buffers = [(piece, _bytes(piece)) for ring in memory.ring.fields.values() if isinstance(ring.spec, st) for piece in ring.pieces[:1]]
    found = [piece for piece, nbytes in buffers if nbytes >= need]
    if len(found) < 2:
        have = ", ".join(f"{nbytes}" for _, nbytes in buffers)
        raise TileError(f"{type(config).__name__}(schedule={config.schedule!r}): the accumulators of a block, {need} bytes, are exchanged over two tiles of the "
                        f"ring; its first pieces have {have} bytes in {config.placement(t.arch).stages} stages")
    return found[:2]


def _bytes(piece: Any) -> int:
    total = itemsize(piece.dtype)
    for extent in piece.shape:
        total *= int(unwrap(extent))
    return total


def _view(t: Trace, home: Any, rows: int, cols: int, offset: int, number: Any) -> Any:
    """Piece `number` of those of rows × cols fp32 numbers that lie behind `offset` bytes of a buffer."""
    size = rows * cols * NUMBER
    swizzle = st(tl.float32, rows, cols).piece_swizzle(cols)
    pieces = t.call(home.reinterpret, tl.float32, [_bytes(home) // size, rows, cols], piece_shared_layout(tl.float32, swizzle, 2))
    return t.call(pieces.index, t.method(t.scalar(number), "__add__", offset // size))


def _tile(t: Trace, home: Any, places: list[_Place], name: str, rows: int, number: Any) -> shared:
    """Tile `number` of `rows` rows of an accumulator in a buffer."""
    mine = [p for p in places if p.name == name]
    cols = tuple(p.cols for p in mine)
    pieces = tuple(_view(t, home, rows, p.cols, p.offset, number) for p in mine)
    return shared(st(tl.float32, rows, sum(cols)), ((rows,), cols), None, pieces)


def _address(t: Trace, piece: Any) -> Any:
    return t.call(asm, "mov.b32 $0, $1;", "=r,r", [piece], tl.int32)


@triton.jit
def _send(source, target, nbytes, bar, thread, PARTS: tl.constexpr, BLOCKS: tl.constexpr, SHARE: tl.constexpr):
    """A piece wider than its swizzle lies in memory as blocks of columns, each of all its rows: `SHARE` of their bytes (also as a run-time number, `nbytes`) go to
    each of the cluster's blocks, those to number p by a thread of warp p."""
    for part in tl.static_range(PARTS):
        if thread == 32 * part:
            far_bar = ptx_cluster.mapa(bar, part)
            for block in tl.static_range(BLOCKS):
                far = ptx_cluster.mapa(target + block * SHARE, part)
                ptx_tma.copy_bulk_cluster(far, source + (block * PARTS + part) * SHARE, nbytes, far_bar, issuer="thread")


@op
def sum_shares(t: Trace, ctx: Any, state: Any, memory: Any) -> Any:
    """This block's share of the rows of a state that all blocks of the cluster have a part of. All consumers of the block have left the ring."""
    config, worker = unwrap(ctx.config), unwrap(ctx.worker)
    parts = config.shares
    places, nbytes = _places(config._plan, config.consumers)
    source, target = _homes(t, config, memory, nbytes)
    free, arrived = (t.call(s.__getitem__, worker) for s in (memory.shares_free, memory.shares_arrived))
    t.call(ptx_cluster.wait)  # for the cluster's blocks to have made their semaphores
    for rank in range(parts):
        t.call(arrive, free, per="warp", cta=rank)
    tiles = {n: rt(tl.float32, tile.rows, tile.cols) for n, tile in config._plan.accumulators}
    for name, tile in tiles.items():
        t.call(store, _tile(t, source, places, name, tile.rows, worker), getattr(state, name))
    t.call(fence_async)
    t.call(sync)
    t.call(expect, arrived, nbytes // config.consumers)
    t.call(wait, free, 0, scope="cluster")
    thread = role_thread(t)
    for name, cols, offset in places:
        rows = tiles[name].rows
        line = st(tl.float32, rows, cols).piece_swizzle(cols)
        here = _address(t, _view(t, source, rows, cols, offset, worker))
        there = _address(t, _view(t, target, rows // parts, cols, offset, t.method(ctx.part, "__add__", worker * parts)))
        share = rows // parts * line
        t.call(_send, here, there, t.scalar(share), arrived.piece, thread, tl.constexpr(parts), tl.constexpr(cols * NUMBER // line), tl.constexpr(share))
    t.call(wait, arrived, 0, scope="cluster")
    sums = {}
    for name, tile in tiles.items():
        shares = [t.call(load, _tile(t, target, places, name, tile.rows // parts, worker * parts + part)) for part in range(parts)]
        total = shares[0]
        for share in shares[1:]:
            total = t.method(total, "__add__", share)
        sums[name] = total
    t.call(ptx_cluster.arrive)
    return struct(**sums)


__all__ = ["check", "sum_shares"]
