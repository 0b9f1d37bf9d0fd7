"""Multicast loads and static layouts compile to what they should, and say what is missing."""
import pytest
import torch

import tritonkittens.lang as tk
from tests import cases_cluster as cases


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("cols", "copies"), [(64, 1), (128, 2), (96, 2), (16, 1)])
def test_a_multicast_load_is_one_copy_for_each_swizzled_block(cols, copies):
    tile = tk.st(tk.bf16, 64, cols)
    kernel = cases.shared_loads.compile(tk.gl(meta(128, cols), tile, multicast=True), tk.gl(meta(256, cols)), tile, cluster_size=2)
    assert kernel.asm["ptx"].count(".multicast::cluster") == copies and kernel.metadata.num_ctas == 2


def test_multicast_needs_descriptors_in_memory():
    tile = tk.st(tk.bf16, 64, 64)
    with pytest.raises(tk.TileError, match=r"load_async\(multicast=…\): make the global layout with tk.gl\(…, multicast=True\)"):
        cases.shared_loads.compile(tk.gl(meta(128, 64), tile), tk.gl(meta(256, 64)), tile, cluster_size=2)
    with pytest.raises(tk.TileError, match="with multicast: give the tile types that TMA moves"):
        tk.gl(meta(128, 64), multicast=True)


def test_a_static_layout_makes_extents_constants():
    x, y = meta(48, 64, dtype=torch.float32), meta(16, 64, dtype=torch.float32)
    three = cases.fixed_sum.compile(tk.gl(x, static=True), tk.gl(y)).asm["ptx"]
    two = cases.fixed_sum.compile(tk.gl(meta(32, 64, dtype=torch.float32), static=True), tk.gl(y)).asm["ptx"]
    assert three.count("ld.global") == 3 * two.count("ld.global") // 2 > 0
    with pytest.raises(Exception, match="constexpr"):
        cases.fixed_sum.compile(tk.gl(x), tk.gl(y))
