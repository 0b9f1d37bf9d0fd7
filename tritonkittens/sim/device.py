"""A simulated GPU: within `device(...)` every launch, of Triton, Gluon or tritonkittens, runs on CPU tensors in the
simulator."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver

from tritonkittens.arch import capability_of, chip_of
from tritonkittens.launch import simulator
from tritonkittens.launch.arguments import Args, Types, argument_types
from tritonkittens.launch.device import Device as Facts

from . import tensormaps
from .arguments import as_tensor, convert, flatten
from .global_order import Launches
from .lowering import compiling_for_simulation, load_lowered, load_ttgir
from .memory import Global
from .patches import Patch
from .program import Program
from .report import Finding, SimulationError
from .schedule import Schedule, nth
from .simulation import STEP_LIMIT, Grid, Simulation
from .tuning import tuning_for_simulation
from .values import TensorMap


def facts(capability: int, multiprocessors: int | None = None) -> Facts:
    """Return the device facts of the simulated device, for kernels' configurations."""
    chip = chip_of(capability)
    return Facts.of_chip(
        chip,
        f"simulated sm_{capability}",
        multiprocessors or chip.multiprocessors,
        l2_bytes=50 << 20,
        memory_bytes=80 << 30,
    )


class Launch:
    """One launch on a simulated device: its program, grid and arguments. It can run again on the same memory with
    another schedule.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        values: list[Any],
        memory: Global,
        cluster: int,
        multiprocessors: int | None = None,
    ):
        self.program, self.grid, self.values, self.memory, self.cluster, self.multiprocessors = (
            program,
            grid,
            values,
            memory,
            cluster,
            multiprocessors,
        )
        self.simulation: Simulation | None = None
        self.recorder: Any = None
        self.seconds = 0.0

    def run(
        self,
        schedule: Schedule,
        step_limit: int = STEP_LIMIT,
        recorder: Any = None,
        launches: Launches | None = None,
        early: bool = False,
    ) -> Simulation:
        started = time.perf_counter()
        self.simulation = Simulation(
            self.program,
            Grid(self.grid, self.cluster, self.multiprocessors),
            self.values,
            self.memory,
            schedule=schedule,
            step_limit=step_limit,
            recorder=recorder,
            launches=launches,
            early=early,
        )
        self.simulation.run()
        self.seconds = time.perf_counter() - started
        return self.simulation

    @property
    def findings(self) -> list[Finding]:
        return [] if self.simulation is None else self.simulation.findings


class NoLaunch(Launch):
    """The result of a grid with a 0 in it: nothing ran, and nothing is found."""

    def __init__(self) -> None:
        self.grid, self.values, self.memory, self.cluster = (0, 0, 0), [], Global(), 1
        self.simulation, self.recorder, self.seconds = None, None, 0.0


class SimulatedDevice:
    """A simulated device. `launches` keeps its launches in order.

    With `raise_findings=False`, it collects findings there instead of raising `SimulationError`.
    """

    device_types: tuple[str, ...] = ("cpu",)

    def __init__(
        self,
        arch: str | int = "sm_90a",
        *,
        schedule: Schedule | int | Callable[[], Schedule] | None = None,
        multiprocessors: int | None = None,
        step_limit: int = STEP_LIMIT,
        raise_findings: bool = True,
        recorder: Any = None,
        memory: Sequence[Any] = (),
    ):
        self.arch, self.capability = arch, capability_of(arch)
        self.facts = facts(self.capability, multiprocessors)
        self.schedule, self.step_limit, self.raise_findings, self.recorder = (
            schedule,
            step_limit,
            raise_findings,
            recorder,
        )
        self.launches: list[Launch] = []
        self.memory = [as_tensor(m) for m in memory]
        self.compiled: dict[Any, Any] = {}
        self.before_launch: Callable[[Launch], None] | None = None
        self.trying = False
        self.order = Launches()

    # ---- a launch

    def next_schedule(self, program: Program) -> Schedule:
        given = self.schedule
        if given is None:
            return Schedule()
        if isinstance(given, int):
            return nth(given, len(program.role_names))
        return given if isinstance(given, Schedule) else given()

    @contextlib.contextmanager
    def only_trying(self) -> Iterator[None]:
        """Compile kernels and check them against the device, without running them, inside this context."""
        before, self.trying = self.trying, True
        try:
            yield
        finally:
            self.trying = before

    def start(
        self,
        program: Program,
        grid: tuple[int, int, int],
        flat: Callable[[Global], list[Any]],
        cluster: int,
        early: bool = False,
    ) -> None:
        """Run a program. `flat(memory)` returns its parameters' values and registers the tensors. A grid with a 0 in
        it launches nothing. `early`: with programmatic dependent launch.
        """
        if 0 in grid or self.trying:
            return
        memory = Global()
        for extra in self.memory:
            memory.add_tensor(extra, "memory given to the device")
        types = program.module.kernel.regions[0].blocks[0].argument_types
        values = convert(flat(memory), types, program.name)
        launch = Launch(program, grid, values, memory, cluster, self.facts.multiprocessors)
        self.launches.append(launch)
        if self.before_launch is not None:
            self.before_launch(launch)
        launch.run(self.next_schedule(program), self.step_limit, self.recorder, self.order, early)
        if launch.findings and self.raise_findings:
            raise SimulationError(program.name, launch.findings, launch)

    # ---- tritonkittens' own launcher

    def launch(self, launcher: Any, grid: tuple[int, int, int], args: Args, key: Any) -> None:
        types = argument_types(args, launcher.names(key))
        found = self.compiled.get((id(launcher), key, types))
        if found is None:
            with compiling_for_simulation():
                compiled = launcher.compile(args, key, -1)
            program = load_lowered(compiled.asm["cubin"].decode())
            found = self.compiled[id(launcher), key, types] = (
                program,
                compiled.metadata.num_ctas // program.num_ctas,  # CTAs of a cluster that are programs of their own
                launcher,
                bool(compiled.metadata.launch_pdl),
            )
        program, cluster, _, early = found
        kinds = _kinds(types)
        x, y, z = grid
        self.start(
            program,
            (x * cluster, y, z),
            lambda memory: list(flatten(args, kinds, launcher.names(key), memory)),
            cluster,
            early,
        )

    def encode_tiled(
        self,
        address: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        fill: str,
    ) -> bytes:
        """Return a tensor map in the simulator's form. Dimensions start from the fastest, as in
        cuTensorMapEncodeTiled.
        """
        element, size = tensormaps.FORMATS[dtype]
        nan = math.nan if fill == "nan" else 0.0
        return tensormaps.pack(
            TensorMap(
                address,
                element,
                size,
                tuple(shape[::-1]),
                (*strides[::-1], size),
                tuple(box[::-1]),
                nan,
                swizzle=swizzle,
            )
        )

    # ---- Triton's driver interface

    def triton_launcher(self, source: Any, metadata: Any) -> Any:
        signature = tuple(source.signature.values())
        names = list(source.signature)
        early = bool(getattr(metadata, "launch_pdl", False))

        def launch(x: int, y: int, z: int, stream: Any, program: Program, *rest: Any) -> None:
            values = rest[4:]
            self.start(program, (x, y, z), lambda memory: list(flatten(values, signature, names, memory)), 1, early)

        return launch


def _kinds(types: Types) -> tuple[Any, ...]:
    """Return, for nested `ArgType`s, which arguments are compiled in."""
    return tuple((t.kind if t.kind == "constexpr" else "value") if hasattr(t, "kind") else _kinds(t) for t in types)


class _Utilities:
    """The functions of the driver's C module that Triton calls."""

    def __init__(self, device: SimulatedDevice):
        self.device = device

    def load_binary(self, name: str, kernel: bytes, shared: int, device: Any) -> tuple[None, Program, int, int, int]:
        program = load_lowered(kernel.decode())
        # the most registers of a thread, for hosts that compute an occupancy from them
        return (
            None,
            program,
            min(255, self.device.facts.registers_per_multiprocessor // (32 * program.total_warps)),
            0,
            1024,
        )

    def unload_module(self, module: Any) -> None:
        """Do nothing: no module was loaded."""

    def get_device_properties(self, device: Any) -> dict[str, Any]:
        known = self.device.facts
        return dict(
            max_shared_mem=known.shared_memory_per_block,
            max_num_regs=known.registers_per_multiprocessor,
            multiprocessor_count=known.multiprocessors,
            warpSize=32,
            sm_clock_rate=1_700_000,
            mem_clock_rate=2_600_000,
            mem_bus_width=5120,
        )


class _Driver:
    """A Triton driver whose device is simulated."""

    def __init__(self, device: SimulatedDevice):
        self.device = device
        self.utils = _Utilities(device)
        self.launcher_cls = device.triton_launcher
        self.identity = f"tritonkittens.sim {device.arch}"

    def get_current_device(self) -> str:
        return self.identity

    def set_current_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.device.facts.capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1, dtype=torch.float32, device="cpu")

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Do nothing: there is no cache."""


_driver = Patch(lambda: vars(triton_driver).get("_active"), lambda active: setattr(triton_driver, "_active", active))


@contextlib.contextmanager
def device(arch: str | int = "sm_90a", **options: Any) -> Iterator[SimulatedDevice]:
    """Run every kernel that is launched on CPU tensors in the simulator, inside this context.

    That includes `kernel[grid](...)` of Triton and Gluon, `@tk.kernel`s, templates and the shipped operators. A
    kernel under `triton.autotune` runs with the first configuration that fits; nothing is timed. A grid with a 0 in
    it launches nothing.

    Args:
        arch: "sm_90a", "sm_100a" or another of `sim.ARCHITECTURES`.
        schedule: a seed, a `Schedule`, or a function that makes one for each launch.
        multiprocessors: the simulated multiprocessors; None: as many as the GPU has.
        step_limit: the most operations of one launch.
        raise_findings: False collects findings in `launches` instead of raising.
        recorder: a `Timeline`.
        memory: tensors that a kernel reaches through addresses in memory.

    Returns:
        A context manager for the `SimulatedDevice`.

    Raises:
        SimulationError: where a launch has findings.

    Example::

        with sim.device("sm_90a"):
            kernel[grid](x, y)
    """
    made = SimulatedDevice(arch, **options)
    token = simulator.set(made)
    try:
        with _driver(_Driver(made)), compiling_for_simulation(), tuning_for_simulation(made):
            yield made
    finally:
        simulator.reset(token)


def start_kernel(simulated: SimulatedDevice, kernel: Any, grid: Any, args: Args, options: dict[str, Any]) -> None:
    """Launch a kernel of any kind on an active simulated device."""
    args = tuple(as_tensor(a) for a in args)
    options = {k: as_tensor(v) for k, v in options.items()}
    if isinstance(kernel, str):
        program = load_ttgir(kernel, simulated.capability)
        x, y, z = (*grid, 1, 1)[:3]
        kinds = ["value"] * len(args)
        simulated.start(
            program, (x, y, z), lambda memory: list(flatten(args, kinds, (), memory)), options.pop("cluster_size", 1)
        )
    elif hasattr(kernel, "__getitem__"):
        kernel[grid](*args, **options)
    else:
        kernel(*args, **options, **({} if grid is None else {"blocks": grid[0] if isinstance(grid, tuple) else grid}))


def run(kernel: Any, grid: Any, *args: Any, arch: str | int = "sm_90a", **options: Any) -> Launch:
    """Run one kernel on the CPU. Results are written into the arguments.

    Args:
        kernel: a `@triton.jit` or `@gluon.jit` function, a `@tk.kernel`, a template, or TTGIR text.
        grid: the launch grid; for a template None or the number of thread blocks.
        args: numpy arrays or CPU torch tensors, and numbers. Read-only arrays may be read.
        arch: "sm_90a", "sm_100a" or another of `sim.ARCHITECTURES`.
        options: options of `device` (`schedule`, `multiprocessors`, `step_limit`, `raise_findings`, `recorder`,
            `memory`), and the kernel's keywords.

    Returns:
        The launch, with `.simulation` (None where the grid has a 0), `.findings` and `.seconds`.

    Raises:
        SimulationError: where the kernel has findings.
        ReadOnlyError: where the kernel writes a read-only array.

    Example::

        sim.run(kernel, (4,), x, y, arch="sm_90a")
    """
    own = {
        k: options.pop(k)
        for k in ("schedule", "multiprocessors", "step_limit", "raise_findings", "recorder", "memory")
        if k in options
    }
    with device(arch, **own) as simulated:
        start_kernel(simulated, kernel, grid, args, options)
    return simulated.launches[-1] if simulated.launches else NoLaunch()
