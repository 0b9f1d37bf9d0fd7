"""Meanings until inline_ptx states its own."""
import numpy as np
from .meaning import meaning


# ---------------------------------------------------------------- what the instructions do


def _mbarrier_at(addresses, active):
    """The different barriers that the active threads name, each with the number of threads."""
    return zip(*np.unique(addresses[active], return_counts=True))


@meaning("mbarrier.init.shared::cta.b64", outputs=0)
def _mbarrier_init(t, i, addresses, count):
    for address, _ in _mbarrier_at(addresses, i.active):
        t.init_barrier(address, int(count[i.active][0]))


@meaning("mbarrier.inval.shared::cta.b64", outputs=0)
def _mbarrier_inval(t, i, addresses):
    for address, _ in _mbarrier_at(addresses, i.active):
        t.invalidate_barrier(address)


@meaning(r"mbarrier\.arrive(\.release\.(cta|cluster))?\.shared::(cta|cluster)\.b64", r"mbarrier\.arrive(\.release\.(cta|cluster))?\.shared\.b64")
def _mbarrier_arrive(t, i, addresses, count=None):
    for address, threads in _mbarrier_at(addresses, i.active):
        barrier = t.barrier(address, "arrives")
        if barrier is not None:
            barrier.arrive(int(threads) * (1 if count is None else int(count[i.active][0])))


@meaning(r"mbarrier\.arrive\.expect_tx(\.release\.(cta|cluster))?\.shared(::(cta|cluster))?\.b64")
def _mbarrier_arrive_expect_tx(t, i, addresses, nbytes):
    for address, threads in _mbarrier_at(addresses, i.active):
        size = int(nbytes[i.active & (addresses == address)].astype(np.int64).sum())
        barrier = t.barrier(address, f"expects {size} bytes")
        if barrier is not None:
            barrier.expect(size)
            barrier.arrive(int(threads), f"arrives, expecting {size} bytes")


@meaning(r"mbarrier\.expect_tx\.relaxed\.(cta|cluster)\.shared::(cta|cluster)\.b64", outputs=0)
def _mbarrier_expect_tx(t, i, addresses, nbytes):
    for address, _ in _mbarrier_at(addresses, i.active):
        size = int(nbytes[i.active & (addresses == address)].astype(np.int64).sum())
        barrier = t.barrier(address, f"expects {size} bytes")
        if barrier is not None:
            barrier.expect(size)


@meaning(r"mbarrier\.test_wait\.parity(\.acquire\.(cta|cluster))?\.shared(::cta)?\.b64")
def _mbarrier_test_wait(t, i, addresses, parity, hint=None):
    done = np.zeros(t.count, bool)
    for address, _ in _mbarrier_at(addresses, i.active):
        barrier = t.barrier(address, "tests")
        here = addresses == address
        done |= here & (barrier is None or barrier.completed(int(parity[i.active & here][0]) & 1))
    yield None  # another role may go first: a loop around this lives on it
    return done


@meaning(r"mbarrier\.try_wait\.parity(\.acquire\.(cta|cluster))?\.shared(::cta)?\.b64")
def _mbarrier_try_wait(t, i, addresses, parity, hint=None):
    """The thread may sleep as long as the hardware likes: here until the phase is complete."""
    for address, _ in _mbarrier_at(addresses, i.active):
        barrier = t.barrier(address, "waits")
        if barrier is not None:
            yield from barrier.wait(int(parity[i.active & (addresses == address)][0]) & 1)
    return np.ones(t.count, bool)


@meaning("fence.mbarrier_init.release.cluster", outputs=0)
def _mbarrier_fence_init(t, i):
    t.fence("async")


@meaning("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive", outputs=0)
def _barrier_named(t, i, number, threads=None):
    yield from t.named_barrier(int(number[0]), t.count if threads is None else int(threads[0]), i.parts[1] == "sync")


@meaning(r"bar\.red\.popc\.u32", r"bar\.red\.(and|or)\.pred")
def _barrier_reduce(t, i, number, threads, vote):
    votes = yield from t.named_vote(int(number[0]), int(threads[0]), vote.astype(bool))
    result = {"popc": votes.sum(), "and": votes.all(), "or": votes.any()}[i.parts[2]]
    return np.full(t.count, result, bool if i.type == "pred" else np.uint64)


@meaning("bar.warp.sync", r"fence\.(acq_rel|sc)\.(cta|cluster|gpu|sys)", r"membar\.(cta|gl|sys)", outputs=0)
def _barrier_in_order(t, i, *mask):
    """Threads of a role are in lockstep, and ordinary memory is in order."""


@meaning("elect.sync")
def _elect_elect(t, i, mask):
    """Lane 0 of each warp; the other result, its lane id, is 0."""
    lane = t.tid % np.uint64(32)
    return np.zeros(t.count, np.uint64), lane == 0


@meaning("griddepcontrol.wait", "griddepcontrol.launch_dependents", outputs=0)
def _pdl_nothing(t, i):
    """Launches run one after the other."""


@meaning(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", outputs=0)
def _registers_setmaxnreg(t, i, count):
    """Registers have no place in the simulation beyond the budget that is checked at the launch."""


# ---------------------------------------------------------------- what the instructions do


@meaning(r"barrier\.cluster\.arrive(\.(release|relaxed))?(\.aligned)?", outputs=0)
def _cluster_arrive(t, i):
    t.cluster_arrive()


@meaning(r"barrier\.cluster\.wait(\.acquire)?(\.aligned)?", outputs=0)
def _cluster_wait(t, i):
    yield from t.cluster_wait()


@meaning("mapa.shared::cluster.u32")
def _cluster_mapa(t, i, address, rank):
    """The shared window of the CTA of that rank starts at rank << 24."""
    return (address & np.uint64(0xFFFFFF)) | (rank << np.uint64(24))


# ---------------------------------------------------------------- what the instructions do


@meaning(r"fence\.proxy\.async(\.(shared::cta|shared::cluster|global))?", outputs=0)
def _tma_fence_proxy_async(t, i):
    t.fence("async")


@meaning("cp.async.bulk.commit_group", outputs=0)
def _tma_commit_group(t, i):
    t.commit_bulk_group()


@meaning(r"cp\.async\.bulk\.wait_group(\.read)?", outputs=0)
def _tma_wait_group(t, i, pending):
    yield from t.wait_bulk_group(int(pending[0]))
