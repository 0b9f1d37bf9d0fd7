"""The kernels of attention: forward, backward, decoding, sequences of different lengths."""
