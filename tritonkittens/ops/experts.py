"""The experts of models of Hugging Face transformers on `tritonkittens.kernels.experts`.

Source of the interface: transformers 5.24, integrations/moe.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

from tritonkittens.kernels._dispatch import autocast, autocasts, unseen_by_function_modes
from tritonkittens.kernels.experts import experts
from tritonkittens.kernels.experts.checks import are_taken

ACTIVATIONS = {SiLUActivation: "silu", nn.SiLU: "silu", GELUTanh: "gelu_tanh"}


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An implementation of experts of transformers, whose arguments these are.

    What the kernels do not take, and experts with biases, other gates or other layouts, run as with "grouped_mm".
    """
    y = mixed(self, hidden_states, top_k_index, top_k_weights) if are_plain(self) else None
    return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights) if y is None else y


def are_plain(module: Any) -> bool:
    """Are experts gated layers without biases, gates first, in the layout of torch's Linear?"""
    has = [getattr(module, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm")]
    gated = module.has_gate and module.is_concatenated and type(module)._apply_gate is _default_apply_gate
    return bool(gated and not any(has) and type(module.act_fn) in ACTIVATIONS)


@unseen_by_function_modes
def mixed(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
    """Return the result of experts that `are_plain`, in the dtype of x, if the kernels take the operands, else None."""
    result, gate_up, down = x.dtype, module.gate_up_proj, module.down_proj
    if (dtype := autocasts(x.device)) is not None:
        x, gate_up, down = autocast(x, dtype), autocast(gate_up, dtype), autocast(down, dtype)
    if not are_taken(x, index, weights, gate_up, down):
        return None
    return experts(x, index, weights, gate_up, down, activation=ACTIVATIONS[type(module.act_fn)]).to(result)
