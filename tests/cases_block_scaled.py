"""What the tests of block-scaled products share: operands with scales of each format, and their exact products."""

from typing import NamedTuple

import torch

E4M3, E5M2, E8M0, FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
# by name: dtypes of operands and scales, numbers along K of a scale
FORMATS = {
    "mxfp8": (E4M3, E8M0, 32),
    "mxfp8 e5m2": (E5M2, E8M0, 32),
    "mxfp4": (FP4, E8M0, 32),
    "nvfp4": (FP4, E4M3, 16),
}
SUMS = 2.0**-12  # error of the tensor cores' sums, of the sum of magnitudes


class Operand(NamedTuple):
    """(…, lines, K): values as kernels take them, scales in blocks (…, down, across, 32, 16), plain scales, and the
    scaled numbers in fp64."""

    values: torch.Tensor
    blocks: torch.Tensor
    scales: torch.Tensor
    exact: torch.Tensor


def in_blocks(scales):
    """Plain scales (lines, n) as blocks of 128×4, byte by byte: scale j of line i of a block is byte 16 (i mod 32) + 4
    (i div 32) + j."""
    lines, across = scales.shape
    found = torch.zeros(-(-lines // 128), -(-across // 4), 512, dtype=torch.uint8)
    i, j = torch.meshgrid(torch.arange(lines), torch.arange(across), indexing="ij")
    line = i % 128
    found[i // 128, j // 4, 16 * (line % 32) + 4 * (line // 32) + j % 4] = scales.view(torch.uint8)
    return found.unflatten(-1, (32, 16)).view(scales.dtype)


def numbers(values):
    """Values in fp64; of fp4 the number in the low bits of a byte is the first."""
    if values.dtype != FP4:
        return values.double()
    codes = values.view(torch.uint8).long()
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])


def operand(kind, lines, k, batch=(), low=120, high=134):
    """Random numbers, none of which is NaN or infinite, and random scales; e8m0 from 2**(low - 127) on."""
    dtype, of_scales, numbers_of_scale = FORMATS[kind]
    bits = torch.randint(0, 256, (*batch, lines, k // 2 if dtype == FP4 else k), dtype=torch.uint8)
    values = (bits if dtype == FP4 else bits & 0xBF).view(dtype)
    shape = (*batch, lines, -(-k // numbers_of_scale))
    if of_scales == E8M0:
        scales = torch.randint(low, high, shape, dtype=torch.uint8).view(E8M0)
    else:
        scales = (torch.rand(shape) * 4 + 0.01).to(E4M3)
    return with_scales(kind, values, scales)


def with_scales(kind, values, scales):
    """These values and plain scales as an `Operand`."""
    flat = scales.view(torch.uint8).flatten(0, -3).view(scales.dtype) if scales.ndim > 2 else scales[None]
    blocks = torch.stack([in_blocks(s).view(torch.uint8) for s in flat]).unflatten(0, scales.shape[:-2] or (1,))
    blocks = (blocks if scales.ndim > 2 else blocks[0]).contiguous().view(scales.dtype)
    exact = numbers(values)
    return Operand(
        values, blocks, scales, exact * scales.double().repeat_interleave(FORMATS[kind][2], -1)[..., : exact.shape[-1]]
    )


def assert_product(got, a, b):
    """`got` is the product of two operands (…, M, K) and (…, N, K), up to the error of its sums; NaN and infinities, of
    numbers beyond fp32, are equal."""
    wanted, size = a.exact @ b.exact.mT, a.exact.abs() @ b.exact.abs().mT
    bound = SUMS * size + wanted.abs() * 2.0**-8 * (got.dtype == torch.bfloat16) + 2.0**-149
    near = (got.double() - wanted).abs() <= bound
    assert (near | (got.double() == wanted.float().double()) | (got.isnan() & wanted.isnan())).all()
