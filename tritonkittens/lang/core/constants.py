"""Hardware numbers that every layer uses, and the Python value of a compile-time constant."""

from __future__ import annotations

import triton.language as tl
from triton.language.core import constexpr

from tritonkittens.inline_ptx._traced import Traced

WARPS = 4  # warps of a consumer warpgroup
GROUP = WARPS * 32  # threads of a consumer warpgroup


BULK = 16  # bytes: unit and alignment of bulk copies


def unwrap(x: Traced) -> Traced:
    """Return the Python value of a `constexpr`; anything else unchanged. Lists and tuples are unwrapped element by
    element.
    """
    if isinstance(x, constexpr):
        return unwrap(x.value)
    if isinstance(x, (list, tuple, tl.tuple)) and not hasattr(x, "_fields"):
        return tuple(unwrap(i) for i in x)
    return x
