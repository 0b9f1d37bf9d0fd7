"""`compute-sanitizer` finds no access outside its tensor in any shipped kernel (memcheck), and no race for shared
memory (racecheck)."""

import linecache
import re
import shutil
import subprocess
import sys

import pytest

from tests.gpu.sanitized import PARTS
from tritonkittens.lang.template import kernel as kernel_module

GROUPS = ["products", *(f"attentions {part}" for part in range(PARTS)), "serving"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("compute-sanitizer") is None, reason="compute-sanitizer (of the CUDA toolkit) is not installed"
    ),
]

REPORT = re.compile(r"^========= (?! |COMPUTE-SANITIZER|ERROR SUMMARY|$)(.*)", re.MULTILINE)
# What Triton's loader asks on purpose: does a kernel take more shared memory than the default?
EXPECTED = re.compile(
    r'Program hit CUDA_ERROR_INVALID_VALUE \(error 1\) due to "invalid argument" on CUDA API call to cuFuncSetAttribute'
)
ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\S*(?: in (\S+):(\d+))?")


def watched(tool, group):
    """What a tool prints of a group of kernels."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "tests.gpu.sanitized", *group.split()]
    printed = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=400
    ).stdout
    assert re.search("(ERROR|RACECHECK) SUMMARY", printed), printed[-4000:]
    return printed


def reports(printed):
    """What memcheck reports."""
    return [report for report in REPORT.findall(printed) if not EXPECTED.match(report)]


def races(printed):
    """The accesses that racecheck reports, but two sorts of a template's: those by which Triton's `warp_specialize`
    tells warps their roles, which have no line but the kernel's; and those to numbers of fetched tasks: one is
    overwritten when a lane of each warp has arrived after `syncwarp`, which in PTX is order enough, and for racecheck
    only where the other lanes wait for the same barrier."""

    def known(kernel, file, line):
        of_roles = file == "kernel.py" and "def _template_kernel" in linecache.getline(
            kernel_module.__file__, int(line)
        )
        return kernel == "_template_kernel" and (of_roles or file == "shared.py")

    return [found.group() for found in ACCESS.finditer(printed) if not known(*found.groups())]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "tool, found_in", [("memcheck", reports), ("racecheck", races)], ids=lambda x: getattr(x, "__name__", x)
)
def test_nothing_to_report(group, tool, found_in):
    printed = watched(tool, group)
    assert not found_in(printed), "\n".join(found_in(printed)[:20])
    assert re.search("^done$", printed, re.MULTILINE), printed[-4000:]


def test_faults_are_reported():
    assert any("Invalid __global__ write" in report for report in reports(watched("memcheck", "fault")))
    assert any("shared.py" in access for access in races(watched("racecheck", "race")))
