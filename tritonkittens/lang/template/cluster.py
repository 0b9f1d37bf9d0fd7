"""How the CTAs of a cluster meet when they begin, and wait for each other when they end."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.sync.semaphores import wait
from tritonkittens.lang.template.facts import facts


@op
def open_cluster(t: Trace, T: Traced) -> Traced:
    """Before the first copy to other CTAs all warps of a cluster meet, so that every CTA has made its barriers.
    CTAs that share a task's iterations only
    arrive: they send each other nothing before its end, see `cluster_opened`. The barriers are all that was written,
    and fenced."""
    if unwrap(T).cluster_size > 1:
        t.call(ptx_cluster.arrive, "relaxed")
    if unwrap(T).cluster > 1:
        t.call(ptx_cluster.wait)


@op
def cluster_opened(t: Trace, T: Traced) -> Traced:
    """The other half of `open_cluster`, where that only arrived."""
    if unwrap(T).sharers > 1:
        t.call(ptx_cluster.wait)


@triton.jit
def leave_cluster(memory, phases, T: tl.constexpr):
    """After a CTA's last copy: no CTA of a cluster ends while others still arrive at its barriers. Its consumers
    have waited for what others write to its tiles; here its producer sees that they have released every stage. A
    barrier of the cluster would make each thread wait until all that it wrote is visible on the device
    (`fence.acq_rel.gpu`)."""
    CLUSTER: tl.constexpr = T.cluster
    STAGES: tl.constexpr = facts(T).stages
    LAGGED: tl.constexpr = facts(T).lagged
    if CLUSTER > 1:
        for slot in range(STAGES):
            wait(memory.input_pipeline.empty[slot], (phases >> slot) & 1)
            if LAGGED:
                wait(memory.lagged_pipeline.empty[slot], (phases >> slot) & 1)
