"""Explicit tiles on a Hopper GPU: every operation against torch, outputs poisoned and guarded.

Launched with debug=True, so that a wait that never ends traps.
"""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tritonkittens.lang as tk
from tests import cases_explicit as cases
from tests.cases_explicit import TORCH
from tests.util import DEVICE, on_gpu_or_simulated, poison, relative_error, synchronize
from tritonkittens.launch import multiprocessor_count

pytestmark = pytest.mark.usefixtures("kernel_device")
GUARD = 0xA5


class Canvas:
    """A poisoned output with guard bytes before, behind and between its rows; `order` permutes the dimensions in
    memory."""

    def __init__(self, *shape, dtype=torch.bfloat16, order=None):
        size = dtype.itemsize
        order = order or tuple(range(len(shape)))
        memory = [shape[i] for i in order]
        unit = max(16 // size, 1)
        memory[-1] = -(-memory[-1] // unit) * unit + unit
        self.bytes = torch.full((math.prod(memory) * size + 512,), GUARD, dtype=torch.uint8, device=DEVICE)
        inner = self.bytes[256:-256].view(dtype).view(memory)[..., : shape[order[-1]]]
        self.tensor = poison(inner.permute([order.index(i) for i in range(len(shape))]))

    def intact(self, piece=1):
        """Are the guards as they were? `piece` is the unit in bytes in which rows are written: TMA stores end at
        multiples of 16."""
        if piece > 1:
            whole = Canvas.__new__(Canvas)
            unit, width = piece // self.tensor.itemsize, self.tensor.shape[-1]
            whole.bytes = self.bytes
            whole.tensor = torch.as_strided(
                self.tensor, (*self.tensor.shape[:-1], -(-width // unit) * unit), self.tensor.stride()
            )
            return whole.intact()
        copy = Canvas.__new__(Canvas)
        copy.bytes = self.bytes.clone()
        offset = self.tensor.data_ptr() - self.bytes.data_ptr()
        view = copy.bytes[offset:].view(torch.uint8)
        inner = torch.as_strided(
            view[: view.numel() // self.tensor.itemsize * self.tensor.itemsize].view(self.tensor.dtype),
            self.tensor.shape,
            self.tensor.stride(),
        )
        inner.copy_(
            torch.full((self.tensor.itemsize,), GUARD, dtype=torch.uint8, device=DEVICE)
            .view(self.tensor.dtype)
            .expand(self.tensor.shape)
        )
        return bool((copy.bytes == GUARD).all())


def whole_numbers(rng, *shape, dtype=torch.bfloat16, high=9):
    """Random whole numbers that every type holds exactly, so that results can be compared for equality."""
    return torch.from_numpy(rng.integers(-high, high + 1, shape)).to(DEVICE).to(dtype)


def same(out, expected):
    return torch.equal(out.double(), expected.double())


def tiles(extent, tile):
    return -(-extent // tile)


def grid_of(tensor, tile):
    rows, cols = (1, *tile.shape)[-2:]
    *lead, r, c = (1, *tensor.shape)[-max(tensor.ndim, 2) :]
    return tiles(c, cols), tiles(r, rows), math.prod(lead)


# ---- TMA
# ---------------------------------------------------------------------------------------------------------------------


COPIES = [
    ((1000,), tk.sv(tk.bf16, 176)),
    ((997,), tk.sv(tk.fp32, 128)),
    ((100, 200), tk.st(tk.bf16, 64, 64)),
    ((99, 170), tk.st(tk.fp32, 48, 80)),
    ((130, 333), tk.st(tk.fp8e4m3, 96, 160)),
    ((50, 40), tk.st(tk.int32, 16, 16)),
    ((64, 100), tk.st(tk.int8, 32, 32)),
    ((33, 20), tk.st(tk.int64, 16, 16)),
    ((3, 50, 100), tk.st(tk.fp16, 32, 48)),
    ((2, 3, 100, 130), tk.st(tk.bf16, 64, 128)),
    ((2, 2, 3, 20, 100), tk.st(tk.fp16, 16, 96)),
]


@pytest.mark.parametrize(("shape", "tile"), COPIES, ids=str)
def test_tma_copies(rng, shape, tile):
    dtype = TORCH[tile.dtype]
    x, y = Canvas(*shape, dtype=dtype), Canvas(*shape, dtype=dtype)
    x.tensor.copy_(whole_numbers(rng, *shape, dtype=dtype, high=8))
    cases.tma_copy[grid_of(x.tensor, tile)](
        tk.gl(x.tensor, tile), tk.gl(y.tensor, tile), tile, len(shape), "copy", debug=True
    )
    assert same(y.tensor, x.tensor) and y.intact(16) and x.intact()


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)], ids=str)
def test_tma_copies_permuted_tensors(rng, order):
    tile = tk.st(tk.bf16, 48, 64)
    x, y = Canvas(2, 3, 70, 100, order=order), Canvas(2, 3, 70, 100)
    x.tensor.copy_(whole_numbers(rng, 2, 3, 70, 100))
    cases.tma_copy[grid_of(x.tensor, tile)](
        tk.gl(x.tensor, tile), tk.gl(y.tensor, tile), tile, 4, "copy", "evict_first", debug=True
    )
    assert same(y.tensor, x.tensor) and y.intact(16)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("add", d) for d in (tk.fp32, tk.bf16, tk.fp16, tk.int32)),
        *((k, d) for k in ("min", "max") for d in (tk.bf16, tk.fp16, tk.int32, tk.int64)),
    ],
)
def test_tma_reductions(rng, kind, dtype):
    tile, torch_dtype = tk.st(dtype, 48, 80), TORCH[dtype]
    x, y = whole_numbers(rng, 100, 240, dtype=torch_dtype), Canvas(100, 240, dtype=torch_dtype)
    before = whole_numbers(rng, 100, 240, dtype=torch_dtype)
    y.tensor.copy_(before)
    expected = {"add": torch.add, "min": torch.minimum, "max": torch.maximum}[kind](x, before)
    cases.tma_copy[grid_of(x, tile)](tk.gl(x, tile), tk.gl(y.tensor, tile), tile, 2, kind, debug=True)
    assert same(y.tensor, expected) and y.intact()


@pytest.mark.parametrize("fill", ["zero", "nan"])
@pytest.mark.parametrize(("row", "col"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 3)])
def test_tma_fills_past_the_edge(rng, fill, row, col):
    tile = tk.st(tk.bf16, 48, 96)
    x, y = Canvas(70, 120), Canvas(48, 96)
    x.tensor.copy_(whole_numbers(rng, 70, 120))
    expected = torch.full((48 * 4, 96 * 4), 0.0 if fill == "zero" else float("nan"), device=DEVICE)
    expected[:70, :120] = x.tensor
    expected = expected[48 * row : 48 * (row + 1), 96 * col : 96 * (col + 1)]
    cases.tma_to_registers[(1,)](tk.gl(x.tensor, tile, fill=fill), tk.gl(y.tensor), tile, row, col, debug=True)
    assert (
        torch.equal(y.tensor.isnan(), expected.isnan())
        and same(y.tensor.nan_to_num(), expected.nan_to_num())
        and y.intact()
    )


# ---- through registers
# -----------------------------------------------------------------------------------------------------------


def strided(rng, kind, *shape, dtype):
    """Inputs that TMA would take, and such that it would not."""
    if kind == "contiguous":
        return whole_numbers(rng, *shape, dtype=dtype, high=8)
    if kind == "transposed":
        return whole_numbers(rng, *shape[:-2], shape[-1], shape[-2], dtype=dtype, high=8).transpose(-1, -2)
    return whole_numbers(rng, *shape[:-1], 2 * shape[-1] + 3, dtype=dtype, high=8)[..., 1::2][..., : shape[-1]]


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize(
    ("shape", "larger", "tile"),
    [
        ((100, 160), (110, 170), tk.st(tk.bf16, 48, 80)),
        ((100, 60), (128, 130), tk.st(tk.fp32, 64, 64)),
        ((40, 96), (64, 100), tk.st(tk.fp8e5m2, 32, 96)),
        ((2, 50, 48), (3, 70, 60), tk.st(tk.fp16, 16, 48)),
        ((2, 2, 30, 33), (2, 2, 40, 48), tk.st(tk.int8, 32, 32)),
    ],
    ids=str,
)
def test_loads_and_stores_without_tma(rng, kind, shape, larger, tile):
    dtype = TORCH[tile.dtype]
    x = strided(rng, kind, *shape, dtype=dtype)
    expected = torch.full(larger, 3.0, device=DEVICE).double()
    expected[tuple(slice(n) for n in shape)] = x.double()
    registers = tk.rt(tile.dtype, tile.rows, tile.cols)
    for kernel, what in ((cases.through_shared, tile), (cases.through_registers, registers)):
        y = Canvas(*larger, dtype=dtype)
        kernel[grid_of(y.tensor, tile)](tk.gl(x), tk.gl(y.tensor), what, len(shape), 3, debug=True)
        assert same(y.tensor, expected) and y.intact()


@pytest.mark.parametrize(
    "tile", [tk.sv(tk.fp32, 176), tk.rv(tk.bf16, 128), tk.rv(tk.int32, 80), tk.sv(tk.fp16, 16)], ids=str
)
@pytest.mark.parametrize("step", [1, 3])
def test_vectors_without_tma(rng, tile, step):
    dtype = TORCH[tile.dtype]
    x, y = whole_numbers(rng, 1000 * step, dtype=dtype)[::step], Canvas(1100, dtype=dtype)
    kernel = cases.through_shared if isinstance(tile, tk.sv) else cases.through_registers
    kernel[(tiles(1100, tile.length),)](tk.gl(x), tk.gl(y.tensor), tile, 1, -2, debug=True)
    assert same(y.tensor[:1000], x) and (y.tensor[1000:].double() == -2).all() and y.intact()


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(
    ("shape", "tile"),
    [((64, 320), tk.st(tk.bf16, 32, 64)), ((100, 203), tk.st(tk.bf16, 48, 80)), ((70, 90), tk.st(tk.fp32, 32, 48))],
    ids=str,
)
def test_cp_async(rng, shape, tile, stages):
    dtype = TORCH[tile.dtype]
    x, y = whole_numbers(rng, *shape, dtype=dtype), Canvas(*shape, dtype=dtype)
    cases.by_cp_async[(tiles(shape[0], tile.rows),)](tk.gl(x), tk.gl(y.tensor), tile, stages, debug=True)
    assert same(y.tensor, x) and y.intact()


@pytest.mark.parametrize("tile", [tk.rt(tk.bf16, 64, 64, "memory"), tk.rt(tk.fp32, 48, 80)], ids=str)
def test_gather_and_scatter(rng, tile):
    dtype = TORCH[tile.dtype]
    x, y = whole_numbers(rng, 200, 100, dtype=dtype), Canvas(300, 100, dtype=dtype)
    source = torch.from_numpy(rng.integers(-3, 203, tile.rows)).int().to(DEVICE)
    target = torch.from_numpy(rng.permutation(310)[: tile.rows]).int().to(DEVICE)
    target[0], source[1] = -1, 200
    expected = y.tensor.double()
    for s, t in zip(source.tolist(), target.tolist()):
        if 0 <= t < 300:
            expected[t] = x[s].double() if 0 <= s < 200 else 5
    cases.gather_scatter[(tiles(100, tile.cols),)](
        tk.gl(x), tk.gl(source), tk.gl(target), tk.gl(y.tensor), tile, 5, debug=True
    )
    assert (
        torch.equal(y.tensor.isnan(), expected.isnan())
        and same(y.tensor.nan_to_num(), expected.nan_to_num())
        and y.intact()
    )


@pytest.mark.parametrize(
    ("vector", "nbytes"), [(tk.sv(tk.fp32, 128), None), (tk.sv(tk.bf16, 176), None), (tk.sv(tk.fp32, 128), 48)], ids=str
)
@pytest.mark.parametrize("warps", [1, 4])
def test_raw_bytes(rng, vector, nbytes, warps):
    x, y = torch.from_numpy(rng.integers(0, 256, 1024)).to(torch.uint8).to(DEVICE), Canvas(1024, dtype=torch.uint8)
    cases.bytes_copy[(1,)](tk.gl(x), tk.gl(y.tensor), vector, nbytes or 0, nbytes is None, num_warps=warps, debug=True)
    moved = nbytes or vector.nbytes
    assert torch.equal(y.tensor[:moved], x[:moved]) and y.intact()
    assert torch.equal(y.tensor[moved:], Canvas(1024, dtype=torch.uint8).tensor[moved:])


@pytest.mark.parametrize(
    ("tile", "rows", "cols"),
    [
        (tk.st(tk.bf16, 64, 128), 32, 64),
        (tk.st(tk.bf16, 64, 64), 16, 16),
        (tk.st(tk.fp32, 32, 64), 8, 32),
        (tk.st(tk.fp8e4m3, 64, 128), 64, 32),
        # one for each of three consumers
        *((tk.st(tk.bf16, 3 * rows, cols), rows, cols) for rows in (16, 32, 64, 128) for cols in (64, 48)),
        (tk.st(tk.bf16, 112, 96), 16, 32),
        (tk.st(tk.fp32, 48, 80), 48, 16),
    ],
    ids=str,
)
def test_views(rng, tile, rows, cols):
    dtype = TORCH[tile.dtype]
    x, y = whole_numbers(rng, *tile.shape, dtype=dtype, high=8), Canvas(*tile.shape, dtype=dtype)
    cases.views[(1,)](tk.gl(x), tk.gl(y.tensor), tile, rows, cols, debug=True)
    assert same(y.tensor, x) and y.intact()


@pytest.mark.parametrize(
    ("tile", "rows", "cols"),
    [
        (tk.st(tk.bf16, 64, 128), 16, 128),
        (tk.st(tk.bf16, 64, 128), 32, 64),
        (tk.st(tk.bf16, 32, 208), 16, 208),
        (tk.st(tk.fp32, 32, 16), 16, 16),
        (tk.st(tk.bf16, 192, 64), 64, 64),
        (tk.st(tk.bf16, 96, 192), 32, 64),
        (tk.st(tk.fp32, 48, 48), 16, 48),
    ],
    ids=str,
)
def test_views_by_tma(rng, tile, rows, cols):
    """A view's columns lie as far apart as its tile's: those of a wide tile, and of one of several pieces."""
    dtype, part = TORCH[tile.dtype], tk.st(tile.dtype, rows, cols)
    x, y, z = (
        whole_numbers(rng, 2, *tile.shape, dtype=dtype),
        Canvas(*tile.shape, dtype=dtype),
        Canvas(*tile.shape, dtype=dtype),
    )
    cases.views_by_tma[(1,)](tk.gl(x, part), tk.gl(y.tensor), tk.gl(z.tensor, part), tile, rows, cols, debug=True)
    turned = x[1].reshape(tile.rows // rows, rows, tile.cols // cols, cols).flip(0, 2).reshape(tile.shape)
    assert same(y.tensor, turned) and same(z.tensor, turned) and y.intact() and z.intact()


@pytest.mark.parametrize(
    ("tile", "parts", "rows"),
    [
        (tk.st(tk.bf16, 64, 64), 4, 32),
        (tk.st(tk.fp32, 64, 32), 1, 16),
        (tk.st(tk.fp8e4m3, 128, 128), 2, 128),
        (tk.st(tk.bf16, 64, 16), 1, 16),
    ],
    ids=str,
)
def test_elements_in_parts(rng, tile, parts, rows):
    dtype, band = TORCH[tile.dtype], tk.st(tile.dtype, rows, tile.cols)
    x, y, z = (
        whole_numbers(rng, *tile.shape, dtype=dtype, high=8),
        Canvas(*tile.shape, dtype=dtype),
        Canvas(*tile.shape, dtype=dtype),
    )
    bands = tile.rows // rows
    cases.elements_in_parts[(1,)](
        tk.gl(x), tk.gl(y.tensor), tk.gl(z.tensor, band), parts, bands, tile, parts, rows, debug=True
    )
    doubled = (x.float() * 2).to(dtype)
    assert (
        same(y.tensor, doubled)
        and same(z.tensor, doubled.reshape(bands, rows, tile.cols).flip(0).reshape(tile.shape))
        and y.intact()
        and z.intact()
    )


# ---- products
# --------------------------------------------------------------------------------------------------------------------


def multiplied(a, b, kind):
    a = a.double().T if kind in ("AtB", "AtBt") else a.double()
    return a @ (b.double().T if kind in ("ABt", "AtBt") else b.double())


@pytest.mark.parametrize("p", [*cases.WGMMA, *cases.MMA_SYNC], ids=str)
def test_products(rng, p):
    shapes, dtype = p.shapes, TORCH[p.dtype]
    a, b = whole_numbers(rng, *shapes[0], dtype=dtype, high=4), whole_numbers(rng, *shapes[1], dtype=dtype, high=4)
    c = Canvas(*shapes[2], dtype=TORCH[p.sum])
    before = whole_numbers(rng, *shapes[2], dtype=TORCH[p.sum])
    c.tensor.copy_(before)
    cases.product[(1,)](tk.gl(a), tk.gl(b), tk.gl(c.tensor), *p.arguments, num_warps=p.warps, debug=True)
    assert same(c.tensor, before.double() + multiplied(a, b, p.kind)) and c.intact()


@pytest.mark.parametrize(
    ("p", "limit"),
    [
        (cases.Product("AB", 64, 176, 256), 1e-5),
        (cases.Product("ABt", 32, 64, 256), 1e-5),
        (cases.Product("ABt", 64, 64, 256, tk.fp32), 1e-3),
        (cases.Product("ABt", 64, 64, 256, tk.fp8e4m3), 5e-3),
    ],
    ids=str,
)
def test_products_of_random_numbers(rng, p, limit):
    a, b = (torch.from_numpy(rng.standard_normal(s)).to(DEVICE).to(TORCH[p.dtype]) for s in p.shapes[:2])
    c = Canvas(*p.shapes[2], dtype=torch.float32)
    c.tensor.zero_()
    cases.product[(1,)](tk.gl(a), tk.gl(b), tk.gl(c.tensor), *p.arguments, debug=True)
    assert relative_error(c.tensor, multiplied(a, b, p.kind)) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_product_of_views(rng, dtype):
    a, b, c = (
        whole_numbers(rng, 64, 128, dtype=dtype),
        whole_numbers(rng, 128, 64, dtype=dtype),
        Canvas(64, 64, dtype=torch.float32),
    )
    kind = next(k for k, v in TORCH.items() if v is dtype)
    cases.product_of_views[(1,)](tk.gl(a), tk.gl(b), tk.gl(c.tensor), kind, debug=True)
    assert same(c.tensor, a[:, 64:].double() @ b[64:].double()) and c.intact()


@pytest.mark.parametrize("rows", [64, 16])
def test_three_consumers_multiply_by_views_of_one_tile(rng, rows):
    """Of 64 rows by wgmma, of 16 by mma.sync."""
    a, b, c = whole_numbers(rng, 3 * rows, 64), whole_numbers(rng, 64, 64), Canvas(3 * rows, 64, dtype=torch.float32)
    cases.products_of_bands[(1,)](tk.gl(a), tk.gl(b), tk.gl(c.tensor), rows, debug=True)
    assert same(c.tensor, a.double() @ b.double().T) and c.intact()


@pytest.mark.parametrize(("dtype", "n"), [(tk.bf16, 64), (tk.bf16, 80), (tk.fp8e4m3, 96), (tk.fp32, 48)], ids=str)
def test_products_in_flight(rng, dtype, n):
    a, b, d = (whole_numbers(rng, rows, 64, dtype=TORCH[dtype], high=4) for rows in (64, n, n))
    c, e = Canvas(64, n, dtype=torch.float32), Canvas(64, n, dtype=torch.float32)
    cases.overlapped[(1,)](tk.gl(a), tk.gl(b), tk.gl(d), tk.gl(c.tensor), tk.gl(e.tensor), dtype, n, debug=True)
    ab, ad = multiplied(a, b, "ABt"), multiplied(a, d, "ABt")
    assert same(e.tensor, ad) and same(c.tensor, 2 * ab + ad + 1) and c.intact() and e.intact()


@pytest.mark.parametrize(("dtype", "n"), [(tk.bf16, 64), (tk.fp8e4m3, 32)], ids=str)
def test_a_product_in_the_registers_of_another(rng, dtype, n):
    a, b = (whole_numbers(rng, rows, 64, dtype=TORCH[dtype], high=4) for rows in (64, 2 * n))
    c = Canvas(64, n, dtype=torch.float32)
    cases.one_after_another[(1,)](tk.gl(a), tk.gl(b), tk.gl(c.tensor), dtype, n, debug=True)
    assert same(c.tensor, 2 * multiplied(a, b[:n], "ABt") + multiplied(a, b[n:], "ABt")) and c.intact()


@pytest.mark.parametrize("dtype", [tk.bf16, tk.fp16, tk.fp8e4m3, tk.fp32], ids=str)
@pytest.mark.parametrize("n", [48, 80, 176, 224])
def test_contiguous_tiles(rng, dtype, n):
    line = 128 // TORCH[dtype].itemsize
    a, b = (whole_numbers(rng, rows, line, dtype=TORCH[dtype], high=4) for rows in (64, 2 * n))
    c = Canvas(64, n, dtype=torch.float32)
    tile = tk.st(dtype, n, line, contiguous=True)
    cases.contiguous_ring[(1,)](tk.gl(a), tk.gl(b, tile), tk.gl(c.tensor), tile, "NK", debug=True)
    assert same(c.tensor, multiplied(a, b[:n], "ABt") + multiplied(a, b[n:], "ABt")) and c.intact()


@pytest.mark.parametrize("dtype", [tk.bf16, tk.fp16], ids=str)
@pytest.mark.parametrize("depth", [16, 64, 128])
def test_contiguous_tiles_of_columns(rng, dtype, depth):
    a, b = (
        whole_numbers(rng, 64, depth, dtype=TORCH[dtype], high=4),
        whole_numbers(rng, 2 * depth, 192, dtype=TORCH[dtype], high=4),
    )
    c = Canvas(64, 192, dtype=torch.float32)
    tile = tk.st(dtype, depth, 192, contiguous=True)
    cases.contiguous_ring[(1,)](tk.gl(a), tk.gl(b, tile), tk.gl(c.tensor), tile, "KN", debug=True)
    assert same(c.tensor, multiplied(a, b[:depth], "AB") + multiplied(a, b[depth:], "AB")) and c.intact()


@pytest.mark.parametrize("dtype", [tk.bf16, tk.fp8e4m3, tk.fp32], ids=str)
@pytest.mark.parametrize("depth", [64, 128, 700])
def test_an_accumulator_kept_in_flight(rng, dtype, depth):
    a, b = (whole_numbers(rng, 64, depth, dtype=TORCH[dtype], high=3) for _ in range(2))
    c = Canvas(64, 64, dtype=torch.float32)
    cases.kept_in_flight[(1,)](tk.gl(a), tk.gl(b), tk.gl(c.tensor), dtype, debug=True)
    assert same(c.tensor, multiplied(a, b, "ABt")) and c.intact()


@pytest.mark.parametrize("dtype", [tk.bf16, tk.fp8e4m3, tk.fp32], ids=str)
@pytest.mark.parametrize("rows", [64, 128])
def test_an_accumulator_that_begins_at_zero(rng, dtype, rows):
    a, b = (whole_numbers(rng, extent, 128, dtype=TORCH[dtype], high=3) for extent in (rows, 64))
    c = Canvas(rows, 64, dtype=torch.float32)
    cases.begun_at_zero[(1,)](tk.gl(a), tk.gl(b), tk.gl(c.tensor), rows, dtype, debug=True)
    assert same(c.tensor, multiplied(a, b, "ABt")) and c.intact()


# ---- roles and synchronisation
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize(("per", "registers"), [("role", None), ("warp", (232, 40))], ids=str)
def test_ring_of_roles_twenty_times_the_same(rng, stages, per, registers):
    a_tile, b_tile = tk.st(tk.bf16, 64, 64), tk.st(tk.bf16, 64, 96)
    a, b = (torch.from_numpy(rng.standard_normal(s)).to(DEVICE).bfloat16() for s in ((200, 1000), (1000, 192)))
    outputs = []
    for _ in range(on_gpu_or_simulated(20, 2)):
        c = Canvas(200, 192)
        cases.ring_gemm[(4, 2)](
            tk.gl(a, a_tile), tk.gl(b, b_tile), tk.gl(c.tensor, b_tile), 96, stages, per, registers, debug=True
        )
        outputs.append(c)
    assert all(c.intact() for c in outputs)
    assert relative_error(outputs[0].tensor, a.double() @ b.double()) < 5e-3
    assert all(torch.equal(c.tensor, outputs[0].tensor) for c in outputs)


def test_named_barriers_hand_over(rng):
    x, y = whole_numbers(rng, 8 * 128, dtype=torch.float32), Canvas(8 * 128, dtype=torch.float32)
    cases.conversation[(1,)](tk.gl(x), tk.gl(y.tensor), debug=True)
    assert same(y.tensor, x + torch.arange(8, device=DEVICE).repeat_interleave(128)) and y.intact()


@pytest.mark.parametrize("per", ["role", "warp"])
def test_blocks_of_a_cluster_arrive_at_each_other(per):
    y = Canvas(64, dtype=torch.int32)
    cases.neighbours[(2,)](tk.gl(y.tensor), 100, per, cluster_size=2, debug=True)
    assert y.tensor.view(4, 16)[:, 0].tolist() == [0, 1, 0, 1] and y.intact()


def test_marks_make_a_timeline():
    buffer = torch.zeros(20, 4, dtype=torch.int64, device=DEVICE)
    for _ in range(2):  # the second launch may start while the first is running
        cases.marks[(5,)](tk.gl(buffer), launch_pdl=True)
    events = tk.timeline(buffer, ("a", "b", "c", "d"))
    assert len(events) == 20 and sorted(e.row for e in events) == list(range(20))
    assert [e.nanoseconds for e in events] == sorted(e.nanoseconds for e in events) and events[0].nanoseconds == 0
    for e in events:
        assert e.label == "abcd"[e.row % 4] and 0 <= e.multiprocessor < multiprocessor_count()
        assert (e.warp == 0) == (e.row % 4 < 2) and e.warp < 8
    by_row = {e.row: e.nanoseconds for e in events}
    assert all(by_row[r] <= by_row[r + 1] for r in range(0, 20, 2))


@pytest.mark.parametrize(("blocks", "rows"), [(1, 1), (7, 3), (on_gpu_or_simulated(1000, 9), 16)])
def test_sums_of_many_blocks_in_memory_without_zeros(blocks, rows):
    for _ in range(on_gpu_or_simulated(50, 1)):
        y, words = Canvas(rows * 64, dtype=torch.float32), torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        cases.claimed_sums[(blocks,)](tk.gl(y.tensor.unflatten(0, (rows, 64))), tk.gl(words), rows, 64, debug=True)
        assert (y.tensor == blocks * (blocks + 1) // 2).all() and (words == 2).all() and y.intact()


def test_a_cooperative_launch(rng):
    x, y = whole_numbers(rng, 64, 64), Canvas(64, 64)
    cases.through_registers[(1, 1)](
        tk.gl(x), tk.gl(y.tensor), tk.rt(tk.bf16, 64, 64), 2, 0, launch_cooperative_grid=True
    )
    assert same(y.tensor, x) and y.intact()


def in_a_process(code):
    """Output of a process: a trap ends its CUDA context for good."""
    root = Path(__file__).resolve().parents[2]
    head = (
        "import torch\nimport tritonkittens.lang as tk\nfrom tests import cases_explicit as cases\ny = "
        "torch.ones(64, device='cuda')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + code], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "debug", "label"),
    [
        ("stuck", False, r"stuck waiting for godot at cases_explicit\.py:\d+ \(stuck\), phase 0, warp: 3"),
        (
            "stuck_plainly",
            "'report'",
            r"stuck waiting for a semaphore at cases_explicit\.py:\d+ \(stuck_plainly\), phase 0, warp: 0",
        ),
        ("stuck_plainly", True, None),
    ],
)
def test_a_wait_that_never_ends_traps_and_says_who(kernel, debug, label):
    done = in_a_process(
        f"cases.{kernel}[(1,)](tk.gl(y), debug={debug})\ntorch.cuda.synchronize()\nprint('not reached')"
    )
    assert done.returncode and "not reached" not in done.stdout, done
    assert re.search("launch failure|unspecified|illegal instruction", done.stderr), done.stderr[-2000:]
    assert label is None or re.search(label, done.stdout), done.stdout


@pytest.mark.gpu
def test_prints():
    done = in_a_process(
        "x = torch.arange(256, device='cuda').float().view(16, "
        "16)\ncases.printer[(2,)](tk.gl(x))\ntorch.cuda.synchronize()"
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"block *: 0\b", done.stdout)) == len(re.findall(r"block *: 1\b", done.stdout)) == 1, (
        done.stdout[:2000]
    )
    assert len(re.findall(r"largest *: 255\.0", done.stdout)) == 2
    assert re.search(r"pid \(1, 0, 0\) idx \( *15, *14\) tile *: 254\.0", done.stdout), done.stdout[-2000:]


def test_nothing_is_launched_after_a_refusal(rng):
    x, y = whole_numbers(rng, 64, 64, dtype=torch.float32), Canvas(64, 64, dtype=torch.float32)
    tile = tk.rt(tk.fp32, 64, 64)
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match="a tensor on cpu"):
            cases.through_registers[(1, 1)](tk.gl(x.cpu()), tk.gl(y.tensor), tile, 2, 0)
    with pytest.raises(tk.TileError, match="element types differ"):
        cases.through_registers[(1, 1)](tk.gl(x), tk.gl(y.tensor), tk.rt(tk.bf16, 64, 64), 2, 0)
    with pytest.raises(ValueError, match="TMA needs a multiple of 16 bytes"):
        shared = tk.st(tk.fp32, 32, 32)
        cases.tma_copy[(1, 1)](tk.gl(x[:, :33].contiguous(), shared), tk.gl(y.tensor, shared), shared, 2, "copy")
    synchronize()
    assert y.tensor.isnan().all() and y.intact()


@pytest.mark.parametrize("number", [0, 1, 5, 2**30 - 1])
def test_what_the_compiler_cannot_see_through(number):
    out = torch.full((4,), 7, dtype=torch.int32, device=DEVICE)
    cases.zeros_and_branch[(1,)](out, number)
    synchronize()
    assert out.tolist() == [0, 0, 1 if number % 2 else 7, 7]
