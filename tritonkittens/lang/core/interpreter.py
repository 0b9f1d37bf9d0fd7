"""Corrections of Triton's interpreter, where it differs from a GPU.

The interpreter holds bf16 and fp8 as bit patterns. It computes with the patterns, truncates where hardware rounds,
and fills with unconverted numbers. torch converts correctly. Conditions do not broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tritonkittens.inline_ptx._traced import Traced
from tritonkittens.lang.core.dtypes import FP8, to_torch

if TYPE_CHECKING:
    from tritonkittens.lang.core.backend import Trace

HELD_AS_BITS = {tl.bfloat16: torch.int16, **dict.fromkeys(FP8, torch.uint8)}


def _values(x: Traced) -> torch.Tensor:
    data = torch.from_numpy(np.array(x.handle.data))
    return data.view(HELD_AS_BITS[x.dtype]).view(to_torch(x.dtype)).float() if x.dtype in HELD_AS_BITS else data


def _toward_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    nearest = values.to(dtype)
    above = nearest.float().abs() > values.abs()
    # one unit in the last place toward zero, because a float's pattern is a sign and a magnitude
    return torch.where(above, nearest.view(torch.int16) - 1, nearest.view(torch.int16)).view(dtype)


def must_cast(x: Traced, dtype: tl.dtype, fp_downcast_rounding: str | None = None) -> bool:
    """Whether the interpreter's own conversion of `x` to `dtype` is wrong."""
    return x.dtype != dtype and (fp_downcast_rounding == "rtz" or dtype in HELD_AS_BITS or x.dtype in HELD_AS_BITS)


def cast(x: Traced, dtype: tl.dtype, fp_downcast_rounding: str | None = None) -> Traced:
    """Convert `x` as the hardware does: to nearest even (or toward zero), saturating in fp8."""
    values = _values(x)
    if fp_downcast_rounding == "rtz":
        out = _toward_zero(values, to_torch(dtype))
    elif dtype in FP8:
        limit = torch.finfo(to_torch(dtype)).max
        out = values.float().clamp(-limit, limit).to(to_torch(dtype))
    elif dtype == tl.int1:
        out = values != 0
    else:
        out = values.to(to_torch(dtype))
    data = out.view(HELD_AS_BITS[dtype]).numpy() if dtype in HELD_AS_BITS else out.numpy()
    data = data.view(np.uint16) if dtype == tl.bfloat16 else data
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(x.shape)) if x.type.is_block() else dtype)


def condition(x: Traced) -> Traced:
    """Return the result of comparing scalars in a form that broadcasts.

    The interpreter keeps the compared values' type, and would spread that over a tile.
    """
    return tl.tensor(TensorHandle(np.asarray(x.handle.data, dtype=bool), tl.int1), tl.int1)


def in_fp32(t: Trace, fn: Callable[..., Traced], narrow: bool = True) -> Callable[..., Traced]:
    """Wrap `fn` for operands that the interpreter cannot compute with: it computes in fp32 and, with `narrow`, rounds
    to their dtype.

    Outside the interpreter, `fn` is returned unchanged.
    """
    if not t.interpreted:
        return fn

    def computed(*operands: Traced) -> Traced:
        tensors = [x for x in operands if isinstance(x, tl.tensor)]
        if not any(x.dtype in HELD_AS_BITS for x in tensors):
            return fn(*operands)
        out = fn(
            *(
                t.method(x, "to", tl.float32) if isinstance(x, tl.tensor) and x.dtype in HELD_AS_BITS else x
                for x in operands
            )
        )
        # scalars take the tile's dtype
        floats = {
            x.dtype
            for x in tensors
            if x.dtype.is_floating() and (x.type.is_block() or not any(y.type.is_block() for y in tensors))
        }
        return t.method(out, "to", floats.pop()) if narrow and out.dtype == tl.float32 and len(floats) == 1 else out

    return computed
