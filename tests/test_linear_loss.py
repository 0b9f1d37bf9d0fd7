"""Linear layers with cross entropy as torch sees them, the modules of losses, and what they refuse."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from tests.cases_loss import BF16, FP32, targets
from tests.util import Seen, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.kernels.loss import (
    linear_cross_entropy,
    linear_cross_entropy_backward_operator,
    linear_cross_entropy_operator,
)
from tritonkittens.nn import CrossEntropyLoss, LinearCrossEntropyLoss

X, W, BIAS = torch.randn(8, 32).bfloat16(), torch.randn(72, 32).bfloat16(), torch.randn(72).bfloat16()
TARGET = torch.tensor([3, -100, 31, 0, 71, 5, -100, 5])
OPTIONS = (-100, "mean", 0.1, 1e-3, 5.0, False)


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_loss.DEVICE", "cpu")


def leaves():
    return [t.clone().requires_grad_() for t in (X, W, BIAS)]


def run(function, given, **options):
    x, w, b = given
    loss = function(x, w, TARGET, b, **options)
    return [loss, *torch.autograd.grad(loss.sum() * 0.3, given)]


@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_torch_compile_sees_operators(reduction):
    with sim.device():
        compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
        expected, found = (run(f, leaves(), reduction=reduction) for f in (linear_cross_entropy, compiled))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_eager_call_is_the_operator(reduction):
    with sim.device():
        loss, *gradients = run(linear_cross_entropy, leaves(), reduction=reduction)
        assert type(loss.grad_fn).__name__ == "LinearCrossEntropyFunctionBackward"
        with Seen() as seen:
            again, *others = run(linear_cross_entropy, leaves(), reduction=reduction)
    assert "tritonkittens::linear_cross_entropy" in seen.names
    assert ("tritonkittens::linear_cross_entropy_backward" in seen.names) == (reduction == "none")
    assert torch.equal(loss, again)
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b)


def test_opcheck():
    one, wanted = torch.ones(()), (True, True, True)
    with sim.device():
        for operator, args in (
            (
                linear_cross_entropy_operator,
                (X.clone().requires_grad_(), W, TARGET, None, *OPTIONS, True, False, False),
            ),
            (linear_cross_entropy_backward_operator, (one, X, W, TARGET, BIAS, *OPTIONS, *wanted)),
            (linear_cross_entropy_backward_operator, (one, X[:0], W.T.clone().T, TARGET[:0], BIAS, *OPTIONS, *wanted)),
        ):
            torch.library.opcheck(
                operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )


def test_transforms_of_functions():
    x, target = torch.randn(2, 8, 32).bfloat16(), torch.stack([TARGET, TARGET.flip(0)])

    def loss(x, target):
        return linear_cross_entropy(x, W, target)

    with sim.device():
        found, gradients = torch.vmap(loss)(x, target), torch.vmap(torch.func.grad(loss))(x, target)
        each = [t.clone().requires_grad_() for t in x]
        expected = torch.stack([loss(*pair) for pair in zip(each, target, strict=True)])
        expected.sum().backward()
        summed = torch.func.grad(lambda x: torch.vmap(loss)(x, target).sum())(x)
    torch.testing.assert_close(found, expected)
    for gradient in (gradients, summed):
        torch.testing.assert_close(gradient, torch.stack([t.grad for t in each]), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    "reduction, factor, size_of_x, size_of_weight",
    [("mean", 65536.0, 1.0, 1e-4), ("sum", 1 / 64, 3000.0, 1e-6)],
    ids=["small", "large"],
)
def test_gradients_in_fp16_are_of_the_scaled_loss(reduction, factor, size_of_x, size_of_weight, is_traced):
    """Without the factor they have few digits, or overflow."""
    given = [(torch.rand(64, 16) * size_of_x).half(), (torch.randn(8, 16) * size_of_weight).half()]
    given, target = [t.requires_grad_() for t in given], torch.zeros(64, dtype=torch.int64)
    with sim.device(), Seen() if is_traced else contextlib.nullcontext():
        loss = linear_cross_entropy(*given, target, reduction=reduction) * factor
        found = torch.autograd.grad(loss, given)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = nn.functional.cross_entropy(nn.functional.linear(*exact), target, reduction=reduction) * factor
    for a, b in zip(found, torch.autograd.grad(expected, exact), strict=True):
        subnormal = 2.0**-24 * b.numel() ** 0.5
        assert (a - b).norm() < 1e-3 * b.norm() + subnormal


def test_batched_gradients():
    x = X.clone().requires_grad_()
    with sim.device():
        loss = linear_cross_entropy(x, W, TARGET)
        (found,) = torch.autograd.grad(loss, x, torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True)
        (dx,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, torch.stack([dx, 2 * dx]))


def test_no_second_derivative():
    given = leaves()
    message = "linear_cross_entropy_backward has no second derivative; use torch's linear and cross entropy"
    with sim.device():
        loss = linear_cross_entropy(*given[:2], TARGET)
        with refused(message, NotImplementedError):
            torch.autograd.grad(loss, given[0], create_graph=True)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (
            lambda: linear_cross_entropy(X, 1.0, TARGET),
            TypeError,
            "linear_cross_entropy: linear_weight is float; it must",
        ),
        (
            lambda: linear_cross_entropy(X.float(), W.float(), TARGET),
            TypeError,
            "linear_cross_entropy: input has dtype torch.float32; it must be torch.bfloat16 or torch.float16",
        ),
        (
            lambda: linear_cross_entropy(X, W.half(), TARGET),
            TypeError,
            "linear_cross_entropy: linear_weight has dtype torch.float16, input torch.bfloat16; they must be equal",
        ),
        (
            lambda: linear_cross_entropy(X, W.T, TARGET),
            ValueError,
            "linear_cross_entropy: linear_weight has shape (32, 72); it must be (classes, 32), of 1 to 262144 classes",
        ),
        (
            lambda: linear_cross_entropy(X, W, TARGET, BIAS[:3]),
            ValueError,
            "linear_cross_entropy: linear_bias has shape (3,); it must be (72,)",
        ),
        (
            lambda: linear_cross_entropy(X, W, TARGET[:3]),
            ValueError,
            "linear_cross_entropy: target has shape (3,); it must be (8,), an index for each row of input",
        ),
        (
            lambda: linear_cross_entropy(X, W.to("meta"), TARGET),
            ValueError,
            "linear_cross_entropy: linear_weight is on meta, input on cpu; all tensors must be on one device",
        ),
        (
            lambda: linear_cross_entropy(X[:, :0], W[:, :0], TARGET),
            ValueError,
            "linear_cross_entropy: input has shape (8, 0); it must be (…, features), with a feature",
        ),
        (
            lambda: linear_cross_entropy(X, W, TARGET + 70, debug=True),
            IndexError,
            "linear_cross_entropy: target 73 is neither in [0, 72) nor ignore_index=-100",
        ),
    ],
)
def test_refusals(call, kind, message):
    with sim.device(), refused(message, kind):
        call()


def test_a_cpu_tensor_outside_of_the_simulator():
    with refused("linear_cross_entropy: input is on cpu; it must be on a CUDA device", ValueError):
        linear_cross_entropy(X, W, TARGET)


# ---------------------------------------------------------------- modules


@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.2, reduction="sum"), dict(reduction="none")], ids=str)
def test_cross_entropy_is_torchs(options):
    theirs, ours = nn.CrossEntropyLoss(**options), CrossEntropyLoss(**options)
    language = torch.randn(2, 5, 40)
    for x, target in (
        (torch.randn(6, 40), targets((6,), 40)),
        (torch.randn(40), torch.tensor(3)),
        (language.transpose(1, 2), targets((2, 5), 40)),
    ):
        results = []
        for module in (theirs, ours):
            leaf = x.detach().requires_grad_()
            with sim.device() as device:
                loss = module(leaf, target)
                results.append([loss, *torch.autograd.grad(loss.sum(), leaf)])
            assert (len(device.launches) > 0) == (module is ours)
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected)
    assert repr(ours) == repr(theirs) and copy.deepcopy(ours).reduction == ours.reduction


def test_cross_entropy_without_a_kernel_is_torchs():
    x, target = torch.randn(6, 40), targets((6,), 40)
    weight = torch.rand(40)
    with sim.device() as device:
        for options, given in (
            (dict(weight=weight), (x, target)),
            ({}, (x, torch.softmax(x, -1))),
            ({}, (x.double(), target)),
            ({}, (torch.randn(2, 40, 5), targets((2, 5), 40))),
        ):
            torch.testing.assert_close(CrossEntropyLoss(**options)(*given), nn.CrossEntropyLoss(**options)(*given))
        assert not device.launches
        with pytest.raises(ValueError, match="batch_size"):
            CrossEntropyLoss()(x, target[:3])
    torch.testing.assert_close(CrossEntropyLoss()(x, target), nn.CrossEntropyLoss()(x, target))


def test_compiled_modules():
    x, target = torch.randn(6, 32).bfloat16(), targets((6,), 32, ignored=0.0)
    with sim.device():
        model = LinearCrossEntropyLoss(32, 40, bias=True, dtype=BF16)
        for module, given in ((CrossEntropyLoss(), x), (model, x)):
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(given, target), module(given, target))


@pytest.mark.parametrize(
    "options", [dict(bias=True), dict(softcap=3.0, lse_square_scale=0.1, reduction="none")], ids=str
)
def test_linear_cross_entropy_of_a_module(options):
    module = LinearCrossEntropyLoss(32, 72, dtype=BF16, **options)
    x = X.clone().requires_grad_()
    expected = module(x, TARGET)  # without a kernel
    found = []
    with sim.device() as device:
        loss = module(x, TARGET)
        found = torch.autograd.grad(loss.sum(), [x, *module.parameters()])
        assert len(device.launches) > 3 and type(loss.grad_fn).__name__ == "LinearCrossEntropyFunctionBackward"
    assert loss.dtype == expected.dtype == FP32 and relative_error(loss, expected) < 4e-3
    for a, b in zip(found, torch.autograd.grad(expected.sum(), [x, *module.parameters()]), strict=True):
        assert relative_error(a, b) < 1e-2
    assert list(module.state_dict()) == ["linear.weight", *(["linear.bias"] if "bias" in options else [])]


@pytest.mark.parametrize("casts", [False, True])
def test_linear_cross_entropy_of_other_dtypes(casts):
    """torch.autocast leaves float64 as it is."""
    module = LinearCrossEntropyLoss(32, 72, dtype=torch.float64)
    x = X.double()
    expected = nn.functional.cross_entropy(module.linear(x), TARGET)
    with sim.device() as device, torch.autocast("cpu", torch.bfloat16, enabled=casts):
        with refused("linear_cross_entropy: input has dtype torch.float64; it must be torch.bfloat16 or", TypeError):
            linear_cross_entropy(x, module.linear.weight, TARGET)
        torch.testing.assert_close(module(x, TARGET), expected)
        assert not device.launches


def on_kernels(is_simulated):
    return sim.device() if is_simulated else contextlib.nullcontext()


@pytest.mark.parametrize("is_simulated", [True, False])
def test_the_module_refuses_alike_on_and_off_the_kernels(is_simulated):
    module = LinearCrossEntropyLoss(32, 72, dtype=BF16)
    with on_kernels(is_simulated):
        for target, kind, message in (
            (TARGET[:1], ValueError, "target has shape (1,); it must be (8,), an index for each row of input"),
            (TARGET.float(), TypeError, "target has dtype torch.float32; it must be torch.int64 or torch.int32"),
        ):
            with refused(message, kind):
                module(X, target)
    for kind in (CrossEntropyLoss, lambda **options: LinearCrossEntropyLoss(3, 4, **options)):
        for options, message in (
            (dict(reduction="avg"), "CrossEntropyLoss: reduction='avg'; it must be 'mean' or 'sum' or 'none'"),
            (dict(label_smoothing=1.5), "CrossEntropyLoss: label_smoothing=1.5; it must be in [0, 1]"),
        ):
            with refused(message, ValueError):
                kind(**options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_targets_that_are_no_class(dtype):
    """NaN on and off the kernels, which give the same gradients."""
    module, target, found = LinearCrossEntropyLoss(32, 72, dtype=BF16, reduction="none"), TARGET.to(dtype).clone(), []
    target[:3] = torch.tensor([72, -1, -100])
    for is_simulated in (True, False):
        x = X.clone().requires_grad_()
        with on_kernels(is_simulated):
            loss = module(x, target)
            found.append((loss, *torch.autograd.grad(loss[2:].sum(), x)))
        assert loss.isnan().tolist() == [True, True] + [False] * 6 and not loss[2]
    assert relative_error(found[0][0][2:], found[1][0][2:]) < 4e-3 and relative_error(found[0][1], found[1][1]) < 1e-2


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_losses_of_half_precision_are_fp32(dtype):
    """Whatever the strides, the device, and the kind of targets."""
    x, target = torch.randn(2, 40, 5).to(dtype), targets((2, 5), 40)
    weight, shares = torch.rand(40).to(dtype), torch.softmax(torch.randn(2, 40, 5), 1).to(dtype)
    for is_simulated in (True, False):
        for options, given in (
            ({}, (x, target)),
            ({}, (x.mT.contiguous().mT, target)),
            (dict(weight=weight), (x, target)),
            ({}, (x, shares)),
        ):
            exact = {key: t.double() for key, t in options.items()}
            expected = nn.CrossEntropyLoss(**exact)(*(t.double() if t.is_floating_point() else t for t in given))
            with on_kernels(is_simulated):
                loss = CrossEntropyLoss(**options)(*given)
            assert loss.dtype == FP32 and relative_error(loss, expected) < 1e-5
