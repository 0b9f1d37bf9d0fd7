"""What tests of rotary embeddings share: inputs, and comparisons of results and gradients with the reference."""

import torch

from tests.util import DEVICE, poison, relative_error
from tritonkittens.kernels.rotary import call_plan, rotary, rotary_torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 4e-3, FP16: 6e-4, FP32: 2e-6}  # of relative errors


def poisoned(monkeypatch):
    """Results have poison where no kernel writes."""
    allocator = call_plan.allocator
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "allocator", lambda *kind: lambda: poison(allocator(*kind)()))


def heads(shape, dtype=BF16):
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def angles(*shape, dtype=FP32):
    """cos and sin of any angles: those of a test need not be powers."""
    angle = torch.randn(shape, device=DEVICE) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


@torch.no_grad()
def _terms(given, directions, weights, eps):
    """Of gradients of q, k and weights of norms: sizes of terms of which these are sums that may cancel."""
    if not weights:
        return [0.0] * len(given)
    factors = [w.double() * torch.rsqrt(x.double().square().mean(-1, True) + eps) for x, w in zip(given, weights)]
    sizes = [float(t.double().norm()) for t in directions]
    return [size * float(f.square().mean().sqrt()) if f.numel() else 0.0 for size, f in zip(sizes, factors)] + sizes


def check(q, k, cos, sin, rows=None, **options):
    """Results and gradients of `rotary` against the reference. `rows`: of cos and sin, those of the tokens."""
    width = (options.get("rotary_dim") or 2 * cos.shape[-1]) // 2
    table = [t[..., :width] if rows is None else t[rows, :width] for t in (cos, sin)]
    named = {name: options[name] for name in ("interleaved", "unsqueeze_dim", "eps") if name in options}
    given = [x for x in (q, k) if x is not None]
    weights = [options[name] for name in ("q_weight", "k_weight")[: len(given)] if name in options]
    pairs = zip(given, weights or [None, None], strict=False)
    expected = [rotary_torch(x, *table, weight=weight, **named) for x, weight in pairs]
    directions = [torch.randn(x.shape, device=DEVICE).to(x.dtype) for x in given]
    leaves = given + weights
    references = torch.autograd.grad(expected, leaves, [t.double() for t in directions])
    if options.get("inplace"):
        given = [x * 1 for x in given]  # no leaves, and of the same strides
    found = rotary(given[0], given[1] if k is not None else None, cos, sin, **options)
    found = [found] if k is None else list(found)
    if options.get("inplace"):
        assert all(x is y for x, y in zip(found, given, strict=True))
    gradients = torch.autograd.grad(found, leaves, directions)
    bound = max(BOUNDS[t.dtype] for t in leaves) * (1 + 2 * bool(weights))
    for name, a, b in zip("qk", found, expected, strict=False):
        assert a.dtype == q.dtype and relative_error(a, b) <= bound, f"{name}: {relative_error(a, b)}"
    sizes = _terms(leaves[: len(given)], directions, weights, options.get("eps", 1e-6))
    for leaf, a, b, terms in zip(leaves, gradients, references, sizes, strict=True):
        assert a.dtype == leaf.dtype and a.shape == leaf.shape
        error, size = float((a.double() - b).norm()), max(float(b.norm()), terms)
        assert error <= bound * size, f"gradient of {tuple(leaf.shape)}: error {error:.3e} of {size:.3e}"
    return [t.detach() for t in (*found, *gradients)]
