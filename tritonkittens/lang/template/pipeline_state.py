"""The slots of a ring and their phases: one parity bit a slot, which its use turns."""

import triton
import triton.language as tl


@triton.jit
def phase_before(phases, slot):
    """The phase that a slot had before its bit was turned."""
    return ((phases >> slot) & 1) ^ 1


@triton.jit
def next_slot(slot, phases, STAGES: tl.constexpr):
    """The slot after `slot`, and the phases after its use: one parity bit a slot."""
    return tl.where(slot + 1 == STAGES, 0, slot + 1), phases ^ (1 << slot)


@triton.jit
def parity_of_uses(phases, STAGES: tl.constexpr):
    """Of how often slots were used in all, where no phase was turned at first, whether that is odd."""
    uses = phases
    for slot in tl.static_range(1, STAGES):
        uses = uses ^ (phases >> slot)
    return uses & 1


@triton.jit
def skip_slots(slot, phases, count, STAGES: tl.constexpr):
    """The same after `count` slots."""
    ALL: tl.constexpr = (1 << STAGES) - 1
    rest = count % STAGES
    part = ((1 << rest) - 1) << slot
    part = (part | (part >> STAGES)) & ALL
    whole = tl.where((count // STAGES) % 2 == 1, ALL, 0)
    after = slot + rest
    return tl.where(after >= STAGES, after - STAGES, after), phases ^ whole ^ part
