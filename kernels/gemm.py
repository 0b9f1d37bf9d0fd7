"""Matrix product C = A·B or A·Bᵀ of 16-bit matrices, as load / compute / finish hooks. One source for Hopper (wgmma) and Blackwell (tcgen05)."""
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import HALF_TYPES, addressable, as_addressable, check_operands, padded_empty, signature, storable

EVEN_ROUNDS_DEPTH = 2048  # K from which a product is bound by arithmetic on the H200
MAX_CALLS = 4096  # operand shapes that are remembered


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
        return -(-C[0] // (self.consumers * self.rows)) * -(-C[1] // self.cols)

    def blocks(self, slots, A, B, C):
        """A short product is bound by memory, which all multiprocessors together reach faster than even rounds."""
        return super().blocks(slots, A, B, C) if A[1] >= EVEN_ROUNDS_DEPTH else min(self.tasks(A, B, C), slots)

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
    if isinstance(out, torch.Tensor) and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        key = (*signature(a, b, out), transposed)
        call = _calls.get(key)
        if call is None and addressable(a) and addressable(b) and storable(out):
            call = _plan(a, b, out, transposed)
            if call is not None:
                if len(_calls) >= MAX_CALLS:
                    _calls.clear()
                _calls[key] = call
        if call is not None:
            call(a, b, out)
            return out
    return _general(a, b, transposed, out)


_calls: dict[tuple, tk.Call] = {}


def _plan(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, transposed: bool) -> tk.Call | None:
    """The checked call for operands like these; None where there is nothing to multiply."""
    check_operands("gemm", HALF_TYPES, 2, a=a, b=b, out=out)
    (m, depth), (k, n) = a.shape, (b.shape[::-1] if transposed else b.shape)
    if k != depth or tuple(out.shape) != (m, n):
        raise ValueError(f"gemm(transposed={transposed}): a is {tuple(a.shape)}, b is {tuple(b.shape)}, out is {tuple(out.shape)}; they must be (M, K), "
                         f"{'(N, K)' if transposed else '(K, N)'} and (M, N)")
    return template(a.dtype, transposed).call(a, b, out) if m and n and k else None


def _general(a: torch.Tensor, b: torch.Tensor, transposed: bool, out: torch.Tensor | None) -> torch.Tensor:
    """New results, empty operands, and operands that TMA cannot address: those are copied to rows that it can, and so is the result."""
    check_operands("gemm", HALF_TYPES, 2, a=a, b=b, **({} if out is None else {"out": out}))
    home = out if out is not None and storable(out) else padded_empty((a.shape[0], b.shape[0 if transposed else 1]), a)
    a, b = as_addressable(a), as_addressable(b)
    call = _plan(a, b, home if out is None or out.shape == home.shape else out, transposed)
    if call is not None:
        call(a, b, home)
    else:
        home.zero_()  # no depth: the sum of nothing
    return home.contiguous() if out is None else home if home is out else out.copy_(home)


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
