"""Masks and the soft-cap of scores.

Query i sees key j where i + shift − left ≤ j ≤ i + shift + right. `shift` is keys − queries: bottom right alignment.
"""

import triton
import triton.language as tl

import tritonkittens.lang as tk


@triton.jit
def reach(ctx):
    """key − query of the last key that a query sees, under a mask that hides later ones."""
    return ctx.shift + ctx.args.right if ctx.config.window else ctx.shift


@triton.jit
def keys_of(ctx, first, behind, shift, keys):
    """(last block, number of blocks) of the keys that queries `first` … `behind` − 1 see."""
    COLS: tl.constexpr = ctx.config.tile_n
    end, begin = keys, 0
    if ctx.config.causal:
        end = tl.minimum(keys, tl.maximum(behind + shift, 0))
    if ctx.config.window:
        end = tl.minimum(keys, tl.maximum(behind + shift + ctx.args.right, 0))
        begin = tl.maximum(first + shift - ctx.args.left, 0) // COLS
    blocks = tk.ceil_div(end, COLS)
    return blocks - 1, tl.maximum(blocks - begin, 0)


@triton.jit
def edges_of(ctx, first, behind, shift, keys, last):
    """(masked, whole): the blocks that need a mask, counted from the `last` one down.

    They are the first `masked` blocks, and those from number `whole` on: one of the queries `first` … `behind` − 1 does
    not see all their keys.
    """
    COLS: tl.constexpr = ctx.config.tile_n
    seen, begin = keys, 0  # every query sees the keys in between
    if ctx.config.causal:
        seen = first + shift + 1
    if ctx.config.window:
        seen = first + shift + ctx.args.right + 1
        begin = behind - 1 + shift - ctx.args.left
    seen = tl.maximum(tl.minimum(seen, keys), 0)
    return last + 1 - seen // COLS, last + 1 - tk.ceil_div(tl.maximum(begin, 0), COLS)


@triton.jit
def squashed(s, factor):
    """tanh of the scores, in units of the soft-cap. `factor`: `squash` of the numbers of `QueryTiles`.

    Its error is a unit in the last place of 1; tanh.approx has 2⁻¹¹ of a score.
    """
    return 1.0 - 2.0 * tk.reciprocal(1.0 + tk.exp2(s * factor))


@triton.jit
def hidden(ctx, s):
    """The scores of this iteration's block, −∞ where a query does not see a key."""
    row = (ctx.row * ctx.config.consumers + ctx.consumer) * ctx.config.tile_m + ctx.shift
    col = (ctx.last - ctx.iter) * ctx.config.tile_n
    if ctx.config.window:
        s = tk.sliding_window(s, ctx.args.left, ctx.args.right, row=row, col=col)
    if ctx.config.causal:  # no query sees a key after the last, which is the last query's own
        return tk.make_causal(s, row=row, col=col)
    else:
        return tk.right_fill(s, ctx.keys - col, float("-inf"))


@triton.jit
def queries_of(ctx, first, behind, shift, queries):
    """(first block, end block) of the queries that see one of the keys `first` … `behind` − 1."""
    COLS: tl.constexpr = ctx.config.tile_n
    begin, end = 0, queries
    if ctx.config.causal:
        begin = first - shift
    if ctx.config.window:
        begin = first - shift - ctx.args.right
        end = tl.minimum(queries, behind - shift + ctx.args.left)
    begin = tl.maximum(begin, 0) // COLS
    return begin, tl.maximum(tk.ceil_div(tl.maximum(end, 0), COLS), begin)


@triton.jit
def whole_from(ctx, behind, shift, begin, end):
    """Under a causal mask, the first block of queries, in `begin` … `end`, from which on all see all keys before
    `behind`."""
    return tl.minimum(tl.maximum(tk.ceil_div(tl.maximum(behind - 1 - shift, 0), ctx.config.tile_n), begin), end)


@triton.jit
def hidden_from(ctx, s, key, query):
    """Transposed scores (keys from `key` on, queries from `query` on), −∞ where a query does not see a key."""
    COLS: tl.constexpr = ctx.config.tile_n
    ROWS: tl.constexpr = ctx.config.tile_m
    col = query + ctx.shift
    if ctx.config.window:
        if (key + ROWS - 1 > col + ctx.args.right) | (key < col + COLS - 1 - ctx.args.left):
            s = tk.sliding_window(s, ctx.args.right, ctx.args.left, row=key, col=col)
    if ctx.config.causal:
        if key + ROWS - 1 > col:
            tk.scheduling_barrier(ctx.keys)  # without it, ptxas computes masks in every block
            s = tk.make_causal_t(s, row=key, col=col)
    return s
