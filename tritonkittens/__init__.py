"""ThunderKittens' tile abstractions on Triton.

`import tritonkittens.lang as tk` to write kernels, `tritonkittens.kernels` for finished ones,
`tritonkittens.inspect` to see what became of one.
"""

from tritonkittens import _at_exit  # noqa: F401  # registers itself

__version__ = "0.1.0"
