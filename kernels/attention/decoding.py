"""`attention_decode` for PyTorch tensors: checks, what is known of a kind of calls, the launches."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._dispatch import announce_write, call, check_no_gradient, check_tensors, is_plain, overlaps, requires_grad
from tritonkittens.kernels._tensors import addressable, allocator, check_small, power_of_two, remember, signature, storable
from tritonkittens.kernels.attention.call_plan import Scores, check, check_window, handed_out, scores_of, see_nothing
from tritonkittens.kernels.attention.dealing import MAX_PARTS, Deal, Kind, deal_of, kernel_of, rings_of, row_tiles_of
from tritonkittens.kernels.attention.device.backward import ROWS
from tritonkittens.kernels.attention.device.decode import combine
from tritonkittens.launch import multiprocessor_count
from tritonkittens.tune.cost import memory_bandwidth

PAGE = 16  # keys: a page is a multiple of the smallest tile's rows


def attention_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: torch.Tensor | None = None, starts: torch.Tensor | None = None,
    pages: torch.Tensor | None = None, causal: bool = True, scale: float | None = None, softcap: float | None = None, return_lse: bool = False,
    parts: int | None = None, out: torch.Tensor | None = None, debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention` of few queries against long keys and values, as in writing token by token; not differentiable: operands that require gradients are refused,
    except under `torch.no_grad()`.

    q: (batch, heads, queries, D), at most 64 queries (where those of a group's heads are more, K and V are read several times); k, v: (batch, kv_heads,
    keys, D and D_v), a cache of which sequence b has filled the first `lengths[b]` keys (int32, on the same device; all where not given; at most `keys`).
    With `causal` the last query sees all of them. `starts` (like lengths) hides the keys before starts[b], as padding on the left does; they must be finite.
    `parts`: tasks that a sequence is dealt to, chosen where not given. Everything else, results and errors as for `attention`.

    With `pages` (batch, pages of the longest sequence; int32, on the same device) k and v are pools of pages, (pages of the pool, kv_heads, page_size, D and
    D_v), page_size a multiple of 16; `k.transpose(1, 2)` of a pool (pages, page_size, kv_heads, D) is not copied either. Page `pages[b, j]` has the keys from
    j·page_size on of sequence b, whose `lengths[b]` (required) keys must lie in pages of the table and of the pool. Entries behind a sequence's last key are
    not read, nor pages that no entry names. A block of keys (64; 32 or 128 where that is faster or fits) is loaded by copies of gcd(block,
    page_size) keys: with pages of 64 a single one, with pages of 16 four.

    What `lengths`, `starts` and `pages` hold is checked with `debug` only, for the host has to wait for the device. Traced by torch.compile as the operator
    `tritonkittens::attention_decode`.
    """
    check_no_gradient("attention_decode", "use attention", q=q, k=k, v=v)
    if is_plain(q, k, v, lengths, starts, pages, out):
        return decode(q, k, v, lengths, starts, pages, causal, scale, softcap, return_lse, parts, out, debug)
    check_tensors("attention_decode", q=q, k=k, v=v)
    check_tensors("attention_decode", optional=True, lengths=lengths, starts=starts, pages=pages, out=out)
    return handed_out(call("attention_decode", q, k, v, lengths, starts, pages, causal, scale, softcap, parts), out, return_lse)


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, starts: torch.Tensor | None, pages: torch.Tensor | None, causal: bool,
    scale: float | None, softcap: float | None, return_lse: bool, parts: int | None, out: torch.Tensor | None = None, debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention_decode` of plain tensors; arguments as there."""
    if out is not None and (requires_grad(out) or overlaps(out, q, k, v, lengths, starts, pages)):
        check(q, k, v, out, paged=pages is not None)
        found = decode(q, k, v, lengths, starts, pages, causal, scale, softcap, True, parts, debug=debug)
        return handed_out(found, out, return_lse)
    if out is not None:
        announce_write(out)
    operands = (q, k, v, out, lengths, starts, pages)
    key, known = (None, None) if debug else _known_launch(operands, (causal, scale, softcap, return_lse, parts))
    if known is not None:
        return known(*operands)
    page_size, keys = _check(*operands, causal, parts)
    if debug:
        _check_held(lengths, starts, pages, page_size, keys, len(k))
    scores = scores_of(q, scale, softcap, *check_window(causal, None))
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    empty = q.numel() == 0 or keys == 0
    row_tiles, each = (1, group) if empty else row_tiles_of(group, q.shape[2])
    if empty or row_tiles * each > group:
        result = q.new_empty(*q.shape[:3], v.shape[3]) if out is None else out
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
        if empty:
            see_nothing(result, lse)
        else:  # all tiles get equally many heads
            wide = pad(q.unflatten(1, (kv_heads, group)), (0, 0, 0, 0, 0, row_tiles * each - group)).flatten(1, 2)
            found = decode(wide, k, v, lengths, starts, pages, causal, scale, softcap, True, parts)
            for home, x in zip((result, lse), found, strict=True):
                if home is not None:
                    home.unflatten(1, (kv_heads, group)).copy_(x.unflatten(1, (kv_heads, -1))[:, :, :group])
        return result if lse is None else (result, lse)
    launch = Launch(*operands, scores=scores, causal=causal, return_lse=return_lse, row_tiles=row_tiles, page_size=page_size, keys=keys, parts=parts)
    return (launch if key is None else remember(_launches, key, launch))(*operands)


class Launch:
    """What calls of one kind do: operands like those it was made for, which were checked. Called with `operands`, it returns the results."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, lengths: torch.Tensor | None, starts: torch.Tensor | None,
        pages: torch.Tensor | None, *, scores: Scores, causal: bool, return_lse: bool, row_tiles: int, page_size: int | None, keys: int, parts: int | None,
    ) -> None:  # fmt: skip
        (batch, heads, queries, dim), (kv_heads, value_dim) = q.shape, (v.shape[1], v.shape[3])
        tiles, rows = kv_heads * row_tiles, heads // kv_heads // row_tiles * queries
        features = (queries > 1 and causal or starts is not None, scores.softcap is not None, lengths is not None, starts is not None)
        kind = Kind(q.dtype, dim, value_dim, *features, page_size, row_tiles)
        multiprocessors = multiprocessor_count(q.get_device())
        whole = out is None or out.is_contiguous() and storable(out)
        if parts:
            deal = Deal(parts)
        else:
            deal = deal_of(batch * tiles, keys, multiprocessors, memory_bandwidth(q.device), rings_of(kind, whole))
        kernel = kernel_of(kind, deal, batch * tiles, multiprocessors, return_lse, whole)
        self.kernel, self.partial, self.numbers, self.return_lse = kernel, kernel.partial, dict(scores.numbers(False), queries=queries), return_lse
        self.bound: Callable[..., None] | None = None  # the kernel, and `combine`, for tensors of these kinds: known at the first call
        self.combine: Callable[..., None] | None = None
        self.packed, self.shape = (batch, tiles, rows, dim), (batch, tiles, deal.parts, rows)
        self.as_they_are = addressable(q.reshape(self.packed)) and addressable(k) and addressable(v)
        self.new_result = allocator((batch, heads, queries, value_dim), q.dtype, q.device)
        self.new_sums = allocator((batch, heads, queries), torch.float32, q.device)
        if self.partial:
            self.new_parts = allocator((*self.shape, value_dim), torch.float32, q.device), allocator(self.shape, torch.float32, q.device)
            self.grid = rows, tiles, batch
            self.constants = (deal.parts, rows, queries, value_dim, power_of_two(deal.parts), power_of_two(value_dim), return_lse)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, lengths: torch.Tensor | None, starts: torch.Tensor | None,
        pages: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        result, lse = self.new_result() if out is None else out, self.new_sums() if self.return_lse else None
        packed = q.reshape(self.packed)
        if not self.as_they_are:
            packed, k, v = as_addressable(packed), as_addressable(k), as_addressable(v)
        if self.partial:
            some, sums = (new() for new in self.new_parts)
        else:
            some, sums = result.view(*self.shape, result.shape[3]), None if lse is None else lse.view(self.shape)
        tensors = dict(Q=packed, K=k, V=v, O=some, L=sums, pages=pages)
        tensors |= {name: x.contiguous() for name, x in (("lengths", lengths), ("starts", starts)) if x is not None}
        in_order = [tensors[name] for name in self.kernel.tensors]
        if self.bound is None:
            self.bound = self.kernel.call(*in_order).bind(*in_order, **self.numbers)
        self.bound(*in_order)
        if self.partial:
            combined = (some, sums, result, sums if lse is None else lse)
            if self.combine is None:
                self.combine = combine.bind(self.grid, *combined, *result.stride(), *self.constants)
            self.combine(*combined)
        return result if lse is None else (result, lse)


_launches: dict[tuple[Any, ...], Launch] = {}


def _known_launch(operands: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, Launch | None]:
    """(what decides how a call is done, what is known of such calls); nothing where it cannot be told from others: no tensors, or fake ones."""
    try:
        given = [x is not None for x in operands]
        tensors = signature(*[x for x in operands if x is not None])
        key = (tensors, *given, options, *map(type, options))  # True is not 1
        return key, _launches.get(key)
    except (AttributeError, TypeError, RuntimeError):
        return None, None


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, lengths: torch.Tensor | None, starts: torch.Tensor | None,
    pages: torch.Tensor | None, causal: bool, parts: int | None,
) -> tuple[int | None, int]:  # fmt: skip
    """(keys of a page, of the longest sequence that there is room for). Raises TypeError or ValueError for operands that do not fit together."""
    check(q, k, v, out, paged=pages is not None)
    (batch, _, queries, _), keys = q.shape, k.shape[2]
    if queries > ROWS:
        raise ValueError(f"attention_decode: {queries} queries; they must be at most {ROWS}")
    for name, x in (("lengths", lengths), ("starts", starts)):
        if x is not None:
            check_small("attention_decode", name, x, q, torch.int32, (batch,), f"({batch},)")
    if starts is not None and not causal and queries > 1:
        raise ValueError(f"attention_decode: starts with causal=False and {queries} queries; it takes causal=True or one query")
    if parts is not None and not 1 <= parts <= MAX_PARTS:
        raise ValueError(f"attention_decode: parts={parts}; it must be from 1 to {MAX_PARTS}")
    if pages is None:
        return None, keys
    check_small("attention_decode", "pages", pages, q, torch.int32, (batch, None), f"({batch}, pages of the longest sequence)")
    _check_pages(keys, lengths)
    return keys, keys * pages.shape[1] if len(k) else 0


def _check_held(
    lengths: torch.Tensor | None, starts: torch.Tensor | None, pages: torch.Tensor | None, page_size: int | None, keys: int, pool: int,
) -> None:  # fmt: skip
    """Raise ValueError for lengths, first keys or pages that a cache of so many keys, or a pool of so many pages, does not have."""
    for name, x in (("lengths", lengths), ("starts", starts)):
        for b, value in enumerate([] if x is None else x.tolist()):
            if not 0 <= value <= keys:
                where = "the cache" if pages is None else "a row of pages"
                raise ValueError(f"attention_decode: {name}[{b}] is {value}; it must be from 0 to the {keys} keys of {where}")
    if pages is not None and lengths is not None and page_size is not None:
        for b, (row, length) in enumerate(zip(pages.tolist(), lengths.tolist(), strict=True)):
            for j, page in enumerate(row[: -(-length // page_size)]):
                if not 0 <= page < pool:
                    raise ValueError(f"attention_decode: pages[{b}, {j}] is {page}; the pool has {pool} pages")


def _check_pages(page_size: int, lengths: torch.Tensor | None) -> None:
    if lengths is None:
        raise ValueError("attention_decode: pages without lengths; they say how many keys of its pages a sequence has filled")
    if page_size == 0 or page_size % PAGE:
        raise ValueError(f"attention_decode: k and v have pages of {page_size} keys; these must be a multiple of {PAGE}")
