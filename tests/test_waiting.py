"""Roles of blocks that wait for each other, as the engine has them (`lang/engine.py`), without what they compute: nobody waits in a circle.

A template with `prepare`, `aside`, `follow` and `tally` has a producer, consumers, an assistant and a follower in every block, which hear of the same tasks.
Here each is a generator that yields when it has done something (True) or waits (False), at random speeds that differ by four orders of magnitude. The
simulator runs the engine itself, but hardly meets a block that sleeps through several rounds of all others. Tasks are drawn, and of units, as in
`GatheringBackward`.
"""

import random
from collections.abc import Iterator

import pytest

SLOTS, STAGES = 2, 3  # of numbers that are told, of the ring
HEARERS = ("consumer", "assistant", "follower")


class Grid:
    def __init__(self, tiles: int, units: int, lag: int):
        self.tiles, self.tasks, self.lag = tiles, tiles * units, lag
        self.drawn = 0
        self.zeroed, self.stored = [0] * (units + lag), [0] * units  # counters in global memory, of tasks


class Block:
    """What the roles of a block tell each other: how many tasks or iterations."""

    def __init__(self, grid: Grid, iterations: int, before: bool):
        self.grid, self.iterations, self.before = grid, iterations, before
        self.told: list[int | None] = []
        self.heard = dict.fromkeys(HEARERS, 0)
        self.prepared = self.loaded = self.given_back = self.common = self.ended = self.said = 0

    def roles(self) -> list[Iterator[bool]]:
        return [self.producer(), self.consumer(), self.assistant(), self.follower()]

    def state(self) -> tuple:
        counts = self.prepared, self.loaded, self.given_back, self.common, self.ended, self.said
        return len(self.told), *self.heard.values(), *counts

    def hear(self, who: str, turn: int) -> Iterator[bool]:
        while len(self.told) <= turn:
            yield False
        self.heard[who] = turn + 1

    def producer(self) -> Iterator[bool]:
        turn = 0
        while True:
            task, self.grid.drawn = self.grid.drawn, self.grid.drawn + 1
            while min(self.heard.values()) < turn - SLOTS + 1:
                yield False
            self.told.append(task if task < self.grid.tasks else None)
            if self.told[-1] is None:
                return
            for i in range(self.iterations):
                while self.loaded - self.given_back >= STAGES:
                    yield False
                while i == min(1, self.iterations - 1) and self.prepared <= turn:
                    yield False
                self.loaded += 1
                if i == 0:
                    while self.ended < turn:
                        yield False
                    self.common = turn + 1
                yield True
            turn += 1

    def consumer(self) -> Iterator[bool]:
        turn = used = 0
        while True:
            yield from self.hear("consumer", turn)
            if self.told[turn] is None:
                self.said = turn
                return
            if self.iterations == 1 and self.before:
                self.said = turn
            while self.common <= turn:
                yield False
            for i in range(self.iterations):
                while self.loaded <= used:
                    yield False
                used += 1
                self.said = turn
                self.given_back = max(self.given_back, used - 1 if i else 0)
                yield True
            self.given_back, turn = used, turn + 1
            self.ended = turn
            yield True

    def assistant(self) -> Iterator[bool]:
        turn = 0
        while True:
            yield from self.hear("assistant", turn)
            if (task := self.told[turn]) is None:
                return
            unit = task // self.grid.tiles
            while unit >= self.grid.lag and self.grid.zeroed[unit] < self.grid.tiles:
                yield False
            turn += 1
            self.prepared = turn
            yield True
            self.grid.zeroed[unit + self.grid.lag] += 1
            yield True

    def follower(self) -> Iterator[bool]:
        turn = 0
        while True:
            yield from self.hear("follower", turn)
            if (task := self.told[turn]) is None:
                return
            unit = task // self.grid.tiles
            while unit >= self.grid.lag and self.grid.stored[unit - self.grid.lag] < self.grid.tiles:
                yield False
            yield True
            turn += 1
            while self.said < turn:
                yield False
            self.grid.stored[unit] += 1
            yield True


def ends(seed: int, iterations: int, before: bool = True) -> bool:
    """Do all roles of some blocks end?"""
    rng = random.Random(seed)
    blocks, tiles = rng.choice([1, 2, 3, 4, 6, 9]), rng.choice([1, 2, 3, 4, 8])
    lag = 2 * -(-blocks // tiles)
    grid = Grid(tiles, rng.choice([3 * lag + 2, 6 * lag + 3]), lag)
    here = [Block(grid, iterations, before) for _ in range(blocks)]
    running = []
    for block in here:
        slowness = rng.choice([1, 1, 1, 50])
        running += [(role, 1 / slowness / rng.choice([1, 1, 1, 30, 300])) for role in block.roles()]
    while running:
        was = grid.drawn, sum(grid.zeroed), sum(grid.stored), [block.state() for block in here]
        for pair in sorted(running, key=lambda pair: rng.expovariate(pair[1])):
            step = next(pair[0], None)
            if step is None:
                running.remove(pair)
            if step is not False:
                break
        else:
            if was == (grid.drawn, sum(grid.zeroed), sum(grid.stored), [block.state() for block in here]):
                return False
    return True


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_all_roles_end(iterations, rng):
    assert all(ends(seed, iterations) for seed in rng.integers(1 << 40, size=150).tolist())


def test_a_circle_is_found():
    """Of consumers that say what they stored behind the only input of the next task, which waits for zeros: a follower of another block waits for them, so its
    block does not hear of the task that makes those zeros."""
    assert not all(ends(seed, 1, before=False) for seed in range(300))
