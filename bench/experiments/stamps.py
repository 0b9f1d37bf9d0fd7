"""Cycles of the parts of a backward's tasks: python stamps.py D S CAUSAL TOKENS-HEADS…"""
import fcntl, os, statistics, sys, torch
CUDA = torch.cuda.is_available()
LOG = torch.zeros(132 * 1024, dtype=torch.int32, device="cuda" if CUDA else "cpu")
os.environ["TK_LOG"] = str(LOG.data_ptr())
from tritonkittens.kernels.attention import attention
NAMES = ["wait K,V", "to first input", "first", "each iteration", "drain", "finish", "next task"]
def main():
    for spec in sys.argv[1:]:
        D, S, causal = map(int, spec.split(","))
        B, H = max(1, 16384 // S), 2048 // D
        torch.manual_seed(0)
        q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        o = attention(q, k, v, causal=bool(causal)); do = torch.randn_like(o)
        torch.autograd.grad(o, (q, k, v), do, retain_graph=True); torch.cuda.synchronize()
        lock = open('/tmp/lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(3):
            LOG.zero_(); torch.autograd.grad(o, (q, k, v), do, retain_graph=True); torch.cuda.synchronize()
        log = LOG.cpu().view(132, 2, 64, 8).to(torch.int64) & 0xffffffff
        lock.close(); rows = []
        for b in range(132):
            for w in range(2):
                for t in range(64):
                    e = log[b, w, t].tolist(); n = e[7]
                    if n == 0 or log[b, w, min(t + 1, 63), 7] == 0 or t == 0: continue
                    nxt = int(log[b, w, t + 1, 0]); d = lambda x, y: (y - x) & 0xffffffff
                    rows.append([d(e[0], e[1]), d(e[1], e[2]), d(e[2], e[3]), d(e[3], e[4]) / max(n - 1, 1) if n > 1 else 0, d(e[4], e[5]), d(e[5], e[6]), d(e[6], nxt), n, d(e[0], nxt)])
        m = [statistics.median(r[i] for r in rows if i != 3 or r[7] > 1) for i in range(9)]
        print(f"D {D} S {S} causal {causal}: {len(rows)} tasks of {m[7]:.1f} iterations, {m[8]:.0f} cycles: " + ", ".join(f"{n} {x:.0f}" for n, x in zip(NAMES, m)))
main() if CUDA else None
