"""What the README and the pages of docs show works: their blocks run here, their commands are executed, their figures
are those that the library draws."""

import contextlib
import importlib
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tritonkittens.lang as tk
from bench import figures
from tests.util import DEVICE, meta, relative_error
from tritonkittens import sim
from tritonkittens.kernels.attention import attention, attention_torch
from tritonkittens.kernels.gemm import gemm

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
TEXT = "\n".join(PAGES.values())
# a terminal whose encoding lacks what some commands print; its bytes decode in any
ASCII = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Python that a page shows, what it prints, and Python in a comment, which runs and is not shown
BLOCK = re.compile(r"^```(python|output)\n(.*?)^```$|^<!-- run(?: needs (\w+))?:\n(.*?)^-->$", re.DOTALL | re.MULTILINE)


def pages_with_blocks():
    return [name for name, text in PAGES.items() if "```python\n" in text]


def run_page(name, folder):
    """Run the blocks of a page one after the other; returns the names that they define. Lines keep their numbers, and
    the source a file, as Triton wants it.

    Where a comment needs a module that is not installed, it and what follows on the page are left out.
    """
    text = PAGES[name]
    path = folder / (re.sub(r"\W", "_", name) + ".py")
    blocks = list(BLOCK.finditer(text))
    lines = [""] * text.count("\n")
    for block in blocks:
        if block[1] != "output":
            first = text.count("\n", 0, block.start()) + 1
            code = (block[2] if block[1] else block[4]).splitlines()
            lines[first : first + len(code)] = code
    path.write_text("\n".join(lines) + "\n")
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(path.stem, path))
    sys.modules[path.stem] = module
    printed = io.StringIO()
    for block in blocks:
        if block[1] == "output":
            assert printed.getvalue() == block[2], name
            continue
        if block[3] and importlib.util.find_spec(block[3]) is None:
            break
        first = text.count("\n", 0, block.start()) + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * first + (block[2] if block[1] else block[4]), path, "exec"), module.__dict__)
    return module.__dict__


def check_readme(names):
    x, y = names["x"], names["y"]
    assert relative_error(y, x.double().softmax(1)) < 1e-6
    source = ASTSource(
        names["softmax_kernel"],
        {"X": "*fp32", "Y": "*fp32", "ROWS": "constexpr", "COLS": "constexpr"},
        {(2,): 16, (3,): 64},
    )
    assert "ex2.approx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    a, w, bias, residual = (names[name].double() for name in ("a", "w", "bias", "residual"))
    assert relative_error(names["c"], residual + torch.nn.functional.gelu(a @ w.T + bias)) < 5e-3
    assert relative_error(names["o"], attention_torch(names["q"], names["k"], names["v"], causal=True)[0]) < 8e-3


def check_quick_start(names):
    assert relative_error(names["c"], names["a"].double() @ names["b"].double()) < 5e-3
    assert relative_error(names["simulated"], names["a"].cpu().double() @ names["b"].cpu().double()) < 5e-3
    x = names["x"].double()
    assert relative_error(names["y"], x - x.mean(1, keepdim=True)) < 1e-6


def check_tiles(names):
    assert relative_error(names["s"], names["q"].double() @ names["k"].double().T) < 1e-6
    tile = tk.st(tk.bf16, 64, 128)
    scores = names["scores_kernel"].compile(
        tk.gl(meta(128, 128), tile), tk.gl(meta(128, 128), tile), tk.gl(meta(128, 128, dtype=torch.float32)), tile
    )
    assert scores.asm["ptx"].count("wgmma.mma_async") == 8


def check_pipelines(names):
    x = names["x"].double()
    assert relative_error(names["y"], x.view(128, 8, 64).sum(1)) < 1e-6


def check_templates(names):
    sums = names["RowSums"]().compile(meta(128, 256), meta(128, 16, dtype=torch.float32))
    assert "cp.async.bulk.tensor" in sums.asm["ptx"]
    assert relative_error(names["y"], names["x"].double().sum(1, keepdim=True).expand(-1, 16)) < 1e-5


def check_simulator(names):
    assert np.array_equal(names["y"], names["x"] * np.float32(3))
    assert relative_error(names["c"], names["a"].double() @ names["b"].double()) < 5e-3
    assert names["shares"]


def check_kernels(names):
    x, w, bias, x0, g, q, k, v = (names[name] for name in ("x", "w", "bias", "x0", "g", "q", "k", "v"))
    assert (
        relative_error(
            names["c"], x0.double() + g.double() * torch.nn.functional.gelu(x.double() @ w.double().T + bias.double())
        )
        < 5e-3
    )
    assert names["o"].isfinite().all() and names["lse"].shape == (1, 4, 70)
    expected, _ = attention_torch(q[:, :, -1:], k[:, :, :75], v[:, :, :75])
    assert relative_error(names["o1"], expected) < 8e-3 and torch.equal(names["o1"], names["o2"])
    assert names["tokens_out"].shape == (70, 4, 64) and names["tokens_out"].isfinite().all()


def check_models(names):
    expected = torch.nn.functional.scaled_dot_product_attention(*[names["q"].double()] * 3, is_causal=True)
    assert relative_error(names["attended"], expected) < 8e-3
    assert relative_error(names["y"], names["y_of_one"]) < 8e-3
    if "register_transformers" in names:
        assert relative_error(names["logits"], names["logits_by_sdpa"]) < 2e-2


def check_warm(names):
    assert names["warmed"].kernels == 2 and names["warmed"].gpu == "NVIDIA H200"


CHECKS = {
    "README.md": check_readme,
    "docs/quick_start.md": check_quick_start,
    "docs/concepts/tiles.md": check_tiles,
    "docs/concepts/pipelines.md": check_pipelines,
    "docs/concepts/templates.md": check_templates,
    "docs/simulator.md": check_simulator,
    "docs/kernels.md": check_kernels,
    "docs/models.md": check_models,
    "docs/warm.md": check_warm,
}


@pytest.mark.parametrize("name", pages_with_blocks())
def test_the_blocks_of_a_page_run(name, rng, tmp_path):
    # on a GPU, or simulated; other pages compile, or have the simulator in their blocks
    uses_device = "device=device" in PAGES[name]
    with sim.device() if uses_device and DEVICE == "cpu" else contextlib.nullcontext():
        names = run_page(name, tmp_path)
    CHECKS.get(name, lambda names: None)(names)


def test_functions_are_in_the_modules_that_are_named():
    """In the table of docs/kernels.md, which has all modules."""
    table = PAGES["docs/kernels.md"].split("| function | module |")[1].split("\n\n")[0]
    found = set()
    for functions, module in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(\w+)` \|", table, re.MULTILINE):
        found.add(module)
        for name in re.findall(r"\w+", functions):
            assert hasattr(importlib.import_module(f"tritonkittens.kernels.{module}"), name), name
    assert found == {path.parent.name for path in ROOT.glob("kernels/*/__init__.py")}


def test_pages_with_checks_have_blocks():
    assert set(CHECKS) <= set(pages_with_blocks())


def test_the_check_command(tmp_path):
    (command,) = re.findall(
        r"^python -m (tritonkittens check [^#\n]*--timeline [^#\n]*)", PAGES["docs/simulator.md"], re.MULTILINE
    )
    (softmax,) = [
        found for found in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "def softmax_kernel" in found
    ]
    example = "def example_softmax():\n    return (1,), (torch.randn(16, 64), torch.empty(16, 64), 16, 64)\n"
    definitions = softmax[: softmax.index("\nx, y = ")]
    (tmp_path / "my_kernels.py").write_text(definitions + "\nsoftmax = softmax_kernel\n\n" + example)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "50 schedules, no finding" in done.stdout, done.stdout + done.stderr
    assert "modelled" in (tmp_path / "softmax.svg").read_text()


def test_the_error_that_is_quoted():
    quoted = re.search(r"`(st\(bf16, 64, 24\).*?)`", README)[1]
    with pytest.raises(tk.TileError, match=re.escape(quoted)):
        tk.st(tk.bf16, 64, 24)


def test_the_errors_that_the_quick_start_quotes():
    other_gpu, no_gpu = re.findall(r"```text\n(.*?)\n```", PAGES["docs/quick_start.md"], re.DOTALL)
    with sim.device("sm_80"), pytest.raises(tk.ArchitectureError, match=re.escape(other_gpu.replace("\n", " "))):
        attention(*torch.zeros(3, 1, 2, 64, 64, dtype=torch.bfloat16))
    with (
        sim.device("sm_80"),
        pytest.raises(tk.ArchitectureError, match=r"Gemm \(TMA, warp roles\) needs sm_90a .*sm_80"),
    ):
        gemm(*torch.zeros(2, 64, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=re.escape(no_gpu)):
        gemm(*torch.zeros(2, 64, 64, dtype=torch.bfloat16))


def test_the_inspect_commands():
    commands = re.findall(r"^python -m (tritonkittens inspect[^#\n]*)", PAGES["docs/inspector.md"], re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", *command.split()], cwd=ROOT, env=ASCII, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "gemm" in done.stdout or "_template_kernel" in done.stdout


def test_the_tuned_commands():
    commands = re.findall(r"^python -m (tritonkittens tuned[^#\n]*)", PAGES["docs/inspector.md"], re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 and "NVIDIA H200" in done.stdout, done.stderr


def test_the_example_and_the_demo_end_well():
    for command in (["examples/attention_pipeline.py"], ["-m", "tritonkittens", "demo"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=ASCII if "demo" in command else None,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr


def test_the_tables_are_those_of_the_results():
    assert figures.overview(suites=figures.README) in README
    assert figures.overview() in PAGES["docs/performance.md"] and figures.table() in PAGES["docs/performance.md"]
    assert figures.ladder() in PAGES["docs/tutorials.md"]


def lanes_of(svg):
    """The names of a timeline's lanes."""
    return re.findall(r'text-anchor="end"[^>]*>([^<]+)</text>', svg)


def test_the_figures_are_those_that_the_library_draws(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("docs_figures", ROOT / "docs" / "figures.py")
    drawing = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, drawing)
    spec.loader.exec_module(drawing)
    committed = {name: (drawing.FOLDER / f"{name}.svg").read_text() for name in drawing.FIGURES}
    monkeypatch.setattr(drawing, "FOLDER", tmp_path)
    drawn = {name: draw() for name, draw in drawing.FIGURES.items()}
    # modelled times change with the kernel and with the model: of the timeline only the lanes are compared
    assert lanes_of(drawn.pop("pipeline")) == lanes_of(committed.pop("pipeline")) != []
    assert drawn == committed, "python docs/figures.py draws them again"


def test_notes_and_files_that_are_cited_exist():
    sources = [
        path
        for folder in ("kernels", "tritonkittens", "bench", "tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    cited = {
        name
        for text in [*(path.read_text() for path in sources), *PAGES.values()]
        for name in re.findall(r"docs/notes/\w+\.md|bench/\w+\.json", text)
    }
    cited |= set(re.findall(r"\]\(([\w/]+(?:\.\w+)?)\)", README))
    assert len(cited) > 5 and all((ROOT / name).exists() for name in cited), cited


def test_the_glossary_is_in_order():
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", PAGES["docs/project/glossary.md"], re.MULTILINE)
    assert len(terms) > 50 and terms == sorted(terms, key=str.lower)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_makefile_has_the_targets_that_are_named():
    targets = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", TEXT, re.MULTILINE))
    targets = {one or other for one, other in targets}
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)), targets
