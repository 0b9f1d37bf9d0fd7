"""Up to eight rows of `linear_attention`, `gated_delta_rule` or `mamba_chunk_scan` in one kernel, which reads and
writes each state once. These functions call it themselves; `run_layer_steps` is for layers."""

from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step
from tritonkittens.kernels.recurrent_step.interface import run_layer_steps

__all__ = ["Rule", "Step", "run_layer_steps"]
