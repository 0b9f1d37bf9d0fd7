"""Complex tiles: what each operation does with pairs of tiles, beside numbers of torch, in the simulator."""

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.util import poison, refused, relative_error
from tritonkittens import sim


def numbers(rows, cols):
    """A complex matrix whose parts are bf16 numbers."""
    return torch.complex(*(torch.randn(rows, cols).bfloat16().float() for _ in range(2)))


def parts(x, dtype=torch.bfloat16):
    return x.real.to(dtype).contiguous(), x.imag.to(dtype).contiguous()


def global_of(x, tile=None):
    return tk.cgl(*(tk.gl(part, *([tile] if tile else [])) for part in parts(x)))


def result(rows, cols):
    """A complex tensor that a kernel writes, and its value."""
    real, imag = (poison(torch.empty(rows, cols)) for _ in range(2))
    return tk.cgl(tk.gl(real), tk.gl(imag)), lambda: torch.complex(real, imag)


@triton.jit
def tile_of(X, arrived, SHAPE: tl.constexpr):
    """A complex shared tile with the numbers of X, by TMA."""
    tile = tk.allocate(SHAPE)
    tk.expect(arrived, tile)
    tk.load_async(tile, X, (0, 0), arrived)
    tk.wait(arrived, 0)
    return tile


@tk.kernel
@triton.jit
def products(A, B, Y, HOW: tl.constexpr, KIND: tl.constexpr, SHAPES: tl.constexpr):
    arrived = tk.semaphores(2)
    a, b = tile_of(A, arrived[0], SHAPES[0]), tile_of(B, arrived[1], SHAPES[1])
    y = tk.zero(tk.crt(tk.fp32, 64, 64))
    if HOW == "registers":
        a = tk.load(a)
    elif HOW == "complex × real":
        b = b.real
    elif HOW == "real × complex":
        a = a.real
    if HOW == "added":
        y = tk.mma_wait(tk.mma_AB(a, b, tk.mm_AB(a, b), wait=False))
    elif KIND == "AB":
        y = tk.mm_AB(a, b)
    elif KIND == "ABt":
        y = tk.mma_ABt(a, b, y)
    else:
        y = tk.mma_AtB(a, b, y)
    tk.store(Y, y, (0, 0))


@pytest.mark.parametrize(
    ("how", "kind"),
    [("shared", "AB"), ("added", "AB"), ("registers", "ABt"), ("complex × real", "AtB"), ("real × complex", "AtB")],
)
def test_matrix_products(how, kind):
    a, b = numbers(64, 32), numbers(32, 64)
    stored = a.T if kind == "AtB" else a, b.T if kind == "ABt" else b
    y, value = result(64, 64)
    shapes = tuple(tk.cst(tk.bf16, *x.shape) for x in stored)
    with sim.device():
        products[(1,)](*(global_of(x, tile.real) for x, tile in zip(stored, shapes, strict=True)), y, how, kind, shapes)
    left, right = (a.real if how.startswith("real") else a), (b.real if how.endswith("real") else b)
    expected = left.cdouble() @ right.cdouble() * (2 if how == "added" else 1)
    assert error(value(), expected) < 1e-6


def error(found, expected):
    return relative_error(torch.view_as_real(found), torch.view_as_real(expected))


@tk.kernel
@triton.jit
def elements(X, Z, V, Y, SHAPE: tl.constexpr, HOW: tl.constexpr):
    x, z = tk.load(X, SHAPE, (0, 0)), tk.load(Z, SHAPE, (0, 0))
    v = tk.load(V, tk.col_vec(SHAPE.real), (0,))
    if HOW == "product":
        y = tk.mul(x, z)
    elif HOW == "sums":
        y = tk.sub(tk.add(tk.mul(x, 2.0), tk.neg(z)), tk.conj(x))
    else:
        y = tk.mul_row(tk.mul_row(x, tk.complex(v.real, v.imag)), v.real)
    home = tk.allocate(tk.cst(tk.fp32, 32, 64))
    tk.store(home, y)
    tk.fence_async()
    tk.store_async(Y, home, (0, 0))
    tk.store_wait()


ELEMENTS = {
    "product": lambda x, z, v: x * z,
    "sums": lambda x, z, v: 2 * x - z - x.conj(),
    "rows": lambda x, z, v: x * v[:, None] * v.real[:, None],
}


@pytest.mark.parametrize("how", ELEMENTS)
def test_elements(how):
    x, z, v = numbers(32, 64), numbers(32, 64), numbers(32, 1)[:, 0]
    real, imag = (poison(torch.empty(32, 64)) for _ in range(2))
    tile, given = tk.st(tk.fp32, 32, 64), [tk.cgl(*map(tk.gl, parts(w, torch.float32))) for w in (x, z, v)]
    with sim.device():
        elements[(1,)](*given, tk.cgl(tk.gl(real, tile), tk.gl(imag, tile)), tk.crt(tk.fp32, 32, 64), how)
    assert error(torch.complex(real, imag), ELEMENTS[how](x, z, v).to(torch.complex128)) < 1e-6


@tk.kernel
@triton.jit
def mistakes(X, HOW: tl.constexpr):
    x, one = tk.zero(tk.crt(tk.fp32, 64, 64)), tk.zero(tk.rt(tk.fp32, 64, 64))
    a = tk.allocate(tk.cst(tk.bf16, 64, 64))
    if HOW == "add":
        tk.add(x, one)
    elif HOW == "exp":
        tk.exp(x)
    elif HOW == "row_sum":
        tk.row_sum(x)
    elif HOW == "accumulator":
        tk.mma_AB(a, a, one)
    elif HOW == "conj":
        tk.conj(one)
    elif HOW == "length":
        tk.allocate(tk.csv(tk.bf16, 24))
    else:
        tk.mm_AtB(a, a)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("add", "add: one operand is complex and one is real; give both as tk.complex(real, imag)"),
        ("exp", "this tile is complex; the operation takes a component, x.real or x.imag"),
        ("row_sum", "this tile is complex; the operation takes a component, x.real or x.imag"),
        ("accumulator", "mma_AB: the accumulator is real and an operand complex; give a complex one"),
        ("conj", "conj: takes a complex tile (tk.complex)"),
        ("length", "sv(bf16, 24): length: 24 must be a positive multiple of 16"),
        ("transposed", "mm_AtB: A is complex in shared memory; its imaginary part is negated in registers"),
    ],
)
def test_mistakes(how, message):
    with refused(message):
        mistakes.compile(tk.gl(torch.empty(64, 64, device="meta")), how)
