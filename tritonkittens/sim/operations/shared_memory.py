"""Allocations in shared memory, views of them, and accesses by threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..agents import Role
from ..layouts import SHARED_STRIDE, held, layout_rank, shared_offsets, tensor_offsets
from ..report import Finding, Place, Stop
from ..ttgir import MemDesc, Op, Tensor, Type
from ..values import AddressMap, Allocation, View
from .registry import effect, view

_MAPS: dict[Any, tuple[AddressMap, int]] = {}


def address_map(kind: MemDesc) -> tuple[AddressMap, int]:
    """Return the map of a whole view of this type, and the bytes from one buffer to the next where leading dimensions
    select a buffer.
    """
    key = (kind.shape, kind.alloc_shape, kind.element, kind.layout, kind.space)
    found = _MAPS.get(key)
    if found is not None:
        return found
    rank = min(layout_rank(kind), len(kind.alloc_shape))
    lead, tail = kind.shape[: len(kind.shape) - rank], kind.alloc_shape[len(kind.alloc_shape) - rank :]
    if kind.space == "shared":
        nbytes = kind.element.nbytes
        offsets, replicas = shared_offsets(kind.layout, tail, nbytes)
        within = offsets & (SHARED_STRIDE - 1)
        stride = (
            int(within.max()) + nbytes
            if "padded" in kind.layout
            else int(np.prod(tail)) * nbytes // len(np.unique(offsets >> 24))
        )
        if "fp4Padded = true" in kind.layout:
            stride *= 2  # every 8 bytes take 16
    else:
        nbytes = max(kind.element.bits, 8) // 8
        offsets, replicas, columns = tensor_offsets(kind.layout, tail, kind.element.bits)
        stride = columns * 4
    if tail != kind.shape[len(lead) :]:  # a part of a larger allocation, at its origin
        cut = tuple(slice(0, n) for n in kind.shape[len(lead) :])
        offsets = offsets[cut]
        every = (slice(None), *cut)
        replicas = None if replicas is None else replicas[every]
    if lead:
        steps: np.ndarray = np.arange(int(np.prod(lead)), dtype=np.int64).reshape(*lead, *[1] * rank) * stride
        replicas = None if replicas is None else np.stack([r + steps for r in replicas])
        offsets = offsets + steps
    _MAPS[key] = AddressMap(np.ascontiguousarray(offsets), nbytes, replicas), stride
    return _MAPS[key]


def idle(role: Role) -> bool:
    """Whether no operation of the role, or of an ended role, is in flight.

    Otherwise an allocation that a loop makes again may still be read.
    """
    return not any(o.role is role or o.role.done for o in role.machine.flying)


def allocate(role: Role, op: Op, kind: MemDesc, base: int, size: int, name: str, stage: int | None) -> View:
    machine = role.machine
    map, stride = address_map(kind)
    rank = role.rank if machine.simulation.program.num_ctas == 1 else 0
    known = machine.ctas[rank].allocations[kind.space]
    allocation = next((a for a in known if a.op is op), None)
    if allocation is None:
        allocation = Allocation(name, op, base, size, stage)
        for cta in machine.ctas if machine.simulation.program.num_ctas > 1 else [machine.ctas[rank]]:
            cta.allocations[kind.space].append(allocation)
    return View(kind.space, (rank << 24) + base, map, kind, allocation)


def buffer_name(op: Op) -> str:
    """Return the Python variable of an allocation, or its line where the compiler lost the variable (tuples)."""
    name = op.result_name
    if name and not name[0].isdigit():
        return name
    frames = op.location.frames
    return f"buffer of {frames[-1]}" if frames else "buffer"


@effect("ttg.local_alloc")
def local_alloc(role: Role, op: Op, *source: Any) -> View:
    machine = role.machine
    kind = op.result_types[0]
    assert isinstance(kind, MemDesc)
    base = op.attributes.get("allocation.offset")
    if base is None:
        machine.stop("unknown", "local_alloc without an offset: the allocation pass has not run", role, op)
        raise AssertionError
    if isinstance(base, tuple):
        base = base[0]
    map, stride = address_map(kind)
    size = max(end & (SHARED_STRIDE - 1) for _, end in map.runs) if map.runs else 0
    lead = len(kind.shape) - min(layout_rank(kind), len(kind.shape))
    made = allocate(role, op, kind, base, size, buffer_name(op), stride if lead else None)
    for cta in machine.ctas if machine.simulation.program.num_ctas > 1 else [machine.ctas[role.rank]]:
        if idle(role):
            cta.shared.forget(base, base + size)
        for address in [
            a for a in machine.barriers if a >> 24 == cta.rank and base <= a & (SHARED_STRIDE - 1) < base + size
        ]:
            barrier = machine.barriers[address]
            machine.report(
                "barrier-life", f"{barrier.name}: its memory is allocated again without mbarrier.inval", role, op
            )
            del machine.barriers[address]
    if source:
        machine.store(role, made, source[0], op, parts(role, made, op.operand_types[0], True))
    return made


@effect("ttg.local_dealloc")
def local_dealloc(role: Role, op: Op, buffer: View) -> None:
    """Free the memory for the next allocation. The compiler has chosen its address."""


def parts(role: Role, view: View, kind: Type, write: bool) -> list[tuple[int, View]]:
    """Return what the threads of each CTA access of a view, whose elements they hold in a tensor of type `kind`, or
    nothing where that is their own CTA's memory."""
    if len(role.ranks) == 1:
        return []
    assert isinstance(kind, Tensor) and kind.layout is not None
    here = held(kind.layout, kind.shape, role.warps)
    found = view.map.parts((kind.layout, role.warps, write), here, write)
    return [(rank, View(view.space, view.base, map, view.type, view.allocation)) for rank, map in found]


@effect("ttg.local_load")
def local_load(role: Role, op: Op, buffer: View, *token: Any) -> np.ndarray:
    return role.machine.load(role, buffer, op, parts=parts(role, buffer, op.result_types[0], False))


@effect("ttg.local_store")
def local_store(role: Role, op: Op, values: Any, buffer: View) -> None:
    role.machine.store(role, buffer, values, op, parts(role, buffer, op.operand_types[0], True))


def _picked(buffer: View, indices: np.ndarray, axis: int) -> View:
    """Return the elements of a buffer at `indices` along `axis`."""
    grid = list(np.meshgrid(*[np.arange(n) for n in indices.shape], indexing="ij"))
    grid[axis] = indices.astype(np.int64)
    map, at = buffer.map, tuple(grid)
    chosen = AddressMap(map.offsets[at], map.nbytes, None if map.replicas is None else map.replicas[:, *at])
    return View(buffer.space, buffer.base, chosen, buffer.type, buffer.allocation)


def _check_indices(role: Role, op: Op, buffer: View, indices: np.ndarray, axis: int) -> None:
    if indices.size and (indices.min() < 0 or indices.max() >= buffer.map.shape[axis]):
        extent = buffer.map.shape[axis]
        role.machine.stop(
            "out-of-bounds",
            f"{buffer.name}: indices {int(indices.min())} to {int(indices.max())} along a dimension of {extent}",
            role,
            op,
        )


@effect("ttg.local_gather")
def local_gather(role: Role, op: Op, buffer: View, indices: np.ndarray, *token: Any) -> np.ndarray:
    _check_indices(role, op, buffer, indices, op.attributes["axis"])
    chosen = _picked(buffer, indices, op.attributes["axis"])
    return role.machine.load(role, chosen, op, parts=parts(role, chosen, op.result_types[0], False))


@effect("ttg.local_scatter")
def local_scatter(role: Role, op: Op, buffer: View, values: np.ndarray, indices: np.ndarray, *token: Any) -> None:
    _check_indices(role, op, buffer, indices, op.attributes["axis"])
    chosen = _picked(buffer, indices, op.attributes["axis"])
    role.machine.store(role, chosen, values, op, parts(role, chosen, op.operand_types[1], True))


# ---- views


class Outside:
    """A view of a buffer that does not exist. Only its use is reported, because an address may be computed for a
    predicated-off operation.
    """

    def __init__(self, finding: Finding):
        self.finding = finding

    def __getattr__(self, name: str) -> Any:
        raise Stop(self.finding)


def of_view(fn: Callable[..., View]) -> Callable[..., View]:
    """Make a view of a nonexistent view nonexistent."""

    def derived(role: Role, op: Op, source: View, *rest: Any) -> View:
        return source if isinstance(source, Outside) else fn(role, op, source, *rest)

    return derived


@view("ttg.memdesc_index")
@of_view
def memdesc_index(role: Role, op: Op, source: View, index: Any) -> Any:
    kind = op.result_types[0]
    assert isinstance(kind, MemDesc)
    if not 0 <= int(index) < source.map.shape[0]:
        message = f"{source.name}: index {index} of {source.map.shape[0]} buffers"
        return Outside(
            Finding(
                "out-of-bounds",
                message,
                (Place(role.machine.where(role), op.name, op.location),),
                {"buffer": source.name},
            )
        )
    step = (
        int(source.map.offsets.reshape(source.map.shape[0], -1)[:2, 0][-1] - source.map.offsets.reshape(-1)[0])
        if source.map.shape[0] > 1
        else 0
    )
    inner = source.map.derive("index", lambda offsets: offsets[0])
    return View(source.space, source.base + int(index) * step, inner, kind, source.allocation)


@view("ttg.memdesc_subslice")
@of_view
def memdesc_subslice(role: Role, op: Op, source: View) -> View:
    kind = op.result_types[0]
    assert isinstance(kind, MemDesc)
    offsets = op.attributes["offsets"]
    cut = tuple(slice(o, o + n) for o, n in zip(offsets, kind.shape))
    return View(
        source.space,
        source.base,
        source.map.derive(("slice", offsets, kind.shape), lambda a: a[cut]),
        kind,
        source.allocation,
    )


@view("ttng.tmem_subslice")
@of_view
def tmem_subslice(role: Role, op: Op, source: View) -> View:
    kind = op.result_types[0]
    assert isinstance(kind, MemDesc)
    axis, start = op.attributes["dim"], op.attributes["offset"]
    axis -= len(kind.shape)
    width = kind.shape[axis]
    cut = (..., slice(start, start + width), *[slice(None)] * (-1 - axis))
    return View(
        source.space,
        source.base,
        source.map.derive(("part", axis, start, width), lambda a: a[cut]),
        kind,
        source.allocation,
    )


@view("ttg.memdesc_trans")
@of_view
def memdesc_trans(role: Role, op: Op, source: View) -> View:
    order = tuple(op.attributes["order"])
    return View(
        source.space,
        source.base,
        source.map.derive(("trans", order), lambda a: a.transpose(order)),
        op.result_types[0],
        source.allocation,
    )


@view("ttg.memdesc_reshape")
@of_view
def memdesc_reshape(role: Role, op: Op, source: View) -> View:
    kind = op.result_types[0]
    assert isinstance(kind, MemDesc)
    return View(
        source.space,
        source.base,
        source.map.derive(("reshape", kind.shape), lambda a: a.reshape(kind.shape)),
        kind,
        source.allocation,
    )


@view("ttg.memdesc_reinterpret")
@of_view
def memdesc_reinterpret(role: Role, op: Op, source: View) -> View:
    kind = op.result_types[0]
    assert isinstance(kind, MemDesc)
    map, _ = address_map(kind)
    base = source.base + (int(source.map.offsets.min()) if source.map.offsets.size else 0)
    return View(source.space, base, map, kind, source.allocation)
