"""Cluster launch control: a running cluster takes over the work of one that has not started (PTX ISA, "clusterlaunchcontrol"). sm_100.

`result` is 16 bytes of shared memory, 16-byte aligned; the answer arrives there asynchronously and counts 16 bytes on an mbarrier.
"""

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, arch, asm, issued, require

RESULT_BYTES = 16


@constexpr_function
def try_cancel_text(multicast, issuer, sm):
    cluster = ".multicast::cluster::all" if multicast else ""
    return issued(f"clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{cluster}.b128 [$0], [$1];", issuer, sm)


@constexpr_function
def first_ctaid_text(axis):
    if axis not in (0, 1, 2):
        raise OperandError(f"clc.first_ctaid(axis={axis}): 0, 1 or 2")
    return (
        "{ .reg .b128 answer; ld.shared.b128 answer, [$1]; "
        f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{'xyz'[axis]}.b32.b128 $0, answer; }}"
    )


@triton.jit
def try_cancel(result, bar, multicast: tl.constexpr = False, issuer: tl.constexpr = "warp"):
    """`clusterlaunchcontrol.try_cancel`: asks for the cancellation of a cluster that has not started; the answer goes to `result`.

    16 bytes are counted on `bar`, whose phase must expect them. `multicast`: the answer goes to the same place in every CTA of the cluster
    (an architecture-specific form: sm_100a, sm_103a, sm_120a). One thread of the cluster issues it. sm_100. PTX ISA
    "clusterlaunchcontrol.try_cancel".
    """
    require("clusterlaunchcontrol.try_cancel", 100)
    asm(try_cancel_text(multicast, issuer, arch()), "r,r", [result, bar])


@triton.jit
def is_canceled(result):
    """`clusterlaunchcontrol.query_cancel.is_canceled` -> i32: 1 where a cluster was cancelled and its work is ours, 0 where none is left.

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
    """`clusterlaunchcontrol.query_cancel.get_first_ctaid` -> i32: the cancelled cluster's first %ctaid along `axis` (0 x, 1 y, 2 z).

    Defined only where `is_canceled` gave 1. sm_100. PTX ISA "clusterlaunchcontrol.query_cancel".
    """
    require("clusterlaunchcontrol.query_cancel", 100)
    return asm(first_ctaid_text(axis), "=r,r", [result], tl.int32)
