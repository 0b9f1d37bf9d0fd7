"""The kernel families, installed as `tritonkittens.kernels`: a folder each, with functions and their torch reference.

A function is imported from its family, also where both have one name:
`from tritonkittens.kernels.linear_attention import linear_attention`. docs/kernels.md lists all functions.
"""
