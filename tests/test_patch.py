"""What `patch` replaces in models of Hugging Face transformers, layer by layer, and what it leaves as it is."""

import contextlib
import copy
import io
import itertools
import pathlib
import re
import types

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.models.gemma import modeling_gemma  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.mamba2 import modeling_mamba2  # noqa: E402

from tests.cases_patch import BF16, agree, model, replaced, several, tokens  # noqa: E402
from tests.util import refused, relative_error, slow  # noqa: E402
from tritonkittens import sim  # noqa: E402
from tritonkittens.kernels.gated_gemm import layers as gated_layers  # noqa: E402
from tritonkittens.ops import mixers as patch_mixers  # noqa: E402
from tritonkittens.ops import patch, register_transformers  # noqa: E402


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_patch.DEVICE", "cpu")


def launches_of(run):
    with sim.device() as device:
        run()
    return len(device.launches)


def rms_norm(name):
    """(module, its arguments)."""
    return model(name).model.norm, (torch.randn(3, 5, 64).to(BF16),)


def head_norm():
    """Of a strided view."""
    return model("qwen3").model.layers[0].self_attn.q_norm, (torch.randn(2, 3, 4, 32).to(BF16).transpose(1, 2),)


def mlp(act, name="llama"):
    return model(name, hidden_act=act).model.layers[0].mlp, (torch.randn(2, 5, 64).to(BF16),)


def attention(name, **changes):
    m = model(name, attn_implementation="eager", **changes)
    x, positions = torch.randn(2, 5, 64).to(BF16), torch.arange(5).expand(2, 5) + torch.tensor([[3], [11]])
    return m.model.layers[0].self_attn, (x, m.model.rotary_emb(x, positions), None)


def mixture(name):
    """Of two experts, of which tokens have both, or one twice."""
    index, weights = torch.randint(2, (7, 2)), torch.rand(7, 2).to(BF16)
    return model(name).model.layers[1].mlp.experts, (torch.randn(7, 64).to(BF16), index, weights)


LAYERS = {  # and kernel launches of a forward
    "norm": (lambda: rms_norm("llama"), 1),
    "norm of gemma": (lambda: rms_norm("gemma"), 1),
    "norm of olmo": (lambda: rms_norm("olmo2"), 1),
    "norm of heads": (head_norm, 1),
    "silu": (lambda: mlp("silu"), 1),
    "gelu": (lambda: mlp("gelu"), 1),
    "gelu_tanh": (lambda: mlp("gelu_pytorch_tanh"), 1),
    "merged mlp": (lambda: mlp("silu", "phi3"), 1),
    "rotary": (lambda: attention("llama"), 1),
    "rotary of some columns": (lambda: attention("glm4_moe"), 3),  # and two norms
    "rotary of pairs": (lambda: attention("deepseek_v3"), 3),
    "rotary of halves": (lambda: attention("deepseek_v3", rope_interleave=False), 3),
    "experts": (lambda: mixture("qwen3_moe"), 4),
}


def in_double(arguments):
    if isinstance(arguments, torch.Tensor):
        return arguments.double() if arguments.is_floating_point() else arguments
    return arguments and tuple(map(in_double, arguments))


def layer_results(layer, arguments):
    """Result, gradients of parameters and of the first argument."""
    layer.zero_grad()
    x = arguments[0].detach().clone().requires_grad_()
    y = layer(x, *arguments[1:])
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.sin(torch.arange(y.numel(), device=y.device)).view(y.shape).to(BF16).to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{key: p.grad for key, p in layer.named_parameters()}}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, rng, monkeypatch):
    monkeypatch.setattr(gated_layers, "LEAST_ROWS", 10)
    made, launches = LAYERS[name]
    layer, arguments = made()
    theirs = layer_results(layer, arguments)
    with patch(layer), torch.no_grad():
        assert launches_of(lambda: layer(*arguments)) == launches
    with patch(layer), sim.device():
        ours = layer_results(layer, arguments)
        with torch.no_grad():
            again = layer(*arguments)
    ours["without gradients"], theirs["without gradients"] = (
        again[0] if isinstance(again, tuple) else again,
        theirs["y"],
    )
    for key, x in theirs.items():
        assert (x.dtype, x.shape) == (ours[key].dtype, ours[key].shape)
    factor = 3 if "rotary" in name else 1.2  # attention rounds more than what is in front of it
    exact = layer_results(copy.deepcopy(layer).double(), in_double(arguments))
    exact["without gradients"] = exact["y"]
    for key, expected in exact.items():
        assert relative_error(ours[key], expected) <= factor * relative_error(theirs[key], expected) + 1e-3, key


@pytest.mark.parametrize(
    ("name", "ends"),
    [("mamba2", [4, 5]), ("qwen3_next", [4, 5]), slow("mamba2", [4, 5, 7]), slow("qwen3_5_text", [4, 5, 7])],
)
def test_states(name, ends, rng):
    """A prompt with padding, the step of a token, and a piece of two tokens continue each other on the kernels."""
    layers = dict(num_hidden_layers=1) if name == "mamba2" else {}
    m, exact = model(name, **layers), model(name, torch.float64, **layers)
    ids, mask = tokens(1, ends[-1]), torch.ones(1, ends[-1], dtype=torch.int64)
    mask[0, :2] = 0

    def in_pieces(m):
        cache, found = transformers.DynamicCache(config=m.config), []
        for begin, end in itertools.pairwise([0, *ends]):
            out = m(ids[:, begin:end], cache=cache, attention_mask=mask[:, :end], use_cache=True)
            found.append(out.logits[:, -1])
        return {"logits": torch.stack(found)}

    with torch.no_grad():
        theirs = several(m, lambda: in_pieces(m))
        with patch(m, kinds=("mixer",)) as patched, sim.device() as device:
            ours = in_pieces(m)
        assert len(device.launches) == len(ends) * 2 * patched.replaced["mixer"]
        whole = exact(ids, attention_mask=mask).logits[:, [end - 1 for end in ends]].transpose(0, 1)
        agree({"logits": whole}, theirs, ours)
        assert torch.equal(in_pieces(m)["logits"], theirs[0]["logits"])


def mixer_of(name):
    m = model(name)
    layer = m.backbone.layers[0].mixer if name == "mamba2" else m.model.layers[0].linear_attn
    return layer, torch.randn(2, 5, 64).to(BF16)


@pytest.mark.parametrize("name", [slow("mamba2"), slow("qwen3_next")])
def test_gradients_of_mixers(name, rng):
    """Transformers' own operations are in fp32."""
    layer, x = mixer_of(name)
    theirs = layer_results(layer, (x,))
    with patch(layer, kinds=("mixer",)), sim.device():
        ours = layer_results(layer, (x,))
    exact = layer_results(copy.deepcopy(layer).double(), (x.double(),))
    for key, expected in exact.items():
        assert relative_error(ours[key], expected) <= 3 * relative_error(theirs[key], expected) + 1e-2, key


@pytest.mark.parametrize("name", ["qwen3_next", slow("mamba2")])
def test_compiled_mixers(name, rng):
    """One graph, with operators for the kernels."""
    layer, x = mixer_of(name)
    with patch(layer), sim.device(), torch.no_grad():
        graph = torch.export.export(layer, (x,), strict=True).graph
    operators = {str(node.target).split(".")[1] for node in graph.nodes if "tritonkittens" in str(node.target)}
    assert operators >= {"causal_conv1d", dict(mamba2="mamba_chunk_scan", qwen3_next="gated_delta_rule")[name]}


@pytest.mark.parametrize("name", [slow("mamba2"), slow("qwen3_next")])
def test_packed_sequences(name, rng):
    """They stay apart; transformers refuses them without other packages."""
    layer, _ = mixer_of(name)
    x, exact = torch.randn(1, 5, 64).to(BF16), copy.deepcopy(layer).double()
    packed = dict(seq_idx=torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32))
    if name == "qwen3_next":
        packed["cu_seq_lens_q"] = torch.tensor([0, 3, 5], dtype=torch.int32)
    with torch.no_grad(), patch(layer, kinds=("mixer",)):
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            layer(x, **packed)
        with sim.device():
            found = layer(x, **packed)
        expected = torch.cat([exact(x[:, :3].double()), exact(x[:, 3:].double())], 1)
    assert relative_error(found, expected) < 2e-2


def test_what_mixers_leave_to_transformers(rng):
    """An activation of no kernel, numbers of sequences of another dtype, and states of too few rows."""
    conv = patch_mixers.FUNCTIONS[0][2](modeling_mamba2.causal_conv1d_fn)
    step = patch_mixers.FUNCTIONS[1][2](modeling_mamba2.causal_conv1d_update)
    x, weight = torch.randn(1, 6, 5).to(BF16), torch.randn(6, 4).to(BF16)
    with torch.no_grad(), sim.device() as device:
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            conv(x, weight, activation="silu", seq_idx=torch.zeros(1, 5, dtype=torch.int64))
        expected = modeling_mamba2.causal_conv1d_fn(x, weight, None, "relu")
        assert torch.equal(conv(x, weight, activation="relu"), expected)
        ours, theirs = torch.zeros(1, 6, 2).to(BF16), torch.zeros(1, 6, 2).to(BF16)
        expected = modeling_mamba2.causal_conv1d_update(x, theirs, weight, None, "silu")
        assert torch.equal(step(x, ours, weight, None, "silu"), expected)
        assert torch.equal(ours, theirs) and not device.launches


@pytest.mark.parametrize("x_dtype, weight_dtype", [(BF16, torch.float32), (torch.float16, BF16), (torch.float32, BF16)])
@pytest.mark.parametrize("kind", [modeling_llama.LlamaRMSNorm, modeling_gemma.GemmaRMSNorm])
def test_dtypes_of_norms(kind, x_dtype, weight_dtype, rng):
    layer, x = kind(48).to(weight_dtype), torch.randn(3, 48).to(x_dtype)
    torch.nn.init.normal_(layer.weight)
    expected = layer(x)
    with patch(layer), sim.device() as device:
        found = layer(x)
    assert len(device.launches) == 1 and found.dtype == expected.dtype
    assert relative_error(found, expected.double()) < 6e-3


def test_experts_by_name(rng):
    """Experts that are no gated layers without biases run as with transformers' "grouped_mm"."""
    register_transformers()
    ids, m = tokens(1, 5), model("qwen3_moe")
    with torch.no_grad(), sim.device():
        with patch(m, kinds=("experts",)):
            expected = m(ids).logits
        m.set_experts_implementation("tritonkittens")
        with sim.device() as device:
            assert torch.equal(m(ids).logits, expected) and len(device.launches) == 8
        config = transformers.GptOssConfig(hidden_size=32, intermediate_size=32, num_local_experts=2)
        layer, found = modeling_gpt_oss.GptOssExperts(config), []
        x, index, weights = torch.randn(5, 32), torch.randint(2, (5, 2)), torch.rand(5, 2)
        for p in layer.parameters():
            torch.nn.init.normal_(p)
        for config._experts_implementation in ("grouped_mm", "tritonkittens"):
            found.append(layer(x, index, weights))
        assert torch.equal(*found) and not any(patch(layer).replaced.values())


@pytest.mark.parametrize("given", [{}, dict(num_items_in_batch=7), dict(num_items_in_batch=torch.tensor(7)),
                                   dict(ignore_index=3), dict(shift_labels=True)], ids=str)  # fmt: skip
def test_losses(given, rng):
    m, labels = model("llama"), tokens(2, 9)
    labels[0, 3:5], labels[1, -1] = -100, 3
    if "shift_labels" in given:
        given, labels = dict(shift_labels=labels), None
    else:
        labels = labels.clamp(min=0) if "ignore_index" in given else labels
    results = []
    for dtype, patched in ((torch.float64, False), (BF16, False), (BF16, True)):
        logits = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(1)).to(BF16).to(dtype).requires_grad_()
        with sim.device() as device, patch(m) if patched else contextlib.nullcontext():
            loss = m.loss_function(logits=logits, labels=labels, vocab_size=128, **given)
            (3 * loss).backward()
        assert loss.dtype == torch.float32 and bool(device.launches) == patched
        results.append((loss, logits.grad))
    (expected, grad), (_, theirs), (loss, ours) = results
    assert relative_error(loss, expected) < 1e-5
    assert relative_error(ours, grad) <= 1.2 * relative_error(theirs, grad)


def test_the_end_of_a_patch(rng):
    """It ends after an exception; inner ones end alone; other models of the class have their own layers."""
    ids = tokens(1, 3)
    m, other = model("llama"), model("llama")
    with torch.no_grad(), pytest.raises(KeyError):
        with patch(m, kinds=("norm",)) as outer:
            ours = launches_of(lambda: m(ids))
            assert ours and not launches_of(lambda: other(ids))
            with patch(m) as inner:
                assert inner.replaced["norm"] == 0 and inner.already_patched == dict(norm=5)
                assert repr(patch(m)) == (
                    "Patch(LlamaForCausalLM, norm: 0 (5 already patched), mlp: 0 (2 already patched), "
                    "rotary: 0 (2 already patched), mixer: 0, experts: 0, loss: 0 (1 already patched))"
                )
            assert outer.replaced == dict(norm=5) and launches_of(lambda: m(ids)) == ours
            raise KeyError
    with torch.no_grad():
        assert not launches_of(lambda: m(ids))
    assert not any("forward" in x.__dict__ for x in m.modules())
    handle = patch(m)
    assert str(handle) == "Patch(LlamaForCausalLM, norm: 5, mlp: 2, rotary: 2, mixer: 0, experts: 0, loss: 1)"
    handle.undo()
    handle.undo()
    assert not any("forward" in x.__dict__ for x in m.modules())


def test_copies_of_a_patched_model(rng):
    """A copy has its own weights on the kernels. From a file, it has transformers' layers."""
    ids, m, file = tokens(1, 3), model("llama"), io.BytesIO()
    with patch(m), sim.device() as device, torch.no_grad():
        expected, launches = m(ids).logits, len(device.launches)
        twin = copy.deepcopy(m)
        torch.save(m, file)
        for p in m.parameters():
            p.zero_()
        assert torch.equal(twin(ids).logits, expected) and len(device.launches) == 2 * launches
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        loaded(ids)
        assert len(device.launches) == 2 * launches
        assert patch(loaded).replaced == replaced(5, 2, loss=0)
        assert torch.equal(loaded(ids).logits, expected)


def test_without_kernels_layers_are_transformers_own(rng):
    """On a CPU, in float64, and for tensors of other classes."""
    ids = tokens(1, 3)
    for dtype in (BF16, torch.float64):
        m = model("qwen3", dtype)
        with torch.no_grad():
            expected = m(ids).logits
            with patch(m):
                assert torch.equal(m(ids).logits, expected)
                if dtype != BF16:
                    assert not launches_of(lambda: m(ids))
    norm = modeling_llama.LlamaRMSNorm(8)
    with patch(norm), sim.device(), pytest.raises(RuntimeError, match="must match"):
        norm(torch.ones(2, 7))


class Doubled(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def test_what_is_not_recognised_stays(rng):
    m = model("llama")
    m.model.norm = Doubled(64)
    layer = m.model.layers[0]
    layer.input_layernorm.forward = types.MethodType(lambda self, x: x, layer.input_layernorm)
    with patch(m) as patched:
        assert patched.replaced == replaced(3, 2)
        assert torch.equal(layer.input_layernorm(torch.ones(64)), torch.ones(64))
    assert "forward" in layer.input_layernorm.__dict__
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=32))
    assert not any(patch(gpt).replaced.values())
    names = "'norm', 'mlp', 'rotary', 'mixer', 'experts', 'loss'"
    with refused(f"patch: kinds contain 'norms'; they are {names}", ValueError):
        patch(m, kinds=("norm", "norms"))
    with refused("patch: kinds is a str; give a tuple", TypeError):
        patch(m, "norm")
    for wrong in ("model", None):
        with refused(f"patch: model is {type(wrong).__name__}; it must be a torch.nn.Module", TypeError):
            patch(wrong)


SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
HEADS = dict(num_key_value_heads=1, head_dim=32)
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2, num_experts=4, num_local_experts=4, n_routed_experts=4)
STATES = dict(  # four heads of 32 columns under any name; the fourth layer is attention
    num_hidden_layers=4, num_heads=4, mamba_n_heads=4, mamba_num_heads=4, mamba_head_dim=32, mamba_d_ssm=128,
    n_groups=1,
)  # fmt: skip
LATENT = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, n_group=1, topk_group=1,
    first_k_dense_replace=1,
)  # fmt: skip


def test_the_table_of_models():
    """docs/models.md says what is replaced in which models."""
    page = (pathlib.Path(__file__).parents[1] / "docs" / "models.md").read_text()
    version, table = re.search(
        r"in transformers (\d+\.\d+) \| what is replaced \|\n\|---\|---\|\n(.*?)\n\n", page, re.S
    ).groups()
    if not transformers.__version__.startswith(version + "."):
        pytest.skip(f"the table is of transformers {version}")
    for names, kinds in re.findall(r"^\| (.+) \| (.+) \|$", table, re.MULTILINE):
        for name in names.split(", "):
            sizes = SIZES | (EXPERTS if re.search("moe|mixtral|deepseek|next|oss|jamba", name) else {})
            sizes |= STATES if re.search("qwen3_(next|5)|mamba|nemotron_h|falcon_h1|hybrid", name) else {}
            sizes |= LATENT | dict(num_key_value_heads=2) if "deepseek" in name else HEADS
            with torch.device("meta"):
                m = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes))
            found = [kind for kind, count in patch(m).replaced.items() if count]
            assert (", ".join(found) or "nothing") == kinds, name


def test_compiled_before_and_after(rng):
    """A compiled layer runs on the kernels while it is patched, and is not compiled anew for each patch."""
    torch._dynamo.reset()
    x, layer = torch.randn(2, 64).to(BF16), model("llama").model.norm
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = compiled(x)
        for stance in ("default", "fail_on_recompile"):
            with torch.compiler.set_stance(stance):
                with patch(layer):
                    assert launches_of(lambda: compiled(x)) == 1
                assert torch.equal(compiled(x), expected)
