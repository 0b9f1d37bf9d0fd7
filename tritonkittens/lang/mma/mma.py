"""Matrix products of tiles: D = A·B + C with either operand transposed, on the tensor-core unit that the operands
select.

The accumulator (or `into` of a plain product) selects the unit. A plain Triton tile takes `tl.dot`. A register tile
of whole warpgroups takes wgmma (B from shared memory, A from shared memory or registers). Other register tiles take
mma.sync. A tensor-memory tile takes tcgen05 (B from shared memory, A from shared or tensor memory).
Shapes: AB (M×K, K×N), ABt (M×K, N×K), AtB (K×M, K×N) and AtBt (K×M, N×K) give M×N.
Dtypes: bf16, fp16, fp8 (e4m3 and e5m2 mix) and tf32 (fp32 operands) accumulate in fp32. fp16 also accumulates in fp16
where the accumulator is an fp16 register tile. int8 accumulates in int32.
Source: PTX ISA, wgmma.mma_async, mma.sync, tcgen05.mma.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import (
    DistributedLayout,
    Trace,
    Traced,
    base_type,
    base_value,
    gl,
    hopper,
    mbarrier,
    mma_v2,
    op,
    tcgen05_commit,
    tcgen05_mma,
)
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of, names_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, axes_of, composite, pieces_of, shape_of, type_of_members
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma import wgmma_descriptors as raw_wgmma
from tritonkittens.lang.mma.fp8_a_operand import packed_bytes
from tritonkittens.lang.register.construction import accumulator_layout, transpose, warp_layout, zero
from tritonkittens.lang.sync.semaphores import semaphore

FP8 = (tl.float8e4nv, tl.float8e5)
STANDARD_BITS = 16  # operand width in the layouts of register tiles
OPERANDS = (tl.bfloat16, tl.float16, tl.float32, tl.int8, *FP8)


class pending_type(type_of_members):
    def __init__(
        self, axes: tuple[tuple[int, ...], ...], parts: tuple[base_type, ...], kept: tuple[base_type, ...], groups: int
    ):
        self.axes, self.parts, self.kept, self.groups, self.members = axes, parts, kept, groups, (*parts, *kept)

    def mangle(self) -> str:
        return f"W{self.groups}_" + self._mangled_members() + "W"

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[pending, int]:
        values, cursor = self._members_from(handles, cursor)
        n = len(self.parts)
        return pending(self.axes, values[:n], values[n:], self.groups), cursor


class pending(base_value):
    """A product in flight (`wait=False`): the tensor cores own the accumulator registers until `mma_wait`.

    Further products may accumulate into it. `kept` are the register operands that the tensor cores still read.
    `groups` is the number of wgmma groups in the product.
    """

    def __init__(
        self, axes: tuple[tuple[int, ...], ...], parts: tuple[Traced, ...], kept: tuple[Traced, ...], groups: int
    ):
        self.axes, self.parts, self.kept, self.groups = axes, parts, kept, groups

    @property
    def type(self) -> pending_type:
        return pending_type(self.axes, tuple(p.type for p in self.parts), tuple(k.type for k in self.kept), self.groups)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(a) for a in self.axes)

    def _flatten_ir(self, handles: list[Any]) -> None:
        for p in (*self.parts, *self.kept):
            p._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        for p in self.parts:
            p._set_name(builder, name)


def _axes(x: Traced) -> tuple[tuple[int, ...], ...]:
    return x.axes if isinstance(x, (shared, tensor_tile, pending, packed_bytes)) else axes_of(x)


def _extents(x: Traced) -> list[int]:
    return [sum(a) for a in _axes(x)]


def _dtype(x: Traced) -> tl.dtype:
    return (
        x.dtype
        if isinstance(x, (shared, tensor_tile, composite, packed_bytes))
        else x.type.element_ty
        if isinstance(x, pending)
        else x.dtype
    )


def _describe(x: Traced) -> str:
    place = "shared" if isinstance(x, shared) else "tensor memory" if isinstance(x, tensor_tile) else "registers"
    return f"{'×'.join(map(str, _extents(x)))} {name_of(_dtype(x))} in {place}"


def _check(name: str, a: Traced, b: Traced, acc: Traced) -> None:
    """Check shapes and dtypes; `a` and `b` already as M×K and K×N."""
    for what, x in (("A", a), ("B", b)):
        if len(_axes(x)) != 2:
            raise TileError(f"{name}: {what} must be a tile of two axes, got shape {_extents(x)}")
        if isinstance(x, shared) and x.stages is not None:
            raise TileError(f"{name}: {what} is a ring of {x.spec!r}; take a slot first, ring[slot]")
        if isinstance(x, shared) and not x.whole:
            raise TileError(
                f"{name}: {what} is a view of {x.spec!r} that cuts a swizzle atom; the tensor cores cannot read it"
            )
        if _dtype(x) not in OPERANDS:
            raise TileError(f"{name}: {what} is {_describe(x)}; the tensor cores take {names_of(OPERANDS)}")
    m, k = _extents(a)
    k2, n = _extents(b)
    if k != k2:
        raise TileError(
            f"{name}: A is {_describe(a)} and B is {_describe(b)} (as M×K and K×N): the depths {k} and {k2} differ"
        )
    if _dtype(a) != _dtype(b) and not (_dtype(a) in FP8 and _dtype(b) in FP8):
        raise TileError(
            f"{name}: A is {name_of(_dtype(a))} and B is {name_of(_dtype(b))}; operands must have one element type "
            "(fp8 kinds may mix)"
        )
    if acc is not None:
        if _extents(acc) != [m, n]:
            raise TileError(
                f"{name}: A is {_describe(a)}, B is {_describe(b)} (as M×K and K×N): the accumulator must be {m}×{n}, "
                f"got {'×'.join(map(str, _extents(acc)))}"
            )
        if not isinstance(acc, pending):
            want = tl.int32 if _dtype(a) == tl.int8 else tl.float32
            also = "fp16 or " if _dtype(a) == tl.float16 and not isinstance(acc, tensor_tile) else ""
            place = " in tensor memory" if isinstance(acc, tensor_tile) else ""
            if _dtype(acc) != want and not (also and _dtype(acc) == tl.float16):
                raise TileError(
                    f"{name}: operands of {name_of(_dtype(a))} accumulate in {also}{want}{place}, got an accumulator "
                    f"of {name_of(_dtype(acc))}"
                )


def _grid(x: Traced) -> list[list[Traced]]:
    """Return the pieces as rows of columns."""
    axes = _axes(x)
    pieces = x.pieces if isinstance(x, (shared, tensor_tile, packed_bytes)) else pieces_of(x)
    return [list(pieces[i * len(axes[1]) : (i + 1) * len(axes[1])]) for i in range(len(axes[0]))]


def _product(
    t: Trace,
    name: str,
    a: Traced,
    b: Traced,
    acc: Traced,
    transposed: tuple[bool, bool],
    wait: bool,
    sem: Traced,
    add: bool = True,
) -> Traced:
    """Compute the product into `acc`, or into new registers without one. `add`: the values in `acc` count."""
    a, b, acc = unwrap(a), unwrap(b), unwrap(acc)
    _check_places(name, a, acc, transposed)
    if isinstance(a, packed_bytes) and (transposed[0] or isinstance(acc, tensor_tile)):
        raise TileError(
            f"{name}: A is {_describe(a)} as 8-bit wgmma reads it (byte_operand): it is M×K, and the accumulator lies "
            "in registers"
        )
    a_stored, b_stored = a, b
    a = t.call(transpose, a) if transposed[0] else a
    b = t.call(transpose, b) if transposed[1] else b
    _check(name, a, b, acc)
    if not t.explicit:
        return _dot(t, a, b, acc, add)
    if isinstance(acc, tensor_tile):
        if _dtype(a) == tl.float32:
            _check_depth(name, a_stored, b_stored, transposed, "tcgen05")
        return _tcgen05(t, name, a, b, acc, wait, sem, add)
    if t.arch < 80:
        t.require_capability(f"{name} (mma.sync)", 80)
    m, n = _extents(a)[0], _extents(b)[1]
    if _warpgroup(t, acc, m, n):
        return _wgmma(t, name, a, b, acc, a_stored, b_stored, transposed, wait, add)
    return _mma_sync(t, a, b, acc, add)


def _check_places(name: str, a: Traced, acc: Traced, transposed: tuple[bool, bool]) -> None:
    """Check the memory of A and of the accumulator."""
    if acc is not None and not isinstance(acc, (tensor_tile, pending, composite, tl.tensor)):
        what = f"{acc.spec!r} in shared memory" if isinstance(acc, shared) else repr(acc)
        raise TileError(
            f"{name}: the accumulator is {what}; the tensor cores write a register tile (tk.zero, a product) or a "
            "tile of tensor_allocator"
        )
    if isinstance(a, tensor_tile) and not isinstance(acc, tensor_tile):
        raise TileError(
            f"{name}: A is {_describe(a)}; only a product into tensor memory reads A there: the accumulator, or "
            "`into`, must be a tile of tensor_allocator"
        )
    if isinstance(a, tensor_tile) and transposed[0]:
        raise TileError(
            f"{name}: A is {_describe(a)}; tcgen05 reads A from tensor memory as M×K only: use "
            f"{name.replace('At', 'A')}, or store A to an st"
        )


def _sum_dtype(a: Traced, acc: Traced) -> tl.dtype:
    """Return the dtype of the result: the accumulator's, else the one in which the operands accumulate."""
    return _dtype(acc) if acc is not None else tl.int32 if _dtype(a) == tl.int8 else tl.float32


def _dot(t: Trace, a: Traced, b: Traced, acc: Traced, add: bool) -> Traced:
    """Compute the product in a plain Triton kernel: tl.dot, piece by piece."""
    rows, cols = _axes(a)[0], _axes(b)[1]
    ga, gb = _grid(a), _grid(b)
    gc = _grid(acc) if acc is not None and add else None
    out_dtype = _sum_dtype(a, acc)
    out = []
    for i in range(len(rows)):
        for j in range(len(cols)):
            total = gc[i][j] if gc else None
            for k in range(len(ga[0])):
                total = t.call("dot", ga[i][k], gb[k][j], total, out_dtype=out_dtype)
            out.append(total)
    return assemble((rows, cols), out)


def _warpgroup(t: Trace, acc: Traced, m: int, n: int) -> bool:
    """Whether the accumulator belongs to whole warpgroups (wgmma)."""
    if isinstance(acc, pending):
        return True
    layouts = [p.type.layout for p in pieces_of(acc)] if acc is not None else [accumulator_layout(t, m, n)]
    return all(_version(layout) == 3 for layout in layouts)


def _version(layout: DistributedLayout) -> int | None:
    """Return 3 for wgmma accumulators, 2 for mma.sync ones, None for other layouts."""
    return int(layout.version[0]) if isinstance(layout, gl.NVMMADistributedLayout) else None


def _for_operands(layout: DistributedLayout, bits: int) -> DistributedLayout:
    """Return the accumulator's layout with the instruction depth of `bits`-bit operands (32 bytes).

    Every depth puts the same elements into the same thread.
    """
    shape = [*layout.instr_shape[:2], 256 // bits]
    return gl.NVMMADistributedLayout(version=layout.version, warps_per_cta=layout.warps_per_cta, instr_shape=shape)


def _wgmma(
    t: Trace,
    name: str,
    a: Traced,
    b: Traced,
    acc: Traced,
    a_stored: Traced,
    b_stored: Traced,
    transposed: tuple[bool, bool],
    wait: bool,
    add: bool,
) -> Traced:
    t.require(f"{name} on warpgroup tiles (wgmma)", "wgmma")
    if not isinstance(b, shared):
        raise TileError(
            f"{name}: B is {_describe(b_stored)}; wgmma reads B from shared memory: store it to an st first"
        )
    bits = _dtype(a).primitive_bitwidth
    if bits != 16:  # only 16-bit operands may have their depth strided
        _check_depth(name, a_stored, b_stored, transposed, "wgmma")
    rows, cols = _axes(a)[0], _axes(b)[1]
    ga, gb = _grid(a), _grid(b)
    parts, kept = [], []
    before = acc.parts if isinstance(acc, pending) else pieces_of(acc) if acc is not None else None
    adds = add or _false(t)
    whole, packed = b_stored.together, isinstance(a, packed_bytes)
    if whole:
        raw_wgmma.check(name, rows, cols, a, b_stored, transposed[1])
    for i in range(len(rows)):
        line: list[Traced] = []
        for j in range(len(cols)):
            if before is None:
                layout = _for_operands(accumulator_layout(t, rows[i], cols[j]), bits)
                total, use = t.full((rows[i], cols[j]), 0, _sum_dtype(a, None), layout), False
            elif isinstance(acc, pending):
                total, use = before[i * len(cols) + j], adds
                layout = total.type.tensor_type.layout
                if layout != _for_operands(layout, bits):
                    raise TileError(
                        f"{name}: the accumulator in flight was begun for operands of another width than "
                        f"{name_of(_dtype(a))}; begin it with mma_begin(acc, {name_of(_dtype(a))})"
                    )
            else:
                layout = _for_operands(before[i * len(cols) + j].type.layout, bits)
                total, use = t.convert(before[i * len(cols) + j], layout), adds
            if packed:
                parts.append(
                    raw_wgmma.multiply_words(t, a, b_stored.pieces[j * len(ga[0]) : (j + 1) * len(ga[0])], total, use)
                )
                kept += a.pieces
                continue
            if whole:
                line.append(total)
                continue
            for k in range(len(ga[0])):
                left = ga[i][k]
                if not isinstance(a, shared):
                    left = t.convert(left, gl.DotOperandLayout(operand_index=0, parent=layout, k_width=32 // bits))
                    # Gluon's wait takes no 8-bit registers; ptxas itself keeps a product's registers until its wait
                    if bits > 8:
                        kept.append(left)
                total = t.call(hopper.warpgroup_mma, left, gb[k][j], total, use_acc=use, is_async=True)
                use = True
            parts.append(total)
        if whole:
            parts += raw_wgmma.multiply(t, ga[i][0], b_stored.pieces[0], line, use, 1 if transposed[1] else 0)
    result = pending(
        (rows, cols), tuple(parts), tuple(kept), len(rows) if whole else len(parts) * (1 if packed else len(ga[0]))
    )
    return _wait(t, [result], 0)[0] if wait else result


def _check_depth(name: str, a_stored: Traced, b_stored: Traced, transposed: tuple[bool, bool], unit: str) -> None:
    """Refuse operands in shared memory whose depth runs along the rows, where the unit reads it along the columns
    only.
    """
    for what, stored, k_major in (("A", a_stored, not transposed[0]), ("B", b_stored, transposed[1])):
        if isinstance(stored, shared) and not k_major:
            raise TileError(
                f"{name}: {what} of {name_of(_dtype(stored))} is stored as {'×'.join(map(str, _extents(stored)))} with "
                f"its depth along the rows; {unit} reads {_dtype(stored).primitive_bitwidth}-bit operands with the "
                "depth along the columns only: use mma_ABt with K-major tiles"
            )


@triton.jit
def _is_zero(x):
    return x == 0


def _false(t: Trace) -> Traced:
    """Return a condition that no compiler knows to be false.

    A product that is known not to read its accumulator gets registers of its own.
    """
    return t.call(_is_zero, t.call(asm, "mov.u32 $0, %nctaid.x;", "=r", [], tl.int32, is_pure=True))


def _wait(t: Trace, products: list[Traced], outstanding: int) -> list[Traced]:
    deps = [d for p in products for d in (*p.parts, *p.kept)]
    done = t.call(hopper.warpgroup_mma_wait, outstanding, deps=deps)
    done = list(done) if len(deps) > 1 else [done]
    out, cursor = [], 0
    for p in products:
        parts = [
            t.convert(x, _for_operands(x.type.layout, STANDARD_BITS)) for x in done[cursor : cursor + len(p.parts)]
        ]
        out.append(assemble(p.axes, parts))
        cursor += len(p.parts) + len(p.kept)
    return out


def _mma_sync(t: Trace, a: Traced, b: Traced, acc: Traced, add: bool) -> Traced:
    t.require_capability("mma.sync of 8-bit floats", 89) if _dtype(a) in FP8 else None
    rows, cols = _axes(a)[0], _axes(b)[1]
    ga, gb = _grid(a), _grid(b)
    gc = _grid(acc) if acc is not None else None
    width = 32 // _dtype(a).primitive_bitwidth
    out = []

    def operand(x: Traced, index: int, parent: Traced) -> Traced:
        layout = gl.DotOperandLayout(operand_index=index, parent=parent, k_width=width)
        if not isinstance(x, gl.shared_memory_descriptor):
            return t.convert(x, layout)
        bill().reads_shared += 1
        return t.call(x.load, layout)

    for i in range(len(rows)):
        for j in range(len(cols)):
            home = gc[i][j].type.layout if gc else warp_layout(t, rows[i])
            parent = home if _version(home) == 2 else warp_layout(t, rows[i])
            total = (
                t.convert(gc[i][j], parent) if gc and add else t.full((rows[i], cols[j]), 0, _sum_dtype(a, acc), parent)
            )
            for k in range(len(ga[0])):
                total = t.call(mma_v2, operand(ga[i][k], 0, parent), operand(gb[k][j], 1, parent), total)
            out.append(t.convert(total, home))
    return assemble((rows, cols), out)


def _tcgen05(
    t: Trace, name: str, a: Traced, b: Traced, acc: tensor_tile, wait: bool, sem: Traced, add: bool
) -> tensor_tile:
    t.require(f"{name} into tensor memory (tcgen05)", "tcgen05")
    if not isinstance(b, shared):
        raise TileError(f"{name}: B is {_describe(b)}; tcgen05 reads B from shared memory: store it to an st first")
    if not isinstance(a, (shared, tensor_tile)):
        raise TileError(f"{name}: A is {_describe(a)}; tcgen05 reads A from shared or tensor memory: store it first")
    if _dtype(a) == tl.int8:
        t.require(f"{name} of int8 into tensor memory (tcgen05, kind::i8)", "tcgen05_int8")
    done = sem.barrier(t) if sem is not None else None
    ga, gb = _grid(a), _grid(b)
    last = len(acc.pieces) * len(ga[0]) - 1
    for j, piece in enumerate(acc.pieces):
        for k in range(len(ga[0])):
            completes = done is not None and j * len(ga[0]) + k == last
            t.call(
                tcgen05_mma, ga[0][k], gb[k][j], piece, use_acc=add or k > 0, mbarriers=[done] if completes else None
            )
    if sem is None and wait:
        _finish_tcgen05(t)
    return acc


def _finish_tcgen05(t: Trace) -> None:
    """Wait for all products into tensor memory that this role has issued.

    The tensor-core unit has no wait instruction, so a temporary semaphore does it.
    """
    done = t.call(gl.allocate_shared_memory, tl.int64, [1], mbarrier.MBarrierLayout())
    t.call(mbarrier.init, done, 1)
    t.call(tcgen05_commit, done)
    t.call(mbarrier.wait, done, 0)
    t.call(mbarrier.invalidate, done)


def _family(suffix: str, transposed: tuple[bool, bool]) -> tuple[Callable[..., Traced], Callable[..., Traced]]:
    a, b = "KM" if transposed[0] else "MK", "NK" if transposed[1] else "KN"
    shapes = f"A is {a[0]}×{a[1]}, B is {b[0]}×{b[1]}"

    def mma(t: Trace, a: Traced, b: Traced, acc: Traced, wait: Traced = True, arrived: Traced = None) -> Traced:
        if arrived is not None and unwrap(arrived) is not None and not isinstance(acc, tensor_tile):
            raise TileError(
                f"mma_{suffix}(arrived=…): only a product into tensor memory completes on a semaphore; use wait=False "
                "and mma_wait"
            )
        return _product(
            t,
            f"mma_{suffix}",
            a,
            b,
            acc,
            transposed,
            bool(unwrap(wait)),
            arrived if isinstance(arrived, semaphore) else None,
        )

    def mm(t: Trace, a: Traced, b: Traced, wait: Traced = True, into: Traced = None) -> Traced:
        return _product(t, f"mm_{suffix}", a, b, into, transposed, bool(unwrap(wait)), None, add=unwrap(into) is None)

    mma.__name__ = mma.__qualname__ = f"mma_{suffix}"
    mma.__doc__ = (
        f"Compute acc + the product of two tiles ({shapes}; acc and the result are M×N).\n\n"
        "Args:\n    a: a shared or register tile; tcgen05 also reads tensor memory.\n"
        "    b: a shared tile; `tl.dot` and mma.sync also read registers.\n"
        "    acc: the accumulator, a register tile or a tile of tensor memory. The module says which dtypes fit.\n"
        "    wait: False leaves a wgmma product in flight; the result goes to `mma_wait`.\n"
        "    arrived: the semaphore on which a product into tensor memory completes, instead of a wait.\n\n"
        "Returns:\n    The new accumulator; do not use `acc` afterwards. Synchronous units ignore `wait`.\n\n"
        "Raises:\n    TileError: for shapes, dtypes or memories that do not fit.\n\n"
        f"Example::\n\n    acc = tk.mma_{suffix}(a, b, acc)"
    )
    mm.__name__ = mm.__qualname__ = f"mm_{suffix}"
    mm.__doc__ = (
        f"Compute the product of two tiles ({shapes}; the result is M×N).\n\n"
        f"Args:\n    a: as in `mma_{suffix}`.\n    b: as in `mma_{suffix}`.\n"
        f"    wait: as in `mma_{suffix}`.\n"
        "    into: an accumulator that the product overwrites, values and NaN included; new registers without one.\n\n"
        "Returns:\n    A register tile of the accumulation dtype, or `into` with the product; do not use the old "
        "`into` afterwards.\n\n"
        "Raises:\n    TileError: for shapes, dtypes or memories that do not fit."
    )
    return op(mma), op(mm)


mma_AB, mm_AB = _family("AB", (False, False))
mma_ABt, mm_ABt = _family("ABt", (False, True))
mma_AtB, mm_AtB = _family("AtB", (True, False))
mma_AtBt, mm_AtBt = _family("AtBt", (True, True))


@op
def mma_wait(t: Trace, *products: Traced, leave: Traced = ()) -> Traced:
    """Wait for products in flight and return their tiles.

    Args:
        products: results of `mma_*` and `mm_*` calls. A synchronous product is returned unchanged.
        leave: products issued later (one or a tuple) that may stay in flight.

    Returns:
        One tile, or a tuple of tiles for several products.

    For a product into tensor memory, the role waits for all its products there. Source: PTX ISA, wgmma.wait_group,
    tcgen05.commit.
    """
    if any(isinstance(p, tensor_tile) for p in products):
        _finish_tcgen05(t)
    waiting = [p for p in products if isinstance(p, pending)]
    later = [p for p in (leave if isinstance(leave, (tuple, list, tl.tuple)) else (leave,)) if isinstance(p, pending)]
    done = iter(_wait(t, waiting, sum(p.groups for p in later)) if waiting else [])
    out = [next(done) if isinstance(p, pending) else p for p in products]
    return out[0] if len(out) == 1 else tl.tuple(out)


def _begun(t: Trace, acc: Traced, dtype: Traced, value: Callable[[Traced, Traced], Traced]) -> Traced:
    """Return `acc` as an accumulator in flight, where the unit has such: for each piece `value(piece, layout)`, in
    the layout for operands of type `dtype`.
    """
    if not t.explicit or isinstance(acc, (pending, tensor_tile)) or not _warpgroup(t, acc, *shape_of(acc)):
        return acc
    bits = STANDARD_BITS if unwrap(dtype) is None else unwrap(dtype).primitive_bitwidth
    parts = tuple(
        t.call(hopper.warpgroup_mma_init, value(p, _for_operands(p.type.layout, bits))) for p in pieces_of(acc)
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
    if isinstance(acc, tensor_tile):
        _finish_tcgen05(t)
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
