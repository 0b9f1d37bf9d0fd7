"""One process of six: e4m3 (rows) and bf16, 4096 and 8192: torch, the table's choice, 64x256, pairs. Rounds interleaved."""
import random, statistics, sys, time, torch
from tritonkittens.kernels.gemm import Config
from tritonkittens.kernels.gemm.product import gemm as g
C = {"torch": 0, "table": None, "W": Config(panel=64, group=8, schedule="split_tail"), "C": Config(panel=64, cluster=2, group=8, schedule="split_tail")}
torch.manual_seed(int(sys.argv[1]))
for kind in ("e4m3", "bf16"):
    for side in (4096, 8192):
        a, b = (torch.randn(side, side, device="cuda") for _ in range(2))
        if kind == "e4m3":
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn); sa, sb = torch.rand(side, 1, device="cuda"), torch.rand(1, side, device="cuda")
            run = lambda c: torch._scaled_mm(a, b.T, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True) if c == 0 else g(a, b.T, config=c, scale_a=sa, scale_b=sb)
        else:
            a, b = a.bfloat16(), b.bfloat16(); run = lambda c: torch.mm(a, b.T) if c == 0 else g(a, b.T, config=c)
        times = {k: [] for k in C}; names = list(C)
        for k in names: run(C[k])
        reps = 10 if side == 4096 else 3; end = time.time() + 2.2
        while time.time() < end:
            random.shuffle(names)
            for k in names:
                s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2)); s.record()
                for _ in range(reps): run(C[k])
                e.record(); torch.cuda.synchronize(); times[k].append(s.elapsed_time(e) / reps)
        t = times["torch"]
        print(sys.argv[1], kind, side, "  ".join(f"{k} {statistics.median(p / o for p, o in zip(t, x)):.3f}" for k, x in times.items()), f"torch {2 * side**3 / statistics.median(t) / 1e9:.0f} TFLOP/s", len(t), flush=True)
