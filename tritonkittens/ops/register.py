"""The shipped kernels as an implementation of attention that other libraries choose by name."""
from __future__ import annotations

import functools


def register_transformers(name: str = "tritonkittens", *, strict: bool = False) -> None:
    """Registers `kernels.attention` with Hugging Face transformers, from 5.17 on: models then take it as `attn_implementation=name`, when they are made, when
    they are loaded, and in `model.set_attn_implementation(name)`.

    Done by the kernels, forward and backward, in bf16 and fp16 with head dimensions up to 256: every mask in which a query sees a range of keys, so causal and
    bidirectional attention, sliding windows, chunks, blocks, padding on the left and on the right, several sequences in a row (told by `position_ids`);
    soft-caps, groups of heads, `generate` with every cache, `torch.compile`. Of transformers' own mask functions no mask of queries × keys is built; others are
    evaluated. What a position of padding gets is not defined, as with transformers' other implementations.

    Everything else runs in PyTorch, as for `attn_implementation="sdpa"`, with a warning, once for every reason: dropout, `output_attentions`, masks of other
    patterns (4D masks, hidden keys between visible ones), attention sinks, position biases, other dtypes. With `strict` it raises
    `tritonkittens.ops.Unsupported`, a ValueError, instead. Hidden keys between visible ones raise in a mask that torch.compile traces.

    Raises TypeError for a name that is no text, ValueError for "eager", by which models mean their own, and ImportError without transformers.
    """
    if not isinstance(name, str):
        raise TypeError(f"register_transformers: name is {type(name).__name__}; it must be a str")
    if name in ("", "eager"):
        raise ValueError(f"register_transformers: name={name!r}; it must be a name of its own")
    from transformers import AttentionInterface, AttentionMaskInterface

    from tritonkittens.ops.transformers import attention_forward, attention_mask

    AttentionInterface.register(name, functools.partial(attention_forward, strict=strict))
    AttentionMaskInterface.register(name, functools.partial(attention_mask, strict=strict))
