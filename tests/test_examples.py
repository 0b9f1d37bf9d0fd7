"""The programs of `examples/` in the simulator: right against float64 on operands of random extents, and as short as
they say."""

import ast
import importlib
import pathlib
import re
import runpy

import pytest
import torch

import tritonkittens.lang as tk
from examples.attention import Attention, attention, attention_torch
from examples.gemm import Gemm
from tests.cases_examples import BLACKWELL_EXAMPLES, EXAMPLES, SUMMED, heads
from tests.util import meta, poison, refused, relative_error, slow
from tritonkittens.inspect import inspect
from tritonkittens.tune.timing import Burst

FOLDER = pathlib.Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(path.name for path in FOLDER.glob("[a-z]*.py"))


@pytest.fixture
def poisoned_outputs(monkeypatch):
    """Memory that a function asks for is filled with NaN."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, make=make, **options: poison(make(*args, **options)))


@pytest.mark.simulated(always=True)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_agrees_with_its_reference(name, rng, kernel_device, poisoned_outputs):
    function, reference, operands, bound = EXAMPLES[name]
    given = operands(rng, 1)
    print(*(tuple(x.shape) for x in given))
    assert relative_error(function(*given), reference(*given)) <= bound


@pytest.mark.simulated(arch="sm_100a", always=True)
@pytest.mark.parametrize("name", BLACKWELL_EXAMPLES)
def test_an_example_agrees_with_its_reference_on_blackwell(name, rng, kernel_device, poisoned_outputs):
    function, reference, operands, bound = BLACKWELL_EXAMPLES[name]
    given = operands(rng, 1)
    assert relative_error(function(*given), reference(*given)) <= bound


@pytest.mark.simulated(always=True)
@pytest.mark.parametrize("name", ["row_sums", "gemm", "grouped_gemm"])
def test_an_example_agrees_with_its_reference_where_consumers_take_a_task_each(
    name, rng, kernel_device, poisoned_outputs
):
    function, reference, operands, bound = EXAMPLES[name]
    given = operands(rng, 2)
    assert relative_error(function(*given, pingpong=True), reference(*given)) <= bound


@pytest.mark.simulated(always=True)
@pytest.mark.parametrize("consumers", [1, 2])
def test_attention_masks_whatever_the_number_of_consumers(rng, kernel_device, consumers):
    q, k, v = heads(rng, 1)
    out = attention(q, k, v, causal=True, consumers=consumers)
    assert relative_error(out, attention_torch(q, k, v, causal=True)) < SUMMED


def test_attention_refuses_a_diagonal_of_several_blocks():
    with refused("Attention(causal=True, tile_n=128): must be a multiple of 192 queries a task"):
        Attention(causal=True, consumers=3)


def test_attention_refuses_a_causal_mask_of_unequal_lengths():
    q, k = meta(1, 2, 70, 64), meta(1, 2, 80, 64)
    with refused("attention(causal=True): 70 queries, 80 keys; must be equally many", ValueError):
        attention(q, k, k, causal=True)


CAUSAL = dict(causal=True, order=tk.LongestFirst(2), schedule=tk.Dynamic())


@pytest.mark.parametrize("template, tensors, numbers", [
    (Gemm(), (meta(4096, 4096),) * 3, {}),
    (Attention(order=tk.ColumnMajor()), (meta(4, 16, 4096, 128),) * 4, dict(scale=0.1)),
    slow(Attention(**CAUSAL), (meta(4, 16, 4096, 128),) * 4, dict(scale=0.1)),
], ids=["gemm", "attention", "attention causal"])  # fmt: skip
def test_machine_code_keeps_products_in_flight_and_spills_nothing(template, tensors, numbers):
    report = inspect(template.compile(*tensors, **numbers))
    assert report.mma["HGMMA"] > 0 and report.wgmma_serialized is False and not report.remarks
    assert report.spill_instructions == report.spill_store_bytes == 0 and report.reallocated
    assert len(report.loops) == template.consumers, "one main loop a consumer"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(program, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / program), run_name="__main__")
    assert "relative error" in capsys.readouterr().out


def test_a_program_prints_what_it_reaches_on_a_gpu(monkeypatch, capsys):
    """Calls take turns, in one order and in the reverse one. Those of ours take a millisecond, those of the peer
    two."""
    monkeypatch.syspath_prepend(str(FOLDER))
    run = importlib.import_module("_run")
    x, took = torch.randn(3, 4), []

    def fake_burst(call, calls, flush, lead=0):
        took.append(1.0 if torch.equal(call(), x) else 2.0)
        return Burst([took[-1]] * calls, 0.1, 1.0)

    monkeypatch.setattr(run, "has_gpu", lambda: True)
    monkeypatch.setattr(run, "flush_buffer", lambda device: torch.zeros(1))
    monkeypatch.setattr(run, "burst", fake_burst)
    monkeypatch.setattr(run.tune.Device, "of", lambda device: run.tune.Device.named("H200"))
    run.show("copy", torch.clone, torch.Tensor.double, [x], peers={"peer": torch.neg}, nbytes=2.4e9)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "copy: relative error 0.0e+00"
    assert second.split() == "peer 2000.0 µs 1.20 TB/s, 25% of the peak".split()
    assert third.split() == "tritonkittens 1000.0 µs 2.40 TB/s, 50% of the peak".split()
    assert took[-4:] == [2.0, 1.0, 1.0, 2.0]


def lines_of_code(function: ast.FunctionDef, source: list[str]) -> int:
    """Lines of a function, with its decorator and signature, that are not blank, a comment or a docstring."""
    documented = range(function.body[0].lineno, function.body[0].end_lineno + 1) if ast.get_docstring(function) else ()
    numbers = range(function.decorator_list[0].lineno, function.end_lineno + 1)
    return sum(bool(source[n - 1].split("#")[0].strip()) for n in numbers if n not in documented)


def device_code(program: str) -> dict[str, int]:
    """Lines of code of each kernel, function of the device and hook of a program."""
    source = (FOLDER / program).read_text()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return {function.name: lines_of_code(function, source.splitlines()) for function in found}


@pytest.mark.parametrize("program, most", [("gemm.py", 40), ("attention.py", 80)])
def test_hooks_are_few_lines(program, most):
    hooks = device_code(program)
    print(sum(hooks.values()), hooks)
    assert {"setup", "load", "compute", "finish"} <= set(hooks) and sum(hooks.values()) <= most


def test_the_table_of_the_tutorials_has_every_program_and_its_lines():
    page = (FOLDER.parent / "docs" / "tutorials.md").read_text()
    rows = re.findall(r"^\| (?:\d\. )?`(\w+\.py)` .*\| (\d+) \|$", page, re.MULTILINE)
    assert {name: int(lines) for name, lines in rows} == {name: sum(device_code(name).values()) for name in PROGRAMS}
    assert all(f"<!-- generated: examples/{name}, " in page for name in PROGRAMS)


def test_lines_of_code_leave_out_comments_and_docstrings():
    source = '@jit\ndef f(x):\n    """Two\n    lines."""\n\n    # why\n    return g(\n        x\n    )  # what\n'
    assert lines_of_code(ast.parse(source).body[0], source.splitlines()) == 5
