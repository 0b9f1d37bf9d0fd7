"""Thresholds of the backward beside cuDNN: python next3.py SECONDS. one: single pass without a follower, follow: with one, two: two passes; still: one without turns."""
import contextlib, random, statistics, sys, time, unittest.mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tritonkittens.kernels.attention import attention, gradients
original = gradients.fused_backward
SHAPES = [(d, s, c) for s in (256, 512, 1024, 2048) for d in (64, 128) for c in (False, True)]
def patched(**functions):
    def enter():
        stack = contextlib.ExitStack()
        for name, f in functions.items(): stack.enter_context(unittest.mock.patch.object(gradients, name, f))
        return stack
    return enter
VARIANTS = dict(one=patched(worth_sums=lambda *_: True, worth_following=lambda *_: False), two=patched(worth_sums=lambda *_: False),
                follow=patched(worth_sums=lambda *_: True, worth_following=lambda *_: True),
                still=patched(worth_sums=lambda *_: True, worth_following=lambda *_: False, fused_backward=lambda *kind: original(*kind, more=(("turns", False),))))
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
    calls = {"cudnn": lambda: torch.autograd.grad(oc, (q, k, v), do, retain_graph=True)} | {n: ours(e) for n, e in VARIANTS.items() if not (c and n in ("follow", "still"))}
    right = calls["cudnn"]()
    for n, f in calls.items():
        err = max(((g.float() - r.float()).norm() / r.float().norm()).item() for g, r in zip(f(), right))
        if not err < 0.02: print("WRONG", d, s, c, n, err)
    times = {n: [] for n in calls}; order = list(calls); torch.cuda.synchronize(); end = time.time() + float(sys.argv[1]) / len(SHAPES)
    while time.time() < end:
        random.shuffle(order)
        for n in order:
            x, y = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000); x.record()
            for _ in range(4): calls[n]()
            y.record(); torch.cuda.synchronize(); times[n].append(x.elapsed_time(y) / 4)
    print(f"D {d:3d} S {s:5d} {'causal' if c else '      '} ({len(times['cudnn'])})", "  ".join(
        f"{n} {statistics.median(t):.4f} {statistics.median(p / o_ for p, o_ in zip(times['cudnn'], t)):.3f}" for n, t in times.items()), flush=True)
