"""The kernel of products that gate each other."""
