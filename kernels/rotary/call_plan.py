"""What a call of `rotary` does: its launches, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._rows import MULTIPLE
from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.norm.call_plan import SUM_COLS, SUM_PARTS
from tritonkittens.kernels.norm.device.backward import sum_partials
from tritonkittens.kernels.rotary.checks import check_operands, check_reachable
from tritonkittens.kernels.rotary.config import Head, programs_of, tiles_of
from tritonkittens.kernels.rotary.device.backward import norm_rotary_backward
from tritonkittens.kernels.rotary.device.rotary import rotary_heads
from tritonkittens.launch import device_facts


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
    strides = result_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride()
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
    """What both directions share: the numbers and constants of their kernels."""

    def __init__(self, operands: Operands, options: Options):
        self.angles, self.options = Angles(operands), options
        self.bound: list[Callable[..., None]] = []

    def head(self, operands: Operands, tensors: Sequence[Tensor], copies: bool) -> Head:
        q, options = operands.q, self.options
        half, rest, stride = options.rotary_dim // 2, q.shape[-1] - options.rotary_dim, self.angles.stride
        strides = (n for x in tensors for n in _extents(x, options.unsqueeze_dim).strides)
        return Head(
            half, rest if copies else 0, math.gcd(MULTIPLE, half, rest, stride, *strides), options.interleaved,
            operands.cu_seqlens is not None, self.angles.placed, operands.q_weight is not None,
        )  # fmt: skip

    def numbers(self, operands: Operands, tiles: Any) -> Numbers:
        angles, options = self.angles, self.options
        q, k = (_extents(x, options.unsqueeze_dim) for x in (operands.q, operands.heads[-1]))
        k_heads = 0 if operands.k is None else k.heads
        return Numbers(
            q.batch * q.length, q.length, angles.sequences, angles.rows, angles.batch_angles,
            angles.steps(operands, q.length), q.heads, k_heads, tiles.heads, -(-(q.heads + k_heads) // tiles.heads),
            -1.0 if options.inverse else 1.0, options.eps,
        )  # fmt: skip

    def strides(self, tensors: Sequence[Tensor], unit: int) -> tuple[tuple[int, ...], ...]:
        """Strides of tensors in units, and of cos and sin."""
        extents = [_extents(x, self.options.unsqueeze_dim) for x in tensors]
        return (*(tuple(n // unit for n in x.strides) for x in extents), (self.angles.stride // unit, 0))

    @staticmethod
    def tiles(operands: Operands, options: Options, head: Head) -> Any:
        q = _extents(operands.q, options.unsqueeze_dim)
        count = sum(_extents(x, options.unsqueeze_dim).heads for x in operands.heads)
        facts = device_facts(operands.q.device)
        return tiles_of(head, operands.q.element_size(), q.batch * q.length, count, facts.multiprocessors)


class Rotate(Plan):
    """The launch of a rotation of tensors of one kind, in place or not."""

    def __init__(self, operands: Operands, options: Options, inplace: bool):
        super().__init__(operands, options)
        self.inplace = inplace
        self.results = [_result(x) for x in operands.heads]
        self.is_empty = not any(x.numel() for x in operands.heads)

    def __call__(self, operands: Operands) -> list[Tensor]:
        """Return q and k, where it is given, rotated; in place these tensors themselves."""
        given = operands.heads
        read = [_ready(x) for x in given]
        found = read if self.inplace else [allocate() for allocate in self.results]
        if not self.is_empty:
            heads = (read[0], read[-1], found[0], found[-1])
            tensors = (*heads, *self.angles.ready(operands))
            if not self.bound:
                head = self.head(operands, heads, not self.inplace or operands.q_weight is not None)
                tiles = self.tiles(operands, self.options, head)
                n = self.numbers(operands, tiles)
                grid = (n.groups * -(-n.tokens // tiles.tokens), 1, 1)
                self.bound = [rotary_heads.bind(grid, *tensors, n, self.strides(heads, head.unit), head, tiles.tokens)]
            self.bound[0](*tensors)
        if not self.inplace:
            return found
        return [x if x is y else x.copy_(y) for x, y in zip(given, found, strict=True)]


class NormBackward(Plan):
    """The launches of a backward with norms for tensors of one kind."""

    def __init__(self, grads: tuple[Tensor, Tensor | None], operands: Operands, options: Options):
        super().__init__(operands, options)
        weight = operands.q_weight
        assert weight is not None
        self.results = [_result(x) for x in operands.heads]
        self.weights = allocator((len(operands.heads), weight.shape[0]), weight.dtype, weight.device)
        self.is_empty = not any(x.numel() for x in operands.heads)

    def __call__(self, grads: tuple[Tensor, Tensor | None], operands: Operands) -> list[Tensor]:
        """Return gradients of q and k, where it is given, and those of the weights as one tensor."""
        found, weights = [allocate() for allocate in self.results], self.weights()
        if self.is_empty:
            return [*found, weights.zero_()]
        read = [_ready(x) for x in operands.heads]
        given = [_ready(g) for g in grads if g is not None]
        heads = (read[0], read[-1], given[0], given[-1], found[0], found[-1])
        tensors = (*heads, *self.angles.ready(operands))
        if not self.bound:
            self._bind(operands, heads, tensors, weights)
        partials = self.partials()
        self.bound[0](*tensors, partials)
        self.bound[1](partials, weights)
        return [*found, weights]

    def _bind(self, operands: Operands, heads: Sequence[Tensor], tensors: Sequence[Tensor], weights: Tensor) -> None:
        head = self.head(operands, heads, True)
        tiles = self.tiles(operands, self.options, head)
        n, dim = self.numbers(operands, tiles), weights.shape[1]
        count = programs_of(tiles, n.tokens, n.groups, device_facts(weights.device).multiprocessors)
        self.partials = allocator((2, count, dim), torch.float32, weights.device)
        partials = self.partials()
        self.bound = [
            norm_rotary_backward.bind(
                (count, 1, 1), *tensors, partials, n, self.strides(heads, head.unit), dim // head.unit, head,
                tiles.tokens,
            ),
            sum_partials.bind(
                (-(-dim // SUM_COLS), weights.shape[0], 1), partials, weights, count, dim, SUM_PARTS, SUM_COLS
            ),
        ]  # fmt: skip


_plans: dict[Hashable, Any] = {}  # by what is known of a call


def run_rotary(operands: Operands, options: Options, inplace: bool = False) -> list[Tensor]:
    """`rotary` of plain tensors: q, and k where it is given."""
    key = (signature(*operands), options, inplace)
    plan = _plans.get(key)
    if plan is None:
        check_operands(operands, options)
        check_reachable(operands.q)
        plan = remember(_plans, key, Rotate(operands, options, inplace))
    return plan(operands)


def run_norm_backward(grads: tuple[Tensor, Tensor | None], operands: Operands, options: Options) -> list[Tensor]:
    """Gradients through a rotation and the norm before it: of q, of k where it is given, and of the weights,
    (1 or 2, D)."""
    key = (signature(*grads, *operands), options)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, NormBackward(grads, operands, options))
    return plan(grads, operands)
