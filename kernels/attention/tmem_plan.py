"""The forward on chips with tensor memory: which calls it takes, and its launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

import tritonkittens.lang as tk
from tritonkittens.arch import chip_of
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._tensors import storable_home
from tritonkittens.kernels.attention.device.forward_tmem import ROWS, TILES, ForwardTmem, attention_forward_tmem
from tritonkittens.launch import capability, multiprocessor_count

if TYPE_CHECKING:
    from tritonkittens.kernels.attention.call_plan import Scores

STAGES = {(64, 64): 4, (128, 128): 2, (192, 128): 1}  # of the rings of K and of V that fit, by (head_dim, value_dim)
FAST_EX2 = 103  # from this capability on, exponentials take half the time: none are worth the FMA units
LAUNCH_REGISTERS = 128  # of a thread, before they move between roles: all of an SM's for 512 threads
HEIGHT = ROWS.value * TILES.value  # queries of a task


class Args(NamedTuple):
    """The numbers of a call.

    `scale`: of scores, in base 2 (times log₂ e). `tiles`: tasks of a head. `heads`: of all batches. `group`: query
    heads of a key head. `left`, `right`: sides of a window.
    """

    scale: float
    tiles: int
    heads: int
    group: int
    left: int
    right: int


def takes(q: torch.Tensor, k: torch.Tensor, value_dim: int, scores: Scores) -> bool:
    """Whether `attention_forward_tmem` computes such a call on the device of `q`."""
    softcap = scores.features(q.shape[2], k.shape[2])[2]
    return (q.shape[3], value_dim) in STAGES and not softcap and chip_of(_arch(q)).tcgen05


def _arch(q: torch.Tensor) -> int:
    major, minor = capability(q.device)
    return 10 * major + minor


@functools.lru_cache
def kernel_of(
    dtype: torch.dtype, dims: tuple[int, int], causal: bool, window: bool, lse: bool, fast_ex2: bool
) -> ForwardTmem:
    """The constants of the kernel for a dtype, (head_dim, value_dim) and features."""
    return ForwardTmem(
        dtype=tk.from_torch(dtype),
        head_dim=dims[0],
        value_dim=dims[1],
        causal=causal,
        window=window,
        lse=lse,
        stages=STAGES[dims],
        order=tk.LongestFirst() if causal else tk.ColumnMajor(),
        fma_share=0.0 if fast_ex2 else 0.25,
    )


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scores: Scores
) -> None:
    """Launch the kernel. Operands are copied where TMA needs it.

    Causal tasks differ in length, and have a CTA each: the hardware hands them out, longest first. Others share the SMs
    evenly.
    """
    causal, window, _ = scores.features(q.shape[2], k.shape[2])
    dims = q.shape[3], out.shape[3]
    constants = kernel_of(q.dtype, dims, causal, window, lse is not None, _arch(q) >= FAST_EX2)
    tiles, heads = -(-q.shape[2] // HEIGHT), q.shape[0] * q.shape[1]
    scale = scores.numbers(window=False)["scale"]
    args = Args(scale, tiles, heads, q.shape[1] // k.shape[1], scores.left, scores.right)
    grid = tiles * heads if causal or window else min(tiles * heads, multiprocessor_count(q.get_device()))
    home = storable_home(out)
    result = tk.gl(home, constants.o)
    attention_forward_tmem[(grid,)](
        tk.gl(as_addressable(q), constants.q),
        tk.gl(as_addressable(k), constants.k),
        tk.gl(as_addressable(v), constants.v),
        result,
        result if lse is None else tk.gl(lse),  # without one, the kernel does not use it
        args,
        constants,
        maxnreg=LAUNCH_REGISTERS,
    )
    if home is not out:
        out.copy_(home)
