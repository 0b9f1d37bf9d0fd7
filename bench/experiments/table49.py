"""Measure candidates of the problems whose operands are copied, and put the fastest into the H200's table."""
import datetime, json, os, pathlib, statistics, sys
from dataclasses import asdict
import torch
from tritonkittens import tune
from tritonkittens.tune import shipped, store
from tritonkittens.kernels.gemm.config import Config, candidates, cost
from tritonkittens.kernels.gemm import product
out = pathlib.Path(os.environ["OUT"])
part = int(sys.argv[1]) if len(sys.argv) > 1 else None
dry = part is not None
D = "cuda" if torch.cuda.is_available() else "cpu"
H = tune.Device.named("H200")
TALL = [Config(consumers=3, cols=176, panel=16, cluster=2), Config(consumers=3, cols=176, panel=16, cluster=2, swapped=True), Config(consumers=3, cols=192, panel=32, cluster=2),
        Config(consumers=3, cols=192, panel=32, cluster=2, swapped=True), Config(cols=192, panel=64, packed=True), Config(panel=64, packed=True),
        Config(panel=64, cluster=2, packed=True), Config(panel=64), Config(cols=192, panel=64, packed=True, cluster=2), Config(independent=True, rows=128, cols=128, panel=32),
        Config(independent=True, rows=128, cols=192, panel=32), Config(panel=64, cluster=2), Config(panel=64, packed=True, group=8), Config(swapped=True, panel=64, packed=True),
        Config(consumers=3, cols=176, panel=16, swapped=True), Config(consumers=3, cols=192, panel=32)]
def mat(r, c, t=False):
    x = (torch.empty if dry else torch.randn)((c, r) if t else (r, c), device=D, dtype=torch.bfloat16)
    return x.T if t else x
cases = [(4095, 4097, 4103, t) for t in ("", "b", "a")]
cases += [(16384, 50257, 768, "b"), (16384, 768, 50257, ""), (50257, 768, 16384, "a")]
entries, number = [], 0
for m, n, k, t in cases:
    a, b = mat(m, k, "a" in t), mat(k, n, "b" in t)
    p = product.described(a, b)
    it = p.problem
    cs = candidates(it)
    ranked = sorted(cs, key=lambda c: cost(it, c, H).total)
    chosen = tune_choice = [c for c in TALL if c in cs]
    for c in ranked[:2]:
        if c not in chosen: chosen.append(c)
    if dry:
        for i, c in enumerate(chosen):
            number += 1
            if number % 14 == part:
                t = p.compilation(c, a, b)
                if t: t[0].compile(*t[1])
        continue
    print(it.a, it.b, m, n, k, len(cs), "not candidates:", [i for i, c in enumerate(TALL) if c not in cs], flush=True)
    none = (None,) * 5
    measure = p.measurement(a, b, none)
    found = {c: [] for c in chosen}
    for _ in range(4):
        for c in chosen:
            if found.get(c) is None: continue
            try: found[c].append(measure(c))
            except Exception as e: print("  failed", c.text() if hasattr(c, "text") else c, str(e)[:100]); found[c] = None
    seconds = sorted(((statistics.median(v), c) for c, v in found.items() if v), key=lambda x: x[0])
    for s, c in seconds[:6]: print(f"   {s*1e6:8.1f} us (model {cost(it, c, H).total*1e6:7.1f})", {x: y for x, y in asdict(c).items() if y not in (None, 1, False, "persistent", "supergroup")}, flush=True)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    entries.append(store.Entry.from_dict(dict(family="gemm", problem=it._asdict(), config=asdict(seconds[0][1]), seconds=seconds[0][0],
                                             tried=[dict(config=asdict(c), predicted={}, seconds=s) for s, c in seconds], date=date)))
    del a, b, measure, p
    torch.cuda.empty_cache()
if not dry:
    path = pathlib.Path(tune.__file__).parent / "tables/nvidia-h200-132.json"
    shipped.write(path, shipped.read(path).device, entries)
    (out / "table.json").write_text(path.read_text())
