import torch
from bench.gemm import fp8, ours
from bench.peers import peers
names = []
for scaling in ("tensor", "row"):
    x = fp8(16384, 16384, 16384, scaling)
    W = dict(rows=64, cols=256, consumers=2, panel=64)
    calls = {"C st8": ours(x, **W, cluster=2, group=8, schedule="split_tail"), "C p8": ours(x, **W, cluster=2, group=8), "W p16": ours(x, **W, group=16), "W st8": ours(x, **W, group=8, schedule="split_tail"), "table": ours(x), "C st8 p128": ours(x, **(W | dict(panel=128)), cluster=2, group=8, schedule="split_tail")}
    for n, make in peers("gemm fp8", x, False).items():
        try: f = make(); f(); calls[n] = f
        except Exception as e: pass
    for n, f in calls.items():
        try: f(); torch.cuda.synchronize()
        except Exception as e: print(n, str(e)[:100]); continue
        for _ in range(2):
            torch.cuda.cudart().cudaProfilerStart(); f(); torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop(); names.append(f"{scaling} {n}")
print("NAMES", "|".join(names))
