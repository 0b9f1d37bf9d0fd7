"""PyTorch's attention, and Hugging Face's models, on the shipped kernels.

`scaled_dot_product_attention` has PyTorch's signature. `use_attention` runs a model's calls of PyTorch's function
here. After `register_transformers`, Hugging Face's models take `attn_implementation="tritonkittens"`. `patch` runs the
other layers of such a model here.
"""

from tritonkittens.ops.attention import Unsupported, scaled_dot_product_attention, use_attention
from tritonkittens.ops.patching import Patch, patch
from tritonkittens.ops.register import register_transformers

__all__ = ["Patch", "Unsupported", "patch", "register_transformers", "scaled_dot_product_attention", "use_attention"]
