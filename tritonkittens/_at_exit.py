"""Release of the library's objects when the interpreter ends."""

import atexit
import sys


@atexit.register
def keep_modules_until_they_are_cleared() -> None:
    """Keep Triton's modules and this library's alive until Python clears their namespaces.

    Python clears the namespace of a module only if the module object still lives. A function keeps the namespace of
    its module alive, but not the module. torch's dispatcher and numpy never release registered functions, and this
    library's operators are such functions.
    So objects in their namespaces would outlive the interpreter, down to Triton's C++ types, which nanobind then
    reports as leaked. `sys` is cleared after all other modules.
    """
    kept = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("triton", "tritonkittens")
    ]
    sys._tritonkittens_modules = kept  # type: ignore[attr-defined]
