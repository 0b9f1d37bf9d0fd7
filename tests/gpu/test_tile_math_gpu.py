"""Tile math on Hopper: the cases of cases_tile_math.py in a plain Triton kernel and in an explicit kernel, on fresh
random inputs and poisoned outputs.
"""

import pytest
import torch

import tritonkittens.lang as tk

from ..cases_tile_math import FP8, GROUPS, SHAPES, arguments, check, inputs_of, kernel_of
from ..util import slow

pytestmark = pytest.mark.gpu

# A group's first element type meets three shapes, the others one each; shapes and places take turns. Each element type
# is quick in one place.
COMBINATIONS = [
    (pytest.param if n == 0 and p == (g + d) % 2 else slow)(
        place, name, dtype, SHAPES[(g + d + p + 2 * n) % len(SHAPES)]
    )
    for g, (name, group) in enumerate(GROUPS.items())
    for d, dtype in enumerate(group.dtypes)
    for p, place in enumerate(("plain", "explicit"))
    for n in range(3 if d == 0 else 1)
]
LAYOUTS = [
    (name, layout, shape)
    for name in ("vector", "reductions", "scans")
    for layout, shape in (("row", (48, 80)), ("memory", (64, 176)))
]


def launch(rng, place, name, dtype, shape, layout="mma", device="cuda"):
    shape = (shape[0], -(-shape[1] // 32) * 32) if dtype in FP8 else shape
    args, want = inputs_of(rng, GROUPS[name], dtype, shape, device=device)
    fn, tile = kernel_of(name, dtype), tk.rt(dtype, *shape, layout)
    if place == "plain":
        fn[(1,)](*arguments(args), tile, num_warps=4)
    else:
        tk.kernel(fn)[(1,)](*(tk.gl(v) if isinstance(v, torch.Tensor) else v for v in args), tile, debug=True)
    if device == "cuda":
        torch.cuda.synchronize()
    check(name, dtype, args[3], want)


@pytest.mark.parametrize(
    "place, name, dtype, shape", COMBINATIONS, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v)
)
def test_values(rng, place, name, dtype, shape):
    launch(rng, place, name, dtype, shape)


@pytest.mark.parametrize(
    "name, layout, shape", LAYOUTS, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v)
)
def test_other_register_layouts(rng, name, layout, shape):
    launch(rng, "explicit", name, tk.fp32, shape, layout)
