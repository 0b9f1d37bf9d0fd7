"""A mixer of sequences with a softmax over a window and linear attention to all tokens before it: `Hedgehog`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonkittens.kernels._dispatch import unseen_by_function_modes
from tritonkittens.kernels.hedgehog import hedgehog_attention, hedgehog_attention_torch
from tritonkittens.kernels.hedgehog.checks import are_taken
from tritonkittens.kernels.rotary import rotary
from tritonkittens.nn._recurrences import wide
from tritonkittens.nn.linear import Linear
from tritonkittens.nn.mixers import Mixer

BLOCK = 64  # tokens


class HedgehogState(NamedTuple):
    """What `Hedgehog` keeps of the tokens so far.

    keys, values: (batch, rows, num_key_value_heads, head_dim), of the last block of 64 tokens that is complete, and of
    the tokens after it. Keys are rotated.
    kv, z: sums of φ(k) vᵀ and φ(k) of all blocks before: (batch, num_heads, 2 · feature_dim, head_dim) and (batch,
    num_heads, 2 · feature_dim), in fp32 or float64.
    length: how many tokens there were.
    """

    keys: Tensor
    values: Tensor
    kv: Tensor
    z: Tensor
    length: int


class FeatureMap(nn.Module):
    """The weights of a map, (heads, columns of a head, feature_dim), where LoLCATs has them."""

    def __init__(self, heads: int, columns: int, feature_dim: int, kind: dict[str, Any]) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.layer = nn.Parameter(torch.empty(heads, columns, feature_dim, **kind))
        nn.init.kaiming_uniform_(self.mlp.layer)

    @property
    def weight(self) -> Tensor:
        layer: Tensor = self.mlp.layer
        return layer


class Hedgehog(Mixer[HedgehogState]):
    """The attention of Hedgehog in windows of blocks, with the state_dict of LoLCATs' `LolcatsTKWindowAttention` with
    64 features and a window of 64.

    x: (batch, length, hidden_size) gives the same shape; `step` takes a token, (batch, hidden_size). bf16 with heads of
    128 columns and 64 features runs on `hedgehog_attention` and `rotary` on a Hopper or Blackwell GPU (or in the
    simulator), forward and backward. What the kernels do not take runs in torch, with all weights at once.

    Args:
        hidden_size: columns of x and of the result.
        num_heads: heads of queries.
        num_key_value_heads: heads of keys and values, a divisor of num_heads; None: as many.
        head_dim: columns of a head; None: ⌊hidden_size / num_heads⌋.
        feature_dim: columns of the maps.
        affine_attention_factors: α is 1 - β. By default it is 1. β is the sigmoid of the learned `window_factors`.
        inv_freq: (head_dim / 2,) angles by which a position rotates pairs of columns of queries and keys, as
            `rotary_emb.inv_freq` of transformers' Llama; None: no rotation. Not a part of the state_dict.

    Example::

        mixer = Hedgehog(4096, num_heads=32, num_key_value_heads=8, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            y, state = mixer(prompt, return_state=True)
            y, state = mixer.step(token, state)

    Source: Zhang et al., LoLCATs (2024).
    """

    inv_freq: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        feature_dim: int = 64,
        *,
        affine_attention_factors: bool = False,
        inv_freq: Tensor | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = dict(device=device, dtype=dtype)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.affine_attention_factors = affine_attention_factors
        if num_heads % self.num_key_value_heads:
            raise ValueError(
                f"Hedgehog: num_heads is {num_heads}; it must be a multiple of num_key_value_heads, "
                f"{self.num_key_value_heads}"
            )
        if inv_freq is not None and 2 * inv_freq.numel() != self.head_dim:
            raise ValueError(f"Hedgehog: inv_freq is {tuple(inv_freq.shape)}; it must be ({self.head_dim // 2},)")
        columns, of_keys = num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.q_proj = Linear(hidden_size, columns, False, **kind)
        self.k_proj = Linear(hidden_size, of_keys, False, **kind)
        self.v_proj = Linear(hidden_size, of_keys, False, **kind)
        self.o_proj = Linear(columns, hidden_size, False, **kind)
        self.feature_map_q, self.feature_map_k = (
            FeatureMap(num_heads, self.head_dim, feature_dim, kind) for _ in range(2)
        )
        self.window_factors = nn.Parameter(torch.zeros(1, num_heads, 1, 1, **kind))
        inv_freq = None if inv_freq is None else inv_freq.to(device, torch.float32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _state_shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        features = 2 * self.feature_map_k.weight.shape[-1]
        sums = batch, self.num_heads, features, self.head_dim
        return sums, sums[:3]

    def _check_state(self, state: HedgehogState, batch: int) -> None:
        rows = state.length % BLOCK + (BLOCK if state.length >= BLOCK else 0)
        shape = batch, rows, self.num_key_value_heads, self.head_dim
        for (part, given), wanted in zip(
            state._asdict().items(), (shape, shape, *self._state_shapes(batch)), strict=False
        ):
            if tuple(given.shape) != wanted:
                raise ValueError(f"Hedgehog: {part} of the state is {tuple(given.shape)}; it must be {wanted}")

    def _mixed(self, x: Tensor, state: HedgehogState | None, return_state: bool) -> tuple[Tensor, HedgehogState]:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        length, kept = (0, 0) if state is None else (state.length, state.keys.shape[1])
        if self.inv_freq is not None:
            positions = torch.arange(length, length + x.shape[1], device=x.device)
            angles = positions[:, None] * self.inv_freq.to(wide(q))
            q, k = _rotated(q, k, angles.cos(), angles.sin())
        if state is not None:  # rows of the window again, whose results are dropped
            q = nn.functional.pad(q, (0, 0, 0, 0, kept, 0))
            k, v = torch.cat([state.keys.to(k.dtype), k], 1), torch.cat([state.values.to(v.dtype), v], 1)
        before = None if state is None else (state.kv.to(wide(v)), state.z.to(wide(v)))
        beta = self.window_factors.flatten().to(wide(v)).sigmoid()
        alpha = 1 - beta if self.affine_attention_factors else torch.ones_like(beta)
        group = self.num_heads // self.num_key_value_heads
        rows = q, *(t if group == 1 else t.repeat_interleave(group, 2) for t in (k, v))
        maps = (m.weight.to(q.dtype) for m in (self.feature_map_q, self.feature_map_k))
        o, sums = _windowed(rows, (*maps, alpha, beta), before, return_state)
        if sums is None:
            kv, z = (v.new_zeros(shape, dtype=wide(v)) for shape in self._state_shapes(x.shape[0]))
            sums = kv, z
        begin = max(k.shape[1] // BLOCK - 1, 0) * BLOCK
        after = HedgehogState(k[:, begin:], v[:, begin:], *sums, length + x.shape[1])
        return self.o_proj(o[:, kept:].flatten(2)), after


@unseen_by_function_modes
def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (B, T, heads, columns), with columns i and i + columns / 2 rotated."""
    if are_taken(q, k):
        found = rotary(q, k, cos, sin, unsqueeze_dim=2)
        assert isinstance(found, tuple)
        return found
    cos, sin = cos[:, None], sin[:, None]
    halves = (t.to(cos.dtype).chunk(2, -1) for t in (q, k))
    found_q, found_k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in halves)
    return found_q.to(q.dtype), found_k.to(k.dtype)


Sums = tuple[Tensor, Tensor] | None  # kv and z; None: zeros


def _windowed(
    rows: tuple[Tensor, ...], of_heads: tuple[Tensor, ...], before: Sums, return_state: bool
) -> tuple[Tensor, Sums]:
    """The attention of rows that begin with a block, and the sums over blocks before the last complete one."""
    length = rows[0].shape[1]
    whole = length // BLOCK * BLOCK
    if not return_state or whole <= BLOCK:
        return _attended(*rows, *of_heads, before, False)[0], before
    o, after = _attended(*(t[:, :whole] for t in rows), *of_heads, before, True)
    if whole < length:
        second, _ = _attended(*(t[:, whole - BLOCK :] for t in rows), *of_heads, after, False)
        o = torch.cat([o, second[:, BLOCK:]], 1)
    return o, after


@unseen_by_function_modes
def _attended(*given: Any) -> tuple[Tensor, Sums]:
    """(o, the sums after where they are wanted) of rows, tensors of heads, the sums before, and whether they are."""
    *tensors, before, return_state = given
    if are_taken(*tensors[:5]):
        found = hedgehog_attention(*tensors, initial_state=before, output_final_state=return_state)
        return found if isinstance(found, tuple) else (found, None)
    o, after = hedgehog_attention_torch(*tensors, initial_state=before, dtype=wide(tensors[2]))
    return o.to(tensors[2].dtype), after
