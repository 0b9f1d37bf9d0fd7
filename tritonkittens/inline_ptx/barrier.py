"""CTA barriers by number, warp barriers and fences (PTX ISA, "bar / barrier", "bar.warp.sync", "membar / fence").

A CTA has 16 named barriers. Triton uses 0 for the whole program and 1 .. 1 + partitions for the warps of each
partition, so take high numbers.
"""

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, arch, asm, has_clusters, require
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Register, Waits, meaning, uniform, warps

_SCOPES = ("cta", "cluster", "gpu", "sys")


@constexpr_function
def named_text(verb: str, number: int, threads: int) -> str:
    """`number` and `threads` as immediates: only then does ptxas know how many barriers the kernel uses."""
    if not 0 <= number <= 15:
        raise OperandError(f"barrier.{verb}(number={number}): barriers are numbered 0 to 15")
    if not (32 <= threads <= 1024 and threads % 32 == 0):
        raise OperandError(
            f"barrier.{verb}(threads={threads}): a multiple of 32 up to 1024, counting those that arrive and those "
            "that wait"
        )
    return f"bar.{verb} {number}, {threads};"


@constexpr_function
def reduce_text(operation: str, number: int, threads: int) -> str:
    if operation not in ("popc", "and", "or"):
        raise OperandError(f"barrier.reduce(operation={operation!r}): 'popc', 'and' or 'or'")
    named_text("sync", number, threads)
    head = "{ .reg .pred vote; setp.ne.s32 vote, $1, 0; "
    if operation == "popc":
        return head + f"bar.red.popc.u32 $0, {number}, {threads}, vote; }}"
    return head + f".reg .pred all; bar.red.{operation}.pred all, {number}, {threads}, vote; selp.b32 $0, 1, 0, all; }}"


@constexpr_function
def fence_text(semantics: str, scope: str, sm: int) -> str:
    if semantics not in ("acq_rel", "sc"):
        raise OperandError(f"barrier.fence(semantics={semantics!r}): 'acq_rel' or 'sc'")
    if scope not in _SCOPES:
        raise OperandError(f"barrier.fence(scope={scope!r}): one of {', '.join(_SCOPES)}")
    if scope == "cluster" and not has_clusters(sm):
        raise OperandError(
            f"barrier.fence(scope='cluster'): clusters need sm_90 or newer; this kernel is compiled for sm_{sm}"
        )
    return f"fence.{semantics}.{scope};"


@triton.jit
def sync(number: tl.constexpr, threads: tl.constexpr):
    """`bar.sync`: waits until `threads` threads (a multiple of 32) have arrived at barrier `number` (0 to 15), this
    one included.

    Whole warps arrive: every thread of the program or partition executes it. Earlier memory accesses are visible
    after it, within the CTA. Any architecture. PTX ISA "bar".
    """
    asm(named_text("sync", number, threads), "", [])


@triton.jit
def arrive(number: tl.constexpr, threads: tl.constexpr):
    """`bar.arrive`: arrives at barrier `number` without waiting. `threads` is the same total as in the matching
    `sync`.

    Any architecture. PTX ISA "bar".
    """
    asm(named_text("arrive", number, threads), "", [])


@triton.jit
def reduce(vote, number: tl.constexpr, threads: tl.constexpr, operation: tl.constexpr = "popc"):
    """`bar.red` -> i32: as `sync`, with a vote over all `threads` threads.

    Every thread receives the number of threads with a nonzero `vote` (i32) for "popc", or whether all ("and") or any
    ("or") are nonzero. Any architecture. PTX ISA "bar".
    """
    return asm(reduce_text(operation, number, threads), "=r,r", [vote], tl.int32)


@triton.jit
def syncwarp(mask: tl.constexpr = 0xFFFFFFFF):
    """`bar.warp.sync`: waits for the lanes in `mask` (32 bits) of this warp. Any architecture. PTX ISA
    "bar.warp.sync"."""
    asm("bar.warp.sync $0;", "r", [mask])


@triton.jit
def fence(semantics: tl.constexpr = "acq_rel", scope: tl.constexpr = "gpu"):
    """`fence.acq_rel` or `fence.sc` at `scope` "cta", "cluster" (sm_90), "gpu" or "sys". sm_80 here. PTX ISA "membar /
    fence"."""
    require("fence", 80)
    asm(fence_text(semantics, scope, arch()), "", [])


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


def _coming(t: Machine, i: Instruction, number: Register, threads: Register | None) -> tuple[int, int | None, int]:
    """Return (barrier, all threads or None, arriving threads of this role). Barriers count whole warps."""
    total = None if threads is None else uniform(threads, i.active, "the number of threads of a barrier")
    return uniform(number, i.active, "the number of a barrier"), total, 32 * sum(1 for _ in warps(t, i.active))


_HEAD = ("bar.{cta:cta}?", "barrier.{cta:cta}?")


@meaning(*(f"{head}.{{verb:sync|arrive}}.{{aligned:aligned}}?" for head in _HEAD), destinations=0)
def _sync_meaning(t: Machine, i: Instruction, number: Register, threads: Register = None) -> Waits:
    number, total, arriving = _coming(t, i, number, threads)
    wait = t.named_barrier(number, total, arriving, i.fields["verb"] == "arrive")
    if wait is not None:
        yield wait


@meaning(*(f"{head}.red.{{operation:popc|and|or}}.{{aligned:aligned}}?.{{type:u32|pred}}" for head in _HEAD))
def _reduce_meaning(t: Machine, i: Instruction, number: Register, *rest: Register) -> Waits:
    *threads, vote = rest
    yes = int(np.count_nonzero(np.broadcast_to(np.asarray(vote, bool), i.active.shape) & i.active))
    number, total, arriving = _coming(t, i, number, threads[0] if threads else None)
    wait = t.named_barrier(number, total, arriving, False, yes)
    if wait is not None:
        yield wait
    yes, voters = t.barrier_votes(number)
    return {"popc": yes, "and": yes == voters, "or": yes > 0}[i.fields["operation"] or ""]


@meaning("fence.{kind}*", destinations=0)
def _fence_meaning(t: Machine, i: Instruction, address: Register = None, nbytes: Register = None) -> None:
    t.fence((i.fields["kind"] or "").removeprefix("."), i.active)


@meaning("membar.{scope:cta|gl|sys}", destinations=0)
def _membar_meaning(t: Machine, i: Instruction) -> None:
    t.fence({"cta": "sc.cta", "gl": "sc.gpu", "sys": "sc.sys"}[i.fields["scope"] or ""], i.active)
