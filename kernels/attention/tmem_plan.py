"""Forward and backward on chips with tensor memory: which calls their kernels take, and their launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

import tritonkittens.lang as tk
from tritonkittens.arch import chip_of
from tritonkittens.kernels.attention.device.backward_tmem import BackwardTmem, attention_backward_tmem
from tritonkittens.kernels.attention.device.forward_tmem import ROWS, STAGED, TILES, ForwardTmem, attention_forward_tmem
from tritonkittens.launch import capability, multiprocessor_count

if TYPE_CHECKING:
    from tritonkittens.kernels.attention.call_plan import Scores

# of the rings of K and of V that fit, by (head_dim, value_dim) of tiles
STAGES = {(64, 64): 4, (64, 128): 3, (128, 64): 2, (128, 128): 2, (192, 64): 1, (192, 128): 1}
BACKWARD_DIMS = ((64, 64), (128, 128), (192, 128))  # (head_dim, value_dim) of tiles of the backward
FAST_EX2 = 103  # from this capability on, exponentials take half the time: none are worth the FMA units
LAUNCH_REGISTERS = 128  # of a thread, before they move between roles: all of an SM's for 512 threads
HEIGHT = ROWS.value * TILES.value  # queries of a task


class Args(NamedTuple):
    """The numbers of a call.

    `tiles`: tasks of a head. `heads`: of all batches. `group`: query heads of a key head. `entries`: of packed
    sequences, the list of `list_tiles`. Others: see `numbers` of `QueryTiles`.
    """

    tiles: int
    heads: int
    group: int
    entries: torch.Tensor | None
    scale: float
    left: int
    right: int
    squash: float = 0.0


def takes(q: torch.Tensor, value_dim: int) -> bool:
    """Whether `attention_forward_tmem` computes such a call on the device of `q`."""
    return tile_dims(q.shape[-1], value_dim) in STAGES and chip_of(_arch(q)).tcgen05


def tile_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """(head_dim, value_dim) of tiles: whole columns of O that are staged at a time.

    TMA fills what lies past the tensors with zeros, and does not store it. The products of zeros run while the softmax
    limits the kernel.
    """
    return -(-head_dim // STAGED) * STAGED, -(-value_dim // STAGED) * STAGED


def _arch(q: torch.Tensor) -> int:
    major, minor = capability(q.device)
    return 10 * major + minor


@functools.lru_cache
def kernel_of(
    dtype: torch.dtype,
    dims: tuple[int, int],
    causal: bool,
    window: bool,
    softcap: bool,
    packed: bool,
    lse: bool,
    fast_ex2: bool,
) -> ForwardTmem:
    """The constants of the kernel for a dtype, (head_dim, value_dim) of tiles, and features."""
    return ForwardTmem(
        dtype=tk.from_torch(dtype),
        head_dim=dims[0],
        value_dim=dims[1],
        causal=causal,
        window=window,
        softcap=softcap,
        packed=packed,
        lse=lse,
        stages=STAGES[dims],
        order=tk.LongestFirst() if causal else tk.ColumnMajor(),
        fma_share=0.0 if fast_ex2 else 0.25,
    )


def bind(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    lse: torch.Tensor | None,
    entries: torch.Tensor | None,
    scores: Scores,
    longest: tuple[int, int],
) -> Callable[..., None]:
    """The launch of the kernel for tensors like these, which TMA can address.

    Args:
        tensors: q, k, v and the output, (B, H, S, …), or with `entries`, the list of packed sequences' tiles, (H,
            total, …).
        longest: queries and keys of a sequence at most.

    Returns a function of the tensors, `lse` where there is one, and `entries` where there are.

    Causal tasks differ in length, and have a CTA each: the hardware hands them out, longest first. Others share the SMs
    evenly. Tasks of packed sequences have a CTA each, too.
    """
    q, k, v, out = tensors
    causal, window, softcap = scores.features(*longest)
    packed, dims = entries is not None, tile_dims(q.shape[-1], out.shape[-1])
    constants = kernel_of(q.dtype, dims, causal, window, softcap, packed, lse is not None, _arch(q) >= FAST_EX2)
    *batch, heads, queries, _ = q.shape
    tiles = -(-queries // HEIGHT) if entries is None else len(entries)
    all_heads, group = math.prod(batch) * heads, heads // k.shape[-3]
    args = Args(tiles, all_heads, group, entries, **scores.numbers(window=True))
    grid = tiles * all_heads
    if not (causal or window or packed):
        grid = min(grid, multiprocessor_count(q.get_device()))
    return attention_forward_tmem.bind(
        (grid,),
        tk.gl(q, constants.q, ragged=packed),
        tk.gl(k, constants.k, ragged=packed),
        tk.gl(v, constants.v, ragged=packed),
        tk.gl(out, constants.o, ragged=packed),
        None if lse is None else tk.gl(lse),
        args,
        constants,
        maxnreg=LAUNCH_REGISTERS,
    )


class BackwardArgs(NamedTuple):
    """The numbers of a backward.

    `tiles`: tasks of a key head. `heads`: key heads of all batches. `group`: query heads of a key head. `entries`: of
    packed sequences, the list of `list_tiles`. `gradient`: the factor of dK. Others: see `numbers` of
    `QueryTiles`.
    """

    tiles: int
    heads: int
    group: int
    entries: torch.Tensor | None
    gradient: float
    scale: float
    left: int
    right: int


def takes_backward(q: torch.Tensor, value_dim: int, scores: Scores) -> bool:
    """Whether `attention_backward_tmem` computes such a backward on the device of `q`."""
    return bool(backward_dims(q.shape[-1], value_dim)) and scores.softcap is None and chip_of(_arch(q)).tcgen05


def backward_dims(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """(head_dim, value_dim) of tiles of the backward, see `tile_dims`; None where there are none that wide."""
    return next((dims for dims in BACKWARD_DIMS if head_dim <= dims[0] and value_dim <= dims[1]), None)


@functools.lru_cache
def backward_kernel_of(
    dtype: torch.dtype, dims: tuple[int, int], causal: bool, window: bool, cut: bool, packed: bool, fast_ex2: bool
) -> BackwardTmem:
    """The constants of the backward kernel for a dtype, (head_dim, value_dim) of tiles, and features."""
    return BackwardTmem(
        dtype=tk.from_torch(dtype),
        head_dim=dims[0],
        value_dim=dims[1],
        causal=causal,
        window=window,
        cut=cut,
        packed=packed,
        order=tk.LongestFirst() if causal else tk.ColumnMajor(),
        fma_share=0.0 if fast_ex2 else 0.25,
    )


# the tensors of the backward kernel, by their names in a `BackwardPlan`, and their tiles in `BackwardTmem`
BACKWARD_TENSORS = dict(Q="q", dO="do", K="k", V="v", LSE_log2="lse", dPsum="group", dQ_accum="dq", dK="k", dV="v")


def bind_backward(
    tensors: dict[str, torch.Tensor], scores: Scores, longest: tuple[int, int] | None = None
) -> Callable[..., None]:
    """The launch of the backward kernel for tensors like these, as a function of those named `BACKWARD_TENSORS`, and
    of `entries` where sequences are packed. Then Q, K, V and gradients are (H, total, …), and `longest` are queries and
    keys of a sequence at most.

    Every task has a CTA. Causal tasks differ in length: longest first.
    """
    q, k, v = (tensors[name] for name in "QKV")
    packed = longest is not None
    causal, window, _ = scores.features(*(longest or (q.shape[2], k.shape[2])))
    dims, height = backward_dims(q.shape[-1], v.shape[-1]), BackwardTmem.tile_m
    assert dims is not None, "see `takes_backward`"
    keys, kv_heads = k.shape[-2], k.shape[-3]
    constants = backward_kernel_of(
        q.dtype, dims, causal, window, packed or keys % height != 0, packed, _arch(q) >= FAST_EX2
    )
    entries = tensors["entries"] if packed else None
    tiles, heads = -(-keys // height) if entries is None else len(entries), k.shape[:-2].numel()
    args = BackwardArgs(tiles, heads, q.shape[-3] // kv_heads, entries, scores.scale, **scores.numbers(window=True))
    return attention_backward_tmem.bind(
        (tiles * heads,),
        *(
            tk.gl(tensors[name], getattr(constants, tile), ragged=packed and name not in ("LSE_log2", "dPsum"))
            for name, tile in BACKWARD_TENSORS.items()
        ),
        args,
        constants,
        maxnreg=LAUNCH_REGISTERS,
    )
