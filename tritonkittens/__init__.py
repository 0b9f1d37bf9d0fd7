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


def __getattr__(name: str) -> Any:
    """`warm`, whose module imports torch."""
    if name != "warm":
        raise AttributeError(f"module 'tritonkittens' has no attribute {name!r}")
    return importlib.import_module("tritonkittens.warming").warm
