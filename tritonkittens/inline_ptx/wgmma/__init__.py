"""Asynchronous warpgroup matrix multiply (PTX ISA 9.7.15 `wgmma`): D = A B + D for a warpgroup of four warps; sm_90a
only.

The order of a multiplication is fence, mma_async (any number of them), commit_group, wait_group. Between mma_async and
the wait the accumulator's registers belong to the tensor core: pass tiles through `fence` and `wait_group`, so that no
use of them moves across.

Register tiles (explicit kernels only: a plain Triton tile has no layout that a kernel may rely on)
 - An accumulator is one tile, or a tuple of tiles whose columns follow each other: 64 rows, N columns together, N any
   multiple of 8 up to 256, each piece a power of two columns in `gl.NVMMADistributedLayout(version=[3, 0],
   warps_per_cta=[4, 1], instr_shape=[16, columns, 16])`. float32 or int32; float16 accumulators are tiles of packed
   pairs (`pack`, 64 x N/2 int32), since unpacking them is only allowed after the wait.
 - A in registers is a tile of 64 x K in `gl.DotOperandLayout(0, that layout, k_width=32 // bits)`, or `pack` of it.

Shared operands are 64-bit matrix descriptors (PTX ISA 9.7.15.5.1): `shared_descriptor` from an address,
`operand_descriptor` from a tile.
"""

from .descriptors import (
    SWIZZLES,
    Operand,
    core_matrix_layout,
    decode_descriptor,
    descriptor_constant,
    operand_descriptor,
    operand_offset,
    operand_strides,
    shared_descriptor,
    shared_operand,
)
from .fragments import accumulator_places, fragment_places, pack, packed_layout, unpack
from .instructions import Product, commit_group, fence, mma_async, wait_group
from .shapes import GROUPS, OPERANDS, PTX_TYPES, Multiply, check, mma_async_asm, valid_n
from .whole_tiles import mma_sync

__all__ = [
    "GROUPS",
    "OPERANDS",
    "PTX_TYPES",
    "SWIZZLES",
    "Multiply",
    "Operand",
    "Product",
    "accumulator_places",
    "check",
    "commit_group",
    "core_matrix_layout",
    "decode_descriptor",
    "descriptor_constant",
    "fence",
    "fragment_places",
    "mma_async",
    "mma_async_asm",
    "mma_sync",
    "operand_descriptor",
    "operand_offset",
    "operand_strides",
    "pack",
    "packed_layout",
    "shared_descriptor",
    "shared_operand",
    "unpack",
    "valid_n",
    "wait_group",
]
