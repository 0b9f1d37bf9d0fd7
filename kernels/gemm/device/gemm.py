"""The matrix product as load / compute / finish hooks: C = epilogue(A·B). One source for Hopper (wgmma) and Blackwell
(tcgen05)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.epilogue import Steps, load_values, load_vectors, transposed_bytes
from tritonkittens.kernels.gemm.device.result import (
    defer_result,
    finish_deferred_subtile,
    load_residual,
    place,
    reload_residual,
    result_tiles,
    store_deferred_subtile,
    store_result,
)
from tritonkittens.lang.types.tiles import SWIZZLE_LINE

EVEN_ROUNDS_DEPTH = 2048  # K from which a product is bound by arithmetic
ACTIVATION_STEPS = 4  # iterations in which an activation is applied to a sub-tile of deferred results
RESIDUAL_STEPS = 3  # iterations from sub-tile to sub-tile of deferred results, while their residual is loaded
ACCESS = 128 * 16  # bytes that a consumer's threads read or write of shared memory at a time
# of one product whose sums have room in the 96 registers that a thread of such a block starts with
FOUR_CONSUMERS_COLS = 128


def is_one_product(rows: int, cols: int, depth: int, itemsize: int, consumers: int, b_stored_nk: bool) -> bool:
    """Does one wgmma take columns that are no power of two? It does where B has swizzle lines: of depth, or of
    columns."""
    lines = depth * itemsize == SWIZZLE_LINE if b_stored_nk else cols * itemsize % SWIZZLE_LINE == 0
    return rows == 64 and lines and (consumers < 4 or cols <= FOUR_CONSUMERS_COLS)


class Gemm(tk.DeferredEpilogue, tk.lcf):
    """One task is a tile of C of `tile_n` columns and `tile_m` rows a consumer (and block of the cluster); `tile_k` of
    K an iteration.

    Consumers end a long task one after the other (`staggered_epilogue`): the other's products hide what one does
    between two tasks. What each knob is worth: docs/notes/gemm.md.

    - `epilogue_n`: columns of its results that a consumer stages at a time, in two buffers in turn; None: all. Smaller
      buffers leave shared memory for more stages.
    - `deferred_epilogue`: results stay in registers, in the dtype of C, and are stored a sub-tile an iteration while
      the next task's products run. A residual is added then. In bf16 an activation is applied in the staging buffer, a
      part an iteration: beside products an instruction takes a consumer three to four cycles, and its work between two
      products must end before the other consumer has used up the pipeline.
    - `cache_hint`: the cache policy of B and C; "evict_first" leaves L2 to the rows of A that the rest of a supergroup
      reads again.
    """

    dtype: tl.dtype = tk.bf16
    b_dtype: tl.dtype | None = None
    out_dtype: tl.dtype = tk.bf16
    tile_m: int = 64
    tile_n: int = 256
    tile_k: int = 64
    order: tk.Order = tk.Supergroup(8)
    a_stored_km: bool = False
    b_stored_nk: bool = False
    c_stored_nm: bool = False
    batched: bool = False
    scattered: bool = False  # whether rows of C are selected by number
    grouped: bool = False  # whether operands of the epilogue are packed, or have a row for each group
    accumulate: tl.dtype = tk.fp32
    epilogue: Steps = Steps()
    epilogue_n: int | None = None
    staggered_epilogue: bool = True
    cache_hint: str | None = None
    deferred_epilogue: bool = False

    def layout(self) -> tk.layout:
        """The blocks of a cluster have neighbouring rows of C: they need the same tile of B."""
        if self.tile_m & (self.tile_m - 1):
            raise tk.TileError(f"Gemm(tile_m={self.tile_m}): a consumer's rows must be a power of two")
        rows = self.team * self.tile_m // len(self.a_tiles)
        a = tk.st(self.dtype, *((self.tile_k, rows) if self.a_stored_km else (rows, self.tile_k)))
        b = tk.st(
            self.b_dtype or self.dtype,
            *((self.tile_n, self.tile_k) if self.b_stored_nk else (self.tile_k, self.tile_n)),
            contiguous=self._whole,
        )
        c, staged = result_tiles(self)
        if self.deferred_epilogue and (self.epilogue_n is None or (self.epilogue.residual and self.splits)):
            raise tk.TileError(
                f"Gemm(deferred_epilogue=True, epilogue_n={self.epilogue_n!r}, schedule={self.schedule!r}): "
                "deferred results need epilogue_n, and with a residual a schedule that splits no task"
            )
        if self.deferred_epilogue and not self.epilogue.may_wait:
            raise tk.TileError(
                "Gemm(deferred_epilogue=True): the last step of the epilogue must add the staged operand of deferred "
                "results"
            )
        deferred = {name: tk.rt(self.out_dtype, self.tile_m, self.epilogue_n) for name in self.subtile_names}
        steps = self.activation_steps or (RESIDUAL_STEPS if deferred and self.epilogue.residual else 0)
        residual, operands, results = self.epilogue.memory(
            c, staged, self.result_cols, self.epilogue_n, self.late if self.deferred_epilogue else None
        )
        return tk.layout(
            globals=dict(A=a, B=b, C=c, **residual, **operands),
            input=dict(**dict.fromkeys(self.a_tiles, a), B=b),
            **results,
            args=self.epilogue.numbers,
            accumulators=dict(acc=tk.rt(self.accumulate, self.tile_m, self.tile_n)),
            deferred_results=deferred,
            deferred_steps=steps,
            multicast=("B",) if self.cluster > 1 else (),
            spare=self.consumers * transposed_bytes(self.tile_m) if self.c_stored_nm and self.epilogue.residual else 0,
        )

    @property
    def subtile_names(self) -> tuple[str, ...]:
        """Names of the sub-tiles of a consumer's deferred results."""
        return (
            tuple(f"C{subtile}" for subtile in range(self.result_cols // self.epilogue_n))
            if self.deferred_epilogue and self.epilogue_n
            else ()
        )

    @property
    def activation_steps(self) -> int:
        """Parts in which an activation is applied to a staged sub-tile of deferred results; 0 where it is applied to
        the sums.

        Rows of the sub-tile are one swizzle line at most.
        """
        size = tk.to_torch(self.out_dtype).itemsize
        line = (self.tile_m if self.c_stored_nm else self._deferred_cols) * size
        if not self._deferred_cols or line > SWIZZLE_LINE or not self.epilogue.activates_late(self.out_dtype):
            return 0
        return min(ACTIVATION_STEPS, self.tile_m * self._deferred_cols * size // ACCESS)

    @property
    def _deferred_cols(self) -> int:
        """Columns of a sub-tile of deferred results, where they are a power of two; otherwise 0."""
        return (
            self.epilogue_n
            if self.deferred_epilogue and self.epilogue_n and self.epilogue_n & (self.epilogue_n - 1) == 0
            else 0
        )

    @property
    def gates_late(self) -> bool:
        """Whether deferred results are multiplied by the gate when the residual is added."""
        return bool(self._deferred_cols) and not self.c_stored_nm and self.epilogue.gates_late(self.out_dtype)

    @property
    def _late_steps(self) -> int:
        """Steps of the epilogue that are applied when deferred results are stored."""
        return (
            (2 if self.gates_late else 1)
            if self.deferred_epilogue and (self.epilogue.residual or self.activation_steps)
            else 0
        )

    @property
    def early(self) -> Steps:
        """The steps of the epilogue that are applied to the sums."""
        return self.epilogue.split(self._late_steps)[0]

    @property
    def late(self) -> Steps:
        """The steps that are applied to deferred results: an activation in the staging buffer, or the residual."""
        return self.epilogue.split(self._late_steps)[1]

    @property
    def late_gate(self) -> str | None:
        """The name of the gate of deferred results that is loaded with their residual."""
        return self.late.vectors[0].name if self.gates_late else None

    @property
    def reloaded_subtiles(self) -> int:
        """Sub-tiles of the residual of deferred results that are loaded at a time; 0 without a residual.

        A task loads them an even number of times, so that each task begins with the same phase.
        """
        if not self.deferred_epilogue or not self.epilogue_n or not self.epilogue.residual:
            return 0
        return 2 if self.result_cols // self.epilogue_n % 4 == 0 else 1

    @property
    def a_tiles(self) -> tuple[str, ...]:
        """Names of A's tiles of an iteration: one for all consumers, or one for each of three, whose rows together are
        no power of two."""
        rows = self.team * self.tile_m
        return ("A",) if rows & (rows - 1) == 0 else tuple(f"A{consumer}" for consumer in range(self.team))

    @property
    def gathered_tile(self) -> str | None:
        """The name of the input tile whose rows are selected by number; None here."""
        return None

    @property
    def _whole(self) -> bool:
        size = tk.to_torch(self.b_dtype or self.dtype).itemsize
        return bool(self.tile_n & (self.tile_n - 1)) and is_one_product(
            self.tile_m, self.tile_n, self.tile_k, size, self.consumers, self.b_stored_nk
        )

    @property
    def result_cols(self) -> int:
        """Columns that a block finishes of a task."""
        return self.tile_n // self.sharers

    @property
    def task_rows(self) -> int:
        """Rows of C of a task: those of all consumers, and of all blocks of a cluster."""
        return self.cluster * self.team * self.tile_m

    def tasks(self, A: Any, B: Any, C: Any, *others: Any) -> int:
        rows, cols = C[-2:] if not self.c_stored_nm else C[:-3:-1]
        return -(-rows // self.task_rows) * -(-cols // self.tile_n) * (C[0] if self.batched else 1)

    def blocks(self, slots: int, *shapes: Any) -> int:
        """A short product is bound by memory, which all multiprocessors together reach faster than even rounds."""
        short = shapes[0][-2 if self.a_stored_km else -1] < EVEN_ROUNDS_DEPTH and self.schedule == tk.Persistent()
        return min(self.tasks(*shapes), slots) if short else super().blocks(slots, *shapes)

    @triton.jit
    def setup(ctx):
        rows = tk.ceil_div(tk.extent(ctx.globals.C, -1 if ctx.config.c_stored_nm else -2), ctx.config.task_rows)
        cols = tk.ceil_div(tk.extent(ctx.globals.C, -2 if ctx.config.c_stored_nm else -1), ctx.config.tile_n)
        batch = ctx.task_id // (rows * cols) if ctx.config.batched else 0
        batches = tk.extent(ctx.globals.C, 0) if ctx.config.batched else 1
        row, col = tk.tile_at(ctx.config.order, ctx.task_id - batch * rows * cols, rows, cols)
        iterations = tk.ceil_div(tk.extent(ctx.globals.A, -2 if ctx.config.a_stored_km else -1), ctx.config.tile_k)
        result_col = col * ctx.config.sharers + ctx.part if ctx.config.sharers > 1 else col
        return tk.task(
            iterations,
            when=ctx.task_id < batches * rows * cols,
            batch=batch,
            row=row * ctx.config.cluster + ctx.rank,
            col=col,
            result_col=result_col,
        )

    @triton.jit
    def load(ctx, input):
        load_a(ctx, input)
        if ctx.config.gathered_tile != "B":
            tk.load_async(
                input.B,
                ctx.globals.B,
                place(ctx, ctx.globals.B, ctx.iter, ctx.col, ctx.config.b_stored_nk),
                input.full,
                ctx.config.cache_hint,
            )

    @triton.jit
    def load_epilogue(ctx, epilogue):
        load_vectors(ctx, epilogue, ctx.config.early)
        if ctx.config.epilogue.residual and not ctx.config.deferred_epilogue:
            load_residual(ctx, epilogue, ctx.row * ctx.config.team + ctx.consumer)

    @triton.jit
    def load_params(ctx):
        return load_values(ctx, ctx.row * ctx.config.team + ctx.consumer)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.mma_zero(ctx.accumulators.acc, ctx.config.dtype))

    @triton.jit
    def compute(ctx, state, input, previous):
        return state.replace(acc=tk.mma_retire(_multiply(ctx, input, state.acc)))

    @triton.jit
    def compute_last(ctx, state, input):
        return state.replace(acc=tk.mma_begin(tk.mma_wait(state.acc), ctx.config.dtype))

    @triton.jit
    def finish(ctx, state, epilogue):
        store_result(ctx, (tk.mma_wait(state.acc),), epilogue, ctx.row * ctx.config.team + ctx.consumer)

    @triton.jit
    def defer_results(ctx, state, epilogue):
        return defer_result(
            ctx, tk.cast(tk.load(tk.mma_wait(state.acc)), tk.fp32), epilogue, ctx.row * ctx.config.team + ctx.consumer
        )

    @triton.jit
    def store_deferred(ctx, tile, epilogue, n):
        store_deferred_subtile(ctx, tile, epilogue, ctx.row * ctx.config.team + ctx.consumer, n)

    @triton.jit
    def prefetch_deferred(ctx, epilogue):
        reload_residual(
            ctx,
            epilogue,
            ctx.row * ctx.config.team + ctx.consumer,
            0,
            ctx.config.reloaded_subtiles,
            ctx.config.late_gate,
        )

    @triton.jit
    def finish_deferred(ctx, epilogue, n, step, steps):
        finish_deferred_subtile(ctx, epilogue, ctx.row * ctx.config.team + ctx.consumer, n, step, steps)


@triton.jit
def load_a(ctx, input):
    """Load the tiles of A, unless their rows are gathered."""
    A_TILES: tl.constexpr = ctx.config.a_tiles if ctx.config.gathered_tile != "A" else ()
    for i in tl.static_range(len(A_TILES)):
        row = ctx.row * len(A_TILES) + i
        tk.load_async(
            tk.field(input, A_TILES[i]),
            ctx.globals.A,
            place(ctx, ctx.globals.A, row, ctx.iter, ctx.config.a_stored_km),
            input.full,
        )


@triton.jit
def _rows_of_a(ctx, input):
    """The tile of A with the rows of this consumer."""
    A_TILES: tl.constexpr = ctx.config.a_tiles
    if len(A_TILES) > 1:
        return tk.field(input, A_TILES[ctx.consumer])
    elif ctx.config.a_stored_km:
        return tk.subtile(input.A, ctx.config.tile_k, ctx.config.tile_m, 0, ctx.consumer)
    else:
        return tk.subtile(input.A, ctx.config.tile_m, ctx.config.tile_k, ctx.consumer, 0)


@triton.jit
def _multiply(ctx, input, acc):
    """acc + A·B for the rows of this consumer, left in flight."""
    a = _rows_of_a(ctx, input)
    if ctx.config.a_stored_km:
        if ctx.config.b_stored_nk:
            return tk.mma_AtBt(a, input.B, acc, wait=False)
        else:
            return tk.mma_AtB(a, input.B, acc, wait=False)
    else:
        if ctx.config.b_stored_nk:
            return tk.mma_ABt(a, input.B, acc, wait=False)
        else:
            return tk.mma_AB(a, input.B, acc, wait=False)
