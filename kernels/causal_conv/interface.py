"""Causal convolutions of channels for PyTorch tensors: `causal_conv1d`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds, starts_of
from tritonkittens.kernels._tensors import check_rising
from tritonkittens.kernels.causal_conv.checks import NAME, Operands, check_shapes
from tritonkittens.kernels.causal_conv.operators import run

ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
    debug: bool = False,
) -> Tensor:
    """Return a causal convolution of each channel: yₜ = activation(bias + Σ_w weight_w · x_{t-W+1+w}).

    Arguments are those of `causal_conv1d_fn` of the package causal-conv1d, with `cu_seqlens`, without its two for final
    states, and with options by name. It runs on every GPU from sm_80 on.

    Args:
        x: (B, C, L) in bf16, fp16 or fp32, B up to 1,024, any strides: give a tensor (B, L, C) as `x.mT`.
        weight: (C, W) in bf16, fp16 or fp32, W from 1 to 4. Of a torch.nn.Conv1d it is `conv.weight[:, 0]`.
        bias: (C,) in bf16, fp16 or fp32; None: 0.
        initial_states: (B, C, W - 1) in the dtype of x, the columns before x; None: zeros. No state is returned: the
            next one is the last W - 1 columns of [initial_states, x].
        cu_seqlens: (N + 1,) int32: where N ≤ 1,024 sequences packed along L begin, and the end of the last. B is 1.
            States are (N, C, W - 1).
        seq_idx: (B, L) int32, in place of cu_seqlens, and slower: a sequence begins where the number changes. It has no
            states. Columns from the 1,025th sequence on are undefined.
        activation: None, "silu", or "swish", which is the same.
        debug: check what cu_seqlens holds, for which the host waits for the device.

    Returns (B, C, L) in the dtype of x, with its dimensions in the same order in memory. Sums are in fp32.
    Differentiable once, in all operands; not in forward mode.

    Raises TypeError or ValueError for other operands. Packed sequences: docs/sequences.md.

    Example::

        y = causal_conv1d(x.mT, weight, bias, activation="silu").mT  # x: (B, L, C)
    """
    given = Operands(x, weight, bias, initial_states, cu_seqlens)
    check_kinds(NAME, given)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{NAME}: activation={activation!r}; it must be one of {ACTIVATIONS}")
    if seq_idx is not None:
        if initial_states is not None or cu_seqlens is not None:
            raise ValueError(f"{NAME}: with seq_idx there are no initial_states and no cu_seqlens")
        check_shapes(given)
        starts, rows = starts_of(NAME, seq_idx, (x.shape[0], x.shape[2])), x.mT
        y = causal_conv1d(rows.flatten(0, 1)[None].mT, weight, bias, cu_seqlens=starts, activation=activation)
        return y.mT.view(rows.shape).mT
    check_shapes(given)
    if debug:
        check_rising(NAME, "cu_seqlens", cu_seqlens, x.shape[2])
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        return run(given, activation is not None)
    found: Tensor = call(NAME, *given, activation is not None)
    return found
