"""The plan of a backward of `attention_varlen`: one or two passes, buffers between kernels, launches."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import allocator, power_of_two, remember, signature
from tritonkittens.kernels.attention import tmem_plan
from tritonkittens.kernels.attention.backward_plan import (
    BackwardPlan,
    FusedOf,
    Gradients,
    Step,
    Tensors,
    homes_of,
    plain_step,
    slots_of,
    strides_of_tiles,
    sum_step,
    summand_factor,
    template_step,
)
from tritonkittens.kernels.attention.call_plan import Scores
from tritonkittens.kernels.attention.config import (
    BackwardKind,
    choose_backward,
    choose_fused,
    has_single_pass,
    parts_of_group,
)
from tritonkittens.kernels.attention.cost_model import BackwardShape, single_pass, two_passes
from tritonkittens.kernels.attention.device.backward import PARTS, ROWS
from tritonkittens.kernels.attention.device.backward_tmem import BackwardTmem
from tritonkittens.kernels.attention.device.fused_backward import AttentionBackward
from tritonkittens.kernels.attention.device.varlen import VarlenBackward, varlen_postprocess, varlen_preprocess
from tritonkittens.kernels.attention.varlen_plan import Listing, tiles_apart


class Operands(NamedTuple):
    """Those of `BackwardPlan`, and cu_seqlens of both sides."""

    grad: Tensor
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    starts_q: Tensor
    starts_k: Tensor


_plans: dict[tuple[Any, ...], VarlenBackwardPlan] = {}


def varlen_addends_in(dq: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(LSE_log2, dPsum) of the single pass, (1, H, groups of ROWS queries, PARTS, ROWS) bf16.

    They lie in the memory of dQ, (total, H, D) contiguous, which is written after their last use. Many short sequences
    need more than that: then they get memory of their own.
    """
    shape = (2, 1, dq.shape[1], groups, PARTS.value, ROWS)
    numbers = math.prod(shape)
    home = (
        dq.view(torch.bfloat16).flatten()[:numbers]
        if numbers <= dq.numel()
        else torch.empty(numbers, dtype=torch.bfloat16, device=dq.device)
    )
    return home.view(shape).unbind()


def run_varlen_backward(operands: Operands, longest: tuple[int, int], scores: Scores, deterministic: bool) -> Gradients:
    """(dQ, dK, dV) for the gradients of the output and, where given, of the log-sum-exp.

    `longest`: see `longest_sequences`.
    """
    features = scores.features(*longest)
    # Kernels read contiguous rows; a hook for saved tensors may have changed the strides
    operands = operands._replace(lse=operands.lse.contiguous())
    grad, grad_lse, q, k, v, out, _, starts_q, starts_k = operands
    key = (signature(q, k, v, out, grad, starts_q, starts_k), grad_lse is None, features, scores, deterministic)
    run = _plans.get(key)
    if run is None:
        run = remember(_plans, key, _plan(operands, longest, scores, deterministic))
    return run(*operands)


def _plan(operands: Operands, longest: tuple[int, int], scores: Scores, deterministic: bool) -> VarlenBackwardPlan:
    """The plan of calls with operands like these."""
    q, v, features = operands.q, operands.v, scores.features(*longest)
    if operands.out.numel() == 0 or v.shape[0] == 0:
        return VarlenBackwardPlan(operands)
    numbers = {**scores.numbers(features[1]), "gradient": scores.scale}
    kind = BackwardKind(tk.from_torch(q.dtype), q.shape[2], v.shape[2], *features)
    if not deterministic and tmem_plan.takes_backward(q, v.shape[2], scores):
        return VarlenTmemPlan(operands, scores, longest)
    factor = 0.0 if deterministic else summand_factor(numbers)
    if factor and has_single_pass(kind.head_dim, kind.value_dim):
        return VarlenSinglePassPlan(
            operands,
            numbers,
            lambda parts: choose_fused(VarlenBackward, kind, parts=parts, launch_pdl=True),
            factor,
            scores,
        )
    return VarlenTwoPassPlan(operands, numbers, kind, scores, deterministic)


def mean_shape(operands: Operands, scores: Scores) -> BackwardShape:
    """The shape with all sequences of the mean length, because the host does not know their lengths."""
    (queries, heads, dim), (keys, kv_heads, value_dim) = operands.q.shape, operands.v.shape
    count = max(1, operands.starts_q.shape[0] - 1)
    return BackwardShape(
        count * kv_heads,
        heads // kv_heads,
        -(-queries // count),
        -(-keys // count),
        dim,
        value_dim,
        scores.left,
        scores.right,
    )


class VarlenBackwardPlan(BackwardPlan):
    """`BackwardPlan` of sequences of different lengths, with query_starts and key_starts among its tensors."""

    def __init__(self, operands: Operands):
        _, _, q, k, v, *_ = operands
        super().__init__(operands[:7], [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)])
        self.sequences = operands.starts_q.shape[0] - 1

    def tensors(self, *operands: Any) -> Tensors:
        *dense, query_starts, key_starts = operands
        return super().tensors(*dense) | dict(query_starts=query_starts, key_starts=key_starts)


def listing_step(name: str, listing: Listing) -> Step:
    """Launches the kernel that writes the list of tiles, the tensor `name`."""

    def step(tensors: Tensors) -> None:
        tensors[name] = listing(tensors["query_starts"], tensors["key_starts"])

    return step


def heads_first(tensors: Tensors, *names: str) -> Tensors:
    """The tensors. Those with these `names` are transposed to (heads, rows, D), as the kernels take them."""
    return tensors | {name: tensors[name].transpose(0, 1) for name in names}


def preprocess_step(tensors: Tensors, block: int, factor: float = 0.0, addends: int = 0) -> Step:
    """LSE_log2 and dPsum, see `varlen_preprocess`, which has so many `addends`.

    `block`: queries of a block of them. `factor`: see `summand_factor`.
    """
    o, do, dPsum = tensors["O"], tensors["dO"], tensors["dPsum"]
    queries, heads, value_dim = o.shape
    return plain_step(
        varlen_preprocess,
        (tensors["of_rows"].shape[0], heads),
        tensors,
        ("O", "dO", "L", "dL", "of_rows", "LSE_log2", "dPsum"),
        *o.stride()[:2],
        *do.stride()[:2],
        *strides_of_tiles(dPsum)[1:],
        queries,
        factor,
        value_dim,
        power_of_two(value_dim),
        tensors["dL"] is not tensors["L"],
        block // ROWS,
        addends,
    )


def postprocess_step(
    tensors: Tensors, fused: AttentionBackward, accum: str, gradient: str, factor: float, blocks: int
) -> Step:
    """A gradient, `factor` times its accumulation buffer, which has so many blocks (of dQ) or tiles (of keys) a head.

    `accum` and `gradient` are the names of both.
    """
    of_keys = gradient != "dQ"
    entries = "entries" if of_keys else "of_rows"
    _, heads, dim = tensors[gradient].shape
    return plain_step(
        varlen_postprocess,
        (tensors[entries].shape[0], heads),
        tensors,
        (accum, "words", gradient, entries),
        *tensors[gradient].stride()[:2],
        factor,
        blocks,
        fused.summed,
        dim,
        fused.consumers if of_keys else fused.tile_n // ROWS,
        of_keys,
    )


class VarlenSinglePassPlan(VarlenBackwardPlan):
    """One kernel for dQ, dK and dV. `factor`: see `summand_factor`."""

    def __init__(self, operands: Operands, numbers: dict[str, Any], fused_of: FusedOf, factor: float, scores: Scores):
        super().__init__(operands)
        fused = fused_of(1)
        q, k, starts = operands.q, operands.k, (operands.starts_q, operands.starts_k)
        (queries, heads, _), (keys, kv_heads), block = q.shape, k.shape[:2], fused.tile_n
        parts = parts_of_group(single_pass, mean_shape(operands, scores), slots_of(q))
        if parts > 1:
            fused = fused_of(parts)
        height = fused.tile_m * fused.consumers
        blocks, tiles = tiles_apart(queries, self.sequences, block), tiles_apart(keys, self.sequences, height)
        self.groups = blocks * block // ROWS
        self.new_dq_accum = allocator((1, heads, blocks, fused.block_numbers), torch.float32, q.device)
        self.new_words = allocator((heads, blocks, fused.consumers), torch.int32, q.device)
        of_parts = (2, kv_heads, tiles * fused.consumers, fused.tile_m * fused.summed)  # of dK and dV
        self.new_parts = allocator(of_parts, torch.float32, q.device) if parts > 1 else None

        listings = [
            listing_step("of_rows", Listing(*starts, queries, keys, False, ROWS, block)),
            listing_step("entries", Listing(*starts, queries, keys, True, height, block)),
        ]
        tensors, scale = self.tensors(*operands), numbers["gradient"]
        for step in listings:
            step(tensors)
        seen = heads_first(tensors, "Q", "K", "V", "dO", "dQ", *(() if parts > 1 else ("dK", "dV")))
        self.steps = [
            *listings,
            preprocess_step(tensors, block, factor, addends=2),
            template_step(fused, seen, numbers),
            postprocess_step(tensors, fused, "dQ_accum", "dQ", scale, blocks),
        ]
        if parts > 1:
            self.steps += [
                postprocess_step(tensors, fused, "dK", "of_keys", scale, tiles),
                postprocess_step(tensors, fused, "dV", "of_values", 1.0, tiles),
            ]

    def make(self, tensors: Tensors) -> None:
        LSE_log2, dPsum = varlen_addends_in(tensors["dQ"], self.groups)
        tensors.update(dQ_accum=self.new_dq_accum(), words=self.new_words().zero_(), LSE_log2=LSE_log2, dPsum=dPsum)
        if self.new_parts is not None:
            tensors["dK"], tensors["dV"] = self.new_parts().zero_().unbind()


class VarlenTmemPlan(VarlenBackwardPlan):
    """One kernel for dQ, dK and dV, on chips with tensor memory."""

    def __init__(self, operands: Operands, scores: Scores, longest: tuple[int, int]):
        super().__init__(operands)
        q, k, starts = operands.q, operands.k, (operands.starts_q, operands.starts_k)
        (queries, heads, dim), keys = q.shape, k.shape[0]
        block = BackwardTmem(head_dim=dim).tile_n
        groups = tiles_apart(queries, self.sequences, block) * (block // ROWS)
        self.new_dq_accum = allocator((heads, queries, dim), torch.float32, q.device)
        self.new_lse = allocator((1, heads, groups * ROWS), torch.float32, q.device)
        self.new_dpsum = allocator((1, heads, groups, PARTS.value, ROWS), torch.bfloat16, q.device)
        listings = [
            listing_step("of_rows", Listing(*starts, queries, keys, False, ROWS, block)),
            listing_step("entries", Listing(*starts, queries, keys, True, BackwardTmem.tile_m, block)),
        ]
        tensors, moved = self.tensors(*operands), ("Q", "K", "V", "dO", "dK", "dV")
        for step in listings:
            step(tensors)
        named = itemgetter(*tmem_plan.BACKWARD_TENSORS, "entries")
        launch = tmem_plan.bind_backward(heads_first(tensors, *moved), scores, longest)
        self.steps = [
            *listings,
            preprocess_step(tensors, block, addends=1),
            lambda tensors: launch(*named(tensors)),
            lambda tensors: torch.mul(tensors["dQ_accum"].transpose(0, 1), scores.scale, out=tensors["dQ"]),
        ]

    def make(self, tensors: Tensors) -> None:
        # row values after the last tile of a sequence are read, too: not a number there would reach all sums
        found = dict(dQ_accum=self.new_dq_accum(), LSE_log2=self.new_lse(), dPsum=self.new_dpsum())
        tensors.update({name: tensor.zero_() for name, tensor in found.items()})


class VarlenTwoPassPlan(VarlenBackwardPlan):
    """Two passes."""

    def __init__(
        self, operands: Operands, numbers: dict[str, Any], kind: BackwardKind, scores: Scores, deterministic: bool
    ):
        super().__init__(operands)
        q, k, starts = operands.q, operands.k, (operands.starts_q, operands.starts_k)
        (queries, heads), keys = q.shape[:2], k.shape[0]
        # Sums of parts depend on their number, see `TwoPassPlan`.
        self.parts = 1 if deterministic else parts_of_group(two_passes, mean_shape(operands, scores), slots_of(q))
        self.new_row_values = allocator(
            (2, 1, heads, tiles_apart(queries, self.sequences, ROWS) * ROWS), torch.float32, q.device
        )
        kernels = choose_backward(kind, varlen=True)
        tensors, of_queries = self.tensors(*operands), kernels[0]
        self.steps = [listing_step("of_rows", Listing(*starts, queries, keys, False, ROWS, ROWS))]
        self.steps[0](tensors)
        self.steps.append(preprocess_step(tensors, ROWS))
        for kernel in kernels:
            height = kernel.task_rows  # type: ignore[attr-defined]
            if kernel is of_queries and height == ROWS:
                self.steps.append(lambda tensors: tensors.update(entries=tensors["of_rows"]))
            else:
                self.steps.append(
                    listing_step("entries", Listing(*starts, queries, keys, kernel is not of_queries, height))
                )
            self.steps[-1](tensors)
            self.steps.append(
                template_step(kernel, heads_first(tensors, "Q", "K", "V", "dO", "dQ", "dK", "dV"), numbers)
            )
        if self.parts > 1:
            self.steps.append(sum_step(tensors, self.parts))

    def make(self, tensors: Tensors) -> None:
        LSE_log2, dPsum = self.new_row_values().unbind()
        tensors.update(LSE_log2=LSE_log2, dPsum=dPsum, **homes_of(tensors["of_keys"], tensors["of_values"], self.parts))
