"""How operators run on DTensors: the shardings that they take, for `torch.distributed.tensor`.

Each dimension of an operand or a result has a label, as in einsum. A sharding shards the dimensions of some labels in
all tensors that have them, and replicates the others. PyTorch redistributes operands that are sharded otherwise: it
gathers a sequence, for example.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch

Dims: TypeAlias = Sequence[object]  # labels of a tensor's dimensions
Sharding: TypeAlias = tuple[list[Any], list[Any]]  # placements of the results and of the arguments

# b: batch; h: heads of queries; g: heads of keys and values; ".": none. Dimensions behind these are not sharded.
ATTENTION = {
    "attention": "bh bg bg -> bh bh",
    "attention_backward": "bh bh bh bg bg bh bh -> bh bg bg",
    "attention_decode": "bh bg bg b b b -> bh bh",
    "attention_decode of pages": "bh .g .g b b b -> bh bh",
    "attention_fp8": "bh bg bg bg bg bg -> bh bh",
    "attention_ranges": "bh bg bg b -> bh bh",
    "attention_ranges_backward": "bh bh bg bg b bh bh -> bh bg bg",
    "attention_varlen": ".h .g .g . . -> .h h",
    "attention_varlen_backward": ".h h .h .g .g .h h . . -> .h .g .g",
}
_registered: set[str] = set()


def is_distributed(kind: type) -> bool:
    """Is this class of tensors DTensor? False until a program imports `torch.distributed.tensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and kind is getattr(module, "DTensor", None)


def register_shardings(name: str) -> None:
    """Register the shardings of the operator `tritonkittens::name` with DTensor, once."""
    if name in _registered:
        return
    # a program that has DTensors has imported most of this
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    operator = getattr(torch.ops.tritonkittens, name).default
    register_sharding(operator)(_gemm if name == "gemm" else _attention(name))
    # PyTorch looks up an earlier choice by tensors and by what follows the first int. Here each argument counts.
    everything = RuntimeSchemaInfo(static_argnum=0)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator] = everything
    _registered.add(name)


def _shardings(
    operands: Sequence[Dims | None],
    results: Sequence[Dims],
    shared: Iterable[Collection[object]],
    added: Collection[int] = (),
) -> list[Sharding]:
    """Return the shardings of an operator. The first one replicates all tensors.

    Args:
        operands: labels of each argument up to the last tensor; None for an argument that is no tensor.
        results: labels of each result. A result without the sharded labels is a sum over shards.
        shared: the labels that each further sharding shards.
        added: indices of operands that are added to the first result. Where that is a sum, they are sums, too.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    def placed(dims: Dims, labels: Collection[object], otherwise: Any) -> Any:
        return next((Shard(i) for i, label in enumerate(dims) if label in labels), otherwise)

    found: list[Sharding] = []
    for labels in ((), *shared):
        placements = [placed(dims, labels, Partial() if labels else Replicate()) for dims in results]
        of_added = Partial() if placements[0].is_partial() else Replicate()
        inputs = [
            None if dims is None else placed(dims, labels, of_added if i in added else Replicate())
            for i, dims in enumerate(operands)
        ]
        found.append((placements, inputs))
    return found


def _aligned(sizes: Sequence[int], shape: Sequence[int]) -> list[object]:
    """Label dimensions that broadcast to `shape` by their places there; None for those that are 1."""
    return [i if n == shape[i] > 1 else None for i, n in enumerate(sizes, len(shape) - len(sizes))]


def _gemm(
    a: Any, b: Any, bias: Any, activation: str | None, gate: Any, residual: Any, scale_a: Any, scale_b: Any,
    out_dtype: torch.dtype | None = None, *options: Any,
) -> list[Sharding]:  # fmt: skip
    """Each dimension of the result may be sharded, and K where the epilogue is linear."""
    pairs = itertools.zip_longest(a.shape[-3::-1], b.shape[-3::-1], fillvalue=1)
    shape = (*[n if m == 1 else m for m, n in pairs][::-1], a.shape[-2], b.shape[-1])
    rank = len(shape)
    # a shard of columns or of K may begin inside a block that shares a scale
    has_blocks = scale_b is not None and scale_b.ndim == 2 and tuple(scale_b.shape) not in ((1, 1), (1, shape[-1]))
    micro = scale_b is not None and scale_b.dtype != torch.float32  # in blocks of their own order

    def dims(x: Any) -> Dims | None:
        return None if x is None else _aligned(x.shape, shape)

    operands = [
        [*_aligned(a.shape[:-1], shape[:-1]), "k"],
        [*_aligned(b.shape[:-2], shape[:-2]), "k", rank - 1],
        dims(bias),
        None,
        dims(gate),
        dims(residual),
        None if scale_a is None else () if micro else _aligned(scale_a.shape[:1], shape[:-1]),
        () if has_blocks or micro else dims(scale_b),
    ]
    shared: list[tuple[object, ...]] = [(i,) for i in range(rank - has_blocks) if shape[i] > 1]
    if activation is None and not has_blocks and (out_dtype is None or out_dtype.itemsize > 1):
        shared.append(("k",))
    return _shardings(operands, [range(rank)], () if micro else shared, added=(2, 5))


def _attention(name: str) -> Callable[..., list[Sharding]]:
    """The shardings of an operator in `ATTENTION`."""

    def shardings(*args: Any) -> list[Sharding]:
        of_pages = name == "attention_decode" and args[5] is not None
        given, results = (side.split() for side in ATTENTION[name + " of pages" * of_pages].split(" -> "))
        operands = [None if x is None else dims for dims, x in zip(given, args)]
        sizes: dict[str, int] = {}
        for dims, x in zip(operands, args):
            sizes |= zip(dims or "", () if x is None else x.shape)
        mesh = args[0].mesh.shape
        parts = {math.prod(dims) for count in range(len(mesh)) for dims in itertools.combinations(mesh, count + 1)}

        def are_even(n: int) -> bool:
            """Are there as many in each shard, however many dimensions of the mesh shard them?"""
            return all(n % part == 0 for part in parts if part <= n)

        # heads of queries stay with their heads of keys; a single one of these serves all shards
        heads = "h" if sizes["g"] == 1 else "hg"
        shared = [labels for labels in ("b", heads) if labels[-1] in sizes and are_even(sizes[labels[-1]])]
        return _shardings(operands, results, shared)

    return shardings
