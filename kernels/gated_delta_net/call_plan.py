"""What a call of the gated delta rule does: its launches, and the memory of its results."""

from __future__ import annotations

import functools
from collections.abc import Hashable

from torch import Tensor

from tritonkittens.kernels._sequences import SequencePlan, begin_states, packed, present, transposed
from tritonkittens.kernels._tensors import remember, signature
from tritonkittens.kernels.gated_delta_net.checks import Operands, check
from tritonkittens.kernels.gated_delta_net.config import shape_of
from tritonkittens.kernels.gated_delta_net.device.delta import GatedDeltaNet, invert_chunks
from tritonkittens.kernels.linear_attention.call_plan import sums_of
from tritonkittens.kernels.linear_attention.config import ROWS
from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step, run_steps
from tritonkittens.kernels.recurrent_step.config import is_short
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class ChunksPlan(SequencePlan):
    """The launches of a call of one kind that concern chunks alone."""

    def __init__(self, given: Operands):
        super().__init__(given.q, given.v, given.cu_seqlens)
        self.numbers["span"] = max(self.total, 1)
        heads, multiprocessors = self.sequences * self.heads, device_facts(self.device).multiprocessors
        self.knobs |= shape_of(self.keys, self.values, heads, multiprocessors)._asdict()

    def chunks(self, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        """G, T, P and B of all chunks."""
        sums = sums_of(g.flatten(0, 1), ends, self.empty(self.heads, self.slots, ROWS))
        t, p = (self.empty(self.heads, self.slots * ROWS, ROWS, dtype=k.dtype) for _ in range(2))
        of_rows, beta = self.empty(self.heads, self.slots, 4 * ROWS), beta.flatten(0, 1)
        q, k = q.transpose(0, 1), k.transpose(0, 1)
        given = (q, k, beta, ends, sums, t, p, of_rows)
        strides = (*q.stride()[:2], *k.stride()[:2], *beta.stride())
        numbers = (self.sequences, self.numbers["group"], self.slots, self.keys, *strides)
        constants = (self.knobs["key_dim"], self.knobs["most"])
        invert_chunks.bind((self.slots, self.heads, 1), *given, *numbers, *constants)(*given)
        return sums, t, p, of_rows


class Plan(ChunksPlan):
    """The launches of a call of one kind."""

    def __init__(self, given: Operands, ends_wanted: bool):
        super().__init__(given)
        self.ends_wanted = ends_wanted
        begins = given.initial_state is not None
        self.template = GatedDeltaNet(**self.knobs, begins=begins, ends_wanted=ends_wanted)

    def __call__(self, given: Operands, scale: float) -> tuple[Tensor, Tensor | None]:
        ends = self.ends_of(given.cu_seqlens)
        home = self.rows(given.v, ends, self.heads, self.values)
        before = transposed(given.initial_state)
        after = self.empty(self.sequences, self.heads, self.values, self.keys) if self.ends_wanted else None
        begin_states(present(after), present(before))
        if self.total:
            q, k, v = (packed(x) for x in given[:3])
            _, *chunks = self.chunks(q, k, given.g, given.beta, ends)
            states = present(after, before)
            self.template(q, k, v, *chunks, home.transpose(0, 1), *states, ends, scale=scale, **self.numbers)
        o = home if home.is_contiguous() else home.contiguous()
        return o.view(given.v.shape), transposed(after)


def run(given: Operands, scale: float, ends_wanted: bool) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule` of plain tensors."""
    q, k, v, g, beta, state, starts = given
    if is_short(q, starts):
        step = Step(q, k, v, gates=g, beta=beta, state=transposed(state))
        o, after = run_steps(step, Rule(scale), ends_wanted, functools.partial(check, given))
        return o, transposed(after)
    key = (signature(*given), ends_wanted)
    plan = _plans.get(key)
    if plan is None:
        check(given)
        plan = remember(_plans, key, Plan(given, ends_wanted))
    return plan(given, scale)
