"""Matrix products on tensor cores."""
