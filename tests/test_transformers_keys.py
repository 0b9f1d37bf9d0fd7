"""Which keys every query of a model of transformers sees: random calls of every function of transformers that makes a
mask, against the mask that transformers' own attention gets. No kernel runs: their calls say what they would see."""

import functools
import inspect

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers import masking_utils as masks  # noqa: E402

from tritonkittens.kernels.attention.ranges_plan import calls, runs  # noqa: E402
from tritonkittens.kernels.attention.reference import sides, visible  # noqa: E402
from tritonkittens.ops import mask_functions  # noqa: E402
from tritonkittens.ops import transformers as implementation  # noqa: E402
from tritonkittens.ops.transformers import attention_forward, attention_mask  # noqa: E402

CONFIG = transformers.MistralConfig(
    hidden_size=2, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2, head_dim=1
)
OURS, THEIRS = "tritonkittens keys", "all keys"
MAKERS = {
    name: getattr(masks, name)
    for name in (
        "create_causal_mask",
        "create_sliding_window_causal_mask",
        "create_chunked_causal_mask",
        "create_bidirectional_mask",
        "create_bidirectional_sliding_window_mask",
        "create_masks_for_generate",
    )
}
# not in the first versions
BLOCKS_OF_CHUNKS = "block_sequence_ids" in inspect.signature(masks.create_chunked_causal_mask).parameters
OTHERS = {  # functions of a model or a caller
    "a window on both sides": lambda b, h, q, k: abs(q - k) < 3,
    "a sink": lambda b, h, q, k: k < 2,
    "every second key": lambda b, h, q, k: (q - k) % 2 == 0,
    "no key": lambda b, h, q, k: k < 0,
    "a known window": masks.sliding_window_overlay(4),
    "a prefix": lambda b, h, q, k: (q < 5) & (k < 5),
}


def everything(*args, allow_is_causal_skip=True, allow_is_bidirectional_skip=True, **given):
    """transformers' mask, always."""
    return masks.sdpa_mask(*args, **given, allow_is_causal_skip=False)


@pytest.fixture(autouse=True)
def kernels_that_say_what_they_see(monkeypatch):
    """(batch, heads, queries, keys) of numbers that are positive where a key is seen, in place of results."""

    def said(seen, q, v):
        """Of all keys, which are as many as V has columns; a call may have the first ones only."""
        seen = seen.to(torch.float32).expand(q.shape[0], q.shape[1], q.shape[2], v.shape[2])
        return torch.nn.functional.pad(seen, (0, v.shape[3] - v.shape[2]))

    def attention(q, k, v, *, causal, scale, softcap):
        return said(visible(q.shape[2], k.shape[2], *sides(causal, None)), q, v)

    def attention_decode(q, k, v, *, lengths, starts, causal, scale, softcap):
        assert lengths is None or q.shape[2] == 1
        if lengths is None:
            return attention(q, k, v, causal=causal, scale=scale, softcap=softcap)
        key = torch.arange(k.shape[2])
        return said(((key >= starts[:, None]) & (key < lengths[:, None]))[:, None, None], q, v)

    def attention_ranges(q, k, v, ranges, *, scale, softcap):
        assert ranges.shape == (q.shape[0], 1, q.shape[2], 2) and ranges.dtype == torch.int32
        seen = torch.zeros(q.shape[0], 1, q.shape[2], k.shape[2])
        for call in calls(ranges, k.shape[2]):
            run = call.run
            seen[call.sequences, :, run.first : run.behind, run.begin : run.end] += visible(
                run.behind - run.first, run.end - run.begin, run.left, run.right
            )
        return said(seen, q, v)

    kernels = dict(attention=attention, attention_decode=attention_decode, attention_ranges=attention_ranges)
    for name, function in kernels.items():
        monkeypatch.setattr(implementation, name, function)
    monkeypatch.setattr(implementation, "reason_against", lambda *args: None)
    transformers.AttentionMaskInterface.register(OURS, functools.partial(attention_mask, strict=False))
    transformers.AttentionMaskInterface.register(THEIRS, everything)


def padding(rng, batch, length):
    """(batch, length): tokens, with padding on the left, on the right, or on both sides, or with holes."""
    kind = rng.choice(["none", "all", "left", "right", "both", "holes"], p=[0.25, 0.1, 0.2, 0.2, 0.15, 0.1])
    if kind == "none":
        return None, False
    place, begin, end = torch.arange(length), torch.zeros(batch, 1), torch.full((batch, 1), length)
    if kind in ("left", "both"):
        begin = torch.from_numpy(rng.integers(0, length, (batch, 1)))
    if kind in ("right", "both"):
        end = torch.from_numpy(rng.integers(begin.numpy().astype(int), length + 1, (batch, 1)))
    tokens = (place >= begin) & (place < end)
    return (
        tokens & torch.from_numpy(rng.random((batch, length)) < 0.7) if kind == "holes" else tokens
    ).long(), kind == "holes"


def cache(rng, config, batch, length):
    """A cache with keys in it, or none, and how many."""
    kind = rng.choice(["none", "dynamic", "static"], p=[0.4, 0.35, 0.25])
    if kind == "none":
        return None, 0
    made = transformers.DynamicCache(config=config if rng.random() < 0.5 else None)
    if kind == "static":
        made = transformers.StaticCache(config=config, max_cache_len=length + 24)
    filled = int(rng.integers(0, 18))
    if filled:
        for layer in range(config.num_hidden_layers):
            made.update(*(torch.zeros(batch, 1, filled, 1) for _ in range(2)), layer)
    return made, filled


def random_call(rng, name):
    """(arguments of a function that makes masks, the configuration, queries)."""
    config = CONFIG
    config.sliding_window, config.attention_chunk_size = rng.integers(1, 12, 2).tolist()
    config.layer_types = rng.choice(
        ["full_attention", "sliding_attention", *["chunked_attention"] * BLOCKS_OF_CHUNKS], 2
    ).tolist()
    batch, queries = int(rng.integers(1, 4)), int(rng.choice([1, 2, 5, 9, 14]))
    bidirectional = "bidirectional" in name
    held, filled = (None, 0) if bidirectional else cache(rng, config, batch, queries)
    total = queries + filled
    given = dict(config=config, inputs_embeds=torch.zeros(batch, queries, 2))
    given["attention_mask"] = padding(rng, batch, total)[0]
    if bidirectional and rng.random() < 0.2:
        given |= dict(encoder_hidden_states=torch.zeros(batch, 7, 2), attention_mask=padding(rng, batch, 7)[0])
    if not bidirectional:
        given |= {"cache" if "cache" in inspect.signature(MAKERS[name]).parameters else "past_key_values": held}
        starts = rng.random((1 if rng.random() < 0.5 else batch, queries)) < 0.3
        starts[:, 0] = True
        place = np.arange(queries)
        positions = (
            place - np.maximum.accumulate(np.where(starts, place, 0), 1) if rng.random() < 0.5 else place[None] + filled
        )
        given["position_ids"] = torch.from_numpy(positions)
        if rng.random() < 0.4 and (
            BLOCKS_OF_CHUNKS or name in ("create_causal_mask", "create_sliding_window_causal_mask")
        ):
            ids = np.cumsum(rng.random((batch, total)) < 0.4, 1) * 2
            ids = np.where(ids % 4 == 0, -1, ids) if rng.random() < 0.8 else rng.integers(-1, 2, (batch, total))
            given["block_sequence_ids"] = torch.from_numpy(ids)
    for which in ("or_mask_function", "and_mask_function"):
        if rng.random() < 0.08:
            given[which] = OTHERS[rng.choice(list(OTHERS))]
    return given, config, queries


def seen_by_layers(mask, config, queries, keys, batch, causal, rng):
    """What a layer sees, (batch, queries, keys), whose own window has nothing to do with the mask."""
    module = torch.nn.Module()
    module.is_causal = causal
    q, k, v = torch.zeros(batch, 2, queries, 16), torch.zeros(batch, 1, keys, 16), torch.zeros(batch, 1, keys, keys)
    q.requires_grad_(bool(rng.random() < 0.5))  # else few queries take the decode kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "padded", lambda x: x)
        out, _ = attention_forward(module, q, k, v, mask, sliding_window=int(rng.integers(1, 9)), strict=True)
    return out.transpose(1, 2)[:, 0] > 0


@pytest.mark.parametrize("name", MAKERS)
def test_layers_see_the_keys_of_the_mask(name, rng):
    """300 calls each. A query that is padding in causal attention may see anything; what is no range is transformers'
    mask itself."""
    causal, made = "bidirectional" not in name, {"none": 0, "ranges": 0, "dense": 0}
    for _ in range(300):
        given, config, queries = random_call(rng, name)
        batch, found = given["inputs_embeds"].shape[0], []
        for which in (OURS, THEIRS):
            config._attn_implementation = which
            masks_ = MAKERS[name](**given)
            found.append(masks_ if isinstance(masks_, dict) else {"": masks_})
        for layer, expected in found[1].items():
            mask = found[0][layer]
            expected = expected[:, 0]
            keys = expected.shape[2]
            asked = _asked(given, queries, keys, causal, layer)
            if mask is not None and mask.dtype == torch.bool:
                assert torch.equal(mask[:, 0], expected), given
                assert not _are_ranges(expected)[asked | (queries == 1)].all(), given
                made["dense"] += 1
                continue
            made["none" if mask is None else "ranges"] += 1
            seen = seen_by_layers(mask, config, queries, keys, batch, causal, rng)
            assert torch.equal(seen[asked], expected[asked]), given
    assert min(made.values()) > 5, made


def _are_ranges(seen):
    """(batch, queries): does a query see a range of (batch, queries, keys)?"""
    place = torch.arange(seen.shape[2])
    first, last = torch.where(seen, place, seen.shape[2]).amin(2), torch.where(seen, place, -1).amax(2)
    return (seen.sum(2) == last - first + 1) | ~seen.any(2)


def _asked(given, queries, keys, causal, layer):
    """(batch, queries): which queries are no padding."""
    batch, tokens = given["inputs_embeds"].shape[0], given["attention_mask"]
    if tokens is None or not causal:
        return torch.ones(batch, queries, dtype=torch.bool)
    return tokens[:, tokens.shape[1] - queries :].bool()


def test_known_functions_need_no_dense_mask(rng, monkeypatch):
    """Nothing of queries × keys is made for transformers' own functions with padding on the sides."""

    def refused(*args, **given):
        raise AssertionError("a dense mask was made")

    monkeypatch.setattr(implementation, "sdpa_mask", refused)
    checked = 0
    for _ in range(300):
        given, config, queries = random_call(rng, name := rng.choice(list(MAKERS)))
        blocks = given.pop("block_sequence_ids", None)
        if blocks is not None and rng.random() < 0.5:  # neighbours
            given["block_sequence_ids"] = torch.cumsum(torch.rand(blocks.shape) < 0.4, 1) - 1
        if queries > 1 and not {"or_mask_function", "and_mask_function"} & set(given):
            tokens = given["attention_mask"]
            if tokens is not None:
                given["attention_mask"] = tokens.cummax(1).values
            config._attn_implementation = OURS
            MAKERS[name](**given)
            checked += 1
    assert checked > 100


def test_long_masks_are_evaluated_in_parts(rng, monkeypatch):
    """A few queries at a time, with the same result."""
    given = dict(
        batch_size=2,
        q_length=30,
        kv_length=37,
        q_offset=7,
        mask_function=lambda b, h, q, k: (k <= q) & (k > q - 4 * (b + 1)),
        attention_mask=torch.arange(37).expand(2, 37) > torch.tensor([[3], [20]]),
        allow_is_causal_skip=False,
    )
    expected = attention_mask(**given)
    monkeypatch.setattr(implementation, "EVALUATED", 37 * 2 * 4)
    assert torch.equal(attention_mask(**given), expected)
    mask = masks.sdpa_mask(**given)
    begin, end = expected.unsqueeze(-1).unbind(-2)
    key = torch.arange(37)
    tokens = given["attention_mask"][:, 7:]
    assert torch.equal(((key >= begin) & (key < end))[:, 0][tokens], mask[:, 0][tokens])


def test_a_function_that_has_changed_is_not_known(monkeypatch):
    """What a version of transformers means by a name is asked of its function, and a function that sees other keys is
    evaluated."""

    def sliding_window_overlay(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    mask_functions._readers.cache_clear()
    monkeypatch.setattr(masks, "sliding_window_overlay", sliding_window_overlay)
    try:
        function = masks.and_masks(sliding_window_overlay(3), masks.causal_mask_function)
        ranges = attention_mask(1, 9, 9, mask_function=function)
        assert ranges[0, 0].tolist() == [[max(0, i - 3), i + 1] for i in range(9)]
        assert mask_functions.ranges_of(function, mask_functions.Queries(np.arange(9)[None], 1, 9)) is None
    finally:
        mask_functions._readers.cache_clear()


def test_runs_see_what_ranges_say(rng):
    """Random ranges, of which neighbours often belong together."""
    for _ in range(1500):
        queries, keys = rng.integers(1, 14), rng.integers(1, 16)
        begin = end = 0
        rows = []
        for _ in range(queries):
            if rng.random() < 0.2:
                begin = int(rng.integers(0, keys + 1))
                end = int(rng.integers(begin, keys + 1))
            begin = min(keys, begin + int(rng.integers(0, 2)))
            end = min(keys, max(begin, end + int(rng.integers(0, 2))))
            rows.append((begin, end))
        rows = np.array(rows)
        seen, key = torch.zeros(queries, keys, dtype=torch.int32), torch.arange(keys)
        for run in runs(rows):
            assert run.left >= 0 and run.right >= 0
            seen[run.first : run.behind, run.begin : run.end] += visible(
                run.behind - run.first, run.end - run.begin, run.left, run.right
            )
        assert (
            torch.equal(seen.bool(), (key >= torch.from_numpy(rows[:, :1])) & (key < torch.from_numpy(rows[:, 1:])))
            and seen.max() <= 1
        )
