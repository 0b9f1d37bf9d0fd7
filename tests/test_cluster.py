"""Multicast loads and static layouts compile to what they should, and say what is missing."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests import cases_cluster as cases
from tests.util import explored, meta, poison, refused
from tritonkittens import sim
from tritonkittens.inline_ptx import cluster


@pytest.mark.parametrize(("cols", "copies"), [(64, 1), (128, 2), (96, 2), (16, 1)])
def test_a_multicast_load_is_one_copy_for_each_swizzled_block(cols, copies):
    tile = tk.st(tk.bf16, 64, cols)
    kernel = cases.shared_loads.compile(tk.gl(meta(128, cols), tile), tk.gl(meta(256, cols)), tile, cluster_size=2)
    assert kernel.asm["ptx"].count(".multicast::cluster") == copies and kernel.metadata.num_ctas == 2


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("warps", [1, 2, 4])
def test_roles_of_a_cluster_meet_before_they_begin_and_before_they_end(arch, warps):
    """Every launched warp arrives twice, those too that fill up a warpgroup: 3, 2 or none."""
    tile = tk.st(tk.bf16, 64, 64)
    g, y = tk.gl(meta(128, 64), tile), tk.gl(meta(256, 64))
    text = cases.shared_loads_of_roles.compile(g, y, tile, warps, False, False, True, cluster_size=2, arch=arch).asm[
        "ttgir"
    ]
    roles = 2 + {1: 2, 2: 1, 4: 0}[warps]
    assert text.count("barrier.cluster.arrive.release") == text.count("barrier.cluster.wait.acquire") == 2 * roles


@pytest.mark.parametrize("where", ["before", "after", "inside"])
def test_a_barrier_of_the_cluster_beside_roles_is_refused(where):
    tile = tk.st(tk.bf16, 64, 64)
    g, y = tk.gl(meta(128, 64), tile), tk.gl(meta(256, 64))
    with pytest.raises(
        tk.TileError,
        match=rf"cluster_sync {where} roles: .* would wait forever; write tk.specialize\(..., cluster_sync=True\)",
    ):
        if where == "inside":
            meets_inside.compile(y, cluster_size=2)
        else:
            cases.shared_loads_of_roles.compile(
                g, y, tile, 4, where == "before", where == "after", False, cluster_size=2
            )


@triton.jit
def syncs(Y):
    tk.cluster_sync()


@triton.jit
def only_stores(Y):
    tk.store(Y, tk.zero(tk.rt(tk.bf16, 64, 64)), (0, 0))


@tk.kernel
@triton.jit
def meets_inside(Y):
    tk.specialize(((only_stores, (Y,)), (syncs, (Y,))), warps=(4, 4))


@tk.kernel
@triton.jit
def meets_by_shims(Y):
    cluster.arrive()
    cluster.wait()
    tk.specialize(((only_stores, (Y,)), (only_stores, (Y,))), warps=(4, 2))


def test_a_barrier_of_the_cluster_that_roles_miss_names_them():
    """Shims are not refused; the simulator says whose warps the barrier counts."""
    with sim.device("sm_90a", raise_findings=False) as device:
        meets_by_shims[(1,)](tk.gl(torch.zeros(64, 64).bfloat16()), cluster_size=2)
    (found,) = device.launches[0].findings
    assert found.kind == "deadlock" and "counts the warps of roles that are not running too" in str(found)
    assert "rank 1 (4 of 8 warps have arrived; not running: only_stores1 (2), partition1 (2))" in str(found), found


def test_a_static_layout_makes_extents_constants():
    x, y = meta(48, 64, dtype=torch.float32), meta(16, 64, dtype=torch.float32)
    three = cases.fixed_sum.compile(tk.gl(x, static=True), tk.gl(y)).asm["ptx"]
    two = cases.fixed_sum.compile(tk.gl(meta(32, 64, dtype=torch.float32), static=True), tk.gl(y)).asm["ptx"]
    assert three.count("ld.global") == 3 * two.count("ld.global") // 2 > 0
    with pytest.raises(Exception, match="constexpr"):
        cases.fixed_sum.compile(tk.gl(x), tk.gl(y))


def test_some_dimensions_of_a_layout_are_static():
    """The kernel is the same for other columns and other rows' distance, and needs no loop counter for its rows."""
    y = meta(16, 64, dtype=torch.float32)
    counts = [
        cases.fixed_sum.compile(tk.gl(meta(rows, cols, dtype=torch.float32), static=0), tk.gl(y))
        .asm["ptx"]
        .count("ld.global")
        for rows, cols in ((48, 64), (48, 128), (32, 64))
    ]
    assert counts[0] == counts[1] == 3 * counts[2] // 2 > 0
    with pytest.raises(Exception, match="constexpr"):
        cases.fixed_sum.compile(tk.gl(meta(48, 64, dtype=torch.float32), static=-1), tk.gl(y))


@pytest.mark.parametrize("static", [0, (0,), -2, True])
def test_static_layouts_inside_tuples(static):
    x, y = meta(48, 64, dtype=torch.float32), meta(16, 64, dtype=torch.float32)
    assert cases.fixed_sum_of_tuple.compile((tk.gl(y), (tk.gl(x, tk.st(tk.fp32, 16, 32), static=static),)))


@pytest.mark.parametrize(("tile", "static"), [((), (-2, -1)), ((tk.st(tk.fp32, 16, 32),), (0, 1))])
def test_static_extents_are_no_reads_of_parameters(tile, static):
    """A constant in the code, also where a descriptor carries the extents; the other dimension is read."""
    x, out = meta(5, 48, 64, dtype=torch.float32), meta(3, dtype=torch.int32)
    ptx = cases.extents.compile(tk.gl(x, *tile, static=static), out).asm["ptx"]
    sizes = (5, 48, 64)
    for axis in range(3):
        constant = any(f", {sizes[axis]};" in line or f"{{ {sizes[axis]} }}" in line for line in ptx.splitlines())
        assert constant == (axis in static or axis - 3 in static), (axis, ptx)


@pytest.mark.parametrize(
    ("static", "quoted"), [(2, "2"), ((0, -3), r"\(0, -3\)"), ("rows", "'rows'"), ((True,), r"\(True,\)"), (1.0, "1.0")]
)
def test_static_names_dimensions(static, quoted):
    with pytest.raises(tk.TileError, match=rf"gl\(static={quoted}\): must be True, False or dimensions from -2 to 1"):
        tk.gl(meta(48, 64), static=static)


def exchange(rng, bug, schedule):
    tile = tk.st(tk.fp32, 16, 32)
    x = torch.from_numpy(rng.standard_normal((2, 48, 32), dtype="float32"))
    y = poison(torch.empty_like(x))
    with sim.device("sm_90a", schedule=schedule, raise_findings=False) as device:
        flat = tk.gl(x.flatten(0, 1), tile), tk.gl(y.flatten(0, 1))
        cases.exchanged[(2,)](*flat, 3, tile, bug, cluster_size=2)
    return x, y, {found.kind for found in device.launches[0].findings}


@explored(2, 50)
def test_exchanged_tiles_are_right_in_every_schedule(rng, schedules):
    for schedule in range(schedules):
        x, y, findings = exchange(rng, False, schedule)
        assert not findings and torch.equal(y, x.flip(0))


def test_a_copy_to_a_tile_that_the_other_block_reads_is_a_race(rng):
    assert any("race" in exchange(rng, True, schedule)[2] for schedule in range(10))


@tk.kernel
@triton.jit
def sends(X, TILE: tl.constexpr, WHAT: tl.constexpr):
    ring, tile, vector = tk.allocate(TILE, 2), tk.allocate(TILE), tk.allocate(tk.sv(tk.fp32, 16))
    arrived = tk.semaphores(1)[0]
    if WHAT == "ring":
        tk.store_cluster_async(tile, ring, arrived, 1)
    elif WHAT == "view":
        tk.store_cluster_async(tk.subtile(tile, 8, 32), tk.subtile(tile, 8, 32, 1), arrived, 1)
    elif WHAT == "types":
        tk.store_cluster_async(tile, vector, arrived, 1)
    elif WHAT == "registers":
        tk.store_cluster_async(tile, tk.load(tile), arrived, 1)
    else:
        tk.store_cluster_async(tile, tile, tile, 1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "ring",
            "copies a tile or vector of shared memory, got a ring of st(fp32, 16, 32); take a slot first, ring[slot]",
        ),
        ("view", "a view of st(fp32, 16, 32) is no stretch of memory; copy the whole tile"),
        ("types", "from sv(fp32, 16) to st(fp32, 16, 32); must be the same type"),
        ("registers", "copies a tile or vector of shared memory, got "),
        ("semaphore", "needs a semaphore"),
    ],
)
def test_what_a_copy_to_another_block_does_not_take(what, message):
    with refused(message):
        sends.compile(tk.gl(meta(16, 32, dtype=torch.float32)), tk.st(tk.fp32, 16, 32), what, cluster_size=2)
