"""What the README shows works: its kernels are compiled here and run on a GPU, its commands are executed."""
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tritonkittens.lang as tk
from bench import figures
from tests.util import in_pages, meta, on_gpu_or_simulated, poison, relative_error
from tritonkittens.kernels.attention import attention_torch
from tritonkittens.kernels.gemm import gemm

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# a terminal whose encoding lacks what some commands print; its bytes decode in any
ASCII = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="session")
def shown(tmp_path_factory):
    """The README's kernel definitions as a module; the lines that use them are left to the tests."""
    code = "import pytest\nimport torch\nimport triton\nimport triton.language as tl\n\nimport tritonkittens.lang as tk\n"
    for block in blocks("python"):
        definitions = re.split(r"\n(?=tile = |RowSums\(\)\()", block)[0]
        if "def " in definitions:
            code += "\n\n" + definitions
    path = tmp_path_factory.mktemp("readme") / "readme_kernels.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("readme_kernels", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["readme_kernels"] = module
    spec.loader.exec_module(module)
    return module


def test_the_kernels_compile(shown):
    source = ASTSource(shown.softmax_kernel, {"X": "*fp32", "Y": "*fp32", "ROWS": "constexpr", "COLS": "constexpr"}, {(2,): 16, (3,): 64})
    assert "ex2.approx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    tile = tk.st(tk.bf16, 64, 128)
    scores = shown.scores_kernel.compile(tk.gl(meta(128, 128), tile), tk.gl(meta(128, 128), tile), tk.gl(meta(128, 128, dtype=torch.float32)), tile)
    assert scores.asm["ptx"].count("wgmma.mma_async") == 8
    sums = shown.RowSums().compile(meta(128, 256), meta(128, 16, dtype=torch.float32))
    assert "cp.async.bulk.tensor" in sums.asm["ptx"]


def test_the_kernels_run(shown, rng, kernel_device):
    x = torch.randn(16, 64, device=kernel_device)
    y = poison(torch.empty_like(x))
    shown.softmax_kernel[(1,)](x, y, 16, 64)
    assert relative_error(y, x.double().softmax(1)) < 1e-6
    q, k = (torch.randn(192, 128, device=kernel_device, dtype=torch.bfloat16) for _ in range(2))
    s = poison(torch.empty(192, 192, device=kernel_device))
    tile = tk.st(tk.bf16, 64, 128)
    shown.scores_kernel[(q.shape[0] // 64, k.shape[0] // 64)](tk.gl(q, tile), tk.gl(k, tile), tk.gl(s), tile)
    assert relative_error(s, q.double() @ k.double().T) < 1e-6
    x = torch.randn(64 * on_gpu_or_simulated(200, 5), 128 * 3, device=kernel_device, dtype=torch.bfloat16)
    y = poison(torch.empty(x.shape[0], 16, device=kernel_device))
    shown.RowSums()(x, y)
    assert relative_error(y, x.double().sum(1, keepdim=True).expand(-1, 16)) < 1e-5


def test_the_usage_blocks_run(rng, kernel_device):
    def randn(*shape):
        return torch.randn(*shape, device=kernel_device, dtype=torch.bfloat16)

    usage, model = [b for b in blocks("python") if "import gemm" in b or "use_attention" in b]
    x, w, bias, x0, g = randn(48, 64), randn(80, 64), randn(80), randn(48, 80), randn(80)
    q, k, v = randn(1, 4, 70, 64), randn(1, 2, 90, 64), randn(1, 2, 90, 64)
    n = torch.tensor([75], dtype=torch.int32, device=kernel_device)
    k_pool, v_pool, table = in_pages(k, v, n.tolist(), 16)
    starts = torch.tensor([0, 30, 70], dtype=torch.int32, device=kernel_device)
    packed = dict(tokens_q=randn(70, 4, 64), tokens_k=randn(70, 2, 64), tokens_v=randn(70, 2, 64), cu_seqlens_q=starts, cu_seqlens_k=starts)
    names = dict(a=randn(40, 64), b=randn(64, 48), x=x, w=w, bias=bias, x0=x0, g=g, q=q, k=k, v=v, n=n, k_pool=k_pool, v_pool=v_pool, table=table, **packed)
    exec(usage, names)
    assert relative_error(names["c"], x0.double() + g.double() * torch.nn.functional.gelu(x.double() @ w.double().T + bias.double())) < 5e-3
    assert names["o"].isfinite().all() and names["lse"].shape == (1, 4, 70)
    expected, _ = attention_torch(q[:, :, -1:], k[:, :, :75], v[:, :, :75])
    assert relative_error(names["o1"], expected) < 8e-3 and torch.equal(names["o1"], names["o2"])
    assert names["tokens_out"].shape == (70, 4, 64) and names["tokens_out"].isfinite().all()
    out = {}
    exec(model, dict(model=lambda x: out.update(y=torch.nn.functional.scaled_dot_product_attention(x, x, x)), x=q))
    assert relative_error(out["y"], torch.nn.functional.scaled_dot_product_attention(*[q.double()] * 3)) < 8e-3


def test_the_models_block_runs(rng, kernel_device):
    transformers = pytest.importorskip("transformers", minversion="5.17")
    (block,) = [b for b in blocks("python") if "register_transformers" in b]
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    names = dict(config=config, torch=torch)
    exec(block, names)
    model, ids = names["model"].to(kernel_device), torch.randint(32, (1, 70), device=kernel_device)
    with torch.no_grad():
        found = model(ids).logits
        model.set_attn_implementation("sdpa")
        assert relative_error(found, model(ids).logits) < 2e-2


@triton.jit
def scale(X, Y, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i, mask=i < n) * FACTOR, mask=i < n)


def test_the_simulator_block_runs(rng):
    (block,) = [b for b in blocks("python") if "sim.explore" in b]
    a, b = (torch.randn(128, 128).bfloat16() for _ in range(2))
    x, y = rng.standard_normal(1000).astype("float32"), np.full(1000, np.nan, "float32")
    names = dict(scale=scale, gemm=gemm, a=a, b=b, x=x, y=y, n=1000)
    exec(block, names)
    assert np.array_equal(y, x * np.float32(3)) and relative_error(names["c"], a.double() @ b.double()) < 5e-3


def test_the_check_command(shown, tmp_path):
    (command,) = re.findall(r"^python -m (tritonkittens check [^#\n]*)", README, re.MULTILINE)
    (softmax,) = [b for b in blocks("python") if "def softmax_kernel" in b]
    example = "def example_softmax():\n    return (1,), (torch.randn(16, 64), torch.empty(16, 64), 16, 64)\n"
    head = "import torch\nimport triton\nimport triton.language as tl\nimport tritonkittens.lang as tk\n"
    (tmp_path / "my_kernels.py").write_text(head + softmax + "\nsoftmax = softmax_kernel\n\n" + example)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "50 schedules, no finding" in done.stdout, done.stdout + done.stderr
    assert "modelled" in (tmp_path / "softmax.svg").read_text()


def test_the_error_that_is_quoted():
    quoted = re.search(r"`(st\(bf16, 64, 24\).*?)`", README)[1]
    with pytest.raises(tk.TileError, match=re.escape(quoted)):
        tk.st(tk.bf16, 64, 24)


def test_the_inspect_commands():
    commands = re.findall(r"^python -m (tritonkittens inspect[^#\n]*)", README, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, env=ASCII, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "gemm" in done.stdout or "_template_kernel" in done.stdout


def test_the_tuned_commands():
    commands = re.findall(r"^python -m (tritonkittens tuned[^#\n]*)", README, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "NVIDIA H200" in done.stdout, done.stderr


def test_the_example_and_the_demo_end_well():
    for command in (["examples/attention_pipeline.py"], ["-m", "tritonkittens", "demo"]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=ASCII if "demo" in command else None, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr


def test_the_figures_are_those_of_the_results():
    assert figures.table() in README and figures.overview() in README


def test_notes_and_files_that_are_cited_exist():
    sources = [path for folder in ("kernels", "tritonkittens", "bench", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    cited = {name for path in [*sources, *(ROOT / "docs").rglob("*.md")] for name in re.findall(r"docs/notes/\w+\.md|bench/\w+\.json", path.read_text())}
    cited |= set(re.findall(r"\]\(([\w/]+(?:\.\w+)?)\)", README))
    assert len(cited) > 5 and all((ROOT / name).exists() for name in cited), cited


def test_the_makefile_has_the_targets_that_are_named():
    targets = set(re.findall(r"`?make ([a-z-]+)`?", README))
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)), targets
