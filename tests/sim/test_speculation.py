"""What code computes in vain is no mistake until it is used: addresses, divisions, accumulators, registers. Raw Gluon:
these are things that compilers do."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tests.util import poison
from tritonkittens import sim


@gluon.jit
def arrivals(y, index, arrive: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    bar = bars.index(index)
    mbarrier.arrive(bar, pred=(index >= 0) | arrive)
    gl.store(y, index)


def test_an_address_outside_a_buffer_may_be_computed_but_not_used():
    y = torch.full((1,), 7, dtype=torch.int32)
    with sim.device("sm_90a"):
        arrivals[(1,)](y, -1, False)
        assert y.item() == -1
        with pytest.raises(
            sim.SimulationError,
            match=r"out-of-bounds: bars\[0\]: index -1 of 2 buffers\n.*kernel.*\n.*bar = bars.index\(index\)",
        ):
            arrivals[(1,)](y, -1, True)


@gluon.jit
def quotients(y, a, b, use: gl.constexpr):
    q, r = a // b, a % b
    gl.store(y, q if use or b != 0 else a)
    gl.store(y + 1, r if use or b != 0 else b)


def test_a_division_by_zero_gives_what_the_hardware_gives(rng):
    y = torch.zeros(2, dtype=torch.int32)
    a = int(rng.integers(1, 1000))
    with sim.device("sm_90a"):
        quotients[(1,)](y, a, 0, False)
        assert y.tolist() == [a, 0]
        quotients[(1,)](y, a, 0, True)
        assert y.tolist() == [-1, a]
        quotients[(1,)](y, a, 7, True)
        assert y.tolist() == [a // 7, a % 7]


@gluon.jit
def accumulator(y, there, use: gl.constexpr):
    layout: gl.constexpr = blackwell.TensorMemoryLayout([128, 32], col_stride=1)
    acc = blackwell.allocate_tensor_memory(gl.float32, [128, 32], layout)
    registers: gl.constexpr = acc.get_reg_layout()
    one = gl.full([128, 32], 1.0, gl.float32, registers)
    acc.store(one, pred=there)
    read = acc.load(registers)
    if use or there:
        one = read + 1
    rows = gl.arange(0, 128, gl.SliceLayout(1, registers))
    columns = gl.arange(0, 32, gl.SliceLayout(0, registers))
    gl.store(y + rows[:, None] * 32 + columns[None, :], one)


def test_tensor_memory_may_be_read_before_anything_is_there_but_not_used():
    y = poison(torch.empty(128, 32))
    with sim.device("sm_100a"):
        accumulator[(1,)](y, False, False)
        assert (y == 1).all()
        accumulator[(1,)](y, True, True)
        assert (y == 2).all()
        with pytest.raises(sim.SimulationError) as caught:
            accumulator[(1,)](y, False, True)
    text = str(caught.value)
    assert (
        "uninitialized" in text
        and "parts of which were never written" in text
        and "read = acc.load(registers)" in text
        and "gl.store(y + rows" in text
    )


@gluon.jit
def register_products(x, y, anew: gl.constexpr, pending: gl.constexpr):
    """y = the sum of four products of (x + i) with ones; the left operand is in registers."""
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, left)), gl.arange(0, 16, gl.SliceLayout(0, left))
    ones = gl.allocate_shared_memory(gl.float16, [16, 16], gl.NVMMASharedLayout(32, 16, 2))
    ones.store(gl.full([16, 16], 1.0, gl.float16, gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])))
    hopper.fence_async_shared()
    a = gl.load(x + rows[:, None] * 16 + columns[None, :])
    acc = hopper.warpgroup_mma_init(gl.zeros([64, 16], gl.float32, result))
    for i in range(4):
        if anew:
            acc = hopper.warpgroup_mma(a + i.to(gl.float16), ones, acc, is_async=True)
        else:
            acc = hopper.warpgroup_mma(a, ones, acc, is_async=True)
        acc = hopper.warpgroup_mma_init(hopper.warpgroup_mma_wait(pending, deps=[acc]))
    total = hopper.warpgroup_mma_wait(0, deps=[acc])
    down, across = gl.arange(0, 64, gl.SliceLayout(1, result)), gl.arange(0, 16, gl.SliceLayout(0, result))
    gl.store(y + down[:, None] * 16 + across[None, :], total)


@pytest.mark.parametrize(("anew", "pending"), [(False, 1), (True, 0), (False, 0)])
def test_the_register_operand_of_a_product_need_not_be_kept_to_its_wait(rng, anew, pending):
    x, y = torch.from_numpy(rng.integers(-4, 5, (64, 16))).half(), poison(torch.empty(64, 16))
    expected = sum((x.double() + (i if anew else 0)) @ torch.ones(16, 16).double() for i in range(4))
    for seed in range(12):
        with sim.device("sm_90a", schedule=seed):
            register_products[(1,)](x, y, anew, pending)
        assert torch.equal(y.double(), expected)


def test_the_register_operand_of_a_product_in_flight_may_not_be_computed_anew(rng):
    x, y = torch.from_numpy(rng.integers(-4, 5, (64, 16))).half(), torch.empty(64, 16)
    with sim.device("sm_90a"), pytest.raises(sim.SimulationError) as caught:
        register_products[(1,)](x, y, True, 1)
    text = str(caught.value)
    assert "in-flight: the register operand of a wgmma is overwritten before a wait for the wgmma that reads it" in text
    assert "hopper.warpgroup_mma(a + i.to(gl.float16), ones, acc, is_async=True)" in text
