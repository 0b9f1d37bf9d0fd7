"""The threads of a role that execute inline PTX: their special registers, and what they wait for and signal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tritonkittens.inline_ptx._meaning import NoMeaning

from ..agents import Async, Role, Wait
from ..barriers import Barrier
from ..clocks import Clock
from ..costs import CLOCK_GHZ
from ..layouts import SHARED_STRIDE
from ..spinning import Watch
from ..ttgir import Op
from ..values import Allocation


class ThenWait(Wait):
    """A wait with an action at its end, which `run_block` executes."""

    __slots__ = ("then",)

    def __init__(
        self, ready: Callable[[], bool], describe: Callable[[], str], then: Callable[[], None], **options: Any
    ):
        super().__init__(ready, describe, **options)
        self.then = then


class PtxThreads:
    """Threads of one role in one CTA that execute one block together. `tid`, `lane`, `warp` are arrays with one entry
    a thread.
    """

    def __init__(self, role: Role, op: Op, rank: int, tid: np.ndarray):
        self.role, self.op, self.rank, self.machine = role, op, rank, role.machine
        self.tid: np.ndarray = tid.astype(np.int64)
        self.lane: np.ndarray = self.tid % 32
        self.warp: np.ndarray = self.tid // 32
        self.watch = Watch(role)

    @property
    def clock(self) -> Clock:
        """What these threads know to have happened."""
        return self.role.clocks[self.rank]

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

    def until(self, operations: list[Async], what: str) -> Wait | None:
        """Return a wait for operations, None without any."""
        if not operations:
            return None
        return ThenWait(
            lambda: all(o.done for o in operations), lambda: f"{sum(not o.done for o in operations)} {what}",
            lambda: self.machine.acquire(self.role, operations), time=lambda: max(o.finish for o in operations),
        )  # fmt: skip

    def check_aligned(self, value: int, what: str, to: int = 16) -> None:
        """Stop the run unless `value` is a multiple of `to`."""
        if value % to:
            self.machine.stop(
                "misaligned", f"{what} {value % SHARED_STRIDE}: a multiple of {to} is needed", self.role, self.op
            )

    def start_signalling(
        self, kind: str, barrier: Barrier | None, nbytes: int, effect: Callable[[Async], None], **time: Any
    ) -> Async:
        """Start an operation that delivers `nbytes` to an mbarrier after its effect. `time` as in `Machine.start`."""
        barriers = self.machine.barriers

        def delivering(operation: Async) -> None:
            effect(operation)
            if barrier is not None:
                barriers.deliver(operation, barrier, phase, nbytes)

        operation = self.machine.start(kind, self.role, self.op, delivering, rank=self.rank, **time)
        phase = 0 if barrier is None else barriers.promise(operation, barrier)
        return operation
