"""Where pairs of blocks work: python pairs.py warm I|ncu|time KIND M N K [SECONDS]. Needs places.patch applied."""
import json, random, statistics, sys, time
import torch
from places import TABLE, groups, where, use, g, Config
I = dict(rows=128, cols=128, independent=True, panel=32)
CONFIGS = {f"I2 g{x}": dict(**I, cluster=2, group=x) for x in (1, 4, 8)} | {f"C g{x}": dict(panel=64, cluster=2, group=x) for x in (4, 8)} \
    | {f"I g{x}": dict(**I, group=x) for x in (4, 8)} | {"W g8": dict(panel=64, group=8)}
CONFIGS = {k: Config(schedule="split_tail", **v) for k, v in CONFIGS.items()}

def compact(G, gpcs, down, unit):
    """smid -> place of a GPC's 16 / unit blocks or pairs: `down` rows of the tiles of a round in bands of G rows."""
    n, each = sum(map(len, gpcs)) // unit, 16 // unit
    across = each // down
    order = sorted(range(n), key=lambda p: ((p // G) // across, (p % G) // down, (p // G) % across, (p % G) % down))
    heads = [s for gpc in gpcs for s in sorted(gpc)[:16] if s % unit == 0] + [s for gpc in gpcs for s in sorted(gpc)[16:] if s % unit == 0]
    return {s + i: p * unit + i for s, p in zip(heads, order) for i in range(unit)}

def ctas(size):
    out = torch.full((132,), -1, dtype=torch.int32, device="cuda")
    where[(132 // size,)](out, cluster_size=size); torch.cuda.synchronize()
    return out.tolist()

def merge(gpcs):
    """GPCs of fewer than 16 made one again."""
    whole = [x for x in gpcs if len(x) >= 16]; rest = sorted(s for x in gpcs if len(x) < 16 for s in x)
    return whole + [rest[i:i + 16] for i in range(0, len(rest), 16)]

def tables(name, gpcs):
    unit = 2 if name[:2] in ("I2", "C ") else 1; G = int(name.split("g")[1])
    out = {"default": {s: i for i, s in enumerate(ctas(unit))}}
    byg = [s for gpc in gpcs for s in sorted(gpc)]
    out["gpc"] = dict(zip(byg, range(132)))
    # the r-th of each GPC in turn
    inter = [gpc[i + j] for i in range(0, 18, unit) for gpc in gpcs if i < len(gpc) for j in range(unit)]
    out["spread"] = dict(zip(inter, range(132)))
    for down in (1, 2, 4, 8):
        if down <= G and G % down == 0 and down * unit < 16: out[f"{down}x{16 // unit // down}"] = compact(G, gpcs, down, unit)
    return {k: t for k, t in out.items() if len(t) == 132 and all(t[s ^ 1] ^ 1 == p for s, p in t.items()) or unit == 1}

def main():
    mode, kind = sys.argv[1], sys.argv[2]; m, n, k = map(int, sys.argv[3:6])
    torch.manual_seed(0)
    a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    if kind == "e4m3":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn); sa, sb = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
        peer = lambda: torch._scaled_mm(a, b.T, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True); ours = lambda c: g(a, b.T, config=c, scale_a=sa, scale_b=sb)
    else:
        a, b = a.bfloat16(), b.bfloat16(); peer = lambda: torch.mm(a, b.T); ours = lambda c: g(a, b.T, config=c)
    gpcs = merge(groups())
    if mode == "ncu":
        print("GPC", [len(x) for x in gpcs])
        for size in (1, 2, 4): print("CTA", size, ctas(size), ctas(size) == ctas(size))
    chosen = sys.argv[7].split(",") if len(sys.argv) > 7 else list(CONFIGS)
    variants = [("torch", None, None)] + [(f"{x} {w}", x, t) for x in chosen for w, t in tables(x, gpcs).items()]
    if len(sys.argv) > 8: variants = [v for v in variants if v[2] is None or v[0].split()[-1] in sys.argv[8].split(",")]
    right = peer().float()
    run = lambda v: peer() if v[1] is None else ours(CONFIGS[v[1]])
    for v in variants:
        if v[2]: use(v[2])
        out = run(v); torch.cuda.synchronize(); err = ((out.float() - right).norm() / right.norm()).item()
        if err > 1e-2: print("WRONG", v[0], err)
    if mode == "ncu":
        for v in variants:
            if v[2]: use(v[2])
            torch.cuda.cudart().cudaProfilerStart(); run(v); torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop()
        print("NAMES", "|".join(v[0] for v in variants))
    else:
        times = {v[0]: [] for v in variants}; end = time.time() + float(sys.argv[6]); order = variants[:]
        while time.time() < end:
            random.shuffle(order)
            for v in order:
                if v[2]: use(v[2])
                s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2)); s.record()
                for _ in range(3): run(v)
                e.record(); torch.cuda.synchronize(); times[v[0]].append(s.elapsed_time(e) / 3)
        t = times["torch"]
        for name, x in sorted(times.items(), key=lambda kv: statistics.median(o / p for p, o in zip(t, kv[1]))):
            print(f"{kind} {m}x{n}x{k} {name:16s} {statistics.median(x):8.3f} ms {statistics.median(p / o for p, o in zip(t, x)):.4f} of torch ({len(t)})")

main()
