"""Mixtures of experts against a plain one in float64, forward and backward, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_experts import BF16, BOUNDS, FP16, FP32, check, choices_of, operands, poisoned
from tests.util import DEVICE, drawn, on_gpu_or_simulated, relative_error, seeds, slow
from tritonkittens.kernels.experts import combine_tokens, experts, experts_torch, gather_tokens, route

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.fixture(autouse=True)
def poison_in_results(monkeypatch):
    poisoned(monkeypatch)


@pytest.mark.parametrize(
    "tokens, k, count, hidden, intermediate, dtype",
    [
        (37, 3, 5, 72, 40, BF16),
        (1, 2, 8, 64, 64, BF16),
        slow(0, 2, 4, 64, 64, BF16),
        slow(130, 1, 3, 128, 96, FP16),
        slow(50, 8, 64, 136, 72, BF16),
    ],
)
def test_sizes(tokens, k, count, hidden, intermediate, dtype):
    check(operands(tokens, k, count, hidden, intermediate, dtype))


@pytest.mark.parametrize("activation", [slow("silu"), "gelu_tanh"])
def test_activations_and_weights_of_half_types(activation):
    check(operands(20, 2, 4, 64, 48, BF16, weight_dtype=BF16), activation)


def test_one_expert_has_everything_and_others_nothing():
    index = torch.full((70, 1), 2, device=DEVICE)
    check(operands(70, 1, 4, 64, 48, BF16, index.to(torch.int32)))


def test_choices_of_experts_elsewhere_count_nothing():
    index = choices_of(30, 3, 4, elsewhere=3)
    index[index == 5] = -1
    check(operands(30, 3, 4, 64, 48, BF16, index))
    check(operands(30, 3, 4, 64, 48, BF16, torch.full_like(index, 9)))


@pytest.mark.parametrize("tokens, k, count", [(40, 3, 7), (1, 1, 1), (0, 2, 3)])
def test_routes(tokens, k, count):
    """Rows are sorted by expert, those of one expert by token; each choice finds its row."""
    index = torch.randint(-1, count + 1, (tokens, k), device=DEVICE)
    routing = route(index, count)
    assert [t.dtype for t in routing] == [torch.int32] * 3
    expert = index.flatten()[routing.choices.long()]
    for e, (begin, end) in enumerate(zip([0, *routing.ends.tolist()], routing.ends.tolist(), strict=False)):
        assert (expert[begin:end] == e).all() and (routing.choices[begin:end].diff() > 0).all()
        assert end - begin == (index == e).sum()
    here = (index >= 0) & (index < count)
    assert (routing.places[~here] == -1).all()
    rows = routing.places[here].long()
    assert torch.equal(routing.choices[rows].long(), here.flatten().nonzero()[:, 0])


@pytest.mark.parametrize("width, dtype", [(1, FP32), (7, BF16), (1000, FP16), slow(4104, BF16)])
def test_moves_of_rows(width, dtype):
    """Rows of tokens are copied; sums of copies are rounded once, whatever lies in rows of experts elsewhere."""
    tokens, k, count = 21, 3, 4
    index = choices_of(tokens, k, count, elsewhere=2)
    routing, x = route(index, count), torch.randn(tokens, width, device=DEVICE).to(dtype)
    y = gather_tokens(x, routing)
    last = int(routing.ends[-1])
    assert torch.equal(y[:last], x[routing.choices[:last].long() // k]) and (y[last:] == 0).all()
    y[last:] = float("nan")
    here = (index < count).double()
    for weights in (None, torch.rand(tokens, k, device=DEVICE)):
        scale = here if weights is None else here * weights.double()
        expected = x.double() * scale.sum(1, keepdim=True)
        bound = {BF16: 3e-3, FP16: 4e-4, FP32: 3e-7}[dtype]
        assert relative_error(combine_tokens(y, weights, routing), expected) < bound


@pytest.mark.parametrize("activation", ["silu", slow("gelu_tanh")])
def test_without_gradients(activation):
    """The first product gates; with experts that have nothing and choices elsewhere."""
    tokens = on_gpu_or_simulated(700, 30)
    index = choices_of(tokens, 3, 4, elsewhere=3)
    index[index == 5] = -1
    given = operands(tokens, 3, 6, 64, 48, BF16, index)
    with torch.no_grad():
        y = experts(*given, activation=activation)
    assert relative_error(y, experts_torch(*given, activation=activation)) < BOUNDS[BF16]


def test_strided_operands():
    x, index, weights, gate_up, down = operands(24, 2, 4, 64, 48, BF16)
    strided = [t.detach().mT.contiguous().mT.requires_grad_() for t in (x, weights, gate_up, down)]
    check((strided[0], index, *strided[1:]))


def test_repeatable():
    given = operands(on_gpu_or_simulated(600, 9), 2, 3, 64, 48, BF16)
    torch.manual_seed(1)
    first = check(given)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, check(given), strict=True))


# columns of tokens and of an expert's inner vectors; experts, and those of a token; dtypes of both and of weights;
# activation
SORTS = [
    (64, 48, 5, 2, BF16, FP32, "silu"),
    (64, 48, 5, 3, BF16, FP32, "silu"),
    (72, 40, 16, 4, FP16, BF16, "gelu_tanh"),
    (40, 96, 2, 1, BF16, BF16, "gelu_tanh"),
    (128, 64, 1, 1, FP16, FP32, "silu"),
]


@seeds
def test_random(seed):
    """Experts with any tokens or none, and some elsewhere."""
    draw, (hidden, intermediate, count, k, dtype, of_weights, activation) = drawn(seed, SORTS)
    tokens = draw.choice([2, 3, draw.randint(2, 40)])
    index = choices_of(tokens, k, count, elsewhere=draw.choice([0, 0, 2]))
    check(operands(tokens, k, count, hidden, intermediate, dtype, index, of_weights), activation)


@pytest.mark.skipif(DEVICE == "cpu", reason="a graph needs a GPU")
def test_a_graph_has_it_with_other_choices():
    x, index, weights, gate_up, down = (t.detach() for t in operands(64, 4, 16, 128, 96, BF16))
    experts(x, index, weights, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts(x, index, weights, gate_up, down)
    for _ in range(3):
        index.copy_(choices_of(64, 4, 16))
        graph.replay()
        assert torch.equal(y, experts(x, index, weights, gate_up, down))
