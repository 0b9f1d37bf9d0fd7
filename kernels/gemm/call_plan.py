"""The plan of a `gemm` call: operands of one kind are checked and planned once, so that later calls only launch.

Calls are of one kind if shapes, strides, dtypes, alignment, devices and options are equal.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.arch import require_feature
from tritonkittens.kernels._ahead import stand_in
from tritonkittens.kernels._copies import as_addressable, both_addressable, copied
from tritonkittens.kernels._dispatch import (
    begin_alike,
    call,
    have_memory,
    is_same_view,
    overlaps,
    overlaps_within,
    reaches,
)
from tritonkittens.kernels._tensors import addressable, allocator, padded_empty, remember, signature, storable
from tritonkittens.kernels.gemm.checks import (
    FP8,
    Operands,
    check,
    check_accumulation,
    check_config,
    check_kinds,
    is_empty,
    places_of,
    result_dtype,
    result_shape,
)
from tritonkittens.kernels.gemm.choice import family
from tritonkittens.kernels.gemm.config import UNSPLIT, Config, Problem
from tritonkittens.kernels.gemm.device.gemm import Gemm
from tritonkittens.kernels.gemm.device.packed import Packed
from tritonkittens.kernels.gemm.device.unaligned import Unaligned, oriented, takes
from tritonkittens.kernels.gemm.device.unaligned_tiles import Tiles, chosen
from tritonkittens.kernels.gemm.epilogue import Applied, Function, names_of, steps_of
from tritonkittens.kernels.gemm.microscaling import FP4, as_bytes, as_tiles, name_of_scales
from tritonkittens.kernels.gemm.reference import BLOCK, checked_activation, epilogue
from tritonkittens.kernels.gemm.templates import template_of
from tritonkittens.launch import capability, device_facts, l2_bytes, multiprocessor_count
from tritonkittens.launch.ahead import begin
from tritonkittens.launch.recorder import recorded
from tritonkittens.tune.timing import seconds
from tritonkittens.tune.tuner import tuning


def by_operator(
    a: Tensor,
    b: Tensor,
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    config: Config | None,
    accumulate: str,
) -> Tensor:
    """`gemm` by the operator of torch.library, for tensors that torch traces, batches or fakes."""
    bias, gate, residual, scale_a, scale_b = operands
    chosen = None if config is None else config.to_text()
    return call("gemm", a, b, bias, activation, gate, residual, scale_a, scale_b, out_dtype, chosen, accumulate)


def computed(
    a: Tensor,
    b: Tensor,
    operands: Operands,
    activation: Applied,
    out_dtype: torch.dtype | None,
    config: Config | None,
    accumulate: str,
    out: Tensor | None = None,
    first_call: Callable[..., AbstractContextManager[None]] | None = None,
) -> Tensor:
    """`gemm` without its gradient, by the plan of calls of this kind. The first call of a kind runs in the context
    that `first_call` makes of its arguments."""
    try:
        key = (signature(a, b, *operands, out), activation, out_dtype, config, accumulate)
        known = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        if not have_memory(a, b, *operands) and out is None and not isinstance(activation, Function):
            return by_operator(a, b, operands, activation, out_dtype, config, accumulate)
        check_kinds(a, b, operands, out)
        check_config(config)
        if not isinstance(activation, Function):
            checked_activation(activation)
        raise
    if known is None:
        if first_call is not None:
            with first_call(a, b, operands, activation, out_dtype, config, accumulate):
                return computed(a, b, operands, activation, out_dtype, config, accumulate, out)
        plan = _plan(a, b, operands, activation, out_dtype, out, config, accumulate)
        known = remember(_plans, key, (plan, () if out is None else reaches(out, a, b, *operands)))
    plan, bytes_of = known
    if out is not None and overlaps_within(bytes_of, out, a, b, *operands):
        residual = operands[2]
        # a task reads its residual before it writes its result
        in_place = residual is not None and is_same_view(out, residual)
        if not in_place or overlaps(out, a, b, *operands[:2], *operands[3:]):
            return out.copy_(computed(a, b, operands, activation, out_dtype, config, accumulate))
    return plan(a, b, operands, out)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *, is_checked: bool = False
) -> Tensor | None:
    """activation(x · weightᵀ + bias) without its gradient, by the plan of an earlier call.

    Args:
        x: (…, M, K).
        weight: (N, K), as `torch.nn.Linear` stores it.
        bias: (N,) or None.
        activation: as in `gemm`.
        is_checked: the caller has found `is_plain` true, and shapes and dtypes that the kernels accept. The call then
            makes a plan where there is none.

    Returns (…, M, N), or None where there is no plan, or where an operand is no plain tensor.
    """
    operands = (bias, None, None, None, None)
    try:
        key = (signature(x, weight, bias), activation)
        known = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        return None
    if known is None:
        if not is_checked:
            return None
        found = plan = _plan(x, weight.T, operands, activation, None, None, None, "fp32")
        # a function launches by addresses, which are equal for the weight and its transpose; another plan uses strides
        if not isinstance(found, FunctionType):
            plan = lambda x, weight, *others: found(x, weight.T, *others)  # noqa: E731
        known = remember(_plans, key, (plan, ()))
    elif x.is_neg() or weight.is_neg() or (bias is not None and bias.is_neg()):
        return None
    return known[0](x, weight, operands, None)


Plan = Callable[[Tensor, Tensor, Operands, Tensor | None], Tensor]
# by the kind of a call: its plan, and `reaches` of out and operands where there is an out
_plans: dict[tuple[Hashable, ...], tuple[Plan, tuple[int, ...]]] = {}


def forget_plans() -> None:
    """Let later calls choose their configurations again."""
    _plans.clear()


# ---------------------------------------------------------------- plans


def _plan(
    a: Tensor,
    b: Tensor,
    operands: Operands,
    activation: Applied,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    config: Config | None,
    accumulate: str,
) -> Plan:
    """Check operands and return the plan of calls with operands of the same kinds."""
    check(a, b, operands, activation, out_dtype, out)
    check_config(config)
    check_accumulation(a, accumulate, config)
    dtype, places = result_dtype(a, out_dtype), places_of(a, b, operands, names_of(activation))
    if is_empty(a, b):
        return functools.partial(_of_nothing, dtype=dtype, activation=activation)
    if config is None and accumulate == "fp32" and takes(a, b, operands[2], dtype, out):
        return unaligned_plan(a, b, operands, activation, dtype, places, out)
    product = CallPlan(a, b, operands, activation, dtype, places, config, accumulate)
    return product.straight(a, b, operands, out) or product


def check_chip(device: int | None) -> None:
    """Raise `ArchitectureError` where a device (None: the current one) has no TMA: the cost model has no constants."""
    major, minor = capability(device)
    require_feature(f"{Gemm.__name__} (TMA, warp roles)", "tma", 10 * major + minor)


def unaligned_plan(
    a: Tensor,
    b: Tensor,
    operands: Operands,
    activation: Applied,
    dtype: torch.dtype,
    places: dict[str, str],
    out: Tensor | None,
    tiles: Tiles | None = None,
) -> Unaligned:
    """The plan of a product by ordinary loads, with these tiles or those that are chosen."""
    steps = steps_of(operands, places, activation, dtype, epilogue=False)
    numbers = activation.numbers if isinstance(activation, Function) else {}
    first, second = oriented(a, b)
    (m, k), n, strides = first.shape, second.shape[1], second.stride()
    tiles = tiles or chosen(m, n, k, strides, multiprocessor_count(a.device))
    kind = Packed if tiles.packs(strides) else Unaligned
    return kind(a, b, dict(zip(names_of(activation), operands, strict=True)), steps, numbers, dtype, out, tiles)


def described(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> CallPlan:
    """The plan of a product: its `problem`, and how its operands become the kernel's."""
    operands = (bias, gate, residual, scale_a, scale_b)
    check(a, b, operands, activation, out_dtype, out)
    return CallPlan(a, b, operands, activation, result_dtype(a, out_dtype), places_of(a, b, operands), None)


def _of_nothing(
    a: Tensor, b: Tensor, operands: Operands, out: Tensor | None, *, dtype: torch.dtype, activation: Applied
) -> Tensor:
    """An empty result, or the epilogue of the sum of nothing."""
    if isinstance(activation, Function):
        if 0 in result_shape(a, b):
            return a.new_empty(result_shape(a, b), dtype=dtype) if out is None else out
        a, b = a.new_zeros(*a.shape[:-1], BLOCK), b.new_zeros(*b.shape[:-2], b.shape[-1], BLOCK).mT
        return computed(a, b, operands, activation, dtype, None, "fp32", out)
    bias, gate, residual, *_ = operands
    zeros = torch.zeros(result_shape(a, b), dtype=torch.float32, device=a.device)
    result = rounded(epilogue(zeros, bias, activation, gate, residual), dtype)
    return result if out is None else out.copy_(result)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, as kernels round: fp8 to the largest finite value beyond its range."""
    if dtype in FP8:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def _as_stored(x: Tensor, names: str, depth_last: bool) -> tuple[str, bool, bool]:
    """How TMA reads a matrix like `x`: (the names of its dimensions, the contiguous one last; transposed; copied)."""
    if addressable(x) and (not depth_last or names[-1] == "k"):
        return names, False, False
    if addressable(x.mT) and (not depth_last or names[-1] != "k"):
        return names[::-1], True, False
    # a copy keeps the contiguous dimension where it may
    transposed = names[-1] != "k" if depth_last else x.stride(-2) == 1 != x.stride(-1)
    return names[::-1] if transposed else names, transposed, True


def as_matrix(x: Tensor) -> Tensor:
    """The rows of a batch of matrices as those of one. (`flatten` has no rule for gradients of many results at
    once.)"""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _as_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """(1 or B, rows, columns) of a tensor whose leading dimensions broadcast to `batch`: a copy only where some of
    several of them are broadcast."""
    if all(n == 1 for n in x.shape[:-2]):
        return x.reshape(1, *x.shape[-2:])
    return x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])


class CallPlan:
    """The plan of a product: how its operands become what the kernel takes, and the kernel."""

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        operands: Operands,
        activation: Applied,
        dtype: torch.dtype,
        places: dict[str, str],
        config: Config | None,
        accumulate: str = "fp32",
    ):
        shape = result_shape(a, b)
        self.shape, self.dtype, self.places = shape, dtype, places
        self._templates: dict[Config, tk.lcf] = {}
        self.batch = shape[:-2]
        # Rows of all of a batch against one matrix are the rows of one product
        self.flat = (
            b.ndim == 2
            and a.ndim > 2
            and not {"tile", "row", "micro"} & {p for n, p in places.items() if n != "residual"}
            and a.is_contiguous()
        )
        self.batched = bool(self.batch) and not self.flat
        self.depth_last = a.dtype in (*FP8, FP4)
        a, b = self._shaped(a, b)
        self.a_order, self.transposes_a, copies_a = _as_stored(a, "mk", self.depth_last)
        self.b_order, self.transposes_b, copies_b = _as_stored(b, "kn", self.depth_last)
        self.copies_operands = copies_a or copies_b
        rows, cols = (a.shape[-2], b.shape[-1])
        kinds = set(places.values())
        read = "tile" if "tile" in kinds else "vector" if kinds & {"row", "col"} else ""
        scales = "block" if "block" in kinds else name_of_scales(operands[3]) if "micro" in kinds else ""
        # a user's function is taken to be a short one
        known = read or "vector" if isinstance(activation, Function) else activation or read
        self.problem = Problem(
            tk.from_torch(a.dtype).name,
            tk.from_torch(dtype).name,
            self.a_order,
            self.b_order,
            known,
            scales,
            self.batch_size,
            rows,
            cols,
            a.shape[-1],
        )
        self.epilogue = steps_of(operands, places, activation, dtype)
        self.numbers: dict[str, Any] = activation.numbers if isinstance(activation, Function) else {}
        index = {name: i for i, name in enumerate(names_of(activation))}
        self.staged = index[self.epilogue.staged.name] if self.epilogue.staged else None
        blocks = [(index[name], name) for name in ("scale_a", "scale_b") if places.get(name) in ("block", "micro")]
        self.extras = (*blocks, *((index[x.name], x.name) for x in self.epilogue.operands))  # as kernels take them
        self.accumulate = accumulate
        self.types = dict(dtype=tk.from_torch(a.dtype), b_dtype=tk.from_torch(b.dtype), out_dtype=tk.from_torch(dtype))
        self.config = config

    @property
    def batch_size(self) -> int:
        """Matrices of a batch; 1 for a single product."""
        size = 1
        for n in self.batch if self.batched else ():
            size *= n
        return size

    def _shaped(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both as matrices, or as batches of them."""
        a, b = as_bytes(a), as_bytes(b)
        if self.flat:
            return as_matrix(a), b
        return (_as_batch(a, self.batch), _as_batch(b, self.batch)) if self.batched else (a, b)

    def _stored(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both as TMA reads them: views or, where it cannot address those, copies."""
        a, b = self._shaped(a, b)
        views = a.mT if self.transposes_a else a, b.mT if self.transposes_b else b
        return both_addressable(*views) if self.copies_operands else views

    def _is_viewable(self, out: Tensor) -> bool:
        """Can the kernel write to this tensor as to a matrix or a plain batch?"""
        if not self.batch:
            return True
        try:
            out.view(*((-1,) if self.flat else (-1, out.shape[-2])), out.shape[-1])
        except RuntimeError:
            return False
        return True

    def _like_result(self, x: Tensor) -> Tensor:
        return as_matrix(x) if self.flat else _as_batch(x, self.batch) if self.batched else x

    def measurement(self, a: Tensor, b: Tensor, operands: Operands) -> Callable[[Config], float]:
        """Return a function that measures the seconds of a configuration with these operands."""
        residual, given = self._staged(operands), (a, b)
        a, b = self._stored(a, b)
        c = self._like_result(padded_empty(self.shape, a, self.dtype))
        return lambda config: seconds(
            lambda: self._launch(config, a, b, c, residual, self._extras(config, operands, *given)), c.device
        )

    def compile_all(self, a: Tensor, b: Tensor, operands: Operands) -> Callable[[Sequence[Config]], list[Future[Any]]]:
        """Return a function that starts to compile configurations for operands like these, and returns futures."""
        facts = device_facts(a.device)
        a, b, *rest = (stand_in(x) for x in (a, b, *operands))
        c = self._like_result(padded_empty(self.shape, a, self.dtype))

        def launch(config: Config) -> None:
            extras = self._extras(config, tuple(rest), a, b)
            self._launch(config, *self._stored(a, b), c, self._staged(tuple(rest)), extras)

        def compile_all(configs: Sequence[Config]) -> list[Future[Any]]:
            found: list[Future[Any]] = []
            for config in configs:
                with contextlib.suppress(tk.TileError, ValueError):  # the measurement reports it
                    found += begin(recorded(functools.partial(launch, config), facts))
            return found

        return compile_all

    def _staged(self, operands: Operands) -> list[Tensor]:
        """The operand that is loaded into the epilogue tiles, if there is one."""
        x = None if self.staged is None else operands[self.staged]
        return [] if x is None else [as_addressable(self._like_result(x))]

    def compilation(
        self, config: Config, a: Tensor, b: Tensor, **options: Tensor | None
    ) -> tuple[tk.lcf, tuple[Tensor, ...]] | None:
        """(template, tensors) of a configuration, to compile it ahead of time; None where it cannot be."""
        get = options.get
        operands = (get("bias"), get("gate"), get("residual"), get("scale_a"), get("scale_b"))
        c = self._like_result(padded_empty(self.shape, a, self.dtype))
        pair = self._stored(a, b)
        try:
            return self._template(config, c.device), (
                *(pair[::-1] if config.swap_ab else pair),
                c,
                *self._staged(operands),
                *self._extras(config, operands, a, b),
            )
        except (tk.TileError, ValueError):
            return None

    def chosen(self, a: Tensor, b: Tensor, operands: Operands) -> Config:
        """The configuration: given, known, measured (TK_TUNE=1) or predicted."""
        if self.config is None:
            on_gpu = a.device.type == "cuda"
            measured = on_gpu and tuning()
            index = a.device.index if on_gpu else None
            check_chip(index)
            self.config = family.choose(
                self.problem,
                self.measurement(a, b, operands) if measured else None,
                index,
                self.compile_all(a, b, operands) if measured else None,
            )
            if self.accumulate == "fp16" and self.config.schedule not in UNSPLIT:
                self.config = replace(self.config, schedule="persistent", splits=1)
        return self.config

    def _template(self, config: Config, device: torch.device) -> tk.lcf:
        """The kernel of a configuration; looked for once, since every call asks for it."""
        template = self._templates.get(config)
        if template is None:
            order = config.ordering(self.problem, l2_bytes(device.index if device.type == "cuda" else None))
            template = self._templates[config] = template_of(
                config,
                order,
                self.a_order,
                self.b_order,
                self.batched,
                self.epilogue,
                self.problem.scales,
                self.accumulate,
                self.copies_operands,
                **self.types,
            )
        return template

    def _launch(
        self, config: Config, a: Tensor, b: Tensor, c: Tensor, staged: list[Tensor], extras: list[Tensor]
    ) -> None:
        tensors = (b, a, c) if config.swap_ab else (a, b, c)
        self._template(config, c.device)(*tensors, *staged, *extras, **self.numbers)

    def straight(self, a: Tensor, b: Tensor, operands: Operands, out: Tensor | None) -> Plan | None:
        """The plan in as few steps as possible, where no operand has to be copied, nor the result."""
        new_result = allocator(self.shape, self.dtype, a.device)
        home = new_result() if out is None else out
        if self.copies_operands or not (storable(home) and self._is_viewable(home)):
            return None
        config = self.chosen(a, b, operands)
        others = [*(() if self.staged is None else (self.staged,)), *(i for i, _ in self.extras)]
        extras = self._extras(config, operands, a, b)
        views = [*self._stored(a, b), self._like_result(home), *self._staged(operands), *extras]
        given = [a, b, home, *(operands[i] for i in others)]
        if not all(x is not None and begin_alike(x, view) for x, view in zip(given, views, strict=True)):
            return None
        swap_ab = config.swap_ab
        views[:2] = views[1::-1] if swap_ab else views[:2]
        # the bound launch takes the tensors themselves: each begins at the address of its view
        launch = self._template(config, a.device).call(*views).bind(*views, **self.numbers)

        def run(a: Tensor, b: Tensor, operands: Operands, out: Tensor | None) -> Tensor:
            if out is None:
                out = new_result()
            first, second = (b, a) if swap_ab else (a, b)
            if others:
                launch(first, second, out, *[operands[i] for i in others])
            else:
                launch(first, second, out)
            return out

        return run

    def __call__(self, a: Tensor, b: Tensor, operands: Operands, out: Tensor | None) -> Tensor:
        config = self.chosen(a, b, operands)
        home = (
            out
            if out is not None and storable(out) and self._is_viewable(out)
            else padded_empty(self.shape, a, self.dtype)
        )
        extras = self._extras(config, operands, a, b)
        a, b = self._stored(a, b)
        c = self._like_result(home)
        self._launch(config, a, b, c, self._staged(operands), extras)
        if out is None:
            return (
                home
                if home.is_contiguous()
                else copied(home, torch.empty(self.shape, dtype=self.dtype, device=home.device))
            )
        return out if home is out else copied(home, out)

    def _extras(self, config: Config, operands: Operands, a: Tensor, b: Tensor) -> list[Tensor]:
        """The scales of `a` and `b`, and the epilogue's operands, in the kernel's order: vectors in one dimension, a
        matrix as the kernel's rows and columns run."""
        out: list[Tensor] = []
        for i, name in self.extras:
            x = operands[i]
            assert x is not None
            if self.places[name] == "block":
                out.append(as_addressable(x.T))
            elif self.places[name] == "micro":
                out.append(as_tiles(x, a if name == "scale_a" else b.mT, self.batch))
            elif self.places[name] == "tile":
                tile = self._like_result(x)
                out.append(tile.mT if config.swap_ab else tile)
            else:
                vector = x.reshape(-1)
                in_columns = self.places[name] == ("row" if config.swap_ab else "col")
                out.append(as_addressable(vector) if in_columns else vector)
        return out
