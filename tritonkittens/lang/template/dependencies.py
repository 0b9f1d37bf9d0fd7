"""Programmatic dependent launch: when the CTAs of a template wait for the previous kernel of the stream.

A CTA makes its barriers and fetches its tensor maps while the previous kernel ends. Then it waits for that kernel, and
lets the next kernel start. The order matters: a next kernel that starts early thus finds all results of the kernels
before this one.

With `launch_pdl="overlap"` a CTA computes beside the previous kernel, and waits for it when it ends. So a kernel after
this one, which waits for this one alone, comes after both. Source: PTX ISA, griddepcontrol.
"""

from __future__ import annotations

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.sync.cluster import dependency_wait, dependents_launch

OVERLAP = "overlap"


@op
def begin_after_previous(t: Trace, T: Traced) -> Traced:
    """Before a CTA's first load: wait for the previous kernel, unless both overlap, and let the next one start."""
    mode = unwrap(T).launch_pdl
    if mode and mode != OVERLAP:
        t.call(dependency_wait)
    if mode:
        t.call(dependents_launch)


@op
def end_after_previous(t: Trace, T: Traced) -> Traced:
    """After a CTA's last load: wait for the previous kernel that it has overlapped."""
    if unwrap(T).launch_pdl == OVERLAP:
        t.call(dependency_wait)
