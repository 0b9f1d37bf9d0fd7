"""Gated activations as torch sees them, their machine code, and what they refuse."""

import re

import pytest
import torch

from bench import activation as bench_activation
from tests.cases_activation import BF16, FP32, KINDS, LAYOUTS, check, operands, run
from tests.util import Seen, assert_wide_offsets, explored, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels.activation import backward_operator, gated_operator, gated_torch, geglu, swiglu
from tritonkittens.kernels.activation.config import Shape, shape_of
from tritonkittens.kernels.activation.inspection import inspectable
from tritonkittens.kernels.gated_gemm import layers
from tritonkittens.nn import SwiGLU

A, B = torch.randn(4, 32), torch.randn(4, 32)
LEAF = torch.randn(4, 32, requires_grad=True)


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_activation.DEVICE", "cpu")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", slow("sm_89"), slow("sm_120a")])
def test_chips(arch):
    with sim.device(arch):
        check("silu", "pair", operands("pair", (5, 72), BF16))


@explored(3, 30)
def test_interleavings_of_programs(schedules):
    with sim.device():
        check("silu", "interleaved", given := operands("interleaved", (5, 1100), FP32))
    sim.explore(lambda: torch.autograd.grad(run("silu", *given, interleaved=True).sum(), given), schedules=schedules)


# ---------------------------------------------------------------- as torch sees them


def block(a, b):
    """Activations as layers have them."""
    y = swiglu(a * 2, b)
    return geglu(torch.cat([y, b], -1), interleaved=True), geglu(y, approximate="none")


def test_torch_compile_sees_operators():
    leaves = [t.clone().requires_grad_() for t in (A, B)]
    with sim.device():
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        results = [function(*leaves) for function in (block, compiled)]
        gradients = [torch.autograd.grad([t.square().sum() for t in found], leaves) for found in results]
    for a, b in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_opcheck():
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    with sim.device():
        for operator, args in (
            (gated_operator, (a, b, "silu", False)),
            (gated_operator, (a, None, "gelu", True)),
            (backward_operator, (A, A, B, "gelu_tanh", False)),
            (backward_operator, (A[:, :16], A, None, "silu", False)),
        ):
            torch.library.opcheck(
                operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eager_call_is_the_operator(layout):
    """Plain tensors take an autograd function; a dispatch mode sees operators, which give the same bits."""
    given = operands(layout, (3, 40), BF16)

    def call():
        y = run("silu", *given, interleaved=layout == "interleaved")
        return y, torch.autograd.grad(y.sum(), given)

    with sim.device():
        y, gradients = call()
        assert type(y.grad_fn).__name__ == "GatedFunctionBackward"
        with Seen() as seen:
            again, others = call()
    assert {"tritonkittens::gated_activation", "tritonkittens::gated_activation_backward"} <= seen.names
    assert all(torch.equal(a, b) for a, b in zip((y, *gradients), (again, *others), strict=True))


def test_transforms_of_functions():
    with sim.device():
        found = torch.vmap(swiglu)(A, B)
        gradients = torch.vmap(torch.func.grad(lambda a, b: geglu(a, b).sum()))(A, B)
    torch.testing.assert_close(found.double(), gated_torch(A, B, kind="silu"), rtol=1e-5, atol=1e-6)
    leaf = A.clone().requires_grad_()
    (expected,) = torch.autograd.grad(gated_torch(leaf, B, kind="gelu_tanh").sum(), leaf)
    torch.testing.assert_close(gradients, expected)


def test_no_second_derivative():
    a = A.clone().requires_grad_()
    with sim.device():
        (da,) = torch.autograd.grad(swiglu(a, B).square().sum(), a, create_graph=True)
        with refused(
            "gated_activation_backward has no second derivative; use torch's activations", NotImplementedError
        ):
            da.sum().backward()


# ---------------------------------------------------------------- the module


@pytest.mark.parametrize("dtype, compiles", [(BF16, False), (torch.float64, True), slow(BF16, True)], ids=str)
def test_module(dtype, compiles):
    """Its activation is a kernel where there is one for the dtype; torch.compile sees through it."""
    module = SwiGLU(40, 24, 16, dtype=dtype)
    x = torch.randn(3, 5, 40).to(dtype)
    with sim.device() as device:
        y = (torch.compile(module, fullgraph=True, backend="aot_eager") if compiles else module)(x)
        assert len(device.launches) == 3 * (dtype == BF16), "products and the activation"
    (w12, b12), (w3, b3) = ([p.double() for p in layer.parameters()] for layer in (module.w12, module.w3))
    expected = gated_torch(x.double() @ w12.T + b12, kind="silu") @ w3.T + b3
    assert relative_error(y, expected) < (1e-2 if dtype == BF16 else 1e-12)
    assert module.state_dict().keys() == {"w12.weight", "w12.bias", "w3.weight", "w3.bias"}
    assert SwiGLU(8, 4, bias=False).w3.weight.shape == (8, 4)


CHANGES = {
    "bias": lambda module: setattr(module.w12, "bias", torch.nn.Parameter(torch.randn(48, dtype=BF16))),
    "hook": lambda module: module.w12.register_forward_hook(lambda *given: None),
    "activation": lambda module: setattr(module.w12, "activation", "silu"),
    "parametrization": lambda module: torch.nn.utils.parametrizations.weight_norm(module.w12),
}


@pytest.mark.parametrize("change", [None, "hook of all modules", *CHANGES])
def test_module_without_gradients(change, monkeypatch):
    """The first product and the activation are one kernel, unless the layer does more than multiply."""
    monkeypatch.setattr(layers, "LEAST_ROWS", 15)
    module, x = SwiGLU(40, 24, 16, bias=False, dtype=BF16), torch.randn(3, 5, 40, dtype=BF16)
    if change in CHANGES:
        CHANGES[change](module)
    elif change:
        monkeypatch.setitem(torch.nn.modules.module._global_forward_hooks, 0, lambda *given: None)
    with sim.device() as device:
        expected = module(x).detach()  # as in training
        device.launches.clear()
        with torch.no_grad():
            y = module(x)
    assert len(device.launches) == (3 if change else 2)
    assert relative_error(y, expected.double()) < 1e-2


# ---------------------------------------------------------------- plans and machine code


def test_tiles():
    assert shape_of("silu", False, 14336, 16) == Shape("silu", False, 2, 1024, 16)
    # narrower tiles where wide ones would have many columns beyond the end of a row
    assert shape_of("silu", False, 1536, 16).cols == 512 and shape_of("silu", False, 1100, 4).cols == 128
    assert (
        shape_of("gelu", True, 7, 1) == Shape("gelu", True, 128, 16, 1) and shape_of("silu", False, 128, 16).cols == 128
    )


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize(
    "name, most",
    [
        ("gated_silu", 27.0),
        ("gated_gelu", 28.0),
        slow("gated_gelu_tanh", 30.0),
        ("gated_silu_interleaved_backward", 40.0),
        slow("gated_silu_backward", 40.0),
        ("gated_gelu_backward", 64.0),
        slow("gated_gelu_tanh_backward", 45.0),
    ],
)
def test_instructions_of_an_element(name, most, arch):
    """At most. 16 bytes are loaded and stored at once, and nothing spills."""
    kernel = inspectable[name](arch)
    assert_wide_offsets(kernel)
    instructions, _ = _sass.parse(*_tools.disassemble(kernel.asm["cubin"]))
    assert not {"LDL", "STL"} & {i.base for i in instructions}
    assert len(instructions) <= most * 16, f"{len(instructions) / 16:.1f} instructions an element"
    widths = re.findall(r"(ld|st)\.global\.(\w+\.b32|b32|b16)", kernel.asm["ptx"])
    assert set(widths) == {("ld", "v4.b32"), ("st", "v4.b32")}
    assert len(widths) == (10 if "backward" in name else 6)


# ---------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", bench_activation.KINDS)
def test_the_benchmark(monkeypatch, kind, both_ways):
    """Ours and a peer are right, and a wrong result is found out."""
    monkeypatch.setattr("bench.gemm.DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with sim.device():
        trial = bench_activation.prepare(kind, 3, 64, both_ways)
        for make in (trial.ours[bench_activation.OURS], trial.peers["torch.compile"]):
            found = make()()
            assert trial.error(found) < trial.bound < trial.error([1.1 * t for t in bench_activation.parts(found)])


def test_cases_of_the_benchmark():
    found = {case.name: case for suite in bench_activation.SUITES for case in suite.cases(None)}
    assert len(found) == 2 * len(bench_activation.KINDS) * len(bench_activation.SHAPES)
    assert found["swiglu 16384x14336"].work == 6 * 16384 * 14336
    assert found["swiglu packed backward 16384x14336"].work == 10 * 16384 * 14336


# ---------------------------------------------------------------- refusals

DTYPES = "torch.bfloat16 or torch.float16 or torch.float32"


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: swiglu([1.0]), TypeError, "swiglu: a is list; it must be a torch tensor"),
        (lambda: geglu(A, 1.0), TypeError, "geglu: b is float; it must be a torch tensor"),
        (lambda: swiglu(A.double(), B), TypeError, f"swiglu: a has dtype torch.float64; it must be {DTYPES}"),
        (
            lambda: geglu(A, B.half()),
            TypeError,
            "geglu: b has dtype torch.float16, a torch.float32; they must be equal",
        ),
        (lambda: swiglu(A, B[:3]), ValueError, "swiglu: b has shape (3, 32); it must be (4, 32), that of a"),
        (lambda: swiglu(A[:, :31]), ValueError, "a has shape (4, 31); without b its last dimension must be even"),
        (lambda: swiglu(torch.ones(())), ValueError, "swiglu: a has shape (); it must have a dimension at least"),
        (
            lambda: swiglu(A, B, interleaved=True),
            ValueError,
            "swiglu: interleaved with b; columns alternate in one tensor",
        ),
        (lambda: geglu(A, B, approximate="erf"), ValueError, "approximate='erf'; it must be 'none' or 'tanh'"),
        (
            lambda: swiglu(A, B.to("meta")),
            ValueError,
            "swiglu: b is on meta, a on cpu; all tensors must be on one device",
        ),
        (
            lambda: swiglu(A.clone().requires_grad_(), B, inplace_backward=True),
            ValueError,
            "swiglu: inplace_backward with a a leaf, whose values must stay",
        ),
        (
            lambda: swiglu(LEAF * 1, (LEAF * 1)[:1].expand(4, 32), inplace_backward=True),
            ValueError,
            "swiglu: out is (4, 32) with strides (0, 1); some of its elements share memory",
        ),
        (
            lambda: geglu(*[LEAF * 1] * 2, inplace_backward=True),
            ValueError,
            "geglu: inplace_backward with a and b that may share memory; give one tensor of both",
        ),
        (
            lambda: torch.func.jvp(lambda a: swiglu(a, B), (A,), (A,)),
            ValueError,
            "swiglu: it has no forward-mode derivative; use torch's activations",
        ),
    ],
)
def test_refusals(call, kind, message):
    with sim.device(), refused(message, kind):
        call()


def test_a_cpu_tensor_outside_of_the_simulator():
    with refused("geglu: a is on cpu; it must be on a CUDA device", ValueError):
        geglu(A, B)
    assert set(KINDS) == {"silu", "gelu", "gelu_tanh"}
