"""Runs each file of tests/interpreted in a process of its own, in which Triton interprets kernels: the choice is made
when triton is imported.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.util import slow

FILES = sorted((pathlib.Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("cases", ["not slow", slow("slow")])
@pytest.mark.parametrize(
    "file", [slow(f, id=f.stem) if f.stem in ("test_quantize", "test_loss") else f for f in FILES], ids=lambda f: f.stem
)
def test_interpreted(file, cases):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", cases, str(file)]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[1]
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-20000:] + run.stderr[-5000:]
