"""Builds tests/fake_libcuda.c and reads what it recorded; nothing here needs a GPU."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import triton

from tritonkittens.launch import CudaDriver

TRITON_INCLUDE = Path(triton.__file__).parent / "backends/nvidia/include"


class Record(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint64) for name in ("count", "function", "stream", "misaligned_maps", "context")],
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("num_attributes", ctypes.c_uint32),
        ("attributes", ctypes.c_uint32 * 17 * 8),
        ("parameter_bytes", ctypes.c_uint32),
        ("parameters", ctypes.c_uint8 * 8192),
    ]


def build(folder: Path, name: str) -> Path:
    """Compile the stand-in. No soname: the real libcuda must stay findable in a process that loads this one by its
    path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "the launch tests need a C compiler, as Triton does"
    library, source = folder / name, Path(__file__).with_name("fake_libcuda.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", f"-I{TRITON_INCLUDE}", str(source), "-o", str(library)], check=True
    )
    return library


class FakeCuda:
    """The stand-in driver. ``expect`` names the parameters of the kernel to come; ``last`` is the last launch as Python
    values."""

    def __init__(self, library: Path):
        self.driver = CudaDriver(str(library), device_type="cpu")
        self._library = ctypes.CDLL(str(library))

    def integer(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._library, name)

    @property
    def num_launches(self) -> int:
        return Record.in_dll(self._library, "fake_last").count

    @property
    def num_encodes(self) -> int:
        return self.integer("fake_encodes").value

    def expect(self, sizes: list[int]) -> None:
        (ctypes.c_uint32 * 256).in_dll(self._library, "fake_sizes")[: len(sizes)] = sizes
        self.integer("fake_num_sizes").value = len(sizes)
        self._sizes = sizes

    @property
    def last(self) -> SimpleNamespace:
        record = Record.in_dll(self._library, "fake_last")
        data, parameters = bytes(record.parameters)[: record.parameter_bytes], []
        for size in self._sizes:
            parameters.append(data[:size])
            data = data[size:]
        return SimpleNamespace(
            function=record.function,
            stream=record.stream,
            context=record.context,
            grid=tuple(record.grid),
            block=tuple(record.block),
            shared=record.shared,
            attributes=[(a[0], list(a)[1:]) for a in list(record.attributes)[: record.num_attributes]],
            parameters=parameters,
            misaligned_maps=record.misaligned_maps,
        )


def run_beside_triton(folder: Path, text: str, *arguments: object) -> subprocess.CompletedProcess:
    """Run a script, in a process of its own, where Triton's driver is the stand-in, which is the script's first
    argument."""
    library, script = build(folder, "libcuda.so.1"), folder / "script.py"
    script.write_text(text)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = dict(
        os.environ,
        TRITON_LIBCUDA_PATH=str(folder),
        LD_LIBRARY_PATH=str(folder),
        TRITON_CACHE_DIR=str(folder / "cache"),
        PYTHONPATH=paths,
    )
    return subprocess.run(
        [sys.executable, str(script), str(library), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
