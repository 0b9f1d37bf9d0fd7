import sys, torch
from tritonkittens.kernels.attention import attention
for d, s, c in ((128, 4096, False), (128, 4096, True), (64, 4096, False), (64, 4096, True)):
    b, h = 16384 // s, 2048 // d
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    o = attention(q, k, v, causal=c); do = torch.randn_like(o)
    torch.autograd.grad(o, (q, k, v), do, retain_graph=True); torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for _ in range(3): torch.autograd.grad(o, (q, k, v), do, retain_graph=True); torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
