"""Decoding on chips with tensor memory, through the public operator, simulated."""

import math

import pytest
import torch

from tests.util import explored, in_pages, poison, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels.attention import attention_decode, attention_torch
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded

BLACKWELL = dict(arch="sm_100a", multiprocessors=2)
KERNEL = "attention_decode_tmem"
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def operands(batch, heads, kv_heads, queries, keys, dim=64, value_dim=None, dtype=torch.bfloat16):
    shapes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim or dim))
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def compare(q, k, v, out, lse, lengths=None, starts=None, **given):
    """Output and log-sum-exp against float64, sequence by sequence."""
    for b, length in enumerate(lengths or [k.shape[2]] * len(q)):
        seen = slice(starts[b] if starts else 0, length)
        one = [x[b : b + 1] for x in (q, k[:, :, seen], v[:, :, seen])]
        expected, sums = attention_torch(*one, **given)
        magnitude, _ = attention_torch(one[0], one[1], one[2].abs(), **given)
        error = (out[b : b + 1].double() - expected).abs()
        assert (error <= 1.25 * ROUNDING[q.dtype] * (expected.abs() + magnitude) + 1e-5).all(), f"sequence {b}"
        off = torch.where(lse[b : b + 1].double() == sums, 0.0, lse[b : b + 1].double() - sums)
        assert off.abs().max() < 3e-5, f"sequence {b}"


def check(*shape, lengths=None, starts=None, page_size=None, num_splits=None, causal=True, arch="sm_100a", **given):
    """Results into poisoned memory, with NaN in the cache behind every sequence and large numbers before its start."""
    dims = {name: given.pop(name) for name in ("value_dim", "dtype") if name in given}
    q, k, v = operands(*shape, **dims)
    for b, length in enumerate(lengths or ()):
        k[b, :, length:] = v[b, :, length:] = math.nan
    for b, start in enumerate(starts or ()):
        k[b, :, :start] = v[b, :, :start] = 1e4
    numbers = {name: torch.tensor(x, dtype=torch.int32) for name, x in (("lengths", lengths), ("starts", starts)) if x}
    cache = (k, v)
    if page_size is not None:
        *cache, numbers["pages"] = in_pages(k, v, lengths, page_size)
    out = poison(torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype))
    with sim.device(**BLACKWELL | dict(arch=arch)):
        result, lse = attention_decode(
            q, *cache, out=out, return_lse=True, num_splits=num_splits, causal=causal, **numbers, **given
        )
    assert result is out
    compare(q, k, v, out, lse, lengths, starts, causal=causal, **given)


# batch, heads, key heads, queries, keys, dimension
@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("keys", [1, 127, 128, 129, 500])
def test_splits(keys, num_splits, rng):
    check(1, 4, 2, 1, keys, num_splits=num_splits)


@pytest.mark.parametrize(
    "heads, kv_heads, queries", [(2, 2, 1), (8, 1, 1), (16, 1, 1), (32, 1, 1), (4, 4, 3), (6, 2, 5)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_groups_and_queries(heads, kv_heads, queries, causal, rng):
    check(2, heads, kv_heads, queries, 300, num_splits=2, causal=causal)


@pytest.mark.parametrize("given", [
    dict(),
    dict(dtype=torch.float16, softcap=5.0),
    dict(arch="sm_103a", num_splits=2),
    slow(dict(softcap=5.0, num_splits=2)),
], ids=str)  # fmt: skip
def test_dimension_128(given, rng):
    check(2, 4, 2, 1, 300, 128, **given)


@pytest.mark.parametrize("dim, value_dim", [(192, 128), (96, 96), (80, 16), slow(16, 80)], ids=str)
def test_other_dimensions(dim, value_dim, rng):
    """The tensors may have fewer columns than tiles."""
    check(1, 4, 2, 2, 200, dim, value_dim=value_dim)
    check(2, 4, 2, 1, 200, dim, value_dim=value_dim, lengths=[130, 0], page_size=16, num_splits=1)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_lengths(num_splits, rng):
    """None, one, around a block, and several tasks a CTA."""
    check(6, 4, 2, 2, 500, lengths=[500, 0, 1, 497, 129, 128], num_splits=num_splits)


def test_starts(rng):
    """Left padding: starts within a block, at its edge, at the last key, and behind it."""
    check(5, 4, 2, 1, 500, lengths=[500, 500, 300, 200, 140], starts=[0, 128, 250, 199, 140], num_splits=2)
    check(3, 4, 2, 3, 300, starts=[5, 297, 130])


@pytest.mark.parametrize("page_size", [16, 48, 128, 256])
def test_pages(page_size, rng):
    """Of more copies than a window holds, and of sequences that end within a page."""
    check(4, 8, 2, 3, 600, lengths=[597, 0, 1, 600], page_size=page_size, num_splits=1)


@pytest.mark.parametrize("dim", [64, slow(128)])
def test_pages_of_splits(dim, rng):
    check(2, 8, 2, 1, 600, dim, lengths=[130, 600], page_size=16, num_splits=2)


def test_scores_that_grow_from_block_to_block_rescale_the_output(rng):
    """By more than 2⁸, of some queries and in some warps only. Blocks go from the last to the first."""
    q, k, v = operands(1, 16, 1, 1, 700)
    k[..., 0], q[..., 0] = -torch.arange(700) / 8, 0.0
    q[0, ::3, 0, 0] = 20.0
    with sim.device(**BLACKWELL):
        out, lse = attention_decode(q, k, v, return_lse=True)
    expected, sums = attention_torch(q, k, v)
    assert (out.double() - expected).abs().max() < 0.03 and (lse - sums).abs().max() < 1e-2


@pytest.mark.parametrize("largest", [float("inf"), float("nan")])
def test_keys_that_are_no_numbers_make_results_that_are_none(largest, rng):
    """Of the queries that see them only."""
    q, k, v = operands(1, 2, 1, 3, 130)
    q[..., 0] = q[..., 0].abs()
    k[0, 0, 128, 0] = largest
    with sim.device(**BLACKWELL):
        out, _ = attention_decode(q, k, v, return_lse=True)
    assert torch.isfinite(out[:, :, 0]).all() and not torch.isfinite(out[:, :, 1:]).any()


def test_other_layouts_give_the_same_bits(rng):
    q, k, v = (torch.randn(2, s, h, 64).bfloat16().transpose(1, 2) for s, h in ((3, 4), (300, 2), (300, 2)))
    out = poison(torch.empty(2, 3, 4, 64).bfloat16()).transpose(1, 2)
    with sim.device(**BLACKWELL):
        attention_decode(q, k, v, out=out)
        assert torch.equal(out, attention_decode(*(x.contiguous() for x in (q, k, v)), num_splits=1))


def test_a_cache_that_grows(rng):
    """One plan serves several numbers of keys."""
    q, k, v = operands(1, 4, 1, 1, 300)
    with sim.device(**BLACKWELL):
        for keys in (297, 298):
            out, lse = attention_decode(q, k[:, :, :keys], v[:, :, :keys], return_lse=True)
            compare(q, k[:, :, :keys], v[:, :, :keys], out, lse)


@explored(1, 20)
@pytest.mark.parametrize("lengths, page_size", [
    pytest.param(None, None, id="tasks of three blocks"),
    pytest.param([130, 0, 300], None, id="tasks of two, no and three blocks"),
    pytest.param([130, 0, 300], 16, id="pages"),
])  # fmt: skip
def test_every_schedule_gives_these_results(lengths, page_size, schedules, rng):
    q, k, v = operands(3, 2, 1, 1, 300)
    k *= 5  # so that sums are rescaled
    cache, given = (k, v), {}
    if lengths:
        given["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    if page_size:
        *cache, given["pages"] = in_pages(k, v, lengths, page_size)
    out = poison(torch.empty_like(q))
    run = lambda: attention_decode(q, *cache, out=out, num_splits=1, **given)  # noqa: E731
    sim.explore(run, schedules=schedules, **BLACKWELL | dict(multiprocessors=1))
    for b, length in enumerate(lengths or [300] * 3):
        expected = attention_torch(*(x[b : b + 1] for x in (q, k[:, :, :length], v[:, :, :length])))[0]
        assert (out[b : b + 1].double() - expected).abs().max() < 0.03


def launches(gpu, *shape, **given):
    """What a call launches on a GPU."""
    q, k, v = operands(*shape)
    return recorded(lambda: attention_decode(q, k, v, **given), Device.of_gpu(GPUS[gpu]))


@pytest.mark.parametrize("shape", [(2, 4, 2, 1, 300), (2, 4, 2, 1, 300, 128), (1, 32, 1, 1, 300)], ids=str)
def test_the_chip_chooses_the_kernel(shape):
    assert launches("B200", *shape)[0].name == KERNEL
    assert launches("H200", *shape)[0].name != KERNEL


@pytest.mark.parametrize("shape", [(2, 4, 2, 1, 300, 208), (1, 64, 1, 1, 300)], ids=str)
def test_what_the_kernel_does_not_take_runs_as_before(shape):
    assert launches("B200", *shape)[0].name == "AttentionDecode"


@pytest.mark.parametrize("arch, shape", [
    ("sm_100a", (8, 32, 8, 1, 4096)),
    ("sm_103a", (8, 32, 8, 1, 4096, 128)),
    slow("sm_100a", (8, 32, 1, 1, 4096, 128)),
    slow("sm_103a", (8, 32, 1, 1, 4096, 128)),
], ids=str)  # fmt: skip
def test_machine_code(arch, shape):
    """Products run on tcgen05 alone, and nothing spills."""
    launch = launches("B200", *shape)[0]
    graph = _sass.Graph(*_sass.parse(*_tools.disassemble(launch.compile(arch).asm["cubin"])))
    opcodes = {i.opcode.split(".")[0] for block in graph.blocks for i in block}
    assert "UTCHMMA" in opcodes and not opcodes & {"HMMA", "LDL", "STL"}
