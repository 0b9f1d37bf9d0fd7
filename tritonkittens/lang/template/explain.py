"""What was chosen for a template on an architecture, and why, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritonkittens.arch import chip_of
from tritonkittens.lang.core.resources import tensor_columns
from tritonkittens.lang.template.smem_plan import MANY_STAGES, Placement
from tritonkittens.lang.types.tiles import TENSOR_ROWS

FULL_RATE_ROWS = 128  # of a product into tensor memory

if TYPE_CHECKING:
    from tritonkittens.lang.template.template import lcf


def explained(T: lcf, fitted: lcf, arch: int) -> str:
    """The text of `explain()`. `fitted`: the template that compiled, where it has fewer stages than this one would
    have."""
    placed = fitted.placement(arch)
    return "\n".join(
        [
            f"{type(T).__name__} on sm_{arch}",
            *_ring(T, placed, arch, fitted is not T),
            *_tensor_memory(T, arch),
            *(f"  on mma.sync instead of tcgen05: {product}" for product in fitted._fallbacks.get(arch, ())),
            *_registers(T, arch),
            *_tasks(T),
            *(line for extension in T.extensions for line in extension.explained_lines(fitted, arch)),
            *_clusters(T, placed, arch),
        ]
    )


def _ring(T: lcf, placed: Placement, arch: int, is_fitted: bool) -> list[str]:
    stage = ", ".join(f"{n} {tile!r}" for n, tile in T.stored(arch).ring)
    why = "given" if T.stages is not None else f"as many as fit beside the other tiles, at most {MANY_STAGES}"
    if is_fitted:
        first = T.placement(arch)
        tried = f"{first.stages}" if first.stages != placed.stages else f"{first.stages} beside the epilogue tiles"
        why = (
            f"{tried} did not compile: the compiler exchanges values between threads through shared memory; "
            "`spare` in the layout keeps bytes for that"
        )
    lines = [f"  stages {placed.stages} ({why}): a stage is {stage}"]
    if T._plan.epilogue:
        place = (
            "over the scratch tiles"
            if placed.over_scratch is not None
            else ("beside the ring, so that their stores overlap with the next task")
            if placed.over_ring is None
            else (f"over the ring from stage {placed.safe_stages} on: beside it there is room for too few stages")
        )
        tiles = ", ".join(f"{n} {tile!r}" for n, tile in T._plan.epilogue)
        lines.append(f"  epilogue tiles {place}: {tiles} for each of {T.consumers} consumers")
    return lines


def _tensor_memory(T: lcf, arch: int) -> list[str]:
    if not T.has_mma_warp(arch):
        other = [f"{n} of {tile.rows} rows" for n, tile in T._plan.accumulators if tile.rows not in TENSOR_ROWS]
        if not other or not chip_of(arch).tcgen05:
            return []
        rows = " or ".join(map(str, TENSOR_ROWS))
        return [f"  accumulators are in registers: tensor memory has tiles of {rows} rows, not {', '.join(other)}"]
    slots = T.accumulator_slots
    why = (
        "one for each consumer"
        if T.pingpong
        else "a task's sums are stored while the next task's products run"
        if slots > 1
        else f"two do not fit into {tensor_columns(T.blocks_per_sm)} columns, so products wait until the sums are read"
    )
    lines = [
        f"  an MMA warp issues the products; {slots} tile{'s' if slots > 1 else ''} of tensor memory for each "
        f"accumulator ({why})"
    ]
    if T.pairs(arch):
        halved = ", ".join(T._plan.multicast)
        lines.append(f"  CTA pairs: one MMA multiplies 128 rows of each CTA; each loads half the columns of {halved}")
    elif T.cluster == 2:
        lines.append(f"  no CTA pair, which needs {T._pair_parts[1]}")
    half = [n for n, tile in T._plan.accumulators if tile.rows % FULL_RATE_ROWS]
    if half:
        lines.append(
            f"  products of {', '.join(half)} run at half the rate of the tensor cores: one needs {FULL_RATE_ROWS} rows"
        )
    return lines


def _registers(T: lcf, arch: int) -> list[str]:
    registers = T.registers(arch)
    given = (
        "given"
        if T.consumer_registers
        else "what the block's share of the register file leaves"
        if T.reallocates
        else ("an equal share is enough, and spares moving them")
    )
    return [
        f"  registers {registers[0]} a consumer thread ({given}), {registers[-1]} of the other roles; "
        f"{T.blocks_per_sm} block(s) an SM"
    ]


def _tasks(T: lcf) -> list[str]:
    share = "a task each" if T.pingpong else "one task together"
    once = ", no loop over tasks" if T.one_tile_per_block else ""
    lines = [f"  {T.consumers} consumer warpgroup(s) take {share}; {T.schedule!r}, {T.order!r}{once}"]
    return lines + ["  a warp of its own loads lagged tiles"] * T.lagged_producer


def _clusters(T: lcf, placed: Placement, arch: int) -> list[str]:
    lines = []
    if T.staggers(arch):
        lines.append(
            f"  each consumer lets the one ahead end a long task first, {placed.stages - 1} iterations before its own "
            "end; those hide its results"
        )
    if T.cluster > 1 and not T.pairs(arch):
        lines.append(f"  clusters of {T.cluster} blocks load {', '.join(T._plan.multicast) or 'nothing'} together")
    if T.sharers > 1:
        what = "parts" if T._plan.merged else "sums"
        lines.append(
            f"  clusters of {T.sharers} blocks share a task's iterations; {T.received} bytes for the {what} that they "
            "send each other"
        )
    return lines
