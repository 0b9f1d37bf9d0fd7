"""Where a consumer is between tasks of the backward: python task_stamps.py D,S,CAUSAL … (a tree with task_stamps.patch). Cycles, 10 % / median / 90 %."""
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
    log = LOG.cpu().view(132, 2, 2, 64, 8).to(torch.int64) & 0xffffffff  # block, role, worker, task, stamp
    d = lambda a, b: ((int(b) - int(a)) + (1 << 31)) % (1 << 32) - (1 << 31)
    rows = []
    for b in range(132):
        for w in range(2):
            for i in range(2, 30):
                c, n, p = log[b, 0, w, i], log[b, 0, w, i + 1], log[b, 1, 0, i + 1]
                if 0 in [int(x) for x in (*c[:7], *n[:4], *p[:3])]: continue
                rows.append([d(c[0], c[1]), d(c[1], c[2]), d(c[2], c[3]), d(c[3], c[4]), d(c[4], c[5]), d(c[5], c[6]), d(c[6], n[0]), d(c[0], n[0]), d(c[4], n[3]), d(p[1], p[2]), d(p[2], n[1]), d(c[5], p[2])])
    if not rows: print(spec, "nothing"); continue
    names = ["await K, V", "await input", "first", "loop", "drain", "finish", "hear", "TASK", "drain to end of next first", "producer awaits K, V free", "K, V asked to there", "drained to K, V asked"]
    quant = lambda x: "/".join(f"{t:.0f}" for t in (statistics.quantiles(x, n=10)[0], statistics.median(x), statistics.quantiles(x, n=10)[-1]))
    print(f"D {D} S {S} causal {causal}, {len(rows)} tasks: " + ", ".join(f"{n} {quant([r[j] for r in rows])}" for j, n in enumerate(names)), flush=True)
