"""clk.py SECONDS CASE…: contenders in turn, each in a process of its own; cycles of a multiprocessor, clock and time a call, from stamps of %clock64 around the calls."""
import os, sys, statistics, random, subprocess, time
HERE = os.path.abspath(__file__)
C8, W16, I12 = "cluster=2;panel=64;group=8;schedule=split_tail", "panel=64;group=16;schedule=split_tail", "rows=128;cols=128;independent=True;panel=32;swapped=True;streamed=True;schedule=split_tail;group=12"
if sys.argv[1] == "serve":
    which, cfg = sys.argv[2], sys.argv[3]
    import torch, triton, triton.language as tl
    from tritonkittens.inline_ptx import timing
    from tritonkittens.kernels.gemm import Config, gemm
    @triton.jit
    def stamp(out, n):
        if timing.smid() == 0:
            tl.store(out + 2 * n, timing.clock64()); tl.store(out + 2 * n + 1, timing.globaltimer())
    config = Config(**{k: eval(v) if v[0].isdigit() or v in ("True", "None") else v for k, v in (x.split("=") for x in cfg.split(";"))}) if cfg != "-" else None
    def make(name):
        kind, n = name.split(":")[0], int(name.split(":")[1]); torch.manual_seed(n)
        r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
        c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
        if kind.startswith("e4"):
            a, b = r(n, n).to(torch.float8_e4m3fn), r(n, n).to(torch.float8_e4m3fn).t()
            sa, sb = (torch.rand(n, 1, device="cuda") + .5, torch.rand(1, n, device="cuda") + .5) if kind == "e4row" else (torch.rand((), device="cuda") + .5, torch.rand((), device="cuda") + .5)
            if which == "torch": return lambda: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=True, out=c)
            return lambda: gemm(a, b, out=c, scale_a=sa, scale_b=sb, config=config)
        a, b = r(n, n), r(n, n) if kind == "bf16nn" else r(n, n).t()
        return (lambda: torch.mm(a, b, out=c)) if which == "torch" else (lambda: gemm(a, b, out=c, config=config))
    if len(sys.argv) > 4 and sys.argv[4] == "warm":
        for x in sys.argv[5:]: make(x)(); torch.cuda.synchronize()
        os._exit(0)
    print("READY", flush=True)
    current, out = None, torch.zeros(4, dtype=torch.int64, device="cuda")
    for line in sys.stdin:
        name, calls = line.split()
        if name != current: run = make(name); current = name; torch.cuda.empty_cache(); s = run(); run(); stamp[(1024,)](out, 0, num_warps=1)
        stamp[(1024,)](out, 0, num_warps=1)
        for _ in range(int(calls)): run()
        stamp[(1024,)](out, 1, num_warps=1)
        c0, t0, c1, t1 = out.tolist()
        print((c1 - c0) / int(calls), (t1 - t0) / int(calls), flush=True)
    os._exit(0)
seconds, names = float(sys.argv[1]), sys.argv[2:]
C, W = "cluster=2;panel=64;group=8", "panel=64;group=16"
T = {"torch": ("torch", "-"), "now": ("ours", "-")}
o = lambda cfg: ("ours", cfg)
st, pk = ";schedule=split_tail", ";packed=True"
SETS = {"e4row:16384": {"Cst p": o(C + st + pk), "C p": o(C + pk), "Wst p": o(W + st + pk), "Wst": o(W + st), "I sw": o(I12), "I": o(I12.replace("swapped=True;", ""))}, "e4:16384": {"Cst p": o(C + st + pk)},
        "bf16:16384": {"Cst p": o(C + st + pk), "C p": o(C + pk), "Wst p": o(W + st + pk)}, "bf16nn:16384": {"Cst p": o(C + st + pk), "C p": o(C + pk)}, "bf16:8192": {"C p": o(C + pk), "W p": o(W + pk)}, "bf16nn:8192": {"C p": o(C + pk), "W p": o(W + pk)}, "bf16nn:4096": {"W p": o(W + pk), "C p": o(C + pk)}, "e4row:8192": {"C p": o(C + pk)}, "e4:8192": {"C p": o(C + pk)}, "bf16:4096": {"W p": o(W + pk)}}
def contenders(n): return {**T, **SETS[n]}
warm = [subprocess.Popen([sys.executable, HERE, "serve", which, cfg, "warm", n], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for n in names for which, cfg in contenders(n).values()]
for p in warm: p.wait()
everyone = {w: x for n in names for w, x in contenders(n).items()}
ps = {w: subprocess.Popen([sys.executable, HERE, "serve", which, cfg], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(f"/tmp/clk_{w}.log", "w"), text=True) for w, (which, cfg) in everyone.items()}
def ask(w, n, calls):
    ps[w].stdin.write(f"{n} {calls}\n"); ps[w].stdin.flush(); line = ps[w].stdout.readline()
    if not line: print("died", w, open(f"/tmp/clk_{w}.log").read()[-600:], flush=True); sys.exit(1)
    return tuple(map(float, line.split()))
for w, p in ps.items(): p.stdout.readline()
for n in names:
    who = list(contenders(n))
    calls = max(1, round(12e6 / ask(who[0], n, 2)[1]))
    for w in who: ask(w, n, 1)
    end = time.time() + 0.8
    while time.time() < end:
        for w in who: ask(w, n, calls)
    t, end = {w: [] for w in who}, time.time() + seconds
    while time.time() < end:
        random.shuffle(who)
        for w in who: t[w].append(ask(w, n, calls))
    for w in contenders(n):
        c, ns = statistics.median(x[0] for x in t[w]), statistics.median(x[1] for x in t[w])
        print(f"{n:12s} {w:6s} ({len(t[w])}x{calls}) kcycles {c / 1e3:9.1f}  us {ns / 1e3:8.1f}  GHz {statistics.median(x[0] / x[1] for x in t[w]):.4f}  of torch: time {statistics.median(b[1] / a[1] for a, b in zip(t[w], t['torch'])):.4f} cycles {statistics.median(b[0] / a[0] for a, b in zip(t[w], t['torch'])):.4f}", flush=True)
