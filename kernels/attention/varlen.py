"""`attention_varlen`: attention of sequences of different lengths, packed end to end. Checks, the launch, the operator."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._dispatch import (
    announce_write,
    call,
    check_no_tangent,
    check_tensors,
    check_written,
    has_tangent,
    have_memory,
    is_plain,
    overlaps,
    register,
    requires_grad,
    second_derivative_of,
    vmap_by_loop,
)
from tritonkittens.kernels._tensors import (
    HALF_TYPES,
    addressable,
    check_operands,
    check_tensor,
    remember,
    signature,
    storable,
    storable_home,
)
from tritonkittens.kernels.attention.call_plan import Scores, check_heads, check_window, handed_out, scores_of, see_nothing
from tritonkittens.kernels.attention.config import Config, Shape, choose
from tritonkittens.kernels.attention.device.varlen import Listing, PackedForward
from tritonkittens.kernels.attention.varlen_gradients import run_packed_backward
from tritonkittens.launch import multiprocessor_count

NAME = "attention_varlen"
MAX_ROWS = 1 << 29


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    return_lse: bool = False, deterministic: bool | None = None, out: Tensor | None = None, debug: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` of every one of B sequences, whose queries and keys lie end to end without padding, as in FlashAttention's `flash_attn_varlen_func`.

    q: (total_q, heads, D); k: (total_k, kv_heads, D), v: (total_k, kv_heads, D_v), heads a multiple of kv_heads; bf16 or fp16; D and D_v multiples of 16 up to
    256, at most 2²⁹ rows. Strides as for `attention`. cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on the same device: sequence b is the rows from element b up
    to element b + 1, none or more; its first query and its first key are those elements.

    What they hold must begin with 0, not decrease, and end with at most the number of rows. The host looks at it with `debug` only, for it has to wait for the
    device. Whatever it is, nothing outside the tensors is read or written, but results are undefined if it is wrong. Rows behind the last sequence have an
    output of zeros, −∞ as log-sum-exp, and gradients of zeros. NaN in one sequence stays there.

    - `max_seqlen_q`, `max_seqlen_k`: bounds of the lengths, where they are known: a window whose sides no sequence reaches then costs nothing, and the kernel
      is the one for sequences so short, which is faster. They are compared with the lengths with `debug` only;
    - `causal`, `window`, `scale`, `softcap` as for `attention`, in each sequence (the last query's own key is the sequence's last);
    - `deterministic` as for `attention`; `return_lse`: also the logarithm of each query's sum of exponentials, (heads, total_q) in fp32.

    Returns a tensor (total_q, heads, D_v) of q's dtype, `out` where given. Differentiable in q, k and v, also through the log-sum-exp; traced by
    torch.compile as the operator `tritonkittens::attention_varlen`. Raises ValueError or TypeError for operands that do not fit together.
    """
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    plain = is_plain(*tensors, out)
    if plain:
        check_varlen(*tensors, out)
    else:  # the operator checks what a trace cannot
        check_tensors(NAME, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        check_tensors(NAME, optional=True, out=out)
        if has_tangent(q, k, v):
            raise ValueError(f"{NAME}: it has no forward-mode derivative; use attention of each sequence")
    left, right = check_window(causal, window, NAME)
    scores = scores_of(q, scale, softcap, left, right, NAME)
    longest = _longest("max_seqlen_q", max_seqlen_q), _longest("max_seqlen_k", max_seqlen_k)
    if debug and plain:
        for of, starts, rows, most in (("q", cu_seqlens_q, q.shape[0], longest[0]), ("k", cu_seqlens_k, k.shape[0], longest[1])):
            _check_starts(of, starts.tolist(), rows, most)
    if not plain or requires_grad(q, k, v):
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        numbers = (scores.scale, softcap, left, right, deterministic)
        differentiable = VarlenFunction.apply if plain else functools.partial(call, "attention_varlen")
        return handed_out(differentiable(*tensors, *longest, *numbers), out, return_lse)
    if out is not None:
        if requires_grad(out) or overlaps(out, *tensors):
            return handed_out(_computed(*tensors, *longest, scores), out, return_lse)
        announce_write(out)
    result = out if out is not None else q.new_empty(*q.shape[:2], v.shape[2])
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device) if return_lse else None
    _run_forward(*tensors, result, lse, _lengths(q, k, longest), scores)
    return result if lse is None else (result, lse)


def check_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor | None = None) -> None:
    """Raise TypeError or ValueError, which name the argument, for tensors that do not fit together."""
    check_operands(NAME, HALF_TYPES, 3, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    (queries, heads, dim), (keys, kv_heads), value_dim = q.shape, k.shape[:2], v.shape[2]
    if k.shape[:2] != v.shape[:2] or k.shape[2] != dim:
        raise ValueError(f"{NAME}: q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}; they must be (total_q, H, D), (total_k, H_kv, D) and "
                         "(total_k, H_kv, D_v)")
    check_heads(NAME, heads, kv_heads, dim, value_dim)
    for argument, rows in (("q", queries), ("k", keys)):
        if rows > MAX_ROWS:
            raise ValueError(f"{NAME}: {argument} has {rows} rows; they must be at most 2**29")
    for argument, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(NAME, argument, starts, (torch.int32,), "q", q)
        if starts.ndim != 1 or starts.shape[0] < 1:
            raise ValueError(f"{NAME}: {argument} has shape {tuple(starts.shape)}; it must be (B + 1,), where every sequence begins and the last one ends")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(f"{NAME}: cu_seqlens_q is {tuple(cu_seqlens_q.shape)}, cu_seqlens_k {tuple(cu_seqlens_k.shape)}; they must be of as many sequences")
    if out is not None and out.shape != (queries, heads, value_dim):
        raise ValueError(f"{NAME}: out is {tuple(out.shape)}; it must be {(queries, heads, value_dim)}")
    if out is not None:
        check_written(NAME, out)


def _check_starts(of: str, starts: list[int], rows: int, longest: int | None) -> None:
    """Raise ValueError for what cannot be where sequences of so many rows begin and the last one ends, or for one longer than was said."""
    argument = f"{NAME}: cu_seqlens_{of}"
    if starts[0] != 0:
        raise ValueError(f"{argument} begins with {starts[0]}; it must begin with 0")
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end < begin:
            raise ValueError(f"{argument} decreases from {begin} to {end} at element {number + 1}; where a sequence ends is not before it begins")
        if longest is not None and end - begin > longest:
            raise ValueError(f"{argument}: sequence {number} has {end - begin} rows; max_seqlen_{of}={longest} must be no fewer")
    if starts[-1] > rows:
        raise ValueError(f"{argument} ends with {starts[-1]}; {of} has {rows} rows")


def _longest(argument: str, value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"{NAME}: {argument}={value!r}; it must be a number of rows, or None where it is not known")
    return value


def _lengths(q: Tensor, k: Tensor, longest: tuple[int | None, int | None]) -> tuple[int, int]:
    """No sequence has more queries or keys than that."""
    return q.shape[0] if longest[0] is None else longest[0], k.shape[0] if longest[1] is None else longest[1]


@functools.lru_cache
def packed_forward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, shifted: bool, lse: bool, config: Config,
) -> PackedForward:  # fmt: skip
    """The forward kernel for types, dimensions and features."""
    knobs = {name: knob for name, knob in config.knobs(causal).items() if name not in ("order", "schedule")}
    return PackedForward(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, window=window, softcap=softcap,
                         shifted=shifted, lse=lse, **knobs)


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, out: Tensor, lse: Tensor | None, longest: tuple[int, int], scores: Scores,
) -> None:  # fmt: skip
    """Write the output and, where given, the log-sum-exp of operands that were checked. What is to be done is thought out once for every kind of calls."""
    # Where queries and keys are of the same sequences their diagonals are those of whole tiles; other lengths only the device knows
    same = q.shape[0] == k.shape[0] and starts_q.data_ptr() == starts_k.data_ptr() and starts_q.stride() == starts_k.stride()
    key = (signature(q, k, v, starts_q, starts_k, out), same, lse is None, longest, scores)
    run = _known.get(key)
    if run is None:
        run = remember(_known, key, _forward(q, k, v, starts_q, starts_k, out, lse, longest, scores, same))
    run(q, k, v, starts_q, starts_k, out, lse)


_known: dict[tuple, Callable[..., None]] = {}  # what calls of a kind do


def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, out: Tensor, lse: Tensor | None, longest: tuple[int, int], scores: Scores, same: bool,
) -> Callable[..., None]:  # fmt: skip
    """What calls with such operands do."""
    (queries, heads, dim), (keys, _, value_dim) = q.shape, v.shape
    if out.numel() == 0 or keys == 0:
        return lambda q, k, v, starts_q, starts_k, out, lse: see_nothing(out, lse)
    features, sequences = scores.features(*longest), starts_q.shape[0] - 1
    kind = (q.dtype, dim, value_dim, *features, features[0] and not same, lse is not None)
    shape = Shape(dim, value_dim, q.element_size(), queries // max(1, sequences), longest[1], heads, *features, packed=True)
    kernel = choose(packed_forward, kind, shape, multiprocessor_count(q.get_device()))
    listing = Listing(starts_q, starts_k, queries, keys, False, kernel.tile_m * kernel.consumers)  # type: ignore[attr-defined]
    as_they_are = all(map(addressable, (q, k, v))) and storable(out)
    sums = () if lse is None else (lse,)
    example = (*(as_addressable(x).transpose(0, 1) for x in (q, k, v)), storable_home(out).transpose(0, 1), *sums, listing(starts_q, starts_k))
    launch = kernel.call(*example).bind(*example, **scores.numbers(features[1]))  # of views, which calls need not make

    def run(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, out: Tensor, lse: Tensor | None) -> None:
        home, entries = out, listing(starts_q, starts_k)
        if not as_they_are:
            q, k, v, home = as_addressable(q), as_addressable(k), as_addressable(v), storable_home(out)
        if lse is None:
            launch(q, k, v, home, entries)
        else:
            launch(q, k, v, home, lse, entries)
        if home is not out:
            out.copy_(home)

    return run


@torch.library.custom_op("tritonkittens::attention_varlen", mutates_args=())
def varlen_operator(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None, scale: float,
    softcap: float | None, left: int, right: int, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, log-sum-exp) of `attention_varlen`; `left` and `right` as in `Scores`; `deterministic` is for the gradients."""
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    return _computed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, Scores(scale, softcap, left, right))


def _computed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None, scores: Scores,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    _run_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, _lengths(q, k, (max_seqlen_q, max_seqlen_k)), scores)
    return out, lse


@varlen_operator.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, softcap, left, right, deterministic):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _gradients(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | None, max_seqlen_k: int | None, scale: float, softcap: float | None, left: int, right: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dQ, dK, dV) for the gradients of the output and, where given, of the log-sum-exp."""
    scores = Scores(scale, softcap, left, right)
    features = scores.features(*_lengths(q, k, (max_seqlen_q, max_seqlen_k)))
    return run_packed_backward(grad, grad_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, features, scores, deterministic)


varlen_backward_operator = torch.library.custom_op("tritonkittens::attention_varlen_backward", _gradients, mutates_args=())


@varlen_backward_operator.register_fake
def _(grad, grad_lse, q, k, v, out, lse, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, starts_q, starts_k)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple:
    check_no_tangent(NAME)
    q, k, v, out, lse, starts_q, starts_k = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    once = not torch.is_grad_enabled()  # else these gradients may be differentiated again, which the operator refuses
    run = _gradients if once and is_plain(grad, grad_lse, q, k, v) and have_memory(grad, grad_lse) else functools.partial(call, "attention_varlen_backward")
    gradients = run(grad, grad_lse, q, k, v, out, lse, starts_q, starts_k, *ctx.rest)
    return *gradients, *(None for _ in range(2 + len(ctx.rest)))


register(varlen_operator, vmap_by_loop, _backward, _save)
register(varlen_backward_operator, vmap_by_loop, second_derivative_of(NAME))


class VarlenFunction(torch.autograd.Function):
    """`attention_varlen` of operands that were checked, in eager mode; arguments as of the operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, starts_q, starts_k, longest_q, longest_k, scale, softcap, left, right, _ = inputs
        output = _computed(q, k, v, starts_q, starts_k, longest_q, longest_k, Scores(scale, softcap, left, right))
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)
