"""What ragged tensors refuse, with its words. No kernel runs."""

import re

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk

TILE = tk.st(tk.bf16, 64, 64)
X = torch.empty(200, 64, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tk.gl(X[None, None], TILE, ragged=True),
            "gl(…, ragged=True) of 4 dimensions with st(bf16, 64, 64): takes two or three dimensions",
        ),
        (
            lambda: tk.gl(X, TILE, tk.sv(tk.bf16, 64), ragged=True),
            "with st(bf16, 64, 64), sv(bf16, 64): takes two or three dimensions, and types of tiles",
        ),
        (lambda: tk.gl(X, ragged=True), "gl(…, ragged=True) of 2 dimensions with no tile type: takes"),
        (
            lambda: tk.gl(X, TILE, ragged=True, static=True),
            "gl(static=…, ragged=True): extents of a ragged tensor are those of its sequences",
        ),
        (
            lambda: tk.layout(globals=dict(X=TILE), input=dict(X=TILE), ragged=("Y",)),
            "layout(ragged=('Y',)): 'Y' is no global; there are X",
        ),
    ],
)
def test_refused_on_the_host(make, message):
    with pytest.raises(tk.TileError, match=re.escape(message)):
        make()


@tk.kernel
@triton.jit
def wrong(X, PLAIN, WHAT: tl.constexpr):
    tile, vector, arrived = tk.allocate(tk.st(tk.bf16, 64, 64)), tk.allocate(tk.sv(tk.bf16, 64)), tk.semaphores(1)
    rows = tk.sequence(3, 50)
    if WHAT == "no sequence":
        tk.load_async(tile, X, (0, 0), arrived[0])
    elif WHAT == "no sequence for registers":
        tk.load(X, tk.rt(tk.bf16, 64, 64), (0, 0))
    elif WHAT == "not ragged":
        tk.store_async(PLAIN, tile, (rows, 0, 0))
    elif WHAT == "vector":
        tk.load_async(vector, PLAIN, (rows, 0, 0), arrived[0])
    elif WHAT == "coordinates":
        tk.store(X, tile, (rows, 0))
    elif WHAT == "one element":
        tk.load_scalar(PLAIN, (rows, 0, 0))
    elif WHAT == "rows":
        tk.extent(X, -2)


REFUSED = {
    "no sequence": "load_async: the tensor is ragged; the first coordinate is a tk.sequence, in front of one for each "
    "dimension",
    "no sequence for registers": "load of rt(bf16, 64, 64): the tensor is ragged; the first coordinate is a "
    "tk.sequence",
    "not ragged": "store_async of a sequence: the tensor's map ends with the tensor; pass tk.gl(tensor, tile types, "
    "ragged=True)",
    "vector": "load_async of a sequence: TMA moves tiles of it, not vectors",
    "coordinates": "store of a tile of shape [64, 64]: 1 coordinates for a tensor of 2 dimensions; give one per "
    "dimension, in tiles",
    "one element": "load_scalar: takes no tk.sequence",
    "rows": "extent(axis=-2): the rows of a ragged tensor are those of its sequences",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_a_kernel(what):
    with pytest.raises(tk.TileError, match=re.escape(REFUSED[what])):
        wrong.compile(tk.gl(X, TILE, ragged=True), tk.gl(X, TILE, tk.sv(tk.bf16, 64)), what)
