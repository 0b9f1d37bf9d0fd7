"""Attention forward: masks, windows, soft-cap, log-sum-exp, head dimensions of values, configurations, against float64,
element by element."""

import math

import pytest
import torch

import tritonkittens.lang as tk
from tests.util import DEVICE, crossed, in_types, on_gpu_or_simulated, poison, relative_error, slow, some_slow
from tritonkittens.kernels.attention import Config, attention, attention_torch, call_plan
from tritonkittens.kernels.attention.reference import sides, visible

pytestmark = pytest.mark.usefixtures("kernel_device")

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11}  # the largest relative error of one rounding


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def operands(batch, heads, kv_heads, queries, keys, dim, value_dim=None, dtype=BF16):
    return (
        randn(batch, heads, queries, dim, dtype=dtype),
        randn(batch, kv_heads, keys, dim, dtype=dtype),
        randn(batch, kv_heads, keys, value_dim or dim, dtype=dtype),
    )


def check(q, k, v, config=None, **given):
    """The output into poisoned memory and the log-sum-exp, each element within its own bound."""
    out = poison(torch.empty(*q.shape[:3], v.shape[3], device=DEVICE, dtype=q.dtype))
    result, lse = attention(q, k, v, out=out, return_lse=True, config=config, **given)
    assert result is out and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    expected, expected_lse = attention_torch(q, k, v, **given)
    magnitude, _ = attention_torch(q, k, v.abs(), **given)
    bound = 1.25 * ROUNDING[q.dtype] * (expected.abs() + magnitude) + 1e-6
    if q.dtype == FP16:  # weights below 2**-14 are rounded to multiples of 2**-24
        bound = bound + 2.0**-25 * v.double().abs().sum(-2).repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, None]
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), (
        f"{int((~(error <= bound)).sum())} of {error.numel()} wrong, the worst by {error.max():.3g}; {given}"
    )
    blind = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    torch.testing.assert_close(lse[~blind].double(), expected_lse[~blind], rtol=1e-5, atol=2e-5)
    return out


LENGTHS = [(1, 1), (1, 130), (130, 1), (128, 128), (64, 200), (300, 100), (129, 257), (257, 129)]


@pytest.mark.parametrize("dim", [64, slow(128)])
@pytest.mark.parametrize("queries, keys", on_gpu_or_simulated([*LENGTHS, (1000, 3000), (3000, 1000)], LENGTHS[3:]))
def test_causal(queries, keys, dim, rng):
    check(*operands(1, 2, 1, queries, keys, dim), causal=True)


@pytest.mark.simulated(multiprocessors=3)
@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
def test_causal_tasks_in_a_fixed_order(tiles, rng):
    """More tasks than blocks."""
    check(*operands(2, 3, 3, 128 * tiles - 5, 128 * tiles - 5, 64), Config(order=tk.LongestFirst()), causal=True)


@pytest.mark.simulated(multiprocessors=3)
@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("heads", [1, 5])
def test_causal_tasks_that_blocks_draw(heads, tiles, rng):
    """Few and many heads for the number of blocks."""
    check(*operands(2, heads, heads, 128 * tiles - 5, 128 * tiles - 5, 64), causal=True)


@pytest.mark.simulated(multiprocessors=2)
@pytest.mark.parametrize("dim, causal", crossed([64, 256, 128], [True, False]))
def test_several_tasks_a_block(dim, causal, rng):
    """Results beside the ring, and over it."""
    check(*operands(*on_gpu_or_simulated((8, 16), (1, 3)), on_gpu_or_simulated(16, 3), 300, 280, dim), causal=causal)


@pytest.mark.parametrize(
    "window",
    [(0, 0), (0, 70), (5, None), *map(slow, [(70, 0), (200, 30), (None, 5), (1000, 1000), (None, None)])],
    ids=str,
)
def test_window(window, rng):
    for queries, keys in on_gpu_or_simulated(LENGTHS, LENGTHS[5:]):
        check(*operands(1, 2, 2, queries, keys, 64), window=window)
    check(*operands(1, 1, 1, 300, 260, 64), window=window, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_softcap(softcap, causal, rng):
    q, k, v = operands(1, 2, 1, 150, 200, 64)
    check(q * 3, k, v, softcap=softcap, causal=causal)
    check(q * 3, k, v, softcap=softcap, scale=0.5, window=(100, 20), causal=causal)


DIMS = [*((d, d) for d in (16, 32, 48, 80, 96, 112, 160, 192, 224, 256)), (192, 128), (64, 128), (128, 64), (64, 256)]


QUICK_DIMS = [(16, 16, BF16), (112, 112, BF16), (256, 256, BF16), (128, 64, FP16)]


@pytest.mark.parametrize("dim, value_dim, dtype", some_slow(in_types(DIMS, BF16, FP16), QUICK_DIMS))
def test_head_dimensions(dim, value_dim, dtype, rng):
    causal = bool(rng.integers(2))
    check(*operands(1, 2, 1, 140, 200, dim, value_dim, dtype), causal=causal)


CONFIGS = [
    slow(Config(tile_n=64)),
    slow(Config(tile_n=64, consumers=1)),
    Config(consumers=1, stages=2),
    slow(Config(warp_scheduler_barrier=False)),
    Config(tile_n=64, consumers=3, long_turns=True),
    slow(Config(stages=2)),
    slow(Config(tile_n=64, consumers=4, stages=2)),
    slow(Config(dynamic=False)),
    slow(Config(tile_n=176, epilogue_n=32)),
    slow(Config(tile_n=80, consumers=1)),
    Config(tile_n=64, consumers=1, blocks_per_sm=3, warp_scheduler_barrier=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations(config, rng):
    for causal in on_gpu_or_simulated([False, True], [bool(rng.integers(2))]):
        print(f"{causal=}")
        for queries, keys in ((300, 500), (65, 130), (200, 64)):
            check(*operands(1, 2, 2, queries, keys, 64), config, causal=causal)


@pytest.mark.parametrize(
    "dim, value_dim, config",
    [
        (128, 128, Config(tile_n=176, epilogue_n=64)),
        slow(128, 64, Config(tile_n=112)),
        (32, 96, Config(tile_n=144)),
        slow(96, 96, Config(tile_n=96)),
        slow(112, 112, Config(tile_n=96)),
        (160, 160, Config(tile_n=112, epilogue_n=32)),
        slow(256, 256, Config(tile_n=48, epilogue_n=128)),
    ],
    ids=str,
)
def test_blocks_of_keys_that_are_no_power_of_two(dim, value_dim, config, rng):
    """K in several lines, in one, and in none, where lines would be short: then several products make the scores."""
    kinds = ({}, dict(causal=True), dict(window=(100, 20)), dict(softcap=2.0))
    for given in (kinds[i] for i in rng.permutation(len(kinds))[: on_gpu_or_simulated(len(kinds), 1)]):
        print(f"{given=}")
        check(*operands(1, 2, 1, 200, 391, dim, value_dim), config, **given)


def test_layouts_of_the_operands(rng):
    """(B, S, H, D), and Q, K, V packed into one tensor."""
    packed = randn(2, 150, 3, 2, 64)
    check(*(x.transpose(1, 2) for x in packed.unbind(2)), causal=True)
    for kv_heads, causal in ((4, False), (2, True)):  # without a mask, heads of a group share tiles in one layout only
        q, k, v = operands(2, 4, kv_heads, 100, 100, 64)
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(attention(q, k, v, causal=causal), attention(*strided, causal=causal))


@pytest.mark.parametrize("given", [{}, dict(softcap=2.0)], ids=str)
def test_heads_of_a_group_that_share_tiles(given, rng):
    """Without a mask, tiles of a group's queries have rows of several heads and end in the middle of one."""
    q, k, v = operands(2, 6, 2, 70, 130, 64)
    check(q, k, v, **given)
    config = Config(tile_n=64, consumers=1)
    check(q, k, v, config, **given)
    check(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, config, **given)


def test_calls_that_are_known(rng, monkeypatch):
    """A second call of a kind is launched at once: the same results, copies where operands need them, and what is wrong
    is refused as before."""
    launched = []
    original = call_plan.launch_forward
    monkeypatch.setattr(call_plan, "launch_forward", lambda *given: launched.append(given) or original(*given))
    q, k, v = operands(1, 2, 1, 100, 130, 64)
    for given in ({}, dict(causal=True), dict(window=(20, None)), dict(softcap=2.0, scale=0.2)):
        before = len(launched)
        for _ in range(3):
            check(q, k, v, **given)
            q.normal_()
        assert len(launched) == before + 1
        assert torch.equal(attention(q, k, v, **given), attention(q, k, v, **given)) and len(launched) == before + 2, (
            "without log-sum-exp another kernel"
        )
    # rows of 65 elements: TMA cannot address them
    uneven = [torch.cat([x, x[..., :1]], -1)[..., :64] for x in (q, k, v)]
    before = len(launched)
    for _ in range(2):
        out = poison(torch.empty(1, 2, 100, 65, device=DEVICE, dtype=BF16))
        assert torch.equal(attention(*uneven, out=out[..., :64]), attention(q, k, v)) and out[..., 64].isnan().all()
    assert len(launched) == before + 2
    with pytest.raises(TypeError, match="causal=1; it must be True or False"):
        attention(q, k, v, causal=1)
    with pytest.raises(ValueError, match=r"window=\(20.0, None\)"):
        attention(q, k, v, window=(20.0, None))
    with pytest.raises(TypeError, match="k has dtype"):
        attention(q, k.half(), v.half())


def test_outliers(rng):
    """Scores that only the running maximum keeps finite, in blocks of every place."""
    q, k, v = operands(1, 2, 2, 256, 512, 64)
    k[:, :, torch.randperm(512)[:6]] *= 60
    check(q, k, v, causal=True)
    check(q * 40, k, v, window=(90, 0))


def test_special_numbers(rng):
    q, k, v = operands(1, 1, 1, 130, 300, 64)
    q[0, 0, 3, 5] = k[0, 0, 200, 7] = v[0, 0, 150, 9] = float("nan")
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = attention_torch(q, k, v, causal=True)
    # zero times NaN: a NaN of V reaches every query that its block is multiplied for, in the reference all
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    assert (out.isnan() | ~expected.isnan()).all() and not out[:, :, :, :9].isnan()[
        ~expected.isnan()[:, :, :, :9]
    ].any()


@pytest.mark.parametrize("where, causal", [("q", False), ("k", True), ("v", False), ("v", True)])
@pytest.mark.parametrize(
    "dim, config", [(128, None), slow(64, None), (64, Config(tile_n=64, consumers=1)), slow(64, Config(consumers=3))]
)
def test_infinite_numbers(dim, config, where, causal, rng):
    """As in torch: a score of ∞ makes its row NaN and its log-sum-exp ∞, one of −∞ has no weight, an infinite value is
    one of the output."""
    q, k, v = operands(1, 2, 2, 200, 300, dim)
    {"q": q, "k": k, "v": v}[where][0, 0, 120, 3] = math.inf if rng.integers(2) else -math.inf
    out, lse = attention(q, k, v, causal=causal, return_lse=True, config=config)
    expected, expected_lse = attention_torch(q, k, v, causal=causal)
    for found, right in ((out, expected), (lse, expected_lse)):
        assert torch.equal(found.isnan(), right.isnan())
        assert torch.allclose(found.double()[~right.isnan()], right[~right.isnan()], atol=0.02, rtol=0.02)


def test_queries_without_keys(rng):
    q, k, v = operands(1, 2, 2, 200, 70, 64)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    blind = ~visible(200, 70, *sides(True, None)).any(-1)
    assert (
        blind.sum() == 130
        and (out[:, :, blind] == 0).all()
        and (lse[:, :, blind] == -math.inf).all()
        and lse[:, :, ~blind].isfinite().all()
    )
    out, lse = attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("given", [{}, dict(causal=True), dict(window=(150, 20))], ids=str)
def test_scores_that_grow_from_block_to_block(given, rng):
    """Rows that see nothing for a while, too."""
    q, k, v = operands(1, 2, 1, 200, 700, 64)
    for growth in (0.0, 1.0, 12.0):
        k[:, :, :, 0] = -growth * torch.arange(700, device=DEVICE) / 128  # blocks go from the last to the first
        q[:, :, :, 0] = 8.0
        check(q, k, v, **given)


@pytest.mark.parametrize(
    "dim, causal", on_gpu_or_simulated([(64, True), (64, False), (128, True), (128, False)], [(64, True)])
)
def test_runs_are_bitwise_equal(dim, causal, rng):
    """A thousand of the same input, on two streams at once, while products on a third take multiprocessors from
    them."""
    q, k, v = operands(2, 4, 2, on_gpu_or_simulated(1000, 300), on_gpu_or_simulated(1500, 300), dim)
    first = attention(q, k, v, causal=causal)
    if DEVICE == "cpu":
        for _ in range(2):
            assert torch.equal(attention(q, k, v, causal=causal), first)
        return
    *streams, beside = (torch.cuda.Stream() for _ in range(3))
    load, different = (
        torch.randn(2048, 2048, device=DEVICE, dtype=BF16),
        [torch.zeros((), device=DEVICE, dtype=torch.int64) for _ in streams],
    )
    torch.cuda.synchronize()
    for i in range(1000):
        with torch.cuda.stream(beside):
            load @ load
        with torch.cuda.stream(streams[i % 2]):
            different[i % 2] += (attention(q, k, v, causal=causal) != first).any()
    torch.cuda.synchronize()
    assert not sum(different)


@pytest.mark.parametrize(
    "dim, config",
    [slow(128, None), slow(64, Config(tile_n=64, consumers=1)), slow(64, Config(consumers=3)), (64, None)],
)
def test_error_with_outliers(dim, config, rng):
    """Hardly larger than if no weight were above one: where one key gets most of a row's weight, this is rounded to
    itself."""

    def outliers(*shape):
        return randn(*shape) + 10 * randn(*shape) * (torch.rand(shape, device=DEVICE) < 1e-3)

    queries, keys = on_gpu_or_simulated((2000, 4000), (400, 1000))
    # of one batch the factor is 0.98 to 1.17
    q, k, v = (outliers(on_gpu_or_simulated(8, 4), 2, rows, dim) for rows in (queries, keys, keys))
    exact = attention_torch(*(x.double() for x in (q, k, v)))[0]
    scores = (q.float() @ k.float().mT) / dim**0.5
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
    usual = ((weights.bfloat16().float() @ v.float()) / weights.sum(-1, keepdim=True)).bfloat16()
    found = attention(q, k, v, **({} if config is None else {"config": config}))
    # 1.15 to 1.4 where only LIMIT counts
    assert relative_error(found, exact) < on_gpu_or_simulated(1.1, 1.12) * relative_error(usual, exact)


def test_random_configurations(rng):
    for _ in range(on_gpu_or_simulated(4, 2)):  # each a kernel of its own
        dim, value_dim = (16 * int(x) for x in rng.integers(1, 17, 2))
        kv_heads = int(rng.integers(1, 3))
        heads = kv_heads * int(rng.integers(1, 4))
        queries, keys = (int(x) for x in rng.integers(1, on_gpu_or_simulated(900, 300), 2))
        sided = [None if rng.random() < 0.3 else int(rng.integers(0, keys + 1)) for _ in range(2)]
        given = dict(
            causal=bool(rng.integers(2)),
            window=tuple(sided) if rng.random() < 0.4 else None,
            softcap=4.0 if rng.random() < 0.2 else None,
        )
        print(heads, kv_heads, queries, keys, dim, value_dim, given)
        check(
            *operands(
                int(rng.integers(1, 3)), heads, kv_heads, queries, keys, dim, value_dim, [BF16, FP16][rng.integers(2)]
            ),
            **given,
        )
