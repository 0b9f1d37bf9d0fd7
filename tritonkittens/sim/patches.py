"""Global state of Triton that simulated devices replace, also those of several threads at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Patch:
    """One value that contexts replace. Contexts of threads may end in any order: the value is that of the one which
    began last of those that are open, and behind the last of them what it was.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]):
        self.read, self.write = read, write
        self.lock, self.open, self.before = threading.Lock(), list[list[Any]](), None

    @contextlib.contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        mine = [value]  # equal values of two contexts are two objects
        with self.lock:
            if not self.open:
                self.before = self.read()
            self.open.append(mine)
            self.write(value)
        try:
            yield
        finally:
            with self.lock:
                self.open = [other for other in self.open if other is not mine]
                self.write(self.open[-1][0] if self.open else self.before)
