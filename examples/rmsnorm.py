"""RMSNorm of a sum in a plain Triton kernel: h = x + r, y = h / √(mean of h² + ε) · w. A program has a row."""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


@triton.jit
def rmsnorm_kernel(X, R, W, H, Y, eps, ROW: tl.constexpr):
    at = (tl.program_id(0), 0)
    h = tk.cast(tk.load(X, ROW, at), tk.fp32) + tk.cast(tk.load(R, ROW, at), tk.fp32)
    tk.store(H, h, at)
    h = tk.cast(tk.cast(h, ROW.dtype), tk.fp32)  # y is the norm of what is stored
    scale = tk.rsqrt(tk.sum(h * h) / tk.extent(X, 1) + eps)
    tk.store(Y, h * scale * tk.cast(tk.load(W, ROW, (0,)), tk.fp32), at)


def rmsnorm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """h and y as one tensor (2, rows, columns) of matrices x and r and a vector w, bf16 or fp16."""
    out = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
    row = tk.rv(tk.from_torch(x.dtype), 256 * triton.cdiv(x.shape[1], 256))
    rmsnorm_kernel[(x.shape[0],)](*(tk.gl(t).plain() for t in (x, r, w, *out)), eps, row)
    return out


def rmsnorm_torch(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    h = (x.double() + r.double()).to(x.dtype).double()
    return torch.stack([h, torch.nn.functional.rms_norm(h, h.shape[1:], w.double(), eps)])


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    x, r = randn(2, 16384, 4096) if has_gpu() else randn(2, 7, 1000)
    peer = {"torch": lambda x, r, w: (x + r, torch.nn.functional.rms_norm(x + r, w.shape, w, 1e-6))}
    show("RMSNorm", rmsnorm, rmsnorm_torch, [x, r, randn(x.shape[1])], peers=peer, nbytes=8 * x.numel())
