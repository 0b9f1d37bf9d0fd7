"""The epilogue of a matrix product: steps on a tile of sums, each a `@triton.jit` function and its operands."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.reference import checked_activation

NO_TENSOR = ("number", "constant")  # places of operands that are no tensors


@dataclass(frozen=True)
class Operand:
    """An operand of a step: its name in the kernel, and its place, which says what its values belong to.

    Places of tensors, whose elements are of type `dtype`: "scalar" (one number), "row" (a value for each row of C),
    "col" (a value for each column), "tile" (a value for each element), and "staged" (a tile of the type of C, which TMA
    loads to where results are staged; at most one in an epilogue). Others: "number", an argument of the kernel, and
    "constant", the compiled-in value `constant`.
    """

    name: str
    place: str
    dtype: str = ""
    constant: Any = None

    @property
    def element(self) -> tl.dtype:
        """The dtype of its elements on the device."""
        return tl.dtype(self.dtype)


@dataclass(frozen=True)
class Step:
    """y = function(y, *operands)."""

    function: JITFunction
    operands: tuple[Operand, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters of the function that the operands are."""
        return tuple(self.function.arg_names[1:])

    @property
    def reads_tensors(self) -> bool:
        """Whether an operand is a tensor."""
        return any(x.place not in NO_TENSOR for x in self.operands)


@dataclass(frozen=True, eq=False)
class Steps(tk.Knob):
    """The steps that turn sums into results, in their order. Two are equal where the code is."""

    steps: tuple[Step, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steps) and self.cache_key == other.cache_key

    def __hash__(self) -> int:
        return hash(self.cache_key)

    @functools.cached_property
    def cache_key(self) -> str:
        """Hash of the functions' code and of what each is given."""
        parts = [
            (step.function.cache_key, [(x.name, x.place, x.dtype, repr(x.constant)) for x in step.operands])
            for step in self.steps
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def mangle(self) -> str:
        """Its part of the names of compiled functions."""
        return f"Steps_{self.cache_key[:16]}"

    @staticmethod
    def built_in(
        *,
        scale_a: Operand | None = None,
        scale_b: Operand | None = None,
        bias: Operand | None = None,
        activation: str | Step | None = None,
        gate: Operand | None = None,
        residual: Operand | None = None,
        fast: tl.dtype = tk.bf16,
    ) -> Steps:
        """y = activation(sum · scale_a · scale_b + bias), then residual + gate · y, of what is given.

        activation: a built-in one by name, or a step. fast: the type that a built-in activation may be as exact as.
        Raises ValueError for another name.
        """
        steps = [Step(multiply, (x,)) for x in (scale_a, scale_b) if x is not None]
        steps += [Step(add, (bias,))] if bias is not None else []
        if isinstance(activation, Step):
            steps.append(activation)
        elif (function := ACTIVATIONS[checked_activation(activation)]) is not None:
            steps.append(Step(function, (Operand("fast", "constant", constant=fast),)))
        steps += [Step(multiply, (gate,))] if gate is not None else []
        steps += [Step(add, (residual,))] if residual is not None else []
        return Steps(tuple(steps))

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Those that are tensors of the kernel beside the staged one, in the order in which it takes them."""
        return tuple(x for step in self.steps for x in step.operands if x.place not in (*NO_TENSOR, "staged"))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the operands that are run-time arguments of the kernel."""
        return tuple(x.name for step in self.steps for x in step.operands if x.place == "number")

    @property
    def vectors(self) -> tuple[Operand, ...]:
        """Operands with a value for every column. They come through shared memory: a load from global memory would hold
        up each tile."""
        return tuple(x for x in self.operands if x.place == "col")

    @property
    def params(self) -> tuple[Operand, ...]:
        """Operands with one value for all or for every row, few registers each."""
        return tuple(x for x in self.operands if x.place in ("scalar", "row"))

    @property
    def staged(self) -> Operand | None:
        """The operand that TMA loads to the staging buffer; None without one."""
        return next((x for step in self.steps for x in step.operands if x.place == "staged"), None)

    @property
    def residual(self) -> bool:
        """Has it a staged operand?"""
        return self.staged is not None

    @property
    def may_wait(self) -> bool:
        """Whether results may be deferred: a staged operand must be added to them, by the last step."""
        return not self.residual or self.steps[-1].function is add

    def activates_late(self, out: tl.dtype) -> bool:
        """Whether the last step is applied to deferred results of dtype `out`, in their staging buffer.

        It is where it reads no tensor, for bf16, which has the range of fp32.
        """
        return bool(self.steps) and not self.steps[-1].reads_tensors and out == tk.bf16

    def gates_late(self, out: tl.dtype) -> bool:
        """Whether deferred results of dtype `out` are multiplied by a gate when the residual is added.

        A bf16 gate right in front of the residual takes no additional instruction.
        """
        if (
            not self.residual
            or not self.may_wait
            or out != tk.bf16
            or len(self.steps) < 2
            or self.steps[-2].function is not multiply
        ):
            return False
        gate = self.steps[-2].operands[0]
        return gate.place == "col" and gate.element == tk.bf16

    def split(self, late: int) -> tuple[Steps, Steps]:
        """The steps in front of the last `late`, and these as one: a product and a sum are rounded once."""
        early, last = self.steps[: len(self.steps) - late], self.steps[len(self.steps) - late :]
        if late == 2:
            last = (Step(multiply_add, last[0].operands + last[1].operands),)
        return Steps(early), Steps(last)

    def memory(
        self, result: tk.st, staged: tk.st, cols: int, epilogue_n: int | None, late: Steps | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What the layout of a template holds for the epilogue.

        C is stored in tiles `result`, which have `epilogue_n` of its `cols` columns or all, and staged in `staged`.
        `late`: the late steps of deferred results. The staged operand is loaded ahead. Of more than two sub-tiles the
        later ones are loaded once those before are stored, and what late steps read once the previous task's results
        are stored.

        Returns (`globals` of the staged operand, `globals` of the others, the fields `epilogue`, `epilogue_loads` and
        `epilogue_reloads`).
        """
        operands = {x.name: tk.sv(x.element, cols) if x.place == "col" else None for x in self.operands}
        residual = dict(residual=result) if self.residual else {}
        vectors = {name: tile for name, tile in operands.items() if tile is not None}
        ahead = ("C",) if self.residual and late is None else ()
        later = (
            ("C",) if self.residual and (late is not None or (epilogue_n is not None and cols > 2 * epilogue_n)) else ()
        )
        later = (*later, *(x.name for x in late.vectors)) if late is not None else later
        return (
            residual,
            operands,
            dict(
                epilogue=dict(C=staged, **vectors),
                epilogue_loads=(*ahead, *(name for name in vectors if name not in later)),
                epilogue_reloads=later,
            ),
        )

    def transposed(self) -> Steps:
        """The steps of Cᵀ: operands of its rows are those of the columns of C."""
        other = {"row": "col", "col": "row"}
        return Steps(
            tuple(
                replace(step, operands=tuple(replace(x, place=other.get(x.place, x.place)) for x in step.operands))
                for step in self.steps
            )
        )


# ---------------------------------------------------------------- the built-in steps


@triton.jit
def multiply(acc, factor):
    """acc · factor."""
    return acc * factor


@triton.jit
def add(acc, term):
    """acc + term."""
    return acc + term


@triton.jit
def multiply_add(acc, factor, term):
    """acc · factor + term, rounded once."""
    return tl.fma(acc, factor, term)


@triton.jit
def gelu(acc, fast: tl.constexpr):
    """GELU by erf. `fast`: see `tk.gelu`."""
    return tk.gelu(acc, fast=fast)


@triton.jit
def gelu_tanh(acc, fast: tl.constexpr):
    """GELU by tanh. `fast`: see `tk.gelu`."""
    return tk.gelu(acc, "tanh", fast=fast)


@triton.jit
def silu(acc, fast: tl.constexpr):
    """acc · sigmoid(acc). `fast`: see `tk.silu`."""
    return tk.silu(acc, fast=fast)


ACTIVATIONS: dict[str | None, JITFunction | None] = {None: None, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


def transposed_bytes(rows: int) -> int:
    """Shared memory that the compiler takes of a consumer to add a residual that is stored transposed: for 64 columns
    in fp32 at a time."""
    return rows * 64 * 4


# ---------------------------------------------------------------- on the device


@triton.jit
def load_vectors(ctx, epilogue, EPILOGUE: tl.constexpr):
    """The copies of a `load_epilogue` hook for the operands of some steps with a value for every column."""
    VECTORS: tl.constexpr = EPILOGUE.vectors
    for i in tl.static_range(len(VECTORS)):
        tk.load_async(
            tk.field(epilogue, VECTORS[i].name),
            tk.field(ctx.globals, VECTORS[i].name),
            (ctx.batch, ctx.result_col) if ctx.config.grouped else (ctx.result_col,),
            epilogue.full,
        )


@triton.jit
def load_values(ctx, row):
    """What hook `load_params` reads: operands with one value for all or for every row."""
    OPERANDS: tl.constexpr = ctx.config.epilogue.params
    values = tk.struct()
    for i in tl.static_range(len(OPERANDS)):
        tensor = tk.field(ctx.globals, OPERANDS[i].name)
        if OPERANDS[i].place == "scalar":
            value = tl.load(tensor.pointer)
        else:
            place = (row,)
            if ctx.config.grouped:  # rows of Cᵀ are columns, with values for each group
                place = (ctx.batch, row) if ctx.config.c_stored_nm else (ctx.rows, row)
            value = tk.load(
                tensor,
                tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.result_cols), OPERANDS[i].element),
                place,
            )
        values = tk.with_field(values, OPERANDS[i].name, value)
    return values


@triton.jit
def _value(ctx, tile, OPERAND: tl.constexpr, epilogue, home, row, col, SUBTILE: tl.constexpr, SUBTILES: tl.constexpr):
    """An operand beside a tile: a scalar, or a tile of its shape and type. `home`: where the staged operand lies."""
    COLS: tl.constexpr = ctx.config.result_cols // SUBTILES
    if OPERAND.place == "constant":
        return tl.constexpr(OPERAND.constant)
    elif OPERAND.place == "number":
        return tk.field(ctx.args, OPERAND.name)
    elif OPERAND.place == "scalar":
        return tk.field(ctx.params, OPERAND.name).to(tl.float32)
    elif OPERAND.place == "row":
        return tk.broadcast_row(tile, tk.cast(tk.field(ctx.params, OPERAND.name), tile.dtype))
    elif OPERAND.place == "col":
        values = (
            tk.field(epilogue, OPERAND.name)
            if SUBTILES == 1
            else tk.subvector(tk.field(epilogue, OPERAND.name), COLS, SUBTILE)
        )
        return tk.broadcast_col(
            tile,
            tk.cast(tk.load(values, tk.row_vec(tk.rt(tk.fp32, ctx.config.tile_m, COLS), OPERAND.element)), tile.dtype),
        )
    elif OPERAND.place == "tile":
        place = (ctx.batch, row, col * SUBTILES + SUBTILE) if ctx.config.batched else (row, col * SUBTILES + SUBTILE)
        return tk.cast(
            tk.load(tk.field(ctx.globals, OPERAND.name), tk.rt(OPERAND.element, ctx.config.tile_m, COLS), place),
            tile.dtype,
        )
    else:
        return tk.cast(tk.transpose(tk.load(home)) if ctx.config.c_stored_nm else tk.load(home, like=tile), tile.dtype)


@triton.jit
def finish_tile(
    ctx, tile, EPILOGUE: tl.constexpr, epilogue, home, row, col, SUBTILE: tl.constexpr = 0, SUBTILES: tl.constexpr = 1
):
    """The tile after some steps of the epilogue.

    `row`, `col`: its place in C, in tiles. It may be sub-tile `SUBTILE` of `SUBTILES` along the columns. `epilogue` has
    the vectors, `home` the staged operand.
    """
    STEPS: tl.constexpr = EPILOGUE.steps
    for i in tl.static_range(len(STEPS)):
        values = tk.struct()
        for n in tl.static_range(len(STEPS[i].operands)):
            value = _value(ctx, tile, STEPS[i].operands[n], epilogue, home, row, col, SUBTILE, SUBTILES)
            values = tk.with_field(values, STEPS[i].parameters[n], value)
        tile = tk.map(tile, STEPS[i].function, values)
    return tile
