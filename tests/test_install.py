"""`tritonkittens.kernels` is the top-level kernels/ folder however the library is reached."""

import importlib.metadata as metadata
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def test_kernels_from_the_source_tree(tmp_path):
    """With only PYTHONPATH set, from another folder."""
    code = "import tritonkittens.kernels as k; print(k.__file__)"
    environment = {"PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True)
    assert pathlib.Path(printed.strip()).resolve() == ROOT / "kernels" / "__init__.py"


def test_kernels_in_a_wheel(tmp_path):
    """A wheel holds every Python and data file of tritonkittens/ and kernels/, under tritonkittens/, and nothing
    else."""
    pytest.importorskip("setuptools")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    copy = tmp_path / "source"  # setuptools writes build/ and *.egg-info beside the sources
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "tritonkittens", "kernels"):
        subprocess.run(["cp", "-a", str(ROOT / name), str(copy)], check=True)
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    suffixes = {".py", ".typed", ".ll", ".c", ".json"}
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "tritonkittens").rglob("*") if p.suffix in suffixes}
    kernels = {f"tritonkittens/{p.relative_to(ROOT)}" for p in (ROOT / "kernels").rglob("*") if p.suffix in suffixes}
    assert held == package | kernels


def printed_requirements(*distributions):
    return subprocess.check_output(
        [sys.executable, str(ROOT / "tools" / "requirements.py"), *distributions], text=True
    ).split("\n")[:-1]


def test_requirements_apart_from_torch_and_triton():
    """What is installed one by one is left out, and nothing else; extras are asked for by name."""
    try:
        declared = metadata.requires("tritonkittens")
    except metadata.PackageNotFoundError:
        pytest.skip("tritonkittens is on PYTHONPATH only")
    plain = printed_requirements("tritonkittens")
    assert plain == [line for line in declared if "extra ==" not in line and not line.startswith(("torch", "triton"))]
    with_tests = printed_requirements("tritonkittens[test]")
    assert with_tests[: len(plain)] == plain and "pytest" in with_tests and not any(";" in line for line in with_tests)
    of_torch = printed_requirements("torch", "tritonkittens[test]")
    assert any(line.startswith("sympy") for line in of_torch) and len(set(of_torch)) == len(of_torch)
    assert not any(line.split("=")[0].split(">")[0] in ("torch", "triton") for line in of_torch)


def test_one_torch_and_one_triton_are_named():
    """The Makefile, the README and pyproject.toml ask for the same ones."""
    makefile, readme, project = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "README.md", "pyproject.toml")
    )
    (torch,) = re.findall(r"^TORCH := (\S+)$", makefile, re.M)
    (triton,) = re.findall(r"^TRITON := '(\S+)'$", makefile, re.M)
    assert f'"{triton}"' in project and f"pip install --no-deps '{triton}'" in readme
    assert f"pip install torch=={torch} " in readme
