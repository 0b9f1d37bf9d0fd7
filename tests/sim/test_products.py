"""Every form of a product, into every destination, simulated: what the destination held before counts for `mma_*` and
not for `mm_*`."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.cases_explicit import TORCH
from tests.util import meta, poison, refused, some_slow
from tritonkittens import sim

FORMS = ("AB", "ABt", "AtB", "AtBt")
DTYPES = (tk.bf16, tk.fp16, tk.fp8e4m3, tk.fp8e5m2, tk.fp32, tk.int8)


def extents_of(dtype):
    """N and K: two pieces each for one of the types, one for the others."""
    return (96, 96) if dtype == tk.bf16 else (32, 32)


@triton.jit
def overwrite(a, b, into, FORM: tl.constexpr, WAIT: tl.constexpr):
    if FORM == "AB":
        return tk.mm_AB(a, b, into=into, wait=WAIT)
    elif FORM == "ABt":
        return tk.mm_ABt(a, b, into=into, wait=WAIT)
    elif FORM == "AtB":
        return tk.mm_AtB(a, b, into=into, wait=WAIT)
    else:
        return tk.mm_AtBt(a, b, into=into, wait=WAIT)


@triton.jit
def accumulate(a, b, acc, FORM: tl.constexpr, WAIT: tl.constexpr):
    if FORM == "AB":
        return tk.mma_AB(a, b, acc, wait=WAIT)
    elif FORM == "ABt":
        return tk.mma_ABt(a, b, acc, wait=WAIT)
    elif FORM == "AtB":
        return tk.mma_AtB(a, b, acc, wait=WAIT)
    else:
        return tk.mma_AtBt(a, b, acc, wait=WAIT)


@triton.jit
def destination(G, row, HOME: tl.constexpr, memory, MEMORY: tl.constexpr):
    """An accumulator that holds band `row` of G: `memory`, or registers."""
    tile = tk.load(G, tk.rt(HOME.dtype, HOME.rows, HOME.cols), (row, 0))
    if MEMORY:
        tk.store(memory, tile)
        return memory
    else:
        return tile


@triton.jit
def result(acc, MEMORY: tl.constexpr):
    return tk.load(acc) if MEMORY else acc


@triton.jit
def one_form(x, y, C, OUT, row: tl.constexpr, memory, HOME: tl.constexpr, MEMORY: tl.constexpr, FORM: tl.constexpr):
    acc = overwrite(x, y, destination(OUT, row, HOME, memory, MEMORY), FORM, True)
    tk.store(OUT, result(acc, MEMORY), (row, 0))
    acc = accumulate(x, y, destination(C, 0, HOME, memory, MEMORY), FORM, False)
    acc = tk.mma_wait(overwrite(x, y, acc, FORM, False))
    tk.store(OUT, result(acc, MEMORY), (row + 1, 0))
    acc = accumulate(x, y, destination(C, 0, HOME, memory, MEMORY), FORM, True)
    tk.store(OUT, result(acc, MEMORY), (row + 2, 0))


@tk.kernel
@triton.jit
def every_form(
    A,
    AT,
    B,
    BT,
    C,
    OUT,
    HOME: tl.constexpr,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
    A_IN: tl.constexpr,
    FORMS: tl.constexpr,
):
    """Bands of OUT, three for each form: the product over what OUT holds; the product over a sum that is in flight; C +
    the product."""
    MEMORY: tl.constexpr = isinstance(HOME, tk.tt)
    a, b = tk.allocate(tk.st(DTYPE, HOME.rows, DEPTH)), tk.allocate(tk.st(DTYPE, DEPTH, HOME.cols))
    at, bt = tk.allocate(tk.st(DTYPE, DEPTH, HOME.rows)), tk.allocate(tk.st(DTYPE, HOME.cols, DEPTH))
    tk.load_into(a, A, (0, 0))
    tk.load_into(at, AT, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.load_into(bt, BT, (0, 0))
    tk.fence_async()
    tk.sync()
    memory = tk.tensor_allocator(HOME) if MEMORY else 0
    if A_IN == "tensor memory":
        held = tk.tensor_allocator(tk.tt(DTYPE, HOME.rows, DEPTH))
        tk.store(held, tk.load(a))
    for n in tl.static_range(len(FORMS)):
        x = at if FORMS[n] == "AtB" or FORMS[n] == "AtBt" else a
        x = held if A_IN == "tensor memory" else tk.load(x) if A_IN == "registers" else x
        one_form(x, bt if FORMS[n] == "ABt" or FORMS[n] == "AtBt" else b, C, OUT, 3 * n, memory, HOME, MEMORY, FORMS[n])


def forms_of(dtype, home, a_in, rows, arch):
    """The forms that this unit has for these operands."""
    wide = dtype in (tk.bf16, tk.fp16)
    if home == "tensor memory":
        k_major_only = dtype == tk.fp32
        return [
            f
            for f in FORMS
            if not (k_major_only and (f.endswith("B") or "At" in f)) and not (a_in == "tensor memory" and "At" in f)
        ]
    if arch == "sm_90a" and rows % 64 == 0 and not wide:  # wgmma
        return [f for f in FORMS if f.endswith("Bt") and ("At" not in f or a_in == "registers")]
    return list(FORMS)


CASES = [
    (arch, dtype, home, a_in, rows)
    for arch, places in (("sm_90a", ("registers",)), ("sm_100a", ("registers", "tensor memory")))
    for dtype in DTYPES
    for home in places
    for a_in in (("shared", "tensor memory") if home == "tensor memory" else ("shared", "registers"))
    if not (dtype == tk.fp8e5m2 and a_in == "registers")  # as e4m3
    for rows in (
        (64, 32)
        if arch == "sm_90a" and dtype == tk.bf16
        else (64, 128)
        if arch == "sm_100a" and home == "registers"
        else (64,)
    )
]


# each dtype, place of sums and of A, and number of rows, but not all combinations
QUICK = [case for n, case in enumerate(CASES) if n % 3 == 0 or case[1] == tk.bf16]


@pytest.mark.parametrize(
    ("arch", "dtype", "home", "a_in", "rows"), some_slow(CASES, QUICK), ids=lambda value: str(value)
)
def test_a_product_overwrites_its_destination_and_a_sum_adds_to_it(rng, arch, dtype, home, a_in, rows):
    total = tk.int32 if dtype == tk.int8 else tk.fp32
    n, k = extents_of(dtype)
    forms = forms_of(dtype, home, a_in, rows, arch)
    a, b, c = (torch.from_numpy(rng.integers(-4, 5, shape)) for shape in ((rows, k), (k, n), (rows, n)))
    out = poison(torch.empty(3 * len(forms) * rows, n, dtype=TORCH[total]))
    operands = [tk.gl(x.contiguous().to(TORCH[dtype])) for x in (a, a.T, b, b.T)]
    tile = tk.tt(total, rows, n) if home == "tensor memory" else tk.rt(total, rows, n)
    with sim.device(arch):
        every_form[(1,)](*operands, tk.gl(c.to(TORCH[total])), tk.gl(out), tile, k, dtype, a_in, tuple(forms))
    product = a.double() @ b.double()
    bands = [product, product, c + product] * len(forms)
    assert torch.equal(out.double(), torch.cat(bands))


@pytest.mark.parametrize("dtype", [tk.bf16, tk.fp32], ids=str)
@pytest.mark.parametrize("home", ["registers", "tensor memory"])
def test_random_products_over_poison_are_within_their_rounding(rng, dtype, home):
    n, k = extents_of(dtype)
    a, b = (torch.from_numpy(rng.standard_normal(shape)).to(TORCH[dtype]) for shape in ((64, k), (k, n)))
    out, c = poison(torch.empty(3 * 64, n)), torch.zeros(64, n)
    operands = [tk.gl(x.contiguous()) for x in (a, a.T, b, b.T)]
    with sim.device("sm_100a"):
        every_form[(1,)](
            *operands,
            tk.gl(c),
            tk.gl(out),
            (tk.tt if home == "tensor memory" else tk.rt)(tk.fp32, 64, n),
            k,
            dtype,
            "shared",
            ("ABt",),
        )
    exact = a.double() @ b.double()
    # tf32 operands are cut to 11 bits
    bound = (2.0**-9 if dtype == tk.fp32 else 2.0**-20) * (a.double().abs() @ b.double().abs())
    for band in out.double().split(64):
        assert bool(((band - exact).abs() <= bound).all())


@triton.jit
def plain_products(A, B, C, OUT, TILE: tl.constexpr, SUM: tl.constexpr):
    a, b = tk.load(A, TILE, (0, 0)), tk.load(B, TILE, (0, 0))
    tk.store(OUT, tk.mm_ABt(a, b, into=tk.load(OUT, SUM, (0, 0))), (0, 0))
    product = tk.mma_ABt(a, b, tk.load(C, SUM, (0, 0)))
    tl.static_assert(product.dtype == SUM.dtype)
    tk.store(OUT, product, (1, 0))


@pytest.mark.parametrize(("dtype", "total"), [(tk.bf16, tk.fp32), (tk.fp16, tk.fp16)], ids=str)
@pytest.mark.parametrize("explicit", [False, True])
def test_a_product_has_the_type_of_its_destination(rng, dtype, total, explicit):
    a, b, c = (torch.from_numpy(rng.integers(-4, 5, (48, 48))).to(TORCH[t]) for t in (dtype, dtype, total))
    out = poison(torch.empty(96, 48, dtype=TORCH[total]))
    kernel = tk.kernel(plain_products) if explicit else plain_products
    globals_ = [tk.gl(x) if explicit else tk.gl(x).plain() for x in (a, b, c, out)]
    sim.run(kernel, (1,), *globals_, tk.rt(dtype, 48, 48), tk.rt(total, 48, 48))
    product = a.double() @ b.double().T
    assert torch.equal(out.double(), torch.cat([product, product + c.double()]))


@tk.kernel
@triton.jit
def wrong_destination(X, WHAT: tl.constexpr, DTYPE: tl.constexpr = tk.bf16):
    a, b = tk.allocate(tk.st(DTYPE, 64, 64)), tk.allocate(tk.st(DTYPE, 64, 64))
    if WHAT == "shared":
        tk.mm_AB(a, b, into=tk.allocate(tk.st(tk.fp32, 64, 64)))
    elif WHAT == "type":
        tk.mma_AB(a, b, tk.rt(tk.fp32, 64, 64))
    elif WHAT == "A in tensor memory":
        tk.mm_AB(tk.tensor_allocator(tk.tt(tk.bf16, 64, 64)), b)
    elif WHAT == "A in tensor memory, transposed":
        tk.mm_AtB(tk.tensor_allocator(tk.tt(tk.bf16, 64, 64)), b, into=tk.tensor_allocator(tk.tt(tk.fp32, 64, 64)))
    elif WHAT == "depth":
        tk.mma_AB(a, b, tk.tensor_allocator(tk.tt(tk.fp32, 64, 64)))
    elif WHAT == "half":
        tk.mma_AB(a, b, tk.tensor_allocator(tk.tt(tk.fp16, 64, 64)))
    elif WHAT == "int8":
        tk.mm_ABt(a, b, into=tk.tensor_allocator(tk.tt(tk.int32, 64, 64)))


REFUSED = {
    (
        "shared",
        tk.bf16,
    ): "mm_AB: the accumulator is st(fp32, 64, 64) in shared memory; the tensor cores write a register tile (tk.zero, "
    "a product) or a "
    "tile of tensor_allocator",
    (
        "type",
        tk.bf16,
    ): "mma_AB: the accumulator is rt(fp32, 64, 64); the tensor cores write a register tile (tk.zero, a product) or a "
    "tile of tensor_allocator",
    (
        "A in tensor memory",
        tk.bf16,
    ): "mm_AB: A is 64×64 bf16 in tensor memory; only a product into tensor memory reads A there: the accumulator, or "
    "`into`, "
    "must be a tile of tensor_allocator",
    (
        "A in tensor memory, transposed",
        tk.bf16,
    ): "mm_AtB: A is 64×64 bf16 in tensor memory; tcgen05 reads A from tensor memory as M×K only: use mm_AB, or "
    "store A to an st",
    (
        "depth",
        tk.fp32,
    ): "mma_AB: B of fp32 is stored as 64×64 with its depth along the rows; tcgen05 reads 32-bit operands with the "
    "depth along the columns "
    "only: use mma_ABt with K-major tiles",
    ("half", tk.fp16): "mma_AB: operands of fp16 accumulate in fp32 in tensor memory, got an accumulator of fp16",
}


@pytest.mark.parametrize(("what", "dtype"), REFUSED, ids=str)
def test_destinations_that_no_unit_has_are_refused(what, dtype):
    with refused(REFUSED[what, dtype]):
        wrong_destination.compile(tk.gl(meta(64, 64)), what, dtype, arch="sm_100a")


def test_tensor_memory_multiplies_int8_on_sm_100a_only():
    needs = "needs sm_100a (Blackwell data centre); this kernel is compiled for sm_103"
    with refused(f"mm_ABt of int8 into tensor memory (tcgen05, kind::i8) {needs}", tk.ArchitectureError):
        wrong_destination.compile(tk.gl(meta(64, 64)), "int8", tk.int8, arch="sm_103a")
    assert "kind::i8" in wrong_destination.compile(tk.gl(meta(64, 64)), "int8", tk.int8, arch="sm_100a").asm["ptx"]
