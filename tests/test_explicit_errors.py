"""Wrong use of explicit tiles: refused when the kernel is compiled, in one message that quotes the input and states the
rule."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tritonkittens.lang as tk
from tests import cases_explicit as cases
from tests.fake_libcuda import FakeCuda, build
from tests.util import meta
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.launch import Launcher


@tk.kernel
@triton.jit
def wrong_product(X, WHAT: tl.constexpr):
    a, b = tk.allocate(tk.st(tk.bf16, 64, 64)), tk.allocate(tk.st(tk.bf16, 64, 64))
    acc = tk.zero(tk.rt(tk.fp32, 64, 64))
    if WHAT == "depth":
        tk.mma_AB(a, tk.allocate(tk.st(tk.bf16, 32, 64)), acc)
    elif WHAT == "accumulator shape":
        tk.mma_AB(a, b, tk.zero(tk.rt(tk.fp32, 64, 128)))
    elif WHAT == "operand types":
        tk.mma_AB(a, tk.allocate(tk.st(tk.fp16, 64, 64)), acc)
    elif WHAT == "accumulator type":
        tk.mma_AB(a, b, tk.zero(tk.rt(tk.bf16, 64, 64)))
    elif WHAT == "integer accumulator":
        i = tk.allocate(tk.st(tk.int8, 64, 64))
        tk.mma_ABt(i, i, acc)
    elif WHAT == "operand type":
        tk.mma_AB(tk.zero(tk.rt(tk.int32, 64, 64)), b, acc)
    elif WHAT == "B in registers":
        tk.mma_AB(a, tk.load(b), acc)
    elif WHAT == "vector":
        tk.mma_AB(tk.allocate(tk.sv(tk.bf16, 64)), b, acc)
    elif WHAT == "ring":
        tk.mma_AB(tk.allocate(tk.st(tk.bf16, 64, 64), stages=2), b, acc)
    elif WHAT == "cut atom":
        tk.mma_AB(tk.subtile(a, 64, 32, 0, 1), tk.subtile(b, 32, 64, 0, 0), acc)
    elif WHAT == "arrived":
        tk.mma_AB(a, b, acc, arrived=tk.semaphores(1)[0])
    elif WHAT == "width in flight":
        f = tk.allocate(tk.st(tk.fp8e4m3, 64, 64))
        tk.mma_ABt(f, f, tk.mma_begin(acc), wait=False)
    elif WHAT == "contiguous, depth along the rows":
        tk.mma_AB(a, tk.allocate(tk.st(tk.bf16, 96, 64, contiguous=True)), tk.zero(tk.rt(tk.fp32, 64, 64)))
    elif WHAT == "contiguous, A in registers":
        tk.mm_ABt(tk.load(a), tk.allocate(tk.st(tk.bf16, 96, 64, contiguous=True)))
    elif WHAT == "contiguous, depth along the columns":
        tk.mm_ABt(tk.allocate(tk.st(tk.bf16, 64, 192)), tk.allocate(tk.st(tk.bf16, 64, 192, contiguous=True)))
    elif WHAT == "pin":
        tk.pin(tk.zero(tk.rt(tk.bf16, 64, 64)))
    elif WHAT == "retire registers":
        tk.mma_retire(tk.mm_AB(tk.load(a), b, wait=False))


PRODUCTS = {
    "depth": "mma_AB: A is 64×64 bf16 in shared and B is 32×64 bf16 in shared (as M×K and K×N): their K, 64 and 32, "
    "differ",
    "accumulator shape": "mma_AB: A is 64×64 bf16 in shared, B is 64×64 bf16 in shared (as M×K and K×N): the "
    "accumulator must "
    "be 64×64, got 64×128",
    "contiguous, depth along the rows": "mma_AB: A is 64×64 bf16 in shared and B is 96×64 bf16 in shared (as M×K and "
    "K×N): their K, 64 and 96, differ",
    "contiguous, A in registers": "mm_ABt: B is the contiguous st(bf16, 96, 64, contiguous): it must be stored N × K "
    "with N at most 256, and A 64 rows in "
    "shared memory",
    "contiguous, depth along the columns": "mm_ABt: B is the contiguous st(bf16, 64, 192, contiguous): it must be "
    "stored K × N with N at most 256, and A 64 "
    "rows in shared memory",
    "pin": "pin: needs a tile of 32-bit elements, got bf16",
    "operand types": "mma_AB: A is bf16 and B is fp16; operands must have one element type (fp8 kinds may mix)",
    "accumulator type": "mma_AB: operands of bf16 accumulate in fp32, got an accumulator of bf16",
    "integer accumulator": "mma_ABt: operands of int8 accumulate in int32, got an accumulator of fp32",
    "operand type": "mma_AB: A is 64×64 int32 in registers; the tensor cores take bf16, fp16, fp32, int8, fp8e4m3, "
    "fp8e5m2",
    "B in registers": "mma_AB: B is 64×64 bf16 in registers; wgmma reads B from shared memory: store it to an st first",
    "vector": "mma_AB: A must be a tile of two axes, got shape [64]",
    "ring": "mma_AB: A is a ring of st(bf16, 64, 64); take a slot first, ring[slot]",
    "cut atom": "mma_AB: A is a view of st(bf16, 64, 64) that cuts a swizzle atom; the tensor cores cannot read it",
    "arrived": "mma_AB(arrived=…): only a product into tensor memory completes on a semaphore; use wait=False and "
    "mma_wait",
    "width in flight": "mma_ABt: the accumulator in flight was begun for operands of another width than fp8e4m3; "
    "begin it with "
    "mma_begin(acc, fp8e4m3)",
    "retire registers": "mma_retire: the newest product reads A from registers, which must stay untouched; wait for "
    "it with mma_wait",
}


def refusal(kernel, *args, error=tk.TileError, **options):
    """The message, without the place in the source that follows it."""
    with pytest.raises(error) as caught:
        kernel.compile(*args, **options)
    return str(caught.value).split(" [in ")[0]


@pytest.mark.parametrize("what", PRODUCTS)
def test_products(what):
    assert refusal(wrong_product, tk.gl(meta(64, 64)), what) == PRODUCTS[what]


@pytest.mark.parametrize("dtype", [tk.fp32, tk.fp8e4m3, tk.fp8e5m2, tk.int8], ids=str)
@pytest.mark.parametrize(("kind", "what"), [("AB", "B"), ("AtB", "A"), ("AtBt", "A")])
def test_transposes_that_wgmma_lacks(dtype, kind, what):
    p = cases.Product(kind, 64, 64, 64, dtype)
    tensors = [tk.gl(meta(*s, dtype=cases.TORCH[d])) for s, d in zip(p.shapes, (dtype, dtype, p.sum))]
    bits = dtype.primitive_bitwidth
    assert refusal(cases.product, *tensors, *p.arguments) == (
        f"mma_{kind}: {what} of {name_of(dtype)} is stored as 64×64 with its depth along the rows; wgmma reads "
        f"{bits}-bit operands with "
        f"the depth along the columns only: "
        "use mma_ABt with K-major tiles"
    )


@tk.kernel
@triton.jit
def wrong_tiles(X, Y, WHAT: tl.constexpr):
    TILE: tl.constexpr = tk.st(tk.bf16, 64, 64)
    if WHAT == "shared budget":
        tk.allocate(TILE, stages=21)
        tk.allocate(tk.sv(tk.fp32, 128))
        tk.semaphores(4)
        tk.allocate(tk.st(tk.bf16, 256, 128))
    elif WHAT == "stages":
        tk.allocate(TILE, stages=0)
    elif WHAT == "register type":
        tk.allocate(tk.rt(tk.bf16, 64, 64))
    elif WHAT == "slot":
        tk.allocate(TILE, stages=2)[2]
    elif WHAT == "contiguous load":
        tk.load(tk.allocate(tk.st(tk.bf16, 96, 64, contiguous=True)))
    elif WHAT == "contiguous store":
        tk.store(tk.allocate(tk.st(tk.bf16, 96, 64, contiguous=True)), tk.zero(tk.rt(tk.bf16, 96, 64)))
    elif WHAT == "contiguous TMA store":
        tk.store_async(X, tk.allocate(tk.st(tk.bf16, 96, 64, contiguous=True)), (0, 0))
    elif WHAT == "contiguous multicast":
        sem = tk.semaphores(1)
        tile = tk.allocate(tk.st(tk.bf16, 96, 64, contiguous=True))
        tk.load_async(tile, X, (0, 0), sem[0], multicast=3)
    elif WHAT == "no ring":
        tk.allocate(TILE)[0]
    elif WHAT == "view outside":
        tk.subtile(tk.allocate(TILE), 32, 64, 2, 0)
    elif WHAT == "view before":
        tk.subtile(tk.allocate(TILE), 32, 64, -1, 0)
    elif WHAT == "view of composite":
        tk.subtile(tk.allocate(tk.st(tk.bf16, 64, 96)), 64, 48)
    elif WHAT == "composite rows":
        tk.subtile(tk.allocate(tk.st(tk.bf16, 96, 64)), 48, 64)
    elif WHAT == "view of contiguous":
        tk.subtile(tk.allocate(tk.st(tk.bf16, 96, 64, contiguous=True)), 32, 64)
    elif WHAT == "view of ring":
        tk.subtile(tk.allocate(TILE, stages=2), 32, 64)
    elif WHAT == "view of columns at a row":
        tk.subtile(tk.allocate(TILE), 32, 32, tl.program_id(0))
    elif WHAT == "view of half an atom at a row":
        tk.subtile(tk.allocate(TILE), 4, 64, tl.program_id(0))
    elif WHAT == "composite view at a row":
        tk.subtile(tk.allocate(tk.st(tk.bf16, 64, 96)), 32, 96, tl.program_id(0))
    elif WHAT == "wide view at a row":
        tk.subtile(tk.allocate(tk.st(tk.bf16, 64, 128)), 32, 128, tl.program_id(0))
    elif WHAT == "view of a view at a row":
        tk.subtile(tk.subtile(tk.allocate(tk.st(tk.bf16, 64, 128)), 64, 64, 0, 1), 16, 64, tl.program_id(0))
    elif WHAT == "elements of a view":
        tk.load_elements(tk.subtile(tk.allocate(TILE), 32, 64, 1, 0))
    elif WHAT == "elements of a ring":
        tk.load_elements(tk.allocate(TILE, stages=2))
    elif WHAT == "elements of a tile in pieces":
        tk.store_elements(tk.allocate(tk.st(tk.bf16, 64, 96)), tk.zero(tk.rt(tk.bf16, 64, 96)))
    elif WHAT == "too many parts":
        tk.load_elements(tk.allocate(TILE), 0, 8)
    elif WHAT == "parts of the run time":
        tk.load_elements(tk.allocate(TILE), 0, tl.program_id(0))
    elif WHAT == "view of no vector":
        tk.subvector(tk.allocate(tk.st(tk.bf16, 64, 64)), 32)
    elif WHAT == "vector view outside":
        tk.subvector(tk.allocate(tk.sv(tk.fp32, 192)), 64, 3)
    elif WHAT == "vector view across pieces":
        tk.subvector(tk.allocate(tk.sv(tk.fp32, 192)), 96, 1)
    elif WHAT == "tile from an element on":
        tk.load(tk.allocate(tk.sv(tk.fp32, 64)), tk.rt(tk.fp32, 16, 16), 3)
    elif WHAT == "from an element of halves on":
        tk.load(tk.allocate(tk.sv(tk.bf16, 64)), tk.rv(tk.bf16, 16), 3)
    elif WHAT == "from an element of pieces on":
        tk.load(tk.allocate(tk.sv(tk.fp32, 192)), tk.rv(tk.fp32, 16), 3)
    elif WHAT == "from an element of another type on":
        tk.load(tk.allocate(tk.sv(tk.fp32, 64)), tk.rv(tk.int32, 16), 3)
    elif WHAT == "view of registers":
        tk.subtile(tk.zero(tk.rt(tk.fp32, 64, 64)), 32, 64)
    elif WHAT == "rank":
        tk.load(X, tk.rt(tk.bf16, 64, 64), (0, 0, 0))
    elif WHAT == "rank of store":
        tk.store(X, tk.zero(tk.rt(tk.bf16, 64, 64)), 0)
    elif WHAT == "type of load":
        tk.load(X, tk.rt(tk.fp16, 64, 64), (0, 0))
    elif WHAT == "what to load":
        tk.load(X, 64, (0, 0))
    elif WHAT == "fill":
        tk.load(X, tk.rt(tk.bf16, 64, 64), (0, 0), fill="nothing")
    elif WHAT == "tile of a vector":
        tk.load(Y, tk.rt(tk.fp32, 64, 64), (0,))
    elif WHAT == "no global":
        tk.load_into(tk.allocate(TILE), 3, (0, 0))
    elif WHAT == "no descriptor":
        tk.load_async(tk.allocate(tk.st(tk.bf16, 32, 64)), X, (0, 0), tk.semaphores(1)[0])
    elif WHAT == "no descriptors at all":
        tk.store_async(Y, tk.allocate(tk.sv(tk.fp32, 64)), (0,))
    elif WHAT == "TMA of registers":
        tk.store_async(X, tk.zero(tk.rt(tk.bf16, 64, 64)), (0, 0))
    elif WHAT == "TMA of a ring":
        tk.store_async(X, tk.allocate(TILE, stages=2), (0, 0))
    elif WHAT == "policy":
        tk.store_async(X, tk.allocate(TILE), (0, 0), cache_policy="keep")
    elif WHAT == "policy of cp.async":
        tk.load_async(tk.allocate(TILE), X, (0, 0), cache_policy="evict_first")
    elif WHAT == "semaphore":
        tk.load_async(tk.allocate(TILE), X, (0, 0), 3)
    elif WHAT == "array of semaphores":
        tk.load_async(tk.allocate(TILE), X, (0, 0), tk.semaphores(2))
    elif WHAT == "semaphore index":
        tk.wait(tk.semaphores(2)[2], 0)
    elif WHAT == "no semaphore":
        tk.wait(5, 0)
    elif WHAT == "reduction":
        tk.store_min_async(Y, tk.allocate(tk.sv(tk.fp32, 64)), (0,))
    elif WHAT == "bytes of a tile":
        tk.store_bytes_async(X, tk.allocate(TILE))
    elif WHAT == "odd bytes":
        tk.store_bytes_async(X, tk.allocate(tk.sv(tk.bf16, 64)), 100)
    elif WHAT == "too many bytes":
        tk.store_bytes_async(X, tk.allocate(tk.sv(tk.bf16, 64)), 256)
    elif WHAT == "bytes without a pointer":
        tk.store_bytes_async(3, tk.allocate(tk.sv(tk.bf16, 64)))
    elif WHAT == "sums of bytes":
        tk.store_add_bytes_async(X, tk.allocate(tk.sv(tk.int32, 64)))
    elif WHAT == "fragments of a load":
        tk.store_fragments(tk.allocate(tk.sv(tk.fp32, 4096)), tk.load(X, tk.rt(tk.bf16, 64, 64), (0, 0)))
    elif WHAT == "memory of fragments":
        tk.store_fragments(tk.allocate(tk.sv(tk.fp32, 64)), tk.zero(tk.rt(tk.fp32, 64, 64)))
    elif WHAT == "sums that may be initialized":
        tk.is_initialized(3)
    elif WHAT == "sums to mark":
        tk.mark_initialized(Y.pointer, True)
    elif WHAT == "word of sums":
        tk.store_or_add_bytes_async(Y.pointer, tk.allocate(tk.sv(tk.fp32, 64)), 3)
    elif WHAT == "first sums":
        tk.store_or_add_bytes_async(X.pointer, tk.allocate(tk.sv(tk.int32, 64)), X.pointer)
    elif WHAT == "rows of a gather":
        tk.gather_rows(X, tk.rt(tk.bf16, 64, 64), tk.zero(tk.rv(tk.int32, 32)))
    elif WHAT == "types of a gather":
        tk.gather_rows(X, tk.rt(tk.bf16, 64, 64), tk.zero(tk.rv(tk.fp32, 64)))
    elif WHAT == "store shape":
        tk.store(tk.allocate(TILE), tk.zero(tk.rt(tk.bf16, 64, 32)))
    elif WHAT == "store to a ring":
        tk.store(tk.allocate(TILE, stages=2), tk.zero(tk.rt(tk.bf16, 64, 64)))
    elif WHAT == "named barrier":
        tk.named_sync(3, 128)
    elif WHAT == "named threads":
        tk.named_sync(8, 100)
    elif WHAT == "setmaxnreg":
        tk.increase_registers(100)
    elif WHAT == "arrive":
        tk.arrive(tk.semaphores(1)[0], per="thread")
    elif WHAT == "limit":
        tk.careful_wait(tk.semaphores(1)[0], 0, limit_ns=0)
    elif WHAT == "name":
        tk.careful_wait(tk.semaphores(1)[0], 0, name="größe")
    elif WHAT == "label":
        tk.print("", X.pointer)
    elif WHAT == "mark":
        tk.mark(X, 0)
    elif WHAT == "axis":
        tk.extent(X, 2)


VIEW = "subtile({}, {}) number ({}, {}) of st(bf16, 64, 64) lies outside it or does not divide it"
AT_A_ROW = (
    "subtile({}, {}) of {} at a row of the run time: its rows must divide the tile's and be whole swizzle atoms, and "
    "it has all columns, one "
    "swizzle line, of a tile whose extents are powers of two and which is no view"
)
WHOLE = "takes a shared tile whose extents are powers of two, and no view at constant indices"
ONE_PIECE = "takes a shared vector of 4-byte elements whose length is a power of two"
TILES = {
    "stages": "allocate(st(bf16, 64, 64), stages=0): a ring has at least one stage",
    "register type": "allocate(rt(bf16, 64, 64)): shared memory holds st, sv and scale_tile types",
    "slot": "slot 2 of a ring of 2 stages",
    "no ring": "st(bf16, 64, 64): this is one tile, not a ring; subtile() makes views",
    "view outside": VIEW.format(32, 64, 2, 0),
    "view before": VIEW.format(32, 64, -1, 0),
    "view of composite": "subtile(64, 48) number (0, 0) of st(bf16, 64, 96): 48 columns are neither a power of two "
    "nor all 96",
    "composite rows": "subtile(48, 64) number (0, 0) of st(bf16, 96, 64): 48 rows are neither a power of two nor all "
    "96",
    "view of contiguous": "subtile of st(bf16, 96, 64, contiguous): a contiguous tile is read as a whole; it has no "
    "views",
    "view of columns at a row": AT_A_ROW.format(32, 32, "st(bf16, 64, 64)"),
    "view of half an atom at a row": AT_A_ROW.format(4, 64, "st(bf16, 64, 64)"),
    "composite view at a row": AT_A_ROW.format(32, 96, "st(bf16, 64, 96)"),
    "wide view at a row": AT_A_ROW.format(32, 128, "st(bf16, 64, 128)"),
    "view of a view at a row": AT_A_ROW.format(16, 64, "st(bf16, 64, 128)"),
    "elements of a ring": f"load_elements of st(bf16, 64, 64): {WHOLE}",
    "elements of a tile in pieces": f"store_elements of st(bf16, 64, 96): {WHOLE}",
    "elements of a view": f"load_elements of st(bf16, 64, 64): {WHOLE}",
    "too many parts": "load_elements(parts=8) of st(bf16, 64, 64) by 128 threads: each takes 16 bytes or a multiple "
    "of each part",
    "view of no vector": "subvector of st(bf16, 64, 64): takes a shared vector",
    "vector view outside": "subvector(64) number 3 of sv(fp32, 192) lies outside it or does not divide it",
    "vector view across pieces": "subvector(96) number 1 of sv(fp32, 192) lies in several of its pieces, (128, 64)",
    "tile from an element on": "load of sv(fp32, 64) from an element on: give the register vector type to load, got "
    "rt(fp32, 16, 16)",
    "from an element of halves on": f"load of sv(bf16, 64) from an element on: {ONE_PIECE}",
    "from an element of pieces on": f"load of sv(fp32, 192) from an element on: {ONE_PIECE}",
    "from an element of another type on": "load of sv(fp32, 64) as rv(int32, 16): element types differ; cast in "
    "registers",
    "view of ring": "subtile of a ring of st(bf16, 64, 64): take a slot first, ring[slot]",
    "rank": "load of rt(bf16, 64, 64): 3 coordinates for a tensor of 2 dimensions; give one per dimension, in tiles",
    "rank of store": "store of a tile of shape [64, 64]: 1 coordinates for a tensor of 2 dimensions; give one per "
    "dimension, in tiles",
    "type of load": "load of rt(fp16, 64, 64) and a tensor of bf16: element types differ; cast in registers",
    "what to load": "load from global memory: give the register tile or vector type to load (rt, rv, col_vec, "
    "row_vec), got 64",
    "fill": "load(fill='nothing'): must be a number or a scalar",
    "tile of a vector": "load of rt(fp32, 64, 64) from a tensor of one dimension: load a vector (tk.rv)",
    "no descriptor": "load_async of st(bf16, 32, 64): the global layout has no descriptor for its 32×64 piece "
    "(swizzle 128); it "
    "has 64×64 (swizzle 128)",
    "no descriptors at all": "store_async of sv(fp32, 64): the global layout has no descriptor for its 64 piece "
    "(swizzle 0); it "
    "has none: pass tk.gl(tensor, tile types)",
    "TMA of a ring": "store_async of a ring of st(bf16, 64, 64): take a slot first, ring[slot]",
    "policy": "store_async(cache_policy='keep'): must be one of 'evict_first', 'evict_last', 'evict_normal'",
    "policy of cp.async": "load_async(cache_policy='evict_first') without a semaphore: cp.async has no cache policy "
    "here; give a semaphore",
    "semaphore": "load_async(arrived=3): needs a semaphore",
    "array of semaphores": "this is an array of 2 semaphores: take one, semaphores[i]",
    "semaphore index": "semaphore 2 of 2",
    "no semaphore": "wait(5): needs a semaphore, made by tk.semaphores",
    "reduction": "store_min_async of sv(fp32, 64): TMA takes the min of bf16, fp16, int32, int64 only",
    "bytes of a tile": "store_bytes_async: moves bytes of a shared vector (sv), which lie one after the other, got "
    "st(bf16, 64, "
    "64); tiles are swizzled: use "
    "load_async and store_async",
    "sums of bytes": "store_add_bytes_async of sv(int32, 64): bulk copies add fp32, bf16, fp16 only",
    "fragments of a load": "store_fragments of a tile of shape [64, 64]: takes an fp32 accumulator of wgmma of 64 "
    "rows and a power of two of columns",
    "sums that may be initialized": "is_initialized of 3: a word of sums is a pointer to int32 in global memory",
    "sums to mark": "mark_initialized of pointer<fp32>: a word of sums is a pointer to int32 in global memory",
    "word of sums": "store_or_add_bytes_async of 3: a word of sums is a pointer to int32 in global memory",
    "first sums": "store_or_add_bytes_async of sv(int32, 64): bulk copies add fp32, bf16, fp16 only",
    "memory of fragments": "store_fragments to sv(fp32, 64): takes a shared tile or vector of 4096 numbers in fp32",
    "odd bytes": "store_bytes_async: 100 bytes of sv(bf16, 64); must be a multiple of 16 (cp.async.bulk) up to its "
    "128 bytes",
    "too many bytes": "store_bytes_async: 256 bytes of sv(bf16, 64); must be a multiple of 16 (cp.async.bulk) up to "
    "its 128 bytes",
    "bytes without a pointer": "store_bytes_async: 3 is no pointer; pass a tensor to the kernel, or a global layout",
    "rows of a gather": "gather_rows: needs a vector of 64 integer row numbers, one for each row of the tile, got "
    "shape [32] of int32",
    "types of a gather": "gather_rows: needs a vector of 64 integer row numbers, one for each row of the tile, got "
    "shape [64] of fp32",
    "contiguous load": "load of st(bf16, 96, 64, contiguous): a contiguous tile is filled by TMA and read by products "
    "only",
    "contiguous store": "store to st(bf16, 96, 64, contiguous): a contiguous tile is filled by TMA and read by "
    "products only",
    "contiguous TMA store": "store_async of st(bf16, 96, 64, contiguous): a contiguous tile is filled by TMA and read "
    "by products only",
    "contiguous multicast": "load_async of st(bf16, 96, 64, contiguous): a contiguous tile takes no multicast",
    "store shape": "store of a tile of shape [64, 32] to st(bf16, 64, 64): shapes differ",
    "store to a ring": "store to a ring of st(bf16, 64, 64): take a slot first, ring[slot]",
    "named barrier": "named barrier 3: must be 8 to 15 (the hardware has 16, the compiler uses the lower half)",
    "named threads": "named barrier of 100 threads: must be a multiple of 32 up to 1024",
    "setmaxnreg": "registers: 100 must be a multiple of 8 from 24 to 256 (setmaxnreg)",
    "arrive": "arrive(per='thread'): must be 'role' or 'warp'",
    "limit": "careful_wait(limit_ns=0): must be a positive compile-time number of nanoseconds",
    "name": "careful_wait(name='größe'): must be a string of printable ASCII characters",
    "label": "print(''): the label must be a string of printable ASCII characters",
    "mark": "mark: needs a global layout of shape (records, 4) and int64, got 2 dimensions of bf16",
    "axis": "extent(axis=2): the tensor has 2 dimensions",
}
BEGINNINGS = {  # messages that go on with what Triton prints of a value
    "parts of the run time": "load_elements(parts=",
    "view of registers": "subtile of ",
    "no global": "load_into: ",
    "TMA of registers": "store_async: the source must be a shared tile or vector, got ",
}


def wrong_tiles_arguments():
    return tk.gl(meta(128, 128), tk.st(tk.bf16, 64, 64)), tk.gl(meta(128, dtype=torch.float32))


@pytest.mark.parametrize("what", TILES)
def test_tiles_and_moves(what):
    assert refusal(wrong_tiles, *wrong_tiles_arguments(), what) == TILES[what]


@pytest.mark.parametrize("what", BEGINNINGS)
def test_tiles_and_moves_of_foreign_values(what):
    assert refusal(wrong_tiles, *wrong_tiles_arguments(), what).startswith(BEGINNINGS[what])


def test_shared_memory_has_an_itemised_bill():
    assert refusal(wrong_tiles, *wrong_tiles_arguments(), "shared budget") == (
        "shared memory over budget: 238112 bytes of 232448 on sm_90: st(bf16, 64, 64) × 21 172032 bytes; sv(fp32, "
        "128) 512 "
        "bytes; 4 semaphores 32 bytes; "
        "st(bf16, 256, 128) 65536 bytes"
    )


@tk.kernel
@triton.jit
def wrong_tensor_memory(X, WHAT: tl.constexpr):
    a, b = tk.allocate(tk.st(tk.bf16, 128, 64)), tk.allocate(tk.st(tk.bf16, 64, 64))
    if WHAT == "budget":
        tk.tensor_allocator(tk.tt(tk.fp32, 128, 256))
        tk.tensor_allocator(tk.tt(tk.bf16, 128, 96))
        tk.tensor_allocator(tk.tt(tk.fp32, 64, 256))
    elif WHAT == "type":
        tk.tensor_allocator(tk.st(tk.bf16, 64, 64))
    elif WHAT == "rows":
        tk.subtile(tk.tensor_allocator(tk.tt(tk.fp32, 128, 64)), 64, 64, 1, 0)
    elif WHAT == "A in registers":
        tk.mma_AB(tk.load(a), b, tk.tensor_allocator(tk.tt(tk.fp32, 128, 64)))
    elif WHAT == "B in registers":
        tk.mma_AB(a, tk.load(b), tk.tensor_allocator(tk.tt(tk.fp32, 128, 64)))
    elif WHAT == "store":
        tk.store(tk.tensor_allocator(tk.tt(tk.fp32, 128, 64)), tk.zero(tk.rt(tk.fp32, 128, 32)))


TENSOR_MEMORY = {
    "budget": "tensor memory over budget: 576 columns of 512: tt(fp32, 128, 256) 256 columns; tt(bf16, 128, 96) 64 "
    "columns; "
    "tt(fp32, 64, 256) 256 columns",
    "type": "tensor_allocator(st(bf16, 64, 64)): tensor memory holds tt types",
    "rows": "subtile(64, 64) number (1, 0) of tt(fp32, 128, 64): a view of tensor memory has all 128 rows; divide its "
    "columns",
    "A in registers": "mma_AB: A is 128×64 bf16 in registers; tcgen05 reads A from shared or tensor memory: store it "
    "first",
    "B in registers": "mma_AB: B is 64×64 bf16 in registers; tcgen05 reads B from shared memory: store it to an st "
    "first",
    "store": "store of a tile of shape [128, 32] to tt(fp32, 128, 64): shapes differ",
}


@pytest.mark.parametrize("what", TENSOR_MEMORY)
def test_tensor_memory(what):
    assert refusal(wrong_tensor_memory, tk.gl(meta(128, 64)), what, arch="sm_100a").startswith(TENSOR_MEMORY[what])


@triton.jit
def idle(X):
    tk.sync()


@tk.kernel
@triton.jit
def roles(X, WARPS: tl.constexpr, REGISTERS: tl.constexpr):
    tk.specialize(((idle, (X,)), (idle, (X,)), (idle, (X,))), warps=WARPS, registers=REGISTERS)


@pytest.mark.parametrize(
    ("warps", "registers", "message"),
    [
        (
            (4, 4, 4),
            (240, 240, 240),
            "registers over budget: 92160 of 65536: 4 warps × 32 × 240 = 30720; 4 warps × 32 × 240 = 30720; 4 warps × "
            "32 × 240 = 30720",
        ),
        (
            (4, 8, 1),
            (240, 120, 64),
            "registers over budget: 69632 of 65536: 4 warps × 32 × 240 = 30720; 8 warps × 32 × 120 = 30720; 4 warps × "
            "32 × 64 = 8192",
        ),
        (
            (4, 4, 4),
            (240, 100, 24),
            "registers=(240, 100, 24): 100 must be a multiple of 8 from 24 to 256 (setmaxnreg)",
        ),
        ((4, 4), None, "specialize: 3 roles need as many warps and registers, got warps=(4, 4), registers=None"),
        (
            (8, 4, 4),
            None,
            "specialize(warps=(8, 4, 4)): the first role runs on the kernel's own 4 warps (@tk.kernel(num_warps=…)); "
            "name a role of 4 warps first",
        ),
        (
            (4, 16, 16),
            None,
            "specialize(warps=(4, 16, 16)): 36 warps with workers rounded up to warpgroups; a block has at most 32",
        ),
    ],
)
def test_roles(warps, registers, message):
    assert refusal(roles, tk.gl(meta(64, 64)), warps, registers) == message


@triton.jit
def roles_of_plain_kernel(X):
    tk.specialize(((idle, (X,)), (idle, (X,))), warps=(4, 4))


def test_roles_of_a_kernel_that_is_not_explicit():
    with pytest.raises(
        triton.CompilationError,
        match="specialize: works on explicit tiles only; put @tk.kernel over the @triton.jit function",
    ):
        triton.compile(ASTSource(roles_of_plain_kernel, {"X": "*fp32"}), target=GPUTarget("cuda", 90, 32))


# ---- host side
# -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            meta(64, 65),
            "X: shape (64, 65), strides (65, 1), 2-byte elements: stride 65 of dimension 0 is 130 bytes; TMA needs a "
            "multiple of 16 bytes",
        ),
        (
            meta(64, 128).t(),
            "X: shape (128, 64), strides (1, 128), 2-byte elements: the last dimension has stride 128; TMA needs it "
            "contiguous (stride 1)",
        ),
        (
            meta(0, 64),
            "X: shape (0, 64), strides (64, 1), 2-byte elements: extent 0 of dimension 0; TMA addresses 1 to 2**32 "
            "elements "
            "along a dimension",
        ),
    ],
)
def test_tensors_that_tma_cannot_address(tensor, message):
    tile = tk.st(tk.bf16, 64, 64)
    assert (
        refusal(cases.tma_copy, tk.gl(tensor, tile), tk.gl(meta(64, 64), tile), tile, 2, "copy", error=ValueError)
        == message
    )


def test_a_sliced_tensor_that_is_not_aligned():
    base, tile = torch.zeros(64, 136, dtype=torch.bfloat16), tk.st(tk.bf16, 64, 64)
    message = refusal(cases.tma_copy, tk.gl(base[:, 1:65], tile), tk.gl(base, tile), tile, 2, "copy", error=ValueError)
    assert re.fullmatch(
        r"X: shape \(64, 64\), .*: address 0x\w+ is not a multiple of 16 bytes, as TMA needs \(a sliced tensor\?\)",
        message,
    )


def test_nan_fill_needs_floating_point():
    tile = tk.st(tk.int32, 16, 32)
    g = tk.gl(meta(64, 64, dtype=torch.int32), tile, fill="nan")
    assert refusal(cases.tma_copy, g, g, tile, 2, "copy", error=ValueError) == (
        "X: fill 'nan' with torch.int32; TMA fills NaN only for floating-point types of 2, 4 or 8 bytes"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tk.gl(3), "gl(int): needs a torch tensor"),
        (lambda: tk.gl(meta(1, 1, 1, 1, 1, 1)), "gl of shape (1, 1, 1, 1, 1, 1): needs one to 5 dimensions"),
        (lambda: tk.gl(torch.tensor(1.0)), "gl of shape (): needs one to 5 dimensions"),
        (
            lambda: tk.gl(meta(64, 64), tk.st(tk.fp16, 64, 64)),
            "gl of bf16 with st(fp16, 64, 64): the tile's element type must be the tensor's",
        ),
        (
            lambda: tk.gl(meta(64), tk.st(tk.bf16, 64, 64)),
            "gl of a one-dimensional tensor with st(bf16, 64, 64): tiles have rows and columns; use sv",
        ),
        (
            lambda: tk.gl(meta(64, 64), tk.rt(tk.bf16, 64, 64)),
            "gl(…, rt(bf16, 64, 64)): a global layout moves shared tiles and vectors (st, sv, scale_tile), and single "
            "rows of a matrix (by_rows)",
        ),
        (
            lambda: tk.gl(meta(64, 64), fill="one"),
            "gl(fill='one'): TMA fills with 'zero' or 'nan'; use a mask for anything else",
        ),
        (
            lambda: tk.gl(meta(64, dtype=torch.float64)),
            "gl of torch.float64: tiles hold fp32, bf16, fp16, fp8e4m3, fp8e5m2, int8, uint8, int32, int64",
        ),
        (
            lambda: cases.marks.compile(tk.gl(meta(4, 4)), cluster_size=3),
            "marks(cluster_size=3): a cluster has 1, 2, 4, 8 or 16 blocks",
        ),
        (
            lambda: cases.marks.compile(tk.gl(meta(4, 4)), debug="loud"),
            "marks(debug='loud'): must be False, True or 'report'",
        ),
        (lambda: tk.kernel(lambda x: x), "@tk.kernel '<lambda>': put it over an @triton.jit function"),
    ],
)
def test_host_objects(make, message):
    with pytest.raises(tk.TileError) as error:
        make()
    assert str(error.value) == message


def test_arguments_of_the_wrong_number():
    with pytest.raises(TypeError, match=re.escape("marks: missing a required argument: 'G'; its parameters are (G)")):
        cases.marks.compile()
    with pytest.raises(
        TypeError, match=re.escape("marks: got an unexpected keyword argument 'num_ctas'; its parameters are (G)")
    ):
        cases.marks.compile(tk.gl(meta(4, 4)), num_ctas=2)


def test_outside_a_kernel():
    with pytest.raises(tk.TileError, match=re.escape("load_into: call it inside a kernel (@triton.jit)")):
        tk.load_into(None, None, (0, 0))


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    return FakeCuda(build(tmp_path_factory.mktemp("fake"), "libfake.so"))


def test_tensors_on_the_wrong_device_and_nothing_launched(fake, monkeypatch):
    x, y = torch.zeros(64, 64), meta(64, 64, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"^X: a tensor on cpu \(shape \(64, 64\), torch.float32\); kernels take tensors on cuda"
    ):
        cases.printer[(1,)](tk.gl(x))
    launcher = Launcher(
        cases.through_registers._compile_for_launch, arg_names=["X", "Y"], driver=fake.driver, native=False
    )
    monkeypatch.setattr(cases.through_registers, "launcher", launcher)
    before = fake.num_launches
    with pytest.raises(ValueError, match=r"meta"):
        cases.through_registers[(1,)](tk.gl(x), tk.gl(y), tk.rt(tk.fp32, 16, 16), 2, 0.0)
    with pytest.raises(ValueError, match=re.escape("its extent along x must lie in 0 to 2147483647")):
        cases.through_registers[(-1,)](tk.gl(x), tk.gl(x), tk.rt(tk.fp32, 16, 16), 2, 0.0)
    assert fake.num_launches == before


@tk.kernel
@triton.jit
def wrong_pipeline(Y, WHAT: tl.constexpr):
    pipe = (
        tk.pipeline(2, empty_arrivals=0)
        if WHAT == "no empty barriers"
        else tk.pipeline(0 if WHAT == "no stages" else 2)
    )
    state = tk.pipeline_state(pipe)
    if WHAT == "a state first":
        tk.producer_acquire(state, pipe.empty)
    elif WHAT == "semaphores":
        tk.consumer_wait(pipe.full, state)
    elif WHAT == "a pipeline for a state":
        tk.producer_commit(pipe, pipe, 16)
    else:
        tk.consumer_release(pipe, state)


PIPELINES = {
    "no stages": "pipeline(0): a ring has at least one stage",
    "no empty barriers": "consumer_release: this pipeline has no empty barriers (empty_arrivals=0)",
    "a state first": "producer_acquire takes a pipeline (tk.pipeline) and a state of it (tk.pipeline_state)",
    "semaphores": "consumer_wait takes a pipeline (tk.pipeline) and a state of it (tk.pipeline_state)",
    "a pipeline for a state": "producer_commit takes a pipeline (tk.pipeline) and a state of it (tk.pipeline_state)",
}


@pytest.mark.parametrize("what", PIPELINES)
def test_misused_pipelines_are_refused(what):
    assert refusal(wrong_pipeline, tk.gl(meta(16)), what).startswith(PIPELINES[what])
