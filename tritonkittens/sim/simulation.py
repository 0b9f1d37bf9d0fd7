"""One launch: clusters in some order, each a machine; the interpreter of roles; the findings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tritonkittens.arch import TENSOR_COLUMNS, chip_of
from tritonkittens.inline_ptx.tensormap import PARAMETER_WINDOW
from tritonkittens.launch import hardware_box

from . import divergence, tensormaps
from .agents import Async, Role, Wait, needs_wait, used_in_flight
from .deadlock import deadlock
from .global_order import Launches
from .machine import Machine
from .memory import Global
from .operations import EFFECTS
from .program import CONTROL_KIND, EFFECT_KIND, GENERATOR_KIND, PURE_KIND, UNKNOWN_KIND, VIEW_KIND, Program, Step
from .report import Finding, Place, SimulationError, Stop, unknown_operation
from .residency import Residency
from .schedule import Schedule
from .spinning import resting, turned
from .ttgir import Op, Pointer, Tensor
from .values import InFlight, Poison, TensorMap

STEP_LIMIT = 20_000_000  # operations of one launch
# steps of roles after which an operation in flight completes in every schedule, because a polling role never blocks
PATIENCE = 2_000
# operations of one cluster before another may run, because clusters may wait for each other through global memory
SLICE = 4_000
TOGETHER = 8  # clusters that start together where a schedule interleaves them
MAX_FINDINGS = 25
FIRST_THREAD = {"tt.store"}  # operations on scalars that the compiler assigns to one thread
MAX_WARPS = 32


@dataclass(frozen=True)
class Grid:
    """The CTAs of a launch and the device that runs them.

    Args:
        programs: along x, y, z.
        cluster: CTAs of a cluster that are programs of their own (Triton's `num_ctas` is in the program).
        multiprocessors: multiprocessors of the device, which bound the resident CTAs. None is no limit.
    """

    programs: tuple[int, int, int]
    cluster: int = 1
    multiprocessors: int | None = None


class Simulation:
    """One run of a program over a grid.

    Args:
        arguments: values of the kernel's parameters in order.
        memory: the tensors that the kernel may access.
        launches: those before it on the device; None without any.
        early: programmatic dependent launch, which may start before the previous launch ends.
    """

    def __init__(
        self,
        program: Program,
        grid: Grid,
        arguments: Sequence[Any],
        memory: Global,
        *,
        schedule: Schedule | None = None,
        step_limit: int = STEP_LIMIT,
        recorder: Any = None,
        launches: Launches | None = None,
        early: bool = False,
    ):
        self.program, self.grid, self.arguments, self.memory = program, grid.programs, list(arguments), memory
        memory.discovers = memory.discovers or any(makes_pointers(op) for op in program.module.walk())
        self.cluster = grid.cluster
        self.launches = launches or Launches()
        self.launch_order, self.global_order = self.launches.next(memory, early)
        self.schedule = schedule or Schedule()
        self.step_limit, self.recorder = step_limit, recorder
        self.tensor_maps: dict[int, TensorMap] = {}  # tensor maps of kernel parameters, by their address
        self.findings: list[Finding] = []
        self.keys: set[Any] = set()
        self.roles_per_cta = len(program.role_names)
        self.steps = self.actions = 0
        self.time = 0.0
        self.now = 0.0  # modelled time of the role that ran last
        self.residency = Residency.of(program, grid.cluster, grid.multiprocessors)
        self.reachable: dict[frozenset[int], list[tuple[int, int]]] = {}
        self.scratch_blocks: dict[Any, np.ndarray] = {}
        self.waiting: list[list[tuple[int, int, int]]] = []
        self.finished: list[Machine] = []

    # ---- findings

    def found(self, finding: Finding) -> None:
        if finding.key in self.keys:
            return
        self.keys.add(finding.key)
        self.findings.append(finding)
        if len(self.findings) >= MAX_FINDINGS:
            raise Stop(finding)

    def tensor_map(self, address: int) -> TensorMap | None:
        """Return the tensor map at an address: one that was created there, or one whose bytes lie there."""
        known = self.tensor_maps.get(address)
        if known is None and address >= PARAMETER_WINDOW:
            whole = self.arguments[(address - PARAMETER_WINDOW) // tensormaps.NBYTES]
            if isinstance(whole, TensorMap) and whole.spec is not None:
                known = self.tensor_maps[address] = replace(
                    whole, box=hardware_box(whole.spec, whole.nbytes), swizzle=whole.spec.swizzle
                )
            return known
        found = None if known is not None else self.memory.find(address)
        if found is None or address + tensormaps.NBYTES > found[0] + found[1]:
            return known
        made = tensormaps.unpack(found[2][address - found[0] :][: tensormaps.NBYTES].tobytes(), "")
        if made is not None:
            made.name = f"the tensor at {self.memory.name(made.address)}"
        return made

    def scratch(self, role: Role, nbytes: int, alignment: int, op: Op) -> int:
        """Return global scratch memory of the compiler for one program."""
        key = (id(role.machine), role.rank, id(op))
        if key not in self.scratch_blocks:
            block: np.ndarray = np.zeros(nbytes + alignment, np.uint8)
            self.scratch_blocks[key] = block
            start = block.ctypes.data + -block.ctypes.data % alignment
            self.memory.add(start, nbytes, "scratch of the compiler", block)
        block = self.scratch_blocks[key]
        return int(block.ctypes.data + -block.ctypes.data % alignment)

    def within(self, op: Op) -> list[tuple[int, int]] | None:
        """Return (start, end) of the tensors that an access may reach, those of the pointers from which its address
        comes. None where these are not known.
        """
        parameters = self.program.origins.get(id(op))
        if parameters is None:
            return None
        if parameters not in self.reachable:
            found = [self.memory.find(self.arguments[i]) for i in parameters if isinstance(self.arguments[i], int)]
            self.reachable[parameters] = [(start, start + size) for start, size, _ in filter(None, found)]
        return self.reachable[parameters]

    # ---- the grid

    def clusters(self) -> list[list[tuple[int, int, int]]]:
        """Return the program ids of each cluster's CTAs."""
        x, y, z = self.grid
        programs = [(i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x))]
        if self.program.num_ctas > 1:
            return [[p] * self.program.num_ctas for p in programs]
        size = self.cluster
        return [programs[i : i + size] for i in range(0, len(programs), size)]

    def cancel_next(self) -> tuple[int, int, int] | None:
        """Cancel the next cluster that has not started (cluster launch control). Return its first program id."""
        return self.waiting.pop(0)[0] if self.waiting else None

    def check_budgets(self) -> None:
        program = self.program
        op = program.module.kernel

        def over(message: str) -> None:
            self.found(Finding("budget", message, (Place(program.name, "kernel", op.location),)))

        limit = chip_of(program.arch).shared_per_block
        if program.shared_bytes > limit:
            over(f"{program.shared_bytes} bytes of shared memory; a block on sm_{program.arch} has {limit}")
        if program.tensor_columns > TENSOR_COLUMNS:
            over(f"{program.tensor_columns} columns of tensor memory; there are {TENSOR_COLUMNS}")
        if program.total_warps > MAX_WARPS:
            over(f"{program.total_warps} warps; a block has at most {MAX_WARPS}")
        for other in program.module.walk():
            if other.name == "ttg.warp_specialize" and "actualRegisters" in other.attributes:
                registers = other.attributes["actualRegisters"]
                sizes = [program.num_warps, *other.attributes.get("partitionNumWarps", ())]
                total = sum(r * 32 * w for r, w in zip(registers, sizes))
                if total > 65536:
                    over(f"the roles request {total} registers (setmaxnreg); a multiprocessor has 65536")

    def run(self) -> None:
        """Run to the end. Findings are collected in `findings`; none is raised."""
        with np.errstate(all="ignore"):
            try:
                self.check_budgets()
                self._run()
            except Stop as stop:
                if stop.finding.key not in self.keys:
                    self.keys.add(stop.finding.key)
                    self.findings.append(stop.finding)
            self.launches.ran(self)

    def _run(self) -> None:
        clusters = self.clusters()
        room = min(self.residency.clusters, len(clusters)) or 1
        # the hardware starts clusters beyond the resident ones in order
        order = sorted(self.schedule.cluster_order(len(clusters)), key=lambda i: i // room)
        self.waiting = [clusters[i] for i in order]
        resident: list[Machine] = []
        number = 0
        idle: set[int] = set()  # resident clusters in which nothing could happen since the last action
        while self.waiting or resident:
            stuck = len(idle) == len(resident)
            if stuck and resident and (not self.waiting or len(resident) == room):
                raise deadlock(self, resident)
            if self.waiting and len(resident) < room and (stuck or self.makes_room(resident)):
                machine = self.start(number, self.waiting.pop(0))
                number += 1
                resident.append(machine)
                for other in resident:
                    other.steps = 0
                idle = set()
                continue
            turns = list(resident)
            if self.schedule.interleaves and len(resident) > 1:
                turns = [self.schedule.next_cluster([m for m in resident if m.index not in idle])]
            for machine in turns:
                before = self.actions
                if self.advance(machine, SLICE if self.waiting or len(resident) > 1 else None):
                    resident.remove(machine)
                    self.end(machine)
                    idle = set()
                elif self.actions == before:
                    idle.add(machine.index)
                else:
                    idle = set()

    def makes_room(self, resident: list[Machine]) -> bool:
        """Whether a further cluster starts beside those that can go on."""
        if self.schedule.interleaves:
            return len(resident) < TOGETHER
        return all(m.steps >= SLICE for m in resident)

    def start(self, index: int, programs: list[tuple[int, int, int]]) -> Machine:
        x, y, z = programs[0]
        name = f"CTA ({x}, {y}, {z})" if len(programs) == 1 else f"cluster of ({x}, {y}, {z})"
        machine = Machine(self, index, programs, name)
        kernel = self.program.module.kernel
        entry = kernel.regions[0].blocks[0]
        lockstep = self.program.num_ctas > 1
        for rank in range(1 if lockstep else len(programs)):
            environment: list[Any] = [None] * self.program.module.number_of_values
            for slot, value in zip(entry.arguments, self.arguments, strict=True):
                environment[slot] = value
            role = Role(
                machine,
                rank,
                rank * self.roles_per_cta,
                self.program.role_names[0],
                self.program.num_warps,
                0,
                environment,
                entry,
            )
            if self.program.module.attributes.get("ttng.two-ctas") and self.program.uses_tensor_memory:
                role.meet()  # before the pairs allocate tensor memory
            machine.roles.append(role)
        return machine

    def reported(self, op: Op) -> bool:
        """Whether a finding names the operation."""
        return any(place.location == op.location for finding in self.findings for place in finding.places)

    def end(self, machine: Machine) -> None:
        """Check a cluster whose roles have ended for work in flight."""
        self.time = max(self.time, machine.time, *(r.time for r in machine.roles))
        for operation in machine.flying:
            if needs_wait(operation.kind):
                message = f"a {operation.kind} is in flight when its CTA ends: no role waits for it"
                machine.report("unfinished", message, operation.role, operation.op, operation.kind)
        known = 0
        for role in machine.roles:
            for clock in role.clocks.values():
                known |= clock.operations
        for bits, role, op, kind in machine.completed:
            if known & bits != bits and not self.reported(op):
                message = f"no role waits for a {kind}: it may still be in flight when its CTA ends"
                machine.report("unfinished", message, role, op, kind)
        while machine.flying:
            ready = [o for o in machine.flying if o.can_complete()]
            if not ready:
                break
            machine.complete(ready[0])
        for barrier in machine.barriers.values():
            if barrier.tx < 0:
                op = barrier.init_op
                expects = tuple(
                    Place(who, what, o.location) for who, (what, o) in barrier.history.items() if "bytes" in what
                )
                self.found(
                    Finding(
                        "bytes",
                        f"{barrier.name}: at the end {-barrier.tx} bytes more were delivered than expected",
                        (*expects, Place(machine.name, "mbarrier.init", op.location)),
                        {"buffer": barrier.name},
                    )
                )
        if len(machine.ctas) > 1:
            machine.check_last_accesses(known)
        for cta in machine.ctas:
            for allocation in cta.tensor_live.values():
                place = Place(machine.name, "tcgen05.alloc", allocation.op.location)
                self.found(
                    Finding("tmem", f"{allocation.name}: tensor memory is not released when the CTA ends", (place,))
                )
        machine.release_memory()
        self.finished.append(machine)

    # ---- one machine

    def advance(self, machine: Machine, budget: int | None) -> bool:
        """Run a cluster until it ends (True), or until other clusters should run (False): after `budget` operations,
        or after an access of global memory where the schedule interleaves clusters.
        """
        schedule, order = self.schedule, self.global_order
        while True:
            roles = [r for r in machine.roles if r.ready]
            if not roles and all(r.done for r in machine.roles):
                return True
            operations = [o for o in machine.flying if o.can_complete()]
            if not roles and not operations:
                if resting(machine):
                    return False
                if divergence.drift(self, machine):
                    continue
                raise deadlock(self, [machine])
            agent = (
                operations[0]
                if operations and machine.unanswered > PATIENCE
                else schedule.choose(machine, roles, operations)
            )
            self.actions += 1
            order.touched = False
            machine.unanswered = 0 if isinstance(agent, Async) else machine.unanswered + 1
            if isinstance(agent, Async):
                self.memory.watching = []
                machine.complete(agent)
            else:
                before = agent.steps
                self.step(agent)
                machine.steps += agent.steps - before
            if budget is not None and (
                machine.steps >= budget or (order.touched and schedule.interleaves and schedule.switches())
            ):
                return False

    def step(self, role: Role) -> None:
        """Run a role up to and including its next operation with visible effects."""
        machine = role.machine
        self.memory.watching = role.watching
        if role.wait is not None:
            if role.wait.time is not None:
                role.time = max(role.time, role.wait.time())
            if self.recorder is not None:
                self.recorder.waited(machine, role)
            role.wait = None
            if role.pending is not None and not role.looks:
                machine.version += 1
            if self.resume(role):
                return
        self._run_on(role)
        self.now = role.time

    def _run_on(self, role: Role) -> None:
        machine = role.machine
        environment = role.environment
        block, steps = role.block, self.program.block(role.block, role.warps)
        while not role.done:
            if role.block is not block:
                block, steps = role.block, self.program.block(role.block, role.warps)
            step = steps[role.at]
            op = step.op
            role.op = op
            if role.mask is not None and divergence.parks(role, op, step.kind in (EFFECT_KIND, GENERATOR_KIND)):
                return
            role.steps += 1
            self.steps += 1
            if self.steps > self.step_limit:
                self.endless(machine, role, op)
            if step.cost.cycles:
                self.spend(machine, role, step)
            kind = step.kind
            if kind == CONTROL_KIND:
                if step.function(self, role, op):  # type: ignore[misc]
                    return
                environment = role.environment
                continue
            role.at += 1
            values = [environment[i] for i in op.operands]
            if kind in (EFFECT_KIND, GENERATOR_KIND) and not step.looks:
                machine.version += 1
            try:
                if kind == PURE_KIND:
                    result = step.function(op, *values)  # type: ignore[misc]
                elif kind in (VIEW_KIND, EFFECT_KIND):
                    result = step.function(role, op, *values)  # type: ignore[misc]
                elif kind == GENERATOR_KIND:
                    role.pending_barrier = step.meets
                    role.pending = step.function(role, op, *values)  # type: ignore[misc]
                    role.pending_results, role.looks = op.results, step.looks
                    self.resume(role)
                    return
                else:
                    assert kind == UNKNOWN_KIND
                    raise Stop(unknown_operation(op))
            except NotImplementedError as error:
                machine.stop("unknown", str(error), role, op)
            except (TypeError, ValueError, AttributeError, IndexError) as error:
                result = self.failed(role, op, values, error)
            if step.meets:
                role.barrier()
            if len(op.results) == 1:
                environment[op.results[0]] = result
            elif op.results:
                for slot, value in zip(op.results, result):
                    environment[slot] = value
            if kind == EFFECT_KIND:
                return

    def spend(self, machine: Machine, role: Role, step: Step) -> None:
        """Add an operation's modelled time: the role's own, and the wait for a unit that other roles of its CTA use."""
        cost, begin = step.cost, role.time
        role.time = begin + cost.cycles
        if cost.unit:
            role.time += machine.shared_unit(cost.unit, role.rank).take(begin, cost.load) - begin - cost.load
        if self.recorder is not None:
            self.recorder.work(machine, role, step, begin)

    def failed(self, role: Role, op: Op, values: list[Any], error: Exception) -> Any:
        """Handle an operation on a missing value. Poison spreads, a product in flight is a finding, and anything else
        is a bug of the simulator.
        """
        flying = next((v for v in values if isinstance(v, InFlight)), None)
        if flying is not None:
            operation = flying.product.operation
            used_in_flight(role, op, operation, f"{op.name} reads it")
            while not operation.done:
                ready = [o for o in role.machine.flying if o.can_complete() and o.unit == operation.unit]
                role.machine.complete(ready[0])
            fixed = [v.product.value if isinstance(v, InFlight) else v for v in values]
            from .pure_operations import PURE

            if op.name in PURE:
                return PURE[op.name](op, *fixed)
            raise Stop(self.findings[-1])
        poison = next((v for v in values if isinstance(v, Poison)), None)
        if poison is not None:
            if op.name in EFFECTS:
                who = role.machine.where(role)
                places = (Place(who, poison.why, poison.op.location), Place(who, op.name, op.location))
                raise Stop(Finding("uninitialized", f"{op.name} of a value that was never computed", places))
            return tuple(poison for _ in op.results) if len(op.results) != 1 else poison
        if any(isinstance(v, np.ndarray) and not isinstance(kind, Tensor) for v, kind in zip(values, op.operand_types)):
            if op.name in FIRST_THREAD:
                differ = [
                    isinstance(v, np.ndarray) and not isinstance(kind, Tensor)
                    for v, kind in zip(values, op.operand_types)
                ]
                first = [v.reshape(-1)[0].item() if d else v for v, d in zip(values, differ)]
                return EFFECTS[op.name](role, op, *first)
            place = Place(role.machine.where(role), op.name, op.location)
            raise Stop(
                Finding("unknown", f"{op.name} of a scalar that differs between the threads of its role", (place,))
            ) from error
        note = f"the simulator failed in {op.name} at {op.location}"
        raise RuntimeError(f"{note}: {type(error).__name__}: {error}") from error

    def resume(self, role: Role) -> bool:
        """Continue the operation in progress. Return True if the role yields."""
        generator = role.pending
        if generator is None:
            return False
        try:
            wait = next(generator)
        except StopIteration as stop:
            role.pending = None
            if role.pending_barrier:
                role.barrier()
            results = role.pending_results
            if len(results) == 1:
                role.environment[results[0]] = stop.value
            elif results:
                for slot, value in zip(results, stop.value):
                    role.environment[slot] = value
            return False
        role.wait = wait if isinstance(wait, Wait) else None
        if role.wait is None:
            role.wait = Wait(lambda: True, lambda: "its turn")
        elif self.recorder is not None:
            self.recorder.waits(role.machine, role)
        return True

    def jump(self, role: Role, block: Any, operands: Sequence[int]) -> bool:
        """Continue in a block. Return True if the role yields because its loop only reads values that do not change."""
        environment = role.environment
        values = [environment[i] for i in operands]
        for slot, value in zip(block.arguments, values):
            environment[slot] = value
        role.block, role.at = block, 0
        role.done = divergence.ends(role)
        role.wait = None if role.done else turned(role)
        if role.wait is None:
            return role.done
        if self.recorder is not None:
            self.recorder.waits(role.machine, role)
        return True

    def finish(self, role: Role) -> None:
        role.done = True
        machine = role.machine
        machine.version += 1
        machine.time = max(machine.time, role.time)
        machine.cluster_barrier.advance()

    def endless(self, machine: Machine, role: Role, op: Op) -> None:
        raise Stop(
            Finding(
                "loop",
                f"{self.step_limit} operations and no end: the limit `step_limit`; {role.name} is still running",
                (Place(machine.where(role), op.name, op.location),),
                {"roles": "; ".join(f"{r.name}: {r.steps} operations" for r in machine.roles)},
            )
        )


def makes_pointers(op: Op) -> bool:
    """Whether addresses come from memory or numbers in this operation."""
    kinds = [k.element if isinstance(k, Tensor) else k for k in op.result_types]
    return (
        op.name == "tt.int_to_ptr"
        or (op.name == "tt.load" and any(isinstance(k, Pointer) for k in kinds))
        or "inline_asm" in op.name
    )


def check(simulation: Simulation) -> None:
    """Raise the findings of a finished run."""
    if simulation.findings:
        raise SimulationError(simulation.program.name, simulation.findings, simulation)
