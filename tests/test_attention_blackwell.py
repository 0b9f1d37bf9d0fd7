"""Attention forward on chips with tensor memory, through the public operator, simulated."""

import math

import pytest
import torch

from tests.util import explored, poison, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.kernels.attention import Config, attention, attention_torch
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded

BLACKWELL = dict(arch="sm_100a", multiprocessors=2)
KERNEL = "attention_forward_tmem"


def operands(queries, keys, dim=64, value_dim=None, heads=1, kv_heads=None, batch=1, dtype=torch.bfloat16):
    shapes = ((heads, queries, dim), (kv_heads or heads, keys, dim), (kv_heads or heads, keys, value_dim or dim))
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def check(q, k, v, out, lse, **given):
    """Output and log-sum-exp against float64."""
    expected, sums = attention_torch(q, k, v, **given)
    assert (out.double() - expected).abs().max() < (0.02 if q.dtype == torch.bfloat16 else 0.003)
    error = torch.where(lse.double() == sums, 0.0, lse.double() - sums)
    assert error.abs().max() < 3e-4


CASES = [
    pytest.param(dict(queries=1, keys=1), {}, id="a query and a key"),
    slow(dict(queries=100, keys=70), {}, id="fewer keys than a block"),
    slow(dict(queries=256, keys=128), {}, id="one block"),
    pytest.param(dict(queries=130, keys=256, heads=5), {}, id="two blocks, several tasks a CTA"),
    pytest.param(dict(queries=300, keys=333, heads=4, kv_heads=2, batch=2), {}, id="groups"),
    pytest.param(dict(queries=300, keys=300, heads=2, kv_heads=1), dict(causal=True), id="causal"),
    pytest.param(dict(queries=300, keys=100), dict(causal=True), id="causal, queries without keys"),
    slow(dict(queries=70, keys=400), dict(causal=True), id="causal, more keys"),
    pytest.param(dict(queries=300, keys=450), dict(window=(90, 20)), id="window"),
    pytest.param(dict(queries=140, keys=200, heads=2), dict(softcap=1.0, causal=True), id="soft-cap"),
    slow(dict(queries=40, keys=64, heads=4, kv_heads=1), dict(window=(110, 110)), id="window that hides no key"),
    pytest.param(dict(queries=140, keys=200, dim=128, heads=2, dtype=torch.float16), {}, id="dimension 128, fp16"),
    slow(dict(queries=140, keys=130, dim=16), {}, id="dimension 16"),
    pytest.param(dict(queries=140, keys=130, dim=32, value_dim=80), dict(causal=True), id="dimensions 32 and 80"),
    slow(dict(queries=140, keys=130, dim=96), dict(causal=True), id="dimension 96"),
    slow(dict(queries=140, keys=130, dim=112, value_dim=48, heads=2, kv_heads=1), {}, id="dimensions 112 and 48"),
    slow(dict(queries=140, keys=130, dim=160, value_dim=16), dict(causal=True), id="dimensions 160 and 16"),
    slow(dict(queries=140, keys=200, dim=128, heads=2), dict(causal=True), id="dimension 128, causal"),
    slow(dict(queries=140, keys=200, dim=192, value_dim=128), dict(causal=True), id="dimensions 192 and 128"),
]


@pytest.mark.parametrize("shape, given", CASES)
def test_results_are_those_of_float64(shape, given, rng):
    q, k, v = operands(**shape)
    around = poison(torch.empty(*q.shape[:3], v.shape[3] + 16, dtype=q.dtype))
    out = around[..., 8:-8]
    with sim.device(**BLACKWELL):
        _, lse = attention(q, k, v, out=out, return_lse=True, **given)
    check(q, k, v, out, lse, **given)
    assert around.isnan().sum() == around.numel() - out.numel(), "nothing beside the output is written"


@pytest.mark.parametrize("dim", [64, 128])
def test_scores_that_grow_from_block_to_block_rescale_the_output(dim, rng):
    """By more than 2⁸ in the rows of some warps only. Blocks go from the last to the first. At dimension 128 the
    weights overwrite the scores."""
    q, k, v = operands(200, 400, dim)
    k[..., 0], q[..., 0] = -torch.arange(400) / 8, 0.0
    q[0, 0, ::48, 0] = 2.5 * math.sqrt(dim)
    with sim.device(**BLACKWELL):
        out, lse = attention(q, k, v, return_lse=True)
    expected, sums = attention_torch(q, k, v)
    assert (out.double() - expected).abs().max() < 0.03 and (lse - sums).abs().max() < 1e-2


@pytest.mark.parametrize("largest", [float("inf"), float("nan")])
def test_keys_that_are_no_numbers_make_results_that_are_none(largest, rng):
    """In the rows that see them only."""
    q, k, v = operands(130, 130)
    q[..., 0] = q[..., 0].abs()
    k[0, 0, 100, 0] = largest
    with sim.device(**BLACKWELL):
        out, _ = attention(q, k, v, causal=True, return_lse=True)
    assert torch.isfinite(out[0, 0, :100]).all() and not torch.isfinite(out[0, 0, 100:]).any()


def test_views_of_other_layouts_need_no_copy(rng):
    q, k, v = (torch.randn(2, 150, 3, 64).bfloat16().transpose(1, 2) for _ in range(3))
    with sim.device(**BLACKWELL):
        out, lse = attention(q, k, v, return_lse=True)
    check(q, k, v, out, lse)
    assert out.stride() == q.stride()


def test_other_scales_count(rng):
    q, k, v = operands(20, 150)
    with sim.device(**BLACKWELL):
        out, lse = attention(q, k, v, return_lse=True, scale=0.7)
    check(q, k, v, out, lse, scale=0.7)


@explored(1, 20)
@pytest.mark.parametrize("shape, given", [
    pytest.param(dict(queries=130, keys=300, heads=3), {}, id="tasks of three blocks"),
    pytest.param(dict(queries=300, keys=200, dim=128, heads=2, kv_heads=1), dict(causal=True), id="dimension 128"),
])  # fmt: skip
def test_every_schedule_gives_these_results(shape, given, schedules, rng):
    q, k, v = operands(**shape)
    k *= 5  # so that rows are rescaled
    out = poison(torch.empty_like(q))
    sim.explore(lambda: attention(q, k, v, out=out, return_lse=True, **given), schedules=schedules, **BLACKWELL)
    assert (out.double() - attention_torch(q, k, v, **given)[0]).abs().max() < 0.03


def launched(gpu, **given):
    """Names of the kernels that a call launches on a GPU."""
    q, k, v = operands(130, 130, **{name: given.pop(name) for name in ("dim", "value_dim") if name in given})
    return [launch.name for launch in recorded(lambda: attention(q, k, v, **given), Device.of_gpu(GPUS[gpu]))]


@pytest.mark.parametrize(
    "given", [{}, dict(causal=True), dict(window=(5, 5)), dict(softcap=3.0), dict(dim=144, value_dim=16)], ids=str
)
def test_the_chip_chooses_the_kernel(given):
    assert launched("B200", **given) == [KERNEL]
    assert KERNEL not in launched("H200", **given)


@pytest.mark.parametrize("given", [dict(dim=208), dict(config=Config())], ids=str)
def test_what_the_kernel_does_not_take_runs_as_before(given):
    assert KERNEL not in launched("B200", **given)
