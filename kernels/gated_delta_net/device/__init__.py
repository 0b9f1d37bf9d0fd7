"""The kernels of the gated delta net."""
