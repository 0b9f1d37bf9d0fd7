"""A random scan of decode shapes beside SDPA's ways: python scan.py warm I N | run SECONDS"""
import os, random, statistics, sys, time
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from bench import timing
from tritonkittens.kernels.attention import attention_decode
rng = random.Random(7)
def shapes(n):
    out = []
    while len(out) < n:
        dim, (kv, group), queries = rng.choice((64, 64, 96, 128, 128, 128, 256)), rng.choice(((8, 4), (8, 8), (32, 1), (1, 8), (4, 7), (2, 16))), rng.choice((1, 1, 1, 1, 4, 16))
        b, s = 2 ** rng.randrange(0, 8), int(2 ** rng.uniform(7, 15.5))
        if rng.random() < .6: s = 2 ** round(s.bit_length() - 1)
        if 1 << 20 <= 4 * b * kv * s * dim <= 900 << 20: out.append((b, s, kv, group, queries, dim))
    return out
CASES = shapes(int(os.environ.get("COUNT", 48)))
def case(b, s, kv, group, queries, dim):
    q = torch.randn(b, kv * group, queries, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, kv, s, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)); out = torch.empty_like(q)
    def peer(backend):
        def run():
            with sdpa_kernel(backend): return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=group > 1)
        return run
    return lambda: attention_decode(q, k, v, causal=False, out=out), peer(SDPBackend.CUDNN_ATTENTION), peer(SDPBackend.FLASH_ATTENTION)
if sys.argv[1] == "warm":
    for c in CASES[int(sys.argv[2])::int(sys.argv[3])]:
        try: case(*c)[0](); torch.cuda.synchronize()
        except Exception as e: print("Error", c, str(e)[:80])
    sys.stdout.flush(); os._exit(0)
if __name__ == "__main__":
    each = float(sys.argv[2]) / len(CASES)
    for c in CASES:
        names = dict(zip(("ours", "cudnn", "flash"), case(*c))); rounds = {}
        right = None
        for x, f in names.items():
            try:
                got = f().float(); right = got if right is None else right
                if (got - right).abs().max() > .05: print("WRONG", x, c)
                rounds[x] = timing.reading(f)
            except Exception as e: print(x, c, type(e).__name__, str(e)[:60], flush=True)
        times = {x: [] for x in rounds}; order = list(rounds); end = time.time() + each
        while time.time() < end or len(times["ours"]) < 7:
            random.shuffle(order)
            for x in order: times[x].append(rounds[x]())
        med = {x: statistics.median(t) * 1e3 for x, t in times.items()}
        r = min(statistics.median(p / o for p, o in zip(times[x], times["ours"])) for x in times if x != "ours") if len(times) > 1 else 9
        b, s, kv, group, queries, dim = c
        print("B %3d S %5d kv %2d g %2d q %2d D %3d" % c, f"({len(times['ours'])})", "  ".join(f"{x} {t:.2f}" for x, t in med.items()), f"TB/s {4*b*kv*s*dim/med['ours']/1e6:.2f} ratio {r:.3f}", "<<<" if r < 1 else "", flush=True)
    sys.stdout.flush(); os._exit(0)
