"""Gradients of attention in one pass that also makes dQ of the sums that are done."""
from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.fused_backward import HALF, AttentionBackward

ROWS, COLS = tl.constexpr(16), tl.constexpr(32)  # of dQ, whose sums lie behind one another (`tk.store_fragments`)
BANDS = tl.constexpr(64 // 16)  # so many rows of a half


class GatheringBackward(AttentionBackward):
    """`AttentionBackward` whose tasks make dQ of the sums of the unit `lag` before, each a share; a unit is the query heads whose gradients of K and V make one
    result: only those of the last `lag` units are left to a kernel behind this one, which mostly reads what is out of L2 again.

    By a warp that follows (hook `follow`): sums come by bulk copies, a band of 16 rows and 32 columns at a time, and leave as a tile in the operands' type. Its
    accesses of shared memory and copies wait in the same queues as those of the consumers, so that a share hides only beside a task of enough keys: with a
    causal mask tasks are shorter, and any role more costs them time. Consumers do nothing for it: senders say that their sums are done, the follower counts.
    What was tried, and what it is worth: docs/notes/attention_backward.md; `config.worth_following` decides.

    Tensors as for `AttentionBackward`, dQ like Q, and counts: a zero in int32 for each unit, (B · H_kv · parts,), of its tasks whose sums are done. lag: units,
    see `config.units_ahead`.
    """

    following_stages: int = 2

    @property
    def tiles_of_queries(self) -> int:
        """Those in which dQ waits to be stored, likewise."""
        return 2 if self.head_dim == 64 else 1

    def layout(self):
        plan = super().layout()
        tensors = {name: tiles or None for name, tiles in plan.globals}
        band = tk.st(self.dtype, ROWS.value, COLS.value)
        return replace(plan, globals={**tensors, "counts": None, "dQ": band}, args=(*plan.args, "lag"),
                       following={f"dQ{number}": band for number in range(self.tiles_of_queries)},
                       following_ring=dict(sums=tk.sv(tk.fp32, ROWS.value * COLS.value)))

    @triton.jit
    def _tasks_of_unit(ctx):
        HEIGHT: tl.constexpr = ctx.config.rows * ctx.config.consumers
        return tk.ceil_div(ctx.keys, HEIGHT)

    @triton.jit
    def _unit(ctx):
        return ctx.batch * ctx.config._results(ctx) + ctx.result

    @triton.jit
    def tally(ctx):
        return ctx.globals.counts.pointer + ctx.config._unit(ctx)

    @triton.jit
    def _fetch(ctx, sums, slot):
        """Ask for a band's sums, which begin there."""
        tk.expect(ctx.following.arrived[slot], 4 * ROWS * COLS)
        tk.load_bytes_async(ctx.following.sums[slot], sums, ctx.following.arrived[slot])

    @triton.jit
    def _gather(ctx, number, slot, batch, head, row, word):
        """Make dQ of band `number` of a block, whose first band of rows is `row`, of the sums that were asked for; zeros of a half that nobody claimed, of
        which `word` and the next tell."""
        TILES: tl.constexpr = ctx.config.tiles_of_queries
        BANDS_OF_HALF: tl.constexpr = HALF // (ROWS * COLS)
        half, band = number // BANDS_OF_HALF, number % BANDS_OF_HALF
        tk.wait(ctx.following.arrived[slot], number // ctx.config.following_stages & 1)
        x = tk.load_band(ctx.following.sums[slot]) * ctx.args.gradient
        x = tk.cast(tk.where(tk.iota(x, 0) < tl.load(word + half) * ROWS, x, 0.0), ctx.config.dtype)
        home = ctx.following.dQ1 if slot % TILES else ctx.following.dQ0
        tk.store_read_wait(TILES - 1)
        tk.store(home, x)
        tk.fence_async()
        tk.sync()
        if ctx.config.cols == 64:  # halves are columns
            tk.store_async(ctx.globals.dQ, home, (batch, head, row + band % BANDS, half * (BANDS_OF_HALF // BANDS) + band // BANDS))
        else:
            tk.store_async(ctx.globals.dQ, home, (batch, head, row + half * BANDS + band % BANDS, band // BANDS))

    @triton.jit
    def follow(ctx):
        STAGES: tl.constexpr = ctx.config.following_stages
        NUMBER: tl.constexpr = ctx.config.block_numbers // (ROWS * COLS)
        unit, results, tasks = ctx.config._unit(ctx) - ctx.args.lag, ctx.config._results(ctx), ctx.config._tasks_of_unit(ctx)
        if unit >= 0:
            tk.wait_count(ctx.globals.counts.pointer + unit, tasks)
            blocks = tk.extent(ctx.globals.sums, 2)
            for block in range(ctx.row, ctx.group * blocks, tasks):
                number_of_sums = unit * (ctx.group * blocks) + block
                sums = ctx.globals.sums.pointer + number_of_sums.to(tl.int64) * ctx.config.block_numbers
                word = ctx.globals.words.pointer + number_of_sums * ctx.config.consumers
                for slot in tl.static_range(STAGES):
                    ctx.config._fetch(ctx, sums, slot)
                    sums += ROWS * COLS
                batch, head, row = unit // results, unit % results * ctx.group + block // blocks, block % blocks * (ctx.config.cols // ROWS)
                for number in range(0, NUMBER, STAGES):
                    for slot in tl.static_range(STAGES):
                        ctx.config._gather(ctx, number + slot, slot, batch, head, row, word)
                        if number + STAGES < NUMBER:
                            ctx.config._fetch(ctx, sums, slot)
                            sums += ROWS * COLS
