"""Rotary embeddings and gated activations in Triton's interpreter, against references in float64."""

import pytest
import torch

from tritonkittens import arch
from tritonkittens.kernels import _tensors
from tritonkittens.kernels.rotary import call_plan
from tritonkittens.kernels.rotary.config import Tiles
from tritonkittens.launch import Device

from .. import cases_activation, cases_rotary
from ..cases_rotary import BF16, FP32, angles, heads


@pytest.fixture(autouse=True)
def tensors_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(_tensors, "is_reachable", lambda device: True)
    monkeypatch.setattr(call_plan, "device_facts", lambda device: Device.of_gpu(arch.GPUS["H200"]))
    monkeypatch.setattr(call_plan, "tiles_of", lambda *_: Tiles(4, 2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    q, k, table = heads((2, 3, 5, 24)), heads((2, 1, 5, 24)), angles(5, 8)
    cases_rotary.check(q, k, *table, interleaved=interleaved)
    weights = dict(q_weight=heads((24,), FP32), k_weight=heads((24,), FP32))
    cases_rotary.check(q, k, *table, interleaved=interleaved, **weights)


def test_packed_sequences():
    rows = torch.tensor([0, 1, 2, 0, 1])
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    offsets = torch.tensor([4, 1])
    rows = rows + torch.tensor([4, 4, 4, 1, 1])
    cases_rotary.check(heads((5, 2, 16)), None, *angles(9, 8), rows=rows, cu_seqlens=cu, seqlen_offsets=offsets)


@pytest.mark.parametrize("kind, layout", [*zip(cases_activation.KINDS, cases_activation.LAYOUTS, strict=True)])
def test_gated_activations(kind, layout):
    cases_activation.check(kind, layout, cases_activation.operands(layout, (3, 40), BF16))
