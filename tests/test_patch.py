"""Models of Hugging Face transformers whose layers `patch` runs on the kernels: what they calculate in bf16 against the
same weights in float64, where the errors of transformers' own layers in bf16 say what rounding costs."""

import copy
import functools
import types

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.models.llama import modeling_llama  # noqa: E402

from tests.util import DEVICE, refused, relative_error, slow  # noqa: E402
from tritonkittens import sim  # noqa: E402
from tritonkittens.ops import patch  # noqa: E402

BF16 = torch.bfloat16
SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
# each token runs through all experts: rounding does not change which
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
LATENT = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, num_key_value_heads=2
)
MODELS = {  # configuration, and what `patch` replaces
    "llama": (lambda: transformers.LlamaConfig(**SIZES), dict(norm=5, mlp=2)),
    "qwen3": (lambda: transformers.Qwen3Config(**SIZES), dict(norm=9, mlp=2)),
    "gemma": (lambda: transformers.GemmaConfig(**SIZES), dict(norm=5, mlp=2)),
    "gemma2": (lambda: transformers.Gemma2Config(**SIZES), dict(norm=9, mlp=2)),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**SIZES), dict(norm=13, mlp=2)),
    "mistral": (lambda: transformers.MistralConfig(**SIZES), dict(norm=5, mlp=2)),
    "mixtral": (
        lambda: transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=2),
        dict(norm=5, mlp=0),
    ),
    "qwen3_moe": (lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=2), dict(norm=9, mlp=0)),
    "deepseek_v3": (
        lambda: transformers.DeepseekV3Config(
            **{**SIZES, **EXPERTS, **LATENT}, n_routed_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1
        ),
        dict(norm=9, mlp=2),
    ),
}


@functools.cache
def weights(name):
    """Parameters of a random model, rounded to bf16, large enough that every layer matters."""
    made = transformers.AutoModelForCausalLM.from_config(MODELS[name][0]())
    return {
        key: (torch.rand(x.shape) + 0.5 if x.ndim == 1 else torch.randn(x.shape) * (3 / x.shape[-1]) ** 0.5).to(BF16)
        for key, x in made.state_dict().items()
    }


def model(name, dtype=BF16, **changes):
    config = MODELS[name][0]()
    config.update(changes)
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(DEVICE, dtype)
    made.load_state_dict(weights(name), strict=not changes)  # fewer layers have fewer
    return made.eval()


def tokens(*shape):
    return torch.randint(SIZES["vocab_size"], shape, device=DEVICE)


def results(m, ids, run=None):
    """{"logits", "loss" and the name of every parameter: its gradient}."""
    m.zero_grad()
    out = (m if run is None else run)(ids, labels=ids, use_cache=False)
    out.loss.backward()
    return {
        "logits": out.logits.detach(),
        "loss": out.loss.detach(),
        **{key: p.grad for key, p in m.named_parameters() if p.grad is not None},
    }


def agree(exact, theirs, ours):
    """Our errors are about those of transformers' layers: both round to bf16."""
    assert exact.keys() == theirs.keys() == ours.keys()
    for key, expected in exact.items():
        error, bound = relative_error(ours[key], expected), 1.5 * relative_error(theirs[key], expected) + 2e-3
        assert error <= bound, f"{key} is off by {error:.2e}, where {bound:.2e} is right"


SLOW = ("gemma2", "gemma3", "mistral", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in MODELS])
def test_logits_and_gradients(kernel_device, name, rng):
    ids = tokens(2, 9)
    exact, ours = model(name, torch.float64), model(name)
    theirs = results(ours, ids)
    with patch(ours) as patched:
        assert patched.replaced == MODELS[name][1]
        found = results(ours, ids)
    agree(results(exact, ids), theirs, found)
    for key, x in results(ours, ids).items():
        assert torch.equal(x, theirs[key]), f"{key} differs after the patch"


def launches_of(run):
    with sim.device() as device:
        run()
    return len(device.launches)


def test_the_end_of_a_patch(rng):
    """It ends after an exception; inner ones end alone; other models of the class have their own layers."""
    ids = tokens(1, 3)
    m, other = model("llama"), model("llama")
    with torch.no_grad(), pytest.raises(KeyError):
        with patch(m, kinds=("norm",)) as outer:
            ours = launches_of(lambda: m(ids))
            assert ours and not launches_of(lambda: other(ids))
            with patch(m) as inner:
                assert inner.replaced["norm"] == 0
            assert outer.replaced == dict(norm=5) and launches_of(lambda: m(ids)) == ours
            raise KeyError
    with torch.no_grad():
        assert not launches_of(lambda: m(ids))
    assert not any("forward" in x.__dict__ for x in m.modules())
    handle = patch(m)
    assert str(handle) == "Patch(LlamaForCausalLM, norm: 5, mlp: 2)"
    handle.undo()
    handle.undo()
    assert not any("forward" in x.__dict__ for x in m.modules())


def test_a_copy_of_a_patched_model_has_its_own_weights(rng):
    ids = tokens(1, 3)
    m = model("llama")
    with patch(m), sim.device(), torch.no_grad():
        expected = m(ids).logits
        twin = copy.deepcopy(m)
        for p in m.parameters():
            p.zero_()
        assert torch.equal(twin(ids).logits, expected)


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
        assert patched.replaced == dict(norm=3, mlp=2)
        assert torch.equal(layer.input_layernorm(torch.ones(64)), torch.ones(64))
    assert "forward" in layer.input_layernorm.__dict__
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=32))
    assert not any(patch(gpt).replaced.values())
    with refused("patch: kinds contain 'norms'; they are 'norm', 'mlp'", ValueError):
        patch(m, kinds=("norm", "norms"))


def test_generate(kernel_device, rng):
    ids, m = tokens(2, 5), model("qwen3")
    given = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    with patch(m):
        found = m.generate(ids, **given, output_logits=True, return_dict_in_generate=True)
    exact, theirs = (x(found.sequences).logits[:, 4:-1].detach() for x in (model("qwen3", torch.float64), m))
    agree({"logits": exact}, {"logits": theirs}, {"logits": torch.stack(found.logits, 1)})


@pytest.mark.parametrize("name", ["llama", slow("gemma"), slow("qwen3")])
def test_compiled(kernel_device, name, rng):
    """One graph, with the results of eager calls."""
    torch._dynamo.reset()
    ids, m = tokens(1, 5), model(name, num_hidden_layers=1)
    with patch(m):
        expected, found = results(m, ids), results(m, ids, torch.compile(m, fullgraph=True, backend="aot_eager"))
    for key, x in expected.items():
        assert relative_error(found[key], x) < 1e-2, key  # gradients are summed in another order


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
