"""How the thread blocks of a cluster meet when they begin, and wait for each other when they end."""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.sync.semaphores import wait
from tritonkittens.lang.template.facts import facts


@op
def open_cluster(t: Trace, T: Any) -> Any:
    """Before the first copy to other blocks all warps of a cluster meet: no block is written to whose semaphores are not there yet. Blocks that share a task's
    iterations only say that they are there: they send each other nothing before its end, see `_opened`. Semaphores are all that was written, and fenced."""
    if unwrap(T).cluster_size > 1:
        t.call(ptx_cluster.arrive, "relaxed")
    if unwrap(T).cluster > 1:
        t.call(ptx_cluster.wait)


@op
def cluster_opened(t: Trace, T: Any) -> Any:
    """The other half of `_open`, where that is not all."""
    if unwrap(T).sharers > 1:
        t.call(ptx_cluster.wait)


@triton.jit
def leave_cluster(memory, phases, T: tl.constexpr):
    """Behind a block's last copy: no block of a cluster ends while others still arrive at its semaphores. What they write to its tiles its consumers have
    waited for; that they have given every slot back its producer sees here. A barrier of the cluster would have each of its threads wait until all that it
    wrote is visible on the device (`fence.acq_rel.gpu`)."""
    CLUSTER: tl.constexpr = T.cluster
    STAGES: tl.constexpr = facts(T).stages
    TRAILING: tl.constexpr = facts(T).has_trailing
    if CLUSTER > 1:
        for slot in range(STAGES):
            wait(memory.finished[slot], (phases >> slot) & 1)
            if TRAILING:
                wait(memory.lagged_empty[slot], (phases >> slot) & 1)
