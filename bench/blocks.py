"""Blocks of Llama-3-8B and Qwen3-30B-A3B as transformers has them, in bf16 with random weights: a prefill, and all
gradients of a step of training. Ours is the block with our attention under `patch`, beside the block with PyTorch's
attention. Each runs eagerly and under torch.compile.

A block is a model of one decoder layer, without embedding and head: rotary embedding, the layer, the last norm.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench import gemm
from bench.gemm import OURS, randn
from bench.harness import Case, Factory, Suite, Trial, deferred, ratio

SEQUENCES = (2, 4096)  # how many, tokens of each
COMMON: dict[str, Any] = dict(vocab_size=32, num_hidden_layers=1, num_attention_heads=32, head_dim=128)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # configuration of transformers, and its sizes
    "Llama": ("LlamaConfig", dict(hidden_size=4096, intermediate_size=14336, num_key_value_heads=8)),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        dict(
            hidden_size=2048,
            moe_intermediate_size=768,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
    ),
}
AFFINITY = 12.0  # of a token to the experts that it chooses, in standard deviations of the others
BOUND, GRADIENT_BOUND = 1e-2, 4e-2  # of bf16 through the roundings of a block
ROUNDS = 0.6  # times the usual: contenders differ by more than a few per cent

Weights = Mapping[str, torch.Tensor]


def build(name: str, attention: str, dtype: torch.dtype, weights: Weights | None = None, **options: Any) -> Any:
    """A block with these weights, random ones where not given."""
    import transformers

    kind, sizes = MODELS[name]
    config = getattr(transformers, kind)(**COMMON, **sizes, max_position_embeddings=SEQUENCES[1])
    with torch.device(gemm.DEVICE):
        model = transformers.AutoModel.from_config(config, attn_implementation=attention, dtype=dtype, **options)
    if weights is not None:
        model.load_state_dict(weights)
    return model.train()


def ours(name: str, weights: Weights) -> Any:
    """The block on our kernels."""
    from tritonkittens.ops import patch, register_transformers

    register_transformers(strict=True)  # PyTorch's attention is a contender of its own
    model = build(name, OURS, torch.bfloat16, weights)
    patch(model)
    return model


def tokens(weights: Weights, **sizes: Any) -> torch.Tensor:
    """Random hidden states. Where the block has experts, each token lies near random ones: a rounding before the router
    must not change a choice, which would be an error of its own."""
    x = randn(*SEQUENCES, sizes["hidden_size"])
    for router in (w for key, w in weights.items() if key.endswith("mlp.gate.weight")):
        drawn = torch.rand(*SEQUENCES, router.shape[0], dtype=torch.float32, device=x.device)
        chosen = drawn.topk(sizes["num_experts_per_tok"]).indices
        x += AFFINITY * torch.nn.functional.normalize(router, dim=-1)[chosen].sum(-2)
    return x


def prefill(model: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """[The hidden states after the block]."""

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(inputs_embeds=x, use_cache=False).last_hidden_state]

    return run


def train(model: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """The gradients of the hidden states before the block and of its parameters."""
    leaves = [x.detach().requires_grad_(), *(p for n, p in model.named_parameters() if "embed_tokens" not in n)]

    def run() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(inputs_embeds=leaves[0], use_cache=False).last_hidden_state, leaves, dy))

    return run


STEPS = {"prefill": (prefill, BOUND), "training": (train, GRADIENT_BOUND)}


@deferred
def error(name: str, step: str, weights: Weights, *given: torch.Tensor) -> Callable[[Any], float]:
    """The largest relative error of a result, against the same block in fp32."""
    model = build(name, "sdpa", torch.float32, weights, experts_implementation="eager")
    expected = STEPS[step][0](model, *(t.float() for t in given))()

    def largest(found: list[torch.Tensor]) -> float:
        pairs = zip(found, expected, strict=True)
        return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)

    return largest


def prepare(name: str, step: str) -> Trial:
    torch.compiler.reset()
    make, bound = STEPS[step]
    weights = {key: x.clone() for key, x in build(name, "sdpa", torch.bfloat16).state_dict().items()}
    x = tokens(weights, **MODELS[name][1])
    dy = randn(*x.shape)
    plain, patched = functools.partial(build, name, "sdpa", torch.bfloat16, weights), lambda: ours(name, weights)

    def both(eager: str, compiled: str, built: Callable[[], Any]) -> dict[str, Factory]:
        return {
            eager: lambda: make(built(), x, dy),
            compiled: lambda: make(torch.compile(built(), dynamic=False), x, dy),
        }

    peers = both("eager", "torch.compile", plain)
    return Trial(both(OURS, f"{OURS}, torch.compile", patched), peers, error(name, step, weights, x, dy), bound)


def add_speedups(row: dict[str, Any]) -> None:
    """How many times as fast ours are as each peer."""
    timed = {name: cell for name, cell in row["contenders"].items() if "ms" in cell}
    for cell in timed.values():
        if cell["ours"]:
            peers = {name: peer for name, peer in timed.items() if not peer["ours"]}
            cell["extra"] = {f"of {name}": f"{ratio(cell['ms'], peer['ms']):.3f}" for name, peer in peers.items()}


def cases(options: argparse.Namespace) -> list[Case]:
    batch, length = SEQUENCES
    return [
        Case(
            f"{name} {step} B {batch} S {length}",
            1,
            {"model": name, "B": batch, "S": length, "step": step, "panel": f"{name}, {step}"},
            functools.partial(prepare, name, step),
            "sustained",
            ROUNDS,
        )
        for name in MODELS
        for step in STEPS
    ]


TITLE = "a block of Llama-3-8B and one of Qwen3-30B-A3B in transformers: a prefill, and the gradients of training"
SUITES = (Suite("blocks", TITLE, cases, unit="ms", plot={"panel": "panel"}, extend=add_speedups),)
