"""Where a sender and its consumer are in an iteration of the backward: python sender_stamps.py D,S,CAUSAL … (a tree with sender_stamps.patch). Medians of cycles.
Sender: 0 number of the sums known, 1 word read, 2 called, 3 copy issued, 4 read, 5 given back and published. Consumer: 0 waits for the sender, 1 may stage,
2 dQ staged and dK done, 3 dS known and slot free, 4 has called, 5 dV done."""
import os, statistics, sys, torch
LOG = torch.zeros(132 * 2048, dtype=torch.int32, device="cuda")
os.environ["TK_LOG"] = str(LOG.data_ptr())
from tritonkittens.kernels.attention import attention
for spec in sys.argv[1:]:
    D, S, causal = map(int, spec.split(","))
    B, H = max(1, 16384 // S), 2048 // D
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    o = attention(q, k, v, causal=bool(causal)); do = torch.randn_like(o)
    for _ in range(3):
        LOG.zero_(); torch.autograd.grad(o, (q, k, v), do, retain_graph=True); torch.cuda.synchronize()
    log = LOG.cpu().view(132, 2, 2, 64, 8).to(torch.int64) & 0xffffffff  # block, role, worker, iteration, stamp
    d = lambda a, b: ((int(b) - int(a)) + (1 << 31)) % (1 << 32) - (1 << 31)
    rows = []
    for b in range(132):
        for w in range(2):
            for i in range(2, 60):
                s, t, c, n = log[b, 0, w, i], log[b, 0, w, i + 1], log[b, 1, w, i + 1], log[b, 1, w, i + 2]  # consumer's iteration i + 1 gives what the sender's i sends
                if 0 in (int(s[0]), int(t[0]), int(c[0]), int(n[0])) or not 0 < d(c[0], n[0]) < 20000: continue
                rows.append([d(c[0], c[1]), d(c[1], c[2]), d(c[2], c[3]), d(c[3], c[4]), d(c[4], c[5]), d(c[5], n[0]), d(c[0], n[0]),
                             d(c[4], s[2]), d(s[2], s[3]), d(s[3], s[4]), d(s[4], s[5]), d(s[5], t[0]), d(t[0], t[1]), d(s[4], n[0]), d(c[0], log[b, 1, 1 - w, i + 1][0])])
    if not rows: print(spec, "nothing"); continue
    names = ["await sender", "stage dQ, dK", "dP, dS", "show, call", "dV", "scores to await", "ITERATION", "call to wake", "issue", "read", "give back, publish", "number", "word", "read to next await", "other consumer later"]
    q = lambda x: "/".join(f"{v:.0f}" for v in (statistics.quantiles(x, n=10)[0], statistics.median(x), statistics.quantiles(x, n=10)[-1]))
    print(f"D {D} S {S} causal {causal}, {len(rows)} iterations (10 %, median, 90 %): " + ", ".join(f"{n} {q([r[j] for r in rows])}" for j, n in enumerate(names)), flush=True)
