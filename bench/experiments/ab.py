"""A/B of trees: ab.py warm TREE | ab.py serve (worker): measures rounds of calls, commands on stdin."""
import os, sys, statistics, random, subprocess, time
HERE = os.path.abspath(__file__)
def calls():
    import torch
    from bench import timing
    from tritonkittens.kernels.attention import attention, attention_decode
    from tritonkittens.kernels.gemm import gemm
    torch.manual_seed(1)
    r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    out = {}
    for n in (512, 1024, 2048):
        a, b, c = r(n, n), r(n, n), torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
        out[f"gemm {n}"] = timing.device((lambda a, b, c: lambda: gemm(a, b, out=c))(a, b, c))
    for b, s, kv, g, d in ((64,1024,8,4,64),(16,209,2,16,64),(128,137,32,1,64),(8,4096,8,4,64),(8,4096,8,4,128),(8,1024,8,4,128),(1,65536,8,4,64),(64,8192,8,4,64)):
        q, k, v = r(b, kv*g, 1, d), r(b, kv, s, d), r(b, kv, s, d)
        out[f"decode {b} {s} {kv} {d}"] = timing.reading((lambda q, k, v, o: lambda: attention_decode(q, k, v, out=o, causal=False))(q, k, v, torch.empty_like(q)))
    for d, s, causal in ((64,512,True),(128,512,False),(128,2048,True)):
        q, k, v = (r(16384 // s, 2048 // d, s, d) for _ in range(3))
        out[f"attention {d} {s} {causal}"] = timing.device((lambda q, k, v, o, c: lambda: attention(q, k, v, causal=c, out=o))(q, k, v, torch.empty_like(q), causal))
    return out
if sys.argv[1] == "serve":
    rounds = calls()
    print("READY", *[n.replace(" ", "_") for n in rounds], flush=True)
    for line in sys.stdin:
        n = line.strip().replace("_", " ")
        print(rounds[n]() * 1e3, flush=True)
    os._exit(0)
trees = sys.argv[2].split(","); seconds = float(sys.argv[3])
ps = []
for tree in trees:
    env = dict(os.environ, PYTHONPATH=f"/tmp/site:{tree}"); p = subprocess.Popen([sys.executable, HERE, "serve"], cwd=tree, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(f"/tmp/ab{len(ps)}.log", "w"), text=True); ps.append(p)
names = None
for p in ps:
    while True:
        line = p.stdout.readline()
        if not line: print("died", open("/tmp/ab0.log").read()[-500:], open("/tmp/ab1.log").read()[-500:]); sys.exit(1)
        if line.startswith("READY"): names = line.split()[1:]; break
def ask(i, n):
    ps[i].stdin.write(n + "\n"); ps[i].stdin.flush(); return float(ps[i].stdout.readline())
for n in names:
    t = [[] for _ in trees]; end = time.time() + seconds / len(names)
    while time.time() < end or len(t[0]) < 9:
        o = list(range(len(trees))); random.shuffle(o)
        for i in o: t[i].append(ask(i, n))
    print(f"{n:28s} ({len(t[0])})", "  ".join(f"{statistics.median(x):.2f}" for x in t), " ratio to first", " ".join(f"{statistics.median(a / b for a, b in zip(t[0], x)):.4f}" for x in t[1:]), flush=True)
