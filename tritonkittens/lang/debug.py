"""Debugging a running kernel: prints, and a timeline of marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonkittens.inline_ptx import timing
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import axes_of, pieces_of
from tritonkittens.lang.memory.shared_tiles import load_shared, shared
from tritonkittens.lang.memory.tensor_memory import load_tensor_memory, tensor_tile
from tritonkittens.lang.sync.semaphores import role_thread
from tritonkittens.lang.types.global_layout import check_global, extents_of, rank_of, strides_of

MARK_WORDS = 4  # int64 words of a record: nanoseconds, multiprocessor, warp, label


@triton.jit
def _print_once(LABEL: tl.constexpr, x, thread):
    if thread == 0:
        tl.device_print(LABEL, x)


@op
def print(t: Trace, label: Traced, x: Traced) -> Traced:
    """Print a tile, vector or scalar with a label while the kernel runs.

    Args:
        label: printable ASCII, a compile-time string.
        x: a scalar is printed once a role. Of a tile, every thread prints its elements with their indices in the
            tile's power-of-two piece; the label names the piece where there are several. The whole role first loads a
            shared or tensor-memory tile.

    The output appears when the stream is synchronised.

    Raises:
        TileError: for another label.

    Example::

        tk.print("row maximum", m)
    """
    label = unwrap(label)
    if not isinstance(label, str) or not label or not (label.isascii() and label.isprintable()):
        raise TileError(f"print({label!r}): the label must be a string of printable ASCII characters")
    if isinstance(x, shared):
        x = load_shared(t, x, "memory", None)
    elif isinstance(x, tensor_tile):
        x = load_tensor_memory(t, x)
    if t.interpreted:
        return t.call("device_print", f"{label} ", x)
    if not axes_of(x):
        return t.call(_print_once, tl.constexpr(f"{label} "), t.scalar(x), role_thread(t))
    pieces = pieces_of(x)
    for i, piece in enumerate(pieces):
        t.call("device_print", f"{label} " if len(pieces) == 1 else f"{label}, piece {i} of {len(pieces)} ", piece)


@triton.jit
def _now():
    warp = asm("mov.u32 $0, %tid.x;", "=r", [], tl.int32) // 32
    return timing.globaltimer(), timing.smid().to(tl.int64), warp.to(tl.int64)


@op
def mark(t: Trace, g: Traced, index: Traced, label: Traced = 0) -> None:
    """Record a time stamp in row `index` of a global layout. One thread of the role writes; rows outside are dropped.

    Args:
        g: a global layout of shape (records, 4), int64. A row holds the nanoseconds of %globaltimer (resolution about
            1 µs), the SM, the warp in the CTA, and `label`.
        index: the row, a constant or an int32 scalar.
        label: an integer.

    `tk.timeline(tensor)` reads the records on the host.

    Raises:
        TileError: for another shape or dtype.
    """
    t.require_explicit("mark")
    check_global(g, "mark")
    if rank_of(g) != 2 or g.pointer.dtype.element_ty != tl.int64:
        raise TileError(
            f"mark: needs a global layout of shape (records, {MARK_WORDS}) and int64, got {rank_of(g)} dimensions of "
            f"{name_of(g.pointer.dtype.element_ty)}"
        )
    index, stride = t.scalar(index), strides_of(g)
    row = t.method(g.pointer, "__add__", t.method(t.method(index, "to", tl.int64), "__mul__", stride[0]))
    inside = t.method(t.method(index, "__ge__", 0), "__and__", t.method(index, "__lt__", extents_of(g)[0]))
    words = (*t.call(_now), t.method(t.scalar(label), "to", tl.int64))
    for i, word in enumerate(words):
        step = i if isinstance(stride[1], int) else t.method(stride[1], "__mul__", i)
        t.call(gl.store, t.method(row, "__add__", step), word, inside)


class Event(NamedTuple):
    """A record of `mark`: nanoseconds since the first record, SM, warp in its CTA, label, and row."""

    nanoseconds: int
    multiprocessor: int
    warp: int
    label: int | str
    row: int


def timeline(buffer: torch.Tensor, labels: Sequence[str] = ()) -> list[Event]:
    """Return the events that `mark` wrote, in order of time. Synchronises with the GPU.

    Args:
        buffer: an int64 tensor of shape (records, 4), zero before the launch.
        labels: names of the labels 0, 1, ….

    Raises:
        TileError: for another tensor.
    """
    if buffer.ndim != 2 or buffer.shape[1] != MARK_WORDS or buffer.dtype != torch.int64:
        raise TileError(
            f"timeline of shape {tuple(buffer.shape)}, {buffer.dtype}: needs (records, {MARK_WORDS}) of torch.int64"
        )
    rows = sorted((*row, i) for i, row in enumerate(buffer.tolist()) if row[0] > 0)
    start = rows[0][0] if rows else 0
    names = dict(enumerate(labels))
    return [Event(time - start, place, warp, names.get(label, label), i) for time, place, warp, label, i in rows]


__all__ = ["Event", "mark", "print", "timeline"]
