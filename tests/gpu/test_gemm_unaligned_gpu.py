"""`gemm` of operands that TMA cannot address, where they are read without a copy: against float64 element by element;
on the GPU, or simulated."""

import pytest
import torch

from tests.cases_gemm import BF16, E4M3, FP16, FP32, NO_OPERANDS, SMALL, check, randn, scales
from tests.util import DEVICE, crossed, on_gpu_or_simulated, poison
from tritonkittens import sim
from tritonkittens.kernels.gemm import gemm, gemm_torch
from tritonkittens.kernels.gemm.call_plan import unaligned_plan
from tritonkittens.kernels.gemm.checks import places_of
from tritonkittens.kernels.gemm.device import unaligned, unaligned_tiles
from tritonkittens.kernels.gemm.device.unaligned import Unaligned, needs_copies, takes
from tritonkittens.kernels.gemm.device.unaligned_tiles import FEW_ROWS, Tiles

pytestmark = pytest.mark.usefixtures("kernel_device")

EXTENTS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 70, 129)
MARGIN = 16
# Every kind of kernel, small enough for several tiles and parts of little products
KINDS = {
    "row": Tiles(1, 32, 16, parts=2),
    "row of words": Tiles(1, 32, 16, parts=2, wide=True),
    "rows": Tiles(16, 32, 16, parts=2),
    "large": Tiles(64, 64, 32, parts=4),
    "row, pipeline": Tiles(1, 32, 16, parts=3, wide=True, stages=3),
    "packed": Tiles(32, 32, 16, parts=3, wide=True, stages=3),
    "packed, one part": Tiles(32, 32, 32, wide=True, stages=4),
    "packed, large": Tiles(64, 64, 32, parts=2, wide=True, stages=2),
}


def matrix(rows, cols, dtype=BF16, transposed=False, start=0):
    """A matrix that begins `start` elements behind a multiple of 16 bytes; around it lies NaN."""
    whole = poison(torch.empty(start + rows * cols + 8, device=DEVICE, dtype=dtype))
    found = whole[start : start + rows * cols].view(*((cols, rows) if transposed else (rows, cols)))
    found.copy_(randn(*found.shape, dtype=dtype))
    return found.T if transposed else found


def results(m, n, dtype=BF16):
    """(whole memory, out in it) of every kind, poisoned."""
    around = poison(torch.empty(m + 2 * MARGIN, n + 2 * MARGIN, device=DEVICE, dtype=dtype))
    tall, wide = (
        poison(torch.empty(*shape, device=DEVICE, dtype=dtype)) for shape in ((n + 2 * MARGIN, m + 3), (m, 2 * n + 1))
    )
    return {
        "inside": (around, around[MARGIN : MARGIN + m, 3 : 3 + n]),
        "transposed": (tall, tall[MARGIN : MARGIN + n, 1 : 1 + m].T),
        "every second": (wide, wide[:, 1::2]),
    }


def multiply(a, b, tiles=None, out=None, activation=None, out_dtype=None, **operands):
    """The product by ordinary loads, whatever the rule says, checked; `tiles`: a kernel instead of the chosen one."""
    dtype = out_dtype or a.dtype
    given = tuple(operands.get(name) for name in ("bias", "gate", "residual", "scale_a", "scale_b"))
    plan = unaligned_plan(a, b, given, activation, dtype, places_of(a, b, given), out, tiles)
    result = plan(a, b, given, out)
    check(result, a, b, f"{plan.tiles}", activation=activation, **operands)
    return result


# ---------------------------------------------------------------- the rule


def test_which_products_are_read_without_a_copy():
    def rule(m, n, k, dtype=BF16, out=None):
        a, b = torch.empty(m, k, dtype=dtype, device=DEVICE), torch.empty(k, n, dtype=dtype, device=DEVICE)
        return takes(a, b, None, dtype, out)

    assert (
        rule(1, 4095, 4097)
        and rule(4095, 1, 4097)
        and rule(FEW_ROWS, 4095, 4097)
        and rule(127, 129, 255)
        and rule(1, 9, 8)
    )
    assert not rule(4095, 4097, 4103) and not rule(1, 4096, 4096) and not rule(128, 128, 256), "TMA"
    assert rule(128, 4095, 4097) and not rule(129, 4095, 4097), "rows are packed up to one tile of them"
    assert not rule(128, 4095, 1027), "sums of classes take as long as a copy of B"
    assert not rule(16, 4096, 4095), "a copy of A alone"
    assert not rule(1, 4095, 4097, E4M3)
    out = torch.empty(16, 72, dtype=BF16, device=DEVICE)
    assert rule(16, 64, 64, out=out[:, 3:67]) and not rule(16, 64, 64, out=out[:, :64])
    a, b = torch.empty(16, 64, dtype=BF16, device=DEVICE), torch.empty(64, 64, dtype=BF16, device=DEVICE)
    assert not needs_copies(a, b.T, None, BF16, None) and not needs_copies(a[:, 8:], b[8:, 8:], None, BF16, None)
    assert needs_copies(a[:, ::2], b[:32], None, BF16, None) and needs_copies(a, b[:, 1:], None, BF16, out[:, :63])
    assert needs_copies(a, b, torch.empty(16, 65, dtype=BF16, device=DEVICE)[:, 1:], BF16, None)
    far = torch.empty(1, dtype=BF16, device=DEVICE).as_strided((1, 64), (1 << 21, 0))
    assert not takes(far, b[:, 1:], None, BF16, None), "places in a tile are 32-bit numbers"


def test_gemm_follows_the_rule(rng, monkeypatch):
    """A configuration that is given is one for TMA; anything else that the rule takes makes no copy."""
    seen, call = [], Unaligned.__call__
    monkeypatch.setattr(Unaligned, "__call__", lambda plan, *given: seen.append(plan) or call(plan, *given))
    a, b = randn(5, 71), randn(71, 43)
    gemm(a, b)
    gemm(a, b, bias=randn(43), activation="silu")
    assert len(seen) == 2
    check(gemm(a, b, config=SMALL), a, b)
    batch = randn(2, 5, 71)
    check(gemm(batch, b, config=SMALL), batch, b)
    assert gemm(a.to(FP16), b.to(FP16), accumulate="fp16").count_nonzero() and len(seen) == 2


# ---------------------------------------------------------------- operands and results


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_any_extents_and_strides(rng, dtype):
    for _ in range(on_gpu_or_simulated(200, 12)):
        m, n, k = (int(rng.choice(EXTENTS)) for _ in range(3))
        a, b = (matrix(*shape, dtype, bool(rng.integers(2)), int(rng.integers(8))) for shape in ((m, k), (k, n)))
        for whole, out in list(results(m, n, dtype).values())[int(rng.integers(3)) :][:1]:
            assert multiply(a, b, out=out) is out
            poison(out)
            assert torch.isnan(whole).all(), f"{m}×{n}: the margin was written to"


@pytest.mark.parametrize("kind, transposed", crossed(list(KINDS), [True, False]))
def test_every_kind_of_kernel(rng, kind, transposed):
    rows = 3 if KINDS[kind].rows == 1 else 19  # several tiles of rows
    shapes = ((45, 67, 0), (40, 61, 3), (1, 33, 1), (7, 72, 5), (61, 1, 2), (23, 9, 7))
    for k, n, start in on_gpu_or_simulated(shapes, shapes[:3]):
        a, b = matrix(rows, k, start=1), matrix(k, n, BF16, transposed, start)
        for name, (whole, out) in results(rows, n).items():
            first = multiply(a, b, KINDS[kind], out).clone()
            assert torch.equal(multiply(a, b, KINDS[kind], poison(out)), first), f"{name}: two runs differ"
            poison(out)
            assert torch.isnan(whole).all(), f"{name}: the margin was written to"
            if DEVICE == "cpu":
                break


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("parts", on_gpu_or_simulated([1, 2, 5], [3]))
@pytest.mark.parametrize("n, transposed", [(41, True), (24, True), (41, False), (24, False)])
def test_pipelines_of_any_length(rng, n, transposed, parts, packed):
    """Every part has none, one, two or more tiles than are in flight; those of the first and last row are not among
    them."""
    tiles = Tiles(32 if packed else 1, 32, 16, parts=parts, wide=True, stages=3)
    classes = 1 if n % 8 == 0 or transposed else 8
    for steps in on_gpu_or_simulated([*range(1, 6 * parts + 3), 20 * parts], [parts, 2 * parts + 1]):
        for ragged in (-9, 1):
            k = classes * steps * tiles.depth + ragged
            multiply(matrix(19 if packed else 2, k, start=1), matrix(k, n, BF16, transposed, 3), tiles)


@pytest.mark.parametrize("transposed", [False, True])
def test_calls_like_earlier_ones_that_begin_elsewhere(rng, transposed):
    """What is known of a call is known of its place within 16 bytes, which the kernel that reads words is made for."""
    a = matrix(1, 41)
    for start in (*on_gpu_or_simulated(range(8), (1, 5, 6)), 1):
        b = matrix(41, 43, BF16, transposed, start)
        check(gemm(a, b), a, b, f"start {start}")
        check(gemm(b.T, a.T), b.T, a.T, f"start {start}")


def test_strides_without_a_contiguous_dimension(rng):
    a, b = randn(5, 145)[:, ::2], randn(73, 88)[:, ::3]
    multiply(a, b)
    multiply(randn(1, 73).expand(5, 73), b)
    multiply(a, randn(73, 1).expand(73, 90))
    multiply(a, randn(1, 31).expand(73, 31))
    multiply(randn(73, 5).T, randn(33, 73, 2)[..., 1].T)


@pytest.mark.parametrize("m", on_gpu_or_simulated([1, 2, 4, 15, 16, 17, 33, 64, 65, 128], [1, 17, 65]))
@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows(rng, m, transposed, monkeypatch):
    """As they are chosen, in many parts; and few columns, which is the transposed product."""
    monkeypatch.setattr(unaligned_tiles, "SMALL_PRODUCT", 0)
    k, n = on_gpu_or_simulated((4097, 4095), (257, 131))
    a, b = matrix(m, k), matrix(k, n, BF16, transposed, 3)
    first = multiply(a, b)
    assert torch.equal(gemm(a, b), first) and torch.equal(gemm(a, b, out=poison(torch.empty_like(first))), first)
    multiply(b.T, a.T)


@pytest.mark.parametrize("kind, transposed", crossed(list(KINDS), [True, False]))
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nothing_around_a_view_is_multiplied(rng, kind, transposed, value):
    """Not in front of its rows nor behind them, where words reach, nor above and below them."""

    def inside(rows, cols, start):
        whole = torch.full((rows + 2, cols + 12), float(value), dtype=BF16, device=DEVICE)
        return whole[1 : 1 + rows, start : start + cols].copy_(randn(rows, cols))

    for k, n, start in on_gpu_or_simulated(
        [(45, 67, 3), (40, 61, 8), (7, 72, 5), (1, 33, 1), (61, 1, 7)], [(45, 35, 3)]
    ):
        b = inside(n, k, start).T if transposed else inside(k, n, start)
        multiply(inside(1 if KINDS[kind].rows == 1 else 19, k, 5), b, KINDS[kind])


def test_result_types(rng):
    a, b = randn(5, 71), randn(71, 43)
    for dtype in (BF16, FP16, FP32):
        assert multiply(a, b, out_dtype=dtype).dtype == dtype
    big = torch.full((3, 65), 200.0, device=DEVICE, dtype=FP16)
    assert gemm(big, big.T).isinf().all() and gemm(big, big.T, out_dtype=FP32).isfinite().all()


# ---------------------------------------------------------------- epilogues


@pytest.mark.parametrize("kind, transposed", crossed(["row", "packed", "packed, one part", "large"], [False, True]))
def test_epilogues(rng, kind, transposed):
    m, n = (37, 3) if transposed else (3, 37)
    a, b = randn(m, 41), randn(41, n)
    for operands in (
        dict(bias=randn(n)),
        dict(bias=randn(1, n, dtype=FP32), activation="gelu"),
        dict(bias=randn(), gate=randn(m, 1), residual=randn(n, m).T),
        dict(gate=randn(m, n, dtype=FP16), activation="silu"),
        dict(gate=randn(n), residual=randn(m, n + 3)[:, 3:], activation="gelu_tanh"),
        dict(scale_a=scales(m), scale_b=scales(1, n)),
        dict(scale_a=scales(), scale_b=scales(1, 1), bias=randn(2 * n)[::2]),
    ):
        multiply(a, b, KINDS[kind], **operands)
    for operands in (
        dict(bias=randn(n), activation="silu", gate=randn(m, 1), residual=randn(m, n)),
        dict(scale_b=scales(n)),
    ):
        check(gemm(a, b, **operands), a, b, **operands)


def test_a_residual_is_accumulated_in_place(rng):
    for m, n in ((3, 67), (70, 67)):
        a, b, residual = randn(m, 71), randn(71, n), randn(m, n)
        out = residual.clone()
        assert gemm(a, b, residual=out, out=out) is out
        check(out, a, b, residual=residual)


# ---------------------------------------------------------------- what is no number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_nan_and_infinity_spread_as_in_torch(rng, kind, transposed):
    a, b = matrix(9, 71), matrix(71, 75, BF16, transposed, 3)
    b[5] = 0
    a[3, 7] = float("nan")
    b[60, 11] = float("nan")
    a[4, 5] = float("inf")  # times 0
    a[0, 0] = a[1, 70] = a[6, 6] = float("inf")  # against the first and the last row, which are read by element
    b[70, 74], b[0, 0] = -float("inf"), float("inf")
    b[70, 20], b[0, 30] = float("nan"), float("nan")  # beside elements of columns 21 and 29, where these are contiguous
    out = unaligned_plan(a, b, NO_OPERANDS, None, BF16, {}, None, KINDS[kind])(a, b, NO_OPERANDS, None).cpu().double()
    ref = gemm_torch(a.cpu(), b.cpu())
    assert torch.equal(out.isnan(), ref.isnan())
    assert torch.equal(out.isinf(), ref.isinf()) and torch.equal(out[ref.isinf()], ref[ref.isinf()])
    finite = ref.isfinite()
    assert (out - ref)[finite].norm() / ref[finite].norm() < 4e-3


# ---------------------------------------------------------------- the same call again, in any order of blocks,
# gradients


@pytest.mark.parametrize("kind", [name for name, tiles in KINDS.items() if tiles.parts > 1])
def test_counters_are_zero_again(rng, kind, monkeypatch):
    """The memory for sums of parts is that of other products before, as on a GPU."""
    partials = poison(torch.empty(1 << 18, device=DEVICE))
    counters = torch.zeros(1 << 8, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(unaligned, "workspace", lambda device, floats, count: (partials[:floats], counters[:count]))
    for k, n in ((61, 67), (45, 33)):
        a, b = randn(3, k), randn(k, n)
        multiply(a, b, KINDS[kind])
        assert not counters.any() and not partials.isnan().all()


def test_a_tile_writes_its_own_columns(rng):
    """Those that are read twice, as classes of rows are shifted against each other, are the next tile's."""
    a, b, out = randn(1, 45), randn(45, 67), poison(torch.empty(1, 67, device=DEVICE, dtype=BF16))
    tiles = KINDS["row of words"]
    plan = unaligned_plan(a, b, NO_OPERANDS, None, BF16, {}, out, tiles)
    launch = plan.launches[0]
    plan.launches = [launch._replace(grid=(1, launch.grid[1]))]
    plan(a, b, NO_OPERANDS, out)
    check(out[:, : tiles.cols - 8], a, b[:, : tiles.cols - 8])
    assert out[:, tiles.cols - 8 :].isnan().all()


@pytest.mark.simulated(always=True)
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_blocks_does_not_matter(kind):
    torch.manual_seed(0)
    for transposed in (False, True):
        a, b = (
            torch.randn(3, 61).to(BF16),
            torch.randn(67, 61).to(BF16).T if transposed else torch.randn(61, 67).to(BF16),
        )
        found = []
        for schedule in range(4):
            with sim.device("sm_90a", schedule=schedule):
                plan = unaligned_plan(a, b, NO_OPERANDS, None, BF16, {}, None, KINDS[kind])
                found.append(plan(a, b, NO_OPERANDS, None))
        check(found[0], a, b, kind)
        assert all(torch.equal(out, found[0]) for out in found)


def test_plans_are_for_any_tensors_of_their_kind(rng):
    for _ in range(2):
        for start in (0, 3):
            a, b, bias = matrix(5, 71, start=start), matrix(71, 43, start=start), randn(43)
            check(gemm(a, b), a, b)
            check(gemm(a, b, bias=bias), a, b, bias=bias)
            check(gemm(a, b, out=poison(torch.empty(5, 43, dtype=BF16, device=DEVICE))), a, b)


def test_gradients(rng):
    a, b = (x.requires_grad_() for x in (randn(5, 71), randn(71, 43)))
    grad = randn(5, 43)
    gemm(a, b).backward(grad)
    check(a.grad, grad, b.detach().T)
    check(b.grad, a.detach().T, grad)
