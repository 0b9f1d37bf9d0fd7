"""What a call of a norm does: its launches, and the memory of its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tritonkittens.arch import chip_of
from tritonkittens.kernels._rows import Rows
from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.norm.checks import check_operands, check_reachable
from tritonkittens.kernels.norm.config import (
    BACKWARD_WARPS,
    FORWARD_WARPS,
    Parts,
    Tiles,
    backward_registers,
    backward_tiles,
    for_few_rows,
    forward_registers,
    forward_tiles,
    programs_of,
    stages_of,
)
from tritonkittens.kernels.norm.device.backward import dropout_mask, norm_backward, norm_projections, sum_partials
from tritonkittens.kernels.norm.device.forward import norm_forward
from tritonkittens.launch import device_facts

SUM_PARTS, SUM_COLS = 256, 16  # partial sums that a program adds up at once, and its columns
MASK = (4, 256)  # rows and columns of the mask that a program computes
Allocate: TypeAlias = Callable[[], Tensor | None]
PARAMS = ("weight", "bias", "weight1", "bias1")


class Options(NamedTuple):
    """Options of a norm, in the order of its operator."""

    eps: float
    dropout_p: float
    rms: bool
    zero_centered_weight: bool
    residual_in_fp32: bool
    out_dtype: torch.dtype | None

    @property
    def name(self) -> str:
        return "rms_norm" if self.rms else "layer_norm"


class Operands(NamedTuple):
    """Tensors of a norm, in the order of its operator."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    x1: Tensor | None
    weight1: Tensor | None
    bias1: Tensor | None
    rowscale: Tensor | None
    seed: Tensor | None

    def z_dtype(self, options: Options) -> torch.dtype | None:
        """Return the dtype in which z is stored; None where z is x."""
        dtype = torch.float32 if options.residual_in_fp32 else self.x.dtype
        if self.residual is not None:
            return self.residual.dtype
        sums = self.x1 is not None or self.rowscale is not None or options.dropout_p > 0
        return dtype if sums or dtype != self.x.dtype else None

    def parts(self, options: Options) -> Parts:
        return Parts(
            options.rms,
            float(options.zero_centered_weight),
            self.weight is not None,
            self.bias is not None,
            self.weight1 is not None,
            self.bias1 is not None,
            self.rowscale is not None,
            self.x1 is not None,
            options.dropout_p > 0,
            self.residual is not None,
            self.z_dtype(options) is not None,
        )


# ---------------------------------------------------------------- forward


class Forward:
    """The launch of a forward for tensors of one kind, by `tiles` where others are not to be chosen."""

    def __init__(self, operands: Operands, options: Options, tiles: Tiles | None = None):
        x, z_dtype = operands.x, operands.z_dtype(options)
        self.parts, self.options = operands.parts(options), options
        self.rows = Rows((x, operands.residual, operands.x1))
        facts, width = device_facts(x.device), self.rows.width
        many = forward_tiles(width, chip_of(facts.capability))
        self.tiles = tiles or for_few_rows(many, width, self.rows.count, FORWARD_WARPS * facts.multiprocessors)
        rows, dtype = (self.rows.count,), options.out_dtype or x.dtype

        def results(shape: Sequence[int], dtype: torch.dtype | None, wanted: bool = True) -> Allocate:
            return allocator(tuple(shape), dtype, x.device) if wanted and dtype is not None else lambda: None

        self.results = [
            results(x.shape, dtype),
            results(x.shape, dtype, operands.weight1 is not None),
            results(x.shape, z_dtype),
            results(rows, torch.float32, not options.rms),
            results(rows, torch.float32),
        ]
        self.bound: Callable[..., None] | None = None

    def __call__(self, operands: Operands) -> list[Tensor | None]:
        found = [allocate() for allocate in self.results]
        if self.rows.count == 0:
            return found
        x, weight, bias, residual, x1, weight1, bias1, rowscale, seed = operands
        x, residual, x1 = self.rows.ready((x, residual, x1), x)
        others = [t if t is None else t.contiguous() for t in (weight, bias, weight1, bias1, rowscale, seed)]
        tensors = [x if t is None else t for t in (x, residual, x1, *others, *found)]
        if self.bound is None:
            self.bound = self._bind(tensors)
        self.bound(*tensors)
        return found

    def _bind(self, tensors: list[Tensor]) -> Callable[..., None]:
        rows, tiles = self.rows, self.tiles
        grid = (-(-rows.count // tiles.rows), 1, 1)
        registers = {} if self.parts.dropout and tiles.parts == 1 else {"maxnreg": forward_registers(tiles)}
        return norm_forward.with_options(**tiles.options, **registers).bind(
            grid, *tensors, rows.size, rows.inner, rows.at, self.options.eps, self.options.dropout_p,
            self.parts, *tiles[:3], rows.unit,
        )  # fmt: skip


_plans: dict[Hashable, Any] = {}  # by what is known of a call


def run_forward(operands: Operands, options: Options) -> list[Tensor | None]:
    """The norm of plain tensors: y, y1, z, means and reciprocal standard deviations of the rows; None for what there
    is not: z where it is x, for example."""
    key = (signature(*operands), options)
    plan = _plans.get(key)
    if plan is None:
        check_operands(options.name, **operands._asdict())
        check_reachable(options.name, operands.x)
        plan = remember(_plans, key, Forward(operands, options))
    return plan(operands)


# ---------------------------------------------------------------- backward


class Gradients(NamedTuple):
    """Tensors of a backward, in the order of its operator: the gradients of y, y1 and z as results, and what was saved;
    `z` is x where no z was stored."""

    dy: Tensor | None
    dy1: Tensor | None
    dz: Tensor | None
    z: Tensor
    weight: Tensor | None
    weight1: Tensor | None
    rowscale: Tensor | None
    seed: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class Wanted(NamedTuple):
    """Which gradients a backward computes, in the order of its operator: dtypes of x, of x1 and of parameters, whether
    there is a residual, and names of those of PARAMS that want gradients, with spaces between them."""

    x: torch.dtype
    x1: torch.dtype | None
    param_dtype: torch.dtype | None
    residual: bool
    params_wanted: str
    dropout_p: float
    rms: bool
    zero_centered_weight: bool

    @property
    def grads(self) -> tuple[bool, ...]:
        """Return which of PARAMS want gradients."""
        return tuple(name in self.params_wanted.split() for name in PARAMS)

    def result_dtypes(self, z: Tensor, rowscale: Tensor | None) -> list[torch.dtype | None]:
        """Return dtypes of the gradients of x, x1 and residual; None for one that is not wanted, or that is equal to
        the gradient of x."""
        residual = self.residual and (self.dropout_p > 0 or rowscale is not None or z.dtype != self.x)
        x1 = self.x1 if self.dropout_p > 0 or self.x1 != self.x else None
        return [self.x, x1, z.dtype if residual else None]


class Backward:
    """The launches of a backward for tensors of one kind, by `tiles` where others are not to be chosen."""

    def __init__(self, given: Gradients, wanted: Wanted, tiles: Tiles | None = None):
        z = given.z
        self.rows = Rows((given.dy, given.dy1, z, given.dz))
        dtypes = wanted.result_dtypes(z, given.rowscale)
        self.parts = Parts(
            wanted.rms, float(wanted.zero_centered_weight), given.weight is not None, False,
            given.weight1 is not None, False, given.rowscale is not None, dtypes[1] is not None,
            wanted.dropout_p > 0, dtypes[2] is not None, False, given.dz is not None, wanted.grads,
        )  # fmt: skip
        self.p, self.sums = wanted.dropout_p, sum(wanted.grads)
        facts, width = device_facts(z.device), self.rows.width
        chip = chip_of(facts.capability)
        many = backward_tiles(width, self.sums, chip)
        self.tiles = tiles or for_few_rows(many, width, self.rows.count, BACKWARD_WARPS * facts.multiprocessors)
        rows_read, weights_read = (
            sum(t.element_size() for t in tensors if t is not None) for tensors in (given[:4], given[4:6])
        )
        self.stages = stages_of(self.tiles, rows_read, weights_read, facts)
        self.early = chip.tma
        self.programs = programs_of(self.tiles, self.rows.count, facts.multiprocessors)
        self.results = [allocator(tuple(z.shape), dtype, z.device) if dtype else lambda: None for dtype in dtypes]
        shape = (self.sums, self.rows.width)
        self.dparams = allocator(shape, wanted.param_dtype or torch.float32, z.device)
        self.partials = allocator((self.sums, self.programs, self.rows.width), torch.float32, z.device)
        self.projections = allocator((2, self.rows.count if self.tiles.chunks > 1 else 0), torch.float32, z.device)
        self.bound: list[Callable[..., None] | None] | None = None

    def __call__(self, given: Gradients) -> list[Tensor | None]:
        found: list[Tensor | None] = [*(allocate() for allocate in self.results), self.dparams()]
        if self.rows.count == 0:
            found[3].zero_()  # type: ignore[union-attr]
            return found
        dy, dy1, z, dz = self.rows.ready((given.dy, given.dy1, given.z, given.dz), given.z)
        partials, projections = self.partials(), self.projections()
        weight, weight1, rowscale, seed = (z if t is None else t.contiguous() for t in given[4:8])
        saved = (weight, weight1, *((z if t is None else t) for t in given[8:]))
        results = [z if t is None else t for t in found[:3]]
        projected = (dy, dy1, z, *saved, projections)
        differentiated = (dy, dy1, dz, z, *saved[:2], rowscale, seed, *saved[2:], projections, *results, partials)
        summed = (partials, found[3])
        if self.bound is None:
            self.bound = self._bind(projected, differentiated, summed)
        for launch, tensors in zip(self.bound, (projected, differentiated, summed), strict=True):
            if launch is not None:
                launch(*tensors)
        return found

    def _bind(self, projected: Any, differentiated: Any, summed: Any) -> list[Callable[..., None] | None]:
        """Return the launches of the three kernels as functions of their tensors; None for one that is not needed."""
        rows, tiles, numbers = self.rows, self.tiles, (self.rows.size, self.rows.inner, self.rows.at)
        project = norm_projections.with_options(**tiles.options)
        differentiate = norm_backward.with_options(**tiles.options, maxnreg=backward_registers(tiles))
        width, early = rows.width, self.sums > 0 and self.early
        total = sum_partials.with_options(launch_pdl=True) if early else sum_partials
        return [
            project.bind((rows.count, 1, 1), *projected, *numbers, self.parts, tiles.cols, tiles.parts * tiles.chunks,
                         rows.unit)
            if tiles.chunks > 1
            else None,
            differentiate.bind(
                (self.programs, tiles.chunks, 1), *differentiated, *numbers, self.p, self.parts, *tiles[:4], rows.unit,
                self.stages, early,
            ),
            total.bind((-(-width // SUM_COLS), self.sums, 1), *summed, self.programs, width, SUM_PARTS, SUM_COLS, early)
            if self.sums
            else None,
        ]  # fmt: skip


def run_backward(given: Gradients, wanted: Wanted) -> list[Tensor | None]:
    """Gradients of x, x1 and residual, and of the parameters, (wanted ones, columns). None for one that is not wanted
    or that is equal to another (`Wanted.result_dtypes`)."""
    nothing = given.z.new_zeros(given.z.shape[-1:]).expand(given.z.shape) if given.dy is None else given.dy
    given = given._replace(dy=nothing)
    if given.weight1 is not None and given.dy1 is None:
        given = given._replace(dy1=given.z.new_zeros(given.z.shape[-1:]).expand(given.z.shape))
    key = (signature(*given), wanted)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, Backward(given, wanted))
    return plan(given)


# ---------------------------------------------------------------- the mask of dropout


def run_mask(x: Tensor, seed: Tensor, p: float, branch: int) -> Tensor:
    """Which elements of a tensor of the shape of x dropout keeps, bool. `branch`: 0 for x, 1 for x1."""
    found = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    if found.numel():
        rows, width = found.shape[:-1].numel(), x.shape[-1]
        grid = (-(-rows // MASK[0]), -(-width // MASK[1]))
        dropout_mask[grid](seed.contiguous(), found.view(torch.uint8), rows, width, p, branch, *MASK)
    return found
