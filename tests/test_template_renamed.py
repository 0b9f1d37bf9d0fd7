"""What templates, layouts, configurations and `tk` say of a name that they no longer have. No GPU needed."""

import dataclasses
import pathlib
import re

import pytest
import triton

import tritonkittens.lang as tk
from tests.streaming import CountedStream, Prefix
from tests.util import refused
from tritonkittens.kernels.attention import config as attention
from tritonkittens.kernels.gemm import config as gemm
from tritonkittens.lang.template.extensions import EXTENSIONS
from tritonkittens.lang.template.hook_table import hooks_of
from tritonkittens.lang.template.renamed import RENAMED

tile = tk.st(tk.bf16, 64, 64)
KNOWN = {
    "hook": {*hooks_of(False, EXTENSIONS), *hooks_of(True)},
    "knob": {*CountedStream()._knobs()},
    "field": {field.name for field in dataclasses.fields(tk.layout)},
    "function": {f"tk.{name}" for name in tk.__all__},
    "configuration": {field.name for config in (gemm.Config, attention.Config) for field in dataclasses.fields(config)},
}


@triton.jit
def _hook(ctx):
    pass


@pytest.mark.parametrize("name", RENAMED["hook"])
def test_an_old_hook_is_refused_with_what_to_write_instead(name):
    for base in (CountedStream, Prefix):
        with refused(f"Old: hook {name!r} {RENAMED['hook'][name]}"):
            type("Old", (base,), {name: _hook})()


@pytest.mark.parametrize("name", RENAMED["knob"])
def test_an_old_knob_is_refused_with_what_to_write_instead(name):
    with refused(f"CountedStream: knob {name!r} {RENAMED['knob'][name]}"):
        CountedStream(**{name: 1})
    with refused(f"Old: knob {name!r} {RENAMED['knob'][name]}"):
        type("Old", (CountedStream,), {name: 1})()


@pytest.mark.parametrize("name", RENAMED["field"])
def test_an_old_field_is_refused_with_what_to_write_instead(name):
    with refused(f"layout: field {name!r} {RENAMED['field'][name]}"):
        tk.layout(globals=dict(X=tile), input=dict(X=tile), **{name: dict(X=tile)})
    with refused(f"layout: field {name!r} {RENAMED['field'][name]}"):
        dataclasses.replace(tk.layout(globals=dict(X=tile), input=dict(X=tile)), **{name: dict(X=tile)})


@pytest.mark.parametrize("name", RENAMED["function"])
def test_an_old_function_is_refused_with_what_to_write_instead(name):
    with refused(f"tritonkittens.lang: function {name!r} {RENAMED['function'][name]}"):
        getattr(tk, name.removeprefix("tk."))


@pytest.mark.parametrize("config", [gemm.Config, attention.Config], ids=lambda config: config.__module__.split(".")[-2])
@pytest.mark.parametrize("name", RENAMED["configuration"])
def test_an_old_field_of_a_configuration_is_refused_with_what_to_write_instead(config, name):
    with refused(f"Config: configuration {name!r} {RENAMED['configuration'][name]}"):
        config(**{name: 1})
    with refused(f"Config: configuration {name!r} {RENAMED['configuration'][name]}"):
        dataclasses.replace(config(), **{name: 1})


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in RENAMED.items() for name in names])
def test_what_to_write_instead_exists(kind, name):
    """Every name in quotes, or of `tk`, that an error names."""
    rest, known = RENAMED[kind][name], KNOWN[kind]
    for new in re.findall(r"^is now '(\w+)'", rest):
        assert new in known
    assert all(hasattr(tk, new) for new in re.findall(r"\btk\.(\w+)", rest))


@pytest.mark.parametrize("call", [lambda: gemm.Config(tile=1), lambda: attention.Config(tile=1)])
def test_other_names_are_refused_as_by_any_function(call):
    with pytest.raises(TypeError, match="unexpected keyword argument 'tile'"):
        call()


def test_other_names_of_the_language_are_missing_as_in_any_module():
    with pytest.raises(AttributeError, match="module 'tritonkittens.lang' has no attribute 'my_trun'"):
        tk.my_trun  # noqa: B018
    assert not hasattr(tk, "__wrapped__") and getattr(tk, "other", None) is None


def test_an_old_name_is_no_longer_used():
    for kind, names in RENAMED.items():
        assert not KNOWN[kind] & {*names}, kind


def test_old_names_are_in_the_changelog():
    changelog = (pathlib.Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    words = {word.removeprefix("tk.") for word in re.findall(r"`([\w.]+)`", changelog)}
    assert {name.removeprefix("tk.") for names in RENAMED.values() for name in names} <= words
