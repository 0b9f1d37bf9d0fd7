"""What `tk.prefetch` asks L2 for, by the simulator: each line of a tile or vector once, however many threads there are,
and nothing outside the tensor."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.inline_ptx import _meaning
from tritonkittens.sim.ptx import parse

pytestmark = [pytest.mark.usefixtures("kernel_device"), pytest.mark.simulated(always=True)]
LINE = 128


@tk.kernel
@triton.jit
def asks(G, WHAT: tl.constexpr, row, col):
    tk.prefetch(G, WHAT, (row, col))


@tk.kernel
@triton.jit
def asks_for_vector(G, WHAT: tl.constexpr, place):
    tk.prefetch(G, WHAT, (place,))


@pytest.fixture
def requested(monkeypatch):
    """The addresses of all requests. What a text of PTX means is found once: those found before, and with this, are
    forgotten."""
    found = []
    parse.cache_clear()
    meanings = _meaning._MEANINGS["prefetch"]
    recorded = [
        dataclasses.replace(m, function=lambda t, i, addresses: found.extend(_meaning.lanes(addresses, i.active)))
        for m in meanings
    ]
    monkeypatch.setitem(_meaning._MEANINGS, "prefetch", recorded)
    yield found
    parse.cache_clear()


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize(
    "what, row, col",
    [
        (tk.sv(tk.int32, 16), 2, 0),
        (tk.sv(tk.int32, 992), 0, 0),
        (tk.sv(tk.int32, 64), 3, 1),
        (tk.sv(tk.int32, 64), 3, 2),
        (tk.sv(tk.int32, 64), 4, 0),
        (tk.sv(tk.int32, 16), 0, -1),
        (tk.sv(tk.int32, 16), -1, 0),
        (tk.rt(tk.int32, 16, 64), 0, 0),
        (tk.rt(tk.int32, 16, 64), 0, 1),
        (tk.rt(tk.int32, 16, 16), 1, 0),
    ],
)
def test_prefetch_asks_for_each_line_of_what_is_there_once(requested, what, row, col, warps):
    rows, cols, height = 4, 100, 1 if len(what.shape) == 1 else what.shape[0]
    memory = torch.zeros(rows * cols + 5, dtype=torch.int32)
    g = memory[5:].view(rows, cols)  # lines begin anywhere
    asks[(1,)](tk.gl(g), what, row, col, num_warps=warps)
    width = what.shape[-1]
    wanted = [g[r, c].data_ptr() for r in range(max(row * height, 0), min((row + 1) * height, rows))
              for c in range(col * width, min((col + 1) * width, cols)) if row >= 0 and col >= 0]  # fmt: skip
    first = g.data_ptr()
    assert {a // LINE for a in requested} == {a // LINE for a in wanted}
    assert set(requested) <= set(wanted) and len(set(requested)) == len(requested)
    assert len(requested) <= len({((a - first) // (4 * cols), a // LINE) for a in wanted}) + min(rows, height), (
        "one more a row: of its last element"
    )


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize(
    "length, stride, place", [(300, 1, 0), (300, 1, 2), (300, 1, 3), (0, 1, 0), (1, 1, 0), (300, 3, 1), (5, 3, 0)]
)
def test_prefetch_of_a_vector(requested, length, stride, place, warps):
    g = torch.zeros(stride * length + 3, dtype=torch.int32)[3:][::stride][:length]
    asks_for_vector[(1,)](tk.gl(g), tk.sv(tk.int32, 128), place, num_warps=warps)
    wanted = [g.data_ptr() + 4 * stride * c for c in range(place * 128, min((place + 1) * 128, length))]
    assert {a // LINE for a in requested} == {a // LINE for a in wanted}
    assert set(requested) <= set(wanted) and len(set(requested)) == len(requested)
    assert stride > 1 or len(requested) <= len({a // LINE for a in wanted}) + 1
