"""Build and check the fast launch path (native.c). Without a C compiler, or in doubt, launches take the Python path."""

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.language import constexpr
from triton.runtime.build import compile_module_from_file

from . import ahead
from .arguments import GlobalArg
from .libcuda import CudaDriver

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("native.c")
_DEVICE_TYPE = {"cpu": 0, "cuda": 1}  # c10::DeviceType
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
# torch's stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h), in the order of native.c's TensorReader
_TENSOR_FUNCTIONS = ("data_ptr", "dim", "sizes", "strides", "dtype", "device_type", "device_index")
_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


@functools.cache
def _load() -> tuple[Any, tuple[int, ...]] | None:
    if os.environ.get("TRITONKITTENS_NATIVE_LAUNCH", "1") == "0":
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        functions = tuple(address(getattr(library, f"aoti_torch_get_{name}")) for name in _TENSOR_FUNCTIONS)
        module = compile_module_from_file(
            str(_SOURCE), "tritonkittens_launch", library_dirs=[], include_dirs=[], libraries=[]
        )
        _check(module, functions)
    except Exception as error:  # a missing compiler, header or symbol must not stop a kernel
        _log.warning(
            "launching through Python, a few microseconds slower per kernel: %s: %s", type(error).__name__, error
        )
        return None
    return module, functions


def load() -> tuple[Any, tuple[int, ...]] | None:
    """Return the compiled module and the addresses of torch's functions, or None.

    Each process builds it once; Triton caches it on disk.
    """
    with _lock:
        return _load()


def address(function: Any) -> int:
    """Address of a ctypes function."""
    value = ctypes.cast(function, ctypes.c_void_p).value
    assert value
    return value


def new_dispatcher(module: Any, functions: tuple[int, ...], driver: CudaDriver, table: dict[Any, Any]) -> Any:
    """A native ``Dispatcher`` that looks prebuilt launches up in ``table``."""
    return module.Dispatcher(
        (
            address(driver.launch_kernel),
            address(driver.context_get),
            address(driver.context_set),
            address(driver.replace_address),
            address(driver.encode_tiled_function),
        ),
        functions,
        _DEVICE_TYPE[driver.device_type],
        (_TENSOR_TYPES, GlobalArg, constexpr),
        driver.current_stream,
        knobs.runtime,
        knobs.HookChain,
        driver.raise_error,
        table,
    )


def _reader(module: Any, functions: tuple[int, ...], device_type: str) -> Any:
    """A dispatcher that only reads tensors: it has no driver and no stream look-up."""
    types = (_TENSOR_TYPES, GlobalArg, constexpr)
    return module.Dispatcher(
        (0, 0, 0, 0, 0), functions, _DEVICE_TYPE[device_type], types, id, knobs.runtime, knobs.HookChain, id, {}
    )


_readers: dict[str, Callable[..., bytes | None]] = {}


def signature_reader(device_type: str = "cuda") -> Callable[..., bytes | None]:
    """Return a function that reads everything by which a call is planned: dtypes, devices, alignments, shapes and
    strides of its tensors.

    ``device_type`` is "cuda" or "cpu". The function takes a few hundred nanoseconds. It returns None if an argument
    is no plain tensor on such a device, without the native module, and until that is built.
    """
    reader = _readers.get(device_type)
    if reader is None:
        if not ahead.prepare(load).done():
            return _unread
        loaded = load()
        reader = _readers[device_type] = _unread if loaded is None else _reader(*loaded, device_type).signature
    return reader


def _unread(*tensors: Any) -> None:
    """The reader without the native module."""


def _check(module: Any, functions: tuple[int, ...]) -> None:
    """Refuse the module unless it reads a tensor as torch does."""
    reader = _reader(module, functions, "cpu")
    tensor, specs = torch.empty(7, 3, 16, dtype=torch.bfloat16, device="cpu")[1:, :, 8:].transpose(0, 1), ("spec",)
    words = reader.read((GlobalArg(tensor, specs),))  # type: ignore[arg-type]
    expected = (id(specs), 3, *(x for pair in zip(tensor.shape, tensor.stride()) for x in pair), tensor.data_ptr())
    if words is None or words[1:] != expected:
        raise RuntimeError(
            f"native.c misreads tensors of torch {torch.__version__} (Triton {triton.__version__}): {words} != "
            f"{expected}"
        )
