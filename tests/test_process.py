"""What a program that uses the library prints besides its own output: nothing."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

SIMULATED = """
import torch
import triton
import tritonkittens.lang as tk
import tritonkittens.ops
from tritonkittens import sim
from tritonkittens.kernels.gemm import gemm


class Scale(tk.lcf):
    consumers = 1

    def layout(self):
        tile = tk.st(tk.bf16, 64, 64)
        return tk.layout(globals=dict(X=tile, Y=None), input=dict(X=tile))

    @triton.jit
    def setup(ctx):
        return tk.task(1, when=ctx.task < 1)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (0, 0), input.arrived)

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
    c = gemm(x, x.T)
assert torch.equal(y, 3 * x.float())
assert torch.allclose(c.double(), x.double() @ x.double().T, rtol=2e-2, atol=0.2)
"""


def run(tmp_path, *arguments, **changes):
    """A fresh interpreter in an empty folder; `changes` are environment variables, None for an unset one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1", **changes}
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, timeout=300)


@pytest.mark.parametrize("module", ["inline_ptx", "lang"])
def test_a_program_that_imports_the_library_prints_nothing(module, tmp_path):
    done = run(tmp_path, "-c", f"import tritonkittens.{module}")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_program_that_runs_kernels_in_the_simulator_prints_nothing(tmp_path):
    (tmp_path / "program.py").write_text(SIMULATED)
    done = run(tmp_path, "program.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), done.stderr.decode()
