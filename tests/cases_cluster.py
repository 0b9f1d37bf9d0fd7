"""Kernels for clusters and static layouts, used by the compile tests and on the GPU."""

import triton
import triton.language as tl

import tritonkittens.lang as tk


@tk.kernel
@triton.jit
def shared_loads(X, Y, TILE: tl.constexpr):
    """Each of two blocks loads one of two tiles for both; Y[2·block + i] = X[i]."""
    tiles = tk.allocate(TILE, 2)
    arrived = tk.semaphores(2)
    for i in tl.static_range(2):
        tk.expect(arrived[i], TILE.nbytes)
    tk.cluster_sync()  # both blocks' barriers are there
    rank = tk.cluster_rank()
    tk.load_async(tiles[rank], X, (rank, 0), arrived[rank], multicast=3)
    for i in tl.static_range(2):
        tk.wait(arrived[i], 0)
        tk.store(Y, tk.load(tiles[i], layout="memory"), (2 * tk.block_index() + i, 0))
    tk.cluster_sync()  # nobody leaves while the other still writes here


@tk.kernel
@triton.jit
def shared_views(X, Y, TILE: tl.constexpr):
    """Each of two blocks loads half of the rows of a tile for both; Y[block] = X."""
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    tk.expect(arrived[0], TILE.nbytes)
    tk.cluster_sync()  # both blocks' barriers are there
    rank = tk.cluster_rank()
    for i in tl.static_range(2):
        if rank == i:
            tk.load_async(tk.subtile(tile, TILE.rows // 2, TILE.cols, i, 0), X, (i, 0), arrived[0], multicast=3)
    tk.wait(arrived[0], 0)
    tk.store(Y, tk.load(tile, layout="memory"), (tk.block_index(), 0))
    tk.cluster_sync()  # nobody leaves while the other still writes here


@tk.kernel
@triton.jit
def exchanged(X, Y, N, TILE: tl.constexpr, BUG: tl.constexpr = False):
    """Each of two blocks sends N tiles to the other one: tiles of Y from those of X of the other block."""
    mine, theirs = tk.allocate(TILE), tk.allocate(TILE)
    loaded, arrived, read = tk.semaphores(1)[0], tk.semaphores(1)[0], tk.semaphores(1)[0]
    tk.cluster_sync()  # both blocks' barriers are there
    first, peer = tk.block_index() * N, 1 - tk.cluster_rank()
    for i in range(N):
        if not BUG:
            tk.wait(read, (i & 1) ^ 1, scope="cluster")  # the other block has read the tile before
        tk.expect(loaded, mine)
        tk.load_async(mine, X, (first + i, 0), loaded)
        tk.wait(loaded, i & 1)
        tk.expect(arrived, theirs)
        tk.store_cluster_async(theirs, mine, arrived, peer)
        tk.wait(arrived, i & 1)
        tk.store(Y, tk.load(theirs, layout="memory"), (first + i, 0))
        tk.arrive(read, cta=peer)
    tk.cluster_sync()  # nobody leaves while the other still writes here


@triton.jit
def _reads_shared_loads(Y, tiles, arrived):
    for i in tl.static_range(2):
        tk.wait(arrived[i], 0)
        tk.store(Y, tk.load(tiles[i], layout="memory"), (2 * tk.block_index() + i, 0))


@triton.jit
def _loads_for_both(X, tiles, arrived):
    rank = tk.cluster_rank()
    tk.load_async(tiles[rank], X, (rank, 0), arrived[rank], multicast=3)


@tk.kernel
@triton.jit
def shared_loads_of_roles(
    X, Y, TILE: tl.constexpr, WARPS: tl.constexpr, BEFORE: tl.constexpr, BEHIND: tl.constexpr, TOGETHER: tl.constexpr
):
    """`shared_loads` with a role of WARPS warps for the loads."""
    tiles = tk.allocate(TILE, 2)
    arrived = tk.semaphores(2)
    for i in tl.static_range(2):
        tk.expect(arrived[i], TILE.nbytes)
    if BEFORE:
        tk.cluster_sync()
    tk.specialize(
        ((_reads_shared_loads, (Y, tiles, arrived)), (_loads_for_both, (X, tiles, arrived))),
        warps=(4, WARPS),
        registers=(128, 48),
        cluster_sync=TOGETHER,
    )
    if BEHIND:
        tk.cluster_sync()


@tk.kernel
@triton.jit
def fixed_sum(X, Y):
    """Y = X summed over 16-row tiles, in a loop whose length is known when the kernel is compiled."""
    ROWS: tl.constexpr = tk.extent(X, 0)
    total = tk.zero(tk.rt(tk.fp32, 16, 64, "memory"))
    for i in tl.static_range(ROWS // 16):
        total += tk.load(X, tk.rt(tk.fp32, 16, 64, "memory"), (i, 0))
    tk.store(Y, total, (0, 0))


@tk.kernel
@triton.jit
def fixed_sum_of_tuple(G):
    """`fixed_sum` of layouts in tuples: (Y, (X,))."""
    ROWS: tl.constexpr = tk.extent(G[1][0], 0)
    total = tk.zero(tk.rt(tk.fp32, 16, 64, "memory"))
    for i in tl.static_range(ROWS // 16):
        total += tk.load(G[1][0], tk.rt(tk.fp32, 16, 64, "memory"), (i, 0))
    tk.store(G[0], total, (0, 0))


@tk.kernel
@triton.jit
def extents(X, out):
    """out = the three extents of X."""
    for axis in tl.static_range(3):
        tl.store(out + axis, tk.extent(X, axis))
