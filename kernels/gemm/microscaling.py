"""Operands with a scale for 32 or 16 numbers along K (MXFP8, MXFP4, NVFP4): what fits together, and how kernels read
it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tritonkittens.arch import require_feature
from tritonkittens.launch import capability

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2  # two numbers along K in a byte
SCALES = (E8M0, E4M3)  # dtypes of scales
LINES, ACROSS = 128, 4  # of a block of scales
BLOCK_SHAPES = ((32, 16), (2, 256))  # of a block's bytes: as quantisers shape them, and as kernels read them
# (are the operands fp4, dtype of the scales) -> numbers of K for one scale
NUMBERS = {(False, E8M0): 32, (True, E8M0): 32, (True, E4M3): 16}


def are_microscaled(scale_a: Tensor | None, scale_b: Tensor | None) -> bool:
    """Do these scales select a block-scaled product of the tensor cores?"""
    return any(scale is not None and scale.dtype in SCALES for scale in (scale_a, scale_b))


def name_of_scales(scale: Tensor | None) -> str:
    """The name of scales in a `Problem`."""
    return "" if scale is None else str(scale.dtype).removeprefix("torch.")


def as_bytes(x: Tensor) -> Tensor:
    """A tensor of fp4 as its bytes, which torch can copy; another tensor unchanged."""
    return x.view(torch.uint8) if x.dtype == FP4 else x


def blocks_of(x: Tensor, scale: Tensor) -> tuple[int, ...]:
    """Blocks of scales of an operand (…, lines, K) along its batch, its lines and K."""
    *batch, lines, k = x.shape
    numbers = k * (2 if x.dtype == FP4 else 1)
    return (*batch, -(-lines // LINES), -(-numbers // (ACROSS * NUMBERS[x.dtype == FP4, scale.dtype])))


def check_scales(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> None:
    """Raise TypeError or ValueError for scales that do not fit the operands a (…, M, K) and b (…, K, N),
    `ArchitectureError` for a device without block-scaled products."""
    if scale_a is None or scale_b is None or scale_a.dtype != scale_b.dtype:
        have = [None if s is None else s.dtype for s in (scale_a, scale_b)]
        raise TypeError(
            f"gemm: scale_a is {have[0]}, scale_b is {have[1]}; scales of blocks along K come together, both "
            f"{' or both '.join(map(str, SCALES))}"
        )
    if a.dtype not in (E4M3, E5M2, FP4) or (a.dtype == FP4, scale_a.dtype) not in NUMBERS:
        raise TypeError(
            f"gemm: a has dtype {a.dtype}, scale_a {scale_a.dtype}; scales of {E4M3} are for {FP4} (NVFP4), those of "
            f"{E8M0} for {E4M3}, {E5M2} (MXFP8) and {FP4} (MXFP4)"
        )
    for name, x, scale in (("scale_a", a, scale_a), ("scale_b", b.mT, scale_b)):
        blocks = blocks_of(x, scale)
        known = [(*blocks, *shape) for shape in BLOCK_SHAPES] + [(LINES * ACROSS * math.prod(blocks),)]
        if tuple(scale.shape) not in known or not scale.is_contiguous():
            raise ValueError(
                f"gemm: {name} is {tuple(scale.shape)} with strides {scale.stride()}; it must be contiguous, in blocks "
                f"of {LINES}×{ACROSS} scales: {known[0]} for {tuple(x.shape)} with K last, or flat, {known[-1]}"
            )
    _check_chip(a.device)


def _check_chip(device: torch.device) -> None:
    major, minor = capability(device.index if device.type == "cuda" else None)
    require_feature(
        f"gemm with scales of {' or '.join(map(str, SCALES))} (tcgen05, block_scale)", "tcgen05", 10 * major + minor
    )


def as_tiles(scale: Tensor, x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """The scales of an operand (…, lines, K) as kernels read them: (1 or B, blocks of lines, blocks of K, 2, 256) of a
    product with leading dimensions, without the first for a single one. A copy only where some of several of them are
    broadcast."""
    *own, down, across = blocks_of(x, scale)
    tiles = scale.view(torch.uint8).view(*own, down, across, *BLOCK_SHAPES[1])
    if batch and math.prod(own) == 1:
        tiles = tiles.reshape(1, *tiles.shape[-4:])
    elif batch:
        tiles = tiles.expand(*batch, *tiles.shape[-4:]).reshape(-1, *tiles.shape[-4:])
    return tiles.view(scale.dtype)


def plain_scales(scale: Tensor, x: Tensor) -> Tensor:
    """The scales of an operand (…, lines, K), one for each of its numbers, in fp64."""
    *batch, down, across = blocks_of(x, scale)
    blocks = scale.view(torch.uint8).reshape(*batch, down, across, 32, LINES // 32, ACROSS)
    matrix = blocks.movedim((-2, -4), (-4, -2)).reshape(*batch, down * LINES, across * ACROSS).view(scale.dtype)
    lines, numbers = x.shape[-2], x.shape[-1] * (2 if x.dtype == FP4 else 1)
    return matrix.double().repeat_interleave(NUMBERS[x.dtype == FP4, scale.dtype], -1)[..., :lines, :numbers]


def numbers_of(x: Tensor) -> Tensor:
    """The numbers of an operand (…, lines, K) in fp64: of fp4, two from each byte, the lower bits first."""
    if x.dtype != FP4:
        return x.double()
    codes = x.contiguous().view(torch.uint8)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    grid = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64, device=x.device)
    return torch.where(codes >= 8, -grid[codes & 7], grid[codes & 7])
