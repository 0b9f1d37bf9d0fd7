"""Rotary embeddings against references in float64, forward and backward, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_linear_attention import starts_of
from tests.cases_rotary import BF16, FP16, FP32, angles, check, heads, poisoned
from tests.util import DEVICE, crossed, drawn, relative_error, seeds, slow, some_lengths
from tritonkittens.kernels.rotary import call_plan, rotary, rotary_torch
from tritonkittens.kernels.rotary.config import Tiles

pytestmark = pytest.mark.usefixtures("kernel_device")

DIMS = [(64, 64), (128, 128), (80, 32), (2, 2), (9, 6), (96, 96)]  # of a head, and of what rotates
FORMS = [(BF16, False), (FP32, True), (FP16, False)]
SHAPES = [(2, 3, 5), (1, 1, 1), (2, 2, 40), (0, 2, 3), (1, 0, 3), (3, 9, 1), (2, 2, 0)]  # sequences, heads, tokens


@pytest.fixture(autouse=True)
def poison_in_results(monkeypatch):
    poisoned(monkeypatch)


def tokens_first(x):
    """The same numbers, with tokens before heads in memory."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("dims, shape, form", crossed(DIMS, SHAPES, FORMS), ids=str)
def test_shapes(dims, shape, form):
    (batch, _, tokens), (dtype, interleaved) = shape, form
    q, k = heads((*shape, dims[0]), dtype), heads((batch, 2, tokens, dims[0]), dtype)
    options = dict(interleaved=interleaved, rotary_dim=dims[1])
    found = check(q, k, *angles(tokens + 3, dims[1] // 2), rows=slice(tokens), **options)
    assert found[0].stride() == q.stride()
    check(tokens_first(q), None, *angles(tokens, dims[1] // 2), **options)
    check(q.detach().transpose(1, 2).requires_grad_(), None, *angles(tokens, dims[1] // 2), unsqueeze_dim=2, **options)


@pytest.mark.parametrize("dtype", [BF16, slow(FP32), slow(FP16)], ids=str)
def test_layouts_of_transformers(dtype):
    """cos and sin as transformers' models make them: for each token, in two equal halves, in the dtype of q."""
    q, k = tokens_first(heads((2, 4, 9, 32), dtype)), tokens_first(heads((2, 1, 9, 32), dtype))
    for batch in (2, 1):
        cos, sin = (torch.cat([t, t], -1) for t in angles(batch, 9, 16, dtype=dtype))
        found = check(q, k, cos, sin, rotary_dim=32)
        assert found[0].stride() == q.stride() and found[1].stride() == k.stride()
        assert torch.equal(rotary(q, None, cos, sin), found[0])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_positions(kind):
    q, k = heads((2, 2, 5, 16), FP32), heads((2, 1, 5, 16), FP32)
    cos, sin = angles(20, 8)
    for shape in ((2, 5), (1, 5), (5,)):
        ids = torch.randint(0, 20, shape, dtype=kind, device=DEVICE)
        check(q, k, cos, sin, rows=ids, position_ids=ids)
    ids = torch.randint(0, 20, (5, 2), dtype=kind, device=DEVICE).T
    check(q, k, cos.half(), sin.half(), rows=ids, position_ids=ids)
    offsets = torch.tensor([3, 15], dtype=kind, device=DEVICE)
    rows = offsets.long()[:, None] + torch.arange(5, device=DEVICE)
    check(q, k, cos, sin, rows=rows, seqlen_offsets=offsets)
    check(q, k, cos, sin, rows=rows[1], seqlen_offsets=15)


def test_a_function_of_transformers():
    """Positional arguments and results are those of its `apply_rotary_pos_emb`."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = tokens_first(heads((2, 4, 9, 32), FP32)).detach(), tokens_first(heads((2, 2, 9, 32), FP32)).detach()
    cos, sin = (torch.cat([t, t], -1) for t in angles(1, 9, 16))
    for a, b in zip(rotary(q, k, cos, sin), llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_positions_outside_of_the_table_are_nan():
    q = heads((1, 2, 5, 16), FP32).detach()
    cos, sin = angles(4, 8)
    ids = torch.tensor([0, 4, -1, 3, 2**31 - 1], device=DEVICE)
    y = rotary(q, None, cos, sin, ids, rotary_dim=16)
    assert y[:, :, [1, 2, 4]].isnan().all()
    assert torch.equal(y[:, :, [0, 3]], rotary(q[:, :, [0, 3]], None, cos[[0, 3]], sin[[0, 3]]))


@pytest.mark.parametrize("lengths", [[3, 0, 7, 1], [0, 0, 4], [5], [1] * 40], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(lengths, kind):
    total = sum(lengths)
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(kind)
    q, k = heads((total, 3, 16), FP32), heads((total, 1, 16), FP32)
    starts = torch.arange(len(lengths), device=DEVICE)
    rows = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    cos, sin = angles(64, 8)
    check(q, k, cos, sin, rows=rows, cu_seqlens=cu)
    check(q, k, cos, sin, rows=rows + 9, cu_seqlens=cu, seqlen_offsets=9)
    offsets = (starts * 3 % 7).to(kind)
    shift = torch.cat([offsets[i : i + 1].long().expand(n) for i, n in enumerate(lengths)])
    check(q, k, cos, sin, rows=rows + shift, cu_seqlens=cu, seqlen_offsets=offsets)
    ids = torch.randint(0, 64, (total,), dtype=kind, device=DEVICE)
    check(q, k, cos, sin, rows=ids, position_ids=ids)


# ---------------------------------------------------------------- norms of heads


def norms(dim, dtype=FP32):
    return dict(q_weight=heads((dim,), dtype), k_weight=heads((dim,), dtype))


@pytest.mark.parametrize("dims, shape, form", crossed(DIMS, SHAPES, FORMS), ids=str)
def test_norms(dims, shape, form):
    (batch, _, tokens), (dtype, interleaved) = shape, form
    options = dict(interleaved=interleaved, rotary_dim=dims[1], eps=1e-5, **norms(dims[0]))
    q, k = heads((*shape, dims[0]), dtype), heads((batch, 2, tokens, dims[0]), dtype)
    table = angles(tokens, dims[1] // 2)
    check(tokens_first(q), k, *table, **options)


def test_weights_of_norms(monkeypatch):
    """In the dtype of q; of q alone; and gradients of weights alone, and of k alone."""
    q, k, table = heads((2, 3, 5, 32)), heads((2, 2, 5, 32)), angles(5, 16)
    check(q, k, *table, **norms(32, BF16))
    check(q, None, *table, q_weight=heads((32,)))
    weights = norms(32)
    y, z = rotary(q.detach(), k.detach(), *table, **weights)
    dy, dz = torch.randn_like(y), torch.randn_like(z)
    found = torch.autograd.grad([y, z], list(weights.values()), [dy, dz])
    expected = [rotary_torch(x, *table, weight=w) for x, w in zip((q, k), weights.values(), strict=True)]
    references = torch.autograd.grad(expected, list(weights.values()), [dy.double(), dz.double()])
    for a, b in zip(found, references, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    z = rotary(q, k, *table, **weights)[1]
    dk, dw = torch.autograd.grad(z, [k, weights["k_weight"]], dz)
    assert relative_error(dw, references[1]) < 1e-5
    assert (
        relative_error(dk, torch.autograd.grad(rotary_torch(k, *table, weight=weights["k_weight"]), k, dz.double())[0])
        < 6e-3
    )


@pytest.mark.parametrize("programs", [1, 2, 3])
@pytest.mark.parametrize("tokens", [2, 7])
def test_persistent_programs_of_norms(monkeypatch, programs, tokens):
    """Programs with no tile of 2 tokens, with one, two, three and four, and heads of q, k or both."""
    monkeypatch.setattr(call_plan, "tiles_of", lambda *_: Tiles(2, 2))
    monkeypatch.setattr(call_plan, "programs_of", lambda tiles, tokens, groups, _: programs * groups)
    check(heads((1, 3, tokens, 8), FP32), heads((1, 2, tokens, 8), FP32), *angles(tokens, 4), **norms(8))


def test_norms_of_packed_tokens_in_place():
    q, k = heads((7, 3, 24), FP32).detach(), heads((7, 1, 24), FP32).detach()
    rows = torch.tensor([0, 1, 2, 0, 1, 2, 3], device=DEVICE)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE)
    cos, sin = angles(4, 8)
    weights = {name: t.detach() for name, t in norms(24).items()}
    expected = [rotary_torch(x, cos[rows], sin[rows], weight=w) for x, w in zip((q, k), weights.values(), strict=True)]
    found = rotary(q, k, cos, sin, cu_seqlens=cu, inplace=True, **weights)
    for a, x, b in zip(found, (q, k), expected, strict=True):
        assert a is x and relative_error(a, b) < 1e-6


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("inplace", [False, True])
def test_views_of_a_projection(inplace):
    """q and k as views of one tensor of q, k and v, which stays as it is but for them."""
    packed = torch.randn(2, 5, 6, 32, device=DEVICE).bfloat16()
    kept, cos, sin = packed.clone(), *angles(5, 16)
    for dim in (1, 2):
        q, k, v = (t.transpose(1, 2) if dim == 1 else t for t in packed.split([3, 1, 2], 2))
        expected = [rotary_torch(x, cos, sin, unsqueeze_dim=dim) for x in (q, k)]
        y, z = rotary(q, k, cos, sin, unsqueeze_dim=dim, inplace=inplace)
        for a, b in zip((y, z), expected, strict=True):
            assert (a - b).norm() < 4e-3 * b.norm()
        assert torch.equal(packed[:, :, 4:], kept[:, :, 4:]) and torch.equal(packed, kept) != inplace
        assert (y.data_ptr() == q.data_ptr()) == inplace
        packed.copy_(kept)


def test_inplace_with_gradients():
    x = heads((2, 5, 4, 16), FP32)
    cos, sin = angles(5, 8)
    for shared in (False, True):
        packed = x * 2
        q, k = packed[:, :, :3], packed[:, :, 3:]
        y, z = rotary(q, k, cos, sin, unsqueeze_dim=2, inplace=True)
        assert y is q and z is k
        out = packed if shared else torch.cat([y, z], 2)
        direction = torch.randn_like(x)
        (grad,) = torch.autograd.grad(out, x, direction)
        expected = rotary_torch(x * 2, cos, sin, unsqueeze_dim=2)
        (reference,) = torch.autograd.grad(expected, x, direction.double())
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize("dims", [(64, 64), (80, 32)], ids=str)
def test_inplace(dims):
    """Also of a token, whose elements are fewer than threads."""
    q, k = heads((2, 3, 5, dims[0])), heads((2, 1, 5, dims[0]))
    check(q[:1, :, :1], k[:1, :, :1], *angles(1, dims[1] // 2), inplace=True, interleaved=True)
    for interleaved in (False, True):
        check(q, k, *angles(5, dims[1] // 2), inplace=True, interleaved=interleaved)
        check(tokens_first(q), None, *angles(5, dims[1] // 2), inplace=True, interleaved=interleaved)


def test_strides():
    wide = torch.randn(3, 4, 6, 50, device=DEVICE)
    for x in (
        wide[::2, :, 1:, 3:35],
        wide.permute(0, 3, 1, 2)[:, ::3],
        wide[:, :1].expand(3, 5, 6, 50),
        wide[..., ::2],
    ):
        check(x.detach().requires_grad_(), None, *angles(x.shape[2], 3), rotary_dim=6)
    table = torch.randn(8, 6, 2, device=DEVICE)
    check(heads((1, 2, 6, 16), FP32), None, table[..., 0].T.contiguous().T.T, table[..., 1].T)


def test_an_expanded_gradient():
    q = heads((1, 2, 3, 8), FP32)
    cos, sin = angles(3, 4)
    (found,) = torch.autograd.grad(rotary(q, None, cos, sin).sum(), q)
    (expected,) = torch.autograd.grad(rotary_torch(q, cos, sin).sum(), q)
    torch.testing.assert_close(found, expected)


# ---------------------------------------------------------------- programs


@pytest.mark.parametrize("count", [1, 2, 3, 8, slow(16)])
@pytest.mark.parametrize("q_heads, k_heads", [(5, 2), (1, 1), (4, 4), slow(0, 3), slow(7, 1)])
def test_heads_of_programs(monkeypatch, count, q_heads, k_heads):
    """Programs with heads of q, of k, of both, the last one with fewer."""
    monkeypatch.setattr(call_plan, "tiles_of", lambda *_: Tiles(2, count))
    check(heads((1, q_heads, 5, 8), FP32), heads((1, k_heads, 5, 8), FP32), *angles(5, 4))


# columns of a head, those that rotate, dtypes of heads and of angles, interleaved, and weights of norms
SORTS = [
    (32, 32, BF16, FP32, False, None),
    (24, 16, BF16, BF16, True, FP32),
    (9, 6, FP32, FP32, False, FP32),
    (64, 64, FP16, FP32, True, None),
    (80, 32, BF16, FP32, False, BF16),
    (128, 128, BF16, BF16, False, FP32),
    (2, 2, FP32, FP32, True, None),
    (40, 8, FP16, FP16, False, None),
]


def random_positions(draw, batch, tokens, length):
    """(rows of the angles of tokens, the options that say which)."""
    kind, way = draw.choice([torch.int32, torch.int64]), draw.choice(["none", "ids", "offset", "offsets"])
    rows = torch.arange(tokens, device=DEVICE)
    if way == "none":
        return rows, {}
    if way == "ids":
        ids = torch.randint(0, length, draw.choice([(batch, tokens), (1, tokens)]), dtype=kind, device=DEVICE)
        return ids, dict(position_ids=ids)
    if way == "offset":
        return rows + 3, dict(seqlen_offsets=3)
    offsets = torch.tensor([draw.randint(0, length - tokens) for _ in range(batch)], device=DEVICE)
    return offsets[:, None] + rows, dict(seqlen_offsets=offsets.to(kind))


def random_packing(draw):
    """(tokens, rows of their angles, the options that say which) of packed sequences."""
    lengths = some_lengths(draw, 24)
    starts, shift = starts_of(lengths), draw.choice([None, 5])
    rows = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    options = dict(cu_seqlens=starts.to(draw.choice([torch.int32, torch.int64])))
    return sum(lengths), rows + (shift or 0), options | ({} if shift is None else dict(seqlen_offsets=shift))


@seeds
def test_random(seed):
    draw, (dim, width, dtype, of_angles, interleaved, of_norm) = drawn(seed, SORTS)
    batch, tokens, length, unsqueeze_dim = draw.randint(1, 3), draw.randint(1, 20), 40, draw.randint(1, 2)
    options = dict(interleaved=interleaved, rotary_dim=width, inplace=draw.random() < 0.3)
    packed = draw.random() < 0.4
    tokens, rows, given = random_packing(draw) if packed else (tokens, *random_positions(draw, batch, tokens, length))
    options |= given | ({} if packed else dict(unsqueeze_dim=unsqueeze_dim))

    def operand(count):
        if packed:
            return heads((tokens, count, dim), dtype)
        x = heads((batch, count, tokens, dim) if unsqueeze_dim == 1 else (batch, tokens, count, dim), dtype)
        return tokens_first(x) if draw.random() < 0.5 else x

    q, k = operand(draw.randint(1, 5)), operand(draw.randint(1, 3)) if draw.random() < 0.7 else None
    if of_norm is not None:
        options |= {name: heads((dim,), of_norm) for name, x in (("q_weight", q), ("k_weight", k)) if x is not None}
        options["inplace"] = False  # which has no gradients then: test_norms_of_packed_tokens_in_place
    check(q, k, *angles(length, width // 2, dtype=of_angles), rows=rows, **options)


def test_special_values():
    q = heads((1, 1, 4, 8), FP32).detach()
    q[0, 0, 0, 3], q[0, 0, 1, 5], q[0, 0, 2, 2:7] = float("nan"), float("inf"), -float("inf")
    cos, sin = angles(4, 4)
    torch.testing.assert_close(
        rotary(q, None, cos, sin).double(), rotary_torch(q, cos, sin), equal_nan=True, rtol=1e-5, atol=1e-5
    )


def test_the_same_bits_in_every_run():
    q, k, table = heads((2, 3, 40, 64)), heads((2, 1, 40, 64)), angles(40, 32)
    torch.manual_seed(1)
    first = check(q, k, *table)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, check(q, k, *table), strict=True))
