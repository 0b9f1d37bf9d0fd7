"""The kernel of Hedgehog."""
