import csv, sys
for path in sys.argv[1:]:
    lines = open(path).read().splitlines()
    names = [l for l in lines if l.startswith("NAMES")]
    if not names: print(path, lines[-5:]); continue
    names = names[0][6:].split("|"); m = {}
    for r in csv.reader(l for l in lines if l.startswith('"')):
        if r and r[0].isdigit(): m.setdefault(r[-3], []).append(float(r[-1].replace(",", "")))
    print(path, list(m))
    for i, n in enumerate(names): print(f"  {n:22s}", "  ".join(f"{v[i]:.4g}" for v in m.values()))
