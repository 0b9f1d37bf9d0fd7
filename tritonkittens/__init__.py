"""ThunderKittens' tile abstractions on Triton.

`import tritonkittens.lang as tk` to write kernels, `tritonkittens.kernels` for finished ones, `tritonkittens.inspect`
for the compiler's results, `tritonkittens.warm` to compile ahead of the first call.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tritonkittens import _at_exit  # noqa: F401  # registers itself

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tritonkittens.warming import warm as warm

MODULES = ("inspect", "kernels", "lang", "nn", "ops", "sim", "testing", "tune")  # imported as soon as they are used


def __getattr__(name: str) -> Any:
    if name == "warm":
        return importlib.import_module("tritonkittens.warming").warm
    if name in MODULES:
        return importlib.import_module(f"tritonkittens.{name}")
    raise AttributeError(f"module 'tritonkittens' has no attribute {name!r}")
