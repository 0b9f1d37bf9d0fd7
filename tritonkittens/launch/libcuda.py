"""The CUDA driver calls of a launch, through ctypes."""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

# Sources for every number here: cuda.h of CUDA 13 (CUlaunchConfig, CUlaunchAttribute, CUfunction_attribute).
_ATTRIBUTE = struct.Struct("<i4x64s")
_CONFIG = struct.Struct("<7I4xQQI4x")
ATTRIBUTE_COOPERATIVE = 2
ATTRIBUTE_CLUSTER_DIMENSION = 4
ATTRIBUTE_CLUSTER_SCHEDULING_POLICY = 5
ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
ATTRIBUTE_SHARED_MEMORY_MODE = 18
CLUSTER_POLICY_SPREAD = 1
SHARED_MEMORY_MODE_ALLOW_OVERSIZED = 3
FUNCTION_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14

TENSOR_MAP_BYTES = 128


def launch_attribute(kind: int, *values: int) -> bytes:
    """Return one CUlaunchAttribute (72 bytes): its id and up to 16 32-bit values."""
    return _ATTRIBUTE.pack(kind, struct.pack(f"<{len(values)}I", *values))


def launch_config(
    grid: tuple[int, int, int], threads: int, shared: int, stream: int, attributes: int, count: int
) -> bytes:
    """Return one CUlaunchConfig (56 bytes). ``grid`` in blocks, ``shared`` in bytes, ``stream`` and ``attributes`` as
    addresses.
    """
    return _CONFIG.pack(*grid, threads, 1, 1, shared, stream, attributes, count)


class CudaDriver:
    """libcuda, opened by name or path. ``device_type`` is the torch device type of tensors for its launches.

    A test opens a stand-in library with this class; all other code uses :func:`cuda_driver`.
    """

    def __init__(self, library: str = "libcuda.so.1", device_type: str = "cuda"):
        self.device_type = device_type
        self._library = ctypes.CDLL(library)
        self.launch_kernel = self._function("cuLaunchKernelEx", *[ctypes.c_void_p] * 4)
        self.context_get = self._function("cuCtxGetCurrent", ctypes.c_void_p)
        self.context_set = self._function("cuCtxSetCurrent", ctypes.c_void_p)
        self.replace_address = self._function("cuTensorMapReplaceAddress", ctypes.c_void_p, ctypes.c_void_p)
        self.encode_tiled_function = self._function(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            *[ctypes.c_void_p] * 5,
            *[ctypes.c_int] * 4,
        )
        self._encode_im2col = self._function(
            "cuTensorMapEncodeIm2col",
            *[ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32],
            *[ctypes.c_void_p] * 5,
            *[ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p],
            *[ctypes.c_int] * 4,
        )
        self._retain_context = self._function("cuDevicePrimaryCtxRetain", ctypes.c_void_p, ctypes.c_int)
        self._set_attribute = self._function("cuFuncSetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        self._error_name = self._function("cuGetErrorName", ctypes.c_int, ctypes.c_void_p)
        self._error_string = self._function("cuGetErrorString", ctypes.c_int, ctypes.c_void_p)
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        # torch's current stream by device index: an integer handle, without a Stream object.
        self.current_stream: Callable[[int], int] = (
            torch._C._cuda_getCurrentRawStream if device_type == "cuda" else _default_stream
        )

    def _function(self, name: str, *argtypes: Any) -> Callable[..., int]:
        function = getattr(self._library, name)
        function.argtypes, function.restype = argtypes, ctypes.c_int
        return function

    def current_device(self) -> int:
        """Index of torch's current device."""
        return torch.cuda.current_device() if self.device_type == "cuda" else -1

    def check(self, code: int, call: str) -> None:
        """Raise RuntimeError if a driver call did not return CUDA_SUCCESS."""
        if code:
            self.raise_error(code, call)

    def raise_error(self, code: int, call: str) -> NoReturn:
        """Raise RuntimeError with the driver's own name and text for ``code``."""
        texts = []
        for function in (self._error_name, self._error_string):
            text = ctypes.c_char_p()
            texts.append(
                text.value.decode() if function(code, ctypes.byref(text)) == 0 and text.value else "unknown error"
            )
        raise RuntimeError(f"{call} failed: {texts[0]} ({code}): {texts[1]}")

    @functools.cached_property
    def version(self) -> int:
        """CUDA version of the driver, 1000 * major + 10 * minor."""
        version = ctypes.c_int()
        self.check(self._function("cuDriverGetVersion", ctypes.c_void_p)(ctypes.byref(version)), "cuDriverGetVersion")
        return version.value

    def primary_context(self, device: int) -> int:
        """Return the context of torch and Triton on ``device``, retained once for the life of the process."""
        with self._lock:
            if device not in self._contexts:
                context = ctypes.c_void_p()
                self.check(self._retain_context(ctypes.byref(context), max(device, 0)), "cuDevicePrimaryCtxRetain")
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make ``device`` current for torch, Triton and the driver, and restore the previous one."""
        if self.device_type != "cuda":
            yield
            return
        with torch.cuda.device(device), self.on_context(self.primary_context(device)):
            yield

    @contextmanager
    def on_context(self, context: int) -> Iterator[None]:
        """Make ``context`` current on this thread; a thread that had none keeps it."""
        current = ctypes.c_void_p()
        self.check(self.context_get(ctypes.byref(current)), "cuCtxGetCurrent")
        if current.value == context:
            yield
            return
        self.check(self.context_set(context), "cuCtxSetCurrent")
        try:
            yield
        finally:
            if current.value:
                self.check(self.context_set(current.value), "cuCtxSetCurrent")

    def launch(self, context: int, config: bytes, function: int, parameters: Any) -> int:
        """Call cuLaunchKernelEx in ``context``; return the driver's result code. ``config``: :func:`launch_config`;
        ``parameters``: ctypes array.
        """
        current = ctypes.c_void_p()
        self.check(self.context_get(ctypes.byref(current)), "cuCtxGetCurrent")
        if current.value == context:
            return self.launch_kernel(config, function, parameters, None)
        with self.on_context(context):
            return self.launch_kernel(config, function, parameters, None)

    def allow_large_clusters(self, function: int) -> None:
        """Let ``function`` run in clusters of 16 blocks (above 8 is not portable across devices)."""
        self.check(self._set_attribute(function, FUNCTION_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1), "cuFuncSetAttribute")

    def encode_tiled(
        self,
        dtype: int,
        address: int,
        dims: list[int],
        strides: list[int],
        box: list[int],
        swizzle: int,
        l2_promotion: int,
        fill: int,
    ) -> bytes:
        """Call cuTensorMapEncodeTiled; return a 128-byte tensor map. Lists run from the innermost dimension; strides
        in bytes, one fewer than dims.
        """
        rank = len(dims)
        storage, tensor_map = _tensor_map_storage()
        code = self.encode_tiled_function(
            tensor_map,
            dtype,
            rank,
            address,
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * rank)(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # no interleave
            swizzle,
            l2_promotion,
            fill,
        )
        self.check(
            code, f"cuTensorMapEncodeTiled(dims={dims}, strides={strides}, box={box}, swizzle={swizzle}, dtype={dtype})"
        )
        return ctypes.string_at(tensor_map, TENSOR_MAP_BYTES)

    def encode_im2col(
        self,
        dtype: int,
        address: int,
        dims: list[int],
        strides: list[int],
        lower: list[int],
        upper: list[int],
        channels: int,
        pixels: int,
        element_strides: list[int],
        swizzle: int,
        l2_promotion: int,
        fill: int,
    ) -> bytes:
        """Call cuTensorMapEncodeIm2col; return a 128-byte tensor map. Lists as in :meth:`encode_tiled`; corners have
        two fewer than dims.
        """
        rank = len(dims)
        storage, tensor_map = _tensor_map_storage()
        code = self._encode_im2col(
            tensor_map,
            dtype,
            rank,
            address,
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * rank)(*strides),
            (ctypes.c_int * rank)(*lower),
            (ctypes.c_int * rank)(*upper),
            channels,
            pixels,
            (ctypes.c_uint32 * rank)(*element_strides),
            0,  # no interleave
            swizzle,
            l2_promotion,
            fill,
        )
        self.check(
            code,
            f"cuTensorMapEncodeIm2col(dims={dims}, strides={strides}, lower={lower}, upper={upper}, "
            f"channels={channels}, pixels={pixels}, element_strides={element_strides}, swizzle={swizzle}, "
            f"dtype={dtype})",
        )
        return ctypes.string_at(tensor_map, TENSOR_MAP_BYTES)


@functools.cache
def cuda_driver() -> CudaDriver:
    """Return the machine's libcuda. Raises RuntimeError without an NVIDIA driver."""
    try:
        return CudaDriver()
    except OSError as error:
        raise RuntimeError(f"launching a kernel needs an NVIDIA driver: {error}") from None


def _tensor_map_storage() -> tuple[Any, int]:
    """Allocate memory for a tensor map at a multiple of 128 bytes; return it and that address."""
    storage = ctypes.create_string_buffer(2 * TENSOR_MAP_BYTES)
    return storage, (ctypes.addressof(storage) + TENSOR_MAP_BYTES - 1) & -TENSOR_MAP_BYTES


def _default_stream(device: int) -> int:
    return 0
