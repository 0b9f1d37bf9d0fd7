"""What tests of experts share: inputs, and comparisons of results and gradients with the reference."""

import torch

from tests.util import DEVICE, poison
from tritonkittens.kernels.experts import call_plan, experts, experts_torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 1.2e-2, FP16: 2.5e-3}  # of relative errors: of numbers rounded between products
NAMES = ("x", "weights", "gate_up", "down")


def poisoned(monkeypatch):
    """Results have poison where no kernel writes."""
    allocator = call_plan.allocator
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "allocator", lambda *kind: lambda: poison(allocator(*kind)()))


def choices_of(tokens, k, experts, elsewhere=0):
    """k different experts for each token, of some more than there are."""
    scores = torch.rand(tokens, experts + elsewhere, device=DEVICE)
    return scores.topk(k).indices


def operands(tokens, k, count, hidden, intermediate, dtype, index=None, weight_dtype=FP32):
    """(x, index, weights, gate_up, down), of which products have entries about 1."""
    index = choices_of(tokens, k, count) if index is None else index
    shapes = ((tokens, hidden), (count, 2 * intermediate, hidden), (count, hidden, intermediate))
    x, gate_up, down = (torch.randn(shape, device=DEVICE) for shape in shapes)
    gate_up, down = gate_up / hidden**0.5, down / intermediate**0.5
    x, gate_up, down = (t.to(dtype).requires_grad_() for t in (x, gate_up, down))
    weights = torch.rand(tokens, k, device=DEVICE).to(weight_dtype).requires_grad_()
    return x, index, weights, gate_up, down


@torch.no_grad()
def _terms(index, exact, direction, activation):
    """The norm of the terms whose sums along rows are the gradients of weights."""
    x, _, *matrices = exact
    ones = x.new_ones(index.shape[0], 1)
    results = [experts_torch(x, choice, ones, *matrices, activation=activation) for choice in index.split(1, 1)]
    return sum(float((direction * y).norm() ** 2) for y in results) ** 0.5


def check(given, activation="silu"):
    """The result of `experts` and its gradients of a direction against the reference."""
    x, index, *rest = given
    found = experts(*given, activation=activation)
    leaves = [x, *rest]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = experts_torch(exact[0], index, *exact[1:], activation=activation)
    assert found.dtype == x.dtype and found.shape == x.shape
    direction = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, direction)
    references = torch.autograd.grad(expected, exact, direction.double())
    for name, a, b in zip(("result", *NAMES), (found, *gradients), (expected, *references), strict=True):
        size = float(b.detach().norm())
        if name == "weights":  # sums along a row, whose terms may cancel
            size = max(size, _terms(index, exact, direction, activation))
        error, bound = float((a.detach().double() - b.detach()).norm()), max(BOUNDS.get(t.dtype, 0.0) for t in (a, x))
        assert error <= bound * size, f"{name}: error {error:.3e} of {size:.3e}"
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
    return [t.detach() for t in (found, *gradients)]
