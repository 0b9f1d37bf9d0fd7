"""The state of a ring of pipeline stages, and CUTLASS's four verbs on it."""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.sync.semaphores import arrive, expect, wait


@op
def pipeline(t: Trace, stages: Any) -> Any:
    """The state of a ring of `stages` slots at its start: a record with `index` (the slot), `phase` (parity of the round) and `count`
    (steps so far)."""
    stages = unwrap(stages)
    if not isinstance(stages, int) or stages < 1:
        raise TileError(f"pipeline({stages!r}): a ring has at least one stage")
    return struct(index=t.scalar(0), phase=t.scalar(0), count=t.scalar(0), stages=tl.constexpr(stages))


@triton.jit
def _advance(index, phase, count, STAGES: tl.constexpr):
    wrapped = index + 1 == STAGES
    return tl.where(wrapped, 0, index + 1), tl.where(wrapped, phase ^ 1, phase), count + 1


@op
def advance(t: Trace, ring: Any) -> Any:
    """The next state of a pipeline ring."""
    index, phase, count = t.call(_advance, ring.index, ring.phase, ring.count, ring.stages)
    return ring.replace(index=index, phase=phase, count=count)


@op
def producer_acquire(t: Trace, ring: Any, finished: Any) -> Any:
    """Wait until the consumers have released the ring's slot (at once in the first round)."""
    t.call(wait, t.call(finished.__getitem__, ring.index), t.method(ring.phase, "__xor__", 1))


@op
def producer_commit(t: Trace, ring: Any, arrived: Any, what: Any) -> Any:
    """Announce the copies into the ring's slot: bytes, or the tiles that they fill. One barrier may gather several copies (K and V)."""
    t.call(expect, t.call(arrived.__getitem__, ring.index), what)


@op
def consumer_wait(t: Trace, ring: Any, arrived: Any) -> Any:
    """Wait until the copies into the ring's slot have landed."""
    t.call(wait, t.call(arrived.__getitem__, ring.index), ring.phase)


@op
def consumer_release(t: Trace, ring: Any, finished: Any, per: Any = "role") -> Any:
    """Give the ring's slot back to the producer; see `arrive` for `per`."""
    t.call(arrive, t.call(finished.__getitem__, ring.index), per=per)
