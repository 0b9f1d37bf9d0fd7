"""`@tk.kernel`: a `@triton.jit` function compiled as an explicit-tile kernel, with a launch path and a compile path
that needs no GPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget

from tritonkittens.arch import capability_of, chip_of, names_of_chips_with
from tritonkittens.inline_ptx._asm import in_cluster, kernel_name
from tritonkittens.inline_ptx.extern import link_options
from tritonkittens.lang.core.backend import (
    ExplicitSource,
    GluonJITFunction,
    InterpretedFunction,
    JITFunction,
    library_hash,
)
from tritonkittens.lang.core.configuration import Configuration
from tritonkittens.lang.core.dtypes import from_torch
from tritonkittens.lang.core.errors import REFUSALS, ArchitectureError, TileError
from tritonkittens.lang.core.resources import Bill, billing, shared_over_budget, tensor_columns
from tritonkittens.lang.memory.shared_tiles import piece_shared_layout
from tritonkittens.lang.sync.semaphores import REPORT
from tritonkittens.lang.types.global_layout import GlobalLayout, even_rows, gl
from tritonkittens.launch import GlobalArg, Im2colSpec, Launcher, capability, check_tensor_map, simulator
from tritonkittens.launch.ahead import hash_of_triton, prepared
from tritonkittens.launch.arguments import (
    Args,
    ArgType,
    Path,
    Types,
    argument_types,
    name_at,
    names_inside,
    signature_of,
)
from tritonkittens.launch.fallbacks import mma_sync_products
from tritonkittens.launch.launcher import Grid
from tritonkittens.launch.tensormap import MapSpec

OPTIONS = {"num_warps", "debug", "maxnreg", "minnctapersm", "cluster_size", "launch_pdl", "launch_cooperative_grid"}
CLUSTER_SIZES = (1, 2, 4, 8, 16)  # 16 is not portable; the launcher requests it explicitly

# extents and strides of a tensor; run-time values are None
Fixed = tuple[tuple[int | None, ...], tuple[int | None, ...]]
Static = tuple[tuple[Path, Fixed], ...]  # the fixed values of all arguments that have any
Options = tuple[tuple[str, Any], ...]
# ((constants, static layouts), options): the compile key, without types
Key = tuple[tuple[tuple[Any, ...], Static], Options]


class Kernel:
    """An explicit-tile kernel. `kernel[grid](*args, num_warps=4, debug=False)` launches it.

    Arguments are `tk.gl(tensor, tiles…)`, tensors (pointers), numbers and tuples of these. Parameters annotated
    `tk.constexpr` take any hashable constant. Options, by keyword:

    - `num_warps`: warps of the CTA (of its first role).
    - `debug`: True makes waits trap after two seconds; "report" also prints the warps that wait.
    - `maxnreg`: registers of a thread at the start; the compiler may move registers between roles.
    - `minnctapersm`: CTAs for which an SM has registers without moving any (an option of ptxas).
    - `cluster_size`: CTAs of a cluster (1, 2, 4, 8 or 16). The grid then counts clusters.
    - `launch_pdl`: the kernel may start before the previous kernel of the stream ends (`tk.dependency_wait`).
    - `launch_cooperative_grid`: all CTAs run at the same time.

    `kernel.compile(*args, arch="sm_90a")` compiles without a GPU, for tensors on any device, also "meta".
    `triton.autotune` and `triton.heuristics` go over `@tk.kernel`. A configuration's `num_warps` (4 by default)
    replaces the kernel's; its `num_stages` has no effect.
    """

    def __init__(self, fn: Any, num_warps: int = 4):
        self.name: str = getattr(fn, "__name__", str(fn))
        # triton.autotune and triton.heuristics read these, and call `run` and `warmup`
        self.fn, self.arg_names = fn, getattr(fn, "arg_names", [])
        # refused at its use, so that a module that defines explicit kernels can be imported
        if isinstance(fn, InterpretedFunction):
            return
        if not isinstance(fn, JITFunction):
            raise TileError(f"@tk.kernel {getattr(fn, '__name__', fn)!r}: put it over an @triton.jit function")
        self.jit = GluonJITFunction(fn.fn)
        self.num_warps = num_warps
        self.parameters = self.jit.params
        self.constants = [i for i, p in enumerate(self.parameters) if p.is_constexpr]
        self.runtime = [i for i, p in enumerate(self.parameters) if not p.is_constexpr]
        self.launcher = Launcher(self._compile_for_launch, name=self.name, described=self._described, refusals=REFUSALS)
        functools.update_wrapper(self, fn.fn, updated=())  # type: ignore[arg-type]

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return functools.partial(self.launch, grid)

    def launch(self, grid: Grid, *args: Any, **kwargs: Any) -> None:
        """Launch on the current stream of the tensors' device; see the class."""
        runtime, constants, options = self._bind(args, kwargs)
        self.launcher(grid, self._prepared(runtime), (constants, options))

    def bind(self, grid: Grid, *args: Any, varying: tuple[int, ...] = (), **kwargs: Any) -> Callable[..., None]:
        """Return the launch with these numbers, constants and options as a function of its tensors alone.

        Args:
            grid, args, kwargs: as of a launch.
            varying: indices, among the tensors of a call, of those whose extents and strides may differ from the ones
                here. Their tensor maps are encoded at each call.

        Returns:
            A function of the tensors in the order of the arguments, a plain tensor for each `tk.gl`. It launches on the
            current stream. It reads addresses only: other dtypes, extents or strides than here are not noticed.

        Saves host time where a launch repeats; see `Launcher.bind`. Example::

            run = kernel.bind(grid, tk.gl(x, tile), tk.gl(y), tile)
            run(x, y)
        """
        runtime, constants, options = self._bind(args, kwargs)
        key = (constants, options)

        def fallback(*tensors: torch.Tensor) -> None:
            given = ((tensor, number in varying) for number, tensor in enumerate(tensors))
            self.launcher(grid, self._prepared([_with_tensors(x, given) for x in runtime]), key)

        owners = [i for i, places in enumerate(_addresses(runtime)) for _ in range(places)]
        return self.launcher.bind(grid, self._prepared(runtime), key, tuple(owners), fallback, varying)

    def run(self, *args: Any, grid: Grid, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch as Triton's decorators do. `grid` may be a function of a dict of all arguments by name, constants
        included.

        `warmup` compiles for the current device without a launch, and returns the CompiledKernel.
        """
        named = self.jit.signature.parameters if hasattr(self, "jit") else {}
        if "num_stages" not in named:
            kwargs.pop("num_stages", None)
        if "num_ctas" not in named and (ctas := kwargs.pop("num_ctas", 1)) != 1:
            raise TileError(
                f"{self.name}(num_ctas={ctas!r}): an explicit kernel forms clusters by cluster_size={ctas!r}"
            )
        runtime, constants, options = self._bind(args, kwargs)
        prepared, key = self._prepared(runtime), (constants, options)
        if warmup:
            return (
                self.launcher.compiled(prepared, key)
                if simulator.get() is None
                else self.launcher.compile(prepared, key, -1)
            )
        if callable(grid):
            values = dict(
                zip(
                    [self.parameters[i].name for i in (*self.runtime, *self.constants)],
                    (*runtime, *constants[0]),
                    strict=True,
                )
            )
            grid = grid({p.name: values[p.name] for p in self.parameters})
        self.launcher(grid, prepared, key)
        return None

    def warmup(self, *args: Any, grid: Grid, **kwargs: Any) -> Any:
        """Compile for the current device without a launch. Returns the CompiledKernel."""
        return self.run(*args, grid=grid, warmup=True, **kwargs)

    def compile(self, *args: Any, arch: str | int = "sm_90a", **kwargs: Any) -> Any:
        """Compile for an architecture, without a GPU.

        Args:
            args: arguments of a launch; only their types, shapes and strides count.
            arch: "sm_90a" or 90, for example.

        Returns:
            Triton's CompiledKernel (`.asm`, `.metadata`).

        Raises:
            TileError: for a broken rule; KernelError for a mistake in the kernel.
        """
        runtime, constants, options = self._bind(args, kwargs)
        names = self._described((constants, options))[1]
        for name, argument in zip(names, runtime, strict=True):
            check_descriptors(argument, name)
        types = argument_types(self._prepared(runtime), names)
        try:
            return self._compile((constants, options), types, capability_of(arch))
        except REFUSALS as error:
            raise error.with_traceback(None) from error.__cause__

    def _described(self, key: Any) -> tuple[str, list[Any]]:
        """Return the names of the kernel and its arguments for messages. A constant of the kernel may replace them."""
        names = [self.parameters[i].name for i in self.runtime]
        configuration = _configuration(key[0][0])
        if configuration is None:
            return self.name, names
        name, inside = configuration.described
        return name, [inside.get(n, n) for n in names]

    def _prepared(self, arguments: list[Any]) -> Args:
        """Convert the arguments for the launcher. Raises `TileError` that names an argument which no kernel takes."""
        prepared: list[Any] = []
        try:
            for argument in arguments:
                prepared.append(prepare(argument))
        except TileError as error:
            raise TileError(f"{self.parameters[self.runtime[len(prepared)]].name}: {error}") from None
        return tuple(prepared)

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], tuple[tuple[Any, ...], Static], Options]:
        if not hasattr(self, "jit"):
            raise TileError(
                f"@tk.kernel {self.name}: explicit tiles do not run in Triton's interpreter (TRITON_INTERPRET=1)"
            )
        options = {k: kwargs.pop(k) for k in list(kwargs) if k in OPTIONS and k not in self.jit.signature.parameters}
        cluster = options.get("cluster_size", 1)
        if cluster not in CLUSTER_SIZES:
            raise TileError(
                f"{self.name}(cluster_size={cluster!r}): a cluster has {', '.join(map(str, CLUSTER_SIZES[:-1]))} or "
                f"{CLUSTER_SIZES[-1]} blocks"
            )
        try:
            bound = self.jit.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{self.name}: {error}; its parameters are ({', '.join(p.name for p in self.parameters)})"
            ) from None
        bound.apply_defaults()
        values = list(bound.arguments.values())
        runtime = [values[i] for i in self.runtime]
        constants = tuple(values[i].value if isinstance(values[i], tl.constexpr) else values[i] for i in self.constants)
        if options.get("debug", False) not in (False, True, REPORT):
            raise TileError(f"{self.name}(debug={options['debug']!r}): must be False, True or {REPORT!r}")
        return runtime, (constants, static_layouts(runtime)), tuple(sorted(options.items()))

    def _compile_for_launch(self, key: Any, types: Types, device: int) -> Any:
        major, minor = capability(device)
        return self._compile(key, types, major * 10 + minor)

    def _compile(self, key: Key, types: Types, arch: int) -> Any:
        """Compile the kernel. If it exceeds the shared memory, compile again with a smaller configuration.

        The compiler's scratch memory is known only after a compilation.
        """
        while True:
            (constants, static), options = key
            compiled, bill = self._compile_once(key, types, arch)
            if compiled.metadata.tmem_size > tensor_columns(bill.blocks_per_sm):  # of all roles' products together
                compiled, bill = self._compile_once(key, types, arch, multiplies_through_tmem=False)
            excess = compiled.metadata.shared - chip_of(arch).shared_per_block
            configuration = _configuration(constants)
            if excess <= 0:
                if configuration and chip_of(arch).tcgen05:
                    configuration.note_fallbacks(arch, mma_sync_products(compiled.asm["ttgir"]))
                return compiled
            smaller = configuration and configuration.with_less_memory(arch, excess)
            if smaller is None:
                break
            key = (tuple(smaller if c is configuration else c for c in constants), static), options
        if not bill.shared:  # the disk cache keeps no bill
            with knobs.compilation.scope():
                knobs.compilation.always_compile = True
                _, bill = self._compile_once(key, types, arch)
        name, advice = configuration.memory_advice if configuration else (self.name, "")
        raise shared_over_budget(name, compiled.metadata.shared, arch, bill.shared, advice)

    def _compile_once(
        self, key: Key, types: Types, arch: int, multiplies_through_tmem: bool = True
    ) -> tuple[Any, Bill]:
        (constants, static), options = key
        signature: dict[str, Any] = {}
        attributes: dict[Path, Any] = {}
        constexprs: dict[Path, Any] = {}
        for i, value in zip(self.constants, constants, strict=True):
            constexprs[(i,)] = value
        kinds = dict(zip(self.runtime, types, strict=True))
        for i, parameter in enumerate(self.parameters):
            signature[parameter.name] = (
                "constexpr"
                if i in self.constants
                else signature_of(kinds[i], (i,), attributes, constexprs, _descriptor)
            )
        descriptors = [kinds[i] if i in kinds else "constexpr" for i in range(len(self.parameters))]
        constexprs.update(_parameter_numbers(descriptors))
        for (i, *inner), fixed in static:
            path = (self.runtime[i], *inner, GlobalLayout._fields.index("fixed"))
            constexprs[path] = fixed
        if not chip_of(arch).e4m3 and any("fp8e4nv" in kind for kind in _flat(tuple(signature.values()))):
            raise ArchitectureError(
                f"{self.name}: the 8-bit float e4m3 (fp8e4m3) needs sm_89 or newer; this kernel is compiled for "
                f"sm_{arch}"
            )
        # Triton's overflow checks call an assert, and ptxas serialises wgmma at calls, so only debug="report" has them
        overflow = dict(options).get("debug") == REPORT
        settings = {
            "num_warps": self.num_warps,
            "enable_fp_fusion": True,
            "sanitize_overflow": overflow,
            **link_options(),
            **dict(options),
        }
        blocks = settings.pop("minnctapersm", None)
        if blocks:
            settings["ptx_options"] = " ".join(
                [*filter(None, [knobs.nvidia.ptxas_options]), f"--minnctapersm={blocks}"]
            )
        cluster = settings.pop("cluster_size", 1)
        if cluster > 1 and not chip_of(arch).tma:
            raise ArchitectureError(
                f"{self.name}(cluster_size={cluster}): clusters need {names_of_chips_with('tma')}; this kernel is "
                f"compiled for sm_{arch}"
            )
        prepared(hash_of_triton)
        source = ExplicitSource(self.jit, signature, constexprs, attributes, cluster, multiplies_through_tmem)
        token, named = in_cluster.set(cluster > 1), kernel_name.set(self.jit.fn.__name__)
        try:
            with billing(arch, multiplies_through_tmem) as bill:
                bill.blocks_per_sm = blocks or 1
                compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=settings)
        finally:
            in_cluster.reset(token)
            kernel_name.reset(named)
        # Triton treats a cluster as one program over several blocks. Here every block is a program, and only the
        # launch sets the cluster.
        compiled.metadata = compiled.metadata._replace(num_ctas=cluster)
        return compiled, bill


def _configuration(constants: tuple[Any, ...]) -> Configuration | None:
    return next((c for c in constants if isinstance(c, Configuration)), None)


def _parameter_numbers(kinds: Sequence[Any]) -> dict[Path, int]:
    """Return, by the path of each `parameter` field, the number of the kernel parameter that holds the argument's
    first descriptor.

    A descriptor is followed by its extents and strides, each a parameter of its own.
    """
    numbers: dict[Path, int] = {}
    position = 0

    def visit(kind: Any, path: Path) -> None:
        nonlocal position
        if isinstance(kind, ArgType):
            ranks = [len(spec.lower) + 2 if isinstance(spec, Im2colSpec) else len(spec.box) for spec in kind.specs]
            position += sum(1 + 2 * rank for rank in ranks) if kind.kind == "descriptor" else kind.kind != "constexpr"
            return
        fields = getattr(kind, "_fields", ())
        if (
            "parameter" in fields
            and kind.parameter is not None
            and getattr(kind.parameter, "kind", None) == "constexpr"
        ):
            numbers[path + (fields.index("parameter"),)] = position
        for i, inner in enumerate(kind):
            visit(inner, (*path, i))

    for i, kind in enumerate(kinds):
        if kind != "constexpr":
            visit(kind, (i,))
    return numbers


def _flat(kinds: Sequence[Any]) -> Iterator[str]:
    for kind in kinds:
        yield from (kind,) if isinstance(kind, str) else _flat(kind)


_ELEMENT = {
    "bf16": tl.bfloat16,
    "fp16": tl.float16,
    "fp32": tl.float32,
    "fp8e4nv": tl.float8e4nv,
    "fp8e5": tl.float8e5,
    "i8": tl.int8,
    "u8": tl.uint8,
    "i32": tl.int32,
    "i64": tl.int64,
}


def _descriptor(element: str, spec: MapSpec) -> str:
    layout = piece_shared_layout(_ELEMENT[element], spec.swizzle, len(spec.box))
    box = ",".join(map(str, spec.box))
    if isinstance(spec, Im2colSpec):
        return f"tensordesc_im2col<{element}[{box}],input_rank={len(spec.lower) + 2},{layout!r}>"
    return f"tensordesc<{element}[{box}],{layout!r}>"


def check_descriptors(argument: object, name: Any) -> None:
    """Refuse, without a GPU, a tensor that TMA cannot address. The message names the argument. Raises ValueError or
    TypeError.
    """
    if isinstance(argument, (gl, GlobalArg)):
        tensor = argument.tensor
        address = None if tensor.is_meta else tensor.data_ptr()
        for spec in argument.specs:
            check_tensor_map(tuple(tensor.shape), tensor.stride(), tensor.itemsize, address, spec, name, tensor.dtype)
    elif isinstance(argument, tuple):
        for i, item in enumerate(argument):
            check_descriptors(item, name_at(names_inside(name, argument), i))


def static_layouts(arguments: Sequence[Any], path: Path = ()) -> Static:
    """Return (path, (extents, strides)) of the global layouts with fixed dimensions, also inside tuples."""
    found: list[tuple[Path, Fixed]] = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, gl):
            if argument.static:
                found.append(((*path, i), argument.fixed()))
        elif isinstance(argument, tuple) and not isinstance(argument, GlobalArg):
            found.extend(static_layouts(argument, (*path, i)))
    return tuple(found)


def prepare(argument: Any) -> Any:
    """Convert an argument for the launcher.

    A `gl` becomes its descriptors and pointer; without descriptors, its pointer, extents and strides.
    """
    if isinstance(argument, gl):
        tensor = argument.tensor
        even: Any = None if even_rows(tensor) else ()
        fixed: Any = None if argument.static else ()
        if argument.specs:
            return GlobalLayout(
                GlobalArg(tensor, argument.specs), tensor, (), (), even, None, fixed, None if argument.ragged else ()
            )
        strides = tensor.stride()
        return GlobalLayout(
            (), tensor, tuple(tensor.shape), (*strides[:-1], None if strides[-1] == 1 else strides[-1]), even, (), fixed
        )
    if isinstance(argument, torch.Tensor):
        from_torch(argument.dtype)
        return argument
    if isinstance(argument, tuple) and not isinstance(argument, GlobalArg):
        prepared = [prepare(a) for a in argument]
        return type(argument)(*prepared) if hasattr(argument, "_fields") else tuple(prepared)
    return argument


def _addresses(argument: Any) -> Iterator[int]:
    """Yield, for each tensor of an argument, how many parameters hold its address: two where TMA moves it."""
    if isinstance(argument, gl):
        yield 2 if argument.specs else 1
    elif isinstance(argument, torch.Tensor):
        yield 1
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from _addresses(item)


def _with_tensors(argument: Any, tensors: Iterator[tuple[torch.Tensor, bool]]) -> Any:
    """Return an argument with the next of `tensors` in place of each of its own: as it is where it varies, else in the
    shape of that one."""
    if isinstance(argument, gl):
        tensor, varies = next(tensors)
        shape, strides = argument.tensor.shape, argument.tensor.stride()
        return argument.of(tensor if varies else tensor.as_strided(shape, strides))
    if isinstance(argument, torch.Tensor):
        return next(tensors)[0]
    if isinstance(argument, tuple):
        items = [_with_tensors(item, tensors) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    return argument


def kernel(fn: Any = None, *, num_warps: int = 4) -> Any:
    """Make an explicit-tile kernel of a `@triton.jit` function.

    Args:
        fn: the `@triton.jit` function.
        num_warps: warps of a CTA, or of its first role.

    Returns:
        A `Kernel`.

    Raises:
        TileError: for anything but a `@triton.jit` function.

    Example::

        @tk.kernel(num_warps=8)
        @triton.jit
        def scale(X, Y):
            tile = tk.load(X, tk.rt(tk.bf16, 64, 64), (0, tk.block_index()))
            tk.store(Y, tk.mul(tile, 2.0), (0, tk.block_index()))
    """
    if fn is None:
        return functools.partial(kernel, num_warps=num_warps)
    return Kernel(fn, num_warps)


__all__ = ["Kernel", "inspect", "kernel", "library_hash", "prepare"]
