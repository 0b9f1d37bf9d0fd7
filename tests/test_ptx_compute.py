"""inline_ptx: wgmma, tcgen05, math, convert, memory, timing, extern. No GPU: every shim is compiled and assembled for
the architectures it claims.
"""

import re
import subprocess

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory

from tritonkittens.inline_ptx import bits as ptx_bits
from tritonkittens.inline_ptx import convert, extern, memory, shared, tcgen05, timing, wgmma
from tritonkittens.inline_ptx import math as ptx_math
from tritonkittens.inline_ptx._asm import is_explicit

pytestmark = pytest.mark.usefixtures("compiled_anew")


def build(kernel, signature, constants=None, arch=90, explicit=False, options=None):
    """The compiled kernel, as plain Triton or as an explicit kernel; constexprs are added to the signature."""
    constants = constants or {}
    signature = {**signature, **{name: "constexpr" for name in constants}}
    if explicit:
        source = GluonASTSource(GluonJITFunction(kernel.fn), signature, constants)
    else:
        source = triton.compiler.ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, **(options or {})})


def refusal(*arguments, **keywords):
    """What the compiler says about a kernel that it refuses: the innermost error's message."""
    with pytest.raises(CompilationError) as caught:
        build(*arguments, **keywords)
    error = caught.value
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def missing(compiled, *mnemonics):
    """The mnemonics that the kernel's PTX does not contain."""
    return [mnemonic for mnemonic in mnemonics if mnemonic not in compiled.asm["ptx"]]


def sass(compiled, tmp_path):
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    return subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-sass", str(tmp_path / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@triton.jit
def iota(N: tl.constexpr):
    if is_explicit():
        return gl.arange(0, N, gl.BlockedLayout([4], [32], [4], [0]))
    else:
        return tl.arange(0, N)


both = pytest.mark.parametrize("explicit", [False, True], ids=["plain", "explicit"])

# --- math
# ---------------------------------------------------------------------------------------------------------------------------


@triton.jit
def math_kernel(X, H, Y, Z, SM: tl.constexpr):
    i = iota(512)
    x = tl.load(X + i)
    a = ptx_math.ex2(x) + ptx_math.lg2(x) + ptx_math.rcp(x) + ptx_math.rsqrt(x) + ptx_math.sqrt(x)
    a += (
        ptx_math.sin(x)
        + ptx_math.cos(x)
        + ptx_math.tanh(x)
        + ptx_math.neg(x)
        + ptx_math.add(x, 1.5)
        + ptx_math.sub(x, x)
        + ptx_math.mul(x, x)
        + ptx_math.fma(x, x, x)
    )
    if SM >= 100:
        a += (
            ptx_math.add_f32x2(x, x)
            + ptx_math.mul_f32x2(x, x)
            + ptx_math.fma_f32x2(x, x, x)
            + ptx_math.max3(x, x, a)
            + ptx_math.min3(x, x, a)
        )
    tl.store(Y + i, a)
    h = tl.load(H + i)
    b = ptx_math.fma(h, h, h) + ptx_math.fma_relu(h, h, h) + ptx_math.neg(h)
    if h.dtype == tl.float16 or SM >= 90:
        b += ptx_math.ex2(h) + ptx_math.tanh(h) + ptx_math.add(h, h) + ptx_math.sub(h, h) + ptx_math.mul(h, h)
    tl.store(Z + i, b)


@both
@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_math(arch, half, explicit):
    compiled = build(
        math_kernel, {"X": "*fp32", "H": f"*{half}", "Y": "*fp32", "Z": f"*{half}"}, {"SM": arch}, arch, explicit
    )
    expected = [
        table["fp32"][0] for table in ptx_math.INSTRUCTIONS.values() if "fp32" in table and table["fp32"][1] <= arch
    ]
    expected += [table[half][0] for table in ptx_math.INSTRUCTIONS.values() if half in table and table[half][1] <= arch]
    assert missing(compiled, *expected) == []


@triton.jit
def math_refused(X, NAME: tl.constexpr):
    x = tl.load(X + tl.arange(0, 128))
    if NAME == "bf16":
        y = ptx_math.ex2(x.to(tl.bfloat16))
    elif NAME == "f32x2":
        y = ptx_math.add_f32x2(x, x)
    elif NAME == "type":
        y = ptx_math.lg2(x.to(tl.float16))
    else:
        y = ptx_math.fma(x, x.to(tl.float16), x)
    tl.store(X + tl.arange(0, 128), y.to(tl.float32))


@pytest.mark.parametrize(
    "arch, name, message",
    [
        (80, "bf16", "ex2.approx.ftz.bf16x2 needs sm_90 or newer; this kernel is compiled for sm_80"),
        (90, "f32x2", "add.rn.f32x2 needs sm_100 or newer; this kernel is compiled for sm_90"),
        (90, "type", r"lg2\(fp16\): the operands must all have one type, of fp32"),
        (90, "mixed", r"fma\(fp32, fp16, fp32\): the operands must all have one type"),
    ],
)
def test_math_refusals(arch, name, message):
    assert re.search(message, refusal(math_refused, {"X": "*fp32"}, {"NAME": name}, arch))


# --- convert
# ------------------------------------------------------------------------------------------------------------------------


@triton.jit
def convert_kernel(X, Y, SM: tl.constexpr, ALL: tl.constexpr):
    i = iota(1024)
    x = tl.load(X + i)
    y = convert.to_bf16(x).to(tl.float32) + convert.to_bf16(x, "rz", True).to(tl.float32)
    y += (
        convert.to_f16(x).to(tl.float32)
        + convert.to_f16(x, "rz").to(tl.float32)
        + convert.to_f16(x, relu=True).to(tl.float32)
    )
    y += convert.to_tf32(x) + convert.bf16_to_f32(convert.to_bf16(x))
    y += ptx_bits.funnel_shift_left(i.to(tl.uint32), i.to(tl.uint32), 3).to(tl.float32)
    r = i.to(tl.uint32)
    y += convert.to_e2m1x8_by_halves((x, y, x, y, x, y, x, y)).to(tl.float32)
    y += convert.to_e2m1x8_stochastic_by_halves((x, y, x, y, x, y, x, y), (r, r, r, r)).to(tl.float32)
    if SM >= 90:
        y += convert.to_tf32(x, "rn") + convert.to_tf32(x, "rz", relu=True)
        h = convert.e4m3_to_f16(convert.to_e4m3(x)) + convert.e4m3_to_f16(
            convert.to_e4m3(x.to(tl.float16), relu=True), relu=True
        )
        h += convert.e5m2_to_f16(convert.to_e5m2(x, relu=True)) + convert.e5m2_to_f16(convert.to_e5m2(x.to(tl.float16)))
        y += h.to(tl.float32)
    if SM >= 100:
        low, high = convert.e2m1x2_to_f16(convert.to_e2m1x2(x, y))
        y += (low + high).to(tl.float32) + convert.to_e2m1x8((x, y, x, y, x, y, x, y)).to(tl.float32)
        y += convert.ue8m0_to_bf16(convert.to_ue8m0(x)).to(tl.float32) + convert.ue8m0_to_bf16(
            convert.to_ue8m0(x, "rp")
        ).to(tl.float32)
    if ALL:
        bits = i.to(tl.uint32)
        y += convert.to_bf16_stochastic(x, bits).to(tl.float32) + convert.to_f16_stochastic(x, bits, relu=True).to(
            tl.float32
        )
        h = convert.e4m3_to_f16(convert.to_e4m3_stochastic(x, bits)) + convert.e5m2_to_f16(
            convert.to_e5m2_stochastic(x, bits)
        )
        low, high = convert.e2m1x2_to_f16(convert.to_e2m1x2_stochastic(x, y, bits), relu=True)
        y += (h + low + high).to(tl.float32)
    tl.store(Y + i, y)


CONVERSIONS = {
    80: [
        "cvt.rn.bf16x2.f32",
        "cvt.rz.relu.bf16x2.f32",
        "cvt.rn.f16x2.f32",
        "cvt.rz.f16x2.f32",
        "cvt.rn.relu.f16x2.f32",
        "cvt.rna.tf32.f32",
        "and.b32",
        "shf.l.wrap.b32",
    ],
    90: [
        "cvt.rn.tf32.f32",
        "cvt.rz.relu.tf32.f32",
        "cvt.rn.satfinite.e4m3x2.f32",
        "cvt.rn.satfinite.relu.e4m3x2.f16x2",
        "cvt.rn.f16x2.e4m3x2",
        "cvt.rn.relu.f16x2.e4m3x2",
        "cvt.rn.satfinite.relu.e5m2x2.f32",
        "cvt.rn.satfinite.e5m2x2.f16x2",
        "cvt.rn.f16x2.e5m2x2",
    ],
    100: [
        "cvt.rn.satfinite.e2m1x2.f32",
        "cvt.rn.f16x2.e2m1x2",
        "cvt.rz.satfinite.ue8m0x2.f32",
        "cvt.rp.satfinite.ue8m0x2.f32",
        "cvt.rn.bf16x2.ue8m0x2",
    ],
}
STOCHASTIC = [
    "cvt.rs.bf16x2.f32",
    "cvt.rs.relu.f16x2.f32",
    "cvt.rs.satfinite.e4m3x4.f32",
    "cvt.rs.satfinite.e5m2x4.f32",
    "cvt.rs.satfinite.e2m1x4.f32",
]


@both
@pytest.mark.parametrize("arch", [80, 90, 100, 103, 120])
def test_convert(arch, explicit):
    stochastic = arch in (100, 103)
    compiled = build(convert_kernel, {"X": "*fp32", "Y": "*fp32"}, {"SM": arch, "ALL": stochastic}, arch, explicit)
    expected = [name for lowest, names in CONVERSIONS.items() if lowest <= arch for name in names] + (
        STOCHASTIC if stochastic else []
    )
    assert missing(compiled, *expected) == []


@triton.jit
def convert_refused(X, NAME: tl.constexpr):
    i = tl.arange(0, 128)
    x = tl.load(X + i)
    if NAME == "fp8":
        y = convert.to_e4m3(x).to(tl.float32)
    elif NAME == "rs":
        y = convert.to_bf16_stochastic(x, i.to(tl.uint32)).to(tl.float32)
    elif NAME == "fp4":
        y = convert.to_e2m1x2(x, x).to(tl.float32)
    elif NAME == "rounding":
        y = convert.to_bf16(x, "up").to(tl.float32)
    elif NAME == "relu":
        y = convert.to_tf32(x, "rna", True)
    elif NAME == "words":
        y = ptx_bits.funnel_shift_left(x, i.to(tl.uint32), 1).to(tl.float32)
    else:
        y = convert.to_bf16(x.to(tl.float16)).to(tl.float32)
    tl.store(X + i, y)


@pytest.mark.parametrize(
    "arch, name, message",
    [
        (80, "fp8", "cvt.rn.satfinite.e4m3x2.f32 needs sm_89 or newer; this kernel is compiled for sm_80"),
        (120, "rs", "cvt.rs.bf16x2.f32 needs sm_100a or sm_103a; this kernel is compiled for sm_120"),
        (90, "fp4", "cvt.rn.satfinite.e2m1x2.f32 needs sm_100a, sm_103a or sm_120a; this kernel is compiled for sm_90"),
        (90, "words", r"funnel_shift_left\(fp32, uint32\): the operands must be uint32"),
        (90, "rounding", "rounding is 'rn', 'rz', not 'up'"),
        (90, "relu", "relu with rounding 'rna' is False, not True"),
        (90, "type", r"cvt.rn.bf16x2.f32 converts \(fp32\), not \(fp16\)"),
    ],
)
def test_convert_refusals(arch, name, message):
    assert re.search(message, refusal(convert_refused, {"X": "*fp32"}, {"NAME": name}, arch))


# --- memory
# -------------------------------------------------------------------------------------------------------------------------


@triton.jit
def memory_kernel(X, Y, F, D, SM: tl.constexpr):
    i = iota(512)
    a, b, c, d = memory.load(X + 4 * i, 4, mask=i < 300, l1="no_allocate", prefetch="128B")
    e, f = memory.load_nc(X + 2 * i, 2, cache="cg")
    g = memory.load(X + i, cache="cs", policy=12345)
    memory.store(Y + 4 * i, (a + g, b + e, c + f, d), mask=i < 200, l1="evict_first")
    memory.store(Y + i, g, cache="wt", policy=12345)
    memory.prefetch(X + i + 4096, "L1")
    memory.prefetch(X + i + 8192)
    memory.prefetch(X + i + 8192, "L2::evict_last")
    memory.store(F + 4, memory.atom_cas(F + 3, 0, 5, "acquire") + memory.atom_cas(F + 5, 2, -1, "release", "sys"))
    p, q = memory.load(D + 2 * i, 2)
    memory.store(D + 2 * i, (q, p))
    flag = memory.load_acquire(F)
    memory.store_release(F + 1, flag + 1, "sys", "cta")
    memory.store_release(F + 2 + i, i)
    memory.red_add(F + 3, 1, "s32", "release", "gpu", "warp")
    memory.red_add(Y + 5, 1.5, issuer="cta")
    if SM >= 90:
        memory.red_add(Y + 8, (1.0, 2.0, 3.0, 4.0), issuer="warpgroup")
        flag = memory.load_acquire(F, "cluster")
        if is_explicit():
            memory.red_add(Y + i, a)
            memory.red_add(Y + 4 * i, (a, b, c, d), scope="sys")
            memory.red_add(F + 2 * i, (i, i), "bf16x2")
    if SM >= 100:
        r0, r1, r2, r3, r4, r5, r6, r7 = memory.load(X + 8 * i, 8, l2="evict_first", l1="evict_last")
        memory.store(Y + 8 * i, (r7, r6, r5, r4, r3, r2, r1, r0), l2="evict_last")
        s0, s1, s2, s3 = memory.load_nc(D + 4 * i, 4)
        memory.store(D + 4 * i, (s3, s2, s1, s0))


@both
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_memory(arch, explicit):
    compiled = build(
        memory_kernel, {"X": "*fp32", "Y": "*fp32", "F": "*i32", "D": "*i64"}, {"SM": arch}, arch, explicit
    )
    expected = [
        "ld.global.L1::no_allocate.L2::128B.v4.b32",
        "ld.global.cg.nc.v2.b32",
        "ld.global.cs.L2::cache_hint.b32",
        "st.global.L1::evict_first.v4.b32",
        "st.global.wt.L2::cache_hint.b32",
        "prefetch.global.L1 ",
        "prefetch.global.L2 ",
        "prefetch.global.L2::evict_last ",
        "atom.acquire.gpu.global.cas.b32 ",
        "atom.release.sys.global.cas.b32 ",
        "ld.global.v2.b64",
        "ld.acquire.gpu.global.b32",
        "st.release.sys.global.b32",
        "st.release.gpu.global.b32",
        "red.release.gpu.global.add.s32",
        "red.relaxed.gpu.global.add.f32",
    ]
    expected += ["red.relaxed.gpu.global.add.v4.f32", "ld.acquire.cluster.global.b32"] if arch >= 90 else []
    expected += (
        ["red.relaxed.sys.global.add.v4.f32", "red.relaxed.gpu.global.add.noftz.v2.bf16x2"]
        if arch >= 90 and explicit
        else []
    )
    if arch >= 100:
        expected += [
            "ld.global.L1::evict_last.L2::evict_first.v8.b32",
            "st.global.L2::evict_last.v8.b32",
            "ld.global.nc.v4.b64",
        ]
    assert missing(compiled, *expected) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("load", 16, 2), "load of 2 words of 16 bits: words have 32 or 64 bits"),
        (("load", 32, 3), "load of 3 words of 32 bits"),
        (("load", 64, 8), "together at most 128 bits"),
        (("load_nc", 32, 1, "lu"), "cache='lu': it is one of 'ca', 'cg', 'cs'"),
        (("store", 32, 1, "ca"), "cache='ca': it is one of 'wb'"),
        (("load", 32, 1, "cg", "evict_last"), "exclude each other"),
        (
            ("load", 32, 4, "", "", "evict_last"),
            "load of 128 bits with l2='evict_last': an L2 priority belongs to 256-bit accesses",
        ),
        (("store", 32, 4, "", "", "", "64B"), "only a load fetches ahead"),
    ],
)
def test_access_rules(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        memory.access(*arguments)


@triton.jit
def memory_refused(X, H, NAME: tl.constexpr):
    i = iota(512)
    if NAME == "wide":
        memory.load(X + 8 * i, 8)
    elif NAME == "half":
        memory.load(H + i)
    elif NAME == "plain tile" or NAME == "issuer":
        memory.red_add(X + i, tl.load(X + i), issuer="thread" if NAME == "plain tile" else "warp")
    elif NAME == "replicated":
        j = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
        memory.red_add(X + j, tl.load(X + j))
    elif NAME == "kind":
        memory.red_add(X, 1.0, "f16")
    elif NAME == "type":
        memory.red_add(X, 1, "f32")
    elif NAME == "vector":
        memory.red_add(X, (1.0, 1.0))
    elif NAME == "scope":
        memory.load_acquire(X, "device")
    elif NAME == "order":
        memory.atom_cas(X, 0, 1, "strong")
    elif NAME == "place":
        memory.atom_cas(X, 0, 1, "acquire", "device")
    else:
        memory.prefetch(X, "L3")


@pytest.mark.parametrize(
    "arch, explicit, name, message",
    [
        (90, False, "wide", r"ld.global.v8.b32 \(256 bits\) needs sm_100 or newer"),
        (90, False, "half", "global access to fp16: a word has 32 or 64 bits; cast the pointer"),
        (90, False, "plain tile", "red_add on a tile in a plain Triton kernel: several threads may hold one element"),
        (90, True, "replicated", "this layout gives an element to several threads"),
        (90, True, "issuer", "on a tile with issuer='warp': the threads that hold the elements execute it"),
        (90, False, "kind", "red_add of 1 x 'f16': the type is one of f32"),
        (90, False, "type", "red_add of int32 as f32: the operand must be fp32"),
        (80, False, "vector", "red.relaxed.global.add.v2.f32 needs sm_90 or newer"),
        (90, False, "scope", "scope='device': it is one of 'cta', 'cluster', 'gpu', 'sys'"),
        (90, False, "order", "atom_cas with order='strong': it is 'relaxed', 'acquire' or 'release'"),
        (90, False, "place", "atom_cas with scope='device': it is one of 'cta', 'cluster', 'gpu', 'sys'"),
        (90, False, "level", "prefetch to 'L3': the level is one of 'L1', 'L2'"),
    ],
)
def test_memory_refusals(arch, explicit, name, message):
    assert re.search(message, refusal(memory_refused, {"X": "*fp32", "H": "*fp16"}, {"NAME": name}, arch, explicit))


# --- timing and extern
# --------------------------------------------------------------------------------------------------------------


@triton.jit
def timing_kernel(X):
    i = iota(512)
    timing.nanosleep(100)
    tl.store(
        X, timing.clock64() + timing.globaltimer() + timing.clock() + timing.smid() + timing.warpid() + timing.laneid()
    )
    tl.store(X + i, timing.clock64(i) + timing.laneid(i) + timing.warpid(i))


@both
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_timing(arch, explicit):
    compiled = build(timing_kernel, {"X": "*i64"}, {}, arch, explicit)
    assert (
        missing(compiled, "%clock64", "%globaltimer", "%clock;", "%smid", "%warpid", "%laneid", "nanosleep.u32") == []
    )


@triton.jit
def extern_kernel(X, Y, SM: tl.constexpr):
    tl.store(X, extern.time_and_place())
    if SM >= 90:
        if is_explicit():
            barrier = gl.allocate_shared_memory(gl.int64, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        else:
            barrier = shared.allocate(8, 8)
        tl.store(Y, extern.spin_try_wait(barrier, 0, 100))


@both
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_extern(arch, explicit):
    compiled = build(
        extern_kernel, {"X": "*i64", "Y": "*i32"}, {"SM": arch}, arch, explicit, extern.link_options({"num_warps": 4})
    )
    assert (
        missing(
            compiled, "%globaltimer", "%smid", *(["mbarrier.try_wait.parity.shared::cta.b64"] if arch >= 90 else [])
        )
        == []
    )
    assert ".extern" not in compiled.asm["ptx"].replace(".extern .shared", "")


def test_link_options_adds_to_the_callers():
    given = {"num_warps": 8, "extern_libs": {"libdevice": "/other.bc"}}
    assert extern.link_options(given)["extern_libs"] == {"libdevice": "/other.bc", extern.NAME: extern.LIBRARY}
    assert given == {"num_warps": 8, "extern_libs": {"libdevice": "/other.bc"}}


# --- wgmma
# --------------------------------------------------------------------------------------------------------------------------

PTX_ENTRY = (
    ".visible .entry k{}() {{\n.reg .b32 d<128>, a<4>; .reg .f32 f<128>; .reg .b64 x, y; .reg .pred p;\n{}\nret;\n}}\n"
)


def assemble(entries, arch, tmp_path):
    """Runs ptxas on one file with one entry function for each text; returns its complaints."""
    source = f".version 9.0\n.target sm_{arch}a\n.address_size 64\n" + "".join(
        PTX_ENTRY.format(i, text) for i, text in enumerate(entries)
    )
    (tmp_path / "all.ptx").write_text(source)
    command = [
        knobs.nvidia.ptxas_blackwell.path,
        f"--gpu-name=sm_{arch}a",
        "-O0",
        str(tmp_path / "all.ptx"),
        "-o",
        str(tmp_path / "all.cubin"),
    ]
    # Its infos say that -O0 serialises wgmma; only errors matter here.
    return [
        line
        for line in subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
        if " info " not in line
    ]


def every_multiply():
    for group in wgmma.GROUPS:
        for a in group:
            for b in group:
                for d in wgmma.OPERANDS[a][1]:
                    for n in wgmma.valid_n(a):
                        yield wgmma.Multiply(n, d, a, b)
                        yield wgmma.Multiply(n, d, a, b, a_in_registers=True)
    for a, d in (("f16", "f16"), ("bf16", "f32")):
        yield wgmma.Multiply(8, d, a, a, trans_a=True)
        yield wgmma.Multiply(8, d, a, a, trans_b=True, scale_a=-1)
        yield wgmma.Multiply(8, d, a, a, a_in_registers=True, trans_b=True, scale_b=-1)
    yield wgmma.Multiply(8, "s32", "s8", "u8", saturate=True)


def test_every_wgmma_assembles(tmp_path):
    """Every N of every type, A shared and in registers: ptxas checks shape, types, number of registers and operands."""
    texts, mnemonics = [], set()
    for multiply in every_multiply():
        names = [f"{'f' if multiply.d == 'f32' else 'd'}{i}" for i in range(multiply.accumulators)]
        a = ["a0", "a1", "a2", "a3"] if multiply.a_in_registers else "x"
        texts.append(wgmma.mma_async_asm(multiply, names, a, "y", "p"))
        mnemonics.add(multiply.mnemonic)
    assert len(mnemonics) >= 32 * 12 + 18 * 4
    assert assemble(texts, 90, tmp_path) == []


@pytest.mark.parametrize(
    "multiply, message",
    [
        (
            wgmma.Multiply(12, "f32", "bf16", "bf16"),
            "wgmma m64n12 f32 += bf16 x bf16: N is a multiple of 8 from 8 to 256, not 12",
        ),
        (wgmma.Multiply(264, "f32", "bf16", "bf16"), "N is a multiple of 8 from 8 to 256, not 264"),
        (wgmma.Multiply(40, "s32", "s8", "s8"), "N is 8, 16, 24 or a multiple of 16 from 32 to 256, not 40"),
        (wgmma.Multiply(8, "f16", "bf16", "bf16"), "bf16 operands accumulate in f32"),
        (wgmma.Multiply(8, "f32", "bf16", "f16"), "both operands come from one of"),
        (
            wgmma.Multiply(8, "f32", "e4m3", "e5m2", trans_b=True),
            "only 16-bit operands may be MN-major; e4m3 must be contiguous in K",
        ),
        (wgmma.Multiply(8, "f32", "f16", "f16", True, trans_a=True), "a register operand has no major-ness"),
        (wgmma.Multiply(8, "f32", "f16", "f16", scale_a=2), "the immediates are 1 or -1"),
        (wgmma.Multiply(8, "s32", "s8", "s8", scale_b=-1), "integer operands cannot be negated"),
        (wgmma.Multiply(8, "f32", "f16", "f16", saturate=True), "only integer accumulators saturate"),
    ],
)
def test_wgmma_rules(multiply, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        wgmma.check(multiply)


def test_operand_strides():
    # 128 x 64 bf16, 128-byte swizzle: one panel of 128 rows x 128 bytes; groups of 8 rows are 1024 bytes.
    assert wgmma.operand_strides(128, 64, 2, 128, True) == (128 * 128, 1024)
    assert [wgmma.operand_offset(step, 128, 2, 128, True) for step in range(5)] == [0, 32, 64, 96, 128 * 128]
    # K along 64 rows: a step of 16 of them; the next 64 columns of MN are a panel away.
    assert wgmma.operand_strides(64, 128, 2, 128, False) == (64 * 128, 1024)
    assert wgmma.operand_offset(1, 64, 2, 128, False) == 16 * 128
    # No swizzling: panels of 16 bytes; the roles of the two strides are exchanged for MN-major operands.
    assert wgmma.operand_strides(64, 32, 2, 0, True) == (64 * 16, 128)
    assert wgmma.operand_strides(64, 32, 2, 0, False) == (128, 64 * 16)
    assert wgmma.descriptor_constant(16, 1024, 128) == 1 << 16 | 64 << 32 | 1 << 62
    for call, message in (
        (lambda: wgmma.operand_strides(64, 24, 2, 128, True), "a row in panels of 128 bytes"),
        (lambda: wgmma.operand_strides(64, 64, 2, 48, True), "swizzle=48: it is 0, 32, 64 or 128 bytes"),
        (lambda: wgmma.descriptor_constant(8, 1024, 128), "leading_bytes=8: it is a multiple of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@triton.jit
def wgmma_kernel(A, B, C, TYPE: tl.constexpr, ACC: tl.constexpr, BITS: tl.constexpr, REGISTERS: tl.constexpr):
    K: tl.constexpr = 1024 // BITS
    storage: tl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    load: tl.constexpr = gl.BlockedLayout([1, 128 // BITS], [4, 8], [4, 1], [1, 0])
    wide: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 256 // BITS])
    narrow: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 256 // BITS])
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, load)), gl.arange(0, K, gl.SliceLayout(0, load))
    a = gl.allocate_shared_memory(TYPE, [64, K], storage)
    b = gl.allocate_shared_memory(TYPE, [64, K], storage)
    a.store(gl.load(A + rows[:, None] * K + columns[None, :]))
    b.store(gl.load(B + rows[:, None] * K + columns[None, :]))
    gl.barrier()
    if ACC == gl.float16:
        acc = (wgmma.pack(gl.zeros([64, 32], gl.float16, wide)), wgmma.pack(gl.zeros([64, 16], gl.float16, narrow)))
    else:
        acc = (gl.zeros([64, 32], ACC, wide), gl.zeros([64, 16], ACC, narrow))
    b0, b1 = wgmma.operand_descriptor(b, 1), wgmma.operand_descriptor(b, 1, 1)
    if REGISTERS:
        fragment = a.load(gl.DotOperandLayout(0, wide, 32 // BITS))
        if BITS < 32:
            words = wgmma.pack(fragment)
        else:
            words = fragment
        acc, words = wgmma.fence(acc), wgmma.fence(words)
        acc = wgmma.mma_async(acc, words, b0, TYPE)
        acc = wgmma.mma_async(acc, fragment, b1, step=1)
    else:
        acc = wgmma.fence(acc)
        acc = wgmma.mma_async(acc, wgmma.operand_descriptor(a, 1), b0, TYPE, scale_d=0)
        acc = wgmma.mma_async(acc, wgmma.shared_descriptor(a, 64 * 128, 1024, 128), b1, TYPE, TYPE)
    wgmma.commit_group()
    left, right = wgmma.wait_group(0, acc)
    if ACC == gl.float16:
        left, right = wgmma.unpack(left, gl.float16, wide), wgmma.unpack(right, gl.float16, narrow)
    left, right = wgmma.mma_sync((left, right), a, b, b_k_axis=1)
    rows = gl.arange(0, 64, gl.SliceLayout(1, wide))
    gl.store(C + rows[:, None] * 48 + gl.arange(0, 32, gl.SliceLayout(0, wide))[None, :], left)
    rows = gl.arange(0, 64, gl.SliceLayout(1, narrow))
    gl.store(C + rows[:, None] * 48 + 32 + gl.arange(0, 16, gl.SliceLayout(0, narrow))[None, :], right)


@pytest.mark.parametrize("registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize(
    "kind, acc, shape, instruction",
    [
        ("bf16", "fp32", "m64n48k16.f32.bf16.bf16", "HGMMA"),
        ("fp16", "fp16", "m64n48k16.f16.f16.f16", "HGMMA"),
        ("fp32", "fp32", "m64n48k8.f32.tf32.tf32", "HGMMA"),
        ("fp8e4nv", "fp32", "m64n48k32.f32.e4m3.e4m3", "QGMMA"),
        ("i8", "i32", "m64n48k32.s32.s8.s8", "IGMMA"),
    ],
)
def test_wgmma(kind, acc, shape, instruction, registers, tmp_path):
    types = {
        "bf16": gl.bfloat16,
        "fp16": gl.float16,
        "fp32": gl.float32,
        "fp8e4nv": gl.float8e4nv,
        "i8": gl.int8,
        "i32": gl.int32,
    }
    constants = {"TYPE": types[kind], "ACC": types[acc], "BITS": types[kind].primitive_bitwidth, "REGISTERS": registers}
    compiled = build(wgmma_kernel, {"A": f"*{kind}", "B": f"*{kind}", "C": f"*{acc}"}, constants, 90, True)
    assert (
        missing(
            compiled,
            f"wgmma.mma_async.sync.aligned.{shape}",
            "wgmma.fence.sync.aligned",
            "wgmma.commit_group",
            "wgmma.wait_group.sync.aligned 0",
        )
        == []
    )
    text = sass(compiled, tmp_path)
    assert text.count(f"{instruction}.64x48x") == 2 + 4  # two asynchronous, and the four K steps of mma_sync


@triton.jit
def wgmma_plain(X):
    wgmma.fence()
    wgmma.commit_group()
    wgmma.wait_group(2)
    tl.store(X, wgmma.shared_descriptor(shared.allocate(1024, 1024), 16, 1024, 128))


def test_wgmma_plain():
    compiled = build(wgmma_plain, {"X": "*u64"})
    assert (
        missing(
            compiled, "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned 2"
        )
        == []
    )


@triton.jit
def wgmma_refused(X, NAME: tl.constexpr):
    if NAME == "arch":
        wgmma.fence()
    elif NAME == "pending":
        wgmma.wait_group(8)
    elif NAME == "plain tile":
        wgmma.wait_group(0, tl.load(X + tl.arange(0, 128)))
    else:
        layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
        acc = gl.zeros([64, 16], gl.float32, layout)
        if NAME == "rows":
            acc = gl.zeros([128, 16], gl.float32, layout)
        if NAME == "half":
            acc = acc.to(gl.float16)
        if NAME == "layout":
            acc = gl.convert_layout(acc, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
        if NAME == "row-major":
            wgmma.operand_descriptor(gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout(0, 16, 2)), 1)
        elif NAME == "step" or NAME == "major":
            tile = gl.allocate_shared_memory(gl.float8e5, [64, 64], gl.NVMMASharedLayout(64, 8, 2))
            if NAME == "major":
                wgmma.operand_descriptor(tile, 0)
            else:
                wgmma.operand_descriptor(tile, 1, 2)
        elif NAME == "fragment":
            fragment = gl.zeros([64, 16], gl.bfloat16, gl.DotOperandLayout(0, layout, 1))
            wgmma.mma_async(acc, fragment, 0)
        elif NAME == "untyped":
            wgmma.mma_async(acc, 0, 0)
        else:
            wgmma.mma_async(acc, 0, 0, "bf16")


@pytest.mark.parametrize(
    "arch, explicit, name, message",
    [
        (80, False, "arch", "wgmma.fence.sync.aligned needs sm_90a; this kernel is compiled for sm_80"),
        (100, True, "arch", "wgmma.fence.sync.aligned needs sm_90a; this kernel is compiled for sm_100"),
        (
            90,
            False,
            "pending",
            r"wgmma.wait_group\(8\): the number of groups left unfinished is a constant from 0 to 7",
        ),
        (90, False, "plain tile", "takes register tiles, which only explicit kernels have"),
        (90, True, "rows", "a piece has 64 rows"),
        (90, True, "half", "float16 pairs packed to int32"),
        (90, True, "layout", "a piece has 64 rows in NVMMADistributedLayout"),
        (90, True, "major", "only 16-bit operands may be MN-major; store it contiguous in K"),
        (90, True, "row-major", "with swizzling, or in core_matrix_layout without"),
        (90, True, "step", "K=64 has 2 steps of 32 bytes"),
        (90, True, "fragment", r"it is 64 x K in DotOperandLayout\(0, accumulator layout, k_width=2\)"),
        (90, True, "untyped", "wgmma a_type=None: name one of f16"),
    ],
)
def test_wgmma_refusals(arch, explicit, name, message):
    assert re.search(message, refusal(wgmma_refused, {"X": "*fp32"}, {"NAME": name}, arch, explicit))


# --- tcgen05
# ------------------------------------------------------------------------------------------------------------------------


@triton.jit
def tcgen05_kernel(X, Y, SM: tl.constexpr):
    if is_explicit():
        place = gl.allocate_shared_memory(gl.int64, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        barrier = gl.allocate_shared_memory(gl.int64, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        operand = gl.allocate_shared_memory(gl.bfloat16, [128, 64], gl.NVMMASharedLayout(128, 16, 2))
    else:
        place, barrier, operand = shared.allocate(8, 8), shared.allocate(8, 8), shared.allocate(16384, 1024)
    tcgen05.alloc(place, 128)
    tcgen05.relinquish_alloc_permit()
    address = tl.load(X)
    a = tcgen05.shared_descriptor(operand, 16, 1024, 128)
    instruction: tl.constexpr = tcgen05.instruction_descriptor("f16", 128, 128, "bf16")
    tcgen05.cp(address, a)
    tcgen05.cp(address, a, "64x128b", "warpx2::02_13", issuer="cta")
    tcgen05.cp(address, a, "32x128b", "warpx4", "b8x16.b4x16_p64")
    tcgen05.shift(address)
    tcgen05.mma(address, a, a, instruction, "f16", accumulate=0)
    tcgen05.mma(address, address, a, instruction, "tf32", a_in_tmem=True, issuer="cta")
    tcgen05.mma(address, a, a, instruction, "f8f6f4", issuer="warpgroup")
    if SM == 100:
        tcgen05.mma(address, a, a, instruction, "i8", issuer="thread")
    tcgen05.commit(barrier)
    tcgen05.commit(barrier, 3)
    tcgen05.fence_before_thread_sync()
    tcgen05.fence_after_thread_sync()
    if is_explicit():
        descriptor = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout([128, 64], col_stride=1))
        x = tcgen05.ld(descriptor, (128, 64))
        x = tcgen05.wait_ld(x)
        layout: tl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [4, 1], [1, 0])
        tcgen05.st(address, x)
        tcgen05.st(address + 64, x, half=True)
        tcgen05.st(address, x, "16x256b")
        y = tcgen05.ld(address, (128, 64), layout, gl.int32, "16x64b", half=True)
        z = tcgen05.ld(address, (128, 64), layout, gl.int32, "16x32bx2", split=64)
        y, z = tcgen05.wait_ld((y, z))
        i, j = gl.arange(0, 128, gl.SliceLayout(1, layout)), gl.arange(0, 64, gl.SliceLayout(0, layout))
        gl.store(Y + i[:, None] * 64 + j[None, :], y + z)
    tcgen05.wait_ld()
    tcgen05.wait_st()
    tcgen05.dealloc(address, 128)


@both
@pytest.mark.parametrize("arch", [100, 103])
def test_tcgen05(arch, explicit, tmp_path):
    compiled = build(tcgen05_kernel, {"X": "*i32", "Y": "*i32"}, {"SM": arch}, arch, explicit)
    expected = [
        "alloc.cta_group::1.sync.aligned.shared::cta.b32",
        "relinquish_alloc_permit",
        "dealloc.cta_group::1.sync.aligned.b32",
        "cp.cta_group::1.128x256b",
        "cp.cta_group::1.64x128b.warpx2::02_13",
        "cp.cta_group::1.32x128b.warpx4.b8x16.b4x16_p64",
        "shift.cta_group::1.down",
        "mma.cta_group::1.kind::f16",
        "mma.cta_group::1.kind::tf32",
        "mma.cta_group::1.kind::f8f6f4",
        "commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
        "arrive::one.shared::cluster.multicast::cluster.b64",
        "fence::before_thread_sync",
        "fence::after_thread_sync",
        "wait::ld.sync.aligned",
        "wait::st.sync.aligned",
    ]
    expected += ["mma.cta_group::1.kind::i8"] if arch == 100 else []
    if explicit:
        expected += [
            "ld.sync.aligned.32x32b.x64.b32",
            "st.sync.aligned.32x32b.x64.b32",
            "st.sync.aligned.32x32b.x64.unpack::16b.b32",
            "st.sync.aligned.16x256b.x16.b32",
            "ld.sync.aligned.16x64b.x64.pack::16b.b32",
            "ld.sync.aligned.16x32bx2.x64.b32",
        ]
    assert missing(compiled, *expected) == []
    assert "UTCHMMA" in sass(compiled, tmp_path)


@triton.jit
def tcgen05_pair(X):
    """Products with block scales of a CTA pair, and the copy of their scales."""
    address = tl.load(X)
    block = tcgen05.shared_descriptor(0, 16, 128, 0)
    a = tcgen05.shared_descriptor(1024, 16, 1024, 128)
    tcgen05.cp(address, block, "32x128b", "warpx4", ctas=2)
    mxfp8: tl.constexpr = tcgen05.scaled_instruction_descriptor("mxf8f6f4", 256, 256, "e4m3", "e5m2", 3, 2)
    mxfp4: tl.constexpr = tcgen05.scaled_instruction_descriptor("mxf4", 256, 192, "e2m1", "e2m1", 2, 2)
    nvfp4: tl.constexpr = tcgen05.scaled_instruction_descriptor("mxf4nvf4", 256, 64, "e2m1", "e2m1", 0, 2)
    tcgen05.mma_scaled(address, a, a, mxfp8, address + 256, address + 264, "mxf8f6f4", 0, ctas=2)
    tcgen05.mma_scaled(address, a, a, mxfp4, address + 256, address + 264, "mxf4", issuer="cta", ctas=2)
    tcgen05.mma_scaled(address, a, a, nvfp4, address + 256, address + 264, "mxf4nvf4", issuer="warpgroup", ctas=2)


@both
@pytest.mark.parametrize("arch", [100, 103])
def test_tcgen05_of_pairs_with_block_scales(arch, explicit, tmp_path):
    compiled = build(tcgen05_pair, {"X": "*i32"}, {}, arch, explicit)
    expected = (
        "cp.cta_group::2.32x128b.warpx4",
        "mma.cta_group::2.kind::mxf8f6f4.block_scale",
        "mma.cta_group::2.kind::mxf4.block_scale",
        "mma.cta_group::2.kind::mxf4nvf4.block_scale.block16",
    )
    assert missing(compiled, *expected) == []
    code = sass(compiled, tmp_path)
    assert code.count("UTCQMMA.2CTA") == 1 and code.count("UTCOMMA.2CTA") == 2 and "UTCCP.T.S.2CTA.4x32dp128bit" in code


@triton.jit
def tcgen05_refused(X, NAME: tl.constexpr):
    if NAME == "arch":
        tcgen05.wait_ld()
    elif NAME == "int8":
        tcgen05.mma(0, 0, 0, 0, "i8")
    elif NAME == "columns":
        tcgen05.alloc(0, 48)
    elif NAME == "issuer":
        tcgen05.alloc(0, 32, "thread")
    elif NAME == "cp":
        tcgen05.cp(0, 0, "32x128b")
    elif NAME == "kind":
        tcgen05.mma(0, 0, 0, 0, "bf16")
    elif NAME == "scaled kind":
        tcgen05.mma_scaled(0, 0, 0, 0, 0, 0, "f8f6f4")
    elif NAME == "ctas":
        tcgen05.cp(0, 0, "32x128b", "warpx4", ctas=4)
    elif NAME == "layout":
        tcgen05.ld(0, (64, 32))
    else:
        tcgen05.ld(0, (128, 32))


@pytest.mark.parametrize(
    "arch, explicit, name, message",
    [
        (
            90,
            False,
            "arch",
            "tcgen05.wait::ld.sync.aligned needs sm_100a or sm_103a; this kernel is compiled for sm_90",
        ),
        (120, True, "arch", "needs sm_100a or sm_103a; this kernel is compiled for sm_120"),
        (103, False, "int8", "tcgen05.mma.cta_group::1.kind::i8 needs sm_100a; this kernel is compiled for sm_103"),
        (100, False, "columns", "tensor memory of 48 columns: allocations are a power of two from 32 to 512"),
        (100, False, "issuer", "issuer='thread': an allocation belongs to a whole warp"),
        (100, False, "cp", "shape='32x128b', multicast=''"),
        (100, False, "kind", "tcgen05.mma kind='bf16': the kind is one of f16, tf32, f8f6f4, i8"),
        (100, False, "scaled kind", "with block scales: the kind is one of mxf8f6f4, mxf4, mxf4nvf4"),
        (100, False, "ctas", "tcgen05 with ctas=4: 1, or 2 for a pair of CTAs"),
        (100, True, "layout", "only a 32x32b load of 128 rows has a default layout"),
        (100, False, "plain tile", "tcgen05.ld takes register tiles, which only explicit kernels have"),
    ],
)
def test_tcgen05_refusals(arch, explicit, name, message):
    assert re.search(message, refusal(tcgen05_refused, {"X": "*fp32"}, {"NAME": name}, arch, explicit))


def test_instruction_descriptor():
    # F32 accumulator (1 << 4), BF16 operands (1 << 7, 1 << 10), N = 256 (32 << 17), M = 128 (8 << 24).
    assert tcgen05.instruction_descriptor("f16", 128, 256, "bf16") == 1 << 4 | 1 << 7 | 1 << 10 | 32 << 17 | 8 << 24
    assert tcgen05.instruction_descriptor("f8f6f4", 64, 8, "e2m1", "e5m2", "f16", trans_b=True, negate_a=True) == (
        5 << 7 | 1 << 10 | 1 << 13 | 1 << 16 | 1 << 17 | 4 << 24
    )
    assert (
        tcgen05.instruction_descriptor("i8", 128, 32, "s8", "u8", "s32", saturate=True)
        == 1 << 3 | 2 << 4 | 1 << 7 | 4 << 17 | 8 << 24
    )
    assert tcgen05.descriptor_constant(16, 1024, 128) == 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61
    for arguments, message in (
        (("f16", 128, 24, "bf16"), "n a multiple of 16"),
        (("f16", 96, 32, "bf16"), "m is 64 or 128"),
        (("f16", 128, 32, "bf16", "f16"), "both the same"),
        (("i8", 64, 40, "s8", "s8", "s32"), "above 32: of 16"),
        (("mxf4", 128, 32, "e2m1"), "the kind is one of"),
    ):
        with pytest.raises(ValueError, match=message):
            tcgen05.instruction_descriptor(*arguments)


def test_scaled_instruction_descriptor():
    """The bits of PTX ISA's tables "Instruction descriptor format for .kind::mxf8f6f4", and for .kind::mxf4 and
    .kind::mxf4nvf4."""
    # e5m2 B (1 << 10), N = 256 (32 << 17), ue8m0 (1 << 23), M = 256 (2 << 27), scale ids of A and B (bits 29 and 4)
    assert tcgen05.scaled_instruction_descriptor("mxf8f6f4", 256, 256, "e4m3", "e5m2", 3, 2) == (
        3 << 4 | 1 << 10 | 32 << 17 | 1 << 23 | 2 << 27 | 3 << 29
    )
    fp4 = 1 << 7 | 1 << 10
    assert tcgen05.scaled_instruction_descriptor("mxf4", 128, 8, "e2m1", "e2m1", 2, b_scale_id=0) == (
        fp4 | 1 << 17 | 1 << 23 | 1 << 27 | 2 << 29
    )
    assert tcgen05.scaled_instruction_descriptor("mxf4nvf4", 256, 16, "e2m1", "e2m1", 0, 2) == fp4 | 2 << 17 | 2 << 27
    for arguments, message in (
        (("f8f6f4", 128, 128, "e4m3", "e4m3"), "the kind is one of mxf8f6f4"),
        (("mxf4", 128, 128, "e4m3", "e4m3"), "operands are e2m1"),
        (("mxf8f6f4", 64, 128, "e4m3", "e4m3"), "m is 128, n a multiple of 8"),
        (("mxf8f6f4", 256, 24, "e4m3", "e4m3", 0, 2), "m is 256, n a multiple of 16"),
        (("mxf4", 128, 128, "e2m1", "e2m1", 1), "multiples of 2 below 4"),
        (("mxf4nvf4", 128, 128, "e2m1", "e2m1", 4), "multiples of 4 below 4"),
    ):
        with pytest.raises(ValueError, match=message):
            tcgen05.scaled_instruction_descriptor(*arguments)


@pytest.mark.parametrize(
    "shape, words, message",
    [("32x32b", 3, "of 3 words a thread"), ("16x256b", 2, "of 2 words"), ("8x8b", 4, "shapes are 32x32b")],
)
def test_transfer_rules(shape, words, message):
    with pytest.raises(ValueError, match=message):
        tcgen05.transfer_asm("ld", shape, [f"r{i}" for i in range(words)], "r9", False, 0)
