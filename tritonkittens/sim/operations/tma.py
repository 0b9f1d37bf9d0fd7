"""The tensor memory accelerator: boxes of a tensor between global and shared memory. PTX ISA "cp.async.bulk.tensor",
"Tensor-map".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tritonkittens.inline_ptx.tensormap import ELEMENT_TYPES

from ..agents import Async, Role, Wait
from ..clocks import ASYNC
from ..costs import tma_duration
from ..global_order import GPU, WEAK
from ..layouts import SHARED_STRIDE, free_ranks
from ..numbers import decode, encode, round_to
from ..tensormaps import FORMATS, SWIZZLES
from ..ttgir import Descriptor, Op, Scalar
from ..values import Spans, TensorMap, View
from .barriers import addresses, sharers
from .registry import effect, view

COPY_ALIGNMENT = 128  # bytes; alignment of a box in shared memory
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# tt::DescriptorReduceKind, by its value in the attribute
REDUCE = {1: "add", 2: "min", 3: "max", 4: "inc", 5: "dec", 6: "and", 7: "or", 8: "xor"}
# elemtype .b4x16_p64: two e2m1 numbers a byte; shared memory alternates 8 bytes of them and 8 of padding
PADDED_FP4 = 14


def box_words(role: Role, op: Op, tensor: TensorMap, start: list[int], box: tuple[int, ...]) -> np.ndarray:
    """Return the box at `start`, as words, with the map's fill outside the tensor."""
    fill = encode(tensor.element, np.array(tensor.fill, np.float32)) if tensor.fill else 0
    out: np.ndarray = np.full(box, fill, _WORD[tensor.nbytes])
    inside = [(max(0, -s), min(b, n - s)) for s, b, n in zip(start, box, tensor.shape)]
    if all(a < b for a, b in inside):
        source = strided(role, op, tensor, [s + a for s, (a, _) in zip(start, inside)], [b - a for a, b in inside])
        out[tuple(slice(a, b) for a, b in inside)] = source
    return out


def box_spans(tensor: TensorMap, start: list[int], box: tuple[int, ...]) -> Spans:
    """Return the rows of the box inside the tensor."""
    inside = [(max(0, s), min(n, s + b)) for s, b, n in zip(start, box, tensor.shape)]
    if any(a >= b for a, b in inside):
        return Spans(np.zeros(0, np.int64), 0)
    starts = np.array(tensor.address + inside[-1][0] * tensor.nbytes, np.int64)
    for (a, b), stride in zip(inside[:-1], tensor.strides):
        starts = starts[..., None] + np.arange(a, b, dtype=np.int64) * stride
    return Spans(starts, (inside[-1][1] - inside[-1][0]) * tensor.nbytes)


def strided(
    role: Role, op: Op, tensor: TensorMap, start: list[int], extents: list[int], writes: bool = False
) -> np.ndarray:
    """Return a window into the tensor in global memory."""
    address = (tensor.address + sum(s * stride for s, stride in zip(start, tensor.strides))) % (1 << 64)
    last = address + sum((n - 1) * stride for n, stride in zip(extents, tensor.strides)) + tensor.nbytes
    found = role.machine.simulation.memory.find(address)
    if found is None or last > found[0] + found[1]:
        role.machine.stop(
            "out-of-bounds", f"a TMA copy of {tensor.name}: its map reaches outside the tensor's memory", role, op
        )
        raise AssertionError
    if writes:
        role.machine.simulation.memory.check_writable(found[0])
    offset = address - found[0]
    return np.ndarray(tuple(extents), _WORD[tensor.nbytes], found[2].data, offset, tensor.strides)


def check_map(role: Role, op: Op, tensor: Any) -> TensorMap:
    if isinstance(tensor, int):
        known = role.machine.simulation.tensor_map(tensor)
        if known is None:
            role.machine.stop(
                "uninitialized", f"a TMA descriptor at {tensor:#x}, where no tensor map was made", role, op
            )
        tensor = known
    if tensor.address % 16:
        role.machine.stop("misaligned", f"{tensor.name}: a tensor map's address lies on 16 bytes", role, op)
    return tensor


def check_coordinates(role: Role, op: Op, tensor: TensorMap, start: list[int], kind: str) -> None:
    """Check coordinates: the innermost is a multiple of 16 bytes (64 for padded fp4), and writes take no negative
    ones.
    """
    reads = kind in ("TMA load", "TMA gather")
    what = f"a {kind} {'of' if reads else 'to'} {tensor.name} at coordinates {start}"
    if not reads and any(s < 0 for s in start):
        role.machine.stop("out-of-bounds", f"{what}: they must not be negative (illegal instruction)", role, op)
    descriptor = op.operand_types[0]
    padded = isinstance(descriptor, Descriptor) and "fp4Padded = true" in (descriptor.layout or "")
    last, alignment = start[-1] * tensor.nbytes, 64 if padded else 16
    if last % alignment:
        role.machine.stop(
            "misaligned",
            f"{what}: the last is {last} bytes, not a multiple of {alignment} (illegal instruction)",
            role,
            op,
        )


def delivered(role: Role, bars: list[int], target: View) -> int:
    """Return the bytes that each barrier receives: one CTA's part, for every CTA that shares the barrier.

    A multicast signals each receiving CTA's own barrier.
    """
    holders = len(np.unique(target.map.offsets >> 24)) if target.map.spread else 1
    return target.map.total // holders * (len(role.ranks) // len(bars))


def start_load(
    role: Role,
    op: Op,
    bar_addresses: list[int],
    target: View,
    words: Any,
    source: Spans,
    bytes_per_barrier: int,
    kind: str = "TMA load",
    rank: int | None = None,
) -> None:
    """Start a copy of `source` into shared memory that reports its bytes to barriers. `words()` reads the source.

    CTA `rank` starts it, or each CTA of the role starts its own part. With multicast, the lowest of the CTAs that hold
    the same part loads it for all of them.
    """
    machine = role.machine
    leads = ~free_ranks(target.type) if op.attributes.get("multicast") and len(role.ranks) > 1 else -1

    def issuers(address: int) -> list[int]:
        ranks = sharers(role, bar_addresses, address) if rank is None else [rank]
        return list(dict.fromkeys(r & leads for r in ranks))

    first = (target.base + int(target.map.offsets.reshape(-1).min())) % SHARED_STRIDE
    if first % COPY_ALIGNMENT:
        machine.stop(
            "misaligned",
            f"a {kind} to shared memory at byte {first}: it must lie on {COPY_ALIGNMENT} bytes (misaligned address)",
            role,
            op,
        )
    barriers = []
    for address in bar_addresses:
        found = [machine.barriers.find(role, address, op, "a copy signals it", r) for r in issuers(address)]
        barriers += [b for b in found[:1] if b is not None]
    early = words() if machine.simulation.schedule.reads_early() else None

    def effect(operation: Async) -> None:
        data = early if early is not None else words()
        machine.simulation.global_order.access(operation, source, False, op)
        machine.touch(operation, target, True, ASYNC, op)
        machine.write(target, data.reshape(target.map.shape))
        for barrier, phase in zip(barriers, phases):
            machine.barriers.deliver(operation, barrier, phase, bytes_per_barrier, issuers(barrier.address))

    duration = tma_duration(target.map.total, machine.simulation.program.arch)
    operation = machine.start(kind, role, op, effect, unit="TMA", duration=duration, rank=rank)
    operation.leads = leads
    phases = [machine.barriers.promise(operation, b) for b in barriers]


@effect("ttng.async_tma_copy_global_to_local")
def load(role: Role, op: Op, *operands: Any) -> None:
    (tensor,), coordinates, offsets, (bar,), (target,), (predicate,) = op.split(operands)
    if not predicate:
        return
    tensor = check_map(role, op, tensor)
    start = [int(c) for c in coordinates]
    box = tuple(op.operand_types[0].shape)  # type: ignore[union-attr]
    check_coordinates(role, op, tensor, start, "TMA load")
    if offsets or tensor.im2col is not None:
        shift = [int(o) & 0xFFFF for o in offsets]
        source = im2col_spans(tensor, start, shift, box)

        def words() -> np.ndarray:
            return im2col_words(role, op, tensor, start, shift, box)
    else:
        if len(box) != len(start):
            role.machine.stop("misaligned", f"{tensor.name}: {len(start)} coordinates for a box {box}", role, op)
        source = box_spans(tensor, start, box)

        def words() -> np.ndarray:
            return box_words(role, op, tensor, start, box)

    bars = addresses(role, bar)
    start_load(role, op, bars, target, words, source, delivered(role, bars, target))


def im2col_pixels(
    tensor: TensorMap, start: list[int], shift: list[int], box: tuple[int, ...]
) -> Iterator[tuple[int, list[int]]]:
    """Return (row of the box, coordinates) of pixels of a convolution's input that lie in the tensor, in the order of
    its output, shifted by a filter tap (PTX ISA "im2col mode").

    The pixel box runs in each spatial dimension from `lower` to extent − 1 + `upper`. Pixels are counted through it
    row by row, image by image, from `start`.
    """
    assert tensor.im2col is not None
    lower, upper, steps = tensor.im2col["lower"], tensor.im2col["upper"], tensor.im2col["element_strides"]
    spatial = tensor.shape[1:-1]
    counts = [max(0, (n - 1 + up - low) // step + 1) for n, low, up, step in zip(spatial, lower, upper, steps)]
    image, *position, channel = start
    index = [(p - low) // step for p, low, step in zip(position, lower, steps)]
    shifts = shift or [0] * len(spatial)  # in the tensor's order here, reversed in the instruction
    for row in range(box[-2]):
        flat = row
        place = []
        for axis in reversed(range(len(spatial))):
            flat += index[axis]
            flat, here = divmod(flat, counts[axis])
            place.append(here * steps[axis] + lower[axis] + shifts[axis])
        at = place[::-1]
        number = image + flat
        if 0 <= number < tensor.shape[0] and all(0 <= p < n for p, n in zip(at, spatial)):
            yield row, [number, *at, channel]


def im2col_words(
    role: Role, op: Op, tensor: TensorMap, start: list[int], shift: list[int], box: tuple[int, ...]
) -> np.ndarray:
    """Return the pixels of a box, with the map's fill outside the tensor."""
    pixels, channels = box[-2], box[-1]
    out: np.ndarray = np.zeros((pixels, channels), _WORD[tensor.nbytes])
    if tensor.fill:
        out[:] = encode(tensor.element, np.array(tensor.fill, np.float32))
    width = min(channels, tensor.shape[-1] - start[-1])
    if width > 0:
        for row, place in im2col_pixels(tensor, start, shift, box):
            out[row, :width] = strided(role, op, tensor, place, [1] * (len(place) - 1) + [width]).reshape(-1)
    return out.reshape(box)


def im2col_spans(tensor: TensorMap, start: list[int], shift: list[int], box: tuple[int, ...]) -> Spans:
    """Return the pixels of a box inside the tensor."""
    width = max(0, min(box[-1], tensor.shape[-1] - start[-1]))
    starts = [
        tensor.address + sum(p * s for p, s in zip(place, tensor.strides))
        for _, place in im2col_pixels(tensor, start, shift, box)
    ]
    return Spans(np.array(starts, np.int64), width * tensor.nbytes)


def start_store(
    role: Role, op: Op, source: View, put: Any, target: Spans, kind: str = "TMA store", rank: int | None = None
) -> None:
    """Start a copy from shared memory to `target`, in the role's open bulk group. `put(words)` writes them."""
    machine = role.machine

    def read(operation: Async) -> np.ndarray:
        machine.touch(operation, source, False, ASYNC, op)
        machine.check_written(operation, source, op)
        return machine.read(source)

    start_bulk(role, op, kind, source.map.total, read, put, target, rank)


def start_bulk(
    role: Role, op: Op, kind: str, nbytes: int, read: Any, put: Any, target: Spans, rank: int | None = None
) -> None:
    """Start a bulk store with two completions: its source is read (`read(operation) -> data`), and its target is
    written (`put(data)`).
    """
    machine = role.machine
    data: list[np.ndarray] = []
    reads = machine.start(
        kind,
        role,
        op,
        lambda operation: data.append(read(operation)),
        unit="TMA",
        duration=tma_duration(nbytes, machine.simulation.program.arch),
        rank=rank,
    )

    def write(operation: Async) -> None:
        put(data.pop())
        scope = GPU if kind.startswith("TMA reduce") else WEAK
        machine.simulation.global_order.access(operation, target, True, op, scope=scope)

    role.bulk_open.append(machine.follow(reads, "writes", write))


def write_box(role: Role, op: Op, tensor: TensorMap, start: list[int], words: np.ndarray, kind: str | None) -> None:
    box = words.shape
    inside = [(max(0, -s), min(b, n - s)) for s, b, n in zip(start, box, tensor.shape)]
    if any(a >= b for a, b in inside):
        return
    if kind is None:
        inside[-1] = inside[-1][0], whole_pieces(tensor, start[-1], inside[-1][1], box[-1])
    target = strided(
        role, op, tensor, [s + a for s, (a, _) in zip(start, inside)], [b - a for a, b in inside], writes=True
    )
    data = words[tuple(slice(a, b) for a, b in inside)]
    target[...] = data if kind is None else reduced(tensor, kind, target, data)


def whole_pieces(tensor: TensorMap, start: int, stop: int, box: int) -> int:
    """Return the end of a row of a store: whole 16-byte pieces are written, also past the tensor's edge.

    An H200 does that; PTX does not specify it.
    """
    if start + stop < tensor.shape[-1]:
        return stop
    past = -(start + stop) * tensor.nbytes % 16 // tensor.nbytes
    return min(stop + past, box)


def reduced(tensor: TensorMap, kind: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return old ∘ new, in the tensor's own number format."""
    if kind in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[kind](old, new)
    if tensor.element.startswith("u") and kind in ("add", "min", "max"):
        return {"add": np.add, "min": np.minimum, "max": np.maximum}[kind](old, new)
    if kind == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if kind == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    a, b = decode(tensor.element, np.ascontiguousarray(old)), decode(tensor.element, np.ascontiguousarray(new))
    float_ = Scalar(tensor.element).is_float
    least, most = (np.fmin, np.fmax) if float_ else (np.minimum, np.maximum)
    out = {"add": np.add, "min": least, "max": most}[kind](a, b)
    return encode(tensor.element, round_to(tensor.element, out) if float_ else out)


def _store(role: Role, op: Op, tensor: Any, coordinates: tuple[Any, ...], source: View, kind: str | None) -> None:
    tensor = check_map(role, op, tensor)
    start = [int(c) for c in coordinates]
    name = "TMA store" if kind is None else f"TMA reduce ({kind})"
    check_coordinates(role, op, tensor, start, name)

    descriptor: Any = op.operand_types[0]
    box: tuple[int, ...] = tuple(descriptor.shape)

    def put(words: np.ndarray) -> None:
        write_box(role, op, tensor, start, words.reshape(box), kind)

    start_store(role, op, source, put, box_spans(tensor, start, box), name)
    role.bulk_groups.append(role.bulk_open)
    role.bulk_open = []


@effect("ttng.async_tma_copy_local_to_global")
def store(role: Role, op: Op, tensor: Any, *rest: Any) -> None:
    _store(role, op, tensor, rest[:-1], rest[-1], None)


@effect("ttng.async_tma_reduce")
def reduce(role: Role, op: Op, tensor: Any, *rest: Any) -> None:
    _store(role, op, tensor, rest[:-1], rest[-1], REDUCE[op.attributes["kind"]])


@effect("ttng.async_tma_gather")
def gather(
    role: Role, op: Op, tensor: Any, rows: np.ndarray, column: Any, bar: View, target: View, predicate: Any
) -> None:
    if not predicate:
        return
    tensor = check_map(role, op, tensor)
    check_coordinates(role, op, tensor, [0, int(column)], "TMA gather")
    width = target.map.shape[-1]

    def words() -> np.ndarray:
        return np.concatenate(
            [box_words(role, op, tensor, [int(r), int(column)], (1, width)) for r in rows.reshape(-1)]
        )

    bars = addresses(role, bar)
    source = rows_spans(tensor, rows, int(column), width)
    start_load(role, op, bars, target, words, source, delivered(role, bars, target), "TMA gather")


def rows_spans(tensor: TensorMap, rows: np.ndarray, column: int, width: int) -> Spans:
    """Return the parts of single rows inside the tensor."""
    inside: np.ndarray = rows.reshape(-1).astype(np.int64)
    inside = inside[(inside >= 0) & (inside < tensor.shape[0])]
    first, last = max(0, column), min(tensor.shape[1], column + width)
    return Spans(
        tensor.address + inside * tensor.strides[0] + first * tensor.nbytes, max(0, last - first) * tensor.nbytes
    )


@effect("ttng.async_tma_scatter")
def scatter(role: Role, op: Op, tensor: Any, rows: np.ndarray, column: Any, source: View) -> None:
    tensor = check_map(role, op, tensor)
    check_coordinates(role, op, tensor, [int(rows.min()), int(column)], "TMA scatter")

    def put(words: np.ndarray) -> None:
        for row, data in zip(rows.reshape(-1), words.reshape(rows.size, -1)):
            write_box(role, op, tensor, [int(row), int(column)], data[None, :], None)

    start_store(role, op, source, put, rows_spans(tensor, rows, int(column), source.map.shape[-1]), "TMA scatter")
    role.bulk_groups.append(role.bulk_open)
    role.bulk_open = []


@effect("ttng.async_tma_store_wait")
def store_wait(role: Role, op: Op) -> Any:
    operations, what = over_but_for(role, op.attributes["pendings"], bool(op.attributes.get("read_only")))
    if operations:
        yield Wait(
            lambda: all(o.done for o in operations),
            lambda: f"{sum(not o.done for o in operations)} {what}",
            time=lambda: max(o.finish for o in operations),
        )
        role.machine.acquire(role, operations)


def over_but_for(role: Role, pending: int, read: bool) -> tuple[list[Async], str]:
    """Return the operations of a cp.async.bulk.wait_group and its name.

    They are the writes, or only the `read`s, of all groups of this role but the last `pending`.
    """
    over = role.bulk_groups[: max(0, len(role.bulk_groups) - pending)]
    writes = [o for group in over for o in group]
    if not read:  # the writes still need a wait after a wait for the reads
        role.bulk_groups = role.bulk_groups[len(over) :]
        return writes, "TMA stores"
    return [o.after or o for o in writes], "TMA stores to have read their source"


# ---- descriptors made by the kernel


@effect("ttng.tensormap_create")
def tensormap_create(role: Role, op: Op, *operands: Any) -> None:
    (place,), (address,), boxes, extents, strides, _ = op.split(operands)
    number = op.attributes["elem_type"]
    padded = number == PADDED_FP4
    element, nbytes = FORMATS[ELEMENT_TYPES[0 if padded else number]]
    fill = float("nan") if op.attributes.get("fill_mode") else 0.0
    # the hardware's order is innermost first; it counts fp4 numbers, tiles count bytes
    shape, box = (
        [int(n) // (1 + (padded and d == 0)) for d, n in enumerate(sizes)][::-1] for sizes in (extents, boxes)
    )
    name = f"the tensor at {role.machine.simulation.memory.name(int(address))}"
    apart = (*(int(s) for s in strides[::-1]), nbytes)
    swizzle = SWIZZLES[op.attributes["swizzle_mode"]]
    made = TensorMap(int(address), element, nbytes, tuple(shape), apart, tuple(box), fill, name, swizzle=swizzle)
    role.machine.simulation.tensor_maps[int(place)] = made


@effect("ttng.tensormap_fenceproxy_acquire")
def tensormap_acquire(role: Role, op: Op, place: Any) -> None:
    if int(place) not in role.machine.simulation.tensor_maps:
        role.machine.stop("uninitialized", "fence.proxy.tensormap on memory that holds no tensor map", role, op)


@view("ttng.reinterpret_tensor_descriptor")
def reinterpret_descriptor(role: Role, op: Op, place: Any) -> Any:
    return int(place)
