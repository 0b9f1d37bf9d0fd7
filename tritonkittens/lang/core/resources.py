"""The resources of one CTA, and the itemised bill of a kernel's requests.

Tracing a kernel fills the bill; the checks run before the launch.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

from tritonkittens.arch import LANES, REGISTERS, TENSOR_COLUMNS, WARP, chip_of
from tritonkittens.lang.core.errors import BudgetError, TileError


def tensor_columns(blocks_per_sm: int) -> int:
    """Columns of tensor memory of a CTA. It allocates a power of two (PTX ISA, tcgen05.alloc)."""
    return 1 << (TENSOR_COLUMNS // blocks_per_sm).bit_length() - 1


@dataclass
class Bill:
    """Requested shared memory and tensor memory, by item, and the bytes of asynchronous copies traced since the last
    check.
    """

    arch: int
    shared: list[tuple[str, int]] = field(default_factory=list)
    tmem: list[tuple[str, int]] = field(default_factory=list)
    multiplies_through_tmem: bool = True  # whether products with register accumulators may use tensor memory
    makes_barriers: bool = False  # whether products wait for barriers of their own
    reads_tensor_a: bool = False  # whether products in flight may read A from tensor memory
    warpgroup_roles: int = 1  # roles that may multiply at the same time
    blocks_per_sm: int = 1
    mma_sync: list[str] = field(default_factory=list)  # products that tcgen05 cannot compute, with the reasons
    pairs: bool | None = None  # whether tensor memory is of CTA pairs; None before there is any
    copied: int = 0
    stored: int = 0  # copies of TMA stores
    stored_bytes: int = 0
    released: int = 0  # pipeline stages that a template's hooks release
    awaited: int = 0  # pipeline stages for which they wait
    task_released: int = 0  # releases of task tiles by hooks
    late_task_released: int = 0
    reduces_committed: int = 0  # reduce buffers that hooks of a template commit
    reduces_acquired: int = 0
    reduces_awaited: int = 0  # by hook `reduce_store`
    reads_shared: int = 0  # reads of shared memory by threads themselves (ld.shared, ldmatrix)
    # whether hooks that use pipeline stages read any; None before the first of these hooks
    reads_ring: bool | None = None
    cluster_synced: bool = False  # whether the whole block synchronised the cluster before any roles
    roles: str = ""  # "inside" while roles are traced, "after" afterwards
    by_hook: dict[str, int] = field(default_factory=dict)  # counts of each hook of a template, from its tracing

    def charge_shared(self, what: str, nbytes: int) -> None:
        """Add an allocation. Raises `BudgetError` with the itemised bill where the CTA's shared memory is
        exceeded."""
        self.shared.append((what, nbytes))
        total, limit = sum(n for _, n in self.shared), chip_of(self.arch).shared_per_block
        if total > limit:
            raise BudgetError(
                f"shared memory over budget: {total} bytes of {limit} on sm_{self.arch}: "
                + _items(self.shared, "bytes")
            )

    def charge_tmem(self, what: str, columns: int) -> None:
        """Add a tensor-memory allocation. Raises `BudgetError` with the itemised bill beyond the columns of a CTA."""
        self.tmem.append((what, columns))
        total, limit = sum(n for _, n in self.tmem), tensor_columns(self.blocks_per_sm)
        if total > limit:
            share = f" of each of {self.blocks_per_sm} blocks on an SM" if self.blocks_per_sm > 1 else ""
            raise BudgetError(
                f"tensor memory over budget: {total} columns of {limit}{share}: " + _items(self.tmem, "columns")
            )

    def temporary_columns(self, rows: int) -> int:
        """The columns of tensor memory that a role may use for products with register accumulators of so many rows.
        Tiles of 64 rows of two roles share columns."""
        if not self.multiplies_through_tmem:
            return 0
        left = tensor_columns(self.blocks_per_sm) - sum(n for _, n in self.tmem)
        return max(0, left) // -(-self.warpgroup_roles * rows // LANES)


def shared_over_budget(name: str, used: int, arch: int, asked: list[tuple[str, int]], advice: str) -> BudgetError:
    """Return the error of a compiled kernel with `used` bytes of shared memory: `asked` of them for tiles and
    semaphores, the rest for the compiler.
    """
    items = _items(asked, "bytes") or "no tiles"
    return BudgetError(
        f"{name}: shared memory over budget: {used} bytes of {chip_of(arch).shared_per_block} on sm_{arch}: {items}; "
        f"the rest is scratch of the compiler for layout conversions{advice}"
    )


def _items(items: list[tuple[str, int]], unit: str) -> str:
    return "; ".join(f"{what} {n} {unit}" for what, n in items)


_current: contextvars.ContextVar[Bill | None] = contextvars.ContextVar("bill", default=None)


@contextlib.contextmanager
def billing(arch: int, multiplies_through_tmem: bool = True) -> Iterator[Bill]:
    """Provide the bill of the kernel that is traced inside this context."""
    bill = Bill(arch, multiplies_through_tmem=multiplies_through_tmem)
    token = _current.set(bill)
    try:
        yield bill
    finally:
        _current.reset(token)


def bill() -> Bill:
    """Return the bill of the traced kernel (a temporary one outside `billing`)."""
    return _current.get() or Bill(90)


def check_registers(warps: tuple[int, ...], registers: tuple[int, ...]) -> None:
    """Refuse roles that do not fit the register file.

    Args:
        warps: the warps of each role; the first is the kernel's own.
        registers: the registers that each role requests per thread.

    Raises:
        TileError: for registers that are no multiple of 8 from 24 to 256, or a role without warps.
        BudgetError: where the roles exceed the register file.

    Hardware assigns registers to whole warpgroups, so worker warps round up to multiples of four. Source: PTX ISA,
    setmaxnreg.
    """
    for w, r in zip(warps, registers, strict=True):
        if r % 8 or not 24 <= r <= 256:
            raise TileError(f"registers={registers}: {r} must be a multiple of 8 from 24 to 256 (setmaxnreg)")
        if w < 1:
            raise TileError(f"warps={warps}: every role needs at least one warp")
    # Workers smaller than a warpgroup share one; a shared warpgroup takes the largest request
    groups = [(w, r) for w, r in zip(warps, registers, strict=True) if w % 4 == 0]
    small = [(w, r) for w, r in zip(warps, registers, strict=True) if w % 4]
    if small:
        groups.append((-(-sum(w for w, _ in small) // 4) * 4, max(r for _, r in small)))
    used = sum(w * WARP * r for w, r in groups)
    if used > REGISTERS:
        lines = "; ".join(f"{w} warps × {WARP} × {r} = {w * WARP * r}" for w, r in groups)
        raise BudgetError(f"registers over budget: {used} of {REGISTERS}: {lines}")
