"""`gemm` for every kind of operand, result, epilogue and configuration, against float64 element by element; on the GPU,
or simulated."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from tests.cases_gemm import (
    BF16,
    E4M3,
    E5M2,
    FP8,
    FP16,
    FP32,
    KINDS,
    SMALL,
    check,
    matrix,
    problem,
    randn,
    scales,
    short,
)
from tests.util import DEVICE, crossed, on_gpu_or_simulated, poison, relative_error, slow, some_slow
from tritonkittens import tune
from tritonkittens.kernels.gemm import Config, family, gemm, gemm_torch
from tritonkittens.kernels.gemm.candidates import candidates

pytestmark = pytest.mark.usefixtures("kernel_device")

EDGES = (1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129)
MARGIN = 16
# the simulator's time goes into compiling: what is not about configurations shares one there
CHOSEN = on_gpu_or_simulated(None, SMALL)


def multiply(a, b, config=CHOSEN, out_dtype=None, **operands):
    """`gemm`, checked."""
    config = short(config)
    out = gemm(a, b, config=config, out_dtype=out_dtype, **operands)
    check(out, a, b, f"{config}", config is None or config.deferred_epilogue, **operands)
    return out


def empty(*shape, dtype=BF16):
    return poison(torch.empty(*shape, device=DEVICE, dtype=dtype))


# ---------------------------------------------------------------- operands


@pytest.mark.parametrize(
    "transposed, dtype", crossed([(False, False), (False, True), (True, False), (True, True)], [BF16, FP16]), ids=str
)
def test_layouts(rng, transposed, dtype):
    a, b = matrix(136, 136, dtype, transposed[0]), matrix(136, 152, dtype, transposed[1])
    for config in on_gpu_or_simulated([None, *KINDS.values()], [SMALL if dtype == FP16 else None]):
        multiply(a, b, config)


WIDE = [
    slow(Config(consumers=1, tile_n=176)),
    slow(Config(tile_n=112)),
    slow(Config(tile_n=96, cluster=2)),
    slow(Config(tile_n=224, cluster=2)),
    slow(Config(consumers=1, tile_n=192, cluster=4)),
    Config(tile_n=144, schedule="split_k", splits=2),
    Config(consumers=1, tile_n=160, pingpong=True),
    slow(Config(consumers=3, tile_n=176, cluster=2, epilogue_n=16)),
]


@pytest.mark.parametrize("config", WIDE, ids=lambda c: f"{c.tile_n} {c.consumers} {c.cluster} {c.schedule}")
@pytest.mark.parametrize("dtype", on_gpu_or_simulated([BF16, FP16, E4M3], [BF16]), ids=str)
def test_columns_that_are_no_power_of_two(rng, config, dtype):
    """One instruction takes them where what is its B has its depth contiguous; with `swap_ab` that is A."""
    a, b = matrix(136, 200, dtype), matrix(200, 400, dtype, True)
    a, b = (a, b) if dtype != E4M3 else (matrix(136, 208, dtype), matrix(208, 400, dtype, True))
    multiply(a, b, config, out_dtype=BF16, bias=randn(400))
    if config.schedule == "persistent" and not config.pingpong:
        multiply(b.mT, a.mT, replace(config, swap_ab=True), out_dtype=BF16)


SHARED = [
    Config(consumers=1, tile_n=128, cluster=4),
    slow(Config(consumers=1, tile_n=64, cluster=2)),
    slow(Config(consumers=1, tile_n=144, cluster=4)),
    Config(consumers=1, tile_n=144, cluster=8),
    slow(Config(consumers=1, tile_n=32, cluster=8)),
    Config(tile_n=160, cluster=2),
    slow(Config(consumers=3, tile_n=192, cluster=2, epilogue_n=32)),
]


@pytest.mark.parametrize("config", SHARED, ids=lambda c: f"{c.tile_n} {c.consumers} {c.cluster}")
def test_tiles_that_clusters_load_in_rows_of_lines(rng, config):
    """Where what becomes B has its columns contiguous: each of its swizzle lines, and of its pieces of no power of two,
    is shared by the blocks."""
    a, b = matrix(200, 136, BF16, True), matrix(136, 400)
    for swap_ab in (False, True):
        multiply(a, b, replace(config, swap_ab=swap_ab))


SUBTILES = [
    Config(epilogue_n=64),
    Config(tile_m=128, tile_n=128, pingpong=True, epilogue_n=32, cluster=2),
    Config(tile_n=192, epilogue_n=64),
    Config(tile_n=224, epilogue_n=32),
    Config(consumers=1, tile_n=64, swap_ab=True, epilogue_n=16),
    Config(tile_n=128, epilogue_n=64, schedule="stream_k"),
    Config(consumers=3, tile_n=192, epilogue_n=32),
    Config(tile_n=64, pingpong=True, swap_ab=True, epilogue_n=16),
    Config(epilogue_n=64, deferred_epilogue=True),
    Config(epilogue_n=64, deferred_epilogue=True, cluster=2, schedule="split_tail"),
    Config(tile_n=192, epilogue_n=64, deferred_epilogue=True, swap_ab=True),
]


OF_EACH = on_gpu_or_simulated(
    list(itertools.product(SUBTILES, [BF16, FP32, E4M3])), list(zip(SUBTILES, itertools.cycle([BF16, FP32])))
)
# One of clusters, of C transposed, and of parts of tasks.
OF_EACH = [case if case[0] in (SUBTILES[1], SUBTILES[4], SUBTILES[5]) else slow(*case) for case in OF_EACH]


@pytest.mark.parametrize(
    "config, dtype",
    OF_EACH,
    ids=lambda x: f"{x.tile_m}x{x.tile_n} {x.epilogue_n} {x.schedule}" if isinstance(x, Config) else str(x),
)
def test_results_in_sub_tiles(rng, config, dtype):
    """Two buffers take turns, so that later sub-tiles wait until the first is stored. Some lie past the last column."""
    a, b = matrix(200, 136), matrix(136, 400, transposed=True)
    multiply(a, b, config, out_dtype=dtype, bias=randn(400), gate=randn(200, 400, dtype=FP32), activation="silu")
    multiply(a, b, config, out_dtype=dtype, residual=randn(200, 400, dtype=dtype))


DEFERRED = [
    Config(epilogue_n=64, deferred_epilogue=True),
    Config(epilogue_n=64, cluster=2, deferred_epilogue=True),
    Config(epilogue_n=64, cluster=4, deferred_epilogue=True),
    Config(tile_n=64, epilogue_n=16, deferred_epilogue=True, swap_ab=True),
    Config(epilogue_n=64, schedule="split_tail", deferred_epilogue=True),
    Config(tile_n=192, epilogue_n=32, consumers=1, deferred_epilogue=True),
]


DONE = [
    ("gelu", None, False),
    ("gelu_tanh", None, False),
    ("silu", None, False),
    (None, "col", True),
    ("silu", "row", True),
]


def waiting(case):
    return (
        f"{case.tile_m}x{case.tile_n} {case.consumers} {case.cluster} {case.schedule}"
        if isinstance(case, Config)
        else str(case)
    )


@pytest.mark.parametrize("config, done", crossed(DEFERRED, DONE), ids=waiting)
@pytest.mark.parametrize("dtype", on_gpu_or_simulated([BF16, FP16], [BF16]), ids=str)
@pytest.mark.parametrize("k", on_gpu_or_simulated([72, 1000, 2500], [72]))
def test_what_is_done_with_results_that_waited(rng, config, done, dtype, k):
    """Activations and residuals under the products of the next task, which are fewer than that takes, about as many, or
    more. Some rows are compared: all take float64 minutes."""
    m, n = on_gpu_or_simulated((3500, 3000), (200, 400))
    activation, gate, residual = done
    a, b, bias = matrix(m, k, dtype), matrix(k, n, dtype), randn(n, dtype=dtype)
    gates = {"col": randn(n, dtype=dtype), "row": randn(m, 1, dtype=dtype), None: None}
    operands = dict(activation=activation, gate=gates[gate], residual=randn(m, n, dtype=dtype) if residual else None)
    some = torch.randperm(m, device=DEVICE)[:128].sort().values
    out = gemm(a, b, bias=bias, out=empty(m, n, dtype=dtype), config=short(config), **operands)
    assert out.isfinite().all()  # poison is NaN
    taken = {key: x[some] if isinstance(x, torch.Tensor) and x.shape[0] == m else x for key, x in operands.items()}
    check(out[some], a[some], b, f"{config}", deferred_epilogue=True, bias=bias, **taken)


@pytest.mark.parametrize("start", [16, 3])  # elements: 3 are no multiple of 16 bytes, so that operands are copied
def test_slices_of_wider_matrices(rng, start):
    for m, n, k in [(70, 88, 72), (1, 8, 72), (70, 1, 9)]:
        a, b = randn(m + 5, k + 40)[2 : 2 + m, start : start + k], randn(k + 3, n + 40)[1 : 1 + k, start : start + n]
        multiply(a, b)
        multiply(b.T, a.T)


def test_strides_that_no_copy_engine_takes(rng):
    a, b = randn(70, 145)[:, ::2], randn(2, 73, 88)[0].flip(0)
    multiply(a, b)
    multiply(randn(1, 72).expand(70, 72), randn(72, 88))
    multiply(randn(70, 72), randn(72, 1).expand(72, 88))


def test_a_call_like_an_earlier_one_with_other_operands_misaligned(rng):
    """What is copied is decided for each operand, not for all of them together."""
    a, b, c = (randn(64 * 64 + 1) for _ in range(3))
    aligned, misaligned = [x[:-1].view(64, 64) for x in (a, b)], [x[1:].view(64, 64) for x in (a, b)]
    for out in (None, c[:-1].view(64, 64), c[1:].view(64, 64)):
        for first, second in itertools.product((0, 1), repeat=2):
            x, y = (aligned, misaligned)[first][0], (aligned, misaligned)[second][1]
            check(gemm(x, y, out=out, config=SMALL), x, y, f"{first} {second}")


def test_a_call_like_an_earlier_one_with_other_epilogues(rng):
    """Each argument's place is decided anew, whatever else is given and whether `out` is."""
    a, b, out = randn(64, 72), randn(72, 64), empty(64, 64)
    for gate in (randn(64), randn(64, 1), randn(64, 64), randn()):
        for given in (None, out):
            check(gemm(a, b, gate=gate, out=given, config=CHOSEN), a, b, gate=gate)
    with pytest.raises(ValueError, match="residual is"):
        for residual in (randn(64, 64), randn(64, 65)):
            gemm(a, b, residual=residual, out=out, config=CHOSEN)
    a, b = randn(64, 32, dtype=E4M3), matrix(32, 64, E4M3, True)
    for scale in (scales(64), scales(), scales(1, 64)):
        check(gemm(a, b, scale_b=scale, out=out, config=CHOSEN), a, b, scale_b=scale)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_nothing_is_written_around_a_result(rng, dtype):
    for m, n, k in [(70, 88, 72), (3, 13, 16), (65, 8, 8)]:
        a, b = randn(m, k), randn(k, n)
        width = n + 2 * MARGIN + 8 - n % 8
        around = empty(m + 2 * MARGIN, width, dtype=dtype)
        tall = empty(n + 2 * MARGIN, m + 2 * MARGIN + 8 - m % 8, dtype=dtype)
        views = {
            "contiguous": (flat := empty(m * n, dtype=dtype), flat.view(m, n)),
            "padded": (around, around[MARGIN : MARGIN + m, MARGIN : MARGIN + n]),
            "unaligned": (around, around[MARGIN : MARGIN + m, 3 : 3 + n]),
            "transposed": (tall, tall[MARGIN : MARGIN + n, MARGIN : MARGIN + m].T),
            "every second": (wide := empty(m, 2 * n, dtype=dtype), wide[:, ::2]),
        }
        for name, (whole, out) in views.items():
            assert gemm(a, b, out=out, out_dtype=dtype, config=CHOSEN) is out
            check(out, a, b, name)
            poison(out)
            assert torch.isnan(whole).all(), f"{name} {m}×{n}: the margin was written to"


def test_results_among_other_batches(rng):
    """Leading dimensions that cannot be taken as one: the result arrives, and nothing around it changes."""
    for b in (randn(2, 3, 24, 40), randn(24, 40)):
        a = randn(2, 3, 16, 24)
        for which in (lambda x: x[:, :3], lambda x: x[:, 1:], lambda x: x[:, :3, 8:24]):
            whole = empty(2, 4, 16, 40) if which(torch.empty(2, 4, 32, 1)).shape[2] == 32 else empty(2, 4, 32, 40)
            out = which(whole)
            gemm(a, b, out=out, config=CHOSEN)
            check(out, a, b)
            poison(out)
            assert torch.isnan(whole).all()
        transposed = empty(3, 2, 16, 40).transpose(0, 1)
        check(gemm(a, b, out=transposed, config=CHOSEN), a, b)


def test_a_residual_is_accumulated_in_place(rng):
    for a, b in ((randn(70, 72), randn(72, 88)), (randn(3, 40, 72), randn(72, 88))):
        residual = randn(*a.shape[:-1], 88)
        out = residual.clone()
        gemm(a, b, residual=out, out=out, config=CHOSEN)
        check(out, a, b, residual=residual)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, E4M3, E5M2], ids=str)
def test_result_types(rng, dtype):
    for operand in on_gpu_or_simulated([BF16, FP16, E4M3], [FP16 if dtype == BF16 else BF16]):
        a, b = matrix(70, 144, operand), matrix(144, 88, operand, True)
        assert multiply(a, b, out_dtype=dtype).dtype == dtype
        multiply(a[:, :140], b[:140, :83], out_dtype=dtype)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_narrow_results_saturate(dtype):
    largest = torch.finfo(dtype).max
    a = torch.full((16, 64), 30.0, device=DEVICE, dtype=BF16)
    b = torch.full((64, 32), 1e3, device=DEVICE, dtype=BF16)
    b[:, ::2] *= -1
    for k in (64, 0):
        bias = None if k else torch.linspace(-1e7, 1e7, 32, device=DEVICE)
        out = gemm(a[:, :k], b[:k], bias=bias, out_dtype=dtype, config=SMALL).float()
        assert ((out == largest) | (out == -largest)).all()


# ---------------------------------------------------------------- extents


def test_ragged_extents(rng):
    for _ in range(on_gpu_or_simulated(150, 20)):
        m, n, k = (int(rng.choice(EDGES)) for _ in range(3))
        multiply(randn(m, k), randn(k, n))


def test_depth_below_that_of_an_iteration(rng):
    for k in (1, 8, 63, 65, 127, 129, 193):
        multiply(randn(16, k), randn(k, 32))
        multiply(randn(16, k), randn(k, 32), Config(consumers=1, tile_n=64, tile_k=128))


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("batch", [(), (3,), (0,), (1,)])
def test_empty_extents(dtype, batch):
    for m, n, k in [(0, 8, 16), (8, 0, 16), (8, 16, 0), (0, 0, 0), (0, 8, 0)]:
        a, b = randn(*batch, m, k, dtype=dtype), randn(k, n, dtype=dtype)
        bias, gate, residual = randn(n), randn(*batch, m, n), randn(*batch, m, n)
        for operands in (
            {},
            dict(bias=bias, activation="silu"),
            dict(bias=bias, activation="gelu", gate=gate, residual=residual),
        ):
            out = gemm(a, b, **operands)
            assert out.shape == (*batch, m, n) and out.dtype == BF16
            check(out, a, b, **operands)
            given = empty(*batch, m, n)
            assert gemm(a, b, out=given, **operands) is given
            check(given, a, b, **operands)


@pytest.mark.parametrize("m", on_gpu_or_simulated([*range(1, 10), 15, 16, 17, 31, 32, 33, 48, 63, 64], [1, 5, 17]))
def test_few_rows(rng, m):
    """As when a model generates token by token, with the configurations that are chosen by default and some of their
    alternatives."""
    a, b, bias = randn(m, 328), matrix(328, 200, transposed=True), randn(200)
    multiply(a, b, None)
    multiply(a, b, KINDS["swap_ab"], bias=bias, activation="silu")


# ---------------------------------------------------------------- batches

BATCHES = [
    ((3,), (3,)),
    ((3,), ()),
    ((), (3,)),
    ((2, 1), (3,)),
    ((2, 3), (1, 3)),
    ((2, 1, 2), (1, 3, 1)),
    ((1,), (1,)),
    ((0,), (0,)),
    ((0,), ()),
    ((1,), (4,)),
]


@pytest.mark.parametrize(("a_batch", "b_batch"), BATCHES)
def test_batches(rng, a_batch, b_batch):
    a, b, bias = randn(*a_batch, 40, 72), randn(*b_batch, 72, 56), randn(56)
    multiply(a, b)
    multiply(a, b, bias=bias)
    gate, residual = (randn(*torch.broadcast_shapes(a_batch, b_batch), 40, 56) for _ in range(2))
    multiply(a, b, gate=gate, residual=residual, bias=bias)


def test_batches_of_views(rng):
    a, b = randn(3, 40, 144)[..., 72:], randn(3, 56, 72).mT
    multiply(a, b)
    multiply(a, randn(72, 56))
    multiply(randn(1, 40, 72).expand(3, 40, 72), b)
    multiply(randn(40, 3, 72).transpose(0, 1), b)
    multiply(randn(40, 3, 72).transpose(0, 1), randn(72, 56))
    multiply(randn(3, 40, 73)[..., 1:], b)
    multiply(randn(2, 4, 40, 72)[:, ::2], randn(2, 72, 56))
    multiply(a, b, bias=randn(56), gate=randn(40, 1))
    multiply(randn(3, 3, 72), randn(72, 56), KINDS["swap_ab"], gate=randn(3, 3, 56), residual=randn(3, 3, 56))


# ---------------------------------------------------------------- epilogues

BIASES = [(BF16, (88,)), (FP16, (1, 88)), (FP32, (88,)), (FP32, ()), (BF16, (1,))]
GATES = [
    (BF16, (88,)),
    (FP32, (1, 88)),
    (FP16, (70, 1)),
    (FP32, (70, 1)),
    (BF16, (70, 88)),
    (FP32, (70, 88)),
    (FP32, ()),
    (BF16, (1, 1)),
]


def some(cases):
    """All of them on the GPU, every second one simulated."""
    return on_gpu_or_simulated(cases, cases[::2])


@pytest.mark.parametrize(("dtype", "shape"), some(BIASES), ids=str)
def test_bias(rng, dtype, shape):
    multiply(randn(70, 72), randn(72, 88), bias=randn(*shape, dtype=dtype))


@pytest.mark.parametrize(("dtype", "shape"), some(GATES), ids=str)
def test_gate(rng, dtype, shape):
    multiply(randn(70, 72), randn(72, 88), gate=randn(*shape, dtype=dtype))


def test_operands_of_any_strides(rng):
    a, b = randn(70, 72), randn(72, 88)
    multiply(a, b, bias=randn(88, 2)[:, 1], gate=randn(88, 70).T, residual=randn(88, 70).T)
    multiply(a, b, bias=randn(1).expand(88), gate=randn(70, 1).expand(70, 88), residual=randn(88).expand(70, 88))
    multiply(a, b, bias=randn(90)[1:-1], gate=randn(70, 91)[:, 3:], residual=randn(70, 91)[:, 3:])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activation(rng, activation):
    a, b = randn(70, 72), randn(72, 88) * 0.2  # arguments about 0, where the functions bend
    out = multiply(a, b, activation=activation, out_dtype=FP32)
    assert (out < 0).any() and out.min() > -0.3
    large = multiply(a * 30, b * 30, activation=activation, out_dtype=FP32)
    assert large.isfinite().all()


@pytest.mark.parametrize(
    "kind",
    some_slow(KINDS, ["wide", "sub-tiles", "sub-tiles, pingpong", "deferred", "swap_ab", "split_k", "cluster_split_k"]),
)
def test_all_of_an_epilogue(rng, kind):
    a, b = randn(70, 136), matrix(136, 88, transposed=True)
    everything = dict(bias=randn(88, dtype=FP32), activation="silu", gate=randn(70, 1), residual=randn(70, 88))
    multiply(a, b, KINDS[kind], **everything)
    multiply(
        a[:65],
        b[:, :83],
        KINDS[kind],
        **{**everything, "bias": randn(83, dtype=FP32), "gate": randn(65, 1), "residual": randn(65, 83)},
    )
    if DEVICE == "cuda":
        for gate in (randn(88), randn(70, 88, dtype=FP32), randn()):
            multiply(a, b, KINDS[kind], **{**everything, "gate": gate})


# ---------------------------------------------------------------- fp8


@pytest.mark.parametrize(("a_type", "b_type"), some([(E4M3, E5M2), (E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)]), ids=str)
def test_fp8(rng, a_type, b_type):
    a, b = matrix(70, 160, a_type), matrix(160, 88, b_type, True)
    assert multiply(a, b).dtype == BF16
    multiply(a.T.contiguous().T, b.contiguous())  # depth not contiguous: copied
    multiply(a[:65, :153], b[:153, :83])


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    some([((), ()), ((70,), (88,)), ((70, 1), (1, 88)), (None, (1, 88)), ((1, 1), None)]),
    ids=str,
)
def test_fp8_scales(rng, a_shape, b_shape):
    a, b = matrix(70, 160, E4M3), matrix(160, 88, E4M3, True)
    scale_a, scale_b = (None if s is None else scales(*s) for s in (a_shape, b_shape))
    multiply(a, b, scale_a=scale_a, scale_b=scale_b)
    multiply(
        a,
        b,
        KINDS["swap_ab"],
        scale_a=scale_a,
        scale_b=scale_b,
        bias=randn(88),
        activation="silu",
        residual=randn(70, 88),
    )


BLOCKWISE = [
    Config(consumers=consumers, tile_n=cols, tile_k=128, cluster=cluster, streamed=streamed)
    for consumers, cols, cluster, streamed in (
        (1, 128, 1, False),
        (1, 256, 1, False),
        (2, 256, 2, False),
        (1, 128, 1, True),
    )
]


@pytest.mark.parametrize(("m", "n", "k"), [(70, 136, 400), (130, 264, 144), (64, 256, 96), (1, 130, 260)])
def test_fp8_block_scales(rng, m, n, k):
    a, b = matrix(m, k, E4M3), matrix(k, n, E4M3, True)
    blocks = -(-k // 128)
    given = dict(scale_a=scales(m, blocks), scale_b=scales(blocks, -(-n // 128)))
    for config in on_gpu_or_simulated([None, *BLOCKWISE], BLOCKWISE[:2]):
        multiply(a, b, config, **given)
    multiply(a, b, BLOCKWISE[0], **{**given, "scale_a": scales(blocks, m).T})
    for config in on_gpu_or_simulated([None, *BLOCKWISE], BLOCKWISE[1:2] if m == 70 else []):
        multiply(a, b, config, bias=randn(n), activation="gelu", gate=randn(m, 1), residual=randn(m, n), **given)


def test_fp8_block_scales_of_very_different_sizes(rng):
    """A block's product is scaled before it is added: what is small beside another block is not lost where the large
    one is scaled down."""
    a, b = matrix(64, 256, E4M3), matrix(256, 128, E4M3, True)
    scale_a = torch.ones(64, 2, device=DEVICE)
    scale_a[:, 0], scale_a[:, 1] = 2.0**-12, 2.0**12
    scale_b = torch.tensor([[2.0**12], [2.0**-12]], device=DEVICE)
    multiply(a, b, Config(consumers=1, tile_n=128, tile_k=128), scale_a=scale_a, scale_b=scale_b, out_dtype=FP32)


def test_fp8_batches(rng):
    multiply(randn(3, 40, 80, dtype=E4M3), randn(3, 56, 80, dtype=E4M3).mT)
    multiply(randn(3, 40, 80, dtype=E4M3), matrix(80, 56, E4M3, True), scale_a=scales(), scale_b=scales(56))


# ---------------------------------------------------------------- configurations

PROBLEMS = {
    "square": problem(m=200, n=264, k=136),
    "few rows": problem(m=3, n=264, k=520, b="nk"),
    "batch": problem(batch=3, m=72, n=136, k=136),
    "fp8": problem(dtype="fp8e4nv", m=130, n=272, k=288, b="nk"),
    "block scales": problem(dtype="fp8e4nv", m=130, n=272, k=288, b="nk", scales="block"),
}
# two hundred kernels take ten minutes to compile one after another: other processes may take theirs
SHARES = on_gpu_or_simulated(8, 1)


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_candidate_is_right(rng, name, share):
    """All candidates on a GPU; some, others each time, simulated."""
    problem = PROBLEMS[name]
    operands = dict(scale_a=scales(problem.m, 3), scale_b=scales(3, 3)) if problem.scales else {}
    dtype = E4M3 if problem.dtype.startswith("fp8") else BF16
    batch = (problem.batch,) if problem.batch > 1 else ()
    a = randn(*batch, problem.m, problem.k, dtype=dtype)
    b = (
        randn(*batch, problem.n, problem.k, dtype=dtype).mT
        if problem.b == "nk"
        else randn(*batch, problem.k, problem.n, dtype=dtype)
    )
    every = candidates(problem, tune.Device.of())[share::SHARES]
    configs = on_gpu_or_simulated(every, [every[i] for i in rng.permutation(len(every))[:1]])
    for config in configs:
        print(config)
        out = empty(*batch, problem.m, problem.n)
        gemm(a, b, config=config, out=out, **operands)
        check(out, a, b, str(config), **operands)


@pytest.mark.parametrize(
    "kind",
    some_slow(
        KINDS,
        ["two consumers", "cluster", "pingpong", "deferred", "streamed", "cluster_split_k", "split_tail", "stream_k"],
    ),
)
def test_many_tasks(rng, kind):
    """More tasks than blocks, a number of them that divides by nothing."""
    m, n, k = on_gpu_or_simulated((3000, 2000, 328), (200, 456, 200))
    a, b = randn(m, k), randn(k, n)
    first = multiply(a, b, KINDS[kind])
    for _ in range(on_gpu_or_simulated(10, 1)):
        assert torch.equal(gemm(a, b, config=KINDS[kind], out=empty(m, n)), first), "two runs differ"


# ---------------------------------------------------------------- what is no number


@pytest.mark.parametrize("kind", on_gpu_or_simulated(list(KINDS), ["small", "swap_ab", "split_k"]))
def test_nan_and_infinity_spread_as_in_torch(rng, kind):
    a, b = randn(70, 136), randn(136, 88)
    b[5] = 0
    a[3, 7] = float("nan")
    b[100, 11] = float("nan")
    a[40, 5] = float("inf")  # times 0
    a[41, 6], b[135, 80] = float("inf"), -float("inf")
    out, ref = gemm(a, b, config=KINDS[kind]).cpu().double(), gemm_torch(a.cpu(), b.cpu())
    assert ref[3].isnan().all() and ref[:, 11].isnan().all() and ref[40].isnan().all() and ref[41].isinf().any()
    assert torch.equal(out.isnan(), ref.isnan())
    assert torch.equal(out.isinf(), ref.isinf()) and torch.equal(out[ref.isinf()], ref[ref.isinf()])
    finite = ref.isfinite()
    assert (out - ref)[finite].norm() / ref[finite].norm() < 4e-3


@pytest.mark.parametrize("operand", ["bias", "gate", "residual"])
def test_nan_of_an_epilogue_stays_where_it_is(rng, operand):
    a, b = randn(70, 72), randn(72, 88)
    x = randn(88) if operand == "bias" else randn(70, 88)
    x[..., 5] = float("nan")
    out = gemm(a, b, config=CHOSEN, **{operand: x})
    assert out[:, 5].isnan().all() and out.isnan().sum() == 70


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activations_of_infinity(activation):
    a, b = torch.eye(64, device=DEVICE, dtype=BF16), torch.zeros(64, 64, device=DEVICE, dtype=BF16)
    bias = torch.zeros(64, device=DEVICE)
    bias[3], bias[5], bias[8] = float("nan"), float("inf"), -float("inf")
    out = gemm(a, b, bias=bias, activation=activation, config=CHOSEN)
    assert (
        out[:, [3, 8]].isnan().all()
        and (out[:, 5] == float("inf")).all()
        and (out.isnan().sum(), out.isinf().sum()) == (128, 64)
    )


def test_values_beyond_the_range_of_fp16_are_infinite():
    a = torch.full((8, 64), 200.0, device=DEVICE, dtype=FP16)
    assert gemm(a, a.T, config=CHOSEN).isinf().all() and gemm(a, a.T, config=CHOSEN, out_dtype=FP32).isfinite().all()


# ---------------------------------------------------------------- the same call again


def test_plans_are_for_any_tensors_of_their_kind(rng):
    run = functools.partial(gemm, config=CHOSEN)
    for _ in range(2):
        a, b, bias, out = randn(70, 72), randn(72, 88), randn(88), empty(70, 88)
        check(run(a, b), a, b)
        check(run(a, b, out=out), a, b)
        check(run(a, b, bias=bias, out=out), a, b, bias=bias)


# ---------------------------------------------------------------- accumulators


def test_sums_in_fp16(rng):
    """Sums are rounded to fp16 on the way: further off than fp32 sums, by no more than their 10 bits allow."""
    a, b = randn(72, 320, dtype=FP16), randn(320, 136, dtype=FP16)
    want = a.double() @ b.double()
    for config in (None, SMALL):
        assert relative_error(gemm(a, b, accumulate="fp16", config=config), want) < 2e-2
    big = torch.full((16, 64), 60.0, device=DEVICE, dtype=FP16)
    # 64 · 3600 is beyond fp16
    assert torch.isinf(gemm(big, big.T, accumulate="fp16", out_dtype=torch.float32, config=SMALL)).all()
    with pytest.raises(
        ValueError,
        match=r"gemm\(accumulate='fp16'\) of torch.bfloat16: must be 'fp32', or 'fp16' for operands of torch.float16",
    ):
        gemm(a.bfloat16(), b.bfloat16(), accumulate="fp16")
    with pytest.raises(ValueError, match="tasks that are split are summed up in fp32"):
        gemm(a, b, accumulate="fp16", config=Config(tile_n=128, schedule="split_k", splits=2))


def test_a_kind_of_operands_is_tuned_once(monkeypatch, tmp_path):
    """Where measurements are possible; the simulator has no time of its own."""
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TK_TUNE_TRIES", "2")
    tuned, tune = [], family.tune
    monkeypatch.setattr(family, "tune", lambda problem, *rest: tuned.append(problem) or tune(problem, *rest))
    a, b, bias = randn(72, 200), randn(200, 104), randn(104)
    for _ in range(2):
        check(gemm(a, b, tune=True), a, b)
        check(gemm(a, b, bias=bias, tune=True), a, b, bias=bias)
        check(gemm(a, b, config=SMALL, tune=True), a, b)
    for left, right in ((a[:0], b), (a, b[:, :0]), (a[:, :0], b[:0])):
        assert torch.equal(gemm(left, right, tune=True), left @ right), "an empty product needs no measurement"
    odd = randn(72, 91)
    check(gemm(odd, b[:91], tune=True), odd, b[:91])  # ordinary loads, which have no configurations
    kinds = [(72, 104, 200, ""), (72, 104, 200, "vector")]
    assert [(p.m, p.n, p.k, p.epilogue) for p in tuned] == on_gpu_or_simulated(kinds, [])
    assert all(family.is_measured(p, a.device) for p in tuned)
