"""Schedules against the orders written out in numpy, in a plain kernel under Triton's interpreter; the host-side choice
of a supergroup."""

import heapq
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tritonkittens.lang as tk
from tests.cases_split import Walk
from tests.util import poison
from tritonkittens import sim
from tritonkittens.lang.schedule.split import MOST_REST_PARTS, MOST_TAIL_PARTS

# Every schedule in one kernel: row i of `out` is (supergroup, longest first, stream-K) of task i.
PROGRAM = """
import sys
import numpy as np, torch, triton
import triton.language as tl
import tritonkittens.lang as tk

@triton.jit
def schedules(out, rows, cols, others, blocks, iterations, GROUP: tl.constexpr):
    task = tk.block_index()
    row, col = tk.supergroup(task, rows, cols, GROUP)
    tile, other = tk.longest_first(task, rows, others)
    first, iteration, count = tk.stream_k(task, blocks, rows * cols, iterations)
    alone, nobody = tk.longest_first(task, rows)
    out += task * 9
    tl.store(out, row)
    tl.store(out + 1, col)
    tl.store(out + 2, tile)
    tl.store(out + 3, other)
    tl.store(out + 4, first)
    tl.store(out + 5, iteration)
    tl.store(out + 6, count)
    tl.store(out + 7, alone)
    tl.store(out + 8, nobody)

@triton.jit
def tiles(out, rows, cols, ORDER: tl.constexpr):
    row, col = tk.tile_at(ORDER, tk.block_index(), rows, cols)
    tl.store(out + 2 * tk.block_index(), row)
    tl.store(out + 2 * tk.block_index() + 1, col)

@triton.jit
def bands(out, tiles, others, ORDER: tl.constexpr):
    for task in range(tk.block_index(), tiles * others, tk.block_count()):
        tile, other = tk.tile_at(ORDER, task, tiles, others)
        tl.store(out + 2 * task, tile)
        tl.store(out + 2 * task + 1, other)

cases = np.load(sys.argv[1])
results = {}
for n, (rows, cols, others, blocks, iterations, group, tasks) in enumerate(cases.tolist()):
    out = torch.full((tasks, 9), -(2**31), dtype=torch.int32)
    schedules[(tasks,)](out, rows, cols, others, blocks, iterations, GROUP=group)
    results[str(n)] = out.numpy()
    for order in (tk.RowMajor(), tk.ColumnMajor(), tk.Supergroup(group), tk.LongestFirst()):
        out = torch.full((rows * cols, 2), -1, dtype=torch.int32)
        tiles[(rows * cols,)](out, rows, cols, ORDER=order)
        results[f"{n} {order}"] = out.numpy()
for blocks, tiles, others, rounds in BANDS:
    out = torch.full((tiles * others, 2), -1, dtype=torch.int32)
    bands[(blocks,)](out, tiles, others, ORDER=tk.LongestFirst(rounds))
    results[f"bands {blocks} {tiles} {others} {rounds}"] = out.numpy()
np.savez(sys.argv[2], **results)
"""
# blocks, tiles, others, rounds
BANDS = [(4, 2, 9, 2), (4, 3, 7, 1), (5, 8, 3, 2), (3, 1, 11, 1), (7, 2, 2, 3), (8, 4, 20, 2)]


def supergroup_order(rows, cols, group):
    order = []
    for first in range(0, rows, group):
        band = range(first, min(first + group, rows))
        order += [(r, c) for c in range(cols) for r in band]
    return order


def test_device_schedules_in_the_interpreter(rng, tmp_path):
    cases = []
    for rows, cols, group in [(1, 1, 1), (5, 3, 2), (8, 4, 8), (3, 5, 8), (7, 1, 3)]:
        others, blocks, iterations = (int(x) for x in rng.integers(1, 6, 3))
        cases.append((rows, cols, others, blocks, iterations, group, max(rows * cols, rows * others, blocks)))
    cases.append((2, 2, 1, 3, 0, 1, 4))  # nothing to do
    program, source, target = tmp_path / "program.py", tmp_path / "cases.npy", tmp_path / "results.npz"
    program.write_text(PROGRAM.replace("BANDS", repr(BANDS)))
    np.save(source, np.array(cases))
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(program), str(source), str(target)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = np.load(target)
    for n, (rows, cols, others, blocks, iterations, group, _) in enumerate(cases):
        out = results[str(n)]
        assert out[: rows * cols, :2].tolist() == [list(x) for x in supergroup_order(rows, cols, group)], cases[n]
        orders = {
            tk.RowMajor(): [(r, c) for r in range(rows) for c in range(cols)],
            tk.ColumnMajor(): [(r, c) for c in range(cols) for r in range(rows)],
            tk.Supergroup(group): supergroup_order(rows, cols, group),
            tk.LongestFirst(): [(r, c) for r in reversed(range(rows)) for c in range(cols)],
        }
        for order, wanted in orders.items():
            assert results[f"{n} {order}"].tolist() == [list(x) for x in wanted], (order, cases[n])
        longest = [[tile, other] for tile in reversed(range(rows)) for other in range(others)]
        assert out[: rows * others, 2:4].tolist() == longest, cases[n]
        assert (out[rows * others :, 2] < 0).all(), "past the last task the tile is negative"
        assert out[:rows, 7:].tolist() == [[tile, 0] for tile in reversed(range(rows))]
        work = [(tile, i) for tile in range(rows * cols) for i in range(iterations)]
        done_work = []
        for tile, iteration, count in out[:blocks, 4:7].tolist():
            start = tile * iterations + iteration
            assert count == 0 or 0 <= iteration < iterations, cases[n]
            done_work += work[start : start + count]
        assert done_work == work, f"{cases[n]}: every step once, in order"
        assert np.ptp(out[:blocks, 6]) <= 1
    for blocks, tiles, others, rounds in BANDS:
        assert results[f"bands {blocks} {tiles} {others} {rounds}"].tolist() == longest_first(
            blocks, tiles, others, rounds
        )


def longest_first(blocks, tiles, others, rounds):
    """Bands of as few others as make a task for every block, and at the end of all that are left once they make fewer
    than `rounds` more."""
    each, first, order = max(1, blocks // tiles), 0, []
    while first < others:
        last = others - first - each < -(-rounds * blocks // tiles)
        band = range(first, others if last else first + each)
        order += [[tile, other] for tile in reversed(range(tiles)) for other in band]
        first = band.stop
    return order


@pytest.mark.parametrize("tiles, others", [(4, 1024), (4, 512), (8, 256), (16, 128), (32, 64), (64, 33), (128, 16)])
def test_blocks_that_draw_the_longest_first_end_together(tiles, others):
    """132 of them, causal tasks of 4 to 128 blocks and half a block of their own."""
    ends = [0.0] * 132
    for tile, _ in longest_first(132, tiles, others, 2):
        heapq.heapreplace(ends, ends[0] + tile + 1.5)
    assert max(ends) <= 1.02 * sum(ends) / 132


SIZES = st.integers(1, 40000)


@settings(max_examples=200, deadline=None)
@given(
    rows=SIZES,
    cols=SIZES,
    depth=SIZES,
    tile=st.tuples(st.sampled_from([64, 128, 256]), st.sampled_from([64, 128, 256])),
    itemsize=st.sampled_from([1, 2, 4]),
    l2=st.integers(2**20, 2**27),
)
def test_supergroup_rows_fit_l2_and_make_few_even_bands(rows, cols, depth, tile, itemsize, l2):
    group = tk.supergroup_rows(rows, cols, depth, tile, itemsize, l2)
    tiles = -(-rows // tile[0])
    assert 1 <= group <= tiles

    def held(rows_of_a):
        return (rows_of_a * tile[0] + min(cols, tile[1])) * depth * itemsize

    assert group == 1 or held(group) <= l2 / 2, "the band stays in half of L2"
    bands = -(-tiles // group)
    if bands > 1:  # with one band fewer, the band would not fit
        assert held(-(-tiles // (bands - 1))) > l2 / 2, f"{bands} bands, but {bands - 1} would do"
        assert -(-tiles // (group - 1)) > bands if group > 1 else True, "no smaller band gives as few bands"


def test_supergroup_rows_of_known_problems():
    h200 = 50 * 2**20
    assert tk.supergroup_rows(4096, 4096, 256, (128, 256), 2, h200) == 32  # everything fits: one band
    # 2 MiB a row tile beside 4 MiB of B: 10 of 25 MiB, 7 bands
    assert tk.supergroup_rows(8192, 8192, 8192, (128, 256), 2, h200) == 10
    assert tk.supergroup_rows(128, 128, 10**6, (128, 256), 2, h200) == 1
    with pytest.raises(ValueError, match=r"supergroup_rows\(0, 1, 1, \(128, 256\), 2, 1\): all must be positive"):
        tk.supergroup_rows(0, 1, 1, (128, 256), 2, 1)


@pytest.mark.parametrize("call", [lambda: tk.longest_first(0, 4), lambda: tk.stream_k(0, 1, 1, 1)])
def test_device_functions_outside_a_kernel(call):
    with pytest.raises(tk.TileError, match="call it inside a kernel"):
        call()


# ---------------------------------------------------------------- who does what


@pytest.fixture(scope="module")
def simulated():
    with sim.device("sm_90a") as device:
        yield device


def walk(schedule, lengths, slots):
    """[[block of iteration i of task t]], where `slots` blocks run at once. Every iteration must be done once, every
    task be finished once."""
    most = max([1, *lengths])
    x, lengths = torch.zeros(16, 16), torch.tensor(lengths, dtype=torch.int32)
    count, finished = torch.zeros(len(lengths), most, dtype=torch.int32), torch.zeros(len(lengths), dtype=torch.int32)
    block = poison(torch.empty(len(lengths), most, dtype=torch.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tritonkittens.lang.template.call.multiprocessor_count", lambda device: slots)
        template = Walk(schedule=schedule)
        template._calls.clear()  # what was planned for other numbers of multiprocessors
        template(x, count, block, finished, lengths, tasks=len(lengths), most=most)
    assert torch.equal(count, (torch.arange(most) < lengths[:, None]).int()), (
        "an iteration is done twice, never, or where there is none"
    )
    assert (finished == 1).all(), "a task is finished twice or never"
    return [block[t, :n].tolist() for t, n in enumerate(lengths.tolist())]


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
SLOTS = st.integers(1, 7)
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def runs(blocks):
    """(block, how many iterations in a row) of one task."""
    return [(block, len(list(group))) for block, group in itertools.groupby(blocks)]


@few
@given(lengths=LENGTHS, slots=SLOTS)
def test_whole_tasks(simulated, lengths, slots):
    for task, blocks in enumerate(walk(tk.OnePerBlock(), lengths, slots)):
        assert set(blocks) <= {task}
    rounds = -(-len(lengths) // slots)
    grid = -(-len(lengths) // rounds)  # as few as give as many rounds
    for task, blocks in enumerate(walk(tk.Persistent(), lengths, slots)):
        assert set(blocks) <= {task % grid}


@few
@given(lengths=LENGTHS, slots=SLOTS, parts=st.sampled_from([2, 3, 5]))
def test_split_k_makes_equal_parts(simulated, lengths, slots, parts):
    rounds = -(-len(lengths) * parts // slots)
    grid = -(-len(lengths) * parts // rounds)
    for task, blocks in enumerate(walk(tk.SplitK(parts), lengths, slots)):
        cuts = [part * len(blocks) // parts for part in range(parts + 1)]
        assert max(b - a for a, b in itertools.pairwise(cuts)) <= -(-len(blocks) // parts), (
            "the reference's parts are even"
        )
        assert blocks == [
            (part * len(lengths) + task) % grid for part in range(parts) for _ in range(cuts[part], cuts[part + 1])
        ]


def check_split_last(schedule, lengths, slots, most):
    """Whole tasks for all slots, and each of the others in as many equal parts as fit, up to a limit, each by another
    block."""
    whole = len(lengths) // slots * slots
    for task, blocks in enumerate(walk(schedule, lengths, slots)):
        if task < whole:
            assert set(blocks) <= {task % slots}
        else:
            parts = min(most, slots // (len(lengths) - whole))
            sizes = [n for _, n in runs(blocks)]
            assert len(sizes) == min(parts, len(blocks))
            assert not sizes or max(sizes) - min(sizes) <= 1


@few
@given(lengths=LENGTHS, slots=SLOTS)
def test_split_tail_splits_only_the_last_round(simulated, lengths, slots):
    """Up to a limit, and only after whole rounds."""
    check_split_last(tk.SplitTail(), lengths, slots, MOST_TAIL_PARTS if len(lengths) >= slots else slots)


@few
@given(lengths=LENGTHS, slots=SLOTS)
def test_split_rest_leaves_equally_many_tasks_whole(simulated, lengths, slots):
    check_split_last(tk.SplitRest(), lengths, slots, MOST_REST_PARTS)


@few
@given(tasks=st.integers(1, 16), length=st.integers(1, 9), slots=SLOTS)
def test_stream_k_splits_iterations_evenly(simulated, tasks, length, slots):
    done = walk(tk.StreamK(), [length] * tasks, slots)
    each = [sum(blocks.count(block) for blocks in done) for block in range(slots)]
    assert max(each) - min(each) <= 1 or (tasks % slots == 0 and set(each) == {tasks // slots * length}), each
    whole = tasks if tasks % slots == 0 else max(0, tasks // slots - 1) * slots  # the rest is one to two rounds
    assert all(blocks == [task % slots] * length for task, blocks in enumerate(done[:whole]))
    rest = [block for blocks in done[whole:] for block in blocks]
    assert rest == sorted(rest), "a block's share is one stretch"


def test_stream_k_of_known_problems(simulated):
    assert [b for blocks in walk(tk.StreamK(), [1, 1, 1], 7) for b in blocks] == [0, 1, 2]
    assert walk(tk.StreamK(), [5], 3) == [[0, 0, 1, 1, 2]]
