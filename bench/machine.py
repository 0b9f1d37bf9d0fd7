"""What a result file says of the machine: GPU, versions, and the clocks and power that `nvidia-smi` reads. Nothing is
set."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys

import torch
import triton

import tritonkittens

QUERY = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "power_draw_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "driver": "driver_version",
}


def clocks() -> dict[str, object]:
    """Clocks, power and temperature of the current GPU at this moment, or `{"missing": reason}`."""
    # by its identity: nvidia-smi does not know CUDA_VISIBLE_DEVICES, after which torch counts
    which = (
        [f"--id=GPU-{str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix('GPU-')}"]
        if torch.cuda.is_available()
        else []
    )
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader,nounits", *which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"missing": f"nvidia-smi: {error}"}
    if done.returncode:
        return {"missing": f"nvidia-smi: {(done.stdout + done.stderr).strip()}"}
    return read_clocks(done.stdout)


def read_clocks(text: str) -> dict[str, object]:
    """One line of `nvidia-smi`'s CSV for `QUERY`; a field that the driver does not support stays text."""
    fields = [field.strip() for field in text.strip().splitlines()[0].split(",")]
    return dict(
        zip(
            QUERY,
            (
                float(field) if key != "driver" and field.replace(".", "", 1).isdigit() else field
                for key, field in zip(QUERY, fields)
            ),
        )
    )


def machine() -> dict[str, object]:
    """GPU, versions, date and command of this run."""
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "multiprocessors": torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if gpu
        else None,
        "tritonkittens": tritonkittens.__version__,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }
