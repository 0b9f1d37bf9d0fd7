"""Grouped products against float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_gemm import E4M3, E5M2, KINDS, randn, short
from tests.cases_grouped import (
    BF16,
    FP16,
    FP32,
    SIZES,
    block_scales,
    check,
    check_selected,
    ends_of,
    epilogue,
    grouped_part,
    operands,
    selected,
)
from tests.util import DEVICE, crossed, drawn, poison, relative_error, seeds, slow, some_slow
from tritonkittens.kernels.gemm import Config
from tritonkittens.kernels.grouped_gemm import ends_of_groups, grouped_gemm, grouped_gemm_torch
from tritonkittens.kernels.grouped_gemm.checks import Operands, check_config, result_shape
from tritonkittens.kernels.grouped_gemm.reference import rows_of

pytestmark = pytest.mark.usefixtures("kernel_device")

GROUPS = ["rows", "depth", "cols"]


def run(kind, a, b, ends, dtype=None, config=None, **given):
    """Check a product into poisoned memory; what no group has stays."""
    dtype = dtype or a.dtype
    shape = result_shape(a, b, ends, given.get("activation"))
    out = poison(torch.empty(shape, dtype=dtype, device=a.device))
    assert grouped_gemm(a, b, ends, out=out, out_dtype=dtype, config=config, **given) is out
    check(out, kind, a, b, ends, deferred=config is not None and config.deferred_epilogue, **given)
    assert out.isnan().sum() == out.numel() - grouped_part(out, kind, ends).numel()


@pytest.mark.parametrize(
    "sizes, kind, layouts, dtype, extents",
    crossed(
        list(SIZES),
        GROUPS,
        [(False, True), (True, False), (True, True), (False, False)],
        [BF16, FP16],
        [(72, 136, 88), (50, 37, 41)],
    ),
    ids=str,
)
def test_groups(sizes, kind, layouts, dtype, extents):
    (a_km, b_nk), (m, n, k) = layouts, extents
    run(kind, *operands(kind, SIZES[sizes], m, n, k, dtype, a_km, b_nk, rest=8))


def _takes(config, kind):
    try:
        check_config(config, randn(1, 1), randn(1, 1) if kind == "depth" else randn(1, 1, 1), Operands(), None)
    except ValueError:
        return False
    return True


QUICK = {("depth", "deferred"), ("rows", "three consumers")}
WIDE = short(Config(consumers=3, tile_n=48))


@pytest.mark.parametrize(
    "kind, name",
    [
        (pytest.param if (kind, name) in QUICK else slow)(kind, name)
        for kind in GROUPS
        for name, config in (KINDS | {"three consumers": WIDE}).items()
        if _takes(config, kind)
    ],
)
def test_configurations(kind, name):
    run(kind, *operands(kind, [200, 0, 1, 129], 200, 136, 200), config=KINDS.get(name, WIDE))


EPILOGUES = {
    "bias silu": (["bias"], "silu"),
    "router": (["gate"], None),
    "bias gelu gate residual": (["bias", "gate", "residual"], "gelu"),
    "residual": (["residual"], None),
    "scales": (["scale_a", "scale_b"], None),
}
CONFIGS = ["small", "deferred", "cluster", "swap_ab", "pingpong"]


@pytest.mark.parametrize(
    "name, config, b_nk, dtype", crossed(list(EPILOGUES), CONFIGS, [True, False], [BF16, FP16]), ids=str
)
def test_epilogues(name, config, b_nk, dtype):
    names, activation = EPILOGUES[name]
    if config == "swap_ab" and {"gate", "scale_a"} & set(names):
        pytest.skip("values for rows need the rows of the kernel")
    a, b, ends = operands("rows", [90, 0, 1, 70], 0, 72, 64, dtype, b_nk=b_nk, rest=5)
    given = epilogue(names, a.shape[0], b.shape[0], 72, dtype)
    run("rows", a, b, ends, config=KINDS[config], **given, **({"activation": activation} if activation else {}))


GATES = {
    "default": None,
    "deferred": short(Config(tile_n=128, epilogue_n=32, deferred_epilogue=True)),
    "pingpong": short(Config(tile_n=128, pingpong=True, epilogue_n=32)),
}


@pytest.mark.parametrize(
    "activation, config, b_nk, names",
    crossed(["swiglu", "geglu"], list(GATES), [True, False], [[], ["gate", "residual"]]),
    ids=str,
)
def test_gated(activation, config, b_nk, names):
    a, b, ends = operands("rows", [90, 0, 1, 70], 0, 176, 64, b_nk=b_nk, rest=5)
    run("rows", a, b, ends, config=GATES[config], activation=activation, **epilogue(names, a.shape[0], 4, 88))


@pytest.mark.parametrize("kind, config", [(E4M3, None), slow(E5M2, None), slow(E4M3, KINDS["swap_ab"])], ids=str)
def test_eight_bits(kind, config):
    a, b, ends = operands("rows", [90, 0, 1, 70], 0, 80, 160, kind, b_nk=True, rest=3)
    given = epilogue(["scale_b"] if config else ["scale_a", "scale_b"], a.shape[0], b.shape[0], 80)
    run("rows", a, b, ends, BF16, config, **given)


BLOCKWISE = {
    "small": short(Config(tile_n=64, tile_k=128, consumers=1)),
    "two consumers": short(Config(tile_n=128, tile_k=128)),
    "cluster": short(Config(tile_n=64, tile_k=128, consumers=1, cluster=2)),
    "wide": short(Config(tile_n=256, tile_k=128, consumers=1, epilogue_n=64)),
    "default": None,
}


BLOCK_CASES = [
    (sizes, config, [(72, 300), (136, 72), (264, 128)][(i + j) % 3], [BF16, FP32, FP16][(i + 2 * j) % 3])
    for i, sizes in enumerate(SIZES)
    for j, config in enumerate(BLOCKWISE)
]


@pytest.mark.parametrize(
    "sizes, config, extents, dtype",
    some_slow(BLOCK_CASES, [case for case in BLOCK_CASES if case[:2] in (("ragged", "small"), ("empty", "wide"))]),
    ids=str,
)
def test_block_scales(sizes, config, extents, dtype):
    """Groups begin at rows whose scales TMA does not load from. Scales of rows of no group are NaN."""
    n, k = extents
    a, b, ends = operands("rows", SIZES[sizes], 0, n, k, E4M3, b_nk=True, rest=3)
    given = block_scales(a.shape[0], b.shape[0], n, k)
    given["scale_a"][ends[-1] :] = float("nan")
    run("rows", a, b, ends, dtype, BLOCKWISE[config], **given)


@pytest.mark.parametrize("config", ["small", *map(slow, ("wide", "default"))])
def test_block_scales_with_an_epilogue(config):
    """Scales of a with M contiguous, and those of b as DeepGEMM has them, are not copied."""
    a, b, ends = operands("rows", [33, 0, 1, 90], 0, 72, 520, E4M3, b_nk=True)
    given = block_scales(124, 4, 72, 520) | epilogue(["bias", "gate", "residual"], 124, 4, 72)
    given["scale_a"], given["scale_b"] = (given[name].mT.contiguous().mT for name in ("scale_a", "scale_b"))
    run("rows", a, b, ends, BF16, BLOCKWISE[config], activation="silu", **given)


@pytest.mark.parametrize("columns_first", [False, slow(True)])
def test_block_scales_of_counted_rows(columns_first):
    """Scales of a by rows, or with M contiguous in each group, as DeepGEMM has them."""
    counts, rows, n, k = [3, 0, 70, 5], 70, 72, 200
    groups = len(counts)
    a, b = randn(groups, rows, k, dtype=E4M3), randn(groups, n, k, dtype=E4M3).mT
    given = block_scales(groups * rows, groups, n, k)
    scale_a = given["scale_a"].unflatten(0, (groups, rows))
    for group, count in enumerate(counts):
        scale_a[group, count:] = float("nan")
    scale_a = scale_a.mT.contiguous().mT if columns_first else scale_a
    out = poison(torch.empty(groups, rows, n, dtype=BF16, device=DEVICE))
    numbers = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    grouped_gemm(a, b, counts=numbers, out=out, config=BLOCKWISE["small"], scale_a=scale_a, scale_b=given["scale_b"])
    for group, count in enumerate(counts):
        mine = dict(scale_a=scale_a[group, :count], scale_b=given["scale_b"][group : group + 1])
        check(out[group, :count], "rows", a[group, :count], b[group : group + 1], ends_of([count]), **mine)
        assert out[group, count:].isnan().all()


def test_rows_that_carry_their_group():
    """Segments of 128 rows, with padding, as DeepGEMM has them."""
    sizes, n, k = [100, 0, 128, 5], 72, 128
    ids = torch.full((512,), -1, dtype=torch.int32, device=DEVICE)
    starts = [0, 128, 128, 256]
    for group, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        ids[start : start + size] = group
    a, b, _ = operands("rows", [512], 0, n, k, E4M3)
    b, given = randn(4, n, k, dtype=E4M3).mT, block_scales(512, 4, n, k)
    ends = ends_of_groups(ids, 4)
    assert ends.tolist() == [128, 128, 256, 261]
    run("rows", a, b, ends, BF16, BLOCKWISE["small"], **given)


@pytest.mark.parametrize("kind", [slow("rows"), slow("depth")])
def test_wider_results(kind):
    run(kind, *operands(kind, [30, 70], 64, 72, 64), dtype=FP32)


def test_infinities_of_a_group_stay_in_it():
    """Also where a tile of the depth reaches into the next group."""
    a, b, ends = operands("depth", [5, 60, 3], 64, 72, 0, a_km=True)
    a[:, 5:65], b[65:] = float("inf"), float("nan")
    out = grouped_gemm(a, b, ends)
    check(out[:1], "depth", a[:, :5], b[:5], ends[:1])
    assert not out[1].isfinite().any() and out[2].isnan().all()


def test_offsets_that_fall_or_leave_the_tensor_write_inside_only():
    a, b, _ = operands("rows", [20] * 4, 0, 64, 64)
    memory = poison(torch.empty(120, 64, dtype=BF16, device=DEVICE))
    grouped_gemm(a, b, torch.tensor([90, -7, 30, 2**30], dtype=torch.int32, device=DEVICE), out=memory[20:100])
    assert memory[:20].isnan().all() and memory[100:].isnan().all()


def run_selected(given, names, config=None, **others):
    """Check a product whose rows `names` select, into poisoned memory."""
    a, b, ends, rows, out_rows = given
    numbers = {name: x for name, x in (("rows", rows), ("out_rows", out_rows)) if name in names}
    a = a if "rows" in names else rows_of(a, rows)
    n = b.shape[-1] // (2 if others.get("activation") == "swiglu" else 1)
    height = rows.shape[0] + (7 if "out_rows" in names else 0)
    out = poison(torch.empty(height, n, dtype=a.dtype, device=a.device))
    assert grouped_gemm(a, b, ends, out=out, config=config, **numbers, **others) is out
    check_selected(out, a, b, ends, numbers.get("rows"), numbers.get("out_rows"), **others)


BOTH = ("rows", "out_rows")
SELECTED = [(name, names, None) for name in ("small", "pingpong", "sub-tiles") for names in ("rows", "out_rows")]
SELECTED += [("swap_ab", "rows", None), (None, "rows", "swiglu"), (None, BOTH, "swiglu")]


@pytest.mark.parametrize("name, names, activation", [(None, BOTH, None), *(slow(*case) for case in SELECTED)])
def test_selected_rows(name, names, activation):
    run_selected(selected([200, 0, 1, 129], 120, 136, 200), names, KINDS.get(name), activation=activation)


# groups of rows, depth or columns, or selected rows; configuration; dtype; layouts; epilogue; activation
SORTS = [
    ("rows", "small", BF16, (False, True), ["bias", "gate", "residual"], "silu"),
    ("selected", "small", BF16, BOTH, [], None),
    ("depth", "small", BF16, (True, False), [], None),
    ("rows", "small", E4M3, (False, True), ["scale_a", "scale_b"], None),
    ("cols", "small", FP16, (False, False), [], None),
    ("rows", "gated", BF16, (False, True), ["gate", "residual"], "swiglu"),
    ("selected", "default", BF16, BOTH, [], "swiglu"),
    ("rows", "blocks", E4M3, (False, True), [], None),
    ("selected", "pingpong", FP16, ("rows",), [], None),
    ("rows", "swap_ab", FP16, (False, False), ["residual"], None),
    ("selected", "sub-tiles", BF16, ("out_rows",), [], None),
    ("rows", "cluster", BF16, (False, True), ["gate"], "gelu"),
]


@seeds
def test_random(seed):
    """Groups of any sizes, some of them empty, or all."""
    draw, (kind, name, dtype, layout, names, activation) = drawn(seed, SORTS)
    config = (KINDS | {"gated": GATES["deferred"], "blocks": BLOCKWISE["small"], "default": None})[name]
    sizes = [draw.choice([0, 1, 64, draw.randint(0, 70)]) for _ in range(draw.randint(1, 6))]
    rest, (n, k) = draw.randint(0, 8), (draw.choice([16, 48, 80, 144]) for _ in range(2))
    others = {"activation": activation} if activation else {}
    if kind == "selected":
        given = selected(sizes, draw.randint(1, 100), n, k, rest, dtype)
        return run_selected(given, layout, config, **others)
    a, b, ends = operands(kind, sizes, draw.choice([16, 72]), n, k, dtype, *layout, rest=rest)
    of_epilogue = epilogue(names, a.shape[0], len(sizes), n // 2 if activation == "swiglu" else n, dtype)
    if name == "blocks":
        of_epilogue = block_scales(a.shape[0], len(sizes), n, k)
        of_epilogue["scale_a"][ends[-1] :] = float("nan")
    run(kind, a, b, ends, BF16 if dtype == E4M3 else dtype, config, **of_epilogue, **others)


@pytest.mark.skipif(DEVICE == "cpu", reason="races show on a GPU")
def test_selected_rows_are_repeatable():
    """Many tasks a CTA, with more iterations than stages: stale tiles would change a result."""
    given = selected([700] * 32, 8192, 512, 2048)
    a, b, ends, rows, _ = given
    first = grouped_gemm(a, b, ends, rows=rows)[: int(ends[-1])]
    assert torch.equal(first, grouped_gemm(rows_of(a, rows), b, ends)[: int(ends[-1])]) or (
        relative_error(first, grouped_gemm_torch(rows_of(a, rows), b, ends)[: int(ends[-1])]) < 4e-3
    )
    for _ in range(50):
        assert torch.equal(first, grouped_gemm(a, b, ends, rows=rows)[: int(ends[-1])])


@pytest.mark.parametrize("names", ["rows", slow("out_rows")])
def test_selected_rows_of_fp8(names):
    a, b, ends, rows, out_rows = selected([33, 0, 40], 50, 64, 96)
    scales = dict(scale_a=torch.rand(78, device=DEVICE) + 0.5, scale_b=torch.rand(3, 64, device=DEVICE) + 0.5)
    given = a.to(E4M3), b.mT.contiguous().to(E4M3).mT, ends, rows, out_rows
    a, b, ends, rows, out_rows = given
    numbers = dict(rows=rows) if names == "rows" else dict(out_rows=out_rows)
    a = a if names == "rows" else rows_of(a, rows)
    out = poison(torch.empty(78, 64, dtype=BF16, device=DEVICE))
    grouped_gemm(a, b, ends, out=out, **numbers, **scales)
    check_selected(out, a, b, ends, numbers.get("rows"), numbers.get("out_rows"), **scales)


@pytest.mark.skipif(DEVICE == "cpu", reason="a graph needs a GPU")
def test_a_graph_follows_new_offsets():
    a, b, ends = operands("rows", [100, 50, 200, 34], 0, 256, 128)
    y = randn(a.shape[0], 256)
    grouped_gemm(a, b, ends), grouped_gemm(a.mT, y, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dw = grouped_gemm(a, b, ends), grouped_gemm(a.mT, y, ends)
    for sizes in ([0, 384, 0, 0], [96] * 4, [1, 2, 3, 4]):
        ends.copy_(ends_of(sizes))
        graph.replay()
        check(out, "rows", a, b, ends)
        check(dw, "depth", a.mT, y, ends)


@pytest.mark.skipif(DEVICE == "cpu", reason="a graph needs a GPU")
def test_a_graph_follows_new_ids():
    a, b, _ = operands("rows", [384], 0, 256, 400, E4M3)
    b, given = randn(4, 256, 400, dtype=E4M3).mT, block_scales(384, 4, 256, 400)
    ids = torch.zeros(384, dtype=torch.int32, device=DEVICE)
    grouped_gemm(a, b, ends_of_groups(ids, 4), **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ends = ends_of_groups(ids, 4)
        out = grouped_gemm(a, b, ends, **given)
    for sizes in ([0, 384, 0, 0], [96] * 4, [1, 2, 3, 4]):
        ids.fill_(-1)
        ids[: sum(sizes)] = torch.arange(4, device=DEVICE, dtype=torch.int32).repeat_interleave(
            torch.tensor(sizes, device=DEVICE)
        )
        graph.replay()
        assert torch.equal(ends, ends_of(sizes))
        check(out, "rows", a, b, ends, **given)


@pytest.mark.parametrize("kind, transposed", [("rows", True), slow("rows", False), ("cols", False)])
def test_gradients(kind, transposed):
    a, b, ends = operands(kind, [33, 0, 40], 72, 64, 48, b_nk=transposed, rest=3)
    a, b = a.requires_grad_(), b.requires_grad_()
    out = grouped_gemm(a, b, ends)
    grad = randn(*out.shape)
    d_a, d_b = torch.autograd.grad(out, (a, b), grad)
    assert kind == "cols" or d_b.stride() == b.stride()
    if kind == "rows":
        check(d_a, "rows", grad, b.mT, ends)
        check(d_b, "depth", a.mT, grad, ends)
        assert (d_a[73:] == 0).all()
    else:
        check(d_a, "depth", grad, b.mT, ends)
        check(d_b, "cols", a.mT, grad, ends)
        assert (d_b[:, 73:] == 0).all()


@pytest.mark.parametrize("activation", [slow(None), slow("silu"), "swiglu"])
def test_gradients_of_an_epilogue(activation):
    gated = activation == "swiglu"
    a, b, ends = operands("rows", [33, 0, 40], 0, 64 * (1 + gated), 48, b_nk=True, rest=3)
    given = epilogue(["gate", "residual"] if gated else ["bias", "gate", "residual"], 76, 3, 64)
    leaves = [t.requires_grad_() for t in (a, b, *given.values())]
    out = grouped_gemm(*leaves[:2], ends, **given, activation=activation)[:73]
    grad = randn(*out.shape)
    found = torch.autograd.grad(out, leaves, grad)
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    expected = grouped_gemm_torch(*exact[:2], ends, **dict(zip(given, exact[2:], strict=True)), activation=activation)
    for x, y in zip(found, torch.autograd.grad(expected[:73], exact, grad.cpu().double()), strict=True):
        assert relative_error(x, y) < 2e-2


def test_gradients_of_a_product_by_depth():
    a, b, ends = (t for t in operands("depth", [33, 0, 40], 64, 72, 0, a_km=True))
    a, b = a.requires_grad_(), b.requires_grad_()
    out = grouped_gemm(a, b, ends)
    grad = randn(*out.shape)
    d_a, d_b = torch.autograd.grad(out, (a, b), grad)
    check(d_a, "cols", grad, b.mT, ends)
    check(d_b, "rows", a.mT, grad, ends)


def test_without_offsets():
    a, b = randn(3, 40, 64), randn(3, 64, 72)
    torch.testing.assert_close(grouped_gemm(a, b), (a.double() @ b.double()).to(BF16), atol=0.1, rtol=0.02)


@pytest.mark.parametrize(
    "counts, config, names",
    [([3, 0, 70, 99, 5], None, []), slow([70] * 3, KINDS["swap_ab"], ["bias"]), slow([40], None, ["gate", "residual"])],
    ids=str,
)
def test_counts(counts, config, names):
    """Rows after a group's count, which are NaN, are neither read nor written."""
    groups, rows = len(counts), 70
    a, b = randn(groups, rows, 64), randn(groups, 72, 64).mT
    given = epilogue(names, groups * rows, groups, 72)
    given = {name: x if name == "bias" else x.unflatten(0, (groups, rows)) for name, x in given.items()}
    for group, count in enumerate(counts):
        a[group, count:] = float("nan")
    out = poison(torch.empty(groups, rows, 72, dtype=BF16, device=DEVICE))
    numbers = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    assert grouped_gemm(a, b, counts=numbers, out=out, config=config, **given) is out
    for group, count in enumerate(min(count, rows) for count in counts):
        mine = {name: x[group : group + 1] if name == "bias" else x[group, :count] for name, x in given.items()}
        check(out[group, :count], "rows", a[group, :count], b[group : group + 1], ends_of([count]), **mine)
        assert out[group, count:].isnan().all()
