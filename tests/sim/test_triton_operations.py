"""What Triton's language compiles to, by way of the compiler: every builder is known, and whole kernels give what numpy
gives. This ties the numbers that enums have in TTGIR (predicates, rounding, NaN propagation, precision, formats,
atomics, reductions) to their meaning in Python.
"""

import linecache
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import gluon_ir, ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import add2, fma2, max2, min2, mul2, sub2

import tritonkittens.sim as sim
from tritonkittens.sim.control_flow import CONTROL
from tritonkittens.sim.numbers import round_to
from tritonkittens.sim.operations import EFFECTS, VIEWS
from tritonkittens.sim.pure_operations import PURE

pytestmark = pytest.mark.filterwarnings("error:::tritonkittens")
N = 256

# ---- every builder: Triton's method → operations that it leaves in what is simulated

FLOAT = "addf subf mulf divf remf negf maximumf minimumf maxnumf minnumf extf truncf sitofp uitofp fptosi fptoui cmpf"
INTEGER = (
    "addi subi muli divsi divui remsi remui andi ori xori shli shrsi shrui maxsi minsi maxui minui extsi extui "
    "trunci cmpi bitcast select constant"
)
ARITH = {f"arith.{n}" for n in f"{FLOAT} {INTEGER}".split()}
# methods of builders whose operation is called like the method
SAME = """
tt: addptr approx_divf assert atomic_cas atomic_load atomic_rmw atomic_store atomic_poll bitcast broadcast cat clampf dot dot_scaled expand_dims
 extern_elementwise fp_to_fp gather get_num_programs get_program_id histogram int_to_ptr join load make_range map_elementwise precise_divf precise_sqrt print
 ptr_to_int reduce reshape scan splat split store trans unsplat grid_dependency_launch_dependents grid_dependency_wait
ttg: async_commit_group async_copy_global_to_local convert_layout fp4_to_fp local_alloc local_dealloc local_gather local_load local_scatter local_store
 memdesc_index memdesc_reinterpret memdesc_reshape memdesc_subslice memdesc_trans barrier warp_return warp_specialize warp_yield
ttng: async_copy_mbarrier_arrive async_tma_copy_global_to_local async_tma_copy_local_to_global async_tma_gather async_tma_reduce async_tma_scatter
 async_tma_store_wait clc_get_program_id clc_is_canceled clc_load_result clc_try_cancel cluster_barrier fence_async_shared packed_arith tmem_alloc tmem_copy
 tmem_load tmem_store tmem_subslice
math: ceil cos erf exp exp2 floor fma log log2 rsqrt sin sqrt
"""
OTHER = {
    "create_fabs": "math.absf",
    "create_iabs": "math.absi",
    "create_umulhi": "tt.mulhiui",
    "create_masked_load": "tt.load",
    "create_masked_store": "tt.store",
    "create_inline_asm": "tt.elementwise_inline_asm",
    "create_branch": "cf.br",
    "create_cond_branch": "cf.cond_br",
    "create_poison": "ub.poison",
    "create_async_wait_group": "ttg.async_wait",
    "create_mbarrier_arrive": "ttng.arrive_barrier",
    "create_mbarrier_expect": "ttng.barrier_expect",
    "create_mbarrier_init": "ttng.init_barrier",
    "create_mbarrier_inval": "ttng.inval_barrier",
    "create_mbarrier_wait": "ttng.wait_barrier",
    "create_tcgen05_commit": "ttng.tc_gen5_commit",
    "create_tcgen05_mma": "ttng.tc_gen5_mma",
    "create_tcgen05_mma_scaled": "ttng.tc_gen5_mma_scaled",
    "create_warpgroup_mma": "ttng.warp_group_dot",
    "create_warpgroup_mma_wait": "ttng.warp_group_dot_wait",
    "create_set_auto_layout": "gluon.set_auto_layout",
    "create_make_tensor_descriptor": "ttng.tensormap_create",
    "create_descriptor_load": "ttng.async_tma_copy_global_to_local",
    "create_descriptor_store": "ttng.async_tma_copy_local_to_global",
    "create_descriptor_reduce": "ttng.async_tma_reduce",
    "create_descriptor_gather": "ttng.async_tma_gather",
    "create_descriptor_scatter": "ttng.async_tma_scatter",
}
# arithmetic by Triton's own names, checked by running it below; and what leaves no operation behind: structure, types,
# and what passes take away
SHORT = """add and ashr fadd fcmp fdiv fmul fneg fp_ext fp_to_si fp_to_ui fp_trunc frem fsub icmp int_cast lshr maximumf maxnumf maxsi maxui minimumf
minnumf minsi minui mul or sdiv select shl si_to_fp srem sub udiv ui_to_fp urem xor"""
NOTHING = """assume block block_with_parent condition_op for_op if_op loc name_loc map_elementwise_ret module reduce_ret scan_ret tensor_descriptor_type
while_op yield_op warp_specialize_partitions"""
AMD = """amd_ async_copy_lds async_copy_local_to_global async_tdm buffer_ extract_slice lds_ local_load_packed_transposed scaled_ tdm_
update_tensor_descriptor warp_pipeline"""
# operations that stop a simulation with their name
UNKNOWN = (
    "experimental_fpsan_embed experimental_fpsan_unembed threadwise_inline_asm async_shared_store "
    "local_atomic_scatter_rmw"
)


def test_every_builder_of_this_triton_is_known():
    known = set(PURE) | set(VIEWS) | set(EFFECTS) | set(CONTROL)
    named = {}
    for line in SAME.replace("\n ", " ").strip().splitlines():
        dialect, _, names = line.partition(": ")
        named |= {f"create_{n}": f"{dialect}.{n}" for n in names.split()}
    assert not sorted((set(named.values()) | set(OTHER.values()) | ARITH) - known)
    methods = {n for builder in (ir.builder, gluon_ir.GluonOpBuilder) for n in dir(builder) if n.startswith("create_")}
    listed = set(named) | set(OTHER) | {f"create_{n}" for n in f"{NOTHING} {UNKNOWN}".split()}
    rest = {n.removeprefix("create_") for n in methods - listed}
    rest = {n for n in rest if re.sub("[A-Z]+$", "", n) not in SHORT.split() and not n.startswith(tuple(AMD.split()))}
    assert not rest, f"this Triton has builders that the simulator was not written for: {sorted(rest)}"
    assert listed <= methods


# ---- expressions


def kernel_of(name, lines, arguments):
    """A `@triton.jit` function of text."""
    filename = f"<{name}>"
    text = "\n".join([f"def kernel({arguments}):", *(f"    {line}" for line in lines)]) + "\n"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space = {"tl": tl, "__name__": __name__}
    exec(compile(text, filename, "exec"), space)
    return triton.jit(space["kernel"])


def evaluate(name, expressions, wide, *inputs):
    """Every expression of x, y (and z) in one kernel; the results, widened exactly, one a row."""
    lines = ["i = tl.arange(0, 256)", *(f"{v} = tl.load({v.upper()} + i)" for v in "xyz"[: len(inputs)])]
    lines += [f"tl.store(OUT + {256 * n} + i, ({e}).to(tl.{wide}))" for n, e in enumerate(expressions)]
    out = torch.full((len(expressions), N), -99, dtype=getattr(torch, wide))
    with sim.device("sm_90a"):
        kernel_of(name, lines, ", ".join(["X", "Y", "Z"][: len(inputs)]) + ", OUT")[(1,)](*inputs, out)
    return dict(zip(expressions, out.numpy()))


def trunc_quotient(x, y):
    return np.where((x < 0) != (y < 0), -(np.abs(x) // np.abs(y)), np.abs(x) // np.abs(y))


INTEGERS = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x // y": trunc_quotient,
    "x % y": lambda x, y: x - trunc_quotient(x, y) * y,
    "x & y": lambda x, y: x & y,
    "x | y": lambda x, y: x | y,
    "x ^ y": lambda x, y: x ^ y,
    "~x": lambda x, y: ~x,
    "-x": lambda x, y: -x,
    "x << (y & 7)": lambda x, y: x << (y & 7),
    "x >> (y & 7)": lambda x, y: x >> (y & 7),
    "tl.minimum(x, y)": np.minimum,
    "tl.maximum(x, y)": np.maximum,
    "x < y": np.less,
    "x <= y": np.less_equal,
    "x > y": np.greater,
    "x >= y": np.greater_equal,
    "x == y": np.equal,
    "x != y": np.not_equal,
    "tl.where(x > y, x, y - 1)": lambda x, y: np.where(x > y, x, y - 1),
    "(x > 3) & (y < 90)": lambda x, y: (x > 3) & (y < 90),
    "(x > y).to(tl.int1) ^ (x > 1)": lambda x, y: (x > y) ^ (x > 1),
    "tl.clamp(x.to(tl.float32), -2.0, 9.0)": lambda x, y: np.clip(x, -2, 9),
    "x.to(tl.int8)": lambda x, y: x,
    "x.to(tl.uint16)": lambda x, y: x,
    "x.to(tl.int64)": lambda x, y: x,
    "x.to(tl.int32)": lambda x, y: x,
    "x.to(tl.float32).to(tl.int64)": lambda x, y: np.array([int(np.float32(int(v))) for v in x], object),
    "(x & 127).to(tl.float16)": lambda x, y: x & 127,
    "(x & 127).to(tl.bfloat16)": lambda x, y: x & 127,
    "x.to(tl.float64) * 0 + 7": lambda x, y: 0 * x + 7,
}


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers(rng, name):
    """Exact, modulo the width; Python's integers are the reference."""
    dtype = np.dtype(name)
    limits = np.iinfo(dtype)
    x, y = (
        rng.integers(limits.min, limits.max, N, dtype, endpoint=True) >> rng.integers(0, limits.bits, N).astype(dtype)
        for _ in range(2)
    )
    x[:4], y[:4] = [limits.min, limits.max, limits.min, 0], [limits.max, limits.min, limits.max, limits.max]
    y = np.where(y == 0, dtype.type(3), y)
    table = INTEGERS | {"tl.abs(x)": lambda x, y: abs(x)}
    if limits.bits >= 32:
        table["tl.umulhi(x, y)"] = lambda x, y: (x % 2**limits.bits) * (y % 2**limits.bits) >> limits.bits
    if limits.bits == 64:  # beyond the range of the way back
        table = {e: fn for e, fn in table.items() if "float32" not in e or "clamp" in e}
    got = evaluate(f"integers {name}", list(table), "int64", torch.from_numpy(x), torch.from_numpy(y))
    a, b = x.astype(object), y.astype(object)
    same_width = (
        "x + y",
        "x - y",
        "x * y",
        "x // y",
        "x % y",
        "~x",
        "-x",
        "x << (y & 7)",
        "tl.abs(x)",
        "tl.umulhi(x, y)",
        "tl.where(x > y, x, y - 1)",
    )
    for expression, fn in table.items():
        cast = next((t for t in ("int8", "uint16", "int32") if expression == f"x.to(tl.{t})"), None)
        result = np.dtype(cast) if cast else dtype if expression in same_width else None
        with np.errstate(all="ignore"):
            want = np.asarray(fn(a, b))
        want = [int(v) for v in want]
        if result is not None:
            bits, signed = result.itemsize * 8, result.kind == "i"
            want = [
                (v + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1)) if signed else v % (1 << bits) for v in want
            ]
        want = [(v + 2**63) % 2**64 - 2**63 for v in want]
        assert got[expression].tolist() == want, expression


FLOATS = {
    "x + y": np.add,
    "x - y": np.subtract,
    "x * y": np.multiply,
    "x / y": np.divide,
    "-x": lambda x, y: -x,
    "tl.abs(x)": lambda x, y: np.abs(x),
    "x < y": np.less,
    "x <= y": np.less_equal,
    "x > y": np.greater,
    "x >= y": np.greater_equal,
    "x == y": np.equal,
    "x != y": np.not_equal,
    "tl.maximum(x, y)": np.fmax,
    "tl.minimum(x, y)": np.fmin,
    "tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)": np.maximum,
    "tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)": np.minimum,
    "tl.clamp(x, -1.0, 1.5)": lambda x, y: np.fmin(np.fmax(x, -1), 1.5),
    "tl.clamp(x, -1.0, 1.5, propagate_nan=tl.PropagateNan.ALL)": lambda x, y: np.clip(x, -1, 1.5),
    "tl.where(x > y, x, y)": lambda x, y: np.where(x > y, x, y),
    "x.to(tl.float8e4nv)": lambda x, y: (
        torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).double().numpy()
    ),
    "x.to(tl.float8e5)": lambda x, y: (
        torch.from_numpy(np.clip(x, -57344, 57344)).to(torch.float8_e5m2).double().numpy()
    ),
    "x.to(tl.float32)": lambda x, y: x.astype(np.float32),
    "x.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)": lambda x, y: x,
    "x.to(tl.float16)": lambda x, y: x.astype(np.float16),
    "x.to(tl.bfloat16)": lambda x, y: torch.from_numpy(x).to(torch.bfloat16).double().numpy(),
    "tl.clamp(x, -99.0, 99.0).to(tl.int8)": lambda x, y: np.trunc(np.fmin(np.fmax(x, -99), 99)),
    "tl.minimum(tl.abs(x), 1000.0).to(tl.uint32)": lambda x, y: np.trunc(np.fmin(np.abs(x), 1000.0)),
}
ONLY_32 = {
    "x.to(tl.float16, fp_downcast_rounding='rtz')": lambda x, y: round_to("f16", x, toward_zero=True),
    "x.to(tl.bfloat16, fp_downcast_rounding='rtz')": lambda x, y: round_to("bf16", x, toward_zero=True),
    "tl.fdiv(x, y, approx=True)": np.divide,
    "tl.div_rn(x, y)": np.divide,
    "tl.sqrt_rn(tl.abs(x))": lambda x, y: np.sqrt(np.abs(x)),
    "tl.fdiv(x, y, ieee_rounding=True)": np.divide,
}
FUNCTIONS = {
    "tl.exp(x)": lambda x, y: np.exp(x),
    "tl.exp2(x)": lambda x, y: np.exp2(x),
    "tl.log(x)": lambda x, y: np.log(x),
    "tl.log2(x)": lambda x, y: np.log2(x),
    "tl.sin(x)": lambda x, y: np.sin(x),
    "tl.cos(x)": lambda x, y: np.cos(x),
    "tl.sqrt(x)": lambda x, y: np.sqrt(x),
    "tl.rsqrt(x)": lambda x, y: 1 / np.sqrt(x),
    "tl.floor(x)": lambda x, y: np.floor(x),
    "tl.ceil(x)": lambda x, y: np.ceil(x),
    "tl.erf(x)": lambda x, y: torch.erf(torch.from_numpy(x)).numpy(),
    "tl.fma(x, y, x)": lambda x, y: x * y + x,
    "tl.sigmoid(tl.maximum(x, -80.0))": lambda x, y: 1 / (1 + np.exp(-np.fmax(x, -80))),
}


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_floats(rng, name):
    """With NaN, infinities, zeros of both signs, subnormal and equal numbers; rounded once."""
    kind = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}[name]
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-7, -3e-7, 1.0])
    x, y = (rng.normal(size=N) * np.exp2(rng.integers(-12, 10, N)) for _ in range(2))
    x[:64], y[:64] = np.repeat(special, 8), np.tile(special, 8)
    y[64:80] = x[64:80]
    x, y = (round_to(kind, v).astype(np.float64) for v in (x, y))
    table = FLOATS | (ONLY_32 if name == "float32" else {})
    if name != "float32":
        table.pop("x.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)")
    if name == "float64":  # Triton has no such conversion
        table = {e: fn for e, fn in table.items() if "float8" not in e}
    functions = FUNCTIONS if name in ("float32", "float64") else {}  # Triton wants these in float32
    inputs = [torch.from_numpy(v).to(getattr(torch, name)) for v in (x, y)]
    got = evaluate(f"floats {name}", [*table, *functions], "float64", *inputs)
    for expression, fn in (table | functions).items():
        with np.errstate(all="ignore"):
            want = np.asarray(fn(x, y), np.float64)
        if (
            expression in functions
            or expression in ("x + y", "x - y", "x * y", "x / y")
            or "div" in expression
            or "sqrt" in expression
        ):
            # Triton divides in float32 at least
            want = round_to("f32" if expression == "x / y" and name != "float64" else kind, want).astype(np.float64)
        close = (
            {"float32": 3e-7, "float64": 1e-12}[name] * (np.abs(want) + (0.05 if "fma" in expression else 0))
            if expression in functions
            else 0
        )
        with np.errstate(all="ignore"):
            ok = (
                (got[expression] == want)
                | (np.isnan(got[expression]) & np.isnan(want))
                | (np.abs(got[expression] - want) <= close)
            )
        assert ok.all(), (expression, x[~ok][:3], y[~ok][:3], got[expression][~ok][:3], want[~ok][:3])


@gluon.jit
def packed(X, Y, OUT):
    i = gl.arange(0, 256, layout=gl.BlockedLayout([2], [32], [4], [0]))
    x, y = gl.load(X + i), gl.load(Y + i)
    gl.store(OUT + i, add2(x, y).to(gl.float32))
    gl.store(OUT + 256 + i, sub2(x, y).to(gl.float32))
    gl.store(OUT + 512 + i, mul2(x, y).to(gl.float32))
    gl.store(OUT + 768 + i, fma2(x, y, 2.0).to(gl.float32))
    if X.dtype.element_ty != gl.float32:
        gl.store(OUT + 1024 + i, min2(x, y).to(gl.float32))
        gl.store(OUT + 1280 + i, max2(x, y).to(gl.float32))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_packed_arithmetic(rng, name):
    x, y = (torch.from_numpy(rng.normal(size=N)).to(getattr(torch, name)) for _ in range(2))
    x[3] = y[5] = float("nan")
    out = torch.full((6 if name != "float32" else 4, N), -99.0)
    with sim.device("sm_100a"):
        packed[(1,)](x, y, out)
    a, b = x.double().numpy(), y.double().numpy()
    want = np.stack([a + b, a - b, a * b, a * b + 2, np.fmin(a, b), np.fmax(a, b)])[: len(out)]
    assert np.array_equal(
        out.numpy(), round_to({"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[name], want), equal_nan=True
    )


# ---- reductions, order, shapes, random numbers


@triton.jit
def order(X, K, FOUT, IOUT):
    i = tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :]
    rows = tl.arange(0, 16)
    x = tl.load(X + i)
    k = tl.load(K + i)
    tl.store(FOUT + rows, tl.max(x, 1))
    tl.store(FOUT + 16 + rows, tl.min(x, 1))
    number = tl.where(x == x, x, 0.0)  # with NaN the result depends on the order
    tl.store(IOUT + rows, tl.argmax(number, 1))
    tl.store(IOUT + 16 + rows, tl.argmin(number, 1))
    tl.store(IOUT + 32 + rows, tl.argmax(k, 1, tie_break_left=True))
    tl.store(IOUT + 48 + rows, tl.xor_sum(k, 1))
    tl.store(IOUT + 64 + rows, tl.reduce_or(k, 1))
    tl.store(IOUT + 80 + rows, tl.sum(k, 1))
    tl.store(IOUT + 96 + rows, tl.max(k.to(tl.uint32, bitcast=True), 1).to(tl.int32, bitcast=True))
    tl.store(IOUT + 1024 + i, tl.cumsum(k, 1, reverse=True))
    tl.store(IOUT + 2048 + i, tl.cumprod(k, 0))
    tl.store(IOUT + 3072 + i, tl.sort(k, descending=True))
    tl.store(IOUT + 4096 + i, tl.flip(k, 1))
    tl.store(IOUT + 5120 + tl.arange(0, 2048), tl.interleave(k, k * 2).reshape(2048))
    tl.store(IOUT + 7168 + tl.arange(0, 16)[:, None] * 4 + tl.arange(0, 4)[None, :], tl.topk(k, 4))
    tl.store(IOUT + 7232 + tl.arange(0, 256), tl.randint(123456789, tl.arange(0, 256)))
    tl.store(
        IOUT + 7488 + tl.arange(0, 128),
        tl.cat(k.reshape(1024).gather(tl.arange(0, 64) * 3, 0), tl.arange(0, 64), can_reorder=True).to(tl.int32),
    )


def philox(seed, count):
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): the first word for the counters 0
    to count - 1."""
    mask = (1 << 32) - 1
    out = []
    for i in range(count):
        c, key = [i, 0, 0, 0], [seed & mask, seed >> 32]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
            key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
        out.append(c[0])
    return np.array(out, np.uint32).view(np.int32)


def test_reductions_scans_order_and_random_numbers(rng):
    x = rng.normal(size=(16, 64)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    x[:, 7] = x[:, 50] = 9.0  # ties
    x[:, 9] = x[:, 40] = -9.0
    k = rng.integers(-(2**31), 2**31, x.shape).astype(np.int32)
    k[:, 3] = k[:, 30] = 2**31 - 1
    fout, iout = torch.full((32,), -5.0), torch.full((7616,), -5, dtype=torch.int32)
    with sim.device("sm_90a"):
        order[(1,)](torch.from_numpy(x), torch.from_numpy(k), fout, iout)
    assert np.array_equal(fout.numpy(), np.concatenate([np.nanmax(x, 1), np.nanmin(x, 1)]))
    got = iout.numpy()
    u = k.view(np.uint32)
    want = [
        np.nanargmax(x, 1),
        np.nanargmin(x, 1),
        k.argmax(1),
        np.bitwise_xor.reduce(k, 1),
        np.bitwise_or.reduce(k, 1),
        k.sum(1, dtype=np.int32),
    ]
    want.append(u.max(1).view(np.int32))
    assert np.array_equal(got[:112].reshape(7, 16), want)
    blocks = [
        np.cumsum(k[:, ::-1], 1, dtype=np.int32)[:, ::-1],
        np.cumprod(k, 0, dtype=np.int32),
        -np.sort(-k.astype(np.int64), 1),
        k[:, ::-1],
    ]
    assert np.array_equal(got[1024:5120].reshape(4, 16, 64), blocks)
    assert np.array_equal(got[5120:7168].reshape(16, 64, 2), np.stack([k, k * np.int32(2)], -1))
    assert np.array_equal(got[7168:7232].reshape(16, 4), blocks[2][:, :4]) and np.array_equal(
        got[7232:7488], philox(123456789, 256)
    )
    assert sorted(got[7488:].tolist()) == sorted(k.reshape(-1)[np.arange(64) * 3].tolist() + list(range(64)))


# ---- products


@triton.jit
def product(A, B, C, M: tl.constexpr, N_: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N_), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + k[:, None] * N_ + n[None, :])
    tl.store(C + m[:, None] * N_ + n[None, :], tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC))


# of the norm, at least and at most
ERRORS = {"tf32": (1e-4, 3e-3), "tf32x3": (0, 2e-6), "ieee": (0, 1e-6), "bf16x3": (1e-7, 1e-4), "bf16x6": (0, 2e-6)}


@pytest.mark.parametrize("rows", [16, 64])
def test_precisions_of_products(rng, rows):
    a, b = torch.from_numpy(rng.normal(size=(rows, 64))).float(), torch.from_numpy(rng.normal(size=(64, 32))).float()
    exact = a.double() @ b.double()
    for precision, (low, high) in ERRORS.items():
        c = torch.full((rows, 32), float("nan"))
        with sim.device("sm_90a"):
            product[(1,)](a, b, c, rows, 32, 64, precision, tl.float32)
        error = float((c.double() - exact).norm() / exact.norm())
        assert low <= error <= high, (precision, error)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    "name, acc, error",
    [
        ("float16", tl.float32, 1e-6),
        ("float16", tl.float16, 2e-3),
        ("bfloat16", tl.float32, 1e-6),
        ("int8", tl.int32, 0),
        ("float8_e4m3fn", tl.float32, 1e-6),
        ("float8_e5m2", tl.float32, 1e-6),
        ("float64", tl.float64, 1e-14),
    ],
)
def test_types_of_products(rng, rows, name, acc, error):
    dtype = getattr(torch, name)
    a, b = (
        torch.from_numpy(rng.integers(-128, 128, s) if name == "int8" else rng.normal(size=s)).to(dtype)
        for s in ((rows, 64), (64, 32))
    )
    out = {"fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32, "fp64": torch.float64}[acc.name]
    c = torch.full((rows, 32), -99, dtype=out)
    with sim.device("sm_90a"):
        product[(1,)](a, b, c, rows, 32, 64, None, acc)
    exact = a.double() @ b.double()
    assert float((c.double() - exact).norm() / exact.norm()) <= error


@triton.jit
def scaled_product(
    A, SA, B, SB, C, K: tl.constexpr, FA: tl.constexpr, FB: tl.constexpr, PA: tl.constexpr, PB: tl.constexpr
):
    m, n, s = tl.arange(0, 128), tl.arange(0, 64), tl.arange(0, K // 32)
    ka, kb = tl.arange(0, K // PA), tl.arange(0, K // PB)
    a = tl.load(A + m[:, None] * (K // PA) + ka[None, :])
    b = tl.load(B + kb[:, None] * 64 + n[None, :])
    sa, sb = tl.load(SA + m[:, None] * (K // 32) + s[None, :]), tl.load(SB + n[:, None] * (K // 32) + s[None, :])
    tl.store(C + m[:, None] * 64 + n[None, :], tl.dot_scaled(a, sa, FA, b, sb, FB))


def operand(rng, form, rows, k, axis):
    """Random numbers of a format as the kernel takes them, and in float64."""
    if form == "e2m1":
        codes = rng.integers(0, 16, (rows, k))
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
        packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        return (packed if axis else packed.T.contiguous()), values
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}[
        form
    ]
    values = torch.from_numpy(rng.normal(size=(rows, k))).to(dtype)
    kernel = values if axis else values.view(torch.uint8 if form[0] == "e" else torch.int16).T.contiguous().view(dtype)
    return (kernel.view(torch.uint8) if form[0] == "e" else kernel), values.double().numpy()


@pytest.mark.parametrize(
    "arch, left, right",
    [
        ("sm_90a", "e4m3", "e5m2"),
        ("sm_90a", "e2m1", "e4m3"),
        ("sm_90a", "bf16", "e2m1"),
        ("sm_90a", "e5m2", "fp16"),
        ("sm_100a", "e5m2", "e4m3"),
        ("sm_100a", "e2m1", "e2m1"),
        ("sm_100a", "e4m3", "e2m1"),
    ],
)
def test_formats_of_scaled_products(rng, arch, left, right):
    k = 128
    (a, wide_a), (b, wide_b) = operand(rng, left, 128, k, 1), operand(rng, right, 64, k, 0)
    scales = [rng.integers(122, 132, (rows, k // 32)).astype(np.uint8) for rows in (128, 64)]
    c = torch.full((128, 64), float("nan"))
    with sim.device(arch):
        scaled_product[(1,)](
            a,
            torch.from_numpy(scales[0]),
            b,
            torch.from_numpy(scales[1]),
            c,
            k,
            left,
            right,
            1 + (left == "e2m1"),
            1 + (right == "e2m1"),
        )
    exact = (wide_a * np.exp2(np.repeat(scales[0], 32, 1) - 127.0)) @ (
        wide_b * np.exp2(np.repeat(scales[1], 32, 1) - 127.0)
    ).T
    assert np.linalg.norm(c.numpy() - exact) <= 1e-6 * np.linalg.norm(exact)


# ---- atomics


@triton.jit
def atomics(S, U, F, H, Y, OLD):
    i = tl.arange(0, 128)
    y = tl.load(Y + i)
    on = i % 3 != 0
    tl.store(OLD + i, tl.atomic_add(S + i, y, mask=on))
    tl.atomic_max(S + 128 + i, y)
    tl.atomic_min(S + 256 + i, y)
    tl.atomic_and(S + 384 + i, y)
    tl.atomic_or(S + 512 + i, y)
    tl.atomic_xor(S + 640 + i, y)
    tl.atomic_xchg(S + 768 + i, y)
    tl.atomic_store(S + 896 + i, tl.atomic_load(S + i) * 2)
    tl.store(OLD + 128 + i, tl.atomic_cas(S + 1024 + i, i, y))
    tl.atomic_add(S + 1152 + i % 8, y)  # many to one address
    tl.atomic_max(U + i, y.to(tl.uint32, bitcast=True))
    tl.atomic_min(U + 128 + i, y.to(tl.uint32, bitcast=True))
    f = y.to(tl.float32) * 0.125
    tl.atomic_add(F + i, f)
    tl.atomic_max(F + 128 + i, f)
    tl.atomic_min(F + 256 + i, f)
    tl.atomic_add(H + i, 0.25 * i)


def test_atomics(rng):
    old = rng.integers(-1000, 1000, 1160).astype(np.int32)
    old[1024:1152] = np.where(rng.random(128) < 0.5, np.arange(128), -7)
    y = rng.integers(-1000, 1000, 128).astype(np.int32)
    u, f, h = (
        rng.integers(0, 2**32, 256, dtype=np.uint32),
        rng.normal(size=384).astype(np.float32) * 50,
        rng.normal(size=128).astype(np.float16),
    )
    given = [torch.from_numpy(v.copy()) for v in (old, u, f, h, y)]
    seen = torch.full((256,), -9, dtype=torch.int32)
    with sim.device("sm_90a"):
        atomics[(1,)](*given, seen)
    want, part, on = old.copy(), old[:1152].reshape(9, 128), np.arange(128) % 3 != 0
    want[:128] += np.where(on, y, 0)
    functions = [np.maximum, np.minimum, np.bitwise_and, np.bitwise_or, np.bitwise_xor, lambda a, b: b]
    for n, fn in enumerate(functions, 1):
        want[128 * n : 128 * n + 128] = fn(part[n], y)
    want[896:1024] = want[:128] * 2
    want[1024:1152] = np.where(part[8] == np.arange(128), y, part[8])
    np.add.at(want[1152:], np.arange(128) % 8, y)
    assert np.array_equal(given[0].numpy(), want)
    assert np.array_equal(seen[:128].numpy()[on], old[:128][on]) and np.array_equal(seen[128:].numpy(), part[8])
    bits, values = y.view(np.uint32), (y * np.float32(0.125)).astype(np.float32)
    assert np.array_equal(given[1].numpy(), np.concatenate([np.maximum(u[:128], bits), np.minimum(u[128:], bits)]))
    assert np.array_equal(
        given[2].numpy(),
        np.concatenate([f[:128] + values, np.maximum(f[128:256], values), np.minimum(f[256:], values)]),
    )
    assert np.array_equal(given[3].numpy(), h + np.float16(0.25) * np.arange(128).astype(np.float16))


@triton.jit
def handshake(FLAG, DATA, OUT, TIMEOUT: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(OUT + 1, tl.atomic_poll(FLAG, 7, timeout_ns=TIMEOUT).to(tl.int32))
        tl.store(OUT, tl.atomic_load(DATA))
    else:
        tl.atomic_store(DATA, 42)
        tl.atomic_store(FLAG, 7)


def test_polling():
    for timeout, blocks, want in ((None, 2, [42, 1]), (10**9, 2, [42, 1]), (5_000, 1, [0, 0])):
        flag, data, out = (torch.zeros(2, dtype=torch.int32) for _ in range(3))
        with sim.device("sm_90a"):
            handshake[(blocks,)](flag, data, out, timeout)
        assert out.tolist() == want
    with (
        pytest.raises(sim.SimulationError, match=r"loop without end(.|\n)*a change of FLAG(.|\n)*tl.atomic_poll"),
        sim.device("sm_90a", step_limit=2000),
    ):
        handshake[(1,)](torch.zeros(2, dtype=torch.int32), data, out, None)


# ---- reductions of tensor descriptors


@triton.jit
def descriptor_reductions(T, X, KIND: tl.constexpr):
    tensor = tl.make_tensor_descriptor(T, [16, 32], [32, 1], [16, 32])
    x = tl.load(X + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :])
    if KIND == "add":
        tensor.atomic_add([0, 0], x)
    elif KIND == "min":
        tensor.atomic_min([0, 0], x)
    elif KIND == "max":
        tensor.atomic_max([0, 0], x)
    elif KIND == "and":
        tensor.atomic_and([0, 0], x)
    elif KIND == "or":
        tensor.atomic_or([0, 0], x)
    else:
        tensor.atomic_xor([0, 0], x)


@pytest.mark.parametrize("kind", ["add", "min", "max", "and", "or", "xor"])
def test_reductions_of_tensor_descriptors(rng, kind):
    for dtype in (
        (np.int32, np.uint32, np.float32, np.float16) if kind in ("add", "min", "max") else (np.int32, np.uint32)
    ):
        if kind in ("min", "max") and dtype == np.float32:  # TMA has these for integers and 16-bit floats
            continue
        whole = dtype in (np.int32, np.uint32)
        old, x = (
            rng.integers(-1000, 1000, (16, 32)).astype(np.int32).view(dtype)
            if whole
            else rng.normal(size=(16, 32)).astype(dtype)
            for _ in range(2)
        )
        tensor = torch.from_numpy(old.copy())
        with sim.device("sm_90a"):
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
            descriptor_reductions[(1,)](tensor, torch.from_numpy(x), kind)
        fn = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[kind]
        assert np.array_equal(tensor.numpy(), fn(old, x)), dtype
