"""torch.compile traces a public function or module once for one number of rows, and once for all others."""

import pytest
import torch

from tritonkittens import nn, sim
from tritonkittens.kernels.activation import geglu, swiglu
from tritonkittens.kernels.attention import attention, attention_decode, attention_ranges, attention_varlen
from tritonkittens.kernels.based import based_attention
from tritonkittens.kernels.causal_conv import causal_conv1d
from tritonkittens.kernels.experts import experts
from tritonkittens.kernels.fft_conv import fft_conv
from tritonkittens.kernels.gated_delta_net import gated_delta_rule
from tritonkittens.kernels.gated_gemm import gated_gemm
from tritonkittens.kernels.gemm import gemm
from tritonkittens.kernels.grouped_gemm import grouped_gemm
from tritonkittens.kernels.hedgehog import hedgehog_attention
from tritonkittens.kernels.linear_attention import linear_attention
from tritonkittens.kernels.loss import cross_entropy, linear_cross_entropy, softmax
from tritonkittens.kernels.mamba2 import mamba_chunk_scan
from tritonkittens.kernels.norm import layer_norm, rms_norm
from tritonkittens.kernels.quantize import quantize_mxfp8, quantize_nvfp4
from tritonkittens.kernels.rotary import rotary

BF16 = torch.bfloat16
WEIGHT, VECTOR, ANGLES = torch.ones(32, 64, dtype=BF16), torch.ones(64, dtype=BF16), torch.ones(64, 16, dtype=BF16)
GATE_UP, DOWN = torch.ones(4, 96, 64, dtype=BF16), torch.ones(4, 64, 48, dtype=BF16)
ENDS = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
HEDGEHOG_MAP = torch.ones(1, 128, 64, dtype=BF16)


def labels(x):
    return (x[:, 0] > 0).long()


def chosen(x):
    return x[:, :2].int(), x[:, :2].float()


def heads(x):
    return x.view(1, 1, -1, 64)


CALLS = {
    "rms_norm": lambda x: rms_norm(x, VECTOR, residual=x, prenorm=True),
    "layer_norm": lambda x: layer_norm(x, VECTOR, VECTOR),
    "swiglu": swiglu,
    "geglu": geglu,
    "softmax": softmax,
    "cross_entropy": lambda x: cross_entropy(x, labels(x)),
    "linear_cross_entropy": lambda x: linear_cross_entropy(x, WEIGHT, labels(x)),
    "gemm": lambda x: gemm(x, WEIGHT.T),
    "gated_gemm": lambda x: gated_gemm(x, WEIGHT.T, WEIGHT.T),
    "grouped_gemm": lambda x: grouped_gemm(x, GATE_UP.mT, ENDS),
    "experts": lambda x: experts(x, *chosen(x), GATE_UP, DOWN),
    "rotary": lambda x: rotary(heads(x), None, ANGLES, ANGLES),
    "attention": lambda x: attention(*[heads(x)] * 3, causal=True),
    "attention_varlen": lambda x: attention_varlen(*[x.view(-1, 1, 64)] * 3, ENDS, ENDS),
    "attention_ranges": lambda x: attention_ranges(*[heads(x)] * 3, x[None, None, :, :2].int()),
    "fft_conv": lambda x: fft_conv(x[None].mT.contiguous(), GATE_UP[0, :64], causal=True),
    "linear_attention": lambda x: linear_attention(*[x.view(1, -1, 1, 64)] * 3),
    "gated_delta_rule": lambda x: gated_delta_rule(
        *[x.detach().view(1, -1, 1, 64)] * 3, *[x[None, :, :1].detach()] * 2
    ),
    "based_attention": lambda x: based_attention(*[x[..., :16].reshape(1, -1, 1, 16)] * 3),
    "hedgehog_attention": lambda x: hedgehog_attention(
        *[x.detach().repeat(1, 2).view(1, -1, 1, 128)] * 3, *[HEDGEHOG_MAP] * 2, *[ENDS[:1].float()] * 2
    ),
    "causal_conv1d": lambda x: causal_conv1d(x.detach()[None].mT, GATE_UP[0, :64, :4], VECTOR),
    "mamba_chunk_scan": lambda x: mamba_chunk_scan(
        x.detach().view(1, -1, 1, 64), x[None, :, :1].detach(), -ENDS[:1].float(), *[x.detach().view(1, -1, 1, 64)] * 2
    ),
    "attention_decode": lambda x: attention_decode(heads(x.detach()), heads(VECTOR), heads(VECTOR)),
    "quantize_mxfp8": lambda x: quantize_mxfp8(x.detach().view(-1, 2, 32)),
    "quantize_nvfp4": lambda x: quantize_nvfp4(x.detach().view(-1, 2, 32)),
}


def a_sequence(mixer):
    """A mixer of rows as one sequence, without gradients, so that it runs on kernels."""
    mixer.requires_grad_(False)
    return lambda x: mixer(x.detach()[None], return_state=True)[0]


MODULES = {
    "RMSNorm": lambda: nn.RMSNorm(64, dtype=BF16),
    "LayerNorm": lambda: nn.LayerNorm(64, dtype=BF16),
    "Linear": lambda: nn.Linear(64, 32, dtype=BF16),
    "SwiGLU": lambda: nn.SwiGLU(64, 32, dtype=BF16),
    "MixtureOfExperts": lambda: nn.MixtureOfExperts(64, 48, 4, 2, dtype=BF16),
    "Mamba2": lambda: a_sequence(nn.Mamba2(64, 16, dtype=BF16)),
    "GatedDeltaNet": lambda: a_sequence(nn.GatedDeltaNet(64, 1, 2, 32, 32, dtype=BF16)),
    "LinearAttention": lambda: a_sequence(nn.LinearAttention(64, 2, dtype=BF16)),
    "Based": lambda: a_sequence(nn.Based(64, num_heads=2, dtype=BF16)),
    "Hedgehog": lambda: a_sequence(nn.Hedgehog(64, 1, head_dim=128, inv_freq=torch.ones(64), dtype=BF16)),
}
OPERATORS = {  # of modules that have several, besides those of layers
    "Mamba2": ("causal_conv1d", "mamba_chunk_scan", "norm", "gated"),
    "GatedDeltaNet": ("causal_conv1d", "gated_delta_rule", "norm", "gated"),
    "LinearAttention": ("linear_attention", "norm"),
    "Based": ("based_attention",),
    "Hedgehog": ("rotary", "hedgehog_attention"),
}
WITH_MORE = {
    "GroupedLinear": (lambda: nn.GroupedLinear(4, 64, 32, dtype=BF16), lambda x: (ENDS,)),
    "Experts": (lambda: nn.Experts(64, 48, 4, dtype=BF16), chosen),
    "CrossEntropyLoss": (nn.CrossEntropyLoss, lambda x: (labels(x),)),
    "LinearCrossEntropyLoss": (lambda: nn.LinearCrossEntropyLoss(64, 32, dtype=BF16), lambda x: (labels(x),)),
}


def made(name):
    if name in CALLS:
        return CALLS[name]
    module, more = WITH_MORE[name] if name in WITH_MORE else (MODULES[name], lambda x: ())
    module = module()
    return lambda x: module(x, *more(x))


@pytest.mark.parametrize("name", [*CALLS, *MODULES, *WITH_MORE])
def test_one_graph_for_all_numbers_of_rows(name):
    graphs = []

    def traced(graph, inputs):
        """Count a graph, and run nothing."""
        graphs.append(graph)
        (output,) = graph.graph.find_nodes(op="output")
        results = [torch.empty(2, 2) for _ in output.args[0]]
        return lambda *args: results

    torch._dynamo.reset()
    compiled = torch.compile(made(name), fullgraph=True, backend=traced)
    with sim.device("sm_90a"):
        for rows in (4, 6, 9, 12, 17):
            compiled(torch.ones(rows, 64, dtype=BF16, requires_grad=True))
    assert 1 <= len(graphs) <= 2
    assert all("tritonkittens" in str(graph.graph) for graph in graphs)
    for operator in OPERATORS.get(name, ()):
        assert f"tritonkittens.{operator}" in str(graphs[-1].graph)


def test_every_module_is_tried():
    """But for FFTConv, whose kernels are for some lengths."""
    assert {*MODULES, *WITH_MORE} == set(nn.__all__) - {"replace_linears", "MixerState", "HedgehogState", "FFTConv"}


def test_export_of_a_norm():
    """With any number of rows."""
    module = nn.RMSNorm(64, dtype=BF16)
    with sim.device("sm_90a"):
        rows = torch.export.Dim("rows", min=2)
        program = torch.export.export(module, (torch.ones(4, 64, dtype=BF16),), dynamic_shapes=({0: rows},))
    assert "tritonkittens.norm" in str(program.graph)
