"""The gated delta rule against the recurrence in float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_gated_delta import check, operands, poisoned
from tests.cases_linear_attention import BF16, FP32, starts_of
from tests.util import DEVICE, crossed, drawn, poison, seeds, slow, some_sequences
from tritonkittens.kernels.gated_delta_net import gated_delta_rule

pytestmark = pytest.mark.usefixtures("kernel_device")
FP16 = torch.float16


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    poisoned(monkeypatch)


@pytest.mark.parametrize(
    "length, dims, group, dtype, state",
    crossed(
        [150, 1, 63, 64, 65, 0, 2, 128, 129],
        [(128, 128), (64, 64), (40, 72), (128, 200), (1, 1)],
        [2, 1, 3],
        [BF16, FP16],
        [True, False],
    ),
    ids=str,
)
def test_lengths(length, dims, group, dtype, state):
    # errors of a state of one number do not average out
    check(operands(2, length, 1, *dims, group, dtype, state=state), slack=4.0 if dims == (1, 1) else 1.0)


@pytest.mark.slow  # a quick test of their gradients looks at results, too
def followed_by_poison(lengths):
    """Operands of packed sequences."""
    *tensors, states = operands(1, sum(lengths) + 9, 1, 64, 64, 2, sequences=len(lengths))
    for x in tensors:
        poison(x[:, sum(lengths) :])
    return *tensors, states


@pytest.mark.parametrize("lengths", [[70, 0, 1, 130], [5] * 40, [0, 0], [200]], ids=str)
def test_packed_sequences(lengths):
    check(followed_by_poison(lengths), starts_of(lengths))


@pytest.mark.parametrize("fading", [0.0, slow(5.0), slow(100.0)])
def test_how_fast_states_fade(fading):
    """e^{-G} overflows with the last."""
    check(operands(1, 150, 1, 64, 64, fading=fading))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (128, 200), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "length, group, dtype, state",
    [
        (130, 2, BF16, True), (1, 1, FP16, False), (2, 3, BF16, False), (3, 2, BF16, True), (4, 1, BF16, True),
        (5, 2, FP16, True), (63, 1, BF16, False), (64, 2, BF16, True), (65, 3, FP16, True), (0, 2, BF16, True),
    ],
    ids=str,
)  # fmt: skip
def test_gradients(dims, length, group, dtype, state):
    given = operands(2, length, 1, *dims, group, dtype, state=state)
    few = dims == (1, 1)
    check(given, slack=4.0 if few else 1.5, gradients=True, size=1.0 if few else 0.0)


@pytest.mark.parametrize("lengths", [[70, 0, 1, 3], slow([5] * 9), slow([0, 0]), slow([200])], ids=str)
def test_gradients_of_packed_sequences(lengths):
    # a few rows: errors do not average out
    check(followed_by_poison(lengths), starts_of(lengths), slack=2.0, gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("fading", [0.0, 5.0, 100.0])
def test_gradients_where_states_fade_fast_or_not_at_all(fading):
    # size: where nothing is left of a state, products of a row with itself cancel in the gradient of its gate
    check(operands(1, 150, 1, 64, 64, fading=fading), slack=1.5, gradients=True, size=1e-3)


@pytest.mark.slow
def test_gradients_have_the_same_bits_in_every_run():
    *tensors, state = operands(1, 130, 2, 64, 64, 2)
    leaves = [x.requires_grad_() for x in (*tensors, state)]
    o = gated_delta_rule(*leaves[:5], initial_state=state)
    direction = torch.randn_like(o)
    first, second = (torch.autograd.grad(o, leaves, direction, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("gates", [BF16, slow(FP16)])
def test_gates_of_16_bits(gates):
    check(operands(1, 80, 1, 64, 64, gates=gates))


@pytest.mark.parametrize("gradients", [False, slow(True)])
def test_gates_that_keep_nothing(gradients):
    """What later gates keep is exact behind them."""
    given = operands(1, 20, 1, 64, 64)
    given[3][:, [3, 11]] = torch.tensor([float("-inf"), -1e30], device=DEVICE)[:, None]
    check(given, slack=1.5, gradients=gradients)


def test_one_key_again_and_again():
    """Each value replaces the one before: the inverse of a full triangle of ones has two diagonals."""
    q, k, v, g, beta, state = operands(1, 130, 1, 64, 64)
    k = k[:, :1].expand_as(k)
    check((q, k, v, torch.zeros_like(g), torch.ones_like(beta), state), slack=2.0)


@pytest.mark.parametrize("at", [64, slow(1), slow(100)])
def test_a_sequence_cut_anywhere_gives_the_same(at):
    *tensors, state = operands(1, 150, 1, 64, 64)
    whole, last = check((*tensors, state))
    first, between = gated_delta_rule(*(x[:, :at] for x in tensors), initial_state=state, output_final_state=True)
    second, end = gated_delta_rule(*(x[:, at:] for x in tensors), initial_state=between, output_final_state=True)
    assert (torch.cat([first, second], 1) - whole).float().norm() < 6e-3 * whole.float().norm()
    assert (end - last).norm() < 6e-3 * last.norm()


def test_strides_and_scales():
    q, k, v, g, beta, state = operands(2, 70, 2, 64, 64)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    g, beta = torch.stack([g, beta], -1).unbind(-1)
    check((q, k, torch.cat([v, v], -1)[..., 64:], g, beta, state.mT.contiguous().mT), scale=0.7)


def test_the_same_bits_in_every_run():
    given = operands(1, 130, 1, 64, 64)
    for a, b in zip(check(given), check(given), strict=True):
        assert torch.equal(a, b)


# columns of keys and values, heads of v for each of k, dtypes of operands and gates, and whether there are gradients
SORTS = [
    (16, 40, 2, BF16, FP32, False),
    (64, 64, 2, FP16, BF16, False),
    (64, 64, 1, BF16, FP32, True),
    (40, 72, 3, FP16, FP32, True),
    (128, 128, 1, BF16, BF16, False),
    (128, 64, 2, FP16, BF16, True),
]


@seeds
def test_random(seed):
    """Packed sequences or some alike, with states or without."""
    draw, (keys, values, group, dtype, gates, gradients) = drawn(seed, SORTS)
    batch, rows, lengths = some_sequences(draw)
    kind = dict(gates=gates, state=draw.random() < 0.5, sequences=lengths and len(lengths))
    given = operands(batch, rows, 1, keys, values, group, dtype, **kind)
    # a few numbers: errors do not average out
    check(given, starts_of(lengths) if lengths else None, slack=3.0 if gradients else 1.0, gradients=gradients)
