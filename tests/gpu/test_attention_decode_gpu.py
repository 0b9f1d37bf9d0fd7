"""Attention of few queries against long keys, by several splits, against float64."""

import math
import re

import pytest
import torch

import tritonkittens.lang as tk
from tests.util import DEVICE, crossed, decode_split, in_pages, multiprocessors, on_gpu_or_simulated, poison, slow
from tritonkittens.kernels._tensors import addressable
from tritonkittens.kernels.attention import attention_decode, attention_torch, decode_plan
from tritonkittens.kernels.attention.num_splits import DecodeSplit

pytestmark = pytest.mark.usefixtures("kernel_device")

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11}
LONG = on_gpu_or_simulated(5000, 500)
PAGE_SIZES = on_gpu_or_simulated((16, 32, 48, 64, 128, 256, 384), (16, 48, 256))  # a block has 64 keys


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def check(
    batch, heads, kv_heads, queries, keys, dim=64, value_dim=None, dtype=BF16, lengths=None, starts=None, **given
):
    """Output and log-sum-exp into poisoned memory, with NaN in the cache behind every sequence and large numbers before
    its start."""
    q, k, v = (
        randn(batch, n, s, d, dtype=dtype)
        for n, s, d in ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim or dim))
    )
    filled = [keys] * batch if lengths is None else lengths
    for b, length in enumerate(filled):
        k[b, :, length:] = v[b, :, length:] = float("nan")
    out = poison(torch.empty(batch, heads, queries, value_dim or dim, device=DEVICE, dtype=dtype))
    for b, start in enumerate(starts or ()):
        k[b, :, :start] = v[b, :, :start] = 1e4
    counts, first = (
        None if x is None else torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths, starts)
    )
    result, lse = attention_decode(q, k, v, out=out, return_lse=True, lengths=counts, starts=first, **given)
    assert result is out
    given = {"causal": True, **{name: x for name, x in given.items() if name != "num_splits"}}
    for b, length in enumerate(filled):
        start = starts[b] if starts else 0
        one = [x[b : b + 1] for x in (q, k[:, :, start:length], v[:, :, start:length])]
        expected, expected_lse = attention_torch(*one, **given)
        magnitude, _ = attention_torch(one[0], one[1], one[2].abs(), **given)
        error = (out[b : b + 1].double() - expected).abs()
        assert (error <= 1.25 * ROUNDING[dtype] * (expected.abs() + magnitude) + 1e-5).all(), (
            f"off by {error.max():.3g}, sequence {b} of {length} keys"
        )
        blind = expected_lse == -math.inf
        assert torch.equal(lse[b : b + 1] == -math.inf, blind)
        torch.testing.assert_close(lse[b : b + 1][~blind].double(), expected_lse[~blind], rtol=1e-5, atol=2e-5)
    return out


def online_softmax(q, k, v, block=128):
    """As FlashAttention's: weights are relative to the largest score so far, rounded where they are multiplied, as the
    result is; all else is exact."""
    scores, out, total = q.double() @ k.double().mT / q.shape[-1] ** 0.5, 0.0, 0.0
    largest = torch.full_like(scores[..., :1], -math.inf)
    for some, values in zip(scores.split(block, -1), v.split(block, -2)):
        before, largest = largest, torch.maximum(largest, some.amax(-1, keepdim=True))
        weights, factor = (some - largest).exp(), (before - largest).exp()
        out, total = (
            out * factor + weights.to(q.dtype).double() @ values.double(),
            total * factor + weights.sum(-1, keepdim=True),
        )
    return (out / total).to(q.dtype)


@pytest.mark.parametrize("outliers, dim", [(1e-3, 128), slow(1e-3, 64), slow(0.0, 64), slow(0.0, 128)])
def test_errors_are_those_of_an_online_softmax(outliers, dim, rng):
    """Though weights are relative to a score that need not be the largest: 1.03 to 1.065 times, row by row, the
    geometric mean of 1,024, which chance changes by 0.5 %. Of all rows together a few with outliers would have most of
    the error (1.04 to 1.11)."""

    def operand(*shape):
        return randn(*shape) + 10 * randn(*shape) * (torch.rand(shape, device=DEVICE) < outliers)

    q, k, v = operand(32, 32, 1, dim), operand(32, 8, 256, dim), operand(32, 8, 256, dim)
    rows = q.unflatten(1, (8, 4))[..., 0, :]  # those of a group attend to the same keys
    exact = (torch.softmax(rows.double() @ k.double().mT / dim**0.5, -1) @ v.double()).reshape(q.shape)
    found, theirs = (
        (x.reshape(q.shape).double() - exact).norm(dim=-1)
        for x in (attention_decode(q, k, v), online_softmax(rows, k, v))
    )
    # a row whose one outlier outweighs all else by 10¹⁶ is its value in float64, which both may give: 0 of 0
    inexact = (found > 0) | (theirs > 0)
    times = (found / theirs)[inexact].log().mean().exp().item()
    assert times <= 1.1, f"{times:.3f} times the error"


@pytest.mark.parametrize("keys, num_splits", crossed([LONG, 128, 127, 129, 1], [None, 1, 2, 5, 128]))
def test_splits(keys, num_splits, rng):
    check(1, 4, 2, 1, keys, num_splits=num_splits)


@pytest.mark.parametrize(
    "shape, causal", crossed([(8, 1, 1), (4, 4, 3), (8, 2, 16), (64, 1, 1), (6, 2, 5)], [True, False]), ids=str
)
def test_groups_and_queries(shape, causal, rng):
    heads, kv_heads, queries = shape
    check(2, heads, kv_heads, queries, 300, causal=causal, num_splits=2)


@pytest.mark.parametrize(
    "heads, kv_heads, queries, num_splits",
    [(16, 2, 16, 2), slow(24, 1, 5, 1), (71, 1, 1, 3), (6, 2, 64, None), slow(10, 2, 31, 1)],
)
def test_more_rows_than_a_tile(heads, kv_heads, queries, num_splits, rng):
    """Several tiles of queries share a key head, the last with heads that nobody asked for where a group does not
    divide."""
    check(2, heads, kv_heads, queries, 300, lengths=[300, 131], num_splits=num_splits)


def test_lengths(rng):
    check(5, 4, 2, 2, LONG, lengths=[LONG, 0, 1, LONG - 3, 129])
    check(3, 2, 2, 4, 300, lengths=[3, 4, 128], num_splits=3)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_starts(num_splits, rng):
    """Left padding: starts within a block, at its edge, at the last key, and behind it."""
    check(5, 4, 2, 1, LONG, lengths=[LONG, LONG, 300, 200, 140], starts=[0, 128, 250, 199, 140], num_splits=num_splits)
    check(3, 4, 2, 3, 300, starts=[5, 297, 130], num_splits=num_splits)


@pytest.mark.parametrize("cluster", [2, slow(4), slow(8)])
def test_blocks_of_a_cluster_share_a_sequence(cluster, rng):
    """Some have no keys, one has the last block alone, and those behind a sequence hold what is no number."""
    with decode_split(DecodeSplit(1, cluster)):
        check(5, 4, 2, 2, LONG, dim=128, value_dim=128, lengths=[LONG, 0, 1, LONG - 3, 129])
        check(
            5,
            4,
            2,
            1,
            LONG,
            dim=128,
            value_dim=128,
            lengths=[LONG, LONG, 300, 200, 140],
            starts=[0, 128, 250, 199, 140],
            softcap=4.0,
        )
        check(2, 8, 2, 3, LONG, dim=128, value_dim=128, causal=False)
        check_pages(4, 8, 2, 3, 210, [207, 0, 1, 210], 16, 128, 128)


@pytest.mark.parametrize(
    "case, dtype",
    crossed([(96, 128, 2), (192, 128, 4), (256, 256, 8), (64, 32, 2), (64, 64, 4)], [BF16, FP16]),
    ids=str,
)
def test_head_dimensions_in_a_cluster(case, dtype, rng):
    dim, value_dim, cluster = case
    with decode_split(DecodeSplit(1, cluster)):
        check(1, 4, 2, 1, 200, dim, value_dim, dtype, softcap=5.0)


@pytest.mark.parametrize(
    "dims, dtype",
    crossed([(128, 128), (96, 96), (192, 128), (256, 256), (64, 32), (208, 240), (16, 16)], [BF16, FP16]),
    ids=str,
)
def test_head_dimensions(dims, dtype, rng):
    check(1, 4, 2, 1, 200, *dims, dtype, softcap=5.0)


def check_pages(batch, heads, kv_heads, queries, keys, lengths, page_size, dim=64, value_dim=64, dtype=BF16, **given):
    """Pages anywhere give the same bits as a cache."""
    q, k, v = (
        randn(batch, n, s, d, dtype=dtype)
        for n, s, d in ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim))
    )
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    expected, expected_lse = attention_decode(q, k, v, lengths=counts, return_lse=True, **given)
    k_pool, v_pool, table = in_pages(k, v, lengths, page_size)
    assert addressable(k_pool) and addressable(v_pool), "they are not copied"
    out = poison(torch.empty_like(expected))
    result, lse = attention_decode(q, k_pool, v_pool, lengths=counts, pages=table, out=out, return_lse=True, **given)
    assert result is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages(page_size, rng):
    keys = on_gpu_or_simulated(4960, 210)  # the last sequence ends inside of a block, and the table's memory with it
    check_pages(4, 8, 2, 3, keys, [keys - 3, 0, 1, keys], page_size, num_splits=2)


def test_pages_that_tiles_share(rng):
    check_pages(2, 16, 2, 16, 200, [70, 200], 48, num_splits=2)


@pytest.mark.parametrize(("page_size", "dim", "value_dim", "dtype"), [slow(16, 208, 240, FP16), (128, 96, 96, BF16)])
def test_pages_of_head_dimensions(page_size, dim, value_dim, dtype, rng):
    """Also those of tiles of several pieces, and of blocks of less than 128 keys."""
    check_pages(2, 4, 2, 1, 200, [70, 200], page_size, dim, value_dim, dtype, softcap=5.0, num_splits=2)


def test_sequences_share_pages(rng):
    """The table and the lengths have any strides."""
    q, (k, v) = randn(1, 4, 2, 64).repeat(2, 1, 1, 1), randn(2, 1, 2, 100, 64)
    k_pool, v_pool, table = in_pages(k, v, [100], 16)
    lengths = torch.tensor([100, 0, 100, 0], dtype=torch.int32, device=DEVICE)[::2]
    out = attention_decode(q, k_pool, v_pool, lengths=lengths, pages=table.expand(2, -1))
    assert torch.equal(out[0], out[1]) and torch.equal(out[:1], attention_decode(q[:1], k, v))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_layouts(num_splits, rng):
    """(B, S, H, D) caches and queries give the same bits as contiguous ones, also where the result of a single part
    goes straight to a contiguous one."""
    q, k, v = randn(2, 3, 4, 64), randn(2, 300, 2, 64), randn(2, 300, 2, 64)
    strided = [x.transpose(1, 2) for x in (q, k, v)]
    out = poison(torch.empty(2, 3, 4, 64, device=DEVICE, dtype=BF16)).transpose(1, 2)
    attention_decode(*strided, out=out, num_splits=num_splits)
    contiguous = [x.contiguous() for x in strided]
    assert torch.equal(out, attention_decode(*contiguous, num_splits=num_splits))
    assert torch.equal(out, attention_decode(*contiguous, num_splits=num_splits, return_lse=True)[0])


def test_nothing(rng):
    out, lse = attention_decode(randn(2, 4, 1, 64), randn(2, 2, 0, 64), randn(2, 2, 0, 64), return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    none = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for pages, columns in ((0, 3), (5, 0), (5, 3)):
        pool, table = randn(pages, 2, 16, 64), torch.full((2, columns), 2**30, dtype=torch.int32, device=DEVICE)
        out, lse = attention_decode(randn(2, 4, 1, 64), pool, pool, lengths=none, pages=table, return_lse=True)
        assert (out == 0).all() and (lse == -math.inf).all()


def test_runs_are_bitwise_equal(rng):
    q, k, v = randn(2, 8, 1, 64), randn(2, 2, LONG, 64), randn(2, 2, LONG, 64)
    first = attention_decode(q, k, v)
    for _ in range(on_gpu_or_simulated(200, 2)):
        assert torch.equal(attention_decode(q, k, v), first)


def test_refused():
    q, k = randn(2, 8, 9, 64), randn(2, 1, 20, 64)
    small = q[:, :, :1]
    for operands, given, message in (
        ((randn(2, 8, 65, 64), k, k), {}, "attention_decode: 65 queries; they must be at most 64"),
        (
            (small, k, k),
            dict(lengths=torch.zeros(3, dtype=torch.int32, device=DEVICE)),
            "attention_decode: lengths is (3,), torch.int32, on",
        ),
        (
            (small, k, k),
            dict(lengths=torch.zeros(2, device=DEVICE)),
            "attention_decode: lengths is (2,), torch.float32, on",
        ),
        (
            (small, k, k),
            dict(starts=torch.zeros(3, dtype=torch.int32, device=DEVICE)),
            "attention_decode: starts is (3,), torch.int32, on",
        ),
        (
            (q[:, :, :2], k, k),
            dict(starts=torch.zeros(2, dtype=torch.int32, device=DEVICE), causal=False),
            "attention_decode: starts with causal=False and 2",
        ),
        ((small, k, k), dict(num_splits=0), "attention_decode: num_splits=0; it must be from 1 to 128"),
        ((small, k, k), dict(scale=-1.0), "attention: scale=-1.0; it must be positive"),
        ((small, k.half(), k), {}, "attention: k has dtype torch.float16, q torch.bfloat16; they must be equal"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            attention_decode(*operands, **given)


def test_refused_contents(rng):
    """With `debug`, which looks at what tensors of numbers hold."""
    for case, changed, message in (
        (1, dict(lengths=[70, 101]), "lengths[1] is 101; it must be from 0 to the 100 keys of the cache"),
        (1, dict(lengths=[-1, 100]), "lengths[0] is -1; it must be from 0 to the 100 keys of the cache"),
        (1, dict(starts=[0, 200]), "starts[1] is 200; it must be from 0 to the 100 keys of the cache"),
        (2, dict(lengths=[70, 113]), "lengths[1] is 113; it must be from 0 to the 112 keys of a row of pages"),
        (2, dict(pages=[[0, 1, 2, 3, 25, 99, 99], [5, 6, 7, 8, 9, 10, 4]]), "pages[0, 4] is 25; the pool has 25 pages"),
    ):
        operands, given = cases()[case]
        numbers = {name: torch.tensor(x, dtype=torch.int32, device=DEVICE) for name, x in changed.items()}
        with pytest.raises(ValueError, match=re.escape(f"attention_decode: {message}")):
            attention_decode(*operands, debug=True, **{**given, **numbers})
        assert torch.equal(attention_decode(*operands, debug=True, **given), attention_decode(*operands, **given))


CROWDS = [(0, 64), (1, 64), (3, 64), (4, 64), (3, 96), (4, 32)]
SOME_KEYS = [{}, dict(lengths=[257, 0, 100, 64, 1, 200, 256]), dict(starts=[0, 256, 64, 63, 5, 100, 0])]


@pytest.mark.parametrize("crowd, given", crossed(CROWDS, SOME_KEYS), ids=str)
def test_more_tasks_than_thread_blocks(crowd, given, rng, monkeypatch):
    """So many thread blocks of a multiprocessor draw sequences that may differ in length; others get equally many."""
    blocks_per_sm, dim = crowd
    monkeypatch.setattr(decode_plan, "multiprocessor_count", lambda _: 1)
    with decode_split(DecodeSplit(blocks_per_sm=blocks_per_sm)):
        check(7, 4, 1, 1, 257, dim, **given)
        (launch,) = decode_plan._plans.values()
    assert launch.kernel.blocks_per_sm == (blocks_per_sm or 2) and not launch.partial
    assert isinstance(launch.kernel.schedule, tk.Dynamic if given else tk.Persistent)


SOME_LONG = [{}, dict(lengths=[600, 0, 100, 64, 1, 513, 600]), dict(starts=[0, 599, 64, 63, 5, 100, 0])]


@pytest.mark.simulated(multiprocessors=2)
@pytest.mark.parametrize("given, case", crossed(SOME_LONG, [(0, 128, 1), (3, 64, 1), (3, 96, 2)]), ids=str)
def test_tasks_that_not_every_multiprocessor_can_have_are_split(given, case, rng):
    """Each into as many parts as there are multiprocessors for; also where it has fewer blocks of keys than parts."""
    blocks_per_sm, dim, queries = case
    tasks = multiprocessors() * (1 if blocks_per_sm == 0 else 2) + 1
    for keys in (600, 64):
        # the last one is split
        of_all = {name: [min(values[i % 7], keys) for i in reversed(range(tasks))] for name, values in given.items()}
        with decode_split(DecodeSplit(blocks_per_sm=blocks_per_sm, split_rest=True)):
            check(tasks, 2, 1, queries, keys, dim, **of_all)
            (launch,) = decode_plan._plans.values()
        assert isinstance(launch.kernel.schedule, tk.SplitRest) and not launch.partial


@pytest.mark.simulated(multiprocessors=2)
def test_parts_of_tasks_are_merged_alike_in_every_run(rng):
    tasks = multiprocessors() + 1
    q, k, v = randn(tasks, 4, 1, 64), randn(tasks, 1, 700, 64), randn(tasks, 1, 700, 64)
    with decode_split(DecodeSplit(split_rest=True)):
        first, *others = (attention_decode(q, k, v).clone() for _ in range(on_gpu_or_simulated(200, 3)))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "queries, given",
    [
        (1, {}),
        slow(5, {}),
        slow(5, dict(lengths=[650, 700, 513, 700, 1, 697, 545, 700, 0])),
        (16, dict(lengths=[700, 3, 545, *(690, 580, 700) * 2])),
        (5, dict(starts=[0, 600, 1, *(5, 0, 650) * 2])),
    ],
)
def test_long_tasks_of_crowds_read_their_keys_from_different_places_on(queries, given, rng):
    """Eight places, by the sequence; the last keys, which causal queries do not all see, come first all the same."""
    with decode_split(DecodeSplit(blocks_per_sm=4)):
        check(9, 4, 2, queries, 700, 64, **given)
        (launch,) = decode_plan._plans.values()
    assert launch.kernel.staggers_reads != ("starts" in given)


SPLITS = [
    slow(DecodeSplit(blocks_per_sm=1)),
    DecodeSplit(blocks_per_sm=3),
    slow(DecodeSplit(blocks_per_sm=4)),
    slow(DecodeSplit(split_rest=True)),
]


@pytest.mark.parametrize("split", SPLITS)
def test_crowds_read_pages(split, rng):
    with decode_split(split):
        check_pages(4, 8, 2, 3, 210, [207, 0, 1, 210], 16)
        check_pages(2, 4, 2, 1, 300, [300, 129], 64)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_calls_alike_are_checked_once(num_splits, rng, monkeypatch):
    """Other data, other numbers of keys and other homes are done alike; other strides, options and operands are not,
    and a wrong call is refused every time."""
    known = {}
    monkeypatch.setattr(decode_plan, "_plans", known)
    counts = torch.tensor([100, 30], dtype=torch.int32, device=DEVICE)
    results = []
    for lengths in ([100, 30], [70, 100]):
        check(2, 4, 2, 1, 100, lengths=lengths, num_splits=num_splits)
        q, k, v = randn(2, 4, 1, 64), randn(2, 2, 100, 64), randn(2, 2, 100, 64)
        results.append(attention_decode(q, k, v, lengths=counts, num_splits=num_splits))
    assert len(known) == 2 and results[0].data_ptr() != results[1].data_ptr(), "with `out` and log-sum-exp, and without"
    for operands, given in (
        ((q, k.transpose(1, 2).contiguous().transpose(1, 2), v), {}),
        ((q, k, v), dict(scale=0.5)),
        ((q, k, v), dict(causal=False)),
    ):
        expected = attention_torch(*operands[:2], v, **{"causal": True, **given})[0]
        out = attention_decode(*operands, num_splits=num_splits, **given)
        assert (out.double() - expected).abs().max() < 0.02
    assert len(known) == 5
    for _ in range(2):
        with pytest.raises(ValueError, match="scale=-1.0; it must be positive"):
            attention_decode(q, k, v, num_splits=num_splits, scale=-1.0)
        with pytest.raises(TypeError, match="causal=1; it must be True or False"):
            attention_decode(q, k, v, num_splits=num_splits, causal=1)
    assert len(known) == 5


@pytest.mark.parametrize("num_splits", [1, 2])
def test_one_plan_reads_caches_of_all_lengths(num_splits, rng, monkeypatch):
    """In memory as they are, of views with other strides, and of fewer keys than there are splits."""
    monkeypatch.setattr(decode_plan, "_plans_of_kernels", plans := {})
    q = randn(2, 4, 1, 64)
    for keys in (130, 131, 7, 200, LONG):
        k, v = randn(2, 2, keys, 64), randn(2, 2, keys, 64)
        expected = attention_torch(q, k, v)[0]
        for caches in ((k, v), tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))):
            out = attention_decode(q, *caches, num_splits=num_splits)
            assert (out.double() - expected).abs().max() < 0.02, keys
        more = torch.full((2, 2, keys + 9, 64), float("nan"), device=DEVICE, dtype=BF16)
        more[:, :, 5 : 5 + keys] = k
        out = attention_decode(q, more[:, :, 5 : 5 + keys], v, num_splits=num_splits)
        assert (out.double() - expected).abs().max() < 0.02, keys
    assert len(plans) == 1


@pytest.mark.parametrize("num_splits, cluster", [(1, 1), (2, 1), (1, 2)])
def test_infinite_scores(num_splits, cluster, rng):
    """As in torch: NaN, with ∞ as log-sum-exp, for the query that has such a score."""
    q, k, v = randn(1, 2, 1, 64), randn(1, 2, 300, 64), randn(1, 2, 300, 64)
    q[0, 0, 0, 3] = math.inf
    with decode_split(DecodeSplit(num_splits, cluster)):
        out, lse = attention_decode(q, k, v, return_lse=True)
    assert (
        out[0, 0].isnan().all()
        and lse[0, 0, 0] == math.inf
        and out[0, 1].isfinite().all()
        and lse[0, 1].isfinite().all()
    )


def cases():
    """Operands of `attention_decode` and its options: a whole cache, one that begins and ends inside, and pages."""
    q, k, v = randn(2, 4, 1, 64), randn(2, 2, 100, 64), randn(2, 2, 100, 64)
    lengths, starts = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([70, 100], [0, 9]))
    k_pool, v_pool, table = in_pages(k, v, [70, 100], 16)
    paged = dict(lengths=lengths, pages=table, num_splits=2)
    return [
        ((q, k, v), {}),
        ((q, k, v), dict(lengths=lengths, starts=starts, softcap=4.0)),
        ((q, k_pool, v_pool), paged),
    ]


@pytest.mark.parametrize("case", range(3))
def test_operator(case, rng):
    """torch.library's own checks, and one graph with the results of the eager call."""
    operands, given = cases()[case]
    named = {
        **dict(lengths=None, starts=None, pages=None, causal=True, scale=None, softcap=None, num_splits=None),
        **given,
    }
    torch.library.opcheck(torch.ops.tritonkittens.attention_decode.default, (*operands, *named.values()))

    def layer(q, k, v):
        out, lse = attention_decode(q * 2, k, v, return_lse=True, **given)
        return out + 1, lse, attention_decode(q, k, v, out=torch.empty_like(out), **given)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for found, expected in zip(compiled(*operands), layer(*operands), strict=True):
        torch.testing.assert_close(found, expected)
