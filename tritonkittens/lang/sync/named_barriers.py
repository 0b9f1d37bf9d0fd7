"""Named barriers of a CTA. Source: PTX ISA, barrier.sync, barrier.arrive."""

from __future__ import annotations

from tritonkittens.inline_ptx import barrier as ptx_barrier
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError


@op
def named_sync(t: Trace, identifier: Traced, threads: Traced) -> None:
    """Wait at named barrier `identifier` until `threads` threads have arrived.

    Args:
        identifier: 8 … 15; the compiler uses the lower ones.
        threads: arrivals that complete the barrier, a multiple of 32 up to 1024.

    Raises:
        TileError: for another number of threads or barrier.

    Source: PTX ISA, barrier.sync.
    """
    _check_named(identifier, threads)
    t.call(ptx_barrier.sync, unwrap(identifier), unwrap(threads))


@op
def named_arrive(t: Trace, identifier: Traced, threads: Traced) -> None:
    """Arrive at a named barrier without waiting. Arguments and errors as in `named_sync`. Source: PTX ISA,
    barrier.arrive.
    """
    _check_named(identifier, threads)
    t.call(ptx_barrier.arrive, unwrap(identifier), unwrap(threads))


def _check_named(identifier: Traced, threads: Traced) -> None:
    identifier, threads = unwrap(identifier), unwrap(threads)
    if isinstance(identifier, int) and not 8 <= identifier <= 15:
        raise TileError(
            f"named barrier {identifier}: must be 8 to 15 (the hardware has 16, the compiler uses the lower half)"
        )
    if not isinstance(threads, int) or threads % 32 or not 32 <= threads <= 1024:
        raise TileError(f"named barrier of {threads!r} threads: must be a multiple of 32 up to 1024")
