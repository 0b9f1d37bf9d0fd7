"""Grouped products on chips that are simulated, as torch sees them, their machine code, and what they refuse."""

import ast
import inspect as python_inspect
import itertools
import math

import pytest
import torch
from torch.nn import functional

from tests.cases_gemm import E4M3
from tests.cases_grouped import BF16, block_scales, check, check_selected, ends_of, operands, selected
from tests.util import explored, logical_lines, poison, refused, relative_error, slow
from tritonkittens import sim, tune
from tritonkittens.arch import GPUS
from tritonkittens.inspect import inspect
from tritonkittens.kernels.gemm import Config, Problem
from tritonkittens.kernels.grouped_gemm import ends_of_groups, grouped_gemm, grouped_gemm_operator, grouped_gemm_torch
from tritonkittens.kernels.grouped_gemm.choice import GATED, GATHERED, ROWS, SCATTERED, candidates, cost
from tritonkittens.kernels.grouped_gemm.device import grouped
from tritonkittens.kernels.grouped_gemm.inspection import inspectable
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded
from tritonkittens.nn import GroupedLinear


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    for module in ("cases_gemm", "cases_grouped"):
        monkeypatch.setattr(f"tests.{module}.DEVICE", "cpu")


A, B, ENDS = torch.zeros(8, 16, dtype=BF16), torch.zeros(2, 16, 24, dtype=BF16), torch.tensor([3, 8], dtype=torch.int32)
F = torch.zeros(8, 16)
COUNTED = dict(a=torch.zeros(2, 4, 16, dtype=BF16), offsets=None)
ERRORS = [
    (dict(a=[1.0]), TypeError, "grouped_gemm: a is list; it must be a torch tensor"),
    (dict(offsets=[3, 8]), TypeError, "grouped_gemm: offsets is list; it must be a torch tensor"),
    (dict(a=A.float()), TypeError, "grouped_gemm: a has dtype torch.float32; it must be torch.bfloat16 or"),
    (dict(b=B.half()), TypeError, "grouped_gemm: a has dtype torch.bfloat16, b torch.float16; they must be equal"),
    (dict(b=B.to("meta")), ValueError, "grouped_gemm: b is on meta; it must be on a CUDA device"),
    (dict(a=A[0]), ValueError, "grouped_gemm: a is (16,), b is (2, 16, 24); they must be (M, K) and (G, K, N), with"),
    (dict(b=B[:, 1:]), ValueError, "grouped_gemm: a is (8, 16), b is (2, 15, 24); they must be (M, K) and (G, K, N)"),
    (dict(offsets=None), ValueError, "b is (2, 16, 24); give the groups' offsets"),
    (dict(a=A[None].expand(2, 8, 16)), ValueError, "two batches have no offsets"),
    (dict(offsets=ENDS.long()), TypeError, "grouped_gemm: offsets has dtype torch.int64; it must be torch.int32"),
    (dict(offsets=ENDS[:1]), ValueError, "grouped_gemm: offsets is (1,); it must be (2,), one for each matrix"),
    (dict(b=B[0], offsets=ENDS[None]), ValueError, "offsets is (1, 2); it must be one for each group"),
    (dict(b=B[0], offsets=torch.zeros(1025).int()), ValueError, "grouped_gemm: 1025 groups; there may be 1024"),
    (dict(out_dtype=torch.int8), TypeError, "grouped_gemm: out_dtype is torch.int8; it must be"),
    (dict(bias=A), ValueError, "grouped_gemm: bias is (8, 16); it must be (2, 24)"),
    (dict(gate=A), ValueError, "grouped_gemm: gate is (8, 16); it must be one number or (8,) or (8, 1)"),
    (dict(scale_b=A), TypeError, "grouped_gemm: scale_b has dtype torch.bfloat16; it must be torch.float32"),
    (dict(activation="relu"), ValueError, "grouped_gemm(activation='relu'): must be one of None, 'gelu', 'gelu_tanh'"),
    (dict(activation="swiglu", bias=B[:, 0, :12]), ValueError, "it takes no bias and no scales"),
    (dict(activation="swiglu", residual=B[0]), ValueError, "grouped_gemm: residual is (16, 24); it must be (8, 12)"),
    (dict(activation="swiglu", scale_b=A[0, 0].float()), ValueError, "it takes no bias and no scales"),
    (dict(activation="geglu", b=B[..., :23]), ValueError, "activation='geglu' needs an even number of columns"),
    (dict(activation="swiglu", config=Config(tile_n=96)), ValueError, "needs tile_n=128 or 256"),
    (dict(b=B[0], activation="silu"), ValueError, "grouped_gemm: activation: only products with groups of rows"),
    (dict(gate=A[:, 0], config=Config(swap_ab=True)), ValueError, "it needs swap_ab=False"),
    (
        dict(scale_a=F[:, :3], scale_b=F[None, :2, :1]),
        ValueError,
        "scale_a is (8, 3); it must be one number or (8,) or",
    ),
    (dict(scale_b=F[None, :2, :1]), ValueError, "scale_b is (1, 2, 1); it must be one number or (2, 24) or (2, 1, 1)"),
    (dict(scale_b=F[:2, :1, None]), ValueError, "scale_a is None, scale_b is (2, 1, 1); block scales are for fp8 and"),
    (
        dict(a=A.to(E4M3), b=B.to(E4M3), scale_a=F[:, :1]) | dict(scale_b=F[:2, :1, None], config=Config(tile_n=96)),
        ValueError,
        "block scales need tile_k=128, tile_n that divides 256",
    ),
    (dict(out=A), ValueError, "grouped_gemm: out is (8, 16); it must be (8, 24)"),
    (dict(counts=ENDS, offsets=None), ValueError, "grouped_gemm: counts are for a (G, M, K) and b (G, K, N), without"),
    (dict(rows=ENDS.long()), TypeError, "grouped_gemm: rows has dtype torch.int64; it must be torch.int32"),
    (dict(rows=ENDS[None]), ValueError, "grouped_gemm: rows is (1, 2); it must be one dimension"),
    (dict(out_rows=ENDS), ValueError, "grouped_gemm: out_rows is (2,); it must be (8,), a number for each row"),
    (dict(rows=ENDS, gate=A[:, 0]), ValueError, "gate is (8,); it must be one number or (2,) or (2, 1)"),
    (dict(rows=ENDS, out_rows=ENDS, residual=A), ValueError, "grouped_gemm: out_rows with a residual; add it to"),
    (dict(rows=ENDS, out_rows=ENDS, out=A), ValueError, "grouped_gemm: out is (8, 16); it must be (rows, 24)"),
    (dict(b=B[0], rows=ENDS), ValueError, "grouped_gemm: rows: only products with groups of rows"),
    (dict(rows=ENDS, config=Config(cluster=2)), ValueError, "rows needs cluster=1"),
    (dict(a=A.expand(2, 8, 16), counts=ENDS, offsets=None, rows=ENDS), ValueError, "counts with rows or out_rows"),
    (
        dict(counts=ENDS.long(), **COUNTED),
        TypeError,
        "grouped_gemm: counts has dtype torch.int64; it must be torch.int32",
    ),
    (dict(counts=ENDS[:1], **COUNTED), ValueError, "grouped_gemm: counts is (1,); it must be (2,), one for each group"),
    (dict(counts=ENDS, debug=True, **COUNTED), ValueError, "grouped_gemm: counts is [3, 8]; each must be 0 to 4"),
    (dict(config=3), TypeError, "grouped_gemm(config=3): must be a Config"),
    (dict(config=Config(schedule="stream_k")), ValueError, "it needs schedule='persistent'"),
    (dict(config=Config(cluster=2, swap_ab=True)), ValueError, "it needs cluster=1"),
    (dict(offsets=ENDS.flip(0), debug=True), ValueError, "offsets is [8, 3]; it must rise from 0 to at most 8"),
    (dict(offsets=ENDS + 1, debug=True), ValueError, "offsets is [4, 9]; it must rise from 0 to at most 8"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ERRORS, ids=str)
def test_errors(changed, kind, message):
    given = dict(a=A, b=B, offsets=ENDS) | changed
    with sim.device(), refused(message, kind):
        grouped_gemm(given.pop("a"), given.pop("b"), given.pop("offsets"), **given)


@pytest.mark.parametrize("kind", ["rows", slow("depth")])
@pytest.mark.parametrize("config", [None, slow(Config(tile_m=128, tile_n=128, consumers=1, epilogue_n=32))])
def test_tensor_memory(kind, config):
    a, b, ends = operands(kind, [200, 0, 1, 40], 200, 136, 72)
    out = poison(torch.empty((4, 200, 136) if kind == "depth" else (241, 136), dtype=BF16))
    with sim.device("sm_100a"):
        grouped_gemm(a, b, ends, out=out, config=config)
    check(out, kind, a, b, ends)


@pytest.mark.parametrize("gpu", ["H200", "B200"])
@pytest.mark.parametrize("scales", ["", ROWS, GATED, f"{GATED} {GATHERED}", f"{ROWS} {GATHERED} {SCATTERED}"])
def test_every_kind_has_a_configuration(gpu, scales):
    device = tune.Device.named(gpu)
    for extents in ((1, 1, 8, 8), (8, 4, 4096, 512), (3, 24, 192, 64), (64, 65, 520, 72), (8, 2048, 14336, 4096)):
        for b, epilogue, out in itertools.product(("nk", "kn"), ("", "tile", "silu"), ("bf16", "fp32")):
            problem = Problem("bf16", out, "mk", b, epilogue, scales, *extents)
            found = [cost(problem, config, device).total for config in candidates(problem, device)]
            assert min(found, default=math.inf) < math.inf, problem
        blocks = Problem("fp8e4nv", "fp32", "mk", "nk", "tile", "block", *extents)
        assert all(config.tile_k == 128 for config in candidates(blocks, device))
        assert min(cost(blocks, config, device).total for config in candidates(blocks, device)) < math.inf


SMALL = Config(tile_n=64, epilogue_n=16, deferred_epilogue=True, stages=2)


@explored(2, 20)
@pytest.mark.parametrize("kind, config", [("rows", SMALL), ("depth", Config(consumers=1, tile_n=64, stages=2))])
def test_every_schedule_gives_these_results(kind, config, schedules):
    """Groups of no iteration, of one, and of more than the ring has stages."""
    a, b, ends = operands(kind, [130, 0, 1, 200], 72, 72, 192)
    found = []
    sim.explore(lambda: found.append(grouped_gemm(a, b, ends, config=config)), schedules=schedules, multiprocessors=2)
    for out in found:
        check(out, kind, a, b, ends)


BLOCKWISE = Config(tile_n=64, tile_k=128, stages=2)


@explored(2, 20)
def test_every_schedule_scales_blocks(schedules):
    """Two consumers, whose rows begin anywhere in the vectors of scales; more iterations than the ring has stages."""
    a, b, ends = operands("rows", [3, 0, 70], 0, 64, 300, E4M3, b_nk=True)
    given, found = block_scales(73, 3, 64, 300), []
    sim.explore(
        lambda: found.append(grouped_gemm(a, b, ends, config=BLOCKWISE, **given)),
        schedules=schedules,
        multiprocessors=2,
    )
    for out in found:
        check(out, "rows", a, b, ends, **given)


@pytest.mark.slow
def test_block_scales_in_tensor_memory():
    a, b, ends = operands("rows", [70, 0, 1], 0, 72, 200, E4M3, b_nk=True)
    given, out = block_scales(71, 3, 72, 200), poison(torch.empty(71, 72, dtype=BF16))
    with sim.device("sm_100a"):
        grouped_gemm(a, b, ends, out=out, config=BLOCKWISE, **given)
    check(out, "rows", a, b, ends, **given)


# ---------------------------------------------------------------- rows that are selected by number

SWAPPED = Config(tile_n=32, consumers=1, swap_ab=True, stages=2)


@explored(1, 20)
@pytest.mark.parametrize(
    "arch, config",
    [
        ("sm_90a", Config(tile_n=64, epilogue_n=16, stages=2)),
        slow("sm_90a", SWAPPED),
        slow("sm_90a", Config(tile_n=64, epilogue_n=16, stages=2, deferred_epilogue=True)),
        ("sm_100a", None),
        slow("sm_100a", Config(tile_m=128, tile_n=32, consumers=1, swap_ab=True)),
    ],
    ids=str,
)
def test_rows_of_a_are_selected(arch, config, schedules):
    """Groups of no row, of one and of several tiles; numbers of no row, and rows several times."""
    given = selected([130, 0, 1, 69], 50, 72, 200)
    a, b, ends, rows, _ = given
    found = []

    def run():
        found.append(poison(torch.empty(205, 72, dtype=BF16)))
        grouped_gemm(a, b, ends, rows=rows, out=found[-1], config=config)

    sim.explore(run, schedules=schedules, multiprocessors=2, arch=arch)
    for out in found:
        check_selected(out, a, b, ends, rows)
        assert out[200:].isnan().all()


@explored(1, 20)
@pytest.mark.parametrize("arch, stages", [("sm_90a", 16), slow("sm_90a", None), slow("sm_100a", 16)])
def test_rows_of_the_result_are_selected(arch, stages, schedules):
    a, b, ends, _, out_rows = selected([130, 0, 1, 69], 205, 72, 72)
    gate, found = torch.rand(205), []
    config = Config(tile_m=64 if arch == "sm_90a" else 128, consumers=1, tile_n=64, epilogue_n=stages)

    def run():
        found.append(poison(torch.empty(211, 72, dtype=BF16)))
        grouped_gemm(a, b, ends, out_rows=out_rows, gate=gate, out=found[-1], config=config)

    sim.explore(run, schedules=schedules, multiprocessors=2, arch=arch)
    for out in found:
        check_selected(out, a, b, ends, None, out_rows, gate=gate)


@pytest.mark.parametrize("tokens, n, k", [(50, 72, 100), slow(50, 68, 72), slow(0, 72, 72), (50, 72, 0)])
@pytest.mark.parametrize("activation", [None, slow("swiglu")])
def test_rows_that_no_copy_of_16_bytes_moves(tokens, n, k, activation):
    """K and N of no multiple of 16 bytes, no K, and no tokens."""
    a, b, ends, rows, out_rows = selected([20, 0, 9], tokens, n, k)
    n = n // 2 if activation else n
    out = poison(torch.empty(40, n, dtype=BF16))
    with sim.device():
        grouped_gemm(a, b, ends, rows=rows, out_rows=out_rows, activation=activation, out=out)
    check_selected(out, a, b, ends, rows, out_rows, **(dict(activation=activation) if activation else {}))


@pytest.mark.parametrize("activation", [None, slow("swiglu")])
def test_gradients_through_selected_rows(activation):
    a, b, ends, rows, out_rows = selected([20, 0, 9], 12, 32, 24, rest=0)
    leaves = [a.requires_grad_(), b.mT.detach().requires_grad_(), torch.rand(29).requires_grad_()]

    def grouped(function, a, w, gate, **more):
        return function(a, w.mT, ends, rows=rows, out_rows=out_rows, gate=gate, activation=activation, **more)

    with sim.device():
        results = []
        for function in (grouped_gemm, torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager")):
            y = grouped(function, *leaves)
            inside = torch.zeros(29, dtype=torch.bool).scatter(
                0, out_rows[(out_rows >= 0) & (out_rows < 29)].long(), True
            )
            y = torch.where(inside[:, None], y, 0)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    exact = [t.detach().double().requires_grad_() for t in leaves]
    ref = grouped(grouped_gemm_torch, *exact)
    expected = [ref, *torch.autograd.grad(ref.square().sum(), exact)]
    for eager, compiled, wanted in zip(*results, expected, strict=True):
        assert torch.equal(eager, compiled) and relative_error(eager, wanted) < 2e-2


def test_selected_rows_under_vmap_and_in_a_graph_with_out():
    a, b, ends, rows, out_rows = selected([20, 0, 9], 12, 32, 24)
    samples = torch.randn(2, *a.shape).to(BF16)
    with sim.device():
        found = torch.vmap(lambda x: grouped_gemm(x, b, ends, rows=rows))(samples)
        each = torch.stack([grouped_gemm(x, b, ends, rows=rows) for x in samples])
        assert torch.equal(found[:, :29], each[:, :29])
        out = poison(torch.empty(39, 32, dtype=BF16))
        compiled = torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager")
        compiled(a, b, ends, rows=rows, out_rows=out_rows, out=out)
    check_selected(out, a, b, ends, rows, out_rows)


# ---------------------------------------------------------------- as torch sees them


def test_the_reference_is_torchs():
    a, b, ends = operands("rows", [3, 0, 5], 0, 24, 16)
    torch.testing.assert_close(grouped_gemm_torch(a, b, ends)[3:], a[3:].double() @ b[2].double())
    if hasattr(functional, "grouped_mm"):
        found = functional.grouped_mm(a, b, offs=ends)
        torch.testing.assert_close(grouped_gemm_torch(a, b, ends), found.double(), atol=0.1, rtol=0.02)


def test_the_reference_scales_blocks():
    a, b, ends = operands("rows", [3, 0, 5], 0, 136, 200, E4M3, rest=1)
    given = block_scales(9, 3, 136, 200)
    exact_a = a.double() * given["scale_a"].repeat_interleave(128, 1)[:, :200]
    exact_b = b.double() * given["scale_b"].repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :136]
    expected = grouped_gemm_torch(exact_a, exact_b, ends)
    torch.testing.assert_close(grouped_gemm_torch(a, b, ends, **given), expected)


IDS = {
    "padding": ([0, 0, -1, 1, -1, -1, 3, -1], [3, 6, 6, 7]),
    "padding first": ([-1, -1, 2], [2, 2, 3, 3]),
    "no padding": ([0, 1, 1, 3], [1, 3, 3, 4]),
    "padding only": ([-1, -1], [0, 0, 0, 0]),
    "nothing": ([], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", IDS)
def test_ends_of_groups(name):
    ids, ends = (torch.tensor(x, dtype=torch.int32) for x in IDS[name])
    functions = [ends_of_groups]
    if name == "padding":
        functions.append(torch.compile(ends_of_groups, fullgraph=True, backend="aot_eager"))
    for function in functions:
        found = function(ids, 4)
        assert found.dtype == torch.int32 and torch.equal(found, ends)


@pytest.mark.parametrize("ids, kind", [([0], TypeError), (ENDS.long(), TypeError), (ENDS[None], ValueError)], ids=str)
def test_ids_of_another_kind(ids, kind):
    with refused("ends_of_groups: ids ", kind):
        ends_of_groups(ids, 2)


def test_opcheck():
    given = [operands(kind, [3, 0, 5], 16, 24, 16) for kind in ("rows", "depth", "cols")]
    with sim.device():
        for i, (a, b, ends) in enumerate(given):
            numbers = torch.arange(8, dtype=torch.int32) if i == 0 else None
            torch.library.opcheck(
                grouped_gemm_operator,
                (a.requires_grad_(), b.requires_grad_(), ends, *[None] * 5, numbers, numbers, *[None] * 3, False),
                test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
            )
        a, b, ends = operands("rows", [3, 0, 5], 0, 24, 16, E4M3)
        scales = block_scales(8, 3, 24, 16).values()
        given = (a, b, ends, None, None, None, *scales, *[None] * 5, False)
        torch.library.opcheck(grouped_gemm_operator, given, test_utils="test_faketensor")


def test_torch_compile_sees_the_operator():
    a, b, ends = operands("rows", [3, 0, 5], 0, 24, 16, b_nk=True)
    leaves = [a.requires_grad_(), b.requires_grad_()]
    with sim.device():
        results = []
        for function in (grouped_gemm, torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager")):
            out = function(*leaves, ends)
            results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_out_keeps_rows_of_no_group_in_a_graph():
    a, b, ends = operands("rows", [3, 2], 0, 24, 16, rest=3)
    with sim.device():
        out = torch.full((8, 24), 7, dtype=BF16)
        torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager")(a, b, ends, out=out)
    check(out, "rows", a, b, ends)
    assert (out[5:] == 7).all()


def test_vmap_and_second_derivatives():
    a, b, ends = operands("rows", [3, 0, 5], 0, 24, 16)
    samples = torch.randn(2, *a.shape).to(BF16)
    with sim.device():
        found = torch.vmap(lambda x: grouped_gemm(x, b, ends))(samples)
        assert torch.equal(found, torch.stack([grouped_gemm(x, b, ends) for x in samples]))
        a, b = a.requires_grad_(), b.requires_grad_()
        (d_a,) = torch.autograd.grad(grouped_gemm(a, b, ends).float().square().sum(), a, create_graph=True)
        (second,) = torch.autograd.grad(d_a.sum(), b)
    assert second.shape == b.shape and second.isfinite().all()


@pytest.mark.parametrize("m, k, groups", [(0, 16, 2), (8, 0, 2), (8, 16, 0)])
def test_nothing_to_multiply(m, k, groups):
    a, b, ends = torch.ones(m, k, dtype=BF16), torch.ones(groups, k, 24, dtype=BF16), ends_of([m // 2] * groups)
    out = torch.full((m, 24), 7, dtype=BF16)
    with sim.device():
        assert grouped_gemm(a, b, ends).shape == (m, 24)
        grouped_gemm(a, b, ends, out=out)
        weights = grouped_gemm(a.mT, out, ends)
    ended = int(ends[-1]) if groups else 0
    assert (out[:ended] == 0).all() and (out[ended:] == 7).all() and weights.shape == (groups, k, 24)


def test_block_scales_of_no_depth():
    a, b, ends = operands("rows", [3, 0], 0, 24, 0, E4M3, rest=2)
    out, bias = torch.full((5, 24), 7, dtype=BF16), torch.randn(2, 24)
    with sim.device():
        grouped_gemm(a, b, ends, bias=bias, out=out, config=BLOCKWISE, **block_scales(5, 2, 24, 0))
    assert torch.equal(out[:3], bias[:1].to(BF16).expand(3, 24)) and (out[3:] == 7).all()


@pytest.mark.parametrize("dtype, bias", [(BF16, True), (torch.float32, False)])
def test_module(dtype, bias):
    """As a `torch.nn.Linear` for each group; fp32 runs in torch."""
    layer = GroupedLinear(3, 16, 24, bias=bias, dtype=dtype)
    assert layer.weight.abs().max() <= 0.25 and layer.weight.std() > 0.1 and f"bias={bias}" in repr(layer)
    x, sizes = torch.randn(8, 16).to(dtype).requires_grad_(), [3, 0, 5]
    with sim.device() as device:
        y = layer(x, ends_of(sizes))
        found = [y, *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))]
        compiled = torch.compile(layer, fullgraph=dtype == BF16, backend="aot_eager")(x, ends_of(sizes))
        assert (len(device.launches) > 0) == (dtype == BF16)
        if bias:  # added in the kernel, before the result is rounded
            assert torch.equal(y, grouped_gemm(x, layer.weight.mT, ends_of(sizes), bias=layer.bias))
    assert torch.equal(compiled, y)
    leaves = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    parts = [functional.linear(part, leaves[1][g]) for g, part in enumerate(leaves[0].split(sizes))]
    parts = [part + leaves[2][g] for g, part in enumerate(parts)] if bias else parts
    ref = torch.cat(parts)
    expected = [ref, *torch.autograd.grad(ref.square().sum(), leaves)]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype and relative_error(a, b) < (2e-2 if dtype == BF16 else 1e-6)


# ---------------------------------------------------------------- machine code


QUICK = {("grouped_gemm_256_groups", "sm_90a"), ("grouped_gemm_block_scales", "sm_90a")}


@pytest.mark.parametrize(
    "name, arch",
    [
        (pytest.param if (name, arch) in QUICK else slow)(name, arch)
        for name in inspectable
        for arch in ("sm_90a", "sm_100a")
    ],
)
def test_contract(name, arch):
    gpu = Device.of_gpu(GPUS["H200" if arch == "sm_90a" else "B200"])
    report = inspect(recorded(inspectable[name].call, gpu)[-1].compile(arch))
    products = ("HGMMA", "QGMMA") if arch == "sm_90a" else ("UTCHMMA", "UTCQMMA")
    assert sum(report.mma.get(product, 0) for product in products) > 0
    assert report.wgmma_serialized is not True and not report.remarks
    assert report.spill_instructions == report.spill_store_bytes == report.spill_load_bytes == 0
    by_threads = arch == "sm_90a"
    gathered, scattered = "gathered" in name and by_threads, "scattered" in name and by_threads
    assert report.counts["UTMALDG"] > 0 and (report.counts.get("UTMASTG", 0) == 0) == scattered
    assert (report.counts.get("LDGSTS", 0) == 16) == gathered, "16 bytes of 128 rows by 64 threads"
    for loop in report.loops if arch == "sm_90a" else ():
        assert not any(loop.counts.get(i, 0) for i in ("LDG", "REDUX")), "no lookup in the main loop"
        # scales of two rows of a thread, and of two column blocks; fences of gathered tiles are padded with empty LDS
        assert gathered or loop.counts.get("LDS", 0) <= (4 if name == "grouped_gemm_block_scales" else 0)


def test_device_code_is_short():
    tree = ast.parse(python_inspect.getsource(grouped))
    hooks = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    hooks = [node for node in hooks if ast.unparse(node.decorator_list[0]) == "triton.jit"]
    assert len(hooks) == 8 and sum(logical_lines(ast.unparse(node)) for node in hooks) <= 90
