"""Gated products and their gradients against float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_gemm import matrix, randn, short
from tests.util import DEVICE, crossed, drawn, poison, relative_error, seeds, slow
from tritonkittens.kernels.gated_gemm import Config, call_plan, gated_gemm, gated_gemm_torch

pytestmark = pytest.mark.usefixtures("kernel_device")

BF16, FP16 = torch.bfloat16, torch.float16
BOUNDS = {BF16: 4e-3, FP16: 5e-4}  # of the relative error of a result that is rounded once
CONFIGS = {
    "default": None,
    "two consumers": short(Config(tile_n=128)),
    "sub-tiles": short(Config(consumers=1, tile_n=256, epilogue_n=32)),
    "deferred": short(Config(tile_n=128, epilogue_n=32, deferred_epilogue=True)),
    "pingpong": short(Config(tile_n=128, pingpong=True, epilogue_n=32)),
    "tall": short(Config(tile_m=128, tile_n=128, consumers=1)),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Results have poison where no kernel writes."""
    allocator, padded_empty = call_plan.allocator, call_plan.padded_empty
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "allocator", lambda *kind: lambda: poison(allocator(*kind)()))
    monkeypatch.setattr(call_plan, "padded_empty", lambda *kind: poison(padded_empty(*kind)))


def operands(m, n, k, dtype=BF16, a_km=False, b_nk=True):
    """(a, gate, up), of which products have entries about 1."""
    a, *weights = matrix(m, k, torch.float32, a_km), *(matrix(k, n, torch.float32, b_nk) for _ in range(2))
    return a.to(dtype), *((w / max(k, 1) ** 0.5).to(dtype) for w in weights)


def check(given, activation="silu", config=None):
    """The result, against float64."""
    found = gated_gemm(*given, activation=activation, config=config)
    expected = gated_gemm_torch(*(t.double() for t in given), activation=activation)
    assert found.dtype == given[0].dtype and found.is_contiguous()
    # deferred results are rounded once, too: both sums are in registers until then
    assert relative_error(found, expected) < BOUNDS[found.dtype]
    return found


@pytest.mark.parametrize(
    "extents, layouts, dtype, activation",
    crossed(
        [(90, 88, 64), (1, 8, 8), (200, 136, 200), (3, 5, 7), (65, 129, 1)],
        [(False, True), (False, False), (True, True), (True, False)],
        [BF16, FP16],
        ["silu", "gelu_tanh"],
    ),
    ids=str,
)
def test_layouts(extents, layouts, dtype, activation):
    check(operands(*extents, dtype, *layouts), activation)


@pytest.mark.parametrize("b_nk", [True, slow(False)])
@pytest.mark.parametrize("name", ["deferred", *(slow(n) for n in CONFIGS if n != "deferred")])
def test_configurations(name, b_nk):
    """Rings of 0, 1, and more iterations than stages; tiles that reach beyond the edges."""
    for k in (32, 200) if name == "deferred" else (64, 65, 320):
        check(operands(150, 152, k, b_nk=b_nk), config=CONFIGS[name])


def test_weights_in_one_tensor():
    """Halves, and alternating rows."""
    a, w = randn(40, 64), randn(2 * 24, 64) / 8
    for gate, up in ((w[:24].T, w[24:].T), (w[0::2].T, w[1::2].T)):
        check((a, gate, up))


@pytest.mark.parametrize("m, n, k", [(0, 8, 8), (8, 0, 8), (8, 16, 0)])
def test_nothing_to_multiply(m, n, k):
    found = gated_gemm(randn(m, k), randn(k, n), randn(k, n))
    assert found.shape == (m, n) and not found.any()


def test_leading_dimensions_and_gradients():
    x, gate, up = operands(2 * 3 * 7, 40, 48)
    given = [x.view(2, 3, 7, 48).requires_grad_(), gate.requires_grad_(), up.requires_grad_()]
    found = gated_gemm(*given)
    direction = torch.randn_like(found)
    gradients = torch.autograd.grad(found, given, direction)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = gated_gemm_torch(*exact)
    references = torch.autograd.grad(expected, exact, direction.double())
    assert found.shape == (2, 3, 7, 40) and torch.equal(gated_gemm(given[0][0, 0, 0], gate, up), found[0, 0, 0])
    for a, b, leaf in zip((found, *gradients), (expected, *references), (found, *given), strict=True):
        assert a.shape == leaf.shape and a.dtype == BF16
        assert relative_error(a, b) < 1.2e-2  # gradients are of products that are rounded
    assert gradients[1].stride() == gate.stride(), "as torch keeps the gradient of a weight"


# configuration, dtype, layouts, activation
SORTS = [
    ("sub-tiles", BF16, (False, True), "silu"),
    ("deferred", FP16, (False, False), "gelu_tanh"),
    ("default", BF16, (True, True), "silu"),
    ("pingpong", BF16, (True, False), "gelu_tanh"),
    ("two consumers", FP16, (False, True), "gelu_tanh"),
    ("tall", BF16, (False, True), "silu"),
]


@seeds
def test_random(seed):
    draw, (name, dtype, layouts, activation) = drawn(seed, SORTS)
    m, n, k = (draw.choice([draw.randint(1, 130), 8 * draw.randint(1, 20), 64, 65, 128]) for _ in range(3))
    check(operands(m, n, k, dtype, *layouts), activation, CONFIGS[name])


def test_the_same_bits_in_every_run():
    given = operands(130, 136, 200)
    assert torch.equal(check(given), check(given))


def test_a_graph_has_it():
    if DEVICE == "cpu":
        pytest.skip("a graph needs a GPU")
    given = operands(130, 136, 200)
    gated_gemm(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gated_gemm(*given)
    given[0].normal_()
    graph.replay()
    assert torch.equal(found, gated_gemm(*given))
