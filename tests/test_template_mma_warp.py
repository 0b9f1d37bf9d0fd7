"""Templates with accumulators on chips with tensor memory: one warp runs the hooks that multiply."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import explored, poison, refused, slow
from tritonkittens import sim
from tritonkittens.inspect import inspect
from tritonkittens.kernels.gemm.device.gemm import Gemm

LENGTHS = (2, 0, 3, 1, 4)


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """For which the schedules count blocks; `explore` simulates a whole device."""
    monkeypatch.setattr("tritonkittens.lang.template.call.multiprocessor_count", lambda device: 2)


class Products(tk.lcf):
    """Task t is C[t] = Σ A[i]·B[i]ᵀ over the iterations i from STARTS[t] to STARTS[t + 1] − 1. With `task_tiles` its A
    is one tile for all iterations. With `doubled` it is the sum of two accumulators."""

    rows: int = 128
    cols: int = 32
    depth: int = 32
    consumers: int = 1
    tiles: int = 0
    task_tiles: bool = False
    doubled: bool = False

    def layout(self):
        a, b = tk.st(tk.bf16, self.team * self.rows, self.depth), tk.st(tk.bf16, self.cols, self.depth)
        c, sums = tk.st(tk.fp32, self.rows, self.cols), tk.rt(tk.fp32, self.rows, self.cols)
        return tk.layout(
            globals=dict(A=a, B=b, C=c, STARTS=None),
            input=dict(B=b) if self.task_tiles else dict(A=a, B=b),
            task=dict(A=a) if self.task_tiles else {},
            per="block" if self.task_tiles else "consumer",
            epilogue=dict(C=c),
            multicast=("B",) if self.cluster > 1 else (),
            accumulators=dict(acc=sums, other=sums) if self.doubled else dict(acc=sums),
        )

    def tasks(self, A, B, C, STARTS):
        return STARTS[0] - 1

    @triton.jit
    def setup(ctx):
        when = ctx.task_id < tk.extent(ctx.globals.STARTS, 0) - 1
        task = tl.where(when, ctx.task_id, 0)
        first = tk.load_scalar(ctx.globals.STARTS, (task,))
        return tk.task(tk.load_scalar(ctx.globals.STARTS, (task + 1,)) - first, when=when, first=first)

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.A, ctx.globals.A, (ctx.task_id * ctx.config.cluster + ctx.rank, 0), task.full)

    @triton.jit
    def load(ctx, input):
        i = ctx.first + ctx.iter
        if not ctx.config.task_tiles:
            tk.load_async(input.A, ctx.globals.A, (i * ctx.config.cluster + ctx.rank, 0), input.full)
        tk.load_async(input.B, ctx.globals.B, (i, 0), input.full)

    @triton.jit
    def start(ctx):
        state = tk.struct(acc=tk.zero(ctx.accumulators.acc))
        if ctx.config.doubled:
            state = tk.with_field(state, "other", tk.mma_zero(ctx.accumulators.other))
        return state

    @triton.jit
    def _multiply(ctx, state, a, b):
        a = tk.subtile(a, ctx.config.rows, ctx.config.depth, ctx.consumer, 0)
        state = state.replace(acc=tk.mma_ABt(a, b, state.acc))
        if ctx.config.doubled:
            state = state.replace(other=tk.mma_ABt(a, b, state.other, wait=False))
        return state

    @triton.jit
    def compute(ctx, state, input):
        return ctx.config._multiply(ctx, state, ctx.task.A if ctx.config.task_tiles else input.A, input.B)

    @triton.jit
    def finish(ctx, state, epilogue):
        total = tk.load(state.acc)
        if ctx.config.doubled:
            total = total + tk.load(state.other)
        tk.store(epilogue.C, total)
        tk.fence_async()
        place = (ctx.task_id * ctx.config.cluster + ctx.rank) * ctx.config.team + ctx.consumer
        tk.store_async(ctx.globals.C, epilogue.C, (place, 0))


class Pipelined(Products):
    """The product of an iteration is in flight while the next is issued."""

    @triton.jit
    def compute(ctx, state, input, previous):
        state = ctx.config._multiply(ctx, state, ctx.task.A if ctx.config.task_tiles else input.A, input.B)
        return state.replace(acc=tk.mma_retire(state.acc))

    @triton.jit
    def compute_last(ctx, state, input):
        return state.replace(acc=tk.mma_begin(tk.mma_wait(state.acc)))


class Lagging(Products):
    """Multiplies in an iteration what the one before has loaded."""

    @triton.jit
    def compute_first(ctx, state, input):
        return state

    @triton.jit
    def compute(ctx, state, input, previous):
        return ctx.config._multiply(ctx, state, previous.A, previous.B)

    @triton.jit
    def compute_last(ctx, state, input):
        return ctx.config._multiply(ctx, state, input.A, input.B)


def operands(template, lengths=LENGTHS):
    """(A, B, C, STARTS) of small integers, and the exact C."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    height = template.cluster * template.team * template.rows
    total = int(starts[-1])
    a = torch.randint(-3, 4, (max(total, len(lengths)), height, template.depth)).double()
    b = torch.randint(-3, 4, (max(total, 1), template.cols, template.depth)).double()
    spans = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    one = [a[t] if template.task_tiles else None for t in range(len(lengths))]
    sums = [
        sum(((a[i] if one[t] is None else one[t]) @ b[i].T for i in range(*span)), torch.zeros(height, template.cols))
        for t, span in enumerate(spans)
    ]
    wanted = torch.cat(sums) * (2 if template.doubled else 1)
    tensors = (a.flatten(0, 1).bfloat16(), b.flatten(0, 1).bfloat16())
    return (*tensors, poison(torch.empty(wanted.shape, dtype=torch.float32)), starts), wanted


def run(template, lengths=LENGTHS, arch="sm_100a", blocks=2):
    tensors, wanted = operands(template, lengths)
    with sim.device(arch):
        template(*tensors, blocks=blocks)
    assert torch.equal(tensors[2].double(), wanted.double())


def blocks_of(template):
    """Two, but for schedules that count the CTAs themselves."""
    return None if template.one_tile_per_block or template.schedule.one_cta_per_task else 2


CASES = [
    (Products, dict(consumers=2, cols=48)),
    slow(Products, dict(consumers=2, rows=64, task_tiles=True)),
    (Products, dict(consumers=3, pingpong=True)),
    slow(Products, dict(doubled=True, cols=256)),
    slow(Products, dict(schedule=tk.Dynamic())),
    slow(Products, dict(consumers=2, cluster=2)),
    (Products, dict(cluster=2, cols=64)),
    slow(Products, dict(consumers=2, cluster=2, cols=64)),
    slow(Products, dict(cluster=2, cols=64, doubled=True)),
    slow(Products, dict(cluster=2, cols=64, pingpong=True, consumers=2)),
    slow(Pipelined, dict(cluster=2, cols=64, stages=2)),
    (Lagging, dict(cluster=2, cols=64, stages=3)),
    slow(Products, dict(schedule=tk.OnePerBlock())),
    slow(Products, dict(schedule=tk.ClusterLaunchControl())),
    (Products, dict(schedule=tk.ClusterLaunchControl(), cluster=2, cols=64)),
    slow(Products, dict(stages=1)),
    slow(Pipelined, dict(stages=2)),
    (Pipelined, dict(consumers=2, stages=2, staggered_epilogue=True, task_tiles=True)),
    (Lagging, dict(stages=2)),
    slow(Lagging, dict(consumers=2, stages=3)),
]


@pytest.mark.parametrize(("kind", "knobs"), CASES, ids=str)
def test_sums_of_few_and_no_iterations_are_exact(kind, knobs):
    template = kind(**knobs)
    run(template, blocks=blocks_of(template))


def test_rings_of_few_tasks():
    for lengths in ((0,), (1,), (2,), (0, 0, 0), (9, 9)):
        run(Pipelined(stages=2), lengths, blocks=1)


@pytest.mark.parametrize(("kind", "knobs"), CASES, ids=str)
@explored(2, 50)
def test_many_interleavings_are_clean_and_agree(kind, knobs, schedules):
    template = kind(**knobs)
    tensors, wanted = operands(template, (2, 0, 1, 3))
    blocks = blocks_of(template)
    found = sim.explore(lambda: template(*tensors, blocks=blocks), schedules=schedules, arch="sm_100a")
    assert not found.findings, found
    assert torch.equal(tensors[2].double(), wanted.double())


@pytest.mark.parametrize("schedule", [tk.SplitK(2), slow(tk.StreamK()), slow(tk.SplitTail())], ids=str)
@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
def test_split_tasks(schedule, arch):
    run(Products(schedule=schedule), (4, 4, 4), arch)


# ---------------------------------------------------------------- which memory, and how fast


def gemm(**knobs):
    return Gemm(**(dict(tile_m=128, consumers=1, b_stored_nk=True, epilogue_n=64) | knobs))


def test_what_alternates_is_explained():
    text = gemm().explain("sm_100a")
    assert "an MMA warp issues the products; 2 tiles of tensor memory" in text
    assert "1 tile of tensor memory" in gemm(consumers=2).explain("sm_100a")
    assert "half" in gemm(tile_m=64).explain("sm_100a") and "half" not in text
    assert "MMA warp" not in gemm().explain("sm_90a")


def test_accumulators_beyond_tensor_memory_are_refused_with_the_bill():
    tile, x = "tt(fp32, 128, 256) × 1 stages 256 columns", torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    with refused(f"tensor memory over budget: 768 columns of 512: {tile}; {tile}; {tile}"):
        gemm(consumers=3, tile_k=32, epilogue_n=32).compile(x, x, x, arch="sm_100a")
    with refused(f"tensor memory over budget: 512 columns of 256 of each of 2 blocks on an SM: {tile}; {tile}"):
        gemm(consumers=2, tile_k=32, epilogue_n=32, blocks_per_sm=2).compile(x, x, x, arch="sm_100a")


def test_when_two_ctas_are_a_pair():
    def pairs(**knobs):
        return Products(**(dict(cluster=2, cols=64) | knobs)).pairs(100)

    assert pairs() and pairs(consumers=2) and pairs(schedule=tk.SplitK(2))
    assert not pairs(cluster=4) and not pairs(cluster=1) and not Products(cluster=2, cols=64).pairs(90)
    assert "CTA pairs: one MMA multiplies 128 rows of each CTA" in Products(cluster=2, cols=64).explain("sm_100a")


NO_PAIRS = {
    "accumulators of 128 rows in each CTA, not acc rt(fp32, 64, 64)": dict(rows=64),
    "multicast tiles with one axis of 64, the accumulators' columns, unlike B st(bf16, 64, 64)": dict(depth=64),
    "one number of columns of all accumulators, a power of two from 32 on, not 96": dict(cols=96),
    "a layout without task tiles": dict(task_tiles=True),
}


@pytest.mark.parametrize("needed", NO_PAIRS)
def test_what_a_pair_needs(needed):
    template = Products(**(dict(cluster=2, cols=64) | NO_PAIRS[needed]))
    assert not template.pairs(100)
    assert f"  no CTA pair, which needs {needed}\n" in template.explain("sm_100a") + "\n"
    assert "CTA pair" not in template.explain("sm_90a")


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("consumers", [1, 2])
def test_the_main_loop_is_products_waits_and_commits(arch, consumers):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    report = inspect(gemm(consumers=consumers).compile(x, x, x, arch=arch))
    (loop,) = report.loops
    # four steps of K for each consumer; a wait for the stage, and the commit that frees it
    assert loop.mma == {"UTCHMMA": 4 * consumers}
    assert set(loop.counts) <= {"SYNCS", "UTCBAR"} and loop.counts["SYNCS"] == 2
    assert report.spill_instructions == 0 and "HMMA" not in report.mma
    if consumers == 1:
        assert loop.roles == ("mma_warp",) and not report.role("consumer").mma


@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
@pytest.mark.parametrize(("a_stored_km", "b_stored_nk"), [(False, True), (True, False)])
def test_the_machine_code_of_a_pair(arch, a_stored_km, b_stored_nk):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    kernel = gemm(cluster=2, a_stored_km=a_stored_km, b_stored_nk=b_stored_nk)
    compiled = kernel.compile(x, x, x, arch=arch)
    report, ptx = inspect(compiled), compiled.asm["ptx"]
    (loop,) = report.loops
    assert loop.mma == {"UTCHMMA": 4} and set(loop.counts) <= {"SYNCS", "UTCBAR"} and report.spill_instructions == 0
    # every tcgen05 instruction and load is of the pair
    assert "cta_group::1" not in ptx and ptx.count("tcgen05.alloc.cta_group::2") == 1
    loads = [line for line in ptx.splitlines() if "cp.async.bulk.tensor" in line and "mbarrier" in line]
    assert loads and all("cta_group::2" in line and "multicast" not in line for line in loads)
    # half the columns of B in each CTA leave room for two more stages
    assert kernel.placement(100).stages == gemm().placement(100).stages + 2


# ---------------------------------------------------------------- wrong use


@tk.kernel
@triton.jit
def pair_alone(X):
    tk.store(X, tk.load(tk.zero(tk.tensor_allocator(tk.tt(tk.fp32, 128, 64), pair=True))), (0, 0))


def test_a_pair_needs_a_cluster_of_an_even_number():
    x = tk.gl(torch.empty(128, 64))
    with refused("pair_alone(cluster_size=1): tensor memory of CTA pairs (pair=True) needs an even number of blocks"):
        pair_alone.compile(x, arch="sm_100a")
    assert "cta_group::2" in pair_alone.compile(x, arch="sm_100a", cluster_size=2).asm["ptx"]


def test_what_sm_120_lacks_is_said():
    x = torch.empty(512, 512, dtype=torch.bfloat16, device="meta")
    text = "compiled for sm_120. Kernels of register tiles (@triton.jit with tk operations) run on every GPU"
    with refused(text, tk.ArchitectureError):
        gemm().compile(x, x, x, arch="sm_120a")


def test_accumulators_need_a_start():
    class Forgetful(tk.lcf):
        setup, load, compute, finish = Products.setup, Products.load, Products.compute, Products.finish

        def layout(self):
            tile = tk.st(tk.bf16, 128, 64)
            return tk.layout(globals=dict(A=tile), input=dict(A=tile), accumulators=dict(acc=tk.rt(tk.fp32, 128, 64)))

    with refused("Forgetful: its layout has accumulators, but hook 'start' is missing; it returns them as the state"):
        Forgetful()


class Counting(Products):
    """Its state is not only accumulators."""

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(ctx.accumulators.acc), total=tk.zero(tk.rt(tk.fp32, 64, 16)))


class Reading(Products):
    """Threads read the input."""

    @triton.jit
    def compute(ctx, state, input):
        tk.store(input.A, tk.load(input.A) * 2)
        return state.replace(acc=tk.mma_ABt(input.A, input.B, state.acc))


class Peeking(Products):
    """Threads read the sums while products are in flight."""

    @triton.jit
    def compute(ctx, state, input):
        tk.load(state.acc)
        return state.replace(acc=tk.mma_ABt(input.A, input.B, state.acc))


MISTAKES = {
    Counting: "Counting.start returns state.total",
    Reading: "Reading.compute reads shared memory; on sm_100 one warp runs the products of a template with",
    Peeking: "load of tt(fp32, 128, 32): on chips with tensor memory one warp runs the hooks that multiply into",
}


@pytest.mark.parametrize("template", MISTAKES, ids=lambda t: t.__name__)
def test_what_the_mma_warp_cannot_do_is_refused(template):
    made = template()
    tensors, _ = operands(made)
    with refused(MISTAKES[template]):
        made.compile(*tensors, arch="sm_100a")
