"""Quantisers on chips that are simulated, as torch sees them, their machine code, and what they refuse."""

import re

import pytest
import torch

from tests.cases_quantize import (
    BF16,
    E4M3,
    E5M2,
    assert_same_bits,
    check_mxfp8,
    check_nvfp4,
    random_bits,
    signs,
    spread,
)
from tests.util import refused, slow
from tritonkittens import sim
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels.quantize import (
    mxfp8_operator,
    nvfp4_operator,
    nvfp4_tensor_scale,
    nvfp4_tensor_scale_torch,
    quantize_mxfp8,
    quantize_mxfp8_torch,
    quantize_nvfp4,
    quantize_nvfp4_torch,
    tensor_scale_operator,
)
from tritonkittens.kernels.quantize.config import FP4
from tritonkittens.kernels.quantize.inspection import inspectable

ONE = torch.ones(())
X = torch.randn(4, 32, dtype=BF16)


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_quantize.DEVICE", "cpu")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", slow("sm_89"), slow("sm_103a"), slow("sm_120a")])
def test_chips(arch):
    """Without conversions to 8 bits, and with those to 4."""
    x = spread((130, 200), BF16)
    x[3, 40], x[70, 7], x[100, 100] = float("nan"), float("inf"), -float("nan")
    with sim.device(arch):
        check_mxfp8(quantize_mxfp8, x, axes="both")
        check_nvfp4(quantize_nvfp4, x, ONE, axes="both")
        check_nvfp4(quantize_nvfp4, x, ONE, axes="both", random_bits=random_bits(x), hadamard=signs())


# ---------------------------------------------------------------- as torch sees them


def quantised(x):
    """All three functions, of what a program computed before."""
    y = x * 2
    values, scales = quantize_mxfp8(y, dtype=E5M2)
    rows, cols = quantize_nvfp4(y, axes="both")
    return values, scales, *rows, *cols, nvfp4_tensor_scale(y)


def expected(x):
    y = x * 2
    rows, cols = quantize_nvfp4_torch(y, axes="both")
    return *quantize_mxfp8_torch(y, dtype=E5M2), *rows, *cols, nvfp4_tensor_scale_torch(y)


def test_torch_compile_sees_operators():
    with sim.device():
        compiled = torch.compile(quantised, fullgraph=True, backend="aot_eager")
        assert_same_bits(compiled(X), expected(X))


def test_opcheck():
    with sim.device():
        for operator, args in (
            (mxfp8_operator, (X, E4M3, "both", "up", "blocked")),
            (mxfp8_operator, (X.mT, E5M2, "cols", "floor", "plain")),
            (nvfp4_operator, (X, ONE, "both", "blocked", random_bits(X), signs())),
            (nvfp4_operator, (X.mT, ONE, "rows", "plain", None, None)),
            (tensor_scale_operator, (X, "rows", None)),
        ):
            torch.library.opcheck(
                operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )


def test_vmap_quantises_samples_by_themselves():
    x = torch.randn(8, 3, 32)
    with sim.device():
        found = torch.vmap(lambda t: tuple(quantize_nvfp4(t)), in_dims=1)(x)
        values, scales = torch.vmap(lambda t: tuple(quantize_mxfp8(t)), in_dims=1)(x)
        for i in range(3):
            assert_same_bits(tuple(t[i].contiguous() for t in found), quantize_nvfp4_torch(x[:, i]))
            assert_same_bits((values[i].contiguous(), scales[i].contiguous()), quantize_mxfp8_torch(x[:, i]))


def test_results_have_names_and_dtypes():
    with sim.device():
        rows, cols = quantize_mxfp8(X, axes="both", layout="plain")
        assert rows.values.dtype == E4M3 and rows.scales.dtype == torch.float8_e8m0fnu
        assert rows.values.shape == (4, 32) and cols.values.shape == (32, 4)
        assert rows.scales.shape == (4, 1) and cols.scales.shape == (32, 1)
        found = quantize_nvfp4(X, ONE)
        assert found.values.dtype == FP4 and found.scales.dtype == E4M3 and found.tensor_scale is ONE
        assert found.values.shape == (4, 16) and found.scales.shape == (1, 1, 32, 16)


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize(
    "name, most",
    [
        slow("quantize_mxfp8_rows", 8.0),
        ("quantize_mxfp8_both", 15.5),
        slow("quantize_nvfp4_rows", 13.5),
        ("quantize_nvfp4_both", 24.5),
        slow("quantize_nvfp4_rows_hadamard", 19.0),
        ("quantize_nvfp4_cols_stochastic", 16.5),
    ],
)
def test_instructions_of_an_element(name, most):
    """As few as a copy leaves time for: about 21 for an element of MXFP8 on an H200, and 18 for one of NVFP4."""
    instructions, _ = _sass.parse(*_tools.disassemble(inspectable[name]("sm_90a").asm["cubin"]))
    elements = 128 * 128 / (8 * 32)
    assert not {"LDL", "STL"} & {i.base for i in instructions}, "nothing spills"
    assert len(instructions) <= most * elements, f"{len(instructions) / elements:.1f} instructions an element"


def test_blackwell_converts_to_four_bits():
    kernel = inspectable["quantize_nvfp4_both"]("sm_100a")
    assert "cvt.rn.satfinite.e2m1x2.f32" in kernel.asm["ptx"]
    assert "cvt.rn.satfinite.e2m1x2.f32" not in inspectable["quantize_nvfp4_both"]("sm_90a").asm["ptx"]


@pytest.mark.parametrize("name", [slow("quantize_mxfp8_both"), "quantize_nvfp4_both"])
def test_ampere_compiles(name):
    assert "cvt.rn.satfinite" not in inspectable[name]("sm_80").asm["ptx"]


def test_accesses_are_vectors():
    """16 bytes of a row at once; 32 rows of two neighbouring columns; 16 bytes of each line of values. Of NVFP4, 16
    rows of four columns, and the 8 bytes of a row that a thread has."""
    ptx = inspectable["quantize_mxfp8_both"]("sm_90a").asm["ptx"]
    loads = re.findall(r"ld\.global\.(v4\.b32|b32) ", ptx)
    assert loads.count("v4.b32") == 8 and loads.count("b32") == 32
    assert ptx.count("st.global.v4.b32") == 8
    ptx = inspectable["quantize_nvfp4_both"]("sm_90a").asm["ptx"]
    loads = re.findall(r"ld\.global\.(v4\.b32|v2\.b32|b32) ", ptx)
    assert loads.count("v4.b32") == 8 and loads.count("v2.b32") == 16
    assert ptx.count("st.global.v2.b32") == 4 and ptx.count("st.global.v4.b32") == 2


# ---------------------------------------------------------------- refusals

DTYPES = "torch.bfloat16 or torch.float16 or torch.float32"


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: quantize_mxfp8([1.0]), TypeError, "quantize_mxfp8: x is list; it must be a torch tensor"),
        (
            lambda: quantize_mxfp8(X.double()),
            TypeError,
            f"quantize_mxfp8: x has dtype torch.float64; it must be {DTYPES}",
        ),
        (
            lambda: quantize_nvfp4(X.int(), ONE),
            TypeError,
            f"quantize_nvfp4: x has dtype torch.int32; it must be {DTYPES}",
        ),
        (
            lambda: quantize_mxfp8(X[0]),
            ValueError,
            "quantize_mxfp8: x has shape (32,); it must have at least 2 dimensions",
        ),
        (
            lambda: quantize_mxfp8(X, dtype=torch.int8),
            ValueError,
            "quantize_mxfp8: dtype=torch.int8; it must be torch.float8_e4m3fn or torch.float8_e5m2",
        ),
        (lambda: quantize_mxfp8(X, axes="k"), ValueError, "axes='k'; it must be 'rows' or 'cols' or 'both'"),
        (lambda: quantize_mxfp8(X, scaling="ceil"), ValueError, "scaling='ceil'; it must be 'up' or 'floor'"),
        (lambda: quantize_nvfp4(X, layout="4x32"), ValueError, "layout='4x32'; it must be 'blocked' or 'plain'"),
        (lambda: nvfp4_tensor_scale(X, axes="all"), ValueError, "nvfp4_tensor_scale: axes='all'; it must be"),
        (
            lambda: quantize_nvfp4(X[:, :31], ONE),
            ValueError,
            "quantize_nvfp4: x has shape (4, 31); with axes='rows' K must be even, since two numbers share a byte",
        ),
        (lambda: quantize_nvfp4(X[:3], ONE, axes="both"), ValueError, "with axes='both' M must be even"),
        (lambda: quantize_nvfp4(X, 1.0), TypeError, "quantize_nvfp4: tensor_scale is float; it must be a torch tensor"),
        (
            lambda: quantize_nvfp4(X, ONE.half()),
            TypeError,
            "tensor_scale has dtype torch.float16; it must be torch.float32",
        ),
        (lambda: quantize_nvfp4(X, torch.ones(4)), ValueError, "tensor_scale has shape (4,); it must be one number"),
        (
            lambda: quantize_nvfp4(X, ONE, random_bits=torch.zeros(4, 4, dtype=torch.int32)),
            ValueError,
            "random_bits has shape (4, 4); it must be (4, 8), a word for four elements of x",
        ),
        (
            lambda: quantize_nvfp4(X, ONE, random_bits=torch.zeros(4, 8, dtype=torch.int64)),
            TypeError,
            "random_bits has dtype torch.int64; it must be torch.int32 or torch.uint32",
        ),
        (
            lambda: quantize_nvfp4(X, ONE, hadamard=torch.ones(8)),
            ValueError,
            "hadamard has shape (8,); it must be (16,)",
        ),
        (
            lambda: nvfp4_tensor_scale(X, hadamard=torch.ones(8)),
            ValueError,
            "nvfp4_tensor_scale: hadamard has shape (8,); it must be (16,)",
        ),
        (
            lambda: quantize_nvfp4(X, ONE.to("meta")),
            ValueError,
            "tensor_scale is on meta, x on cpu; all tensors must be on one device",
        ),
        (
            lambda: quantize_mxfp8(X.clone().requires_grad_()),
            ValueError,
            "quantize_mxfp8: x requires a gradient, which quantize_mxfp8 does not compute",
        ),
        (
            lambda: quantize_mxfp8(X[:1, :1].expand(65536, 1, 1)),
            ValueError,
            "quantize_mxfp8: x has shape (65536, 1, 1); there may be 65535 matrices, of 8388480 rows and columns",
        ),
    ],
)
def test_refusals(call, kind, message):
    with sim.device(), refused(message, kind):
        call()


def test_a_cpu_tensor_outside_of_the_simulator():
    with refused("quantize_mxfp8: x is on cpu; it must be on a CUDA device", ValueError):
        quantize_mxfp8(X)
