"""The machine of inline PTX: `inline_ptx._meaning.Machine` for the threads of a role that execute a block.

It maps to the simulator's memories, barriers and asynchronous operations. Each shim states the meaning of its
instruction; this module and `..machine` define memories, barriers and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tritonkittens.inline_ptx import clc, tcgen05
from tritonkittens.inline_ptx._meaning import NoMeaning, PtxFault

from .. import tensormaps
from ..agents import Async, Role, Wait
from ..clocks import ASYNC, GENERIC, TENSOR_THREADS, Clock
from ..costs import TCGEN05_LATENCY, TMA_LATENCY, WGMMA_LATENCY, tma_cycles
from ..layouts import LANES, SHARED_STRIDE, TENSOR_LANE_BYTES
from ..numbers import decode, encode, round_to
from ..report import Finding, Place, Stop
from ..spinning import Watch
from ..ttgir import Op, Scalar, Tensor
from ..values import AddressMap, Allocation, Spans, TensorMap, View
from .control import role_ranks
from .global_memory import outside
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

_WORD: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
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
CLOCK_GHZ = 1.7  # clock of the modelled time, for %globaltimer and nanosleep
CLC_LATENCY = 700.0
# Fences of accesses that are in order here anyway.
IN_ORDER = ("acq_rel.", "sc.", "mbarrier_init.", "proxy.async.global", "proxy.tensormap::generic.", "proxy.alias")
TENSOR_COLUMNS = TENSOR_LANE_BYTES // 4


class ThenWait(Wait):
    """A wait with an action at its end, which `run_block` executes."""

    __slots__ = ("then",)

    def __init__(
        self, ready: Callable[[], bool], describe: Callable[[], str], then: Callable[[], None], **options: Any
    ):
        super().__init__(ready, describe, **options)
        self.then = then


def contiguous(nbytes: int) -> AddressMap:
    """Return the map of `nbytes` contiguous bytes, in the largest words that divide them."""
    size = next(n for n in (8, 4, 2, 1) if nbytes % n == 0)
    return AddressMap(np.arange(0, nbytes, size, dtype=np.int64), size)


class RoleThreads:
    """Threads of one role in one CTA that execute one block together. `tid`, `lane`, `warp` are arrays with one entry
    a thread.
    """

    def __init__(self, role: Role, op: Op, rank: int, tid: np.ndarray):
        self.role, self.op, self.rank, self.machine = role, op, rank, role.machine
        self.tid: np.ndarray = tid.astype(np.int64)
        self.lane: np.ndarray = self.tid % 32
        self.warp: np.ndarray = self.tid // 32
        self._rounds: dict[int, tuple[NamedBarrier, int]] = {}  # of named barriers: the round for which this role waits
        self.watch = Watch(role)

    # ---- identity

    def special(self, name: str) -> Any:
        machine, simulation = self.machine, self.machine.simulation
        cta = machine.ctas[self.rank]
        size = len(machine.ctas)
        now = self.role.time
        x, y, z = cta.program
        lockstep = simulation.program.num_ctas > 1  # Triton's grid counts clusters, the hardware's CTAs
        grid = (simulation.grid[0] * size, *simulation.grid[1:]) if lockstep else simulation.grid
        table: dict[str, Any] = {
            "%tid": self.tid,
            "%tid.x": self.tid,
            "%tid.y": 0,
            "%tid.z": 0,
            "%laneid": self.lane,
            "%warpid": self.warp,
            "%nwarpid": 64,
            "%ntid": 32 * simulation.program.total_warps,
            "%ntid.x": 32 * simulation.program.total_warps,
            "%ntid.y": 1,
            "%ntid.z": 1,
            "%ctaid.x": x * size + self.rank if lockstep else x,
            "%ctaid.y": y,
            "%ctaid.z": z,
            "%nctaid.x": grid[0],
            "%nctaid.y": grid[1],
            "%nctaid.z": grid[2],
            "%cluster_ctarank": self.rank,
            "%cluster_nctarank": size,
            "%cluster_ctaid.x": self.rank,
            "%cluster_ctaid.y": 0,
            "%cluster_ctaid.z": 0,
            "%cluster_nctaid.x": size,
            "%cluster_nctaid.y": 1,
            "%cluster_nctaid.z": 1,
            "%is_explicit_cluster": int(size > 1),
            "%clusterid.x": x if lockstep else x // size,
            "%clusterid.y": y,
            "%clusterid.z": z,
            "%nclusterid.x": -(-grid[0] // size),
            "%nclusterid.y": grid[1],
            "%nclusterid.z": grid[2],
            "%clock": int(now) & 0xFFFFFFFF,
            "%clock_hi": int(now) >> 32,
            "%clock64": int(now),
            "%globaltimer": int(now / CLOCK_GHZ),
            "%globaltimer_lo": int(now / CLOCK_GHZ) & 0xFFFFFFFF,
            "%globaltimer_hi": int(now / CLOCK_GHZ) >> 32,
            "%smid": (machine.index * size + self.rank) % 132,
            "%nsmid": 132,
            "%gridid": 1,
            "%dynamic_smem_size": simulation.program.shared_bytes,
            "%total_smem_size": cta.shared.size,
        }
        if name not in table:
            raise NoMeaning(f"the simulator knows no special register {name}")
        return table[name]

    def static_shared(self, name: str, nbytes: int, align: int) -> int:
        """Return the address of a `.shared` variable. It lies after the kernel's own shared memory, one for each
        declaration in the program.
        """
        cta = self.machine.ctas[self.rank]
        known = next((a for a in cta.allocations["shared"] if a.op is self.op and a.name == name), None)
        if known is None:
            start = max(cta.static_top, self.machine.simulation.program.shared_bytes)
            start += -start % align
            cta.static_top = start + nbytes
            cta.shared.grow(cta.static_top)
            known = Allocation(name, self.op, start, nbytes)
            cta.allocations["shared"].append(known)
        return (self.rank << 24) + known.base

    # ---- memory

    def view(self, address: int, nbytes: int) -> View:
        """Return a view of bytes of shared memory from an address on."""
        return self._view("shared", address, contiguous(nbytes))

    def _view(self, space: str, address: int, map: AddressMap) -> View:
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
            yield here, self._view(space, low, AddressMap(addresses[here] - low, nbytes))

    def _where(self, space: str, addresses: np.ndarray, nbytes: int, what: str) -> tuple[str, np.ndarray]:
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
            return space, (self.rank << 24) + lane * TENSOR_LANE_BYTES + column * 4
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

    def _fetch(
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
            if isinstance(agent, Role) and agent.bulk_writes and not atomic:
                self.machine.settled(agent, Spans(flat, nbytes), self.op, "load")
            return out
        out = np.empty((flat.size, nbytes), np.uint8)
        for here, view in self._split(space, flat, nbytes):
            self.machine.touch(agent, view, write, proxy, self.op, atomic)
            self.machine.check_written(agent, view, self.op)
            memory = self.machine.memory(space, view.base >> 24)
            out[here] = memory.bytes[(flat[here] % SHARED_STRIDE)[:, None] + np.arange(nbytes)]
        return out

    def _put(
        self, agent: Role | Async, proxy: str, space: str, flat: np.ndarray, data: np.ndarray, *, atomic: bool = False
    ) -> None:
        nbytes = data.shape[-1]
        if space == "global":
            word = next(n for n in (8, 4, 2, 1) if nbytes % n == 0)
            for start in range(0, nbytes, word):
                words = np.ascontiguousarray(data[:, start : start + word]).view(_WORD[word])[:, 0]
                bad = self.machine.simulation.memory.scatter(flat + start, words)
                if bad is not None:
                    outside(self.role, self.op, bad, nbytes, "a store")
            return
        for here, view in self._split(space, flat, nbytes):
            self.machine.touch(agent, view, True, proxy, self.op, atomic)
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
        space, flat = self._where(space, self._rows(active, addresses), nbytes, "a load")
        out = np.zeros((*addresses.shape, nbytes), np.uint8)
        data = self._fetch(*self._agent(space, "ld"), space, flat, nbytes, atomic=order != "weak")
        out[active] = data.reshape(-1, *addresses.shape[1:], nbytes)
        if order != "weak":
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
        space, flat = self._where(space, self._rows(active, addresses), data.shape[-1], "a store")
        if order != "weak":
            self._release(space, flat)
        self._put(
            *self._agent(space, "st"), space, flat, data[active].reshape(-1, data.shape[-1]), atomic=order != "weak"
        )

    def _agent(self, space: str, what: str) -> tuple[Role | Async, str]:
        """Return the agent of an access and its proxy. An access of tensor memory is an operation of its own, which
        tcgen05.wait ends.
        """
        return (
            (self.role, GENERIC)
            if space != "tensor"
            else (self.machine.tensor_access(self.role, self.op, what), TENSOR_THREADS)
        )

    # Threads of a cluster synchronise through words that they store and load with an order (and fences around relaxed
    # ones): a reader of such a word acquires the clocks of its writers.

    def _release(self, space: str, flat: np.ndarray) -> None:
        clock = self.role.release()
        for place in set(flat.tolist()):
            self.machine.words.setdefault((space, place), Clock(self.machine.number_of_roles)).join(clock)

    def _acquire(self, space: str, flat: np.ndarray) -> None:
        for place in set(flat.tolist()):
            known = self.machine.words.get((space, place))
            if known is not None:
                self.role.clock.join(known)

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
        space, flat = self._where(space, self._rows(active, addresses), nbytes, f"an atomic {operation}")
        new = words[active].reshape(-1)
        expected = (
            None if compare is None else np.broadcast_to(np.asarray(compare), addresses.shape)[active].reshape(-1)
        )
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
                self._fetch(self.role, GENERIC, space, flat[here], nbytes, atomic=True, write=True)
            ).view(words.dtype)[:, 0]
            old[here] = before
            after = combined(operation, format, before, new[here], None if expected is None else expected[here])
            self.machine.version += not np.array_equal(before, after)
            self._put(
                self.role, GENERIC, space, flat[here], np.ascontiguousarray(after)[:, None].view(np.uint8), atomic=True
            )
        out = np.zeros(addresses.shape, words.dtype)
        out[active] = old.reshape(-1, *addresses.shape[1:])
        return out

    def store_async(self, addresses: np.ndarray, data: np.ndarray, barriers: np.ndarray, active: np.ndarray) -> None:
        nbytes = data.shape[-1]
        _, flat = self._where("shared", addresses[active], nbytes, "st.async")
        at = np.broadcast_to(barriers, addresses.shape)[active].astype(np.int64)
        for bar in np.unique(at):
            self._store_async(flat[at == bar], data[active][at == bar], int(bar))

    def _store_async(self, flat: np.ndarray, data: np.ndarray, bar: int) -> None:
        machine = self.machine
        barrier = machine.barriers.find(self.role, bar, self.op, "st.async signals it")
        if barrier is not None and (flat // SHARED_STRIDE != bar // SHARED_STRIDE).any():
            raise PtxFault("st.async to another CTA than its mbarrier's")

        def effect(operation: Async) -> None:
            self._put(operation, GENERIC, "shared", flat, data)
            if barrier is not None:
                machine.barriers.deliver(operation, barrier, phase, data.size)

        operation = machine.start("st.async", self.role, self.op, effect, unit="st.async", latency=TMA_LATENCY / 2)
        phase = machine.barriers.promise(operation, barrier) if barrier is not None else 0

    # ---- synchronisation

    def barrier(self, address: int) -> PtxBarrier:
        return PtxBarrier(self, int(address))

    def named_barrier(
        self, number: int, threads: int | None, arriving: int, arrive_only: bool, votes: int = 0
    ) -> Wait | None:
        machine, role = self.machine, self.role
        if not 0 <= number < 16:
            raise PtxFault(f"barrier {number}: a CTA has 16")
        key = (self.rank, number)
        state = machine.named.setdefault(key, NamedBarrier(number, machine.number_of_roles))
        total = 32 * machine.simulation.program.total_warps if threads is None else threads
        generation = state.arrive(role, arriving, total, votes, self.op)
        if arrive_only:
            return None
        self._rounds[number] = (state, generation)
        return ThenWait(
            lambda: state.generation > generation,
            lambda: f"named barrier {number}: {state.arrived} of {state.threads} threads have arrived",
            lambda: role.clock.join(state.rounds[generation][2]),
            time=lambda: state.time,
        )

    def barrier_votes(self, number: int) -> tuple[int, int]:
        state, generation = self._rounds[number]
        return state.rounds[generation][:2]

    def cluster_arrive(self, order: str, active: np.ndarray) -> None:
        machine, role = self.machine, self.role
        lockstep = machine.simulation.program.num_ctas > 1
        ranks = range(self.rank, self.rank + 1) if lockstep else role_ranks(role)
        role.seen_phase[-1 - self.rank * lockstep] = machine.cluster_barrier.arrive(
            role, len(np.unique(self.warp[active])), ranks
        )

    def cluster_wait(self, active: np.ndarray) -> Wait | None:
        machine, role = self.machine, self.role
        key = -1 - self.rank * (machine.simulation.program.num_ctas > 1)
        if key not in role.seen_phase:
            machine.stop("arrivals", "barrier.cluster.wait without barrier.cluster.arrive before it", role, self.op)
        inner = machine.cluster_barrier.wait(role, role.seen_phase.pop(key))
        return ThenWait(inner.ready, inner.describe, lambda: machine.cluster_barrier.passed(role), time=inner.time)

    def fence(self, kind: str, active: np.ndarray) -> None:
        """Fence. Ordinary memory is in order here; only the asynchronous proxy and tcgen05 need their fences."""
        clock = self.role.clock
        if kind == "tcgen05.before_thread_sync":
            clock.before_sync |= clock.operations
        elif kind == "tcgen05.after_thread_sync":
            clock.after_sync |= clock.before_sync
        elif kind in ("proxy.async", "proxy.async.shared::cta", "proxy.async.shared::cluster"):
            clock.fence()
        elif not kind.startswith(IN_ORDER) and kind != "warp":
            raise NoMeaning(f"fence.{kind}")

    def grid_dependency(self, action: str) -> Wait | None:
        """Do nothing: launches are simulated one after the other."""
        return None

    def set_max_registers(self, direction: str, count: int) -> Wait | None:
        """Change the registers of a warpgroup. An increase waits until other warpgroups have released enough.

        A CTA's pool holds the registers of its launch. Their number is known only where the kernel fixes it
        (`maxnreg`), because with partitions the compiler moves registers itself. Otherwise only the budget of the
        whole launch is checked.
        """
        program = self.machine.simulation.program
        launched = program.module.attributes.get("ttg.maxnreg")
        if not isinstance(launched, int) or len(program.role_names) > 1:
            return None
        cta = self.machine.ctas[self.rank]
        warps = np.unique(self.warp).tolist()
        need = sum(32 * (count - cta.registers.get(warp, launched)) for warp in warps)
        if (need > 0) != (direction == "inc") and need:
            raise PtxFault(f"setmaxnreg.{direction} to {count} registers from {cta.registers.get(warps[0], launched)}")

        def take() -> None:
            cta.free_registers -= need
            cta.registers_time = max(cta.registers_time, self.role.time)
            cta.registers.update(dict.fromkeys(warps, count))

        if need <= 0:
            take()
            return None

        def describe() -> str:
            return f"{need} registers of the CTA's pool, which has {cta.free_registers}"

        return ThenWait(lambda: cta.free_registers >= need, describe, take, time=lambda: cta.registers_time)

    def sleep(self, nanoseconds: int) -> Wait:
        until = self.role.time + nanoseconds * CLOCK_GHZ
        return Wait(lambda: True, lambda: "nanosleep", time=lambda: until)

    def trap(self, active: np.ndarray) -> None:
        if active.any():
            raise Stop(
                Finding(
                    "trap",
                    f"{self.role.name} executed trap",
                    (Place(self.machine.where(self.role), "trap", self.op.location),),
                )
            )

    # ---- bulk copies

    def _targets(self, address: int, bar: int | None, multicast: int | None) -> list[tuple[int, int | None]]:
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

    def _aligned(self, value: int, what: str, to: int = 16) -> None:
        if value % to:
            self.machine.stop(
                "misaligned", f"{what} {value % SHARED_STRIDE}: a multiple of {to} is needed", self.role, self.op
            )

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
        machine = self.machine
        self._aligned(nbytes, "cp.async.bulk: the number of bytes")
        self._aligned(destination[1], "cp.async.bulk: the destination")
        self._aligned(source[1], "cp.async.bulk: the source")
        if nbytes == 0:
            return
        early: list[np.ndarray] = []

        def read(agent: Role | Async) -> np.ndarray:
            space, start = source
            return self._fetch(agent, ASYNC, space, np.arange(start, start + nbytes, 16), 16).reshape(-1)

        def write(operation: Role | Async, space: str, start: int, data: np.ndarray) -> None:
            if reduction is not None:
                name, format = reduction
                size = 2 if format.endswith("16") else int(format[1:]) // 8
                flat = np.arange(start, start + nbytes, size)
                old = self._fetch(operation, ASYNC, space, flat, size, atomic=True, write=True)
                words = np.ascontiguousarray(old).view(_WORD[size])[:, 0]
                data = np.ascontiguousarray(combined(name, format, words, data.view(_WORD[size]), None)).view(np.uint8)
            self._put(
                operation,
                ASYNC,
                space,
                np.arange(start, start + nbytes, 16),
                data.reshape(-1, 16),
                atomic=reduction is not None,
            )

        if source[0] == "global" and machine.simulation.schedule.reads_early():
            early.append(read(self.role))
        if destination[0] == "global":
            place = destination[1]
            target = Spans(np.array([place]), nbytes)
            start_bulk(
                self.role,
                self.op,
                "TMA store",
                nbytes,
                read,
                lambda data: write(self.role, "global", place, data),
                target,
            )
            return
        if source[0] == "global" and self.role.bulk_writes:
            machine.settled(self.role, Spans(np.array([source[1]]), nbytes), self.op, "TMA load")
        what = "TMA load" if source[0] == "global" else "bulk copy between CTAs"
        for place, bar in self._targets(destination[1], barrier, multicast):
            signalled = None if bar is None else machine.barriers.find(self.role, bar, self.op, "a copy signals it")
            phases: list[int] = []

            def effect(
                operation: Async, place: int = place, signalled: Any = signalled, phases: list[int] = phases
            ) -> None:
                write(operation, destination[0], place, early[0] if early else read(operation))
                if signalled is not None:
                    machine.barriers.deliver(operation, signalled, phases[0], nbytes)

            operation = machine.start(
                what, self.role, self.op, effect, unit="TMA", cost=tma_cycles(nbytes), latency=TMA_LATENCY
            )
            if signalled is not None:
                phases.append(machine.barriers.promise(operation, signalled))
            if barrier is None:
                self.role.bulk_open.append(operation)

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
        self._aligned(tensor_map, "a tensor map's address", 64)
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
        self._aligned(shared, f"a TMA {direction} of {tensor.name}: the shared address", 128)
        if direction == "load":
            if role.bulk_writes:
                self.machine.settled(role, box_spans(tensor, start, tensor.box), op, "TMA load")
            for place, bar in self._targets(shared, barrier, multicast):
                if bar is None:
                    raise PtxFault("a tensor load without an mbarrier")
                target = self._box(place, tensor)
                start_load(
                    role, op, [bar], target, lambda: box_words(role, op, tensor, start, tensor.box), target.map.total
                )
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
        return self._view("shared", base, AddressMap((places - places.min()).reshape(tensor.box), tensor.nbytes))

    def commit_bulk_group(self, active: np.ndarray) -> None:
        self.role.bulk_groups.append(self.role.bulk_open)
        self.role.bulk_open = []

    def wait_bulk_group(self, pending: int, read: bool, active: np.ndarray) -> Wait | None:
        return self._until(*over_but_for(self.role, pending, read))

    def _until(self, operations: list[Async], what: str) -> Wait | None:
        if not operations:
            return None
        return ThenWait(
            lambda: all(o.done for o in operations), lambda: f"{sum(not o.done for o in operations)} {what}",
            lambda: self.machine.acquire(self.role, operations), time=lambda: max(o.finish for o in operations),
        )  # fmt: skip

    def replace_tensor_map(self, space: str, address: int, field: str, ordinal: int, value: int) -> None:
        simulation = self.machine.simulation
        where, flat = self._where(space, np.array([address], np.int64), tensormaps.NBYTES, "tensormap.replace")
        self._aligned(address, "tensormap.replace at", tensormaps.NBYTES)
        if space == "shared":
            tensor = tensormaps.unpack(
                self._fetch(self.role, GENERIC, where, flat, tensormaps.NBYTES).tobytes(), "tensor"
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
            self._put(self.role, GENERIC, where, flat, np.frombuffer(tensormaps.pack(new), np.uint8)[None, :])

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
                self._fetch(operation, ASYNC, "shared", flat, nbytes)

        self._wgmma("wgmma", effect, WGMMA_LATENCY)
        return values

    def _wgmma(self, kind: str, effect: Callable[[Async], None], latency: float = 0.0) -> Async:
        return self.machine.start(
            kind,
            self.role,
            self.op,
            effect,
            queue=("wgmma", self.role.index),
            unit=f"tensor core {self.rank}",
            latency=latency,
        )

    def wgmma_fence(self) -> None:
        """Do nothing: registers are in order here."""

    def wgmma_commit(self) -> None:
        """Commit a group. It is complete when its last operation is, because they complete in order."""
        self.role.products.append(self._wgmma("wgmma group", lambda operation: None))

    def wgmma_wait(self, pending: int) -> Wait | None:
        role = self.role
        over = role.products[: max(0, len(role.products) - pending)]
        role.products = role.products[len(over) :]
        return self._until(over, "groups of wgmma")

    # ---- tcgen05

    def tcgen05_alloc(self, columns: int) -> Any:
        cta, role = self.machine.ctas[self.rank], self.role
        if columns not in (32, 64, 128, 256, 512):
            raise PtxFault(f"tcgen05.alloc of {columns} columns: a power of two from 32 to 512")
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

    def tcgen05_dealloc(self, address: int, columns: int) -> None:
        cta = self.machine.ctas[self.rank]
        known = cta.tensor_live.get(address)
        if known is None or known.size != columns * 4:
            held = ", ".join(f"{a.size // 4} columns at {start}" for start, a in cta.tensor_live.items()) or "nothing"
            self.machine.report(
                "tmem", f"tcgen05.dealloc of {columns} columns at {address}; {held} is allocated", self.role, self.op
            )
            return
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
                where, flat = self._where(space, self._window(space, addresses), nbytes, flying.kind)
                return self._fetch(flying, ASYNC, where, flat, nbytes).reshape(*addresses.shape, nbytes)

            def write(space: str, addresses: np.ndarray, data: np.ndarray) -> None:
                where, flat = self._where(space, self._window(space, addresses), data.shape[-1], flying.kind)
                self._put(flying, ASYNC, where, flat, data.reshape(-1, data.shape[-1]))

            operation.run(read, write)

        kind = "tcgen05.mma" if isinstance(operation, tcgen05.Product) else "tcgen05.cp"
        self._tcgen05(kind, effect, TCGEN05_LATENCY)

    def _window(self, space: str, addresses: np.ndarray) -> np.ndarray:
        """Return addresses relative to the start of the CTA's own shared memory, as in descriptors."""
        return (
            np.asarray(addresses).astype(np.int64) + (self.rank << 24) if space == "shared" else np.asarray(addresses)
        )

    def _tcgen05(self, kind: str, effect: Callable[[Async], None], latency: float = 0.0) -> Async:
        return self.machine.start(
            kind,
            self.role,
            self.op,
            effect,
            queue=("tcgen05", self.role.index),
            unit=f"tensor core {self.rank}",
            latency=latency,
        )

    def tcgen05_commit(self, barriers: list[int], thread: int) -> None:
        machine, role, op = self.machine, self.role, self.op

        def effect(operation: Async) -> None:
            clock = operation.clock.copy()
            clock.operations |= operation.bit
            clock.fenced_operations |= operation.bit
            for address in barriers:
                barrier = machine.barriers.find(role, address, op, "tcgen05.commit")
                if barrier is not None:
                    barrier.pending_time = max(barrier.pending_time, operation.finish)
                    machine.barriers.arrive(
                        role, barrier, 1, op, "arrives (tcgen05.commit)", clock, f"{role.name} (tcgen05.commit)"
                    )

        self._tcgen05("tcgen05.commit", effect)

    # ---- cluster launch control

    def clc_try_cancel(self, result: int, barrier: int, multicast: bool) -> None:
        machine, role = self.machine, self.role
        self._aligned(result, "clusterlaunchcontrol.try_cancel: the result")
        targets = self._targets(result, barrier, (1 << len(machine.ctas)) - 1 if multicast else None)
        bars = [machine.barriers.find(role, bar, self.op, "try_cancel") for _, bar in targets if bar is not None]

        def effect(operation: Async) -> None:
            answer = clc.encode_answer(machine.simulation.cancel_next())
            for (place, _), bar, phase in zip(targets, bars, phases):
                self._put(operation, ASYNC, "shared", np.array([place]), answer.reshape(1, 16))
                if bar is not None:
                    machine.barriers.deliver(operation, bar, phase, 16)

        operation = machine.start("try_cancel", role, self.op, effect, unit="CLC", latency=CLC_LATENCY)
        phases = [0 if bar is None else machine.barriers.promise(operation, bar) for bar in bars]


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


class PtxBarrier:
    """An mbarrier for PTX instructions. Without an initialised mbarrier, the use is reported and has no effect."""

    def __init__(self, threads: RoleThreads, address: int):
        self.threads, self.address = threads, address

    def _find(self, what: str) -> Any:
        return self.threads.machine.barriers.find(self.threads.role, self.address, self.threads.op, what)

    def init(self, count: int) -> None:
        self.threads.machine.barriers.init(self.threads.role, self.address, int(count), self.threads.op)

    def invalidate(self) -> None:
        self.threads.machine.barriers.invalidate(self.threads.role, self.address, self.threads.op)

    def arrive(self, count: int, remote: bool) -> None:
        found = self._find("arrives")
        if found is not None:
            self.threads.machine.barriers.arrive(self.threads.role, found, int(count), self.threads.op)

    def expect(self, nbytes: int) -> None:
        found = self._find(f"expects {nbytes} bytes")
        if found is not None:
            self.threads.machine.barriers.expect(self.threads.role, found, int(nbytes), self.threads.op)

    def complete(self, nbytes: int) -> None:
        found = self._find(f"completes {nbytes} bytes")
        if found is not None:
            self.threads.machine.barriers.complete_bytes(self.threads.role, found, int(nbytes), self.threads.op)

    def completed(self, parity: int) -> bool:
        found = self._find(f"tests parity {parity & 1}")
        if found is None:
            return True
        for watch in self.threads.role.watching:
            watch.looked[f"{found.name} (waiting for its phase of parity {parity & 1}: {found.state()})"] = None
        done = bool(found.completed(int(parity)))
        if done:
            self.threads.machine.barriers.passed(self.threads.role, found)
        return done

    def wait(self, parity: int, limit_ns: int | None) -> Wait | None:
        machine, role, op = self.threads.machine, self.threads.role, self.threads.op
        found = self._find(f"waits for parity {parity & 1}")
        if found is None or found.completed(int(parity)):
            return None
        inner = machine.barriers.wait_for(role, found, int(parity), op)
        if limit_ns is None:
            return ThenWait(
                inner.ready, inner.describe, lambda: None, barrier=found, parity=inner.parity, time=inner.time
            )
        # the timer completes last: a timeout expires only when nothing else can happen
        timer = machine.start(
            "timer", role, op, lambda operation: None, unit=f"timer of {role.name}", latency=limit_ns * CLOCK_GHZ
        )
        timer.gate = lambda: machine.idle_but_for(timer)

        def over() -> None:
            if timer in machine.flying:
                machine.flying.remove(timer)

        return ThenWait(
            lambda: found.completed(int(parity)) or timer.done,
            inner.describe,
            over,
            barrier=found,
            parity=inner.parity,
            time=lambda: found.time if found.completed(int(parity)) else timer.finish,
        )


class NamedBarrier:
    """One of a CTA's 16 barriers (PTX ISA "bar / barrier"). A round completes when its number of threads has arrived,
    in whole warps.
    """

    def __init__(self, number: int, roles: int):
        self.number, self.roles = number, roles
        self.generation = self.arrived = self.threads = self.votes = 0
        self.time = self.latest = 0.0
        self.gathering = Clock(roles)
        self.rounds: dict[int, tuple[int, int, Clock]] = {}  # votes, voters and released clock of the latest rounds

    def arrive(self, role: Role, count: int, threads: int, votes: int, op: Op) -> int:
        """Arrive with `count` threads. Return their round."""
        if threads % 32 or threads <= 0:
            role.machine.report(
                "arrivals",
                f"named barrier {self.number}: {threads} threads; a positive multiple of 32 is needed",
                role,
                op,
            )
        if self.arrived and threads != self.threads:
            message = (
                f"named barrier {self.number}: {role.name} expects {threads} threads, those before expected "
                f"{self.threads}"
            )
            role.machine.report("arrivals", message, role, op)
        self.threads = threads
        generation = self.generation
        self.gathering.join(role.release())
        self.latest = max(self.latest, role.time)
        self.arrived += count
        self.votes += votes
        if self.arrived > threads:
            role.machine.report(
                "arrivals",
                f"named barrier {self.number}: {self.arrived} threads have arrived, it is for {threads}",
                role,
                op,
            )
        if self.arrived >= threads:
            self.rounds[generation] = (self.votes, self.arrived, self.gathering)
            self.rounds.pop(generation - 8, None)
            self.generation += 1
            self.arrived = self.votes = 0
            self.gathering = Clock(self.roles)
            self.time = self.latest
        return generation
