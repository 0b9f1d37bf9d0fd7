"""Programmatic dependent launch: a kernel that starts early knows of earlier launches only what has ended."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import poison
from tritonkittens import sim


@triton.jit
def copies(X, Y, WAITS: tl.constexpr, TELLS: tl.constexpr):
    """Y = X. WAITS: for the launch before, "first", "last" or "" for never. TELLS: the next launch may start, "first",
    after the wait or "" for at the end."""
    o = tl.arange(0, 128)
    if TELLS == "first":
        tk.dependents_launch()
    if WAITS == "first":
        tk.dependency_wait()
    if TELLS == "waited":
        tk.dependents_launch()
    x = tl.load(X + o)
    if WAITS == "last":
        tk.dependency_wait()
    tl.store(Y + o, x)


def vectors(count):
    """One of random numbers, and poisoned ones."""
    first, *rest = torch.randn(count, 128, dtype=torch.float32, device="cpu")
    return [first.clone(), *(poison(torch.empty_like(x)) for x in rest)]


def run(*launches):
    """(from, to, waits, tells) of launches on five buffers. Returns the findings of each. All but the first start
    early."""
    buffers = vectors(5)
    with sim.device(raise_findings=False) as device:
        for i, (source, target, waits, tells) in enumerate(launches):
            copies[(1,)](buffers[source], buffers[target], waits, tells, launch_pdl=i > 0)
    return [[f.kind for f in launch.findings] for launch in device.launches], device


@pytest.mark.parametrize(
    "second, right",
    [
        ((1, 2, "first", ""), True),
        ((1, 2, "last", ""), False),  # reads what may not be written yet
        ((1, 2, "", ""), False),
        ((2, 3, "", ""), True),  # nothing in common
        ((2, 0, "", ""), False),  # writes what may still be read
        ((2, 0, "last", ""), True),
        ((2, 1, "", ""), False),  # both write
    ],
)
def test_a_launch_that_starts_early_and_the_one_before(second, right):
    found, device = run((0, 1, "", "first"), second)
    assert found == [[], [] if right else ["race"]]
    if not right:
        assert "by a launch that may still run: griddepcontrol.wait" in device.launches[1].findings[0].message


@pytest.mark.parametrize(
    "second, third, right",
    [
        # the second ends after the first, because it waits for it: so the third, which waits for the second, may read
        (("first", ""), "first", True),
        (("last", "first"), "first", True),
        (("", "first"), "first", False),  # the second may end before the first does
        # the second waits, and then lets the third start: the first has ended when the third starts
        (("first", "waited"), "", True),
        (("first", "first"), "", False),
        (("first", ""), "", True),  # it starts when the second ends
    ],
)
def test_a_launch_that_starts_early_and_the_one_before_the_last(second, third, right):
    found, _ = run((0, 1, "", "first"), (2, 3, *second), (1, 4, third, ""))
    assert found == [[], [], [] if right else ["race"]]


def test_an_ordinary_launch_comes_after_everything():
    buffers = vectors(3)
    with sim.device():
        for early in (False, True, False):
            copies[(1,)](buffers[0], buffers[1], "first" if early else "", "first", launch_pdl=early)
        copies[(1,)](buffers[1], buffers[2], "", "")
    assert torch.equal(buffers[0], buffers[2])
