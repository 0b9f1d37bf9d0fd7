"""The kernels of the quantisers, and conversions to the formats of block-scaled products."""
