"""How kernels of rows read tensors: rows in two dimensions, of one width."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

MULTIPLE = 16  # of elements that a width and strides are known to be multiples of, at most


def _merged(x: Tensor, first: int, behind: int) -> int | None:
    """Return the stride of some dimensions as one; None where they cannot be merged."""
    dims = [(n, stride) for n, stride in zip(x.shape[first:behind], x.stride()[first:behind], strict=True) if n != 1]
    for (_, stride), (extent, below) in zip(dims, dims[1:], strict=False):
        if stride != extent * below:
            return None
    return dims[-1][1] if dims else 0


class Rows:
    """How the kernels read tensors of one shape (…, columns): rows in two dimensions, with a stride for each.

    All tensors have their leading dimensions split at one place. Those that do not fit it are copied.
    """

    def __init__(self, tensors: Sequence[Tensor | None]):
        x = next(t for t in tensors if t is not None)
        lead, self.width = x.ndim - 1, x.shape[-1]
        self.count = math.prod(x.shape[:-1])
        given = [t for t in tensors if t is not None]
        split = max(range(lead + 1), key=lambda at: (sum(self._fits(t, at) for t in given), at))
        self.inner = math.prod(x.shape[split:-1])
        self.copied = [t is not None and not self._fits(t, split) for t in tensors]
        strides = [self._strides(t, split, copied) for t, copied in zip(tensors, self.copied, strict=True)]
        self.unit = math.gcd(MULTIPLE, self.width, *(n for pair in strides for n in pair))
        self.at = tuple((outer // self.unit, inner // self.unit) for outer, inner in strides)
        self.size = (self.count, self.width // self.unit)

    @staticmethod
    def _fits(x: Tensor, split: int) -> bool:
        lead = x.ndim - 1
        return (x.stride(-1) == 1 or x.shape[-1] == 1) and None not in (_merged(x, 0, split), _merged(x, split, lead))

    def _strides(self, x: Tensor | None, split: int, copied: bool) -> tuple[int, int]:
        if x is None:
            return 0, 0
        if copied:
            return self.inner * self.width, self.width
        return _merged(x, 0, split) or 0, _merged(x, split, x.ndim - 1) or 0

    def ready(self, tensors: Sequence[Tensor | None], stand_in: Tensor) -> list[Tensor]:
        """Return the tensors as the kernels read them; one that is left out has the memory of another."""
        return [
            stand_in if t is None else t.contiguous() if copied else t
            for t, copied in zip(tensors, self.copied, strict=True)
        ]
