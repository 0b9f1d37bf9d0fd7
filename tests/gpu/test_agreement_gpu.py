"""The simulator against the GPU: the same launches in both places, from the same bytes. Bitwise where nothing is
rounded, else within rounding."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from examples.attention_pipeline import attention as pipelined_attention
from tests import cases_cluster, cases_explicit, streaming
from tests.cases_im2col import all_taps, convolution_input
from tests.util import poison, relative_error
from tritonkittens import sim
from tritonkittens.kernels.attention import attention
from tritonkittens.kernels.gemm import gemm

pytestmark = pytest.mark.gpu


def both(launch, *tensors):
    """`launch(*tensors)` writes into its last argument: what the GPU and what the simulator left there."""
    here = [t.detach().cpu().clone() for t in tensors]
    there = [t.cuda() for t in here]
    for outputs in (here, there):
        poison(outputs[-1])
    launch(*there)
    with sim.device("sm_90a"):
        launch(*here)
    return there[-1].cpu(), here[-1]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("mode", ["copy"])
def test_tiles_through_shared_memory(rng, dtype, mode):
    x = torch.from_numpy(rng.integers(0, 255, (200, 192 * dtype.itemsize))).to(torch.uint8).view(dtype)
    tile = tk.st(tk.from_torch(dtype), 64, 96)
    gpu, simulated = both(
        lambda x, y: cases_explicit.tma_copy[(2, 4)](tk.gl(x, tile), tk.gl(y, tile), tile, 2, mode),
        x,
        torch.empty_like(x),
    )
    assert torch.equal(bits(gpu), bits(simulated))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 512, 192), (130, 264, 72), (1, 8, 512)])
def test_gemm(rng, m, n, k, transposed):
    a, b = torch.randn(m, k).bfloat16(), torch.randn(*((n, k) if transposed else (k, n))).bfloat16()
    gpu, simulated = both(lambda a, b, c: gemm(a, b.T if transposed else b, out=c), a, b, torch.empty(m, n).bfloat16())
    assert relative_error(simulated, gpu) < 1e-3  # one rounding of bf16 in a few elements
    whole = [t.sign() for t in (a, b)]
    gpu, simulated = both(
        lambda a, b, c: gemm(a, b.T if transposed else b, out=c), *whole, torch.empty(m, n).bfloat16()
    )
    assert torch.equal(gpu, simulated)


@pytest.mark.parametrize(("queries", "keys", "width"), [(128, 256, 64), (200, 300, 128), (65, 129, 80), (1, 1, 64)])
def test_attention(rng, queries, keys, width):
    q, k, v = (
        torch.randn(1, 4, queries, width).bfloat16(),
        *(torch.randn(1, 2, keys, width).bfloat16() for _ in range(2)),
    )
    gpu, simulated = both(lambda q, k, v, o: attention(q, k, v, out=o), q, k, v, torch.empty_like(q))
    assert relative_error(simulated, gpu) < 2e-3


def test_attention_pipeline(rng):
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (100, 200, 200))
    gpu, simulated = both(lambda q, k, v, o: o.copy_(pipelined_attention(q, k, v, 2)), q, k, v, torch.empty_like(q))
    assert relative_error(simulated, gpu) < 2e-3


@pytest.mark.parametrize("cls", [streaming.Stream, streaming.PipelinedStream])
def test_streams_of_whole_numbers(rng, cls):
    template = cls(consumers=2)
    lengths = [0, 1, 2, 5, 3]
    tensors = streaming.operands(template, lengths, rng, "cpu")
    y = torch.empty(
        len(lengths) * template.consumers * template.tile_m, template.tile_n, dtype=tk.to_torch(template.out)
    )
    x, e, s, counts = tensors
    gpu, simulated = both(
        lambda x, e, s, counts, y: template(x, e, s, y, counts, tasks=len(lengths), blocks=2), x, e, s, counts, y
    )
    assert torch.equal(gpu.nan_to_num(-7), simulated.nan_to_num(-7))


def test_multicast(rng):
    tile = tk.st(tk.bf16, 48, 64)
    x = torch.randn(96, 64).bfloat16()
    launch = lambda x, y: cases_cluster.shared_loads[(3,)](tk.gl(x, tile), tk.gl(y), tile, cluster_size=2)  # noqa: E731
    gpu, simulated = both(launch, x, torch.empty(3 * 4 * 48, 64).bfloat16())
    assert torch.equal(gpu, simulated)


def test_im2col(rng):
    x = torch.from_numpy(rng.integers(-9, 10, (2, 9, 11, 64))).bfloat16()
    tile = tk.st(tk.bf16, 64, 64)

    def launch(x, y):
        all_taps[(-(-2 * 9 * 11 // 64), 1)](
            convolution_input(x, tile, (3, 3), 1, 1, 1), tk.gl(y), tile, 3, 3, 1, 1, 1, 9, 11
        )

    gpu, simulated = both(launch, x, torch.empty(9, 2 * 9 * 11, 64).bfloat16())
    assert torch.equal(gpu, simulated)


@triton.jit
def cast(x, y, KIND: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + i, tl.load(x + i).to(KIND))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rounding_of_conversions(rng, target):
    """The simulator's number formats are the hardware's."""
    x = torch.from_numpy(np.concatenate([rng.standard_normal(2048) * scale for scale in (1e-6, 1, 300, 1e5)])).float()
    gpu, simulated = both(lambda x, y: cast[(8,)](x, y, tk.from_torch(target)), x, torch.empty(8192, dtype=target))
    assert torch.equal(bits(gpu), bits(simulated))
