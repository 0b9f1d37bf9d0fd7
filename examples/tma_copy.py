"""A tile in shared memory: TMA copies a matrix, a tile for each CTA.

What this rung teaches: `@tk.kernel` makes a function an explicit kernel, which says where its tiles live. A TMA load is
asynchronous. It completes on a semaphore (an mbarrier), which expects its bytes. A TMA store is waited for before the
CTA ends, because it reads the CTA's shared memory.

Run it: `python examples/tma_copy.py` (on a Hopper GPU, or in the simulator where there is none).
"""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


@tk.kernel
@triton.jit
def copy_kernel(X, Y, TILE: tl.constexpr):
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    at = (tk.block_index(0), tk.block_index(1))
    tk.expect(arrived[0], tile)
    tk.load_async(tile, X, at, arrived[0])
    tk.wait(arrived[0], 0)  # the semaphore's first phase has the parity 0
    tk.store_async(Y, tile, at)
    tk.store_wait()


def copy(x: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix, bf16 or fp16, rows of multiples of 16 bytes."""
    y, tile = torch.empty_like(x), tk.st(tk.from_torch(x.dtype), 128, 128)
    grid = triton.cdiv(x.shape[0], tile.rows), triton.cdiv(x.shape[1], tile.cols)
    copy_kernel[grid](tk.gl(x, tile), tk.gl(y, tile), tile)
    return y


def copy_torch(x: torch.Tensor) -> torch.Tensor:
    return x.double()


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    x = randn(16384, 4096) if has_gpu() else randn(300, 200)
    show("copy", copy, copy_torch, [x], peers={"torch": torch.clone}, nbytes=4 * x.numel())
