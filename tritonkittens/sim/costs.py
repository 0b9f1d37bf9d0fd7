"""The modelled time of operations, in cycles of one multiprocessor: a stated model for timelines, never a measurement.

Each level and unit has a rate and a latency, as in the cost model of ThunderKittens (section 2: cost is the maximum over memory levels and units, plus setup and
synchronisation). Figures are of an H100/H200 at about 1.7 GHz: 132 multiprocessors, 4.8 TB/s of HBM shared evenly, 4096 bf16 multiply-adds a cycle.
"""
from __future__ import annotations

from math import prod
from typing import Any

from .ttgir import MemDesc, Op, Tensor

TMA_LATENCY = 650.0  # issue to arrival of the first bytes, from L2 or HBM
GLOBAL_LATENCY = 550.0
WGMMA_LATENCY = 30.0
TCGEN05_LATENCY = 60.0
GLOBAL_BYTES = 22.0  # a cycle, of one multiprocessor's share
SHARED_BYTES = 128.0
BARRIER = 20.0
ISSUE = 1.0  # warp instructions a scheduler starts in a cycle; four schedulers
SPECIAL = 4.0  # lanes a scheduler's special-function unit handles in a cycle

_SPECIAL_OPERATIONS = {"math.exp2", "math.exp", "math.log2", "math.log", "math.sin", "math.cos", "math.sqrt", "math.rsqrt", "arith.divf", "tt.precise_sqrt", "tt.precise_divf"}
_FREE = {"arith.constant", "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "tt.make_range", "ttg.convert_layout", "cf.br", "cf.cond_br", "tt.return"}


def tma_cycles(nbytes: int) -> float:
    return nbytes / GLOBAL_BYTES


def global_cycles(nbytes: int) -> float:
    return nbytes / GLOBAL_BYTES


def wgmma_cycles(m: int, n: int, k: int, bits: int) -> float:
    """4096 16-bit multiply-adds a cycle and multiprocessor (dense), twice that with 8 bits."""
    return m * n * k / (4096 * 16 / max(bits, 8))


def tcgen05_cycles(m: int, n: int, k: int, bits: int) -> float:
    """8192 16-bit multiply-adds a cycle and multiprocessor."""
    return m * n * k / (8192 * 16 / max(bits, 4))


def elements(kind: Any) -> int:
    return prod(kind.shape) if isinstance(kind, (Tensor, MemDesc)) else 1


def operation_cycles(op: Op, warps: int) -> float:
    """What an operation takes of its role's own time."""
    if op.name in _FREE:
        return 0.0
    size = max([elements(t) for t in (*op.result_types, *op.operand_types)], default=1)
    instructions = size / 32 / max(warps, 1)  # of each warp
    if op.name in _SPECIAL_OPERATIONS:
        return max(1.0, instructions * 32 / SPECIAL / 4)
    if op.name in ("ttg.local_load", "ttg.local_store"):
        kind = next(t for t in (*op.operand_types, *op.result_types) if isinstance(t, MemDesc))
        return 25.0 + size * kind.element.nbytes / SHARED_BYTES
    if op.name in ("tt.load", "tt.store"):
        kind_ = next((t for t in (*op.result_types, *op.operand_types[1:]) if isinstance(t, Tensor)), None)
        nbytes = size * (kind_.element.nbytes if kind_ is not None else 4)
        return (GLOBAL_LATENCY if op.name == "tt.load" else 0.0) + nbytes / GLOBAL_BYTES
    if op.name == "tt.reduce":
        return max(1.0, instructions) + 30.0
    if op.name == "tt.dot":
        shape = op.operand_types[0].shape  # type: ignore[union-attr]
        return elements(op.result_types[0]) * shape[-1] / 2048
    if op.name in ("ttng.tmem_load", "ttng.tmem_store"):
        return 30.0 + size * 4 / 512
    return max(1.0, instructions)
