"""Assignment of SASS to warp-specialised partitions.

Triton lowers `warp_specialize` to one function. The default partition's warps branch off at the start. Every worker
warp loops: wait at barrier 1, read its state byte from shared memory, and jump to that state's partition. The last
state returns.
So a partition is the code between such a jump and the next read of the state. ptxas places the states in any order,
so source lines identify the partition.
"""

from collections.abc import Sequence

from ._sass import Frames, Graph, Instruction
from ._ttgir import Module, Partition


def distinct(functions: Sequence[str]) -> list[str]:
    """Return role names after the functions that they run, without leading underscores; numbered where several run
    the same function.
    """
    names = [name.strip("_") for name in functions]
    return [f"{name}{names[:k].count(name)}" if names.count(name) > 1 else name for k, name in enumerate(names)]


def _starts_partition(instruction: Instruction) -> bool:
    return instruction.base == "USETMAXREG" or (
        instruction.base == "BAR" and instruction.operands.split(",")[0].strip() in {"0x1", "1"}
    )


def _dispatch(graph: Graph) -> int | None:
    """Return the block where worker warps read their state: the one nearest the entry that reads a byte of shared
    memory after barrier 1.
    """
    reads = [
        n
        for n, block in enumerate(graph.blocks)
        if n in graph.predecessors and any(i.opcode.startswith("LDS.U8") for i in block)
    ]
    behind = [n for n in reads if any(_starts_partition(i) for d in graph.dominators(n)[:3] for i in graph.blocks[d])]
    return min(behind, key=lambda n: len(graph.dominators(n)), default=None)


def _entries(graph: Graph, dispatch: int) -> list[int]:
    """Return the first non-trivial block of each state, in the order of the jump table where there is one."""
    seen, entries, todo = set(graph.dominators(dispatch)), [], list(graph.successors[dispatch])
    while todo:
        n = todo.pop(0)
        if n in seen:
            continue
        seen.add(n)
        if any(_starts_partition(i) for i in graph.blocks[n]):
            entries.append(n)
        else:
            todo.extend(graph.successors[n])
    return entries


def assign(graph: Graph, module: Module) -> dict[int, set[int]]:
    """Return the blocks of each role: 0 is the default partition (or the whole kernel), k + 1 is worker partition k.

    A role that cannot be identified is absent. A block that ptxas shares between roles is in each of them.
    """
    everything = graph.reachable(0)
    if not module.specialized:
        return {0: everything}
    dispatch = _dispatch(graph)
    if dispatch is None:
        return {}
    before = graph.dominators(dispatch)
    entries = _entries(graph, dispatch)
    regions = [graph.reachable(entry, {*before, *entries} - {entry}) for entry in entries]
    roles = {0: (graph.reachable(0, [dispatch]) - set(before)) | {0}}
    free = list(range(len(regions)))
    for k, partition in enumerate(module.workers):
        fits = {r: _explained(graph, regions[r], partition, module) for r in free}
        best = max(free, key=lambda r: fits[r], default=None)
        if best is not None and fits[best] > 0:
            free.remove(best)
            roles[k + 1] = regions[best]
    return roles


def _explained(graph: Graph, region: set[int], partition: Partition, module: Module) -> float:
    """Return the share of a region's instructions that come from lines of `partition`, among those with a source line
    inside the kernel.
    """
    frames: list[Frames] = [inside for n in region for i in graph.blocks[n] if (inside := module.within(i.frames))]
    return sum(f in partition.frames for f in frames) / len(frames) if frames else 0.0


def registers_in_force(graph: Graph, blocks: set[int], compiled: int) -> int | None:
    """Return the register limit of most of a role's instructions: the last `setmaxnreg` before them, or `compiled`
    without one.

    Instructions with different limits on different paths do not count. None if there are only such.
    """
    state: dict[int, set[int]] = {0: {compiled}}
    todo = [0]
    while todo:
        n = todo.pop()
        after = set(state[n])
        for i in graph.blocks[n]:
            after = _after(i, after)
        for following in graph.successors[n]:
            if not after <= state.setdefault(following, set()):
                state[following] |= after
                todo.append(following)
    weight: dict[int, int] = {}
    for n in blocks & state.keys():
        now = set(state[n])
        for i in graph.blocks[n]:
            now = _after(i, now)
            if len(now) == 1:
                value = next(iter(now))
                weight[value] = weight.get(value, 0) + 1
    return max(weight, key=lambda v: weight[v]) if weight else None


def _after(instruction: Instruction, limits: set[int]) -> set[int]:
    if instruction.base != "USETMAXREG":
        return limits
    return {int(instruction.operands.split(",")[-1].strip(), 16)}
