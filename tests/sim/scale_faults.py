"""Mistakes with the scales of block-scaled products, in the form of `faults.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

import tritonkittens.lang as tk
from tests.cases_block_scaled import E4M3, E8M0, Operand, with_scales
from tests.sim.faults import Fault, empty

SCALE_FAULTS: list[Fault] = []
OPERAND, SCALES = tk.st(tk.fp8e4m3, 128, 128), tk.scale_tile(tk.fp8e8m0, 128, 4)


def fault(name: str, kind: str, kernel: Any, inputs: Any, **more: Any) -> None:
    SCALE_FAULTS.append(Fault(name, kind, kernel, inputs, arch="sm_100a", **more))


def operand(rng: Any, k: int, lines: int = 128) -> Operand:
    """Lines of small integers, and scales from 1/4 to 4: sums of products are exact."""
    values = torch.from_numpy(rng.integers(-2, 3, (lines, k))).float().to(E4M3)
    return with_scales("mxfp8", values, torch.from_numpy(rng.integers(125, 130, (lines, k // 32))).byte().view(E8M0))


@tk.kernel
@triton.jit
def scaled_products(A, B, SA, SB, C, N: tl.constexpr, BUG: tl.constexpr):
    """C = A·B, scaled, over N tiles of K, the next loaded while one is multiplied. Only scales share a ring of two."""
    a, b = tk.allocate(OPERAND, N), tk.allocate(OPERAND, N)
    sa, sb = tk.allocate(SCALES, 2), tk.allocate(SCALES, 2)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 128))
    full, done = tk.semaphores(2), tk.semaphores(2)
    late = tk.semaphores(2) if BUG == "scales_not_awaited" else full
    for i in tl.static_range(N + 1):
        if i < N:
            slot = i % 2
            if i > 1 and BUG != "scales_reloaded_early":
                tk.wait(done[slot], (i // 2 - 1) % 2)
            if BUG == "scales_not_expected":
                tk.expect(full[slot], (a[i], b[i], sa[slot]))  # reports: scales_not_expected
            elif BUG == "scales_not_awaited":
                tk.expect(full[slot], (a[i], b[i], sa[slot]))
                tk.expect(late[slot], sb[slot])
            else:
                tk.expect(full[slot], (a[i], b[i], sa[slot], sb[slot]))
            tk.load_async(a[i], A, (0, i), full[slot])
            tk.load_async(b[i], B, (0, i), full[slot])
            tk.load_async(sa[slot], SA, (0, i), full[slot])  # reports: scales_reloaded_early
            if BUG == "scales_not_awaited":
                tk.load_async(sb[slot], SB, (0, i), late[slot])  # reports: scales_not_awaited
            else:
                tk.load_async(sb[slot], SB, (0, i), full[slot])  # reports: scales_of_the_next_stage
        if i > 0:
            j = i - 1
            tk.wait(full[j % 2], j // 2 % 2)
            scales = (sa[j % 2], sb[i % 2 if BUG == "scales_of_the_next_stage" else j % 2])
            # reports: scales_of_the_next_stage
            tk.mma_ABt(a[j], b[j], acc, accumulate=j > 0, arrived=done[j % 2], scales=scales)
    tk.wait(done[(N - 1) % 2], (N - 1) // 2 % 2)
    tk.store(C, tk.load(acc), (0, 0))


def streams(n: int) -> Any:
    def inputs(rng: Any) -> Any:
        a, b = operand(rng, 128 * n), operand(rng, 128 * n)
        c = empty(128, 128)
        scales = (x.blocks.view(*x.blocks.shape[:-2], 2, 256) for x in (a, b))
        tensors = (tk.gl(x.values, OPERAND) for x in (a, b))
        arguments = (*tensors, *(tk.gl(s, SCALES) for s in scales), tk.gl(c), n)
        return (1,), arguments, [c], [(a.exact @ b.exact.T).float()]

    return inputs


fault("scales_reloaded_early", "race", scaled_products, streams(4))
fault("scales_not_awaited", "race", scaled_products, streams(3), also=("uninitialized",))
fault("scales_not_expected", "bytes", scaled_products, streams(3), also=("race",))
fault("scales_of_the_next_stage", "race", scaled_products, streams(3), also=("uninitialized",))


@gluon.jit
def _filled(X, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A shared tile with 128 rows of X."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    rows, columns = gl.arange(0, 128, gl.SliceLayout(1, L)), gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    tile = gl.allocate_shared_memory(X.dtype.element_ty, [128, COLUMNS], LAYOUT)
    tile.store(gl.load(X + rows[:, None] * COLUMNS + columns[None, :]))
    return tile


@gluon.jit
def _matrix(block):
    """The scales of 128 rows, from the bytes of a block."""
    return block.reshape((1, 1, 32, 4, 4)).permute((0, 3, 2, 1, 4)).reshape((128, 4))


@gluon.jit
def copied_scales(A, B, SA, SB, C, BUG: gl.constexpr):
    """C = A·B, scaled, with the copy of scales to tensor memory. SA and SB have the four bytes of a row as blocks."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    a, b = _filled(A, 128, SWIZZLED), _filled(B, 128, SWIZZLED)
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(0, 8, rank=2)
    memory_a, memory_b = _filled(SA, 4, PLAIN), _filled(SB, 4, PLAIN)
    scales_a = allocate_tensor_memory(SA.dtype.element_ty, [128, 4], TensorMemoryScalesLayout())
    scales_b = allocate_tensor_memory(SB.dtype.element_ty, [128, 4], TensorMemoryScalesLayout())
    acc = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=1)
    fence_async_shared()
    if BUG != "scales_not_copied":
        tcgen05_copy(_matrix(memory_a), scales_a)
    tcgen05_copy(_matrix(memory_b), scales_b)
    # reports: scales_not_copied
    tcgen05_mma_scaled(a, b.permute((1, 0)), acc, scales_a, scales_b, "e4m3", "e4m3", use_acc=False)
    tcgen05_commit(done)
    if BUG == "scales_overwritten":
        zeros = gl.full([128, 4], 0, SA.dtype.element_ty, scales_a.get_reg_layout())
        scales_a.store(zeros)  # reports: scales_overwritten
    if BUG == "scales_in_shared_overwritten":
        R: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
        memory_b.store(gl.full([128, 4], 0, SA.dtype.element_ty, R))  # reports: scales_in_shared_overwritten
    mbarrier.wait(done, 0)
    memory_a._keep_alive()
    memory_b._keep_alive()
    L: gl.constexpr = acc.get_reg_layout()
    rows, columns = gl.arange(0, 128, gl.SliceLayout(1, L)), gl.arange(0, 128, gl.SliceLayout(0, L))
    gl.store(C + rows[:, None] * 128 + columns[None, :], acc.load())


def one_product(rng: Any) -> Any:
    a, b, c = operand(rng, 128), operand(rng, 128), empty(128, 128)
    scales = (x.blocks.view(torch.uint8).view(128, 4) for x in (a, b))
    return (1,), (a.values, b.values, *scales, c), [c], [(a.exact @ b.exact.T).float()]


fault("scales_not_copied", "uninitialized", copied_scales, one_product, options=dict(num_warps=4))
fault("scales_overwritten", "race", copied_scales, one_product, options=dict(num_warps=4))
fault("scales_in_shared_overwritten", "race", copied_scales, one_product, options=dict(num_warps=4))
