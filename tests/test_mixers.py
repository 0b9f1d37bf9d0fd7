"""Mixers of sequences: against transformers' with the same weights, cut anywhere, and on simulated kernels."""

import copy

import pytest
import torch

from tests.cases_mixers import BF16, BOUND, FP32, FP64, MIXERS, agree, in_double, made, random_state
from tests.util import refused, relative_error, some_slow
from tritonkittens import sim
from tritonkittens.kernels.based import based_attention_torch
from tritonkittens.kernels.gated_delta_net import gated_delta_rule_torch
from tritonkittens.kernels.linear_attention import linear_attention_torch
from tritonkittens.kernels.mamba2.checks import Operands
from tritonkittens.nn import GatedDeltaNet, Hedgehog, LinearAttention, Mamba2, MixerState, mixers
from tritonkittens.nn._recurrences import recurrence


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_mixers.DEVICE", "cpu")


def of_transformers(name):
    """(transformers' layer in float64, ours of the same weights, what theirs computes)."""
    pytest.importorskip("transformers", minversion="5.17")
    if name == "mamba2":
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

        sizes = dict(hidden_size=24, num_heads=6, head_dim=8, state_size=10, chunk_size=16, time_step_limit=(0.2, 1.5))
        theirs = Mamba2Mixer(Mamba2Config(**sizes, n_groups=2, use_bias=True, num_hidden_layers=1), 0)
        ours = Mamba2(24, 10, headdim=8, ngroups=2, dt_limit=(0.2, 1.5), bias=True, dtype=FP64)
    elif name == "gated_delta_net":
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

        sizes = dict(linear_num_value_heads=6, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12)
        theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=24, num_hidden_layers=1, **sizes), 0)
        ours = GatedDeltaNet(24, 2, 6, 8, 12, dtype=FP64)
    else:
        from transformers.models.minimax.modeling_minimax import MiniMaxConfig, MiniMaxLightningAttention

        sizes = dict(num_attention_heads=4, head_dim=10, num_hidden_layers=3, block_size=16)
        theirs = MiniMaxLightningAttention(MiniMaxConfig(hidden_size=24, **sizes), 1)
        ours = LinearAttention(24, 4, 10, dtype=FP64)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.4)
    theirs = theirs.double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours.double(), lambda x: theirs(x, None, None)[0] if name == "linear_attention" else theirs(x)


@pytest.mark.parametrize("name", ["mamba2", "gated_delta_net", "linear_attention"])
def test_the_weights_of_transformers(name, rng):
    """Results and gradients. Theirs are in fp32 inside."""
    theirs, ours, run = of_transformers(name)
    x = torch.randn(2, 70, 24, dtype=FP64)
    found, expected = ours(x), run(x)
    assert relative_error(found, expected) < 2e-6
    weight = torch.randn_like(found)
    ours_grads, their_grads = (
        dict(zip(dict(m.named_parameters()), torch.autograd.grad((y * weight).sum(), [*m.parameters()]), strict=True))
        for m, y in ((ours, found), (theirs, expected))
    )
    assert ours_grads.keys() == their_grads.keys()
    for key, grad in ours_grads.items():
        assert relative_error(grad, their_grads[key]) < 2e-5, key


def test_based(rng):
    """fla's layer."""
    _, mixer = made(MIXERS, "based", FP32)
    x = torch.randn(2, 67, 16, dtype=FP64)
    q, k, v = ((x @ w.weight.T).unflatten(-1, (1, -1)) for w in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    o, state = based_attention_torch(q, k, v, normalize=True)
    y, after = mixer(x, return_state=True)
    assert relative_error(y, o.flatten(2) @ mixer.o_proj.weight.T) < 1e-12
    assert relative_error(after.recurrent, state) < 1e-12


@pytest.mark.parametrize("length", [0, 1, 64, 129])
def test_recurrences(length, rng):
    """Against recurrences step by step, with states before."""
    q, k = (torch.nn.functional.normalize(torch.randn(2, length, 2, 5, dtype=FP64), dim=-1) for _ in range(2))
    v, state = torch.randn(2, length, 4, 7, dtype=FP64), torch.randn(2, 4, 5, 7, dtype=FP64)
    g, beta = -torch.rand(2, length, 4, dtype=FP64), torch.rand(2, length, 4, dtype=FP64)
    expected = gated_delta_rule_torch(q, k, v, g, beta, scale=0.3, initial_state=state)
    agree(recurrence(q, k, v, g, beta, state, 0.3), expected, 1e-10)
    wide = (x.repeat_interleave(2, 2) for x in (q, k))
    expected = linear_attention_torch(*wide, v, g=g, scale=0.3, initial_state=state)
    agree(recurrence(q, k, v, g, None, state, 0.3), expected, 1e-10)


@pytest.mark.parametrize("name", MIXERS)
def test_a_sequence_cut_anywhere(name, rng):
    """States continue it, and so do steps of a token. Rows after a cut do not matter before it."""
    _, mixer = made(MIXERS, name, FP32)
    x, before = torch.randn(1, 67, 16, dtype=FP64), in_double(random_state(mixer, 1, FP32))
    with torch.no_grad():
        expected = mixer(x, before, return_state=True)
        assert torch.equal(mixer(x, before), expected[0])
        for cut in (0, 2, 64, 67):
            first, middle = mixer(x[:, :cut], before, return_state=True)
            second, after = mixer(x[:, cut:], middle, return_state=True)
            agree((torch.cat([first, second], 1), after), expected, 1e-10)
        steps, after = [], None
        for t in range(5):
            y, after = mixer.step(x[:, t], after)
            steps.append(y)
        agree((torch.stack(steps, 1), after), mixer(x[:, :5], return_state=True), 1e-10)


@pytest.mark.parametrize("name", MIXERS)
def test_on_kernels(name, rng, monkeypatch):
    """With states before and after, and what the same weights give in torch in bf16. Projections, which have tests of
    their own, stay in torch."""
    monkeypatch.setattr("tritonkittens.nn.linear._has_kernels", lambda device: False)
    mixer, exact = made(MIXERS, name, BF16)
    x, state = torch.randn(1, 3, 16).to(BF16), random_state(mixer, 1, BF16)
    with torch.no_grad():
        expected = exact(x.double(), in_double(state), return_state=True)
        with sim.device() as device:
            found = mixer(x, state, return_state=True)
            launches = len(device.launches)
        in_torch = mixer(x, state, return_state=True)
    assert launches == dict(mamba2=3, gated_delta_net=4, linear_attention=2, based=1)[name]
    assert found[0].dtype == BF16 and found[1].recurrent.dtype == FP32
    agree(found, expected, BOUND)
    agree(in_torch, expected, BOUND)


def _between_projections(name):
    """What a mixer computes there, and operands in bf16 and fp32."""

    def randn(*shape, dtype=BF16):
        return torch.randn(shape).to(dtype).requires_grad_()

    q, k, v = randn(1, 3, 1, 16), randn(1, 3, 1, 16), randn(1, 3, 2, 16)
    if name == "convolution":
        conv = torch.nn.Conv1d(16, 16, 4, groups=16)

        def run(x, weight, bias):
            named = dict(weight=weight, bias=bias)
            return torch.func.functional_call(Convolution(conv), {f"conv.{key}": p for key, p in named.items()}, (x,))

        return run, (randn(1, 5, 16), randn(16, 1, 4), randn(16))
    if name == "mamba2":

        def run(x, dt, A, B, C, D, bias):
            given = Operands(x, dt, -A.exp(), B, C, D, None, bias, None, None)
            return mixers._scanned(given, (0.0, 9.0), False)

        return run, (v, randn(1, 3, 2), randn(2, dtype=FP32), k, q, randn(2), randn(2))
    if name == "gated_delta_net":

        def run(q, k, v, g, beta):
            return mixers._updated(mixers._unit(q), mixers._unit(k), v, -g.exp(), beta.sigmoid(), None, False)

        return run, (q, k, v, randn(1, 3, 2, dtype=FP32), randn(1, 3, 2, dtype=FP32))
    if name == "linear_attention":
        return lambda q, k, v: mixers._attended(q, k, v, torch.ones(1), None, False), (q, k, v[:, :, :1])
    return lambda q, k, v: mixers._expanded(q, k, v, None, False), (q, k, v[:, :, :1])


class Convolution(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return mixers._convolved(x, self.conv, None)


@pytest.mark.parametrize("name", some_slow(["convolution", *MIXERS], ["convolution"]))
def test_gradients_on_kernels(name, rng):
    """Of what is between the projections."""
    run, given = _between_projections(name)
    with sim.device():
        o = run(*given)[0]
        weight = torch.randn_like(o)
        found = torch.autograd.grad(o, given, weight)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected_o = run(*exact)[0]
    expected = torch.autograd.grad(expected_o, exact, weight.double())
    agree((o, *found), (expected_o, *expected), 2 * BOUND)


def test_a_norm_of_what_is_gated_already(rng):
    norm = Mamba2(16, 16, headdim=16, ngroups=2, dtype=FP64).norm
    x, gate = torch.randn(2, 3, 32, dtype=FP64).unbind()
    assert relative_error(norm(x * torch.nn.functional.silu(gate), None), norm(x, gate)) < 1e-12


@pytest.mark.parametrize("name", MIXERS)
def test_dtypes_and_copies(name, rng):
    """Without kernels: fp32, autocast, and a trained copy."""
    mixer, exact = made(MIXERS, name, FP32)
    x = torch.randn(2, 5, 16)
    y, state = copy.deepcopy(mixer)(x, return_state=True)
    assert y.dtype == state.recurrent.dtype == FP32 and relative_error(y, exact(x.double())) < 1e-5
    with torch.autocast("cpu", BF16):
        found, after = mixer(x, state, return_state=True)
    assert found.dtype == BF16 and after.recurrent.dtype == FP32
    assert relative_error(found, exact(x.double(), in_double(state))) < 2 * BOUND
    found.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("is_simulated", [True, False])
def test_what_does_not_fit(is_simulated):
    mixer, x = Mamba2(16, 16, headdim=16, dtype=BF16), torch.zeros(1, 3, 16, dtype=BF16)
    wrong = MixerState(torch.zeros(1, 64, 4), torch.zeros(1, 2, 16, 16))
    for given, message in (
        ((x[..., 1:],), "Mamba2: x is (1, 3, 15); it must be (batch, length, 16)"),
        ((x[0],), "Mamba2: x is (3, 16); it must be (batch, length, 16)"),
        ((x, wrong), "Mamba2: conv of the state is (1, 64, 4); it must be (1, 64, 3)"),
        ((x, wrong._replace(conv=None)), "Mamba2: conv of the state is None; it must be (1, 64, 3)"),
        ((x, wrong._replace(conv=torch.zeros(1, 64, 3), recurrent=x)), "Mamba2: recurrent of the state is (1, 3, 16);"),
    ):
        with refused(message, ValueError):
            if is_simulated:
                with sim.device():
                    mixer(*given)
            else:
                mixer(*given)
    with refused("Mamba2.step: x is (1, 3, 16); it must be (batch, hidden)", ValueError):
        mixer.step(x)
    with refused("expand · d_model is 32, headdim 20, ngroups 1; heads must be whole", ValueError):
        Mamba2(16, headdim=20)
    with refused("GatedDeltaNet: num_v_heads is 3; it must be a multiple of num_k_heads, 2", ValueError):
        GatedDeltaNet(16, 2, 3)
    with refused("LinearAttention: decay is (3,); it must be (4,)", ValueError):
        LinearAttention(16, 4, decay=torch.ones(3))


# ---------------------------------------------------------------- Hedgehog, whose states have another form


def small_hedgehog(**options):
    """Two heads that share keys, with rotations, and factors of windows that differ."""
    mixer = Hedgehog(12, 2, 1, 8, 6, inv_freq=torch.tensor([1.0, 0.4, 0.1, 0.02]), dtype=FP64, **options)
    torch.nn.init.normal_(mixer.window_factors)
    return mixer


@pytest.mark.parametrize("affine", [False, True])
def test_hedgehog(affine, rng):
    """LoLCATs' layer, by its definition: masks of terraces, and factors of both kinds of weights."""
    mixer = small_hedgehog(affine_attention_factors=affine)
    assert {name: tuple(w.shape) for name, w in mixer.state_dict().items()} == {
        "window_factors": (1, 2, 1, 1),
        **{f"{n}_proj.weight": shape for n, shape in dict(q=(16, 12), k=(8, 12), v=(8, 12), o=(12, 16)).items()},
        **{f"feature_map_{n}.mlp.layer": (2, 8, 6) for n in "qk"},
    }
    x = torch.randn(2, 210, 12, dtype=FP64)
    q, k, v = (
        (x @ getattr(mixer, f"{n}_proj").weight.T).unflatten(-1, (-1, 8)).transpose(1, 2).expand(-1, 2, -1, -1)
        for n in "qkv"
    )
    angles = (torch.arange(210)[:, None] * mixer.inv_freq.double()).repeat(1, 2)
    q, k = (t * angles.cos() + torch.cat([-t[..., 4:], t[..., :4]], -1) * angles.sin() for t in (q, k))
    f_q, f_k = (
        torch.cat([(t @ m.mlp.layer).softmax(-1), (-t @ m.mlp.layer).softmax(-1)], -1)
        for t, m in ((q, mixer.feature_map_q), (k, mixer.feature_map_k))
    )
    window = torch.block_diag(*[torch.ones(64, 64)] * 4)
    window = (window + window.roll(-64, -1))[:210, :210].bool().tril()
    scores = (q @ k.mT * 8**-0.5).masked_fill(~window, -torch.inf)
    beta = mixer.window_factors.sigmoid()
    near = beta * (scores - scores.amax(-1, keepdim=True)).exp()
    far = (1 - beta if affine else 1) * (f_q @ f_k.mT).masked_fill(window | ~window.new_ones(210, 210).tril(), 0)
    o = ((near + far) @ v) / (near + far).sum(-1, keepdim=True)
    assert relative_error(mixer(x), o.transpose(1, 2).flatten(2) @ mixer.o_proj.weight.T) < 1e-6  # inv_freq is fp32


def test_hedgehog_cut_anywhere(rng):
    mixer, x = small_hedgehog(), torch.randn(2, 200, 12, dtype=FP64)
    with torch.no_grad():
        expected, (*state, length) = mixer(x, return_state=True)
        assert length == 200 and state[0].shape[1] == 72
        for cut in (0, 1, 64, 100, 128, 192, 200):
            first, middle = mixer(x[:, :cut], return_state=True)
            second, (*after, _) = mixer(x[:, cut:], middle, return_state=True)
            agree((torch.cat([first, second], 1), *after), (expected, *state), 1e-10)
        y, middle = mixer(x[:, :126], return_state=True)
        for t in range(126, 130):
            y, middle = mixer.step(x[:, t], middle)
            agree((y,), (expected[:, t],), 1e-10)
    with refused("Hedgehog: keys of the state is (2, 66, 1, 8); it must be (1, 66, 1, 8)", ValueError):
        mixer(x[:1], middle)
    with refused("Hedgehog: num_heads is 3; it must be a multiple of num_key_value_heads, 2", ValueError):
        Hedgehog(12, 3, 2)
    with refused("Hedgehog: inv_freq is (3,); it must be (4,)", ValueError):
        Hedgehog(12, 2, head_dim=8, inv_freq=torch.ones(3))


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hedgehog_on_kernels(gradients, rng, monkeypatch):
    monkeypatch.setattr("tritonkittens.nn.linear._has_kernels", lambda device: False)
    options = dict(head_dim=128, inv_freq=torch.rand(64))
    mixer, exact = (Hedgehog(16, 2, 1, dtype=dtype, **options) for dtype in (BF16, FP64))
    exact.load_state_dict(mixer.state_dict())
    x = torch.randn(1, 5, 16).to(BF16).requires_grad_(gradients)
    x64 = x.detach().double().requires_grad_(gradients)
    with sim.device() as device:
        y, state = mixer(x[:, :3], return_state=True)
        z, (*after, _) = mixer(x[:, 3:], state, return_state=True)
        assert len(device.launches) == 4
        if gradients:
            found = torch.autograd.grad((y, z), [x, *mixer.parameters()], (torch.ones_like(y), torch.ones_like(z)))
    expected, (*last, _) = exact(x64, return_state=True)
    agree((torch.cat([y, z], 1), *after), (expected, *last), BOUND)
    if gradients:
        wanted = torch.autograd.grad(expected.sum(), [x64, *exact.parameters()], allow_unused=True)
        pairs = zip(["x", *dict(mixer.named_parameters())], found, wanted, strict=True)
        for name, ours, theirs in pairs:
            if theirs is None or name == "window_factors":  # a factor of all weights, and maps without earlier blocks
                assert not ours.any() or name == "window_factors"
            else:
                assert relative_error(ours, theirs) < 2 * BOUND, name


def test_hedgehog_with_autocast(rng):
    mixer = Hedgehog(16, 2, head_dim=8)
    x = torch.randn(2, 70, 16)
    y, state = copy.deepcopy(mixer)(x, return_state=True)
    with torch.autocast("cpu", BF16):
        found, after = mixer(x, return_state=True)
    assert found.dtype == BF16 and after.kv.dtype == FP32 and relative_error(found, y) < 2 * BOUND
    found.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
