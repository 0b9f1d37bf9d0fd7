import torch, sys, os, time, random, statistics
from dataclasses import replace
from bench import timing
from tritonkittens.kernels.gemm import gemm, Config
C = Config(cluster=2, panel=64, group=8); W = replace(C, cluster=1, group=16); I = Config(rows=128, cols=128, independent=True, panel=32, group=8); st = lambda c: replace(c, schedule="split_tail")
V = {"C st8": st(C), "I8": st(I), "I8p64": replace(st(I), panel=64), "Isw8": replace(st(I), swapped=True), "Isw8p64": replace(st(I), swapped=True, panel=64), "Isw8p16": replace(st(I), swapped=True, panel=16)}
CASES = {"e4row:16384": ("C st8", "I8", "Isw8", "I8p64", "Isw8p64", "Isw8p16"), "e4row:8192": ("I8", "Isw8", "I8p64", "Isw8p16")}
def make(name):
    kind, n = name.split(":")[0], int(name.split(":")[1]); torch.manual_seed(n)
    r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    outs = {}
    def c(k): return outs.setdefault(k, torch.empty(n, n, device="cuda", dtype=torch.bfloat16))
    if kind.startswith("e4"):
        a, b = r(n, n).to(torch.float8_e4m3fn), r(n, n).to(torch.float8_e4m3fn).t()
        sa, sb = (torch.rand(n, 1, device="cuda") + .5, torch.rand(1, n, device="cuda") + .5) if kind == "e4row" else (torch.rand((), device="cuda") + .5, torch.rand((), device="cuda") + .5)
        return lambda: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=True, out=c("t")), lambda v: lambda: gemm(a, b, out=c("o"), scale_a=sa, scale_b=sb, config=V[v]), outs
    a, b = r(n, n), r(n, n)
    return lambda: torch.mm(a, b, out=c("t")), lambda v: lambda: gemm(a, b, out=c("o"), config=V[v]), outs
if sys.argv[1] == "warm":
    jobs = [(n, v) for n, vs in CASES.items() for v in vs]
    for n, v in jobs[int(sys.argv[2])::int(sys.argv[3])]: make(n)[1](v)(); torch.cuda.synchronize()
    os._exit(0)
seconds = float(sys.argv[2])
for name in (sys.argv[3:] or CASES):
    torch_, ours, outs = make(name); fs = {"torch": torch_, **{v: ours(v) for v in CASES[name]}}
    torch_()
    for v in CASES[name]:
        fs[v](); d = (outs["o"].float() - outs["t"].float()).abs().max().item(); 
        if d > .02 * outs["t"].float().abs().max().item() + 1: print("WRONG", name, v, d)
    for kind in ("device", "sustained"):
        rounds = {k: getattr(timing, kind)(f) for k, f in fs.items()}
        if kind == "device": timing.settle(rounds.values())
        t = {k: [] for k in fs}; end = time.time() + seconds
        while time.time() < end or len(t["torch"]) < 7:
            o = list(fs); random.shuffle(o)
            for k in o: t[k].append(rounds[k]() * 1e3)
        print(f"{name:13s} {kind:9s} ({len(t['torch'])})", "  ".join(f"{k}: {statistics.median(x):.1f} {statistics.median(p / q for p, q in zip(t['torch'], x)):.4f}" for k, x in t.items()), flush=True)
    del fs, rounds; outs.clear(); torch.cuda.empty_cache()
sys.stdout.flush(); os._exit(0)
