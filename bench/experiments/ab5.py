"""python ab4.py [SHARD OF]: the backward with and without split tails and followers, in the suites' bursts."""
import contextlib, random, statistics as st, sys, unittest.mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from bench import timing
import tritonkittens.lang as tk
from tritonkittens.kernels.attention import attention, gradients
original = gradients.fused_backward
def patched(**functions):
    def enter():
        stack = contextlib.ExitStack()
        for name, f in functions.items(): stack.enter_context(unittest.mock.patch.object(gradients, name, f))
        return stack
    return enter
yes, no = (lambda *_: True), (lambda *_: False)
V = {"one": patched(worth_sums=yes, worth_following=no, pieces_of_tail=lambda t, *_: (t, 1)), "one pieces": patched(worth_sums=yes, worth_following=no),
     "follow": patched(worth_sums=yes, worth_following=yes, pieces_of_tail=lambda t, *_: (t, 1)), "follow pieces": patched(worth_sums=yes, worth_following=yes)}
SHAPES = [(d, s, c) for s in (1024, 2048, 4096, 8192, 16384) for d in (64, 128) for c in (False, True) if not c]
if len(sys.argv) > 1: SHAPES = SHAPES[int(sys.argv[1])::int(sys.argv[2])]
for d, s, c in SHAPES:
    b, h = 16384 // s, 2048 // d
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    o = attention(q, k, v, causal=c); do = torch.randn_like(o)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): oc = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=c)
    def ours(enter):
        def call():
            with enter(): return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        return call
    calls = {"cudnn": lambda: torch.autograd.grad(oc, (q, k, v), do, retain_graph=True)} | {n: ours(e) for n, e in V.items() if not (c and "pieces" in n) and not (s == 512 and "follow" in n)}
    right = calls["cudnn"]()
    for n, f in calls.items():
        err = max(((g.float() - r.float()).norm() / r.float().norm()).item() for g, r in zip(f(), right))
        if not err < 0.02: print("WRONG", d, s, c, n, err)
    if len(sys.argv) > 1: continue
    rounds = {n: timing.device(f) for n, f in calls.items()}; timing.settle(rounds.values())
    times, order = {n: [] for n in calls}, list(calls)
    for _ in range(10):
        random.shuffle(order)
        for n in order: times[n].append(rounds[n]())
    base = times["one"]
    print(f"D {d:3d} S {s:5d} {'causal' if c else '      '}", "  ".join(f"{n} {st.median(t)*1e3:.1f} {st.median(p / o_ for p, o_ in zip(times['cudnn'], t)):.3f} {st.median(p / o_ for p, o_ in zip(base, t)):.3f}" for n, t in times.items()), flush=True)
