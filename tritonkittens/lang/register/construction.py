"""Register tiles: fills, indices, layout changes, and `apply`."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import (
    DistributedLayout,
    TensorMemoryLayout,
    Trace,
    Traced,
    gl,
    op,
    tensor_memory_descriptor_type,
)
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import constant, itemsize, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import apply_pieces, assemble, axes_of, composite, dtype_of, pieces_of, shape_of
from tritonkittens.lang.types.tiles import TileType, col_vec, row_vec, rt, rv, split, tt

WARPGROUP = 4  # warps
MAX_WGMMA_COLUMNS = 256  # N of one wgmma instruction
QUADS = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]  # (row, column) of lanes 1, 2, 4, 8, 16 in a tensor-core fragment
FRAGMENTS = {32: "16x256b", 16: "16x128b", 8: "16x64b"}  # accesses of tensor memory, by the bits of an element


def accumulator_layout(t: Trace, rows: int, cols: int) -> DistributedLayout:
    """Return the register layout of a tensor-core accumulator on this target.

    It is wgmma's where whole warpgroups share 64-row slabs, tensor memory's where they share its lanes, else
    mma.sync's.
    """
    if t.num_warps % WARPGROUP == 0 and rows % 64 == 0 and t.chip.wgmma:
        warps_m = min(t.num_warps, rows // 16)
        instruction = [16, min(cols, MAX_WGMMA_COLUMNS), 16]
        return gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[warps_m, t.num_warps // warps_m], instr_shape=instruction
        )
    if t.chip.tcgen05 and (rows, t.num_warps) != (64, WARPGROUP):  # these have the same layout from both
        return fragment_layout(t, rows, cols, tl.float32) or warp_layout(t, rows)
    return warp_layout(t, rows)


def fragment_layout(t: Trace, rows: int, cols: int, dtype: tl.dtype) -> DistributedLayout | None:
    """Return the layout in which whole warpgroups access a tile of tensor memory as tensor-core fragments, like
    mma.sync's but that a warp has neighbouring rows; None where they cannot.

    A tile of 16-bit elements has the layout of an accumulator of its shape. Source: PTX ISA, tcgen05.ld, .16x256b.
    """
    bits = dtype.primitive_bitwidth
    pieces = rows // 16 * (cols * bits // int(FRAGMENTS[bits][3:-1]))  # 16 rows of an instruction each
    if t.num_warps % WARPGROUP or rows not in (64, 128) or pieces < t.num_warps or cols * bits > 512 * 32:
        return None
    memory = TensorMemoryLayout([rows, cols], col_stride=1)
    tile = tensor_memory_descriptor_type(dtype, [rows, cols], memory, [rows, cols])
    return tile.get_reg_layout(num_warps=t.num_warps, instr_variant=FRAGMENTS[bits])


def warp_layout(t: Trace, rows: int) -> DistributedLayout:
    """Return the accumulator layout of mma.sync: every warp computes 16×8 tiles."""
    warps_m = min(t.num_warps, max(1, rows // 16))
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[warps_m, t.num_warps // warps_m], instr_shape=[16, 8]
    )


def is_accumulator(t: Trace, piece: Traced) -> bool:
    """Whether a piece of a register tile has a tensor-core accumulator's layout."""
    if not t.explicit:
        return False
    layout = piece.type.layout
    return isinstance(layout, gl.NVMMADistributedLayout) or getattr(layout, "lane_bases", None) == QUADS


def _divides_columns(layout: DistributedLayout) -> bool:
    """Whether a warp holds only some columns of an accumulator."""
    if isinstance(layout, gl.NVMMADistributedLayout):
        return bool(layout.warps_per_cta[1] > 1)
    return any(base[1] for base in layout.warp_bases)


def memory_layout(t: Trace, rows: int, cols: int, itemsize: int) -> DistributedLayout:
    """Return the layout for global access: every thread holds 16 bytes of a row, neighbouring threads hold
    neighbouring pieces.
    """
    vector = min(cols, max(1, 16 // itemsize))
    lanes = min(32, max(1, cols // vector))
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [t.num_warps, 1], [1, 0])


def row_layout(t: Trace, cols: int) -> DistributedLayout:
    """Return the layout of tensor-memory loads (32x32b): one row a thread."""
    return gl.BlockedLayout([1, cols], [32, 1], [t.num_warps, 1], [0, 1])


def vector_layout(t: Trace) -> DistributedLayout:
    """Return the layout of vectors: one element a thread, over all warps."""
    return gl.BlockedLayout([1], [32], [t.num_warps], [0])


def piece_layout(t: Trace, kind: str, rows: int, cols: int, itemsize: int) -> DistributedLayout | None:
    """Return the layout of one power-of-two piece of a register tile of layout kind "mma", "row" or "memory"."""
    if not t.explicit:
        return None
    if kind == "row":
        return row_layout(t, cols)
    if kind == "memory":
        return memory_layout(t, rows, cols, itemsize)
    return accumulator_layout(t, rows, cols)


def _tile_type(what: Traced, dtype: Traced) -> TileType:
    what, dtype = unwrap(what), unwrap(dtype)
    if isinstance(what, (rt, rv, col_vec, row_vec, tt)):
        return what
    if isinstance(what, tuple) and len(what) in (1, 2):
        dtype = dtype or tl.float32
        return rt(dtype, *what) if len(what) == 2 else rv(dtype, *what)
    raise TileError(f"{what!r}: give a register type (rt, rv, col_vec, row_vec) or a shape of one or two extents")


def _layouts(t: Trace, what: TileType) -> tuple[tuple[tuple[int, ...], ...], list[DistributedLayout | None]]:
    """Return how a register type is split along each axis, and the register layout of each piece (None outside
    explicit kernels).
    """
    if isinstance(what, rv):
        lengths = split(what.length)
        return (lengths,), [vector_layout(t) if t.explicit else None for _ in lengths]
    tile = what.tile if isinstance(what, (col_vec, row_vec)) else what
    layout = getattr(tile, "layout", "mma")
    axes = (split(tile.rows), split(tile.cols))
    grid = [[piece_layout(t, layout, r, c, itemsize(tile.dtype)) for c in axes[1]] for r in axes[0]]
    if tile is what:
        return axes, [piece for line in grid for piece in line]
    # a reduction takes the layout of the first piece of each line, and the vector must match it
    first = [line[0] for line in grid] if what.axis == 0 else grid[0]
    return (axes[what.axis],), [gl.SliceLayout(1 - what.axis, piece) if t.explicit else None for piece in first]


def make(t: Trace, what: TileType, value: Traced) -> Traced:
    """Return a register tile or vector of type `what` with every element `value`."""
    value = constant(unwrap(value), what.dtype, f"fill of {what!r}")
    axes, layouts = _layouts(t, what)
    shapes = [(r, c) for r in axes[0] for c in axes[1]] if len(axes) == 2 else [(n,) for n in axes[0]]
    return assemble(
        axes, [t.full(shape, value, what.dtype, layout) for shape, layout in zip(shapes, layouts, strict=True)]
    )


@op
def full(t: Trace, what: Traced, value: Traced, dtype: Traced = None) -> Traced:
    """Return a register tile or vector filled with `value`.

    Args:
        what: a type (`tk.rt(tk.fp32, 64, 96)`, `tk.rv`, `tk.col_vec`, `tk.row_vec`) or a shape (`(64, 96)` or
            `(64,)`).
        value: a number or a run-time scalar.
        dtype: the element type of a shape, fp32 by default.

    Raises:
        TileError: for a number that the element type cannot hold (1.5 as int32, infinity as e4m3).

    Example::

        m = tk.full(tk.rv(tk.fp32, 64), -1.0)
    """
    return make(t, _tile_type(what, dtype), value)


@op
def zero(t: Trace, what: Traced, dtype: Traced = None) -> Traced:
    """Return a register tile or vector of type or shape `what`, filled with zeros. `dtype` is the element type of a
    shape; see `full`.

    A tile of tensor memory is filled with zeros and returned, so one kernel serves both kinds of accumulator.
    """
    what = unwrap(what)
    return what.fill(t, 0) if hasattr(what, "fill") else make(t, _tile_type(what, dtype), 0)


@op
def one(t: Trace, what: Traced, dtype: Traced = None) -> Traced:
    """Return a register tile or vector of type or shape `what`, filled with ones. `dtype` is the element type of a
    shape; see `full`.
    """
    return make(t, _tile_type(what, dtype), 1)


@op
def pos_infty(t: Trace, what: Traced, dtype: Traced = None) -> Traced:
    """Return a register tile or vector of type or shape `what`, filled with +∞. `dtype` is the element type of a
    shape; see `full`.
    """
    return make(t, _tile_type(what, dtype), float("inf"))


@op
def neg_infty(t: Trace, what: Traced, dtype: Traced = None) -> Traced:
    """Return a register tile or vector of type or shape `what`, filled with −∞. `dtype` is the element type of a
    shape; see `full`.
    """
    return make(t, _tile_type(what, dtype), float("-inf"))


@op
def full_like(t: Trace, x: Traced, value: Traced, dtype: Traced = None) -> Traced:
    """Return a tile or vector of the shape and layout of `x`, filled with `value`.

    `dtype` is the element type, that of `x` by default. Raises `TileError` for a number that the element type cannot
    hold.
    """
    dtype = unwrap(dtype) or pieces_of(x)[0].dtype
    value = constant(unwrap(value), dtype, f"full_like(dtype={name_of(dtype)})")
    return apply_pieces(t, lambda p: t.full(tuple(unwrap(p.shape)), value, dtype, getattr(p.type, "layout", None)), x)


def indices(t: Trace, x: Traced, axis: int, start: Traced = 0) -> list[Traced]:
    """Return, for every piece of the tile `x` (row-major), the global index along `axis` as a vector, offset by
    `start`.
    """
    axes = axes_of(x)
    pieces = pieces_of(x)
    out, r0 = [], 0
    for i, r in enumerate(axes[0]):
        c0 = 0
        for j, c in enumerate(axes[1]):
            like = pieces[i * len(axes[1]) + j]
            vector = t.arange(c if axis else r, axis, like)
            out.append(t.method(t.method(vector, "__add__", c0 if axis else r0), "__add__", start))
            c0 += c
        r0 += r
    return out


@triton.jit
def _column(v):
    return v[:, None]


@triton.jit
def _row(v):
    return v[None, :]


def index_tiles(t: Trace, x: Traced, row: Traced, col: Traced) -> tuple[list[Traced], list[Traced]]:
    """Return, for every piece of `x`, its row indices (n, 1) and column indices (1, m). (row, col) is the tile's
    global origin.
    """
    return [t.call(_column, v) for v in indices(t, x, 0, row)], [t.call(_row, v) for v in indices(t, x, 1, col)]


def vector_indices(t: Trace, v: Traced, start: Traced = 0) -> list[Traced]:
    """Return, for every piece of the vector `v`, the index of its elements, offset by `start`."""
    out, n0 = [], 0
    for piece, n in zip(pieces_of(v), axes_of(v)[0], strict=True):
        index = t.semantic.arange(0, n, piece.type.layout) if t.explicit else t.call("arange", 0, n)
        out.append(t.method(t.method(index, "__add__", n0), "__add__", start))
        n0 += n
    return out


@op
def iota(t: Trace, x: Traced, axis: Traced = 1, start: Traced = 0) -> Traced:
    """Return an int32 tile or vector whose elements are their index along `axis`, counted from `start`.

    Args:
        x: a register type (`tk.rt(tk.fp32, 64, 96)`), or a tile or vector whose shape and layout the result takes.
        axis: 0 for row numbers, 1 for column numbers. A vector has one axis.
        start: a number or an int32 scalar.

    Raises:
        TileError: for another axis.
    """
    x, axis = unwrap(x), unwrap(axis)
    if isinstance(x, TileType):
        x = make(t, _tile_type(x, None), 0)
    if len(shape_of(x)) == 1:
        return assemble(axes_of(x), vector_indices(t, x, start))
    if len(shape_of(x)) != 2 or axis not in (0, 1):
        raise TileError(
            f"iota(axis={axis!r}) of shape {list(shape_of(x))}: needs a tile of two axes and axis 0 or 1, or a vector"
        )
    zeros = t.call(full_like, x, 0, tl.int32)
    vectors = [t.call(_row if axis else _column, v) for v in indices(t, x, axis, start)]
    return assemble(axes_of(x), [t.method(v, "__add__", z) for v, z in zip(vectors, pieces_of(zeros), strict=True)])


@op
def apply(t: Trace, x: Traced, f: Traced, row: Traced = 0, col: Traced = 0) -> Traced:
    """Apply a `@triton.jit` function to every element and its index.

    Args:
        x: a register tile (rows × cols) or vector of any dtype.
        f: `f(row, col, x)` for a tile, `f(index, x)` for a vector. The indices are int32 tiles that broadcast (rows ×
            1 and 1 × cols). `f` returns a tile of the shape of its values, of any dtype.
        row: the global row of the first element (for a vector: its index), a number or an int32 scalar.
        col: the global column of the first element.

    Returns:
        A tile or vector of the shape of `x` and the dtype that `f` returns.

    Raises:
        TileError: for anything but a register tile or vector.

    Example::

        s = tk.apply(s, add_alibi, row=block * 64)
    """
    f = unwrap(f)
    if len(axes_of(x)) == 1:
        return assemble(
            axes_of(x), [t.call(f, i, p) for i, p in zip(vector_indices(t, x, row), pieces_of(x), strict=True)]
        )
    if len(axes_of(x)) != 2:
        raise TileError(f"apply to shape {list(shape_of(x))}: needs a register tile or vector")
    rows, cols = index_tiles(t, x, row, col)
    out = [t.call(f, r, c, p) for r, c, p in zip(rows, cols, pieces_of(x), strict=True)]
    return assemble(axes_of(x), out)


@op
def map(t: Trace, x: Traced, f: Traced, operands: Traced = None) -> Traced:
    """`f(x, …)` for every element of a tile or vector; `f` is a `@triton.jit` function, and its other arguments are the
    fields of the record `operands`.

    Operands have the shape of `x`, or are scalars or constants. `f` gets one piece of each at a time, whose extents are
    powers of two, so that it may call Triton's own functions too. It returns a value of the shape and dtype of `x`.
    Raises `TileError` where it returns another, or shapes differ.
    """
    f, named = unwrap(f), {} if unwrap(operands) is None else operands.fields

    def piece(p: Traced, *values: Traced) -> Traced:
        y = unwrap(t.call(f, p, **dict(zip(named, values, strict=True))))
        if shape_of(y) != shape_of(p) or dtype_of(y) != p.dtype:
            returned = repr(y) if dtype_of(y) is None else f"{name_of(dtype_of(y))} of shape {list(shape_of(y))}"
            raise TileError(
                f"{f.__name__} returns {returned}; it must return {name_of(p.dtype)} of shape {list(shape_of(p))}, as "
                "its first argument has"
            )
        return y

    return apply_pieces(t, piece, x, *named.values())


@op
def pin(t: Trace, x: Traced) -> Traced:
    """Force the compiler to compute the tile or vector `x` (32-bit elements) at this place.

    Compilers move arithmetic to where its result is used. After a product that overwrites the operands' registers,
    the operands would take registers twice. Raises `TileError` for another element size.
    """
    if dtype_of(x).primitive_bitwidth != 32:
        raise TileError(f"pin: needs a tile of 32-bit elements, got {name_of(dtype_of(x))}")
    if t.interpreted:
        return x
    return apply_pieces(
        t,
        lambda p: t.call(
            "inline_asm_elementwise", "mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=False, pack=1
        ),
        x,
    )


@op
def scheduling_barrier(t: Trace, number: Traced) -> None:
    """End the basic block within which ptxas schedules, by a loop that is never entered. It takes two instructions.

    ptxas does not mix work before the barrier with work after it. It may still move work down whose result is used
    only after it (in a backward pass: exponentials).
    In a branch, the barrier keeps the branch; ptxas otherwise predicates the arithmetic. After arithmetic, it keeps
    that arithmetic before a wait.

    `number` is an int32 scalar ≥ 0 that the compiler cannot predict.
    """
    if not t.interpreted:
        again = (
            "{ .reg .pred is_so; AGAIN: setp.ge.s32 is_so, $0, 0; @is_so bra DONE; nanosleep.u32 1; bra AGAIN; DONE: }"
        )
        t.call(asm, again, "r", [number])


@op
def swap_layout(t: Trace, x: Traced) -> Traced:
    """Return the tile `x` itself: Triton converts register layouts where an operation needs another.

    ThunderKittens' `swap_layout` changes a tile between row-major and column-major.
    """
    return x


@op
def transpose(t: Trace, x: Traced) -> Traced:
    """Return the transpose of a register tile `x` (cols × rows, same dtype), or a transposed view of a shared tile
    `x`.

    Raises `TileError` for a vector.
    """
    if hasattr(x, "transposed_view"):
        return x.transposed_view(t)
    axes = axes_of(x)
    if len(axes) != 2:
        raise TileError(f"transpose of shape {list(shape_of(x))}: needs a tile of two axes")
    pieces, across = pieces_of(x), len(axes[1])
    flipped = [t.call("permute", pieces[i * across + j], (1, 0)) for j in range(across) for i in range(len(axes[0]))]
    return assemble((axes[1], axes[0]), flipped)


@triton.jit
def _halves(x):
    """Return the left and right half of the columns."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1] // 2
    return x.reshape([ROWS, 2, COLS]).permute([0, 2, 1]).split()


def _has_whole_rows(layout: DistributedLayout, cols: int) -> bool:
    """Whether a thread holds all columns of its rows, as after a load from tensor memory."""
    if isinstance(layout, gl.DistributedLinearLayout):
        return all(base[1] == 0 for base in (*layout.lane_bases, *layout.warp_bases))
    return isinstance(layout, gl.BlockedLayout) and layout.size_per_thread[1] >= cols


def _kind(t: Trace, piece: Traced) -> str:
    """Return the layout kind of a piece; see `piece_layout`."""
    if is_accumulator(t, piece):
        return "mma"
    return "row" if _has_whole_rows(piece.type.layout, int(unwrap(piece.shape[1]))) else "memory"


def _cut(t: Trace, piece: Traced, cols: int) -> list[Traced]:
    """Return the parts of `cols` columns of one piece, side by side.

    An accumulator's parts stay in their registers unless a warp holds only some columns.
    """
    rows, whole = (int(unwrap(extent)) for extent in piece.shape)
    if whole == cols:
        return [piece]
    if not t.explicit:
        halves = t.call(_halves, piece)
    else:
        kind = _kind(t, piece)
        if kind == "memory" or kind == "mma" and _divides_columns(piece.type.layout):
            piece = t.convert(piece, row_layout(t, whole))
        halves = [
            t.convert(half, piece_layout(t, kind, rows, whole // 2, itemsize(piece.dtype)))
            for half in t.call(_halves, piece)
        ]
    return [part for half in halves for part in _cut(t, half, cols)]


@op
def split_cols(t: Trace, x: Traced, cols: Traced = None) -> Traced:
    """Split a tile by columns.

    Args:
        x: a register tile (rows × cols), or a tile of tensor memory, of which the results are views.
        cols: the columns of each result, a compile-time integer. None splits at the power-of-two pieces (one result
            for a plain tile).

    Returns:
        A tuple of tiles of the rows and dtype of `x`.

    Raises:
        TileError: where `cols` does not divide a piece's columns into a power of two of tiles.
    """
    if hasattr(x, "split_cols"):
        return x.split_cols(t, unwrap(cols))
    axes, cols = axes_of(x), unwrap(cols)
    pieces, across = pieces_of(x), len(axes[1])
    if cols is None:
        return tuple(
            assemble((axes[0], (c,)), [pieces[i * across + j] for i in range(len(axes[0]))])
            for j, c in enumerate(axes[1])
        )
    if not isinstance(cols, int) or cols < 1 or any(c % cols or c // cols & (c // cols - 1) for c in axes[1]):
        raise TileError(
            f"split_cols(cols={cols!r}) of shape {list(shape_of(x))}: must divide the columns of its pieces, "
            f"{axes[1]}, into 2ⁿ tiles"
        )
    rows = [
        [part for j in range(across) for part in _cut(t, pieces[i * across + j], cols)] for i in range(len(axes[0]))
    ]
    return tuple(assemble((axes[0], (cols,)), list(parts)) for parts in zip(*rows, strict=True))


@triton.jit
def _beside(left, right):
    """Join two halves; the inverse of `_halves`."""
    ROWS: tl.constexpr = left.shape[0]
    COLS: tl.constexpr = left.shape[1] + right.shape[1]
    return tl.join(left, right).permute([0, 2, 1]).reshape([ROWS, COLS])


def _united(t: Trace, left: Traced, right: Traced) -> Traced:
    """Join two pieces of equal shape into one. An accumulator's pieces stay in their registers."""
    if not t.explicit:
        return t.call(_beside, left, right)
    rows, cols = (int(unwrap(extent)) for extent in left.shape)
    home = piece_layout(t, _kind(t, left), rows, 2 * cols, itemsize(left.dtype))
    return t.convert(t.call(_beside, left, t.relayout(right, left)), home)


@op
def concat_cols(t: Trace, *tiles: Traced, whole: Traced = False) -> Traced:
    """Concatenate register tiles of equal rows along the columns; the inverse of `split_cols`.

    Args:
        tiles: tiles of one number of rows.
        whole: make one piece of two tiles of equal shape and dtype, whose extents are powers of two. A product
            returns such a piece.

    Returns:
        A tile of the same rows. Without `whole` it keeps the pieces of its parts.

    Raises:
        TileError: where rows differ, or with `whole` shapes or dtypes.
    """
    axes = [axes_of(x) for x in tiles]
    if unwrap(whole):
        if (
            len(tiles) != 2
            or axes[0] != axes[1]
            or any(len(axis) != 1 for axis in axes[0])
            or dtype_of(tiles[0]) != dtype_of(tiles[1])
        ):
            raise TileError(
                f"concat_cols(whole=True) of shapes {', '.join(str(list(shape_of(x))) for x in tiles)}: needs two "
                "tiles of one shape and element type, with extents that are powers of two"
            )
        return _united(t, *(pieces_of(x)[0] for x in tiles))
    if any(len(a) != 2 or a[0] != axes[0][0] for a in axes):
        raise TileError(
            f"concat_cols of shapes {', '.join(str(list(shape_of(x))) for x in tiles)}: needs tiles of equal rows"
        )
    rows = axes[0][0]
    lines = [
        pieces_of(x)[i * len(a[1]) : (i + 1) * len(a[1])]
        for i in range(len(rows))
        for x, a in zip(tiles, axes, strict=True)
    ]
    pieces = [p for line in lines for p in line]
    return composite((rows, tuple(c for a in axes for c in a[1])), tuple(pieces)) if len(pieces) > 1 else pieces[0]
