"""Shared-memory bank conflicts of a tile's layout: 32 banks of 4 bytes."""

from dataclasses import dataclass

from ._ttgir import Layout


@dataclass(frozen=True)
class BankConflicts:
    """The degree of an access: the number of wavefronts that serve it. 1 is free of conflicts."""

    fragment: int  # eight rows of 16 bytes at one column: ldmatrix, stmatrix, a wgmma core matrix
    column: int  # thirty-two rows, one element each, at one column


def bank_conflicts(layout: Layout | None, shape: tuple[int, ...], bits: int) -> BankConflicts | None:
    """Return the conflicts of a tile's worst column (the last two dimensions of `shape`); None for a layout without a
    formula here.
    """
    if layout is None or len(shape) < 2 or bits < 8:
        return None
    place = _nvmma if layout.kind == "nvmma_shared" else _swizzled if layout.kind == "swizzled_shared" else None
    if place is None or (layout.kind == "swizzled_shared" and len(_order(layout)) < 2):
        return None
    transposed = layout.fields.get("transposed") == "true" or (
        layout.kind == "swizzled_shared" and _order(layout)[0] == 0
    )
    rows, columns = shape[-2:][::-1] if transposed else shape[-2:]
    size = bits // 8
    vector = min(max(16 // size, 1), columns)

    def worst(height: int, width: int) -> int:
        """Return the worst degree over every column, for `height` rows of `width` elements each, at once."""
        at = [
            [(place(layout, r, c, columns, size), width * size) for r in range(min(rows, height))]
            for c in range(0, columns, width)
        ]
        return max(map(_ways, at))

    return BankConflicts(fragment=worst(8, vector), column=worst(32, 1))


def _ways(accesses: list[tuple[int, int]]) -> int:
    """Return the most different words in one bank, over byte ranges (address, length)."""
    words = {w for address, length in accesses for w in range(address // 4, (address + length - 1) // 4 + 1)}
    banks = [w % 32 for w in words]
    return max(banks.count(b) for b in set(banks))


def _nvmma(layout: Layout, row: int, column: int, columns: int, size: int) -> int:
    """TMA's and wgmma's layout: panels as wide as the swizzle, in which 16-byte chunks are exchanged by row (PTX ISA,
    Swizzling modes)."""
    width = layout.integer("swizzlingByteWidth") or 0
    if not width:  # rows as they are; a box of TMA is at most 256 elements wide
        return row * min(columns, 256) * size + column % 256 * size
    byte = column * size % width
    # 128 bytes of addresses hold 128 / width rows; the chunk is exchanged by the row of 128 bytes it lies in
    chunk = (byte // 16) ^ (row * width // 128 % (width // 16))
    return row * width + chunk * 16 + byte % 16  # the panel's own start is a multiple of 128 bytes: the same bank


def _swizzled(layout: Layout, row: int, column: int, columns: int, size: int) -> int:
    """Triton's general layout: vectors of `vec` elements, exchanged by (row / perPhase) % maxPhase."""
    vec, per_phase, max_phase = (layout.integer(name) or 1 for name in ("vec", "perPhase", "maxPhase"))
    vector = (column // vec) ^ (row // per_phase % max_phase)
    return (row * columns + vector * vec + column % vec) * size


def _order(layout: Layout) -> list[int]:
    return [int(n) for n in layout.fields.get("order", "[]").strip("[]").split(",") if n.strip()]
