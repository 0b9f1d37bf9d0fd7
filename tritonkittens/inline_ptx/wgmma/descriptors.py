"""Shared tiles as operands of wgmma: strides and matrix descriptors (PTX ISA 9.7.15.5.1), and the layouts that they
describe."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from .._asm import asm, builtin, require, unwrap
from .._matrix_descriptors import MatrixDescriptor, check_swizzle, descriptor_asm, stride_bits
from .._tile_operands import explicit_only, tiles_of
from .._traced import Semantic, Traced
from .shapes import OPERANDS, PTX_TYPES

SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes -> the descriptor's bits 62-63


def operand_strides(rows: int, columns: int, element_bytes: int, swizzle: int, k_major: bool) -> tuple[int, int]:
    """(leading, stride) byte offsets of a `rows` x `columns` operand, columns contiguous, in a swizzled
    NVMMASharedLayout or `core_matrix_layout`.

    These layouts cut the tile into panels of `swizzle` bytes of columns (16 bytes without swizzling), each with all
    rows, one row after the other, panel after panel. Groups of 8 rows of a panel are the core matrices of PTX ISA
    9.7.15.5.1. `k_major`: the columns are K.
    """
    panel = swizzle or 16
    check_swizzle(swizzle)
    if rows % 8 or columns * element_bytes % panel:
        raise ValueError(
            f"a {rows} x {columns} operand of {element_bytes}-byte elements: rows come in eights and a row in panels "
            f"of {panel} bytes"
        )
    next_panel, next_group = rows * panel, 8 * panel
    if swizzle == 0 and not k_major:  # without swizzling, MN-major descriptors name the two the other way round
        return next_group, next_panel
    return next_panel, next_group


def operand_offset(step: int, rows: int, element_bytes: int, swizzle: int, k_major: bool) -> int:
    """Bytes from the operand's first element to its `step`-th K step (32 bytes of K), in the storage that
    `operand_strides` describes."""
    panel = swizzle or 16
    if k_major:  # along the columns: through the panel, then to the next one
        column = 32 * step
        return column // panel * rows * panel + column % panel
    return step * (32 // element_bytes) * panel


def descriptor_constant(leading: int, stride: int, swizzle: int) -> int:
    """The matrix descriptor without its address: leading >> 4 in bits 16-29, stride >> 4 in bits 32-45, the swizzle
    mode in bits 62-63."""
    return stride_bits(leading, stride, swizzle) | SWIZZLES[swizzle] << 62


def decode_descriptor(descriptor: int) -> MatrixDescriptor:
    """wgmma's 64-bit matrix descriptor (PTX ISA 9.7.15.5.1)."""
    return MatrixDescriptor.decode(descriptor, {code: size for size, code in SWIZZLES.items()}[descriptor >> 62 & 3])


@constexpr_function
def core_matrix_layout(shape: tuple[int, ...], element_bytes: int, contiguous: int = 1) -> gl.SharedLinearLayout:
    """The unswizzled shared layout that wgmma reads: panels of 16 bytes along axis `contiguous`, all of the other axis
    in each.

    Gluon's NVMMASharedLayout(0, ...) is row-major instead, which wgmma reads only where a row has 16 bytes. Swizzled
    layouts have fewer bank conflicts.
    """
    rows, columns = shape[1 - contiguous], shape[contiguous]
    unit = 16 // element_bytes
    order = [(1, 1 << i) for i in range((unit - 1).bit_length())] + [
        (0, 1 << i) for i in range((rows - 1).bit_length())
    ]
    order += [(1, unit << i) for i in range((columns // unit - 1).bit_length())]
    return gl.SharedLinearLayout(
        [[0, step] if (axis == 1) == (contiguous == 1) else [step, 0] for axis, step in order], alignment=128
    )


class Operand(NamedTuple):
    """A shared tile as a wgmma operand: its descriptor without the address, the extent along the other axis, K, the
    type, and K-major or not.
    """

    constant: int
    extent: int
    k: int
    type: str
    k_major: bool
    rows: int
    element_bytes: int
    swizzle: int
    strides: tuple[int, int]  # leading and stride byte offsets

    def offset(self, step: int) -> int:
        """Bytes from the first element to K step `step`."""
        return operand_offset(step, self.rows, self.element_bytes, self.swizzle, self.k_major)


def _storage(tile: Traced) -> tuple[int, int]:
    """(swizzle in bytes, contiguous axis) of a 2-D shared tile. Errors: TypeError for a layout that no matrix
    descriptor describes."""
    layout, shape = tile.layout, [unwrap(size) for size in tile.shape]
    size = tile.dtype.primitive_bitwidth // 8
    if isinstance(layout, gl.NVMMASharedLayout):
        contiguous = 0 if layout.transposed else 1
        if layout.swizzle_byte_width or shape[contiguous] * size == 16:
            return layout.swizzle_byte_width, contiguous
    if isinstance(layout, gl.SharedLinearLayout):
        for contiguous in (1, 0):
            if layout.offset_bases == core_matrix_layout(shape, size, contiguous).offset_bases:
                return 0, contiguous
    raise TypeError(
        f"wgmma operand {tile.type}: it is a 2-D shared tile in an NVMMASharedLayout with swizzling, or in "
        "core_matrix_layout without"
    )


def shared_operand(tile: Traced, k_axis: int) -> Operand:
    """Describe `tile` (a 2-D shared descriptor) as an operand whose K runs along `k_axis` (0 or 1).

    Errors: TypeError for a layout or type, ValueError for a shape or major-ness that wgmma cannot read.
    """
    shape = [unwrap(size) for size in tile.shape]
    allocated = [unwrap(size) for size in tile.type.alloc_shape][-2:]
    kind = PTX_TYPES.get(str(tile.dtype))
    if kind is None or len(shape) != 2 or k_axis not in (0, 1):
        raise TypeError(
            f"wgmma operand {tile.type} with k_axis={k_axis}: it has two axes, K along 0 or 1, and one of the types "
            f"{', '.join(PTX_TYPES)}"
        )
    swizzle, contiguous = _storage(tile)
    size, k_major = OPERANDS[kind][0] // 8, contiguous == k_axis
    if not k_major and size != 2:
        raise ValueError(
            f"wgmma operand {kind} {shape} with K along axis {k_axis}: only 16-bit operands may be MN-major; store it "
            "contiguous in K"
        )
    if shape[k_axis] * size % 32:
        raise ValueError(
            f"wgmma operand {kind} {shape}: K={shape[k_axis]} must be a multiple of {32 // size} (32 bytes)"
        )
    rows = allocated[1 - contiguous]
    strides = operand_strides(rows, allocated[contiguous], size, swizzle, k_major)
    constant = descriptor_constant(*strides, swizzle)
    return Operand(constant, shape[1 - k_axis], shape[k_axis], kind, k_major, rows, size, swizzle, strides)


@builtin
def _descriptor(
    address: Traced, leading: Traced, stride: Traced, swizzle: Traced, _semantic: Semantic = None
) -> Traced:
    require("wgmma matrix descriptor", only=(90,), _semantic=_semantic)
    constant = descriptor_constant(unwrap(leading), unwrap(stride), unwrap(swizzle))
    template = "{ .reg .b32 t; " + descriptor_asm("$0", "$1", constant, "t") + " }"
    return asm(template, "=l,r", (address,), tl.uint64, _semantic=_semantic)


@triton.jit
def shared_descriptor(address, leading_bytes: tl.constexpr, stride_bytes: tl.constexpr, swizzle: tl.constexpr):
    """uint64 matrix descriptor of a shared operand (PTX ISA 9.7.15.5.1): address an int32 shared address or a
    descriptor, swizzle 0, 32, 64, 128.

    `operand_strides` computes the two strides for tiles in Gluon's layouts. The tile must start at a multiple of 8 *
    swizzle bytes (its base offset field is 0); a K step inside it may be added to the address in bytes, or to the
    descriptor in units of 16 bytes.
    """
    return _descriptor(address, leading_bytes, stride_bytes, swizzle)


@builtin
def _operand_descriptor(tile: Traced, k_axis: Traced, step: Traced, _semantic: Semantic = None) -> Traced:
    require("wgmma matrix descriptor", only=(90,), _semantic=_semantic)
    explicit_only(_semantic, "operand_descriptor")
    (tile,), _ = tiles_of(tile)
    operand = shared_operand(tile, unwrap(k_axis))
    step = unwrap(step)
    if not 0 <= step < operand.k * operand.element_bytes // 32:
        raise ValueError(
            f"operand_descriptor step={step}: K={operand.k} has {operand.k * operand.element_bytes // 32} steps of 32 "
            "bytes"
        )
    template = (
        "{ .reg .b32 t; "
        + descriptor_asm("$0", "$1", operand.constant, "t")
        + f" add.s64 $0, $0, {operand.offset(step) >> 4}; }}"
    )
    return asm(template, "=&l,r", (tile,), tl.uint64, _semantic=_semantic)


@triton.jit
def operand_descriptor(tile, k_axis: tl.constexpr, step: tl.constexpr = 0):
    """uint64 matrix descriptor of a shared tile's `step`-th K step (32 bytes of K): explicit kernels, a swizzled
    NVMMASharedLayout or core_matrix_layout.

    k_axis is the axis of K: 1 for A of [M, K], 0 for B of [K, N], 1 for B of [N, K]. Where it is not the contiguous
    axis the operand is MN-major: pass trans_a or trans_b to mma_async (16-bit types only).
    """
    return _operand_descriptor(tile, k_axis, step)
