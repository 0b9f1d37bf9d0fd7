"""Loads, stores, prefetches and reductions on global memory beyond `tl.load` (PTX ISA 9.7.9 `ld`, `st`, `prefetch`;
9.7.14 `red`).

Pointers are scalars or tiles of pointers. An element moves one word of the pointer's element type (32 or 64 bits) or,
with `vec`, that many consecutive words in one instruction: vec=4 turns a tile of pointers into a tuple of four tiles.
The address of a vector must be a multiple of its size in bytes. Every thread that holds an element executes the
instruction for it, and several threads may hold a tile.
"""

from .accesses import access, load, load_asm, load_nc, prefetch, store, store_asm
from .atomics import RED_TYPES, atom_cas, load_acquire, red_add, red_mnemonic, store_release

__all__ = [
    "RED_TYPES",
    "access",
    "atom_cas",
    "load",
    "load_acquire",
    "load_asm",
    "load_nc",
    "prefetch",
    "red_add",
    "red_mnemonic",
    "store",
    "store_asm",
    "store_release",
]
