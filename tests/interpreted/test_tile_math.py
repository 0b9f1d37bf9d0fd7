"""Tile math in Triton's interpreter: values of every operation, by element type and shape, and at random shapes, offsets and values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonkittens.lang as tk

from ..cases_tile_math import FP8, GROUPS, SHAPES, arguments, check, inputs_of, kernel_of


def shapes_of(name, dtype):
    if dtype in FP8:
        return (16, 32), (48, 96)
    if name == "reductions":  # the interpreter multiplies up element by element
        return (16, 16), (32, 48)
    return SHAPES if dtype == GROUPS[name].dtypes[0] else (SHAPES[0], SHAPES[2])


COMBINATIONS = [(name, dtype, shape) for name, group in GROUPS.items() for dtype in group.dtypes for shape in shapes_of(name, dtype)]


def run(rng, name, dtype, shape, **offsets):
    args, want = inputs_of(rng, GROUPS[name], dtype, shape, **offsets)
    kernel_of(name, dtype, interpreted=True)[(1,)](*arguments(args), tk.rt(dtype, *shape))
    check(name, dtype, args[3], want, interpreted=True)


@pytest.mark.parametrize("name, dtype, shape", COMBINATIONS, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v))
def test_values(rng, name, dtype, shape):
    run(rng, name, dtype, shape)


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
@given(which=st.integers(0, 3), rows=extents, cols=extents, seed=seeds, a=st.integers(-40, 200), b=st.integers(-40, 200))
def test_masks_at_random_offsets(which, rows, cols, seed, a, b):
    """Offsets before, inside and past the tile: torch.where, tril and triu say what stays."""
    if which == 3 or a < 0 or b < 0:
        a, b = abs(a), abs(b)  # block_diagonal and mask divide coordinates, which are not negative
    run(np.random.default_rng(seed), "masks", GROUPS["masks"].dtypes[which], (rows, cols), a=a, b=b)
