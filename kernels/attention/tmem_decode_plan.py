"""Decoding on chips with tensor memory: which calls the kernel takes, and its launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import tritonkittens.lang as tk
from tritonkittens.arch import KIB, chip_of
from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.kernels.attention.device.decode_tmem import KEYS, SLOTS, DecodeTmem, attention_decode_tmem
from tritonkittens.kernels.attention.num_splits import DecodeKind, Ring, Rings
from tritonkittens.kernels.attention.tmem_plan import LAUNCH_REGISTERS, tile_dims
from tritonkittens.launch import capability

DIMS = 192, 128  # the largest head_dim and value_dim
FEWEST, MOST = 16, 32  # rows of a tile of queries: of an MMA; that fit into registers
SPARE = 2 * KIB  # bytes of shared memory for barriers, numbers of tasks, and the compiler
ORDER = ("Q", "K", "V", "O", "L", "pages", "lengths", "starts")  # of the kernel's tensors


class Args(NamedTuple):
    """The numbers of a call.

    `scale`: of scores, in base 2 (times log₂ e). `squash`: of the soft-cap, see `masks.squashed`. `queries`: of a head.
    `splits`: tasks that read a sequence. `tasks`: of all sequences.
    """

    scale: float
    squash: float
    queries: int
    splits: int
    tasks: int


class Bounds(NamedTuple):
    """Keys of each sequence, and the first that is seen; None where all are."""

    lengths: Any
    starts: Any


def takes(kind: DecodeKind, rows: int, device: torch.device) -> bool:
    """Whether `attention_decode_tmem` computes tiles of so many rows on a device."""
    fits = kind.head_dim <= DIMS[0] and kind.value_dim <= DIMS[1] and rows <= MOST
    return fits and chip_of(capability(device)).tcgen05


@dataclass(frozen=True)
class TmemDecode:
    """The kernel of one kind of calls, as a plan uses it."""

    constants: DecodeTmem

    @property
    def partial(self) -> bool:
        """Whether its results are splits in fp32."""
        return self.constants.partial

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors of a launch."""
        c = self.constants
        given = dict(L=c.lse, pages=c.page_size is not None, lengths=c.lengths, starts=c.starts)
        return tuple(name for name in ORDER if given.get(name, True))

    def bind(
        self, *tensors: torch.Tensor, varying: tuple[int, ...] = (), scale: float, queries: int, squash: float = 0.0
    ) -> Callable[..., None]:
        """The launch as a function of tensors: of those of these shapes, in these dimensions or others of the same
        memory. Extents and strides of those whose number is in `varying` may differ."""
        splits = tensors[self.tensors.index("O")].shape[:3]
        args, grid = Args(scale, squash, queries, splits[2], splits.numel()), (splits.numel(),)
        arguments = self._arguments(*tensors)
        return attention_decode_tmem.bind(
            grid, *arguments, args, self.constants, varying=varying, maxnreg=LAUNCH_REGISTERS
        )

    def _arguments(self, *tensors: torch.Tensor) -> list[Any]:
        """The kernel's arguments for its tensors."""
        c = self.constants
        tiles = dict(Q=[c.q], K=[tk.st(c.dtype, c.copied, c.head_dim)], V=[tk.st(c.dtype, c.copied, c.value_dim)])
        found = {name: tk.gl(t, *tiles.get(name, ())) for name, t in zip(self.tensors, tensors, strict=True)}
        *others, lengths, starts = (found.get(name) for name in ORDER)
        return [*others, Bounds(lengths, starts)]


@functools.lru_cache(maxsize=512)
def kernel_of(kind: DecodeKind, rows: int, arch: tuple[int, int], partial: bool, lse: bool) -> TmemDecode:
    """The kernel for tiles of so many rows. `partial`: its results are splits in fp32."""
    head_dim, value_dim = tile_dims(kind.head_dim, kind.value_dim)
    dims = dict(head_dim=head_dim, value_dim=value_dim)
    knobs: dict[str, Any] = {**kind._asdict(), **dims, "dtype": tk.from_torch(kind.dtype)}
    c = DecodeTmem(**knobs, rows=max(FEWEST, power_of_two(rows)), partial=partial, lse=lse)
    rest = chip_of(arch).shared_per_block - SPARE - SLOTS.value * (c.q.nbytes + c.p.nbytes)
    return TmemDecode(replace(c, stages=rest // (c.k.nbytes + c.v.nbytes)))


def rings_of(kind: DecodeKind, rows: int, arch: tuple[int, int]) -> Rings:
    """The ring of the kernel, for the choice of a split."""
    stages = kernel_of(kind, rows, arch, True, True).constants.stages
    return Rings(plain=((0, Ring(KEYS.value, kind.key_bytes, stages, 1, kind.page_size is not None)),))
