"""SASS as nvdisasm prints it: instructions, basic blocks, dominators and loops."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

Frames = tuple[tuple[str, int], ...]  # (file, line), innermost call first

# Every tensor-core family: mma.sync, wgmma, tcgen05.
MMA = re.compile(r"^(?:[HIQDBO]MMA|[HIQB]GMMA|UTC\w*MMA)$")

_FRAME = re.compile(r'//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_LABEL = re.compile(r"^(?P<label>\.L_\w+|[\w.$]+):")
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
_TARGET = re.compile(r"`\((?P<label>[^)]+)\)")
_BRANCH_TABLE = re.compile(r"BRANCH_TARGETS (?P<labels>[^\"]+)")
_LIVE = re.compile(r"//\s*\|\s*(?P<live>\d*)\s*\|")

_ENDS = {"BRA", "BRX", "BRXU", "JMP", "JMX", "EXIT", "RET", "BSYNC"}  # opcodes that end a basic block


@dataclass(frozen=True)
class Instruction:
    """An instruction of the machine code."""

    address: int
    opcode: str  # with its modifiers, e.g. HGMMA.64x256x16.F32.BF16
    operands: str
    guarded: bool
    targets: tuple[str, ...]
    frames: Frames
    live: int | None  # general registers that hold a value at this instruction

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def is_mma(self) -> bool:
        """Whether it is a matrix product of the tensor cores."""
        return bool(MMA.match(self.base))

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        if self.base in {"BRX", "BRXU", "JMX"}:
            return False
        if self.base in {"BRA", "JMP"} and re.match(r"[!~]?U?[PR]", self.operands):
            # `BRA P0, label`, `BRA.U UP0, label` and `BRA.DIV UR4, label` branch on an operand instead of a guard
            return True
        return self.base not in _ENDS or self.guarded or (self.base == "BSYNC" and not self.targets)


def parse(lines: str, lives: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return instructions in address order, and the index of each label's instruction.

    `lines` is `nvdisasm -c -gi` (source lines), `lives` is `nvdisasm -c -plr -lrm count` (live registers). nvdisasm
    prints only one of the two at a time.
    """
    live = {}
    for line in lives.splitlines():
        found, column = _INSTRUCTION.search(line), _LIVE.search(line)
        if found and column:
            live[int(found["address"], 16)] = int(column["live"] or 0)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    frames: list[tuple[str, int]] = []
    complete = True  # whether the frames collected so far already belong to an instruction
    rejoins: dict[str, tuple[str, ...]] = {}
    in_code = False
    for line in lines.splitlines():
        if line.split()[:1] == [".section"]:
            in_code = ".text." in line
        elif not in_code:
            continue
        elif frame := _FRAME.search(line):
            frames, complete = ([] if complete else frames), False
            frames.append((frame["file"], int(frame["line"])))
        elif label := _LABEL.match(line):
            labels[label["label"]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            complete = True
            table = _BRANCH_TABLE.search(line)
            opcode, operands = found["opcode"], found["operands"].strip()
            targets = tuple(table["labels"].strip().split(",")) if table else tuple(_TARGET.findall(operands))
            # names the target of the BSYNC of the same barrier register, and does not branch itself
            if opcode.startswith("BSSY"):
                rejoins[operands.split(",")[0]], targets = targets, ()
            elif opcode.startswith("BSYNC"):
                targets = rejoins.get(operands, ())
            elif opcode.startswith("RET"):  # names the function that it leaves, not its target
                targets = ()
            address = int(found["address"], 16)
            instructions.append(
                Instruction(address, opcode, operands, bool(found["guard"]), targets, tuple(frames), live.get(address))
            )
    return instructions, labels


@dataclass(frozen=True)
class Loop:
    """A natural loop: its first block and all of its blocks."""

    header: int
    blocks: frozenset[int]


class Graph:
    """The control flow of one kernel: `blocks[i]` is a list of instructions, `successors[i]` the blocks that may
    follow, 0 the entry."""

    def __init__(self, instructions: list[Instruction], labels: dict[str, int]):
        starts = {0} | {i for i in labels.values() if i < len(instructions)}
        for i, instruction in enumerate(instructions):
            if instruction.base in _ENDS or instruction.targets:
                starts.add(i + 1)
        bounds = sorted(starts | {len(instructions)})
        if bounds[-1] > len(instructions):
            bounds.pop()
        self.blocks = [instructions[a:b] for a, b in zip(bounds, bounds[1:])]
        at = {a: n for n, a in enumerate(bounds[:-1])}
        self.successors: list[list[int]] = []
        for n, block in enumerate(self.blocks):
            last = block[-1]
            # control returns from the label of a call or a collective, so the next instruction follows as well
            following = [at[labels[t]] for t in last.targets if labels.get(t) in at]
            if last.falls_through and n + 1 < len(self.blocks):
                following.append(n + 1)
            self.successors.append(list(dict.fromkeys(following)))

    def reachable(self, start: int, stop: Iterable[int] = ()) -> set[int]:
        """Return the blocks that can run after `start` begins without running one of `stop`, including `start`."""
        barred, seen, todo = set(stop), {start}, [start]
        while todo:
            for n in self.successors[todo.pop()]:
                if n not in seen and n not in barred:
                    seen.add(n)
                    todo.append(n)
        return seen

    @functools.cached_property
    def _order(self) -> list[int]:
        """Reverse postorder."""
        order: list[int] = []
        seen = {0}
        stack = [(0, iter(self.successors[0]))]
        while stack:
            node, following = stack[-1]
            for n in following:
                if n not in seen:
                    seen.add(n)
                    stack.append((n, iter(self.successors[n])))
                    break
            else:
                order.append(node)
                stack.pop()
        return order[::-1]

    @functools.cached_property
    def predecessors(self) -> dict[int, list[int]]:
        """The blocks from which each reachable block may be entered."""
        before: dict[int, list[int]] = {n: [] for n in self._order}
        for n in self._order:
            for following in self.successors[n]:
                before[following].append(n)
        return before

    @functools.cached_property
    def _immediate_dominators(self) -> dict[int, int]:
        """Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm (2001)."""
        rank = {n: i for i, n in enumerate(self._order)}
        parent = {0: 0}
        changed = True
        while changed:
            changed = False
            for n in self._order[1:]:
                known = [p for p in self.predecessors[n] if p in parent]
                new = known[0]
                for other in known[1:]:
                    while new != other:
                        if rank[new] > rank[other]:
                            new = parent[new]
                        else:
                            other = parent[other]
                if parent.get(n) != new:
                    parent[n] = new
                    changed = True
        return parent

    def dominators(self, block: int) -> list[int]:
        """Return the blocks on every path from the entry to `block`, from `block` to the entry."""
        chain = [block]
        while chain[-1] != 0:
            chain.append(self._immediate_dominators[chain[-1]])
        return chain

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """Return the natural loops; loops with the same header are merged."""
        bodies: dict[int, set[int]] = {}
        for tail in self._order:
            for header in self.successors[tail]:
                if header not in self.dominators(tail):
                    continue
                body = bodies.setdefault(header, {header})
                todo = [tail]
                while todo:
                    n = todo.pop()
                    if n not in body:
                        body.add(n)
                        todo.extend(self.predecessors[n])
        return [Loop(header, frozenset(body)) for header, body in sorted(bodies.items())]

    @functools.cached_property
    def main_loops(self) -> list[Loop]:
        """Return the innermost loops with a tensor-core instruction. Inner loops without one (a spin on a barrier)
        belong to them.
        """
        heavy = [loop for loop in self.loops if any(i.is_mma for n in loop.blocks for i in self.blocks[n])]
        return [loop for loop in heavy if not any(other.blocks < loop.blocks for other in heavy)]
