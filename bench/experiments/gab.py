"""gab.py SECONDS CASE…: our GEMM by TKPACK and TKLAG, and torch, each in a process of its own: interleaved bursts, then sustained. CASE: e4row:16384, e4:8192, bf16:4096."""
import os, sys, statistics, random, subprocess, time
HERE = os.path.abspath(__file__)
if sys.argv[1] == "serve":
    which = sys.argv[2]
    import torch
    from bench import timing
    from tritonkittens.kernels.gemm import gemm
    def make(name):
        kind, n = name.split(":")[0], int(name.split(":")[1]); torch.manual_seed(n)
        r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
        c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
        if kind.startswith("e4"):
            a, b = r(n, n).to(torch.float8_e4m3fn), r(n, n).to(torch.float8_e4m3fn).t()
            sa, sb = (torch.rand(n, 1, device="cuda") + .5, torch.rand(1, n, device="cuda") + .5) if kind == "e4row" else (torch.rand((), device="cuda") + .5, torch.rand((), device="cuda") + .5)
            if which == "torch": return lambda: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=True, out=c)
            return lambda: gemm(a, b, out=c, scale_a=sa, scale_b=sb)
        a, b = r(n, n), r(n, n) if kind == "bf16nn" else r(n, n).t()
        return (lambda: torch.mm(a, b, out=c)) if which == "torch" else (lambda: gemm(a, b, out=c))
    if len(sys.argv) > 3 and sys.argv[3] == "warm":
        for x in sys.argv[4:]: make(x)(); torch.cuda.synchronize()
        os._exit(0)
    print("READY", flush=True)
    current, rounds = None, {}
    for line in sys.stdin:
        cmd, name = line.split()
        if name != current:
            rounds = {}; run = make(name); current = name; torch.cuda.empty_cache()
        if cmd == "sum":
            out = run(); print(float(out.float().double().sum()), flush=True); continue
        if cmd not in rounds: rounds[cmd] = (timing.device if cmd == "burst" else timing.sustained)(run)
        print(rounds[cmd]() * 1e3, flush=True)
    os._exit(0)
seconds, names = float(sys.argv[2]) if sys.argv[1] == "run" else float(sys.argv[1]), sys.argv[3:] if sys.argv[1] == "run" else sys.argv[2:]
whos = {"now": ("ours", "0", "-1"), "lag2": ("ours", "0", "2"), "p": ("ours", "2", "-1"), "p lag2": ("ours", "2", "2"), "p lag1": ("ours", "2", "1"), "p lag0": ("ours", "2", "0"), "torch": ("torch", "0", "-1")}
env = lambda pack, lag: dict(os.environ, TKPACK=pack, TKLAG=lag, TRITON_CACHE_DIR=f"/tmp/tc_{pack}_{lag}")
warm = [subprocess.Popen([sys.executable, HERE, "serve", which, "warm", n], env=env(pack, lag), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for which, pack, lag in whos.values() for n in names]
for p in warm: p.wait()
ps = {w: subprocess.Popen([sys.executable, HERE, "serve", which], env=env(pack, lag), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(f"/tmp/gab_{w}.log", "w"), text=True) for w, (which, pack, lag) in whos.items()}
def ask(w, cmd, n):
    ps[w].stdin.write(f"{cmd} {n}\n"); ps[w].stdin.flush(); line = ps[w].stdout.readline()
    if not line: print("died", w, open(f"/tmp/gab_{w}.log").read()[-600:]); sys.exit(1)
    return float(line)
for w, p in ps.items(): p.stdout.readline()
for n in names:
    sums = [ask(w, "sum", n) for w in ps]
    for cmd, each in (("burst", seconds), ("sustained", seconds / 2)):
        t = {w: [] for w in ps}
        for w in ps: ask(w, cmd, n)
        end = time.time() + each
        while time.time() < end or len(t["torch"]) < 7:
            o = list(ps); random.shuffle(o)
            for w in o: t[w].append(ask(w, cmd, n))
        print(f"{n:14s} {cmd:9s} ({len(t['torch'])})", "  ".join(f"{w} {statistics.median(x):.3f} {statistics.median(p / o for p, o in zip(t['torch'], x)):.4f}" for w, x in t.items()), "sums", *(f"{s:.6g}" for s in sums), flush=True)
