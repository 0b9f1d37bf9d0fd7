"""The gradients of `attention_varlen`: by how many passes, where what waits between the kernels lies, the launches."""
from __future__ import annotations

import functools
import math
from typing import Any, cast

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import allocator, power_of_two, remember, signature
from tritonkittens.kernels.attention.backward_plan import Gradients, Passes, Step, Tensors, plain_step, template_step
from tritonkittens.kernels.attention.call_plan import TILE, Scores
from tritonkittens.kernels.attention.config import choose_backward, choose_fused
from tritonkittens.kernels.attention.device.backward import PARTS, ROWS
from tritonkittens.kernels.attention.device.varlen import (
    Listing,
    PackedBackward,
    PackedBackwardKeys,
    PackedBackwardQueries,
    gather_packed,
    most_tiles,
    packed_statistics,
    tiles_apart,
)
from tritonkittens.kernels.attention.gradients import homes_of, parts_for, strides_of_tiles, sum_groups, summand_factor

Operands = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # as of `Passes`; where queries, and keys, of sequences begin
_known: dict[tuple, PackedPasses] = {}  # what calls of a kind do


@functools.lru_cache
def packed_backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool,
) -> tuple[tk.lcf, tuple[tk.lcf, ...]]:  # fmt: skip
    """The kernels of the deterministic backward for types, dimensions and features: (that of dQ, those of dK and dV)."""
    return choose_backward(PackedBackwardQueries, PackedBackwardKeys, head_dim, value_dim, dtype=tk.from_torch(dtype), causal=causal, window=window,
                           softcap=softcap)


@functools.lru_cache
def packed_fused_backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, parts: int = 1,
) -> PackedBackward | None:  # fmt: skip
    """The kernel of the backward in a single pass for types, dimensions and features, where there is one. `parts`: of a group's query heads."""
    return choose_fused(PackedBackward, head_dim, value_dim, dtype=tk.from_torch(dtype), causal=causal, window=window, softcap=softcap, parts=parts)


def packed_addends_in(dq: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Where offsets and deltas, (1, H, groups of ROWS queries, PARTS, ROWS) bf16, of the single pass wait: in the memory of dQ, (total, H, D), contiguous, that
    is written behind it, or where that is too small for blocks of many short sequences, in memory of their own."""
    shape = (2, 1, dq.shape[1], groups, PARTS.value, ROWS)
    numbers = math.prod(shape)
    home = dq.view(torch.bfloat16).flatten()[:numbers] if numbers <= dq.numel() else torch.empty(numbers, dtype=torch.bfloat16, device=dq.device)
    return home.view(shape).unbind()


def run_packed_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts_q: Tensor, starts_k: Tensor,
    features: tuple[bool, bool, bool], scores: Scores, deterministic: bool,
) -> Gradients:  # fmt: skip
    """(dQ, dK, dV) of what the forward wrote, for gradients of the output and, where given, of the log-sum-exp. What is to be done is thought out once for
    every kind of calls."""
    operands = (grad, grad_lse, q, k, v, out, lse.contiguous(), starts_q, starts_k)  # a hook may have given it back otherwise, and kernels read it so
    key = (signature(q, k, v, out, grad, starts_q, starts_k), grad_lse is None, features, scores, deterministic)
    run = _known.get(key)
    if run is None:
        run = remember(_known, key, _passes(operands, features, scores, deterministic))
    return run(*operands)


def _passes(operands: Operands, features: tuple[bool, bool, bool], scores: Scores, deterministic: bool) -> PackedPasses:
    """What calls with such operands do."""
    q, v, out = operands[2], operands[4], operands[5]
    if out.numel() == 0 or v.shape[0] == 0:
        return PackedPasses(operands)
    numbers = {**scores.numbers(features[1]), "gradient": scores.scale}
    kind, factor = (q.dtype, q.shape[2], v.shape[2], *features), summand_factor(numbers)
    fused = packed_fused_backward(*kind) if factor and not deterministic else None
    if fused is not None:
        return PackedSinglePass(operands, numbers, fused, kind, factor)
    return PackedTwoPasses(operands, numbers, packed_backward(*kind), deterministic)


class PackedPasses(Passes):
    """`Passes` of packed sequences, which begin at query_starts and key_starts."""

    def __init__(self, operands: Operands):
        q, k, v = operands[2:5]
        super().__init__(operands[:7], [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)])
        self.sequences = operands[7].shape[0] - 1

    def tensors(self, *operands: Any) -> Tensors:
        *dense, query_starts, key_starts = operands
        return super().tensors(*dense) | dict(query_starts=query_starts, key_starts=key_starts)


def listing_step(name: str, listing: Listing) -> Step:
    """Puts a list of tiles among the tensors."""
    def step(tensors: Tensors) -> None:
        tensors[name] = listing(tensors["query_starts"], tensors["key_starts"])

    return step


def heads_first(tensors: Tensors, *names: str) -> Tensors:
    """The tensors, those with these names seen as the kernels see them."""
    return tensors | {name: tensors[name].transpose(0, 1) for name in names}


def statistics_step(tensors: Tensors, block: int, factor: float = 0.0) -> Step:
    """offsets and deltas, see `packed_statistics`: with the factor that scores are divided by as the single pass adds them, in blocks of so many queries."""
    o, do, offsets = tensors["O"], tensors["dO"], tensors["offsets"]
    queries, heads, value_dim = o.shape
    return plain_step(packed_statistics, (tensors["of_rows"].shape[0], heads), tensors, ("O", "dO", "L", "dL", "of_rows", "offsets", "deltas"), *o.stride()[:2],
                      *do.stride()[:2], *strides_of_tiles(offsets)[1:], queries, factor, value_dim, power_of_two(value_dim), tensors["dL"] is not tensors["L"],
                      block // ROWS, factor != 0)  # fmt: skip


class PackedSinglePass(PackedPasses):
    """By `fused`, the kernel of this `kind` (see `packed_fused_backward`), or one like it."""

    def __init__(self, operands: Operands, numbers: dict[str, Any], fused: PackedBackward, kind: tuple[Any, ...], factor: float):
        super().__init__(operands)
        q, k, starts = operands[2], operands[3], operands[7:]
        (queries, heads, dim), (keys, kv_heads), block = q.shape, k.shape[:2], fused.tile_n
        parts = parts_for(q.get_device(), heads // kv_heads, most_tiles(keys, self.sequences, TILE) * kv_heads)
        if parts > 1:
            fused = cast(PackedBackward, packed_fused_backward(*kind, parts))
        height = fused.tile_m * fused.consumers
        blocks, tiles = tiles_apart(queries, self.sequences, block), tiles_apart(keys, self.sequences, height)
        self.groups = blocks * block // ROWS
        self.new_sums = allocator((1, heads, blocks, fused.block_numbers), torch.float32, q.device)
        self.new_words = allocator((heads, blocks, fused.consumers), torch.int32, q.device)
        of_parts = (2, kv_heads, tiles * fused.consumers, fused.tile_m * fused.summed)  # of dK and dV
        self.new_parts = allocator(of_parts, torch.float32, q.device) if parts > 1 else None

        listings = [listing_step("of_rows", Listing(*starts, queries, keys, False, ROWS, block)),
                    listing_step("entries", Listing(*starts, queries, keys, True, height, block))]
        tensors = self.tensors(*operands)
        for step in listings:
            step(tensors)
        seen = heads_first(tensors, "Q", "K", "V", "dO", "dQ", *(() if parts > 1 else ("dK", "dV")))
        self.steps = [
            *listings, statistics_step(tensors, block, factor), template_step(fused, seen, numbers),
            plain_step(gather_packed, (tensors["of_rows"].shape[0], heads), tensors, ("sums", "words", "dQ", "of_rows"), *tensors["dQ"].stride()[:2],
                       numbers["gradient"], blocks, fused.summed, dim, block // ROWS, False)]  # fmt: skip
        for name, home, times in (("dK", "of_keys", numbers["gradient"]), ("dV", "of_values", 1.0)) if parts > 1 else ():
            self.steps.append(plain_step(gather_packed, (tensors["entries"].shape[0], kv_heads), tensors, (name, "words", home, "entries"),
                                         *tensors[home].stride()[:2], times, tiles, fused.summed, dim, fused.consumers, True))  # fmt: skip

    def make(self, tensors: Tensors) -> None:
        offsets, deltas = packed_addends_in(tensors["dQ"], self.groups)
        tensors.update(sums=self.new_sums(), words=self.new_words().zero_(), offsets=offsets, deltas=deltas)
        if self.new_parts is not None:
            tensors["dK"], tensors["dV"] = self.new_parts().zero_().unbind()


class PackedTwoPasses(PackedPasses):
    """By `kernels`, as `packed_backward` has them."""

    def __init__(self, operands: Operands, numbers: dict[str, Any], kernels: tuple[tk.lcf, tuple[tk.lcf, ...]], deterministic: bool):
        super().__init__(operands)
        q, k, starts = operands[2], operands[3], operands[7:]
        (queries, heads), (keys, kv_heads) = q.shape[:2], k.shape[:2]
        # Sums of parts depend on how many there are, see `TwoPasses`.
        self.parts = 1 if deterministic else parts_for(q.get_device(), heads // kv_heads, most_tiles(keys, self.sequences, TILE) * kv_heads)
        self.new_statistics = allocator((2, 1, heads, tiles_apart(queries, self.sequences, ROWS) * ROWS), torch.float32, q.device)
        tensors, (of_queries, of_keys) = self.tensors(*operands), kernels
        self.steps = [listing_step("of_rows", Listing(*starts, queries, keys, False, ROWS, ROWS))]
        self.steps[0](tensors)
        self.steps.append(statistics_step(tensors, ROWS))
        for kernel in (of_queries, *of_keys):
            height = kernel.tile_m * kernel.consumers  # type: ignore[attr-defined]
            if kernel is of_queries and height == ROWS:
                self.steps.append(lambda tensors: tensors.update(entries=tensors["of_rows"]))
            else:
                self.steps.append(listing_step("entries", Listing(*starts, queries, keys, kernel is not of_queries, height)))
            self.steps[-1](tensors)
            self.steps.append(template_step(kernel, heads_first(tensors, "Q", "K", "V", "dO", "dQ", "dK", "dV"), numbers))
        if self.parts > 1:
            self.steps.append(lambda tensors: sum_groups(tensors, tensors["of_keys"], tensors["of_values"]))

    def make(self, tensors: Tensors) -> None:
        offsets, deltas = self.new_statistics().unbind()
        tensors.update(offsets=offsets, deltas=deltas, **homes_of(tensors["of_keys"], tensors["of_values"], self.parts))
