"""Architectures: their names, wherever one is taken, and what a function raises that needs another."""

ARCHITECTURES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90a": 90, "sm_100a": 100, "sm_103a": 103, "sm_120a": 120}  # name: compute capability


class ArchitectureError(RuntimeError):
    """The target GPU lacks an instruction that the kernel asks for."""


class UnknownArchitectureError(ArchitectureError, ValueError):
    """A name that is none of `ARCHITECTURES`."""


def capability_of(arch: str | int) -> int:
    """The compute capability of an architecture: 90 of "sm_90a", which may also be given as 90.

    Raises `UnknownArchitectureError` for anything else.
    """
    if isinstance(arch, str) and arch in ARCHITECTURES:
        return ARCHITECTURES[arch]
    if isinstance(arch, int) and arch in ARCHITECTURES.values():
        return arch
    raise UnknownArchitectureError(f"arch={arch!r}: must be one of {', '.join(ARCHITECTURES)}")
