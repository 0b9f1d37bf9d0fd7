"""What a program that uses the library prints besides its own output: nothing."""

import os
import pathlib
import subprocess
import sys

import pytest

from tritonkittens.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]

ASCII = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING=None)

SIMULATED = """
import torch
import triton
import tritonkittens.lang as tk
import tritonkittens.ops
from tritonkittens import sim


class Scale(tk.lcf):
    consumers = 1

    def layout(self):
        tile = tk.st(tk.bf16, 64, 64)
        return tk.layout(globals=dict(X=tile, Y=None), input=dict(X=tile))

    @triton.jit
    def setup(ctx):
        return tk.task(1, when=ctx.task_id < 1)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (0, 0), input.full)

    @triton.jit
    def compute(ctx, state, input):
        tk.store(ctx.globals.Y, tk.cast(tk.load(input.X), tk.fp32) * 3, (0, 0))
        return state

    @triton.jit
    def finish(ctx, state, staging):
        pass


x, y = torch.randn(64, 64).bfloat16(), torch.full((64, 64), float("nan"))
with sim.device():
    Scale()(x, y)
assert torch.equal(y, 3 * x.float())
"""


SIBLING = """
import triton
import tritonkittens.lang as tk


class Größe(tk.lcf):  # a name, and bytes of the source, beyond ASCII
    consumers = 1

    def layout(self):
        tile = tk.st(tk.bf16, 64, 64)
        return tk.layout(globals=dict(X=tile, Y=None), input=dict(X=tile))

    @triton.jit
    def setup(ctx):
        return tk.task(1, when=ctx.task_id < 1)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (0, 0), input.full)

    @triton.jit
    def compute(ctx, state, input):
        tk.store(ctx.globals.Y, tk.cast(tk.load(input.X), tk.fp32), (0, 0))
        return state

    @triton.jit
    def finish(ctx, state, staging):
        pass
"""
CHECKED = """
import torch
from sibling import Größe as Scale  # lies beside this file


def example_Scale():
    return None, (torch.randn(64, 64).bfloat16(), torch.empty(64, 64))
"""
CHECK = "check folder/checked.py:Scale --schedules 2 --timeline times.json"
# and a part of what each prints; the others: tests/test_readme.py
COMMANDS = {"tuned gemm": b"?s", CHECK: b"2 schedules, no finding"}


def run(tmp_path, *arguments, stdout=subprocess.PIPE, **changes):
    """A fresh interpreter in that folder; `changes` are environment variables, None for an unset one."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **changes,
    }
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, stdout=stdout, stderr=subprocess.PIPE, timeout=300
    )


def test_a_program_that_imports_the_library_prints_nothing(tmp_path):
    done = run(tmp_path, "-c", "import tritonkittens.lang")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_program_that_runs_kernels_in_the_simulator_prints_nothing(tmp_path):
    (tmp_path / "program.py").write_text(SIMULATED)
    done = run(tmp_path, "program.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), done.stderr.decode()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "sibling.py").write_text(SIBLING, encoding="utf-8")
    (tmp_path / "folder" / "checked.py").write_text(CHECKED, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_where_the_locale_has_only_ascii(command, folder):
    done = run(folder, "-m", "tritonkittens", *command.split(), **ASCII)
    assert done.returncode == 0 and done.stderr == b"", done.stderr.decode()
    assert COMMANDS[command] in done.stdout
    assert command != CHECK or (folder / "times.json").stat().st_size > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_quietly_where_nobody_reads(command, folder):
    """In the C locale, where Python chooses UTF-8."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(folder, "-m", "tritonkittens", *command.split(), stdout=writer, **{**ASCII, "PYTHONUTF8": None})
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b""), done.stderr.decode()


def test_check_says_that_a_class_has_no_example_arguments(folder, capsys):
    assert main(["check", f"{folder}/folder/sibling.py:Größe"]) == 2
    assert "write a function example_Größe() beside it" in capsys.readouterr().err
