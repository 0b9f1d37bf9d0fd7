"""Templates under many interleavings in the simulator: no race, no deadlock, no wrong phase, and the same result in
each."""

import pytest
import torch

import tritonkittens.lang as tk
from tests.cases_split import Extremes, Product
from tests.streaming import (
    CountedStream,
    DeferredStream,
    EdgedStream,
    ExchangingStream,
    IndexedStream,
    LaggedStream,
    LateTaskStream,
    PipelinedEdgedStream,
    PipelinedStream,
    PlainReducingStream,
    Prefix,
    ReducingStream,
    SharingStream,
    SteppedStream,
    WatchedStream,
    add_listed,
    add_reduced,
    all_reduced,
    integers,
    operands,
    prefixes,
)
from tests.util import explored, poison, slow
from tritonkittens import sim


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """For which the schedules count blocks; `explore` simulates a whole device."""
    monkeypatch.setattr("tritonkittens.lang.template.call.multiprocessor_count", lambda device: 2)


LENGTHS = (2, 0, 3, 1, 4)
CASES = [
    (CountedStream, dict(consumers=2, pingpong=True, weighted=False, stages=2), LENGTHS),
    slow(PipelinedStream, dict(consumers=3, pingpong=True, weighted=False, residual=True, stages=2), LENGTHS),
    slow(CountedStream, dict(consumers=2, residual=True, stages=2), LENGTHS),
    (PipelinedStream, dict(consumers=2, staggered_epilogue=True, stages=2), (16, 2, 17, 0, 16, 1, 18, 3)),
    slow(
        PipelinedStream,
        dict(consumers=3, staggered_epilogue=True, weighted=False, residual=True, stages=3),
        (24, 3, 25, 24, 3),
    ),
    slow(PipelinedStream, dict(consumers=2, cluster=2, staggered_epilogue=True, stages=2), (16, 1, 17, 3)),
    slow(LaggedStream, dict(consumers=2, staggered_epilogue=True, stages=2), (17, 16, 16, 3)),
    (PipelinedStream, dict(consumers=1, cluster=2, residual=True, extra=64, stages=2), (2, 0, 1)),
    (DeferredStream, dict(consumers=2, stages=2), LENGTHS),
    slow(DeferredStream, dict(consumers=2, stages=2, staggered_epilogue=True, residual=True), (16, 2, 0, 17, 1, 16, 3)),
    slow(DeferredStream, dict(consumers=3, stages=3, staggered_epilogue=True, weighted=False), (24, 1, 25, 0, 2)),
    slow(DeferredStream, dict(consumers=1, cluster=2, stages=2, residual=True), (2, 0, 1)),
    slow(DeferredStream, dict(consumers=2, pingpong=True, weighted=False, stages=2), LENGTHS),
    (DeferredStream, dict(consumers=2, schedule=tk.Dynamic(), stages=2, residual=True), (2, 0, 3, 1, 4, 0, 0, 0, 1)),
    (SteppedStream, dict(consumers=2, stages=2), (9, 2, 0, 5, 8, 1)),
    slow(SteppedStream, dict(consumers=2, stages=2, staggered_epilogue=True, residual=True), (16, 9, 0, 17, 1, 16, 3)),
    slow(SteppedStream, dict(consumers=1, stages=3, residual=True, schedule=tk.Dynamic()), (10, 0, 3, 9)),
    slow(SteppedStream, dict(consumers=2, pingpong=True, weighted=False, stages=2), (3, 9, 0, 8, 1)),
    (CountedStream, dict(consumers=1, schedule=tk.SplitK(2), stages=2), LENGTHS),
    (CountedStream, dict(consumers=1, schedule=tk.SplitTail(), stages=2), LENGTHS),
    slow(CountedStream, dict(consumers=1, schedule=tk.SplitRest(), blocks_per_sm=2, stages=2), LENGTHS),
    (CountedStream, dict(consumers=1, schedule=tk.StreamK(), residual=True, stages=2), (5, 5, 5)),
    (CountedStream, dict(consumers=2, schedule=tk.Dynamic(), residual=True, stages=2), (2, 0, 3, 1, 4, 0, 0, 0, 1)),
    (LaggedStream, dict(consumers=2, schedule=tk.Dynamic(), stages=2), LENGTHS),
    slow(LaggedStream, dict(consumers=2, schedule=tk.Dynamic(), cols=128, weighted=False), (4, 0, 3, 1, 5, 2)),
    slow(LaggedStream, dict(consumers=2, stages=2), LENGTHS),
    slow(LaggedStream, dict(consumers=2, stages=2, early=False, warp_scheduler_barrier=True, extra=128), LENGTHS),
    slow(LaggedStream, dict(consumers=3, pingpong=True, weighted=False, stages=2, residual=True), LENGTHS),
    slow(LaggedStream, dict(consumers=1, stages=3, cluster=2), (2, 0, 1)),
    slow(LaggedStream, dict(consumers=2, cols=128, weighted=False), (4, 0, 3, 1, 5, 2)),  # epilogue tiles over the ring
    slow(SharingStream, dict(consumers=2, stages=2), LENGTHS),  # epilogue tiles over the scratch tiles
    (SharingStream, dict(consumers=1, stages=2, extra=64), LENGTHS),
    (ExchangingStream, dict(consumers=2, stages=2), LENGTHS),
    (LateTaskStream, dict(consumers=2, stages=2), LENGTHS),
    slow(LateTaskStream, dict(consumers=2, stages=2, early=False, schedule=tk.Dynamic()), (2, 0, 0, 3, 1, 1, 4)),
    slow(LateTaskStream, dict(consumers=1, stages=3, residual=True), (1, 0, 2)),
    (Prefix, dict(consumers=2, stages=2, output_stages=1), LENGTHS),
    slow(Prefix, dict(consumers=1, stages=2, broadcast_tile=True), LENGTHS),
    slow(Prefix, dict(consumers=1, cluster=2, stages=2), (2, 0, 1)),
    (CountedStream, dict(consumers=2, residual=True, stages=2, one_tile_per_block=True), (3, 0)),
    slow(LaggedStream, dict(consumers=2, stages=2, one_tile_per_block=True), (4, 1)),
    slow(LaggedStream, dict(lagged_producer=True, consumers=2, stages=2), LENGTHS),
    (LaggedStream, dict(lagged_producer=True, consumers=1, stages=3, schedule=tk.Dynamic()), LENGTHS),
    slow(
        LaggedStream,
        dict(lagged_producer=True, consumers=2, stages=2, warp_scheduler_barrier=True, early=False, extra=128),
        LENGTHS,
    ),
    slow(
        LaggedStream,
        dict(lagged_producer=True, consumers=3, pingpong=True, weighted=False, stages=2, residual=True),
        LENGTHS,
    ),
    # epilogue tiles over the ring
    slow(LaggedStream, dict(lagged_producer=True, consumers=2, cols=128, weighted=False), LENGTHS),
    (LaggedStream, dict(consumers=2, stages=2, lagged_producer=True, one_tile_per_block=True), (4, 1)),
    slow(
        CountedStream,
        dict(consumers=1, schedule=tk.SplitRest(), blocks_per_sm=2, stages=2, one_tile_per_block=True),
        (2, 5, 3),
    ),
]


@explored(2, 20)
@pytest.mark.parametrize(("cls", "knobs", "lengths"), CASES, ids=lambda x: x.__name__ if isinstance(x, type) else None)
def test_streams(cls, knobs, lengths, schedules, rng):
    template = cls(**knobs)
    x, e, s, counts = operands(template, lengths, rng, "cpu")
    sums = prefixes(template, x, e, s, counts)
    expected, more = sums[:, -1].reshape(-1, template.cols), []
    if template.residual:
        more.append(integers(rng, "cpu", torch.float32, *expected.shape))
        expected = expected + more[0]
    if isinstance(template, Prefix):
        more.append(poison(torch.empty(len(lengths), max(lengths) * template.cluster * template.team * 64, 64)))
    y = poison(torch.empty(expected.shape))
    blocks = None if template.splits else 2
    sim.explore(lambda: template(x, e, s, y, counts, *more, tasks=len(lengths), blocks=blocks), schedules=schedules)
    assert torch.equal(y, expected.float())


@explored(2, 20)
@pytest.mark.parametrize(
    "knobs",
    [
        dict(consumers=2, stages=2),
        slow(dict(consumers=1, stages=3, page_indices=16)),
        dict(consumers=1, stages=2, cluster=2, page_indices=5),
        slow(dict(consumers=1, stages=3, lagged_producer=True, page_indices=9)),
        dict(consumers=1, stages=3, lagged_producer=True, page_indices=16, broadcast_tile=True),
        slow(dict(consumers=1, stages=2, schedule=tk.OnePerBlock(), page_indices=12, broadcast_tile=True)),
        dict(consumers=2, stages=2, schedule=tk.Dynamic(), page_indices=16),
    ],
    ids=str,
)
def test_page_indices(knobs, schedules, rng):
    template = IndexedStream(**knobs)
    x, e, s, lengths = operands(template, LENGTHS, rng, "cpu")
    found = []
    sim.explore(
        lambda: found.append(add_listed(template, x, e, s, lengths, None if template.one_tile_per_block else 2)),
        schedules=schedules,
    )
    expected = prefixes(template, x, e, s, lengths)[:, -1].reshape(-1, template.cols).float()
    assert all(torch.equal(y, expected) for y in found)


def test_late_task_tiles_that_compute_first_does_not_wait_for(rng):
    template = LateTaskStream(consumers=2, stages=2, waits=False)
    x, e, s, counts = operands(template, LENGTHS, rng, "cpu")
    y = poison(torch.empty(len(LENGTHS) * 2 * template.rows, template.cols))
    with pytest.raises(sim.SimulationError, match="late_task.L"):
        sim.explore(lambda: template(x, e, s, y, counts, tasks=len(LENGTHS), blocks=2), schedules=20)


def watched(rng, schedules, **knobs):
    """Explore a block whose second consumer reads what the first writes at the end of each task; returns its result,
    and what that should be."""
    template, lengths = WatchedStream(consumers=2, stages=2, **knobs), (16, 19, 17)
    x, e, s, counts = operands(template, lengths, rng, "cpu")
    expected = prefixes(template, x, e, s, counts)[:, -1]
    expected[:-1, :, 1] += 1  # nothing follows the last task: there nobody waits
    y, written = (
        poison(torch.empty(expected.reshape(-1, template.cols).shape)),
        torch.zeros(len(lengths), dtype=torch.int32),
    )
    sim.explore(lambda: template(x, e, s, y, counts, written, tasks=len(lengths), blocks=1), schedules=schedules)
    return y, expected.reshape(-1, template.cols).float()


@explored(2, 20)
def test_consumers_that_end_one_after_the_other(schedules, rng):
    assert torch.equal(*watched(rng, schedules))
    with pytest.raises(sim.SimulationError, match="race: W is read while it may still be written"):
        watched(rng, 20, staggered_epilogue=False)


@pytest.mark.parametrize(
    "cls, knobs",
    [
        (ReducingStream, dict(stages=2)),
        (ReducingStream, dict(stages=3, consumers=1, schedule=tk.Dynamic())),
        (PlainReducingStream, dict(stages=2, consumers=1)),
        slow(PlainReducingStream, dict(stages=1, schedule=tk.Dynamic())),
    ],
    ids=str,
)
@explored(2, 20)
def test_scratch_tiles_leave_by_reduce_store_warps(cls, knobs, schedules, rng):
    template = cls(**knobs)
    x, e, s, lengths = operands(template, (2, 0, 3, 1, 4, 0, 0, 1), rng, "cpu")
    found = []
    sim.explore(lambda: found.append(add_reduced(template, x, e, s, lengths, 2)), schedules=schedules)
    expected = prefixes(template, x, e, s, lengths)[:, -1].reshape(-1, template.cols).float()
    reduced = all_reduced(template, x, lengths)
    assert all(torch.equal(y, expected) and torch.equal(z, reduced) and (counts == 11).all() for y, z, counts in found)


@pytest.mark.parametrize("cls, knobs", [
    *((cls, dict(marked=marked)) for cls in (EdgedStream, PipelinedEdgedStream) for marked in (-1, 0, 1, None)),
    (EdgedStream, dict(schedule=tk.SplitK(2))), (PipelinedEdgedStream, dict(schedule=tk.Dynamic(), stages=3)),
], ids=str)  # fmt: skip
def test_edges(cls, knobs, rng):
    lengths = (0, 1, 2, 3, 4, 5)
    template = cls(consumers=1, **{"stages": 2, **knobs})
    x, e, s, counts = operands(template, lengths, rng, "cpu")
    y = poison(torch.empty(len(lengths) * template.rows, template.cols))
    sim.explore(lambda: template(x, e, s, y, counts, tasks=len(lengths)), schedules=10)
    # a pipelined computation's first iteration counts as one
    edges = counts % 3 if cls is EdgedStream else (counts % 3).clamp(min=1)
    marked = {None: 99, -1: edges}.get(template.marked, template.marked)
    steps = torch.arange(max(lengths))
    factors = torch.where(
        steps >= counts[:, None], 0, torch.where(steps < torch.as_tensor(marked).reshape(-1, 1), 2, 1)
    )
    steps_of_x = x.view(len(lengths), max(lengths), template.rows, -1)
    assert torch.equal(y.view(len(lengths), template.rows, -1), (steps_of_x * factors[:, :, None, None]).sum(1).float())


@pytest.mark.parametrize(
    "knobs",
    [
        dict(schedule=tk.SplitK(2)),
        dict(schedule=tk.StreamK(), consumers=2, pingpong=True),
        dict(schedule=tk.ClusterSplitK(2)),
        slow(dict(schedule=tk.ClusterSplitK(4), consumers=2)),
    ],
    ids=str,
)
def test_products_in_flight(knobs, rng):
    """A block has several tasks: sums that others store for the next must not arrive before it has read theirs for this
    one."""
    a, b = integers(rng, "cpu", torch.bfloat16, 192, 256), integers(rng, "cpu", torch.bfloat16, 256, 64)
    template = Product(stages=2, **{"consumers": 1, **knobs})
    c = poison(torch.empty(192, 64))
    sim.explore(lambda: template(a, b, c, blocks=1 if template.sharers > 1 else None), schedules=20)
    assert torch.equal(c.double(), a.double() @ b.double())


def test_merged_parts(rng):
    """As above, of two tasks a block."""
    x, largest, least = torch.randn(128, 192).bfloat16(), poison(torch.empty(128, 64)), poison(torch.empty(128))
    sim.explore(
        lambda: Extremes(schedule=tk.ClusterSplitK(2), consumers=1, stages=2)(x, largest, least, blocks=1), schedules=20
    )
    assert torch.equal(largest, x.float().reshape(128, 3, 64).amax(1)) and torch.equal(least, x.float().amin(1))


@pytest.mark.parametrize("schedule", [tk.SplitK(3), tk.SplitRest()], ids=str)
def test_parts_merged_by_the_last_block(schedule, rng):
    x, largest, least = torch.randn(192, 320).bfloat16(), poison(torch.empty(192, 64)), poison(torch.empty(192))
    template = Extremes(schedule=schedule, consumers=1, stages=2, blocks_per_sm=2)
    sim.explore(lambda: template(x, largest, least), schedules=20, multiprocessors=2)
    assert torch.equal(largest, x.float().reshape(192, 5, 64).amax(1)) and torch.equal(least, x.float().amin(1))
