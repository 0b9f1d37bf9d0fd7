"""What a kernel asks of a constant that configures it, such as a template."""
from __future__ import annotations

from typing import Any


class Configuration:
    """A constant of a kernel that knows more of it than the kernel's own text says."""

    @property
    def described(self) -> tuple[str, dict[str, Any]]:
        """What messages call the kernel, and by parameter the names of what a tuple argument holds."""
        raise NotImplementedError

    def with_less_memory(self, arch: int, excess: int) -> Configuration | None:
        """The constant to compile with instead, where the kernel asks for `excess` bytes more of shared memory than a block may use; None where there is
        none."""
        raise NotImplementedError

    @property
    def memory_advice(self) -> tuple[str, str]:
        """What a message calls the kernel, and what to do where its shared memory is over budget."""
        raise NotImplementedError
