"""Mistakes between the CTAs of one program (`num_ctas`), in the form of `faults.py`: pairs that multiply together,
multicast copies, and threads that use the neighbour's shared memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    clc,
    tcgen05_commit,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
)
from triton.experimental.gluon.language.nvidia.hopper import cluster as gluon_cluster
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import tritonkittens.lang as tk
from tests.sim.faults import Fault, empty, integers
from tritonkittens.inline_ptx import barrier, cluster, shared
from tritonkittens.inline_ptx import mbarrier as ptx_mbarrier
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm

PAIR_FAULTS: list[Fault] = []


def fault(name: str, kind: str, kernel: Any, inputs: Any, ctas: int = 2, **more: Any) -> None:
    more = {"arch": "sm_100a", "options": dict(num_warps=4, num_ctas=ctas), **more}
    PAIR_FAULTS.append(Fault(name, kind, kernel, inputs, **more))


def described(t: torch.Tensor, block: list[int], split: Any) -> TensorDescriptor:
    """A descriptor of the tensor, whose tiles `split` divides between the CTAs."""
    element = {torch.float16: gl.float16, torch.float32: gl.float32}[t.dtype]
    return TensorDescriptor.from_tensor(
        t, block, gl.NVMMASharedLayout.get_default_for(block, element, cga_layout=[tuple(s) for s in split])
    )


# ---------------------------------------------------------------- one product of a pair


@gluon.jit
def pair_product(a_desc, b_desc, c_desc, BUG: gl.constexpr):
    """C = A·B. Each CTA loads its rows of A and its columns of B; the first one issues the product."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    loaded = mbarrier.allocate_mbarrier(two_ctas=BUG != "barrier_not_shared")
    half = mbarrier.allocate_mbarrier()
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(half, count=1)
    mbarrier.init(done, count=1)
    if BUG == "operand_half_missing":
        mbarrier.expect(loaded, a_desc.nbytes_per_cta)
        mbarrier.expect(half, b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, 0], loaded, a)
        tma.async_load(b_desc, [0, 0], half, b)  # reports: operand_half_missing
        mbarrier.wait(half, 0)
    else:
        if BUG == "half_of_the_bytes":
            mbarrier.expect(loaded, (a_desc.nbytes_per_cta + b_desc.nbytes_per_cta) // 2)  # reports: half_of_the_bytes
        else:
            mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, 0], loaded, a)  # reports: barrier_not_shared
        tma.async_load(b_desc, [0, 0], loaded, b)
    mbarrier.wait(loaded, 0)
    if BUG == "read_by_who_does_not_wait":  # only the first CTA waits for a shared barrier
        threads: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1], a_desc.layout.cga_layout)
        a.store(a.load(threads))  # reports: read_by_who_does_not_wait
        fence_async_shared()
    layout: gl.constexpr = TensorMemoryLayout(
        (128, b_desc.block_shape[1]), col_stride=1, cga_layout=c_desc.layout.cga_layout, two_ctas=True
    )
    accumulator = allocate_tensor_memory(gl.float32, c_desc.block_shape, layout)
    # reports: barrier_not_shared, operand_half_missing, read_before_commit
    tcgen05_mma(a, b, accumulator, use_acc=False)
    tcgen05_commit(done)
    if BUG == "read_before_commit":
        if cluster.ctarank() == 0:
            mbarrier.wait(done, 0)
    else:
        mbarrier.wait(done, 0)
    mbarrier.invalidate(loaded)
    mbarrier.invalidate(half)
    mbarrier.invalidate(done)
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    c.store(accumulator.load())  # reports: read_before_commit
    fence_async_shared()
    tma.async_store(c_desc, [0, 0], c)
    tma.store_wait(0)


def pair_inputs(rng: Any) -> Any:
    a, b = integers(rng, 256, 64, dtype=torch.float16), integers(rng, 64, 64, dtype=torch.float16)
    c = empty(256, 64)
    descriptors = described(a, [256, 64], [(1, 0)]), described(b, [64, 64], [(0, 1)]), described(c, [256, 64], [(1, 0)])
    return (1,), descriptors, [c], [a.float() @ b.float()]


fault("barrier_not_shared", "race", pair_product, pair_inputs)
fault("operand_half_missing", "race", pair_product, pair_inputs)
fault("read_by_who_does_not_wait", "race", pair_product, pair_inputs, also=("uninitialized",))
fault("half_of_the_bytes", "bytes", pair_product, pair_inputs, also=("race", "uninitialized"), seed=2)
fault("read_before_commit", "race", pair_product, pair_inputs)


# ---------------------------------------------------------------- products of a pair in a pipeline


@gluon.jit
def pair_load(a_desc, b_desc, a, b, full, free, tiles, steps, BUG: gl.constexpr):
    k: gl.constexpr = a_desc.block_shape[1]
    for i in range(tiles * steps):
        if BUG == "refilled_by_the_peer":
            if i >= 2:
                if cluster.ctarank() == 0:
                    mbarrier.wait(free.index(i % 2), (i // 2 - 1) & 1)
        else:
            mbarrier.wait(free.index(i % 2), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(i % 2), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        at = i % steps * k
        # reports: full_not_shared, refilled_by_the_peer
        tma.async_load(a_desc, [i // steps * a_desc.block_shape[0], at], full.index(i % 2), a.index(i % 2))
        tma.async_load(b_desc, [at, 0], full.index(i % 2), b.index(i % 2))


@gluon.jit
def pair_multiply(a, b, full, free, accumulator, ready, read, tiles, steps):
    for i in range(tiles * steps):
        if i % steps == 0:
            mbarrier.wait(read, (i // steps & 1) ^ 1)
        mbarrier.wait(full.index(i % 2), i // 2 & 1)
        # reports: full_not_shared, refilled_by_the_peer, accumulator_not_shared, accumulator_not_awaited
        tcgen05_mma(a.index(i % 2), b.index(i % 2), accumulator, use_acc=i % steps > 0)
        tcgen05_commit(free.index(i % 2))
        if i % steps == steps - 1:
            tcgen05_commit(ready)


@gluon.jit
def pair_store(c_desc, c, accumulator, ready, read, tiles, BUG: gl.constexpr):
    for i in range(tiles):
        if BUG == "accumulator_not_awaited":
            if cluster.ctarank() == 0:
                mbarrier.wait(ready, i & 1)
        else:
            mbarrier.wait(ready, i & 1)
        value = accumulator.load()  # reports: accumulator_not_shared, accumulator_not_awaited
        mbarrier.arrive(read, count=1)  # reports: accumulator_not_awaited
        tma.store_wait(0)
        c.store(value)
        fence_async_shared()
        tma.async_store(c_desc, [i * c_desc.block_shape[0], 0], c)
    tma.store_wait(0)


@gluon.jit
def pair_pipeline(a_desc, b_desc, c_desc, tiles, steps, BUG: gl.constexpr):
    """C = A·B, tile after tile of a pair's rows."""
    a = gl.allocate_shared_memory(a_desc.dtype, [2] + a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [2] + b_desc.block_shape, b_desc.layout)
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    layout: gl.constexpr = TensorMemoryLayout(
        (128, b_desc.block_shape[1]), col_stride=1, cga_layout=c_desc.layout.cga_layout, two_ctas=True
    )
    accumulator = allocate_tensor_memory(gl.float32, c_desc.block_shape, layout)
    full = mbarrier.allocate_mbarrier(batch=2, two_ctas=BUG != "full_not_shared")
    free = mbarrier.allocate_mbarrier(batch=2)
    ready = mbarrier.allocate_mbarrier()
    read = mbarrier.allocate_mbarrier(two_ctas=BUG != "accumulator_not_shared")
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(read, count=1)
    gl.barrier(cluster=True)
    gl.warp_specialize(
        [
            (pair_store, (c_desc, c, accumulator, ready, read, tiles, BUG)),
            (pair_load, (a_desc, b_desc, a, b, full, free, tiles, steps, BUG)),
            (pair_multiply, (a, b, full, free, accumulator, ready, read, tiles, steps)),
        ],
        [1, 1],
        [24, 24],
    )


def pipeline_inputs(rng: Any) -> Any:
    tiles, steps = 2, 3
    a = integers(rng, 256 * tiles, 32 * steps, dtype=torch.float16)
    b = integers(rng, 32 * steps, 64, dtype=torch.float16)
    c = empty(256 * tiles, 64)
    descriptors = described(a, [256, 32], [(1, 0)]), described(b, [32, 64], [(0, 1)]), described(c, [256, 64], [(1, 0)])
    return (1,), (*descriptors, tiles, steps), [c], [a.float() @ b.float()]


fault("full_not_shared", "race", pair_pipeline, pipeline_inputs)
fault("refilled_by_the_peer", "race", pair_pipeline, pipeline_inputs, also=("arrivals",))
fault("accumulator_not_shared", "race", pair_pipeline, pipeline_inputs)
fault("accumulator_not_awaited", "race", pair_pipeline, pipeline_inputs, also=("arrivals",))


# ---------------------------------------------------------------- multicast


@gluon.jit
def shared_columns(a_desc, b_desc, c_desc, steps, LAYOUT: gl.constexpr, BUG: gl.constexpr):
    """C = A·B. Each CTA multiplies its rows of A; a tile of B is loaded once and sent to all CTAs that need it."""
    k: gl.constexpr = a_desc.block_shape[1]
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    accumulator = allocate_tensor_memory(gl.float32, c_desc.block_shape, LAYOUT)
    full = mbarrier.allocate_mbarrier(two_ctas=LAYOUT.two_ctas)
    free = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    ALL: gl.constexpr = BUG != "commit_without_the_peer"
    mbarrier.init(free, count=tcgen05_mma_barrier_count([a, b], multicast=ALL, two_ctas=LAYOUT.two_ctas))
    gl.barrier(cluster=True)
    for i in range(steps):
        mbarrier.expect(full, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, i * k], full, a)
        tma.async_load(b_desc, [i * k, 0], full, b, multicast=True)  # reports: commit_without_the_peer
        mbarrier.wait(full, i & 1)
        COMMIT: gl.constexpr = ALL and BUG != "peer_commit_missing"
        # reports: commit_without_the_peer
        tcgen05_mma(a, b, accumulator, use_acc=i > 0, multicast=COMMIT, mbarriers=[free])
        mbarrier.wait(free, i & 1)  # reports: peer_commit_missing
    mbarrier.invalidate(full)
    mbarrier.invalidate(free)
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    c.store(accumulator.load())
    fence_async_shared()
    tma.async_store(c_desc, [0, 0], c)
    tma.store_wait(0)


def columns_inputs(ctas: int) -> Any:
    pair = ctas == 4  # pairs share a tile of B where there are two of them
    rows, columns = [(1, 0), (2, 0)][: ctas // 2], [(0, int(pair)), (0, 0)][: ctas // 2]

    def make(rng: Any) -> Any:
        m = 128 * ctas
        a, b = integers(rng, m, 96, dtype=torch.float16), integers(rng, 96, 64, dtype=torch.float16)
        c = empty(m, 64)
        layout = TensorMemoryLayout((128, 64), col_stride=1, cga_layout=rows, two_ctas=pair)
        descriptors = described(a, [m, 32], rows), described(b, [32, 64], columns), described(c, [m, 64], rows)
        return (1,), (*descriptors, 3, layout), [c], [a.float() @ b.float()]

    return make


for ctas in (2, 4):
    more = dict(ctas=ctas, line="commit_without_the_peer")
    fault("commit_without_the_peer", "race", shared_columns, columns_inputs(ctas), **more)
fault("peer_commit_missing", "deadlock", shared_columns, columns_inputs(2))


# ---------------------------------------------------------------- a tile scheduler of the cluster


@gluon.jit
def of_every_cta(size: gl.constexpr):
    """The layout of a tensor that every CTA of the program holds."""
    return gl.BlockedLayout([size], [32], [gl.num_warps()], [0], [[0]] * (gl.num_ctas().bit_length() - 1))


@gluon.jit
def fetch_tiles(answer, answered, tile, fetched, read, BUG: gl.constexpr):
    phase = 0
    busy = gl.to_tensor(True)
    while busy:
        if BUG != "requested_before_the_tile_is_read":
            mbarrier.wait(read, phase ^ 1)
        mbarrier.expect(answered, 16)
        # reports: requested_before_the_tile_is_read, read_by_a_pair_of_four, read_by_one_of_two
        clc.try_cancel(answer, answered)
        if BUG == "requested_before_the_tile_is_read":
            mbarrier.wait(read, phase ^ 1)
        mbarrier.wait(answered, phase)
        result = clc.load_result(answer)
        busy = result.is_canceled()
        fetched_tile = gl.to_tensor(-1)
        if busy:
            fetched_tile = result.program_id(0)
        # Only the first CTA waits for `read`; its request, and so the answer, orders this store in the other CTAs.
        tile.store(gl.full([1], fetched_tile, gl.int32, of_every_cta(1)))
        mbarrier.arrive(fetched)
        phase ^= 1


@gluon.jit
def write_tiles(Y, tile, fetched, read, SPLIT: gl.constexpr):
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0], SPLIT)
    size: gl.constexpr = 128 * gl.num_ctas()
    phase = 0
    current = gl.program_id(0)
    while current >= 0:
        place = current * size + gl.arange(0, size, threads)
        gl.store(Y + place, place)
        mbarrier.wait(fetched, phase)
        current = tile.load(of_every_cta(1)).reshape([])
        mbarrier.arrive(read)
        phase ^= 1


@gluon.jit
def cluster_scheduler(Y, SPLIT: gl.constexpr, BUG: gl.constexpr):
    """Y[i] = i. The first CTA requests the next tile for all of them (cluster launch control)."""
    bits: gl.constexpr = gl.num_ctas().bit_length() - 1
    one_each: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]] * bits)
    answer = gl.allocate_shared_memory(gl.int64, [2], one_each)
    tile = gl.allocate_shared_memory(gl.int32, [1], one_each)
    answered = mbarrier.allocate_mbarrier()
    fetched = mbarrier.allocate_mbarrier()
    if BUG == "read_by_a_pair_of_four":
        read = mbarrier.allocate_mbarrier(two_ctas=True)
    elif BUG == "read_by_one_of_two":
        read = mbarrier.allocate_mbarrier()
    else:
        read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout([[0]] * bits))
    mbarrier.init(answered, count=1)
    mbarrier.init(fetched, count=1)
    mbarrier.init(read, count=1)
    gl.warp_specialize(
        [(write_tiles, (Y, tile, fetched, read, SPLIT)), (fetch_tiles, (answer, answered, tile, fetched, read, BUG))],
        [1],
        [24],
    )


def scheduler_inputs(split: tuple[tuple[int], ...]) -> Any:
    def make(rng: Any) -> Any:
        size = 12 * 128 << len(split)
        y = empty(size, dtype=torch.int32)
        return (12,), (y, split), [y], [torch.arange(size)]

    return make


requests: dict[str, Any] = dict(device=dict(multiprocessors=4))
fault("requested_before_the_tile_is_read", "race", cluster_scheduler, scheduler_inputs(((1,),)), **requests)
fault("read_by_one_of_two", "race", cluster_scheduler, scheduler_inputs(((1,),)), **requests)
fault("read_by_a_pair_of_four", "race", cluster_scheduler, scheduler_inputs(((1,), (2,))), ctas=4, **requests)


# ---------------------------------------------------------------- the neighbour's shared memory


@gluon.jit
def thread():
    return asm("mov.u32 $0, %tid.x;", "=r", [], gl.int32)


@gluon.jit
def put(pointer, value):
    asm("st.global.b32 [$0], $1;", "l,r", [pointer, value])


@gluon.jit
def get(pointer):
    return asm("ld.global.b32 $0, [$1];", "=r,l", [pointer], gl.int32)


@gluon.jit
def remote_stores(X, Y, BUG: gl.constexpr):
    """Y[round, rank] = X[round, 1 - rank], stored into the neighbour's shared memory."""
    slots = shared.allocate(4 * 128, 16)
    rank, t = cluster.ctarank(), thread()
    if BUG != "stored_too_early":
        cluster.arrive()
        cluster.wait()
    for i in gl.static_range(2):
        value = get(X + (2 * i + rank) * 128 + t)
        # reports: store_not_awaited, relaxed_barrier, slot_in_use, stored_too_early
        cluster.st(cluster.mapa(slots, 1 - rank) + 4 * t, value, gl.int32, "thread")
        if BUG == "relaxed_barrier":
            cluster.arrive("relaxed")
            cluster.wait()
        elif BUG != "store_not_awaited":
            cluster.arrive()
            cluster.wait()
        put(
            Y + (2 * i + rank) * 128 + t, shared.load(slots + 4 * t, gl.int32)
        )  # reports: store_not_awaited, relaxed_barrier, slot_in_use
        if BUG != "slot_in_use":
            cluster.arrive()
            cluster.wait()


@gluon.jit
def remote_arrivals(X, Y, BUG: gl.constexpr):
    """Y[rank] = X[1 - rank], with an arrival at the neighbour's barrier."""
    slots = shared.allocate(4 * 128, 16)
    bar = shared.allocate(8, 8)
    rank, t = cluster.ctarank(), thread()
    ptx_mbarrier.init(bar, 128)
    ptx_mbarrier.fence_init()
    if BUG != "arrival_before_the_cluster_barrier":
        cluster.arrive()
        cluster.wait()
    cluster.st(cluster.mapa(slots, 1 - rank) + 4 * t, get(X + rank * 128 + t), gl.int32, "thread")
    if BUG == "arrival_at_home":
        ptx_mbarrier.arrive(bar, issuer="thread")
    else:
        ptx_mbarrier.arrive_remote(bar, 1 - rank, issuer="thread")  # reports: arrival_before_the_cluster_barrier
    ptx_mbarrier.wait(bar, 0, "cluster")
    put(Y + rank * 128 + t, shared.load(slots + 4 * t, gl.int32))  # reports: arrival_at_home
    cluster.arrive()
    cluster.wait()


@gluon.jit
def remote_copies(X, Y, BUG: gl.constexpr):
    """Y[rank] = X[1 - rank], by a bulk copy between shared memories."""
    mine = shared.allocate(512, 16)
    inbox = shared.allocate(512, 16)
    bar = shared.allocate(8, 8)
    rank, t = cluster.ctarank(), thread()
    ptx_mbarrier.init(bar, 1)
    ptx_mbarrier.fence_init()
    shared.store(mine + 4 * t, get(X + rank * 128 + t), gl.int32, "thread")
    shared.store(inbox + 4 * t, 0, gl.int32, "thread")  # reports: copied_into_a_slot_in_use
    ptx_tma.fence_proxy_async("")
    if BUG != "copied_into_a_slot_in_use":
        cluster.arrive()
    ptx_mbarrier.arrive_expect_tx(bar, 512, issuer="cta")
    if BUG != "copied_into_a_slot_in_use":
        cluster.wait()
    # reports: copied_into_a_slot_in_use
    ptx_tma.copy_bulk_cluster(cluster.mapa(inbox, 1 - rank), mine, 512, cluster.mapa(bar, 1 - rank), issuer="cta")
    ptx_mbarrier.wait(bar, 0, "cluster")
    put(Y + rank * 128 + t, shared.load(inbox + 4 * t, gl.int32))
    cluster.arrive()
    cluster.wait()


@gluon.jit
def signalled(X, Y, BUG: gl.constexpr):
    """Y[rank] = X + 1. The first CTA stores X into both shared memories and signals both barriers; each adds 1."""
    slots = shared.allocate(4 * 128, 16)
    arrived = mbarrier.allocate_mbarrier()
    added = mbarrier.allocate_mbarrier()
    mbarrier.init(arrived, count=1)
    mbarrier.init(added, count=1)
    gl.barrier(cluster=True)
    rank, t = cluster.ctarank(), thread()
    if rank == 0:
        value = get(X + t)
        for peer in gl.static_range(2):
            cluster.st(cluster.mapa(slots, peer) + 4 * t, value, gl.int32, "thread")  # reports: signal_of_each_cta
    if BUG == "signal_of_each_cta":
        mbarrier.arrive(arrived)
    elif BUG == "signal_of_one_cta":
        if rank == 0:
            mbarrier.arrive(arrived)
    else:
        mbarrier.arrive(arrived, from_cta=0)
    mbarrier.wait(arrived, 0)  # reports: signal_of_one_cta
    if rank == 1:
        shared.store(slots + 4 * t, shared.load(slots + 4 * t, gl.int32) + 1, gl.int32, "thread")
        mbarrier.arrive(added)
        mbarrier.wait(added, 0)
    else:
        shared.store(slots + 4 * t, shared.load(slots + 4 * t, gl.int32) + 1, gl.int32, "thread")
    put(Y + rank * 128 + t, shared.load(slots + 4 * t, gl.int32))


@tk.kernel
@triton.jit
def last_loads(X, Y, BUG: gl.constexpr):
    """Y[rank] = X[1 - rank], read in the neighbour's shared memory, where the two CTAs are programs of their own."""
    slots = shared.allocate(4 * 128, 16)
    rank, t = cluster.ctarank(), thread()
    shared.store(slots + 4 * t, get(X.pointer + rank * 128 + t), gl.int32, "thread")
    tk.cluster_sync()
    theirs = cluster.ld(cluster.mapa(slots, 1 - rank) + 4 * t, gl.int32)  # reports: neighbour_ended
    put(Y.pointer + rank * 128 + t, theirs)
    if BUG != "neighbour_ended":
        tk.cluster_sync()


@gluon.jit
def passed_on(X, Y, BUG: gl.constexpr):
    """Y[rank] = X[1 - rank]: threads store into the neighbour's memory, which a bulk store then copies out."""
    slots = shared.allocate(512, 16)
    rank, t = cluster.ctarank(), thread()
    cluster.arrive()
    cluster.wait()
    # reports: fence_of_one_cta
    cluster.st(cluster.mapa(slots, 1 - rank) + 4 * t, get(X + rank * 128 + t), gl.int32, "thread")
    cluster.arrive()
    cluster.wait()
    if BUG == "fence_of_one_cta":
        ptx_tma.fence_proxy_async("shared::cta")
    else:
        ptx_tma.fence_proxy_async("shared::cluster")
    barrier.sync(8, 128)
    ptx_tma.store_bulk(Y + rank * 128, slots, 512, issuer="cta")  # reports: fence_of_one_cta
    ptx_tma.commit_group()
    ptx_tma.wait_group()
    cluster.arrive()
    cluster.wait()


HALVES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], [[0, 1]]))
COPIES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], [[0, 0]]))


@gluon.jit
def half_tile():
    """A tile of which each CTA holds half the columns, and the columns."""
    tile = gl.allocate_shared_memory(gl.int32, [1, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0], [[0, 1]]))
    gl.barrier(cluster=True)
    return tile, gl.arange(0, 256, gl.SliceLayout(0, HALVES))[None, :]


@gluon.jit
def gathered(X, Y, BUG: gl.constexpr):
    """Y[rank] = X[1 - rank]: each CTA gathers from the neighbour's half of a tile."""
    tile, column = half_tile()
    for i in range(2):
        tile.store(gl.load(X + i * 256 + column))  # reports: stored_while_gathered
        gluon_cluster.barrier(relaxed=BUG == "gathered_too_early")
        gl.store(Y + i * 256 + column, tile.gather(column ^ 128, axis=1))  # reports: gathered_too_early
        gluon_cluster.barrier(relaxed=BUG == "stored_while_gathered")


@gluon.jit
def scattered(X, Y, BUG: gl.constexpr):
    """Y[rank] = X[1 - rank]: each CTA scatters into the neighbour's half of a tile."""
    tile, column = half_tile()
    for i in range(2):
        tile.scatter(gl.load(X + i * 256 + column), column ^ 128, axis=1)  # reports: scattered_too_early
        gluon_cluster.barrier(relaxed=BUG == "loaded_too_early")
        gl.store(Y + i * 256 + column, tile.load(HALVES))  # reports: loaded_too_early
        gluon_cluster.barrier(relaxed=BUG == "scattered_too_early")


@gluon.jit
def read_whole(X, Y, BUG: gl.constexpr):
    """Y[rank] = X[1 - rank]: the threads of each CTA load both halves of a tile."""
    tile, column = half_tile()
    for i in range(2):
        tile.store(gl.load(X + i * 256 + column))  # reports: stored_while_read
        gluon_cluster.barrier(relaxed=BUG == "read_too_early")
        y = tile.load(COPIES)  # reports: read_too_early
        gl.store(Y + i * 256 + (gl.arange(0, 256, gl.SliceLayout(0, COPIES))[None, :] ^ 128), y)
        gluon_cluster.barrier(relaxed=BUG == "stored_while_read")


def neighbour_inputs(rounds: int) -> Any:
    def make(rng: Any) -> Any:
        x, y = integers(rng, rounds, 2, 128, dtype=torch.int32), empty(rounds, 2, 128, dtype=torch.int32)
        return (1,), (x, y), [y], [x.flip(1)]

    return make


def signalled_inputs(rng: Any) -> Any:
    x, y = integers(rng, 128, dtype=torch.int32), empty(2, 128, dtype=torch.int32)
    return (1,), (x, y), [y], [(x + 1).expand(2, 128)]


def loads_inputs(rng: Any) -> Any:
    x, y = integers(rng, 2, 128, dtype=torch.int32), empty(2, 128, dtype=torch.int32)
    return (1,), (tk.gl(x), tk.gl(y)), [y], [x.flip(0)]


fault("store_not_awaited", "race", remote_stores, neighbour_inputs(2), also=("uninitialized",))
fault("relaxed_barrier", "race", remote_stores, neighbour_inputs(2))
fault("stored_too_early", "out-of-bounds", remote_stores, neighbour_inputs(2))
fault("slot_in_use", "race", remote_stores, neighbour_inputs(2))
fault(
    "arrival_before_the_cluster_barrier", "barrier-life", remote_arrivals, neighbour_inputs(1), also=("out-of-bounds",)
)
fault("arrival_at_home", "race", remote_arrivals, neighbour_inputs(1), also=("uninitialized",))
fault("signal_of_each_cta", "race", signalled, signalled_inputs, also=("uninitialized",))
fault("signal_of_one_cta", "deadlock", signalled, signalled_inputs)
fault("fence_of_one_cta", "missing-fence", passed_on, neighbour_inputs(1))
fault("neighbour_ended", "out-of-bounds", last_loads, loads_inputs, options=dict(cluster_size=2))
fault("copied_into_a_slot_in_use", "race", remote_copies, neighbour_inputs(1), also=("barrier-life",))
fault("gathered_too_early", "race", gathered, neighbour_inputs(2))
fault("stored_while_gathered", "race", gathered, neighbour_inputs(2))
fault("scattered_too_early", "race", scattered, neighbour_inputs(2))
fault("loaded_too_early", "race", scattered, neighbour_inputs(2))
fault("read_too_early", "race", read_whole, neighbour_inputs(2))
fault("stored_while_read", "race", read_whole, neighbour_inputs(2))
