"""The gated delta rule: `gated_delta_rule` for PyTorch tensors, and its reference `gated_delta_rule_torch`."""

from tritonkittens.kernels.gated_delta_net.interface import gated_delta_rule
from tritonkittens.kernels.gated_delta_net.operators import gated_delta_rule_operator
from tritonkittens.kernels.gated_delta_net.reference import gated_delta_rule_torch

__all__ = ["gated_delta_rule", "gated_delta_rule_operator", "gated_delta_rule_torch"]
