"""A GEMM for Blackwell's tensor memory: C = A·B, with one warp that loads, one that multiplies and four that store.

What this rung teaches: the accumulator is a tile of tensor memory, and products signal semaphores. The multiplying warp
issues products and waits for none of them. When a stage's products complete, they release the stage. When all are
complete, the storing warps read the accumulator. Compare `pipelined_gemm.py`: there the consumer waits for its products
and keeps the sums in registers.

Run it: `python examples/tensor_memory_gemm.py` (in the simulator).
"""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


@triton.jit
def produce(pipe, a, b, A, B, iterations):
    stage = tk.pipeline_state(pipe)
    for i in range(iterations):
        tk.producer_acquire(pipe, stage)
        tk.producer_commit(pipe, stage, (a[stage.index], b[stage.index]))
        tk.load_async(a[stage.index], A, (tk.block_index(0), i), pipe.full[stage.index])
        tk.load_async(b[stage.index], B, (i, tk.block_index(1)), pipe.full[stage.index])
        stage = tk.advance(stage)


@triton.jit
def multiply(pipe, a, b, acc, complete, iterations):
    stage = tk.pipeline_state(pipe)
    for i in range(iterations):
        tk.consumer_wait(pipe, stage)
        tk.mma_AB(a[stage.index], b[stage.index], acc, accumulate=i > 0, arrived=pipe.empty[stage.index])
        stage = tk.advance(stage)
    tk.mma_commit(complete)


@triton.jit
def store(acc, complete, c, C):
    tk.wait(complete, 0)
    tk.store(c, tk.load(acc))
    tk.fence_async()  # TMA sees what registers wrote
    tk.store_async(C, c, (tk.block_index(0), tk.block_index(1)))
    tk.store_wait()


@tk.kernel
@triton.jit
def gemm_kernel(A, B, C, TILE_A: tl.constexpr, TILE_B: tl.constexpr, TILE_C: tl.constexpr, STAGES: tl.constexpr):
    a, b, c = tk.allocate(TILE_A, STAGES), tk.allocate(TILE_B, STAGES), tk.allocate(TILE_C)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, TILE_C.rows, TILE_C.cols))
    pipe, complete = tk.pipeline(STAGES), tk.semaphores(1)[0]
    iterations = tk.ceil_div(tk.extent(A, 1), TILE_A.cols)
    tk.specialize(
        (
            (store, (acc, complete, c, C)),
            (multiply, (pipe, a, b, acc, complete, iterations)),
            (produce, (pipe, a, b, A, B, iterations)),
        ),
        warps=(4, 1, 1),
        registers=(168, 24, 24),
    )


def gemm(a: torch.Tensor, b: torch.Tensor, stages: int = 4) -> torch.Tensor:
    """A·B of an (M, K) and a (K, N) matrix, bf16 or fp16, rows of multiples of 16 bytes. K is at least 1."""
    c, dtype = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device), tk.from_torch(a.dtype)
    tile_a, tile_b, tile_c = tk.st(dtype, 128, 64), tk.st(dtype, 64, 128), tk.st(dtype, 128, 128)
    grid = triton.cdiv(a.shape[0], tile_c.rows), triton.cdiv(b.shape[1], tile_c.cols)
    gemm_kernel[grid](tk.gl(a, tile_a), tk.gl(b, tile_b), tk.gl(c, tile_c), tile_a, tile_b, tile_c, stages)
    return c


def gemm_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


if __name__ == "__main__":
    from _run import show

    m, n, k = 200, 136, 328
    operands = [torch.randn(shape, dtype=torch.float32, device="cpu").bfloat16() for shape in ((m, k), (k, n))]
    show(f"GEMM {m}×{n}×{k} in tensor memory", gemm, gemm_torch, operands, arch="sm_100a")
