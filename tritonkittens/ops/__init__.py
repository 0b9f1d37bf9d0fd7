"""PyTorch's own signatures on the shipped kernels: `scaled_dot_product_attention`, and `use_attention`, under which a model's calls of it run here."""

from tritonkittens.ops.attention import scaled_dot_product_attention, use_attention

__all__ = ["scaled_dot_product_attention", "use_attention"]
