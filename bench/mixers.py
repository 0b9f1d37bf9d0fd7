"""Mixers of sequences as whole layers, a prompt and the step of a token: beside transformers' layers with the same
weights, which run on fla, mamba_ssm and causal-conv1d where these are installed, and the same layers under `patch`."""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.gemm import DEVICE, OURS, randn
from bench.harness import Case, Contender, Suite, Trial, deferred, frobenius_error

SIZES: dict[str, dict[str, Any]] = {  # as of Mamba-2 2.7B, Qwen3-Next and MiniMax-Text-01, the last with fewer heads
    "Mamba2": dict(
        hidden_size=2560, num_heads=80, head_dim=64, state_size=128, n_groups=1, num_hidden_layers=1, chunk_size=256
    ),
    "GatedDeltaNet": dict(
        hidden_size=2048,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    ),
    "LinearAttention": dict(hidden_size=2048, num_attention_heads=16, head_dim=128, num_hidden_layers=2),
}
PROMPTS = ((1, 8192), (8, 2048))  # how many, tokens of each
BATCHES = (1, 32, 128)  # of steps
BOUND = 3e-2  # four roundings to bf16, and norms
PATCHED = "transformers, patched"


def of_transformers(name: str) -> tuple[nn.Module, Any]:
    """(A layer with random weights in bf16, its configuration)."""
    import transformers
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    kinds: dict[str, tuple[Any, type[nn.Module]]] = {
        "Mamba2": (transformers.Mamba2Config, Mamba2Mixer),
        "GatedDeltaNet": (transformers.Qwen3NextConfig, Qwen3NextGatedDeltaNet),
        "LinearAttention": (transformers.MiniMaxConfig, MiniMaxLightningAttention),
    }
    configuration, kind = kinds[name]
    config = configuration(**SIZES[name])
    with torch.device(DEVICE):
        return kind(config, 0).to(torch.bfloat16).eval(), config


@functools.cache
def layers(name: str) -> tuple[nn.Module, nn.Module, Any]:
    """(transformers' layer, ours with its weights, the configuration of both)."""
    from tritonkittens import nn as ours

    theirs, config = of_transformers(name)
    kind: dict[str, Any] = dict(device=DEVICE, dtype=torch.bfloat16)
    hidden, made = config.hidden_size, None
    if name == "Mamba2":
        made = ours.Mamba2(hidden, config.state_size, headdim=config.head_dim, ngroups=config.n_groups, **kind)
    elif name == "GatedDeltaNet":
        heads = config.linear_num_key_heads, config.linear_num_value_heads
        made = ours.GatedDeltaNet(hidden, *heads, config.linear_key_head_dim, config.linear_value_head_dim, **kind)
    else:
        made = ours.LinearAttention(hidden, config.num_attention_heads, config.head_dim, **kind)
    made.load_state_dict(theirs.state_dict())
    return theirs, made, config


def call(layer: Any, x: Tensor, cache: Any = None) -> Tensor:
    """transformers' layer."""
    with torch.no_grad():
        if hasattr(layer, "qkv_proj"):
            return layer(x, None, None, cache)[0]
        found: Tensor = layer(x, cache)
        return found


def patched(name: str, run: Callable[[Any], Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """A call of transformers' layer on our kernels. A copy stays patched after the block."""
    from tritonkittens.ops import patch

    with patch(layers(name)[0]):
        return run(copy.deepcopy(layers(name)[0]))


@deferred
def error_of(name: str, x: Tensor) -> Callable[[Any], float]:
    """Against the mixer in fp32, in torch."""
    with torch.no_grad():
        return frobenius_error(copy.deepcopy(layers(name)[1]).float()(x.float()).flatten(0, 1).double())


def ours_of(name: str, x: Tensor, state: Any = None) -> Callable[[], Tensor]:
    mixer: Any = layers(name)[1]

    def run() -> Tensor:
        with torch.no_grad():
            y: Tensor = mixer(x) if state is None else mixer(x, state, return_state=True)[0]
            return y

    return run


def prepare_prompt(name: str, batch: int, length: int) -> Trial:
    x = randn(batch, length, SIZES[name]["hidden_size"])
    theirs = layers(name)[0]

    def run(layer: Any) -> Callable[[], Tensor]:
        return functools.partial(call, layer, x)

    ours = {OURS: lambda: ours_of(name, x)}
    if name != "LinearAttention":  # transformers' has no function for it
        ours[PATCHED] = lambda: patched(name, run)
    return Trial(ours, {"transformers": lambda: run(theirs)}, error_of(name, x), BOUND)


def prepare_step(name: str, batch: int) -> Trial:
    """transformers' steps replace their states, so that no result is like the one before."""
    import transformers

    theirs, mixer, config = layers(name)
    prompt, x = (randn(batch, length, config.hidden_size) for length in (16, 1))
    with torch.no_grad():
        expected, state = mixer(prompt, return_state=True)
        expected = mixer.float()(x.float(), state, return_state=True)[0].flatten(0, 1).double()
        mixer.to(torch.bfloat16)

    def run(layer: Any) -> Callable[[], Tensor]:
        cache = transformers.DynamicCache(config=config)
        call(layer, prompt, cache)
        return functools.partial(call, layer, x, cache)

    baselines = {}
    if name != "LinearAttention":
        baselines["transformers"] = Contender(lambda: run(theirs), lambda found: 0.0)
        baselines[PATCHED] = Contender(lambda: patched(name, run), lambda found: 0.0)
    return Trial({OURS: lambda: ours_of(name, x, state)}, {}, frobenius_error(expected), BOUND, baselines=baselines)


def cases(options: argparse.Namespace) -> list[Case]:
    prompts = [
        Case(
            f"{name} prompt B {batch} T {length}",
            1,
            {"layer": name, "step": "prompt", "B": batch, "T": length},
            functools.partial(prepare_prompt, name, batch, length),
        )
        for name in SIZES
        for batch, length in PROMPTS
    ]
    steps = [
        Case(
            f"{name} step B {batch}",
            1,
            {"layer": name, "step": "token", "B": batch, "T": 1},
            functools.partial(prepare_step, name, batch),
            kind="eager",
        )
        for name in SIZES
        for batch in BATCHES
    ]
    return prompts + steps


TITLE = "mixers of sequences as layers: a prompt on the device, and the step of a token with the host's time"
SUITES = (Suite("mixers", TITLE, cases, unit="µs", plot={"panel": "layer"}),)
