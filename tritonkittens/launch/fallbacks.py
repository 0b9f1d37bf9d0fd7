"""Products that a compiled kernel computes by mma.sync although its chip has tensor memory: an attribute of its TTGIR,
which compile caches keep."""

from __future__ import annotations

import re

ATTRIBUTE = "ttg.mma-sync-products"  # of the module; Triton takes attributes of its own dialects only
_VALUE = re.compile(rf'"?{re.escape(ATTRIBUTE)}"? = "([^"]*)"')


def mma_sync_products(ttgir: str) -> tuple[str, ...]:
    """Return each such product with the reason."""
    found = _VALUE.search(ttgir)
    if found is None:
        return ()
    # MLIR writes what is not printable ASCII as bytes in hexadecimal
    text = re.sub(rb"\\([0-9A-F]{2})", lambda byte: bytes.fromhex(byte[1].decode()), found[1].encode())
    return tuple(text.decode().splitlines())
