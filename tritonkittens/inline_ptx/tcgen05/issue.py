"""How one thread issues an asynchronous instruction of the tensor cores: mma, cp, shift and commit."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import triton.language as tl

from .._asm import arch, asm, builtin, issued, require, unwrap
from .._meaning import Instruction
from .._traced import Semantic, Traced

TARGETS = tl.constexpr((100, 103))  # sm_100a and sm_103a

# How the work of an issued instruction reaches memory on the CPU: read(space, addresses, nbytes) gives uint8
# [*addresses.shape, nbytes], write(space, addresses, data) takes such.
Read: TypeAlias = Callable[[str, np.ndarray, int], np.ndarray]
Write: TypeAlias = Callable[[str, np.ndarray, np.ndarray], None]


def cta_group(ctas: Traced) -> str:
    """The qualifier of an instruction for one CTA or a pair. Raises ValueError for another number."""
    if unwrap(ctas) not in (1, 2):
        raise ValueError(f"tcgen05 with ctas={unwrap(ctas)!r}: 1, or 2 for a pair of CTAs")
    return f"cta_group::{unwrap(ctas)}"


def ctas_of(instruction: Instruction) -> int:
    """How many CTAs an instruction is for, by its field `group`."""
    return int((instruction.fields["group"] or "")[-1])


@builtin
def issue(
    template: Traced,
    args: Traced,
    constraints: Traced,
    issuer: Traced,
    declarations: Traced = "",
    only: Traced = TARGETS,
    _semantic: Semantic = None,
) -> None:
    """Emits the instruction `template` for the threads that `issuer` names, behind `declarations`, which every thread
    executes. Refuses to compile for a target outside `only`."""
    template, only = unwrap(template), unwrap(only)
    require(template.split(" ")[0], only=only, _semantic=_semantic)
    block = issued(template, unwrap(issuer), unwrap(arch(_semantic=_semantic)), unwrap(declarations))
    asm(block, unwrap(constraints), args, _semantic=_semantic)
