"""Copies to where TMA can address rows, and back: bit by bit, nothing beside them; on the GPU, or simulated."""

import pytest
import torch

from tests.cases_gemm import BF16, E4M3, FP32, SMALL, check, randn
from tests.util import DEVICE, on_gpu_or_simulated, poison
from tritonkittens.kernels import _copies
from tritonkittens.kernels._copies import as_addressable, copied, zero_behind
from tritonkittens.kernels._tensors import CACHE_LINE, LONG_ROW, TMA_BYTES, addressable, addressable_pitch
from tritonkittens.kernels.gemm import call_plan, gemm
from tritonkittens.kernels.gemm.device import unaligned
from tritonkittens.launch.launcher import GRID_LIMITS

pytestmark = pytest.mark.usefixtures("kernel_device")

SHAPES = [
    (1, 1),
    (1, 7),
    (7, 1),
    (3, 5),
    (2, 1023),
    (3, 1025),
    (1030, 2),
    (65, 83),
    (1, 2500),
    (2, 3, 5),
    (3, 1, 130),
    (5, 40, 1),
    (0, 5),
    (5, 0),
    (0, 3, 4),
    (2, 3, 4, 5),
    (9,),
    (),
]


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def inside(shape, dtype, start, beyond):
    """(whole memory, poisoned; a tensor in it that begins `start` elements behind its beginning, with `beyond` elements
    behind each row)."""
    *leading, width = shape if shape else (1,)
    pitch = width + beyond
    rows = torch.Size(leading).numel()
    whole = poison(torch.empty(start + rows * pitch + 8, dtype=dtype, device=DEVICE))
    strides = torch.empty(*leading, pitch, device="meta").stride()
    return whole, whole.as_strided(shape, strides if shape else (), start)


@pytest.mark.parametrize("dtype", [BF16, FP32, E4M3], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies(rng, shape, dtype):
    for starts, beyond in (((0, 0), (0, 3)), ((3, 0), (1, 8)), ((0, 5), (7, 0)), ((1, 1), (2, 2))):
        _, x = inside(shape, dtype, starts[0], beyond[0])
        x.copy_(randn(*shape, dtype=dtype))
        whole, out = inside(shape, dtype, starts[1], beyond[1])
        untouched = whole.clone()
        assert copied(x, out) is out
        assert torch.equal(bits(out), bits(x))
        untouched.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(x)
        assert torch.equal(bits(whole), bits(untouched)), "something beside the copy is written"


def test_copies_of_what_has_no_contiguous_rows(rng):
    x, out = randn(70, 90), poison(torch.empty(90, 72, dtype=BF16, device=DEVICE))[:, :70]
    assert torch.equal(copied(x.T, out), x.T)
    wide = randn(30, 80)
    assert torch.equal(copied(wide[:, ::2], out[:30, :40]), wide[:, ::2])
    other = torch.empty(30, 80, dtype=FP32, device=DEVICE)
    assert torch.equal(copied(wide, other), wide.float())


def test_large_batches_are_copied(rng):
    x = randn(GRID_LIMITS[2] + 3, 2, 3)
    assert torch.equal(copied(x, torch.empty(*x.shape[:-1], 8, dtype=BF16, device=DEVICE)[..., :3]), x)


def test_rows_of_copies_begin_where_tma_reads_and_long_ones_begin_lines():
    assert [addressable_pitch(n) for n in (0, 1, 16, 18, 256, 258, LONG_ROW - 2, LONG_ROW, LONG_ROW + 2)] == [
        0, 16, 16, 32, 256, 272, LONG_ROW, LONG_ROW, LONG_ROW + CACHE_LINE]  # fmt: skip
    for cols in (1, 9, 509, 511, 513, 1000, 1001):
        x = randn(3, cols)
        found = as_addressable(x[:, 1:] if cols > 8 else x)
        assert (
            addressable(found)
            and found.stride(0)
            * 2
            % (CACHE_LINE if found.shape[1] % 8 and found.shape[1] * 2 >= LONG_ROW else TMA_BYTES)
            == 0
        )
        assert torch.equal(found, x[:, 1:] if cols > 8 else x)


# ---------------------------------------------------------------- products of copies


@pytest.fixture
def copies(monkeypatch):
    """The shapes of what is copied, of products that are all done by TMA."""
    made = []

    def recorded(x, out, *beside):
        made.append(tuple(x.shape))
        return copied(x, out, *beside)

    for module in (_copies, call_plan):
        monkeypatch.setattr(module, "copied", recorded)
    monkeypatch.setattr(unaligned, "is_faster_unaligned", lambda *_: False)
    call_plan._plans.clear()
    yield made
    call_plan._plans.clear()


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_copied_operands_keep_their_contiguous_dimension(rng, copies, transposed):
    m, k, n = 70, 91, 83
    a, b = (randn(k, m).T if "a" in transposed else randn(m, k)), (randn(n, k).T if "b" in transposed else randn(k, n))
    check(gemm(a, b, config=SMALL), a, b)
    assert copies == [
        a.mT.shape if "a" in transposed else a.shape,
        b.mT.shape if "b" in transposed else b.shape,
        (m, n),
    ]


@pytest.mark.parametrize("k, n, beside", [(91, 88, [False]), (96, 83, [False]), (91, 83, [False, True])])
def test_only_the_second_of_two_copies_runs_beside_another(rng, monkeypatch, k, n, beside):
    """A single copy may read what the kernel before it writes."""
    found = []
    monkeypatch.setattr(_copies, "copied", lambda x, out, beside: found.append(beside) or copied(x, out, beside))
    a, b = randn(70, k), randn(k, n)
    gemm(a, b, config=SMALL)  # which plans, too
    found.clear()
    check(gemm(a, b, config=SMALL), a, b)
    assert found == beside


def test_memory_of_both_copies_is_allocated_before_either_starts(rng, monkeypatch):
    """Else the second could get memory that a kernel of another thread, launched between the two, still uses."""
    steps = []

    def recorded(name, function):
        return lambda *args: steps.append(name) or function(*args)

    monkeypatch.setattr(_copies, "padded_empty", recorded("allocate", _copies.padded_empty))
    monkeypatch.setattr(_copies, "copied", recorded("copy", copied))
    a, b = randn(70, 91), randn(91, 83)
    gemm(a, b, config=SMALL)  # which plans, too
    steps.clear()
    check(gemm(a, b, config=SMALL), a, b)
    assert steps == ["allocate", "allocate", "copy", "copy"]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_gradients_copy_an_incoming_one_once(rng, copies, batch):
    k, n = on_gpu_or_simulated((128, 333), (24, 37))
    x, w = randn(*batch, 16, k).requires_grad_(), randn(n, k).requires_grad_()
    y = gemm(x, w.T)
    check(y, x, w.T)
    grad = randn(*y.shape)
    copies.clear()
    y.backward(grad)
    exact = [t.detach().cpu().double().requires_grad_() for t in (x, w)]
    (exact[0] @ exact[1].T).backward(grad.cpu().double())
    for ours, reference in zip((x, w), exact, strict=True):
        assert (ours.grad.cpu().double() - reference.grad).norm() < 1e-2 * reference.grad.norm()
    assert copies == [(torch.Size((*batch, 16)).numel(), n)]


def test_a_copied_gradient_has_gradients(rng, copies):
    x, w = randn(16, 24).requires_grad_(), randn(24, 37).requires_grad_()
    grad = randn(16, 37).requires_grad_()
    d_x, _ = torch.autograd.grad(gemm(x, w), (x, w), grad, create_graph=True)
    (d_grad,) = torch.autograd.grad(d_x.float().sum(), (grad,))
    exact = w.detach().cpu().double().sum(0).expand(16, 37)
    assert (d_grad.cpu().double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize(
    "rows, columns, ends",
    [(1, 1, [0]), (1, 1, [1]), (5, 3, [2, 3]), (70, 33, [10]), (300, 8, [299]), (3, 1, [-4]), (4, 2, [9])],
    ids=str,
)
def test_rows_behind_the_last_end_are_zeros(rows, columns, ends):
    """And nothing else is touched, also where ends are no places of rows."""
    around = torch.randn(rows + 2, columns, device=DEVICE)
    expected = around.clone()
    expected[1 + max(ends[-1], 0) : 1 + rows] = 0
    zero_behind(around[1:-1], torch.tensor(ends, dtype=torch.int32, device=DEVICE))
    assert torch.equal(around, expected)
