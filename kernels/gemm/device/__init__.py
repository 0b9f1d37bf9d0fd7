"""The kernels of `gemm`, and the epilogue that they share."""
