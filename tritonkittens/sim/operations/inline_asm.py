# NOTE of the lead, 05:56 UTC, to the helper with /work/h_ptx.md: another helper (brief_ptx.md) is already writing all PTX meanings (inline_ptx/*.py, inline_ptx/_meaning.py,
# inline_ptx/_glue.py, sim/ptx.py). Do NOT write meanings or touch those files. Your task is now the MACHINE side: make class RoleThreads here implement the `Machine` protocol that
# inline_ptx/_meaning.py will state (it appears within minutes), incl. bulk/TMA/multicast, wgmma, tcgen05, clc, named barriers and votes; switch this module from sim/bootstrap to sim/ptx.py and delete
# sim/bootstrap; then task (2) of your tests (GPU test bodies in the simulator). Remove this note at the end.
"""Inline PTX in a kernel: operands to registers in the layouts' order, the block executed for the role's threads, results back; the machine under the threads."""
from __future__ import annotations

from typing import Any

import numpy as np

from tritonkittens.sim.bootstrap import meanings  # noqa: F401
from tritonkittens.sim.bootstrap.meaning import UnknownInstruction
from tritonkittens.sim.bootstrap.ptx import Assembly, execute, parse

from .. import numbers as numbers_module
from ..layouts import SHARED_STRIDE, registers
from ..machine import GENERIC, Role, Wait, poisoned
from ..numbers import decode, encode
from ..report import Finding, Place, Stop
from ..ttgir import Op, Pointer, Scalar, Tensor
from ..values import AddressMap, Allocation, View
from .control import role_ranks
from .global_memory import as_scalar, check_address, combine, outside, read_modify_write
from .registry import effect
from .tma import wait_bulk_groups

_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class RoleThreads:
    """`inline_ptx._meaning.Threads` for one role and one block of assembly."""

    numbers = numbers_module

    def __init__(self, role: Role, op: Op, count: int | None = None):
        self.role, self.op, self.machine = role, op, role.machine
        self.count = 32 * role.warps if count is None else count
        self.tid = np.arange(self.count, dtype=np.uint64) % np.uint64(32 * role.warps) + np.uint64(32 * role.start_warp)

    def count_step(self) -> None:
        simulation = self.machine.simulation
        simulation.steps += 1
        self.role.steps += 1
        if simulation.steps > simulation.step_limit:
            simulation.endless(self.machine, self.role, self.op)

    def special(self, name: str) -> Any:
        machine, simulation = self.machine, self.machine.simulation
        cta = machine.ctas[self.role.rank]
        size = len(machine.ctas)
        table: dict[str, Any] = {
            "%tid.x": self.tid, "%tid": self.tid, "%tid.y": 0, "%tid.z": 0, "%laneid": self.tid % np.uint64(32), "%warpid": self.tid // np.uint64(32),
            "%ntid.x": 32 * simulation.program.total_warps, "%ntid.y": 1, "%ntid.z": 1, "%ctaid.x": cta.program[0], "%ctaid.y": cta.program[1], "%ctaid.z": cta.program[2],
            "%nctaid.x": simulation.grid[0], "%nctaid.y": simulation.grid[1], "%nctaid.z": simulation.grid[2], "%cluster_ctarank": self.role.rank, "%cluster_nctarank": size,
            "%cluster_ctaid.x": self.role.rank, "%cluster_ctaid.y": 0, "%cluster_ctaid.z": 0, "%cluster_nctaid.x": size, "%cluster_nctaid.y": 1, "%cluster_nctaid.z": 1,
            "%clusterid.x": cta.program[0] // size, "%clusterid.y": cta.program[1], "%clusterid.z": cta.program[2],
            "%nclusterid.x": -(-simulation.grid[0] // size), "%nclusterid.y": simulation.grid[1], "%nclusterid.z": simulation.grid[2],
            "%clock": int(self.role.time) & 0xFFFFFFFF, "%clock64": int(self.role.time), "%clock_hi": int(self.role.time) >> 32, "%globaltimer": int(self.role.time / 1.7),
            "%globaltimer_lo": int(self.role.time / 1.7) & 0xFFFFFFFF, "%smid": machine.index % 132, "%nsmid": 132, "%warpsize": 32, "WARP_SZ": 32, "%is_explicit_cluster": int(size > 1),
            "%dynamic_smem_size": simulation.program.shared_bytes, "%total_smem_size": cta.shared.size, "%gridid": 1, "%nwarpid": 64,
        }  # fmt: skip
        if name.startswith("%lanemask_"):
            lane = (self.tid % np.uint64(32)).astype(np.uint64)
            one = np.uint64(1)
            eq = one << lane
            masks = {"eq": eq, "lt": eq - one, "le": (eq << one) - one}
            masks["ge"] = ~masks["lt"] & np.uint64(0xFFFFFFFF)
            masks["gt"] = ~masks["le"] & np.uint64(0xFFFFFFFF)
            return masks[name[10:]]
        if name not in table:
            raise UnknownInstruction(f"the simulator knows no special register {name}")
        return table[name]

    def static(self, assembly: Assembly, name: str) -> int:
        """Address of a .shared variable that a block declares: behind the kernel's own shared memory, once for each CTA."""
        cta = self.machine.ctas[self.role.rank]
        key = f"{name}@{id(assembly)}"
        known = next((a for a in cta.allocations["shared"] if a.name == key), None)
        if known is None:
            align, size = assembly.statics[name]
            start = max(cta.static_top, self.machine.simulation.program.shared_bytes)
            start += -start % align
            cta.static_top = start + size
            if cta.shared.size < start + size:
                grown = type(cta.shared)(start + size + 1024)
                grown.bytes[: cta.shared.size], grown.written[: cta.shared.size] = cta.shared.bytes, cta.shared.written
                grown.shadow.segments[: 0] = []
                old = cta.shared.shadow
                old.segments[-1].end = grown.size if old.segments[-1].write is None and not old.segments[-1].reads else old.segments[-1].end
                if old.segments[-1].end < grown.size:
                    fresh = type(old)(grown.size).segments[0]
                    fresh.start = old.segments[-1].end
                    old.segments.append(fresh)
                    old.starts.append(fresh.start)
                grown.shadow = old
                cta.shared = grown
            known = Allocation(key, self.op, start, size)
            cta.allocations["shared"].append(known)
        return (self.role.rank << 24) + known.base

    # ---- memory

    def view(self, address: int, nbytes: int, element: str = "i8", shape: tuple[int, ...] | None = None) -> View:
        """Bytes of shared memory from an address on."""
        size = Scalar(element).nbytes
        offsets = np.arange(nbytes // size, dtype=np.int64) * size
        rank = address // SHARED_STRIDE
        allocations = self.machine.ctas[rank].allocations["shared"] if rank < len(self.machine.ctas) else []
        inside = address % SHARED_STRIDE
        holder = next((a for a in allocations[::-1] if a.base <= inside < a.base + a.size), None) or Allocation("shared memory", self.op, 0, 1 << 24)
        kind = Tensor(shape or (nbytes // size,), Scalar(element), None)
        return View("shared", address, AddressMap(offsets.reshape(shape or offsets.shape), size), kind, holder)

    def scattered(self, addresses: np.ndarray, nbytes: int) -> list[View]:
        """One view for each CTA that the addresses lie in."""
        out = []
        for rank in np.unique(addresses // SHARED_STRIDE):
            here = addresses[addresses // SHARED_STRIDE == rank].astype(np.int64)
            low = int(here.min())
            base = self.view(low, nbytes)
            out.append(View("shared", low, AddressMap(here - low, nbytes), base.type, base.allocation))
        return out

    def load(self, space: str, addresses: np.ndarray, nbytes: int, active: np.ndarray) -> np.ndarray:
        out = np.zeros(self.count, np.uint64)
        chosen = addresses[active].astype(np.int64)
        check_address(self.role, self.op, chosen, nbytes)
        if space == "shared":
            where = np.flatnonzero(active)
            for view in self.scattered(chosen, nbytes):
                self.machine.touch(self.role, view, False, GENERIC, self.op)
                self.machine.check_written(self.role, view, self.op)
                here = chosen // SHARED_STRIDE == view.base // SHARED_STRIDE
                out[where[here]] = self.machine.read(view).astype(np.uint64)
            return out
        words, bad = self.machine.simulation.memory.gather(chosen, nbytes)
        if bad is not None:
            outside(self.role, self.op, bad, nbytes, "a load")
        out[active] = words.astype(np.uint64)
        return out

    def store(self, space: str, addresses: np.ndarray, words: np.ndarray, nbytes: int, active: np.ndarray) -> None:
        chosen = addresses[active].astype(np.int64)
        data = words[active].astype(_WORD[nbytes])
        check_address(self.role, self.op, chosen, nbytes)
        if space == "shared":
            for view in self.scattered(chosen, nbytes):
                self.machine.touch(self.role, view, True, GENERIC, self.op)
                self.machine.write(view, data[chosen // SHARED_STRIDE == view.base // SHARED_STRIDE])
            return
        bad = self.machine.simulation.memory.scatter(chosen, data)
        if bad is not None:
            outside(self.role, self.op, bad, nbytes, "a store")

    def atomic(self, space: str, operation: str, element: str, addresses: np.ndarray, words: np.ndarray, active: np.ndarray) -> np.ndarray:
        kind = Scalar(element)
        new = decode(element, words[active].astype(_WORD[kind.nbytes]))
        chosen = addresses[active].astype(np.int64)
        out = np.zeros(self.count, np.uint64)
        if space == "global":
            old = read_modify_write(self.role, self.op, chosen, kind, lambda at, before: combine(operation, kind, before, new[at]))
            out[active] = encode(element, old).astype(np.uint64)
            return out
        where = np.flatnonzero(active)
        for k, address in enumerate(chosen):
            view = self.view(int(address), kind.nbytes, element)
            self.machine.touch(self.role, view, True, GENERIC, self.op, atomic=True)
            bits = self.machine.read(view)
            out[where[k]] = int(bits[0])
            self.machine.write(view, encode(element, combine(operation, kind, decode(element, bits), new[k : k + 1])))
        return out

    # ---- synchronisation

    def barrier(self, address: int, what: str) -> BarrierHandle | None:
        found = self.machine.barrier(self.role, int(address), self.op, what)
        return None if found is None else BarrierHandle(self, found)

    def init_barrier(self, address: int, count: int) -> None:
        self.machine.init_barrier(self.role, int(address), int(count), self.op)

    def invalidate_barrier(self, address: int) -> None:
        self.machine.invalidate_barrier(self.role, int(address), self.op)

    def named_barrier(self, number: int, threads: int, waits: bool) -> Any:
        """bar.sync and bar.arrive: the barrier opens when so many threads have come (PTX ISA "bar / barrier")."""
        machine, role = self.machine, self.role
        key = (role.rank, number)
        state = machine.named.get(key)
        if state is None:
            state = machine.named[key] = NamedBarrier(number, role)
        generation = state.arrive(role, 32 * role.warps, threads, self.op)
        if waits:
            yield Wait(
                lambda: state.generation > generation, lambda: f"named barrier {number}: {state.arrived} of {state.threads} threads have come", time=lambda: state.time
            )
            role.clock.join(state.released)

    def cluster_arrive(self) -> None:
        barrier = self.machine.cluster_barrier
        self.role.seen_phase[-1] = barrier.arrive(self.role, self.role.warps, role_ranks(self.role))

    def cluster_wait(self) -> Any:
        if -1 not in self.role.seen_phase:
            self.machine.stop("arrivals", "barrier.cluster.wait without barrier.cluster.arrive before it", self.role, self.op)
        yield self.machine.cluster_barrier.wait(self.role, self.role.seen_phase.pop(-1))
        self.machine.cluster_barrier.passed(self.role)

    def fence(self, kind: str) -> None:
        if kind == "async":
            self.role.clock.fence()

    def commit_bulk_group(self) -> None:
        self.role.bulk_groups.append(self.role.bulk_open)
        self.role.bulk_open = []

    def wait_bulk_group(self, pending: int) -> Any:
        yield from wait_bulk_groups(self.role, pending)

    def trap(self) -> None:
        raise Stop(Finding("trap", f"{self.role.name} executed trap", (Place(self.machine.where(self.role), "trap", self.op.location),)))


class BarrierHandle:
    """An mbarrier as PTX instructions use it."""

    def __init__(self, threads: RoleThreads, barrier: Any):
        self.threads, self.inner = threads, barrier

    def arrive(self, count: int, what: str = "arrives") -> None:
        self.threads.machine.arrive(self.threads.role, self.inner, int(count), self.threads.op, what)

    def expect(self, nbytes: int) -> None:
        self.threads.machine.expect(self.threads.role, self.inner, int(nbytes), self.threads.op)

    def completed(self, parity: int) -> bool:
        done = self.inner.completed(int(parity))
        if done:
            self.threads.machine.passed(self.threads.role, self.inner)
        return bool(done)

    def wait(self, parity: int) -> Any:
        yield self.threads.machine.wait_for(self.threads.role, self.inner, int(parity), self.threads.op)
        self.threads.machine.passed(self.threads.role, self.inner)

    @property
    def phase(self) -> int:
        return int(self.inner.phase)


class NamedBarrier:
    def __init__(self, number: int, role: Role):
        from ..clocks import Clock

        self.number, self.roles = number, role.machine.number_of_roles
        self.generation = 0
        self.arrived = 0
        self.threads = 0
        self.time = 0.0
        self.gathering, self.released = Clock(self.roles), Clock(self.roles)

    def arrive(self, role: Role, count: int, threads: int, op: Op) -> int:
        from ..clocks import Clock

        if self.arrived and threads != self.threads:
            role.machine.report("arrivals", f"named barrier {self.number}: {role.name} expects {threads} threads, those before expected {self.threads}", role, op)
        self.threads = threads
        generation = self.generation
        self.gathering.join(role.release())
        self.time = max(self.time, role.time)
        self.arrived += count
        if self.arrived > threads:
            role.machine.report("arrivals", f"named barrier {self.number}: {self.arrived} threads have come, it is for {threads}", role, op)
        if self.arrived >= threads:
            self.generation += 1
            self.arrived = 0
            self.released, self.gathering = self.gathering, Clock(self.roles)
        return generation


# ---------------------------------------------------------------- the operations


def bits_of(value: Any, kind: Any) -> np.ndarray:
    """A value's bits as zero-extended words."""
    element = kind.element if isinstance(kind, Tensor) else kind
    name = "i64" if isinstance(element, Pointer) else element.name
    return encode(name, np.asarray(value)).astype(np.uint64)


def constraints_of(text: str) -> tuple[list[str], list[str]]:
    """LLVM's constraints: outputs (without "="), inputs; clobbers are dropped."""
    items = [c.strip() for c in text.split(",") if c.strip() and not c.strip().startswith("~")]
    return [c.lstrip("=&") for c in items if c.startswith("=")], [c for c in items if not c.startswith("=")]


def bind(outputs: int, inputs: list[str], columns: list[np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Input registers by name; an input that is tied to an output starts that output's register."""
    values: dict[str, np.ndarray] = {}
    for k, column in enumerate(columns):
        values[f"${outputs + k}"] = column
        if inputs[k].isdigit():
            values[f"${int(inputs[k])}"] = column.copy()
    return values, {}


def run_block(role: Role, op: Op, threads: RoleThreads, values: dict[str, np.ndarray]) -> Any:
    try:
        yield from execute(parse(op.attributes["asm_string"]), threads, values)
    except UnknownInstruction as error:
        raise Stop(Finding("unknown", str(error), (Place(role.machine.where(role), "inline PTX", op.location),))) from None


def shaped(column: np.ndarray, kind: Any) -> Any:
    element = kind.element if isinstance(kind, Tensor) else kind
    name = "i64" if isinstance(element, Pointer) else element.name
    nbytes = Scalar(name).nbytes
    return decode(name, column.astype(_WORD[nbytes]))


@effect("ttg.inline_asm")
def inline_asm(role: Role, op: Op, *operands: Any) -> Any:
    """Threadwise: every thread executes the block once; a tile is its registers, in the layout's order."""
    outputs, inputs = constraints_of(op.attributes["constraints"])
    threads = RoleThreads(role, op)
    if poison := poisoned(*operands):
        role.machine.stop("uninitialized", "inline PTX gets a value that was never computed", role, op, computed=str(poison.op.location))
    columns: list[np.ndarray] = []
    for value, kind in zip(operands, op.operand_types):
        if isinstance(value, View):
            address = value.base + int(value.map.offsets.reshape(-1)[0]) if value.space == "shared" else tensor_address(value)
            columns.append(np.full(threads.count, address, np.uint64))
        elif isinstance(kind, Tensor):
            assert kind.layout is not None
            index = registers(kind.layout, kind.shape, role.warps)
            flat = bits_of(np.ascontiguousarray(value), kind).reshape(-1)
            columns.extend(flat[index[: threads.count].T])
        else:
            columns.append(np.full(threads.count, int(bits_of(value, kind)), np.uint64))
    values, _ = bind(len(outputs), inputs, columns)
    yield from run_block(role, op, threads, values)
    results: list[Any] = []
    at = 0
    for kind in op.result_types:
        if isinstance(kind, Tensor):
            assert kind.layout is not None
            index = registers(kind.layout, kind.shape, role.warps)[: threads.count]
            number = shaped(np.stack([values[f"${at + k}"] for k in range(index.shape[1])], axis=1), kind)
            out = np.zeros(int(np.prod(kind.shape)), number.dtype)
            out[index] = number
            results.append(out.reshape(kind.shape))
            at += index.shape[1]
        else:
            results.append(scalar_result(shaped(values[f"${at}"], kind)[0], kind))
            at += 1
    return tuple(results) if len(results) != 1 else results[0]


def scalar_result(value: Any, kind: Any) -> Any:
    """The value of the first thread: scalars count as uniform."""
    return int(value) if isinstance(kind, Pointer) else as_scalar(value, kind)


def tensor_address(view: View) -> int:
    """Lane in bits 16 and up, column below (PTX ISA "Tensor Memory Addressing")."""
    inside = (view.base + int(view.map.offsets.reshape(-1)[0])) % SHARED_STRIDE
    return (inside // 2048) << 16 | (inside % 2048) // 4


@effect("tt.elementwise_inline_asm")
def elementwise(role: Role, op: Op, *operands: Any) -> Any:
    """The block once for every `packed_element` elements; elements of fewer than 32 bits share 32-bit registers."""
    outputs, inputs = constraints_of(op.attributes["constraints"])
    pack = op.attributes.get("packed_element", 1)
    tile = next((k for k in (*op.result_types, *op.operand_types) if isinstance(k, Tensor)), None)
    if tile is None:
        threads = RoleThreads(role, op)
        columns = [np.full(threads.count, int(bits_of(v, k)), np.uint64) for v, k in zip(operands, op.operand_types)]
        values, _ = bind(len(outputs), inputs, columns)
        yield from run_block(role, op, threads, values)
        scalars = [scalar_result(shaped(values[f"${k}"], kind)[0], kind) for k, kind in enumerate(op.result_types)]
        return tuple(scalars) if len(scalars) != 1 else scalars[0]
    if tile.layout is not None:
        index = registers(tile.layout, tile.shape, role.warps)
        index = index[: 32 * role.warps]
        lanes = index.shape[0]
        if index.shape[1] % pack:
            index = np.repeat(index, pack, axis=1)  # the compiler repeats elements to fill the pack
    else:
        index, lanes = np.arange(int(np.prod(tile.shape))).reshape(1, -1), 1
    groups = index.reshape(-1, pack)
    threads = RoleThreads(role, op, len(groups))
    per_lane = len(groups) // lanes
    threads.tid = np.repeat(np.arange(lanes, dtype=np.uint64) + np.uint64(32 * role.start_warp), per_lane)
    columns = []
    for value, kind in zip(operands, op.operand_types):
        if isinstance(kind, Tensor):
            flat = bits_of(np.ascontiguousarray(value), kind).reshape(-1)[groups]
            columns.extend(packed_registers(flat, kind.element.bits))
        else:
            columns.append(np.full(threads.count, int(bits_of(value, kind)), np.uint64))
    values, _ = bind(len(outputs), inputs, columns)
    yield from run_block(role, op, threads, values)
    results: list[Any] = []
    at = 0
    for kind in op.result_types:
        assert isinstance(kind, Tensor)
        bits = max(kind.element.bits, 8)
        each = max(1, min(pack, 32 // bits))
        number = -(-pack // each)
        words = np.stack([values[f"${at + k}"] for k in range(number)], axis=1)
        at += number
        if each > 1:
            split = [(words >> np.uint64(bits * k)) & np.uint64((1 << bits) - 1) for k in range(each)]
            words = np.stack(split, axis=2).reshape(len(groups), -1)[:, :pack]
        decoded = shaped(words, kind)
        out = np.zeros(int(np.prod(kind.shape)), decoded.dtype)
        out[groups] = decoded
        results.append(out.reshape(kind.shape))
    return tuple(results) if len(results) != 1 else results[0]


def packed_registers(words: np.ndarray, bits: int) -> list[np.ndarray]:
    """(groups, pack) elements as registers: as many to 32 bits as fit."""
    bits = max(bits, 8)
    pack = words.shape[1]
    each = max(1, min(pack, 32 // bits))
    out = []
    for start in range(0, pack, each):
        register = np.zeros(len(words), np.uint64)
        for k in range(each):
            if start + k < pack:
                register |= words[:, start + k] << np.uint64(bits * k)
        out.append(register)
    return out
