"""What tests of Hedgehog share: operands, and comparisons with all weights at once."""

import torch

from tests.cases_linear_attention import BF16, FP32, near
from tests.util import DEVICE, poison
from tritonkittens.kernels.hedgehog import call_plan, hedgehog_attention, hedgehog_attention_torch

BOUND, STATE_BOUND = 6e-3, 4e-3  # features, states and weights are rounded once to be multiplied, results once more


def poisoned(monkeypatch):
    """Results, and states, have poison where no kernel writes."""
    padded_empty, plan = call_plan.padded_empty, call_plan.Plan
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "padded_empty", lambda *kind: poison(padded_empty(*kind)))

    class Poisoned(plan):
        def states(self):
            return [poison(x) for x in super().states()]

    monkeypatch.setattr(call_plan, "Plan", Poisoned)


def operands(batch, length, heads, state=True, sequences=None, size=0.3):
    """(q, k, v, map_q, map_k, alpha, beta, initial state): scores and products with maps are of some units."""
    q, k, v = (torch.randn(batch, length, heads, 128, device=DEVICE).to(BF16) for _ in range(3))
    maps = [(size * torch.randn(heads, 128, 64, device=DEVICE)).to(BF16) for _ in range(2)]
    alpha, beta = (0.1 + torch.rand(heads, device=DEVICE, dtype=FP32) for _ in range(2))
    shape = (batch if sequences is None else sequences, heads, 128)
    before = None
    if state:
        before = torch.randn(*shape, 128, device=DEVICE, dtype=FP32), torch.rand(shape, device=DEVICE, dtype=FP32) + 0.1
    return q, k, v, *maps, alpha, beta, before


def check(given, cu_seqlens=None):
    """The result and the state after, against the definition in float64."""
    *tensors, state = given
    options = dict(initial_state=state, cu_seqlens=cu_seqlens)
    o, after = hedgehog_attention(*tensors, output_final_state=True, **options)
    expected, last = hedgehog_attention_torch(*tensors, **options)
    rows = o.shape[1] if cu_seqlens is None else int(cu_seqlens[-1])
    assert o.dtype == BF16 and {x.dtype for x in after} == {FP32}
    near("o", o[:, :rows], expected[:, :rows], BOUND)
    near("kv", after[0], last[0], STATE_BOUND)
    near("z", after[1], last[1], STATE_BOUND)
    return o, after
