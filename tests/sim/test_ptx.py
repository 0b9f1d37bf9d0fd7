"""Inline PTX on the CPU: every instruction that a shim emits has a meaning, and what the parser, the flow of control
and the meanings do. No GPU."""

import re

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from tests import test_ptx_compute as compute
from tests import test_ptx_sync as sync
from tritonkittens.inline_ptx import clc, extern, tcgen05, wgmma
from tritonkittens.inline_ptx import math as ptx_math
from tritonkittens.inline_ptx._formats import FORMATS, decode, encode, fma_to_odd
from tritonkittens.inline_ptx._meaning import NoMeaning, PtxFault, find
from tritonkittens.sim.ptx import PtxSyntaxError, execute, parse


class Pending:
    """A Wait of the fake machine: `over` says whether it has ended."""

    def __init__(self, over):
        self.over = over


class Barrier:
    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0
        self.log = []

    def init(self, count):
        self.count = self.pending = count

    def invalidate(self):
        self.log.append("invalidate")

    def arrive(self, count, remote):
        self.log.append(("arrive", count, remote))
        self.pending -= count
        self.advance()

    def expect(self, nbytes):
        self.bytes += nbytes

    def complete(self, nbytes):
        self.bytes -= nbytes
        self.advance()

    def advance(self):
        if not self.pending and not self.bytes:
            self.phase, self.pending = self.phase + 1, self.count

    def completed(self, parity):
        return self.phase & 1 != parity & 1

    def wait(self, parity, limit_ns):
        return None if self.completed(parity) else Pending(lambda: self.completed(parity) or limit_ns is not None)


class Fake:
    """A small machine: byte-addressed spaces of 64 KiB (tensor memory by cell), barriers, and a log of everything
    else."""

    def __init__(self, threads=128, first=0):
        self.tid = np.arange(first, first + threads)
        self.lane, self.warp = self.tid % 32, self.tid // 32
        self.memory = {space: np.zeros(1 << 16, np.uint8) for space in ("shared", "global")}
        self.tensor = np.zeros((2 * 128, 512, 4), np.uint8)  # of a pair of CTAs
        self.barriers, self.log, self.now = {}, [], 0

    def __getattr__(self, name):
        """What only needs to be noted."""
        return lambda *arguments, **keywords: self.log.append((name, arguments, keywords))

    def special(self, name):
        self.now += 1000
        return {"%cluster_ctarank": 1, "%globaltimer": self.now, "%smid": 7}[name]

    def static_shared(self, name, nbytes, align):
        return 4096

    def cell(self, addresses):
        """Lanes and columns of tensor memory. Those of the pair's other CTA come behind."""
        whole = addresses.astype(np.int64)
        return (whole >> 16 & 0xFFFF) + 128 * (whole // tcgen05.OTHER_TENSOR), whole & 0xFFFF

    def load(self, space, addresses, nbytes, active, order="weak", scope=""):
        places = np.where(active.reshape(-1, *[1] * (addresses.ndim - 1)), addresses, 0).astype(np.int64)
        if space == "tensor":
            return self.tensor[self.cell(places)]
        return self.memory[space][places[..., None] + np.arange(nbytes)]

    def store(self, space, addresses, data, active, order="weak", scope=""):
        assert data.dtype == np.uint8 and data.shape[:-1] == addresses.shape
        places = addresses[active].astype(np.int64)
        if space == "tensor":
            self.tensor[self.cell(places)] = data[active]
        else:
            self.memory[space][places[..., None] + np.arange(data.shape[-1])] = data[active]

    def atomic(self, space, operation, format, addresses, bits, active, order="relaxed", scope="gpu", compare=None):
        assert (space, operation, format) == ("global", "add", "f32")
        view = self.memory["global"].view(np.float32)
        np.add.at(view, addresses[active].astype(np.int64) // 4, bits.view(np.float32)[active])
        self.log.append((order, scope))
        return bits

    def barrier(self, address):
        return self.barriers.setdefault(address, Barrier())

    def wgmma(self, product):
        return product.compute(
            lambda addresses: self.memory["shared"][addresses[..., None] + np.arange(product.element_bytes)]
        )

    def window(self, addresses):
        """Shared memory of the pair's other CTA is the second half."""
        return addresses % (1 << 24) + (addresses >> 24) * (1 << 15)

    def tcgen05_issue(self, operation, thread):
        def read(space, addresses, nbytes):
            return (
                self.tensor[self.cell(addresses)]
                if space == "tensor"
                else self.memory["shared"][self.window(addresses)[..., None] + np.arange(nbytes)]
            )

        def write(space, addresses, data):
            self.tensor[self.cell(addresses)] = data

        operation.run(read, write)

    def trap(self, active):
        raise RuntimeError(f"trap in {int(active.sum())} threads")


def run(asm, constraints, *inputs, machine=None, waits=None, **keywords):
    """The outputs of a block. `waits` is called at each Wait that has not ended; without it there must be none."""
    machine = machine or Fake()
    steps = execute(parse(asm, constraints), machine, inputs, **keywords)
    try:
        while True:
            wait = next(steps)
            while wait is not None and not wait.over():
                assert waits is not None, "it waits"
                waits()
    except StopIteration as end:
        return end.value


def f32(values):
    return np.asarray(values, np.float32).view(np.uint32)


# --- every instruction has a meaning
# ----------------------------------------------------------------------------------------------------

DTYPES = {
    "bf16": compute.gl.bfloat16,
    "fp16": compute.gl.float16,
    "fp32": compute.gl.float32,
    "i8": compute.gl.int8,
    "i32": compute.gl.int32,
}


def _cases():
    """(kernel, architecture, explicit, signature, constants) of the compile tests of all shims."""
    for arch in (80, 90, 100):
        for explicit in (False, True):
            for half in ("fp16", "bf16"):
                yield (
                    compute.math_kernel,
                    arch,
                    explicit,
                    {"X": "*fp32", "H": f"*{half}", "Y": "*fp32", "Z": f"*{half}"},
                    {"SM": arch},
                )
            yield compute.convert_kernel, arch, explicit, {"X": "*fp32", "Y": "*fp32"}, {"SM": arch, "ALL": arch == 100}
            yield (
                compute.memory_kernel,
                arch,
                explicit,
                {"X": "*fp32", "Y": "*fp32", "F": "*i32", "D": "*i64"},
                {"SM": arch},
            )
            yield compute.timing_kernel, arch, explicit, {"X": "*i64"}, {}
            yield sync.mbarrier_ampere, arch, explicit, {"out": "*i32"}, {}
    for explicit in (False, True):
        yield sync.mbarrier_hopper, 90, explicit, {"out": "*i32"}, {}
        yield sync.copies, 90, explicit, {"source": "*i32", "map": "i64", "offset": "i32"}, {}
        yield sync.every_bulk_reduction, 90, explicit, {"out": "*i32"}, {}
        yield sync.specific, 90, explicit, {"map": "*i64", "address": "i64", "extent": "i32"}, {}
        yield sync.launch_control, 100, explicit, {"out": "*i32"}, {}
        yield sync.numbering, 90, explicit, {"out": "*i32"}, {}
        yield compute.tcgen05_kernel, 100, explicit, {"X": "*i32", "Y": "*i32"}, {"SM": 100}
        yield compute.tcgen05_pair, 100, explicit, {"X": "*i32"}, {}
    yield sync.launch_control_multicast, 100, False, {"out": "*i32"}, {}
    yield sync.descriptors, 90, True, {"map": "i64"}, {}
    yield compute.wgmma_plain, 90, False, {"X": "*u64"}, {}
    for kind, acc in (("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32"), ("i8", "i32")):
        for registers in (False, True):
            constants = {
                "TYPE": DTYPES[kind],
                "ACC": DTYPES[acc],
                "BITS": DTYPES[kind].primitive_bitwidth,
                "REGISTERS": registers,
            }
            yield compute.wgmma_kernel, 90, True, {"A": f"*{kind}", "B": f"*{kind}", "C": f"*{acc}"}, constants


CASES = list(_cases())
_ASM = re.compile(
    r'(?:ttg\.inline_asm|tt\.elementwise_inline_asm) "((?:[^"\\]|\\.)*)"\s*(?:\{|<\{)[^}]*?constraints = "([^"]*)"'
)


def blocks(kernel, arch, explicit, signature, constants):
    """(assembly, constraints) of every block in the kernel's TTIR or TTGIR."""
    signature = {**signature, **{name: "constexpr" for name in constants}}
    source = (
        GluonASTSource(GluonJITFunction(kernel.fn), signature, constants)
        if explicit
        else ASTSource(kernel, signature, constants)
    )
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": 4, **source.parse_options()})
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    text = str(
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    )
    found = [
        (re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), asm), constraints)
        for asm, constraints in _ASM.findall(text)
    ]
    assert len(found) == len(re.findall("inline_asm ", text)), "an operation in another syntax"
    return found


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{'explicit' if case[2] else 'plain'}"
)
def test_every_instruction_of_every_shim_has_a_meaning(case):
    found = blocks(*case)
    assert found
    for asm, constraints in found:
        parse(asm, constraints)


def test_every_wgmma_has_a_meaning():
    assert {find(multiply.mnemonic)[0].function.__name__ for multiply in compute.every_multiply()} == {
        "_mma_async_meaning"
    }
    for asm, constraints in extern.PTX.values():
        parse(asm, constraints)


GLUON_EXAMPLE = """
        {
            .reg .f32 lane<2>;
            mov.b64 {lane0, lane1}, $1;
            cvt.rn.satfinite.e4m3x2.f32 $0, lane1, lane0;
        }
        """
# Triton's own conversion to float8e4b15, with vector comparisons (triton/language/extra/cuda/utils.py)
E4B15 = """{ .reg .pred p<4>; .reg .b32 a<2>, b<2>; .reg .b16 c<4>; .reg .b16 max_val_f16; .reg .b32 max_val_f16x2;
            mov.b16 max_val_f16,   0x3F00; mov.b32 max_val_f16x2, 0x3F003F00; and.b32 a0, $1, 0x7fff7fff; and.b32 a1, $2, 0x7fff7fff;
            setp.lt.f16x2  p0|p1, a0, max_val_f16x2; setp.lt.f16x2  p2|p3, a1, max_val_f16x2; mov.b32 {c0, c1}, a0; mov.b32 {c2, c3}, a1;
            selp.b16  c0, c0, max_val_f16, p0; selp.b16  c1, c1, max_val_f16, p1; selp.b16  c2, c2, max_val_f16, p2;
            selp.b16  c3, c3, max_val_f16, p3; mov.b32 a0, {c0, c1}; mov.b32 a1, {c2, c3}; mad.lo.u32 a0, a0, 2, 0x00800080;
            mad.lo.u32 a1, a1, 2, 0x00800080; lop3.b32 b0, $1, 0x80008000, a0, 0xea; lop3.b32 b1, $2, 0x80008000, a1, 0xea;
            prmt.b32 $0, b0, b1, 0x7531; }"""


def test_blocks_of_others(rng):
    x = rng.standard_normal((2, 128)).astype(np.float32) * 100
    (out,) = run(GLUON_EXAMPLE, "=h,l", f32(x[0]).astype(np.uint64) | f32(x[1]).astype(np.uint64) << np.uint64(32))
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint16)
    np.testing.assert_array_equal(out, expected[0] | expected[1] << 8)
    (out,) = run("mov.b32 $0, { $1, $2 };", "=r,h,h", np.full(128, 0x1234, np.uint16), np.full(128, 0xABCD, np.uint16))
    assert (out == 0xABCD1234).all()
    # 1.0, -2.0 (clamped to 1.875), 0.5, 0: e4b15 is float16's upper byte with one bit of the exponent moved out
    (out,) = run(E4B15, "=r,r,r", np.full(128, 0xC0003C00, np.uint32), np.full(128, 0x00003800, np.uint32))
    assert (out == 0x0070FE78).all()


# --- syntax and flow
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, asm, message",
    [
        (
            NoMeaning,
            "{ frobnicate.b32 $0, $1; }",
            "'frobnicate.b32 $0, $1' has no meaning on the CPU, in the PTX block: { frobnicate",
        ),
        (NoMeaning, "cvt.rn.f16x2.e9m9x2 $0, $1;", "cvt.rn.f16x2.e9m9x2"),
        (NoMeaning, "ld.param.b32 $0, [$1];", "'ld.param.b32 $0, [$1]' has no meaning"),
        (PtxSyntaxError, "mov.b32 $0, nowhere;", "'nowhere' is not declared, in the PTX block: mov.b32 $0, nowhere;"),
        (PtxSyntaxError, "mov.b32 $0, $5;", "$5: there are 2 operands"),
        (PtxSyntaxError, "{ mov.b32 $0, $1;", "a { without its }"),
        (PtxSyntaxError, "mov.b32 $0, $1; }", "a } without its {"),
        (PtxSyntaxError, "mov.b32 $0, $1", "no ; after"),
        (PtxSyntaxError, "bra NOWHERE;", "no such label"),
        (PtxSyntaxError, "{ .reg .b32 a, a; }", "is no name or is there twice"),
        (PtxSyntaxError, "{ .reg .v2 a; }", "declaration"),
        (PtxSyntaxError, "@$0 mov.b32 $0, 1;", "no predicate"),
        (PtxSyntaxError, "{ { .reg .b32 inner; } mov.b32 $0, inner; }", "'inner' is not declared"),
    ],
)
def test_what_cannot_be_parsed_is_named(error, asm, message):
    with pytest.raises(error, match=re.escape(message)):
        parse(asm, "=r,r")


def test_scopes_labels_predicates_and_divergence(rng):
    """Collatz: every thread leaves its loop when it likes; a scope hides an outer name and label."""
    asm = """{ .reg .pred p, odd; .reg .b32 n, t; // comment ; with a semicolon
        mov.b32 n, $1; mov.u32 $0, 0;
        LOOP: setp.eq.u32 p, n, 1; @p bra END;
        { .reg .b32 t; and.b32 t, n, 1; setp.ne.u32 odd, t, 0; @odd mad.lo.u32 n, n, 3, 1; @!odd shr.u32 n, n, 1; bra SKIP; trap; SKIP: }
        add.u32 $0, $0, 1; bra.uni LOOP; /* not
        here */ END: }"""
    start = rng.integers(1, 100, 128).astype(np.uint32)

    def collatz(n):
        return 0 if n == 1 else 1 + collatz(3 * n + 1 if n % 2 else n // 2)

    (out,) = run(asm, "=r,r", start)
    assert out.tolist() == [collatz(int(n)) for n in start]
    with pytest.raises(PtxFault, match=r"'bra.uni LOOP' was taken 4 times, in the PTX block: \{ .reg"):
        run(asm, "=r,r", np.full(128, 27), step_limit=3)


def test_operands(rng):
    a, b = (rng.integers(0, 2**32, 128, dtype=np.uint32) for _ in range(2))
    # tied: $2 is $0; the other input starts the second output
    out = run("add.u32 $0, $2, $4; xor.b32 $1, $1, $0;", "=r,=r,0,1,r", a, b, b)
    np.testing.assert_array_equal(out[0], a + b)
    np.testing.assert_array_equal(out[1], b ^ (a + b))
    x = rng.standard_normal(128).astype(np.float32)
    (out,) = run("mul.rn.f32 $0, $1, 0f40400000;", "=f,f", x)
    np.testing.assert_array_equal(out.view(np.float32), x * np.float32(3))
    (out,) = run("add.f32 $0, $1, 1.5; // $$ stays", "=f,f", x)
    np.testing.assert_array_equal(out.view(np.float32), x + np.float32(1.5))
    low, high, word = run(
        "mov.b64 {$0, $1}, $3; mov.b64 $2, {$0, $1};", "=r,=r,=l,l", a.astype(np.uint64) << np.uint64(32) | b
    )
    np.testing.assert_array_equal((low, high, word), (b, a, a.astype(np.uint64) << np.uint64(32) | b))
    (out,) = run("{ .shared .align 1024 .b8 buffer[2048]; mov.u32 $0, buffer; }", "=r")
    assert (out == 4096).all()
    machine = Fake(first=96, threads=64)
    (out,) = run("mov.u32 $0, %tid.x;", "=r", machine=machine)
    np.testing.assert_array_equal(out, np.arange(96, 160))
    (out,) = run("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }", "=r", machine=machine)
    assert np.flatnonzero(out).tolist() == [0, 32]
    with pytest.raises(PtxFault, match="1 operands for the 2 inputs"):
        run("mov.b32 $0, $1;", "=r,r,r", a)


INTEGERS = {
    "add.u32 $0, $1, $2;": lambda a, b: a + b,
    "sub.s32 $0, $1, $2;": lambda a, b: a - b,
    "mul.lo.u32 $0, $1, $2;": lambda a, b: a * b,
    "mul.hi.u32 $0, $1, $2;": lambda a, b: a * b >> 32,
    "max.s32 $0, $1, $2;": lambda a, b: max(signed(a), signed(b)),
    "min.u32 $0, $1, $2;": min,
    "div.s32 $0, $1, $2;": lambda a, b: (
        abs(signed(a)) // abs(signed(b)) * (1 if (signed(a) < 0) == (signed(b) < 0) else -1)
    ),
    "rem.u32 $0, $1, $2;": lambda a, b: a % b,
    "shr.s32 $0, $1, 35;": lambda a, b: signed(a) >> 31,
    "shl.b32 $0, $1, 7;": lambda a, b: a << 7,
    "shr.b32 $0, $1, 32;": lambda a, b: 0,
    "lop3.b32 $0, $1, $2, 0xff00ff00, 0xe2;": lambda a, b: (a & b) | (~b & 0xFF00FF00),
    "prmt.b32 $0, $1, $2, 0x9f40;": lambda a, b: (
        (a & 255) | (b & 255) << 8 | (0xFF0000 if b >> 31 else 0) | (0xFF000000 if a >> 15 & 1 else 0)
    ),
    "popc.b32 $0, $1;": lambda a, b: bin(a).count("1"),
    "clz.b32 $0, $1;": lambda a, b: 32 - a.bit_length(),
    "{ .reg .b64 w; mul.wide.u32 w, $1, $2; shr.u64 w, w, 17; cvt.u32.u64 $0, w; }": lambda a, b: a * b >> 17,
    "cvt.s32.s8 $0, $1;": lambda a, b: (a & 255) - (a & 128) * 2,
    "{ .reg .pred p, q; setp.lt.s32 p, $1, $2; setp.hi.and.u32 q, $1, 5, !p; selp.b32 $0, 3, 4, q; }": lambda a, b: (
        4 - (a > 5 and signed(a) >= signed(b))
    ),
}


def signed(a):
    return a - 2**32 if a >> 31 else a


@pytest.mark.parametrize("asm", INTEGERS)
def test_integers(asm, rng):
    a, b = (
        rng.integers(0, 2**32, 128, dtype=np.uint32),
        rng.integers(1, 2**32, 128, dtype=np.uint32) >> rng.integers(0, 30, 128).astype(np.uint32) | 1,
    )
    (out,) = run(asm, "=r,r,r", a, b)
    assert out.tolist() == [INTEGERS[asm](int(x), int(y)) % 2**32 for x, y in zip(a, b)]


# --- numbers
# ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("f64", "tf32", "f32")] + ["ue8m0"])
def test_every_encoding_comes_back(name):
    bits = np.arange(1 << (8 if name == "ue8m0" else FORMATS[name].bits))
    values = decode(name, bits)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(encode(name, values[finite], "rz" if name == "ue8m0" else "rn"), bits[finite])
    torch_types = {
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "ue8m0": torch.float8_e8m0fnu,
    }
    if name in torch_types:
        words = torch.from_numpy(bits.astype(np.int16 if len(bits) > 256 else np.uint8)).view(torch_types[name])
        np.testing.assert_array_equal(values, words.double().numpy())


def test_rounding(rng):
    """To nearest as torch rounds; directed: the neighbour on the named side; stochastic: up where the random bits and
    the fraction make a carry."""
    x = (rng.standard_normal(20000) * 10.0 ** rng.integers(-9, 6, 20000)).astype(np.float32)
    for name, kind in (("f16", torch.float16), ("bf16", torch.bfloat16), ("e5m2", torch.float8_e5m2)):
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(x).to(kind).double().numpy()
        np.testing.assert_array_equal(decode(name, encode(name, x)), expected)
    inside = x[np.abs(x) < 448]
    np.testing.assert_array_equal(
        decode("e4m3", encode("e4m3", inside)), torch.from_numpy(inside).to(torch.float8_e4m3fn).double().numpy()
    )
    low, high, cut = (decode("e4m3", encode("e4m3", inside, how)) for how in ("rm", "rp", "rz"))
    assert (low <= inside).all() and (inside <= high).all() and (np.abs(cut) <= np.abs(inside)).all()
    near = decode("e4m3", encode("e4m3", inside))
    np.testing.assert_array_equal(near, np.where(near < inside, low, high))
    # 1 + 3/8 of an ulp of e4m3: up from 160 = 256 - 96 on
    random = np.arange(256)
    up = decode("e4m3", encode("e4m3", np.full(256, 1 + 3 / 64), "rs", random=random, random_bits=8)) > 1
    np.testing.assert_array_equal(up, random >= 160)
    for name, most in (("e4m3", 448), ("e5m2", 57344), ("e2m1", 6)):
        np.testing.assert_array_equal(
            decode(name, encode(name, np.array([1e6, -np.inf, np.inf]), satfinite=True)), [most, -most, most]
        )
    ulp = 2.0**-10
    np.testing.assert_array_equal(
        encode("tf32", np.array([1 + ulp / 2, -1 - ulp / 2, 1 + ulp * 3 / 4]), "rna"), f32([1 + ulp, -1 - ulp, 1 + ulp])
    )
    np.testing.assert_array_equal(encode("tf32", np.array([1 + 2.0**-11]), "rn"), f32([1.0]))
    assert (
        encode("ue8m0", np.array([1.0, 3.0, 2.0**-130, np.nan]), "rp").tolist() == [127, 129, 0, 255]
        and encode("ue8m0", np.array([3.0]), "rz") == 128
    )


def test_fma_rounds_once(rng):
    """Against exact fractions, at magnitudes where the float64 sum is not exact."""
    from fractions import Fraction

    a, b = (rng.standard_normal(2000).astype(np.float32) for _ in range(2))
    c = (
        -a.astype(np.float64) * b * (1 + rng.integers(-4, 5, 2000) * 2.0**-24) * 2.0 ** rng.integers(-40, 40, 2000)
    ).astype(np.float32)
    (out,) = run("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c, machine=Fake(2000))
    out = out.view(np.float32)
    for x, y, z, got in zip(a, b, c, out):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        gap = abs(Fraction(float(got)) - exact)
        for neighbour in (np.nextafter(got, np.float32(np.inf)), np.nextafter(got, np.float32(-np.inf))):
            assert gap <= abs(Fraction(float(neighbour)) - exact)
    assert fma_to_odd(np.float64(1), np.float64(1), np.float64(2.0**-60)) == 1 + 2.0**-52


REFERENCES = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,
    "fma_relu": lambda a, b, c: np.maximum(a * b + c, 0),
    "add_f32x2": np.add,
    "mul_f32x2": np.multiply,
    "fma_f32x2": lambda a, b, c: a * b + c,
    "max3": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "min3": lambda a, b, c: np.minimum(np.minimum(a, b), c),
}
SHORT = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


@pytest.mark.parametrize(
    "name, kind", [(name, kind) for name, table in ptx_math.INSTRUCTIONS.items() for kind in table]
)
def test_math(name, kind, rng):
    """The whole block of the shim, against float64."""
    mnemonic = ptx_math.INSTRUCTIONS[name][kind][0]
    function = REFERENCES[name]
    count = {np.fmin: 2}.get(function) or (
        function.nin if isinstance(function, np.ufunc) else function.__code__.co_argcount
    )
    asm, pack = (ptx_math.f32x2_asm if mnemonic.endswith("f32x2") else ptx_math.direct_asm)(mnemonic, count)
    values = rng.standard_normal((count, 2, 128))
    values = np.abs(values) + 0.1 if name in ("lg2", "rsqrt", "sqrt") else values
    bits = encode(SHORT[kind], values)
    values = decode(SHORT[kind], bits)
    with np.errstate(all="ignore"):
        expected = encode(SHORT[kind], function(*values))
    if kind == "fp32":
        constraints = ",".join(["=f"] * pack + ["f"] * (pack * count))
        got = run(asm, constraints, *(bits[k, n] for k in range(count) for n in range(pack)))
        expected = expected[:pack]
    else:
        (got,) = run(
            asm,
            ",".join(["=r"] + ["r"] * count),
            *(bits[k, 0].astype(np.uint32) | bits[k, 1].astype(np.uint32) << 16 for k in range(count)),
        )
        got = np.stack([got & 0xFFFF, got >> 16])
    # float64 rounds a sum of far-apart numbers once more than the fused reference: one unit at most
    difference = np.abs(np.stack(got).astype(np.int64) - expected.astype(np.int64))
    assert difference.max() <= (1 if name.startswith("fma") else 0)


def test_special_numbers():
    tiny, nan, inf = 2.0**-130, np.nan, np.inf
    one = Fake(1)

    def unary(asm, x):
        return run(asm, "=f,f", f32([x]), machine=one)[0].view(np.float32)[0]

    assert unary("ex2.approx.ftz.f32 $0, $1;", -130.0) == 0 and unary("ex2.approx.f32 $0, $1;", -130.0) == np.float32(
        tiny
    )
    assert unary("lg2.approx.ftz.f32 $0, $1;", tiny) == -inf and unary("rcp.approx.ftz.f32 $0, $1;", -tiny) == -inf
    assert np.isnan(unary("sqrt.approx.ftz.f32 $0, $1;", -1.0)) and unary("rsqrt.approx.ftz.f32 $0, $1;", 0.0) == inf
    assert unary("add.ftz.f32 $0, $1, 0f00000000;", -tiny) == 0 and unary("add.sat.f32 $0, $1, $1;", 3.0) == 1
    assert unary("max.f32 $0, $1, 1.0;", nan) == 1 and np.isnan(unary("max.NaN.f32 $0, $1, 1.0;", nan))
    assert np.signbit(unary("add.rm.f32 $0, $1, -1.0;", 1.0)) and not np.signbit(
        unary("mul.sat.f32 $0, $1, 0f80000000;", 1.0)
    )
    # 2**-131 is flushed, 2**1 is not
    (out,) = run("ex2.approx.ftz.bf16x2 $0, $1;", "=r,r", np.array([0xC3033F80], np.uint32), machine=one)
    assert out[0] == 0x00004000
    assert np.signbit(unary("min.f32 $0, $1, 0f80000000;", 0.0)) and not np.signbit(
        unary("max.f32 $0, $1, 0f80000000;", 0.0)
    )
    # NaN, and 1/4 - 1/2
    (out,) = run("fma.rn.relu.f16x2 $0, $1, $1, $1;", "=r,r", np.array([0xFE00B800], np.uint32), machine=one)
    assert out[0] == 0x7FFF0000
    (out,) = run("cvt.rzi.s32.f32 $0, $1;", "=r,f", np.float32([1e20]), machine=one)
    assert out[0] == 0x7FFFFFFF


def test_conversions(rng):
    from tritonkittens.inline_ptx.convert import FORMS

    x = (rng.standard_normal((8, 128)) * 3).astype(np.float32)
    bits = f32(x)
    tensor = torch.from_numpy(x)
    (out,) = run(FORMS["narrow16"][0]("cvt.rn.bf16x2.f32"), FORMS["narrow16"][1], *bits[:2])
    expected = tensor[:2].bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(out, expected[0] | expected[1] << 16)
    (out,) = run(FORMS["narrow8_f32"][0]("cvt.rn.satfinite.relu.e5m2x2.f32"), FORMS["narrow8_f32"][1], *bits[:4])
    expected = tensor[:4].clamp(min=0).to(torch.float8_e5m2).view(torch.uint8).numpy()
    np.testing.assert_array_equal(out.view(np.uint8).reshape(128, 4).T, expected)
    back = run(FORMS["widen8"][0]("cvt.rn.f16x2.e5m2x2"), FORMS["widen8"][1], out)
    halves = (
        np.stack([back[0] & 0xFFFF, back[0] >> 16, back[1] & 0xFFFF, back[1] >> 16]).astype(np.uint16).view(np.float16)
    )
    np.testing.assert_array_equal(halves, torch.from_numpy(expected).view(torch.float8_e5m2).half().numpy())
    (out,) = run(FORMS["narrow4"][0]("cvt.rn.satfinite.e2m1x2.f32"), FORMS["narrow4"][1], *bits)
    values = run(FORMS["widen4"][0]("cvt.rn.f16x2.e2m1x2"), FORMS["widen4"][1], out)
    got = np.stack([part for word in values for part in (word & 0xFFFF, word >> 16)]).astype(np.uint16).view(np.float16)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(np.abs(got), grid[np.abs(np.abs(x)[..., None] - grid).argmin(-1)])
    # stochastic: bits 0 cut off, all bits round up whatever is not exact
    random = np.zeros((4, 128), np.uint32)
    (down,) = run(FORMS["stochastic8"][0]("cvt.rs.satfinite.e4m3x4.f32"), FORMS["stochastic8"][1], *bits[:4], *random)
    np.testing.assert_array_equal(down.view(np.uint8).reshape(128, 4).T, encode("e4m3", x[:4], "rz", True))
    random = rng.integers(0, 2**32, (2, 128), dtype=np.uint32)
    (out,) = run(FORMS["stochastic16"][0]("cvt.rs.bf16x2.f32"), FORMS["stochastic16"][1], *bits[:2], *random)
    np.testing.assert_array_equal(
        np.stack([out & 0xFFFF, out >> 16]), (bits[:2].astype(np.uint64) + (random & 0xFFFF)) >> np.uint64(16)
    )


# --- memory and synchronisation
# ---------------------------------------------------------------------------------------------------------


def test_memory(rng):
    from tritonkittens.inline_ptx.memory import access, load_asm, store_asm

    machine = Fake()
    words = rng.integers(0, 2**32, 512, dtype=np.uint32)
    machine.memory["global"][1024 : 1024 + 2048] = words.view(np.uint8)
    addresses = 1024 + 16 * np.arange(128, dtype=np.uint64)
    mask = rng.integers(0, 2, 128, dtype=np.uint32)
    asm = load_asm(access("load", 32, 4, prefetch="128B", policy=True), 32, 4, True, True)
    out = run(asm, "=&r,=&r,=&r,=&r,l,r,l", addresses, mask, 5, machine=machine)
    np.testing.assert_array_equal(np.stack(out, 1), words.reshape(128, 4) * mask[:, None])
    run(
        store_asm(access("store", 64, 2), 2, True, False),
        "=r,l,l,l,r",
        addresses + 4096,
        addresses,
        ~addresses,
        mask,
        machine=machine,
    )
    stored = machine.memory["global"].view(np.uint64)[640:896].reshape(128, 2)
    np.testing.assert_array_equal(stored, np.stack([addresses, ~addresses], 1) * mask[:, None])
    (out,) = run("ld.shared.s8 $0, [$1-2];", "=r,r", 2 + np.arange(128, dtype=np.uint32), machine=machine)
    run(
        "{ @$2 st.shared::cta.f32 [$0+8], $1; }",
        "r,f,b",
        4 * np.arange(128, dtype=np.uint32),
        1.5,
        mask,
        machine=machine,
    )
    np.testing.assert_array_equal(machine.memory["shared"][8:520].view(np.float32), 1.5 * mask)
    run("red.release.sys.global.add.v2.f32 [$0], {$1, $2};", "l,f,f", np.full(128, 32768), 1.0, 2.0, machine=machine)
    np.testing.assert_array_equal(machine.memory["global"].view(np.float32)[8192:8194], [128, 256])
    assert machine.log[-1] == ("release", "sys")


def test_mbarriers():
    machine = Fake()
    run(
        "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.init.shared::cta.b64 [$0], 4; }",
        "r,r",
        64,
        machine.tid,
        machine=machine,
    )
    bar = machine.barriers[64]
    assert bar.count == 4
    from tritonkittens.inline_ptx import mbarrier
    from tritonkittens.inline_ptx._asm import issued

    run(issued("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "warp", 90), "r,r", 64, 100, machine=machine)
    assert bar.bytes == 400 and bar.pending == 0 and bar.log == [("arrive", 4, False)]
    for scope in ("cta", "cluster"):
        (done,) = run(mbarrier.poll_text.fn("try_wait", scope, 90, 50), "=r,r,r", 64, 0, machine=machine)
        assert not done.any()
    asked = []

    def arrive():
        asked.append(bar.phase)
        bar.complete(400)

    run(mbarrier.wait_text.fn("cta", 90), "r,r", 64, 0, machine=machine, waits=arrive)
    assert asked == [0] and bar.phase == 1
    run(mbarrier.wait_text.fn("cta", 80), "r,r", 64, 0, machine=machine)
    (done,) = run(mbarrier.poll_text.fn("test_wait", "cta", 90, 0), "=r,r,r", 64, 0, machine=machine)
    assert (done == 1).all()
    with pytest.raises(RuntimeError, match="trap in 128 threads"):
        run(mbarrier.wait_or_trap_text.fn(5000, "cta", 90), "r,r", 64, 1, machine=machine)
    run(mbarrier.arrive_remote_text.fn(3, "cta", 90, "cluster"), "r,r", 64, 2, machine=machine)
    assert machine.barriers[2 << 24 | 64].log == [("arrive", 3, True)]
    asm, constraints = extern.PTX["tritonkittens_spin_try_wait"]
    assert (run(asm, constraints, 64, 1, 5, machine=machine)[0] == 0xFFFFFFFF).all() and (
        run(asm, constraints, 64, 0, 5, machine=machine)[0] == 1
    ).all()
    assert (run(*extern.PTX["tritonkittens_time_and_place"], machine=machine)[0] & np.uint64(0xFFFF) == 7).all()


def test_copies_reach_the_machine():
    from tritonkittens.inline_ptx import tma

    machine = Fake()
    run(tma.load_text.fn(2, True, True, "cta", 90), "r,l,r,r,r,r,l", 1024, 1 << 40, 64, 8, -3, 5, 9, machine=machine)
    assert machine.log.pop() == (
        "tensor_copy",
        ("load", 1 << 40, (8, -3), 1024),
        {"thread": 0, "barrier": 64, "multicast": 5},
    )
    run(tma.store_text.fn(1, "add", False, "warp", 90), "l,r,r", 1 << 40, 1024, 8, machine=machine)
    assert [entry[2]["thread"] for entry in machine.log] == [0, 32, 64, 96] and machine.log.pop()[2][
        "reduction"
    ] == "add"
    run(tma.reduce_bulk_text.fn("add", "bf16", True, "cta", 90), "l,r,r,l", 1 << 40, 1024, 64, 3, machine=machine)
    assert machine.log.pop() == (
        "bulk_copy",
        (("global", 1 << 40), ("shared", 1024), 64),
        {"thread": 0, "reduction": ("add", "bf16")},
    )
    run(
        "{ fence.proxy.async.shared::cta; cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 1; }",
        "",
        machine=machine,
    )
    kind, _, wait = machine.log[-3:]
    assert kind[1][0] == "proxy.async.shared::cta" and wait[1][:2] == (1, True)
    answer = clc.encode_answer((3, 4, 5))
    machine.memory["shared"][16:32] = answer
    assert (run(clc.first_ctaid_text.fn(1), "=r,r", 16, machine=machine)[0] == 4).all()


# --- matrices
# ---------------------------------------------------------------------------------------------------------------------------


def stored(matrix, swizzle, k_major):
    """(bytes, leading, stride): a [rows, k] matrix as the shims describe it, by the layout's definition: panels of
    `swizzle` (16 without) bytes of the contiguous axis with all of the other in each; 16-byte units exchanged by the
    row."""
    tile = matrix if k_major else matrix.T
    rows, columns = tile.shape
    size, panel = tile.itemsize, swizzle or 16
    data = (
        np.ascontiguousarray(tile)
        .view(np.uint8)
        .reshape(rows, columns * size // panel, panel)
        .transpose(1, 0, 2)
        .reshape(-1, panel)
    )
    if swizzle:
        units = data.reshape(len(data), panel // 16, 16)
        row = np.arange(len(data)) * panel // 128 % (panel // 16)
        data = np.stack([units[n][np.arange(panel // 16) ^ row[n]] for n in range(len(data))])
    return data.reshape(-1), *wgmma.operand_strides(rows, columns, size, swizzle, k_major)


WORDS = {
    "f16": np.uint16,
    "bf16": np.uint16,
    "tf32": np.uint32,
    "e4m3": np.uint8,
    "e5m2": np.uint8,
    "s8": np.uint8,
    "u8": np.uint8,
}


def random_operand(kind, shape, rng):
    """(words, values): small integers, so that every product and sum is exact."""
    values = rng.integers(0 if kind == "u8" else -4, 5, shape)
    return (
        values.astype(np.uint8) if kind in ("s8", "u8") else encode(kind, values.astype(np.float64)).astype(WORDS[kind])
    ), values


@pytest.mark.parametrize(
    "kind, d, swizzle, trans",
    [
        ("bf16", "f32", 128, False),
        ("bf16", "f32", 128, True),
        ("f16", "f16", 64, True),
        ("f16", "f32", 32, False),
        ("f16", "f32", 0, True),
        ("bf16", "f32", 0, False),
        ("e4m3", "f16", 64, False),
        ("s8", "s32", 32, False),
        ("u8", "s32", 0, False),
        ("tf32", "f32", 128, False),
    ],
)
@pytest.mark.parametrize("in_registers", [False, True])
def test_wgmma(kind, d, swizzle, trans, in_registers, rng):
    """Two K steps of the shims' descriptors, in two warpgroups whose A differ."""
    size = wgmma.OPERANDS[kind][0] // 8
    n, steps = 64, 2
    k = steps * 32 // size if not trans else max(steps * 32 // size, 8)
    if swizzle and not trans:
        k = max(k, swizzle // size)
    machine = Fake(256)
    (a_words, a), (b_words, b) = (random_operand(kind, shape, rng) for shape in ((2, 64, k), (n, k)))
    starts, strides = [], []
    at = 1024
    for words in (a_words[0], a_words[1], b_words):
        data, leading, stride = stored(words, swizzle, not trans)
        machine.memory["shared"][at : at + len(data)] = data
        starts.append(at)
        strides.append(wgmma.descriptor_constant(leading, stride, swizzle))
        at += -(-len(data) // 1024) * 1024
    multiply = wgmma.Multiply(n, d, kind, kind, in_registers, trans and not in_registers, trans)
    rows_of = [64, n]
    registers = [np.zeros(256, np.uint32)] * multiply.accumulators
    total = np.zeros((2, 64, n))
    for step in range(steps):
        offset = [wgmma.operand_offset(step, rows if not trans else k, size, swizzle, not trans) for rows in rows_of]
        where = slice(step * multiply.k, (step + 1) * multiply.k)
        describe = [np.uint64(strides[m] | (start + offset[m // 2] & 0x3FFFF) >> 4) for m, start in enumerate(starts)]
        left = [np.repeat(np.array(describe[:2], np.uint64), 128)]
        if in_registers:
            row, column = wgmma.fragment_places(4 // size)
            parts = np.concatenate([a_words[group][:, where][row, column] for group in range(2)])
            left = list(np.ascontiguousarray(parts).view(np.uint32)[..., 0].T)
        names = [f"${i}" for i in range(len(registers))]
        first = 2 * len(names)
        text = wgmma.mma_async_asm(
            multiply,
            names,
            [f"${first + i}" for i in range(4)] if in_registers else f"${first}",
            f"${first + len(left)}",
            "p",
        )
        asm = f"{{ .reg .pred p; setp.ne.b32 p, ${first + len(left) + 1}, 0; {text} }}"
        constraints = (
            ["=r"] * len(names)
            + [str(i) for i in range(len(names))]
            + (["r"] * 4 if in_registers else ["l"])
            + ["l", "r"]
        )
        block = parse(asm, ",".join(constraints))
        assert block.in_flight == list(range(len(names)))
        registers = run(asm, ",".join(constraints), *registers, *left, describe[2], step, machine=machine)
        total += a[:, :, where] @ b[:, where].T
    words = np.stack(registers, axis=1).reshape(2, 128, -1)
    if d == "f16":
        words = np.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(2, 128, -1)
    row, column = wgmma.accumulator_places(n)
    for group in range(2):
        values = words[group].view(np.int32) if d == "s32" else decode(d, words[group])
        np.testing.assert_array_equal(values, total[group][row, column])


def test_wgmma_faults():
    multiply = wgmma.Multiply(8, "f32", "bf16", "bf16")
    asm = (
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; "
        + wgmma.mma_async_asm(multiply, [f"${i}" for i in range(4)], "$4", "$5", "p")
        + " }"
    )
    constraints = "=f,=f,=f,=f,l,l,r"
    with pytest.raises(
        PtxFault,
        match="A's matrix descriptor differs between the threads of one instruction: 0 and 1; in the PTX block",
    ):
        run(asm, constraints, np.arange(128), 0, 0)
    with pytest.raises(PtxFault, match="64 threads are no whole warpgroups"):
        run(asm, constraints, 0, 0, 0, machine=Fake(64))
    assert (
        parse(
            asm.replace(" }", " wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"), constraints
        ).in_flight
        == []
    )


@pytest.mark.parametrize(
    "kind, operand, d, m, swizzle",
    [
        ("f16", "bf16", "f32", 128, 128),
        ("f16", "f16", "f16", 64, 64),
        ("tf32", "tf32", "f32", 128, 32),
        ("i8", "s8", "s32", 64, 0),
    ],
)
@pytest.mark.parametrize("a_in_tmem", [False, True])
def test_tcgen05(kind, operand, d, m, swizzle, a_in_tmem, rng):
    """A product into tensor memory with accumulation, then loaded by the four warps."""
    machine, n = Fake(), 32
    size = tcgen05.OPERAND_BITS[operand] // 8
    k = max(32, swizzle) // size
    (a_words, a), (b_words, b) = (random_operand(operand, shape, rng) for shape in ((m, k), (n, k)))
    describe, at = [], 1024
    for words in (a_words, b_words):
        data, leading, stride = stored(words, swizzle, True)
        machine.memory["shared"][at : at + len(data)] = data
        describe.append(tcgen05.descriptor_constant(leading, stride, swizzle) | at >> 4)
        at += -(-len(data) // 1024) * 1024
    lane = np.arange(m) if m == 128 else np.arange(64) % 16 + np.arange(64) // 16 * 32
    if a_in_tmem:
        machine.tensor[lane, 100:108] = np.ascontiguousarray(a_words[:, : 32 // size]).view(np.uint8).reshape(m, 8, 4)
    negated = d != "s32"
    instruction = tcgen05.instruction_descriptor.fn(kind, m, n, operand, None, d, negate_a=negated)
    assert tcgen05.decode_instruction(instruction, kind)["n"] == n
    text = f"tcgen05.mma.cta_group::1.kind::{kind} [$0], {'[$1]' if a_in_tmem else '$1'}, $2, $3, accumulate;"
    asm = (
        ".reg .pred issue, accumulate; elect.sync _|issue, 0xffffffff; setp.ne.b32 accumulate, $4, 0; "
        "setp.lt.and.u32 issue, $5, 32, issue;"
    )
    asm = f"{{ {asm} @issue {text} }}"
    left = 100 if a_in_tmem else describe[0]
    for accumulate in (0, 1):
        run(
            asm,
            f"r,{'r' if a_in_tmem else 'l'},l,r,r,r",
            40,
            left,
            describe[1],
            instruction,
            accumulate,
            machine.tid,
            machine=machine,
        )
    loaded = tcgen05.transfer_asm("ld", "32x32b", [f"${i}" for i in range(n)], f"${n}", False, 0)
    out = np.stack(run(loaded, ",".join(["=r"] * n + ["r"]), 40, machine=machine), axis=1)[lane]
    values = out.view(np.int32) if d == "s32" else decode(d, out)
    product = a[:, : 32 // size] @ b[:, : 32 // size].T
    np.testing.assert_array_equal(values, 2 * product * (-1 if negated else 1))
    with pytest.raises(PtxFault, match="belong to no field|sparsity"):
        tcgen05.decode_instruction(instruction | 1 << 29, kind)


def block_scaled_operand(kind, rows, rng):
    """Words of 32 bytes a row, words of four scales a row, and for each first scale the scaled numbers."""
    known = tcgen05.SCALED_KINDS[kind]
    name = next(iter(known.operands))
    words = rng.integers(0, 256, (rows, 32)).astype(np.uint8) & (0xFF if name == "e2m1" else 0xBF)
    scales = rng.integers(120, 134, (rows, 4)).astype(np.uint8) & (0xFF if known.ue8m0 else 0x7E)
    codes = np.stack([words & 15, words >> 4], -1).reshape(rows, 64) if name == "e2m1" else words
    factors = decode(known.scales, scales)
    exact = {
        first: decode(name, codes) * np.repeat(factors[:, first : first + known.scales_of_step], known.block, axis=1)
        for first in range(0, 4, known.scales_of_step)
    }
    return words, scales, exact


@pytest.mark.parametrize("kind", tcgen05.SCALED_KINDS)
@pytest.mark.parametrize("ctas, n", [(1, 40), (2, 96)])
def test_tcgen05_with_block_scales(kind, ctas, n, rng):
    """Each CTA of a pair has its rows of A and their scales, half the columns of B, and the scales of all of them."""
    machine, known = Fake(), tcgen05.SCALED_KINDS[kind]
    a, scales_a, exact_a = block_scaled_operand(kind, 128 * ctas, rng)
    b, scales_b, exact_b = block_scaled_operand(kind, n, rng)
    describe, at = [], 1024
    for words in (a, b):
        parts = np.split(words, ctas)
        for cta, part in enumerate(parts):
            data, leading, stride = stored(part, 32, True)
            machine.memory["shared"][at + (cta << 15) :][: len(data)] = data
        describe.append(tcgen05.descriptor_constant(leading, stride, 32) | at >> 4)
        at += 8192
    lane = np.arange(128)
    for cta in range(ctas):
        for row, scales in enumerate(scales_a[128 * cta : 128 * (cta + 1)]):
            machine.tensor[128 * cta + row % 32 + 32 * np.arange(4), 300 + row // 32] = scales
        for column, scales in enumerate(scales_b):
            machine.tensor[128 * cta + column % 32 + 32 * np.arange(4), 320 + column // 32] = scales
    name, wanted = next(iter(known.operands)), 0
    asm = (
        f"{{ .reg .pred accumulate, issue; setp.ne.b32 accumulate, $6, 0; setp.eq.u32 issue, $7, 0; @issue "
        f"tcgen05.mma.cta_group::{ctas}.kind::{known.name} [$0], $1, $2, $3, [$4], [$5], accumulate; }}"
    )
    for turn, (x, y) in enumerate(zip(exact_a, reversed(exact_b))):  # A and B may use different scales of a word
        code = tcgen05.scaled_instruction_descriptor.fn(kind, 128 * ctas, n, name, name, x, ctas, b_scale_id=y)
        assert tcgen05.decode_scaled_instruction(code, kind, ctas)["b_scale_id"] == y
        run(asm, "r,l,l,r,r,r,r,r", 40, *describe, code, 300, 320, turn, machine.tid, machine=machine)
        wanted = wanted + exact_a[x] @ exact_b[y].T
    out = machine.tensor[: 128 * ctas, 40 : 40 + n].copy().view(np.float32)[..., 0]
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    machine.tensor[lane[64:96], 320] ^= 1
    with pytest.raises(PtxFault, match="copies of block scales in the lanes of the four warps differ"):
        run(asm, "r,l,l,r,r,r,r,r", 40, *describe, code, 300, 320, 0, machine.tid, machine=machine)
    for wrong in (code | 1 << 2, code ^ 1 << 23, code | 1 << 31):
        with pytest.raises(PtxFault, match="belong to no field"):
            tcgen05.decode_scaled_instruction(wrong, kind, ctas)


@pytest.mark.parametrize("shape", tcgen05.SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_tensor_memory_round_trip(shape, half, rng):
    """A store, then a load, gives back what was stored; all cells differ, and lie in the warp's lanes."""
    words = 8
    machine, values = Fake(), rng.integers(0, 2**32, (words, 128), dtype=np.uint32)
    store = tcgen05.transfer_asm("st", shape, [f"${1 + i}" for i in range(words)], "$0", half, 64)
    load = tcgen05.transfer_asm("ld", shape, [f"${i}" for i in range(words)], f"${words}", half, 64)
    run(store, ",".join(["r"] * (words + 1)), 16, *values, machine=machine)
    np.testing.assert_array_equal(run(load, ",".join(["=r"] * words + ["r"]), 16, machine=machine), values)
    with pytest.raises(PtxFault, match="warp 0 reaches lanes 0 to 31, not 64"):
        run(load, ",".join(["=r"] * words + ["r"]), 64 << 16, machine=machine)
    row, column = tcgen05.transfer_cells(shape, words, np.arange(32), 64)
    assert len(set(zip(row.ravel().tolist(), column.ravel().tolist()))) == 32 * words and row.max() < (
        32 if shape == "32x32b" else 16
    )
    if shape == "16x256b":  # as the accumulator fragments of mma and wgmma
        expected = wgmma.accumulator_places(16)
        np.testing.assert_array_equal((row, column), (expected[0][:32], expected[1][:32]))


def test_tensor_memory_copy(rng):
    machine = Fake()
    data = rng.integers(0, 256, (32, 16)).astype(np.uint8)
    bits, leading, stride = stored(data, 0, True)
    machine.memory["shared"][: len(bits)] = bits
    asm = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1; }"
    run(asm, "r,l,r", 8, tcgen05.descriptor_constant(leading, stride, 0), machine.tid, machine=machine)
    for warp in range(4):
        np.testing.assert_array_equal(machine.tensor[32 * warp : 32 * warp + 32, 8:12].reshape(32, 16), data)
    # of a pair: each CTA from its shared memory to its tensor memory
    machine.memory["shared"][1 << 15 : (1 << 15) + len(bits)] = bits[::-1]
    pair = asm.replace("cta_group::1", "cta_group::2")
    run(pair, "r,l,r", 40, tcgen05.descriptor_constant(leading, stride, 0), machine.tid, machine=machine)
    assert (machine.tensor[:128, 40:44] == machine.tensor[:128, 8:12]).all()
    assert (machine.tensor[128:160, 40:44].reshape(32, 16) == data.reshape(-1)[::-1].reshape(32, 16)).all()
    assert not machine.tensor[128:, :40].any()
    with pytest.raises(NoMeaning, match="which lanes tcgen05.shift moves"):
        run("tcgen05.shift.cta_group::1.down [$0];", "r", 0, machine=machine)
