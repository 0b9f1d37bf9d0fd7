"""A mistake of Python or Triton in a kernel or a hook: one short error that quotes the user's line, with the original
exception as its cause."""

import linecache
import pickle
import re
import traceback

import pytest
import torch
import triton
from triton import knobs
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.jit import constexpr_function

import tritonkittens.lang as tk
from tritonkittens import sim


@constexpr_function
def looked_up(name):
    return {"rows": 64}[name]


@triton.jit
def _helper(x, y):
    return x * y


# what a line of a kernel says, the class of the original exception, a part of the message; `x` is a tile of fp32, `h`
# one of bf16
MISTAKES = {
    "tk.rellu(x)": (AttributeError, "module 'tritonkittens.lang' has no attribute 'rellu'"),
    "tl.eksp(x)": (AttributeError, "has no attribute 'eksp'"),
    "undefined(x)": (NameError, "undefined is not defined"),
    "x + missing": (NameError, "missing is not defined"),
    "x.rows": (AttributeError, "'rows'"),
    "_helper(x)": (TypeError, "missing a required argument: 'y'"),
    "_helper(x, x, x)": (TypeError, "too many positional arguments"),
    "looked_up('columns')": (KeyError, "columns"),
    "looked_up()": (TypeError, "missing 1 required positional argument: 'name'"),
    "x + tk.zero((32, 32))": (ValueError, "Cannot make_shape_compatible"),
    "(1, 2)[5]": (IndexError, "list index out of range"),
    "tl.arange(0, 64)": (TypeError, "missing 1 required positional argument: 'layout'"),
    "tk.split_cols(x, 32)[tk.block_index()]": (AssertionError, "assert isinstance(idx, "),
    "tl.static_assert(2 > 3, 'too few')": (CompileTimeAssertionFailure, "static_assert failed: too few"),
    "[c for c in x]": (Exception, "comprehension"),
    "lambda: x": (Exception, "unsupported AST node type: Lambda"),
}
ARGUMENTS = {
    "tk.row_max()": "row_max: missing a required argument: 'x'; its parameters are (x",
    "tk.exp2(x, x, x)": "exp2: too many positional arguments; its parameters are (x",
    "tk.col_sum(x, axes=1)": "col_sum: got an unexpected keyword argument 'axes'; its parameters are (x",
}
HEAD = (
    "import torch, triton, triton.language as tl, tritonkittens.lang as tk\nfrom tests.test_mistakes import "
    "_helper, looked_up\n"
)
TILE_MATH = (
    HEAD
    + """
@tk.kernel
@triton.jit
def mistaken(X):
    x = tk.load(X, tk.rt(tk.fp32, 64, 64), (0, 0))
    {code}
"""
)
NESTED = (
    HEAD
    + """
@triton.jit
def mistaken(x):
    {code}
    return x

@triton.jit
def between(x):
    return mistaken(x)

@tk.kernel
@triton.jit
def outer(X):
    tile = tk.allocate(tk.st(tk.fp32, 64, 64))
    tk.load_into(tile, X, (0, 0))
    x = between(tk.load(tile))
"""
)
TEMPLATE = (
    HEAD
    + """
class Copy(tk.{kind}):
    consumers = 1

    def layout(self):
        tile = tk.st(tk.fp32, 64, 64)
        return tk.layout(globals=dict(X=tile), input=dict(X=tile){output})

    @triton.jit
    def setup(ctx):
        return tk.task(1, when=ctx.task_id < 1)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (0, 0), input.full)

    @triton.jit
    def {name}(ctx, state, input{argument}):
        x = tk.load(input.X)
        {code}
        return state
{rest}
"""
)
LCF = dict(
    kind="lcf", output="", argument="", rest="\n    @triton.jit\n    def finish(ctx, state, staging):\n        pass\n"
)
LCSF = dict(
    kind="lcsf",
    output=", output=dict(X=tile)",
    argument=", output",
    rest="\n    @triton.jit\n    def store(ctx, output):\n        tk.store_async(ctx.globals.X, output.X, (0, 0))\n",
)
DEPTHS = {"tile math": TILE_MATH, "explicit tiles": NESTED, "lcf": TEMPLATE, "lcsf": TEMPLATE}


def program(depth, code):
    """(the namespace of a program of that depth, its file, the number and the function of the line that `code` is
    on)."""
    function = "mistaken" if depth in ("tile math", "explicit tiles") else "compute"
    text = (
        DEPTHS[depth].format(code=code, name=function, **(LCSF if depth == "lcsf" else LCF))
        if function == "compute"
        else DEPTHS[depth].format(code=code)
    )
    file = f"<{depth}: {code}>"
    linecache.cache[file] = (1, None, text.splitlines(keepends=True), file)
    space = {"__name__": "a_user"}
    exec(compile(text, file, "exec"), space)
    return space, file, next(n for n, line in enumerate(text.splitlines(), 1) if line.strip() == code), function


def error_of(depth, code, simulated):
    """(the error that a program raises, what Python prints of it, its file, line and function)."""
    space, file, line, function = program(depth, code)
    kernel = space.get("outer") or space.get("mistaken")
    x = torch.zeros(64, 64) if simulated else torch.empty(64, 64, device="meta")
    with pytest.raises((tk.KernelError, tk.TileError)) as caught:
        if simulated:
            with sim.device():
                space["Copy"]()(x) if "Copy" in space else kernel[(1,)](tk.gl(x))
        elif "Copy" in space:
            space["Copy"]().compile(x)
        else:
            kernel.compile(tk.gl(x))
    return caught.value, "".join(traceback.format_exception(caught.value)), file, line, function


def check_short(printed, message):
    assert message in printed
    assert printed.count("Traceback") + printed.count("direct cause") <= 3 and len(printed.splitlines()) <= 36, printed
    for inside in (
        "code_generator.py",
        "lang/template/kernel.py",
        "lang/template/calls.py",
        "core/backend.py",
        "compiler.py",
        "semantic.py",
    ):
        assert inside not in printed, printed


@pytest.mark.parametrize("code", MISTAKES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_mistake_is_one_error_that_quotes_the_line(depth, code, rng):
    kind, message = MISTAKES[code]
    error, printed, file, line, function = error_of(depth, code, rng.random() < 0.5)
    assert isinstance(error, tk.KernelError) and message in str(error)
    assert str(error).endswith(f" [in {function}: {code}, {file}:{line}]")
    assert isinstance(error.__cause__, kind)
    check_short(printed, message)


@pytest.mark.parametrize("code", ARGUMENTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_wrong_arguments_are_refused_with_the_right_ones(depth, code, rng):
    error, printed, file, line, function = error_of(depth, code, rng.random() < 0.5)
    assert isinstance(error, tk.TileError) and str(error).startswith(ARGUMENTS[code])
    assert str(error).endswith(f" [in {function}: {code}, {file}:{line}]")
    check_short(printed, ARGUMENTS[code])


def test_the_frames_of_a_function_of_the_user_stay():
    printed = error_of("lcf", "looked_up('columns')", False)[1]
    assert re.search(r'test_mistakes.py", line \d+, in looked_up\n    return {"rows": 64}\[name\]', printed)


def test_layouts_and_element_types_that_do_not_fit():
    code = 'tk.load(input.X, layout="memory") * x'
    error, printed, file, line, _ = error_of("lcsf", code, True)
    assert isinstance(error.__cause__, ValueError) and "Layout mismatch" in str(error.__cause__)
    said = "these tiles have different layouts, and Python's operators take those of one; tk.add, tk.mul and others"
    assert str(error).startswith(said) and str(error).endswith(f"{code}, {file}:{line}]")
    check_short(printed, said)
    error, printed, file, line, _ = error_of("explicit tiles", "tl.dot(x, tk.cast(x, tk.bf16))", False)
    assert str(error).endswith(f"{file}:{line}]")
    check_short(printed, str(error))


def test_the_error_is_tritons_and_survives_pickling():
    error = error_of("tile math", "tl.static_assert(False)", False)[0]
    assert isinstance(error, triton.CompilationError) and isinstance(error, CompileTimeAssertionFailure)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)


def test_the_compilers_own_chain_is_there_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(knobs.compilation, "front_end_debugging", True)
    space = program("lcf", "tk.rellu(x)")[0]
    with pytest.raises(AttributeError, match="rellu") as caught:
        space["Copy"]().compile(torch.empty(64, 64, device="meta"))
    assert "code_generator.py" in "".join(traceback.format_exception(caught.value))
