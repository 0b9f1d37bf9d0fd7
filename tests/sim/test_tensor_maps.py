"""Tensor maps in the simulator: the numbers of element types that descriptors made by a kernel carry, and coordinates
that hardware does not take."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tma as blackwell_tma
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import tritonkittens.lang as tk
from tritonkittens import sim
from tritonkittens.inline_ptx import barrier, shared, tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.inline_ptx.tensormap import ELEMENT_TYPES
from tritonkittens.sim import tensormaps
from tritonkittens.sim.values import TensorMap

from ..gpu.test_ptx_sync_gpu import get, thread
from ..util import poison


@pytest.fixture(autouse=True)
def allocator():
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))


def findings(arch, kernel, *arguments, **options):
    with sim.device(arch, raise_findings=False) as device:
        kernel[(1,)](*arguments, **options)
    return device.launches[-1].findings


# ---- element types


@triton.jit
def added(X, Y, ROWS, COLS, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(X, [ROWS, COLS], [COLS, 1], [M, N])
    target = tl.make_tensor_descriptor(Y, [ROWS, COLS], [COLS, 1], [M, N])
    for column in range(0, COLS, N):
        target.atomic_add([0, column], source.load([0, column]))


@triton.jit
def copied(X, Y, ROWS, COLS, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(X, [ROWS, COLS], [COLS, 1], [M, N])
    target = tl.make_tensor_descriptor(Y, [ROWS, COLS], [COLS, 1], [M, N])
    for column in range(0, COLS, N):
        target.store([0, column], source.load([0, column]))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.int8,
        torch.float8_e5m2,
    ],
)
def test_descriptors_made_in_a_kernel_move_and_add_elements_of_their_dtype(rng, dtype):
    adds = dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32)
    for rows, columns in ((64, 64), (37, 48)):
        x = torch.from_numpy(rng.integers(-20, 20, (rows, columns))).to(dtype)
        y = poison(torch.empty_like(x))
        for kernel in (copied, added) if adds else (copied,):
            assert not findings("sm_90a", kernel, x, y, rows, columns, 64, 16)
        assert torch.equal(y.double(), x.double() * (2 if adds else 1)), (rows, columns)


@gluon.jit
def padded_bytes(X, Y, COLS, column):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2, fp4_padded=True)
    descriptor = blackwell_tma.make_tensor_descriptor(X, [64, COLS], [128, 1], [64, 64], LAYOUT)
    tile = gl.allocate_shared_memory(gl.uint8, [64, 64], LAYOUT)
    arrived = mbarrier.allocate_mbarrier()
    mbarrier.init(arrived, 1)
    mbarrier.expect(arrived, 64 * 64)
    blackwell_tma.async_load(descriptor, [0, column], arrived, tile)
    mbarrier.wait(arrived, 0)
    REGISTERS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, REGISTERS)), gl.arange(0, 64, gl.SliceLayout(0, REGISTERS))
    gl.store(Y + rows[:, None] * 64 + columns[None, :], tile.load(REGISTERS))


def test_a_padded_fp4_descriptor_made_in_a_kernel_ends_where_its_tensor_ends(rng):
    x = torch.from_numpy(rng.integers(1, 256, (64, 128)).astype(np.uint8))
    for columns, column in ((128, 0), (100, 64)):
        y, expected = torch.empty(64, 64, dtype=torch.uint8), torch.zeros(64, 64, dtype=torch.uint8)
        expected[:, : columns - column] = x[:, column : min(columns, column + 64)]
        assert not findings("sm_100a", padded_bytes, x, y, columns, column, num_warps=4) and torch.equal(y, expected)
    (finding,) = findings("sm_100a", padded_bytes, x, y, 128, 16, num_warps=4)
    assert finding.kind == "misaligned" and "the last is 16 bytes, not a multiple of 64" in finding.message


def test_element_types_are_counted_as_ptx_counts_them():
    numbers = {
        "float16": 6,
        "float32": 7,
        "float32_ftz": 8,
        "float64": 9,
        "bfloat16": 10,
        "tfloat32": 11,
        "tfloat32_ftz": 12,
    }
    assert {name: ELEMENT_TYPES.index(name) for name in numbers} == numbers
    before = TensorMap(0, "f32", 4, (8, 16), (64, 4), (8, 16))
    for number, name in enumerate(ELEMENT_TYPES):
        after = tensormaps.changed(before, "elemtype", 0, number)
        assert (after.element, after.nbytes) == tensormaps.FORMATS[name] and after.strides == (64, after.nbytes)
    with pytest.raises(ValueError, match="elemtype with 14"):
        tensormaps.changed(before, "elemtype", 0, 14)


# ---- raw copies


@triton.jit
def raw(MAP, SOURCE, column, KIND: tl.constexpr, FIELD: tl.constexpr, VALUE: tl.constexpr):
    """A box of 32 × 32 words, by a map in memory of which one field is replaced."""
    tile, arrived = shared.allocate(4096, 128), shared.allocate(8, 8)
    t = thread()
    if FIELD is not None:
        if t == 0:
            asm("tensormap.replace.tile." + FIELD + ".global.b1024.b32 [$0], " + VALUE + ";", ("l",), [MAP])
            tma.fence_tensormap_release()
    barrier.sync(8, 128)
    tma.fence_tensormap_acquire(MAP, "sys")
    for i in range(8):
        shared.store(tile + 4 * (i * 128 + t), get(SOURCE + i * 128 + t), tl.int32, "thread")
    tma.fence_proxy_async()
    barrier.sync(8, 128)
    if KIND == "load":
        tma.load_tensor(tile, MAP, (column, 0), arrived, issuer="cta")
    elif KIND == "store":
        tma.store_tensor(MAP, (column, 0), tile, issuer="cta")
    else:
        tma.reduce_tensor(MAP, (column, 0), tile, KIND, issuer="cta")
    tma.commit_group()
    tma.wait_group()


def raw_copy(target, source, column, kind, field=None, value=None):
    with sim.device("sm_90a", raise_findings=False) as device:
        shape, stride = target.shape[::-1], (target.stride(0) * target.itemsize,)
        data = torch.frombuffer(
            bytearray(tma.encode_tiled(target.data_ptr(), target.dtype, shape, stride, (32, 32))), dtype=torch.uint8
        )
        place = torch.zeros(256, dtype=torch.uint8)
        place = place[-place.data_ptr() % 128 :][:128].copy_(data)
        raw[(1,)](place, source.view(torch.int32), column, kind, field, value, num_warps=4)
    return device.launches[-1].findings


def test_a_replaced_element_type_is_the_one_that_a_reduction_adds_in(rng):
    old, new = (torch.from_numpy(rng.integers(-9, 9, (32, 64))).float() for _ in range(2))
    target, source = old.clone(), new[:, :32].contiguous()
    assert not raw_copy(target.view(torch.int32), source, 0, "add", "elemtype", "7")
    assert torch.equal(target[:, :32], old[:, :32] + source) and torch.equal(target[:, 32:], old[:, 32:])


# ---- coordinates


@triton.jit
def one_copy(X, Y, column, row, KIND: tl.constexpr):
    x = tl.make_tensor_descriptor(X, [16, 64], [64, 1], [16, 32])
    y = tl.make_tensor_descriptor(Y, [16, 64], [64, 1], [16, 32])
    rows = tl.make_tensor_descriptor(X, [16, 64], [64, 1], [1, 32])
    out = tl.make_tensor_descriptor(Y, [16, 64], [64, 1], [1, 32])
    if KIND == "load":
        y.store([0, 0], x.load([0, column]))
    elif KIND == "store":
        y.store([0, column], x.load([0, 0]))
    elif KIND == "add":
        y.atomic_add([0, column], x.load([0, 0]))
    elif KIND == "gather":
        y.store([0, 0], rows.gather(tl.arange(0, 16) + row, column))
    else:
        out.scatter(x.load([0, 0]), tl.arange(0, 16) + row, column)


@pytest.mark.parametrize(
    "arch, kind",
    [
        (a, k)
        for a in ("sm_90a", "sm_100a")
        for k in ("load", "store", "add", "gather", "scatter")
        if a == "sm_100a" or k not in ("gather", "scatter")
    ],
)
def test_an_innermost_coordinate_off_16_bytes_is_found_in_every_kind_of_copy(rng, arch, kind):
    x, y = torch.from_numpy(rng.standard_normal((16, 64), np.float32)), torch.zeros(16, 64)
    assert not findings(arch, one_copy, x, y, 4, 0, kind)
    start = 0 if kind in ("load", "gather") else 4
    assert torch.equal(y[:, start : start + 32], x[:, 4 - start : 36 - start]) and not y[:, start + 32 :].any()
    before = y.clone()
    (finding,) = findings(arch, one_copy, x, y, 5, 0, kind)
    assert (
        finding.kind == "misaligned"
        and "[0, 5]: the last is 20 bytes, not a multiple of 16 (illegal instruction)" in finding.message
    )
    assert torch.equal(y, before)


def test_a_scatter_to_negative_rows_is_found(rng):
    (finding,) = findings("sm_100a", one_copy, torch.zeros(16, 64), torch.zeros(16, 64), 0, -1, "scatter")
    assert (
        finding.kind == "out-of-bounds"
        and "TMA scatter" in finding.message
        and "must not be negative" in finding.message
    )


@pytest.mark.parametrize("kind", ["load", "store", "add", "max"])
def test_an_innermost_coordinate_off_16_bytes_is_found_in_raw_copies(kind):
    target, source = torch.zeros(32, 64, dtype=torch.int32), torch.ones(32, 32)
    (finding,) = raw_copy(target, source, 2, kind)
    assert (
        finding.kind == "misaligned"
        and "[0, 2]: the last is 8 bytes, not a multiple of 16" in finding.message
        and not target.any()
    )


@tk.kernel
@triton.jit
def im2col_load(X, channel, TILE: tl.constexpr):
    tile, arrived = tk.allocate(TILE), tk.semaphores(1)
    tk.fence_async()
    tk.sync()
    tk.expect(arrived[0], tile)
    tk.load_im2col_async(tile, X, (0, 0, 0, channel), (0, 0), arrived[0])
    tk.wait(arrived[0], 0)


def test_a_channel_off_16_bytes_is_found_in_im2col_loads():
    tile, x = tk.st(tk.bf16, 64, 64), torch.zeros(2, 8, 8, 128, dtype=torch.bfloat16)
    for channel, kinds in ((64, []), (8, []), (4, ["misaligned"])):
        found = findings("sm_90a", im2col_load, tk.im2col(x, tile, (0, 0), (0, 0)), channel, tile)
        assert [f.kind for f in found] == kinds, channel
