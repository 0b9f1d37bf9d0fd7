"""Views of tensor memory as another type, vectors in it, and what works on rows of threads, simulated."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import meta, poison, refused, relative_error
from tritonkittens import sim
from tritonkittens.inline_ptx import tcgen05

ROWS = 128
BLACKWELL = dict(arch="sm_100a")


@tk.kernel
@triton.jit
def write_over(X, Y, Over, Behind, COLS: tl.constexpr, COLUMN: tl.constexpr):
    """X in tensor memory as fp32, Y over its columns from COLUMN on as bf16. Over: Y again. Behind: X, its part of the
    first columns replaced where Y does not lie there."""
    tile = tk.tensor_allocator(tk.tt(tk.fp32, 128, COLS))
    tk.store(tile, tk.load(X, tk.rt(tk.fp32, 128, COLS, "row"), (0, 0)))
    over = tk.reinterpret(tile, tk.tt(tk.bf16, 128, 64), COLUMN)
    tk.store(over, tk.load(Y, tk.rt(tk.bf16, 128, 64, "row"), (0, 0)))
    tk.store(Over, tk.load(over), (0, 0))
    tk.store(Behind, tk.load(tile), (0, 0))


@pytest.mark.parametrize("cols, column", [(64, 0), (128, 96), (96, 64)], ids=str)
def test_a_view_of_another_type_lies_over_its_columns_only(cols, column, rng):
    x, y = torch.randn(ROWS, cols), torch.randn(ROWS, 64).bfloat16()
    over, behind = poison(torch.empty_like(y)), poison(torch.empty_like(x))
    with sim.device(**BLACKWELL):
        write_over[(1,)](tk.gl(x), tk.gl(y), tk.gl(over), tk.gl(behind), cols, column)
    expected = x.clone()
    expected[:, column : column + 32] = y.view(torch.float32)
    assert torch.equal(over, y) and torch.equal(behind.view(torch.int32), expected.view(torch.int32))


@tk.kernel
@triton.jit
def refuse(X, WHAT: tl.constexpr):
    s = tk.tensor_allocator(tk.tt(tk.fp32, 128, 96))
    if WHAT == "memory":
        tk.reinterpret(tk.allocate(tk.st(tk.bf16, 128, 64)), tk.tt(tk.bf16, 128, 64))
    elif WHAT == "type":
        tk.reinterpret(s, tk.st(tk.bf16, 128, 64))
    elif WHAT == "ring":
        tk.reinterpret(tk.tensor_allocator(tk.tt(tk.fp32, 128, 64), 2), tk.tt(tk.bf16, 128, 64))
    elif WHAT == "rows":
        tk.reinterpret(s, tk.tt(tk.bf16, 64, 64))
    elif WHAT == "power of two":
        tk.reinterpret(s, tk.tt(tk.bf16, 128, 48))
    elif WHAT == "outside":
        tk.reinterpret(s, tk.tt(tk.bf16, 128, 128), column=48)
    elif WHAT == "run time":
        tk.reinterpret(s, tk.tt(tk.bf16, 128, 64), column=tk.block_index())
    elif WHAT == "pieces":
        tk.reinterpret(s, tk.tt(tk.bf16, 128, 64), column=48)
    elif WHAT == "vector":
        tk.load(tk.tensor_allocator(tk.tt(tk.fp32, 64, 1)))
    elif WHAT == "half a column":
        tk.reinterpret(s, tk.tt(tk.bf16, 128, 1))
    elif WHAT == "factors":
        tk.rescale_row(s, tk.zero(tk.rv(tk.fp32, 64)))
    elif WHAT == "share":
        tk.exp2(tk.zero(tk.rt(tk.fp32, 128, 64)), fma_share=0.3)


VIEW = "reinterpret(tt(fp32, 128, 96), tt(bf16, 128, "
REFUSED = {
    "memory": "reinterpret(st(bf16, 128, 64), tt(bf16, 128, 64)): takes a tensor-memory tile and a type of one (tt)",
    "type": "reinterpret(tt(fp32, 128, 96), st(bf16, 128, 64)): takes a tensor-memory tile and a type of one (tt)",
    "ring": "reinterpret(tt(fp32, 128, 64), tt(bf16, 128, 64), column=0): this is a ring; take a slot first, "
    "ring[slot]",
    "rows": "reinterpret(tt(fp32, 128, 96), tt(bf16, 64, 64), column=0): a view of tensor memory has all 128 rows",
    "power of two": VIEW + "48), column=0): the columns of the view must be a power of two",
    "outside": VIEW + "128), column=48): the view needs 64 columns of 32 bits; the tile has 96",
    "run time": "the column must be a compile-time constant from 0 on",
    "pieces": VIEW + "64), column=48): the view cuts the tile's pieces of 64, 32 columns",
    "vector": "load of tt(fp32, 64, 1) by 4 warps: a vector in tensor memory needs a thread for each row, 128 rows for "
    "four warps",
    "half a column": "tt(bf16, 128, 1): cols: 1 must be a positive multiple of 16 (a tensor-memory tile covers whole "
    "16-column pieces)",
    "factors": "rescale_row of tt(fp32, 128, 96) by 4 warps and a vector of shape [64]: needs an fp32 tile of a row "
    "for each thread, 128 rows for four warps, and a factor for each row",
    "share": "exp2(fma_share=0.3): must be 0, 0.25, 0.5, 0.75 or 1",
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_views_are_refused(what):
    with refused(REFUSED[what]):
        refuse.compile(tk.gl(meta(128, 64)), what, **BLACKWELL)


@tk.kernel
@triton.jit
def distances(X, Largest, Smallest, COLS: tl.constexpr):
    """How far X is below its row's maximum, and above its minimum."""
    s = tk.tensor_allocator(tk.tt(tk.fp32, 128, COLS))
    tk.store(s, tk.load(X, tk.rt(tk.fp32, 128, COLS, "row"), (0, 0)))
    x, largest = tk.load_max(s)
    tk.store(Largest, tk.sub_row(x, largest), (0, 0))
    x, smallest = tk.load_min(s)
    tk.store(Smallest, tk.sub_row(x, smallest), (0, 0))


@pytest.mark.parametrize("cols", [16, 64, 128])
def test_loads_with_the_extremes_of_rows(cols, rng):
    x = torch.randn(ROWS, cols)
    x[3, 5] = math.nan
    largest, smallest = poison(torch.empty_like(x)), poison(torch.empty_like(x))
    with sim.device("sm_103a"):
        distances[(1,)](tk.gl(x), tk.gl(largest), tk.gl(smallest), cols)
    known = x.where(~x.isnan(), 0)
    torch.testing.assert_close(largest, x - known.amax(1, keepdim=True), equal_nan=True)
    torch.testing.assert_close(smallest, x - known.amin(1, keepdim=True), equal_nan=True)
    given = tk.gl(x), tk.gl(largest), tk.gl(smallest), cols
    ptx = distances.compile(*given, arch="sm_103a").asm["ptx"]
    assert ".max" in ptx and ".min" in ptx and ptx.count("tcgen05.ld.red") >= 2
    with refused("load_max (tcgen05.ld.red) needs sm_103a", tk.ArchitectureError):
        distances.compile(*given, **BLACKWELL)


@tk.kernel
@triton.jit
def pass_vector(X, Y):
    """Y = the rows' sums of X, through a column of tensor memory."""
    column = tk.reinterpret(tk.tensor_allocator(tk.tt(tk.fp32, 128, 64)), tk.tt(tk.fp32, 128, 1), 5)
    tk.store(column, tk.row_sum(tk.load(X, tk.rt(tk.fp32, 128, 32, "row"), (0, 0))))
    tk.store(Y, tk.load(column), (0,))


def test_a_column_of_tensor_memory_holds_a_vector(rng):
    x, y = torch.randn(ROWS, 32), poison(torch.empty(ROWS))
    with sim.device(**BLACKWELL):
        pass_vector[(1,)](tk.gl(x), tk.gl(y))
    assert relative_error(y, x.double().sum(1)) < 1e-6


@tk.kernel
@triton.jit
def rescale(X, Factors, Y, COLS: tl.constexpr, WRITTEN: tl.constexpr):
    """Y = X · factors in tensor memory. Nothing writes it where WRITTEN is False."""
    tile = tk.tensor_allocator(tk.tt(tk.fp32, 128, COLS))
    if WRITTEN:
        tk.store(tile, tk.load(X, tk.rt(tk.fp32, 128, COLS, "row"), (0, 0)))
    tk.rescale_row(tile, tk.load(Factors, tk.col_vec(tk.rt(tk.fp32, 128, COLS, "row")), (0,)))
    if WRITTEN:
        tcgen05.fence_before_thread_sync()
        tk.sync()
        tcgen05.fence_after_thread_sync()
        tk.store(Y, tk.load(tile), (0, 0))


@pytest.mark.parametrize("cols", [16, 96, 128])
def test_rows_of_tensor_memory_are_rescaled_where_a_warp_needs_it(cols, rng):
    x, factors = torch.randn(ROWS, cols), torch.ones(ROWS)
    factors[[3, 40]] = torch.rand(2)
    y = poison(torch.empty_like(x))
    with sim.device(**BLACKWELL):
        rescale[(1,)](tk.gl(x), tk.gl(factors), tk.gl(y), cols, True)
        assert torch.equal(y, x * factors[:, None])
        rescale[(1,)](tk.gl(x), tk.gl(torch.ones(ROWS)), tk.gl(y), cols, False)  # no warp reads what nothing wrote
    with pytest.raises(sim.SimulationError, match="uninitialized"), sim.device(**BLACKWELL):
        rescale[(1,)](tk.gl(x), tk.gl(factors), tk.gl(y), cols, False)


@tk.kernel
@triton.jit
def exponentials(X, Y, SHARE: tl.constexpr):
    tk.store(Y, tk.exp2(tk.load(X, tk.rt(tk.fp32, 128, 32, "row"), (0, 0)), SHARE), (0, 0))


@pytest.mark.parametrize("share", [0.25, 0.5, 1])
def test_a_share_of_exponentials_is_a_polynomial_on_the_fma_units(share, rng):
    """The first of each eight elements. Small numbers and −∞ become zero, NaN becomes nothing finite in bf16."""
    x = torch.rand(ROWS, 32) * 140 - 130
    x[0], x[1], x[2] = -float("inf"), -130.0, float("nan")
    x[3, :4] = torch.tensor([0.0, 8.0, -1.0, 0.5])
    y = poison(torch.empty_like(x))
    with sim.device(**BLACKWELL):
        exponentials[(1,)](tk.gl(x), tk.gl(y), share)
    polynomial = torch.arange(32) % 8 < 8 * share
    assert (y[:2] == 0).all() and not torch.isfinite(y[2].bfloat16()).any()
    exact = x[3:].double().exp2()
    error = ((y[3:].double() - exact).abs() / exact)[x[3:] > -125]
    columns = polynomial.expand(ROWS - 3, 32)[x[3:] > -125]
    assert error[columns].max() < 1.1e-4 and (share == 1 or error[~columns].max() < 1e-6)
    assert torch.equal(y[3, :3], torch.tensor([1.0, 256.0, 0.5])) if share >= 0.5 else y[3, 0] == 1
    ptx = exponentials.compile(tk.gl(x), tk.gl(y), share, **BLACKWELL).asm["ptx"]
    assert ptx.count("ex2.approx") == 32 * (1 - share) and ptx.count("fma.rn.f32x2") == 32 * share / 2 * 4


@tk.kernel
@triton.jit
def fused(X, Y, factor):
    x = tk.load(X, tk.rt(tk.fp32, 128, 32), (0, 0))
    tk.store(Y, tk.fma(x, factor, x), (0, 0))


@pytest.mark.parametrize("arch, instruction", [("sm_90a", "fma.rn.f32"), ("sm_100a", "fma.rn.f32x2")])
def test_a_fused_multiply_add_takes_two_elements_an_instruction_where_it_can(arch, instruction, rng):
    x = torch.randn(ROWS, 32)
    y = poison(torch.empty_like(x))
    with sim.device(arch):
        fused[(1,)](tk.gl(x), tk.gl(y), 0.7)
    assert (y.double() - (x.double() * 0.7 + x)).abs().max() < 1e-6
    ptx = fused.compile(tk.gl(x), tk.gl(y), 0.7, arch=arch).asm["ptx"]
    assert ptx.count(f"{instruction} ") == ROWS * 32 // 128 // (2 if instruction.endswith("x2") else 1)


@tk.kernel
@triton.jit
def masked(X, Y, MASK: tl.constexpr, a, b):
    x = tk.load(X, tk.rt(tk.fp32, 128, 32, "row"), (0, 0))
    if MASK == "right":
        x = tk.right_fill(x, a, float("-inf"))
    elif MASK == "left":
        x = tk.left_fill(x, a, 2.5)
    elif MASK == "causal":
        x = tk.make_causal(x, row=a, col=b)
    else:
        x = tk.sliding_window(x, a, b, row=50, col=60)
    tk.store(Y, x, (0, 0))


@pytest.mark.parametrize("a, b", [(0, 0), (7, 40), (32, 3), (-20, 90)], ids=str)
@pytest.mark.parametrize("mask", ["right", "left", "causal", "window"])
def test_rows_of_threads_are_masked_in_place(mask, a, b, rng):
    x, row, col = torch.randn(ROWS, 32), torch.arange(ROWS)[:, None], torch.arange(32)
    kept, fill = {
        "right": (col + 0 * row < a, -float("inf")),
        "left": (col + 0 * row >= a, 2.5),
        "causal": (col + b <= row + a, -float("inf")),
        "window": ((col + 60 >= row + 50 - a) & (col + 60 <= row + 50 + b), -float("inf")),
    }[mask]
    y = poison(torch.empty_like(x))
    with sim.device(**BLACKWELL):
        masked[(1,)](tk.gl(x), tk.gl(y), mask, a, b)
    assert np.array_equal(y, torch.where(kept, x, fill))
