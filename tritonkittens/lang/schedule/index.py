"""Integer arithmetic on task and CTA numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op


class Knob:
    """Base of the plain immutable values (frozen dataclasses) that a template may have as knobs, besides numbers,
    strings and tile types.
    """


@triton.jit
def _ceil_div(a, b):
    return (a + b - 1) // b


@op
def ceil_div(t: Trace, a: Traced, b: Traced) -> Traced:
    """Return `a` / `b`, rounded up, for non-negative integers, constants or int32 scalars."""
    return t.call(_ceil_div, a, b)


@op
def block_index(t: Trace, axis: Traced = 0) -> Traced:
    """Return the index of this CTA in the launch grid along `axis` (0, 1 or 2), an int32 scalar."""
    return t.call("program_id", axis)


@op
def block_count(t: Trace, axis: Traced = 0) -> Traced:
    """Return the number of CTAs in the launch grid along `axis` (0, 1 or 2), an int32 scalar."""
    return t.call("num_programs", axis)


@triton.jit
def _unravel(index, extent):
    return index // extent, index % extent


@op
def unravel(t: Trace, index: Traced, extent: Traced) -> Traced:
    """Return (`index` // `extent`, `index` % `extent`) for non-negative integers, two int32 scalars."""
    return t.call(_unravel, index, extent)


@triton.jit
def first_step(block, blocks, steps):
    """Return the first step of a CTA, where `steps` are split evenly."""
    return block * (steps // blocks) + tl.minimum(block, steps % blocks)
