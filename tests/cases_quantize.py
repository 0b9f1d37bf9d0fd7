"""What tests of the quantisers share: inputs with special values, and comparisons bit by bit."""

import torch

from tests.util import DEVICE, poison
from tritonkittens.kernels.quantize import call_plan, quantize_mxfp8_torch, quantize_nvfp4_torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WORDS = {2: torch.int16, 4: torch.int32}


def bits(x):
    return x if x.dtype == torch.uint8 else x.contiguous().reshape(-1).view(torch.uint8)


def flat(found):
    return [found] if isinstance(found, torch.Tensor) else [x for part in found for x in flat(part)]


def assert_same_bits(found, expected):
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.is_contiguous()
        assert torch.equal(bits(a), bits(b)), f"{(bits(a) != bits(b)).sum()} of {bits(a).numel()} bytes differ"


def poisoned(monkeypatch):
    """Results of the quantisers have poison where no kernel writes."""
    allocator = call_plan.allocator
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "allocator", lambda *kind: lambda: poison(allocator(*kind)()) | 0x55)


def any_bits(shape, dtype):
    """Numbers of any magnitude: denormal numbers, infinities and NaN are among them."""
    word = WORDS[dtype.itemsize]
    limits = torch.iinfo(word)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=word, device=DEVICE).view(dtype)


def spread(shape, dtype):
    """Normal numbers whose magnitudes differ from row to row and column to column, with whole blocks of zeros."""
    x = torch.randn(shape, device=DEVICE)
    for dim in (-1, -2):
        steps = torch.randint(-6, 7, (shape[dim],), device=DEVICE).float().exp2()
        x = x * (steps if dim == -1 else steps[:, None])
    x[..., : shape[-2] // 2, : shape[-1] // 3] = 0
    return x.to(dtype)


def random_bits(x):
    return torch.randint(-(2**31), 2**31, (*x.shape[:-1], -(-x.shape[-1] // 4)), dtype=torch.int32, device=x.device)


def signs(dtype=FP32):
    return (torch.randint(0, 2, (16,), device=DEVICE) * 2 - 1).to(dtype)


def check_mxfp8(quantise, x, **options):
    assert_same_bits(quantise(x, **options), quantize_mxfp8_torch(x, **options))


def check_nvfp4(quantise, x, scale, **options):
    assert_same_bits(quantise(x, scale, **options), quantize_nvfp4_torch(x, scale, **options))
