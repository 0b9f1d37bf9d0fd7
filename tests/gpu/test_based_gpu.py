"""Based attention against its definition in float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_based import BOUND, GRADIENT_BOUND, STATE_BOUND, check, operands, poisoned, symmetric
from tests.cases_linear_attention import starts_of
from tests.util import crossed, drawn, seeds, slow, some_sequences
from tritonkittens.kernels.based import based_attention, based_attention_torch
from tritonkittens.kernels.linear_attention import config

pytestmark = pytest.mark.usefixtures("kernel_device")
OTHERS = [(True, False), (False, True), (False, False)]  # sequences that are cut, and results that are normalised


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    poisoned(monkeypatch)


@pytest.mark.parametrize(
    "length, values, state",
    crossed([150, 1, 63, 64, 65, 0, 2, 128, 129], [64, 128, 40, 200, 16], [True, False]),
    ids=str,
)
def test_lengths(length, values, state):
    """Rings of 0, 1 and 2 iterations, and edges of chunks. Sums of 16 columns do not vanish."""
    check(operands(2, length, 1, values, state))


@pytest.mark.parametrize("length", [slow(n) for n in (65, 128, 130, 200)])
@pytest.mark.parametrize("values", [64, slow(136)])
def test_segments(length, values, monkeypatch):
    """A sequence in parts that run at once."""
    monkeypatch.setattr(config, "SHORTEST", 1)
    check(operands(1, length, 2, values))


@pytest.mark.parametrize("lengths", [[66, 0, 1, 70], slow([70, 0, 130]), slow([5] * 40), slow([0, 0])], ids=str)
@pytest.mark.parametrize(
    "cut, normalize", [(True, True), *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS)], ids=str
)
def test_packed_sequences(lengths, cut, normalize, monkeypatch):
    monkeypatch.setattr(config, "SHORTEST", 1 if cut else 64)
    given = operands(1, sum(lengths) + 9, 1, 64, state=not normalize, sequences=len(lengths))
    check(given, starts_of(lengths), normalize=normalize)


@pytest.mark.parametrize("values", [64, slow(24), slow(128)])
def test_normalized(values):
    """States have one column more, of which sums of weights are made."""
    q, k, v, _ = operands(1, 100, 2, values, state=False)
    first, state = check((q[:, :70], k[:, :70], v[:, :70], None), normalize=True)
    assert state.shape[-1] == values + 1
    second, _ = check((q[:, 70:], k[:, 70:], v[:, 70:], state), normalize=True)
    expected, _ = based_attention_torch(q, k, v, normalize=True)
    assert (torch.cat([first, second], 1) - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize("at", [slow(64), slow(1), slow(100)])
def test_a_sequence_cut_anywhere_gives_the_same(at):
    *tensors, state = operands(1, 150, 1, 64)
    whole, last = check((*tensors, state))
    first, between = based_attention(*(x[:, :at] for x in tensors), initial_state=state, output_final_state=True)
    second, end = based_attention(*(x[:, at:] for x in tensors), initial_state=between, output_final_state=True)
    assert (torch.cat([first, second], 1) - whole).float().norm() < BOUND * whole.float().norm()
    assert (end - last).norm() < STATE_BOUND * last.norm()


def test_strides_and_scales():
    """Heads before rows in memory, columns of one projection, and a scale that is no power of two."""
    q, k, v, state = operands(2, 70, 2, 64)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    check((q, k, torch.cat([v, v], -1)[..., 64:], state.mT.contiguous().mT), scale=-0.3)


def test_each_pair_of_columns_has_its_weight():
    """Each query of the last chunks sees one pair of columns: a wrong weight would vanish among 136 others."""
    pairs = torch.combinations(torch.arange(16), with_replacement=True)
    q, k, v, _ = operands(1, 64 + len(pairs), 1, 64, state=False)
    seen = torch.zeros(len(pairs), 16, dtype=torch.bool).scatter_(1, pairs, True).to(q.device)
    q[0, 64:, 0] = q[0, 64:, 0].abs() * seen
    o, expected = (
        f(q, k.abs(), v.abs(), scale=1.0) for f in (based_attention, lambda *x, **y: based_attention_torch(*x, **y)[0])
    )
    rows = (o - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows[:, 64:].max() < BOUND


@pytest.mark.parametrize(
    "length, values, state",
    [slow(70, 64, True), slow(0, 64, True), slow(1, 64, False), slow(150, 64, True), slow(128, 16, False)]
    + [slow(65, 136, True), slow(64, 128, False), slow(200, 40, False)],
    ids=str,
)
def test_gradients(length, values, state):
    """In parts of 64 columns of v."""
    check(operands(1 if length > 64 else 2, length, 1, values, state), gradients=True)


@pytest.mark.parametrize("length, state", [(20, False), slow(70, False), slow(70, True), slow(200, False)], ids=str)
def test_gradients_of_normalized_results(length, state):
    """States have sums of weights as their last column, which are those of some rows before."""
    q, k, v, before = operands(1, length, 1, 64, state=False)
    if state:
        before = based_attention_torch(*operands(1, 40, 1, 64, state=False)[:3], normalize=True)[1].float()
    check((q, k, v, before), gradients=True, normalize=True)


@pytest.mark.parametrize("lengths", [*map(slow, ([10, 0, 70], [66, 0, 1, 130], [5] * 40, [0, 0]))], ids=str)
@pytest.mark.parametrize("cut", [slow(True), False])
def test_gradients_of_packed_sequences(lengths, cut, monkeypatch):
    monkeypatch.setattr(config, "SHORTEST", 1 if cut else 64)
    given = operands(1, sum(lengths) + 9, 1, 64, sequences=len(lengths))
    check(given, starts_of(lengths), gradients=True, scale=-0.3)


@pytest.mark.parametrize("missing", [slow("o"), slow("state")])
def test_gradients_of_one_result_alone(missing):
    leaves = [x.requires_grad_() for x in operands(1, 70, 1, 64)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = based_attention(*leaves[:3], initial_state=leaves[3], output_final_state=True)[missing == "o"]
    expected = based_attention_torch(*exact[:3], initial_state=exact[3])[missing == "o"]
    direction = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, exact[1:], direction.double())
    for a, b in zip(torch.autograd.grad(found, leaves[1:], direction), wanted, strict=True):
        a, b = (symmetric(a), symmetric(b)) if a.dtype == torch.float32 else (a, b)
        assert (a - b).norm() < GRADIENT_BOUND * b.norm()


@pytest.mark.parametrize("heads", [slow(3)])
def test_gradients_of_segments(heads, monkeypatch):
    """A sequence in parts that run at once, of heads and batches, with strides."""
    monkeypatch.setattr(config, "SHORTEST", 1)
    q, k, v, state = operands(2, 150, heads, 64)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    check((q, k, torch.cat([v, v], -1)[..., 64:], state), gradients=True)


@pytest.mark.slow
def test_the_same_bits_in_every_run():
    given = operands(1, 130, 1, 64)
    for a, b in zip(check(given), check(given), strict=True):
        assert torch.equal(a, b)


# columns of values, whether results are normalised, scale, least chunks of a segment, gradients, and rows at most.
# Gradients of a few normalised rows vanish.
SORTS = [
    (16, False, -0.3, 64, False, 66),
    (64, True, None, 1, False, 130),
    (64, False, None, 1, True, 130),
    (128, False, None, 64, False, 200),
    (40, True, 0.1, 64, False, 130),
    (136, False, -0.3, 64, True, 130),
]


@seeds
def test_random(seed, monkeypatch):
    """Packed sequences or some alike, with states or without."""
    draw, (values, normalize, scale, shortest, gradients, most) = drawn(seed, SORTS)
    monkeypatch.setattr(config, "SHORTEST", shortest)
    batch, rows, lengths = some_sequences(draw, most)
    state = not normalize and draw.random() < 0.5
    given = operands(batch, rows, draw.randint(1, 2), values, state, lengths and len(lengths))
    gradients = gradients and any(lengths or [rows])
    check(given, starts_of(lengths) if lengths else None, gradients, normalize=normalize, scale=scale)
