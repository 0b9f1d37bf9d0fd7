"""A few rows of `linear_attention`, `gated_delta_rule` or `mamba_chunk_scan` in one kernel, which these call: what a
step of decoding costs is to read and write the states once."""
