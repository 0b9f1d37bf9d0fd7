"""The kernels of Based."""
