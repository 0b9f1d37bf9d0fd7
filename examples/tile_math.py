"""Tile math in plain Triton kernels: a kernel of one line, and a softmax of three.

What this rung teaches: the operations of `tritonkittens.lang` work in any `@triton.jit` kernel. A tile type says what a
program loads. A coordinate says which tile, in units of tiles. What lies outside the tensor is neither read nor
written.

Run it: `python examples/tile_math.py` (on a Hopper GPU, or in the simulator where there is none).
"""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


@triton.jit
def silu_kernel(X, Y, TILE: tl.constexpr):
    tk.store(Y, tk.silu(tk.load(X, TILE, (tl.program_id(0), tl.program_id(1)))), (tl.program_id(0), tl.program_id(1)))


@triton.jit
def softmax_kernel(X, Y, ROW: tl.constexpr):
    x = tk.cast(tk.load(X, ROW, (tl.program_id(0), 0), fill=float("-inf")), tk.fp32)
    weights = tk.exp(x - tk.max(x))
    tk.store(Y, weights / tk.sum(weights), (tl.program_id(0), 0))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x) of a matrix, bf16 or fp16."""
    y, tile = torch.empty_like(x), tk.rt(tk.from_torch(x.dtype), 32, 128)
    grid = triton.cdiv(x.shape[0], tile.rows), triton.cdiv(x.shape[1], tile.cols)
    silu_kernel[grid](tk.gl(x).plain(), tk.gl(y).plain(), tile)
    return y


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of each row of a matrix, bf16 or fp16; a program holds a row in registers."""
    y, row = torch.empty_like(x), tk.rv(tk.from_torch(x.dtype), 256 * triton.cdiv(x.shape[1], 256))
    softmax_kernel[(x.shape[0],)](tk.gl(x).plain(), tk.gl(y).plain(), row)
    return y


def silu_torch(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x.double())


def softmax_torch(x: torch.Tensor) -> torch.Tensor:
    return x.double().softmax(1)


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    x = randn(16384, 4096) if has_gpu() else randn(70, 200)
    show("silu", silu, silu_torch, [x], peers={"torch": torch.nn.functional.silu}, nbytes=4 * x.numel())
    show("softmax", softmax, softmax_torch, [x], peers={"torch": lambda x: x.softmax(1)}, nbytes=4 * x.numel())
