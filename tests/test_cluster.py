"""Multicast loads and static layouts compile to what they should, and say what is missing."""
import pytest
import torch

import tritonkittens.lang as tk
from tests import cases_cluster as cases
from tests.util import meta


@pytest.mark.parametrize(("cols", "copies"), [(64, 1), (128, 2), (96, 2), (16, 1)])
def test_a_multicast_load_is_one_copy_for_each_swizzled_block(cols, copies):
    tile = tk.st(tk.bf16, 64, cols)
    kernel = cases.shared_loads.compile(tk.gl(meta(128, cols), tile), tk.gl(meta(256, cols)), tile, cluster_size=2)
    assert kernel.asm["ptx"].count(".multicast::cluster") == copies and kernel.metadata.num_ctas == 2


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
    counts = [cases.fixed_sum.compile(tk.gl(meta(rows, cols, dtype=torch.float32), static=0), tk.gl(y)).asm["ptx"].count("ld.global")
              for rows, cols in ((48, 64), (48, 128), (32, 64))]
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


@pytest.mark.parametrize(("static", "quoted"), [(2, "2"), ((0, -3), r"\(0, -3\)"), ("rows", "'rows'"), ((True,), r"\(True,\)"), (1.0, "1.0")])
def test_static_names_dimensions(static, quoted):
    with pytest.raises(tk.TileError, match=rf"gl\(static={quoted}\): must be True, False or dimensions from -2 to 1"):
        tk.gl(meta(48, 64), static=static)
