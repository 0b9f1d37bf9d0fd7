"""Sphinx configuration: `make docs` builds the site into docs/_build/html."""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

import tritonkittens  # noqa: E402  # found by the path above

project = "tritonkittens"
author = "the tritonkittens authors"
copyright = "the tritonkittens authors, MIT licence"
release = version = tritonkittens.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings", "reference"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "tritonkittens"
html_static_path = ["_static"]
html_css_files = ["wide.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = [
    "myst.header",  # an included page may start below its first heading
    "ref.python",  # classes of several packages have the same name in annotations
]

add_module_names = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"
pygments_style = "default"


def _link_pages(app: Any, docname: str, source: list[str]) -> None:
    """Links to root files that a page includes lead to that page. In the repository they lead to the files."""
    source[0] = re.sub(
        r"\]\((?:\.\./)+(CHANGELOG|CONTRIBUTING)\.md", lambda found: f"](/project/{found[1].lower()}.md", source[0]
    )


def _trim_code(app: Any, doctree: nodes.document) -> None:
    """Included parts of programs begin and end without blank lines."""
    for block in doctree.findall(nodes.literal_block):
        block.rawsource = block.astext().strip("\n")
        block[:] = [nodes.Text(block.rawsource)]


def setup(app: Any) -> None:
    app.connect("source-read", _link_pages)
    app.connect("doctree-read", _trim_code)
