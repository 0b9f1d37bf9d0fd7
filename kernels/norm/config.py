"""What the kernels of the norms are compiled for: the parts of a call, and the tiles of programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritonkittens.arch import Chip
from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.lang.template.call import cluster_slots
from tritonkittens.launch import Device

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 65536  # columns
MOST_WARPS, RESIDENT_WARPS = 32, 8  # of a CTA; of the backward on a multiprocessor
REGISTERS = 65536  # of a multiprocessor
NUMBERS, MOST_NUMBERS, VECTOR = 32, 48, 8  # numbers a thread of a tile; of one of up to 8 warps, at most; of a part
BACKWARD_NUMBERS = 40  # of a tile of up to 4 warps of the backward, at most
ONE_CTA, SUMMED = 16384, 24576  # columns of rows of a CTA of the backward, and of all sums that it keeps, at most
NARROW_FORWARD, NARROW_BACKWARD = 512, 2048  # columns of rows that are one part
CHUNK = 8192  # columns of a chunk of the backward
RESERVED = 4096  # bytes of shared memory for sums and statistics of rows
NARROWEST = 16  # columns of a tile
FORWARD_WARPS, BACKWARD_WARPS = 32, 16  # of a multiprocessor that run at once, at most, where rows are few


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
    """Tiles of `rows` rows and `parts` parts of `cols` columns, `chunks` of which cover a row. A program has `ctas`
    CTAs of `warps` warps; each CTA of this cluster has a range of the columns of each part.

    A cluster has tiles of one row. Triton 3.9 splits two rows between its CTAs, and reads weights from the shared
    memory of another CTA before that has loaded them (the simulator finds it).
    """

    rows: int
    cols: int
    parts: int
    chunks: int
    warps: int
    ctas: int = 1

    @property
    def numbers(self) -> int:
        """Numbers that a thread has of a tile."""
        return self.rows * self.cols * self.parts // (32 * self.warps * self.ctas)

    @property
    def options(self) -> dict[str, int]:
        """Options with which kernels of these tiles are compiled."""
        return {"num_warps": self.warps, "num_ctas": self.ctas}


def row_tiles(width: int, warps: int, ctas: int = 1, rows: int = 1) -> Tiles:
    """Return tiles of whole rows in parts of 8 columns a thread. Columns of a part that are beyond the edge cost
    time."""
    cols = ctas * warps * 32 * VECTOR
    return Tiles(rows, cols, -(-width // cols), 1, warps, ctas)


def _narrow_tiles(width: int) -> Tiles:
    """Return tiles of several rows and 4 warps."""
    cols = max(power_of_two(width), NARROWEST)
    return Tiles(4 * 32 * NUMBERS // cols, cols, 1, 1, 4)


def _most_numbers(warps: int, of_few: int) -> int:
    """Return the numbers a thread of a tile, at most: larger CTAs leave registers of a multiprocessor unused."""
    return of_few if warps <= 4 else MOST_NUMBERS if warps <= 8 else NUMBERS


def _wide_tiles(width: int, warps: int, ctas: int, of_few: int) -> Tiles:
    """Return tiles of one row, or of two that fit, of CTAs of the fewest warps from `warps` on. `of_few`: the numbers
    a thread of a tile of up to 4 warps, at most."""
    while warps < MOST_WARPS and ctas * warps * 32 * _most_numbers(warps, of_few) < width:
        warps *= 2
    tiles = row_tiles(width, warps, ctas)
    return tiles._replace(rows=2) if ctas == 1 and 2 * tiles.numbers <= _most_numbers(warps, of_few) else tiles


def forward_cluster(width: int) -> int:
    """Return the CTAs that share a row in the forward, on a chip with clusters: enough to hold it in registers."""
    return 1 if width <= MOST_WARPS * 32 * NUMBERS else 4


def forward_tiles(width: int, chip: Chip) -> Tiles:
    """Return the tiles of the forward. A row of one warp takes no barrier."""
    if width <= NARROW_FORWARD:
        return _narrow_tiles(width)
    return _wide_tiles(width, 1, forward_cluster(width) if chip.clusters else 1, MOST_NUMBERS)


def for_few_rows(tiles: Tiles, width: int, rows: int, warps: int) -> Tiles:
    """Return these tiles, or shorter ones of one row where that takes at most so many `warps` for all `rows`.

    The parts of a tile come from memory one after another. Where rows are few, no other program hides that.
    """
    if tiles.chunks > 1 or tiles.ctas > 1:
        return tiles
    each = tiles.warps
    while each * 32 * VECTOR < width and each < MOST_WARPS and 2 * each * rows <= warps:
        each *= 2
    return tiles if each == tiles.warps else row_tiles(width, each)


def forward_registers(tiles: Tiles) -> int:
    """Return the registers of a thread of the forward: as many programs as fit a multiprocessor hide the latency of
    memory."""
    return 64 if tiles.numbers <= NUMBERS or tiles.warps == MOST_WARPS else 80


def backward_cluster(width: int, sums: int) -> tuple[int, int]:
    """Return the warps of a CTA, and the CTAs that share a row in the backward, on a chip with clusters: enough to hold
    it and `sums` sums of each of its columns in registers."""
    if width <= ONE_CTA and width * sums <= SUMMED:
        return 2, 1
    warps, ctas = 16 if sums <= 1 else 8, 2
    while ctas * warps * 32 * NUMBERS < width:
        ctas *= 2
    return warps, ctas


def backward_tiles(width: int, sums: int, chip: Chip) -> Tiles:
    """Return the tiles of the backward, which adds up the gradients of `sums` vectors. On a chip without clusters,
    chunks of columns cover rows too wide for a CTA."""
    if width <= NARROW_BACKWARD:
        return _narrow_tiles(width)
    warps, ctas = backward_cluster(width, sums)
    if ctas == 1 or chip.clusters:
        return _wide_tiles(width, warps, ctas, BACKWARD_NUMBERS)
    chunks = -(-width // CHUNK)
    return _wide_tiles(-(-width // chunks), 4, 1, MOST_NUMBERS)._replace(chunks=chunks)


def backward_registers(tiles: Tiles) -> int:
    """Return the registers of a thread of the backward: all that there are."""
    return min(255, REGISTERS // (32 * max(RESIDENT_WARPS, tiles.warps)))


def stages_of(tiles: Tiles, element_bytes: int, weight_bytes: int, facts: Device) -> int:
    """Return the stages of the backward's loop: with S of them, S - 1 tiles of all operands are in shared memory.

    `element_bytes`: of an element in all operands of rows; `weight_bytes`: of a column's weights, which a tile of parts
    loads with its rows.
    """
    share = facts.shared_memory_per_multiprocessor * tiles.warps // RESIDENT_WARPS
    columns, column_bytes = tiles.cols * tiles.parts // tiles.ctas, tiles.rows * element_bytes
    if tiles.parts > 1:
        column_bytes += weight_bytes
    slots = (min(facts.shared_memory_per_block, share) - RESERVED) // (columns * column_bytes)
    return min(slots, 2) + 1


def programs_of(tiles: Tiles, rows: int, multiprocessors: int) -> int:
    """Return the number of persistent programs of the backward: those that run at once, or fewer for few rows."""
    at_once = cluster_slots(multiprocessors * max(1, RESIDENT_WARPS // tiles.warps), tiles.ctas)
    return min(-(-rows // tiles.rows), at_once)
