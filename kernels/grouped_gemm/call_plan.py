"""The plan of a grouped product: operands of one kind are checked and planned once, so that later calls only launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable, copied
from tritonkittens.kernels._dispatch import begin_alike, overlaps_within, reaches
from tritonkittens.kernels._tensors import (
    TMA_BYTES,
    addressable,
    allocator,
    padded_empty,
    power_of_two,
    remember,
    signature,
    storable,
)
from tritonkittens.kernels.gemm.call_plan import check_chip
from tritonkittens.kernels.gemm.checks import FP8, result_dtype
from tritonkittens.kernels.gemm.config import Config, Problem
from tritonkittens.kernels.gemm.epilogue import steps_of
from tritonkittens.kernels.gemm.templates import template_of
from tritonkittens.kernels.grouped_gemm.checks import (
    GATED,
    Operands,
    check,
    check_config,
    check_kinds,
    places_of,
    result_shape,
)
from tritonkittens.kernels.grouped_gemm.choice import GATED as OF_GATED
from tritonkittens.kernels.grouped_gemm.choice import GATHERED, ROWS, SCATTERED, about, family, order_of
from tritonkittens.kernels.grouped_gemm.device.grouped import (
    BlockwiseGroupedGemm,
    DepthGroupedGemm,
    GatedGroupedGemm,
    RowGroupedGemm,
)
from tritonkittens.kernels.grouped_gemm.reference import rows_of
from tritonkittens.launch import l2_bytes

Plan = Callable[[Tensor, Tensor, Tensor, Operands, Tensor | None], Tensor]
NOTHING = Operands()
SELECTING = {"rows": "gathered", "out_rows": "scattered"}  # the template's knobs for operands that select rows
OF_SCALES = {
    OF_GATED: GatedGroupedGemm,
    "block": BlockwiseGroupedGemm,
}  # templates of groups of rows by the first word of `Problem.scales`
LINE = 128  # bytes of K of zeros for sums of nothing


def computed(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    operands: Operands = NOTHING,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
    masked: bool = False,
) -> Tensor:
    """`grouped_gemm` with offsets without its gradient, by the plan of calls of this kind. `masked`: with numbers of
    rows instead of offsets; the rows of the groups, as many of each, are in one dimension."""
    if a.ndim == 3 and b.ndim == 2:  # groups of columns are groups of rows of the transposed product
        check(a, b, offsets, operands, activation, out_dtype, out)
        flipped = None if out is None else out.mT
        found = computed(b.mT, a.mT, offsets, out_dtype=out_dtype, out=flipped, config=config).mT
        return found if out is None else out
    try:
        key = (signature(a, b, offsets, *operands, out), activation, out_dtype, config, masked)
        known = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        check_kinds(a, b, offsets, operands, out)
        check_config(config, a, b, operands, activation)
        raise
    if known is None:
        check(a, b, offsets, operands, activation, out_dtype, out)
        check_config(config, a, b, operands, activation)
        plan = _plan(a, b, offsets, operands, activation, result_dtype(a, out_dtype), out, config, masked)
        known = remember(_plans, key, (plan, () if out is None else reaches(out, a, b, offsets, *operands)))
    plan, bytes_of = known
    if out is not None and overlaps_within(bytes_of, out, a, b, offsets, *operands):
        return out.copy_(computed(a, b, offsets, operands, activation, out_dtype, out.clone(), config, masked))
    return plan(a, b, offsets, operands, out)


# by the kind of a call: its plan, and `reaches` of out and operands where there is an out
_plans: dict[Hashable, tuple[Plan, tuple[int, ...]]] = {}


def _plan(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    operands: Operands,
    activation: str | None,
    dtype: torch.dtype,
    out: Tensor | None,
    config: Config | None,
    masked: bool,
) -> Plan:
    shape = result_shape(a, b, offsets, activation, operands.rows)
    if 0 in (*shape, offsets.shape[0]) or (a.shape[-1] == 0 and b.ndim == 2):
        return lambda a, b, offsets, operands, out: a.new_zeros(shape, dtype=dtype) if out is None else _zeroed(out)
    if a.shape[-1] == 0:
        return lambda a, b, offsets, operands, out: computed(
            a.new_zeros(a.shape[0], LINE), b.new_zeros(b.shape[0], b.shape[2], LINE).mT, offsets,
            operands._replace(scale_a=None, scale_b=None), activation, dtype, out, config, masked,
        )  # fmt: skip
    if operands.rows is not None and (a.shape[0] == 0 or a.shape[1] * a.element_size() % TMA_BYTES):
        return lambda a, b, offsets, operands, out: computed(
            rows_of(a, operands.rows), b, offsets, operands._replace(rows=None), activation, dtype, out, config
        )
    if operands.out_rows is not None and shape[1] * dtype.itemsize % TMA_BYTES:
        return lambda a, b, offsets, operands, out: scattered(
            computed(a, b, offsets, operands._replace(out_rows=None), activation, dtype, None, config),
            operands.out_rows,
            offsets,
            a.new_empty(shape, dtype=dtype) if out is None else out,
        )
    plan = CallPlan(a, b, offsets, operands, activation, dtype, config, masked)
    return plan.straight(a, b, offsets, operands, out) or plan


def _zeroed(out: Tensor) -> Tensor:
    """The sums of nothing: matrices of zeros, but no rows of a group."""
    return out.zero_() if out.ndim == 3 else out


def is_grouped(x: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """Which elements of `x` lie before the end of the last group, along a dimension."""
    ends = offsets[-1] if offsets.shape[0] else 0
    found = torch.arange(x.shape[dim], device=x.device) < ends
    return found[:, None] if dim == -2 else found


def scattered(y: Tensor, rows: Tensor | None, offsets: Tensor, out: Tensor) -> Tensor:
    """`out`, after rows of groups of `y` were copied to those of its rows that `rows` selects."""
    assert rows is not None
    inside = (rows >= 0) & (rows < out.shape[0]) & is_grouped(y, offsets, -2)[:, 0]
    room = torch.cat([out, out.new_empty(1, out.shape[1])])  # its last row receives what no row does
    room.index_copy_(0, torch.where(inside, rows, out.shape[0]).long(), y)
    return out.copy_(room[:-1])


class CallPlan:
    """How operands become what the kernel takes, and the kernel.

    a (M, K), b (G, K, N): the rows of a and of the result are packed. a (M, K), b (K, N): their K is, and the kernel
    reads aᵀ.
    """

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        offsets: Tensor,
        operands: Operands,
        activation: str | None,
        dtype: torch.dtype,
        config: Config | None,
        masked: bool,
    ):
        self.by_depth, self.dtype = b.ndim == 2, dtype
        self.shape, groups = result_shape(a, b, offsets, activation, operands.rows), offsets.shape[0]
        self.gated_by = GATED.get(activation or "")
        self.rows = a.shape[-1] if self.by_depth else operands.height(a)  # of the packed operands
        self.transposes_b = not self.by_depth and (a.dtype in FP8 or (not addressable(b) and addressable(b.mT)))
        size = about(self.rows, groups)
        self.rows //= groups if masked else 1
        self.places = {} if self.by_depth else places_of(a, b, operands, activation)
        kinds = set(self.places.values())
        read = "tile" if "tile" in kinds else "vector" if kinds & {"row", "col"} else ""
        self.problem = Problem(
            tk.from_torch(a.dtype).name,
            tk.from_torch(dtype).name,
            "km" if self.by_depth else "mk",
            "nk" if self.transposes_b else "kn",
            self.gated_by or activation or read,
            " ".join(
                word
                for word, holds in (
                    (OF_GATED, self.gated_by),
                    ("block", "block" in kinds),
                    (ROWS, "row" in kinds and not self.gated_by and "block" not in kinds),
                    (GATHERED, operands.rows is not None),
                    (SCATTERED, operands.out_rows is not None),
                )
                if holds
            ),
            groups,
            a.shape[0] if self.by_depth else size,
            b.shape[-1],
            size if self.by_depth else a.shape[1],
        )
        index = a.device.index if a.device.type == "cuda" else None
        check_chip(index)
        self.config = config or family.choose(self.problem, None, index)
        steps = steps_of(operands.epilogue, self.places, None if self.gated_by else activation, dtype)
        # as the kernel takes them
        blocks = [name for name, place in self.places.items() if place == "block"]
        self.others = [*((steps.staged.name,) if steps.staged else ()), *blocks, *(x.name for x in steps.operands)]
        selected = [name for name in SELECTING if getattr(operands, name) is not None]
        self.others += selected
        stored = self._stored(a, b)
        of_rows = dict(most=max(16, power_of_two(groups)), masked=masked)
        of_rows |= {knob: True for name, knob in SELECTING.items() if name in selected}
        knobs: dict[str, Any] = dict(
            zip(("dtype", "b_dtype", "out_dtype"), map(tk.from_torch, (a.dtype, b.dtype, dtype)))
        )
        of_groups = OF_SCALES.get(self.problem.scales.split(" ")[0], RowGroupedGemm)
        self.template = template_of(
            self.config,
            order_of(self.problem, self.config, l2_bytes(index)),
            self.problem.a,
            self.problem.b,
            True,
            steps,
            "block" if blocks else "",
            "fp32",
            any(not begin_alike(x, y) for x, y in zip((a, b), stored, strict=True)),
            template=DepthGroupedGemm if self.by_depth else of_groups,
            **knobs | ({} if self.by_depth else of_rows) | (dict(gated_by=self.gated_by) if self.gated_by else {}),
        )

    def _stored(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both as TMA reads them: views or, where it cannot address those, copies."""
        packed, b = as_addressable(a.mT if self.by_depth else a), b.mT if self.transposes_b else b
        if self.gated_by:  # (groups, 2, …): columns that are activated, and those that these gate
            columns = 1 if self.transposes_b else 2
            b = b.unflatten(columns, (2, self.shape[1])).movedim(columns, 1)
        return packed, as_addressable(b)

    def _ordered(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (b, a) if self.config.swap_ab else (a, b)

    def _extras(self, operands: Operands) -> list[Tensor]:
        """Scales and the epilogue's operands as the kernel takes them: values for rows in one dimension, block scales
        along K last."""
        found = []
        for name in self.others:
            x, place = getattr(operands, name), self.places.get(name)
            if place in ("row", "scalar"):
                found.append(x.reshape(-1))
            elif place is None:
                found.append(x.contiguous())
            else:
                found.append(as_addressable(x.mT if place == "block" else x))
        return found

    def straight(self, a: Tensor, b: Tensor, offsets: Tensor, operands: Operands, out: Tensor | None) -> Plan | None:
        """The plan in as few steps as possible, where no operand has to be copied, nor the result."""
        new_result = allocator(self.shape, self.dtype, a.device)
        home = new_result() if out is None else out
        others = [Operands._fields.index(name) for name in self.others]
        views = (*self._ordered(*self._stored(a, b)), home, *self._extras(operands), offsets)
        given = (*self._ordered(a, b), home, *(operands[i] for i in others), offsets)
        copies = not all(begin_alike(x, view) for x, view in zip(given, views, strict=True))
        if copies or not storable(home) or not offsets.is_contiguous():
            return None
        # the bound launch takes the tensors themselves: each begins at the address of its view
        launch, swap_ab = self.template.call(*views).bind(*views, rows=self.rows), self.config.swap_ab

        def run(a: Tensor, b: Tensor, offsets: Tensor, operands: Operands, out: Tensor | None) -> Tensor:
            if out is None:
                out = new_result()
            first, second = (b, a) if swap_ab else (a, b)
            launch(first, second, out, *[operands[i] for i in others], offsets)
            return out

        return run

    def __call__(self, a: Tensor, b: Tensor, offsets: Tensor, operands: Operands, out: Tensor | None) -> Tensor:
        home = (
            out
            if out is not None and storable(out)
            else padded_empty(self.shape if out is None else tuple(out.shape), a, self.dtype)
        )
        if out is not None and out is not home and not self.by_depth:
            copied(out, home)  # rows after the last group stay as they are
        tensors = (*self._ordered(*self._stored(a, b)), home, *self._extras(operands), offsets.contiguous())
        self.template(*tensors, rows=self.rows)
        if out is None:
            return home if home.is_contiguous() else home.contiguous()
        return out if home is out else copied(home, out)
