"""Launch compiled kernels. Compiled kernels are found by type and prebuilt launches by shape, both with plain integer
keys.
"""

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime import _allocation
from triton.runtime import driver as triton_driver

from . import ahead, native
from . import libcuda as cuda
from .arguments import (
    SCALAR_FORMAT,
    Args,
    GlobalArg,
    Names,
    Parameters,
    Types,
    argument_types,
    check_devices,
    fingerprint,
    leaves,
    pack,
    signature_types,
    tensor_device,
)
from .clock_cache import ClockCache
from .im2col import Im2colSpec
from .libcuda import CudaDriver
from .target import simulator
from .tensormap import MapSpec, encode, recipe

Grid = tuple[int, ...] | Callable[..., tuple[int, ...]]
Compile = Callable[[Hashable, Types, int], Any]

GRID_LIMITS = (2**31 - 1, 65535, 65535)
_SWIZZLE_BYTES = (0, 32, 64, 128)  # by CUtensorMapSwizzle
_BLOCK_ALIGNMENT = 128


class Code:
    """A compiled kernel loaded on one device, with the data that all its launches share."""

    def __init__(self, compiled: Any, driver: CudaDriver, device: int):
        if driver.device_type == "cuda":
            ahead.prepared(_driver_of_triton)
        compiled._init_handles()  # loads the binary into the current context; raises OutOfResources if it does not fit
        metadata = compiled.metadata
        self.compiled, self.driver, self.device = compiled, driver, device
        self.name: str = metadata.name
        self.function: int = compiled.function
        self.context = driver.primary_context(device)
        self.num_ctas: int = metadata.num_ctas
        self.threads: int = 32 * metadata.num_warps
        self.shared: int = metadata.shared
        self.descriptors: list[dict[str, Any]] = list(getattr(metadata, "tensordesc_meta", None) or ())
        self.types = signature_types(list(compiled.src.signature.values()), self.descriptors)
        self.global_scratch: tuple[int, int] = metadata.global_scratch_size, metadata.global_scratch_align
        self.profile_scratch: tuple[int, int] = metadata.profile_scratch_size, metadata.profile_scratch_align
        self.needs_scratch = bool(self.global_scratch[0] or self.profile_scratch[0])
        if "gsan" in (getattr(metadata, "instrumentation_mode", "") or ""):
            raise RuntimeError(
                f"{self.name}: Triton's global sanitizer adds parameters that this launcher does not pass; turn it off"
            )
        attributes = []  # the same attributes, in the same order, as Triton's own launcher (driver.c, _launch)
        if self.shared > 228 * 1024:
            attributes.append(
                cuda.launch_attribute(cuda.ATTRIBUTE_SHARED_MEMORY_MODE, cuda.SHARED_MEMORY_MODE_ALLOW_OVERSIZED)
            )
        if metadata.launch_pdl:
            attributes.append(cuda.launch_attribute(cuda.ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
        if metadata.launch_cooperative_grid:
            attributes.append(cuda.launch_attribute(cuda.ATTRIBUTE_COOPERATIVE, 1))
        if self.num_ctas != 1:
            attributes.append(cuda.launch_attribute(cuda.ATTRIBUTE_CLUSTER_DIMENSION, self.num_ctas, 1, 1))
            attributes.append(
                cuda.launch_attribute(cuda.ATTRIBUTE_CLUSTER_SCHEDULING_POLICY, cuda.CLUSTER_POLICY_SPREAD)
            )
        if self.num_ctas == 16:
            driver.allow_large_clusters(self.function)
        self.attributes, self.num_attributes = b"".join(attributes), len(attributes)
        self._attributes_storage = ctypes.create_string_buffer(self.attributes, max(len(self.attributes), 1))
        self.attributes_address = ctypes.addressof(self._attributes_storage)

    def encode_map(self, tensor: torch.Tensor, spec: MapSpec, name: str, position: int) -> bytes:
        """Return the tensor map of the ``position``-th descriptor, with the box of this kernel's copies."""
        if position >= len(self.descriptors):
            raise RuntimeError(
                f"{name}: descriptor {position}, but {self.name} was compiled with {len(self.descriptors)} tensor "
                "descriptors; the compile callback must declare one 'tensordesc' per spec"
            )
        compiled = self.descriptors[position]
        is_im2col = bool(compiled.get("is_im2col"))
        if is_im2col != isinstance(spec, Im2colSpec) or compiled["fp4_padded"]:
            kind = "a padded fp4" if compiled["fp4_padded"] else "an im2col" if is_im2col else "a tiled"
            raise RuntimeError(f"{name}: {spec}, but {self.name} was compiled with {kind} descriptor")
        box, swizzle = tuple(compiled["block_size"]), _SWIZZLE_BYTES[compiled["swizzle"]]
        if (
            swizzle != spec.swizzle
            or len(box) != len(spec.box)
            or any(tile % copy for tile, copy in zip(spec.box, box))
        ):
            raise RuntimeError(
                f"{name}: {spec}, but {self.name} copies boxes of {box} with a {swizzle}-byte swizzle; a kernel is "
                "launched with the tiles it was compiled for"
            )
        if compiled["elem_size"] != tensor.itemsize:
            raise RuntimeError(
                f"{name}: {tensor.dtype}, but {self.name} copies elements of {compiled['elem_size']} bytes"
            )
        # the driver encodes for the current context; a fresh thread has none
        with self.driver.on_context(self.context):
            return encode(tensor, spec, name=name, box=box, driver=self.driver)

    def scratch(self, grid: tuple[int, int, int], stream: int) -> tuple[Any, Any]:
        """Return global and profile scratch buffers for one launch (None where the kernel needs none), as Triton's
        own launcher allocates them.
        """
        blocks = grid[0] * grid[1] * grid[2] * self.num_ctas
        buffers: list[Any] = [None, None]
        if self.global_scratch[0]:
            buffers[0] = _allocation._allocator.get()(blocks * self.global_scratch[0], self.global_scratch[1], stream)
        if self.profile_scratch[0]:
            size, alignment = blocks * self.profile_scratch[0], self.profile_scratch[1]
            if _allocation.has_profile_allocator():
                buffers[1] = _allocation._profile_allocator(size, alignment, stream)
            else:
                buffers[1] = triton_driver.active.allocate_default_profile_scratch(size, alignment, stream)
        return buffers[0], buffers[1]


class Binding:
    """One prebuilt launch: everything but grid, stream, scalars and scratch. It is immutable, so threads can share
    it.
    """

    def __init__(self, code: Code, parameters: Parameters):
        self.code, self.parameters, self.used = code, parameters, False
        self._shared = self._block()

    def _block(self) -> tuple[Any, int, Any]:
        """Return a fresh copy of the parameter block at a 128-byte boundary: storage, address, array of parameter
        addresses.
        """
        block, offsets = self.parameters[:2]
        storage = ctypes.create_string_buffer(len(block) + _BLOCK_ALIGNMENT)
        start = (ctypes.addressof(storage) + _BLOCK_ALIGNMENT - 1) & -_BLOCK_ALIGNMENT
        ctypes.memmove(start, block, len(block))
        return storage, start, (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets])

    def launch(self, grid: tuple[int, int, int], stream: int, scalars: Sequence[int | float]) -> None:
        """Launch on ``stream``. ``grid`` in clusters, all extents positive; ``scalars`` in the order of the slots."""
        code = self.code
        storage, start, addresses = self._shared
        keep: tuple[Any, ...] = ()
        if scalars or code.needs_scratch:
            storage, start, addresses = self._block()
            for (offset, type), value in zip(self.parameters.slots, scalars, strict=True):
                ctypes.memmove(start + offset, _scalar_bytes(type, value), struct.calcsize(SCALAR_FORMAT[type]))
            if code.needs_scratch:
                keep = code.scratch(grid, stream)
                for offset, buffer in zip(self.parameters.offsets[-2:], keep):
                    pointer = 0 if buffer is None else buffer.data_ptr()
                    ctypes.memmove(start + offset, struct.pack("<Q", pointer), 8)
        config = cuda.launch_config(
            (grid[0] * code.num_ctas, grid[1], grid[2]),
            code.threads,
            code.shared,
            stream,
            code.attributes_address,
            code.num_attributes,
        )
        result = code.driver.launch(code.context, config, code.function, addresses)
        del storage, keep  # the driver has copied the parameters; scratch is freed in stream order
        code.driver.check(result, f"cuLaunchKernelEx of {code.name}")

    def recipes(self, args: Args, owners: tuple[int, ...], varying: tuple[int, ...]) -> bytes:
        """Return how native.c encodes the tensor maps of the tensors in ``varying``; see `Launcher.bind`."""
        code, maps = self.code, [(number, offset) for number, offset, is_map in self.parameters.places if is_map]
        described = [(x.tensor, spec) for x in _globals(args) for spec in x.specs]
        return b"".join(
            recipe(owners[number], offset, *of, tuple(descriptor["block_size"]), code.driver)
            for (number, offset), of, descriptor in zip(maps, described, code.descriptors, strict=True)
            if owners[number] in varying
        )

    def native(self, module: Any, owner: Any) -> Any:
        """Return this launch for native.c, which keeps ``owner`` alive."""
        code, (block, offsets, slots, places, addresses) = self.code, self.parameters
        return module.Binding(
            code.function,
            code.context,
            code.device,
            code.num_ctas,
            code.threads,
            code.shared,
            code.attributes,
            block,
            struct.pack(f"<{len(offsets)}I", *offsets),
            b"".join(struct.pack("<2I", offset, struct.calcsize(SCALAR_FORMAT[type])) for offset, type in slots),
            b"".join(struct.pack("<3I", *place) for place in places),
            struct.pack(f"<{len(addresses)}Q", *addresses),
            owner,
        )


def _scalar_bytes(type: str, value: int | float) -> bytes:
    if type == "fp32":
        return bytes(ctypes.c_float(value))  # rounds, and overflows to infinity, as C does
    return struct.pack(SCALAR_FORMAT[type], value)


class Launcher:
    """Launches one kernel. A repeated launch takes one look-up and one driver call.

    Args:
        compile: ``compile(key, types, device)`` returns a ``triton.compiler.CompiledKernel``. The launcher calls it
            once for every new combination, with the device current and under the launcher's lock. ``types`` is a
            tuple of :class:`ArgType`, nested as the arguments are. The kernel's signature has one entry per pointer
            and scalar, and one ``tensordesc`` per spec of a GlobalArg, in order.
        name: the kernel's name in messages.
        arg_names: the arguments' names in messages.
        described: returns both names for a key, where they depend on the key.
        capacity: the number of prebuilt launches to keep. Compiled kernels are kept for ever.
        native: False keeps to the Python path.
        refusals: exceptions of ``compile`` with complete messages; a call raises them without the frames in between.

    Prebuilt launches are found by dtypes, and for TMA arguments by shapes and strides, never by the tensors.
    Addresses are filled in at the launch (without native.c they are part of the key).
    Launches may come from any thread, on any stream, in a CUDA graph capture, with tensors of any device.
    """

    def __init__(
        self,
        compile: Compile,
        *,
        name: str = "kernel",
        arg_names: Sequence[str] = (),
        described: Callable[[Any], tuple[str, Names]] | None = None,
        capacity: int = 4096,
        driver: CudaDriver | None = None,
        native: bool = True,
        refusals: tuple[type[Exception], ...] = (),
    ):
        self.name, self.arg_names, self._described = name, tuple(arg_names), described
        self._compile, self._driver, self._native, self._refusals = compile, driver, native, refusals
        self._codes: dict[Hashable, Code] = {}
        self._bindings = ClockCache(capacity)
        self._native_bindings = ClockCache(capacity)
        self._lock = threading.RLock()
        self._module: Any = None
        self._dispatcher: Any = None
        self._fast: Callable[[Any, Args, Hashable], bool] = _decline  # until the first launch
        self._is_started = False

    def __call__(self, grid: Grid, args: Args, key: Hashable = None) -> None:
        """Launch with ``args`` on the current stream of the device of their first tensor.

        Args:
            grid: one to three ints, in clusters, or a function of the arguments that returns them. An extent of 0
                launches nothing.
            args: a tuple of tensors (passed as pointers), GlobalArg, int, float, bool, None or constexpr (not
                passed), and tuples of these.
            key: everything else on which the code depends. Every launch hashes it, so keep it cheap.

        Raises:
            TypeError: for arguments or a grid that cannot be launched.
            ValueError: for values of them that cannot.
            RuntimeError: if the driver refuses.
        """
        if callable(grid):
            grid = grid(*args)
        if not self._fast(grid, args, key):
            try:
                self._launch(grid, args, key)
            except self._refusals as error:
                raise error.with_traceback(None) from error.__cause__

    def bind(
        self,
        grid: Grid,
        args: Args,
        key: Hashable,
        owners: tuple[int, ...],
        fallback: Callable[..., None],
        varying: tuple[int, ...] = (),
    ) -> Callable[..., None]:
        """Compile the launch now, and return it as a function of tensors alone.

        Tensor number ``owners[i]`` of a call replaces the i-th of ``args``. Only addresses of a call's tensors are
        read, so each must have the dtype, shape and strides of the tensor in ``args``. Shape and strides of those
        whose number is in ``varying`` may differ: their tensor maps are encoded at every call.
        ``fallback`` does the same in more steps. It runs where launch hooks are set, and for tensors that TMA cannot
        address; in the simulator and without the native module, it is the result.
        """
        if callable(grid) or (simulator.get() is not None and tensor_device(args) in (None, -1)):
            return fallback
        if not self._is_started:
            check_devices(args, self.names(key), self._started().device_type)
            self._start(args, key)
        native_key = self._dispatcher.table_key(args, key) if self._dispatcher else None
        if native_key is None:
            return fallback
        recipes = b""
        if varying or native_key not in self._native_bindings.table:
            device, scalars = self._device(args), list[int | float]()
            binding = self._bind((key, device, fingerprint(args, scalars)), native_key, args, key, device)
            recipes = binding.recipes(args, owners, varying)
        return self._dispatcher.bind(grid, args, key, owners, fallback, recipes) or fallback

    def compiled(self, args: Args, key: Hashable = None) -> Any:
        """Return the CompiledKernel of a call with these arguments, compiled now if needed."""
        with self._lock:
            return self._code(args, key, self._device(args)).compiled

    def compile(self, args: Args, key: Hashable, device: int) -> Any:
        """Compile for the current target, without loading or caching, for the simulator."""
        return self._compile(key, argument_types(args, self.names(key)), device)

    def names(self, key: Hashable = None) -> Names:
        """Return the arguments' names in messages, for this key."""
        return self._described(key)[1] if self._described else self.arg_names

    def _name(self, key: Hashable) -> str:
        return self._described(key)[0] if self._described else self.name

    @property
    def num_bindings(self) -> int:
        """The number of prebuilt launches."""
        return len(self._bindings)

    @property
    def num_compiled(self) -> int:
        """The number of compiled kernels."""
        return len(self._codes)

    @property
    def is_native(self) -> bool:
        """Whether launches go through native.c; known after the first."""
        return self._dispatcher is not None

    def _start(self, args: Args, key: Hashable) -> None:
        """Open the driver and the native module at the first launch. They are built while its kernel is compiled."""
        with self._lock:
            if self._is_started:
                return
            driver = self._started()
            if self._native:
                ahead.prepare(native.load)
                if driver.device_type == "cuda":
                    ahead.prepare(_driver_of_triton)
                self._code(args, key, self._device(args))
            loaded = native.load() if self._native else None
            if loaded is not None:
                self._module, functions = loaded
                self._dispatcher = native.new_dispatcher(self._module, functions, driver, self._native_bindings.table)
                self._fast = self._dispatcher.launch
            self._is_started = True

    def _launch(self, grid: Any, args: Args, key: Hashable) -> None:
        extents = self._check_grid(grid, key)
        if 0 in extents:
            return
        if not isinstance(args, tuple):
            raise TypeError(f"{self._name(key)}: args is a {type(args).__name__}; it must be a tuple")
        simulated = simulator.get()
        if simulated is not None and tensor_device(args) in (None, -1):
            check_devices(args, self.names(key), *simulated.device_types)
            simulated.launch(self, extents, args, key)
            return
        if not self._is_started:
            check_devices(args, self.names(key), "cuda" if self._driver is None else self._driver.device_type)
            self._start(args, key)
        driver, device, scalars = self._started(), self._device(args), list[int | float]()
        binding_key = (key, device, fingerprint(args, scalars))
        try:
            binding: Binding | None = self._bindings.table.get(binding_key)
        except TypeError:  # unhashable: name the argument, if it is one
            argument_types(args, self.names(key))
            raise
        native_key = self._dispatcher.table_key(args, key) if self._dispatcher else None
        if binding is None or (native_key is not None and native_key not in self._native_bindings.table):
            binding = self._bind(binding_key, native_key, args, key, device)
        binding.used = True
        if extents[0] * binding.code.num_ctas > GRID_LIMITS[0]:
            raise ValueError(
                f"{self._name(key)}: grid {grid!r} of clusters of {binding.code.num_ctas} blocks; a launch has at most "
                f"{GRID_LIMITS[0]} blocks along x"
            )
        stream = driver.current_stream(device)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if not (_is_active(enter) or _is_active(leave)):
            binding.launch(extents, stream, scalars)
            return
        metadata = binding.code.compiled.launch_metadata(extents, stream, *args)
        if enter is not None:
            enter(metadata)
        binding.launch(extents, stream, scalars)
        if leave is not None:
            leave(metadata)

    def _bind(self, binding_key: Hashable, native_key: Hashable, args: Args, key: Hashable, device: int) -> Binding:
        with self._lock:
            binding: Binding | None = self._bindings.table.get(binding_key)
            if binding is None:
                code = self._code(args, key, device)
                binding = Binding(code, pack(args, self.names(key), code.types, code.encode_map, self._name(key)))
                self._bindings.insert(binding_key, binding)
            if (
                native_key is not None
                and native_key not in self._native_bindings.table
                and not binding.code.needs_scratch
            ):
                # The native key holds the addresses of the specs tuples: keep exactly these tuples (and never a
                # tensor).
                owner = (binding.code, [value.specs for value in _globals(args)])
                self._native_bindings.insert(native_key, binding.native(self._module, owner))
            return binding

    def _code(self, args: Args, key: Hashable, device: int) -> Code:
        check_devices(args, self.names(key), self._started().device_type)
        types = argument_types(args, self.names(key))
        code = self._codes.get((key, device, types))
        if code is None:
            driver = self._started()
            with driver.on_device(device):
                compiled = ahead.take(self, key, types, device) or self._compile(key, types, device)
                for other in self._codes.values():
                    if other.compiled is compiled and other.device != device:
                        raise RuntimeError(
                            f"{self._name(key)}: one CompiledKernel for devices {other.device} and {device}; Triton "
                            "loads it on one device, so the compile callback must return a new one for each"
                        )
                code = Code(compiled, driver, device)
            self._codes[(key, device, types)] = code
        return code

    def _started(self) -> CudaDriver:
        if self._driver is None:
            self._driver = cuda.cuda_driver()
        return self._driver

    def _device(self, args: Args) -> int:
        device = tensor_device(args)
        return self._started().current_device() if device is None else device

    def _check_grid(self, grid: Any, key: Hashable) -> tuple[int, int, int]:
        if not isinstance(grid, (tuple, list)) or not 1 <= len(grid) <= 3:
            raise TypeError(f"{self._name(key)}: grid {grid!r}; a grid is a tuple of one to three ints")
        extents = []
        for axis, extent, limit in zip("xyz", grid, GRID_LIMITS):
            try:
                extent = operator.index(extent)
            except TypeError:
                raise TypeError(
                    f"{self._name(key)}: grid {grid!r}; its extent along {axis} is a {type(extent).__name__}, not an "
                    "int"
                ) from None
            if not 0 <= extent <= limit:
                raise ValueError(f"{self._name(key)}: grid {grid!r}; its extent along {axis} must lie in 0 to {limit}")
            extents.append(extent)
        x, y, z = (*extents, 1, 1)[:3]
        return x, y, z


def _globals(args: Args) -> list[Any]:
    return [value for _, value in leaves(args) if isinstance(value, GlobalArg)]


def _is_active(hook: Any) -> bool:
    """Whether a launch hook does anything: Triton's default is a chain of no hooks."""
    return bool(hook.calls) if isinstance(hook, knobs.HookChain) else hook is not None


@functools.cache
def _driver_of_triton() -> Any:
    """Triton's driver, which its first use builds."""
    return triton_driver.active


def _decline(grid: Any, args: Args, key: Hashable) -> bool:
    """The fast path without a native module: it declines every launch."""
    return False
