"""Which layers of a model of transformers the kernels compute, and their forwards on the kernels.

A layer is recognised by the code of its class's forward, which is that of a class below: transformers writes the same
code for most models. Nothing else about a class counts, and a forward that the instance replaces is left alone.
A forward runs transformers' own code where the kernels do not take the tensors.
Source: transformers 5.24, models/*/modeling_*.py.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_utils import PreTrainedModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3 import modeling_phi3
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tritonkittens.kernels._dispatch import is_ordinary, requires_grad, takes, unseen_by_function_modes
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.activation import geglu, swiglu
from tritonkittens.kernels.gated_gemm.layers import gated_product
from tritonkittens.kernels.loss import cross_entropy
from tritonkittens.kernels.loss.config import TARGETS
from tritonkittens.kernels.loss.config import WIDEST as MOST_CLASSES
from tritonkittens.kernels.norm import rms_norm
from tritonkittens.kernels.norm.composed import gated_rms_norm
from tritonkittens.kernels.norm.config import INPUTS, WIDEST
from tritonkittens.kernels.rotary import rotary
from tritonkittens.kernels.rotary.config import LARGEST_DIM
from tritonkittens.ops import mixers
from tritonkittens.ops.experts import ACTIVATIONS, are_plain, mixed

Forward: TypeAlias = Callable[..., Any]


class Replacement(NamedTuple):
    """An attribute that a module gets while it is patched."""

    kind: str
    module: nn.Module
    name: str
    value: Any

    @property
    def is_in_place(self) -> bool:
        """Has another patch given it to the module?"""
        return bool(self.module.__dict__.get(self.name) == self.value)


def _named_forward(function: Forward) -> Forward:
    """Name a function `forward`: pickle finds methods by name, so that a copy has transformers' own."""
    function.__name__ = "forward"
    return function


def _is_replaced(module: nn.Module) -> bool:
    """Does the instance have a forward that is not that of its class?"""
    forward = module.__dict__.get("forward")
    return forward is not None and forward != types.MethodType(type(module).forward, module)


def replacements(model: nn.Module, kinds: tuple[str, ...]) -> Iterator[Replacement]:
    """Find what the kernels compute of a model, also where another patch has replaced it."""
    for module in model.modules():
        if "loss" in kinds and _has_causal_lm_loss(module):
            yield Replacement("loss", module, "_loss_function", causal_lm_loss)
        for kind, find in FINDERS.items():
            forward = find(module) if kind in kinds else None
            if forward is None:
                continue
            found = Replacement(kind, module, "forward", types.MethodType(forward, module))
            if found.is_in_place or not _is_replaced(module):
                yield found


def _is_same(x: Any, known: Any) -> bool:
    """Does a function compute what a known one does, with what it finds in its module? Anything else is itself.

    With the package kernels, transformers' functions are modules, too, whose forward it may replace.
    """
    for f in (x, known):
        if isinstance(f, nn.Module) and "forward" in f.__dict__:
            return False
    x, known = (inspect.unwrap(type(f).forward if isinstance(f, nn.Module) else f) for f in (x, known))
    if not (isinstance(x, types.FunctionType) and isinstance(known, types.FunctionType)):
        return x is known
    ours, theirs = ((_code(f.__code__, f.__doc__), f.__defaults__) for f in (x, known))
    return ours == theirs and all(map(_is_same, _used(x), _used(known)))


def _code(code: types.CodeType, text: str | None = None) -> tuple[Any, ...]:
    """The code of a function, and of comprehensions in it, without its text, place and annotations."""
    constants = tuple(_code(x) if isinstance(x, types.CodeType) else x for x in code.co_consts if x != text)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _names(code: types.CodeType) -> list[str]:
    """The names in a function's code, and in that of comprehensions in it."""
    inner = (_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return [*code.co_names, *(name for names in inner for name in names)]


def _used(function: types.FunctionType) -> list[Any]:
    """What a function has in its closure, and what the names in its code are in its module."""
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    return enclosed + [function.__globals__.get(name) for name in _names(function.__code__)]


def _is_like(module: nn.Module, known: type, *methods: str) -> bool:
    """Do these methods of a module compute what those of a known class do?"""
    return all(_is_same(getattr(type(module), name, None), getattr(known, name)) for name in methods)


# ---------------------------------------------------------------- norms


@unseen_by_function_modes
def _norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None, zero_centered: bool = False
) -> Tensor | None:
    """The norm, in the dtype that transformers' operations give, or None where the kernel does not take the tensors.

    Llama's rounds x / √… to the dtype of x, and multiplies by the weight in the dtype of both. The kernel rounds once,
    at the end.
    """
    if not (takes(INPUTS, x, weight) and x.ndim and weight.shape == x.shape[-1:] and 1 <= x.shape[-1] <= WIDEST):
        return None
    dtype = torch.promote_types(x.dtype, weight.dtype) if dtype is None else dtype
    y: Tensor = rms_norm(x, weight, eps=eps, zero_centered_weight=zero_centered, out_dtype=dtype)
    return y


@_named_forward
def _llama_norm(self: Any, hidden_states: Tensor) -> Any:
    y = _norm(hidden_states, self.weight, self.variance_epsilon)
    return type(self).forward(self, hidden_states) if y is None else y


@_named_forward
def _olmo_norm(self: Any, hidden_states: Tensor) -> Any:
    y = _norm(hidden_states, self.weight, self.variance_epsilon, hidden_states.dtype)
    return type(self).forward(self, hidden_states) if y is None else y


@_named_forward
def _gemma_norm(self: Any, x: Tensor) -> Any:
    y = _norm(x, self.weight, self.eps, x.dtype, zero_centered=True)
    return type(self).forward(self, x) if y is None else y


@_named_forward
def _mamba_norm(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
    y = None
    if gate is not None:
        options: dict[str, Any] = dict(norm_before_gate=False, group_size=self.group_size)
        y = gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, **options)
    return type(self).forward(self, hidden_states, gate) if y is None else y


@_named_forward
def _delta_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Any:
    y = None
    if self.activation == "silu":
        y = gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, norm_before_gate=True)
    return type(self).forward(self, hidden_states, gate) if y is None else y


NORMS = [
    (LlamaRMSNorm, _llama_norm),
    (Olmo2RMSNorm, _olmo_norm),
    (MambaRMSNormGated, _mamba_norm),
    (Qwen3NextRMSNormGated, _delta_norm),
]


def _find_norm(module: nn.Module) -> Forward | None:
    if _is_like(module, GemmaRMSNorm, "forward", "_norm"):
        return _gemma_norm
    return next((ours for kind, ours in NORMS if _is_like(module, kind, "forward")), None)


# ---------------------------------------------------------------- gated MLPs

GATED: dict[type, Callable[[Tensor, Tensor | None], Tensor]] = {
    SiLUActivation: swiglu,
    nn.SiLU: swiglu,
    GELUTanh: geglu,
    GELUActivation: functools.partial(geglu, approximate="none"),
}


@unseen_by_function_modes
def _gated(activation: nn.Module, gate: Tensor, up: Tensor | None) -> Tensor | None:
    """The product of a gate and `up`, which without it is the second half of the columns."""
    fits = gate.ndim and (gate.shape[-1] % 2 == 0 if up is None else gate.shape == up.shape and gate.dtype == up.dtype)
    return GATED[type(activation)](gate, up) if fits and takes(INPUTS, gate, up) else None


def _gated_product(activation: nn.Module, x: Tensor, *layers: nn.Module) -> Tensor | None:
    """The gated product of linear layers, in one kernel."""
    name = ACTIVATIONS.get(type(activation))
    return None if name is None else gated_product(x, name, nn.Linear, *layers)


@_named_forward
def _mlp(self: Any, x: Tensor) -> Any:
    y = _gated_product(self.act_fn, x, self.gate_proj, self.up_proj)
    if y is None:
        gate, up = self.gate_proj(x), self.up_proj(x)
        y = _gated(self.act_fn, gate, up)
        y = self.act_fn(gate) * up if y is None else y
    return self.down_proj(y)


@_named_forward
def _merged_mlp(self: Any, hidden_states: Tensor) -> Any:
    y = _gated_product(self.activation_fn, hidden_states, self.gate_up_proj)
    if y is None:
        gate_up = self.gate_up_proj(hidden_states)
        y = _gated(self.activation_fn, gate_up, None)
        if y is None:
            gate, up = gate_up.chunk(2, dim=-1)
            y = up * self.activation_fn(gate)
    return self.down_proj(y)


def _find_mlp(module: nn.Module) -> Forward | None:
    for kind, activation, ours in ((LlamaMLP, "act_fn", _mlp), (Phi3MLP, "activation_fn", _merged_mlp)):
        function = getattr(module, activation, None)
        if type(function) in GATED and not _is_replaced(function) and _is_like(module, kind, "forward"):
            return ours
    return None


# ---------------------------------------------------------------- rotary embeddings


@unseen_by_function_modes
def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor] | None:
    """Rotate q and k, whose dimension `heads` is that of heads, in the dtype that transformers' operations give."""
    fits = (
        heads in (1, 2)
        and q.ndim == k.ndim == 4
        and cos.ndim == 3
        and cos.shape == sin.shape
        and q.shape[3] == k.shape[3] <= LARGEST_DIM
        and 2 <= cos.shape[2] <= q.shape[3]
        and cos.shape[2] % 2 == 0
        and q.shape[0] == k.shape[0]
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[3 - heads] == k.shape[3 - heads]
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and takes(INPUTS, q, k, cos, sin)
        and not requires_grad(cos, sin)
    )
    if not fits:
        return None
    dtype = torch.promote_types(q.dtype, cos.dtype)
    q, k = rotary(q.to(dtype), k.to(dtype), cos, sin, unsqueeze_dim=heads, rotary_dim=cos.shape[2])
    return q, k


def _on_halves(theirs: Any) -> Any:
    """`apply_rotary_pos_emb` of most models, which rotates columns i and i + D/2 of the first D."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        found = _rotated(q, k, cos, sin, unsqueeze_dim)
        return theirs(q, k, cos, sin, unsqueeze_dim) if found is None else found

    return apply_rotary_pos_emb


def _on_pairs(theirs: Any) -> Any:
    """DeepSeek's, which rotates columns 2i and 2i + 1, and puts them at i and i + D/2."""

    def apply_rotary_pos_emb_interleave(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
    ) -> Any:
        halves = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        found = _rotated(*halves, cos, sin, unsqueeze_dim)
        return theirs(q, k, cos, sin, position_ids, unsqueeze_dim) if found is None else found

    return apply_rotary_pos_emb_interleave


ROTARY = [
    (modeling_llama, "apply_rotary_pos_emb", _on_halves),
    (modeling_phi3, "apply_rotary_pos_emb", _on_halves),
    (modeling_glm4_moe, "apply_rotary_pos_emb", _on_halves),
    (modeling_deepseek_v3, "apply_rotary_pos_emb_interleave", _on_pairs),
]


CALLED = {"rotary": ROTARY, "mixer": mixers.FUNCTIONS}


@functools.cache  # one function for all layers, so that torch.compile does not trace each anew
def _with_functions(forward: Any, kind: str) -> Forward | None:
    """The forward of a layer, with our functions of a kind for those that it calls. None where it calls none that is
    known.

    They are globals of the forward's module, so that the copy has globals of its own.
    """
    inner, names = inspect.unwrap(forward), {}
    for module, name, ours in CALLED[kind]:
        if isinstance(inner, types.FunctionType) and name in inner.__code__.co_names:
            theirs, known = inner.__globals__.get(name), getattr(module, name, None)
            if known is not None and _is_same(theirs, known):
                names[name] = ours(theirs)
    return _with_globals(forward, names) if names else None


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    """Copy a function with other values of global names, and its decorators, which have it in their closures.

    None where a decorator has it elsewhere.
    """
    if not isinstance(function, types.FunctionType):
        return None
    inner = getattr(function, "__wrapped__", None)
    cells, scope = function.__closure__ or (), function.__globals__
    if inner is None:
        # without a name of a module, torch.compile looks names up here
        scope = {key: x for key, x in {**scope, **names}.items() if key != "__name__"}
    else:
        copied = _with_globals(inner, names)
        if copied is None or all(cell.cell_contents is not inner for cell in cells):
            return None
        cells = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)


def _find_rotary(module: nn.Module) -> Forward | None:
    return _with_functions(getattr(type(module), "forward", None), "rotary")


def _find_mixer(module: nn.Module) -> Forward | None:
    return _with_functions(getattr(type(module), "forward", None), "mixer")


# ---------------------------------------------------------------- experts


@_named_forward
def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    y = mixed(self, hidden_states, top_k_index, top_k_weights)
    return type(self).forward(self, hidden_states, top_k_index, top_k_weights) if y is None else y


def _find_experts(module: nn.Module) -> Forward | None:
    return _experts if _is_like(module, MixtralExperts, "forward") and are_plain(module) else None


FINDERS: dict[str, Callable[[nn.Module], Forward | None]] = {
    "norm": _find_norm,
    "mlp": _find_mlp,
    "rotary": _find_rotary,
    "mixer": _find_mixer,
    "experts": _find_experts,
}


# ---------------------------------------------------------------- the loss of a causal language model


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """transformers' `ForCausalLMLoss`, whose arguments these are, without a copy of the logits in fp32."""
    target = shift_labels
    if target is None and labels is not None:
        target = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if target is None or not _has_loss(logits, target, vocab_size):
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others)
    target = target.to(logits.device).reshape(logits.shape[:-1])
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss: Any = cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


@unseen_by_function_modes
def _has_loss(logits: Tensor, target: Tensor, vocab_size: int) -> bool:
    """Does the kernel compute this loss?"""
    fits = logits.ndim and logits.shape[-1] == vocab_size and target.numel() * vocab_size == logits.numel()
    known = is_ordinary(target) and not is_distributed(type(target)) and target.dtype in TARGETS
    return bool(fits and known and 1 <= vocab_size <= MOST_CLASSES and takes(INPUTS, logits))


def _has_causal_lm_loss(module: nn.Module) -> bool:
    if not isinstance(module, PreTrainedModel) or module.__dict__.get("_loss_function") not in (None, causal_lm_loss):
        return False
    loss = LOSS_MAPPING.get(getattr(module, "loss_type", None))
    return loss is ForCausalLMLoss and type(module).loss_function is PreTrainedModel.loss_function
