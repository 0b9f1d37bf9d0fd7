"""The operands of a product: their extents, dtypes and pieces wherever they lie, and what each unit refuses."""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from tritonkittens.lang.core.backend import Traced
from tritonkittens.lang.core.dtypes import name_of, names_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import axes_of, composite, pieces_of
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma.fp8_a_operand import packed_bytes
from tritonkittens.lang.mma.pending import pending

FP8 = (tl.float8e4nv, tl.float8e5)

OPERANDS = (tl.bfloat16, tl.float16, tl.float32, tl.int8, *FP8)


@dataclass(frozen=True)
class Product:
    """A product to compute: acc + A·B.

    Args:
        name: the operation's name, for messages.
        a: the operand as M×K.
        b: the operand as K×N.
        acc: the accumulator; None for new registers.
        a_stored: A before its transposition.
        b_stored: B before its transposition.
        transposed: whether A and B were transposed.
        add: False: the values in `acc` do not count; for tensor memory also a truth value of the run time.
        scales: the tiles of A's and B's scales, of a block-scaled product.
    """

    name: str
    a: Traced
    b: Traced
    acc: Traced
    a_stored: Traced
    b_stored: Traced
    transposed: tuple[bool, bool]
    add: Traced
    scales: tuple[Traced, ...] = ()


def axes(x: Traced) -> tuple[tuple[int, ...], ...]:
    """Return the extents of the pieces along each axis of a tile, wherever it lies."""
    return x.axes if isinstance(x, (shared, tensor_tile, pending, packed_bytes)) else axes_of(x)


def extents(x: Traced) -> list[int]:
    """Return the extents of a tile."""
    return [sum(a) for a in axes(x)]


def describe(x: Traced) -> str:
    """Name a tile in messages: extents, dtype and memory."""
    place = "shared" if isinstance(x, shared) else "tensor memory" if isinstance(x, tensor_tile) else "registers"
    return f"{'×'.join(map(str, extents(x)))} {name_of(x.dtype)} in {place}"


def grid(x: Traced) -> list[list[Traced]]:
    """Return the pieces as rows of columns."""
    rows, cols = axes(x)
    pieces = x.pieces if isinstance(x, (shared, tensor_tile, packed_bytes)) else pieces_of(x)
    return [list(pieces[i * len(cols) : (i + 1) * len(cols)]) for i in range(len(rows))]


def sum_dtype(a: Traced, acc: Traced) -> tl.dtype:
    """Return the dtype of the result: the accumulator's, else the one in which the operands accumulate."""
    return acc.dtype if acc is not None else tl.int32 if a.dtype == tl.int8 else tl.float32


def check_places(name: str, a: Traced, b: Traced, acc: Traced, transposed: tuple[bool, bool]) -> None:
    """Check the memory of the operands and of the accumulator."""
    if isinstance(b, tensor_tile) or (isinstance(acc, tensor_tile) and not isinstance(b, shared)):
        raise TileError(f"{name}: B is {describe(b)}; tcgen05 reads B from shared memory: store it to an st first")
    if acc is not None and not isinstance(acc, (tensor_tile, pending, composite, tl.tensor)):
        what = f"{acc.spec!r} in shared memory" if isinstance(acc, shared) else repr(acc)
        raise TileError(
            f"{name}: the accumulator is {what}; the tensor cores write a register tile (tk.zero, a product) or a "
            "tile of tensor_allocator"
        )
    if isinstance(a, tensor_tile) and not isinstance(acc, tensor_tile):
        raise TileError(
            f"{name}: A is {describe(a)}; only a product into tensor memory reads A there: the accumulator, or "
            "`into`, must be a tile of tensor_allocator"
        )
    if isinstance(a, tensor_tile) and transposed[0]:
        raise TileError(
            f"{name}: A is {describe(a)}; tcgen05 reads A from tensor memory as M×K only: use "
            f"{name.replace('At', 'A')}, or store A to an st"
        )


def check(name: str, a: Traced, b: Traced, acc: Traced) -> None:
    """Check shapes and dtypes; `a` and `b` already as M×K and K×N."""
    for what, x in (("A", a), ("B", b)):
        if len(axes(x)) != 2:
            raise TileError(f"{name}: {what} must be a tile of two axes, got shape {extents(x)}")
        if isinstance(x, shared) and x.stages is not None:
            raise TileError(f"{name}: {what} is a ring of {x.spec!r}; take a slot first, ring[slot]")
        if isinstance(x, shared) and not x.whole:
            raise TileError(
                f"{name}: {what} is a view of {x.spec!r} that cuts a swizzle atom; the tensor cores cannot read it"
            )
        if x.dtype not in OPERANDS:
            raise TileError(f"{name}: {what} is {describe(x)}; the tensor cores take {names_of(OPERANDS)}")
    depth_a, depth_b = extents(a)[1], extents(b)[0]
    if depth_a != depth_b:
        raise TileError(
            f"{name}: A is {describe(a)} and B is {describe(b)} (as M×K and K×N): their K, {depth_a} and "
            f"{depth_b}, differ"
        )
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise TileError(
            f"{name}: A is {name_of(a.dtype)} and B is {name_of(b.dtype)}; operands must have one element type "
            "(fp8 kinds may mix)"
        )
    if acc is not None:
        _check_accumulator(name, a, b, acc)


def _check_accumulator(name: str, a: Traced, b: Traced, acc: Traced) -> None:
    # the pair's CTAs have half of B's columns each
    want = [extents(a)[0], extents(b)[1] * (2 if isinstance(acc, tensor_tile) and acc.pair else 1)]
    if extents(acc) != want:
        raise TileError(
            f"{name}: A is {describe(a)}, B is {describe(b)} (as M×K and K×N): the accumulator must be "
            f"{'×'.join(map(str, want))}, got {'×'.join(map(str, extents(acc)))}"
        )
    if isinstance(acc, pending):
        return
    dtype = tl.int32 if a.dtype == tl.int8 else tl.float32
    also = "fp16 or " if a.dtype == tl.float16 and not isinstance(acc, tensor_tile) else ""
    place = " in tensor memory" if isinstance(acc, tensor_tile) else ""
    if acc.dtype != dtype and not (also and acc.dtype == tl.float16):
        raise TileError(
            f"{name}: operands of {name_of(a.dtype)} accumulate in {also}{dtype}{place}, got an accumulator of "
            f"{name_of(acc.dtype)}"
        )


def strided_depth(product: Product) -> list[tuple[str, Traced]]:
    """Return the operands in shared memory whose depth runs along the rows, each with its name."""
    operands = (("A", product.a_stored, not product.transposed[0]), ("B", product.b_stored, product.transposed[1]))
    return [(what, stored) for what, stored, k_major in operands if isinstance(stored, shared) and not k_major]


def check_depth(product: Product, unit: str) -> None:
    """Raise `TileError` for operands in shared memory whose depth runs along the rows. The unit reads it along the
    columns only.
    """
    for what, stored in strided_depth(product):
        raise TileError(
            f"{product.name}: {what} of {name_of(stored.dtype)} is stored as "
            f"{'×'.join(map(str, extents(stored)))} with its depth along the rows; {unit} reads "
            f"{stored.dtype.primitive_bitwidth}-bit operands with the depth along the columns only: use mma_ABt "
            "with K-major tiles"
        )
