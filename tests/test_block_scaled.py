"""Block-scaled products: tiles of scales, the products that read them, alone and in templates."""

import re

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.cases_block_scaled import FORMATS, FP4, assert_product, in_blocks, operand
from tests.util import explored, meta, poison, refused, slow
from tritonkittens import sim
from tritonkittens.inspect import inspect
from tritonkittens.lang import ArchitectureError
from tritonkittens.lang.core.backend import op
from tritonkittens.lang.core.constants import unwrap

LINE = 128  # bytes of K of a tile


def types_of(kind, cols=128):
    """The types of the tiles of A and B, and of their scales, for products of so many columns and a line of K."""
    dtype, of_scales, numbers = FORMATS[kind]
    scales = LINE * (2 if dtype == FP4 else 1) // numbers
    element, element_of_scales = tk.from_torch(dtype), tk.from_torch(of_scales)
    rows = -(-cols // 128) * 128
    return (
        tk.st(element, 128, LINE),
        tk.st(element, cols, LINE),
        tk.scale_tile(element_of_scales, 128, scales),
        tk.scale_tile(element_of_scales, rows, scales),
    )


@tk.kernel
@triton.jit
def product(A, B, SA, SB, C, TYPES: tl.constexpr, NAME: tl.constexpr, STAGES: tl.constexpr):
    """C = A·B, scaled, over tiles of K; with one tile, by any of the products."""
    a, b = tk.allocate(TYPES[0], STAGES), tk.allocate(TYPES[1], STAGES)
    sa, sb = tk.allocate(TYPES[2], STAGES), tk.allocate(TYPES[3], STAGES)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, TYPES[1].rows))
    full = tk.semaphores(STAGES)
    for i in range(tk.extent(A, 1) // TYPES[0].cols):
        s = i % STAGES
        tk.expect(full[s], (a[s], b[s], sa[s], sb[s]))
        tk.load_async(a[s], A, (0, i), full[s])
        tk.load_async(b[s], B, (0, i), full[s])
        tk.load_async(sa[s], SA, (0, i), full[s])
        tk.load_async(sb[s], SB, (0, i), full[s])
        tk.wait(full[s], (i // STAGES) % 2)
        if NAME == "mma_ABt":
            tk.mma_ABt(a[s], b[s], acc, scales=(sa[s], sb[s]), accumulate=i > 0)
        elif NAME == "mm_AB":
            tk.mm_AB(a[s], b[s], into=acc, scales=(sa[s], sb[s]))
        elif NAME == "mm_AtB":
            tk.mm_AtB(a[s], b[s], into=acc, scales=(sa[s], sb[s]))
        elif NAME == "mm_AtBt":
            tk.mm_AtBt(a[s], b[s], into=acc, scales=(sa[s], sb[s]))
    tk.store(C, tk.load(acc), (0, 0))


def tiles(blocks):
    """Blocks of scales as TMA moves them."""
    return blocks.view(*blocks.shape[:-2], 2, 256)


def arguments(a, b, types, name="mma_ABt", stages=2):
    c = poison(torch.empty(a.values.shape[0], b.values.shape[0], device=a.values.device))
    tensors = (a.values, b.values, tiles(a.blocks), tiles(b.blocks))
    return *(tk.gl(x, tile) for x, tile in zip(tensors, types, strict=True)), tk.gl(c), types, name, stages


CASES = [
    ("mxfp8", 128, 3),
    ("mxfp8", 64, 1),
    slow("mxfp8", 256, 2),
    slow("mxfp8 e5m2", 128, 2),
    ("mxfp4", 128, 2),
    slow("mxfp4", 256, 1),
    ("nvfp4", 256, 3),
    slow("nvfp4", 64, 2),
]


@pytest.mark.parametrize(("kind", "cols", "count"), CASES)
def test_products_of_each_format(kind, cols, count):
    k = count * LINE * (2 if FORMATS[kind][0] == FP4 else 1)
    a, b = operand(kind, 128, k), operand(kind, cols, k)
    given = arguments(a, b, types_of(kind, cols))
    with sim.device("sm_100a"):
        product[(1,)](*given)
    assert_product(given[4].tensor, a, b)


@pytest.mark.parametrize("name", ["mm_AB", slow("mm_AtB"), "mm_AtBt"])
def test_transposed_operands_of_8_bits(name):
    a, b = operand("mxfp8", 128, 128), operand("mxfp8", 128, 128)
    transposed = a._replace(values=a.values.T.contiguous()) if "At" in name else a
    columns = b if name.endswith("Bt") else b._replace(values=b.values.T.contiguous())
    given = arguments(transposed, columns, types_of("mxfp8"), name)
    with sim.device("sm_100a"):
        product[(1,)](*given)
    assert_product(given[4].tensor, a, b)


def test_a_block_of_scales_is_512_bytes_in_the_order_of_the_instruction():
    plain = torch.arange(512, dtype=torch.int32).remainder(251).to(torch.uint8).view(128, 4)
    block = in_blocks(plain)[0, 0]
    # PTX ISA, block scaling: 32 lanes hold four words, of rows 32 apart
    assert block[5].tolist() == [int(plain[row, j]) for row in (5, 37, 69, 101) for j in range(4)]
    tile = tk.scale_tile(tk.fp8e8m0, 256, 8)
    assert tile.shape == (2, 2, 2, 256) and tile.nbytes == 2048 and tile.columns == 16


# ---------------------------------------------------------------- templates

LENGTHS = (2, 0, 3, 1)


class ScaledProducts(tk.lcf):
    """Task t is C[t] = Σ A[i]·B[i]ᵀ, scaled, over the iterations i from STARTS[t] to STARTS[t + 1] − 1. Each CTA of a
    cluster has 128 rows of A[i]."""

    kind: str = "mxfp8"
    cols: int = 128
    consumers: int = 1

    def layout(self):
        a, b, sa, sb = types_of(self.kind, self.cols)
        c = tk.st(tk.fp32, 128, self.cols)
        return tk.layout(
            globals=dict(A=a, B=b, SA=sa, SB=sb, C=c, STARTS=None),
            input=dict(A=a, B=b, SA=sa, SB=sb),
            multicast=("B",) if self.cluster > 1 else (),
            epilogue=dict(C=c),
            accumulators=dict(acc=tk.rt(tk.fp32, 128, self.cols)),
        )

    def tasks(self, A, B, SA, SB, C, STARTS):
        return STARTS[0] - 1

    @triton.jit
    def setup(ctx):
        when = ctx.task_id < tk.extent(ctx.globals.STARTS, 0) - 1
        task = tl.where(when, ctx.task_id, 0)
        first = tk.load_scalar(ctx.globals.STARTS, (task,))
        return tk.task(tk.load_scalar(ctx.globals.STARTS, (task + 1,)) - first, when=when, first=first)

    @triton.jit
    def load(ctx, input):
        i = ctx.first + ctx.iter
        row = i * ctx.config.cluster + ctx.rank
        tk.load_async(input.A, ctx.globals.A, (row, 0), input.full)
        tk.load_async(input.B, ctx.globals.B, (i, 0), input.full)
        tk.load_async(input.SA, ctx.globals.SA, (row, 0), input.full)
        tk.load_async(input.SB, ctx.globals.SB, (i, 0), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(ctx.accumulators.acc))

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(acc=tk.mma_ABt(input.A, input.B, state.acc, scales=(input.SA, input.SB)))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.C, tk.load(state.acc))
        tk.fence_async()
        tk.store_async(ctx.globals.C, epilogue.C, (ctx.task_id * ctx.config.cluster + ctx.rank, 0))


def streams(template, lengths=LENGTHS):
    """The tensors of a call, and the operands of each task."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = sum(lengths)
    k = LINE * (2 if FORMATS[template.kind][0] == FP4 else 1)
    rows = 128 * template.cluster
    a, b = operand(template.kind, rows * total, k), operand(template.kind, template.cols * total, k)
    c = poison(torch.empty(rows * len(lengths), template.cols))
    return (a.values, b.values, tiles(a.blocks), tiles(b.blocks), c, starts), (a, b)


def check_tasks(template, tensors, operands, lengths=LENGTHS):
    a, b = operands
    rows = 128 * template.cluster
    starts, c = tensors[5].tolist(), tensors[4].view(len(lengths), rows, -1)
    for task, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        if first == last:
            assert not c[task].any()
            continue
        of_task = [
            x._replace(exact=x.exact.view(sum(lengths), n, -1)[first:last].movedim(0, 1).flatten(1))
            for x, n in ((a, rows), (b, template.cols))
        ]
        assert_product(c[task], *of_task)


TEMPLATES = [
    dict(stages=2),
    dict(kind="nvfp4", stages=2),
    slow(dict(cols=256, stages=1)),
    slow(dict(consumers=2, pingpong=True, stages=2)),
    dict(cluster=2, cols=256, stages=2),
    dict(cluster=2, kind="nvfp4", stages=2),
    slow(dict(cluster=2, kind="nvfp4", cols=256, stages=1)),
    slow(dict(cluster=2, kind="mxfp4", cols=256)),
    slow(dict(cluster=2, kind="mxfp8 e5m2", stages=3)),
]


@pytest.mark.parametrize("knobs", TEMPLATES, ids=str)
def test_sums_of_few_and_no_iterations(knobs):
    template = ScaledProducts(**knobs)
    tensors, operands = streams(template)
    with sim.device("sm_100a"):
        template(*tensors, blocks=2)
    check_tasks(template, tensors, operands)


@pytest.mark.parametrize("knobs", [*TEMPLATES[:3], slow(TEMPLATES[4]), TEMPLATES[5]], ids=str)
@explored(2, 50)
def test_many_interleavings_are_clean_and_agree(knobs, schedules):
    template = ScaledProducts(**knobs)
    tensors, operands = streams(template)
    found = sim.explore(lambda: template(*tensors, blocks=1), schedules=schedules, arch="sm_100a")
    assert not found.findings, found
    check_tasks(template, tensors, operands)


def test_sums_alternate_where_scales_leave_room():
    assert ScaledProducts(cols=128).accumulator_slots == 2 and ScaledProducts(cols=256).accumulator_slots == 1


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
@pytest.mark.parametrize(("kind", "copies"), [("mxfp8", 2), ("nvfp4", 8), slow("mxfp4", 4)])
def test_the_main_loop_is_copies_of_scales_products_and_waits(kind, copies, arch):
    template = ScaledProducts(kind=kind)
    compiled = template.compile(*streams(template)[0], arch=arch)
    report, ptx = inspect(compiled), compiled.asm["ptx"]
    (loop,) = report.loops
    instruction, name = {
        "mxfp8": ("UTCQMMA", "mxf8f6f4.block_scale"),
        "nvfp4": ("UTCOMMA", "mxf4nvf4.block_scale.block16"),
        "mxfp4": ("UTCOMMA", "mxf4.block_scale"),
    }[kind]
    # four steps of K, and 512 bytes of scales a copy; a wait for the stage, and the commit that frees it
    assert loop.mma == {instruction: 4} and loop.counts.get("UTCCP") == copies
    assert set(loop.counts) <= {"SYNCS", "UTCBAR", "UTCCP"} and loop.roles == ("mma_warp",)
    assert report.spill_instructions == 0 and "HMMA" not in report.mma and f"kind::{name}" in ptx
    assert ptx.count("tcgen05.cp.cta_group::1.warpx4.32x128b") % copies == 0


@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
@pytest.mark.parametrize(("kind", "copies"), [slow("mxfp8", 3), ("nvfp4", 12), slow("mxfp4", 6)])
def test_the_machine_code_of_a_pair(kind, copies, arch):
    """As of one CTA, with half the columns of B and the scales of all in each."""
    template = ScaledProducts(kind=kind, cols=256, cluster=2)
    compiled = template.compile(*streams(template)[0], arch=arch)
    (loop,), ptx = inspect(compiled).loops, compiled.asm["ptx"]
    assert template.pairs(100) and not ScaledProducts(kind=kind, cols=256).pairs(100)
    assert sum(loop.mma.values()) == 4 and loop.counts["UTCCP"] == copies and loop.roles == ("mma_warp",)
    assert set(loop.counts) <= {"SYNCS", "UTCBAR", "UTCCP"}
    assert "cta_group::1" not in ptx and ptx.count("tcgen05.cp.cta_group::2.32x128b.warpx4") % copies == 0


# of a descriptor: sparsity, reserved bits, negations, transpositions, and the K of fp4, 64
ZERO = sum(1 << bit for bit in (0, 1, 2, 3, 6, 13, 14, 15, 16, 24, 25, 26, 31))


def described(ptx):
    """(A and B by their types, N, M, whether scales are ue8m0, scale ids of A and B) of each product, from the bits of
    its descriptor: PTX ISA, tables "Instruction descriptor format for .kind::mxf8f6f4" and "… for .kind::mxf4 and …".
    """
    constants = dict(re.findall(r"mov\.b32 \t(%r\d+), (-?\d+);", ptx))
    found = []
    for register in re.findall(r"block_scale\S* \[[^\]]*\], %rd\d+, %rd\d+, (%r\d+),", ptx):
        bits = int(constants[register]) & 0xFFFFFFFF
        assert bits & ZERO == 0
        types = bits >> 7 & 7, bits >> 10 & 7
        n, m, ue8m0 = (bits >> 17 & 63) << 3, (bits >> 27 & 3) << 7, bits >> 23 & 1
        found.append((types, n, m, ue8m0, (bits >> 29 & 3, bits >> 4 & 3)))
    return found


@pytest.mark.parametrize(
    ("kind", "types", "ue8m0", "ids"),
    [
        ("mxfp8", (0, 0), 1, (0, 1, 2, 3)),  # a scale for K of 32
        slow("mxfp8 e5m2", (1, 1), 1, (0, 1, 2, 3)),
        slow("mxfp4", (1, 1), 1, (0, 2, 0, 2)),  # two for K of 64
        ("nvfp4", (1, 1), 0, (0, 0, 0, 0)),  # four, all of a column
    ],
)
def test_the_descriptors_of_the_instruction(kind, types, ue8m0, ids):
    """Four steps of K read the scales of one copied block, or of a block each."""
    a, b = operand(kind, 128, 256), operand(kind, 256, 256)
    ptx = product.compile(*arguments(a, b, types_of(kind, 256)), arch="sm_100a").asm["ptx"]
    assert described(ptx) == [(types, 256, 128, ue8m0, (i, i)) for i in ids]


# ---------------------------------------------------------------- wrong use


@tk.kernel
@triton.jit
def wrong(WHAT: tl.constexpr):
    a, b = tk.allocate(tk.st(tk.fp8e4m3, 128, 128)), tk.allocate(tk.st(tk.fp8e4m3, 128, 128))
    f, h = tk.allocate(tk.st(tk.fp4e2m1x2, 128, 128)), tk.allocate(tk.st(tk.bf16, 128, 128))
    s = tk.allocate(tk.scale_tile(tk.fp8e8m0, 128, 4))
    n = tk.allocate(tk.scale_tile(tk.fp8e4m3, 128, 16))
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 128))
    if WHAT == "one":
        tk.mma_ABt(a, b, acc, scales=s)
    elif WHAT == "no scales":
        tk.mma_ABt(a, b, acc, scales=(s, h))
    elif WHAT == "ring":
        tk.mma_ABt(a, b, acc, scales=(s, tk.allocate(tk.scale_tile(tk.fp8e8m0, 128, 4), 2)))
    elif WHAT == "shape":
        tk.mma_ABt(a, b, acc, scales=(s, tk.allocate(tk.scale_tile(tk.fp8e8m0, 128, 8))))
    elif WHAT == "rows":
        tk.mma_ABt(a, b, acc, scales=(tk.allocate(tk.scale_tile(tk.fp8e8m0, 256, 4)), s))
    elif WHAT == "format":
        tk.mma_ABt(a, b, acc, scales=(n, n))
    elif WHAT == "two formats":
        tk.mma_ABt(f, f, acc, scales=(n, tk.allocate(tk.scale_tile(tk.fp8e8m0, 128, 8))))
    elif WHAT == "operand":
        tk.mma_ABt(h, h, acc, scales=(s, s))
    elif WHAT == "mixed":
        tk.mma_ABt(f, a, acc, scales=(s, s))
    elif WHAT == "transposed fp4":
        tk.mma_AB(f, f, acc, scales=(n, n))
    elif WHAT == "64 rows":
        half = tk.subtile(a, 64, 128)
        tk.mma_ABt(half, b, tk.tensor_allocator(tk.tt(tk.fp32, 64, 128)), scales=(s, s))
    elif WHAT == "registers":
        tk.mma_ABt(a, b, tk.zero(tk.rt(tk.fp32, 128, 128)), scales=(s, s))
    elif WHAT == "no accumulator":
        tk.mm_ABt(a, b, scales=(s, s))
    elif WHAT == "accumulator":
        tk.mma_ABt(a, b, tk.tensor_allocator(tk.tt(tk.fp32, 128, 64)), scales=(s, s))
    elif WHAT == "A in tensor memory":
        tk.mma_ABt(tk.tensor_allocator(tk.tt(tk.fp8e4m3, 128, 128)), b, acc, scales=(s, s))
    elif WHAT == "A in tensor memory, transposed":
        tk.mma_AtBt(tk.tensor_allocator(tk.tt(tk.fp8e4m3, 128, 128)), b, acc, scales=(s, s))
    elif WHAT == "depth":
        tk.mma_ABt(a, tk.allocate(tk.st(tk.fp8e4m3, 128, 256)), acc, scales=(s, s))
    elif WHAT == "load":
        tk.load(s)
    elif WHAT == "unscaled fp4":
        tk.mma_ABt(f, f, acc)
    elif WHAT == "budget":
        tk.tensor_allocator(tk.tt(tk.fp32, 128, 512))


MISTAKES = {
    "one": "mma_ABt(scales=…): takes two tiles, the scales of A and of B",
    "no scales": "the scales of B are st(bf16, 128, 128); they must be a scale_tile in shared memory",
    "ring": "the scales of B are a ring of scale_tile(fp8e8m0, 128, 4); take a slot first",
    "shape": "the scales of B are scale_tile(fp8e8m0, 128, 8); 128 numbers along K have one for each 32: fp8e8m0, 128",
    "rows": "the scales of A are scale_tile(fp8e8m0, 256, 4); 128 numbers along K have one for each 32: fp8e8m0, 128×4",
    "format": "the scales of A are scale_tile(fp8e4m3, 128, 16); 8-bit operands take fp8e8m0",
    "two formats": "both scales have one format, got fp8e4m3 and fp8e8m0",
    "operand": "A is 128×128 bf16 in shared; block-scaled operands are both 8-bit floats (fp8e4m3, fp8e5m2), or both",
    "mixed": "B is 128×128 fp8e4m3 in shared; block-scaled operands are both 8-bit floats",
    "transposed fp4": "mma_AB(scales=…): 4-bit floats are packed along K, which must be the columns: use mma_ABt",
    "64 rows": "A is 64×128 fp8e4m3 in shared, B is 128×128 fp8e4m3 in shared (as M×K and K×N); a block-scaled product "
    "has 128 rows",
    "registers": "the accumulator of a block-scaled product is one tile of tensor memory (tensor_allocator, or",
    "no accumulator": "mm_ABt(scales=…): the accumulator of a block-scaled product is one tile of tensor memory",
    "accumulator": "the accumulator is tt(fp32, 128, 64); A and B need tt(fp32, 128, 128)",
    "A in tensor memory": "A is 128×128 fp8e4m3 in tensor memory; block-scaled products read shared memory",
    "A in tensor memory, transposed": "tcgen05 reads A from tensor memory as M×K only: use mma_ABt",
    "depth": "mma_ABt: A is 128×128 fp8e4m3 in shared and B is 256×128 fp8e4m3 in shared (as M×K and K×N): their K",
    "load": "load of scale_tile(fp8e8m0, 128, 4): only products read scales",
    "unscaled fp4": "A is 128×128 uint8 in shared; the tensor cores take",
    "budget": "tensor memory over budget: 660 columns of 512: scale_tile(fp8e8m0, 128, 4) 4 columns; scale_tile(",
}


@pytest.mark.parametrize("what", MISTAKES)
def test_products_that_no_instruction_computes_are_refused(what):
    with refused(MISTAKES[what]):
        wrong.compile(what, arch="sm_100a")


@tk.kernel
@triton.jit
def wrong_pair(WHAT: tl.constexpr):
    a = own(tk.allocate(tk.st(tk.fp8e4m3, 128, 128)), "own")
    b = own(tk.allocate(tk.st(tk.fp8e4m3, 64, 128)), "rows")
    s = own(tk.allocate(tk.scale_tile(tk.fp8e8m0, 128, 4)), "own")
    acc = tk.tensor_allocator(tk.tt(tk.fp32, 128, 128), pair=True)
    if WHAT == "all of B":
        tk.mma_ABt(a, a, acc, scales=(s, s))
    elif WHAT == "scales loaded alone":
        tk.mma_ABt(a, b, acc, scales=(s, tk.allocate(tk.scale_tile(tk.fp8e8m0, 128, 4))))
    elif WHAT == "columns":
        tk.mma_ABt(a, b, tk.tensor_allocator(tk.tt(tk.fp32, 128, 64), pair=True), scales=(s, s))
    elif WHAT == "scales of half of B":
        wide = own(tk.allocate(tk.st(tk.fp8e4m3, 128, 128)), "rows")
        tk.mma_ABt(a, wide, tk.tensor_allocator(tk.tt(tk.fp32, 128, 256), pair=True), scales=(s, s))
    elif WHAT == "transposed":
        tk.mma_AB(a, own(tk.allocate(tk.st(tk.fp8e4m3, 128, 64)), "cols"), acc, scales=(s, s))


@op
def own(t, tile, part):
    """The tile as an operand of a pair's products."""
    return tile.of_pair(unwrap(part))


PAIR_MISTAKES = {
    "all of B": "A is this CTA's rows and B its half of the columns, these and scales are loaded by the pair",
    "scales loaded alone": "A is this CTA's rows and B its half of the columns, these and scales are loaded by the",
    "columns": "the accumulator is tt(fp32, 128, 64); A and B need tt(fp32, 128, 128)",
    "scales of half of B": "the scales of B are scale_tile(fp8e8m0, 128, 4); 128 numbers along K have one for each 32: "
    "fp8e8m0, 256×4",
    "transposed": "mma_AB(scales=…) of a CTA pair: K must be the columns of both tiles: use mma_ABt",
}


@pytest.mark.parametrize("what", PAIR_MISTAKES)
def test_products_that_no_pair_computes_are_refused(what):
    with refused(PAIR_MISTAKES[what]):
        wrong_pair.compile(what, arch="sm_100a", cluster_size=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tk.scale_tile(tk.bf16, 128, 4), "scale_tile(bf16, 128, 4): scales are fp8e8m0 or fp8e4m3"),
        (lambda: tk.scale_tile(tk.fp8e8m0, 64, 4), "rows 64 must be a power of two times 128: scales lie in blocks of"),
        (lambda: tk.scale_tile(tk.fp8e8m0, 384, 4), "rows 384 must be a power of two times 128"),
        (lambda: tk.scale_tile(tk.fp8e4m3, 128, 2), "cols 2 must be a power of two times 4"),
        (
            lambda: tk.gl(meta(32, 16, dtype=torch.float8_e8m0fnu), tk.scale_tile(tk.fp8e8m0, 128, 4)),
            "scales are (…, blocks down, blocks across, 2, 256)",
        ),
        (
            lambda: tk.gl(meta(1, 1, 2, 256, dtype=torch.float8_e4m3fn), tk.scale_tile(tk.fp8e8m0, 128, 4)),
            "gl of fp8e4m3 with scale_tile(fp8e8m0, 128, 4): the tile's element type must be the tensor's",
        ),
        (
            lambda: tk.layout(globals=dict(A=None), input=dict(A=tk.sv(tk.fp32, 16)), scratch=dict(S=SCALES)),
            "layout(scratch={'S': scale_tile(fp8e8m0, 128, 4)}): must be st or sv",
        ),
    ],
)
def test_types_that_are_refused(make, message):
    with refused(message):
        make()


SCALES = tk.scale_tile(tk.fp8e8m0, 128, 4)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_chips_without_block_scaling_are_named(arch):
    message = "scale_tile(fp8e8m0, 128, 4) (tcgen05, block_scale) needs sm_100a or sm_103a (Blackwell data centre)"
    with refused(message, ArchitectureError):
        wrong.compile("one", arch=arch)
