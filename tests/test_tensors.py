"""What the PyTorch entry points share: allocations that are torch's, and signatures that tell calls apart."""

import threading

import pytest
import torch
from triton.runtime.jit import JITCallable

from tritonkittens import sim
from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.loss import call_plan as losses_plan
from tritonkittens.kernels.norm import rms_norm
from tritonkittens.kernels.rotary import rotary
from tritonkittens.launch.plain import PlainKernel


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (0, 4), (4, 0), (2, 1, 7), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_allocations_are_those_of_torch(shape, dtype):
    allocate, like = allocator(shape, dtype, torch.device("cpu")), torch.empty(shape, dtype=dtype)
    first, second = allocate(), allocate()
    for x in (first, second):
        assert (x.shape, x.stride(), x.dtype, x.device) == (like.shape, like.stride(), like.dtype, like.device)
    assert first.numel() == 0 or first.data_ptr() != second.data_ptr()


def test_allocations_where_torch_has_no_faster_entry(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    x = allocator((3, 5), torch.float16, torch.device("cpu"))()
    assert (x.shape, x.stride(), x.dtype) == ((3, 5), (5, 1), torch.float16)


def test_nothing_of_a_captured_graph_is_remembered(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    memo = {}
    for capturing, expected in ((True, {}), (False, {"kind": "plan"})):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert remember(memo, "kind", "plan") == "plan" and memo == expected


def _backward_of(results, leaves):
    return lambda: torch.autograd.grad([x.sum() for x in results], leaves, retain_graph=True)


def _several_launches(kind, monkeypatch):
    """A call whose plan is of this kind, and is not bound yet."""
    leaf, weight = torch.randn(1, 2, 5, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    if kind == "norm":
        return _backward_of([rms_norm(leaf, weight)], [leaf, weight])
    if kind == "rotary":
        weights = dict(q_weight=weight, k_weight=weight)
        return _backward_of(rotary(leaf, leaf, torch.rand(5, 8), torch.rand(5, 8), **weights), [leaf, weight])
    for name, value in dict(_plans={}, MOST_SUMMED=1, SUM_PROGRAMS=2, SUM_ROWS=2).items():
        monkeypatch.setattr(losses_plan, name, value)
    losses, target, options = torch.rand(9), torch.zeros(9, dtype=torch.int64), (-100, "mean", 0.0, 0.0, None, False)
    return lambda: losses_plan.run_loss_sum(losses, target, losses_plan.Options(*options))


@pytest.mark.parametrize("kind", ["norm", "rotary", "loss"])
def test_two_threads_that_compile_the_launches_of_a_plan(kind, monkeypatch):
    """The second one finds the plan of the first, which compiles its first launch. Later ones have them all."""
    found, bind, barrier = [], PlainKernel.bind, threading.Barrier(2, timeout=60)
    parse, one = JITCallable.parse, threading.Lock()

    def run():
        with sim.device():
            found.append(call())

    def alone(self):
        with one:  # CPython 3.11 fails where two threads parse
            return parse(self)

    second = threading.Thread(target=run)

    def meet(self, *args):
        launch = bind(self, *args)
        if second.ident is None:
            second.start()
        barrier.wait()
        return launch

    with sim.device():
        call = _several_launches(kind, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(PlainKernel, "bind", meet)
        patched.setattr(JITCallable, "parse", alone)
        run()
        second.join()
    run()
    assert len(found) == 3
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_signatures_tell_tensors_apart(count):
    base = torch.zeros(64, 72, dtype=torch.bfloat16)[:, :64]
    others = {
        "shape": base[:63],
        "strides": base.contiguous(),
        "transposed": base.mT,
        "dtype": torch.zeros(64, 72, dtype=torch.float16)[:, :64],
        "address": torch.zeros(64 * 72 + 1, dtype=torch.bfloat16)[1:].view(64, 72)[:, :64],
    }
    again, same = torch.ones(64, 72, dtype=torch.bfloat16)[:, :64], signature(*[base] * count)
    for position in range(count):
        assert signature(*[again if i == position else base for i in range(count)]) == same
        for name, other in others.items():
            assert signature(*[other if i == position else base for i in range(count)]) != same, name
