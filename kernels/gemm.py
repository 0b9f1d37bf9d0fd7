"""Matrix product C = A·B or A·Bᵀ of 16-bit matrices, as load / compute / finish hooks. One source for Hopper (wgmma) and Blackwell (tcgen05)."""
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import HALF_TYPES, addressable, as_addressable, check_operands, padded_empty


class Gemm(tk.lcf):
    """One task is a (consumers·rows) × cols tile of C; every consumer computes `rows` of them, `depth` of K an iteration. Supergroup order for L2."""

    dtype: tl.dtype = tk.bf16
    rows: int = 64
    cols: int = 256
    depth: int = 64
    group: int = 8
    transposed: bool = False  # B is stored N × K

    def layout(self):
        a = tk.st(self.dtype, self.consumers * self.rows, self.depth)
        b = tk.st(self.dtype, *((self.cols, self.depth) if self.transposed else (self.depth, self.cols)))
        c = tk.st(self.dtype, self.rows, self.cols)
        acc = tk.rt(tk.fp32, self.rows, self.cols)
        return tk.layout(globals=dict(A=a, B=b, C=c), input=dict(A=a, B=b), finish=dict(C=c), accumulators=dict(acc=acc))

    def tasks(self, A, B, C):
        return triton.cdiv(C.shape[0], self.consumers * self.rows) * triton.cdiv(C.shape[1], self.cols)

    @triton.jit
    def setup(ctx):
        row_tiles = tk.ceil_div(tk.extent(ctx.globals.C, 0), ctx.config.consumers * ctx.config.rows)
        col_tiles = tk.ceil_div(tk.extent(ctx.globals.C, 1), ctx.config.cols)
        row, col = tk.supergroup(ctx.task, row_tiles, col_tiles, ctx.config.group)
        iterations = tk.ceil_div(tk.extent(ctx.globals.A, 1), ctx.config.depth)
        return tk.task(iterations, when=ctx.task < row_tiles * col_tiles, row=row, col=col)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, (ctx.row, ctx.iter), input.arrived)
        place = (ctx.col, ctx.iter) if ctx.config.transposed else (ctx.iter, ctx.col)
        tk.load_async(input.B, ctx.globals.B, place, input.arrived)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.mma_begin(tk.zero(ctx.accumulators.acc)))

    @triton.jit
    def compute(ctx, state, input, previous):
        a = tk.subtile(input.A, ctx.config.rows, ctx.config.depth, ctx.consumer, 0)
        if ctx.config.transposed:
            return state.replace(acc=tk.mma_retire(tk.mma_ABt(a, input.B, state.acc, wait=False)))
        else:
            return state.replace(acc=tk.mma_retire(tk.mma_AB(a, input.B, state.acc, wait=False)))

    @triton.jit
    def drain(ctx, state, input):
        return state.replace(acc=tk.mma_begin(tk.mma_wait(state.acc)))

    @triton.jit
    def finish(ctx, state, staging):
        tk.store(staging.C, tk.load(tk.mma_wait(state.acc)))
        tk.fence_async()
        tk.store_async(ctx.globals.C, staging.C, (ctx.row * ctx.config.consumers + ctx.consumer, ctx.col))


@functools.lru_cache
def template(dtype: torch.dtype, transposed: bool) -> Gemm:
    """The kernel for a dtype and an orientation of B."""
    return Gemm(dtype=tk.from_torch(dtype), transposed=transposed)


def gemm(a: torch.Tensor, b: torch.Tensor, *, transposed: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """C = A·B, or A·Bᵀ with `transposed`, accumulated in fp32.

    a: (M, K); b: (K, N), or (N, K) with `transposed`; bf16 or fp16; any strides whose last is 1 run without a copy if rows start at multiples of 16
    bytes. Returns C (M, N), written to `out` where given. Raises ValueError or TypeError for operands that do not fit together.
    """
    if out is None or not (addressable(a) and addressable(b) and addressable(out)):
        return _general(a, b, transposed, out)
    return _run(a, b, transposed, out)


def _run(a: torch.Tensor, b: torch.Tensor, transposed: bool, out: torch.Tensor) -> torch.Tensor:
    check_operands("gemm", HALF_TYPES, 2, a=a, b=b, out=out)
    (m, depth), (k, n) = a.shape, (b.shape[::-1] if transposed else b.shape)
    if k != depth or out.shape != (m, n):
        raise ValueError(f"gemm(transposed={transposed}): a is {tuple(a.shape)}, b is {tuple(b.shape)}, out is {tuple(out.shape)}; they must be (M, K), "
                         f"{'(N, K)' if transposed else '(K, N)'} and (M, N)")
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_()
    template(a.dtype, transposed)(a, b, out)
    return out


def _general(a: torch.Tensor, b: torch.Tensor, transposed: bool, out: torch.Tensor | None) -> torch.Tensor:
    """Operands that TMA cannot address are copied to rows that it can; so is the result."""
    check_operands("gemm", HALF_TYPES, 2, a=a, b=b)
    shape = (a.shape[0], b.shape[0 if transposed else 1])
    home = padded_empty(shape, a) if out is None or not addressable(out) else out
    if out is not None:
        check_operands("gemm", HALF_TYPES, 2, a=a, out=out)
        if tuple(out.shape) != shape:
            raise ValueError(f"gemm: out is {tuple(out.shape)}; it must be {shape}")
    _run(as_addressable(a), as_addressable(b), transposed, home)
    return home if out is None or home is out else out.copy_(home)


def gemm_torch(a: torch.Tensor, b: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """Reference in float64."""
    return a.double() @ (b.double().T if transposed else b.double())


def _compiled(arch: str, transposed: bool) -> object:
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    return template(torch.bfloat16, transposed).compile(x, x, x, arch=arch)


inspectable = {
    "gemm": functools.partial(_compiled, transposed=False),
    "gemm_transposed": functools.partial(_compiled, transposed=True),
}
