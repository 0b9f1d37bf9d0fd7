"""Tensor maps in im2col mode: the tile of a convolution's input, and its rules.

Sources: CUDA driver API, ``cuTensorMapEncodeIm2col``; PTX ISA, "im2col mode".
"""

from collections.abc import Sequence
from typing import NamedTuple

MAX_PIXELS = 1024  # of one copy
MAX_CHANNELS = 256  # of one copy
MAX_ELEMENT_STRIDE = 8
# The values of one corner share 16 bits of the tensor map, so more values have a smaller range. By the tensor's rank.
CORNER_RANGE = {3: (-32768, 32767), 4: (-128, 127), 5: (-16, 15)}


class Im2colSpec(NamedTuple):
    """The tile of an im2col tensor map.

    Args:
        box: pixels and channels of the tile.
        swizzle: as in a ``TensorMapSpec``.
        fill: as in a ``TensorMapSpec``.
        lower: the first position of a base pixel, one per spatial dimension in the tensor's order ([[D,] H,] W).
        upper: the last position, counted from the tensor's last pixel.
        element_strides: the step from one base pixel to the next.
    """

    box: tuple[int, int]
    swizzle: int
    fill: str
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    element_strides: tuple[int, ...]


def check_im2col(spec: Im2colSpec, rank: int, name: str, shape: Sequence[int] | None = None) -> None:
    """Refuse an im2col tile `spec` that im2col mode forbids, for a tensor of `rank` dimensions (and this `shape`,
    where it is known).

    `name` is the tensor's name in messages. Raises TypeError for values that are no ints, ValueError for a broken
    rule.
    """
    if rank not in CORNER_RANGE:
        raise ValueError(f"{name}: {rank} dimensions; im2col takes 3 (NWC), 4 (NHWC) or 5 (NDHWC)")
    low, high = CORNER_RANGE[rank]
    for field, least, most in (("lower", low, high), ("upper", low, high), ("element_strides", 1, MAX_ELEMENT_STRIDE)):
        values = getattr(spec, field)
        if len(values) != rank - 2:
            raise ValueError(
                f"{name}: {field} {values} has {len(values)} values; one for each of the {rank - 2} spatial dimensions"
            )
        for value in values:
            if not isinstance(value, int):
                raise TypeError(f"{name}: {field} {values} holds a {type(value).__name__}; its values are ints")
            if not least <= value <= most:
                raise ValueError(
                    f"{name}: {field} {values}: {value} must lie in {least} to {most} for a tensor of {rank} dimensions"
                )
    if len(spec.box) != 2:
        raise ValueError(f"{name}: box {spec.box}; an im2col tile has two extents, pixels and channels")
    pixels, channels = spec.box
    if pixels > MAX_PIXELS:
        raise ValueError(f"{name}: box {spec.box} has {pixels} pixels; an im2col copy has at most {MAX_PIXELS}")
    if not spec.swizzle and channels > MAX_CHANNELS:
        raise ValueError(
            f"{name}: box {spec.box} has {channels} channels; an im2col copy without a swizzle has at most "
            f"{MAX_CHANNELS}"
        )
    for extent, first, last in zip((shape or ())[1:-1], spec.lower, spec.upper):
        if extent + last - first < 1:
            raise ValueError(
                f"{name}: shape {tuple(shape or ())}, lower {spec.lower}, upper {spec.upper}: the pixel box runs from "
                f"{first} to {extent - 1 + last}; it must hold at least one pixel"
            )
