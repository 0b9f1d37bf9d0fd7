"""A bounded cache whose reads are plain dictionary reads."""

from collections.abc import Hashable
from typing import Any, Protocol


class Used(Protocol):
    """An entry of the cache: `used` is set by readers and cleared by eviction."""

    used: bool


class ClockCache:
    """A cache of at most ``capacity`` entries. A reader marks an entry ``used``; eviction gives marked entries a
    second chance.

    This approximates least-recently-used without a write to the dictionary on a hit, so hits need no lock. Any thread
    may read ``table`` at any time; ``insert`` needs the owner's lock.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"ClockCache({capacity}): a cache holds at least one entry")
        self.capacity = capacity
        self.table: dict[Hashable, Any] = {}

    def insert(self, key: Hashable, value: Used) -> None:
        """Add ``value`` (anything with a writable ``used``), and evict the oldest entries that are unused since the
        last eviction.
        """
        table = self.table
        table.pop(key, None)
        while len(table) >= self.capacity:
            oldest = next(iter(table))
            entry = table.pop(oldest)
            if entry.used:
                entry.used = False
                table[oldest] = entry
        table[key] = value

    def clear(self) -> None:
        """Remove all entries."""
        self.table.clear()

    def __len__(self) -> int:
        return len(self.table)
