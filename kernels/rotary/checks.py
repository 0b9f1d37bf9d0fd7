"""What `rotary` refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._tensors import check_eps, check_tensor
from tritonkittens.kernels.rotary.config import INPUTS, INTEGERS, LARGEST_DIM


def _check_dtype(argument: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = INPUTS) -> None:
    if x.dtype not in dtypes:
        raise TypeError(f"rotary: {argument} has dtype {x.dtype}; it must be {' or '.join(map(str, dtypes))}")


def _check_shape(argument: str, x: Tensor, shapes: tuple[tuple[int, ...], ...], wanted: str) -> None:
    if tuple(x.shape) not in shapes:
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"rotary: {argument} has shape {tuple(x.shape)}; it must be {allowed}, {wanted}")


def rotary_dim_of(q: Tensor, cos: Tensor, rotary_dim: int | None) -> int:
    """Return the columns that rotate: given, or twice those of cos, or as many where twice as many are too many."""
    dim, columns = q.shape[-1], cos.shape[-1]
    if rotary_dim is None:
        rotary_dim = 2 * columns if 2 * columns <= dim else columns
    if not 2 <= rotary_dim <= dim or rotary_dim % 2:
        raise ValueError(f"rotary: rotary_dim={rotary_dim}; it must be even, and at most {dim}, the dimension of q")
    if columns not in (rotary_dim // 2, rotary_dim):
        raise ValueError(
            f"rotary: cos has shape {tuple(cos.shape)}; its last dimension must be {rotary_dim // 2} or {rotary_dim}, "
            f"for rotary_dim={rotary_dim}"
        )
    return rotary_dim


def check_options(unsqueeze_dim: int, seqlen_offsets: int | Tensor, eps: float) -> None:
    """Raise TypeError or ValueError for an option that does not exist."""
    check_eps("rotary", eps)
    if not isinstance(seqlen_offsets, (int, torch.SymInt, Tensor)) or isinstance(seqlen_offsets, bool):
        raise TypeError(
            f"rotary: seqlen_offsets is {type(seqlen_offsets).__name__}; it must be an int, or a tensor (sequences,)"
        )
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"rotary: unsqueeze_dim={unsqueeze_dim!r}; it must be 1, (B, H, S, D), or 2, (B, S, H, D)")


def check_operands(operands: Any, options: Any) -> None:
    """Raise TypeError or ValueError for operands that do not fit q. They are `call_plan`'s."""
    q, k, cos, sin = operands[:4]
    for argument, x in operands._asdict().items():
        if x is not None:
            _check_dtype(
                argument, x, INTEGERS if argument in ("position_ids", "seqlen_offsets", "cu_seqlens") else INPUTS
            )
            if x.device != q.device:
                raise ValueError(
                    f"rotary: {argument} is on {x.device}, q on {q.device}; all tensors must be on one device"
                )
    if q.ndim not in (3, 4):
        raise ValueError(f"rotary: q has shape {tuple(q.shape)}; it must have 4 dimensions, or 3 for packed tokens")
    if not 2 <= q.shape[-1] <= LARGEST_DIM:
        raise ValueError(
            f"rotary: q has shape {tuple(q.shape)}; its last dimension must have 2 to {LARGEST_DIM} elements"
        )
    heads = options.unsqueeze_dim if q.ndim == 4 else 1
    if k is not None:
        count = k.shape[heads] if k.ndim == q.ndim else 1
        hint = _hint(q, options, q.shape[1]) if k.shape[:2] == q.shape[:2] else ""
        wanted = f"that of q, but for the heads{hint}"
        _check_shape("k", k, ((*q.shape[:heads], count, *q.shape[heads + 1 :]),), wanted)
        if k.dtype != q.dtype:
            raise TypeError(f"rotary: k has dtype {k.dtype}, q {q.dtype}; they must be equal")
    batch, length = (q.shape[0], q.shape[3 - heads]) if q.ndim == 4 else (1, q.shape[0])
    _check_table(operands, options, batch, length)
    _check_positions(operands, options, batch, length)
    _check_weights(operands)


def _hint(q: Tensor, options: Any, tokens: int) -> str:
    """What to try where q may have its tokens before its heads, and at most `tokens` of them."""
    swapped = q.ndim == 4 and options.unsqueeze_dim == 1 and q.shape[1] <= tokens
    return "; q of (B, S, H, D) needs unsqueeze_dim=2" if swapped else ""


def _check_weights(operands: Any) -> None:
    given = {name: getattr(operands, name) for name in ("q_weight", "k_weight")}
    for (argument, weight), x in zip(given.items(), (operands.q, operands.k), strict=True):
        if weight is not None and x is not None:
            _check_shape(argument, weight, ((x.shape[-1],),), "a number for each column of a head")
    first, second = given.values()
    if (first is None) != (second is None) and not (second is None and operands.k is None):
        raise ValueError("rotary: q_weight or k_weight alone; norms are of both q and k")
    if first is not None and second is not None and first.dtype != second.dtype:
        raise TypeError(f"rotary: k_weight has dtype {second.dtype}, q_weight {first.dtype}; they must be equal")


def _check_table(operands: Any, options: Any, batch: int, length: int) -> None:
    """Raise for cos and sin that do not fit."""
    cos, sin = operands.cos, operands.sin
    _check_shape("sin", sin, (tuple(cos.shape),), "that of cos")
    if cos.dtype != sin.dtype:
        raise TypeError(f"rotary: sin has dtype {sin.dtype}, cos {cos.dtype}; they must be equal")
    placed = any(t is not None for t in operands[4:7])
    columns = options.rotary_dim // 2
    if cos.ndim == 3 and operands.q.ndim == 4 and not placed:
        wanted = f"angles of each token{_hint(operands.q, options, cos.shape[1])}"
        _check_shape("cos", cos, tuple((b, length, columns) for b in (batch, 1)), wanted)
    elif cos.ndim != 2:
        raise ValueError(
            f"rotary: cos has shape {tuple(cos.shape)}; it must have 2 dimensions, a row for each position, or 3 "
            "with a row for each token of q of 4 dimensions, without position_ids, seqlen_offsets and cu_seqlens"
        )
    elif not placed and cos.shape[0] < length:
        raise ValueError(
            f"rotary: cos has {cos.shape[0]} positions; q has {length} tokens{_hint(operands.q, options, cos.shape[0])}"
        )


def _check_positions(operands: Any, options: Any, batch: int, length: int) -> None:
    packed = operands.q.ndim == 3
    ids, offsets, cu = operands[4:7]
    if ids is not None:
        if offsets is not None or cu is not None:
            raise ValueError("rotary: position_ids with seqlen_offsets or cu_seqlens; positions come from one of them")
        wanted = f"a position for each token{_hint(operands.q, options, ids.shape[-1] if ids.ndim else 0)}"
        _check_shape("position_ids", ids, ((batch, length), (1, length), (length,)), wanted)
    if cu is not None:
        if not packed:
            raise ValueError("rotary: cu_seqlens with q of 4 dimensions; packed tokens are (total, H, D)")
        if cu.ndim != 1 or len(cu) < 2:
            raise ValueError(
                f"rotary: cu_seqlens has shape {tuple(cu.shape)}; it must be (sequences + 1,), with a sequence at least"
            )
        batch = len(cu) - 1
    if offsets is not None:
        _check_shape("seqlen_offsets", offsets, ((batch,),), "an offset for each sequence")


def check_reachable(q: Tensor) -> None:
    """Raise ValueError for a tensor that no kernel reaches."""
    check_tensor("rotary", "q", q, INPUTS, "q", q)
