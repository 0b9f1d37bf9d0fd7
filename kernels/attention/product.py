"""`attention` for PyTorch tensors: checks, the choice of a kernel, the launch."""
from __future__ import annotations

import functools
import math

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import HALF_TYPES, as_addressable, check_operands, storable
from tritonkittens.kernels.attention.config import Config, choose
from tritonkittens.kernels.attention.forward import AttentionForward
from tritonkittens.kernels.attention.reference import LIMIT, sides
from tritonkittens.launch import multiprocessor_count

HEAD_DIMS = range(16, 257, 16)
TILE = 128  # queries


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
    Raises ValueError or TypeError for operands that do not fit together.
    """
    check_operands("attention", HALF_TYPES, 4, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    _check_shapes(q, k, v, out)
    left, right = _check_window(causal, window)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"attention: scale={scale}; it must be positive")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"attention: softcap={softcap}; it must be positive")
    (batch, heads, queries, dim), (keys, value_dim) = q.shape, v.shape[2:]
    shape = (batch, heads, queries, value_dim)
    result = out if out is not None else torch.empty_like(q) if value_dim == dim else q.new_empty(shape)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    if result.numel() and keys:
        only_causal = right == 0 and left >= queries + keys
        windowed = not only_causal and (left < queries + keys or right < queries + keys)
        tasks = batch * heads * -(-queries // TILE)
        config = config or choose(dim, value_dim, tasks, multiprocessor_count(q.get_device()))
        kernel = forward(q.dtype, dim, value_dim, only_causal, windowed, softcap is not None, return_lse, config)
        factor = math.log2(math.e)
        args = {"scale": factor * (scale if softcap is None else softcap)}
        args |= {"left": left, "right": right} if windowed else {}
        args |= {"squash": 2 * factor * scale / softcap} if softcap is not None else {}
        home = result if storable(result) else torch.empty(shape, dtype=q.dtype, device=q.device)
        kernel(as_addressable(q), as_addressable(k), as_addressable(v), home, *(() if lse is None else (lse,)), **args)
        if home is not result:
            result.copy_(home)
    else:
        result.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    return result if lse is None else (result, lse)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> None:
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


def _check_window(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    if not isinstance(causal, bool):
        raise TypeError(f"attention: causal={causal!r}; it must be True or False")
    sides_are_numbers = window is None or (
        isinstance(window, (tuple, list)) and len(window) == 2 and all(x is None or isinstance(x, int) and 0 <= x <= LIMIT for x in window))
    if not sides_are_numbers:
        raise ValueError(f"attention: window={window!r}; it must be (left, right), numbers of keys from 0 on, or None for any number")
    return sides(causal, window)
