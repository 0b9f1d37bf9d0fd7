"""The plan of a backward of `attention`: one or two passes, buffers between kernels, launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._tensors import (
    addressable,
    allocator,
    allocator_like,
    padded_empty,
    power_of_two,
    remember,
    signature,
)
from tritonkittens.kernels.attention import tmem_plan
from tritonkittens.kernels.attention.call_plan import Scores, empty_like
from tritonkittens.kernels.attention.config import (
    BackwardKind,
    choose_backward,
    choose_fused,
    has_single_pass,
    parts_of_group,
    schedule_knobs,
    worth_sums,
)
from tritonkittens.kernels.attention.cost_model import TILE, BackwardShape, single_pass, two_passes
from tritonkittens.kernels.attention.device.backward import PARTS, ROWS, preprocess
from tritonkittens.kernels.attention.device.fused_backward import AttentionBackward
from tritonkittens.kernels.attention.device.postprocess import ROWS_SUMMED, postprocess, sum_parts
from tritonkittens.launch import l2_bytes, multiprocessor_count

SMALLEST_SCALE = 2.0**-64  # of scores: `preprocess` divides by it
ALIGNED = 32  # fp32 of a cache line

Operands = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]  # gradients of O and L, Q, K, V, O, L
Gradients = tuple[Tensor, Tensor, Tensor]  # dQ, dK, dV
Tensors = dict[str, Tensor]
Step = Callable[[Tensors], None]
FusedOf = Callable[[int], AttentionBackward]  # the kernel of a single pass, by the parts of a group


class BackwardPlan:
    """Allocates gradients like `gradients`, and runs the `steps` of a subclass. It serves all calls of one kind.

    Steps find tensors by name: the operands Q, K, V, dO, O, L and dL (L again where there is no gradient of the
    log-sum-exp), the results dQ, of_keys and of_values, and what `make` adds. dK and dV are of_keys and of_values, or
    the buffers that are summed into them. Without a subclass all gradients are zero: no query sees a key.
    """

    def __init__(self, operands: Operands, gradients: Iterable[Tensor]):
        grad, _, q, k, v, *_ = operands
        self.as_they_are = all(map(addressable, (grad, q, k, v)))
        self.new_gradients = [allocator_like(x) for x in gradients]
        self.steps: list[Step] = [clear]

    def make(self, tensors: Tensors) -> None:
        """Allocate the buffers that kernels need beside operands and gradients."""

    def tensors(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Tensors:
        """The tensors of a call by name, with new gradients and what `make` adds."""
        if not self.as_they_are:
            grad, q, k, v = map(as_addressable, (grad, q, k, v))
        dq, dk, dv = [new() for new in self.new_gradients]
        tensors = dict(
            Q=q,
            K=k,
            V=v,
            dO=grad,
            O=out,
            L=lse,
            dL=lse if grad_lse is None else grad_lse.contiguous(),
            dQ=dq,
            dK=dk,
            dV=dv,
            of_keys=dk,
            of_values=dv,
        )
        self.make(tensors)
        return tensors

    def __call__(self, *operands: Any) -> Gradients:
        tensors = self.tensors(*operands)
        for step in self.steps:
            step(tensors)
        return tensors["dQ"], tensors["of_keys"], tensors["of_values"]


def clear(tensors: Tensors) -> None:
    """Write zeros to all gradients."""
    for name in ("dQ", "dK", "dV"):
        tensors[name].zero_()


def template_step(kernel: tk.lcf, tensors: Tensors, numbers: dict[str, Any]) -> Step:
    """Launches a template with these `numbers` on its tensors."""
    named = itemgetter(*kernel.tensors)
    launch = kernel.call(*named(tensors)).bind(*named(tensors), **numbers)
    return lambda tensors: launch(*named(tensors))


def plain_step(kernel: Any, grid: tuple[int, ...], tensors: Tensors, names: tuple[str, ...], *others: Any) -> Step:
    """Launches a plain kernel on the tensors with these names, and on what `others` it takes."""
    named = itemgetter(*names)
    launch = kernel.bind(grid, *named(tensors), *others)
    return lambda tensors: launch(*named(tensors))


def summand_factor(numbers: dict[str, Any]) -> float:
    """The factor of log-sum-exps that a kernel with these numbers adds to scores; 0 where the scale is too small."""
    return 1 / numbers["scale"] if numbers["scale"] >= SMALLEST_SCALE else 0.0


def fused_backward(kind: BackwardKind, cut: bool, parts: int) -> AttentionBackward:
    """The kernel of the backward in a single pass.

    Args:
        cut: whether the last tile of keys may be partial.
        parts: tasks of a group's query heads.
    """
    return choose_fused(
        AttentionBackward,
        kind,
        cut=cut,
        parts=parts,
        rotated=parts == 1 and not (kind.causal or kind.window),
        order=schedule_knobs(kind.causal)["order"],
        launch_pdl=True,
    )


_plans: dict[tuple[Any, ...], BackwardPlan] = {}


def run_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scores: Scores,
    deterministic: bool = False,
) -> Gradients:
    """(dQ, dK, dV) of what `run_forward` wrote, for the gradients of the output and, where given, of the log-sum-exp.

    Unless `deterministic`, the order in which dQ, and dK and dV of groups, are summed changes from run to run.
    """
    operands = (grad, grad_lse, q, k, v, out, lse)
    key = (signature(q, k, v, out, grad), lse.stride(), grad_lse is None, scores, deterministic)
    run = _plans.get(key)
    if run is None:
        run = remember(_plans, key, _plan(operands, scores, deterministic))
    return run(*operands)


def _plan(operands: Operands, scores: Scores, deterministic: bool) -> BackwardPlan:
    """The plan of calls with operands like these."""
    _, _, q, k, v, out, _ = operands
    (batch, heads, queries, dim), (kv_heads, keys, value_dim) = q.shape, v.shape[1:]
    if out.numel() == 0 or keys == 0:
        return BackwardPlan(operands, like_operands(q, k, v))
    features = scores.features(queries, keys)
    numbers = {**scores.numbers(features[1]), "gradient": scores.scale}
    if not deterministic and tmem_plan.takes_backward(q, value_dim, scores):
        return TmemPlan(operands, scores)
    kind = BackwardKind(tk.from_torch(q.dtype), dim, value_dim, *features)
    shape = BackwardShape(batch * kv_heads, heads // kv_heads, queries, keys, dim, value_dim, scores.left, scores.right)
    sums = not deterministic and has_single_pass(dim, value_dim) and worth_sums(shape, slots_of(q))
    if sums and (factor := summand_factor(numbers)):
        cut = keys % (AttentionBackward.tile_m * AttentionBackward.consumers) != 0
        return SinglePassPlan(operands, numbers, functools.partial(fused_backward, kind, cut), factor, shape)
    return TwoPassPlan(operands, numbers, kind, shape, deterministic)


def slots_of(x: Tensor) -> int:
    """SMs of a tensor's device."""
    return multiprocessor_count(x.get_device())


def like_operands(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Uninitialised gradients."""
    return empty_like(q, q.shape[3]), empty_like(k, k.shape[3]), empty_like(v, v.shape[3])


class SinglePassPlan(BackwardPlan):
    """One kernel for dQ, dK and dV. `factor`: see `summand_factor`."""

    def __init__(
        self, operands: Operands, numbers: dict[str, Any], fused_of: FusedOf, factor: float, shape: BackwardShape
    ):
        _, _, q, k, v, *_ = operands
        super().__init__(operands, like_operands(q, k, v))
        fused = fused_of(1)
        (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
        tiles, blocks = -(-keys // (fused.tile_m * fused.consumers)), -(-queries // fused.tile_n)
        at_once = shape.group * bytes_at_once(fused, q, tiles) / l2_bytes(q.get_device()) if fused.causal else 0.0
        parts = parts_of_group(single_pass, shape, slots_of(q), at_once)
        if parts > 1:
            fused = fused_of(parts)
        rows_of_parts = fused.consumers * tiles
        self.new_dq_accum = allocator((batch, heads, blocks, fused.block_numbers), torch.float32, q.device)
        self.of_parts = (2, batch, kv_heads, rows_of_parts, fused.tile_m * fused.summed) if parts > 1 else (0,)
        words, programs = batch * heads * blocks * fused.consumers, -(-queries // ROWS) * heads * batch
        self.words = -(-words // ALIGNED) * ALIGNED
        self.zeros_each = -(-(self.words + math.prod(self.of_parts)) // (4 * programs)) * 4
        self.new_zeros = allocator((self.zeros_each * programs,), torch.int32, q.device)

        tensors, scale = self.tensors(*operands), numbers["gradient"]
        self.steps = [
            preprocess_step(tensors, factor, self.zeros_each, addends=2),
            template_step(fused, tensors, numbers),
            postprocess_step(tensors, fused, scale, (blocks * fused.tile_n // ROWS, rows_of_parts), parts > 1),
        ]

    def make(self, tensors: Tensors) -> None:
        LSE_log2, dPsum = addends_in(tensors["dQ"])
        words = self.new_zeros()
        tensors.update(dQ_accum=self.new_dq_accum(), words=words, LSE_log2=LSE_log2, dPsum=dPsum)
        if parts := math.prod(self.of_parts):
            sums = words[self.words : self.words + parts].view(torch.float32)
            tensors["dK"], tensors["dV"] = sums.view(self.of_parts).unbind()


class TwoPassPlan(BackwardPlan):
    """Two passes. Where no CTA fetches tasks, both run side by side."""

    def __init__(
        self, operands: Operands, numbers: dict[str, Any], kind: BackwardKind, shape: BackwardShape, deterministic: bool
    ):
        _, _, q, k, v, _, lse = operands
        super().__init__(operands, like_operands(q, k, v))
        # Sums of parts depend on their number, and that on the batch: a deterministic backward leaves groups whole.
        self.parts = 1 if deterministic else parts_of_group(two_passes, shape, slots_of(q))
        tasks = -(-shape.queries // TILE) * shape.group, -(-shape.keys // shape.keys_of_task) * self.parts
        dynamic = shape.heads * max(tasks) > slots_of(q)
        of_queries, of_keys = choose_backward(
            kind,
            (True, True if kind.causal and dynamic else "overlap"),
            varlen=False,
            **schedule_knobs(kind.causal, dynamic),
        )
        self.new_row_values = allocator_like(padded_empty(tuple(lse.shape), lse))
        tensors = self.tensors(*operands)
        self.steps = [
            preprocess_step(tensors),
            template_step(of_queries, tensors, numbers),
            template_step(of_keys, tensors, numbers),
        ]
        if self.parts > 1:
            self.steps.append(sum_step(tensors, self.parts))

    def make(self, tensors: Tensors) -> None:
        tensors.update(
            LSE_log2=self.new_row_values(),
            dPsum=self.new_row_values(),
            **homes_of(tensors["of_keys"], tensors["of_values"], self.parts),
        )


class TmemPlan(BackwardPlan):
    """One kernel for dQ, dK and dV, on chips with tensor memory."""

    def __init__(self, operands: Operands, scores: Scores):
        _, _, q, k, v, *_ = operands
        super().__init__(operands, like_operands(q, k, v))
        batch, heads, queries, dim = q.shape
        groups = -(-queries // ROWS)  # each program of `preprocess` clears one of dQ_accum
        self.new_dq_accum = allocator((batch, heads, groups * ROWS, dim), torch.float32, q.device)
        self.new_row_values = allocator((batch, heads, groups * ROWS), torch.float32, q.device)
        tensors, named = self.tensors(*operands), itemgetter(*tmem_plan.BACKWARD_TENSORS)
        launch = tmem_plan.bind_backward(tensors, scores)
        self.steps = [
            preprocess_step(tensors, zeros_each=ROWS * dim, addends=1),
            lambda tensors: launch(*named(tensors)),
            lambda tensors: torch.mul(tensors["dQ_accum"][:, :, :queries], scores.scale, out=tensors["dQ"]),
        ]

    def make(self, tensors: Tensors) -> None:
        dq_accum, (_, dPsum) = self.new_dq_accum(), addends_in(tensors["dQ"])
        tensors.update(dQ_accum=dq_accum, words=dq_accum, LSE_log2=self.new_row_values(), dPsum=dPsum)


def preprocess_step(tensors: Tensors, factor: float = 0.0, zeros_each: int = 0, addends: int = 0) -> Step:
    """LSE_log2 and dPsum, see `preprocess`, which has so many `addends`. `factor`: see `summand_factor`.

    A single pass also needs zeros, from the address of `words` on, of which each program writes `zeros_each`.
    """
    o, do, lse, dPsum, dl = (tensors[name] for name in ("O", "dO", "L", "dPsum", "dL"))
    batch, heads, queries, dim = o.shape
    return plain_step(
        preprocess,
        (-(-queries // ROWS), heads, batch),
        tensors,
        ("O", "dO", "L", "dL", "LSE_log2", "dPsum", "words" if addends else "LSE_log2"),
        *o.stride()[:3],
        *do.stride()[:3],
        *lse.stride()[:2],
        *strides_of_tiles(dPsum),
        queries,
        zeros_each,
        factor,
        dim,
        power_of_two(dim),
        dl is not lse,
        addends,
    )


def postprocess_step(
    tensors: Tensors, fused: AttentionBackward, factor: float, tiles: tuple[int, int], parts: bool
) -> Step:
    """dQ, `factor` times its accumulation buffer, and with several `parts` dK and dV; see `postprocess`.

    `tiles`: of 64 queries and of 64 keys of a head in the accumulation buffers.
    """
    (batch, heads, queries, dim), (kv_heads, keys) = tensors["dQ"].shape, tensors["of_keys"].shape[1:3]
    names = ("dK", "dV", "of_keys", "of_values") if parts else ("dQ_accum", "dQ_accum", "dQ", "dQ")
    gradients = ("dQ", *names[2:])
    across = -(-fused.summed // 64)
    return plain_step(
        postprocess,
        (across * max(tiles if parts else tiles[:1]), batch * (heads + (2 * kv_heads if parts else 0))),
        tensors,
        ("dQ_accum", "words", "dQ", *names),
        *(stride for name in gradients for stride in tensors[name].stride()[:3]),
        factor,
        batch,
        queries,
        heads,
        keys,
        kv_heads,
        *tiles,
        fused.summed,
        dim,
        parts,
    )


def addends_in(dq: Tensor) -> tuple[Tensor, Tensor]:
    """(LSE_log2, dPsum) of the single pass, (B, H, groups of ROWS queries, PARTS, ROWS) bf16.

    They lie in the group's first rows of dQ, which are written after their last use. Where those rows are too few or
    too short, they get memory of their own.
    """
    (batch, heads, queries, dim), (of_batch, of_head, of_row, _) = dq.shape, dq.stride()
    groups, parts = -(-queries // ROWS), PARTS.value
    shape = (batch, heads, groups, parts, ROWS)
    if dim < ROWS or queries - (groups - 1) * ROWS < 2 * parts:
        return torch.empty(2, *shape, dtype=torch.bfloat16, device=dq.device).unbind()
    x, strides = (
        dq if dq.dtype == torch.bfloat16 else dq.view(torch.bfloat16),
        (of_batch, of_head, ROWS * of_row, of_row, 1),
    )
    return x.as_strided(shape, strides, x.storage_offset()), x.as_strided(
        shape, strides, x.storage_offset() + parts * of_row
    )


def strides_of_tiles(numbers: Tensor) -> tuple[int, int, int, int]:
    """Strides between batches, heads, tiles of ROWS queries and parts of LSE_log2 or dPsum.

    Those are (B, H, S) fp32, or (B, H, tiles, PARTS, ROWS) bf16 as `addends_in` allocates them.
    """
    batch, head, *others = numbers.stride()
    tile, part = others[:2] if len(others) > 1 else (ROWS, 0)
    return batch, head, tile, part


def bytes_at_once(fused: AttentionBackward, q: Tensor, tiles: int) -> int:
    """Bytes of Q, dO and fp32 dQ that all CTAs of a causal backward use at a time.

    `tiles`: tiles of keys of a head. Every key head counts as one query head.
    """
    heads = max(1.0, multiprocessor_count(q.get_device()) / tiles)
    return int(heads * q.shape[2] * fused.head_dim * 2 * (q.element_size() + 2))


def homes_of(dk: Tensor, dv: Tensor, parts: int) -> dict[str, Tensor]:
    """Where kernels write dK and dV: those themselves, or for several `parts` buffers that `sum_parts` sums."""
    if parts == 1:
        return dict(dK=dk, dV=dv)
    return {name: x.new_empty(x.shape[0], x.shape[1] * parts, *x.shape[2:]) for name, x in (("dK", dk), ("dV", dv))}


def sum_step(tensors: Tensors, parts: int) -> Step:
    """Sums the buffers of `homes_of` into dK and dV, (B, H, S, D), or (total, H, D) of sequences end to end."""
    dk, dv = tensors["of_keys"], tensors["of_values"]
    names = ("dK", "dV", "of_keys", "of_values")
    by_head = [x if x.ndim == 4 else x.transpose(0, 1)[None] for x in map(tensors.__getitem__, names)]
    batch, kv_heads, keys, _ = by_head[2].shape
    widths = dk.shape[-1], dv.shape[-1]
    return plain_step(
        sum_parts,
        (-(-keys // ROWS_SUMMED.value), kv_heads, 2 * batch),
        tensors,
        names,
        parts,
        *(stride for x in by_head for stride in x.stride()[:3]),
        keys,
        *(number for width in widths for number in (width, power_of_two(width))),
    )
