"""`tritonkittens.nn.Linear` beside torch.nn.Linear; on the GPU, or simulated."""

import copy
import io
import pickle
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

from tests.util import DEVICE, crossed, relative_error
from tritonkittens import sim
from tritonkittens.kernels.gemm import call_plan, gemm
from tritonkittens.launch import Launcher, native
from tritonkittens.nn import Linear, replace_linears

BF16 = torch.bfloat16


def pair(in_features=40, out_features=24, bias=True, dtype=BF16, **options):
    """A torch.nn.Linear, and ours with copies of its parameters."""
    theirs = nn.Linear(in_features, out_features, bias, device=DEVICE, dtype=dtype)
    ours = Linear(in_features, out_features, bias, device=DEVICE, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 5, 40), (2, 1, 3, 40), (0, 40), (2, 0, 40)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_values_and_gradients(kernel_device, rng, shape, bias, dtype):
    theirs, ours = pair(bias=bias, dtype=dtype)
    results = []
    for module in (theirs, ours):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype).requires_grad_()
        y = module(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    for ref, out in zip(*results, strict=True):
        assert out.shape == ref.shape and out.dtype == ref.dtype
        assert relative_error(out, ref) < 1.2e-2


def test_the_kernel_is_what_runs():
    with sim.device("sm_90a") as device:
        layer = Linear(40, 24, dtype=BF16, activation="silu")
        x = torch.randn(3, 40, dtype=BF16)
        y = layer(x)
        assert len(device.launches) == 1, "bias and activation are in the kernel"
    expected = nn.functional.silu(nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double()))
    assert relative_error(y, expected) < 4e-3, "rounded once, at the end"


def test_inputs_that_are_views(kernel_device, rng):
    theirs, ours = pair()
    with torch.no_grad():
        for x in (torch.randn(40, 6), torch.randn(3, 40, 5), torch.randn(6, 41)[:, 1:].T.contiguous()):
            x = x.to(DEVICE, BF16).mT
            assert relative_error(ours(x), theirs(x)) < 4e-3


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
def test_what_the_kernel_does_not_take_is_torchs(activation):
    """Other dtypes, and a CPU without the simulator."""
    function = dict(
        gelu=nn.functional.gelu, silu=nn.functional.silu, gelu_tanh=lambda x: nn.functional.gelu(x, approximate="tanh")
    )
    for dtype in (torch.float32, torch.float64, BF16):
        layer = Linear(40, 24, dtype=dtype, activation=activation)
        x = torch.randn(3, 40, dtype=dtype)
        assert torch.equal(
            layer(x), function.get(activation, lambda y: y)(nn.functional.linear(x, layer.weight, layer.bias))
        )


def test_kinds_of_tensors(kernel_device, rng):
    """A jagged nested tensor is the matrix of its rows; a tensor subclass goes where torch's Linear sends it."""
    layer = Linear(64, 48, dtype=BF16, device=kernel_device, activation="silu")
    rows = torch.randn(24, 64, dtype=torch.float32, device=kernel_device).bfloat16()
    offsets = torch.tensor([0, 7, 7, 24], device=kernel_device)
    nested = torch.nested.nested_tensor_from_jagged(rows, offsets)
    out = layer(nested)
    assert out.shape[:2] == nested.shape[:2] and torch.equal(out.values(), layer(rows))
    with torch.no_grad():
        expected = 2 * layer(rows)
        layer.register_forward_hook(lambda module, inputs, output: output * 2)  # runs once
        assert torch.equal(layer(nested).values(), expected)
    layer._forward_hooks.clear()
    pair = layer(TwoTensor(rows, rows.clone()))
    assert type(pair) is TwoTensor and relative_error(pair.a, layer(rows).double()) < 1e-2


class Marked(torch.Tensor):
    """A subclass as users write them: torch's functions keep it."""


class Seen(TorchFunctionMode):
    """What a function mode, as `torch.set_default_device` is one, is told of."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_costs_nothing_where_the_kernel_runs(kernel_device):
    layer, x = Linear(64, 48, dtype=BF16, device=kernel_device), torch.ones(3, 64, dtype=BF16, device=kernel_device)
    expected = layer(x)
    with Seen() as seen:
        y = layer(x)
    assert not seen.functions and torch.equal(y, expected)
    with Seen() as seen:
        layer.float()(x.float())
    assert nn.functional.linear in seen.functions


def known(layer, *inputs):
    """The layer, which has computed inputs like these without gradients, so that a plan of such calls is kept."""
    with torch.no_grad():
        for x in inputs:
            layer(x)
    return layer


def fresh(*shape):
    return nn.Parameter(torch.randn(*shape, device=DEVICE, dtype=BF16))


def set_weight(ours, theirs, x):
    ours.weight = theirs.weight = fresh(24, 40)
    return ours(x), theirs(x)


def set_data(ours, theirs, x):
    ours.weight.data = theirs.weight.data = fresh(40, 24).data.T
    return ours(x), theirs(x)


def assign(ours, theirs, x):
    state = dict(weight=fresh(24, 40), bias=fresh(24))
    for module in (ours, theirs):
        module.load_state_dict(state, assign=True)
    return ours(x), theirs(x)


def to_half(ours, theirs, x):
    return ours.half()(x.half()), theirs.half()(x.half())


def drop_bias(ours, theirs, x):
    ours.bias = theirs.bias = None
    return ours(x), theirs(x)


def parametrise_weight(ours, theirs, x, name="weight"):
    for module in (ours, theirs):
        parametrize.register_parametrization(module, name, nn.Tanh())
    return ours(x), theirs(x)


def parametrise_bias(ours, theirs, x):
    return parametrise_weight(ours, theirs, x, "bias")


def prune_weight(ours, theirs, x):
    mask = torch.rand(24, 40, device=DEVICE) < 0.5
    return prune.custom_from_mask(ours, "weight", mask)(x), prune.custom_from_mask(theirs, "weight", mask)(x)


def call_functionally(ours, theirs, x):
    state = dict(weight=fresh(24, 40), bias=fresh(24))
    return torch.func.functional_call(ours, state, x), torch.func.functional_call(theirs, state, x)


def batch(ours, theirs, x):
    return torch.func.vmap(ours, in_dims=1)(x[:, None]), theirs(x)[None]


def negate(ours, theirs, x):
    return ours(torch._neg_view(x)), theirs(-x)


def negate_weight(ours, theirs, x):
    theirs.weight.neg_()
    ours.weight = nn.Parameter(torch._neg_view(ours.weight.detach()))
    return ours(x), theirs(x)


def hook(ours, theirs, x):
    for module in (ours, theirs):
        module.register_forward_hook(lambda module, inputs, output: output * 2)
    return ours(x), theirs(x)


def autocast(ours, theirs, x):
    with torch.autocast(DEVICE, torch.float16):
        return ours(x), theirs(x)


def compiled(ours, theirs, x):
    torch._dynamo.reset()
    return torch.compile(ours, fullgraph=True, backend="eager")(x), theirs(x)


def inference_mode(ours, theirs, x):
    with torch.inference_mode():
        return ours(x.clone()), theirs(x)


CHANGES = (
    set_weight, set_data, assign, to_half, drop_bias, parametrise_weight, parametrise_bias, prune_weight,
    call_functionally, batch, negate, negate_weight, hook, autocast, compiled, inference_mode,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_known_call_sees_what_changes(kernel_device, rng, change):
    """A call without gradients, after one like it: `change` makes the change in our module and in torch's, and returns
    the results of both."""
    theirs, ours = pair()
    x = torch.randn(3, 40, device=DEVICE, dtype=BF16)
    known(ours, x)
    with torch.no_grad():
        out, ref = change(ours, theirs, x)
        assert out.dtype == ref.dtype and out.shape == ref.shape and relative_error(out, ref) < 8e-3


@pytest.mark.parametrize("bias, activation", crossed([False, True], [None, "silu"]))
def test_a_known_call_is_computed_like_the_first(kernel_device, rng, bias, activation):
    """Also of inputs that lie otherwise, of one row and of none, and of weights that TMA cannot address."""
    for width in (40, 37):
        _, layer = pair(width, bias=bias, activation=activation)
        wide = torch.randn(2, 5, width + 24, device=DEVICE, dtype=BF16)
        inputs = [
            wide[..., :width].contiguous(),
            wide[..., 24:],
            wide[0, ..., :width],
            wide[:1, :1, 24:],
            wide[0, 0, 24:],
        ]
        inputs += [x.mT.contiguous().mT for x in inputs[:3]] + [wide[:0, ..., :width]]
        expected = [layer(x) for x in inputs]
        known(layer, *inputs)
        with torch.no_grad():
            for x, y in zip(inputs, expected, strict=True):
                out = layer(x)
                assert out.shape == y.shape and out.stride() == y.stride() and torch.equal(out, y)
                assert not out.requires_grad and y.requires_grad


def test_a_known_call_takes_few_steps(monkeypatch):
    """No check, no view and no plan: a launch that takes input, weight and result as they are."""
    native.load()
    launched, calls = [], []
    monkeypatch.setattr(call_plan, "signature", native.signature_reader("cpu"))
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(Launcher, "bind", lambda *given: lambda *tensors: launched.append(tensors))
    layer, x = Linear(64, 48, bias=False, dtype=BF16), torch.ones(1, 1, 64, dtype=BF16)
    with sim.device(), torch.no_grad():
        layer(x)
        sys.setprofile(
            lambda frame, event, argument: calls.append(frame.f_code.co_qualname) if event == "call" else None
        )
        try:
            y = layer(x)
        finally:
            sys.setprofile(None)
    assert len(launched) == 2 and {id(t) for t in launched[1]} >= {id(x), id(layer.weight), id(y)}
    assert len(calls) <= 10, calls


def test_a_known_call_is_differentiated_traced_and_refused(kernel_device, rng):
    theirs, ours = pair()
    x = torch.randn(3, 40, device=DEVICE, dtype=BF16)
    known(ours, x, x[0])
    y = ours(x)
    y.float().sum().backward()
    assert y.requires_grad and ours.weight.grad is not None
    with torch.no_grad():
        primal, tangent = torch.func.jvp(ours, (x,), (x,))
        assert relative_error(tangent, nn.functional.linear(x, theirs.weight)) < 8e-3
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = ours(mode.from_tensor(x))
            assert type(fake) is FakeTensor and fake.shape == (3, 24)
        rows = TwoTensor(x, x.clone())
        assert type(ours(rows)) is TwoTensor
        gemm(x.as_subclass(Marked), ours.weight.T, bias=ours.bias)
        assert type(ours(x.as_subclass(Marked))) is Marked
        with Seen() as seen:
            again = ours(x)
        assert torch.equal(again, y) and not seen.functions
        ours.requires_grad_(False)
        traced = torch.jit.trace(lambda x: ours(x), x)
        assert torch.equal(traced(2 * x), ours(2 * x))
        for wrong in (x[:, :24], x.float(), x[0, 0]):
            for module in (theirs, ours):
                with pytest.raises((RuntimeError, ValueError)):
                    module(wrong)


def test_errors_are_torchs_where_dtypes_differ(kernel_device):
    theirs, ours = pair()
    for x in (torch.randn(3, 40, device=DEVICE), torch.tensor(1.0, device=DEVICE, dtype=BF16)):
        for module in (theirs, ours):
            with pytest.raises(RuntimeError):
                module(x)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_autocast(kernel_device, rng, dtype):
    theirs, ours = pair(dtype=torch.float32)
    x = torch.randn(3, 40, device=DEVICE)
    with torch.autocast(DEVICE, dtype):
        ref, out = theirs(x), ours(x)
    assert out.dtype == ref.dtype == dtype and relative_error(out, ref) < 8e-3
    out.float().sum().backward()
    ref.float().sum().backward()
    assert ours.weight.grad.dtype == torch.float32 and relative_error(ours.weight.grad, theirs.weight.grad) < 1.2e-2
    with torch.autocast(DEVICE, dtype, enabled=False):
        assert ours(x).dtype == torch.float32
    double = Linear(40, 24, device=DEVICE, dtype=torch.float64)
    with torch.autocast(DEVICE, dtype):
        assert double(x.double()).dtype == nn.functional.linear(x.double(), double.weight, double.bias).dtype


def test_parameters_are_those_of_torch():
    theirs, ours = nn.Linear(40, 24), Linear(40, 24, activation="silu")
    assert {k: v.shape for k, v in theirs.state_dict().items()} == {k: v.shape for k, v in ours.state_dict().items()}
    assert Linear(40, 24, bias=False).bias is None
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, ours.weight) and torch.equal(theirs.bias, ours.bias)
    assert repr(ours) == "Linear(in_features=40, out_features=24, bias=True, activation='silu')"
    assert repr(Linear(3, 4)) == repr(nn.Linear(3, 4))
    torch.manual_seed(5)
    a = nn.Linear(40, 24)
    torch.manual_seed(5)
    assert torch.equal(Linear(40, 24).weight, a.weight), "the same initialisation"


def test_an_unknown_activation_is_refused():
    message = r"Linear\(activation='relu'\): must be one of None, 'gelu', 'gelu_tanh', 'silu'"
    with pytest.raises(ValueError, match=message):
        Linear(3, 4, activation="relu")
    with pytest.raises(ValueError, match=message):
        Linear.from_torch(nn.Linear(3, 4), activation="relu")


def test_copies_and_pickles(kernel_device):
    _, layer = pair(activation="gelu")
    x = torch.randn(3, 40, device=DEVICE, dtype=BF16)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert other.activation == "gelu" and other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))


def test_from_torch_shares():
    theirs = nn.Linear(40, 24, bias=False)
    called = []
    theirs.register_forward_hook(lambda *_: called.append(1))
    ours = Linear.from_torch(theirs.eval(), activation="silu")
    assert (
        type(ours) is Linear
        and ours.weight is theirs.weight
        and ours.bias is None
        and not ours.training
        and ours.activation == "silu"
    )
    ours(torch.randn(3, 40))
    assert called == [1]
    ours.register_forward_hook(lambda *_: called.append(2))
    theirs(torch.randn(3, 40))
    assert called == [1, 1], "a hook of the new module is its own"
    theirs.weight = nn.Parameter(torch.zeros(24, 40))
    assert ours.weight.abs().sum() > 0
    with pytest.raises(TypeError, match=r"Linear.from_torch\(ReLU\): it takes a torch.nn.Linear"):
        Linear.from_torch(nn.ReLU())


class Tied(nn.Module):
    """A model with shared modules, shared weights and a subclass of Linear."""

    class Special(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2)])
        self.blocks.append(self.blocks[0])
        self.special = Tied.Special(16, 16)
        self.head = nn.Linear(16, 16)
        self.head.weight = self.first.weight

    def forward(self, x):
        x = self.again(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.special(x))


def test_replacing_the_linears_of_a_model(kernel_device, rng):
    model = Tied().to(DEVICE, BF16)
    x = torch.randn(5, 16, device=DEVICE, dtype=BF16)
    keys, parameters, expected = list(model.state_dict()), list(model.parameters()), model(x)
    assert replace_linears(model) == 6
    assert list(model.state_dict()) == keys and all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert type(model.first) is Linear and model.again is model.first and model.head.weight is model.first.weight
    assert model.blocks[2] is model.blocks[0] and type(model.special) is Tied.Special
    assert relative_error(model(x), expected) < 3e-2
    assert replace_linears(model) == 0


def test_a_filter_chooses_by_name_and_module():
    model = Tied()
    seen = []
    assert replace_linears(model, lambda name, module: seen.append((name, type(module))) or name.endswith(".2")) == 2
    assert ("first", nn.Linear) in seen and ("special", Tied.Special) not in seen
    assert (
        type(model.blocks[1][2]) is Linear and type(model.blocks[1][0]) is nn.Linear and type(model.first) is nn.Linear
    )


def test_a_model_that_is_a_linear_cannot_be_replaced_in_place():
    with pytest.raises(ValueError, match="use Linear.from_torch"):
        replace_linears(nn.Linear(3, 4))


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_without_graph_breaks(kernel_device, rng, backend, autocast):
    torch._dynamo.reset()
    model = nn.Sequential(Linear(40, 48, activation="gelu"), Linear(48, 24)).to(
        DEVICE, torch.float32 if autocast else BF16
    )
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rows in (3, 5):
        x = torch.randn(rows, 40, device=DEVICE, dtype=torch.float32 if autocast else BF16, requires_grad=True)
        with torch.autocast(DEVICE, BF16, enabled=autocast):
            out, ref = compiled(x), model(x)
        assert out.dtype == BF16 and relative_error(out, ref) < 8e-3
        grads = [torch.autograd.grad(y.float().sum(), [x, *model.parameters()]) for y in (out, ref)]
        assert all(relative_error(a, b) < 1.2e-2 for a, b in zip(*grads, strict=True))
