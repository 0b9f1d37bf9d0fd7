"""Faults that kernels written in Gluon are prone to, each beside its correct twin."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.util import poison
from tritonkittens import sim

SCHEDULES = (None, 1, 8, 9)


@gluon.jit
def slice_reader(accumulator, out, read, layout: gl.constexpr):
    values = accumulator.slice(0, 64).load(layout)
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(out + rows * 64 + columns, values)
    mbarrier.arrive(read, count=1)


@gluon.jit
def slice_writer(accumulator, read, waits: gl.constexpr, layout: gl.constexpr):
    if waits:
        mbarrier.wait(read, phase=0)
    accumulator.slice(32, 32).store(gl.zeros([128, 32], gl.float32, layout))


@gluon.jit
def overlapping_slices(out, fills: gl.constexpr, waits: gl.constexpr):
    whole: gl.constexpr = gl.BlockedLayout([1, 128], [32, 1], [4, 1], [0, 1])
    left: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [4, 1], [0, 1])
    middle: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [4, 1], [0, 1])
    accumulator = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    if fills:
        accumulator.store(gl.full([128, 128], 3.0, gl.float32, whole))
    read = mbarrier.allocate_mbarrier()
    mbarrier.init(read, count=1)
    gl.warp_specialize(
        [(slice_reader, (accumulator, out, read, left)), (slice_writer, (accumulator, read, waits, middle))], [4], [32]
    )


def slices(fills, waits, schedule):
    """The launch of `overlapping_slices` and its result."""
    out = poison(torch.empty(128, 64, dtype=torch.float32, device="cpu"))
    arguments = (out, fills, waits)
    launch = sim.run(overlapping_slices, (1,), *arguments, arch="sm_100a", schedule=schedule, raise_findings=False)
    return launch, out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("waits", [False, True])
def test_roles_that_share_columns_of_tensor_memory_need_an_order(waits, schedule):
    launch, out = slices(True, waits, schedule)
    assert [finding.kind for finding in launch.findings] == ([] if waits else ["race"])
    if waits:
        assert (out == 3).all()
    else:
        assert any("accumulator.slice(32, 32).store" in str(place) for place in launch.findings[0].places)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("waits", [False, True])
def test_a_load_of_unwritten_tensor_memory_counts_as_an_access(waits, schedule):
    launch, _ = slices(False, waits, schedule)
    assert {finding.kind for finding in launch.findings} == ({"uninitialized"} if waits else {"uninitialized", "race"})
    for finding in launch.findings:
        assert finding.kind != "race" or all("accumulator.slice" in str(place) for place in finding.places)


@gluon.jit
def one_stage(a_desc, b_desc, out, steps, waits: gl.constexpr, loads_past_end: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    accumulator = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout([128, 64], col_stride=1))
    loaded, multiplied = mbarrier.allocate_mbarrier(), mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(multiplied, count=1)
    for step in range(steps):
        if waits:
            mbarrier.wait(multiplied, (step + 1) & 1, pred=step > 0)
        mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, 64 * step], loaded, a)
        tma.async_load(b_desc, [64 * step, 0], loaded, b)
        mbarrier.wait(loaded, step & 1)
        if not waits:
            mbarrier.wait(multiplied, (step + 1) & 1, pred=step > 0)
        tcgen05_mma(a, b, accumulator, use_acc=step > 0)
        tcgen05_commit(multiplied)
    mbarrier.wait(multiplied, (steps + 1) & 1)
    if loads_past_end:
        mbarrier.expect(loaded, a_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, 64 * steps], loaded, a)
    layout: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [4, 1], [0, 1])
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(out + rows * 64 + columns, accumulator.load(layout))


def product_of_one_stage(waits, loads_past_end, schedule):
    a, b = torch.randn(128, 192).half(), torch.randn(192, 64).half()
    out = poison(torch.empty(128, 64, dtype=torch.float32, device="cpu"))
    descriptors = [
        TensorDescriptor.from_tensor(t, block, gl.NVMMASharedLayout.get_default_for(block, gl.float16))
        for t, block in ((a, [128, 64]), (b, [64, 64]))
    ]
    arguments = (*descriptors, out, 3, waits, loads_past_end)
    launch = sim.run(one_stage, (1,), *arguments, arch="sm_100a", schedule=schedule, raise_findings=False)
    return launch.findings, out, a.double() @ b.double()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_single_stage_is_right_when_the_load_waits_for_the_product(schedule):
    findings, out, expected = product_of_one_stage(True, False, schedule)
    assert not findings
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_load_into_a_single_stage_before_the_wait_for_the_product(schedule):
    findings, _, _ = product_of_one_stage(False, False, schedule)
    assert {finding.kind for finding in findings} == {"race"}
    places = [str(place) for finding in findings for place in finding.places]
    assert any("tma.async_load(a_desc" in place for place in places)
    assert any("tcgen05_mma(a, b" in place for place in places)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_prefetch_past_the_last_tile_that_nothing_waits_for(schedule):
    findings, out, expected = product_of_one_stage(True, True, schedule)
    assert [finding.kind for finding in findings] == ["unfinished"]
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
