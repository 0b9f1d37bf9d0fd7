"""`tritonkittens.ops` against PyTorch's functions of the same signature, in float64."""

import re

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tests.util import DEVICE, relative_error
from tritonkittens.kernels.attention import attention
from tritonkittens.kernels.attention.operator import AttentionFunction
from tritonkittens.ops import scaled_dot_product_attention, use_attention

pytestmark = pytest.mark.usefixtures("kernel_device")

BF16 = torch.bfloat16


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def compare(q, k, v, *given, **named):
    exact = [x.detach().cpu().double() for x in (q, k, v)]
    out = scaled_dot_product_attention(q, k, v, *given, **named)
    expected = functional.scaled_dot_product_attention(*exact, *given, **named)
    assert out.shape == expected.shape and out.dtype == q.dtype
    assert relative_error(out, expected) < 8e-3


MASKS = [(mask, lengths) for mask in ("none", "is_causal", "lower right", "upper left") for lengths in ((100, 100), (60, 130), (130, 60))]
MASKS.remove(("lower right", (130, 60)))  # PyTorch's reference has NaN for queries without keys


@pytest.mark.parametrize(("mask", "lengths"), MASKS, ids=str)
def test_masks(mask, lengths, rng):
    queries, keys = lengths
    q, k, v = randn(2, 2, queries, 64), randn(2, 2, keys, 64), randn(2, 2, keys, 64)
    bias = {"lower right": causal_lower_right, "upper left": causal_upper_left}.get(mask)
    compare(q, k, v, bias(queries, keys) if bias else None, 0.0, mask == "is_causal")


@pytest.mark.parametrize("shapes", [
    ((2, 60, 64), (2, 70, 64), (2, 70, 64)),
    ((3, 2, 2, 20, 32), (3, 2, 2, 30, 32), (3, 2, 2, 30, 48)),
    ((2, 2, 40, 64), (1, 2, 50, 64), (2, 2, 50, 64)),
    ((1, 2, 40, 40), (1, 2, 50, 40), (1, 2, 50, 24)),
], ids=str)  # fmt: skip
def test_shapes(shapes, rng):
    """Any leading dimensions, broadcast ones, and head dimensions that are padded."""
    compare(*(randn(*shape) for shape in shapes), scale=0.2)


def test_groups(rng):
    compare(randn(1, 6, 50, 64), randn(1, 2, 70, 64), randn(1, 2, 70, 64), is_causal=True, enable_gqa=True)


def test_gradients_of_padded_dimensions(rng):
    q, k, v = (randn(1, 2, 50, 40).requires_grad_() for _ in range(3))
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum().backward()
    functional.scaled_dot_product_attention(*exact, is_causal=True).square().sum().backward()
    for found, expected in zip((q, k, v), exact, strict=True):
        assert relative_error(found.grad, expected.grad) < 2e-2


REFUSED = [
    (dict(attn_mask=torch.zeros(8, 8)), "attn_mask is a tensor; it must be None, causal_lower_right(L, S) or causal_upper_left(L, S)"),
    (dict(dropout_p=0.1), "dropout_p=0.1; the kernels have no dropout"),
    (dict(scale=-1.0), "scale=-1.0; it must be positive"),
    (dict(attn_mask=causal_lower_right(4, 8)), "a causal bias of 4 × 8 for 8 queries and 8 keys"),
    (dict(attn_mask=causal_lower_right(8, 8), is_causal=True), "attn_mask and is_causal exclude each other"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refused(given, message):
    q = randn(1, 2, 8, 64)
    with pytest.raises(ValueError, match=re.escape(f"scaled_dot_product_attention: {message}")):
        scaled_dot_product_attention(q, q, q, **given)


def test_refused_operands():
    q = randn(1, 2, 8, 64)
    cases = [
        ((q.float(),) * 3, "query has dtype torch.float32; all operands must be bf16 or fp16"),
        ((q, q.half(), q), "key has dtype torch.float16; all operands must be bf16 or fp16"),
        ((q[0, 0],) * 3, "query has shape (8, 64); it must have at least 3 dimensions"),
        ((randn(1, 2, 8, 320),) * 3, "the head dimension of query is 320; it must be at most 256"),
        ((randn(1, 4, 8, 64), q, q), "4 query heads and 2 key heads; they must be equal, or with enable_gqa the first a multiple of the second"),
    ]
    for operands, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            scaled_dot_product_attention(*operands)


def test_what_the_kernels_know_is_asked_for_as_pytorch_does(rng):
    """Calls that `attention` has had before: PyTorch's function still aligns a causal mask at the top left, and wants to be told of groups."""
    q, k, v = randn(1, 4, 20, 64), *(randn(1, 4, 70, 64) for _ in range(2))
    expected = functional.scaled_dot_product_attention(*(x.cpu().double() for x in (q, k, v)), is_causal=True)
    for _ in range(2):
        attention(q, k, v, causal=True)  # aligned at the bottom right
        assert relative_error(scaled_dot_product_attention(q, k, v, is_causal=True), expected) < 1e-2
    few = [x[:, :2] for x in (k, v)]
    for _ in range(2):
        scaled_dot_product_attention(q, *few, enable_gqa=True)
        with pytest.raises(ValueError, match="4 query heads and 2 key heads; they must be equal, or with enable_gqa"):
            scaled_dot_product_attention(q, *few)
    same = [scaled_dot_product_attention(q, *few, enable_gqa=True) for _ in range(2)]
    assert torch.equal(*same) and relative_error(same[0], functional.scaled_dot_product_attention(
        q.cpu().double(), *(x.cpu().double() for x in few), enable_gqa=True)) < 1e-2


def test_fallback(rng):
    """What the kernels cannot do is PyTorch's, if asked for."""
    q, k, v = (randn(1, 2, 20, 64) for _ in range(3))
    mask = torch.randn(20, 20, device=DEVICE, dtype=BF16)
    expected = functional.scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(scaled_dot_product_attention(q, k, v, mask, fallback=True), expected)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(128, 384, dtype=BF16, device=DEVICE), torch.nn.Linear(128, 128, dtype=BF16, device=DEVICE)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def test_a_model_uses_it(rng, monkeypatch):
    """Values and gradients of a model whose attention is replaced for a while, and what is called meanwhile."""
    calls = []
    run = AttentionFunction.apply
    monkeypatch.setattr(AttentionFunction, "apply", lambda *a: calls.append(a) or run(*a))
    torch.manual_seed(int(rng.integers(1 << 30)))
    model, x = Block(), randn(2, 70, 128)
    results = []
    for replaced in (False, True, False):
        model.zero_grad()
        if replaced:
            with use_attention():
                out = model(x)
        else:
            out = model(x)
        out.float().square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
        assert len(calls) == (0 if not results[1:] else 1)
    for found, expected in zip(results[1], results[0], strict=True):
        assert relative_error(found, expected) < 1e-2
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"


@pytest.mark.parametrize("given, kv_heads, dim", [(dict(), 4, 64), (dict(is_causal=True), 2, 64), (dict(scale=0.3), 1, 40)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(given, kv_heads, dim, dynamic, rng):
    """One graph, with its gradients, and with `dynamic` the same for other lengths."""
    torch.compiler.reset()

    def layer(q, k, v):
        return functional.silu(scaled_dot_product_attention(q * 2, k, v, enable_gqa=kv_heads < 4, **given)).sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=BACKEND)
    for length in (70, 90):
        q, k, v = (randn(1, heads, length, dim).requires_grad_() for heads in (4, kv_heads, kv_heads))
        expected = torch.autograd.grad(layer(q, k, v), (q, k, v))
        for found, wanted in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected, strict=True):
            assert relative_error(found, wanted) < 1e-2


def test_a_compiled_model_uses_it(rng, monkeypatch):
    """One graph with our operator in it, forward and backward, and the model's values and gradients."""
    torch.compiler.reset()
    model, x = Block(), randn(2, 70, 128)
    seen = []

    def watching(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    results = []
    for compiled in (False, True):
        model.zero_grad()
        run = torch.compile(model, fullgraph=True, backend=watching) if compiled else model
        with use_attention():
            out = run(x)
        out.float().square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    assert any("tritonkittens.attention" in target for target in seen)
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-2
