"""Bulk and tensor copies by inline PTX (TMA), and tensor maps that it changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tritonkittens.inline_ptx._meaning import PtxFault

from .. import tensormaps
from ..agents import Async, Role, Wait
from ..clocks import ASYNC, GENERIC
from ..costs import tma_duration
from ..layouts import SHARED_STRIDE
from ..values import AddressMap, Spans, TensorMap, View
from .ptx_memory import WORD, PtxMemory, combined
from .tma import (
    box_spans,
    box_words,
    check_coordinates,
    check_map,
    over_but_for,
    start_bulk,
    start_load,
    start_store,
    write_box,
)


class PtxCopies(PtxMemory):
    """Copies by the TMA that threads start."""

    def targets(self, address: int, bar: int | None, multicast: int | None) -> list[tuple[int, int | None]]:
        """Return (shared address, barrier) in every CTA that receives a copy."""
        if multicast is None:
            return [(address, bar)]
        inside, at = address % SHARED_STRIDE, None if bar is None else bar % SHARED_STRIDE
        ranks = [r for r in range(16) if multicast >> r & 1]
        late = [r for r in ranks if r >= len(self.machine.ctas)]
        if late or not ranks:
            self.machine.stop(
                "out-of-bounds",
                f"a multicast to the CTAs {ranks} of a cluster of {len(self.machine.ctas)}",
                self.role,
                self.op,
            )
        return [((r << 24) + inside, None if at is None else (r << 24) + at) for r in ranks]

    def bulk_copy(
        self,
        destination: tuple[str, int],
        source: tuple[str, int],
        nbytes: int,
        *,
        thread: int,
        barrier: int | None = None,
        multicast: int | None = None,
        reduction: tuple[str, str] | None = None,
    ) -> None:
        self.check_aligned(nbytes, "cp.async.bulk: the number of bytes")
        self.check_aligned(destination[1], "cp.async.bulk: the destination")
        self.check_aligned(source[1], "cp.async.bulk: the source")
        if nbytes == 0:
            return

        def read(agent: Role | Async) -> np.ndarray:
            space, start = source
            return self.fetch(agent, ASYNC, space, np.arange(start, start + nbytes, 16), 16).reshape(-1)

        def write(agent: Role | Async, start: int, data: np.ndarray) -> None:
            self._write_bulk(agent, destination[0], start, data, reduction)

        if destination[0] == "global":
            start, target = destination[1], Spans(np.array([destination[1]]), nbytes)
            kind = "TMA store" if reduction is None else f"TMA reduce ({reduction[0]})"

            def put(bits: np.ndarray) -> None:
                write(self.role, start, bits)

            start_bulk(self.role, self.op, kind, nbytes, read, put, target, self.rank)
            return
        loads = source[0] == "global"
        kind, data = ("TMA load", self._maybe_early(read)) if loads else ("bulk copy between CTAs", read)
        find = self.machine.barriers.find
        for place, bar in self.targets(destination[1], barrier, multicast):
            signalled = None if bar is None else find(self.role, bar, self.op, "a copy signals it", self.rank)

            def effect(operation: Async, place: int = place) -> None:
                if loads:
                    order = self.machine.simulation.global_order
                    order.access(operation, Spans(np.array([source[1]]), nbytes), False, self.op)
                write(operation, place, data(operation))

            operation = self.start_signalling(
                kind,
                signalled,
                nbytes,
                effect,
                unit="TMA",
                duration=tma_duration(nbytes, self.machine.simulation.program.arch),
            )
            if barrier is None:
                self.role.bulk_open.append(operation)

    def _maybe_early(self, read: Callable[[Role | Async], np.ndarray]) -> Callable[[Role | Async], np.ndarray]:
        """Read the source of a load at its start, where the schedule says so, instead of at its completion."""
        if not self.machine.simulation.schedule.reads_early():
            return read
        early = read(self.role)
        return lambda agent: early

    def _write_bulk(
        self, agent: Role | Async, space: str, start: int, data: np.ndarray, reduction: tuple[str, str] | None
    ) -> None:
        """Write the bytes of a bulk copy, combined with the old ones in a reduction (operation, format)."""
        if reduction is not None:
            name, format = reduction
            size = 2 if format.endswith("16") else int(format[1:]) // 8
            flat = np.arange(start, start + data.size, size)
            old = self.fetch(agent, ASYNC, space, flat, size, atomic=True, write=True)
            words = np.ascontiguousarray(old).view(WORD[size])[:, 0]
            data = np.ascontiguousarray(combined(name, format, words, data.view(WORD[size]), None)).view(np.uint8)
        places = np.arange(start, start + data.size, 16)
        self.put(agent, ASYNC, space, places, data.reshape(-1, 16), atomic=reduction is not None)

    def tensor_copy(
        self,
        direction: str,
        tensor_map: int,
        coordinates: tuple[int, ...],
        shared: int,
        *,
        thread: int,
        barrier: int | None = None,
        multicast: int | None = None,
        reduction: str | None = None,
    ) -> None:
        role, op = self.role, self.op
        self.check_aligned(tensor_map, "a tensor map's address", 64)
        tensor = check_map(role, op, int(tensor_map))
        start = list(coordinates[::-1])
        if len(start) != len(tensor.shape):
            self.machine.stop(
                "misaligned",
                f"{tensor.name}: {len(start)} coordinates for a tensor of {len(tensor.shape)} dimensions",
                role,
                op,
            )
        kind = f"TMA {direction}" if reduction is None else f"TMA reduce ({reduction})"
        check_coordinates(role, op, tensor, start, kind)
        self.check_aligned(shared, f"a TMA {direction} of {tensor.name}: the shared address", 128)
        if direction == "load":
            rows = box_spans(tensor, start, tensor.box)
            for place, bar in self.targets(shared, barrier, multicast):
                if bar is None:
                    raise PtxFault("a tensor load without an mbarrier")
                target = self._box(place, tensor)

                def words() -> np.ndarray:
                    return box_words(role, op, tensor, start, tensor.box)

                start_load(role, op, [bar], target, words, rows, target.map.total, rank=self.rank)
            return
        source = self._box(shared, tensor)
        row, end = tensor.shape[-1] * tensor.nbytes, (start[-1] + tensor.box[-1]) * tensor.nbytes
        if end > row and row % 16:
            message = (
                f"a TMA store past the end of the rows of {tensor.name}: rows are {row} bytes, and whole "
                "16-byte pieces are written"
            )
            self.machine.report("out-of-bounds", message, role, op, buffer=source.name)
        written = box_spans(tensor, start, tensor.box)
        start_store(
            role,
            op,
            source,
            lambda words: write_box(role, op, tensor, start, words.reshape(tensor.box), reduction),
            written,
            kind,
            self.rank,
        )

    def _box(self, address: int, tensor: TensorMap) -> View:
        """Return the addresses of a box's elements: row after row, with 16-byte pieces exchanged by the map's swizzle
        (a function of address bits 7 to 9).
        """
        inner = tensor.box[-1] * tensor.nbytes
        if tensor.swizzle and inner > tensor.swizzle:
            self.machine.stop(
                "misaligned",
                f"{tensor.name}: rows of a box of {inner} bytes under a {tensor.swizzle}-byte swizzle",
                self.role,
                self.op,
            )
        places: np.ndarray = (
            address % SHARED_STRIDE + np.arange(int(np.prod(tensor.box)), dtype=np.int64) * tensor.nbytes
        )
        if tensor.swizzle:
            places ^= (places >> 7 & tensor.swizzle // 16 - 1) << 4
        base = address - address % SHARED_STRIDE + int(places.min())
        return self.view("shared", base, AddressMap((places - places.min()).reshape(tensor.box), tensor.nbytes))

    def commit_bulk_group(self, active: np.ndarray) -> None:
        self.role.bulk_groups.append(self.role.bulk_open)
        self.role.bulk_open = []

    def wait_bulk_group(self, pending: int, read: bool, active: np.ndarray) -> Wait | None:
        return self.until(*over_but_for(self.role, pending, read))

    def replace_tensor_map(self, space: str, address: int, field: str, ordinal: int, value: int) -> None:
        simulation = self.machine.simulation
        where, flat = self.resolve(space, np.array([address], np.int64), tensormaps.NBYTES, "tensormap.replace")
        self.check_aligned(address, "tensormap.replace at", tensormaps.NBYTES)
        if space == "shared":
            tensor = tensormaps.unpack(
                self.fetch(self.role, GENERIC, where, flat, tensormaps.NBYTES).tobytes(), "tensor"
            )
        else:
            tensor = simulation.tensor_map(address)
        if tensor is None:
            self.machine.stop(
                "uninitialized", f"tensormap.replace at {address:#x}, where no tensor map was made", self.role, self.op
            )
            return
        try:
            new = tensormaps.changed(tensor, field, ordinal, value)
        except ValueError as error:
            raise PtxFault(str(error)) from None
        if space == "global" and address in simulation.tensor_maps:
            simulation.tensor_maps[address] = new
        else:
            self.put(self.role, GENERIC, where, flat, np.frombuffer(tensormaps.pack(new), np.uint8)[None, :])
