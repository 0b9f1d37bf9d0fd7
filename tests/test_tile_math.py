"""Tile math compiled without a GPU: every operation in a plain Triton kernel (sm_90) and in an explicit kernel (sm_90a,
sm_100a). Values: interpreted/ and gpu/.
"""

import inspect
import linecache
import re

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import some_slow

from .cases_tile_math import (
    FP8,
    GROUPS,
    arguments,
    compile_explicit,
    compile_plain,
    inputs_of,
    kernel_of,
    larger,
    on_stripes,
    plus_index,
)

# Two pieces along an axis each, so that every operation meets a composite tile; the element types take turns.
PLAIN = [(name, group.dtypes[-1], (16, 48)) for name, group in GROUPS.items()]
EXPLICIT = [(name, group.dtypes[n % len(group.dtypes)], (48, 16)) for n, (name, group) in enumerate(GROUPS.items())]
QUICK = list(GROUPS)[::2]  # of explicit kernels, which the simulator compiles for all groups


def tile_shape(dtype, shape):
    return (shape[0], 2 * shape[1]) if dtype in FP8 else shape


@pytest.mark.parametrize("name, dtype, shape", PLAIN, ids=str)
def test_plain_kernels_compile(rng, name, dtype, shape):
    shape = tile_shape(dtype, shape)
    args, _ = inputs_of(rng, GROUPS[name], dtype, shape)
    assert compile_plain(kernel_of(name, dtype), arguments(args), [tk.rt(dtype, *shape)], 90).asm["cubin"]


@pytest.mark.parametrize(
    "name, dtype, shape", some_slow(EXPLICIT, [case for case in EXPLICIT if case[0] in QUICK]), ids=str
)
def test_explicit_kernels_compile(rng, name, dtype, shape):
    shape = tile_shape(dtype, shape)
    args, _ = inputs_of(rng, GROUPS[name], dtype, shape)
    assert compile_explicit(kernel_of(name, dtype), args, tk.rt(dtype, *shape), "sm_90a").asm["cubin"]


@pytest.mark.parametrize("name", ["vector", "scans", "masks"])
def test_explicit_kernels_compile_for_blackwell(rng, name):
    args, _ = inputs_of(rng, GROUPS[name], tk.fp32, (128, 48))
    assert compile_explicit(kernel_of(name, tk.fp32), args, tk.rt(tk.fp32, 128, 48), "sm_100a").asm["cubin"]


@pytest.mark.parametrize("layout", ["row", "memory"])
def test_other_register_layouts_compile(rng, layout):
    args, _ = inputs_of(rng, GROUPS["vector"], tk.bf16, (48, 16))
    assert compile_explicit(kernel_of("vector", tk.bf16), args, tk.rt(tk.bf16, 48, 16, layout), "sm_90a").asm["cubin"]


@tk.kernel
@triton.jit
def running_max(X, OUT, T: tl.constexpr):
    m = tk.neg_infty(tk.col_vec(T))
    for i in range(4):
        x = tk.load(X, T, (i, 0))
        m = tk.row_max(x, accumulate=m)
        tk.store(OUT, tk.sub_row(x, m), (i, 0))


@tk.kernel
@triton.jit
def running_min(X, OUT, T: tl.constexpr):
    low = tk.pos_infty(tk.row_vec(T))
    for i in range(4):
        x = tk.load(X, T, (i, 0))
        low = tk.col_min(x, accumulate=low)
        tk.store(OUT, tk.sub_col(x, low), (i, 0))


@pytest.mark.parametrize("kernel", [running_max, running_min], ids=["col_vec", "row_vec"])
@pytest.mark.parametrize("layout", ["mma", "memory", "row"])
def test_tile_vectors_lie_with_their_tile(kernel, layout):
    """A vector made by its type, the one that a reduction gives, and the tile agree on a layout: the loop carries them
    and converts nothing.
    """
    x = torch.empty(4 * 64, 64, device="meta")
    assert (
        "convert_layout"
        not in kernel.compile(tk.gl(x), tk.gl(x), tk.rt(tk.fp32, 64, 64, layout), arch="sm_90a").asm["ttgir"]
    )


@pytest.mark.parametrize("cols", [48, 80, 176])
def test_column_vectors_of_composite_tiles_move_nothing(cols):
    """The pieces of an accumulator hold the same rows in the same threads: their vectors meet without shared memory or
    barriers, and the lanes of a quad exchange what they have of all pieces once: by two shuffles for each of a thread's
    two rows."""
    x = torch.empty(4 * 64, cols, device="meta")
    compiled = running_max.compile(tk.gl(x), tk.gl(x), tk.rt(tk.fp32, 64, cols), arch="sm_90a")
    assert compiled.metadata.shared == 0 and "bar.sync" not in compiled.asm["ptx"]
    assert compiled.asm["ptx"].count("shfl.sync") == 4


# What a mistake says, by the expression that makes it (x: 64×48 fp32, n: 64×48 int32, h: 64×64 e4m3, c and r: the
# vectors of x).
MISTAKES = {
    "tk.add(x, tk.zero((64, 64)))": "operands of shapes [64, 48] and [64, 64]: an element-wise operation needs equal "
    "shapes (or a scalar)",
    "x + tk.zero((48, 48))": "operands of shapes [64, 48] and [48, 48]: an element-wise operation needs equal shapes "
    "(or a scalar)",
    "tk.add(x, c)": "operands of shapes [64, 48] and [64]: an element-wise operation needs equal shapes (or a scalar)",
    "tk.add_row(x, r)": "add_row: a tile of shape [64, 48] needs a vector of 64 elements (one value per row), got [48]",
    "tk.mul_col(x, c)": "mul_col: a tile of shape [64, 48] needs a vector of 48 elements (one value per column), got "
    "[64]",
    "tk.sub_row(c, c)": "sub_row: the first operand has shape [64]; it must be a tile of two axes",
    "tk.exp(n)": "exp: needs floating-point elements, got int32",
    "tk.gelu(x, approximate='fast')": "gelu(approximate='fast'): must be 'none' or 'tanh'",
    "tk.add(h, h)": "add: no arithmetic on fp8e4m3 elements; tk.cast the tile to fp16, bf16 or fp32 first",
    "tk.relu(h)": "relu: no arithmetic on fp8e4m3 elements; tk.cast the tile to fp16, bf16 or fp32 first",
    "tk.cast(x, tk.bf16, rounding='up')": "cast(rounding='up'): must be None, 'rtne' (nearest even) or 'rtz' (toward "
    "zero)",
    "tk.cast(x, tk.int32, rounding='rtz')": "cast(fp32 → int32, rounding='rtz'): only a conversion to a narrower "
    "float rounds",
    "tk.exp2_row(n, 1.0, c)": "exp2_row: needs an fp32 tile, got int32",
    "tk.exp2_col(n, 1.0, r)": "exp2_col: needs an fp32 tile, got int32",
    "tk.row_max(c)": "row_max of shape [64]: needs a register tile of two axes",
    "tk.col_sum(c)": "col_sum of shape [64]: needs a register tile of two axes",
    "tk.row_mean(c)": "row_mean of shape [64]: needs a register tile of two axes",
    "tk.row_cumsum(c)": "row_cumsum of shape [64]: needs a register tile of two axes",
    "tk.row_argmax(c)": "row_argmax of shape [64]: needs a register tile of two axes",
    "tk.row_max(x, accumulate=r)": "row_max(accumulate): a tile of fp32 and shape [64, 48] needs a vector of 64 "
    "elements of fp32, "
    "got fp32 of shape [48]",
    "tk.row_sum(n, accumulate=c)": "row_sum(accumulate): a tile of int32 and shape [64, 48] needs a vector of 64 "
    "elements of int32, "
    "got fp32 of shape [64]",
    "tk.row_sum_by_quad(x, accumulate=c)": "row_sum_by_quad(accumulate) of shape [64, 48]: needs sums of fp32 and "
    "shape [64, 4], got fp32 of shape [64]",
    "tk.row_topk(x, 49)": "row_topk(k=49): must be between 1 and the 48 columns of the tile",
    "tk.row_topk(n, 2)": "row_topk: needs floating-point elements, got int32",
    "tk.max(1.0)": "max of 1.0: needs a register tile or vector",
    "tk.make_causal(n)": "make_causal: fill of a tile of int32: -inf is no int32; it must be a whole number from "
    "-2147483648 to 2147483647",
    "tk.make_causal(h)": "make_causal: fill of a tile of fp8e4m3: fp8e4m3 has no infinity; its largest value is 448",
    "tk.tril(n, fill=0.5)": "tril: fill of a tile of int32: 0.5 is no int32; it must be a whole number from "
    "-2147483648 to 2147483647",
    "tk.mask(n, on_stripes)": "mask: fill of a tile of int32: -inf is no int32; it must be a whole number from "
    "-2147483648 to 2147483647",
    "tk.right_fill(c, 3)": "right_fill of shape [64]: needs a register tile of two axes",
    "tk.mask(c, on_stripes)": "mask of shape [64]: needs a register tile of two axes",
    "tk.neg_infty(tk.rt(tk.int32, 16, 16))": "fill of rt(int32, 16, 16): -inf is no int32; "
    "it must be a whole number from -2147483648 to 2147483647",
    "tk.full(tk.rt(tk.int8, 16, 32), 200)": "fill of rt(int8, 16, 32): 200 is no int8; it must be a whole number from "
    "-128 to 127",
    "tk.full(tk.rv(tk.uint8, 32), -1)": "fill of rv(uint8, 32): -1 is no uint8; it must be a whole number from 0 to "
    "255",
    "tk.full_like(n, 1.5)": "full_like(dtype=int32): 1.5 is no int32; it must be a whole number from -2147483648 to "
    "2147483647",
    "tk.zero((16, 24))": "rt(fp32, 16, 24): cols: 24 must be a positive multiple of 16 (the base tile of fp32 is "
    "16×16)",
    "tk.zero(tk.st(tk.fp32, 16, 16))": "st(fp32, 16, 16): give a register type (rt, rv, col_vec, row_vec) or a shape "
    "of one or two extents",
    "tk.iota(x, axis=2)": "iota(axis=2) of shape [64, 48]: needs a tile of two axes and axis 0 or 1, or a vector",
    "tk.apply(1.0, on_stripes)": "apply to shape []: needs a register tile or vector",
    "tk.map(x, larger, tk.struct(y=c))": "operands of shapes [64, 48] and [64]: an element-wise operation needs equal "
    "shapes (or a scalar)",
    "tk.map(n, plus_index, tk.struct(x=1.5))": "plus_index returns fp32 of shape [64, 32]; it must return int32 of "
    "shape [64, 32], as its first argument has",
    "tk.transpose(c)": "transpose of shape [64]: needs a tile of two axes",
    "tk.split_cols(x, 48)": "split_cols(cols=48) of shape [64, 48]: must divide the columns of its pieces, (32, 16), "
    "into 2ⁿ tiles",
    "tk.split_cols(x, 0)": "split_cols(cols=0) of shape [64, 48]: must divide the columns of its pieces, (32, 16), "
    "into 2ⁿ tiles",
    "tk.byte_operand(x, tk.fp8e4m3)": "byte_operand(dtype=fp8e4m3) of a tile of fp32 and shape [64, 48]: takes an "
    "fp32 accumulator of wgmma of 64 rows and a "
    "multiple of 32 columns, and fp8e4m3 or fp8e5m2",
    "tk.byte_operand(n, tk.bf16)": "byte_operand(dtype=bf16) of a tile of int32 and shape [64, 48]: takes an fp32 "
    "accumulator of wgmma of 64 rows and a "
    "multiple of 32 columns, and fp8e4m3 or fp8e5m2",
    "tk.concat_cols(x, tk.zero((16, 16)))": "concat_cols of shapes [64, 48], [16, 16]: needs tiles of equal rows",
    "tk.concat_cols(x, x, whole=True)": "concat_cols(whole=True) of shapes [64, 48], [64, 48]: needs two tiles of one "
    "shape and element type, with "
    "extents that are powers of two",
    "tk.store(X, x, 0)": "store of a tile of shape [64, 48]: 1 coordinates for a tensor of 2 dimensions; give one per "
    "dimension, in tiles",
}


def mistaken_kernel(code):
    filename = f"<mistake {code}>"
    lines = [
        "def mistaken(X):",
        "    x = tk.load(X, tk.rt(tk.fp32, 64, 48), (0, 0))",
        "    n = tk.cast(x, tk.int32)",
        "    h = tk.zero(tk.rt(tk.fp8e4m3, 64, 64))",
        "    c = tk.row_max(x)",
        "    r = tk.col_max(x)",
        f"    {code}",
    ]
    linecache.cache[filename] = (1, None, [line + "\n" for line in lines], filename)
    space = {
        "tk": tk,
        "tl": tl,
        "on_stripes": on_stripes,
        "larger": larger,
        "plus_index": plus_index,
        "__name__": __name__,
    }
    exec(compile("\n".join(lines), filename, "exec"), space)
    return triton.jit(space["mistaken"])


@pytest.mark.parametrize("code", MISTAKES)
def test_mistakes_are_refused_in_words(code):
    with pytest.raises(tk.TileError) as error:
        tk.kernel(mistaken_kernel(code)).compile(tk.gl(torch.empty(64, 48, device="meta")), arch="sm_90a")
    assert str(error.value) == f"{MISTAKES[code]} [in mistaken: {code}, <mistake {code}>:7]"


def test_operations_are_for_kernels():
    with pytest.raises(tk.TileError, match=r"row_max: call it inside a kernel \(@triton.jit\)"):
        tk.row_max(torch.zeros(16, 16))


@pytest.mark.parametrize(
    "name",
    [
        "row_max",
        "col_sum",
        "exp",
        "add",
        "add_row",
        "exp2_col",
        "cast",
        "make_causal",
        "iota",
        "apply",
        "softmax_step",
        "row_topk",
    ],
)
def test_help_names_operands_and_result(name):
    operation = getattr(tk, name)
    text = inspect.getdoc(operation)
    assert operation.__name__ == name and len(text) > 60 and text.split("\n")[0].endswith((".", ":", "−∞ by default."))
    assert all(
        f"`{p}`" in text or f"\n    {p}: " in text or p in ("row", "col")
        for p in inspect.signature(operation).parameters
    ), text


def test_help_of_every_function_names_its_parameters():
    """In `code`, in a list of arguments, or by the function that takes the same ones: "as in `f`"."""
    for name in tk.__all__:
        function = getattr(getattr(tk, name), "fn", getattr(tk, name))
        if not inspect.isfunction(function) or function.__module__.startswith("tritonkittens.lang.template"):
            continue
        text = inspect.getdoc(function) or ""
        named = [
            p
            for p in inspect.signature(function).parameters
            if p in ("row", "col") or f"`{p}`" in text or f"\n    {p}: " in text
        ]
        assert re.search(r"as in `\w+`", text) or named == list(inspect.signature(function).parameters), (name, text)
