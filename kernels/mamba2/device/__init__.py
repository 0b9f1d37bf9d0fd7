"""The kernels of Mamba-2."""
