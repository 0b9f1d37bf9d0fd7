"""A line on a terminal that says how far something is."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

BAR = 24  # characters
DRAWN = 0.2  # seconds between two drawings, of who has nothing else to do


class Progress:
    """A bar of `total` steps on `stream` (stderr), with a title and a text. `shown`: None for "on a terminal".

    Example::

        with Progress("warm", 12) as progress:
            progress.show(3, "attention")
    """

    def __init__(self, title: str, total: int, shown: bool | None = None, stream: TextIO | None = None):
        self.title, self.total = title, total
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty() if shown is None else shown
        self.began, self._width = time.monotonic(), 0

    def show(self, done: int, text: str = "") -> None:
        """Draw the bar with so many steps done."""
        if not self.shown:
            return
        full = BAR * done // max(self.total, 1)
        seconds = time.monotonic() - self.began
        line = f"{self.title} [{'#' * full}{'.' * (BAR - full)}] {done}/{self.total} {seconds:.0f} s {text}"
        self._write(line[:119])

    def _write(self, line: str) -> None:
        self.stream.write("\r" + line.ljust(self._width))
        self.stream.flush()
        self._width = len(line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line, so that what is printed next begins at the margin."""
        if self._width:
            self._write("")
            self.stream.write("\r")
            self.stream.flush()
