"""`python -m tritonkittens demo`: the shipped attention prefill and GEMM on random input, checked against float64, one row a kernel."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from tritonkittens.kernels.attention import attention, attention_torch
from tritonkittens.kernels.attention import inspectable as attention_kernels
from tritonkittens.kernels.gemm import gemm, gemm_torch
from tritonkittens.kernels.gemm import inspectable as gemm_kernels

TOLERANCE = 5e-3  # relative, Frobenius: bf16 operands and results, fp32 accumulation


class Case(NamedTuple):
    """One row: how to make the operands, run the kernel, compute the reference, and compile it where it cannot run."""

    name: str
    shape: str
    operands: Callable[[torch.device], tuple[torch.Tensor, ...]]
    run: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    compile: Callable[[str], object]


def _randn(*shapes: tuple[int, ...]) -> Callable[[torch.device], tuple[torch.Tensor, ...]]:
    return lambda device: tuple(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)


CASES = (
    Case("attention prefill", "B 2, H 16, S 2048, D 128", _randn(*[(2, 16, 2048, 128)] * 3), attention, attention_torch, attention_kernels["attention_d128"]),
    Case("GEMM", "4096 × 4096 × 4096", _randn((4096, 4096), (4096, 4096)), gemm, gemm_torch, gemm_kernels["gemm"]),
)


def on_gpu(case: Case) -> tuple[str, str, str]:
    """Run on the current Hopper GPU: (where, relative error, time)."""
    from triton.testing import do_bench

    operands = case.operands(torch.device("cuda"))
    out, expected = case.run(*operands).double(), case.reference(*operands)
    error = ((out - expected).norm() / expected.norm()).item()
    if not error < TOLERANCE:  # also NaN
        raise SystemExit(f"{case.name}: relative error {error:.1e} is above {TOLERANCE:.0e}")
    return torch.cuda.get_device_name(), f"{error:.1e}", f"{do_bench(lambda: case.run(*operands), return_mode='median') * 1e3:.1f} µs"


def compiled_only(case: Case) -> tuple[str, str, str]:
    """Without a GPU: compile for sm_90a and say what came out. A simulator of compiled kernels takes this place: same signature."""
    started = time.perf_counter()
    compiled = case.compile("sm_90a")
    ptx = compiled.asm["ptx"]  # type: ignore[attr-defined]
    made = f"{ptx.count('wgmma.mma_async')} wgmma, {compiled.metadata.shared} B shared"  # type: ignore[attr-defined]
    return f"compiled for sm_90a ({made})", "not run", f"{time.perf_counter() - started:.1f} s to compile"


def runner() -> Callable[[Case], tuple[str, str, str]]:
    """How the cases are run on this machine."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return on_gpu if hopper else compiled_only


def main() -> None:
    """Print one row for each case; exit with a message where a result is wrong."""
    run = runner()
    rows = [("kernel", "shape", "where", "relative error", "time")]
    rows += [(case.name, case.shape, *run(case)) for case in CASES]
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    for r in rows:
        print("  ".join(text.ljust(width) for text, width in zip(r, widths)).rstrip())
