"""Attention with a range of keys for every query, against float64: values, gradients, the operator."""

import re

import numpy as np
import pytest
import torch

from tests.util import DEVICE, on_gpu_or_simulated, relative_error, slow
from tritonkittens.kernels.attention import attention, attention_ranges
from tritonkittens.kernels.attention.ranges_plan import Run, runs
from tritonkittens.kernels.attention.reference import LIMIT

pytestmark = pytest.mark.usefixtures("kernel_device")

BF16 = torch.bfloat16


def operands(batch, heads, kv_heads, queries, keys, dim=64):
    """(B, S, H, D) tensors, seen as (B, H, S, D)."""
    shapes = ((batch, queries, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim))
    return [torch.randn(shape, device=DEVICE, dtype=BF16).transpose(1, 2).requires_grad_() for shape in shapes]


def reference(q, k, v, ranges, scale=None, softcap=None):
    """In float64, with a mask; differentiable."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    begin, end = ranges.cpu().long().unsqueeze(-1).unbind(-2)
    key = torch.arange(k.shape[2])
    seen = (key >= begin) & (key < end)
    weights = torch.where(seen.any(-1, keepdim=True), scores.masked_fill(~seen, -1e300).softmax(-1), 0.0)
    return weights @ v


def check(q, k, v, ranges, **given):
    ranges = torch.tensor(ranges, dtype=torch.int32).reshape(q.shape[0], 1, -1, 2)
    out = attention_ranges(q, k, v, ranges, **given)
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*exact, ranges, **given)
    assert relative_error(out, expected) < 8e-3
    assert out.dtype == q.dtype and out.transpose(1, 2).is_contiguous(), "the memory order of q"
    empty = (ranges[..., 0] == ranges[..., 1])[:, 0]
    assert (out.transpose(1, 2).cpu()[empty] == 0).all()
    grad = torch.randn(out.shape, device=DEVICE).to(BF16)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for name, x, g, ref in zip(
        "qkv", (q, k, v), found, torch.autograd.grad(expected, exact, grad.cpu().double()), strict=True
    ):
        assert g.shape == x.shape and relative_error(g, ref) < 1.2e-2, name
    return out, grad, found


def left(queries, hidden):
    """Padding on the left."""
    return [[0, 0]] * hidden + [[hidden, i + 1] for i in range(hidden, queries)]


def test_padding_and_sequences_in_a_row(rng):
    """Of four sequences two are alike, one is padded, one is three sequences in a row."""
    n = on_gpu_or_simulated(300, 80)
    row = [[start, i + 1] for start, end in ((0, 17), (17, 18), (18, n)) for i in range(start, end)]
    check(*operands(4, 2, 1, n, n), [left(n, 0), left(n, 0), left(n, 21), row])


def test_window_and_cache(rng):
    """Queries behind keys, of which the last ones are nobody's yet."""
    queries, keys = 40, 90
    ranges = [[[max(first, 30 + i - 19), 30 + i + 1] for i in range(queries)] for first in (0, 11)]
    check(*operands(2, 2, 2, queries, keys), ranges, scale=0.2)


@pytest.mark.parametrize("dim", [64, slow(256)])
def test_bidirectional(dim, rng):
    q, k, v = operands(3, 2, 1, 50, 70, dim)
    check(q, k, v, [[[0, 70]] * 50, [[5, 61]] * 50, [[0, 0]] * 50])


def test_window_on_both_sides(rng):
    """Of three sequences two are padded; ranges may end with the last key before they begin behind the first."""
    n, (before, behind) = 72, (19, 12)
    tokens = ((0, n), (0, 50), (48, n))
    check(
        *operands(3, 2, 1, n, n),
        [[[max(a, min(b, i - before)), min(b, max(a, i + behind + 1))] for i in range(n)] for a, b in tokens],
    )


def test_blocks(rng):
    """Tokens that see each other among such that see what precedes them."""
    n, blocks = 24, ((3, 9), (9, 10), (10, 16))
    ends = {i: end for begin, end in blocks for i in range(begin, end)}
    check(*operands(1, 2, 1, n, n), [[0, ends.get(i, i + 1)] for i in range(n)])


def test_ranges_that_have_nothing_to_do_with_each_other(rng):
    q, k, v = operands(1, 1, 1, 5, 40)
    check(q, k, v, [[0, 40], [7, 9], [7, 8], [30, 40], [30, 41 - 1]])


def test_one_range_is_attention(rng):
    """One call does it, with the same bits in values and gradients."""
    q, k, v = operands(2, 2, 1, 70, 70)
    out, grad, found = check(q, k, v, [left(70, 0)] * 2)
    expected = attention(q, k, v, causal=True)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True))


def test_nothing():
    for shape in ((0, 2, 1, 5, 5), (2, 2, 1, 0, 5), (2, 2, 1, 5, 0)):
        q, k, v = operands(*shape)
        ranges = torch.zeros(shape[0], 1, shape[3], 2, dtype=torch.int32)
        out = attention_ranges(q, k, v, ranges)
        assert out.shape == q.shape and not out.any()
        assert all(not g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_opcheck(rng):
    q, k, v = operands(2, 2, 1, 40, 40)
    ranges = torch.tensor([left(40, 0), left(40, 9)], dtype=torch.int32)[:, None]
    scores = (0.125, None)
    torch.library.opcheck(
        torch.ops.tritonkittens.attention_ranges.default, (q, k, v, ranges, *scores), rtol=2e-2, atol=2e-2
    )
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = torch.ops.tritonkittens.attention_ranges(q, k, v, ranges, *scores)
    arguments = (torch.randn_like(out), q, k, v, ranges, out, lse, *scores)
    torch.library.opcheck(
        torch.ops.tritonkittens.attention_ranges_backward.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_refused():
    q, k, v = operands(2, 2, 1, 3, 5)
    for ranges, message in (
        (
            torch.zeros(2, 1, 3, 2),
            "attention_ranges: ranges is (2, 1, 3, 2), torch.float32; it must be (2, 1, 3, 2), torch.int32",
        ),
        (
            torch.zeros(2, 1, 5, 2, dtype=torch.int32),
            "attention_ranges: ranges is (2, 1, 5, 2), torch.int32; it must be (2, 1, 3, 2), torch.int32",
        ),
        (
            torch.tensor([[[[0, 1], [0, 2], [3, 2]]]] * 2, dtype=torch.int32),
            "attention_ranges: ranges has one that ends before it begins",
        ),
        (
            torch.tensor([[[[0, 1], [0, 2], [0, 6]]]] * 2, dtype=torch.int32),
            "attention_ranges: ranges has one beyond the 5 keys",
        ),
        (
            torch.tensor([[[[-1, 1], [0, 2], [0, 3]]]] * 2, dtype=torch.int32),
            "attention_ranges: ranges has one beyond the 5 keys",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            attention_ranges(q, k, v, ranges)
    with pytest.raises(
        TypeError, match=re.escape("attention: k has dtype torch.float32; it must be torch.bfloat16 or torch.float16")
    ):
        attention_ranges(q, k.float(), v, torch.zeros(2, 1, 3, 2, dtype=torch.int32))


def test_runs():
    causal, everything = (LIMIT, 0), (LIMIT, LIMIT)
    rows = np.array([[0, 0], [0, 0], [2, 3], [2, 4], [2, 5], [5, 6], [5, 7]])
    assert runs(rows) == (Run(2, 5, 2, 5, *causal), Run(5, 7, 5, 7, *causal))
    assert runs(np.array([[0, 1], [0, 2], [0, 3]])) == (Run(0, 3, 0, 3, *causal),)
    assert runs(np.array([[1, 4]] * 3 + [[0, 4]])) == (Run(0, 3, 1, 4, *everything), Run(3, 4, 0, 4, *causal))
    assert runs(np.array([[1, 4]] * 2)) == (Run(0, 2, 1, 4, *everything),)
    assert runs(np.array([[0, 1], [1, 2], [1, 3], [3, 4], [4, 5], [4, 6]])) == tuple(
        Run(first, behind, first, behind, *causal) for first, behind in ((0, 1), (1, 3), (3, 4), (4, 6))
    )
    assert runs(np.array([[max(0, i - 2), min(9, i + 4)] for i in range(9)])) == (Run(0, 9, 0, 9, 2, 3),)
    assert runs(np.array([[max(0, i - 2), i + 5] for i in range(9)])) == (Run(0, 9, 0, 13, 6, 0),)
    assert runs(np.array([[0, 1], [0, 3], [0, 3], [0, 4]])) == (
        Run(0, 1, 0, 1, *causal),
        Run(1, 3, 0, 3, *everything),
        Run(3, 4, 0, 4, *causal),
    )
    assert runs(np.zeros((3, 2), int)) == runs(np.zeros((0, 2), int)) == ()
