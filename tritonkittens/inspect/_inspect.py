"""Assembly of the report."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from triton.backends.nvidia.compiler import sm_arch_from_capability

from tritonkittens.launch.fallbacks import mma_sync_products

from . import _roles, _sass, _tiles, _tools, _ttgir
from ._roles import distinct
from .report import Buffer, Loop, Report, Role

# Counted in addition to the tensor-core instructions, in this order.
_COUNTED = (
    "UTMALDG",
    "UTMASTG",
    "UTMAREDG",
    "UBLKCP",
    "UBLKRED",
    "LDTM",
    "STTM",
    "UTCCP",
    "LDS",
    "STS",
    "LDSM",
    "STSM",
    "ATOMS",
    "LDGSTS",
    "LDG",
    "STG",
    "LDL",
    "STL",
    "SHFL",
    "MUFU",
    "BAR",
    "SYNCS",
    "WARPGROUP.ARRIVE",
    "WARPGROUP.DEPBAR",
)
# By the ends of their folders, because a kernel from Triton's cache can name the files of another installation.
_LIBRARIES = ("/tritonkittens/lang/", "/triton/language/", "/triton/experimental/")


def inspect(compiled: Any, roles: Sequence[str] | None = None, buffers: Sequence[str] | None = None) -> Report:
    """Report the compiler's results for a kernel: registers, spills, memory, roles and tensor-core loops. Needs no
    GPU.

    Args:
        compiled: a Triton `CompiledKernel` for an NVIDIA target: the result of `triton.compile(...)` or
            `kernel.warmup(...)`.
        roles: names for the default partition and the worker partitions, in the order of `warp_specialize`. By
            default, a role has the name of the Python function that it calls.
        buffers: names for the allocations in shared and tensor memory, in the kernel's order. By default, a buffer
            has the name of the Python variable to which its allocation was first bound.

    Returns:
        A `Report`.

    Raises:
        TypeError: `compiled` has no ttgir, ptx and cubin.
        ValueError: the number of names differs from the kernel's roles or buffers.
        RuntimeError: nvdisasm or ptxas is missing or fails.

    Example::

        report = inspect(kernel.compile(x, y, arch="sm_90a"))
        print(report.table())
    """
    asm = _stages(compiled)
    metadata = compiled.metadata
    module = _ttgir.parse(asm["ttgir"], asm.get("source", ""))
    names, buffer_names = _role_names(module, roles), _buffer_names(module, buffers)
    graph = _sass.Graph(*_sass.parse(*_tools.disassemble(asm["cubin"])))
    log = _tools.assemble(asm["ptx"], metadata)
    blocks = _roles.assign(graph, module)

    everything = [i for block in graph.blocks for i in block]
    mma, counts = _count(everything)
    partitions = [module.default, *module.workers]
    return Report(
        kernel=metadata.name,
        arch=sm_arch_from_capability(metadata.target.arch),
        warps=metadata.num_warps,
        registers=log.registers,
        register_cap=min(65536 // (32 * metadata.num_warps) // 8 * 8, metadata.maxnreg or 255, 255),
        reallocation_requested=any(p.requested_registers is not None for p in module.workers),
        reallocated=any(i.base == "USETMAXREG" for i in everything),
        stack_bytes=log.stack_bytes,
        spill_store_bytes=log.spill_store_bytes,
        spill_load_bytes=log.spill_load_bytes,
        spill_instructions=sum(i.base in {"LDL", "STL"} for i in everything),
        shared_bytes=metadata.shared,
        tensor_columns=metadata.tmem_size or 0,
        wgmma_serialized=any("serialized" in r for r in log.remarks) if "wgmma.mma_async" in asm["ptx"] else None,
        roles=tuple(
            _role(name, p, graph, blocks.get(k), log.registers) for k, (name, p) in enumerate(zip(names, partitions))
        ),
        buffers=tuple(_buffer(a, name) for a, name in zip(module.allocations, buffer_names, strict=True)),
        loops=tuple(_loop(loop, graph, blocks, names) for loop in graph.main_loops),
        mma=mma,
        counts=counts,
        remarks=log.remarks,
        fallbacks=mma_sync_products(asm["ttgir"]),
    )


def _stages(compiled: Any) -> Mapping[str, Any]:
    """Return the results of the compiler's stages. Raises TypeError where one is missing."""
    asm = getattr(compiled, "asm", None) or {}
    missing = [stage for stage in ("ttgir", "ptx", "cubin") if stage not in asm]
    if missing:
        raise TypeError(
            f"inspect: {compiled!r} has no {', '.join(missing)}; it takes the CompiledKernel of an NVIDIA target"
        )
    return asm


def _buffer_names(module: _ttgir.Module, given: Sequence[str] | None) -> list[str | None]:
    if given is None:
        return [allocation.name for allocation in module.allocations]
    if len(given) != len(module.allocations):
        raise ValueError(
            f"inspect: buffers={tuple(given)!r} names {len(given)} buffers; {module.kernel} has "
            f"{len(module.allocations)}"
        )
    return list(given)


def _role_names(module: _ttgir.Module, given: Sequence[str] | None) -> list[str]:
    number = 1 + len(module.workers)
    if given is not None:
        if len(given) != number:
            raise ValueError(
                f"inspect: roles={tuple(given)!r} names {len(given)} roles; {module.kernel} has {number}, default first"
            )
        return list(given)
    if not module.specialized:
        return ["kernel"]
    names = [module.default.function or "default"]
    names += [worker.function or f"partition{k}" for k, worker in enumerate(module.workers)]
    return distinct(names)


def _count(instructions: Iterable[_sass.Instruction]) -> tuple[dict[str, int], dict[str, int]]:
    """Count tensor-core instructions and the other ones of interest, by opcode."""
    mma: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for i in instructions:
        if i.is_mma:
            mma[i.base] += 1
        counts[".".join(i.opcode.split(".")[:2]) if i.base == "WARPGROUP" else i.base] += 1
    return dict(sorted(mma.items())), {name: counts[name] for name in _COUNTED if counts[name]}


def _role(
    name: str, partition: _ttgir.Partition, graph: _sass.Graph, blocks: set[int] | None, compiled: int | None
) -> Role:
    if blocks is None:
        return Role(name, partition.warps, partition.requested_registers, None, None, None, None, None)
    instructions = [i for n in blocks for i in graph.blocks[n]]
    mma, counts = _count(instructions)
    live = [i.live for i in instructions if i.live is not None]
    registers = _roles.registers_in_force(graph, blocks, compiled) if compiled is not None else None
    return Role(
        name,
        partition.warps,
        partition.requested_registers,
        registers,
        max(live, default=None),
        len(instructions),
        mma,
        counts,
    )


def _loop(loop: _sass.Loop, graph: _sass.Graph, blocks: dict[int, set[int]], names: list[str]) -> Loop:
    instructions = [i for n in sorted(loop.blocks) for i in graph.blocks[n]]
    mma, counts = _count(instructions)
    roles = tuple(names[k] for k, region in sorted(blocks.items()) if loop.header in region)
    return Loop(roles, _source(next(i.frames for i in instructions if i.is_mma)), len(instructions), mma, counts)


def _source(frames: _sass.Frames) -> str | None:
    """Return the innermost line that is neither Triton's nor the language's own."""
    if not frames:
        return None
    user = [f for f in frames if not any(library in f[0] for library in _LIBRARIES)]
    file, line = (user or frames)[0]
    return f"{os.path.basename(file)}:{line}"


def _bits(dtype: str) -> int | None:
    """Return the bits of MLIR's type names: bf16, f32, f8E4M3FN, i64. An i1 takes a byte in memory."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return max(int(found[1]), 8) if found and found[1] != "4" else 4 if found else None


def _buffer(a: _ttgir.Allocation, name: str | None) -> Buffer:
    bits = _bits(a.dtype)
    elements = 1
    for n in a.shape:
        elements *= n
    layout = a.layout
    barrier = a.space == "shared" and a.dtype == "i64" and a.shape[-1] == 1
    padded = layout is not None and layout.kind == "padded_shared"
    columns = None
    if (
        a.space == "tensor"
        and layout is not None
        and layout.integer("blockM") == 128
        and bits is not None
        and len(a.shape) >= 2
    ):
        columns = elements // 128 * bits // 32  # 128 lanes by 32-bit columns
    slots = a.shape[0] if a.indexed else None
    return Buffer(
        name=name,
        space="barrier" if barrier else a.space,
        dtype=a.dtype,
        shape=a.shape,
        bytes=None if padded or bits is None else elements * bits // 8,
        slots=slots,
        stages=slots if a.indexed_at_run_time else None,
        columns=columns,
        layout=None if barrier else _layout_text(layout),
        bank_conflicts=_tiles.bank_conflicts(layout, a.shape, bits)
        if a.space == "shared" and not barrier and bits
        else None,
        source=_source(a.frames),
    )


def _layout_text(layout: _ttgir.Layout | None) -> str | None:
    if layout is None:
        return None
    if layout.kind == "nvmma_shared":
        transposed = ", transposed" if layout.fields.get("transposed") == "true" else ""
        return f"swizzle {layout.fields.get('swizzlingByteWidth')} B{transposed}"
    return layout.kind
