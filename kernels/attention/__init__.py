"""Attention for PyTorch tensors: public functions, the reference `attention_torch`, operators and kernels."""

from tritonkittens.kernels.attention.autograd import attention_operator, varlen_operator
from tritonkittens.kernels.attention.call_plan import forward
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.device.decode import AttentionDecode, AttentionDecodePaged
from tritonkittens.kernels.attention.device.forward import AttentionForward
from tritonkittens.kernels.attention.device.fp8 import AttentionForwardFp8
from tritonkittens.kernels.attention.device.fused_backward import AttentionBackward
from tritonkittens.kernels.attention.fp8_plan import forward_fp8
from tritonkittens.kernels.attention.interface import (
    attention,
    attention_decode,
    attention_fp8,
    attention_ranges,
    attention_varlen,
)
from tritonkittens.kernels.attention.reference import attention_torch
from tritonkittens.kernels.attention.varlen_plan import forward_varlen

__all__ = [
    "AttentionBackward", "AttentionDecode", "AttentionDecodePaged", "AttentionForward", "AttentionForwardFp8",
    "Config", "attention", "attention_decode", "attention_fp8", "attention_operator", "attention_ranges",
    "attention_torch", "attention_varlen", "forward", "forward_fp8", "forward_varlen", "varlen_operator",
]  # fmt: skip
