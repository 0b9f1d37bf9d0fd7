"""Checks of operands. Each raises TypeError or ValueError, which name the function that was called and the argument."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_written
from tritonkittens.kernels._tensors import HALF_TYPES, check_operands, check_small, check_tensor
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.device.backward import ROWS
from tritonkittens.kernels.attention.reference import LIMIT, sides

HEAD_DIMS = range(16, 257, 16)
HEAD_DIMS_FP8 = range(32, 257, 32)  # the depth of an 8-bit wgmma is 32
OUT_TYPES_FP8 = (torch.bfloat16, torch.float16, torch.float32)
MAX_ROWS = 1 << 29  # of all sequences of `attention_varlen`
MAX_SPLITS = 128  # of a decoded sequence
PAGE = 16  # keys: a page is a multiple of the smallest tile's rows


def check(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, paged: bool = False) -> None:
    """Check 16-bit operands and `out`. `paged`: k and v are pools of pages."""
    check_operands("attention", HALF_TYPES, 4, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    check_shapes(q, k, v, out, paged)


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, paged: bool = False, head_dims: range = HEAD_DIMS,
) -> None:  # fmt: skip
    """Check shapes alone."""
    (batch, heads, queries, dim), (kv_heads, value_dim) = q.shape, (k.shape[1], v.shape[3])
    if k.shape[:3] != v.shape[:3] or (k.shape[0] != batch and not paged) or k.shape[3] != dim:
        first, second = ("pages", "page_size") if paged else ("B", "S_kv")
        raise ValueError(
            f"attention: q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}; "
            f"they must be (B, H, S, D), ({first}, H_kv, {second}, D) and ({first}, H_kv, {second}, D_v)"
        )
    check_heads("attention", heads, kv_heads, dim, value_dim, head_dims)
    if out is not None and out.shape != (batch, heads, queries, value_dim):
        raise ValueError(f"attention: out is {tuple(out.shape)}; it must be {(batch, heads, queries, value_dim)}")
    if out is not None:
        check_written("attention", out)


def check_heads(name: str, heads: int, kv_heads: int, dim: int, value_dim: int, head_dims: range = HEAD_DIMS) -> None:
    """Check that query heads are a multiple of key heads, and that kernels exist for the dimensions."""
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{name}: {heads} query heads and {kv_heads} key heads; the first must be a multiple of the second"
        )
    for of, extent in (("", dim), (" of v", value_dim)):
        if extent not in head_dims:
            raise ValueError(
                f"{name}: head dimension{of} {extent}; it must be a multiple of {head_dims.step} up to 256"
            )


def check_config(name: str, config: object) -> None:
    """Check that `config` is None or a `Config`."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"{name}(config={config!r}): must be a Config")


def check_window(
    causal: bool, window: tuple[int | None, int | None] | None, name: str = "attention"
) -> tuple[int, int]:
    """(left, right) as in `Scores`."""
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal={causal!r}; it must be True or False")
    sides_are_numbers = window is None or (
        isinstance(window, (tuple, list))
        and len(window) == 2
        and all(x is None or isinstance(x, int) and 0 <= x <= LIMIT for x in window)
    )
    if not sides_are_numbers:
        raise ValueError(
            f"{name}: window={window!r}; it must be (left, right), numbers of keys from 0 on, or None for any number"
        )
    return sides(causal, window)


# ---------------------------------------------------------------- sequences of different lengths


def check_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor | None = None
) -> None:
    """Check the tensors of `attention_varlen`, but not what cu_seqlens hold."""
    name = "attention_varlen"
    check_operands(name, HALF_TYPES, 3, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    (queries, heads, dim), (keys, kv_heads), value_dim = q.shape, k.shape[:2], v.shape[2]
    if k.shape[:2] != v.shape[:2] or k.shape[2] != dim:
        raise ValueError(
            f"{name}: q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}; they must be (total_q, H, "
            "D), (total_k, H_kv, D) and "
            "(total_k, H_kv, D_v)"
        )
    check_heads(name, heads, kv_heads, dim, value_dim)
    for argument, rows in (("q", queries), ("k", keys)):
        if rows > MAX_ROWS:
            raise ValueError(f"{name}: {argument} has {rows} rows; they must be at most 2**29")
    for argument, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, argument, starts, (torch.int32,), "q", q)
        if starts.ndim != 1 or starts.shape[0] < 1:
            raise ValueError(
                f"{name}: {argument} has shape {tuple(starts.shape)}; it must be (B + 1,), where every sequence "
                "begins and the last one ends"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"{name}: cu_seqlens_q is {tuple(cu_seqlens_q.shape)}, cu_seqlens_k {tuple(cu_seqlens_k.shape)}; they "
            "must be of as many sequences"
        )
    if out is not None and out.shape != (queries, heads, value_dim):
        raise ValueError(f"{name}: out is {tuple(out.shape)}; it must be {(queries, heads, value_dim)}")
    if out is not None:
        check_written(name, out)


def check_seqlens(of: str, starts: list[int], rows: int, longest: int | None) -> None:
    """Check what cu_seqlens hold, for q or k (`of`) with so many rows and `max_seqlen` (None: not given)."""
    argument = f"attention_varlen: cu_seqlens_{of}"
    if starts[0] != 0:
        raise ValueError(f"{argument} begins with {starts[0]}; it must begin with 0")
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end < begin:
            raise ValueError(
                f"{argument} decreases from {begin} to {end} at element {number + 1}; where a sequence ends is not "
                "before it begins"
            )
        if longest is not None and end - begin > longest:
            raise ValueError(
                f"{argument}: sequence {number} has {end - begin} rows; max_seqlen_{of}={longest} must be no fewer"
            )
    if starts[-1] > rows:
        raise ValueError(f"{argument} ends with {starts[-1]}; {of} has {rows} rows")


def check_max_seqlen(argument: str, value: int | None) -> int | None:
    """The value itself."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(
            f"attention_varlen: {argument}={value!r}; it must be a number of rows, or None where it is not known"
        )
    return value


# ---------------------------------------------------------------- decoding


def check_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    pages: Tensor | None,
    causal: bool,
    num_splits: int | None,
) -> tuple[int | None, int]:
    """Check the operands of `attention_decode`. Returns (keys of a page, keys that a sequence may have)."""
    check(q, k, v, out, paged=pages is not None)
    (batch, _, queries, _), keys = q.shape, k.shape[2]
    if queries > ROWS:
        raise ValueError(f"attention_decode: {queries} queries; they must be at most {ROWS}")
    for name, x in (("lengths", lengths), ("starts", starts)):
        if x is not None:
            check_small("attention_decode", name, x, q, torch.int32, (batch,), f"({batch},)")
    if starts is not None and not causal and queries > 1:
        raise ValueError(
            f"attention_decode: starts with causal=False and {queries} queries; it takes causal=True or one query"
        )
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"attention_decode: num_splits={num_splits}; it must be from 1 to {MAX_SPLITS}")
    if pages is None:
        return None, keys
    check_small(
        "attention_decode", "pages", pages, q, torch.int32, (batch, None), f"({batch}, pages of the longest sequence)"
    )
    _check_pages(keys, lengths)
    return keys, keys * pages.shape[1] if len(k) else 0


def _check_pages(page_size: int, lengths: Tensor | None) -> None:
    if lengths is None:
        raise ValueError(
            "attention_decode: pages without lengths; they say how many keys of its pages a sequence has filled"
        )
    if page_size == 0 or page_size % PAGE:
        raise ValueError(
            f"attention_decode: k and v have pages of {page_size} keys; these must be a multiple of {PAGE}"
        )


def check_decode_values(
    lengths: Tensor | None, starts: Tensor | None, pages: Tensor | None, page_size: int | None, keys: int, pool: int,
) -> None:  # fmt: skip
    """Check what lengths, starts and pages hold, for a cache of so many keys, or a pool of so many pages."""
    for name, x in (("lengths", lengths), ("starts", starts)):
        for b, value in enumerate([] if x is None else x.tolist()):
            if not 0 <= value <= keys:
                where = "the cache" if pages is None else "a row of pages"
                raise ValueError(
                    f"attention_decode: {name}[{b}] is {value}; it must be from 0 to the {keys} keys of {where}"
                )
    if pages is not None and lengths is not None and page_size is not None:
        for b, (row, length) in enumerate(zip(pages.tolist(), lengths.tolist(), strict=True)):
            for j, page in enumerate(row[: -(-length // page_size)]):
                if not 0 <= page < pool:
                    raise ValueError(f"attention_decode: pages[{b}, {j}] is {page}; the pool has {pool} pages")


# ---------------------------------------------------------------- fp8


def check_fp8(
    q: Tensor, k: Tensor, v: Tensor, scales: dict[str, Tensor | None], out_dtype: torch.dtype, out: Tensor | None
) -> torch.dtype:
    """Check the tensors of `attention_fp8`. Returns the dtype of the result."""
    check_operands("attention_fp8", (torch.float8_e4m3fn,), 4, q=q, k=k, v=v)
    check_shapes(q, k, v, out, head_dims=HEAD_DIMS_FP8)
    if out is not None:
        check_operands("attention_fp8", OUT_TYPES_FP8, 4, out=out)
        out_dtype = out.dtype
    if out_dtype not in OUT_TYPES_FP8:
        raise TypeError(f"attention_fp8: out_dtype={out_dtype}; it must be one of {', '.join(map(str, OUT_TYPES_FP8))}")
    of_heads = (q.shape[0], k.shape[1])
    for name, x in scales.items():
        if x is not None:
            check_small("attention_fp8", name, x, q, torch.float32, of_heads, str(of_heads))
    return out_dtype


# ---------------------------------------------------------------- ranges


def check_ranges(q: Tensor, ranges: Tensor) -> None:
    """Check shape and dtype of `ranges`."""
    if ranges.shape != (q.shape[0], 1, q.shape[2], 2) or ranges.dtype != torch.int32:
        raise ValueError(
            f"attention_ranges: ranges is {tuple(ranges.shape)}, {ranges.dtype}; it must be "
            f"{(q.shape[0], 1, q.shape[2], 2)}, torch.int32"
        )
