"""Gradients of the scan of Mamba-2: their launches, and the memory of their results."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._copies import zero_behind
from tritonkittens.kernels._sequences import ends_of, slots_of
from tritonkittens.kernels.activation.call_plan import Options
from tritonkittens.kernels.activation.call_plan import run_backward as gate_backward
from tritonkittens.kernels.linear_attention.backward_plan import gradients
from tritonkittens.kernels.linear_attention.config import ROWS, WIDEST
from tritonkittens.kernels.mamba2.call_plan import are_paired, launch_steps, run
from tritonkittens.kernels.mamba2.checks import Operands
from tritonkittens.kernels.mamba2.device.scan import step_gradients, sum_steps


def _through_gate(
    dy: Tensor, given: Operands, softplus: bool, limits: tuple[float, float]
) -> tuple[Tensor, Tensor | None]:
    """Gradients of what silu(z) multiplies, which is computed again, and of z."""
    if given.z is None:
        return dy, None
    y, _ = run(given._replace(z=None), softplus, limits, False)
    dz, dy = gate_backward(dy, given.z, y, Options("silu", False))
    if given.cu_seqlens is not None:  # z may be NaN there
        zero_behind(dz[0], given.cu_seqlens)
    return dy, dz


def run_backward(
    given: Operands, softplus: bool, limits: tuple[float, float], dy: Tensor, d_states: Tensor | None
) -> Operands:
    """Gradients of `mamba_chunk_scan`, where it has operands, for those of y and of the states after."""
    x, dt, A, B, C, D, z, bias, state, starts = given
    heads, slots, ends = x.shape[2], slots_of(x, starts), ends_of(x, starts)
    dy, dz = _through_gate(dy, given, softplus, limits)
    sums = [A.new_empty(heads, slots, ROWS) for _ in range(3)]
    if x.numel():
        launch_steps(sum_steps, [], sums, given, softplus, limits, ends, True)
    paired = are_paired(x, B[..., :WIDEST])
    found = gradients(C, B, x, dy, sums, (state, d_states), starts, ends, 1.0, D, paired)
    ddt, (dA, dbias) = dt.new_zeros(dt.shape), A.new_zeros(2, slots, heads)
    if x.numel():
        launch_steps(step_gradients, [found.sums], [ddt, dA, dbias], given, softplus, limits, ends)
    return Operands(
        x=found.dv.contiguous().view(x.shape),
        dt=ddt,
        A=dA.sum(0),
        B=found.dk.contiguous().view(B.shape),
        C=found.dq.contiguous().view(C.shape),
        D=None if D is None or found.dskip is None else found.dskip.to(D.dtype),
        z=dz,
        dt_bias=None if bias is None else dbias.sum(0).to(bias.dtype),
        initial_states=None if found.dstate is None or state is None else found.dstate.contiguous().view(state.shape),
    )
