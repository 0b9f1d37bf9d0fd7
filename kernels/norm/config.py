"""What the kernels of the norms are compiled for: the parts of a call, and the tiles of programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.launch import Device

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 65536  # columns
FORWARD_REGISTERS = 64  # of a thread, so that 32 warps fit a multiprocessor; dropout takes more
RESIDENT_WARPS, REGISTERS = 16, 128  # of a multiprocessor in the backward, and of a thread, so that they fit
MOST_PIPELINED = 8192  # columns of a tile
RESERVED = 4096  # bytes of shared memory for sums and statistics of rows
NARROWEST = 16  # columns of a tile


@dataclass(frozen=True)
class Parts:
    """Which operands and results a call has, a constant of the kernels.

    `centre`: what is added to weights. `z`: z is stored, since it is not x. Of a backward: `residual` and `x1` say that
    their gradients are stored apart from that of x, `dz` that z has a gradient as a result, `grads` which of weight,
    bias, weight1 and bias1 want gradients.
    """

    rms: bool
    centre: float
    weight: bool
    bias: bool
    weight1: bool
    bias1: bool
    rowscale: bool
    x1: bool
    dropout: bool
    residual: bool
    z: bool
    dz: bool = False
    grads: tuple[bool, ...] = ()


class Tiles(NamedTuple):
    """Tiles of `rows` rows and `cols` columns, `chunks` of which cover a row, of programs of `warps` warps."""

    rows: int
    cols: int
    chunks: int
    warps: int


def _tiles(width: int, warps: tuple[int, int], numbers: int, most: int) -> Tiles:
    """Return tiles of about `numbers` numbers a thread, whole rows of up to `most` columns. Chunks of wider rows are of
    half as many, so that fewer of the last one's are beyond the edge."""
    cols = max(power_of_two(width), NARROWEST)
    cols = cols if cols <= most else most // 2
    fewest, most_warps = warps
    used = min(max(cols // (32 * numbers), fewest), most_warps)
    return Tiles(max(1, used * 32 * numbers // cols), cols, -(-width // cols), used)


def forward_tiles(width: int) -> Tiles:
    """Return the tiles of the forward, 32 numbers a thread."""
    return _tiles(width, (4, 32), 32, 32768)


def backward_tiles(width: int) -> Tiles:
    """As of the forward; a thread's sums of gradients take as many registers again."""
    return _tiles(width, (8, 16), 16, 16384)


def stages_of(tiles: Tiles, element_bytes: int, facts: Device) -> int:
    """Return the stages of the backward's loop: with S of them, S - 1 tiles of all operands are in shared memory.

    `element_bytes`: of an element in all operands. Wide tiles have one stage: addresses of loads in flight would spill.
    """
    share = facts.shared_memory_per_multiprocessor * tiles.warps // RESIDENT_WARPS
    slots = (min(facts.shared_memory_per_block, share) - RESERVED) // (tiles.rows * tiles.cols * element_bytes)
    return 1 if tiles.cols > MOST_PIPELINED else min(slots, 2) + 1


def programs_of(tiles: Tiles, rows: int, multiprocessors: int) -> int:
    """Return the number of persistent programs of the backward: those that a multiprocessor runs at once, or fewer for
    few rows."""
    return min(-(-rows // tiles.rows), multiprocessors * (RESIDENT_WARPS // tiles.warps))
