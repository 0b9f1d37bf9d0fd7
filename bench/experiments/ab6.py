"""python ab6.py [SHARD OF]: pieces for few tasks; following under a causal mask; two passes at 512 keys. Suites' bursts; cuDNN's time by ours, that of `one` by it."""
import contextlib, random, statistics as st, sys, unittest.mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from bench import timing
from tritonkittens.kernels.attention import attention, gradients
def patched(**functions):
    def enter():
        stack = contextlib.ExitStack()
        for name, f in functions.items(): stack.enter_context(unittest.mock.patch.object(gradients, name, f))
        return stack
    return enter
yes, no, whole = (lambda *_: True), (lambda *_: False), (lambda t, *_: (t, 1))
one, pieces = patched(worth_sums=yes, worth_following=no, pieces_of_tail=whole), patched(worth_sums=yes, worth_following=no)
follow, both, two = patched(worth_sums=yes, worth_following=yes, pieces_of_tail=whole), patched(worth_sums=yes, worth_following=yes), patched(worth_sums=no)
JOBS = [(1, 16, 16, 1024, 128, False, dict(one=one, pieces=pieces)), (1, 16, 16, 2048, 128, False, dict(one=one, pieces=pieces)), (1, 12, 12, 4096, 64, False, dict(one=one, pieces=pieces)),
        (2, 12, 12, 1024, 64, False, dict(one=one, pieces=pieces)), (1, 16, 16, 4096, 64, False, dict(one=one, pieces=pieces)), (1, 8, 8, 8192, 128, False, dict(one=one, pieces=pieces)),
        (4, 16, 16, 4096, 128, False, dict(one=one, follow=follow, both=both)), (1, 16, 16, 16384, 128, False, dict(one=one, follow=follow, both=both)),
        (4, 16, 16, 4096, 128, True, dict(one=one, follow=follow)), (2, 16, 16, 8192, 128, True, dict(one=one, follow=follow)), (1, 16, 16, 16384, 128, True, dict(one=one, follow=follow)),
        (32, 16, 16, 512, 128, False, dict(one=one, two=two)), (32, 32, 32, 512, 64, True, dict(one=one, two=two)), (16, 16, 16, 1024, 128, True, dict(one=one, two=two)),
        (64, 32, 32, 256, 64, False, dict(one=one, two=two)), (32, 16, 16, 512, 128, True, dict(one=one, two=two))]
if len(sys.argv) > 1: JOBS = JOBS[int(sys.argv[1])::int(sys.argv[2])]
for b, h, g, s, d, c, variants in JOBS:
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, n, s, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (h, g, g))
    o = attention(q, k, v, causal=c); do = torch.randn_like(o)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): oc = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=c)
    def ours(enter):
        def call():
            with enter(): return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        return call
    calls = {"cudnn": lambda: torch.autograd.grad(oc, (q, k, v), do, retain_graph=True)} | {n: ours(e) for n, e in variants.items()}
    right = calls["cudnn"]()
    for n, f in calls.items():
        err = max(((x.float() - r.float()).norm() / r.float().norm()).item() for x, r in zip(f(), right))
        if not err < 0.02: print("WRONG", b, h, s, d, c, n, err)
    if len(sys.argv) > 1: continue
    rounds = {n: timing.device(f) for n, f in calls.items()}; timing.settle(rounds.values())
    times, order = {n: [] for n in calls}, list(calls)
    for _ in range(12):
        random.shuffle(order)
        for n in order: times[n].append(rounds[n]())
    base = times["one"]
    print(f"B {b} H {h} S {s} D {d} {'causal' if c else ''}", "  ".join(f"{n} {st.median(t)*1e3:.1f} {st.median(p / o_ for p, o_ in zip(times['cudnn'], t)):.3f} {st.median(p / o_ for p, o_ in zip(base, t)):.3f}" for n, t in times.items()), flush=True)
