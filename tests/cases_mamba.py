"""What tests of Mamba-2's scan share: operands, and comparisons with the recurrence."""

import torch

from tests.cases_linear_attention import BF16, BOUNDS, FP32, STATE_BOUND, near, poisoned_plans, typical
from tests.util import DEVICE
from tritonkittens.kernels.linear_attention import backward_plan
from tritonkittens.kernels.mamba2 import mamba_chunk_scan, mamba_chunk_scan_torch

FEW = 64  # numbers that may all be small because terms cancel
OPTIONS = {
    "plain": {},
    "all": dict(D=True, z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.01, 1.0)),
    "D of columns": dict(D="columns", dt_softplus=True),
    "z": dict(z=True, dt_bias=True),
}


def poisoned(monkeypatch):
    """Results and what kernels pass on have poison where none writes."""
    poisoned_plans(monkeypatch, backward_plan)


def operands(
    batch, length, heads, dims, groups=1, dtype=BF16, steps=FP32, fading=1.0, options="all", state=True, sequences=None
):
    """Arguments of `mamba_chunk_scan` by name. dims: P and N. steps: dtype of dt, D and the bias. fading: how fast
    states fade, at most. Without softplus, some steps are negative, which the least step replaces."""

    def randn(*shape):
        return torch.randn(shape, device=DEVICE, dtype=FP32)

    columns, states = dims
    x, B, C = (randn(batch, length, h, n).to(dtype) for h, n in ((heads, columns), (groups, states), (groups, states)))
    kind = dict(OPTIONS[options])
    for name, shape in (("D", (heads, columns) if kind.get("D") == "columns" else (heads,)), ("dt_bias", (heads,))):
        if name in kind:
            kind[name] = randn(*shape).to(steps)
    if "z" in kind:
        kind["z"] = randn(*x.shape).to(dtype)
    before = randn(batch if sequences is None else sequences, heads, columns, states) if state else None
    A = -fading * torch.rand(heads, device=DEVICE, dtype=FP32)
    dt = randn(batch, length, heads).to(steps)
    return dict(x=x, dt=dt, A=A, B=B, C=C, **kind, initial_states=before)


def _is_float(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def check(given, cu_seqlens=None, size=0.5, gradients=False):
    """The result and the states after, and gradients of random directions, against the recurrence in float64. size: of
    an entry's terms, which may cancel where entries are few."""
    leaves = {n: t.detach().requires_grad_(gradients) for n, t in given.items() if _is_float(t)}
    exact = {n: t.detach().double().nan_to_num().requires_grad_(gradients) for n, t in leaves.items()}  # poison is 0
    found = mamba_chunk_scan(**given | leaves, cu_seqlens=cu_seqlens, return_final_states=True)
    expected = mamba_chunk_scan_torch(**given | exact, cu_seqlens=cu_seqlens)
    x = given["x"]
    assert found[0].dtype == x.dtype and found[1].dtype == FP32
    near("y", found[0], expected[0], BOUNDS[x.dtype], size * found[0].numel() ** 0.5)
    near("states", found[1], expected[1], STATE_BOUND[x.dtype], size * max(found[1].numel(), 16) ** 0.5)
    if gradients:
        directions = torch.randn_like(found[0]), torch.randn_like(found[1])
        grads = torch.autograd.grad(found, list(leaves.values()), directions)
        theirs = torch.autograd.grad(
            expected, list(exact.values()), [d.double() for d in directions], retain_graph=True, materialize_grads=True
        )
        for (name, leaf), a, b in zip(leaves.items(), grads, theirs, strict=True):
            assert a.dtype == leaf.dtype and a.isfinite().all()
            of_heads = name in ("A", "dt_bias", "D") and leaf.ndim == 1  # sums of all rows
            # 0.01: terms of one row cancel but for their rounding in fp32
            size_of_terms = max(typical(expected, exact[name]), 0.01) if leaf.numel() < FEW else 0.0
            near(f"d{name}", a, b, BOUNDS[x.dtype] * (2 if of_heads else 1), size_of_terms)
        return [*found, *grads]
    return found
