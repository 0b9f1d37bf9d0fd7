"""Figure 6 of the paper: consumer warpgroups of the pipelined template, against a kernel that loads, waits and
multiplies in turn."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from bench.gemm import bf16, case, ours, trial
from bench.harness import Case, Suite, Trial
from bench.peers import Product

SIDE = 4096
DEPTHS = (256, 512, 1024, 2048, 4096, 8192)
CONSUMERS = (1, 2, 3, 4)
COLS = 128  # narrow enough for the accumulators of four consumers
ROWS, DEPTH, GROUP = 128, 64, 8


@tk.kernel(num_warps=8)
@triton.jit
def synchronous_kernel(
    A, B, C, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr
):
    a = tk.allocate(tk.st(DTYPE, ROWS, DEPTH))
    b = tk.allocate(tk.st(DTYPE, DEPTH, COLS))
    c = tk.allocate(tk.st(DTYPE, ROWS, COLS))
    arrived = tk.semaphores(1)
    tk.fence_async()  # the copy engine must see the initialised barrier
    tk.sync()

    row, col = tk.supergroup(
        tk.block_index(0), tk.ceil_div(tk.extent(C, 0), ROWS), tk.ceil_div(tk.extent(C, 1), COLS), GROUP
    )
    acc = tk.zero(tk.rt(tk.fp32, ROWS, COLS))
    for i in range(tk.ceil_div(tk.extent(A, 1), DEPTH)):
        tk.expect(arrived[0], (a, b))
        tk.load_async(a, A, (row, i), arrived[0])
        tk.load_async(b, B, (i, col), arrived[0])
        tk.wait(arrived[0], i & 1)
        acc = tk.mma_AB(a, b, acc)
        tk.sync()  # every warp is done with the tiles
    tk.store(c, acc)
    tk.fence_async()
    tk.store_async(C, c, (row, col))
    tk.store_wait()


def synchronous(p: Product) -> Callable[[], torch.Tensor]:
    """A GEMM without overlap inside a block: two warpgroups for a 128 × 128 tile. A multiprocessor holds as many blocks
    as fit."""
    element, out = tk.from_torch(p.a.dtype), p.out()
    a, b, c = tk.st(element, ROWS, DEPTH), tk.st(element, DEPTH, COLS), tk.st(element, ROWS, COLS)
    grid = (triton.cdiv(out.shape[0], ROWS) * triton.cdiv(out.shape[1], COLS),)
    arguments = tk.gl(p.a, a), tk.gl(p.b, b), tk.gl(out, c), element, ROWS, COLS, DEPTH, GROUP

    def call() -> torch.Tensor:
        synchronous_kernel[grid](*arguments)
        return out

    return call


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(k: int) -> Trial:
        p = bf16(SIDE, SIDE, k)
        contenders = {
            f"{n} consumer{'s' if n > 1 else ''}": functools.partial(ours, p, tile_m=64, tile_n=COLS, consumers=n)
            for n in CONSUMERS
        }
        return trial(
            p, {"synchronous": functools.partial(synchronous, p), **contenders}, note=f"a consumer computes 64 x {COLS}"
        )

    return [case(f"bf16 {SIDE}x{SIDE}x{k}", (SIDE, SIDE, k), functools.partial(prepare, k)) for k in DEPTHS]


SUITES = (Suite("workers", "consumer warpgroups against a synchronous kernel (Figure 6)", cases, plot={"x": "K"}),)
