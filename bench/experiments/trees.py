"""Backwards of several trees beside cuDNN in one process: python trees.py warm I N TREES | time SECONDS TREES; TREES: name=path,…; $AB_S: lengths, $AB_D dimensions, $AB_C masks."""
import contextlib, os, random, statistics, sys, time
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
class Tree:
    def __init__(self, name, path):
        path, _, knobs = path.partition(":")
        self.path, self.modules = path, {}
        with self:
            from tritonkittens.kernels.attention import attention, gradients
            self.attention = attention
            more = tuple((k, eval(v)) for k, v in (pair.split("_") for pair in knobs.split(";") if pair))
            if more:
                original = gradients.fused_backward
                gradients.fused_backward = lambda *kind: original(*kind, *((1, False)[len(kind) - 7:]), more)
    def __enter__(self):
        for k in [k for k in sys.modules if k.split(".")[0] in ("tritonkittens", "bench")]: del sys.modules[k]
        sys.modules.update(self.modules); sys.path.insert(0, self.path)
    def __exit__(self, *_):
        self.modules = {k: v for k, v in sys.modules.items() if k.split(".")[0] in ("tritonkittens", "bench")}
        sys.path.remove(self.path)
trees = dict(x.split("=") for x in sys.argv[-1].split(","))
E = lambda n, d: eval(os.environ.get(n, d))
SHAPES = [(d, s, c) for s in E("AB_S", "(512, 1024, 2048, 4096, 8192, 16384)") for d in E("AB_D", "(64, 128)") for c in E("AB_C", "(False, True)")]
def make(d, s):
    b, h = 16384 // s, 2048 // d
    torch.manual_seed(0)
    return [torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)] + [torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16)]
if sys.argv[1] == "warm":
    jobs = [(x, d, s, c) for d, s, c in ((64, 4096, True), (64, 4096, False), (128, 4096, False), (128, 4096, True), (64, 512, False), (128, 512, False)) for x in trees]
    for x, d, s, c in jobs[int(sys.argv[2])::int(sys.argv[3])]:
        t = Tree(x, trees[x]); q, k, v, do = make(d, s)
        with t: torch.autograd.grad(t.attention(q, k, v, causal=c), (q, k, v), do)
        torch.cuda.synchronize()
    sys.stdout.flush(); os._exit(0)
T = {x: Tree(x, p) for x, p in trees.items()}
for d, s, c in SHAPES:
    q, k, v, do = make(d, s)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): oc = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=c)
    outs = {"cudnn": oc}
    for x, t in T.items():
        with t: outs[x] = t.attention(q, k, v, causal=c)
    def call(x, n=1):
        for _ in range(n): got = torch.autograd.grad(outs[x], (q, k, v), do, retain_graph=True)
        return got
    def within(x): return contextlib.nullcontext() if x == "cudnn" else T[x]
    right = None
    for x in outs:
        with within(x): got = call(x)
        if right is None: right = got
        err = max(((g.float() - r.float()).norm() / r.float().norm()).item() for g, r in zip(got, right))
        if not err < 0.02: print("WRONG", d, s, c, x, err)
    times = {x: [] for x in outs}; order = list(outs); torch.cuda.synchronize(); end = time.time() + float(sys.argv[2]) / len(SHAPES)
    reps = 4 if s <= 4096 else 2
    while time.time() < end:
        random.shuffle(order)
        for x in order:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with within(x):
                torch.cuda._sleep(1_200_000); a.record()
                call(x, reps)
                b.record(); torch.cuda.synchronize(); times[x].append(a.elapsed_time(b) / reps)
    base = list(T)[0]
    print(f"D {d:3d} S {s:5d} {'causal' if c else '      '} ({len(times['cudnn'])}) cudnn {statistics.median(times['cudnn']):.4f}", "  ".join(
        f"{x} {statistics.median(t):.4f} {statistics.median(p / o for p, o in zip(times['cudnn'], t)):.3f} {statistics.median(p / o for p, o in zip(times[base], t)):.3f}" for x, t in times.items() if x != "cudnn"), flush=True)
sys.stdout.flush(); os._exit(0)
