"""When tensor-core work is done and how it is ordered: commit (PTX ISA 9.7.16.12) and the fences (9.7.16.11)."""

import triton
import triton.language as tl

from .._asm import builtin, unwrap
from .._meaning import Instruction, Machine, Register, lanes, meaning
from .._tile_operands import pass_through
from .._traced import Semantic, Traced
from .issue import TARGETS, cta_group, ctas_of, issue


@builtin
def _commit_template(multicast: Traced, ctas: Traced, _semantic: Semantic = None) -> Traced:
    head = f"tcgen05.commit.{cta_group(ctas)}.mbarrier::arrive::one.shared::cluster"
    return tl.constexpr(f"{head}.multicast::cluster.b64 [$0], mask;" if unwrap(multicast) else f"{head}.b64 [$0];")


@triton.jit
def commit(barrier, multicast=None, issuer: tl.constexpr = "warp", ctas: tl.constexpr = 1):
    """Arrives once at the mbarrier (shared address or descriptor) when this thread's earlier mma, cp and shift are
    done. Their thread must be the issuer.

    multicast: 16-bit mask of CTAs of the cluster; the barriers at the same offset receive one arrival each. ctas: as in
    `mma`. PTX ISA
    9.7.16.12.1 `tcgen05.commit.mbarrier::arrive::one`.
    """
    if multicast is None:
        issue(_commit_template(False, ctas), (barrier,), ("r",), issuer)
    else:
        issue(
            _commit_template(True, ctas),
            (barrier, multicast),
            ("r", "r"),
            issuer,
            ".reg .b16 mask; cvt.u16.u32 mask, $1;",
        )


@triton.jit
def fence_before_thread_sync():
    """Orders this thread's tcgen05 operations before a following barrier or flag. PTX ISA 9.7.16.11
    `tcgen05.fence::before_thread_sync`."""
    pass_through("tcgen05.fence::before_thread_sync;", (), TARGETS)


@triton.jit
def fence_after_thread_sync():
    """Orders this thread's tcgen05 operations after a preceding barrier or flag. PTX ISA 9.7.16.11
    `tcgen05.fence::after_thread_sync`."""
    pass_through("tcgen05.fence::after_thread_sync;", (), TARGETS)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


@meaning(
    "tcgen05.commit.{group:cta_group::1|cta_group::2}.mbarrier::arrive::one.{space:shared::cluster}?.{multicast:multicast::cluster}?.b64",
    destinations=0,
)
def _commit_meaning(t: Machine, i: Instruction, barriers: Register, masks: Register = None) -> None:
    for thread, bar, mask in zip(
        i.threads, lanes(barriers, i.active), lanes(masks, i.active) if masks is not None else [None] * len(i.active)
    ):
        t.tcgen05_commit(
            [bar] if mask is None else [bar & 0xFFFFFF | rank << 24 for rank in range(16) if mask >> rank & 1],
            thread,
            ctas_of(i),
        )


@meaning("tcgen05.{what:fence::before_thread_sync|fence::after_thread_sync}", destinations=0)
def _fence_meaning(t: Machine, i: Instruction) -> None:
    t.fence("tcgen05." + (i.fields["what"] or "").removeprefix("fence::"), i.active)
