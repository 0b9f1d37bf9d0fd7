"""The meaning of every TTGIR operation without side effects: `PURE[name](op, *operand values) -> result`, a tuple for
several results.
"""

from __future__ import annotations

from . import pure_arith, pure_math, pure_packed, pure_tensor
from .pure_registry import PURE, pure

__all__ = ["PURE", "pure", "pure_arith", "pure_math", "pure_packed", "pure_tensor"]
