"""Schedules that split tasks, and orders, with a small matrix product on the tensor cores: right, the same in every
run, and nothing left behind."""

import pytest
import torch

import tritonkittens.lang as tk
from tests.cases_split import Extremes, Product
from tests.streaming import integers
from tests.util import DEVICE, crossed, multiprocessors, on_gpu_or_simulated, poison, slow, some_slow, synchronize
from tritonkittens import sim
from tritonkittens.lang.schedule.split import MOST_REST_PARTS
from tritonkittens.launch import workspace as make_workspace
from tritonkittens.testing import has_gpu

pytestmark = [pytest.mark.usefixtures("kernel_device"), pytest.mark.simulated(multiprocessors=6)]

GUARD = 64  # rows before and after the result that nothing may write to
SPLITS = [tk.SplitK(3), tk.SplitTail(), tk.SplitRest(), tk.StreamK()]
IN_CLUSTERS = [tk.ClusterSplitK(2), tk.ClusterSplitK(4)]
CASES = [
    dict(consumers=1, order=tk.RowMajor()),
    dict(consumers=2, order=tk.Supergroup(2), schedule=tk.SplitK(3), residual=True),
    slow(dict(consumers=2, order=tk.ColumnMajor(), schedule=tk.StreamK(), cluster=2, residual=True)),
    slow(dict(consumers=1, order=tk.LongestFirst(), schedule=tk.SplitTail(), cluster=2)),
    dict(consumers=2, order=tk.LongestFirst(), schedule=tk.SplitRest(), blocks_per_sm=2, stages=2),
    dict(consumers=1, order=tk.Supergroup(3), schedule=tk.OnePerBlock(), cluster=4, stages=2),
    dict(consumers=2, order=tk.Supergroup(8), pingpong=True, schedule=tk.StreamK(), stages=3),
    slow(dict(consumers=2, order=tk.Supergroup(2), schedule=tk.ClusterSplitK(2), residual=True, stages=2)),
    dict(consumers=1, order=tk.RowMajor(), schedule=tk.ClusterSplitK(4), residual=True),
    slow(dict(consumers=4, order=tk.ColumnMajor(), schedule=tk.ClusterSplitK(2))),
    dict(consumers=4, order=tk.LongestFirst(), pingpong=True, cluster=2, stages=2),
]


def launch(template, a, b, residual=None):
    """C, poisoned before; rows above and below it are checked to be left alone."""
    around = poison(torch.empty(a.shape[0] + 2 * GUARD, b.shape[1], device=a.device))
    c = around[GUARD:-GUARD]
    template(a, b, c, *([residual] if residual is not None else []), debug=True)
    synchronize()
    assert torch.isnan(around[:GUARD]).all() and torch.isnan(around[-GUARD:]).all(), (
        "rows beside the result were written to"
    )
    return c.clone()


def problem(rng, rows, depth, cols):
    return integers(rng, DEVICE, torch.bfloat16, rows, depth), integers(rng, DEVICE, torch.bfloat16, depth, cols)


@pytest.mark.parametrize("knobs", CASES, ids=lambda knobs: "-".join(f"{k}_{v}" for k, v in knobs.items()))
def test_products(knobs, rng):
    template = Product(**knobs)
    stages = template.placement(90).stages
    tall = template.task_rows
    large = (4 * tall, 520, 64 * 40) if DEVICE == "cuda" else (2 * tall, 328, 64 * 5)
    for rows, depth, cols in (
        (8, 8, 8),
        (tall, 64 * (stages - 1), 128),
        (tall + 24, 64 * stages + 24, 64 * 3 - 8),
        large,
    ):
        a, b = problem(rng, rows, depth, cols)
        residual = integers(rng, DEVICE, torch.float32, rows, cols) if template.residual else None
        expected = a.double() @ b.double() + (0 if residual is None else residual.double())
        c = launch(template, a, b, residual)
        wrong = (c != expected).nonzero()
        tiles = sorted({(int(r) // 64, int(x) // 64) for r, x in wrong})
        assert not tiles, f"{rows} × {depth} × {cols}: tiles {tiles[:10]} are wrong"


@pytest.mark.parametrize(
    "schedule, consumers", crossed([tk.Persistent(), *IN_CLUSTERS, tk.SplitK(2), *SPLITS], [1, 2]), ids=str
)
def test_parts_are_merged_by_hooks(schedule, consumers, rng):
    """Also of a task of fewer iterations than it has parts."""
    template = Extremes(
        schedule=schedule, consumers=consumers, blocks_per_sm=2 if schedule == tk.SplitRest() else 1, stages=3
    )
    for rows, cols in ((64, 64 * 7), (64 * 5, 64 * 3), (64 * 9, 64)):
        x = torch.from_numpy(rng.standard_normal((rows, cols))).to(DEVICE, torch.bfloat16)
        largest, least = poison(torch.empty(rows, 64, device=DEVICE)), poison(torch.empty(rows, device=DEVICE))
        template(x, largest, least, debug=True)
        synchronize()
        assert torch.equal(largest, x.float().reshape(rows, -1, 64).amax(1)) and torch.equal(least, x.float().amin(1))


@pytest.mark.parametrize("schedule", some_slow(SPLITS + IN_CLUSTERS, [SPLITS[0], SPLITS[-1], IN_CLUSTERS[0]]), ids=str)
def test_sums_of_parts_are_the_same_in_every_run(schedule, rng):
    """Numbers that round: the order of a sum shows. In the simulator the order of blocks, warps and copies is another
    in every run."""
    template = Product(consumers=2, schedule=schedule)
    a = torch.from_numpy(rng.standard_normal((3 * 128, 648))).to(DEVICE, torch.bfloat16)
    b = torch.from_numpy(rng.standard_normal((648, 128))).to(DEVICE, torch.bfloat16)
    expected = (a.double() @ b.double()).cpu()
    results = []
    for seed in range(on_gpu_or_simulated(30, 3)):
        if has_gpu():
            results.append(launch(template, a, b).cpu())
        else:
            with sim.device(multiprocessors=6, schedule=seed):
                results.append(launch(template, a, b))
    assert torch.allclose(results[0].double(), expected, rtol=0, atol=1e-3)
    for run, result in enumerate(results):
        assert torch.equal(result, results[0]), f"run {run} differs"


@pytest.mark.parametrize("schedule", SPLITS, ids=str)
def test_counters_are_zero_between_launches(schedule, rng, monkeypatch):
    seen = []

    def watched(*arguments):
        seen.append(make_workspace(*arguments))
        return seen[-1]

    monkeypatch.setattr("tritonkittens.lang.template.call.workspace", watched)
    template = Product(consumers=2, schedule=schedule)
    for rows, cols in ((512, 64), (128, 64), (896, 192)):
        a, b = problem(rng, rows, 520, cols)
        assert torch.equal(launch(template, a, b).double(), a.double() @ b.double())
        assert not seen[-1][1].any(), "a counter was left behind"
    assert any(counters.numel() for _, counters in seen)


@pytest.mark.gpu
def test_streams_share_no_partial_sums(rng):
    template = Product(consumers=2, schedule=tk.SplitK(4))
    streams = [torch.cuda.Stream() for _ in range(3)]
    problems = [problem(rng, 256, 4096, 128) for _ in streams]
    results = [[] for _ in streams]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (a, b), out in zip(streams, problems, results, strict=True):
            with torch.cuda.stream(stream):
                out.append(poison(torch.empty(256, 128, device=DEVICE)))
                template(a, b, out[-1])
    torch.cuda.synchronize()
    for (a, b), out in zip(problems, results, strict=True):
        expected = a.double() @ b.double()
        assert all(torch.equal(c.double(), expected) for c in out)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SPLITS, ids=str)
def test_a_captured_launch_runs_again_and_beside_others(schedule, rng):
    template = Product(consumers=2, schedule=schedule)
    a, b = problem(rng, 640, 1000, 192)
    c, other = (poison(torch.empty(640, 192, device=DEVICE)) for _ in range(2))
    template(a, b, other)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        template(a, b, c)
    side = torch.cuda.Stream()
    for _ in range(3):
        x, y = problem(rng, 640, 1000, 192)
        a.copy_(x)
        b.copy_(y)
        poison(c)
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            template(a, b, other)
        torch.cuda.synchronize()
        expected = x.double() @ y.double()
        assert torch.equal(c.double(), expected) and torch.equal(other.double(), expected)


def test_workspaces_grow_and_are_reused():
    device = torch.device(DEVICE)
    small, large = make_workspace(device, 100, 3), make_workspace(device, 5000, 70)
    assert small[0].numel() >= 100 and large[0].numel() >= 5000 and large[1].numel() >= 70
    assert large[0].dtype == torch.float32 and large[1].dtype == torch.int32 and not large[1].any()
    if DEVICE == "cuda":
        assert make_workspace(device, 4000, 70)[0].data_ptr() == large[0].data_ptr(), "one buffer serves a stream"
        with torch.cuda.stream(torch.cuda.Stream()):
            assert make_workspace(device, 100, 3)[0].data_ptr() != large[0].data_ptr(), "another stream has its own"


@pytest.mark.skipif(DEVICE != "cuda", reason="memory pools are the GPU's")
def test_a_shared_workspace_lies_outside_the_pool_that_the_caller_uses():
    pool = torch.cuda.MemPool()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.use_mem_pool(pool):
        own = torch.empty(1 << 20, dtype=torch.float32, device="cuda")
        floats, counters = make_workspace(own.device, 1 << 20, 64)
    spans = [(segment["address"], segment["address"] + segment["total_size"]) for segment in pool.snapshot()]
    inside = [any(low <= x.data_ptr() < high for low, high in spans) for x in (own, floats, counters)]
    assert inside == [True, False, False] and not counters.any()


def test_the_grid_has_no_more_blocks_than_there_is_work(rng):
    slots = multiprocessors()
    few = [(64, 8), (64, 8), (64, 8)]
    many = [(64 * 2 * slots, 8), (8, 64), (64 * 2 * slots, 64)]
    for schedule, of_few, of_many in (
        (tk.Persistent(), 1, slots),
        (tk.OnePerBlock(), 1, 2 * slots),
        (tk.SplitK(3), 3, slots),
        (tk.SplitTail(), slots, slots),
    ):
        template = Product(consumers=1, schedule=schedule)
        assert (template.blocks(slots, *few), template.blocks(slots, *many)) == (of_few, of_many), schedule
    beside = Product(consumers=1, schedule=tk.SplitRest(), blocks_per_sm=2, stages=2)
    some = [[(64 * n, 8), (8, 64), (64 * n, 64)] for n in (slots - 1, slots, slots + 1)]
    assert [beside.blocks(2 * slots, *shapes) for shapes in some] == [
        slots - 1,
        slots,
        slots + min(slots, MOST_REST_PARTS),
    ]
