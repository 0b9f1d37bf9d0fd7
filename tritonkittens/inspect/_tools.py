"""The CUDA tools that Triton ships: nvdisasm reads the cubin, and ptxas compiles the PTX again for its log."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability


def disassemble(cubin: bytes) -> tuple[str, str]:
    """Return the kernel's SASS twice: with source lines, and with the number of live registers at each instruction.

    The second is empty where nvdisasm counts no registers (`NO_LIVE_RANGES`).
    """
    try:
        tool = knobs.nvidia.nvdisasm.path
    except RuntimeError as error:
        raise RuntimeError(
            "inspect: nvdisasm is not there; it comes with Triton's wheel and with the CUDA toolkit (put it on PATH, "
            "or set TRITON_NVDISASM_PATH)"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return _run(tool, "-c", "-gi", str(file)).stdout, _run(
            tool, "-c", "-plr", "-lrm", "count", str(file), refusals=NO_LIVE_RANGES
        ).stdout


# nvdisasm's errors for a kernel that starts with 255 registers, and below sm_90
NO_LIVE_RANGES = ("Invalid register count", "flow analysis is disabled")


def _run(*command: str, refusals: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a tool. Raises RuntimeError where it fails, unless its error is one of `refusals`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not any(refusal in done.stderr for refusal in refusals):
        raise RuntimeError(f"inspect: {Path(command[0]).name} failed ({done.returncode}): {done.stderr.strip()[-500:]}")
    return done


@dataclass(frozen=True)
class PtxasLog:
    """What ptxas's log says of a kernel; None where it says nothing."""

    registers: int | None  # of a thread, when the kernel starts
    stack_bytes: int | None
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    remarks: tuple[str, ...]  # remarks about wgmma (serialised, an added wait), and other warnings


def assemble(ptx: str, metadata: Any) -> PtxasLog:
    """Run ptxas as Triton 3.9 did for this kernel, for its log, which Triton discards."""
    capability = metadata.target.arch
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx, encoding="utf-8")
        options = ["-lineinfo", "-v", "--regAllocOptLevel=2"]
        if not metadata.enable_fp_fusion:
            options.append("--fmad=false")
        options += (metadata.ptx_options or "").split()
        done = _run(
            get_ptxas(capability).path,
            *options,
            f"--gpu-name={sm_arch_from_capability(capability)}",
            str(file),
            "-o",
            str(Path(folder) / "kernel.cubin"),
        )
    return read_ptxas_log(done.stderr + done.stdout)


def read_ptxas_log(log: str) -> PtxasLog:
    """Sum over the kernel and the functions that were not inlined into it. Registers are the kernel's."""

    def total(pattern: str) -> int | None:
        found = re.findall(pattern, log)
        return sum(map(int, found)) if found else None

    used = re.search(r"Used (\d+) registers", log)
    remarks = re.findall(r"^ptxas\S*\s+(?:info|warning)\s*:\s*(.*(?:wgmma|\(C\d+\)).*)$", log, re.MULTILINE)
    return PtxasLog(
        registers=int(used[1]) if used else None,
        stack_bytes=total(r"(\d+) bytes stack frame"),
        spill_store_bytes=total(r"(\d+) bytes spill stores"),
        spill_load_bytes=total(r"(\d+) bytes spill loads"),
        remarks=tuple(dict.fromkeys(remarks)),
    )
