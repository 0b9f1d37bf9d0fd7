"""Attention: `attention` for PyTorch tensors, `attention_varlen` for packed sequences, the reference `attention_torch`, and the templates behind them."""
import functools
from collections.abc import Callable
from typing import cast

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.backward import PARTS, ROWS
from tritonkittens.kernels.attention.config import Config, Shape, choose
from tritonkittens.kernels.attention.dealing import Kind, decode
from tritonkittens.kernels.attention.decode import AttentionDecode, AttentionDecodePaged
from tritonkittens.kernels.attention.decoding import attention_decode
from tritonkittens.kernels.attention.forward import AttentionForward
from tritonkittens.kernels.attention.fp8 import AttentionForwardFp8, attention_fp8, forward_fp8
from tritonkittens.kernels.attention.fused_backward import AttentionBackward
from tritonkittens.kernels.attention.gradients import backward, fused_backward
from tritonkittens.kernels.attention.operator import attention_operator
from tritonkittens.kernels.attention.product import attention, forward
from tritonkittens.kernels.attention.ranges import attention_ranges
from tritonkittens.kernels.attention.reference import attention_torch
from tritonkittens.kernels.attention.varlen import attention_varlen, packed_forward, varlen_operator
from tritonkittens.tune import Device


def _tensor(dim: int) -> torch.Tensor:
    return torch.empty(4, 16, 4096, dim, dtype=torch.bfloat16, device="meta")


def typical(make: Callable[..., tk.lcf], dim: int, causal: bool, shifted: bool = False, keys: int = 4096) -> tk.lcf:
    """The template of a forward kernel (`forward`, `packed_forward`, `forward_fp8`) for 64 sequences and heads of so many queries and keys on an H200;
    `shifted`: and some more keys."""
    shape = Shape(dim, dim, 1 if make is forward_fp8 else 2, keys, keys, 64, causal, False, False, make is packed_forward)
    return choose(make, (torch.bfloat16, dim, dim, causal, False, False, shifted, False), shape, Device.named("H200").multiprocessors)


def _forward(arch: str, dim: int, causal: bool, shifted: bool = False, keys: int = 4096) -> object:
    x = _tensor(dim)
    return typical(forward, dim, causal, shifted, keys).compile(x, x, x, x, scale=1.0, arch=arch)


def _forward_fp8(arch: str, dim: int, causal: bool) -> object:
    x, descales = _tensor(dim).to(torch.float8_e4m3fn), torch.empty(3, 4, 16, dtype=torch.float32, device="meta")
    template = typical(forward_fp8, dim, causal)
    return template.compile(x, x, x.transpose(2, 3).contiguous(), _tensor(dim), descales, scale=1.0, arch=arch)


def _decode(arch: str, dim: int = 128, sized: bool = False, at_once: int = 0, even: bool = False, single: bool = False) -> object:
    keys, counts = torch.empty(4, 8, 4096, dim, dtype=torch.bfloat16, device="meta"), (4, 8, 1 if at_once else 2, 4)
    parts, sums, lengths = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in (
        ((*counts, dim), torch.bfloat16 if at_once else torch.float32), (counts, torch.float32), ((4,), torch.int32)))  # fmt: skip
    template = decode(Kind(torch.bfloat16, dim, dim, lengths=sized), partial=at_once == 0, at_once=at_once, even=even, single=single)
    tensors = dict(lengths=lengths, Q=keys[:, :, :4], K=keys, V=keys, O=parts, L=sums)
    return template.compile(*[tensors[name] for name in template.tensors], scale=1.0, queries=1, arch=arch)


def _backward(arch: str, dim: int, causal: bool, part: int, parts: int = 1) -> object:
    """The single pass (part 0), which may have `parts` of groups, or the pass of dQ or of dK and dV (1, 2)."""
    x, sums = _tensor(dim), torch.empty(4, 16, 4096, dtype=torch.float32, device="meta")
    numbers = sums if part else torch.empty(4, 16, 4096 // ROWS, PARTS.value, ROWS, dtype=torch.bfloat16, device="meta")
    kind = (torch.bfloat16, dim, dim, causal, False, False)
    queries, keys = backward(*kind)
    template = cast(tk.lcf, (fused_backward(*kind, False, parts), queries, keys[0])[part])
    tensors = dict.fromkeys(template.tensors, x) | dict.fromkeys(("offsets", "deltas"), numbers)
    if part == 0:
        tensors |= {"sums": sums, "words": torch.empty(64, dtype=torch.int32, device="meta")}
    if parts > 1:
        tensors |= dict.fromkeys(("dK", "dV"), sums)
    return template.compile(*(tensors[name] for name in template.tensors), scale=1.0, gradient=1.0, arch=arch)


def _packed(arch: str, dim: int, causal: bool) -> object:
    x, entries = torch.empty(16, 4096, dim, dtype=torch.bfloat16, device="meta"), torch.empty(64, 6, dtype=torch.int32, device="meta")
    return typical(packed_forward, dim, causal, True).compile(x, x, x, x, entries, scale=1.0, arch=arch)


KERNELS: dict[str, Callable[..., object]] = {
    "": _forward,
    "shifted_": functools.partial(_forward, shifted=True),
    "fp8_": _forward_fp8,
    **{name: functools.partial(_backward, part=part) for part, name in enumerate(("backward_", "dq_", "dkdv_"))},
}
inspectable: dict[str, Callable[[str], object]] = {
    "attention_decode_d128": _decode,
    "attention_decode_lengths_d128": functools.partial(_decode, sized=True),
    "attention_decode_d64": functools.partial(_decode, dim=64),
    **{f"attention_decode_d64_{at_once}_at_once": functools.partial(_decode, dim=64, at_once=at_once) for at_once in (3, 4)},
    "attention_decode_d64_single": functools.partial(_decode, dim=64, at_once=3, single=True),
    "attention_decode_d64_even": functools.partial(_decode, dim=64, at_once=3, even=True, single=True),
    "attention_varlen_d128_causal": functools.partial(_packed, dim=128, causal=True),
    "attention_backward_d64_parts": functools.partial(_backward, dim=64, causal=False, part=0, parts=2),
    "attention_backward_d128_causal_parts": functools.partial(_backward, dim=128, causal=True, part=0, parts=2),
    "attention_d64_short": functools.partial(_forward, dim=64, causal=False, keys=512),
    "attention_d64_long_causal": functools.partial(_forward, dim=64, causal=True, keys=16384),
    **{f"attention_{name}d{dim}{'_causal' * causal}": functools.partial(compiled, dim=dim, causal=causal)
       for name, compiled in KERNELS.items()
       for dim in (64, 128) for causal in (False, True) if causal or name != "shifted_"},
}  # fmt: skip
