"""What the language raises: one message that quotes the input and states the rule."""
from tritonkittens.inline_ptx._asm import ArchitectureError, OperandError

__all__ = ["ArchitectureError", "OperandError", "TileError"]


class TileError(ValueError):
    """A tile, an operation or a template breaks a rule of the language or of the hardware."""
