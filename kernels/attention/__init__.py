"""Attention: `attention` for PyTorch tensors, `attention_varlen` for packed sequences, the reference `attention_torch`, and the templates behind them."""
from tritonkittens.kernels.attention.autograd import attention_operator
from tritonkittens.kernels.attention.call_plan import forward
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.decoding import attention_decode
from tritonkittens.kernels.attention.device.decode import AttentionDecode, AttentionDecodePaged
from tritonkittens.kernels.attention.device.forward import AttentionForward
from tritonkittens.kernels.attention.device.fused_backward import AttentionBackward
from tritonkittens.kernels.attention.fp8 import AttentionForwardFp8, attention_fp8, forward_fp8
from tritonkittens.kernels.attention.interface import attention
from tritonkittens.kernels.attention.ranges import attention_ranges
from tritonkittens.kernels.attention.reference import attention_torch
from tritonkittens.kernels.attention.varlen import attention_varlen, packed_forward, varlen_operator

__all__ = [
    "AttentionBackward", "AttentionDecode", "AttentionDecodePaged", "AttentionForward", "AttentionForwardFp8",
    "Config", "attention", "attention_decode", "attention_fp8", "attention_operator", "attention_ranges",
    "attention_torch", "attention_varlen", "forward", "forward_fp8", "packed_forward", "varlen_operator",
]  # fmt: skip
