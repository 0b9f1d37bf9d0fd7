"""Tiles whose rows are selected by number: moved by threads on a simulated Hopper, by TMA on a simulated Blackwell."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import explored, meta, poison, refused, slow
from tritonkittens import sim


@tk.kernel
@triton.jit
def moved(X, Y, FROM, TO, TILE: tl.constexpr, COLS: tl.constexpr):
    """Row TO[i] of Y is row FROM[i] of X."""
    tile, arrived = tk.allocate(TILE), tk.semaphores(1, tk.row_arrivals(4))
    vector = tk.rv(tk.int32, TILE.rows)
    sources, targets = tk.load(FROM, vector, (0,)), tk.load(TO, vector, (0,))
    for col in range(COLS):
        tk.expect_rows(arrived[0], tile)
        tk.load_rows_async(tile, X, sources, col, arrived[0])
        tk.wait(arrived[0], col & 1)
        tk.store_rows_async(Y, tile, targets, col)
        tk.store_read_wait(0)
        tk.sync()
    tk.store_wait(0)


def arguments(tile, cols, dtype, rows=100, outside=0):
    """(x, y, row numbers of x with twice `outside` that x does not have, different ones of y)."""
    x = torch.randn(rows, cols).to(dtype)
    y = poison(torch.empty(rows, cols, dtype=dtype))
    sources = torch.randint(rows, (tile.rows,), dtype=torch.int32)
    sources[:outside], sources[-outside - 1 : -1] = rows + 5, -1
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
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@explored(1, 20)
def test_selected_rows_are_moved(tile, cols, dtype, arch, schedules):
    x, y, sources, targets = arguments(tile, cols, dtype, outside=3)
    before = y.clone()
    found = sim.explore(lambda: run(tile, x, y, sources, targets), schedules=schedules, arch=arch)
    assert not found.findings
    wanted = before
    wanted[targets.long()] = torch.cat([x, torch.zeros(7, cols).to(dtype)])[sources.long()]
    assert torch.equal(y.view(torch.uint8), wanted.view(torch.uint8))


def test_the_instructions():
    """TMA moves four rows at a time; threads of Hopper copy 16 bytes."""
    tile = tk.st(tk.bf16, 16, 64)
    x, y, sources, targets = arguments(tile, 64, torch.bfloat16)
    globals_ = tk.gl(x, tk.by_rows(tile)), tk.gl(y, tk.by_rows(tile)), tk.gl(sources), tk.gl(targets)
    ptx = moved.compile(*globals_, tile, 1, arch="sm_100a").asm["ptx"]
    assert "tile::gather4" in ptx and "tile::scatter4" in ptx
    ptx = moved.compile(*globals_, tile, 1, arch="sm_90a").asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx and "cp.async.mbarrier.arrive.noinc" in ptx and "st.global.v4" in ptx


def test_threads_copy_whole_pieces():
    tile = tk.st(tk.bf16, 16, 64)
    x, y, sources, targets = arguments(tile, 60, torch.bfloat16)
    with refused("load_rows_async of st(bf16, 16, 64) by threads: rows of the tensor are no multiple of 16 bytes"):
        moved.compile(tk.gl(x), tk.gl(y), tk.gl(sources), tk.gl(targets), tile, 1, arch="sm_90a")
    x, _, sources, targets = arguments(tile, 64, torch.bfloat16)
    with refused("store_rows_async of st(bf16, 16, 64) by threads: rows of the tensor are no multiple of 16 bytes"):
        moved.compile(tk.gl(x), tk.gl(y), tk.gl(sources), tk.gl(targets), tile, 1, arch="sm_90a")
    y, numbers = x.clone(), (tk.gl(sources), tk.gl(targets))
    assert moved.compile(tk.gl(x, static=True), tk.gl(y, static=(0,)), *numbers, tile, 1, arch="sm_90a")


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


# ---------------------------------------------------------------- input tiles of a template


class GatheredStream(tk.GatherWarps, tk.lcf):
    """Y[t] = Σ_i X[rows of t, i] · W[i] for t < tasks, `lengths[t]` iterations each; arithmetic of small integers."""

    tile_n: int = 64

    def layout(self):
        x, w = tk.st(tk.bf16, 64, 64), tk.st(tk.bf16, 64, self.tile_n)
        y = tk.st(tk.fp32, 64, self.tile_n)
        return tk.layout(
            globals=dict(X=tk.by_rows(x), W=w, Y=y, rows=None, lengths=None),
            input=dict(X=x, W=w),
            gathered=("X",),
            epilogue=dict(Y=y),
            accumulators=dict(sums=tk.rt(tk.fp32, 64, self.tile_n)),
            args=("tasks",),
        )

    @triton.jit
    def setup(ctx):
        more = ctx.task_id < ctx.args.tasks
        return tk.task(tl.load(ctx.globals.lengths.pointer + ctx.task_id, mask=more, other=0), when=more)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.W, ctx.globals.W, (ctx.iter, 0), input.full)

    @triton.jit
    def row_numbers(ctx):
        return tk.load(ctx.globals.rows, tk.rv(tk.int32, 64), (ctx.task_id,))

    @triton.jit
    def load_gathered(ctx, input, rows):
        tk.load_rows_async(input.X, ctx.globals.X, rows, ctx.iter, input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(sums=tk.zero(ctx.accumulators.sums))

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(sums=tk.mma_AB(input.X, input.W, state.sums))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.Y, tk.load(state.sums))
        tk.fence_async()
        tk.store_async(ctx.globals.Y, epilogue.Y, (ctx.task_id, 0))


def small(*shape):
    return torch.randint(-2, 3, shape).to(torch.bfloat16)


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize(
    "knobs", [dict(), slow(dict(schedule=tk.Dynamic())), slow(dict(pingpong=True, consumers=2))], ids=str
)
@explored(2, 20)
def test_gathered_input(knobs, arch, schedules):
    """Tasks of no iteration, of one, and of more than the ring has stages."""
    lengths = torch.tensor([3, 0, 1, 5, 2], dtype=torch.int32)
    x, w, rows = small(40, 320), small(320, 64), torch.randint(-4, 44, (320,), dtype=torch.int32)
    template = GatheredStream(**{"stages": 2, "consumers": 1} | knobs)
    found = []

    def run():
        found.append(poison(torch.empty(320, 64)))
        template(x, w, found[-1], rows, lengths, tasks=5)

    sim.explore(run, schedules=schedules, multiprocessors=2, arch=arch)
    inside = ((rows >= 0) & (rows < 40))[:, None]
    chosen = torch.where(inside, x.float()[rows.clamp(0, 39).long()], 0).view(5, 64, 320)
    wanted = [chosen[t, :, : 64 * n] @ w.float()[: 64 * n] for t, n in enumerate(lengths.tolist())]
    assert all(torch.equal(y, torch.cat(wanted)) for y in found)


@triton.jit
def _short_numbers(ctx):
    return tk.load(ctx.globals.rows, tk.rv(tk.int32, 32), (ctx.task_id,))


def test_wrong_gathers_are_refused():
    with refused("Wrong: its layout has gathered=('Y',); 'Y' is no input tile"):
        derived(gathered=("Y",))()
    with refused("Wrong: its layout gathers every input tile; the producer needs one that TMA loads"):
        derived(gathered=("X", "W"))()
    given = meta(40, 320), meta(320, 64), meta(320, 64, dtype=torch.float32), *[meta(320, dtype=torch.int32)] * 2
    with refused("row_numbers must return a vector with a number for each row of st(bf16, 64, 64)"):
        type("Wrong", (GatheredStream,), {"row_numbers": _short_numbers})(consumers=1).compile(*given, tasks=1)
    with refused("GatheredStream: X has rows of 316, no multiple of 16 bytes"):
        GatheredStream(consumers=1).compile(meta(40, 316), *given[1:], tasks=1)


def derived(**fields):
    layout = GatheredStream.layout
    return type("Wrong", (GatheredStream,), {"layout": lambda self: dataclasses.replace(layout(self), **fields)})
