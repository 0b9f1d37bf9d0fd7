"""What one kind of calls of `attention_varlen` does: the list of tiles, the choice of a kernel, its launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._tensors import addressable, allocator, remember, signature, storable, storable_home
from tritonkittens.kernels.attention import tmem_plan
from tritonkittens.kernels.attention.call_plan import Scores, fill_empty
from tritonkittens.kernels.attention.config import Config, Shape, choose
from tritonkittens.kernels.attention.device.backward import ROWS
from tritonkittens.kernels.attention.device.varlen import ENTRIES, FIELDS, VarlenForward, list_tiles
from tritonkittens.launch import multiprocessor_count

Operands: TypeAlias = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None
]  # q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse


def tiles_apart(total: int, sequences: int, height: int) -> int:
    """Upper bound of the tiles of `height` rows, where each sequence, and the rest of the rows, begins a new tile."""
    return total // height + sequences + 1


def most_tiles(total: int, sequences: int, height: int) -> int:
    """`tiles_apart`, rounded up to whole programs of `list_tiles`."""
    parts = -(-tiles_apart(total, sequences, height) // ENTRIES.value)
    return parts * ENTRIES.value


class Listing:
    """Launches `list_tiles` for sequences like these: tiles of `height` queries, or of keys where `of_keys`.

    `block`: queries of a block of LSE_log2 and dPsum. Called with (cu_seqlens_q, cu_seqlens_k), it returns the list.
    """

    def __init__(
        self,
        query_starts: Tensor,
        key_starts: Tensor,
        queries: int,
        keys: int,
        of_keys: bool,
        height: int,
        block: int = ROWS,
    ):
        sequences = query_starts.shape[0] - 1
        rows = most_tiles(keys if of_keys else queries, sequences, height)
        self.new_entries = allocator((rows, FIELDS.value), torch.int32, query_starts.device)
        self.launch = list_tiles.bind(
            (rows // ENTRIES.value,),
            query_starts.contiguous(),
            key_starts.contiguous(),
            self.new_entries(),
            sequences,
            queries,
            keys,
            of_keys,
            height,
            block,
        )

    def __call__(self, query_starts: Tensor, key_starts: Tensor) -> Tensor:
        entries = self.new_entries()
        self.launch(query_starts.contiguous(), key_starts.contiguous(), entries)
        return entries


def longest_sequences(q: Tensor, k: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None) -> tuple[int, int]:
    """Upper bounds of the queries and the keys of a sequence."""
    return q.shape[0] if max_seqlen_q is None else max_seqlen_q, k.shape[0] if max_seqlen_k is None else max_seqlen_k


@functools.lru_cache
def forward_varlen(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    causal: bool,
    window: bool,
    softcap: bool,
    shifted: bool,
    lse: bool,
    config: Config,
) -> VarlenForward:
    """The forward kernel for a dtype, dimensions and features."""
    knobs = {name: knob for name, knob in config.knobs(causal).items() if name not in ("order", "schedule")}
    return VarlenForward(
        dtype=tk.from_torch(dtype),
        head_dim=head_dim,
        value_dim=value_dim,
        causal=causal,
        window=window,
        softcap=softcap,
        shifted=shifted,
        lse=lse,
        **knobs,
    )


def compute_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of checked operands, in new memory."""
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    run_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, longest_sequences(q, k, max_seqlen_q, max_seqlen_k), scores
    )
    return out, lse


def run_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    out: Tensor,
    lse: Tensor | None,
    longest: tuple[int, int],
    scores: Scores,
) -> None:
    """Write the output and, where given, the log-sum-exp of checked operands. `longest`: see `longest_sequences`."""
    # Queries and keys of the same sequences: every diagonal begins at a tile's corner. Only the device knows other
    # lengths
    same = (
        q.shape[0] == k.shape[0]
        and starts_q.data_ptr() == starts_k.data_ptr()
        and starts_q.stride() == starts_k.stride()
    )
    operands = (q, k, v, starts_q, starts_k, out, lse)
    key = (signature(*operands[:6]), same, lse is None, longest, scores)
    run = _plans.get(key)
    if run is None:
        run = remember(_plans, key, _plan(operands, longest, scores, same))
    run(*operands)


_plans: dict[tuple[Any, ...], Callable[..., None]] = {}


def _plan(operands: Operands, longest: tuple[int, int], scores: Scores, same: bool) -> Callable[..., None]:
    """The function that calls with operands like these run. `same`: queries and keys have the same sequences."""
    q, k, v, starts_q, starts_k, out, lse = operands
    (queries, heads, dim), (keys, _, value_dim) = q.shape, v.shape
    if out.numel() == 0 or keys == 0:
        return lambda q, k, v, starts_q, starts_k, out, lse: fill_empty(out, lse)
    sequences = starts_q.shape[0] - 1
    mean, masks = queries // max(1, sequences), scores.masks(*longest)
    shape = Shape(dim, value_dim, q.element_size(), mean, longest[1], heads, *masks, varlen=True)
    in_tensor_memory = tmem_plan.takes(q, value_dim)
    if in_tensor_memory:
        height = tmem_plan.HEIGHT
    else:
        kind = (q.dtype, dim, value_dim, *shape.features, shape.causal and not same, lse is not None)
        kernel = choose(forward_varlen, kind, shape, multiprocessor_count(q.get_device()))
        height = kernel.tile_m * kernel.consumers  # type: ignore[attr-defined]
    listing = Listing(starts_q, starts_k, queries, keys, False, height)
    as_they_are = all(map(addressable, (q, k, v))) and storable(out)
    # views, which calls need not make
    q, k, v, home = (x.transpose(0, 1) for x in (*map(as_addressable, (q, k, v)), storable_home(out)))
    entries = listing(starts_q, starts_k)
    if in_tensor_memory:
        launch = tmem_plan.bind((q, k, v, home), lse, entries, scores, longest)
    else:
        example = (q, k, v, home, *(() if lse is None else (lse,)), entries)
        launch = kernel.call(*example).bind(*example, **scores.numbers(shape.window is not None))

    def run(
        q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
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
