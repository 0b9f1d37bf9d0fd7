"""The kernel of a few rows of recurrences."""
