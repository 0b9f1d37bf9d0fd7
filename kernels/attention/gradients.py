"""The gradients of `attention` for PyTorch tensors: by how many passes, where what waits between the kernels lies, the launches."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import as_addressable, padded_empty, power_of_two
from tritonkittens.kernels.attention.backward import PARTS, ROWS, AttentionBackwardKeys, AttentionBackwardQueries, statistics
from tritonkittens.kernels.attention.config import choose_backward, choose_fused, deal, parts_of_group, units_ahead, worth_following, worth_sums
from tritonkittens.kernels.attention.fused_backward import AttentionBackward, gather_sums
from tritonkittens.kernels.attention.gathering_backward import GatheringBackward
from tritonkittens.kernels.attention.product import TILE, Scores, empty_like
from tritonkittens.launch import l2_bytes, multiprocessor_count

SMALLEST_SCALE = 2.0**-64  # of scores: what is added to them is divided by it


def summand_factor(numbers: dict[str, Any]) -> float:
    """What log-sum-exps are multiplied by to be added to scores, for a kernel with these numbers; 0 where too little of those would be left."""
    return 1 / numbers["scale"] if numbers["scale"] >= SMALLEST_SCALE else 0.0


@functools.lru_cache
def backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool,
) -> tuple[tk.lcf, tuple[tk.lcf, ...]]:  # fmt: skip
    """The kernels of the deterministic backward for types, dimensions and features: (that of dQ, those of dK and dV)."""
    knobs: dict[str, Any] = dict(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, window=window, softcap=softcap,
                                 **deal(causal))
    return choose_backward(
        lambda consumers: AttentionBackwardQueries(consumers=consumers, **knobs),
        lambda consumers, of_keys, of_values: AttentionBackwardKeys(consumers=consumers, of_keys=of_keys, of_values=of_values, **knobs),
        head_dim, value_dim)  # fmt: skip


@functools.lru_cache
def fused_backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, cut: bool, parts: int = 1,
    gathers: bool = False, more: tuple[tuple[str, Any], ...] = (),
) -> AttentionBackward | None:  # fmt: skip
    """The kernel of the backward in a single pass for types, dimensions and features, where there is one; `cut`: may the last keys be no full tile?
    `parts`: of a group's query heads; `gathers`: shall it make dQ of its sums? `more`: knobs that are not as they are by default."""
    kernel = GatheringBackward if gathers else AttentionBackward
    knobs: dict[str, Any] = dict(dtype=tk.from_torch(dtype), causal=causal, window=window, softcap=softcap, cut=cut, parts=parts,
                                 turns=parts == 1 and not (causal or window), order=deal(causal)["order"], **dict(more))
    return cast("AttentionBackward | None",
                choose_fused(lambda dim, cols, summed: kernel(head_dim=dim, value_dim=dim, cols=cols, summed=summed, **knobs), head_dim, value_dim))


def run_backward(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scores: Scores,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dQ, dK, dV) of what `run_forward` wrote, for gradients of the output and, where given, of the log-sum-exp. Where not `deterministic`, dQ, and dK and dV
    of groups, may be summed up in an order that changes from run to run."""
    (batch, heads, queries, dim), (kv_heads, keys, value_dim) = q.shape, v.shape[1:]
    gradients = dq, dk, dv = tuple(empty_like(x, x.shape[3]) for x in (q, k, v))
    if out.numel() == 0 or keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    features = scores.features(queries, keys)
    numbers = {**scores.numbers(features[1]), "gradient": scores.scale}
    tensors = dict(Q=as_addressable(q), K=as_addressable(k), V=as_addressable(v), dO=as_addressable(grad), dQ=dq)
    kind = (q.dtype, dim, value_dim, *features)
    single = (*kind, keys % (AttentionBackward.rows * AttentionBackward.consumers) != 0)
    factor = 0.0 if deterministic or not worth_sums(dim, keys, features[0]) else summand_factor(numbers)
    fused = fused_backward(*single) if factor else None
    if fused is not None:
        _single_pass(fused, single, tensors, gradients, functools.partial(_statistics, out, tensors["dO"], lse, grad_lse, factor=factor), numbers)
        return gradients
    group = 1 if deterministic else heads // kv_heads  # sums of parts depend on how many there are: bits would change with the batch
    homes = homes_of(dk, dv, group, -(-keys // TILE) * batch * kv_heads)
    tensors |= homes | _statistics(out, tensors["dO"], lse, grad_lse)
    of_queries, of_keys = backward(*kind)
    for kernel in (of_queries, *of_keys):
        kernel(*(tensors[name] for name in kernel.tensors), **numbers)
    sum_groups(homes, dk, dv)
    return gradients


def _single_pass(
    fused: AttentionBackward, kind: tuple[Any, ...], tensors: dict[str, torch.Tensor], gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    statistics_with: Callable[..., dict[str, torch.Tensor]], numbers: dict[str, Any],
) -> None:  # fmt: skip
    """Write the gradients by `fused`, the kernel of this `kind` (see `fused_backward`), or one like it, and those before and behind it, from operands that TMA
    can address."""
    (dq, dk, dv), q = gradients, tensors["Q"]
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, dk.shape[1:3]
    device, summed = q.get_device(), fused.summed
    tiles, blocks, group = -(-keys // (fused.rows * fused.consumers)), -(-queries // fused.cols), heads // kv_heads
    parts = parts_for(device, group, tk.pairs(tiles, batch * kv_heads), True, group * bytes_at_once(fused, q, tiles)) if fused.causal else (
        parts_for(device, group, tiles * batch * kv_heads))
    units, lag, heads_of_unit = batch * kv_heads * parts, units_ahead(tiles, multiprocessor_count(device), fused.causal), group // parts
    gathers = units > lag and worth_following(fused.head_dim, keys, fused.causal or fused.window)
    if parts > 1 or gathers:
        fused = cast(AttentionBackward, fused_backward(*kind, parts, gathers))
    sums = torch.empty(batch, heads, blocks, fused.block_numbers, dtype=torch.float32, device=q.device)
    words = torch.empty(batch, heads, blocks, fused.consumers, dtype=torch.int32, device=q.device)
    counts = torch.empty(units, dtype=torch.int32, device=q.device) if gathers else words[:0]
    of_keys = (dk, dv)
    if parts > 1:
        of_keys = torch.zeros(2, batch, kv_heads, fused.consumers * tiles, fused.rows * summed, dtype=torch.float32, device=q.device).unbind()
    tensors = tensors | dict(sums=sums, words=words, counts=counts, dK=of_keys[0], dV=of_keys[1])
    tensors |= statistics_with(addends=addends_in(dq), zeros=(words, counts))
    numbers = {**numbers, "lag": lag} if gathers else numbers
    fused(*(tensors[name] for name in fused.tensors), **numbers)
    left, scale = (lag if gathers else units) * heads_of_unit, numbers["gradient"]
    across = -(-summed // 64)
    gather_sums[across * blocks * fused.cols // ROWS, left](sums, words, dq, *dq.stride()[:3], scale, queries, heads, batch * heads, summed, dim, True)
    if parts > 1:
        for home, x, times in ((dk, of_keys[0], scale), (dv, of_keys[1], 1.0)):
            gather_sums[across * x.shape[2], batch * kv_heads](x, words, home, *home.stride()[:3], times, keys, kv_heads, batch * kv_heads, summed, dim, False)


def addends_in(dq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where offsets and deltas, (B, H, groups of ROWS queries, PARTS, ROWS) bf16, of the single pass wait: in the group's first rows of dQ, which are written
    when all that needs them is done, or where those are too few or too short, in memory of their own."""
    (batch, heads, queries, dim), (of_batch, of_head, of_row, _) = dq.shape, dq.stride()
    groups, parts = -(-queries // ROWS), PARTS.value
    shape = (batch, heads, groups, parts, ROWS)
    if dim < ROWS or queries - (groups - 1) * ROWS < 2 * parts:
        return torch.empty(2, *shape, dtype=torch.bfloat16, device=dq.device).unbind()
    x, strides = dq.view(torch.bfloat16), (of_batch, of_head, ROWS * of_row, of_row, 1)
    return x.as_strided(shape, strides, x.storage_offset()), x.as_strided(shape, strides, x.storage_offset() + parts * of_row)


def strides_of_tiles(numbers: torch.Tensor) -> tuple[int, int, int, int]:
    """Between batches, heads, tiles of ROWS queries and parts of offsets or deltas: (B, H, S) fp32, or (B, H, tiles, PARTS, ROWS), as `addends_in` has them."""
    batch, head, *others = numbers.stride()
    tile, part = others[:2] if len(others) > 1 else (ROWS, 0)
    return batch, head, tile, part


def _statistics(
    out: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor, grad_lse: torch.Tensor | None, addends: tuple[torch.Tensor, torch.Tensor] | None = None,
    zeros: tuple[torch.Tensor, torch.Tensor] | None = None, factor: float = 0.0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """offsets and deltas, see `statistics`: what two passes load, or, in `addends`, what the single pass adds to scores, divided by their factor, which also
    needs `zeros` (words, counts)."""
    batch, heads, queries, dim = out.shape
    offsets, deltas = addends or (padded_empty((batch, heads, queries), out, torch.float32) for _ in range(2))
    words, counts = zeros or (offsets, offsets)
    words_of_head, units = (words.numel() // (batch * heads), counts.numel()) if zeros else (0, 0)
    statistics[-(-queries // ROWS), heads, batch](
        out, grad, lse, lse if grad_lse is None else grad_lse.contiguous(), offsets, deltas, words, counts, *out.stride()[:3], *grad.stride()[:3],
        *lse.stride()[:2], *strides_of_tiles(offsets), queries, words_of_head, units, factor, dim, power_of_two(dim), grad_lse is not None,
        zeros is not None)  # fmt: skip
    return dict(offsets=offsets, deltas=deltas)


def bytes_at_once(fused: AttentionBackward, q: torch.Tensor, tiles: int) -> int:
    """Of Q and dO, and of dQ in fp32, of the query heads that all blocks of a causal backward are at, if each key head, of so many tiles, had one."""
    heads = max(1.0, multiprocessor_count(q.get_device()) / tiles)
    return int(heads * q.shape[2] * fused.head_dim * 2 * (q.element_size() + 2))


def parts_for(device: int, group: int, units: int, drawn: bool = False, at_once: int = 0) -> int:
    """In how many parts groups of so many query heads (1: they stay whole) are dealt out, where whole groups are `units` of work and bytes `at_once`: see
    `parts_of_group`."""
    return parts_of_group(units, group, multiprocessor_count(device), drawn, at_once / l2_bytes(device)) if group > 1 else 1


def homes_of(dk: torch.Tensor, dv: torch.Tensor, group: int, units: int) -> dict[str, torch.Tensor]:
    """Where kernels leave dK and dV, whose second dimension are heads: there, or in tensors of their own for parts of each group, which `sum_groups` sums up.
    Groups of so many query heads, `units` of work for whole groups: see `parts_for`."""
    parts = parts_for(dk.get_device(), group, units)
    if parts == 1:
        return dict(dK=dk, dV=dv)
    return {name: x.new_empty(x.shape[0], x.shape[1] * parts, *x.shape[2:]) for name, x in (("dK", dk), ("dV", dv))}


def sum_groups(homes: dict[str, torch.Tensor], dk: torch.Tensor, dv: torch.Tensor) -> None:
    """dK and dV of what kernels left in `homes_of` them."""
    for home, x in ((homes["dK"], dk), (homes["dV"], dv)):
        if home is not x:
            torch.sum(home.unflatten(1, (x.shape[1], -1)), 2, out=x)
