"""What the kernels of the norms are compiled for: the parts of a call, and the tiles of programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.launch import Device

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 65536  # columns
WIDEST_FORWARD, WIDEST_BACKWARD = 32768, 16384  # columns of a whole row in a program
PIPELINED = 10240  # columns of a tile of the backward, at most, while other tiles are loaded
FEWEST_WARPS, RESIDENT_WARPS = 4, 8  # of a program; of the backward's programs on a multiprocessor
REGISTERS = 65536  # of a multiprocessor
NUMBERS, VECTOR = 32, 8  # numbers a thread of a tile of several rows; of a part
NARROW = 2048  # columns of rows that are one part
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
    """Tiles of `rows` rows and `parts` parts of `cols` columns, `chunks` of which cover a row, of programs of `warps`
    warps."""

    rows: int
    cols: int
    parts: int
    chunks: int
    warps: int

    @property
    def numbers(self) -> int:
        """Numbers that a thread has of a tile."""
        return self.rows * self.cols * self.parts // (32 * self.warps)


def _tiles(width: int, numbers: int, warps: int, most: int) -> Tiles:
    """Return tiles of whole rows, of chunks of `most` columns of wider ones: of the fewest warps that have at most
    `numbers` numbers a thread, up to `warps`. Columns beyond the edge cost time, so a tile of one row has parts of 8
    columns a thread."""
    if width <= NARROW:
        cols = max(power_of_two(width), NARROWEST)
        return Tiles(FEWEST_WARPS * 32 * NUMBERS // cols, cols, 1, 1, FEWEST_WARPS)
    used = FEWEST_WARPS
    while used < warps and used * 32 * numbers < min(width, most):
        used *= 2
    cols = used * 32 * VECTOR
    parts = min(-(-width // cols), most // cols)
    return Tiles(1, cols, parts, -(-width // (cols * parts)), used)


def forward_tiles(width: int) -> Tiles:
    """Return the tiles of the forward. Chunks are of half of the widest whole row, so that fewer columns of the last
    one are beyond the edge."""
    return _tiles(width, 40, 32, WIDEST_FORWARD if width <= WIDEST_FORWARD else WIDEST_FORWARD // 2)


def forward_registers(tiles: Tiles) -> int:
    """Return the registers of a thread of the forward without dropout: as many programs as fit a multiprocessor hide
    the latency of memory."""
    return 64 if tiles.numbers <= NUMBERS else 80


def backward_tiles(width: int) -> Tiles:
    """Return the tiles of the backward. A tile of 16 warps has 128 registers a thread, in which parts would spill."""
    if PIPELINED < width <= WIDEST_BACKWARD:
        return Tiles(1, WIDEST_BACKWARD, 1, 1, 16)
    return _tiles(width, 40, RESIDENT_WARPS, PIPELINED if width <= PIPELINED else WIDEST_BACKWARD // 2)


def backward_registers(tiles: Tiles) -> int:
    """Return the registers of a thread of the backward: all that there are."""
    return min(255, REGISTERS // (32 * max(RESIDENT_WARPS, tiles.warps)))


def stages_of(tiles: Tiles, element_bytes: int, weight_bytes: int, facts: Device) -> int:
    """Return the stages of the backward's loop: with S of them, S - 1 tiles of all operands are in shared memory.

    `element_bytes`: of an element in all operands of rows; `weight_bytes`: of a column's weights, which a tile of parts
    loads with its rows. Wide tiles have one stage: addresses of loads in flight would spill.
    """
    share = facts.shared_memory_per_multiprocessor * tiles.warps // RESIDENT_WARPS
    columns, column_bytes = tiles.cols * tiles.parts, tiles.rows * element_bytes + (tiles.parts > 1) * weight_bytes
    slots = (min(facts.shared_memory_per_block, share) - RESERVED) // (columns * column_bytes)
    return 1 if columns > PIPELINED else min(slots, 2) + 1


def programs_of(tiles: Tiles, rows: int, multiprocessors: int) -> int:
    """Return the number of persistent programs of the backward: those that a multiprocessor runs at once, or fewer for
    few rows."""
    return min(-(-rows // tiles.rows), multiprocessors * max(1, RESIDENT_WARPS // tiles.warps))
