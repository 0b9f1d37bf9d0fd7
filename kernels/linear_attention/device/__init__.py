"""The kernels of linear attention."""
