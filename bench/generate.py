"""`model.generate` of a Llama of transformers: milliseconds until the first token, and of every later one. Random
weights, greedy, with a dynamic cache (eager) and a static one, with which transformers compiles a token's step."""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from bench import gemm
from bench.harness import Case, Factory, Suite, Trial, deferred, frobenius_error

SIZES = dict(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
)
PROMPTS = ((1, 8192), (8, 4096), (32, 1024))  # how many, tokens of each
CACHES = {"eager": None, "compiled": "static"}  # None: dynamic
LATER = 16  # tokens after the first, whose median counts
CHECKED = 4  # sequences whose logits are compared
BOUND = 1e-1  # what bf16 leaves of fp32 through the layers
ROUNDS = 0.3  # of a run's: a round has `LATER` tokens
BUDGET_S = 400.0  # of a run: a case that would go beyond, if it took as long as the longest before, is not measured
SDPA, ATTENTION, LINEARS = "sdpa", "ours attention", "ours attention + linears"
LAYERS = "ours attention + layers"


class Teacher:
    """A logits processor that keeps the logits, and makes every contender choose the same tokens."""

    def __init__(self, tokens: Tensor):
        self.tokens, self.logits = tokens, list[Tensor]()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self.tokens[:, len(self.logits), None]
        self.logits.append(scores[:CHECKED])
        return scores.scatter(1, chosen, float("inf"))


class Clock:
    """A streamer, to which `generate` gives the prompt and then every token as soon as the host has it."""

    def __init__(self) -> None:
        self.times = list[float]()

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Generation:
    """A call of `generate` that times itself.

    Args:
        prompt: (batch, S) int64.
        tokens: (batch, N) int64, what it generates.
        cache: its `cache_implementation`.
    """

    def __init__(self, model: Any, prompt: Tensor, tokens: Tensor, cache: str | None):
        self.model, self.prompt, self.tokens, self.cache = model, prompt, tokens, cache
        self.times = list[float]()

    def __call__(self) -> Tensor:
        """Return the logits of `CHECKED` sequences, (sequences, N, vocabulary) fp32."""
        import transformers

        teacher, clock = Teacher(self.tokens), Clock()
        self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),  # as tokenizers give it
            max_new_tokens=self.tokens.shape[1],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=self.cache,
            logits_processor=transformers.LogitsProcessorList([teacher]),
            streamer=clock,
        )
        self.times = clock.times
        return torch.stack(teacher.logits, 1)

    def milliseconds(self) -> float:
        """Of the last call: from the prompt to the first token where it is the only one, else of a later token."""
        spans = [(after - before) * 1e3 for before, after in itertools.pairwise(self.times)]
        return spans[0] if len(spans) == 1 else statistics.median(spans[1:])


def configuration() -> Any:
    import transformers

    longest = max(tokens for _, tokens in PROMPTS)
    return transformers.LlamaConfig(**SIZES, max_position_embeddings=longest + LATER + 1)


@functools.cache
def base() -> Any:
    """The model with PyTorch's attention, in bf16. All contenders share its weights."""
    import transformers

    with torch.device(gemm.DEVICE):
        return transformers.AutoModelForCausalLM.from_config(
            configuration(), attn_implementation="sdpa", dtype=torch.bfloat16
        ).eval()


def with_ours(linears: bool, layers: bool = False) -> Any:
    """The model with our attention, with our linears, and with our kernels in its other layers."""
    from tritonkittens.nn import replace_linears
    from tritonkittens.ops import patch, register_transformers

    register_transformers(strict=True)
    model = sharing_weights(base())
    model.set_attn_implementation("tritonkittens")
    if linears:
        replace_linears(model)
    if layers:
        patch(model)
    return model


def sharing_weights(model: Any) -> Any:
    """A copy of a model with the same parameters in memory."""
    return copy.deepcopy(model, {id(x): x for x in itertools.chain(model.parameters(), model.buffers())})


@functools.cache
def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """(prompt, tokens that follow it), random."""
    generator = torch.Generator(gemm.DEVICE).manual_seed(length)
    size = (batch, length + 1 + LATER)
    ids = torch.randint(SIZES["vocab_size"], size, device=gemm.DEVICE, generator=generator)
    return ids[:, :length], ids[:, length:]


@functools.cache
def reference(batch: int, length: int) -> Tensor:
    """Logits of the first `CHECKED` sequences, (sequences, 1 + `LATER`, vocabulary), of the model in fp32. One
    sequence at a time: PyTorch's attention of groups of heads in fp32 keeps scores."""
    exact = copy.deepcopy(base()).float()
    rows = []
    with torch.no_grad():
        for sequence in torch.cat(inputs(batch, length), 1)[:CHECKED, :-1]:
            rows.append(exact(sequence[None], use_cache=False, logits_to_keep=1 + LATER).logits[0])
    return torch.stack(rows)


@deferred
def error_of(batch: int, length: int, count: int) -> Any:
    return frobenius_error(reference(batch, length)[:, :count].flatten(0, 1).double())


class Budget:
    """Whether a case may begin. Compiling takes most of the time, and nobody knows how long in advance."""

    def __init__(self) -> None:
        self.begins = list[float]()

    def begin(self) -> bool:
        self.begins.append(time.perf_counter())
        longest = max((after - before for before, after in itertools.pairwise(self.begins)), default=0.0)
        return self.begins[-1] - self.begins[0] + longest <= BUDGET_S


def prepare(batch: int, length: int, mode: str, count: int, budget: Budget) -> Trial:
    if not budget.begin():
        return Trial({}, {}, lambda found: 0.0, BOUND, f"not measured: the suite takes at most {BUDGET_S:g} s")
    gc.collect()  # caches, and what was compiled for other shapes
    torch._dynamo.reset()
    prompt, tokens = inputs(batch, length)

    def of(make: Any) -> Factory:
        return lambda: Generation(make(), prompt, tokens[:, :count], CACHES[mode])

    ours = {ATTENTION: (False, False), LINEARS: (True, False), LAYERS: (False, True)}
    return Trial(
        {name: of(functools.partial(with_ours, *parts)) for name, parts in ours.items()},
        {SDPA: of(lambda: sharing_weights(base()))},
        error_of(batch, length, count),
        BOUND,
    )


def cases(options: argparse.Namespace) -> list[Case]:
    """Eager rows first. With --quick one prompt only."""
    budget = Budget()
    return [
        Case(
            f"{mode} {'prefill' if count == 1 else 'token'} B {batch} S {length}",
            1,
            {"B": batch, "S": length, "mode": mode, "step": step, "panel": f"{mode}, {step}"},
            functools.partial(prepare, batch, length, mode, count, budget),
            "own",
            ROUNDS,
        )
        for mode in CACHES
        for batch, length in PROMPTS[: 1 if options.quick else None]
        for step, count in (("prefill", 1), ("token", 1 + LATER))
    ]


TITLE = (
    "generate of a Llama by its attention, linears and layers: 16 layers, hidden 2048, 32 heads in 8 groups, D 64; "
    "until the first token (prefill), and of each later one"
)
SUITES = (Suite("generate", TITLE, cases, unit="ms", plot={"panel": "panel"}),)
