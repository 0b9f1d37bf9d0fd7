"""trace.py OUT PACK LAG: stamps of 16 blocks (pairs C and alone W, e4m3 by rows, K 2048 and 8192) as arrays."""
import os, sys
out, os.environ["TKPACK"], os.environ["TKLAG"] = sys.argv[1:4]
import torch
buf = torch.zeros(884736, dtype=torch.int32, device="cuda")
os.environ["TKTRACE"] = str(buf.data_ptr())
import numpy as np
from tritonkittens.kernels.gemm import Config, gemm
n = 16384
r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
arrays = {}
for k in (2048, 8192):
    torch.manual_seed(k)
    a, b = r(n, k), r(n, k).t(); c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    sa, sb = torch.rand(n, 1, device="cuda") + .5, torch.rand(1, n, device="cuda") + .5
    for name, cfg in {"C": Config(cluster=2, panel=64, group=8), "W": Config(panel=64, group=16)}.items():
        for _ in range(3): gemm(a, b, out=c, scale_a=sa, scale_b=sb, config=cfg)
        torch.cuda.synchronize(); buf.zero_(); torch.cuda.synchronize()
        gemm(a, b, out=c, scale_a=sa, scale_b=sb, config=cfg); torch.cuda.synchronize()
        arrays[f"{name}{k}"] = buf.cpu().numpy().reshape(16, 3, 64, 72, 4)
for key, x in arrays.items():
    its = int(key[1:]) // 128
    x = x.astype(np.int64)
    t = slice(8, 54)
    first = x[:, 0, t, 0, 1]
    period = np.diff(x[:, 0, 8:55, 0, 1], axis=1)
    print(f"== pack {sys.argv[2]} lag {sys.argv[3]} {key}: cycles a task {np.median(period % 2**32):.0f} (mean {np.mean(period % 2**32):.0f}), an iteration of 1035: {its * 1035}")
    med = lambda v: int(np.median(v))
    rel = lambda role, i, ev, d=0: med(((x[:, role, 8 + d:54 + d, i, ev] - first) + 2**31) % 2**32 - 2**31)
    for role in (0, 1):
        cells = [f"i{i}: " + " ".join(str(rel(role, i, e)) for e in range(4)) for i in [*range(6), *range(its - 4, its)]]
        print(f"  c{role} " + " | ".join(cells) + " | end " + " ".join(str(rel(role, 64, e)) for e in range(4)) + " | next " + " ".join(str(rel(role, 0, e, 1)) for e in range(4)))
        w = (x[:, role, t, 1:its, 1] - x[:, role, t, 1:its, 0]) % 2**32
        print(f"     waits for a slot behind the first: sum {np.mean(w.sum(-1)):.0f}, of which above 60: {np.mean(np.maximum(w - 60, 0).sum(-1)):.0f}; by i: " + " ".join(str(int(v)) for v in np.mean(w, axis=(0, 1))[[*range(0, min(10, its - 1)), *range(max(its - 6, 10), its - 1)]]))
    cells = [f"i{i}: " + " ".join(str(rel(2, i, e)) for e in range(3)) for i in [*range(6), *range(its - 4, its)]]
    print("  p  " + " | ".join(cells) + " | next " + " ".join(str(rel(2, i, e, 1)) for i in range(4) for e in range(3)))
np.savez_compressed(out, **arrays)
sys.stdout.flush(); os._exit(0)
