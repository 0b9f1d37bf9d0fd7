"""im2col tiles on a Hopper GPU against torch and against a gather pixel by pixel; outputs poisoned, waits that never
end trap."""

import pytest
import torch

import tritonkittens.lang as tk
from tests.cases_im2col import all_taps, convolution_input, expected_taps, expected_tile, one_tile
from tests.util import DEVICE, poison

pytestmark = pytest.mark.usefixtures("kernel_device")
TORCH = {
    tk.bf16: torch.bfloat16,
    tk.fp16: torch.float16,
    tk.fp32: torch.float32,
    tk.int8: torch.int8,
    tk.fp8e4m3: torch.float8_e4m3fn,
}


def image(rng, *shape, dtype=tk.bf16):
    """Whole numbers other than 0, which every type holds exactly, so that a pixel is not mistaken for padding."""
    return torch.from_numpy(rng.integers(1, 16, shape) * rng.choice([-1, 1], shape)).to(DEVICE).to(TORCH[dtype])


def taps_of(x, tile, filter, stride, padding, dilation, fill="zero"):
    expected, height, width = expected_taps(
        x, filter, stride, padding, dilation, float("nan") if fill == "nan" else 0.0
    )
    out = poison(torch.empty(expected.shape, dtype=x.dtype, device=DEVICE))
    grid = -(-expected.shape[1] // tile.rows), -(-x.shape[-1] // tile.cols)
    source = convolution_input(x, tile, filter, stride, padding, dilation, fill)
    all_taps[grid](source, tk.gl(out), tile, *filter, stride, padding, dilation, height, width, debug=True)
    return out.double().cpu(), expected


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [(2, 14, 14, 64), (3, 13, 11, 72), (5, 5, 4, 176), (1, 33, 20, 16)], ids=str)
def test_a_padded_3x3_filter_sees_what_unfold_sees(rng, shape, stride):
    x = image(rng, *shape)
    out, expected = taps_of(x, tk.st(tk.bf16, 64, 64 if shape[-1] > 16 else 16), (3, 3), stride, 1, 1)
    unfolded = torch.nn.functional.unfold(x.double().cpu().permute(0, 3, 1, 2), 3, padding=1, stride=stride)
    unfolded = unfolded.unflatten(1, (shape[-1], 9)).permute(2, 0, 3, 1).flatten(1, 2)
    assert torch.equal(out, unfolded) and torch.equal(expected, unfolded)


@pytest.mark.parametrize(
    ("dtype", "tile", "filter", "stride", "padding", "dilation", "fill"),
    [
        (tk.bf16, (128, 64), (3, 3), 1, 2, 2, "zero"),
        (tk.bf16, (16, 128), (3, 3), 2, 0, 1, "zero"),
        (tk.bf16, (512, 32), (5, 3), 1, 1, 1, "zero"),
        (tk.fp16, (64, 64), (3, 3), 3, 1, 2, "nan"),
        (tk.fp32, (64, 64), (1, 1), 2, 0, 1, "zero"),
        (tk.fp32, (1024, 16), (3, 3), 1, 1, 1, "nan"),
        (tk.int8, (64, 128), (3, 3), 2, 1, 1, "zero"),
        (tk.fp8e4m3, (64, 32), (2, 4), 1, 1, 1, "zero"),
    ],
)
def test_types_strides_dilation_and_fills(rng, dtype, tile, filter, stride, padding, dilation, fill):
    x = image(rng, 3, 12, 17, 80, dtype=dtype)
    out, expected = taps_of(x, tk.st(dtype, *tile), filter, stride, padding, dilation, fill)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(99), expected.nan_to_num(99))


def test_a_view_with_strides_and_a_large_tensor(rng):
    x = image(rng, 4, 40, 50, 96)[1:, 3:31, 5:40, 16:88]
    out, expected = taps_of(x, tk.st(tk.bf16, 128, 64), (3, 3), 2, 1, 1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("shape", "lower", "upper", "strides", "coord", "offsets"),
    [
        ((3, 40, 64), (-2,), (2,), (1,), (0, -2, 0), (0,)),
        ((3, 40, 64), (-2,), (-2,), (3,), (1, 4, 32), (4,)),
        ((2, 7, 9, 64), (-1, 0), (0, -2), (2, 1), (0, 3, 5, 0), (1, 2)),
        ((2, 4, 5, 6, 64), (-1, -1, -1), (-1, -1, -1), (1, 1, 1), (0, -1, -1, -1, 0), (0, 1, 2)),
        ((2, 4, 5, 6, 64), (-1, -1, -1), (-1, -1, -1), (2, 1, 2), (0, 1, 2, 1, 16), (2, 0, 1)),
        ((1, 3, 3, 64), (0, 0), (0, 0), (1, 1), (0, 2, 1, 32), (0, 0)),
    ],
    ids=str,
)
def test_one_two_and_three_spatial_dimensions(rng, shape, lower, upper, strides, coord, offsets):
    x = image(rng, *shape)
    out = poison(torch.empty(64, 64, dtype=torch.bfloat16, device=DEVICE))
    tile = tk.st(tk.bf16, 64, 64)
    one_tile[(1,)](tk.im2col(x, tile, lower, upper, strides), tk.gl(out), tile, coord, offsets, debug=True)
    assert torch.equal(out.double().cpu(), expected_tile(x, 64, 64, lower, upper, strides, coord, offsets))


def test_another_tensor_at_the_same_address_gets_its_own_map(rng):
    base, tile = image(rng, 2 * 16 * 16 * 64), tk.st(tk.bf16, 64, 64)
    for shape in ((2, 16, 16, 64), (1, 32, 16, 64), (2, 8, 32, 64), (2, 16, 16, 64)):
        out, expected = taps_of(base.view(shape), tile, (3, 3), 1, 1, 1)
        assert torch.equal(out, expected)
