"""Every operator under what stands between a call and its kernel: defaults of the process, traces, fake tensors,
transforms, tangents, subclasses, `out`."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from tests.util import DEVICE, crossed, on_gpu_or_simulated, relative_error, some_slow
from tritonkittens import nn
from tritonkittens.kernels.attention import (
    attention,
    attention_decode,
    attention_fp8,
    attention_ranges,
    attention_varlen,
)
from tritonkittens.kernels.attention.reference import attention_torch
from tritonkittens.kernels.gemm import gemm
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.gemm.reference import gemm_torch

pytestmark = pytest.mark.usefixtures("kernel_device")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass
class Operator:
    """A call of an operator: `run` of tensors that `make` makes, the last `small` of which are no operands that are
    computed with; how far it can be
    differentiated: "twice", "once" or not at all; where it writes `out`; what it computes, in float64."""

    run: Callable
    make: Callable
    reference: Callable | None = None
    gradient: str = ""
    takes_out: bool = True
    operands: int = 3


def ranges_of(queries):
    return (
        torch.tensor([[0, 20], [3, 40]], dtype=torch.int32, device="cpu")[:, None, None]
        .expand(2, 1, queries, 2)
        .contiguous()
    )


def full_attention(q, k, v):
    return attention_torch(q, k, v)[0]


def vectors(run):
    return lambda a, b, bias, gate, residual, **named: run(a, b, bias=bias, gate=gate, residual=residual, **named)


def matrices(m, k, n):
    return lambda: (randn(m, k), randn(k, n))


def epilogue_operands(m=32, k=48, n=40):
    return randn(m, k), randn(k, n), randn(n), randn(m, n), randn(m, n)


def heads(queries=24, keys=40, dim=32):
    return randn(2, 2, queries, dim), randn(2, 2, keys, dim), randn(2, 2, keys, dim)


DEPTH = on_gpu_or_simulated(1024, 256)  # of products in parts
OPERATORS = {
    "gemm": Operator(gemm, matrices(24, 64, 40), gemm_torch, "twice", operands=2),
    "gemm, unaligned": Operator(gemm, matrices(3, on_gpu_or_simulated(4097, 257), 66), gemm_torch, "twice", operands=2),
    "gemm, split": Operator(
        lambda a, b, **named: gemm(a, b, config=Config(schedule="split_k", splits=4), **named),
        matrices(128, DEPTH, 128),
        operands=2,
    ),
    "gemm, stream-K": Operator(
        lambda a, b, **named: gemm(a, b, config=Config(schedule="stream_k", splits=1), **named),
        matrices(128, DEPTH, 128),
        operands=2,
    ),
    "gemm, fused": Operator(
        vectors(lambda a, b, **named: gemm(a, b, activation="gelu", **named)),
        epilogue_operands,
        vectors(lambda a, b, **named: gemm_torch(a, b, activation="gelu", **named)),
        "twice",
        operands=5,
    ),
    "attention": Operator(attention, heads, full_attention, "once"),
    "attention_decode": Operator(
        lambda q, k, v, n, **named: attention_decode(q, k, v, lengths=n, **named), lambda: (*heads(1), ints(40, 17))
    ),
    "attention_varlen": Operator(
        attention_varlen,
        lambda: (randn(30, 2, 32), randn(30, 2, 32), randn(30, 2, 32), ints(0, 11, 30), ints(0, 11, 30)),
        gradient="once",
    ),
    "attention_ranges": Operator(
        lambda q, k, v, r: attention_ranges(q, k, v, r),
        lambda: (*heads(), ranges_of(24)),
        gradient="once",
        takes_out=False,
    ),
    "attention_fp8": Operator(
        attention_fp8,
        lambda: (randn(2, 2, 24, 32, dtype=E4M3), randn(2, 2, 40, 32, dtype=E4M3), randn(2, 2, 40, 32, dtype=E4M3)),
    ),
}
QUICK = ["gemm", "gemm, fused", "attention", "attention_decode", "attention_varlen"]
every_operator = pytest.mark.parametrize("name", some_slow(list(OPERATORS), QUICK))
DIFFERENTIABLE = [name for name, of in OPERATORS.items() if of.gradient]
differentiable = pytest.mark.parametrize("name", some_slow(DIFFERENTIABLE, [x for x in QUICK if x in DIFFERENTIABLE]))


def exact(tensors):
    return [x.detach().cpu().double() for x in tensors]


def same(x, y):
    """Equal but for the order of sums."""
    return x.shape == y.shape and x.dtype == y.dtype and relative_error(x, y.double()) < 4e-3


# ---------------------------------------------------------------- defaults of the process


def backward(of, tensors):
    leaves = [x.detach().clone().requires_grad_() if i < of.operands else x for i, x in enumerate(tensors)]
    of.run(*leaves).float().square().sum().backward()
    return [x.grad for x in leaves[: of.operands]]


@pytest.mark.parametrize("name, default", crossed(list(OPERATORS), [BF16, torch.float64, "device"]), ids=str)
def test_nothing_depends_on_the_default_dtype_or_device(name, default, rng):
    of = OPERATORS[name]
    tensors = of.make()
    if name == "attention_fp8" and default == "device":
        tensors = [x.clone() for x in tensors]
    from tritonkittens.kernels.gemm import call_plan

    call_plan._plans.clear()
    try:
        if default == "device":
            torch.set_default_device("cuda" if DEVICE == "cuda" else "meta")
        else:
            torch.set_default_dtype(default)
        out = of.run(*tensors)
        found = backward(of, tensors) if of.gradient else []
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    call_plan._plans.clear()
    assert same(out, of.run(*tensors))
    for x, y in zip(found, backward(of, tensors) if of.gradient else [], strict=True):
        assert same(x, y)


def test_the_native_reader_checks_itself_under_any_default_device():
    from tritonkittens.launch import native

    loaded = native.load()
    if loaded is None:
        pytest.skip("no C compiler, so no native reader")
    with torch.device("meta"):
        native._check(*loaded)


# ---------------------------------------------------------------- traces and fake tensors


@every_operator
def test_a_fake_result_is_like_the_real_one(name, rng):
    of = OPERATORS[name]
    tensors = of.make()
    real = of.run(*tensors)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in tensors]
    with mode:
        within = of.run(*fakes)
    for fake in (within, of.run(*fakes)):
        assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (
            real.shape,
            real.dtype,
            real.device,
            real.stride(),
        )


@every_operator
def test_a_trace_without_gradients_computes_with_what_comes_in(name, rng):
    of = OPERATORS[name]
    first, second = of.make(), of.make()
    with torch.no_grad():
        graph = make_fx(lambda *tensors: of.run(*tensors))(*first)
        assert any("tritonkittens" in str(node.target) for node in graph.graph.nodes)
        assert same(graph(*second), of.run(*second))


# ---------------------------------------------------------------- forward-mode differentiation


@pytest.mark.parametrize("enabled", [True, False], ids=["", "under no_grad"])
@pytest.mark.parametrize("name", [name for name, of in OPERATORS.items() if of.reference])
def test_tangents(name, enabled, rng):
    of = OPERATORS[name]
    tensors = of.make()
    tangents = [randn(*x.shape) for x in tensors]
    with torch.set_grad_enabled(enabled), forward_ad.dual_level():
        found = forward_ad.unpack_dual(of.run(*map(forward_ad.make_dual, tensors, tangents)))
    expected = torch.func.jvp(of.reference, tuple(exact(tensors)), tuple(exact(tangents)))
    transformed = torch.func.jvp(of.run, tuple(tensors), tuple(tangents))
    for result in (found[:2], transformed):
        assert all(x.dtype == BF16 and relative_error(x, y) < 1e-2 for x, y in zip(result, expected, strict=True))


@pytest.mark.parametrize("name", [name for name, of in OPERATORS.items() if not of.reference and "gemm" not in name])
def test_an_operator_without_tangents_says_so(name, rng):
    of = OPERATORS[name]
    first, *tensors = of.make()
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=re.escape(f"{name}: it has no forward-mode derivative; use attention")),
    ):
        of.run(forward_ad.make_dual(first, first.clone()), *tensors)


# ---------------------------------------------------------------- transforms


@every_operator
def test_vmap_of_any_operands(name, rng):
    of = OPERATORS[name]
    samples = [of.make() for _ in range(on_gpu_or_simulated(3, 2))]
    for batched in [(i,) for i in range(of.operands)] + [tuple(range(len(samples[0])))]:
        dims = tuple(min(1, x.ndim) if i in batched else None for i, x in enumerate(samples[0]))
        stacked = [
            torch.stack(xs, dim) if dim is not None else xs[0]
            for xs, dim in zip(zip(*samples, strict=True), dims, strict=True)
        ]
        found = torch.vmap(of.run, dims)(*stacked)
        for i, sample in enumerate(found):
            assert same(
                sample, of.run(*(x if dim is None else x.select(dim, i) for x, dim in zip(stacked, dims, strict=True)))
            ), (dims, i)


@differentiable
def test_gradients_of_samples(name, rng):
    of = OPERATORS[name]
    samples = [of.make() for _ in range(2)]

    def loss(*operands):
        return of.run(*operands, *samples[0][of.operands :]).float().square().sum()

    stacked = [torch.stack(x) for x in list(zip(*samples, strict=True))[: of.operands]]
    found = torch.vmap(torch.func.grad(loss, tuple(range(of.operands))))(*stacked)
    for i, sample in enumerate(samples):
        for got, expected in zip(
            found, backward(of, (*sample[: of.operands], *samples[0][of.operands :])), strict=True
        ):
            assert same(got[i], expected)


@differentiable
def test_gradients_for_many_gradients_at_once(name, rng):
    of = OPERATORS[name]
    leaves = [x.requires_grad_() if i < of.operands else x for i, x in enumerate(of.make())]
    out = of.run(*leaves)
    grads = torch.stack([randn(*out.shape) for _ in range(2)])
    found = torch.autograd.grad(out, leaves[: of.operands], grads, retain_graph=True, is_grads_batched=True)
    for i, grad in enumerate(grads):
        for got, expected in zip(
            found, torch.autograd.grad(out, leaves[: of.operands], grad, retain_graph=True), strict=True
        ):
            assert same(got[i], expected)


def test_an_ensemble_of_layers(rng):
    layers, x = [nn.Linear(64, 48, dtype=BF16, device=DEVICE) for _ in range(3)], randn(16, 64)
    parameters, _ = torch.func.stack_module_state(layers)
    found = torch.vmap(lambda p: torch.func.functional_call(layers[0], p, (x,)))(parameters)
    assert all(same(got, layer(x)) for got, layer in zip(found, layers, strict=True))


def test_derivatives_in_forward_mode_of_a_gradient(rng):
    """What second derivatives by backward refuse."""
    q, k, v = heads()
    t = randn(*q.shape)

    def gradient(f):
        return torch.func.grad(lambda q, k, v: f(q, k, v).double().square().sum())

    found = torch.func.jvp(lambda q: gradient(attention)(q, k, v), (q,), (t,))[1]
    qd, kd, vd, td = exact((q, k, v, t))
    expected = torch.func.jvp(lambda q: gradient(full_attention)(q, kd, vd), (qd,), (td,))[1]
    assert relative_error(found, expected) < 2e-2


def test_batched_gradients_of_a_batch_of_rows_keep_their_graph(rng):
    """As a Jacobian penalty takes them of a layer whose input is (batch, sequence, features)."""
    layer, exact_layer = (
        nn.Linear(64, 40, dtype=BF16, device=DEVICE, activation="gelu"),
        torch.nn.Linear(64, 40, dtype=torch.float64, device="cpu"),
    )
    exact_layer.load_state_dict(layer.state_dict())
    x = randn(2, 5, 64).requires_grad_()

    def penalty(f, x):
        jacobian = torch.autograd.functional.jacobian(lambda x: f(x).sum((0, 1)), x, create_graph=True, vectorize=True)
        return torch.autograd.grad(
            jacobian.double().square().sum(), list(layer.parameters() if f is layer else exact_layer.parameters())
        )

    found, expected = (
        penalty(layer, x),
        penalty(lambda x: torch.nn.functional.gelu(exact_layer(x)), x.detach().cpu().double()),
    )
    assert all(relative_error(got, want) < 3e-2 for got, want in zip(found, expected, strict=True))


def test_tangents_of_a_log_sum_exp_of_no_key(rng):
    q, k, v = randn(1, 1, 6, 16), randn(1, 1, 3, 16), randn(1, 1, 3, 16)
    tangent = torch.func.jvp(lambda k: attention(q, k, v, causal=True, return_lse=True)[1], (k,), (randn(*k.shape),))[1]
    assert (tangent[..., :3] == 0).all() and (tangent[..., 3:] != 0).all()


@pytest.mark.parametrize("name", [name for name, of in OPERATORS.items() if of.gradient == "once"])
def test_a_backward_that_would_drop_tangents_says_so(name, rng):
    of = OPERATORS[name]
    leaves = [x.requires_grad_() if i < of.operands else x for i, x in enumerate(of.make())]
    out = of.run(*leaves)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=f"{name}: its backward has no forward-mode derivative"),
    ):
        torch.autograd.grad(out, leaves[0], forward_ad.make_dual(randn(*out.shape), randn(*out.shape)))


def test_autocast_does_not_touch_tangents(rng):
    a, b, tangent = randn(32, 64), randn(64, 48), randn(32, 64)
    with torch.autocast(DEVICE, dtype=BF16):
        found = torch.func.jvp(lambda a: gemm(a, b, out_dtype=torch.float32), (a,), (tangent,))
    for got, x in zip(found, (a, tangent), strict=True):
        assert relative_error(got, x.cpu().double() @ b.cpu().double()) < 1e-5


def test_gradients_of_an_epilogue_alone(rng):
    """Of block scales, and of results in 8 bits with a gate."""
    a, b, bias, gate = (
        randn(64, 256, dtype=E4M3),
        randn(128, 256, dtype=E4M3).T,
        randn(128).requires_grad_(),
        randn(128).requires_grad_(),
    )
    scale_a, scale_b = (torch.rand(*shape, dtype=torch.float32, device=DEVICE) + 0.5 for shape in ((64, 2), (2, 1)))
    out = gemm(a, b, bias=bias, gate=gate, scale_a=scale_a, scale_b=scale_b)
    grad = randn(*out.shape)
    found = torch.autograd.grad(out, (bias, gate), grad)
    exact = [x.detach().cpu().double().requires_grad_() for x in (bias, gate)]
    expected = gemm_torch(a.cpu(), b.cpu(), bias=exact[0], gate=exact[1], scale_a=scale_a.cpu(), scale_b=scale_b.cpu())
    for got, want in zip(found, torch.autograd.grad(expected, exact, grad.cpu().double()), strict=True):
        assert relative_error(got, want) < 1e-2
    x, w = randn(32, 64).requires_grad_(), randn(64, 128)
    y = gemm(x, w, gate=gate, out_dtype=E4M3)
    (got,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert relative_error(got, (gate.detach().cpu().double().expand(32, 128) @ w.cpu().double().T)) < 1e-2


def test_a_frozen_operator_within_forward_mode(rng):
    """No operand has a tangent, so none is dropped."""
    q, k, v = heads(1)
    expected = attention_decode(q, k, v)
    found = torch.func.jvp(
        lambda z: z * attention_decode(q, k, v), (torch.ones_like(expected),), (torch.ones_like(expected),)
    )
    assert all(same(x, expected) for x in found)
    with pytest.raises(NotImplementedError, match="attention_decode has no gradient; use attention"):
        torch.func.grad(lambda Q: torch.vmap(lambda q: attention_decode(q, k, v))(Q).float().sum())(torch.stack([q, q]))


def test_tangents_of_gradients_through_activations(rng):
    a, b, grad, tangent = randn(32, 64), randn(64, 48), randn(32, 48), randn(32, 48)
    for activation in ("silu", "gelu"):
        leaf = a.clone().requires_grad_()
        y = gemm(leaf, b, activation=activation)
        with forward_ad.dual_level():
            (found,) = torch.autograd.grad(y, leaf, forward_ad.make_dual(grad, tangent))
            found = forward_ad.unpack_dual(found).tangent
        exact = a.cpu().double().requires_grad_()
        (expected,) = torch.autograd.grad(
            gemm_torch(exact, b.cpu(), activation=activation), exact, tangent.cpu().double()
        )
        assert relative_error(found, expected) < 2e-2


def test_transforms_that_take_operators_only(rng):
    a, b = matrices(24, 64, 40)()
    assert same(torch.func.functionalize(gemm)(a, b), gemm(a, b))


def test_vmap_of_scales_of_blocks(rng):
    a, b = randn(2, 32, 256, dtype=E4M3), randn(128, 256, dtype=E4M3).T
    scale_a, scale_b = (torch.rand(*shape, dtype=torch.float32, device=DEVICE) + 0.5 for shape in ((32, 2), (2, 1)))
    found = torch.vmap(lambda a: gemm(a, b, scale_a=scale_a, scale_b=scale_b))(a)
    assert all(same(got, gemm(one, b, scale_a=scale_a, scale_b=scale_b)) for got, one in zip(found, a, strict=True))


# ---------------------------------------------------------------- second derivatives


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
def test_second_derivatives_of_gemm(activation, rng):
    operands = [(x * 0.3).to(BF16) for x in epilogue_operands()]
    directions = [randn(*x.shape) for x in operands]

    def second(f, leaves, directions):
        """The gradient of a product of the gradient with `directions`, as of a gradient penalty."""
        leaves = [x.detach().requires_grad_() for x in leaves]
        first = torch.autograd.grad(f(*leaves).to(torch.float64).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(
            sum((g.double() * d.double()).sum() for g, d in zip(first, directions, strict=True)), leaves
        )

    found = second(vectors(lambda a, b, **named: gemm(a, b, activation=activation, **named)), operands, directions)
    expected = second(
        vectors(lambda a, b, **named: gemm_torch(a, b, activation=activation, **named)),
        exact(operands),
        exact(directions),
    )
    for got, want in zip(found, expected, strict=True):
        assert relative_error(got, want) < 2e-2


@pytest.mark.parametrize("name", [name for name, of in OPERATORS.items() if of.gradient == "once"])
def test_second_derivatives_of_attention_are_refused(name, rng):
    of = OPERATORS[name]
    leaves = [x.requires_grad_() if i < of.operands else x for i, x in enumerate(of.make())]
    first = torch.autograd.grad(of.run(*leaves).float().square().sum(), leaves[0], create_graph=True)[0]
    assert same(first, torch.autograd.grad(of.run(*leaves).float().square().sum(), leaves[0])[0])
    with pytest.raises(NotImplementedError, match=f"{name} has no second derivative by backward"):
        first.float().square().sum().backward()


# ---------------------------------------------------------------- operands whose gradients would be dropped


def test_an_operator_without_gradients_refuses_operands_that_require_them(rng):
    q, k, v = heads(1)
    for i, of in enumerate("qkv"):
        tensors = [x.clone().requires_grad_(i == n) for n, x in enumerate((q, k, v))]
        with pytest.raises(
            ValueError,
            match=f"attention_decode: {of} requires a gradient, which attention_decode does not compute; call it "
            "under torch.no",
        ):
            attention_decode(*tensors)
        with torch.no_grad():
            assert same(attention_decode(*tensors), attention_decode(q, k, v))
    scale = torch.ones(2, 2, dtype=torch.float32, device=DEVICE, requires_grad=True)
    with pytest.raises(ValueError, match="attention_fp8: k_scale requires a gradient"):
        attention_fp8(*(x.to(E4M3) for x in (q, k, v)), k_scale=scale)
    a, b = randn(32, 64, dtype=E4M3), randn(32, 64, dtype=E4M3).T
    with pytest.raises(ValueError, match="gemm: scale_b requires a gradient, which gemm does not compute"):
        gemm(a, b, scale_b=torch.ones(1, dtype=torch.float32, device=DEVICE, requires_grad=True))


# ---------------------------------------------------------------- kinds of tensors


class Marked(torch.Tensor):
    """A subclass as users write them: torch's functions keep it."""


@every_operator
def test_subclasses_pass_through(name, rng):
    of = OPERATORS[name]
    tensors = of.make()
    expected = of.run(*tensors)
    marked = of.run(*(x.as_subclass(Marked) if i < of.operands else x for i, x in enumerate(tensors)))
    assert type(marked) is Marked and same(marked.as_subclass(torch.Tensor), expected)
    pair = of.run(*(TwoTensor(x, x.clone()) if i < of.operands else x for i, x in enumerate(tensors)))
    assert type(pair) is TwoTensor and same(pair.a, expected) and same(pair.b, expected)


def test_lazy_negation_is_resolved(rng):
    a, b = randn(32, 64), randn(64, 48)
    assert same(gemm(torch._neg_view(a), b), -gemm(a, b))
    x = randn(32, 48)
    assert same(gemm(a, b, residual=torch._neg_view(x)), gemm(a, b, residual=-x))
    q, k, v = heads()
    assert same(attention(torch._neg_view(q), k, torch._neg_view(v)), attention(-q, k, -v))
    assert same(attention_decode(q[:, :, :1], torch._neg_view(k), v), attention_decode(q[:, :, :1], -k, v))


def test_a_sparse_operand_is_an_error(rng):
    with pytest.raises((RuntimeError, NotImplementedError, ValueError, TypeError)):
        gemm(randn(32, 32).to_sparse(), randn(32, 32))


# ---------------------------------------------------------------- out=


@pytest.mark.parametrize("name", [name for name, of in OPERATORS.items() if of.takes_out])
def test_out_may_not_share_memory_with_itself(name, rng):
    of = OPERATORS[name]
    tensors = of.make()
    out = torch.empty_like(of.run(*tensors)[:1]).expand(of.run(*tensors).shape)
    with pytest.raises(
        ValueError,
        match=re.escape(f"out is {tuple(out.shape)} with strides {out.stride()}; some of its elements share memory"),
    ):
        of.run(*tensors, out=out)


@pytest.mark.parametrize("wanted", [False, True], ids=["", "with gradients"])
@pytest.mark.parametrize(
    "out, error, message",
    [
        (
            lambda: torch.zeros(24, 40, dtype=torch.int32, device=DEVICE),
            TypeError,
            "out has dtype torch.int32; it must be torch.bfloat16",
        ),
        (lambda: torch.zeros(2, 24, 40, dtype=BF16, device=DEVICE), ValueError, "(2, 24, 40); it must be (24, 40)"),
        (lambda: [1], TypeError, "gemm: out is list; it must be a torch tensor"),
    ],
)
def test_out_is_like_the_result(out, error, message, wanted, rng):
    a, b = matrices(24, 64, 40)()
    with pytest.raises(error, match=re.escape(message)):
        gemm(a.requires_grad_(wanted), b, out=out())


def test_out_may_be_in_the_memory_of_an_operand(rng):
    a, b = randn(64, 64), randn(64, 64)
    expected = gemm(a, b)
    for shared in (0, 1):
        operands = [a.clone(), b.clone()]
        assert same(gemm(*operands, out=operands[shared]), expected) and same(operands[shared], expected)
    buffer = randn(96, 64)
    buffer[:64] = a
    assert same(gemm(buffer[:64], b, out=buffer[32:]), expected)
    for shared in range(3):
        operands = [randn(2, 2, 40, 32) for _ in range(3)]
        expected = attention(*operands)
        assert same(attention(*operands, out=operands[shared]), expected) and same(operands[shared], expected)
    q, k, v = randn(2, 2, 1, 32), randn(2, 2, 40, 32), randn(2, 2, 40, 32)
    expected = attention_decode(q, k, v)
    assert same(attention_decode(q, k, v, out=k[:, :, 3:4]), expected)
    q, starts = randn(30, 2, 32), ints(0, 11, 30)
    expected = attention_varlen(q, q, q, starts, starts)
    assert same(attention_varlen(q, q, q, starts, starts, out=q), expected)


def test_out_may_be_in_memory_that_two_storages_have(rng):
    a, b = randn(64, 64), randn(64, 64)
    expected = gemm(a, b)
    assert same(gemm(a, b, out=torch.from_dlpack(a)), expected)
    q = randn(2, 2, 200, 32)
    expected = attention(q, q, q)
    assert same(attention(q, q, q, out=torch.from_dlpack(q)), expected)


@pytest.mark.parametrize("name", [name for name, of in OPERATORS.items() if of.takes_out])
def test_out_with_a_lazy_negation_gets_the_right_sign(name, rng):
    of = OPERATORS[name]
    tensors = of.make()
    expected = of.run(*tensors)
    assert same(of.run(*tensors, out=torch._neg_view(torch.zeros_like(expected))).clone(), expected)


@pytest.mark.parametrize("name", [name for name, of in OPERATORS.items() if of.takes_out])
def test_autograd_hears_of_what_is_written(name, rng):
    """A backward that has kept the old values raises, as behind any operation in place; so does a leaf that is to be
    written, and a stale graph goes."""
    of = OPERATORS[name]
    tensors = of.make()
    out = torch.empty_like(of.run(*tensors))
    scale = torch.ones(out.shape[-1], dtype=torch.float32, device=DEVICE).requires_grad_()
    y = (of.run(*tensors, out=out) * scale).sum()
    of.run(*tensors, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    leaf = torch.zeros_like(out).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        of.run(*tensors, out=leaf)
    with torch.inference_mode():
        assert same(of.run(*tensors, out=torch.empty_like(out)), out)


@pytest.mark.parametrize("schedule", ["persistent", "split_k", "stream_k"])
def test_a_residual_may_be_the_result(schedule, rng):
    a, b, x = randn(200, 512), randn(512, 136), randn(200, 136)
    config = Config(schedule=schedule, splits={"split_k": 2}.get(schedule, 1))
    expected = gemm(a, b, residual=x, config=config)
    assert gemm(a, b, residual=x, out=x, config=config) is x
    assert torch.equal(x, expected)
