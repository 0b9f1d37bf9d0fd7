"""Thread block clusters: their barrier, ranks, and the neighbours' shared memory (PTX ISA, "barrier.cluster",
"mapa"). sm_90.

A remote address is an i32 in the shared::cluster window; `mapa` makes it from a local one. A CTA must not exit while
others still use its memory: end with `arrive` and `wait`.
"""

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, References, arch, asm, issued, require
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Register, Waits, data_bytes, meaning, unsigned
from tritonkittens.inline_ptx.shared import load_constraints, load_text, register_class, store_constraints, store_text

_AXES = ("x", "y", "z")
QUAD_STEP = 16 * 128  # bytes of one access by a warpgroup, 16 for each thread


@constexpr_function
def arrive_text(semantics: str, aligned: bool) -> str:
    if semantics not in ("release", "relaxed"):
        raise OperandError(f"cluster.arrive(semantics={semantics!r}): 'release' or 'relaxed'")
    return f"barrier.cluster.arrive.{semantics}{'.aligned' if aligned else ''};"


@constexpr_function
def wait_text(aligned: bool) -> str:
    return f"barrier.cluster.wait.acquire{'.aligned' if aligned else ''};"


@constexpr_function
def axis_text(register: str, axis: int) -> str:
    if axis not in (0, 1, 2):
        raise OperandError(f"cluster.{register}(axis={axis}): 0, 1 or 2")
    return f"mov.u32 $0, %cluster_{register}.{_AXES[axis]};"


@constexpr_function
def st_async_text(dtype: tl.dtype, issuer: str, sm: int) -> str:
    kind = register_class(dtype)[0].replace("f", "b")
    return issued(f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind} [$0], $1, [$2];", issuer, sm)


@constexpr_function
def st_async_constraints(dtype: tl.dtype) -> str:
    # st.async has bit types only; "f" and "d" registers are of another type but of the right width, which PTX allows
    # for .b operands
    return f"r,{register_class(dtype)[1]},r"


def _quads(instruction: str, registers: Sequence[str], address: str, bar: str = "") -> str:
    """An instruction on 16 bytes for every four registers."""
    if len(registers) % 4:
        raise OperandError(f"a tile of {len(registers)} registers a thread: 16 bytes at a time take a multiple of 4")
    four = [", ".join(registers[at : at + 4]) for at in range(0, len(registers), 4)]
    return " ".join(
        instruction.format(registers=f"{{{r}}}", address=f"[{address} + {QUAD_STEP * quad}]", bar=bar)
        for quad, r in enumerate(four)
    )


@constexpr_function
def st_async_tile_text(outputs: References, inputs: References) -> str:
    (address,), registers, (bar,) = inputs
    return _quads(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 {address}, {registers}, [{bar}];",
        registers,
        address,
        bar,
    )


@constexpr_function
def ld_tile_text(outputs: References, inputs: References) -> str:
    return _quads("ld.shared.v4.f32 {registers}, {address};", outputs[0], inputs[0][0])


@triton.jit
def arrive(semantics: tl.constexpr = "release", aligned: tl.constexpr = True):
    """`barrier.cluster.arrive`: this thread arrives; every thread of every CTA of the cluster executes it. sm_90.

    "release" publishes this thread's writes to the threads that `wait`; "relaxed" does not. `aligned`: all threads of
    the warp execute it together. PTX ISA "barrier.cluster".
    """
    require("barrier.cluster.arrive", 90)
    asm(arrive_text(semantics, aligned), "", [])


@triton.jit
def wait(aligned: tl.constexpr = True):
    """`barrier.cluster.wait.acquire`: waits for the arrival of all threads of the cluster. sm_90. PTX ISA
    "barrier.cluster"."""
    require("barrier.cluster.wait", 90)
    asm(wait_text(aligned), "", [])


@triton.jit
def ctarank():
    """%cluster_ctarank -> i32: this CTA's rank in its cluster. sm_90. PTX ISA "Special Registers"."""
    require("%cluster_ctarank", 90)
    return asm("mov.u32 $0, %cluster_ctarank;", "=r", [], tl.int32, is_pure=True)


@triton.jit
def nctarank():
    """%cluster_nctarank -> i32: the number of CTAs of the cluster. sm_90. PTX ISA "Special Registers"."""
    require("%cluster_nctarank", 90)
    return asm("mov.u32 $0, %cluster_nctarank;", "=r", [], tl.int32, is_pure=True)


@triton.jit
def ctaid(axis: tl.constexpr = 0):
    """%cluster_ctaid -> i32: this CTA's coordinate in its cluster along `axis` (0 x, 1 y, 2 z). sm_90. PTX ISA "Special
    Registers"."""
    require("%cluster_ctaid", 90)
    return asm(axis_text("ctaid", axis), "=r", [], tl.int32, is_pure=True)


@triton.jit
def nctaid(axis: tl.constexpr = 0):
    """%cluster_nctaid -> i32: the cluster's extent along `axis` (0 x, 1 y, 2 z), in CTAs. sm_90. PTX ISA "Special
    Registers"."""
    require("%cluster_nctaid", 90)
    return asm(axis_text("nctaid", axis), "=r", [], tl.int32, is_pure=True)


@triton.jit
def mapa(memory, cta):
    """`mapa.shared::cluster.u32` -> i32: the address, in the CTA of rank `cta` (i32), that corresponds to `memory` in
    this one. sm_90.

    `memory` is a shared descriptor or an i32 shared address. PTX ISA "mapa".
    """
    require("mapa", 90)
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [memory, cta], tl.int32)


@triton.jit
def ld(remote, dtype: tl.constexpr):
    """`ld.shared::cluster`: the scalar `dtype` (32 or 64 bits) at a remote address, read by every thread. sm_90. PTX
    ISA "ld"."""
    require("ld.shared::cluster", 90)
    return asm(load_text("shared::cluster", dtype), load_constraints(dtype), [remote], dtype)


@triton.jit
def st(remote, value, dtype: tl.constexpr, issuer: tl.constexpr = "warp"):
    """`st.shared::cluster`: writes a scalar `dtype` (32 or 64 bits) to a remote address. Visible there after a cluster
    barrier. sm_90.

    PTX ISA "st".
    """
    require("st.shared::cluster", 90)
    asm(store_text("shared::cluster", dtype, issuer, arch()), store_constraints(dtype), [remote, value])


@triton.jit
def st_async(remote, value, remote_bar, dtype: tl.constexpr, issuer: tl.constexpr = "warp"):
    """`st.async`: writes a scalar `dtype` (32 or 64 bits) to a remote address and then counts its 4 or 8 bytes on
    `remote_bar`. sm_90.

    Both addresses come from `mapa` with the same CTA. That CTA expects the bytes (`mbarrier.expect_tx`) and waits.
    PTX ISA "st.async".
    """
    require("st.async", 90)
    asm(st_async_text(dtype, issuer, arch()), st_async_constraints(dtype), [remote, value, remote_bar])


@triton.jit
def st_async_tile(remote, tile, remote_bar):
    """`st.async.v4`: every thread of a warpgroup writes its registers of an fp32 tile, 16 bytes at a time. sm_90.

    The remote addresses are `remote`, `remote` + 2048, …: an i32 that differs between threads, a multiple of 16. The
    bytes count on `remote_bar`. Explicit kernels. PTX ISA "st.async".
    """
    require("st.async", 90)
    asm(st_async_tile_text, ("r", "f", "r"), [remote, tile, remote_bar])


@triton.jit
def ld_tile(address, like):
    """`ld.shared.v4`: reads an fp32 tile of the type of `like` that `st_async_tile` wrote.

    Each thread of a warpgroup reads the data of the writer's thread of equal number. Explicit kernels. PTX ISA "ld".
    """
    return asm(ld_tile_text, ("=f", "r"), [address], like.type)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


@meaning("barrier.cluster.arrive.{order:release|relaxed}?.{aligned:aligned}?", destinations=0)
def _arrive_meaning(t: Machine, i: Instruction) -> None:
    t.cluster_arrive(i.fields["order"] or "release", i.active)


@meaning("barrier.cluster.wait.{order:acquire}?.{aligned:aligned}?", destinations=0)
def _wait_meaning(t: Machine, i: Instruction) -> Waits:
    wait = t.cluster_wait(i.active)
    if wait is not None:
        yield wait


@meaning("mapa.shared::cluster.u32")
def _mapa(t: Machine, i: Instruction, address: Register, cta: Register) -> Register:
    """The window of a CTA's shared memory starts at its rank << 24."""
    return unsigned(address, 32) & np.uint32(0xFFFFFF) | unsigned(cta, 32) << np.uint32(24)


@meaning("getctarank.shared::cluster.u32")
def _getctarank(t: Machine, i: Instruction, address: Register) -> Register:
    return unsigned(address, 32) >> np.uint32(24)


@meaning(
    "st.async.{weak:weak}?.shared::cluster.mbarrier::complete_tx::bytes.{vector:v2|v4}?.{type:b32|b64|u32|u64|s32|s64|f32|f64}",
    destinations=0,
)
def _st_async(t: Machine, i: Instruction, addresses: Register, values: Register, barriers: Register) -> None:
    words = values if isinstance(values, tuple) else (values,)
    data = np.concatenate([data_bytes(word, int((i.fields["type"] or "")[1:]), i.active) for word in words], axis=1)
    t.store_async(addresses, data, barriers, i.active)
