"""Cluster launch control: a running cluster takes over the work of one that has not started (PTX ISA,
"clusterlaunchcontrol"). sm_100.

`result` is 16 bytes of shared memory, 16-byte aligned; the answer arrives there asynchronously and counts 16 bytes on
an mbarrier.
"""

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, arch, asm, issued, require
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Register, lanes, meaning

RESULT_BYTES = 16


@constexpr_function
def try_cancel_text(multicast: bool, issuer: str, sm: int) -> str:
    cluster = ".multicast::cluster::all" if multicast else ""
    return issued(
        f"clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{cluster}.b128 [$0], [$1];",
        issuer,
        sm,
    )


@constexpr_function
def first_ctaid_text(axis: int) -> str:
    if axis not in (0, 1, 2):
        raise OperandError(f"clc.first_ctaid(axis={axis}): 0, 1 or 2")
    return (
        "{ .reg .b128 answer; ld.shared.b128 answer, [$1]; "
        f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{'xyz'[axis]}.b32.b128 $0, answer; }}"
    )


@triton.jit
def try_cancel(result, bar, multicast: tl.constexpr = False, issuer: tl.constexpr = "warp"):
    """`clusterlaunchcontrol.try_cancel`: requests the cancellation of a cluster that has not started. The answer
    arrives in `result`. sm_100.

    16 bytes count on `bar`, whose phase must expect them. `multicast`: the answer arrives at the same place in every
    CTA of the cluster (sm_100a, sm_103a, sm_120a). One thread of the cluster issues it. PTX ISA
    "clusterlaunchcontrol.try_cancel".
    """
    require("clusterlaunchcontrol.try_cancel", 100)
    asm(try_cancel_text(multicast, issuer, arch()), "r,r", [result, bar])


@triton.jit
def is_canceled(result):
    """`clusterlaunchcontrol.query_cancel.is_canceled` -> i32: 1 if a cluster was cancelled and its work is this
    cluster's, 0 if none is left.

    Read it after the barrier's phase. sm_100. PTX ISA "clusterlaunchcontrol.query_cancel".
    """
    require("clusterlaunchcontrol.query_cancel", 100)
    return asm(
        "{ .reg .b128 answer; .reg .pred canceled; ld.shared.b128 answer, [$1]; "
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 canceled, answer; selp.b32 $0, 1, 0, canceled; }",
        "=r,r",
        [result],
        tl.int32,
    )


@triton.jit
def first_ctaid(result, axis: tl.constexpr = 0):
    """`clusterlaunchcontrol.query_cancel.get_first_ctaid` -> i32: the cancelled cluster's first %ctaid along `axis`
    (0 x, 1 y, 2 z).

    Defined only where `is_canceled` returned 1. sm_100. PTX ISA "clusterlaunchcontrol.query_cancel".
    """
    require("clusterlaunchcontrol.query_cancel", 100)
    return asm(first_ctaid_text(axis), "=r,r", [result], tl.int32)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


NO_CTA = 0x7FFFFFFF


def encode_answer(first_ctaid: "tuple[int, int, int] | None") -> np.ndarray:
    """uint8 [16]: the answer of a try_cancel as the simulator writes it (the hardware's format is not documented): x,
    y, z of the cancelled cluster's first CTA and 1, or no CTA's and 0."""
    return np.array([*first_ctaid, 1] if first_ctaid is not None else [NO_CTA] * 3 + [0], np.uint32).view(np.uint8)


@meaning(
    "clusterlaunchcontrol.try_cancel.async.{space:shared::cta}?.mbarrier::complete_tx::bytes.{multicast:multicast::cluster::all}?.b128",
    destinations=0,
)
def _try_cancel(t: Machine, i: Instruction, results: Register, barriers: Register) -> None:
    for result, bar in zip(lanes(results, i.active), lanes(barriers, i.active)):
        t.clc_try_cancel(result, bar, i.fields["multicast"] is not None)


@meaning("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128")
def _is_canceled(t: Machine, i: Instruction, answer: Register) -> Register:
    return answer[:, 1] >> np.uint64(32) != 0


@meaning("clusterlaunchcontrol.query_cancel.{what:get_first_ctaid::x|get_first_ctaid::y|get_first_ctaid::z}.b32.b128")
def _first_ctaid(t: Machine, i: Instruction, answer: Register) -> Register:
    return np.ascontiguousarray(answer).view(np.uint32)[:, "xyz".index((i.fields["what"] or "")[-1])]
