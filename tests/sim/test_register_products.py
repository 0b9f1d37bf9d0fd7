"""Products of register tiles on chips with tensor memory: tcgen05 through temporary tensor memory, or mma.sync and the
reason."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import crossed, explored, meta, poison, relative_error, slow
from tritonkittens import sim
from tritonkittens.inspect import inspect
from tritonkittens.inspect.cli import registry
from tritonkittens.kernels.attention import Config, attention, attention_decode, attention_fp8, attention_torch

# ---------------------------------------------------------------- values


@triton.jit
def consume(ROLE: tl.constexpr, a, b, c, OUT, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(A·Bᵗ)·C added up n times, and once more over what the sum held."""
    acc = tk.zero(tk.rt(tk.fp32, ROWS, COLS))
    mine = tk.subtile(a, ROWS, a.cols, ROLE, 0)
    for _ in range(n):
        p = tk.mm_ABt(mine, b)
        acc = tk.mma_AB(tk.cast(p, tk.bf16), c, acc)
    tk.store(OUT, acc, (ROLE, 0))
    tk.store(OUT, tk.mm_AB(tk.cast(tk.mm_ABt(mine, b), tk.bf16), c, into=acc), (ROLE + 2, 0))


@tk.kernel
@triton.jit
def two_roles(A, B, C, OUT, n, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr):
    a, b = tk.allocate(tk.st(tk.bf16, 2 * ROWS, DEPTH)), tk.allocate(tk.st(tk.bf16, DEPTH, DEPTH))
    c = tk.allocate(tk.st(tk.bf16, DEPTH, COLS))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.load_into(c, C, (0, 0))
    tk.fence_async()
    tk.sync()
    tk.specialize(
        ((consume, (0, a, b, c, OUT, n, ROWS, COLS)), (consume, (1, a, b, c, OUT, n, ROWS, COLS))), warps=(4, 4)
    )


@explored(2, 50)
@pytest.mark.parametrize("cols", [96, slow(128)])
@pytest.mark.parametrize("rows", [64, 128])
def test_two_roles_multiply_at_once(rng, rows, cols, schedules):
    depth, n = 64, 3
    a, b, c = (torch.randint(-2, 3, shape).bfloat16() for shape in ((2 * rows, depth), (depth, depth), (depth, cols)))
    a, b = (x * (torch.rand(x.shape) < 0.2) for x in (a, b))  # so that bf16 holds the first product
    out = poison(torch.empty(4 * rows, cols))
    sim.explore(
        two_roles, (1,), *(tk.gl(x) for x in (a, b, c, out)), n, rows, cols, depth, schedules=schedules, arch="sm_100a"
    )
    product = a.double() @ b.double().T @ c.double()
    assert torch.equal(out.double(), torch.cat([n * product, product]))


@tk.kernel
@triton.jit
def in_flight(A, B, OUT, ROWS: tl.constexpr):
    """A product with A in tensor memory is in flight while registers go through tensor memory."""
    a, b = tk.allocate(tk.st(tk.bf16, ROWS, 64)), tk.allocate(tk.st(tk.bf16, 64, 64))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    held, done = tk.tensor_allocator(tk.tt(tk.bf16, ROWS, 64)), tk.semaphores(1)
    acc = tk.tensor_allocator(tk.tt(tk.fp32, ROWS, 64))
    tk.store(held, tk.load(a))
    acc = tk.mm_ABt(held, b, into=acc, arrived=done[0])
    tk.store(OUT, tk.mm_AB(a, b), (0, 0))
    tk.wait(done[0], 0)
    tk.store(OUT, tk.load(acc), (1, 0))


@pytest.mark.parametrize("rows", [64, 128])
def test_products_in_flight_keep_their_tensor_memory(rng, rows):
    a, b = torch.randint(-4, 5, (rows, 64)).bfloat16(), torch.randint(-4, 5, (64, 64)).bfloat16()
    out = poison(torch.empty(2 * rows, 64))
    sim.explore(in_flight, (1,), tk.gl(a), tk.gl(b), tk.gl(out), rows, schedules=12, arch="sm_100a")
    assert torch.equal(out.double(), torch.cat([a.double() @ b.double(), a.double() @ b.double().T]))


@tk.kernel
@triton.jit
def of_eight_warps(A, B, C, OUT, SUM: tl.constexpr):
    a, b = tk.allocate(tk.st(tk.bf16, SUM.rows, 64)), tk.allocate(tk.st(tk.bf16, 64, SUM.cols))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    acc = tk.mma_AB(tk.load(a), b, tk.load(C, SUM, (0, 0)))
    left, right = tk.split_cols(acc, SUM.cols // 2)
    tk.store(OUT, tk.concat_cols(left, right), (0, 0))
    tk.store(OUT, tk.sub_row(acc, tk.row_max(acc)), (1, 0))


@pytest.mark.parametrize("rows, warps", [(64, 8), (128, 4), (128, 8), (192, 4)])
def test_results_are_tiles_like_others(rng, rows, warps):
    a, b, c = (torch.randint(-4, 5, shape) for shape in ((rows, 64), (64, 64), (rows, 64)))
    out = poison(torch.empty(2 * rows, 64))
    operands = (tk.gl(a.bfloat16()), tk.gl(b.bfloat16()), tk.gl(c.float()), tk.gl(out))
    with sim.device("sm_100a"):
        of_eight_warps[(1,)](*operands, tk.rt(tk.fp32, rows, 64), num_warps=warps)
    expected = c.double() + a.double() @ b.double()
    assert torch.equal(out.double(), torch.cat([expected, expected - expected.amax(1, keepdim=True)]))


@explored(1, 15)
@pytest.mark.parametrize("dim", [64, slow(128)])
def test_attention(rng, dim, schedules):
    """Accumulators that a loop carries, 8-bit operands from accumulators, gradients stored as fragments."""
    q, k, v = (torch.randn(1, 2, s, dim).bfloat16().requires_grad_() for s in (130, 200, 200))
    grad, found, outs = torch.randn(q.shape).bfloat16(), [], []

    def run():
        outs[:] = [attention(q, k, v, causal=True)]
        found[:] = torch.autograd.grad(outs[0], (q, k, v), grad)

    sim.explore(run, schedules=schedules, arch="sm_100a")
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention_torch(*exact, causal=True)[0]
    assert relative_error(outs[0], expected) < 1e-2
    gradients = torch.autograd.grad(expected, exact, grad.double())
    assert all(relative_error(x, y) < 1e-2 for x, y in zip(found, gradients, strict=True))


@explored(1, 15)
def test_attention_of_bytes_and_of_one_query(rng, schedules):
    q, k, v = (torch.randn(1, 2, s, 64).to(torch.float8_e4m3fn) for s in (130, 300, 300))
    out = poison(torch.empty(q.shape, dtype=torch.bfloat16))
    sim.explore(lambda: attention_fp8(q, k, v, out=out, config=Config(tile_n=96)), schedules=schedules, arch="sm_100a")
    assert relative_error(out, attention_torch(q.float(), k.float(), v.float())[0]) < 0.03
    q, k, v = (torch.randn(1, heads, s, 64).bfloat16() for heads, s in ((4, 1), (1, 300), (1, 300)))
    found = []
    sim.explore(lambda: found.append(attention_decode(q, k, v)), schedules=schedules, arch="sm_100a")
    assert relative_error(found[-1], attention_torch(q, k, v)[0]) < 1e-2


# ---------------------------------------------------------------- machine code


@tk.kernel
@triton.jit
def one_product(
    A, B, C, OUT, SUM: tl.constexpr, DEPTH: tl.constexpr, DTYPE: tl.constexpr, A_IN: tl.constexpr, B_IN: tl.constexpr
):
    a, b = tk.allocate(tk.st(DTYPE, SUM.rows, DEPTH)), tk.allocate(tk.st(DTYPE, SUM.cols, DEPTH))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    acc = tk.load(C, SUM, (0, 0))
    for _ in range(tk.extent(A, 0)):
        acc = tk.mma_ABt(tk.load(a) if A_IN == "registers" else a, tk.load(b) if B_IN == "registers" else b, acc)
    tk.store(OUT, acc, (0, 0))


TORCH = {
    tk.bf16: torch.bfloat16,
    tk.fp16: torch.float16,
    tk.fp8e4m3: torch.float8_e4m3fn,
    tk.fp32: torch.float32,
    tk.int8: torch.int8,
    tk.int32: torch.int32,
}


def report(dtype=tk.bf16, rows=128, cols=64, depth=64, a="shared", b="shared", arch="sm_100a", warps=4, total=None):
    total = total or (tk.int32 if dtype == tk.int8 else tk.fp32)
    x, y = (meta(n, depth, dtype=TORCH[dtype]) for n in (rows, cols))
    sums = [tk.gl(meta(rows, cols, dtype=TORCH[total])) for _ in range(2)]
    tile = tk.rt(total, rows, cols)
    compiled = one_product.compile(tk.gl(x), tk.gl(y), *sums, tile, depth, dtype, a, b, arch=arch, num_warps=warps)
    return compiled, inspect(compiled)


KIND = {tk.bf16: "f16", tk.fp16: "f16", tk.fp8e4m3: "f8f6f4", tk.fp32: "tf32", tk.int8: "i8"}


@pytest.mark.parametrize("dtype, rows, a", crossed(list(KIND), [64, 128], ["shared", "registers"]), ids=str)
def test_the_machine_code_has_tcgen05_alone(dtype, rows, a):
    compiled, found = report(dtype, rows, a=a)
    ptx = compiled.asm["ptx"]
    assert f"tcgen05.mma.cta_group::1.kind::{KIND[dtype]}" in ptx and "mma.sync" not in ptx
    assert found.spill_instructions == 0 and found.fallbacks == ()
    # the accumulator goes to tensor memory and comes back as fragments, without an exchange between threads
    (loop,) = found.loops
    assert loop.counts["LDTM"] and loop.counts["STTM"] and "STS" not in loop.counts
    if dtype != tk.fp8e4m3 and dtype != tk.int8:
        assert ".16x256b" in ptx and "SHFL" not in loop.counts


def test_products_of_a_role_share_tensor_memory():
    # the larger product of each role takes 64 columns of sums and 32 of A; the allocation is a power of two
    b, c = tk.gl(meta(64, 64)), tk.gl(meta(64, 64))
    for rows, columns in ((128, 256), (64, 128)):  # tiles of 64 rows of two roles share columns
        out = tk.gl(meta(4 * rows, 64, dtype=torch.float32))
        found = inspect(two_roles.compile(tk.gl(meta(2 * rows, 64)), b, c, out, 3, rows, 64, 64, arch="sm_100a"))
        assert found.tensor_columns == columns and found.spill_instructions == 0 and "HMMA" not in found.mma


FALLBACKS = {
    "B in registers": (dict(b="registers"), "B is 32×64 bf16 in registers; tcgen05 reads B from shared memory"),
    "rows": (dict(rows=32), "32 rows; tcgen05 multiplies 64 or 128"),
    "warps": (dict(warps=2), "2 warp(s) reach only some lanes of tensor memory"),
    "int8": (dict(dtype=tk.int8, arch="sm_103a"), "sm_103a has no tcgen05 of int8"),
    "half sums": (
        dict(dtype=tk.fp16, total=tk.fp16),
        "the accumulator is 64×32 fp16 in registers; tcgen05 adds in fp32",
    ),
}


@pytest.mark.parametrize("what", FALLBACKS)
def test_what_falls_back_to_mma_sync_is_said(what):
    given, reason = FALLBACKS[what]
    _, found = report(**{"rows": 64, "cols": 32, **given})
    assert found.fallbacks == (f"mma_ABt: {reason}",) and not any("UTC" in name for name in found.mma)
    assert f"on mma.sync instead of tcgen05: mma_ABt: {reason}" in found.table()


def test_chips_without_tensor_memory_fall_back_from_nothing():
    for arch in ("sm_90a", "sm_120a"):
        assert report(rows=64, cols=32, arch=arch)[1].fallbacks == ()


@pytest.mark.parametrize("name", [
    "attention_decode_d64_3_at_once",
    "gemm_fp8_block_scales",
    *map(slow, (
        "attention_d128_causal",
        "attention_fp8_d64_causal",
        "attention_dkdv_d256_causal",
        "attention_dq_d64_causal",
        "attention_backward_d128_causal",
        "attention_backward_d64_parts",
        "attention_varlen_d128_causal",
        "gemm_fp8_block_scales_two_consumers",
    )),
])  # fmt: skip
def test_kernels_with_sums_in_registers_run_on_tcgen05_alone(name):
    found = inspect(registry()[name]("sm_100a"))
    assert found.fallbacks == () and all(kind.startswith("UTC") for kind in found.mma) and found.mma


@triton.jit
def role(tile, x, OUT):
    tk.store(OUT, tk.mm_ABt(tk.load(tile), x), (0, 0))


@tk.kernel
@triton.jit
def unlike_roles(A, B, C, D, OUT, ODD, KEPT: tl.constexpr):
    a, b = tk.allocate(tk.st(tk.bf16, 128, 64)), tk.allocate(tk.st(tk.bf16, 96, 64))
    c, d = tk.allocate(tk.st(tk.bf16, 64, 256)), tk.allocate(tk.st(tk.bf16, 128, 256))
    kept = tk.tensor_allocator(tk.tt(tk.fp32, 128, KEPT))
    kept = tk.zero(kept)
    tk.specialize(((role, (a, b, OUT)), (role, (c, d, ODD))), warps=(4, 4))
    kept = tk.zero(kept)


def test_roles_that_together_need_too_much_tensor_memory_take_mma_sync():
    tensors = [tk.gl(meta(*s)) for s in ((128, 64), (96, 64), (64, 256), (128, 256))]
    sums = [tk.gl(meta(*s, dtype=torch.float32)) for s in ((128, 96), (64, 128))]
    few = inspect(unlike_roles.compile(*tensors, *sums, 64, arch="sm_100a"))
    assert "UTCHMMA" in few.mma and few.fallbacks == ()
    many = inspect(unlike_roles.compile(*tensors, *sums, 256, arch="sm_100a"))
    assert set(many.mma) == {"HMMA"} and many.tensor_columns <= 512
    assert all("columns of tensor memory, of which its role may use" in reason for reason in many.fallbacks)


class Gram(tk.lcf):
    """C = A·Bᵗ summed up in registers. `b_in_registers`: B is loaded there first."""

    consumers = 1
    b_in_registers: bool = False

    def layout(self):
        tile = tk.st(tk.bf16, 64, 64)
        return tk.layout(globals=dict(A=tile, B=tile, C=None), input=dict(A=tile, B=tile))

    @triton.jit
    def setup(ctx):
        return tk.task(tk.extent(ctx.globals.A, 1) // 64, when=ctx.task_id < 1)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, (0, ctx.iter), input.full)
        tk.load_async(input.B, ctx.globals.B, (0, ctx.iter), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(tk.rt(tk.fp32, 64, 64)))

    @triton.jit
    def compute(ctx, state, input):
        b = tk.load(input.B) if ctx.config.b_in_registers else input.B
        return state.replace(acc=tk.mma_ABt(input.A, b, state.acc))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(ctx.globals.C, state.acc, (0, 0))


@pytest.mark.parametrize("registers", [False, True])
def test_templates_explain_what_falls_back(registers):
    template = Gram(b_in_registers=registers)
    operands = (meta(64, 128), meta(64, 128), meta(64, 64, dtype=torch.float32))
    template.compile(*operands, arch="sm_100a")
    line = "on mma.sync instead of tcgen05: mma_ABt: B is 64×64 bf16 in registers; tcgen05 reads B from shared memory"
    assert (line in template.explain("sm_100a")) == registers
    assert "mma.sync" not in template.explain("sm_90a")
