"""What tests of linear attention share: operands, and comparisons of results and gradients with the recurrence."""

import torch

from tests.util import DEVICE, poison
from tritonkittens.kernels import _sequences
from tritonkittens.kernels._sequences import SequencePlan
from tritonkittens.kernels.linear_attention import backward_plan, linear_attention, linear_attention_torch
from tritonkittens.kernels.recurrent_step import call_plan as rows_plan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 6e-3, FP16: 1e-3}  # states and weights are rounded once to be multiplied, results once more
DIRECTIONS = 8  # random ones, whose gradients say what size is typical
STATE_BOUND = {BF16: 4e-3, FP16: 6e-4}


def poisoned_rows(monkeypatch):
    """Results of a few rows, and states after them."""
    allocator = rows_plan.allocator
    monkeypatch.setattr(rows_plan, "_plans", {})
    monkeypatch.setattr(rows_plan, "allocator", lambda *kind: lambda: poison(allocator(*kind)()))


def poisoned_plans(monkeypatch, *modules):
    """Whatever memory plans, and these modules, give to kernels."""
    poisoned_rows(monkeypatch)
    for place, name in ((SequencePlan, "empty"), *((module, "padded_empty") for module in (_sequences, *modules))):
        make = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *kind, make=make, **options: poison(make(*kind, **options)))


def poisoned(monkeypatch):
    """Results, states, gradients, and what kernels pass on have poison where none writes."""
    poisoned_plans(monkeypatch, backward_plan)


def starts_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)


def operands(batch, length, heads, keys, values, dtype=BF16, decays=(0.02, 1.5, 0.3, 0.0), state=True, sequences=None):
    """(q, k, v, decay, initial state), of which results have entries about 1. The first head fades slowly, the second
    within a few steps."""
    q, k = (torch.randn(batch, length, heads, keys, device=DEVICE).to(dtype) for _ in range(2))
    v = torch.randn(batch, length, heads, values, device=DEVICE).to(dtype)
    rate = None if decays is None else torch.tensor(decays, device=DEVICE, dtype=FP32).repeat(-(-heads // 4))[:heads]
    shape = (batch if sequences is None else sequences, heads, keys, values)
    return q, k, v, rate, torch.randn(shape, device=DEVICE, dtype=FP32) if state else None


def near(name, found, expected, bound, size=0.0):
    """The error of `found` beside `expected`, or beside the `size` of terms that may cancel."""
    assert found.shape == expected.shape, name
    error, size = (
        float((found.detach().double() - expected.detach()).norm()),
        max(float(expected.detach().norm()), size),
    )
    assert error <= bound * size, f"{name}: error {error:.3e} of {size:.3e}"


def typical(results, leaf):
    """The size of gradients of random directions. The terms of a few numbers may cancel in one of these."""
    found = [
        torch.autograd.grad(
            results, leaf, [torch.randn_like(t) for t in results], retain_graph=True, materialize_grads=True
        )[0]
        for _ in range(DIRECTIONS)
    ]
    return float(torch.stack(found).norm()) / DIRECTIONS**0.5


def check(given, cu_seqlens=None, gradients=False, **options):
    """Results and the state after, and gradients of random directions, against the recurrence in float64. gradients:
    True, or "gates" for those of the decays or gates, too."""
    q, k, v, decay, state = given
    named = dict(q=q, k=k, v=v, initial_state=state)
    if gradients == "gates":
        named |= dict(decay=decay, g=options.pop("g", None))
    else:
        options["decay"] = decay
    leaves = {n: x.detach().requires_grad_(bool(gradients)) for n, x in named.items() if x is not None}
    options |= dict(cu_seqlens=cu_seqlens)
    found = linear_attention(**leaves, output_final_state=True, **options)
    exact = {n: x.detach().double().requires_grad_(bool(gradients)) for n, x in leaves.items()}
    expected = linear_attention_torch(**exact, **options)
    assert found[0].dtype == v.dtype and found[1].dtype == FP32
    near("o", found[0], expected[0], BOUNDS[q.dtype])
    near("state", found[1], expected[1], STATE_BOUND[q.dtype])
    grads = []
    if gradients:
        directions = torch.randn_like(found[0]), torch.randn_like(found[1])
        grads = torch.autograd.grad(found, list(leaves.values()), directions)
        theirs = torch.autograd.grad(
            expected, list(exact.values()), [d.double() for d in directions], retain_graph=True
        )
        for (name, leaf), a, b in zip(leaves.items(), grads, theirs, strict=True):
            assert a.dtype == leaf.dtype
            of_heads = name == "decay"  # sums of all rows
            size = typical(expected, exact[name]) if of_heads else 0.0
            near(f"d{name}", a, b, BOUNDS[q.dtype] * (2 if of_heads else 1), size)
    return [t.detach() for t in (*found, *grads)]
