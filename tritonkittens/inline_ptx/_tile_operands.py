"""Register tiles as operands of an assembly block, for the shims that act on whole tiles (wgmma, tcgen05): explicit
kernels only."""

from collections.abc import Sequence

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonSemantic

from ._asm import asm, builtin, require, unwrap
from ._traced import Semantic, Traced


def explicit_only(semantic: Semantic, what: str) -> None:
    """Errors: TypeError in plain Triton, whose tiles have no register layout that an instruction could rely on."""
    if not isinstance(semantic, GluonSemantic):
        raise TypeError(
            f"{what} takes register tiles, which only explicit kernels have: a plain Triton tile has no register "
            "layout to rely on"
        )


def tiles_of(value: Traced) -> tuple[tuple[Traced, ...], bool]:
    """(tuple of operands, is it a single one?) from a tile or descriptor, a tuple of them, or a lang object that wraps
    either."""
    value = unwrap(value)
    if hasattr(value, "__asm_operand__"):
        value = unwrap(value.__asm_operand__)
    return (value, False) if isinstance(value, tuple) else ((value,), True)


def is_tile(value: Traced) -> bool:
    """Is `value` a register tile (not a scalar, address or descriptor)?"""
    return isinstance(value, gl.tensor) and value.type.is_block()


def registers(type_: Traced, semantic: Semantic) -> int:
    """Elements of a tile type that one thread holds."""
    return semantic.builder.get_total_elems_per_thread(type_.to_ir(semantic.builder))


def letter(dtype: tl.dtype) -> str:
    """LLVM's constraint letter for one element; 8-bit elements travel in the low half of 16-bit registers."""
    return {"fp32": "f", "fp64": "d"}.get(str(dtype)) or {8: "h", 16: "h", 32: "r", 64: "l"}[dtype.primitive_bitwidth]


def tied(tiles: Sequence[Traced], semantic: Semantic) -> tuple[list[str], list[str]]:
    """(output constraints, input constraints) that bind every register of `tiles` as read and written."""
    outputs = [f"={letter(tile.dtype)}" for tile in tiles for _ in range(registers(tile.type, semantic))]
    return outputs, [str(i) for i in range(len(outputs))]


def update_tiles(
    template: str, tiles: Sequence[Traced], letters: Sequence[str], operands: Sequence[Traced], semantic: Semantic
) -> tuple[Traced, ...]:
    """Emits `template`, which reads and writes `tiles` and reads `operands`. Returns the tiles that it leaves.

    References: the registers of the tiles as results, once more as arguments, then the operands, whose registers have
    the constraints `letters`.
    """
    outputs, ties = tied(tiles, semantic)
    constraints, types = ",".join([*outputs, *ties, *letters]), tuple(tile.type for tile in tiles)
    return tuple(semantic.inline_asm(template, constraints, (*tiles, *operands), types, False))


@builtin
def pass_through(template: Traced, tiles: Traced, only: Traced, _semantic: Semantic = None) -> Traced:
    """Emits `template` with `tiles` as operands that are read and written, so that the compiler keeps their uses on
    their side of it."""
    template = unwrap(template)
    require(template.rstrip(";"), only=unwrap(only), _semantic=_semantic)
    tiles, single = tiles_of(tiles)
    if not tiles:
        asm(template, "", (), _semantic=_semantic)
        return None
    explicit_only(_semantic, template.rstrip(";"))
    out = update_tiles(template, tiles, (), (), _semantic)
    return out[0] if single else tl.tuple(out)
