"""The effect of each TTGIR operation with side effects, in terms of the machine; one module a family."""

from . import (
    barriers,
    control,
    copies,
    global_memory,
    inline_asm,
    products,
    scaled_products,
    shared_memory,
    tensor_memory,
    tma,
)
from .registry import EFFECTS, VIEWS

__all__ = ["EFFECTS", "VIEWS"]
