"""`bench.same_code` on a repository of its own, whose kernels are small."""

import json
import subprocess

import pytest

from bench import machine_code, same_code

ARCH = "sm_90a"
KERNELS = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
{lines}
@triton.jit
def {helper}(x):
    return x * {factor}

@triton.jit
def {name}(X, Y, n):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(Y + i, {helper}(tl.load(X + i, mask=i < n)), mask=i < n)

def compiled(arch):
    signature = dict(X="*fp32", Y="*fp32", n="i32")
    return triton.compile(ASTSource({name}, signature, {{}}), target=GPUTarget("cuda", 90, 32),
                          options=dict(num_warps={warps}))

def refused(arch):
    raise ValueError("this kernel uses wgmma")

kernels = dict(scale=compiled, old=refused{more})
"""
REGISTRY = (
    "def registry():\n    from tritonkittens.{module} import kernels\n    print('a line that is no answer')\n "
    "   return kernels\n"
)


def write(root, module="first", **changes):
    """The package with one kernel, under names and in a file of one's choice."""
    for old in (root / "tritonkittens").glob("*.py"):
        old.unlink()
    (root / "tritonkittens" / "inspect").mkdir(parents=True, exist_ok=True)
    (root / "tritonkittens" / "__init__.py").write_text("")
    (root / "tritonkittens" / "inspect" / "cli.py").write_text(REGISTRY.format(module=module))
    kinds = dict(lines="", helper="scaled", name="kernel", factor=3, warps=4, more="") | changes
    (root / "tritonkittens" / f"{module}.py").write_text(KERNELS.format(**kinds))


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with one commit."""
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "kept"))
    folder = tmp_path / "repository"
    write(folder)
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "One"],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def run(root, *options):
    return same_code.main(["HEAD", "--arch", ARCH, "--jobs", "1", *options], root)


def test_names_files_and_lines_do_not_count_and_instructions_do(root, capsys):
    write(root, module="second", lines="\n" * 30, helper="tripled", name="another")
    assert run(root) == 0
    assert capsys.readouterr().out == "same 1, differ 0, refused 1, only here 0, only there 0\n"
    write(root, factor=4, more=", new=refused")
    assert run(root, "--show", "scale") == 1
    said = capsys.readouterr().out
    assert f"{ARCH} scale: other instructions, {number(root)} as before\n" in said and said.endswith(
        "same 0, differ 1, refused 0, only here 0, only there 0\n"
    )
    assert "\n-    FMUL" in said and "\n+    FMUL" in said
    write(root, warps=8, more=", new=refused")
    (kept,) = (root.parent / "kept").rglob(f"scale.{ARCH}.json")
    assert 4 < json.loads(kept.read_text())["registers"] < 64
    assert run(root, "--only", "[ns]*") == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{ARCH} scale: ") and first.endswith("warps 4 → 8")
    assert others == ["only here: new", "same 0, differ 1, refused 0, only here 1, only there 0"]


def number(root):
    """Instructions of the kernel of the commit, as kept."""
    (kept,) = (root.parent / "kept").rglob(f"scale.{ARCH}.json")
    return str(json.loads(kept.read_text())["instructions"])


def test_a_commit_is_compiled_once_and_a_changed_tree_each_time(root, monkeypatch, capsys):
    assert run(root) == 0 and "same 1" in capsys.readouterr().out
    monkeypatch.setattr(same_code.Worker, "ask", lambda *_: pytest.fail("a process was started"))
    assert run(root) == 0 and "same 1" in capsys.readouterr().out
    for changes, is_kept in ({}, True), (dict(factor=5), False):
        write(root, **changes)
        with same_code.working_tree(root, 1) as here:
            assert (here.kept is not None) == (here.root != root) == is_kept


def test_a_revision_that_alone_refuses_or_has_a_kernel_differs():
    code = machine_code_of(1)
    both = same_code.compared(
        {("a", ARCH): code, ("b", ARCH): {"refused": "no"}},
        {("a", ARCH): {"refused": "E: bad"}, ("b", ARCH): {"refused": "other"}},
    )
    assert both.differing == {("a", ARCH): "compiles → E: bad"} and both.refused == 1 and both.is_failure(strict=False)
    apart = same_code.Comparison(same=1, only_there=["c"])
    assert not apart.is_failure(strict=False) and apart.is_failure(strict=True)
    assert same_code.difference(code, machine_code_of(2)) == "registers 1 → 2"
    assert same_code.difference(code, code | {"constants and attributes": "x"}) == "constants or attributes"


def machine_code_of(registers):
    return {
        "instructions": 8,
        "registers": registers,
        "shared": 0,
        "warps": 4,
        "tensor memory": 0,
        "code digest": "d",
        "constants and attributes": "c",
    }


def test_what_cannot_be_compared_is_refused(root, capsys):
    with pytest.raises(SystemExit, match="same_code: git rev-parse --verify nothing"):
        same_code.main(["nothing"], root)
    with pytest.raises(SystemExit, match=r"same_code: no kernel matches 'x\*'"):
        run(root, "--only", "x*")
    (root / "tritonkittens" / "first.py").write_text("raise OSError('no kernels today')")
    with pytest.raises(
        SystemExit, match=r"same_code: the kernels of .*/repository cannot be listed: OSError: no kernels today"
    ):
        run(root)
    with pytest.raises(SystemExit):
        run(root, "--jobs", "0")
    assert "--jobs 0: it takes at least one process" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a cubin begins with a 64-bit ELF header; these bytes begin with b'nothi'"):
        machine_code.sections(b"nothing")


def test_addresses_become_labels():
    text = "  /*0000*/  MOV R1, 0x20 ;\n  /*0010*/  @P0 BRA 0x20 ;\n  /*0020*/  EXIT ;\n  /*0030*/  BRA 0x30 ;\n"
    assert same_code.with_labels(text) == ["    MOV R1, 0x20", "    @P0 BRA L0", "L0:", "    EXIT", "L1:", "    BRA L1"]
