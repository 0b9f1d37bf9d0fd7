"""Cluster launch control (Blackwell): the hardware hands out the tasks of CTAs that have not started.

A launch has a CTA (cluster) for each task. A running CTA cancels one that has not started, and computes its task. The
producer asks for the cancelled CTA's number, and broadcasts it to the other roles as with `Dynamic`. In a cluster the
CTA of rank 0 asks, and the answer arrives in all.
Source: PTX ISA, clusterlaunchcontrol; CUTLASS, "Blackwell Cluster Launch Control".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import triton
import triton.language as tl

from tritonkittens.inline_ptx import clc
from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.memory.shared_tiles import allocate_pieces
from tritonkittens.lang.memory.tma import fence_async
from tritonkittens.lang.schedule.tile_scheduler import Schedule
from tritonkittens.lang.sync.semaphores import arrive, expect, new_semaphores, role_thread, wait
from tritonkittens.lang.types.tiles import sv


@dataclass(frozen=True)
class ClusterLaunchControl(Schedule):
    """A CTA (cluster) for every task, of which as many run as fit. A running CTA cancels one that has not started, and
    computes its task. On sm_100a and sm_103a. The template needs method `tasks`.

    It fits tasks of unequal length, and GPUs that other kernels share: tasks go to the CTAs that are free. A task's
    epilogue overlaps with the next task's loads. Which CTA computes a task, and when, varies between runs.
    """

    dynamic: ClassVar[bool] = True
    one_cta_per_task: ClassVar[bool] = True
    may_have_one_tile_per_block: ClassVar[bool] = False

    def blocks(self, work_tiles: int, slots: int) -> int:
        return work_tiles

    def conflict(self, cluster: int, pingpong: bool) -> str | None:
        return "a CTA fetches one task for all its consumers; that needs pingpong=False" if pingpong else None

    def memory(self, t: Trace, cluster: int) -> dict[str, Traced]:
        t.require_capability("ClusterLaunchControl (clusterlaunchcontrol.try_cancel)", 100)
        found = {
            "answer": allocate_pieces(t, sv(tl.int32, ANSWER_WORDS), None, "answer of cluster launch control"),
            "answer_full": new_semaphores(t, 1, 1),
        }
        if cluster > 1:
            found["answer_empty"] = new_semaphores(t, 1, cluster)
        return found

    def fetch(self, t: Trace, ctx: Traced, memory: Traced, nth: Traced) -> Traced:
        return t.call(_fetch, ctx, memory, nth, unwrap(ctx.config).cluster)


ANSWER_WORDS = 16  # of which an answer takes four


@op
def _ask(t: Trace, memory: Traced, multicast: Traced) -> None:
    """Ask for a task, after earlier answers have been read."""
    t.call(fence_async)
    answer, full = memory.answer.pieces[0], t.call(memory.answer_full.__getitem__, 0)
    t.call(_try_cancel, answer, full, multicast, role_thread(t))


@triton.jit
def _try_cancel(answer, full, MULTICAST: tl.constexpr, thread):
    if thread == 0:
        clc.try_cancel(answer, full, MULTICAST, issuer="thread")


@op
def _number(t: Trace, memory: Traced) -> Traced:
    """(1 where a task was taken over, the first CTA of its cluster)."""
    answer = memory.answer.pieces[0]
    return tl.tuple([t.call(clc.is_canceled, answer), t.call(clc.first_ctaid, answer, 0)])


@triton.jit
def _fetch(ctx, memory, nth, CLUSTER: tl.constexpr):
    """The number of the next task; the number of tasks, of which no task is valid, where none is left."""
    full = memory.answer_full[0]
    expect(full, clc.RESULT_BYTES)
    if CLUSTER == 1:
        _ask(memory, False)
    elif ptx_cluster.ctarank() == 0:
        wait(memory.answer_empty[0], (nth & 1) ^ 1)  # all CTAs have read the answer before
        _ask(memory, True)
    wait(full, nth & 1)
    taken, cta = _number(memory)
    if CLUSTER > 1:
        if taken == 1:  # after the last answer nothing is asked
            fence_async()
            arrive(memory.answer_empty[0], per="warp", cta=0, scope="cta", fenced=True)
    return tl.where(taken == 1, cta, tl.num_programs(0)) // CLUSTER
