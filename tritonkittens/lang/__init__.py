"""The device vocabulary: `import tritonkittens.lang as tk`."""
from tritonkittens.lang.dtypes import bf16, fp8e4m3, fp8e5m2, fp16, fp32, from_torch, int8, int32, int64, to_torch, uint8
from tritonkittens.lang.errors import ArchitectureError, TileError
from tritonkittens.lang.maps import (
    abs, add, cast, ceil, copy, cos, div, eq, erf, exp, exp2, floor, fma, ge, gelu, gt, le, log, log2, lt, maximum, minimum, mul, ne, neg, reciprocal, relu, rsqrt, sigmoid,
    silu, sin, sqrt, sub, tanh, where,
)
from tritonkittens.lang.masks import (
    block_diagonal, left_fill, lower_fill, make_causal, make_causal_t, mask, right_fill, sliding_window, tril, triu, upper_fill, upper_right_fill,
)
from tritonkittens.lang.reductions import (
    col_argmax, col_argmin, col_cumsum, col_max, col_mean, col_min, col_norm, col_prod, col_sum, hasnan, max, min, prod, row_argmax, row_argmin, row_cumsum, row_max,
    row_mean, row_min, row_norm, row_prod, row_sum, row_sum_by_quad, row_topk, softmax_step, sum,
)
from tritonkittens.lang.tiles import apply, concat_cols, full, full_like, iota, neg_infty, one, pos_infty, split_cols, swap_layout, transpose, zero
from tritonkittens.lang.types import col_vec, row_vec, rt, rv, st, sv, tt
from tritonkittens.lang.values import shape, struct
from tritonkittens.lang.vectors import (
    add_col, add_row, broadcast_col, broadcast_row, div_col, div_row, eq_col, eq_row, exp2_col, exp2_row, ge_col, ge_row, gt_col, gt_row, le_col, le_row, lt_col, lt_row,
    max_col, max_row, min_col, min_row, mul_col, mul_row, ne_col, ne_row, sub_col, sub_row,
)
from tritonkittens.lang.debug import Event, mark, print, timeline
from tritonkittens.lang.globals import extent, gl
from tritonkittens.lang.kernel import Kernel, kernel
from tritonkittens.lang.memory import (
    fence_async, gather_rows, load, load_async, load_async_wait, load_bytes_async, load_into, prefetch, scatter_rows, store, store_add_async, store_async,
    store_bytes_async, store_max_async, store_min_async, store_read_wait, store_wait,
)
from tritonkittens.lang.mma import mm_AB, mm_ABt, mm_AtB, mm_AtBt, mma_AB, mma_ABt, mma_AtB, mma_AtBt, mma_begin, mma_retire, mma_wait
from tritonkittens.lang.roles import consumer_registers, decrease_registers, increase_registers, producer_registers, specialize
from tritonkittens.lang.schedule import block_count, block_index, ceil_div, longest_first, stream_k, supergroup, supergroup_rows, unravel
from tritonkittens.lang.shared import allocate, bank_conflicts, subtile
from tritonkittens.lang.sync import (
    advance, arrive, careful_wait, cluster_rank, cluster_sync, consumer_release, consumer_wait, dependency_wait, dependents_launch, expect, named_arrive,
    named_sync, pipeline, producer_acquire, producer_commit, semaphores, sync, wait,
)
from tritonkittens.lang.tensor_memory import load_max, tensor_allocator
from tritonkittens.lang.layout import layout
from tritonkittens.lang.template import Call, lcf, my_turn, pass_turn, task
