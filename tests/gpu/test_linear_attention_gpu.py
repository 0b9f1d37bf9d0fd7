"""Linear attention against the recurrence in float64, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_linear_attention import BF16, FP16, FP32, check, operands, poisoned, starts_of
from tests.util import crossed, drawn, seeds, slow, some_of_each, some_sequences
from tritonkittens.kernels.linear_attention import config, linear_attention

pytestmark = pytest.mark.usefixtures("kernel_device")
LENGTHS = [200, 1, 63, 64, 65, 0, 2, 128, 129]  # rings of 0, 1, 2 iterations, and edges of chunks


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    poisoned(monkeypatch)


@pytest.fixture
def short_segments(monkeypatch):
    """Sequences are cut where they have more than a chunk."""
    monkeypatch.setattr(config, "SHORTEST", 1)


@pytest.mark.parametrize(
    "length, dims, dtype, decays, state",
    crossed(
        LENGTHS,
        [(128, 128), (64, 64), (40, 72), (128, 200), (256, 136), (1, 1)],
        [BF16, FP16],
        [(0.02, 1.5), None],
        [True, False],
    ),
    ids=str,
)
def test_lengths(length, dims, dtype, decays, state):
    check(operands(2, length, 2, *dims, dtype, decays, state))


@pytest.mark.parametrize("length", [300, *(slow(n) for n in (65, 128, 129))])
@pytest.mark.parametrize("dims", [(64, 64), slow((128, 136)), slow((256, 64))], ids=str)
def test_segments(short_segments, length, dims):
    """A sequence in parts that run at once."""
    check(operands(1, length, 2, *dims))


@pytest.mark.parametrize("lengths", [[70, 0, 1, 130], slow([5] * 40), slow([0, 0]), slow([200])], ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_packed_sequences(lengths, cut, monkeypatch):
    monkeypatch.setattr(config, "SHORTEST", 1 if cut else 64)
    starts = starts_of(lengths)
    check(operands(1, sum(lengths) + 9, 2, 64, 64, sequences=len(lengths)), starts)


@pytest.mark.parametrize("cut", [slow(False), True])
@pytest.mark.parametrize(
    "dims", [(64, 64), *(slow(dims) for dims in ((40, 72), (128, 128), (64, 200), (256, 200)))], ids=str
)
def test_gradients(dims, cut, monkeypatch):
    """The last with columns of V in several blocks."""
    monkeypatch.setattr(config, "SHORTEST", 1 if cut else 64)
    check(operands(1, 150, 2, *dims), gradients=True)


@pytest.mark.parametrize("decays", [slow((0.02, 1.5)), slow(None)])
def test_gradients_of_packed_sequences(decays):
    lengths = [70, 0, 1, 60]
    check(operands(1, sum(lengths), 2, 64, 64, decays=decays, sequences=4), starts_of(lengths), gradients=True)


@pytest.mark.parametrize("dtype", [FP32, slow(BF16)])
@pytest.mark.parametrize("cut", [True, slow(False)])
def test_gates_that_differ_from_step_to_step(dtype, cut, monkeypatch):
    """Some keep nearly nothing, some nothing."""
    monkeypatch.setattr(config, "SHORTEST", 1 if cut else 64)
    lengths = [70, 0, 1, 130]
    q, k, v, _, state = operands(1, sum(lengths), 2, 64, 64, sequences=4)
    g = -torch.rand(q.shape[:3], device=q.device).pow(4).mul(5).to(dtype)
    g[:, [3, 100]] = torch.tensor([float("-inf"), -1e30], device=q.device, dtype=dtype)[:, None]
    check((q, k, v, None, state), starts_of(lengths), gradients="gates" if cut else True, g=g)


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, dims, kind",
    some_of_each(
        [130, 1, 63, 64, 65, 5, 2],
        [(64, 64), (40, 72), (128, 128), (64, 200), (256, 64), (136, 136)],
        [(BF16, True, True), (FP16, False, False), (BF16, False, True)],
    ),
    ids=str,
)
def test_gradients_of_gates(length, dims, kind):
    """kind: dtype, decays or gates, and whether a state is given."""
    dtype, decayed, state = kind
    q, k, v, decay, state = operands(2 if length < 64 else 1, length, 2, *dims, dtype, state=state)
    gates = {} if decayed else dict(g=-torch.rand(q.shape[:3], device=q.device).pow(4).mul(5))
    check((q, k, v, decay if decayed else None, state), gradients="gates", **gates)


def test_gradients_of_strong_gates():
    """What decays hardly keep has gradients that are small beside sums over a chunk."""
    check(operands(1, 66, 3, 16, 16, decays=(5.0, 40.0, 0.5), state=False), gradients="gates")


@pytest.mark.slow
def test_the_same_gradients_in_every_run(short_segments):
    q, k, v, decay, state = operands(1, 130, 1, 64, 64)
    leaves = [x.requires_grad_() for x in (q, k, v, decay, state)]
    found = [linear_attention(*leaves[:4], initial_state=state) for _ in range(2)]
    first, second = (torch.autograd.grad(o, leaves, torch.ones_like(o)) for o in found)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_strong_decays_stay_finite():
    """exp(decay · 64) overflows, as would a factorised mask."""
    check(operands(1, 150, 3, 64, 64, decays=(5.0, 40.0, 200.0)))


@pytest.mark.parametrize("at", [64, slow(1), slow(100)])
def test_a_sequence_cut_anywhere_gives_the_same(at):
    q, k, v, decay, state = operands(1, 150, 2, 64, 64)
    whole, last = check((q, k, v, decay, state))
    first, between = linear_attention(
        q[:, :at], k[:, :at], v[:, :at], decay, initial_state=state, output_final_state=True
    )
    second, end = linear_attention(
        q[:, at:], k[:, at:], v[:, at:], decay, initial_state=between, output_final_state=True
    )
    assert (torch.cat([first, second], 1) - whole).float().norm() < 6e-3 * whole.float().norm()
    assert (end - last).norm() < 4e-3 * last.norm()


def test_strides_and_scales():
    """Heads before rows in memory, columns of one projection, another scale; a state whose columns are rows."""
    q, k, v, decay, state = operands(2, 70, 2, 64, 64)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    both = torch.cat([v, v], -1)
    check((q, k, both[..., 64:], decay, state.mT.contiguous().mT), scale=0.7)


def test_the_same_bits_in_every_run(short_segments):
    given = operands(1, 130, 1, 64, 64)
    for a, b in zip(check(given), check(given), strict=True):
        assert torch.equal(a, b)


# columns of keys and values, dtype, what fades (heads by decays, rows by gates, or nothing), least chunks of a segment,
# gradients, and rows at most
SORTS = [
    (16, 40, BF16, "gates", 64, False, 66),
    (64, 64, BF16, "decays", 1, "gates", 130),
    (64, 64, FP16, "gates", 64, "gates", 130),
    (128, 128, BF16, "nothing", 1, False, 200),
    (40, 72, BF16, "gates", 1, "gates", 130),
    (64, 136, FP16, "decays", 64, True, 130),
    (256, 64, BF16, "decays", 1, False, 200),
]


@seeds
def test_random(seed, monkeypatch):
    """Packed sequences or some alike, with states or without."""
    draw, (keys, values, dtype, fading, shortest, gradients, most) = drawn(seed, SORTS)
    monkeypatch.setattr(config, "SHORTEST", shortest)
    batch, rows, lengths = some_sequences(draw, most)
    decays = tuple(draw.uniform(0, 0.5) for _ in range(4)) if fading == "decays" else None
    kind = dict(decays=decays, state=draw.random() < 0.5, sequences=lengths and len(lengths))
    given = operands(batch, rows, draw.randint(1, 2), keys, values, dtype, **kind)
    gates = -torch.rand(given[0].shape[:3], device=given[0].device).pow(4).mul(5) if fading == "gates" else None
    starts, options = starts_of(lengths) if lengths else None, {} if gates is None else dict(g=gates)
    check(given, starts, any(lengths or [rows]) and gradients, **options)
