"""Accumulators of wgmma: their masks, which compare with constants, against indices; their order in memory."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import DEVICE, poison

pytestmark = pytest.mark.usefixtures("kernel_device")


@triton.jit
def in_shared(X, TILE: tl.constexpr):
    """A matrix of one tile."""
    tile = tk.allocate(TILE)
    tk.load_into(tile, X, (0, 0))
    return tile


@tk.kernel
@triton.jit
def masked_kernel(A, B, C, row, col, a, b, TILE_A: tl.constexpr, TILE_B: tl.constexpr, MASK: tl.constexpr):
    left, right = in_shared(A, TILE_A), in_shared(B, TILE_B)
    tk.fence_async()
    tk.sync()
    s = tk.mm_ABt(left, right)
    if MASK == "left":
        s = tk.left_fill(s, a, 7.0)
    elif MASK == "right":
        s = tk.right_fill(s, a, float("-inf"))
    elif MASK == "causal":
        s = tk.make_causal(s, row=row, col=col)
    elif MASK == "causal_t":
        s = tk.make_causal_t(s, 0.5, row=row, col=col)
    elif MASK == "tril":
        s = tk.tril(s, a, -1.0, row=row, col=col)
    else:
        s = tk.sliding_window(s, a, b, row=row, col=col)
    tk.store(C, s, (0, 0))


def kept(mask, rows, cols, row, col, a, b):
    """(elements that stay, what the others become)"""
    i, j = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    distance = j + col - i - row
    return {
        "left": ((j >= a).expand(rows, cols), 7.0),
        "right": ((j < a).expand(rows, cols), -torch.inf),
        "causal": (distance <= 0, -torch.inf),
        "causal_t": (distance >= 0, 0.5),
        "tril": (distance <= a, -1.0),
        "window": ((distance >= -a) & (distance <= b), -torch.inf),
    }[mask]


@pytest.mark.parametrize("rows, cols", [(64, 64), (64, 256), (64, 112), (128, 96)])
@pytest.mark.parametrize("mask", ["left", "right", "causal", "causal_t", "tril", "window"])
def test_masks(mask, rows, cols, rng):
    x, y = (torch.from_numpy(rng.integers(-3, 4, (n, 64))).to(DEVICE, torch.bfloat16) for n in (rows, cols))
    exact = x.double().cpu() @ y.double().cpu().T
    for row, col, a, b in (
        (0, 0, 3, 5),
        (1000, 990, 0, 0),
        (5, 40, 17, 30),
        (0, 500, -3, 2),
        (7, 0, cols, 1 << 20),
        (-20, 0, cols - 1, 9),
    ):
        c = poison(torch.empty(rows, cols, device=DEVICE))
        masked_kernel[(1,)](
            tk.gl(x), tk.gl(y), tk.gl(c), row, col, a, b, tk.st(tk.bf16, rows, 64), tk.st(tk.bf16, cols, 64), mask
        )
        stays, other = kept(mask, rows, cols, row, col, a, b)
        assert torch.equal(c.cpu().double(), torch.where(stays, exact, other)), (row, col, a, b)


@tk.kernel
@triton.jit
def summed_kernel(A, B, Y, TILE_A: tl.constexpr, TILE_B: tl.constexpr, MEMORY: tl.constexpr):
    """Adds A · Bᵀ, in the order of its fragments, to Y, and the first half of them once more."""
    left, right, memory = in_shared(A, TILE_A), in_shared(B, TILE_B), tk.allocate(MEMORY)
    tk.fence_async()
    tk.sync()
    product = tk.mm_ABt(left, right)
    numbers = tk.store_fragments(memory, product)
    tk.fence_async()
    tk.sync()
    tk.store_add_bytes_async(Y, numbers)
    tk.store_add_bytes_async(Y, numbers, 2 * TILE_A.rows * TILE_B.rows)
    tk.store_wait()


@triton.jit
def ordered_kernel(X, Y, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(Y + row * COLS + col, tl.load(X + tk.fragment_place(row, col, COLS)))


@pytest.mark.parametrize("cols", [16, 64, 128])
@pytest.mark.parametrize("vector", [False, True])
def test_order_in_memory(cols, vector, rng):
    """Every element where `fragment_place` says, added to what was there."""
    x, y = (torch.from_numpy(rng.integers(-3, 4, (n, 64))).to(DEVICE, torch.bfloat16) for n in (64, cols))
    sums, found = torch.ones(64 * cols, device=DEVICE), poison(torch.empty(64, cols, device=DEVICE))
    memory = tk.sv(tk.fp32, 64 * cols) if vector else tk.st(tk.fp32, 64, cols)
    summed_kernel[(1,)](tk.gl(x), tk.gl(y), tk.gl(sums), tk.st(tk.bf16, 64, 64), tk.st(tk.bf16, cols, 64), memory)
    ordered_kernel[(1,)](sums, found, 64, cols)
    exact, place = x.double().cpu() @ y.double().cpu().T, torch.empty_like(found)
    ordered_kernel[(1,)](torch.arange(64.0 * cols, device=DEVICE), place, 64, cols)
    assert torch.equal(found.cpu().double(), 1 + exact * torch.where(place.cpu() < 32 * cols, 2, 1))


@tk.kernel
@triton.jit
def rescaled_kernel(A, B, F, C, TILE_A: tl.constexpr, TILE_B: tl.constexpr):
    """A · Bᵀ, each row times its factor."""
    left, right = in_shared(A, TILE_A), in_shared(B, TILE_B)
    tk.fence_async()
    tk.sync()
    product = tk.mm_ABt(left, right)
    factor = tk.load(F, tk.col_vec(tk.rt(tk.fp32, TILE_A.rows, TILE_B.rows)), (0,))
    tk.store(C, tk.rescale_row(product, factor), (0, 0))


@pytest.mark.parametrize("rows, cols", [(64, 64), (64, 256), (64, 112), (128, 64)])
def test_rows_are_rescaled_where_a_warp_has_to(rows, cols, rng):
    """Also where only one row has a factor, and where it is no number."""
    x, y = (torch.from_numpy(rng.integers(-3, 4, (n, 64))).to(DEVICE, torch.bfloat16) for n in (rows, cols))
    exact = x.double().cpu() @ y.double().cpu().T
    some = torch.ones(rows, device=DEVICE)
    some[17], some[40] = 0.5, float("nan")
    for factor in (
        torch.ones(rows, device=DEVICE),
        some,
        torch.from_numpy(rng.integers(-4, 5, rows) / 4).to(DEVICE, torch.float32),
    ):
        c = poison(torch.empty(rows, cols, device=DEVICE))
        rescaled_kernel[(1,)](
            tk.gl(x), tk.gl(y), tk.gl(factor), tk.gl(c), tk.st(tk.bf16, rows, 64), tk.st(tk.bf16, cols, 64)
        )
        assert torch.equal(c.cpu().double().nan_to_num(99), (exact * factor.double().cpu()[:, None]).nan_to_num(99))


@tk.kernel
@triton.jit
def exceeding_kernel(A, B, C, LIMIT: tl.constexpr, TILE: tl.constexpr):
    """A · Bᵀ, less its rows' largest in the warps that have an element above a limit."""
    left, right = in_shared(A, TILE), in_shared(B, TILE)
    tk.fence_async()
    tk.sync()
    product = tk.mm_ABt(left, right)
    if tk.warp_exceeds(product, LIMIT):
        product = tk.sub_row(product, tk.row_max(product))
    tk.store(C, product, (0, 0))


@pytest.mark.parametrize("where", [[], [(20, 3)], [(0, 63), (15, 0), (63, 63)]], ids=str)
def test_warps_with_an_element_above_a_limit(where, rng):
    """16 rows each; NaN is above, too, and what is the limit is not."""
    x, y = torch.zeros(2, 64, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    y[:] = torch.eye(64)
    x[:] = torch.from_numpy(rng.integers(-8, 9, (64, 64)))
    for n, place in enumerate(where):
        x[place] = 9 if n % 2 == 0 else float("nan")
    c = poison(torch.empty(64, 64, device=DEVICE))
    exceeding_kernel[(1,)](tk.gl(x), tk.gl(y), tk.gl(c), 8.0, tk.st(tk.bf16, 64, 64))
    exact = x.double().cpu() @ y.double().cpu().T
    for warp in range(4):
        rows = slice(16 * warp, 16 * warp + 16)
        above = any(row // 16 == warp for row, _ in where)
        largest = torch.stack([row[~row.isnan()].max() if not row.isnan().all() else row[0] for row in exact[rows]])
        expected = exact[rows] - largest[:, None] if above else exact[rows]
        here = ~expected.isnan()
        assert torch.equal(c[rows].cpu().double()[here], expected[here])


@tk.kernel
@triton.jit
def cut_kernel(A, B, C, TILE_A: tl.constexpr, TILE_B: tl.constexpr, COLS: tl.constexpr):
    """A · Bᵀ, its tiles of COLS columns stored in the opposite order."""
    left, right = in_shared(A, TILE_A), in_shared(B, TILE_B)
    tk.fence_async()
    tk.sync()
    parts = tk.split_cols(tk.mm_ABt(left, right), COLS)
    PARTS: tl.constexpr = len(parts)
    for i in tl.static_range(PARTS):
        tk.store(C, parts[i], (0, PARTS - 1 - i))


@pytest.mark.parametrize(
    "rows, cols, part", [(64, 256, 64), (64, 256, 256), (128, 128, 32), (64, 192, 64), (64, 112, 16), (128, 96, 32)]
)
def test_columns_cut_into_tiles(rows, cols, part, rng):
    x, y = (torch.from_numpy(rng.integers(-3, 4, (n, 64))).to(DEVICE, torch.bfloat16) for n in (rows, cols))
    c = poison(torch.empty(rows, cols, device=DEVICE))
    cut_kernel[(1,)](tk.gl(x), tk.gl(y), tk.gl(c), tk.st(tk.bf16, rows, 64), tk.st(tk.bf16, cols, 64), part)
    exact = (x.double().cpu() @ y.double().cpu().T).reshape(rows, -1, part).flip(1).reshape(rows, cols)
    assert torch.equal(c.cpu().double(), exact)


@tk.kernel
@triton.jit
def byte_product_kernel(
    A, B, V, C, factor, TILE_A: tl.constexpr, TILE_B: tl.constexpr, TILE_V: tl.constexpr, ITERATIONS: tl.constexpr
):
    """ITERATIONS times A · Bᵀ · factor as bytes, carried from one iteration to the next, times Vᵀ."""
    left, right, values = in_shared(A, TILE_A), in_shared(B, TILE_B), in_shared(V, TILE_V)
    tk.fence_async()
    tk.sync()
    weights = tk.byte_operand(tk.mm_ABt(left, right) * factor, TILE_V.dtype)
    sums = tk.mm_ABt(weights, values)
    for i in range(1, ITERATIONS):
        under_way = tk.mma_ABt(weights, values, sums, wait=False)
        following = tk.byte_operand(tk.mm_ABt(left, right) * (factor * (i + 1)), TILE_V.dtype)
        sums = tk.mma_wait(under_way)
        weights = following
    tk.store(C, sums, (0, 0))


def byte_product(x, y, v, factor, dtype, iterations=1):
    """`v` in the order in which `byte_operand` has the depth."""
    order = torch.tensor([tk.byte_operand_column.fn(k) for k in range(y.shape[0])], device=DEVICE)
    assert sorted(order.tolist()) == list(range(y.shape[0]))
    c = poison(torch.empty(64, v.shape[0], device=DEVICE))
    element = tk.from_torch(dtype)
    byte_product_kernel[(1,)](
        tk.gl(x),
        tk.gl(y),
        tk.gl(v[:, order].to(dtype).contiguous()),
        tk.gl(c),
        factor,
        tk.st(tk.bf16, 64, 64),
        tk.st(tk.bf16, y.shape[0], 64),
        tk.st(element, *v.shape),
        iterations,
    )
    return c.cpu()


@pytest.mark.parametrize("depth", [32, 64, 96, 128, 224, 256])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_of_an_accumulator(dtype, depth, rng):
    """Times a unit matrix each byte is seen: rounded to even, what is too large the largest number."""
    x, y = (torch.from_numpy(rng.integers(-3, 4, (n, 64))).to(DEVICE, torch.bfloat16) for n in (64, depth))
    x[3] *= 64
    x[5] *= 4096
    factor = float(rng.uniform(0.5, 2))
    exact = (x.float() @ y.float().T).cpu() * torch.tensor(factor)
    largest = torch.finfo(dtype).max
    assert (exact.abs() > largest).any()
    found = byte_product(x, y, torch.eye(depth, device=DEVICE), factor, dtype)
    assert torch.equal(found, exact.clamp(-largest, largest).to(dtype).float())


@pytest.mark.parametrize("depth, cols", [(32, 16), (64, 96), (128, 128), (256, 64), (96, 64), (224, 80)])
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_bytes_that_a_loop_carries(depth, cols, iterations, rng):
    """Also where the accumulator's columns are no power of two."""
    x, y = (
        torch.from_numpy(rng.integers(0, 2, (n, 64)) * (rng.random((n, 64)) < 0.06)).to(DEVICE, torch.bfloat16)
        for n in (64, depth)
    )
    v = torch.from_numpy(rng.integers(-2, 3, (cols, depth))).to(DEVICE, torch.float32)
    exact = (x.float() @ y.float().T).cpu()
    expected = sum((exact * n).to(torch.float8_e4m3fn).float() @ v.cpu().T for n in (1, *range(1, iterations)))
    assert torch.equal(byte_product(x, y, v, 1.0, torch.float8_e4m3fn, iterations), expected)


@tk.kernel
@triton.jit
def united_kernel(A, B, C, D, TILE_A: tl.constexpr, TILE_B: tl.constexpr):
    left, right = in_shared(A, TILE_A), in_shared(B, TILE_B)
    tk.fence_async()
    tk.sync()
    first, second = tk.split_cols(tk.mm_ABt(left, right), tk.shape(right, 0) // 2)
    turned = tk.concat_cols(second, first, whole=True)
    tk.store(C, turned, (0, 0))
    tk.store(D, tk.mm_AB(tk.cast(turned, tk.bf16), right), (0, 0))


@pytest.mark.parametrize("cols", [32, 128])
def test_halves_that_are_one_tile_again(cols, rng):
    """It is stored, and an operand of a product, as if one product had made it."""
    x, y = (torch.from_numpy(rng.integers(-1, 2, (n, 64))).to(DEVICE, torch.bfloat16) for n in (64, cols))
    c, d = poison(torch.empty(64, cols, device=DEVICE)), poison(torch.empty(64, 64, device=DEVICE))
    united_kernel[(1,)](tk.gl(x), tk.gl(y), tk.gl(c), tk.gl(d), tk.st(tk.bf16, 64, 64), tk.st(tk.bf16, cols, 64))
    product = (x.double() @ y.double().T).roll(cols // 2, 1)
    assert torch.equal(c.double(), product) and torch.equal(d.double(), product @ y.double())
