"""What a call of the scan of Mamba-2 does: its launches, and the memory of its results."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._sequences import most_of, packed, present, transposed
from tritonkittens.kernels._tensors import remember, signature
from tritonkittens.kernels.linear_attention import call_plan as linear
from tritonkittens.kernels.linear_attention.config import HEADS, ROWS, WIDEST
from tritonkittens.kernels.mamba2.checks import Operands, check
from tritonkittens.kernels.mamba2.device.scan import MambaScan, sum_steps
from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step, run_steps
from tritonkittens.kernels.recurrent_step.config import is_short

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Plan(linear.Plan):
    """The launches of a call of one kind: those of linear attention, with other sums."""

    template = MambaScan

    def sums(self, gates: tuple[Operands, bool, tuple[float, float]], ends: Tensor) -> list[Tensor]:
        heads = gates[0].dt.shape[2]
        sums = [self.empty(heads, self.slots, ROWS) for _ in range(2)]
        launch_steps(sum_steps, [], [*sums, sums[0]], *gates, ends, False)
        return sums


def launch_steps(
    kernel: Any, read: list[Tensor], written: list[Tensor], given: Operands, softplus: bool,
    limits: tuple[float, float], ends: Tensor, *kinds: bool,
) -> None:  # fmt: skip
    """Launch a kernel of steps: a program has a chunk of `ROWS` rows and `HEADS` heads."""
    dt, sequences = given.dt.flatten(0, 1), ends.shape[0]
    (rows, heads), most = dt.shape, most_of(sequences)
    slots = rows // ROWS + sequences
    A = given.A.contiguous()
    bias = A if given.dt_bias is None else given.dt_bias.contiguous()
    tensors = (*read, dt, A, bias, ends, *written)
    numbers = (sequences, heads, slots, *dt.stride(), *limits, softplus, given.dt_bias is not None, most, *kinds)
    kernel.bind((slots, -(-heads // HEADS), 1), *tensors, *numbers)(*tensors)


def are_paired(x: Tensor, B: Tensor) -> bool:
    """Does a block compute two neighbouring heads, a consumer each? They share the tiles of B and C."""
    (_, _, heads, columns), (_, _, groups, states) = x.shape, B.shape
    return columns == ROWS < states <= WIDEST and heads // groups % 2 == 0 and x.stride()[2:] == (columns, 1)


def run(
    given: Operands, softplus: bool, limits: tuple[float, float], ends_wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """`mamba_chunk_scan` of plain tensors."""
    x, dt, A, B, C, D, z, bias, state, starts = given
    if is_short(x, starts):
        step = Step(C, B, x, gates=dt, decay=A, bias=bias, skip=D, z=z, state=state)
        rule = Rule(1.0, 1.0, *limits, weights=True, softplus=softplus)
        return run_steps(step, rule, ends_wanted, functools.partial(check, given, limits))
    key = (signature(*given), softplus, limits, ends_wanted)
    plan = _plans.get(key)
    if plan is None:
        check(given, limits)
    paired = are_paired(x, B)
    if paired:
        x, z, state = linear.pairs(x, 2), linear.pairs(z, 2), linear.pairs(state, 1)
    if plan is None:
        of_results: dict[str, Any] = dict(silu=z is not None)
        if D is not None:
            of_results |= dict(skip=tk.from_torch(D.dtype), skips_columns=D.ndim == 2)
        kind = dict(weighted=True, paired=paired)
        plan = remember(_plans, key, Plan(C, x, state is not None, ends_wanted, starts, kind, of_results))
    beside = present(None if z is None else packed(z), D)
    y, after = plan(C, B, x, (given, softplus, limits), transposed(state), starts, 1.0, beside)
    return y.view(given.x.shape), None if after is None else after.mT.view(-1, *given.x.shape[2:], C.shape[-1])
