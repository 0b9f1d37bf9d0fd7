"""Attention for PyTorch tensors: `attention`, and `attend` for calls that are known already."""
from __future__ import annotations

import torch

from tritonkittens.kernels._dispatch import (
    announce_write,
    call,
    check_tensors,
    is_compiling,
    is_forward_mode,
    is_plain,
    overlaps_within,
    reaches,
    requires_grad,
)
from tritonkittens.kernels.attention.autograd import AttentionFunction
from tritonkittens.kernels.attention.call_plan import CallPlan, check, check_window, computed, handed_out, known_call, run_forward, scores_of
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.reference import attention_torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, return_lse: bool = False, deterministic: bool | None = None, out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(Q Kᵀ · scale) V for every batch and head.

    q: (batch, heads, queries, D); k: (batch, kv_heads, keys, D), v: (batch, kv_heads, keys, D_v), heads a multiple of kv_heads; bf16 or fp16; D and D_v
    multiples of 16 up to 256. Any strides whose last is 1 run without a copy if they are multiples of 16 bytes (so also permuted (batch, sequence, heads, D)
    tensors and parts of packed ones).

    - `causal`: a query sees the keys up to its own, the last query's being the last (the bottom right corner is aligned);
    - `window` (left, right): it sees so many keys before and behind its own; None for any number. With `causal` none behind;
    - `scale`, positive, 1/√D by default; `softcap`: scores become softcap · tanh(score / softcap);
    - `deterministic`: gradients have the same bits in every run, which takes 7 products instead of 5 (as few keys do anyway, see `config.worth_sums`); where
      not given, as torch says (`torch.use_deterministic_algorithms`);
    - `return_lse`: also the logarithm of each query's sum of exponentials, (batch, heads, queries) in fp32.

    Returns a tensor (batch, heads, queries, D_v) of q's dtype, `out` where given. A query that sees no key gets zeros, and −∞ as log-sum-exp.
    Differentiable once in q, k and v, also through the log-sum-exp (a second derivative by backward raises NotImplementedError); under forward-mode
    differentiation torch's own operations compute it, in fp32 and with all scores in memory. torch.compile, make_fx and vmap see the operator
    `tritonkittens::attention`. Raises ValueError or TypeError for operands that do not fit together.
    """
    if not is_plain(q, k, v, out):
        return _dispatched(q, k, v, causal, window, scale, softcap, return_lse, deterministic, out)
    known = known_call(q, k, v, out, causal, window, scale, softcap)
    if known.scores is None:
        check(q, k, v, out)
        known.scores = scores_of(q, scale, softcap, *check_window(causal, window))
    return attend(q, k, v, known, return_lse, deterministic, out, config)


def _dispatched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: tuple[int | None, int | None] | None, scale: float | None, softcap: float | None,
    return_lse: bool, deterministic: bool | None, out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention` of operands that torch has to see: by the operator, which torch traces and batches, or with tangents by torch's own operations."""
    check_tensors("attention", q=q, k=k, v=v)
    check_tensors("attention", optional=True, out=out)
    scores = scores_of(q, scale, softcap, *check_window(causal, window))
    if is_forward_mode():
        if not is_compiling():
            check(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            found = attention_torch(q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, dtype=torch.float32)
        return handed_out((found[0].to(q.dtype), found[1]), out, return_lse)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    found = call("attention", q, k, v, scores.scale, scores.softcap, scores.left, scores.right, deterministic)
    return handed_out(found, out, return_lse)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, known: CallPlan, return_lse: bool = False, deterministic: bool | None = None,
    out: torch.Tensor | None = None, config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention` of a call that is `known`: its operands are plain and fit together, and what becomes of scores is said."""
    scores = known.checked_scores
    if requires_grad(q, k, v):
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        of_new_result = known if out is None else CallPlan(scores)  # launches are bound to the strides of `out`
        return handed_out(AttentionFunction.apply(of_new_result, q, k, v, deterministic), out, return_lse)
    if out is not None:
        known.reaches = known.reaches or reaches(out, q, k, v)
        if requires_grad(out) or overlaps_within(known.reaches, out, q, k, v):
            return handed_out(computed(q, k, v, CallPlan(scores), config), out, return_lse)
        announce_write(out)
    result = out if out is not None else known.new_result(q, v)
    lse = known.new_lse(q) if return_lse else None
    run_forward(q, k, v, result, lse, scores, config, known if config is None else None)
    return result if lse is None else (result, lse)
