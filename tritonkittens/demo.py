"""`python -m tritonkittens demo`: the shipped attention prefill and GEMM on random input, checked against float64, one
row a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tritonkittens.kernels.attention import attention, attention_torch
from tritonkittens.kernels.gemm import gemm, gemm_torch

TOLERANCE = 5e-3  # relative, Frobenius: bf16 operands and results, fp32 accumulation


class Case(NamedTuple):
    """One row: how to make the operands, run the kernel, compute the reference, and compile it where it cannot run."""

    name: str
    shape: str
    operands: Callable[[torch.device], tuple[torch.Tensor, ...]]
    run: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    small_shape: str  # the simulated shape, without a GPU
    small: Callable[[torch.device], tuple[torch.Tensor, ...]]


def _randn(*shapes: tuple[int, ...]) -> Callable[[torch.device], tuple[torch.Tensor, ...]]:
    return lambda device: tuple(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)


CASES = (
    Case(
        "attention prefill",
        "B 2, H 16, S 2048, D 128",
        _randn(*[(2, 16, 2048, 128)] * 3),
        attention,
        lambda *x: attention_torch(*x)[0],
        "B 1, H 2, S 512, D 64",
        _randn(*[(1, 2, 512, 64)] * 3),
    ),
    Case(
        "GEMM",
        "4096 × 4096 × 4096",
        _randn((4096, 4096), (4096, 4096)),
        gemm,
        gemm_torch,
        "512 × 512 × 512",
        _randn((512, 512), (512, 512)),
    ),
)


def error_of(case: Case, operands: tuple[torch.Tensor, ...]) -> float:
    """Run, and compare with float64: the relative error, at most TOLERANCE."""
    out, expected = case.run(*operands).double(), case.reference(*operands)
    error = ((out - expected).norm() / expected.norm()).item()
    if not error < TOLERANCE:  # also NaN
        raise SystemExit(f"{case.name}: relative error {error:.1e} is above {TOLERANCE:.0e}")
    return error


def on_gpu(case: Case) -> tuple[str, str, str, str]:
    """Run on the current Hopper GPU: (shape, where, relative error, time)."""
    from triton.testing import do_bench

    operands = case.operands(torch.device("cuda"))
    error = error_of(case, operands)
    return (
        case.shape,
        torch.cuda.get_device_name(),
        f"{error:.1e}",
        f"{do_bench(lambda: case.run(*operands), return_mode='median') * 1e3:.1f} µs",
    )


def simulated(case: Case) -> tuple[str, str, str, str]:
    """Without a GPU: the kernel as compiled for sm_90a, executed by the simulator, which also looks for deadlocks and
    races."""
    from tritonkittens import sim

    operands = case.small(torch.device("cpu"))
    with sim.device("sm_90a") as device:
        error = error_of(case, operands)
    (launch,) = device.launches
    return (
        case.small_shape,
        f"simulated sm_90a, {len(launch.findings)} findings",
        f"{error:.1e}",
        f"{launch.seconds:.1f} s on the CPU",
    )


def runner() -> Callable[[Case], tuple[str, str, str, str]]:
    """How the cases are run on this machine."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return on_gpu if hopper else simulated


def main() -> None:
    """Print one row for each case; exit with a message where a result is wrong."""
    run = runner()
    rows = [("kernel", "shape", "where", "relative error", "time")]
    rows += [(case.name, *run(case)) for case in CASES]
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    for r in rows:
        print("  ".join(text.ljust(width) for text, width in zip(r, widths)).rstrip())
