"""`compute-sanitizer --tool memcheck` finds no access outside its tensor in any shipped kernel."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.gpu.sanitized import PARTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer (of the CUDA toolkit) is not installed")]

REPORT = re.compile(r"^========= (?! |COMPUTE-SANITIZER|ERROR SUMMARY|$)(.*)", re.MULTILINE)
# What Triton's loader asks on purpose: does a kernel take more shared memory than the default?
EXPECTED = re.compile(r'Program hit CUDA_ERROR_INVALID_VALUE \(error 1\) due to "invalid argument" on CUDA API call to cuFuncSetAttribute')


def reports(group):
    """(what the tool reports of a group of kernels, all that was printed)."""
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-m", "tests.gpu.sanitized", *group.split()]
    printed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=400).stdout
    assert "ERROR SUMMARY" in printed, printed[-4000:]
    return [report for report in REPORT.findall(printed) if not EXPECTED.match(report)], printed


@pytest.mark.parametrize("group", ["products", *(f"attentions {part}" for part in range(PARTS)), "serving"])
def test_no_access_outside(group):
    found, printed = reports(group)
    assert not found, "\n".join(found[:20])
    assert re.search("^done$", printed, re.MULTILINE), printed[-4000:]


def test_an_access_outside_is_reported():
    found, _ = reports("fault")
    assert any("Invalid __global__ write" in report for report in found)
