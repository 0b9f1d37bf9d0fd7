"""Decoding with other knobs and other deals beside cuDNN and a copy: python decode_variants.py warm I N | run SECONDS. Prints µs, TB/s, cuDNN's and a copy's time by it."""
import functools, os, random, statistics, sys, time
from unittest import mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from bench import timing
from bench.attention import in_pages
from tritonkittens.kernels.attention import attention_decode, dealing, decoding
from tritonkittens.kernels.attention.dealing import Deal as D
ORIGINAL, MAKES = dealing.decode, {n: getattr(dealing, n) for n in ("AttentionDecode", "AttentionDecodePaged")}
def variant(more):
    def decode(*kind, **given):
        with mock.patch.multiple(dealing, **{n: (lambda make: lambda **knobs: make(**{**knobs, **more}))(make) for n, make in MAKES.items()}): return ORIGINAL.__wrapped__(*kind, **given)
    return functools.lru_cache(decode)
def case(b, s, page, kv, dim):
    q = torch.randn(b, 4 * kv, 1, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, kv, s, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, more, kk, vv = torch.empty_like(q), {}, k, v
    if page:
        table = torch.randperm(b * -(-s // page), device="cuda").int().reshape(b, -1)
        more = dict(pages=table, lengths=torch.full((b,), s, dtype=torch.int32, device="cuda")); kk, vv = (in_pages(x, table, page) for x in (k, v))
    def ours(deal, name):
        known = {}
        def run():
            if deal is None: return attention_decode(q, kk, vv, out=out, **more)
            with mock.patch.multiple(decoding, deal_of=lambda *_: deal, decode=VARIANTS[name], _launches=known): return attention_decode(q, kk, vv, out=out, **more)
        return run
    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    target = torch.empty_like(k)
    return ours, cudnn, lambda: target.copy_(k), 2 * k.numel() * 2
# alone: one thread block a multiprocessor with a deeper ring, for deals of at most a part for each multiprocessor
VARIANTS = {"as it is": ORIGINAL, **{f"alone s{n}": variant(dict(cols=64, blocks_per_sm=1, stages=n)) for n in (3, 4, 5, 6)}, "alone 128 s3": variant(dict(cols=128, blocks_per_sm=1, stages=3))}
N = None  # (batch, keys, page, key heads, dimension): (deal, variant)
ALL = lambda d, *names: [(d, x) for x in names or VARIANTS]
SHIPPED = [(None, "as shipped")]
CASES = {(1, 65536, N, 8, 64): SHIPPED + ALL(D(16), "alone s4", "alone s5", "alone s6", "alone 128 s3") + ALL(D(33), "as it is"), (1, 65536, 16, 8, 64): SHIPPED + ALL(D(16), "alone s4", "alone s6"),
         (1, 65536, N, 8, 128): SHIPPED + ALL(D(16), "alone s3", "alone s4"), (1, 65536, 16, 8, 128): SHIPPED + ALL(D(16), "alone s3", "alone s4", "alone s5") + ALL(D(33), "as it is"),
         (1, 4096, N, 8, 128): SHIPPED + ALL(D(16), "alone s3", "alone s4"), (1, 4096, 16, 8, 128): SHIPPED + ALL(D(16), "alone s3", "alone s4"), (8, 4096, 16, 8, 64): SHIPPED + ALL(D(1, 2), "as it is") + ALL(D(2), "as it is", "alone s4"),
         (64, 1024, N, 8, 64): SHIPPED, (64, 8192, N, 8, 64): SHIPPED}
if sys.argv[1] == "warm":
    jobs = [(c, j) for c, several in CASES.items() for j in several]
    seen = {}
    for c, j in jobs: seen.setdefault((c[2], c[4], c[0] > 32, j if j[0] is None else (j[0].parts > 1, j[0].sharers, j[1])), (c, j))
    for (b, s, page, kv, dim), (deal, name) in list(seen.values())[int(sys.argv[2])::int(sys.argv[3])]:
        try: case(b, s if deal is None else min(s, 4096), page, kv, dim)[0](deal, name)(); torch.cuda.synchronize()
        except Exception as e: print("Error", deal, name, page, str(e)[:80])
    sys.stdout.flush(); os._exit(0)
each = float(sys.argv[2]) / len(CASES)
for c, several in CASES.items():
    ours, cudnn, copy, bytes_ = case(*c)
    calls = {"cudnn": cudnn, "copy": copy, **{f"{name} {tuple(deal) if deal else ''}": ours(deal, name) for deal, name in several}}
    right, rounds = cudnn().float(), {}
    for x in list(calls):
        try:
            got = calls[x]()
            if x != "copy" and (got.float() - right).abs().max() > 0.02: print("WRONG", c, x, flush=True)
            rounds[x] = timing.device(calls[x]) if x == "copy" else timing.reading(calls[x])
        except Exception as e: print(x, type(e).__name__, str(e)[:80], flush=True); calls.pop(x)
    times = {x: [] for x in rounds}; order = list(rounds); end = time.time() + each
    while time.time() < end or len(times["cudnn"]) < 9:
        random.shuffle(order)
        for x in order: times[x].append(rounds[x]())
    print("B %d S %d pages %s H %d D %d" % c, f"({len(times['cudnn'])})", "  ".join(f"{x}: {statistics.median(t)*1e3:.2f} {bytes_ / statistics.median(t) / 1e9:.3f} {statistics.median(p / o for p, o in zip(times['cudnn'], t)):.3f} {statistics.median(p / o for p, o in zip(times['copy'], t)):.3f}" for x, t in times.items()), flush=True)
sys.stdout.flush(); os._exit(0)
