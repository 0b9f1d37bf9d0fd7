"""Multicast loads and static layouts on a GPU."""

import pytest
import torch

import tritonkittens.lang as tk
from tests import cases_cluster as cases
from tests.util import DEVICE, poison, relative_error

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.mark.parametrize("cols", [16, 64, 96, 128, 176])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_blocks_get_what_one_loads(rng, cols, dtype):
    tile = tk.st(tk.from_torch(dtype), 48, cols)
    for repeat in range(3):  # other tensors, perhaps at the same addresses
        x = torch.randn(96, cols, device=DEVICE).to(dtype)
        y = poison(torch.empty(3 * 4 * 48, cols, dtype=dtype, device=DEVICE))
        cases.shared_loads[(3,)](tk.gl(x, tile), tk.gl(y), tile, cluster_size=2, debug=True)
        assert torch.equal(y, x.repeat(6, 1)), repeat


def test_both_blocks_get_the_views_that_each_loads(rng):
    # two swizzle lines wide: a view is no stretch of memory
    tile, half = tk.st(tk.bf16, 32, 128), tk.st(tk.bf16, 16, 128)
    x = torch.randn(32, 128, device=DEVICE).bfloat16()
    y = poison(torch.empty(2 * 32, 128, dtype=torch.bfloat16, device=DEVICE))
    cases.shared_views[(1,)](tk.gl(x, half), tk.gl(y), tile, cluster_size=2, debug=True)
    assert torch.equal(y, x.repeat(2, 1))


@pytest.mark.parametrize("cols", [16, 64, 176])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tiles", [0, 1, 2, 5])
def test_blocks_exchange_tiles(rng, cols, dtype, tiles):
    tile = tk.st(tk.from_torch(dtype), 48, cols)
    x = torch.randn(2, max(tiles, 1) * 48, cols, device=DEVICE).to(dtype)
    y = poison(torch.empty_like(x))
    cases.exchanged[(2,)](tk.gl(x.flatten(0, 1), tile), tk.gl(y.flatten(0, 1)), tiles, tile, cluster_size=2, debug=True)
    assert torch.equal(y, x.flip(0)) if tiles else y.isnan().all()


@pytest.mark.parametrize("warps", [1, 2, 4])
def test_roles_of_both_blocks_meet(rng, warps):
    tile = tk.st(tk.bf16, 48, 64)
    x = torch.randn(96, 64, device=DEVICE).bfloat16()
    y = poison(torch.empty(3 * 4 * 48, 64, dtype=torch.bfloat16, device=DEVICE))
    cases.shared_loads_of_roles[(3,)](
        tk.gl(x, tile), tk.gl(y), tile, warps, False, False, True, cluster_size=2, debug=True
    )
    assert torch.equal(y, x.repeat(6, 1))


def test_static_layouts_are_told_apart(rng):
    for rows in (16, 48, 32):
        x = torch.randn(rows, 64, device=DEVICE)
        y = poison(torch.empty(16, 64, device=DEVICE))
        cases.fixed_sum[(1,)](tk.gl(x, static=True), tk.gl(y))
        assert relative_error(y, x.double().view(-1, 16, 64).sum(0)) < 1e-6


@pytest.mark.parametrize("tiles", [(), (tk.st(tk.fp32, 16, 64),)])
def test_layouts_with_some_static_dimensions_are_told_apart(rng, tiles):
    """Rows are compiled in; columns and the distance of rows change without a new kernel, and what lies past the
    columns reads as zero."""
    for rows, cols, pitch in ((48, 64, 64), (16, 64, 96), (48, 20, 24), (48, 64, 80), (32, 128, 128)):
        x = torch.randn(rows, pitch, device=DEVICE)[:, :cols]
        want = torch.zeros(16, 64, dtype=torch.float64, device=DEVICE)
        want[:, : min(cols, 64)] = x[:, :64].double().reshape(-1, 16, min(cols, 64)).sum(0)
        for static in (0, (-2,), True):
            direct, nested = poison(torch.empty(16, 64, device=DEVICE)), poison(torch.empty(16, 64, device=DEVICE))
            cases.fixed_sum[(1,)](tk.gl(x, *tiles, static=static), tk.gl(direct))
            cases.fixed_sum_of_tuple[(1,)]((tk.gl(nested), (tk.gl(x, *tiles, static=static),)))
            assert relative_error(direct, want) < 1e-6 and torch.equal(direct, nested)


@pytest.mark.parametrize("static", [(), 0, 1, -1, (0, 2), (-1, -2), True])
@pytest.mark.parametrize("tiles", [(), (tk.st(tk.fp32, 16, 32),)])
def test_extents_are_the_same_static_or_not(rng, static, tiles):
    for shape in ((1, 16, 32), (5, 48, 64), (2, 17, 36)):
        out = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
        cases.extents[(1,)](tk.gl(torch.randn(shape, device=DEVICE), *tiles, static=static), out)
        assert tuple(out.tolist()) == shape
