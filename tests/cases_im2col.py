"""Kernels that load im2col tiles, and what they should find: for tests with and without a GPU."""

import itertools
import math

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


@tk.kernel
@triton.jit
def one_tile(X, Y, TILE: tl.constexpr, COORD: tl.constexpr, OFFSETS: tl.constexpr):
    """Y, of the tile's shape, is one tile of X, at constant places."""
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    tk.expect(arrived[0], tile)
    tk.load_im2col_async(tile, X, COORD, OFFSETS, arrived[0])
    tk.wait(arrived[0], 0)
    tk.store(Y, tk.load(tile), (0, 0))


@tk.kernel
@triton.jit
def all_taps(X, Y, TILE: tl.constexpr, R: tl.constexpr, S: tl.constexpr, stride, padding, dilation, height, width):
    """Y[tap, pixel, channel] of an NHWC tensor: what each tap of an R×S filter sees at each of the height × width
    pixels of the output."""
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    first = tk.block_index(0) * TILE.rows
    q, p, n = first % width, first // width % height, first // (width * height)
    channel = tk.block_index(1) * TILE.cols
    for tap in range(R * S):
        tk.expect(arrived[0], tile)
        place = (n, p * stride - padding, q * stride - padding, channel)
        tk.load_im2col_async(tile, X, place, (tap // S * dilation, tap % S * dilation), arrived[0])
        tk.wait(arrived[0], tap & 1)
        tk.store(Y, tk.load(tile), (tap, tk.block_index(0), tk.block_index(1)))
        tk.fence_async()  # the next tap overwrites what was read here
        tk.sync()


def expected_tile(x, pixels, channels, lower, upper, strides, coord, offsets, fill=0.0):
    """The tile that starts at base pixel and channel `coord`, as float64 on the CPU, gathered pixel by pixel."""
    x = x.double().cpu()
    images, *spatial, depth = x.shape
    box = [range(low, extent + high, step) for low, high, step, extent in zip(lower, upper, strides, spatial)]
    bases = itertools.product(range(images), *box)
    bases = list(itertools.islice(itertools.dropwhile(lambda base: base != tuple(coord[:-1]), bases), pixels))
    out = torch.full((pixels, channels), fill, dtype=torch.float64)
    held = max(min(channels, depth - coord[-1]), 0)
    for row, (n, *base) in enumerate(bases):
        place = [b + o for b, o in zip(base, offsets)]
        if all(0 <= i < extent for i, extent in zip(place, spatial)):
            out[row, :held] = x[(n, *place)][coord[-1] : coord[-1] + held]
    return out


def expected_taps(x, filter, stride, padding, dilation, fill=0.0):
    """What `all_taps` should store, as float64 on the CPU; and the height and width of the output."""
    x = x.double().cpu()
    n, *image, c = x.shape
    padded = torch.full((n, *(extent + 2 * padding for extent in image), c), fill, dtype=torch.float64)
    padded[:, padding : padding + image[0], padding : padding + image[1]] = x
    height, width = ((e + 2 * padding - (taps - 1) * dilation - 1) // stride + 1 for e, taps in zip(image, filter))
    out = []
    for r, s in itertools.product(*map(range, filter)):
        rows = slice(r * dilation, r * dilation + (height - 1) * stride + 1, stride)
        cols = slice(s * dilation, s * dilation + (width - 1) * stride + 1, stride)
        out.append(padded[:, rows, cols].reshape(math.prod((n, height, width)), c))
    return torch.stack(out), height, width


def convolution_input(x, tile, filter, stride=1, padding=0, dilation=1, fill="zero"):
    """The `tk.im2col` of a convolution with these parameters."""
    upper = tuple(padding - (taps - 1) * dilation for taps in filter)
    return tk.im2col(x, tile, (-padding,) * len(filter), upper, (stride,) * len(filter), fill)
