"""The kernel families, installed as `tritonkittens.kernels`: one file or folder each, with its launcher and torch
reference beside it."""
