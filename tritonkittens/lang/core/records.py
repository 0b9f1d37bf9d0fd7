"""Values of kernels besides Triton's own tensors: composite register tiles, records, and their pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from tritonkittens.lang.core.backend import Semantic, Trace, Traced, _interpreting, base_type, base_value, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.interpreter import in_fp32


def _flatten_types(types: tuple[base_type, ...], builder: Any, out: list[Any]) -> None:
    for t in types:
        t._flatten_ir_types(builder, out)


def _unflatten(types: tuple[base_type, ...], handles: list[Any], cursor: int) -> tuple[list[Any], int]:
    values = []
    for t in types:
        value, cursor = t._unflatten_ir(handles, cursor)
        values.append(value)
    return values, cursor


class struct_type(base_type):
    """The type of a `struct`: the names and types of its fields."""

    def __init__(self, fields: tuple[tuple[str, base_type], ...]):
        self.fields = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, struct_type) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.mangle())

    def __repr__(self) -> str:
        return "struct<" + ", ".join(f"{n}: {t}" for n, t in self.fields) + ">"

    def mangle(self) -> str:
        return "S" + "_".join(f"{n}_{t.mangle()}" for n, t in self.fields) + "S"

    def _flatten_ir_types(self, builder: Any, out: list[Any]) -> None:
        _flatten_types(tuple(t for _, t in self.fields), builder, out)

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[struct, int]:
        values, cursor = _unflatten(tuple(t for _, t in self.fields), handles, cursor)
        return struct(**dict(zip((n for n, _ in self.fields), values, strict=True))), cursor


class FieldError(TileError, AttributeError):
    """A record has no such field."""


class struct(base_value):
    """An immutable record of named values in a kernel.

    A field is a tile, a vector, a scalar, a constant or another record. Raises `AttributeError` for a field that does
    not exist.

    Example::

        s = tk.struct(acc=acc, m=m)
        s = s.replace(acc=tk.mul_row(s.acc, alpha))
    """

    __triton_builtin__ = True

    def __init__(self, **fields: Traced):
        self.__dict__["fields"] = {n: v if isinstance(v, base_value) else tl.constexpr(v) for n, v in fields.items()}

    @property
    def type(self) -> struct_type:
        return struct_type(tuple((n, v.type) for n, v in self.fields.items()))

    def __getattr__(self, name: str) -> Traced:
        if name.startswith("__"):
            raise AttributeError(name)
        fields = self.__dict__["fields"]
        if name not in fields:
            raise FieldError(f"{name!r}: this record has {', '.join(map(repr, fields)) or 'no fields'}")
        return fields[name]

    def replace(self, _semantic: Semantic = None, **changes: Traced) -> struct:
        """Return a copy with some fields replaced by values of the same type."""
        for name in changes:
            getattr(self, name)
        return struct(**{**self.fields, **changes})

    def _flatten_ir(self, handles: list[Any]) -> None:
        for v in self.fields.values():
            v._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        for n, v in self.fields.items():
            v._set_name(builder, f"{name}.{n}")


def numbers_of(record: struct) -> Iterator[tl.tensor]:
    """Return the run-time values of a record and of its records, in the order of their fields."""
    for field in record.fields.values():
        if isinstance(field, struct):
            yield from numbers_of(field)
        elif isinstance(field, tl.tensor):
            yield field


class type_of_members(base_type):
    """The type of a value that consists of other values, of the types `members`. The mangled name contains all of
    them.
    """

    members: tuple[base_type, ...]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.mangle() == other.mangle()

    def __hash__(self) -> int:
        return hash(self.mangle())

    def _flatten_ir_types(self, builder: Any, out: list[Any]) -> None:
        _flatten_types(self.members, builder, out)

    def _mangled_members(self) -> str:
        return "_".join(member.mangle() for member in self.members)

    def _members_from(self, handles: list[Any], cursor: int) -> tuple[tuple[Traced, ...], int]:
        """Return the members that begin with handle number `cursor`, and the position after them."""
        values, cursor = _unflatten(self.members, handles, cursor)
        return tuple(values), cursor


class composite_type(base_type):
    """The type of a `composite`: the sizes of its pieces along each axis, and their types."""

    def __init__(self, axes: tuple[tuple[int, ...], ...], pieces: tuple[base_type, ...]):
        self.axes, self.pieces = axes, pieces

    def __eq__(self, other: object) -> bool:
        return isinstance(other, composite_type) and self.axes == other.axes and self.pieces == other.pieces

    def __hash__(self) -> int:
        return hash(self.mangle())

    def __repr__(self) -> str:
        return f"{'×'.join(str(sum(a)) for a in self.axes)} of {self.pieces[0]}"

    def mangle(self) -> str:
        return "X" + "_".join(p.mangle() for p in self.pieces) + "X"

    def _flatten_ir_types(self, builder: Any, out: list[Any]) -> None:
        _flatten_types(self.pieces, builder, out)

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[composite, int]:
        values, cursor = _unflatten(self.pieces, handles, cursor)
        return composite(self.axes, tuple(values)), cursor


def _operator(name: str) -> Callable[..., Traced]:
    def method(self: Traced, other: Traced, _semantic: Semantic = None, _generator: Any = None) -> Traced:
        t = Trace(_semantic, _generator)
        return apply_pieces(t, in_fp32(t, lambda a, b: t.method(a, name, b), narrow="truediv" not in name), self, other)

    method.__name__ = name
    return method


# Python tries the right operand of `scalar * tile` first only if its class derives from the left one's, which the
# interpreter's scalars have. The code generator has its own rule of precedence (`__triton_aggregate__`).
_composite_base: Any = tl.tensor if _interpreting() else base_value


class composite(_composite_base):
    """A register tile or vector whose extents are not powers of two, stored as power-of-two pieces.

    `axes` are the sizes along each axis; pieces are row-major. The operators are those of a Triton tensor, which
    itself allows powers of two only.
    """

    __triton_aggregate__ = True  # gives our operators precedence over a tensor's on the left

    def __init__(self, axes: tuple[tuple[int, ...], ...], pieces: tuple[Traced, ...]):
        self.axes, self.pieces = axes, pieces

    @property
    def type(self) -> composite_type:
        return composite_type(self.axes, tuple(p.type for p in self.pieces))

    @property
    def dtype(self) -> tl.dtype:
        return self.pieces[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(a) for a in self.axes)

    def __repr__(self) -> str:
        return repr(self.type)

    def to(self, dtype: Traced, _semantic: Semantic = None, _generator: Any = None) -> composite:
        """Cast element by element to another dtype."""
        t = Trace(_semantic, _generator)
        return apply_pieces(t, lambda p: t.method(p, "to", dtype), self)

    def _flatten_ir(self, handles: list[Any]) -> None:
        for p in self.pieces:
            p._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        for i, p in enumerate(self.pieces):
            p._set_name(builder, f"{name}.{i}")


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
for _n in (
    *(f"__{n}__" for n in _BINARY),
    *(f"__r{n}__" for n in _BINARY),
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__eq__",
    "__ne__",
):
    setattr(composite, _n, _operator(_n))


def _negate(self: composite, _semantic: Semantic = None, _generator: Any = None) -> composite:
    t = Trace(_semantic, _generator)
    return apply_pieces(t, in_fp32(t, lambda p: t.method(p, "__neg__")), self)


def _invert(self: composite, _semantic: Semantic = None, _generator: Any = None) -> composite:
    t = Trace(_semantic, _generator)
    return apply_pieces(t, lambda p: t.method(p, "__invert__"), self)


composite.__neg__, composite.__invert__ = _negate, _invert


def dtype_of(x: Traced) -> Traced:
    """Return the dtype of a tile, vector or run-time scalar; None for a Python number."""
    x = unwrap(x)
    return x.dtype if isinstance(x, (composite, tl.tensor)) else None


def axes_of(x: Traced) -> tuple[tuple[int, ...], ...]:
    """Return the extents of the pieces along each axis of a tile or vector; () for a scalar.

    Raises `TileError` for a tile that is not in registers, which says what brings it there.
    """
    if isinstance(x, composite):
        return x.axes
    if hasattr(x, "outside_registers"):
        raise TileError(x.outside_registers)
    return tuple((int(unwrap(s)),) for s in x.shape) if isinstance(x, tl.tensor) and x.type.is_block() else ()


def shape_of(x: Traced) -> tuple[int, ...]:
    """Return the extents of a tile or vector; () for a scalar."""
    return tuple(sum(a) for a in axes_of(x))


def pieces_of(x: Traced) -> tuple[Traced, ...]:
    """Return the power-of-two pieces of a register tile: a plain tensor is one."""
    return x.pieces if isinstance(x, composite) else (x,)


def assemble(axes: tuple[tuple[int, ...], ...], pieces: list[Traced] | tuple[Traced, ...]) -> Traced:
    """Return one tile from its pieces: a plain tensor for a single piece."""
    return pieces[0] if len(pieces) == 1 else composite(axes, tuple(pieces))


def apply_pieces(t: Trace, fn: Callable[..., Traced], *operands: Traced) -> Traced:
    """Apply `fn` to matching pieces of tiles of one shape; scalars apply to every piece. Raises `TileError` where
    shapes differ.
    """
    operands = tuple(unwrap(x) for x in operands)
    shaped = [axes_of(x) for x in operands]
    axes = next((a for a in shaped if a), ())
    for a in shaped:
        if a and a != axes:
            shapes = " and ".join(str(list(shape_of(x))) for x in operands if axes_of(x))
            raise TileError(f"operands of shapes {shapes}: an element-wise operation needs equal shapes (or a scalar)")
    if not axes:
        return fn(*operands)
    count = len(next(pieces_of(x) for x, a in zip(operands, shaped, strict=True) if a))
    out = []
    for i in range(count):
        like = next(pieces_of(x)[i] for x, a in zip(operands, shaped, strict=True) if a)
        args = [t.relayout(pieces_of(x)[i], like) if a else x for x, a in zip(operands, shaped, strict=True)]
        out.append(fn(*args))
    return assemble(axes, out)


@op
def field(t: Trace, record: Traced, name: Traced) -> Traced:
    """Return the field `name` (a compile-time string) of a record `record`.

    Raises `AttributeError` for a field that does not exist.
    """
    return getattr(record, unwrap(name))


@op
def with_field(t: Trace, record: Traced, name: Traced, value: Traced) -> Traced:
    """Return `record` with one more field `name` (a compile-time string) of value `value`, or with that field
    replaced.
    """
    return struct(**{**record.fields, unwrap(name): value})


@op
def shape(t: Trace, x: Traced, axis: Traced = None) -> Traced:
    """Return the extents of a tile or vector `x` as a tuple of constants, or the extent of one `axis`."""
    extents = x.shape if hasattr(x, "shape") and not isinstance(x, tl.tensor) else shape_of(x)
    return tl.constexpr(extents[unwrap(axis)]) if axis is not None else tl.tuple([tl.constexpr(e) for e in extents])
