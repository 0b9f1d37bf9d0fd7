"""Models of Hugging Face transformers whose layers `patch` runs on the kernels: what they calculate in bf16 against the
same weights in float64, where the errors of transformers' own layers in bf16 say what rounding costs."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from tests.cases_patch import BF16, MODELS, agree, model, results, several, tokens  # noqa: E402
from tests.util import DEVICE, on_gpu_or_simulated, slow, some_slow  # noqa: E402
from tritonkittens.ops import patch  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernel_device")

BACKEND = on_gpu_or_simulated("inductor", "aot_eager")
QUICK = ("llama", "qwen3", "gemma")


@pytest.mark.parametrize("name", some_slow(MODELS, QUICK))
def test_logits_and_gradients(name, rng):
    ids = tokens(*on_gpu_or_simulated((4, 200), (2, 9)))
    exact, ours = model(name, torch.float64), model(name)
    theirs = several(ours, lambda: results(ours, ids))
    with patch(ours) as patched:
        assert patched.replaced == MODELS[name][1]
        found = results(ours, ids)
    agree(results(exact, ids), theirs, found)
    assert torch.equal(ours(ids).logits, theirs[0]["logits"])


def test_autocast(rng):
    """Weights in fp32: norms and cos leave queries and keys in fp32."""
    ids, exact = tokens(1, 9), model("qwen3", torch.float64)
    ours = model("qwen3", torch.float32)
    with torch.autocast(DEVICE, BF16):
        theirs = several(ours, lambda: results(ours, ids))
        with patch(ours):
            found = results(ours, ids)
    assert {key: x.dtype for key, x in found.items()} == {key: x.dtype for key, x in theirs[0].items()}
    agree(results(exact, ids), theirs, found)


@pytest.mark.parametrize("cache", on_gpu_or_simulated([None, "static"], [None]))
@pytest.mark.parametrize("name", ["qwen3", slow("mamba2"), slow("qwen3_next"), slow("qwen3_5_text")])
def test_generate(name, cache, rng):
    """With a static cache on a GPU, transformers compiles the step of a token. The first prompt is shorter. Without a
    mask transformers would leave out tokens that are `pad_token_id`."""
    ids, m = tokens(2, 5), model(name)
    given = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None, cache_implementation=cache)
    given |= dict(attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True)
    given["attention_mask"][0, :2] = 0
    with patch(m):
        found = m.generate(ids, **given)
    mask = torch.ones_like(found.sequences)
    mask[0, :2] = 0

    def logits(m):
        return {"logits": m(found.sequences, attention_mask=mask).logits[:, 4:-1].detach()}

    exact = logits(model(name, torch.float64))
    agree(exact, several(m, lambda: logits(m)), {"logits": torch.stack(found.logits, 1)})


@pytest.mark.parametrize(
    "name", ["llama", slow("gemma"), slow("qwen3_moe"), slow("deepseek_v3"), slow("mamba2"), slow("qwen3_5_text")]
)
def test_compiled(name, rng):
    """One graph."""
    torch._dynamo.reset()
    ids, m = tokens(1, 5), model(name, num_hidden_layers=1)
    exact = results(model(name, torch.float64, num_hidden_layers=1), ids)
    theirs = several(m, lambda: results(m, ids))
    with patch(m):
        agree(exact, theirs, results(m, ids, torch.compile(m, fullgraph=True, backend=BACKEND)))
