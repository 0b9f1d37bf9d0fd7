"""Warp roles: parts of a CTA that run different code, and the register budget of each."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.arch import REGISTERS, WARP
from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import registers as ptx_registers
from tritonkittens.lang.core.backend import JITFunction, Trace, Traced, gl, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.resources import bill, check_registers
from tritonkittens.lang.sync.cluster import CLUSTER_OF_ROLES
from tritonkittens.lang.sync.semaphores import publish
from tritonkittens.lang.types.tiles import split

MAX_WORKERS = 13  # roles besides the first that Triton's lowering can dispatch


def producer_registers(consumers: int) -> int:
    """Return the registers of a producer thread next to `consumers` consumer warpgroups: 24, or 32 for three
    consumers, which leave a remainder.
    """
    return 32 if consumers == 3 else 24


def consumer_registers(consumers: int, blocks_per_sm: int = 1) -> int:
    """Return the registers of a consumer thread, where one producer warpgroup runs next to `consumers` consumer
    warpgroups.

    `blocks_per_sm` CTAs share the register file. With one: 240 for one or two consumers, 160 for three, 120
    for four.
    """
    warpgroups = REGISTERS // blocks_per_sm // (4 * WARP)  # registers of a thread if the block had one warpgroup
    return min(240, (warpgroups - producer_registers(consumers)) // consumers // 8 * 8)


@op
def specialize(t: Trace, roles: Traced, warps: Traced, registers: Traced = None, cluster_sync: Traced = False) -> None:
    """Run several warp roles at the same time. The kernel waits for all of them at the end.

    Args:
        roles: pairs of a `@triton.jit` function and its arguments, written in place (not bound to a variable first).
        warps: the warps of each role. The first role runs on the kernel's own warps.
        registers: the registers that each role requests per thread. Hardware moves registers between whole
            warpgroups.
        cluster_sync: synchronise all roles of all CTAs of the cluster (`cluster_size=` at launch) before and after.
            So the other CTAs' semaphores exist when a role begins, and their shared memory still exists when it
            ends. `tk.cluster_sync` is refused in such a kernel, because its barrier counts the warps of all roles.

    Roles see all earlier writes to shared memory.

    Raises:
        TileError: where the roles exceed the register file or the warps of a CTA.

    Example::

        tk.specialize(((consumer, (a, pipe)), (producer, (a, pipe, A))), warps=(4, 1), registers=(240, 24))
    """
    t.require_explicit("specialize")
    publish(t)
    start_roles(t, roles, warps, registers, bool(unwrap(cluster_sync)))


@triton.jit
def _meet():
    ptx_cluster.arrive()
    ptx_cluster.wait()


@triton.jit
def _bystander():
    """An empty role for the warps that complete a warpgroup: the barrier of a cluster counts every launched warp."""


class _InCluster:
    """A code generator that adds a cluster barrier before and after each role's function."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def call_JitFunction(
        self, fn: JITFunction, args: list[Traced], kwargs: dict[str, Traced], **context: Any
    ) -> Traced:
        self.generator.call_JitFunction(_meet, [], {}, **context)
        result = self.generator.call_JitFunction(fn, args, kwargs, **context)
        self.generator.call_JitFunction(_meet, [], {}, **context)
        return result


def start_roles(t: Trace, roles: Traced, warps: Traced, registers: Traced, cluster_sync: bool = False) -> None:
    """`specialize` for a kernel that has written nothing to shared memory since a fence."""
    t.require("warp roles (setmaxnreg)", "tma")
    warps, registers = unwrap(warps), unwrap(registers)
    pairs = [(pair[0], pair[1]) for pair in roles]
    if len(warps) != len(pairs) or (registers is not None and len(registers) != len(pairs)):
        raise TileError(
            f"specialize: {len(pairs)} roles need as many warps and registers, got warps={warps}, registers={registers}"
        )
    if warps[0] != t.num_warps:
        raise TileError(
            f"specialize(warps={warps}): the first role runs on the kernel's own {t.num_warps} warps "
            f"(@tk.kernel(num_warps=…)); name a role of {t.num_warps} warps first"
        )
    if bill().cluster_synced and len(pairs) > 1:
        raise TileError(f"cluster_sync before roles: {CLUSTER_OF_ROLES}")
    if cluster_sync:
        idle = split(-sum(warps[1:]) % 4)  # a role has a power of two of warps
        pairs += [(_bystander, ())] * len(idle)
        warps = (*warps, *idle)
        registers = (*registers, *registers[-1:] * len(idle)) if registers is not None else None
    if len(pairs) - 1 > MAX_WORKERS:
        raise TileError(f"specialize: {len(pairs)} roles; at most {MAX_WORKERS + 1} are possible")
    total = warps[0] + -(-sum(warps[1:]) // 4) * 4
    if total > 32:
        raise TileError(
            f"specialize(warps={warps}): {total} warps with workers rounded up to warpgroups; a block has at most 32"
        )
    if registers is not None:
        check_registers(warps, registers)
    functions = [(unwrap(fn), tl.tuple([a for a in args])) for fn, args in pairs]
    generator = _InCluster(t.generator) if cluster_sync else t.generator
    bill().roles = "inside"
    bill().warpgroup_roles = sum(w % WARPS == 0 for w in warps)
    Trace(t.semantic, generator).call(
        gl.warp_specialize, functions, list(warps[1:]), list(registers[1:]) if registers is not None else None
    )
    bill().roles, bill().warpgroup_roles = "after", 1


@op
def increase_registers(t: Trace, count: Traced) -> None:
    """Raise this warpgroup's registers to `count` a thread (a multiple of 8, 24 … 256). Every warp of the warpgroup
    calls it.

    `specialize` does it by itself. Raises `TileError` for another count. Source: PTX ISA, setmaxnreg.inc.
    """
    t.require("increase_registers (setmaxnreg)", "tma")
    _check_count(count)
    t.call(ptx_registers.inc, unwrap(count))


@op
def decrease_registers(t: Trace, count: Traced) -> None:
    """Lower this warpgroup's registers to `count` a thread (a multiple of 8, 24 … 256). Every warp of the warpgroup
    calls it.

    Raises `TileError` for another count. Source: PTX ISA, setmaxnreg.dec.
    """
    t.require("decrease_registers (setmaxnreg)", "tma")
    _check_count(count)
    t.call(ptx_registers.dec, unwrap(count))


def _check_count(count: Traced) -> None:
    count = unwrap(count)
    if not isinstance(count, int) or count % 8 or not 24 <= count <= 256:
        raise TileError(f"registers: {count!r} must be a multiple of 8 from 24 to 256 (setmaxnreg)")


__all__ = [
    "REGISTERS",
    "WARP",
    "consumer_registers",
    "decrease_registers",
    "increase_registers",
    "producer_registers",
    "specialize",
]
