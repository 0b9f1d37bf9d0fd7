"""Where the blocks of a GPC work: python places.py warm|topo|ncu|time. Needs places.patch applied, and TRITON_CACHE_DIR of this process alone."""
import json, os, random, statistics, sys
import torch, triton, triton.language as tl
TABLE = torch.zeros(1024, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
os.environ["TK_PLACES"] = str(TABLE.data_ptr())
import tritonkittens.lang as tk
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.kernels.gemm import Config
from tritonkittens.kernels.gemm.product import gemm as g

@tk.kernel(num_warps=1)
@triton.jit
def where(OUT):
    asm("{ .reg .u32 s, c, r, n; .reg .u64 p; mov.u32 s, %smid; mov.u32 c, %ctaid.x; mul.wide.u32 p, c, 4; add.u64 p, p, $0; st.global.u32 [p], s; }", "l", [OUT])

def groups():
    """Multiprocessors that ever shared a cluster: GPCs."""
    parent = list(range(1024)); seen = set()
    def find(x):
        while parent[x] != x: x = parent[x]
        return x
    for size in (16, 8, 4, 2):
        for clusters in (64, 301, 1000):
            out = torch.full((clusters * size,), -1, dtype=torch.int32, device="cuda")
            try:
                where[(clusters,)](out, cluster_size=size); torch.cuda.synchronize()
            except Exception as e:
                print("cluster", size, type(e).__name__, str(e)[:100]); break
            for c in out.view(clusters, size).tolist():
                seen |= set(c)
                for x in c[1:]: parent[find(x)] = find(c[0])
    found = {}
    for x in sorted(seen): found.setdefault(find(x), []).append(x)
    return sorted(found.values())

def compact(G, gpcs, down, pair):
    """smid -> place: those of a GPC get `down` rows by 16 / down columns of the tiles of a round in a supergroup of G rows; `pair`: a TPC's two share the column
    ("B") or the row ("A")."""
    n = sum(map(len, gpcs))
    across = 16 // down
    key = lambda p: ((p // G) // across, (p % G) // down, *(((p // G) % across, (p % G) % down) if pair == "B" else ((p % G) % down, (p // G) % across)))
    order = sorted(range(n), key=key)
    sms = [s for gpc in gpcs for s in sorted(gpc)[:16]] + [s for gpc in gpcs for s in sorted(gpc)[16:]]
    return dict(zip(sms, order))

def tables(G, gpcs):
    n = sum(map(len, gpcs)); sms = sorted(s for gpc in gpcs for s in gpc)
    out = {"smid": dict(zip(sms, range(n)))}
    byg = [s for gpc in gpcs for s in sorted(gpc)]
    out["gpc row"] = dict(zip(byg, range(n)))
    if G in (8, 16):
        for down in (2, 4, 8):
            for pair in "AB": out[f"gpc {down}x{16//down} {pair}"] = compact(G, gpcs, down, pair)
    shuffled = sms[:]; random.Random(0).shuffle(shuffled); out["random"] = dict(zip(shuffled, range(n)))
    inter = [gpc[i] for i in range(18) for gpc in gpcs if i < len(gpc)]
    out["spread"] = dict(zip(inter, range(n)))  # neighbours in different GPCs
    return out

def use(table):
    t = torch.zeros(1024, dtype=torch.int32)
    for s, p in table.items(): t[s] = p
    TABLE.copy_(t); torch.cuda.synchronize()

CONFIGS = {"W8": dict(panel=64, group=8), "W16": dict(panel=64, group=16), "I8": dict(rows=128, cols=128, independent=True, panel=32, group=8),
           "C8": dict(panel=64, cluster=2, group=8), "I2": dict(rows=128, cols=128, independent=True, panel=32, group=8, cluster=2)}
CONFIGS = {k: Config(schedule="split_tail", **v) for k, v in CONFIGS.items()}

def problem(kind, side):
    torch.manual_seed(0)
    a, b = (torch.randn(side, side, device="cuda") for _ in range(2))
    if kind == "e4m3":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        sa, sb = torch.rand(side, 1, device="cuda"), torch.rand(1, side, device="cuda")
        return (lambda: torch._scaled_mm(a, b.T, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True)), (lambda c: g(a, b.T, config=c, scale_a=sa, scale_b=sb))
    a, b = a.bfloat16(), b.bfloat16()
    return (lambda: torch.mm(a, b.T)), (lambda c: g(a, b.T, config=c))

def main():
    mode, kind, side = sys.argv[1], sys.argv[2], int(sys.argv[3]); names = sys.argv[4].split(",")
    gpcs = groups()
    print("GPC", [len(x) for x in gpcs], json.dumps(gpcs))
    peer, ours = problem(kind, side)
    right = None
    variants = [("torch", None, None)]
    for name in names:
        for what, table in tables(16 if name == "W16" else 8, gpcs).items(): variants.append((f"{name} {what}", name, table))
    def run(v):
        return peer() if v[1] is None else ours(CONFIGS[v[1]])
    for v in variants:  # compiles, and checks
        if v[2]: use(v[2])
        out = run(v); torch.cuda.synchronize()
        if right is None: right = out.float()
        err = ((out.float() - right).norm() / right.norm()).item()
        if err > 1e-2: print("WRONG", v[0], err)
    if mode == "ncu":
        done = []
        for v in variants:
            if v[2]: use(v[2])
            torch.cuda.cudart().cudaProfilerStart(); run(v); torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop(); done.append(v[0])
        print("NAMES", "|".join(done))
    if mode == "time":
        times = {v[0]: [] for v in variants}; order = variants[:]
        ev = lambda: torch.cuda.Event(enable_timing=True)
        end_at = float(sys.argv[5]); import time; began = time.time(); r = 0
        for v in variants * 2: run(v)
        while time.time() - began < end_at:
            if r % 2 == 0: random.shuffle(order)
            for v in (order if r % 2 == 0 else order[::-1]):
                if v[2]: use(v[2])
                s, e = ev(), ev(); s.record()
                for _ in range(3): run(v)
                e.record(); torch.cuda.synchronize(); times[v[0]].append(s.elapsed_time(e) / 3)
            r += 1
        t = times["torch"]
        for k, x in sorted(times.items(), key=lambda kv: statistics.median(b / a for a, b in zip(t, kv[1]))):
            print(f"{kind} {side} {k:22s} {statistics.median(x):8.3f} ms  {statistics.median(b / a for a, b in zip(x, t)):.4f} of torch  ({r} rounds)")

main()
