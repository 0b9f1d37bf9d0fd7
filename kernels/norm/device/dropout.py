"""Dropout of a tile of rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dropout(x, RNG, p, t, BRANCH: tl.constexpr):
    """x / (1 - p), or 0 where a uniform number of [0, 1) is below p. Philox has four of them, for four neighbouring
    columns, at a counter. RNG: its seed, and what is added to counters. BRANCH: 0 for x, 1 for x1."""
    quads = t.first // 4 + tl.arange(0, x.shape[1] // 4)
    counter = tl.load(RNG + 1) + t.row[:, None] * tl.cdiv(t.n, 4) + quads[None, :]
    branch = tl.full(counter.shape, BRANCH, tl.uint32)
    a, b, c, d = tl.philox(tl.load(RNG), counter.to(tl.uint32), (counter >> 32).to(tl.uint32), branch, branch)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), x.shape)
    return tl.where((words >> 8).to(tl.float32) * (1 / 16777216) >= p, x / (1 - p), 0)
