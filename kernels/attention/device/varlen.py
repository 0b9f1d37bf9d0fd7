"""The attention kernels on sequences of different lengths, packed end to end along the rows.

The hooks are those of sequences of one length. A sequence is the first coordinate of a tile, and TMA ends a tile where
its sequence ends, so that no kernel reads or writes a neighbour's rows. The rows after the last sequence count as one
more, whose queries see no key and whose keys no query sees: outputs and gradients are zero there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.backward import (
    PARTS,
    AttentionBackwardKeys,
    AttentionBackwardQueries,
    lse_and_dpsum,
    store_addends,
    task_of_keys,
)
from tritonkittens.kernels.attention.device.forward import AttentionForward
from tritonkittens.kernels.attention.device.fused_backward import AttentionBackward
from tritonkittens.kernels.attention.device.postprocess import write_half
from tritonkittens.kernels.attention.device.tiles import QueryTiles, task_of_queries
from tritonkittens.kernels.attention.device.wide_backward import AttentionBackwardWideKeys, AttentionBackwardWideQueries
from tritonkittens.launch import plain_kernel

FIELDS = tl.constexpr(7)  # of an entry of the list of tiles
# of a program of `list_tiles`: entries, and sequences that it reads at a time
ENTRIES, CHUNK = tl.constexpr(32), tl.constexpr(128)


@triton.jit
def _bounds(starts, sequence, sequences, total):
    """(begin, rows) of sequences. Number `sequences` is the rest of the rows, later ones are empty.

    All of them lie inside, whatever `starts` holds.
    """
    begin = tl.load(starts + sequence, mask=sequence <= sequences, other=total)
    end = tl.load(starts + sequence + 1, mask=sequence < sequences, other=total)
    begin = tl.minimum(tl.maximum(begin, 0), total)
    return begin, tl.minimum(tl.maximum(end, begin), total) - begin


@plain_kernel
@triton.jit
def list_tiles(
    query_starts,
    key_starts,
    entries,
    sequences,
    queries,
    keys,
    OF_KEYS: tl.constexpr,
    HEIGHT: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """List the tiles of HEIGHT queries (or of keys) of all sequences. Grid: parts of ENTRIES entries.

    An entry of `entries`, int32, contiguous, is: the tile in its sequence, −1 after the last one; the sequence's first
    query and number of queries, first key and number of keys; the first block of NUMBERS of its queries, and its first
    tile, if every sequence has whole ones.

    Queries' tiles come last to first within a sequence, keys' first to last: under a causal mask the longest work comes
    first.
    """
    slot = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    count, of, first = 0, tl.zeros((ENTRIES,), tl.int32), tl.zeros((ENTRIES,), tl.int32)
    for begin in range(0, sequences + 1, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        if OF_KEYS:
            _, rows = _bounds(key_starts, index, sequences, keys)
        else:
            _, rows = _bounds(query_starts, index, sequences, queries)
        behind = count + tl.cumsum((rows + HEIGHT - 1) // HEIGHT)
        passed = (behind[None, :] <= slot[:, None]) & (index <= sequences)[None, :]
        of += tl.sum(passed.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(passed, behind[None, :], 0), 1))
        count = tl.max(behind)
    query, query_rows = _bounds(query_starts, of, sequences, queries)
    key, key_rows = _bounds(key_starts, of, sequences, keys)
    alone = of == sequences
    if OF_KEYS:
        tile, query_rows = slot - first, tl.where(alone, 0, query_rows)
    else:
        tile, key_rows = (query_rows + HEIGHT - 1) // HEIGHT - 1 - (slot - first), tl.where(alone, 0, key_rows)
    place = entries + slot * FIELDS
    tl.store(place, tl.where(of <= sequences, tile, -1))
    tl.store(place + 1, query)
    tl.store(place + 2, query_rows)
    tl.store(place + 3, key)
    tl.store(place + 4, key_rows)
    tl.store(place + 5, query // NUMBERS + of)
    tl.store(place + 6, (key if OF_KEYS else query) // HEIGHT + of)


@triton.jit
def entry(entries, slot, inside):
    """(tile, queries, keys, first block of numbers, first tile) of a slot; the tile is −1 where there is none."""
    place = entries + slot * FIELDS
    tile = tl.load(place, mask=inside, other=-1)
    queries = tk.sequence(tl.load(place + 1, mask=inside, other=0), tl.load(place + 2, mask=inside, other=0))
    keys = tk.sequence(tl.load(place + 3, mask=inside, other=0), tl.load(place + 4, mask=inside, other=0))
    return tile, queries, keys, tl.load(place + 5, mask=inside, other=0), tl.load(place + 6, mask=inside, other=0)


@triton.jit
def _task(ctx, heads):
    """(head, tile, queries, keys, first block of numbers, first tile) of this task; the tile is −1 where there is
    none."""
    slot, head = tk.unravel(ctx.task_id, heads)
    row, queries, keys, numbers, first = entry(
        ctx.globals.entries.pointer, slot, slot < tk.extent(ctx.globals.entries, 0)
    )
    return head, row, queries, keys, numbers, first


@plain_kernel(launch_pdl=True)
@triton.jit
def varlen_preprocess(
    O, dO, L, dL, entries, LSE_log2, dPsum,  # noqa: E741
    o_row, o_head, do_row, do_head, n_head, n_tile, n_part, total, factor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_DL: tl.constexpr, TILES: tl.constexpr, ADDENDS: tl.constexpr,
):  # fmt: skip
    """`preprocess` of sequences of different lengths. Grid: entries of the list of tiles of 64 queries, heads.

    O, dO: (total, H, DIM) with these strides, the last 1. L, dL: (H, total) fp32, contiguous. LSE_log2, dPsum: (1, H,
    tiles · 64) fp32, or with 2 ADDENDS (1, H, tiles, PARTS, 64) bf16 as `preprocess` writes them, each sequence in
    whole blocks of TILES tiles, with zeros after its end. With 1, dPsum alone is, and LSE_log2 is −L in fp32; nothing
    is written after a sequence's last tile. `launch_pdl`: it starts early and waits, and the next kernel does so, too.
    """
    tk.dependency_wait()
    tk.dependents_launch()
    tile, rows, _, block, _ = entry(entries, tl.program_id(0), True)
    head = tl.program_id(1).to(tl.int64)
    if tile >= 0:
        first = rows.begin.to(tl.int64)
        lse_log2, dpsum = lse_and_dpsum(
            O + first * o_row + head * o_head,
            o_row,
            dO + first * do_row + head * do_head,
            do_row,
            L + head * total + first,
            dL + head * total + first,
            tile * 64,
            rows.rows,
            DIM,
            WIDTH,
            HAS_DL,
        )
        place = head * n_head + (block * TILES + tile).to(tl.int64) * n_tile
        if ADDENDS:
            store_addends(dPsum + place, n_part, -dpsum)
            if ADDENDS == 1:
                tl.store(LSE_log2 + place // PARTS + tl.arange(0, 64), -lse_log2)
            else:
                store_addends(LSE_log2 + place, n_part, -lse_log2 * factor)
                if (tile + 1) * 64 >= rows.rows:
                    for _ in range(tile % TILES + 1, TILES):
                        place += n_tile
                        store_addends(LSE_log2 + place, n_part, tl.zeros_like(lse_log2))
                        store_addends(dPsum + place, n_part, tl.zeros_like(dpsum))
        else:
            query = tl.arange(0, 64)
            tl.store(dPsum + place + query, dpsum)
            tl.store(LSE_log2 + place + query, lse_log2)


@plain_kernel(launch_pdl=True)
@triton.jit
def varlen_postprocess(
    accum,
    words,
    home,
    entries,
    stride_s,
    stride_h,
    factor,
    blocks,
    SUMMED: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    """`postprocess` of sequences of different lengths. Grid: entries of the list of tiles, heads.

    accum: (…, H, blocks, …) of SUMMED columns from `VarlenBackward`, TILES tiles of 64 rows a block, with their
    `words`. home: dQ, whose list has tiles of 64 queries, or with `OF_KEYS` dK or dV, whose list has blocks; (total, H,
    WIDTH) with these strides, the last 1. `launch_pdl`: it starts early and waits.
    """
    tk.dependency_wait()
    tile, queries, keys, block, first = entry(entries, tl.program_id(0), True)
    head = tl.program_id(1).to(tl.int64)
    rows, first = (keys, first) if OF_KEYS else (queries, block)
    EACH: tl.constexpr = TILES if OF_KEYS else 1
    if tile >= 0:
        place = home + rows.begin.to(tl.int64) * stride_s + head * stride_h
        for part in tl.static_range(EACH):
            number = tile * EACH + part
            for across in tl.static_range((SUMMED + 63) // 64):
                write_half(
                    accum,
                    words,
                    (head * blocks + first) * TILES + number,
                    place,
                    stride_s,
                    number * 64,
                    rows.rows,
                    across,
                    factor,
                    SUMMED,
                    WIDTH,
                    not OF_KEYS,
                )


@triton.jit
def _varlen_numbers(ctx, head, block):
    """Coordinates of a block of queries in LSE_log2 and dPsum."""
    return 0, head, ctx.numbers + block


class Varlen(QueryTiles):
    """What replaces a batch of sequences of one length.

    Q, dO, O, dQ: (H, total_q, …), K, V, dK, dV: (H_kv, total_k, …), L: (H, total_q), and `entries`, the list of tiles.
    CTAs fetch tasks: the heads of the first tile, then those of the second, and so on.
    """

    schedule: tk.Schedule = tk.Dynamic()

    _numbers = _varlen_numbers

    def layout(self) -> tk.layout:
        plan = super().layout()
        numbers = ("LSE_log2", "dPsum")  # each sequence has whole blocks of these
        moved = tuple(
            name
            for name, tiles in plan.globals
            if name not in numbers and tiles and all(isinstance(tile, tk.st) for tile in tiles)
        )
        return replace(plan, globals={**dict(plan.globals), "entries": None}, ragged=moved)

    def tasks(self, *shapes: Any) -> int:
        of = "dK" if isinstance(self, AttentionBackwardKeys) else "Q"
        return shapes[-1][0] * shapes[self.tensors.index(of)][0]

    def blocks(self, slots: int, *shapes: Any) -> int:
        return tk.lcf.blocks(self, slots, *shapes)


class VarlenQueries(Varlen):
    """Tasks are tiles of queries."""

    @triton.jit
    def setup(ctx):
        heads, kv_heads = tk.extent(ctx.globals.Q, 0), tk.extent(ctx.globals.K, 0)
        head, row, batch, kv_batch, numbers, _ = _task(ctx, heads)
        task = task_of_queries(ctx, row, batch, kv_batch, head, batch.rows, kv_batch.rows, heads, kv_heads, row >= 0)
        return tk.with_field(task, "numbers", numbers)


class VarlenForward(VarlenQueries, AttentionForward):
    """`AttentionForward` of sequences of different lengths."""


class VarlenBackwardQueries(VarlenQueries, AttentionBackwardQueries):
    """`AttentionBackwardQueries` of sequences of different lengths; LSE_log2 and dPsum from `varlen_preprocess`."""


class VarlenBackwardKeys(Varlen, AttentionBackwardKeys):
    """`AttentionBackwardKeys` of sequences of different lengths; LSE_log2 and dPsum from `varlen_preprocess`."""

    @triton.jit
    def _results(ctx):
        return tk.extent(ctx.globals.dK, 0)

    @triton.jit
    def setup(ctx):
        results = ctx.config._results(ctx)
        result, row, batch, kv_batch, numbers, first = _task(ctx, results)
        heads, kv_heads = tk.extent(ctx.globals.Q, 0), tk.extent(ctx.globals.K, 0)
        task = task_of_keys(
            ctx, row, batch, kv_batch, result, results, batch.rows, kv_batch.rows, heads, kv_heads, row >= 0
        )
        return tk.with_field(tk.with_field(task, "numbers", numbers), "first_tile", first)


class VarlenBackwardWideQueries(VarlenQueries, AttentionBackwardWideQueries):
    """`AttentionBackwardWideQueries` of sequences of different lengths, as `VarlenBackwardQueries`."""


class VarlenBackwardWideKeys(VarlenBackwardKeys, AttentionBackwardWideKeys):
    """`AttentionBackwardWideKeys` of sequences of different lengths, as `VarlenBackwardKeys`."""


class VarlenBackward(VarlenBackwardKeys, AttentionBackward):
    """`AttentionBackward` of sequences of different lengths; LSE_log2 and dPsum from `varlen_preprocess` with ADDENDS.

    With `parts` dK and dV are (H_kv, tiles, 64 · summed), every sequence in whole tasks.
    """

    def tasks(self, *shapes: Any) -> int:
        return shapes[-1][0] * shapes[self.tensors.index("K")][0] * self.parts

    @triton.jit
    def _results(ctx):
        return tk.extent(ctx.globals.K, 0) * ctx.config.parts

    @triton.jit
    def _first_accum(ctx, accum):
        return ctx.kv_head * tk.extent(accum, 1) + ctx.first_tile * ctx.config.consumers
