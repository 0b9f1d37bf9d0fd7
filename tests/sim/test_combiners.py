"""Reductions and scans in the simulator whose combiner builds tiles, as Triton's attention for Blackwell does to add
two rows with one instruction."""

import numpy as np
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import add2, mul2

from tritonkittens import sim

from ..util import poison


@gluon.jit
def two(a, b):
    """A tile of two numbers."""
    PARENT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, gl.num_warps()], [1, 0])
    lane = gl.arange(0, 2, layout=gl.SliceLayout(0, PARENT))
    return gl.where(lane == 0, a, b)


@gluon.jit
def packed_sum(a, b, c, d):
    return add2(two(a, b), two(c, d)).split()


@gluon.jit
def affine(a, b, c, d):
    """x → c · (a · x + b) + d, by tiles that are multiplied, turned and summed."""
    slope, offset = mul2(two(a, b), two(c, c)).split()
    return slope, gl.sum(two(offset, d).reshape(2, 1).trans(), 1).reshape(())


@gluon.jit
def rows_of(X, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    r, c = gl.arange(0, ROWS, gl.SliceLayout(1, L)), gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    return gl.load(X + r[:, None] * COLUMNS + c[None, :]), r, r[:, None] * COLUMNS + c[None, :]


@gluon.jit
def sums(X, Y, LANES):
    x, rows, _ = rows_of(X, 128, 64)
    first, second = x.reshape(128, 2, 32).permute(0, 2, 1).split()
    a, b = gl.reduce((first, second), 1, packed_sum)
    gl.store(Y + rows, gl.convert_layout(a + b, gl.SliceLayout(1, gl.BlockedLayout([1, 64], [32, 1], [4, 1], [1, 0]))))
    PARENT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, gl.num_warps()], [1, 0])
    # the combiner's own, which the compiler shares with the kernel
    lane = gl.arange(0, 2, layout=gl.SliceLayout(0, PARENT))
    gl.store(LANES + lane, lane)


def test_a_reduction_whose_combiner_builds_tiles(rng):
    x, y, lanes = (
        torch.from_numpy(rng.standard_normal((128, 64), np.float32)),
        poison(torch.empty(128)),
        poison(torch.empty(2, dtype=torch.int32)),
    )
    with sim.device("sm_100a"):
        sums[(1,)](x, y, lanes, num_warps=4)
    assert torch.allclose(y.double(), x.double().sum(1), rtol=0, atol=1e-5) and lanes.tolist() == [0, 1]


@gluon.jit
def carried(A, B, OUT, REVERSE: gl.constexpr):
    a, _, places = rows_of(A, 32, 64)
    b, _, _ = rows_of(B, 32, 64)
    _, out = gl.associative_scan((a, b), 1, affine, reverse=REVERSE)
    gl.store(OUT + places, out)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_whose_combiner_builds_tiles(rng, reverse):
    a, b = (torch.from_numpy(rng.standard_normal((32, 64), np.float32)) for _ in range(2))
    out = poison(torch.empty(32, 64))
    with sim.device("sm_100a"):
        carried[(1,)](a, b, out, reverse, num_warps=4)
    state, expected = torch.zeros(32, dtype=torch.float64), torch.empty(32, 64, dtype=torch.float64)
    for column in reversed(range(64)) if reverse else range(64):
        state = state * a[:, column].double() + b[:, column].double()
        expected[:, column] = state
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-4)


@gluon.jit
def counted(a, b):
    PARENT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    bins = gl.histogram(gl.full([2], 0, gl.int32, PARENT) + a, 2, layout=PARENT)
    return gl.sum(bins, 0) + b


@gluon.jit
def bins(X, Y):
    x, rows, _ = rows_of(X, 32, 64)
    gl.store(Y + rows, gl.reduce(x, 1, counted))


def test_an_operation_that_a_combiner_may_not_use_is_named():
    with (
        pytest.raises(
            sim.SimulationError, match=r"unknown: the simulator has no meaning for tt.histogram inside a region"
        ),
        sim.device("sm_100a"),
    ):
        bins[(1,)](torch.zeros(32, 64, dtype=torch.int32), torch.zeros(32, dtype=torch.int32), num_warps=4)
