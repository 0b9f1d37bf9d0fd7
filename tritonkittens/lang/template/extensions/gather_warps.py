"""Input tiles whose rows are selected by number, which warps of their own copy: TMA of Hopper loads no such tile, and
the copies of threads (cp.async) would delay the producer's.

Source of the technique: `gather_A` of quack and SonicMoE, where copies of threads and of TMA complete one full barrier.
"""

from __future__ import annotations

from typing import Any, ClassVar

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import axes_of, struct
from tritonkittens.lang.memory.selected_rows import expect_rows, gathers_by_tma, numbers_for
from tritonkittens.lang.sync.semaphores import wait
from tritonkittens.lang.template.contexts import at_iteration, extended, new_context
from tritonkittens.lang.template.extension import Extension
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.hook_table import PRODUCER, Hook
from tritonkittens.lang.template.loads import load_checked
from tritonkittens.lang.template.next_tile import first_tile, following_tile
from tritonkittens.lang.template.pipeline_state import next_slot
from tritonkittens.lang.template.smem_plan import nbytes
from tritonkittens.lang.template.storage import GATHER_WARPS, in_slot


@op
def _row_numbers(t: Trace, ctx: Traced, memory: Traced, T: Traced) -> Traced:
    """What hook `row_numbers` returns, in the registers from which the copies of the first gathered tile start."""
    T = unwrap(T)
    rows = t.call(type(T).row_numbers, ctx)
    tile = memory.input.fields[T._plan.gathered[0]]
    if axes_of(rows) != tile.axes[:1]:
        raise TileError(
            f"{type(T).__name__}.row_numbers must return a vector with a number for each row of {tile.spec!r}, "
            f"got {rows!r}"
        ).of(type(T).row_numbers)
    return numbers_for(t, rows, tile)


@op
def _load_gathered(t: Trace, ctx: Traced, memory: Traced, slot: Traced, rows: Traced) -> Traced:
    """Announce the gathered tiles of a stage and call the hook that copies their rows."""
    plan = unwrap(ctx.config)._plan
    chosen = tuple((n, s) for n, s in plan.input if n in plan.gathered)
    bar = t.call(memory.input_pipeline.full.__getitem__, slot)
    t.call(expect_rows, bar, nbytes(chosen))
    tiles = {n: tile for n, tile in in_slot(t, memory.input, slot).items() if n in plan.gathered}
    load_checked(t, unwrap(ctx.config), "load_gathered", nbytes(chosen), ctx, struct(**tiles, full=bar), rows)


@triton.jit
def gatherer(NUMBER: tl.constexpr, G, A, memory, T: tl.constexpr):
    """The role of the gather warps: the input tiles that hook `load_gathered` copies, task after task."""
    slot = 0
    turn = 0
    phases = -1  # one parity bit a stage: a fresh barrier counts as empty
    ctx = new_context(G, A, T)
    index, tile = first_tile(ctx, A, memory, T)
    while tile.is_valid:
        whole = extended(ctx, tile)
        rows = _row_numbers(whole, memory, T)
        for i in range(tile.count):
            wait(memory.input_pipeline.empty[slot], (phases >> slot) & 1)
            _load_gathered(at_iteration(whole, whole.begin + i), memory, slot, rows)
            slot, phases = next_slot(slot, phases, facts(T).stages)
        index, tile = following_tile(ctx, A, memory, index, tile, turn, T)
        turn += 1


class GatherWarps(Extension):
    """Loads input tiles whose rows are selected by number, such as the tokens of an expert.

    The layout names them in `gathered`. Warps of their own call hook `row_numbers` once a task, and hook
    `load_gathered` in every iteration; hook `load` loads the others. Their tensor has `tk.by_rows(tile)` in `globals`,
    and rows of a multiple of 16 bytes."""

    added_hooks: ClassVar[tuple[Hook, ...]] = (
        Hook(
            "row_numbers",
            PRODUCER,
            "once a task",
            ("ctx",),
            "a vector of int32",
            "Returns the row numbers that the task's copies select.",
            "gathered",
        ),
        Hook(
            "load_gathered",
            PRODUCER,
            "once an iteration",
            ("ctx", "input", "rows"),
            "",
            "Loads the tiles that the layout names in `gathered` with `tk.load_rows_async`, with `input.full` as the "
            "barrier. `rows` is what `row_numbers` returned. The template checks the number of bytes.",
            "gathered",
        ),
    )
    added_fields: ClassVar[tuple[str, ...]] = ("gathered",)
    needs_fields: ClassVar[bool] = False
    role_warps: ClassVar[int] = GATHER_WARPS

    @staticmethod
    def check_template(T: Any) -> None:
        if unknown := [n for n in T._plan.gathered if n not in dict(T._plan.input)]:
            raise T._error(f"its layout has gathered={T._plan.gathered!r}; {unknown[0]!r} is no input tile")
        if len(T._plan.gathered) == len(T._plan.input):
            raise T._error("its layout gathers every input tile; the producer needs one that TMA loads")
        if T.cluster_size > 1:
            raise T._error(
                f"(schedule={T.schedule!r}, cluster={T.cluster}): the gather warps load for their own CTA alone; they "
                "need cluster=1"
            )

    @staticmethod
    def added_warps(T: Any) -> list[tuple[Any, int]]:
        return [(gatherer, 0)]

    @staticmethod
    def role_registers(arch: int) -> int:
        """For the rows that a thread copies, or for TMA all those of its warp."""
        return 128 if gathers_by_tma(arch) else 56

    @staticmethod
    def explained_lines(T: Any, arch: int) -> list[str]:
        return [f"  {', '.join(T._plan.gathered)} by rows, which {GATHER_WARPS} warps copy"]
