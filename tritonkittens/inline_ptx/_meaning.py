"""The meaning of a PTX instruction, in numpy, next to the shim that emits it. `tritonkittens/sim/ptx.py` executes
blocks of them on the CPU.

A meaning is a function of the machine `t`, the instruction `i` and its sources, for a group of T threads at once:

    @meaning("ex2.approx{ftz:ftz}?.f32")
    def _ex2(t, i, x): return bits of the destination

Sources: a register is an array [T] of its bits (uint8, uint16, uint32, uint64; bool for a predicate; [T, 2] uint64
for 128 bits). A vector `{a, b}` is a tuple of them. A memory operand `[a + 4]` is an array of addresses (`[map, {x,
y}]`: a tuple of the addresses and the rest). An immediate is a Python int or float.
The result is the destination's bits (anything that broadcasts to [T]; a tuple for a vector or a pair `p|q`), or None
without a destination. Lanes outside `i.active` hold anything and are not written. A meaning that waits is a
generator: `yield wait`, with a Wait of the machine's.

This module does not depend on the simulator; `Machine` is the interface that a simulator provides.
"""

import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ._formats import word

Bits = np.ndarray
Wait = Any  # the machine's own type; a meaning only passes it on
# a source or a result of an instruction, as described above: an array, a tuple of arrays, a Python number, or None
Register = Any
Waits = Generator[Wait, None, Register]  # the result of a meaning that waits
Registered = Callable[..., Any]


class NoMeaning(NotImplementedError):
    """An instruction, or a use of one, that has no meaning on the CPU; names it."""


class PtxFault(RuntimeError):
    """An error that the hardware would reject or leave undefined: differing operands that must be uniform, illegal
    descriptors, an endless loop.
    """


@dataclass(slots=True)
class Instruction:
    """One instruction, the argument of a meaning.

    mnemonic    "mbarrier.arrive.shared::cta.b64"
    modifiers   ("arrive", "shared::cta", "b64")
    fields      the pattern's fields by name; None for an optional one that is not there
    destination_bits  width of each destination register, 1 for a predicate, 0 for a sink `_`; a tuple for a vector
    spins       whether it is the body of a loop that only repeats it until it succeeds
    active      bool [T]: the threads that execute it
    """

    mnemonic: str
    modifiers: tuple[str, ...]
    fields: dict[str, str | None]
    destination_bits: tuple[Any, ...] = ()
    spins: bool = False
    active: np.ndarray = field(default_factory=lambda: np.ones(1, bool))

    @property
    def threads(self) -> Iterator[int]:
        """Indices of the active threads."""
        return iter(np.flatnonzero(self.active).tolist())

    @property
    def any_thread(self) -> int:
        """One active thread: the lowest."""
        return int(np.argmax(self.active))


class MBarrier(Protocol):
    """An mbarrier at a shared address. `remote`: the instruction names another CTA's (`.shared::cluster`)."""

    def init(self, count: int) -> None:
        """mbarrier.init, by one thread."""

    def invalidate(self) -> None: ...

    def arrive(self, count: int, remote: bool) -> None:
        """`count` arrivals, of all the threads that arrive in one instruction."""

    def expect(self, nbytes: int) -> None:
        """expect_tx: the current phase waits for `nbytes` more bytes."""

    def complete(self, nbytes: int) -> None:
        """complete_tx: `nbytes` bytes have arrived."""

    def completed(self, parity: int) -> bool:
        """Whether the phase of that parity has completed. If so, the thread acquires the clock that its arrivals
        released.
        """

    def wait(self, parity: int, limit_ns: int | None) -> Wait | None:
        """Return a Wait until the phase of that parity has completed, None if it has.

        After `limit_ns`, the thread also continues without it: when nothing else can happen, the machine ends such
        waits and advances its clock. None: no limit.
        """


class Machine(Protocol):
    """The threads of one role and their memories. T is their number; addresses are arrays of unsigned integers.

    Spaces: "shared" (32-bit addresses, the CTA's rank in the bits from 24 up), "global" (64 bits), "generic" (64
    bits, either), "tensor" (lane << 16 | 32-bit column). `active` (bool [T]) marks the executing threads; the values
    of other threads must be ignored.
    """

    tid: np.ndarray  # int [T]: %tid.x
    lane: np.ndarray  # int [T]: lane in its warp
    warp: np.ndarray  # int [T]: %tid.x // 32

    def special(self, name: str) -> Any:
        """A special register, "%cluster_ctarank", "%globaltimer", "%clock64", "%ctaid.x", "%smid", …: an int or an
        array [T]."""

    def static_shared(self, name: str, nbytes: int, align: int) -> int:
        """Return the address of a `.shared` variable of the current block: one for each operation of the program, at
        every execution.
        """

    def load(
        self, space: str, addresses: Bits, nbytes: int, active: np.ndarray, order: str = "weak", scope: str = ""
    ) -> np.ndarray:
        """uint8 [*addresses.shape, nbytes]; addresses have T as their first axis. `order`: "weak", "relaxed",
        "acquire", "volatile"."""

    def store(
        self, space: str, addresses: Bits, data: np.ndarray, active: np.ndarray, order: str = "weak", scope: str = ""
    ) -> None:
        """`data` uint8 [*addresses.shape, nbytes], in order of threads where they collide. `order`: "weak", "relaxed",
        "release", "volatile"."""

    def atomic(
        self,
        space: str,
        operation: str,
        format: str,
        addresses: Bits,
        bits: Bits,
        active: np.ndarray,
        order: str = "relaxed",
        scope: str = "gpu",
        compare: Bits | None = None,
    ) -> Bits:
        """One read-modify-write a thread (colliding threads one after the other); the old bits, in words of the width
        of `bits`.

        `operation`: add, min, max, inc, dec, and, or, xor, exch, cas (with `compare`); `format`: u32 s32 u64 s64 f32
        f64 b32 b64 b128 f16 bf16 f16x2 bf16x2.
        """

    def store_async(self, addresses: Bits, data: np.ndarray, barriers: Bits, active: np.ndarray) -> None:
        """st.async: writes `data` (uint8 [T, nbytes]) to shared addresses, asynchronously, and completes nbytes on each
        thread's barrier of the same CTA."""

    def barrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared address (rank in the bits from 24 up)."""

    def named_barrier(
        self, number: int, threads: int | None, arriving: int, arrive_only: bool, votes: int = 0
    ) -> Wait | None:
        """bar.sync / bar.arrive / bar.red: `arriving` threads of this role arrive (whole warps), of `threads` in all
        (None: the whole CTA).

        `votes` of them vote yes. Return a Wait until all have arrived, None without a wait.
        """

    def barrier_votes(self, number: int) -> tuple[int, int]:
        """(yes, all) of the round of a named barrier that this role has just waited for."""

    def cluster_arrive(self, order: str, active: np.ndarray) -> None:
        """barrier.cluster.arrive; `order` "release" or "relaxed"."""

    def cluster_wait(self, active: np.ndarray) -> Wait | None:
        """barrier.cluster.wait for the round that this role arrived at last."""

    def fence(self, kind: str, active: np.ndarray) -> None:
        """Execute a fence. `kind` is the text after "fence.": "acq_rel.gpu", "sc.cta", "proxy.async",
        "proxy.async.shared::cta", "mbarrier_init.release.cluster", "proxy.tensormap::generic.acquire.gpu".

        Also "warp" (bar.warp.sync), "tcgen05.before_thread_sync" and "tcgen05.after_thread_sync".
        """

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
        """cp.async.bulk of one thread, (space, address) to (space, address). With `barrier` (a shared address) it
        completes bytes there, else it belongs to the thread's open bulk group. `multicast`: bit mask of CTAs.
        `reduction`: (operation, format), as in `atomic`, instead of overwriting."""

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
        """cp.async.bulk.tensor (tiled) of one thread; `direction` "load" (counts bytes on `barrier`) or "store" (in the
        thread's open bulk group, `reduction` an operation or None). `tensor_map` a generic address; coordinates in
        elements, signed, fastest first; `shared` the shared address."""

    def commit_bulk_group(self, active: np.ndarray) -> None:
        """cp.async.bulk.commit_group of each active thread."""

    def wait_bulk_group(self, pending: int, read: bool, active: np.ndarray) -> Wait | None:
        """Until at most `pending` of the active threads' groups are unfinished; `read`: until they have read their
        sources."""

    def replace_tensor_map(self, space: str, address: int, field: str, ordinal: int, value: int) -> None:
        """tensormap.replace: `field` "global_address", "rank" (minus 1), "box_dim", "global_dim", "global_stride",
        "element_stride"."""

    def wgmma(self, product: Any) -> np.ndarray:
        """Issue a `wgmma.Product` of one warpgroup and return the accumulator's new words [64, n]:
        `product.compute(read)`."""

    def wgmma_fence(self) -> None: ...

    def wgmma_commit(self) -> None: ...

    def wgmma_wait(self, pending: int) -> Wait | None: ...

    def tcgen05_alloc(self, columns: int) -> Generator[Wait, None, int]:
        """Generator that waits for that many columns of tensor memory and returns their address."""

    def tcgen05_dealloc(self, address: int, columns: int) -> None: ...

    def tcgen05_relinquish(self) -> None: ...

    def tcgen05_wait(self, what: str) -> Wait | None:
        """tcgen05.wait::ld or ::st."""

    def tcgen05_issue(self, operation: Any, thread: int) -> None:
        """Start a `tcgen05.Product` or `tcgen05.Copy` of one thread. They are asynchronous and in order with each
        other.

        `operation.run(read, write)` does its work with the machine's `read(space, addresses, nbytes)` and
        `write(space, addresses, data)` (like `load` and `store`, without threads).
        """

    def tcgen05_commit(self, barriers: list[int], thread: int, ctas: int) -> None:
        """One arrival at each of these barriers (shared addresses) when the thread's operations issued so far are
        done. `ctas`: of the instruction's cta_group."""

    def clc_try_cancel(self, result: int, barrier: int, multicast: bool) -> None:
        """Request a cluster. `clc.encode_answer` is written to the 16 bytes at shared `result`, and 16 bytes complete
        on `barrier` (in all CTAs if `multicast`).
        """

    def grid_dependency(self, action: str) -> Wait | None:
        """griddepcontrol "wait" or "launch_dependents"."""

    def set_max_registers(self, direction: str, count: int) -> Wait | None:
        """setmaxnreg "inc" or "dec"."""

    def sleep(self, nanoseconds: int) -> Wait | None:
        """nanosleep."""

    def trap(self, active: np.ndarray) -> None:
        """`trap`: does not return."""


@dataclass(frozen=True)
class Meaning:
    """A meaning that `meaning` registered. `expression` is the pattern, compiled."""

    pattern: str
    function: Registered
    destinations: int
    updates: bool
    expression: "re.Pattern[str]"


_MEANINGS: dict[str, list[Meaning]] = {}
_WORD = re.compile(r"\{(\w+)(?::([^}]*))?\}([?*]?)|([^.{}]+)")


def _compile(pattern: str) -> "re.Pattern[str]":
    text = ""
    for part in _WORD.finditer(pattern):
        name, choices, repeat, literal = part.groups()
        if literal is not None:
            text += r"\." + re.escape(literal)
            continue
        one = "(?:" + "|".join(re.escape(c) for c in choices.split("|")) + ")" if choices else r"[\w:]+"
        text += (
            rf"\.(?P<{name}>{one})"
            if not repeat
            else rf"(?:\.(?P<{name}>{one}))?"
            if repeat == "?"
            else rf"(?P<{name}>(?:\.{one})*)"
        )
    return re.compile(text)


def meaning(*patterns: str, destinations: int = 1, updates: bool = False) -> Callable[[Registered], Registered]:
    """Register the meaning of the instructions of `patterns`.

    `destinations` is the number of leading operands that they write. `updates`: these are also read, and come first
    among the sources.

    A pattern is a mnemonic whose dot-separated words may be fields: `{type}` is any word, `{type:f32|f64}` one of
    these. A `?` after it means none or one, a `*` any number of words. `i.fields` holds the matched words.
    """

    def register(function: Registered) -> Registered:
        for pattern in patterns:
            _MEANINGS.setdefault(pattern.split(".")[0].split("{")[0], []).append(
                Meaning(pattern, function, destinations, updates, _compile(pattern))
            )
        return function

    return register


def find(mnemonic: str) -> tuple[Meaning, dict[str, str | None]]:
    """Return the meaning of a mnemonic, and its fields. Errors: NoMeaning; LookupError for several meanings."""
    found = [
        (m, match)
        for m in _MEANINGS.get(mnemonic.split(".")[0], ())
        if (match := m.expression.fullmatch("." + mnemonic))
    ]
    if not found:
        raise NoMeaning(f"{mnemonic} has no meaning on the CPU")
    if len({id(m.function) for m, _ in found}) > 1:
        raise LookupError(f"{mnemonic} has several meanings: {', '.join(m.pattern for m, _ in found)}")
    return found[0][0], found[0][1].groupdict()


# --- registers
# --------------------------------------------------------------------------------------------------------------------


def unsigned(x: Any, bits: int) -> np.ndarray:
    """x (register or immediate) as `bits`-bit unsigned integers; wraps."""
    if isinstance(x, float):
        raise PtxFault(f"the number {x} where {bits} bits of an integer are wanted")
    if isinstance(x, int):
        return word(bits)(x & ((1 << bits) - 1))
    return np.asarray(x).astype(word(bits))


def signed(x: Any, bits: int) -> np.ndarray:
    """x as `bits`-bit signed integers; a narrower register is taken as it is (zero-extended)."""
    return unsigned(x, bits).view({8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}[bits])


def halves(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) 16 bits of 32."""
    x = unsigned(x, 32)
    return (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def join(parts: "tuple[Any, ...] | list[Any]", bits: int) -> np.ndarray:
    """One `bits`-bit word from equal parts, the first in the lowest bits."""
    step = bits // len(parts)
    out = unsigned(0, bits)
    for n, part in enumerate(parts):
        out = out | (unsigned(unsigned(part, step), bits) << word(bits)(n * step))
    return out


def split(x: Any, bits: int, parts: int) -> tuple[np.ndarray, ...]:
    """`join`'s inverse."""
    step = bits // parts
    x = unsigned(x, bits)
    return tuple((x >> word(bits)(n * step)).astype(word(step)) for n in range(parts))


def uniform(x: Any, active: np.ndarray, what: str) -> int:
    """The one value of all active threads. Errors: PtxFault where they differ."""
    if isinstance(x, int):
        return x
    values = np.broadcast_to(np.asarray(x), active.shape)[active]
    if values.size and not (values == values[0]).all():
        raise PtxFault(
            f"{what} differs between the threads of one instruction: {values[0]} and {values[values != values[0]][0]}"
        )
    return int(values[0])


def lanes(x: Any, active: np.ndarray) -> list[int]:
    """The active threads' values as Python ints."""
    x = np.asarray(x)
    return (x if x.shape == active.shape else np.broadcast_to(x, active.shape))[active].tolist()


def warps(t: Machine, active: np.ndarray) -> Iterator[np.ndarray]:
    """bool [T] for each warp that has active threads: those."""
    for number in np.unique(t.warp[active]):
        yield active & (t.warp == number)


def data_bytes(values: Any, bits: int, active: np.ndarray) -> np.ndarray:
    """uint8 [T, bits / 8] of a register or immediate, little-endian."""
    if bits == 128:
        return np.ascontiguousarray(values).view(np.uint8)
    whole = np.broadcast_to(unsigned(values, bits), active.shape)
    return np.ascontiguousarray(whole).view(np.uint8).reshape(len(active), bits // 8)


def from_bytes(data: np.ndarray, bits: int) -> np.ndarray:
    """Words [...] of uint8 [..., bits / 8]; 128 bits: [..., 2] uint64."""
    if bits == 128:
        return np.ascontiguousarray(data).view(np.uint64)
    return np.ascontiguousarray(data).view(word(bits))[..., 0]
