"""What tests of mixers of sequences share: small mixers, and their results in float64."""

import torch

from tests.util import DEVICE, relative_error
from tritonkittens.nn import Based, GatedDeltaNet, LinearAttention, Mamba2, MixerState

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
BOUND = 2e-2  # of results in bf16 after four roundings, and more in norms

MIXERS = {
    "mamba2": lambda **kind: Mamba2(16, 16, expand=2, headdim=16, **kind),
    "gated_delta_net": lambda **kind: GatedDeltaNet(16, 1, 2, 16, 16, **kind),
    "linear_attention": lambda **kind: LinearAttention(16, 1, **kind),
    "based": lambda **kind: Based(16, num_heads=1, **kind),
}
LARGE = {  # as a GPU runs
    "mamba2": lambda **kind: Mamba2(256, 64, ngroups=2, **kind),
    "gated_delta_net": lambda **kind: GatedDeltaNet(256, 2, 4, **kind),
    "linear_attention": lambda **kind: LinearAttention(256, 4, **kind),
    "based": lambda **kind: Based(256, num_heads=4, **kind),
}


def made(kinds, name, dtype):
    """A mixer on the tests' device, and one of the same weights in float64."""
    mixer, exact = (kinds[name](device=DEVICE, dtype=t) for t in (dtype, FP64))
    exact.load_state_dict(mixer.state_dict())
    return mixer, exact


def random_state(mixer, batch, dtype):
    """A state in which nothing is 0. Those of Based have equal rows of kᵢ kⱼ and kⱼ kᵢ, and positive sums of weights in
    the last column."""
    conv, recurrent = mixer._state_shapes(batch)
    found = MixerState(
        None if conv is None else torch.randn(conv, device=DEVICE).to(dtype),
        torch.randn(recurrent, device=DEVICE, dtype=torch.promote_types(dtype, FP32)) / 4,
    )
    if isinstance(mixer, Based):
        found.recurrent[:, :, :1, -1] = 40.0
        pairs = found.recurrent[:, :, 1 + mixer.feature_dim :].unflatten(2, (mixer.feature_dim, -1))
        pairs.copy_(pairs + pairs.transpose(2, 3))
    return found


def agree(found, expected, bound):
    """Results, or states, of which either has no convolution."""
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, tuple):
            agree(ours, theirs, bound)
        else:
            assert (ours is None) == (theirs is None)
            assert ours is None or relative_error(ours, theirs) < bound


def in_double(state):
    return MixerState(*(None if x is None else x.double() for x in state))
