"""Programmatic dependent launch: the next kernel starts before this one ends (PTX ISA, "griddepcontrol"). sm_90.

It acts only where the launch asks for it (Triton: `launch_pdl=True`); elsewhere both instructions do nothing.
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
    """`griddepcontrol.launch_dependents`: this CTA lets the dependent grid start; it does so once all CTAs have said so or ended. sm_90."""
    require("griddepcontrol.launch_dependents", 90)
    asm("griddepcontrol.launch_dependents;", "", [])


# --- meanings: what each instruction does, on the CPU -----------------------------------------------------------------------------------


@meaning("griddepcontrol.{action:wait|launch_dependents}", destinations=0)
def _griddepcontrol(t: Machine, i: Instruction) -> Waits:
    wait = t.grid_dependency(i.fields["action"] or "")
    if wait is not None:
        yield wait
