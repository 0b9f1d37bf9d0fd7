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
    kind: str  # the attribute's mnemonic: nvmma_shared, swizzled_shared, tensor_memory_encoding, ...
    fields: dict[str, str]

    def integer(self, name: str) -> int | None:
        text = self.fields.get(name, "")
        return int(text) if re.fullmatch(r"\d+", text) else None


@dataclass(frozen=True)
class Allocation:
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
    warps: int
    frames: set[Frames] = field(default_factory=set)
    requested_registers: int | None = None
    function: str | None = None  # the Python function it calls


@dataclass
class Module:
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


def parse(text: str, source: str) -> Module:
    """Read TTGIR with locations, as `CompiledKernel.asm["ttgir"]` holds it.

    `source`, the frontend's text in `asm["source"]`, names the functions that partitions call. Python's files are not
    read: Triton treats equal functions of two files as one, so a cached kernel may name a file that no longer exists.
    """
    locate, layouts = _Locations(text), _layouts(text)
    lines = text.splitlines()
    heads = (re.search(r"tt\.func public @([\w$.]+)", line) for line in lines)
    kernel_at, kernel = next(((i, m[1]) for i, m in enumerate(heads) if m), (0, ""))
    indent = len(lines[kernel_at]) - len(lines[kernel_at].lstrip())
    closing = next((line for line in lines[kernel_at + 1 :] if line.startswith(" " * indent + "}")), "")
    end = _TRAILING_LOC.search(closing)
    own = locate(end[1])[1] if end else ()

    warps = re.search(r'"ttg\.num-warps" = (\d+)', text)
    default = Partition(int(warps[1]) if warps else 4)
    workers: list[Partition] = []
    module = Module(kernel, default, workers, "ttg.warp_specialize(" in text, [], own)
    constants: set[str] = set()
    renamed: dict[str, str] = {}  # a partition's argument -> its value
    indexed: dict[str, bool] = {}
    raw: list[tuple[re.Match[str], str | None, Frames]] = []
    region: Partition | None = None
    given: list[str] = []
    requested: list[int] = []
    regions: list[tuple[int, Partition | None]] = []  # indentation at which the current region ends
    for line in lines[kernel_at:]:
        depth = len(line) - len(line.lstrip())
        while regions and line.strip().startswith("}") and depth <= regions[-1][0]:
            region = regions.pop()[1]
        location = _TRAILING_LOC.search(line)
        name, frames = locate(location[1]) if location else (None, ())
        if found := _SPECIALIZE.match(line):
            given = [a.lstrip("%") for a in _split(found[2])]
            asked = re.search(r"requestedRegisters = array<i32: ([\d, ]+)>", found[3] or "")
            requested = [int(n) for n in asked[1].split(",")] if asked else []
        elif _DEFAULT.match(line):
            regions.append((depth, region))
            region = default
        elif found := _PARTITION.match(line):
            regions.append((depth, region))
            region = Partition(int(found[3]))
            if int(found[1]) < len(requested):
                region.requested_registers = requested[int(found[1])]
            workers.append(region)
            renamed.update(zip([a.split(":")[0].strip().lstrip("%") for a in _split(found[2])], given))
        elif found := _CONSTANT.match(line):
            constants.add(found[1])
        else:
            if found := _ALLOC.match(line):
                raw.append((found, name, frames))
            if found := _INDEX.search(line):
                indexed[found[1]] = indexed.get(found[1], False) or found[2] not in constants
            if region is not None and (inside := module.within(frames)):
                region.frames.add(inside)
    slots: dict[str, bool] = {}
    for ssa, at_run_time in indexed.items():
        while ssa in renamed:
            ssa = renamed[ssa]
        slots[ssa] = slots.get(ssa, False) or at_run_time
    for found, name, frames in raw:
        ssa, operation, dims, dtype, layout = found.groups()
        module.allocations.append(
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
    defaults, called = _called(source)
    if len(called) == len(workers):
        for partition, function in zip([default, *workers], [*defaults[:1], *called]):
            partition.function = function
    return module
