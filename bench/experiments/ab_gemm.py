"""Winners of h100.json beside the shipped table's and cuBLAS: python ab_gemm.py [SHARD OF]. Ratio to the peer, medians over rounds."""
import json, random, statistics as st, sys, torch
from bench import timing
from bench.gemm import bf16, fp8, ours
from bench.peers import peers
from tritonkittens.kernels.gemm import Config
new = json.load(open(".scratch/h100.json"))["families"]["gemm"]
old = {json.dumps(e["problem"], sort_keys=True): e["config"] for e in json.load(open("tritonkittens/tune/tables/nvidia-h200-132.json"))["families"]["gemm"]}
jobs = []
for e in new:
    p, o = e["problem"], old.get(json.dumps(e["problem"], sort_keys=True))
    if o == e["config"]: continue
    layout = ("T" if p["a"] == "km" else "N") + ("T" if p["b"] == "nk" else "N")
    jobs.append((p, layout, o, e["config"]))
if len(sys.argv) > 1: jobs = jobs[int(sys.argv[1])::int(sys.argv[2])]
for p, layout, o, n in jobs:
    m, n_, k = p["m"], p["n"], p["k"]
    x = fp8(m, n_, k, "row") if p["dtype"].startswith("fp8") else bf16(m, n_, k, layout)
    calls = {"old": ours(x, **o) if o else ours(x), "new": ours(x, **n)}
    if (m, n_, k) in ((4096, 24576, 1536), (16384, 24576, 1536)):
        for g in (4, 8, 16): calls[f"W c2 g{g} p64"] = ours(x, **{**n, "group": g, "panel": 64})
        for g in (8, 16): calls[f"W g{g} p64"] = ours(x, **{**n, "group": g, "panel": 64, "cluster": 1})
    for f in calls.values(): f()
    if len(sys.argv) > 1: continue
    for name, make in peers("gemm fp8" if p["dtype"].startswith("fp8") else "gemm", x, False).items():
        try:
            f = make() if not hasattr(make, "make") else make.make(); f(); calls[name] = f
        except Exception as error: print(name, str(error)[:80])
    rounds = {c: timing.device(f) for c, f in calls.items()}
    timing.settle(rounds.values())
    times, order = {c: [] for c in calls}, list(calls)
    for _ in range(12):
        random.shuffle(order)
        for c in order: times[c].append(rounds[c]())
    best = min((c for c in calls if c in ("cublas",) or "torch" in c), key=lambda c: st.median(times[c]))
    print(m, n_, k, layout, p["dtype"], f"{best} {st.median(times[best])*1e3:.1f}", {c: round(st.median(a / b for a, b in zip(times[best], t)), 3) for c, t in times.items() if c != best}, flush=True)
