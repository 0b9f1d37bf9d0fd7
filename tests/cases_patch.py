"""Small models of transformers with random weights, what they calculate, and how large their errors may be."""

import functools

import torch
import transformers

from tests.util import DEVICE, relative_error

BF16 = torch.bfloat16
SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
# Each token runs through all experts: no rounding of a router's scores has another one chosen.
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
HALF = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
LATENT = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, num_key_value_heads=2
)


HYBRID = dict(
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    layer_types=["linear_attention", "full_attention"],
)
STATES = dict(num_heads=2, head_dim=32, expand=1, state_size=16, n_groups=2, chunk_size=8)


def replaced(norm, mlp, experts=0, rotary=2, loss=1, mixer=0):
    return dict(norm=norm, mlp=mlp, rotary=rotary, mixer=mixer, experts=experts, loss=loss)


MODELS = {  # configuration, and what `patch` replaces
    "llama": (lambda: transformers.LlamaConfig(**SIZES), replaced(5, 2)),
    "qwen3": (lambda: transformers.Qwen3Config(**SIZES), replaced(9, 2)),
    "gemma": (lambda: transformers.GemmaConfig(**SIZES), replaced(5, 2)),
    "gemma2": (lambda: transformers.Gemma2Config(**SIZES), replaced(9, 2)),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**SIZES), replaced(13, 2)),
    "mistral": (lambda: transformers.MistralConfig(**SIZES), replaced(5, 2)),
    "olmo2": (lambda: transformers.Olmo2Config(**SIZES), replaced(9, 2, rotary=0)),
    "phi3": (lambda: transformers.Phi3Config(**SIZES, pad_token_id=0), replaced(5, 2)),
    "glm4_moe": (
        lambda: transformers.Glm4MoeConfig(
            **SIZES, **EXPERTS, n_routed_experts=2, rope_parameters=HALF, use_qk_norm=True, first_k_dense_replace=1
        ),
        replaced(9, 2, experts=1),
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=2),
        replaced(5, 0, experts=2),
    ),
    "qwen3_moe": (lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=2), replaced(9, 0, experts=2)),
    "deepseek_v3": (
        lambda: transformers.DeepseekV3Config(
            **{**SIZES, **EXPERTS, **LATENT}, n_routed_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1
        ),
        replaced(9, 2, experts=1),
    ),
    "mamba2": (
        lambda: transformers.Mamba2Config(**{**SIZES, **STATES}, pad_token_id=0),
        replaced(5, 0, rotary=0, mixer=2),
    ),
    "qwen3_next": (
        lambda: transformers.Qwen3NextConfig(
            **SIZES, **EXPERTS, **HYBRID, num_experts=2, shared_expert_intermediate_size=32
        ),
        replaced(8, 2, experts=2, rotary=1, mixer=1),
    ),
    "qwen3_5_text": (
        lambda: transformers.AutoConfig.for_model("qwen3_5_text", **SIZES, **HYBRID),
        replaced(8, 2, rotary=1, mixer=1),
    ),
}


@functools.cache
def weights(name):
    """Parameters of a random model, rounded to bf16. Every layer matters, but attention has no scores so large that
    their rounding chooses the key. Norms of Gemma add 1 to their weights."""
    made = transformers.AutoModelForCausalLM.from_config(MODELS[name][0]())
    shift = -0.5 if name.startswith("gemma") else 0.5
    return {
        key: (torch.rand(x.shape) + shift if x.ndim == 1 else torch.randn(x.shape) * (2 / x.shape[-1]) ** 0.5).to(BF16)
        for key, x in made.state_dict().items()
    }


def model(name, dtype=BF16, **changes):
    config = MODELS[name][0]()
    config.update(changes)
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(DEVICE, dtype)
    made.load_state_dict(weights(name), strict=not changes)  # fewer layers have fewer
    return made.eval()


def tokens(*shape):
    return torch.randint(SIZES["vocab_size"], shape, device=DEVICE)


def results(m, ids, run=None):
    """{"logits", "loss" and the name of every parameter: its gradient}."""
    m.zero_grad()
    out = (m if run is None else run)(ids, labels=ids, use_cache=False)
    out.loss.backward()
    return {
        "logits": out.logits.detach(),
        "loss": out.loss.detach(),
        **{key: p.grad for key, p in m.named_parameters() if p.grad is not None},
    }


def _round_otherwise(layer, args, out):
    """A hook of a layer: its result with errors of a rounding to bf16."""
    if isinstance(out, torch.Tensor) and out.is_floating_point():
        return (out * (1 + 2**-7 * (torch.rand(out.shape, device=out.device) - 0.5))).to(out.dtype)


def several(m, run, count=4):
    """What `run` returns of a model, and then what it returns with other roundings of the results of its layers.

    The errors of one run are a few random numbers: where its roundings cancel, they are too small for a bound.
    """
    found = [run()]
    hooks = [layer.register_forward_hook(_round_otherwise) for layer in m.modules() if not any(layer.children())]
    found += [run() for _ in range(count)]
    for hook in hooks:
        hook.remove()
    return found


def agree(exact, theirs, ours):
    """Our errors are about those of transformers' layers in `several` runs. Both round to bf16."""
    for key, expected in exact.items():
        error, bound = relative_error(ours[key], expected), 2 * max(relative_error(x[key], expected) for x in theirs)
        assert error <= bound + 2e-3, f"{key} is off by {error:.2e}, where {bound + 2e-3:.2e} is right"
    assert all(exact.keys() == x.keys() for x in (*theirs, ours))
