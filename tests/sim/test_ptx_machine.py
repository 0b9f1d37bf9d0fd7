"""Inline PTX against the simulator's machine: what the GPU tests of the shims (tests/gpu/test_ptx_*_gpu.py run here
too) do not reach: Blackwell's tensor memory, launches taken over, branches that divide a role, and mistakes that must
be found.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tritonkittens import sim
from tritonkittens.inline_ptx import barrier, clc, mbarrier, shared, tcgen05, tma, wgmma
from tritonkittens.inline_ptx._asm import asm, issued
from tritonkittens.sim.operations.ptx_memory import combined

from ..gpu.test_ptx_compute_gpu import accumulator_layout, to_shared
from ..gpu.test_ptx_sync_gpu import get, put, thread
from ..util import poison, relative_error


def words(*shape):
    return poison(torch.empty(*shape, dtype=torch.int32))


def run(kernel, *arguments, arch="sm_90a", explicit=True, grid=(1,), num_warps=4, found=None, schedule=None, **options):
    """Launch in the simulator; `found`: the kind of the one finding that is wanted, None for none."""
    with sim.device(arch, raise_findings=found is None, schedule=schedule) as device:
        (GluonJITFunction(kernel.fn) if explicit else kernel)[grid](*arguments, num_warps=num_warps, **options)
    findings = device.launches[-1].findings
    assert [f.kind for f in findings] == ([] if found is None else [found]), "\n".join(map(str, findings))
    return findings[0] if findings else None


# --- tensor memory
# --------------------------------------------------------------------------------------------------------------------


@triton.jit
def tensor_memory(columns: gl.constexpr):
    slot = shared.allocate(4, 16)
    tcgen05.alloc(slot, columns)
    barrier.sync(8, 128)
    return shared.load(slot, gl.int32)


@triton.jit
def product_kernel(
    A, B, C, OUT, N: gl.constexpr, K: gl.constexpr, M: gl.constexpr, A_IN_TMEM: gl.constexpr, MISTAKE: gl.constexpr
):
    a, b = to_shared(A, M, K, gl.bfloat16, 128), to_shared(B, N, K, gl.bfloat16, 128)
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    memory = tensor_memory(512)
    layout: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [4, 1], [1, 0])
    i, j = gl.arange(0, 128, gl.SliceLayout(1, layout)), gl.arange(0, N, gl.SliceLayout(0, layout))
    places = i[:, None] * N + j[None, :]
    tcgen05.st(memory, gl.load(C + places))
    if A_IN_TMEM:  # each row's K numbers in K / 2 columns
        words: gl.constexpr = gl.BlockedLayout([1, K // 2], [32, 1], [4, 1], [1, 0])
        row, column = gl.arange(0, 128, gl.SliceLayout(1, words)), gl.arange(0, K // 2, gl.SliceLayout(0, words))
        tcgen05.st(memory + 256, gl.load(A.to(gl.pointer_type(gl.int32)) + row[:, None] * (K // 2) + column[None, :]))
    if MISTAKE != "wait_st":
        tcgen05.wait_st()
    if MISTAKE != "fence":
        fence_async_shared()
    if MISTAKE != "before_thread_sync":
        tcgen05.fence_before_thread_sync()
    gl.barrier()
    if MISTAKE != "after_thread_sync":
        tcgen05.fence_after_thread_sync()
    how: gl.constexpr = tcgen05.instruction_descriptor("f16", M, N, "bf16")
    pitch: gl.constexpr = 1024
    for step in gl.static_range(K // 16):
        right = tcgen05.shared_descriptor(shared.address(b) + 32 * step, N * 128, pitch, 128)
        if A_IN_TMEM:
            tcgen05.mma(memory, memory + 256 + 8 * step, right, how, "f16", 1, a_in_tmem=True, issuer="cta")
        else:
            tcgen05.mma(
                memory,
                tcgen05.shared_descriptor(shared.address(a) + 32 * step, M * 128, pitch, 128),
                right,
                how,
                "f16",
                1,
                issuer="cta",
            )
    tcgen05.commit(bar, issuer="cta")
    if MISTAKE != "wait":
        mbarrier.wait_or_trap(bar, 0)
    tile = tcgen05.ld(memory, [128, N])
    if MISTAKE == "wait_ld":
        gl.store(OUT + places, tile)
    if MISTAKE == "wait without tiles":  # none: the values may be used behind any wait
        tcgen05.wait_ld()
    else:
        tile = tcgen05.wait_ld(tile)
    mbarrier.wait_or_trap(bar, 0)
    gl.store(OUT + places, tile)
    gl.barrier()
    if MISTAKE != "release":
        tcgen05.relinquish_alloc_permit()
        tcgen05.dealloc(memory, 512)


def product(found=None, n=64, a_in_tmem=False, mistake="", m=128, schedule=None):
    a, b, c = torch.randn(m, 64).bfloat16(), torch.randn(n, 64).bfloat16(), torch.randn(128, n)
    out = poison(torch.empty(128, n))
    finding = run(
        product_kernel, a, b, c, out, n, 64, m, a_in_tmem, mistake, arch="sm_100a", found=found, schedule=schedule
    )
    rows = torch.arange(m) if m == 128 else torch.arange(64) % 16 + torch.arange(64) // 16 * 32
    expected = c.double()
    expected[rows] += a.double() @ b.double().t()
    return finding, out, expected


@pytest.mark.parametrize("m, n, a_in_tmem", [(128, 64, False), (128, 128, False), (128, 16, True), (64, 32, False)])
def test_tensor_memory_holds_a_product(m, n, a_in_tmem, rng):
    _, out, expected = product(n=n, a_in_tmem=a_in_tmem, m=m)
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("schedule", [1, 2, 4])
def test_a_product_in_other_orders(schedule, rng):
    _, out, expected = product(schedule=schedule)
    assert relative_error(out, expected) < 1e-6


def test_tensor_memory_that_nobody_releases(rng):
    finding, _, _ = product("tmem", mistake="release")
    assert "512 columns" in finding.message and "not released" in finding.message


def test_a_product_without_the_fence_before_it(rng):
    finding, _, _ = product("missing-fence", mistake="fence")
    assert "fence.proxy.async" in finding.message


@pytest.mark.parametrize("mistake", ["wait_st", "before_thread_sync", "after_thread_sync"])
@pytest.mark.parametrize("a_in_tmem", [False, True])
def test_a_product_of_tensor_memory_that_is_not_handed_over(mistake, a_in_tmem, rng):
    """What threads stored is there for the tensor core behind tcgen05.wait::st, the fence before a barrier, and the
    fence after it."""
    for schedule in (0, 2):
        with sim.device("sm_100a", raise_findings=False, schedule=schedule) as device:
            a, b, c, out = (
                torch.randn(128, 64).bfloat16(),
                torch.randn(64, 64).bfloat16(),
                torch.randn(128, 64),
                torch.empty(128, 64),
            )
            GluonJITFunction(product_kernel.fn)[(1,)](a, b, c, out, 64, 64, 128, a_in_tmem, mistake, num_warps=4)
        found = device.launches[-1].findings
        assert {f.kind for f in found} == {"race"}, found
        assert all("tcgen05.st" in place.who or "tcgen05.mma" in place.who for f in found for place in f.places)
        assert any("thread_sync" in f.message for f in found) == (mistake != "wait_st")


def test_values_used_before_the_wait_for_their_load(rng):
    finding, _, _ = product("in-flight", mistake="wait_ld")
    assert "values of a tcgen05.ld are used before a wait for them" in finding.message
    _, out, expected = product(mistake="wait without tiles")
    assert relative_error(out, expected) < 1e-6


def test_an_accumulator_read_before_the_commit_arrives(rng):
    for schedule in (0, 2):
        with sim.device("sm_100a", raise_findings=False, schedule=schedule) as device:
            out = torch.empty(128, 64)
            GluonJITFunction(product_kernel.fn)[(1,)](
                torch.randn(128, 64).bfloat16(),
                torch.randn(64, 64).bfloat16(),
                torch.randn(128, 64),
                out,
                64,
                64,
                128,
                False,
                "wait",
                num_warps=4,
            )
        assert "race" in {f.kind for f in device.launches[-1].findings}


@triton.jit
def shapes_kernel(SOURCE, OUT, SHAPE: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    memory = tensor_memory(64)
    whole: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    i, j = gl.arange(0, 128, gl.SliceLayout(1, whole)), gl.arange(0, COLUMNS, gl.SliceLayout(0, whole))
    tcgen05.st(memory, gl.load(SOURCE + i[:, None] * COLUMNS + j[None, :]))
    tcgen05.wait_st()
    tile = tcgen05.wait_ld(tcgen05.ld(memory, [64, COLUMNS], LAYOUT, gl.int32, SHAPE))
    r, c = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    gl.store(OUT + r[:, None] * COLUMNS + c[None, :], tile)
    gl.barrier()
    tcgen05.dealloc(memory, 64)


def test_the_fragments_of_16x256b(rng):
    """The accumulator's fragment of wgmma is that of 16x256b: 16 lanes of each warp's 32, in the layout of a 64-row
    accumulator."""
    source, out = torch.from_numpy(rng.integers(0, 1 << 30, (128, 32)).astype(np.int32)), words(64, 32)
    run(shapes_kernel, source, out, "16x256b", 32, accumulator_layout(32, 16), arch="sm_100a")
    rows = torch.arange(64) % 16 + torch.arange(64) // 16 * 32
    assert torch.equal(out, source[rows])


# --- cluster launch control
# -----------------------------------------------------------------------------------------------------------


@triton.jit
def persistent_kernel(OUT):
    answer, bar = shared.allocate(16, 16), shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    barrier.sync(8, 128)
    place = tl.program_id(0)
    phase = 0
    more = 1
    while more != 0:
        put(OUT + place, place * 3 + 1, "cta")
        mbarrier.arrive_expect_tx(bar, 16, issuer="cta")
        clc.try_cancel(answer, bar, issuer="cta")
        mbarrier.wait(bar, phase)
        phase ^= 1
        more = clc.is_canceled(answer)
        place = clc.first_ctaid(answer)
        tma.fence_proxy_async()
        barrier.sync(8, 128)


@pytest.mark.parametrize("explicit", [False, True])
def test_one_launch_takes_over_the_others(explicit, rng):
    n = int(rng.integers(3, 9))
    out = words(n)
    run(persistent_kernel, out, arch="sm_100a", explicit=explicit, grid=(n,))
    assert out.tolist() == [3 * k + 1 for k in range(n)]


# --- threads of their own mind
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def divided_kernel(SOURCE, OUT, LIMIT):
    t = thread()
    value = get(SOURCE + t)
    steps = 0
    while value > LIMIT:  # each thread as often as it needs
        value -= t % 5 + 1
        steps += 1
    if t % 2 == 0:
        if t >= 64:
            value = -value
        else:
            value = value * 10
    put(OUT + t, value)
    put(OUT + 128 + t, steps)


@pytest.mark.parametrize("explicit", [False, True])
def test_loops_and_branches_of_single_threads(explicit, rng):
    source, out, limit = (
        torch.from_numpy(rng.integers(-20, 40, 128).astype(np.int32)),
        words(2, 128),
        int(rng.integers(-5, 5)),
    )
    run(divided_kernel, source, out, limit, explicit=explicit)
    t = torch.arange(128)
    step = t % 5 + 1
    steps = ((source - limit + step - 1) // step).clamp(min=0)
    value = source - steps * step
    value = torch.where(t % 2 == 0, torch.where(t >= 64, -value, value * 10), value)
    assert torch.equal(out, torch.stack([value, steps]).int())


@triton.jit
def early_return_kernel(OUT):
    t = thread()
    put(OUT + t, 1)
    if t >= 32:
        return
    put(OUT + t, 2)


def test_threads_that_return_early(rng):
    out = words(128)
    run(early_return_kernel, out, explicit=False)
    assert out.tolist() == [2] * 32 + [1] * 96


@triton.jit
def tile_behind_a_branch_kernel(OUT):
    if thread() < 7:
        tl.store(OUT + tl.arange(0, 128), 1)


def test_a_tile_behind_a_branch_of_some_threads_is_refused():
    finding = run(tile_behind_a_branch_kernel, words(128), explicit=False, found="unknown")
    assert "only some threads take (7 of 128)" in finding.message


@triton.jit
def crossed_kernel(OUT):
    t = thread()
    if t < 64:
        barrier.sync(8, 128)
        barrier.sync(9, 128)
    else:
        barrier.sync(9, 128)
        barrier.sync(8, 128)
    put(OUT + t, t)


def test_crossed_named_barriers_are_a_deadlock():
    finding = run(crossed_kernel, words(128), explicit=False, found="deadlock")
    assert "named barrier 8: 64 of 128" in str(finding) and "named barrier 9: 64 of 128" in str(finding)


# --- mistakes
# -----------------------------------------------------------------------------------------------------------------------------


@triton.jit
def wgmma_kernel(A, B, C, MISTAKE: gl.constexpr):
    a, b = to_shared(A, 64, 64, gl.bfloat16, 128), to_shared(B, 64, 64, gl.bfloat16, 128)
    if MISTAKE != "fence":
        fence_async_shared()
    gl.barrier()
    layout: gl.constexpr = accumulator_layout(64, 16)
    acc = wgmma.fence(gl.full([64, 64], 1.0, gl.float32, layout))
    for step in gl.static_range(4):
        acc = wgmma.mma_async(
            acc, wgmma.operand_descriptor(a, 1, step), wgmma.operand_descriptor(b, 1, step), gl.bfloat16
        )
    wgmma.commit_group()
    if MISTAKE == "overwrite":
        gl.barrier()
        b.store(gl.zeros([64, 64], gl.bfloat16, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])))
    if MISTAKE != "wait":
        acc = wgmma.wait_group(0, acc)
    i, j = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(C + i[:, None] * 64 + j[None, :], acc * 2.0)


@pytest.mark.parametrize(
    "mistake, kind", [("", None), ("wait", "in-flight"), ("overwrite", "race"), ("fence", "missing-fence")]
)
@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_wgmma(mistake, kind, schedule, rng):
    a, b, c = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), poison(torch.empty(64, 64))
    with sim.device("sm_90a", raise_findings=False, schedule=schedule) as device:
        GluonJITFunction(wgmma_kernel.fn)[(1,)](a, b, c, mistake, num_warps=4)
    kinds = {f.kind for f in device.launches[-1].findings}
    assert kinds == ({kind} if kind else set()), device.launches[-1].findings
    if not mistake:
        assert relative_error(c, 2 * (a.double() @ b.double().t() + 1)) < 1e-6


@triton.jit
def bulk_kernel(SOURCE, OUT, EXPECTED: tl.constexpr, FENCE: tl.constexpr, WAIT: tl.constexpr):
    tile, bar = shared.allocate(512, 16), shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    mbarrier.fence_init()
    barrier.sync(8, 128)
    mbarrier.arrive_expect_tx(bar, EXPECTED, issuer="cta")
    tma.load_bulk(tile, SOURCE, 512, bar, issuer="cta")
    if WAIT:
        mbarrier.wait(bar, 0)
    t = thread()
    shared.store(tile + 4 * t, shared.load(tile + 4 * t, tl.int32) + 1, tl.int32, "thread")
    if FENCE:
        tma.fence_proxy_async()
    barrier.sync(8, 128)
    tma.store_bulk(OUT, tile, 512, issuer="cta")
    tma.commit_group()
    tma.wait_group()


def test_bulk_copies_and_what_is_wrong_with_them(rng):
    source, out = torch.from_numpy(rng.integers(0, 1000, 128).astype(np.int32)), words(128)
    run(bulk_kernel, source, out, 512, True, True, explicit=False)
    assert torch.equal(out, source + 1)
    with sim.device("sm_90a", raise_findings=False) as device:
        bulk_kernel[(1,)](source, out, 528, True, True, num_warps=4)
    assert {f.kind for f in device.launches[-1].findings} == {"bytes", "deadlock"}
    finding = run(bulk_kernel, source, out, 512, False, True, explicit=False, found="missing-fence")
    assert "fence.proxy.async" in finding.message
    with sim.device("sm_90a", raise_findings=False) as device:
        bulk_kernel[(1,)](source, out, 512, True, False, num_warps=4)
    assert {"race", "uninitialized"} & {f.kind for f in device.launches[-1].findings}


@triton.jit
def ragged_store_kernel(MAP, SOURCE):
    tile = shared.allocate(4096, 128)
    t = thread()
    tma.fence_tensormap_acquire(MAP, "sys")
    for i in range(8):
        shared.store(tile + 4 * (i * 128 + t), get(SOURCE + i * 128 + t), tl.int32, "thread")
    tma.fence_proxy_async()
    barrier.sync(8, 128)
    tma.store_tensor(MAP, (64, 0), tile, issuer="cta")
    tma.commit_group()
    tma.wait_group()


def test_a_store_past_rows_that_are_no_whole_pieces(rng):
    target, source = torch.zeros(40, 72)[:, :70], torch.randn(32, 32)
    with sim.device("sm_90a", raise_findings=False) as device:
        data = torch.frombuffer(
            bytearray(tma.encode_tiled(target.data_ptr(), "float32", (70, 40), (288,), (32, 32))), dtype=torch.uint8
        )
        place = torch.zeros(256, dtype=torch.uint8)
        place = place[-place.data_ptr() % 128 :][:128].copy_(data)
        ragged_store_kernel[(1,)](place, source.view(torch.int32), num_warps=4)
    (finding,) = device.launches[-1].findings
    assert finding.kind == "out-of-bounds" and "rows are 280 bytes" in finding.message
    assert torch.equal(target[:32, 64:], source[:, :6])


@triton.jit
def lonely_wait_kernel(OUT):
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 1)
    barrier.sync(8, 128)
    put(OUT, mbarrier.try_wait(bar, 0, hint_ns=5000), "cta")


def test_a_wait_with_a_time_limit_ends():
    out = words(1)
    run(lonely_wait_kernel, out, explicit=False)
    assert out.item() == 0


@triton.jit
def illegal_kernel(OUT, WHAT: tl.constexpr):
    if WHAT == "misaligned":
        put((OUT.to(tl.int64) + 2).to(tl.pointer_type(tl.int32)), 1, "cta")
    elif WHAT == "outside":
        put(OUT + (1 << 30), 1, "cta")
    elif WHAT == "illegal":
        asm(issued("bar.sync $0, 128;", "thread", 90), "r", [thread() % 2])
    elif WHAT == "barrier-life":
        mbarrier.arrive(shared.allocate(8, 8), issuer="cta")
    elif WHAT == "uninitialized":
        put(OUT, shared.load(shared.allocate(64, 16), tl.int32), "cta")
    else:
        asm("trap;", "", [])


@pytest.mark.parametrize("what", ["misaligned", "out-of-bounds", "illegal", "barrier-life", "uninitialized", "trap"])
def test_what_hardware_would_not_take(what):
    finding = run(illegal_kernel, words(4), "outside" if what == "out-of-bounds" else what, explicit=False, found=what)
    if what == "illegal":
        assert "bar.sync" in finding.message and "differs between the threads" in finding.message
    assert "test_ptx_" in str(finding)  # the line, here or of the helpers in test_ptx_sync_gpu


@triton.jit
def unknown_kernel(OUT):
    put(OUT, asm("{ .reg .b32 x; frobnicate.u32 x, 1; mov.b32 $0, x; }", "=r", [], tl.int32), "cta")


def test_an_unknown_instruction_is_named_with_its_block():
    finding = run(unknown_kernel, words(1), explicit=False, found="unknown")
    assert (
        "frobnicate.u32" in finding.message
        and "mov.b32 $0, x;" in finding.message
        and "test_ptx_machine.py" in str(finding)
    )


# --- atomics
# ---------------------------------------------------------------------------------------------------------------------------------


def test_atomic_operations_on_every_format(rng):
    old, new = (rng.integers(0, 1 << 32, 64, np.uint32) for _ in range(2))
    signed = old.view(np.int32), new.view(np.int32)
    for name, function in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
        assert (combined(name, "u32", old, new, None) == function(old, new)).all()
        assert (combined(name, "s32", old, new, None) == function(*signed).view(np.uint32)).all()
    assert (combined("inc", "u32", old, new, None) == np.where(old >= new, 0, old + 1)).all()
    assert (combined("dec", "u32", old, new, None) == np.where((old == 0) | (old > new), new, old - 1)).all()
    assert (combined("cas", "b32", old, new, np.where(old % 2, old, ~old)) == np.where(old % 2, new, old)).all()
    a, b = rng.standard_normal((2, 64), np.float32)
    assert (combined("add", "f32", a.view(np.uint32), b.view(np.uint32), None).view(np.float32) == a + b).all()
    x, y = (rng.standard_normal(128).astype(np.float16) for _ in range(2))
    assert (combined("add", "f16x2", x.view(np.uint32), y.view(np.uint32), None).view(np.float16) == x + y).all()


@triton.jit
def counters_kernel(COUNTS, ORDER):
    t = thread()
    put(ORDER + t, asm("atom.global.add.u32 $0, [$1], 3;", "=r,l", [COUNTS + t % 4], tl.int32))
    slots = shared.allocate(64, 16)
    if t < 16:
        shared.store(slots + 4 * t, 100, tl.int32, "thread")
    barrier.sync(8, 128)
    put(ORDER + 128 + t, asm("atom.shared.add.u32 $0, [$1], 1;", "=r,r", [slots + 4 * (t % 4)], tl.int32))
    barrier.sync(8, 128)
    put(COUNTS + 4 + t % 4, shared.load(slots + 4 * (t % 4), tl.int32))


def test_threads_that_count_on_one_word(rng):
    counts, order = torch.from_numpy(rng.integers(0, 100, 8).astype(np.int32)), words(2, 128)
    before = counts.clone()
    run(counters_kernel, counts, order, explicit=False)
    assert torch.equal(counts[:4], before[:4] + 96) and counts[4:].tolist() == [132] * 4
    for k in range(4):
        assert sorted((order[0, k::4] - before[k]).tolist()) == [3 * n for n in range(32)]
        assert sorted((order[1, k::4] - 100).tolist()) == list(range(32))
