"""The library's layout: what decides the compile cache's key, and what `tk` shows. The order of the folders is
import-linter's (`make lint`)."""

import inspect
import pathlib
import types

import pytest

import tritonkittens.lang as tk
from tritonkittens.lang.core.backend import key_sources

PACKAGE = pathlib.Path(tk.__file__).parents[1]


def test_the_key_of_compiled_kernels_covers_every_folder_of_the_language():
    found = {str(path.relative_to(PACKAGE)) for path in key_sources(PACKAGE)}
    for needed in (
        "arch.py",
        "lang/kernel.py",
        "lang/core/backend.py",
        "lang/memory/tma.py",
        "lang/template/kernel.py",
        "inline_ptx/wgmma/instructions.py",
    ):
        assert needed in found
    assert found >= {
        str(path.relative_to(PACKAGE)) for folder in ("lang", "inline_ptx") for path in (PACKAGE / folder).rglob("*.py")
    }


def test_tk_shows_its_vocabulary_and_no_modules():
    shown = {
        name
        for name, value in vars(tk).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert set(tk.__all__) == shown == set(dir(tk)) and len(tk.__all__) == len(set(tk.__all__))


@pytest.mark.parametrize("name", ["sync", "print", "max"])
def test_a_name_that_is_also_a_folder_or_a_builtin_is_the_operation(name):
    assert inspect.isfunction(getattr(tk, name))
