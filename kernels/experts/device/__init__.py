"""The kernels that move rows between tokens and experts."""
