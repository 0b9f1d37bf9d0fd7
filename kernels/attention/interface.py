"""The public functions of attention for PyTorch tensors: signatures, documentation, and which plan computes a call."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_gradient, check_tensors, has_tangent, is_plain
from tritonkittens.kernels.attention.autograd import (
    Results,
    Window,
    attend,
    attend_by_operator,
    attend_varlen,
    check_varlen_call,
)
from tritonkittens.kernels.attention.call_plan import find_plan, scores_of, write_results
from tritonkittens.kernels.attention.checks import check, check_config, check_window
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.decode_plan import run_decode
from tritonkittens.kernels.attention.fp8_plan import run_fp8
from tritonkittens.kernels.attention.reference import LIMIT


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Results:
    """softmax(Q Kᵀ · scale) V for every batch and head.

    Args:
        q, k, v: (batch, heads, queries, D), (batch, kv_heads, keys, D) and (batch, kv_heads, keys, D_v), bf16 or fp16.
            heads is a multiple of kv_heads; D and D_v are multiples of 16 up to 256. Views of other layouts, (batch,
            sequence, heads, D) say, need no copy where the last stride is 1 and the others are multiples of 16 bytes.
        causal: a query sees the keys up to its own. The last query's own key is the last key (bottom right alignment).
        window: (left, right), how many keys a query sees before and after its own; None for any number.
        scale: positive; None for 1/√D.
        softcap: scores become softcap · tanh(score / softcap).
        return_lse: also return the natural logarithm of each query's sum of exp(scale · score), after the soft-cap.
        deterministic: gradients have the same bits in every run, by 7 matrix products instead of 5. None: as
            `torch.use_deterministic_algorithms` says.
        out: receives the output: its shape, dtype and device, any strides.
        config: a `Config` of the forward kernel instead of the chosen one. It has no effect where torch traces the
            call.

    Returns (batch, heads, queries, D_v) of q's dtype; with `return_lse` also (batch, heads, queries) fp32. A query that
    sees no key has zeros, and −∞. Differentiable once, also through the log-sum-exp; torch's own operations compute
    forward-mode derivatives, in fp32. Traced as `tritonkittens::attention`. Raises TypeError or ValueError for operands
    that do not fit together.
    """
    check_config("attention", config)
    if not is_plain(q, k, v, out):
        return attend_by_operator(q, k, v, causal, window, scale, softcap, return_lse, deterministic, out)
    plan = find_plan(q, k, v, out, causal, window, scale, softcap)
    if plan.scores is None:
        check(q, k, v, out)
        plan.scores = scores_of(q, scale, softcap, *check_window(causal, window))
    return attend(q, k, v, plan, return_lse, deterministic, out, config)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    debug: bool = False,
) -> Results:
    """`attention` of B sequences that are packed end to end, as in FlashAttention's `flash_attn_varlen_func`.

    Args:
        q, k, v: (total_q, heads, D), (total_k, kv_heads, D) and (total_k, kv_heads, D_v), at most 2²⁹ rows; dtypes,
            dimensions and strides as for `attention`.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on the same device. Sequence b has the rows from element b up to
            element b + 1. They begin with 0, never decrease, and end with at most the number of rows.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; None: not known. They let a kernel for short sequences
            be chosen.
        debug: check what cu_seqlens hold, for which the host waits for the device.

    Other arguments and errors as for `attention`, in each sequence. Returns (total_q, heads, D_v); with `return_lse`
    also (heads, total_q) fp32. Rows after the last sequence have zeros, −∞, and gradients of zeros. NaN in one sequence
    does not reach another. Wrong cu_seqlens give undefined results, but no access outside the tensors. Differentiable
    like `attention`, but not in forward mode. Traced as `tritonkittens::attention_varlen`.
    """
    tensors, longest, plain = (
        (q, k, v, cu_seqlens_q, cu_seqlens_k),
        (max_seqlen_q, max_seqlen_k),
        is_plain(q, k, v, cu_seqlens_q, cu_seqlens_k, out),
    )
    check_varlen_call(tensors, out, longest, plain, debug)
    scores = scores_of(q, scale, softcap, *check_window(causal, window, "attention_varlen"), "attention_varlen")
    return attend_varlen(tensors, scores, longest, return_lse, deterministic, out, plain)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    out: Tensor | None = None,
    debug: bool = False,
) -> Results:
    """`attention` of few queries against a long cache of keys and values, as in generating token by token.

    Args:
        q: (batch, heads, queries, D), at most 64 queries.
        k, v: (batch, kv_heads, keys, D) and (…, D_v). With `pages`: pools (pages, kv_heads, page_size, D) and (…, D_v),
            page_size a multiple of 16; `pool.transpose(1, 2)` of (pages, page_size, kv_heads, D) needs no copy.
        lengths: (batch,) int32, the keys that each sequence has filled; None: all.
        starts: (batch,) int32, the first key that is seen, for padding on the left. The keys before it must be finite.
        pages: (batch, pages of the longest sequence) int32. Page `pages[b, j]` has the keys of sequence b from j ·
            page_size on. Entries after the last key are not read. Needs `lengths`.
        causal: the last query sees all keys.
        num_splits: tasks that read a sequence, up to 128; None: chosen.
        debug: check what lengths, starts and pages hold, for which the host waits for the device.

    Other arguments, results and errors as for `attention`. Not differentiable: raises ValueError for operands that
    require gradients, except under `torch.no_grad()`. Traced as `tritonkittens::attention_decode`. Sources:
    Flash-Decoding (Dao et al., 2023), PagedAttention (Kwon et al., 2023).
    """
    check_no_gradient("attention_decode", "use attention", q=q, k=k, v=v)
    if is_plain(q, k, v, lengths, starts, pages, out):
        return run_decode(q, k, v, lengths, starts, pages, causal, scale, softcap, return_lse, num_splits, out, debug)
    check_tensors("attention_decode", q=q, k=k, v=v)
    check_tensors("attention_decode", optional=True, lengths=lengths, starts=starts, pages=pages, out=out)
    return write_results(
        call("attention_decode", q, k, v, lengths, starts, pages, causal, scale, softcap, num_splits), out, return_lse
    )


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Results:
    """`attention` of e4m3 tensors, which stand for q · q_scale, k · k_scale and v · v_scale.

    Args:
        q, k, v: shapes as for `attention`, torch.float8_e4m3fn, D and D_v multiples of 32 up to 256. V is copied once,
            transposed.
        q_scale, k_scale, v_scale: (batch, kv_heads) fp32 on the same device, one for all query heads of a group; None
            for 1.
        out_dtype: of the output: bf16, fp16 or fp32. `out`, where given, decides.

    Other arguments, results and errors as for `attention`. Not differentiable. Traced as
    `tritonkittens::attention_fp8`. Source: FlashAttention-3 (Shah et al., 2024), section 3.3.
    """
    scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    check_config("attention_fp8", config)
    check_no_gradient("attention_fp8", "use attention of 16-bit operands", q=q, k=k, v=v, **scales)
    if is_plain(q, k, v, *scales.values(), out):
        return run_fp8(
            q, k, v, q_scale, k_scale, v_scale, causal, window, scale, softcap, return_lse, out_dtype, out, config
        )
    check_tensors("attention_fp8", q=q, k=k, v=v)
    check_tensors("attention_fp8", optional=True, **scales, out=out)
    check_window(causal, window, "attention_fp8")
    dtype = out_dtype if out is None else out.dtype
    found = call(
        "attention_fp8", q, k, v, q_scale, k_scale, v_scale, causal, *(window or (None, None)), scale, softcap, dtype
    )
    return write_results(found, out, return_lse)


def attention_ranges(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, *, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """`attention` in which every query sees a range of keys: padded batches, packed sequences, part-filled caches.

    Args:
        ranges: (batch, 1, queries, 2) int32. Query i of sequence b sees the keys from ranges[b, 0, i, 0] up to
            ranges[b, 0, i, 1] − 1. The host reads it: on the CPU that costs no synchronisation.

    Neighbouring queries run in one kernel where their ranges begin and end at the same keys, or each one key later. So
    causal and bidirectional attention, with and without a window, take one launch, and each of several packed sequences
    takes one.

    Other arguments, dtypes and gradients as for `attention`; no forward-mode derivative. A query with an empty range
    has zeros. Raises TypeError or ValueError for operands that do not fit together, and ValueError for ranges of
    another shape or dtype, and for one that ends before it begins or reaches beyond the keys.
    """
    if is_plain(q, k, v, ranges):
        check(q, k, v)
    else:  # the operator checks what a trace cannot
        check_tensors("attention_ranges", q=q, k=k, v=v, ranges=ranges)
        if has_tangent(q, k, v):
            raise ValueError("attention_ranges: it has no forward-mode derivative; use attention")
    scores = scores_of(q, scale, softcap, LIMIT, LIMIT, "attention_ranges")
    return call("attention_ranges", q, k, v, ranges, scores.scale, scores.softcap)[0]
