"""The tile types: dtype, extents and layout of a tile. They are frozen host objects, usable on the host and inside
kernels.

`zero`, `load`, `allocate` and others make values of these types. A template declares them in its `layout`.
Constructing a type checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import triton.language as tl
from triton.language.core import base_value, constexpr_type

from tritonkittens.arch import TENSOR_COLUMNS
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import ELEMENT_TYPES, base_columns, itemsize, name_of, names_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.types import swizzle as swizzling

SWIZZLES = (32, 64, 128)
SWIZZLE_LINE = SWIZZLES[-1]  # bytes of a row that are contiguous: wider tiles are stored line by line
ACCESSES = ("row", "column", "ldmatrix")


def split(extent: int) -> tuple[int, ...]:
    """Return the powers of two, in descending order, whose sum is `extent`: 176 → (128, 32, 16)."""
    return tuple(1 << b for b in range(extent.bit_length() - 1, -1, -1) if extent >> b & 1)


class TileType(base_value):
    """Base of the tile types: a compile-time constant inside kernels."""

    __triton_builtin__ = True  # lets kernel code call the constructor

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, unwrap(getattr(self, f.name)))
        self.check()

    def check(self) -> None:
        """Raise `TileError` for extents or a dtype that the type does not have."""
        raise NotImplementedError

    @property
    def type(self) -> constexpr_type:
        return constexpr_type(self)

    def _flatten_ir(self, handles: list[Any]) -> None:
        pass

    def _set_name(self, builder: Any, name: str) -> None:
        pass

    def mangle(self) -> str:
        values = [getattr(self, f.name) for f in fields(self)]
        return type(self).__name__ + "_" + "_".join(v.mangle() if isinstance(v, TileType) else str(v) for v in values)


def _element_type(tile: TileType, dtype: object) -> None:
    if dtype not in ELEMENT_TYPES:
        raise TileError(f"{tile!r}: {dtype!r} is no element type of a tile; use {names_of(ELEMENT_TYPES)}")


def _positive_multiple(what: str, value: object, step: int, why: str) -> None:
    if not isinstance(value, int) or value <= 0 or value % step:
        raise TileError(f"{what}: {value!r} must be a positive multiple of {step} ({why})")


@dataclass(frozen=True, repr=False)
class rt(TileType):
    """Register tile of `rows` × `cols`, spread over the warps that own it.

    Args:
        dtype: the element type.
        rows: a multiple of 16.
        cols: a multiple of 16, or of 32 for one-byte types.
        layout: how an explicit kernel spreads the tile over threads. "mma" is a tensor-core accumulator (the
            default). "row" is one row a thread, as tensor-memory loads return it. "memory" is 16-byte pieces of rows,
            for coalesced global access. Plain Triton kernels ignore it.

    Raises:
        TileError: for another dtype, extent or layout.

    Example::

        scores = tk.zero(tk.rt(tk.fp32, 64, 128))
    """

    dtype: tl.dtype
    rows: int
    cols: int
    layout: str = "mma"

    def __repr__(self) -> str:
        tail = "" if self.layout == "mma" else f", layout={self.layout!r}"
        return f"rt({name_of(self.dtype)}, {self.rows}, {self.cols}{tail})"

    def check(self) -> None:
        _element_type(self, self.dtype)
        step = base_columns(self.dtype)
        base = f"the base tile of {name_of(self.dtype)} is 16×{step}"
        _positive_multiple(f"{self!r}: rows", self.rows, 16, base)
        _positive_multiple(f"{self!r}: cols", self.cols, step, base)
        if self.layout not in ("mma", "row", "memory"):
            raise TileError(f"{self!r}: layout {self.layout!r} must be 'mma', 'row' or 'memory'")

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)


@dataclass(frozen=True, repr=False)
class rv(TileType):
    """Register vector of `length` elements (a multiple of 16), a plain distributed array.

    `col_vec` and `row_vec` are vectors tied to a tile. Raises `TileError` for another dtype or length.
    """

    dtype: tl.dtype
    length: int

    def __repr__(self) -> str:
        return f"rv({name_of(self.dtype)}, {self.length})"

    def check(self) -> None:
        _element_type(self, self.dtype)
        _positive_multiple(f"{self!r}: length", self.length, 16, "a register vector covers whole 16-element pieces")

    @property
    def shape(self) -> tuple[int]:
        return (self.length,)


@dataclass(frozen=True, repr=False)
class _tile_vector(TileType):
    """A register vector in the layout of a tile: every thread holds the values of its own rows or columns of the
    tile.

    Combining the two moves no data between threads.
    """

    tile: rt
    dtype: Any = None
    axis: ClassVar[int]  # the axis of the tile along which the vector runs: 0 for one value per row

    def __repr__(self) -> str:
        tail = "" if self.dtype == self.tile.dtype else f", {name_of(self.dtype)}"
        return f"{type(self).__name__}({self.tile!r}{tail})"

    def check(self) -> None:
        if not isinstance(self.tile, rt):
            raise TileError(
                f"{type(self).__name__}({self.tile!r}): a tile vector is tied to a register tile type; "
                "give tk.rt(dtype, rows, cols), or use rv"
            )
        if self.dtype is None:
            object.__setattr__(self, "dtype", self.tile.dtype)
        _element_type(self, self.dtype)

    @property
    def length(self) -> int:
        return self.tile.shape[self.axis]

    @property
    def shape(self) -> tuple[int]:
        return (self.length,)


@dataclass(frozen=True, repr=False)
class col_vec(_tile_vector):
    """Column vector of a register tile type: one value per row (`tile.rows`).

    `row_max` and the other row reductions of such a tile return this type. In an explicit kernel its layout is the
    tile's, without the column axis.

    Args:
        tile: a register tile type (`rt`).
        dtype: the element type; the tile's by default.

    Raises:
        TileError: for anything but a register tile type.

    Example::

        m = tk.neg_infty(tk.col_vec(tk.rt(tk.fp32, 64, 128)))
    """

    axis = 0


@dataclass(frozen=True, repr=False)
class row_vec(_tile_vector):
    """Row vector of a register tile type: one value per column (`tile.cols`).

    The column reductions such as `col_max` return this type. Arguments and errors as in `col_vec`.
    """

    axis = 1


@dataclass(frozen=True, repr=False)
class st(TileType):
    """Shared tile of `rows` × `cols`, swizzled as TMA and the tensor cores expect.

    Extents that are not powers of two are stored as several power-of-two pieces.

    Args:
        dtype: the element type.
        rows: a multiple of 16.
        cols: a multiple of 16, or of 32 for one-byte types.
        swizzle: the permuted span in bytes: 32, 64 or 128, or "auto" for the widest that the row bytes allow.
        contiguous: store the pieces one after the other, so that one wgmma reads them as its B. Such a B is N × K,
            where K is one swizzle line (128 bytes unless `swizzle` is less), or K × N, where N is whole lines of 128
            bytes. Only TMA fills the tile and only products read it. Other chips than Hopper ignore `contiguous`.

    Raises:
        TileError: for another dtype, extent or swizzle.

    Example::

        ring = tk.allocate(tk.st(tk.bf16, 128, 64), STAGES)

    Source: PTX ISA, "Swizzling modes" (tensor copies) and "Shared memory matrix layout" (wgmma).
    """

    dtype: tl.dtype
    rows: int
    cols: int
    swizzle: int | str = "auto"
    contiguous: bool = False

    def __repr__(self) -> str:
        tail = "" if self.swizzle == "auto" else f", swizzle={self.swizzle}"
        return f"st({name_of(self.dtype)}, {self.rows}, {self.cols}{tail}{', contiguous' if self.contiguous else ''})"

    def check(self) -> None:
        _element_type(self, self.dtype)
        step = base_columns(self.dtype)
        row_bytes = self.cols * itemsize(self.dtype) if isinstance(self.cols, int) else 0
        if isinstance(self.cols, int) and self.cols % step:
            raise TileError(
                f"{self!r}: {self.cols} columns are {row_bytes} bytes; a swizzled {name_of(self.dtype)} tile needs a "
                f"multiple of {step} columns ({step * itemsize(self.dtype)} bytes)"
            )
        _positive_multiple(f"{self!r}: cols", self.cols, step, f"the base tile of {name_of(self.dtype)} is 16×{step}")
        _positive_multiple(f"{self!r}: rows", self.rows, 16, f"the base tile of {name_of(self.dtype)} is 16×{step}")
        if self.contiguous and not (self._is_one_line(row_bytes) if self.rows_in_pieces else self._is_lines(row_bytes)):
            raise TileError(
                f"{self!r}: a contiguous tile has rows that are no power of two, and its {row_bytes} bytes of columns "
                f"are one swizzle line: {', '.join(map(str, SWIZZLES))}; or columns that are no power of two, and they "
                f"are lines of {SWIZZLE_LINE} bytes"
            )
        if self.swizzle != "auto":
            if self.swizzle not in SWIZZLES:
                raise TileError(f"{self!r}: swizzle {self.swizzle!r} must be 'auto', 32, 64 or 128 bytes")
            for piece in split(self.cols):
                if piece * itemsize(self.dtype) % self.swizzle:
                    raise TileError(
                        f"{self!r}: a swizzle of {self.swizzle} bytes must divide the row; "
                        f"{piece} columns are {piece * itemsize(self.dtype)} bytes"
                    )

    def _is_one_line(self, row_bytes: int) -> bool:
        return row_bytes in SWIZZLES and self.swizzle in ("auto", row_bytes)

    def _is_lines(self, row_bytes: int) -> bool:
        return len(split(self.cols)) > 1 and row_bytes % SWIZZLE_LINE == 0 and self.swizzle in ("auto", SWIZZLE_LINE)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    @property
    def nbytes(self) -> int:
        return self.rows * self.cols * itemsize(self.dtype)

    @property
    def rows_in_pieces(self) -> bool:
        """Whether the rows are no power of two. A contiguous tile's rows are then N (stored N × K); else its columns
        are N (K × N).
        """
        return len(split(self.rows)) > 1

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns of a contiguous tile's storage unit: its smallest piece, or a whole swizzle line."""
        return (
            (split(self.rows)[-1], self.cols)
            if self.rows_in_pieces
            else (self.rows, SWIZZLE_LINE // itemsize(self.dtype))
        )

    def piece_swizzle(self, cols: int) -> int:
        """Swizzle span in bytes of a power-of-two piece of `cols` columns."""
        if self.swizzle != "auto":
            return int(self.swizzle)
        row_bytes = cols * itemsize(self.dtype)
        return next(s for s in (128, 64, 32) if row_bytes % s == 0)

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """(row offset, column offset, rows, cols) of every power-of-two piece, row-major."""
        out, r0 = [], 0
        for r in split(self.rows):
            c0 = 0
            for c in split(self.cols):
                out.append((r0, c0, r, c))
                c0 += c
            r0 += r
        return out

    def picture(self) -> str:
        """Draw the first 8 rows in shared memory: for every 16-byte chunk of a row, the first of its four banks (of
        32).

        A bar separates the pieces of a tile whose columns are not a power of two. Where chunks below each other have
        different banks, `ldmatrix` and the tensor cores read 8 rows in one wavefront.
        Source: PTX ISA, "Swizzling modes".
        """
        size = itemsize(self.dtype)
        heads, lines = [], [""] * min(8, self.rows)
        for r0, c0, rows, cols in self.pieces():
            if r0:
                break
            span = self.piece_swizzle(cols)
            heads.append(f"{rows}×{cols} at column {c0}, swizzle {span} bytes")
            for i, banks in enumerate(swizzling.picture_rows(rows, cols * size, span)):
                lines[i] += (" |" if c0 else "") + "".join(f"{b:3d}" for b in banks)
        title = f"{self!r}: first bank of every {swizzling.CHUNK}-byte chunk; {'; '.join(heads)}"
        return "\n".join([title, *(f"row {i}:{line}" for i, line in enumerate(lines))])

    def bank_conflicts(self, access: str = "row") -> int:
        """Count the extra shared-memory wavefronts of the worst warp access, from the swizzle alone (0 is ideal).

        Args:
            access: "row": eight lanes read eight neighbouring 16-byte chunks of a row (fewer where the row is
                shorter), as 16-byte loads and stores do. "ldmatrix": eight lanes read one 16-byte chunk of eight
                neighbouring rows, as ldmatrix, stmatrix and the tensor cores do. "column": 32 lanes (16 in a tile of
                16 rows) read one element of as many neighbouring rows.

        Raises:
            TileError: for another access.

        Source: PTX ISA, "Swizzling modes".
        """
        if access not in ACCESSES:
            raise TileError(f"{self!r}.bank_conflicts({access!r}): access must be {', '.join(map(repr, ACCESSES))}")
        size, chunk, worst = itemsize(self.dtype), swizzling.CHUNK, 0
        for _, _, rows, cols in self.pieces():
            row_bytes, span = cols * size, self.piece_swizzle(cols)

            def at(row: int, byte: int, rows: int = rows, span: int = span) -> int:
                return swizzling.offset(row, byte, rows, span)

            if access == "row":
                line = min(swizzling.LINE, row_bytes)
                lanes = [
                    [at(r, c + i) for i in range(0, line, chunk)] for r in range(8) for c in range(0, row_bytes, line)
                ]
            elif access == "ldmatrix":
                lanes = [
                    [at(r + i, c) for i in range(8)] for r in range(0, rows, 8) for c in range(0, row_bytes, chunk)
                ]
            else:
                together = min(32, rows)
                lanes = [
                    [at(r + i, c) for i in range(together)]
                    for r in range(0, rows, together)
                    for c in range(0, row_bytes, size)
                ]
            width = size if access == "column" else chunk
            worst = max(worst, *(swizzling.wavefronts(offsets, width) - 1 for offsets in lanes))
        return worst


@dataclass(frozen=True, repr=False)
class sv(TileType):
    """Shared vector of `length` elements (a multiple of 16), a plain array without swizzle.

    Raises `TileError` for another dtype or length, or where its bytes are no multiple of 16.
    """

    dtype: tl.dtype
    length: int

    def __repr__(self) -> str:
        return f"sv({name_of(self.dtype)}, {self.length})"

    def check(self) -> None:
        _element_type(self, self.dtype)
        _positive_multiple(f"{self!r}: length", self.length, 16, "a shared vector is moved in whole 16-element pieces")
        if self.length * itemsize(self.dtype) % 16:
            raise TileError(
                f"{self!r}: {self.length * itemsize(self.dtype)} bytes; bulk copies move multiples of 16 bytes"
            )

    @property
    def shape(self) -> tuple[int]:
        return (self.length,)

    @property
    def nbytes(self) -> int:
        return self.length * itemsize(self.dtype)


@dataclass(frozen=True, repr=False)
class by_rows(TileType):
    """For `tk.gl`: TMA moves single rows of the shared tile type `tile`, selected by number (`load_rows_async`)."""

    tile: st

    def __repr__(self) -> str:
        return f"by_rows({self.tile!r})"

    def check(self) -> None:
        if not isinstance(self.tile, st):
            raise TileError(f"by_rows({self.tile!r}): takes a shared tile type (st)")

    @property
    def dtype(self) -> tl.dtype:
        return self.tile.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.tile.shape


TENSOR_ROWS = (64, 128)  # of a tile of tensor memory


@dataclass(frozen=True, repr=False)
class tt(TileType):
    """Tensor-memory tile (Blackwell) of 64 or 128 rows, which are lanes, and `cols` columns.

    A tile of 4-byte elements takes `cols` columns of 32 bits, one of 2-byte elements half. `cols` is a multiple of 16,
    or 1 for a vector of 4-byte elements, one a row. Raises `TileError` for other extents, or for more than 512 columns.
    Source: PTX ISA, "Tensor Memory": 128 lanes × 512 columns of 32 bits a CTA, allocated in powers of two of at least
    32 columns.
    """

    dtype: tl.dtype
    rows: int
    cols: int

    def __repr__(self) -> str:
        return f"tt({name_of(self.dtype)}, {self.rows}, {self.cols})"

    def check(self) -> None:
        _element_type(self, self.dtype)
        if self.rows not in TENSOR_ROWS:
            raise TileError(f"{self!r}: {self.rows} rows; tensor memory holds tiles of 64 or 128 rows (lanes)")
        if self.cols != 1 or itemsize(self.dtype) != 4:
            _positive_multiple(f"{self!r}: cols", self.cols, 16, "a tensor-memory tile covers whole 16-column pieces")
        if self.columns > TENSOR_COLUMNS:
            raise TileError(f"{self!r}: {self.columns} columns of 32 bits; tensor memory has {TENSOR_COLUMNS}")

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    @property
    def columns(self) -> int:
        """32-bit tensor-memory columns of this tile's pieces, each rounded up to the allocation unit of 32."""
        return sum(max(32, c * itemsize(self.dtype) // 4) for c in split(self.cols))
