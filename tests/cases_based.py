"""What tests of Based share: operands, and comparisons with all weights at once."""

import torch

from tests.cases_linear_attention import BF16, FP32, near, poisoned_plans
from tests.util import DEVICE
from tritonkittens.kernels.based import based_attention, based_attention_torch

BOUND = 6e-3  # features, states and weights are rounded once to be multiplied, results once more
GRADIENT_BOUND = 6e-3
NORMALIZED_BOUND = 12e-3  # of gradients: differences of two products, with roundings of their own
STATE_BOUND = 4e-3
STATE_ROWS = 273


def poisoned(monkeypatch):
    """Results and what kernels pass on have poison where none writes."""
    poisoned_plans(monkeypatch)


def operands(batch, length, heads, values, state=True, sequences=None):
    """(q, k, v, initial state)."""
    q, k = (torch.randn(batch, length, heads, 16, device=DEVICE).to(BF16) for _ in range(2))
    v = torch.randn(batch, length, heads, values, device=DEVICE).to(BF16)
    shape = (batch if sequences is None else sequences, heads, STATE_ROWS, values)
    return q, k, v, 3 * torch.randn(shape, device=DEVICE, dtype=FP32) if state else None


def symmetric(state):
    """A state whose rows of kᵢ kⱼ and kⱼ kᵢ are their mean, which is what an initial one means."""
    squares = state[..., 17:, :].unflatten(-2, (16, 16))
    return torch.cat([state[..., :17, :], ((squares + squares.transpose(-3, -2)) / 2).flatten(-3, -2)], -2)


def check(given, cu_seqlens=None, gradients=False, **options):
    """The result and the state after, and gradients of random directions, against the definition in float64."""
    leaves = [x.detach().requires_grad_(gradients) for x in given if x is not None]
    exact = [x.detach().double().requires_grad_(gradients) for x in leaves]
    (*tensors, state), (*theirs, before) = ((x[:3] + [x[3] if x[3:] else None]) for x in (leaves, exact))
    found = based_attention(*tensors, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True, **options)
    expected = based_attention_torch(*theirs, initial_state=before, cu_seqlens=cu_seqlens, **options)
    v = tensors[2]
    assert found[0].dtype == v.dtype and found[1].dtype == FP32
    near("o", found[0], expected[0], BOUND)
    near("state", found[1], symmetric(expected[1]), STATE_BOUND)
    if gradients:
        directions = torch.randn_like(found[0]), torch.randn_like(found[1])
        ours = torch.autograd.grad(found, leaves, directions)
        wanted = torch.autograd.grad(expected, exact, [d.double() for d in directions])
        for name, leaf, a, b in zip(("dq", "dk", "dv", "dstate"), leaves, ours, wanted, strict=False):
            assert a.dtype == leaf.dtype
            a, b = (symmetric(a), symmetric(b)) if name == "dstate" else (a, b)
            near(name, a, b, NORMALIZED_BOUND if options.get("normalize") else GRADIENT_BOUND)
    return [x.detach() for x in found]
