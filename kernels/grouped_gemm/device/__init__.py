"""The kernels of grouped matrix products."""
