"""Gradients of `gemm` and its operator: against autograd in float64, under torch.compile, and by torch.library's own
checks."""

import pytest
import torch

from tests.cases_gemm import BF16, E4M3, FP16, FP32, SMALL, check, matrix, randn, scales
from tests.util import DEVICE, assert_eager_is_operator, crossed, relative_error, slow
from tritonkittens.kernels.gemm import gemm, gemm_torch

pytestmark = pytest.mark.usefixtures("kernel_device")

# of the gradient of the sums, of the result and of the gradient, each about half an ulp
ROUNDINGS = {BF16: 1.2e-2, FP16: 2e-3}


def compared(a, b, grad=None, activation=None, wanted=None, **operands):
    """Gradients of everything, or of the `wanted`, as float64 has them."""
    tensors = {"a": a, "b": b, **operands}
    wanted = wanted or [name for name, x in tensors.items() if not name.startswith("scale")]
    leaves = {
        name: x.detach().clone(memory_format=torch.preserve_format).requires_grad_(name in wanted)
        for name, x in tensors.items()
    }
    exact = {name: x.detach().cpu().double().requires_grad_(name in wanted) for name, x in tensors.items()}
    out = gemm(**leaves, activation=activation)
    ref = gemm_torch(**exact, activation=activation)
    grad = torch.randn(out.shape, device=DEVICE).to(out.dtype) if grad is None else grad
    out.backward(grad)
    ref.backward(grad.cpu().double())
    for name, x in leaves.items():
        if name not in wanted:
            assert x.grad is None
            continue
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype, name
        error = relative_error(x.grad, exact[name].grad)
        assert error < ROUNDINGS[a.dtype], f"d_{name} is off by {error:.2e}"


SHAPES = {  # a's leading dimensions, b's
    "matrices": ((), ()),
    "rows of a batch": ((3,), ()),
    "batches": ((3,), (3,)),
    "one a": ((), (3,)),
    "broadcast in the middle": ((2, 1), (3,)),
}
EPILOGUES = {
    "none": (),
    "bias": ("bias",),
    "activation": ("gelu",),
    "gates": ("bias", "gate_row", "silu"),
    "all": ("bias", "gate_tile", "residual", "gelu_tanh"),
}


@pytest.mark.parametrize("epilogue, shape", crossed(list(EPILOGUES), list(SHAPES)))
def test_gradients(rng, epilogue, shape):
    a_batch, b_batch = SHAPES[shape]
    out = (*torch.broadcast_shapes(a_batch, b_batch), 24, 40)
    of = {"bias": (40,), "gate_row": (24, 1), "gate_tile": out, "residual": out}
    parts = EPILOGUES[epilogue]
    operands = {name.split("_")[0]: randn(*of[name]) for name in parts if name in of}
    activation = next((p for p in parts if p in ("gelu", "gelu_tanh", "silu")), None)
    compared(randn(*a_batch, 24, 32), randn(*b_batch, 32, 40), activation=activation, **operands)


@pytest.mark.parametrize("activation", [None, slow("silu")])
def test_gradients_of_every_place_of_an_operand(activation, rng):
    a, b = randn(24, 32), randn(32, 40)
    for bias in (randn(dtype=FP32), randn(1), randn(1, 40, dtype=FP32)):
        compared(a, b, bias=bias, activation=activation)
    for gate in (randn(dtype=FP32), randn(40, dtype=FP32), randn(1, 40), randn(24, 1), randn(24, 40, dtype=FP32)):
        compared(a, b, gate=gate, **({} if activation is None else dict(bias=randn(40), activation=activation)))


def test_vectors_along_the_rows_of_every_matrix_of_a_batch(rng):
    """Rows of a batch are those of one product only where nothing is along them."""
    a, b = (
        torch.randn(*shape, dtype=torch.float32, device=DEVICE).to(torch.bfloat16) for shape in ((3, 24, 64), (64, 40))
    )
    scale, gate = (torch.rand(24, 1, dtype=torch.float32, device=DEVICE) + 0.5 for _ in range(2))
    for given in (dict(scale_a=scale), dict(scale_a=scale[:, 0]), dict(gate=gate), dict(scale_a=scale, gate=gate)):
        assert relative_error(gemm(a, b, **given), torch.stack([gemm_torch(x, b, **given) for x in a]).cpu()) < 1e-2


@pytest.mark.parametrize("wanted", ["a", "b", "bias", "gate", "residual"])
def test_the_gradient_of_one_operand_only(rng, wanted):
    compared(
        randn(24, 32),
        randn(32, 40),
        wanted=[wanted],
        bias=randn(40),
        gate=randn(24, 1),
        residual=randn(24, 40),
        activation="gelu",
    )


def test_gradients_of_views_and_of_strange_incoming_gradients(rng):
    a, b = matrix(24, 32, transposed=True), matrix(32, 40, transposed=True)
    compared(a, b, grad=randn(40, 24).T)
    compared(a, b, grad=randn(1, 1).expand(24, 40), bias=randn(40), activation="silu")
    compared(a, b, grad=randn(24, 83)[:, 1:81:2], gate=randn(40, 24).T, residual=randn(24, 40))
    compared(randn(3, 24, 33)[..., 1:], b, grad=randn(24, 3, 40).transpose(0, 1))
    compared(randn(5, 7), randn(7, 3), bias=randn(3), activation="gelu")


@pytest.mark.parametrize("epilogue", [slow({}), dict(activation="silu")], ids=str)
def test_gradients_in_fp16_and_with_scales(rng, epilogue):
    compared(randn(24, 32, dtype=FP16), randn(32, 40, dtype=FP16), bias=randn(40, dtype=FP16), **epilogue)
    compared(randn(24, 32), randn(32, 40), scale_a=scales(24, 1), scale_b=scales(40), **epilogue)
    compared(randn(24, 32), randn(32, 40), scale_a=scales(), bias=randn(40), **epilogue)


def test_gradients_where_nothing_is_summed():
    for shape in ((0, 16, 8), (8, 16, 0), (8, 0, 16)):
        m, k, n = shape
        a, b = randn(m, k).requires_grad_(), randn(k, n).requires_grad_()
        bias = randn(n).requires_grad_()
        gemm(a, b, bias=bias, activation="silu").sum().backward()
        assert (a.grad == 0).all() and (b.grad == 0).all() and a.grad.shape == a.shape and b.grad.shape == b.shape
        expected = torch.autograd.grad(torch.nn.functional.silu(bias.float()).sum() * m, bias)[0]
        torch.testing.assert_close(bias.grad, expected) if k == 0 else None


def test_a_wider_result_has_gradients_too(rng):
    a, b = randn(24, 32).requires_grad_(), randn(32, 40).requires_grad_()
    out = gemm(a, b, out_dtype=FP32)
    grad = torch.randn(24, 40, device=DEVICE)
    out.backward(grad)
    assert (
        a.grad.dtype == BF16
        and relative_error(a.grad, grad.cpu().double() @ b.detach().cpu().double().T) < ROUNDINGS[BF16]
    )


def test_out_of_a_differentiable_product_is_written(rng):
    a, b, out = randn(24, 32).requires_grad_(), randn(32, 40), torch.empty(24, 40, device=DEVICE, dtype=BF16)
    assert gemm(a, b, out=out) is out
    check(out, a, b)
    out.sum().backward()
    assert relative_error(a.grad, b.cpu().double().sum(1).expand(24, 32)) < ROUNDINGS[BF16]


def test_a_configuration_counts_where_gradients_are_wanted(kernel_device):
    a, b = randn(24, 32).requires_grad_(), randn(32, 40)
    with pytest.raises(TypeError, match="must be a Config"):
        gemm(a, b, config="fastest")
    check(gemm(a, b, config=SMALL), a, b)


def test_no_gradient_of_8_bit_operands():
    a, b = randn(32, 32, dtype=E4M3), matrix(32, 32, E4M3, True)
    message = (
        r"gemm of torch\.float8_e4m3fn has no gradient: the operands of an 8-bit product are results of a quantisation"
    )
    with pytest.raises(TypeError, match=message):
        gemm(a.requires_grad_(), b)
    with torch.no_grad():
        check(gemm(a, b), a, b)


# ---------------------------------------------------------------- the operator


def sample(grad=False, **changes):
    given = dict(
        a=randn(24, 32), b=randn(32, 40), bias=randn(40), activation="gelu", gate=randn(24, 1), residual=randn(24, 40)
    )
    given = {**given, "scale_a": None, "scale_b": None, "out_dtype": None, "config": None, **changes}
    return tuple(
        x.requires_grad_(grad) if isinstance(x, torch.Tensor) and x.dtype != E4M3 else x for x in given.values()
    )


@pytest.mark.parametrize("grad", [False, True])
def test_the_operator_passes_the_checks_of_torch(grad):
    """Schema, registration of autograd, fake tensors, and traces with static and dynamic shapes."""
    for case in (sample(grad), sample(grad, a=randn(3, 24, 32), gate=None, residual=None, activation=None)):
        torch.library.opcheck(torch.ops.tritonkittens.gemm.default, case, rtol=2e-2, atol=2e-2)


def test_the_operator_passes_the_checks_of_torch_with_8_bit_operands():
    """All but test_schema, whose arithmetic on the operands torch has not for fp8 on a CPU."""
    case = sample(
        a=randn(24, 32, dtype=E4M3),
        b=matrix(32, 40, E4M3, True),
        scale_a=scales(),
        scale_b=scales(40),
        gate=None,
        residual=None,
    )
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.tritonkittens.gemm.default, case, test_utils=tests, rtol=2e-2, atol=2e-2)


def mlp(x, first, second, bias):
    h = gemm(x, first.T, bias=bias, activation="gelu")
    return gemm(h, second.T, residual=x)


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_without_graph_breaks(rng, backend):
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)
    tensors = [randn(24, 32), randn(48, 32), randn(32, 48), randn(48)]
    assert torch.equal(compiled(*tensors), mlp(*tensors))
    grads = []
    for run in (mlp, compiled):
        leaves = [t.clone().requires_grad_() for t in tensors]
        run(*leaves).float().square().sum().backward()
        grads.append([x.grad for x in leaves])
    for eager, traced in zip(*grads):
        assert relative_error(traced, eager) < 1e-2
    more = [randn(40, 32), *tensors[1:]]  # another number of rows: a trace for any
    assert torch.equal(compiled(*more), mlp(*more))


def test_eager_calls_and_the_operator_agree(rng):
    """An eager call is a plain autograd function; dispatch modes and transforms of torch see the operator. Both give
    the same bits, and may be differentiated again."""
    a, b, bias = (x.requires_grad_() for x in (randn(70, 72), randn(72, 40), randn(40)))
    grad = randn(70, 40)

    def run():
        out = gemm(a, b, bias=bias, activation="silu")
        return out, torch.autograd.grad(out, (a, b, bias), grad)

    assert_eager_is_operator(run, "GemmFunction", "gemm")
    (d_a,) = torch.autograd.grad(gemm(a, b), (a,), grad, create_graph=True)
    (d_b,) = torch.autograd.grad(d_a.float().sum(), (b,))
    assert relative_error(d_b, grad.double().sum(0).expand(72, 40)) < ROUNDINGS[BF16]


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("transposed", ["a", "b", "ab", ""])
def test_gradients_lie_as_their_operands(rng, transposed, batch):
    """What accumulates gradients keeps such a one, and copies another."""
    stored = {"a": randn(*batch, 24, 32), "b": randn(*batch, 32, 40)}
    leaves = {name: (x.mT.contiguous() if name in transposed else x).requires_grad_() for name, x in stored.items()}
    out = gemm(**{name: x.mT if name in transposed else x for name, x in leaves.items()})
    assert all(
        gradient.is_contiguous() for gradient in torch.autograd.grad(out, leaves.values(), torch.randn_like(out))
    )
