"""Multicast loads and static layouts on a GPU."""
import pytest
import torch

import tritonkittens.lang as tk
from tests import cases_cluster as cases
from tests.util import poison, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cols", [16, 64, 96, 128, 176])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_blocks_get_what_one_loads(rng, cols, dtype):
    tile = tk.st(tk.from_torch(dtype), 48, cols)
    for repeat in range(3):  # other tensors, perhaps at the same addresses
        x = torch.randn(96, cols, device="cuda").to(dtype)
        y = poison(torch.empty(3 * 4 * 48, cols, dtype=dtype, device="cuda"))
        cases.shared_loads[(3,)](tk.gl(x, tile, multicast=True), tk.gl(y), tile, cluster_size=2, debug=True)
        assert torch.equal(y, x.repeat(6, 1)), repeat


def test_static_layouts_are_told_apart(rng):
    for rows in (16, 48, 32):
        x = torch.randn(rows, 64, device="cuda")
        y = poison(torch.empty(16, 64, device="cuda"))
        cases.fixed_sum[(1,)](tk.gl(x, static=True), tk.gl(y))
        assert relative_error(y, x.double().view(-1, 16, 64).sum(0)) < 1e-6
