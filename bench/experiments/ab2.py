"""The backward of this tree beside cuDNN: python ab2.py warm I N VARIANTS | time SECONDS VARIANTS | ncu VARIANTS. VARIANTS: name:knob=value;…, comma separated
(knobs of AttentionBackward; `old` trees know fewer). 24 shapes; prints ms and cuDNN's time by ours, median over rounds."""
import functools, random, statistics, sys, time, unittest.mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
import tritonkittens.lang as tk
from tritonkittens.kernels.attention import attention, gradients
original = gradients.fused_backward
VARIANTS = {}
for text in sys.argv[-1].split(","):
    name, _, knobs = text.partition(":")
    VARIANTS[name] = tuple((k, eval(v)) for k, v in (pair.split("=") for pair in knobs.split(";") if pair))
import os
SHAPES = [(d, s, c) for s in eval(os.environ.get("AB_S", "(512, 1024, 2048, 4096, 8192, 16384)")) for d in (64, 128) for c in (False, True)]
def make(d, s, c):
    b, h = 16384 // s, 2048 // d
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    o = attention(q, k, v, causal=c); do = torch.randn_like(o)
    def ours(knobs):
        def call():
            if not knobs: return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
            def of_knobs(*kind): 
                try: return original(*kind, more=knobs)
                except Exception: return original(*kind)  # knobs that only one class has
            with unittest.mock.patch.object(gradients, "fused_backward", of_knobs): return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        return call
    return q, k, v, do, ours
mode = sys.argv[1]
if mode == "warm":
    jobs = [(d, s, c, x) for d in (64, 128) for s, c in ((4096, False), (4096, True), (1024, False)) for x in VARIANTS.values()] + [(128, 512, True, ())]
    for d, s, c, x in jobs[int(sys.argv[2])::int(sys.argv[3])]:
        *_, ours = make(d, s, c); ours(x)(); torch.cuda.synchronize()
elif mode == "ncu":
    names = []
    for d, s, c in SHAPES:
        if s not in (512, 1024, 4096) or (d, s, c) == (128, 512, True): continue
        *_, ours = make(d, s, c)
        for n, x in VARIANTS.items():
            ours(x)(); torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart(); ours(x)(); torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop(); names.append(f"D{d} S{s} {'causal' if c else ''} {n}")
    print("NAMES", "|".join(names))
else:
    for d, s, c in SHAPES:
        q, k, v, do, ours = make(d, s, c)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): oc = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=c)
        calls = {"cudnn": lambda: torch.autograd.grad(oc, (q, k, v), do, retain_graph=True)} | {n: ours(x) for n, x in VARIANTS.items()}
        right = None
        for n, f in calls.items():
            got = f()
            if right is None: right = got
            err = max(((g.float() - r.float()).norm() / r.float().norm()).item() for g, r in zip(got, right))
            if not err < 0.02: print("WRONG", d, s, c, n, err)
        times = {n: [] for n in calls}; order = list(calls); torch.cuda.synchronize(); end = time.time() + float(sys.argv[2]) / len(SHAPES)
        reps = 4 if s <= 4096 else 2
        while time.time() < end:
            random.shuffle(order)
            for n in order:
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(400_000); a.record()
                for _ in range(reps): calls[n]()
                b.record(); torch.cuda.synchronize(); times[n].append(a.elapsed_time(b) / reps)
        print(f"D {d:3d} S {s:5d} {'causal' if c else '      '} ({len(times['cudnn'])})", "  ".join(
            f"{n} {statistics.median(t):.4f} {statistics.median(p / o for p, o in zip(times['cudnn'], t)):.3f}" for n, t in times.items()), flush=True)
