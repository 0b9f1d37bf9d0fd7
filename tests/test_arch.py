"""Architectures have one set of names, wherever one is taken, and one refusal of others."""

import argparse
import ast
from pathlib import Path

import pytest
import torch
import triton

import tritonkittens
import tritonkittens.lang as tk
from tests.util import meta, refused
from tritonkittens import sim
from tritonkittens.__main__ import main
from tritonkittens.arch import ARCHITECTURES, capability_of, chip_of, require_feature
from tritonkittens.inline_ptx._asm import issued
from tritonkittens.inline_ptx.mbarrier import probe
from tritonkittens.inspect import cli as inspector
from tritonkittens.testing import has_gpu


class Copy(tk.lcf):
    consumers = 1

    def layout(self):
        tile = tk.st(tk.bf16, 64, 64)
        return tk.layout(globals=dict(X=tile, Y=None), input=dict(X=tile))

    @triton.jit
    def setup(ctx):
        return tk.task(1, when=ctx.task_id < 1)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (0, 0), input.full)

    @triton.jit
    def compute(ctx, state, input):
        tk.store(ctx.globals.Y, tk.load(input.X), (0, 0))
        return state

    @triton.jit
    def finish(ctx, state, staging):
        pass


@tk.kernel
@triton.jit
def widest(X, Y):
    tk.store(Y, tk.row_max(tk.load(X, tk.rt(tk.bf16, 64, 64), (0, 0))), 0)


def compiled(arch):
    return widest.compile(tk.gl(meta(64, 64)), tk.gl(torch.empty(64, device="meta")), arch=arch)


def simulated(arch):
    x, y = torch.randn(64, 64).bfloat16(), torch.full((64,), float("nan"))
    sim.run(widest, (1,), tk.gl(x).plain(), tk.gl(y).plain(), arch=arch)
    assert torch.equal(y, x.float().amax(1))


TAKERS = {
    "compile": compiled,
    "explain": lambda arch: Copy().explain(arch=arch),
    "sim.run": simulated,
    "sim.device": lambda arch: sim.device(arch).__enter__(),
    "sim.explore": lambda arch: sim.explore(lambda: None, arch=arch),
    "has_gpu": has_gpu,
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_name_is_taken_everywhere(arch, capsys):
    number = ARCHITECTURES[arch]
    assert capability_of(arch) == capability_of(number) == number
    assert compiled(arch).metadata.target.arch == compiled(number).metadata.target.arch == number
    assert Copy().explain(arch=arch) == Copy().explain(arch=number) and f"on sm_{number}\n" in Copy().explain(arch=arch)
    for given in (arch, number):
        simulated(given)
        with sim.device(given) as device:
            assert device.capability == number and device.facts.capability == divmod(number, 10)
    asked = []
    arguments = argparse.Namespace(arch=arch, kernel="it", json=False)
    assert inspector.run(arguments, {"it": lambda name: asked.append(name) or compiled(name)}) == 0
    assert asked == [arch] and f"for sm_{number}" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["sm_90", "sm_77", "hopper", "", 91, None, True])
@pytest.mark.parametrize("taker", TAKERS)
def test_others_are_refused_alike(taker, arch):
    with pytest.raises(tk.ArchitectureError) as caught:
        TAKERS[taker](arch)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == f"arch={arch!r}: must be one of sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a"


def compared_capabilities(path):
    """Lines that compare a capability (`sm`, `arch`, `capability`, or an attribute of that name) with a number."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            names = {getattr(side, "id", getattr(side, "attr", None)) for side in sides}
            numbers = [n.value for n in sides if isinstance(n, ast.Constant) and type(n.value) is int]
            if names & {"sm", "arch", "capability", "cc"} and any(number >= 70 for number in numbers):
                yield f"{path}:{node.lineno}"


def test_only_the_table_of_chips_compares_capabilities():
    package = Path(tritonkittens.__file__).parent
    found = {path: list(compared_capabilities(path)) for path in sorted(package.rglob("*.py"))}
    table = found.pop(package / "arch.py")
    assert table and not [line for lines in found.values() for line in lines]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 110, 120, 121])
def test_what_every_newer_chip_has_also_unlisted_ones_have(capability):
    chip = chip_of(capability)
    assert (chip.e4m3, chip.clusters) == (capability >= 89, capability >= 90)
    assert ("elect.sync" in issued("a;", "warp", capability)) == chip.clusters
    assert ("try_wait" in probe("try_wait", "cta", capability)) == chip.clusters


def test_a_feature_is_refused_where_the_chip_lacks_it():
    require_feature("It", "tma", 90)
    for capability in (80, 110, 120):
        with refused(
            "It needs sm_90a (Hopper), sm_100a or sm_103a (Blackwell data centre); this kernel is compiled for "
            f"sm_{capability}",
            tk.ArchitectureError,
        ):
            require_feature("It", "tma", capability)


def test_commands_refuse_what_a_kernel_does_not_run_on(tmp_path, capsys):
    example = (
        "from tests.test_arch import Copy\n\n\ndef example_Copy():\n    return None, [torch.zeros(64, "
        "64).bfloat16()] * 2\n"
    )
    (tmp_path / "a_copy.py").write_text(f"import torch\n{example}")
    for arch, message in (
        ("sm_120a", "Copy for sm_120a: Copy (TMA, warp roles) needs sm_90a"),
        ("sm_90", "--arch='sm_90': must be one of sm_80"),
    ):
        assert main(["check", f"{tmp_path}/a_copy.py:Copy", "--arch", arch]) == 2
        assert message in capsys.readouterr().err
