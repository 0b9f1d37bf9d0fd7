"""The kernels of attention for `python -m tritonkittens inspect`, by the calls that launch them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.interface import attention, attention_decode, attention_fp8, attention_varlen

Kind = dict[str, Any]  # arguments of a function of this module
E4M3 = torch.float8_e4m3fn


def _operands(
    dim: int,
    value_dim: int | None = None,
    batch: int = 4,
    heads: int = 16,
    kv_heads: int | None = None,
    queries: int = 4096,
    keys: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised Q, K and V."""
    keys, kv_heads = keys or queries, kv_heads or heads
    shapes = (batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim or dim)
    q, k, v = (torch.empty(shape, dtype=dtype, device="cpu", **grad) for shape in shapes)
    return q, k, v


def _forward(
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    lse: bool = False,
    config: Config | None = None,
    **kind: Any,
) -> Any:
    return attention(*_operands(**kind), causal=causal, window=window, softcap=softcap, return_lse=lse, config=config)


def _fp8(causal: bool = False, lse: bool = False, out_dtype: torch.dtype = torch.bfloat16, **kind: Any) -> Any:
    return attention_fp8(*_operands(dtype=E4M3, **kind), causal=causal, return_lse=lse, out_dtype=out_dtype)


def _backward(
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    grad_lse: bool = False,
    **kind: Any,
) -> Any:
    operands = _operands(requires_grad=True, **kind)
    results: Any = attention(
        *operands, causal=causal, window=window, softcap=softcap, deterministic=deterministic, return_lse=True
    )
    wanted = results if grad_lse else results[:1]
    return torch.autograd.grad(wanted, operands, [torch.empty_like(x) for x in wanted])


def _rows(
    dim: int,
    value_dim: int | None = None,
    batch: int = 4,
    heads: int = 16,
    kv_heads: int | None = None,
    queries: int = 4096,
    keys: int | None = None,
    **grad: bool,
) -> tuple[list[Tensor], dict[str, Any]]:
    """(q, k, v, cu_seqlens_q, cu_seqlens_k of a batch of sequences of one length, and max_seqlen arguments)."""
    keys, kv_heads = keys or queries, kv_heads or heads
    shapes = (batch * queries, heads, dim), (batch * keys, kv_heads, dim), (batch * keys, kv_heads, value_dim or dim)
    starts = torch.empty(batch + 1, dtype=torch.int32, device="cpu")
    rows = [torch.empty(shape, dtype=torch.bfloat16, device="cpu", **grad) for shape in shapes]
    return [*rows, starts, starts if keys == queries else starts.clone()], dict(max_seqlen_q=queries, max_seqlen_k=keys)


def _varlen(
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    lse: bool = False,
    **kind: Any,
) -> Any:
    operands, longest = _rows(**kind)
    return attention_varlen(*operands, causal=causal, window=window, softcap=softcap, return_lse=lse, **longest)


def _varlen_backward(causal: bool = False, deterministic: bool = False, **kind: Any) -> Any:
    operands, longest = _rows(requires_grad=True, **kind)
    out: Any = attention_varlen(*operands, causal=causal, deterministic=deterministic, **longest)
    return torch.autograd.grad(out, operands[:3], torch.empty_like(out))


def _decode(
    dim: int,
    batch: int,
    keys: int,
    queries: int = 1,
    lengths: bool = False,
    starts: bool = False,
    page_size: int | None = None,
    **options: Any,
) -> Any:
    """`attention_decode` of a batch of sequences of one length, with eight key heads of four query heads each."""
    pool = (batch, 8, keys) if page_size is None else (batch * keys // page_size, 8, page_size)
    q, k, v = (
        torch.empty(*shape, dim, dtype=torch.bfloat16, device="cpu") for shape in ((batch, 32, queries), pool, pool)
    )
    numbers = torch.empty(batch, dtype=torch.int32, device="cpu")
    pages = None if page_size is None else torch.empty(batch, keys // page_size, dtype=torch.int32, device="cpu")
    given: Kind = dict(
        lengths=numbers if lengths or page_size else None, starts=numbers if starts else None, pages=pages
    )
    return attention_decode(q, k, v, **given, **dict(return_lse=True) | options)


FORWARD: dict[str, Kind] = {
    "d64_short": dict(dim=64, batch=64, queries=256),
    "d32_short": dict(dim=32, batch=64, queries=256),
    "d64_long_turns": dict(dim=64, batch=64, queries=256, config=Config(long_turns=True)),
    "d64_few": dict(dim=64, batch=1, heads=1, queries=8192),
    "d64_few_causal": dict(dim=64, batch=1, heads=1, queries=8192, causal=True),
    "d64_many": dict(dim=64, heads=128, queries=1024),
    "d64_long_causal": dict(dim=64, queries=16384, causal=True),
    "d96": dict(dim=96),
    "d128_fp16": dict(dim=128, dtype=torch.float16),
    "d128_few": dict(dim=128, batch=1, heads=4, queries=1024),
    "d128_causal_one_wave": dict(dim=128, batch=1, heads=4, queries=1024, causal=True),
    "d128_window_softcap_lse": dict(dim=128, window=(512, 0), softcap=30.0, lse=True),
    "d128_cols_176": dict(dim=128, config=Config(tile_n=176, epilogue_n=64)),
    "d192_d128": dict(dim=192, value_dim=128),
    "d256_causal": dict(dim=256, causal=True),
}
FP8: dict[str, Kind] = {
    "d128_long_causal_fp16_result": dict(dim=128, queries=16384, causal=True, out_dtype=torch.float16),
    "d256": dict(dim=256),
}
DECODE: dict[str, Kind] = {
    "d64_3_at_once": dict(dim=64, batch=68, keys=128),
    "d64_4_at_once": dict(dim=64, batch=128, keys=128),
    "d64_single": dict(dim=64, batch=36, keys=1024),
    "d64_even": dict(dim=64, batch=34, keys=3000),
    "d64_paged_16": dict(dim=64, batch=64, keys=4096, page_size=16),
    "d128_cluster_4": dict(dim=128, batch=2, keys=512, return_lse=False),
    "d128_lengths_drawn": dict(dim=128, batch=34, keys=128, lengths=True),
    "d128_starts": dict(dim=128, batch=34, keys=128, lengths=True, starts=True),
    "d128_4_queries_lengths_softcap": dict(dim=128, batch=34, keys=128, queries=4, lengths=True, softcap=30.0),
    "d128_many_rows": dict(dim=128, batch=8, keys=128, queries=64),
    "d128_paged_16": dict(dim=128, batch=34, keys=4096, page_size=16),
    "d128_paged_128": dict(dim=128, batch=34, keys=4096, page_size=128),
    "d256": dict(dim=256, batch=34, keys=4096),
}
VARLEN: dict[str, Kind] = {
    "d64_lse": dict(dim=64, lse=True),
    "d128_causal": dict(dim=128, causal=True, keys=4160),
    "d128_window_softcap": dict(dim=128, window=(512, 0), softcap=30.0),
}
FEW: Kind = dict(batch=2, queries=1024)
SPLITS: Kind = dict(dim=64, batch=64, keys=4096, num_splits=2)
TWO_PASSES: Kind = dict(queries=1024, deterministic=True)
WINDOW: Kind = dict(window=(512, 0), softcap=30.0)


def _calls() -> Iterator[tuple[Callable[..., Any], Kind, tuple[str | None, ...]]]:
    """(function, arguments, names of its launches); None for a launch that another call names."""
    for dim, causal in itertools.product((64, 128), (False, True)):
        name, kind = f"d{dim}{'_causal' * causal}", dict(dim=dim, causal=causal)
        yield _forward, kind, (name,)
        yield _fp8, kind, ("fp8_values" if name == "d128" else None, f"fp8_{name}")
        yield _backward, kind | FEW, (None, None, f"backward_{name}", None)
        yield _backward, kind | TWO_PASSES, (None, None, f"dq_{name}", f"dkdv_{name}")
    for dim in (64, 128):
        of_sums = "backward_preprocess" if dim == 128 else None
        yield _forward, dict(dim=dim, causal=True, keys=4160), (f"shifted_d{dim}_causal",)
        yield _backward, dict(dim=dim), (f"d{dim}_lse", of_sums, None, f"backward_postprocess_d{dim}")
    yield from ((_forward, kind, (name,)) for name, kind in FORWARD.items())
    yield from ((_fp8, kind, (None, f"fp8_{name}")) for name, kind in FP8.items())
    yield from ((_decode, kind, (f"decode_{name}",)) for name, kind in DECODE.items())
    yield _decode, SPLITS, ("decode_d64", None)
    yield _decode, SPLITS | dict(dim=128), ("decode_d128", "decode_combine")
    yield (
        _decode,
        SPLITS | dict(dim=128, lengths=True, return_lse=False),
        ("decode_lengths_d128", "decode_combine_without_lse"),
    )
    yield from ((_varlen, kind, (None, f"varlen_{name}")) for name, kind in VARLEN.items())
    yield from _backwards()


def _backwards() -> Iterator[tuple[Callable[..., Any], Kind, tuple[str | None, ...]]]:
    """More backwards, as `_calls` lists them: other features, parts of a group, sequences of different lengths."""
    yield _backward, dict(dim=96, queries=1024), (None, None, "backward_d96", None)
    yield _backward, dict(dim=128, **WINDOW), (None, None, "backward_d128_window_softcap", None)
    yield (
        _backward,
        dict(dim=64, queries=1000, grad_lse=True),
        (None, "backward_preprocess_lse", "backward_d64_cut", None),
    )
    yield (
        _backward,
        dict(dim=64, batch=1, heads=8, kv_heads=4, queries=2048),
        (None, None, "backward_d64_parts", None),
    )
    yield (
        _backward,
        dict(dim=128, batch=1, kv_heads=4, causal=True),
        (None, None, "backward_d128_causal_parts", "backward_postprocess_parts"),
    )
    yield (
        _backward,
        dict(dim=64, **WINDOW, **TWO_PASSES),
        (None, "dq_preprocess", "dq_d64_window_softcap", "dkdv_d64_window_softcap"),
    )
    yield (_backward, dict(dim=256, causal=True, **TWO_PASSES), (None, None, "dq_d256_causal", "dkdv_d256_causal"))
    yield (
        _backward,
        dict(dim=192, **WINDOW, **TWO_PASSES),
        (None, None, "dq_d192_window_softcap", "dkdv_d192_window_softcap"),
    )
    yield _backward, dict(dim=256, batch=1, kv_heads=4, queries=512), (None, None, None, None, "backward_sum_parts")
    for name, kind in dict(d64=dict(dim=64), d128_causal=dict(dim=128, causal=True)).items():
        names = (
            f"varlen_{of}_{name}"
            for of in ("tiles_of_queries", "tiles_of_keys", "preprocess", "backward", "postprocess")
        )
        yield _varlen_backward, dict(queries=1024, **kind), (None, None, *names)
    for dim, of_numbers in ((128, "varlen_dq_preprocess"), (256, None)):
        kernels = (f"varlen_{of}_d{dim}_causal" for of in ("dq", "dkdv"))
        in_two_passes = (None, None, None, of_numbers, *itertools.chain(*((None, name) for name in kernels)))
        yield _varlen_backward, dict(dim=dim, causal=True, **TWO_PASSES), in_two_passes
    yield (
        _backward,
        dict(dim=128, batch=2, heads=8, kv_heads=1, queries=700),
        (None, None, None, None, "backward_sum_parts"),
    )
    in_parts = (None, None, None, None, None, "varlen_backward_d128_parts", None, "varlen_postprocess_parts", None)
    yield _varlen_backward, dict(dim=128, kv_heads=2, **FEW), in_parts


inspectable: dict[str, Inspectable] = {
    name: kernel
    for call, kind, names in _calls()
    for name, kernel in launches_of(
        functools.partial(call, **kind), *(name and f"attention_{name}" for name in names)
    ).items()
} | launches_of(
    functools.partial(_backward, dim=192, value_dim=128), None, None, "attention_backward_d192_d128", gpu="B200"
)
