"""Hedgehog attention against its definition in float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_hedgehog import BOUND, GRADIENT_BOUND, NAMES, attend, check, operands, poisoned
from tests.cases_linear_attention import near, starts_of
from tests.util import drawn, on_gpu_or_simulated, seeds, slow, some_sequences
from tritonkittens.kernels.hedgehog import hedgehog_attention, hedgehog_attention_torch
from tritonkittens.kernels.linear_attention import config

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    poisoned(monkeypatch)


@pytest.mark.parametrize("length", [150, 1, 0, *map(slow, (2, 63, 64, 65, 128, 129, 200))])
@pytest.mark.parametrize("state", [True, slow(False)])
def test_lengths(length, state):
    """Rings of 0, 1 and 2 iterations, and edges of blocks."""
    check(operands(2 if length < 64 else 1, length, 1, state))


@pytest.mark.parametrize("length", [150, *map(slow, (65, 128, 129, 330))])
@pytest.mark.parametrize("state", [slow(True), False])
def test_segments(length, state, monkeypatch):
    """Sequences are cut after every block: each segment begins with the block before."""
    monkeypatch.setattr(config, "SHORTEST", 1)
    check(operands(1, length, 2, state))


@pytest.mark.parametrize(
    "lengths", [[66, 0, 1, 10], slow([66, 0, 1, 130]), slow([200, 0, 64]), slow([5] * 40), slow([0, 0])], ids=str
)
@pytest.mark.parametrize("cut", [True, slow(False)])
def test_packed_sequences(lengths, cut, monkeypatch):
    monkeypatch.setattr(config, "SHORTEST", 1 if cut else 64)
    check(operands(1, sum(lengths) + 9, 1, True, len(lengths)), starts_of(lengths))


@pytest.mark.parametrize("at", [slow(64), slow(128), slow(192)])
def test_a_sequence_continues_with_its_last_block(at):
    *tensors, state = operands(1, 250, 1)
    rows, of_heads = tensors[:3], tensors[3:]
    whole, last = check((*tensors, state))
    first, between = check((*(x[:, :at] for x in rows), *of_heads, state))
    second, end = check((*(x[:, at - 64 :] for x in rows), *of_heads, between))
    assert (torch.cat([first, second[:, 64:]], 1) - whole).float().norm() < BOUND * whole.float().norm()
    assert (end[0] - last[0]).norm() < BOUND * last[0].norm()


def test_heads_batches_and_strides():
    """Each has maps and factors of its own; heads before rows in memory, columns of one projection, maps transposed."""
    q, k, v, map_q, map_k, alpha, beta, state = operands(1, 130, 2)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    kv, z = state
    v, map_q = torch.cat([v, v], -1)[..., 128:], map_q.mT.contiguous().mT
    alpha, beta = (torch.stack([x, x], -1)[:, 0] for x in (alpha, beta))
    check((q, k, v, map_q, map_k, alpha, beta, (kv.mT.contiguous().mT, torch.stack([z, z], -1)[..., 0])))


@pytest.mark.parametrize("size", [slow(1.0), slow(0.0)])
def test_large_scores(size):
    """Exponentials of hundreds: the largest score is taken off. With size 0, all features are equal."""
    q, k, *others = operands(1, 150, 1, size=size)
    check((8 * q, 8 * k, *others), gradients=True)


@pytest.mark.parametrize("factors", [(0.0, 1.0), slow((1.0, 0.0)), slow((-0.01, 1.0))], ids=str)
@pytest.mark.parametrize("gradients", [False, slow(True)])
def test_factors(factors, gradients):
    """The window alone, or earlier blocks alone: then rows of the first two see nothing without a state."""
    *tensors, _, _, state = operands(1, 150, 1)
    alpha, beta = (torch.full((1,), x, dtype=torch.float32, device=tensors[0].device) for x in factors)
    check((*tensors, alpha, beta, state), gradients=gradients)


@pytest.mark.parametrize("length", [66, *map(slow, (0, 1, 2, 63, 64, 65, 128, 129, 200, 330))])
@pytest.mark.parametrize("state", [True, slow(False)])
def test_gradients(length, state):
    check(operands(2 if length < 64 else 1, length, 1, state), gradients=True)


@pytest.mark.parametrize("lengths", [slow(x) for x in ([66, 0, 1, 70], [130, 0, 64], [5] * 8, [0, 0])], ids=str)
@pytest.mark.parametrize("state", [slow(True), slow(False)])
def test_gradients_of_packed_sequences(lengths, state):
    check(operands(1, sum(lengths) + 9, 1, state, len(lengths)), starts_of(lengths), gradients=True)


@pytest.mark.slow
def test_gradients_with_segments_of_windows(monkeypatch):
    """Windows of a sequence in parts that run at once, of heads and batches, with strides."""
    monkeypatch.setattr(config, "SHORTEST", 1)
    q, k, v, map_q, *others = operands(2, 200, 2)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    v, map_q = torch.cat([v, v], -1)[..., 128:], map_q.mT.contiguous().mT
    check((q, k, v, map_q, *others), gradients=True)


@pytest.mark.parametrize("wanted", [slow((0,)), slow((1,)), slow((2,)), slow((0, 2))], ids=str)
def test_gradients_of_some_results(wanted):
    *tensors, state = operands(1, 140, 1)
    leaves = [x.requires_grad_() for x in (*tensors, *state)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = attend(hedgehog_attention, leaves, output_final_state=True)
    expected = attend(hedgehog_attention_torch, exact)
    found, expected = ([x[i] for i in wanted] for x in (found, expected))
    directions, options = [torch.randn_like(x) for x in found], dict(allow_unused=True, materialize_grads=True)
    ours = torch.autograd.grad(found, leaves, directions, **options)
    theirs = torch.autograd.grad(expected, exact, [d.double() for d in directions], **options)
    for name, a, b in zip(NAMES, ours, theirs, strict=True):
        near(name, a, b, GRADIENT_BOUND)


@pytest.mark.parametrize("at", [slow(64), slow(128)])
def test_gradients_of_a_sequence_in_two_parts(at):
    """As of the whole one."""
    *tensors, state = operands(1, 200, 1)
    leaves = [x.requires_grad_() for x in (*tensors, *state)]
    rows, of_heads = leaves[:3], leaves[3:7]
    whole = attend(hedgehog_attention, leaves, output_final_state=True)
    first, *between = attend(
        hedgehog_attention, [*(x[:, :at] for x in rows), *of_heads, *leaves[7:]], output_final_state=True
    )
    second, *after = attend(
        hedgehog_attention, [*(x[:, at - 64 :] for x in rows), *of_heads, *between], output_final_state=True
    )
    parts = torch.cat([first, second[:, 64:]], 1), *after
    directions = [torch.randn_like(x) for x in whole]
    pairs = zip(*(torch.autograd.grad(x, leaves, directions) for x in (parts, whole)), strict=True)
    for name, (a, b) in zip(NAMES, pairs, strict=True):
        near(name, a, b, 2 * GRADIENT_BOUND)


@pytest.mark.slow
def test_the_same_bits_in_every_run():
    leaves = [x.requires_grad_() for x in operands(1, 200, 1, False)[:7]]
    runs = []
    for _ in range(2):
        o = hedgehog_attention(*leaves)
        runs.append((o, *torch.autograd.grad(o, leaves, torch.ones_like(o))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.slow
def test_many_tasks():
    """More than blocks of threads: the ring and the tiles of maps are used again."""
    given = operands(3, 100, 100, state=False) if on_gpu_or_simulated(True, False) else operands(1, 70, 3)
    check(given, gradients=True)


# least chunks of a segment, gradients, sizes of maps, and rows at most; where features are equal, none has a gradient
SORTS = [
    (64, False, (0.01, 0.1, 1.0), 66),
    (64, True, (0.1, 0.3), 66),
    (1, False, (0.1, 1.0), 200),
    (1, True, (0.3,), 130),
]


@seeds
def test_random(seed, monkeypatch):
    """Packed sequences or some alike, with states or without."""
    draw, (shortest, gradients, sizes, most) = drawn(seed, SORTS)
    monkeypatch.setattr(config, "SHORTEST", shortest)
    batch, rows, lengths = some_sequences(draw, most)
    state, gradients = draw.random() < 0.5, gradients and any(lengths or [rows])
    given = operands(batch, rows, 1, state, lengths and len(lengths), draw.choice(sizes))
    check(given, starts_of(lengths) if lengths else None, gradients)
