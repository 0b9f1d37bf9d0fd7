"""The machine of inline PTX: `inline_ptx._meaning.Machine` for the threads of a role that execute a block.

It maps to the simulator's memories, barriers and asynchronous operations. Each shim states the meaning of its
instruction; the `ptx_` modules and `..machine` define memories, barriers and copies.
"""

from __future__ import annotations

import numpy as np

from tritonkittens.inline_ptx import clc
from tritonkittens.inline_ptx._meaning import PtxFault

from ..agents import Async, Wait
from ..clocks import ASYNC
from ..costs import CLC_DURATION
from ..report import Finding, Place, Stop
from .ptx_copies import PtxCopies
from .ptx_synchronisation import PtxSynchronisation
from .ptx_tensor_cores import PtxTensorCores
from .ptx_threads import ThenWait


class RoleThreads(PtxSynchronisation, PtxCopies, PtxTensorCores):
    """Threads of one role in one CTA, with all that their instructions can do."""

    def clc_try_cancel(self, result: int, barrier: int, multicast: bool) -> None:
        machine, role = self.machine, self.role
        self.check_aligned(result, "clusterlaunchcontrol.try_cancel: the result")
        targets = self.targets(result, barrier, (1 << len(machine.ctas)) - 1 if multicast else None)
        bars = [
            machine.barriers.find(role, bar, self.op, "try_cancel", self.rank) for _, bar in targets if bar is not None
        ]

        def effect(operation: Async) -> None:
            answer = clc.encode_answer(machine.simulation.cancel_next())
            for (place, _), bar, phase in zip(targets, bars, phases):
                self.put(operation, ASYNC, "shared", np.array([place]), answer.reshape(1, 16))
                if bar is not None:
                    machine.barriers.deliver(operation, bar, phase, 16)

        operation = machine.start(
            "try_cancel", role, self.op, effect, unit="CLC", duration=CLC_DURATION, rank=self.rank
        )
        phases = [0 if bar is None else machine.barriers.promise(operation, bar) for bar in bars]

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

    def trap(self, active: np.ndarray) -> None:
        if active.any():
            raise Stop(
                Finding(
                    "trap",
                    f"{self.role.name} executed trap",
                    (Place(self.machine.where(self.role), "trap", self.op.location),),
                )
            )
