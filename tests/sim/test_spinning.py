"""Loops that wait by looking: without end they are found at once, with an end they cost little; CTAs that cannot all be
on the device at a time."""

import re
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import poison
from tritonkittens import sim
from tritonkittens.inline_ptx import barrier, mbarrier, memory, timing
from tritonkittens.sim.residency import Residency
from tritonkittens.sim.schedule import nth

SHORT = 2_000  # operations of a launch: far fewer than a loop without end would take


def zeros(*shape, dtype=torch.int32):
    return torch.zeros(*shape, dtype=dtype)


def run(kernel, grid, *arguments, **options):
    with sim.device(raise_findings=False, **options) as device:
        kernel[grid](*arguments)
    return device.launches[-1]


@triton.jit
def is_set(F, WAY: tl.constexpr):
    if WAY == "atomic_add":
        return tl.atomic_add(F, 0, sem="acquire") != 0
    elif WAY == "atomic_cas":
        return tl.atomic_cas(F, 1, 1) == 1
    elif WAY == "load":
        return tl.load(F, volatile=True) != 0
    elif WAY == "ld.acquire":
        return memory.load_acquire(F) != 0
    elif WAY == "loop of PTX":
        asm: tl.constexpr = "{ .reg .pred unset; AGAIN: ld.acquire.gpu.global.b32 $0, [$1]; setp.eq.s32 unset, $0, 0; @unset bra AGAIN; }"
        return tl.inline_asm_elementwise(asm, "=r,l", [F], tl.int32, is_pure=False, pack=1) != 0
    elif WAY == "backoff":
        timing.nanosleep(100)
        return memory.load_acquire(F) != 0
    else:
        return tl.max(tl.load(F + tl.arange(0, 4), volatile=True)) != 0


WAYS = ["atomic_add", "atomic_cas", "load", "ld.acquire", "loop of PTX", "backoff", "tile"]


@triton.jit
def waits(F, Y, WAY: tl.constexpr):
    while not is_set(F, WAY):
        pass
    tl.store(Y, 1)


@tk.kernel
@triton.jit
def polls(F, Y):
    tl.atomic_poll(F, 1)
    tl.store(Y, 1)


@pytest.mark.parametrize("way", [*WAYS, "atomic_poll"])
def test_a_loop_whose_inputs_nobody_changes_is_found_at_once(way):
    flag, y = zeros(4), poison(zeros(1))
    launch = run(polls, (1,), flag, y) if way == "atomic_poll" else run(waits, (1,), flag, y, way)
    (found,) = launch.findings
    assert found.kind == "loop" and "no role will change the values that they read" in found.message
    assert re.search(r"waits for a change of F \(16 bytes\), byte 0, which holds 0", found.places[0].what), found
    assert "test_spinning.py" in str(found.places[0]) and launch.simulation.steps < SHORT


@tk.kernel
@triton.jit
def looks_at_a_barrier(Y, WAY: tl.constexpr):
    sem = tk.semaphores(1)
    while (mbarrier.try_wait if WAY == "try_wait" else mbarrier.test_wait)(sem[0], 0) == 0:
        pass
    tl.store(Y, 1)


@pytest.mark.parametrize("way", ["try_wait", "test_wait"])
def test_a_loop_on_a_barrier_that_nobody_completes_names_it(way):
    launch = run(looks_at_a_barrier, (1,), poison(zeros(1)), way)
    (found,) = launch.findings
    assert (
        found.kind == "loop" and "sem" in found.places[0].what and "1 of 1 arrivals missing" in found.places[0].what
    ), found
    assert launch.simulation.steps < SHORT


@triton.jit
def rounds(X, Y, COUNT: tl.constexpr):
    """Looks COUNT times, and for a microsecond: loops that end by themselves."""
    i = 0
    while (tl.load(X, volatile=True) == 0) & (i < COUNT):
        i += 1
    start = timing.globaltimer()
    while timing.globaltimer() - start < 1000:
        pass
    tl.store(Y, i)


def test_loops_that_end_by_themselves_do(rng):
    count, y = int(rng.integers(1, 500)), poison(zeros(1))
    launch = run(rounds, (1,), zeros(1), y, count)
    assert not launch.findings and y.item() == count


@triton.jit
def chain(X, Y, F, WAY: tl.constexpr, BACKWARDS: tl.constexpr):
    """Running sums over CTAs, each behind the one before (or, BACKWARDS, behind the one after)."""
    pid, o = tl.program_id(0), tl.arange(0, 128)
    before = pid + 1 if BACKWARDS else pid - 1
    total = tl.load(X + pid * 128 + o)
    if (before >= 0) & (before < tl.num_programs(0)):
        while not is_set(F + before * 4, WAY):
            pass
        if WAY == "load" or WAY == "tile":  # relaxed
            barrier.fence("acq_rel", "gpu")
        total += tl.load(Y + before * 128 + o)
    tl.store(Y + pid * 128 + o, total)
    tl.debug_barrier()
    tl.atomic_xchg(F + pid * 4, 1, sem="release")


def chained(rng, ctas):
    x = torch.from_numpy(rng.integers(-9, 9, (ctas, 128))).to(torch.int32)
    return x, poison(zeros(ctas, 128)), zeros(ctas, 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backwards", [False, True])
def test_a_chain_of_ctas_costs_about_its_work_under_every_schedule(way, backwards, rng):
    x, y, flags = chained(rng, 8)
    launch = run(chain, (8,), x, y, flags, way, backwards)
    # nobody waits
    least = run(
        chain, (8,), x, poison(zeros(8, 128)), torch.ones(8, 4, dtype=torch.int32), way, backwards
    ).simulation.steps
    expected = (x.flip(0).cumsum(0).flip(0) if backwards else x.cumsum(0)).int()
    for seed in range(12):
        y.copy_(poison(zeros(8, 128)))
        flags.zero_()
        simulation = launch.run(nth(seed, 1))
        assert not simulation.findings and torch.equal(y, expected)
        assert simulation.steps < 10 * least, (
            f"schedule {seed}: {simulation.steps} operations where {least} do without waiting"
        )


def test_a_chain_of_clusters(rng):
    """A cluster that is one program: its CTAs execute inline PTX side by side, and rest together."""
    x, y, flags = chained(rng, 6)
    with sim.device(raise_findings=False) as device:
        chain[(6,)](x, y, flags, "loop of PTX", True, num_ctas=2)
    assert not device.launches[-1].findings and torch.equal(y, x.flip(0).cumsum(0).flip(0).int())


@pytest.mark.parametrize("way", ["load", "atomic_cas"])
def test_ctas_that_wait_for_each_other_are_named(way, rng):
    @triton.jit
    def each_other(F, WAY: tl.constexpr):
        while not is_set(F + 4 * (1 - tl.program_id(0)), WAY):
            pass
        tl.store(F + 4 * tl.program_id(0), 1)

    (found,) = run(each_other, (2,), zeros(2, 4), way).findings
    assert found.kind == "loop" and {p.who for p in found.places} == {"CTA (0, 0, 0), kernel", "CTA (1, 0, 0), kernel"}


@triton.jit
def works_first(F, box, sem, Y):
    for i in range(20):
        tk.store(box, tk.full(tk.rt(tk.fp32, 16, 64, "memory"), i + 1.0))
    tk.store(Y, tk.load(box, layout="memory"), (0, 0))
    tl.atomic_xchg(F, 1, sem="release")
    tk.wait(sem, 0)


@triton.jit
def looks_meanwhile(F, Z, sem, WAY: tl.constexpr):
    while not is_set(F, WAY):
        pass
    tk.store(Z, tk.full(tk.rt(tk.fp32, 16, 64, "memory"), 1.0), (0, 0))
    tk.arrive(sem)


@tk.kernel
@triton.jit
def beside_each_other(F, Y, Z, WAY: tl.constexpr):
    box, sem = tk.allocate(tk.st(tk.fp32, 16, 64)), tk.semaphores(1, 2)
    tk.specialize(
        (
            (works_first, (F, box, sem[0], Y)),
            (looks_meanwhile, (F, Z, sem[0], WAY)),
            (looks_meanwhile, (F, Z, sem[0], WAY)),
        ),
        warps=(4, 4, 4),
    )


@pytest.mark.parametrize("way", ["atomic_add", "ld.acquire"])
def test_a_role_that_rests_is_woken_by_another_of_its_cta(way):
    y, z, flag = poison(torch.empty(16, 64)), poison(torch.empty(16, 64)), zeros(4)
    with sim.device(raise_findings=False) as device:
        beside_each_other[(1,)](flag, tk.gl(y), tk.gl(z), way)
    launch = device.launches[-1]
    for seed in range(15):
        flag.zero_()
        poison(y), poison(z)
        found = launch.run(nth(seed, len(launch.program.role_names))).findings
        assert not found and (y == 20).all() and (z == 1).all(), found


# ---------------------------------------------------------------- CTAs on the device at a time


def test_ctas_that_wait_for_one_that_cannot_start_are_a_deadlock(rng):
    """Of two multiprocessors each has room for 16 blocks of 4 warps, here 32 CTAs of which each waits for the next."""
    x, y, flags = chained(rng, 33)
    launch = run(chain, (33,), x, y, flags, "load", True, multiprocessors=2)
    (found,) = launch.findings
    told = (
        "1 of the grid's 33 CTAs have not started: 32 CTAs fit at a time (2 multiprocessors, 16 CTAs on each: 4 warps)"
    )
    assert found.kind == "deadlock" and told in str(found)
    x, y, flags = chained(rng, 32)
    assert not run(chain, (32,), x, y, flags, "load", True, multiprocessors=2).findings
    assert torch.equal(y, x.flip(0).cumsum(0).flip(0).int())


def test_ctas_may_wait_for_those_before_them_however_many_fit(rng):
    """The hardware starts CTAs in order: whoever waits for an earlier one is right, in every schedule."""
    x, y, flags = chained(rng, 40)
    launch = run(chain, (40,), x, y, flags, "load", False, multiprocessors=1)
    for seed in range(12):
        flags.zero_()
        assert not launch.run(nth(seed, 1)).findings and torch.equal(y, x.cumsum(0).int())


@pytest.mark.parametrize(
    ("arch", "shared", "warps", "registers", "columns", "cluster", "expected"),
    [
        (90, 0, 4, None, 0, 1, (32, 16, "4 warps")),
        (90, 0, 1, None, 0, 1, (64, 32, "blocks")),
        (89, 0, 1, None, 0, 1, (48, 24, "blocks")),
        (90, 116000, 4, None, 0, 1, (2, 1, "116000 bytes")),
        (90, 115712, 4, None, 0, 1, (4, 2, "bytes")),
        (90, 232448, 4, None, 0, 1, (2, 1, "bytes")),
        (90, 0, 12, 168, 0, 1, (2, 1, "168 registers")),
        (100, 1024, 4, None, 256, 1, (4, 2, "256 columns")),
        (90, 232448, 12, 168, 0, 2, (1, 1, "bytes")),
    ],
)
def test_how_many_fit(arch, shared, warps, registers, columns, cluster, expected):
    """On two multiprocessors."""
    module = SimpleNamespace(attributes={} if registers is None else {"ttg.maxnreg": registers})
    program = SimpleNamespace(
        arch=arch, shared_bytes=shared, total_warps=warps, tensor_columns=columns, num_ctas=1, module=module
    )
    made = Residency.of(program, cluster, 2)
    assert (made.clusters, made.ctas) == expected[:2] and expected[2] in made.limit, made
    assert Residency.of(program, cluster, None).clusters > 1 << 40
