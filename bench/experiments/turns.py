"""Why are 128×128 in turns in pairs of blocks 17 % behind torch's kernel of the same tile, slots and cluster? python turns.py warm I|ncu M N K"""
import sys, torch
from tritonkittens.kernels.gemm import Config
from tritonkittens.kernels.gemm.product import gemm as g
torch.manual_seed(0)
I = dict(rows=128, cols=128, independent=True, panel=32)
C = {"torch": None}
for gr in (1, 2, 4, 8, 16, 32): C[f"I2 g{gr}"] = Config(**I, cluster=2, group=gr)
for st in (5, 4, 3): C[f"I2 g8 st{st}"] = Config(**I, cluster=2, group=8, stages=st)
for st in (6, 5, 4, 3): C[f"I g8 st{st}"] = Config(**I, group=8, stages=st)
for gr in (4, 16): C[f"I g{gr}"] = Config(**I, group=gr)
C["I row"] = Config(**I, order="row_major"); C["I col"] = Config(**I, order="column_major")
C["together2"] = Config(rows=64, cols=128, panel=32, cluster=2, group=8)
C["together"] = Config(rows=64, cols=128, panel=32, group=8)
C["W g8"] = Config(panel=64, group=8); C["C g8"] = Config(panel=64, cluster=2, group=8)
def main():
    mode = sys.argv[1]; m, n, k = map(int, sys.argv[-3:])
    a, b = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn), torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    sa, sb = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
    names = []
    for i, (name, c) in enumerate(C.items()):
        f = (lambda: torch._scaled_mm(a, b.T, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True)) if c is None else (lambda: g(a, b.T, config=c, scale_a=sa, scale_b=sb))
        if mode == "warm":
            if c and i % 14 == int(sys.argv[2]): f(); torch.cuda.synchronize()
            continue
        try: f(); torch.cuda.synchronize()
        except Exception as e: print("FAILED", name, str(e)[:150]); continue
        names.append(name); torch.cuda.cudart().cudaProfilerStart(); f(); torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop()
    if mode == "ncu": print("NAMES", "|".join(names))
if __name__ == "__main__": main()
