"""What the library lets go of when the interpreter ends."""

import atexit
import sys


@atexit.register
def keep_modules_until_they_are_cleared() -> None:
    """Let Python clear the namespaces of Triton's modules and of ours.

    Python clears the namespace of a module only if the module object lives until then. A function keeps the namespace of its module alive, but not
    the module. torch's dispatcher and numpy never release the functions that they are given, and our operators are such functions: what their
    namespaces reach would outlive the interpreter, down to Triton's C++ types, which nanobind then reports as leaked. `sys` is cleared after
    all other modules.
    """
    kept = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("triton", "tritonkittens")]
    sys._tritonkittens_modules = kept  # type: ignore[attr-defined]
