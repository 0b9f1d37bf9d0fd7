"""A kernel's TTGIR text for the inspector: source locations, allocations and their layouts, warp-specialised
partitions.
"""

import re
from dataclasses import dataclass, field

from ._sass import Frames

_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_FILE = re.compile(r'^"([^"]*)":(\d+):\d+')
_NAMED = re.compile(r'^"([^"]*)"\((.*)\)$')
_LAYOUT = re.compile(r"^#(\w+) = #(ttn?g)\.(\w+)<(.*)>$")
_TRAILING_LOC = re.compile(r"loc\((#loc\d*|unknown)\)\s*$")
_ALLOC = re.compile(
    r"^\s*%([\w.-]+)(?::\d+)? = (ttg\.local_alloc|ttng\.tmem_alloc)\b.*?!ttg\.memdesc<((?:\d+x)+)([A-Za-z]\w*), #(\w+)"
)
_CONSTANT = re.compile(r"^\s*%([\w.-]+) = arith\.constant ")
_INDEX = re.compile(r"ttg\.memdesc_index %([\w.-]+)\[%([\w.-]+)\]")
_SPECIALIZE = re.compile(r"^(\s*)ttg\.warp_specialize\((.*?)\)(?: attributes \{(.*)\})?")
_DEFAULT = re.compile(r"^\s*default \{")
_PARTITION = re.compile(r"^\s*partition(\d+)\((.*)\) num_warps\((\d+)\)")
# module.function__types of its arguments
_CALL = re.compile(r'^\s*(?:%[^=]* = )?tt\.call @"?(?:(?:\w+|<locals>)\.)*?(_*[A-Za-z]\w*?)__(?!\.)')


@dataclass(frozen=True)
class Layout:
    """A layout attribute: its mnemonic, and its fields as text."""

    kind: str  # the attribute's mnemonic: nvmma_shared, swizzled_shared, tensor_memory_encoding, ...
    fields: dict[str, str]

    def integer(self, name: str) -> int | None:
        """The field `name` as an int, None where it is no number."""
        text = self.fields.get(name, "")
        return int(text) if re.fullmatch(r"\d+", text) else None


@dataclass(frozen=True)
class Allocation:
    """An allocation in shared or tensor memory."""

    name: str | None
    space: str  # "shared" or "tensor"
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    frames: Frames
    indexed: bool  # whether its leading dimension selects a slot
    indexed_at_run_time: bool


@dataclass
class Partition:
    """A warp role: its warps, and the lines of its operations."""

    warps: int
    frames: set[Frames] = field(default_factory=set)
    requested_registers: int | None = None
    function: str | None = None  # the Python function it calls


@dataclass
class Module:
    """What the inspector reads from the TTGIR of a kernel."""

    kernel: str
    default: Partition
    workers: list[Partition]
    specialized: bool
    allocations: list[Allocation]
    own_frame: Frames  # the kernel's def line, the outermost frame of some operations only

    def within(self, frames: Frames) -> Frames:
        """Return the frames inside the kernel."""
        return frames[:-1] if self.own_frame and frames[-1:] == self.own_frame else frames


class _Locations:
    """Resolves `#locN` to its variable name and its frames, innermost first."""

    def __init__(self, text: str):
        self.alias = {m[1]: m[2] for m in (_ALIAS.match(line) for line in text.splitlines()) if m}
        self.cache: dict[str, tuple[str | None, Frames]] = {}

    def __call__(self, ref: str) -> tuple[str | None, Frames]:
        if ref not in self.cache:
            self.cache[ref] = self._resolve(ref)
        return self.cache[ref]

    def _resolve(self, body: str) -> tuple[str | None, Frames]:
        if body in self.alias:
            return self(self.alias[body])
        if found := _FILE.match(body):
            return None, ((found[1], int(found[2])),)
        if found := _NAMED.match(body):
            return found[1], self(found[2])[1]
        if body.startswith("callsite(") and (found := re.match(r"^callsite\((.*) at (.*)\)$", body)):
            name, inner = self(found[1])
            return name, inner + self(found[2])[1]
        if body.startswith("fused") and (found := re.search(r"\[(.*?)[,\]]", body)):
            return self(found[1].strip())
        return None, ()


def _split(arguments: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(arguments):
        if c in "(<[{":
            depth += 1
        elif c in ")]}" or (c == ">" and arguments[i - 1] != "-"):
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(arguments[start:i].strip())
            start = i + 1
    return [p for p in [*parts, arguments[start:].strip()] if p]


def _layouts(text: str) -> dict[str, Layout]:
    found = (_LAYOUT.match(line) for line in text.splitlines())
    return {
        m[1]: Layout(m[3], dict(f.split(" = ", 1) for f in _split(m[4].strip("{}")) if " = " in f)) for m in found if m
    }


def _called(source: str) -> tuple[list[str | None], list[str | None]]:
    """Return the functions that default regions and partitions call, from the output of Triton's frontend; TTGIR has
    them inlined.
    """
    defaults: list[str | None] = []
    workers: list[str | None] = []
    open_for: list[str | None] | None = None  # for a region that has called nothing so far
    for line in source.splitlines():
        if _DEFAULT.match(line) or _PARTITION.match(line):
            open_for = defaults if _DEFAULT.match(line) else workers
            open_for.append(None)
        elif open_for is not None and (found := _CALL.match(line)):
            open_for[-1], open_for = found[1], None
    return defaults, workers


class _Body:
    """What the lines of the kernel's function say. `read` takes them in order."""

    def __init__(self, module: Module, locate: _Locations):
        self.module, self.locate = module, locate
        self.found: list[tuple[re.Match[str], str | None, Frames]] = []  # allocations with their names
        self.constants: set[str] = set()
        self.indexed: dict[str, bool] = {}  # value whose slots are selected -> at run time?
        self.renamed: dict[str, str] = {}  # a partition's argument -> its value
        self.region: Partition | None = None
        self.enclosing: list[tuple[int, Partition | None]] = []  # indentation at which the current region ends
        self.captured: list[str] = []  # values that the partitions take as arguments
        self.requested: list[int] = []  # registers of the partitions

    def read(self, line: str) -> None:
        """Take the next line."""
        depth = len(line) - len(line.lstrip())
        while self.enclosing and line.strip().startswith("}") and depth <= self.enclosing[-1][0]:
            self.region = self.enclosing.pop()[1]
        if found := _SPECIALIZE.match(line):
            self.captured = [a.lstrip("%") for a in _split(found[2])]
            asked = re.search(r"requestedRegisters = array<i32: ([\d, ]+)>", found[3] or "")
            self.requested = [int(n) for n in asked[1].split(",")] if asked else []
        elif _DEFAULT.match(line):
            self._enter(depth, self.module.default)
        elif found := _PARTITION.match(line):
            worker = Partition(int(found[3]))
            if int(found[1]) < len(self.requested):
                worker.requested_registers = self.requested[int(found[1])]
            self.module.workers.append(worker)
            self._enter(depth, worker)
            arguments = [a.split(":")[0].strip().lstrip("%") for a in _split(found[2])]
            self.renamed.update(zip(arguments, self.captured))
        elif found := _CONSTANT.match(line):
            self.constants.add(found[1])
        else:
            self._operation(line)

    def _enter(self, depth: int, region: Partition) -> None:
        self.enclosing.append((depth, self.region))
        self.region = region

    def _operation(self, line: str) -> None:
        location = _TRAILING_LOC.search(line)
        name, frames = self.locate(location[1]) if location else (None, ())
        if found := _ALLOC.match(line):
            self.found.append((found, name, frames))
        if found := _INDEX.search(line):
            self.indexed[found[1]] = self.indexed.get(found[1], False) or found[2] not in self.constants
        if self.region is not None and (inside := self.module.within(frames)):
            self.region.frames.add(inside)

    def allocations(self, layouts: dict[str, Layout]) -> list[Allocation]:
        """Return the allocations in the kernel's order."""
        slots: dict[str, bool] = {}
        for ssa, at_run_time in self.indexed.items():
            while ssa in self.renamed:
                ssa = self.renamed[ssa]
            slots[ssa] = slots.get(ssa, False) or at_run_time
        allocations = []
        for found, name, frames in self.found:
            ssa, operation, dims, dtype, layout = found.groups()
            allocations.append(
                Allocation(
                    name=name or (None if ssa.isdigit() else ssa),
                    space="shared" if operation == "ttg.local_alloc" else "tensor",
                    shape=tuple(int(d) for d in dims.split("x") if d),
                    dtype=dtype,
                    layout=layouts.get(layout),
                    frames=frames,
                    indexed=ssa in slots,
                    indexed_at_run_time=slots.get(ssa, False),
                )
            )
        return allocations


def parse(text: str, source: str) -> Module:
    """Read TTGIR with locations, as `CompiledKernel.asm["ttgir"]` holds it.

    `source`, the frontend's text in `asm["source"]`, names the functions that partitions call. Python's files are not
    read: Triton treats equal functions of two files as one, so a cached kernel may name a file that no longer exists.
    """
    locate = _Locations(text)
    lines = text.splitlines()
    heads = (re.search(r"tt\.func public @([\w$.]+)", line) for line in lines)
    kernel_at, kernel = next(((i, m[1]) for i, m in enumerate(heads) if m), (0, ""))
    indent = len(lines[kernel_at]) - len(lines[kernel_at].lstrip())
    closing = next((line for line in lines[kernel_at + 1 :] if line.startswith(" " * indent + "}")), "")
    end = _TRAILING_LOC.search(closing)
    own = locate(end[1])[1] if end else ()
    warps = re.search(r'"ttg\.num-warps" = (\d+)', text)
    default = Partition(int(warps[1]) if warps else 4)
    module = Module(kernel, default, [], "ttg.warp_specialize(" in text, [], own)

    body = _Body(module, locate)
    for line in lines[kernel_at:]:
        body.read(line)
    module.allocations += body.allocations(_layouts(text))
    defaults, called = _called(source)
    if len(called) == len(module.workers):
        for partition, function in zip([default, *module.workers], [*defaults[:1], *called]):
            partition.function = function
    return module
