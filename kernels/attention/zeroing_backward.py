"""Gradients of attention in one pass that leaves itself the zeros which it adds to."""
from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.fused_backward import AttentionBackward

AT_ONCE = tl.constexpr(512)  # zeros under way: half as many take too long for short tasks, twice as many cost up to 1 %


class ZeroingBackward(AttentionBackward):
    """`AttentionBackward` that needs zeros in the sums of dQ of its first units only. A unit is the query heads whose gradients of K and V make one result; its
    tasks make zeros of the sums of the unit `lag` behind, and add to their own when those of the unit `lag` before have made them. Blocks draw tasks, those of
    a unit behind all of the unit `lag` before, so whatever a task waits for was drawn before it.

    Zeros that a kernel in front of this one makes cost their time, and are out of L2 again when they are added to. On the H200, 16 K tokens
    (`bench/results/attention_variants.json`), a backward is faster so, with both kernels, by 6 % at 512 tokens, 5 % at 1,024 and dimension 64, by 3 and 1 % at
    dimension 128; causal by 2 and 1 %. By copies of 2 KB, one at a time, of a role of their own: the producer is one iteration ahead at most and has no time to
    wait for counters or stores (up to 14 % slower), and stores of threads, whoever issues them, get in the consumers' way (1 to 3 % faster without a mask, 2
    to 3 % slower with one). So do the statistics of queries made here: a backward takes 2 to 60 % longer than with the kernel of 40 µs that makes them for all.

    Tensors as for `AttentionBackward`, and counts: two zeros in int32 for each unit, (2, B · H_kv · parts), of which this kernel counts the first up. lag:
    units, see `config.units_ahead`.
    """

    schedule: tk.Schedule = tk.Dynamic()

    @property
    def zeros(self) -> int:
        """How many a copy leaves."""
        return AT_ONCE.value

    def layout(self):
        plan = super().layout()
        tensors = {name: tiles or None for name, tiles in plan.globals}
        return replace(plan, globals={**tensors, "counts": None}, aside=dict(zeros=tk.sv(tk.fp32, self.zeros)), args=(*plan.args, "lag"))

    @triton.jit
    def _tasks_of_unit(ctx):
        HEIGHT: tl.constexpr = ctx.config.rows * ctx.config.consumers
        return tk.ceil_div(ctx.keys, HEIGHT)

    @triton.jit
    def _unit(ctx):
        return ctx.batch * ctx.config._results(ctx) + ctx.result

    @triton.jit
    def _units(ctx):
        return tk.extent(ctx.globals.K, 0) * ctx.config._results(ctx)

    @triton.jit
    def _sums_of(ctx, unit, block):
        """Where the sums of a block of a unit begin."""
        blocks = ctx.group * tk.extent(ctx.globals.sums, 2)
        return ctx.globals.sums.pointer + (unit.to(tl.int64) * blocks + block) * ctx.config.block_numbers

    @triton.jit
    def prepare(ctx):
        unit = ctx.config._unit(ctx)
        if unit >= ctx.args.lag:
            tk.wait_count(ctx.globals.counts.pointer + unit, ctx.config._tasks_of_unit(ctx))

    @triton.jit
    def aside(ctx):
        ZEROS: tl.constexpr = ctx.config.zeros
        unit, tasks = ctx.config._unit(ctx) + ctx.args.lag, ctx.config._tasks_of_unit(ctx)
        if unit < ctx.config._units(ctx):
            tk.store(ctx.aside.zeros, tk.zero(tk.rv(tk.fp32, ZEROS)))
            tk.fence_async()
            tk.sync()
            for block in range(ctx.row, ctx.group * tk.extent(ctx.globals.sums, 2), tasks):
                sums = ctx.config._sums_of(ctx, unit, block)
                for part in range(ctx.config.block_numbers // AT_ONCE):
                    for copy in tl.static_range(AT_ONCE // ZEROS):
                        tk.store_bytes_async(sums + part * AT_ONCE + copy * ZEROS, ctx.aside.zeros)
                    tk.store_wait(0)
            tk.count_up(ctx.globals.counts.pointer + unit)
