"""A ring of pipeline stages between a producer and its consumers: full and empty barriers, and CUTLASS's four verbs on them.

The producer acquires a stage, which waits until consumers have released it; commits the copies into it; and the copies complete its full barrier. A consumer
waits for a stage, uses it, and releases it. Each role walks over the stages with a state of its own.
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
    """Make the barriers of a ring: a record with `full` and `empty`, `stages` semaphores each. Made by the whole kernel before its roles start.

    Args:
        stages: stages of the ring, a compile-time integer.
        empty_arrivals: `consumer_release`s that a stage takes to be free: one for each consumer role, or for each of their warps where these release by
            themselves (per="warp"). 0: no empty barriers, for a ring that its consumer fills itself.
        full_arrivals: `producer_commit`s of a stage.

    Returns:
        The pipeline. Copies into stage `state.index` arrive at `pipe.full[state.index]`.

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
    """Where a role is in a ring, at its start: a record with `index` (the stage), `phase` (parity of the round) and `count` (stages so far). `pipe`: a
    pipeline, or the number of its stages."""
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
    """The state of the next stage."""
    index, phase, count = t.call(_advance, state.index, state.phase, state.count, state.stages)
    return state.replace(index=index, phase=phase, count=count)


def _barrier(t: Trace, pipe: Traced, state: Traced, which: str, verb: str) -> Traced:
    """A stage's full or empty barrier."""
    fields = pipe.fields if isinstance(pipe, struct) else {}
    if not {"full", "stages"} <= fields.keys() or not isinstance(state, struct) or "phase" not in state.fields:
        raise TileError(f"{verb} takes a pipeline (tk.pipeline) and a state of it (tk.pipeline_state)")
    if which not in fields:
        raise TileError(f"{verb}: this pipeline has no empty barriers (empty_arrivals=0)")
    return t.call(fields[which].__getitem__, state.index)


@op
def producer_acquire(t: Trace, pipe: Traced, state: Traced) -> None:
    """Wait until the consumers have released the stage (at once in the first round)."""
    t.call(wait, _barrier(t, pipe, state, "empty", "producer_acquire"), t.method(state.phase, "__xor__", 1))


@op
def producer_commit(t: Trace, pipe: Traced, state: Traced, what: Traced) -> None:
    """Announce the copies into the stage: bytes, or the tiles that they fill. One barrier may gather several copies (K and V)."""
    t.call(expect, _barrier(t, pipe, state, "full", "producer_commit"), what)


@op
def consumer_wait(t: Trace, pipe: Traced, state: Traced) -> None:
    """Wait until the copies into the stage have landed."""
    t.call(wait, _barrier(t, pipe, state, "full", "consumer_wait"), state.phase)


@op
def consumer_release(t: Trace, pipe: Traced, state: Traced, per: Traced = "role") -> None:
    """Release the stage to the producer; see `arrive` for `per`."""
    t.call(arrive, _barrier(t, pipe, state, "empty", "consumer_release"), per=per)


__all__ = ["advance", "consumer_release", "consumer_wait", "pipeline", "pipeline_state", "producer_acquire", "producer_commit"]
