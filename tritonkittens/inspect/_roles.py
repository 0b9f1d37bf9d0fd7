"""Which SASS belongs to which warp-specialised partition.

Triton lowers `warp_specialize` to one function: the default partition's warps branch off at the start; every worker warp loops over
"barrier 1, read my state byte from shared memory, jump to that state's partition" (its last state returns). So a partition is what can
run between such a jump and the next reading of the state, and it is recognised by its source lines: ptxas lays the states out in any order.
"""

from collections.abc import Sequence

from ._sass import Frames, Graph, Instruction
from ._ttgir import Module, Partition


def distinct(functions: Sequence[str]) -> list[str]:
    """Names of roles after the functions that they run, without leading underscores; numbered where several run the same."""
    names = [name.strip("_") for name in functions]
    return [f"{name}{names[:k].count(name)}" if names.count(name) > 1 else name for k, name in enumerate(names)]


def _starts_partition(instruction: Instruction) -> bool:
    return instruction.base == "USETMAXREG" or (instruction.base == "BAR" and instruction.operands.split(",")[0].strip() in {"0x1", "1"})


def _dispatch(graph: Graph) -> int | None:
    """The block where worker warps read their state: the one nearest the entry that reads a byte of shared memory behind barrier 1."""
    reads = [n for n, block in enumerate(graph.blocks) if n in graph.predecessors and any(i.opcode.startswith("LDS.U8") for i in block)]
    behind = [n for n in reads if any(_starts_partition(i) for d in graph.dominators(n)[:3] for i in graph.blocks[d])]
    return min(behind, key=lambda n: len(graph.dominators(n)), default=None)


def _entries(graph: Graph, dispatch: int) -> list[int]:
    """The first block of each state that does something, in the order of the jump table where there is one."""
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
    """Blocks of each role: 0 is the default partition (or the whole kernel), k + 1 is worker partition k.

    A role that cannot be told is absent. A block that ptxas made serve several roles is in each of them.
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
    """The share of a region's instructions, of those with a source line inside the kernel, that come from lines of `partition`."""
    frames: list[Frames] = [inside for n in region for i in graph.blocks[n] if (inside := module.within(i.frames))]
    return sum(f in partition.frames for f in frames) / len(frames) if frames else 0.0


def registers_in_force(graph: Graph, blocks: set[int], compiled: int) -> int | None:
    """The limit under which most of a role's instructions run: the last `setmaxnreg` before them, `compiled` where there was none.

    Instructions that different paths reach with different limits do not count; None if there are only such.
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
