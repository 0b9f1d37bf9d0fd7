"""Tile operations: shapes, reductions and scans with a region, products in registers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .numbers import decode, encode, round_to
from .pure_registry import PURE, array, dtype_of, element, pure, settle
from .ttgir import Block, Module, Op, Tensor

# ---------------------------------------------------------------- shapes


@pure("tt.make_range")
def make_range(op: Op) -> Any:
    return np.arange(op.attributes["start"], op.attributes["end"], dtype=np.int32)


@pure("tt.splat")
def splat(op: Op, a: Any) -> Any:
    kind = op.result_types[0]
    return np.full(kind.shape, array(a, kind), dtype_of(kind))  # type: ignore[union-attr]


@pure("tt.unsplat")
def unsplat(op: Op, a: np.ndarray) -> Any:
    if a.size != 1:
        raise ValueError(f"tt.unsplat of a tile of {a.size} elements")
    return settle(a.reshape(()), op.result_types[0])


@pure("tt.broadcast")
def broadcast(op: Op, a: np.ndarray) -> Any:
    return np.broadcast_to(array(a, op.operand_types[0]), op.result_types[0].shape)  # type: ignore[union-attr]


@pure("tt.expand_dims", "tt.reshape")
def reshape(op: Op, a: np.ndarray) -> Any:
    """Keep row-major order, also where the compiler may choose another (allow_reorder)."""
    return array(a, op.operand_types[0]).reshape(op.result_types[0].shape)  # type: ignore[union-attr]


@pure("tt.trans")
def transpose(op: Op, a: np.ndarray) -> Any:
    return array(a, op.operand_types[0]).transpose(op.attributes["order"])


@pure("ttg.convert_layout", "gluon.set_auto_layout")
def convert_layout(op: Op, a: Any) -> Any:
    """Return the tile: its logical values do not change."""
    return array(a, op.operand_types[0])


@pure("tt.join")
def join(op: Op, a: np.ndarray, b: np.ndarray) -> Any:
    return np.stack([array(a, op.operand_types[0]), array(b, op.operand_types[1])], axis=-1)


@pure("tt.split")
def split(op: Op, a: np.ndarray) -> Any:
    a = array(a, op.operand_types[0])
    return a[..., 0], a[..., 1]


@pure("tt.cat")
def cat(op: Op, a: np.ndarray, b: np.ndarray) -> Any:
    """Concatenate the first tile and the second (Triton may choose any order)."""
    return np.concatenate([array(a, op.operand_types[0]), array(b, op.operand_types[1])])


@pure("tt.gather")
def gather(op: Op, source: np.ndarray, indices: np.ndarray) -> Any:
    axis = op.attributes["axis"]
    at = array(indices, op.operand_types[1])
    if at.size and not 0 <= at.min() <= at.max() < source.shape[axis]:
        raise IndexError(f"tt.gather: indices {at.min()} to {at.max()} of a dimension of {source.shape[axis]}")
    part = tuple(slice(None) if d == axis else slice(n) for d, n in enumerate(at.shape))
    return np.take_along_axis(array(source, op.operand_types[0])[part], at.astype(np.intp), axis)


@pure("tt.histogram")
def histogram(op: Op, values: np.ndarray, *mask: Any) -> Any:
    """Count one bin per integer from 0. Raises ValueError for a number without a bin (in Triton undefined)."""
    kind = op.result_types[0]
    bins = kind.shape[0]  # type: ignore[union-attr]
    chosen = values[mask[0].astype(np.bool_)] if mask else values.reshape(-1)
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < bins:
        raise ValueError(f"tt.histogram: numbers {chosen.min()} to {chosen.max()} with {bins} bins")
    return settle(np.bincount(chosen, minlength=bins), kind)


# ---------------------------------------------------------------- regions

Combine = Callable[[list[Any]], list[Any]]
_FUNCTIONS: weakref.WeakKeyDictionary[Block, Combine] = weakref.WeakKeyDictionary()


def sink_constants(module: Module) -> None:
    """Move values that a combiner computes from constants back into its region. MLIR moves them out (a constant, or a
    range that the kernel also has).

    Call it once, before the module runs. Raises NotImplementedError for a region that uses anything else from
    outside.
    """
    makers = {value: op for op in module.walk() for value in op.results}
    for op in module.walk():
        if op.name not in ("tt.reduce", "tt.scan", "tt.map_elementwise"):
            continue
        inside = [o for block in op.regions[0].blocks for o in block.operations]
        known = {v for block in op.regions[0].blocks for v in block.arguments} | {v for o in inside for v in o.results}
        moved: list[Op] = []

        def sink(value: int, op: Op = op, known: set[int] = known, moved: list[Op] = moved) -> None:
            if value in known:
                return
            maker = makers.get(value)
            if maker is None or maker.name not in PURE:
                raise NotImplementedError(
                    f"{op.name} uses %{module.value_names.get(value, value)} from outside its region, at {op.location}"
                )
            for operand in maker.operands:
                sink(operand)
            known.update(maker.results)
            moved.append(maker)

        for value in [v for o in inside for v in o.operands]:
            sink(value)
        op.regions[0].blocks[0].operations[:0] = moved


def meaning(op: Op) -> Callable[..., Any]:
    if op.name == "tt.elementwise_inline_asm":
        return asm_of_numbers
    if op.name not in PURE:
        raise NotImplementedError(f"the simulator has no meaning for {op.name} inside a region, at {op.location}")
    return PURE[op.name]


class Numbers:
    """The threads of inline PTX inside a region: one thread per element, with registers only."""

    def __init__(self, count: int):
        self.tid: np.ndarray = np.arange(count)
        self.lane: np.ndarray = self.tid % 32
        self.warp: np.ndarray = self.tid // 32

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"inline PTX inside a region that is more than arithmetic ({name})")


def asm_of_numbers(op: Op, *values: Any) -> Any:
    """Execute `tt.elementwise_inline_asm` on scalars, for all elements of arrays at once."""
    from .ptx import execute, parse

    if op.attributes.get("packed_element", 1) != 1:
        raise NotImplementedError(f"inline PTX of several elements inside a region, at {op.location}")
    arrays = np.broadcast_arrays(*(encode(element(k).name, np.asarray(v)) for v, k in zip(values, op.operand_types)))
    threads: Any = Numbers(arrays[0].size)
    running = execute(
        parse(op.attributes["asm_string"], op.attributes["constraints"]), threads, [a.reshape(-1) for a in arrays]
    )
    try:
        next(running)
    except StopIteration as end:
        out = []
        for bits, kind in zip(end.value, map(element, op.result_types)):
            out.append(decode(kind.name, bits.astype(f"u{kind.nbytes}")).reshape(arrays[0].shape))
        return tuple(out) if len(out) > 1 else out[0]
    raise NotImplementedError(f"inline PTX with a loop inside a region, at {op.location}")


# Operations on tiles that count dimensions from the front, without an attribute for it.
_FROM_THE_FRONT = ("tt.cat", "tt.histogram")


def on_tiles(op: Op, *values: Any) -> Any:
    """Execute an operation on tiles inside a region for all elements at once. Numbers are (count,), a tile of shape S
    is (count, *S).
    """
    function = meaning(op)
    if op.name in _FROM_THE_FRONT:
        raise NotImplementedError(f"the simulator has no meaning for {op.name} inside a region, at {op.location}")
    if not values:  # the same tile for every element
        return function(op)[None]
    count = max((len(v) for v in values if isinstance(v, np.ndarray) and v.ndim), default=1)
    if op.name == "tt.unsplat":
        return np.broadcast_to(values[0].reshape(-1), (count,))

    def widened(kind: Any) -> Any:
        return replace(kind, shape=(count, *kind.shape)) if isinstance(kind, Tensor) else kind

    attributes = dict(op.attributes)
    if "axis" in attributes:
        attributes["axis"] += 1
    if "order" in attributes:
        attributes["order"] = (0, *(d + 1 for d in attributes["order"]))
    operands, results = tuple(map(widened, op.operand_types)), tuple(map(widened, op.result_types))
    rank = max(len(k.shape) for k in (*operands, *results) if isinstance(k, Tensor))
    given = [
        np.broadcast_to(v, k.shape)
        if isinstance(k, Tensor)
        else v.reshape(-1, *[1] * (rank - 1))
        if isinstance(v, np.ndarray) and v.ndim
        else v
        for v, k in zip(values, operands)
    ]
    return function(replace(op, operand_types=operands, result_types=results, attributes=attributes), *given)


def in_region(op: Op) -> Callable[..., Any]:
    """Return the effect of a region's operation for all elements at once."""
    return on_tiles if any(isinstance(k, Tensor) for k in (*op.operand_types, *op.result_types)) else meaning(op)


def region_function(op: Op) -> Combine:
    """Return the region of a reduction, scan or map as a function of arrays: one run for all elements."""
    blocks = op.regions[0].blocks
    if len(blocks) > 1:
        return lambda values: diverging(blocks[0], values)
    block = blocks[0]
    found = _FUNCTIONS.get(block)
    if found is None:
        body = [(in_region(o), o) for o in block.operations[:-1]]
        results = block.operations[-1].operands

        def run(values: list[Any]) -> list[Any]:
            known: dict[int, Any] = dict(zip(block.arguments, values))
            for function, o in body:
                out = function(o, *[known[i] for i in o.operands])
                known.update(zip(o.results, out if len(o.results) > 1 else (out,)))
            return [known[i] for i in results]

        found = _FUNCTIONS[block] = run
    return found


def diverging(entry: Block, values: list[Any]) -> list[Any]:
    """Run a region with branches: elements that take the same path run together."""
    count = len(values[0])
    finished: list[Any] = []
    waiting = [(entry, np.arange(count), dict(zip(entry.arguments, values)))]
    while waiting:
        block, at, known = waiting.pop()
        for o in block.operations[:-1]:
            out = in_region(o)(o, *[known[i] for i in o.operands])
            known.update(zip(o.results, out if len(o.results) > 1 else (out,)))
        last = block.operations[-1]
        if last.name.endswith(".return"):
            for i, (value, kind) in enumerate(zip((known[v] for v in last.operands), last.operand_types)):
                if i == len(finished):
                    finished.append(np.zeros(count, dtype_of(kind)))
                finished[i][at] = value
        elif last.name == "cf.br":
            target = last.successors[0]
            waiting.append((target, at, known | dict(zip(target.arguments, [known[v] for v in last.operands]))))
        elif last.name == "cf.cond_br":
            condition, yes, no = last.split(last.operands)
            taken = np.broadcast_to(np.asarray(known[condition[0]], np.bool_), at.shape)
            for target, passed, chosen in ((last.successors[0], yes, taken), (last.successors[1], no, ~taken)):
                if chosen.any():
                    part = {
                        v: x[chosen] if isinstance(x, np.ndarray) and x.ndim and len(x) > 1 else x
                        for v, x in known.items()
                    }
                    waiting.append((target, at[chosen], part | dict(zip(target.arguments, [part[v] for v in passed]))))
        else:
            raise NotImplementedError(
                f"the simulator has no meaning for {last.name} inside a region, at {last.location}"
            )
    return finished


def combined(combine: Combine, left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
    """Apply the combiner to pairs of elements, of any shape."""
    out = combine([x.reshape(-1) for x in (*left, *right)])
    return [np.broadcast_to(np.asarray(o, x.dtype), (x.size,)).reshape(x.shape) for o, x in zip(out, left)]


_FOLD: dict[str, Any] = {
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.addi": np.add,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
}
_TREE: dict[str, Any] = {"arith.addf": np.add, "arith.mulf": np.multiply}


def combiner(op: Op) -> str | None:
    """Return the name of a region's only operation, if it is a numpy ufunc of the region's arguments."""
    blocks = op.regions[0].blocks
    if (
        len(blocks) != 1
        or len(blocks[0].operations) != 2
        or len(op.operands) != 1
        or element(op.operand_types[0]).name == "i1"
    ):
        return None
    first, last = blocks[0].operations
    # numpy does not round after every step
    rounds = first.name in _TREE and element(op.operand_types[0]).name not in ("f32", "f64")
    return (
        first.name
        if set(first.operands) == set(blocks[0].arguments) and last.operands == first.results and not rounds
        else None
    )


@pure("tt.reduce")
def reduce(op: Op, *sources: np.ndarray) -> Any:
    """Reduce by a balanced tree over the axis.

    Float sums have another order than any layout's on the hardware, with no larger error.
    """
    axis = op.attributes["axis"]
    values = [array(s, t) for s, t in zip(sources, op.operand_types)]
    name = combiner(op)
    if name in _FOLD:
        out: list[Any] = [
            _FOLD[name].reduce(values[0], axis=axis, dtype=values[0].dtype if name == "arith.addi" else None)
        ]
    elif name in _TREE:
        x, fold = values[0], _TREE[name]

        def part(x: np.ndarray, at: Any) -> np.ndarray:
            return x[(slice(None),) * axis + (at,)]

        while (n := x.shape[axis]) > 1:
            half = n // 2
            merged = fold(part(x, slice(half)), part(x, slice(half, 2 * half)))
            x = merged if n % 2 == 0 else np.concatenate([merged, part(x, slice(2 * half, n))], axis)
        out = [part(x, 0)]
    else:
        # neighbours first, in their order, because a combiner is only associative
        combine = region_function(op)
        parts = [np.ascontiguousarray(np.moveaxis(v, axis, 0)) for v in values]
        while (n := len(parts[0])) > 1:
            left = [p[0 : n - 1 : 2] for p in parts]
            merged_parts = combined(combine, left, [p[1::2] for p in parts])
            parts = [np.concatenate([m, p[n - 1 :]]) if n % 2 else m for m, p in zip(merged_parts, parts)]
        out = [p[0] for p in parts]
    settled = [settle(np.asarray(v), k) for v, k in zip(out, op.result_types)]
    return tuple(settled) if len(settled) > 1 else settled[0]


@pure("tt.scan")
def scan(op: Op, *sources: np.ndarray) -> Any:
    """Scan inclusively in log2(n) steps (Hillis and Steele), from the end where `reverse`."""
    axis = op.attributes["axis"]
    step_back = -1 if op.attributes["reverse"] else 1
    combine = region_function(op)
    parts = [np.moveaxis(array(s, t), axis, 0)[::step_back] for s, t in zip(sources, op.operand_types)]
    distance, n = 1, len(parts[0])
    while distance < n:
        merged = combined(combine, [p[:-distance] for p in parts], [p[distance:] for p in parts])
        parts = [np.concatenate([p[:distance], m]) for p, m in zip(parts, merged)]
        distance *= 2
    out = [np.ascontiguousarray(np.moveaxis(p[::step_back], 0, axis)) for p in parts]
    return tuple(out) if len(out) > 1 else out[0]


@pure("tt.map_elementwise")
def map_elementwise(op: Op, *sources: np.ndarray) -> Any:
    """Map a region over `pack` elements of every source at once. They are neighbours along the last dimension here;
    Triton leaves the choice open.
    """
    pack = op.attributes["pack"]
    lanes = [array(s, t).reshape(-1, pack)[:, i] for s, t in zip(sources, op.operand_types) for i in range(pack)]
    results = region_function(op)(lanes)
    out = []
    for r, kind in enumerate(op.result_types):
        columns = [
            np.broadcast_to(np.asarray(v, dtype_of(kind)), lanes[0].shape) for v in results[r * pack : (r + 1) * pack]
        ]
        out.append(np.stack(columns, axis=-1).reshape(kind.shape))  # type: ignore[union-attr]
    return tuple(out) if len(out) > 1 else out[0]


# ---------------------------------------------------------------- products in registers


@pure("tt.dot")
def dot(op: Op, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Any:
    """Compute (…, M, K) · (…, K, N) + (…, M, N) with exact products and float32 sums. Integers are exact, modulo
    2^32.

    inputPrecision: 0 (tf32) rounds float32 operands; 1 (3×tf32), 2 (ieee) and 4 (6×bf16) keep float32's digits; 3 is
    3×bf16.
    """
    kind = op.result_types[0]
    a, b, c = (array(v, t) for v, t in zip((a, b, c), op.operand_types))
    if a.dtype.kind in "iub":
        # float64 holds every partial sum of 8-bit products, and numpy multiplies matrices of it fast
        wide: Any = np.float64 if a.dtype.itemsize == 1 else np.int64
        return settle(np.matmul(a.astype(wide), b.astype(wide)).astype(np.int64) + c, kind)
    if element(op.operand_types[0]).name == "f32":
        precision = op.attributes.get("inputPrecision", 2)
        if precision == 0:
            # the hardware drops the low 13 bits
            a, b = round_to("tf32", a, toward_zero=True), round_to("tf32", b, toward_zero=True)
        elif precision == 3:  # high·high + high·low + low·high
            (ah, al), (bh, bl) = ((h := round_to("bf16", x), round_to("bf16", x - h)) for x in (a, b))
            return settle(np.matmul(ah, bh) + (np.matmul(ah, bl) + np.matmul(al, bh)) + c, kind)
        elif precision not in (1, 2, 4):
            raise NotImplementedError(f"the simulator knows no tt.dot with inputPrecision {precision}")
    return settle(np.matmul(a, b) + c, kind)


# tt::ScaleDotElemType, by its value in the attribute
SCALED_TYPES = {0: "f8E4M3FN", 1: "f8E5M2", 2: "e2m3", 3: "e3m2", 4: "e2m1", 5: "bf16", 6: "f16"}


def unpack_fp4(packed: np.ndarray, axis: int) -> np.ndarray:
    """Unpack two e2m1 numbers a byte along `axis`, the first from the low bits."""
    raw = np.ascontiguousarray(packed).view(np.uint8)
    axis %= raw.ndim
    both = np.stack([raw & 15, raw >> 4], axis=axis + 1)
    return decode("e2m1", both.reshape(*raw.shape[:axis], 2 * raw.shape[axis], *raw.shape[axis + 1 :]))


def scaled(values: np.ndarray, code: int, scales: tuple[Any, ...], axis: int, packed_axis: int) -> np.ndarray:
    """Return an operand of a scaled product as numbers: one scale for each block along `axis` (K).

    Scales are (…, M or N, K / block): ue8m0 bytes or floats.
    """
    name = SCALED_TYPES[code]
    if name == "e2m1":
        values = unpack_fp4(values, packed_axis)
    elif values.dtype.kind != "f":
        values = decode(name, np.ascontiguousarray(values).view({1: np.uint8, 2: np.uint16}[values.dtype.itemsize]))
    if not scales:
        return values
    raw = scales[0]
    factors = raw if raw.dtype.kind == "f" else decode("ue8m0", np.ascontiguousarray(raw).view(np.uint8))
    spread = np.repeat(factors, values.shape[axis] // factors.shape[-1], axis=-1)
    return values * (spread if axis == -1 else np.swapaxes(spread, -1, -2))


@pure("tt.dot_scaled")
def dot_scaled(op: Op, *operands: Any) -> Any:
    (a,), (b,), (c,), a_scale, b_scale = op.split(operands)
    x = scaled(a, op.attributes["a_elem_type"], a_scale, -1, -1 if op.attributes.get("lhs_k_pack", True) else -2)
    y = scaled(b, op.attributes["b_elem_type"], b_scale, -2, -2 if op.attributes.get("rhs_k_pack", True) else -1)
    return settle(np.matmul(x, y) + c, op.result_types[0])


@pure("ttg.fp4_to_fp")
def fp4_to_fp(op: Op, a: np.ndarray) -> Any:
    return settle(unpack_fp4(array(a, op.operand_types[0]), op.attributes["axis"]), op.result_types[0])
