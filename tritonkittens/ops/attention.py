"""Scaled dot-product attention with PyTorch's signature and semantics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from tritonkittens.kernels._dispatch import autocasts, is_ordinary, is_plain
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.attention import attention, attention_varlen
from tritonkittens.kernels.attention.autograd import Window, attend
from tritonkittens.kernels.attention.call_plan import CallPlan, find_plan
from tritonkittens.kernels.attention.checks import HEAD_DIMS
from tritonkittens.launch import is_reachable

STEP, MAX_DIM = HEAD_DIMS.step, HEAD_DIMS[-1]
_torch_attention: Callable[..., Tensor] = functional.scaled_dot_product_attention


class Unsupported(ValueError):
    """Arguments that PyTorch's implementation takes and the kernels do not."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    fallback: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by `kernels.attention`. Differentiable; traced by
    torch.compile.

    Args:
        query: (…, heads, L, E), bf16 or fp16 on one CUDA device. Leading dimensions broadcast. Head dimensions go up
            to 256; others than multiples of 16 are padded, which copies the operands.
        key: (…, kv_heads, S, E), same dtype.
        value: (…, kv_heads, S, E_v), same dtype.
        attn_mask: None, `torch.nn.attention.bias.causal_lower_right(L, S)` or `causal_upper_left(L, S)`.
        dropout_p: 0.
        is_causal: a causal mask, aligned at the top left as in PyTorch.
        scale: a positive number; 1/√E by default.
        enable_gqa: heads may be a multiple of kv_heads; otherwise they are equal.
        fallback: run PyTorch's implementation instead of raising `Unsupported`.

    Returns:
        (…, heads, L, E_v) in the dtype of query.

    Raises:
        Unsupported: (a ValueError) for other masks, dropout, dtypes, tensor subclasses, no heads, an empty head
            dimension, or a scale that is not positive.

    Jagged nested tensors (batch, heads, ragged length, E) run on `kernels.attention_varlen`, without padding. DTensors
    run on the kernels too, sharded by batches or heads.
    """
    if scale is not None and not isinstance(scale, (float, int)) and not torch.compiler.is_compiling():
        scale = float(scale)  # a numpy number, or a tensor without dimensions
    dtype = autocasts(query.device)
    if dtype is not None:
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    if attn_mask is None and not dropout_p:
        plan = _known_plan(query, key, value, is_causal, scale, enable_gqa)
        if plan is not None:
            return attend(query, key, value, plan)
    try:
        if isinstance(query, NestedTensor):
            return _jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        window = _window(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except ValueError:
        if not fallback:
            raise
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return _attend(query, key, value, window, scale)


def _known_plan(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> CallPlan | None:
    """Return the plan of an earlier call with such operands. They need no further checks, except for those that the
    kernels take and PyTorch refuses."""
    if not is_plain(query, key, value):
        return None
    plan = find_plan(query, key, value, None, is_causal, None, scale, None)
    if plan.scores is None or not (enable_gqa or query.shape[1] == key.shape[1]):
        return None
    return None if is_causal and query.shape[2] != key.shape[2] else plan


def _attend(query: Tensor, key: Tensor, value: Tensor, window: Window | None, scale: float | None) -> Tensor:
    """Compute attention of checked operands: cut the keys that no query sees, and bring the operands into the form of
    `attention`."""
    # aligned at the top left, no query sees the last keys
    if window is not None and window[1] is not None and window[1] < 0:
        key, value, window = key[..., : query.shape[-2], :], value[..., : query.shape[-2], :], (None, 0)
    if _fits(query, key, value):  # skips views, which cost as much host time as the call, and again in the backward
        causal = window == (None, 0)
        return attention(query, key, value, causal=causal, window=None if causal else window, scale=scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (padded(x).expand(*lead, *x.shape[-3:-1], -1) for x in (query, key, value))
    q, k, v = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in (q, k, v))
    out = attention(q, k, v, window=window, scale=scale)
    return out.reshape(*lead, *out.shape[1:])[..., : value.shape[-1]]  # type: ignore[union-attr]


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the operands already have the form of `attention`."""
    batch = query.shape[0]
    return all(x.ndim == 4 and x.shape[0] == batch and x.shape[-1] % STEP == 0 for x in (query, key, value))


def _window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Window | None:
    """Return the window of `attention`. Raises `Unsupported` for arguments beyond the kernels, ValueError for
    arguments that PyTorch refuses too.
    """
    if reason := reason_against(query, key, value, dropout_p, scale):
        raise Unsupported(_text(reason))
    _check_shapes(query, key, value, enable_gqa)
    length, keys = query.shape[-2], key.shape[-2]
    if attn_mask is None:
        return (None, length - keys) if is_causal else None
    if is_causal:
        raise ValueError(_text("attn_mask and is_causal exclude each other"))
    if not isinstance(attn_mask, CausalBias):
        raise Unsupported(
            _text("attn_mask is a tensor; it must be None, causal_lower_right(L, S) or causal_upper_left(L, S)")
        )
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (length, keys):
        raise ValueError(
            _text(
                f"a causal bias of {attn_mask.seq_len_q} × {attn_mask.seq_len_kv} for {length} queries and {keys} keys"
            )
        )
    if attn_mask.variant == CausalVariant.LOWER_RIGHT:
        return None, 0
    return (None, length - keys) if attn_mask.variant == CausalVariant.UPPER_LEFT else None


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Refuse shapes that do not fit, as `_window` does."""
    shapes = f"query is {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
        raise ValueError(
            _text(
                f"{heads} query heads and {kv_heads} key heads; they must be equal, or with enable_gqa the first a "
                "multiple of the second"
            )
        )
    if (key.shape[-2], kv_heads, query.shape[-1]) != (value.shape[-2], value.shape[-3], key.shape[-1]):
        raise Unsupported(_text(f"{shapes}; heads, lengths and dimensions must fit"))
    try:
        torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        raise ValueError(_text(f"{shapes}; they do not broadcast")) from None


def reason_against(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None) -> str | None:
    """Return the reason why only PyTorch's implementation can take these arguments, or None."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not is_ordinary(x):
            return f"{name} is {'nested' if x.is_nested else f'a {type(x).__name__}'}; it must be a dense tensor"
        if x.dtype not in HALF_TYPES or x.dtype != query.dtype:
            return f"{name} has dtype {x.dtype}; all operands must be bf16 or fp16"
        if not (torch.compiler.is_compiling() or is_reachable(x.device)):
            return f"{name} is on {x.device}; it must be on a CUDA device"
        if x.ndim < 3:
            return f"{name} has shape {tuple(x.shape)}; it must have at least 3 dimensions"
        if x.shape[-1] > MAX_DIM:
            return f"the head dimension of {name} is {x.shape[-1]}; it must be at most {MAX_DIM}"
        if 0 in (x.shape[-3], x.shape[-1]):
            return f"{name} has shape {tuple(x.shape)}; it must have heads, and a head dimension"
        if x.device != query.device:
            return f"{name} is on {x.device}, query on {query.device}; all operands must be on one device"
    if dropout_p:
        return f"dropout_p={dropout_p}; the kernels have no dropout"
    if scale is not None and not 0 < scale < math.inf:
        return f"scale={scale}; it must be positive"
    return None


def _jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Compute attention of jagged nested tensors (batch, heads, ragged length, E) on their packed values. Raises
    `Unsupported`.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, NestedTensor) or x.ndim != 4 or x._ragged_idx != 2 or x._lengths is not None:
            raise Unsupported(
                _text(f"{name} is not jagged as query is: (batch, heads, ragged length, E), without holes")
            )
    if attn_mask is not None:
        raise Unsupported(_text("attn_mask is given for nested tensors; it must be None"))
    if key.shape[2] != value.shape[2] or (is_causal and query.shape[2] != key.shape[2]):
        raise Unsupported(
            _text(
                "nested tensors have other lengths; those of key and value, with is_causal those of query too, must "
                "be of one jagged layout"
            )
        )
    q, k, v = (x.values() for x in (query, key, value))  # (heads, rows of all sequences, E)
    if reason := reason_against(q, k, v, dropout_p, scale):
        raise Unsupported(_text(reason))
    heads, kv_heads = q.shape[0], k.shape[0]
    if kv_heads != v.shape[0] or heads % kv_heads or (heads != kv_heads and not enable_gqa):
        raise Unsupported(
            _text(
                f"{heads} query heads and {kv_heads} key heads; they must be equal, or with enable_gqa the first a "
                "multiple of the second"
            )
        )
    starts = query.offsets().int()
    starts_k = starts if query.shape[2] == key.shape[2] else key.offsets().int()
    q, k, v = (padded(x.transpose(0, 1)) for x in (q, k, v))
    out = attention_varlen(
        q,
        k,
        v,
        starts,
        starts_k,
        max_seqlen_q=query._maybe_max_seqlen,
        max_seqlen_k=key._maybe_max_seqlen,
        causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )
    packed = out[..., : value.shape[-1]]  # type: ignore[call-overload]
    result = torch.nested.nested_tensor_from_jagged(
        packed, query.offsets(), min_seqlen=query._maybe_min_seqlen, max_seqlen=query._maybe_max_seqlen
    )
    return result.transpose(1, 2)


def _text(message: str) -> str:
    return f"scaled_dot_product_attention: {message}"


def padded(x: Tensor) -> Tensor:
    """Pad the head dimension with zeros to a multiple of 16.

    Zeros add nothing to a score, and their columns of the result are cut off.
    """
    missing = -x.shape[-1] % STEP
    return functional.pad(x, (0, missing)) if missing else x


class use_attention(TorchFunctionMode):
    """Run every call of `torch.nn.functional.scaled_dot_product_attention` on the shipped kernels, in models too.

    Calls that the kernels do not support run in PyTorch as before.

    Example::

        with use_attention():
            y = model(x)
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _torch_attention:
            return scaled_dot_product_attention(*args, **{**kwargs, "fallback": True})
        # torch.compile cannot trace that method in a mode
        return (torch.unflatten if func is Tensor.unflatten else func)(*args, **kwargs)
