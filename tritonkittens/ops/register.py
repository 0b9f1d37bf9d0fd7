"""Registration of the shipped kernels as implementations of attention and experts of other libraries."""

from __future__ import annotations

import functools


def register_transformers(name: str = "tritonkittens", *, strict: bool = False) -> None:
    """Register `kernels.attention` and `kernels.experts` with Hugging Face transformers (5.17 or newer).

    Models then take `attn_implementation=name` and `experts_implementation=name`, at construction, at loading, in
    `model.set_attn_implementation(name)` and in `model.set_experts_implementation(name)`.

    Attention runs on the kernels, forward and backward, in bf16 and fp16 with head dimensions up to 256, for every mask
    in which a query sees one range of keys: causal, bidirectional, windows, chunks, blocks, padding, packed sequences
    (from `position_ids`). Soft-caps, GQA, `generate` with every cache and `torch.compile` work. The output at padding
    is undefined, as in transformers' other implementations.

    Everything else runs in PyTorch as with "sdpa", with one warning for every reason: dropout, `output_attentions`,
    masks of other patterns (4D masks, hidden keys between visible ones), attention sinks, position biases, other
    dtypes. Experts with a gate and no biases run on the kernels in bf16 and fp16, others as with "grouped_mm", without
    a warning.

    Args:
        name: the name of both implementations.
        strict: raise `tritonkittens.ops.Unsupported` (a ValueError) where attention would run PyTorch. A mask that
            torch.compile traces always raises for hidden keys between visible ones.

    Raises:
        TypeError: for a name that is no text.
        ValueError: for "eager", which models reserve.
        ImportError: without transformers.
    """
    if not isinstance(name, str):
        raise TypeError(f"register_transformers: name is {type(name).__name__}; it must be a str")
    if name in ("", "eager"):
        raise ValueError(f"register_transformers: name={name!r}; it must be a name of its own")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    from tritonkittens.ops.experts import experts_forward
    from tritonkittens.ops.transformers import attention_forward, attention_mask

    AttentionInterface.register(name, functools.partial(attention_forward, strict=strict))
    AttentionMaskInterface.register(name, functools.partial(attention_mask, strict=strict))
    ExpertsInterface.register(name, experts_forward)
