"""Decoding with other knobs and other deals beside cuDNN and a copy: python decode_variants.py warm I N | run SECONDS. Prints µs, TB/s, cuDNN's and a copy's time by it."""
import functools, os, random, statistics, sys, time
from unittest import mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from bench import timing
from bench.attention import in_pages
from tritonkittens.kernels.attention import attention_decode, decoding
from tritonkittens.kernels.attention.decoding import Deal as D
ORIGINAL, MAKES = decoding.decode, {n: getattr(decoding, n) for n in ("AttentionDecode", "AttentionDecodePaged")}
def variant(more):
    def decode(*kind, **given):
        with mock.patch.multiple(decoding, **{n: (lambda make: lambda **knobs: make(**{**knobs, **more}))(make) for n, make in MAKES.items()}): return ORIGINAL.__wrapped__(*kind, **given)
    return functools.lru_cache(decode)
def case(b, s, page, kv, dim):
    q = torch.randn(b, 4 * kv, 1, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, kv, s, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, more, kk, vv = torch.empty_like(q), {}, k, v
    if page:
        table = torch.randperm(b * -(-s // page), device="cuda").int().reshape(b, -1)
        more = dict(pages=table, lengths=torch.full((b,), s, dtype=torch.int32, device="cuda")); kk, vv = (in_pages(x, table, page) for x in (k, v))
    def ours(deal, name):
        def run():
            if deal is None: return attention_decode(q, kk, vv, out=out, **more)
            with mock.patch.object(decoding, "deal_of", lambda *_: deal), mock.patch.object(decoding, "decode", VARIANTS[name]): return attention_decode(q, kk, vv, out=out, **more)
        return run
    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    target = torch.empty_like(k)
    return ours, cudnn, lambda: target.copy_(k), 2 * k.numel() * 2
VARIANTS = {"as it is": ORIGINAL, "2 slots": variant(dict(stages=2)), "3 slots": variant(dict(stages=3)), "4 slots": variant(dict(stages=4)), "128x1": variant(dict(cols=128, blocks_per_sm=1))}
N = None  # (batch, keys, page, key heads, dimension): (deal, variant)
ALL = lambda d, *names: [(d, x) for x in names or VARIANTS]
CASES = {(64, 1024, N, 8, 64): ALL(D()), (64, 8192, N, 8, 64): ALL(D()), (8, 4096, N, 8, 64): ALL(D(1, 2), "as it is", "3 slots", "4 slots") + ALL(D(2), "as it is", "3 slots", "128x1"), (8, 4096, 16, 8, 64): ALL(D(1, 2), "as it is", "3 slots", "4 slots"),
         (8, 512, N, 8, 128): ALL(D(), "as it is") + ALL(D(1, 2), "as it is"), (4, 1024, N, 8, 128): ALL(D(4), "as it is") + ALL(D(1, 2), "as it is"), (8, 32768, N, 8, 128): ALL(D(4), "as it is") + ALL(D(1, 2), "as it is"),
         (8, 32768, 16, 8, 128): ALL(D(4), "as it is") + ALL(D(1, 2), "as it is"), (1, 65536, 16, 8, 128): ALL(D(16), "as it is") + ALL(D(33), "as it is"), (8, 4096, 16, 8, 128): [(None, "as shipped")] + ALL(D(3), "as it is")}
if sys.argv[1] == "warm":
    jobs = [(c, j) for c, several in CASES.items() for j in several]
    seen = {}
    for c, j in jobs: seen.setdefault((c[2], c[4], c[0] > 32, j if j[0] is None else (j[0].parts > 1, j[0].sharers, j[1])), (c, j))
    for (b, s, page, kv, dim), (deal, name) in list(seen.values())[int(sys.argv[2])::int(sys.argv[3])]:
        try: case(b, min(s, 4096), page, kv, dim)[0](deal, name)(); torch.cuda.synchronize()
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
