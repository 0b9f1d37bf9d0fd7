"""Parser of MLIR text in generic form. It is the only module that depends on Triton's printing of TTGIR.

The generic form (MLIR Language Reference, "Operations") is the same for every operation: results, name, operands,
successors, properties, regions, attributes, types, location. So this module knows no operation of Triton. Other
modules define the meanings, and an operation without a meaning stops the run.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .numbers import decode
from .ttgir import (
    Block,
    Dense,
    Descriptor,
    Frame,
    Location,
    MemDesc,
    Module,
    Op,
    Opaque,
    Other,
    Pointer,
    Region,
    Scalar,
    Tensor,
    Type,
)

T = TypeVar("T")


class ParseError(ValueError):
    """Text that this release of Triton does not print."""


_ALIAS = re.compile(r"^(#[\w$.-]+) = (.*)$", re.M)
_SPACE = re.compile(r"(?:\s|//[^\n]*)*")
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULT = re.compile(r"(%[\w$.-]+)(?::(\d+))?")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_IDENT = re.compile(r"[!#@^]?[\w$.-]+(?:::@?[\w$.-]+)*")
_NUMBER = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)")
_DIMENSIONS = re.compile(r"((?:\d+x)*)(.*)", re.S)
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|->|[<>(){}\[\]]')
_CLOSE = {"<": ">", "(": ")", "[": "]", "{": "}"}
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)")


def unescape(text: str) -> str:
    """Resolve MLIR's string escapes: a backslash and two hexadecimal digits, a quote, or a backslash."""
    if "\\" not in text:
        return text

    def one(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 16)]) if len(code) == 2 else {b"n": b"\n", b"t": b"\t"}.get(code, code)

    return _ESCAPE.sub(one, text.encode()).decode()


class _Parser:
    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.aliases = {name: value.strip() for name, value in _ALIAS.findall(text)}
        self.locations: dict[str, Location] = {}
        self.types: dict[str, Type] = {}
        self.values = 0
        self.names: dict[int, str] = {}

    # characters

    def error(self, what: str) -> ParseError:
        line = self.text.count("\n", 0, self.at) + 1
        return ParseError(
            f"TTGIR line {line}: {what} at {self.text[self.at : self.at + 60]!r}; this parser is written for the "
            "generic form of Triton 3.9"
        )

    def skip(self) -> None:
        if self.at < len(self.text) and self.text[self.at] in " \n\t/":
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]

    def peek(self, token: str) -> bool:
        if self.text.startswith(token, self.at):
            return True
        self.skip()
        return self.text.startswith(token, self.at)

    def take(self, token: str) -> bool:
        if self.peek(token):
            self.at += len(token)
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise self.error(f"expected {token!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.skip()
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def need(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = self.match(pattern)
        if found is None:
            raise self.error(f"expected {what}")
        return found

    def items(self, end: str, read: Callable[[], T]) -> list[T]:
        """Read items, separated by commas, up to the closing bracket `end`."""
        found = []
        while not self.take(end):
            found.append(read())
            self.take(",")
        return found

    def balanced(self) -> str:
        """Return the text from an opening bracket to its partner, both included."""
        start, at, stack = self.at, self.at, []
        text = self.text
        while found := _BRACKET.search(text, at):
            at = found.end()
            mark = found[0]
            if mark in _CLOSE:
                stack.append(_CLOSE[mark])
            elif stack and mark == stack[-1]:
                stack.pop()
                if not stack:
                    self.at = at
                    return text[start:at]
        raise self.error("a bracket without an end")

    # types

    def type_text(self) -> str:
        self.skip()
        start = self.at
        if self.peek("("):
            self.balanced()
            if self.take("->"):
                self.type_text()
            return self.text[start : self.at]
        self.need(_IDENT, "a type")
        if self.text.startswith("<", self.at):
            self.balanced()
        return self.text[start : self.at]

    def type(self) -> Type:
        text = self.type_text()
        if text not in self.types:
            self.types[text] = self.make_type(text)
        return self.types[text]

    def resolve(self, text: str) -> str:
        """Replace aliases in attribute text, also inside (a slice layout names its parent)."""
        return re.sub(
            r"#[\w$]+(?![\w$.<])",
            lambda m: self.resolve(self.aliases[m[0]]) if m[0] in self.aliases else m[0],
            text.strip(),
        )

    def make_type(self, text: str) -> Type:
        def inside() -> list[str]:
            return split_list(text[text.index("<") + 1 : -1])

        def shaped(body: str) -> tuple[tuple[int, ...], Any]:
            dims, element = _DIMENSIONS.match(body).groups()  # type: ignore[union-attr]
            inner = _Parser(element)
            inner.aliases = self.aliases
            return tuple(int(d) for d in dims.split("x")[:-1]), inner.type()

        if text.startswith("!tt.ptr<"):
            inner = _Parser(inside()[0])
            inner.aliases = self.aliases
            return Pointer(inner.type())
        if text.startswith("tensor<"):
            parts = inside()
            shape, element = shaped(parts[0])
            return Tensor(shape, element, self.resolve(parts[1]) if len(parts) > 1 else None)
        if text.startswith("!ttg.memdesc<"):
            parts = inside()
            shape, element = shaped(parts[0])
            layout, space = self.resolve(parts[1]), self.resolve(parts[2])
            rest = parts[3:]
            alloc = next((tuple(int(d) for d in p.split("x")) for p in rest if re.fullmatch(r"[\dx]+", p)), shape)
            kind = {"#ttg.shared_memory": "shared", "#ttng.tensor_memory": "tensor"}.get(space)
            if kind is None:
                raise self.error(f"memory space {space} of {text}")
            return MemDesc(shape, element, layout, kind, "mutable" in rest, alloc)
        if text.startswith(("!tt.tensordesc<", "!ttng.tensordesc_im2col<")):
            parts = inside()
            body = parts[0]
            if body.startswith("tensor<"):
                parts = split_list(body[7:-1]) + parts[1:]
                body = parts[0]
            shape, element = shaped(body)
            encoding = self.resolve(parts[1]) if len(parts) > 1 else None
            return Descriptor(shape, element, encoding, "tensordesc_im2col" if "im2col" in text else "tensordesc")
        if re.fullmatch(r"(i\d+|index|bf16|f\d+\w*|tf32)", text):
            return Scalar(text)
        return Other(text)

    # attributes

    def dictionary(self) -> dict[str, Any]:
        self.expect("{")
        out: dict[str, Any] = {}
        while not self.take("}"):
            key = self.match(_STRING)
            name = unescape(key[1]) if key else self.need(_IDENT, "an attribute name")[0]
            out[name] = self.attribute() if self.take("=") else True
            self.take(",")
        return out

    def attribute(self) -> Any:
        if found := self.match(_STRING):
            return unescape(found[1])
        if self.take("["):
            return tuple(self.items("]", self.attribute))
        if self.peek("{"):
            return self.dictionary()
        if found := self.match(_NUMBER):
            return self.number(found[0], self.type() if self.take(":") else Scalar("f64" if "." in found[0] else "i64"))
        if self.peek("array<"):
            self.need(_IDENT, "array")
            element, _, numbers = self.balanced()[1:-1].partition(":")
            return tuple(self.number(i.strip(), Scalar(element.strip())) for i in numbers.split(",") if i.strip())
        if self.peek("dense<"):
            self.need(_IDENT, "dense")
            body = self.balanced()[1:-1]
            self.expect(":")
            kind = self.type()
            if not isinstance(kind, Tensor):
                return Opaque(f"dense<{body}>")
            return Dense(self.dense(body, kind), kind)
        start = self.at
        self.skip()
        if self.peek("("):
            return Opaque(self.type_text())
        name = self.need(_IDENT, "an attribute")[0]
        if name in ("true", "false"):
            return name == "true"
        if self.text.startswith("<", self.at):
            self.balanced()
        return Opaque(self.resolve(self.text[start : self.at]))

    @staticmethod
    def number(text: str, kind: Type) -> int | float | bool:
        if text in ("true", "false"):
            return text == "true"
        if isinstance(kind, Scalar) and kind.is_float:
            return float_from_bits(int(text, 16), kind.name) if "0x" in text else float(text)
        return int(text, 0)

    def dense(self, body: str, kind: Tensor) -> Any:
        element = kind.element
        name = element.name if isinstance(element, Scalar) else "i64"
        if body.startswith('"0x'):  # the elements' bytes, little endian
            raw = bytes.fromhex(body[3:-1])
            size = element.nbytes if name != "i1" else 1
            words = np.frombuffer(raw, dtype=f"<u{size}")
            if isinstance(element, Scalar) and element.is_float:
                return np.array([float_from_bits(int(w), name) for w in words]).reshape(
                    kind.shape if len(words) > 1 else ()
                )
            signed = words.view(f"<i{size}")
            return (signed.astype(bool) if name == "i1" else signed).reshape(kind.shape if len(words) > 1 else ())
        numbers = [self.number(n, element) for n in re.findall(r"true|false|-?0x[0-9A-Fa-f]+|-?\d[\d.eE+-]*", body)]
        return (
            np.array(numbers).reshape(kind.shape)
            if body.startswith("[")
            else numbers[0]
            if numbers
            else np.zeros(kind.shape)
        )

    # locations

    def location(self) -> Location:
        """Return the location after `loc`; each text is parsed once."""
        text = self.balanced()[1:-1]
        if text not in self.locations:
            self.locations[text] = self.make_location(text)
        return self.locations[text]

    def make_location(self, text: str) -> Location:
        text = text.strip()
        if text.startswith("#loc"):
            if text not in self.locations:
                alias = self.aliases.get(text, "loc(unknown)")
                self.locations[text] = self.make_location(alias[4:-1])
            return self.locations[text]
        if text.startswith("callsite("):
            callee, _, caller = partition_top(text[9:-1], " at ")
            inner, outer = self.make_location(callee), self.make_location(caller)
            return Location(inner.frames + outer.frames, inner.name)
        if text.startswith("fused"):
            for part in split_list(text[text.index("[") + 1 : text.rindex("]")]):
                found = self.make_location(part)
                if found.frames:
                    return found
            return Location()
        if quoted := _STRING.match(text):
            rest = text[quoted.end() :]
            if place := re.match(r":(\d+):\d+", rest):
                return Location((Frame(unescape(quoted[1]), int(place[1])),))
            if rest.startswith("("):
                inner = self.make_location(rest[1:-1])
                return Location(inner.frames, unescape(quoted[1]))
            return Location((), unescape(quoted[1]))
        return Location()

    def optional_location(self) -> Location:
        if self.peek("loc("):
            self.at += 3
            return self.location()
        return Location()

    # operations

    def define(self, scope: dict[str, int], name: str) -> int:
        """Return a value's index. A value that was used earlier (a later block dominates) keeps the index of that
        use.
        """
        pending = scope.get("?" + name)
        if pending is not None:
            del scope["?" + name]
            scope[name] = pending
            return pending
        scope[name] = self.values
        self.names[self.values] = name.lstrip("%")
        self.values += 1
        return self.values - 1

    def use(self, scopes: list[dict[str, int]], name: str) -> int:
        for scope in reversed(scopes):
            if name in scope:
                return scope[name]
            if "?" + name in scope:
                return scope["?" + name]
        scopes[-1]["?" + name] = self.values
        self.names[self.values] = name.lstrip("%")
        self.values += 1
        return self.values - 1

    def operation(self, scopes: list[dict[str, int]], blocks: dict[str, Block]) -> Op:
        declared = self.declared()
        name = self.need(_STRING, "an operation's name")[1]
        self.expect("(")
        used = self.items(")", lambda: self.need(_VALUE, "an operand")[0])
        operands = tuple(self.use(scopes, v) for v in used)
        successors = (
            self.items("]", lambda: blocks.setdefault(self.need(_IDENT, "a block")[0], Block()))
            if self.take("[")
            else []
        )
        attributes: dict[str, Any] = {}
        if self.take("<"):
            attributes |= self.dictionary()
            self.expect(">")
        regions = self.items(")", lambda: self.region(scopes)) if self.take("(") else []
        if self.peek("{"):
            attributes |= self.dictionary()
        operand_types, result_types = self.signature()
        location = self.optional_location()
        results = tuple(self.define(scopes[-1], v) for v in declared)
        if len(results) != len(result_types) or len(operands) != len(operand_types):
            raise self.error(
                f"{name}: {len(results)} results of {len(result_types)} types, {len(operands)} operands of "
                f"{len(operand_types)} types"
            )
        label = location.name or (declared[0].split("#")[0].lstrip("%") if declared else None)
        return Op(
            name,
            operands,
            results,
            operand_types,
            result_types,
            attributes,
            regions,
            tuple(successors),
            location,
            label,
        )

    def declared(self) -> list[str]:
        """Return the names of an operation's results, each of `%a:2` by its own."""
        names: list[str] = []
        while found := self.match(_RESULT):
            names += [found[1]] if found[2] is None else [f"{found[1]}#{k}" for k in range(int(found[2]))]
            if not self.take(","):
                self.expect("=")
                break
        return names

    def signature(self) -> tuple[tuple[Type, ...], tuple[Type, ...]]:
        """Return an operation's operand types and result types."""
        self.expect(":")
        self.expect("(")
        operands = self.items(")", self.type)
        self.expect("->")
        results = self.items(")", self.type) if self.take("(") else [self.type()]
        return tuple(operands), tuple(results)

    def region(self, scopes: list[dict[str, int]]) -> Region:
        self.expect("{")
        region, blocks = Region(), dict[str, Block]()
        inner: list[dict[str, int]] = [*scopes, {}]
        while not self.take("}"):
            if self.peek("^"):
                region.blocks.append(self.block_header(inner[-1], blocks))
                continue
            if not region.blocks:
                region.blocks.append(Block())
            region.blocks[-1].operations.append(self.operation(inner, blocks))
        missing = [name for name in inner[-1] if name.startswith("?")]
        if missing:
            raise self.error(f"value {missing[0][1:]} is used but not defined")
        return region

    def block_header(self, scope: dict[str, int], blocks: dict[str, Block]) -> Block:
        """Return the block of a label, with its arguments. An earlier branch may have named the block."""
        block = blocks.setdefault(self.need(_IDENT, "a block")[0], Block())

        def argument() -> None:
            value = self.need(_VALUE, "a block argument")[0]
            self.expect(":")
            block.argument_types.append(self.type())
            self.optional_location()
            block.arguments.append(self.define(scope, value))

        if self.take("("):
            self.items(")", argument)
        self.expect(":")
        return block


def split_list(text: str) -> list[str]:
    """Return the items between commas outside brackets and strings."""
    items, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            i = _STRING.match(text, i).end()  # type: ignore[union-attr]
            continue
        if c in "<([{":
            depth += 1
        elif c in ">)]}" and text[i - 1 : i + 1] != "->":
            depth -= 1
        elif c == "," and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
        i += 1
    tail = text[start:].strip()
    return [*items, tail] if tail else items


def partition_top(text: str, separator: str) -> tuple[str, str, str]:
    """`str.partition` at the first separator outside brackets and strings."""
    depth, i = 0, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            i = _STRING.match(text, i).end()  # type: ignore[union-attr]
            continue
        depth += (c in "<([{") - (c in ">)]}")
        if depth == 0 and text.startswith(separator, i):
            return text[:i], separator, text[i + len(separator) :]
        i += 1
    return text, "", ""


def float_from_bits(bits: int, name: str) -> float:
    """Return the value of a hexadecimal float literal."""
    if name == "bf16":
        return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
    formats = {"f16": ("<H", "<e"), "f32": ("<I", "<f"), "f64": ("<Q", "<d")}
    if name not in formats:
        if name.startswith("f8") and bits in (0, 0x80):
            return 0.0 if bits == 0 else -0.0
        return float(decode(name, np.array(bits, np.uint8)))
    integer, real = formats[name]
    return float(struct.unpack(real, struct.pack(integer, bits))[0])


def parse(text: str) -> Module:
    """Parse a module printed in MLIR's generic form with locations. Raises ParseError."""
    parser = _Parser(text)
    start = text.find('"builtin.module"')
    if start < 0:
        raise ParseError('no "builtin.module" in the text: it is not the generic form')
    parser.at = start
    module = parser.operation([{}], {})
    functions: dict[str, Op] = {}
    for op in module.regions[0].blocks[0].operations:
        if op.name == "tt.func":
            functions[op.attributes["sym_name"]] = op
    return Module(module.attributes, functions, parser.values, parser.names)
