"""Pages: parts 1 and 2. python decode_probe2.py NAME"""
import functools, random, statistics as st, sys, torch
from bench import timing
from bench.attention import in_pages
from tritonkittens.kernels.attention import attention_decode
H, G, D = 32, 8, 128
for B, S in ((8, 1024), (8, 2048), (8, 4096), (8, 8192), (16, 4096), (4, 16384), (8, 32768)):
    torch.manual_seed(0)
    q = torch.randn(B, H, 1, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(B, G, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    target = torch.empty_like(k); out = torch.empty_like(q)
    lengths = torch.full((B,), S, dtype=torch.int32, device="cuda")
    calls = {"copy": (lambda: target.copy_(k), timing.device)}
    for p in (1, 2): calls[f"all {p}"] = (functools.partial(attention_decode, q, k, v, out=out, parts=p), timing.reading)
    for p in (1, 2): calls[f"lengths {p}"] = (functools.partial(attention_decode, q, k, v, out=out, lengths=lengths, parts=p), timing.reading)
    for size in (16, 64, 128):
        t = torch.randperm(B * -(-S // size), device="cuda").int().view(B, -1); kt, vt = (in_pages(x, t, size) for x in (k, v))
        for p in (1, 2, 4): calls[f"{size} {p}"] = (functools.partial(attention_decode, q, kt, vt, lengths=lengths, pages=t, parts=p, out=out), timing.reading)
    rounds = {}
    for n, (f, kind) in calls.items():
        f(); rounds[n] = kind(f)
    times = {n: [] for n in calls}; order = list(calls)
    for _ in range(8):
        random.shuffle(order)
        for n in order: times[n].append(rounds[n]())
    print(sys.argv[1], B, S, f"copy {st.median(times['copy'])*1e3:.1f};", ", ".join(f"{n} {st.median(c / t for c, t in zip(times['copy'], times[n])):.3f}" for n in calls if n != "copy"), flush=True)
