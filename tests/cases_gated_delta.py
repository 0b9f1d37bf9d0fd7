"""What tests of the gated delta rule share: operands, and comparisons with the recurrence."""

import torch

from tests.cases_linear_attention import BF16, BOUNDS, FP32, STATE_BOUND, near, poisoned_plans
from tests.util import DEVICE
from tritonkittens.kernels.gated_delta_net import backward_plan, gated_delta_rule, gated_delta_rule_torch

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dstate")


def poisoned(monkeypatch):
    """Results and what kernels pass on have poison where none writes."""
    poisoned_plans(monkeypatch, backward_plan)


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


def check(given, cu_seqlens=None, slack=1.0, gradients=False, size=1e-5, **options):
    """The result and the state after, and gradients of random directions, against the recurrence in float64. Without a
    state before, that after has no gradient. size: of terms of gradients, which may cancel where numbers are few, or
    in one row but for their rounding."""
    leaves = [x.detach().requires_grad_(gradients) for x in given if x is not None]
    exact = [x.detach().double().requires_grad_(gradients) for x in leaves]
    found, expected = (
        function(*x[:5], initial_state=x[5] if x[5:] else None, cu_seqlens=cu_seqlens, **wanted, **options)
        for function, x, wanted in (
            (gated_delta_rule, leaves, dict(output_final_state=True)), (gated_delta_rule_torch, exact, {})
        )
    )  # fmt: skip
    q, v = leaves[0], leaves[2]
    assert found[0].dtype == v.dtype and found[1].dtype == FP32
    near("o", found[0], expected[0], slack * BOUNDS[q.dtype])
    near("state", found[1], expected[1], slack * 1.5 * STATE_BOUND[q.dtype])
    if not gradients:
        return found
    directions = [torch.randn_like(x) for x in (found if leaves[5:] else found[:1])]
    ours = torch.autograd.grad(found[: len(directions)], leaves, directions)
    product = sum((x * d.double()).sum() for x, d in zip(expected, directions, strict=False))
    theirs = [torch.zeros_like(x) for x in exact]  # where there are no rows
    if product.requires_grad:
        theirs = torch.autograd.grad(product, exact, allow_unused=True, materialize_grads=True)
    for name, leaf, a, b in zip(GRADIENTS, leaves, ours, theirs, strict=False):
        assert a.dtype == leaf.dtype
        near(name, a, b, slack * BOUNDS[q.dtype], size * a.numel() ** 0.5)
    return ours
