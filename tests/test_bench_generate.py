"""The suite `generate` with a small model, ours in the simulator."""

import argparse

import pytest
import torch

from bench import gemm, generate, harness, timing
from tests.test_bench import fake_kind
from tritonkittens import sim

pytest.importorskip("transformers", minversion="5.17")

SIZES = dict(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    tie_word_embeddings=True,
)


def options(quick):
    return argparse.Namespace(quick=quick)


@pytest.fixture
def small(monkeypatch):
    """One layer, a prompt of two sequences, three later tokens, on the CPU."""
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    for name, value in dict(SIZES=SIZES, PROMPTS=((2, 20),), LATER=3, CHECKED=1).items():
        monkeypatch.setattr(generate, name, value)
    caches = generate.base, generate.inputs, generate.reference
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("step", ["prefill", "token"])
@pytest.mark.parametrize("mode", generate.CACHES)
def test_contenders_agree_with_the_model_in_fp32(mode, step, small):
    (case,) = [case for case in generate.cases(options(quick=False)) if f"{mode} {step}" in case.name]
    with sim.device():
        row = harness.measure(case, "ms", 20, {"own": fake_kind()})
    assert row["rounds"] == 6 and row["best_peer"] == "sdpa"
    for cell in row["contenders"].values():
        assert 0 < cell["error"] < 2e-2 and cell["value"]


def test_contenders_share_weights(small):
    base = generate.base()
    for linears in (False, True):
        model = generate.with_ours(linears)
        assert model.config._attn_implementation == "tritonkittens" and base.config._attn_implementation == "sdpa"
        for x, y in zip(base.parameters(), model.parameters(), strict=True):
            assert x.data_ptr() == y.data_ptr()


def test_a_token_takes_the_median_of_the_later_ones(small, monkeypatch):
    call = generate.Generation(generate.base(), *generate.inputs(2, 20), None)
    logits = call()
    assert logits.shape == (1, 4, 64) and len(call.times) == 5
    call.times = [0.0, 1.0, 1.5, 2.5, 2.75]
    assert call.milliseconds() == 500.0
    call.times = [0.25, 1.0]
    assert call.milliseconds() == 750.0
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timing.own(call)() > 0


def test_cases_that_would_exceed_the_budget_are_not_measured(small, monkeypatch):
    """The first takes 160 seconds, and the third would end after 400."""
    now, made = [0.0], generate.cases(options(quick=False))
    monkeypatch.setattr(generate.time, "perf_counter", lambda: now[0])
    for begin, case in zip((0.0, 160.0, 250.0), made, strict=False):
        now[0] = begin
        trial = case.prepare()
        assert bool(trial.ours) == (begin < 250)
    row = harness.measure(made[3], "ms", 20, {"own": fake_kind()})
    assert row["contenders"] == {} and "at most 400 s" in row["note"]
    assert harness.faults([row]) == [] and "at most 400 s" in harness.format_row(row, "ms")


def test_quick_runs_have_one_prompt():
    assert {case.facts["B"] for case in generate.cases(options(quick=True))} == {1}
    assert {case.facts["B"] for case in generate.cases(options(quick=False))} == {1, 8, 32}
