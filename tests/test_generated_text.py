"""Parts of the pages of docs are generated, so that a page reads the same in the repository and on the site.

A page has them between `<!-- generated: NAME -->` and `<!-- end -->`. `python -m tests.test_generated_text` writes
them again.
"""

import inspect
import pathlib
import re

import pytest

import tritonkittens.lang as tk
from tests import test_knob_pairs
from tritonkittens import sim
from tritonkittens.lang.schedule.tile_scheduler import RESERVED
from tritonkittens.lang.template.extensions import EXTENSIONS
from tritonkittens.lang.template.hook_table import HOOKS, STORE, Hook, signature

ROOT = pathlib.Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- generated: (.+?) -->\n).*?(\n<!-- end -->)", re.DOTALL)
PROGRAM = re.compile(r"(examples/\w+\.py), (after|from) (.+) to (.+)")


def hook_rows(hooks: tuple[Hook, ...]) -> list[str]:
    rows = ["| hook | called by, how often | does |", "|---|---|---|"]
    for hook in hooks:
        returns = f" → {hook.returns}" if hook.returns else ""
        need = (
            " Required." if hook.required else f" Required where the layout has `{hook.layout}`." if hook.layout else ""
        )
        rows.append(f"| `{signature(hook)}`{returns} | {hook.role}, {hook.when} | {hook.text}{need} |")
    return rows


def extension_text() -> list[str]:
    out = []
    for extension in EXTENSIONS:
        description, _ = inspect.getdoc(extension).split("\n\nHooks:\n\n")
        paragraphs = [" ".join(paragraph.split()) for paragraph in description.split("\n\n")]
        lines = [line for paragraph in paragraphs for line in (paragraph, "")]
        out += [f"### tk.{extension.__name__}", "", *lines, *hook_rows(extension.added_hooks), ""]
    return out[:-1]


def field_rows() -> list[str]:
    arguments = inspect.getdoc(tk.layout).split("Args:\n")[1].split("\n\nRaises:")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", arguments, re.MULTILINE)
    rows = (f"| `{name}` | {ONE_FOR.get(name, '')} | {' '.join(text.split())} |" for name, text in found)
    return ["| field | one for each | meaning |", "|---|---|---|", *rows]


def knob_rows() -> list[str]:
    knobs = re.findall(r"^- (`\w+`(?:, `\w+`)*) \((.+?)\): (.*(?:\n  .*)*)$", inspect.getdoc(tk.lcf), re.MULTILINE)
    rows = (f"| {name} | {default} | {' '.join(text.split())} |" for name, default, text in knobs)
    return ["| knob | default | meaning |", "|---|---|---|", *rows]


def finding_rows() -> list[str]:
    return ["| kind | meaning |", "|---|---|", *(f"| `{kind}` | {meaning} |" for kind, meaning in sim.KINDS.items())]


def reserved_names() -> list[str]:
    names = ", ".join(f"`{name}`" for name in sorted(RESERVED))
    return [f"These names are reserved: {names}. `tk.task` refuses a coordinate of such a name."]


ONE_FOR = {
    "input": "stage of the CTA",
    "lagged": "stage of the CTA",
    "task": 'consumer, or CTA with `per="block"`',
    "late_task": "CTA",
    "scratch": "consumer",
    "exchange": "CTA",
    "epilogue": "consumer",
    "output": "output stage of the CTA",
    "accumulators": "consumer",
    "merged": "consumer",
    "deferred_results": "consumer",
}


TEXTS = {
    "hooks": lambda: hook_rows(HOOKS),
    "store": lambda: hook_rows((STORE,)),
    "extensions": extension_text,
    "reserved names": reserved_names,
    "fields": field_rows,
    "knobs": knob_rows,
    "refused pairs": test_knob_pairs.table,
    "findings": finding_rows,
}


def program_part(path: str, how: str, first: str, last: str) -> list[str]:
    """The lines of a program from the one that begins with `first` (or after it) to the one that begins with `last`."""
    lines = (ROOT / path).read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(first)) + (how == "after")
    end = next(i for i, line in enumerate(lines) if i > begin and line.startswith(last))
    return ["```py", *"\n".join(lines[begin:end]).strip("\n").split("\n"), "```"]


def generated(name: str) -> str:
    found = PROGRAM.fullmatch(name)
    return "\n".join(program_part(*found.groups()) if found else TEXTS[name]())


def written(page: str) -> str:
    """A page with its generated parts made again."""
    return MARKED.sub(lambda found: found[1] + "\n" + generated(found[2]) + "\n" + found[3], page)


def pages() -> list[pathlib.Path]:
    return [path for path in sorted((ROOT / "docs").rglob("*.md")) if "<!-- generated: " in path.read_text()]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_parts_of_a_page_are_up_to_date(path):
    assert path.read_text() == written(path.read_text()), "python -m tests.test_generated_text writes them again"


def test_every_generated_text_is_on_a_page():
    names = [found[2] for path in pages() for found in MARKED.finditer(path.read_text())]
    assert set(TEXTS) <= set(names) and len(set(names)) == len(names)


def test_the_hook_reference_has_all_hooks_fields_and_knobs():
    page = (ROOT / "docs" / "hooks.md").read_text()
    hooks = [*HOOKS, STORE, *(hook for extension in EXTENSIONS for hook in extension.added_hooks)]
    assert all(f"| `{hook.name}(" in page and hook.text in page for hook in hooks)
    assert all(f"| `{name}` |" in page for name in tk.layout.__dataclass_fields__)
    knobs = [name for name in tk.lcf.__annotations__ if not name.startswith("_")]
    assert knobs and all(f"`{name}`" in "".join(knob_rows()) for name in knobs)


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text()))
