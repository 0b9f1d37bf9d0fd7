"""What modules refuse, on and off the kernels alike, and what they compute under `torch.autocast`."""

import contextlib
import copy

import pytest
import torch

from tests.util import refused, relative_error
from tritonkittens import sim
from tritonkittens.nn import Experts, GroupedLinear, MixtureOfExperts

BF16, FP32 = torch.bfloat16, torch.float32
ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)
INDEX, WEIGHTS = torch.randint(3, (8, 2)), torch.rand(8, 2)


def on_kernels(is_simulated):
    return sim.device() if is_simulated else contextlib.nullcontext()


@pytest.mark.parametrize("is_simulated", [True, False])
@pytest.mark.parametrize(
    "offsets, kind, message",
    [
        (ENDS.long(), TypeError, "GroupedLinear: offsets has dtype torch.int64; it must be torch.int32"),
        (ENDS[:2], ValueError, "GroupedLinear: offsets is (2,); it must be (3,)"),
        (ENDS[:, None], ValueError, "GroupedLinear: offsets is (3, 1); it must be (3,)"),
        (ENDS.to("meta"), ValueError, "GroupedLinear: offsets is on meta, input on cpu; they must be equal"),
    ],
)
def test_offsets(offsets, kind, message, is_simulated):
    layer = GroupedLinear(3, 16, 24, dtype=BF16)
    with on_kernels(is_simulated), refused(message, kind):
        layer(torch.randn(8, 16, dtype=BF16), offsets)


@pytest.mark.parametrize("is_simulated", [True, False])
@pytest.mark.parametrize(
    "index, weights, kind, message",
    [
        (INDEX.float(), WEIGHTS, TypeError, "Experts: index has dtype torch.float32; it must be torch.int"),
        (INDEX[:7], WEIGHTS[:7], ValueError, "Experts: input is (8, 16), index (7, 2), weights (7, 2); they must be"),
        (INDEX, WEIGHTS[:, :1], ValueError, "Experts: input is (8, 16), index (8, 2), weights (8, 1); they must be"),
        (INDEX[0], WEIGHTS[0], ValueError, "Experts: input is (8, 16), index (2,), weights (2,); they must be"),
    ],
)
def test_choices(index, weights, kind, message, is_simulated):
    layer = Experts(16, 24, 3, dtype=BF16)
    with on_kernels(is_simulated), refused(message, kind):
        layer(torch.randn(8, 16, dtype=BF16), index, weights)


@pytest.mark.parametrize("kind", [GroupedLinear, Experts])
def test_autocast(kind):
    """fp32 parameters run on the kernels, and the result has autocast's dtype, as of torch's Linear."""
    module, more = {
        GroupedLinear: (GroupedLinear(3, 16, 24, bias=True), (ENDS,)),
        Experts: (Experts(16, 24, 3), (INDEX, WEIGHTS)),
    }[kind]
    exact, x = copy.deepcopy(module).double(), torch.randn(8, 16)
    for is_simulated in (True, False):
        with on_kernels(is_simulated) as device, torch.autocast("cpu", BF16):
            y = module(x, *more)
            assert y.dtype == BF16 == torch.nn.functional.linear(x, x).dtype
            gradients = torch.autograd.grad(y.float().square().sum(), [*module.parameters()])
        assert not is_simulated or len(device.launches) > 1
        expected = exact(x.double(), *more)
        assert relative_error(y, expected) < 1.5e-2
        exact_gradients = torch.autograd.grad(expected.square().sum(), [*exact.parameters()])
        for found, gradient in zip(gradients, exact_gradients, strict=True):
            assert found.dtype == FP32 and relative_error(found, gradient) < 4e-2


def test_a_mixture_under_autocast():
    block, x = MixtureOfExperts(16, 24, 3, 3), torch.randn(2, 4, 16)  # all experts, whatever rounding does to scores
    with torch.no_grad(), sim.device() as device, torch.autocast("cpu", BF16):
        y = block(x)
    assert y.dtype == BF16 and len(device.launches) == 4
    assert relative_error(y, block.double()(x.double())) < 1.5e-2


def test_experts_of_transformers_under_autocast():
    pytest.importorskip("transformers", minversion="5.17")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    from tritonkittens.ops import patch

    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=24, num_experts=3, experts_implementation="eager")
    module, x = Qwen3MoeExperts(config), torch.randn(8, 16)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.2)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        theirs = module(x, INDEX, WEIGHTS)
        with patch(module), sim.device() as device:
            ours = module(x, INDEX, WEIGHTS)
    assert len(device.launches) == 4 and ours.dtype == theirs.dtype
    expected = module.double()(x.double(), INDEX, WEIGHTS.double())
    assert relative_error(ours, expected) <= 1.5 * relative_error(theirs, expected)
