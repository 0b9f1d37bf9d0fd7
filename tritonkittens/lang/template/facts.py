"""What is constant of a template on an architecture, for the code of its roles."""
from __future__ import annotations

from typing import Any

import triton.language as tl

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.template.index_prefetch import iterations_of_window

EARLY_SLOTS = 2  # measured on the H200: 1 to 2 % of a GEMM of 1024³; more keep the roles waiting for the barriers between their copies


@op
def facts(t: Trace, T: Any) -> Any:
    """A record of constants.

    - `stages` of the rings; `safe_stages` of them lie under no finish tiles, where these lie `over_ring`; `output_stages` of lcsf;
    - `teams` of consumers, each of which has tasks of its own;
    - `early_stages`: filled before the roles begin, for nothing must be waited for;
    - `window`: iterations whose entries are read at a time, 0 without entries;
    - `packs`: tiles of packed results, one of which leaves in `packed_every` iterations.
    """
    T = unwrap(T)
    placed, plan = T.placement(t.arch), T._plan
    early = 0 if T.dynamic else min(EARLY_SLOTS, placed.safe_stages, placed.stages - bool(plan.epilogue_loads))
    found = dict(
        stages=placed.stages, safe_stages=placed.safe_stages, over_ring=placed.over_ring is not None, pipelined=T.pipelined, has_scratch=bool(plan.task),
        has_preload=bool(plan.epilogue_loads), output_stages=T.output_stages if plan.output else 0, teams=T.consumers // T.team, early_stages=early,
        has_trailing=bool(plan.lagged), has_kept=bool(plan.common or plan.late_task), dynamic=T.dynamic, staggers=T.staggers(t.arch),
        lagged_producer=T.lagged_producer, tells_first=early > 0 and T.broadcast_tile, window=iterations_of_window(plan), packs=len(plan.packed),
        packed_every=1 + plan.deferred_steps,
    )  # fmt: skip
    return struct(**{name: tl.constexpr(value) for name, value in found.items()})
