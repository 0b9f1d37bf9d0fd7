"""Sequences packed end to end: TMA and registers move tiles of one, and no row of its neighbours."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import DEVICE, poison

pytestmark = pytest.mark.usefixtures("kernel_device")

BF16 = torch.bfloat16


@tk.kernel
@triton.jit
def copy(X, Y, BOUNDS, TILE: tl.constexpr, THREE: tl.constexpr, BY: tl.constexpr):
    """Y = X, tile `block_index(0)` of sequence `block_index(1)` of head `block_index(2)`: loaded and stored by TMA or
    by registers."""
    begin, end = tk.load_scalar(BOUNDS, (tk.block_index(1),)), tk.load_scalar(BOUNDS, (tk.block_index(1) + 1,))
    rows = tk.sequence(begin, end - begin)
    if THREE:
        place = (rows, tk.block_index(2), tk.block_index(0), 0)
    else:
        place = (rows, tk.block_index(0), 0)
    tile = tk.allocate(TILE)
    if BY[0] == "tma":
        arrived = tk.semaphores(1)
        tk.expect(arrived[0], tile)
        tk.load_async(tile, X, place, arrived[0])
        tk.wait(arrived[0], 0)
    else:
        tk.store(tile, tk.load(X, TILE, place))
        tk.fence_async()
        tk.sync()
    if BY[1] == "tma":
        tk.store_async(Y, tile, place)
        tk.store_wait(0)
    else:
        tk.store(Y, tile, place)


LENGTHS = [(40, 1, 0, 64, 65, 130), (64, 64), (0, 0, 1)]


@pytest.mark.parametrize("heads, shape, dtype, by", [
    (3, (48, 96), BF16, ("tma", "tma")), (None, (64, 32), torch.float32, ("tma", "tma")),
    (None, (48, 96), BF16, ("tma", "registers")), (3, (64, 64), BF16, ("registers", "tma")),
], ids=str)  # fmt: skip
def test_copy(heads, shape, dtype, by, rng):
    """Every sequence alone: the tiles that it takes, and one more, write its rows and no others."""
    rows, cols = shape
    tile = tk.st(tk.from_torch(dtype), rows, cols)
    for lengths in LENGTHS if by[0] == by[1] else LENGTHS[:1]:
        total = sum(lengths)
        x = torch.randn(total, heads or 1, cols, device=DEVICE).to(dtype).transpose(0, 1)
        bounds = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
        x, last = (x, x.shape[0]) if heads else (x[0], 1)
        for b, length in enumerate(lengths):
            y = poison(torch.empty(*x.shape[:-2], total + 1, cols, dtype=dtype, device=DEVICE))[..., :total, :]
            copy[(length // rows + 2, 1, last)](
                tk.gl(x, tile, ragged=True),
                tk.gl(y, tile, ragged=True),
                tk.gl(bounds[b:]),
                tile,
                bool(heads),
                by,
                debug=True,
            )
            begin = sum(lengths[:b])
            mine = torch.zeros(total, dtype=torch.bool, device=DEVICE)
            mine[begin : begin + length] = True
            assert torch.equal(y[..., mine, :], x[..., mine, :])
            assert y[..., ~mine, :].isnan().all() and y._base.isnan().sum() == y._base.numel() - y[..., mine, :].numel()


@tk.kernel
@triton.jit
def fills(X, Y, begin, rows, TILE: tl.constexpr):
    """The tile of a sequence by TMA, whole."""
    tile, arrived = tk.allocate(TILE), tk.semaphores(1)
    tk.expect(arrived[0], tile)
    tk.load_async(tile, X, (tk.sequence(begin, rows), tk.block_index(0), 0), arrived[0])
    tk.wait(arrived[0], 0)
    tk.store(Y, tile, (tk.block_index(0), 0))


@pytest.mark.parametrize("fill", ["zero", "nan"])
def test_what_lies_behind_a_sequence(fill, rng):
    tile = tk.st(tk.bf16, 64, 64)
    x, y = torch.randn(300, 64, device=DEVICE).to(BF16), poison(torch.empty(256, 64, dtype=BF16, device=DEVICE))
    fills[(4,)](tk.gl(x, tile, ragged=True, fill=fill), tk.gl(y), 37, 100, tile, debug=True)
    assert torch.equal(y[:100], x[37:137]) and bool(y[100:].isnan().all() if fill == "nan" else (y[100:] == 0).all())


@triton.jit
def sums(X, Y, begin, rows):
    """Row sums of a sequence, in a plain kernel."""
    mine = tk.sequence(begin, rows)
    x = tk.load(X, tk.rt(tk.fp32, 32, 48), (mine, tk.block_index(0), 0), fill=float("nan"))
    tk.store(Y, tk.row_sum(x), (mine, tk.block_index(0)))


def test_vectors_of_a_sequence(rng):
    x, y = torch.randn(200, 48, device=DEVICE), poison(torch.empty(200, device=DEVICE))
    sums[(3,)](tk.gl(x).plain(), tk.gl(y).plain(), 11, 70)
    torch.testing.assert_close(y[11:81], x[11:81].sum(1), atol=1e-5, rtol=1e-5)
    assert y[:11].isnan().all() and y[81:].isnan().all()


@tk.kernel
@triton.jit
def from_an_element_on(X, Y, first, WHAT: tl.constexpr):
    """Y = the vector of X that begins at an element, by way of shared memory that TMA fills from element 0 on."""
    vector, arrived = tk.allocate(tk.sv(X.pointer.dtype.element_ty, 256)), tk.semaphores(1)
    tk.expect(arrived[0], vector)
    tk.load_async(vector, X, (0,), arrived[0])
    tk.wait(arrived[0], 0)
    tk.store(Y, tk.load(vector, WHAT, first), (0,))


@pytest.mark.parametrize(
    "what", [tk.col_vec(tk.rt(tk.fp32, 64, 128)), tk.row_vec(tk.rt(tk.fp32, 64, 96)), tk.rv(tk.int32, 128)], ids=repr
)
def test_a_shared_vector_from_an_element_on(what, rng):
    length = what.shape[0]
    x = torch.randint(-1000, 1000, (256,), device=DEVICE).to(tk.to_torch(what.dtype))
    for first in (0, 3, 256 - length):
        y = torch.zeros(length, dtype=x.dtype, device=DEVICE)
        from_an_element_on[(1,)](tk.gl(x, tk.sv(what.dtype, 256)), tk.gl(y), first, what, debug=True)
        assert torch.equal(y, x[first : first + length])
