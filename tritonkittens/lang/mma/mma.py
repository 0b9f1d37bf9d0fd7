"""Matrix products of tiles: D = A·B + C with either operand transposed, on the tensor-core unit that the operands
select.

The accumulator (or `into` of a plain product) selects the unit. A plain Triton tile takes `tl.dot`. A register tile
of whole warpgroups takes wgmma (B from shared memory, A from shared memory or registers), or on chips with tensor
memory tcgen05, through temporary tensor memory (64 or 128 rows). Other register tiles take mma.sync. A tensor-memory
tile takes tcgen05 (B from shared memory, A from shared or tensor memory).
Shapes: AB (M×K, K×N), ABt (M×K, N×K), AtB (K×M, K×N) and AtBt (K×M, N×K) give M×N.
Dtypes: bf16, fp16, fp8 (e4m3 and e5m2 mix) and tf32 (fp32 operands) accumulate in fp32. fp16 also accumulates in fp16
where the accumulator is an fp16 register tile. int8 accumulates in int32.
Source: PTX ISA, wgmma.mma_async, mma.sync, tcgen05.mma.
"""

from __future__ import annotations

from collections.abc import Callable

import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, hopper, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import axes_of, pieces_of, shape_of
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma import block_scaled, registers, tcgen05, through_tensor_memory, wgmma
from tritonkittens.lang.mma.fp8_a_operand import packed_bytes
from tritonkittens.lang.mma.operands import Product, check, check_places, describe, extents
from tritonkittens.lang.mma.pending import pending
from tritonkittens.lang.register.construction import transpose, zero
from tritonkittens.lang.sync.semaphores import semaphore


def _product(
    t: Trace,
    name: str,
    a: Traced,
    b: Traced,
    acc: Traced,
    transposed: tuple[bool, bool],
    add: Traced = True,
    scales: Traced = None,
) -> Product:
    """Return the product of operands, checked where they have no scales. `add`: the values in `acc` count."""
    a, b, acc, add = unwrap(a), unwrap(b), unwrap(acc), unwrap(add)
    if not isinstance(add, bool) and not isinstance(acc, tensor_tile):
        raise TileError(
            f"{name}(accumulate={add!r}): only a product into tensor memory may decide at run time whether it adds; "
            "otherwise accumulate is True or False"
        )
    check_places(name, a, b, acc, transposed)
    if isinstance(a, packed_bytes) and (transposed[0] or isinstance(acc, tensor_tile)):
        raise TileError(
            f"{name}: A is {describe(a)} as 8-bit wgmma reads it (byte_operand): it is M×K, and the accumulator lies "
            "in registers"
        )
    m_by_k = t.call(transpose, a) if transposed[0] else a
    k_by_n = t.call(transpose, b) if transposed[1] else b
    if scales is None or unwrap(scales) is None:
        check(name, m_by_k, k_by_n, acc)
        return Product(name, m_by_k, k_by_n, acc, a, b, transposed, add)
    found = tuple(scales) if isinstance(scales, (tuple, list, tl.tuple)) else (scales,)
    return Product(name, m_by_k, k_by_n, acc, a, b, transposed, add, found)


def _compute(t: Trace, product: Product, wait: bool, arrived: tuple[semaphore, ...] = ()) -> Traced:
    """Compute a product on the unit that its accumulator selects."""
    if product.scales:
        return block_scaled.multiply(t, product, wait, arrived)
    if not t.explicit:
        return registers.dot(t, product)
    if isinstance(product.acc, tensor_tile):
        return tcgen05.multiply(t, product, wait, arrived)
    t.require_capability(f"{product.name} (mma.sync)", 80)
    if wgmma.takes_warpgroups(t, product.acc, extents(product.a)[0], extents(product.b)[1]):
        return wgmma.multiply(t, product, wait)
    if through_tensor_memory.takes(t, product):
        return through_tensor_memory.multiply(t, product)
    return registers.mma_sync(t, product)


def _semaphores(name: str, arrived: Traced, acc: Traced) -> tuple[semaphore, ...]:
    """Return the semaphores on which a product completes."""
    if arrived is None or unwrap(arrived) is None:
        return ()
    if not isinstance(acc, tensor_tile):
        raise TileError(
            f"{name}(arrived=…): only a product into tensor memory completes on a semaphore; use wait=False "
            "and mma_wait"
        )
    found = tuple(arrived) if isinstance(arrived, (tuple, list, tl.tuple)) else (arrived,)
    if not all(isinstance(bar, semaphore) for bar in found):
        raise TileError(f"{name}(arrived=…): takes a semaphore, or a tuple of semaphores")
    return found


def _family(suffix: str, transposed: tuple[bool, bool]) -> tuple[Callable[..., Traced], Callable[..., Traced]]:
    a, b = "KM" if transposed[0] else "MK", "NK" if transposed[1] else "KN"
    shapes = f"A is {a[0]}×{a[1]}, B is {b[0]}×{b[1]}"

    def mma(
        t: Trace,
        a: Traced,
        b: Traced,
        acc: Traced,
        wait: Traced = True,
        arrived: Traced = None,
        accumulate: Traced = True,
        scales: Traced = None,
    ) -> Traced:
        name = f"mma_{suffix}"
        semaphores = _semaphores(name, arrived, acc)
        return _compute(t, _product(t, name, a, b, acc, transposed, accumulate, scales), unwrap(wait), semaphores)

    def mm(
        t: Trace,
        a: Traced,
        b: Traced,
        wait: Traced = True,
        into: Traced = None,
        arrived: Traced = None,
        scales: Traced = None,
    ) -> Traced:
        name = f"mm_{suffix}"
        semaphores = _semaphores(name, arrived, into)
        product = _product(t, name, a, b, into, transposed, unwrap(into) is None, scales)
        return _compute(t, product, unwrap(wait), semaphores)

    mma.__name__ = mma.__qualname__ = f"mma_{suffix}"
    mma.__doc__ = (
        f"Compute acc + the product of two tiles ({shapes}; acc and the result are M×N).\n\n"
        "Args:\n    a: a shared or register tile; tcgen05 also reads tensor memory.\n"
        "    b: a shared tile; `tl.dot` and mma.sync also read registers.\n"
        "    acc: the accumulator, a register tile or a tile of tensor memory: int32 for int8 operands, else "
        "fp32, or for fp16 also fp16 in registers.\n"
        "    wait: False leaves a wgmma product in flight; the result goes to `mma_wait`.\n"
        "    arrived: the semaphore (or a tuple of them) on which a product into tensor memory completes, instead of a "
        "wait.\n"
        "    accumulate: False: the product overwrites `acc`, values and NaN included. For a product into tensor "
        "memory also a truth value of the run time.\n"
        "    scales: the scales of A and of B, a pair of `scale_tile`s in shared memory: a block-scaled product of 128 "
        "rows into tensor memory, whose operands are 8-bit floats, or 4-bit floats in bytes (fp4e2m1x2, mma_ABt "
        "only).\n\n"
        "Returns:\n    The new accumulator; do not use `acc` afterwards. Synchronous units ignore `wait`.\n\n"
        "Raises:\n    TileError: for shapes, dtypes or memories that do not fit.\n\n"
        f"Example::\n\n    acc = tk.mma_{suffix}(a, b, acc)"
    )
    mm.__name__ = mm.__qualname__ = f"mm_{suffix}"
    mm.__doc__ = (
        f"Compute the product of two tiles ({shapes}; the result is M×N).\n\n"
        f"Args:\n    a: as in `mma_{suffix}`.\n    b: as in `mma_{suffix}`.\n"
        f"    wait: as in `mma_{suffix}`.\n"
        "    into: an accumulator that the product overwrites, values and NaN included; new registers without one.\n"
        f"    arrived: as in `mma_{suffix}`, for `into` in tensor memory.\n"
        f"    scales: as in `mma_{suffix}`.\n\n"
        "Returns:\n    A register tile of the accumulation dtype, or `into` with the product; do not use the old "
        "`into` afterwards.\n\n"
        "Raises:\n    TileError: for shapes, dtypes or memories that do not fit."
    )
    return op(mma), op(mm)


mma_AB, mm_AB = _family("AB", (False, False))
mma_ABt, mm_ABt = _family("ABt", (False, True))
mma_AtB, mm_AtB = _family("AtB", (True, False))
mma_AtBt, mm_AtBt = _family("AtBt", (True, True))
FAMILIES = tuple(f"{kind}_{suffix}" for kind in ("mma", "mm") for suffix in ("AB", "ABt", "AtB", "AtBt"))


def _is_unfinished(tile: Traced) -> bool:
    """Whether products into a tile may be in flight that this role waits for."""
    return isinstance(tile, tensor_tile) and not tile.is_completed_by_template and not tile.complete


@op
def mma_wait(t: Trace, *products: Traced, leave: Traced = ()) -> Traced:
    """Wait for products in flight and return their tiles.

    Args:
        products: results of `mma_*` and `mm_*` calls. A synchronous product is returned unchanged.
        leave: products issued later (one or a tuple) that may stay in flight.

    Returns:
        One tile, or a tuple of tiles for several products.

    For a product into tensor memory, the role waits for all its products there; those into the accumulators of a
    template are left to the template. Source: PTX ISA, wgmma.wait_group,
    tcgen05.commit.
    """
    if any(_is_unfinished(p) for p in products):
        tcgen05.finish(t)
    waiting = [p for p in products if isinstance(p, pending)]
    later = [p for p in (leave if isinstance(leave, (tuple, list, tl.tuple)) else (leave,)) if isinstance(p, pending)]
    done = iter(wgmma.wait_for(t, waiting, sum(p.groups for p in later)) if waiting else [])
    out = [next(done) if isinstance(p, pending) else p for p in products]
    return out[0] if len(out) == 1 else tl.tuple(out)


def _begun(t: Trace, acc: Traced, dtype: Traced, value: Callable[[Traced, Traced], Traced]) -> Traced:
    """Return `acc` as an accumulator in flight, where the unit has such: for each piece `value(piece, layout)`, in
    the layout for operands of type `dtype`.
    """
    if not t.explicit or isinstance(acc, (pending, tensor_tile)) or not wgmma.takes_warpgroups(t, acc, *shape_of(acc)):
        return acc
    bits = wgmma.STANDARD_BITS if unwrap(dtype) is None else unwrap(dtype).primitive_bitwidth
    parts = tuple(
        t.call(hopper.warpgroup_mma_init, value(p, wgmma.for_operands(p.type.layout, bits))) for p in pieces_of(acc)
    )
    return pending(axes_of(acc), parts, (), 0)


@op
def mma_begin(t: Trace, acc: Traced, dtype: Traced = None) -> Traced:
    """Turn a tile into an accumulator for products that stay in flight across loop iterations; see `mma_retire`.

    Args:
        acc: a register tile (M × N). Other units than wgmma return it unchanged.
        dtype: the operands' dtype, if it is not 16 bits wide.

    Example::

        acc = tk.mma_begin(acc)
        for i in range(n):
            acc = tk.mma_retire(tk.mma_ABt(a[i % 2], b[i % 2], acc, wait=False))
        acc = tk.mma_wait(acc)
    """
    return _begun(t, acc, dtype, t.convert)


@op
def mma_zero(t: Trace, home: Traced, dtype: Traced = None) -> Traced:
    """Return an accumulator of zeros for products in flight, as `mma_begin(zero(home), dtype)` does, but faster for
    8-bit operands.

    Args:
        home: a register tile type, or a tile of tensor memory.
        dtype: the operands' dtype, if it is not 16 bits wide.

    With `mma_begin(zero(home), dtype)`, the compiler cannot see that the first 8-bit product need not read the
    accumulator. Where that product is several instructions (128 rows), all but the first then wait for zeros in
    registers.
    """
    return _begun(
        t,
        t.call(zero, home),
        dtype,
        lambda piece, layout: t.full(tuple(unwrap(n) for n in piece.shape), 0, piece.dtype, layout),
    )


@op
def mma_retire(t: Trace, acc: Traced) -> Traced:
    """Wait until only the newest product into `acc` is in flight. The shared tiles of older products may then be
    overwritten.

    `acc` stays an accumulator in flight; `mma_wait` ends the chain. The newest product must read A from shared
    memory. For tensor memory, the wait includes the newest product.
    Raises `TileError` where the newest product reads A from registers. Source: PTX ISA, wgmma.wait_group.
    """
    if _is_unfinished(acc):
        tcgen05.finish(t)
    if not isinstance(acc, pending):
        return acc
    if acc.kept:
        raise TileError(
            "mma_retire: the newest product reads A from registers, which must stay untouched; wait for it with "
            "mma_wait"
        )
    done = t.call(hopper.warpgroup_mma_wait, acc.groups, deps=list(acc.parts))
    parts = tuple(t.call(hopper.warpgroup_mma_init, p) for p in (list(done) if len(acc.parts) > 1 else [done]))
    return pending(acc.axes, parts, (), 0)


__all__ = [
    "mm_AB",
    "mm_ABt",
    "mm_AtB",
    "mm_AtBt",
    "mma_AB",
    "mma_ABt",
    "mma_AtB",
    "mma_AtBt",
    "mma_begin",
    "mma_retire",
    "mma_wait",
    "mma_zero",
    "pending",
    "shape_of",
]
