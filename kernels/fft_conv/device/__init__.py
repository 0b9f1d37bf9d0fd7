"""The kernels of FFT convolution."""
