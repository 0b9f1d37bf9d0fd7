"""Attention of e4m3 tensors against float64 on the values that they stand for."""

import re

import pytest
import torch

from tests.util import DEVICE, on_gpu_or_simulated, poison, relative_error, slow
from tritonkittens.kernels.attention import Config, attention_fp8, attention_torch

pytestmark = pytest.mark.usefixtures("kernel_device")

# Hopper adds products of bytes with 13 bits behind the leading one of the largest, cut off: on the same operands
# torch._scaled_mm was as far off, to the last digit (3.45e-3 where the largest log-sum-exp was 19)
CUT_OFF = 2**-11  # of the largest score
ROUNDING = 0.03  # P has 3 bits behind the leading one: at most 1/16, on average a quarter of that off


def operands(batch, heads, kv_heads, queries, keys, dim, value_dim=None):
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim or dim))
    return [torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn) for shape in shapes]


def check(q, k, v, scales=None, **given):
    """Values and log-sum-exp, the output poisoned first."""
    scales, group = scales or {}, q.shape[1] // k.shape[1]
    kinds = {n: given.pop(n) for n in ("out_dtype", "config") if n in given}
    out = poison(torch.empty(*q.shape[:3], v.shape[3], dtype=kinds.pop("out_dtype", torch.bfloat16), device=DEVICE))
    found, lse = attention_fp8(q, k, v, out=out, return_lse=True, **scales, **kinds, **given)
    assert found is out
    meant = [x.cpu().float().double() for x in (q, k, v)]
    for i, name in enumerate(("q_scale", "k_scale", "v_scale")):
        if name in scales:
            factor = scales[name].cpu().double()[:, :, None, None]
            meant[i] = meant[i] * (factor.repeat_interleave(group, 1) if i == 0 else factor)
    expected, sums = attention_torch(*meant, **given)
    assert relative_error(out, expected) < ROUNDING if expected.any() else (out == 0).all()
    largest = sums[sums.isfinite()].abs().max().item() if sums.isfinite().any() else 0.0
    assert torch.allclose(lse.cpu().double(), sums, atol=CUT_OFF * max(largest, 4.0))
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "queries, keys", [(1, 1), (150, 70), (129, 300), *on_gpu_or_simulated([(1, 130), (128, 128), (1000, 700)], [])]
)
def test_forward(queries, keys, causal, rng):
    check(*operands(1, 2, 1, queries, keys, 64), causal=causal)


@pytest.mark.parametrize("dim, value_dim", [(32, 32), slow(128, 128), (96, 160), (256, 256), slow(192, 128)])
def test_head_dimensions(dim, value_dim, rng):
    check(*operands(1, 2, 2, 140, 200, dim, value_dim))


@pytest.mark.parametrize(
    "dim, config",
    [
        slow(128, Config(tile_n=224)),
        (64, Config(tile_n=160, consumers=3)),
        slow(256, Config(tile_n=96, epilogue_n=64)),
        slow(192, Config(tile_n=96, epilogue_n=64)),
        (96, Config(tile_n=64, warp_scheduler_barrier=False)),
    ],
    ids=str,
)
def test_configurations(dim, config, rng):
    """Blocks of keys that are no power of two: K in one line and in two (256), V and P in pieces."""
    for causal in on_gpu_or_simulated([False, True], [bool(rng.integers(2))]):
        print(f"{causal=}")
        check(*operands(1, 2, 1, 150, 500, dim), config=config, causal=causal)


@pytest.mark.parametrize(
    "given", [dict(window=(70, 20)), slow(dict(softcap=3.0)), dict(scale=0.3, causal=True)], ids=str
)
def test_scales_of_heads(given, rng):
    q, k, v = operands(2, 4, 2, 100, 150, 64)
    scales = {name: torch.rand(2, 2, device=DEVICE) + 0.5 for name in ("q_scale", "k_scale", "v_scale")}
    check(q, k, v, scales, **given)
    check(q, k, v, {"v_scale": scales["v_scale"]}, **given)


@pytest.mark.parametrize("dtype", [slow(torch.float16), torch.float32])
def test_types_of_the_result(dtype, rng):
    q, k, v = operands(1, 1, 1, 70, 80, 64)
    check(q, k, v, out_dtype=dtype)
    assert attention_fp8(q, k, v, out_dtype=dtype).dtype == dtype


def test_strides(rng):
    """(B, S, H, D) tensors, and a V that is transposed in memory."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands(2, 4, 2, 100, 130, 64))
    check(q, k, v)
    check(q, k, v.transpose(2, 3).contiguous().transpose(2, 3))


def test_nothing_to_see(rng):
    q, k, v = operands(1, 2, 1, 130, 70, 64)
    assert (check(q, k, v, causal=True)[:, :, :60] == 0).all()
    check(q, k[:, :, :0], v[:, :, :0])
    assert attention_fp8(q[:, :, :0], k, v).shape == (1, 2, 0, 64)


def test_refusals():
    q, k, v = operands(1, 2, 1, 10, 10, 64)
    with pytest.raises(TypeError, match="attention_fp8: q has dtype torch.bfloat16"):
        attention_fp8(q.bfloat16(), k, v)
    with pytest.raises(ValueError, match="attention: head dimension 48; it must be a multiple of 32 up to 256"):
        attention_fp8(q[..., :48], k[..., :48], v)
    with pytest.raises(TypeError, match="attention_fp8: out_dtype=torch.int8; it must be one of torch.bfloat16"):
        attention_fp8(q, k, v, out_dtype=torch.int8)
    with pytest.raises(
        ValueError, match=r"attention_fp8: k_scale is \(2,\), torch.float32, on .*; it must be \(1, 1\), torch.float32"
    ):
        attention_fp8(q, k, v, k_scale=torch.ones(2, device=DEVICE))
    with pytest.raises(TypeError, match="attention_fp8: out has dtype torch.float8_e4m3fn"):
        attention_fp8(q, k, v, out=torch.empty_like(q))
    for given, words in (
        (dict(window=(1, 2, 3)), "window=(1, 2, 3); it must be (left, right)"),
        (dict(window=5), "window=5; it must be (left, right)"),
        (dict(scale=0.0), "scale=0.0; it must be positive"),
        (dict(softcap=-1.0), "softcap=-1.0; it must be positive"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"attention_fp8: {words}")):
            attention_fp8(q, k, v, **given)


@pytest.mark.parametrize(
    "given",
    [slow({}), dict(causal=True, softcap=5.0), slow(dict(window=(30, 5), scale=0.2, out_dtype=torch.float32))],
    ids=str,
)
def test_operator(given, rng):
    """torch.library's own checks, and one graph with the results of the eager call."""
    q, k, v = operands(1, 4, 2, 70, 90, 64)
    scale = torch.rand(1, 2, device=DEVICE) + 0.5
    left, right = given.get("window", (None, None))
    arguments = (
        q,
        k,
        v,
        scale,
        None,
        scale,
        given.get("causal", False),
        left,
        right,
        given.get("scale"),
        given.get("softcap"),
        torch.bfloat16,
    )
    # torch cannot compare e4m3, as test_schema does
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.tritonkittens.attention_fp8.default, arguments, test_utils=tests)

    def layer(q, k, v):
        out, lse = attention_fp8(q, k, v, q_scale=scale, v_scale=scale, return_lse=True, **given)
        return out + 1, lse, attention_fp8(q, k, v, out=torch.empty_like(out), **given)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for found, expected in zip(compiled(q, k, v), layer(q, k, v), strict=True):
        torch.testing.assert_close(found, expected)
