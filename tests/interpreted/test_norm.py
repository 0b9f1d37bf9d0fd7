"""Norms in Triton's interpreter, against references in float64."""

import pytest

from tritonkittens import arch
from tritonkittens.kernels import _tensors
from tritonkittens.kernels.norm import call_plan
from tritonkittens.launch import Device

from ..cases_norm import BF16, FP32, OPERANDS, check, operands
from ..util import slow


@pytest.fixture(autouse=True)
def tensors_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(_tensors, "is_reachable", lambda device: True)
    monkeypatch.setattr(call_plan, "device_facts", lambda device: Device.of_gpu(arch.GPUS["H200"]))


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("kind, width", [(BF16, 7), (FP32, 200), slow(FP32, 17000)], ids=str)
def test_norms(rms, kind, width):
    check(rms, *operands((3, width), kind, ["weight", "bias"]))


def test_all_operands():
    check(False, *operands((2, 5, 72), FP32, [n for n in OPERANDS if n != "rowscale"]), dropout_p=0.3)
    check(True, *operands((5, 72), BF16, ["weight", "residual", "rowscale"]), zero_centered_weight=True)
