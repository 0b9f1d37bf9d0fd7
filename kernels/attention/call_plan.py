"""`CallPlan`: what one kind of calls of `attention` does.

The first call chooses a kernel and binds its launch; later calls launch it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._dispatch import write
from tritonkittens.kernels._tensors import (
    addressable,
    allocator,
    allocator_like,
    remember,
    signature,
    storable,
    storable_home,
)
from tritonkittens.kernels.attention import tmem_plan
from tritonkittens.kernels.attention.config import Config, Shape, choose
from tritonkittens.kernels.attention.device.forward import AttentionForward
from tritonkittens.kernels.attention.reference import LIMIT
from tritonkittens.launch import multiprocessor_count

TILE = 128  # queries, or keys


@dataclass(frozen=True)
class Scores:
    """How scores become weights: their factor, the soft-cap (None: none), and the keys that a query sees on each side.

    `left` and `right` count keys before and after a query's own; `LIMIT` stands for any number.
    """

    scale: float
    softcap: float | None
    left: int
    right: int

    def features(self, queries: int, keys: int) -> tuple[bool, bool, bool]:
        """(causal, window, soft-cap): constants of a kernel for these lengths."""
        open_left, open_right = (side >= queries + keys for side in (self.left, self.right))
        causal = open_left and self.right == 0
        return causal, not (causal or (open_left and open_right)), self.softcap is not None

    def masks(self, queries: int, keys: int) -> tuple[bool, tuple[int, int] | None, bool]:
        """`features`, with (left, right) of the window or None: fields of a `Shape`."""
        causal, window, softcap = self.features(queries, keys)
        return causal, (self.left, self.right) if window else None, softcap

    def shifted(self, queries: int, keys: int) -> bool:
        """Whether, under a causal mask, the diagonal of a tile of queries may cross two blocks of keys."""
        return (keys - queries) % TILE != 0

    def numbers(self, window: bool) -> dict[str, Any]:
        """The run-time scalars of a kernel."""
        factor = math.log2(math.e)
        numbers: dict[str, Any] = {"scale": factor * (self.scale if self.softcap is None else self.softcap)}
        if window:
            numbers |= {"left": self.left, "right": self.right}
        if self.softcap is not None:
            numbers["squash"] = 2 * factor * self.scale / self.softcap
        return numbers


@functools.lru_cache
def forward(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    causal: bool,
    window: bool,
    softcap: bool,
    shifted: bool,
    lse: bool,
    config: Config,
) -> AttentionForward:
    """The forward kernel for a dtype, dimensions and features."""
    return AttentionForward(
        dtype=tk.from_torch(dtype),
        head_dim=head_dim,
        value_dim=value_dim,
        causal=causal,
        window=window,
        softcap=softcap,
        shifted=shifted,
        lse=lse,
        **config.knobs(causal),
    )


def write_results(
    found: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor | None, return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The results of a call whose (output, log-sum-exp) are `found` in new memory: `out` is written where given."""
    result = write("attention", found[0], out)
    return (result, found[1]) if return_lse else result


class CallPlan:
    """What one kind of calls does.

    `scores` is None until the operands were checked. `is_new` until a call wanted gradients. `launches`, by whether a
    log-sum-exp is written, are bound where no operand needs a copy. `reaches` are the bytes that `out` and the operands
    span.
    """

    def __init__(self, scores: Scores | None = None) -> None:
        self.scores, self.is_new = scores, True
        self.launches: dict[bool, Callable[..., None]] = {}
        self.reaches: tuple[int, ...] = ()  # of `out`, q, k and v
        self._new_result: Callable[[], torch.Tensor] | None = None
        self._new_lse: Callable[[], torch.Tensor] | None = None

    @property
    def checked_scores(self) -> Scores:
        """The scores of a plan whose operands were checked."""
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


def compute(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: CallPlan, config: Config | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of checked operands, in new memory."""
    out, lse = plan.new_result(q, v), plan.new_lse(q)
    run_forward(q, k, v, out, lse, plan.checked_scores, config, plan if config is None else None)
    return out, lse


_plans: dict[tuple[Any, ...], CallPlan] = {}


def find_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    causal: bool,
    window: Any,
    scale: float | None,
    softcap: float | None,
) -> CallPlan:
    """The plan of calls like this one.

    It is new, and not kept, where operands and arguments cannot be a key: fake tensors, a list as window.
    """
    try:
        types = (causal.__class__, *map(type, window or ()), scale.__class__, softcap.__class__)  # True is not 1
        key = (signature(q, k, v, out), causal, window, scale, softcap, types)
        found = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        return CallPlan()
    return remember(_plans, key, CallPlan()) if found is None else found


def empty_like(x: torch.Tensor, width: int) -> torch.Tensor:
    """An uninitialised (…, width) tensor that TMA can write.

    Its dimensions lie in the order of x's where it is as wide. So the result for (B, S, H, D) operands that are seen as
    (B, H, S, D) becomes (B, S, H · D) without a copy.
    """
    return torch.empty_like(x) if x.shape[-1] == width and x.stride(-1) == 1 else x.new_empty(*x.shape[:-1], width)


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scores: Scores,
    config: Config | None = None,
    plan: CallPlan | None = None,
) -> None:
    """Write the output and, where given, the log-sum-exp of checked operands. `plan`: None where `config` is given."""
    if plan is not None and (launch := plan.launches.get(lse is not None)):
        return launch(q, k, v, out, *(() if lse is None else (lse,)))
    if out.numel() == 0 or k.shape[2] == 0:
        return fill_empty(out, lse)
    in_tensor_memory = config is None and tmem_plan.takes(q, out.shape[3])
    q, out, lse, scores = packed_by_group(q, k, out, lse, scores)
    sums = () if lse is None else (lse,)
    as_they_are = addressable(q) and addressable(k) and addressable(v) and storable(out)
    if in_tensor_memory:
        home = storable_home(out)
        tensors = (as_addressable(q), as_addressable(k), as_addressable(v), home)
        launch = tmem_plan.bind(tensors, lse, None, scores, (q.shape[2], k.shape[2]))
        launch(*tensors, *sums)
        if home is not out:
            out.copy_(home)
    else:
        launch_forward(forward, q.dtype, q, k, as_addressable(v), out, lse, (), scores, config)
        if plan is None or not as_they_are:
            return None
        kernel, numbers = kernel_of(forward, q.dtype, q, k, out.shape[3], lse is not None, scores)
        launch = kernel.call(q, k, v, out, *sums).bind(q, k, v, out, *sums, **numbers)
    if plan is not None and as_they_are:
        plan.launches[lse is not None] = launch
    return None


def packed_by_group(
    q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Scores]:
    """(q, out, lse) as (B, kv_heads, group · queries, …) where these are views and all queries see all keys, and
    `scores` without a window then, for one that hides nothing may hide keys of the longer sequence.

    The heads of a group then follow each other in one sequence of queries, which needs fewer tiles than one sequence a
    head. Otherwise the tensors as they are. So results of different layouts differ by rounding. Source: `pack_gqa` of
    FlashAttention-3.
    """
    kv_heads, tensors = k.shape[1], (q, out) if lse is None else (q, out, lse)
    causal, window, _ = scores.features(q.shape[2], k.shape[2])
    if causal or window or q.shape[1] == kv_heads or any(x.stride(1) != x.shape[2] * x.stride(2) for x in tensors):
        return q, out, lse, scores
    views = [x.view(len(x), kv_heads, -1, *x.shape[3:]) for x in tensors]
    return views[0], views[1], None if lse is None else views[2], replace(scores, left=LIMIT, right=LIMIT)


def kernel_of(
    make: Callable[..., tk.lcf],
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    value_dim: int,
    lse: bool,
    scores: Scores,
    config: Config | None = None,
) -> tuple[tk.lcf, dict[str, Any]]:
    """(forward kernel, its scalars): of `config`, or the kernel chosen for the shapes.

    `make` makes a kernel of a dtype, dimensions, features and a `Config`.
    """
    shape = shape_of(q, k, value_dim, scores)
    kind = (
        dtype,
        shape.head_dim,
        value_dim,
        *shape.features,
        shape.causal and scores.shifted(shape.queries, shape.keys),
        lse,
    )
    numbers = scores.numbers(window=shape.window is not None)
    if config is not None:
        return make(*kind, config), numbers
    return choose(make, kind, shape, multiprocessor_count(q.get_device())), numbers


def shape_of(q: torch.Tensor, k: torch.Tensor, value_dim: int, scores: Scores) -> Shape:
    """What the choice of a configuration depends on."""
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    return Shape(dim, value_dim, q.element_size(), queries, keys, batch * heads, *scores.masks(queries, keys))


def launch_forward(
    make: Callable[..., tk.lcf],
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    others: tuple[torch.Tensor, ...],
    scores: Scores,
    config: Config | None,
) -> None:
    """Launch the kernel of `kernel_of` on q, k, `values` (V as the kernel takes it) and `others`.

    Operands are copied where TMA needs it.
    """
    kernel, numbers = kernel_of(make, dtype, q, k, out.shape[3], lse is not None, scores, config)
    home = storable_home(out)
    kernel(as_addressable(q), as_addressable(k), values, home, *(() if lse is None else (lse,)), *others, **numbers)
    if home is not out:
        out.copy_(home)


def fill_empty(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write the results of queries that see no key: zeros, and −∞ as log-sum-exp."""
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)


def scores_of(
    q: torch.Tensor, scale: float | None, softcap: float | None, left: int, right: int, name: str = "attention"
) -> Scores:
    """The `Scores` of a call. Raises ValueError, by `name`, for a scale or soft-cap that is not positive."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"{name}: scale={scale}; it must be positive")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap={softcap}; it must be positive")
    return Scores(scale, softcap, left, right)
