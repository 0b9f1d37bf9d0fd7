"""Semaphores (mbarriers): construction, arrivals and waits."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from tritonkittens.arch import WARP
from tritonkittens.inline_ptx import mbarrier as ptx_mbarrier
from tritonkittens.inline_ptx import tcgen05, timing
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Semantic, Trace, Traced, base_type, base_value, gl, hopper, mbarrier, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.resources import bill

WAIT_LIMIT_NS = 2_000_000_000  # in debug mode a longer wait traps
REPORT = "report"  # the debug mode in which a wait prints the warps that are stuck


class semaphore_type(base_type):
    """The type of a `semaphore`: how many there are (None: one), and the type of their memory."""

    def __init__(self, number: int | None, piece: base_type):
        self.number, self.piece = number, piece

    def __eq__(self, other: object) -> bool:
        return isinstance(other, semaphore_type) and self.number == other.number and self.piece == other.piece

    def __hash__(self) -> int:
        return hash(self.mangle())

    def __repr__(self) -> str:
        return "semaphore" if self.number is None else f"{self.number} semaphores"

    def mangle(self) -> str:
        return f"B{self.number}_{self.piece.mangle()}B"

    def _flatten_ir_types(self, builder: Any, out: list[Any]) -> None:
        self.piece._flatten_ir_types(builder, out)

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[semaphore, int]:
        piece, cursor = self.piece._unflatten_ir(handles, cursor)
        return semaphore(self.number, piece), cursor


class semaphore(base_value):
    """An mbarrier in shared memory, or an array of them: `full[stage]`. `tk.semaphores` makes it."""

    def __init__(self, number: int | None, piece: Traced, arrivals: int | None = None):
        self.number, self.piece = number, piece
        self.arrivals = arrivals  # arrivals that complete a phase; None once the mbarriers are initialised

    @property
    def type(self) -> semaphore_type:
        return semaphore_type(self.number, self.piece.type)

    @property
    def __asm_operand__(self) -> Traced:
        return self.piece

    def barrier(self, t: Trace) -> Traced:
        """Return the mbarrier itself. Raises `TileError` for an array."""
        if self.number is not None:
            raise TileError(f"this is an array of {self.number} semaphores: take one, semaphores[i]")
        return self.piece

    def _flatten_ir(self, handles: list[Any]) -> None:
        self.piece._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        self.piece._set_name(builder, name)

    def __getitem__(self, i: Traced, _semantic: Semantic = None, _generator: Any = None) -> semaphore:
        if self.number is None:
            raise TileError("this is one semaphore, not an array")
        index = unwrap(i)
        if isinstance(index, int) and not 0 <= index < self.number:
            raise TileError(f"semaphore {index} of {self.number}")
        return semaphore(None, Trace(_semantic, _generator).call(self.piece.index, i))


@op
def semaphores(t: Trace, number: Traced, arrivals: Traced = 1) -> Traced:
    """Make an array of mbarriers in shared memory. The whole kernel calls it, before the warp roles start.

    Args:
        number: mbarriers in the array, a compile-time integer.
        arrivals: the arrivals that complete a phase of each. The bytes that `expect` announces must have landed as
            well.

    Returns:
        The array; `made[i]` is one semaphore. All threads of the CTA and TMA see it.

    Raises:
        TileError: where a number is no positive integer, or the shared memory is exceeded.
    """
    made = new_semaphores(t, number, arrivals)
    make_semaphores(t, [made])
    publish(t)
    t.call(gl.barrier)
    return made


def new_semaphores(t: Trace, number: Traced, arrivals: Traced) -> semaphore:
    """Allocate an array of mbarriers without initialising it. Several arrays share one `make_semaphores`, `publish`
    and barrier.
    """
    t.require_explicit("semaphores")
    t.require("semaphores (mbarrier)", "tma")
    number, arrivals = unwrap(number), unwrap(arrivals)
    if not isinstance(number, int) or number < 1 or not isinstance(arrivals, int) or arrivals < 1:
        raise TileError(f"semaphores({number!r}, arrivals={arrivals!r}): both must be positive compile-time integers")
    bill().charge_shared(f"{number} semaphores", 8 * number)
    piece = t.call(gl.allocate_shared_memory, tl.int64, [number, 1], mbarrier.MBarrierLayout())
    return semaphore(number, piece, arrivals)


def make_semaphores(t: Trace, made: Sequence[semaphore]) -> None:
    """Initialise the mbarriers of several `new_semaphores` arrays at once."""
    counts = []
    for sem in made:
        assert sem.number is not None and sem.arrivals is not None, "an array that new_semaphores made"
        counts.append((sem.number, sem.arrivals))
    t.call(asm, ptx_mbarrier.init_all_text(counts), ",".join("r" * len(counts)), [sem.piece for sem in made])


@op
def expect(t: Trace, sem: Traced, what: Traced) -> None:
    """Arrive once at the semaphore `sem`, and make its current phase wait for the bytes of TMA copies as well.

    `what` is a number of bytes, or one tile or a tuple of tiles whose bytes add up. Source: PTX ISA,
    mbarrier.arrive.expect_tx.
    """
    what = unwrap(what)
    items = what if isinstance(what, (tuple, list, tl.tuple)) else [what]
    nbytes = sum(unwrap(i) if isinstance(unwrap(i), int) else i.nbytes for i in items)
    t.call(mbarrier.expect, _semaphore(sem, "expect").barrier(t), nbytes)


def role_thread(t: Trace) -> Traced:
    """Return this thread's index in its role (in the CTA outside roles), an int32 scalar.

    The index differs between threads, although the compiler takes scalars to be uniform. A branch on it may contain
    single-thread instructions (PTX shims, prints). It must not contain anything for which the compiler adds a
    barrier.
    """
    if not t.explicit:
        return t.call(asm, "mov.u32 $0, %tid.x;", "=r", [], tl.int32)
    warps = t.num_warps
    index = t.call(gl.arange, 0, WARP * warps, gl.BlockedLayout([1], [WARP], [warps], [0]))  # one element a thread
    return t.call(asm, "mov.b32 $0, $1;", "=r,r", [index], tl.int32)


def give_tensor_memory(t: Trace) -> None:
    """Order this thread's accesses of tensor memory before a synchronisation that follows, in a kernel that has any.
    Source: PTX ISA, tcgen05.fence."""
    if bill().tmem:
        t.call(tcgen05.fence_before_thread_sync)


def take_tensor_memory(t: Trace) -> None:
    """Order this thread's accesses of tensor memory after a synchronisation that precedes, in a kernel that has any."""
    if bill().tmem:
        t.call(tcgen05.fence_after_thread_sync)


@triton.jit
def _arrive_remote(bar, cta, COUNT: tl.constexpr, SCOPE: tl.constexpr, thread):
    if thread == 0:
        ptx_mbarrier.arrive_remote(bar, cta, COUNT, issuer="thread", scope=SCOPE)


@op
def arrive(
    t: Trace,
    sem: Traced,
    count: Traced = 1,
    per: Traced = "role",
    cta: Traced = None,
    scope: Traced = "cluster",
    fenced: Traced = False,
) -> None:
    """Arrive at a semaphore.

    Args:
        sem: one semaphore.
        count: the arrivals, a compile-time integer.
        per: "role": all threads of the role synchronise, then `count` arrivals. "warp": each warp arrives `count`
            times without synchronising with the others, so the semaphore must count them all.
        cta: the rank of a CTA of the cluster, whose semaphore receives the arrival. That CTA waits with
            `scope="cluster"`.
        scope: "cta" at both ends is enough where only tensor cores and TMA touched the memory. It saves a fence of
            the whole GPU.
        fenced: this role has called `fence_async` since it last read shared memory. The arrival then needs no fence
            for those reads.

    Raises:
        TileError: for another `per` or `count`.

    Source: PTX ISA, mbarrier.arrive, mapa.
    """
    per, count, cta = unwrap(per), unwrap(count), unwrap(cta)
    if per not in ("role", "warp"):
        raise TileError(f"arrive(per={per!r}): must be 'role' or 'warp'")
    if not isinstance(count, int) or count < 1:
        raise TileError(f"arrive(count={count!r}): must be a positive compile-time integer")
    bar = _semaphore(sem, "arrive").barrier(t)
    if bill().reads_shared and not unwrap(fenced):
        # This thread's reads of a stage must complete before TMA overwrites the stage. A read by the generic proxy and
        # a write by the asynchronous one are ordered by
        # a proxy fence only (PTX ISA, "Memory consistency model: proxies"). Without the fence, an H200 overwrote stages
        # whose last ld.shared were still in flight.
        publish(t)
    give_tensor_memory(t)
    if cta is not None and per == "warp":
        t.call(ptx_mbarrier.arrive_remote, bar, cta, count, issuer="warp", scope=unwrap(scope))
    elif cta is not None:
        t.call(gl.barrier)
        t.call(_arrive_remote, bar, cta, tl.constexpr(count), tl.constexpr(unwrap(scope)), role_thread(t))
    elif per == "warp":
        t.call(ptx_mbarrier.arrive, bar, count, issuer="warp")
    else:
        t.call(mbarrier.arrive, bar, count=count)


def _semaphore(sem: Traced, what: str) -> semaphore:
    if not isinstance(sem, semaphore):
        raise TileError(f"{what}({unwrap(sem)!r}): needs a semaphore, made by tk.semaphores")
    return sem


@op
def wait(t: Trace, sem: Traced, phase: Traced, scope: Traced = "cta") -> None:
    """Wait until the phase of parity `phase` of a semaphore has completed.

    A fresh semaphore is in phase 0, so a wait for parity 1 returns at once.

    Args:
        sem: one semaphore.
        phase: 0 or 1, a constant or an int32 scalar.
        scope: "cluster" where threads of other CTAs arrive, else "cta".

    In debug mode, a wait of more than two seconds ends the launch with an error. With `debug=True` at launch it ends
    silently and changes no other code. With `debug="report"` it prints the warps that are stuck, as `careful_wait`
    does.
    Source: PTX ISA, mbarrier.try_wait.
    """
    if t.builder.options.debug == REPORT:
        _careful_wait(t, sem, phase, WAIT_LIMIT_NS, None, scope)
    elif t.builder.options.debug:
        t.call(ptx_mbarrier.wait_or_trap, _semaphore(sem, "wait").barrier(t), phase, WAIT_LIMIT_NS, unwrap(scope))
    else:
        t.call(ptx_mbarrier.wait, _semaphore(sem, "wait").barrier(t), phase, unwrap(scope))
    take_tensor_memory(t)


@op
def careful_wait(
    t: Trace, sem: Traced, phase: Traced, limit_ns: Traced = WAIT_LIMIT_NS, name: Traced = None, scope: Traced = "cta"
) -> None:
    """Wait as `wait` does, but end the launch with an error after a time limit.

    Before that, the kernel prints `name`, the phase, the CTA, and the warps of the CTA that wait.

    Args:
        sem: one semaphore.
        phase: 0 or 1, a constant or an int32 scalar.
        limit_ns: the limit in nanoseconds, a positive compile-time integer.
        name: printable ASCII; the place in the source if None.
        scope: "cluster" where threads of other CTAs arrive, else "cta".

    Raises:
        TileError: for another limit or name.

    The print is a function call, and ptxas keeps no wgmma in flight over a call. Such a kernel is slower and orders
    its products differently.
    """
    _careful_wait(t, sem, phase, limit_ns, name, scope)
    take_tensor_memory(t)


@triton.jit
def _wait_or_report(
    bar, phase, LIMIT: tl.constexpr, SCOPE: tl.constexpr, thread, EVEN: tl.constexpr, ODD: tl.constexpr
):
    done = ptx_mbarrier.try_wait(bar, phase, SCOPE)
    if done == 0:
        start = timing.globaltimer()
        waited = start - start
        while (done == 0) & (waited < LIMIT):
            done = ptx_mbarrier.try_wait(bar, phase, SCOPE)
            waited = timing.globaltimer() - start
        if done == 0:
            if thread % 32 == 0:  # one lane of every warp
                warp = asm("mov.u32 $0, %tid.x;", "=r", [], tl.int32) // 32
                if phase == 0:
                    tl.device_print(EVEN, warp)
                else:
                    tl.device_print(ODD, warp)
            for _ in range(20):
                # so that the other warps and blocks print before the first trap ends them all
                timing.nanosleep(1_000_000)
            asm("trap;", "", [])


def _careful_wait(t: Trace, sem: Traced, phase: Traced, limit_ns: Traced, name: Traced, scope: Traced) -> None:
    limit, name, scope = unwrap(limit_ns), unwrap(name), unwrap(scope)
    if not isinstance(limit, int) or limit < 1:
        raise TileError(f"careful_wait(limit_ns={limit!r}): must be a positive compile-time number of nanoseconds")
    if name is not None and not (isinstance(name, str) and name.isascii() and name.isprintable()):
        raise TileError(f"careful_wait(name={name!r}): must be a string of printable ASCII characters")
    label = f"stuck waiting for {name or 'a semaphore'} at {_place(t)}, phase "
    arguments = (
        _semaphore(sem, "wait").barrier(t),
        t.scalar(phase),
        tl.constexpr(limit),
        tl.constexpr(scope),
        role_thread(t),
    )
    t.call(_wait_or_report, *arguments, tl.constexpr(label + "0, warp"), tl.constexpr(label + "1, warp"))


def _place(t: Trace) -> str:
    """Return "file:line (function)" of the traced call."""
    g = t.generator
    line = g.begin_line + getattr(g.cur_node, "lineno", 0)
    return ascii(f"{pathlib.Path(g.file_name or '').name}:{line} ({g.jit_fn.fn.__name__})")[1:-1]


@op
def sync(t: Trace) -> None:
    """Synchronise the threads of this role (of the whole CTA outside roles)."""
    if not t.explicit:
        t.call("debug_barrier")
        return
    give_tensor_memory(t)
    t.call(gl.barrier)
    take_tensor_memory(t)


def publish(t: Trace) -> None:
    """Make initialised semaphores visible to the asynchronous proxy, before the roles start."""
    t.call(hopper.fence_async_shared)
