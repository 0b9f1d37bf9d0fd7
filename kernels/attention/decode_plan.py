"""What one kind of calls of `attention_decode` does: the split, the choice of a kernel, the launches."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._dispatch import announce_write, overlaps, requires_grad
from tritonkittens.kernels._tensors import (
    TMA_BYTES,
    addressable,
    allocator,
    power_of_two,
    remember,
    signature,
    storable,
)
from tritonkittens.kernels.attention import tmem_decode_plan
from tritonkittens.kernels.attention.call_plan import Scores, fill_empty, scores_of, write_results
from tritonkittens.kernels.attention.checks import check, check_decode, check_decode_values, check_window
from tritonkittens.kernels.attention.device.decode import AttentionDecode, combine
from tritonkittens.kernels.attention.num_splits import (
    DecodeKind,
    DecodeSplit,
    Rings,
    choose_split,
    kernel_for,
    rings_of,
    row_tiles_of,
)
from tritonkittens.kernels.attention.tmem_decode_plan import TmemDecode
from tritonkittens.launch import capability, multiprocessor_count, simulated_facts
from tritonkittens.tune.cost import memory_bandwidth

SIGNIFICANT = 6  # bits of a number of keys that the choice of a split looks at

Operands: TypeAlias = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]  # q, k, v, out, lengths, starts, pages


@dataclass(frozen=True)
class DecodeCall:
    """What a plan depends on beside the kinds of its operands.

    Args:
        row_tiles: tiles of the query rows of a key head, see `row_tiles_of`.
        page_size: keys of a page; None: the cache has no pages.
        keys: of a sequence, at most.
        num_splits: given by the caller; None: chosen.
    """

    scores: Scores
    causal: bool
    return_lse: bool
    row_tiles: int
    page_size: int | None
    keys: int
    num_splits: int | None


def run_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    pages: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
    num_splits: int | None,
    out: Tensor | None = None,
    debug: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_decode` of plain tensors; arguments as there."""
    if out is not None and (requires_grad(out) or overlaps(out, q, k, v, lengths, starts, pages)):
        check(q, k, v, out, paged=pages is not None)
        found = run_decode(q, k, v, lengths, starts, pages, causal, scale, softcap, True, num_splits, debug=debug)
        return write_results(found, out, return_lse)
    if out is not None:
        announce_write(out)
    operands: Operands = (q, k, v, out, lengths, starts, pages)
    key, plan = (None, None) if debug else find_decode_plan(operands, (causal, scale, softcap, return_lse, num_splits))
    if plan is not None:
        return plan(*operands)
    page_size, keys = check_decode(*operands, causal, num_splits)
    if debug:
        check_decode_values(lengths, starts, pages, page_size, keys, len(k))
    scores = scores_of(q, scale, softcap, *check_window(causal, None))
    group = q.shape[1] // k.shape[1]
    if q.numel() == 0 or keys == 0:
        return _empty(q, v, out, return_lse)
    row_tiles, heads = row_tiles_of(group, q.shape[2])
    if row_tiles * heads > group:
        padded = _pad_groups(q, k.shape[1], row_tiles * heads)
        found = run_decode(padded, k, v, lengths, starts, pages, causal, scale, softcap, True, num_splits)
        return _unpad_groups(found, q, v, out, return_lse)
    decode = DecodeCall(scores, causal, return_lse, row_tiles, page_size, keys, num_splits)
    plan = _plan_of(operands, decode, kept=key is not None)
    return (plan if key is None else remember(_plans, key, plan))(*operands)


def _new_results(q: Tensor, v: Tensor, out: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    result = q.new_empty(*q.shape[:3], v.shape[3]) if out is None else out
    return result, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None


def _empty(q: Tensor, v: Tensor, out: Tensor | None, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """The results of queries without keys."""
    result, lse = _new_results(q, v, out, return_lse)
    fill_empty(result, lse)
    return result if lse is None else (result, lse)


def _pad_groups(q: Tensor, kv_heads: int, heads: int) -> Tensor:
    """q with so many query heads a group, so that its tiles have equally many."""
    grouped = q.unflatten(1, (kv_heads, -1))
    return pad(grouped, (0, 0, 0, 0, 0, heads - grouped.shape[2])).flatten(1, 2)


def _unpad_groups(
    found: tuple[Tensor, Tensor], q: Tensor, v: Tensor, out: Tensor | None, return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The results of q, from those of `_pad_groups`."""
    result, lse = _new_results(q, v, out, return_lse)
    kv_heads = v.shape[1]
    group = q.shape[1] // kv_heads
    for home, x in zip((result, lse), found, strict=True):
        if home is not None:
            home.unflatten(1, (kv_heads, group)).copy_(x.unflatten(1, (kv_heads, -1))[:, :, :group])
    return result if lse is None else (result, lse)


class DecodePlan:
    """What calls of one kernel do, with operands that differ in the number of keys, and in where they are in memory.

    It is made of checked operands; called with others like them, it returns the results.
    """

    def __init__(
        self, operands: Operands, call: DecodeCall, kernel: AttentionDecode | TmemDecode, num_splits: int
    ) -> None:
        q, k, v, *_ = operands
        (batch, heads, queries, dim), (kv_heads, value_dim) = q.shape, (v.shape[1], v.shape[3])
        tiles, rows = kv_heads * call.row_tiles, heads // kv_heads // call.row_tiles * queries
        self.kernel, self.partial, self.return_lse, self.queries = kernel, kernel.partial, call.return_lse, queries
        self.numbers = dict(call.scores.numbers(False), queries=queries)
        # the launches of the kernel and of `combine`, bound by the first call
        self.bound: Callable[..., None] | None = None
        self.combine: Callable[..., None] | None = None
        self.q_shape, self.shape = (batch, tiles, rows, dim), (batch, tiles, num_splits, rows)
        reshaped = q.reshape(self.q_shape)  # the query heads of a key head are rows of its tiles
        self.addressable = addressable(reshaped) and addressable(k) and addressable(v)
        # a bound launch reads only the address of q
        self.reshapes = not self.addressable or reshaped.data_ptr() != q.data_ptr()
        self.new_result = allocator((batch, heads, queries, value_dim), q.dtype, q.device)
        self.new_lse = allocator((batch, heads, queries), torch.float32, q.device)
        names = ("Q", "K", "V", "O", "L", "lengths", "starts", "pages")
        self.in_order = operator.itemgetter(*map(names.index, kernel.tensors))
        self.varying = kernel.tensors.index("K"), kernel.tensors.index("V")
        if self.partial:
            self.new_splits = allocator((*self.shape, value_dim), torch.float32, q.device)
            self.new_lses = allocator(self.shape, torch.float32, q.device)
            self.grid = rows, tiles, batch
            widths = power_of_two(num_splits), power_of_two(value_dim)
            self.constants = (num_splits, rows, queries, value_dim, *widths, call.return_lse)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lengths: Tensor | None,
        starts: Tensor | None,
        pages: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        result, lse = self.new_result() if out is None else out, self.new_lse() if self.return_lse else None
        if self.reshapes or self.bound is None:
            q = q.reshape(self.q_shape)
        if not self.addressable:
            q, k, v = as_addressable(q), as_addressable(k), as_addressable(v)
        partial, lses = (self.new_splits(), self.new_lses()) if self.partial else (result, lse)
        if lengths is not None:
            lengths = lengths.contiguous()
        if starts is not None:
            starts = starts.contiguous()
        if self.bound is None:
            self.bound = self._bind(q, k, v, partial, lses, lengths, starts, pages)
        self.bound(*self.in_order((q, k, v, partial, lses, lengths, starts, pages)))
        if self.partial:
            combined = (partial, lses, result, lses if lse is None else lse)
            if self.combine is None:
                self.combine = combine.bind(self.grid, *combined, *result.stride(), *self.constants)
            self.combine(*combined)
        return result if lse is None else (result, lse)

    def _bind(
        self, q: Tensor, k: Tensor, v: Tensor, results: Tensor, lses: Tensor | None, *others: Tensor | None
    ) -> Callable[..., None]:
        """The launch of the kernel, for `results` and `lses` in the shape of splits."""
        shaped = results.view(*self.shape, results.shape[-1]), None if lses is None else lses.view(self.shape)
        tensors = self.in_order((q, k, v, *shaped, *others))
        if isinstance(self.kernel, TmemDecode):
            return self.kernel.bind(*tensors, varying=self.varying, **self.numbers)
        return self.kernel.call(*tensors).bind(*tensors, varying=self.varying, **self.numbers)


_plans: dict[tuple[Any, ...], DecodePlan] = {}  # by all that is known of a call's operands
_plans_of_kernels: dict[tuple[Any, ...], DecodePlan] = {}  # the same plans, without the number of keys


def _plan_of(operands: Operands, call: DecodeCall, kept: bool) -> DecodePlan:
    """The plan of checked operands. Those that are `kept` are that of an earlier call, where only the number of keys is
    another one."""
    q, k, v, out, lengths, starts, pages = operands
    (batch, _, queries, dim), (kv_heads, value_dim) = q.shape, (v.shape[1], v.shape[3])
    tiles, whole = batch * kv_heads * call.row_tiles, out is None or out.is_contiguous() and storable(out)
    features = (
        queries > 1 and call.causal or starts is not None,
        call.scores.softcap is not None,
        lengths is not None,
        starts is not None,
    )
    kind = DecodeKind(q.dtype, dim, value_dim, *features, call.page_size, call.row_tiles)
    split, kernel = _kernel_of(call, kind, tiles, operands, whole)
    if not kept:
        return DecodePlan(operands, call, kernel, split.num_splits)
    fixed = [None if x is None else (x.shape, x.stride()) for x in (q, out, pages)]
    places = [None if x is None else x.data_ptr() % TMA_BYTES for x in operands]
    kinds = kernel, split, call.scores, call.return_lse, q.device, simulated_facts(), addressable(k), addressable(v)
    key = (*kinds, kv_heads, *fixed, *places)
    found = _plans_of_kernels.get(key)
    if found is None:
        found = remember(_plans_of_kernels, key, DecodePlan(operands, call, kernel, split.num_splits))
    return found


def _kernel_of(
    call: DecodeCall, kind: DecodeKind, tiles: int, operands: Operands, whole: bool
) -> tuple[DecodeSplit, AttentionDecode | TmemDecode]:
    """The split of so many `tiles` of query rows, and its kernel. `whole`: the kernel may write the result itself."""
    q, k, *_ = operands
    rows = q.shape[1] // k.shape[1] // call.row_tiles * q.shape[2]
    if tmem_decode_plan.takes(kind, rows, q.device):
        arch = capability(q.device)
        split = _split_of(call, tiles, tmem_decode_plan.rings_of(kind, rows, arch), q.device)
        partial = split.num_splits > 1 or not whole
        return split, tmem_decode_plan.kernel_of(kind, rows, arch, partial, call.return_lse or partial)
    split = _split_of(call, tiles, rings_of(kind, whole), q.device)
    return split, kernel_for(kind, split, tiles, multiprocessor_count(q.get_device()), call.return_lse, whole)


def _split_of(call: DecodeCall, tiles: int, rings: Rings, device: torch.device) -> DecodeSplit:
    """The split of so many `tiles`: given, or chosen for kernels with these rings."""
    if call.num_splits:
        return DecodeSplit(call.num_splits)
    keys, bandwidth = similar_keys(call.keys), memory_bandwidth(device)
    return choose_split(tiles, keys, multiprocessor_count(device), bandwidth, rings)


def similar_keys(keys: int) -> int:
    """At most 3 % fewer keys, which are split alike: the choice takes longer than a token's attention."""
    step = max(0, keys.bit_length() - SIGNIFICANT)
    return keys >> step << step


def find_decode_plan(operands: Operands, options: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, DecodePlan | None]:
    """(key, plan) of calls like this one; None where operands and options cannot be a key: no tensors, fake ones.

    `options` are causal, scale, softcap, return_lse and num_splits. The operands of a plan need no check.
    """
    try:
        key = (signature(*operands), options, *map(type, options))  # True is not 1
        return key, _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        return None, None
