"""Tuning results on disk: one file of JSON lines for each device and versions. Any number of processes append to it.

A process writes each line whole, under a lock, and never changes it. The last line of a problem counts. A process
that dies while it writes leaves at most a torn last line. Readers skip that line with one warning, and the next
writer removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

import tritonkittens


def folder() -> Path:
    """Return the folder of results: `tune` in $TK_CACHE_DIR, or in ~/.cache/tritonkittens."""
    return Path(os.path.expanduser(os.environ.get("TK_CACHE_DIR") or "~/.cache/tritonkittens"), "tune")


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions for which a result holds: the compiler's and the kernels'. (torch only allocates.)"""
    return {"triton": triton.__version__, "tritonkittens": tritonkittens.__version__}


@dataclass(frozen=True)
class DeviceKey:
    """The devices for which a result holds: equal name and number of multiprocessors (a partition of a GPU keeps the
    name).
    """

    name: str
    multiprocessors: int
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} ({self.multiprocessors} multiprocessors)"

    @property
    def slug(self) -> str:
        """A part of the file's name: "nvidia-h200-132"."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") + f"-{self.multiprocessors}"

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "multiprocessors": self.multiprocessors, "capability": list(self.capability)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> DeviceKey:
        return DeviceKey(
            str(values["name"]),
            int(values["multiprocessors"]),
            (int(values["capability"][0]), int(values["capability"][1])),
        )


@dataclass(frozen=True)
class Trial:
    """A tried configuration: predicted seconds by component, and measured seconds (the median) or the error's text."""

    config: dict[str, Any]
    predicted: dict[str, float]
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Entry:
    """The result of tuning one problem: the winner's configuration and seconds, the trials, and the time (ISO 8601,
    UTC).
    """

    family: str
    problem: dict[str, Any]
    config: dict[str, Any]
    seconds: float
    tried: tuple[Trial, ...] = ()
    date: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.family, problem_key(self.problem)

    def as_dict(self) -> dict[str, Any]:
        tried = [{k: v for k, v in vars(trial).items() if v is not None} for trial in self.tried]
        return {
            "family": self.family,
            "problem": self.problem,
            "config": self.config,
            "seconds": self.seconds,
            "tried": tried,
            "date": self.date,
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Entry:
        """Return the entry of an `as_dict` result. Raises KeyError, TypeError or ValueError for anything else."""
        tried = tuple(Trial(t["config"], t["predicted"], t.get("seconds"), t.get("error")) for t in values["tried"])
        if not isinstance(values["problem"], dict) or not isinstance(values["config"], dict):
            raise TypeError("problem and config are dictionaries")
        return Entry(
            str(values["family"]),
            values["problem"],
            values["config"],
            float(values["seconds"]),
            tried,
            str(values["date"]),
        )


def problem_key(problem: dict[str, Any]) -> str:
    """Return one text for each problem, in any order of its fields."""
    return json.dumps(problem, sort_keys=True)


class CorruptedError(Exception):
    """A file with contents that no interrupted writer leaves."""


@dataclass
class Content:
    """The contents of a file: a device, entries by family and problem, and the number of torn last lines (0 or 1)
    that were skipped.
    """

    device: DeviceKey | None = None
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    torn: int = 0


def parse(data: bytes) -> Content:
    """Parse a file. Raises CorruptedError for a line that is no result, except for an unfinished last line."""
    content = Content()
    *lines, last = data.split(b"\n")
    if last:
        if not last.startswith(b"{"):
            raise CorruptedError
        content.torn = 1
    for line in lines:
        try:
            values = json.loads(line)
            entry = Entry.from_dict(values)
            content.device = DeviceKey.from_dict(values["device"])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CorruptedError from error
        content.entries[entry.key] = entry
    return content


class Store:
    """The results for one device: those on disk, and those that could not be written."""

    def __init__(self, device: DeviceKey, where: Path):
        self.device = device
        name = "_".join([device.slug, *(f"{package}-{version}" for package, version in versions().items())])
        self.path = where / f"{name}.jsonl"
        self.torn = 0
        self._unsaved: dict[tuple[str, str], Entry] = {}
        self._content: Content | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._warned: set[str] = set()
        self._mutex = threading.RLock()

    def entries(self) -> dict[tuple[str, str], Entry]:
        """Return entries by family and problem. A changed file is read again."""
        with self._mutex:
            try:
                status = os.stat(self.path)
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                if self._content is None or stamp != self._stamp:
                    self._content, self._stamp = self._read(), stamp
            except (FileNotFoundError, NotADirectoryError):
                self._content = None
            except CorruptedError:
                self._content = self._set_aside()
            except OSError as error:
                self._content = None
                self._warn("access", f"{self.path} cannot be read ({error.strerror}): tuning results there are ignored")
            content = self._content or Content()
            self.torn = content.torn
            return {**content.entries, **self._unsaved}

    def _read(self) -> Content:
        """Read the file. A torn last line, while no process writes, is from an interrupted writer."""
        content = parse(self.path.read_bytes())
        if content.torn:
            with contextlib.suppress(OSError), self._locked():  # a process that may not lock reads the whole lines only
                content = parse(self.path.read_bytes())
                if content.torn:
                    self._warn(
                        "torn",
                        f"{self.path} ends in a line whose writing was interrupted: it is ignored, and cut off with "
                        "the next result",
                    )
        return content

    def get(self, family: str, problem: dict[str, Any]) -> Entry | None:
        return self.entries().get((family, problem_key(problem)))

    def add(self, entry: Entry) -> None:
        """Append an entry. If the folder is not writable, keep the entry for this process, with one warning."""
        line = json.dumps({**entry.as_dict(), "device": self.device.as_dict()}).encode() + b"\n"
        with self._mutex:
            self.entries()  # moves a corrupted file aside
            try:
                with self._locked():
                    _append(self.path, line)
                self._unsaved.pop(entry.key, None)
            except OSError as error:
                self._unsaved[entry.key] = entry
                self._warn(
                    "access",
                    f"{self.path.parent} cannot be written ({error.strerror}): tuning results stay in this process; "
                    "set TK_CACHE_DIR",
                )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes and threads. The lock is a file of its own, so it survives when the other file is
        moved aside.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _set_aside(self) -> Content | None:
        """Move a corrupted file aside, unless another process did so meanwhile."""
        try:
            with self._locked():
                try:
                    return parse(self.path.read_bytes())
                except FileNotFoundError:
                    return None
                except CorruptedError:
                    aside = self.path.with_suffix(".corrupted")
                    os.replace(self.path, aside)
            self._warn(
                "corrupted",
                f"{self.path} is corrupted: it is ignored, kept as {aside.name}, and rebuilt as problems are tuned",
            )
        except OSError as error:
            self._warn(
                "corrupted", f"{self.path} is corrupted: it is ignored, and cannot be moved aside ({error.strerror})"
            )
        return None

    def _warn(self, about: str, message: str) -> None:
        """Warn once in a process for each store and problem."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _append(path: Path, line: bytes) -> None:
    """Append with one write, after the last whole line. Under the store's lock, a tail without a newline has no
    writer any more.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            size = os.pread(descriptor, size, 0).rfind(b"\n") + 1
            os.ftruncate(descriptor, size)
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, size)
            raise OSError(0, "the disk is full")
    finally:
        os.close(descriptor)


@functools.cache
def _store(device: DeviceKey, where: Path) -> Store:
    return Store(device, where)


def store_for(device: DeviceKey) -> Store:
    """Return the store of a device: one object for each folder and device in a process."""
    return _store(device, folder())


def known_devices() -> list[DeviceKey]:
    """Return the devices with results on disk, of these versions."""
    ending = "".join(f"_{package}-{version}" for package, version in versions().items()) + ".jsonl"
    found = []
    for path in sorted(folder().glob("*.jsonl")) if folder().is_dir() else ():
        with contextlib.suppress(OSError, CorruptedError):
            device = parse(path.read_bytes()).device if path.name.endswith(ending) else None
            if device is not None:
                found.append(device)
    return found
