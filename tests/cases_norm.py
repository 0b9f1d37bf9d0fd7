"""What tests of the norms share: inputs, and comparisons of results and gradients with the reference in float64."""

import torch

from tests.util import DEVICE, poison
from tritonkittens.kernels.norm import call_plan, layer_norm, norm_torch, rms_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 6e-3, FP16: 8e-4, FP32: 2e-6}  # of relative errors: of numbers rounded once or twice
OPERANDS = ("residual", "x1", "weight", "bias", "weight1", "bias1", "rowscale")


def poisoned(monkeypatch):
    """Results and partial sums have poison where no kernel writes."""
    allocator = call_plan.allocator
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "allocator", lambda *kind: lambda: poison(allocator(*kind)()))


def numbers(shape, dtype, grad=True):
    """Normal numbers about a mean that is not zero."""
    return (torch.randn(shape, device=DEVICE) * 1.5 + 0.5).to(dtype).requires_grad_(grad)


def operands(shape, dtype, names, param_dtype=None, residual_dtype=None):
    """x and operands of these names."""
    given = {}
    for name in names:
        if name in ("residual", "x1"):
            given[name] = numbers(shape, residual_dtype or dtype if name == "residual" else dtype)
        elif name == "rowscale":
            given[name] = numbers(shape[:-1], dtype, grad=False)
        else:
            given[name] = numbers(shape[-1:], param_dtype or dtype)
    return numbers(shape, dtype), given


def outputs(found):
    return found if isinstance(found, tuple) else (found,)


def _narrow(z, rms, eps):
    """Of rows of a few columns: numbers beside their differences from the mean, and reciprocal roots. Else 1 and 0.

    Differences of numbers near each other have few digits. The gradient of x is what is left of a projection.
    """
    if z.shape[-1] > 7:
        return 1.0, 0.0
    spread = z.square().mean(-1, keepdim=True) if rms else z.var(-1, correction=0, keepdim=True)
    roots = torch.rsqrt(spread + eps)
    # of one column, the difference is 0
    return torch.ones_like(roots) if rms or z.shape[-1] == 1 else (z.abs().amax(-1, True) * roots).clamp(min=1), roots


def _assert_near(name, found, expected, bound, terms):
    """The error is small beside `expected`, or beside the `terms` of a sum of which it is what is left."""
    error, size = float((found.double() - expected).detach().norm()), max(float(expected.detach().norm()), terms)
    assert error <= bound * size, f"{name}: error {error:.3e} of {size:.3e}"


def check(rms, x, given, bound=None, **options):
    """Results of a norm, z among them, and all gradients, against the reference.

    Gradients are of results of random directions.
    """
    function = rms_norm if rms else layer_norm
    p = options.get("dropout_p", 0.0)
    found = list(function(x, **given, prenorm=True, return_dropout_mask=p > 0, **options))
    masks = (found.pop(-2), found.pop()) if p > 0 else (None, None)
    y, z = found[0], found[-1]
    expected_y, expected_y1, expected_z = norm_torch(
        x, **given, rms=rms, masks=masks, z_dtype=z.dtype, dropout_p=p, eps=options.get("eps", 1e-6),
        zero_centered_weight=options.get("zero_centered_weight", False),
    )  # fmt: skip
    results = [t for t in (y, found[1] if "weight1" in given else None, z) if t is not None]
    expected = [t for t in (expected_y, expected_y1, expected_z) if t is not None]
    bound = bound or max(BOUNDS[t.dtype] for t in (x, z, y, *given.values()))
    digits, roots = _narrow(z.detach().double(), rms, options.get("eps", 1e-6))
    for name, a, b in zip(("y", "y1", "z")[: len(results)], results, expected, strict=True):
        bias = given.get({"y": "bias", "y1": "bias1"}.get(name))
        rest = 0.0 if bias is None or x.shape[-1] > 7 else bias.detach().double().abs()
        _assert_near(
            f"result {name}", a, b, bound, float(((1.0 if name == "z" else digits) * (b.detach().abs() + rest)).norm())
        )
    leaves = {"x": x, **{name: t for name, t in given.items() if t.requires_grad}}
    directions = [torch.randn_like(t, dtype=FP32).to(t.dtype) for t in results]
    sizes = [float((digits * t.double()).norm()) for t in directions]
    terms = dict.fromkeys(("x", "residual", "x1"), float((digits * roots * directions[0].double()).norm()))
    terms |= dict.fromkeys(("weight", "bias"), sizes[0])  # sums over rows may cancel
    terms |= dict.fromkeys(("weight1", "bias1"), sizes[1])
    if z is x:
        results, expected, directions = results[:-1], expected[:-1], directions[:-1]
    gradients = torch.autograd.grad(results, list(leaves.values()), directions)
    references = torch.autograd.grad(expected, list(leaves.values()), [t.double() for t in directions])
    for (name, leaf), a, b in zip(leaves.items(), gradients, references, strict=True):
        assert a.dtype == leaf.dtype and a.shape == leaf.shape
        _assert_near(f"gradient of {name}", a, b, bound, terms[name])
    return [t.detach() for t in (*results, *gradients)]
