"""Clusters of CTAs, and programmatic dependent launch."""

from __future__ import annotations

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import pdl
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.sync.semaphores import give_tensor_memory, take_tensor_memory

CLUSTER_OF_ROLES = (
    "the cluster's barrier counts the warps of every role and would wait forever; write tk.specialize(..., "
    "cluster_sync=True): all roles of all blocks of the cluster then meet before they begin and before they end"
)


@op
def cluster_sync(t: Trace) -> None:
    """Wait for all threads of all CTAs of the cluster (`cluster_size=` at launch).

    Memory that they wrote before the wait is visible after it.

    Only a kernel without warp roles may call it: the barrier counts the warps of all roles, which exist only inside
    `specialize`. A kernel with roles calls `tk.specialize(…, cluster_sync=True)` instead.
    Raises `TileError` before, inside and after roles. Source: PTX ISA, barrier.cluster.
    """
    t.require_explicit("cluster_sync")
    t.require("cluster_sync (barrier.cluster)", "tma")
    if bill().roles:
        raise TileError(f"cluster_sync {bill().roles} roles: {CLUSTER_OF_ROLES}")
    bill().cluster_synced = True
    give_tensor_memory(t)
    t.call(ptx_cluster.arrive)
    t.call(ptx_cluster.wait)
    take_tensor_memory(t)


@op
def cluster_rank(t: Trace) -> Traced:
    """Return this CTA's rank in its cluster, an int32 scalar (0 without clusters). Source: PTX ISA,
    %cluster_ctarank.
    """
    t.require_explicit("cluster_rank")
    t.require("cluster_rank (clusters)", "tma")
    return t.call(ptx_cluster.ctarank)


@op
def dependents_launch(t: Trace) -> None:
    """Allow the next kernel of the stream to start. It starts once every CTA has called this or ended.

    Only kernels launched with `launch_pdl=True` start early. Source: PTX ISA, griddepcontrol.launch_dependents.
    """
    if t.interpreted:
        return  # kernels run one after another
    t.require("dependents_launch (programmatic dependent launch)", "tma")
    t.call(pdl.launch_dependents)


@op
def dependency_wait(t: Trace) -> None:
    """Wait until the previous kernels of the stream have ended and their results are visible.

    Only a kernel launched with `launch_pdl=True` can start before that. Source: PTX ISA, griddepcontrol.wait.
    """
    if t.interpreted:
        return  # kernels run one after another
    t.require("dependency_wait (programmatic dependent launch)", "tma")
    t.call(pdl.wait)
