"""Tensor, sequence and data parallelism of models on the shipped kernels: two simulated processes agree with one."""

import importlib
import importlib.resources
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.parallel_models import CASES, outcomes_of
from tritonkittens.kernels import _sharding

WHOLE, SUM = Replicate(), Partial()


def test_two_processes_agree_with_one(tmp_path):
    """All cases, since the processes take longer to begin than a case."""
    for found in outcomes_of(tmp_path, "gloo"):
        for case in CASES:
            assert found.get(case.__name__, found) == "", case.__name__


# ---- rules


REFUSING = {  # operators that take no DTensor
    "quantize_mxfp8",
    "quantize_nvfp4",
    "nvfp4_tensor_scale",
    "norm",
    "norm_backward",
    "norm_dropout_mask",
    "softmax",
    "softmax_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "based_attention",
    "based_gradient",
    "causal_conv1d",
    "causal_conv1d_backward",
    "combine_tokens",
    "combine_tokens_backward",
    "gated_activation",
    "gated_activation_backward",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "gated_gemm",
    "fft_conv",
    "fft_conv_filter_gradient",
    "gather_tokens",
    "hedgehog_attention",
    "hedgehog_attention_backward",
    "grouped_gemm",
    "linear_attention",
    "linear_attention_backward",
    "mamba_chunk_scan",
    "mamba_chunk_scan_backward",
    "rotary",
    "rotary_inplace",
    "rotary_norm_backward",
}


def spec(*shape, mesh=(2,), dtype=torch.float32):
    """What a rule reads of an operand."""
    return SimpleNamespace(shape=torch.Size(shape), ndim=len(shape), mesh=SimpleNamespace(shape=mesh), dtype=dtype)


def products(a, b, bias=None, activation=None, gate=None, residual=None, scale_a=None, scale_b=None, out_dtype=None):
    """By the placement of the result, those of the operands."""
    found = _sharding._gemm(a, b, bias, activation, gate, residual, scale_a, scale_b, out_dtype, None, "fp32")
    return {placement: [x for x in inputs if x is not None] for (placement,), inputs in found}


def test_batches_of_both_operands_and_of_one_are_sharded():
    found = products(spec(3, 1, 8, 16), spec(4, 16, 32), residual=spec(3, 4, 8, 32))
    assert found == {
        WHOLE: [WHOLE] * 3,
        Shard(0): [Shard(0), WHOLE, Shard(0)],
        Shard(1): [WHOLE, Shard(0), Shard(1)],
        Shard(2): [Shard(2), WHOLE, Shard(2)],
        Shard(3): [WHOLE, Shard(2), Shard(3)],
        SUM: [Shard(3), Shard(1), SUM],
    }


def test_vectors_are_sharded_with_their_rows_or_columns():
    vectors = dict(bias=spec(1, 32), gate=spec(8, 1), scale_a=spec(8), scale_b=spec(32))
    found = products(spec(8, 16), spec(16, 32), **vectors)
    assert found[Shard(0)] == [Shard(0), WHOLE, WHOLE, Shard(0), Shard(0), WHOLE]
    assert found[Shard(1)] == [WHOLE, Shard(1), Shard(1), WHOLE, WHOLE, Shard(0)]
    assert found[SUM] == [Shard(1), Shard(0), SUM, WHOLE, WHOLE, WHOLE]
    numbers = dict(bias=spec(1), gate=spec(1, 1), scale_a=spec(), scale_b=spec(1, 1))
    assert products(spec(8, 16), spec(16, 32), **numbers)[Shard(1)] == [WHOLE, Shard(1), *[WHOLE] * 4]


def test_block_scales_are_sharded_by_rows_alone():
    scales = dict(scale_a=spec(256, 2), scale_b=spec(2, 3))
    found = products(spec(256, 256), spec(256, 384), **scales)
    assert found == {WHOLE: [WHOLE] * 4, Shard(0): [Shard(0), WHOLE, Shard(0), WHOLE]}


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_scales_of_blocks_along_k_are_whole(dtype):
    """They lie in an order of their own."""
    found = products(spec(256, 256), spec(256, 384), scale_a=spec(4096, dtype=dtype), scale_b=spec(6144, dtype=dtype))
    assert found == {WHOLE: [WHOLE] * 4}


@pytest.mark.parametrize("options", [dict(activation="silu"), dict(out_dtype=torch.float8_e4m3fn)], ids=str)
def test_no_sum_goes_through_an_activation_or_is_rounded_to_8_bits(options):
    found = products(spec(8, 16), spec(16, 32), **options)
    assert found.keys() == {WHOLE, Shard(0), Shard(1)}


@pytest.mark.parametrize(
    "heads, kv_heads, mesh, sharded",
    [(16, 8, (2, 4), True), (16, 4, (2, 4), True), (20, 10, (2, 4), False), (6, 3, (2,), False), (3, 3, (2,), False)],
)
def test_heads_stay_with_their_heads_of_keys(heads, kv_heads, mesh, sharded):
    q, k = spec(5, heads, 16, 16, mesh=mesh), spec(5, kv_heads, 16, 16, mesh=mesh)
    found = _sharding._attention("attention")(q, k, k, 0.25, None, -1, -1, False)
    expected = [([WHOLE] * 2, [WHOLE] * 3), ([Shard(1)] * 2, [Shard(1)] * 3)]
    assert found == expected[: 1 + sharded], "five batches are not divided either"


def test_gradients_of_a_head_of_keys_that_shards_share_are_sums():
    q, k = spec(1, 4, 16, 16), spec(1, 1, 16, 16)
    found = _sharding._attention("attention_backward")(q, None, q, k, k, q, spec(1, 4, 16), 0.25, None, -1, -1, False)
    assert found[-1] == ([Shard(1), SUM, SUM], [Shard(1), None, Shard(1), WHOLE, WHOLE, Shard(1), Shard(1)])


def test_pools_of_pages_are_whole_where_batches_are_sharded():
    q, pool, numbers = spec(2, 4, 1, 16), spec(9, 2, 16, 16), spec(2)
    found = _sharding._attention("attention_decode")(q, pool, pool, numbers, None, spec(2, 3), True, None, None, None)
    assert found[1:] == [
        ([Shard(0)] * 2, [Shard(0), WHOLE, WHOLE, Shard(0), None, Shard(0)]),
        ([Shard(1)] * 2, [Shard(1), Shard(1), Shard(1), WHOLE, None, WHOLE]),
    ]


def test_every_operator_has_a_rule_for_each_tensor():
    kernels = importlib.resources.files("tritonkittens.kernels")
    for family in (folder.name for folder in kernels.iterdir() if (folder / "__init__.py").is_file()):
        importlib.import_module(f"tritonkittens.kernels.{family}")  # registers them
    all_names = (name.split("::") for name in vars(torch._library.custom_ops)["OPDEFS"])
    names = {name for library, name in all_names if library == "tritonkittens"}
    ruled = {name for name in ("gemm", *_sharding.ATTENTION) if " " not in name}
    assert ruled <= names and names - ruled == REFUSING
    for text, rule in _sharding.ATTENTION.items():
        schema = getattr(torch.ops.tritonkittens, text.split()[0]).default._schema
        tensors = [i for i, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)]
        operands, results = (side.split() for side in rule.split(" -> "))
        assert tensors == list(range(len(operands))) and len(results) == len(schema.returns), text
