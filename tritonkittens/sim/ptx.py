"""Blocks of inline PTX: parsed once, executed for all threads of a role at once.

    block = parse(asm_string, constraints)                     # of ttg.inline_asm or tt.elementwise_inline_asm
    outputs = yield from execute(block, machine, inputs)       # a generator: yields the machine's Waits, and None
        where others may run

The meaning of an instruction is registered next to the shim that emits it (`tritonkittens/inline_ptx/_meaning.py`).
This module has the syntax (PTX ISA 4 and 6, LLVM's operand references) and the control flow.
Registers are numpy arrays of the threads' bits. Where a branch divides the threads, the lowest position runs first,
so that threads rejoin after loops and conditions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import GeneratorType
from typing import Any

import numpy as np

import tritonkittens.inline_ptx  # noqa: F401  its modules register their meanings
from tritonkittens.inline_ptx import _glue  # noqa: F401
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Meaning, NoMeaning, PtxFault, find
from tritonkittens.inline_ptx.tensormap import NBYTES

STEP_LIMIT = 1_000_000  # taken back edges
_UNWRITTEN = 0xABABABABABABABAB  # the contents of an unwritten register, so that a wrong result is visible
_LETTERS = {"r": 32, "f": 32, "h": 16, "c": 16, "l": 64, "d": 64, "q": 128, "b": 1, "n": 0, "i": 0}
_TYPES = {"pred": 1, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64, "b128": 128}
_TYPES |= {f"{k}{n}": n for k in "bus" for n in (8, 16, 32, 64)}
_DTYPES: dict[int, Any] = {1: bool, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.uint64}


class PtxSyntaxError(ValueError):
    """Text that this parser does not accept as PTX. The message names the position and the block."""


# --- syntax
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    slot: int
    bits: int
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Special:
    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A `.shared` array; its value is its address."""

    name: str
    nbytes: int
    align: int


@dataclass(frozen=True, slots=True)
class Sink:
    pass


@dataclass(frozen=True, slots=True)
class Group:
    """`{a, b}` or `p|q`."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """`[base + offset, extra …]`."""

    base: Any
    offset: int
    extra: tuple[Any, ...]


@dataclass(slots=True)
class Step:
    """One instruction: a branch to `target`, or a meaning with its operands."""

    text: str
    mnemonic: str
    guard: Register | None
    operands: tuple[Any, ...]
    meaning: Meaning | None = None
    fields: dict[str, str | None] = field(default_factory=dict)
    target: int = -1
    destination_bits: tuple[Any, ...] = ()
    spins: bool = False


@dataclass
class Block:
    """A parsed block. `outputs` and `inputs` are the operands' slots, in order; `variables` is the shared memory that
    it declares.
    """

    asm: str
    steps: list[Step]
    bits: list[int]  # of each register slot
    outputs: list[int]
    inputs: list[int]
    variables: list[Variable]

    @cached_property
    def in_flight(self) -> list[int]:
        """Return the outputs (by number) of a wgmma.mma_async or tcgen05.ld that the block does not wait for.

        Only a further wgmma and a wait may use them.
        """
        pending: set[int] = set()
        for step in self.steps:
            if step.mnemonic.startswith(("wgmma.mma_async", "tcgen05.ld.")):
                written = step.operands[0]
                pending |= {
                    register.slot
                    for register in (written.items if isinstance(written, Group) else (written,))
                    if isinstance(register, Register)
                }
            elif step.mnemonic.startswith(("wgmma.wait_group", "tcgen05.wait::ld")):
                pending.clear()
        return [number for number, slot in enumerate(self.outputs) if slot in pending]

    @property
    def mnemonics(self) -> list[str]:
        return [step.mnemonic for step in self.steps]


class _Scope:
    def __init__(self, outer: _Scope | None):
        self.outer = outer
        self.names: dict[str, Register | Variable] = {}
        self.labels: dict[str, int] = {}

    def find(self, name: str) -> Register | Variable | None:
        return self.names.get(name) or (self.outer.find(name) if self.outer else None)

    def label(self, name: str) -> int | None:
        return self.labels[name] if name in self.labels else self.outer.label(name) if self.outer else None


_NAME = r"[A-Za-z_$%][\w$]*"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_PARAMETER = re.compile(r"\w+_param_(\d+)")
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_STATEMENT = re.compile(r"[^;{]*(?:\{[^}]*\}[^;{]*)*;")
_DECLARATION = re.compile(r"\.reg\s*\.(\w+)\s+(.*)", re.S)
_SHARED = re.compile(rf"\.shared\s*(?:\.align\s+(\d+)\s*)?\.(\w+)\s+({_NAME})\s*(?:\[\s*(\w+)\s*\])?$")
_GUARD = re.compile(rf"@(!?)\s*({_NAME})\s+")
_INSTRUCTION = re.compile(r"([A-Za-z][\w.:]*)\s*(.*)", re.S)


def _split(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == separator and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return parts + [last] if last or parts else []


class _Parser:
    def __init__(self, asm: str, constraints: str):
        self.asm = asm
        self.bits: list[int] = []
        self.steps: list[Step] = []
        self.scopes: list[_Scope] = []  # of each step
        self.variables: list[Variable] = []
        self.outputs: list[int] = []
        self.inputs: list[int] = []
        self.operands: list[Register] = []
        for item in (c.strip() for c in constraints.split(",")):
            if not item or item.startswith("~"):
                continue
            letter = item.lstrip("=+&*%!")
            if item.startswith("+"):
                raise self.error(f"constraint {item!r}: tie an input to the output instead")
            if letter.isdigit():
                if item.startswith("=") or int(letter) >= len(self.outputs):
                    raise self.error(f"constraint {item!r} ties to no output")
                register = self.operands[int(letter)]
            elif letter in _LETTERS:
                register = self.new(_LETTERS[letter])
            else:
                raise self.error(f"constraint {item!r} is not one of {', '.join(_LETTERS)}")
            self.operands.append(register)
            (self.outputs if item.startswith("=") else self.inputs).append(register.slot)

    def error(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"{message}, in the PTX block: {self.asm}")

    def new(self, bits: int) -> Register:
        self.bits.append(bits)
        return Register(len(self.bits) - 1, bits)

    def parse(self) -> Block:
        text = _COMMENT.sub(" ", self.asm)
        outermost = scope = _Scope(None)
        place = 0
        while True:
            while place < len(text) and text[place].isspace():
                place += 1
            if place == len(text):
                break
            if text[place] == "{":
                scope, place = _Scope(scope), place + 1
            elif text[place] == "}":
                if scope.outer is None:
                    raise self.error("a } without its {")
                scope, place = scope.outer, place + 1
            elif text[place] == ";":
                place += 1
            elif match := _LABEL.match(text, place):
                if match.group(1) in scope.labels:
                    raise self.error(f"label {match.group(1)} is there twice")
                scope.labels[match.group(1)] = len(self.steps)
                place = match.end()
            elif match := _STATEMENT.match(text, place):
                self.statement(match.group(0)[:-1].strip(), scope)
                place = match.end()
            else:
                raise self.error(f"no ; after {text[place:].strip()!r}")
        if scope is not outermost:
            raise self.error("a { without its }")
        self.resolve()
        return Block(self.asm, self.steps, self.bits, self.outputs, self.inputs, self.variables)

    def statement(self, text: str, scope: _Scope) -> None:
        if text.startswith(".reg"):
            match = _DECLARATION.match(text)
            if match is None or match.group(1) not in _TYPES:
                raise self.error(f"declaration {text!r}")
            for name in _split(match.group(2)):
                many = re.fullmatch(rf"({_NAME})\s*<\s*(\d+)\s*>", name)
                for one in [f"{many.group(1)}{n}" for n in range(int(many.group(2)))] if many else [name]:
                    if not re.fullmatch(_NAME, one) or one in scope.names:
                        raise self.error(f"declaration of {one!r}, which is no name or is there twice")
                    scope.names[one] = self.new(_TYPES[match.group(1)])
            return
        if text.startswith("."):
            match = _SHARED.match(text)
            if match is None or _TYPES.get(match.group(2), 1) < 8:
                raise self.error(f"declaration {text!r}")
            size = _TYPES[match.group(2)] // 8
            variable = Variable(match.group(3), size * int(match.group(4) or "1", 0), int(match.group(1) or size))
            scope.names[variable.name] = variable
            self.variables.append(variable)
            return
        guard = None
        whole = text
        if match := _GUARD.match(text):
            register = self.name(match.group(2), scope)
            if not isinstance(register, Register) or register.bits != 1:
                raise self.error(f"{match.group(0).strip()}: no predicate")
            guard = Register(register.slot, 1, bool(match.group(1)))
            text = text[match.end() :]
        match = _INSTRUCTION.fullmatch(text)
        if match is None:
            raise self.error(f"{text!r} is no instruction")
        mnemonic = match.group(1)
        step = Step(whole, mnemonic, guard, ())
        if mnemonic in ("bra", "bra.uni"):
            step.operands = (match.group(2).strip(),)
        else:
            step.operands = tuple(self.operand(part, scope) for part in _split(match.group(2)))
        self.steps.append(step)
        self.scopes.append(scope)

    def name(self, text: str, scope: _Scope) -> Register | Variable | Special | int:
        if match := re.fullmatch(r"\$(\d+)", text):
            number = int(match.group(1))
            if number >= len(self.operands):
                raise self.error(f"{text}: there are {len(self.operands)} operands")
            return self.operands[number]
        found = scope.find(text)
        if found is not None:
            return found
        if text.startswith("%"):
            return Special(text)
        if match := _PARAMETER.fullmatch(text):
            return int(match.group(1)) * NBYTES  # an address in parameter space, in the simulator's own units
        raise self.error(f"{text!r} is not declared")

    def operand(self, text: str, scope: _Scope) -> Any:
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Group(tuple(self.operand(part, scope) for part in _split(text[1:-1])))
        if text.startswith("["):
            if not text.endswith("]"):
                raise self.error(f"operand {text!r}")
            base, *extra = _split(text[1:-1])
            match = re.fullmatch(r"(.+?)\s*([+-])\s*(-?\w+)", base, re.S)
            offset = 0
            if match and (number := _integer(match.group(3))) is not None:
                base, offset = match.group(1), number if match.group(2) == "+" else -number
            return Memory(self.operand(base.strip(), scope), offset, tuple(self.operand(part, scope) for part in extra))
        if "|" in text:
            return Group(tuple(self.operand(part, scope) for part in _split(text, "|")))
        if text.startswith("!"):
            register = self.name(text[1:].strip(), scope)
            if not isinstance(register, Register) or register.bits != 1:
                raise self.error(f"{text!r}: no predicate")
            return Register(register.slot, 1, True)
        immediate = _number(text)
        if immediate is not None:
            return immediate
        text = re.sub(r"^\$\{(\d+)(?::\w+)?\}$", r"$\1", text)
        if not re.fullmatch(rf"{_NAME}(?:\.\w+)?", text):
            raise self.error(f"operand {text!r}")
        return self.name(text, scope)

    def resolve(self) -> None:
        """Resolve branch targets and meanings, and find the instructions that a loop only repeats."""
        for number, (step, scope) in enumerate(zip(self.steps, self.scopes)):
            if step.mnemonic in ("bra", "bra.uni"):
                target = scope.label(step.operands[0])
                if target is None:
                    raise self.error(f"{step.text}: no such label")
                step.target = target
                before = self.steps[number - 1]
                if target == number - 1 and step.guard is not None and before.guard is None:
                    before.spins = any(
                        isinstance(o, Register) and o.slot == step.guard.slot for o in before.operands[:1]
                    )
                continue
            try:
                step.meaning, step.fields = find(step.mnemonic)
            except NoMeaning:
                raise NoMeaning(f"{step.text!r} has no meaning on the CPU, in the PTX block: {self.asm}") from None
            if len(step.operands) < step.meaning.destinations:
                raise self.error(f"{step.text}: {len(step.operands)} operands")
            step.destination_bits = tuple(_widths(o) for o in step.operands[: step.meaning.destinations])


def _widths(operand: Any) -> Any:
    if isinstance(operand, Group):
        return tuple(_widths(item) for item in operand.items)
    return operand.bits if isinstance(operand, Register) else 0


def _integer(text: str) -> int | None:
    match = re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?", text)
    if match is None:
        return None
    digits = match.group(2)
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return int(match.group(1) + digits, 8 if octal else 0)


def _number(text: str) -> int | float | None:
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
        return int(match.group(1) or match.group(2), 16)  # the bits
    whole = _integer(text)
    if whole is not None:
        return whole
    return float(text) if re.fullmatch(r"-?\d*\.?\d+(?:[eE][+-]?\d+)?|-?\d+\.", text) else None


@lru_cache(maxsize=4096)
def parse(asm: str, constraints: str) -> Block:
    """Parse `asm` with its LLVM `constraints` (results first).

    Raises PtxSyntaxError, and NoMeaning for an instruction that the simulator cannot execute.
    """
    # a literal dollar can only be a letter of a name
    return _Parser(asm.replace("$$", "_dollar_"), constraints).parse()


# --- execution
# --------------------------------------------------------------------------------------------------------------------


def spread(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`np.broadcast_to`, which takes long also where the shape stays."""
    return value if value.shape == shape else np.broadcast_to(value, shape)


class _Thread:
    """One execution: the machine and the contents of the registers."""

    def __init__(self, block: Block, t: Machine, inputs: Sequence[Any]):
        if len(inputs) != len(block.inputs):
            raise PtxFault(f"{len(inputs)} operands for the {len(block.inputs)} inputs of the PTX block: {block.asm}")
        self.block, self.t, self.threads = block, t, len(t.tid)
        self.registers: list[Any] = [None] * len(block.bits)
        for slot, value in zip(block.inputs, inputs):
            self.registers[slot] = self.bits_of(value, block.bits[slot])

    def bits_of(self, value: Any, bits: int) -> np.ndarray:
        """Return an operand of the block as a register: floats by their bits, integers wrapped."""
        value = np.asarray(value)
        if bits == 128:
            return np.broadcast_to(value, (self.threads, 2))
        if value.dtype.kind == "f":
            if value.dtype.itemsize * 8 != bits:
                value = value.astype({16: np.float16, 32: np.float32, 64: np.float64}[bits])
            value = value.view(_DTYPES[bits])
        if bits:
            value = value.astype(_DTYPES[bits], copy=False) if bits != 1 else value != 0
        return spread(value, (self.threads,))

    def register(self, slot: int) -> np.ndarray:
        value = self.registers[slot]
        if value is None:
            bits = self.block.bits[slot]
            shape = (self.threads, 2) if bits == 128 else (self.threads,)
            value = np.zeros(shape, bool) if bits == 1 else np.full(shape, np.uint64(_UNWRITTEN)).astype(_DTYPES[bits])
            self.registers[slot] = value
        return value

    def read(self, operand: Any) -> Any:
        if isinstance(operand, Register):
            value = self.register(operand.slot)
            return ~value if operand.negated else value
        if isinstance(operand, (int, float)):
            return operand
        if isinstance(operand, Group):
            return tuple(self.read(item) for item in operand.items)
        if isinstance(operand, Special):
            return self.special(operand.name)
        if isinstance(operand, Variable):
            return int(self.t.static_shared(operand.name, operand.nbytes, operand.align))
        if isinstance(operand, Memory):
            address = self.read(operand.base)
            if isinstance(address, int):
                address = np.full(self.threads, address, np.uint64 if address >> 32 else np.uint32)
            if operand.offset:
                address = address + address.dtype.type(operand.offset % (1 << (8 * address.dtype.itemsize)))
            return (address, *(self.read(item) for item in operand.extra)) if operand.extra else address
        raise PtxFault(f"{operand} is no source")

    def special(self, name: str) -> Any:
        lane = self.t.lane
        if name == "%laneid":
            return lane.astype(np.uint32)
        if name == "%tid.x":
            return self.t.tid.astype(np.uint32)
        if name.startswith("%lanemask_"):
            one = np.uint64(1) << lane.astype(np.uint64)
            masks = {
                "eq": one,
                "lt": one - np.uint64(1),
                "le": 2 * one - np.uint64(1),
                "gt": ~(2 * one - np.uint64(1)),
                "ge": ~(one - np.uint64(1)),
            }
            return masks[name.removeprefix("%lanemask_")].astype(np.uint32)
        value = self.t.special(name)
        return int(value) if np.ndim(value) == 0 else np.asarray(value)

    def write(self, operand: Any, value: Any, active: np.ndarray, whole: bool) -> None:
        if isinstance(operand, Sink):
            return
        if isinstance(operand, Group):
            if not isinstance(value, tuple) or len(value) != len(operand.items):
                raise PtxFault(
                    f"{len(operand.items)} registers for {len(value) if isinstance(value, tuple) else 1} results"
                )
            for item, part in zip(operand.items, value):
                self.write(item, part, active, whole)
            return
        if not isinstance(operand, Register):
            raise PtxFault(f"{operand} is no destination")
        if isinstance(value, int):
            value = np.uint64(value & 0xFFFFFFFFFFFFFFFF)
        shape = (self.threads, 2) if operand.bits == 128 else (self.threads,)
        new = spread(np.asarray(value).astype(_DTYPES[operand.bits], copy=False), shape)
        if not whole:
            new = np.where(active[:, None] if operand.bits == 128 else active, new, self.register(operand.slot))
        self.registers[operand.slot] = new

    def perform(self, step: Step, active: np.ndarray, whole: bool) -> Generator[Any, None, None]:
        """Execute an instruction for the active threads, with `whole` all. Yields the waits of its meaning."""
        assert step.meaning is not None
        many = step.meaning.destinations
        modifiers = tuple(step.mnemonic.split(".")[1:])
        instruction = Instruction(step.mnemonic, modifiers, step.fields, step.destination_bits, step.spins, active)
        sources = step.operands if step.meaning.updates else step.operands[many:]
        try:
            result = step.meaning.function(self.t, instruction, *(self.read(operand) for operand in sources))
            if isinstance(result, GeneratorType):
                result = yield from result
            if many:
                for operand, value in zip(step.operands[:many], (result,) if many == 1 else result):
                    self.write(operand, value, active, whole)
        except (NoMeaning, PtxFault) as error:
            raise type(error)(f"{step.text!r}: {error}; in the PTX block: {self.block.asm}") from error


def execute(
    block: Block,
    t: Machine,
    inputs: Sequence[Any],
    step_limit: int = STEP_LIMIT,
    turned: Callable[..., Any] = lambda place, state: None,
) -> Generator[Any, None, list[np.ndarray]]:
    """Run a block for the len(t.tid) threads of `t`. A generator: it yields Waits, and None where others may run, and
    returns the outputs' bits.

    Args:
        inputs: an array [T] or a scalar for each input (bits, or a float array that stands for its bits), tied ones
            included.
        step_limit: the most taken back edges.
        turned: `turned(place, state)` runs at every taken back edge; `state()` is everything on which the loop
            depends. It returns a Wait, or None.

    Returns:
        The outputs, uint16, uint32 or uint64 [T] each.

    Raises:
        NoMeaning, PtxFault: both name the instruction and the block; and the errors of the machine.
    """
    state = _Thread(block, t, inputs)
    everyone: np.ndarray = np.ones(state.threads, bool)
    at = {0: everyone}  # the threads at each position; `everyone` itself where all are together, mostly

    def go(place: int, threads: np.ndarray) -> None:
        if threads is everyone or threads.any():
            threads = at[place] | threads if place in at else threads
            at[place] = everyone if threads is not everyone and threads.all() else threads

    edges = 0
    while at:
        place = min(at)
        mask = at.pop(place)
        if place == len(block.steps):
            continue
        step = block.steps[place]
        active = mask & state.read(step.guard) if step.guard is not None else mask
        if step.target >= 0:
            go(step.target, active)
            go(place + 1, mask & ~active)
            if step.target <= place and active.any():
                edges += 1
                if edges > step_limit:
                    raise PtxFault(f"{step.text!r} was taken {edges} times, in the PTX block: {block.asm}")
                yield turned(step.target, lambda: [*(at[here] for here in sorted(at)), sorted(at), *state.registers])
            continue
        if active is everyone or active.any():
            yield from state.perform(step, active, active is everyone or bool(active.all()))
        go(place + 1, mask)
    return [state.register(slot) for slot in block.outputs]
