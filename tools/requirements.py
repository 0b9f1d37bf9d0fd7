"""Prints what installed distributions need besides torch and triton, a line each, as `pip install -r` reads it:
`requirements.py torch 'tritonkittens[test]'`.

Every CUDA build of torch pins a triton of its own, so pip finds no versions for what needs both that torch and triton
3.9. Both are installed with `--no-deps`, and this prints the rest.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

APART = {"torch", "triton"}


def needed(distribution: str) -> Iterator[str]:
    """The requirements of a distribution with its extras, as `name[extra]`, that hold here."""
    asked = Requirement(distribution)
    for each in map(Requirement, requires(asked.name) or ()):
        if each.name not in APART and (
            each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *asked.extras))
        ):  # noqa: E501
            each.marker = None
            yield str(each)


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(line for distribution in sys.argv[1:] for line in needed(distribution))))
