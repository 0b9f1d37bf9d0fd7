"""Mistakes in what CTAs do to each other through global memory, and the same kernels without them (`faults.py`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.sim.faults import Fault, empty, integers
from tritonkittens.inline_ptx import barrier, memory, tma

GLOBAL_FAULTS: list[Fault] = []
WIDTH = tl.constexpr(256)


def fault(kind: str, kernel: Any, inputs: Any, *names: str, **more: Any) -> None:
    GLOBAL_FAULTS.extend(Fault(name, kind, kernel, inputs, **more) for name in names)


def counters(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32, device="cpu")


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float32, device="cpu")


# ---------------------------------------------------------------- parts of a sum, added by the last CTA to arrive


@triton.jit
def split_sum(X, Parts, Arrived, Y, PARTS: tl.constexpr, BUG: tl.constexpr):
    """Y = the sum of the rows of X, one row a CTA; the counters are zero again."""
    part, o = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(X + part * WIDTH + o)
    if BUG == "split_counts_first":
        arrived = tl.atomic_add(Arrived, 1)
        tl.store(Parts + part * WIDTH + o, x)  # reports: split_counts_first
    else:
        # reports: split_relaxed, split_scope, split_no_barrier, split_no_acquire, split_unfenced
        tl.store(Parts + part * WIDTH + o, x)
        if BUG != "split_no_barrier":
            tl.debug_barrier()
        if BUG == "split_relaxed":
            arrived = tl.atomic_add(Arrived, 1, sem="relaxed")
        elif BUG == "split_scope":
            arrived = tl.atomic_add(Arrived, 1, scope="cta")
        elif BUG == "split_no_acquire":
            arrived = tl.atomic_add(Arrived, 1, sem="release")
        elif BUG == "split_unfenced":
            arrived = tl.atomic_add(Arrived, 1, sem="relaxed")
            barrier.fence("acq_rel", "gpu")
        else:
            arrived = tl.atomic_add(Arrived, 1)
    if arrived == PARTS - 1:
        total = tl.zeros((WIDTH,), tl.float32)
        for i in range(PARTS):
            total += tl.load(Parts + i * WIDTH + o)
        tl.store(Y + o, total)
        tl.store(Arrived, 0)


def split_inputs(rng: Any) -> Any:
    parts = int(rng.integers(2, 9))
    x, y, arrived = integers(rng, parts, 256), empty(256), counters(1)
    return (parts,), (x, empty(parts, 256), arrived, y, parts), [y], [x.sum(0)]


fault(
    "race",
    split_sum,
    split_inputs,
    "split_counts_first",
    "split_relaxed",
    "split_scope",
    "split_no_barrier",
    "split_no_acquire",
    "split_unfenced",
)


# ---------------------------------------------------------------- a chain of CTAs, each behind the one before


@triton.jit
def running_sums(X, Y, Set, BUG: tl.constexpr):
    """Y = running sums over the rows of X. CTA i waits for the flag of CTA i − 1."""
    row, o = tl.program_id(0), tl.arange(0, WIDTH)
    total = tl.load(X + row * WIDTH + o)
    if row > 0:
        if BUG == "chain_volatile":
            while tl.load(Set + row - 1, volatile=True) == 0:
                pass
        elif BUG == "chain_plain_flag":
            while tl.load(Set + row - 1, volatile=True) == 0:
                pass
            barrier.fence("acq_rel", "gpu")
        elif BUG == "chain_relaxed":
            while tl.atomic_add(Set + row - 1, 0, sem="relaxed") == 0:
                pass
        elif BUG != "chain_no_wait":
            while tl.atomic_add(Set + row - 1, 0, sem="acquire") == 0:
                pass
        # reports: chain_no_wait
        total += tl.load(Y + (row - 1) * WIDTH + o)
    if BUG == "chain_early_flag":
        tl.atomic_xchg(Set + row, 1, sem="release")
    tl.store(Y + row * WIDTH + o, total)  # reports: chain_volatile, chain_relaxed, chain_early_flag
    tl.debug_barrier()
    if BUG == "chain_plain_flag":
        tl.store(Set + row, 1)  # reports: chain_plain_flag
    elif BUG != "chain_early_flag":
        tl.atomic_xchg(Set + row, 1, sem="release")


def chain_inputs(rng: Any) -> Any:
    rows = int(rng.integers(2, 7))
    x, y = integers(rng, rows, 256), empty(rows, 256)
    return (rows,), (x, y, counters(rows)), [y], [x.cumsum(0)]


fault(
    "race",
    running_sums,
    chain_inputs,
    "chain_no_wait",
    "chain_volatile",
    "chain_relaxed",
    "chain_plain_flag",
    "chain_early_flag",
)


# ---------------------------------------------------------------- sums that every CTA adds to


@triton.jit
def sums(X, Y, Lock, BUG: tl.constexpr):
    """Y += the row of X, of each CTA, under a lock."""
    o = tl.arange(0, WIDTH)
    x = tl.load(X + tl.program_id(0) * WIDTH + o)
    if BUG == "lost_update":
        # reports: lost_update
        tl.store(Y + o, tl.load(Y + o) + x)
    else:
        while tl.atomic_cas(Lock, 0, 1) == 1:
            pass
        tl.store(Y + o, tl.load(Y + o) + x)  # reports: unlock_relaxed, unlock_no_barrier
        if BUG != "unlock_no_barrier":
            tl.debug_barrier()
        if BUG == "unlock_store":
            tl.store(Lock, 0)  # reports: unlock_store
        elif BUG == "unlock_relaxed":
            tl.atomic_xchg(Lock, 0, sem="relaxed")
        else:
            tl.atomic_xchg(Lock, 0)


def sums_inputs(rng: Any) -> Any:
    rows = int(rng.integers(2, 9))
    x, y = integers(rng, rows, 256), zeros(256)
    lock = counters(1)
    return (rows,), (x, y, lock), [y], [x.sum(0)]


fault("race", sums, sums_inputs, "lost_update", "unlock_store", "unlock_relaxed", "unlock_no_barrier")


@triton.jit
def histogram(X, Counts, BUG: tl.constexpr):
    """Counts of the numbers in X; a CTA counts its own in a row, the last adds nothing up."""
    o = tl.arange(0, WIDTH)
    x = tl.load(X + tl.program_id(0) * WIDTH + o)
    if BUG == "same_place_in_one_store":
        tl.store(Counts + x, o)  # reports: same_place_in_one_store
    else:
        tl.atomic_add(Counts + x, 1, sem="relaxed")


def histogram_inputs(rng: Any) -> Any:
    rows = int(rng.integers(1, 5))
    x = torch.from_numpy(rng.integers(0, 32, (rows, 256))).int()
    counts = counters(32)
    return (rows,), (x, counts), [counts], [torch.bincount(x.reshape(-1), minlength=32)]


fault("race", histogram, histogram_inputs, "same_place_in_one_store")


@triton.jit
def rows_of(X, Y, BUG: tl.constexpr):
    """Y = X, a row a CTA."""
    row, o = tl.program_id(0), tl.arange(0, WIDTH)
    pitch = WIDTH
    if BUG == "rows_overlap":
        pitch = WIDTH - 1
    tl.store(Y + row * pitch + o, tl.load(X + row * WIDTH + o))  # reports: rows_overlap


def rows_inputs(rng: Any) -> Any:
    rows = int(rng.integers(2, 9))
    x, y = integers(rng, rows, 256), empty(rows, 256)
    return (rows,), (x, y), [y], [x]


fault("race", rows_of, rows_inputs, "rows_overlap")


# ---------------------------------------------------------------- tasks from a counter, and rounds of all CTAs


@triton.jit
def fetched(X, Y, Next, rows, BUG: tl.constexpr):
    """Y = 2 X; CTAs fetch rows."""
    o = tl.arange(0, WIDTH)
    row = tl.atomic_add(Next, 1, sem="relaxed")
    while row < rows:
        tl.store(Y + row * WIDTH + o, 2 * tl.load(X + row * WIDTH + o))
        if BUG == "plain_counter":
            # reports: plain_counter
            row = tl.load(Next)
            tl.store(Next, row + 1)
        else:
            row = tl.atomic_add(Next, 1, sem="relaxed")


def fetched_inputs(rng: Any) -> Any:
    rows = int(rng.integers(4, 12))
    x, y = integers(rng, rows, 256), empty(rows, 256)
    return (4,), (x, y, counters(1), rows), [y], [2 * x]


fault("race", fetched, fetched_inputs, "plain_counter")


@triton.jit
def grid_barrier(Arrived, target, BUG: tl.constexpr):
    if BUG != "grid_barrier_unmet":
        tl.debug_barrier()
    if BUG == "grid_barrier_relaxed":
        tl.atomic_add(Arrived, 1, sem="relaxed")
    else:
        tl.atomic_add(Arrived, 1, sem="release")
    while tl.atomic_add(Arrived, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()


@triton.jit
def rounds(X, Y, Arrived, ROUNDS: tl.constexpr, BUG: tl.constexpr):
    """X[r + 1] of a CTA = X[r] of the next one, in rounds of all CTAs over two buffers, the rows of Y in turn."""
    cta, ctas, o = tl.program_id(0), tl.num_programs(0), tl.arange(0, WIDTH)
    # reports: grid_barrier_relaxed, grid_barrier_unmet, rounds_without_barrier, one_buffer
    tl.store(Y + cta * WIDTH + o, tl.load(X + cta * WIDTH + o))
    for r in range(ROUNDS):
        if BUG != "rounds_without_barrier":
            grid_barrier(Arrived, (r + 1) * ctas, BUG)
        here, there = r % 2, (r + 1) % 2
        if BUG == "one_buffer":
            here, there = 0, 0
        # reports: grid_barrier_relaxed, grid_barrier_unmet, rounds_without_barrier, one_buffer
        x = tl.load(Y + (here * ctas + (cta + 1) % ctas) * WIDTH + o)
        tl.store(Y + (there * ctas + cta) * WIDTH + o, x)  # reports: grid_barrier_relaxed, grid_barrier_unmet


def rounds_inputs(rng: Any) -> Any:
    ctas = int(rng.integers(2, 6))
    x, y = integers(rng, ctas, 256), empty(2, ctas, 256)
    return (ctas,), (x, y, counters(1), 3), [y[1]], [x.roll(-3, 0)]


fault(
    "race", rounds, rounds_inputs, "rounds_without_barrier", "one_buffer", "grid_barrier_relaxed", "grid_barrier_unmet"
)


# ---------------------------------------------------------------- copies by TMA


@tk.kernel
@triton.jit
def handed_over(X, Y, Z, Set, T: tl.constexpr, BUG: tl.constexpr):
    """CTA 0 stores X to Y by TMA, CTA 1 loads Y by TMA and stores it to Z."""
    tile, arrived = tk.allocate(T), tk.semaphores(1)
    if tl.program_id(0) == 0:
        tk.store(tile, tk.load(X, tk.rt(tk.fp32, 16, 32), (0, 0)))
        tk.fence_async()
        tk.sync()
        tk.store_async(Y, tile, (0, 0))  # reports: stored_read_wait, stored_no_wait, flag_not_awaited
        if BUG == "stored_read_wait":
            tk.store_read_wait()
        elif BUG != "stored_no_wait":
            tk.store_wait()
        tk.sync()
        tl.atomic_xchg(Set, 1, sem="release")
        tk.store_wait()
    else:
        if BUG != "flag_not_awaited":
            while tl.atomic_add(Set, 0, sem="acquire") == 0:
                pass
        tk.sync()
        tk.expect(arrived[0], tile)
        tk.load_async(tile, Y, (0, 0), arrived[0])  # reports: flag_not_awaited
        tk.wait(arrived[0], 0)
        tk.store(Z, tk.load(tile), (0, 0))


def handed_inputs(rng: Any) -> Any:
    x, y, z = integers(rng, 16, 32), empty(16, 32), empty(16, 32)
    tile = tk.st(tk.fp32, 16, 32)
    return (2,), (tk.gl(x), tk.gl(y, tile), tk.gl(z), counters(1), tile), [z], [x]


fault("race", handed_over, handed_inputs, "stored_read_wait", "stored_no_wait", "flag_not_awaited")


@tk.kernel
@triton.jit
def added(X, Y, T: tl.constexpr, BUG: tl.constexpr):
    """Y += every tile of X, by TMA."""
    tile = tk.allocate(T)
    tk.store(tile, tk.load(X, tk.rt(tk.fp32, 16, 32), (tl.program_id(0), 0)))
    tk.fence_async()
    tk.sync()
    if BUG == "first_stores":
        if tl.program_id(0) == 0:
            tk.store_async(Y, tile, (0, 0))  # reports: first_stores
        else:
            tk.store_add_async(Y, tile, (0, 0))
    else:
        tk.store_add_async(Y, tile, (0, 0))
    tk.store_wait()


def added_inputs(rng: Any) -> Any:
    tiles = int(rng.integers(2, 5))
    x, y = integers(rng, 16 * tiles, 32), zeros(16, 32)
    tile = tk.st(tk.fp32, 16, 32)
    return (tiles,), (tk.gl(x), tk.gl(y, tile), tile), [y], [x.reshape(tiles, 16, 32).sum(0)]


fault("race", added, added_inputs, "first_stores")


# ---------------------------------------------------------------- ordinary accesses, and copies by TMA after them


@tk.kernel
@triton.jit
def stored_for_tma(X, Y, Z, Set, T: tl.constexpr, BUG: tl.constexpr):
    """CTA 0 stores X to Y by ordinary stores, CTA 1 loads Y by TMA and stores it to Z."""
    tile, arrived = tk.allocate(T), tk.semaphores(1)
    if tl.program_id(0) == 0:
        if BUG == "fenced_before":
            tma.fence_proxy_async("global")
        # reports: unfenced, fenced_before, fenced_shared, fenced_after_flag
        tk.store(Y, tk.load(X, tk.rt(tk.fp32, 16, 32), (0, 0)), (0, 0))
        if BUG == "fenced_shared":
            tk.fence_async()
        elif BUG == "":
            tma.fence_proxy_async("global")
        tk.sync()
        tl.atomic_xchg(Set, 1, sem="release")
        if BUG == "fenced_after_flag":
            tma.fence_proxy_async("global")
    else:
        while tl.atomic_add(Set, 0, sem="acquire") == 0:
            pass
        tk.sync()
        tk.expect(arrived[0], tile)
        tk.load_async(tile, Y, (0, 0), arrived[0])  # reports: unfenced, fenced_before, fenced_shared, fenced_after_flag
        tk.wait(arrived[0], 0)
        tk.store(Z, tk.load(tile), (0, 0))


fault("missing-fence", stored_for_tma, handed_inputs, "unfenced", "fenced_before", "fenced_shared", "fenced_after_flag")


@tk.kernel
@triton.jit
def fenced_by_reader(X, Y, Z, Set, T: tl.constexpr, BUG: tl.constexpr):
    """As `stored_for_tma`. The thread that starts the load fences, after it has acquired the flag."""
    tile, arrived = tk.allocate(T), tk.semaphores(1)
    if tl.program_id(0) == 0:
        tk.store(Y, tk.load(X, tk.rt(tk.fp32, 16, 32), (0, 0)), (0, 0))  # reports: reader_fences_first
        tk.sync()
        tl.atomic_xchg(Set, 1, sem="release")
    else:
        if BUG == "reader_fences_first":
            tma.fence_proxy_async("global")
        while tl.atomic_add(Set, 0, sem="acquire") == 0:
            pass
        tk.sync()
        if BUG == "":
            tma.fence_proxy_async("")
        tk.expect(arrived[0], tile)
        tk.load_async(tile, Y, (0, 0), arrived[0])  # reports: reader_fences_first
        tk.wait(arrived[0], 0)
        tk.store(Z, tk.load(tile), (0, 0))


fault("missing-fence", fenced_by_reader, handed_inputs, "reader_fences_first")


@tk.kernel
@triton.jit
def stored_twice(X, Y, Z, Set, T: tl.constexpr, BUG: tl.constexpr):
    """Z = X, through Y: zeros by ordinary stores, to which TMA adds X, and a load by TMA. One CTA."""
    tile, arrived = tk.allocate(T), tk.semaphores(1)
    tk.store(Y, tk.zero(tk.rt(tk.fp32, 16, 32)), (0, 0))  # reports: added_unfenced
    tk.store(tile, tk.load(X, tk.rt(tk.fp32, 16, 32), (0, 0)))
    tk.fence_async()
    if BUG != "added_unfenced":
        tma.fence_proxy_async("global")
    tk.sync()
    tk.store_add_async(Y, tile, (0, 0))  # reports: added_unfenced
    tk.store_wait()
    if BUG == "read_back_unfenced":
        tk.store(Y, tk.load(X, tk.rt(tk.fp32, 16, 32), (0, 0)), (0, 0))  # reports: read_back_unfenced
    tk.sync()
    tk.expect(arrived[0], tile)
    tk.load_async(tile, Y, (0, 0), arrived[0])  # reports: read_back_unfenced
    tk.wait(arrived[0], 0)
    tk.store(Z, tk.load(tile), (0, 0))


def twice_inputs(rng: Any) -> Any:
    _, arguments, outputs, expected = handed_inputs(rng)
    return (1,), arguments, outputs, expected


fault("missing-fence", stored_twice, twice_inputs, "added_unfenced", "read_back_unfenced")


# ---------------------------------------------------------------- threads of one CTA


@triton.jit
def shifted(X, Y, BUG: tl.constexpr):
    """Y = 2 X, shifted by 37, through Y itself."""
    o = tl.arange(0, 512)
    tl.store(Y + o, 2 * tl.load(X + o))  # reports: shift_unmet
    if BUG != "shift_unmet":
        tl.debug_barrier()
    y = tl.load(Y + (o + 37) % 512)
    if BUG != "shift_overwrites":
        tl.debug_barrier()
    tl.store(Y + o, y)  # reports: shift_overwrites


def shifted_inputs(rng: Any) -> Any:
    x, y = integers(rng, 512), empty(512)
    return (1,), (x, y), [y], [2 * x.roll(-37)]


fault("race", shifted, shifted_inputs, "shift_unmet", "shift_overwrites")


@triton.jit
def told(X, Y, Z, BUG: tl.constexpr):
    """The first thread stores a number, which all threads load."""
    o = tl.arange(0, WIDTH)
    tl.store(Y, tl.program_id(0) + 7)  # reports: told_unmet
    if BUG != "told_unmet":
        tl.debug_barrier()
    tl.store(Z + o, tl.load(X + o) * tl.load(Y))


def told_inputs(rng: Any) -> Any:
    x, z = integers(rng, 256), empty(256)
    return (1,), (x, counters(1), z), [z], [7 * x]


fault("race", told, told_inputs, "told_unmet")


@triton.jit
def words(X, Y, Set, BUG: tl.constexpr):
    """CTA 0 tells CTA 1 a row through inline PTX."""
    o = tl.arange(0, WIDTH)
    if tl.program_id(0) == 0:
        tl.store(Y + o, tl.load(X + o))  # reports: word_relaxed, word_scope
        tl.debug_barrier()
        if BUG == "word_scope":
            memory.store_release(Set, 1, "cta")
        else:
            memory.store_release(Set, 1, "gpu")
    else:
        if BUG == "word_relaxed":
            while tl.load(Set, volatile=True) == 0:
                pass
        else:
            while memory.load_acquire(Set, "gpu") == 0:
                pass
        tl.store(Y + WIDTH + o, tl.load(Y + o))


def words_inputs(rng: Any) -> Any:
    x, y = integers(rng, 256), empty(2, 256)
    return (2,), (x, y, counters(1)), [y], [x.expand(2, 256)]


fault("race", words, words_inputs, "word_relaxed", "word_scope")
