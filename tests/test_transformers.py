"""The masks of the implementation of attention for transformers, and what it refuses. No kernel runs."""

import re
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers import masking_utils as masks  # noqa: E402

from tritonkittens import sim  # noqa: E402
from tritonkittens.ops import Unsupported, register_transformers  # noqa: E402
from tritonkittens.ops import transformers as implementation  # noqa: E402
from tritonkittens.ops.transformers import _dense, attention_forward, attention_mask  # noqa: E402

WINDOW = 5
CONFIG = transformers.MistralConfig(sliding_window=WINDOW, attention_chunk_size=WINDOW)
NONE = torch.zeros(2, dtype=torch.long)
PATTERNS = {  # mask function, arguments of its own
    "causal": (masks.causal_mask_function, {}),
    "sliding": (masks.sliding_window_causal_mask_function(WINDOW), dict(local_size=WINDOW)),
    "chunked": (masks.chunked_causal_mask_function(4, NONE), dict(local_size=4)),
    "packed": (
        masks.and_masks(
            masks.causal_mask_function,
            masks.packed_sequence_mask_function(torch.tensor([[0] * 4 + [1] * 9, [0] + [1] * 7 + [2] * 5])),
        ),
        dict(allow_is_causal_skip=False),
    ),
    "bidirectional": (
        masks.bidirectional_mask_function,
        dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=True),
    ),
    "sliding bidirectional": (
        masks.sliding_window_bidirectional_mask_function(WINDOW),
        dict(local_size=WINDOW, allow_is_causal_skip=False, allow_is_bidirectional_skip=True),
    ),
}
PADDINGS = {
    "none": None,
    "no token": [13, 13],
    "left": [-4, 13],
    "right": [13, 6],
    "left and right": [-3, 5],
    "all": [0, 13],
}


def padding(name, keys=13):
    """(2, keys): so many tokens, on the right if negative."""
    if PADDINGS[name] is None:
        return None
    return torch.tensor([[i < n if n >= 0 else i >= keys + n for i in range(keys)] for n in PADDINGS[name]])


def both(pattern, queries=13, keys=13, q_offset=0, **given):
    """(ranges, the mask that they mean, transformers' own)."""
    function, own = PATTERNS[pattern]
    given = dict(
        batch_size=2, q_length=queries, kv_length=keys, q_offset=q_offset, mask_function=function, **{**own, **given}
    )
    expected = masks.sdpa_mask(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    ranges = attention_mask(config=CONFIG, **given)
    assert ranges is None or (ranges.dtype == torch.int32 and ranges.shape == (2, 1, queries, 2))
    dense = _dense(ranges, queries, keys, "bidirectional" not in pattern, False, "cpu")
    return ranges, torch.ones(queries, keys, dtype=torch.bool) if dense is None else dense, expected


# transformers looks for packed sequences only where there is no padding mask
@pytest.mark.parametrize(
    "pattern, name",
    [(pattern, name) for pattern in PATTERNS for name in PADDINGS if pattern != "packed" or name == "none"],
)
def test_whole_sequences(pattern, name):
    """Queries that are tokens see what transformers' mask says. Nothing is made where it is not needed."""
    seen = padding(name)
    ranges, mask, expected = both(pattern, attention_mask=seen)
    tokens = torch.ones(2, 13, dtype=torch.bool) if seen is None else seen
    rows = tokens[:, None, :, None].expand(expected.shape)
    assert torch.equal(mask.expand(expected.shape)[rows], expected[rows])
    needless = name in ("none", "no token") or (name == "right" and "bidirectional" not in pattern)
    assert (ranges is None) == (needless and pattern in ("causal", "bidirectional"))


@pytest.mark.parametrize("name", ["none", "left", "right"])
@pytest.mark.parametrize("pattern", ["causal", "sliding", "chunked"])
@pytest.mark.parametrize("queries, q_offset", [(1, 12), (4, 9), (4, 5), (1, 5), (6, 0)])
@pytest.mark.parametrize("tensor", [False, True])
def test_caches(pattern, name, queries, q_offset, tensor):
    """Queries behind keys of a cache, and in one that is not full, whose length may be a tensor."""
    seen = padding(name)
    if seen is not None:
        seen = seen[:, : q_offset + queries]
        if name == "right" and q_offset > 6:  # what was written follows padding
            seen[:, q_offset:] = True
            if pattern == "causal" or pattern == "sliding" and queries > 1:  # a chunk has its tokens on one side
                with pytest.raises(Unsupported, match="on both sides of hidden ones"):
                    both(pattern, queries, 13, q_offset, attention_mask=seen)
                return
    ranges, mask, expected = both(
        pattern, queries, 13, torch.tensor(q_offset) if tensor else q_offset, attention_mask=seen
    )
    tokens = torch.ones(2, 13, dtype=torch.bool) if seen is None else seen
    rows = tokens[:, None, q_offset : q_offset + queries, None].expand(expected.shape)
    assert torch.equal(mask.expand(expected.shape)[rows], expected[rows])


def test_keys_of_a_sliding_cache():
    """Keys from a position on; the padding mask is that of all positions."""
    seen = padding("left")
    for queries, offset in ((1, 12), (3, 10)):
        given = dict(
            batch_size=2,
            q_length=queries,
            kv_length=6,
            q_offset=offset,
            kv_offset=13 - 6,
            mask_function=PATTERNS["causal"][0],
            attention_mask=seen,
        )
        ranges = attention_mask(config=CONFIG, **given)
        assert torch.equal(
            _dense(ranges, queries, 6, True, False, "cpu").expand(2, 1, queries, 6),
            masks.sdpa_mask(**given, allow_is_causal_skip=False),
        )


def test_one_query_of_a_compiled_model_always_has_a_range():
    """A mask that is now None and now a tensor would compile twice."""
    ranges, mask, expected = both("causal", 1, 13, 12, allow_is_causal_skip=False)
    assert ranges is not None and torch.equal(mask, expected)


EVERY_SECOND = masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: (q - k) % 2 == 0)
REFUSED = {
    "padding": dict(attention_mask=torch.tensor([[1, 0, 1, 1]]).bool()),
    "blocks with others between": dict(
        mask_function=masks.or_masks(
            masks.causal_mask_function, masks.blockwise_overlay(torch.tensor([[0, -1, -1, 0]]))
        )
    ),
    "a function of the caller": dict(mask_function=EVERY_SECOND),
    "a function of the caller without indices": dict(mask_function=EVERY_SECOND, use_vmap=True),
}


@pytest.mark.parametrize("which", REFUSED)
def test_masks_that_are_no_ranges(which):
    """They are those of PyTorch's attention, and errors where asked for."""
    given = {**dict(batch_size=1, q_length=4, kv_length=4, mask_function=masks.causal_mask_function), **REFUSED[which]}
    with pytest.raises(
        Unsupported, match=re.escape(f"tritonkittens' attention for transformers: {implementation.HOLES}")
    ):
        attention_mask(**given, strict=True)
    assert torch.equal(
        attention_mask(**given, strict=False), masks.sdpa_mask(**{**given, "allow_is_causal_skip": False})
    )


def test_holes_between_tokens_of_both_directions_are_refused():
    with pytest.raises(Unsupported, match="on both sides of hidden ones"):
        both("bidirectional", 2, 4, attention_mask=torch.tensor([[1, 0, 1, 1]] * 2).bool())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_traced_masks(pattern, monkeypatch):
    """A trace does not look at numbers: it gets the same ranges, always, and what is refused ends before it begins (one
    query: fails when it runs)."""
    given = {} if pattern == "packed" else dict(attention_mask=padding("left"))
    hole = torch.tensor([[1, 0, 1, 1] + [1] * 9] * 2).bool()
    wanted = [both(pattern, **given)[0], None if pattern == "packed" else both(pattern, 1, 13, 12, **given)[0]]
    monkeypatch.setattr(implementation, "is_tracing", lambda x: True)
    for queries, q_offset, expected in ((13, 0, wanted[0]), (1, 12, wanted[1])):
        if pattern != "packed" or queries > 1:
            assert torch.equal(both(pattern, queries, 13, q_offset, **given)[0], expected)
    if pattern in ("causal", "bidirectional"):
        ranges = attention_mask(
            2, 13, 13, mask_function=PATTERNS[pattern][0], **PATTERNS[pattern][1], attention_mask=hole
        )
        assert (ranges[..., 0] > ranges[..., 1]).any()
        with pytest.raises(RuntimeError, match="on both sides of hidden ones"):
            attention_mask(
                2, 1, 13, 12, mask_function=PATTERNS[pattern][0], **PATTERNS[pattern][1], attention_mask=hole
            )


Q, K = torch.zeros(1, 4, 8, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
MODULE = torch.nn.Module()
MODULE.num_key_value_groups = 2
SINKS = torch.tensor([-1.0, 0.0, 0.5, 2.0])
REFUSED_CALLS = [
    ((Q, K, K), dict(dropout=0.1), "dropout_p=0.1; the kernels have no dropout"),
    ((Q, K, K), dict(output_attentions=True), 'output_attentions=True; the kernels keep no weights ("eager" does)'),
    (
        (Q, K, K),
        dict(position_bias=torch.zeros(1, 4, 8, 8)),
        "position_bias is given; the kernels add nothing to scores",
    ),
    ((Q, K, K), dict(s_aux=SINKS), "s_aux is given; the kernels add nothing to scores"),
    ((Q, K, K), dict(sinks=SINKS.expand(1, 8, 4).mT[..., None]), "sinks is given; the kernels add nothing to scores"),
    (
        (Q, K, K),
        dict(attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool)),
        "attention_mask is a mask of queries and keys: one that was given as such, or",
    ),
    ((Q.float(), K.float(), K.float()), {}, "query has dtype torch.float32; all operands must be bf16 or fp16"),
    (
        (torch.zeros(1, 2, 8, 320, dtype=torch.bfloat16),) * 3,
        {},
        "the head dimension of query is 320; it must be at most 256",
    ),
]


@pytest.mark.parametrize("operands, given, message", REFUSED_CALLS, ids=lambda x: x if isinstance(x, str) else "")
def test_refused_calls(operands, given, message, monkeypatch):
    """With `strict` they are errors, else PyTorch does them, and one warning says why."""
    monkeypatch.setattr(implementation, "_warned", set())
    with sim.device():
        given = {"attention_mask": None, **given}
        with pytest.raises(Unsupported, match=re.escape(f"tritonkittens' attention for transformers: {message}")):
            attention_forward(MODULE, *operands, **given, strict=True)
        if operands[0].shape[1] == 4:
            with pytest.warns(UserWarning, match=re.escape(f"tritonkittens' attention for transformers: {message}")):
                out, _ = attention_forward(MODULE, *operands, **given, strict=False)
            assert out.shape == (1, 8, 4, operands[2].shape[3])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                attention_forward(MODULE, *operands, **given, softcap=5.0, strict=False)


def test_chosen_keys_are_always_refused():
    with sim.device(), pytest.raises(Unsupported, match="indices is given; the kernels choose no keys"):
        attention_forward(MODULE, Q, K, K, None, indices=torch.zeros(1, 8, 2, dtype=torch.long), strict=False)


def operands(queries=13, keys=13):
    """(batch, heads, S, D) in fp32, which PyTorch does."""
    return torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)


@pytest.mark.filterwarnings("ignore:tritonkittens' attention:UserWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_fallback_sees_the_keys_of_the_mask(pattern, rng):
    """What PyTorch's attention gets for a mask is what the kernels would have done, whatever a layer says of its
    window."""
    q, k, v = operands()
    for seen in (None, None if pattern == "packed" else padding("left")):
        ranges, _, expected = both(pattern, attention_mask=seen)
        module = torch.nn.Module()
        module.num_key_value_groups, module.is_causal = 2, "bidirectional" not in pattern
        out, _ = attention_forward(module, q, k, v, ranges, sliding_window=3, strict=False)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=expected, enable_gqa=True
        ).transpose(1, 2)
        rows = slice(None) if seen is None else seen
        torch.testing.assert_close(out[rows], wanted[rows])


@pytest.mark.filterwarnings("ignore:tritonkittens' attention:UserWarning")
@pytest.mark.parametrize("mask", ["none", "ranges", "bool", "added"])
@pytest.mark.parametrize("softcap, sinks, bias", [(2.0, None, False), (None, "heads", False), (1.0, "queries", True)])
def test_fallback_of_soft_caps_and_sinks(mask, softcap, sinks, bias, rng):
    """Against float64, with gradients; a query that sees nothing gets zeros."""
    given = [x.requires_grad_() for x in operands()]
    ranges, _, visible = both("sliding", attention_mask=padding("left"))
    if mask == "none":
        visible = torch.ones(13, 13, dtype=torch.bool).tril()
    forms = {
        "none": None,
        "ranges": ranges,
        "bool": visible,
        "added": torch.where(visible, 0.0, torch.finfo(torch.float32).min),
    }
    of_queries = {None: None, "heads": SINKS, "queries": torch.randn(2, 4, 13, 1)}[sinks]
    added = torch.randn(1, 4, 13, 13) if bias else None
    out, _ = attention_forward(MODULE, *given, forms[mask], softcap=softcap, strict=False, position_bias=added,
                               **{"s_aux" if sinks == "heads" else "sinks": of_queries})  # fmt: skip
    exact = [x.detach().double().requires_grad_() for x in given]
    q, k, v = exact[0], *(x.repeat_interleave(2, 1) for x in exact[1:])
    scores = q @ k.mT / 4
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = (scores + (0 if added is None else added)).masked_fill(~visible, -1e30)
    if of_queries is not None:
        scores = torch.cat(
            (scores, (of_queries[:, None, None] if sinks == "heads" else of_queries).double().expand(2, 4, 13, 1)), -1
        )
    expected = ((scores.softmax(-1)[..., :13] * visible.any(-1, keepdim=True)) @ v).transpose(1, 2)
    # transformers' own masks of numbers hide nothing from who sees nothing
    rows = padding("left") if mask == "added" else slice(None)
    torch.testing.assert_close(out[rows], expected[rows].float())
    grad = torch.randn(out.shape) * visible.any(-1).expand(2, 1, 13).transpose(1, 2)[..., None]
    for x, y in zip(
        torch.autograd.grad(out, given, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    ):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, error, message", [
    (3, TypeError, "register_transformers: name is int; it must be a str"),
    ("eager", ValueError, "register_transformers: name='eager'; it must be a name of its own"),
    ("", ValueError, "register_transformers: name=''; it must be a name of its own"),
])  # fmt: skip
def test_refused_names(name, error, message):
    with pytest.raises(error, match=re.escape(message)):
        register_transformers(name)


def test_models_take_the_name(monkeypatch):
    """What the kernels cannot do runs in PyTorch, with one warning for all layers and calls."""
    monkeypatch.setattr(implementation, "_warned", set())
    register_transformers("some kittens", strict=True)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="some kittens")
    assert model.config._attn_implementation == "some kittens"
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(Unsupported, match="query has dtype torch.float32"):
        model(ids)
    register_transformers("some kittens")
    with pytest.warns(UserWarning) as said:
        found = [model(ids).logits for _ in range(2)]
    assert (
        len(said) == 1
        and "query has dtype torch.float32; all operands must be bf16 or fp16. PyTorch's attention runs instead"
        in str(said[0].message)
    )
    model.set_attn_implementation("eager")
    assert all(torch.allclose(x, model(ids).logits, atol=1e-6) for x in found)


def test_a_hole_in_a_prompt_runs_in_pytorch(monkeypatch, rng):
    """A pad token between others: right logits, gradients and tokens, and one warning."""
    monkeypatch.setattr(implementation, "_warned", set())
    register_transformers("some kittens")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="some kittens").bfloat16().eval()
    for p in model.parameters():
        p.data.mul_(6 if p.ndim == 2 else 1)
    ids, mask = torch.randint(64, (2, 9)), torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 1, 1, 1]])
    results = []
    for implementation_ in ("some kittens", "sdpa"):
        model.set_attn_implementation(implementation_)
        with sim.device(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            logits = model(ids, attention_mask=mask).logits[mask.bool()]
            tokens = model.generate(
                ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        results.append(
            (
                logits,
                tokens,
                *torch.autograd.grad(logits.float().square().sum(), [x for x in model.parameters() if x.requires_grad]),
            )
        )
        ours = [w for w in said if "tritonkittens" in str(w.message)]
        assert len(ours) == (implementation_ == "some kittens")
        assert all("a query sees keys on both sides of hidden ones" in str(w.message) for w in ours)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
