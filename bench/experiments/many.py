"""More tasks than multiprocessors: evenly (shipped), alone on a multiprocessor in rounds, in parts, drawn; beside cuDNN and FlashAttention-2: many.py warm I | run SECONDS."""
import functools, os, random, statistics, sys, time
from unittest import mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from bench import timing
from bench.attention import in_pages
from tritonkittens.kernels.attention import attention_decode, dealing, decoding
from tritonkittens.kernels.attention.dealing import Deal as D
O = dealing.decode
def forced(**more): return lambda kind, **given: O(kind, **({**given, **more} if "drawn" in given else given))
V = {"shipped": (None, O), "even": (D(), forced(drawn=False)), "drawn": (D(), forced(drawn=True)), "alone": (D(1, alone=True), forced(drawn=False)), "2 parts": (D(2), O), "3 parts": (D(3), O), "4 parts": (D(4), O)}
SHAPES = [(48, 4096, 8), (40, 4096, 8), (36, 3000, 8), (25, 3000, 8), (20, 2000, 8), (34, 1024, 8), (50, 1024, 8), (64, 1024, 8), (17, 8192, 8), (100, 700, 8), (70, 2048, 4), (64, 4096, 8)]
def case(d, page, b, s, kv):
    q, k, v = (torch.randn(*x, device="cuda", dtype=torch.bfloat16) for x in ((b, 4 * kv, 1, d), (b, kv, s, d), (b, kv, s, d)))
    out, more, kk, vv = torch.empty_like(q), {}, k, v
    if page:
        table = torch.randperm(b * -(-s // page), device="cuda").int().reshape(b, -1)
        more = dict(pages=table, lengths=torch.full((b,), s, dtype=torch.int32, device="cuda")); kk, vv = (in_pages(x, table, page) for x in (k, v))
    def ours(deal, dec):
        known = {}
        def run():
            with mock.patch.multiple(decoding, decode=dec, _launches=known, **({} if deal is None else dict(deal_of=lambda *_: deal))): return attention_decode(q, kk, vv, out=out, **more)
        return run
    def sdpa(backend):
        def run():
            with sdpa_kernel(backend): return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return run
    return {**{n: ours(*x) for n, x in V.items()}, "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "flash": sdpa(SDPBackend.FLASH_ATTENTION)}
KINDS = [(64, None), (128, None), (64, 16), (64, 128)]
if sys.argv[1] == "warm":
    jobs = [(k, n) for k in KINDS for n in V]; i = int(sys.argv[2])
    for k, n in jobs[i::14]: case(*k, 48, 400, 8)[n](); torch.cuda.synchronize()
    os._exit(0)
each = float(sys.argv[2]) / len(SHAPES) / len(KINDS)
for k in KINDS:
    for shape in SHAPES:
        calls = case(*k, *shape); rounds = {}; right = calls["cudnn"]().float()
        for n, c in calls.items():
            if (c().float() - right).abs().max() > 0.03: print("WRONG", k, shape, n)
            rounds[n] = timing.reading(c)
        times = {n: [] for n in rounds}; end = time.time() + each; order = list(rounds)
        while time.time() < end or len(times["cudnn"]) < 7:
            random.shuffle(order)
            for n in order: times[n].append(rounds[n]() * 1e3)
        best = [min(a, b) for a, b in zip(times["cudnn"], times["flash"])]
        print(*k, shape, len(best), "  ".join(f"{n} {statistics.median(t):.2f} {statistics.median(c / x for c, x in zip(best, t)):.3f}" for n, t in times.items()), flush=True)
sys.stdout.flush(); os._exit(0)
