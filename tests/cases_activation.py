"""What tests of gated activations share: inputs, and comparisons of results and gradients with the reference."""

import torch

from tests.util import DEVICE, poison, relative_error
from tritonkittens.kernels.activation import call_plan, gated_torch, geglu, swiglu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 4.2e-3, FP16: 5.2e-4, FP32: 2e-6}  # of relative errors
KINDS = ("silu", "gelu_tanh", "gelu")
LAYOUTS = ("pair", "halves", "interleaved")


def poisoned(monkeypatch):
    """Results have poison where no kernel writes."""
    allocator = call_plan.allocator
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "allocator", lambda *kind: lambda: poison(allocator(*kind)()))


def operands(layout, shape, dtype):
    """a and b of this shape, or one tensor of both."""
    shapes = [shape, shape] if layout == "pair" else [(*shape[:-1], 2 * shape[-1])]
    return [(2 * torch.randn(s, device=DEVICE)).to(dtype).requires_grad_() for s in shapes]


def run(kind, *given, **options):
    if kind == "silu":
        return swiglu(*given, **options)
    return geglu(*given, approximate="tanh" if kind == "gelu_tanh" else "none", **options)


def check(kind, layout, given, **options):
    """The result and gradients of a direction against the reference."""
    interleaved = layout == "interleaved"
    found, expected = (
        run(kind, *given, interleaved=interleaved, **options),
        gated_torch(*given, kind=kind, interleaved=interleaved),
    )
    bound, dtype = BOUNDS[given[0].dtype], given[0].dtype
    assert found.dtype == dtype and found.is_contiguous() and relative_error(found, expected) < bound
    direction = torch.randn(found.shape, device=DEVICE).to(dtype)
    gradients = torch.autograd.grad(found, given, direction)
    references = torch.autograd.grad(expected, given, direction.double())
    for x, a, b in zip(given, gradients, references, strict=True):
        assert a.dtype == x.dtype and a.shape == x.shape and relative_error(a, b) < bound, relative_error(a, b)
    return [t.detach() for t in (found, *gradients)]
