"""`attention` for PyTorch tensors: checks, the choice of a kernel, the launch."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import HALF_TYPES, as_addressable, check_operands, padded_empty, storable
from tritonkittens.kernels.attention.backward import ROWS, AttentionBackwardKeys, AttentionBackwardQueries, statistics
from tritonkittens.kernels.attention.config import Config, choose, choose_backward, fitting
from tritonkittens.kernels.attention.decode import AttentionDecode, combine
from tritonkittens.kernels.attention.forward import AttentionForward
from tritonkittens.kernels.attention.reference import LIMIT, sides
from tritonkittens.launch import multiprocessor_count

HEAD_DIMS = range(16, 257, 16)
TILE = 128  # queries
MAX_PARTS = 128  # of a sequence in decoding


@dataclass(frozen=True)
class Scores:
    """What becomes of scores before the softmax: their factor, the soft-cap, how many keys to each side a query sees (`LIMIT`: any number)."""

    scale: float
    softcap: float | None
    left: int
    right: int

    def features(self, queries: int, keys: int) -> tuple[bool, bool, bool]:
        """(causal, window, soft-cap) as constants of a kernel for these lengths."""
        open_left, open_right = (side >= queries + keys for side in (self.left, self.right))
        causal = open_left and self.right == 0
        return causal, not (causal or (open_left and open_right)), self.softcap is not None

    def numbers(self, window: bool) -> dict[str, Any]:
        """The run-time numbers of a kernel."""
        factor = math.log2(math.e)
        numbers: dict[str, Any] = {"scale": factor * (self.scale if self.softcap is None else self.softcap)}
        if window:
            numbers |= {"left": self.left, "right": self.right}
        if self.softcap is not None:
            numbers["squash"] = 2 * factor * self.scale / self.softcap
        return numbers


@functools.lru_cache
def forward(dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, lse: bool, config: Config) -> AttentionForward:
    """The forward kernel for types, dimensions and features."""
    return AttentionForward(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, window=window, softcap=softcap, lse=lse,
                            **config.knobs(causal))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, return_lse: bool = False, out: torch.Tensor | None = None, config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(Q Kᵀ · scale) V for every batch and head.

    q: (batch, heads, queries, D); k: (batch, kv_heads, keys, D), v: (batch, kv_heads, keys, D_v), heads a multiple of kv_heads; bf16 or fp16; D and D_v
    multiples of 16 up to 256. Any strides whose last is 1 run without a copy if they are multiples of 16 bytes (so also permuted (batch, sequence, heads, D)
    tensors and parts of packed ones).

    - `causal`: a query sees the keys up to its own, the last query's being the last (the bottom right corner is aligned);
    - `window` (left, right): it sees so many keys before and behind its own; None for any number. With `causal` none behind;
    - `scale`, positive, 1/√D by default; `softcap`: scores become softcap · tanh(score / softcap);
    - `return_lse`: also the logarithm of each query's sum of exponentials, (batch, heads, queries) in fp32.

    Returns a tensor (batch, heads, queries, D_v) of q's dtype, `out` where given. A query that sees no key gets zeros, and −∞ as log-sum-exp.
    Differentiable in q, k and v, also through the log-sum-exp, with the same bits in every run; traced by torch.compile as the operator
    `tritonkittens::attention`. Raises ValueError or TypeError for operands that do not fit together.
    """
    traced = torch.compiler.is_compiling()
    if not traced:  # the operator checks what a trace cannot
        check(q, k, v, out)
    left, right = _check_window(causal, window)
    scores = _scores(q, scale, softcap, left, right)
    if traced or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        result, lse = torch.ops.tritonkittens.attention(q, k, v, scores.scale, softcap, left, right)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    result = out if out is not None else torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    run_forward(q, k, v, result, lse, scores, config)
    return result if lse is None else (result, lse)


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scores: Scores, config: Config | None = None,
) -> None:  # fmt: skip
    """Write the output and, where given, the log-sum-exp of operands that were checked."""
    (batch, heads, queries, dim), (keys, value_dim) = q.shape, v.shape[2:]
    if out.numel() == 0 or keys == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return
    causal, window, softcap = scores.features(queries, keys)
    make = functools.partial(forward, q.dtype, dim, value_dim, causal, window, softcap, lse is not None)
    tasks = batch * heads * -(-queries // TILE)
    kernel = make(config) if config else choose(make, dim, value_dim, tasks, multiprocessor_count(q.get_device()))
    home = out if storable(out) else torch.empty(out.shape, dtype=q.dtype, device=q.device)
    kernel(as_addressable(q), as_addressable(k), as_addressable(v), home, *(() if lse is None else (lse,)), **scores.numbers(window))
    if home is not out:
        out.copy_(home)


@functools.lru_cache
def backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool,
) -> tuple[tk.lcf, tuple[tk.lcf, ...]]:  # fmt: skip
    """The backward kernels for types, dimensions and features: (that of dQ, those of dK and dV)."""
    knobs: dict[str, Any] = dict(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, window=window, softcap=softcap)
    order = tk.LongestFirst() if causal else tk.ColumnMajor()
    return choose_backward(
        lambda consumers: AttentionBackwardQueries(consumers=consumers, order=order, **knobs),
        lambda consumers, of_keys, of_values: AttentionBackwardKeys(consumers=consumers, order=order, of_keys=of_keys, of_values=of_values, **knobs),
        head_dim, value_dim)  # fmt: skip


def run_backward(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dQ, dK, dV) of what `run_forward` wrote, for gradients of the output and, where given, of the log-sum-exp."""
    (batch, heads, queries, dim), (keys, value_dim) = q.shape, v.shape[2:]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if out.numel() == 0 or keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    offsets, deltas = (padded_empty((batch, heads, queries), q, torch.float32) for _ in range(2))
    no_grad = lse if grad_lse is None else grad_lse
    statistics[-(-queries // ROWS), heads, batch](*(tk.gl(x).plain() for x in (out, grad, lse, no_grad, offsets, deltas)), value_dim, tk.from_torch(q.dtype),
                                                  grad_lse is not None)
    causal, window, softcap = scores.features(queries, keys)
    of_queries, of_keys = backward(q.dtype, dim, value_dim, causal, window, softcap)
    q, k, v, grad = (as_addressable(x) for x in (q, k, v, grad))
    numbers = {**scores.numbers(window), "gradient": scores.scale}
    of_queries(q, grad, k, v, offsets, deltas, dq, **numbers)
    tensors = dict(Q=q, dO=grad, offsets=offsets, deltas=deltas, K=k, V=v, dK=dk, dV=dv)
    for kernel in of_keys:
        kernel(*(tensors[name] for name in kernel.tensors), **numbers)
    return dq, dk, dv


@functools.lru_cache
def decode(dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, softcap: bool) -> AttentionDecode:
    """The decode kernel for types, dimensions and features."""
    knobs: dict[str, Any] = dict(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, softcap=softcap)
    return cast(AttentionDecode, fitting(lambda cols: AttentionDecode(cols=cols, **knobs), (128, 64, 32)))


def parts_of(tasks: int, blocks: int, slots: int) -> int:
    """In how many parts to deal out sequences of so many blocks: what takes the fewest rounds of blocks, a task's start and end counted as two of them."""
    def rounds(parts: int) -> int:
        return -(-tasks * parts // slots) * (-(-blocks // parts) + 2)

    return min(range(1, max(1, min(blocks, MAX_PARTS)) + 1), key=rounds)


def attention_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: torch.Tensor | None = None, causal: bool = True, scale: float | None = None,
    softcap: float | None = None, return_lse: bool = False, parts: int | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention` of few queries against long keys and values, as in writing token by token; not differentiable.

    q: (batch, heads, queries, D), with queries times the heads of a group at most 64; k, v: (batch, kv_heads, keys, D and D_v), a cache of which sequence b
    has filled the first `lengths[b]` keys (int32, on the same device; all where not given; at most `keys`, which is not checked). With `causal` the last query
    sees all of them. `parts`: tasks that a sequence is dealt to, chosen where not given. Everything else, results and errors as for `attention`.
    """
    check(q, k, v, out)
    (batch, heads, queries, dim), (kv_heads, keys, value_dim) = q.shape, v.shape[1:]
    rows = heads // kv_heads * queries
    if rows > ROWS:
        raise ValueError(f"attention_decode: {queries} queries of {heads // kv_heads} heads a group are {rows} rows; they must be at most {ROWS}")
    if lengths is not None and (lengths.shape != (batch,) or lengths.dtype != torch.int32 or lengths.device != q.device):
        raise ValueError(f"attention_decode: lengths is {tuple(lengths.shape)}, {lengths.dtype}, on {lengths.device}; it must be ({batch},), torch.int32, on "
                         f"{q.device}")
    if parts is not None and not 1 <= parts <= MAX_PARTS:
        raise ValueError(f"attention_decode: parts={parts}; it must be from 1 to {MAX_PARTS}")
    left, right = _check_window(causal, None)
    scores = _scores(q, scale, softcap, left, right)
    result = out if out is not None else q.new_empty(batch, heads, queries, value_dim)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    if result.numel() == 0 or keys == 0:
        run_forward(q, k, v, result, lse, scores)
        return result if lse is None else (result, lse)
    kernel = decode(q.dtype, dim, value_dim, causal and queries > 1, softcap is not None)
    parts = parts or parts_of(batch * kv_heads, -(-keys // kernel.cols), multiprocessor_count(q.get_device()))
    packed = as_addressable(q.reshape(batch, kv_heads, rows, dim))
    some = torch.empty(batch, kv_heads, parts, rows, value_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(some.shape[:4], dtype=torch.float32, device=q.device)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=q.device) if lengths is None else lengths
    kernel(packed, as_addressable(k), as_addressable(v), lengths, some, sums, **scores.numbers(False), queries=queries)
    combine[rows, kv_heads, batch](some, sums, result, sums if lse is None else lse, *result.stride(), parts, rows, queries, value_dim,
                                   triton.next_power_of_2(parts), triton.next_power_of_2(value_dim), lse is not None)
    return result if lse is None else (result, lse)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Raise TypeError or ValueError, which name the argument, for tensors that do not fit together."""
    check_operands("attention", HALF_TYPES, 4, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    (batch, heads, queries, dim), (kv_heads, value_dim) = q.shape, (k.shape[1], v.shape[3])
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != dim:
        raise ValueError(f"attention: q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}; "
                         "they must be (B, H, S, D), (B, H_kv, S_kv, D) and (B, H_kv, S_kv, D_v)")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads and {kv_heads} key heads; the first must be a multiple of the second")
    for name, extent in (("", dim), (" of v", value_dim)):
        if extent not in HEAD_DIMS:
            raise ValueError(f"attention: head dimension{name} {extent}; it must be a multiple of 16 up to 256")
    if out is not None and out.shape != (batch, heads, queries, value_dim):
        raise ValueError(f"attention: out is {tuple(out.shape)}; it must be {(batch, heads, queries, value_dim)}")


def _scores(q: torch.Tensor, scale: float | None, softcap: float | None, left: int, right: int, name: str = "attention") -> Scores:
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"{name}: scale={scale}; it must be positive")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap={softcap}; it must be positive")
    return Scores(scale, softcap, left, right)


def _check_window(causal: bool, window: tuple[int | None, int | None] | None, name: str = "attention") -> tuple[int, int]:
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal={causal!r}; it must be True or False")
    sides_are_numbers = window is None or (
        isinstance(window, (tuple, list)) and len(window) == 2 and all(x is None or isinstance(x, int) and 0 <= x <= LIMIT for x in window))
    if not sides_are_numbers:
        raise ValueError(f"{name}: window={window!r}; it must be (left, right), numbers of keys from 0 on, or None for any number")
    return sides(causal, window)
