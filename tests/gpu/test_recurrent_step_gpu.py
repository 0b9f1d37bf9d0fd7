"""A few rows of recurrences against float64, and beside the kernels of chunks, on the GPU, or simulated."""

import pytest
import torch

from tests.cases_linear_attention import BF16, FP16, near, poisoned_rows
from tests.cases_recurrent_step import (
    BOUNDS,
    FUNCTIONS,
    STATE_BOUND,
    check,
    operands,
    random_call,
    run,
    some_rows,
    state_of,
)
from tests.util import DEVICE, seeds, slow
from tritonkittens.kernels.recurrent_step import config

pytestmark = pytest.mark.usefixtures("kernel_device")
KINDS = ["decays", "delta", "mamba"]  # a function each


@pytest.fixture(autouse=True)
def poison_where_no_kernel_writes(monkeypatch):
    poisoned_rows(monkeypatch)


@seeds
def test_random(seed):
    check(*random_call(seed))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [8, slow(1)])
def test_states_are_those_of_chunks(name, rows, monkeypatch):
    given = operands(name, 1, rows, 1, 40, 72, 2, dtype=FP16)
    o, state = check(name, given)
    monkeypatch.setattr(config, "MOST_ROWS", 0)
    of_chunks = run(name, given)
    near("result", o, of_chunks[0].double(), 1.5e-3)
    near("state", state, of_chunks[1].double(), 1e-3)
    assert state.stride() == of_chunks[1].stride() and o.stride() == of_chunks[0].stride()


@pytest.mark.parametrize("name", KINDS)
def test_a_sequence_cut_anywhere_gives_the_same(name):
    """Steps and pieces of a few rows continue each other: the same sums in the same order, so the same bits."""
    given = operands(name, 2, 7, 1, 16, 24)
    expected, last = check(name, given)
    found, state = [], given[next(iter(state_of(name, None)))]
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 7)):
        piece, state = run(name, some_rows(given, slice(begin, end)) | state_of(name, state))
        found.append(piece)
    near("result", torch.cat(found, 1), expected.double(), 1e-4)
    near("state", state, last.double(), STATE_BOUND)
    assert torch.equal(run(name, given, final=False), expected)


@pytest.mark.parametrize("name", [*KINDS, slow("gates"), slow("no gates")])
def test_steps_after_a_prompt(name):
    """A prompt by the kernels of chunks; their states are in the layout that the next kernel reads fastest."""
    given = operands(name, 1, 67, 1, 16, 24, dtype=FP16)
    expected, last = FUNCTIONS[name][1](**given)
    _, state = run(name, some_rows(given, slice(0, 65)))
    o, state = run(name, some_rows(given, slice(65, 67)) | state_of(name, state))
    near("result", o, expected[:, 65:], 1.5e-3)
    near("state", state, last, 1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_strides(name):
    """Columns of a projection, rows whose numbers are apart, and states in another order."""
    given = operands(name, 3, 2, 2, 24, 40)
    for n, x in list(given.items()):
        if n in ("q", "B", "beta", "dt"):
            given[n] = torch.cat([x, x], -1)[..., x.shape[-1] :]
        elif n in ("k", "C", "z", "g"):
            given[n] = torch.stack([x, x], -1)[..., 1]
        elif n in ("v", "x"):
            given[n] = x.transpose(0, 2).contiguous().transpose(0, 2)
        elif n in ("decay", "A", "D", "dt_bias"):
            given[n] = torch.stack([x, x + 1], -1)[..., 0]
        elif n.startswith("initial_state"):
            given[n] = x.transpose(0, 3).contiguous().transpose(0, 3)
    check(name, given)


@pytest.mark.skipif(DEVICE == "cpu", reason="a graph needs a GPU")
@pytest.mark.parametrize("name", KINDS)
def test_steps_in_a_cuda_graph(name):
    given = operands(name, 3, 1, 4, 128, 128)
    run(name, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(name, given)
    for x in given.values():
        if isinstance(x, torch.Tensor) and x.ndim == 4:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for ours, expected in zip(found, FUNCTIONS[name][1](**given), strict=True):
        near("replayed", ours, expected, BOUNDS[BF16])
