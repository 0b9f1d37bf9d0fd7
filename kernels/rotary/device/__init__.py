"""The kernels of rotary embeddings."""
