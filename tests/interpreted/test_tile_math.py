"""Tile math in Triton's interpreter: values of every operation, by element type and shape, and at random shapes,
offsets and values."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonkittens.lang as tk

from ..cases_tile_math import FP8, GROUPS, SHAPES, arguments, cases_of, check, inputs_of, kernel_of, vectors_of
from ..util import poison, slow


def shapes_of(name, dtype):
    if dtype in FP8:
        return (16, 32), (48, 96)
    if name == "reductions":  # the interpreter multiplies up element by element
        return (16, 16), (32, 48)
    return SHAPES if dtype == GROUPS[name].dtypes[0] else (SHAPES[0], SHAPES[2])


# Each element type of a group in a shape; shapes take turns.
COMBINATIONS = [
    (pytest.param if i == d % len(shapes_of(name, dtype)) else slow)(name, dtype, shape)
    for name, group in GROUPS.items()
    for d, dtype in enumerate(group.dtypes)
    for i, shape in enumerate(shapes_of(name, dtype))
]


def run(rng, name, dtype, shape, **offsets):
    args, want = inputs_of(rng, GROUPS[name], dtype, shape, **offsets)
    kernel_of(name, dtype, interpreted=True)[(1,)](*arguments(args), tk.rt(dtype, *shape))
    check(name, dtype, args[3], want, interpreted=True)


@pytest.mark.parametrize(
    "name, dtype, shape", COMBINATIONS, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v)
)
def test_values(rng, name, dtype, shape):
    run(rng, name, dtype, shape)


WITH_VECTORS = [
    (name, dtype)
    for name, group in GROUPS.items()
    for dtype in group.dtypes
    if any(re.search(r"\b[cr]\b", c.code) for c in group.cases)
]
OF_VECTORS = [
    (name, dtype) for name, group in GROUPS.items() for dtype in group.dtypes if cases_of(name, dtype, True, "rows")
]


@pytest.mark.parametrize("name, dtype", WITH_VECTORS, ids=str)
def test_values_with_vectors_of_tensors_of_several_dimensions(rng, name, dtype):
    shape = (16, 16) if name == "reductions" else (16, 48)
    args, want = inputs_of(rng, GROUPS[name], dtype, shape)
    kernel = kernel_of(name, dtype, interpreted=True, vectors="loaded")
    kernel[(1,)](*arguments(args), *arguments(vectors_of(want, dtype)), tk.rt(dtype, *shape))
    check(name, dtype, args[3], want, interpreted=True, vectors="loaded")


@pytest.mark.parametrize("name, dtype", OF_VECTORS, ids=str)
def test_values_of_vectors_alone(rng, name, dtype):
    """The rows of the tiles one by one, stored to the rows of a tensor."""
    shape = (3, 48)
    args, want = inputs_of(rng, GROUPS[name], dtype, shape)
    kernel_of(name, dtype, interpreted=True, vectors="rows")[(shape[0],)](
        *arguments(args), tk.rv(dtype, shape[1]), shape[0]
    )
    check(name, dtype, args[3], want, interpreted=True, vectors="rows")


@triton.jit
def copy_beyond(X, Y, N: tl.constexpr):
    for i in range(4):
        tk.store(Y, tk.load(X, tk.rv(tk.fp32, N), (i, 0, 0), fill=7), (i, 0))


def test_vectors_outside_a_tensor_read_the_fill_and_are_not_stored(rng):
    x = torch.from_numpy(rng.standard_normal((2, 1, 40))).float()
    y = poison(torch.empty(5, 64))
    copy_beyond[(1,)](tk.gl(x).plain(), tk.gl(y[:3]).plain(), 48)
    assert torch.equal(y[:2, :40], x[:, 0]) and bool((y[:2, 40:48] == 7).all()) and bool((y[2, :48] == 7).all())
    assert bool(y[:, 48:].isnan().all()) and bool(y[3:].isnan().all())


extents = st.integers(1, 5).map(lambda n: 16 * n)
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["vector", "scans", "softmax", "special", "binary", "exact"]),
    which=st.integers(0, 9),
    rows=extents,
    cols=extents,
    seed=seeds,
)
def test_random_shapes(name, which, rows, cols, seed):
    dtypes = GROUPS[name].dtypes
    run(np.random.default_rng(seed), name, dtypes[which % len(dtypes)], (rows, cols))


@settings(max_examples=30, deadline=None)
@given(
    which=st.integers(0, 3), rows=extents, cols=extents, seed=seeds, a=st.integers(-40, 200), b=st.integers(-40, 200)
)
def test_masks_at_random_offsets(which, rows, cols, seed, a, b):
    """Offsets before, inside and past the tile: torch.where, tril and triu say what stays."""
    if which == 3 or a < 0 or b < 0:
        a, b = abs(a), abs(b)  # block_diagonal and mask divide coordinates, which are not negative
    run(np.random.default_rng(seed), "masks", GROUPS["masks"].dtypes[which], (rows, cols), a=a, b=b)
