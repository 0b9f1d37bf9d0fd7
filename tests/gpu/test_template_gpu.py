"""The load / compute / finish engine on a GPU: every shape of its ring, with tasks of any length.

Arithmetic is exact, so results are compared bit by bit. All launches are in debug mode unless said otherwise: a wait of
more than two seconds traps, so that a deadlock fails and does not hang.
"""

import pytest
import torch

import tritonkittens.lang as tk
from tests.streaming import (
    CountedStream,
    DeferredStream,
    IndexedStream,
    LaggedStream,
    LateTaskStream,
    PipelinedStream,
    PlainReducingStream,
    Prefix,
    ReducingStream,
    SparseStream,
    SteppedStream,
    Stream,
    add_listed,
    add_reduced,
    all_reduced,
    integers,
    operands,
    prefixes,
    reference,
)
from tests.util import DEVICE, crossed, multiprocessors, on_gpu_or_simulated, poison, slow, synchronize

pytestmark = pytest.mark.usefixtures("kernel_device")

MARGIN = 16  # elements around the output that nothing may write to
CUT = (5, 8)  # rows and columns of the last tiles that lie outside the output; TMA stores end at multiples of 16 bytes
LENGTHS = (0, 1, 2, 3, 17)

# Knobs → (stages, safe stages): where the two are equal, the epilogue tiles have memory of their own.
PLAIN = [
    (dict(consumers=1, stages=1), (1, 1)),
    slow(dict(consumers=2, stages=1), (1, 1)),
    slow(dict(consumers=2, stages=2), (2, 2)),
    slow(dict(consumers=3, stages=3), (3, 3)),
    (dict(consumers=4, stages=4), (4, 4)),
    slow(dict(consumers=2, stages=5, extra=64), (5, 5)),
    slow(dict(consumers=2, stages=6), (6, 6)),
    (dict(consumers=2, weighted=False, dtype=tk.bf16), (16, 16)),
    slow(dict(consumers=1, blocks_per_sm=2), (5, 5)),
    slow(dict(consumers=2, blocks_per_sm=2, dtype=tk.bf16, out=tk.bf16), (10, 10)),
    (dict(consumers=1, cols=128, extra=128), (2, 1)),
    slow(dict(consumers=1, cols=128, extra=64), (3, 2)),
    (dict(consumers=2, cols=128, extra=256), (1, 0)),
    slow(dict(consumers=2, extra=128, stages=4), (4, 3)),
    slow(dict(consumers=2, stages=12), (12, 10)),
    (dict(consumers=2, stages=12, out=tk.bf16), (12, 11)),
    slow(dict(consumers=3, extra=128), (3, 2)),
    slow(dict(consumers=3, cols=128), (3, 0)),
    slow(dict(consumers=4, extra=128), (3, 1)),
    slow(dict(consumers=4, cols=128, out=tk.bf16, stages=2), (2, 0)),
]
PIPELINED = [
    (dict(consumers=1, stages=2), (2, 2)),
    slow(dict(consumers=2, stages=2), (2, 2)),
    (dict(consumers=2, stages=3, warp_scheduler_barrier=True), (3, 3)),
    slow(dict(consumers=3, warp_scheduler_barrier=True), (8, 8)),
    slow(dict(consumers=4, weighted=False, extra=64, stages=5, warp_scheduler_barrier=True), (5, 5)),
    slow(dict(consumers=2, blocks_per_sm=2, dtype=tk.bf16, out=tk.bf16), (10, 10)),
    slow(dict(consumers=1, cols=128, extra=128), (2, 1)),
    (dict(consumers=2, cols=128, extra=64), (2, 1)),
    slow(dict(consumers=3, cols=128), (3, 0)),
    slow(dict(consumers=4, extra=128, warp_scheduler_barrier=True), (3, 1)),
    slow(dict(consumers=4, cols=128, out=tk.bf16, stages=2), (2, 0)),
    (dict(consumers=2, stages=2, staggered_epilogue=True), (2, 2)),  # 17 iterations are long enough for that
    slow(dict(consumers=4, weighted=False, extra=64, stages=2, staggered_epilogue=True), (2, 2)),
    slow(dict(consumers=2, cols=128, extra=64, staggered_epilogue=True), (2, 1)),
]
DEFERRED = [
    (dict(consumers=1, stages=2), (2, 2)),
    (dict(consumers=2, stages=2, staggered_epilogue=True), (2, 2)),
    slow(dict(consumers=3, stages=5, weighted=False), (5, 5)),
    (dict(consumers=2, stages=3, out=tk.bf16, dtype=tk.bf16, blocks_per_sm=2), (3, 3)),
    slow(dict(consumers=2, cols=128, extra=64, staggered_epilogue=True, stages=2), (2, 2)),
]
STEPPED = [DEFERRED[1], slow(*DEFERRED[0]), (dict(consumers=2, stages=3, weighted=False), (3, 3))]
KINDS = {Stream: PLAIN, PipelinedStream: PIPELINED, DeferredStream: DEFERRED, SteppedStream: STEPPED}


def of(cls, case):
    """A case with its template; what is `slow` stays that."""
    return slow(cls, *case.values) if hasattr(case, "marks") else (cls, *case)


CASES = [of(cls, case) for cls, cases in KINDS.items() for case in cases]


def name(value):
    return (
        value.__name__
        if isinstance(value, type)
        else "-".join(f"{k}_{v}" for k, v in value.items())
        if isinstance(value, dict)
        else str(value)
    )


def run(template, tensors, tasks, blocks, debug=True, residual=None, prefix=None):
    """The output and the buffer around it, which starts as NaN."""
    x, e, s, lengths = tensors
    rows, cols = max(0, tasks * template.cluster * template.team * template.rows - CUT[0]), template.cols - CUT[1]
    around = poison(
        torch.empty(rows + 2 * MARGIN, template.cols + 2 * MARGIN, dtype=tk.to_torch(template.out), device=DEVICE)
    )
    y = around[MARGIN : MARGIN + rows, MARGIN : MARGIN + cols]
    template(
        x, e, s, y, lengths, *(t for t in (residual, prefix) if t is not None), tasks=tasks, blocks=blocks, debug=debug
    )
    return y, around


def check(template, tensors, expected, tasks, blocks, debug=True, residual=None, prefix=None):
    y, around = run(template, tensors, tasks, blocks, debug, residual, prefix)
    synchronize()
    wrong = (y.cpu() != expected[: y.shape[0], : y.shape[1]]).nonzero()
    lengths = tensors[3].tolist()
    where = {int(r) // (template.rows * template.team * template.cluster) for r in wrong[:, 0]}
    assert not len(wrong), (
        f"blocks={blocks}: tasks {sorted(where)} of lengths {[lengths[t] for t in sorted(where)]} are wrong"
    )
    y.fill_(float("nan"))
    assert torch.isnan(around).all(), "the margin was written to"


@pytest.mark.parametrize("cls, knobs, placement", CASES, ids=name)
def test_stream(cls, knobs, placement, rng):
    template = cls(**knobs)
    placed = template.placement(90)
    assert (placed.stages, placed.safe_stages) == placement, "the case no longer covers what it was chosen for"
    tasks = on_gpu_or_simulated(40, 8)
    lengths = [*LENGTHS, *rng.choice(LENGTHS, tasks - len(LENGTHS)).tolist()]
    rng.shuffle(lengths)
    print(f"lengths={lengths}")
    tensors = operands(template, lengths, rng, DEVICE)
    expected = reference(template, *tensors)
    check(template, tensors, expected, tasks, None)  # as many blocks as the device holds: one task or none each
    check(template, tensors, expected, tasks, 3)
    check(template, tensors, expected, tasks, 1)
    first, _ = run(template, tensors, tasks, 7)
    for repeat in range(on_gpu_or_simulated(20, 1)):
        again, _ = run(template, tensors, tasks, 7)
        assert torch.equal(again, first), f"run {repeat} differs"


@pytest.mark.parametrize("cls, length", crossed([Stream, PipelinedStream], LENGTHS))
def test_tasks_of_one_length(cls, length, rng):
    """Among them blocks that never use a stage, and a ring that never gets past its first stage. Without debug mode the
    code is another."""
    template = cls(consumers=2, extra=128, stages=4)
    assert template.placement(90).over_ring
    for tasks in (1, 9):
        tensors = operands(template, [length] * tasks, rng, DEVICE)
        expected = reference(template, *tensors)
        check(template, tensors, expected, tasks, 2)
        check(template, tensors, expected, tasks, 2, debug=False)


@pytest.mark.parametrize(
    "knobs", [dict(consumers=2), dict(consumers=2, stages=14), dict(consumers=3, extra=128, stages=4)]
)
def test_runs_of_empty_tasks_that_store_nothing(knobs, rng):
    """Nothing but the phases keeps producer and consumers together there."""
    template = SparseStream(**knobs)
    tasks = on_gpu_or_simulated(600, 60)
    lengths = [int(rng.choice([1, 2, 5])) if rng.random() < 0.05 else 0 for _ in range(tasks)]
    tensors = operands(template, lengths, rng, DEVICE)
    expected = reference(template, *tensors)[: tasks * template.consumers * template.rows - CUT[0], : -CUT[1]]
    stored = torch.tensor(lengths).repeat_interleave(template.consumers * template.rows)[: len(expected)] > 0
    for blocks in (1, 3):
        y, _ = run(template, tensors, tasks, blocks)
        y = y.cpu()
        assert torch.equal(y[stored], expected[stored]) and torch.isnan(y[~stored]).all(), f"blocks={blocks}"


def test_no_tasks(rng):
    template = Stream()
    tensors = operands(template, [1], rng, DEVICE)
    y = poison(torch.empty(template.consumers * template.rows, template.cols, device=DEVICE))
    template(*tensors[:3], y, tensors[3], tasks=0, blocks=5, debug=True)
    template(*tensors[:3], y, tensors[3], tasks=1, blocks=0, debug=True)
    synchronize()
    assert torch.isnan(y).all()


def test_an_error_leaves_the_template_usable(rng):
    template = Stream(consumers=1)
    x, e, s, lengths = operands(template, [2, 1], rng, DEVICE)
    expected = reference(template, x, e, s, lengths)
    check(template, (x, e, s, lengths), expected, 2, None)
    y = torch.empty(2 * template.rows, template.cols, device=DEVICE)
    with pytest.raises(tk.TileError, match="element type"):
        template(x, e, s, y.bfloat16(), lengths, tasks=2)
    with pytest.raises(TypeError, match="4 tensors"):
        template(x, e, s, y, tasks=2)
    check(template, (x, e, s, lengths), expected, 2, None)


# ---------------------------------------------------------------- clusters, pingpong, epilogue loads, output rings,
# schedules

ALONE = dict(pingpong=True, weighted=False)
FEATURES = [
    (CountedStream, dict(**ALONE, consumers=2)),
    slow(CountedStream, dict(**ALONE, consumers=4, stages=1)),
    slow(CountedStream, dict(**ALONE, consumers=3, residual=True, stages=2)),
    slow(PipelinedStream, dict(**ALONE, consumers=2, residual=True, cluster=2)),
    (CountedStream, dict(**ALONE, consumers=3, stages=3, cluster=2)),
    slow(PipelinedStream, dict(**ALONE, consumers=2, stages=2)),
    slow(CountedStream, dict(consumers=2, residual=True, stages=2)),
    (PipelinedStream, dict(consumers=1, residual=True, out=tk.bf16, extra=64)),
    slow(CountedStream, dict(consumers=2, cluster=2, residual=True, extra=64, stages=2)),
    slow(PipelinedStream, dict(consumers=1, cluster=4, dtype=tk.bf16)),
    (CountedStream, dict(consumers=1, schedule=tk.OnePerBlock(), cluster=2)),
    (CountedStream, dict(consumers=2, schedule=tk.Dynamic(), residual=True)),
    slow(LaggedStream, dict(consumers=2, schedule=tk.Dynamic(), stages=3)),
    (CountedStream, dict(consumers=2, schedule=tk.SplitK(3), residual=True, stages=2)),
    slow(CountedStream, dict(**ALONE, consumers=2, schedule=tk.SplitK(2), residual=True)),
    (CountedStream, dict(consumers=1, schedule=tk.SplitTail(), blocks_per_sm=2)),
    slow(CountedStream, dict(**ALONE, consumers=4, schedule=tk.SplitTail(), extra=64)),
    slow(CountedStream, dict(consumers=1, schedule=tk.SplitTail(), cluster=2, residual=True)),
    slow(LaggedStream, dict(consumers=2, stages=2)),
    slow(LaggedStream, dict(consumers=2, cols=128, weighted=False)),
    slow(LaggedStream, dict(consumers=3, warp_scheduler_barrier=True, early=False, extra=128)),
    slow(LaggedStream, dict(**ALONE, consumers=2, residual=True)),
    slow(LaggedStream, dict(consumers=1, cluster=2, stages=3, schedule=tk.OnePerBlock())),
    slow(LaggedStream, dict(consumers=2, out=tk.bf16, dtype=tk.bf16, cols=128, extra=128, weighted=False)),
    slow(LaggedStream, dict(consumers=2, stages=2, lagged_producer=True)),
    (LaggedStream, dict(consumers=2, stages=3, schedule=tk.Dynamic(), lagged_producer=True)),
    slow(LaggedStream, dict(consumers=2, cols=128, weighted=False, lagged_producer=True)),
    slow(LaggedStream, dict(**ALONE, consumers=2, residual=True, lagged_producer=True)),
    slow(LateTaskStream, dict(consumers=2, stages=3, residual=True)),
    slow(LateTaskStream, dict(consumers=1, stages=2, early=False, cols=128)),
    (LateTaskStream, dict(consumers=2, stages=2, dtype=tk.bf16, cols=128, schedule=tk.Dynamic())),
    (Prefix, dict(consumers=1, stages=1, output_stages=1)),
    slow(Prefix, dict(consumers=2, stages=2, output_stages=3, extra=64)),
    slow(Prefix, dict(consumers=4, dtype=tk.bf16, out=tk.bf16, schedule=tk.OnePerBlock())),
    (Prefix, dict(consumers=2, cluster=2, extra=64, residual=True)),
]


def slots(template):
    """Blocks (clusters) of the template that run at once."""
    return max(1, multiprocessors() * template.blocks_per_sm // template.cluster)


def check_stream(template, lengths, blocks, rng):
    """Every number of every output against the reference: Y (plus the residual), and then what an `lcsf` stores in
    every iteration."""
    tensors, tasks = operands(template, lengths, rng, DEVICE), len(lengths)
    sums = prefixes(template, *tensors)
    expected, out = sums[:, -1].reshape(-1, template.cols), tk.to_torch(template.out)
    residual = integers(rng, DEVICE, out, *expected.shape) if template.residual else None
    if residual is not None:
        expected = expected + residual.double().cpu()
    around = prefix = None
    if isinstance(template, tk.lcsf):
        around = poison(
            torch.empty(
                tasks + 2,
                (sums.shape[1] - 1) * template.cluster * template.team * template.rows,
                template.cols,
                dtype=out,
                device=DEVICE,
            )
        )
        prefix = around[1:-1]
    check(template, tensors, expected.to(out), tasks, blocks, residual=residual, prefix=prefix)
    if prefix is not None:
        stored = torch.arange(sums.shape[1] - 1) < torch.tensor(lengths)[:, None]
        wanted = torch.where(stored[..., None, None, None, None], sums[:, 1:], float("nan")).to(out)
        assert torch.equal(prefix.cpu().nan_to_num(1e9), wanted.reshape(prefix.shape).nan_to_num(1e9)), (
            f"lengths={lengths}"
        )
        assert torch.isnan(around[[0, -1]]).all(), "stores hit tasks before the first or after the last"


@pytest.mark.simulated(multiprocessors=6)
@pytest.mark.parametrize(
    ("cls", "knobs"),
    FEATURES,
    ids=lambda x: x.__name__ if isinstance(x, type) else "-".join(f"{k}_{v}" for k, v in x.items()),
)
def test_features(cls, knobs, rng):
    template = cls(**knobs)
    stages, full = template.placement(90).stages, slots(template)
    lengths = [0, 1, stages + 1, 2, 0, max(0, stages - 1), stages, 9]
    for tasks in (1, 2):
        for length in (0, 1, stages):
            check_stream(template, [length] * tasks, None, rng)
    for tasks in (max(1, full - 1), full, 2 * full + 1):
        check_stream(template, (lengths * full)[:tasks], None, rng)
    many = [*lengths, *rng.choice(lengths, on_gpu_or_simulated(60, 6)).tolist()]
    for blocks in (1, 2):
        if template.one_tile_per_block:
            with pytest.raises(
                tk.TileError,
                match=rf"{cls.__name__}: {len(many)} tasks, or parts of tasks, for {blocks} blocks; each has one at "
                r"most",
            ):
                check_stream(template, many, blocks, rng)
        else:
            check_stream(template, many, blocks, rng)


@pytest.mark.simulated(multiprocessors=6)
@pytest.mark.parametrize(("cls", "knobs"), [
    (CountedStream, dict(consumers=2, residual=True, stages=2)),
    (CountedStream, dict(consumers=1, cluster=2, extra=64)),
    (LaggedStream, dict(consumers=2, stages=2)),
    (Prefix, dict(consumers=2, stages=2, output_stages=2)),
    (CountedStream, dict(consumers=1, schedule=tk.SplitK(3), stages=2)),
    (CountedStream, dict(consumers=1, schedule=tk.SplitTail())),
    (CountedStream, dict(consumers=1, schedule=tk.SplitRest(), blocks_per_sm=2, stages=2)),
], ids=lambda x: x.__name__ if isinstance(x, type) else "-".join(f"{k}_{v}" for k, v in x.items()))  # fmt: skip
def test_one_task_a_block(cls, knobs, rng):
    """Kernels without the loop over tasks: as many tasks, and parts of them, as there are blocks, and no more."""
    template = cls(**knobs, one_tile_per_block=True)
    stages, full = template.placement(90).stages, slots(template)
    lengths = [stages, 0, 1, stages + 1, 2, 9]
    parts = template.schedule.parts if isinstance(template.schedule, tk.SplitK) else 1
    for tasks in (1, 2, full // parts):
        check_stream(template, (lengths * full)[:tasks], None, rng)
    if not isinstance(template.schedule, tk.SplitTail):
        with pytest.raises(
            tk.TileError, match=r"blocks; each has one at most \(one_tile_per_block=True, OnePerBlock\(\) or Cluster"
        ):
            check_stream(template, [1] * (full // parts + 1), None, rng)


@pytest.mark.simulated(multiprocessors=3)
@pytest.mark.parametrize(
    "cls, knobs",
    [
        (ReducingStream, dict()),
        (ReducingStream, dict(schedule=tk.Dynamic(), consumers=1, stages=2)),
        slow(ReducingStream, dict(consumers=3, stages=3)),
        slow(PlainReducingStream, dict(schedule=tk.Dynamic())),
        (PlainReducingStream, dict(consumers=1, stages=1, residual=False)),
    ],
    ids=str,
)
def test_scratch_tiles_leave_by_reduce_store_warps(cls, knobs, rng):
    template = cls(**knobs)
    for tasks in on_gpu_or_simulated((1, 2, 131, 1000), (1, 2, 11)):
        x, e, s, lengths = operands(template, rng.choice([0, 1, 2, 5], tasks).tolist(), rng, DEVICE)
        expected = prefixes(template, x, e, s, lengths)[:, -1].reshape(-1, template.cols)
        for blocks in (None, 1, 2):
            y, z, counts = add_reduced(template, x, e, s, lengths, blocks)
            assert torch.equal(y.cpu().double(), expected), f"{tasks} tasks, {blocks} blocks"
            assert torch.equal(z, all_reduced(template, x, lengths)) and (counts == lengths.sum()).all(), (
                f"{tasks} tasks, {blocks} blocks"
            )


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param(dict(consumers=2), marks=pytest.mark.simulated(multiprocessors=3)),
        pytest.param(
            dict(consumers=1, residual=True, blocks_per_sm=2, stages=2), marks=pytest.mark.simulated(multiprocessors=2)
        ),
        pytest.param(
            dict(**ALONE, consumers=4, stages=3), marks=[pytest.mark.simulated(multiprocessors=3), pytest.mark.slow]
        ),
        pytest.param(
            dict(consumers=1, cluster=2, extra=64), marks=[pytest.mark.simulated(multiprocessors=6), pytest.mark.slow]
        ),
    ],
    ids=lambda knobs: "-".join(f"{k}_{v}" for k, v in knobs.items()),
)
def test_stream_k(knobs, rng):
    template = CountedStream(schedule=tk.StreamK(), **knobs)
    stages, full = template.placement(90).stages, slots(template)
    for tasks, length in (
        (1, 1),
        (1, stages),
        (2, stages + 1),
        (1, 2 * full + 1),
        (full - 1, 2),
        (full, 1),
        (full + 1, stages - 1),
        (2 * full - 1, 1),
        (2 * full + 1, 9),
        (3 * full + 1, 5),
    ):
        check_stream(template, [length] * tasks, None, rng)
    check_stream(template, [5] * (full + 2), max(1, full // 2), rng)


@pytest.mark.simulated(always=True, multiprocessors=2, step_limit=100_000)
def test_stream_k_of_no_iterations(rng, monkeypatch):
    """Every task is finished once all the same. In the simulator: a walk that stays in place would never end on a
    GPU."""
    monkeypatch.setattr("tests.gpu.test_template_gpu.DEVICE", "cpu")
    for tasks in (1, 3, 4):
        check_stream(CountedStream(consumers=1, schedule=tk.StreamK()), [0] * tasks, None, rng)


SCHEDULES = [
    tk.OnePerBlock(),
    tk.Persistent(),
    tk.Dynamic(),
    tk.SplitK(2),
    tk.SplitTail(),
    tk.SplitRest(),
    tk.StreamK(),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_tasks_of_a_schedule(schedule, rng):
    template = CountedStream(consumers=1, schedule=schedule)
    check_stream(template, [], None, rng)
    check_stream(template, [3], None, rng)  # and then some


@pytest.mark.simulated(multiprocessors=2)
def test_more_blocks_than_the_device_holds(rng):
    """`blocks` overrides the grid: also where partial sums need memory for each of them."""
    for schedule in (tk.StreamK(), tk.SplitTail()):
        template = CountedStream(consumers=1, schedule=schedule)
        check_stream(template, [4] * 3, 4 * slots(template), rng)


@pytest.mark.parametrize(
    "knobs",
    [
        dict(consumers=2, stages=2),
        slow(dict(consumers=1, stages=3, page_indices=16)),
        slow(dict(consumers=1, stages=3, lagged_producer=True, page_indices=9)),
        dict(consumers=1, stages=3, lagged_producer=True, page_indices=16, broadcast_tile=True),
        dict(consumers=1, stages=2, schedule=tk.OnePerBlock(), page_indices=12, broadcast_tile=True),
        slow(dict(consumers=2, stages=2, schedule=tk.Dynamic(), page_indices=16)),
        dict(consumers=1, cluster=2, stages=3, page_indices=5),
    ],
    ids=str,
)
def test_page_indices(knobs, rng):
    template = IndexedStream(**knobs)
    tensors = operands(template, [int(n) for n in rng.integers(0, 9, on_gpu_or_simulated(40, 16))], rng, DEVICE)
    expected = prefixes(template, *tensors)[:, -1].reshape(-1, template.cols).float()
    assert torch.equal(add_listed(template, *tensors, blocks=None).cpu(), expected)
