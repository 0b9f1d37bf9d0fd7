"""Functions that mixers of sequences of Hugging Face transformers call, on the shipped kernels: causal convolutions,
the scan of Mamba-2, and the gated delta rule.

Each factory takes transformers' function, which runs what the kernels do not take.
Source of the interfaces: transformers 5.24, models/mamba2/modeling_mamba2.py and models/qwen3_next/.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from tritonkittens.kernels._dispatch import unseen_by_function_modes
from tritonkittens.kernels._sequences import MOST_SEQUENCES
from tritonkittens.kernels.causal_conv import causal_conv1d
from tritonkittens.kernels.causal_conv.checks import are_taken as convolution_takes
from tritonkittens.kernels.causal_conv.interface import ACTIVATIONS
from tritonkittens.kernels.gated_delta_net import gated_delta_rule
from tritonkittens.kernels.gated_delta_net.checks import are_taken as delta_rule_takes
from tritonkittens.kernels.mamba2 import mamba_chunk_scan
from tritonkittens.kernels.mamba2.checks import Operands
from tritonkittens.kernels.mamba2.checks import are_taken as scan_takes
from tritonkittens.kernels.norm.composed import l2_norm
from tritonkittens.kernels.recurrent_step import Rule, Step, run_layer_steps

Function: TypeAlias = Callable[..., Any]


def _numbers(seq_idx: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Can kernels tell packed sequences apart by these numbers? None: there are none."""
    return seq_idx is None or (
        seq_idx.dtype == torch.int32 and tuple(seq_idx.shape) == shape and seq_idx.device == x.device
    )


# ---------------------------------------------------------------- convolutions


@unseen_by_function_modes
def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    before: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | None:
    fits = activation in ACTIVATIONS and _numbers(seq_idx, x, (x.shape[0], x.shape[2]))
    if not fits or not convolution_takes(x, weight, bias, before):
        return None
    return causal_conv1d(x, weight, bias, initial_states=before, seq_idx=seq_idx, activation=activation)


def _convolution(theirs: Function) -> Function:
    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Any:
        y = None
        if kwargs.get("cu_seqlens") is None:
            y = _convolved(hidden_states, weight, bias, activation, seq_idx=kwargs.get("seq_idx"))
        return theirs(hidden_states, weight, bias, activation=activation, **kwargs) if y is None else y

    return causal_conv1d_fn


def _convolution_step(theirs: Function) -> Function:
    """The state has at least the rows that the filter reaches. It is replaced in place."""

    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        rows, reach = conv_state.shape[-1], weight.shape[-1] - 1
        y = None
        if 1 <= reach <= rows:
            y = _convolved(hidden_states, weight, bias, activation, conv_state[..., rows - reach :])
        if y is None:
            return theirs(hidden_states, conv_state, weight, bias, activation)
        conv_state.copy_(torch.cat([conv_state, hidden_states], -1)[..., -rows:])
        return y

    return causal_conv1d_update


# ---------------------------------------------------------------- the scan of Mamba-2


@unseen_by_function_modes
def _scanned(
    given: Operands, softplus: bool, limits: tuple[float, float], final: bool, seq_idx: Tensor | None = None
) -> Any:
    least, most = limits
    if not (0 <= least <= most and scan_takes(given) and _numbers(seq_idx, given.x, tuple(given.x.shape[:2]))):
        return None
    if seq_idx is not None and (final or given.initial_states is not None):
        return None
    x, dt, A, B, C, D, _, bias, states, _ = given
    options: dict[str, Any] = dict(dt_softplus=softplus, dt_limit=limits, return_final_states=final, seq_idx=seq_idx)
    return mamba_chunk_scan(x, dt, A, B, C, D=D, dt_bias=bias, initial_states=states, **options)


def _scan(theirs: Function) -> Function:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        found = None
        if kwargs.get("cu_seqlens") is None and kwargs.get("z") is None:
            states = None if initial_states is None else initial_states.float()
            given = Operands(hidden_states, dt, A, B, C, D, None, dt_bias, states, None)
            limits = float(dt_limit[0]), float(dt_limit[1])
            found = _scanned(given, dt_softplus, limits, return_final_states, kwargs.get("seq_idx"))
        if found is not None:
            return found
        options = dict(D=D, dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit)
        options |= dict(return_final_states=return_final_states, **kwargs)
        return theirs(hidden_states, dt, A, B, C, chunk_size, **options)

    return mamba2_chunk_scan


def _first(x: Tensor | None, dims: int) -> Tensor | None:
    """The numbers of a tensor whose last dimensions repeat them, or None where they may differ."""
    for _ in range(dims):
        if x is None or not (x.stride(-1) == 0 or x.shape[-1] == 1):
            return None
        x = x[..., 0]
    return x


def _scan_step(theirs: Function) -> Function:
    """The state is replaced in place. transformers' function applies no limits to dt."""

    def selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        steps, decay, bias, found = _first(dt, 1), _first(A, 2), _first(dt_bias, 1), None
        if steps is not None and decay is not None and (bias is None) == (dt_bias is None) and z is None:
            x, B_1, C_1, steps = (t[:, None] for t in (hidden_states, B, C, steps))
            step = Step(C_1, B_1, x, steps, None, decay, bias, D, state=state)
            rule = Rule(1.0, 1.0, 0.0, math.inf, weights=True, softplus=dt_softplus)
            in_place = run_layer_steps(step, rule, True, inplace=True)
            if in_place is not None:
                return in_place[0][:, 0]
            given = Operands(x, steps, decay, B_1, C_1, D, None, bias, state.float(), None)
            found = _scanned(given, dt_softplus, (0.0, math.inf), True)
        if found is None:
            options = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **kwargs)
            return theirs(state, hidden_states, dt, A, B, C, **options)
        y, after = found
        state.copy_(after)
        return y[:, 0]

    return selective_state_update


# ---------------------------------------------------------------- the gated delta rule


@unseen_by_function_modes
def _updated(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor | None,
    starts: Tensor | None,
    final: bool,
    normalises: bool,
) -> Any:
    (q, k, v, g, beta), state = operands, None if state is None else state.float()
    if starts is not None:
        fits = starts.dtype == torch.int32 and starts.ndim == 1 and 1 <= starts.shape[0] <= MOST_SEQUENCES + 1
        if q.shape[0] != 1 or not fits or starts.device != q.device:
            return None
    if not delta_rule_takes(q, k, v, g, beta, state):
        return None
    if normalises:
        step = Step(q, k, v, g, beta, state=None if state is None else state.mT)
        rows = None if starts is not None else run_layer_steps(step, Rule(q.shape[-1] ** -0.5, unit=True), final)
        if rows is not None:
            return rows[0], None if rows[1] is None else rows[1].mT
        unit_q, unit_k = l2_norm(q), l2_norm(k)
        if unit_q is None or unit_k is None:
            return None
        q, k = unit_q, unit_k
    found = gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=final, cu_seqlens=starts)
    return found if isinstance(found, tuple) else (found, None)


def _delta_rule(theirs: Function) -> Function:
    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        operands = query, key, value, g, beta
        packed = initial_state, kwargs.get("cu_seqlens")
        found = _updated(operands, *packed, output_final_state, use_qk_l2norm_in_kernel)
        if found is not None:
            return found
        options = dict(initial_state=initial_state, output_final_state=output_final_state, **kwargs)
        return theirs(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)

    return chunk_gated_delta_rule


FUNCTIONS = [  # the module that has transformers' function, its name, and ours
    (modeling_mamba2, "causal_conv1d_fn", _convolution),
    (modeling_mamba2, "causal_conv1d_update", _convolution_step),
    (modeling_mamba2, "mamba2_chunk_scan", _scan),
    (modeling_mamba2, "mamba2_selective_state_update", _scan_step),
    (modeling_qwen3_next, "torch_chunk_gated_delta_rule", _delta_rule),
    (modeling_qwen3_next, "torch_recurrent_gated_delta_rule", _delta_rule),
]
