"""Epilogues of `gemm` that users write: their errors, their keys, and what autograd and torch.compile do with them."""

import re

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.cases_gemm import BF16, SMALL
from tritonkittens import sim
from tritonkittens.kernels.gemm import Epilogue, Gemm, gemm
from tritonkittens.kernels.gemm.device.epilogue import Operand, Step, Steps, add


@triton.jit
def scaled(acc, scale, alpha):
    return acc * scale * alpha


@triton.jit
def powered(acc, power: tl.constexpr, shift=0.0):
    return acc * power + shift


@triton.jit
def squared_relu(acc):
    x = tl.maximum(acc, 0.0)
    return x * x


@triton.jit
def nothing():
    return 1.0


@triton.jit
def row_sums(acc):
    return tl.sum(acc, 1)


@triton.jit
def rounded(acc):
    return acc.to(tl.bfloat16)


@triton.jit
def a_number(acc):
    return 1.0


@triton.jit
def misspelled(acc, scale):
    return acc * scael  # noqa: F821


def plain(acc):
    return acc


NUMBERS = torch.ones(24)

CONSTRUCTION = [
    (plain, {}, "Epilogue(plain): must be a @triton.jit function of a tile of sums and its operands"),
    ("gelu", {}, "Epilogue('gelu'): must be a @triton.jit function of a tile of sums and its operands"),
    (nothing, {}, "Epilogue(nothing): nothing() must take the sums first, which are no operand"),
    (
        scaled,
        dict(acc=NUMBERS),
        "Epilogue(scaled): scaled(acc, scale, alpha) must take the sums first, which are no operand",
    ),
    (
        scaled,
        dict(scale=NUMBERS),
        "Epilogue(scaled, scale=…): missing a required argument: 'alpha'; it is scaled(acc, scale, alpha)",
    ),
    (
        scaled,
        dict(scale=NUMBERS, alpha=1, beta=2),
        "got an unexpected keyword argument 'beta'; it is scaled(acc, scale, alpha)",
    ),
    (scaled, dict(scale="row", alpha=1), "Epilogue(scaled, scale=str): must be a tensor or a number"),
    (scaled, dict(scale=NUMBERS, alpha=None), "Epilogue(scaled, alpha=NoneType): must be a tensor or a number"),
    (
        powered,
        dict(power=NUMBERS),
        "Epilogue(powered, power=Tensor): power is a tl.constexpr of powered; give a hashable value",
    ),
    (
        powered,
        dict(power=[2]),
        "Epilogue(powered, power=list): power is a tl.constexpr of powered; give a hashable value",
    ),
]


@pytest.mark.parametrize(("function", "operands", "message"), CONSTRUCTION, ids=lambda x: getattr(x, "__name__", None))
def test_what_is_no_epilogue(function, operands, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Epilogue(function, **operands)


A, B = torch.ones(8, 16, dtype=BF16), torch.ones(16, 24, dtype=BF16)
SHAPES = "it must be one number or (24,), (1, 24), (8, 1), (8, 24)"
CALLS = [
    (dict(epilogue=squared_relu), TypeError, "must be an Epilogue of a @triton.jit function"),
    (
        dict(epilogue=Epilogue(squared_relu), activation="gelu"),
        ValueError,
        "gemm(epilogue=Epilogue(squared_relu)): it stands where activation='gelu' would; give one of them",
    ),
    (
        dict(epilogue=Epilogue(scaled, scale=torch.ones(8), alpha=1)),
        ValueError,
        f"gemm: epilogue.scale is (8,); {SHAPES}",
    ),
    (
        dict(epilogue=Epilogue(scaled, scale=torch.ones(24, 1), alpha=1)),
        ValueError,
        f"gemm: epilogue.scale is (24, 1); {SHAPES}",
    ),
    (
        dict(epilogue=Epilogue(scaled, scale=torch.ones(8, 24, dtype=torch.int32), alpha=1)),
        TypeError,
        "gemm: epilogue.scale has dtype torch.int32; it must be torch.bfloat16 or torch.float16 or torch.float32",
    ),
    (
        dict(epilogue=Epilogue(scaled, scale=torch.ones(24, device="meta"), alpha=1)),
        ValueError,
        "gemm: epilogue.scale is on meta",
    ),
    (dict(epilogue=Epilogue(squared_relu), out_dtype=torch.int8), TypeError, "gemm(out_dtype=torch.int8): must be"),
]


@pytest.mark.parametrize(("given", "kind", "message"), CALLS)
def test_calls_that_do_not_fit(given, kind, message):
    with sim.device("sm_90a"), pytest.raises(kind, match=re.escape(message)):
        gemm(A, B, config=SMALL, **given)


MISTAKES = [
    (
        Epilogue(row_sums),
        tk.TileError,
        "row_sums returns fp32 of shape [64]; it must return fp32 of shape [64, 64], as its first argument has",
    ),
    (
        Epilogue(rounded),
        tk.TileError,
        "rounded returns bf16 of shape [64, 64]; it must return fp32 of shape [64, 64], as its first argument has",
    ),
    (
        Epilogue(a_number),
        tk.TileError,
        "a_number returns 1.0; it must return fp32 of shape [64, 64], as its first argument has",
    ),
    (Epilogue(misspelled, scale=2), tk.KernelError, "scael is not defined [in misspelled: return acc * scael"),
]


@pytest.mark.parametrize(
    ("epilogue", "kind", "message"), MISTAKES, ids=lambda x: repr(x) if isinstance(x, Epilogue) else None
)
def test_functions_that_are_wrong(epilogue, kind, message):
    with sim.device("sm_90a"), pytest.raises(kind, match=re.escape(message)):
        gemm(A, B, config=SMALL, epilogue=epilogue)


def test_no_gradient_is_lost():
    """The error comes before the launch."""
    message = (
        "gemm(epilogue=Epilogue(scaled)): it has no backward, but a gradient is wanted of an operand; "
        "call it under torch.no_grad, or detach its operands"
    )
    scale = torch.ones(24, requires_grad=True)
    with sim.device("sm_90a"):
        for a, epilogue in (
            (A, Epilogue(scaled, scale=scale, alpha=1)),
            (A.clone().requires_grad_(), Epilogue(scaled, scale=NUMBERS, alpha=1)),
        ):
            with pytest.raises(TypeError, match=re.escape(message)):
                gemm(a, B, config=SMALL, epilogue=epilogue)
            with torch.no_grad():
                assert torch.equal(gemm(a, B, config=SMALL, epilogue=epilogue), torch.full((8, 24), 16.0, dtype=BF16))


UNSEEN = (
    "gemm(epilogue=Epilogue(squared_relu)): torch.compile, torch.func, fake tensors, tensor subclasses and "
    "forward-mode differentiation cannot see into it; under torch.compile call gemm in a function with "
    "torch.compiler.disable"
)


def test_what_torch_cannot_see_into():
    epilogue = Epilogue(squared_relu)
    with sim.device("sm_90a"):
        with pytest.raises(TypeError, match=re.escape(UNSEEN)):
            torch.func.vmap(lambda a: gemm(a, B, config=SMALL, epilogue=epilogue))(A[None])
        with torch._subclasses.FakeTensorMode() as mode, pytest.raises(TypeError, match=re.escape(UNSEEN)):
            gemm(mode.from_tensor(A), mode.from_tensor(B), config=SMALL, epilogue=epilogue)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_torch_compile_refuses_it_in_one_message(fullgraph):
    epilogue = Epilogue(squared_relu)

    def squared(a):
        return gemm(a, B, config=SMALL, epilogue=epilogue)

    with sim.device("sm_90a"):
        with pytest.raises(Exception, match=re.escape(UNSEEN)):
            torch.compile(squared, backend="eager", fullgraph=fullgraph)(A)
        apart = torch.compiler.disable(squared)
        out = torch.compile(lambda a: apart(a + 0), backend="eager")(A)
    assert torch.equal(out, torch.full((8, 24), 256.0, dtype=BF16))


def test_the_key_of_a_kernel_covers_its_functions():
    """Its code, what it is given, and constants; a number of the run time is no part of it."""

    def key(epilogue):
        tensors = {f"epilogue.{name}": Operand(f"epilogue.{name}", "col", "bf16") for name in epilogue.function.tensors}
        return Gemm(epilogue=Steps((epilogue.function.step(tensors),))).cache_key

    assert key(Epilogue(powered, power=2, shift=1)) == key(Epilogue(powered, power=2, shift=3.0))
    assert (
        len(
            {
                key(Epilogue(powered, power=2)),
                key(Epilogue(powered, power=3)),
                key(Epilogue(powered, power=2.0)),
                key(Epilogue(squared_relu)),
                key(Epilogue(scaled, scale=NUMBERS, alpha=1)),
                key(Epilogue(scaled, scale=1, alpha=NUMBERS)),
            }
        )
        == 6
    )


def test_deferred_results_need_a_residual_that_the_last_step_adds():
    residual = Operand("residual", "staged", "bf16")
    Gemm(deferred_epilogue=True, epilogue_n=64, epilogue=Steps((Step(add, (residual,)),)))
    with pytest.raises(
        tk.TileError, match="the last step of the epilogue must add the staged operand of deferred results"
    ):
        Gemm(deferred_epilogue=True, epilogue_n=64, epilogue=Steps((Step(powered, (residual, residual)),)))
