"""Programmatic dependent launch: when the CTAs of a template wait for the previous kernel of the stream.

With `launch_pdl=True` a CTA initializes its barriers and fetches its tensor maps while the previous kernel ends. Then
it waits for that kernel, and only then lets the next kernel start. So when the next kernel starts, all kernels before
this one have ended.

With `launch_pdl="overlap"` a CTA computes while the previous kernel runs, and waits for it after the last load. So this
kernel ends after the previous one, and a next kernel that waits for this one finds the results of both. This kernel
must not read what the previous kernel writes.

Unless CTAs fetch tasks, hook `setup` of a CTA's first task runs before the wait. It may read what earlier kernels than
the previous one have written. Source: PTX ISA, griddepcontrol.
"""

from __future__ import annotations

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.sync.cluster import dependency_wait, dependents_launch

OVERLAP = "overlap"


@op
def begin_after_previous(t: Trace, T: Traced) -> Traced:
    """Before a CTA's first load: wait for the previous kernel, unless they overlap; let the next one start."""
    mode = unwrap(T).launch_pdl
    if mode and mode != OVERLAP:
        t.call(dependency_wait)
    if mode:
        t.call(dependents_launch)


@op
def end_after_previous(t: Trace, T: Traced) -> Traced:
    """After a CTA's last load: wait for the previous kernel, if this one overlaps it."""
    if unwrap(T).launch_pdl == OVERLAP:
        t.call(dependency_wait)
