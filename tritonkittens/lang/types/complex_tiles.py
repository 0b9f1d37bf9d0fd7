"""Types of complex tiles and vectors: pairs of component tiles, the real and the imaginary part.

Source: ThunderKittens (`crt`, `cst`, `csv`, `cgl`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import triton.language as tl

from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.types.global_layout import gl
from tritonkittens.lang.types.tiles import TileType, rt, st, sv


@dataclass(frozen=True, repr=False)
class _complex_tile_type(TileType):
    dtype: tl.dtype
    rows: int
    cols: int
    is_complex: ClassVar[bool] = True
    component: ClassVar[type[rt] | type[st]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.dtype)}, {self.rows}, {self.cols})"

    def check(self) -> None:
        assert self.real

    @property
    def real(self) -> TileType:
        """The type of a component."""
        return self.component(self.dtype, self.rows, self.cols)

    imag = real


@dataclass(frozen=True, repr=False)
class crt(_complex_tile_type):
    """Complex register tile of `rows` × `cols`: a pair of register tiles (`rt`).

    Args:
        dtype: the element type of a component.
        rows, cols: as of `rt`.

    Raises:
        TileError: as `rt`.

    Example::

        sums = tk.zero(tk.crt(tk.fp32, 64, 64))
    """

    component = rt


@dataclass(frozen=True, repr=False)
class cst(_complex_tile_type):
    """Complex shared tile of `rows` × `cols`: a pair of shared tiles (`st`), for `tk.allocate`.

    Arguments and errors as of `st`, without its options.
    """

    component = st


@dataclass(frozen=True, repr=False)
class csv(TileType):
    """Complex shared vector of `length` elements: a pair of shared vectors (`sv`), for `tk.allocate`.

    Raises `TileError` as `sv`.
    """

    dtype: tl.dtype
    length: int
    is_complex: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"csv({name_of(self.dtype)}, {self.length})"

    def check(self) -> None:
        assert self.real

    @property
    def real(self) -> TileType:
        """The type of a component."""
        return sv(self.dtype, self.length)

    imag = real


class cgl(NamedTuple):
    """A complex tensor for an explicit kernel: the global layouts of its real and its imaginary part.

    Args:
        real: a global layout (`gl`), whose tile types are components: `st`, not `cst`.
        imag: a global layout of the same dtype and shape.

    Example::

        kernel[grid](tk.cgl(tk.gl(x_real, tk.st(tk.bf16, 64, 64)), tk.gl(x_imag, tk.st(tk.bf16, 64, 64))))
    """

    real: gl
    imag: gl
