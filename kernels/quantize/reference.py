"""The quantisers in plain torch, bit for bit as the kernels, and their inverses."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels.quantize.config import FP4, LINES, SCALES, sides

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by their bits
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F, torch.float8_e8m0fnu: 0xFF}
Quantised = tuple[Tensor, Tensor]  # values and scales


# ---------------------------------------------------------------- layouts of scales


def blocked_scales(scales: Tensor) -> Tensor:
    """Return plain scales, (…, lines, n), as blocks, (…, ⌈lines/128⌉, ⌈n/4⌉, 32, 16), padded by zeros.

    Scale j of line i of a block is at [i mod 32, 4 · (i div 32) + j].
    """
    lines, across = scales.shape[-2:]
    padding = (0, -across % SCALES, 0, -lines % LINES)
    whole = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    rows, cols = whole.shape[-2] // LINES, whole.shape[-1] // SCALES
    parts = whole.reshape(*scales.shape[:-2], rows, 4, 32, cols, SCALES)
    return parts.movedim((-2, -3), (-4, -3)).reshape(*scales.shape[:-2], rows, cols, 32, 16).view(scales.dtype)


def plain_scales(scales: Tensor, lines: int, across: int) -> Tensor:
    """Return the plain scales, (…, lines, across), of blocks: the inverse of `blocked_scales`."""
    *batch, rows, cols, _, _ = scales.shape
    parts = scales.view(torch.uint8).reshape(*batch, rows, cols, 32, 4, SCALES).movedim((-2, -4), (-4, -2))
    whole = parts.reshape(*batch, rows * LINES, cols * SCALES)
    return whole[..., :lines, :across].contiguous().view(scales.dtype)


# ---------------------------------------------------------------- blocks


def _blocks(x: Tensor, size: int) -> Tensor:
    """Lines in fp32 as (…, lines, blocks, size), the last block padded by zeros."""
    x = x.float()
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def _lines(blocks: Tensor, length: int) -> Tensor:
    return blocks.flatten(-2)[..., :length].contiguous()


def _to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to 8 bits: nearest even, saturating, one NaN. torch's own cast does not saturate."""
    bits = x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).view(torch.uint8)
    return torch.where(x.isnan(), NAN[dtype], bits).view(dtype)


def _to_e2m1(x: Tensor, random: Tensor | None) -> Tensor:
    """fp32 to the bits of e2m1, one in a byte: nearest even, or rounded with a random byte. NaN is 6."""
    size, grid = x.double().abs().clamp(max=6.0), torch.tensor(E2M1, dtype=torch.float64, device=x.device)
    lower = (size.unsqueeze(-1) >= grid[1:]).sum(-1).clamp(max=6)
    fraction = (size - grid[lower]) / (grid[lower + 1] - grid[lower])
    if random is None:
        up = (fraction > 0.5) | ((fraction == 0.5) & (lower % 2 == 1))
    else:
        up = (fraction * 256).floor() + random >= 256
    bits = (lower + up) | (x.signbit().long() << 3)
    return torch.where(x.isnan(), 7, bits).to(torch.uint8)


# ---------------------------------------------------------------- MXFP8


def _mxfp8(x: Tensor, dtype: torch.dtype, scaling: str) -> Quantised:
    blocks = _blocks(x, 32)
    amax = blocks.abs().amax(-1).double()
    limit = LARGEST[dtype]
    # a power of two from 2**-127 on: of amax / limit or, for "floor", of amax / 2**(exponent of the limit)
    # a tensor divides exactly: on a GPU, torch multiplies by the inverse of a number
    divisor = torch.full_like(amax, limit if scaling == "up" else limit / 1.75)
    fraction, exponent = torch.frexp(amax / divisor)
    exponent = exponent - 1 + (fraction > 0.5) if scaling == "up" else exponent - 1
    exponent = torch.where(amax == 0, -127, exponent.clamp(-127, 127))
    exponent = torch.where(amax.isinf(), 127, exponent)
    inverse = torch.where(amax.isnan(), torch.nan, torch.ldexp(torch.ones_like(amax), -exponent)).float()
    scales = torch.where(amax.isnan(), NAN[torch.float8_e8m0fnu], exponent + 127).to(torch.uint8)
    values = _to_fp8(blocks * inverse.unsqueeze(-1), dtype)
    return _lines(values.view(torch.uint8), x.shape[-1]).view(dtype), scales.view(torch.float8_e8m0fnu)


def _each_side(x: Tensor, axes: str, layout: str, quantise: object, *beside: Tensor | None) -> list[Quantised]:
    """`quantise` of x, and of its transposed matrix, with what is beside it, transposed alike."""
    found = []
    for side, transposed in zip(sides(axes), (False, True), strict=True):
        if side:
            values, scales = quantise(*(t.mT if transposed and t is not None else t for t in (x, *beside)))  # type: ignore[operator]
            found.append((values, scales if layout == "plain" else blocked_scales(scales)))
    return found


def quantize_mxfp8_torch(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    axes: str = "rows",
    scaling: str = "up",
    layout: str = "blocked",
) -> Quantised | tuple[Quantised, Quantised]:
    """`quantize_mxfp8` in plain torch; arguments and results as there."""
    found = _each_side(x, axes, layout, lambda side: _mxfp8(side, dtype, scaling))
    return found[0] if len(found) == 1 else (found[0], found[1])


def dequantize_mxfp8(
    values: Tensor, scales: Tensor, *, layout: str = "blocked", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return values · scales, (…, lines, length), in `dtype`, fp32 or fp64.

    Args:
        values, scales, layout: as `quantize_mxfp8` returns and takes them. Of columns, the result is transposed, too.
    """
    return _scaled(values.to(dtype), scales, 32, layout)


def _scaled(values: Tensor, scales: Tensor, size: int, layout: str) -> Tensor:
    lines, length = values.shape[-2:]
    if layout == "blocked":
        scales = plain_scales(scales, lines, -(-length // size))
    return values * scales.to(values.dtype).repeat_interleave(size, -1)[..., :length]


# ---------------------------------------------------------------- NVFP4


def hadamard_torch(x: Tensor, signs: Tensor) -> Tensor:
    """Return blocks of 16 along the last dimension of `x`, times `signs`, times the Hadamard matrix of 16, times 1/4,
    in fp32. The last block is padded by zeros, and cut off again.

    Sums are of neighbours first, then of numbers two, four and eight places apart.
    """
    return _lines(_hadamard(_blocks(x, 16), signs), x.shape[-1])


def _hadamard(blocks: Tensor, signs: Tensor) -> Tensor:
    y = blocks * (signs.float() * 0.25)
    for distance in (1, 2, 4, 8):
        pairs = y.unflatten(-1, (-1, 2, distance))
        a, b = pairs.unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
    return y


def _transformed(x: Tensor, signs: Tensor | None) -> Tensor:
    return _blocks(x, 16) if signs is None else _hadamard(_blocks(x, 16), signs)


def _nvfp4(x: Tensor, random: Tensor | None, scale: Tensor, signs: Tensor | None) -> Quantised:
    blocks = _transformed(x, signs)
    reciprocal = 1 / scale.reshape(())
    scales = _to_fp8(blocks.abs().amax(-1) * (reciprocal * (1 / 6)), torch.float8_e4m3fn)
    known = scales.float()
    inverse = (reciprocal * (1 / known)).clamp(max=torch.finfo(torch.float32).max)
    inverse = torch.where(known == 0, 0, torch.where(known.isnan(), torch.nan, inverse))
    bytes_of = None if random is None else _blocks(random, 16)
    codes = _lines(_to_e2m1(blocks * inverse.unsqueeze(-1), bytes_of), x.shape[-1])
    return (codes[..., ::2] | codes[..., 1::2] << 4).view(FP4), scales


def quantize_nvfp4_torch(
    x: Tensor,
    tensor_scale: Tensor | None = None,
    *,
    axes: str = "rows",
    layout: str = "blocked",
    random_bits: Tensor | None = None,
    hadamard: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """`quantize_nvfp4` in plain torch; arguments and results as there."""
    scale = nvfp4_tensor_scale_torch(x, axes=axes, hadamard=hadamard) if tensor_scale is None else tensor_scale
    random = None if random_bits is None else random_bits.contiguous().view(torch.uint8)[..., : x.shape[-1]]
    sides = _each_side(x, axes, layout, lambda side, bits: _nvfp4(side, bits, scale, hadamard), random)
    found = [(values, scales, scale) for values, scales in sides]
    return found[0] if len(found) == 1 else (found[0], found[1])


def nvfp4_tensor_scale_torch(x: Tensor, *, axes: str = "rows", hadamard: Tensor | None = None) -> Tensor:
    """`nvfp4_tensor_scale` in plain torch; arguments and results as there."""
    wanted = [x.mT if transposed else x for side, transposed in zip(sides(axes), (False, True), strict=True) if side]
    smallest = torch.finfo(torch.float32).tiny
    if x.numel() == 0:
        return torch.full((), smallest, dtype=torch.float32, device=x.device)
    amax = torch.stack([_transformed(side, hadamard).abs().amax() for side in wanted]).amax()
    return (amax.double() / 2688).float().clamp(min=smallest)


def dequantize_nvfp4(
    values: Tensor, scales: Tensor, tensor_scale: Tensor, *, layout: str = "blocked", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return values · scales · tensor scale, (…, lines, length), in `dtype`, fp32 or fp64.

    Args:
        values, scales, tensor_scale, layout: as `quantize_nvfp4` returns and takes them. Of columns, the result is
            transposed, too. A Hadamard transform is not undone.
    """
    pairs = values.view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).long()
    grid = torch.tensor(E2M1, dtype=dtype, device=values.device)
    found = torch.where(codes >= 8, -grid[codes & 7], grid[codes & 7])
    return _scaled(found, scales, 16, layout) * tensor_scale.to(dtype)
