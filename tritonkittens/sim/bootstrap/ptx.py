"""Blocks of inline PTX: parsed once, executed for all threads of a role at once, with one program counter a thread.

What an instruction does is in the registry of `inline_ptx._meaning`. Here are scopes, registers, labels and branches, predicates and operands (PTX ISA "Syntax",
"Instruction Operands"), and LLVM's operand references and constraints.
"""
from __future__ import annotations

import functools
import inspect
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tritonkittens.sim.bootstrap.meaning import Instruction, UnknownInstruction, find, unsigned, width

_TOKEN = re.compile(
    r"\s*(?:(?P<label>[A-Za-z_$][\w$]*):(?!:)|(?P<reference>\$\{?\d+(?::\w+)?\}?)|(?P<special>%[\w.]+)|(?P<float>0[fFdD][0-9A-Fa-f]{8,16})|(?P<hex>0x[0-9A-Fa-f]+U?)"
    r"|(?P<real>-?\d+\.\d+(?:[eE][-+]?\d+)?)|(?P<integer>-?\d+U?)|(?P<name>[A-Za-z_.][\w.:]*)|(?P<mark>[@!{}\[\],;|+()<>-]))"
)  # fmt: skip


@dataclass(frozen=True)
class Statement:
    predicate: Any
    negated: bool
    mnemonic: str
    operands: tuple[Any, ...]
    text: str


@dataclass(frozen=True)
class Reg:
    name: str


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Immediate:
    value: int


@dataclass(frozen=True)
class Memory:
    """[address + offset], or [address, {coordinates…}] and the like."""

    parts: tuple[Any, ...]
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Pair:
    """d|p"""

    parts: tuple[Any, ...]


@dataclass
class Assembly:
    text: str
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    statics: dict[str, tuple[int, int]] = field(default_factory=dict)  # .shared variables: (alignment, bytes)


SINK = Reg("_")


class _Parser:
    def __init__(self, text: str):
        self.out = Assembly(text)
        cleaned = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S).replace("$$", "\x00").replace("\x00", "")
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(cleaned):
            if cleaned[at:].strip() == "":
                break
            found = _TOKEN.match(cleaned, at)
            if found is None:
                raise UnknownInstruction(f"inline PTX cannot be read at {cleaned[at : at + 40]!r}: {text}")
            assert found.lastgroup is not None
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self.at = 0
        self.scopes: list[dict[str, str]] = [{}]
        self.counter = 0

    def peek(self, value: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at][1] == value

    def take(self, value: str) -> bool:
        if self.peek(value):
            self.at += 1
            return True
        return False

    def fail(self) -> UnknownInstruction:
        here = " ".join(v for _, v in self.tokens[self.at : self.at + 8])
        return UnknownInstruction(f"inline PTX cannot be read at {here!r}: {self.out.text}")

    def declare(self, name: str, kind: str) -> None:
        self.counter += 1
        unique = f"{name}.{self.counter}"
        self.scopes[-1][name] = unique
        self.out.widths[unique] = width(kind)

    def register(self, name: str) -> Reg:
        if name == "_":
            return SINK
        for scope in reversed(self.scopes):
            if name in scope:
                return Reg(scope[name])
        return Reg(name)

    def parse(self) -> Assembly:
        while self.at < len(self.tokens):
            kind, value = self.tokens[self.at]
            if value == "{":
                self.at += 1
                self.scopes.append({})
            elif value == "}":
                self.at += 1
                self.scopes.pop()
            elif value == ";":
                self.at += 1
            elif kind == "label":
                self.at += 1
                self.out.labels[value] = len(self.out.statements)
            elif value == ".reg":
                self.at += 1
                type_ = self.tokens[self.at][1].lstrip(".")
                self.at += 1
                if type_ == "v2" or type_ == "v4":
                    raise self.fail()
                while not self.take(";"):
                    name = self.tokens[self.at][1]
                    self.at += 1
                    if self.take("<"):
                        for k in range(int(self.tokens[self.at][1])):
                            self.declare(f"{name}{k}", type_)
                        self.at += 1
                        self.take(">")
                    else:
                        self.declare(name, type_)
                    self.take(",")
            elif value == ".shared":
                self.static()
            else:
                self.statement()
        return self.out

    def static(self) -> None:
        """.shared .align 128 .b8 name[bytes];"""
        self.at += 1
        align = 4
        if self.take(".align"):
            align = int(self.tokens[self.at][1])
            self.at += 1
        size = width(self.tokens[self.at][1].lstrip(".")) // 8
        name = self.tokens[self.at + 1][1]
        self.at += 2
        if self.take("["):
            size *= int(self.tokens[self.at][1])
            self.at += 1
            self.take("]")
        self.take(";")
        self.out.statics[name] = (align, size)
        self.scopes[0][name] = f"&{name}"

    def statement(self) -> None:
        predicate, negated = None, False
        if self.take("@"):
            negated = self.take("!")
            predicate = self.atom()
        kind, mnemonic = self.tokens[self.at]
        if kind != "name":
            raise self.fail()
        self.at += 1
        operands: list[Any] = []
        start = self.at
        while self.at < len(self.tokens) and not self.take(";"):
            operands.append(self.operand(mnemonic))
            if not self.take(",") and not (self.at >= len(self.tokens) or self.peek(";")):
                raise self.fail()
        shown = f"{mnemonic} " + " ".join(v for _, v in self.tokens[start : self.at])
        self.out.statements.append(Statement(predicate, negated, mnemonic, tuple(operands), shown))

    def operand(self, mnemonic: str) -> Any:
        if self.take("["):
            parts: list[Any] = []
            offset = 0
            while not self.take("]"):
                parts.append(self.operand(mnemonic))
                if self.take("+"):
                    offset = int(self.tokens[self.at][1], 0)
                    self.at += 1
                elif self.at < len(self.tokens) and self.tokens[self.at][0] == "integer" and self.tokens[self.at][1].startswith("-"):
                    offset = int(self.tokens[self.at][1])
                    self.at += 1
                self.take(",")
            return Memory(tuple(parts), offset)
        if self.take("{"):
            items = []
            while not self.take("}"):
                items.append(self.operand(mnemonic))
                self.take(",")
            return Vector(tuple(items))
        first = self.atom()
        if self.take("|"):
            return Pair((first, self.atom()))
        return first

    def atom(self) -> Any:
        negated = self.take("!")
        if negated:
            inner = self.atom()
            return Memory(("!", inner))
        kind, value = self.tokens[self.at]
        self.at += 1
        if kind == "reference":
            return Reg("$" + re.sub(r"[${}]", "", value).split(":")[0])
        if kind == "special":
            return Special(value)
        if kind in ("integer", "hex"):
            return Immediate(int(value.rstrip("U"), 0))
        if kind == "float":
            return Immediate(int(value[2:], 16))
        if kind == "real":
            return Immediate(struct.unpack("<I", struct.pack("<f", float(value)))[0])
        if kind == "name":
            return self.register(value)
        raise self.fail()


@functools.cache
def parse(text: str) -> Assembly:
    """Parse a block of inline PTX. Raises UnknownInstruction for what is not PTX as this parser knows it."""
    return _Parser(text).parse()


def execute(assembly: Assembly, threads: Any, registers: dict[str, np.ndarray]) -> Iterator[Any]:
    """Run a block; a generator that yields what instructions wait for, and None at every backward branch. `registers`: "$0", "$1", …, also the results afterwards."""
    count = threads.count
    values: dict[str, Any] = registers
    for name in assembly.statics:
        values[f"&{name}"] = np.full(count, threads.static(assembly, name), np.uint64)
    pc = np.zeros(count, np.int64)
    end = len(assembly.statements)
    everyone = np.ones(count, bool)

    def read(operand: Any) -> Any:
        if isinstance(operand, Reg):
            found = values.get(operand.name)
            if found is None:
                if operand.name in assembly.widths or operand.name.startswith("$"):
                    n = assembly.widths.get(operand.name, 64)
                    found = values[operand.name] = np.zeros(count, bool) if n == 1 else np.zeros(count, np.uint64)
                else:
                    raise UnknownInstruction(f"inline PTX names {operand.name!r}, which is no register: {assembly.text}")
            return found
        if isinstance(operand, Immediate):
            return np.full(count, operand.value & 0xFFFFFFFFFFFFFFFF, np.uint64)
        if isinstance(operand, Special):
            value = threads.special(operand.name)
            return np.broadcast_to(np.asarray(value).astype(np.uint64), (count,)).copy()
        if isinstance(operand, Memory):
            if operand.parts and operand.parts[0] == "!":
                return ~read(operand.parts[1])
            parts = tuple(read(p) for p in operand.parts)
            if len(parts) == 1:
                return parts[0] + np.uint64(operand.offset & 0xFFFFFFFFFFFFFFFF) if operand.offset else parts[0]
            return parts
        assert isinstance(operand, (Vector, Pair))
        return tuple(read(p) for p in operand.parts)

    def write(operand: Any, value: Any, active: np.ndarray, kind: str) -> None:
        if operand == SINK or value is None:
            return
        if isinstance(operand, (Vector, Pair)):
            if not isinstance(value, tuple):  # mov of a packed word to its parts
                each = width(kind) // len(operand.parts)
                value = tuple(unsigned(value >> np.uint64(each * k), each) for k in range(len(operand.parts)))
            for part, v in zip(operand.parts, value, strict=True):
                write(part, v, active, kind)
            return
        assert isinstance(operand, Reg), operand
        value = np.broadcast_to(np.asarray(value), (count,))
        n = assembly.widths.get(operand.name)
        if value.dtype == bool and n != 1:
            value = value.astype(np.uint64)
        elif n == 1:
            value = value.astype(bool)
        elif value.dtype != np.uint64:
            value = value.astype(np.int64).view(np.uint64) if value.dtype.kind == "i" else value.astype(np.uint64)
        if n is not None and 1 < n < 64:
            value = unsigned(value, n)
        old = values.get(operand.name)
        values[operand.name] = value.copy() if old is None or active.all() else np.where(active, value, old)

    while True:
        here = int(pc.min())
        if here >= end:
            return
        statement = assembly.statements[here]
        active = everyone if count == 0 or int(pc.max()) == here else pc == here
        pc[active] = here + 1
        if statement.predicate is not None:
            chosen = read(statement.predicate).astype(bool)
            active = active & (~chosen if statement.negated else chosen)
        head = statement.mnemonic.split(".")[0]
        if head == "bra":
            name = statement.operands[0].name
            if name not in assembly.labels:
                raise UnknownInstruction(f"inline PTX branches to {name!r}, which is no label: {assembly.text}")
            target = assembly.labels[name]
            if active.any():
                pc[active] = target
                if target <= here:
                    threads.count_step()
                    yield None
            continue
        if head in ("ret", "exit"):
            pc[active] = end
            continue
        known = find(statement.mnemonic)
        if known is None:
            raise UnknownInstruction(f"the simulator has no meaning for the PTX instruction {statement.mnemonic!r} in: {assembly.text}")
        if not active.any():
            continue
        instruction = Instruction(statement.mnemonic, active)
        sources = [read(o) for o in statement.operands[known.outputs :]]
        result = known.function(threads, instruction, *sources)
        if inspect.isgenerator(result):
            result = yield from result
        if known.outputs == 1:
            write(statement.operands[0], result, active, statement.mnemonic.split(".")[-1])
        elif known.outputs:
            for operand, value in zip(statement.operands, result, strict=False):
                write(operand, value, active, statement.mnemonic.split(".")[-1])
