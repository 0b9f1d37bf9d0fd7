import torch, sys, os
from dataclasses import replace
from tritonkittens.kernels.gemm import gemm, Config
n = 16384; torch.manual_seed(n)
r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
a, b = r(n, n).to(torch.float8_e4m3fn), r(n, n).to(torch.float8_e4m3fn).t(); c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
sa, sb = torch.rand(n, 1, device="cuda") + .5, torch.rand(1, n, device="cuda") + .5
C = Config(cluster=2, panel=64, group=8)
S = replace(C, schedule="split_tail"); I = Config(rows=128, cols=128, independent=True, panel=32, group=8, schedule="split_tail"); cases = {"C": S, "I8": I, "I8p64": replace(I, panel=64), "Isw8": replace(I, swapped=True), "Isw8p16": replace(I, swapped=True, panel=16), "Isw8p64": replace(I, swapped=True, panel=64)}
if sys.argv[1] == "warm": cases = dict(list(cases.items())[int(sys.argv[2])::14])
fs = {k: (lambda v: lambda: gemm(a, b, out=c, scale_a=sa, scale_b=sb, config=v))(v) for k, v in cases.items()}
fs["torch"] = lambda: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=True, out=c)
ok = []
for k, f in list(fs.items()):
    try: f(); ok.append(k)
    except Exception as e: print("ERR", k, str(e)[:100], flush=True)
torch.cuda.synchronize()
if sys.argv[1] == "warm": os._exit(0)
open("/tmp/order.txt", "w").write("\n".join(k for k in ok for _ in range(2)))
torch.cuda.profiler.start()
for k in ok:
    fs[k](); fs[k]()
torch.cuda.synchronize(); torch.cuda.profiler.stop(); sys.stdout.flush(); os._exit(0)
