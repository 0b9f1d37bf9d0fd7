"""GEMM and attention through their PyTorch entry points: any shape, any strides, against float64, element by
element."""

import pytest
import torch

from tests.util import DEVICE, crossed, on_gpu_or_simulated, poison, synchronize
from tritonkittens.kernels.attention import attention
from tritonkittens.kernels.gemm import gemm

pytestmark = pytest.mark.usefixtures("kernel_device")

DTYPES = [torch.bfloat16, torch.float16]
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the largest relative error of one rounding
MARGIN = 16


def close(out, ref, bound, what):
    """Every element within its own bound of a float64 reference."""
    error = (out.double() - ref).abs()
    wrong = ~(error <= bound)  # also where NaN
    if wrong.any():
        first, worst = wrong.nonzero()[0].tolist(), error[wrong].max().item()
        pytest.fail(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements, first at {first}, worst off by {worst:.3g}"
        )


def randn(*shape, dtype):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


# ---------------------------------------------------------------- GEMM


def check_gemm(a, b, out, what=""):
    ref = a.double() @ b.double()
    summed = a.double().abs() @ b.double().abs()  # the tensor cores' fp32 sums are off by a small part of this
    bound = HALF_ULP[a.dtype] * ref.abs() + 2.0**-18 * summed + 1e-7
    close(out, ref, bound, f"{what} {tuple(a.shape)} by {tuple(b.shape)}, strides {b.stride()}")


def operand_b(k, n, transposed, dtype):
    return randn(n, k, dtype=dtype).T if transposed else randn(k, n, dtype=dtype)


@pytest.mark.parametrize("dtype, transposed", crossed(DTYPES, [False, True]))
def test_gemm_of_random_shapes(dtype, transposed, rng):
    """Ragged and tiny extents; rows that TMA cannot address are among them."""
    edges = [1, 8, 16, 63, 64, 65, 128, 129, 255, 256, 257, 520]
    shapes = [
        (1, 1, 1),
        (128, 256, 64),
        (1, 256, on_gpu_or_simulated(4096, 512)),
        (on_gpu_or_simulated(2048, 400), 8, 8),
        (300, 264, 8),
        (1000, 1, 65),
    ]
    largest, count = on_gpu_or_simulated((1200, 24), (300, 4))
    shapes += [
        tuple(int(rng.choice(edges)) if rng.random() < 0.5 else int(rng.integers(1, largest)) for _ in range(3))
        for _ in range(count)
    ]
    for m, n, k in shapes:
        print(m, n, k)
        a, b = randn(m, k, dtype=dtype), operand_b(k, n, transposed, dtype)
        out = poison(torch.empty(m, n, device=DEVICE, dtype=dtype))
        assert gemm(a, b, out=out) is out
        check_gemm(a, b, out, "out=")
        check_gemm(a, b, gemm(a, b), "new")


@pytest.mark.parametrize(
    "shape, transposed",
    crossed(
        on_gpu_or_simulated([(4096, 4096, 1024), (1536, 3000, 8192)], [(640, 1100, 96), (200, 300, 1024)]),
        [False, True],
    ),
    ids=str,
)
def test_gemm_of_many_tasks_a_block(shape, transposed, rng):
    m, n, k = shape
    a, b = randn(m, k, dtype=torch.bfloat16), operand_b(k, n, transposed, torch.bfloat16)
    check_gemm(a, b, gemm(a, b))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_of_slices_writes_nothing_around_its_output(transposed, aligned, rng):
    start = 16 if aligned else 3  # elements; 3 are no multiple of 16 bytes: operands and result are copied
    for m, n, k in [(200, 300, 100), (64, 256, 64), (129, 257, 65)]:
        dtype = torch.bfloat16

        def inside(rows, cols):
            return randn(rows + 5, cols + 37 + 24 - (cols + 37) % 8, dtype=dtype)[2 : 2 + rows, start : start + cols]

        a, b = inside(m, k), inside(n, k).T if transposed else inside(k, n)
        around = poison(torch.empty(m + 2 * MARGIN, n + 2 * MARGIN + 8 - n % 8, device=DEVICE, dtype=dtype))
        out = around[MARGIN : MARGIN + m, start : start + n]
        gemm(a, b, out=out)
        check_gemm(a, b, out)
        out.fill_(float("nan"))
        assert torch.isnan(around).all(), "the margin was written to"


def test_gemm_of_columns_first_operands(rng):
    a, b = randn(96, 200, dtype=torch.bfloat16).T, randn(160, 96, dtype=torch.bfloat16).T
    out = poison(torch.empty(160, 200, device=DEVICE, dtype=torch.bfloat16)).T
    gemm(a, b, out=out)
    check_gemm(a, b, out)


def test_gemm_of_nothing(rng):
    a, b = randn(8, 0, dtype=torch.bfloat16), randn(0, 16, dtype=torch.bfloat16)
    out = poison(torch.empty(8, 16, device=DEVICE, dtype=torch.bfloat16))
    assert (gemm(a, b, out=out) == 0).all() and (gemm(a, b) == 0).all()
    assert gemm(randn(0, 8, dtype=torch.bfloat16), randn(8, 16, dtype=torch.bfloat16)).shape == (0, 16)


# ---------------------------------------------------------------- attention


def check_attention(q, k, v, out, scale=None, what=""):
    group, width = q.shape[1] // k.shape[1], q.shape[-1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    weights = (q.double() @ keys.transpose(-1, -2) * (width**-0.5 if scale is None else scale)).softmax(-1)
    # the weights are rounded to 16 bits before the product with V, the result after it
    bound = HALF_ULP[q.dtype] * 1.25 * ((weights @ values).abs() + weights @ values.abs()) + 1e-6
    if q.dtype == torch.float16:  # weights below 2**-14 are rounded to multiples of 2**-24
        bound = bound + 2.0**-25 * values.abs().sum(-2, keepdim=True)
    close(out, weights @ values, bound, f"{what} q {tuple(q.shape)}, k {tuple(k.shape)}, scale={scale}")


HEADS = [(1, 1), (4, 2), (6, 3), (8, 1)]
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 256, 257, on_gpu_or_simulated(1000, 300)]


@pytest.mark.parametrize("width, dtype", crossed([64, 80, 96, 128], DTYPES))
def test_attention_of_random_shapes(width, dtype, rng):
    shapes = [(1, 1, 1, 1, 1), (2, 2, 1, 128, 128), (1, 4, 4, 1, 300), (1, 2, 2, 300, 1)]
    for _ in range(on_gpu_or_simulated(14, 2)):
        heads, kv_heads = HEADS[rng.integers(len(HEADS))]
        queries, keys = (
            int(rng.choice(EDGES)) if rng.random() < 0.6 else int(rng.integers(1, on_gpu_or_simulated(700, 300)))
            for _ in range(2)
        )
        shapes.append((int(rng.integers(1, on_gpu_or_simulated(4, 2))), heads, kv_heads, queries, keys))
    for batch, heads, kv_heads, queries, keys in shapes:
        print(batch, heads, kv_heads, queries, keys)
        q = randn(batch, heads, queries, width, dtype=dtype)
        k, v = (randn(batch, kv_heads, keys, width, dtype=dtype) for _ in range(2))
        out = poison(torch.empty_like(q))
        assert attention(q, k, v, out=out) is out
        check_attention(q, k, v, out)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_attention_scales(scale, rng):
    q, k, v = (randn(2, 2, 150, 64, dtype=torch.bfloat16) for _ in range(3))
    check_attention(q, k, v, attention(q, k, v, scale=scale), scale)


def test_attention_of_scores_that_need_the_running_maximum(rng):
    """The largest keys come at random places, with scores far beyond what exp could take."""
    q, k, v = (randn(1, 2, 512, 128, dtype=torch.bfloat16) for _ in range(3))
    k[:, :, torch.randperm(512)[:4]] *= 30
    check_attention(q, k, v, attention(q, k, v))


@pytest.mark.parametrize("width", [64, 80, 128])
def test_attention_of_permuted_tensors_writes_nothing_around_its_output(width, rng):
    """(batch, sequence, heads, D) memory seen as (batch, heads, sequence, D); the result between margins of the same
    kind."""
    dtype, batch, heads, kv_heads = torch.bfloat16, 2, 4, 2
    for queries, keys in [(100, 190), (129, 64), (1, 130)]:
        q = randn(batch, queries, heads, width, dtype=dtype).transpose(1, 2)
        # K and V packed, in wider rows
        kv = randn(batch, keys, 2, kv_heads, width + 16, dtype=dtype)[..., 8 : 8 + width]
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        around = poison(torch.empty(batch, queries + 4, heads, width + 16, device=DEVICE, dtype=dtype))
        out = around[:, 2:-2, :, 8 : 8 + width].transpose(1, 2)
        attention(q, k, v, out=out)
        check_attention(q, k, v, out)
        out.fill_(float("nan"))
        assert torch.isnan(around).all(), "the margin was written to"


def test_attention_of_strides_that_tma_cannot_take(rng):
    wide = randn(2, 2, 70, 67, dtype=torch.float16)
    q, k, v = wide[..., :64], wide[..., 3:], randn(2, 2, 64, 70, dtype=torch.float16).transpose(2, 3)
    out = poison(torch.empty(2, 2, 70, 65, device=DEVICE, dtype=torch.float16))[..., 1:]
    attention(q, k, v, out=out)
    check_attention(q, k, v, out)


def test_attention_of_shared_keys(rng):
    """One key head for all batches by a stride of zero."""
    q = randn(3, 4, 90, 64, dtype=torch.bfloat16)
    k, v = (randn(1, 2, 75, 64, dtype=torch.bfloat16).expand(3, 2, 75, 64) for _ in range(2))
    check_attention(q, k, v, attention(q, k, v))


def test_attention_without_keys(rng):
    q, k = randn(1, 2, 5, 64, dtype=torch.bfloat16), randn(1, 2, 0, 64, dtype=torch.bfloat16)
    assert (attention(q, k, k, out=poison(torch.empty_like(q))) == 0).all()
    assert attention(q[:, :, :0], k, k).shape == (1, 2, 0, 64)


# ---------------------------------------------------------------- both: the ways to launch


def problems():
    """(function of `out`, its inputs, an output) for both kernels, of several tasks a block."""
    dtype = torch.bfloat16
    m, n, heads = on_gpu_or_simulated((2000, 3000, 16), (300, 600, 2))
    a, b = randn(m, 520, dtype=dtype), randn(520, n, dtype=dtype)
    q, k, v = (randn(4, heads, 700, 128, dtype=dtype) for _ in range(3))
    return {
        "gemm": (lambda out: gemm(a, b, out=out), (a, b), torch.empty(m, n, device=DEVICE, dtype=dtype)),
        "attention": (lambda out: attention(q, k, v, out=out), (q, k, v), torch.empty_like(q)),
    }


@pytest.mark.parametrize("name", ["gemm", "attention"])
def test_runs_are_bitwise_equal(name, rng):
    run, _, out = problems()[name]
    first = run(poison(out)).clone()
    assert not torch.isnan(first).any()
    for repeat in range(on_gpu_or_simulated(20, 1)):
        assert torch.equal(run(poison(out)), first), f"run {repeat} differs"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemm", "attention"])
def test_cuda_graph_sees_new_inputs(name, rng):
    run, inputs, out = problems()[name]
    run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    for _ in range(3):
        for x in inputs:
            x.normal_()
        expected = run(torch.empty_like(out))
        poison(out)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemm", "attention"])
def test_two_streams_do_not_disturb_each_other(name, rng):
    both = [problems()[name] for _ in range(2)]
    expected = [run(torch.empty_like(out)).clone() for run, _, out in both]
    streams = [torch.cuda.Stream() for _ in both]
    synchronize()
    for repeat in range(20):
        for stream, (run, _, out) in zip(streams, both):
            with torch.cuda.stream(stream):
                run(poison(out))
        torch.cuda.synchronize()
        for (_, _, out), ref in zip(both, expected):
            assert torch.equal(out, ref), f"repeat {repeat}"
