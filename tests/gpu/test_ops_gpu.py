"""`tritonkittens.ops` against PyTorch's functions of the same signature, in float64."""

import re

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

from tests.util import DEVICE, relative_error, slow
from tritonkittens import nn
from tritonkittens.kernels.attention import attention
from tritonkittens.kernels.attention.autograd import AttentionFunction
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


MASKS = [
    (mask, lengths)
    for mask in ("none", "is_causal", "lower right", "upper left")
    for lengths in ((100, 100), (60, 130), (130, 60))
]
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


@pytest.mark.parametrize("queries, keys", [(0, 5), (8, 0), (0, 0)])
def test_no_queries_or_no_keys(queries, keys):
    for lead, dim in (((2,), 16), ((2, 2), 24)):
        out = scaled_dot_product_attention(randn(*lead, queries, dim), randn(*lead, keys, dim), randn(*lead, keys, dim))
        assert out.shape == (*lead, queries, dim) and not out.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autocast(dtype, rng):
    """As PyTorch's: operands and result are of the type of autocast."""
    q, k, v = (randn(1, 2, 20, 64, dtype=dtype) for _ in range(3))
    with torch.autocast(DEVICE, dtype=BF16):
        out = scaled_dot_product_attention(q, k, v)
    assert (
        out.dtype == BF16
        and relative_error(out, functional.scaled_dot_product_attention(*(x.cpu().double() for x in (q, k, v)))) < 2e-2
    )


def test_gradients_of_padded_dimensions(rng):
    q, k, v = (randn(1, 2, 50, 40).requires_grad_() for _ in range(3))
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum().backward()
    functional.scaled_dot_product_attention(*exact, is_causal=True).square().sum().backward()
    for found, expected in zip((q, k, v), exact, strict=True):
        assert relative_error(found.grad, expected.grad) < 2e-2


REFUSED = [
    (
        dict(attn_mask=torch.zeros(8, 8)),
        "attn_mask is a tensor; it must be None, causal_lower_right(L, S) or causal_upper_left(L, S)",
    ),
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
        (
            (randn(1, 4, 8, 64), q, q),
            "4 query heads and 2 key heads; they must be equal, or with enable_gqa the first a multiple of the second",
        ),
    ]
    for operands, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            scaled_dot_product_attention(*operands)


def test_what_the_kernels_know_is_asked_for_as_pytorch_does(rng):
    """Calls that `attention` has had before: PyTorch's function still aligns a causal mask at the top left, and wants
    to be told of groups."""
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
    assert (
        torch.equal(*same)
        and relative_error(
            same[0],
            functional.scaled_dot_product_attention(
                q.cpu().double(), *(x.cpu().double() for x in few), enable_gqa=True
            ),
        )
        < 1e-2
    )


def test_fallback(rng):
    """What the kernels cannot do is PyTorch's, if asked for."""
    q, k, v = (randn(1, 2, 20, 64) for _ in range(3))
    mask = torch.randn(20, 20, device=DEVICE, dtype=BF16)
    expected = functional.scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(scaled_dot_product_attention(q, k, v, mask, fallback=True), expected)


Q = (2, 4, 24, 64)
UNUSUAL = [
    ("a tensor subclass", lambda: [TwoTensor(x, x.clone()) for x in (randn(*Q), randn(*Q), randn(*Q))], {}),
    ("strided nested", lambda: [torch.nested.nested_tensor([randn(2, n, 64) for n in (16, 32)]) for _ in range(3)], {}),
    ("jagged, with a mask", lambda: [jagged((16, 32))] * 3, dict(attn_mask=causal_lower_right(16, 16))),
    ("jagged, other lengths of values", lambda: [jagged((16, 32)), jagged((16, 32)), jagged((16, 32))], {}),
    ("no heads", lambda: [randn(2, 0, 8, 64)] * 3, {}),
    ("no head dimension", lambda: [randn(2, 2, 8, 0), randn(2, 2, 8, 0), randn(2, 2, 8, 64)], dict(scale=1.0)),
    ("no dimension of values", lambda: [randn(2, 2, 8, 64), randn(2, 2, 8, 64), randn(2, 2, 8, 0)], {}),
    ("keys and values that do not fit", lambda: [randn(*Q), randn(*Q), randn(2, 4, 20, 64)], {}),
    ("head dimensions that do not fit", lambda: [randn(*Q), randn(2, 4, 24, 32), randn(*Q)], {}),
    ("batches that do not broadcast", lambda: [randn(*Q), randn(3, 4, 24, 64), randn(3, 4, 24, 64)], {}),
    ("values of one head", lambda: [randn(*Q), randn(*Q), randn(2, 1, 24, 64)], {}),
    ("queries of one head", lambda: [randn(2, 1, 24, 64), randn(*Q), randn(*Q)], {}),
    ("an infinite scale", lambda: [randn(*Q)] * 3, dict(scale=float("inf"))),
    ("a scale of 0", lambda: [randn(*Q)] * 3, dict(scale=0)),
    ("a scale of numpy", lambda: [randn(*Q)] * 3, dict(scale=np.float32(0.1))),
    ("a tensor as scale", lambda: [randn(*Q)] * 3, dict(scale=torch.tensor(0.1, dtype=torch.float64, device="cpu"))),
    (
        "a mask and is_causal",
        lambda: [randn(*Q)] * 3,
        dict(attn_mask=torch.zeros(24, 24, dtype=BF16, device=DEVICE), is_causal=True),
    ),
]


def jagged(lengths, heads=2, dim=64, like=None):
    offsets = (
        like.offsets() if like is not None else torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64, device=DEVICE)
    )
    return torch.nested.nested_tensor_from_jagged(randn(sum(lengths), heads, dim), offsets).transpose(1, 2)


@pytest.mark.parametrize("name", [name for name, *_ in UNUSUAL])
def test_what_ran_before_runs_as_before(name, rng):
    """Whatever PyTorch's function takes or refuses, a model gets the same from it within `use_attention`. (PyTorch's
    plain implementation: on a GPU its choice, cuDNN, gives None for no heads and crashes on operands that do not
    fit.)"""
    _, make, given = next(case for case in UNUSUAL if case[0] == name)
    operands = make()

    def outcome():
        try:
            with sdpa_kernel(SDPBackend.MATH):
                out = functional.scaled_dot_product_attention(*operands, **given)
        except Exception as error:
            return type(error), str(error)
        parts = out.unbind() if out.is_nested else [out.a, out.b] if isinstance(out, TwoTensor) else [out]
        return [x.detach() for x in parts]

    expected = outcome()
    with use_attention():
        found = outcome()
    if isinstance(expected, tuple):
        assert found == expected
        return
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert torch.equal(x.isnan(), y.isnan()) and relative_error(x.nan_to_num(), y.nan_to_num().double()) < 1e-2


@pytest.mark.parametrize(
    "given", [slow({}), slow(dict(is_causal=True)), slow(dict(scale=0.2)), dict(enable_gqa=True)], ids=str
)
def test_jagged_tensors_run_on_the_kernel_of_packed_sequences(given, rng, monkeypatch):
    """Values and gradients, of which padding and PyTorch's implementation are no part."""
    lengths, kv_heads = (16, 1, 37, 0, 8), 1 if given.get("enable_gqa") else 2
    monkeypatch.setattr("tritonkittens.ops.attention._torch_attention", None)
    q = jagged(lengths).detach()
    k, v = (jagged(lengths, kv_heads, dim, q).detach() for dim in (64, 40))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*leaves, **given)
    assert out.shape == (*q.shape[:3], 40) and out.shape[2] == q.shape[2]
    out.values().float().square().sum().backward()
    for i, length in enumerate(lengths):
        exact = [x.detach()[i].cpu().double().requires_grad_() for x in leaves]
        if length:
            wanted = functional.scaled_dot_product_attention(*(x[None] for x in exact), **given)
            wanted.square().sum().backward()
            assert relative_error(out[i], wanted[0]) < 1e-2
            for leaf, x in zip(leaves, exact, strict=True):
                assert relative_error(leaf.grad[i], x.grad) < 2e-2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = (
            torch.nn.Linear(128, 384, dtype=BF16, device=DEVICE),
            torch.nn.Linear(128, 128, dtype=BF16, device=DEVICE),
        )

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return x + self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


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


@pytest.mark.parametrize(
    "given, kv_heads, dim", [slow(dict(), 4, 64), (dict(is_causal=True), 2, 64), (dict(scale=0.3), 1, 40)], ids=str
)
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


@pytest.mark.skipif(DEVICE != "cuda", reason="compiled graphs of launches are the GPU's")
def test_a_model_that_is_compiled_to_cuda_graphs_splits_its_work():
    """A token's attention and products split their work, and share buffers between launches."""
    torch.compiler.reset()
    linear = nn.Linear(8192, 512, bias=False, device=DEVICE, dtype=BF16)
    k, v = randn(1, 2, 9000, 64), randn(1, 2, 9000, 64)

    def token(q, x):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True).sum() + linear(x).square()

    compiled = torch.compile(token, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):  # eager, recorded, replayed
            q, x = randn(1, 8, 1, 64), randn(16, 8192)
            expected = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
            expected = expected.sum() + (x.double() @ linear.weight.double().T).square()
            assert relative_error(compiled(q, x), expected) < 1e-2
