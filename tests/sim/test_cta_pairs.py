"""One Triton program for a pair of CTAs: shared barriers, multicast copies, products of the pair, and layouts of such
memory."""

import numpy as np
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.util import poison
from tritonkittens import sim
from tritonkittens.inline_ptx import cluster
from tritonkittens.inline_ptx import mbarrier as ptx_mbarrier
from tritonkittens.sim.layouts import SHARED_STRIDE, shared_offsets, tensor_offsets


@gluon.jit
def pair_product(a_desc, b_desc, c_desc, missing: gl.constexpr, shared: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    loaded = mbarrier.allocate_mbarrier(two_ctas=shared)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=1)
    mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta - missing)
    tma.async_load(a_desc, [0, 0], loaded, a)
    tma.async_load(b_desc, [0, 0], loaded, b)
    mbarrier.wait(loaded, 0)
    layout: gl.constexpr = TensorMemoryLayout(
        (128, b_desc.block_shape[1]), col_stride=1, cga_layout=c_desc.layout.cga_layout, two_ctas=True
    )
    accumulator = allocate_tensor_memory(gl.float32, c_desc.block_shape, layout)
    tcgen05_mma(a, b, accumulator, use_acc=False)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    mbarrier.invalidate(loaded)
    mbarrier.invalidate(done)
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    c.store(accumulator.load())
    fence_async_shared()
    tma.async_store(c_desc, [0, 0], c)
    tma.store_wait(0)


def launch(rng, seed, missing=0, shared=True):
    m, n, k = 256, 64, 64
    a, b = (torch.from_numpy(rng.standard_normal(s)).half() for s in ((m, k), (k, n)))
    c = poison(torch.empty(m, n))
    tiles = [(a, gl.float16, (1, 0)), (b, gl.float16, (0, 1)), (c, gl.float32, (1, 0))]
    descriptors = [
        TensorDescriptor.from_tensor(
            t, list(t.shape), gl.NVMMASharedLayout.get_default_for(list(t.shape), d, cga_layout=[s])
        )
        for t, d, s in tiles
    ]
    with sim.device("sm_100a", schedule=seed, raise_findings=False) as device:
        pair_product[(1,)](*descriptors, missing, shared, num_warps=4, num_ctas=2)
    return c, a.double() @ b.double(), device.launches[-1].findings


def test_a_pair_multiplies(rng):
    for seed in range(12):
        c, expected, findings = launch(rng, seed)
        assert not findings
        torch.testing.assert_close(c.double(), expected, atol=1e-4, rtol=1e-4)


def test_the_leader_expects_the_bytes_of_both(rng):
    _, _, findings = launch(rng, 2, missing=16)
    assert any(f.kind == "bytes" for f in findings)


def test_layouts_of_a_cluster():
    """Parts lie in their CTA, copies in every CTA that has one."""
    split = (
        "#ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16, CGALayout = [[0, "
        "1], [0, 0]]}>"
    )
    places, copies = shared_offsets(split, (64, 128), 2)
    ranks = places // SHARED_STRIDE
    assert (ranks[:, :64] == 0).all() and (ranks[:, 64:] == 1).all()
    assert (
        copies is not None
        and copies.shape == (2, 64, 128)
        and np.array_equal(copies[1] - copies[0], np.full((64, 128), 2 * SHARED_STRIDE))
    )
    pair = (
        "#ttng.tensor_memory_encoding<blockM = 128, blockN = 64, colStride = 1, CGALayout = [[1, 0]], twoCTAs = true>"
    )
    lanes, _, columns = tensor_offsets(pair, (256, 64), 32)
    assert columns == 64 and np.array_equal(lanes[128:] - lanes[:128], np.full((128, 64), SHARED_STRIDE))
    padded = "#ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 8, fp4Padded = true}>"
    row = shared_offsets(padded, (8, 64), 1)[0][0]
    assert np.array_equal(row, np.arange(64) % 8 + np.arange(64) // 8 * 16)  # every 8 bytes lie in 16


@gluon.jit
def one_cta_copies(desc, y_desc):
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, desc.nbytes_per_cta)
    if cluster.ctarank() == 0:
        tma.async_load(desc, [0, 0], full, tile)
    mbarrier.wait(full, 0)
    tma.async_store(y_desc, [0, 0], tile)
    tma.store_wait(0)


def test_a_copy_of_one_cta_is_unknown(rng):
    """Values are computed for all CTAs together: what only one of them does to a tile has no meaning."""
    x, y = torch.from_numpy(rng.standard_normal((128, 64))).half(), poison(torch.empty(128, 64).half())
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.float16, cga_layout=[(1, 0)])
    descriptors = [TensorDescriptor.from_tensor(t, [128, 64], layout) for t in (x, y)]
    with sim.device("sm_100a", raise_findings=False) as device:
        one_cta_copies[(1,)](*descriptors, num_warps=4, num_ctas=2)
    (finding,) = device.launches[-1].findings
    assert finding.kind == "unknown"
    assert "ttng.async_tma_copy_global_to_local in a branch that only some threads take (128 of 256)" in str(finding)


@gluon.jit
def round_of_arrivals(y, rounds, BUG: gl.constexpr):
    """Both CTAs arrive at the first one's barrier, round after round."""
    bar = mbarrier.allocate_mbarrier(two_ctas=True)
    back = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.init(back, count=1)
    gl.barrier(cluster=True)
    for i in range(rounds):
        mbarrier.arrive(bar)
        mbarrier.wait(bar, i & 1)
        if not BUG:
            mbarrier.arrive(back, from_cta=0)
            mbarrier.wait(back, i & 1)
    gl.store(y, rounds)


@gluon.jit
def neighbour_arrives_later(y, count: gl.constexpr, branches: gl.constexpr):
    """CTA 0 waits for an arrival of CTA 1, which comes later in the program. With `branches` only CTA 0 waits; else
    the barrier of CTA 1 has no arrival missing."""
    bar = mbarrier.allocate_mbarrier()
    rank = cluster.ctarank()
    mbarrier.init(bar, count=1)
    gl.barrier(cluster=True)
    if branches:
        if rank == 0:
            mbarrier.wait(bar, 0)
    else:
        if rank == 1:
            ptx_mbarrier.arrive_remote(bar, 1, issuer="cta")
        mbarrier.wait(bar, 0)
    for _ in range(count):
        if rank == 1:
            ptx_mbarrier.arrive_remote(bar, 0, issuer="cta")
    gl.barrier(cluster=True)
    gl.store(y, count + 7)


@pytest.mark.parametrize("schedule", [None, 1, 8, 9])
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("count, kinds", [(1, []), (0, ["deadlock"])])
def test_a_cta_may_wait_for_what_its_neighbour_does_later(count, kinds, branches, schedule):
    y = poison(torch.empty(2, dtype=torch.int32, device="cpu"))
    with sim.device("sm_100a", raise_findings=False, schedule=schedule) as device:
        neighbour_arrives_later[(1,)](y, count, branches, num_warps=4, num_ctas=2)
    assert [f.kind for f in device.launches[-1].findings] == kinds


def test_a_cta_that_runs_ahead_arrives_too_early():
    """Only the leader waits for a shared barrier; nothing else keeps the other CTA from arriving twice in a phase."""
    for bug in (False, True):
        y = torch.zeros(1, dtype=torch.int32)
        with sim.device("sm_100a", raise_findings=False) as device:
            round_of_arrivals[(1,)](y, 3, bug, num_warps=4, num_ctas=2)
        findings = device.launches[-1].findings
        assert [f.kind for f in findings] == ["arrivals"] * bug
        if bug:
            assert "rank 1 arrives in phase 1, but nothing orders it after an arrival of rank 0" in str(findings[0])
            assert int(y) == 3
