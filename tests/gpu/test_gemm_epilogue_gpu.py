"""Epilogues of `gemm` that users write: every kind of operand with every kind of kernel, against float64 element by
element; on the GPU, or simulated."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.cases_epilogue import near, operands_of, reference, scaled, sums_of
from tests.cases_gemm import BF16, E4M3, FP16, FP32, FP32_SUMS, HALF_ULP, KINDS, SMALL, matrix, randn, scales, short
from tests.util import DEVICE, on_gpu_or_simulated, poison, some_slow
from tritonkittens.kernels.gemm import Config, Epilogue, gemm

pytestmark = pytest.mark.usefixtures("kernel_device")

CHOSEN = on_gpu_or_simulated(None, SMALL)
QUICK = ["small", "deferred", "sub-tiles", "wide", "swap_ab", "split_k", "cluster_split_k", "stream_k", "cluster"]


@triton.jit
def squared_relu(acc):
    x = tl.maximum(acc, 0.0)
    return x * x


@triton.jit
def divided(acc, by: tl.constexpr, both, exponent=0.5):
    """A constant in the middle, a default, and an operand that is read twice."""
    return acc / by * both + tk.exp2(exponent) * both


def extents(rng):
    """Of several tiles, none of them whole."""
    return (int(x) for x in rng.integers((65, 65, 70), (200, 140, 200)))


@pytest.mark.parametrize("kind", some_slow(KINDS, QUICK))
def test_operands_of_every_kind(rng, kind):
    m, n, k = extents(rng)
    a, b, given = matrix(m, k), matrix(k, n, transposed=kind == "wide"), operands_of(m, n)
    out = gemm(
        a,
        b,
        epilogue=Epilogue(scaled, **given),
        out=poison(torch.empty(m, n, device=DEVICE, dtype=BF16)),
        config=KINDS[kind],
    )
    assert near(out, *reference(*sums_of(a, b), **given))


@pytest.mark.parametrize("kind", some_slow(KINDS, ["deferred", "deferred, split_tail", "pingpong"]))
def test_functions_of_the_sums_alone(rng, kind):
    """They may be applied to sums that were rounded, as an activation may: where results are deferred."""
    m, n, k = extents(rng)
    a, b = matrix(m, k), matrix(k, n)
    out = gemm(a, b, epilogue=Epilogue(squared_relu), config=KINDS[kind])
    sums, off = sums_of(a, b)
    off = off + (HALF_ULP[BF16] * sums.abs() if KINDS[kind].deferred_epilogue else 0)
    assert near(out, sums.relu() ** 2, 2 * sums.abs() * off + off**2)


@pytest.mark.parametrize("kind", some_slow(KINDS, ["small", "deferred"]))
def test_gemms_own_operands_stand_around_it(rng, kind):
    m, n, k = extents(rng)
    a, b, given = matrix(m, k), matrix(k, n), dict(bias=randn(n), gate=randn(n), residual=randn(m, n))
    out = gemm(a, b, epilogue=Epilogue(divided, by=4, both=given["gate"]), config=KINDS[kind], **given)
    sums, off = sums_of(a, b)
    bias, gate, residual = (x.double().cpu() for x in given.values())
    y = ((sums + bias) / 4 * gate + 2**0.5 * gate) * gate
    off = (
        (off + FP32_SUMS * bias.abs()) * gate**2
        + FP32_SUMS * (y.abs() + residual.abs())
        + (HALF_ULP[BF16] * y.abs() * 2 if KINDS[kind].deferred_epilogue else 0)
    )
    assert near(out, residual + y, off)


@pytest.mark.parametrize("out_dtype", [E4M3, FP32])
@pytest.mark.parametrize("block", [False, True])
def test_scaled_operands_of_eight_bits(rng, out_dtype, block):
    m, n, k = 136, 144, 272
    a, b = matrix(m, k, E4M3), matrix(k, n, E4M3, transposed=True)
    scaling = (
        dict(scale_a=scales(m, 3), scale_b=scales(3, 2)) if block else dict(scale_a=scales(m, 1), scale_b=scales(1, n))
    )
    given = operands_of(m, n, FP32, out_dtype)
    config = (
        short(Config(consumers=1, tile_n=128, tile_k=128))
        if block
        else short(Config(tile_n=128, consumers=1, epilogue_n=64, deferred_epilogue=True))
    )
    out = gemm(a, b, epilogue=Epilogue(scaled, **given), out_dtype=out_dtype, config=config, **scaling)
    assert out.dtype == out_dtype and near(out, *reference(*sums_of(a, b, **scaling), **given))


def test_a_tile_of_another_type_and_two_tiles(rng):
    """One of the result's type comes with the results' staging memory; others are loaded where they are used."""
    a, b = matrix(70, 72), matrix(72, 88)
    for dtypes in ((FP32, FP16), (BF16, BF16)):
        given = dict(
            scale=randn(70, 88, dtype=dtypes[0]),
            shift=randn(1, dtype=FP32),
            added=randn(70, 88, dtype=dtypes[1]),
            alpha=-0.5,
        )
        out = gemm(a, b, epilogue=Epilogue(scaled, **given), config=CHOSEN)
        assert near(out, *reference(*sums_of(a, b), **given))


def test_batches(rng):
    a, given = randn(3, 70, 72), operands_of(70, 88, batch=(3,))
    for b in (randn(3, 72, 88), randn(72, 88)):
        out = gemm(a, b, epilogue=Epilogue(scaled, **given), config=CHOSEN)
        assert near(out, *reference(*sums_of(a, b), **given))
    out = gemm(a, b, epilogue=Epilogue(divided, by=1, both=given["shift"], exponent=0), config=CHOSEN)
    sums, off = sums_of(a, b)
    shift = given["shift"].double().cpu()
    assert near(out, (sums + 1) * shift, off * shift.abs())


@pytest.mark.parametrize("m, n", [(1, 83), (21, 83), (83, 21)])
def test_operands_that_no_copy_engine_takes(rng, m, n):
    """They are read by ordinary loads, where the same function is compiled into another kernel."""
    a, b, given = randn(m, 131), randn(131, n), operands_of(m, n)
    out = gemm(a, b, epilogue=Epilogue(scaled, **given), out=poison(torch.empty(m, n, device=DEVICE, dtype=BF16)))
    assert near(out, *reference(*sums_of(a, b), **given))


def test_sums_of_nothing(rng):
    given = operands_of(9, 24)
    sums = torch.zeros(9, 24, dtype=torch.float64)
    for dtype in (BF16, E4M3):
        a, b = torch.empty(9, 0, device=DEVICE, dtype=dtype), torch.empty(0, 24, device=DEVICE, dtype=dtype)
        assert near(gemm(a, b, epilogue=Epilogue(scaled, **given)), *reference(sums, sums, **given))
    assert gemm(randn(0, 8), randn(8, 24), epilogue=Epilogue(squared_relu)).shape == (0, 24)


def test_numbers_and_tensors_of_later_calls(rng):
    """A call like an earlier one launches with its own tensors; a number is its own, too."""
    a, b, out = matrix(70, 72), matrix(72, 88), torch.empty(70, 88, device=DEVICE, dtype=BF16)
    for alpha in (2.0, -3, 2.0):
        given = operands_of(70, 88) | dict(alpha=alpha)
        gemm(a, b, epilogue=Epilogue(scaled, **given), out=poison(out), config=CHOSEN)
        assert near(out, *reference(*sums_of(a, b), **given))


def test_a_result_in_the_memory_of_an_operand(rng):
    a, b, given = matrix(70, 72), matrix(72, 88), operands_of(70, 88)
    expected = reference(*sums_of(a, b), **given)
    assert near(gemm(a, b, epilogue=Epilogue(scaled, **given), out=given["added"], config=CHOSEN), *expected)


def functions():
    """Two of one name."""

    @triton.jit
    def changed(acc, x):
        return acc + x

    first = changed

    @triton.jit
    def changed(acc, x):
        return acc - x

    return first, changed


def multiplied(number):
    """A function that has the number from around it."""
    factor = tl.constexpr(number)

    @triton.jit
    def by_factor(acc):
        return acc * factor

    return by_factor


def test_what_a_function_has_from_around_it_is_part_of_its_code(rng):
    a, b = matrix(70, 72), matrix(72, 88)
    sums, off = sums_of(a, b)
    for number in (2.0, 3.0):
        out = gemm(a, b, epilogue=Epilogue(multiplied(number)), config=CHOSEN, out_dtype=FP32)
        assert near(out, sums * number, off * number)


def test_a_function_that_changes_is_compiled_again(rng):
    a, b, x = matrix(70, 72), matrix(72, 88), randn(88)
    plus, minus = (
        gemm(a, b, epilogue=Epilogue(function, x=x), config=CHOSEN, out_dtype=FP32) for function in functions()
    )
    sums, off = sums_of(a, b)
    assert near(plus, sums + x.double().cpu(), off + FP32_SUMS * x.double().cpu().abs()) and not near(
        minus, sums + x.double().cpu(), off
    )
    assert near(minus, sums - x.double().cpu(), off + FP32_SUMS * x.double().cpu().abs())
