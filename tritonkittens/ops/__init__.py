"""PyTorch's own signatures on the shipped kernels: `scaled_dot_product_attention`; `use_attention`, under which a model's calls of it run here; and
`register_transformers`, after which Hugging Face's models take `attn_implementation="tritonkittens"`."""

from tritonkittens.ops.attention import Unsupported, scaled_dot_product_attention, use_attention
from tritonkittens.ops.register import register_transformers

__all__ = ["Unsupported", "register_transformers", "scaled_dot_product_attention", "use_attention"]
