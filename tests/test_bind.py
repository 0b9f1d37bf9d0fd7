"""Bound launches of templates and plain kernels: which tensor of a call stands where, and what is done where there is
no native code."""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import poison
from tritonkittens import sim
from tritonkittens.kernels.attention import tmem_decode_plan
from tritonkittens.kernels.attention.call_plan import forward
from tritonkittens.kernels.attention.config import Config as AttentionConfig
from tritonkittens.kernels.attention.device.backward import preprocess
from tritonkittens.kernels.attention.num_splits import DecodeKind
from tritonkittens.kernels.gemm.call_plan import described, unaligned_plan
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.gemm.device.unaligned_tiles import Tiles
from tritonkittens.launch import GlobalArg, Launcher
from tritonkittens.launch.arguments import leaves

BF16 = torch.bfloat16
SCALED = (((32, 64), BF16), ((32, 64), torch.float32), ((1,), torch.float32))  # tensors of `scaled`


@pytest.fixture
def bound(monkeypatch):
    """Arguments of `Launcher.bind`, and the tensors of every bound launch, which runs in the simulator."""
    seen, launched = [], []

    def bind(self, grid, args, key, owners, fallback, *varying):
        seen.append((grid, args, owners))

        def launch(*tensors):
            launched.append(tensors)
            fallback(*tensors)

        return launch

    monkeypatch.setattr(Launcher, "bind", bind)
    with sim.device(multiprocessors=2):
        yield seen, launched


def tensors_in(args):
    return [
        value.tensor if isinstance(value, GlobalArg) else value
        for _, value in leaves(args)
        if isinstance(value, (GlobalArg, torch.Tensor))
    ]


def product(config):
    """(template, tensors, numbers, index of the result)"""
    a, b = torch.randn(130, 264).to(BF16), torch.randn(264, 136).to(BF16)
    return described(a, b)._template(config, a.device), [a, b, torch.empty(130, 136, dtype=BF16)], {}, 2


def dynamic_attention():
    """Whose log-sum-exp no TMA moves, and whose blocks fetch their tasks."""
    q, k, v = (torch.randn(1, 2, 300, 64).to(BF16) for _ in range(3))
    kernel = forward(BF16, 64, 64, True, False, False, True, True, AttentionConfig(consumers=2, tile_n=64))
    assert kernel.dynamic
    return kernel, [q, k, v, torch.empty_like(q), torch.empty(1, 2, 300)], {"scale": 0.18}, 3


CASES = {
    "tiles": lambda: product(Config(tile_n=128, consumers=1)),
    "split": lambda: product(Config(tile_n=128, consumers=1, schedule="split_k", splits=2)),
    "stream-K": lambda: product(Config(tile_n=128, consumers=1, schedule="stream_k")),
    "dynamic": dynamic_attention,
}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_stands_where_that_of_the_example_did(case, bound):
    seen, launched = bound
    template, tensors, numbers, result = CASES[case]()
    poison(tensors[result])
    template(*tensors, **numbers)
    expected = tensors[result].clone()
    launch = template.call(*tensors).bind(*tensors, **numbers)
    ((grid, args, owners),) = seen
    assert grid == template.call(*tensors).grid
    others = [x.clone() for x in tensors]
    poison(others[result])
    launch(*others)
    assert torch.equal(others[result], expected)
    (given,) = launched
    stand = tensors_in(args)
    assert len(stand) == len(owners)
    for example, owner in zip(stand, owners, strict=True):
        if owner < len(tensors):
            assert example is tensors[owner]
        else:  # of the workspace
            assert given[owner].dtype == example.dtype and example is not tensors[owner - len(tensors)]
    assert set(owners) == set(range(len(given))) and len(given) == len(tensors) + {"tiles": 0, "dynamic": 1}.get(
        case, 2
    )


def test_views_of_other_dimensions(bound):
    """A call's tensors may have other dimensions than the example, at the same place in memory."""
    template, tensors, numbers, result = CASES["tiles"]()
    template(*tensors, **numbers)
    expected = tensors[result].clone()
    launch = template.call(*tensors).bind(*tensors, **numbers)
    out = poison(torch.empty(2, 65, 136, dtype=BF16))
    launch(tensors[0].unflatten(0, (2, 65)), tensors[1].T, out)
    assert torch.equal(out.flatten(0, 1), expected)


def test_numbers_are_checked_when_they_are_bound(bound):
    kernel, tensors, _, _ = dynamic_attention()
    with pytest.raises(TypeError, match=r"AttentionForward: arguments \['factor'\]; it takes \['scale'\]"):
        kernel.call(*tensors).bind(*tensors, factor=1.0)


def test_plain_kernels(bound):
    """Tensors come first, and one may stand in two places."""
    seen, launched = bound
    o, grad, lse = torch.randn(1, 2, 70, 64).to(BF16), torch.randn(1, 2, 70, 64).to(BF16), torch.randn(1, 2, 70)
    numbers = (*o.stride()[:3], *grad.stride()[:3], *lse.stride()[:2], 140, 70, 64, 0, 70, 0, 0.0, 64, 64, False, False)
    found = []
    for make in (lambda *x: preprocess[2, 2, 1](*x, *numbers), None):
        offsets, deltas = (poison(torch.empty(1, 2, 70)) for _ in range(2))
        tensors = (o, grad, lse, lse, offsets, deltas, offsets)
        if make is None:
            make = preprocess.bind((2, 2, 1), *(x.clone() for x in tensors), *numbers)
        make(*tensors)
        found.append((offsets, deltas))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)) and not found[0][0].isnan().any()
    ((grid, _, owners),) = seen
    assert grid == (2, 2, 1) and owners == tuple(range(7)) and len(launched) == 1


class Numbers(NamedTuple):
    factor: float
    addend: torch.Tensor


@tk.kernel
@triton.jit
def scaled(X, Y, nothing, numbers):
    """Y = factor · X + addend. X is moved by TMA, Y and the addend are not."""
    tile, full = tk.allocate(tk.st(tk.bf16, 32, 64)), tk.semaphores(1)
    tk.expect(full[0], tile)
    tk.load_async(tile, X, (0, 0), full[0])
    tk.wait(full[0], 0)
    x = tk.mul(tk.cast(tk.load(tile), tk.fp32), numbers.factor)
    tk.store(Y, tk.add(x, tl.load(numbers.addend)), (0, 0))


def test_explicit_kernels(bound):
    """Tensors are given in order, without their layouts, those in tuples too."""
    seen, launched = bound

    def arguments(x, y, addend):
        return tk.gl(x, tk.st(tk.bf16, 32, 64)), tk.gl(y, static=True), None, Numbers(0.5, addend)

    launch = scaled.bind((1,), *arguments(*(torch.zeros(shape, dtype=t) for shape, t in SCALED)), num_warps=4)
    ((grid, args, owners),) = seen
    assert grid == (1,) and owners == (0, 0, 1, 2) and len(tensors_in(args)) == 4
    for _ in range(2):
        x, y, addend = (torch.randn(shape).to(t) for shape, t in SCALED)
        launch(x.view(4, 8, 64), poison(y), addend)
        torch.testing.assert_close(y, 0.5 * x.float() + addend)
    assert len(launched) == 2


@pytest.mark.parametrize("tiles", [Tiles(1, 32, 16, parts=2), Tiles(16, 32, 16, parts=2, wide=True, stages=2)], ids=str)
def test_launches_of_unaligned_products_are_bound_once(bound, tiles):
    """Each to the tensors among its arguments, in their order; a second call has others."""
    seen, launched = bound
    m, (n, k) = tiles.rows, (43, 61)
    found = []
    for _ in range(2):
        a, b, bias, residual = (torch.randn(*shape).to(BF16) for shape in ((m, k), (k, n), (n,), (m, n)))
        operands = (bias, None, residual, None, None)
        if not found:
            plan = unaligned_plan(a, b, operands, None, BF16, {"bias": "col", "residual": "tile"}, None, tiles)
        out = plan(a, b, operands, None)
        torch.testing.assert_close(out.float(), a.float() @ b.float() + bias + residual, rtol=1e-2, atol=1e-2)
        found.append(out)
    count = len(plan.launches)
    assert count == (1 if tiles.rows == 1 else 3) and len(seen) == count and len(launched) == 2 * count
    for (_, args, owners), tensors in zip(seen, launched[:count], strict=True):
        assert all(x is y for x, y in zip(tensors_in(args), tensors, strict=True))
        assert owners == tuple(range(len(tensors)))


@pytest.mark.parametrize(
    "features", [dict(), dict(lengths=False), dict(page_size=16), dict(starts=True, causal=True)], ids=str
)
def test_every_tensor_of_decoding_stands_where_that_of_the_example_did(features, monkeypatch):
    kind = DecodeKind(BF16, 64, 64, **features)
    kernel = tmem_decode_plan.kernel_of(kind, 4, (10, 0), partial=True, lse=True)
    pages, keys = (30, 16) if "page_size" in features else (2, 300)
    k, v = torch.randn(2, pages, 2, keys, 64).to(BF16)
    table, counts = torch.arange(30, dtype=torch.int32).view(2, 15), torch.tensor([230, 5], dtype=torch.int32)
    made = dict(Q=torch.randn(2, 2, 4, 64).to(BF16), K=k, V=v, O=torch.empty(2, 2, 2, 4, 64), L=torch.empty(2, 2, 2, 4))
    made |= dict(pages=table, lengths=counts, starts=torch.tensor([0, 3], dtype=torch.int32))
    tensors, seen = [made[name] for name in kernel.tensors], []
    poison(made["O"])
    monkeypatch.setattr(Launcher, "bind", lambda self, *given: seen.append(given) or given[4])
    with sim.device("sm_100a", multiprocessors=2):
        launch = kernel.bind(*tensors, varying=(1, 2), scale=0.1, queries=1)
        launch(*tensors)
    ((grid, args, _, owners, _, varying),) = seen
    assert grid == (8,) and varying == (1, 2)
    assert [id(x) for x in tensors_in(args)] == [id(tensors[i]) for i in owners]
    assert torch.isfinite(made["O"]).all()
