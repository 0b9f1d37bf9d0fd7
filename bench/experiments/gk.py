"""Cycles by ncu of products: python gk.py warm I N | run NAMES (write what was launched there)."""
import torch, sys, os
from tritonkittens.kernels.gemm import Config
from tritonkittens.kernels.gemm.product import gemm as g
torch.manual_seed(0)
C = {"torch": 0, "I": Config(rows=128, cols=128, independent=True, panel=32, schedule="split_tail", group=8)}
for x, more in (("W", {}), ("C", dict(cluster=2))):
    C[x] = Config(panel=64, group=8, schedule="split_tail", **more)
    for together in (1, 2, 4): C[f"{x}t{together}"] = Config(panel=64, group=8, schedule="split_tail", in_turn=True, together=together, **more)
S = [("e4m3", 6144, 2816, 8192), ("e4m3", 16384, 16384, 4096), ("e4m3", 16384, 16384, 16384), ("bf16", 6144, 2816, 8192), ("bf16", 8192, 8192, 8192)]
names, number = [], 0
for kind, m, n, k in S:
    a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    if kind == "e4m3":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn); sa, sb = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
        more = dict(scale_a=sa, scale_b=sb); peer = lambda: torch._scaled_mm(a, b.T, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        a, b, more = a.bfloat16(), b.bfloat16(), {}; peer = lambda: torch.mm(a, b.T)
    right = peer().float()
    for x, c in C.items():
        number += 1
        f = peer if c == 0 else (lambda c=c: g(a, b.T, config=c, **more))
        if sys.argv[1] == "warm":
            if number % int(sys.argv[3]) == int(sys.argv[2]): f(); torch.cuda.synchronize()
            continue
        got = f().float(); err = ((got - right).norm() / right.norm()).item(); del got
        if not err < 5e-3: print("WRONG", kind, m, n, k, x, err, flush=True)
        names.append(f"{kind} {m}x{n}x{k} {x}")
        torch.cuda.cudart().cudaProfilerStart(); f(); torch.cuda.synchronize(); f(); torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop()
if sys.argv[1] == "run": open(sys.argv[2], "w").write("\n".join(names))
sys.stdout.flush(); os._exit(0)
