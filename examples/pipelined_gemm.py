"""A pipeline in an explicit kernel: C = A·B, where one warp loads tiles while four others multiply.

What this rung teaches: warp roles and a ring of stages between them. The producer acquires a stage, announces its bytes
and starts the copies. The consumer waits for the stage, multiplies, and releases it. Each role keeps its own place in
the ring. The verbs are those of CUTLASS's pipelines.

Run it: `python examples/pipelined_gemm.py` (on a Hopper GPU, or in the simulator where there is none).
"""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


@triton.jit
def consume(pipe, a, b, c, C, iterations):
    stage = tk.pipeline_state(pipe)
    acc = tk.zero(tk.rt(tk.fp32, c.rows, c.cols))
    for _ in range(iterations):
        tk.consumer_wait(pipe, stage)
        acc = tk.mma_AB(a[stage.index], b[stage.index], acc)
        tk.consumer_release(pipe, stage)
        stage = tk.advance(stage)
    tk.store(c, acc)
    tk.fence_async()  # TMA sees what registers wrote
    tk.store_async(C, c, (tk.block_index(0), tk.block_index(1)))
    tk.store_wait()


@triton.jit
def produce(pipe, a, b, A, B, iterations):
    stage = tk.pipeline_state(pipe)
    for i in range(iterations):
        tk.producer_acquire(pipe, stage)
        tk.producer_commit(pipe, stage, (a[stage.index], b[stage.index]))
        tk.load_async(a[stage.index], A, (tk.block_index(0), i), pipe.full[stage.index])
        tk.load_async(b[stage.index], B, (i, tk.block_index(1)), pipe.full[stage.index])
        stage = tk.advance(stage)


@tk.kernel
@triton.jit
def gemm_kernel(A, B, C, TILE_A: tl.constexpr, TILE_B: tl.constexpr, TILE_C: tl.constexpr, STAGES: tl.constexpr):
    a, b, c = tk.allocate(TILE_A, STAGES), tk.allocate(TILE_B, STAGES), tk.allocate(TILE_C)
    pipe = tk.pipeline(STAGES)
    iterations = tk.ceil_div(tk.extent(A, 1), TILE_A.cols)
    tk.specialize(
        ((consume, (pipe, a, b, c, C, iterations)), (produce, (pipe, a, b, A, B, iterations))),
        warps=(4, 1),
        registers=(240, 24),
    )


def gemm(a: torch.Tensor, b: torch.Tensor, stages: int = 4) -> torch.Tensor:
    """A·B of an (M, K) and a (K, N) matrix, bf16 or fp16, rows of multiples of 16 bytes."""
    c, dtype = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device), tk.from_torch(a.dtype)
    tile_a, tile_b, tile_c = tk.st(dtype, 128, 64), tk.st(dtype, 64, 128), tk.st(dtype, 128, 128)
    grid = triton.cdiv(a.shape[0], tile_c.rows), triton.cdiv(b.shape[1], tile_c.cols)
    gemm_kernel[grid](tk.gl(a, tile_a), tk.gl(b, tile_b), tk.gl(c, tile_c), tile_a, tile_b, tile_c, stages)
    return c


def gemm_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    m, n, k = (4096, 4096, 4096) if has_gpu() else (200, 136, 328)
    operands = [randn(m, k), randn(k, n)]
    show(f"GEMM {m}×{n}×{k}", gemm, gemm_torch, operands, peers={"cuBLAS": torch.mm}, flop=2 * m * n * k)
