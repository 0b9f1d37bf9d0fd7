"""The type of a tile of scales, which block-scaled products read."""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from tritonkittens.lang.core.dtypes import fp8e4m3, fp8e8m0, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.types.tiles import TileType, split

BLOCK_ROWS, BLOCK_COLS = 128, 4  # of a block of scales
BLOCK_BYTES = (2, 256)  # of a block, as TMA copies them
FORMATS = {fp8e8m0: "fp8e8m0", fp8e4m3: "fp8e4m3"}


@dataclass(frozen=True, repr=False)
class scale_tile(TileType):
    """Scales of a tile of an operand: `cols` of each of its rows, one for every 32 or 16 numbers along K.

    A block of 128 rows and 4 columns is 512 contiguous bytes: scale j of row i is byte 16 · (i mod 32) + 4 · (i div 32)
    + j. A tensor of scales is (…, blocks down, blocks across, 2, 256). That is the memory of `quantize_mxfp8`,
    `quantize_nvfp4`, `torch._scaled_mm` and cuBLAS.

    In shared memory each tile has a place in tensor memory beside it, to which products copy it.

    Args:
        dtype: fp8e8m0 (powers of two) or fp8e4m3.
        rows: a multiple of 128, in number of blocks a power of two. Fewer rows of an operand take a whole block.
        cols: a multiple of 4, in number of blocks a power of two.

    Raises:
        TileError: for another dtype or extent.

    Example::

        ring = tk.allocate(tk.scale_tile(tk.fp8e8m0, 128, 4), STAGES)

    Source: PTX ISA, tcgen05, "Block scaling"; cuBLAS, "1D block scaling factors layout".
    """

    dtype: tl.dtype
    rows: int
    cols: int

    def __repr__(self) -> str:
        return f"scale_tile({FORMATS.get(self.dtype) or name_of(self.dtype)}, {self.rows}, {self.cols})"

    def check(self) -> None:
        if self.dtype not in FORMATS:
            raise TileError(f"{self!r}: scales are {' or '.join(FORMATS.values())}")
        for what, extent, step in (("rows", self.rows, BLOCK_ROWS), ("cols", self.cols, BLOCK_COLS)):
            if not isinstance(extent, int) or extent <= 0 or extent % step or len(split(extent // step)) > 1:
                raise TileError(
                    f"{self!r}: {what} {extent!r} must be a power of two times {step}: scales lie in blocks of "
                    f"{BLOCK_ROWS}×{BLOCK_COLS}"
                )

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks down and across."""
        return self.rows // BLOCK_ROWS, self.cols // BLOCK_COLS

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents in memory: blocks down, blocks across, and the bytes of a block."""
        return (*self.blocks, *BLOCK_BYTES)

    @property
    def nbytes(self) -> int:
        return self.rows * self.cols

    @property
    def block_columns(self) -> int:
        """32-bit columns of tensor memory for the scales of all rows in a block of columns."""
        return self.columns // self.blocks[1]

    @property
    def columns(self) -> int:
        """32-bit columns of tensor memory, in which 32 lanes of four bytes hold a block of 128 rows."""
        return self.rows * self.cols // BLOCK_ROWS
