"""The two functions of an attention implementation of Hugging Face transformers: the mask of a model's layers, and
the attention of a layer.

The mask alone decides. A layer's own window attributes are ignored, as in transformers' own implementations. The mask
is None where the queries are the last positions and see all keys up to their own, or in bidirectional attention all
keys.
Otherwise it is the range of keys of every query, (batch, 1, queries, 2) in int32, as `attention_ranges` takes it.
transformers recognises a finished mask by its four dimensions. The mask is on the CPU because the host reads it. For
one query it is on the GPU, where the decode kernel reads it.
Source of the interface: transformers 5.17, masking_utils.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from tritonkittens.kernels._dispatch import autocasts, is_inference, is_plain, unseen_by_function_modes
from tritonkittens.kernels.attention import attention, attention_decode, attention_ranges
from tritonkittens.kernels.attention.decode_plan import find_decode_plan
from tritonkittens.kernels.attention.device.backward import ROWS
from tritonkittens.ops.attention import Unsupported, padded, reason_against
from tritonkittens.ops.mask_functions import Queries, ranges_of
from tritonkittens.ops.readings import read_once

HOLES = "a query sees keys on both sides of hidden ones; padding must be on one side (on the left for generate)"
DENSE = f"attention_mask is a mask of queries and keys: one that was given as such, or one in which {HOLES}"
EVALUATED = 1 << 26  # elements of a mask that are evaluated at a time
ADDED = ("s_aux", "sinks", "position_bias")  # arguments that are added to scores
CHOSEN = ("indices", "block_indices")  # arguments that select keys
UNSUPPORTED = frozenset(("output_attentions", *ADDED, *CHOSEN))


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    strict: bool = True,
    **others: Any,
) -> Tensor | None:
    """Return the mask of a model's layers in this module's form. The arguments are those of transformers'
    `sdpa_mask`.

    `attention_mask` is (batch, keys), True for tokens. Where a query does not see a range of keys, the result is the
    dense mask, (batch, 1, queries, keys) in bool; with `strict`, that raises `Unsupported`.
    In causal attention, a query whose own key is hidden is padding, and its visible keys are undefined. A trace
    cannot read numbers, so it always makes ranges. An impossible range ends before it begins, and `attention_ranges`
    refuses it.
    """
    call: dict[str, Any] = dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        device=device,
    )
    causal = allow_is_bidirectional_skip is None  # transformers passes it for bidirectional attention only
    may_skip = bool(allow_is_causal_skip if causal else allow_is_bidirectional_skip)
    if is_tracing(torch.empty(0, dtype=torch.bool, device=device) if attention_mask is None else attention_mask):
        return _traced(call, causal, may_skip)
    whole, found = _of_numbers(call, causal, may_skip)
    if whole:
        return found
    if strict:
        raise Unsupported(_text(HOLES))
    return sdpa_mask(**call, allow_is_causal_skip=False)


def _of_numbers(call: dict[str, Any], causal: bool, may_skip: bool) -> tuple[bool, Tensor | None]:
    """Return (whether there are ranges, the mask)."""
    batch, queries, keys, offset = (call[name] for name in ("batch_size", "q_length", "kv_length", "kv_offset"))
    filled, tokens = _tokens(call["attention_mask"], keys, offset)
    if may_skip and tokens is None and filled == keys and _is_needless(call, causal):
        return True, None
    place: np.ndarray = np.arange(queries) + int(call["q_offset"])
    own = place - offset
    asked = np.ones((batch, queries), bool)  # the visible keys of other queries are undefined
    if causal and tokens is not None and keys:
        asked = (own < 0) | (own >= keys) | tokens[:, own.clip(0, keys - 1)]
    found = None if call["use_vmap"] else ranges_of(call["mask_function"], Queries(place[None], batch, offset + keys))
    if found is not None:
        begin, end = (
            (x - offset).clip(0, filled) for x in np.broadcast_arrays(found.begin, found.end, place[None])[:2]
        )
        end = np.maximum(begin, end)
        begin, end, whole = (begin, end, np.True_) if tokens is None else _among_tokens(begin, end, tokens, asked)
    else:
        begin, end, whole = (x.cpu().numpy() for x in _evaluated(call)[:3])
    if not (whole | ~asked).all():
        return False, None
    plain = (0, own + 1) if causal and queries > 1 else (0, keys)
    last = not causal or queries < 2 or own[-1] == keys - 1
    if may_skip and last and ((begin == plain[0]) & (end == plain[1])).all():
        return True, None
    ranges = torch.from_numpy(np.stack(np.broadcast_arrays(begin, end), -1).astype(np.int32)).expand(batch, queries, 2)[
        :, None
    ]
    return True, ranges.to(call["device"]) if queries == 1 else ranges


def _tokens(mask: Tensor | None, keys: int, offset: int) -> tuple[int, np.ndarray | None]:
    """Return (keys up to the last token, tokens among all keys), (batch, keys), of a padding mask from its column
    `offset` on. None where all keys up to the last token are tokens, which costs one operation to find out.
    """
    if mask is None:
        return keys, None
    if offset or mask.shape[1] > keys:
        mask = mask[:, offset : offset + keys]
    filled = mask.shape[1]  # there are no tokens where the mask ends
    if mask.all():
        return filled, None
    tokens = np.zeros((mask.shape[0], keys), bool)
    tokens[:, :filled] = mask.cpu().numpy()
    return keys, tokens


def _among_tokens(
    begin: np.ndarray, end: np.ndarray, tokens: np.ndarray, asked: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (begin, end, exact) of the tokens in ranges (batch or 1, queries).

    `exact`: begin … end covers all of the range's tokens and nothing else. `tokens` is (batch, keys). A query outside
    `asked` that sees tokens keeps the range's end.
    """
    batch, keys = tokens.shape
    count = np.count_nonzero(tokens, 1)
    head = tokens.argmax(1)
    tail = np.where(count, keys - tokens[:, ::-1].argmax(1), head)
    if (tail - head == count).all():  # one run of tokens a sequence
        low, high = np.maximum(begin, head[:, None]), np.minimum(end, tail[:, None])
        some = low < high
        return np.where(some, low, 0), np.where(some, np.where(asked, high, end), 0), np.ones_like(some)
    place = np.arange(keys)
    so_far = np.pad(tokens.cumsum(1), ((0, 0), (1, 0)))
    # first token from a position on
    first = np.pad(np.where(tokens, place, keys), ((0, 0), (0, 1)), constant_values=keys)
    first = np.minimum.accumulate(first[:, ::-1], 1)[:, ::-1]
    # the last token before a position
    behind = np.maximum.accumulate(np.pad(np.where(tokens, place + 1, 0), ((0, 0), (1, 0))), 1)
    begin, end = (np.broadcast_to(x, (batch, x.shape[1])) for x in (begin, end))
    count = np.take_along_axis(so_far, end, 1) - np.take_along_axis(so_far, begin, 1)
    low, high = np.take_along_axis(first, begin, 1), np.take_along_axis(behind, end, 1)
    whole = (count == 0) | (high - low == count)
    low = np.where(count > 0, low, 0)
    return low, np.where(count > 0, np.where(asked, high, end), low), whole


def _evaluated(call: dict[str, Any]) -> tuple[Tensor, ...]:
    """Apply `_of_dense` to all queries, some at a time."""
    queries, keys = call["q_length"], call["batch_size"] * call["kv_length"]
    rows = max(1, EVALUATED // max(1, keys))
    parts = [
        _of_dense({**call, "q_offset": call["q_offset"] + first, "q_length": min(rows, queries - first)})
        for first in range(0, max(queries, 1), rows)
    ]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(x, 1) for x in zip(*parts, strict=True))


def _of_dense(call: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return (begin, end, exact, sees all keys) of every query, (batch, queries), from the dense mask."""
    batch, keys = call["batch_size"], call["kv_length"]
    place = torch.arange(1, keys + 1, device=call["device"])
    visible = sdpa_mask(**call, allow_is_causal_skip=False).expand(batch, 1, -1, keys)[:, 0]
    end, count = functional.pad(torch.where(visible, place, 0), (1, 0)).amax(2), visible.sum(2)
    begin = end - count
    return begin, end, torch.where(visible, begin[..., None] < place, True).all(2), count == keys


def _traced(call: dict[str, Any], causal: bool, may_skip: bool) -> Tensor | None:
    """Return the mask in a trace, which can neither read numbers nor closures. Functions that are no closures need no
    dense mask.
    """
    batch, queries, keys, offset = (call[name] for name in ("batch_size", "q_length", "kv_length", "kv_offset"))
    if may_skip and call["attention_mask"] is None and _is_needless(call, causal):
        return None
    if queries == 1:
        begin, end, whole, _ = _of_dense(call)
        torch._assert_async(whole.all(), _text(HOLES))
        return _ranges(begin, end)
    padding = prepare_padding_mask(call["attention_mask"], keys, offset)
    seen = (
        torch.ones(batch, keys, dtype=torch.bool, device=call["device"])
        if padding is None
        else padding[:, offset : offset + keys]
    )
    own = torch.arange(queries, device=call["device"]) + (call["q_offset"] - offset)
    begin, end, whole = _of_plain(seen, own, causal) if _is_plain_function(call, causal) else _of_dense(call)[:3]
    if causal and padding is not None:  # a query whose own key is hidden is padding
        hidden = ~seen[:, own.clamp(0, keys - 1)] & (own >= 0) & (own < keys)
        end, whole = torch.where(hidden & (begin < end), own + 1, end), whole | hidden
    return _ranges(begin, torch.where(whole, end, begin - 1)).cpu()


def _is_plain_function(call: dict[str, Any], causal: bool) -> bool:
    """Whether the mask function is one without parameters."""
    plain = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    return call["mask_function"] is plain


def _is_needless(call: dict[str, Any], causal: bool) -> bool:
    """Whether the mask is needless, as it hides nothing but, in causal attention, the keys after a query's own. False
    where only numbers on the GPU would say so.
    """
    behind, at = call["kv_offset"] + call["kv_length"], call["q_offset"]
    last = not causal or (not isinstance(at, Tensor) and at + call["q_length"] == behind)
    return last and _is_plain_function(call, causal)


def _of_plain(seen: Tensor, own: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (begin, end, exact) of every query, (batch, queries), that sees all tokens or, with `causal`, those up
    to its own position.

    `seen` (batch, keys) marks tokens. `own` (queries,) holds the queries' positions.
    """
    place = torch.arange(1, seen.shape[1] + 1, device=seen.device)
    ends, counts = torch.where(seen, place, 0).cummax(1).values, seen.cumsum(1)
    ends, counts = (functional.pad(x, (1, 0)) for x in (ends, counts))
    upto = (own + 1).clamp(0, seen.shape[1]) if causal else torch.full_like(own, seen.shape[1])
    end, count = ends[:, upto], counts[:, upto]
    begin = end - count
    before = torch.gather(counts, 1, begin)
    return begin, end, before == 0


def _ranges(begin: Tensor, end: Tensor) -> Tensor:
    return torch.stack((begin, end), -1).int()[:, None]


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    *,
    strict: bool = True,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention.

    Args:
        query: (batch, heads, queries, D).
        key: (batch, kv_heads, keys, D).
        value: (batch, kv_heads, keys, D_v).
        attention_mask: the result of the function of that name, or (batch or 1, heads or 1, queries, keys), bool or
            added to scores.

    Returns:
        ((batch, queries, heads, D_v), None).

    Unsupported arguments run in PyTorch, with a warning for every reason. With `strict`, and always where `indices`
    select keys, they raise `Unsupported`.
    """
    if is_inference() and not dropout:
        out = _of_known_token(query, key, value, attention_mask, scaling, softcap, others)
        if out is not None:
            return out, None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return _attention(
        module, query, key, value, attention_mask, (dropout, scaling, softcap, causal), strict, others
    ), None


def _of_known_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    others: dict[str, Any],
) -> Tensor | None:
    """Return the attention of one query as an earlier call did it, without its checks; None where there was none.

    The arguments are known by shapes, strides and dtypes. No gradient is wanted.
    """
    if not others.keys().isdisjoint(UNSUPPORTED) and _reason_of(False, others):
        return None
    starts = lengths = None
    if mask is not None:
        if not _has_ranges(mask) or mask.shape[2] != 1:
            return None
        starts, lengths = read_once(mask, _columns, query.device, device=query.device)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    operands = query, key, value, None, lengths, starts, None
    plan = find_decode_plan(operands, (True, scale, softcap, False, None))[1]
    if plan is None or plan.queries != 1 or not is_plain(query, key, value):
        return None
    return cast(Tensor, plan(*operands)).transpose(1, 2)  # contiguous, as of one query


@unseen_by_function_modes
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    numbers: tuple[float, float | None, float | None, bool],
    strict: bool,
    others: dict[str, Any],
) -> Tensor:
    """Return the result of `attention_forward`; `numbers`: its dropout, scaling, softcap and is_causal."""
    dropout, scaling, softcap, causal = numbers
    dtype = autocasts(query.device)
    if dtype is not None:
        query, key, value = (x.to(dtype) for x in (query, key, value))
    ranges = mask is not None and _has_ranges(mask)
    dense = mask is not None and not ranges
    reason = reason_against(query, key, value, dropout, scaling) or _reason_of(dense, others)
    if reason is None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = _attend(query, key, value, mask, scale, softcap, causal)
        out = out if out.shape[-1] == value.shape[-1] else out[..., : value.shape[-1]]
        return out.transpose(1, 2).contiguous()
    if strict or any(others.get(name) is not None for name in CHOSEN):
        raise Unsupported(_text(reason))
    _warn(reason)
    sinks = others.get("s_aux", others.get("sinks"))
    by_sdpa = softcap is None and sinks is None
    mask = mask if dense else _dense(mask, query.shape[2], key.shape[2], causal, by_sdpa, query.device)
    if by_sdpa:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **others
        )[0]
    bias = others.get("position_bias")
    return _in_torch(query, key, value, mask, dropout, scaling, softcap, sinks, bias).transpose(1, 2).contiguous()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, ranges: Tensor | None, scale: float, softcap: float | None, causal: bool
) -> Tensor:
    """Return (batch, heads, queries, D_v up to a multiple of 16) for operands that the kernels take."""
    queries = query.shape[2]
    differentiable = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    # then never slower, with a group of heads up to 10 times faster (measured: docs/notes/attention_decode.md)
    few = queries <= ROWS and not differentiable
    if ranges is not None and queries > 1 and (seen := read_once(ranges, _keys_of_causal)) is not None:
        key, value = (x if seen >= x.shape[2] else x[:, :, :seen] for x in (key, value))
        ranges, causal = (ranges if seen > key.shape[2] else None), True  # `attention_ranges` refuses keys beyond
    q, k, v = (padded(x) for x in (query, key, value))
    if few and (ranges is None or queries == 1):
        starts, lengths = (None, None) if ranges is None else read_once(ranges, _columns, q.device, device=q.device)
        causal = causal or queries == 1  # one plan for both
        return attention_decode(q, k, v, lengths=lengths, starts=starts, causal=causal, scale=scale, softcap=softcap)
    if ranges is not None:
        return attention_ranges(q, k, v, ranges, scale=scale, softcap=softcap)
    return attention(q, k, v, causal=causal, scale=scale, softcap=softcap)


def _columns(ranges: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (starts, lengths), (batch,), of ranges (batch, 1, 1, 2)."""
    starts, lengths = ranges[:, 0, 0].to(device).unbind(1)
    return starts.contiguous(), lengths.contiguous()


def _keys_of_causal(ranges: Tensor) -> int | None:
    """Return the number of keys that a causal mask alone shows to the last query; None for other ranges. So it is in
    the prefill of a static cache. A trace cannot read numbers.
    """
    if not is_plain(ranges):
        return None
    begin, end = ranges[:, 0].numpy(force=True).transpose(2, 0, 1)
    seen = int(end[0, -1]) if end.size else 0
    causal = not begin.any() and (end == np.arange(seen - end.shape[1], seen) + 1).all()
    return seen if causal and seen >= end.shape[1] else None


def _has_ranges(mask: Tensor) -> bool:
    return mask.dtype == torch.int32 and mask.shape[-1] == 2


def _reason_of(dense: bool, others: dict[str, Any]) -> str | None:
    if dense:
        return DENSE
    if others.get("output_attentions"):
        return 'output_attentions=True; the kernels keep no weights ("eager" does)'
    for name in ADDED:
        if others.get(name) is not None:
            return f"{name} is given; the kernels add nothing to scores"
    for name in CHOSEN:
        if others.get(name) is not None:
            return f"{name} is given; the kernels choose no keys"
    return None


def _dense(
    ranges: Tensor | None, queries: int, keys: int, causal: bool, may_skip: bool, device: torch.device | str
) -> Tensor | None:
    """Return a mask as a boolean one, (batch or 1, 1, queries, keys).

    None where every query sees all keys or, with `may_skip`, where PyTorch's `is_causal` is enough.
    """
    if ranges is None and (not causal or queries == 1 or may_skip and queries == keys):
        return None
    key = torch.arange(keys, device=device)
    if ranges is None:
        return (key <= torch.arange(queries, device=device)[:, None] + keys - queries)[None, None]
    begin, end = ranges.to(device).unsqueeze(-1).unbind(-2)
    return (key >= begin) & (key < end)


def _in_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return (batch, heads, queries, D_v) with soft-caps and sinks, (heads,) or (batch, heads, queries, 1), which
    PyTorch's function lacks. The softmax is in fp32.
    """
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, torch.finfo(torch.float32).min) if mask.dtype == torch.bool else scores + mask
        )
    if sinks is not None:
        sinks = sinks[:, None, None] if sinks.ndim == 1 else sinks
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return functional.dropout(weights, dropout).to(value.dtype) @ value


_warned: set[str] = set()  # reasons of earlier warnings


@torch.compiler.assume_constant_result
def _warn(reason: str) -> None:
    """Warn once in a process that PyTorch's attention runs, with the reason."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            _text(
                f"{reason}. PyTorch's attention runs instead; register_transformers(strict=True) makes this an error"
            ),
            stacklevel=3,
        )


def _text(reason: str) -> str:
    return f"tritonkittens' attention for transformers: {reason}"
