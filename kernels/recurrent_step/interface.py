"""A few rows as layers have them: with logarithms of decays, logits, and q and k whose rows have any length."""

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
from tritonkittens.kernels._tensors import FLOATS, HALF_TYPES
from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step, run_steps
from tritonkittens.kernels.recurrent_step.config import MOST_BATCHES, MOST_KEYS, is_short


def _fits() -> None:
    """Layers make operands that fit together."""


@unseen_by_function_modes
def run_layer_steps(
    given: Step, rule: Rule, ends_wanted: bool, inplace: bool = False
) -> tuple[Tensor, Tensor | None] | None:
    """Return up to eight rows of a recurrence from one kernel launch, or None where the kernel does not take them.

    It is for layers, which run their own code where they get None: for more than eight rows, for q, k and v that are
    not all in bf16 or all in fp16, and where an operator of torch.library is needed, as for gradients and
    torch.compile. It runs on every GPU from sm_80 on.

    Args:
        given: operands, which fit together: shapes are not checked.
        rule: what a row computes, and how operands are given.
        ends_wanted: also return the state after the last row.
        inplace: write that state over the one before, which must be contiguous.

    Returns the results (B, T, HV, V) in the dtype of v, and the state (B, HV, V, K) in fp32 or None.
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
