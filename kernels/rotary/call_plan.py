"""What a call of `rotary` does: its launches, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonkittens.arch import chip_of
from tritonkittens.kernels._rows import MULTIPLE
from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.norm.call_plan import SUM_COLS, SUM_PARTS
from tritonkittens.kernels.norm.device.backward import sum_partials
from tritonkittens.kernels.rotary.checks import check_operands, check_reachable
from tritonkittens.kernels.rotary.config import Head, programs_of, tiles_of
from tritonkittens.kernels.rotary.device.rotary import rotary_heads
from tritonkittens.launch import Device, device_facts


class Options(NamedTuple):
    """Options of `rotary`, in the order of its operator. `rotary_dim`: columns that rotate. `inverse`: rotate by the
    opposite angles."""

    unsqueeze_dim: int
    rotary_dim: int
    interleaved: bool
    inverse: bool
    eps: float


class Operands(NamedTuple):
    """Tensors of `rotary`, in the order of its operator."""

    q: Tensor
    k: Tensor | None
    cos: Tensor
    sin: Tensor
    position_ids: Tensor | None
    seqlen_offsets: Tensor | None
    cu_seqlens: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None

    @property
    def heads(self) -> list[Tensor]:
        """q, and k where it is given."""
        return [self.q] if self.k is None else [self.q, self.k]


class Extents(NamedTuple):
    """The extents of q or k, and its strides from sequence to sequence, token to token and head to head."""

    batch: int
    length: int
    heads: int
    dim: int
    strides: tuple[int, int, int]


class Numbers(NamedTuple):
    """Numbers of the kernels.

    length: tokens of a sequence. sequences: packed ones. angles: rows of cos. batch_angles: of a sequence, 0 if all
    have the same. steps: of position ids or offsets from sequence to sequence, and from token to token, and what
    multiplies positions to which they are added. heads: of a program. groups: of heads. sign: of sin.
    """

    tokens: int
    length: int
    sequences: int
    angles: int
    batch_angles: int
    steps: tuple[int, int, int]
    q_heads: int
    k_heads: int
    heads: int
    groups: int
    sign: float
    eps: float


def result_like(x: Tensor) -> Tensor:
    """A result of the shape of x without gaps, whose tokens and heads are in the order of those of x in memory."""
    if x.ndim == 4 and x.stride(1) < x.stride(2):
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
    return x.new_empty(x.shape)


def _extents(x: Tensor, unsqueeze_dim: int) -> Extents:
    """Packed tokens, of three dimensions, are one sequence."""
    shape, strides = (x.shape, x.stride()) if x.ndim == 4 else ((1, *x.shape), (0, *x.stride()))
    heads = unsqueeze_dim if x.ndim == 4 else 2
    tokens = 3 - heads
    return Extents(shape[0], shape[tokens], shape[heads], shape[3], (strides[0], strides[tokens], strides[heads]))


def _result(x: Tensor) -> Callable[[], Tensor]:
    strides = result_like(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")).stride()
    return allocator(tuple(x.shape), x.dtype, x.device, strides)


def _ready(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Angles:
    """How kernels read cos, sin and positions of calls of one kind."""

    def __init__(self, operands: Operands):
        cos, sin = operands.cos, operands.sin
        self.batch_angles = cos.shape[-2] if cos.ndim == 3 and len(cos) > 1 else 0
        merges = self.batch_angles == 0 or cos.stride(0) == cos.shape[1] * cos.stride(1)
        self.copied = not merges or cos.stride() != sin.stride() or _ready(cos) is not cos
        self.rows = cos.shape[-2] * (len(cos) if self.batch_angles else 1)
        self.stride = cos.shape[-1] if self.copied else cos.stride(-2)
        self.sequences = 0 if operands.cu_seqlens is None else len(operands.cu_seqlens) - 1
        self.ids = operands.position_ids is not None
        self.placed = self.ids or operands.seqlen_offsets is not None

    def steps(self, operands: Operands, length: int) -> tuple[int, int, int]:
        ids = operands.position_ids
        return (1, 0, 1) if ids is None else (length if ids.numel() > length else 0, 1, 0)

    def ready(self, operands: Operands) -> list[Tensor]:
        """Weights, cos, sin, positions and beginnings of sequences as the kernels read them; one that is left out has
        the memory of cos."""
        cos, sin = (t.contiguous() if self.copied else t for t in operands[2:4])
        given = (operands.position_ids if self.ids else operands.seqlen_offsets, operands.cu_seqlens)
        weights, places = ([cos if t is None else t.contiguous() for t in found] for found in (operands[7:], given))
        return [*weights, cos, sin, *places]


class Plan:
    """The launches of calls of one kind: a rotation, in place or not, or its backward with norms."""

    def __init__(self, operands: Operands, options: Options, inplace: bool, backward: bool):
        self.angles, self.options, self.inplace, self.backward = Angles(operands), options, inplace, backward
        self.results = [_result(x) for x in operands.heads]
        self.is_empty = not any(x.numel() for x in operands.heads)
        self.bound: list[Callable[..., None]] = []
        if backward:
            weight: Any = operands.q_weight
            self.weights = allocator((len(operands.heads), weight.shape[0]), weight.dtype, weight.device)

    def __call__(self, operands: Operands, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return q and k, where it is given, rotated; in place these tensors themselves. In a backward, return their
        gradients, and those of their weights as one tensor."""
        given = operands.heads
        read, grads = [_ready(x) for x in given], [_ready(x) for x in grads or given]
        found = read if self.inplace else [allocate() for allocate in self.results]
        weights = [self.weights()] if self.backward else []
        if self.is_empty:
            return [*found, *(t.zero_() for t in weights)]
        heads = (read[0], read[-1], grads[0], grads[-1], found[0], found[-1])
        tensors = (*heads, *self.angles.ready(operands))
        if not self.bound:
            self.bound = self._bind(operands, tensors, weights)
        partials = self.partials() if weights else tensors[0]
        self.bound[0](*tensors, partials)
        if weights:
            self.bound[1](partials, weights[0])
        if not self.inplace:
            return [*found, *weights]
        return [x if x is y else x.copy_(y) for x, y in zip(given, found, strict=True)]

    def _bind(
        self, operands: Operands, tensors: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Callable[..., None]]:
        """Return all launches at once: another thread may run this plan while they are compiled."""
        q, k, *_ = extents = [_extents(x, self.options.unsqueeze_dim) for x in tensors[:6]]
        facts = device_facts(operands.q.device)
        head, multiprocessors = self._head(operands, extents, facts), facts.multiprocessors
        tokens, k_heads = q.batch * q.length, 0 if operands.k is None else k.heads
        tiles = tiles_of(head, operands.q.element_size(), tokens, q.heads + k_heads, multiprocessors)
        n = self._numbers(operands, q, k_heads, tiles.heads)
        strides = [tuple(stride // head.unit for stride in x.strides) for x in extents]
        at = (tuple(strides[::2]), tuple(strides[1::2]), (self.angles.stride // head.unit, 0), (q.dim // head.unit, 0))
        count = n.groups * -(-tokens // tiles.tokens)
        partials = tensors[0]
        if weights:
            count = programs_of(tiles, tokens, n.groups, multiprocessors)
            self.partials = allocator((2, count, q.dim), torch.float32, operands.q.device)
            partials = self.partials()
        launches = [rotary_heads.bind((count, 1, 1), *tensors, partials, n, at, head, tiles.tokens)]
        if weights:
            grid, constants = (-(-q.dim // SUM_COLS), len(weights[0]), 1), (SUM_PARTS, SUM_COLS, head.early)
            total = sum_partials.with_options(launch_pdl=True) if head.early else sum_partials
            launches.append(total.bind(grid, partials, weights[0], count, q.dim, *constants))
        return launches

    def _head(self, operands: Operands, extents: Sequence[Extents], facts: Device) -> Head:
        options, norm = self.options, operands.q_weight is not None
        half, rest = options.rotary_dim // 2, operands.q.shape[-1] - options.rotary_dim
        strides = (n for x in extents for n in x.strides)
        return Head(
            half, 0 if self.inplace and not norm else rest,
            math.gcd(MULTIPLE, half, rest, self.angles.stride, *strides), options.interleaved,
            operands.cu_seqlens is not None, self.angles.placed, norm, self.backward,
            self.backward and chip_of(facts.capability).tma,
        )  # fmt: skip

    def _numbers(self, operands: Operands, q: Extents, k_heads: int, heads: int) -> Numbers:
        angles, options = self.angles, self.options
        return Numbers(
            q.batch * q.length, q.length, angles.sequences, angles.rows, angles.batch_angles,
            angles.steps(operands, q.length), q.heads, k_heads, heads, -(-(q.heads + k_heads) // heads),
            -1.0 if options.inverse else 1.0, options.eps,
        )  # fmt: skip


_plans: dict[Hashable, Any] = {}  # by what is known of a call


def run_rotary(operands: Operands, options: Options, inplace: bool = False) -> list[Tensor]:
    """`rotary` of plain tensors: q, and k where it is given."""
    key = (signature(*operands), options, inplace)
    plan = _plans.get(key)
    if plan is None:
        check_operands(operands, options)
        check_reachable(operands.q)
        plan = remember(_plans, key, Plan(operands, options, inplace, False))
    return plan(operands, ())


def run_norm_backward(grads: Sequence[Tensor], operands: Operands, options: Options) -> list[Tensor]:
    """Gradients through a rotation and the norm before it: of q, of k where it is given, and of the weights,
    (1 or 2, D). `grads`: of the results."""
    key = (signature(*grads, *operands), options)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, Plan(operands, options, False, True))
    return plan(operands, grads)
