"""Loads and stores between tensor memory and register tiles, by whole warpgroups, and the waits for them (PTX ISA
9.7.16.8)."""

import numpy as np
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from .._asm import builtin, require, unwrap
from .._meaning import Instruction, Machine, PtxFault, Register, Waits, from_bytes, meaning, unsigned
from .._tile_operands import explicit_only, is_tile, letter, pass_through, registers, tiles_of
from .._traced import Semantic, Traced
from .issue import TARGETS

# ld/st shape -> 32-bit registers of a thread for .x1
SHAPES = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}

# The warp's quarter of the lanes, added to an address: (%tid.x / 32 % 4) * 32 lanes << 16.
_QUARTER = "mov.u32 t, %tid.x; shr.u32 t, t, 5; and.b32 t, t, 3; shl.b32 t, t, 21; add.u32 t, t, "


def transfer_asm(operation: str, shape: str, words: list[str], address: str, half: bool, split: int) -> str:
    """`tcgen05.ld` or `.st` of the 32-bit `words` of each thread; `half` packs two 16-bit columns a word; split:
    16x32bx2's second half.

    Errors: ValueError for a shape or number of words that no instruction has.
    """
    count, unit = len(words), SHAPES.get(shape)
    if unit is None or count % unit or count // unit not in (1, 2, 4, 8, 16, 32, 64, 128) or count > 128:
        raise ValueError(
            f"tcgen05.{operation} {shape} of {count} words a thread: shapes are {', '.join(SHAPES)}, words x1, x2, … "
            "up to 128 in all"
        )
    pack = {"ld": ".pack::16b", "st": ".unpack::16b"}[operation] if half else ""
    mnemonic = f"tcgen05.{operation}.sync.aligned.{shape}.x{count // unit}{pack}.b32"
    vector, place = "{" + ", ".join(words) + "}", "[t]" + (f", {split}" if shape == "16x32bx2" else "")
    operands = f"{vector}, {place}" if operation == "ld" else f"{place}, {vector}"
    return f"{{ .reg .b32 t; {_QUARTER}{address}; {mnemonic} {operands}; }}"


@builtin
def _ld(
    address: Traced,
    tile_shape: Traced,
    layout: Traced,
    dtype: Traced,
    shape: Traced,
    half: Traced,
    split: Traced,
    _semantic: Semantic = None,
) -> Traced:
    require("tcgen05.ld", only=TARGETS, _semantic=_semantic)
    explicit_only(_semantic, "tcgen05.ld")
    (address,), _ = tiles_of(address)
    tile_shape, layout, dtype, shape = list(unwrap(tile_shape)), unwrap(layout), unwrap(dtype), unwrap(shape)
    if layout is None:
        if shape != "32x32b" or tile_shape[0] != 128:
            raise ValueError(
                f"tcgen05.ld {shape} of {tile_shape}: only a 32x32b load of 128 rows has a default layout; name the "
                "layout"
            )
        layout = gl.BlockedLayout([1, tile_shape[1]], [32, 1], [4, 1], [1, 0])
    if dtype.primitive_bitwidth != 32:
        raise TypeError(f"tcgen05.ld of {dtype}: a register holds 32 bits; load int32 words and unpack them")
    type_ = gl.distributed_type(dtype, tile_shape, layout)
    count = registers(type_, _semantic)
    template = transfer_asm(
        "ld", shape, [f"${i}" for i in range(count)], f"${count}", bool(unwrap(half)), unwrap(split)
    )
    return _semantic.inline_asm(template, ",".join([f"={letter(dtype)}"] * count + ["r"]), (address,), type_, False)


@builtin
def _st(address: Traced, tile: Traced, shape: Traced, half: Traced, split: Traced, _semantic: Semantic = None) -> None:
    require("tcgen05.st", only=TARGETS, _semantic=_semantic)
    explicit_only(_semantic, "tcgen05.st")
    (address,), _ = tiles_of(address)
    (tile,), _ = tiles_of(tile)
    if not is_tile(tile) or tile.dtype.primitive_bitwidth != 32:
        raise TypeError(f"tcgen05.st of {tile.type}: it stores a register tile of 32-bit elements")
    count = registers(tile.type, _semantic)
    template = transfer_asm(
        "st", unwrap(shape), [f"${1 + i}" for i in range(count)], "$0", bool(unwrap(half)), unwrap(split)
    )
    _semantic.inline_asm(template, ",".join(["r"] + [letter(tile.dtype)] * count), (address, tile), (), False)


@triton.jit
def ld(
    address,
    tile_shape: tl.constexpr,
    layout: tl.constexpr = None,
    dtype: tl.constexpr = tl.float32,
    shape: tl.constexpr = "32x32b",
    half: tl.constexpr = False,
    split: tl.constexpr = 0,
):
    """A register tile of 32-bit elements from tensor memory; it may be used after `wait_ld` only. Explicit kernels, a
    whole warpgroup.

    address     lane 0 of the tile; each warp adds its own quarter of the lanes.
    tile_shape  (rows, columns) and layout: the instruction fills thread t's registers in the layout's order. Default:
                128 rows, row t in thread t ("32x32b").
    shape       "32x32b", "16x64b", "16x128b", "16x256b" or "16x32bx2" (with `split`, the column distance of its
                halves); the repeat count follows.
    half        two 16-bit columns are packed into each register. PTX ISA 9.7.16.8.3 `tcgen05.ld`.
    """
    return _ld(address, tile_shape, layout, dtype, shape, half, split)


@triton.jit
def st(address, tile, shape: tl.constexpr = "32x32b", half: tl.constexpr = False, split: tl.constexpr = 0):
    """Stores a register tile of 32-bit elements to tensor memory; others see it after `wait_st`. Operands as in `ld`.
    PTX ISA 9.7.16.8.4 `tcgen05.st`.
    """
    _st(address, tile, shape, half, split)


@triton.jit
def wait_ld(tiles=()):
    """Waits for this thread's loads from tensor memory. Returns `tiles`, which may be used from here on. PTX ISA
    9.7.16.8.5 `tcgen05.wait::ld`.
    """
    return pass_through("tcgen05.wait::ld.sync.aligned;", tiles, TARGETS)


@triton.jit
def wait_st():
    """Waits for this thread's stores to tensor memory. PTX ISA 9.7.16.8.5 `tcgen05.wait::st`."""
    pass_through("tcgen05.wait::st.sync.aligned;", (), TARGETS)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


def transfer_cells(shape: str, words: int, lane: np.ndarray, split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) [threads, words]: the 32-bit cell, from the instruction's address, of each register of a thread of
    lane `lane` (PTX ISA 9.7.16.8.2, "Matrix fragments"). `split`: the distance in columns of the second half of
    16x32bx2.
    """
    lane, word = np.asarray(lane).astype(np.int64)[:, None], np.arange(words)[None, :]
    zero = 0 * lane + 0 * word
    if shape == "32x32b":
        return lane + zero, word + zero
    if shape == "16x32bx2":
        return lane % 16 + zero, word + lane // 16 * split
    if shape == "16x64b":
        return lane % 2 * 8 + lane // 4 + zero, 2 * word + lane // 2 % 2
    if shape == "16x128b":
        return lane // 4 + 8 * (word % 2), 4 * (word // 2) + lane % 4
    return lane // 4 + 8 * (word // 2 % 2), 8 * (word // 4) + 2 * (lane % 4) + word % 2


def _transfer(t: Machine, i: Instruction, address: Register, words: int, split: int, half: bool) -> np.ndarray:
    """uint32 [T, cells]: the tensor-memory addresses of a load or store; with `half` two cells, of 16 bits each, for
    every register."""
    base = np.broadcast_to(unsigned(address, 32), i.active.shape).astype(np.int64)
    warp: np.ndarray = t.warp.astype(np.int64)
    outside = i.active & ((base >> 16) // 32 != warp % 4)
    if outside.any():
        thread = int(np.argmax(outside))
        first = 32 * (int(warp[thread]) % 4)
        raise PtxFault(f"warp {int(warp[thread])} reaches lanes {first} to {first + 31}, not {int(base[thread]) >> 16}")
    row, column = transfer_cells(i.fields["shape"] or "", words, t.lane, split)
    if half:
        row, column = np.repeat(row, 2, axis=1), np.stack([2 * column, 2 * column + 1], axis=2).reshape(len(column), -1)
    return ((base[:, None] >> 16) + row << 16 | (base[:, None] & 0xFFFF) + column).astype(np.uint32)


_SHAPE = "{shape:" + "|".join(SHAPES) + "}.{count:x1|x2|x4|x8|x16|x32|x64|x128}"


@meaning(f"tcgen05.ld.sync.aligned.{_SHAPE}.{{half:pack::16b}}?.b32")
def _ld_meaning(t: Machine, i: Instruction, address: Register, split: Register = 0) -> Register:
    """Load at once. The machine checks that values are used only after tcgen05.wait::ld."""
    single = not isinstance(i.destination_bits[0], tuple)
    words, half = 1 if single else len(i.destination_bits[0]), i.fields["half"] is not None
    bits = from_bytes(np.asarray(t.load("tensor", _transfer(t, i, address, words, split, half), 4, i.active)), 32)
    if half:
        bits = bits[:, 0::2] & np.uint32(0xFFFF) | bits[:, 1::2] << np.uint32(16)
    return bits[:, 0] if single else tuple(bits.T)


@meaning(f"tcgen05.st.sync.aligned.{_SHAPE}.{{half:unpack::16b}}?.b32", destinations=0)
def _st_meaning(t: Machine, i: Instruction, address: Register, *rest: Register) -> None:
    *split, values = rest
    values, half = values if isinstance(values, tuple) else (values,), i.fields["half"] is not None
    bits = np.stack([np.broadcast_to(unsigned(x, 32), i.active.shape) for x in values], axis=1)
    if half:
        bits = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=2).reshape(len(bits), -1)
    places = _transfer(t, i, address, len(values), split[0] if split else 0, half)
    t.store("tensor", places, np.ascontiguousarray(bits).view(np.uint8).reshape(*places.shape, 4), i.active)


@meaning("tcgen05.{what:wait::ld|wait::st}.sync.aligned", destinations=0)
def _wait_meaning(t: Machine, i: Instruction) -> Waits:
    wait = t.tcgen05_wait((i.fields["what"] or "").removeprefix("wait::"))
    if wait is not None:
        yield wait
