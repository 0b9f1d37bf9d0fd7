"""FFT convolutions: `fft_conv` and `fft_conv_filter` for PyTorch tensors, and the reference `fft_conv_torch`."""

from tritonkittens.kernels.fft_conv.interface import fft_conv, fft_conv_filter
from tritonkittens.kernels.fft_conv.operators import fft_conv_filter_gradient_operator, fft_conv_operator
from tritonkittens.kernels.fft_conv.reference import fft_conv_torch

__all__ = ["fft_conv", "fft_conv_filter", "fft_conv_filter_gradient_operator", "fft_conv_operator", "fft_conv_torch"]
