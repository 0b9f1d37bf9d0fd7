"""The two functions of an attention implementation of Hugging Face transformers: what masks models hand to their layers, and the attention of a layer.

A mask is None where every layer's own attributes say what a query sees (the last query's own key is the last), else the range of keys of every query,
(batch, 1, queries, 2) in int32, as `attention_ranges` takes it: four dimensions, by which transformers knows a mask that it need not make again. It is on the
CPU, since the host reads it, except for one query, for which the decode kernel does. Source of the interface: transformers 5.17, masking_utils.py.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from tritonkittens.kernels.attention import attention, attention_decode, attention_ranges
from tritonkittens.kernels.attention.backward import ROWS
from tritonkittens.ops.attention import Unsupported, padded, reason_against

HOLES = "a query sees keys on both sides of hidden ones; padding must be on one side (on the left for generate)"
AHEAD = "a causal mask lets queries see keys behind their own"
CUSTOM = "a mask function of the model or the caller"


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, *, mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False, device: torch.device | str = "cpu", config: Any = None, fallback: bool = False, **others: Any,
) -> Tensor | None:  # fmt: skip
    """The ranges of keys of a model's queries, or None; arguments as transformers' `sdpa_mask` takes them. attention_mask: (batch, keys), True for tokens.

    Raises `Unsupported` for what is not a range of keys for every query; with `fallback` that is a dense mask.
    """
    pattern = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
                   attention_mask=attention_mask, use_vmap=use_vmap, device=device)  # fmt: skip
    causal = allow_is_bidirectional_skip is None  # only masks of bidirectional attention are asked for with it
    of_layers = local_size is None or local_size == getattr(config, "sliding_window", None)  # chunks are not known to the layers
    aligned = not causal or (not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length)
    may_skip = bool(allow_is_causal_skip if causal else allow_is_bidirectional_skip) and of_layers and aligned and not use_vmap
    if may_skip and attention_mask is None:
        return None
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    seen = None if padding is None else padding[:, kv_offset : kv_offset + kv_length]
    reason: str | None
    ranges: Tensor | None
    if use_vmap:
        reason, ranges = CUSTOM, None
    elif q_length == 1:
        reason, ranges = _of_one_query(sdpa_mask(**pattern, allow_is_causal_skip=False)[:, 0, 0], may_skip)
    elif causal:
        reason, ranges = _of_causal(pattern, seen, may_skip)
    else:
        seen = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device) if seen is None else seen
        reason, ranges = _of_bidirectional(seen, q_length, local_size is not None, may_skip)
    if reason is None:
        return ranges
    if not fallback:
        raise Unsupported(_text(reason))
    return sdpa_mask(**pattern, allow_is_causal_skip=False)


def _of_one_query(visible: Tensor, may_skip: bool) -> tuple[str | None, Tensor | None]:
    """(why there is none, ranges) for the keys (batch, keys) that a sequence's query sees."""
    place = torch.arange(1, visible.shape[1] + 1, device=visible.device)
    end = torch.where(visible, place, 0).amax(1)
    begin = end - visible.sum(1)
    whole = torch.where(visible, begin[:, None] < place, True).all()
    ranges = torch.stack((begin, end)).int().permute(1, 0)[:, None, None]
    if is_tracing(visible):
        torch._assert_async(whole, _text(HOLES))
        return None, ranges
    whole, needless = torch.stack((whole, visible.all())).tolist()
    return (HOLES, None) if not whole else (None, None if may_skip and needless else ranges)


def _of_causal(pattern: dict[str, Any], seen: Tensor | None, may_skip: bool) -> tuple[str | None, Tensor | None]:
    """(why there is none, ranges) for causal attention. A mask function says of two neighbours whether the second sees the first: where it does not, another
    sequence or chunk begins. (Its window is the layers' own.)"""
    batch, queries, keys, offset, device = (pattern[name] for name in ("batch_size", "q_length", "kv_length", "kv_offset", "device"))
    sequence, head = torch.arange(batch, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    place = torch.arange(keys, device=device)
    here, next_one = (place + offset)[None, :-1], (place + offset)[None, 1:]
    joined, ahead = (pattern["mask_function"](sequence, head, *pair).expand(batch, keys - 1) for pair in ((next_one, here), (here, next_one)))
    seen = torch.ones(batch, keys, dtype=torch.bool, device=device) if seen is None else seen
    so_far = seen.cumsum(1)
    appears = seen[:, 1:] & ~seen[:, :-1]
    holes = appears & joined & (so_far[:, :-1] > 0)
    starts = torch.where(appears | ~joined, place[1:], 0)
    starts = torch.nn.functional.pad(starts, (1, 0)).cummax(1).values
    own = torch.arange(queries, device=device) + (pattern["q_offset"] - offset)
    begin, end = starts[:, own], (own + 1).expand(batch, queries)
    end = torch.where(so_far[:, own] > 0, end, begin)  # padding on the left sees nothing
    if is_tracing(seen):  # the operator refuses ranges that end before they begin
        wrong = (holes | ahead).any(1, keepdim=True)
        return None, _ranges(begin, torch.where(wrong, begin - 1, end))
    hole, forward, needless = torch.stack((holes.any(), ahead.any(), ((begin == 0) & (end > 0)).all())).tolist()
    if hole or forward:
        return HOLES if hole else AHEAD, None
    return None, None if may_skip and needless else _ranges(begin, end)


def _of_bidirectional(seen: Tensor, queries: int, windowed: bool, may_skip: bool) -> tuple[str | None, Tensor | None]:
    """(why there is none, ranges) for queries that all see the tokens among the keys; with a window padding sees nothing."""
    place = torch.arange(1, seen.shape[1] + 1, device=seen.device)
    end = torch.where(seen, place, 0).amax(1, keepdim=True)
    begin = end - seen.sum(1, keepdim=True)
    holes = (seen & (place <= begin)).any(1, keepdim=True)
    begin, ends = begin.expand(-1, queries), end.expand(-1, queries)
    if windowed:
        ends = torch.where(seen, ends, begin)
    if is_tracing(seen):
        return None, _ranges(begin, torch.where(holes, begin - 1, ends))
    hole, needless = torch.stack((holes.any(), seen.all())).tolist()
    return (HOLES, None) if hole else (None, None if may_skip and needless else _ranges(begin, ends))


def _ranges(begin: Tensor, end: Tensor) -> Tensor:
    return torch.stack((begin, end), -1).int()[:, None].cpu()


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None, *, fallback: bool = False, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """A layer's attention. query: (batch, heads, queries, D), key and value: (batch, kv_heads, keys, D and D_v); attention_mask as the function of that name
    leaves it. Returns ((batch, queries, heads, D_v), None). Raises `Unsupported`; with `fallback` only where PyTorch's attention does not do it either.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window if sliding_window is not None and key.shape[2] > sliding_window else None
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    dense = attention_mask is not None and attention_mask.dtype != torch.int32
    reason = reason_against(query, key, value, dropout, scaling) or _reason_of(dense, others)
    if reason is not None:
        if not fallback or softcap is not None or others.get("s_aux") is not None:
            raise Unsupported(_text(reason))
        mask = attention_mask if dense else _dense(attention_mask, query.shape[2], key.shape[2], causal, window, query.device)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **others)
    out = _attend(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, causal, window)
    out = out if out.shape[-1] == value.shape[-1] else out[..., : value.shape[-1]]
    return out.transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, ranges: Tensor | None, scale: float, softcap: float | None, causal: bool, window: int | None,
) -> Tensor:  # fmt: skip
    """(batch, heads, queries, D_v up to a multiple of 16) of operands that the kernels take."""
    queries = query.shape[2]
    if ranges is None and queries == 1 and causal and window is not None:
        key, value, window = key[:, :, -window:], value[:, :, -window:], None
    differentiable = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    few = queries <= ROWS and not differentiable  # then never slower, with a group of heads up to 10 times faster (`bench/results/attention_variants.json`)
    q, k, v = (padded(x) for x in (query, key, value))
    if few and (queries == 1 if ranges is not None else window is None):
        starts, lengths = (None, None) if ranges is None else (x.contiguous() for x in ranges[:, 0, 0].to(q.device).unbind(1))
        return attention_decode(q, k, v, lengths=lengths, starts=starts, causal=causal, scale=scale, softcap=softcap)  # type: ignore[return-value]
    if ranges is not None:
        return attention_ranges(q, k, v, ranges, causal=causal, window=window, scale=scale, softcap=softcap)
    sides = None if window is None else (window - 1, window - 1)
    return attention(q, k, v, causal=causal, window=sides, scale=scale, softcap=softcap)  # type: ignore[return-value]


def _reason_of(dense: bool, others: dict[str, Any]) -> str | None:
    if dense:
        return "attention_mask is a mask of queries and keys; it must be made by transformers from (batch, keys), or be None"
    if others.get("output_attentions"):
        return "output_attentions=True; the kernels keep no weights (\"eager\" does)"
    for name in ("s_aux", "position_bias"):
        if others.get(name) is not None:
            return f"{name} is given; the kernels add nothing to scores"
    return None


def _dense(ranges: Tensor | None, queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """Ranges and windows as a boolean mask (batch or 1, 1, queries, keys), or None where PyTorch's `is_causal` says all."""
    if ranges is None and window is None and (not causal or queries in (1, keys)):
        return None
    own = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)
    if ranges is None:
        mask = (key <= own if causal else key < keys)[None, None]
    else:
        begin, end = ranges.to(device).unsqueeze(-1).unbind(-2)
        own = end - 1 if causal else own
        mask = (key >= begin) & (key < end)
    if window is not None:
        mask = mask & (key > own - window) & (key < own + window)
    return mask


def _text(reason: str) -> str:
    return f"tritonkittens' attention for transformers: {reason}"
