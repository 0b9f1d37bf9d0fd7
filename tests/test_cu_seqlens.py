"""What `debug` finds in the cu_seqlens of packed sequences, in all functions that take them."""

import pytest
import torch

from tests.util import refused
from tritonkittens import sim
from tritonkittens.kernels.based import based_attention
from tritonkittens.kernels.causal_conv import causal_conv1d
from tritonkittens.kernels.gated_delta_net import gated_delta_rule
from tritonkittens.kernels.hedgehog import hedgehog_attention
from tritonkittens.kernels.linear_attention import linear_attention
from tritonkittens.kernels.mamba2 import mamba_chunk_scan
from tritonkittens.kernels.rotary import rotary

BF16 = torch.bfloat16
FP32 = torch.float32
MAPS, NUMBERS = torch.zeros(2, 128, 64, dtype=BF16), torch.ones(2, dtype=FP32)


def heads(rows, columns=16):
    return torch.zeros(1, rows, 2, columns, dtype=BF16)


def numbers(rows):
    return torch.zeros(1, rows, 2, dtype=FP32)


CALLS = {  # of so many packed rows
    "linear_attention": lambda n, **more: linear_attention(*[heads(n)] * 3, **more),
    "gated_delta_rule": lambda n, **more: gated_delta_rule(*[heads(n)] * 3, *[numbers(n)] * 2, **more),
    "based_attention": lambda n, **more: based_attention(*[heads(n)] * 3, **more),
    "hedgehog_attention": lambda n, **more: hedgehog_attention(
        *[heads(n, 128)] * 3, *[MAPS] * 2, *[NUMBERS] * 2, **more
    ),
    "mamba_chunk_scan": lambda n, **more: mamba_chunk_scan(heads(n), numbers(n), -NUMBERS, *[heads(n)] * 2, **more),
    "causal_conv1d": lambda n, **more: causal_conv1d(heads(n).flatten(2).mT, torch.ones(32, 4, dtype=BF16), **more),
    "rotary": lambda n, **more: rotary(heads(n)[0], None, *[torch.ones(8, 8, dtype=FP32)] * 2, **more),
}


@pytest.mark.parametrize("starts, most", [([1, 5], 5), ([0, 4, 3, 5], 5), ([0, 6], 5), ([0, 0, 0], 0)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_debug(name, starts, most):
    """They rise from 0 to the number of rows at most."""
    given = dict(cu_seqlens=torch.tensor(starts, dtype=torch.int32), debug=True)
    with sim.device():
        if most == 0:
            CALLS[name](most, **given)
            return
        with refused(f"{name}: cu_seqlens is {starts}; it must rise from 0 to at most {most}", ValueError):
            CALLS[name](most, **given)
