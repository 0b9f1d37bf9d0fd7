"""Attention of sequences packed end to end: every sequence against float64 and by itself, and nothing of its
neighbours."""

import contextlib
import math
import re

import pytest
import torch

from tests.util import (
    DEVICE,
    assert_eager_is_operator,
    bytes_at_once,
    on_gpu_or_simulated,
    poison,
    relative_error,
    slow,
)
from tritonkittens import sim
from tritonkittens.kernels.attention import attention_torch, attention_varlen, varlen_backward_plan, varlen_plan
from tritonkittens.kernels.attention.varlen_plan import Listing, choose, most_tiles

pytestmark = [pytest.mark.usefixtures("kernel_device"), pytest.mark.simulated(multiprocessors=3)]

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11}
GRADIENT_ERROR = {BF16: 1e-2, FP16: 1.5e-3}
BEHIND = 7  # rows behind the last sequence
LIMIT = 1 << 30
QUERIES, KEYS = (1, 128, 0, 70, 130, 5), (1, 128, 40, 200, 0, 150)


def starts(lengths):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def operands(queries, keys, heads=4, kv_heads=2, dim=64, value_dim=None, dtype=BF16):
    """Q, K, V with NaN behind the last sequence."""
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim or dim))
    made = [torch.randn(sum(lengths) + BEHIND, n, d, device=DEVICE).to(dtype) for lengths, n, d in shapes]
    for x in made:
        x[-BEHIND:] = float("nan")
    return made


def parts(x, lengths):
    """The sequences of a packed tensor, each as one of a batch: (1, H, S, D)."""
    return [one.transpose(0, 1)[None] for one in x[: sum(lengths)].split(list(lengths))]


def check(queries, keys, heads=4, kv_heads=2, dim=64, value_dim=None, dtype=BF16, **given):
    """Output, log-sum-exp and gradients, through both, of every sequence; zeros behind them; `out` written and nothing
    beside it."""
    q, k, v = operands(queries, keys, heads, kv_heads, dim, value_dim, dtype)
    around = poison(torch.empty(q.shape[0] + 2, heads, v.shape[2] + 16, device=DEVICE, dtype=dtype))
    out, lse = attention_varlen(
        q, k, v, starts(queries), starts(keys), out=around[1:-1, :, 8:-8], return_lse=True, **given
    )
    assert out.data_ptr() == around[1:, :, 8:].data_ptr() and around.isnan().sum() == around.numel() - out.numel()
    assert (out[-BEHIND:] == 0).all() and (lse[:, -BEHIND:] == -math.inf).all()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    again, again_lse = attention_varlen(*leaves, starts(queries), starts(keys), return_lse=True, **given)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)
    grad, grad_lse = (
        torch.randn(out.shape, device=DEVICE).to(dtype),
        torch.randn(lse.shape, device=DEVICE).where(lse.isfinite(), 0),
    )
    gradients = torch.autograd.grad((again, again_lse), leaves, (grad, grad_lse))
    assert all((g[-BEHIND:] == 0).all() for g in gradients)
    wanted = [torch.zeros(x.shape, dtype=torch.float64) for x in gradients]
    given = {name: x for name, x in given.items() if not name.startswith(("max_", "deterministic"))}
    first = [0, 0]
    for b, lengths in enumerate(zip(queries, keys, strict=True)):
        mine, others = (slice(at, at + n) for at, n in zip(first, lengths, strict=True))
        first = [mine.stop, others.stop]
        one = [
            x[s].detach().cpu().double().transpose(0, 1)[None].requires_grad_()
            for x, s in ((q, mine), (k, others), (v, others))
        ]
        expected, expected_lse = attention_torch(*one, **given)
        magnitude, _ = attention_torch(one[0], one[1], one[2].abs(), **given)
        error = (out[mine].cpu().double().transpose(0, 1) - expected[0]).abs()
        assert (error <= 1.25 * ROUNDING[dtype] * (expected[0].abs() + magnitude[0]) + 1e-5).all(), (
            f"sequence {b} of {lengths} is off by {error.max():.3g}"
        )
        blind = expected_lse[0] == -math.inf
        assert torch.equal(lse[:, mine].cpu() == -math.inf, blind)
        torch.testing.assert_close(
            lse[:, mine].cpu()[~blind].double(), expected_lse[0][~blind].detach(), rtol=1e-5, atol=2e-5
        )
        if all(lengths):
            upstream = grad[mine].cpu().double().transpose(0, 1)[None], grad_lse[:, mine].cpu().double()[None]
            for x, g, s in zip(
                wanted,
                torch.autograd.grad((expected, expected_lse), one, upstream),
                (mine, others, others),
                strict=True,
            ):
                x[s] = g[0].transpose(0, 1)
    for name, found, exact in zip("qkv", gradients, wanted, strict=True):
        error = relative_error(found, exact)
        assert error < GRADIENT_ERROR[dtype], f"d{name} is off by {error:.2e}; {given}"


FEATURES = [{}, dict(causal=True), dict(window=(40, 5), softcap=3.0, scale=0.2)]


@pytest.mark.parametrize("given", [*map(slow, FEATURES), dict(causal=True, deterministic=True)], ids=str)
def test_lengths(given, rng):
    check(QUERIES, KEYS, **given)
    for queries, keys in on_gpu_or_simulated([(KEYS, QUERIES), ((1000, 3, 2500, 128),) * 2], [((150, 70), (128, 3))]):
        check(queries, keys, 2, 2, **given)


def test_many_sequences(rng):
    lengths = rng.integers(0, 4, on_gpu_or_simulated(700, 12)).tolist()
    check(lengths, lengths, 2, 1, causal=True)


@pytest.mark.parametrize("dtype", on_gpu_or_simulated([BF16, FP16], [FP16]))
@pytest.mark.parametrize(
    "dim, value_dim",
    on_gpu_or_simulated(
        [(16, 16), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (208, 240)],
        [(144, 128), slow(256, 256), slow(112, 112)],
    ),
)
def test_head_dimensions(dim, value_dim, dtype, rng):
    """Where registers do not hold both, one consumer computes dK and the other dV."""
    check((70, 0, 130), (90, 3, 64), 2, 1, dim, value_dim, dtype, causal=True)


def test_the_same_bits_as_each_sequence_alone(rng):
    """What is packed beside a sequence does not change its results."""

    def run(queries, keys, grad, *tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attention_varlen(*leaves, starts(queries), starts(keys), causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, leaves, grad)

    q, k, v = operands(QUERIES, KEYS)
    grad = torch.randn_like(q)
    packed = q, k, v, grad, *run(QUERIES, KEYS, grad, q, k, v)
    lengths = QUERIES, KEYS, KEYS, QUERIES, QUERIES, QUERIES, KEYS, KEYS
    sequences = zip(*(x[: sum(n)].split(list(n)) for x, n in zip(packed, lengths, strict=True)), strict=True)
    for queries, keys, (one_q, one_k, one_v, one_grad, *found) in zip(QUERIES, KEYS, sequences, strict=True):
        expected = run((queries,), (keys,), one_grad, one_q, one_k, one_v)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (queries, keys)


def test_saved_tensors_of_other_strides(rng):
    """What a hook gives back for what was saved may lie in memory otherwise."""
    q, k, v = (x.requires_grad_() for x in operands(QUERIES, KEYS))
    grad, results = torch.randn(q.shape, device=DEVICE).to(BF16), []
    for unpack in (lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = attention_varlen(q, k, v, starts(QUERIES), starts(KEYS), causal=True, deterministic=True)
        results.append(torch.autograd.grad(out, (q, k, v), grad))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("given", on_gpu_or_simulated(FEATURES, [FEATURES[0], slow(FEATURES[1])]), ids=str)
def test_nan_stays_in_its_sequence(given, rng):
    """Output and gradients of all others have the bits that they have without it."""
    lengths, poisoned = (70, 130, 64, 100), (1, 3)

    def run(q, k, v, grad):
        out, lse = attention_varlen(
            q, k, v, starts(lengths), starts(lengths), return_lse=True, deterministic=True, **given
        )
        return *(parts(x, lengths) for x in (out, *torch.autograd.grad(out, (q, k, v), grad))), lse.split(
            [*lengths, BEHIND], 1
        )[:-1]

    tensors = [x.requires_grad_() for x in operands(lengths, lengths)]
    grad = torch.randn(tensors[0].shape, device=DEVICE).to(BF16)
    clean = run(*tensors, grad)
    wrong = [x.detach().clone() for x in (*tensors, grad)]
    for x in wrong:
        for b in poisoned:
            parts(x, lengths)[b].fill_(float("nan"))
    dirty = run(*(x.requires_grad_() for x in wrong[:3]), wrong[3])
    for before, after in zip(clean, dirty, strict=True):
        for b, (x, y) in enumerate(zip(before, after, strict=True)):
            assert y.isnan().all() if b in poisoned else torch.equal(x, y)


def test_bounds_of_the_lengths(rng, monkeypatch):
    """A window whose sides no sequence reaches is none, also for the choice of a kernel."""
    chosen = []
    monkeypatch.setattr(
        varlen_plan, "choose", lambda make, kind, *shape: chosen.append(kind) or choose(make, kind, *shape)
    )
    q, k, v = operands(QUERIES, KEYS)
    bounds = dict(max_seqlen_q=max(QUERIES), max_seqlen_k=max(KEYS))
    given = dict(return_lse=True, causal=True)
    wide = attention_varlen(
        q, k, v, starts(QUERIES), starts(KEYS), window=(max(QUERIES) + max(KEYS), None), **bounds, **given
    )
    assert all(map(torch.equal, wide, attention_varlen(q, k, v, starts(QUERIES), starts(KEYS), **given)))
    assert chosen[0] == chosen[1]


WRONG = [
    (-9, 30, 10**9, 40),
    (2**31 - 1, 0, -(2**31), 2**31 - 1),
    (0, 300, 20, 100),
    (5, 6, 7, 8),
    (10**9, -(10**9), 3, 2),
]


@contextlib.contextmanager
def overlapping():
    """Sequences that overlap: the simulator may find that two CTAs write the same rows, and nothing else."""
    try:
        yield
    except sim.SimulationError as error:
        assert {f.kind for f in error.findings} == {"race"}, error


@pytest.mark.parametrize("wrong", on_gpu_or_simulated(WRONG, WRONG[:1]), ids=str)
def test_wrong_starts_stay_inside(wrong, rng):
    """Results mean nothing then, but nothing beside the tensors is touched (the simulator would say so)."""
    q, k, v = (torch.randn(2 + n, 2, 64, device=DEVICE).to(BF16)[1:-1].requires_grad_() for n in (100, 90, 90))
    right, wrong = starts((30, 0, 60)), torch.tensor(wrong, dtype=torch.int32, device=DEVICE)
    around = poison(torch.empty(102, 2, 64, device=DEVICE, dtype=BF16))
    for given in ((wrong, right), (right, wrong), (wrong, wrong)):
        with torch.no_grad(), overlapping():
            attention_varlen(q, k, v, *given, out=around[1:-1], causal=True, return_lse=True)
        assert around[[0, -1]].isnan().all()
        with overlapping():
            attention_varlen(q, k, v, *given, causal=True).sum().backward()


def test_refused_starts(rng):
    """With `debug`, which looks at what they hold."""
    q, k, v = (torch.randn(n, 2, 64, device=DEVICE).to(BF16) for n in (100, 90, 90))
    right = starts((30, 0, 60))
    for wrong, given, message in (
        ((5, 30, 40, 50), {}, "cu_seqlens_q begins with 5; it must begin with 0"),
        ((0, 30, 20, 50), {}, "cu_seqlens_q decreases from 30 to 20 at element 2"),
        ((0, 30, 40, 101), {}, "cu_seqlens_q ends with 101; q has 100 rows"),
        (
            (0, 30, 40, 80),
            dict(max_seqlen_q=39),
            "cu_seqlens_q: sequence 2 has 40 rows; max_seqlen_q=39 must be no fewer",
        ),
        (
            (0, 30, 40, 80),
            dict(max_seqlen_k=59),
            "cu_seqlens_k: sequence 2 has 60 rows; max_seqlen_k=59 must be no fewer",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(f"attention_varlen: {message}")):
            attention_varlen(q, k, v, torch.tensor(wrong, dtype=torch.int32, device=DEVICE), right, debug=True, **given)
    given = dict(max_seqlen_q=60, max_seqlen_k=60, return_lse=True)
    assert all(
        map(
            torch.equal,
            attention_varlen(q, k, v, right, right, debug=True, **given),
            attention_varlen(q, k, v, right, right, **given),
        )
    )


def test_views_without_copies(rng):
    """Q, K and V as parts of one packed tensor: the bits of contiguous ones."""
    lengths = (90, 0, 41)
    packed = torch.randn(sum(lengths), 3, 2, 64, device=DEVICE).to(BF16).requires_grad_()
    out = attention_varlen(*packed.unbind(1), starts(lengths), starts(lengths), causal=True)
    apart = [x.detach().contiguous().requires_grad_() for x in packed.unbind(1)]
    expected = attention_varlen(*apart, starts(lengths), starts(lengths), causal=True)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    assert torch.equal(
        torch.autograd.grad(out, packed, grad)[0], torch.stack(torch.autograd.grad(expected, apart, grad), 1)
    )
    odd = torch.randn(3, 131, 2, 68, device=DEVICE).to(BF16)[..., :64]  # rows that TMA cannot address are copied
    given = dict(causal=True, return_lse=True)
    found, wanted = (attention_varlen(*x, starts(lengths), starts(lengths), **given) for x in (odd, odd.contiguous()))
    assert all(map(torch.equal, found, wanted))


def test_nothing(rng):
    for queries, keys in (((0, 0), (3, 0)), ((3, 2), (0, 0)), ((), ())):
        q, k, v = (torch.randn(sum(n), 2, 64, device=DEVICE).to(BF16).requires_grad_() for n in (queries, keys, keys))
        out, lse = attention_varlen(q, k, v, starts(queries), starts(keys), return_lse=True)
        assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    q = torch.randn(5, 2, 64, device=DEVICE).to(BF16)  # no sequence, but rows
    assert (attention_varlen(q, q, q, starts(()), starts(())) == 0).all()


@pytest.mark.parametrize("height", [64, 128])
@pytest.mark.parametrize("of_keys", [False, True])
def test_list_of_tiles(of_keys, height, rng):
    queries, keys = (
        rng.choice([0, 1, 63, 64, 65, 128, 300], on_gpu_or_simulated(1000, 300)).tolist() for _ in range(2)
    )
    check_list(queries, keys, (100, BEHIND), of_keys, height)
    check_list([1] * 32, [1] * 32, (1, 1), of_keys, height)  # as many tiles as there can be


def check_list(queries, keys, behind, of_keys, height):
    totals = sum(queries) + behind[0], sum(keys) + behind[1]
    of = starts(queries), starts(keys)
    entries = Listing(*of, *totals, of_keys, height)(*of).tolist()
    assert len(entries) == most_tiles(totals[of_keys], len(queries), height)
    wanted, first = [], [0, 0]
    for b, lengths in enumerate([*zip(queries, keys, strict=True), behind]):
        seen = list(lengths)
        if b == len(queries):
            seen[not of_keys] = 0
        tiles = range(-(-lengths[of_keys] // height))
        entry = [first[0], seen[0], first[1], seen[1], first[0] // 64 + b, first[of_keys] // height + b]
        wanted += [[tile, *entry] for tile in (tiles if of_keys else reversed(tiles))]
        first = [at + n for at, n in zip(first, lengths, strict=True)]
    assert entries[: len(wanted)] == wanted and all(entry[0] == -1 for entry in entries[len(wanted) :])


def test_nan_stays_in_its_sequence_in_one_pass(rng):
    """The order of sums may differ there, not what they are of."""
    lengths = (70, 130, 64)
    q, k, v = (x.requires_grad_() for x in operands(lengths, lengths))
    with torch.no_grad():
        for x in (q, k, v):
            parts(x, lengths)[1].fill_(float("nan"))
    out = attention_varlen(q, k, v, starts(lengths), starts(lengths), causal=True)
    for x in (out, *torch.autograd.grad(out, (q, k, v), torch.randn_like(out))):
        first, second, third = parts(x, lengths)
        assert first.isfinite().all() and second.isnan().all() and third.isfinite().all()


def test_runs_are_bitwise_equal(rng):
    lengths = rng.integers(0, on_gpu_or_simulated(2000, 150), on_gpu_or_simulated(20, 3)).tolist()
    q, k, v = (x.requires_grad_() for x in operands(lengths, lengths))
    out = attention_varlen(q, k, v, starts(lengths), starts(lengths), causal=True, deterministic=True)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for _ in range(on_gpu_or_simulated(100, 1)):
        assert torch.equal(attention_varlen(q, k, v, starts(lengths), starts(lengths), causal=True), out)
        assert all(
            torch.equal(a, b)
            for a, b in zip(torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), first, strict=True)
        )


@pytest.mark.parametrize(
    "scores", [(None, None, 0.125, None, LIMIT, 0, False), slow((100, 130, 0.2, 3.0, 40, 5, True))], ids=str
)
def test_opcheck(scores, rng):
    q, k, v = (x.nan_to_num().requires_grad_() for x in operands((70, 20), (90, 30)))
    bounds = starts((70, 20)), starts((90, 30))
    torch.library.opcheck(
        torch.ops.tritonkittens.attention_varlen.default, (q, k, v, *bounds, *scores), rtol=2e-2, atol=2e-2
    )
    out, lse = torch.ops.tritonkittens.attention_varlen(*(x.detach() for x in (q, k, v)), *bounds, *scores)
    arguments = (
        torch.randn_like(out),
        torch.randn_like(lse).nan_to_num(),
        q.detach(),
        k.detach(),
        v.detach(),
        out,
        lse,
        *bounds,
        *scores,
    )
    torch.library.opcheck(
        torch.ops.tritonkittens.attention_varlen_backward.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled(rng):
    """One graph, forward and backward, with the results of eager calls, and the words of a refusal."""
    q, k, v = (x.nan_to_num().requires_grad_() for x in operands((70, 20), (90, 30)))
    bounds = starts((70, 20)), starts((90, 30))

    def layer(q, k, v, *bounds):
        return torch.nn.functional.silu(attention_varlen(q * 2, k, v, *bounds, causal=True)).sum()

    expected = torch.autograd.grad(layer(q, k, v, *bounds), (q, k, v))
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for found, wanted in zip(torch.autograd.grad(compiled(q, k, v, *bounds), (q, k, v)), expected, strict=True):
        assert relative_error(found, wanted) < 1e-2
    with pytest.raises(ValueError, match=r"attention_varlen: cu_seqlens_q is \(3,\), cu_seqlens_k \(2,\)"):
        compiled(q, k, v, bounds[0], bounds[1][1:])


SORTS = [
    (64, 64, BF16, {}),
    (128, 128, FP16, dict(causal=True)),
    (96, 48, BF16, dict(window=True)),
    (16, 32, FP16, dict(causal=True, softcap=4.0)),
    (208, 240, BF16, dict(window=True, causal=True)),
    (112, 112, BF16, dict(softcap=4.0)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dim, value_dim, dtype, given", SORTS, ids=str)
def test_random_configurations(dim, value_dim, dtype, given, rng):
    for _ in range(30):
        sequences, kv_heads, longest = int(rng.integers(1, 6)), int(rng.integers(1, 3)), 600
        queries, keys = (rng.integers(0, longest, sequences).tolist() for _ in range(2))
        sides = tuple(None if rng.random() < 0.3 else int(rng.integers(0, longest)) for _ in range(2))
        heads = kv_heads * int(rng.integers(1, 4))
        print(heads, kv_heads, queries, keys, sides)
        check(
            queries,
            keys,
            heads,
            kv_heads,
            dim,
            value_dim,
            dtype,
            **{**given, **({"window": sides} if "window" in given else {})},
        )


@pytest.mark.skipif(DEVICE == "cpu", reason="counts what a GPU's memory holds")
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 16, 128), (32, 8, 128), (28, 4, 128), (32, 4, 64)])
def test_memory_of_gradients(heads, kv_heads, dim):
    """As for sequences of one length, and of each a block of queries and a tile of keys more."""
    lengths = (1000, 24, 3000, 72)
    tensors = [
        torch.randn(sum(lengths), n, dim, device=DEVICE).to(BF16).requires_grad_() for n in (heads, kv_heads, kv_heads)
    ]
    out = attention_varlen(*tensors, starts(lengths), starts(lengths), causal=True)
    grad = torch.randn_like(out)
    requested = bytes_at_once(lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True))
    rows, more, shared = sum(lengths), 128 * (len(lengths) + 1), 0 if heads == kv_heads else kv_heads
    allowed = dim * (rows * (2 * heads + 4 * kv_heads) + (rows + more) * (4 * heads + 8 * shared))
    assert requested <= allowed + 2**16


@pytest.mark.parametrize("parts, dim", [(1, 64), slow(2, 64), slow(2, 80), slow(4, 160)])
def test_gradients_of_parts_of_groups(parts, dim, rng, monkeypatch):
    monkeypatch.setattr(varlen_backward_plan, "parts_of_group", lambda *_: parts)
    check((70, 130), (70, 150), heads=4, kv_heads=1, dim=dim, causal=True)
    check((3, 0, 140, 65), (5, 40, 0, 130), heads=4, kv_heads=1 if parts == 4 else 2, dim=dim)


def test_eager_calls_and_the_operator_agree(rng):
    """As for `attention`: an eager call is a plain autograd function, dispatch modes of torch see the operator, and
    both give the same bits."""
    starts = torch.tensor([0, 40, 40, 110], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(120, heads, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for heads in (2, 1, 1))
    grad = torch.randn(120, 2, 64, device=DEVICE).to(torch.bfloat16)

    def run():
        out = attention_varlen(q, k, v, starts, starts, max_seqlen_q=70, causal=True, deterministic=True)
        return out, torch.autograd.grad(out, (q, k, v), grad)

    assert_eager_is_operator(run, "VarlenFunction", "attention_varlen", "attention_varlen_backward")
