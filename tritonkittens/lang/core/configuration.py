"""The interface between a kernel and a constant that configures it, such as a template."""

from __future__ import annotations

from typing import Any


class Configuration:
    """A constant that configures a kernel."""

    @property
    def described(self) -> tuple[str, dict[str, Any]]:
        """The kernel's name in messages, and for each tuple parameter the names of its items."""
        raise NotImplementedError

    def with_less_memory(self, arch: int, excess: int) -> Configuration | None:
        """Return a smaller configuration for a kernel that exceeds a CTA's shared memory by `excess` bytes, or
        None.
        """
        raise NotImplementedError

    @property
    def memory_advice(self) -> tuple[str, str]:
        """The kernel's name in a message, and the advice where its shared memory is over budget."""
        raise NotImplementedError

    def note_fallbacks(self, arch: int, products: tuple[str, ...]) -> None:
        """Remember the products that run on mma.sync on an architecture with tensor memory, each with the reason."""
        raise NotImplementedError
