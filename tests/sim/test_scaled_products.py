"""tcgen05 in the simulator: operands of scaled products are read as the instruction reads them, and loads of tensor
memory that reduce rows."""

import numpy as np
import pytest
import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tritonkittens import sim
from tritonkittens.sim.numbers import decode

from ..util import poison

TYPES = {"u8": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CODES = {"e4m3": "f8E4M3FN", "e5m2": "f8E5M2"}
# the linear form of an fp4_padded tile of 128 x 64 bytes: the fourth bit of an offset selects no element
LINEAR_PADDED = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 0], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
        + [[8, 0], [16, 0], [32, 0], [64, 0]],
        alignment=1024,
    )
)


@gluon.jit
def filled(X, BYTES: gl.constexpr, PADDED: gl.constexpr):
    """A tile of shared memory with 128 rows of X. Where PADDED is 2, its layout has the linear form."""
    WIDE: gl.constexpr = BYTES * (2 if PADDED else 1)
    SHARED: gl.constexpr = (
        LINEAR_PADDED
        if PADDED == 2
        else gl.NVMMASharedLayout(
            swizzle_byte_width=128 if WIDE >= 128 else 64, element_bitwidth=8, rank=2, fp4_padded=PADDED
        )
    )
    L: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    rows, columns = gl.arange(0, 128, gl.SliceLayout(1, L)), gl.arange(0, BYTES, gl.SliceLayout(0, L))
    tile = gl.allocate_shared_memory(X.dtype.element_ty, [128, BYTES], SHARED)
    tile.store(gl.load(X + rows[:, None] * BYTES + columns[None, :]))
    return tile


@gluon.jit
def scales_of(S, COLUMNS: gl.constexpr):
    tile = allocate_tensor_memory(S.dtype.element_ty, [128, COLUMNS], TensorMemoryScalesLayout())
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    rows, columns = gl.arange(0, 128, gl.SliceLayout(1, L)), gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    tile.store(gl.convert_layout(gl.load(S + rows[:, None] * COLUMNS + columns[None, :]), tile.get_reg_layout()))
    return tile


@gluon.jit
def scaled(A, SA, B, SB, C, FORMATS: gl.constexpr, BYTES: gl.constexpr, PADDED: gl.constexpr, COLUMNS: gl.constexpr):
    a, b = filled(A, BYTES[0], PADDED[0]), filled(B, BYTES[1], PADDED[1])
    accumulator = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    arrived = mbarrier.allocate_mbarrier()
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    tcgen05_mma_scaled(
        a,
        b.permute((1, 0)),
        accumulator,
        scales_of(SA, COLUMNS),
        scales_of(SB, COLUMNS),
        FORMATS[0],
        FORMATS[1],
        use_acc=False,
    )
    tcgen05_commit(arrived)
    mbarrier.wait(arrived, 0)
    L: gl.constexpr = accumulator.get_reg_layout()
    rows, columns = gl.arange(0, 128, gl.SliceLayout(1, L)), gl.arange(0, 128, gl.SliceLayout(0, L))
    gl.store(C + rows[:, None] * 128 + columns[None, :], accumulator.load())


def launch(rng, tiles, formats, padded, block, scale="u8"):
    """What the kernel leaves, what the bits are in the declared formats, and what was found; K is 128."""
    data, exact = [], []
    for tile, form in zip(tiles, formats):
        codes = rng.integers(0, 256, (128, 64 if form == "e2m1" else 128)).astype(np.uint8)
        if tile != "u8" or form != "e2m1":
            codes &= 0xBB  # no NaN and no infinity in either 8-bit format
        if form == "e2m1":
            numbers = decode("e2m1", np.stack([codes & 15, codes >> 4], -1).reshape(128, 128))
        else:
            numbers = decode(CODES[form], codes)
        low, high = (100, 127) if scale == "e4m3" else (122, 132)
        factors = rng.integers(low, high, (128, 128 // block)).astype(np.uint8)
        nvfp4 = scale == "e4m3" and formats == ("e2m1", "e2m1")
        exact.append(
            numbers.astype(np.float64) * np.repeat(decode("f8E4M3FN" if nvfp4 else "ue8m0", factors), block, 1)
        )
        data += [torch.from_numpy(codes).view(TYPES[tile]), torch.from_numpy(factors).view(TYPES[scale])]
    c = poison(torch.empty(128, 128))
    with sim.device("sm_100a", raise_findings=False) as device:
        scaled[(1,)](
            *data, c, formats, tuple(64 if f == "e2m1" else 128 for f in formats), padded, 128 // block, num_warps=4
        )
    return c.numpy(), exact[0] @ exact[1].T, device.launches[-1].findings


@pytest.mark.parametrize(
    ("tiles", "formats", "padded", "block", "scale"),
    [
        (("e4m3", "e4m3"), ("e4m3", "e5m2"), (False, False), 32, "u8"),  # B's bits are taken for e5m2
        (("e5m2", "u8"), ("e4m3", "e5m2"), (False, False), 32, "u8"),
        (("e4m3", "e5m2"), ("e2m1", "e2m1"), (False, False), 32, "u8"),
        (("u8", "e4m3"), ("e2m1", "e5m2"), (True, False), 32, "u8"),
        (("e5m2", "e5m2"), ("e5m2", "e2m1"), (False, True), 32, "u8"),
        (("u8", "e4m3"), ("e2m1", "e4m3"), (2, False), 32, "u8"),
        (("u8", "u8"), ("e2m1", "e2m1"), (False, False), 16, "e4m3"),
        (("u8", "u8"), ("e4m3", "e4m3"), (False, False), 32, "e4m3"),  # kind::mxf8f6f4 has no scales but ue8m0
    ],
)
def test_scaled_operands_are_read_in_the_formats_of_the_instruction(rng, tiles, formats, padded, block, scale):
    got, exact, found = launch(rng, tiles, formats, padded, block, scale)
    assert not found and np.linalg.norm(got - exact) <= 1e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("formats", "padded", "block", "scale", "kind", "message"),
    [
        (
            ("e2m1", "e4m3"),
            (False, False),
            32,
            "u8",
            "illegal",
            "operand A: kind::mxf8f6f4 reads e2m1 from a tile that is fp4_padded; this one's",
        ),
        (
            ("e2m1", "e2m1"),
            (False, True),
            32,
            "u8",
            "illegal",
            "operand B: kind::mxf4 reads e2m1 without padding, and the tile's layout is fp4_padded",
        ),
        (
            ("e2m1", "e2m1"),
            (2, False),
            32,
            "u8",
            "illegal",
            "operand A: kind::mxf4 reads e2m1 without padding, and the tile's layout is fp4_padded",
        ),
        (
            ("e4m3", "e5m2"),
            (True, False),
            32,
            "u8",
            "illegal",
            "operand A: kind::mxf8f6f4 reads f8E4M3FN without padding",
        ),
        (
            ("e4m3", "e4m3"),
            (False, False),
            16,
            "u8",
            "illegal",
            "scales A: kind::mxf8f6f4 has no scales of ue8m0 for 16 numbers each",
        ),
        (
            ("e2m1", "e2m1"),
            (False, False),
            32,
            "e4m3",
            "illegal",
            "scales A: kind::mxf4nvf4 has no scales of ue4m3 for 32 numbers each",
        ),
        (
            ("e2m1", "e2m1"),
            (False, False),
            16,
            "u8",
            "unknown",
            "scales A of integers, one for 16 numbers, are ue5m3 for the compiler",
        ),
    ],
)
def test_a_scaled_product_that_no_instruction_computes_is_found(rng, formats, padded, block, scale, kind, message):
    got, _, (finding,) = launch(rng, ("u8", "u8"), formats, padded, block, scale)
    assert (
        finding.kind == kind
        and message in finding.message
        and "tcgen05_mma_scaled" in str(finding)
        and np.isnan(got).all()
    )


# ---- loads that reduce

NONE, ALL = ir.PROPAGATE_NAN.NONE, ir.PROPAGATE_NAN.ALL


@gluon.jit
def extremes(X, Y, M, MAX: gl.constexpr, ABS: gl.constexpr, NAN: gl.constexpr, COLUMNS: gl.constexpr):
    t = allocate_tensor_memory(X.dtype.element_ty, [128, COLUMNS], TensorMemoryLayout([128, COLUMNS], col_stride=1))
    L: gl.constexpr = t.get_reg_layout()
    rows, columns = gl.arange(0, 128, gl.SliceLayout(1, L)), gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    places = rows[:, None] * COLUMNS + columns[None, :]
    t.store(gl.load(X + places))
    if MAX:
        values, reduced = t.load_max(abs=ABS, propagate_nan=NAN)
    else:
        values, reduced = t.load_min(abs=ABS, propagate_nan=NAN)
    gl.store(Y + places, gl.convert_layout(values, L))
    gl.store(M + rows, gl.convert_layout(reduced, gl.SliceLayout(1, L)))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("nan", [NONE, ALL])
def test_loads_of_tensor_memory_reduce_rows(rng, largest, absolute, nan):
    x = torch.from_numpy(rng.standard_normal((128, 64), np.float32))
    x[::5, 7], x[3] = float("nan"), float("nan")
    x[4] = torch.tensor([0.0, -0.0]).repeat(32)
    y, m = poison(torch.empty_like(x)), torch.full((128,), 99.0)
    with sim.device("sm_103a"):
        extremes[(1,)](x, y, m, largest, absolute, nan, 64, num_warps=4)
    shown = x.abs() if absolute else x
    fill = -float("inf") if largest else float("inf")
    numbers = shown.nan_to_num(fill, float("inf"), -float("inf"))
    expected = numbers.amax(1) if largest else numbers.amin(1)
    missing = x.isnan().any(1) if nan == ALL else x.isnan().all(1)
    expected[missing] = float("nan")
    assert torch.equal(y.view(torch.int32), x.view(torch.int32)) and np.array_equal(
        m.numpy(), expected.numpy(), equal_nan=True
    )
    assert torch.signbit(m[4]) == (not largest and not absolute)  # -0 is less than +0


def test_a_reducing_load_that_no_instruction_does_is_found(rng):
    for arch, dtype in (("sm_100a", torch.float32), ("sm_103a", torch.int32)):
        x, y, m = (torch.zeros(shape, dtype=dtype) for shape in ((128, 64), (128, 64), 128))
        with pytest.raises(
            sim.SimulationError,
            match=r"illegal: tcgen05.ld.red of .*: the instruction belongs to sm_103 and takes f32(.|\n)*t.load_max",
        ):
            with sim.device(arch):
                extremes[(1,)](x, y, m, True, False, NONE, 64, num_warps=4)


@gluon.jit
def unwritten(M):
    t = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout([128, 64], col_stride=1))
    L: gl.constexpr = t.get_reg_layout()
    values, reduced = t.load_max()
    gl.store(M + gl.arange(0, 128, gl.SliceLayout(1, L)), gl.convert_layout(reduced, gl.SliceLayout(1, L)))


def test_a_reducing_load_of_memory_that_was_never_written_is_found():
    with pytest.raises(sim.SimulationError, match="uninitialized"), sim.device("sm_103a"):
        unwritten[(1,)](torch.zeros(128), num_warps=4)
