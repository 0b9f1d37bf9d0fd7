"""What tests of the gated delta rule share: operands, and comparisons with the recurrence."""

import torch

from tests.cases_linear_attention import BF16, BOUNDS, FP32, STATE_BOUND, near
from tests.util import DEVICE, poison
from tritonkittens.kernels.gated_delta_net import call_plan, gated_delta_rule, gated_delta_rule_torch


def poisoned(monkeypatch):
    """Results and what kernels pass on have poison where none writes."""
    padded_empty, plan = call_plan.padded_empty, call_plan.Plan
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "padded_empty", lambda *kind: poison(padded_empty(*kind)))

    class Poisoned(plan):
        def empty(self, *shape, **options):
            return poison(super().empty(*shape, **options))

    monkeypatch.setattr(call_plan, "Plan", Poisoned)


def operands(
    batch, length, heads, keys, values, group=1, dtype=BF16, fading=0.3, gates=FP32, state=True, sequences=None
):
    """(q, k, v, g, beta, initial state); keys and queries have length 1."""
    q, k = (torch.randn(batch, length, heads, keys, device=DEVICE) for _ in range(2))
    q, k = (torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in (q, k))
    v = torch.randn(batch, length, heads * group, values, device=DEVICE).to(dtype)
    g, beta = (torch.rand(batch, length, heads * group, device=DEVICE) for _ in range(2))
    shape = (batch if sequences is None else sequences, heads * group, keys, values)
    before = torch.randn(shape, device=DEVICE, dtype=FP32) if state else None
    return q, k, v, (-fading * g).to(gates), beta.to(gates), before


def check(given, cu_seqlens=None, slack=1.0, **options):
    """The result and the state after, against the recurrence in float64."""
    *tensors, state = given
    found = gated_delta_rule(*tensors, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True, **options)
    expected = gated_delta_rule_torch(*tensors, initial_state=state, cu_seqlens=cu_seqlens, **options)
    q, v = tensors[0], tensors[2]
    rows = q.shape[1] if cu_seqlens is None else int(cu_seqlens[-1])
    assert found[0].dtype == v.dtype and found[1].dtype == FP32
    near("o", found[0][:, :rows], expected[0][:, :rows], slack * BOUNDS[q.dtype])
    near("state", found[1], expected[1], slack * 1.5 * STATE_BOUND[q.dtype])
    return found
