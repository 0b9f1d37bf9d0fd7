"""What the gradients of a linear layer and cross entropy need beside products."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.launch import plain_kernel


@plain_kernel(num_warps=8)
@triton.jit
def scale_in_place(X, G, n, BLOCK: tl.constexpr):
    """X *= G, one number. X is not touched where G is 1, as it is for the last step of most models."""
    g = tl.load(G)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, tl.where(g == 1, 0, n).to(tl.int64), tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tk.cast(tl.load(X + i, mask=i < n), tk.fp32)
        tl.store(X + i, tk.cast(x * g, X.dtype.element_ty), mask=i < n)
