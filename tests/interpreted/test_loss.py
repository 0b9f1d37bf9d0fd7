"""Softmax and cross entropy in Triton's interpreter, against float64."""

import pytest

from tritonkittens.kernels import _tensors
from tritonkittens.kernels.loss import call_plan

from ..cases_loss import BF16, FP32, check, check_softmax, numbers, targets
from ..util import slow


@pytest.fixture(autouse=True)
def tensors_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(_tensors, "is_reachable", lambda device: True)
    monkeypatch.setattr(call_plan, "starts_early", lambda device: False)


@pytest.mark.parametrize("kind, width", [(BF16, 7), (FP32, 200), slow(FP32, 40000)], ids=str)
def test_softmax(kind, width):
    check_softmax(numbers((3, width), kind))


@pytest.mark.parametrize("kind, width", [(BF16, 7), (FP32, 9000), slow(BF16, 40000)], ids=str)
def test_cross_entropy(kind, width):
    target = targets((3,), width)
    check(numbers((3, width), kind), target)
    check(numbers((3, width), kind), target, label_smoothing=0.1, softcap=5.0, lse_square_scale=0.01, return_lse=True)
