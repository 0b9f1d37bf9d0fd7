"""Attention of packed sequences on chips with tensor memory, through the public operator, simulated."""

import math

import pytest
import torch

from tests.test_attention_blackwell import BLACKWELL, KERNEL
from tests.util import explored, poison, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.kernels.attention import attention_torch, attention_varlen
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded

BEHIND = 7  # rows behind the last sequence
QUERIES, KEYS = (1, 300, 0, 70, 130, 5), (1, 128, 40, 200, 0, 300)


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def operands(queries, keys, heads=2, kv_heads=1, dim=64, value_dim=None, dtype=torch.bfloat16):
    """Q, K, V with NaN behind the last sequence."""
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim or dim))
    made = [torch.randn(sum(lengths) + BEHIND, n, d).to(dtype) for lengths, n, d in shapes]
    for x in made:
        x[-BEHIND:] = float("nan")
    return made


def check(q, k, v, queries, keys, out, lse, error=0.02, **given):
    """Output and log-sum-exp of every sequence against float64. Behind them, zeros and −∞."""
    assert (out[-BEHIND:] == 0).all() and (lse[:, -BEHIND:] == -math.inf).all()
    lengths = [list(n) for n in (queries, keys, keys, queries)]
    packed = [x[:-BEHIND].split(n) for x, n in zip((q, k, v, out), lengths, strict=True)]
    sums = lse[:, :-BEHIND].split(list(queries), 1)
    for one_q, one_k, one_v, one_out, one_sums in zip(*packed, sums, strict=True):
        wanted, wanted_sums = attention_torch(*(x.transpose(0, 1)[None] for x in (one_q, one_k, one_v)), **given)
        torch.testing.assert_close(one_out.double().transpose(0, 1), wanted[0], rtol=0, atol=error)
        torch.testing.assert_close(one_sums.double(), wanted_sums[0], rtol=0, atol=3e-4)


CASES = [
    pytest.param(QUERIES, KEYS, {}, {}, id="ragged"),
    pytest.param(QUERIES, KEYS, {}, dict(causal=True), id="causal"),
    pytest.param((300, 40), (350, 200), {}, dict(window=(90, 20), scale=0.2, softcap=1.0), id="window, soft-cap"),
    pytest.param((3, 0, 1, 2) * 9, (2, 1, 0, 2) * 9, dict(heads=1), dict(causal=True), id="more than a list's program"),
    pytest.param((), (), {}, {}, id="no sequence"),
    pytest.param((0, 0), (3, 0), {}, {}, id="no query in a sequence"),
    slow((140, 30), (200, 150), dict(dim=128, dtype=torch.float16), dict(causal=True), id="dimension 128, fp16"),
    pytest.param((140, 30), (130, 40), dict(dim=32, value_dim=80), dict(causal=True), id="dimensions 32 and 80"),
    slow((140, 30), (200, 150), dict(dim=192, value_dim=128), {}, id="dimensions 192 and 128"),
]


@pytest.mark.parametrize("queries, keys, shape, given", CASES)
def test_results_are_those_of_float64(queries, keys, shape, given, rng):
    q, k, v = operands(queries, keys, **shape)
    around = poison(torch.empty(len(q) + 2, q.shape[1], v.shape[2] + 16, dtype=q.dtype))
    out = around[1:-1, :, 8:-8]
    with sim.device(**BLACKWELL):
        _, lse = attention_varlen(q, k, v, starts(queries), starts(keys), out=out, return_lse=True, **given)
    check(q, k, v, queries, keys, out, lse, **given)
    assert around.isnan().sum() == around.numel() - out.numel(), "nothing beside the output is written"


def test_nothing_of_a_sequence_reaches_another(rng):
    q, k, v = operands((130, 100, 150), (130, 100, 150))
    for x in (q, k, v):
        x[130:230] = float("nan")
    at = starts((130, 100, 150))
    with sim.device(**BLACKWELL):
        out = attention_varlen(q, k, v, at, at)
    assert out[130:230].isnan().all() and torch.isfinite(out[:130]).all() and torch.isfinite(out[230:]).all()


@pytest.mark.parametrize("total", [0, 5])
def test_no_keys_at_all(total):
    q, k = torch.randn(total, 2, 64).bfloat16(), torch.empty(0, 2, 64, dtype=torch.bfloat16)
    with sim.device(**BLACKWELL):
        out, lse = attention_varlen(q, k, k, starts((total,)), starts((0,)), return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()


def test_a_plan_launches_again_for_other_sequences(rng):
    """Of the same total lengths."""
    for queries, keys in (((200, 90), (60, 300)), ((0, 290), (359, 1))):
        q, k, v = operands(queries, keys)
        out = poison(torch.empty_like(q))
        with sim.device(**BLACKWELL):
            _, lse = attention_varlen(q, k, v, starts(queries), starts(keys), causal=True, out=out, return_lse=True)
        check(q, k, v, queries, keys, out, lse, causal=True)


def gradients(q, k, v, queries, keys, grad, **given):
    """(dQ, dK, dV) of the packed call."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention_varlen(*leaves, starts(queries), starts(keys), **given)
    return torch.autograd.grad(out, leaves, grad)


def check_gradients(q, k, v, queries, keys, grad, found, **given):
    """Of every sequence against float64. Behind them, zeros."""
    assert all((x[-BEHIND:] == 0).all() for x in found)
    lengths = [list(n) for n in (queries, keys, keys, queries, queries, keys, keys)]
    packed = [x[:-BEHIND].split(n) for x, n in zip((q, k, v, grad, *found), lengths, strict=True)]
    for one_q, one_k, one_v, one_grad, *mine in zip(*packed, strict=True):
        exact = [x.double().transpose(0, 1)[None].requires_grad_() for x in (one_q, one_k, one_v)]
        wanted, _ = attention_torch(*exact, **given)
        for x, g in zip(mine, torch.autograd.grad(wanted, exact, one_grad.double().transpose(0, 1)[None]), strict=True):
            torch.testing.assert_close(x.double().transpose(0, 1), g[0], rtol=0.02, atol=0.05)


GRADIENTS = [
    slow(QUERIES, KEYS, {}, {}, id="ragged"),
    pytest.param(QUERIES, KEYS, {}, dict(causal=True), id="causal"),
    slow((300, 40), (350, 200), dict(heads=4, kv_heads=2), dict(window=(90, 20), scale=0.2), id="window"),
    pytest.param((3, 0, 1, 2) * 9, (2, 1, 0, 2) * 9, dict(heads=1), dict(causal=True), id="more than a list's program"),
    pytest.param((), (), {}, {}, id="no sequence"),
    pytest.param((0, 0), (3, 0), {}, {}, id="no query in a sequence"),
    slow((140, 30), (200, 150), dict(dim=128, dtype=torch.float16), dict(causal=True), id="dimension 128, fp16"),
    slow((140, 30), (130, 40), dict(dim=32, value_dim=80), dict(causal=True), id="dimensions 32 and 80"),
    slow((140, 0, 30), (130, 2, 40), dict(dim=192, value_dim=128), dict(causal=True), id="dimensions 192 and 128"),
]


@pytest.mark.parametrize("queries, keys, shape, given", GRADIENTS)
def test_gradients_are_those_of_float64(queries, keys, shape, given, rng):
    q, k, v = operands(queries, keys, **shape)
    grad = torch.randn(len(q), q.shape[1], v.shape[2]).to(q.dtype)
    with sim.device(**BLACKWELL):
        found = gradients(q, k, v, queries, keys, grad, **given)
    check_gradients(q, k, v, queries, keys, grad, found, **given)


def test_gradients_of_a_sequence_do_not_reach_another(rng):
    lengths = (130, 100, 150)
    q, k, v = operands(lengths, lengths)
    grad = torch.randn_like(q)
    for x in (q, k, v, grad):
        x[130:230] = float("nan")
    with sim.device(**BLACKWELL):
        found = gradients(q, k, v, lengths, lengths, grad, causal=True)
    for x in found:
        assert x[130:230].isnan().all() and torch.isfinite(x[:130]).all() and torch.isfinite(x[230:]).all()


@explored(1, 20)
def test_every_schedule_gives_these_gradients(schedules, rng):
    queries, keys = (140, 70), (200, 130)
    q, k, v = operands(queries, keys)
    grad, found = torch.randn_like(q), []
    sim.explore(
        lambda: found.append(gradients(q, k, v, queries, keys, grad, causal=True)), schedules=schedules, **BLACKWELL
    )
    for one in found:
        check_gradients(q, k, v, queries, keys, grad, one, causal=True)


@explored(1, 20)
def test_every_schedule_gives_these_results(schedules, rng):
    queries, keys = (300, 70), (200, 300)
    q, k, v = operands(queries, keys)
    k *= 5  # so that rows are rescaled
    out, found = poison(torch.empty_like(q)), []

    def run():
        found.append(attention_varlen(q, k, v, starts(queries), starts(keys), causal=True, out=out, return_lse=True)[1])

    sim.explore(run, schedules=schedules, **BLACKWELL)
    check(q, k, v, queries, keys, out, found[-1], error=0.03, causal=True)


@pytest.mark.parametrize("given", [{}, dict(causal=True), dict(window=(5, 5))], ids=str)
def test_the_chip_chooses_the_kernel(given):
    q, k, v = operands(QUERIES, KEYS)

    def launched(gpu):
        found = recorded(
            lambda: attention_varlen(q, k, v, starts(QUERIES), starts(KEYS), **given), Device.of_gpu(GPUS[gpu])
        )
        return [launch.name for launch in found]

    assert launched("B200") == ["list_tiles", "list_tiles", KERNEL] and KERNEL not in launched("H200")


@pytest.mark.parametrize("given", [{}, dict(softcap=3.0), dict(deterministic=True)], ids=str)
def test_the_chip_chooses_the_kernel_of_the_backward(given):
    q, k, v = (x.requires_grad_() for x in operands(QUERIES, KEYS))

    def launched(gpu):
        def backward():
            out = attention_varlen(q, k, v, starts(QUERIES), starts(KEYS), **given)
            torch.autograd.grad(out, q, torch.empty_like(out))

        return "attention_backward_tmem" in [launch.name for launch in recorded(backward, Device.of_gpu(GPUS[gpu]))]

    assert launched("B200") == (not given) and not launched("H200")
