"""The kernels of gated activations."""
