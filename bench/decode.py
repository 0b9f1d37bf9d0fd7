"""Attention of few queries against long keys and values: shapes of models, also in pages, beside cuDNN,
FlashAttention-2 (both through torch), -3, -4 and a copy of as many bytes; shapes drawn at random, beside what
`scaled_dot_product_attention` has."""

from __future__ import annotations

import argparse
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bench.attention import BOUND
from bench.gemm import OURS, randn
from bench.harness import Case, Contender, Suite, Trial
from bench.peers import Attention, peers
from tritonkittens.kernels.attention.num_splits import DecodeKind, row_tiles_of

# Batch, keys by dimension of the heads, which are as many as Llama-3 8B's (dimension 128) and 1B's (64)
DECODE = {
    128: ((1, 4096), (1, 65536), (8, 1024), (8, 4096), (8, 32768), (64, 1024), (64, 8192)),
    64: (
        (1, 65536),
        (8, 4096),
        (33, 1024),
        (34, 512),
        (34, 1024),
        (35, 2048),
        (48, 4096),
        (64, 256),
        (64, 1024),
        (64, 8192),
    ),
}
HEADS, KV_HEADS = 32, 8
CHECKED_HEADS = 256  # each has one row of numbers: of those of four, errors that are alike differ by 10 %
PAGE_SIZES = (16, 128)  # keys: vLLM's default, and more than a block of the kernel has


def ours_decoding(p: Attention) -> Callable[[], torch.Tensor]:
    from tritonkittens.kernels.attention import attention_decode

    return functools.partial(attention_decode, p.q, p.k, p.v, causal=p.causal, out=torch.full_like(p.q, float("nan")))


def in_pages(x: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    """The keys of a cache (batch, heads, keys, D) as a pool (pages, heads, page_size, D), in memory (pages, page_size,
    heads, D)."""
    batch, heads, keys, dim = x.shape
    pool = x.new_zeros(table.numel(), page_size, heads, dim)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, -keys % page_size))
    pool[table.flatten().long()] = padded.reshape(table.numel(), page_size, heads, dim)
    return pool.transpose(1, 2)


def ours_decoding_pages(p: Attention, page_size: int) -> Callable[[], torch.Tensor]:
    from tritonkittens.kernels.attention import attention_decode

    batch, _, keys, _ = p.k.shape
    table = torch.randperm(batch * -(-keys // page_size), device=p.k.device).int().reshape(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=p.k.device)
    k, v = (in_pages(x, table, page_size) for x in (p.k, p.v))
    return functools.partial(
        attention_decode, p.q, k, v, lengths=lengths, pages=table, out=torch.full_like(p.q, float("nan"))
    )


def copy_of(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Reading and writing K: as many bytes as reading K and V. What it writes stays in L2: it is timed where that is
    full of what others wrote, which it writes back instead, so that all bytes count."""
    target = torch.empty_like(x)
    return lambda: target.copy_(x)


def decode_cases(options: argparse.Namespace) -> list[Case]:
    def prepare(dim: int, batch: int, keys: int) -> Trial:
        p = Attention(randn(batch, HEADS, 1, dim), *(randn(batch, KV_HEADS, keys, dim) for _ in range(2)))
        copied = {
            "copy of as many bytes": Contender(
                functools.partial(copy_of, p.k), lambda found: float((found != p.k).any()), "device"
            )
        }
        paged = {f"{OURS}, pages of {size}": functools.partial(ours_decoding_pages, p, size) for size in PAGE_SIZES}
        return Trial(
            {OURS: functools.partial(ours_decoding, p), **paged},
            peers("attention", p, options.slow),
            p.error(CHECKED_HEADS),
            BOUND,
            baselines=copied,
        )

    return [
        Case(
            f"bf16 decode D {dim} B {b} S {s}",
            2 * b * KV_HEADS * s * dim * 2,
            {"D": dim, "B": b, "S": s, "panel": f"D {dim}"},
            functools.partial(prepare, dim, b, s),
            kind="reading",
        )
        for dim, shapes in DECODE.items()
        for b, s in shapes
    ]


class Shape(NamedTuple):
    """Of keys and values, and of queries; page_size None: not in pages."""

    dim: int
    page_size: int | None
    batch: int
    keys: int
    kv_heads: int = 8
    group: int = 4
    queries: int = 1

    @property
    def kind(self) -> DecodeKind:
        return DecodeKind(
            torch.bfloat16,
            self.dim,
            self.dim,
            lengths=self.page_size is not None,
            page_size=self.page_size,
            row_tiles=self.row_tiles,
        )

    @property
    def row_tiles(self) -> int:
        return row_tiles_of(self.group, self.queries)[0]

    @property
    def tasks(self) -> int:
        return self.batch * self.kv_heads * self.row_tiles

    @property
    def bytes(self) -> int:
        """Of K and V."""
        return 2 * self.batch * self.kv_heads * self.keys * self.dim * 2


# What shapes are drawn from: as often as it is there
DRAWN: dict[str, Any] = dict(
    heads=((8, 4), (8, 8), (32, 1), (1, 8), (4, 7), (2, 16)),
    dims=(64, 64, 96, 128, 128, 128, 256),
    queries=(1, 1, 1, 1, 4, 16),
    batches=(1, 128),
    keys=(128, 1 << 15),
    bytes=(1 << 20, 900 << 20),
)
SDPA = ("cudnn", "flash-attention 2 (torch)")
SHAPES = 48


def drawn_shapes(seed: int) -> Iterator[Shape]:
    """Shapes without end, of which half of the lengths and batches are powers of two."""
    draw = random.Random(seed)

    def extent(least: int, most: int) -> int:
        n = int(least * (most / least) ** draw.random())
        return 1 << n.bit_length() - 1 if draw.random() < 0.5 else n

    while True:
        (kv_heads, group), dim, queries = (
            draw.choice(DRAWN["heads"]),
            draw.choice(DRAWN["dims"]),
            draw.choice(DRAWN["queries"]),
        )
        shape = Shape(dim, None, extent(*DRAWN["batches"]), extent(*DRAWN["keys"]), kv_heads, group, queries)
        if DRAWN["bytes"][0] <= shape.bytes <= DRAWN["bytes"][1]:
            yield shape


def label(shape: Shape) -> str:
    return (
        f"D {shape.dim} B {shape.batch} S {shape.keys} H {shape.kv_heads * shape.group} of keys {shape.kv_heads} "
        f"Q {shape.queries}"
    )


def random_cases(options: argparse.Namespace) -> list[Case]:
    """`options.count` shapes (`SHAPES`) of seed `options.seed` (0), without a mask: what SDPA has cannot put one at
    the end of the keys."""

    def prepare(shape: Shape) -> Trial:
        q = randn(shape.batch, shape.kv_heads * shape.group, shape.queries, shape.dim)
        p = Attention(q, *(randn(shape.batch, shape.kv_heads, shape.keys, shape.dim) for _ in range(2)))
        theirs = {name: factory for name, factory in peers("attention", p, options.slow).items() if name in SDPA}
        return Trial({OURS: functools.partial(ours_decoding, p)}, theirs, p.error(CHECKED_HEADS), BOUND)

    return [
        Case(
            f"bf16 decode {label(shape)}",
            shape.bytes,
            shape._asdict(),
            functools.partial(prepare, shape),
            kind="reading",
        )
        for shape in dict.fromkeys(itertools.islice(drawn_shapes(options.seed or 0), options.count or SHAPES))
    ]


SUITES = (
    Suite(
        "attention_decode",
        "attention of one query, 32 heads in 8 groups, bytes of K and V",
        decode_cases,
        unit="TB/s",
        plot={"panel": "panel"},
    ),
    Suite(
        "attention_decode_random",
        "attention of few queries, shapes drawn at random, bytes of K and V",
        random_cases,
        unit="TB/s",
    ),
)
