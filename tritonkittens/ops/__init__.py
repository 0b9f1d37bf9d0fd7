"""PyTorch's and Hugging Face's attention on the shipped kernels.

`scaled_dot_product_attention` has PyTorch's signature. `use_attention` runs a model's calls of PyTorch's function
here. After `register_transformers`, Hugging Face's models take `attn_implementation="tritonkittens"`.
"""

from tritonkittens.ops.attention import Unsupported, scaled_dot_product_attention, use_attention
from tritonkittens.ops.register import register_transformers

__all__ = ["Unsupported", "register_transformers", "scaled_dot_product_attention", "use_attention"]
