"""Which keys a query sees: key j of query i where i + shift − left ≤ j ≤ i + shift + right, `shift` being keys − queries (the bottom right corner is aligned)."""
import triton
import triton.language as tl

import tritonkittens.lang as tk


@triton.jit
def keys_of(ctx, first, behind, shift, keys):
    """(last block of keys, number of blocks) that queries `first` … `behind` − 1 see."""
    COLS: tl.constexpr = ctx.config.cols
    end, begin = keys, 0
    if ctx.config.causal:
        end = tl.minimum(keys, tl.maximum(behind + shift, 0))
    if ctx.config.window:
        end = tl.minimum(keys, tl.maximum(behind + shift + ctx.args.right, 0))
        begin = tl.maximum(first + shift - ctx.args.left, 0) // COLS
    blocks = tk.ceil_div(end, COLS)
    return blocks - 1, tl.maximum(blocks - begin, 0)


@triton.jit
def edge_of(ctx, first, shift, keys, last):
    """How many of the blocks, from the `last` one down, hold keys that a query from `first` on does not see under the causal mask."""
    seen = tl.maximum(tl.minimum(keys, first + shift + 1), 0)
    return last + 1 - seen // ctx.config.cols


@triton.jit
def hidden(ctx, s):
    """The scores of this iteration's block, −∞ where a query does not see a key."""
    row = (ctx.row * ctx.config.consumers + ctx.consumer) * ctx.config.rows + ctx.shift
    col = (ctx.last - ctx.iter) * ctx.config.cols
    if ctx.config.window:
        s = tk.sliding_window(s, ctx.args.left, ctx.args.right, row=row, col=col)
    if ctx.config.causal:  # sees no key behind the last: the last query sees that
        return tk.make_causal(s, row=row, col=col)
    else:
        return tk.right_fill(s, ctx.keys - col, float("-inf"))
