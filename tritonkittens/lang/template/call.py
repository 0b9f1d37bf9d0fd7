"""A template bound to the shapes of its tensors: the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.kernel import prepare
from tritonkittens.lang.schedule.split_k import elements
from tritonkittens.lang.template.kernel import _template_kernel
from tritonkittens.lang.types.global_layout import PIECE, gl, map_specs
from tritonkittens.lang.types.tiles import by_rows
from tritonkittens.launch import GlobalArg, multiprocessor_count, simulator, workspace

if TYPE_CHECKING:
    from tritonkittens.lang.template.template import lcf

UNKNOWN_TASKS = 1 << 30
CLUSTERED = 0.92  # of a device's multiprocessors that clusters of more than two blocks fill
DEBUG_MODES = (False, True, "report")
_new = tuple.__new__


class TileArgument(NamedTuple):
    """What a kernel gets for a tensor that TMA moves: its descriptors, its pointer, and the number of the parameter
    that the first descriptor is."""

    maps: Any
    pointer: Any
    parameter: Any = None

    @property
    def of_one_tensor(self) -> bool:
        """Messages name the tensor, not a field."""
        return True


def cluster_slots(multiprocessors: int, size: int) -> int:
    """Clusters of `size` CTAs, one an SM, that run at once: those of more than two do not use up the GPCs,
    which differ in SMs (an H200 of 132, by cuOccupancyMaxActiveClusters: 66 of 2, 30 of 4, 15 of 8)."""
    return int(multiprocessors * (CLUSTERED if size > 2 else 1)) // size


class Call:
    """A template bound to the shapes of its tensors: `call(*tensors, **args)` launches with as little work as
    possible."""

    def __init__(self, template: lcf, tensors: tuple[Any, ...]):
        plan, name = template._plan, type(template).__name__
        if len(tensors) != len(plan.globals):
            raise TypeError(f"{name}: {len(tensors)} tensors; it takes {', '.join(n for n, _ in plan.globals)}")
        for t, (tensor_name, tiles) in zip(tensors, plan.globals, strict=True):
            if any(isinstance(tile, by_rows) for tile in tiles) and t.shape[-1] * t.element_size() % PIECE:
                raise TileError(f"{name}: {tensor_name} has rows of {t.shape[-1]}, no multiple of {PIECE} bytes")
            try:
                gl(t, *tiles, ragged=tensor_name in plan.ragged)  # checks dtypes and ranks
            except TileError as error:
                raise TileError(f"{name}: {tensor_name}: {error}") from None
        self.name, self.args, self.splits = name, plan.args, template.splits
        self.counters = template.schedule.counters
        self.specs = tuple(
            [
                map_specs(tiles, t.ndim, "zero", n in plan.ragged)
                for (n, tiles), t in zip(template._tiles, tensors, strict=True)
            ]
        )
        device = tensors[0].get_device() if tensors else -1
        on_device = device >= 0 or simulator.get() is not None
        slots = (
            max(1, cluster_slots(multiprocessor_count(device), template.cluster_size) * template.blocks_per_sm)
            if on_device
            else 1
        )
        shapes = [t.shape for t in tensors]
        self.keys = {
            debug: (((template,), ()), (("debug", debug), *template._options) if debug else template._options)
            for debug in DEBUG_MODES
        }
        self.key = self.keys[False]
        schedule = template.schedule
        counts_tasks = template.one_tile_per_block or schedule.one_cta_per_task or not schedule.whole_tasks
        if counts_tasks and template.tasks(*shapes) == UNKNOWN_TASKS:
            single = (
                "one_tile_per_block=True, "
                if template.one_tile_per_block and not template.schedule.one_tile_per_block
                else ""
            )
            raise TileError(
                f"{name}({single}schedule={template.schedule!r}): write method 'tasks', which says how many tasks "
                "tensors of given shapes make"
            )
        self.grid = (template.blocks(slots, *shapes),)
        every = template.one_tile_per_block or schedule.one_cta_per_task
        self.fewest = template.work_tiles(slots, *shapes) if every and on_device else 0
        self.numbers: tuple[int, ...] = ()  # what the kernel has to know of how tasks are split
        self._check_blocks(self.grid[0])
        if self.splits:
            tasks, copies = template.tasks(*shapes), template.cluster * template.team
            self.numbers, parts = template.schedule.plan(tasks, self.grid[0], slots, template.blocks_per_sm)
            self.room = parts * copies * elements(plan), tasks * copies
            self.room_of_block = template.schedule.sums_per_block * copies * elements(plan)

    def _check_blocks(self, blocks: int) -> None:
        if blocks < self.fewest:
            raise TileError(
                f"{self.name}: {self.fewest} tasks, or parts of tasks, for {blocks} blocks; each has one at most "
                "(one_tile_per_block=True, OnePerBlock() or ClusterLaunchControl())"
            )

    def _workspace(self, tensors: tuple[Any, ...], blocks: int = 0) -> tuple[Any, ...]:
        """What CTAs share, of the current stream: nothing, the counters that tasks are drawn from, or partial sums
        and their counters."""
        if self.splits:
            floats, counters = self.room
            return workspace(tensors[0].device, max(floats, blocks * self.room_of_block), counters)
        return workspace(tensors[0].device, 0, self.counters)[1:] if self.counters else ()

    def arguments(self, tensors: tuple[Any, ...], args: dict[str, Any], blocks: int | None = None) -> tuple[Any, ...]:
        """The kernel's run-time arguments, for a grid of `blocks` where that is given."""
        if len(args) != len(self.args) or any(n not in args for n in self.args):
            raise TypeError(f"{self.name}: arguments {sorted(args)}; it takes {sorted(self.args)}")
        # straight to tuple: a named tuple's own constructor takes twice as long
        described = tuple(
            [
                _new(TileArgument, (_new(GlobalArg, (t, s)), t, None)) if s else prepare(gl(t))
                for t, s in zip(tensors, self.specs)
            ]
        )
        return described, (*[args[n] for n in self.args], *self._workspace(tensors, blocks or 0), *self.numbers)

    def __call__(self, *tensors: Any, blocks: int | None = None, debug: bool = False, **args: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        if blocks is not None:
            self._check_blocks(blocks)
        _template_kernel.launcher(
            self.grid if blocks is None else (blocks,), self.arguments(tensors, args, blocks), self.keys[debug]
        )

    def bind(self, *tensors: Any, varying: tuple[int, ...] = (), **args: Any) -> Callable[..., None]:
        """The same with these numbers as a function of tensors alone, in as few steps as possible: of tensors like
        these, which have their strides, too, or of others of such memory, whatever dimensions they have. Extents and
        strides of those whose number is in `varying` may differ, where the grid and the numbers stay the same."""
        kinds = [None if i in varying else (t.shape, t.stride()) for i, t in enumerate(tensors)]

        def fallback(*given: Any) -> None:
            self(
                *(
                    t if kind in (None, (t.shape, t.stride())) else t.as_strided(*kind)
                    for t, kind in zip(given, kinds, strict=True)
                ),
                **args,
            )

        # TMA's descriptors have the address, and the pointer beside them
        owners = [i for i, specs in enumerate(self.specs) for _ in range(2 if specs else 1)]
        bind = functools.partial(_template_kernel.launcher.bind, self.grid, self.arguments(tensors, args), self.key)
        shared = len(self._workspace(tensors))
        if not shared:
            return bind(tuple(owners), fallback, varying)
        launch = bind(
            (*owners, *range(len(tensors), len(tensors) + shared)), lambda *given: fallback(*given[:-shared]), varying
        )
        return lambda *given: launch(*given, *self._workspace(given))
