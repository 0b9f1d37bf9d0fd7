"""Kernels over explicit tiles and what they are tried with: compiled without a GPU by test_explicit.py, run by
gpu/test_explicit_gpu.py."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk

TORCH = {
    tk.bf16: torch.bfloat16,
    tk.fp16: torch.float16,
    tk.fp32: torch.float32,
    tk.fp8e4m3: torch.float8_e4m3fn,
    tk.fp8e5m2: torch.float8_e5m2,
    tk.int8: torch.int8,
    tk.int32: torch.int32,
    tk.int64: torch.int64,
}


# ---- TMA
# ---------------------------------------------------------------------------------------------------------------


@triton.jit
def place(X, RANK: tl.constexpr):
    """This block's tile: columns, rows and flattened leading dimensions of the grid."""
    r, c, lead = tk.block_index(1), tk.block_index(0), tk.block_index(2)
    if RANK == 1:
        return (c,)
    elif RANK == 2:
        return (r, c)
    elif RANK == 3:
        return (lead, r, c)
    elif RANK == 4:
        return (lead // tk.extent(X, 1), lead % tk.extent(X, 1), r, c)
    else:
        outer = lead // tk.extent(X, 2)
        return (outer // tk.extent(X, 1), outer % tk.extent(X, 1), lead % tk.extent(X, 2), r, c)


@tk.kernel
@triton.jit
def tma_copy(X, Y, TILE: tl.constexpr, RANK: tl.constexpr, KIND: tl.constexpr, POLICY: tl.constexpr = None):
    """Y = X, or Y combined with X, tile by tile, by TMA alone."""
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    where = place(X, RANK)
    tk.expect(arrived[0], tile)
    tk.load_async(tile, X, where, arrived[0], cache_policy=POLICY)
    tk.wait(arrived[0], 0)
    if KIND == "copy":
        tk.store_async(Y, tile, where, cache_policy=POLICY)
    elif KIND == "add":
        tk.store_add_async(Y, tile, where)
    elif KIND == "min":
        tk.store_min_async(Y, tile, where)
    else:
        tk.store_max_async(Y, tile, where)
    tk.store_wait()


@tk.kernel
@triton.jit
def tma_to_registers(X, Y, TILE: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr):
    """Y, of the tile's shape, is the tile (ROW, COL) of X, its part outside X included."""
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    tk.expect(arrived[0], tile)
    tk.load_async(tile, X, (ROW, COL), arrived[0])
    tk.wait(arrived[0], 0)
    tk.store(Y, tk.load(tile), (0, 0))


# ---- through registers
# ---------------------------------------------------------------------------------------------------


@tk.kernel
@triton.jit
def through_shared(X, Y, TILE: tl.constexpr, RANK: tl.constexpr, FILL: tl.constexpr):
    """Y = X over tiles, without TMA: load_into, then store of the shared tile. FILL reaches Y only where Y is larger
    than X."""
    tile = tk.allocate(TILE)
    where = place(X, RANK)
    tk.load_into(tile, X, where, fill=FILL)
    tk.sync()
    tk.store(Y, tile, where)


@tk.kernel
@triton.jit
def through_registers(X, Y, TILE: tl.constexpr, RANK: tl.constexpr, FILL: tl.constexpr):
    """Y = X over register tiles or vectors."""
    where = place(X, RANK)
    tk.store(Y, tk.load(X, TILE, where, fill=FILL), where)


@tk.kernel
@triton.jit
def by_cp_async(X, Y, TILE: tl.constexpr, STAGES: tl.constexpr):
    """Y = X along a row of tiles, STAGES copies under way."""
    ring = tk.allocate(TILE, stages=STAGES)
    tiles = tk.ceil_div(tk.extent(X, 1), TILE.cols)
    for i in tl.static_range(STAGES):
        tk.load_async(ring[i], X, (tk.block_index(), i))
    for i in range(tiles):
        tk.load_async_wait(STAGES - 1)
        tk.store(Y, ring[i % STAGES], (tk.block_index(), i))
        tk.sync()
        tk.load_async(ring[i % STAGES], X, (tk.block_index(), i + STAGES))
    tk.load_async_wait()


@tk.kernel
@triton.jit
def gather_scatter(X, FROM, TO, Y, TILE: tl.constexpr, FILL: tl.constexpr):
    """Y[TO[i]] = X[FROM[i]] for the rows of one tile, for every column tile (blocks)."""
    source = tk.load(FROM, tk.rv(tk.int32, TILE.rows), (0,), fill=-1)
    target = tk.load(TO, tk.rv(tk.int32, TILE.rows), (0,), fill=-1)
    tile = tk.gather_rows(X, TILE, source, tk.block_index(), fill=FILL)
    tk.scatter_rows(Y, tile, target, tk.block_index())


@tk.kernel
@triton.jit
def bytes_copy(X, Y, VECTOR: tl.constexpr, nbytes, WHOLE: tl.constexpr):
    """The first bytes of X to Y by bulk copies of raw bytes, through a shared vector."""
    vector = tk.allocate(VECTOR)
    arrived = tk.semaphores(1)
    if WHOLE:
        tk.expect(arrived[0], vector)
        tk.load_bytes_async(vector, X, arrived[0])
        tk.wait(arrived[0], 0)
        tk.store_bytes_async(Y, vector)
    else:
        tk.expect(arrived[0], 64)
        tk.load_bytes_async(vector, X, arrived[0], 64)
        tk.wait(arrived[0], 0)
        tk.store_bytes_async(Y, vector, nbytes)
    tk.store_read_wait()


@tk.kernel
@triton.jit
def views(X, Y, TILE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Y = X through views of one shared tile: in by view, out as a whole."""
    tile = tk.allocate(TILE)
    tk.store(tile, tk.zero(tk.rt(TILE.dtype, TILE.rows, TILE.cols)))
    tk.sync()
    for r in tl.static_range(TILE.rows // ROWS):
        for c in tl.static_range(TILE.cols // COLS):
            view = tk.subtile(tile, ROWS, COLS, r, c)
            tk.load_into(view, X, (r, c))
    tk.sync()
    tk.store(Y, tk.load(tile), (0, 0))


@tk.kernel
@triton.jit
def views_by_tma(X, Y, Z, TILE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Y and Z = matrix 1 of X with its views, ROWS × COLS, in reverse order: in by view, out as a whole (Y) and by view
    (Z)."""
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    tk.expect(arrived[0], tile)
    DOWN: tl.constexpr = TILE.rows // ROWS
    ACROSS: tl.constexpr = TILE.cols // COLS
    for r in tl.static_range(DOWN):
        for c in tl.static_range(ACROSS):
            tk.load_async(tk.subtile(tile, ROWS, COLS, r, c), X, (1, DOWN - 1 - r, ACROSS - 1 - c), arrived[0])
    tk.wait(arrived[0], 0)
    tk.store(Y, tk.load(tile), (0, 0))
    for r in tl.static_range(DOWN):
        for c in tl.static_range(ACROSS):
            tk.store_async(Z, tk.subtile(tile, ROWS, COLS, r, c), (r, c))
    tk.store_wait()


@tk.kernel
@triton.jit
def elements_in_parts(X, Y, Z, parts, rows, TILE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Y = 2·X part by part in a shared tile, Z the same with its bands of rows in reverse order. `parts`, `rows`: how
    many parts and bands there are, at run time."""
    tile = tk.allocate(TILE)
    tk.load_into(tile, X, (0, 0))
    tk.sync()
    for part in range(parts):
        tk.store_elements(tile, tk.load_elements(tile, part, PARTS).to(tl.float32) * 2, part, PARTS)
    tk.sync()
    tk.store(Y, tk.load(tile), (0, 0))
    tk.fence_async()
    for row in range(rows):
        tk.store_async(Z, tk.subtile(tile, ROWS, TILE.cols, rows - 1 - row), (row, 0))
    tk.store_wait()


# ---- products
# ------------------------------------------------------------------------------------------------------------


@triton.jit
def multiply(a, b, acc, KIND: tl.constexpr):
    if KIND == "AB":
        return tk.mma_AB(a, b, acc)
    elif KIND == "ABt":
        return tk.mma_ABt(a, b, acc)
    elif KIND == "AtB":
        return tk.mma_AtB(a, b, acc)
    else:
        return tk.mma_AtBt(a, b, acc)


@tk.kernel
@triton.jit
def product(
    A,
    B,
    C,
    KIND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DTYPE: tl.constexpr,
    SUM: tl.constexpr,
    FROM: tl.constexpr,
):
    """C += the product of one tile; FROM says where A lives."""
    A_T: tl.constexpr = KIND == "AtB" or KIND == "AtBt"
    B_T: tl.constexpr = KIND == "ABt" or KIND == "AtBt"
    a = tk.allocate(tk.st(DTYPE, K if A_T else M, M if A_T else K))
    b = tk.allocate(tk.st(DTYPE, N if B_T else K, K if B_T else N))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    acc = tk.load(C, tk.rt(SUM, M, N), (0, 0))
    if FROM == "registers":
        acc = multiply(tk.load(a), b, acc, KIND)
    else:
        acc = multiply(a, b, acc, KIND)
    tk.store(C, acc, (0, 0))


class Product(NamedTuple):
    kind: str
    m: int
    n: int
    k: int
    dtype: tl.dtype = tk.bf16
    a: str = "shared"
    warps: int = 4

    @property
    def sum(self):
        return tk.int32 if self.dtype == tk.int8 else tk.fp32

    @property
    def shapes(self):
        a = (self.k, self.m) if self.kind in ("AtB", "AtBt") else (self.m, self.k)
        b = (self.n, self.k) if self.kind in ("ABt", "AtBt") else (self.k, self.n)
        return a, b, (self.m, self.n)

    @property
    def arguments(self):
        return self.kind, self.m, self.n, self.k, self.dtype, self.sum, self.a

    def __str__(self):
        return f"{self.kind}-{self.m}x{self.n}x{self.k}-{self.dtype}-{self.a}-{self.warps}w"


WGMMA = [
    *(
        Product(kind, 64, 64, 64, dtype, a)
        for kind in ("AB", "ABt", "AtB", "AtBt")
        for dtype in (tk.bf16, tk.fp16)
        for a in ("shared", "registers")
    ),
    *(
        Product("ABt", 64, 64, 64, dtype, a)
        for dtype in (tk.fp32, tk.fp8e4m3, tk.fp8e5m2, tk.int8)
        for a in ("shared", "registers")
    ),
    *(Product("AtBt", 64, 64, 64, dtype, "registers") for dtype in (tk.fp32, tk.fp8e4m3, tk.int8)),
    *(Product("AB", 64, 176, 80, tk.bf16, a) for a in ("shared", "registers")),
    Product("ABt", 128, 48, 96, warps=8),
    Product("AtB", 192, 96, 48),
    Product("AB", 64, 256, 16),
    Product("AtBt", 128, 176, 32, a="registers"),
    Product("ABt", 64, 96, 96, tk.fp8e4m3),
    Product("ABt", 128, 48, 32, tk.int8, warps=8),
    Product("ABt", 64, 16, 32, tk.fp32, "registers"),
]
MMA_SYNC = [
    *(
        Product(kind, 32, 64, 32, dtype, a)
        for kind in ("AB", "ABt", "AtB", "AtBt")
        for dtype in (tk.bf16, tk.fp32, tk.int8)
        for a in ("shared", "registers")
    ),
    *(Product("ABt", 64, 32, 64, dtype, warps=1) for dtype in (tk.fp16, tk.fp8e4m3, tk.fp8e5m2, tk.bf16)),
    Product("AB", 48, 80, 96, warps=2),
    Product("ABt", 16, 176, 48, warps=1),
    Product("ABt", 96, 48, 64, tk.fp8e4m3, warps=4),
    Product("AtB", 96, 48, 64),
]
INSTRUCTION = {
    tk.bf16: "f32.bf16.bf16",
    tk.fp16: "f32.f16.f16",
    tk.fp32: "f32.tf32.tf32",
    tk.fp8e4m3: "f32.e4m3.e4m3",
    tk.fp8e5m2: "f32.e5m2.e5m2",
    tk.int8: "s32.s8.s8",
}


@tk.kernel
@triton.jit
def product_of_views(A, B, C, DTYPE: tl.constexpr):
    """C = the right half of A (64×128 in shared memory) times the lower half of B (128×64), through views that keep
    swizzle atoms whole."""
    a, b = tk.allocate(tk.st(DTYPE, 64, 128)), tk.allocate(tk.st(DTYPE, 128, 64))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    tk.store(C, tk.mm_AB(tk.subtile(a, 64, 64, 0, 1), tk.subtile(b, 64, 64, 1, 0)), (0, 0))


@tk.kernel
@triton.jit
def products_of_bands(A, B, C, ROWS: tl.constexpr):
    """C = A·Bᵀ by a product for each of three bands of A, which lies in one shared tile of 3·ROWS rows."""
    a, b = tk.allocate(tk.st(tk.bf16, 3 * ROWS, 64)), tk.allocate(tk.st(tk.bf16, 64, 64))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    for band in tl.static_range(3):
        tk.store(C, tk.mm_ABt(tk.subtile(a, ROWS, 64, band, 0), b), (band, 0))


@tk.kernel
@triton.jit
def overlapped(A, B, D, C, E, DTYPE: tl.constexpr, N: tl.constexpr):
    """C = A·B and E = A·D, the second under way while the first is read; then C += A·B once more, chained onto a
    product under way."""
    a, b, d = tk.allocate(tk.st(DTYPE, 64, 64)), tk.allocate(tk.st(DTYPE, N, 64)), tk.allocate(tk.st(DTYPE, N, 64))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.load_into(d, D, (0, 0))
    tk.fence_async()
    tk.sync()
    first = tk.mm_ABt(a, b, wait=False)
    second = tk.mm_ABt(tk.load(a), d, wait=False)
    c = tk.mma_wait(first, leave=second)
    again = tk.mma_ABt(a, b, c + 1, wait=False)
    again = tk.mma_ABt(a, d, again, wait=False)
    e = tk.mma_wait(second, leave=again)
    tk.store(E, e, (0, 0))
    tk.store(C, tk.mma_wait(again), (0, 0))


@tk.kernel
@triton.jit
def one_after_another(A, B, C, DTYPE: tl.constexpr, N: tl.constexpr):
    """C = 2·A·Bᵀ of the first N rows of B + A·Bᵀ of the second, the second product in the registers of the first."""
    a, b = tk.allocate(tk.st(DTYPE, 64, 64)), tk.allocate(tk.st(DTYPE, 2 * N, 64))
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    product = tk.mm_ABt(a, tk.subtile(b, N, 64, 0, 0))
    total = tk.pin(product * 2)
    product = tk.mm_ABt(a, tk.subtile(b, N, 64, 1, 0), into=product)
    tk.store(C, total + product, (0, 0))


@tk.kernel
@triton.jit
def contiguous_ring(A, B, C, TILE: tl.constexpr, STORED: tl.constexpr):
    """C = A·B₀ + A·B₁, where B's tiles ("NK" or "KN" as they are stored) have no power of two of columns and each
    product is one instruction a step."""
    DEPTH: tl.constexpr = TILE.cols if STORED == "NK" else TILE.rows
    a, ring = tk.allocate(tk.st(TILE.dtype, 64, DEPTH)), tk.allocate(TILE, stages=2)
    arrived = tk.semaphores(2)
    for slot in range(2):
        tk.expect(arrived[slot], ring.nbytes)
        tk.load_async(ring[slot], B, (slot, 0), arrived[slot])
    tk.load_into(a, A, (0, 0))
    tk.fence_async()
    tk.sync()
    tk.wait(arrived[0], 0)
    acc = tk.mm_ABt(a, ring[0], wait=False) if STORED == "NK" else tk.mm_AB(a, ring[0], wait=False)
    tk.wait(arrived[1], 0)
    acc = tk.mma_ABt(a, ring[1], acc, wait=False) if STORED == "NK" else tk.mma_AB(a, ring[1], acc, wait=False)
    tk.store(C, tk.mma_wait(acc), (0, 0))


@tk.kernel
@triton.jit
def kept_in_flight(A, B, C, DTYPE: tl.constexpr):
    """C = A·Bᵀ over a depth of several tiles, the newest product always under way (mma_begin, mma_retire)."""
    ring_a, ring_b = tk.allocate(tk.st(DTYPE, 64, 64), stages=2), tk.allocate(tk.st(DTYPE, 64, 64), stages=2)
    acc = tk.mma_begin(tk.zero(tk.rt(tk.fp32, 64, 64)), DTYPE)
    for i in range(tk.ceil_div(tk.extent(A, 1), 64)):
        a, b = ring_a[i % 2], ring_b[i % 2]
        tk.load_into(a, A, (0, i))
        tk.load_into(b, B, (0, i))
        tk.fence_async()
        tk.sync()
        acc = tk.mma_ABt(a, b, acc, wait=False)
        acc = tk.mma_retire(acc)
        tk.sync()
    tk.store(C, tk.mma_wait(acc), (0, 0))


@tk.kernel
@triton.jit
def begun_at_zero(A, B, C, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """C = A·Bᵀ over a depth of two tiles in an accumulator that begins at zero (mma_zero): 128 rows are two products
    one below the other."""
    ring_a, ring_b = tk.allocate(tk.st(DTYPE, ROWS, 64), stages=2), tk.allocate(tk.st(DTYPE, 64, 64), stages=2)
    for i in tl.static_range(2):
        tk.load_into(ring_a[i], A, (0, i))
        tk.load_into(ring_b[i], B, (0, i))
    tk.fence_async()
    tk.sync()
    acc = tk.mma_zero(tk.rt(tk.fp32, ROWS, 64), DTYPE)
    for i in tl.static_range(2):
        acc = tk.mma_ABt(ring_a[i], ring_b[i], acc, wait=False)
    tk.store(C, tk.mma_wait(acc), (0, 0))


# ---- roles and synchronisation
# -----------------------------------------------------------------------------------------------


@triton.jit
def ring_producer(A, B, a, b, pipe):
    state = tk.pipeline_state(pipe)
    for i in range(tk.ceil_div(tk.extent(A, 1), 64)):
        tk.producer_acquire(pipe, state)
        tk.producer_commit(pipe, state, (a, b))
        tk.load_async(a[state.index], A, (tk.block_index(0), i), pipe.full[state.index])
        tk.load_async(b[state.index], B, (i, tk.block_index(1)), pipe.full[state.index])
        state = tk.advance(state)


@triton.jit
def ring_consumer(A, C, a, b, c, pipe, COLS: tl.constexpr, PER: tl.constexpr):
    state = tk.pipeline_state(pipe)
    acc = tk.zero(tk.rt(tk.fp32, 64, COLS))
    for _ in range(tk.ceil_div(tk.extent(A, 1), 64)):
        tk.consumer_wait(pipe, state)
        acc = tk.mma_AB(a[state.index], b[state.index], acc)
        tk.consumer_release(pipe, state, per=PER)
        state = tk.advance(state)
    tk.store(c, acc)
    tk.fence_async()
    tk.sync()
    tk.store_async(C, c, (tk.block_index(0), tk.block_index(1)))
    tk.store_wait()


@tk.kernel
@triton.jit
def ring_gemm(A, B, C, COLS: tl.constexpr, STAGES: tl.constexpr, PER: tl.constexpr, REGISTERS: tl.constexpr):
    """C = A·B with one producer warp and one consumer warpgroup over a ring of STAGES slots."""
    a, b = tk.allocate(tk.st(tk.bf16, 64, 64), stages=STAGES), tk.allocate(tk.st(tk.bf16, 64, COLS), stages=STAGES)
    c = tk.allocate(tk.st(tk.bf16, 64, COLS))
    pipe = tk.pipeline(STAGES, empty_arrivals=4 if PER == "warp" else 1)
    tk.specialize(
        ((ring_consumer, (A, C, a, b, c, pipe, COLS, PER)), (ring_producer, (A, B, a, b, pipe))),
        warps=(4, 1),
        registers=REGISTERS,
    )


@triton.jit
def first_speaker(Y, note):
    for i in range(8):
        tk.named_sync(8, 256)  # until the other has written
        x = tk.load(note)
        tk.store(Y, x + i, (i,))
        tk.named_arrive(9, 256)


@triton.jit
def second_speaker(X, note):
    for i in range(8):
        tk.store(note, tk.load(X, tk.rv(tk.fp32, 128), (i,)))
        tk.named_arrive(8, 256)
        tk.named_sync(9, 256)  # until it has been read


@tk.kernel
@triton.jit
def conversation(X, Y):
    """Y[i] = X[i] + i over eight vectors, handed over between two roles by named barriers."""
    note = tk.allocate(tk.sv(tk.fp32, 128))
    tk.specialize(((first_speaker, (Y, note)), (second_speaker, (X, note))), warps=(4, 4))


@tk.kernel
@triton.jit
def neighbours(Y, ROUNDS: tl.constexpr, PER: tl.constexpr):
    """The blocks of a cluster wait for each other, ROUNDS times; Y gets each block's rank.

    Two semaphores take turns: a neighbour may be one round ahead, and on a single one it would complete the next phase
    before this block has seen the last.
    """
    sem = tk.semaphores(2, arrivals=4 if PER == "warp" else 1)
    tk.cluster_sync()
    rank = tk.cluster_rank()
    for i in range(ROUNDS):
        tk.arrive(sem[i % 2], per=PER, cta=rank ^ 1)
        tk.wait(sem[i % 2], i // 2 % 2, scope="cluster")
    tk.cluster_sync()
    tk.store(Y, tk.zero(tk.rv(tk.int32, 16)) + rank, (tk.block_index(),))


@tk.kernel
@triton.jit
def marks(G):
    """Each of two roles of every block marks twice, at its own places; a prefetch and the dependent-launch pair on the
    way."""
    tk.dependency_wait()
    tk.specialize(((mark_twice, (G, 0)), (mark_twice, (G, 2))), warps=(4, 2))
    tk.dependents_launch()


@triton.jit
def mark_twice(G, FIRST: tl.constexpr):
    row = tk.block_index() * 4 + FIRST
    tk.mark(G, row, FIRST)
    tk.prefetch(G, tk.sv(tk.int64, 16) if FIRST == 0 else tk.rt(tk.int64, 16, 16), (0, 0))
    tk.mark(G, row + 1, FIRST + 1)


@tk.kernel
@triton.jit
def stuck(Y):
    """Waits for what never comes."""
    sem = tk.semaphores(1)
    tk.careful_wait(sem[0], 0, limit_ns=50_000_000, name="godot")
    tk.store(Y, tk.zero(tk.rv(tk.fp32, 16)), (0,))


@tk.kernel
@triton.jit
def stuck_plainly(Y):
    sem = tk.semaphores(1)
    tk.wait(sem[0], 0)
    tk.store(Y, tk.zero(tk.rv(tk.fp32, 16)), (0,))


@tk.kernel
@triton.jit
def printer(X):
    x = tk.load(X, tk.rt(tk.fp32, 16, 16), (0, 0))
    tk.print("block", tk.block_index())
    tk.print("largest", tk.max(x))
    tk.print("tile", x)


# ---- Blackwell
# ---------------------------------------------------------------------------------------------------------------


@tk.kernel
@triton.jit
def tcgen05_product(
    A,
    B,
    C,
    KIND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DTYPE: tl.constexpr,
    HOW: tl.constexpr,
):
    A_T: tl.constexpr = KIND == "AtB" or KIND == "AtBt"
    B_T: tl.constexpr = KIND == "ABt" or KIND == "AtBt"
    a = tk.allocate(tk.st(DTYPE, K if A_T else M, M if A_T else K))
    b = tk.allocate(tk.st(DTYPE, N if B_T else K, K if B_T else N))
    done = tk.semaphores(1)
    tk.load_into(a, A, (0, 0))
    tk.load_into(b, B, (0, 0))
    tk.fence_async()
    tk.sync()
    acc = tk.tensor_allocator(tk.tt(tk.int32 if DTYPE == tk.int8 else tk.fp32, M, N))
    acc = tk.zero(acc)
    if HOW == "tensor memory":
        left = tk.tensor_allocator(tk.tt(DTYPE, M, K))
        tk.store(left, tk.load(a))
        acc = multiply(left, b, acc, KIND)
    elif HOW == "in flight":
        acc = tk.mma_retire(tk.mma_AB(a, b, tk.mma_begin(acc), wait=False))
        acc = tk.mma_wait(tk.mma_AB(a, b, acc, wait=False))
    elif HOW == "semaphore":
        acc = tk.mma_AB(a, b, acc, arrived=done[0])
        tk.wait(done[0], 0)
    else:
        acc = multiply(a, b, acc, KIND)
    tk.store(C, tk.load(acc), (0, 0))


@tk.kernel
@triton.jit
def tensor_views(X, Y, COLS: tl.constexpr, PART: tl.constexpr):
    """Y = 2·X through column views of a tensor-memory tile."""
    tile = tk.tensor_allocator(tk.tt(tk.fp32, 128, COLS))
    tk.store(tile, tk.load(X, tk.rt(tk.fp32, 128, COLS, "row"), (0, 0)))
    for i in tl.static_range(COLS // PART):
        part = tk.subtile(tile, 128, PART, 0, i)
        tk.store(part, tk.load(part) * 2)
    tk.store(Y, tk.load(tile), (0, 0))


@tk.kernel
@triton.jit
def zeros_and_branch(OUT, number):
    """OUT[0] = OUT[1] = 0, which the compiler cannot tell; OUT[2] = 1 where `number` is odd, in a branch that stays
    one."""
    tl.store(OUT, tk.opaque_zero())
    tl.store(OUT + 1, tk.opaque_zero("z"))
    if number % 2 == 1:
        tk.scheduling_barrier(number)
        tl.store(OUT + 2, 1)


# ---------------------------------------------------------------- claims


@tk.kernel
@triton.jit
def claimed_sums(Y, WORDS, SUMS: tl.constexpr, LENGTH: tl.constexpr):
    """Every block adds its number, from 1 on, to SUMS rows that nobody has made zeros of, each beginning with
    another."""
    staged = tk.allocate(tk.sv(tk.fp32, LENGTH))
    block = tk.block_index()
    for i in range(SUMS):
        row = (block + i) % SUMS
        tk.store_read_wait(0)
        tk.sync()
        tk.store(staged, tk.full(tk.rv(tk.fp32, LENGTH), block + 1))
        tk.fence_async()
        tk.sync()
        word = WORDS.pointer + row
        tk.mark_initialized(word, tk.store_or_add_bytes_async(Y.pointer + row * LENGTH, staged, word))
    tk.store_wait(0)
