"""A ring of pipeline stages between a producer and its consumers: full and empty barriers, and CUTLASS's four verbs.

The producer acquires a stage: it waits until the consumers have released that stage. It then commits the copies into
the stage. When the copies land, they complete the stage's full barrier.
A consumer waits for a stage, uses it and releases it. Each role walks over the stages with its own state.
Source: CUTLASS, `cutlass/pipeline/pipeline.hpp` (PipelineTmaAsync, PipelineState); PTX ISA, mbarrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.sync.semaphores import arrive, expect, make_semaphores, new_semaphores, publish, wait


@op
def pipeline(t: Trace, stages: Traced, empty_arrivals: Traced = 1, full_arrivals: Traced = 1) -> Traced:
    """Make the barriers of a ring. The whole kernel calls it, before the warp roles start.

    Args:
        stages: the stages of the ring, a compile-time integer.
        empty_arrivals: the `consumer_release` calls that free a stage: one for each consumer role, or one for each of
            its warps with per="warp". 0 makes no empty barriers, for a ring that its consumer fills itself.
        full_arrivals: the `producer_commit` calls of a stage.

    Returns:
        The pipeline, a record with `full` and `empty` (`stages` semaphores each). Copies into stage `state.index`
        arrive at `pipe.full[state.index]`.

    Raises:
        TileError: for less than one stage.

    Example::

        pipe = tk.pipeline(STAGES)
        state = tk.pipeline_state(pipe)
        tk.producer_acquire(pipe, state)
        tk.producer_commit(pipe, state, a)
        tk.load_async(a[state.index], A, (row, i), pipe.full[state.index])
        state = tk.advance(state)
    """
    stages = unwrap(stages)
    if not isinstance(stages, int) or stages < 1:
        raise TileError(f"pipeline({stages!r}): a ring has at least one stage")
    found = {"full": new_semaphores(t, stages, full_arrivals)}
    if unwrap(empty_arrivals) != 0:
        found["empty"] = new_semaphores(t, stages, empty_arrivals)
    make_semaphores(t, list(found.values()))
    publish(t)
    t.call(gl.barrier)
    return struct(**found, stages=tl.constexpr(stages))


@op
def pipeline_state(t: Trace, pipe: Traced) -> Traced:
    """Return a role's position at the start of a ring.

    Args:
        pipe: a pipeline, or the number of its stages.

    Returns:
        A record of the int32 scalars `index` (the stage), `phase` (parity of the round) and `count` (stages passed so
        far).

    Raises:
        TileError: for anything else than a pipeline or a positive number of stages.
    """
    stages = unwrap(pipe.stages if isinstance(pipe, struct) else pipe)
    if not isinstance(stages, int) or stages < 1:
        raise TileError(f"pipeline_state({stages!r}): takes a pipeline (tk.pipeline) or the number of its stages")
    return struct(index=t.scalar(0), phase=t.scalar(0), count=t.scalar(0), stages=tl.constexpr(stages))


@triton.jit
def _advance(index, phase, count, STAGES: tl.constexpr):
    wrapped = index + 1 == STAGES
    return tl.where(wrapped, 0, index + 1), tl.where(wrapped, phase ^ 1, phase), count + 1


@op
def advance(t: Trace, state: Traced) -> Traced:
    """Return the state after `state`: that of the next stage. See `pipeline_state`."""
    index, phase, count = t.call(_advance, state.index, state.phase, state.count, state.stages)
    return state.replace(index=index, phase=phase, count=count)


def _barrier(t: Trace, pipe: Traced, state: Traced, which: str, verb: str) -> Traced:
    """Return a stage's full or empty barrier."""
    fields = pipe.fields if isinstance(pipe, struct) else {}
    if not {"full", "stages"} <= fields.keys() or not isinstance(state, struct) or "phase" not in state.fields:
        raise TileError(f"{verb} takes a pipeline (tk.pipeline) and a state of it (tk.pipeline_state)")
    if which not in fields:
        raise TileError(f"{verb}: this pipeline has no empty barriers (empty_arrivals=0)")
    return t.call(fields[which].__getitem__, state.index)


@op
def producer_acquire(t: Trace, pipe: Traced, state: Traced) -> None:
    """Wait until the consumers of `pipe` have released the stage of `state`. In the first round the producer does not
    wait.
    """
    t.call(wait, _barrier(t, pipe, state, "empty", "producer_acquire"), t.method(state.phase, "__xor__", 1))


@op
def producer_commit(t: Trace, pipe: Traced, state: Traced, what: Traced) -> None:
    """Announce the copies into the stage of `state` of the pipeline `pipe`. One barrier may gather several copies (K
    and V).

    `what` is the number of bytes, or the tiles that the copies fill. The copies name `pipe.full[state.index]` as
    their semaphore.
    """
    t.call(expect, _barrier(t, pipe, state, "full", "producer_commit"), what)


@op
def consumer_wait(t: Trace, pipe: Traced, state: Traced) -> None:
    """Wait until the copies into the stage of `state` of the pipeline `pipe` have landed."""
    t.call(wait, _barrier(t, pipe, state, "full", "consumer_wait"), state.phase)


@op
def consumer_release(t: Trace, pipe: Traced, state: Traced, per: Traced = "role") -> None:
    """Release the stage of `state` to the producer of the pipeline `pipe`. `per` is "role" or "warp", as in
    `arrive`."""
    t.call(arrive, _barrier(t, pipe, state, "empty", "consumer_release"), per=per)


__all__ = [
    "advance",
    "consumer_release",
    "consumer_wait",
    "pipeline",
    "pipeline_state",
    "producer_acquire",
    "producer_commit",
]
