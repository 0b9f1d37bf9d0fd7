"""Tile types: what each accepts, what a wrong construction says, what the swizzle does to addresses and banks."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.lang.core.backend import op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import constant, itemsize
from tritonkittens.lang.memory.shared_tiles import piece_shared_layout
from tritonkittens.lang.types import swizzle
from tritonkittens.lang.types.tiles import split

ELEMENTS = "fp32, bf16, fp16, fp8e4m3, fp8e5m2, int8, uint8, int32, int64"
WRONG = [
    (
        lambda: tk.rt(tk.fp32, 24, 64),
        "rt(fp32, 24, 64): rows: 24 must be a positive multiple of 16 (the base tile of fp32 is 16×16)",
    ),
    (
        lambda: tk.rt(tk.fp32, 0, 64),
        "rt(fp32, 0, 64): rows: 0 must be a positive multiple of 16 (the base tile of fp32 is 16×16)",
    ),
    (
        lambda: tk.rt(tk.bf16, 16, 40),
        "rt(bf16, 16, 40): cols: 40 must be a positive multiple of 16 (the base tile of bf16 is 16×16)",
    ),
    (
        lambda: tk.rt(tk.fp8e4m3, 16, 48),
        "rt(fp8e4m3, 16, 48): cols: 48 must be a positive multiple of 32 (the base tile of fp8e4m3 is 16×32)",
    ),
    (
        lambda: tk.rt(tk.int8, 16, -32),
        "rt(int8, 16, -32): cols: -32 must be a positive multiple of 32 (the base tile of int8 is 16×32)",
    ),
    (
        lambda: tk.rt(tk.fp32, 64.0, 64),
        "rt(fp32, 64.0, 64): rows: 64.0 must be a positive multiple of 16 (the base tile of fp32 is 16×16)",
    ),
    (
        lambda: tk.rt(tk.fp32, 64, 64, "column"),
        "rt(fp32, 64, 64, layout='column'): layout 'column' must be 'mma', 'row' or 'memory'",
    ),
    (lambda: tk.rt("fp32", 64, 64), f"rt(fp32, 64, 64): 'fp32' is no element type of a tile; use {ELEMENTS}"),
    (
        lambda: tk.rt(torch.float32, 64, 64),
        f"rt(torch.float32, 64, 64): torch.float32 is no element type of a tile; use {ELEMENTS}",
    ),
    (
        lambda: tk.rv(tk.fp32, 40),
        "rv(fp32, 40): length: 40 must be a positive multiple of 16 (a register vector covers whole 16-element pieces)",
    ),
    (
        lambda: tk.rv(tl.float64, 32),
        f"rv(fp64, 32): triton.language.float64 is no element type of a tile; use {ELEMENTS}",
    ),
    (
        lambda: tk.col_vec(tk.rv(tk.fp32, 32)),
        "col_vec(rv(fp32, 32)): a tile vector is tied to a register tile type; give tk.rt(dtype, rows, cols), or use "
        "rv",
    ),
    (
        lambda: tk.row_vec((64, 64)),
        "row_vec((64, 64)): a tile vector is tied to a register tile type; give tk.rt(dtype, rows, cols), or use rv",
    ),
    (
        lambda: tk.row_vec(tk.rt(tk.fp32, 16, 16), "bf16"),
        f"row_vec(rt(fp32, 16, 16), bf16): 'bf16' is no element type of a tile; use {ELEMENTS}",
    ),
    (
        lambda: tk.st(tk.bf16, 64, 24),
        "st(bf16, 64, 24): 24 columns are 48 bytes; a swizzled bf16 tile needs a multiple of 16 columns (32 bytes)",
    ),
    (
        lambda: tk.st(tk.fp8e5m2, 64, 16),
        "st(fp8e5m2, 64, 16): 16 columns are 16 bytes; a swizzled fp8e5m2 tile needs a multiple of 32 columns (32 "
        "bytes)",
    ),
    (
        lambda: tk.st(tk.bf16, 64, 0),
        "st(bf16, 64, 0): cols: 0 must be a positive multiple of 16 (the base tile of bf16 is 16×16)",
    ),
    (
        lambda: tk.st(tk.bf16, 40, 64),
        "st(bf16, 40, 64): rows: 40 must be a positive multiple of 16 (the base tile of bf16 is 16×16)",
    ),
    (
        lambda: tk.st(tk.bf16, 64, 64, 16),
        "st(bf16, 64, 64, swizzle=16): swizzle 16 must be 'auto', 32, 64 or 128 bytes",
    ),
    (
        lambda: tk.st(tk.bf16, 128, 64, contiguous=True),
        "st(bf16, 128, 64, contiguous): a contiguous tile has rows that are no power of two, and its 128 bytes of "
        "columns are one swizzle line: 32, 64, 128; "
        "or columns that are no power of two, and they are lines of 128 bytes",
    ),
    (
        lambda: tk.st(tk.bf16, 96, 128, contiguous=True),
        "st(bf16, 96, 128, contiguous): a contiguous tile has rows that are no power of two, and its 256 bytes of "
        "columns are one swizzle line: 32, 64, 128; "
        "or columns that are no power of two, and they are lines of 128 bytes",
    ),
    (
        lambda: tk.st(tk.bf16, 64, 176, contiguous=True),
        "st(bf16, 64, 176, contiguous): a contiguous tile has rows that are no power of two, and its 352 bytes of "
        "columns are one swizzle line: 32, 64, 128; "
        "or columns that are no power of two, and they are lines of 128 bytes",
    ),
    (
        lambda: tk.st(tk.bf16, 64, 32, 128),
        "st(bf16, 64, 32, swizzle=128): a swizzle of 128 bytes must divide the row; 32 columns are 64 bytes",
    ),
    (
        lambda: tk.st(tk.bf16, 64, 80, 64),
        "st(bf16, 64, 80, swizzle=64): a swizzle of 64 bytes must divide the row; 16 columns are 32 bytes",
    ),
    (
        lambda: tk.sv(tk.bf16, 20),
        "sv(bf16, 20): length: 20 must be a positive multiple of 16 (a shared vector is moved in whole 16-element "
        "pieces)",
    ),
    (lambda: tk.sv(None, 32), f"sv(None, 32): None is no element type of a tile; use {ELEMENTS}"),
    (lambda: tk.tt(tk.fp32, 32, 64), "tt(fp32, 32, 64): 32 rows; tensor memory holds tiles of 64 or 128 rows (lanes)"),
    (
        lambda: tk.tt(tk.fp32, 128, 24),
        "tt(fp32, 128, 24): cols: 24 must be a positive multiple of 16 (a tensor-memory tile covers whole 16-column "
        "pieces)",
    ),
    (lambda: tk.tt(tk.fp32, 128, 1024), "tt(fp32, 128, 1024): 1024 columns of 32 bits; tensor memory has 512"),
    (
        lambda: tk.st(tk.bf16, 64, 64).bank_conflicts("diagonal"),
        "st(bf16, 64, 64).bank_conflicts('diagonal'): access must be 'row', 'column', 'ldmatrix'",
    ),
]


@pytest.mark.parametrize("make, message", WRONG, ids=[m.split(":")[0] for _, m in WRONG])
def test_a_wrong_type_is_refused_in_words(make, message):
    with pytest.raises(tk.TileError) as error:
        make()
    assert str(error.value) == message


def test_types_are_values():
    tile = tk.rt(tk.fp32, 64, 48)
    assert (
        tile == tk.rt(tk.fp32, 64, 48)
        and hash(tile) == hash(tk.rt(tk.fp32, 64, 48))
        and tile != tk.rt(tk.fp32, 64, 48, "row")
    )
    assert (
        repr(tk.rt(tk.fp32, 64, 48, "row")) == "rt(fp32, 64, 48, layout='row')"
    )  # the cache of compiled kernels tells types apart by their text
    assert (
        repr(tk.col_vec(tile)) == "col_vec(rt(fp32, 64, 48))"
        and repr(tk.row_vec(tile, tk.bf16)) == "row_vec(rt(fp32, 64, 48), bf16)"
    )
    assert (
        tk.col_vec(tile).shape,
        tk.row_vec(tile).shape,
        tk.col_vec(tile).dtype,
        tk.row_vec(tile, tk.bf16).dtype,
    ) == ((64,), (48,), tk.fp32, tk.bf16)
    types = [
        tile,
        tk.rt(tk.fp32, 64, 48, "row"),
        tk.col_vec(tile),
        tk.row_vec(tile),
        tk.col_vec(tk.rt(tk.fp32, 64, 48, "row")),
        tk.col_vec(tile, tk.bf16),
        tk.st(tk.fp32, 64, 48),
        tk.sv(tk.fp32, 64),
        tk.rv(tk.fp32, 64),
    ]
    assert len({t.mangle() for t in types}) == len(types) == len({repr(t) for t in types})


@pytest.mark.parametrize("extent", range(16, 513, 16))
def test_extents_split_into_powers_of_two(extent):
    parts = split(extent)
    assert (
        sum(parts) == extent
        and list(parts) == sorted(set(parts), reverse=True)
        and all(p & (p - 1) == 0 for p in parts)
    )


def test_auto_swizzle_is_the_widest_that_the_row_allows():
    spans = {
        (tk.bf16, 16): 32,
        (tk.bf16, 32): 64,
        (tk.bf16, 64): 128,
        (tk.bf16, 128): 128,
        (tk.fp8e4m3, 32): 32,
        (tk.fp8e4m3, 64): 64,
        (tk.fp32, 16): 64,
        (tk.fp32, 32): 128,
    }
    assert {k: tk.st(k[0], 16, k[1]).piece_swizzle(k[1]) for k in spans} == spans


@pytest.mark.parametrize(
    "value, dtype",
    [
        (1.0, tk.int32),
        (-128, tk.int8),
        (255, tk.uint8),
        (float("inf"), tk.fp8e5m2),
        (float("nan"), tk.fp8e4m3),
        (True, tk.int8),
    ],
)
def test_constants_that_a_type_holds(value, dtype):
    converted = constant(value, dtype, "x")
    assert (converted == value or value != value) and isinstance(converted, float) == dtype.is_floating()


@pytest.mark.parametrize(
    "value, dtype",
    [(0.5, tk.int32), (2**31, tk.int32), (-1, tk.uint8), (float("nan"), tk.int8), (float("-inf"), tk.fp8e4m3)],
)
def test_constants_that_a_type_does_not_hold(value, dtype):
    with pytest.raises(tk.TileError, match="x: "):
        constant(value, dtype, "x")


# --- swizzle
# --------------------------------------------------------------------------------------------------------------------

TILES = [
    tk.st(dtype, rows, cols, span)
    for dtype, cols in ((tk.bf16, 64), (tk.fp32, 32), (tk.fp8e4m3, 128), (tk.bf16, 128), (tk.fp32, 128))
    for rows in (16, 64)
    for span in (32, 64, 128)
]
seen: list = []


@op
def shared_bases(t, spec):
    """The compiler's own map from addresses to elements of a shared tile."""
    spec = unwrap(spec)
    layout = piece_shared_layout(spec.dtype, spec.piece_swizzle(spec.cols), 2)
    seen.append(t.builder.to_linear_layout(layout._to_ir(t.builder), list(spec.shape)))


@tk.kernel
@triton.jit
def look(X, SPEC: tl.constexpr):
    shared_bases(SPEC)


@tk.kernel
@triton.jit
def count_conflicts(X, SPEC: tl.constexpr, WANT: tl.constexpr):
    tl.static_assert(tk.bank_conflicts(tk.allocate(SPEC)) == WANT)


@pytest.mark.parametrize("spec", TILES, ids=str)
def test_swizzled_addresses_are_the_compilers(spec, monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)  # the look happens while the kernel is traced
    look.compile(torch.empty(16, device="meta"), spec)
    bases, size = seen.pop().offset_bases, itemsize(spec.dtype)
    assert 1 << len(bases) == spec.rows * spec.cols
    for element in range(0, spec.rows * spec.cols, 3):
        row = col = 0
        for bit, base in enumerate(bases):
            if element >> bit & 1:
                row, col = row ^ base[0], col ^ base[1]
        assert swizzle.offset(row, col * size, spec.rows, spec.piece_swizzle(spec.cols)) == element * size


@pytest.mark.parametrize("spec", TILES[::2], ids=str)
def test_row_conflicts_are_the_compilers(spec):
    count_conflicts.compile(torch.empty(16, device="meta"), spec, spec.bank_conflicts("row"))


@pytest.mark.parametrize(
    "spec, row, column, ldmatrix",
    [
        (tk.st(tk.bf16, 64, 64), 0, 3, 0),  # 32 rows meet 8 different banks
        (tk.st(tk.bf16, 64, 64, 64), 1, 3, 0),  # two blocks of 64 bytes, a multiple of 128 bytes apart
        (tk.st(tk.bf16, 64, 64, 32), 3, 3, 0),
        (tk.st(tk.bf16, 64, 16), 0, 3, 0),  # two chunks a row
        (tk.st(tk.bf16, 16, 64), 0, 1, 0),  # 16 rows
        (tk.st(tk.fp32, 64, 64), 0, 3, 0),
        (tk.st(tk.bf16, 48, 80), 0, 3, 0),
    ],
    ids=str,
)
def test_known_bank_conflicts(spec, row, column, ldmatrix):
    assert (spec.bank_conflicts("row"), spec.bank_conflicts("column"), spec.bank_conflicts("ldmatrix")) == (
        row,
        column,
        ldmatrix,
    )


def test_an_unswizzled_column_would_conflict():
    """The count is of something: eight chunks below each other at a stride of 128 bytes share one bank group."""
    assert swizzle.wavefronts([128 * r for r in range(8)], 16) == 8
    assert swizzle.wavefronts([swizzle.offset(r, 0, 64, 128) for r in range(8)], 16) == 1


def test_picture():
    assert tk.st(tk.bf16, 16, 32).picture() == "\n".join(
        [
            "st(bf16, 16, 32): first bank of every 16-byte chunk; 16×32 at column 0, swizzle 64 bytes",
            "row 0:  0  4  8 12",
            "row 1: 16 20 24 28",
            "row 2:  4  0 12  8",
            "row 3: 20 16 28 24",
            "row 4:  8 12  0  4",
            "row 5: 24 28 16 20",
            "row 6: 12  8  4  0",
            "row 7: 28 24 20 16",
        ]
    )
    lines = tk.st(tk.bf16, 48, 80).picture().split("\n")
    assert lines[0].endswith("32×64 at column 0, swizzle 128 bytes; 32×16 at column 64, swizzle 32 bytes")
    assert lines[2] == "row 1:  4  0 12  8 20 16 28 24 |  8 12"
