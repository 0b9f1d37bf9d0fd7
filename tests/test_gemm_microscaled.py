"""`gemm` of operands whose scales the tensor cores apply: MXFP8, MXFP4 and NVFP4."""

import itertools
from dataclasses import replace

import pytest
import torch
import triton

import tritonkittens.lang as tk
from tests.cases_block_scaled import E4M3, E5M2, E8M0, FORMATS, FP4, assert_product, operand, with_scales
from tests.util import explored, poison, refused, slow
from tritonkittens import sim, tune
from tritonkittens.inspect import inspect
from tritonkittens.kernels.gemm import Config, Epilogue, Problem, gemm, gemm_torch, tune_gemm
from tritonkittens.kernels.gemm.candidates import candidates, fits
from tritonkittens.kernels.gemm.choice import family
from tritonkittens.kernels.gemm.device.block_scaled import BlockScaledGemm
from tritonkittens.kernels.gemm.microscaling import plain_scales
from tritonkittens.kernels.quantize import dequantize_mxfp8, dequantize_nvfp4, quantize_mxfp8, quantize_nvfp4
from tritonkittens.lang import ArchitectureError, TileError

SMALL = Config(tile_m=128, tile_n=128, consumers=1, stages=2)
WIDE = Config(tile_m=128, tile_n=256, consumers=1, stages=2, epilogue_n=32)


def product(a, b, config=SMALL, arch="sm_100a", **options):
    """The product of two operands on a simulated chip, in fp32 unless it is said."""
    with sim.device(arch):
        return gemm(
            a.values,
            b.values.mT,
            scale_a=a.blocks,
            scale_b=b.blocks,
            config=config,
            **dict(out_dtype=torch.float32) | options,
        )


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "config"),
    [
        ("mxfp8", 128, 128, 128, SMALL),
        ("mxfp8", 300, 200, 416, SMALL),
        ("mxfp8", 100, 300, 96, WIDE),
        slow("mxfp8 e5m2", 130, 150, 288, None),
        slow("mxfp8", 257, 129, 80, None),  # whose last block of K is no whole one
        ("nvfp4", 300, 200, 416, SMALL),
        slow("nvfp4", 100, 300, 1056, WIDE),
        slow("mxfp4", 130, 150, 288, SMALL),
        slow("mxfp4", 1, 1, 32, None),
    ],
)
def test_products_of_ragged_extents(kind, m, n, k, config):
    a, b = operand(kind, m, k), operand(kind, n, k)
    assert_product(product(a, b, config), a, b)


def test_formats_of_8_bits_may_mix():
    a, b = operand("mxfp8", 100, 160), operand("mxfp8 e5m2", 70, 160)
    assert_product(product(a, b, out_dtype=None), a, b)


@pytest.mark.parametrize(("of_a", "of_b"), [((3,), ()), slow((), (2,)), ((2,), (2,)), slow((2, 1), (3,))])
def test_batches(of_a, of_b):
    a, b = operand("mxfp8", 70, 160, of_a), operand("mxfp8", 150, 160, of_b)
    assert_product(product(a, b), a, b)


def test_clusters_load_b_together():
    a, b = operand("nvfp4", 300, 416), operand("nvfp4", 300, 416)
    assert_product(product(a, b, replace(WIDE, tile_n=128, cluster=4)), a, b)


PAIR = replace(SMALL, cluster=2)


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "config"),
    [
        ("mxfp8", 300, 200, 416, PAIR),
        ("nvfp4", 100, 300, 416, replace(WIDE, cluster=2)),  # without rows for the odd CTA
        slow("mxfp8", 257, 129, 80, replace(WIDE, cluster=2)),
        slow("mxfp8", 257, 300, 160, replace(WIDE, cluster=2, epilogue_n=128)),
        slow("mxfp8 e5m2", 520, 150, 1056, replace(PAIR, stages=None)),
        slow("mxfp4", 130, 270, 288, replace(WIDE, cluster=2, stages=None)),
        slow("nvfp4", 600, 40, 32, PAIR),
        slow("nvfp4", 300, 300, 1056, replace(PAIR, schedule="split_tail")),
        slow("mxfp8", 300, 300, 288, replace(PAIR, schedule="launch_control")),
    ],
)
def test_pairs_of_ctas(kind, m, n, k, config):
    a, b = operand(kind, m, k), operand(kind, n, k)
    out = poison(torch.empty(m, n))
    assert product(a, b, config, out=out) is out
    assert_product(out, a, b)


def test_pairs_have_batches_no_iterations_and_epilogues():
    a, b, bias = operand("mxfp8", 140, 160, (2,)), operand("mxfp8", 130, 160), torch.randn(130)
    got = product(a, b, PAIR, bias=bias, residual=bias.expand(2, 140, 130).contiguous())
    assert_product(got - 2 * bias, a, b)
    empty = [x._replace(blocks=torch.empty(2, 0, 32, 16, dtype=E8M0)) for x in (operand("mxfp8", 140, 0), b)]
    none = empty[1]._replace(values=b.values[:, :0])
    assert torch.equal(product(empty[0], none, PAIR, bias=bias), bias.expand(140, 130))


@pytest.mark.parametrize(
    "schedule", ["split_k", slow("cluster_split_k"), slow("split_tail"), slow("stream_k"), slow("one_per_block")]
)
def test_tasks_whose_iterations_several_ctas_share(schedule):
    a, b = operand("mxfp8", 200, 1056), operand("mxfp8", 150, 1056)
    config = Config(tile_m=128, tile_n=128, consumers=1, schedule=schedule, splits=2 if "split_k" in schedule else 1)
    assert_product(product(a, b, config), a, b)


def test_flat_scales_transposed_operands_and_a_given_result():
    a, b = operand("mxfp8", 130, 160), operand("nvfp4", 150, 64)
    c, d = operand("mxfp8", 150, 160), operand("nvfp4", 140, 64)
    for x, y in ((a, c), (b, d)):
        flat = [z._replace(blocks=z.blocks.flatten()) for z in (x, y)]
        out = poison(torch.empty(x.values.shape[0], y.values.shape[0]))
        # K is not contiguous: the operands are copied
        apart = [z._replace(values=z.values.view(torch.uint8).T.contiguous().T.view(z.values.dtype)) for z in flat]
        assert product(*apart, out=out) is out
        assert_product(out, x, y)


@pytest.mark.parametrize("residual", [False, slow(True)])
def test_the_epilogue_is_that_of_other_products(residual):
    a, b = operand("mxfp8", 140, 160, low=118, high=124), operand("mxfp8", 130, 160, low=118, high=124)
    given = dict(bias=torch.randn(130), activation="silu", gate=torch.randn(130))
    given |= dict(residual=torch.randn(140, 130).bfloat16()) if residual else {}
    got = product(a, b, out_dtype=torch.bfloat16, **given)
    wanted = gemm_torch(a.values, b.values.T, scale_a=a.blocks, scale_b=b.blocks, **given)
    assert ((got.double() - wanted).abs() <= 2.0**-7 * (wanted.abs() + 1) + 2.0**-10 * a.exact.abs().amax()).all()


@triton.jit
def tensor_scaled(acc, scale, bias):
    return acc * scale + bias


def test_tensor_scales_of_nvfp4_are_an_epilogue():
    a, b, scale, bias = operand("nvfp4", 130, 128), operand("nvfp4", 70, 128), torch.tensor([0.25]), torch.randn(70)
    got = product(a, b, epilogue=Epilogue(tensor_scaled, scale=scale, bias=bias))
    torch.testing.assert_close(got.double(), a.exact @ b.exact.T * 0.25 + bias, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", ["mxfp8", slow("mxfp4"), "nvfp4"])
def test_the_reference_reads_scales_and_fp4_as_the_instruction(kind):
    a, b = operand(kind, 140, 160, (2,)), operand(kind, 130, 160)
    wanted = gemm_torch(a.values, b.values.mT, scale_a=a.blocks, scale_b=b.blocks)
    assert torch.equal(wanted, a.exact @ b.exact.mT)
    spread = a.scales.double().repeat_interleave(FORMATS[kind][2], -1)[..., :160]
    assert torch.equal(plain_scales(a.blocks, a.values), spread)


def test_scales_at_the_ends_of_their_range_and_nan():
    """2**-127 is below the normal numbers of fp32; products beyond its range are infinite; NaN stays in its row."""
    a, b = operand("mxfp8", 140, 160), operand("mxfp8", 130, 160)
    scales_a, scales_b = (torch.full((x.values.shape[0], 5), 127, dtype=torch.uint8) for x in (a, b))
    scales_a[0], scales_a[1], scales_a[2, 3], scales_a[3] = 0, 254, 255, 250
    scales_b[0], scales_b[1, 0], scales_b[2] = 0, 255, 200
    # positive numbers where sums are infinite
    a.values.view(torch.uint8)[1], a.values.view(torch.uint8)[3], b.values.view(torch.uint8)[2] = 0x01, 0x38, 0x38
    a, b = with_scales("mxfp8", a.values, scales_a.view(E8M0)), with_scales("mxfp8", b.values, scales_b.view(E8M0))
    got = product(a, b)
    assert got[2].isnan().all() and got[:, 1].isnan().all()
    assert got[3, 2].isinf() and not got[4:, 3:].isnan().any() and got[0, 3:].abs().max() < 2.0**-90
    assert_product(got, a, b)


@pytest.mark.parametrize("bits", [0x7F, 0x38])
def test_nan_in_the_scales_of_nvfp4(bits):
    a, b = operand("nvfp4", 130, 128), operand("nvfp4", 70, 128)
    scales = a.scales.view(torch.uint8).clone()
    scales[5, 7] = bits
    a = with_scales("nvfp4", a.values, scales.view(E4M3))
    got = product(a, b)
    assert got[5].isnan().all() == (bits == 0x7F) and not got[[4, 6]].isnan().any()
    assert_product(got, a, b)


def test_no_iterations():
    a, b, c = operand("mxfp8", 140, 0), operand("mxfp8", 130, 0), torch.randn(130)
    empty = [x._replace(blocks=torch.empty(2, 0, 32, 16, dtype=E8M0)) for x in (a, b)]
    assert torch.equal(product(*empty, bias=c), c.expand(140, 130))


@pytest.mark.parametrize("config", [SMALL, slow(WIDE), PAIR], ids=["small", "wide", "pair"])
@explored(2, 50)
def test_many_interleavings_are_clean_and_agree(config, schedules):
    a, b = operand("nvfp4", 200, 352), operand("nvfp4", 300, 352)
    out = poison(torch.empty(200, 300))
    given = dict(scale_a=a.blocks, scale_b=b.blocks, out=out, out_dtype=out.dtype, config=config)
    found = sim.explore(lambda: gemm(a.values, b.values.T, **given), schedules=schedules, arch="sm_100a")
    assert not found.findings, found
    assert_product(out, a, b)


def test_what_the_quantisers_give_is_what_gemm_takes():
    x, w = torch.randn(2, 140, 200).bfloat16(), torch.randn(130, 200).bfloat16()
    with sim.device("sm_100a"):
        a, b = quantize_mxfp8(x, dtype=E5M2), quantize_mxfp8(w)
        got = gemm(a.values, b.values.T, scale_a=a.scales, scale_b=b.scales, out_dtype=torch.float32, config=SMALL)
        wanted = gemm_torch(a.values, b.values.T, scale_a=a.scales, scale_b=b.scales)
        c, d = quantize_nvfp4(x), quantize_nvfp4(w)
        scale = c.tensor_scale * d.tensor_scale
        near = gemm(c.values, d.values.T, scale_a=c.scales, scale_b=d.scales, gate=scale, config=SMALL)
    exact = dequantize_mxfp8(*a, dtype=torch.float64) @ dequantize_mxfp8(*b, dtype=torch.float64).T
    assert torch.equal(wanted, exact) and (got.double() - exact).norm() < 1e-3 * exact.norm()
    exact = dequantize_nvfp4(*c, dtype=torch.float64) @ dequantize_nvfp4(*d, dtype=torch.float64).T
    assert (near.double() - exact).norm() < 4e-3 * exact.norm()


# ---------------------------------------------------------------- as torch sees it


def test_torch_sees_one_operator():
    a, b = operand("mxfp8", 130, 160), operand("mxfp8", 70, 160)
    with sim.device("sm_100a"), torch.no_grad():
        given = (a.values, b.values.T, None, None, None, None, a.blocks, b.blocks, None, None)
        torch.library.opcheck(torch.ops.tritonkittens.gemm.default, given, test_utils="test_faketensor")
        got = torch.ops.tritonkittens.gemm(*given)
    assert got.dtype == torch.bfloat16
    assert_product(got, a, b)


def test_gradients_of_the_epilogue_only():
    a, b, bias = operand("mxfp8", 130, 160), operand("mxfp8", 70, 160), torch.randn(70, requires_grad=True)
    got = product(a, b, bias=bias)
    got.sum().backward()
    assert torch.equal(bias.grad, torch.full((70,), 130.0))


# ---------------------------------------------------------------- the choice, and machine code


@pytest.mark.parametrize("kind", FORMATS)
def test_every_size_has_candidates_that_fit(kind):
    dtype, scales, _ = FORMATS[kind]
    name = {E4M3: "fp8e4nv", E5M2: "fp8e5", FP4: "uint8"}[dtype]
    device = tune.Device.named("B200")
    for m, n, k in itertools.product((1, 128, 5000), (8, 4096), (64, 8192)):
        problem = Problem(name, "bf16", "mk", "nk", "", str(scales).removeprefix("torch."), 1, m, n, k)
        found = candidates(problem, device)
        assert found and all(fits(problem, c) and c.tile_m == 128 and c.tile_n in (128, 256) for c in found)
        assert any(c.cluster == 2 for c in found) == (m > 128)
        assert family.choose(problem, None, device) in found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("out", "epilogue_n"), [("bf16", 128), ("fp32", 32)])
def test_large_products_are_of_pairs(kind, out, epilogue_n):
    """Sums of 256 columns are read in halves where these leave three stages."""
    dtype, scales, _ = FORMATS[kind]
    name = {E4M3: "fp8e4nv", E5M2: "fp8e5", FP4: "uint8"}[dtype]
    problem = Problem(name, out, "mk", "nk", "", str(scales).removeprefix("torch."), 1, 8192, 8192, 8192)
    chosen = family.choose(problem, None, tune.Device.named("B200"))
    assert (chosen.cluster, chosen.tile_n, chosen.epilogue_n) == (2, 256, epilogue_n)


@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
@pytest.mark.parametrize(
    ("kind", "knobs", "copies"),
    [
        ("mxfp8", dict(tile_n=128), 2),
        ("nvfp4", dict(tile_n=256, epilogue_n=64), 12),
        slow("mxfp4", dict(), 4),
        ("nvfp4", dict(tile_n=256, epilogue_n=128, cluster=2), 12),
        slow("mxfp8", dict(tile_n=128, cluster=2), 2),
        slow("mxfp4", dict(tile_n=256, epilogue_n=64, cluster=2), 6),
    ],
)
def test_the_machine_code(kind, knobs, copies, arch):
    dtype, of_scales, numbers_of_scale = FORMATS[kind]
    template = BlockScaledGemm(dtype=tk.from_torch(dtype), scale_dtype=tk.from_torch(of_scales), **knobs)
    k = 4096 if dtype != FP4 else 2048
    blocks = 4096 // (4 * numbers_of_scale)
    empty = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    scales = empty(32, blocks, 2, 256, dtype=of_scales)
    operands = empty(4096, k, dtype=dtype), empty(4096, k, dtype=dtype)
    compiled = template.compile(*operands, empty(4096, 4096, dtype=torch.bfloat16), scales, scales, arch=arch)
    report, ptx = inspect(compiled), compiled.asm["ptx"]
    (loop,) = report.loops
    assert loop.mma == {"UTCQMMA" if dtype == E4M3 else "UTCOMMA": 4} and loop.counts["UTCCP"] == copies
    assert set(loop.counts) <= {"SYNCS", "UTCBAR", "UTCCP"} and loop.counts["SYNCS"] == 2
    assert report.spill_instructions == 0 and "HMMA" not in report.mma
    # every tcgen05 instruction and load is of a pair, or none
    loads = [line for line in ptx.splitlines() if "cp.async.bulk.tensor" in line and "mbarrier" in line]
    other = f"cta_group::{1 if template.cluster == 2 else 2}"
    assert other not in ptx and all(("cta_group::2" in line) == (template.cluster == 2) for line in loads)


# ---------------------------------------------------------------- wrong use

A, B = operand("mxfp8", 140, 160), operand("mxfp8", 130, 160)
F, G = operand("nvfp4", 140, 160), operand("nvfp4", 130, 160)
MISTAKES = [
    (dict(scale_b=None), TypeError, "scale_a is torch.float8_e8m0fnu, scale_b is None; scales of blocks along K come"),
    (dict(scale_b=torch.ones(1)), TypeError, "scale_b is torch.float32; scales of blocks along K come together"),
    (dict(scale_a=F.blocks, scale_b=G.blocks), TypeError, "a has dtype torch.float8_e4m3fn, scale_a torch.float8_"),
    (dict(a=F.values, b=G.values.T, scale_a=None, scale_b=None), TypeError, "a has dtype torch.float4_e2m1fn_x2; its"),
    (dict(a=A.values.bfloat16(), b=B.values.bfloat16().T), TypeError, "scales of torch.float8_e4m3fn are for"),
    (
        dict(scale_a=A.blocks[:1]),
        ValueError,
        "gemm: scale_a is (1, 2, 32, 16) with strides (1024, 512, 16, 1); it must be contiguous, in blocks of 128×4 "
        "scales: (2, 2, 32, 16) for (140, 160) with K last, or flat, (2048,)",
    ),
    (dict(scale_b=B.blocks.mT), ValueError, "gemm: scale_b is (2, 2, 16, 32)"),
    (dict(scale_a=A.scales), ValueError, "gemm: scale_a is (140, 5)"),
    (dict(a=F.values, scale_a=F.blocks), TypeError, "a has dtype torch.float4_e2m1fn_x2, b torch.float8_e4m3fn"),
    (dict(config=Config()), TileError, "block scales need tile_m=128, tile_n that is a multiple of 128, one consumer"),
    (dict(config=Config(tile_m=128, tile_n=128, swap_ab=True)), ValueError, "swap_ab=False and pingpong=False"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), MISTAKES)
def test_operands_and_scales_that_do_not_fit_are_refused(given, kind, message):
    whole = dict(a=A.values, b=B.values.T, scale_a=A.blocks, scale_b=B.blocks)
    with sim.device("sm_100a"), refused(message, kind):
        gemm(**whole | given)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("call", [gemm, tune_gemm])
def test_chips_without_block_scaling_are_named(call, arch):
    with sim.device(arch), refused("scales of torch.float8_e8m0fnu or torch.float8_e4m3fn", ArchitectureError):
        call(A.values, B.values.T, scale_a=A.blocks, scale_b=B.blocks)


def test_operands_have_no_gradient():
    a = A.values.detach().requires_grad_()
    with sim.device("sm_100a"), refused("has no gradient: the operands of an 8-bit product", TypeError):
        gemm(a, B.values.T, scale_a=A.blocks, scale_b=B.blocks)
