"""Conflict degrees of kernels' own accesses, against the formulas of `inspect` and against banks counted one lane at a
time."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.util import poison
from tritonkittens import sim
from tritonkittens.inspect import _tiles, _ttgir
from tritonkittens.sim.bank_conflicts import bank_conflicts

ROWS, COLUMNS = 64, 64


@gluon.jit
def through_shared(
    x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WRITE: gl.constexpr, READ: gl.constexpr, SHARED: gl.constexpr
):
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, WRITE))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, WRITE))[None, :]
    tile = gl.allocate_shared_memory(x.dtype.element_ty, [ROWS, COLUMNS], SHARED)
    tile.store(gl.load(x + rows * COLUMNS + columns))
    value = tile.load(READ)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, READ))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))[None, :]
    gl.store(out + rows * COLUMNS + columns, value)


def swizzled(phases):
    """Rows of 128 bytes whose 16-byte chunks are exchanged by row: `phases` 1, 2, 4, 8 are no swizzle and those of 32,
    64 and 128 bytes."""
    return gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=phases, order=[1, 0])


# a warp's access: 8 rows of 16 bytes
FRAGMENT = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
COLUMN = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [1, 0])  # a warp's access: one element of 32 rows
ROW = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a lane's access: 16 bytes, a quarter warp's one row


def accesses(rng, shared, write=ROW, read=FRAGMENT, dtype=torch.bfloat16, shape=(ROWS, COLUMNS)):
    x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)
    out = poison(torch.empty_like(x))
    launch = sim.run(through_shared, (1,), x, out, *shape, write, read, shared, num_warps=4)
    assert torch.equal(x, out)
    return bank_conflicts(launch), launch


def formula(shared):
    if isinstance(shared, gl.NVMMASharedLayout):
        layout = _ttgir.Layout(
            "nvmma_shared", {"swizzlingByteWidth": str(shared.swizzle_byte_width), "transposed": "false"}
        )
    else:
        fields = {
            "vec": str(shared.vec),
            "perPhase": str(shared.per_phase),
            "maxPhase": str(shared.max_phase),
            "order": "[1, 0]",
        }
        layout = _ttgir.Layout("swizzled_shared", fields)
    return _tiles.bank_conflicts(layout, (ROWS, COLUMNS), 16)


@pytest.mark.parametrize(
    "phases, degree", [(1, 8), (2, 4), (4, 2), (8, 1)], ids=["naive", "32 bytes", "64 bytes", "128 bytes"]
)
def test_the_four_swizzles_of_a_row_major_tile(rng, phases, degree):
    (stored, loaded), launch = accesses(rng, swizzled(phases))
    assert (stored.access, stored.width, stored.degree, stored.wavefronts, stored.ideal) == (
        "local_store",
        16,
        1,
        64,
        64,
    )
    assert (loaded.access, loaded.width, loaded.degree) == ("local_load", 4, degree) and (
        loaded.wavefronts,
        loaded.ideal,
    ) == (64 * degree, 64)
    assert loaded.line.startswith("test_bank_conflicts.py:") and "value = tile.load(READ)" in loaded.line
    assert (
        loaded.buffer == "tile"
        and loaded.role == "kernel"
        and f"maxPhase = {phases}" in loaded.layout
        and "nvidia_mma" in loaded.registers
    )
    text = str(loaded)
    assert "4 bytes a lane" in text and (f"{degree}-way conflicts" if degree > 1 else "no conflicts") in text
    column = accesses(rng, swizzled(phases), read=COLUMN)[0][1]
    assert (degree, column.degree) == (
        formula(swizzled(phases)).fragment,
        formula(swizzled(phases)).column,
    ) and column.width == 2
    # modelled time is the wavefronts'
    step = next(s for steps in launch.program.steps.values() for s in steps if s.op.name == "ttg.local_load")
    assert step.cost.load == loaded.wavefronts and step.cost.unit == "shared memory"


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_tma_layouts(rng, swizzle):
    shared = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
    (stored, loaded), launch = accesses(rng, shared, write=FRAGMENT, read=COLUMN)
    assert (stored.degree, loaded.degree) == (formula(shared).fragment, formula(shared).column)
    program = launch.program
    assert bank_conflicts(program) == [stored, loaded]


def counted(shared, layout, shape, nbytes, width, flat):
    """The degree by hand: every lane's words put into their banks, a group of lanes at a time. `flat`: the byte offset
    of an element."""
    worst = 0
    per_thread = np.array(layout.size_per_thread)
    assert per_thread[1] * nbytes == width and per_thread[0] == 1
    for warp_rows in range(layout.warps_per_cta[0]):
        groups = 32 * width // 128 or 1
        down, across = layout.threads_per_warp
        lanes = [(lane // across + warp_rows * down, lane % across * per_thread[1]) for lane in range(32)]
        for g in range(groups):
            banks = [set() for _ in range(32)]
            for row, column in lanes[g * 32 // groups : (g + 1) * 32 // groups]:
                start = flat(row % shape[0], column % shape[1])
                for byte in range(start, start + width):
                    banks[byte // 4 % 32].add(byte // 4)
            worst = max(worst, *map(len, banks))
    return worst


WIDTHS = [
    (torch.float32, 4),
    (torch.float32, 8),
    (torch.float32, 16),
    (torch.bfloat16, 4),
    (torch.bfloat16, 16),
    (torch.int8, 16),
    (torch.float64, 8),
]


@pytest.mark.parametrize("dtype, width", WIDTHS)
def test_any_width_against_counting(rng, dtype, width):
    nbytes = dtype.itemsize
    across = int(rng.choice([1, 2, 4, 8]))
    read = gl.BlockedLayout([1, width // nbytes], [32 // across, across], [4, 1], [1, 0])
    vec, per_phase, max_phase = (
        width // nbytes * int(rng.choice([1, 2])),
        int(rng.choice([1, 2])),
        int(rng.choice([1, 2, 4])),
    )
    shape = (128, 64)
    print("across", across, "vec", vec, "per_phase", per_phase, "max_phase", max_phase)
    chunks = shape[1] // vec  # of a row: a swizzle of more phases than a row has chunks begins again with the first

    def flat(row, column):
        return (
            row * shape[1] + ((column // vec) ^ (row // per_phase % max_phase % chunks)) * vec + column % vec
        ) * nbytes

    shared = gl.SwizzledSharedLayout(vec=vec, per_phase=per_phase, max_phase=max_phase, order=[1, 0])
    (_, loaded), _ = accesses(rng, shared, read=read, dtype=dtype, shape=shape)
    # registers of a row beyond the layout's own may widen an access where its vectors adjoin in memory; the counted
    # width is the one chosen
    assert loaded.width >= width
    if loaded.width == width:
        assert loaded.degree == counted(shared, read, shape, nbytes, width, flat)


def test_padding_and_transposed_reads(rng):
    """A tile padded by 16 bytes a row has no conflicts along columns of 16 bytes; read across rows, single elements
    meet."""
    padded = gl.PaddedSharedLayout.with_identity_for([[64, 8]], [ROWS, COLUMNS], [1, 0])
    assert accesses(rng, padded)[0][1].degree == 1
    down = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    (stored, loaded), _ = accesses(rng, swizzled(1), read=down)
    assert stored.degree == 1 and loaded.width == 2
    # lanes: rows 0, 8, …, 56 of two neighbouring columns a word, and of four columns: 8 rows of 128 bytes begin at one
    # bank
    assert loaded.degree == 8


@triton.jit
def product(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + i[None, :])
    y = tl.load(b + i[:, None] * N + i[None, :])
    tl.store(c + i[:, None] * N + i[None, :], tl.dot(x, y))


def test_a_plain_kernel_and_what_is_refused(rng):
    """What the compiler chooses for a product's operands has no conflicts, and the report says which line caused it."""
    a, b = (torch.from_numpy(rng.standard_normal((64, 64)).astype(np.float32)).half() for _ in range(2))
    c = poison(torch.empty(64, 64))
    with sim.device("sm_80") as device:
        product[(1,)](a, b, c, 64)
    assert torch.allclose(c, a.float() @ b.float(), atol=1e-2)
    found = bank_conflicts(device.launches[0])
    assert (
        found
        and {f.access for f in found} <= {"local_alloc", "local_load"}
        and all("test_bank_conflicts.py" in f.line for f in found)
    )
    assert all(f.degree is not None and f.wavefronts >= f.ideal for f in found)
    assert max(f.degree for f in found if f.access == "local_load" and f.width == 4) == 1
    with pytest.raises(TypeError, match=re.escape("not JITFunction: a kernel's layouts exist once it is compiled")):
        bank_conflicts(product)
