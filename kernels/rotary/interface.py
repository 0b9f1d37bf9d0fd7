"""Rotary embedding for PyTorch tensors: `rotary`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritonkittens.kernels._dispatch import (
    call,
    check_no_gradient,
    check_tensors,
    check_written,
    has_tangent,
    is_compiling,
    is_plain,
    is_same_view,
    requires_grad,
)
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import check_rising
from tritonkittens.kernels.rotary.call_plan import Operands, Options, run_rotary
from tritonkittens.kernels.rotary.checks import check_operands, check_options, rotary_dim_of
from tritonkittens.kernels.rotary.operators import RotaryFunction, RotaryInplaceFunction, rotate_inplace


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    debug: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate pairs of columns of q and k by angles of their positions, in one kernel launch.

    A pair (x1, x2) becomes (x1·cos - x2·sin, x2·cos + x1·sin), in fp32, rounded once. Positional arguments are those of
    transformers' `apply_rotary_pos_emb`, the others those of flash-attn's `apply_rotary_emb`.

    Args:
        q, k: (B, H, S, D), (B, S, H, D) with unsqueeze_dim=2, or packed tokens (total, H, D), in bf16, fp16 or fp32.
            Heads may differ in number; k may be None. Any strides: they are read without a copy if the last is 1.
        cos, sin: bf16, fp16 or fp32, without gradients. (positions, rotary_dim/2), a table; or (B, S, rotary_dim/2) or
            (1, S, …), angles of each token. A second half that repeats the first, as in transformers, is not read.
        position_ids: int32 or int64 (B, S), (1, S) or (S,); of packed tokens (total,). None: token i of a sequence has
            position i. A position outside of the table gives NaN.
        seqlen_offsets: added to positions; an int, or int32 or int64 (sequences,). Excludes position_ids.
        cu_seqlens: int32 or int64 (sequences + 1,): where packed sequences begin, from 0, and the end of the last.
            Positions start at 0 in each. Tokens after the last end continue the last sequence.
        rotary_dim: the first columns, which rotate; the others are copied. None: twice the columns of cos, or as
            many if that is more than D.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J). By default columns i and i + rotary_dim/2 (GPT-NeoX).
        inplace: write into q and k, and return them.
        q_weight, k_weight: (D,), bf16, fp16 or fp32, of one dtype: heads are normalised first, to x / √(mean of x² +
            eps) · weight, as by q_norm and k_norm of Qwen3. The norm is not rounded.
        eps: of the norm.
        debug: check what cu_seqlens holds, for which the host waits for the device.

    Returns q and k, or q alone where k is None, without gaps in memory, with the operand's order of dimensions. The
    backward rotates by the opposite angles, and without norms is differentiable. Gradients of weights are
    deterministic.

    Raises TypeError for other dtypes, an option of another type, or a DTensor; ValueError for shapes that do not fit,
    cos or sin that require a gradient, a forward-mode tangent, or an `inplace` that would lose values that a gradient
    needs or write to elements twice.

    Example::

        q, k = rotary(q, k, cos, sin, position_ids)
    """
    check_options(unsqueeze_dim, seqlen_offsets, eps)
    offsets = seqlen_offsets if isinstance(seqlen_offsets, Tensor) else None
    check_tensors("rotary", q=q, cos=cos, sin=sin)
    check_tensors("rotary", optional=True, k=k, position_ids=position_ids, cu_seqlens=cu_seqlens)
    check_tensors("rotary", optional=True, q_weight=q_weight, k_weight=k_weight)
    if is_distributed(type(q)):
        raise TypeError("rotary: q is a DTensor; rotate its shard, q.to_local()")
    if has_tangent(q, k, q_weight, k_weight):
        raise ValueError("rotary: it has no forward-mode derivative; use torch's operations")
    check_no_gradient("rotary", "detach its operands", cos=cos, sin=sin)
    if q.ndim == 0 or cos.ndim == 0:
        raise ValueError(f"rotary: q has shape {tuple(q.shape)}, cos {tuple(cos.shape)}; they have no columns")
    rotary_dim = rotary_dim_of(q, cos, rotary_dim)
    if cos.shape[-1] == rotary_dim:
        cos, sin = cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2]
    if offsets is None and seqlen_offsets != 0:
        cos, sin = _shifted(seqlen_offsets, q, cos, sin, unsqueeze_dim, position_ids, cu_seqlens)
    operands = Operands(q, k, cos, sin, position_ids, offsets, cu_seqlens, q_weight, k_weight)
    options = Options(unsqueeze_dim, rotary_dim, interleaved, False, eps)
    if debug:
        check_operands(operands, options)
        check_rising("rotary", "cu_seqlens", cu_seqlens, q.shape[0])
    found = _inplace(operands, options) if inplace else _called(operands, options)
    return found[0] if k is None else found


def _shifted(
    offset: int, q: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, ids: Tensor | None, cu: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The table from a position on, as many rows of it as there are tokens where each has its own."""
    if ids is not None or cos.ndim != 2:
        raise ValueError("rotary: seqlen_offsets with position_ids, or with angles of each token; give positions once")
    count = 0 if cu is not None else q.shape[0] if q.ndim == 3 else q.shape[3 - unsqueeze_dim]
    if offset < 0 or offset + count > cos.shape[0]:
        needed = f" and {count} tokens need {offset + count} positions" if count and offset >= 0 else ""
        raise ValueError(
            f"rotary: seqlen_offsets={offset}{needed or '; it must be in the table'}; cos has {cos.shape[0]}"
        )
    last = None if cu is not None else offset + count
    return cos[offset:last], sin[offset:last]


def _called(operands: Operands, options: Options) -> Any:
    if not is_plain(*operands):
        check_operands(operands, options)
        q, k = call("rotary", *operands, *options)
        return [q] if operands.k is None else (q, k)
    if requires_grad(*operands.heads, *operands[-2:]):
        found = RotaryFunction.apply(*operands, *options)
        return [found] if operands.k is None else found
    return tuple(run_rotary(operands, options))


def _inplace(operands: Operands, options: Options) -> Any:
    given = operands.heads
    if operands.q_weight is not None and requires_grad(*given, *operands[-2:]):
        raise ValueError(
            "rotary: inplace with weights and gradients; the backward of the norm needs q and k as they were"
        )
    for argument, x in zip("qk", given, strict=False):
        if x.is_leaf and requires_grad(x):
            raise ValueError(f"rotary: {argument} is a leaf that requires a gradient; it cannot be written in place")
        if not is_compiling():
            check_written("rotary", x, argument)
    if not is_plain(*operands):
        if is_compiling() and not requires_grad(*given):
            check_operands(operands, options)
            call("rotary_inplace", *operands, *options)
        else:
            for x, y in zip(given, _called(operands, options), strict=True):
                x.copy_(y)
    elif requires_grad(*given):
        return tuple(RotaryInplaceFunction.apply(x, None, *operands[2:], *options) for x in given)
    elif len(given) == 2 and is_same_view(*given):
        raise ValueError("rotary: inplace with q and k the same memory; one launch cannot rotate it twice")
    else:
        rotate_inplace(operands, options)
    return tuple(given)
