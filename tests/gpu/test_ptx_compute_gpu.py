"""inline_ptx on Hopper: wgmma, math, convert, memory, timing, extern against torch in float64, on fresh random inputs
and poisoned outputs.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx import bits as ptx_bits
from tritonkittens.inline_ptx import convert, extern, memory, timing, tma, wgmma
from tritonkittens.inline_ptx import math as ptx_math
from tritonkittens.inline_ptx._asm import is_explicit

from ..util import DEVICE, poison, relative_error, synchronize

pytestmark = pytest.mark.usefixtures("kernel_device", "compiled_anew")


def launch(kernel, *arguments, explicit=True, grid=(1,), **keywords):
    (GluonJITFunction(kernel.fn) if explicit else kernel)[grid](*arguments, num_warps=4, **keywords)


both = pytest.mark.parametrize("explicit", [False, True], ids=["plain", "explicit"])

# --- wgmma
# --------------------------------------------------------------------------------------------------------------------------


@constexpr_function
def pieces(n):
    """The powers of two, largest first, that add up to n: the columns of the accumulator's tiles."""
    return tuple(1 << bit for bit in range(8, 2, -1) if n >> bit & 1)


@constexpr_function
def count(values):
    return len(values)


@constexpr_function
def offset(values, index):
    return sum(values[:index])


@constexpr_function
def accumulator_layout(columns, bits):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@constexpr_function
def storage(rows, columns, bits, swizzle):
    return gl.NVMMASharedLayout(swizzle, bits, 2) if swizzle else wgmma.core_matrix_layout([rows, columns], bits // 8)


@triton.jit
def to_shared(pointer, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TYPE: gl.constexpr, SWIZZLE: gl.constexpr):
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    i, j = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    tile = gl.allocate_shared_memory(TYPE, [ROWS, COLUMNS], storage(ROWS, COLUMNS, BITS, SWIZZLE))
    tile.store(gl.load(pointer + i[:, None] * COLUMNS + j[None, :]))
    return tile


@triton.jit
def piece_pointers(C, N: gl.constexpr, PIECE: gl.constexpr, BITS: gl.constexpr):
    """Pointers to the columns of the PIECE-th tile of a 64 x N accumulator."""
    COLUMNS: gl.constexpr = pieces(N)[PIECE]
    layout: gl.constexpr = accumulator_layout(COLUMNS, BITS)
    i, j = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return C + i[:, None] * N + offset(pieces(N), PIECE) + j[None, :]


@triton.jit
def matmul_kernel(
    A,
    B,
    C,
    TA: gl.constexpr,
    TB: gl.constexpr,
    TC: gl.constexpr,
    N: gl.constexpr,
    NB: gl.constexpr,
    K: gl.constexpr,
    SWIZZLE_A: gl.constexpr,
    SWIZZLE_B: gl.constexpr,
    A_K: gl.constexpr,
    B_K: gl.constexpr,
    REGISTERS: gl.constexpr,
    HOW: gl.constexpr,
    SIGN: gl.constexpr,
    SATURATE: gl.constexpr,
):
    """C[64, N] = SIGN * A B + C. A is stored [64, K] (A_K = 1) or [K, 64] (0), B [NB, K] (B_K = 1) or [K, NB] (0)."""
    BITS: gl.constexpr = TA.primitive_bitwidth
    P: gl.constexpr = pieces(N)
    if A_K == 1:
        a = to_shared(A, 64, K, TA, SWIZZLE_A)
    else:
        a = to_shared(A, K, 64, TA, SWIZZLE_A)
    if B_K == 1:
        b = to_shared(B, NB, K, TB, SWIZZLE_B)
    else:
        b = to_shared(B, K, NB, TB, SWIZZLE_B)
    acc = ()
    for piece in gl.static_range(count(P)):
        acc = acc + (gl.load(piece_pointers(C, N, piece, BITS)),)
    fence_async_shared()
    gl.barrier()

    if REGISTERS:
        source = a.load(gl.DotOperandLayout(0, accumulator_layout(P[0], BITS), 32 // BITS))
    else:
        source = a
    if HOW == "fused":
        acc = wgmma.mma_sync(acc, source, b, A_K, B_K, scale_a=SIGN, saturate=SATURATE)
    elif HOW == "gluon":
        left = source
        right = b
        if B_K == 1:
            right = b.permute((1, 0))
        if A_K == 0:
            left = a.permute((1, 0))
        acc = (warpgroup_mma(left, right, acc[0]),)
    else:
        if TC == gl.float16:
            packed = ()
            for piece in gl.static_range(count(P)):
                packed = packed + (wgmma.pack(acc[piece]),)
            acc = packed
        if HOW == "packed":
            source = wgmma.pack(source)
            source = wgmma.fence(source)
        acc = wgmma.fence(acc)
        for step in gl.static_range(K * BITS // 256):
            db = wgmma.operand_descriptor(b, B_K, step)
            if REGISTERS:
                acc = wgmma.mma_async(
                    acc, source, db, TA, TB, scale_a=SIGN, trans_b=B_K == 0, saturate=SATURATE, step=step
                )
            else:
                acc = wgmma.mma_async(
                    acc,
                    wgmma.operand_descriptor(a, A_K, step),
                    db,
                    TA,
                    TB,
                    scale_a=SIGN,
                    trans_a=A_K == 0,
                    trans_b=B_K == 0,
                    saturate=SATURATE,
                )
        wgmma.commit_group()
        acc = wgmma.wait_group(0, acc)
        if TC == gl.float16:
            halves = ()
            for piece in gl.static_range(count(P)):
                halves = halves + (wgmma.unpack(acc[piece], gl.float16, accumulator_layout(P[piece], BITS)),)
            acc = halves
    for piece in gl.static_range(count(P)):
        gl.store(piece_pointers(C, N, piece, BITS), acc[piece])


TYPES = {
    "bf16": (torch.bfloat16, gl.bfloat16),
    "f16": (torch.float16, gl.float16),
    "tf32": (torch.float32, gl.float32),
    "e4m3": (torch.float8_e4m3fn, gl.float8e4nv),
    "e5m2": (torch.float8_e5m2, gl.float8e5),
    "s8": (torch.int8, gl.int8),
    "u8": (torch.uint8, gl.uint8),
    "f32": (torch.float32, gl.float32),
    "s32": (torch.int32, gl.int32),
}
# Operands are quantised before they are compared, so only accumulation errs: fp8 tensor cores keep about 13 bits of it,
# float16 11.
TOLERANCE = {"f16": 2e-3, "s32": 0.0, "f32": 1e-5}


def operand(kind, rows, columns):
    """(device tensor, its float64 values); tf32 values have no bits that the tensor core would drop."""
    torch_type, _ = TYPES[kind]
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        tensor = torch.randint(low, high, (rows, columns), device=DEVICE).to(torch_type)
    elif kind == "tf32":
        tensor = (torch.randn(rows, columns, device=DEVICE).view(torch.int32) & ~0x1FFF).view(torch.float32)
    else:
        tensor = torch.randn(rows, columns, device=DEVICE).to(torch_type)
    return tensor, tensor.double()


def matmul(
    kind_a,
    kind_b,
    kind_c,
    n,
    k,
    swizzle_a=128,
    swizzle_b=128,
    a_k=1,
    b_k=1,
    registers=False,
    how="fused",
    sign=1,
    saturate=False,
    inputs=None,
):
    """(result, float64 reference of sign * A B + C, inputs)."""
    nb = max(16 if b_k else swizzle_b // 2, 1 << (n - 1).bit_length(), 8)
    if inputs is None:
        a, wide_a = operand(kind_a, 64, k)
        b, wide_b = operand(kind_b, nb, k)
        start = (
            torch.randint(-1000, 1000, (64, n), device=DEVICE).to(torch.int32)
            if kind_c == "s32"
            else (torch.randn(64, n, device=DEVICE).to(TYPES[kind_c][0]))
        )
        inputs = a, wide_a, b, wide_b, start
    a, wide_a, b, wide_b, start = inputs
    stored_a = a.contiguous() if a_k else a.t().contiguous()
    stored_b = b.contiguous() if b_k else b.t().contiguous()
    out = start.clone()
    launch(
        matmul_kernel,
        stored_a,
        stored_b,
        out,
        TYPES[kind_a][1],
        TYPES[kind_b][1],
        TYPES[kind_c][1],
        n,
        nb,
        k,
        swizzle_a,
        swizzle_b,
        a_k,
        b_k,
        registers,
        how,
        sign,
        saturate,
    )
    synchronize()
    return out, sign * wide_a @ wide_b[:n].t() + start.double(), inputs


def agree(out, reference, kind_a, kind_c):
    tolerance = 2e-3 if kind_a in ("e4m3", "e5m2") else TOLERANCE[kind_c]
    assert relative_error(out, reference) <= tolerance


@pytest.mark.parametrize(
    "how, registers", [("fused", False), ("async", False), ("fused", True), ("async", True), ("packed", True)]
)
@pytest.mark.parametrize("n", [8, 16, 24, 40, 80, 96, 128, 176, 248, 256])
def test_wgmma_columns(n, how, registers, rng):
    out, reference, _ = matmul("bf16", "bf16", "f32", n, 64, registers=registers, how=how)
    agree(out, reference, "bf16", "f32")


KINDS = [("f16", "f16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32")]
KINDS += [(a, b, c) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for c in ("f32", "f16")]
KINDS += [(a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")]


@pytest.mark.parametrize("how, registers", [("fused", False), ("async", False), ("fused", True), ("async", True)])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_wgmma_types(kinds, how, registers, rng):
    for n in (48, 128):
        out, reference, _ = matmul(*kinds, n, 64, swizzle_a=64, swizzle_b=64, registers=registers, how=how)
        agree(out, reference, kinds[0], kinds[2])


@pytest.mark.parametrize("a_k, b_k", [(1, 1), (1, 0), (0, 1), (0, 0)], ids=["KK", "KN", "MK", "MN"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_wgmma_storage(swizzle, a_k, b_k, rng):
    """Both major-nesses and every swizzle, over several panels along both axes; asynchronous and fused."""
    for kind, n, how in (("bf16", 96, "fused"), ("f16", 160, "async"), ("f16", 16, "fused")):
        out, reference, _ = matmul(kind, kind, "f32", n, 128, swizzle, swizzle, a_k, b_k, how=how)
        agree(out, reference, kind, "f32")


@pytest.mark.parametrize("kind", ["tf32", "e4m3", "s8"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_wgmma_storage_of_other_widths(swizzle, kind, rng):
    kind_c = "s32" if kind == "s8" else "f32"
    out, reference, _ = matmul(kind, kind, kind_c, 96, 128, swizzle, swizzle, how="async")
    agree(out, reference, kind, kind_c)


@pytest.mark.parametrize(
    "a_k, b_k, registers", [(1, 1, False), (1, 0, False), (0, 0, False), (1, 1, True), (1, 0, True)]
)
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_wgmma_is_what_gluon_issues(kind, a_k, b_k, registers, rng):
    """Bit for bit warpgroup_mma, where that exists: powers of two."""
    for n in (64, 256):
        theirs, reference, inputs = matmul(kind, kind, "f32", n, 64, a_k=a_k, b_k=b_k, registers=registers, how="gluon")
        agree(theirs, reference, kind, "f32")
        for how in ("fused", "async"):
            ours, _, _ = matmul(kind, kind, "f32", n, 64, a_k=a_k, b_k=b_k, registers=registers, how=how, inputs=inputs)
            if DEVICE == "cuda":
                assert torch.equal(ours, theirs)
            else:  # the simulator adds up in another order
                assert relative_error(ours, theirs) < 1e-6


def test_wgmma_negates(rng):
    for how in ("fused", "async"):
        out, reference, _ = matmul("bf16", "bf16", "f32", 80, 64, how=how, sign=-1)
        agree(out, reference, "bf16", "f32")


@pytest.mark.parametrize("saturate", [False, True])
def test_wgmma_integer_overflow(saturate, rng):
    a, b = (
        torch.full((64, 64), 127, dtype=torch.int8, device=DEVICE),
        torch.full((16, 64), 127, dtype=torch.int8, device=DEVICE),
    )
    start = torch.full((64, 8), 2**31 - 1000, dtype=torch.int32, device=DEVICE)
    out, reference, _ = matmul(
        "s8", "s8", "s32", 8, 64, 64, 64, saturate=saturate, inputs=(a, a.double(), b, b.double(), start)
    )
    expected = reference.clamp(max=2**31 - 1) if saturate else reference - 2.0**32
    assert torch.equal(out.double(), expected)


@triton.jit
def scale_d_kernel(A, B, C, SCALE):
    a, b = to_shared(A, 64, 64, gl.bfloat16, 128), to_shared(B, 64, 64, gl.bfloat16, 128)
    fence_async_shared()
    gl.barrier()
    layout: gl.constexpr = accumulator_layout(64, 16)
    acc = gl.full([64, 64], 1000.0, gl.float32, layout)
    first = wgmma.mma_sync(acc, a, b, b_k_axis=1, scale_d=SCALE)
    acc = wgmma.fence(acc)
    acc = wgmma.mma_async(
        acc, wgmma.operand_descriptor(a, 1), wgmma.operand_descriptor(b, 1), gl.bfloat16, scale_d=SCALE
    )
    for step in gl.static_range(1, 4):
        acc = wgmma.mma_async(acc, wgmma.operand_descriptor(a, 1, step), wgmma.operand_descriptor(b, 1, step), "bf16")
        wgmma.commit_group()
    acc = wgmma.wait_group(1, acc)
    acc = wgmma.wait_group(0, acc)
    i, j = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(C + i[:, None] * 64 + j[None, :], first)
    gl.store(C + 4096 + i[:, None] * 64 + j[None, :], acc)


def test_wgmma_scale_d_at_run_time(rng):
    (a, wide_a), (b, wide_b) = operand("bf16", 64, 64), operand("bf16", 64, 64)
    for scale in (0, 1):
        out = poison(torch.empty(2, 64, 64, device=DEVICE))
        launch(scale_d_kernel, a, b, out, scale)
        for result in out:
            assert relative_error(result, wide_a @ wide_b.t() + 1000.0 * scale) < 1e-5


# --- math
# ---------------------------------------------------------------------------------------------------------------------------


@triton.jit
def iota(N: tl.constexpr):
    if is_explicit():
        return gl.arange(0, N, gl.BlockedLayout([2], [32], [4], [0]))
    else:
        return tl.arange(0, N)


@triton.jit
def math_kernel(X, Y, Z, OUT, N: tl.constexpr, NAME: tl.constexpr):
    i = iota(N)
    x, y, z = tl.load(X + i), tl.load(Y + i), tl.load(Z + i)
    if NAME == "ex2":
        out = ptx_math.ex2(x)
    elif NAME == "lg2":
        out = ptx_math.lg2(x)
    elif NAME == "rcp":
        out = ptx_math.rcp(x)
    elif NAME == "rsqrt":
        out = ptx_math.rsqrt(x)
    elif NAME == "sqrt":
        out = ptx_math.sqrt(x)
    elif NAME == "sin":
        out = ptx_math.sin(x)
    elif NAME == "cos":
        out = ptx_math.cos(x)
    elif NAME == "tanh":
        out = ptx_math.tanh(x)
    elif NAME == "neg":
        out = ptx_math.neg(x)
    elif NAME == "add":
        out = ptx_math.add(x, y)
    elif NAME == "sub":
        out = ptx_math.sub(x, y)
    elif NAME == "mul":
        out = ptx_math.mul(x, y)
    elif NAME == "fma":
        out = ptx_math.fma(x, y, z)
    else:
        out = ptx_math.fma_relu(x, y, z)
    tl.store(OUT + i, out)


def rounded(exact, dtype):
    """float64 values rounded once to `dtype`: on the way through float32 an inexact value is made odd, which no later
    rounding confuses."""
    single = exact.float()
    if dtype == torch.float32:
        return single
    words = single.view(torch.int32) - (single.double().abs() > exact.abs()).int()
    return (words | (words.view(torch.float32).double() != exact).int()).view(torch.float32).to(dtype)


REFERENCES = {
    "ex2": torch.exp2,
    "lg2": torch.log2,
    "rcp": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
}
EXACT = {
    "neg": lambda x, y, z: -x,
    "add": lambda x, y, z: x + y,
    "sub": lambda x, y, z: x - y,
    "mul": lambda x, y, z: x * y,
    "fma": lambda x, y, z: x * y + z,
    "fma_relu": lambda x, y, z: (x * y + z).clamp(min=0),
}
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HOPPER = [
    (name, kind)
    for name, table in ptx_math.INSTRUCTIONS.items()
    for kind, (_, minimum) in table.items()
    if minimum <= 90
]


@both
@pytest.mark.parametrize("name, kind", HOPPER)
def test_math(name, kind, explicit, rng):
    dtype = FLOATS[kind]
    for n in (1024, 128, 32):  # also fewer elements than threads, and an odd one a thread for the packed forms
        x, y, z = (torch.randn(n, device=DEVICE).to(dtype) for _ in range(3))
        if name in ("lg2", "rcp", "rsqrt", "sqrt"):
            x = x.abs() + 0.01
        out = poison(torch.empty_like(x))
        launch(math_kernel, x, y, z, out, n, name, explicit=explicit)
        if name in EXACT:
            assert torch.equal(out, rounded(EXACT[name](x.double(), y.double(), z.double()), dtype))
        else:  # the errors that the PTX ISA states, and one rounding
            relative, absolute = {
                "fp32": (6e-4 if name == "tanh" else 2e-6, 2e-6),
                "fp16": (2e-3, 1e-3),
                "bf16": (1.2e-2, 4e-3),
            }[kind]
            torch.testing.assert_close(out.double(), REFERENCES[name](x.double()), rtol=relative, atol=absolute)


# --- convert
# ------------------------------------------------------------------------------------------------------------------------


@triton.jit
def convert_kernel(X, OUT, N: tl.constexpr, NAME: tl.constexpr, ROUNDING: tl.constexpr, RELU: tl.constexpr):
    i = iota(N)
    x = tl.load(X + i)
    if NAME == "bf16":
        out = convert.to_bf16(x, ROUNDING, RELU)
    elif NAME == "f16":
        out = convert.to_f16(x, ROUNDING, RELU)
    elif NAME == "tf32":
        out = convert.to_tf32(x, ROUNDING, RELU)
    elif NAME == "e4m3":
        out = convert.to_e4m3(x, RELU)
    elif NAME == "e5m2":
        out = convert.to_e5m2(x, RELU)
    elif NAME == "from e4m3":
        out = convert.e4m3_to_f16(x, RELU)
    else:
        out = convert.e5m2_to_f16(x, RELU)
    tl.store(OUT + i, out)


@triton.jit
def words_kernel(X, BITS, Y, SHIFTED, N: tl.constexpr, COUNT: tl.constexpr):
    i = iota(N)
    tl.store(Y + i, convert.bf16_to_f32(tl.load(X + i)))
    words = tl.load(BITS + i).to(tl.uint32, bitcast=True)
    tl.store(SHIFTED + i, ptx_bits.funnel_shift_left(words, words ^ 0x5555, COUNT).to(tl.int32, bitcast=True))


@both
@pytest.mark.parametrize("count", [0, 1, 7, 31])
def test_words(count, explicit, rng):
    """Every bfloat16 as float32, and two words shifted as one."""
    x = (
        torch.arange(-(1 << 15), 1 << 15, device=DEVICE)
        .to(torch.int16)
        .view(torch.bfloat16)[:: 65536 // 1024]
        .contiguous()
    )
    words = torch.randint(-(1 << 31), 1 << 31, (1024,), dtype=torch.int32, device=DEVICE)
    y, shifted = poison(torch.empty(1024, device=DEVICE)), poison(torch.empty_like(words))
    launch(words_kernel, x, words, y, shifted, 1024, count, explicit=explicit)
    assert torch.equal(y.view(torch.int32), x.view(torch.int16).int() << 16)
    high, low = words.long() & 0xFFFFFFFF, (words.long() ^ 0x5555) & 0xFFFFFFFF
    assert torch.equal(shifted.long() & 0xFFFFFFFF, ((high << count) | (low >> (32 - count))) & 0xFFFFFFFF)


def toward_zero(x, bits):
    """float32 with all but the upper `bits` mantissa bits cleared."""
    return (x.view(torch.int32) & -(1 << (23 - bits))).view(torch.float32)


def nearest(x, bits, away):
    """float32 rounded to `bits` mantissa bits, ties away from zero or to even, by integer arithmetic on the
    encoding."""
    words, drop = x.view(torch.int32), 23 - bits
    half = 1 << (drop - 1)
    increment = torch.full_like(words, half) if away else half - 1 + ((words >> drop) & 1)
    return ((words + increment) & -(1 << drop)).view(torch.float32)


def run_convert(x, dtype, name, rounding, relu, explicit):
    out = poison(torch.empty(x.shape, dtype=dtype, device=DEVICE))
    launch(convert_kernel, x, out, x.numel(), name, rounding, relu, explicit=explicit)
    return out


@both
@pytest.mark.parametrize("n", [1024, 128, 64])
@pytest.mark.parametrize(
    "name, rounding, relu",
    [("tf32", "rna", False)]
    + [
        (name, rounding, relu)
        for name in ("bf16", "f16", "tf32")
        for rounding in ("rn", "rz")
        for relu in (False, True)
    ],
)
def test_convert_from_f32(name, rounding, relu, n, explicit, rng):
    x = torch.randn(n, device=DEVICE)
    x[: n // 2] = nearest(x[: n // 2], 11 if name != "bf16" else 8, True)  # half of them are ties, or representable
    bits = {"bf16": 7, "f16": 10, "tf32": 10}[name]
    expected = toward_zero(x, bits) if rounding == "rz" else nearest(x, bits, rounding == "rna")
    expected[expected.abs() < 2.0**-14] = 0  # float16 subnormals have fewer bits than this reference
    if relu:
        expected = expected.clamp(min=0)
    out = run_convert(
        x, {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[name], name, rounding, relu, explicit
    ).float()
    out[out.abs() < 2.0**-14] = 0
    assert torch.equal(out, expected)


@both
@pytest.mark.parametrize("n", [1024, 128, 64])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("source", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_convert_fp8(name, source, relu, n, explicit, rng):
    dtype, largest = (torch.float8_e4m3fn, 448.0) if name == "e4m3" else (torch.float8_e5m2, 57344.0)
    x = (torch.randn(n, device=DEVICE) * largest / 3).to(source).clamp(-65000, 65000)
    x[:2] = torch.tensor([65000.0, -65000.0], dtype=source)
    out = run_convert(x, dtype, name, "rn", relu, explicit)
    expected = x.float().clamp(-largest, largest).clamp(min=0 if relu else -largest).to(dtype)
    assert torch.equal(out.float(), expected.float())
    back = run_convert(out, torch.float16, "from " + name, "rn", False, explicit)
    assert torch.equal(back.float(), expected.float())
    every = torch.arange(256, device=DEVICE).to(torch.uint8).view(dtype)
    back = run_convert(every, torch.float16, "from " + name, "rn", True, explicit).float()
    reference = every.float()
    torch.testing.assert_close(back, torch.where(reference < 0, 0.0, reference), rtol=0, atol=0, equal_nan=True)


# --- memory
# -------------------------------------------------------------------------------------------------------------------------


@triton.jit
def copy_kernel(X, Y, M, VEC: tl.constexpr, HOW: tl.constexpr):
    i = iota(256)
    mask = tl.load(M + i)
    if HOW == "hints":
        values = memory.load(X + VEC * i, VEC, l1="no_allocate", prefetch="256B")
        memory.store(Y + VEC * i, values, l1="evict_first")
    elif HOW == "cache":
        values = memory.load(X + VEC * i, VEC, cache="cv")
        memory.store(Y + VEC * i, values, cache="wt")
    elif HOW == "nc":
        memory.prefetch(X + VEC * i, "L1")
        memory.prefetch(X + VEC * i)
        values = memory.load_nc(X + VEC * i, VEC, l1="evict_last")
        memory.store(Y + VEC * i, values, cache="cs")
    elif HOW == "policy":
        policy = tma.create_policy("evict_first")
        values = memory.load(X + VEC * i, VEC, policy=policy, mask=mask == mask)
        memory.store(Y + VEC * i, values, policy=policy)
    elif HOW == "masked load":
        values = memory.load(X + VEC * i, VEC, mask=mask)
        memory.store(Y + VEC * i, values)
    else:
        values = memory.load(X + VEC * i, VEC, cache="cg")
        memory.store(Y + VEC * i, values, mask=mask)


@both
@pytest.mark.parametrize("how", ["hints", "cache", "nc", "policy", "masked load", "masked store"])
@pytest.mark.parametrize(
    "dtype, vec",
    [
        (torch.float32, 1),
        (torch.float32, 2),
        (torch.float32, 4),
        (torch.int32, 4),
        (torch.int64, 1),
        (torch.float64, 2),
    ],
)
def test_vector_copy(dtype, vec, how, explicit, rng):
    x = torch.randint(-(2**31), 2**31 - 1, (256, vec), device=DEVICE).to(dtype)
    mask = torch.randint(0, 2, (256,), device=DEVICE, dtype=torch.int32)
    out = poison(torch.empty_like(x))
    untouched = out.clone()
    launch(copy_kernel, x, out, mask, vec, how, explicit=explicit)
    keep = mask.bool()[:, None]
    expected = {
        "masked load": torch.where(keep, x, torch.zeros_like(x)),
        "masked store": torch.where(keep, x, untouched),
    }.get(how, x)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def red_kernel(OUT, WIDE, PACKED, COUNTS, X):
    i = iota(512)
    x = tl.load(X + i)
    memory.red_add(COUNTS, 1, "s32")
    memory.red_add(COUNTS + 1, 1, "s32", issuer="warp")
    memory.red_add(COUNTS + 2, 1, "u32", "release", issuer="warpgroup")
    memory.red_add(COUNTS + 3, 1, "s32", issuer="cta", scope="sys")
    if is_explicit():
        memory.red_add(OUT + i, x)
        memory.red_add(WIDE + 4 * (i % 8), (x, x * 2, x * 3, x * 4))
        memory.red_add(PACKED + i, i * 0 + 0x3F803F80, "bf16x2")
    else:
        memory.red_add(WIDE, (1.0, 2.0, 3.0, 4.0), issuer="cta")


@both
def test_red(explicit, rng):
    programs = 6
    x = torch.randint(-8, 9, (512,), device=DEVICE).float()  # integers: the order of additions does not matter
    out, wide = torch.full((512,), 0.5, device=DEVICE), torch.zeros(8, 4, device=DEVICE)
    packed, counts = (
        torch.zeros(1024, device=DEVICE, dtype=torch.bfloat16),
        torch.zeros(4, device=DEVICE, dtype=torch.int32),
    )
    launch(red_kernel, out, wide, packed.view(torch.int32), counts, x, explicit=explicit, grid=(programs,))
    assert counts.tolist() == [128 * programs, 4 * programs, programs, programs]
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE)
    if explicit:
        assert torch.equal(out, 0.5 + programs * x)
        assert torch.equal(wide, programs * x.view(64, 8).sum(0)[:, None] * factors)
        assert torch.equal(packed.float(), torch.full((1024,), float(programs), device=DEVICE))
    else:
        assert torch.equal(wide[0], programs * factors)


@triton.jit
def flag_kernel(DATA, FLAG, OUT, TURNS):
    """The first program writes data and releases the flag; the second acquires it, a bounded number of times, and reads
    the data."""
    i = iota(512)
    if tl.program_id(0) == 0:
        timing.nanosleep(20000)
        tl.store(DATA + i, i + 7)
        if is_explicit():
            gl.barrier()
        else:
            tl.debug_barrier()
        memory.store_release(FLAG, 1, "gpu", "cta")
    else:
        turn = 0
        flag = memory.load_acquire(FLAG)
        while (flag == 0) & (turn < TURNS):
            timing.nanosleep(100)
            flag = memory.load_acquire(FLAG)
            turn += 1
        tl.store(OUT + i, memory.load(DATA + i, cache="cg"))


@both
def test_flags(explicit, rng):
    data, flag = (
        poison(torch.empty(512, dtype=torch.int32, device=DEVICE)),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    out = poison(torch.empty_like(data))
    launch(flag_kernel, data, flag, out, 1_000_000, explicit=explicit, grid=(2,))
    assert flag.item() == 1
    assert torch.equal(out, torch.arange(512, device=DEVICE, dtype=torch.int32) + 7)


# --- timing and extern
# --------------------------------------------------------------------------------------------------------------


@triton.jit
def timing_kernel(TIMES, LANES, WARPS, SMS):
    i = iota(128)
    c0, d0, t0 = timing.clock(), timing.clock64(), timing.globaltimer()
    timing.nanosleep(200000)
    c1, d1, t1 = timing.clock(), timing.clock64(), timing.globaltimer()
    tl.store(TIMES, (c1 - c0).to(tl.int64))
    tl.store(TIMES + 1, d1 - d0)
    tl.store(TIMES + 2, t1 - t0)
    if is_explicit():
        i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    tl.store(LANES + i, timing.laneid(i))
    tl.store(WARPS + i, timing.warpid(i))
    tl.store(SMS + tl.program_id(0), timing.smid())


@both
def test_timing(explicit, rng):
    times = poison(torch.empty(3, dtype=torch.int64, device=DEVICE))
    lanes, warps = (poison(torch.empty(128, dtype=torch.int32, device=DEVICE)) for _ in range(2))
    sms = poison(torch.empty(64, dtype=torch.int32, device=DEVICE))
    launch(timing_kernel, times, lanes, warps, sms, explicit=explicit, grid=(64,))
    # %warpid is a physical slot: one block's are distinct
    launch(timing_kernel, times, lanes, warps, torch.empty_like(sms), explicit=explicit, grid=(1,))
    cycles, cycles64, nanoseconds = times.tolist()
    assert 1_000 < cycles and abs(cycles - cycles64) < 10_000  # nanosleep may return early, hardly at once
    assert 0 < nanoseconds < 100_000_000
    assert sorted(set(lanes.tolist())) == list(range(32)) and len(set(warps.tolist())) == 4
    if explicit:
        assert lanes.tolist() == list(range(32)) * 4
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 132
    assert all(0 <= sm < multiprocessors for sm in sms.tolist()) and len(set(sms.tolist())) > 1


@triton.jit
def extern_kernel(STAMPS, SMS, TRIES):
    stamp = extern.time_and_place()
    tl.store(STAMPS + tl.program_id(0), stamp)
    tl.store(SMS + tl.program_id(0), timing.smid())
    if is_explicit():
        barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(barrier, count=1)
        tries = extern.spin_try_wait(barrier, 0, 3)
        mbarrier.arrive(barrier, count=1)
        tl.store(TRIES, tries)
        tl.store(TRIES + 1, extern.spin_try_wait(barrier, 0, 1000))
        tl.store(TRIES + 2, extern.spin_try_wait(barrier, 1, 0))
        mbarrier.invalidate(barrier)


@both
def test_extern(explicit, rng):
    stamps, sms = (
        poison(torch.empty(64, dtype=torch.int64, device=DEVICE)),
        poison(torch.empty(64, dtype=torch.int32, device=DEVICE)),
    )
    tries = poison(torch.empty(3, dtype=torch.int32, device=DEVICE))
    launch(extern_kernel, stamps, sms, tries, explicit=explicit, grid=(64,), **extern.link_options())
    assert torch.equal((stamps & 0xFFFF).int(), sms)
    moments = (stamps >> 16) & (2**48 - 1)
    assert int(moments.max() - moments.min()) < 1_000_000_000
    if explicit:  # nobody had arrived; then somebody had; no try allowed
        assert tries[0].item() == -1 and 1 <= tries[1].item() <= 1000 and tries[2].item() == -1
