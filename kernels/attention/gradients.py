"""The gradients of `attention` for PyTorch tensors: by how many passes, where what waits between the kernels lies, the launches."""
from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import allocator, allocator_like, padded_empty, power_of_two, remember, signature
from tritonkittens.kernels.attention.backward_plan import Gradients, Operands, Passes, Step, Tensors, plain_step, template_step
from tritonkittens.kernels.attention.call_plan import TILE, Scores, empty_like
from tritonkittens.kernels.attention.config import choose_backward, choose_fused, deal, parts_of_group, worth_sums
from tritonkittens.kernels.attention.device.backward import PARTS, ROWS, AttentionBackwardKeys, AttentionBackwardQueries, statistics
from tritonkittens.kernels.attention.device.fused_backward import AttentionBackward, gather_sums
from tritonkittens.launch import l2_bytes, multiprocessor_count

_known: dict[tuple, Passes] = {}  # what calls of a kind do
SMALLEST_SCALE = 2.0**-64  # of scores: what is added to them is divided by it


def summand_factor(numbers: dict[str, Any]) -> float:
    """What log-sum-exps are multiplied by to be added to scores, for a kernel with these numbers; 0 where too little of those would be left."""
    return 1 / numbers["scale"] if numbers["scale"] >= SMALLEST_SCALE else 0.0


@functools.lru_cache
def backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool,
) -> tuple[tk.lcf, tuple[tk.lcf, ...]]:  # fmt: skip
    """The kernels of the deterministic backward for types, dimensions and features: (that of dQ, those of dK and dV)."""
    return choose_backward(AttentionBackwardQueries, AttentionBackwardKeys, head_dim, value_dim, dtype=tk.from_torch(dtype), causal=causal, window=window,
                           softcap=softcap, **deal(causal))


@functools.lru_cache
def fused_backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, cut: bool, parts: int = 1,
    more: tuple[tuple[str, Any], ...] = (),
) -> AttentionBackward | None:  # fmt: skip
    """The kernel of the backward in a single pass for types, dimensions and features, where there is one; `cut`: may the last keys be no full tile?
    `parts`: of a group's query heads; `more`: knobs that are not as they are by default."""
    return choose_fused(AttentionBackward, head_dim, value_dim, dtype=tk.from_torch(dtype), causal=causal, window=window,
                        softcap=softcap, cut=cut, parts=parts, turns=parts == 1 and not (causal or window), order=deal(causal)["order"], **dict(more))


def run_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores, deterministic: bool = False,
) -> Gradients:  # fmt: skip
    """(dQ, dK, dV) of what `run_forward` wrote, for gradients of the output and, where given, of the log-sum-exp. Where not `deterministic`, dQ, and dK and dV
    of groups, may be summed up in an order that changes from run to run. What is to be done is thought out once for every kind of calls."""
    operands = (grad, grad_lse, q, k, v, out, lse)
    key = (signature(q, k, v, out, grad), lse.stride(), grad_lse is None, scores, deterministic)
    run = _known.get(key)
    if run is None:
        run = remember(_known, key, _passes(operands, scores, deterministic))
    return run(*operands)


def _passes(operands: Operands, scores: Scores, deterministic: bool) -> Passes:
    """What calls with such operands do."""
    _, _, q, k, v, out, _ = operands
    (heads, queries, dim), (kv_heads, keys, value_dim) = q.shape[1:], v.shape[1:]
    if out.numel() == 0 or keys == 0:
        return Passes(operands, like_operands(q, k, v))
    features = scores.features(queries, keys)
    numbers = {**scores.numbers(features[1]), "gradient": scores.scale}
    kind = (q.dtype, dim, value_dim, *features)
    single = (*kind, keys % (AttentionBackward.tile_m * AttentionBackward.consumers) != 0)
    factor = 0.0 if deterministic or not worth_sums(dim, keys, features[0]) else summand_factor(numbers)
    fused = fused_backward(*single) if factor else None
    if fused is not None:
        return SinglePass(operands, numbers, fused, single, factor)
    return TwoPasses(operands, numbers, backward(*kind), 1 if deterministic else heads // kv_heads)


def like_operands(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Uninitialised gradients."""
    return empty_like(q, q.shape[3]), empty_like(k, k.shape[3]), empty_like(v, v.shape[3])


class SinglePass(Passes):
    """By `fused`, the kernel of this `kind` (see `fused_backward`), or one like it."""

    def __init__(self, operands: Operands, numbers: dict[str, Any], fused: AttentionBackward, kind: tuple[Any, ...], factor: float):
        _, _, q, k, v, *_ = operands
        super().__init__(operands, like_operands(q, k, v))
        (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
        device, summed = q.get_device(), fused.summed
        tiles, blocks, group = -(-keys // (fused.tile_m * fused.consumers)), -(-queries // fused.tile_n), heads // kv_heads
        # A causal mask leaves half of a task on average
        parts = parts_for(device, group, -(-tiles // 2) * batch * kv_heads, True, group * bytes_at_once(fused, q, tiles)) if fused.causal else (
            parts_for(device, group, tiles * batch * kv_heads))
        if parts > 1:
            fused = cast(AttentionBackward, fused_backward(*kind, parts))
        rows_of_parts = fused.consumers * tiles
        self.new_sums = allocator((batch, heads, blocks, fused.block_numbers), torch.float32, q.device)
        self.new_words = allocator((batch, heads, blocks, fused.consumers), torch.int32, q.device)
        self.new_parts = allocator((2, batch, kv_heads, rows_of_parts, fused.tile_m * summed), torch.float32, q.device) if parts > 1 else None

        tensors, scale = self.tensors(*operands), numbers["gradient"]
        across = -(-summed // 64)
        self.steps = [
            statistics_step(tensors, factor),
            template_step(fused, tensors, numbers),
            plain_step(gather_sums, (across * blocks * fused.tile_n // ROWS, batch * heads), tensors, ("sums", "words", "dQ"), *tensors["dQ"].stride()[:3], scale,
                       queries, heads, summed, dim, True)]  # fmt: skip
        for name, home, times in (("dK", "of_keys", scale), ("dV", "of_values", 1.0)) if parts > 1 else ():
            self.steps.append(plain_step(gather_sums, (across * rows_of_parts, batch * kv_heads), tensors, (name, "words", home), *tensors[home].stride()[:3],
                                         times, keys, kv_heads, summed, dim, False))  # fmt: skip

    def make(self, tensors: Tensors) -> None:
        offsets, deltas = addends_in(tensors["dQ"])
        tensors.update(sums=self.new_sums(), words=self.new_words(), offsets=offsets, deltas=deltas)
        if self.new_parts is not None:
            tensors["dK"], tensors["dV"] = self.new_parts().zero_().unbind()


class TwoPasses(Passes):
    """By `kernels`, as `backward` has them, of groups of so many query heads."""

    def __init__(self, operands: Operands, numbers: dict[str, Any], kernels: tuple[tk.lcf, tuple[tk.lcf, ...]], group: int):
        _, _, q, k, v, _, lse = operands
        super().__init__(operands, like_operands(q, k, v))
        # Sums of parts depend on how many there are: in a deterministic backward, where groups stay whole, bits would change with the batch.
        self.parts = parts_for(q.get_device(), group, -(-k.shape[2] // TILE) * k.shape[0] * k.shape[1])
        self.new_statistics = allocator_like(padded_empty(tuple(lse.shape), lse))
        tensors, (of_queries, of_keys) = self.tensors(*operands), kernels
        self.steps = [statistics_step(tensors), *(template_step(kernel, tensors, numbers) for kernel in (of_queries, *of_keys))]
        if self.parts > 1:
            self.steps.append(lambda tensors: sum_groups(tensors, tensors["of_keys"], tensors["of_values"]))

    def make(self, tensors: Tensors) -> None:
        tensors.update(offsets=self.new_statistics(), deltas=self.new_statistics(), **homes_of(tensors["of_keys"], tensors["of_values"], self.parts))


def statistics_step(tensors: Tensors, factor: float = 0.0) -> Step:
    """offsets and deltas, see `statistics`: what two passes load, or, with the factor of scores that a single pass divides them by, what that adds, which also
    needs words of zeros."""
    o, do, lse, offsets, dl = (tensors[name] for name in ("O", "dO", "L", "offsets", "dL"))
    batch, heads, queries, dim = o.shape
    zeros, words_of_head = ("words", tensors["words"].numel() // (batch * heads)) if factor else ("offsets", 0)
    return plain_step(statistics, (-(-queries // ROWS), heads, batch), tensors, ("O", "dO", "L", "dL", "offsets", "deltas", zeros), *o.stride()[:3],
                  *do.stride()[:3], *lse.stride()[:2], *strides_of_tiles(offsets), queries, words_of_head, factor, dim, power_of_two(dim), dl is not lse,
                  factor != 0)  # fmt: skip


def addends_in(dq: Tensor) -> tuple[Tensor, Tensor]:
    """Where offsets and deltas, (B, H, groups of ROWS queries, PARTS, ROWS) bf16, of the single pass wait: in the group's first rows of dQ, which are written
    when all that needs them is done, or where those are too few or too short, in memory of their own."""
    (batch, heads, queries, dim), (of_batch, of_head, of_row, _) = dq.shape, dq.stride()
    groups, parts = -(-queries // ROWS), PARTS.value
    shape = (batch, heads, groups, parts, ROWS)
    if dim < ROWS or queries - (groups - 1) * ROWS < 2 * parts:
        return torch.empty(2, *shape, dtype=torch.bfloat16, device=dq.device).unbind()
    x, strides = dq if dq.dtype == torch.bfloat16 else dq.view(torch.bfloat16), (of_batch, of_head, ROWS * of_row, of_row, 1)
    return x.as_strided(shape, strides, x.storage_offset()), x.as_strided(shape, strides, x.storage_offset() + parts * of_row)


def strides_of_tiles(numbers: Tensor) -> tuple[int, int, int, int]:
    """Between batches, heads, tiles of ROWS queries and parts of offsets or deltas: (B, H, S) fp32, or (B, H, tiles, PARTS, ROWS), as `addends_in` has them."""
    batch, head, *others = numbers.stride()
    tile, part = others[:2] if len(others) > 1 else (ROWS, 0)
    return batch, head, tile, part


def bytes_at_once(fused: AttentionBackward, q: Tensor, tiles: int) -> int:
    """Of Q and dO, and of dQ in fp32, of the query heads that all blocks of a causal backward are at, if each key head, of so many tiles, had one."""
    heads = max(1.0, multiprocessor_count(q.get_device()) / tiles)
    return int(heads * q.shape[2] * fused.head_dim * 2 * (q.element_size() + 2))


def parts_for(device: int, group: int, units: int, dynamic: bool = False, at_once: int = 0) -> int:
    """In how many parts groups of so many query heads (1: they stay whole) are dealt out, where whole groups are `units` of work and bytes `at_once`: see
    `parts_of_group`."""
    return parts_of_group(units, group, multiprocessor_count(device), drawn, at_once / l2_bytes(device)) if group > 1 else 1


def homes_of(dk: Tensor, dv: Tensor, parts: int) -> dict[str, Tensor]:
    """Where kernels leave dK and dV, whose second dimension are heads: there, or in tensors of their own for `parts` of each group, see `sum_groups`."""
    if parts == 1:
        return dict(dK=dk, dV=dv)
    return {name: x.new_empty(x.shape[0], x.shape[1] * parts, *x.shape[2:]) for name, x in (("dK", dk), ("dV", dv))}


def sum_groups(homes: dict[str, Tensor], dk: Tensor, dv: Tensor) -> None:
    """dK and dV of what kernels left in `homes_of` them."""
    for home, x in ((homes["dK"], dk), (homes["dV"], dv)):
        if home is not x:
            torch.sum(home.unflatten(1, (x.shape[1], -1)), 2, out=x)
