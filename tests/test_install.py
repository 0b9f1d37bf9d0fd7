"""`tritonkittens.kernels` is the top-level kernels/ folder however the library is reached."""

import pathlib
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
    """A wheel holds every Python and data file of tritonkittens/ and kernels/, under tritonkittens/, and nothing else."""
    pytest.importorskip("setuptools")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    copy = tmp_path / "source"  # setuptools writes build/ and *.egg-info beside the sources
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "tritonkittens", "kernels"):
        subprocess.run(["cp", "-a", str(ROOT / name), str(copy)], check=True)
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    suffixes = {".py", ".ll", ".c", ".json"}
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "tritonkittens").rglob("*") if p.suffix in suffixes}
    kernels = {f"tritonkittens/{p.relative_to(ROOT)}" for p in (ROOT / "kernels").rglob("*") if p.suffix in suffixes}
    assert held == package | kernels
