"""Roles of blocks that wait for each other, as the engine has them (`lang/template/`), without what they compute:
nobody waits in a circle.

A template with hook `reduce_store` has a producer, consumers and reduce-store warps in every block, which work on the
same tasks. Here each is a generator that yields when it has done something (True) or waits (False), at random speeds
that differ by four orders of magnitude. The simulator runs the engine itself, but hardly meets a block that sleeps
through several rounds of all others. A block begins with the task of its own number and fetches the others. The first
block that comes to the sums of an iteration of its head, as `AttentionBackward` has them, stores them; others wait for
that (`lang/memory/first_store_reduce.py`).
"""

import random
from collections.abc import Iterator

import pytest

SLOTS, STAGES = 2, 3  # of the numbers that the producer broadcasts, of the ring
RECEIVERS = ("consumer", "reducer")


class Grid:
    def __init__(self, tiles: int, heads: int, blocks: int, late: bool):
        self.tiles, self.tasks, self.late = tiles, tiles * heads, late
        self.next = blocks
        self.words: dict[tuple[int, int], str] = {}  # of sums, by head and iteration


class Block:
    """What the barriers of a block count: tasks or iterations."""

    def __init__(self, grid: Grid, iterations: int, number: int):
        self.grid, self.iterations = grid, iterations
        # the first, which all roles know, and those that the producer has broadcast
        self.tasks: list[int | None] = [number]
        self.received = dict.fromkeys(RECEIVERS, 0)
        self.loaded = self.released = self.task_full = self.ended = self.committed = self.reduced = 0

    def roles(self) -> list[Iterator[bool]]:
        return [self.producer(), self.consumer(), self.reducer()]

    def state(self) -> tuple:
        return (
            len(self.tasks),
            *self.received.values(),
            self.loaded,
            self.released,
            self.task_full,
            self.ended,
            self.committed,
            self.reduced,
        )

    def receive(self, who: str, turn: int) -> Iterator[bool]:
        while len(self.tasks) <= turn:
            yield False
        self.received[who] = turn

    def producer(self) -> Iterator[bool]:
        turn = 0
        while True:
            for i in range(self.iterations):
                while self.loaded - self.released >= STAGES:
                    yield False
                self.loaded += 1
                if i == 0:
                    while self.ended < turn:
                        yield False
                    self.task_full = turn + 1
                yield True
            task, self.grid.next = self.grid.next, self.grid.next + 1
            while min(self.received.values()) <= turn - SLOTS:
                yield False
            self.tasks.append(task if task < self.grid.tasks else None)
            yield True
            if self.tasks[-1] is None:
                return
            turn += 1

    def consumer(self) -> Iterator[bool]:
        turn = used = 0
        while True:
            yield from self.receive("consumer", turn)
            if self.tasks[turn] is None:
                return
            while self.task_full <= turn:
                yield False
            for i in range(self.iterations):
                while self.loaded <= used:
                    yield False
                used += 1
                while self.reduced < self.committed:
                    yield False
                self.committed += 1
                self.released = max(self.released, used - 1 if i else 0)
                yield True
            self.released, turn = used, turn + 1
            while self.reduced < self.committed:  # epilogue tiles lie over the scratch tiles
                yield False
            self.ended = turn
            yield True

    def reducer(self) -> Iterator[bool]:
        turn = uses = 0
        claimed = []  # sums that this warp stores
        while True:
            yield from self.receive("reducer", turn)
            if (task := self.tasks[turn]) is None:
                break
            for i in range(self.iterations):
                while self.committed <= uses:
                    yield False
                # tasks of a head begin with different ones
                sums = task // self.grid.tiles, (task + i) % self.iterations
                first = sums not in self.grid.words
                if first:
                    self.grid.words[sums] = "claimed"
                    claimed.append(sums)
                yield True
                while not first and self.grid.words[sums] != "stored":
                    yield False
                uses += 1
                self.reduced = uses
                yield True
                if claimed and not self.grid.late:
                    self.grid.words[claimed.pop()] = "stored"
                    yield True
            for sums in claimed:
                self.grid.words[sums] = "stored"
            claimed.clear()
            turn += 1


def ends(seed: int, iterations: int, late: bool = False) -> bool:
    """Do all roles of some blocks end? `late`: reduce-store warps mark sums as stored when their task ends, not at
    once."""
    rng = random.Random(seed)
    blocks, tiles, heads = rng.choice([1, 2, 3, 4, 6, 9]), rng.choice([1, 2, 3, 4, 8]), rng.choice([2, 5, 20])
    blocks = min(blocks, tiles * heads)
    grid = Grid(tiles, heads, blocks, late)
    here = [Block(grid, iterations, number) for number in range(blocks)]
    running = []
    for block in here:
        slowness = rng.choice([1, 1, 1, 50])
        running += [(role, 1 / slowness / rng.choice([1, 1, 1, 30, 300])) for role in block.roles()]
    while running:
        was = grid.next, dict(grid.words), [block.state() for block in here]
        for pair in sorted(running, key=lambda pair: rng.expovariate(pair[1])):
            step = next(pair[0], None)
            if step is None:
                running.remove(pair)
            if step is not False:
                break
        else:
            if was == (grid.next, grid.words, [block.state() for block in here]):
                return False
    return True


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_all_roles_end(iterations, rng):
    assert all(ends(seed, iterations) for seed in rng.integers(1 << 40, size=150).tolist())


def test_a_circle_is_found():
    """Of reduce-store warps that mark sums late: meanwhile they wait for sums of each other."""
    assert not all(ends(seed, 2, late=True) for seed in range(30))
