"""What templates say of a hook, a knob or a field that they no longer have. No GPU needed."""

import dataclasses
import pathlib

import pytest
import triton

import tritonkittens.lang as tk
from tests.streaming import CountedStream
from tests.util import refused
from tritonkittens.lang.template.renamed import RENAMED

tile = tk.st(tk.bf16, 64, 64)


@triton.jit
def _hook(ctx):
    pass


@pytest.mark.parametrize("name", RENAMED["hook"])
def test_an_old_hook_is_refused_with_what_to_write_instead(name):
    with refused(f"Old: hook {name!r} {RENAMED['hook'][name]}"):
        type("Old", (CountedStream,), {name: _hook})()


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


def test_a_layout_refuses_other_names_as_any_function_does():
    with pytest.raises(TypeError, match="unexpected keyword argument 'inputs'"):
        tk.layout(globals=dict(X=tile), inputs=dict(X=tile))


def test_old_names_are_in_the_changelog_and_no_longer_in_templates():
    changelog = (pathlib.Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    assert all(f"`{name}`" in changelog for names in RENAMED.values() for name in names)
    hooks = {*tk.lcsf._required, *tk.lcf._required, *tk.lcf._optional}
    assert not hooks & {*RENAMED["hook"]} and not {*vars(tk.lcf)} & {*RENAMED["knob"]}
    assert not {f.name for f in dataclasses.fields(tk.layout)} & {*RENAMED["field"]}
