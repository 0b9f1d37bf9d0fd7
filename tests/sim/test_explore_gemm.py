"""The matrix product under many interleavings in the simulator: no race, no deadlock, no wrong phase, and the same
result in each."""

from dataclasses import replace

import pytest
import torch

from tests.cases_epilogue import near, operands_of, reference, scaled, sums_of
from tests.cases_gemm import BF16, E4M3, FP16, KINDS, check, matrix, randn, scales
from tests.util import crossed, explored, poison, relative_error, slow, some_slow
from tritonkittens import sim
from tritonkittens.kernels.gemm import Config, Epilogue, gemm
from tritonkittens.kernels.gemm.call_plan import unaligned_plan
from tritonkittens.kernels.gemm.device.unaligned_tiles import Tiles

SCHEDULES = 2, 12
CASES = {
    "default": ({}, ()),
    "cluster": (KINDS["cluster"].__dict__, ()),
    "cluster of 2 consumers": (dict(tile_n=64, cluster=2), ("bias", "residual")),
    "wide": (KINDS["wide"].__dict__, ("bias",)),
    "wide, shared by a cluster": (dict(consumers=1, tile_n=96, cluster=2), ()),
    "wide, three consumers, unequal parts": (
        dict(consumers=3, tile_n=112, cluster=2, epilogue_n=16, stages=2),
        ("bias",),
    ),
    "pingpong": (KINDS["pingpong"].__dict__, ("residual",)),
    "sub-tiles": (dict(KINDS["sub-tiles"].__dict__, stages=2), ("bias",)),
    "sub-tiles, pingpong": (dict(KINDS["sub-tiles, pingpong"].__dict__, stages=2), ("bias", "gate")),
    "deferred": (dict(KINDS["deferred"].__dict__, stages=2), ("bias", "gate")),
    "deferred, split tail, cluster": (dict(KINDS["deferred, split_tail"].__dict__, stages=2), ("bias",)),
    "deferred, residual": (dict(KINDS["deferred"].__dict__, stages=2), ("bias", "residual")),
    "deferred, residual in two sub-tiles, swap_ab": (
        dict(consumers=1, tile_n=32, epilogue_n=16, swap_ab=True, deferred_epilogue=True, stages=2),
        ("gate", "residual"),
    ),
    "deferred, swap_ab": (
        dict(consumers=1, tile_n=32, epilogue_n=16, swap_ab=True, deferred_epilogue=True, stages=2),
        ("gate",),
    ),
    "sub-tiles of a residual": (dict(KINDS["sub-tiles, pingpong"].__dict__, stages=2), ("gate", "residual")),
    "sub-tiles of a residual, swap_ab": (
        dict(KINDS["sub-tiles, pingpong"].__dict__, epilogue_n=16, swap_ab=True, stages=2),
        ("residual",),
    ),
    "sub-tiles of a residual, two parts": (
        dict(consumers=1, tile_n=64, schedule="cluster_split_k", splits=2, epilogue_n=16, stages=2),
        ("bias", "residual"),
    ),
    "sub-tiles of a residual, cluster": (dict(tile_n=64, cluster=2, epilogue_n=16, stages=2), ("residual",)),
    "split_k": (dict(KINDS["split_k"].__dict__, stages=2), ("bias",)),
    "cluster_split_k": (dict(KINDS["cluster_split_k"].__dict__, stages=2), ("bias", "residual")),
    "cluster_split_k of 2 consumers, 4 parts": (
        dict(tile_n=128, schedule="cluster_split_k", splits=4, epilogue_n=16, stages=2),
        ("gate",),
    ),
    "cluster_split_k of 8 parts, some empty": (
        dict(consumers=1, tile_n=128, schedule="cluster_split_k", splits=8, stages=2),
        (),
    ),
    "cluster_split_k, swap_ab": (
        dict(KINDS["swap_ab"].__dict__, schedule="cluster_split_k", splits=2),
        ("bias", "residual"),
    ),
    "split_tail": (dict(KINDS["split_tail"].__dict__, stages=2), ()),
    "stream_k": (dict(KINDS["stream_k"].__dict__, stages=2), ("residual",)),
    "swap_ab": (KINDS["swap_ab"].__dict__, ("bias", "gate", "residual")),
    "residual": (dict(tile_n=64, stages=2), ("residual",)),
    "two blocks": (dict(tile_n=64, consumers=1, blocks_per_sm=2, stages=2), ("bias", "gate")),
}


QUICK = [
    "default",
    "cluster of 2 consumers",
    "wide",
    "pingpong",
    "deferred, residual in two sub-tiles, swap_ab",
    "deferred",
    "sub-tiles of a residual, two parts",
    "split_k",
    "cluster_split_k",
    "split_tail",
    "stream_k",
    "swap_ab",
    "two blocks",
    "sub-tiles of a residual, swap_ab",
]


@explored(*SCHEDULES)
@pytest.mark.parametrize("name", some_slow(CASES, QUICK))
def test_products(name, schedules, rng):
    knobs, wanted = CASES[name]
    m, n, k = 130, 72, 200
    a, b = (x.cpu() for x in (randn(m, k), matrix(k, n, transposed=name.startswith("wide"))))
    known = dict(bias=randn(n), gate=randn(m, 1), residual=randn(m, n))
    operands = {key: known[key].cpu() for key in wanted}
    out = poison(torch.empty(m, n, dtype=BF16))
    result = sim.explore(lambda: gemm(a, b, out=out, config=Config(**knobs), **operands), schedules=schedules)
    assert result.seeds == schedules
    check(out, a, b, name, deferred_epilogue="deferred" in name, **operands)


OPERANDS = {
    "A stored K × M": (BF16, True, False, {}, "two consumers"),
    "both transposed, swap_ab": (BF16, True, True, dict(activation="silu"), "swap_ab"),
    "fp16 sums": (FP16, False, True, dict(accumulate="fp16"), "two consumers"),
    "a block a tile": (BF16, False, False, dict(activation="gelu"), "one_per_block"),
    "e4m3, a scale a tensor": (E4M3, False, True, dict(scale_a=(), scale_b=()), "small"),
    "e4m3, scales a row and column": (E4M3, False, True, dict(scale_a=(130, 1), scale_b=(1, 72)), "two consumers"),
}


@explored(*SCHEDULES)
@pytest.mark.parametrize("name", OPERANDS)
def test_kinds_of_operands(name, schedules, rng):
    dtype, a_transposed, b_transposed, options, kind = OPERANDS[name]
    m, n, k = 130, 72, 208
    a, b = (x.cpu() for x in (matrix(m, k, dtype, a_transposed), matrix(k, n, dtype, b_transposed)))
    options = {key: scales(*x).cpu() if isinstance(x, tuple) else x for key, x in options.items()}
    out = poison(torch.empty(m, n, dtype=FP16 if dtype == FP16 else BF16))
    sim.explore(lambda: gemm(a, b, out=out, config=replace(KINDS[kind], stages=2), **options), schedules=schedules)
    if options.pop("accumulate", None):
        assert relative_error(out, a.double() @ b.double()) < 2e-2
    else:
        check(out, a, b, name, **options)


IN_SUBTILES = [dict(), dict(pingpong=True), dict(consumers=1, swap_ab=True), dict(schedule="split_tail")]


@explored(*SCHEDULES)
@pytest.mark.parametrize("knobs, k", crossed(IN_SUBTILES, [64, 200]), ids=str)
def test_sub_tiles_of_a_residual_in_task_after_task(knobs, k, schedules, rng):
    """The first two of four sub-tiles are loaded while the products of the task run, to the buffers from which the last
    two of the task before are stored."""
    m, n = 290, 136
    a, b, residual = (x.cpu() for x in (randn(m, k), randn(k, n), randn(m, n)))
    out = poison(torch.empty(m, n, dtype=BF16))
    config = Config(tile_n=64, epilogue_n=16, stages=2, **knobs)
    sim.explore(lambda: gemm(a, b, out=out, residual=residual, config=config), schedules=schedules, multiprocessors=1)
    check(out, a, b, str(knobs), residual=residual)


DEFERRED = [
    dict(cluster=4),
    dict(cluster=2, schedule="split_tail"),
    dict(),
    dict(cluster=4, swap_ab=True),
    dict(tile_n=48, consumers=1),
    dict(schedule="stream_k"),
    dict(swap_ab=True),
]


@explored(*SCHEDULES)
@pytest.mark.parametrize("knobs, k", crossed(DEFERRED, [0, 64, 400]), ids=str)
def test_deferred_results_in_task_after_task(knobs, k, schedules, rng):
    """A block's next task has no iterations, fewer than a task's results have sub-tiles, or more, so many that
    consumers end it one after the other."""
    m, n = 290, 136
    a, b, bias = (x.cpu() for x in (randn(m, k), randn(k, n), randn(n)))
    out = poison(torch.empty(m, n, dtype=BF16))
    config = Config(**{**dict(tile_n=64, epilogue_n=16, stages=2, deferred_epilogue=True), **knobs})
    sim.explore(
        lambda: gemm(a, b, out=out, bias=bias, config=config), schedules=schedules, multiprocessors=config.cluster
    )
    check(out, a, b, str(knobs), bias=bias)


DONE = [
    dict(activation="silu"),
    dict(activation="gelu", split=True),
    dict(activation="gelu_tanh", swap_ab=True),
    dict(residual=True),
    dict(residual=True, swap_ab=True),
    dict(activation="gelu", residual=True, tile_n=32),
]


@pytest.mark.parametrize("knobs, k", crossed(DONE, [0, 64, 900]), ids=str)
def test_what_is_added_to_deferred_results_in_task_after_task(knobs, k, rng):
    """Under the next task's products, which may be fewer than that takes."""
    m, n = 290, 136
    a, b, bias = (x.cpu() for x in (randn(m, k), randn(k, n), randn(n)))
    out, knobs = poison(torch.empty(m, n, dtype=BF16)), dict(knobs)
    operands = dict(
        bias=bias, **({"activation": knobs.pop("activation")} if "activation" in knobs else dict(gate=randn(n).cpu()))
    )
    if knobs.pop("residual", False):
        operands["residual"] = randn(m, n).cpu()
    schedule = "split_tail" if knobs.pop("split", False) else "persistent"
    config = Config(**{**dict(tile_n=64, epilogue_n=16, stages=2, deferred_epilogue=True, schedule=schedule), **knobs})
    sim.explore(lambda: gemm(a, b, out=out, config=config, **operands), schedules=4, multiprocessors=1)
    check(out, a, b, str(config), deferred_epilogue=True, **operands)


@explored(*SCHEDULES)
@pytest.mark.parametrize(
    "knobs", [dict(consumers=1), dict(cluster=2), slow(dict(tile_n=256)), dict(tile_n=256, epilogue_n=64)], ids=str
)
def test_block_scales(knobs, schedules, rng):
    m, n, k = 130, 136, 300
    a, b = matrix(m, k, E4M3).cpu(), matrix(k, n, E4M3, True).cpu()
    operands = dict(scale_a=scales(m, 3).cpu(), scale_b=scales(3, 2).cpu(), residual=randn(m, n).cpu())
    out = poison(torch.empty(m, n, dtype=BF16))
    sim.explore(
        lambda: gemm(a, b, out=out, config=Config(**{**dict(tile_n=128, tile_k=128, stages=2), **knobs}), **operands),
        schedules=schedules,
    )
    check(out, a, b, **operands)


@explored(*SCHEDULES)
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_copied_operands_and_results(transposed, schedules, rng):
    a, b, residual = (
        x.cpu()
        for x in (
            matrix(130, 83, transposed="a" in transposed),
            matrix(83, 71, transposed="b" in transposed),
            randn(130, 71),
        )
    )
    out = poison(torch.empty(130, 71, dtype=BF16))
    sim.explore(lambda: gemm(a, b, out=out, residual=residual, config=Config(tile_n=64, stages=2)), schedules=schedules)
    check(out, a, b, residual=residual)


TILES = [
    Tiles(1, 32, 16, parts=4),
    Tiles(1, 32, 16, parts=2, wide=True),
    Tiles(16, 32, 16, parts=4),
    Tiles(1, 32, 16, parts=3, wide=True, stages=3),
    Tiles(32, 32, 16, parts=3, wide=True, stages=3),
    Tiles(32, 32, 32, wide=True, stages=2),
    Tiles(64, 64, 32, parts=2),
]


@explored(*SCHEDULES)
@pytest.mark.parametrize("tiles, transposed", crossed(TILES, [False, True]), ids=str)
def test_operands_read_by_ordinary_loads(tiles, transposed, schedules, rng):
    """Whichever block of a tile comes last sums its parts."""
    m = 1 if tiles.rows == 1 else 21
    a, b, bias = randn(m, 131).cpu(), matrix(131, 45, transposed=transposed).cpu(), randn(45).cpu()
    out = poison(torch.empty(m, 45, dtype=BF16))
    operands = (bias, None, None, None, None)
    plan = unaligned_plan(a, b, operands, "silu", BF16, {"bias": "col"}, out, tiles)
    sim.explore(lambda: plan(a, b, operands, out), schedules=schedules)
    check(out, a, b, str(tiles), bias=bias, activation="silu")


@explored(*SCHEDULES)
@pytest.mark.parametrize(
    "name", some_slow(["sub-tiles of a residual", "deferred", "cluster_split_k"], ["sub-tiles of a residual"])
)
def test_epilogues_of_users(name, schedules, rng):
    """A tile of theirs comes to where results are staged, as a residual does."""
    m, n, k = 130, 72, 200
    a, b = (x.cpu() for x in (randn(m, k), randn(k, n)))
    given = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in operands_of(m, n).items()}
    out = poison(torch.empty(m, n, dtype=BF16))
    sim.explore(
        lambda: gemm(a, b, out=out, epilogue=Epilogue(scaled, **given), config=Config(**CASES[name][0])),
        schedules=schedules,
    )
    assert near(out, *reference(*sums_of(a, b), **given))


@pytest.mark.parametrize("wanted", [dict(activation="gelu"), dict(gate=True, residual=True)], ids=lambda x: "-".join(x))
def test_deferred_results_on_blackwell(wanted, rng):
    """Their sums come from tensor memory, in another register layout."""
    a, b, known = (
        randn(130, 72).cpu(),
        randn(72, 136).cpu(),
        dict(gate=randn(136).cpu(), residual=randn(130, 136).cpu()),
    )
    operands = {name: known.get(name, value) for name, value in wanted.items()}
    out = poison(torch.empty(130, 136, dtype=BF16))
    with sim.device("sm_100a"):
        gemm(a, b, out=out, config=Config(**dict(KINDS["deferred"].__dict__, stages=2)), **operands)
    check(out, a, b, deferred_epilogue=True, **operands)


@explored(*SCHEDULES)
def test_a_decoding_batch(schedules, rng):
    a, b, residual = (x.cpu() for x in (randn(3, 5, 136), randn(3, 136, 72), randn(3, 5, 72)))
    out = poison(torch.empty(3, 5, 72, dtype=BF16))
    sim.explore(lambda: gemm(a, b, out=out, residual=residual, config=KINDS["swap_ab"]), schedules=schedules)
    check(out, a, b, residual=residual)
