"""TorchScript: a trace gives what the call gives on other operands, never a constant. Scripting is refused at once."""

import contextlib
import inspect
import re

import pytest
import torch

from tritonkittens import nn as tnn
from tritonkittens.kernels.attention import attention, attention_decode, attention_fp8, attention_varlen
from tritonkittens.kernels.gemm import gemm
from tritonkittens.ops import scaled_dot_product_attention


def halves(*shapes, device):
    return [torch.randn(shape, device=device).bfloat16() for shape in shapes]


def heads(device):
    return halves(*[(1, 2, 64, 64)] * 3, device=device)


def packed(q, k, v):
    ends = torch.tensor([0, 64], dtype=torch.int32, device=q.device)
    return attention_varlen(*(x[0].transpose(0, 1).contiguous() for x in (q, k, v)), ends, ends)


def narrow(q, k, v):
    return attention_fp8(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)))


CALLS = {
    "gemm": (gemm, lambda device: halves((64, 64), (64, 64), device=device)),
    "Linear": (tnn.Linear(64, 64, dtype=torch.bfloat16), lambda device: halves((64, 64), device=device)),
    "attention": (lambda q, k, v: attention(q, k, v, causal=True), heads),
    "attention_varlen": (packed, heads),
    "attention_decode": (lambda q, k, v: attention_decode(q[:, :, -1:], k, v), heads),
    "attention_fp8": (narrow, heads),
    "scaled_dot_product_attention": (scaled_dot_product_attention, heads),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_trace_computes_with_what_comes_in(name, gradients, kernel_device, rng):
    function, operands = CALLS[name]
    function = function.to(kernel_device) if isinstance(function, torch.nn.Module) else function
    with contextlib.nullcontext() if gradients else torch.no_grad():
        traced = torch.jit.trace(function, operands(kernel_device), check_trace=False)
        others = operands(kernel_device)
        assert torch.equal(traced(*others), function(*others))


MODULES = {
    "Linear": (8, 8),
    "GroupedLinear": (2, 8, 8),
    "SwiGLU": (8, 8),
    "Experts": (8, 8, 2),
    "MixtureOfExperts": (8, 8, 2, 1),
    "RMSNorm": (8,),
    "LayerNorm": (8,),
    "CrossEntropyLoss": (),
    "LinearCrossEntropyLoss": (8, 8),
    "FFTConv": (8, 8),
    "Mamba2": (8, 8, 4, 2, 8),
    "GatedDeltaNet": (8, 1, 1, 8, 8),
    "LinearAttention": (8, 1),
    "Based": (8, 4, 1),
    "Hedgehog": (8, 1),
}


@pytest.mark.parametrize("name", MODULES)
def test_scripting_a_module_is_refused_at_once(name):
    """Alone, and inside another."""
    module = getattr(tnn, name)(*MODULES[name])
    for scripted in (module, torch.nn.Sequential(torch.nn.ReLU(), module)):
        with pytest.raises(NotImplementedError, match=rf"script\({name}\): .* use torch.compile or torch.export"):
            torch.jit.script(scripted)


def test_every_module_is_scripted_here():
    assert set(MODULES) == set(tnn.__all__) - {"replace_linears", "MixerState", "HedgehogState"}


@pytest.mark.parametrize(
    "function", [gemm, attention, attention_decode, attention_varlen, attention_fp8, scaled_dot_product_attention]
)
def test_scripting_a_function_is_refused_at_once(function):
    """By TorchScript itself, which quotes the function."""
    with pytest.raises(torch.jit.frontend.NotSupportedError, match=re.escape(inspect.getsourcefile(function))):
        torch.jit.script(function)
