"""Bank conflicts of one access of shared memory, from the compiler's layouts.

The model: a warp's access is served in wavefronts of at most 128 bytes. All 32 lanes go at once for 1, 2 and 4 bytes
a lane, half warps for 8, quarter warps for 16 (CUDA C++ Programming Guide, "Shared Memory"; NVIDIA's GTC talks on
wider accesses). Lanes that read the same word share it.
The degree of an access is the number of wavefronts of the worst such group: the most different words in one bank. 1
is free of conflicts.

Assumptions: an access is ld.shared / st.shared (cp.async for copies), as wide as both layouts allow, up to 16 bytes,
with registers in any order. Triton emits that where it does not use ldmatrix or stmatrix. With those, the degree is
the same: a matrix of 8 rows of 16 bytes is a warp's fragment, 4 bytes each. (A transposing ldmatrix reads such rows
too; here it counts as accesses of single elements, 4 rows instead of 8.) All warps of a role take part, also where
several hold the same elements.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .layouts import SHARED_STRIDE, layout_rank, registers, shared_offsets
from .ttgir import MemDesc, Op, Tensor

BANKS = 32
WORD = 4
WAVEFRONT = BANKS * WORD
WIDEST = 16  # bytes of one lane's access
# operations whose first operand is the tensor and whose second is the memory
_TENSOR_FIRST = ("ttg.local_store", "ttg.async_copy_global_to_local")
_RUN_TIME = ("ttg.local_gather", "ttg.local_scatter")


@dataclass(frozen=True)
class Cost:
    """The cost of one operation. `degree`: wavefronts of the worst group of lanes; `wavefronts`: all of them;
    `ideal`: their number without conflicts.
    """

    degree: int
    wavefronts: int
    ideal: int
    width: int  # bytes of a lane's access


def access_cost(op: Op, warps: int) -> Cost | None:
    """Return the cost of an operation's access by a role of `warps` warps; None where the addresses are known only at
    run time.
    """
    found = tensor_and_memory(op)
    assert found is not None, op.name
    tensor, memory, _ = found
    if op.name in _RUN_TIME:
        return None
    assert tensor.layout is not None
    return conflict(tensor.layout, tensor.shape, memory, warps)


@functools.cache
def conflict(layout: str, shape: tuple[int, ...], memory: MemDesc, warps: int) -> Cost:
    """Return the cost of an access of `memory` by a tensor of `shape` in the register layout `layout`, by a role of
    `warps` warps.
    """
    addresses = _addresses(layout, shape, memory, warps)
    width, first = _vectors(addresses, memory.element.nbytes)
    starts = addresses[:, first].T.reshape(-1, 32)  # one row for each instruction of each warp
    lanes = min(32, WAVEFRONT // width)
    groups = starts.reshape(-1, lanes)
    ways = _ways(groups, width)
    return Cost(int(ways.max()), int(ways.sum()), len(groups), width)


def _addresses(layout: str, shape: tuple[int, ...], memory: MemDesc, warps: int) -> np.ndarray:
    """Return the byte address of every register of the role's threads in one CTA: (threads, registers), without
    registers that repeat an element.
    """
    nbytes = memory.element.nbytes
    rank = min(layout_rank(memory), len(memory.alloc_shape))
    tail = memory.alloc_shape[len(memory.alloc_shape) - rank :]
    offsets, _ = shared_offsets(memory.layout, tail, nbytes)
    view = memory.shape[len(memory.shape) - rank :]
    offsets = offsets[tuple(slice(0, n) for n in view)] & (SHARED_STRIDE - 1)
    # a view with a leading dimension of buffers holds them one after the other, with equal banks
    places = np.broadcast_to(offsets, memory.shape).reshape(-1)
    own = registers(layout, shape, warps)[: 32 * warps]
    _, kept = np.unique(own[0], return_index=True)
    return places[own[:, np.sort(kept)]]


def _vectors(addresses: np.ndarray, nbytes: int) -> tuple[int, np.ndarray]:
    """Return the widest access that the layouts allow, and for each instruction the register of its address."""
    count = addresses.shape[1]
    width = WIDEST
    while width > nbytes:
        each = width // nbytes
        within: Any = addresses % width
        if count % each == 0 and (within == within[0]).all():
            # the registers of thread 0 by address; they must be adjacent in every thread
            order = np.argsort(addresses[0], kind="stable")
            runs: Any = (addresses[:, order] // width).reshape(len(addresses), -1, each)
            if (runs == runs[..., :1]).all() and (within[0][order].reshape(-1, each) == np.arange(each) * nbytes).all():
                return width, order[::each]
        width //= 2
    return nbytes, np.arange(count)


def _ways(starts: np.ndarray, width: int) -> np.ndarray:
    """Return, for each group of lanes that are served together, the most different words in one bank."""
    words = starts[..., None] // WORD + np.arange(max(1, width // WORD))
    words = np.sort(words.reshape(len(starts), -1), axis=1)
    fresh = np.ones(words.shape, bool)
    fresh[:, 1:] = words[:, 1:] != words[:, :-1]
    counts: Any = np.zeros((len(starts), BANKS), np.int64)
    np.add.at(counts, (np.nonzero(fresh)[0], words[fresh] % BANKS), 1)
    return counts.max(axis=1)


def tensor_and_memory(op: Op) -> tuple[Tensor, MemDesc, int] | None:
    """Return the tensor and the memory of an access by threads, and the value of the memory; None for other
    operations.
    """
    if op.name in ("ttg.local_load", "ttg.local_gather"):
        tensor, memory, value = op.result_types[0], op.operand_types[0], op.operands[0]
    elif op.name in _TENSOR_FIRST:
        tensor, memory, value = op.operand_types[0], op.operand_types[1], op.operands[1]
    elif op.name == "ttg.local_scatter":
        memory, tensor, value = op.operand_types[0], op.operand_types[1], op.operands[0]
    elif op.name == "ttg.local_alloc" and op.operands:
        tensor, memory, value = op.operand_types[0], op.result_types[0], op.results[0]
    else:
        return None
    assert isinstance(tensor, Tensor) and isinstance(memory, MemDesc), op.name
    return tensor, memory, value
