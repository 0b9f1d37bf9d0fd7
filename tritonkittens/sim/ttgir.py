"""TTGIR as data: types, attributes, locations, operations and modules. `ttgir_parser` reads them from MLIR text."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------- types


@dataclass(frozen=True)
class Scalar:
    """A number type by its MLIR name: i1, i32, f32, bf16, f8E4M3FN, index, …"""

    name: str

    @property
    def bits(self) -> int:
        found = re.match(r"[a-z]+(\d+)", self.name)
        return 64 if self.name == "index" else int(found[1]) if found else 0

    @property
    def nbytes(self) -> int:
        """Bytes in memory: an i1 takes a byte."""
        return max(self.bits, 8) // 8

    @property
    def is_float(self) -> bool:
        return self.name[0] in "fb"


@dataclass(frozen=True)
class Pointer:
    pointee: Type

    bits = 64
    nbytes = 8
    is_float = False
    name = "i64"


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    element: Scalar | Pointer
    layout: str | None  # the encoding attribute's text, aliases resolved


@dataclass(frozen=True)
class MemDesc:
    """A view of shared or tensor memory."""

    shape: tuple[int, ...]
    element: Scalar
    layout: str
    space: str  # "shared" or "tensor"
    mutable: bool
    alloc_shape: tuple[int, ...]

    @property
    def tail(self) -> tuple[int, ...]:
        return self.alloc_shape


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor: the block that a copy moves. `kind` is tensordesc or tensordesc_im2col."""

    shape: tuple[int, ...]
    element: Scalar
    layout: str | None
    kind: str = "tensordesc"


@dataclass(frozen=True)
class Other:
    """Any other type (tokens, function types), by its text."""

    text: str


Type = Scalar | Pointer | Tensor | MemDesc | Descriptor | Other


# ---------------------------------------------------------------- attributes and locations


@dataclass(frozen=True)
class Opaque:
    """An attribute that is neither a number, a string nor a list of these, by its text."""

    text: str


@dataclass(frozen=True, eq=False)
class Dense:
    """`dense<…> : tensor<…>`: one value for all elements, or an array of the tensor's shape."""

    values: Any
    type: Type


@dataclass(frozen=True)
class Frame:
    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Location:
    """The origin of an operation in Python: innermost call first, and the variable bound to its result."""

    frames: tuple[Frame, ...] = ()
    name: str | None = None

    def __str__(self) -> str:
        return " < ".join(map(str, self.frames)) or "unknown line"


# ---------------------------------------------------------------- operations


@dataclass(eq=False)
class Block:
    arguments: list[int] = field(default_factory=list)
    argument_types: list[Type] = field(default_factory=list)
    operations: list[Op] = field(default_factory=list, repr=False)


@dataclass(eq=False)
class Region:
    blocks: list[Block] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """One operation. Operands and results are indices of values, unique in the module.

    Its repr, which pytest prints for a failure, omits the operations that it references: through successors, their
    number grows with the number of paths.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    operand_types: tuple[Type, ...]
    result_types: tuple[Type, ...]
    attributes: dict[str, Any]
    regions: list[Region] = field(repr=False)
    successors: tuple[Block, ...] = field(repr=False)
    location: Location
    result_name: str | None = None

    @functools.cached_property
    def segments(self) -> tuple[slice, ...]:
        """Return the range of each group of a variadic operation's operands."""
        out, start = [], 0
        for size in self.attributes["operandSegmentSizes"]:
            out.append(slice(start, start + size))
            start += size
        return tuple(out)

    def split(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        """Return the operands' values by group."""
        return tuple(values[s] for s in self.segments)


@dataclass(eq=False)
class Module:
    attributes: dict[str, Any]
    functions: dict[str, Op]
    number_of_values: int
    value_names: dict[int, str] = field(repr=False)

    @property
    def kernel(self) -> Op:
        return next(f for f in self.functions.values() if f.attributes.get("sym_visibility", "public") == "public")

    def integer(self, name: str, default: int) -> int:
        return int(self.attributes.get(name, default))

    def walk(self) -> Any:
        """Yield every operation, outer ones first."""
        stack = list(self.functions.values())[::-1]
        while stack:
            op = stack.pop()
            yield op
            for region in op.regions[::-1]:
                for block in region.blocks[::-1]:
                    stack.extend(block.operations[::-1])
