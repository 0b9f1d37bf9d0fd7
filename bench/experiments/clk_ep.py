"""clk.py SECONDS CASE…: contenders in turn, each in a process of its own; cycles of a multiprocessor, clock and time a call, from stamps of %clock64 around the calls."""
import os, sys, statistics, random, subprocess, time
HERE = os.path.abspath(__file__)
C8, W16, I12 = "cluster=2;panel=64;group=8;schedule=split_tail", "panel=64;group=16;schedule=split_tail", "rows=128;cols=128;independent=True;panel=32;swapped=True;streamed=True;schedule=split_tail;group=12"
if sys.argv[1] == "serve":
    which, (cfg, _, ep) = sys.argv[2], sys.argv[3].partition("@")
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
        if kind == "ep":
            a, b = r(n, n), r(n, n)
            e = dict(bias=r(n)) if ep else {}
            if ep == "res": e |= dict(gate=r(n), residual=r(n, n))
            elif ep not in ("", "bias"): e |= dict(activation=ep)
            return lambda: gemm(a, b, out=c, config=config, **e)
        a, b = r(n, n), r(n, n) if kind == "bf16nn" else r(n, n).t()
        return (lambda: torch.mm(a, b, out=c)) if which == "torch" else (lambda: gemm(a, b, out=c, config=config))
    for x in sys.argv[4:]: make(x)(); torch.cuda.synchronize()
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
T = {}
o = lambda cfg: ("ours", cfg)
st, pk = ";schedule=split_tail", ";packed=True"
B, I4 = {"bare": o("-"), "bare Wp": o(W + pk)}, "rows=128;cols=128;independent=True;panel=32;group=4"
def ep(kind, **more): return {f"{kind} now": o("-@" + kind), **{f"{kind} {x}": o(cfg + "@" + kind) for x, cfg in more.items()}}
V = dict(Wp=W + pk, Cp=C + pk, W4p=W.replace("16", "4") + pk)
V = dict(Wp=W + pk, Cp=C + pk)
W32, W_ = W.replace("64", "32"), "panel=64;packed=True"
e = lambda knobs, ep="", cfg=W: ("e" + knobs, cfg + pk + ep)
g = lambda n: W.replace("16", str(n)) + pk
# e: .scratch/exp, an older tree (git archive 6dba2aa tritonkittens kernels | tar x -C .scratch/exp): the gate in `pack`
SETS = {"ep:4096": {**B, **{f"{x} W{n}p": o(g(n)+"@"+x) for x in ("bias", "gelu", "silu", "gelu_tanh", "res") for n in (16, 4)}}}
def environment(which): return {**os.environ, "TKE": which[1:], "TRITON_CACHE_DIR": "/tmp/tc_" + which, "PYTHONPATH": os.getcwd() + "/.scratch/exp:" + os.environ["PYTHONPATH"]} if which[0] == "e" else dict(os.environ)
def contenders(n): return {**T, **SETS[n]}
everyone = {w: x for n in names for w, x in contenders(n).items()}
ps = {w: subprocess.Popen([sys.executable, HERE, "serve", which, cfg, *[n for n in names if w in contenders(n)]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(f"/tmp/clk_{id(w)}.log", "w"), text=True, env=environment(which)) for w, (which, cfg) in everyone.items()}
def ask(w, n, calls):
    ps[w].stdin.write(f"{n} {calls}\n"); ps[w].stdin.flush(); line = ps[w].stdout.readline()
    if not line: print("died", w, open(f"/tmp/clk_{id(w)}.log").read()[-600:], flush=True); sys.exit(1)
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
        print(f"{n:12s} {w:6s} ({len(t[w])}x{calls}) kcycles {c / 1e3:9.1f}  us {ns / 1e3:8.1f}  GHz {statistics.median(x[0] / x[1] for x in t[w]):.4f}  of bare: time {statistics.median(b[1] / a[1] for a, b in zip(t[w], t['bare'])):.4f} cycles {statistics.median(b[0] / a[0] for a, b in zip(t[w], t['bare'])):.4f}", flush=True)
