"""Gradients of attention and its operator: against autograd in float64, under torch.compile, and by torch.library's own
checks."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.util import (
    DEVICE,
    assert_eager_is_operator,
    bytes_at_once,
    crossed,
    in_types,
    on_gpu_or_simulated,
    poison,
    relative_error,
    slow,
    some_slow,
)
from tritonkittens.kernels.attention import attention, attention_torch, backward_plan
from tritonkittens.kernels.attention.autograd import AttentionFunction
from tritonkittens.kernels.attention.call_plan import scores_of

pytestmark = pytest.mark.usefixtures("kernel_device")

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def single_pass(monkeypatch):
    """Few keys, too, get their gradients in a single pass where there is one."""
    monkeypatch.setattr(backward_plan, "worth_sums", lambda *_: True)


# of P, dS, the output and the gradient, each about half a unit in the last place
ROUNDINGS = {BF16: 1e-2, FP16: 1.5e-3}
LIMIT = 1 << 30


def leaves(batch, heads, kv_heads, queries, keys, dim, value_dim=None, dtype=BF16):
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim or dim))
    return [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]


def check(q, k, v, through_lse=False, **given):
    """All gradients against float64's, for a random gradient of the output and of the log-sum-exp of queries that see a
    key."""
    out, lse = attention(q, k, v, return_lse=True, **given)
    grads = [
        torch.randn(out.shape, device=DEVICE).to(out.dtype),
        torch.randn(lse.shape, device=DEVICE).where(lse.isfinite(), 0),
    ]
    count = 2 if through_lse else 1
    found = torch.autograd.grad((out, lse)[:count], (q, k, v), grads[:count])
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    given.pop("deterministic", None)
    expected = torch.autograd.grad(
        attention_torch(*exact, **given)[:count], exact, [g.cpu().double() for g in grads[:count]]
    )
    for name, x, g, ref in zip("qkv", (q, k, v), found, expected, strict=True):
        assert g.shape == x.shape and g.dtype == x.dtype
        error = relative_error(g, ref) if ref.any() else g.abs().max().item()
        assert error < ROUNDINGS[q.dtype], f"d{name} is off by {error:.2e}; {given}"
    return found


# Dimension, causal, deterministic
KINDS = [
    (64, False, False),
    (128, True, False),
    (64, True, True),
    (64, True, False),
    (128, False, False),
    (64, False, True),
]
SIZES = [(1, 1), (150, 70), (129, 257), *on_gpu_or_simulated([(1, 130), (128, 128), (1000, 700)], [])]


@pytest.mark.parametrize(
    "kind, size",
    some_slow(list(itertools.product(KINDS, SIZES)), list(zip(KINDS[:3], SIZES[2::-1], strict=True))),
    ids=str,
)
def test_gradients(kind, size, rng):
    dim, causal, deterministic = kind
    check(*leaves(1, 2, 1, *size, dim), causal=causal, deterministic=deterministic, through_lse=True)


# the first by two passes: what is added to scores is divided by it
@pytest.mark.parametrize("scale, dim", crossed([1e-25, 1e-12, 3.0], [64, 128]))
def test_scales_far_from_one(scale, dim, rng):
    check(*leaves(1, 2, 1, 150, 70, dim), scale=scale, through_lse=True)


@pytest.mark.parametrize("dim", [64, 128, slow(256)])
def test_values_that_are_not_finite(dim, rng):
    """dV has nothing to do with V: what makes dP infinite, or no number at all, must not reach the weights."""
    q, k, v = leaves(1, 2, 1, 150, 130, dim)
    with torch.no_grad():
        v[..., 5, 0], v[..., 7, 1] = float("inf"), float("nan")
    grad = torch.randn(1, 2, 150, dim, device=DEVICE).bfloat16()
    *others, found = torch.autograd.grad(attention(q, k, v), (q, k, v), grad)
    weights = torch.softmax(q.double() @ k.double().mT / dim**0.5, -1)
    assert relative_error(found, (weights.mT @ grad.double()).sum(1, keepdim=True)) < ROUNDINGS[BF16]
    assert all(x.isnan().all() for x in others)


@pytest.mark.parametrize("dim, keys", [slow(64, 384), slow(64, 256), (128, 256), slow(128, 384)])
def test_gradients_of_full_tiles(dim, keys, rng, monkeypatch):
    """No keys behind the last: a kernel without that mask."""
    found = []
    original = backward_plan.fused_backward
    monkeypatch.setattr(backward_plan, "fused_backward", lambda *kind: found.append(original(*kind)) or found[-1])
    check(*leaves(1, 2, 1, 150, keys, dim), causal=True)
    assert found and not any(kernel.cut for kernel in found)


@pytest.mark.parametrize("worth, deterministic, passes", [(True, False, 1), (False, False, 2), (True, True, 2)])
def test_how_many_passes_there_are(worth, deterministic, passes, rng, monkeypatch):
    ran, original = [], backward_plan.fused_backward
    monkeypatch.setattr(backward_plan, "worth_sums", lambda *_: worth)
    monkeypatch.setattr(backward_plan, "fused_backward", lambda *kind: ran.append(1) or original(*kind))
    check(*leaves(1, 1, 1, 70, 110, 64), deterministic=deterministic)
    assert len(ran) == (passes == 1)


@pytest.mark.parametrize("parts", [1, 2])
def test_kernels_for_dq_and_for_dk_and_dv_may_run_in_either_order(parts, rng, monkeypatch):
    """They overlap: neither needs the other's results, nor writes what the other reads."""
    monkeypatch.setattr(backward_plan, "worth_sums", lambda *_: False)
    monkeypatch.setattr(backward_plan, "parts_of_group", lambda *_: parts)
    q, k, v = (x.detach() for x in leaves(1, 2, 1, 70, 130, 64))
    out, lse = attention(q, k, v, return_lse=True)
    operands = torch.randn(out.shape, device=DEVICE).to(out.dtype), None, q, k, v, out, lse
    plan = backward_plan._plan(operands, scores_of(q, None, None, LIMIT, LIMIT), False)
    expected, tensors = plan(*operands), plan.tensors(*operands)
    preprocess, of_queries, of_keys, *sums = plan.steps
    assert len(sums) == (parts > 1)
    # `of_keys` starts while the kernel before runs, which must not be `preprocess`: so dQ is computed twice
    for step in (preprocess, of_queries, lambda given: poison(given["dQ"]), of_keys, of_queries, *sums):
        step(tensors)
    for name, gradient in zip(("dQ", "of_keys", "of_values"), expected, strict=True):
        assert torch.equal(tensors[name], gradient) and gradient.isfinite().all()


@pytest.mark.simulated(multiprocessors=2)
@pytest.mark.parametrize("dim, causal", [(64, False), slow(64, True), slow(128, True)])
def test_gradients_of_many_heads(dim, causal, rng):
    """So many that zeros, which dQ is added to, are made for most of them while others are computed."""
    check(
        *leaves(on_gpu_or_simulated(3, 1), on_gpu_or_simulated(400, 14), on_gpu_or_simulated(200, 7), 150, 200, dim),
        causal=causal,
    )


@pytest.mark.parametrize("shape, given, expected", [
    ((1, 8, 2, 300, 300, 128), {}, [(4, False)]),
    ((1, 4, 1, 600, 300, 64), dict(causal=True), [(4, True)]),
    slow((1, 4, 1, 150, 200, 160), {}, [(4, False)]),  # two passes, and two kernels for dK and dV
    slow((2, 4, 1, 70, 140, 80), {}, [(4, False)]),  # sums of 96 columns
    slow((1, 4, 1, 150, 200, 64), dict(deterministic=True), []),  # the same bits whatever else there is
], ids=str)  # fmt: skip
@pytest.mark.parametrize("parts", [slow(1), 2, slow(4)])
def test_gradients_of_many_blocks(parts, shape, given, expected, rng, monkeypatch):
    """Heads of a group, or of a part of it, follow each other in a task, and blocks of one head are more than stages of
    the ring."""
    asked = []
    monkeypatch.setattr(
        backward_plan,
        "parts_of_group",
        lambda time, shape, slots, at_once=0.0: asked.append((shape.group, at_once > 0)) or parts,
    )
    check(*leaves(*shape), **given)
    # on a GPU, a process that compiles ahead asks the same again
    assert asked[: len(expected)] == expected and set(asked) == set(expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="counts what a GPU's memory holds")
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, causal",
    [(16, 16, 128, False), (32, 8, 128, True), (32, 4, 64, True), (28, 4, 128, True), (16, 16, 96, False)],
)
def test_memory_of_gradients(heads, kv_heads, dim, causal, permuted):
    """The gradients, dQ in fp32, dK and dV in fp32 where tasks share them: what FlashAttention-3 allocates, but for its
    two numbers of a query."""
    b, s = 2, 2048
    q, k, v = (
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if permuted else x
        for n in (heads, kv_heads, kv_heads)
        for x in leaves(b, n, n, s, s, dim)[:1]
    )
    out = attention(q, k, v, causal=causal)
    grad = torch.randn_like(out)
    requested = bytes_at_once(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    rows, shared = b * s * dim, 0 if heads == kv_heads else kv_heads
    assert requested <= rows * (2 * heads + 4 * kv_heads + 4 * heads + 8 * shared) + 2**16


@pytest.mark.parametrize(
    "given",
    [
        dict(window=(70, 20)),
        dict(window=(0, 0)),
        dict(window=(None, 30)),
        dict(window=(50, None), causal=True),
        slow(dict(softcap=2.0)),
        dict(softcap=2.0, causal=True),
        dict(scale=0.3),
        slow(dict(window=(40, 10), softcap=1.0, scale=0.5)),
        slow(dict(window=(60, 10), softcap=2.0, deterministic=True)),
    ],
    ids=str,
)
def test_gradients_of_features(given, rng):
    check(*leaves(1, 2, 2, 150, 200, 64), **given)


DIMS = [(16, 16), (48, 48), (96, 96), (112, 112), (192, 128), (160, 160), (192, 192), (256, 256), (64, 128), (208, 240)]


QUICK_DIMS = [(112, 112, BF16), (64, 128, BF16), (16, 16, FP16)]


@pytest.mark.parametrize("dim, value_dim, dtype", some_slow(in_types(DIMS, BF16, FP16), QUICK_DIMS))
def test_gradients_of_head_dimensions(dim, value_dim, dtype, rng):
    check(*leaves(1, 2, 1, 140, 100, dim, value_dim, dtype), causal=bool(rng.integers(2)))


WIDE = [  # D, D_v, queries, keys, what a query sees
    (256, 256, 130, 65, dict(causal=True)),
    (192, 192, 65, 130, dict(window=(40, 5), softcap=2.0)),
    (160, 160, 1, 1, {}),
    slow(256, 256, 1, 130, {}),
    slow(256, 256, 200, 200, dict(causal=True, softcap=2.0)),
    slow(192, 192, 130, 130, dict(causal=True, scale=3.0)),
    slow(160, 160, 130, 65, dict(softcap=2.0)),
    slow(256, 64, 65, 130, dict(window=(40, 5))),
    slow(80, 208, 130, 130, dict(causal=True)),
]


@pytest.mark.parametrize("dim, value_dim, queries, keys, given", WIDE, ids=str)
def test_gradients_of_wide_dimensions(dim, value_dim, queries, keys, given, rng):
    """One consumer computes dV, the other dK of the same keys: P goes from one to the other."""
    check(*leaves(1, 2, 1, queries, keys, dim, value_dim), through_lse=True, **given)
    check(*leaves(1, 2, 1, queries, keys, dim, value_dim), deterministic=True, **given)


def test_gradients_of_groups_and_batches(rng):
    check(*leaves(2, 6, 2, 100, 150, 64), causal=True)


def test_gradients_of_permuted_and_packed_tensors(rng):
    packed = torch.randn(2, 100, 3, 2, 64, device=DEVICE, dtype=BF16).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    out = attention(q, k, v, causal=True)
    grad = torch.randn(2, 100, 2, 64, device=DEVICE, dtype=BF16).transpose(1, 2)
    out.backward(grad)
    exact = packed.detach().cpu().double().requires_grad_()
    attention_torch(*(x.transpose(1, 2) for x in exact.unbind(2)), causal=True)[0].backward(grad.cpu().double())
    assert relative_error(packed.grad, exact.grad) < ROUNDINGS[BF16]


def test_gradients_that_torch_expands(rng):
    """The gradient of a sum is one number with strides of zero."""
    q, k, v = leaves(1, 1, 1, 70, 80, 64)
    attention(q, k, v).sum().backward()
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    attention_torch(*exact)[0].sum().backward()
    assert relative_error(v.grad, exact[2].grad) < ROUNDINGS[BF16]


def test_keys_that_do_not_exist(rng):
    """All scores are so low that e^(0 − log-sum-exp), the weight of a key of zeros behind the last, overflows."""
    q, k, v = leaves(1, 1, 1, 70, 70, 64)
    with torch.no_grad():
        q[..., 0], k[..., 0] = 40.0, -40.0
    out = attention(q, k, v, scale=1.0)
    grad = torch.randn_like(out)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, (q, k, v), grad))


def test_queries_without_keys_have_no_gradient(rng):
    q, k, v = leaves(1, 1, 1, 200, 70, 64)
    dq, dk, dv = check(q, k, v, causal=True)
    assert (dq[:, :, :130] == 0).all() and dk.isfinite().all() and dv.isfinite().all()
    empty = [torch.randn(1, 1, n, 64, device=DEVICE, dtype=BF16).requires_grad_() for n in (5, 0, 0)]
    attention(*empty).sum().backward()
    assert (empty[0].grad == 0).all() and empty[1].grad.shape == (1, 1, 0, 64)


@pytest.mark.parametrize("dim", [64, slow(192), slow(256)])
def test_deterministic_runs_are_bitwise_equal(dim, rng):
    q, k, v = leaves(2, 2, 1, on_gpu_or_simulated(1000, 200), on_gpu_or_simulated(900, 150), dim)
    out = attention(q, k, v, causal=True, deterministic=True)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for _ in range(on_gpu_or_simulated(100, 2)):
        assert all(
            torch.equal(a, b)
            for a, b in zip(torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), first, strict=True)
        )


def test_torch_says_whether_gradients_are_deterministic(rng, monkeypatch):
    found = []
    monkeypatch.setattr(AttentionFunction, "apply", lambda *arguments: found.append(arguments[-1]) or (None, None))
    q, k, v = leaves(1, 1, 1, 10, 10, 64)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        attention(q, k, v)
        attention(q, k, v, deterministic=not wanted)
    torch.use_deterministic_algorithms(False)
    assert found == [False, True, True, False]


CASES = [(0.125, None, LIMIT, 0, False), (0.2, 3.0, LIMIT, LIMIT, True), slow((0.125, None, 30, 5, False))]


@pytest.mark.parametrize("scores", CASES, ids=str)
def test_opcheck(scores, rng):
    q, k, v = leaves(1, 2, 1, 70, 90, 64)
    torch.library.opcheck(torch.ops.tritonkittens.attention.default, (q, k, v, *scores), rtol=2e-2, atol=2e-2)
    out, lse = torch.ops.tritonkittens.attention(*(x.detach() for x in (q, k, v)), *scores)
    arguments = (torch.randn_like(out), torch.randn_like(lse), q.detach(), k.detach(), v.detach(), out, lse, *scores)
    torch.library.opcheck(
        torch.ops.tritonkittens.attention_backward.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_compiled(rng):
    """One graph, forward and backward, with the results of eager calls, and the words of a refusal."""
    q, k, v = leaves(1, 2, 1, 100, 130, 64)

    def layer(q, k, v):
        return torch.nn.functional.silu(attention(q * 2, k, v, causal=True)).sum()

    expected = torch.autograd.grad(layer(q, k, v), (q, k, v))
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for found, wanted in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected, strict=True):
        assert relative_error(found, wanted) < 1e-2
    with pytest.raises(ValueError, match="attention: 2 query heads and 3 key heads"):
        compiled(q, *(torch.zeros(1, 3, 130, 64, device=DEVICE, dtype=BF16) for _ in range(2)))


def test_random_configurations(rng):
    for _ in range(on_gpu_or_simulated(2, 1)):  # each kernels of its own
        dim, value_dim = (16 * int(x) for x in rng.integers(1, 17, 2))
        kv_heads = int(rng.integers(1, 3))
        queries, keys = (int(x) for x in rng.integers(1, on_gpu_or_simulated(600, 200), 2))
        sided = [None if rng.random() < 0.3 else int(rng.integers(0, keys + 1)) for _ in range(2)]
        value_dim = dim if rng.random() < 0.5 else value_dim
        given = dict(
            causal=bool(rng.integers(2)),
            window=tuple(sided) if rng.random() < 0.4 else None,
            softcap=4.0 if rng.random() < 0.2 else None,
        )
        heads = kv_heads * int(rng.integers(1, 4))
        print(heads, kv_heads, queries, keys, dim, value_dim, given)
        check(*leaves(1, heads, kv_heads, queries, keys, dim, value_dim, [BF16, FP16][rng.integers(2)]), **given)


def test_eager_calls_and_the_operator_agree(rng):
    """An eager call is a plain autograd function; dispatch modes and transforms of torch see the operator. Both give
    the same bits."""
    q, k, v = leaves(1, 2, 1, 130, 70, 64)
    grad = torch.randn(q.shape, device=DEVICE).to(BF16)

    def run():
        out = attention(q, k, v, causal=True, deterministic=True)
        return out, torch.autograd.grad(out, (q, k, v), grad)

    assert_eager_is_operator(run, "AttentionFunction", "attention", "attention_backward")
    with pytest.raises(RuntimeError, match="attention has no second derivative by backward"):
        out = attention(q, k, v)
        (dq,) = torch.autograd.grad(out, (q,), torch.ones_like(out).requires_grad_(), create_graph=True)
        dq.sum().backward()


def test_calls_of_other_strides(rng):
    """What is known of a call is of its strides: those of the result, of its gradient, and of what a hook gives back
    for what was saved."""
    q, k, v = leaves(1, 2, 1, 130, 70, 64)

    def other(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x

    with torch.no_grad():
        expected = attention(q, k, v, causal=True)
    for wants_gradients in (True, False):
        with torch.set_grad_enabled(wants_gradients):
            out = other(poison(torch.empty_like(expected)))
            found, _ = attention(q, k, v, causal=True, out=out, return_lse=True)
        assert torch.equal(found, expected) and found.data_ptr() == out.data_ptr()
    grad = torch.randn(q.shape, device=DEVICE).to(BF16)
    results = []
    for unpack, given in ((lambda x: x, grad), (lambda x: x, other(grad)), (other, grad), (lambda x: x, grad)):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            result = attention(q, k, v, deterministic=True)
        results.append(torch.autograd.grad(result, (q, k, v), given))
    assert all(torch.equal(x, y) for one in results for x, y in zip(one, results[0], strict=True))
    expanded = torch.ones((), device=DEVICE, dtype=BF16).expand(q.shape)
    both = [
        torch.autograd.grad(attention(q, k, v, deterministic=True), (q, k, v), x)
        for x in (expanded, expanded.contiguous())
    ]
    assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


def test_gradients_of_a_checkpointed_call(rng):
    q, k, v = leaves(1, 2, 1, 130, 70, 64)
    grad = torch.randn(q.shape, device=DEVICE).to(BF16)
    found = [
        torch.autograd.grad(run(), (q, k, v), grad)
        for run in (
            lambda: attention(q, k, v, deterministic=True),
            lambda: checkpoint(lambda *x: attention(*x, deterministic=True), q, k, v, use_reentrant=False),
        )
    ]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
