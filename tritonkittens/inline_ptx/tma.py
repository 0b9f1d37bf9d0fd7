"""The copy engine: tensor copies, plain bulk copies, reductions, prefetches, and their fences (PTX ISA,
"cp.async.bulk"). sm_90.

`tensor_map` is the generic address (u64 or pointer) of a 128-byte tensor map in global memory; see
`tensormap.encode_tiled`. `coordinates` is a tuple of 1 to 5 i32 element offsets, fastest dimension first.
Shared operands are descriptors or i32 addresses. They are 128-byte aligned for tensor copies (256, 512, 1024 bytes
for a swizzle of 32, 64, 128), 16-byte aligned for plain ones. `nbytes` is a multiple of 16.

Loads count their bytes on an mbarrier. Stores read shared memory asynchronously. Their order is: `fence_proxy_async`
by the writing threads, a barrier, the store, `commit_group`, and `wait_group_read` before the memory is written
again. `issuer`: see `_asm.issued`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, arch, asm, issued, require
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Register, Waits, lanes, meaning

# the host's half belongs to the same vocabulary
from tritonkittens.inline_ptx.tensormap import encode_tiled as encode_tiled

_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
BULK_REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
CLUSTER_REDUCTIONS = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
}
_PRIORITIES = ("evict_first", "evict_last", "evict_normal", "evict_unchanged")


# the barrier operand in the even CTA of a pair: the shared windows of a cluster's CTAs follow each other by rank
EVEN_CTA = ".reg .b32 even; and.b32 even, $2, 0xfeffffff; "


@constexpr_function
def coordinate_list(first: int, rank: int) -> str:
    """ "{$3, $4}": the operands of `rank` coordinates, from operand `first` on."""
    if not 1 <= rank <= 5:
        raise OperandError(f"tma: {rank} coordinates; a tensor has 1 to 5 dimensions")
    return "{" + ", ".join(f"${first + i}" for i in range(rank)) + "}"


@constexpr_function
def mask_text(operand: int) -> str:
    """The 16-bit register `ctas` from the i32 operand of a multicast."""
    return f".reg .b16 ctas; cvt.u16.u32 ctas, ${operand};"


@constexpr_function
def load_text(rank: int, multicast: bool, hinted: bool, issuer: str, sm: int, pair: bool = False) -> str:
    """Operands: destination, tensor map, barrier, coordinates, then the mask and the policy where given."""
    mnemonic = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    mnemonic += (".multicast::cluster" if multicast else "") + (".cta_group::2" if pair else "")
    mnemonic += ".L2::cache_hint" if hinted else ""
    operands = (
        f"[$0], [$1, {coordinate_list(3, rank)}], [{'even' if pair else '$2'}]"
        + (", ctas" if multicast else "")
        + (f", ${3 + rank + multicast}" if hinted else "")
    )
    declarations = (mask_text(3 + rank) if multicast else "") + (EVEN_CTA if pair else "")
    return issued(f"{mnemonic} {operands};", issuer, sm, declarations)


@constexpr_function
def store_text(rank: int, reduction: str | None, hinted: bool, issuer: str, sm: int) -> str:
    """Operands: tensor map, source, coordinates, then the policy where given."""
    if reduction is not None and reduction not in _REDUCTIONS:
        raise OperandError(f"tma.reduce_tensor(operation={reduction!r}): one of {', '.join(_REDUCTIONS)}")
    head = "cp" if reduction is None else "cp.reduce"
    operation = "" if reduction is None else f".{reduction}"
    hint = ".L2::cache_hint" if hinted else ""
    mnemonic = f"{head}.async.bulk.tensor.{rank}d.global.shared::cta{operation}.tile.bulk_group{hint}"
    return issued(
        f"{mnemonic} [$0, {coordinate_list(2, rank)}], [$1]" + (f", ${2 + rank}" if hinted else "") + ";", issuer, sm
    )


@constexpr_function
def prefetch_text(rank: int, hinted: bool, issuer: str, sm: int) -> str:
    hint = ".L2::cache_hint" if hinted else ""
    policy = f", ${1 + rank}" if hinted else ""
    return issued(
        f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile{hint} [$0, {coordinate_list(1, rank)}]{policy};",
        issuer,
        sm,
    )


@constexpr_function
def load_bulk_text(multicast: bool, hinted: bool, issuer: str, sm: int) -> str:
    """Operands: destination, source, bytes, barrier, then the mask and the policy where given."""
    mnemonic = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    mnemonic += (".multicast::cluster" if multicast else "") + (".L2::cache_hint" if hinted else "")
    operands = "[$0], [$1], $2, [$3]" + (", ctas" if multicast else "") + (f", ${4 + multicast}" if hinted else "")
    return issued(f"{mnemonic} {operands};", issuer, sm, mask_text(4) if multicast else "")


@constexpr_function
def store_bulk_text(hinted: bool, issuer: str, sm: int) -> str:
    hint, policy = (".L2::cache_hint", ", $3") if hinted else ("", "")
    return issued(f"cp.async.bulk.global.shared::cta.bulk_group{hint} [$0], [$1], $2{policy};", issuer, sm)


@constexpr_function
def reduction_suffix(operation: str, kind: str, table: Mapping[str, Collection[str]], name: str) -> str:
    if operation not in table:
        raise OperandError(f"tma.{name}(operation={operation!r}): one of {', '.join(table)}")
    if kind not in table[operation]:
        raise OperandError(
            f"tma.{name}(operation={operation!r}, kind={kind!r}): {operation} takes {', '.join(table[operation])}"
        )
    return f"{operation}{'.noftz' if kind in ('f16', 'bf16') and operation == 'add' else ''}.{kind}"


@constexpr_function
def reduce_bulk_text(operation: str, kind: str, hinted: bool, issuer: str, sm: int) -> str:
    suffix = reduction_suffix(operation, kind, BULK_REDUCTIONS, "reduce_bulk")
    hint, policy = (".L2::cache_hint", ", $3") if hinted else ("", "")
    return issued(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group{hint}.{suffix} [$0], [$1], $2{policy};", issuer, sm
    )


@constexpr_function
def reduce_bulk_cluster_text(operation: str, kind: str, issuer: str, sm: int) -> str:
    suffix = reduction_suffix(operation, kind, CLUSTER_REDUCTIONS, "reduce_bulk_cluster")
    return issued(
        f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{suffix} [$0], [$1], $2, [$3];",
        issuer,
        sm,
    )


@constexpr_function
def wait_group_text(pending: int, read: bool) -> str:
    if pending < 0:
        raise OperandError(
            f"tma.wait_group{'_read' if read else ''}({pending}): the number of groups that may still be in flight, 0 "
            "or more"
        )
    return f"cp.async.bulk.wait_group{'.read' if read else ''} {pending};"


@constexpr_function
def proxy_text(space: str) -> str:
    if space not in ("", "shared::cta", "shared::cluster", "global"):
        raise OperandError(
            f"tma.fence_proxy_async(space={space!r}): 'shared::cta', 'shared::cluster', 'global', or '' for all"
        )
    return f"fence.proxy.async{'.' if space else ''}{space};"


@constexpr_function
def tensormap_fence_text(semantics: str, scope: str) -> str:
    if scope not in ("cta", "cluster", "gpu", "sys"):
        raise OperandError(f"tma.fence_tensormap_{semantics}(scope={scope!r}): 'cta', 'cluster', 'gpu' or 'sys'")
    return f"fence.proxy.tensormap::generic.{semantics}.{scope}" + (" [$0], 128;" if semantics == "acquire" else ";")


@constexpr_function
def policy_text(priority: str, fraction: float) -> str:
    if priority not in _PRIORITIES:
        raise OperandError(f"tma.create_policy(priority={priority!r}): one of {', '.join(_PRIORITIES)}")
    if not 0 < fraction <= 1:
        raise OperandError(f"tma.create_policy(fraction={fraction}): above 0, at most 1")
    return f"createpolicy.fractional.L2::{priority}.b64 $0, {float(fraction)};"


@triton.jit
def load_tensor(
    destination,
    tensor_map,
    coordinates,
    bar,
    multicast=None,
    cache_hint=None,
    issuer: tl.constexpr = "warp",
    pair: tl.constexpr = False,
):
    """`cp.async.bulk.tensor` global -> shared: the box at `coordinates` (elements outside the tensor are filled),
    counted on `bar` in bytes.

    The fastest coordinate times the element size must be a multiple of 16 bytes (otherwise: an illegal instruction;
    seen on the H200). The whole box counts, its filled part too. `multicast` (i32, one bit a CTA of the cluster) writes
    the same box to the same place in each of those CTAs and counts on the barrier at the same place there. `cache_hint`
    is a u64 of `create_policy`. `pair` counts on the barrier at the same place in the CTA of even rank of the pair
    (sm_100). One thread issues a copy. sm_90. PTX ISA "cp.async.bulk.tensor".
    """
    require("cp.async.bulk.tensor with .cta_group", 100) if pair else require("cp.async.bulk.tensor", 90)
    asm(
        load_text(len(coordinates), multicast is not None, cache_hint is not None, issuer, arch(), pair),
        ("r", "l", "r", "r", "r", "l"),
        [destination, tensor_map, bar, coordinates, multicast, cache_hint],
    )


@triton.jit
def store_tensor(tensor_map, coordinates, source, cache_hint=None, issuer: tl.constexpr = "warp"):
    """`cp.async.bulk.tensor` shared -> global: writes the box at `coordinates` (elements outside the tensor are
    dropped), in a bulk group.

    No coordinate may be negative, and the fastest one times the element size must be a multiple of 16 bytes (otherwise:
    an illegal instruction). Rows are
    written in pieces of 16 bytes: where the tensor's row ends inside one, the rest of that piece is written too (seen
    on the H200).

    sm_90. PTX ISA "cp.async.bulk.tensor".
    """
    require("cp.async.bulk.tensor", 90)
    asm(
        store_text(len(coordinates), None, cache_hint is not None, issuer, arch()),
        ("l", "r", "r", "l"),
        [tensor_map, source, coordinates, cache_hint],
    )


@triton.jit
def reduce_tensor(
    tensor_map, coordinates, source, operation: tl.constexpr, cache_hint=None, issuer: tl.constexpr = "warp"
):
    """`cp.reduce.async.bulk.tensor` shared -> global: combines the box with the tensor, element by element and
    atomically. sm_90.

    Operands as in `store_tensor`. `operation` is "add", "min", "max", "inc", "dec", "and", "or" or "xor"; the element
    type is the tensor map's. PTX ISA "cp.reduce.async.bulk.tensor".
    """
    require("cp.reduce.async.bulk.tensor", 90)
    asm(
        store_text(len(coordinates), operation, cache_hint is not None, issuer, arch()),
        ("l", "r", "r", "l"),
        [tensor_map, source, coordinates, cache_hint],
    )


@triton.jit
def prefetch_tensor(tensor_map, coordinates, cache_hint=None, issuer: tl.constexpr = "warp"):
    """`cp.async.bulk.prefetch.tensor`: brings the box at `coordinates` into L2. sm_90. PTX ISA
    "cp.async.bulk.prefetch.tensor"."""
    require("cp.async.bulk.prefetch.tensor", 90)
    asm(
        prefetch_text(len(coordinates), cache_hint is not None, issuer, arch()),
        ("l", "r", "l"),
        [tensor_map, coordinates, cache_hint],
    )


@triton.jit
def prefetch_tensormap(tensor_map, issuer: tl.constexpr = "warp"):
    """`prefetch.tensormap`: brings the tensor map itself into the descriptor cache. sm_90. PTX ISA "prefetch"."""
    require("prefetch.tensormap", 90)
    asm(issued("prefetch.tensormap [$0];", issuer, arch()), "l", [tensor_map])


@triton.jit
def load_bulk(destination, source, nbytes, bar, multicast=None, cache_hint=None, issuer: tl.constexpr = "warp"):
    """`cp.async.bulk` global -> shared: `nbytes` (i32) from the pointer `source` (16-byte aligned), counted on `bar` in
    bytes.

    `multicast` and `cache_hint` as in `load_tensor`. sm_90. PTX ISA "cp.async.bulk".
    """
    require("cp.async.bulk", 90)
    asm(
        load_bulk_text(multicast is not None, cache_hint is not None, issuer, arch()),
        ("r", "l", "r", "r", "r", "l"),
        [destination, source, nbytes, bar, multicast, cache_hint],
    )


@triton.jit
def store_bulk(destination, source, nbytes, cache_hint=None, issuer: tl.constexpr = "warp"):
    """`cp.async.bulk` shared -> global: `nbytes` (i32) to the pointer `destination` (16-byte aligned), in a bulk group.
    sm_90.

    PTX ISA "cp.async.bulk".
    """
    require("cp.async.bulk", 90)
    asm(
        store_bulk_text(cache_hint is not None, issuer, arch()),
        ("l", "r", "r", "l"),
        [destination, source, nbytes, cache_hint],
    )


@triton.jit
def copy_bulk_cluster(remote, source, nbytes, remote_bar, issuer: tl.constexpr = "warp"):
    """`cp.async.bulk` shared::cta -> shared::cluster: `nbytes` (i32) into another CTA, counted in bytes on that CTA's
    `remote_bar`.

    `remote` and `remote_bar` come from `cluster.mapa` with the same CTA. sm_90. PTX ISA "cp.async.bulk".
    """
    require("cp.async.bulk", 90)
    asm(
        issued(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
            issuer,
            arch(),
        ),
        "r,r,r,r",
        [remote, source, nbytes, remote_bar],
    )


@triton.jit
def reduce_bulk(
    destination,
    source,
    nbytes,
    operation: tl.constexpr,
    kind: tl.constexpr,
    cache_hint=None,
    issuer: tl.constexpr = "warp",
):
    """`cp.reduce.async.bulk` shared -> global: combines an array with the one at the pointer `destination`, atomically,
    in a bulk group.

    `operation` and the PTX element type `kind`: add (u32 s32 u64 f16 bf16 f32 f64), min and max (u32 s32 u64 s64 f16
    bf16), inc and dec (u32), and, or, xor (b32 b64). sm_90. PTX ISA "cp.reduce.async.bulk".
    """
    require("cp.reduce.async.bulk", 90)
    asm(
        reduce_bulk_text(operation, kind, cache_hint is not None, issuer, arch()),
        ("l", "r", "r", "l"),
        [destination, source, nbytes, cache_hint],
    )


@triton.jit
def reduce_bulk_cluster(
    remote, source, nbytes, remote_bar, operation: tl.constexpr, kind: tl.constexpr, issuer: tl.constexpr = "warp"
):
    """`cp.reduce.async.bulk` shared::cta -> shared::cluster: combines with the remote values; operands as in
    `copy_bulk_cluster`. sm_90.

    add (u32 s32 u64), min and max (u32 s32), inc and dec (u32), and, or, xor (b32). PTX ISA "cp.reduce.async.bulk".
    """
    require("cp.reduce.async.bulk", 90)
    asm(reduce_bulk_cluster_text(operation, kind, issuer, arch()), "r,r,r,r", [remote, source, nbytes, remote_bar])


@triton.jit
def prefetch_bulk(source, nbytes, issuer: tl.constexpr = "warp"):
    """`cp.async.bulk.prefetch.L2`: brings `nbytes` (i32) from the pointer `source` into L2. sm_90. PTX ISA
    "cp.async.bulk.prefetch"."""
    require("cp.async.bulk.prefetch", 90)
    asm(issued("cp.async.bulk.prefetch.L2.global [$0], $1;", issuer, arch()), "l,r", [source, nbytes])


@triton.jit
def commit_group():
    """`cp.async.bulk.commit_group`: closes each thread's group of the stores and reductions that it issued. sm_90.

    Every thread executes it: groups belong to threads, and one without stores is complete at once. PTX ISA
    "cp.async.bulk.commit_group".
    """
    require("cp.async.bulk.commit_group", 90)
    asm("cp.async.bulk.commit_group;", "", [])


@triton.jit
def wait_group(pending: tl.constexpr = 0):
    """`cp.async.bulk.wait_group`: waits until at most `pending` of this thread's latest groups are incomplete (their
    writes done). sm_90.

    Only the issuing thread can wait for its groups; other threads need a barrier after that. PTX ISA
    "cp.async.bulk.wait_group".
    """
    require("cp.async.bulk.wait_group", 90)
    asm(wait_group_text(pending, False), "", [])


@triton.jit
def wait_group_read(pending: tl.constexpr = 0):
    """`cp.async.bulk.wait_group.read`: as `wait_group`, but only until the shared memory has been read and may be
    written again. sm_90."""
    require("cp.async.bulk.wait_group", 90)
    asm(wait_group_text(pending, True), "", [])


@triton.jit
def fence_proxy_async(space: tl.constexpr = "shared::cta"):
    """`fence.proxy.async`: orders this thread's ordinary accesses before later ones by the copy engine and the tensor
    cores. sm_90.

    `space` is "shared::cta", "shared::cluster", "global" or "" (all). PTX ISA "membar / fence".
    """
    require("fence.proxy.async", 90)
    asm(proxy_text(space), "", [])


@triton.jit
def fence_tensormap_acquire(tensor_map, scope: tl.constexpr = "gpu"):
    """`fence.proxy.tensormap::generic.acquire`: later uses of the tensor map see the writes before the matching
    release. sm_90.

    Every thread executes it. `scope` is "cta", "cluster", "gpu", or "sys" for a map that the host wrote. PTX ISA
    "membar / fence".
    """
    require("fence.proxy.tensormap", 90)
    asm(tensormap_fence_text("acquire", scope), "l", [tensor_map])


@triton.jit
def fence_tensormap_release(scope: tl.constexpr = "gpu"):
    """`fence.proxy.tensormap::generic.release`: publishes this thread's writes to tensor maps. sm_90. PTX ISA "membar /
    fence"."""
    require("fence.proxy.tensormap", 90)
    asm(tensormap_fence_text("release", scope), "", [])


@triton.jit
def create_policy(priority: tl.constexpr, fraction: tl.constexpr = 1.0):
    """`createpolicy.fractional` -> u64: an L2 eviction policy for the `cache_hint` of a copy. sm_80.

    `priority` is "evict_first", "evict_last", "evict_normal" or "evict_unchanged", for that `fraction` of the accesses.
    PTX ISA "createpolicy".
    """
    require("createpolicy", 80)
    return asm(policy_text(priority, fraction), "=l", [], tl.uint64, is_pure=True)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


def _each(i: Instruction, *operands: Register | None) -> Iterator[tuple[int, ...]]:
    """(thread, values of the operands) for each active thread; None stays."""
    columns = [lanes(x, i.active) if x is not None else [None] * int(i.active.sum()) for x in operands]
    return zip(i.threads, *columns)


def _coordinates(i: Instruction, coordinates: Iterable[Register]) -> list[tuple[int, ...]]:
    """One tuple of signed element offsets for each active thread."""
    parts = [
        np.broadcast_to(
            np.asarray(x).astype(np.uint32) if not isinstance(x, int) else np.uint32(x & 0xFFFFFFFF), i.active.shape
        )
        for x in coordinates
    ]
    return list(zip(*(part.view(np.int32)[i.active].tolist() for part in parts)))


_RANK = "{rank:1d|2d|3d|4d|5d}"
_HINT = "{hint:L2::cache_hint}?"


@meaning(
    f"cp.async.bulk.tensor.{_RANK}.{{to:shared::cluster|shared::cta}}.global.{{mode:tile}}?.mbarrier::complete_tx::bytes.{{multicast:multicast::cluster}}?.{{pair:cta_group::2}}?.{_HINT}",
    destinations=0,
)
def _load_tensor(t: Machine, i: Instruction, shared: Register, place: Register, bar: Register, *rest: Register) -> None:
    tensor_maps, coordinates = place
    masks = rest[0] if i.fields["multicast"] else None
    for (thread, address, tensor_map, at, mask), where in zip(
        _each(i, shared, tensor_maps, bar, masks), _coordinates(i, coordinates)
    ):
        t.tensor_copy("load", tensor_map, where, address, thread=thread, barrier=at, multicast=mask)


@meaning(
    f"cp.async.bulk.tensor.{_RANK}.global.shared::cta.{{mode:tile}}?.bulk_group.{_HINT}",
    f"cp.reduce.async.bulk.tensor.{_RANK}.global.shared::cta.{{operation:{'|'.join(_REDUCTIONS)}}}.{{mode:tile}}?.bulk_group.{_HINT}",
    destinations=0,
)
def _store_tensor(t: Machine, i: Instruction, place: Register, shared: Register, policy: Register = None) -> None:
    tensor_maps, coordinates = place
    for (thread, tensor_map, address), where in zip(_each(i, tensor_maps, shared), _coordinates(i, coordinates)):
        t.tensor_copy("store", tensor_map, where, address, thread=thread, reduction=i.fields.get("operation"))


@meaning(
    f"cp.async.bulk.prefetch.tensor.{_RANK}.L2.global.{{mode:tile}}?.{_HINT}",
    f"cp.async.bulk.prefetch.L2.global.{_HINT}",
    "prefetch.tensormap",
    destinations=0,
)
def _prefetch(t: Machine, i: Instruction, *operands: Register) -> None:
    """Do nothing: caches do not affect results."""


@meaning(
    f"cp.async.bulk.{{to:shared::cluster|shared::cta}}.global.mbarrier::complete_tx::bytes.{{multicast:multicast::cluster}}?.{_HINT}",
    destinations=0,
)
def _load_bulk(
    t: Machine, i: Instruction, shared: Register, source: Register, nbytes: Register, bar: Register, *rest: Register
) -> None:
    masks = rest[0] if i.fields["multicast"] else None
    for thread, to, start, size, at, mask in _each(i, shared, source, nbytes, bar, masks):
        t.bulk_copy(("shared", to), ("global", start), size, thread=thread, barrier=at, multicast=mask)


def _reduction(i: Instruction) -> tuple[str, str] | None:
    return (i.fields["operation"] or "", i.fields["type"] or "") if i.fields.get("operation") else None


_REDUCTION = f"{{operation:{'|'.join(_REDUCTIONS)}}}.{{noftz:noftz}}?.{{type:u32|s32|u64|s64|f16|bf16|f32|f64|b32|b64}}"


@meaning(
    f"cp.async.bulk.global.shared::cta.bulk_group.{_HINT}",
    f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{_HINT}.{_REDUCTION}",
    destinations=0,
)
def _store_bulk(
    t: Machine, i: Instruction, destination: Register, shared: Register, nbytes: Register, policy: Register = None
) -> None:
    for thread, to, start, size in _each(i, destination, shared, nbytes):
        t.bulk_copy(("global", to), ("shared", start), size, thread=thread, reduction=_reduction(i))


@meaning(
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes",
    f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{_REDUCTION}",
    destinations=0,
)
def _copy_cluster(
    t: Machine, i: Instruction, remote: Register, shared: Register, nbytes: Register, bar: Register
) -> None:
    for thread, to, start, size, at in _each(i, remote, shared, nbytes, bar):
        t.bulk_copy(("shared", to), ("shared", start), size, thread=thread, barrier=at, reduction=_reduction(i))


@meaning("cp.async.bulk.commit_group", destinations=0)
def _commit_group(t: Machine, i: Instruction) -> None:
    t.commit_bulk_group(i.active)


@meaning("cp.async.bulk.wait_group.{read:read}?", destinations=0)
def _wait_group(t: Machine, i: Instruction, pending: Register) -> Waits:
    wait = t.wait_bulk_group(max(lanes(pending, i.active)), i.fields["read"] is not None, i.active)
    if wait is not None:
        yield wait


@meaning(
    f"createpolicy.fractional.{{primary:{'|'.join('L2::' + name for name in _PRIORITIES)}}}.{{secondary:L2::evict_first|L2::evict_unchanged}}?.b64"  # noqa: E501
)
def _createpolicy(t: Machine, i: Instruction, fraction: Register = 1.0) -> Register:
    """Return any number: a policy only reaches cache hints, which have no effect here."""
    return _PRIORITIES.index((i.fields["primary"] or "").removeprefix("L2::")) + 1
