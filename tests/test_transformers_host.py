"""What the host does for a token that a model of transformers generates: how often, and in how many steps."""

import collections
import sys
import types

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import masking_utils as masks  # noqa: E402

from tritonkittens import sim  # noqa: E402
from tritonkittens.kernels.attention import attention_decode, attention_ranges, decode_plan, ranges_plan  # noqa: E402
from tritonkittens.kernels.attention.decode_plan import DecodePlan  # noqa: E402
from tritonkittens.launch.native import signature_reader  # noqa: E402
from tritonkittens.ops import Unsupported, mask_functions, readings, register_transformers  # noqa: E402
from tritonkittens.ops import transformers as implementation  # noqa: E402
from tritonkittens.ops.transformers import attention_forward, attention_mask  # noqa: E402

MODULE = torch.nn.Module()
MODULE.num_key_value_groups = 2
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    for module, name in ((decode_plan, "_plans"), (decode_plan, "_plans_of_kernels"), (readings, "_readings")):
        monkeypatch.setattr(module, name, {})


def operands(batch=2, keys=20):
    """A token's queries as a model has them, and caches."""
    q = torch.randn(batch, 1, 4, 64, dtype=BF16).transpose(1, 2)
    return q, torch.randn(batch, 2, keys, 64, dtype=BF16), torch.randn(batch, 2, keys, 64, dtype=BF16)


def exact(q, k, v, begin=None):
    visible = None if begin is None else torch.arange(k.shape[2]) >= torch.tensor(begin)[:, None, None, None]
    given = dict(attn_mask=visible, enable_gqa=True)
    return torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), **given).transpose(1, 2)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-2)


def ranges(begin, keys):
    return torch.tensor([[[[first, keys]]] for first in begin], dtype=torch.int32)


class Marked(torch.Tensor):
    """A subclass as users write them: torch's functions keep it."""


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def python_calls(run):
    """Calls of Python functions."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_a_known_token_is_computed_like_the_first(rng):
    """Without a mask, with ranges, and with ranges that are written anew, for caches that grow."""
    with sim.device(), torch.no_grad():
        for keys in (20, 20, 21):
            q, k, v = operands(keys=keys)
            out, weights = attention_forward(MODULE, q, k, v, None, scaling=0.125)
            assert weights is None and out.shape == (2, 1, 4, 64) and out.is_contiguous()
            close(out, exact(q, k, v))
            mask = ranges((3, 0), keys)
            for begin in ((3, 0), (3, 0), (0, 7)):
                mask[:, 0, 0, 0] = torch.tensor(begin)
                close(attention_forward(MODULE, q, k, v, mask, scaling=0.125)[0], exact(q, k, v, begin))


def test_a_known_token_is_still_refused_or_differentiated(rng):
    q, k, v = operands()
    with sim.device():
        for _ in range(2):
            attention_forward(MODULE, q, k, v, None)
        for given, message in (
            (dict(dropout=0.1), "dropout_p=0.1"),
            (dict(output_attentions=True), "output_attentions=True"),
            (dict(s_aux=torch.zeros(4, dtype=torch.float32)), "s_aux is given"),
        ):
            with pytest.raises(Unsupported, match=message):
                attention_forward(MODULE, q, k, v, None, **given)
        with pytest.raises(Unsupported, match="a mask of queries and keys"):
            attention_forward(MODULE, q, k, v, torch.ones(2, 1, 1, 20, dtype=torch.bool))
        out, _ = attention_forward(MODULE, q.requires_grad_(), k, v, None, output_attentions=None)
        assert out.requires_grad
        q = q.detach()
        with torch.autocast("cpu", torch.float16):
            assert attention_forward(MODULE, q, k, v, None)[0].dtype == torch.float16
        with torch.device("cpu"):
            close(attention_forward(MODULE, q, k, v, None)[0], exact(q, k, v))


def test_a_known_token_is_told_from_other_calls(rng):
    """Operands that torch has put off to negate, tensors of a subclass, and queries that see the keys behind them."""
    q, k, v = operands()
    with sim.device(), torch.no_grad():
        for _ in range(2):
            attention_forward(MODULE, q, k, v, None)
        for given in ((torch._neg_view(q), k, v), (q, torch._neg_view(k), v), (q, k, torch._neg_view(v))):
            close(attention_forward(MODULE, *given, None)[0], exact(*given))
        marked = [x.as_subclass(Marked) for x in (q, k, v)]
        attention_decode(*marked, scale=64**-0.5)
        for kind, given in (("TwoTensor", (TwoTensor(q, q.clone()), k, v)), ("Marked", marked)):
            with pytest.raises(Unsupported, match=f"query is a {kind}"):
                attention_forward(MODULE, *given, None)
        several = torch.randn(2, 5, 4, 64, dtype=BF16).transpose(1, 2)
        attention_decode(several, k, v, causal=True, scale=64**-0.5)
        close(attention_forward(MODULE, several, k, v, None, is_causal=False)[0], exact(several, k, v))


@pytest.mark.parametrize("mask", [None, ranges((3, 0), 1024)], ids=["none", "ranges"])
def test_a_layer_takes_few_steps(mask, monkeypatch):
    """No check, no plan and no copy after the first layer."""
    bound = []
    launches = lambda *args: lambda *tensors: bound.append(len(tensors))  # noqa: E731
    monkeypatch.setattr(decode_plan, "signature", signature_reader("cpu"))
    monkeypatch.setattr(decode_plan, "combine", types.SimpleNamespace(bind=launches))
    monkeypatch.setattr(DecodePlan, "_bind", launches)
    with sim.device(), torch.no_grad():
        q, k, v = operands(keys=1024)
        given = dict(scaling=0.125, dropout=0.0, position_ids=None, use_cache=True)
        attention_forward(MODULE, q, k, v, mask, **given)
        calls = python_calls(lambda: attention_forward(MODULE, q, k, v, mask, **given))
    assert len(bound) == 4, "of the kernel and of the one that combines splits"
    assert len(calls) <= (16 if mask is None else 20), calls
    assert not {name for name in calls if "check" in name or "choose" in name or name == "_columns"}, calls


def test_ranges_are_read_once_for_all_layers():
    """For every tensor, version of it and reader, but every time where no version is counted."""
    read, cpu = [], torch.device("cpu")

    def reader(mask, device):
        read.append(device)
        return implementation._columns(mask, device)

    def columns(mask):
        return readings.read_once(mask, reader, cpu, device=cpu)

    for mask in (ranges((3, 0), 20), ranges((3, 0), 20)):
        for begin in (3, 5):
            mask[0, 0, 0, 0] = begin
            for _ in range(16):
                starts, lengths = columns(mask)
                assert starts.tolist() == [begin, 0] and lengths.tolist() == [20, 20]
    assert read == [cpu] * 4
    with torch.inference_mode():
        mask = ranges((3, 0), 20)
        for begin in (3, 5):
            mask[0, 0, 0, 0] = begin
            assert columns(mask)[0].tolist() == [begin, 0]
    for _ in range(20):
        columns(ranges((3, 0), 20))
    assert len(readings._readings) <= readings.KEPT


def test_runs_of_padded_sequences_are_found_once_for_all_layers(monkeypatch, rng):
    """Also for the backward. Ranges that are written anew are read anew, also where torch does not see it."""
    read, find = [], ranges_plan.runs
    monkeypatch.setattr(ranges_plan, "runs", lambda numbers: read.append(1) or find(numbers))
    monkeypatch.setattr(ranges_plan, "_known", collections.deque(maxlen=2))
    q, k, v = (torch.randn(2, 2, 24, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    mask = torch.stack((torch.zeros(24, dtype=torch.int32), torch.arange(24) + 1), -1).int().expand(2, 1, 24, 2).clone()
    with sim.device():
        for begin in (0, 3, 0):
            mask.numpy()[1, 0, begin:, 0] = begin
            key = torch.arange(24)
            visible = (key >= mask[..., :1]) & (key < mask[..., 1:])
            for _ in range(2):
                out = attention_ranges(q, k, v, mask)
                close(out, torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), visible))
        out.sum().backward()
    assert len(read) == 4 and q.grad is not None


@pytest.mark.parametrize(
    "end, seen",
    [([6, 7, 8], 8), ([1, 2, 3], 3), ([0, 1, 2], None), ([6, 6, 8], None), ([8, 8, 8], None), ([6, 7, 9], None)],
)
def test_causal_masks_of_the_first_keys(end, seen):
    mask = torch.tensor([[[[0, n] for n in end]]] * 2, dtype=torch.int32)
    assert implementation._keys_of_causal(mask) == seen
    mask[1, 0, 1, 0] = 1
    assert implementation._keys_of_causal(mask) is None


def test_the_prefill_of_a_static_cache_is_causal_attention(monkeypatch, rng):
    """Of the keys that are filled; few queries behind others take the decode kernel."""
    called = []
    for name in ("attention", "attention_decode", "attention_ranges"):
        kernel = getattr(implementation, name)
        monkeypatch.setattr(implementation, name, lambda *a, k=kernel, n=name, **b: called.append(n) or k(*a, **b))
    q, k, v = torch.randn(2, 4, 80, 64, dtype=BF16), *operands(keys=100)[1:]
    mask = attention_mask(
        2, 80, 100, 0, mask_function=masks.causal_mask_function, attention_mask=torch.ones(2, 80, dtype=torch.bool)
    )
    with sim.device(), torch.no_grad():
        for queries, first in ((80, 0), (5, 70)):
            part = mask[:, :, first : first + queries]
            out, _ = attention_forward(MODULE, q[:, :, first : first + queries], k, v, part)
            visible = torch.arange(100) <= torch.arange(first, first + queries)[:, None]
            expected = torch.nn.functional.scaled_dot_product_attention(
                *(x.double() for x in (q[:, :, first : first + queries], k, v)), attn_mask=visible, enable_gqa=True
            )
            close(out, expected.transpose(1, 2))
        with pytest.raises(ValueError, match="ranges has one beyond the 60 keys"):
            attention_forward(MODULE, q, k[:, :, :60], v[:, :, :60], mask)
    assert called == ["attention", "attention_decode", "attention_ranges"]


@pytest.mark.parametrize("queries", [1, 30])
def test_a_mask_without_padding_takes_two_operations(queries):
    """One says that there is no padding, one that the host has it. Those of transformers take as many, or 25 where the
    cache is static."""
    given = dict(batch_size=3, q_length=queries, mask_function=masks.causal_mask_function)
    tokens = torch.ones(3, 40, dtype=torch.bool)
    mask_functions._readers()
    with Operations() as dynamic:
        assert attention_mask(**given, kv_length=40, q_offset=40 - queries, attention_mask=tokens) is None
    with Operations() as static:
        found = attention_mask(**given, kv_length=50, q_offset=torch.tensor(40 - queries), attention_mask=tokens)
    assert found[:, 0].tolist() == [[[0, 40 - queries + i + 1] for i in range(queries)]] * 3
    assert dynamic.count == 2 and static.count <= 8


def test_a_model_thinks_masks_out_once_a_token(monkeypatch):
    """Of three layers, four tokens and a prompt. In fp32 PyTorch's attention runs, with the same masks."""
    read, numbers = [], implementation._of_numbers
    monkeypatch.setattr(implementation, "_of_numbers", lambda *args: read.append(1) or numbers(*args))
    register_transformers("tritonkittens")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tritonkittens")
    ids, mask = torch.randint(32, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    given = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    with pytest.warns(UserWarning, match="PyTorch's attention runs") if not implementation._warned else torch.no_grad():
        model.generate(ids, **given)
    assert len(read) == 5
