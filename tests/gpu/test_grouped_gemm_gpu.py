"""Grouped products against float64, on the GPU, or simulated."""

import random

import pytest
import torch

from tests.cases_gemm import KINDS, randn
from tests.cases_grouped import BF16, FP16, FP32, SIZES, check, ends_of, grouped_part, operands
from tests.util import DEVICE, crossed, on_gpu_or_simulated, poison, slow
from tritonkittens.kernels.grouped_gemm import grouped_gemm
from tritonkittens.kernels.grouped_gemm.checks import check_config

pytestmark = pytest.mark.usefixtures("kernel_device")

GROUPS = ["rows", "depth", "cols"]


def run(kind, a, b, ends, dtype=None, **options):
    """Check a product into poisoned memory; what no group has stays."""
    dtype = dtype or a.dtype
    shape = (ends.shape[0], a.shape[0], b.shape[1]) if kind == "depth" else (a.shape[-2], b.shape[-1])
    out = poison(torch.empty(shape, dtype=dtype, device=a.device))
    assert grouped_gemm(a, b, ends, out=out, out_dtype=dtype, **options) is out
    check(out, kind, a, b, ends)
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
        check_config(config, randn(1, 1), randn(1, 1) if kind == "depth" else randn(1, 1, 1))
    except ValueError:
        return False
    return True


QUICK = {("rows", "cluster"), ("depth", "deferred"), ("rows", "swap_ab"), ("depth", "pingpong")}


@pytest.mark.parametrize(
    "kind, name",
    [
        (pytest.param if (kind, name) in QUICK else slow)(kind, name)
        for kind in GROUPS
        for name, config in KINDS.items()
        if _takes(config, kind)
    ],
)
def test_configurations(kind, name):
    run(kind, *operands(kind, [200, 0, 1, 129], 200, 136, 200), config=KINDS[name])


@pytest.mark.parametrize("kind", ["rows", slow("depth")])
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


def test_random_groups():
    for _ in range(on_gpu_or_simulated(40, 2)):
        kind = random.choice(GROUPS)
        limit = on_gpu_or_simulated(3000, 60)
        sizes = [random.choice([0, 1, random.randrange(limit)]) for _ in range(random.randrange(1, 9))]
        m, n, k = (random.randrange(1, 300) for _ in range(3))
        flags = random.random() < 0.5, random.random() < 0.5
        run(kind, *operands(kind, sizes, m, n, k, random.choice([BF16, FP16]), *flags, rest=random.randrange(9)))


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
