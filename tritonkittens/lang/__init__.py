"""The device vocabulary: `import tritonkittens.lang as tk`."""

from tritonkittens.lang.core.dtypes import (
    bf16,
    fp4e2m1x2,
    fp8e4m3,
    fp8e5m2,
    fp8e8m0,
    fp16,
    fp32,
    from_torch,
    int8,
    int32,
    int64,
    to_torch,
    uint8,
)
from tritonkittens.lang.core.errors import ArchitectureError, KernelError, TileError
from tritonkittens.lang.core.records import field, shape, struct, with_field
from tritonkittens.lang.debug import Event, mark, print, timeline
from tritonkittens.lang.kernel import Kernel, kernel
from tritonkittens.lang.memory.accumulator_fragments import as_fragments, fragment_place, store_fragments
from tritonkittens.lang.memory.bulk import (
    load_bytes_async,
    store_add_bytes_async,
    store_bytes_async,
    store_cluster_async,
)
from tritonkittens.lang.memory.first_store_reduce import is_initialized, mark_initialized, store_or_add_bytes_async
from tritonkittens.lang.memory.gather import gather_rows, scatter_rows
from tritonkittens.lang.memory.global_access import load, load_into, load_scalar, pointer_to, store
from tritonkittens.lang.memory.im2col import im2col, load_im2col_async
from tritonkittens.lang.memory.selected_rows import expect_rows, load_rows_async, row_arrivals, store_rows_async
from tritonkittens.lang.memory.shared_tiles import (
    allocate,
    bank_conflicts,
    load_elements,
    store_elements,
    subtile,
    subvector,
)
from tritonkittens.lang.memory.tensor_memory import load_max, load_min, reinterpret, tensor_allocator
from tritonkittens.lang.memory.tma import (
    fence_async,
    load_async,
    load_async_wait,
    prefetch,
    store_add_async,
    store_async,
    store_max_async,
    store_min_async,
    store_read_wait,
    store_wait,
)
from tritonkittens.lang.mma.complex import complex, conj
from tritonkittens.lang.mma.fp8_a_operand import byte_operand, byte_operand_column
from tritonkittens.lang.mma.mma import (
    mm_AB,
    mm_ABt,
    mm_AtB,
    mm_AtBt,
    mma_AB,
    mma_ABt,
    mma_AtB,
    mma_AtBt,
    mma_begin,
    mma_retire,
    mma_wait,
    mma_zero,
)
from tritonkittens.lang.mma.tcgen05 import mma_commit
from tritonkittens.lang.register.broadcast import (
    add_col,
    add_row,
    broadcast_col,
    broadcast_row,
    div_col,
    div_row,
    eq_col,
    eq_row,
    exp2_col,
    exp2_row,
    ge_col,
    ge_row,
    gt_col,
    gt_row,
    le_col,
    le_row,
    lt_col,
    lt_row,
    max_col,
    max_row,
    min_col,
    min_row,
    mul_col,
    mul_row,
    ne_col,
    ne_row,
    sub_col,
    sub_row,
)
from tritonkittens.lang.register.compiler_hints import opaque_zero
from tritonkittens.lang.register.construction import (
    apply,
    concat_cols,
    full,
    full_like,
    iota,
    map,
    neg_infty,
    one,
    pin,
    pos_infty,
    scheduling_barrier,
    split_cols,
    swap_layout,
    transpose,
    zero,
)
from tritonkittens.lang.register.elementwise import (
    abs,
    add,
    cast,
    cast_pairs,
    ceil,
    copy,
    cos,
    div,
    eq,
    erf,
    exp,
    exp2,
    floor,
    fma,
    ge,
    gelu,
    gt,
    le,
    log,
    log2,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    neg,
    reciprocal,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sin,
    sqrt,
    sub,
    tanh,
    where,
)
from tritonkittens.lang.register.masks import (
    block_diagonal,
    left_fill,
    lower_fill,
    make_causal,
    make_causal_t,
    mask,
    right_fill,
    sliding_window,
    tril,
    triu,
    upper_fill,
    upper_right_fill,
)
from tritonkittens.lang.register.reductions import (
    col_argmax,
    col_argmin,
    col_cumsum,
    col_max,
    col_mean,
    col_min,
    col_norm,
    col_prod,
    col_sum,
    hasnan,
    max,
    min,
    prod,
    row_argmax,
    row_argmin,
    row_cumsum,
    row_max,
    row_mean,
    row_min,
    row_norm,
    row_prod,
    row_sum,
    row_sum_by_quad,
    row_topk,
    softmax_step,
    sum,
)
from tritonkittens.lang.register.warp_vote import rescale_row, warp_exceeds
from tritonkittens.lang.schedule.cluster_split_k import ClusterSplitK
from tritonkittens.lang.schedule.dynamic_scheduler import Dynamic
from tritonkittens.lang.schedule.index import Knob, block_count, block_index, ceil_div, unravel
from tritonkittens.lang.schedule.launch_control import ClusterLaunchControl
from tritonkittens.lang.schedule.raster import (
    ColumnMajor,
    LongestFirst,
    Order,
    RowMajor,
    Supergroup,
    longest_first,
    supergroup,
    supergroup_rows,
    tile_at,
)
from tritonkittens.lang.schedule.sequences import sequence_of_tile
from tritonkittens.lang.schedule.split import SplitK, SplitRest, SplitTail, StreamK, stream_k
from tritonkittens.lang.schedule.tile_scheduler import OnePerBlock, Persistent, Schedule, task
from tritonkittens.lang.sync.cluster import cluster_rank, cluster_sync, dependency_wait, dependents_launch
from tritonkittens.lang.sync.named_barriers import named_arrive, named_sync
from tritonkittens.lang.sync.pipeline import (
    advance,
    consumer_release,
    consumer_wait,
    pipeline,
    pipeline_state,
    producer_acquire,
    producer_commit,
)
from tritonkittens.lang.sync.semaphores import arrive, careful_wait, expect, semaphores, sync, wait
from tritonkittens.lang.sync.warp_specialize import (
    consumer_registers,
    decrease_registers,
    increase_registers,
    producer_registers,
    specialize,
)
from tritonkittens.lang.template.call import Call
from tritonkittens.lang.template.compute import release, wait_for
from tritonkittens.lang.template.consumer_barriers import (
    exchange_acquire,
    exchange_commit,
    exchange_release,
    exchange_wait,
    sync_consumers,
    warp_scheduler_arrive,
    warp_scheduler_sync,
)
from tritonkittens.lang.template.extension import Extension
from tritonkittens.lang.template.extensions import (
    DeferredEpilogue,
    GatherWarps,
    IndexPrefetch,
    ReduceStoreWarp,
    SplitTask,
)
from tritonkittens.lang.template.extensions.reduce_store_warp import reduce_acquire, reduce_commit, reduce_wait
from tritonkittens.lang.template.layout import layout
from tritonkittens.lang.template.template import lcf, lcsf
from tritonkittens.lang.types.complex_tiles import cgl, crt, cst, csv
from tritonkittens.lang.types.global_layout import extent, gl
from tritonkittens.lang.types.scales import scale_tile
from tritonkittens.lang.types.tiles import by_rows, col_vec, row_vec, rt, rv, st, sv, tt
from tritonkittens.lang.types.varlen import has_sequences, sequence

__all__ = [
    "abs", "add", "add_col", "add_row", "advance", "allocate", "apply", "ArchitectureError", "arrive", "as_fragments",
    "bank_conflicts", "bf16", "block_count", "block_diagonal", "block_index", "broadcast_col", "broadcast_row",
    "by_rows", "byte_operand", "byte_operand_column", "Call", "careful_wait", "cast", "cast_pairs", "ceil", "ceil_div",
    "cgl", "cluster_rank", "cluster_sync", "ClusterLaunchControl", "ClusterSplitK", "col_argmax", "col_argmin",
    "col_cumsum", "col_max", "col_mean", "col_min", "col_norm", "col_prod", "col_sum", "col_vec", "ColumnMajor",
    "complex", "concat_cols", "conj", "consumer_registers", "consumer_release", "consumer_wait", "copy", "cos", "crt",
    "cst", "csv", "decrease_registers", "DeferredEpilogue", "dependency_wait", "dependents_launch", "div", "div_col",
    "div_row", "Dynamic", "eq", "eq_col", "eq_row", "erf", "Event", "exchange_acquire", "exchange_commit",
    "exchange_release", "exchange_wait", "exp", "exp2", "exp2_col", "exp2_row", "expect", "expect_rows", "Extension",
    "extent", "fence_async", "field", "floor", "fma", "fp16", "fp32", "fp4e2m1x2", "fp8e4m3", "fp8e5m2", "fp8e8m0",
    "fragment_place", "from_torch", "full", "full_like", "gather_rows", "GatherWarps", "ge", "ge_col", "ge_row", "gelu",
    "gl", "gt", "gt_col", "gt_row", "has_sequences", "hasnan", "im2col", "increase_registers", "IndexPrefetch", "int32",
    "int64", "int8", "iota", "is_initialized", "Kernel", "kernel", "KernelError", "Knob", "layout", "lcf", "lcsf", "le",
    "le_col", "le_row", "left_fill", "load", "load_async", "load_async_wait", "load_bytes_async", "load_elements",
    "load_im2col_async", "load_into", "load_max", "load_min", "load_rows_async", "load_scalar", "log", "log2",
    "longest_first", "LongestFirst", "lower_fill", "lt", "lt_col", "lt_row", "make_causal", "make_causal_t", "map",
    "mark", "mark_initialized", "mask", "max", "max_col", "max_row", "maximum", "min", "min_col", "min_row", "minimum",
    "mm_AB", "mm_ABt", "mm_AtB", "mm_AtBt", "mma_AB", "mma_ABt", "mma_AtB", "mma_AtBt", "mma_begin", "mma_commit",
    "mma_retire", "mma_wait", "mma_zero", "mul", "mul_col", "mul_row", "named_arrive", "named_sync", "ne", "ne_col",
    "ne_row", "neg", "neg_infty", "one", "OnePerBlock", "opaque_zero", "Order", "Persistent", "pin", "pipeline",
    "pipeline_state", "pointer_to", "pos_infty", "prefetch", "print", "prod", "producer_acquire", "producer_commit",
    "producer_registers", "reciprocal", "reduce_acquire", "reduce_commit", "reduce_wait", "ReduceStoreWarp",
    "reinterpret", "release", "relu", "rescale_row", "right_fill", "row_argmax", "row_argmin", "row_arrivals",
    "row_cumsum", "row_max", "row_mean", "row_min", "row_norm", "row_prod", "row_sum", "row_sum_by_quad", "row_topk",
    "row_vec", "RowMajor", "rsqrt", "rt", "rv", "scale_tile", "scatter_rows", "Schedule", "scheduling_barrier",
    "semaphores", "sequence", "sequence_of_tile", "shape", "sigmoid", "silu", "sin", "sliding_window", "softmax_step",
    "specialize", "split_cols", "SplitK", "SplitRest", "SplitTail", "SplitTask", "sqrt", "st", "store",
    "store_add_async", "store_add_bytes_async", "store_async", "store_bytes_async", "store_cluster_async",
    "store_elements", "store_fragments", "store_max_async", "store_min_async", "store_or_add_bytes_async",
    "store_read_wait", "store_rows_async", "store_wait", "stream_k", "StreamK", "struct", "sub", "sub_col", "sub_row",
    "subtile", "subvector", "sum", "Supergroup", "supergroup", "supergroup_rows", "sv", "swap_layout", "sync",
    "sync_consumers", "tanh", "task", "tensor_allocator", "tile_at", "TileError", "timeline", "to_torch", "transpose",
    "tril", "triu", "tt", "uint8", "unravel", "upper_fill", "upper_right_fill", "wait", "wait_for", "warp_exceeds",
    "warp_scheduler_arrive", "warp_scheduler_sync", "where", "with_field", "zero",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Names that are gone raise an error that says what to write instead."""
    from tritonkittens.lang.template.renamed import refuse_old

    refuse_old("tritonkittens.lang", "function", (f"tk.{name}",))
    raise AttributeError(f"module 'tritonkittens.lang' has no attribute {name!r}")
