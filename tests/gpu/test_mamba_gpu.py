"""Mamba-2's scan against the recurrence in float64, on the GPU, or simulated."""

import math

import pytest
import torch

from tests.cases_linear_attention import BF16, BOUNDS, FP16, FP32, STATE_BOUND, near, starts_of
from tests.cases_mamba import OPTIONS, check, operands, poisoned
from tests.util import DEVICE, crossed, drawn, poison, refused, seeds, slow, some_of_each, some_sequences
from tritonkittens.kernels.linear_attention import config
from tritonkittens.kernels.mamba2 import mamba_chunk_scan, mamba_chunk_scan_torch

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    poisoned(monkeypatch)


@pytest.mark.parametrize(
    "length, dims, options, kind",
    crossed(
        [130, 1, 63, 64, 65, 0, 2],  # rings of 0, 1, 2 iterations, and edges of chunks
        [(64, 128), (64, 64), (40, 72), (136, 128), (64, 256), (1, 1), (40, 200)],
        list(OPTIONS),
        [(2, 1, BF16, True), (2, 2, FP16, False), (3, 1, BF16, False)],
    ),
    ids=str,
)
def test_lengths(length, dims, options, kind):
    """kind: heads of x, and of B and C, dtype, and whether a state is given."""
    heads, groups, dtype, state = kind
    check(operands(2 if length < 64 else 1, length, heads, dims, groups, dtype, options=options, state=state))


@pytest.mark.parametrize("lengths", [[70, 0, 1, 65], slow([5] * 40), slow([0, 0]), slow([200])], ids=str)
@pytest.mark.parametrize("cut, states", [(False, 72), (True, 72), slow(False, 256), (True, 256)])
def test_packed_sequences(lengths, cut, states, monkeypatch):
    """Cut: sequences of more than a chunk are segments that run at once."""
    monkeypatch.setattr(config, "SHORTEST", 1 if cut else 64)
    check(operands(1, sum(lengths) + 9, 2, (64, states), sequences=len(lengths)), starts_of(lengths))


@pytest.mark.parametrize(
    "lengths, dims, options",
    [
        ([66, 0, 3], (16, 16), "D of columns"),
        *(slow(n, (64, 72), "all") for n in ([70, 0, 1, 65], [5] * 40, [0, 0], [200])),
        *(slow(n, (64, 256), "all") for n in ([70, 0, 1, 65], [0, 0])),
    ],
    ids=str,
)
@pytest.mark.parametrize("cut", [slow(True), False])
def test_gradients_of_packed_sequences(lengths, dims, options, cut, monkeypatch):
    """The others of pairs of heads. Gradients of rows after the last sequence, which hold poison, are 0."""
    monkeypatch.setattr(config, "SHORTEST", 1 if cut else 64)
    given = operands(1, sum(lengths) + 9, 2, dims, options=options, sequences=len(lengths))
    for name in {"x", "dt", "B", "C", "z"} & given.keys():
        poison(given[name][:, sum(lengths) :])
    found = check(given, starts_of(lengths), gradients=True)
    for grad in found[2:4]:
        assert not grad[:, sum(lengths) :].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, dims, options, kind",
    some_of_each(
        [130, 1, 63, 64, 65, 5, 2],
        [(64, 128), (64, 64), (40, 72), (136, 128), (64, 256), (40, 136), (136, 200)],
        list(OPTIONS),
        [(2, 1, BF16, True), (6, 2, FP16, False), (3, 1, BF16, False)],
    ),
    ids=str,
)
def test_gradients(length, dims, options, kind):
    """kind: as in `test_lengths`."""
    heads, groups, dtype, state = kind
    given = operands(2 if length < 64 else 1, length, heads, dims, groups, dtype, options=options, state=state)
    check(given, gradients=True)


@pytest.mark.parametrize("steps", [slow(BF16), slow(FP32)])
def test_gradients_where_states_fade(steps):
    """Nearly all of what a sum over a chunk has cancels in gradients of A."""
    given = operands(1, 130, 2, (64, 64), steps=steps, fading=100.0, options="D of columns")
    check(given | dict(dt_softplus=False), gradients=True)


@pytest.mark.parametrize("dims, options", [((16, 136), "D of columns"), slow((16, 136), "all")], ids=str)
def test_gradients_of_many_states(dims, options):
    """Those of B and C are computed in blocks of columns, those of x are sums over these."""
    check(operands(1, 5, 2, dims, options=options), gradients=True)


@pytest.mark.slow
def test_heads_of_a_group_in_parts():
    """A part for each of a few heads, where groups are fewer than multiprocessors."""
    check(operands(1, 70, 12, (16, 16), 2), gradients=True)


@pytest.mark.parametrize("steps", [BF16, slow(FP16), slow(FP32)])
@pytest.mark.parametrize("fading", [100.0, slow(0.0)])
def test_how_fast_states_fade(fading, steps):
    """e^{-G} of a chunk overflows with the first. Some steps have no weight: dt is 0."""
    given = operands(1, 130, 2, (64, 64), steps=steps, fading=fading, options="D of columns")
    check(given | dict(dt_softplus=False))


def test_small_steps():
    """softplus(dt) = log(1 + e^dt) of e^dt below the rounding of 1."""
    given = operands(1, 9, 2, (64, 64), options="plain", state=False)
    check(given | dict(dt=given["dt"] - 18.0, dt_softplus=True), size=0.0)


@pytest.mark.parametrize("at", [69, slow(1), slow(64)])
def test_a_sequence_cut_anywhere_gives_the_same(at):
    """With 69 of 70 rows before, the rest is a step of decoding."""
    given = operands(1, 70, 2, (64, 128))
    whole, last = check(given)
    rows, states, parts = ("x", "dt", "B", "C", "z"), given["initial_states"], []
    for part in (slice(0, at), slice(at, None)):
        of_part = given | {name: given[name][:, part] for name in rows} | dict(initial_states=states)
        y, states = mamba_chunk_scan(**of_part, return_final_states=True)
        parts.append(y)
    assert (torch.cat(parts, 1) - whole).float().norm() < 6e-3 * whole.float().norm()
    assert (states - last).norm() < 4e-3 * last.norm()


def test_strides():
    """z, x, B, C and dt are columns of one projection, as of Mamba-2; states whose rows are columns; numbers of heads
    that are apart."""
    given = operands(2, 9, 2, (64, 64))
    given |= {n: torch.stack([given[n], given[n] + 1], -1)[..., 0] for n in ("A", "D", "dt_bias")}
    parts = [given[name] for name in ("z", "x", "B", "C")]
    joined = torch.cat([*(t.flatten(2) for t in parts), given["dt"].to(BF16)], -1)
    *views, dt = joined.split([*(t.shape[2] * t.shape[3] for t in parts), 2], -1)
    given |= {n: v.unflatten(-1, t.shape[2:]) for n, v, t in zip(("z", "x", "B", "C"), views, parts, strict=True)}
    check(given | dict(dt=dt, initial_states=given["initial_states"].mT.contiguous().mT))


@pytest.mark.parametrize("length, options", [(9, "all"), slow(9, "z"), (3, "all"), slow(3, "z")])
def test_nan_in_a_step(length, options):
    """Limits of steps do not hide it, and it reaches no other head and no row before."""
    given = operands(1, length, 2, (16, 16), options=options)
    given["dt"][:, 1, 0] = float("nan")
    y = mamba_chunk_scan(**given)
    assert y[:, 1:, 0].isnan().all() and y[:, 0].isfinite().all() and y[:, :, 1].isfinite().all()


def test_numbers_of_sequences(monkeypatch):
    """seq_idx gives what cu_seqlens gives; a sequence ends with its batch."""
    monkeypatch.setattr("tritonkittens.kernels._sequences.MOST_SEQUENCES", 8)
    given = operands(2, 9, 1, (16, 16), state=False, options="z")
    numbers = torch.tensor([[0] * 4 + [1] * 5, [1, 2, 2, 2, 2, 2, 2, 7, 7]], dtype=torch.int32, device=DEVICE)
    found = mamba_chunk_scan(**given, seq_idx=numbers)
    rows = {n: given[n].flatten(0, 1)[None] for n in ("x", "dt", "B", "C", "z")}
    expected, _ = mamba_chunk_scan_torch(**given | rows, cu_seqlens=starts_of([4, 5, 1, 6, 2]))
    assert found.shape == given["x"].shape
    near("y", found, expected.view(found.shape), BOUNDS[BF16])
    with refused("mamba_chunk_scan: seq_idx is (2, 8); it must be (2, 9)", ValueError):
        mamba_chunk_scan(**given, seq_idx=numbers[:, 1:])


def numbered():
    """Operands of two batches with states, the numbers of their sequences, and the same as packed ones: (operands,
    numbers, packed operands, starts, the first sequence of each batch, the last)."""
    given = operands(2, 9, 1, (16, 16), options="z")
    numbers = torch.tensor([[0] * 4 + [1] * 5, [1, 2, 2, 2, 2, 2, 2, 7, 7]], dtype=torch.int32, device=DEVICE)
    rows = {n: given[n].flatten(0, 1)[None] for n in ("x", "dt", "B", "C", "z")}
    first, last = (torch.tensor(n, device=DEVICE) for n in ([0, 2], [1, 4]))
    return given, numbers, given | rows, starts_of([4, 5, 1, 6, 2]), first, last


@pytest.mark.parametrize("gradients", [False, slow(True)])
def test_states_of_numbered_sequences(gradients):
    """Those before belong to the first sequence of each batch, those after to the last: results and gradients."""
    given, numbers, rows, starts, first, last = numbered()
    leaves, exact = (
        {
            n: t.detach().to(dtype or t.dtype).requires_grad_(gradients)
            for n, t in given.items()
            if isinstance(t, torch.Tensor)
        }
        for dtype in (None, torch.float64)
    )
    y, states = mamba_chunk_scan(**given | leaves, seq_idx=numbers, return_final_states=True)
    before = exact["initial_states"].new_zeros(5, 1, 16, 16).index_copy(0, first, exact["initial_states"])
    packed = {n: exact[n].flatten(0, 1)[None] if n in ("x", "dt", "B", "C", "z") else t for n, t in exact.items()}
    y_exact, all_states = mamba_chunk_scan_torch(**rows | packed | dict(initial_states=before), cu_seqlens=starts)
    near("y", y, y_exact.view(y.shape), BOUNDS[BF16])
    near("states", states, all_states[last], STATE_BOUND[BF16])
    if not gradients:
        return
    directions = torch.randn_like(y), torch.randn_like(states)
    grads = torch.autograd.grad((y, states), list(leaves.values()), directions)
    of_exact = [directions[0].double().view(y_exact.shape), directions[1].double()]
    theirs = torch.autograd.grad((y_exact, all_states[last]), list(exact.values()), of_exact)
    for name, a, b in zip(leaves, grads, theirs, strict=True):
        near(f"d{name}", a, b, 2 * BOUNDS[BF16], 0.5 if a.numel() < 64 else 0.0)


def test_the_edges_of_numbered_sequences(monkeypatch):
    """Batches without rows keep their states; more sequences than have states are refused."""
    given, numbers, *_ = numbered()
    none = {n: given[n][:, :0] for n in ("x", "dt", "B", "C", "z")}
    y, states = mamba_chunk_scan(**given | none, seq_idx=numbers[:, :0], return_final_states=True)
    assert y.shape == (2, 0, 1, 16) and torch.equal(states, given["initial_states"])
    monkeypatch.setattr("tritonkittens.kernels._sequences.MOST_SEQUENCES", 4)
    with refused("mamba_chunk_scan: seq_idx has more than 4 sequences", ValueError):
        mamba_chunk_scan(**given, seq_idx=numbers)


def test_arguments_in_the_order_of_mamba_ssm():
    """`mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, z, …)`, and what its last options return."""
    given = operands(1, 9, 1, (16, 16), options="z", sequences=2)
    starts, ignored = starts_of([3, 6]), torch.zeros(1, 9, dtype=torch.int32, device=DEVICE)

    def called(given, starts, final):
        options = (given.get(n) for n in ("D", "z", "dt_bias", "initial_states"))
        of_rows = (given[n] for n in ("x", "dt", "A", "B", "C"))
        return mamba_chunk_scan(*of_rows, 256, *options, ignored, starts, False, (0.0, math.inf), final, True)

    y, last, states = called(given, starts, True)
    expected, all_states = mamba_chunk_scan_torch(**given, cu_seqlens=starts)
    near("y", y, expected, BOUNDS[BF16])
    near("states", states, all_states, STATE_BOUND[BF16])
    assert torch.equal(last, states[1:])
    none = given | {n: given[n][:, :0] for n in ("x", "dt", "B", "C", "z")}
    y, states = called(none, starts * 0, False)
    assert y.shape == (1, 0, 1, 16) and torch.equal(states, given["initial_states"])


@pytest.mark.slow
def test_the_same_bits_in_every_run(monkeypatch):
    monkeypatch.setattr(config, "SHORTEST", 1)
    given = operands(1, 130, 1, (16, 16))
    for a, b in zip(check(given), check(given), strict=True):
        assert torch.equal(a, b)
    leaves = {n: given[n].requires_grad_() for n in ("x", "dt", "A", "B", "C", "D", "dt_bias")}
    first, second = (
        torch.autograd.grad(mamba_chunk_scan(**given | leaves).sum(), list(leaves.values())) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


# P and N, heads of x for each of B and C, dtypes of x and of steps, options, least chunks of a segment, gradients, and
# rows at most
SORTS = [
    ((16, 16), 2, BF16, FP32, "D of columns", 64, False, 66),
    ((16, 16), 1, BF16, FP32, "D of columns", 1, True, 130),
    ((64, 64), 1, FP16, BF16, "all", 1, False, 200),
    ((40, 72), 2, FP16, FP32, "z", 64, True, 130),
    ((64, 128), 2, BF16, BF16, "plain", 64, False, 200),
    ((64, 128), 2, BF16, FP32, "all", 1, True, 130),
    ((136, 200), 1, BF16, FP32, "all", 64, True, 66),
    ((64, 256), 3, FP16, FP32, "z", 1, False, 130),
]


@seeds
def test_random(seed, monkeypatch):
    """Packed sequences or some alike, with states or without."""
    draw, (dims, group, dtype, steps, options, shortest, gradients, most) = drawn(seed, SORTS)
    monkeypatch.setattr(config, "SHORTEST", shortest)
    (batch, rows, lengths), groups, state = some_sequences(draw, most), draw.randint(1, 2), draw.random() < 0.5
    kind = dict(heads=groups * group, dims=dims, groups=groups, dtype=dtype, steps=steps, options=options, state=state)
    given = operands(batch, rows, **kind, sequences=lengths and len(lengths))
    check(given, starts_of(lengths) if lengths else None, gradients=gradients and any(lengths or [rows]))
