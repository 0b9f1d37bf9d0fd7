"""Gradients of attention on chips with tensor memory, through the public operator, simulated."""

import pytest
import torch

from tests.util import explored, poison, relative_error, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.kernels.attention import attention, attention_torch, backward_plan
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded

BLACKWELL = dict(arch="sm_100a", multiprocessors=2)
KERNEL = "attention_backward_tmem"
# of P, dS, the output and the gradient, each about half a unit in the last place
ROUNDINGS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that the backward allocates holds NaN at first."""
    for name in ("allocator", "allocator_like"):
        make = getattr(backward_plan, name)
        monkeypatch.setattr(backward_plan, name, lambda *given, make=make: lambda: poison(make(*given)()))


def operands(queries, keys, dim=64, value_dim=None, heads=1, kv_heads=None, batch=1, dtype=torch.bfloat16):
    """Q, K, V that want gradients, and the gradient of the output."""
    width, kv_heads = value_dim or dim, kv_heads or heads
    shapes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, width), (heads, queries, width))
    q, k, v, grad = (torch.randn(batch, *shape).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], grad


def gradients(leaves, grad, grad_lse=None, **given):
    count = 1 if grad_lse is None else 2
    results = attention(*leaves, return_lse=True, **given)
    return torch.autograd.grad(results[:count], leaves, (grad, grad_lse)[:count])


def check(leaves, grad, found, grad_lse=None, **given):
    """Gradients against float64."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    count = 1 if grad_lse is None else 2
    results = attention_torch(*exact, **given)[:count]
    expected = torch.autograd.grad(results, exact, [g.double() for g in (grad, grad_lse)[:count]])
    for name, x, g, ref in zip("qkv", leaves, found, expected, strict=True):
        assert (g.shape, g.dtype) == (x.shape, x.dtype)
        error = relative_error(g, ref) if ref.abs().max() > 1e-6 else g.abs().max().item()
        assert error < ROUNDINGS[x.dtype], f"d{name} is off by {error:.2e}"


WIDE = dict(dim=192, value_dim=128)
CASES = [
    pytest.param(dict(queries=1, keys=1), {}, id="a query and a key"),
    pytest.param(dict(queries=70, keys=100), {}, id="a partial block and tile"),
    slow(dict(queries=256, keys=128), {}, id="two blocks, a tile"),
    slow(dict(queries=130, keys=130, heads=4, kv_heads=2, batch=2), {}, id="groups"),
    pytest.param(dict(queries=260, keys=200, heads=2, kv_heads=1), dict(causal=True), id="causal, groups"),
    slow(dict(queries=200, keys=60), dict(causal=True), id="causal, queries without keys"),
    slow(dict(queries=70, keys=200), dict(causal=True), id="causal, more keys"),
    pytest.param(dict(queries=150, keys=150), dict(window=(40, 20)), id="window"),
    slow(dict(queries=10, keys=300), dict(window=(3, 3)), id="window, keys that no query sees"),
    pytest.param(dict(queries=150, keys=70, dim=128, dtype=torch.float16), {}, id="dimension 128, fp16"),
    pytest.param(dict(queries=90, keys=70, dim=48, value_dim=16), {}, id="dimensions 48 and 16"),
    slow(dict(queries=90, keys=200, dim=80, value_dim=112), dict(causal=True), id="dimensions 80 and 112"),
    slow(dict(queries=140, keys=200, dim=128), dict(causal=True), id="dimension 128, causal"),
    slow(dict(queries=400, keys=300, dim=128, heads=4, kv_heads=2), dict(causal=True), id="dimension 128, groups"),
    slow(dict(queries=300, keys=450, dim=128), dict(window=(90, 20)), id="dimension 128, window"),
    pytest.param(dict(queries=70, keys=140, **WIDE), dict(causal=True), id="dimension 192, causal"),
    slow(dict(queries=1, keys=1, **WIDE), {}, id="dimension 192, a query and a key"),
    slow(dict(queries=64, keys=128, **WIDE), {}, id="dimension 192, a block and a tile"),
    slow(dict(queries=300, keys=70, **WIDE, dtype=torch.float16), {}, id="dimension 192, fp16"),
    slow(dict(queries=200, keys=260, **WIDE, heads=4, kv_heads=2, batch=2), {}, id="dimension 192, groups"),
    slow(dict(queries=200, keys=60, **WIDE), dict(causal=True), id="dimension 192, queries without keys"),
    slow(dict(queries=250, keys=300, **WIDE), dict(window=(90, 20)), id="dimension 192, window"),
    slow(dict(queries=10, keys=300, **WIDE), dict(window=(3, 3)), id="dimension 192, keys unseen"),
    slow(dict(queries=90, keys=140, dim=144, value_dim=48), {}, id="dimensions 144 and 48"),
]


@pytest.mark.parametrize("shape, given", CASES)
def test_gradients_are_those_of_float64(shape, given, rng):
    leaves, grad = operands(**shape)
    with sim.device(**BLACKWELL):
        found = gradients(leaves, grad, **given)
    check(leaves, grad, found, **given)


def test_the_log_sum_exp_has_a_gradient(rng):
    leaves, grad = operands(140, 200)
    grad_lse = torch.randn(1, 1, 140)
    with sim.device(**BLACKWELL):
        found = gradients(leaves, grad, grad_lse, scale=0.3)
    check(leaves, grad, found, grad_lse, scale=0.3)


def test_views_of_other_layouts_need_no_copy(rng):
    leaves = [torch.randn(1, 130, 2, 64).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)]
    grad = torch.randn(1, 130, 2, 64).bfloat16().transpose(1, 2)
    with sim.device(**BLACKWELL):
        found = gradients(leaves, grad)
    check(leaves, grad, found)
    assert all(g.stride() == x.stride() for g, x in zip(found, leaves, strict=True))


def test_infinite_keys_behind_the_last_of_a_head_do_not_count(rng):
    """The keys of the next head follow in memory."""
    leaves, grad = operands(70, 100, heads=2)
    with torch.no_grad():
        leaves[1][0, 1] = leaves[2][0, 1] = float("inf")
    with sim.device(**BLACKWELL):
        found = [g[:, :1] for g in gradients(leaves, grad)]
    check([x.detach()[:, :1].requires_grad_() for x in leaves], grad[:, :1], found)


def test_scores_far_below_the_largest_have_no_weight(rng):
    """2^(S · scale) alone would overflow, and that of keys after the last is 2^−L."""
    leaves, grad = operands(130, 140)
    with torch.no_grad():
        leaves[0].fill_(30.0)
        leaves[1].copy_(torch.linspace(-30, 30, 140)[:, None])
    with sim.device(**BLACKWELL):
        found = gradients(leaves, grad)
    assert all(g.isfinite().all() for g in found)
    assert not found[2][0, 0, :100].any(), "these keys have no weight"


@explored(1, 12)
@pytest.mark.parametrize("shape, given", [
    pytest.param(dict(queries=300, keys=140), {}, id="two tasks of three blocks"),
    pytest.param(dict(queries=200, keys=140, heads=2, kv_heads=1, dim=128), dict(causal=True), id="dQ over dP"),
    pytest.param(dict(queries=140, keys=70, **WIDE), {}, id="dQ in two products"),
])  # fmt: skip
def test_every_schedule_gives_these_gradients(shape, given, schedules, rng):
    leaves, grad = operands(**shape)
    found = []
    sim.explore(lambda: found.append(gradients(leaves, grad, **given)), schedules=schedules, **BLACKWELL)
    for one in found:
        check(leaves, grad, one, **given)


def launched(gpu, dim=64, value_dim=None, **given):
    """Names of the kernels that a forward and its backward launch on a GPU."""
    leaves, grad = operands(130, 130, dim, value_dim)
    return [launch.name for launch in recorded(lambda: gradients(leaves, grad, **given), Device.of_gpu(GPUS[gpu]))]


@pytest.mark.parametrize("given", [{}, dict(causal=True), dict(window=(5, 5)), dict(dim=96), WIDE], ids=str)
def test_the_chip_chooses_the_kernel(given):
    assert launched("B200", **given)[1:] == ["preprocess", KERNEL]
    assert KERNEL not in launched("H200", **given)


@pytest.mark.parametrize("given", [dict(softcap=3.0), dict(dim=192), dict(deterministic=True)], ids=str)
def test_what_the_kernel_does_not_take_runs_as_before(given):
    assert KERNEL not in launched("B200", **given)
