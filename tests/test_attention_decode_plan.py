"""Plans of `attention_decode` for a cache that grows, as that of a model that generates."""

import types

import pytest
import torch

from tritonkittens import sim
from tritonkittens.kernels.attention import attention_decode, decode_plan
from tritonkittens.kernels.attention.decode_plan import DecodePlan, similar_keys


def nothing(*args, **given):
    return lambda *tensors: None


@pytest.fixture
def plans(monkeypatch):
    """The plans that a test makes."""
    made, make = [], DecodePlan.__init__
    monkeypatch.setattr(decode_plan, "_plans", {})
    monkeypatch.setattr(decode_plan, "_plans_of_kernels", {})
    monkeypatch.setattr(
        DecodePlan, "__init__", lambda self, *args, **given: made.append(self) or make(self, *args, **given)
    )
    return made


def operands(batch, keys, queries=1, kv_heads=2):
    return (
        torch.randn(batch, 4, queries, 64, dtype=torch.bfloat16),
        *(torch.randn(batch, kv_heads, keys, 64, dtype=torch.bfloat16) for _ in range(2)),
    )


def test_other_calls_have_plans_of_their_own(plans, monkeypatch):
    """Batches, heads, scales, queries that have to be copied, and keys that have to be."""
    monkeypatch.setattr(DecodePlan, "_bind", nothing)
    monkeypatch.setattr(decode_plan, "combine", types.SimpleNamespace(bind=nothing))
    with sim.device():
        for keys in (100, 101):
            q, k, v = operands(2, keys)
            odd = torch.zeros(2, 2, keys, 68, dtype=torch.bfloat16)[..., :64]
            apart = torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16)[:, :, ::8]
            for call, given in (
                ((q, k, v), {}),
                (operands(1, keys), {}),
                (operands(2, keys, kv_heads=4), {}),
                ((q, k, v), dict(scale=0.5)),
                ((q, k, v), dict(lengths=torch.ones(2, dtype=torch.int32))),
                ((apart, k, v), {}),
                ((q, odd, v), {}),
            ):
                attention_decode(*call, **given, num_splits=1)
    assert len(plans) == 7


def test_a_cache_that_grows_is_planned_once_for_many_tokens(plans, monkeypatch):
    """How its keys are split is thought out every 128 tokens here, and those plans are alike, too."""
    chosen, choose = [], decode_plan.choose_split
    monkeypatch.setattr(decode_plan, "choose_split", lambda *key: chosen.append(key) or choose(*key))
    monkeypatch.setattr(DecodePlan, "_bind", nothing)
    monkeypatch.setattr(decode_plan, "combine", types.SimpleNamespace(bind=nothing))
    q, k, v = operands(1, 4500)
    with sim.device():
        for keys in range(4096, 4500):
            attention_decode(q, k[:, :, :keys], v[:, :, :keys])
    assert len(set(chosen)) == 4 and len(plans) <= 4


@pytest.mark.parametrize("keys, similar", [(0, 0), (1, 1), (63, 63), (65, 64), (127, 126), (8191, 8064), (8192, 8192)])
def test_similar_numbers_of_keys(keys, similar):
    assert similar_keys(keys) == similar and similar_keys(similar) == similar
