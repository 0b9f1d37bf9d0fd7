"""What tests of softmax and losses share: inputs, and comparisons of results and gradients with float64."""

import torch

from tests.util import DEVICE, poison, relative_error
from tritonkittens.kernels.loss import call_plan, cross_entropy, cross_entropy_torch, linear_cross_entropy, softmax

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 4e-3, FP16: 5e-4, FP32: 2e-6}  # of relative errors of numbers rounded once
NORMS = {"none": 2, "sum": 1, "mean": float("inf")}  # of the terms of rows, by reduction


def poisoned(monkeypatch):
    """Results have poison where no kernel writes."""
    allocator = call_plan.allocator
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "allocator", lambda *kind: lambda: poison(allocator(*kind)()))


def numbers(shape, dtype, scale=2.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()


def targets(shape, classes, dtype=torch.int64, ignored=0.3, ignore_index=-100):
    """Random classes, a share of them ignored, but not the first one: a mean over no row is NaN."""
    found = torch.randint(0, classes, shape, device=DEVICE, dtype=dtype)
    left_out = torch.rand(shape, device=DEVICE) < ignored
    left_out.view(-1)[:1] = False
    return torch.where(left_out, ignore_index, found).to(dtype)


def assert_near(found, expected, terms):
    """The error of `found`, in fp32 or rounded to its dtype, is small beside `expected`, or beside the `terms` of a
    difference that is left of them."""
    assert found.shape == expected.shape and torch.isfinite(expected).all()
    subnormal = 2.0**-25 * found.numel() ** 0.5 if found.dtype == FP16 else 0.0  # an error of numbers that are small
    found, expected = found.detach(), expected.detach()
    error, size = float((found.double() - expected).norm()), max(float(expected.norm()), terms)
    assert error <= BOUNDS[found.dtype] * size + subnormal, f"error {error:.3e} of {size:.3e}"


def check_softmax(x, **options):
    """The softmax of x and its gradient against float64."""
    y = softmax(x, **options)
    expected = torch.softmax(x.double(), -1)
    assert y.dtype == options.get("out_dtype", x.dtype) and y.shape == x.shape
    assert relative_error(y, expected) < BOUNDS[y.dtype]
    direction = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, direction)
    # from y as it is rounded, of which the sum over a row may cancel
    rounded, g = y.detach().double(), direction.double()
    reference = rounded * (g - (g * rounded).sum(-1, keepdim=True))
    assert found.dtype == x.dtype
    assert_near(found, reference, float((rounded * g).norm()))
    return y.detach(), found


def check(x, target, return_lse=False, inplace_backward=False, **options):
    """A cross entropy and its gradient against the reference. Incoming gradients are random."""
    exact = x.detach().double().requires_grad_()
    x.requires_grad_()
    logits = (
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_().view_as(x) if inplace_backward else x
    )
    found = cross_entropy(logits, target, return_lse=return_lse, inplace_backward=inplace_backward, **options)
    results = found if return_lse else (found,)
    expected = cross_entropy_torch(exact, target, **options)[: len(results)]
    # a soft cap is what is left of it and the double of it
    sizes = x.detach().double().abs().amax(-1).clamp(min=max(1.0, options.get("softcap") or 0.0)).flatten()
    for a, b, of_rows in zip(results, expected, (options.get("reduction", "mean"), "none"), strict=False):
        assert a.dtype == FP32
        assert_near(a, b, float(sizes.norm(p=NORMS[of_rows])) if len(sizes) else 0.0)
    directions = [torch.randn(t.shape, device=t.device) for t in results]
    (gradient,) = torch.autograd.grad(results, logits, directions)
    (reference,) = torch.autograd.grad(expected, exact, [t.double() for t in directions])
    assert gradient.dtype == x.dtype and gradient.shape == x.shape
    assert (gradient.data_ptr() == logits.data_ptr() and x.numel() > 0) == (inplace_backward and x.numel() > 0)
    rows = (target != options.get("ignore_index", -100)).sum() if options.get("reduction", "mean") == "mean" else 1
    assert_near(gradient, reference, sum(float(g.norm()) for g in directions) / float(rows))
    return [t.detach() for t in (*results, gradient)]


def check_linear(x, weight, target, bias=None, **options):
    """A linear layer and cross entropy, and all gradients, against float64 with logits rounded as they are."""
    operands = {"input": x, "linear_weight": weight, "linear_bias": bias}
    leaves = {name: t for name, t in operands.items() if t is not None and t.requires_grad}
    loss = linear_cross_entropy(x, weight, target, bias, **options)
    exact = [t if t is None else t.detach().double().requires_grad_() for t in operands.values()]
    logits = torch.nn.functional.linear(*exact)
    logits = logits + (logits.to(x.dtype).double() - logits).detach()
    expected = cross_entropy_torch(logits, target, **options)[0]
    assert loss.dtype == FP32 and loss.shape == expected.shape
    # a logit, which is a product in fp32, now and then rounds the other way
    assert (loss - expected).detach().abs().max() < BOUNDS[x.dtype] * max(
        float(expected.detach().norm()), float(logits.detach().abs().max())
    )
    if not leaves:
        return [loss]
    direction = torch.randn(loss.shape, device=loss.device)
    gradients = torch.autograd.grad(loss, list(leaves.values()), direction)
    of_all = dict(
        zip(
            operands,
            torch.autograd.grad(expected, [t for t in exact if t is not None], direction.double()),
            strict=False,
        )
    )
    for (name, leaf), found in zip(leaves.items(), gradients, strict=True):
        assert found.dtype == leaf.dtype and found.shape == leaf.shape
        size = max(float(of_all[name].norm()), 1e-6)
        error = float((found.double() - of_all[name]).norm()) / size
        assert error < 2 * BOUNDS[x.dtype], f"gradient of {name}: {error}"
    return [loss.detach(), *gradients]
