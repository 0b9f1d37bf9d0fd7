"""How one thread issues an asynchronous instruction of the tensor cores: mma, cp, shift and commit."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import triton.language as tl

from .._asm import arch, asm, builtin, issued, require, unwrap
from .._traced import Semantic, Traced

TARGETS = tl.constexpr((100, 103))  # sm_100a and sm_103a

# How the work of an issued instruction reaches memory on the CPU: read(space, addresses, nbytes) gives uint8
# [*addresses.shape, nbytes], write(space, addresses, data) takes such.
Read: TypeAlias = Callable[[str, np.ndarray, int], np.ndarray]
Write: TypeAlias = Callable[[str, np.ndarray, np.ndarray], None]


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
