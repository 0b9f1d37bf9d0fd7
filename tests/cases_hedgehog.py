"""What tests of Hedgehog share: operands, and comparisons with all weights at once."""

import torch

from tests.cases_linear_attention import BF16, FP32, near, poisoned_plans
from tests.util import DEVICE
from tritonkittens.kernels.hedgehog import hedgehog_attention, hedgehog_attention_torch

BOUND, STATE_BOUND = 6e-3, 4e-3  # features, states and weights are rounded once to be multiplied, results once more
GRADIENT_BOUND = 8e-3  # of results that are rounded, and in two parts
NAMES = ("q", "k", "v", "map_q", "map_k", "alpha", "beta", "kv", "z")


def poisoned(monkeypatch):
    """Results and what kernels pass on have poison where none writes."""
    poisoned_plans(monkeypatch)


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


def attend(function, leaves, **options):
    """(o, kv, z) of a function and its operands, which may have a state."""
    tensors, state = leaves[:7], tuple(leaves[7:]) or None
    o, after = function(*tensors, initial_state=state, **options)
    return o, *after


def check(given, cu_seqlens=None, gradients=False):
    """The result and the state after, and gradients of random directions, against the definition in float64."""
    *tensors, state = given
    leaves = [x.detach().requires_grad_(gradients) for x in (*tensors, *(state or ()))]
    exact = [x.detach().double().requires_grad_(gradients) for x in leaves]
    o, *after = found = attend(hedgehog_attention, leaves, cu_seqlens=cu_seqlens, output_final_state=True)
    expected = attend(hedgehog_attention_torch, exact, cu_seqlens=cu_seqlens)
    rows = o.shape[1] if cu_seqlens is None else int(cu_seqlens[-1])
    assert o.dtype == BF16 and {x.dtype for x in after} == {FP32}
    near("o", o, expected[0], BOUND)
    near("kv", after[0], expected[1], STATE_BOUND)
    near("z", after[1], expected[2], STATE_BOUND)
    if gradients:
        directions = [torch.randn_like(x) for x in found]
        ours = torch.autograd.grad(found, leaves, directions)
        wanted = torch.autograd.grad(
            expected, exact, [d.double() for d in directions], allow_unused=True, materialize_grads=True
        )
        sizes = sizes_of_terms(exact, expected[0], directions[0])
        few = 4 if rows * o.shape[0] < 8 else 1  # features of a row that are almost 0 or 1 have almost no gradient
        for name, leaf, a, b in zip(NAMES, leaves, ours, wanted, strict=False):
            assert a.dtype == leaf.dtype
            near(f"d{name}", a, b, few * GRADIENT_BOUND, sizes.get(name, 0.0))
    return o.detach(), tuple(x.detach() for x in after)


def sizes_of_terms(exact, o, do):
    """The sizes of terms that cancel in gradients of scores and factors: those of a row sum to 0."""
    size = float((do.double() * o).detach().norm())
    q, k, alpha, beta = (x.detach() for x in (*exact[:2], *exact[5:7]))
    of_scores = {name: size * float(x.norm()) / max(x.numel(), 1) ** 0.5 for name, x in (("q", k), ("k", q))}
    of_factors = {name: size / max(float(x.abs().min()), 0.1) for name, x in (("alpha", alpha), ("beta", beta))}
    return of_scores | of_factors
