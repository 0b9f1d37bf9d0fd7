"""The load / compute / finish engine on a GPU: every shape of its ring, with tasks of any length.

Arithmetic is exact, so results are compared bit by bit. All launches are in debug mode unless said otherwise: a wait of more than two
seconds traps, so that a deadlock fails and does not hang.
"""

import pytest
import torch

import tritonkittens.lang as tk
from tests.streaming import PipelinedStream, SparseStream, Stream, operands, reference
from tests.util import DEVICE, on_gpu_or_simulated, poison, synchronize

pytestmark = pytest.mark.usefixtures("kernel_device")

MARGIN = 16  # elements around the output that nothing may write to
CUT = (5, 8)  # rows and columns of the last tiles that lie outside the output; TMA stores end at multiples of 16 bytes
LENGTHS = (0, 1, 2, 3, 17)

# Knobs → (stages, safe stages): where the two are equal, the results have memory of their own.
PLAIN = [
    (dict(consumers=1, stages=1), (1, 1)),
    (dict(consumers=2, stages=1), (1, 1)),
    (dict(consumers=2, stages=2), (2, 2)),
    (dict(consumers=3, stages=3), (3, 3)),
    (dict(consumers=4, stages=4), (4, 4)),
    (dict(consumers=2, stages=5, extra=64), (5, 5)),
    (dict(consumers=2, stages=6), (6, 6)),
    (dict(consumers=2, weighted=False, dtype=tk.bf16), (6, 6)),
    (dict(consumers=1, blocks_per_sm=2), (5, 5)),
    (dict(consumers=2, blocks_per_sm=2, dtype=tk.bf16, out=tk.bf16), (6, 6)),
    (dict(consumers=1, cols=128, extra=128), (2, 1)),
    (dict(consumers=1, cols=128, extra=64), (3, 2)),
    (dict(consumers=2, cols=128, extra=256), (1, 0)),
    (dict(consumers=2, extra=128, stages=4), (4, 3)),
    (dict(consumers=2, stages=12), (12, 10)),
    (dict(consumers=2, stages=12, out=tk.bf16), (12, 11)),
    (dict(consumers=3, extra=128), (3, 2)),
    (dict(consumers=3, cols=128), (3, 0)),
    (dict(consumers=4, extra=128), (3, 1)),
    (dict(consumers=4, cols=128, out=tk.bf16, stages=2), (2, 0)),
]
PIPELINED = [
    (dict(consumers=1, stages=2), (2, 2)),
    (dict(consumers=2, stages=2), (2, 2)),
    (dict(consumers=2, stages=3, ordered=True), (3, 3)),
    (dict(consumers=3, ordered=True), (6, 6)),
    (dict(consumers=4, weighted=False, extra=64, stages=5, ordered=True), (5, 5)),
    (dict(consumers=2, blocks_per_sm=2, dtype=tk.bf16, out=tk.bf16), (6, 6)),
    (dict(consumers=1, cols=128, extra=128), (2, 1)),
    (dict(consumers=2, cols=128, extra=64), (2, 1)),
    (dict(consumers=3, cols=128), (3, 0)),
    (dict(consumers=4, extra=128, ordered=True), (3, 1)),
    (dict(consumers=4, cols=128, out=tk.bf16, stages=2), (2, 0)),
]
CASES = [(Stream, *case) for case in PLAIN] + [(PipelinedStream, *case) for case in PIPELINED]


def name(case):
    cls, knobs, _ = case
    return "-".join(["pipelined" if cls is PipelinedStream else "plain", *(f"{k}_{v}" for k, v in knobs.items())])


def run(template, tensors, tasks, blocks, debug=True):
    """The output and the buffer around it, which starts as NaN."""
    x, e, s, lengths = tensors
    rows, cols = tasks * template.consumers * template.rows - CUT[0], template.cols - CUT[1]
    around = poison(torch.empty(rows + 2 * MARGIN, template.cols + 2 * MARGIN, dtype=tk.to_torch(template.out), device=DEVICE))
    y = around[MARGIN : MARGIN + rows, MARGIN : MARGIN + cols]
    template(x, e, s, y, lengths, tasks=tasks, blocks=blocks, debug=debug)
    return y, around


def check(template, tensors, expected, tasks, blocks, debug=True):
    y, around = run(template, tensors, tasks, blocks, debug)
    synchronize()
    wrong = (y.cpu() != expected[: y.shape[0], : y.shape[1]]).nonzero()
    lengths = tensors[3].tolist()
    where = {int(r) // (template.rows * template.consumers) for r in wrong[:, 0]}
    assert not len(wrong), f"blocks={blocks}: tasks {sorted(where)} of lengths {[lengths[t] for t in sorted(where)]} are wrong"
    y.fill_(float("nan"))
    assert torch.isnan(around).all(), "the margin was written to"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_stream(case, rng):
    cls, knobs, placement = case
    template = cls(**knobs)
    placed = template.placement(90)
    assert (placed.stages, placed.safe_stages) == placement, "the case no longer covers what it was chosen for"
    tasks = on_gpu_or_simulated(40, 12)
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


@pytest.mark.parametrize("cls", [Stream, PipelinedStream])
@pytest.mark.parametrize("length", LENGTHS)
def test_tasks_of_one_length(cls, length, rng):
    """Among them blocks that never see a slot, and a ring that never gets past its first slot. Without debug mode the code is another."""
    template = cls(consumers=2, extra=128, stages=4)
    assert template.placement(90).over_ring
    for tasks in (1, 9):
        tensors = operands(template, [length] * tasks, rng, DEVICE)
        expected = reference(template, *tensors)
        check(template, tensors, expected, tasks, 2)
        check(template, tensors, expected, tasks, 2, debug=False)


@pytest.mark.parametrize("knobs", [dict(consumers=2), dict(consumers=2, stages=14), dict(consumers=3, extra=128, stages=4)])
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
