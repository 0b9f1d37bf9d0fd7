import functools, os, random, statistics, sys, time
from unittest import mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from bench import timing
from tritonkittens.kernels.attention import attention_decode, dealing, decoding
O = dealing.decode
def forced(**more):
    return lambda kind, **given: O(kind, **({**given, **more} if "drawn" in given else given))
two = dealing.SLOTS
def fewer(*kind, **given):
    with mock.patch.object(dealing, "SLOTS", 2): return O.__wrapped__(*kind, **given)
fewer = functools.lru_cache(fewer)
def fewer_even(*kind, **given): return fewer(*kind, **({**given, "drawn": False} if "drawn" in given else given))
V = {"shipped": O, "even": forced(drawn=False), "s2": fewer, "s2even": fewer_even}
SHAPES = [(64, 1024, 8), (64, 8192, 8), (32, 2048, 8), (20, 2000, 8), (64, 256, 8), (64, 2048, 8), (128, 512, 4), (48, 4096, 8), (128, 1024, 8)]
def case(d, b, s, kv):
    q, k, v = (torch.randn(*x, device="cuda", dtype=torch.bfloat16) for x in ((b, 4 * kv, 1, d), (b, kv, s, d), (b, kv, s, d)))
    out = torch.empty_like(q)
    def ours(dec):
        known = {}
        def run():
            with mock.patch.multiple(decoding, decode=dec, _launches=known): return attention_decode(q, k, v, out=out)
        return run
    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return {**{n: ours(x) for n, x in V.items() if d == 64 or not n.startswith("s2")}, "cudnn": cudnn}
if sys.argv[1] == "warm":
    d, n = [(64, x) for x in V] + [(128, "shipped"), (128, "even")], int(sys.argv[2])
    if n < len(d): case(d[n][0], 64, 256, 8)[d[n][1]](); torch.cuda.synchronize()
    os._exit(0)
for d in (64, 128):
    for shape in SHAPES:
        if d == 128 and shape in ((128, 1024, 8), (48, 4096, 8)): continue
        calls = case(d, *shape); rounds = {}
        for n, c in calls.items(): c(); rounds[n] = timing.reading(c)
        times = {n: [] for n in rounds}; end = time.time() + 3.4; order = list(rounds)
        while time.time() < end or len(times["cudnn"]) < 10:
            random.shuffle(order)
            for n in order: times[n].append(rounds[n]() * 1e3)
        print(d, shape, len(times["cudnn"]), "  ".join(f"{n} {statistics.median(t):.2f} {statistics.median(c / x for c, x in zip(times['cudnn'], t)):.4f}" for n, t in times.items()), flush=True)
sys.stdout.flush(); os._exit(0)
