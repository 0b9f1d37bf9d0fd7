"""ThunderKittens' tile abstractions on Triton: `import tritonkittens.lang as tk` for kernels, `tritonkittens.inspect` to read what became of them."""

__version__ = "0.1.0"
