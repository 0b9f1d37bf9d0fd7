"""Memory as inline PTX accesses it: addresses resolved to the simulator's memories, loads, stores and atomics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tritonkittens.inline_ptx import tcgen05
from tritonkittens.inline_ptx._meaning import NoMeaning, PtxFault

from ..agents import Async, Role
from ..clocks import GENERIC, TENSOR_THREADS, Clock
from ..costs import TMA_LATENCY, Duration
from ..global_order import SCOPES
from ..layouts import LANES, SHARED_STRIDE, TENSOR_LANE_BYTES
from ..numbers import decode, encode, round_to
from ..ttgir import Scalar, Tensor
from ..values import AddressMap, Allocation, Spans, View
from .global_memory import outside, synchronise
from .ptx_threads import PtxThreads

WORD: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MLIR = {
    "u32": "i32",
    "s32": "i32",
    "b32": "i32",
    "u64": "i64",
    "s64": "i64",
    "b64": "i64",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
    "f64": "f64",
}
TENSOR_COLUMNS = TENSOR_LANE_BYTES // 4


class PtxMemory(PtxThreads):
    """Accesses of memory by threads, and by the asynchronous operations that they start."""

    def view(self, space: str, address: int, map: AddressMap) -> View:
        rank, inside = address // SHARED_STRIDE, address % SHARED_STRIDE
        cta = self.machine.ctas[rank] if rank < len(self.machine.ctas) else None
        holder = (
            next((a for a in cta.allocations[space][::-1] if a.base <= inside < a.base + a.size), None)
            if cta is not None
            else None
        )
        if holder is None and space == "tensor" and cta is not None:
            holder = next(
                (a for a in cta.tensor_live.values() if a.base <= inside % TENSOR_LANE_BYTES < a.base + a.size), None
            )
        kind = Tensor(map.shape, Scalar({1: "i8", 2: "i16", 4: "i32", 8: "i64"}.get(map.nbytes, "i8")), None)
        return View(space, address, map, kind, holder or Allocation(f"{space} memory at {inside}", self.op, 0, 1 << 24))

    def _split(self, space: str, addresses: np.ndarray, nbytes: int) -> Iterator[tuple[np.ndarray, View]]:
        """Return (which of the flat addresses, their view) for each CTA that contains some."""
        ranks: np.ndarray = addresses // SHARED_STRIDE
        for rank in np.unique(ranks):
            here = np.flatnonzero(ranks == rank)
            low = int(addresses[here].min())
            yield here, self.view(space, low, AddressMap(addresses[here] - low, nbytes))

    def resolve(self, space: str, addresses: np.ndarray, nbytes: int, what: str) -> tuple[str, np.ndarray]:
        """Return (shared, tensor or global; flat int64 addresses), with alignment checked.

        Generic addresses of shared memory are those of its window, far below any tensor's.
        """
        flat = np.ascontiguousarray(addresses).reshape(-1).astype(np.uint64).view(np.int64)
        if space == "tensor":
            lane, column = flat >> 16 & 0xFFFF, flat & 0xFFFF
            if ((lane >= LANES) | (column * 4 + nbytes > TENSOR_LANE_BYTES)).any():
                bad = int(flat[(lane >= LANES) | (column * 4 + nbytes > TENSOR_LANE_BYTES)][0])
                where = f"lane {bad >> 16 & 0xFFFF}, column {bad & 0xFFFF} of tensor memory"
                self.machine.stop("out-of-bounds", f"{what} of {nbytes} bytes at {where}", self.role, self.op)
            self._allocated(column, nbytes, what)
            ranks = self.rank + (flat // tcgen05.OTHER_TENSOR)
            return space, (ranks << 24) + lane * TENSOR_LANE_BYTES + column * 4
        if space == "generic":
            window = flat < len(self.machine.ctas) * SHARED_STRIDE
            if window.any() and not window.all():
                raise NoMeaning("one access of shared and of global memory")
            space = "shared" if flat.size and window.all() else "global"
        align = min(nbytes, 16) if nbytes & (nbytes - 1) == 0 else 1
        if (flat % align).any():
            bad = int(flat[flat % align != 0][0])
            name = (
                self.machine.name_of("shared", bad) if space == "shared" else self.machine.simulation.memory.name(bad)
            )
            self.machine.stop(
                "misaligned", f"{what} of {nbytes} bytes at {name}, not a multiple of {align}", self.role, self.op
            )
        return space, flat

    def _allocated(self, columns: np.ndarray, nbytes: int, what: str) -> None:
        """Check that every column belongs to the compiler's allocation or to one of tcgen05.alloc."""
        cta = self.machine.ctas[self.rank]
        owned: np.ndarray = np.zeros(TENSOR_COLUMNS, bool)
        owned[: self.machine.simulation.program.tensor_columns] = True
        for allocation in cta.tensor_live.values():
            owned[allocation.base // 4 : (allocation.base + allocation.size) // 4] = True
        wide = columns[..., None] + np.arange(max(1, nbytes // 4))
        if columns.size and not owned[wide].all():
            bad = int(wide[~owned[wide]].reshape(-1)[0])
            self.machine.stop(
                "tmem", f"{what} in column {bad} of tensor memory, which no tcgen05.alloc holds", self.role, self.op
            )

    def fetch(
        self,
        agent: Role | Async,
        proxy: str,
        space: str,
        flat: np.ndarray,
        nbytes: int,
        *,
        atomic: bool = False,
        write: bool = False,
    ) -> np.ndarray:
        """Return uint8 [n, nbytes] at checked addresses."""
        if space == "global":
            out: np.ndarray = np.empty((flat.size, nbytes), np.uint8)
            word = next(n for n in (8, 4, 2, 1) if nbytes % n == 0)
            for start in range(0, nbytes, word):
                words, bad = self.machine.simulation.memory.gather(flat + start, word)
                if bad is not None:
                    outside(self.role, self.op, bad, nbytes, "a load")
                out[:, start : start + word] = words[:, None].view(np.uint8)
            return out
        out = np.empty((flat.size, nbytes), np.uint8)
        for here, view in self._split(space, flat, nbytes):
            self.machine.touch(agent, view, write, proxy, self.op, atomic, self.rank)
            self.machine.check_written(agent, view, self.op)
            memory = self.machine.memory(space, view.base >> 24)
            out[here] = memory.bytes[(flat[here] % SHARED_STRIDE)[:, None] + np.arange(nbytes)]
        return out

    def put(
        self, agent: Role | Async, proxy: str, space: str, flat: np.ndarray, data: np.ndarray, *, atomic: bool = False
    ) -> None:
        nbytes = data.shape[-1]
        if space == "global":
            word = next(n for n in (8, 4, 2, 1) if nbytes % n == 0)
            for start in range(0, nbytes, word):
                words = np.ascontiguousarray(data[:, start : start + word]).view(WORD[word])[:, 0]
                bad = self.machine.simulation.memory.scatter(flat + start, words)
                if bad is not None:
                    outside(self.role, self.op, bad, nbytes, "a store")
            return
        for here, view in self._split(space, flat, nbytes):
            self.machine.touch(agent, view, True, proxy, self.op, atomic, self.rank)
            memory = self.machine.memory(space, view.base >> 24)
            places = (flat[here] % SHARED_STRIDE)[:, None] + np.arange(nbytes)
            memory.bytes[places] = data[here]
            memory.written[places] = True

    @staticmethod
    def _rows(active: np.ndarray, addresses: np.ndarray) -> np.ndarray:
        """Return the active threads' addresses, flat."""
        return np.broadcast_to(addresses, addresses.shape)[active].reshape(-1)

    def load(
        self, space: str, addresses: np.ndarray, nbytes: int, active: np.ndarray, order: str = "weak", scope: str = ""
    ) -> np.ndarray:
        space, flat = self.resolve(space, self._rows(active, addresses), nbytes, "a load")
        out = np.zeros((*addresses.shape, nbytes), np.uint8)
        data = self.fetch(*self._agent(space, "ld"), space, flat, nbytes, atomic=order != "weak")
        out[active] = data.reshape(-1, *addresses.shape[1:], nbytes)
        if space == "global":
            self._synchronise(flat, nbytes, active, order, scope, reads=True)
        elif order != "weak":
            self._acquire(space, flat)
        return out

    def store(
        self,
        space: str,
        addresses: np.ndarray,
        data: np.ndarray,
        active: np.ndarray,
        order: str = "weak",
        scope: str = "",
    ) -> None:
        space, flat = self.resolve(space, self._rows(active, addresses), data.shape[-1], "a store")
        if space == "global":
            self._synchronise(flat, data.shape[-1], active, order, scope, writes=True)
        elif order != "weak":
            self._release(space, flat)
        self.put(
            *self._agent(space, "st"), space, flat, data[active].reshape(-1, data.shape[-1]), atomic=order != "weak"
        )

    def _synchronise(
        self,
        flat: np.ndarray,
        nbytes: int,
        active: np.ndarray,
        order: str,
        scope: str,
        *,
        reads: bool = False,
        writes: bool = False,
    ) -> None:
        """Record accesses of global memory by the active threads, and what they acquire and release."""
        count = int(np.count_nonzero(active))
        if order != "weak":
            semantics = "relaxed" if order == "volatile" else order
            synchronise(
                self.role,
                self.op,
                Spans(flat, nbytes),
                semantics,
                SCOPES[scope],
                count == 1,
                reads=reads,
                writes=writes,
            )
            return
        threads: np.ndarray = self.tid[active].astype(np.int16)
        if count and flat.size != count:
            threads = np.repeat(threads, flat.size // count)
        self.machine.simulation.global_order.access(
            self.role, Spans(flat, nbytes), writes, self.op, single=count == 1, owners=threads
        )

    def _agent(self, space: str, what: str) -> tuple[Role | Async, str]:
        """Return the agent of an access and its proxy. An access of tensor memory is an operation of its own, which
        tcgen05.wait ends.
        """
        return (
            (self.role, GENERIC)
            if space != "tensor"
            else (self.machine.tensor_access(self.role, self.op, what, self.rank), TENSOR_THREADS)
        )

    # Threads of a cluster synchronise through words that they store and load with an order (and fences around relaxed
    # ones): a reader of such a word acquires the clocks of its writers.

    def _release(self, space: str, flat: np.ndarray) -> None:
        clock = self.role.release(self.rank)
        for place in set(flat.tolist()):
            self.machine.words.setdefault((space, place), Clock(self.machine.number_of_roles)).join(clock)

    def _acquire(self, space: str, flat: np.ndarray) -> None:
        for place in set(flat.tolist()):
            known = self.machine.words.get((space, place))
            if known is not None:
                self.clock.join(known)

    def atomic(
        self,
        space: str,
        operation: str,
        format: str,
        addresses: np.ndarray,
        bits: np.ndarray,
        active: np.ndarray,
        order: str = "relaxed",
        scope: str = "gpu",
        compare: np.ndarray | None = None,
    ) -> np.ndarray:
        words = np.broadcast_to(np.asarray(bits), addresses.shape)
        nbytes = words.dtype.itemsize
        space, flat = self.resolve(space, self._rows(active, addresses), nbytes, f"an atomic {operation}")
        new = words[active].reshape(-1)
        expected = (
            None if compare is None else np.broadcast_to(np.asarray(compare), addresses.shape)[active].reshape(-1)
        )
        if space == "global":
            self._synchronise(flat, nbytes, active, order, scope, reads=True, writes=True)
        else:
            self._acquire(space, flat)
            self._release(space, flat)
        old = np.zeros(flat.size, words.dtype)
        # threads that name one address run in order: the k-th thread of each address together
        order_of = np.argsort(flat, kind="stable")
        ordered = flat[order_of]
        first = np.r_[True, ordered[1:] != ordered[:-1]] if flat.size else np.zeros(0, bool)
        turn: np.ndarray = np.empty(flat.size, np.int64)
        turn[order_of] = np.arange(flat.size) - np.maximum.accumulate(np.where(first, np.arange(flat.size), 0))
        for k in range(int(turn.max()) + 1 if flat.size else 0):
            here = np.flatnonzero(turn == k)
            before = np.ascontiguousarray(
                self.fetch(self.role, GENERIC, space, flat[here], nbytes, atomic=True, write=True)
            ).view(words.dtype)[:, 0]
            old[here] = before
            after = combined(operation, format, before, new[here], None if expected is None else expected[here])
            self.machine.version += not np.array_equal(before, after)
            self.put(
                self.role, GENERIC, space, flat[here], np.ascontiguousarray(after)[:, None].view(np.uint8), atomic=True
            )
        out = np.zeros(addresses.shape, words.dtype)
        out[active] = old.reshape(-1, *addresses.shape[1:])
        return out

    def store_async(self, addresses: np.ndarray, data: np.ndarray, barriers: np.ndarray, active: np.ndarray) -> None:
        nbytes = data.shape[-1]
        _, flat = self.resolve("shared", addresses[active], nbytes, "st.async")
        at = np.broadcast_to(barriers, addresses.shape)[active].astype(np.int64)
        for bar in np.unique(at):
            self._store_async(flat[at == bar], data[active][at == bar], int(bar))

    def _store_async(self, flat: np.ndarray, data: np.ndarray, bar: int) -> None:
        barrier = self.machine.barriers.find(self.role, bar, self.op, "st.async signals it")
        if barrier is not None and (flat // SHARED_STRIDE != bar // SHARED_STRIDE).any():
            raise PtxFault("st.async to another CTA than its mbarrier's")

        self.start_signalling(
            "st.async",
            barrier,
            data.size,
            lambda operation: self.put(operation, GENERIC, "shared", flat, data),
            unit="st.async",
            duration=Duration(0, TMA_LATENCY / 2),
        )


def combined(operation: str, format: str, old: np.ndarray, new: np.ndarray, compare: np.ndarray | None) -> np.ndarray:
    """Return the words after one atomic operation on each, in a PTX format."""
    if operation == "exch":
        return new
    if operation == "cas":
        assert compare is not None
        return np.where(old == compare, new, old)
    if operation in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation](old, new)
    if format.endswith("x2"):
        low, high = (
            combined(operation, format[:-2], (old >> s).astype(np.uint16), (new >> s).astype(np.uint16), None)
            for s in (np.uint32(0), np.uint32(16))
        )
        return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
    if operation == "inc":
        return np.where(old >= new, 0, old + old.dtype.type(1)).astype(old.dtype)
    if operation == "dec":
        return np.where((old == 0) | (old > new), new, old - old.dtype.type(1)).astype(old.dtype)
    if format not in _MLIR or operation not in ("add", "min", "max"):
        raise NoMeaning(f"the atomic {operation} of {format}")
    if format[0] == "u":
        return {"add": np.add, "min": np.minimum, "max": np.maximum}[operation](old, new)
    name = _MLIR[format]
    a, b = decode(name, old), decode(name, new)
    if format[0] == "s":
        return encode(name, {"add": np.add, "min": np.minimum, "max": np.maximum}[operation](a, b))
    return encode(name, round_to(name, {"add": np.add, "min": np.fmin, "max": np.fmax}[operation](a, b)))
