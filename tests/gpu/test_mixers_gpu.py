"""Mixers of sequences on the kernels, against the same weights in float64: a prompt, steps, gradients, torch.compile
and CUDA graphs. `make test` has smaller ones in tests/test_mixers.py."""

import pytest
import torch

from tests.cases_mixers import BF16, BOUND, LARGE, MIXERS, agree, in_double, made
from tests.util import DEVICE, on_gpu_or_simulated, relative_error, slow
from tritonkittens.kernels._dispatch import has_kernels
from tritonkittens.nn import Hedgehog, MixerState

pytestmark = pytest.mark.usefixtures("kernel_device")

KINDS = on_gpu_or_simulated(LARGE, MIXERS)
NAMES = on_gpu_or_simulated(list(KINDS), [slow(name) for name in KINDS])
SHAPE = on_gpu_or_simulated((2, 300), (1, 5))


def tokens(mixer, dtype):
    return torch.randn(*SHAPE, mixer.hidden_size, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_and_steps(name, dtype, rng):
    mixer, exact = made(KINDS, name, dtype)
    x = tokens(mixer, dtype)
    assert has_kernels(x.device, needs_tma=True)
    with torch.no_grad():
        y, state = mixer(x[:, :-3], return_state=True)
        found = [y]
        piece, state = mixer(x[:, -3:-1], state, return_state=True)
        step, state = mixer.step(x[:, -1], state)
        found += [piece, step[:, None]]
        expected = exact(x.double(), return_state=True)
    agree((torch.cat(found, 1), state), expected, BOUND)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, rng):
    mixer, exact = made(KINDS, name, BF16)
    x = tokens(mixer, BF16).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, expected = mixer(x), exact(x64)
    weight = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *mixer.parameters()], weight)
    wanted = torch.autograd.grad(expected, [x64, *exact.parameters()], weight.double())
    for key, ours, theirs in zip(["x", *dict(mixer.named_parameters())], found, wanted, strict=True):
        assert relative_error(ours, theirs) < 3 * BOUND, key


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name, rng):
    """One graph for a prompt, and one for a step."""
    torch._dynamo.reset()
    mixer, _ = made(KINDS, name, BF16)
    backend, x = on_gpu_or_simulated("inductor", "aot_eager"), tokens(mixer, BF16)
    run = torch.compile(mixer, fullgraph=True, backend=backend)
    step = torch.compile(mixer.step, fullgraph=True, backend=backend)
    with torch.no_grad():
        _, state = expected = mixer(x, return_state=True)
        agree(run(x, return_state=True), expected, BOUND)
        agree(step(x[:, 0], state), mixer.step(x[:, 0], state), BOUND)


@pytest.mark.skipif(DEVICE == "cpu", reason="a graph needs a GPU")
@pytest.mark.parametrize("name", LARGE)
def test_steps_in_a_cuda_graph(name, rng):
    """A step that replaces its state in place, captured once and replayed for each token."""
    mixer, exact = made(LARGE, name, BF16)
    x = tokens(mixer, BF16)
    with torch.no_grad():
        _, state = mixer(x[:, :-4], return_state=True)
        state, token = MixerState(*(None if s is None else s.clone() for s in state)), x[:, -4].clone()
        before = in_double(state)

        def run():
            y, after = mixer.step(token, state)
            for ours, new in zip(state, after, strict=True):
                if ours is not None:
                    ours.copy_(new)
            return y

        stream = torch.cuda.Stream()
        kept = [None if s is None else s.clone() for s in state]
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = run()
        for s, old in zip(state, kept, strict=True):
            if s is not None:
                s.copy_(old)
        found = []
        for t in range(-4, 0):
            token.copy_(x[:, t])
            graph.replay()
            found.append(y.clone())
        agree((torch.stack(found, 1), state), exact(x[:, -4:].double(), before, return_state=True), BOUND)


@pytest.mark.parametrize("shape", on_gpu_or_simulated([(2, 300), (1, 64), (3, 1000)], [slow((1, 67))]), ids=str)
def test_hedgehog(shape, rng):
    """A prompt, pieces and steps, and gradients of the whole. Heads share keys, and are rotated."""
    options = dict(head_dim=128, inv_freq=1e4 ** -torch.linspace(0, 1, 64), device=DEVICE)
    mixer, exact = (Hedgehog(256, 2, 1, dtype=dtype, **options) for dtype in (BF16, torch.float64))
    exact.load_state_dict(mixer.state_dict())
    x = torch.randn(*shape, 256, device=DEVICE).to(BF16).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    expected, (*last, length) = exact(x64, return_state=True)
    with torch.no_grad():
        y, state = mixer(x[:, :-3], return_state=True)
        piece, state = mixer(x[:, -3:-1], state, return_state=True)
        step, (*after, found_length) = mixer.step(x[:, -1], state)
    assert length == found_length == shape[1]
    agree((torch.cat([y, piece, step[:, None]], 1), *after), (expected, *last), BOUND)
    found = torch.autograd.grad(mixer(x), [x, *mixer.parameters()], torch.ones_like(y[:, :1]).expand(x.shape))
    wanted = torch.autograd.grad(expected.sum(), [x64, *exact.parameters()], allow_unused=True, materialize_grads=True)
    for name, ours, theirs in zip(["x", *dict(mixer.named_parameters())], found, wanted, strict=True):
        if name == "window_factors":  # a sum of terms that cancel
            assert ours.isfinite().all()
        elif theirs.any():
            assert relative_error(ours, theirs) < 3 * BOUND, name
