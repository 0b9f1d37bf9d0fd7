"""Models of Hugging Face transformers with our attention, also with their other layers on our kernels, and with
PyTorch's: prefill, and a step of training. Random weights, causal."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench import gemm
from bench.gemm import OURS
from bench.harness import Case, Suite, Trial, frobenius_error

# How many, tokens of each. The first are so few that the host, which launches 200 to 800 kernels a step, is hardly
# ahead of the GPU.
SEQUENCES = ((1, 4096), (4, 4096), (1, 16384))
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2048, 16, 4, 128, 32000
MODELS = {"Llama": ("LlamaConfig", 5632), "Qwen3": ("Qwen3Config", 6144)}  # configuration, width of the MLP
IMPLEMENTATIONS = ("sdpa", "flash_attention_2")
LAYERS_TOO = f"{OURS}, layers too"
KEPT = 64  # last tokens whose logits a prefill gives and errors are measured on
BOUND, GRADIENT_BOUND = 3e-2, 6e-2  # what bf16 leaves of fp32 through the layers

Weights = Mapping[str, torch.Tensor]


def configuration(name: str, kv_heads: int) -> Any:
    import transformers

    kind, width = MODELS[name]
    most = max(tokens for _, tokens in SEQUENCES)
    return getattr(transformers, kind)(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=width,
        num_hidden_layers=LAYERS,
        head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        max_position_embeddings=most,
    )


def build(
    name: str, implementation: str, dtype: torch.dtype, weights: Weights | None = None, kv_heads: int | None = None
) -> Any:
    """A model with these weights, random ones where not given."""
    import transformers

    from tritonkittens.ops import register_transformers

    register_transformers(strict=True)  # PyTorch's attention is a contender of its own
    config = configuration(name, KV_HEADS if kv_heads is None else kv_heads)
    with torch.device(gemm.DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def with_layers(model: Any) -> Any:
    """The model, whose other layers run on our kernels from now on."""
    from tritonkittens.ops import patch

    patch(model)
    return model


def ungrouped(weights: Weights) -> dict[str, torch.Tensor]:
    """The same model with a key head for every query head, of which PyTorch's attention in fp32 keeps no scores."""

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (KV_HEADS, HEAD_DIM)).repeat_interleave(HEADS // KV_HEADS, 0).flatten(0, 1)

    return {key: repeated(x) if "k_proj" in key or "v_proj" in key else x for key, x in weights.items()}


def prefill(model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The logits of the last tokens."""

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False, logits_to_keep=KEPT).logits

    return run


def train(model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The gradient of the first layer's queries, after a step of AdamW at a rate of zero: it costs what any other does,
    and every step finds the same model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        return model.model.layers[0].self_attn.q_proj.weight.grad

    return run


# what is timed, forwards that it costs
STEPS = {"prefill": (prefill, 1, BOUND), "training": (train, 3, GRADIENT_BOUND)}


def work(name: str, batch: int, tokens: int, step: str) -> int:
    """FLOP: two for a weight and token, a causal score counted half."""
    weights = HIDDEN * HEAD_DIM * 2 * (HEADS + KV_HEADS) + 3 * HIDDEN * MODELS[name][1]
    head = HIDDEN * VOCABULARY * (KEPT if step == "prefill" else tokens)
    forward = 2 * (LAYERS * tokens * weights + head) + LAYERS * 2 * HEADS * HEAD_DIM * tokens * tokens
    return STEPS[step][1] * batch * forward


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(name: str, batch: int, tokens: int, step: str) -> Trial:
        make, _, bound = STEPS[step]
        weights = {key: x.clone() for key, x in build(name, "sdpa", torch.bfloat16).state_dict().items()}
        ids = torch.randint(VOCABULARY, (batch, tokens), device=gemm.DEVICE)
        exact = make(build(name, "sdpa", torch.float32, ungrouped(weights), HEADS), ids)().flatten(0, -2).double()
        built: dict[str, Callable[[], Any]] = {
            each: functools.partial(build, name, each, torch.bfloat16, weights) for each in (*IMPLEMENTATIONS, OURS)
        }
        built[LAYERS_TOO] = lambda: with_layers(built[OURS]())
        timed = {each: lambda of=of: make(of(), ids) for each, of in built.items()}
        ours = {each: timed.pop(each) for each in (OURS, LAYERS_TOO)}
        return Trial(ours, timed, frobenius_error(exact), bound)

    return [
        Case(
            f"bf16 {name} {step} S {tokens}{f' B {batch}' if batch > 1 else ''}",
            work(name, batch, tokens, step),
            {"model": name, "B": batch, "S": tokens, "step": step, "panel": f"{name}, {step}"},
            functools.partial(prepare, name, batch, tokens, step),
            "sustained",
        )
        for name in MODELS
        for step in STEPS
        for batch, tokens in SEQUENCES
    ]


TITLE = (
    "models of transformers by their attention and layers: 4 layers, hidden 2048, 16 heads in 4 groups, D 128, a "
    "prefill and a step of training"
)
SUITES = (Suite("attention_models", TITLE, cases, plot={"panel": "panel"}),)
