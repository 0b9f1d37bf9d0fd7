"""The synchronisation and copy shims of `inline_ptx` on a Hopper GPU: each one in a test that can see its effect. Every
wait is bounded by a trap.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as gluon_mbarrier

from tests.util import DEVICE, crossed, on_gpu_or_simulated, poison
from tritonkittens.inline_ptx import barrier, cluster, elect, mbarrier, pdl, registers, shared, tensormap, tma
from tritonkittens.inline_ptx._asm import asm, issued
from tritonkittens.sim.report import SimulationError

pytestmark = pytest.mark.usefixtures("kernel_device")
THREADS = tl.constexpr(128)


def explicit(kernel):
    """The kernel compiled as an explicit one. The disk cache does not tell the two languages apart: use a function in
    one of them only."""
    return GluonJITFunction(kernel.fn)


def words(*shape):
    return poison(torch.empty(*shape, dtype=torch.int32, device=DEVICE))


def random_words(rng, *shape, low=-(1 << 31), high=1 << 31):
    return torch.from_numpy(rng.integers(low, high, shape).astype(np.int32)).to(DEVICE)


# One value a thread: assembly results differ between threads, whatever the compiler thinks of scalars.


@triton.jit
def thread():
    return asm("mov.u32 $0, %tid.x;", "=r", [], tl.int32)


@triton.jit
def put(pointer, value, issuer: tl.constexpr = "thread"):
    asm(issued("st.global.b32 [$0], $1;", issuer, 90), "l,r", [pointer, value])


@triton.jit
def get(pointer):
    return asm("ld.global.b32 $0, [$1];", "=r,l", [pointer], tl.int32)


@triton.jit
def now():
    return asm("mov.u64 $0, %globaltimer;", "=l", [], tl.int64)


@triton.jit
def sleep(microseconds: tl.constexpr):
    asm(
        "{ .reg .pred on; .reg .b64 start; .reg .b64 time; mov.u64 start, %globaltimer; AGAIN: nanosleep.u32 1000; "
        "mov.u64 time, %globaltimer; sub.u64 time, time, start; setp.lt.u64 on, time, $0; @on bra AGAIN; }",
        "l",
        [microseconds * 1000],
    )


# -- shared memory and named barriers
# --------------------------------------------------------------------------------------------------


@triton.jit
def buffers_kernel(source, out, total):
    first = shared.allocate(4 * THREADS, 16)
    second = shared.allocate(4 * THREADS, 1024)
    t = thread()
    shared.store(first + 4 * t, get(source + t), tl.int32, "thread")
    shared.store(second + 4 * t, get(source + THREADS + t), tl.int32, "thread")
    barrier.sync(8, THREADS)
    # the compiler's own shared memory is used in between and must not overlap
    x = tl.load(source + tl.arange(0, 2048) % 256)
    tl.store(total, tl.sum(tl.reshape(tl.cumsum(tl.reshape(x, (16, 128)), 0), (2048,)), 0))
    barrier.sync(8, THREADS)
    other = (t + 37) % THREADS
    put(out + t, shared.load(first + 4 * other, tl.int32))
    put(out + THREADS + t, shared.load(second + 4 * other, tl.int32))
    put(out + 2 * THREADS, first, "cta")
    put(out + 2 * THREADS + 1, second, "cta")


def test_one_call_of_allocate_is_one_buffer(rng):
    source, out, total = random_words(rng, 256, low=-1000, high=1000), words(258), words(1)
    buffers_kernel[(1,)](source, out, total, num_warps=4)
    out = out.cpu()
    assert torch.equal(out[:256].view(2, 128), torch.roll(source.cpu().view(2, 128), -37, 1))
    first, second = int(out[256]), int(out[257])
    assert abs(first - second) >= 512 and first % 16 == 0 and second % 1024 == 0
    rows = source.cpu()[torch.arange(2048) % 256].view(16, 128)
    assert int(total) == int(rows.cumsum(0).sum())


@triton.jit
def named_barrier_kernel(source, out):
    slots = shared.allocate(256, 16)
    t = thread()
    if t < 64:
        shared.store(slots + 4 * t, -7, tl.int32, "thread")
    barrier.sync(10, THREADS)
    if t >= 64:  # two warps write late and arrive, two wait for them
        sleep(500)
        shared.store(slots + 4 * (t - 64), get(source + t - 64), tl.int32, "thread")
        barrier.arrive(9, THREADS)
    else:
        barrier.sync(9, THREADS)
        put(out + t, shared.load(slots + 4 * (63 - t), tl.int32))
    if t < 64:  # 64 threads suffice for a barrier of 64
        barrier.sync(8, 64)
        put(out + 64 + t, t)


def test_named_barriers_wait_for_exactly_their_threads(rng):
    source, out = random_words(rng, 64), words(128)
    named_barrier_kernel[(1,)](source, out, num_warps=4)
    assert torch.equal(out[:64], source.flip(0))
    assert out[64:].tolist() == list(range(64))


@triton.jit
def votes_kernel(votes, out):
    t = thread()
    vote = get(votes + t)
    put(out + t, barrier.reduce(vote, 8, THREADS))
    put(out + THREADS + t, barrier.reduce(vote, 8, THREADS, "and"))
    put(out + 2 * THREADS + t, barrier.reduce(vote, 8, THREADS, "or"))


@pytest.mark.parametrize("chosen", [0, 1, 77, 127, 128])
def test_reductions_over_a_barrier(rng, chosen):
    votes = torch.zeros(128, dtype=torch.int32)
    votes[torch.from_numpy(rng.permutation(128)[:chosen].copy())] = 5
    out = words(3, 128)
    votes_kernel[(1,)](votes.to(DEVICE), out, num_warps=4)
    assert (out.cpu() == torch.tensor([[chosen], [int(chosen == 128)], [int(chosen > 0)]])).all()


@triton.jit
def warp_kernel(source, out, lanes):
    slots = shared.allocate(4 * THREADS, 16)
    t = thread()
    shared.store(slots + 4 * t, -7, tl.int32, "thread")
    barrier.syncwarp()
    if t % 32 >= 16:  # half a warp writes late
        sleep(200)
        shared.store(slots + 4 * t, get(source + t), tl.int32, "thread")
    else:
        shared.store(slots + 4 * t, get(source + t), tl.int32, "thread")
    barrier.syncwarp()
    put(out + t, shared.load(slots + 4 * (t // 32 * 32 + (t + 16) % 32), tl.int32))
    put(lanes + t, elect.elect_one())
    put(lanes + THREADS + t, elect.elect_one())


def test_syncwarp_and_elect_one(rng):
    source, out, lanes = random_words(rng, 128), words(128), words(2, 4, 32)
    warp_kernel[(1,)](source, out, lanes, num_warps=4)
    assert torch.equal(out.view(4, 32), torch.roll(source.view(4, 32), -16, 1))
    assert torch.equal(lanes[0], lanes[1])
    assert (lanes.sum(2) == 1).all() and lanes.min() == 0


@triton.jit
def message_kernel(source, data, flag, out, SEMANTICS: tl.constexpr):
    t = thread()
    if tl.program_id(0) == 0:
        sleep(100)
        put(data + t, get(source + t))
        barrier.fence(SEMANTICS, "gpu")
        barrier.sync(8, THREADS)
        asm(issued("st.relaxed.gpu.global.b32 [$0], 1;", "cta", 90), "l", [flag])
    else:
        asm(
            "{ .reg .pred on; .reg .pred late; .reg .b32 seen; .reg .b64 start; .reg .b64 time; mov.u64 start, "
            "%globaltimer; "
            "AGAIN: ld.relaxed.gpu.global.b32 seen, [$0]; mov.u64 time, %globaltimer; sub.u64 time, time, start; "
            "setp.gt.u64 late, time, 2000000000; @late trap; setp.ne.s32 on, seen, 1; @on bra AGAIN; }",
            "l",
            [flag],
        )
        barrier.fence(SEMANTICS, "gpu")
        put(out + t, get(data + t))


@pytest.mark.parametrize("semantics", ["acq_rel", "sc"])
def test_fences_carry_a_message_between_ctas(rng, semantics):
    source, data, out = random_words(rng, 128), words(128), words(128)
    message_kernel[(2,)](source, data, torch.zeros(1, dtype=torch.int32, device=DEVICE), out, semantics, num_warps=4)
    assert torch.equal(out, source)


# -- mbarrier
# --------------------------------------------------------------------------------------------------------------------------


@triton.jit
def handover_kernel(source, out, ROUNDS: tl.constexpr):
    slots = shared.allocate(4 * THREADS * ROUNDS, 16)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 4)
    t = thread()
    barrier.sync(8, THREADS)
    for i in range(ROUNDS):
        if t // 32 == i % 4:  # another warp is late in every round
            sleep(100)
        shared.store(slots + 4 * (i * THREADS + t), get(source + i * THREADS + t), tl.int32, "thread")
        barrier.syncwarp()
        mbarrier.arrive(bar)
        mbarrier.wait_or_trap(bar, i % 2)
        put(out + i * THREADS + t, shared.load(slots + 4 * (i * THREADS + (t + 45) % THREADS), tl.int32))


def test_a_phase_ends_with_its_last_arrival(rng):
    source, out = random_words(rng, 6, 128), words(6, 128)
    handover_kernel[(1,)](source, out, 6, num_warps=4)
    assert torch.equal(out, torch.roll(source, -45, 1))


@triton.jit
def ask(bar, phase, out):
    barrier.sync(8, THREADS)
    put(out, mbarrier.test_wait(bar, phase), "cta")
    barrier.sync(8, THREADS)


@triton.jit
def counting_kernel(source, out):
    bar = shared.allocate(8, 8)
    tile = shared.allocate(64, 16)
    mbarrier.init(bar, 6)
    mbarrier.fence_init()
    ask(bar, 1, out)  # the phase before the first counts as complete: 1
    ask(bar, 0, out + 1)  # 0
    mbarrier.arrive(bar)  # 4 of 6
    ask(bar, 0, out + 2)  # 0
    mbarrier.arrive(bar, issuer="warpgroup")  # 5
    ask(bar, 0, out + 3)  # 0
    mbarrier.arrive(bar, issuer="cta")  # 6
    ask(bar, 0, out + 4)  # 1
    ask(bar, 1, out + 5)  # 0: the second phase has begun
    mbarrier.arrive(bar, 6, issuer="cta")
    ask(bar, 1, out + 6)  # 1
    mbarrier.inval(bar)
    barrier.sync(8, THREADS)
    mbarrier.init(bar, 128 + 2)
    ask(bar, 0, out + 7)  # 0
    mbarrier.arrive(bar, issuer="thread")  # 128
    mbarrier.expect_tx(bar, 48, issuer="cta")
    mbarrier.arrive_expect_tx(bar, 16, issuer="cta")
    mbarrier.arrive(bar, issuer="cta")
    ask(bar, 0, out + 8)  # 0: 130 arrivals, but 64 bytes are missing
    tma.load_bulk(tile, source, 32, bar, issuer="cta")
    sleep(200)
    ask(bar, 0, out + 9)  # 0: 32 bytes are missing
    tma.load_bulk(tile + 32, source + 8, 32, bar, issuer="cta")
    mbarrier.wait_or_trap(bar, 0)
    put(out + 10, mbarrier.try_wait(bar, 0), "cta")  # 1
    put(out + 11, mbarrier.try_wait(bar, 1, hint_ns=1000), "cta")  # 0
    mbarrier.wait(bar, 0)
    put(out + 12, mbarrier.try_wait(bar, 0, "cluster"), "cta")  # 1
    put(out + 13, mbarrier.test_wait(bar, 0, "cluster"), "cta")  # 1
    t = thread()
    if t < 16:
        put(out + 16 + t, shared.load(tile + 4 * t, tl.int32))


def test_arrivals_and_bytes_are_counted(rng):
    source, out = random_words(rng, 16), words(32)
    counting_kernel[(1,)](source, out, num_warps=4)
    assert out[:14].tolist() == [1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 1]
    assert torch.equal(out[16:], source)


@triton.jit
def trap_kernel(out, ARRIVE: tl.constexpr):
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    barrier.sync(8, THREADS)
    if ARRIVE:
        mbarrier.arrive(bar, issuer="cta")
    mbarrier.wait_or_trap(bar, 0, limit_ns=100_000_000)
    put(out, 1, "cta")


TRAP = """
import time, torch
from tests.gpu.test_ptx_sync_gpu import trap_kernel
out = torch.zeros(1, dtype=torch.int32, device="cuda")
trap_kernel[(1, )](out, True, num_warps=4)
torch.cuda.synchronize()
assert int(out) == 1
trap_kernel.warmup(out, False, grid=(1, ), num_warps=4)
start = time.time()
try:
    trap_kernel[(1, )](out, False, num_warps=4)
    torch.cuda.synchronize()
except Exception as error:
    print("raised after", time.time() - start, "seconds:", str(error).splitlines()[0])
else:
    print("returned")
"""


def test_wait_or_trap_traps_after_its_limit(pytestconfig):
    if DEVICE == "cpu":
        out = torch.zeros(1, dtype=torch.int32)
        trap_kernel[(1,)](out, True, num_warps=4)
        assert int(out) == 1
        with pytest.raises(SimulationError, match="trap: kernel executed trap"):
            trap_kernel[(1,)](out, False, num_warps=4)
        return
    # a trap ends the CUDA context, so the process is thrown away
    run = subprocess.run(
        [sys.executable, "-c", TRAP], cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.startswith("raised after"), run.stdout + run.stderr
    assert float(run.stdout.split()[2]) >= 0.1


# -- the copy engine
# -------------------------------------------------------------------------------------------------------------------


def on_device(tensor_map):
    place = torch.zeros(256, dtype=torch.uint8, device=DEVICE)
    place = place[-place.data_ptr() % 128 :][:128]  # a GPU's allocations lie on 128 bytes anyway
    return place.copy_(torch.frombuffer(bytearray(tensor_map), dtype=torch.uint8))


def encode(tensor, box, **options):
    """The tensor map of a torch tensor, its box given in the tensor's order."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()]
    return tma.encode_tiled(
        tensor.data_ptr(), tensor.dtype, tensor.shape[::-1], strides[:-1][::-1], box[::-1], **options
    )


def padded(rng, dtype, shape):
    """A random tensor whose rows are padded to 16 bytes, the padding filled with a value that nobody may read."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    row = -(-shape[-1] * itemsize // 16) * 16 // itemsize
    whole = torch.full((*shape[:-1], row + 16 // itemsize), 77, dtype=dtype, device=DEVICE)
    values = torch.from_numpy(rng.integers(-60, 60, shape)).to(dtype).to(DEVICE)
    whole[..., : shape[-1]] = values
    return whole[..., : shape[-1]]


def box_at(tensor, corner, box, fill=0):
    """What a load of `box` at `corner` gives, both in the tensor's order."""
    index, inside = [], torch.ones(box, dtype=torch.bool, device=tensor.device)
    for axis, (start, extent) in enumerate(zip(corner, box)):
        place = torch.arange(start, start + extent, device=tensor.device)
        shape = [1] * len(box)
        shape[axis] = extent
        inside &= ((place >= 0) & (place < tensor.shape[axis])).view(shape)
        index.append(place.clamp(0, tensor.shape[axis] - 1).view(shape))
    return torch.where(inside, tensor[tuple(index)], torch.tensor(fill, dtype=tensor.dtype, device=tensor.device))


@triton.jit
def load_tensor_kernel(map, out, corner, NBYTES: tl.constexpr, HINT: tl.constexpr):
    tile = shared.allocate(NBYTES, 1024)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    tma.fence_tensormap_acquire(map, "sys")
    barrier.sync(8, THREADS)
    tma.prefetch_tensormap(map)
    tma.prefetch_tensor(map, corner)
    mbarrier.arrive_expect_tx(bar, NBYTES, issuer="cta")
    if HINT is None:
        tma.load_tensor(tile, map, corner, bar, issuer="cta")
    else:
        tma.prefetch_tensor(map, corner, cache_hint=tma.create_policy(HINT))
        tma.load_tensor(tile, map, corner, bar, cache_hint=tma.create_policy(HINT, 0.5), issuer="cta")
    mbarrier.wait_or_trap(bar, 0)
    t = thread()
    for i in range(NBYTES // 512):
        put(out + i * THREADS + t, shared.load(tile + 4 * (i * THREADS + t), tl.int32))


BOXES = {
    1: ((1000,), (256,)),
    2: ((100, 70), (32, 32)),
    3: ((9, 33, 70), (4, 8, 32)),
    4: ((3, 9, 20, 70), (2, 4, 8, 32)),
    5: ((3, 4, 5, 20, 70), (2, 2, 4, 8, 16)),
}


HINTS = [None, "evict_first", "evict_last", "evict_normal", "evict_unchanged"]


@pytest.mark.parametrize("rank, hint", crossed(range(1, 6), HINTS))
def test_load_tensor_of_every_rank_with_ragged_edges(rng, rank, hint):
    shape, box = BOXES[rank]
    source = padded(rng, torch.float32, shape)
    map = on_device(encode(source, box))
    for place in range(4):  # inside, over the upper edge, over the lower edge, anywhere
        corner = {
            0: [int(rng.integers(0, extent - tile + 1)) for extent, tile in zip(shape, box)],
            1: [
                extent - tile + int(rng.integers(1, tile)) if tile > 1 else extent - 1
                for extent, tile in zip(shape, box)
            ],
            2: [-int(rng.integers(1, tile)) if tile > 1 else 0 for tile in box],
            3: [int(rng.integers(-tile, extent + 1)) for extent, tile in zip(shape, box)],
        }[place]
        corner[-1] = corner[-1] // 4 * 4  # the fastest coordinate must lie on 16 bytes
        out = poison(torch.empty(box, device=DEVICE))
        load_tensor_kernel[(1,)](map, out.view(torch.int32), tuple(corner[::-1]), out.nbytes, hint, num_warps=4)
        assert torch.equal(out, box_at(source, corner, box)), (rank, corner)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.int64, torch.float64])
def test_load_tensor_of_every_type(rng, dtype):
    source = (
        padded(rng, dtype, (50, 200))
        if dtype != torch.uint8
        else padded(rng, torch.int32, (50, 200)).to(torch.uint8)[:, :192].contiguous()
    )
    box = (16, 128 // source.element_size())
    out = poison(torch.empty(box, dtype=dtype, device=DEVICE))
    corner = (41, source.shape[1] - box[1] // 2)
    load_tensor_kernel[(1,)](
        on_device(encode(source, box)), out.view(torch.int32), corner[::-1], out.nbytes, None, num_warps=4
    )
    assert torch.equal(out, box_at(source, corner, box))


def test_load_tensor_fills_with_nan(rng):
    source = padded(rng, torch.float32, (40, 40))
    out = torch.zeros(32, 32, device=DEVICE)
    load_tensor_kernel[(1,)](
        on_device(encode(source, (32, 32), fill="nan")), out.view(torch.int32), (20, 30), out.nbytes, None, num_warps=4
    )
    expected = box_at(source, (30, 20), (32, 32), float("nan"))
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_load_tensor_swizzles(rng, swizzle):
    columns = swizzle // 4
    source = padded(rng, torch.float32, (64, columns))
    out = poison(torch.empty(64, columns, device=DEVICE))
    load_tensor_kernel[(1,)](
        on_device(encode(source, (64, columns), swizzle=swizzle)),
        out.view(torch.int32),
        (0, 0),
        out.nbytes,
        None,
        num_warps=4,
    )
    # bits 4 and up of the address are combined with bits 7 and up: 1, 2 or 3 bits for 32, 64 or 128 bytes
    address = torch.arange(0, 64 * swizzle, 16)
    plain = address ^ (((address >> 7) % (swizzle // 16)) << 4)
    expected = source.contiguous().view(-1, 4).cpu()[plain // 16].view(64, columns)
    assert torch.equal(out.cpu(), expected)


@triton.jit
def store_tensor_kernel(map, source, corner, NBYTES: tl.constexpr, OPERATION: tl.constexpr, HINT: tl.constexpr):
    tile = shared.allocate(NBYTES, 128)
    t = thread()
    tma.fence_tensormap_acquire(map, "sys")
    for i in range(NBYTES // 512):
        shared.store(tile + 4 * (i * THREADS + t), get(source + i * THREADS + t), tl.int32, "thread")
    tma.fence_proxy_async()
    barrier.sync(8, THREADS)
    if OPERATION is None:
        if HINT is None:
            tma.store_tensor(map, corner, tile, issuer="cta")
        else:
            tma.store_tensor(map, corner, tile, cache_hint=tma.create_policy(HINT), issuer="cta")
    else:
        if HINT is None:
            tma.reduce_tensor(map, corner, tile, OPERATION, issuer="cta")
        else:
            tma.reduce_tensor(map, corner, tile, OPERATION, cache_hint=tma.create_policy(HINT), issuer="cta")
    tma.commit_group()
    tma.wait_group_read()
    barrier.sync(8, THREADS)
    for i in range(NBYTES // 512):  # the memory has been read: overwriting it must not show
        shared.store(tile + 4 * (i * THREADS + t), -1, tl.int32, "thread")
    tma.wait_group()


def scatter(target, tile, corner, combine=lambda old, new: new):
    """`target` after a store of `tile` at `corner`, both in the tensor's order; what lies outside is dropped."""
    into, from_ = [], []
    for start, extent, limit in zip(corner, tile.shape, target.shape):
        low, high = max(start, 0), min(start + extent, limit)
        into.append(slice(low, max(low, high)))
        from_.append(slice(low - start, max(low, high) - start))
    target[tuple(into)] = combine(target[tuple(into)], tile[tuple(from_)])
    return target


@pytest.mark.parametrize("rank, hint", crossed(range(1, 6), [None, "evict_first"]))
def test_store_tensor_of_every_rank_with_ragged_edges(rng, rank, hint):
    shape, box = BOXES[rank]
    # the simulator reports a store that writes past the end of a row
    shape = (*shape[:-1], on_gpu_or_simulated(shape[-1], shape[-1] // 4 * 4))
    for _ in range(3):
        target = padded(rng, torch.float32, shape)
        tile = torch.from_numpy(rng.standard_normal(box, dtype=np.float32)).to(DEVICE)
        # a store starts inside: a negative coordinate is an illegal instruction
        corner = [int(rng.integers(0, extent)) for extent in shape]
        corner[-1] = corner[-1] // 4 * 4  # the fastest coordinate must lie on 16 bytes
        assert target._base is not None
        whole = target._base.clone()
        expected = scatter(target.clone(), tile, corner)
        store_tensor_kernel[(1,)](
            on_device(encode(target, box)),
            tile.view(torch.int32),
            tuple(corner[::-1]),
            tile.nbytes,
            None,
            hint,
            num_warps=4,
        )
        assert torch.equal(target, expected), (rank, corner)
        outside = target.stride(-1) * (-(-shape[-1] * 4 // 16) * 4)  # rows are written in pieces of 16 bytes
        whole[..., : shape[-1]] = expected
        assert torch.equal(target._base[..., outside:], whole[..., outside:]), (
            "more than the last piece of a row was written"
        )


REDUCTIONS = {
    "add": lambda old, new: old + new,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "inc": lambda old, new: torch.where(old >= new, 0, old + 1),
    "dec": lambda old, new: torch.where((old == 0) | (old > new), new, old - 1),
}


@pytest.mark.parametrize("operation", REDUCTIONS)
def test_reduce_tensor_on_integers(rng, operation):
    low = 0 if operation in ("inc", "dec") else -20
    target, tile = random_words(rng, 40, 64, low=low, high=20), random_words(rng, 32, 32, low=low, high=20)
    expected = scatter(target.clone(), tile, (20, 40), lambda old, new: REDUCTIONS[operation](old, new).int())
    # inc and dec are defined on unsigned integers only
    described = tma.encode_tiled(target.data_ptr(), "uint32" if low == 0 else "int32", (64, 40), (256,), (32, 32))
    store_tensor_kernel[(1,)](on_device(described), tile, (40, 20), tile.nbytes, operation, None, num_warps=4)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype, hint", crossed([torch.float32, torch.float16, torch.bfloat16], [None, "evict_last"]))
def test_reduce_tensor_adds_floats(rng, dtype, hint):
    target, tile = padded(rng, dtype, (40, 64)), padded(rng, dtype, (32, 32)).contiguous()
    expected = scatter(target.clone(), tile, (20, 40), lambda old, new: old + new)
    store_tensor_kernel[(1,)](
        on_device(encode(target, (32, 32))), tile.view(torch.int32), (40, 20), tile.nbytes, "add", hint, num_warps=4
    )
    assert torch.equal(target, expected)


@triton.jit
def bulk_kernel(source, target, NBYTES: tl.constexpr, OPERATION: tl.constexpr, KIND: tl.constexpr, HINT: tl.constexpr):
    tile = shared.allocate(NBYTES, 16)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    barrier.sync(8, THREADS)
    mbarrier.arrive_expect_tx(bar, NBYTES, issuer="cta")
    tma.prefetch_bulk(source, NBYTES)
    if HINT is None:
        tma.load_bulk(tile, source, NBYTES, bar, issuer="cta")
    else:
        tma.load_bulk(tile, source, NBYTES, bar, cache_hint=tma.create_policy(HINT), issuer="cta")
    mbarrier.wait_or_trap(bar, 0)
    if OPERATION is None:
        if HINT is None:
            tma.store_bulk(target, tile, NBYTES, issuer="cta")
        else:
            tma.store_bulk(target, tile, NBYTES, cache_hint=tma.create_policy(HINT), issuer="cta")
    else:
        if HINT is None:
            tma.reduce_bulk(target, tile, NBYTES, OPERATION, KIND, issuer="cta")
        else:
            tma.reduce_bulk(target, tile, NBYTES, OPERATION, KIND, cache_hint=tma.create_policy(HINT), issuer="cta")
    tma.commit_group()
    tma.wait_group()


@pytest.mark.parametrize("hint", [None, "evict_first"])
@pytest.mark.parametrize("nbytes", [16, 4096, 40000])
def test_bulk_copies_through_shared_memory(rng, nbytes, hint):
    source, target = random_words(rng, nbytes // 4), words(nbytes // 4 + 4)
    before = target.clone()
    bulk_kernel[(1,)](source, target, nbytes, None, None, hint, num_warps=4)
    assert torch.equal(target[:-4], source) and torch.equal(target[-4:], before[-4:])


KINDS = {
    "u32": torch.int32,
    "s32": torch.int32,
    "u64": torch.int64,
    "s64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "b32": torch.int32,
    "b64": torch.int64,
}


@pytest.mark.parametrize(
    "operation, kind", [(operation, kind) for operation, kinds in tma.BULK_REDUCTIONS.items() for kind in kinds]
)
def test_reduce_bulk(rng, operation, kind):
    low = 0 if kind.startswith("u") else -60
    source, target = (torch.from_numpy(rng.integers(low, 60, 1024)).to(KINDS[kind]).to(DEVICE) for _ in range(2))
    expected = REDUCTIONS[operation](target, source).to(target.dtype)
    bulk_kernel[(1,)](
        source, target, source.nbytes, operation, kind, "evict_normal" if operation == "add" else None, num_warps=4
    )
    assert torch.equal(target, expected)


@triton.jit
def replace_kernel(map, address, rows, out):
    tile = shared.allocate(4096, 1024)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    tma.fence_tensormap_acquire(map, "sys")
    barrier.sync(8, THREADS)
    tensormap.replace(map, address, "global_address", issuer="cta")
    tensormap.replace(map, rows, "global_dim", 1, issuer="cta")
    tensormap.replace(map, 512, "global_stride", 0, issuer="cta")
    tma.fence_tensormap_release()
    barrier.sync(8, THREADS)
    tma.fence_tensormap_acquire(map)
    mbarrier.arrive_expect_tx(bar, 4096, issuer="cta")
    tma.load_tensor(tile, map, (16, 5), bar, issuer="cta")
    mbarrier.wait_or_trap(bar, 0)
    t = thread()
    for i in range(8):
        put(out + i * THREADS + t, shared.load(tile + 4 * (i * THREADS + t), tl.int32))


def test_tensormap_replace_points_to_another_tensor(rng):
    old, new = (
        torch.full((64, 64), -1.0, device=DEVICE),
        torch.from_numpy(rng.standard_normal((40, 128), dtype=np.float32)).to(DEVICE),
    )
    out = poison(torch.empty(32, 32, device=DEVICE))
    replace_kernel[(1,)](on_device(encode(old, (32, 32))), new.data_ptr(), 30, out.view(torch.int32), num_warps=4)
    assert torch.equal(out, box_at(new[:30, :64], (5, 16), (32, 32)))


# -- explicit kernels: descriptors
# -----------------------------------------------------------------------------------------------------


@explicit
@triton.jit
def descriptor_kernel(map, out, corner, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWIZZLE: tl.constexpr):
    tiles = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLUMNS], gl.NVMMASharedLayout(SWIZZLE, 32, 2))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], gluon_mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(bars.index(stage), 1)
    mbarrier.fence_init()
    tma.fence_tensormap_acquire(map, "sys")
    barrier.sync(8, 128)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    for stage in gl.static_range(2):
        mbarrier.arrive_expect_tx(bars.index(stage), 4 * ROWS * COLUMNS, issuer="cta")
        tma.load_tensor(tiles.index(stage), map, (corner[0], corner[1] + stage * ROWS), bars.index(stage), issuer="cta")
    for stage in gl.static_range(2):
        mbarrier.wait_or_trap(bars.index(stage), 0)
        gl.store(out + (stage * ROWS + rows) * COLUMNS + columns, tiles.index(stage).load(layout))


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_the_shims_take_gluon_descriptors(rng, swizzle):
    columns = swizzle // 4
    source = padded(rng, torch.float32, (80, 100))
    out = poison(torch.empty(64, columns, device=DEVICE))
    descriptor_kernel[(1,)](
        on_device(encode(source, (32, columns), swizzle=swizzle)), out, (88, 30), 32, columns, swizzle, num_warps=4
    )
    assert torch.equal(out, box_at(source, (30, 88), (64, columns)))


# -- clusters
# --------------------------------------------------------------------------------------------------------------------------


@explicit
@triton.jit
def ranks_kernel(out):
    rank = cluster.ctarank()
    row = out + 8 * rank
    put(row, rank, "cta")
    put(row + 1, cluster.nctarank(), "cta")
    put(row + 2, cluster.ctaid(0), "cta")
    put(row + 3, cluster.ctaid(1) + cluster.ctaid(2), "cta")
    put(row + 4, cluster.nctaid(0), "cta")
    put(row + 5, cluster.nctaid(1), "cta")
    put(row + 6, cluster.nctaid(2), "cta")


@pytest.mark.parametrize("ctas", [2, 4])
def test_ranks_in_a_cluster(ctas):
    out = words(ctas, 8)
    ranks_kernel[(1,)](out, num_warps=4, num_ctas=ctas)
    assert out[:, :7].tolist() == [[rank, ctas, rank, 0, ctas, 1, 1] for rank in range(ctas)]


@explicit
@triton.jit
def neighbour_kernel(source, out, RELAXED: gl.constexpr):
    slots = shared.allocate(8 * 128, 16)
    rank = cluster.ctarank()
    t = thread()
    if rank == 1:
        sleep(200)  # the neighbour writes late
    value = get(source + rank * 128 + t)
    shared.store(slots + 8 * t, value, gl.int32, "thread")
    shared.store(slots + 8 * t + 4, value, gl.int32, "thread")
    if RELAXED:  # relaxed publishes nothing: a fence does
        barrier.fence("acq_rel", "cluster")
        cluster.arrive("relaxed", aligned=False)
        cluster.wait(aligned=False)
    else:
        cluster.arrive()
        cluster.wait()
    theirs = cluster.mapa(slots, 1 - rank) + 8 * ((t + 3) % 128)
    put(out + rank * 128 + t, cluster.ld(theirs, gl.int32))
    put(out + 256 + rank * 128 + t, cluster.ld(theirs, gl.int64).to(gl.int32))
    asm("st.global.f32 [$0], $1;", "l,f", [out + 512 + rank * 128 + t, cluster.ld(theirs, gl.float32)])
    cluster.arrive()
    cluster.wait()


@pytest.mark.parametrize("relaxed", [False, True])
def test_mapa_and_ld_read_the_neighbours_memory(rng, relaxed):
    source = torch.from_numpy(rng.standard_normal((2, 128), dtype=np.float32)).to(DEVICE)
    out = words(3, 2, 128)
    neighbour_kernel[(1,)](source.view(torch.int32), out, relaxed, num_warps=4, num_ctas=2)
    expected = torch.roll(source.flip(0), -3, 1).view(torch.int32)
    for part in out:
        assert torch.equal(part, expected)


@explicit
@triton.jit
def remote_arrival_kernel(source, out):
    slots = shared.allocate(4 * 128, 16)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 4 + 3)
    mbarrier.fence_init()
    cluster.arrive()
    cluster.wait()
    rank = cluster.ctarank()
    peer = 1 - rank
    t = thread()
    if rank == 1:
        sleep(200)
    cluster.st(cluster.mapa(slots, peer) + 4 * t, get(source + rank * 128 + t), gl.int32, "thread")
    barrier.sync(8, 128)
    mbarrier.arrive_remote(bar, peer)
    mbarrier.arrive_remote(bar, peer, 3, issuer="cta")
    mbarrier.wait_or_trap(bar, 0, scope="cluster")
    mbarrier.wait(bar, 0, "cluster")
    put(out + rank * 128 + t, shared.load(slots + 4 * ((t + 50) % 128), gl.int32))
    cluster.arrive()
    cluster.wait()


def test_remote_arrivals_hand_over_what_was_stored(rng):
    source, out = random_words(rng, 2, 128), words(2, 128)
    remote_arrival_kernel[(1,)](source, out, num_warps=4, num_ctas=2)
    assert torch.equal(out, torch.roll(source.flip(0), -50, 1))


@explicit
@triton.jit
def st_async_kernel(source, out, ITEM: gl.constexpr):
    slots = shared.allocate(ITEM * 128, 16)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    cluster.arrive()
    cluster.wait()
    rank = cluster.ctarank()
    peer = 1 - rank
    t = thread()
    mbarrier.arrive_expect_tx_remote(bar, peer, ITEM * 128, issuer="cta")
    remote = cluster.mapa(slots, peer) + ITEM * t
    remote_bar = cluster.mapa(bar, peer)
    value = get(source + rank * 128 + t)
    if ITEM == 8:
        cluster.st_async(remote, value.to(gl.int64) * 3, remote_bar, gl.int64, "thread")
    else:
        cluster.st_async(remote, value, remote_bar, gl.int32, "thread")
    mbarrier.wait_or_trap(bar, 0, scope="cluster")
    other = slots + ITEM * ((t + 50) % 128)
    if ITEM == 8:
        put(out + rank * 128 + t, (shared.load(other, gl.int64) // 3).to(gl.int32))
    else:
        put(out + rank * 128 + t, shared.load(other, gl.int32))
    cluster.arrive()
    cluster.wait()


@pytest.mark.parametrize("item", [4, 8])
def test_st_async_counts_its_bytes_on_the_remote_barrier(rng, item):
    source, out = random_words(rng, 2, 128, low=0), words(2, 128)
    st_async_kernel[(1,)](source, out, item, num_warps=4, num_ctas=2)
    assert torch.equal(out, torch.roll(source.flip(0), -50, 1))


@explicit
@triton.jit
def cluster_copy_kernel(source, out, OPERATION: gl.constexpr, KIND: gl.constexpr):
    mine = shared.allocate(512, 16)
    inbox = shared.allocate(512, 16)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    rank = cluster.ctarank()
    t = thread()
    shared.store(mine + 4 * t, get(source + rank * 128 + t), gl.int32, "thread")
    shared.store(inbox + 4 * t, get(source + 256 + rank * 128 + t), gl.int32, "thread")
    tma.fence_proxy_async("")
    cluster.arrive()
    cluster.wait()
    mbarrier.arrive_expect_tx(bar, 512, issuer="cta")
    peer = 1 - rank
    if OPERATION is None:
        tma.copy_bulk_cluster(cluster.mapa(inbox, peer), mine, 512, cluster.mapa(bar, peer), issuer="cta")
    else:
        tma.reduce_bulk_cluster(
            cluster.mapa(inbox, peer), mine, 512, cluster.mapa(bar, peer), OPERATION, KIND, issuer="cta"
        )
    mbarrier.wait_or_trap(bar, 0, scope="cluster")
    put(out + rank * 128 + t, shared.load(inbox + 4 * t, gl.int32))
    cluster.arrive()
    cluster.wait()


@pytest.mark.parametrize(
    "operation, kind",
    [
        (None, None),
        ("add", "s32"),
        ("min", "s32"),
        ("max", "u32"),
        ("inc", "u32"),
        ("dec", "u32"),
        ("and", "b32"),
        ("or", "b32"),
        ("xor", "b32"),
    ],
)
def test_bulk_copies_and_reductions_into_the_neighbour(rng, operation, kind):
    source, out = random_words(rng, 2, 2, 128, low=-50 if kind == "s32" else 0, high=100), words(2, 128)
    cluster_copy_kernel[(1,)](source, out, operation, kind, num_warps=4, num_ctas=2)
    sent, there = source[0].flip(0), source[1]
    assert torch.equal(out, sent if operation is None else REDUCTIONS[operation](there, sent).int())


@explicit
@triton.jit
def multicast_kernel(map, source, out, ROWS: gl.constexpr, TENSOR: gl.constexpr, HINT: gl.constexpr):
    half: gl.constexpr = ROWS * 32 * 4
    tile = shared.allocate(2 * half, 1024)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    tma.fence_tensormap_acquire(map, "sys")
    mbarrier.arrive_expect_tx(bar, 2 * half, issuer="cta")
    cluster.arrive()
    cluster.wait()
    rank = cluster.ctarank()
    part = tile + rank * half  # each CTA fetches its half for both
    if TENSOR:
        if HINT:
            tma.load_tensor(
                part, map, (0, rank * ROWS), bar, multicast=3, cache_hint=tma.create_policy("evict_last"), issuer="cta"
            )
        else:
            tma.load_tensor(part, map, (0, rank * ROWS), bar, multicast=3, issuer="cta")
    else:
        if HINT:
            tma.load_bulk(
                part,
                source + rank * (half // 4),
                half,
                bar,
                multicast=3,
                cache_hint=tma.create_policy("evict_last"),
                issuer="cta",
            )
        else:
            tma.load_bulk(part, source + rank * (half // 4), half, bar, multicast=3, issuer="cta")
    mbarrier.wait_or_trap(bar, 0, scope="cluster")
    t = thread()
    for i in range(2 * half // 512):
        put(out + rank * (half // 2) + i * 128 + t, shared.load(tile + 4 * (i * 128 + t), gl.int32))
    cluster.arrive()
    cluster.wait()


@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
def test_multicast_writes_into_both_ctas(rng, tensor, hint):
    source = random_words(rng, 64, 32)
    out = words(2, 64, 32)
    multicast_kernel[(1,)](on_device(encode(source, (32, 32))), source, out, 32, tensor, hint, num_warps=4, num_ctas=2)
    assert torch.equal(out[0], source) and torch.equal(out[1], source)


# -- registers and dependent launches
# --------------------------------------------------------------------------------------------------


@triton.jit
def registers_kernel(out):
    t = thread()
    barrier.sync(8, 256)
    if t >= 128:
        sleep(2000)
        registers.dec(40)
        put(out + 1, 1, "cta")
    else:
        start = now()
        registers.inc(200)  # there are not enough until the other warpgroup has given some back
        asm(issued("st.global.b64 [$0], $1;", "cta", 90), "l,l", [out, now() - start])


def test_setmaxnreg_waits_for_the_pool():
    waited = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
    registers_kernel[(1,)](waited, num_warps=8, maxnreg=128)  # 256 threads of 128: inc takes 72 * 128 more
    assert int(waited[0]) > 1_000_000, "setmaxnreg.inc did not wait"


@triton.jit
def first_kernel(source, out, times):
    pdl.launch_dependents()
    sleep(3000)
    t = thread()
    put(out + t, get(source + t))
    asm(issued("st.global.b64 [$0], $1;", "cta", 90), "l,l", [times, now()])


@triton.jit
def second_kernel(data, out, times):
    asm(issued("st.global.b64 [$0], $1;", "cta", 90), "l,l", [times + 1, now()])
    pdl.wait()
    t = thread()
    put(out + t, get(data + t))


def test_a_dependent_launch_starts_early_and_waits_for_the_data(rng):
    source, data, out = random_words(rng, 128), words(128), words(128)
    times = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for _ in range(2):  # the first round compiles
        poison(data), poison(out)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        first_kernel[(1,)](source, data, times, num_warps=4)  # after the second one of the round before
        second_kernel[(1,)](data, out, times, num_warps=4, launch_pdl=True)
        assert torch.equal(out, source)
    ended, started = times.tolist()
    assert started < ended or DEVICE == "cpu", "the second kernel did not start before the first one ended"


# -- both languages
# --------------------------------------------------------------------------------------------------------------------


@explicit
@triton.jit
def explicit_handover_kernel(source, out):
    slots = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], gluon_mbarrier.MBarrierLayout())
    mbarrier.init(bar, 4)
    t = thread()
    barrier.sync(8, 128)
    base = shared.address(slots)
    shared.store(base + 4 * t, get(source + t), gl.int32, "thread")
    barrier.syncwarp()
    mbarrier.arrive(bar)
    mbarrier.wait_or_trap(bar, 0)
    put(out + t, shared.load(base + 4 * ((t + 64) % 128), gl.int32))


def test_the_same_shims_in_an_explicit_kernel(rng):
    source, out = random_words(rng, 128), words(128)
    explicit_handover_kernel[(1,)](source, out, num_warps=4)
    assert torch.equal(out, torch.roll(source, -64, 0))
