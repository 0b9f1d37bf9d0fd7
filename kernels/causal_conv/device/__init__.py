"""The kernel of causal convolutions."""
