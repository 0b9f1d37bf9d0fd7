"""Fifth-generation tensor cores of datacentre Blackwell (PTX ISA 9.7.16): tensor memory, its loads and stores, mma;
sm_100a and sm_103a. With ctas=2, mma, cp and commit are of a pair of CTAs.

Tensor memory has 128 lanes of 512 32-bit columns a CTA; an address is lane << 16 | column, as int32 or a
tensor-memory descriptor. Three kinds of instructions, by their executing threads:
 - alloc, dealloc and relinquish_alloc_permit belong to one whole warp. issuer: "warp" (every warp that executes it),
   "warpgroup" (the first warp of each four), "cta" (the first warp of the CTA);
 - mma, cp, shift and commit belong to one thread. issuer as in the whole package: "thread", "warp", "warpgroup",
   "cta";
 - ld, st, the waits and the fences are executed by every warp; ld and st need a warpgroup, whose warp w accesses
   lanes 32 w to 32 w + 31 only.
"""

from .allocation import alloc, dealloc, relinquish_alloc_permit
from .block_scale import (
    SCALED_KINDS,
    ScaledProduct,
    decode_scaled_instruction,
    mma_scaled,
    scaled_instruction_descriptor,
)
from .copies import COPIES, EXPANSIONS, Copy, cp, shift
from .descriptors import (
    KINDS,
    SWIZZLES,
    decode_descriptor,
    decode_instruction,
    descriptor_constant,
    instruction_descriptor,
    shared_descriptor,
)
from .ordering import commit, fence_after_thread_sync, fence_before_thread_sync
from .products import OPERAND_BITS, OTHER_TENSOR, Product, mma
from .transfers import SHAPES, ld, st, transfer_asm, transfer_cells, wait_ld, wait_st

__all__ = [
    "COPIES",
    "EXPANSIONS",
    "KINDS",
    "OPERAND_BITS",
    "OTHER_TENSOR",
    "SCALED_KINDS",
    "SHAPES",
    "SWIZZLES",
    "Copy",
    "Product",
    "ScaledProduct",
    "alloc",
    "commit",
    "cp",
    "dealloc",
    "decode_descriptor",
    "decode_instruction",
    "decode_scaled_instruction",
    "descriptor_constant",
    "fence_after_thread_sync",
    "fence_before_thread_sync",
    "instruction_descriptor",
    "ld",
    "mma",
    "mma_scaled",
    "relinquish_alloc_permit",
    "scaled_instruction_descriptor",
    "shared_descriptor",
    "shift",
    "st",
    "transfer_asm",
    "transfer_cells",
    "wait_ld",
    "wait_st",
]
