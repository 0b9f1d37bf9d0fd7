"""Programmatic dependent launch: the next kernel starts before this one ends (PTX ISA, "griddepcontrol"). sm_90.

It needs a launch with the attribute (Triton: `launch_pdl=True`); otherwise both instructions do nothing.
"""

import triton

from tritonkittens.inline_ptx._asm import asm, require
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Waits, meaning


@triton.jit
def wait():
    """`griddepcontrol.wait`: until the grids that this one depends on have ended and their memory is visible. sm_90."""
    require("griddepcontrol.wait", 90)
    asm("griddepcontrol.wait;", "", [])


@triton.jit
def launch_dependents():
    """`griddepcontrol.launch_dependents`: allows the dependent grid to start, once all CTAs have executed it or
    ended. sm_90.
    """
    require("griddepcontrol.launch_dependents", 90)
    asm("griddepcontrol.launch_dependents;", "", [])


# --- meanings: what each instruction does, on the CPU
# -----------------------------------------------------------------------------------


@meaning("griddepcontrol.{action:wait|launch_dependents}", destinations=0)
def _griddepcontrol(t: Machine, i: Instruction) -> Waits:
    wait = t.grid_dependency(i.fields["action"] or "")
    if wait is not None:
        yield wait
