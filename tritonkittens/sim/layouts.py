"""Element positions of Triton's layouts. The compiler evaluates them: its parser reads a layout's text and returns
bases over GF(2).

A linear layout maps the bits of a position (register, lane, warp, block; or offset, block; or row and column of
tensor memory) to coordinates, by XOR of basis vectors.
Source: "Linear Layouts", arXiv:2505.23819.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from triton._C.libtriton import gluon_ir, ir, nvidia

from .ttgir import Descriptor, MemDesc, Op, Tensor, Type

# distance of the shared addresses of neighbouring CTAs in a cluster, as in the hardware's shared window
SHARED_STRIDE = 1 << 24
SHARED_MASK = SHARED_STRIDE - 1
TENSOR_LANE_BYTES = 2048  # a lane of tensor memory: 512 columns of 32 bits
LANES = 128


class LayoutError(NotImplementedError):
    """A layout that the simulator does not evaluate."""


@dataclass(frozen=True, eq=False)
class Bases:
    """A layout's basis vectors by dimension of its input."""

    shape: tuple[int, ...]
    inputs: dict[str, list[list[int]]]


@functools.cache
def _context() -> Any:
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    return context


@functools.cache
def gluon_layout(text: str, kind: str, shape: tuple[int, ...], bits: int = 32) -> Any:
    """Return Gluon's layout object for the text of an encoding attribute; `kind` is tensor, shared or tmem."""
    dims = "x".join(map(str, shape))
    types = {
        "tensor": f"tensor<{dims}xi32, {text}>",
        "shared": f"!ttg.memdesc<{dims}xi{bits}, {text}, #ttg.shared_memory, mutable>",
        "tmem": f"!ttg.memdesc<{dims}xi{bits}, {text}, #ttng.tensor_memory, mutable>",
    }
    ctas = 1
    for group in re.findall(r"CGALayout = (\[\[.*?\]\])|block = (\[\[.*?\]\])", text):
        ctas = max(ctas, 2 ** len(re.findall(r"\[[\d, ]+\]", group[0] or group[1])))
    module = (
        "module attributes "
        f'{{"ttg.num-ctas" = {ctas} : i32, "ttg.num-warps" = 4 : i32, "ttg.threads-per-warp" = 32 : i32, ttg.target = "cuda:100"}} {{\n'  # noqa: E501
        f"tt.func public @f(%a: {types[kind]}) {{ tt.return }}\n}}"
    )
    handle, path = tempfile.mkstemp(suffix=".mlir")
    try:
        os.write(handle, module.encode())
        os.close(handle)
        parsed = ir.parse_mlir_module(path, _context())
        value = parsed.get_function("f").args(0)
        builder = gluon_ir.GluonOpBuilder(_context())
        return (builder.get_gluon_layout_from_tensor if kind == "tensor" else builder.get_gluon_layout_from_memdesc)(
            value
        )
    finally:
        os.unlink(path)


@functools.cache
def _rank(text: str) -> int:
    """Return the number of dimensions of a layout, from its text."""
    body = text
    slices = 0
    while body.startswith("#ttg.slice<"):
        slices += 1
        body = re.search(r"parent = (.*)\}>$", body)[1]  # type: ignore[index]
    if body.startswith("#ttg.dot_op<"):
        body = re.search(r"parent = (.*)\}>$", body)[1]  # type: ignore[index]
        body = re.sub(r", kWidth = \d+$", "", body)
    for pattern in (r"order = \[([\d, ]*)\]", r"warpsPerCTA = \[([\d, ]*)\]", r"rank = (\d+)"):
        if found := re.search(pattern, body):
            rank = int(found[1]) if pattern.startswith("rank") else len(found[1].split(","))
            return rank - slices
    if found := re.search(r"\[\[([\d, ]+)\]", body):
        return len(found[1].split(",")) - slices
    return 2 - slices


@functools.cache
def bases(text: str, kind: str, shape: tuple[int, ...], bits: int = 32) -> Bases:
    """Return the linear layout of a tile of `shape`. Raises LayoutError for a layout that is not linear (padded
    shared memory).
    """
    layout = gluon_layout(text, kind, shape, bits)
    builder = gluon_ir.GluonOpBuilder(_context())
    if kind == "shared":
        # CTAs beyond the edge have copies
        blocks = [[at % n for at, n in zip(b, shape)] for b in getattr(layout, "cga_layout", [])]
        # one element in each CTA: such a layout has no linear form of its own
        if int(np.prod(shape)) == 1 << sum(any(b) for b in blocks):
            return Bases(shape, {"offset": [], "block": blocks})
    try:
        made = builder.to_linear_layout(layout._to_ir(builder), list(shape))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise LayoutError(f"layout {text} of a tile {shape}: {error}") from None
    names = {
        "reg_bases": "register",
        "lane_bases": "lane",
        "warp_bases": "warp",
        "block_bases": "block",
        "offset_bases": "offset",
        "rows": "row",
        "cols": "column",
    }
    found = {
        name: [list(b) for b in getattr(made, attribute)]
        for attribute, name in names.items()
        if hasattr(made, attribute)
    }
    if kind == "tmem" and not found.get("block"):  # Gluon's form omits the CTAs, because each holds its own tile
        cga = [list(b) for b in getattr(layout, "cga_layout", ())]
        tile = [n >> sum(bool(b[d]) for b in cga) for d, n in enumerate(shape)]
        found["block"] = [[b * n for b, n in zip(vector, tile)] for vector in cga]
    return Bases(shape, found)


def evaluate(vectors: list[list[int]], rank: int) -> np.ndarray:
    """Return the coordinates (2**len(vectors), rank) of every input: the XOR of the basis vectors whose bits are
    set."""
    out: np.ndarray = np.zeros((1, rank), np.int64)
    for vector in vectors:
        out = np.concatenate([out, out ^ np.array(vector, np.int64)])
    return out


def _flat(coordinates: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return (
        np.asarray(np.ravel_multi_index(tuple(coordinates.T), shape)) if shape else np.zeros(len(coordinates), np.int64)
    )


@functools.cache
def registers(text: str, shape: tuple[int, ...], warps: int) -> np.ndarray:
    """Return the flat logical index of every register: (blocks · 32 · warps, registers per thread).

    An index repeats where several threads hold the element.
    """
    found = bases(text, "tensor", shape)
    rank = len(shape)
    lane, warp = found.inputs["lane"], found.inputs["warp"]
    warp = warp + [[0] * rank] * max(0, warps.bit_length() - 1 - len(warp))
    threads = evaluate([*lane, *warp, *found.inputs.get("block", [])], rank)
    own = evaluate(found.inputs["register"], rank)
    return _flat((threads[:, None, :] ^ own[None, :, :]).reshape(-1, rank), shape).reshape(len(threads), len(own))


@functools.cache
def owners(text: str, shape: tuple[int, ...], warps: int) -> np.ndarray:
    """Return, for every flat element, the thread that holds it: of several ones the first, which stores it."""
    held = registers(text, shape, warps)
    first: np.ndarray = np.zeros(int(np.prod(shape)), np.int16)
    first[held.reshape(-1)[::-1]] = np.repeat(np.arange(len(held)), held.shape[1])[::-1]
    return first


@functools.cache
def held(text: str, shape: tuple[int, ...], warps: int) -> np.ndarray:
    """Return whether a CTA's threads hold a flat element: (CTAs, elements)."""
    ctas = 1 << len(bases(text, "tensor", shape).inputs.get("block", []))
    out: np.ndarray = np.zeros((ctas, int(np.prod(shape))), bool)
    for rank, own in enumerate(registers(text, shape, warps).reshape(ctas, -1)):
        out[rank, own] = True
    return out


@functools.cache
def shared_offsets(text: str, shape: tuple[int, ...], nbytes: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the byte offset of every element of a tile in shared memory, in the tile's shape, and the offsets of
    further copies.

    Copies exist where a layout gives several CTAs the same element. With several CTAs, the rank is in the bits from
    `SHARED_STRIDE` up.
    """
    layout = gluon_layout(text, "shared", shape, 8 * nbytes)
    if hasattr(layout, "interval_padding_pairs"):
        return _padded(layout, shape, nbytes), None
    found = bases(text, "shared", shape, 8 * nbytes)
    rank = len(shape)
    offsets, blocks = found.inputs["offset"], found.inputs.get("block", [])
    elements = 1 << len(offsets)
    coordinates = evaluate([*offsets, *blocks], rank)
    # a tile may be smaller than its swizzle's period; then several offsets name one element, and the first counts
    places: np.ndarray = np.arange(elements, dtype=np.int64) * nbytes
    places = np.concatenate([places + block * SHARED_STRIDE for block in range(1 << len(blocks))])
    flat = _flat(coordinates % np.array(shape), shape)
    out: np.ndarray = np.full(int(np.prod(shape)), -1, np.int64)
    out[flat[::-1]] = places[::-1]
    if (out < 0).any():
        raise LayoutError(f"layout {text} leaves elements of a tile {shape} without a place")
    replicas = None
    if blocks and len(flat) > out.size:
        copies: np.ndarray = np.full((1 << len(blocks), out.size), -1, np.int64)
        for block in range(1 << len(blocks)):
            part = slice(block * elements, (block + 1) * elements)
            copies[block, flat[part][::-1]] = places[part][::-1]
        holders = copies >= 0  # every element is in the same number of CTAs
        order = np.argsort(~holders, axis=0, kind="stable")[: int(holders.sum(axis=0).max())]
        replicas = np.take_along_axis(copies, order, axis=0).reshape(-1, *shape)
    return out.reshape(shape), replicas


def _padded(layout: Any, shape: tuple[int, ...], nbytes: int) -> np.ndarray:
    """Evaluate `PaddedSharedLayout`: a linear order with unused elements after every interval."""
    rank = len(shape)
    vectors = [list(b) for b in layout.offset_bases]
    flat = _flat(evaluate(vectors, rank), shape)
    places: np.ndarray = np.arange(len(flat), dtype=np.int64)
    padded = places.copy()
    for interval, padding in layout.interval_padding_pairs:
        padded += places // interval * padding
    out: np.ndarray = np.empty(int(np.prod(shape)), np.int64)
    out[flat] = padded * nbytes
    return out.reshape(shape)


@functools.cache
def tensor_offsets(text: str, shape: tuple[int, ...], bits: int) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Return the byte offset (lane · 2048 + column · 4) of every element in tensor memory, the offsets of copies, and
    the columns used.

    Scales have copies in all four lane quarters. With CTA pairs, the rank is in the bits from `SHARED_STRIDE` up.
    """
    found = bases(text, "tmem", shape, bits)
    rank = len(shape)
    rows, columns, blocks = found.inputs["row"], found.inputs["column"], found.inputs["block"]
    across = evaluate(columns, rank)
    down = evaluate(rows, rank)
    coordinates = (down[:, None, :] ^ across[None, :, :]).reshape(-1, rank)
    places = (
        np.arange(len(down), dtype=np.int64)[:, None] * TENSOR_LANE_BYTES
        + np.arange(len(across), dtype=np.int64)[None, :] * bits // 8
    ).reshape(-1)
    if blocks:
        ranks = evaluate(blocks, rank)
        coordinates = (ranks[:, None, :] ^ coordinates[None, :, :]).reshape(-1, rank)
        places = (np.arange(len(ranks), dtype=np.int64)[:, None] * SHARED_STRIDE + places[None, :]).reshape(-1)
    flat = _flat(coordinates, shape)
    out: np.ndarray = np.full(int(np.prod(shape)), -1, np.int64)
    out[flat[::-1]] = places[::-1]
    replicas = None
    if "scales" in text:
        order = np.argsort(flat, kind="stable")
        replicas = places[order].reshape(out.size, -1).T.reshape(-1, *shape)
    taken = -(-len(across) * bits // 32)
    return out.reshape(shape), replicas, taken


def crosses_ctas(op: Op) -> bool:
    """Whether the CTAs of a program exchange elements in an operation without side effects."""

    def blocks(kind: Type) -> list[list[int]]:
        assert isinstance(kind, Tensor) and kind.layout is not None
        return bases(kind.layout, "tensor", kind.shape).inputs.get("block", [])

    if op.name == "ttg.convert_layout":
        return blocks(op.operand_types[0]) != blocks(op.result_types[0])
    return op.name == "tt.reduce" and any(vector[op.attributes["axis"]] for vector in blocks(op.operand_types[0]))


@functools.cache
def free_ranks(kind: MemDesc) -> int:
    """Return the rank bits that do not affect a CTA's part of a shared view. CTAs that differ only in these bits hold
    copies.
    """
    blocks = shared_bases(kind).get("block", [])
    return sum(1 << i for i, vector in enumerate(blocks) if not any(vector))


def shared_bases(kind: MemDesc) -> dict[str, list[list[int]]]:
    """Return the basis vectors ("offset", "block") of one buffer of a view of shared memory."""
    rank = min(layout_rank(kind), len(kind.shape))
    return bases(kind.layout, "shared", kind.alloc_shape[len(kind.alloc_shape) - rank :], kind.element.bits).inputs


def is_fp4_padded(kind: MemDesc) -> bool:
    """Whether every 8 bytes of a shared tile are followed by 8 unused ones, as tcgen05.mma.kind::mxf8f6f4 reads fp4."""
    offsets = shared_bases(kind)["offset"] if kind.space == "shared" and kind.element.nbytes == 1 else []
    return len(offsets) > 3 and not any(offsets[3])


def layout_rank(kind: Type) -> int:
    """Return the dimensions of a memory view's layout. Earlier dimensions of the view select a buffer."""
    assert isinstance(kind, (MemDesc, Descriptor, Tensor)) and kind.layout is not None
    return _rank(kind.layout)
