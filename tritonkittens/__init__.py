"""ThunderKittens' tile abstractions on Triton.

`import tritonkittens.lang as tk` to write kernels, `tritonkittens.kernels` for finished ones, `tritonkittens.inspect`
for the compiler's results.
"""

from tritonkittens import _at_exit  # noqa: F401  # registers itself

__version__ = "0.1.0"
