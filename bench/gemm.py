"""GEMM against cuBLAS (torch.mm), TFLOP/s. `python -m bench.gemm [--out FOLDER]`."""
from __future__ import annotations

import argparse

import torch

from bench.harness import call_time, device_time, interleaved, row, save, show
from tritonkittens.kernels.gemm import gemm

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 1024), (4096, 4096, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder for the result file")
    options = parser.parse_args()
    rows = []
    for m, n, k in SHAPES:
        a, b = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        ours, theirs = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        contenders = {"cublas": lambda: torch.mm(a, b, out=theirs), "tritonkittens": lambda: gemm(a, b, out=ours)}
        for how, measure in (("device", device_time), ("with host", call_time)):
            rows.append(row(f"bf16 {m}x{n}x{k}", 2 * m * n * k, interleaved(contenders, measure), "cublas", "tritonkittens", how))
            show(rows[-1:])
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert difference < 1e-3, difference
    print(save("gemm", rows, options.out))


if __name__ == "__main__":
    main()
