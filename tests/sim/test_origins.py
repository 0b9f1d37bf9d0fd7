"""Accesses past the end of one tensor that land in another argument."""

import ctypes

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import poison
from tritonkittens import sim

COUNT = 256


@pytest.fixture
def neighbours():
    """Three tensors of memory of their own that lie behind one another."""
    room = np.zeros(3 * COUNT, np.float32)

    def part(i):
        memory = (ctypes.c_float * COUNT).from_address(room.ctypes.data + 4 * COUNT * i)
        return torch.from_numpy(np.ndarray((COUNT,), np.float32, memory))

    parts = [part(i) for i in range(3)]
    parts[0].copy_(torch.randn(COUNT))
    poison(parts[1]), poison(parts[2])
    yield parts
    assert room.size  # keeps the memory


@triton.jit
def in_a_loop(X, Y, Z, MORE: tl.constexpr):
    pointers = X + tl.arange(0, 128)
    for i in range(2 + MORE):
        tl.store(Y + i % 2 * 128 + tl.arange(0, 128), tl.load(pointers))
        pointers += 128


@triton.jit(noinline=True)
def moved(to, X, MORE: tl.constexpr):
    o = tl.arange(0, 256)
    tl.store(to + o, tl.load(X + o + MORE))


@triton.jit
def in_a_function(X, Y, Z, MORE: tl.constexpr):
    moved(Y, X, MORE)


@triton.jit
def by_one_of_two(X, Y, Z, MORE: tl.constexpr):
    """X or Y, by a number that the compiler does not know: both are right, Z is not."""
    o = tl.arange(0, 256)
    chosen = tl.where(tl.num_programs(0) > 0, X, Y)
    tl.store(Y + o, tl.load(chosen + o))
    tl.store(Y + o, tl.load(Y + o + MORE))


@triton.jit
def adds(X, Y, Z, MORE: tl.constexpr):
    o = tl.arange(0, 256)
    tl.store(Y + o, tl.load(X + o))
    tl.atomic_add(X + o + MORE, 0.0)


@triton.jit
def stores(X, Y, Z, MORE: tl.constexpr):
    o = tl.arange(0, 256)
    tl.store(Y + o + MORE, tl.load(X + o))


@triton.jit
def copies(X, Y, more):
    for i in range(256):
        tl.store(Y + i, tl.load(X + i + more))


@triton.jit
def idles(X, Y, more):
    pass


@tk.kernel
@triton.jit
def in_a_role(X, Y, Z, MORE: tl.constexpr):
    tk.specialize(((idles, (X, Y, MORE)), (copies, (X, Y, MORE))), warps=(4, 4))


KERNELS = [in_a_loop, in_a_function, by_one_of_two, adds, stores, in_a_role]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_an_access_that_lands_in_another_argument_is_out_of_bounds(kernel, neighbours):
    x, y, z = neighbours
    launch = sim.run(kernel, (1,), x, y, z, MORE=0)
    assert not launch.findings and torch.equal(x, y)
    (found,) = sim.run(kernel, (1,), x, y, z, MORE=1, raise_findings=False).findings
    assert found.kind == "out-of-bounds" and "an access of 4 bytes through a pointer to " in found.message, found
    source, target = ("Y", "Z") if kernel in (by_one_of_two, stores) else ("X", "Y")
    assert f"through a pointer to {source} lands in {target}[0]" in found.message, found.message


@triton.jit
def through_memory(X, Y, Z, Addresses):
    o = tl.arange(0, 256)
    address = tl.load(Addresses).to(tl.pointer_type(tl.float32))
    tl.store(Z + o, tl.load(address + 256 + o))


def test_an_address_from_memory_may_reach_every_argument(neighbours):
    x, y, z = neighbours
    y.copy_(torch.randn(COUNT))
    addresses = torch.tensor([x.data_ptr()])
    assert not sim.run(through_memory, (1,), x, y, z, addresses).findings and torch.equal(z, y)
