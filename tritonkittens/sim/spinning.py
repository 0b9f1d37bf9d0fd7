"""Loops that only read: a role whose state repeats sleeps until the values that it reads change.

A watch remembers a role's state at a turn of a loop (the 4th, 8th, 16th, … without a change: Brent's search for a
cycle), and the role's reads from there on. If the state repeats, the loop continues for ever unless its cluster acts,
or the words in global memory change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .agents import Wait
from .ptx import PtxSyntaxError, parse
from .ttgir import Op
from .values import Poison, View

if TYPE_CHECKING:
    from .agents import Role
    from .machine import Machine

FIRST_TURN = 4  # the first turn of a loop without a change at which the state is remembered
MOST_READS = 256  # the most reads of one turn; a loop with more is no waiting loop

# Operations without visible effects, and atomics, which report a changed word.
LOOKS = {
    "tt.load",
    "tt.atomic_rmw",
    "tt.atomic_cas",
    "tt.atomic_load",
    "tt.atomic_poll",
    "ttg.local_load",
    "ttg.barrier",
    "gpu.barrier",
    "ttg.local_barrier",
    "tt.assert",
    "cf.assert",
    "tt.assume",
    "llvm.intr.assume",
    "ttng.fence_async_shared",
}
INLINE = {"ttg.inline_asm", "tt.elementwise_inline_asm"}
PTX_EFFECTS = (
    "st.",
    "cp.",
    "mbarrier.",
    "bar.",
    "barrier.",
    "wgmma.",
    "tcgen05.",
    "clusterlaunchcontrol.",
    "setmaxnreg.",
    "multimem.",
    "tensormap.",
    "trap",
    "griddepcontrol.",
    "prefetch",
    "exit",
    "ret",
    "mapa",
    "vote",
    "shfl",
    "match",
    "redux",
    "elect",
    "activemask",
)
PTX_LOOKS = (
    "mbarrier.test_wait",
    "mbarrier.try_wait",
    "griddepcontrol.wait",
    "mapa",
    "vote",
    "shfl",
    "match",
    "redux",
    "elect",
    "activemask",
)


def only_looks(op: Op) -> bool:
    """Whether an operation changes nothing, unless it reports a change."""
    if op.name not in INLINE:
        return op.name in LOOKS
    try:
        mnemonics = parse(op.attributes["asm_string"], op.attributes["constraints"]).mnemonics
    except (PtxSyntaxError, NotImplementedError):
        return False
    return all(m.startswith(PTX_LOOKS) or not m.startswith(PTX_EFFECTS) for m in mnemonics)


class Read:
    """Words of global memory that a loop has read."""

    __slots__ = ("addresses", "words", "op")

    def __init__(self, addresses: np.ndarray, words: np.ndarray, op: Op | None):
        self.addresses, self.words, self.op = addresses, words, op


class Watch:
    """Searches for a repeated state in the loops of one role, or of one block of inline PTX."""

    __slots__ = ("role", "version", "turns", "remembered", "key", "state", "reads", "looked")

    def __init__(self, role: Role):
        self.role = role
        self.version = -1
        self.turns = 0
        self.remembered = 0  # the turn of the remembered state; 0 is none
        self.key: Hashable = None
        self.state: list[Any] = []
        self.reads: list[Read] = []
        self.looked: dict[str, None] = {}  # names of other memory that it read

    def turn(self, key: Hashable, state: Callable[[], Sequence[Any]]) -> Rest | None:
        """Handle another turn of a loop at `key`. Return a wait if its `state` repeats and nothing changed in
        between.
        """
        if self.changed():
            return None
        self.turns += 1
        if self.remembered and key == self.key:
            now = state()
            if len(now) == len(self.state) and all(map(same, now, self.state)):
                return self._rest()
        if self.turns >= max(FIRST_TURN, 2 * self.remembered):
            self.forget()
            self.remembered, self.key, self.state = self.turns, key, list(state())
            self.role.watching.append(self)
        return None

    def changed(self) -> bool:
        """Whether the cluster changed anything since the last turn. If so, the search starts again."""
        version = self.role.machine.version
        if version == self.version:
            return False
        self.version, self.turns = version, 0
        if self.remembered:
            self.forget()
        return True

    def _rest(self) -> Rest:
        rest = Rest(self.role, self.reads, list(self.looked), self.version)
        self.turns = FIRST_TURN - 2  # a role that wakes up sleeps again soon
        self.forget()
        return rest

    def forget(self) -> None:
        if self.remembered:
            self.role.watching.remove(self)
        self.remembered, self.state, self.reads, self.looked = 0, [], [], {}

    def saw(self, addresses: np.ndarray, words: np.ndarray) -> None:
        """The role reads words of global memory."""
        self.reads.append(Read(addresses.copy(), words.copy(), self.role.op))
        if len(self.reads) > MOST_READS:
            self.forget()


class Rest(Wait):
    """The wait of a role whose loop only reads. It ends when the words that it read change, or when its cluster
    acts."""

    __slots__ = ("role", "reads", "looked", "version", "woken")

    def __init__(self, role: Role, reads: list[Read], looked: list[str], version: int | None):
        super().__init__(self._changed, self._describe, time=lambda: self.woken)
        self.role, self.looked, self.version = role, looked, version  # version None: only the words matter
        self.reads = [
            reads[i]
            for i in sorted({(r.addresses.tobytes(), r.words.itemsize): i for i, r in enumerate(reads)}.values())
        ]
        self.woken = 0.0
        self.outside = True

    def _changed(self) -> bool:
        machine = self.role.machine
        peek = machine.simulation.memory.peek
        if self.version in (None, machine.version) and all(
            np.array_equal(peek(r.addresses, r.words.itemsize), r.words) for r in self.reads
        ):
            return False
        self.woken = self.woken or machine.simulation.now
        return True

    def _describe(self) -> str:
        memory = self.role.machine.simulation.memory
        seen = [
            f"{memory.name(int(r.addresses[0]))}, which holds {' '.join(map(str, r.words[:4]))}"
            for r in self.reads
            if r.addresses.size
        ][:4]
        what = "; ".join(dict.fromkeys([*seen, *self.looked]))
        return (
            f"a change of {what}: its loop only reads that"
            if what
            else "nothing: its loop reads nothing that another role could change"
        )

    @property
    def op(self) -> Op | None:
        """The operation that reads."""
        return next((r.op for r in self.reads[::-1] if r.op is not None), self.role.op)


def same(a: Any, b: Any) -> bool:
    """Whether two values of a role's state are equal. False where they cannot be compared."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    if isinstance(a, View):
        return bool((a.space, a.base) == (b.space, b.base) and a.map is b.map and a.allocation is b.allocation)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Poison):
        return a.op is b.op
    return isinstance(a, (int, float, str, np.generic)) and bool(a == b)


def turned(role: Role) -> Rest | None:
    """Handle a role's jump to a block."""
    if role.watch is None:
        role.watch = Watch(role)
    if role.watch.changed():
        return None
    block, environment = role.block, role.environment
    # loop-carried values first, because they differ in most loops
    return role.watch.turn(
        (id(block), len(role.frames)), lambda: [*(environment[i] for i in block.arguments), *environment]
    )


def resting(machine: Machine) -> bool:
    """Whether nothing can happen in a cluster unless others change global memory."""
    alive = [r for r in machine.roles if not r.done]
    return (
        any(r.wait is not None and r.wait.outside for r in alive)
        and not any(r.ready for r in alive)
        and not any(o.can_complete() for o in machine.flying)
    )
