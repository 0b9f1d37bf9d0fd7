"""The examples on a GPU: right against float64, and the same bits whatever the depth of the ring."""

import pytest
import torch

from examples.attention_pipeline import attention
from examples.stream_rows import scaled_silu, scaled_silu_torch
from tests.cases_examples import EXAMPLES
from tests.util import DEVICE, relative_error, slow

pytestmark = pytest.mark.usefixtures("kernel_device")


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_large_random_extents(name, rng):
    function, reference, operands, bound = EXAMPLES[name]
    for _ in range(3):
        given = [x.to(DEVICE) for x in operands(rng, 10)]
        assert relative_error(function(*given), reference(*given)) <= bound, [tuple(x.shape) for x in given]


@pytest.mark.parametrize(("dim", "keys"), [(64, 1), (64, 300), (128, 64), (128, 129), (128, 640), slow(96, 1000)])
def test_attention_pipeline_gives_the_same_bits_with_any_number_of_stages(rng, dim, keys):
    q = torch.randn(2, 3, 200, dim, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 3, keys, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    results = [attention(q, k, v, stages) for stages in (1, 2, 5)]
    assert relative_error(results[0], expected) < 5e-3
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    "knobs",
    [dict(consumers=1), dict(consumers=2, output_stages=3), dict(consumers=2, cols=128, stages=1, output_stages=1)],
    ids=str,
)
def test_stream_rows(rng, knobs):
    for shape in ((64, 64), (300, 200), (1, 8), (129, 1000)):
        x = torch.randn(shape, device=DEVICE).to(torch.float16 if shape[0] == 129 else torch.bfloat16)
        assert relative_error(scaled_silu(x, -1.5, **knobs), scaled_silu_torch(x, -1.5)) < 1.1 * 2**-8


def test_stream_rows_of_infinities(rng):
    x = torch.tensor(
        [[float("inf"), -float("inf"), float("nan"), 0.0, 1e4, -1e4, -0.0, 1.0]], device=DEVICE, dtype=torch.bfloat16
    )
    out, expected = scaled_silu(x, 1.0, consumers=1), scaled_silu_torch(x, 1.0)
    assert (
        torch.equal(out.isnan(), expected.isnan())
        and relative_error(out.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9)) < 1.1 * 2**-8
    )
