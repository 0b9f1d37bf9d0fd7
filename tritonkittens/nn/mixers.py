"""Mixers of sequences with states of constant size: `Mamba2`, `GatedDeltaNet`, `LinearAttention` and `Based`."""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tritonkittens.kernels._dispatch import unseen_by_function_modes
from tritonkittens.kernels.based import based_attention
from tritonkittens.kernels.based.checks import are_taken as based_takes
from tritonkittens.kernels.causal_conv import causal_conv1d
from tritonkittens.kernels.causal_conv.checks import are_taken as convolution_takes
from tritonkittens.kernels.gated_delta_net import gated_delta_rule
from tritonkittens.kernels.gated_delta_net.checks import are_taken as delta_rule_takes
from tritonkittens.kernels.linear_attention import linear_attention
from tritonkittens.kernels.linear_attention.checks import are_taken as linear_attention_takes
from tritonkittens.kernels.mamba2 import mamba_chunk_scan
from tritonkittens.kernels.mamba2.checks import Operands
from tritonkittens.kernels.mamba2.checks import are_taken as scan_takes
from tritonkittens.kernels.norm.composed import l2_norm
from tritonkittens.kernels.recurrent_step import Rule, Step, run_layer_steps
from tritonkittens.nn._recurrences import convolution, recurrence, taylor_features, wide
from tritonkittens.nn._unscriptable import Unscriptable
from tritonkittens.nn.linear import Linear
from tritonkittens.nn.norm import GatedRMSNorm, RMSNorm


class MixerState(NamedTuple):
    """What a mixer keeps of the tokens so far. Its size does not depend on their number.

    conv: (batch, channels, taps - 1), what the convolution saw last; None for a mixer without one.
    recurrent: (batch, heads, K, V) in fp32, of a float64 mixer in float64. For `Mamba2` it is (batch, heads, headdim,
    d_state). For `Based`, K is 1 + feature_dim + feature_dim², and V has one column more, for the sums of weights.
    """

    conv: Tensor | None
    recurrent: Tensor


State = TypeVar("State")


class Mixer(Unscriptable, nn.Module, Generic[State]):
    """The interface of all mixers: sequences, or a step of one token, with states."""

    hidden_size: int

    def forward(
        self, x: Tensor, state: State | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, State]:
        """Apply the mixer to x, (batch, length, hidden); the result has its shape.

        Args:
            state: of the tokens before x, as an earlier call returned it; None: x begins with the first token.
            return_state: also return the state after x.

        Raises ValueError for shapes that do not fit.
        """
        name = type(self).__name__
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"{name}: x is {tuple(x.shape)}; it must be (batch, length, {self.hidden_size})")
        if state is not None:
            self._check_state(state, x.shape[0])
        y, after = self._mixed(x, state, return_state)
        return (y, after) if return_state else y

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the results for the next token of each sequence, x (batch, hidden), and the state after it.

        The given state stays as it is.
        """
        if x.ndim != 2:
            raise ValueError(f"{type(self).__name__}.step: x is {tuple(x.shape)}; it must be (batch, hidden)")
        y, after = self(x[:, None], state, return_state=True)
        return y[:, 0], after

    def _check_state(self, state: Any, batch: int) -> None:
        """Raise ValueError for tensors of a state, a NamedTuple, that do not have the shapes of a batch."""
        name = type(self).__name__
        for part, given, wanted in zip(state._fields, state, self._state_shapes(batch), strict=False):
            shape = None if given is None else tuple(given.shape)
            if shape != wanted:
                raise ValueError(f"{name}: {part} of the state is {shape}; it must be {wanted}")

    def _state_shapes(self, batch: int) -> tuple[tuple[int, ...] | None, ...]:
        raise NotImplementedError

    def _mixed(self, x: Tensor, state: State | None, return_state: bool) -> tuple[Tensor, State]:
        raise NotImplementedError


def _recurrent(state: MixerState | None, x: Tensor) -> Tensor | None:
    return None if state is None else state.recurrent.to(wide(x))


@unseen_by_function_modes
def _convolved(x: Tensor, conv: nn.Conv1d, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """silu of a convolution of rows x, (B, L, C), and the last rows, which the next ones need."""
    rows, weight = x.mT, conv.weight[:, 0]
    taps = weight.shape[-1]
    before = rows.new_zeros(*rows.shape[:2], taps - 1) if before is None else before.to(x.dtype)
    if convolution_takes(rows, weight, conv.bias, before):
        y = causal_conv1d(rows, weight, conv.bias, initial_states=before, activation="silu")
    else:
        y = convolution(rows, weight, conv.bias, before)
    fresh = min(rows.shape[-1], taps - 1)
    return y.mT, torch.cat([before[..., fresh:], rows[..., rows.shape[-1] - fresh :]], -1)


def _conv1d(channels: int, taps: int, bias: bool, kind: dict[str, Any]) -> nn.Conv1d:
    """The weights of a convolution of each channel, as other implementations keep them."""
    return nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1, bias=bias, **kind)


# ---------------------------------------------------------------- Mamba-2


class Mamba2(Mixer[MixerState]):
    """The mixer of Mamba-2, with the state_dict of transformers' `Mamba2Mixer`.

    It is also that of mamba_ssm's `Mamba2` with its defaults of d_ssm, D_has_hdim, rmsnorm and norm_before_gate.
    mamba_ssm has the arguments after d_conv in another order: give them by name.

    x: (batch, length, d_model) gives the same shape; `step` takes a token, (batch, d_model). bf16 and fp16 run on
    `causal_conv1d`, `mamba_chunk_scan`, `rms_norm` and `swiglu` on a Hopper or Blackwell GPU (or in the simulator),
    forward and backward. What the kernels do not take runs in torch.

    Args:
        d_model: columns of x and of the result.
        d_state: columns of B and C, up to 256 on the kernels.
        d_conv: taps of the convolution, up to 4 on the kernels.
        expand: the scan has expand · d_model columns.
        headdim: columns of a head, a divisor of expand · d_model.
        ngroups: heads of B and C, a divisor of the heads of the scan.
        A_init_range, dt_min, dt_max, dt_init_floor: limits of random initial values.
        dt_limit: the least and the most that dt may be, after softplus.
        bias, conv_bias: of the projections, and of the convolution.
        eps: of the norm.

    Example::

        mixer = Mamba2(2048, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():  # with gradients, a step takes more launches
            y, state = mixer(prompt, return_state=True)
            y, state = mixer.step(token, state)
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        *,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = dict(device=device, dtype=dtype)
        self.hidden_size, self.d_state, self.headdim, self.ngroups = d_model, d_state, headdim, ngroups
        self.d_inner, self.dt_limit = expand * d_model, dt_limit
        self.nheads, rest = divmod(self.d_inner, headdim)
        if rest or self.nheads % ngroups:
            raise ValueError(
                f"Mamba2: expand · d_model is {self.d_inner}, headdim {headdim}, ngroups {ngroups}; heads must be "
                "whole, and a multiple of the groups"
            )
        channels = self.d_inner + 2 * ngroups * d_state
        self.in_proj = Linear(d_model, self.d_inner + channels + self.nheads, bias, **kind)
        self.conv1d = _conv1d(channels, d_conv, conv_bias, kind)
        self.dt_bias = nn.Parameter(torch.empty(self.nheads, **kind))
        self.A_log = nn.Parameter(torch.empty(self.nheads, **kind))
        self.D = nn.Parameter(torch.ones(self.nheads, **kind))
        self.norm = GatedRMSNorm(self.d_inner, eps, norm_before_gate=False, group_size=self.d_inner // ngroups, **kind)
        self.out_proj = Linear(self.d_inner, d_model, bias, **kind)
        with torch.no_grad():
            steps = torch.rand_like(self.dt_bias, dtype=torch.float32) * math.log(dt_max / dt_min) + math.log(dt_min)
            steps = steps.exp().clamp(min=dt_init_floor)
            self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
            self.A_log.copy_(torch.empty_like(self.A_log, dtype=torch.float32).uniform_(*A_init_range).log())

    def _state_shapes(self, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        channels, _, taps = self.conv1d.weight.shape
        return (batch, channels, taps - 1), (batch, self.nheads, self.headdim, self.d_state)

    def _mixed(self, x: Tensor, state: MixerState | None, return_state: bool) -> tuple[Tensor, MixerState]:
        of_group = self.ngroups * self.d_state
        z, xBC, dt = self.in_proj(x).split([self.d_inner, self.d_inner + 2 * of_group, self.nheads], -1)
        xBC, rows = _convolved(xBC, self.conv1d, None if state is None else state.conv)
        values, B, C = xBC.split([self.d_inner, of_group, of_group], -1)
        B, C = (t.unflatten(-1, (self.ngroups, self.d_state)) for t in (B, C))
        values = values.unflatten(-1, (self.nheads, self.headdim))
        before, least, most = _recurrent(state, values), *map(float, self.dt_limit)
        gate = z.unflatten(-1, (self.nheads, self.headdim))
        step = Step(C, B, values, dt, None, self.A_log, self.dt_bias, self.D, gate, before)
        rule = Rule(1.0, -1.0, least, most, weights=True, softplus=True, log_decay=True)
        found: Any = run_layer_steps(step, rule, return_state)
        is_gated = found is not None
        if not is_gated:
            A = -self.A_log.to(wide(values)).exp()
            given = Operands(values, dt, A, B, C, self.D, None, self.dt_bias, before, None)
            found = _scanned(given, self.dt_limit, return_state)
        y, after = found
        return self.out_proj(self.norm(y.flatten(2), None if is_gated else z)), MixerState(rows, after)


@unseen_by_function_modes
def _scanned(given: Operands, limits: tuple[float, float], return_state: bool) -> tuple[Tensor, Any]:
    x, dt, A, B, C, D, _, bias, state, _ = given
    if scan_takes(given):
        options: dict[str, Any] = dict(D=D, dt_bias=bias, dt_softplus=True, dt_limit=limits, initial_states=state)
        found = mamba_chunk_scan(x, dt, A, B, C, **options, return_final_states=return_state)
        return found if isinstance(found, tuple) else (found, None)
    assert D is not None and bias is not None
    dtype = wide(x)
    steps = nn.functional.softplus(dt.to(dtype) + bias.to(dtype)).clamp(*limits)
    state = None if state is None else state.mT
    y, after = recurrence(C, B, steps[..., None] * x, A * steps, None, state, 1.0)
    return (y + D.to(dtype)[:, None] * x).to(x.dtype), after.mT


# ---------------------------------------------------------------- Gated DeltaNet


class GatedDeltaNet(Mixer[MixerState]):
    """The mixer of Gated DeltaNet, with the state_dict of transformers' `Qwen3NextGatedDeltaNet`.

    x: (batch, length, hidden_size) gives the same shape; `step` takes a token, (batch, hidden_size). bf16 and fp16 run
    on `causal_conv1d`, `gated_delta_rule`, `rms_norm` and `swiglu` on a Hopper or Blackwell GPU (or in the simulator),
    forward and backward. What the kernels do not take runs in torch.

    Args:
        hidden_size: columns of x and of the result.
        num_k_heads: heads of queries and keys.
        num_v_heads: heads of values, a multiple of num_k_heads.
        head_k_dim: columns of queries and keys, up to 128 on the kernels.
        head_v_dim: columns of values.
        conv_kernel_size: taps of the convolution, up to 4 on the kernels.
        eps: of the norm.

    Example::

        mixer = GatedDeltaNet(2048, num_k_heads=16, num_v_heads=32, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():  # with gradients, a step takes more launches
            y, state = mixer(prompt, return_state=True)
            y, state = mixer.step(token, state)
    """

    def __init__(
        self,
        hidden_size: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int = 128,
        head_v_dim: int = 128,
        conv_kernel_size: int = 4,
        *,
        eps: float = 1e-6,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = dict(device=device, dtype=dtype)
        if num_v_heads % num_k_heads:
            raise ValueError(
                f"GatedDeltaNet: num_v_heads is {num_v_heads}; it must be a multiple of num_k_heads, {num_k_heads}"
            )
        self.hidden_size, self.num_k_heads, self.num_v_heads = hidden_size, num_k_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        keys, values = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        self.in_proj_qkvz = Linear(hidden_size, 2 * (keys + values), False, **kind)
        self.in_proj_ba = Linear(hidden_size, 2 * num_v_heads, False, **kind)
        self.conv1d = _conv1d(2 * keys + values, conv_kernel_size, False, kind)
        self.dt_bias = nn.Parameter(torch.ones(num_v_heads, **kind))
        self.A_log = nn.Parameter(torch.empty(num_v_heads, **kind))
        self.norm = GatedRMSNorm(head_v_dim, eps, norm_before_gate=True, **kind)
        self.out_proj = Linear(values, hidden_size, False, **kind)
        with torch.no_grad():
            self.A_log.copy_(torch.empty_like(self.A_log, dtype=torch.float32).uniform_(0.01, 16).log())

    def _state_shapes(self, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        channels, _, taps = self.conv1d.weight.shape
        return (batch, channels, taps - 1), (batch, self.num_v_heads, self.head_k_dim, self.head_v_dim)

    def _mixed(self, x: Tensor, state: MixerState | None, return_state: bool) -> tuple[Tensor, MixerState]:
        heads, group = self.num_k_heads, self.num_v_heads // self.num_k_heads
        values = group * self.head_v_dim
        qkvz = self.in_proj_qkvz(x).unflatten(-1, (heads, -1))  # of each head of keys
        *qkv, z = qkvz.split([self.head_k_dim, self.head_k_dim, values, values], -1)
        b, a = (t.flatten(2) for t in self.in_proj_ba(x).unflatten(-1, (heads, -1)).split(group, -1))
        mixed, rows = _convolved(
            torch.cat([t.flatten(2) for t in qkv], -1), self.conv1d, None if state is None else state.conv
        )
        keys = heads * self.head_k_dim
        qk, v = mixed.split([2 * keys, heads * values], -1)
        qk, v = qk.unflatten(-1, (2 * heads, self.head_k_dim)), v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        o, after = self._updated(qk, v, a, b, _recurrent(state, v), return_state)
        return self.out_proj(self.norm(o, z.reshape(o.shape)).flatten(2)), MixerState(rows, after)

    def _updated(
        self, qk: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Any]:
        """The rule of queries and keys of any length, gates a and logits b of beta, which a few rows need not compute
        before."""
        (q, k), before = qk.split(self.num_k_heads, 2), None if state is None else state.mT
        step = Step(q, k, v, a, b, self.A_log, self.dt_bias, state=before)
        rule = Rule(self.head_k_dim**-0.5, -1.0, softplus=True, log_decay=True, logits=True, unit=True)
        found = run_layer_steps(step, rule, return_state)
        if found is not None:
            return found[0], None if found[1] is None else found[1].mT
        (q, k), dtype = _unit(qk).split(self.num_k_heads, 2), wide(v)
        g = -self.A_log.to(dtype).exp() * nn.functional.softplus(a.to(dtype) + self.dt_bias.to(dtype))
        return _updated(q, k, v, g, b.to(dtype).sigmoid(), state, return_state)


def _unit(x: Tensor) -> Tensor:
    """Queries or keys of length 1."""
    y = l2_norm(x)
    if y is None:
        y = x.to(wide(x))
        y = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return y


@unseen_by_function_modes
def _updated(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, return_state: bool
) -> tuple[Tensor, Any]:
    if delta_rule_takes(q, k, v, g, beta, state):
        found = gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=return_state)
        return found if isinstance(found, tuple) else (found, None)
    o, after = recurrence(q, k, v, g, beta, state, q.shape[-1] ** -0.5)
    return o.to(v.dtype), after


# ---------------------------------------------------------------- linear attention


class LinearAttention(Mixer[MixerState]):
    """Lightning attention, causal attention with a decay in place of a softmax, with the state_dict of transformers'
    `MiniMaxLightningAttention`.

    x: (batch, length, hidden_size) gives the same shape; `step` takes a token, (batch, hidden_size). bf16 and fp16 run
    on `linear_attention` and `rms_norm` on a Hopper or Blackwell GPU (or in the simulator), forward and backward. What
    the kernels do not take runs in torch.

    Args:
        hidden_size: columns of x and of the result.
        num_heads: heads of queries, keys and values.
        head_dim: columns of a head, up to 256 on the kernels. None: ⌊hidden_size / num_heads⌋.
        decay: (num_heads,): a token n steps ago has the factor exp(-decay · n). It is the buffer `slope_rate`, and
            not learned. None: 2^(-8 i / H) for heads i from 1 to H. MiniMax multiplies this by
            1 - layer / (layers - 1) + 1e-5.
        eps: of the norm.

    Example::

        mixer = LinearAttention(2048, num_heads=16, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():  # with gradients, a step takes more launches
            y, state = mixer(prompt, return_state=True)
            y, state = mixer.step(token, state)
    """

    slope_rate: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        decay: Tensor | None = None,
        eps: float = 1e-6,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = dict(device=device, dtype=dtype)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if decay is None:
            decay = 2 ** (-8 / num_heads * torch.arange(1, num_heads + 1, dtype=torch.float32, device=device))
        if decay.shape != (num_heads,):
            raise ValueError(f"LinearAttention: decay is {tuple(decay.shape)}; it must be ({num_heads},)")
        columns = num_heads * self.head_dim
        self.qkv_proj = Linear(hidden_size, 3 * columns, False, **kind)
        self.output_gate = Linear(hidden_size, columns, False, **kind)
        self.norm = RMSNorm(columns, eps, **kind)
        self.out_proj = Linear(columns, hidden_size, False, **kind)
        self.register_buffer("slope_rate", decay.to(device, torch.float32)[:, None, None])
        self.register_load_state_dict_pre_hook(_drop_powers)

    def _state_shapes(self, batch: int) -> tuple[None, tuple[int, ...]]:
        return None, (batch, self.num_heads, self.head_dim, self.head_dim)

    def _mixed(self, x: Tensor, state: MixerState | None, return_state: bool) -> tuple[Tensor, MixerState]:
        qkv = nn.functional.silu(self.qkv_proj(x)).unflatten(-1, (self.num_heads, -1))
        q, k, v = qkv.chunk(3, -1)
        o, after = _attended(q, k, v, self.slope_rate.flatten(), _recurrent(state, v), return_state)
        o = torch.sigmoid(self.output_gate(x)) * self.norm(o.flatten(2))
        return self.out_proj(o), MixerState(None, after)


def _drop_powers(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A state_dict of transformers also has powers of the slopes for its blocks."""
    for name in ("query_decay", "key_decay", "diagonal_decay"):
        state.pop(prefix + name, None)


@unseen_by_function_modes
def _attended(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, return_state: bool
) -> tuple[Tensor, Any]:
    if linear_attention_takes(q, k, v, decay, state):
        options: dict[str, Any] = dict(scale=1.0, initial_state=state, output_final_state=return_state)
        found = linear_attention(q, k, v, decay.float(), **options)
        return found if isinstance(found, tuple) else (found, None)
    o, after = recurrence(q, k, v, -decay.to(wide(v)).expand(v.shape[:3]), None, state, 1.0)
    return o.to(v.dtype), after


# ---------------------------------------------------------------- Based


class Based(Mixer[MixerState]):
    """The linear attention of Based, whose weights are 1 + x + x²/2 of scores x, with the state_dict of fla's
    `BasedLinearAttention`.

    x: (batch, length, hidden_size) gives the same shape; `step` takes a token, (batch, hidden_size). bf16 with 16
    features runs on `based_attention` on a Hopper or Blackwell GPU (or in the simulator), forward and backward. What
    the kernels do not take runs in torch.

    Args:
        hidden_size: columns of x and of the result.
        feature_dim: columns of queries and keys of a head, 16 on the kernels.
        num_heads: a divisor of hidden_size. A head has hidden_size / num_heads columns of values, usually 64.

    Example::

        mixer = Based(1024, num_heads=16, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():  # with gradients, a step takes more launches
            y, state = mixer(prompt, return_state=True)
            y, state = mixer.step(token, state)
    """

    def __init__(
        self,
        hidden_size: int,
        feature_dim: int = 16,
        num_heads: int = 12,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = dict(device=device, dtype=dtype)
        if hidden_size % num_heads:
            raise ValueError(f"Based: hidden_size is {hidden_size}; it must be a multiple of {num_heads} heads")
        self.hidden_size, self.feature_dim, self.num_heads = hidden_size, feature_dim, num_heads
        self.q_proj = Linear(hidden_size, num_heads * feature_dim, False, **kind)
        self.k_proj = Linear(hidden_size, num_heads * feature_dim, False, **kind)
        self.v_proj = Linear(hidden_size, hidden_size, False, **kind)
        self.o_proj = Linear(hidden_size, hidden_size, False, **kind)

    def _state_shapes(self, batch: int) -> tuple[None, tuple[int, ...]]:
        features = 1 + self.feature_dim + self.feature_dim**2
        return None, (batch, self.num_heads, features, self.hidden_size // self.num_heads + 1)

    def _mixed(self, x: Tensor, state: MixerState | None, return_state: bool) -> tuple[Tensor, MixerState]:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        o, after = _expanded(q, k, v, _recurrent(state, v), return_state)
        return self.o_proj(o.flatten(2)), MixerState(None, after)


@unseen_by_function_modes
def _expanded(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, return_state: bool) -> tuple[Tensor, Any]:
    if based_takes(q, k, v, state):
        found = based_attention(q, k, v, normalize=True, initial_state=state, output_final_state=return_state)
        return found if isinstance(found, tuple) else (found, None)
    first = 1 + q.shape[-1]
    queries = taylor_features(q, q.shape[-1] ** -0.5)
    queries = torch.cat([queries[..., :first], queries[..., first:] / 2], -1)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    sums, after = recurrence(queries, taylor_features(k), values, None, None, state, 1.0)
    return (sums[..., :-1] / (sums[..., -1:] + 1e-6)).to(v.dtype), after
