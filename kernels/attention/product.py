"""`attention` for PyTorch tensors: checks, the choice of a kernel, the launch."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import (
    HALF_TYPES,
    addressable,
    as_addressable,
    check_operands,
    is_eager,
    padded_empty,
    power_of_two,
    remember,
    signature,
    storable,
    storable_home,
)
from tritonkittens.kernels.attention.backward import ROWS, STEP, AttentionBackwardKeys, AttentionBackwardQueries, statistics
from tritonkittens.kernels.attention.config import (
    Config,
    Shape,
    choose,
    choose_backward,
    choose_fused,
    deal,
    parts_of_group,
    units_ahead,
    worth_following,
    worth_sums,
)
from tritonkittens.kernels.attention.forward import AttentionForward
from tritonkittens.kernels.attention.fused_backward import gather_sums
from tritonkittens.kernels.attention.gathering_backward import GatheringBackward
from tritonkittens.kernels.attention.reference import LIMIT, sides
from tritonkittens.kernels.attention.zeroing_backward import ZeroingBackward
from tritonkittens.launch import l2_bytes, multiprocessor_count, simulated_facts

HEAD_DIMS = range(16, 257, 16)
TILE = 128  # queries, or keys
SMALLEST_SCALE = 2.0**-64  # of scores: what is added to them is divided by it


@dataclass(frozen=True)
class Scores:
    """What becomes of scores before the softmax: their factor, the soft-cap, how many keys to each side a query sees (`LIMIT`: any number)."""

    scale: float
    softcap: float | None
    left: int
    right: int

    def features(self, queries: int, keys: int) -> tuple[bool, bool, bool]:
        """(causal, window, soft-cap) as constants of a kernel for these lengths."""
        open_left, open_right = (side >= queries + keys for side in (self.left, self.right))
        causal = open_left and self.right == 0
        return causal, not (causal or (open_left and open_right)), self.softcap is not None

    def shifted(self, queries: int, keys: int) -> bool:
        """Under a causal mask, may a tile of queries see keys of more blocks in part than one?"""
        return (keys - queries) % TILE != 0

    def numbers(self, window: bool) -> dict[str, Any]:
        """The run-time numbers of a kernel."""
        factor = math.log2(math.e)
        numbers: dict[str, Any] = {"scale": factor * (self.scale if self.softcap is None else self.softcap)}
        if window:
            numbers |= {"left": self.left, "right": self.right}
        if self.softcap is not None:
            numbers["squash"] = 2 * factor * self.scale / self.softcap
        return numbers


def summand_factor(numbers: dict[str, Any]) -> float:
    """What log-sum-exps are multiplied by to be added to scores, for a kernel with these numbers; 0 where too little of those would be left."""
    return 1 / numbers["scale"] if numbers["scale"] >= SMALLEST_SCALE else 0.0


@functools.lru_cache
def forward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, shifted: bool, lse: bool, config: Config,
) -> AttentionForward:  # fmt: skip
    """The forward kernel for types, dimensions and features."""
    return AttentionForward(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, window=window, softcap=softcap,
                            shifted=shifted, lse=lse, **config.knobs(causal))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, return_lse: bool = False, deterministic: bool | None = None, out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(Q Kᵀ · scale) V for every batch and head.

    q: (batch, heads, queries, D); k: (batch, kv_heads, keys, D), v: (batch, kv_heads, keys, D_v), heads a multiple of kv_heads; bf16 or fp16; D and D_v
    multiples of 16 up to 256. Any strides whose last is 1 run without a copy if they are multiples of 16 bytes (so also permuted (batch, sequence, heads, D)
    tensors and parts of packed ones).

    - `causal`: a query sees the keys up to its own, the last query's being the last (the bottom right corner is aligned);
    - `window` (left, right): it sees so many keys before and behind its own; None for any number. With `causal` none behind;
    - `scale`, positive, 1/√D by default; `softcap`: scores become softcap · tanh(score / softcap);
    - `deterministic`: gradients have the same bits in every run, which takes 7 products instead of 5 (as few keys do anyway, see `config.worth_sums`); where
      not given, as torch says (`torch.use_deterministic_algorithms`);
    - `return_lse`: also the logarithm of each query's sum of exponentials, (batch, heads, queries) in fp32.

    Returns a tensor (batch, heads, queries, D_v) of q's dtype, `out` where given. A query that sees no key gets zeros, and −∞ as log-sum-exp.
    Differentiable in q, k and v, also through the log-sum-exp; traced by torch.compile as the operator `tritonkittens::attention`. Raises ValueError or
    TypeError for operands that do not fit together.
    """
    traced = torch.compiler.is_compiling()
    known = Known() if traced else known_call(q, k, v, out, causal, window, scale, softcap)
    if known.scores is None:
        if not traced:  # the operator checks what a trace cannot
            check(q, k, v, out)
        known.scores = scores_of(q, scale, softcap, *check_window(causal, window))
    scores = known.scores
    if traced or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        differentiable = functools.partial(autograd_function().apply, known) if is_eager(q, k, v) else torch.ops.tritonkittens.attention
        result, lse = differentiable(q, k, v, scores.scale, softcap, scores.left, scores.right, deterministic)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    result = out if out is not None else empty_like(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    run_forward(q, k, v, result, lse, scores, config, known if config is None else None)
    return result if lse is None else (result, lse)


class Known:
    """What is known of a call: its `scores`, once it was checked, and the `launches` (with log-sum-exp or not) where no operand needs a copy."""

    def __init__(self) -> None:
        self.scores: Scores | None = None
        self.launches: dict[bool, Callable[..., None]] = {}


_known: dict[tuple, Known] = {}


def known_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, causal: bool, window: Any, scale: float | None, softcap: float | None,
) -> Known:  # fmt: skip
    """What is known of calls with such operands and arguments: nothing where they cannot be told from others."""
    try:
        tensors = signature(q, k, v) if out is None else signature(q, k, v, out)
        types = (causal.__class__, *map(type, window or ()), scale.__class__, softcap.__class__)  # True is not 1
        key = (tensors, causal, window, scale, softcap, types, None if q.is_cuda else simulated_facts())
        found = _known.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, or fake ones; window is a list
        return Known()
    return remember(_known, key, Known()) if found is None else found


@functools.cache
def autograd_function() -> type[torch.autograd.Function]:
    from tritonkittens.kernels.attention.operator import AttentionFunction  # which is made of this module

    return AttentionFunction


def empty_like(x: torch.Tensor, width: int) -> torch.Tensor:
    """An uninitialised (…, width) tensor that TMA can write, its dimensions in the order of x's where it is as wide: the result for (B, S, H, D) operands, seen
    as (B, H, S, D), then goes on as (B, S, H · D) without a copy."""
    return torch.empty_like(x) if x.shape[-1] == width and x.stride(-1) == 1 else x.new_empty(*x.shape[:-1], width)


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scores: Scores, config: Config | None = None,
    known: Known | None = None,
) -> None:  # fmt: skip
    """Write the output and, where given, the log-sum-exp of operands that were checked; `known` is of a call without `config`."""
    if known is not None and (launch := known.launches.get(lse is not None)):
        return launch(q, k, v, out, *(() if lse is None else (lse,)))
    if out.numel() == 0 or k.shape[2] == 0:
        return see_nothing(out, lse)
    launch_forward(forward, q.dtype, q, k, as_addressable(v), out, lse, (), scores, config)
    if known is not None and addressable(q) and addressable(k) and addressable(v) and storable(out):
        kernel, numbers = kernel_of(forward, q.dtype, q, k, out.shape[3], lse is not None, scores)
        known.launches[lse is not None] = functools.partial(kernel, **numbers)


def kernel_of(
    make: Callable[..., tk.lcf], dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, value_dim: int, lse: bool, scores: Scores, config: Config | None = None,
) -> tuple[tk.lcf, dict[str, Any]]:  # fmt: skip
    """The forward kernel of `config`, or the one that suits the shapes, and the numbers it takes. `make` makes it, of `dtype`, dimensions and features."""
    shape = shape_of(q, k, value_dim, scores)
    features = (shape.causal, shape.window, shape.softcap)
    kind = (dtype, shape.head_dim, value_dim, *features, shape.causal and scores.shifted(shape.queries, shape.keys), lse)
    if config is not None:
        return make(*kind, config), scores.numbers(shape.window)
    return choose(make, kind, shape, multiprocessor_count(q.get_device())), scores.numbers(shape.window)


def shape_of(q: torch.Tensor, k: torch.Tensor, value_dim: int, scores: Scores) -> Shape:
    """What a forward of these operands computes."""
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    return Shape(dim, value_dim, q.element_size(), queries, keys, batch * heads, *scores.features(queries, keys))


def launch_forward(
    make: Callable[..., tk.lcf], dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, values: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, others: tuple[torch.Tensor, ...], scores: Scores, config: Config | None,
) -> None:  # fmt: skip
    """Run the forward kernel (see `kernel_of`) on q, k, `values` as the kernel wants them, and what `others` it takes."""
    kernel, numbers = kernel_of(make, dtype, q, k, out.shape[3], lse is not None, scores, config)
    home = storable_home(out)
    kernel(as_addressable(q), as_addressable(k), values, home, *(() if lse is None else (lse,)), *others, **numbers)
    if home is not out:
        out.copy_(home)


def see_nothing(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write the results of queries that see no key."""
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)


@functools.lru_cache
def backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool,
) -> tuple[tk.lcf, tuple[tk.lcf, ...]]:  # fmt: skip
    """The kernels of the deterministic backward for types, dimensions and features: (that of dQ, those of dK and dV)."""
    knobs: dict[str, Any] = dict(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, window=window, softcap=softcap,
                                 **deal(causal))
    return choose_backward(
        lambda consumers: AttentionBackwardQueries(consumers=consumers, **knobs),
        lambda consumers, of_keys, of_values: AttentionBackwardKeys(consumers=consumers, of_keys=of_keys, of_values=of_values, **knobs),
        head_dim, value_dim)  # fmt: skip


@functools.lru_cache
def fused_backward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, cut: bool, parts: int = 1,
    gathers: bool = False, more: tuple[tuple[str, Any], ...] = (),
) -> ZeroingBackward | None:  # fmt: skip
    """The kernel of the backward in a single pass for types, dimensions and features, where there is one; `cut`: may the last keys be no full tile?
    `parts`: of a group's query heads; `gathers`: shall it make dQ of its sums? `more`: knobs that are not as they are by default."""
    kernel = GatheringBackward if gathers else ZeroingBackward
    knobs: dict[str, Any] = dict(dtype=tk.from_torch(dtype), causal=causal, window=window, softcap=softcap, cut=cut, parts=parts,
                                 order=deal(causal)["order"], **dict(more))
    return cast("ZeroingBackward | None",
                choose_fused(lambda dim, cols, summed: kernel(head_dim=dim, value_dim=dim, cols=cols, summed=summed, **knobs), head_dim, value_dim))


def run_backward(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scores: Scores,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dQ, dK, dV) of what `run_forward` wrote, for gradients of the output and, where given, of the log-sum-exp. Where not `deterministic`, dQ, and dK and dV
    of groups, may be summed up in an order that changes from run to run."""
    (batch, heads, queries, dim), (kv_heads, keys, value_dim) = q.shape, v.shape[1:]
    gradients = dq, dk, dv = tuple(empty_like(x, x.shape[3]) for x in (q, k, v))
    if out.numel() == 0 or keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    features = scores.features(queries, keys)
    numbers = {**scores.numbers(features[1]), "gradient": scores.scale}
    tensors = dict(Q=as_addressable(q), K=as_addressable(k), V=as_addressable(v), dO=as_addressable(grad), dQ=dq)
    kind = (q.dtype, dim, value_dim, *features)
    single = (*kind, keys % (ZeroingBackward.rows * ZeroingBackward.consumers) != 0)
    factor = 0.0 if deterministic or not worth_sums(dim, keys, features[0]) else summand_factor(numbers)
    fused = fused_backward(*single) if factor else None
    if fused is not None:
        _single_pass(fused, single, tensors, gradients, functools.partial(_statistics, out, tensors["dO"], lse, grad_lse, factor=factor), numbers)
        return gradients
    group = 1 if deterministic else heads // kv_heads  # sums of parts depend on how many there are: bits would change with the batch
    homes = homes_of(dk, dv, group, -(-keys // TILE) * batch * kv_heads)
    tensors |= homes | _statistics(out, tensors["dO"], lse, grad_lse)
    of_queries, of_keys = backward(*kind)
    for kernel in (of_queries, *of_keys):
        kernel(*(tensors[name] for name in kernel.tensors), **numbers)
    sum_groups(homes, dk, dv)
    return gradients


def _single_pass(
    fused: ZeroingBackward, kind: tuple[Any, ...], tensors: dict[str, torch.Tensor], gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    statistics_with: Callable[..., dict[str, torch.Tensor]], numbers: dict[str, Any],
) -> None:  # fmt: skip
    """Write the gradients by `fused`, the kernel of this `kind` (see `fused_backward`), or one like it, and those before and behind it, from operands that TMA
    can address."""
    (dq, dk, dv), q = gradients, tensors["Q"]
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, dk.shape[1:3]
    device, summed = q.get_device(), fused.summed
    tiles, blocks, group = -(-keys // (fused.rows * fused.consumers)), -(-queries // fused.cols), heads // kv_heads
    parts = _parts(device, group, tk.pairs(tiles, batch * kv_heads), True, group * bytes_at_once(fused, q, tiles)) if fused.causal else (
        _parts(device, group, tiles * batch * kv_heads))
    units, lag, heads_of_unit = batch * kv_heads * parts, units_ahead(tiles, multiprocessor_count(device), fused.causal), group // parts
    gathers = units > lag and worth_following(keys, fused.causal or fused.window)
    if parts > 1 or gathers:
        fused = cast(ZeroingBackward, fused_backward(*kind, parts, gathers))
    sums = torch.empty(batch, heads, blocks, fused.block_numbers, dtype=torch.float32, device=q.device)
    counts = torch.empty(2, units, dtype=torch.int32, device=q.device)
    of_keys = (dk, dv)
    if parts > 1:
        of_keys = torch.zeros(2, batch, kv_heads, fused.consumers * tiles, fused.rows * summed, dtype=torch.float32, device=q.device).unbind()
    tensors = tensors | dict(sums=sums, counts=counts, dK=of_keys[0], dV=of_keys[1])
    tensors |= statistics_with(addends=addends_in(dq), zeros=(sums, counts), width=summed, zeroed=lag * heads_of_unit)
    fused(*(tensors[name] for name in fused.tensors), **numbers, lag=lag)
    left, scale = (lag if gathers else units) * heads_of_unit, numbers["gradient"]
    across = -(-summed // 64)
    gather_sums[across * blocks * fused.cols // ROWS, left](sums, dq, *dq.stride()[:3], scale, queries, heads, batch * heads, summed, dim)
    if parts > 1:
        for home, x, times in ((dk, of_keys[0], scale), (dv, of_keys[1], 1.0)):
            gather_sums[across * x.shape[2], batch * kv_heads](x, home, *home.stride()[:3], times, keys, kv_heads, batch * kv_heads, summed, dim)


def addends_in(dq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where offsets and deltas, (…, STEP) bf16, of the single pass wait: in the memory of a head's dQ, which is written when all that needs them is done. They
    lie one after the other if dQ's rows do, else each in its row of dQ."""
    x, step = dq.view(torch.bfloat16), STEP.value
    if x.stride(-2) != x.shape[-1]:
        return x[..., :step], x[..., step : 2 * step]
    shape, strides, begin = (*x.shape[:-1], step), (*x.stride()[:-2], step, 1), x.storage_offset()
    return x.as_strided(shape, strides, begin), x.as_strided(shape, strides, begin + x.shape[-2] * step)


def _statistics(
    out: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor, grad_lse: torch.Tensor | None, addends: tuple[torch.Tensor, torch.Tensor] | None = None,
    zeros: tuple[torch.Tensor, torch.Tensor] | None = None, factor: float = 0.0, width: int = 0, zeroed: int = 0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """offsets and deltas, see `statistics`: what two passes load, or, in `addends`, what the single pass adds to scores, divided by their factor, which also
    needs `zeros` (sums of dQ, of `width` columns, those of the first `zeroed` heads; counts)."""
    batch, heads, queries, dim = out.shape
    offsets, deltas = addends or (padded_empty((batch, heads, queries), out, torch.float32) for _ in range(2))
    sums, counts = zeros or (offsets, offsets)
    numbers_of_head, units = (sums.stride(1), counts.shape[1]) if zeros else (0, 0)
    statistics[-(-queries // ROWS), heads, batch](
        out, grad, lse, lse if grad_lse is None else grad_lse.contiguous(), offsets, deltas, sums, counts, *out.stride()[:3], *grad.stride()[:3],
        *lse.stride()[:2], *offsets.stride()[:3], queries, numbers_of_head, zeroed, units, factor, dim, power_of_two(dim), grad_lse is not None,
        ROWS * width)  # fmt: skip
    return dict(offsets=offsets, deltas=deltas)


def bytes_at_once(fused: ZeroingBackward, q: torch.Tensor, tiles: int) -> int:
    """Of Q and dO, and of dQ in fp32, of the query heads that all blocks of a causal backward are at, if each key head, of so many tiles, had one."""
    heads = max(1.0, multiprocessor_count(q.get_device()) / tiles)
    return int(heads * q.shape[2] * fused.head_dim * 2 * (q.element_size() + 2))


def _parts(device: int, group: int, units: int, drawn: bool = False, at_once: int = 0) -> int:
    """In how many parts groups of so many query heads (1: they stay whole) are dealt out, where whole groups are `units` of work and bytes `at_once`: see
    `parts_of_group`."""
    return parts_of_group(units, group, multiprocessor_count(device), drawn, at_once / l2_bytes(device)) if group > 1 else 1


def homes_of(dk: torch.Tensor, dv: torch.Tensor, group: int, units: int) -> dict[str, torch.Tensor]:
    """Where kernels leave dK and dV, whose second dimension are heads: there, or in tensors of their own for parts of each group, which `sum_groups` sums up.
    Groups of so many query heads, `units` of work for whole groups: see `_parts`."""
    parts = _parts(dk.get_device(), group, units)
    if parts == 1:
        return dict(dK=dk, dV=dv)
    return {name: x.new_empty(x.shape[0], x.shape[1] * parts, *x.shape[2:]) for name, x in (("dK", dk), ("dV", dv))}


def sum_groups(homes: dict[str, torch.Tensor], dk: torch.Tensor, dv: torch.Tensor) -> None:
    """dK and dV of what kernels left in `homes_of` them."""
    for home, x in ((homes["dK"], dk), (homes["dV"], dv)):
        if home is not x:
            torch.sum(home.unflatten(1, (x.shape[1], -1)), 2, out=x)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None, paged: bool = False) -> None:
    """Raise TypeError or ValueError, which name the argument, for tensors that do not fit together; k and v are pools of pages where `paged`."""
    check_operands("attention", HALF_TYPES, 4, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    check_shapes(q, k, v, out, paged)


def check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None, paged: bool = False, head_dims: range = HEAD_DIMS,
) -> None:  # fmt: skip
    """The same for their shapes alone."""
    (batch, heads, queries, dim), (kv_heads, value_dim) = q.shape, (k.shape[1], v.shape[3])
    if k.shape[:3] != v.shape[:3] or (k.shape[0] != batch and not paged) or k.shape[3] != dim:
        first, second = ("pages", "page_size") if paged else ("B", "S_kv")
        raise ValueError(f"attention: q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}; "
                         f"they must be (B, H, S, D), ({first}, H_kv, {second}, D) and ({first}, H_kv, {second}, D_v)")
    check_heads("attention", heads, kv_heads, dim, value_dim, head_dims)
    if out is not None and out.shape != (batch, heads, queries, value_dim):
        raise ValueError(f"attention: out is {tuple(out.shape)}; it must be {(batch, heads, queries, value_dim)}")


def check_heads(name: str, heads: int, kv_heads: int, dim: int, value_dim: int, head_dims: range = HEAD_DIMS) -> None:
    """Raise ValueError, by the `name` of the function that was called, for heads that do not divide and for dimensions that kernels do not have."""
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads and {kv_heads} key heads; the first must be a multiple of the second")
    for of, extent in (("", dim), (" of v", value_dim)):
        if extent not in head_dims:
            raise ValueError(f"{name}: head dimension{of} {extent}; it must be a multiple of {head_dims.step} up to 256")


def scores_of(q: torch.Tensor, scale: float | None, softcap: float | None, left: int, right: int, name: str = "attention") -> Scores:
    """Raises ValueError, by the `name` of the function that was called."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"{name}: scale={scale}; it must be positive")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap={softcap}; it must be positive")
    return Scores(scale, softcap, left, right)


def check_window(causal: bool, window: tuple[int | None, int | None] | None, name: str = "attention") -> tuple[int, int]:
    """(left, right) as in `Scores`. Raises TypeError or ValueError, by the `name` of the function that was called."""
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal={causal!r}; it must be True or False")
    sides_are_numbers = window is None or (
        isinstance(window, (tuple, list)) and len(window) == 2 and all(x is None or isinstance(x, int) and 0 <= x <= LIMIT for x in window))
    if not sides_are_numbers:
        raise ValueError(f"{name}: window={window!r}; it must be (left, right), numbers of keys from 0 on, or None for any number")
    return sides(causal, window)
