"""Roles of blocks that wait for each other, as the engine has them (`lang/template/`), without what they compute: nobody waits in a circle.

A template with `send`, `follow` and `tally` has a producer, consumers, senders and a follower in every block, which hear of the same tasks. Here each is a
generator that yields when it has done something (True) or waits (False), at random speeds that differ by four orders of magnitude. The simulator runs the
engine itself, but hardly meets a block that sleeps through several rounds of all others. Tasks are drawn, and of units, as in `GatheringBackward`; the first
that comes to the sums of an iteration of its unit stores them, the others wait for that (`lang/memory/first_store_reduce.py`).
"""

import random
from collections.abc import Iterator

import pytest

SLOTS, STAGES, TALLIES = 2, 3, 3  # of numbers that are told, of the ring, of tasks that are said to be sent
HEARERS = ("consumer", "sender", "follower")


class Grid:
    def __init__(self, tiles: int, units: int, lag: int):
        self.tiles, self.tasks, self.lag = tiles, tiles * units, lag
        self.drawn = 0
        self.sent = [0] * units  # counters in global memory, of tasks
        self.words: dict[tuple[int, int], str] = {}  # of sums, by unit and iteration


class Block:
    """What the roles of a block tell each other: how many tasks or iterations."""

    def __init__(self, grid: Grid, iterations: int):
        self.grid, self.iterations = grid, iterations
        self.told: list[int | None] = []
        self.heard = dict.fromkeys(HEARERS, 0)
        self.loaded = self.given_back = self.common = self.ended = self.given = self.sent = self.said = self.followed = 0

    def roles(self) -> list[Iterator[bool]]:
        return [self.producer(), self.consumer(), self.sender(), self.follower()]

    def state(self) -> tuple:
        return (len(self.told), *self.heard.values(), self.loaded, self.given_back, self.common, self.ended, self.given, self.sent, self.said, self.followed)

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
                return
            while self.common <= turn:
                yield False
            for i in range(self.iterations):
                while self.loaded <= used:
                    yield False
                used += 1
                while self.sent < self.given:
                    yield False
                self.given += 1
                self.given_back = max(self.given_back, used - 1 if i else 0)
                yield True
            self.given_back, turn = used, turn + 1
            while self.sent < self.given:  # results come where the tiles were
                yield False
            self.ended = turn
            yield True

    def sender(self) -> Iterator[bool]:
        turn = sends = 0
        while True:
            yield from self.hear("sender", turn)
            if (task := self.told[turn]) is None:
                return
            for i in range(self.iterations):
                while self.given <= sends:
                    yield False
                sums = task // self.grid.tiles, i
                first = sums not in self.grid.words
                if first:
                    self.grid.words[sums] = "claimed"
                yield True
                while not first and self.grid.words[sums] != "stored":
                    yield False
                sends += 1
                self.sent = sends
                yield True
                if first:
                    self.grid.words[sums] = "stored"
                    yield True
            turn += 1
            assert turn - self.followed <= TALLIES, "parities tell no more tasks apart"
            self.said = turn
            yield True

    def follower(self) -> Iterator[bool]:
        turn = 0
        while True:
            yield from self.hear("follower", turn)
            if (task := self.told[turn]) is None:
                return
            unit = task // self.grid.tiles
            while unit >= self.grid.lag and self.grid.sent[unit - self.grid.lag] < self.grid.tiles:
                yield False
            yield True
            while self.said <= turn:
                yield False
            turn += 1
            self.followed = turn
            self.grid.sent[unit] += 1
            yield True


def ends(seed: int, iterations: int, lag: int | None = None) -> bool:
    """Do all roles of some blocks end?"""
    rng = random.Random(seed)
    blocks, tiles = rng.choice([1, 2, 3, 4, 6, 9]), rng.choice([1, 2, 3, 4, 8])
    lag = 2 * -(-blocks // tiles) if lag is None else lag
    grid = Grid(tiles, rng.choice([3 * lag + 2, 6 * lag + 3]), lag)
    here = [Block(grid, iterations) for _ in range(blocks)]
    running = []
    for block in here:
        slowness = rng.choice([1, 1, 1, 50])
        running += [(role, 1 / slowness / rng.choice([1, 1, 1, 30, 300])) for role in block.roles()]
    while running:
        was = grid.drawn, sum(grid.sent), dict(grid.words), [block.state() for block in here]
        for pair in sorted(running, key=lambda pair: rng.expovariate(pair[1])):
            step = next(pair[0], None)
            if step is None:
                running.remove(pair)
            if step is not False:
                break
        else:
            if was == (grid.drawn, sum(grid.sent), grid.words, [block.state() for block in here]):
                return False
    return True


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_all_roles_end(iterations, rng):
    assert all(ends(seed, iterations) for seed in rng.integers(1 << 40, size=150).tolist())


def test_a_circle_is_found():
    """Of followers that wait for tasks of their own unit: their own among them, which they count when they have followed."""
    assert not any(ends(seed, 2, lag=0) for seed in range(30))
