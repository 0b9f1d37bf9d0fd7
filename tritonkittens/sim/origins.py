"""From which parameters of the kernel the address of an access comes: an access through a pointer to one tensor that
lands in another one is out of bounds, although something lies there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .ttgir import Block, Module, Op, Pointer, Tensor, Type

# Operations whose result is one of these operands, or lies in the same tensor
SAME = {
    "tt.addptr": (0,),
    "tt.splat": (0,),
    "tt.broadcast": (0,),
    "tt.expand_dims": (0,),
    "tt.reshape": (0,),
    "tt.trans": (0,),
    "tt.bitcast": (0,),
    "tt.unsplat": (0,),
    "ttg.convert_layout": (0,),
    "arith.select": (1, 2),
    "tt.join": (0, 1),
    "tt.cat": (0, 1),
    "tt.split": (0,),
}
# Operations that access what their first operand points to
ACCESSES = {
    "tt.load",
    "tt.store",
    "tt.atomic_rmw",
    "tt.atomic_cas",
    "tt.atomic_load",
    "tt.atomic_store",
    "tt.atomic_poll",
    "ttg.async_copy_global_to_local",
}


def _is_pointer(kind: Type) -> bool:
    return isinstance(kind, Pointer) or (isinstance(kind, Tensor) and isinstance(kind.element, Pointer))


def origins(module: Module) -> dict[int, frozenset[int]]:
    """Return the positions of the kernel's parameters from which the address of each access may come, by the id of its
    operation. The result omits accesses whose address may come from elsewhere (memory, a number, inline PTX).
    """
    sources: dict[int, list[int]] = defaultdict(list)
    unknown: set[int] = set()
    accesses = []
    for op in module.walk():
        for to, value in _flows(module, op):
            sources[to].append(value)
        if op.name in SAME:
            for result in op.results:
                sources[result] += [op.operands[i] for i in SAME[op.name]]
        elif op.name != "tt.call" and op.name != "ttg.warp_specialize":
            unknown.update(r for r, kind in zip(op.results, op.result_types) if _is_pointer(kind))
        if op.name in ACCESSES:
            accesses.append(op)
    parameters = {slot: i for i, slot in enumerate(module.kernel.regions[0].blocks[0].arguments)}
    found: dict[int, frozenset[int] | None] = {}

    def parameters_of(value: int) -> frozenset[int] | None:
        if value not in found:
            reached, stack, seen = set(), [value], {value}
            while stack:
                slot = stack.pop()
                if slot in unknown or (slot not in parameters and not sources[slot]):
                    break
                if slot in parameters:
                    reached.add(parameters[slot])
                fresh = [s for s in sources[slot] if s not in seen]
                seen.update(fresh)
                stack += fresh
            else:
                found[value] = frozenset(reached)
                return found[value]
            found[value] = None
        return found[value]

    pointers = {id(op): parameters_of(op.operands[0]) for op in accesses}
    return {key: value for key, value in pointers.items() if value is not None}


def _flows(module: Module, op: Op) -> Iterator[tuple[int, int]]:
    """Yield (value, value that it may be) of what an operation passes to blocks, functions and results."""

    def into(block: Block, operands: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        yield from zip(block.arguments, operands)

    if op.name == "cf.br":
        yield from into(op.successors[0], op.operands)
    elif op.name == "cf.cond_br":
        _, yes, no = op.segments
        yield from into(op.successors[0], op.operands[yes])
        yield from into(op.successors[1], op.operands[no])
    elif op.name == "cf.switch":
        segments, at = op.attributes["case_operand_segments"], len(op.operands)
        for size, block in zip(segments[::-1], op.successors[:0:-1]):
            yield from into(block, op.operands[at - size : at])
            at -= size
        yield from into(op.successors[0], op.operands[1:at])
    elif op.name == "tt.call":
        entry = module.functions[op.attributes["callee"].text.lstrip("@")].regions[0].blocks
        yield from into(entry[0], op.operands)
        for block in entry:
            for last in block.operations[-1:]:
                if last.name == "tt.return":
                    yield from zip(op.results, last.operands)
    elif op.name == "ttg.warp_specialize":
        for region in op.regions[:1]:
            for block in region.blocks:
                for last in block.operations[-1:]:
                    if last.name == "ttg.warp_yield":
                        yield from zip(op.results, last.operands)
    elif op.name == "ttg.warp_specialize.partitions":
        for region in op.regions:
            yield from into(region.blocks[0], op.operands)
