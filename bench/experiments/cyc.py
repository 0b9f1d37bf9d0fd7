"""cyc.py warm|run: pairs (C), 64×256 alone (W), with and without split tails, and torch, at 16384×16384×K by rows; under `ncu` for cycles. TKPACK, TKLAG."""
import os, sys
from dataclasses import replace
import torch
from tritonkittens.kernels.gemm import Config, gemm
n = 16384
r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
C = Config(cluster=2, panel=64, group=8)
cases = {"Cp": C, "Cst": replace(C, schedule="split_tail"), "Wp": Config(panel=64, group=16)}
order, calls = [], []
for k in (2048, 8192, 16384):
    torch.manual_seed(k)
    a, b = r(n, k), r(n, k).t(); c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    sa, sb = torch.rand(n, 1, device="cuda") + .5, torch.rand(1, n, device="cuda") + .5
    for name, cfg in cases.items():
        calls.append((f"{k} {name}", lambda a=a, b=b, c=c, sa=sa, sb=sb, cfg=cfg: gemm(a, b, out=c, scale_a=sa, scale_b=sb, config=cfg)))
    if os.environ.get("WITH_TORCH"): calls.append((f"{k} torch", lambda a=a, b=b, c=c, sa=sa, sb=sb: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=True, out=c)))
for _, f in calls: f()
torch.cuda.synchronize()
if sys.argv[1] == "warm": os._exit(0)
torch.cuda.profiler.start()
for name, f in calls:
    for _ in range(2): f(); order.append(name)
torch.cuda.synchronize(); torch.cuda.profiler.stop()
open(sys.argv[2], "w").write("\n".join(order)); sys.stdout.flush(); os._exit(0)
