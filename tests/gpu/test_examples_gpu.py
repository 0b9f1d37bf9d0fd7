"""The examples on a GPU: right against float64, and the same bits whatever the depth of the ring."""
import pytest
import torch

from examples.attention_pipeline import attention
from tests.util import DEVICE, relative_error

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.mark.parametrize(("dim", "keys"), [(64, 1), (64, 300), (128, 64), (128, 129), (128, 640), (96, 1000)])
def test_attention_pipeline_gives_the_same_bits_with_any_number_of_stages(rng, dim, keys):
    q = torch.randn(2, 3, 200, dim, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 3, keys, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    results = [attention(q, k, v, stages) for stages in (1, 2, 5)]
    assert relative_error(results[0], expected) < 5e-3
    assert all(torch.equal(result, results[0]) for result in results)
