"""What is constant of a template on an architecture, for the code of its roles."""

from __future__ import annotations

import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.memory.selected_rows import gathers_by_tma
from tritonkittens.lang.template.storage import block_tasks

EARLY_STAGES = 2  # more keep the roles waiting for the barriers between their copies (measured: docs/notes/gemm.md)


@op
def facts(t: Trace, T: Traced) -> Traced:
    """A record of constants.

    - `stages` of the rings; no epilogue tiles lie over the first `safe_stages` of them where these lie `over_ring`;
      `output_stages` of lcsf;
    - `teams` of consumers, each of which has tasks of its own;
    - `early_stages`: filled before the roles begin, because nothing must be waited for;
    - `own_task`: has each consumer task tiles of its own? `any_task`: are there task tiles at all?
    - `mma_warp`: does a warp of its own run the hooks that multiply? `accumulators`: how many of each there are then;
      `pairs`: does it issue them for a pair of CTAs?
    - `fenced_input`: do threads copy input tiles, which products then read?
    - `broadcasts_first`: is the CTA's first work tile broadcast to the roles before they begin?
    """
    T = unwrap(T)
    placed, plan = T.placement(t.arch), T._plan
    early = (
        0
        if T.dynamic or T.pairs(t.arch)
        else min(EARLY_STAGES, placed.safe_stages, placed.stages - bool(plan.epilogue_loads))
    )
    own_task = bool(plan.task) and plan.per == "consumer"
    found = dict(
        stages=placed.stages,
        safe_stages=placed.safe_stages,
        over_ring=placed.over_ring is not None,
        pipelined=T.pipelined,
        own_task=own_task,
        any_task=own_task or bool(block_tasks(plan)),
        epilogue_loads=bool(plan.epilogue_loads),
        output_stages=T.output_stages if plan.output else 0,
        teams=T.consumers // T.team,
        early_stages=early,
        lagged=bool(plan.lagged),
        dynamic=T.dynamic,
        staggers=T.staggers(t.arch),
        mma_warp=T.has_mma_warp(t.arch),
        pairs=T.pairs(t.arch),
        accumulators=T.accumulator_slots if T.has_mma_warp(t.arch) else 0,
        fenced_input=bool(plan.gathered) and not gathers_by_tma(t.arch),
        broadcasts_first=early > 0 and T.broadcast_tile,
    )
    return struct(**{name: tl.constexpr(value) for name, value in found.items()})
