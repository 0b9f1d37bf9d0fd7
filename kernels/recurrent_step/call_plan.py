"""What a call for a few rows does: its launch, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.recurrent_step.config import Parts, shape_of
from tritonkittens.kernels.recurrent_step.device.step import recurrent_step
from tritonkittens.launch import device_facts

MULTIPLE = 16  # of elements that strides are known to be multiples of, at most

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Step(NamedTuple):
    """Operands of T rows, and the state before them. None: the operand is absent, the state zeros.

    q, k: (B, T, H, K). v, z: (B, T, HV, V). gates, beta: (B, T, HV). decay, bias: (HV,). skip: (HV,) or (HV, V).
    state: (B, HV, V, K) fp32, the transpose of what `linear_attention` and `gated_delta_rule` take.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None = None
    beta: Tensor | None = None
    decay: Tensor | None = None
    bias: Tensor | None = None
    skip: Tensor | None = None
    z: Tensor | None = None
    state: Tensor | None = None


class Rule(NamedTuple):
    """What a row computes: S ← a S + k uᵀ and o = scale · Sᵀ q; then o + skip · v, and that times silu(z).

    log a = sign · decay · gate, without those that are absent. u = v; with beta, of the delta rule, u = beta · (v -
    (a S)ᵀ k). softplus: a gate is softplus(gate + bias). weights: a gate is clamped to `least` and `most`, and
    multiplies u, as the dt of Mamba-2. log_decay: decay is given as its logarithm. logits: beta is the sigmoid of what
    is given. unit: q and k are divided by their lengths.
    """

    scale: float = 1.0
    sign: float = 1.0
    least: float = 0.0
    most: float = math.inf
    weights: bool = False
    softplus: bool = False
    log_decay: bool = False
    logits: bool = False
    unit: bool = False


def _strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()[:count]


class Plan:
    """The launch of a call of one kind. inplace: the state after is written over that before."""

    def __init__(self, given: Step, rule: Rule, ends_wanted: bool, inplace: bool):
        self.rule, self.inplace, device = rule, inplace, given.q.device
        batches, self.rows, key_heads, self.keys = given.q.shape
        heads, self.values = given.v.shape[2:]
        self.group = heads // max(key_heads, 1)
        self.shape = shape_of(self.keys, self.values, batches * heads, device_facts(device).multiprocessors)
        self.grid = (-(-self.values // self.shape.cols), heads, batches)
        has = (x is not None for x in given[3:])
        self.parts = Parts._make((*has, ends_wanted, *rule[4:]))
        after = (batches, heads, self.values, self.keys)
        self.output = allocator(tuple(given.v.shape), given.v.dtype, device)
        self.after = allocator(after, torch.float32, device)
        self.bound: Callable[..., None] | None = None

    def __call__(self, given: Step) -> tuple[Tensor, Tensor | None]:
        o, after = self.output(), None
        if self.parts.ends:
            after = given.state if self.inplace else self.after()
        if math.prod(self.grid):
            q, k, v, z = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (*given[:3], given.z))
            given = given._replace(q=q, k=k, v=v, z=z)
            tensors = [q if x is None else x for x in (*given, o, after)]
            if self.bound is None:
                self.bound = self._bind(given, tensors)
            self.bound(*tensors)
        return o, after

    def _bind(self, given: Step, tensors: list[Tensor]) -> Callable[..., None]:
        of_rows = [_strides(x, 3) for x in (given.q, given.k, given.v, given.z)]
        unit = math.gcd(MULTIPLE, *(n for strides in of_rows for n in strides))
        at = (
            *(tuple(n // unit for n in strides) for strides in of_rows),
            *(_strides(x, 3) for x in (given.gates, given.beta)),
        )
        skip = (*_strides(given.skip, 2), 0)[:2]
        steps = (*_strides(given.decay, 1), *_strides(given.bias, 1), *skip)
        rule, (parts, cols, warps) = self.rule, self.shape
        return recurrent_step.with_options(num_warps=warps).bind(
            self.grid, *tensors, self.rows, self.keys, self.values, self.group, at, steps, *_strides(given.state, 4),
            rule.scale, (rule.sign, rule.least, rule.most), self.parts, unit, parts, cols,
        )  # fmt: skip


def run_steps(
    given: Step, rule: Rule, ends_wanted: bool, check: Callable[[], None], inplace: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The results of a few rows, (B, T, HV, V), and the states after, (B, HV, V, K), where they are wanted.

    check: raises TypeError or ValueError for operands that the kernel does not take. inplace: the states after replace
    those before, which are contiguous.
    """
    key = (signature(*given), rule, ends_wanted, inplace)
    plan = _plans.get(key)
    if plan is None:
        check()
        plan = remember(_plans, key, Plan(given, rule, ends_wanted, inplace))
    return plan(given)
