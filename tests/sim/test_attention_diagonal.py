"""What the short ways on the diagonal of a causal mask spare: products, by the consumer that issues them. Results are
right without them, too."""

import pytest
import torch

from tests.util import relative_error, slow
from tritonkittens import sim
from tritonkittens.kernels.attention import attention, attention_torch, backward_plan
from tritonkittens.kernels.attention.config import Config
from tritonkittens.sim.timeline import Timeline


def operands(dim):
    return [torch.randn(1, 1, 256, dim).bfloat16() for _ in range(3)]


def products(timeline):
    """Cycles of the tensor cores that each consumer's products take."""
    found = dict(consumer0=0.0, consumer1=0.0)
    for cta in timeline.ctas:
        for span in cta.on("tensor core"):
            found[span.args["issued by"]] += span.busy[1] - span.busy[0]
    return found["consumer0"], found["consumer1"]


@pytest.mark.parametrize("dim", [64, slow(128)])
def test_first_consumer_of_the_forward(dim, rng):
    """A task is 128 queries, a block 128 keys. Of three blocks' six products each, two tasks leave out half of the
    scores of one."""
    q, k, v = operands(dim)
    taken = {}
    for causal in (False, True):
        timeline = Timeline()
        with sim.device("sm_90a", recorder=timeline):
            out = attention(q, k, v, causal=causal, config=Config(tile_n=128, consumers=2))
        assert relative_error(out, attention_torch(q.double(), k.double(), v.double(), causal=causal)[0]) < 1e-2
        taken[causal] = products(timeline)
    print(taken)
    assert taken[False][0] == pytest.approx(taken[False][1])
    assert taken[True][1] == pytest.approx(taken[False][1] * 3 / 4), "tasks of one block and of two, not of two each"
    assert taken[True][0] == pytest.approx(taken[True][1] * 5 / 6)


@pytest.mark.parametrize("dim, queries", [(64, 128), slow(128, 64)])
def test_second_consumer_of_the_backward(dim, queries, rng, monkeypatch):
    """A task is 128 keys, a block so many `queries`: five products of 256 cycles, and what is added to its scores and
    to dP. The first 64 queries of each task see none of the second consumer's keys: no scores, dP and dV of them (dK
    and dQ come an iteration later, of zeros)."""
    monkeypatch.setattr(backward_plan, "worth_sums", lambda *_: True)  # in a single pass
    q, k, v = (x.requires_grad_() for x in operands(dim))
    block, tasks = 5 * 256 + queries, 2
    spared = 3 * 256 * 64 // queries + 64
    for causal in (False, True):
        timeline = Timeline()
        with sim.device("sm_90a") as device:
            out = attention(q, k, v, causal=causal)
            device.recorder = timeline
            grad = torch.randn(out.shape).bfloat16()
            found = torch.autograd.grad(out, (q, k, v), grad)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wanted = torch.autograd.grad(attention_torch(*exact, causal=causal)[0], exact, grad.double())
        assert all(relative_error(x, y) < 1e-2 for x, y in zip(found, wanted, strict=True))
        every = (tasks * 256 // queries - (128 // queries if causal else 0)) * block
        assert products(timeline) == pytest.approx((every, every - (tasks * spared if causal else 0)))
