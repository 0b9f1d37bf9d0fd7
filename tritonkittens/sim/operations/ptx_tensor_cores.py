"""Products and tensor memory by inline PTX: wgmma and tcgen05."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tritonkittens.inline_ptx import tcgen05
from tritonkittens.inline_ptx._meaning import PtxFault

from ..agents import Async, Wait
from ..clocks import ASYNC
from ..costs import TCGEN05_LATENCY, WGMMA_LATENCY, Duration, tcgen05_cycles
from ..layouts import LANES, SHARED_MASK, SHARED_STRIDE, TENSOR_LANE_BYTES
from ..report import Place
from ..values import Allocation
from .ptx_memory import TENSOR_COLUMNS, PtxMemory


class PtxTensorCores(PtxMemory):
    """Work of the tensor cores that threads start, and their allocations of tensor memory."""

    def _issue(
        self,
        queue: str,
        kind: str,
        effect: Callable[[Async], None],
        latency: float = 0.0,
        cost: float = 0.0,
        thread: int | None = None,
    ) -> Async:
        """Start work of the CTA's tensor core, in order after the earlier work of the role, or of its `thread`, in the
        same queue."""
        return self.machine.start(
            kind,
            self.role,
            self.op,
            effect,
            queue=(queue, self.role.components[self.rank], *(() if thread is None else (int(self.tid[thread]),))),
            unit=f"tensor core {self.rank}",
            duration=Duration(cost, latency),
            rank=self.rank,
        )

    # ---- wgmma

    def wgmma(self, product: Any) -> np.ndarray:
        """Start a wgmma.

        The accumulator's values are computed at once, but belong to the tensor core until the wait for the group
        (`inline_asm` refuses their use). The operands in shared memory are read at the start, and once more at
        completion, to detect races.
        """
        reads: list[np.ndarray] = []
        nbytes = product.element_bytes
        memory = self.machine.memory("shared", self.rank)

        def peek(addresses: np.ndarray) -> np.ndarray:
            flat = np.ascontiguousarray(addresses).reshape(-1).astype(np.int64)
            reads.append(flat + (self.rank << 24))
            if int(flat.max()) + nbytes > memory.size:
                message = (
                    f"wgmma reads an operand up to byte {int(flat.max()) + nbytes} of {memory.size} of shared memory"
                )
                self.machine.stop("out-of-bounds", message, self.role, self.op)
            return memory.bytes[flat[:, None] + np.arange(nbytes)].reshape(*addresses.shape, nbytes)

        values: np.ndarray = product.compute(peek)

        def effect(operation: Async) -> None:
            for flat in reads:
                self.fetch(operation, ASYNC, "shared", flat, nbytes)

        self._issue("wgmma", "wgmma", effect, WGMMA_LATENCY)
        return values

    def wgmma_fence(self) -> None:
        """Do nothing: registers are in order here."""

    def wgmma_commit(self) -> None:
        """Commit a group. It is complete when its last operation is, because they complete in order."""
        self.role.products.append(self._issue("wgmma", "wgmma group", lambda operation: None))

    def wgmma_wait(self, pending: int) -> Wait | None:
        role = self.role
        over = role.products[: max(0, len(role.products) - pending)]
        role.products = role.products[len(over) :]
        return self.until(over, "groups of wgmma")

    # ---- tcgen05

    def tcgen05_alloc(self, columns: int) -> Any:
        cta, role = self.machine.ctas[self.rank], self.role
        if columns not in (32, 64, 128, 256, 512):
            raise PtxFault(f"tcgen05.alloc of {columns} columns: a power of two from 32 to 512")
        self._group(1)
        if cta.tensor_relinquished:
            self.machine.report("tmem", "tcgen05.alloc after tcgen05.relinquish_alloc_permit", role, self.op)

        def free() -> int | None:
            taken: np.ndarray = np.zeros(TENSOR_COLUMNS, bool)
            taken[: self.machine.simulation.program.tensor_columns] = True
            for allocation in cta.tensor_live.values():
                taken[allocation.base // 4 : (allocation.base + allocation.size) // 4] = True
            return next(
                (c for c in range(0, TENSOR_COLUMNS - columns + 1, columns) if not taken[c : c + columns].any()), None
            )

        if free() is None:
            yield Wait(lambda: free() is not None, lambda: f"{columns} columns of tensor memory")
        start = free()
        assert start is not None
        cta.tensor_live[start] = Allocation(f"tensor memory of {columns} columns", self.op, start * 4, columns * 4)
        assert cta.tensor is not None
        for lane in range(LANES):
            cta.tensor.forget(lane * TENSOR_LANE_BYTES + start * 4, lane * TENSOR_LANE_BYTES + (start + columns) * 4)
        return start

    def _group(self, ctas: int) -> None:
        """Check that all tcgen05 instructions of a kernel have one cta_group. The compiler's own name it first."""
        machine = self.machine
        if machine.tensor_group is None and machine.simulation.program.tensor_columns:
            machine.tensor_group = 1 + bool(machine.simulation.program.module.attributes.get("ttng.two-ctas"))
        machine.tensor_group = machine.tensor_group or ctas
        if machine.tensor_group != ctas:
            raise PtxFault(f"tcgen05 with cta_group::{ctas} in a kernel with cta_group::{machine.tensor_group}")

    def tcgen05_dealloc(self, address: int, columns: int) -> None:
        self._group(1)
        cta = self.machine.ctas[self.rank]
        known = cta.tensor_live.get(address)
        if known is None or known.size != columns * 4:
            held = ", ".join(f"{a.size // 4} columns at {start}" for start, a in cta.tensor_live.items()) or "nothing"
            self.machine.report(
                "tmem", f"tcgen05.dealloc of {columns} columns at {address}; {held} is allocated", self.role, self.op
            )
            return
        assert cta.tensor is not None
        for lane in range(LANES):
            start = lane * TENSOR_LANE_BYTES + known.base
            access = cta.tensor.shadow.unordered(start, start + known.size, self.clock)
            if access is not None and not self.machine.simulation.reported(access.op):
                message = f"{known.name}: released while a {access.who.rsplit(', ', 1)[-1]} may still access it"
                place = Place(access.who, "accesses it", access.op.location)
                self.machine.report("tmem", message, self.role, self.op, "tcgen05.dealloc", (place,))
                break
        del cta.tensor_live[address]

    def tcgen05_relinquish(self) -> None:
        self.machine.ctas[self.rank].tensor_relinquished = True

    def tcgen05_wait(self, what: str) -> Wait | None:
        """Wait for accesses of the role's own threads, which take no time here."""
        self.machine.tensor_wait(self.role, what)
        return None

    def tcgen05_issue(self, operation: Any, thread: int) -> None:
        def effect(flying: Async) -> None:
            def read(space: str, addresses: np.ndarray, nbytes: int) -> np.ndarray:
                where, flat = self.resolve(space, self._window(space, addresses), nbytes, flying.kind)
                self._in_one_buffer(where, flat, nbytes, flying.kind)
                return self.fetch(flying, ASYNC, where, flat, nbytes).reshape(*addresses.shape, nbytes)

            def write(space: str, addresses: np.ndarray, data: np.ndarray) -> None:
                where, flat = self.resolve(space, self._window(space, addresses), data.shape[-1], flying.kind)
                self.put(flying, ASYNC, where, flat, data.reshape(-1, data.shape[-1]))

            operation.run(read, write)

        name = "tcgen05.cp" if isinstance(operation, tcgen05.Copy) else "tcgen05.mma"
        self._group(operation.ctas)
        if operation.ctas == 2 and (self.rank % 2 or self.rank + 1 >= len(self.machine.ctas)):
            where = f"in CTA {self.rank} of a cluster of {len(self.machine.ctas)}"
            self.machine.stop(
                "illegal", f"{name}.cta_group::2 {where}: the CTA of even rank issues it for a pair", self.role, self.op
            )
        if isinstance(operation, tcgen05.Copy):
            self._issue("tcgen05", name, effect, 0.0, 4 * operation.source.size / 128, thread)
            return
        (m, n), bits = operation.d.shape, operation.operand_bits
        cost = tcgen05_cycles(m // operation.ctas, n, 256 // bits, bits)
        self._issue("tcgen05", name, effect, TCGEN05_LATENCY, cost, thread)

    def _in_one_buffer(self, space: str, flat: np.ndarray, nbytes: int, what: str) -> None:
        """Check that an operand in shared memory, which may be spread over the CTAs of a pair, does not reach from one
        buffer, or stage of a ring, into the next."""
        if space != "shared":
            return
        first, last = int((flat & SHARED_MASK).min()), int((flat & SHARED_MASK).max()) + nbytes
        buffers = [a for a in self.machine.ctas[self.rank].allocations[space] if a.base <= first < a.base + a.size]
        ends = []
        for buffer in buffers:  # those of different times share memory
            stage = buffer.stage_bytes or buffer.size
            ends.append(min(buffer.base + buffer.size, first - (first - buffer.base) % stage + stage))
        if buffers and last > max(ends):
            message = f"{what} reads {buffers[-1].describe(first)} up to {last - max(ends)} bytes beyond its end"
            self.machine.stop("out-of-bounds", message, self.role, self.op)

    def _window(self, space: str, addresses: np.ndarray) -> np.ndarray:
        """Return addresses relative to the start of the CTA's own shared memory, as in descriptors."""
        return (
            np.asarray(addresses).astype(np.int64) + (self.rank << 24) if space == "shared" else np.asarray(addresses)
        )

    def tcgen05_commit(self, barriers: list[int], thread: int, ctas: int) -> None:
        machine, role, op = self.machine, self.role, self.op
        self._group(ctas)
        last, ranks = max(barriers, default=0) // SHARED_STRIDE, len(machine.ctas)
        if last >= ranks:
            raise PtxFault(f"tcgen05.commit to a barrier of CTA {last} of a cluster of {ranks}")

        def effect(operation: Async) -> None:
            operation.clocks[self.rank].commit()
            for address in barriers:
                barrier = machine.barriers.find(role, address, op, "tcgen05.commit", self.rank)
                if barrier is not None:
                    machine.barriers.arrive(role, barrier, 1, op, "arrives (tcgen05.commit)", self.rank, operation)

        self._issue("tcgen05", "tcgen05.commit", effect, thread=thread)
