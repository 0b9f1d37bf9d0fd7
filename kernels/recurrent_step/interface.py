"""A few rows as layers have them: with logarithms of decays, logits, and queries and keys of any length."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import (
    announce_write,
    have_memory,
    is_plain,
    requires_grad,
    takes,
    unseen_by_function_modes,
)
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step, run_steps
from tritonkittens.kernels.recurrent_step.config import MOST_BATCHES, MOST_KEYS, is_short

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _fits() -> None:
    """Layers make operands that fit together."""


@unseen_by_function_modes
def run_layer_steps(
    given: Step, rule: Rule, ends_wanted: bool, inplace: bool = False
) -> tuple[Tensor, Tensor | None] | None:
    """A few rows of a recurrence, or None where the kernel does not take them: more than eight rows, other dtypes, and
    where an operator of torch.library is needed, as for gradients and torch.compile.

    Args:
        given: operands, which fit together.
        rule: what the state keeps, and how operands are given.
        ends_wanted: also return the state after.
        inplace: write it over the state before, which must be contiguous.

    Returns the results (B, T, HV, V), and the state (B, HV, V, K) fp32 or None.
    """
    if not is_plain(*given) or requires_grad(*given) or not have_memory(*given):
        return None
    q, k, v, *others, z, state = given
    if (
        not is_short(q, None)
        or q.shape[0] > MOST_BATCHES
        or q.shape[-1] > MOST_KEYS
        or not q.dtype == k.dtype == v.dtype
    ):
        return None
    if not takes(HALF_TYPES, q, k, v, z) or not takes(FLOATS, q, *others, state):
        return None
    if state is not None and (state.dtype != torch.float32 or (inplace and not state.is_contiguous())):
        return None
    found = run_steps(given, rule, ends_wanted, _fits, inplace)
    if inplace and state is not None:
        announce_write(state)
    return found
