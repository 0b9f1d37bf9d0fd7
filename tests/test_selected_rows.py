"""Tiles whose rows are selected by number, moved by TMA on simulated Blackwell."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import explored, poison, refused, slow
from tritonkittens import sim


@tk.kernel
@triton.jit
def moved(X, Y, FROM, TO, TILE: tl.constexpr, COLS: tl.constexpr):
    """Row TO[i] of Y is row FROM[i] of X."""
    tile, arrived = tk.allocate(TILE), tk.semaphores(1)
    vector = tk.rv(tk.int32, TILE.rows)
    sources, targets = tk.load(FROM, vector, (0,)), tk.load(TO, vector, (0,))
    for col in range(COLS):
        tk.expect(arrived[0], tile)
        tk.load_rows_async(tile, X, sources, col, arrived[0])
        tk.wait(arrived[0], col & 1)
        tk.store_rows_async(Y, tile, targets, col)
        tk.store_read_wait(0)
        tk.sync()
    tk.store_wait(0)


def arguments(tile, cols, dtype, rows=100, outside=0):
    """(x, y, row numbers of x with `outside` that x does not have, different ones of y)."""
    x = torch.randn(rows, cols).to(dtype)
    y = poison(torch.empty(rows, cols, dtype=dtype))
    sources = torch.randint(rows, (tile.rows,), dtype=torch.int32)
    sources[:outside] = rows + 5
    return x, y, sources, torch.randperm(rows, dtype=torch.int32)[: tile.rows]


def run(tile, x, y, sources, targets):
    cols = -(-x.shape[1] // tile.cols)
    moved[(1,)](tk.gl(x, tk.by_rows(tile)), tk.gl(y, tk.by_rows(tile)), tk.gl(sources), tk.gl(targets), tile, cols)


@pytest.mark.parametrize(
    ("tile", "cols", "dtype"),
    [
        (tk.st(tk.bf16, 16, 64), 200, torch.bfloat16),
        slow(tk.st(tk.fp32, 64, 32), 64, torch.float32),
        slow(tk.st(tk.bf16, 32, 96), 96, torch.bfloat16),
        slow(tk.st(tk.fp8e4m3, 16, 128), 128, torch.float8_e4m3fn),
    ],
    ids=str,
)
@explored(1, 20)
def test_selected_rows_are_moved(tile, cols, dtype, schedules):
    x, y, sources, targets = arguments(tile, cols, dtype, outside=3)
    before = y.clone()
    found = sim.explore(lambda: run(tile, x, y, sources, targets), schedules=schedules, arch="sm_100a")
    assert not found.findings
    wanted = before
    wanted[targets.long()] = torch.cat([x, torch.zeros(6, cols).to(dtype)])[sources.long()]
    assert torch.equal(y.view(torch.uint8), wanted.view(torch.uint8))


def test_the_instructions_are_gather_and_scatter_of_four_rows():
    tile = tk.st(tk.bf16, 16, 64)
    x, y, sources, targets = arguments(tile, 64, torch.bfloat16)
    globals_ = tk.gl(x, tk.by_rows(tile)), tk.gl(y, tk.by_rows(tile)), tk.gl(sources), tk.gl(targets)
    ptx = moved.compile(*globals_, tile, 1, arch="sm_100a").asm["ptx"]
    assert "tile::gather4" in ptx and "tile::scatter4" in ptx
    with refused("load_rows_async (TMA gather and scatter) needs sm_100a", tk.ArchitectureError):
        moved.compile(*globals_, tile, 1, arch="sm_90a")


@tk.kernel
@triton.jit
def wrong(X, ROWS, WHAT: tl.constexpr):
    tile, arrived = tk.allocate(tk.st(tk.bf16, 16, 64)), tk.semaphores(1)
    if WHAT == "numbers":
        tk.load_rows_async(tile, X, tk.load(ROWS, tk.rv(tk.int32, 32), (0,)), 0, arrived[0])
    elif WHAT == "descriptor":
        other = tk.allocate(tk.st(tk.bf16, 16, 32))
        tk.load_rows_async(other, X, tk.load(ROWS, tk.rv(tk.int32, 16), (0,)), 0, arrived[0])
    elif WHAT == "semaphore":
        tk.load_rows_async(tile, X, tk.load(ROWS, tk.rv(tk.int32, 16), (0,)), 0, 0)


WRONG = {
    "numbers": "load_rows_async of st(bf16, 16, 64): needs a vector of 16 int32 row numbers, got shape [32] of int32",
    "descriptor": "the global layout has no descriptor for its rows; make it by tk.gl(tensor, tk.by_rows(st(bf16, 16, "
    "32)))",
    "semaphore": "load_rows_async(arrived=0): needs a semaphore",
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_is_refused(what):
    x, rows = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(32, dtype=torch.int32)
    with refused(WRONG[what]):
        wrong.compile(tk.gl(x, tk.by_rows(tk.st(tk.bf16, 16, 64))), tk.gl(rows), what, arch="sm_100a")
    with refused("by_rows(sv(bf16, 64)): takes a shared tile type (st)"):
        tk.by_rows(tk.sv(tk.bf16, 64))
