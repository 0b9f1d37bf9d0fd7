"""mbarrier: the 64-bit barrier object in shared memory that counts arrivals and bytes (PTX ISA, "Parallel
Synchronization: mbarrier").

`bar` is a shared descriptor of one barrier (explicit kernels) or an i32 shared address, 8-byte aligned. A phase
completes when `count` arrivals and all expected bytes have arrived. `phase` is the parity of the awaited phase: 0 for
the first, 1 for the second, and so on.
`issuer` selects the executing threads; see `_asm.issued`. The compiler does not model these operations and adds no
barrier around them.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, arch, asm, has_clusters, issued, require
from tritonkittens.inline_ptx._meaning import Instruction, Machine, MBarrier, NoMeaning, Register, Waits, lanes, meaning

MAX_COUNT = (1 << 20) - 1
_SCOPES = ("cta", "cluster")


@constexpr_function
def arrive_text(count: int, issuer: str, sm: int) -> str:
    if not 1 <= count <= MAX_COUNT:
        raise OperandError(f"mbarrier.arrive(count={count}): 1 to {MAX_COUNT} arrivals")
    if count > 1 and not has_clusters(sm):
        raise OperandError(
            f"mbarrier.arrive(count={count}): below sm_90 an arrive counts once; this kernel is compiled for sm_{sm}"
        )
    counted = f", {count}" if count > 1 else ""
    return issued(f"mbarrier.arrive.shared::cta.b64 _, [$0]{counted};", issuer, sm)


# By every thread: under a predicate ptxas keeps what the register held before, in a loop one register more for each
# arrival
_REMOTE = ".reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1;"


@constexpr_function
def arrive_remote_text(count: int, issuer: str, sm: int, scope: str) -> str:
    if not 1 <= count <= MAX_COUNT:
        raise OperandError(f"mbarrier.arrive_remote(count={count}): 1 to {MAX_COUNT} arrivals")
    if scope not in _SCOPES:
        raise OperandError(f"mbarrier.arrive_remote(scope={scope!r}): 'cta' or 'cluster'")
    return issued(
        f"mbarrier.arrive{'.release.cluster' if scope == 'cluster' else ''}.shared::cluster.b64 _, [remote], {count};",
        issuer,
        sm,
        _REMOTE,
    )


@constexpr_function
def arrive_expect_tx_remote_text(issuer: str, sm: int) -> str:
    return issued("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [remote], $2;", issuer, sm, _REMOTE)


@constexpr_function
def probe(kind: str, scope: str, sm: int) -> str:
    """The mnemonic of a wait: below sm_90 there is neither try_wait nor a scope."""
    if scope not in _SCOPES:
        raise OperandError(f"mbarrier.{kind}(scope={scope!r}): 'cta' or 'cluster' (where threads of other CTAs arrive)")
    if not has_clusters(sm) and scope != "cta":
        raise OperandError(
            f"mbarrier.{kind}(scope={scope!r}): clusters need sm_90 or newer; this kernel is compiled for sm_{sm}"
        )
    kind = kind if has_clusters(sm) else "test_wait"
    acquire = ".acquire.cluster" if scope == "cluster" else ""
    return f"mbarrier.{kind}.parity{acquire}.shared::cta.b64"


@constexpr_function
def poll_text(kind: str, scope: str, sm: int, hint_ns: int) -> str:
    hint = f", {hint_ns}" if hint_ns else ""
    return f"{{ .reg .pred done; {probe(kind, scope, sm)} done, [$1], $2{hint}; selp.b32 $0, 1, 0, done; }}"


@constexpr_function
def wait_text(scope: str, sm: int) -> str:
    return f"{{ .reg .pred done; SPIN: {probe('try_wait', scope, sm)} done, [$0], $1; @!done bra SPIN; }}"


@constexpr_function
def wait_or_trap_text(limit_ns: int, scope: str, sm: int) -> str:
    if not 0 < limit_ns < 1 << 63:
        raise OperandError(f"mbarrier.wait_or_trap(limit_ns={limit_ns}): a positive number of nanoseconds below 2**63")
    return (
        "{ .reg .pred done; .reg .pred late; .reg .b64 start; .reg .b64 now; mov.u64 start, %globaltimer; "
        f"SPIN: {probe('try_wait', scope, sm)} done, [$0], $1; @done bra DONE; "
        f"mov.u64 now, %globaltimer; sub.u64 now, now, start; setp.gt.u64 late, now, {limit_ns}; @late trap; "
        "bra SPIN; DONE: }"
    )


@triton.jit
def init(bar, count, issuer: tl.constexpr = "cta"):
    """`mbarrier.init`: initialises the barrier for `count` arrivals a phase (1 to 2**20 - 1). sm_80.

    Exactly one thread must execute it; the default is thread 0 of the CTA. Other threads see it after a CTA barrier;
    copies and other CTAs after `fence_init` and a (cluster) barrier. PTX ISA "mbarrier.init".
    """
    require("mbarrier.init", 80)
    asm(issued("mbarrier.init.shared::cta.b64 [$0], $1;", issuer, arch()), "r,r", [bar, count])


def init_all_text(counts: Iterable[tuple[int, int]]) -> str:
    """PTX in which thread 0 of the CTA initialises arrays of mbarriers.

    Operand $i is the address of array i. `counts` holds (barriers, arrivals a phase) of each. One branch contains all
    of them: separate predicates take four times as many instructions, which delay a kernel's start (measured:
    docs/notes/launch.md). PTX ISA "mbarrier.init".
    """
    made = " ".join(
        f"mbarrier.init.shared::cta.b64 [${i}+{8 * k}], {count};"
        for i, (number, count) in enumerate(counts)
        for k in range(number)
    )
    return f"{{ .reg .pred others; .reg .b32 thread; mov.u32 thread, %tid.x; setp.ne.u32 others, thread, 0; @others bra MADE; {made} MADE: }}"  # noqa: E501


@triton.jit
def inval(bar, issuer: tl.constexpr = "cta"):
    """`mbarrier.inval`: ends the barrier's life, so that its 8 bytes can be reused. sm_80. PTX ISA "mbarrier.inval"."""
    require("mbarrier.inval", 80)
    asm(issued("mbarrier.inval.shared::cta.b64 [$0];", issuer, arch()), "r", [bar])


@triton.jit
def arrive(bar, count: tl.constexpr = 1, issuer: tl.constexpr = "warp"):
    """`mbarrier.arrive`: each issuing thread arrives `count` times (release, CTA scope). sm_80; `count` > 1: sm_90.

    The barrier's count must match: by default one arrival a warp. PTX ISA "mbarrier.arrive".
    """
    require("mbarrier.arrive", 80)
    asm(arrive_text(count, issuer, arch()), "r", [bar])


@triton.jit
def arrive_expect_tx(bar, nbytes, issuer: tl.constexpr = "warp"):
    """`mbarrier.arrive.expect_tx`: adds `nbytes` (i32) to the bytes of the phase, then arrives once, per issuing
    thread. sm_90.

    PTX ISA "mbarrier.arrive".
    """
    require("mbarrier.arrive.expect_tx", 90)
    asm(issued("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", issuer, arch()), "r,r", [bar, nbytes])


@triton.jit
def expect_tx(bar, nbytes, issuer: tl.constexpr = "warp"):
    """`mbarrier.expect_tx`: adds `nbytes` (i32) to the bytes of the current phase, without arriving. sm_90.

    PTX ISA "mbarrier.expect_tx".
    """
    require("mbarrier.expect_tx", 90)
    asm(issued("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", issuer, arch()), "r,r", [bar, nbytes])


@triton.jit
def test_wait(bar, phase, scope: tl.constexpr = "cta"):
    """`mbarrier.test_wait.parity` -> i32: 1 if the phase of parity `phase` has completed, else 0, without a wait.
    sm_80 (scope "cluster": sm_90).

    The result may differ between threads. PTX ISA "mbarrier.test_wait".
    """
    require("mbarrier.test_wait", 80)
    return asm(poll_text("test_wait", scope, arch(), 0), "=r,r,r", [bar, phase], tl.int32)


@triton.jit
def try_wait(bar, phase, scope: tl.constexpr = "cta", hint_ns: tl.constexpr = 0):
    """`mbarrier.try_wait.parity` -> i32: as `test_wait`, but the thread may sleep before it returns 0. sm_90.

    It sleeps about `hint_ns` nanoseconds at most, or with 0 up to the hardware's own limit. PTX ISA
    "mbarrier.try_wait".
    """
    require("mbarrier.try_wait", 90)
    return asm(poll_text("try_wait", scope, arch(), hint_ns), "=r,r,r", [bar, phase], tl.int32)


@triton.jit
def wait(bar, phase, scope: tl.constexpr = "cta"):
    """Waits until the phase of parity `phase` has completed: a loop around `mbarrier.try_wait` in every thread,
    without any other barrier.

    The arriving threads' earlier writes are visible after it (acquire; `scope` "cluster" where other CTAs arrive).
    sm_80 (there a loop around test_wait). It hangs if the phase never completes; `wait_or_trap` does not. PTX ISA
    "mbarrier.try_wait".
    """
    require("mbarrier.wait", 80)
    asm(wait_text(scope, arch()), "r,r", [bar, phase])


@triton.jit
def wait_or_trap(bar, phase, limit_ns: tl.constexpr = 2_000_000_000, scope: tl.constexpr = "cta"):
    """As `wait`, but executes `trap` (the launch fails with an error) after `limit_ns` nanoseconds of %globaltimer.
    sm_80."""
    require("mbarrier.wait_or_trap", 80)
    asm(wait_or_trap_text(limit_ns, scope, arch()), "r,r", [bar, phase])


@triton.jit
def arrive_remote(bar, cta, count: tl.constexpr = 1, issuer: tl.constexpr = "warp", scope: tl.constexpr = "cluster"):
    """`mapa`, then `mbarrier.arrive`: arrives at the barrier at the same place in the CTA of rank `cta` (i32) of the
    cluster.

    `scope` "cluster" orders this thread's memory accesses before the wait of the other CTA, which uses scope "cluster"
    too; on the H200 that is a fence of the whole GPU (MEMBAR.ALL.GPU) and a flush of L1. "cta" only counts. sm_90. PTX
    ISA "mbarrier.arrive", "mapa".
    """
    require("mbarrier.arrive_remote", 90)
    asm(arrive_remote_text(count, issuer, arch(), scope), "r,r", [bar, cta])


@triton.jit
def arrive_expect_tx_remote(bar, cta, nbytes, issuer: tl.constexpr = "warp"):
    """As `arrive_remote`, and adds `nbytes` (i32) to the bytes of that barrier's phase. sm_90. PTX ISA
    "mbarrier.arrive".
    """
    require("mbarrier.arrive_expect_tx_remote", 90)
    asm(arrive_expect_tx_remote_text(issuer, arch()), "r,r,r", [bar, cta, nbytes])


@triton.jit
def fence_init():
    """`fence.mbarrier_init.release.cluster`: makes earlier `init`s of this thread visible to the cluster and to the
    copy engine. sm_90.

    Every thread executes it; a CTA or cluster barrier follows. PTX ISA "membar / fence".
    """
    require("fence.mbarrier_init", 90)
    asm("fence.mbarrier_init.release.cluster;", "", [])


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


TIME_LIMIT_NS = 10_000_000  # of a try_wait without a hint: the hardware's own limit, which the PTX ISA leaves open


def _together(
    t: Machine, i: Instruction, addresses: Register, values: Register = 0
) -> Iterator[tuple[MBarrier, int, int]]:
    """(barrier, number of threads, sum of their values) for each barrier that the active threads name."""
    totals: dict[int, list[int]] = {}
    for address, value in zip(lanes(addresses, i.active), lanes(values, i.active)):
        total = totals.setdefault(address, [0, 0])
        total[0] += 1
        total[1] += value
    for address, (threads, total_of_values) in totals.items():
        yield t.barrier(address), threads, total_of_values


_SPACE = "{space:shared|shared::cta|shared::cluster}?"
_ORDER = "{order:release|relaxed}?.{scope:cta|cluster}?"


def _remote(i: Instruction) -> bool:
    return i.fields["space"] == "shared::cluster"


@meaning(f"mbarrier.init.{_SPACE}.b64", destinations=0)
def _init(t: Machine, i: Instruction, addresses: Register, count: Register) -> None:
    for address, threads in zip(lanes(addresses, i.active), lanes(count, i.active)):
        t.barrier(address).init(threads)


@meaning(f"mbarrier.inval.{_SPACE}.b64", destinations=0)
def _inval(t: Machine, i: Instruction, addresses: Register) -> None:
    for address in lanes(addresses, i.active):
        t.barrier(address).invalidate()


def _no_state(i: Instruction) -> None:
    if i.destination_bits != (0,):
        raise NoMeaning("an arrival that returns the phase's state: write _ and wait for the parity")


@meaning(f"mbarrier.arrive.{_ORDER}.{_SPACE}.b64")
def _arrive(t: Machine, i: Instruction, addresses: Register, count: Register = 1) -> None:
    _no_state(i)
    for barrier, _, arrivals in _together(t, i, addresses, count):
        barrier.arrive(arrivals, _remote(i))


@meaning(f"mbarrier.arrive.expect_tx.{_ORDER}.{_SPACE}.b64")
def _arrive_expect_tx(t: Machine, i: Instruction, addresses: Register, nbytes: Register) -> None:
    _no_state(i)
    for barrier, threads, total in _together(t, i, addresses, nbytes):
        barrier.expect(total)
        barrier.arrive(threads, _remote(i))


@meaning(f"mbarrier.expect_tx.{_ORDER}.{_SPACE}.b64", destinations=0)
def _expect_tx(t: Machine, i: Instruction, addresses: Register, nbytes: Register) -> None:
    for barrier, _, total in _together(t, i, addresses, nbytes):
        barrier.expect(total)


@meaning(f"mbarrier.complete_tx.{_ORDER}.{_SPACE}.b64", destinations=0)
def _complete_tx(t: Machine, i: Instruction, addresses: Register, nbytes: Register) -> None:
    for barrier, _, total in _together(t, i, addresses, nbytes):
        barrier.complete(total)


@meaning(f"mbarrier.{{kind:test_wait|try_wait}}.parity.{{order:acquire|relaxed}}?.{{scope:cta|cluster}}?.{_SPACE}.b64")
def _wait_meaning(t: Machine, i: Instruction, addresses: Register, parity: Register, hint_ns: Register = 0) -> Waits:
    """Wait for a phase. A try_wait sleeps until the phase completes or its time is over.

    In a loop that does nothing else, the time limit is dropped, because it makes no difference. The machine then sees
    a phase that never completes as a deadlock. test_wait in such a loop behaves alike; elsewhere it returns at once.
    """
    done = np.zeros(i.active.shape, bool)
    pairs = list(zip(i.threads, lanes(addresses, i.active), lanes(parity, i.active)))
    for address, phase in dict.fromkeys((address, phase) for _, address, phase in pairs):
        barrier: MBarrier = t.barrier(address)
        if i.spins or i.fields["kind"] == "try_wait":
            wait = barrier.wait(phase, None if i.spins else max(lanes(hint_ns, i.active)) or TIME_LIMIT_NS)
            if wait is not None:
                yield wait
        done[[thread for thread, at, of in pairs if (at, of) == (address, phase)]] = barrier.completed(phase)
    return done
