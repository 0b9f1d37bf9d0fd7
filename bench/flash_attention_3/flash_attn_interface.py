"""`flash_attn_func` of FlashAttention-3 on the library that `bench/flash_attention_3/build.py` makes, under the name and with the shapes of the module that
upstream's own build installs: bf16 (B, S, H, D), D 64 or 128, causal (equal lengths) or not, with gradients. A peer to measure against, not checked further.
"""
from __future__ import annotations

import ctypes
import functools
import pathlib

import torch

ADDRESS, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
KEYS = 128  # of a block of the backward


class Sizes(ctypes.Structure):
    _fields_ = [*((name, INT) for name in ("batch", "queries", "keys", "heads", "key_heads", "dim", "causal", "multiprocessors", "rounded_queries",
                                           "rounded_keys")), ("scale", FLOAT)]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(pathlib.Path(__file__).with_name("libflash_attention_3.so")))
    found.forward.argtypes = [ctypes.POINTER(Sizes), *[ADDRESS] * 5]
    found.backward.argtypes = [ctypes.POINTER(Sizes), *[ADDRESS] * 4]
    return found


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def sizes(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Sizes:
    batch, queries, heads, dim = q.shape
    block = 128 if dim == 64 else 64 if causal else 80  # queries of a block of the backward, which writes whole ones
    rounded = (-(-queries // block) * block, -(-k.shape[1] // KEYS) * KEYS)
    return Sizes(batch, queries, k.shape[1], heads, k.shape[2], dim, causal, multiprocessors(q.device.index), *rounded, dim**-0.5)


def arrays(tensors: tuple[torch.Tensor, ...]) -> tuple[ctypes.Array, ctypes.Array]:
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    return (ADDRESS * len(tensors))(*(x.data_ptr() for x in tensors)), (ctypes.c_int64 * len(strides))(*strides)


def checked(status: int) -> None:
    if status:
        raise RuntimeError(f"FlashAttention-3: CUDA error {status}")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, log_sum_exp = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        drawn = torch.empty(1, dtype=torch.int32, device=q.device)
        stream = torch.cuda.current_stream().cuda_stream
        checked(library().forward(sizes(q, k, causal), *arrays((q, k, v, out)), log_sum_exp.data_ptr(), drawn.data_ptr(), stream))
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, log_sum_exp = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        (batch, _, heads, dim), key_heads, of = q.shape, k.shape[2], sizes(q, k, ctx.causal)
        rows, columns = of.rounded_queries, of.rounded_keys
        sums, base_two = torch.empty(2, batch, heads, rows, dtype=torch.float32, device=q.device)
        dq = torch.empty(batch, heads, rows, dim, dtype=torch.float32, device=q.device)
        shared = (None, None) if heads == key_heads else torch.zeros(2, batch, key_heads, columns, dim, dtype=torch.float32, device=q.device).unbind()
        semaphores = torch.empty(batch * heads * rows // 64, dtype=torch.int32, device=q.device)
        memory = (log_sum_exp, sums, base_two, dq, *shared, semaphores)
        buffers = (ADDRESS * len(memory))(*(0 if x is None else x.data_ptr() for x in memory))
        tensors = arrays((q, k, v, out, grad, *grads))
        checked(library().backward(of, *tensors, buffers, torch.cuda.current_stream().cuda_stream))
        return *grads, None


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    return _Attention.apply(q, k, v, causal)
