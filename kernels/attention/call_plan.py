"""How a call of `attention` runs: its checks, the choice of a kernel, and what later calls of its kind need not find out again."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._dispatch import (
    check_written,
    write,
)
from tritonkittens.kernels._tensors import (
    HALF_TYPES,
    addressable,
    allocator,
    allocator_like,
    check_operands,
    remember,
    signature,
    storable,
    storable_home,
)
from tritonkittens.kernels.attention.config import Config, Shape, choose
from tritonkittens.kernels.attention.device.forward import AttentionForward
from tritonkittens.kernels.attention.reference import LIMIT, sides
from tritonkittens.launch import multiprocessor_count

HEAD_DIMS = range(16, 257, 16)
TILE = 128  # queries, or keys


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


@functools.lru_cache
def forward(
    dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, shifted: bool, lse: bool, config: Config,
) -> AttentionForward:  # fmt: skip
    """The forward kernel for types, dimensions and features."""
    return AttentionForward(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, window=window, softcap=softcap,
                            shifted=shifted, lse=lse, **config.knobs(causal))


def handed_out(
    found: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor | None, return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What a call returns whose (output, log-sum-exp) are `found` in new memory: the first in `out` where given, the second if asked for."""
    result = write("attention", found[0], out)
    return (result, found[1]) if return_lse else result


class CallPlan:
    """What is known of a call: its `scores`, once it was checked, how its results are allocated, the `launches` (with log-sum-exp or not) where no operand
    needs a copy, and where memory of `out` and operands ends."""

    def __init__(self, scores: Scores | None = None) -> None:
        self.scores = scores
        self.launches: dict[bool, Callable[..., None]] = {}
        self.reaches: tuple[int, ...] = ()  # of `out`, q, k and v
        self._new_result: Callable[[], torch.Tensor] | None = None
        self._new_lse: Callable[[], torch.Tensor] | None = None

    @property
    def checked_scores(self) -> Scores:
        """The scores of a call that was checked."""
        assert self.scores is not None
        return self.scores

    def new_result(self, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._new_result is None:
            self._new_result = allocator_like(empty_like(q, v.shape[3]))
        return self._new_result()

    def new_lse(self, q: torch.Tensor) -> torch.Tensor:
        if self._new_lse is None:
            self._new_lse = allocator(q.shape[:3], torch.float32, q.device)
        return self._new_lse()


def computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, known: CallPlan, config: Config | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of operands that were checked, in new memory."""
    out, lse = known.new_result(q, v), known.new_lse(q)
    run_forward(q, k, v, out, lse, known.checked_scores, config, known if config is None else None)
    return out, lse


_known: dict[tuple[Any, ...], CallPlan] = {}


def known_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, causal: bool, window: Any, scale: float | None, softcap: float | None,
) -> CallPlan:  # fmt: skip
    """What is known of calls with such operands and arguments: nothing where they cannot be told from others."""
    try:
        tensors = signature(q, k, v) if out is None else signature(q, k, v, out)
        types = (causal.__class__, *map(type, window or ()), scale.__class__, softcap.__class__)  # True is not 1
        key = (tensors, causal, window, scale, softcap, types)
        found = _known.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, or fake ones; window is a list
        return CallPlan()
    return remember(_known, key, CallPlan()) if found is None else found


def empty_like(x: torch.Tensor, width: int) -> torch.Tensor:
    """An uninitialised (…, width) tensor that TMA can write, its dimensions in the order of x's where it is as wide: the result for (B, S, H, D) operands, seen
    as (B, H, S, D), then goes on as (B, S, H · D) without a copy."""
    return torch.empty_like(x) if x.shape[-1] == width and x.stride(-1) == 1 else x.new_empty(*x.shape[:-1], width)


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scores: Scores, config: Config | None = None,
    known: CallPlan | None = None,
) -> None:  # fmt: skip
    """Write the output and, where given, the log-sum-exp of operands that were checked; `known` is of a call without `config`."""
    if known is not None and (launch := known.launches.get(lse is not None)):
        return launch(q, k, v, out, *(() if lse is None else (lse,)))
    if out.numel() == 0 or k.shape[2] == 0:
        return see_nothing(out, lse)
    launch_forward(forward, q.dtype, q, k, as_addressable(v), out, lse, (), scores, config)
    if known is not None and addressable(q) and addressable(k) and addressable(v) and storable(out):
        kernel, numbers = kernel_of(forward, q.dtype, q, k, out.shape[3], lse is not None, scores)
        tensors = (q, k, v, out, *(() if lse is None else (lse,)))
        known.launches[lse is not None] = kernel.call(*tensors).bind(*tensors, **numbers)


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
    if out is not None:
        check_written("attention", out)


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
