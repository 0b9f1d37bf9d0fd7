"""Roles of blocks that wait for each other, as the engine has them (`lang/template/`), without what they compute: nobody waits in a circle.

A template with hook `reduce_store` has a producer, consumers and senders in every block, which work on the same tasks. Here each is a generator that yields when it has
done something (True) or waits (False), at random speeds that differ by four orders of magnitude. The simulator runs the engine itself, but hardly meets a block
that sleeps through several rounds of all others. A block begins with the task of its own number and draws the others; the first that comes to the sums of an
iteration of its unit, as `AttentionBackward` has them, stores them, the others wait for that (`lang/memory/first_store_reduce.py`).
"""

import random
from collections.abc import Iterator

import pytest

SLOTS, STAGES = 2, 3  # of numbers that are told, of the ring
HEARERS = ("consumer", "sender")


class Grid:
    def __init__(self, tiles: int, units: int, blocks: int, late: bool):
        self.tiles, self.tasks, self.late = tiles, tiles * units, late
        self.drawn = blocks
        self.words: dict[tuple[int, int], str] = {}  # of sums, by unit and iteration


class Block:
    """What the roles of a block tell each other: how many tasks or iterations."""

    def __init__(self, grid: Grid, iterations: int, number: int):
        self.grid, self.iterations = grid, iterations
        self.tasks: list[int | None] = [number]  # the first, which all roles know, and those that the producer has told
        self.heard = dict.fromkeys(HEARERS, 0)
        self.loaded = self.given_back = self.common = self.ended = self.given = self.sent = 0

    def roles(self) -> list[Iterator[bool]]:
        return [self.producer(), self.consumer(), self.sender()]

    def state(self) -> tuple:
        return (len(self.tasks), *self.heard.values(), self.loaded, self.given_back, self.common, self.ended, self.given, self.sent)

    def hear(self, who: str, turn: int) -> Iterator[bool]:
        while len(self.tasks) <= turn:
            yield False
        self.heard[who] = turn

    def producer(self) -> Iterator[bool]:
        turn = 0
        while True:
            for i in range(self.iterations):
                while self.loaded - self.given_back >= STAGES:
                    yield False
                self.loaded += 1
                if i == 0:
                    while self.ended < turn:
                        yield False
                    self.common = turn + 1
                yield True
            task, self.grid.drawn = self.grid.drawn, self.grid.drawn + 1
            while min(self.heard.values()) <= turn - SLOTS:
                yield False
            self.tasks.append(task if task < self.grid.tasks else None)
            yield True
            if self.tasks[-1] is None:
                return
            turn += 1

    def consumer(self) -> Iterator[bool]:
        turn = used = 0
        while True:
            yield from self.hear("consumer", turn)
            if self.tasks[turn] is None:
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
        claimed = []  # sums that this sender stores
        while True:
            yield from self.hear("sender", turn)
            if (task := self.tasks[turn]) is None:
                break
            for i in range(self.iterations):
                while self.given <= sends:
                    yield False
                sums = task // self.grid.tiles, (task + i) % self.iterations  # tasks of a unit begin with different ones
                first = sums not in self.grid.words
                if first:
                    self.grid.words[sums] = "claimed"
                    claimed.append(sums)
                yield True
                while not first and self.grid.words[sums] != "stored":
                    yield False
                sends += 1
                self.sent = sends
                yield True
                if claimed and not self.grid.late:
                    self.grid.words[claimed.pop()] = "stored"
                    yield True
            for sums in claimed:
                self.grid.words[sums] = "stored"
            claimed.clear()
            turn += 1


def ends(seed: int, iterations: int, late: bool = False) -> bool:
    """Do all roles of some blocks end? `late`: senders say that sums are stored when their task ends, not at once."""
    rng = random.Random(seed)
    blocks, tiles, units = rng.choice([1, 2, 3, 4, 6, 9]), rng.choice([1, 2, 3, 4, 8]), rng.choice([2, 5, 20])
    blocks = min(blocks, tiles * units)
    grid = Grid(tiles, units, blocks, late)
    here = [Block(grid, iterations, number) for number in range(blocks)]
    running = []
    for block in here:
        slowness = rng.choice([1, 1, 1, 50])
        running += [(role, 1 / slowness / rng.choice([1, 1, 1, 30, 300])) for role in block.roles()]
    while running:
        was = grid.drawn, dict(grid.words), [block.state() for block in here]
        for pair in sorted(running, key=lambda pair: rng.expovariate(pair[1])):
            step = next(pair[0], None)
            if step is None:
                running.remove(pair)
            if step is not False:
                break
        else:
            if was == (grid.drawn, grid.words, [block.state() for block in here]):
                return False
    return True


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_all_roles_end(iterations, rng):
    assert all(ends(seed, iterations) for seed in rng.integers(1 << 40, size=150).tolist())


def test_a_circle_is_found():
    """Of senders that say late that sums are stored: meanwhile they wait for sums of each other."""
    assert not all(ends(seed, 2, late=True) for seed in range(30))
