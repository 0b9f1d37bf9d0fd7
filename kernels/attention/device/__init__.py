"""The kernels of attention: forward, backward, decoding, packed sequences."""
